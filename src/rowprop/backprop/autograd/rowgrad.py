"""The row-sliced gradient: a tensor that holds K rows and claims the shape of all N.

Autograd's own nodes call aten ops on it. ``__torch_dispatch__`` finds the op's rule, which runs the op at K rows on
:class:`RowSlice` operands. If an op has no rule, or mixes rows, the gradient is *densified*: scattered into zeros, and
the op runs at full size. So a missing rule costs time and never changes a result. Python code (a hook, a custom
function) calls it through ``__torch_function__``: scaling keeps it sliced, and any other call receives a plain dense
tensor, which it may also write to.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor

from rowprop import native
from rowprop.backprop import watch
from rowprop.backprop.autograd.streams import bring
from rowprop.backprop.backward import node_name, unpacks
from rowprop.backprop.rows.layout import Layout
from rowprop.backprop.rows.refusals import NO_RULE, NeedsAllRows
from rowprop.backprop.rows.rows import RowSet
from rowprop.backprop.rows.slice import Densify, RowSlice, whole_rows
from rowprop.backprop.rows.zeros import Lent, Zeros
from rowprop.backprop.rules.apply import apply_rule, leaves, map_leaves
from rowprop.backprop.rules.pointwise import local
from rowprop.backprop.rules.registry import RULES, Op, op_name
from rowprop.backprop.watch import note, note_densified

_make: Any = cast(Any, Tensor)._make_wrapper_subclass


class RowGrad(Tensor):
    """The gradient as autograd sees it. It never leaves a backward: leaves and Python code get plain tensors."""

    sliced: RowSlice | Zeros | None
    full: Tensor | None = None  # set when the gradient is densified; from then on this is the gradient
    viewed: tuple[RowGrad, Callable[[Tensor], Any]] | None
    """If this is a view: the gradient viewed, and a function that views a tensor the same way."""
    in_order: bool  # whether the elements are all of those in memory, in their order
    lent: Lent | None = None  # if this is a view of some rows: the copy that it is
    unused: tuple[int, ...] = ()  # places beside this gradient, among those of its node, in which autograd puts zeros
    alike: bool = False  # within a formula that treats all rows alike, but does not map zero to zero at each step
    made: tuple[RowSet, Any] | None = None  # where the device has streams: the rows, and the memory's last stream

    @staticmethod
    def __new__(cls: type[RowGrad], sliced: RowSlice | Zeros) -> RowGrad:
        """Wrap ``sliced``."""
        if native.extension is not None and type(sliced) is RowSlice and sliced.order is None:
            rows = sliced.rows.native
            if rows is not None and type(sliced.values) is Tensor:
                return native.extension.make(sliced.values, sliced.rows, rows, sliced.layout.numbers(), sliced.shape)
        return cls.in_python(sliced)

    @classmethod
    def in_python(cls, sliced: RowSlice | Zeros) -> RowGrad:
        """Wrap ``sliced`` so that Python runs the ops on it, also where native dispatch is in use."""
        source: Any = sliced.values if type(sliced) is RowSlice else sliced
        strides = None
        if sliced.order is not None:  # the strides of the dense gradient follow from it
            strides = cast(RowSlice, sliced).zeros(sliced.shape, sliced.order, device="meta").stride()
        self = _make(cls, sliced.shape, strides=strides, dtype=source.dtype, device=source.device)
        self.sliced, self.viewed, self.in_order = sliced, None, True
        if sliced.rows.streams is not None:
            self.made = sliced.rows, sliced.rows.stream()
        return self

    def __getattr__(self, name: str) -> Any:
        """What the extension holds, once Python asks for it."""
        if name == "sliced":
            values, rows, layout, stream = native.extension.payload(self)
            self.sliced = RowSlice(values, rows, Layout.of_numbers(layout), self.shape)
            if rows.streams is not None:
                self.made = rows, (stream, *rows.stream()[1:])
        elif name in ("viewed", "in_order"):
            self.viewed, self.in_order = None, True
            found = native.extension.viewed(self)
            if found is not None:
                base, *named, rest, place = found
                _link_to(self, base, _op(*named), rest, {}, place)
        else:
            raise AttributeError(name)
        return self.__dict__[name]

    def become(self, sliced: RowSlice | Zeros | None, full: Tensor | None = None) -> None:
        """Hold this from now on."""
        if native.extension is not None:
            native.extension.take_over(self)
        self.sliced, self.full = sliced, full

    def __repr__(self, *, tensor_contents: str | None = None) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        if type(self.sliced) is RowSlice:
            rows = self.sliced.rows
            return f"RowGrad(shape={self.sliced.shape}, {rows.kept} of {rows.num_rows} rows in dim {self.sliced.dim})"
        return f"RowGrad({self.plain()!r})"

    def bring(self) -> None:
        """Before each use: where the device has streams, make the memory safe on the present one."""
        content = self.sliced if self.full is None else self.full
        if self.made is not None:
            rows, stream = self.made
            self.made = rows, bring(rows, cast(Any, content), stream)

    def plain(self) -> Tensor:
        """This gradient as a dense tensor. Later reads and in-place writes go to this tensor."""
        self.bring()
        if self.full is None:
            assert self.sliced is not None
            self.become(None, self.sliced.dense())
        return cast(Tensor, self.full)

    def __coerce_same_metadata_as_tangent__(self, metadata: Any, expected_type: type | None = None) -> Tensor:
        """Asked by a compiled region that nobody prepared: a caller has handed it a gradient of an earlier backward."""
        return self.copied()

    def copied(self) -> Tensor:
        """This gradient as a dense tensor of its own: it stays sliced for its other users."""
        self.bring()
        return self.sliced.dense() if self.full is None and type(self.sliced) is RowSlice else self.plain()

    def shared(self) -> Tensor:
        """As :meth:`plain`, but a view stays a view: writes to it reach the gradient that it views."""
        self.bring()
        if self.viewed is not None and (self.lent or (self.full is None and type(self.sliced) is RowSlice)):
            (base, again), self.lent = self.viewed, None
            self.become(None, again(base.shared()))
        return self.plain()

    def shows_through(self) -> bool:
        """Whether a write to the values reaches every gradient that this views: no reshape copied them on the way."""
        if self.viewed is None:
            return True
        a, b = unwrap(self), unwrap(self.viewed[0])
        if type(a) is not RowSlice or type(b) is not RowSlice:
            return False
        return cast(Any, torch)._C._is_alias_of(a.values, b.values) and self.viewed[0].shows_through()

    @classmethod
    def __torch_dispatch__(
        cls, func: Op, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if native.extension is not None:
            if watch.watched():
                note("python", (op_name(func), native.extension.why()))
            call = native.extension.wanted(_number(func))
            if call is not None:
                return _recorded(call, func, args, kwargs)
        return cls.ruled(func, args, kwargs)

    @classmethod
    def ruled(cls, func: Op, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """What the op's rule makes of these arguments."""
        name, writes, views, flat, functional = _traits(func)
        if writes and type(args[0]) is RowGrad:
            return _in_place(func if args[0].full is not None else functional, func, name, args, kwargs)
        first = args[0]
        if type(first) is RowGrad and first.alike:
            out = cls.in_python(cast(RowSlice, local(func, *map(unwrap, args), **kwargs)))
            out.alike = True
            return out
        outcome = _outcome(func, flat, args, kwargs)
        if views and (type(outcome) is not RowSlice or outcome.rows is not args[0].sliced.rows or func is _AS_STRIDED):
            outcome = _viewed(func, outcome, args, kwargs)
        if type(outcome) is RowSlice:
            out = RowGrad(outcome)
        elif type(outcome) is Densify:
            _tell_densified(name, outcome, args, kwargs)
            if views and (args[0].lent or (args[0].sliced is not None and args[0].sliced.rows.copying)):
                args[0].shared()  # a write to the result reaches all that this views
            return wrap(outcome.after(func(*map_leaves(args, plain), **map_leaves(kwargs, plain))))
        elif type(outcome) is Lent:
            out = cls.in_python(outcome.copy)
            out.lent = outcome
            if not out.shape:
                out.plain()
        else:
            out = wrap(outcome)
        note("sliced", name)
        if views:
            _link(out, args[0], func, args[1:], kwargs)
        return out

    @classmethod
    def __torch_function__(
        cls, func: Op, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue, reportUnknownMemberType]
            if func in _METADATA or (func in _SCALING and not kwargs and _scales(args)):
                return func(*args, **kwargs)
            name = getattr(func, "__name__", str(func))
            is_op = isinstance(func, cast(Any, torch)._ops.OpOverload)
            frame: Any = cast(Any, sys)._getframe(1 + is_op)  # an op has a frame of its own
            caller: str = frame.f_globals.get("__name__", "")
            if is_op and caller == "torch.distributed.tensor._dispatch":  # DTensor runs the op on its local tensors
                return func(*args, **kwargs)
            if caller.startswith("torch.distributed."):
                note_densified(
                    name, "DTensor moves the gradient between ranks inside an op; redistribute the op's input"
                )
            elif is_op:
                did = "a TorchDispatchMode, as of a memory tracker, ran the op by itself"
                note_densified(name, f"{did}; leave it out, or count FLOPs by rowprop.cost.flops.count_flops")
            else:
                did = "Python code (a hook or a custom function) read or changed the gradient"
                note_densified(name, f"{did}; let a hook only scale it, or leave it out")
            return func(*map_leaves(args, plain), **map_leaves(kwargs, plain))


