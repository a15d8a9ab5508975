"""Backward graphs run on kept rows: node by node, under the rules of eager mode."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from math import prod
from typing import Any, cast

import torch
from torch import Tensor

from rowprop.backprop.rows.gather import gather_plain
from rowprop.backprop.rows.layout import Layout, view
from rowprop.backprop.rows.refusals import NO_RULE
from rowprop.backprop.rows.rows import RowSet
from rowprop.backprop.rows.slice import Densify, RowSlice
from rowprop.backprop.rows.zeros import Zeros
from rowprop.backprop.rules.apply import apply_rule, leaves, map_leaves
from rowprop.backprop.rules.pointwise import is_contiguous
from rowprop.backprop.rules.registry import RULES, op_name

aten: Any = torch.ops.aten
prims: Any = torch.ops.prims


def _ops(names: str, *more: Any) -> set[Any]:
    return {*(getattr(aten, name).default for name in names.split()), *more}


_SAME = _ops("clone alias detach _to_copy", prims.convert_element_type.default)
_WRITES = _ops("index_put index_add scatter_add as_strided_scatter", aten.scatter.src)
_RESHAPES = _ops("view _unsafe_view reshape unsqueeze", aten.squeeze.dim, aten.squeeze.dims)


class Run(torch.fx.Interpreter):
    """Runs a backward graph, whatever the layout of its tensors in memory."""

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call an op of the graph."""
        # Inductor may lay out a saved tensor otherwise than the trace did, where a view of it is impossible.
        return super().call_function(aten.reshape.default if target is aten.view.default else target, args, kwargs)


