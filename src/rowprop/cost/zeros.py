"""find_zeros(): which gradients of a training are zero, and what skip_zeros() would save there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from rowprop.backprop.backward import Backward, running
from rowprop.backprop.rowgrad import RowGrad
from rowprop.backprop.zeros import MOST, live_entries
from rowprop.batch import tensors
from rowprop.checks import check_kind
from rowprop.cost.flops import counting
from rowprop.cost.where import Modules, current_node


@dataclass(frozen=True)
class ZeroPlace:
    """A module to whose output a gradient with zeros comes.

    Attributes:
        module: Its path; the root goes by its class.
        unit: What :func:`rowprop.skip_zeros` would leave out there: ``"token"`` where the output is ``(N, T, C)``.
        zero_rows: The share of the rows whose gradient is zero.
        zero_tokens: The share of the tokens; None where the unit is the row.
        saves: The share of the backward's FLOPs that ``skip_zeros`` there would save.
    """

    module: str
    unit: str
    zero_rows: float
    zero_tokens: float | None
    saves: float

    def __repr__(self) -> str:
        share, what = (self.zero_rows, "rows") if self.zero_tokens is None else (self.zero_tokens, "tokens")
        return f"{share:.0%} of the {what} at {self.module} have no gradient; skip_zeros there saves {self.saves:.0%}"


@dataclass
class ZeroReport:
    """What :func:`find_zeros` found; filled when its block ends.

    Attributes:
        places: The modules whose gradient has zeros that are worth skipping, the largest saving first; of modules below
            one another the first that the backward comes to.
        backwards: How many backwards ran.
        backward_flops: Their FLOPs, without those of :attr:`uncounted`.
        uncounted: Ops without a formula, with the number of calls.
    """

    places: list[ZeroPlace] = field(default_factory=list[ZeroPlace])
    backwards: int = 0
    backward_flops: int = 0
    uncounted: dict[str, int] = field(default_factory=dict[str, int])

    def __repr__(self) -> str:
        if not self.places:
            return f"No zeros that are worth skipping in the gradients of {self.backwards} backwards."
        return f"{self.places[0]} of the backward's FLOPs."


@contextmanager
def find_zeros(model: nn.Module) -> Generator[ZeroReport]:
    """Find which gradients are zero in the training steps of the block, and what :func:`rowprop.skip_zeros` would save.

    Args:
        model: The model that the steps train; the training itself stays as it is.

    Yields:
        A :class:`ZeroReport`, filled when the block ends. ``print(report)`` tells the place to skip zeros at.

    Raises:
        InvalidInput: ``model`` is no module.

    Saved are the FLOPs of products and convolutions below the place: at its live tokens where a module's own gradient
    is live at no others, as before the first attention, else at all tokens of the rows that have a live one.

    Cost:
        Reads each module's gradient, and Python runs at every op: on 2,048 tokens .02 to .04 of a step of a
        GPT or Llama of width 768, .05 of one of width 256, and more of a shorter step. A compiled model runs
        uncompiled in the block.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2))
        >>> with rowprop.find_zeros(model) as report:
        ...     model(torch.randn(10, 4)).square().mean(1)[:3].sum().backward()
        >>> print(report)
        70% of the rows at 1 have no gradient; skip_zeros there saves 70% of the backward's FLOPs.
    """
    check_kind("find_zeros", "model", model, nn.Module, "a torch.nn.Module was needed.")
    seen, report = _Seen(model), ZeroReport()
    with ExitStack() as stack:
        for path, module in cast(Any, model).named_modules():
            hook = partial(seen.left, path or type(model).__name__)
            stack.callback(module.register_forward_hook(hook).remove)
        stack.enter_context(seen.modules.tracked())
        stack.enter_context(counting(seen.ran))
        yield report
    seen.fill(report)


_Call = tuple[str, int]  # a module's path, and which of its calls it was, from 0


@dataclass(eq=False)
class _Pass:
    """One backward: the live entries of the gradients of calls' outputs, as they came, and the FLOPs of each node."""

    live: list[tuple[list[_Call], Tensor]] = field(default_factory=list[tuple[list[_Call], Tensor]])
    flops: dict[int, int] = field(default_factory=dict[int, int])

    def saved(self, by_call: dict[_Call, int]) -> dict[str, tuple[list[Tensor], float]]:
        """For each module that skipping would save at: its live entries, and the FLOPs that it would save.

        Of modules below one another it is the first: at the others, what goes past them would still be whole.
        """
        own = [sum(by_call.get(call, 0) for call in calls) for calls, _ in self.live]
        met: list[tuple[str, Tensor]] = []
        found: dict[str, tuple[list[Tensor], dict[int, float]]] = {}
        for order, (calls, live) in enumerate(self.live):
            path = calls[0][0]
            if live.float().mean() > MOST or any(above != path and _cost(live, kept) < 1 for above, kept in met):
                continue
            met.append((path, live))
            entries, shares = found.setdefault(path, ([], {}))
            entries.append(live)
            for later in range(order, len(self.live)):
                if own[later]:
                    shares[later] = 1 - _cost(self.live[later][1], live)  # of several calls above, the last counts
        return {
            path: (entries, sum(own[at] * share for at, share in shares.items()))
            for path, (entries, shares) in found.items()
        }


