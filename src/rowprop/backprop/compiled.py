"""``torch.compile(model, backend="rowprop")``: compiled regions whose backward runs on the kept rows.

``torch.compile`` turns each region of a model into one autograd Function with a forward and a backward graph. Here the
backward graph is kept until the first sliced gradient arrives. It is then traced once more, node by node, under the
rules of eager mode, with the indices of the kept rows as an input. The gathers of saved tensors become part of the
graph, and Inductor fuses them. The number of kept rows is symbolic, so it may change from step to step.
"""

from __future__ import annotations

import itertools
import operator
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from math import prod
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes  # pyright: ignore[reportPrivateUsage]

from rowprop.backprop.layout import Layout, view
from rowprop.backprop.rows import Hook
from rowprop.backprop.rules.apply import apply_rule, unite
from rowprop.backprop.rules.pointwise import is_contiguous
from rowprop.backprop.rules.registry import RULES, function_rule, op_name
from rowprop.backprop.sliced import Densify, RowSet, RowSlice, Zeros, gather_plain, whole_rows
from rowprop.backprop.watch import note_densified, note_sliced
from rowprop.errors import InvalidInput

aten: Any = torch.ops.aten
prims: Any = torch.ops.prims

_counter = itertools.count()
_regions: weakref.WeakSet[Any] = weakref.WeakSet()  # the tracing contexts of the regions that this backend compiled


def backend(graph: Any, inputs: Sequence[Any], *, options: dict[str, Any] | None = None) -> Callable[..., Any]:
    """Compile a region so that its backward runs on the kept rows; for ``torch.compile(model, backend="rowprop")``.

    The forward, and a backward without :func:`rowprop.pick`, are compiled as ``torch.compile`` does by default. The
    first sliced gradient of a region compiles a second backward, for any number K of kept rows from 2 to N - 1. K = 1
    has a backward of its own; K = N is the full backward. The second backward follows the rules of eager mode, with
    the same result; :func:`rowprop.watch` names the ops that it densified. Regions compiled by any other backend
    receive dense gradients.

    Args:
        graph: A region, as TorchDynamo traced it.
        inputs: Its example inputs.
        options: ``{"kernels": "inductor"}`` (default), or ``"eager"`` to run the traced graphs op by op: for debugging.

    Raises:
        InvalidInput: Unknown options.
    """
    kernels = (options or {}).get("kernels", "inductor")
    if set(options or {}) - {"kernels"} or kernels not in ("inductor", "eager"):
        raise InvalidInput(
            f"options={options!r} was given but the rowprop backend needs nothing, or {{'kernels': 'inductor'}} or "
            "{'kernels': 'eager'}."
        )
    import torch._functorch.config as functorch_config
    from torch._guards import TracingContext

    _regions.add(TracingContext.get())
    # A cached region comes back without its backward graph. A donated buffer is overwritten before its rows are taken.
    patch: Any = cast(Any, functorch_config).patch
    with patch(enable_autograd_cache=False, donated_buffer=False):
        return _compile_eager(graph, inputs) if kernels == "eager" else _compile_inductor(graph, inputs)


def _compile_inductor(graph: Any, inputs: Sequence[Any]) -> Callable[..., Any]:
    from torch._inductor import compile_fx as module

    compile_fx: Any = module
    full: dict[Any, Any] = compile_fx.select_decomp_table()

    def inner(graph: Any, inputs: Sequence[Any], **kwargs: Any) -> Any:
        if not kwargs.get("is_backward"):
            return compile_fx.compile_fx_inner(graph, inputs, **kwargs)

        def compile(graph: Any, inputs: Sequence[Any]) -> Callable[[list[Any]], Any]:
            results = next(n for n in graph.graph.nodes if n.op == "output").args[0]
            graph.graph.output_node().meta["user_visible_output_idxs"] = [
                place for place, value in enumerate(results) if isinstance(value, torch.fx.Node)
            ]
            return compile_fx.compile_fx_inner(graph, inputs, **kwargs)

        return _Backward(graph, inputs, full, compile).boxed()

    return compile_fx.compile_fx(graph, inputs, inner_compile=inner, decompositions=_whole_norms(full))


