"""Where a draw saves more than it costs. Costs are counted on the graph, not timed, so that runs are reproducible.

The cost of the backward between two blocks is counted in FLOPs: matrix products and passes over elements, in proportion
to the share of rows, plus Python overhead per op. The cheapest set of blocks to draw after, perhaps none, is chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import accumulate, takewhile
from math import ceil, inf, prod
from operator import add, mul
from typing import Any, Literal

from torch import Tensor
from torch.autograd.function import BackwardCFunction

from rowprop.thinning.control import EACH, RENEWED_AFTER, check_form


@dataclass(frozen=True)
class Costs:
    """The costs on a kind of device, each as the FLOPs of products that take as long."""

    draw: float  # one draw: norms, probabilities and indices, about thirty small ops
    op: float  # overhead of an op that runs on some of the rows: its rule is in Python
    element: float  # per element of an op's gradient
    gathered: float  # extra per element of a kept row: the op's saved tensors are gathered


# Measured on one core that ran large products at 100 GFLOP/s.
COSTS = {"cpu": Costs(25e6, 8e6, 80.0, 100.0)}
ELSEWHERE = Costs(25e9, 2e9, 200.0, 200.0)  # an estimate for devices, where each op launches kernels
UNKNOWN = 1e15  # FLOPs assumed for an opaque node, such as a checkpoint, so that a draw above it pays
# Ops whose backward is a view, and the node through which a sliced gradient enters a reentrant checkpoint.
FREE = (
    "T", "View", "UnsafeView", "Transpose", "Permute", "Unsqueeze", "Squeeze", "ReshapeAlias", "Alias",
    "_CatchBackward",
)  # fmt: skip
# Ops whose backward multiplies matrices.
PRODUCTS = ("Addmm", "Baddbmm", "Mm", "Bmm", "Linear", "Convolution", "ScaledDotProduct")
MIXES = ("ScaledDotProduct", "Bmm")  # attention: gradients of its second and third operand cover all tokens
LONG = ("Convolution", "NativeBatchNorm", "CudnnBatchNorm")  # rules that take LONGER times the usual overhead
LONGER = 4
WAKES = 10  # cost of a trial, in draws per block; a trial lasts from one update of the shares to the next
TRIALS = 0.05  # approximate share of the backward's time to spend on trials
FADES = 0.75  # decay of the counted work per forward: the mean covers about four forwards
MOST = 1024  # maximum number of forwards between trials: batches may become larger


@dataclass(frozen=True)
class Work:
    """The cost of the backward from one block to the next, at all rows, in FLOPs."""

    exact: float = 0.0  # of the full backward
    fixed: float = 0.0  # of a sliced backward, independent of the number of rows
    by_row: float = 0.0  # of a sliced backward, proportional to the share of rows; here for all rows
    draw: float = 0.0  # of a draw after the block
    mixed: float = 0.0  # part of ``by_row`` that drawing tokens does not reduce: attention's keys and values

    def __add__(self, other: Work) -> Work:
        return Work(*map(add, vars(self).values(), vars(other).values()))

    def over(self, count: float) -> Work:
        """This sum divided by ``count``."""
        return Work(*(cost / count for cost in vars(self).values()))


@dataclass
class Worth:
    """Decides after which blocks rows, or tokens, are drawn."""

    unit: Literal["row", "token"] = "row"
    works: dict[str, Work] = field(default_factory=dict[str, Work])  # see ``decide``; from the last decision
    left: list[str] = field(default_factory=list[str])  # blocks without a draw, since the last decision
    pause: int = 0  # number of unwatched forwards, set by the last decision
    asleep: int = 0  # how many of these remain
    sleeping: bool = False  # the current forward is not watched
    # For each block the sum of the work below it over the counted forwards, and the number of these forwards. Both
    # decay with each forward, so that recent forwards count more.
    counted: dict[str, Work] = field(default_factory=dict[str, Work])
    forwards: float = 0.0
    _run: tuple[int, int] = (-1, -1)
    _last: int = -1

    def begin(self) -> None:
        """Register a forward."""
        self.sleeping = self.asleep > 0
        self.asleep -= self.sleeping

    @property
    def idle(self) -> bool:
        """Whether no rows are drawn after any block."""
        return len(self.left) == len(self.works) > 0

    def draws(self, place: str) -> bool:
        """Whether rows are drawn after the block ``place``."""
        return place not in self.left

    def share(self, place: str, share: Callable[[str], float]) -> float:
        """The share of the arriving rows to keep after a block, including the shares of blocks above without a draw."""
        if self.unit == "token":  # all tokens arrive at each block
            return share(place)
        order = list(self.works)
        above = order[order.index(place) + 1 :] if place in self.works else []
        return prod(map(share, [place, *takewhile(self.left.__contains__, above)]))

    def count(self, place: str, tensor: Tensor, forward: int, backward: int = -1) -> None:
        """Add the work below an output, in a forward or in a backward that recomputes a checkpoint."""
        if (forward, backward) != self._run:
            if forward != self._run[0]:
                self.counted = {place: work.over(1 / FADES) for place, work in self.counted.items()}
                self.forwards = FADES * self.forwards + 1
            self._run, self._last = (forward, backward), -1
        work, self._last = work_below(tensor, self._last)
        self.counted[place] = self.counted.get(place, Work()) + work

    def decide(self, shares: Mapping[str, float], part: float) -> None:
        """Choose the blocks to draw after, from the work below each in a forward.

        ``shares`` are the shares of the arriving rows that blocks would keep; ``part`` is the share of the batch's rows
        in the gradient at the first block, below 1 after a pick.
        """
        self.works = {place: self.counted[place].over(self.forwards) for place in shares if place in self.counted}
        order = list(reversed(self.works))
        works = [self.works[place] for place in order]
        drawn = self._cheapest(works, [shares[place] for place in order], part)
        self.left = [place for number, place in enumerate(order) if number not in drawn]
        self.asleep = self.pause = self._pause(works, part) if works and not drawn else 0

    def _cheapest(self, works: Sequence[Work], shares: Sequence[float], part: float) -> tuple[int, ...]:
        """The indices of the blocks to draw after, given the share of the arriving rows that each would keep."""
        if self.unit == "row":
            return cheapest(works, list(accumulate(shares, mul)), part)
        costs = [
            w.draw + w.fixed + w.mixed + share * (w.by_row - w.mixed) for w, share in zip(works, shares, strict=True)
        ]
        return tuple(n for n, (work, cost) in enumerate(zip(works, costs, strict=True)) if cost < work.exact)

    def _pause(self, works: Sequence[Work], part: float) -> int:
        """Forwards until the next trial: more after each trial, so that trials cost little."""
        trial, exact = WAKES * sum(work.draw for work in works), part * sum(work.exact for work in works)
        hopeless = not self._cheapest(works, [0.0] * len(works), part)
        if not exact or (hopeless and self.pause):  # the first batch may be unusual
            return MOST
        enough = min(ceil(trial / (TRIALS * exact)) - RENEWED_AFTER, MOST)
        return min(enough, max(2 * self.pause, RENEWED_AFTER)) if enough > RENEWED_AFTER else 0

    def reason(self) -> list[str]:
        """Why no rows are drawn after some blocks, a sentence; empty if rows are drawn after all of them."""
        if self.pause:
            exact = sum(work.exact for work in self.works.values())
            size = f"the backward of the blocks is as much as {max(1, round(exact / 1e6)):,} MFLOP"
            return [f"off for {self.pause} forwards, since draws would cost more than they save: {size}"]
        if self.idle:
            return [f"no {self.unit}s are drawn: at these shares this would cost more than it saves"]
        return [f"no draw after {', '.join(self.left)}, where it would cost more than it saves"] if self.left else []

    def state_dict(self) -> dict[str, Any]:
        """The last decision and all that the next one depends on, in plain numbers."""
        whole = asdict(self)
        plain = {name: whole[name] for name in ("works", "counted", "pause", "asleep", "forwards")}
        return plain | {"left": {place: place in self.left for place in self.works}}

    def restored(self, state: Any) -> Worth:
        """A decision with a saved state."""
        works = {EACH: asdict(Work())}
        check_form("worth", state, Worth().state_dict() | {"works": works, "counted": works, "left": {EACH: True}})
        if state["counted"]:
            check_form("worth.forwards", state["forwards"], 1.0)
        works, counted = ({place: Work(**work) for place, work in state[n].items()} for n in ("works", "counted"))
        left = [place for place in reversed(state["left"]) if state["left"][place]]
        return Worth(self.unit, **state | {"works": works, "counted": counted, "left": left})


def cheapest(works: Sequence[Work], shares: Sequence[float], part: float = 1.0) -> tuple[int, ...]:
    """The indices, from the output on, of the blocks to draw after for the cheapest backward.

    Each share is relative to the rows at the first block; a block keeps all arriving rows if these are fewer.
    """
    # For each share of rows that may arrive at a block: the lowest cost so far, and its draws. None: no draw so far.
    best: dict[float | None, tuple[float, tuple[int, ...]]] = {None if part == 1 else 1.0: (0.0, ())}
    for number, (work, share) in enumerate(zip(works, shares, strict=True)):
        now: dict[float | None, tuple[float, tuple[int, ...]]] = {}
        for came, (cost, drawn) in best.items():
            after = cost + (work.exact if came is None else work.fixed + part * came * work.by_row)
            now[came] = min(now.get(came, (inf, ())), (after, drawn))
            if share < (came or 1.0):
                after = cost + work.draw + work.fixed + part * share * work.by_row
                now[share] = min(now.get(share, (inf, ())), (after, (*drawn, number)))
        best = now
    return min(best.values())[1]


def work_below(tensor: Tensor, last: int) -> tuple[Work, int]:
    """The work of a tensor's graph nodes with sequence numbers above ``last``, and the largest of these numbers."""
    costs = COSTS.get(tensor.device.type, ELSEWHERE)
    flops = elements = ops = 0.0
    made: dict[Any, float] = {}  # the work at all rows of each node
    mixers: list[Any] = []
    youngest = last
    for node in _below([tensor.grad_fn], last):
        youngest = max(youngest, node._sequence_nr())
        kind = node.name().removesuffix("Backward0").removesuffix("Backward1")
        if kind.startswith(MIXES):
            mixers += [edge for edge, _ in node.next_functions[1:3]]
        if kind in FREE:
            continue
        nested = any(one.is_nested_tensor for one in node._input_metadata)  # such a shape has no product
        if nested or isinstance(node, BackwardCFunction) or "Rnn" in kind:
            flops += UNKNOWN
        else:
            ops += LONGER if kind in LONG else 1
            size, products = sum(prod(one.shape) for one in node._input_metadata), _flops(node, kind)
            elements += size
            flops += products
            made[node] = products + costs.element * size
    everything = flops + costs.element * elements
    draw = costs.draw + costs.element * tensor.numel()
    mixed = sum(made.get(node, 0.0) for node in _below(mixers, last))
    return Work(everything, costs.op * ops, everything + costs.gathered * elements, draw, mixed), youngest


