"""find_zeros(): which gradients of a training are zero, and what skip_zeros() saves there, measured."""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from rowprop.backprop.autograd.foreign import upstream
from rowprop.backprop.autograd.hooks import ModuleHook, hook_gradient
from rowprop.backprop.autograd.rowgrad import RowGrad
from rowprop.backprop.backward import outer
from rowprop.backprop.rows.layout import Layout
from rowprop.backprop.rows.slice import RowSlice
from rowprop.backprop.skip import SKIPPED, Look, Skip, places_of
from rowprop.batch import tensors
from rowprop.checks import check_kind
from rowprop.cost import flops
from rowprop.cost.where import current_node


@dataclass(frozen=True)
class ZeroPlace:
    """A module to whose output a gradient with zeros comes.

    Attributes:
        module: Its path; the root goes by its class.
        unit: What :func:`rowprop.skip_zeros` skips there: ``"row"``, ``"token"``, ``"pixel"`` or ``"position"``.
        zero_rows: The share of the rows whose gradient is zero, in all backwards.
        zero_tokens: The share of the tokens, or pixels; None where the unit is the row.
        saves: The share of the FLOPs of all backwards that ``skip_zeros`` there, alone, saved.
    """

    module: str
    unit: str
    zero_rows: float
    zero_tokens: float | None
    saves: float

    def __repr__(self) -> str:
        share = self.zero_rows if self.zero_tokens is None else self.zero_tokens
        zeros = f"{share:.0%} of the {self.unit}s at {self.module} have no gradient"
        return f"{zeros}; skip_zeros there saves {self.saves:.0%}"


@dataclass
class ZeroReport:
    """What :func:`find_zeros` found; filled when its block ends.

    Attributes:
        places: The modules where ``skip_zeros`` saved something, the largest saving first. Modules to which a gradient
            comes that was skipped above are not measured, and are left out.
        backwards: How many backwards ran.
        backward_flops: Their FLOPs without ``skip_zeros``, without those of :attr:`uncounted`.
        unwatched_flops: Those of them that ran before a gradient came to any module of the model: the loss, or a
            network that ``named_modules()`` does not list. Nothing is known about zeros there.
        uncounted: Ops without a formula, with the number of calls.
    """

    places: list[ZeroPlace] = field(default_factory=list[ZeroPlace])
    backwards: int = 0
    backward_flops: int = 0
    unwatched_flops: int = 0
    uncounted: dict[str, int] = field(default_factory=dict[str, int])

    def __repr__(self) -> str:
        share = self.unwatched_flops / max(1, self.backward_flops)
        unwatched = f"{share:.0%} of the backward's FLOPs ran in no module that find_zeros watched"
        if self.places:
            return f"{self.places[0]} of the backward's FLOPs." + (f" {unwatched}." if share >= LEAST else "")
        if share >= LEAST:
            return f"{unwatched}: call find_zeros with the module that ran them."
        return f"No zeros that are worth skipping in the gradients of {self.backwards} backwards."


LEAST = 0.05  # smallest share of unwatched FLOPs that is reported


def find_zeros(model: nn.Module) -> AbstractContextManager[ZeroReport]:
    """Find which gradients are zero in the training steps of the block, and what :func:`rowprop.skip_zeros` saves.

    Args:
        model: The model that the steps train.

    Yields:
        A :class:`ZeroReport`, filled when the block ends. ``print(report)`` names the module at which ``skip_zeros``
        saves most.

    Raises:
        InvalidInput: ``model`` is no module.

    Every backward of the block runs with ``skip_zeros`` at the outputs of all modules. The gradients stay the same, up
    to rounding. What each place saves is the difference between the FLOPs that ran and those of the same ops at full
    size. Counters of FLOPs inside the block show the plain backward. Rows that :func:`rowprop.pick` or ``skip_zeros``
    drop already count as dropped. Below a block of :func:`rowprop.thin`, and in functions declared by
    :func:`rowprop.rowwise`, nothing counts as saved.

    Cost:
        Reads each module's gradient until one is sliced, and Python runs at every op: on 2,048 tokens .02 to .04 of a
        step of a GPT or Llama of width 768, .05 of one of width 256, and more of a shorter step. On an accelerator the
        host waits once for each gradient that it reads. A compiled model runs uncompiled in the block.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2))
        >>> with rowprop.find_zeros(model) as report:
        ...     model(torch.randn(10, 4)).square().mean(1)[:3].sum().backward()
        >>> print(report)
        70% of the rows at 1 have no gradient; skip_zeros there saves 70% of the backward's FLOPs.
    """
    check_kind("find_zeros", "model", model, nn.Module, "a torch.nn.Module was needed.")
    return _measured(model)