def _compile_eager(graph: Any, inputs: Sequence[Any]) -> Callable[..., Any]:
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    def boxed(graph: Any, _: Sequence[Any]) -> Callable[[list[Any]], Any]:
        def call(args: list[Any]) -> Any:
            values = list(args)
            args.clear()
            return _Run(graph).run(*values)

        call._boxed_call = True  # pyright: ignore[reportFunctionMemberAccess]
        return call

    def backward(graph: Any, inputs: Sequence[Any]) -> Any:
        return _Backward(graph, inputs, {}, boxed).boxed()

    compiler = cast(Any, aot_autograd)(
        fw_compiler=boxed,
        bw_compiler=backward,
        partition_fn=min_cut_rematerialization_partition,
        keep_inference_input_mutations=True,
    )
    return compiler(graph, inputs)


def _whole_norms(table: dict[Any, Any]) -> dict[Any, Any]:
    """The decompositions, without those of BatchNorm: it mixes rows, and its rule has to see the whole op."""
    whole = {"native_batch_norm_backward", "cudnn_batch_norm_backward", "batch_norm_backward"}
    return {op: f for op, f in table.items() if str(op).removeprefix("aten.").partition(".")[0] not in whole}


def _is_region(function: type) -> bool:
    return function.__name__ == "CompiledFunction" and hasattr(function, "_lazy_backward_info")


def compiled_elsewhere(node: Any) -> bool:
    """Whether a node is the backward of a region that another backend compiled, which runs at full size."""
    function = getattr(node, "_forward_cls", None)
    if function is None or not _is_region(function):
        return False
    return getattr(function._lazy_backward_info, "saved_context", None) not in _regions


@function_rule(_is_region, positions=True)
def _compiled_region(node: Any, backward: Callable[..., Any], *grads: Any) -> Any:
    info = node._forward_cls._lazy_backward_info
    if getattr(info, "saved_context", None) not in _regions:
        return Densify("compiled by another backend: torch.compile(model, backend='rowprop') keeps it sliced")
    if any(type(g) is RowSlice and g.layout.minor for g in grads):
        if any(type(g) is RowSlice and g.rows.attention == "cut" for g in grads):
            return Densify("a compiled region takes whole sequences, which attention='cut' does not leave whole")
        united = unite([whole_rows(g) for g in grads], {})
        if united is None:
            return Densify("gradients sliced over different batches meet")
        grads = tuple(united[0])
    return backward(*grads)  # torch hands a RowSlice, which is no tensor, on to _Backward as it is


