"""VCAS's own control: both kinds of shares follow from exact and sampled passes over two batches, every so many steps.

The control stands in the place of :func:`rowprop.thin`'s. Blocks, hooks and draws are the same code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from statistics import fmean
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from rowprop.backprop.sliced import RowSet
from rowprop.batch import num_rows
from rowprop.checks import check_entries, check_whole, is_number, shown
from rowprop.errors import InvalidInput
from rowprop.host import readable, waits
from rowprop.scoring import LossesFn, per_row
from rowprop.state import backward_undone
from rowprop.thinning.control import OWNER, Control, Seen, count_of
from rowprop.thinning.draw import added_variance, draw, floored, inclusion
from rowprop.thinning.handle import MULTIPLE, Thinning
from rowprop.thinning.weights import Found, Pairs, Product, norms_of

REPEATS = 2
"""M: exact passes of a control, one for each batch, and sampled passes for each of them."""
LEAST = 1e-9
"""Shares stay above it."""

Probe = Literal["", "exact", "rows"]
"""The pass of a control that runs: none, one without draws, or one in which rows are drawn, and no pairs."""


@dataclass(frozen=True, eq=False)
class VcasRecord:
    """The record of one step.

    Attributes:
        step: Number of the step, from 0.
        loss_all: Mean loss over all rows, 0-d, detached.
        controlled: Whether the control ran in this step, before its forward.
        s: The share of the norms' sum that the rows kept at a block hold.
        keep: For each block, from the input on, rho: the share of rows that it keeps.
        pairs: For each thinned product of a weight gradient, nu: the share of its (row, token) pairs. A product is
            named by the block whose gradient comes to it, and by its number there.
        variance: The ratio of two variances of the gradient, of the last control: that of drawing rows over that of
            choosing the batch. NaN before the first control.
        ready: True: every step is whole.
    """

    step: int
    loss_all: Tensor
    controlled: bool
    s: float
    keep: dict[str, float]
    pairs: dict[str, float]
    variance: float
    ready: bool = True

    def to_dict(self) -> dict[str, int | float | bool]:
        """Return the step as plain numbers under flat names, as loggers take them; waits for the loss."""
        return {
            "step": self.step,
            "loss_all": float(self.loss_all),
            "vcas/s": self.s,
            "vcas/keep": fmean(self.keep.values()) if self.keep else 1.0,
            "vcas/pairs": fmean(self.pairs.values()) if self.pairs else 1.0,
            "vcas/variance": self.variance,
            "vcas/controlled": self.controlled,
        }


@dataclass
class RowControl(Control):
    """The shares of rows: ``s`` steps up or down, and the shares follow from it and from the norms of exact passes.

    Attributes:
        alpha: The step of ``s``.
        s: The share of the norms' sum that the rows kept at a block hold.
        ratio: The ratio of the two variances of the last control.
        norms: For each block the norms of its rows' gradients, one vector for each exact pass.
    """

    alpha: float = 0.01
    s: float = 1.0
    ratio: float = float("nan")
    norms: dict[str, list[Tensor]] = field(default_factory=dict[str, "list[Tensor]"])

    def begin(self, by: int = 1) -> None:
        """Nothing depends on the number of backwards."""

    def measures(self, number: int, often: bool = True) -> bool:
        """The control's own passes measure."""
        return False

    def counts(self, number: int) -> bool:
        """No work is counted, since rows are always drawn."""
        return False

    def looks_at(self, number: int, drawn: bool = True) -> bool:
        """The control's own passes look."""
        return False

    def renews(self) -> bool:
        """The control's own passes steer, so rows are always drawn."""
        return False

    def update(self, seen: Mapping[str, list[Seen]], measured: bool) -> None:
        """Take note of a backward."""
        self.passes += 1

    def steer(self, added: float, between: float) -> None:
        """Move ``s`` by the variance that drawing rows added, and by the one between batches; set the shares."""
        if isfinite(added) and isfinite(between):
            self.ratio = added / between if between else float("nan")
            self.s = min(1.0, max(0.0, self.s + self.alpha * _sign(added - self.tau * between)))
            least = LEAST
            for place, share in self.shares.items():  # from the input on
                if place in self.norms:
                    share.keep = least = max(least, fmean(holding(norms, self.s) for norms in self.norms[place]))

    def reason(self) -> str:
        """Why the shares are what they are, in a sentence."""
        return f"VCAS's control: the rows kept at a block hold {self.s:.3g} of the norms' sum"

    def state_dict(self) -> dict[str, Any]:
        """All that the next shares follow from, in plain numbers."""
        return {**super().state_dict(), "s": self.s, "ratio": self.ratio}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from the state that ``state_dict()`` returned."""
        check_entries(OWNER, state, [*super().state_dict(), "s", "ratio"])
        if not is_number(state["s"]) or not 0 <= state["s"] <= 1 or not isinstance(state["ratio"], float):
            raise InvalidInput(
                f"{OWNER} got s={shown(state['s'])} and ratio={shown(state['ratio'])} but a number in [0, 1] and a "
                "number were needed; save and load the state whole."
            )
        super().load_state_dict({name: held for name, held in state.items() if name not in ("s", "ratio")})
        self.s, self.ratio = float(state["s"]), state["ratio"]


@dataclass
class PairControl(Pairs):
    """The shares of pairs: each is multiplied or divided by ``beta``.

    Attributes:
        beta: The factor.
        nu: For each product the share of its pairs.
        probe: The pass of a control that runs.
        exact: For each product its value in each exact pass.
        added: For each product the variance that drawing its pairs would add, in each sampled pass.
    """

    beta: float = 0.95
    nu: dict[str, float] = field(default_factory=dict[str, float])
    probe: Probe = ""
    exact: dict[str, list[Tensor]] = field(default_factory=dict[str, "list[Tensor]"])
    added: dict[str, list[Tensor]] = field(default_factory=dict[str, "list[Tensor]"])

    def draw(
        self,
        place: str,
        factors: tuple[Tensor, Tensor],
        weights: Callable[[], Tensor | None],
        step: int,
        uniform: Callable[[], float],
    ) -> tuple[tuple[Tensor, Tensor] | None, Product, Tensor | None] | None:
        """Draw the pairs of one product, as :meth:`Pairs.draw` does; in a pass of the control all stay."""
        first, second = factors
        if not readable(first):
            return None
        if self.probe == "exact":
            self.exact.setdefault(place, []).append(first.T @ second)
            return None
        arrived = first.shape[0]
        kept = min(arrived, count_of(self.nu.setdefault(place, 1.0), arrived, step))
        seen = Product(arrived, kept, flops=2 * first.numel() * second.shape[1])
        norms = q = None
        if kept < arrived:
            norms = norms_of(first) * norms_of(second)
            q = inclusion(norms, kept)
        if self.probe == "rows":
            none = torch.zeros((), dtype=torch.float64 if first.device.type != "mps" else None, device=first.device)
            found = none if norms is None or q is None else added_variance(norms, q)
            self.added.setdefault(place, []).append(found)
            return None
        if q is None:
            return None, seen, None
        return draw(q, kept, uniform()), seen, None

    def update(self, seen: Found) -> None:
        """Take note of a backward."""
        self.passes += 1

    def steer(self) -> None:
        """Move the share of each product by both variances of its value."""
        for place, values in self.exact.items():
            if len(values) == REPEATS and (added := self.added.get(place)):
                between = float(_distance(values[:1], values[1:])) / 2
                excess = float(torch.stack(added).mean()) - self.tau * between
                if isfinite(excess):
                    self.nu[place] = min(1.0, max(LEAST, self.nu[place] * self.beta ** -_sign(excess)))

    def reason(self) -> str:
        """How many products are summed over fewer pairs, in a sentence."""
        return (
            f"weight gradients over drawn pairs in {sum(nu < 1 for nu in self.nu.values())} of {len(self.nu)} products"
        )

    def state_dict(self) -> dict[str, Any]:
        """All that the next shares follow from, in plain numbers."""
        return {"passes": self.passes, "nu": dict(self.nu)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from the state that ``state_dict()`` returned."""
        check_entries(OWNER, state, ["passes", "nu"])
        check_whole(OWNER, "passes", state["passes"], 0)
        nu: Any = state["nu"]
        fits = isinstance(nu, Mapping) and all(
            isinstance(place, str) and is_number(n) and 0 < cast(float, n) <= 1
            for place, n in cast("Mapping[object, object]", nu).items()
        )
        if not fits:
            raise InvalidInput(
                f"{OWNER} got nu={shown(state['nu'])} but a number in (0, 1] for each product was needed."
            )
        self.passes, self.nu = state["passes"], {place: float(n) for place, n in cast("Mapping[str, Any]", nu).items()}