_PROPERTIES = "shape dtype device ndim requires_grad is_leaf grad_fn layout is_sparse is_cuda".split()
_METHODS = "size dim numel nelement is_floating_point is_complex".split()
_METADATA: frozenset[Any] = frozenset(
    [*(getattr(Tensor, name).__get__ for name in _PROPERTIES), *(getattr(Tensor, name) for name in _METHODS)]
)
_PRODUCTS = "mul multiply div true_divide neg".split()
_OPERATORS = "mul_ div_ neg_ __imul__ __itruediv__ __mul__ __rmul__ __truediv__ __neg__".split()
_SCALING: frozenset[Any] = frozenset(
    [*(getattr(torch, name) for name in _PRODUCTS), *(getattr(Tensor, name) for name in _PRODUCTS + _OPERATORS)]
)


def _scales(args: Sequence[Any]) -> bool:
    """Whether a product or quotient only scales the gradient: the other operand is a number or a 0-d tensor."""
    return type(args[0]) is RowGrad and all(
        isinstance(a, (int, float)) or (isinstance(a, Tensor) and type(a) is not RowGrad and a.ndim == 0)
        for a in args[1:]
    )


def plain(value: Any) -> Any:
    """A gradient as a dense tensor; anything else as it is."""
    return value.plain() if type(value) is RowGrad else value


