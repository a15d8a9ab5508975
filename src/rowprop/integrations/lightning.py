"""Lightning: a callback that has each training step backpropagate the rows that a selector keeps."""

from __future__ import annotations

import math
from importlib.util import find_spec
from typing import Any, cast

from torch import Tensor

from rowprop.errors import InvalidInput
from rowprop.integrations.shared import Replaced, Selects, gather_states, module_of, own_state

# `lightning` and `pytorch_lightning` have a class of callbacks each, and neither knows the other's.
_alone = find_spec("pytorch_lightning") and not find_spec("lightning")
_modules = [] if _alone else [module_of("lightning", "pytorch")]
_modules += [module_of("pytorch_lightning")] if find_spec("pytorch_lightning") else []
_Callback: Any = type("_Callback", tuple(module.Callback for module in _modules), {})


class SelectiveBackpropCallback(Selects, _Callback):
    """Train on the rows that a selector keeps: one line, ``callbacks=[SelectiveBackpropCallback(selector)]``.

    During ``fit`` ``training_step`` is replaced. It logs ``loss_all``, ``loss_kept`` and the kept share, ``kept``.

    Args:
        selector: Chooses the rows, e.g. ``rowprop.TopK(keep=0.5)``.
        losses_fn: ``(module, batch)`` to unreduced losses, ``(N,)``, or ``(N, ...)``, of which each row has the mean.
            Default None: the module's method ``losses(batch)``.
        classes_fn: From the batch to the class of each row, ``(N,)``, int64, for selectors that need it; each one's
            kept share is logged, ``kept/CLASS``. Default None.
        **settings: Those of :class:`rowprop.SelectiveBackprop`, except ``accumulate_to``. On several devices ``ranks``
            is ``Local()`` by default. With a ``history`` batches are the pairs of :class:`rowprop.history.WithIds`.
            Progress is the trainer's.

    Raises:
        MissingExtra: On import, where neither ``lightning`` nor ``pytorch_lightning`` is installed.
        InvalidInput: A wrong setting; a module without ``losses``, or that optimizes by hand; an optimizer that asks
            for the loss of a batch twice.

    Attributes:
        step: The :class:`rowprop.SelectiveBackprop` of the running fit, whose state is saved in checkpoints.
        record: The :class:`rowprop.step.Record` of the last step; None before the first.
    """

    _framework, _accumulation = "Lightning", "Trainer(accumulate_grad_batches=...)"
    _replaced: Replaced | None = None
    _asked = _raised = False

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Replace the module's training step."""
        if stage != "fit":
            return
        name = type(pl_module).__name__
        if not pl_module.automatic_optimization:
            instead = "SelectiveBackpropCallback replaces the step; call rowprop.pick in training_step instead."
            raise InvalidInput(f"{name} optimizes by hand, but the callback {instead}")
        if self._losses_fn is None and not callable(getattr(pl_module, "losses", None)):
            needed = "no method losses(batch) that returns the loss of each row, which was needed"
            remedy = "add it, or give SelectiveBackpropCallback(selector, losses_fn)."
            raise InvalidInput(f"{name} has {needed}; {remedy}")
        self._make_step(pl_module, self._losses_fn or _own_losses, several=trainer.world_size > 1)

        def training_step(batch: Any, batch_idx: int, *_: Any) -> Tensor:
            return self._train(trainer, pl_module, batch, batch_idx)

        self._raised = False
        self._replaced = Replaced(pl_module, {"training_step": training_step})

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Give the module its own training step back."""
        if stage == "fit" and self._replaced is not None:
            self._replaced.give_back()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Give the module its own training step back: Lightning tears nothing down after an exception."""
        self._raised = True
        self.teardown(trainer, pl_module, "fit")

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Record that the batch's loss was not read yet."""
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
        self._load(own_state(state_dict["ranks"]))

    def _train(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> Tensor:
        if self._asked:
            raise InvalidInput(
                "the optimizer asks for a loss more than once, as LBFGS does; use one that asks once, e.g. SGD."
            )
        self._asked = True
        ids, batch = (None, batch) if cast(Any, self.step).history is None else batch
        loss, record, numbers = self._run(batch, batch_idx, progress=_progress(trainer, batch_idx), ids=ids)
        module.log_dict(numbers, batch_size=record.num_rows)
        return loss


def _own_losses(module: Any, batch: Any) -> Tensor:
    return module.losses(batch)


def _progress(trainer: Any, batch_idx: int) -> float | None:
    """The part that is done of what ends first, the epochs or the steps; None where the trainer knows no end."""
    known = list[float]()
    if (trainer.max_epochs or -1) > 0 and math.isfinite(trainer.num_training_batches):
        known.append((trainer.current_epoch + batch_idx / trainer.num_training_batches) / trainer.max_epochs)
    if trainer.max_steps > 0:
        known.append(trainer.global_step / trainer.max_steps)
    return min(1.0, max(known)) if known else None