class VcasThinning(Thinning):
    """A handle whose shares the control sets."""

    def __init__(
        self,
        model: nn.Module,
        blocks: Mapping[str, nn.Module],
        rows: RowControl,
        pairs: PairControl,
        generator: torch.Generator,
    ) -> None:
        super().__init__(model, blocks, rows, generator)
        self._pairs = pairs

    @property
    def active(self) -> bool:
        """Whether backwards are thinned."""
        return self._active

    @property
    def rows(self) -> RowControl:
        """The control of the rows."""
        return cast(RowControl, self._control)

    @property
    def pairs(self) -> PairControl:
        """The control of the pairs."""
        return self._pairs

    def _choose(
        self, place: str, number: int, forward: int, mixes: bool, norms: Tensor, among: RowSet
    ) -> tuple[Tensor, Tensor] | None:
        if not self._active or not readable(norms):
            return None
        arrived, probe = norms.numel(), self.pairs.probe
        begun = self._begun(number)
        begun.block = place
        rows = begun.rows.setdefault((forward, among.num_rows), arrived)
        if probe == "exact":
            self.rows.norms.setdefault(place, []).append(norms)
        kept = count_of(self.rows.share(place), rows, MULTIPLE if waits(norms) else 1)
        kept = arrived if probe == "exact" else min(arrived, kept)
        begun.seen.setdefault(place, []).append((Seen(arrived, kept, rows), None))
        if kept < arrived:
            return draw(inclusion(floored(norms) if mixes else norms, kept), kept, self._uniform())
        # All rows as a set of their own, so that the products below learn of their pairs.
        return torch.arange(arrived, device=norms.device), torch.ones_like(norms)

    def _ended(self, number: int) -> None:
        if self.pairs.probe:
            if done := self._passes.pop(number, None):
                self._control.sort(done.seen)
        else:
            super()._ended(number)