@contextmanager
def _measured(model: nn.Module) -> Generator[ZeroReport]:
    named: dict[str, nn.Module] = {path or type(model).__name__: m for path, m in cast(Any, model).named_modules()}
    paths = {module: [path] for path, module in named.items()}  # by module: whose skip_zeros() looks at its outputs
    for path, module in named.items():
        for inner in places_of(module).values():
            paths[inner] += [path] * (inner is not module)
    measure = _Measure()
    with ExitStack() as stack:
        for module, places in paths.items():
            hook = ModuleHook(partial(measure.left, Skip().at(module), places))
            stack.callback(module.register_forward_hook(hook).remove)
        stack.enter_context(flops.counting(measure))
        yield measure.report
    measure.fill()


@dataclass(eq=False)
class _Line:
    """An output of a module, whose gradient is looked at as by ``skip_zeros``."""

    skip: Skip
    output: int  # its index among the outputs of its node
    paths: list[str] = field(default_factory=list[str])  # the modules whose output it is, innermost first
    looks: list[Look] = field(default_factory=list[Look])  # at gradients that were not sliced
    above: set[_Line] = field(default_factory=set["_Line"])  # which sliced what came here
    below: set[_Line] = field(default_factory=set["_Line"])  # which sliced further what this one had sliced


class _Measure(flops.Counter):
    """Skips zeros at each module, and counts what was saved by which of them.

    A gradient is sliced by the first place that it comes to. Its rows carry the places that made them, so each op's
    FLOPs are known at full size, as they would run without a place, and as they ran.
    """

    def __init__(self) -> None:
        super().__init__()
        self.report = ZeroReport()
        self._places: dict[str, list[_Line]] = {}
        self._open: dict[tuple[Any, int], _Line] = {}  # until the backward ends, by what made the output
        self._saved = Counter[frozenset[_Line]]()
        self._inside = frozenset[Any]()  # who made the rows of the op that runs

    def left(self, skip: Skip, paths: list[str], _: nn.Module, __: Any, output: Any) -> None:
        """A module's forward is over: look at the gradient of its output when it comes."""
        for tensor in tensors(output):
            node: Any = tensor.grad_fn
            if node is None or not tensor.ndim or tensor.layout is not torch.strided:
                continue
            key, layout = (node, tensor.output_nr), skip.layout(tensor)
            if key not in self._open:
                self._open[key] = line = _Line(skip, tensor.output_nr)
                if layout is None:  # it has one row
                    cast(Any, tensor).register_hook(self._watch)
                else:
                    hook_gradient(tensor, layout, partial(self._arrived, line, skip.dims(tensor)))
            line = self._open[key]
            line.paths += paths
            for path in paths:
                self._places.setdefault(path, []).append(line)

    def _watch(self, *_: Any) -> None:
        upstream(current_node(), self._known())

    def _known(self) -> set[Any]:
        """The nodes of the running backward that come after a module's output."""
        backward = outer()

        def begin() -> set[Any]:
            self.report.backwards += 1
            backward.ends.append(self._open.clear)
            return {None}

        return backward.of(self, begin)

    def _arrived(self, line: _Line, dims: tuple[int, ...], grad: Tensor, layout: Layout) -> RowSlice | None:
        self._watch()
        if line.output in current_node().metadata.get(SKIPPED, ()):
            return None  # the user's own skip_zeros looks at it next
        if type(grad) is RowGrad and grad.full is None:
            return self._arrived_sliced(line, dims, grad, layout)
        look = line.skip.look(grad, layout, dims)
        line.looks.append(look)
        return _made_by(line, look)

    def _arrived_sliced(self, line: _Line, dims: tuple[int, ...], grad: RowGrad, layout: Layout) -> RowSlice | None:
        """A sliced gradient came: the place is not measured, or what the place above saves would not be known.

        Where ``skip_zeros`` of one module looks at both, single tokens of whole rows may be skipped here.
        """
        above = flops.makers_of((grad,), {})
        whole = isinstance(grad.sliced, RowSlice) and grad.sliced.layout == Layout(layout.dim, layout.parts[0].size)
        line.above |= above
        of_one = above and set(line.paths).intersection(*(each.paths for each in above))
        if of_one and layout.minor and whole:
            look = line.skip.look(grad, layout, dims)
            if look.found is not None:
                line.looks.append(look)
                for each in above:
                    each.below.add(line)
                return _made_by(line, look)
        return None

    def run(self, func: Any, args: Any, kwargs: dict[str, Any], makers: frozenset[Any]) -> Any:
        """Have the ops of a sliced gradient's rule come back here."""
        if not makers:
            return func(*args, **kwargs)
        before, self._inside = self._inside, makers
        try:
            with self:
                return RowGrad.__torch_dispatch__(func, (RowGrad,), args, kwargs)
        finally:
            self._inside = before

    def count(self, makers: frozenset[Any], *about: Any) -> None:
        """Count an op of a backward: for ``makers`` what it costs at full size, else what ran."""
        name, counted, *_ = about
        node, report = current_node(), self.report
        if node is None or (counted is None and makers):
            return
        if counted is None:
            report.uncounted[name] = report.uncounted.get(name, 0) + 1
        elif makers:
            self._saved[makers] += sum(counted)
            report.backward_flops += sum(counted)
        elif self._inside:
            self._saved[self._inside] -= sum(counted)
        elif any(counted):
            report.backward_flops += sum(counted)
            report.unwatched_flops += 0 if node in self._known() else sum(counted)

    def fill(self) -> None:
        """Compute what each place saved."""
        report, found = self.report, set[frozenset[_Line]]()
        for path, lines in self._places.items():
            own, looks = set(lines), [look for line in set(lines) for look in line.looks]
            saved = {makers: flops for makers, flops in self._saved.items() if makers <= own and flops}
            others = set[_Line]().union(*(line.above | line.below for line in own)) - own
            acting, flops = frozenset[_Line]().union(*saved), sum(saved.values())
            if flops > 0 and not others and acting not in found:
                found.add(acting)
                report.places.append(_place(path, looks, flops / report.backward_flops))
        report.places.sort(key=lambda place: -place.saves)


def _made_by(line: _Line, look: Look) -> RowSlice | None:
    if look.found is not None:
        look.found.rows.makers = frozenset({line})
    return look.found


def _place(path: str, looks: list[Look], saves: float) -> ZeroPlace:
    """The shares of all gradients that came to a place; the unit is the finest."""
    unit = next(
        (name for name in ("pixel", "position", "token") if any(look.record.unit == name for look in looks)), "row"
    )
    rows = _share([look.live.flatten(1).any(1) if look.live.ndim > 1 else look.live for look in looks])
    return ZeroPlace(path, unit, rows, None if unit == "row" else _share([look.live for look in looks]), saves)


def _share(live: list[Tensor]) -> float:
    """The share of entries that are zero, of several gradients."""
    return 1 - sum(float(each.sum()) for each in live) / sum(each.numel() for each in live)
