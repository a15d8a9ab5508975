"""The row-sliced gradient: a tensor that holds K rows and claims the shape of all N.

Autograd's own nodes call aten ops on it. ``__torch_dispatch__`` looks up the op's rule, which runs the op at K rows on
:class:`Sliced` operands; where there is no rule, or a step really mixes rows, the gradient is *densified*: scattered
into zeros, and the op runs at full size. So a missing rule costs time and never changes a result.

Python code that meets the gradient (a hook, a custom function) comes in by ``__torch_function__`` instead: scaling
keeps it sliced, anything else sees, and may write to, a plain dense tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from typing import Any, cast

import torch
from torch import Tensor

from rowprop.backprop.layout import Layout
from rowprop.errors import UnsupportedOperation

Op = Callable[..., Any]


class RowSet:
    """Which rows one pick kept: ``index`` (K,) int64 into N rows. Compared by identity."""

    __slots__ = ("batchnorm", "index", "kept", "num_rows", "unique")

    def __init__(self, index: Tensor, num_rows: int, *, unique: bool, batchnorm: str) -> None:
        self.index = index
        self.num_rows = num_rows
        self.kept = index.numel()
        self.unique = unique  # False: repeats are possible, and only ops linear in the gradient may stay sliced
        self.batchnorm = batchnorm


class Sliced:
    """What a rule works on: the K rows' ``values``, and where they lie in the full ``shape``.

    ``values`` is None for a tensor of zeros that nothing has been written to yet (``new_zeros``): it has no rows of
    its own and takes whatever layout is written into it.
    """

    __slots__ = ("layout", "like_", "rows", "shape", "values")

    def __init__(self, values: Tensor, rows: RowSet, layout: Layout, shape: Sequence[int]) -> None:
        self.values = values
        self.rows = rows
        self.layout = layout
        self.shape = tuple(shape)

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

    def like(self, values: Tensor, layout: Layout | None = None) -> Sliced:
        """A sliced result of the same rows; its full shape follows from the values'."""
        layout = self.layout if layout is None else layout
        shape = list(values.shape)
        shape[layout.dim] = layout.size
        return Sliced(values, self.rows, layout, shape)

    def kept_shape(self, shape: Sequence[int], layout: Layout | None = None) -> list[int]:
        """A full shape with only the kept rows left in it."""
        return (layout or self.layout).kept_shape(shape, self.rows.kept)

    def aligned(self, other: Sliced) -> bool:
        """Whether both hold the same rows at the same place, counted from the last dimension."""
        a, b = self.layout, other.layout
        return (
            self.rows is other.rows
            and a.dim - self.ndim == b.dim - other.ndim
            and a.outer == b.outer
            and a.inner == b.inner
        )

    def dense(self) -> Tensor:
        """Scatter into zeros; repeated rows add up."""
        return scatter_add(self.values.new_zeros(self.shape), self)


class Zeros:
    """A full-size tensor of zeros made from a sliced gradient, not yet allocated and in no layout yet."""

    __slots__ = ("device", "dtype", "shape")

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> None:
        self.shape = tuple(shape)
        self.dtype = dtype
        self.device = device

    def dense(self) -> Tensor:
        """The zeros themselves."""
        return torch.zeros(self.shape, dtype=self.dtype, device=self.device)


def gather(tensor: Tensor, rows: RowSet, layout: Layout) -> Tensor:
    """Rows ``rows`` of a plain tensor, in the order its memory has, so that kernels find the strides they expect."""
    if not tensor.is_contiguous():
        order = sorted(range(tensor.ndim), key=tensor.stride, reverse=True)
        if order != list(range(tensor.ndim)):
            inverse = sorted(range(tensor.ndim), key=order.__getitem__)
            return gather(tensor.permute(order), rows, layout.at(inverse[layout.dim])).permute(inverse)
    dim = layout.dim
    if layout.plain:
        return tensor.index_select(dim, rows.index)
    split = tensor.unflatten(dim, (layout.outer, layout.num_rows, layout.inner))
    return split.index_select(dim + 1, rows.index).flatten(dim, dim + 2)


def scatter_add(out: Tensor, sliced: Sliced, alpha: Any = 1) -> Tensor:
    """Add the kept rows into a full-size plain tensor, in place."""
    layout = sliced.layout
    if layout.plain:
        return out.index_add_(layout.dim, sliced.rows.index, sliced.values, alpha=alpha)
    dim = layout.dim
    target = out.unflatten(dim, (layout.outer, layout.num_rows, layout.inner))
    values = sliced.values.unflatten(dim, (layout.outer, sliced.rows.kept, layout.inner))
    target.index_add_(dim + 1, sliced.rows.index, values, alpha=alpha)
    return out