class _Backward:
    """The backward of one compiled region, at full size and on kept rows, each compiled when first needed."""

    def __init__(
        self, graph: Any, inputs: Sequence[Any], decompositions: dict[Any, Any], compile: Callable[..., Any]
    ) -> None:
        from torch._guards import CompileContext, TracingContext, detect_fake_mode

        self.graph = graph
        self.inputs = list(inputs)
        self.decompositions = decompositions
        self.compile = compile
        self.fake_mode: Any = detect_fake_mode(self.inputs)
        self.context = TracingContext.try_get()
        self.compile_context = CompileContext.try_get()
        self.dense: Callable[[list[Any]], Any] | None = None
        self.sliced: dict[Any, list[_Variant]] = {}
        self.refused: dict[Any, str] = {}  # why the first trace that failed did

    def boxed(self) -> Callable[[list[Any]], Any]:
        def call(args: list[Any]) -> Any:
            return self(args)

        call._boxed_call = True  # pyright: ignore[reportFunctionMemberAccess]
        return call

    def __call__(self, args: list[Any]) -> Any:
        if any(type(a) is RowSlice for a in args):
            out = self.on_rows(args)
            if out is not None:
                return out
            self.densify(args)
        if self.dense is None:
            self.dense = self.compiled(lambda *values: _Run(self.graph).run(*values), self.inputs)
        return self.dense(args)

    def densify(self, args: list[Any]) -> None:
        """Replace sliced and undefined gradients by full-size ones, laid out as the graph expects them."""
        known = _named(self.sizes(args))
        for place, (a, fake) in enumerate(zip(args, self.inputs, strict=True)):
            if type(a) is RowSlice:
                args[place] = _ordered(a.dense(), _order(fake))
            elif a is None and isinstance(fake, Tensor):
                shape = [_evaluator(size)(known) for size in fake.shape]
                args[place] = _ordered(torch.zeros(shape, dtype=fake.dtype, device=fake.device), _order(fake))

    def compiled(self, function: Callable[..., Any], inputs: Sequence[Any]) -> Callable[[list[Any]], Any]:
        """Trace a function of fake inputs, and compile the traced graph."""
        from torch._dispatch.python import enable_python_dispatcher
        from torch._guards import compile_context, tracing
        from torch.fx.experimental.proxy_tensor import make_fx

        with (
            tracing(self.context),
            compile_context(cast(Any, self.compile_context)),
            torch.no_grad(),
            torch._C._DisableAutocast(),  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue, reportUnknownMemberType]
            _disable_current_modes(),
        ):
            with self.fake_mode, enable_python_dispatcher():
                graph: Any = make_fx(function, decomposition_table=self.decompositions)(*inputs)
            graph.graph.eliminate_dead_code()
            graph.recompile()
            return self.compile(graph, inputs)

    def on_rows(self, args: list[Any]) -> Any:
        """Run the backward on the kept rows; None if it has to run at full size."""
        rows = next(a.rows for a in args if type(a) is RowSlice)
        key = (
            rows.unique,
            rows.batchnorm,
            rows.hook and rows.hook.key(),
            rows.kept == 1,
            *(
                (place, a.layout.dim, a.layout.outer, a.layout.inner, a.values.dtype) if type(a) is RowSlice else place
                for place, a in enumerate(args)
                if type(a) is RowSlice or a is None
            ),
        )
        sizes = self.sizes(args)
        variants = self.sliced.setdefault(key, [])
        variant = next((v for v in variants if v.fits(sizes, rows.kept)), None)
        if variant is None and key not in self.refused:
            try:
                variant = _Variant(self, args, rows)
                variants.append(variant)
            except Warning:  # that a filter made an error
                raise
            except Exception as error:  # a failed trace must not end a training run: the full size works
                self.refused[key] = f"it could not be traced on kept rows: {error}"
                warnings.warn(
                    f"the backward of a compiled region could not be traced on kept rows and runs at full size: "
                    f"{type(error).__name__}: {error}",
                    stacklevel=2,
                )
        if variant is None:
            note_densified("compiled region", self.refused[key])
            return None
        return variant(args, rows, sizes)

    def sizes(self, args: Sequence[Any]) -> dict[Any, int]:
        """The values of the symbolic sizes in this call."""
        found: dict[Any, int] = {}
        for fake, real in zip(self.inputs, args, strict=True):
            if isinstance(fake, torch.SymInt):
                _bind(found, fake, real)
            elif isinstance(fake, Tensor) and real is not None:
                for symbol, size in zip(fake.shape, real.shape, strict=True):
                    _bind(found, symbol, size)
        return found


def _named(sizes: dict[Any, int]) -> dict[str, int]:
    return {str(symbol): size for symbol, size in sizes.items()}


def _bind(found: dict[Any, int], symbol: Any, value: Any) -> None:
    if isinstance(symbol, torch.SymInt):
        times, rest = cast("tuple[Any, Any]", cast(Any, symbol).node.expr.as_coeff_Mul())
        if rest.is_symbol:
            found[rest] = int(value) // int(times)


