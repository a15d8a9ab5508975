"""Composer: an algorithm that has each training step backpropagate the rows that a selector keeps."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor

from rowprop.distributed import averages_gradients, process_group
from rowprop.errors import InvalidInput
from rowprop.integrations import shared
from rowprop.schedule import Schedule
from rowprop.scoring import Downscaled, LossesFn
from rowprop.selection.base import Selector
from rowprop.selection.selectors import Keep, RankSampling

# mosaicml asks for a torch below 2.7.1, so no extra could install it.
_install = "pip install --no-deps mosaicml, and install the packages that docs/composer.md names"
_core: Any = shared.module_of("composer", "core", install=_install)
_Event: Any = _core.Event


class SelectiveBackpropAlgorithm(shared.Selects, _core.Algorithm):
    """Composer's algorithm ``SelectiveBackprop``, with one forward and any selector.

    One line in the trainer: ``algorithms=[SelectiveBackpropAlgorithm(start=0.5, end=0.9, keep=0.5)]``. A training
    microbatch's forward gives the losses of all rows, and the trainer backpropagates those that are kept. Each batch
    logs ``loss_all``, ``loss_kept`` and the kept share, ``kept``.

    Args:
        start: Fraction of the training at which selection begins, in [0, 1); default 0.5.
        end: Fraction at which it ends, above ``start``, at most 1; default 0.9.
        keep: Fraction of rows kept, in (0, 1], or a schedule: drawn by the rank of their losses, as Composer draws
            them. Default None: 0.5, or as ``selector`` says.
        scale_factor: Side of the images that are scored, as a fraction. Default 1: the losses of the training forward
            are the scores. Below 1 the engine is ``recompute``, unless another is named.
        interrupt: Every how many batches of an epoch one is trained whole; 0 for never; default 2.
        selector: Chooses the rows in place of ``keep``, e.g. ``rowprop.TopK(keep=0.25)``. Default None.
        losses_fn: ``(model, batch)`` to unreduced losses, ``(N,)``, or ``(N, ...)``, of which each row has the mean.
            Default None: the model's ``loss(outputs, batch, reduction="none")``.
        classes_fn: From the batch to the class of each row, ``(N,)``, int64, for selectors that need it; each one's
            kept share is logged, ``kept/CLASS``. Default None.
        **settings: Those of :class:`rowprop.SelectiveBackprop`, except ``accumulate_to``, ``history`` and ``schedule``.
            Behind DDP or FSDP ``ranks`` is ``Local()`` by default. Progress is the trainer's.

    Raises:
        MissingExtra: On import, where Composer is not installed.
        InvalidInput: A setting is wrong; when the trainer is made, the model's ``loss`` has no mean to replace; in
            ``fit``, another algorithm selects, or changes targets or losses after the forward, or microbatches have the
            size ``"auto"`` while ranks select together.

    Attributes:
        step: The :class:`rowprop.SelectiveBackprop`, whose state is in the checkpoints; None before the first fit.
        record: The :class:`rowprop.step.Record` of the last microbatch; None before the first.

    Bias:
        The draw by rank is biased, as in mosaicml 0.32.1's ``composer.algorithms.SelectiveBackprop``.
    """

    _framework, _accumulation, _ids = "Composer", "Trainer(device_train_microbatch_size=...)", False

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
        classes_fn: shared.ClassesFn | None = None,
        **settings: Any,
    ) -> None:
        owner = "SelectiveBackpropAlgorithm"
        if "schedule" in settings:
            remedy = "start, end and interrupt are the schedule; give these instead."
            raise InvalidInput(f"{owner} got a schedule, but {remedy}")
        if selector is not None and keep is not None:
            came = f"keep={keep!r} and a selector"
            raise InvalidInput(f"{owner} got {came}, but one of them was needed; give the selector its keep.")
        selector = RankSampling(0.5 if keep is None else keep) if selector is None else selector
        own: dict[str, Any] = {"schedule": Schedule(start, end, interrupt)}
        if scale_factor != 1:
            scores: Any = shared.losses_of_rows(losses_fn or self._losses, settings)
            own |= {"scorer": Downscaled(scores, scale_factor), "engine": "recompute"}
        super().__init__(selector, losses_fn, classes_fn=classes_fn, **own | settings)
        self._model: Any = None
        self._batch: Any = None
        self._outputs: Any = None
        self._means = shared.Means()
        self._replaced = shared.Replaced(self, {})

    def match(self, event: Any, state: Any) -> bool:
        """Whether the algorithm runs at an event."""
        events = (_Event.INIT, _Event.FIT_START, _Event.BEFORE_TRAIN_BATCH, _Event.BEFORE_FORWARD)
        return event in (*events, _Event.AFTER_TRAIN_BATCH, _Event.EVAL_START, _Event.PREDICT_START)

    def apply(self, event: Any, state: Any, logger: Any) -> None:
        """Run at an event."""
        self._replaced.give_back()  # an exception may have come before the trainer's calls
        if event == _Event.INIT:
            self._model, self.step, self._loaded = state.model, None, None
            if self._losses_fn is None:
                _check_loss(state.model)
        elif event == _Event.FIT_START:
            self._begin(state)
        elif event == _Event.BEFORE_TRAIN_BATCH:
            self._means = shared.Means()
        elif event == _Event.BEFORE_FORWARD:
            # nn.Module.__call__ takes it in place of the forward and all hooks, which run in the step's own call.
            self._replaced = shared.Replaced(state.model, {"_compiled_call_impl": partial(self._train, state)})
        elif event == _Event.AFTER_TRAIN_BATCH and self._means.sums:
            logger.log_metrics(self._means.read())

    def state_dict(self) -> dict[str, Any]:
        """The states of all ranks' steps, for a checkpoint: Composer calls it on all of them."""
        state = self._loaded if self.step is None else self.step.state_dict()
        return {"repr": repr(self), "ranks": None if state is None else shared.gather_states(dict(state))}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint."""
        ranks = state.get("ranks")
        self._load(None if ranks is None else shared.own_state(ranks))

    def _begin(self, state: Any) -> None:
        """Make the step, whose model Composer may have wrapped since."""
        for other in state.algorithms:
            if other is not self:
                _check_beside(other, state)
        several = averages_gradients(state.model)
        step = self.step or self._make_step(state.model, self._losses_fn or self._losses, several=several)
        if state.auto_microbatching and (several or step.ranks is not None):
            raise InvalidInput(
                "device_train_microbatch_size='auto' would leave ranks waiting for one out of memory; give a number."
            )

    def _train(self, state: Any, batch: Any) -> Any:
        """Run a microbatch's step instead of the model, and pass its loss to the trainer's call."""
        self._replaced.give_back()
        progress = min(1.0, float(state.get_elapsed_duration()))
        self._batch, self._outputs = batch, None
        try:
            loss, record, numbers = self._run(batch, int(state.timestamp.batch_in_epoch), progress=progress)
            outputs = self._outputs
        finally:
            self._batch = self._outputs = None
        self._means.add(record, numbers)
        if self.step is not None and self.step.ranks is not None and process_group(None) is not None:
            loss.register_hook(_mean_over_ranks)

        def losses(*_: Any) -> Tensor:
            self._replaced.give_back()
            return loss

        self._replaced = shared.Replaced(self._model, {"loss": losses})
        return outputs

    def _losses(self, model: Any, batch: Any) -> Tensor:
        outputs = model(batch)
        if batch is self._batch:  # metrics look at the outputs for all rows
            self._outputs = outputs
        return self._model.loss(outputs, batch, reduction="none")


def _mean_over_ranks(grad: Tensor) -> Tensor:
    """One factor for all ranks: Composer weighs each by its rows, as the selection across ranks has done already."""
    grad = grad.clone()
    dist.all_reduce(grad)
    return grad / dist.get_world_size()


def _check_loss(model: Any) -> None:
    """Refuse a model whose loss gives no losses of rows; a ComposerClassifier's passes all arguments on."""
    name, inner = type(model).__name__, getattr(model, "_loss_fn", None)
    named = f"{name}.loss" if inner is None else f"{name}'s loss_fn {inner!r}"
    shared.check_reduction(named, model.loss if inner is None else inner, "SelectiveBackpropAlgorithm(losses_fn=...)")


def _check_beside(other: Any, state: Any) -> None:
    """Refuse an algorithm whose changes the step would not see, because they come after its loss."""
    name = type(other).__name__
    if name in ("SelectiveBackprop", "SelectiveBackpropAlgorithm"):
        raise InvalidInput("the trainer got two algorithms SelectiveBackprop but one was needed; remove one of them.")
    if any(other.match(event, state) for event in (_Event.BEFORE_LOSS, _Event.BEFORE_BACKWARD)):
        raise InvalidInput(
            f"{name} changes targets or losses after the forward, but SelectiveBackpropAlgorithm has the losses by "
            "then; make its change in the model's loss, e.g. cross_entropy(label_smoothing=...), or remove one of them."
        )
