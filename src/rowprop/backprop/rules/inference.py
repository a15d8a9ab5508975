"""Finds out by trials whether the backward of a custom function treats rows alike, and where the rows lie.

Each trial runs the backward on all rows and on some, with random gradients and with other values in the rows that are
left out: a backward that mixes rows then has other results. It is stopped before an op that should not run once more.
"""

from __future__ import annotations

import copy
import dis
import random
import sys
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice, product
from types import CodeType, FunctionType
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes  # pyright: ignore

from rowprop.backprop.rows.gather import along_rows, gather_plain
from rowprop.backprop.rows.layout import Layout
from rowprop.backprop.rows.refusals import NeedsAllRows
from rowprop.backprop.rows.rows import RowSet
from rowprop.backprop.rows.slice import RowSlice
from rowprop.backprop.rules.functions import NodeWith, left_out, on_kept_rows, place_of
from rowprop.backprop.rules.registry import op_of
from rowprop.errors import one_line
from rowprop.state import rng_kept

tree_leaves: Any = cast(Any, torch.utils)._pytree.tree_leaves
Dims = tuple[int | None, ...]
_FEWEST = 4  # rows of a batch
_MOST = 16  # ways to take rows of the saved tensors
_TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-5, torch.float16: 1e-2}
_COARSEST = 5e-2


class Unknown(Exception):
    """A function is not known to treat rows alike; the message is the reason."""


class _Differs(Exception):
    """The backward on some rows is not the dense one; the message says in what."""


class _Trial(NamedTuple):
    kept: int  # rows; 0: half of them
    scale: float = 1.0  # of the gradients
    others: float = 1.0  # what the saved rows that are left out are multiplied by
    copied: bool = False  # whether the rows that are left out are copies of the kept ones
    beside: bool = False  # whether the rows that are left out have a gradient, too
    spread: bool = False  # whether rows change places and scales, and one becomes zero


_TRIALS = (
    _Trial(2),
    _Trial(3, 100.0, -1000.0),
    _Trial(2, 0.01, copied=True),
    _Trial(2, 100.0, beside=True),
    _Trial(0, spread=True),
    _Trial(1),
)


def offer(node: Any, gradients: Sequence[Any]) -> str:
    """The declaration of a node's function, as a line of Python, or why there is none."""
    function, op = node._forward_cls, op_of(node._forward_cls)
    try:
        dims = infer(node, gradients)
    except Unknown as why:
        return str(why)
    if op is not None:  # behind the op's own arguments are torch's
        last = max((place for place, d in enumerate(dims["grads"]) if d is not None), default=-1)
        dims["grads"] = dims["grads"][: last + 1]
    if not any(dims["outputs"]) and None not in dims["outputs"]:
        del dims["outputs"]
    given = ", ".join(f"{name}={d[0] if len(set(d)) == 1 else d}" for name, d in dims.items())
    name = function.__name__ if op is None else f"torch.ops.{str(op).removesuffix('.default')}"
    return f"rowprop.rowwise({given})({name})"


def infer(node: Any, gradients: Sequence[Any]) -> dict[str, Dims]:
    """The arguments of :func:`rowprop.rowwise` for a node's function, some of whose gradients are sliced.

    Raises :class:`Unknown` with the reason where rows mix, or where the function cannot be tried. Random states are put
    back, and lists and dicts that the backward changes.

    Cost:
        Seven backwards of the function at full size and eight on at most half of the rows, and more where tensors have
        the rows' size in several dimensions; copies of the saved tensors and of the gradients. It waits for the device.
    """
    try:
        return _infer(node, gradients)
    except Unknown:
        raise
    except Exception as error:  # whatever it is, the function can run at full size
        raise Unknown(f"not tried: {one_line(error)}") from error


