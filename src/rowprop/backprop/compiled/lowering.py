"""``torch.compile(model, backend="rowprop")``: compiled regions whose backward runs on the kept rows.

``torch.compile`` turns each region of a model into one autograd Function with a forward and a backward graph. Once a
sliced gradient arrives, the backward graph is traced again, node by node, under the rules of eager mode, with the kept
rows' indices as an input. Inductor fuses the gathers of saved tensors. The number of kept rows is symbolic: it may
change from step to step.
"""

from __future__ import annotations

import copy
import math
import warnings
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes  # pyright: ignore[reportPrivateUsage]

from rowprop.backprop.compiled.trace import OnRows, Run, undefined
from rowprop.backprop.rows.gather import gather_plain
from rowprop.backprop.rows.layout import Layout
from rowprop.backprop.rows.rows import Hook, RowSet
from rowprop.backprop.rows.slice import Densify, RowSlice, whole_rows
from rowprop.backprop.rows.zeros import Zeros
from rowprop.backprop.rules.apply import unite
from rowprop.backprop.rules.registry import function_rule
from rowprop.backprop.watch import note, note_densified
from rowprop.errors import InvalidInput

_KEPT = "kept"  # the number of kept rows, among the symbolic sizes
_regions: weakref.WeakSet[Any] = weakref.WeakSet()  # the tracing contexts of the regions that this backend compiled


def backend(
    graph: Any, inputs: Sequence[Any], *, options: dict[str, Any] | None = None, mode: str = "default"
) -> Callable[..., Any]:
    """Compile a region so that its backward runs on the kept rows; for ``torch.compile(model, backend="rowprop")``.

    The forward, and a backward without :func:`rowprop.pick`, are compiled as ``torch.compile`` does by default. The
    first sliced gradient compiles a second backward, for any number K of kept rows from 2 to N - 1; K = 1 has one of
    its own. It follows the rules of eager mode, with the same result; :func:`rowprop.watch` names the ops that it
    densified. Regions compiled by any other backend receive dense gradients.

    Args:
        graph: A region, as TorchDynamo traced it.
        inputs: Its example inputs.
        options: ``{"kernels": "inductor"}`` (default), or ``"eager"`` to run the traced graphs op by op: for debugging.
        mode: As in ``torch.compile``: ``"reduce-overhead"`` replays CUDA graphs, one for each K, so that the host no
            longer limits small backwards; let K be one of few numbers then.

    Raises:
        InvalidInput: Unknown options or mode.
    """
    kernels = (options or {}).get("kernels", "inductor")
    if set(options or {}) - {"kernels"} or kernels not in ("inductor", "eager"):
        raise InvalidInput(f"options={options!r} came but none or {{'kernels': 'inductor'}} or 'eager' was needed.")
    import torch._functorch.config as functorch_config
    from torch._guards import TracingContext
    from torch._inductor import list_mode_options

    modes = list_mode_options()
    if mode not in modes:
        raise InvalidInput(f"mode={mode!r} came but one of {', '.join(modes)} was needed.")
    _regions.add(TracingContext.get())
    # A cached region comes back without its backward graph. A donated buffer is overwritten before its rows are taken.
    patch: Any = cast(Any, functorch_config).patch
    with patch(enable_autograd_cache=False, donated_buffer=False):
        return _compile_eager(graph, inputs) if kernels == "eager" else _compile_inductor(graph, inputs, modes[mode])


def _compile_inductor(graph: Any, inputs: Sequence[Any], settings: dict[str, Any]) -> Callable[..., Any]:
    from torch._inductor import compile_fx as module
    from torch._inductor import config

    compile_fx: Any = module
    under = cast("Callable[[Any], Any]", config.patch(settings))  # also when a backward is first needed, and compiled
    aten = torch.ops.aten
    usual: dict[Any, Any] = compile_fx.select_decomp_table()
    full = {**usual, aten.masked_fill.Scalar: _filled, aten.sum.dim_IntList: _summed}

    def inner(graph: Any, inputs: Sequence[Any], **kwargs: Any) -> Any:
        if not kwargs.get("is_backward"):
            return compile_fx.compile_fx_inner(graph, inputs, **kwargs)

        def compile(graph: Any, inputs: Sequence[Any]) -> Callable[[list[Any]], Any]:
            results = next(n for n in graph.graph.nodes if n.op == "output").args[0]
            graph.graph.output_node().meta["user_visible_output_idxs"] = [
                place for place, value in enumerate(results) if isinstance(value, torch.fx.Node)
            ]
            return compile_fx.compile_fx_inner(graph, inputs, **kwargs)

        return _boxed(Backward(graph, inputs, full, under(compile)))

    # BatchNorm mixes rows, and its rule has to see the whole op.
    norms = {"native_batch_norm_backward", "cudnn_batch_norm_backward", "batch_norm_backward"}
    others = {op: f for op, f in usual.items() if str(op).removeprefix("aten.").partition(".")[0] not in norms}
    return under(compile_fx.compile_fx)(graph, inputs, inner_compile=inner, decompositions=others)


