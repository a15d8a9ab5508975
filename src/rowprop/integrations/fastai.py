"""fastai and tsai: a callback that has each training step backpropagate the rows that a selector keeps."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, cast

from torch import Tensor

from rowprop.batch import num_rows
from rowprop.checks import check_callable, signature_of
from rowprop.distributed import Local, averages_gradients
from rowprop.errors import InvalidInput
from rowprop.integrations.shared import (
    ClassesFn,
    check_given,
    loss_shown,
    losses_of_rows,
    module_of,
    numbers_of,
    refuse_history,
    weights_of,
)
from rowprop.scoring import LossesFn
from rowprop.selection.base import Selector
from rowprop.selection.common import check_fraction
from rowprop.selection.fixed import Everything, LossMass
from rowprop.step.record import Record
from rowprop.step.selective import SelectiveBackprop as Step

_learner: Any = module_of("fastai", "learner", "fastai")
_Callback: Any = _learner.Callback
_Metric: Any = _learner.Metric
_unreduced: Any = module_of("fastai", "layers", "fastai").NoneReduce


class SelectiveBackprop(_Callback):
    """Train on the rows that a selector keeps: one line in the learner, ``cbs=SelectiveBackprop(selector)``.

    In training the callback stands for the part of a batch from the forward to the loss: it computes the losses of all
    rows, and the learner backpropagates those that are kept. Mixed precision, gradient accumulation, clipping and
    optimizers stay fastai's, and so do validation and prediction. The learner's ``loss`` is the loss of all rows,
    which the recorder shows as ``train_loss``; where a scorer leaves it unknown, that of the kept rows.

    The table of a fit shows the means of each epoch: ``loss_all`` and ``loss_kept``, the losses of all rows and of the
    kept ones, and the kept share as ``kept``.

    After ``learn.lr_find()`` the step is where it was before, as the weights are.

    Args:
        selector: Chooses the rows, e.g. ``rowprop.TopK(keep=0.5)``.
        losses_fn: ``(model, batch)`` to unreduced losses, shape ``(N,)``; the batch is ``(*xb, *yb)``. ``learn.pred``
            is then None in training. Default None: the learner's own loss function, unreduced. Of losses ``(N,
            ...)``, of several places in a row, each row has the mean.
        classes_fn: Returns the class of each row of a batch, shape ``(N,)``, int64: for selectors that need it, and
            then ``numbers`` has the kept share of each class of the batch, ``kept/CLASS``. Where the data have a
            number of classes, ``dls.c``, the table shows them. Default None.
        **settings: Those of :class:`rowprop.SelectiveBackprop`, except ``accumulate_to`` and ``history``. Behind DDP
            ``ranks`` is ``Local()`` by default. Progress, which schedules follow, is ``learn.pct_train``.

    Raises:
        MissingExtra: On import, where fastai is not installed.
        InvalidInput: A setting is wrong; in a fit, the learner's loss function has no mean to replace, or the learner
            has two such callbacks.

    Attributes:
        step: The :class:`rowprop.SelectiveBackprop` of the last fit; None before the first.
        record: The :class:`rowprop.Record` of the last step; None before the first.
        numbers: Those of the last step, under their names in the table; losses are 0-d tensors.

    Exactness:
        The gradient is that of :class:`rowprop.SelectiveBackprop`.
    """

    order = 12  # MixedPrecision has 10, DistributedTrainer 11
    _stateattrs = ("step", "record", "numbers", "_sums", "_saved", "_begun", "_before")

    def __init__(
        self,
        selector: Selector,
        losses_fn: LossesFn | None = None,
        *,
        classes_fn: ClassesFn | None = None,
        **settings: Any,
    ) -> None:
        check_given(losses_fn, classes_fn, settings, "fastai", "the callback GradientAccumulation")
        refuse_history(settings, "fastai")
        super().__init__()
        self._init_state()
        self._selector, self._losses_fn, self._classes_fn = selector, losses_fn, classes_fn
        self._settings = settings

    def _init_state(self) -> None:
        """Set the attributes that fastai does not export; fastai calls it."""
        super()._init_state()
        self.step: Step | None = None
        self.record: Record | None = None
        self.numbers: dict[str, Tensor | float] = {}
        self._sums: dict[str, tuple[Tensor | float, int]] = {}
        self._saved: dict[str, Any] | None = None
        self._begun = False
        self._before: dict[str, Any] | None = None  # the step's state before a search for a learning rate

    def __setattr__(self, name: str, value: Any) -> None:
        """Leave the learner as it was when the callback is removed, after an interrupted fit too."""
        if name == "learn" and value is None and self.learn is not None:
            self.after_fit()
        super().__setattr__(name, value)

    def before_fit(self) -> None:
        """Stand in for the batches of the learner, and add the numbers to its table."""
        learn = self.learn
        if sum(isinstance(other, SelectiveBackprop) for other in learn.cbs) > 1:
            raise InvalidInput(
                "the learner got two callbacks SelectiveBackprop but one was needed; remove one of them."
            )
        own = cast(Any, type(learn))._do_one_batch

        def one_batch() -> None:
            (self._train if learn.training and len(learn.yb) else own)(learn)

        learn._do_one_batch = one_batch
        self._begun, self._before = False, None
        # The lock is held in a validation outside of a fit, whose results stay as they are.
        ours = [] if learn.lock.locked() else [_Mean(self, name) for name in self._names()]
        learn.metrics = [*_others(learn.metrics), *ours]

    def before_train(self) -> None:
        """Begin the means of an epoch."""
        self._sums = {}

    def after_fit(self) -> None:
        """Leave the learner as it was."""
        if self._before is not None:  # LRFinder restores the weights in the same way
            cast(Step, self.step).load_state_dict(self._before)
            self._before = None
        vars(self.learn).pop("_do_one_batch", None)
        self.learn.metrics = _others(self.learn.metrics)

    def state_dict(self) -> dict[str, Any]:
        """Return the step's state, to be saved beside ``learn.save``, which has no place for it."""
        return (self._saved or {}) if self.step is None else self.step.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on where the state was taken, bit for bit, after ``learn.load``."""
        if self.step is None:
            self._saved = dict(state_dict)
        else:
            self.step.load_state_dict(state_dict)

    def mean_of(self, name: str) -> Any:
        """Return the mean of one of the numbers over the epoch: of losses over their rows; NaN where no step has it."""
        total, count = self._sums.get(name, (math.nan, 1))
        return total / count

    def _names(self) -> list[str]:
        names = ["loss_all", "loss_kept", "kept"]
        count = 0 if self._classes_fn is None else getattr(self.learn.dls, "c", 0)
        return names + [f"kept/{number}" for number in range(count or 0)]

    def _begin(self, learn: Any) -> None:
        """Make the step of a fit, whose model fastai may have wrapped anew."""
        state = self.state_dict()
        settings = dict(self._settings)
        if averages_gradients(learn.model):
            settings.setdefault("ranks", Local())
        losses_fn = losses_of_rows(self._losses_fn or self._losses, settings)
        step = Step(learn.model, losses_fn, self._selector, **settings)
        if state:
            step.load_state_dict(state)
        self.step, self._begun = step, True
        self._before = step.state_dict() if hasattr(learn, "lr_finder") else None

    def _train(self, learn: Any) -> None:
        """Run a batch as the learner does, from the forward to the update."""
        if not self._begun:
            self._begin(learn)
        step, batch = cast(Step, self.step), (*learn.xb, *learn.yb)
        classes = None if self._classes_fn is None else self._classes_fn(batch)
        progress = min(1.0, learn.pct_train) if step.total_steps is None else None
        self._batch, learn.pred = batch, None
        try:
            learn.loss_grad, self.record = step(batch, learn.iter, classes=classes, progress=progress)
        finally:
            del self._batch
        learn.loss = loss_shown(step, self.record)
        self.numbers = numbers_of(self.record, classes)
        weights = weights_of(self.record)
        for name, value in self.numbers.items():
            if weight := weights.get(name, 1):
                total, count = self._sums.get(name, (0.0, 0))
                self._sums[name] = total + value * weight, count + weight
        learn("after_loss")
        learn._do_grad_opt()

    def _losses(self, model: Any, batch: Any) -> Tensor:
        """The losses of the learner's own loss function, of all rows or of some."""
        learn, inputs = self.learn, len(self.learn.xb)
        _check_mean(learn.loss_func)
        whole = learn.pred
        learn.pred = model(*batch[:inputs])
        learn("after_pred")
        with _unreduced(learn.loss_func) as loss_func:
            losses = loss_func(learn.pred, *batch[inputs:])
        if batch is not self._batch:  # metrics look at the predictions for all rows
            learn.pred = whole
        if not isinstance(losses, Tensor):
            return losses
        losses, rows = losses.as_subclass(Tensor), num_rows(batch)
        # fastai's losses flatten the places of a row, one row after another.
        flat = losses.dim() == 1 and losses.numel() != rows and losses.numel() % max(1, rows) == 0
        return losses.view(rows, -1) if flat else losses


