"""Lightning: a callback that has each training step backpropagate the rows that a selector keeps."""

from __future__ import annotations

import importlib
import math
from importlib.util import find_spec
from typing import Any, cast

from torch import Tensor

from rowprop.distributed import Local
from rowprop.errors import InvalidInput, MissingExtra
from rowprop.integrations.shared import (
    ClassesFn,
    Replaced,
    check_given,
    gather_states,
    losses_of_rows,
    numbers_of,
    own_state,
)
from rowprop.scoring import LossesFn
from rowprop.selection.base import Selector
from rowprop.step.record import Record
from rowprop.step.selective import SelectiveBackprop as Step


def _callbacks() -> tuple[type, ...]:
    """The classes of callbacks: `lightning` and `pytorch_lightning` have one each, and neither knows the other's."""
    names = [name for name in ("lightning", "pytorch_lightning") if find_spec(name)]
    if not names:
        raise MissingExtra(
            "rowprop.integrations.lightning needs Lightning, which is not installed; "
            "run: pip install 'rowprop[lightning]'."
        )
    modules = [importlib.import_module(f"{name}.pytorch" if name == "lightning" else name) for name in names]
    return tuple(module.Callback for module in modules)


_Callback: Any = type("_Callback", _callbacks(), {})


class SelectiveBackprop(_Callback):
    """Train on the rows that a selector keeps: one line in the trainer, ``callbacks=[SelectiveBackprop(selector)]``.

    During ``fit`` the module's ``training_step`` is replaced. A training step computes the losses of all rows, and
    backpropagates those that are kept. Precision, accumulation, clipping, devices and optimizers stay Lightning's, and
    so do validation and test. After ``fit`` the module is as it was, also where it raised.

    The losses of all rows and of the kept rows are logged apart, as ``loss_all`` and ``loss_kept``, with the kept share
    as ``kept``.

    Args:
        selector: Chooses the rows, e.g. ``rowprop.TopK(keep=0.5)``.
        losses_fn: ``(module, batch)`` to unreduced losses, shape ``(N,)``. Default None: the module's method
            ``losses(batch)``. Of losses ``(N, ...)``, of several places in a row, each row has the mean.
        classes_fn: Returns the class of each row of a batch, shape ``(N,)``, int64: for selectors that need it, and
            then the kept share of each class of the batch is logged as well, as ``kept/CLASS``. Default None.
        **settings: Those of :class:`rowprop.SelectiveBackprop`, except ``accumulate_to``: the trainer decides when to
            step. On several devices ``ranks`` is ``Local()`` by default. With a ``history`` batches are those of a
            :class:`rowprop.history.WithIds`, a pair of ids and rows. Progress, which schedules follow, is the
            trainer's.

    Raises:
        MissingExtra: On import, where neither ``lightning`` nor ``pytorch_lightning`` is installed.
        InvalidInput: A setting is wrong, the module has no method ``losses``, it optimizes by hand, or its optimizer
            asks for the loss of a batch twice.

    Attributes:
        step: The :class:`rowprop.SelectiveBackprop` of the running fit, whose state is saved in checkpoints.
        record: The :class:`rowprop.Record` of the last step; None before the first.

    Exactness:
        The gradient is that of :class:`rowprop.SelectiveBackprop`.
    """

    def __init__(
        self,
        selector: Selector,
        losses_fn: LossesFn | None = None,
        *,
        classes_fn: ClassesFn | None = None,
        **settings: Any,
    ) -> None:
        check_given(losses_fn, classes_fn, settings, "Lightning", "Trainer(accumulate_grad_batches=...)")
        self.step: Step | None = None
        self.record: Record | None = None
        self._selector, self._losses_fn, self._classes_fn = selector, losses_fn, classes_fn
        self._settings = settings
        self._state: dict[str, Any] | None = None
        self._replaced: Replaced | None = None
        self._asked = self._raised = False

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Replace the module's training step."""
        if stage != "fit":
            return
        if not pl_module.automatic_optimization:
            raise InvalidInput(
                f"{type(pl_module).__name__} optimizes by hand, but the callback SelectiveBackprop replaces the step; "
                "call rowprop.pick in training_step instead."
            )
        losses_fn = self._losses_fn
        if losses_fn is None:
            if not callable(getattr(pl_module, "losses", None)):
                raise InvalidInput(
                    f"{type(pl_module).__name__} has no method losses(batch) that returns the loss of each row, but "
                    "the callback SelectiveBackprop needs it; add it, or give SelectiveBackprop(selector, losses_fn)."
                )
            losses_fn = _own_losses
        settings = dict(self._settings)
        if trainer.world_size > 1:
            settings.setdefault("ranks", Local())
        self.step = Step(pl_module, losses_of_rows(losses_fn, settings), self._selector, **settings)
        if self._state is not None:
            self.step.load_state_dict(self._state)
            self._state = None

        def training_step(batch: Any, batch_idx: int, *_: Any) -> Tensor:
            return self._train(trainer, pl_module, batch, batch_idx)

        self._raised = False
        self._replaced = Replaced(pl_module, {"training_step": training_step})

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Give the module its own training step back."""
        if stage == "fit":
            self._give_back()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Give the module its own training step back: Lightning tears nothing down after an exception."""
        self._raised = True
        self._give_back()

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Take note that the batch's loss was not asked for."""
        self._asked = False

    def state_dict(self) -> dict[str, Any]:
        """The states of all ranks' steps, for a checkpoint: Lightning calls it on all of them."""
        if self.step is None:
            return {}
        state = self.step.state_dict()
        # After an exception the other ranks may be elsewhere.
        return {"ranks": [state] if self._raised else gather_states(state)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a checkpoint."""
        state = own_state(state_dict["ranks"])
        if self.step is None:
            self._state = state
        else:
            self.step.load_state_dict(state)

    def _give_back(self) -> None:
        if self._replaced is not None:
            self._replaced.give_back()
            self._replaced = None

    def _train(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> Tensor:
        if self._asked:
            raise InvalidInput(
                "the optimizer asked for the loss of a batch more than once, as LBFGS does, but the rows are selected "
                "anew each time; use an optimizer that asks once, e.g. torch.optim.SGD."
            )
        self._asked = True
        step = cast(Step, self.step)
        ids = None
        if step.history is not None:
            ids, batch = batch
        progress = _progress(trainer, batch_idx) if step.total_steps is None and step.sampler is None else None
        classes = None if self._classes_fn is None else self._classes_fn(batch)
        loss, self.record = step(batch, batch_idx, ids=ids, classes=classes, progress=progress)
        module.log_dict(numbers_of(self.record, classes), batch_size=self.record.num_rows)
        return loss


def _own_losses(module: Any, batch: Any) -> Tensor:
    return module.losses(batch)


def _progress(trainer: Any, batch_idx: int) -> float | None:
    """The part of the training that is done, in [0, 1]; None where the trainer does not know its end.

    The trainer ends at ``max_epochs`` or at ``max_steps``, whichever comes first.
    """
    known = list[float]()
    if (trainer.max_epochs or -1) > 0 and math.isfinite(trainer.num_training_batches):
        known.append((trainer.current_epoch + batch_idx / trainer.num_training_batches) / trainer.max_epochs)
    if trainer.max_steps > 0:
        known.append(trainer.global_step / trainer.max_steps)
    return min(1.0, max(known)) if known else None