class _Variant:
    """One compiled backward on kept rows, for one layout of the rows in each incoming gradient."""

    def __init__(self, region: _Backward, args: Sequence[Any], rows: RowSet) -> None:
        env: Any = region.fake_mode.shape_env
        frozen, known = env.frozen, len(env.guards)
        env.frozen = False  # dynamo freezes it after the forward, and later conditions would be lost
        try:
            self.trace(region, args, rows, env)
            guards = [guard.expr for guard in env.guards[known:]]
        finally:
            env.frozen = frozen
        self.guards = [_evaluator(guard) for guard in dict.fromkeys(guards)]
        if not self.fits(region.sizes(args), rows.kept):
            raise RuntimeError("the conditions on sizes do not hold for the sizes that they were made for")

    def trace(self, region: _Backward, args: Sequence[Any], rows: RowSet, env: Any) -> None:
        """Trace the backward on kept rows, and compile it."""
        kept = self.kept = _symbol(env, rows.kept) if rows.kept > 1 else 1
        first = next(place for place, a in enumerate(args) if type(a) is RowSlice)
        layouts: dict[int, Layout] = {
            place: _symbolic(a.layout, region.inputs[place]) for place, a in enumerate(args) if type(a) is RowSlice
        }
        num_rows = layouts[first].num_rows
        self.notes: list[tuple[str, str | None]] = []
        self.results: list[Any] = []
        with torch.no_grad(), _disable_current_modes(), region.fake_mode:
            index = torch.empty((cast(int, kept),), dtype=torch.int64, device=rows.index.device)
            inputs = [
                gather_plain(fake, index, layouts[place]) if place in layouts else fake
                for place, fake in enumerate(region.inputs)
                if args[place] is not None
            ]
        self.orders = {place: _order(region.inputs[place]) for place in layouts}

        def on_rows(*values: Any) -> list[Any]:
            *given, index = values
            traced = RowSet(index, num_rows, unique=rows.unique, batchnorm=rows.batchnorm)
            further: list[Tensor] = []
            traced.hook = rows.hook and rows.hook.traced(traced, further)
            run = _OnRows(region.graph, traced, self.notes)
            supply = iter(given)
            full: Any = []
            for place, fake in enumerate(region.inputs):
                if place in layouts:
                    full.append(RowSlice(next(supply), traced, layouts[place], fake.shape))
                elif args[place] is None:
                    full.append(_undefined(fake, traced))
                else:
                    full.append(next(supply))
            results: list[Any] = []
            for r in run.run(*full):
                if moved := type(r) is RowSlice and r.rows is not traced:
                    self.notes.append(("compiled region", "other rows leave it than came in"))
                results.append(r.dense() if moved or type(r) is Zeros else r)
            self.results[:] = [
                (r.layout.dim, _evaluator(r.layout.outer), _evaluator(r.layout.inner)) if type(r) is RowSlice else None
                for r in results
            ]
            return [*(r.values if type(r) is RowSlice else r for r in results), *further]

        self.notes.clear()
        self.call = region.compiled(on_rows, [*inputs, index])
        if isinstance(kept, torch.SymInt) and cast(Any, kept).node.expr.is_number:
            raise RuntimeError(f"an op fixes the number of kept rows, at {rows.kept}")

    def fits(self, sizes: dict[Any, int], kept: int) -> bool:
        """Whether the conditions on sizes that were met at compile time hold in this call."""
        known = self.named(sizes, kept)
        return all(guard(known) for guard in self.guards)

    def named(self, sizes: dict[Any, int], kept: int) -> dict[str, int]:
        known = _named(sizes)
        if isinstance(self.kept, torch.SymInt):
            known[str(cast(Any, self.kept).node.expr)] = kept
        return known

    def __call__(self, args: list[Any], rows: RowSet, sizes: dict[Any, int]) -> list[Any]:
        values: list[Any] = []
        for place, a in enumerate(args):
            if type(a) is RowSlice:
                values.append(_ordered(a.values, self.orders[place]))
            elif a is not None:
                values.append(a)
        values.append(rows.index.contiguous())
        args.clear()
        out: list[Any] = list(self.call(values))
        for found in out[len(self.results) :]:
            cast("Hook", rows.hook).take(rows, found)
        del out[len(self.results) :]
        for name, reason in self.notes:
            if reason is None:
                note_sliced(name)
            else:
                note_densified(name, reason)
        known = self.named(sizes, rows.kept)
        for place, where in enumerate(self.results):
            if where is not None:
                dim, outer, inner = where
                layout = Layout(dim, rows.num_rows, outer(known), inner(known))
                shape: list[int] = list(out[place].shape)
                shape[dim] = layout.size
                out[place] = RowSlice(out[place], rows, layout, shape)
        return out


def _order(tensor: Tensor) -> list[int]:
    """The dimensions, from the largest stride to the smallest."""
    return sorted(range(tensor.ndim), key=tensor.stride, reverse=True)


def _ordered(values: Tensor, order: list[int]) -> Tensor:
    """The values, laid out in memory as the graph expects them."""
    inverse = sorted(range(values.ndim), key=order.__getitem__)
    return values.permute(order).contiguous().permute(inverse)


def _symbol(env: Any, hint: int) -> torch.SymInt:
    from torch._dynamo.source import ConstantSource
    from torch.fx.experimental.symbolic_shapes import DimDynamic

    source = ConstantSource(f"rowprop_kept_{next(_counter)}")
    symbol = env.create_symbol(hint, source=source, dynamic_dim=DimDynamic.DYNAMIC, constraint_dim=None)
    return env.create_symintnode(symbol, hint=hint, source=source)