def _below(ahead: list[Any], last: int) -> Iterator[Any]:
    """The nodes that a gradient reaches from these, with sequence numbers above ``last``."""
    ahead, seen = [*ahead], set[Any]([None])
    while ahead:
        node = ahead.pop()
        if node not in seen and not hasattr(node, "variable") and node._sequence_nr() > last:
            seen.add(node)
            ahead += [edge for edge, _ in node.next_functions]
            yield node


def _flops(node: Any, kind: str) -> float:
    """FLOPs of the products in a node's backward, from the shapes of its gradients; saved tensors are not unpacked."""
    if not kind.startswith(PRODUCTS):
        return 0.0
    shapes = [None if edge is None else edge._input_metadata[place].shape for edge, place in node.next_functions]
    size = prod(node._input_metadata[0].shape)
    if kind.startswith("ScaledDotProduct"):
        q, k = shapes[:2]
        return 10.0 * prod(q) * k[-2] if q and k else 0.0
    first, second = (shapes[1:3] if kind in ("Addmm", "Baddbmm") else [*shapes, None])[:2]
    products = 2.0 * size * sum(shape is not None for shape in (first, second))
    if kind == "Convolution":
        return products * (prod(second) / second[0] if second else first[1] if first else 0)
    if kind in ("Addmm", "Baddbmm", "Mm", "Bmm"):
        return products * (first[-1] if first else second[-2] if second else 0)
    return products * (first or second or [0])[-1] if kind == "Linear" else 0.0
