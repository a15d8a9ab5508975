"""The row-sliced gradient: a tensor that holds K rows and claims the shape of all N.

Autograd's own nodes call aten ops on it. ``__torch_dispatch__`` looks up the op's rule, which runs the op at K rows on
:class:`RowSlice` operands; where there is no rule, or a step really mixes rows, the gradient is *densified*: scattered
into zeros, and the op runs at full size. So a missing rule costs time and never changes a result.

Python code that meets the gradient (a hook, a custom function) comes in by ``__torch_function__`` instead: scaling
keeps it sliced, anything else sees, and may write to, a plain dense tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import Any, cast

import torch
from torch import Tensor

from rowprop.backprop.layout import Layout, view

Op = Callable[..., Any]


class RowSet:
    """Which rows one pick kept: ``index`` (K,) int64 into N rows, K at least 1. Compared by identity."""

    __slots__ = ("batchnorm", "copying", "index", "kept", "last", "num_rows", "recompute", "unique")

    def __init__(self, index: Tensor, num_rows: int, *, unique: bool, batchnorm: str) -> None:
        self.index = index
        self.num_rows = num_rows
        self.kept = index.numel()
        self.unique = unique  # False: repeats are possible, and only ops linear in the gradient may stay sliced
        self.batchnorm = batchnorm
        self.copying = False  # while autograd undoes an in-place op on a view: its copies are for itself
        self.last: tuple[Any, Tensor, Tensor] | None = None  # what gather() took last, and from where
        self.recompute: Callable[[Tensor, Layout], Tensor] | None = None  # how to gather while a graph is traced


class RowSlice:
    """What a rule works on: the K rows' ``values``, and where they lie in the full ``shape``."""

    __slots__ = ("layout", "memory_format", "rows", "shape", "values")

    def __init__(self, values: Tensor, rows: RowSet, layout: Layout, shape: Sequence[int]) -> None:
        self.values = values
        self.rows = rows
        self.layout = layout
        self.shape = tuple(shape)
        self.memory_format: torch.memory_format | None = None  # channels-last, where a formula asked for just that

    @property
    def dim(self) -> int:
        """The dimension the rows lie in."""
        return self.layout.dim

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    def take(self, tensor: Tensor, dim: int | None = None) -> Tensor:
        """The kept rows of a full-size plain tensor, its rows lying in ``dim`` (default: where this gradient's do)."""
        return gather(tensor, self.rows, self.layout if dim is None else self.layout.at(dim))

    def like(self, values: Tensor, layout: Layout | None = None) -> RowSlice:
        """A sliced result of the same rows; its full shape follows from the values'."""
        layout = self.layout if layout is None else layout
        shape = list(values.shape)
        shape[layout.dim] = layout.size
        return RowSlice(values, self.rows, layout, shape)

    def kept_shape(self, shape: Sequence[int], layout: Layout | None = None) -> list[int]:
        """A full shape with only the kept rows left in it."""
        return (layout or self.layout).kept_shape(shape, self.rows.kept)

    def aligned(self, other: RowSlice) -> bool:
        """Whether both, of the same rows and sizes, hold them at the same place, counted from the last dimension."""
        a, b = self.layout, other.layout
        return a.dim - self.ndim == b.dim - other.ndim and a.outer == b.outer

    def dense(self) -> Tensor:
        """Scatter into zeros; repeated rows add up."""
        if self.memory_format is None:
            return self.add_into(self.values.new_zeros(self.shape))
        return self.add_into(self.values.new_zeros(self.shape).contiguous(memory_format=self.memory_format))

    def add_into(self, out: Tensor, alpha: Any = 1) -> Tensor:
        """Add the kept rows to a full-size plain tensor, in place."""
        return scatter_add(out, self.values, self.rows.index, self.layout, alpha)


