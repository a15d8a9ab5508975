"""skorch: a mixin that has each training step of a net backpropagate the rows that a selector keeps."""

from __future__ import annotations

import math
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, cast

from torch import Tensor

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
)
from rowprop.scoring import LossesFn
from rowprop.selection.base import Selector
from rowprop.step.record import Record
from rowprop.step.selective import SelectiveBackprop as Step

_Net: Any = module_of("skorch", "net", "skorch").NeuralNet
_Scoring: Any = module_of("skorch", "callbacks", "skorch").PassthroughScoring
_FirstStep: Any = module_of("skorch", "utils", "skorch").FirstStepAccumulator
_unpacked: Any = module_of("skorch", "dataset", "skorch").unpack_data
_Mixin: Any = object  # the net comes after the mixin


@dataclass
class _Call:
    """A batch in training: its parts, and the values that the net's own step is handed."""

    targets: Any
    given: dict[str, Any]
    batch: Any = None
    predicted: Any = None
    loss: Tensor | None = None


class SelectiveBackprop(_Mixin):
    """Train a net on the rows that a selector keeps: a mixin that comes before the class of the net.

    ``class Net(SelectiveBackprop, NeuralNetClassifier): pass``, then ``Net(module, selector=rowprop.TopK(keep=0.5))``.
    A training step computes the losses of all rows, and backpropagates those that are kept. The rest stays skorch's,
    and so do validation and prediction. :class:`skorch.hf.AccelerateMixin` may come after it.

    The history's ``train_loss`` is the loss of all rows; where a scorer leaves it unknown, that of the kept rows.
    Batches and epochs have ``loss_kept`` and ``kept``, the loss of the kept rows and their share, which the printed
    table shows. Batches also have ``loss_all`` and ``num_kept``.

    Args:
        *args: Those of the net.
        selector: Chooses the rows, e.g. ``rowprop.TopK(keep=0.5)``.
        losses_fn: ``(module, batch)`` to unreduced losses, shape ``(N,)``; the batch is the pair ``(X, y)``. Callbacks
            then see no predictions in training. Default None: the net's own criterion, unreduced. Of losses ``(N,
            ...)``, of several places in a row, each row has the mean.
        classes_fn: Returns the class of each row of a batch ``(X, y)``, shape ``(N,)``, int64: for selectors that need
            it, and then batches of the history have the kept share of each class as well, as ``kept/CLASS``. Default
            None.
        **kwargs: Those of the net. ``selective__NAME`` is a setting of :class:`rowprop.SelectiveBackprop`, except
            ``accumulate_to`` and ``history``. Behind DDP ``selective__ranks`` is ``Local()`` by default. Progress,
            which schedules follow, is the part of ``max_epochs`` that is done.

    Raises:
        MissingExtra: On import, where skorch is not installed.
        InvalidInput: When the net is initialized or fitted: a setting is wrong, the criterion has no mean to replace,
            the net's own ``get_loss`` goes past the mixin, or the optimizer asks for the loss of a batch twice.

    Attributes:
        selective_: The :class:`rowprop.SelectiveBackprop`; ``net.save_params(f_selective=...)`` saves its state.
        record_: The :class:`rowprop.Record` of the last step; None before the first.

    Exactness:
        The gradient is that of :class:`rowprop.SelectiveBackprop`.
    """

    prefixes_: ClassVar[list[str]] = [*_Net.prefixes_, "selective"]
    _call: _Call | None = None
    _batches: int | None = None

    def __init__(
        self,
        *args: Any,
        selector: Selector,
        losses_fn: LossesFn | None = None,
        classes_fn: ClassesFn | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.selector, self.losses_fn, self.classes_fn = selector, losses_fn, classes_fn

    def initialize(self) -> Any:
        """Initialize the net, and with it the step."""
        super().initialize()
        self.record_: Record | None = None
        self.selective_ = self._step()
        return self

    def run_single_epoch(self, iterator: Any, training: bool, *args: Any, **kwargs: Any) -> Any:
        """As the net's own; an epoch of training has its length noted, for the progress."""
        if training:
            try:
                self._batches = len(iterator)
            except TypeError:  # a stream
                self._batches = None
        return _any(super().run_single_epoch(iterator, training, *args, **kwargs))

    def train_step_single(self, batch: Any, **fit_params: Any) -> dict[str, Any]:
        """As the net's own, with the loss of the kept rows for the backward; it reports the loss of all rows."""
        if self.selective_.model is not self.module_:  # accelerate wraps it in each fit
            state = self.selective_.state_dict()
            self.selective_ = self._step()
            self.selective_.load_state_dict(state)
        self._call = call = _Call(_unpacked(batch)[1], fit_params)
        try:
            step: dict[str, Any] = _any(super().train_step_single(batch, **fit_params))
        finally:
            self._call = None
        if call.loss is not None or call.batch is None:
            raise InvalidInput(
                f"a training step of {type(self).__name__} asked neither super().infer nor super().get_loss, or one of "
                "them alone, so that no rows were selected; call both, or have SelectiveBackprop come first."
            )
        return {**step, "loss": loss_shown(self.selective_, cast(Record, self.record_))}

    def infer(self, x: Any, **fit_params: Any) -> Any:
        """As the net's own; in training the rows of the batch are selected meanwhile."""
        call = self._call
        if call is None or call.batch is not None:
            return _any(super().infer(x, **fit_params))
        call.batch = x, call.targets
        classes = None if self.classes_fn is None else self.classes_fn(call.batch)
        index = len(self.history[-1, "batches"]) - 1
        progress = self._progress(index) if self.selective_.total_steps is None else None
        call.loss, self.record_ = self.selective_(call.batch, index, classes=classes, progress=progress)
        for name, value in numbers_of(self.record_, classes).items():
            self.history.record_batch(name, float(value))
        self.history.record_batch("num_kept", self.record_.num_kept)
        return call.predicted

    def get_loss(self, y_pred: Any, y_true: Any, *args: Any, **kwargs: Any) -> Tensor:
        """As the net's own; in training the loss of the rows that were selected."""
        call = self._call
        if call is None or call.loss is None:
            return _any(super().get_loss(y_pred, y_true, *args, **kwargs))
        loss, call.loss = call.loss, None
        return loss

    def get_train_step_accumulator(self) -> Any:
        """As the net's own, for an optimizer that asks once."""
        return _OneStep()

    @property
    def _default_callbacks(self) -> list[tuple[str, Any]]:
        kinds = {"loss_kept": _MeanOfKept, "kept": _Scoring}
        ours = [(name, kind(name=name, on_train=True, lower_is_better=None)) for name, kind in kinds.items()]
        others = cast("list[tuple[str, Any]]", super()._default_callbacks)
        last = [name for name, _ in others].index("print_log")
        return [*others[:last], *ours, *others[last:]]

    def _step(self) -> Step:
        settings = self.get_params_for("selective")
        check_given(self.losses_fn, self.classes_fn, settings, "skorch", "AccelerateMixin")
        refuse_history(settings, "skorch")
        if averages_gradients(self.module_):
            settings.setdefault("ranks", Local())
        return Step(self.module_, losses_of_rows(self.losses_fn or self._losses, settings), self.selector, **settings)

    def _progress(self, index: int) -> float:
        """The part of ``max_epochs`` that is done, in [0, 1]."""
        share = index / self._batches if self._batches else 0.0
        return min(1.0, (len(self.history) - 1 + share) / self.max_epochs)

    def _losses(self, module: Any, batch: Any) -> Tensor:
        """The losses of the net's own criterion, of all rows or of some."""
        call = cast(_Call, self._call)
        x, y = batch
        predicted = _any(super().infer(x, **call.given))
        if batch is call.batch:  # callbacks look at the predictions for all rows
            call.predicted = predicted
        with _unreduced(self.criterion_):
            return _any(super().get_loss(predicted, y, X=x, training=True))


def _any(value: Any) -> Any:
    """A value of the net's own methods, of which the mixin knows no types."""
    return value


class _MeanOfKept(_Scoring):
    """The mean over the kept rows of an epoch; a batch that kept none has no loss of kept rows."""

    def get_avg_score(self, history: Any) -> float:
        batches = [(count, loss) for count, loss in history[-1, "batches", :, ("num_kept", self.name)] if count]
        total = sum(count for count, _ in batches)
        return sum(count * loss for count, loss in batches) / total if total else math.nan


class _OneStep(_FirstStep):
    """Refuses an optimizer that evaluates a batch twice: each evaluation would select rows anew."""

    def store_step(self, step: Any) -> None:
        if self.step is not None:
            raise InvalidInput(
                "the optimizer asked for the loss of a batch more than once, as LBFGS does, but the rows are selected "
                "anew each time; use an optimizer that asks once, e.g. torch.optim.SGD."
            )
        super().store_step(step)


@contextmanager
def _unreduced(criterion: Any) -> Generator[None]:
    """Have a criterion return the losses of rows."""
    reduction = getattr(criterion, "reduction", None)
    if reduction != "mean":
        raise InvalidInput(
            f"the net's criterion {type(criterion).__name__} has reduction={reduction!r} but 'mean' was needed, in "
            "whose place the loss of a selection comes; set it, or give losses_fn."
        )
    criterion.reduction = "none"
    try:
        yield
    finally:
        criterion.reduction = reduction
