"""The policy for non-finite rows, and the floor under selections that are too small to run."""

from __future__ import annotations

from typing import Any, Literal, cast

import torch
from torch import Tensor

from rowprop.distributed import Choose
from rowprop.engines.base import Unit, uses_batch_statistics
from rowprop.engines.clock import mark
from rowprop.errors import InvalidInput
from rowprop.host import readable, waits
from rowprop.selection.base import Context, Selection, mean_unread, unread
from rowprop.selection.common import NotFinite, hardest_first, weights_dtype

OnNonFinite = Literal["error", "drop", "keep"]


class NonFinite:
    """The policy for rows with a NaN or infinite loss or score.

    Args:
        kind: ``"error"``, ``"drop"`` or ``"keep"``, see :class:`rowprop.SelectiveBackprop`.
        unit: What is selected, for the errors. Default ``"row"``.
    """

    def __init__(self, kind: OnNonFinite, unit: Unit = "row") -> None:
        self.kind = kind
        self.unit: Unit = unit

    def choose(
        self, scores: Tensor, context: Context, choose: Choose, engine: str, later: list[Flags] | None = None
    ) -> Selection:
        """Have ``choose`` select among the rows that the policy allows.

        Args:
            scores: One number per row, shape ``(N,)``; NaN or infinite where the loss or the score is.
            context: Of these rows.
            choose: From scores and their context to a selection.
            engine: Name of the engine, for the error.
            later: Takes flags that are on a device, for :func:`check_at_the_end`. Default None: the host waits for
                them here.

        Raises:
            InvalidInput: A row is not finite under ``"error"``, or none is under ``"drop"``.
        """
        finite = scores.isfinite()
        if self.kind == "keep":
            try:
                return choose(torch.where(finite, scores, torch.inf), context)
            except NotFinite:
                return _with_nonfinite(scores, finite, context, choose)
        if later is not None and self.kind == "error" and waits(finite):
            later.append(Flags(finite, engine, self.unit))
            try:
                return choose(scores, context)
            except NotFinite:
                raise _refused(finite, engine, self.unit) from None
        if bool(finite.all()):
            return choose(scores, context)
        if self.kind == "error":
            raise _refused(finite, engine, self.unit)
        rows = finite.nonzero().squeeze(1)
        if rows.numel() == 0:
            raise InvalidInput(
                f"All {scores.numel()} {self.unit}s have a NaN or infinite loss or score but nonfinite='drop' needs "
                "one that has not; look at the data and the learning rate."
            )
        among = choose(scores[rows], context.at(rows))
        return unread(rows[among.rows], among.weights, scores.numel(), even=among.even, unbiased=among.unbiased)

    def usable(self, finite: Tensor) -> Tensor:
        """How many rows a selection is made among, 0-d."""
        return finite.sum() if self.kind == "drop" else finite.new_full((), finite.numel(), dtype=torch.int64)

    def mean(self, losses: Tensor | None, finite: Tensor) -> Tensor:
        """Mean loss of the rows that count, 0-d, at least float32; NaN where nobody knows the losses."""
        if losses is None:
            return torch.full((), torch.nan, device=finite.device)
        if self.kind != "drop":
            return mean_loss(losses)
        return torch.where(finite, losses, 0).sum(dtype=weights_dtype(losses)) / finite.sum()  # indexing would wait

    def check_ranks(self, counts: Tensor, num_rows: Tensor) -> None:
        """Refuse a batch of which a rank has dropped all rows; ``counts`` (W,) of ``num_rows`` (W,) it has not."""
        if self.kind == "drop" and bool(((counts == 0) & (num_rows > 0)).any()):
            rank = int(torch.where(num_rows > 0, counts, torch.inf).argmin())
            raise InvalidInput(
                f"All {self.unit}s of rank {rank} have a NaN or infinite loss or score but nonfinite='drop' "
                "needs one on each rank that has not; look at the data and the learning rate."
            )

    def check_trained(self, kept: Tensor, selection: Selection, engine: str, later: list[Flags] | None = None) -> None:
        """Refuse non-finite losses that scoring did not see: another mode, other dropout masks, a scorer."""
        if self.kind == "keep":
            return
        finite = kept.detach().isfinite()
        late = later if self.kind == "error" and waits(finite) else None
        if late is None and bool(finite.all()):
            return
        everything = torch.ones(selection.num_rows, dtype=torch.bool, device=finite.device)
        everything[selection.rows] = finite
        if late is not None:
            late.append(Flags(everything, engine, self.unit))
            return
        if self.kind == "error":
            raise _refused(everything, engine, self.unit)
        raise _refused(
            everything,
            engine,
            self.unit,
            "scoring did not see it, so nonfinite='drop' could not leave them out: score by the losses, in the mode of "
            "training, or choose 'keep'.",
        )


