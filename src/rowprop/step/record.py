"""The record of one step."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from rowprop.backprop.pick import Unit
from rowprop.host import readable
from rowprop.selection.base import Selection


@dataclass(frozen=True, eq=False)
class Record:
    """The record of one step.

    In a step with ``unit="token"`` a row is a token, and N is the number of tokens that count. The repr syncs with the
    device to show the losses. :meth:`to_dict` is for loggers.

    Attributes:
        step: Number of the step, from 0.
        loss_all: Mean loss over all N rows, of all ranks where the selection spans ranks, 0-d, detached, at least
            float32; log this one. Over the finite rows under ``nonfinite="drop"``; NaN where they were not computed
            (``recompute`` with a separate scorer), and where no token counts.
        loss_kept: Mean loss over this process's kept rows, 0-d, detached, at least float32; NaN where it kept none.
        selection: The rows that contribute, with the factor of each in the returned loss. Of tokens: places among the
            flattened losses, so that ``rowprop.pick(losses, record.selection)`` takes them.
        num_kept: K, how many rows contribute; 0 where the selector chose none, or another rank has them all.
        num_rows: N, how many the batch has; of tokens, how many count.
        kept_by_rank: K of each rank where the selection spans ranks; else K alone.
        engine: Name of the engine.
        reason: Why this engine, or why the whole batch; a sentence.
        seconds: Time per phase, ``"score"``, ``"forward"`` and ``"select"``, with the accelerator synchronised around
            each; None unless ``timing=True``.
        ready: Whether to call ``optimizer.step()`` now.
        contributed: Rows that have contributed to the pending optimizer step, this batch and all ranks included: K
            without ``accumulate_to``, B of B when ``ready`` with it.
        unit: What a row is, ``"row"`` or ``"token"``.
    """

    step: int
    loss_all: Tensor
    loss_kept: Tensor
    selection: Selection
    num_kept: int
    num_rows: int
    kept_by_rank: tuple[int, ...]
    engine: str
    reason: str
    seconds: dict[str, float] | None
    ready: bool
    contributed: int
    unit: Unit = "row"

    def __repr__(self) -> str:
        losses = ""
        if readable(self.loss_all):
            kept = "all kept" if self.num_kept == self.num_rows else f"kept {float(self.loss_kept):.4g}"
            losses = f"loss {float(self.loss_all):.4g} ({kept if self.num_kept else 'none kept'}), "
        return f"Record(step {self.step}: kept {self.num_kept} of {self.num_rows} {self.unit}s, {losses}{self.engine})"

    def to_dict(self) -> dict[str, int | float | str]:
        """Return the step as plain numbers and texts under flat names, as loggers take them.

        They are ``step``, ``loss_all``, ``loss_kept``, ``num_kept``, ``num_rows``, ``num_kept_all_ranks``,
        ``imbalance``, ``engine``, ``reason``, ``ready``, ``contributed``, and with ``timing=True`` ``score_s``,
        ``forward_s`` and ``select_s``. An unknown loss is NaN. This syncs with the device to read the two losses: call
        it only in the steps that are logged.

        Example:
            >>> losses_fn = lambda model, batch: model(batch).squeeze(1).square()
            >>> selective = SelectiveBackprop(torch.nn.Linear(3, 1), losses_fn, TopK(keep=0.25))
            >>> loss, record = selective(torch.zeros(8, 3))
            >>> {name: value for name, value in record.to_dict().items() if name.startswith("num")}
            {'num_kept': 2, 'num_rows': 8, 'num_kept_all_ranks': 2}
        """
        names = ("step", "num_kept", "num_rows", "imbalance", "engine", "reason", "ready", "contributed")
        flat: dict[str, int | float | str] = {name: getattr(self, name) for name in names}
        flat |= {"loss_all": float(self.loss_all), "loss_kept": float(self.loss_kept)}
        flat["num_kept_all_ranks"] = sum(self.kept_by_rank)
        return flat | {f"{name}_s": seconds for name, seconds in (self.seconds or {}).items()}

    @property
    def imbalance(self) -> float:
        """Largest count of kept rows over the mean of all ranks: 1 is balanced; 0 if no row is kept."""
        return max(self.kept_by_rank) * len(self.kept_by_rank) / max(1, sum(self.kept_by_rank))