class Zeros:
    """A full-size tensor of zeros made from a sliced gradient: not allocated, and in no layout until it is written to.

    Views of it that cover it whole share ``written``, a cell that holds what one of them was filled with. ``rows`` are
    those of the gradient it was made from.
    """

    __slots__ = ("device", "dtype", "rows", "shape", "written")

    def __init__(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        rows: RowSet,
        written: list[RowSlice | Tensor] | None = None,
    ) -> None:
        self.shape = tuple(shape)
        self.dtype = dtype
        self.device = device
        self.rows = rows
        self.written = [] if written is None else written

    def view(self, shape: Sequence[int]) -> Zeros:
        """The same zeros in another shape of as many elements."""
        return Zeros(shape, self.dtype, self.device, self.rows, self.written)

    def split(self) -> RowSlice:
        """Make them, flat, zeros of the kept rows, which are taken to be the outermost part of this memory."""
        rows = self.rows
        inner = prod(self.shape) // rows.num_rows
        values = torch.zeros(rows.kept * inner, dtype=self.dtype, device=self.device)
        flat = RowSlice(values, rows, Layout(0, rows.num_rows, 1, inner), (prod(self.shape),))
        self.written.append(flat)
        return flat

    def content(self) -> RowSlice | Tensor | Zeros:
        """What they are by now."""
        if not self.written:
            return self
        source = self.written[0]
        if type(source) is RowSlice:
            layout = view(source.shape, source.layout, self.shape)
            if layout is not None:
                values = source.values.reshape(layout.kept_shape(self.shape, source.rows.kept))
                return RowSlice(values, source.rows, layout, self.shape)
            source = self.written[0] = source.dense()
        return cast(Tensor, source).view(self.shape)

    def dense(self) -> Tensor:
        """The tensor itself; the views of it see what is written to it from now on."""
        content = self.content()
        if type(content) is Zeros:
            content = torch.zeros(self.shape, dtype=self.dtype, device=self.device)
            self.written.append(content)
        elif type(content) is RowSlice:
            content = self.written[0] = content.dense()
        return cast(Tensor, content)


class NeedsAllRows(Exception):
    """Raised within a rule where the op has to run at full size; the message is the reason, as :class:`Densify` has."""


def gather(tensor: Tensor, rows: RowSet, layout: Layout) -> Tensor:
    """The kept rows of a full-size plain tensor; the result is not to be written to.

    A convolution saves as its input the very activation that the layer before it saved as its result, and their
    backwards follow one another, so the last gather is remembered until the next.
    """
    if tensor.layout is not torch.strided:
        raise NeedsAllRows("rows would have to be taken from a sparse tensor")
    if rows.recompute is not None:
        return rows.recompute(tensor, layout)
    if type(tensor) is not Tensor or tensor.is_meta:  # no memory of its own to be known by
        return gather_plain(tensor, rows.index, layout)
    if tensor.is_conj() or tensor.is_neg():  # the same memory as the tensor without the flag, and other values
        return gather_plain(tensor, rows.index, layout)
    known = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor._version, layout)  # pyright: ignore[reportPrivateUsage]
    if rows.last is None or rows.last[0] != known:
        # The source is kept too: while it lives, no other tensor can have its address.
        rows.last = known, tensor, gather_plain(tensor, rows.index, layout)
    return rows.last[2]


