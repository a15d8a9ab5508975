"""The two-sided audit: rules that claim rows wrongly, and ops that have no rule.

A recorder keeps every call that a backward makes on a gradient, with its operands. The backwards are those of the zoo's
models, of the cases of ``rule_cases`` and of torch's own samples. Each call is then made twice: with row-sliced
operands, whose rows lie wherever the operand's shape allows, and with the same operands scattered into zeros. The
second outcome is the truth. Autograd never looks at the rows that a gradient holds, so a rule has to be right for any
rows, whatever the rest of the call is. Rows are also positions of two or three dimensions, next to each other or apart.
"""

from __future__ import annotations

import itertools
import random
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten

import cuda_cases
import op_samples
import rowprop
import rule_cases
import zoo
from cuda_kernels import PLANS, installed
from op_samples import floats
from rowprop import host
from rowprop.backprop.autograd.rowgrad import RowGrad
from rowprop.backprop.rows.layout import Layout, Part, layout_of
from rowprop.backprop.rows.rows import RowSet
from rowprop.backprop.rows.slice import RowSlice
from rowprop.backprop.rows.zeros import Zeros
from rowprop.backprop.rules.registry import RULES, op_name
from rowprop.backprop.watch import Report

aten = torch.ops.aten
UNDEFINED = {"empty_like", "new_empty", "new_empty_strided"}  # of their results, only the shape is defined
FIRST = {"_linalg_solve_ex", "triangular_solve"}  # of their results, no formula of autograd uses others than the first
FRESH = {"zeros_like", "new_zeros", "zero_", "zero"}
DOUBLES = dict.fromkeys([torch.float64, torch.complex128], 1e-9)
SINGLES = dict.fromkeys([torch.float32, torch.complex64], 1e-4)
TOLERANCE = DOUBLES | SINGLES | {torch.bfloat16: 0.04, torch.float16: 0.01}


@dataclass(eq=False)
class Call:
    """One call of an op with a gradient among its operands, as some backward made it."""

    op: Any
    leaves: list[Any]
    spec: Any
    kinds: list[str]  # of each leaf: "gradient"; "zeros", made from a gradient and not yet written to; or "plain"
    source: str
    times: int = 0

    @property
    def name(self) -> str:
        return op_name(self.op)