def inside(value: Any) -> Any:
    """The sliced gradient that a DTensor holds as its local tensor; anything else as it is."""
    local = getattr(value, "_local_tensor", None)
    return local if type(local) is RowGrad else value


def in_full(value: Any) -> Any:
    """As :func:`plain`, also for a DTensor whose local tensor is sliced."""
    held = inside(value)
    return plain(value) if held is value else type(value)(held.plain(), value._spec, requires_grad=False)


def unwrap(value: Any) -> Any:
    """The operand of a rule that a gradient holds; anything else as it is."""
    if type(value) is RowGrad:
        held = value.sliced if value.full is None else value.full
        if value.made is not None:
            value.bring()
        return held.content() if type(held) is Zeros else held
    if type(value) in (list, tuple) and RowGrad in map(type, value):
        return _unwrap_all(cast("Sequence[Any]", value))
    return value


_WRAPPERS = frozenset({RowGrad, list, tuple})  # types of operands that hold a gradient or may hold one


def _unwrap_all(values: Sequence[Any]) -> list[Any]:
    """A list of operands, with zeros that have no memory in the place of the full-size zeros that autograd put in."""
    inner = [unwrap(v) for v in values]
    for v, g in zip(values, tuple(inner), strict=True):
        if type(v) is RowGrad and type(g) in (RowSlice, Zeros):
            for place in v.unused:
                if isinstance(x := inner[place], Tensor):
                    inner[place] = Zeros(x.shape, x.dtype, x.device, g.rows)
    return inner


def wrap(value: Any) -> Any:
    """A rule's results as gradients."""
    if type(value) is Tensor:
        return value
    if type(value) is RowSlice or type(value) is Zeros:
        return RowGrad(value)
    if type(value) is tuple:
        return tuple(wrap(v) for v in cast("tuple[Any, ...]", value))
    if type(value) is list:
        return [wrap(v) for v in cast("list[Any]", value)]
    return value