class OnRows(Run):
    """Runs a backward graph on sliced gradients, each node under its op's rule."""

    def __init__(self, graph: Any, rows: RowSet, notes: list[tuple[str, str | None]]) -> None:
        from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
        from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

        super().__init__(graph, garbage_collect_values=False)
        self.unreadable = DataDependentOutputException, DynamicOutputShapeException, GuardOnDataDependentSymNode
        self.rows = rows
        self.notes = notes
        self.sources: dict[int, torch.fx.Node] = {}
        self.known: dict[Any, Tensor] = {}
        rows.recompute, rows.stored = self.recompute, _stored

    def run_node(self, n: torch.fx.Node) -> Any:
        """Run a node, and remember which node made a tensor."""
        result = super().run_node(n)
        if isinstance(result, Tensor):
            self.sources.setdefault(id(result), n)
        return result

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call an op of the graph, under its rule if an operand is sliced."""
        args = tuple(list(cast("Sequence[Any]", a)) if isinstance(a, list) else a for a in args)  # fx has its own lists
        if not any(type(a) in (RowSlice, Zeros) for a in leaves(args, kwargs)):
            return super().call_function(target, args, kwargs)
        if target is operator.getitem:
            return args[0][args[1]]
        if target is aten.sym_size.int:
            return args[0].shape[args[1]]
        if target is prims.fma.default:
            product = self.call_function(aten.mul.Tensor, args[:2], {})
            return self.call_function(aten.add.Tensor, (product, args[2]), {})
        if target is aten.clone.default and type(args[0]) is RowSlice:
            g = args[0]
            return g.like(g.values.clone(**kwargs))
        op, args, kwargs = self._usual(target, args, kwargs)
        if getattr(op, "_schema", None) is not None and op._schema.is_mutable:
            raise NotImplementedError(f"{op} writes to a gradient")
        rule, outcome = RULES.get(op), cast(Any, Densify(NO_RULE))
        if rule is not None:
            try:
                outcome = apply_rule(rule, op, list(args), kwargs)
            except self.unreadable:
                outcome = Densify(
                    "the rule has to look at indices, which a compiled graph cannot; leave the op uncompiled"
                )
        self.notes.append((op_name(op), outcome.reason if type(outcome) is Densify else None))
        if type(outcome) is not Densify:
            return outcome
        return outcome.after(super().call_function(op, map_leaves(args, _dense), map_leaves(kwargs, _dense)))

    def _usual(self, op: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
        """The op of autograd's own formulas, if Inductor's decompositions replaced it by another op."""
        if op is prims.convert_element_type.default:
            return aten._to_copy.default, args[:1], {"dtype": args[1]}
        if op is prims.rev.default:
            return aten.flip.default, args, kwargs
        if op is aten._unsafe_masked_index_put_accumulate.default:
            target, mask, indices, values = args
            values = self.call_function(aten.masked_fill.Scalar, (values, mask.logical_not(), 0), {})
            op, args = aten.index_put.default, (target, indices, values, True)
        if op is aten._unsafe_index_put.default:
            op = aten.index_put.default
        if op is aten.where.self:
            condition, a, b = args
            if type(a) is RowSlice and self._is_zero(b):
                return aten.masked_fill.Scalar, (a, condition.logical_not(), 0), {}
            if type(b) is RowSlice and self._is_zero(a):
                return aten.masked_fill.Scalar, (b, condition, 0), {}
        if op in _WRITES and self._is_zero(args[0]):
            args = self._without_memory(args[0]), *args[1:]
        if op is aten.as_strided_scatter.default and type(args[0]) is Zeros:
            base, g, size, stride, *offset = args
            if not any(offset) and prod(size) == prod(base.shape) and is_contiguous(size, stride):
                return aten.view.default, (g, base.shape), {}
        if op in (aten.cat.default, aten.stack.default):
            return op, ([self._without_memory(a) if self._is_zero(a) else a for a in args[0]], *args[1:]), kwargs
        if op in (aten.slice_scatter.default, aten.select_scatter.default) and self._is_zero(args[0]):
            base, g, *rest = args
            if op is aten.select_scatter.default:
                return aten.select_backward.default, (g, base.shape, *rest), {}
            dim, start, end, step = (*rest, *(0, None, None, 1)[len(rest) :])
            size = base.shape[dim]
            return aten.slice_backward.default, (g, base.shape, dim, start or 0, size if end is None else end, step), {}
        return op, args, kwargs

    def _without_memory(self, zeros: Tensor) -> Zeros:
        return Zeros(zeros.shape, zeros.dtype, zeros.device, self.rows)

    def _is_zero(self, value: Any) -> bool:
        node: Any = self.sources.get(id(value))
        if node is None or not isinstance(value, Tensor):
            return False
        if node.target in (aten.full.default, aten.full_like.default):
            return node.args[1] == 0
        if node.target is aten.scalar_tensor.default:
            return node.args[0] == 0
        return node.target in (aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default)

    def recompute(self, tensor: Tensor, layout: Layout) -> Tensor:
        """The kept rows of a plain tensor; if the graph computes the tensor from saved ones, only these rows of it."""
        node = self.sources.get(id(tensor))
        if node is None:
            return gather_plain(tensor, self.rows.index, layout)
        key = node, layout.dim, str(layout.outer), str(layout.inner)
        if key not in self.known:
            found = self._on_kept(node, tensor, layout)
            self.known[key] = gather_plain(tensor, self.rows.index, layout) if found is None else found
        return self.known[key]

    def _on_kept(self, node: Any, value: Tensor, layout: Layout) -> Tensor | None:
        op: Any = node.target
        if node.op != "call_function" or not hasattr(op, "_schema"):
            return None
        if op in _SAME or torch.Tag.pointwise in op.tags:
            return self._elementwise(op, node, value, layout)
        kept_shape = layout.kept_shape(value.shape, self.rows.kept)
        if op is aten.full.default:
            args, kwargs = self.fetch_args_kwargs_from_env(node)
            return op(kept_shape, *args[1:], **kwargs)
        source = self.env.get(node.args[0]) if node.args else None
        if not isinstance(source, Tensor):
            return None
        if op is aten.permute.default:
            dims = [d % value.ndim for d in cast("list[int]", self.fetch_args_kwargs_from_env(node)[0][1])]
            return op(self.recompute(source, layout.at(dims[layout.dim])), dims)
        if op is aten.expand.default:
            dim = layout.dim - value.ndim + source.ndim
            if dim < 0 or source.shape[dim] == 1:
                return source.expand(kept_shape)
            return self.recompute(source, layout.at(dim)).expand(kept_shape)
        if op in _RESHAPES:
            before = view(value.shape, layout, source.shape)
            if before is None or view(source.shape, before, value.shape) != layout:
                return None
            return self.recompute(source, before).reshape(kept_shape)
        return None

    def _elementwise(self, op: Any, node: torch.fx.Node, value: Tensor, layout: Layout) -> Tensor | None:
        args, kwargs = self.fetch_args_kwargs_from_env(node)
        if any(type(a) in (RowSlice, Zeros) for a in leaves(args, kwargs)):
            return None  # made of a gradient that was densified
        if "device" in kwargs or kwargs.get("memory_format") not in (None, torch.preserve_format):
            return None

        def kept(a: Any) -> Any:
            if not isinstance(a, Tensor):
                return a
            dim = layout.dim - value.ndim + a.ndim
            return a if dim < 0 or a.shape[dim] == 1 else self.recompute(a, layout.at(dim))

        return op(*(kept(a) for a in args), **{name: kept(a) for name, a in kwargs.items()})


def _stored(tensor: Tensor) -> Tensor:
    """Written to memory: Inductor does not divide a sum among blocks if all that it adds up comes through an index."""
    from torch._inductor import inductor_prims

    return cast(Any, inductor_prims).force_stride_order(tensor, tensor.stride())


def _dense(value: Any) -> Any:
    return value.dense() if type(value) in (RowSlice, Zeros) else value


def undefined(fake: Tensor, rows: RowSet) -> Any:
    """Zeros for an undefined gradient; any dimension of the right size may count as its rows."""
    for dim, size in enumerate(fake.shape):
        if size == rows.num_rows:
            layout = Layout(dim, rows.num_rows)
            kept_shape = layout.kept_shape(fake.shape, rows.kept)
            return RowSlice(torch.zeros(kept_shape, dtype=fake.dtype, device=fake.device), rows, layout, fake.shape)
    return torch.zeros(fake.shape, dtype=fake.dtype, device=fake.device)