def _infer(node: Any, gradients: Sequence[Any]) -> dict[str, Dims]:
    if any(held.unpack_hook is not None for held in node._raw_saved_tensors):
        raise Unknown("not tried: hooks keep its saved tensors, as in a checkpoint, and may answer only once")
    saved = cast("tuple[Tensor | None, ...]", node.saved_tensors)
    first = next(g for g in gradients if type(g) is RowSlice).layout
    base = Layout(first.dim, first.sizes[0], first.outer, first.inner)
    layouts = [_layout_of(g, meta, base) for g, meta in zip(gradients, node._input_metadata, strict=True)]
    functions, values = _reached(node)
    _check(node, base, [t for t in saved if t is not None], functions)
    reasons: list[str] = []
    with _undisturbed(values, saved):
        for dims in islice(product(*(_candidates(t, base) for t in saved)), _MOST):
            tried = _Tried(node, saved, dims, layouts, base)
            try:
                grads = tried.run()
                tried.check_equal_rows()
                if not any(type(g) is RowSlice and g.layout.minor for g in gradients):
                    tried.compare(saved, [g if type(g) is RowSlice else None for g in gradients], grads)
                return {"saved": dims, "grads": grads, "outputs": tried.outputs}
            except _Differs as why:
                reasons.append(str(why))
    raise Unknown(f"rows mix, or the number of rows is another size, too: {reasons[0]}")


def _layout_of(g: Any, meta: Any, base: Layout) -> Layout | None:
    """Where an output's rows lie: where its gradient has them, or else where it has the size for it."""
    if type(g) is RowSlice:
        return Layout(g.dim, g.layout.sizes[0], g.layout.outer, g.layout.inner)
    found = [d for d, size in enumerate(meta.shape) if size == base.size] if meta.dtype.is_floating_point else []
    return replace(base, dim=base.dim if base.dim in found else found[0]) if found else None


def _candidates(t: Tensor | None, base: Layout) -> list[int | None]:
    """The dimensions that may hold the rows of a saved tensor, the most likely first; None for no rows."""
    # A tensor of the rows' size that is read whole depends on other rows, unless it is a weight of the same size.
    shape = () if t is None else t.shape
    found: list[int | None] = [d for d in sorted(range(len(shape)), key=base.dim.__ne__) if shape[d] == base.size]
    if base.dim == 0 and shape and shape[0] > base.size and shape[0] % base.size == 0:
        found.append(0)
    is_weight = t is not None and t.is_leaf and t.requires_grad
    return [None, *found] if is_weight else found or [None]


def _check(node: Any, base: Layout, saved: Sequence[Tensor], functions: Sequence[FunctionType]) -> None:
    """Refuse what cannot be tried, before anything runs."""
    why, kept = None, cast("dict[str, Any]", vars(node))
    devices = {held.device.type for held in [*saved, *node._input_metadata]}
    if base.num_rows < _FEWEST:
        why = f"the batch has {base.num_rows} rows, and {_FEWEST} are needed"
    elif any(type(t) not in (Tensor, nn.Parameter) or t.layout is not torch.strided or t.is_meta for t in saved):
        why = "a saved tensor is of a class or a layout of its own"
    elif any(isinstance(value, Tensor) for value in tree_leaves(kept)):
        why = "a tensor is kept as an attribute of ctx; use save_for_backward"
    elif any(map(_stores, functions)):
        why = "its backward sets attributes, or variables outside of it"
    elif devices != {"cpu"}:  # a kernel would write N rows into the memory of K
        numbers = [name for name, held in kept.items() for n in tree_leaves(held) if type(n) is int and n >= base.size]
        why = f"ctx.{numbers[0]} may count rows; read sizes off the tensors" if numbers else None
    if why is not None:
        raise Unknown(f"not tried: {why}")


def _codes(code: CodeType) -> list[CodeType]:
    """A function's code, and that of the functions inside it."""
    return [code, *(inner for const in code.co_consts if isinstance(const, CodeType) for inner in _codes(const))]


def _reached(node: Any) -> tuple[list[FunctionType], list[Any]]:
    """The functions that a backward calls, of those in its module and its closure, and all values that they name."""
    functions: list[FunctionType] = []
    values: list[Any] = [*vars(node).values()]
    stack: list[Any] = [node._forward_cls, node._get_user_fn()]
    while stack:
        value = stack.pop()
        value = getattr(value, "__func__", getattr(value, "_backward_fn", value))  # a method; an op of torch.library
        if any(value is other for other in values):
            continue
        values.append(value)
        if isinstance(value, type):
            values += [held for held in vars(value).values() if isinstance(held, _CONTAINERS)]
        elif isinstance(value, FunctionType):
            functions.append(value)
            named = [value.__globals__.get(name) for code in _codes(value.__code__) for name in code.co_names]
            stack += [v for v in named if getattr(v, "__globals__", value.__globals__) is value.__globals__]
            stack += [cell.cell_contents for cell in value.__closure__ or ()]
    return functions, values