def _outcome(op: Any, flat: bool, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """What an op's rule makes of the gradients' operands."""
    rule = RULES.get(op)
    if rule is None:
        return Densify(NO_RULE)
    if flat:
        kinds = [*map(type, args)]
        if kinds.count(RowGrad) == 1:  # as nearly always: there is nothing to unite, and no list to look into
            place = kinds.index(RowGrad)
            inner, grad = [*args], args[place]
            inner[place] = g = grad.sliced
            if grad.made is not None:
                grad.bring()
            if type(g) is RowSlice and (rule.positions or not g.layout.minor):
                try:
                    return rule.run(op, *inner, **kwargs)
                except NeedsAllRows as reason:
                    return Densify(str(reason))
    inner = [unwrap(a) if type(a) in _WRAPPERS else a for a in args]
    return apply_rule(rule, op, inner, {k: unwrap(v) for k, v in kwargs.items()})


def _viewed(op: Op, outcome: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The outcome of an op that returns a view, which may be written to."""
    if op is _AS_STRIDED and not args[0].in_order:
        return Densify("strides of a view of a view are those of the memory below")
    viewed = unwrap(args[0])
    # As autograd undoes an in-place op that wrote to some tokens of each row only.
    copying = type(viewed) is RowSlice and viewed.layout.minor and viewed.rows.copying
    apart = copying and (type(outcome) is not RowSlice or outcome.rows is not viewed.rows)
    if apart and _become_whole(args[0]):
        outcome = _outcome(op, False, args, kwargs)
    if type(outcome) is RowSlice or not _is_dense_part(outcome, args[0]) or node_name() in _READERS:
        return outcome
    return Densify("a part of the gradient that has no more rows than are kept may be written to")


def _in_place(op: Op | None, func: Op, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> RowGrad:
    """An op that writes to a gradient: the out-of-place op is run, and the wrapper takes over its result."""
    target: RowGrad = args[0]
    lent = target.lent
    if lent and func is _COPY and lent.write_back(unwrap(args[1]), unwrap(cast(Any, target.viewed)[0])):
        note("sliced", name)
        return target
    outcome = Densify(_OTHERS) if lent else _outcome(op, False, args, kwargs)
    if type(outcome) is Densify:
        note_densified(name, _OTHERS) if lent else _tell_densified(name, outcome, args, kwargs)
        target.shared()
        func(*map_leaves(args, plain), **map_leaves(kwargs, plain))
        return target
    note("sliced", name)
    if target.full is None:
        _write(name, target, outcome)
    return target


def _tell_densified(name: str, outcome: Densify, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    if any(type(v) is RowGrad and v.full is None for v in leaves(args, kwargs)):
        note_densified(name, outcome.reason)


@cache
def _traits(func: Any) -> tuple[str, bool, bool, bool, Op | None]:
    """What is known of an op by its schema.

    Its name; whether it writes to its first argument; whether it returns a view; whether each tensor that it takes is
    an argument by itself, not in a list or given by name; its out-of-place form.
    """
    schema = func._schema
    first = schema.arguments[0].alias_info if schema.arguments else None
    writes = first is not None and first.is_write
    functional = None
    if writes and schema.name.endswith("_"):
        packet = getattr(torch.ops.aten, schema.name.removeprefix("aten::")[:-1], None)
        functional = getattr(packet, schema.overload_name or "default", None)
    views = any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)
    flat = not any("Tensor" in str(a.type) and (a.kwarg_only or "List" in str(a.type)) for a in schema.arguments)
    return op_name(func), writes, views, flat, functional


def _become_whole(base: RowGrad) -> bool:
    """Slice a gradient of tokens over the rows that they lie in, so that a part of each row can be written to."""
    if base.viewed is not None:
        return False
    try:
        whole: RowSlice = whole_rows(unwrap(base))
    except NeedsAllRows:
        return False
    if type(base.sliced) is Zeros:
        base.sliced.written[:] = [whole]
    else:
        _replace(base, whole)
    return True


def _replace(target: RowGrad, content: Any) -> None:
    """Make this the content of a gradient, whose strides stay."""
    held = target.sliced
    if type(held) is RowSlice and held.order is not None:
        content = held.like(torch.zeros_like(held.values)) if type(content) is Zeros else content.like(content.values)
        content.order = held.order
    target.become(content)


def _is_dense_part(outcome: Any, viewed: Tensor) -> bool:
    """Whether a view op's results are dense parts: a write to one would not reach the gradient that it views."""
    parts = cast("list[Any]", outcome) if type(outcome) is list else [outcome]
    return any(isinstance(part, Tensor) and part.numel() < viewed.numel() for part in parts)


_AS_STRIDED = torch.ops.aten.as_strided.default
_COPY = torch.ops.aten.copy_.default
_OTHERS = "a write in place gives a gradient to rows that are not kept, or only a look at the device tells whether"
_IN_ORDER: frozenset[Op] = frozenset(
    getattr(torch.ops.aten, name).default for name in "alias view view_as_complex view_as_real".split()
)
"""Views of all elements, in their order."""
_READERS = frozenset({"CatBackward0", "StackBackward0"})
"""Nodes whose formulas read parts of the gradient along the rows and write to none of them."""


def _write(name: str, target: Any, outcome: Any) -> None:
    """Make the outcome of an in-place op the content of the tensor, and of the gradient that it views."""
    held = target.sliced
    if type(held) is Zeros:
        if type(outcome) is not Zeros:
            held.written[:] = [outcome]
    elif target.viewed is None and type(outcome) in (RowSlice, Zeros):
        _replace(target, outcome)
    elif target.viewed is None:
        target.become(None, outcome)
    elif (
        type(outcome) is RowSlice
        and (outcome.rows is held.rows and outcome.layout == held.layout)  # a rule that mixes tokens gives whole rows
        and target.shows_through()
    ):
        held.values.copy_(outcome.values)
    else:
        note_densified(name, "the gradient is written to through a view that is not one of its kept rows' values")
        target.shared().copy_(outcome.dense() if type(outcome) in (RowSlice, Zeros) else outcome)


def _link(out: Any, base: RowGrad, func: Op, rest: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Tell the results of a view op which gradient they view."""
    if type(out) is RowGrad:
        _link_to(out, base, func, rest, kwargs)
    elif isinstance(out, list):
        for place, part in enumerate(cast("list[RowGrad]", out)):
            _link_to(part, base, func, rest, kwargs, place)


def _link_to(
    out: RowGrad, base: RowGrad, func: Op, rest: Sequence[Any], kwargs: dict[str, Any], place: int | None = None
) -> None:
    """Tell a result of a view op, or the one at a place of its list of results, which gradient it views."""
    if place is None:
        out.viewed = base, lambda dense: func(dense, *rest, **kwargs)
    else:
        out.viewed = base, lambda dense: func(dense, *rest, **kwargs)[place]
    out.in_order = base.in_order and func in _IN_ORDER


@cache
def _number(func: Any) -> int:
    """What the extension calls an op."""
    return native.extension.number(func._schema.name, func._schema.overload_name)


@cache
def _op(name: str, overload: str) -> Any:
    return getattr(getattr(torch.ops.aten, name.removeprefix("aten::")), overload or "default")


def _recorded(call: Any, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run an op's rule, and give the extension the recipe."""
    from rowprop.native.recorder import Recorder  # only here, as Python's dispatch needs none

    name, writes, views, _, _ = _traits(func)
    at_work = Recorder(call, func, args, kwargs, _sliced)
    at_work.why = at_work.why or ("it writes to its operand" if writes else None if func in RULES else NO_RULE)
    if func is _AS_STRIDED:
        at_work.why = "its strides are those of the memory below"
    if at_work.why is None:
        with at_work:
            out = RowGrad.ruled(func, args, kwargs)
    else:
        out = RowGrad.ruled(func, args, kwargs)
    at_work.finish(name, out, views)
    return out


def _sliced(value: Any) -> RowSlice | None:
    return value.sliced if type(value) is RowGrad and value.full is None and type(value.sliced) is RowSlice else None


def go_native() -> None:
    """Have native dispatch run the ops on sliced gradients, once it is compiled. Called while no gradient is sliced."""
    if native.off():
        return
    from rowprop.native import building

    built: Any = building.arrive()
    if built is None:
        return
    from rowprop.native.recorder import derived

    named = [op._schema for op in cast("list[Any]", [*RULES]) if getattr(op, "_schema", None) is not None]
    keys = {f"{s.name}.{s.overload_name}".removesuffix(".") for s in named if s.name.startswith("aten::")}
    built.setup(RowGrad, sorted(keys), watch._reports, note, unpacks, derived)  # pyright: ignore[reportPrivateUsage]
    built.enable(True)
    native.extension = built


@contextmanager
def by_python() -> Generator[None]:
    """Have Python run the ops within the block, also where native dispatch is in use: to compare."""
    built, native.extension = native.extension, None
    if built is not None:
        built.enable(False)
    try:
        yield
    finally:
        native.extension = built
        if built is not None:
            built.enable(True)