@dataclass(frozen=True)
class Densify:
    """A rule's answer where rows mix: why the op has to run at full size."""

    reason: str


Rule = Callable[..., Any]
RULES: dict[Op, Rule] = {}
"""How each aten op acts on a sliced gradient; filled by :mod:`rowprop.backprop.rules`."""


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

    def __str__(self) -> str:
        lines = [f"sliced: {sum(self.sliced.values())} calls of {len(self.sliced)} ops"]
        if not self.densified:
            lines.append("densified: nothing")
        for name, entry in sorted(self.densified.items(), key=lambda item: -item[1].count):
            lines.append(f"densified: {name} x{entry.count}: {entry.reason}")
        return "\n".join(lines)


_reports: list[Report] = []  # autograd may run on other threads than watch(), so this is not thread-local


@contextmanager
def watch() -> Iterator[Report]:
    """Record which ops of the backwards inside the block ran on kept rows only, and which did not.

    Yields:
        A :class:`Report`, filled while the block runs: ``sliced`` (op -> calls) and ``densified`` (op -> calls and
        the reason). ``print(report)`` shows it.

    Cost:
        A dictionary update per op; nothing when no block is open.

    Example:
        >>> import torch, rowprop
        >>> w = torch.ones(3, requires_grad=True)
        >>> losses = (torch.eye(4, 3) @ w) ** 2
        >>> with rowprop.watch() as report:
        ...     rowprop.pick(losses, torch.tensor([0, 2])).sum().backward()
        >>> report.densified
        {}
    """
    report = Report()
    _reports.append(report)
    try:
        yield report
    finally:
        _reports[:] = [r for r in _reports if r is not report]


def note_densified(name: str, reason: str) -> None:
    """Tell every open report that a gradient went back to all rows."""
    for report in _reports:
        entry = report.densified.setdefault(name, Densified(0, reason))
        entry.count += 1
        entry.reason = reason


# --- the tensor -----------------------------------------------------------------------------------------------------


class RowGrad(Tensor):
    """The gradient as autograd sees it. Never leaves a backward: leaves and Python code get plain tensors."""

    sliced: Sliced | Zeros | None
    full: Tensor | None  # set once densified; from then on this is the gradient
    is_view: bool

    @staticmethod
    def __new__(cls, sliced: Sliced | Zeros, is_view: bool = False) -> RowGrad:
        source = sliced.values if type(sliced) is Sliced else cast(Zeros, sliced)
        self = Tensor._make_wrapper_subclass(  # pyright: ignore[reportPrivateUsage, reportUnknownMemberType, reportAttributeAccessIssue, reportUnknownVariableType]
            cls, sliced.shape, dtype=source.dtype, device=source.device
        )
        self.sliced = sliced
        self.full = None
        self.is_view = is_view
        return cast(RowGrad, self)

    def __repr__(self, *, tensor_contents: str | None = None) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        if type(self.sliced) is Sliced:
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


