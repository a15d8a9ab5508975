"""Composer: an algorithm that has each training step backpropagate the rows that a selector keeps."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import partial
from typing import Any, cast

import torch.distributed as dist
from torch import Tensor

from rowprop.checks import signature_of
from rowprop.distributed import Local, averages_gradients, process_group
from rowprop.errors import InvalidInput
from rowprop.integrations.shared import (
    ClassesFn,
    Replaced,
    check_given,
    gather_states,
    losses_of_rows,
    module_of,
    numbers_of,
    own_state,
    refuse_history,
    weights_of,
)
from rowprop.schedule import Schedule
from rowprop.scoring import Downscaled, LossesFn
from rowprop.selection.base import Selector
from rowprop.selection.common import Keep
from rowprop.selection.drawn import RankSampling
from rowprop.step.record import Record
from rowprop.step.selective import SelectiveBackprop as Step

# mosaicml asks for a torch below 2.7.1, so no extra could install it.
_core: Any = module_of(
    "composer", "core", "Composer",
    "run: pip install --no-deps mosaicml, and install the packages that docs/composer.md names",
)  # fmt: skip
_Event: Any = _core.Event


class SelectiveBackprop(_core.Algorithm):
    """Composer's algorithm of this name, with one forward and any selector.

    One line in the trainer: ``algorithms=[SelectiveBackprop(start=0.5, end=0.9, keep=0.5)]``. In training the algorithm
    stands for the forward and the loss of a microbatch: it computes the losses of all rows, and the trainer
    backpropagates those that are kept. Precision, microbatches, clipping, optimizers and DDP stay Composer's, and so do
    evaluation and the metrics, which see all rows.

    In each batch it logs ``loss_all`` and ``loss_kept``, the losses of all rows and of the kept ones, and the kept
    share as ``kept``; over several microbatches they are means by rows. Composer's ``loss/train/total`` is the loss of
    the kept rows.

    Args:
        start: Fraction of the training at which selection begins, in [0, 1); default 0.5.
        end: Fraction at which it ends, above ``start``, at most 1; default 0.9.
        keep: Fraction of the rows that are kept, in (0, 1], or a schedule of the progress: rows are drawn by the rank
            of their losses, as Composer draws them. Default None: 0.5, or as ``selector`` says.
        scale_factor: Size of the images that are scored, as a fraction of each side. Default 1: the losses of the
            training forward are the scores. Below 1 the engine is ``recompute``, unless another is named.
        interrupt: Every how many batches of an epoch one is trained whole; 0 for never; default 2.
        selector: Chooses the rows in place of ``keep``, e.g. ``rowprop.TopK(keep=0.25)``. Default None.
        losses_fn: ``(model, batch)`` to unreduced losses, shape ``(N,)``. Default None: those of the model's method
            ``loss(outputs, batch, reduction="none")``. Of losses ``(N, ...)``, of several places in a row, each row has
            the mean.
        classes_fn: Returns the class of each row of a batch, shape ``(N,)``, int64: for selectors that need it, and
            then the kept share of each class of the batch is logged as well, as ``kept/CLASS``. Default None.
        **settings: Those of :class:`rowprop.SelectiveBackprop`, except ``accumulate_to``, ``history`` and ``schedule``.
            Behind DDP or FSDP ``ranks`` is ``Local()`` by default. Progress is the trainer's.

    Raises:
        MissingExtra: On import, where Composer is not installed.
        InvalidInput: A setting is wrong; when the trainer is made, the model's ``loss`` has no mean to replace; in
            ``fit``, another algorithm changes targets or losses after the forward, or selects as well, or the trainer
            looks for the size of microbatches by itself while ranks select together.

    Attributes:
        step: The :class:`rowprop.SelectiveBackprop` of the trainer, whose state is saved in checkpoints; None before
            the first fit.
        record: The :class:`rowprop.Record` of the last microbatch; None before the first.

    Exactness:
        The gradient is that of :class:`rowprop.SelectiveBackprop`. The draw by rank is biased, as the original is.

    References:
        mosaicml 0.32.1, ``composer.algorithms.SelectiveBackprop``.
    """

    def __init__(
        self,
        start: float = 0.5,
        end: float = 0.9,
        keep: Keep | None = None,
        scale_factor: float = 1.0,
        interrupt: int = 2,
        *,
        selector: Selector | None = None,
        losses_fn: LossesFn | None = None,
        classes_fn: ClassesFn | None = None,
        **settings: Any,
    ) -> None:
        check_given(losses_fn, classes_fn, settings, "Composer", "Trainer(device_train_microbatch_size=...)")
        refuse_history(settings, "Composer")
        if "schedule" in settings:
            raise InvalidInput(
                "SelectiveBackprop got a schedule, but start, end and interrupt are the schedule; give these instead."
            )
        if selector is not None and keep is not None:
            raise InvalidInput(
                f"SelectiveBackprop got keep={keep!r} and a selector, but one of them was needed; give the selector "
                "its keep."
            )
        self.step: Step | None = None
        self.record: Record | None = None
        self._selector = RankSampling(0.5 if keep is None else keep) if selector is None else selector
        self._losses_fn = losses_of_rows(losses_fn or self._losses, settings)
        self._classes_fn = classes_fn
        self._settings: dict[str, Any] = {"schedule": Schedule(start, end, interrupt)}
        if scale_factor != 1:
            self._settings |= {"scorer": Downscaled(cast(Any, self._losses_fn), scale_factor), "engine": "recompute"}
        self._settings |= settings
        self._own = losses_fn is None
        self._model: Any = None
        self._state: dict[str, Any] | None = None
        self._batch: Any = None
        self._outputs: Any = None
        self._sums: dict[str, tuple[Tensor | float, int]] = {}
        self._replaced: Replaced | None = None

    def match(self, event: Any, state: Any) -> bool:
        """Whether the algorithm runs at an event."""
        events = (_Event.INIT, _Event.FIT_START, _Event.BEFORE_TRAIN_BATCH, _Event.BEFORE_FORWARD)
        return event in (*events, _Event.AFTER_TRAIN_BATCH, _Event.EVAL_START, _Event.PREDICT_START)

    def apply(self, event: Any, state: Any, logger: Any) -> None:
        """Run at an event."""
        self._give_back()  # an exception may have come before the trainer's calls
        if event == _Event.INIT:
            self._model, self.step, self._state = state.model, None, None
            if self._own:
                _check_loss(state.model)
        elif event == _Event.FIT_START:
            self._begin(state)
        elif event == _Event.BEFORE_TRAIN_BATCH:
            self._sums = {}
        elif event == _Event.BEFORE_FORWARD:
            # nn.Module.__call__ takes it in place of the forward and all hooks, which run in the step's own call.
            self._replaced = Replaced(state.model, {"_compiled_call_impl": partial(self._train, state)})
        elif event == _Event.AFTER_TRAIN_BATCH and self._sums:
            logger.log_metrics({name: float(total) / weight for name, (total, weight) in self._sums.items()})

    def state_dict(self) -> dict[str, Any]:
        """The states of all ranks' steps, for a checkpoint: Composer calls it on all of them."""
        state = self._state if self.step is None else self.step.state_dict()
        return {"repr": repr(self), "ranks": None if state is None else gather_states(state)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint."""
        ranks = state.get("ranks")
        self._state = None if ranks is None else own_state(ranks)
        if self.step is not None and self._state is not None:
            self.step.load_state_dict(self._state)

    def _begin(self, state: Any) -> None:
        """Make the step, whose model Composer may have wrapped since."""
        for other in state.algorithms:
            if other is not self:
                _check_beside(other, state)
        if self.step is None:
            settings = dict(self._settings)
            if averages_gradients(state.model):
                settings.setdefault("ranks", Local())
            self.step = Step(state.model, self._losses_fn, self._selector, **settings)
            if self._state is not None:
                self.step.load_state_dict(self._state)
        if state.auto_microbatching and (self.step.ranks is not None or averages_gradients(state.model)):
            raise InvalidInput(
                "the trainer has device_train_microbatch_size='auto', but SelectiveBackprop needs all ranks in each "
                "microbatch, and a rank that runs out of memory would leave the others waiting; give a number."
            )

    def _train(self, state: Any, batch: Any) -> Any:
        """Run a microbatch's step in place of the model, and hand its loss to the trainer's own call."""
        self._give_back()
        step = cast(Step, self.step)
        classes = None if self._classes_fn is None else self._classes_fn(batch)
        progress = min(1.0, float(state.get_elapsed_duration())) if step.total_steps is None else None
        self._batch, self._outputs = batch, None
        try:
            loss, record = step(batch, int(state.timestamp.batch_in_epoch), classes=classes, progress=progress)
            outputs = self._outputs
        finally:
            self._batch = self._outputs = None
        self.record = record
        weights = weights_of(record)
        for name, value in numbers_of(record, classes).items():
            if weight := weights.get(name, record.num_rows):
                before = self._sums.get(name, (0.0, 0))
                self._sums[name] = before[0] + value * weight, before[1] + weight
        if step.ranks is not None and process_group(None) is not None:
            loss.register_hook(_mean_over_ranks)

        def losses(*_: Any) -> Tensor:
            self._give_back()
            return loss

        self._replaced = Replaced(self._model, {"loss": losses})
        return outputs

    def _give_back(self) -> None:
        """Give the model its own call or its own loss back."""
        if self._replaced is not None:
            self._replaced.give_back()
            self._replaced = None

    def _losses(self, model: Any, batch: Any) -> Tensor:
        """The losses of the model's own loss function, of all rows or of some."""
        outputs = model(batch)
        if batch is self._batch:  # metrics look at the outputs for all rows
            self._outputs = outputs
        return self._model.loss(outputs, batch, reduction="none")


def _mean_over_ranks(grad: Tensor) -> Tensor:
    """The mean of what the ranks' losses are multiplied by.

    Composer weighs each rank by its number of rows, which a selection across ranks has done already.
    """
    grad = grad.clone()
    dist.all_reduce(grad)
    return grad / dist.get_world_size()


def _check_loss(model: Any) -> None:
    """Refuse a model whose loss has no losses of rows, or whose reduction is not their mean."""
    inner = getattr(model, "_loss_fn", None)  # of a ComposerClassifier, whose loss passes all on
    function = model.loss if inner is None else inner
    signature = signature_of(function)
    taken: Mapping[str, inspect.Parameter] = {} if signature is None else signature.parameters
    named = f"{type(model).__name__}.loss" if inner is None else f"{type(model).__name__}'s loss_fn {inner!r}"
    if "reduction" not in taken and not any(each.kind is each.VAR_KEYWORD for each in taken.values()):
        raise InvalidInput(
            f"{named} takes no reduction, but the loss of each row was needed; add reduction='mean' to its arguments, "
            "or give SelectiveBackprop(losses_fn=...)."
        )
    default = taken["reduction"].default if "reduction" in taken else inspect.Parameter.empty
    if default not in ("mean", inspect.Parameter.empty):
        raise InvalidInput(
            f"{named} has reduction={default!r} but 'mean' was needed, because the loss of a selection is a mean; "
            "give SelectiveBackprop(losses_fn=...)."
        )


def _check_beside(other: Any, state: Any) -> None:
    """Refuse an algorithm whose changes the step would not see, because they come after its loss."""
    name = type(other).__name__
    if name == "SelectiveBackprop":
        raise InvalidInput("the trainer got two algorithms SelectiveBackprop but one was needed; remove one of them.")
    if any(other.match(event, state) for event in (_Event.BEFORE_LOSS, _Event.BEFORE_BACKWARD)):
        raise InvalidInput(
            f"{name} changes targets or losses after the forward, but SelectiveBackprop has the losses by then; make "
            "its change in the model's loss, e.g. cross_entropy(label_smoothing=...), or remove one of the two."
        )