def _symbolic(layout: Layout, fake: Tensor) -> Layout:
    """The layout; if the batch is symbolic, with the number of rows as a symbol of the graph."""
    size = fake.shape[layout.dim]
    if isinstance(size, torch.SymInt):
        return Layout(layout.dim, size // (layout.outer * layout.inner), layout.outer, layout.inner)
    return layout


def _undefined(fake: Tensor, rows: RowSet) -> Any:
    """Zeros for an undefined gradient; any dimension of the right size may count as its rows."""
    for dim, size in enumerate(fake.shape):
        if size == rows.num_rows:
            layout = Layout(dim, rows.num_rows)
            kept_shape = layout.kept_shape(fake.shape, rows.kept)
            return RowSlice(torch.zeros(kept_shape, dtype=fake.dtype, device=fake.device), rows, layout, fake.shape)
    return torch.zeros(fake.shape, dtype=fake.dtype, device=fake.device)


def _evaluator(expression: Any) -> Callable[[dict[str, int]], Any]:
    """A size, or a condition on sizes, as a function of the symbols' values."""
    if isinstance(expression, int):
        return lambda known: expression
    import math

    from torch.utils._sympy.printers import PythonPrinter

    tree: Any = cast(Any, expression).node.expr if isinstance(expression, torch.SymInt) else expression
    code = compile(PythonPrinter().doprint(tree), "<size>", "eval")
    return partial(eval, code, {"math": math})


_SAME = {
    aten.clone.default,
    aten.alias.default,
    aten.detach.default,
    aten._to_copy.default,
    prims.convert_element_type.default,
}
_WRITES = {
    aten.index_put.default,
    aten.index_add.default,
    aten.scatter_add.default,
    aten.scatter.src,
    aten.as_strided_scatter.default,
}
_RESHAPES = {
    aten.view.default,
    aten._unsafe_view.default,
    aten.reshape.default,
    aten.unsqueeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
}


class _Run(torch.fx.Interpreter):
    """Runs a backward graph, whatever the layout of its tensors in memory."""

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # Inductor may lay out a saved tensor otherwise than the trace did, and a view of it may then be impossible.
        return super().call_function(aten.reshape.default if target is aten.view.default else target, args, kwargs)


class _OnRows(_Run):
    """Runs a backward graph on sliced gradients, each node under its op's rule."""

    def __init__(self, graph: Any, rows: RowSet, notes: list[tuple[str, str | None]]) -> None:
        from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
        from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

        super().__init__(graph, garbage_collect_values=False)
        self.looks = DataDependentOutputException, DynamicOutputShapeException, GuardOnDataDependentSymNode
        self.rows = rows
        self.notes = notes
        self.sources: dict[int, torch.fx.Node] = {}
        self.known: dict[Any, Tensor] = {}
        rows.recompute = self.recompute

    def run_node(self, n: torch.fx.Node) -> Any:
        result = super().run_node(n)
        if isinstance(result, Tensor):
            self.sources.setdefault(id(result), n)
        return result

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not any(type(a) is RowSlice or type(a) is Zeros for a in _flat(args, kwargs)):
            return super().call_function(target, args, kwargs)
        args = tuple(list(cast("Sequence[Any]", a)) if isinstance(a, list) else a for a in args)  # fx has its own lists
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
        op, args, kwargs = self.usual(target, args, kwargs)
        rule = RULES.get(op)
        if getattr(op, "_schema", None) is not None and op._schema.is_mutable:
            raise NotImplementedError(f"{op} writes to a gradient")
        name = op_name(op)
        outcome: Any = Densify("no rule for this op")
        if rule is not None:
            try:
                outcome = apply_rule(rule, op, list(args), kwargs)
            except self.looks:
                outcome = Densify("the rule has to look at indices, which a compiled graph cannot")
        if type(outcome) is not Densify:
            self.notes.append((name, None))
            return outcome
        self.notes.append((name, outcome.reason))
        return outcome.after(super().call_function(op, *_dense(args, kwargs)))

    def usual(self, op: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
        """The op of autograd's own formulas, if Inductor's decompositions replaced it by another op."""
        if op is prims.convert_element_type.default:
            return aten._to_copy.default, args[:1], {"dtype": args[1]}
        if op is aten._unsafe_masked_index_put_accumulate.default:
            target, mask, indices, values = args
            values = self.call_function(aten.masked_fill.Scalar, (values, mask.logical_not(), 0), {})
            op, args = aten.index_put.default, (target, indices, values, True)
        if op is aten._unsafe_index_put.default:
            op = aten.index_put.default
        if op is aten.where.self:
            condition, a, b = args
            if type(a) is RowSlice and self.is_zero(b):
                return aten.masked_fill.Scalar, (a, condition.logical_not(), 0), {}
            if type(b) is RowSlice and self.is_zero(a):
                return aten.masked_fill.Scalar, (b, condition, 0), {}
        if op in _WRITES and self.is_zero(args[0]):
            args = Zeros(args[0].shape, args[0].dtype, args[0].device, self.rows), *args[1:]
        if op is aten.as_strided_scatter.default and type(args[0]) is Zeros:
            base, g, size, stride, *offset = args
            if not any(offset) and prod(size) == prod(base.shape) and is_contiguous(size, stride):
                return aten.view.default, (g, base.shape), {}
        if op in (aten.cat.default, aten.stack.default):
            g = next(a for a in args[0] if type(a) is RowSlice)
            return op, ([self.sliced_zeros(a, g) if self.is_zero(a) else a for a in args[0]], *args[1:]), kwargs
        if op in (aten.slice_scatter.default, aten.select_scatter.default) and self.is_zero(args[0]):
            base, g, *rest = args
            if op is aten.select_scatter.default:
                return aten.select_backward.default, (g, base.shape, *rest), {}
            dim, start, end, step = (*rest, *(0, None, None, 1)[len(rest) :])
            size = base.shape[dim]
            return aten.slice_backward.default, (g, base.shape, dim, start or 0, size if end is None else end, step), {}
        return op, args, kwargs

    def sliced_zeros(self, zeros: Tensor, like: RowSlice) -> RowSlice:
        kept_shape = like.layout.kept_shape(zeros.shape, self.rows.kept)
        values = like.values.new_zeros(kept_shape, dtype=zeros.dtype)
        return RowSlice(values, self.rows, like.layout, zeros.shape)

    def is_zero(self, value: Any) -> bool:
        node: Any = self.sources.get(id(value))
        if node is None or not isinstance(value, Tensor):
            return False
        if node.target in (aten.full.default, aten.full_like.default):
            return node.args[1] == 0
        return node.target in (aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default)

    def recompute(self, tensor: Tensor, layout: Layout) -> Tensor:
        """The kept rows of a plain tensor; if the graph computes the tensor from saved ones, only these rows of it."""
        node = self.sources.get(id(tensor))
        if node is None:
            return gather_plain(tensor, self.rows.index, layout)
        key = node, layout.dim, str(layout.outer), str(layout.inner)
        if key not in self.known:
            found = self.on_kept(node, tensor, layout)
            self.known[key] = gather_plain(tensor, self.rows.index, layout) if found is None else found
        return self.known[key]

    def on_kept(self, node: Any, value: Tensor, layout: Layout) -> Tensor | None:
        op: Any = node.target
        if node.op != "call_function" or not hasattr(op, "_schema"):
            return None
        if op in _SAME or torch.Tag.pointwise in op.tags:
            return self.elementwise(op, node, value, layout)
        kept_shape = layout.kept_shape(value.shape, self.rows.kept)
        if op is aten.full.default:
            return op(kept_shape, *node.args[1:], **node.kwargs)
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

    def elementwise(self, op: Any, node: torch.fx.Node, value: Tensor, layout: Layout) -> Tensor | None:
        args, kwargs = self.fetch_args_kwargs_from_env(node)
        if "device" in kwargs or kwargs.get("memory_format") not in (None, torch.preserve_format):
            return None

        def kept(a: Any) -> Any:
            if not isinstance(a, Tensor):
                return a
            dim = layout.dim - value.ndim + a.ndim
            return a if dim < 0 or a.shape[dim] == 1 else self.recompute(a, layout.at(dim))

        return op(*(kept(a) for a in args), **{name: kept(a) for name, a in kwargs.items()})


def _flat(args: Iterable[Any], kwargs: dict[str, Any]) -> Iterable[Any]:
    for a in (*args, *kwargs.values()):
        if isinstance(a, (list, tuple)):
            yield from cast("Sequence[Any]", a)
        else:
            yield a


def _dense(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    def dense(a: Any) -> Any:
        if isinstance(a, (list, tuple)):
            values = [dense(v) for v in cast("Sequence[Any]", a)]
            return tuple(values) if isinstance(a, tuple) else values
        return a.dense() if type(a) is RowSlice or type(a) is Zeros else a

    return tuple(dense(a) for a in args), {name: dense(a) for name, a in kwargs.items()}