class _Seen:
    """Looks at the gradients of modules' outputs, and counts the FLOPs of their backwards."""

    def __init__(self, model: nn.Module) -> None:
        self.modules = Modules(model)
        self.passes: list[_Pass] = []
        self.uncounted: dict[str, int] = {}
        self._hooked: dict[tuple[Any, int], list[_Call]] = {}  # by what made an output: its calls, innermost first
        self._calls = Counter[str]()

    def left(self, path: str, _: nn.Module, __: Any, output: Any) -> None:
        """A module's forward is over: look at the gradient of its output when it comes."""
        if torch.compiler.is_compiling():
            return
        call = path, self._calls[path]
        self._calls[path] += 1
        for tensor in tensors(output):
            node: Any = tensor.grad_fn
            if node is None or tensor.is_nested or tensor.layout is not torch.strided or not tensor.ndim:
                continue  # without a gradient, or of no rows
            calls = self._hooked.setdefault((node, tensor.output_nr), [])
            if not calls:  # a hook of the node comes after the tensor's own, which may skip zeros already
                node.register_prehook(partial(self._arrived, calls, tensor.output_nr))
            calls.append(call)

    def _arrived(self, calls: list[_Call], output: int, grads: tuple[Tensor | None, ...]) -> None:
        grad = grads[output]
        if grad is None or type(grad) is RowGrad or grad.layout is not torch.strided:
            return
        self._pass().live.append((calls, live_entries(grad, range(2 if grad.ndim == 3 else 1))))

    def ran(self, name: str, flops: tuple[int, ...] | None, func: Any, inputs: Any, out: Any) -> None:
        """Note an op's FLOPs for the node of the backward that runs it."""
        node = current_node()
        if node is not None and flops is None:
            self.uncounted[name] = self.uncounted.get(name, 0) + 1
        elif node is not None and flops is not None and any(flops):
            number = node._sequence_nr()
            by_node = self._pass().flops
            by_node[number] = by_node.get(number, 0) + sum(flops)

    def _pass(self) -> _Pass:
        def begin() -> _Pass:
            self.passes.append(_Pass())
            backward.ends.append(self._hooked.clear)
            return self.passes[-1]

        backward: Backward = running()
        return backward.of(self, begin)

    def fill(self, report: ZeroReport) -> None:
        """Work out what each place would have saved."""
        found: dict[str, tuple[list[Tensor], float]] = {}
        for one in self.passes:
            by_call = Counter[_Call]()
            for number, flops in one.flops.items():
                by_call[self.modules.call_of(number)] += flops
            report.backward_flops += sum(one.flops.values())
            for path, (entries, saves) in one.saved(by_call).items():
                before = found.get(path, ([], 0.0))
                found[path] = before[0] + entries, before[1] + saves
        report.backwards = len(self.passes)
        report.uncounted = self.uncounted
        for path, (entries, flops) in found.items():
            if flops > 0:
                rows = _share(list(map(_rows, entries)))
                tokens = _share(entries) if entries[0].ndim > 1 else None
                saves = flops / report.backward_flops
                report.places.append(ZeroPlace(path, "row" if tokens is None else "token", rows, tokens, saves))
        report.places.sort(key=lambda place: -place.saves)


def _rows(live: Tensor) -> Tensor:
    """Whether a row has a live entry, (N,)."""
    return live.any(1) if live.ndim > 1 else live


def _share(live: list[Tensor]) -> float:
    """The share of entries that are not live, of several backwards."""
    return 1 - sum(float(each.sum()) for each in live) / sum(each.numel() for each in live)


def _cost(own: Tensor, kept: Tensor) -> float:
    """The share of a module's backward that is left, by the live entries of its own gradient, if these are kept above.

    Entries are rows (N,) or tokens (N, T); rows of a module may be the tokens of another.
    """
    rows, mine = _rows(kept), _rows(own)
    spread = rows.unsqueeze(1).expand_as(kept) if kept.ndim > 1 else rows
    for entries, above in ((own, kept), (mine, rows), (own, spread)):
        if entries.numel() == above.numel() and not (entries.flatten() & ~above.flatten()).any():
            return max(1, int(above.sum())) / above.numel()  # one goes on where none is live
    return 1.0