def _stores(function: FunctionType) -> bool:
    """Whether a function sets attributes, globals, or variables of the functions around it; torch's own may."""
    code = function.__code__
    steps = [(step, inner is code) for inner in _codes(code) for step in dis.get_instructions(inner)]
    sets = [
        step.opname in ("STORE_ATTR", "DELETE_ATTR", "STORE_GLOBAL", "DELETE_GLOBAL")
        or (own and step.opname == "STORE_DEREF" and step.argval in code.co_freevars)
        for step, own in steps
    ]
    return any(sets) and not function.__globals__["__name__"].startswith("torch.")


_CONTAINERS: Any = (list, dict, set, deque)


@contextmanager
def _undisturbed(values: Sequence[Any], saved: Sequence[Tensor | None]) -> Generator[None]:
    """Put back random states and the lists, dicts and sets among these values; a change of them is :class:`Unknown`."""
    before: list[Any] = [(value, copy.copy(value)) for value in values if isinstance(value, _CONTAINERS)]
    numpy, state = cast(Any, sys.modules.get("numpy.random")), random.getstate()
    of_numpy = None if numpy is None else numpy.get_state()
    changed = False
    try:
        with rng_kept([], saved), _disable_current_modes():
            yield
    finally:
        random.setstate(state)
        if numpy is not None:
            numpy.set_state(of_numpy)
        for value, old in before:
            if _entries(value) != _entries(old):
                changed = True
                value.clear()
                (value.update if isinstance(value, (dict, set)) else value.extend)(old)
    if changed:
        raise Unknown("not tried: its backward changes a list or a dict outside of it, as one that counts calls")


def _entries(held: Any) -> list[int]:
    """What a list, dict or set holds, by identity."""
    entries: list[Any] = [*held, *(held.values() if isinstance(held, dict) else ())]
    return sorted(map(id, entries))