def gather_plain(tensor: Tensor, index: Tensor, layout: Layout) -> Tensor:
    """In the order that the tensor's memory has, so that kernels find the strides they expect.

    What is expanded stays so: its stride of 0 has no place in that order, and a kernel that found a dimension of
    stride 1 in the full tensor (fused attention reads the width so, and does not look) finds it again.

    A lazy conjugate or negative is a flag. Matrix products and triangular solves are handed a tensor with its flag, and
    kernels that are called within a tensor subclass read the memory below the flag. So the flag is taken off first, and
    its meaning is computed on the kept rows.
    """
    if tensor.is_conj():
        return gather_plain(tensor.conj(), index, layout).conj_physical()
    if tensor.is_neg():
        return gather_plain(cast(Any, torch)._neg_view(tensor), index, layout).neg()
    if not tensor.is_contiguous():
        expanded = [d for d, step in enumerate(tensor.stride()) if step == 0 and tensor.shape[d] > 1]
        if expanded:
            kept_shape = layout.kept_shape(tensor.shape, index.numel())
            for d in expanded:
                tensor = tensor.narrow(d, 0, 1)
            if layout.dim not in expanded:
                tensor = gather_plain(tensor, index, layout)
            return tensor.expand(kept_shape)
        order = sorted(range(tensor.ndim), key=tensor.stride, reverse=True)
        if order != list(range(tensor.ndim)):
            inverse = sorted(range(tensor.ndim), key=order.__getitem__)
            return gather_plain(tensor.permute(order), index, layout.at(inverse[layout.dim])).permute(inverse)
    dim = layout.dim
    if layout.plain:
        return tensor.index_select(dim, index)
    return _split(tensor, layout).index_select(dim + 1, index).flatten(dim, dim + 2)


def scatter_add(out: Tensor, values: Tensor, index: Tensor, layout: Layout, alpha: Any = 1) -> Tensor:
    """Add ``values`` to the rows ``index`` of ``out``, in place; repeated rows add up."""
    if out.layout is not torch.strided:
        raise NeedsAllRows("rows would have to be added to a sparse tensor")
    dim = layout.dim
    if layout.plain:
        return out.index_add_(dim, index, values, alpha=alpha)
    kept = Layout(dim, index.numel(), layout.outer, layout.inner)
    _split(out, layout).index_add_(dim + 1, index, _split(values, kept), alpha=alpha)
    return out


def _split(tensor: Tensor, layout: Layout) -> Tensor:
    """A view in which the rows have a dimension to themselves."""
    return cast(Any, tensor).unflatten(layout.dim, (layout.outer, layout.num_rows, layout.inner))


@dataclass(frozen=True)
class Densify:
    """A rule's answer where rows mix, or a kernel cannot run on fewer: why the op has to run at full size.

    Where rows do not mix, what comes out is zero but in the kept rows, and goes on sliced: ``dims`` says for each of
    the results in which dimension the rows of ``like`` lie, None for one that has none.
    """

    reason: str
    like: RowSlice | None = None
    dims: tuple[int | None, ...] = ()

    def after(self, out: Any) -> Any:
        """What comes of the op's results at full size."""
        g = self.like
        if g is None or not g.rows.unique:  # a row that is there twice would be taken twice
            return out
        results = zip(out, self.dims, strict=True)
        return tuple(r if dim is None or r is None else g.like(g.take(r, dim), g.layout.at(dim)) for r, dim in results)


Rule = Callable[..., Any]
RULES: dict[Op, Rule] = {}
"""How each aten op acts on a sliced gradient; filled by :mod:`rowprop.backprop.rules`."""
FILLS_ZEROS: set[Op] = set()
"""The ops whose rule also takes :class:`Zeros` as the tensor written to."""


# --- what a backward did, for watch() -------------------------------------------------------------------------------


@dataclass
class Densified:
    """One op that ran at full size: how often, and why (the last reason given)."""

    count: int
    reason: str


@dataclass
class Report:
    """What a backward did with sliced gradients.

    Attributes:
        sliced: For each op that ran at K rows, how often.
        densified: For each op at which a gradient went back to all N rows, how often and why. What lies upstream of
            it ran at full size.
    """

    sliced: dict[str, int] = field(default_factory=dict[str, int])
    densified: dict[str, Densified] = field(default_factory=dict[str, Densified])

    def note_densified(self, name: str, reason: str) -> None:
        """Count an op at which a gradient went back to all rows."""
        entry = self.densified.setdefault(name, Densified(0, reason))
        entry.count += 1
        entry.reason = reason

    def __str__(self) -> str:
        lines = [f"sliced: {sum(self.sliced.values())} calls of {len(self.sliced)} ops"]
        if not self.densified:
            lines.append("densified: nothing")
        for name, entry in sorted(self.densified.items(), key=lambda item: -item[1].count):
            lines.append(f"densified: {name} x{entry.count}: {entry.reason}")
        return "\n".join(lines)