class Vcas:
    """The step that :func:`rowprop.recipes.vcas` returns.

    Attributes:
        handle: Thins the model's backwards; ``handle.remove()`` ends it.
    """

    def __init__(self, model: nn.Module, losses_fn: LossesFn, handle: VcasThinning, every: int) -> None:
        self.handle = handle
        self._model, self._losses_fn, self._every = model, losses_fn, every
        self._step = 0
        self._last: Any = None

    def __call__(self, batch: Any) -> tuple[Tensor, VcasRecord]:
        """Run the batch forward, after the control where it is due.

        Args:
            batch: As ``losses_fn`` takes it.

        Returns:
            The mean loss, 0-d, whose ``backward()`` is thinned; and the record.

        Raises:
            InvalidInput: The batch has no rows, or the output of ``losses_fn`` is not one loss per row.
        """
        due = self._last is not None and self._step % self._every == 0
        controlled = due and self.handle.active and self._model.training and torch.is_grad_enabled()
        if controlled:
            self._control((self._last, batch))
        loss = self._loss(batch)
        rows, pairs = self.handle.rows, self.handle.pairs
        keep = {place: share.keep for place, share in rows.shares.items()}
        record = VcasRecord(self._step, loss.detach(), controlled, rows.s, keep, dict(pairs.nu), rows.ratio)
        self._step += 1
        self._last = batch if self._step % self._every == 0 else None  # held for the next control alone
        return loss, record

    def state_dict(self) -> dict[str, Any]:
        """All that later steps follow from; before a step with a control, the last batch too."""
        return {"step": self._step, "last": self._last, "thinning": self.handle.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on as the step would have that returned this state.

        Raises:
            InvalidInput: An entry is missing, or no step of this recipe can have made it; nothing is loaded then.
        """
        owner = "Vcas.load_state_dict"
        check_entries(owner, state, ["step", "last", "thinning"])
        check_whole(owner, "step", state["step"], 0)
        self.handle.load_state_dict(state["thinning"])
        self._step, self._last = state["step"], state["last"]

    def _loss(self, batch: Any) -> Tensor:
        return per_row("losses_fn", self._losses_fn(self._model, batch), num_rows(batch)).mean()

    def _control(self, batches: Sequence[Any]) -> None:
        rows, pairs = self.handle.rows, self.handle.pairs
        parameters = [p for p in self._model.parameters() if p.requires_grad]
        exact: list[list[Tensor | None]] = []
        added: list[Tensor] = []
        try:
            with backward_undone(self._model, batches):
                for batch in batches:
                    loss = self._loss(batch)
                    if not (parameters and loss.requires_grad):
                        return  # nothing is trained
                    exact.append(self._gradients(loss, parameters, "exact"))
                    sampled = (self._gradients(loss, parameters, "rows") for _ in range(REPEATS))
                    added += [_distance(each, exact[-1]) for each in sampled]
            rows.steer(float(torch.stack(added).mean()), float(_distance(*exact)) / 2)
            pairs.steer()
        finally:  # after an error, too: the next control must not find this one's numbers
            pairs.probe = ""
            for gathered in (rows.norms, pairs.exact, pairs.added):
                gathered.clear()

    def _gradients(self, loss: Tensor, parameters: Iterable[nn.Parameter], probe: Probe) -> list[Tensor | None]:
        self.handle.pairs.probe = probe
        autograd = cast("Callable[..., Sequence[Tensor | None]]", torch.autograd.grad)
        return list(autograd(loss, list(parameters), retain_graph=True, allow_unused=True))


def holding(norms: Tensor, share: float) -> float:
    """The smallest share of the rows that holds a share of the sum of their norms; 1 for all of it."""
    if share >= 1:
        return 1.0
    held = norms.cpu().double().sort(descending=True).values.cumsum(0)
    return min(int((held < share * held[-1]).sum()) + 1, norms.numel()) / norms.numel()


def _distance(one: Sequence[Tensor | None], other: Sequence[Tensor | None]) -> Tensor:
    """The sum of the differences' squares, 0-d, float64. Sparse gradients are left out."""
    pairs = zip(one, other, strict=True)
    norms = [
        cast(Any, torch).linalg.vector_norm(g, dtype=torch.promote_types(g.dtype, torch.float32))
        for g in (a if b is None else b if a is None else a - b for a, b in pairs)
        if g is not None and g.layout == torch.strided
    ]
    return torch.stack(norms).double().square().sum()


def _sign(value: float) -> int:
    return (value > 0) - (value < 0)