_METADATA: frozenset[Any] = frozenset(
    [getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim", "requires_grad", "is_leaf")]
    + [getattr(Tensor, name).__get__ for name in ("grad_fn", "layout", "is_sparse", "is_cuda", "_backward_hooks")]
    + [Tensor.size, Tensor.dim, Tensor.numel, Tensor.is_floating_point, Tensor.is_complex, Tensor.nelement, Tensor.type]
    + [Tensor.__repr__, Tensor.__hash__]
)
_SCALING: frozenset[Any] = frozenset(
    [Tensor.mul, Tensor.mul_, Tensor.div, Tensor.div_, Tensor.neg, Tensor.neg_, Tensor.__mul__, Tensor.__rmul__]
    + [Tensor.__neg__, Tensor.__truediv__, Tensor.__imul__, Tensor.__itruediv__, torch.mul, torch.div, torch.neg]
    + [torch.true_divide, torch.multiply, Tensor.multiply, Tensor.true_divide]
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
        return value.sliced if value.full is None else value.full
    if type(value) in (list, tuple) and any(type(v) is RowGrad for v in value):
        return [_unwrap(v) for v in value]
    return value


def _wrap(value: Any, is_view: bool) -> Any:
    kind = type(value)
    if kind is Sliced or kind is Zeros:
        return RowGrad(value, is_view)
    if kind is tuple or kind is list:
        return kind(_wrap(v, is_view) for v in value)
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
        returns_alias = any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)
        functional = None
        if schema.is_mutable and schema.name.endswith("_"):
            packet = getattr(torch.ops.aten, schema.name.removeprefix("aten::")[:-1], None)
            functional = getattr(packet, schema.overload_name or "default", None)
        name = str(func).removeprefix("aten.").removesuffix(".default")
        found = _traits[func] = _Traits(name, schema.is_mutable, returns_alias, functional)
    return found


def _dispatch(func: Op, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    traits = _traits_of(func)
    target = args[0] if traits.writes and args and type(args[0]) is RowGrad else None
    if target is not None and target.full is None:
        if target.is_view:
            raise UnsupportedOperation(
                f"{traits.name} writes in place to a view of a row-sliced gradient of shape {tuple(target.shape)}, "
                "which holds only the kept rows. Write out of place, or clone the gradient first."
            )
        rule = RULES.get(traits.functional) if traits.functional is not None else None
    else:
        rule = RULES.get(func)

    outcome: Any = Densify("no rule for this op")
    if rule is not None:
        inner = [_unwrap(a) for a in args]
        named = {k: _unwrap(v) for k, v in kwargs.items()} if kwargs else kwargs
        operands = _operands(inner, named)
        if not operands:
            return func(*inner, **named)  # all of them had been densified before
        if len(operands) > 1:
            inner, named = _unite(operands, inner, named)
        outcome = rule(traits.functional if target is not None else func, *inner, **named)

    if type(outcome) is Densify:
        full_args, full_kwargs = _map(args, _plain), _map(kwargs, _plain)
        if any(type(a) is RowGrad for a in _leaves(args, kwargs)):
            note_densified(traits.name, outcome.reason)
        out = func(*full_args, **full_kwargs)
        return args[0] if target is not None else out
    for report in _reports:
        report.sliced[traits.name] = report.sliced.get(traits.name, 0) + 1
    if target is not None:
        if type(outcome) is Sliced and outcome.shape == tuple(target.shape) and outcome.values.dtype == target.dtype:
            target.sliced = outcome
        else:
            target.full = outcome.dense() if type(outcome) in (Sliced, Zeros) else outcome
            target.sliced = None
        return target
    return _wrap(outcome, traits.views)


def _leaves(args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[Any]:
    for value in (*args, *kwargs.values()):
        if type(value) in (list, tuple):
            yield from value
        else:
            yield value


def _operands(args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    return [v for v in _leaves(args, kwargs) if type(v) is Sliced or type(v) is Zeros]


def _unite(operands: list[Any], args: list[Any], kwargs: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Where gradients of different picks meet, put them on the union of their rows."""
    sliced = [o for o in operands if type(o) is Sliced]
    if all(s.rows is sliced[0].rows for s in sliced) or len({s.rows.num_rows for s in sliced}) > 1:
        return args, kwargs
    union = _union([s.rows for s in sliced])

    def embed(value: Any) -> Any:
        if type(value) is not Sliced:
            return value
        place = torch.searchsorted(union.index, value.rows.index)
        shape = value.layout.kept_shape(value.shape, union.kept)
        moved = Sliced(value.values, RowSet(place, union.kept, unique=value.rows.unique, batchnorm=""), value.layout, shape)
        moved.layout = Layout(value.dim, union.kept, value.layout.outer, value.layout.inner)
        return Sliced(moved.dense(), union, value.layout, value.shape)

    return [_map(a, embed) for a in args], {k: _map(v, embed) for k, v in kwargs.items()}


_unions: dict[tuple[int, ...], tuple[list[RowSet], RowSet]] = {}


def _union(sets: list[RowSet]) -> RowSet:
    key = tuple(sorted({id(s) for s in sets}))
    found = _unions.get(key)
    if found is None:
        if len(_unions) > 64:
            _unions.clear()
        index = torch.unique(torch.cat([s.index for s in sets]))
        exact = any(s.batchnorm == "exact" for s in sets)
        union = RowSet(index, sets[0].num_rows, unique=True, batchnorm="exact" if exact else sets[0].batchnorm)
        found = _unions[key] = (sets, union)
    return found[1]


def clear_unions() -> None:
    """Forget the unions of a finished backward, so that nothing keeps its rows alive."""
    _unions.clear()


def numel(shape: Sequence[int]) -> int:
    """Number of elements of a shape."""
    return prod(shape)