_reports: list[Report] = []  # autograd may run on other threads than watch(), so this is not thread-local


@contextmanager
def watch() -> Generator[Report]:
    """Record which ops of the backwards inside the block ran on kept rows only, and which did not.

    Yields:
        A :class:`Report`, filled while the block runs: ``sliced`` (op -> calls) and ``densified`` (op -> calls and
        the reason). ``print(report)`` shows it.

    Cost:
        A dictionary update per op; nothing when no block is open.

    Example:
        >>> w = torch.ones(3, requires_grad=True)
        >>> losses = (torch.eye(4, 3) @ w) ** 2
        >>> with rowprop.watch() as report:
        ...     rowprop.pick(losses, torch.tensor([0, 2])).sum().backward()
        >>> report.densified
        {}
    """
    report = Report()
    with recording(report):
        yield report


@contextmanager
def recording(report: Report) -> Generator[None]:
    """Tell ``report`` what the backwards inside the block do."""
    _reports.append(report)
    try:
        yield
    finally:
        _reports[:] = [r for r in _reports if r is not report]


def note_sliced(name: str, count: int = 1) -> None:
    """Tell every open report that an op ran on kept rows."""
    for report in _reports:
        report.sliced[name] = report.sliced.get(name, 0) + count


def note_densified(name: str, reason: str) -> None:
    """Tell every open report that a gradient went back to all rows."""
    for report in _reports:
        report.note_densified(name, reason)


# --- the tensor -----------------------------------------------------------------------------------------------------


class RowGrad(Tensor):
    """The gradient as autograd sees it. Never leaves a backward: leaves and Python code get plain tensors."""

    sliced: RowSlice | Zeros | None
    full: Tensor | None  # set once densified; from then on this is the gradient
    viewed: tuple[RowGrad, Op] | None  # of which gradient this is a view, and how to view it again

    @staticmethod
    def __new__(cls: type[RowGrad], sliced: RowSlice | Zeros) -> RowGrad:
        """Wrap ``sliced``."""
        source = sliced.values if type(sliced) is RowSlice else cast(Zeros, sliced)
        self = Tensor._make_wrapper_subclass(  # pyright: ignore[reportPrivateUsage, reportUnknownMemberType, reportAttributeAccessIssue, reportUnknownVariableType]
            cls, sliced.shape, strides=_strides(sliced), dtype=source.dtype, device=source.device
        )
        self.sliced = sliced
        self.full = None
        self.viewed = None
        return self

    def __repr__(self, *, tensor_contents: str | None = None) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        if type(self.sliced) is RowSlice:
            rows = self.sliced.rows
            return f"RowGrad(shape={self.sliced.shape}, {rows.kept} of {rows.num_rows} rows in dim {self.sliced.dim})"
        return f"RowGrad({self.plain()!r})"

    def plain(self) -> Tensor:
        """This gradient as a dense tensor. Sticky: later reads and in-place writes go to that tensor."""
        if self.full is None:
            assert self.sliced is not None
            self.full = self.sliced.dense()
            self.sliced = None
        return self.full

    def shared(self) -> Tensor:
        """As :meth:`plain`, and a view stays one: what is written to it reaches what it is a view of."""
        if self.full is None and self.viewed is not None and type(self.sliced) is RowSlice:
            base, again = self.viewed
            self.full, self.sliced = again(base.shared()), None
        return self.plain()

    def shows_through(self) -> bool:
        """Whether the values are in memory those of all that this is a view of, and not copies a reshape made."""
        if self.viewed is None:
            return True
        a, b = _unwrap(self), _unwrap(self.viewed[0])
        if type(a) is not RowSlice or type(b) is not RowSlice:
            return False
        return cast(Any, torch)._C._is_alias_of(a.values, b.values) and self.viewed[0].shows_through()

    @classmethod
    def __torch_dispatch__(
        cls, func: Op, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _dispatch(func, args, kwargs or {})

    @classmethod
    def __torch_function__(
        cls, func: Op, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue, reportUnknownMemberType]
            if func in _METADATA or (func in _SCALING and not kwargs and _scales(args)):
                return func(*args, **kwargs)
            name = getattr(func, "__name__", str(func))
            note_densified(name, "Python code (a hook or a custom function) read or changed the gradient")
            return func(*_map(args, _plain), **_map(kwargs, _plain))


def _strides(sliced: RowSlice | Zeros) -> Sequence[int] | None:
    """Those of the dense gradient; None: it is contiguous."""
    if type(sliced) is not RowSlice or sliced.memory_format is None:
        return None
    return torch.empty(sliced.shape, device="meta", memory_format=sliced.memory_format).stride()


_PROPERTIES = (
    "shape",
    "dtype",
    "device",
    "ndim",
    "requires_grad",
    "is_leaf",
    "grad_fn",
    "layout",
    "is_sparse",
    "is_cuda",
)
_METADATA: frozenset[Any] = frozenset(
    [
        *[getattr(Tensor, name).__get__ for name in _PROPERTIES],
        *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.nelement, Tensor.is_floating_point, Tensor.is_complex),
    ]
)
_SCALING: frozenset[Any] = frozenset(
    [
        *(torch.mul, torch.multiply, torch.div, torch.true_divide, torch.neg),
        *(Tensor.mul, Tensor.multiply, Tensor.div, Tensor.true_divide, Tensor.neg),
        *(Tensor.mul_, Tensor.div_, Tensor.neg_, Tensor.__imul__, Tensor.__itruediv__),
        *(Tensor.__mul__, Tensor.__rmul__, Tensor.__truediv__, Tensor.__neg__),
    ]
)