def _filled(x: Tensor, mask: Tensor, value: Any) -> Tensor:
    """Laid out as ``x``: torch's own formula would take a gradient out of channels last."""
    return torch.where(mask, value, x)


def _summed(x: Tensor, dims: list[int] | None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Any:
    """A sum over kept rows, and more, in two: over all but the rows, and over these.

    Where Inductor divides a sum of a symbolic length among blocks, each of its terms costs a modulo by that length.
    """
    dims = [d % x.ndim for d in dims or range(x.ndim)]
    of_rows = [d for d in dims if _factor(x.shape[d]) is not None]
    factor = _factor(x.shape[of_rows[0]]) if len(of_rows) == 1 else None
    if factor is None or (factor == 1 and len(dims) == 1) or not x.is_floating_point():
        return NotImplemented
    at, others = of_rows[0], [d for d in dims if d not in of_rows]
    parts = cast(Any, x).unflatten(at, (x.shape[at] // factor, factor))
    wide = torch.promote_types(dtype or x.dtype, torch.float32)
    within = parts.sum([at + 1, *(d + (d > at) for d in others)], keepdim=True, dtype=wide)
    left = [1 if d in dims else size for d, size in enumerate(x.shape) if keepdim or d not in dims]
    return within.sum(at).to(dtype or x.dtype).reshape(left)


def _factor(size: Any) -> int | None:
    """Of a symbolic size the number that it is a multiple of; None of any other."""
    tree: Any = cast(Any, size).node.expr if isinstance(size, torch.SymInt) else None
    return None if tree is None or tree.is_number else int(tree.as_coeff_Mul()[0])


def _compile_eager(graph: Any, inputs: Sequence[Any]) -> Callable[..., Any]:
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    def forward(graph: Any, _: Sequence[Any]) -> Callable[[list[Any]], Any]:
        return _boxed(lambda args: Run(graph).boxed_run(args))

    def backward(graph: Any, inputs: Sequence[Any]) -> Any:
        return _boxed(Backward(graph, inputs, {}, forward))

    compiler = cast(Any, aot_autograd)(
        fw_compiler=forward,
        bw_compiler=backward,
        partition_fn=min_cut_rematerialization_partition,
        keep_inference_input_mutations=True,
    )
    return compiler(graph, inputs)


def _boxed(run: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    """A function that torch hands a list of arguments, which it empties."""

    def call(args: list[Any]) -> Any:
        return run(args)

    call._boxed_call = True  # pyright: ignore[reportFunctionMemberAccess]
    return call


def _is_region(function: type) -> bool:
    return function.__name__ == "CompiledFunction" and hasattr(function, "_lazy_backward_info")


def compiled_elsewhere(node: Any) -> bool:
    """Whether a node is the backward of a region that another backend compiled, which runs at full size."""
    function = getattr(node, "_forward_cls", None)
    return function is not None and _is_region(function) and not _is_ours(function)


def _is_ours(region: Any) -> bool:
    return getattr(region._lazy_backward_info, "saved_context", None) in _regions


@function_rule(_is_region, positions=True)
def _compiled_region(node: Any, backward: Callable[..., Any], *grads: Any) -> Any:
    if not _is_ours(node._forward_cls):
        return Densify("compiled by another backend; torch.compile(model, backend='rowprop') keeps it sliced")
    if any(type(g) is RowSlice and g.layout.minor for g in grads):
        if any(type(g) is RowSlice and g.rows.attention == "cut" for g in grads):
            whole = "a compiled region takes whole sequences, which attention='cut' does not leave whole"
            return Densify(f"{whole}; leave attention uncompiled")
        united = unite([whole_rows(g) for g in grads], {})
        if united is None:
            return Densify("gradients sliced over different batches meet")
        grads = tuple(united[0])
    return backward(*grads)  # torch hands a RowSlice, which is no tensor, on to Backward as it is


class Backward:
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
        # Of each symbolic size, the input that is its value, or the input and the dimension of it that has the size.
        sizes = [((place,), i) for place, i in enumerate(self.inputs)]
        tensors = [(place, i) for place, i in enumerate(self.inputs) if isinstance(i, Tensor)]
        sizes += [((place, dim), size) for place, i in tensors for dim, size in enumerate(i.shape)]
        self.symbols: dict[str, tuple[int, ...]] = {}
        for where, size in sizes:
            if isinstance(size, torch.SymInt):
                self.symbols.setdefault(str(cast(Any, size).node.expr), where)
        self.dense: list[Compiled] = []
        self.sliced: dict[Any, list[Variant]] = {}
        self.refused: dict[Any, str] = {}  # why the first trace that failed did

    def __call__(self, args: list[Any]) -> Any:
        """The backward's results, sliced if a gradient is."""
        if any(type(a) is RowSlice for a in args):
            out = self._on_rows(args)
            if out is not None:
                return out
            # Sliced and undefined gradients become full-size ones, laid out as the graph expects them.
            known = self.sizes(args)
            for place, (a, fake) in enumerate(zip(args, self.inputs, strict=True)):
                if type(a) is RowSlice:
                    args[place] = _ordered(a.dense(), _order(fake))
                elif a is None and isinstance(fake, Tensor):
                    shape = [_evaluator(size)(known) for size in fake.shape]
                    args[place] = _ordered(torch.zeros(shape, dtype=fake.dtype, device=fake.device), _order(fake))
        sizes = self.sizes(args)
        dense = next((d for d in self.dense if d.fits(sizes)), None)
        if dense is None:
            trace = Trace(self, sizes)
            dense = Compiled(self, trace, lambda *values: Run(self.graph).run(*values), trace.inputs)
            self.dense.append(dense)
        return dense.call(args)

    def compiled(self, function: Callable[..., Any], inputs: Sequence[Any], trace: Trace) -> Callable[[list[Any]], Any]:
        """Trace a function of fake inputs, and compile the traced graph."""
        from torch._dispatch.python import enable_python_dispatcher
        from torch._guards import compile_context, tracing
        from torch.fx.experimental.proxy_tensor import make_fx

        context = copy.copy(self.context)
        if context is not None:
            context.fake_mode = trace.mode
        with (
            tracing(context),
            compile_context(cast(Any, self.compile_context)),
            torch.no_grad(),
            torch._C._DisableAutocast(),  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue, reportUnknownMemberType]
            _disable_current_modes(),
        ):
            with trace.mode, enable_python_dispatcher():
                graph: Any = make_fx(function, decomposition_table=self.decompositions)(*inputs)
            graph.graph.eliminate_dead_code()
            graph.recompile()
            return self.compile(graph, inputs)

    def _on_rows(self, args: list[Any]) -> Any:
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
        sizes = {**self.sizes(args), _KEPT: rows.kept}
        variants = self.sliced.setdefault(key, [])
        variant = next((v for v in variants if v.fits(sizes)), None)
        if variant is None and key not in self.refused:
            try:
                variant = Variant(self, args, rows, sizes)
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

    def sizes(self, args: Sequence[Any]) -> dict[str, int]:
        """The values of the symbolic sizes in this call."""
        return {
            name: int(args[place].shape[dim[0]] if dim else args[place])
            for name, (place, *dim) in self.symbols.items()
            if args[place] is not None
        }


class Trace:
    """A region's fake inputs for one trace, in an environment of their own.

    Conditions on sizes are decided by the sizes of the call that the trace is made for. They hold for what is compiled
    of it, and for no other trace: in one environment, a size that one trace fixes would be fixed for all.
    """

    def __init__(self, region: Backward, sizes: dict[str, int]) -> None:
        from torch._subclasses.fake_tensor import FakeTensorMode
        from torch.fx.experimental.symbolic_shapes import ShapeEnv

        allowed = "allow_scalar_outputs", "allow_dynamic_output_shape_ops"
        self.env: Any = ShapeEnv(**{name: getattr(region.fake_mode.shape_env, name) for name in allowed})
        self.mode: Any = FakeTensorMode(shape_env=self.env)
        self.sizes = sizes
        self.symbols: dict[str, Any] = {}  # the symbol of each size in this environment
        self.inputs = [self._again(x) for x in region.inputs]

    def symbol(self, name: str) -> Any:
        """The symbol of a size; the same one each time."""
        from torch._dynamo.source import ConstantSource
        from torch.fx.experimental.symbolic_shapes import DimDynamic

        if name not in self.symbols:
            source, kind = ConstantSource(f"rowprop_{name}"), DimDynamic.DYNAMIC
            self.symbols[name] = self.env.create_symbol(
                self.sizes[name], source=source, dynamic_dim=kind, do_not_specialize_zero_one=True
            )
        return self.symbols[name]

    def _again(self, value: Any) -> Any:
        if isinstance(value, torch.SymInt):
            before: Any = cast(Any, value).node.expr
            here = before.xreplace({symbol: self.symbol(str(symbol)) for symbol in before.free_symbols})
            return self.env.create_symintnode(here, hint=_evaluator(before)(self.sizes))
        if not isinstance(value, Tensor):
            return value
        shape, strides = ([self._again(size) for size in sizes] for sizes in (value.shape, value.stride()))
        with self.mode:
            fake = torch.empty_strided(shape, strides, dtype=value.dtype, device=value.device)
            fake = fake.conj() if value.is_conj() else fake
            return cast(Any, torch)._neg_view(fake) if value.is_neg() else fake


class Compiled:
    """What is compiled of one trace, for all sizes under which the conditions hold that it met."""

    def __init__(self, region: Backward, trace: Trace, function: Callable[..., Any], inputs: Sequence[Any]) -> None:
        self.call = region.compiled(function, inputs, trace)
        self.names = {name: str(symbol) for name, symbol in trace.symbols.items()}
        self.guards = [_evaluator(guard) for guard in dict.fromkeys(guard.expr for guard in trace.env.guards)]

    def known(self, sizes: dict[str, int]) -> dict[str, int]:
        """The values of the sizes, by their names in the trace."""
        return {here: sizes[name] for name, here in self.names.items()}

    def fits(self, sizes: dict[str, int]) -> bool:
        """Whether the conditions on sizes that were met at compile time hold in this call."""
        known = self.known(sizes)
        return all(guard(known) for guard in self.guards)


class Variant(Compiled):
    """One compiled backward on kept rows, for one layout of the rows in each incoming gradient."""

    def __init__(self, region: Backward, args: Sequence[Any], rows: RowSet, sizes: dict[str, int]) -> None:
        trace = Trace(region, sizes)
        kept: Any = trace.env.create_symintnode(trace.symbol(_KEPT), hint=rows.kept) if rows.kept > 1 else 1
        self.counted = rows.kept > 1
        first = next(place for place, a in enumerate(args) if type(a) is RowSlice)
        layouts: dict[int, Layout] = {
            place: _symbolic(a.layout, trace.inputs[place]) for place, a in enumerate(args) if type(a) is RowSlice
        }
        num_rows = layouts[first].num_rows
        self.notes: list[tuple[str, str | None]] = []
        self.results: list[Any] = []
        with torch.no_grad(), _disable_current_modes(), trace.mode:
            index = torch.empty((kept,), dtype=torch.int64, device=rows.index.device)
            inputs = [
                gather_plain(fake, index, layouts[place]) if place in layouts else fake
                for place, fake in enumerate(trace.inputs)
                if args[place] is not None
            ]
        self.orders = {place: _order(trace.inputs[place]) for place in layouts}

        def on_rows(*values: Any) -> list[Any]:
            *given, index = values[: len(inputs) + 1]
            traced = RowSet(index, num_rows, unique=rows.unique, batchnorm=rows.batchnorm)
            further: list[Tensor] = []
            traced.hook = rows.hook and rows.hook.traced(traced, further)
            run = OnRows(region.graph, traced, self.notes)
            supply = iter(given)
            full: Any = []
            for place, fake in enumerate(trace.inputs):
                value = undefined(fake, traced) if args[place] is None else next(supply)
                full.append(RowSlice(value, traced, layouts[place], fake.shape) if place in layouts else value)
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

        # K comes as an input, too: CUDA graphs are kept by the sizes among their inputs.
        super().__init__(region, trace, on_rows, [*inputs, index, *[kept] * self.counted])
        if self.counted and kept.node.expr.is_number:
            raise RuntimeError(f"an op fixes the number of kept rows, at {rows.kept}")
        if not self.fits(sizes):
            raise RuntimeError("the conditions on sizes do not hold for the sizes that they were made for")

    def __call__(self, args: list[Any], rows: RowSet, sizes: dict[str, int]) -> list[Any]:
        """The backward's results on these rows."""
        values = [
            _ordered(a.values, self.orders[place]) if type(a) is RowSlice else a
            for place, a in enumerate(args)
            if a is not None
        ]
        values += [rows.index.contiguous(), *[rows.kept] * self.counted]
        args.clear()
        out: list[Any] = list(self.call(values))
        for found in out[len(self.results) :]:
            cast("Hook", rows.hook).take(rows, found)
        del out[len(self.results) :]
        for name, reason in self.notes:
            if reason is None:
                note("sliced", name)
            else:
                note_densified(name, reason)
        known = self.known(sizes)
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


def _symbolic(layout: Layout, fake: Tensor) -> Layout:
    """The layout; if the batch is symbolic, with the number of rows as a symbol of the graph."""
    size = fake.shape[layout.dim]
    if isinstance(size, torch.SymInt):
        return Layout(layout.dim, size // (layout.outer * layout.inner), layout.outer, layout.inner)
    return layout


def _evaluator(expression: Any) -> Callable[[dict[str, int]], Any]:
    """A size, or a condition on sizes, as a function of the symbols' values."""
    if isinstance(expression, int):
        return lambda known: expression
    from torch.utils._sympy.printers import PythonPrinter

    tree: Any = cast(Any, expression).node.expr if isinstance(expression, torch.SymInt) else expression
    code = compile(PythonPrinter().doprint(tree), "<size>", "eval")
    return partial(eval, code, {"math": math})