class BatchLossFilter(SelectiveBackprop):
    """tsai's callback of this name: train on the hardest rows that hold a share of the batch's loss.

    The arguments are tsai's. Unlike there, the row that crosses the share is kept
    (:class:`rowprop.LossMass`), each batch has one forward, so that BatchNorm's statistics move once, all inputs of
    a model are taken, and the recorder's loss is that of all rows.

    Args:
        loss_perc: Share of the batch's loss to hold, in (0, 1]; default 1.0: all rows.
        schedule_func: From ``learn.pct_train`` to a factor of the share; shares above 1 count as 1, and at 0 or below
            the hardest row is kept. Default None: the share stays.
        **settings: Those of :class:`SelectiveBackprop`.

    Raises:
        InvalidInput: ``loss_perc`` is outside (0, 1], or ``schedule_func`` cannot be called; and as
            :class:`SelectiveBackprop`.

    References:
        tsai 1.0.1, ``tsai.callback.experimental.BatchLossFilter``.
    """

    def __init__(
        self, loss_perc: float = 1.0, schedule_func: Callable[[float], float] | None = None, **settings: Any
    ) -> None:
        check_fraction("BatchLossFilter", "loss_perc", loss_perc)
        if schedule_func is not None:
            check_callable(
                "BatchLossFilter", "schedule_func", schedule_func, "a function of the progress was needed, or None."
            )
            super().__init__(LossMass(lambda progress: _share(loss_perc * schedule_func(progress))), **settings)
        else:
            super().__init__(Everything() if loss_perc == 1 else LossMass(loss_perc), **settings)