def _scales(args: Sequence[Any]) -> bool:
    """Whether a multiplication or division only scales the gradient: a number or a 0-d tensor is the other operand."""
    return type(args[0]) is RowGrad and all(isinstance(a, (int, float)) or _is_scalar(a) for a in args[1:])


def _is_scalar(value: Any) -> bool:
    return isinstance(value, Tensor) and type(value) is not RowGrad and value.ndim == 0


def _map(value: Any, f: Callable[[Any], Any]) -> Any:
    """Apply ``f`` to every leaf of nested tuples, lists and dicts, keeping containers without gradients as they are."""
    if isinstance(value, (list, tuple)):
        items = cast("Sequence[Any]", value)
        mapped = [_map(v, f) for v in items]
        if all(a is b for a, b in zip(mapped, items, strict=True)):
            return items
        return tuple(mapped) if isinstance(value, tuple) else mapped
    if isinstance(value, dict):
        return {k: _map(v, f) for k, v in cast("dict[Any, Any]", value).items()}
    return f(value)


def _plain(value: Any) -> Any:
    return value.plain() if type(value) is RowGrad else value


def _unwrap(value: Any) -> Any:
    if type(value) is RowGrad:
        if value.full is not None:
            return value.full
        return value.sliced.content() if type(value.sliced) is Zeros else value.sliced
    if type(value) in (list, tuple) and any(type(v) is RowGrad for v in value):
        return [_unwrap(v) for v in value]
    return value


def rows_of(value: Any) -> RowSet | None:
    """Which rows a gradient is sliced over, if it is."""
    inner = _unwrap(value) if type(value) is RowGrad else None
    return inner.rows if type(inner) is RowSlice else None


def _wrap(value: Any) -> Any:
    if type(value) is RowSlice or type(value) is Zeros:
        return RowGrad(value)
    if type(value) is tuple:
        return tuple(_wrap(v) for v in cast("tuple[Any, ...]", value))
    if type(value) is list:
        return [_wrap(v) for v in cast("list[Any]", value)]
    return value