class Flags:
    """Which rows are finite, on their way to the host while the device goes on.

    Args:
        finite: A flag per row, shape ``(N,)``, on a device.
        engine: Name of the engine, for the error.
        unit: What a row is, for the error.

    Raises:
        InvalidInput: The device's numbers cannot be read.
    """

    def __init__(self, finite: Tensor, engine: str, unit: Unit) -> None:
        if not readable(finite):
            raise InvalidInput(
                "nonfinite is 'error' but the losses cannot be read, on the device meta or while a CUDA graph is "
                "captured; choose nonfinite='keep'."
            )
        self._finite = finite.to("cpu", non_blocking=True)
        self._arrived = mark(finite.device)
        self._engine = engine
        self._unit: Unit = unit

    def check(self) -> None:
        """Wait until the flags are here, and refuse rows that are not finite."""
        if not isinstance(self._arrived, float):
            self._arrived.synchronize()
        if not bool(self._finite.all()):
            raise _refused(self._finite, self._engine, self._unit)


def check_at_the_end(loss: Tensor, flags: list[Flags] | None) -> None:
    """Look at the flags when the backward of ``loss`` is queued, so that the device has work meanwhile.

    The flags are there when the forward has ended, which the backward queued behind it need not have. So the error
    leaves ``backward()``, and the optimizer has not stepped. A loss without a graph is looked at here.
    """
    if not flags:
        return

    def check() -> None:
        for found in flags:
            found.check()

    def begun(_: Tensor) -> None:
        cast(Any, torch.autograd.Variable)._execution_engine.queue_callback(check)

    if loss.requires_grad:
        loss.register_hook(begun)
    else:
        check()


def _with_nonfinite(scores: Tensor, finite: Tensor, context: Context, choose: Choose) -> Selection:
    """Select among the finite rows and keep all others, for selectors that need finite scores."""
    wanted, rows = ~finite, finite.nonzero().squeeze(1)
    if rows.numel() > 0:
        wanted[rows[choose(scores[rows], context.at(rows)).rows]] = True
    return mean_unread(wanted.nonzero().squeeze(1), scores.numel(), weights_dtype(scores))


def _refused(
    finite: Tensor,
    engine: str,
    unit: Unit,
    advice: str = "look at the data and the learning rate, or choose nonfinite='drop' or 'keep'.",
) -> InvalidInput:
    rows: list[int] = (~finite).nonzero().squeeze(1).tolist()  # pyright: ignore[reportUnknownVariableType]
    first = ", ".join(str(row) for row in rows[:5]) + (", ..." if len(rows) > 5 else "")
    among = " of those that count" if unit == "token" else ""
    return InvalidInput(
        f"{len(rows)} of {finite.numel()} {unit}s have a NaN or infinite loss or score ({unit}s {first}{among}; engine "
        f"{engine}), "
        f"but finite ones were needed; {advice}"
    )


class Floor:
    """The least number of rows that run through the model.

    Args:
        min_rows: That number; None: 2 while a BatchNorm of the model computes batch statistics, else 1.
        model: The model.
    """

    def __init__(self, min_rows: int | None, model: object) -> None:
        self.min_rows = min_rows
        self.model = model

    def widened(self, selection: Selection, scores: Tensor) -> tuple[Selection, Tensor | None]:
        """Add rows that only go along, where fewer contribute than the floor asks for.

        Their losses are left out, so they get a gradient of zero; but BatchNorm sees them, and a rank that keeps
        nothing has a forward and a backward to run as the others do.

        Returns:
            The rows to backpropagate, and where among them the contributing ones are; None for all.
        """
        floor = min(self._least(selection.num_kept), selection.num_rows)
        if selection.num_kept >= floor:
            return selection, None
        order = hardest_first(torch.where(scores.isfinite(), scores, torch.nan))
        others = order[torch.isin(order, selection.rows, invert=True)]
        finite = others[scores[others].isfinite()]  # zero times an infinity would not be zero
        if selection.num_kept + finite.numel() == 0:
            finite = others[:1]
        rows = torch.cat([selection.rows, finite[: floor - selection.num_kept]]).sort().values
        wider = mean_unread(rows, selection.num_rows, selection.weights.dtype)
        return wider, torch.searchsorted(rows, selection.rows)

    def _least(self, num_kept: int) -> int:
        if self.min_rows is not None:
            return self.min_rows
        # A search through the modules takes time, and two rows are enough for any model.
        return 2 if num_kept < 2 and uses_batch_statistics(self.model) else 1


def mean_loss(losses: Tensor) -> Tensor:
    """Mean of losses, 0-d, at least float32."""
    return losses.mean(dtype=weights_dtype(losses))