def signature(op: Any, leaves: Sequence[Any], kinds: Sequence[str]) -> Any:
    """A key for a call: without values, except whether an operand is zeros, which some rules look at."""

    def of(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return repr(value)
        return value.shape, value.dtype, value.stride(), floats(value) and is_zero(value)

    return op, tuple(map(of, leaves)), tuple(kinds)


class Recorder(TorchDispatchMode):
    """Records the calls on tensors given to :meth:`mark`, and on all tensors computed from them."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[Any, Call] = {}
        self.source = ""
        self.marked: dict[int, tuple[Tensor, bool]] = {}  # by id, which stays valid while the tensor is held

    def mark(self, gradient: Tensor, fresh: bool = False) -> Tensor:
        """Take this tensor, and all tensors computed from it, for gradients."""
        self.marked[id(gradient)] = gradient, fresh
        return gradient

    def take(self, losses: Tensor) -> Tensor:
        """All losses; the backward marks the gradient that reaches them."""
        losses = losses.clone()
        losses.register_hook(lambda gradient: self.mark(gradient.clone()))
        return losses

    def run(self, source: str, f: Callable[[], Any]) -> None:
        self.source = source
        self.marked.clear()
        with self:
            f()
        self.marked.clear()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaves, spec = tree_flatten((args, kwargs or {}))
        kinds = [self._kind(leaf) for leaf in leaves]
        met = any(kind != "plain" for kind in kinds)
        if met and func.namespace == "aten":
            self._record(func, leaves, spec, kinds)
        out = func(*args, **(kwargs or {}))
        if met:
            views = any(r.alias_info is not None for r in func._schema.returns)
            fresh = func._schema.name.removeprefix("aten::") in FRESH or (views and "gradient" not in kinds)
            for leaf in tree_flatten(out)[0]:
                if isinstance(leaf, Tensor):
                    self.mark(leaf, fresh)
        return out

    def _kind(self, value: Any) -> str:
        _, fresh = self.marked.get(id(value), (None, None))
        if fresh is None or not floats(value):
            return "plain"
        return "zeros" if fresh and is_zero(value) else "gradient"

    def _record(self, func: Any, leaves: list[Any], spec: Any, kinds: list[str]) -> None:
        if any(isinstance(leaf, Tensor) and leaf.layout != torch.strided for leaf in leaves):
            return
        key = signature(func, leaves, kinds)
        if key not in self.calls:
            kept = [copy_of(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
            self.calls[key] = Call(func, kept, spec, kinds, self.source)
        self.calls[key].times += 1


def copy_of(tensor: Tensor, order: str = "same") -> Tensor:
    """A copy in memory of its own; ``order`` may put its dimensions in another order there."""
    tensor = tensor.detach()
    if order == "reversed":  # the first dimension is the densest
        dims = range(tensor.ndim - 1, -1, -1)
        return tensor.permute(*dims).contiguous().clone().permute(*dims) if tensor.ndim > 1 else tensor.clone()
    if order == "channels last":
        return tensor.movedim(1, -1).contiguous().clone().movedim(-1, 1) if tensor.ndim > 2 else tensor.clone()
    return tensor.clone(memory_format=torch.preserve_format if order == "same" else torch.contiguous_format)


def record_zoo(recorder: Recorder) -> None:
    for entry in zoo.ENTRIES:
        recorder.run(f"zoo: {entry.name}", lambda: zoo.backward(entry, torch.float32, recorder.take))


def record_cases(recorder: Recorder) -> None:
    for name, channels_last in itertools.product(rule_cases.CASES, (False, True)):
        recorder.run(f"case: {name}", lambda: rule_cases.run(name, recorder.take, channels_last))
    for name, (trailing, op) in rule_cases.DIRECT.items():
        recorder.run(f"direct: {name}", lambda: op(recorder.mark(torch.randn(rule_cases.N, *trailing))))


def record_kernels(recorder: Recorder) -> None:
    """The kernels of CUDA that ``cuda_kernels`` makes for the CPU; they have to be installed."""
    for name, case in cuda_cases.CASES.items():
        recorder.run(f"kernel: {name}", lambda: cuda_cases.gradients(case, recorder.take))


def opinfo_samples(every: int = 1) -> Iterator[tuple[str, Callable[[Any], Any]]]:
    """Torch's own samples: the op's name, and a function that runs a sample's backward, given a way to take rows."""
    for op in [op for op, dtype in op_samples.OPS if dtype is torch.float64][::every]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's own, about its samples
            for _, leaves, outs in op_samples.samples(op, torch.float64):
                for out in (out for out in outs if out.ndim and out.numel()):
                    yield op.formatted_name, lambda take: op_samples.gradients(leaves, out, 0, take)


def record_opinfo(recorder: Recorder, every: int = 1) -> None:
    for name, sample in opinfo_samples(every):
        with suppress(*op_samples.REFUSALS):
            recorder.run(f"torch: {name}", lambda: sample(recorder.take))


@dataclass(frozen=True)
class Variant:
    """The kept rows, and the dtype and order of the operands."""

    rows: str = "some"
    dtype: torch.dtype | None = torch.float64  # None: as recorded
    order: str = "contiguous"  # of the kept values in memory
    others: str = "contiguous"  # of plain operands in memory
    apart: bool = False  # the second sliced operand holds other rows than the first


VARIANTS = [
    *(Variant(rows) for rows in ("one", "some", "unordered", "all", "repeated")),
    *(Variant(dtype=dtype) for dtype in (None, torch.bfloat16, torch.complex128)),
    *(Variant(order=order) for order in ("reversed", "channels last")),
    *(Variant(others=order) for order in ("same", "reversed", "channels last")),
    Variant(order="channels last", others="channels last"),
    Variant(apart=True),
    Variant("repeated", order="reversed"),
    Variant("repeated", None),
]


OF_POSITIONS = [
    *(Variant(rows) for rows in ("one", "few", "most", "repeated", "fallen", "tokens")),
    *(Variant("few", dtype=dtype) for dtype in (None, torch.bfloat16, torch.complex128)),
    Variant("few", order="reversed", others="channels last"),
    Variant("few", order="channels last", others="reversed"),
    Variant("few", apart=True),
    Variant("repeated", None),
]
"""The variants where rows are positions of several dimensions."""
POSITIONS_PER_CALL = 40
"""So many of their cases are drawn for each call: there are more than of all others."""


def kept(kind: str, n: int) -> list[int]:
    """Indices into ``n`` rows."""
    return {
        "one": [n - 1],
        "few": sorted({n // 2, n - 1, 0}),
        "most": list(range(1, n)),
        "fallen": [n // 2, 0, n - 1, 0],  # the first and the last have fallen out
        "some": list(range(n > 1, n, 2)),
        "unordered": [n - 1, 0][: min(n, 2)],
        "all": [*range(1, n), 0],
        "repeated": [n - 1, 0, n - 1],
    }[kind]


def layouts(shape: Sequence[int]) -> list[Layout]:
    """Each dimension as the rows: alone, and merged with another dimension in front, behind, and both."""
    found: list[Layout] = []
    for dim, size in enumerate(shape):
        if size == 0:
            continue
        small = next((f for f in range(2, size) if size % f == 0), size)
        second = next((f for f in range(2, size) if size // small % f == 0), size)
        for outer, inner in ((1, 1), (small, 1), (1, small), (small, second)):
            if outer * inner <= size and Layout(dim, size // (outer * inner), outer, inner) not in found:
                found.append(Layout(dim, size // (outer * inner), outer, inner))
    return found


def positions(shape: Sequence[int]) -> list[Layout]:
    """Some dimensions as the rows' positions, in any order; the last merged with another, or two merged in one."""
    held = [d for d, size in enumerate(shape) if size > 1]
    found = [
        layout_of([Part(d, shape[d]) for d in dims])
        for count in (2, 3)
        for dims in itertools.permutations(held, count)
        if count == 2 or dims == tuple(sorted(dims))
    ]
    for first, last in itertools.permutations(held, 2):
        for factor in (f for f in range(2, shape[last]) if shape[last] % f == 0):
            found.append(layout_of([Part(first, shape[first]), Part(last, shape[last] // factor, 1, factor)]))
            found.append(layout_of([Part(first, shape[first]), Part(last, shape[last] // factor, factor, 1)]))
            break
    for dim in held:
        for factor in (f for f in range(2, shape[dim]) if shape[dim] % f == 0):
            rest = shape[dim] // factor
            found.append(layout_of([Part(dim, rest, factor), Part(dim, factor, 1, rest)]))  # the inner one is slower
            break
    return found


Placing = tuple[Layout | None, ...]


def placings(shapes: Sequence[Sequence[int]], of: Callable[[Sequence[int]], list[Layout]] = layouts) -> list[Placing]:
    """The layouts to try for the gradients of a call; None for a dense gradient.

    Each gradient leads in turn, in every layout that its shape allows. The other gradients hold their rows in the same
    place counted from the last dimension, or from the first, or in any other place that fits, or they are dense.
    """
    found: dict[Placing, None] = {}
    options = [of(shape) for shape in shapes]
    for lead, shape in enumerate(shapes):
        for chosen in options[lead]:
            from_last = [chosen.at(chosen.dim - len(shape) + len(other)) for other in shapes]

            def placed(accept: Callable[[Layout, Layout], bool]) -> Placing:
                """The first layout of each other gradient that is accepted, given its own counted from the last."""
                fitting: list[Layout | None] = []
                for other, wanted in enumerate(from_last):
                    same = (x for x in options[other] if x.num_rows == chosen.num_rows and accept(x, wanted))
                    fitting.append(chosen if other == lead else next(same, None))
                return tuple(fitting)

            found[placed(lambda x, wanted: x == wanted)] = None
            found[placed(lambda x, wanted: x == chosen)] = None
            found[placed(lambda x, wanted: x != wanted)] = None
            found[placed(lambda x, wanted: x not in (chosen, wanted))] = None
            found[placed(lambda x, wanted: False)] = None
    return list(found)


def _described(layout: Layout) -> str:
    return " and ".join(f"dim {p.dim} {p.outer}*{p.size}*{p.inner}" for p in layout.parts)


class Refused(Exception):
    """The op itself does not take these operands."""


@dataclass
class Case:
    """One call, the layouts of its gradients, and the kept rows."""

    call: Call
    placing: Placing
    variant: Variant

    def __str__(self) -> str:
        shapes = [tuple(leaf.shape) for leaf in self.call.leaves if isinstance(leaf, Tensor)]
        at = ", ".join("dense" if x is None else _described(x) for x in self.placing)
        v = self.variant
        more = [] if v.dtype is torch.float64 else ["as recorded" if v.dtype is None else str(v.dtype)[6:]]
        more += [f"values {v.order}"] * (v.order != "contiguous") + [f"others {v.others}"] * (v.others != "contiguous")
        more += ["of two picks"] * v.apart
        others = [leaf for leaf in self.call.leaves if not isinstance(leaf, Tensor)]
        return f"{self.call.name}{shapes}{others}; {at}; rows: {', '.join([v.rows, *more])}; from {self.call.source}"

    def operands(self, plain: str = "contiguous") -> tuple[list[Any], list[Any]]:
        """The leaves with dense gradients and plain operands in the order ``plain``, and with sliced gradients."""
        generator = torch.Generator().manual_seed(0)
        dense: list[Any] = []
        sliced: list[Any] = []
        places = iter(self.placing)
        sets: list[RowSet] = []
        zeros: list[int] = []
        variant = self.variant
        for leaf, kind in zip(self.call.leaves, self.call.kinds, strict=True):
            value = cast(leaf, variant.dtype)
            if kind == "zeros":
                dense.append(torch.zeros(value.shape, dtype=value.dtype))
                zeros.append(len(sliced))
                sliced.append(value)
                continue
            layout = next(places) if kind == "gradient" else None
            if layout is None:
                others = plain if variant.others == "contiguous" else variant.others
                dense.append(copy_of(value, plain) if isinstance(value, Tensor) else value)
                sliced.append(copy_of(value, others) if isinstance(value, Tensor) else value)
                continue
            if not sets or (variant.apart and len(sets) == 1):
                sets.append(row_set("unordered" if sets else variant.rows, layout))
            rows = sets[-1]
            values = torch.randn(layout.kept_shape(value.shape, rows.kept), generator=generator, dtype=torch.float64)
            if rows.absent is not None:
                values.view(-1)[by_entry(values.shape, layout.compact(rows.kept).parts)[rows.absent]] = 0
            inside = RowSlice(copy_of(values.to(value.dtype), variant.order), rows, layout, value.shape)
            dense.append(scattered(inside))
            sliced.append(RowGrad(inside))
        rows = sets[0] if sets else RowSet(torch.tensor([0]), 2, unique=True, batchnorm="exact")
        for at in zeros:
            sliced[at] = RowGrad(Zeros(sliced[at].shape, sliced[at].dtype, sliced[at].device, rows))
        return dense, sliced

    @property
    def allowed(self) -> float:
        """The error that rounding explains, relative to the largest element."""
        dtypes = [getattr(cast(leaf, self.variant.dtype), "dtype", leaf) for leaf in self.call.leaves]
        return max(TOLERANCE.get(dtype, 0.0) for dtype in [torch.float64, *dtypes] if isinstance(dtype, torch.dtype))

    def run(self) -> tuple[str | None, bool]:
        """The fault of the outcome, if it has one, and whether the op ran on the kept rows.

        Raises:
            Refused: The op does not take these operands when they are dense.
        """
        if self.senseless:
            raise Refused
        dense, sliced = self.operands()
        try:
            expected = self._truth(dense)
        except Refused:  # the op may need the memory order that its forward left
            dense, sliced = self.operands("same")
            expected = self._truth(dense)
        try:
            with rowprop.watch() as report:
                fault = self._fault(sliced, dense, expected)
        except Exception as error:
            fault = f"raised {type(error).__name__}: {error}"
        if fault and self.variant.others != "contiguous" and self._refuses(dense, expected):
            raise Refused
        return fault, bool(report.sliced)

    @property
    def senseless(self) -> bool:
        """Whether torch's own kernel cannot give the truth for this call."""
        if self.call.name == "mkldnn_rnn_layer_backward":  # the saved workspace fits the dtype of its forward only
            return self.variant.dtype is not None
        # This kernel ends the process if channels-last images need no gradient.
        return self.call.name == "native_group_norm_backward" and self.call.leaves[-3] is False

    def _call(self, leaves: list[Any]) -> Any:
        args, kwargs = tree_unflatten(leaves, self.call.spec)
        torch.default_generator.manual_seed(0)
        PLANS.clear()  # no two calls are of one model
        with torch._C.DisableTorchFunctionSubclass():
            return self.call.op(*args, **kwargs)

    def _truth(self, dense: list[Any]) -> Any:
        try:
            return self._call(dense)
        except Exception as error:
            raise Refused from error

    def _fault(self, leaves: list[Any], dense: list[Any], expected: Any) -> str | None:
        """How a call with ``leaves`` differs from the truth: in its results, or in its operands afterwards."""
        wanted, found = tree_flatten(expected)[0], tree_flatten(self._call(leaves))[0]
        if self.call.name in FIRST:
            wanted, found = wanted[:1], found[:1]
        if len(found) != len(wanted):
            return f"{len(found)} results, not {len(wanted)}"
        values = self.call.op._schema.name.removeprefix("aten::") not in UNDEFINED
        results = [differs(a, e, self.allowed, values) for a, e in zip(found, wanted, strict=True)]
        # Only floating operands are compared: a kernel may write to its opaque workspace.
        operands = [differs(a, e, self.allowed) if floats(e) else None for a, e in zip(leaves, dense, strict=True)]
        faults = [f"result {i} {how}" for i, how in enumerate(results) if how]
        faults += [f"operand {i} {how} afterwards" for i, how in enumerate(operands) if how]
        return next(iter(faults), None)

    def _refuses(self, dense: list[Any], expected: Any) -> bool:
        """Whether the op itself, on dense gradients, goes wrong with plain operands in this order."""
        contiguous, others = self.operands()
        kinds = self.call.kinds
        mixed = [x if kind == "plain" else f for f, x, kind in zip(contiguous, others, kinds, strict=True)]
        alike = [copy_of(x, self.variant.others) if isinstance(x, Tensor) else x for x in mixed]
        try:
            return any(self._fault(tried, dense, expected) for tried in (mixed, alike))
        except Exception:
            return True


def is_zero(value: Tensor) -> bool:
    return not value.resolve_neg().any()  # any() fails on a tensor with the flag of a lazy negative


def row_set(kind: str, layout: Layout) -> RowSet:
    """Rows of a layout; "tokens" are an entry each of larger rows that are known, "fallen" ones have no place."""
    if kind == "tokens":
        first = layout.parts[0].size
        whole = RowSet(torch.tensor(kept("few", first)), first, unique=True, batchnorm="exact")
        inner = layout.num_rows // first
        rows = whole.derived(whole.index * inner + inner - 1, layout.num_rows, unique=True)
        rows.whole = whole, torch.arange(whole.kept)
        return rows
    index = torch.tensor(kept(kind, layout.num_rows)).long()
    rows = RowSet(index, layout.num_rows, unique=kind not in ("repeated", "fallen"), batchnorm="exact")
    if kind == "fallen":
        rows.absent = torch.tensor([True, False, False, True])
    return rows


def by_entry(shape: Sequence[int], parts: Sequence[Part]) -> Tensor:
    """The flat places of a shape's elements, a line for each entry of these parts, in row-major order."""
    number = torch.zeros([1] * len(shape), dtype=torch.int64)
    for part in parts:
        along = torch.arange(shape[part.dim]) // part.inner % part.size
        number = number * part.size + along.view([-1 if d == part.dim else 1 for d in range(len(shape))])
    return number.expand(list(shape)).flatten().argsort(stable=True).view(prod(part.size for part in parts), -1)


def scattered(g: RowSlice) -> Tensor:
    """The truth about a sliced gradient: what each kept row holds is added in its place."""
    out = torch.zeros(g.shape, dtype=g.values.dtype)
    places = by_entry(g.shape, g.layout.parts)[g.rows.index]
    kept_rows = by_entry(g.values.shape, g.layout.compact(g.rows.kept).parts)
    out.view(-1).index_put_((places,), g.values.flatten()[kept_rows], accumulate=True)
    return out


def cast(value: Any, dtype: torch.dtype | None) -> Any:
    """A floating tensor, or the name of a floating dtype, as ``dtype``; anything else as it is."""
    if dtype is None:
        return value
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() or (value.is_complex() and dtype.is_complex) else value
    return dtype if isinstance(value, torch.dtype) and value.is_floating_point else value


def differs(actual: Any, expected: Any, relative: float, values: bool = True) -> str | None:
    """How an outcome differs from the truth. Places with a truth that is not finite are not compared."""
    if not isinstance(expected, Tensor):
        return None if type(actual) is type(expected) and actual == expected else f"is {actual}, not {expected}"
    if not isinstance(actual, Tensor):
        return f"is {type(actual).__name__}, not a tensor"
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return f"is {actual.dtype} {tuple(actual.shape)}, not {expected.dtype} {tuple(expected.shape)}"
    if type(actual) is RowGrad:
        actual = actual.plain()
        if actual.shape != expected.shape or actual.dtype != expected.dtype:
            return f"holds {actual.dtype} {tuple(actual.shape)}, not {expected.dtype} {tuple(expected.shape)}"
    if not values or expected.numel() == 0:
        return None
    if not floats(expected):
        return None if torch.equal(actual, expected) else "differs"
    finite = expected.isfinite()
    wide = torch.complex128 if expected.is_complex() else torch.float64
    error = (actual.to(wide) - expected.to(wide))[finite].abs()
    if error.numel() == 0:
        return None
    allowed = relative * max(1.0, float(expected[finite].abs().max()))
    worst = float(error.nan_to_num(nan=float("inf")).max())
    return f"is off by {worst:.1e}" if worst > allowed else None


@dataclass
class Findings:
    cases: Counter[str] = field(default_factory=Counter)  # for each op, the number of calls that were compared
    stayed: Counter[str] = field(default_factory=Counter)  # in how many of these the op ran on the kept rows
    wrong: list[str] = field(default_factory=list)  # a line for each call in which a rule was wrong, with the fault
    refused: int = 0  # the number of calls that were not compared: the op itself does not take such operands

    @property
    def unreached(self) -> list[str]:
        """Ops with a rule that never ran on kept rows."""
        return sorted({op_name(op) for op in RULES} - {name.rstrip("_") for name in self.stayed} - set(self.stayed))

    def __str__(self) -> str:
        counts = (
            f"{self.cases.total()} cases of {len(self.cases)} ops compared with the dense truth, "
            f"{self.stayed.total()} of them of {len(self.stayed)} ops on kept rows only; "
            f"{self.refused} were none, the op refusing the operands"
        )
        return "\n  ".join([f"{counts}\nclaimed but wrong: {len(self.wrong)}", *self.wrong])


def cases_of(call: Call) -> list[Case]:
    shapes = [leaf.shape for leaf, kind in zip(call.leaves, call.kinds, strict=True) if kind == "gradient"]
    if any(prod(shape) > 50_000 for shape in shapes):
        return []
    found: list[Case] = []
    for placing, variant in itertools.product(placings(shapes, positions), OF_POSITIONS):
        several = [layout for layout in placing if layout is not None]
        if not (variant.apart and len(several) < 2) and not (variant.rows == "most" and several[0].num_rows > 64):
            found.append(Case(call, placing, variant))
    if len(found) > POSITIONS_PER_CALL:
        found = random.Random(0).sample(found, POSITIONS_PER_CALL)
    dense = [(None,) * len(shapes)] if "zeros" in call.kinds else []
    for placing, variant in itertools.product([*placings(shapes), *dense], VARIANTS):
        sizes = [layout.num_rows for layout in placing if layout is not None]
        alone = set(sizes) == {1} and variant.rows not in ("all", "some")
        if not alone and not (variant.apart and len(sizes) < 2):
            found.append(Case(call, placing, variant))
    return found


def sampled(calls: Iterable[Call], per_op: int) -> Iterator[Case]:
    """``per_op`` cases of every op, drawn at random, the same cases every time."""
    drawn = random.Random(0)
    by_op: dict[Any, list[Call]] = {}
    for call in calls:
        by_op.setdefault(call.op, []).append(call)
    for same in by_op.values():
        for call, times in Counter(drawn.choices(same, k=per_op)).items():
            cases = cases_of(call)
            yield from drawn.sample(cases, min(times, len(cases)))


def audit(calls: Iterable[Call], per_op: int | None = None) -> Findings:
    """Make every call again in every case, or ``per_op`` cases of every op."""
    findings = Findings()
    every = (case for call in calls for case in cases_of(call))
    for case in every if per_op is None else sampled(calls, per_op):
        try:
            fault, stayed = case.run()
        except Refused:
            findings.refused += 1
            continue
        findings.cases[case.call.name] += 1
        findings.stayed[case.call.name] += stayed
        if fault:
            findings.wrong.append(f"{fault}: {case}")
    findings.stayed = +findings.stayed
    return findings


@dataclass
class Met:
    """An op at which gradients went back to all rows: the calls of each zoo's model and of each op of torch's."""

    reasons: Counter[str] = field(default_factory=Counter)  # for each reason, the number of backwards
    models: Counter[str] = field(default_factory=Counter)
    samples: Counter[str] = field(default_factory=Counter)


# With it, a read of a tensor's values waits for a device, as under pytest's ``--as-accelerator``.
as_accelerator = partial(mock.patch.object, host, "READ_AT_ONCE", frozenset[str]())


def waited() -> dict[str, Counter[str]]:
    """For each number that a rule waits for on a device, the waits of each of the zoo's models; all rules are asked."""
    found: dict[str, Counter[str]] = {}
    with as_accelerator():
        for entry in zoo.ENTRIES:
            for what, times in zoo.sliced(entry, torch.float32).report.waited.items():
                found.setdefault(what, Counter())[entry.name] += times
        for name in rule_cases.CASES:
            with rowprop.watch() as report:
                rule_cases.run(name, lambda losses: rowprop.pick(losses, [1, 4], batchnorm="exact"), False)
            for what in report.waited:
                found.setdefault(what, Counter())
    return dict(sorted(found.items(), key=lambda item: (-len(item[1]), item[0])))


def more_on_a_device(every: int = 1) -> dict[str, set[str]]:
    """The ops that densify on a device where they do not on the CPU, each with the backwards in which they do."""
    here, found = missing(every), dict[str, set[str]]()
    with as_accelerator():
        there = missing(every)
    for name, met in there.items():
        own = here.get(name, Met())
        if more := {*met.models, *met.samples} - {*own.models, *own.samples}:
            found[name] = more
    return found


def missing(every: int = 1) -> dict[str, Met]:
    """The ops that densify in the backwards of the zoo and of torch's own samples, the most frequent first.

    Of torch's ops, one in ``every`` is asked.
    """
    found: dict[str, Met] = {}

    def note(report: Report, where: str, corpus: str) -> None:
        for name, densified in report.densified.items():
            met = found.setdefault(name, Met())
            met.reasons[densified.reason] += 1
            getattr(met, corpus)[where] += densified.count

    for entry in zoo.ENTRIES:
        note(zoo.sliced(entry, torch.float32).report, entry.name, "models")
    for name, sample in opinfo_samples(every):
        with rowprop.watch() as report, suppress(*op_samples.REFUSALS):
            sample(lambda losses: rowprop.pick(losses, torch.tensor([len(losses) - 1]), batchnorm="exact"))
        note(report, name, "samples")
    return dict(sorted(found.items(), key=lambda item: (-len(item[1].models), -len(item[1].samples), item[0])))


def main() -> None:
    """Every case of every call, or of the calls of ops with the given names; exits with 1 if a rule is wrong."""
    torch.set_num_threads(1)
    recorder = Recorder()
    record_zoo(recorder)
    record_cases(recorder)
    record_opinfo(recorder)
    with installed():
        record_kernels(recorder)
        names = sys.argv[1:]
        findings = audit(c for c in recorder.calls.values() if not names or c.name.rstrip("_") in names)
    print(f"{len(recorder.calls)} different calls with a gradient among their operands")
    print(findings)
    if names:
        sys.exit(bool(findings.wrong))
    print("never on kept rows, though they have a rule:", ", ".join(findings.unreached) or "none")
    gone = missing()
    print(f"missing: {len(gone)} ops at which a gradient went back to all rows")
    for name, met in gone.items():
        where = f"{met.models.total()} calls in {len(met.models)} models, {met.samples.total()} in torch's samples"
        print(f"  {name}: {where}: {'; '.join(met.reasons)}")
    more = more_on_a_device()
    print(f"densify on a device only: {len(more)} ops")
    for name, where in more.items():
        print(f"  {name}: {', '.join(sorted(where))}")
    sys.exit(1 if findings.wrong or more else 0)


if __name__ == "__main__":
    main()