@dataclass(frozen=True)
class _Traits:
    """What an op's schema says: does it write to its first argument, does it return a view of it."""

    name: str
    writes: bool
    views: bool
    functional: Op | None


_traits: dict[Op, _Traits] = {}


def _traits_of(func: Any) -> _Traits:
    found = _traits.get(func)
    if found is None:
        schema = func._schema
        first = schema.arguments[0].alias_info if schema.arguments else None
        writes = first is not None and first.is_write
        functional = None
        if writes and schema.name.endswith("_"):
            packet = getattr(torch.ops.aten, schema.name.removeprefix("aten::")[:-1], None)
            functional = getattr(packet, schema.overload_name or "default", None)
        views = any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)
        found = _traits[func] = _Traits(op_name(func), writes, views, functional)
    return found


def op_name(func: Op) -> str:
    """An aten op's name as reports and the support matrix print it: ``mm``, ``sum.dim_IntList``."""
    return str(func).removeprefix("aten.").removesuffix(".default")


def _dispatch(func: Op, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    traits = _traits_of(func)
    target = args[0] if traits.writes and type(args[0]) is RowGrad else None
    # In place, the wrapper takes over what the out-of-place op returns.
    op = func if target is None or target.full is not None else traits.functional
    rule = None if op is None else RULES.get(op)
    if rule is None:
        outcome: Any = Densify("no rule for this op")
    else:
        inner = [_unwrap(a) for a in args]
        named = {k: _unwrap(v) for k, v in kwargs.items()} if kwargs else kwargs
        outcome = apply_rule(cast(Op, op), rule, inner, named)

    if type(outcome) is Densify:
        if any(type(v) is RowGrad and v.full is None for v in _leaves(args, kwargs)):
            note_densified(traits.name, outcome.reason)
        if target is not None:
            target.shared()
        out = func(*_map(args, _plain), **_map(kwargs, _plain))
        return _wrap(outcome.after(out)) if target is None else target
    note_sliced(traits.name)
    if target is not None:
        if target.full is None:
            _write(target, outcome)
        return target
    out = _wrap(outcome)
    if traits.views:
        _link(out, args[0], func, args[1:], kwargs)
    return out


def _write(target: Any, outcome: Any) -> None:
    """Make the outcome of an in-place op the tensor's content, and that of what it is a view of."""
    held = target.sliced
    if type(held) is Zeros:
        if type(outcome) is not Zeros:
            held.written[:] = [outcome]
    elif target.viewed is None and type(outcome) in (RowSlice, Zeros):
        target.sliced = outcome
    elif target.viewed is None:
        target.full, target.sliced = outcome, None
    elif type(outcome) is RowSlice and target.shows_through():
        held.values.copy_(outcome.values)
    else:
        target.shared().copy_(outcome.dense() if type(outcome) in (RowSlice, Zeros) else outcome)


def _link(out: Any, base: RowGrad, func: Op, rest: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Remember what the results of a view op are views of."""

    def again(dense: Tensor, place: int | None = None) -> Any:
        views = func(dense, *rest, **kwargs)
        return views if place is None else views[place]

    if type(out) is RowGrad:
        out.viewed = base, again
    elif isinstance(out, list):
        for place, part in enumerate(cast("list[RowGrad]", out)):
            part.viewed = base, partial(again, place=place)


def apply_rule(op: Op, rule: Rule, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Run a rule on operands that all hold the same rows, or say why it cannot."""
    first: RowSlice | None = None
    zeros = False
    for value in _leaves(args, kwargs):
        if type(value) is Zeros:
            if op not in FILLS_ZEROS:
                return Densify("the operand is a new tensor of zeros")
            zeros = True
        elif type(value) is RowSlice:
            if first is None:
                first = value
            elif value.rows is not first.rows:
                united = _unite(args, kwargs)
                if united is None:
                    return Densify("gradients sliced over different batches meet")
                return apply_rule(op, rule, *united)
    if first is None and not zeros:
        return Densify("densified before")
    try:
        return rule(op, *args, **kwargs)
    except NeedsAllRows as reason:
        return Densify(str(reason))


def _leaves(args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[Any]:
    for value in args:
        if type(value) is list or type(value) is tuple:
            yield from cast("Sequence[Any]", value)
        else:
            yield value
    if kwargs:
        yield from kwargs.values()


def on_rows(name: str, rule: Rule, op: Op, grads: Sequence[Any]) -> Any:
    """Run a rule for something that is not an aten op, on gradients as autograd passed them.

    Returns:
        What the rule returned, wrapped for autograd; None where the gradients have to be dense.
    """
    outcome = apply_rule(op, rule, [_unwrap(g) for g in grads], {})
    if type(outcome) is Densify:
        if any(type(g) is RowGrad and g.full is None for g in grads):
            note_densified(name, outcome.reason)
        return None
    note_sliced(name)
    return _wrap(outcome)


# --- gradients of different picks meet --------------------------------------------------------------------------------

_unions: dict[frozenset[RowSet], RowSet] = {}


def _unite(args: list[Any], kwargs: dict[str, Any]) -> tuple[list[Any], dict[str, Any]] | None:
    """Put operands that hold different rows on the union of their rows."""
    coarse = min((v for v in _leaves(args, kwargs) if type(v) is RowSlice), key=lambda v: v.rows.num_rows)
    args, kwargs = _map(args, lambda v: _coarsen(v, coarse)), _map(kwargs, lambda v: _coarsen(v, coarse))
    sets = frozenset(v.rows for v in _leaves(args, kwargs) if type(v) is RowSlice)
    if any(s.num_rows != coarse.rows.num_rows for s in sets):
        return None
    union = _unions.get(sets)
    if union is None:
        index = cast(Any, torch).unique(torch.cat([s.index for s in sets]))
        exact = any(s.batchnorm == "exact" for s in sets)
        union = RowSet(index, coarse.rows.num_rows, unique=True, batchnorm="exact" if exact else "rows")
        _unions[sets] = union

    def embed(value: Any) -> Any:
        if type(value) is not RowSlice or value.rows is union:
            return value
        out = value.values.new_zeros(value.layout.kept_shape(value.shape, union.kept))
        within = Layout(value.dim, union.kept, value.layout.outer, value.layout.inner)
        place = torch.searchsorted(union.index, value.rows.index)
        return RowSlice(scatter_add(out, value.values, place, within), union, value.layout, value.shape)

    return list(_map(args, embed)), _map(kwargs, embed)


def _coarsen(value: Any, like: RowSlice) -> Any:
    """A gradient sliced token by token, where ``like`` is sliced over rows of several tokens, sliced as ``like`` is."""
    if type(value) is not RowSlice or value.rows.num_rows == like.layout.num_rows:
        return value
    fits = value.layout.plain and value.dim == like.dim and value.layout.size == like.layout.size
    return coarsened(value, like.layout) if fits else value


def coarsened(g: RowSlice, layout: Layout) -> RowSlice:
    """Slice over the larger rows of ``layout``, of the same dimension and size, that ``g``'s rows are parts of.

    How many are touched is known only by looking, which waits for a device.
    """
    index, inner = g.rows.index, layout.inner
    rows, slot = cast(Any, torch).unique(index // inner % layout.num_rows, return_inverse=True)
    place = (index // (inner * layout.num_rows) * rows.numel() + slot) * inner + index % inner
    out = g.values.new_zeros(layout.kept_shape(g.shape, rows.numel()))
    out.index_add_(layout.dim, place, g.values)
    return RowSlice(out, RowSet(rows, layout.num_rows, unique=True, batchnorm=g.rows.batchnorm), layout, g.shape)


def forget_unions() -> None:
    """Let go of the unions a finished backward made."""
    _unions.clear()
