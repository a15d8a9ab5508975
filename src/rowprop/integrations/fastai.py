"""fastai and tsai: a callback that has each training step backpropagate the rows that a selector keeps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from rowprop.batch import num_rows
from rowprop.checks import check_callable
from rowprop.distributed import averages_gradients
from rowprop.errors import InvalidInput
from rowprop.integrations.shared import Means, Numbers, Selects, check_reduction, module_of
from rowprop.selection.base import Selector
from rowprop.selection.selectors import Everything, LossMass, check_fraction

_learner: Any = module_of("fastai", "learner")
_unreduced: Any = module_of("fastai", "layers").NoneReduce


class SelectiveBackpropCallback(Selects, _learner.Callback):
    """Train on the rows that a selector keeps: one line in the learner, ``cbs=SelectiveBackpropCallback(selector)``.

    In training the callback stands for the forward and the loss. The learner's ``loss`` is that of all rows; where a
    scorer leaves it unknown, of the kept rows. The table of a fit has the means of each epoch: ``loss_all``,
    ``loss_kept`` and the kept share, ``kept``. After ``learn.lr_find()`` the step is where it was, as the weights are.

    Args:
        selector: Chooses the rows, e.g. ``rowprop.TopK(keep=0.5)``.
        losses_fn: ``(model, batch)`` to unreduced losses, ``(N,)``, or ``(N, ...)``, of which each row has the mean;
            the batch is ``(*xb, *yb)``, and ``learn.pred`` is then None in training. Default None: the learner's own.
        classes_fn: From the batch to the class of each row, ``(N,)``, int64, for selectors that need it; each one's
            kept share is shown, ``kept/CLASS``, where the data have a number of classes, ``dls.c``. Default None.
        **settings: Those of :class:`rowprop.SelectiveBackprop`, except ``accumulate_to`` and ``history``. Behind DDP
            ``ranks`` is ``Local()`` by default. Progress, which schedules follow, is ``learn.pct_train``.

    Raises:
        MissingExtra: On import, where fastai is not installed.
        InvalidInput: A setting is wrong; in a fit, the loss function has no mean to replace, or two callbacks select.

    Attributes:
        step: The :class:`rowprop.SelectiveBackprop` of the last fit; None before the first.
        record: The :class:`rowprop.step.Record` of the last step; None before the first.
        numbers: Those of the last step, under their names in the table; losses are 0-d tensors.
    """

    _framework, _accumulation, _ids = "fastai", "the callback GradientAccumulation", False
    order = 12  # MixedPrecision has 10, DistributedTrainer 11
    numbers: Numbers = {}  # noqa: RUF012  each step sets another
    _means = Means()
    _begun = False
    _before: Mapping[str, Any] | None = None  # the step's state before a search for a learning rate
    _batch: Any = None
    # not exported with the learner
    _stateattrs = ("step", "record", "numbers", "_loaded", "_means", "_begun", "_before", "_batch")

    def __setattr__(self, name: str, value: Any) -> None:
        """Leave the learner as it was when the callback is removed, after an interrupted fit too."""
        if name == "learn" and value is None and self.learn is not None:
            self.after_fit()
        super().__setattr__(name, value)

    def before_fit(self) -> None:
        """Stand in for the batches of the learner, and add the numbers to its table."""
        learn = self.learn
        if sum(isinstance(other, SelectiveBackpropCallback) for other in learn.cbs) > 1:
            callbacks = "two callbacks SelectiveBackpropCallback"
            raise InvalidInput(f"the learner got {callbacks} but one was needed; remove one of them.")
        own = cast(Any, type(learn))._do_one_batch

        def one_batch() -> None:
            (self._train if learn.training and len(learn.yb) else own)(learn)

        learn._do_one_batch = one_batch
        self._begun, self._before = False, None
        # The lock is held during a validation outside of a fit, which is not changed.
        count = 0 if self._classes_fn is None else getattr(learn.dls, "c", None) or 0
        names = ["loss_all", "loss_kept", "kept", *(f"kept/{number}" for number in range(count))]
        columns = [_Mean(partial(self.mean_of, name), name) for name in names if not learn.lock.locked()]
        learn.metrics = _others(learn.metrics) + columns

    def before_train(self) -> None:
        """Begin the means of an epoch."""
        self._means = Means()

    def after_fit(self) -> None:
        """Leave the learner as it was."""
        if self._before is not None:  # LRFinder restores the weights in the same way
            self._load(self._before)
            self._before = None
        vars(self.learn).pop("_do_one_batch", None)
        self.learn.metrics = _others(self.learn.metrics)

    def state_dict(self) -> dict[str, Any]:
        """Return the step's state, to save next to ``learn.save``, which cannot store it."""
        return dict(self._loaded or {}) if self.step is None else self.step.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on where the state was taken, bit for bit, after ``learn.load``."""
        self._load(state_dict)

    def mean_of(self, name: str) -> Any:
        """Return the mean of one of the numbers over the epoch: of losses over their rows; NaN where no step has it."""
        return self._means.of(name)

    def _train(self, learn: Any) -> None:
        """Run a batch as the learner does, from the forward to the update."""
        if not self._begun:  # fastai may have wrapped the model since the last fit
            self._loaded = self.state_dict() or None
            several = averages_gradients(learn.model)
            step = self._make_step(learn.model, self._losses_fn or self._losses, several=several)
            self._begun, self._before = True, step.state_dict() if hasattr(learn, "lr_finder") else None
        self._batch, learn.pred = (*learn.xb, *learn.yb), None
        try:
            progress = min(1.0, learn.pct_train)
            learn.loss_grad, record, self.numbers = self._run(self._batch, learn.iter, progress=progress)
        finally:
            self._batch = None
        self._means.add(record, self.numbers)
        learn.loss = record.loss_all
        step = cast(Any, self.step)
        if step.scorer is not None and not step.engine.one_forward:  # the losses of all rows were not computed
            kept = record.loss_kept if record.num_kept else torch.zeros_like(record.loss_kept)
            learn.loss = torch.where(record.loss_all.isnan(), kept, record.loss_all)
        learn("after_loss")
        learn._do_grad_opt()

    def _losses(self, model: Any, batch: Any) -> Tensor:
        learn, inputs = self.learn, len(self.learn.xb)
        named = f"the learner's loss function {learn.loss_func!r}"
        check_reduction(named, learn.loss_func, "SelectiveBackpropCallback(selector, losses_fn)")
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


class BatchLossFilter(SelectiveBackpropCallback):
    """tsai's callback of this name: train on the hardest rows that hold a share of the batch's loss.

    Unlike in tsai's, the row that crosses the share is kept (:class:`rowprop.selection.LossMass`), each batch has one
    forward, all inputs of a model are taken, and the recorder's loss is that of all rows.

    Args:
        loss_perc: Share of the batch's loss to hold, in (0, 1]; default 1.0: all rows.
        schedule_func: From ``learn.pct_train`` to a factor of the share; shares above 1 count as 1, and at 0 or below
            the hardest row is kept. Default None: the share stays.
        **settings: Those of :class:`SelectiveBackpropCallback`.

    Raises:
        InvalidInput: ``loss_perc`` or ``schedule_func`` is wrong; and as :class:`SelectiveBackpropCallback`.

    References:
        tsai 1.0.1, ``tsai.callback.experimental.BatchLossFilter``.
    """

    def __init__(
        self, loss_perc: float = 1.0, schedule_func: Callable[[float], float] | None = None, **settings: Any
    ) -> None:
        check_fraction("BatchLossFilter", "loss_perc", loss_perc)
        selector: Selector = Everything() if loss_perc == 1 else LossMass(loss_perc)
        if schedule_func is not None:
            needed = "a function of the progress was needed, or None."
            check_callable("BatchLossFilter", "schedule_func", schedule_func, needed)
            selector = LossMass(lambda progress: min(1.0, max(1e-6, loss_perc * schedule_func(progress))))
        super().__init__(selector, **settings)


class _Mean(_learner.ValueMetric):
    """One of the numbers, as a column of the table."""


def _others(metrics: Any) -> list[Any]:
    return [metric for metric in metrics if not isinstance(metric, _Mean)]