class _Guard(TorchDispatchMode):
    """Stops a backward before an op that should not run once more, or that makes results depend on other rows."""

    def __init__(self, own: Sequence[Tensor]) -> None:
        super().__init__()
        self.own: set[Any] = set(map(_storage, own))
        self.why = ""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else the first op imports it, for seconds

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        schema: Any = func._schema
        given: dict[str, Any] = {**(kwargs or {})}
        given.update((a.name, value) for a, value in zip(schema.arguments, args, strict=False))
        writes = [a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
        written: list[Any] = tree_leaves([given.get(name) for name in writes])
        if "c10d" in func.namespace:
            self.why = "communicates with other processes"
        elif torch.Tag.nondeterministic_seeded in func.tags:
            self.why = "draws random numbers"
        elif {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(func.tags):
            self.why = "reads values of a tensor, on which it may branch"
        elif any(isinstance(t, Tensor) and _storage(t) not in self.own for t in written):
            self.why = "writes to a tensor that it did not make"
        if self.why:
            raise Unknown(self.why)
        out = func(*args, **(kwargs or {}))
        if not any(made.alias_info for made in schema.returns):
            self.own.update(_storage(t) for t in tree_leaves(out) if isinstance(t, Tensor))
        return out


def _storage(t: Tensor) -> StorageWeakRef | None:
    return StorageWeakRef(t.untyped_storage()) if t.layout is torch.strided else None


class _Tried:
    """A way to take rows of the saved tensors, and its trials."""

    def __init__(
        self, node: Any, saved: Sequence[Tensor | None], dims: Dims, layouts: Sequence[Layout | None], base: Layout
    ) -> None:
        self.node, self.saved, self.dims, self.layouts, self.base = node, saved, dims, layouts, base
        self.outputs = tuple(None if layout is None else layout.dim for layout in layouts)
        self.generator = torch.Generator().manual_seed(0)
        self.seen = set[int]()  # the arguments whose gradient was not zero

    def run(self) -> Dims:
        """Run all trials, :class:`_Differs` if one fails; returns where the rows lie in the gradients."""
        grads: Dims | None = None
        for trial in _TRIALS:
            places = torch.randperm(self.base.num_rows, generator=self.generator)
            rows = places[: trial.kept or self.base.num_rows // 2].sort().values
            data = [self._changed(t, d, rows, trial) for t, d in zip(self.saved, self.dims, strict=True)]
            grads = self.compare(data, self._drawn(rows, trial.scale), grads, trial.scale if trial.beside else 0.0)
        assert grads is not None
        zero = [str(place) for place in range(len(grads)) if place not in self.seen]
        if zero:
            raise Unknown(f"not known: the gradient of argument {', '.join(zero)} is zero on this batch")
        return grads

    def compare(
        self, data: Sequence[Any], gradients: Sequence[RowSlice | None], grads: Dims | None, beside: float = 0.0
    ) -> Dims:
        """Run the backward on all rows, and on those of the gradients; returns where the results have rows.

        ``grads`` says it from the second trial on; ``beside`` is the scale of the other rows' gradients.
        """
        some = next(g for g in gradients if g is not None).rows
        dense = [self._full(g, place, beside) for place, g in enumerate(gradients)]
        before: list[Any] = [None if t is None else t.clone() for t in data]
        ctx = NodeWith(self.node, saved_tensors=tuple(data))
        whole: Any = self._guarded(dense, lambda: cast(Any, type(self.node)).apply(ctx, *dense), Unknown, "not tried: ")
        if not all(t is None or torch.allclose(t, b, 0, 0, equal_nan=True) for t, b in zip(data, before, strict=True)):
            raise Unknown("not tried: its backward writes to a saved tensor")

        def few(grads: Dims | None) -> tuple[Any, ...]:
            given = [g and g.like(g.merged().values.clone()) for g in gradients]
            places: Any = {"saved": self.dims, "grads": grads, "outputs": self.outputs, "every": data}
            run = lambda: on_kept_rows(self.node, given, **places)  # noqa: E731
            return self._guarded(
                [g and g.values for g in given], run, _Differs, f"on {some.kept} of {some.num_rows} rows "
            )

        whole = cast("tuple[Any, ...]", whole if isinstance(whole, tuple) else (whole,))
        if grads is None:
            grads = tuple(_smaller(place, *both) for place, both in enumerate(zip(whole, few(None), strict=True)))
        for place, (expected, found) in enumerate(zip(whole, few(grads), strict=True)):
            if isinstance(expected, Tensor) and found is not None:
                self._check_close(place, expected, found, alone=not beside)
            elif expected is None and found is None:
                self.seen.add(place)
            else:
                raise _Differs(f"argument {place} has a gradient on all rows, or on some, and not on the other")
        return grads

    def check_equal_rows(self) -> None:
        """Refuse whole numbers that are equal in all rows, if the trials pass with and without rows taken of them."""
        for place, (t, d) in enumerate(zip(self.saved, self.dims, strict=True)):
            if t is None or d is None or t.is_floating_point() or bool((t != t.narrow(d, 0, 1)).any()):
                continue
            dims = (*self.dims[:place], None, *self.dims[place + 1 :])
            try:
                _Tried(self.node, self.saved, dims, self.layouts, self.base).run()
            except _Differs:
                continue
            raise Unknown(f"not known: saved tensor {place} is the same in all rows of this batch")

    def _drawn(self, rows: Tensor, scale: float) -> list[RowSlice | None]:
        """Random gradients of some rows, for each output that has rows."""
        metas, drawn = self.node._input_metadata, list[RowSlice | None]()
        index = rows.to(metas[0].device)
        kept = RowSet(index, self.base.num_rows, unique=True, batchnorm=None)
        kept.recompute = lambda tensor, layout: gather_plain(tensor, index, layout)  # which remembers nothing
        for layout, meta in zip(self.layouts, metas, strict=True):
            shape = () if layout is None else layout.kept_shape(meta.shape, len(rows))
            values = (torch.randn(shape, generator=self.generator) * scale).to(meta.device, meta.dtype)
            drawn.append(None if layout is None else RowSlice(values, kept, layout, meta.shape))
        return drawn

    def _full(self, g: RowSlice | None, place: int, beside: float) -> Tensor | None:
        meta = self.node._input_metadata[place]
        if g is None:
            return None if left_out(self.node)[place] else torch.zeros(meta.shape, dtype=meta.dtype, device=meta.device)
        others = torch.randn(g.shape, generator=self.generator) * beside
        return torch.where(_kept(g), g.dense(), others.to(meta.device, meta.dtype))

    def _changed(self, t: Tensor | None, dim: int | None, rows: Tensor, trial: _Trial) -> Tensor | None:
        """A copy of a saved tensor, with its rows as a trial has them."""
        if t is None:
            return None
        out, floats = t.detach().clone(), t.is_floating_point() or t.is_complex()
        if floats and trial.spread and not out.any():  # zeros would hide what they multiply
            out = torch.randn(t.shape, generator=self.generator).to(t)
        if dim is not None:
            total, place = self.base.num_rows, place_of(self.base, t.shape, dim, self.base.size)
            source, factors = torch.arange(total), torch.full((total,), trial.others).index_fill(0, rows, 1)
            if trial.copied:
                source = rows[source % len(rows)].index_copy(0, rows, rows)
            elif trial.spread:
                source = torch.randperm(total, generator=self.generator)
                factors = 10 ** (torch.rand(total, generator=self.generator) * 2 - 1)
                factors[rows[0]] = 0
            out = gather_plain(out, source.to(t.device), place)
            out = out * along_rows(factors.to(t), place, t.ndim) if floats else out
        return out.requires_grad_(t.requires_grad)

    def _guarded(self, own: Sequence[Any], call: Callable[[], Any], kind: type[Exception], where: str) -> Any:
        """Run a backward; an error that is its own is raised as ``kind``."""
        guard, result = _Guard([t for t in own if t is not None]), None
        try:
            with guard:
                result = call()
        except NeedsAllRows as error:
            raise kind(f"{where}{error}") from None
        except Exception as error:
            if not guard.why:
                raise kind(f"{where}its backward fails: {one_line(error)}") from None
        if guard.why:
            raise Unknown(f"not tried: its backward {guard.why}")
        return result

    def _check_close(self, place: int, expected: Tensor, found: Any, alone: bool) -> None:
        """Compare a gradient: zero in the rows that were left out, if those had none, else equal up to rounding."""
        if type(found) is RowSlice:
            kept, found = _kept(found), found.dense()
            other = expected.masked_fill(kept, 0)
            if alone and bool(((other != 0) & ~other.isnan()).any()):
                raise _Differs(f"rows without a gradient get one in that of argument {place}")
            expected, found = expected.masked_fill(~kept, 0), found.masked_fill(~kept, 0)
        elif not alone:  # a sum over the rows
            return
        elif expected.ndim > self.base.dim and expected.shape[self.base.dim] == self.base.size:
            raise _Differs(f"the gradient of argument {place} has {self.base.size} rows on fewer rows, too")
        sizes = expected.abs().nan_to_num(0, 0)
        largest = float(sizes.max()) if sizes.numel() else 0.0
        allowed = largest * _TOLERANCES.get(expected.dtype.to_real(), _COARSEST)
        if found.shape != expected.shape or not torch.allclose(found, expected, 0, allowed, equal_nan=True):
            raise _Differs(f"the gradient of argument {place} on some rows is not that of these rows among all")
        if largest > 0:
            self.seen.add(place)


def _kept(g: RowSlice) -> Tensor:
    """Whether each row is kept, in a shape that broadcasts to the full one."""
    rows = torch.zeros(g.rows.num_rows, dtype=torch.bool, device=g.rows.index.device)
    return along_rows(rows.index_fill(0, g.rows.index, True), g.layout, g.ndim)


def _smaller(place: int, whole: Any, some: Any) -> int | None:
    """The dimension in which a gradient is smaller on fewer rows; None if it has no rows."""
    if not isinstance(whole, Tensor) or not isinstance(some, Tensor) or whole.shape == some.shape:
        return None
    dims = [d for d, (a, b) in enumerate(zip(whole.shape, some.shape, strict=False)) if a != b]
    if whole.ndim != some.ndim or len(dims) != 1:
        raise _Differs(f"the gradient of argument {place} has shape {tuple(some.shape)}, not {tuple(whole.shape)}")
    return dims[0]