class _Mean(_Metric):
    """One of the numbers, as a column of the table."""

    def __init__(self, callback: SelectiveBackprop, name: str) -> None:
        self._callback, self._name = callback, name

    @property
    def name(self) -> str:
        return self._name

    @property
    def value(self) -> Any:
        return self._callback.mean_of(self._name)


def _others(metrics: Any) -> list[Any]:
    """The metrics that are the learner's own."""
    return [metric for metric in metrics if not isinstance(metric, _Mean)]


def _share(share: float) -> float:
    return min(1.0, max(1e-6, share))


def _check_mean(loss_func: Any) -> None:
    """Refuse a loss function that gives no losses of rows, or whose reduction is not their mean."""
    reduction = getattr(loss_func, "reduction", None)
    if reduction is None:
        signature = signature_of(loss_func)
        taken = [] if signature is None else list(signature.parameters.values())
        if not any(each.name == "reduction" or each.kind is each.VAR_KEYWORD for each in taken):
            raise InvalidInput(
                f"the learner's loss function {loss_func!r} has no reduction to switch off, but the loss of each row "
                "was needed; give SelectiveBackprop(selector, losses_fn)."
            )
    elif reduction not in ("mean", "none"):
        raise InvalidInput(
            f"the learner's loss function has reduction={reduction!r} but 'mean' was needed, because the loss of a "
            "selection is a mean; set it, or give SelectiveBackprop(selector, losses_fn)."
        )
