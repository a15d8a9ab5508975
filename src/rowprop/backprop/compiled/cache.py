"""The backward of a compiled region: at full size, and on kept rows for each way in which gradients are sliced."""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes  # pyright: ignore[reportPrivateUsage]

from rowprop.backprop.compiled.trace import OnRows, Run, undefined
from rowprop.backprop.layout import Layout
from rowprop.backprop.rows import Hook
from rowprop.backprop.sliced import RowSet, RowSlice, Zeros, gather_plain
from rowprop.backprop.watch import note, note_densified

_counter = itertools.count()


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
        self.dense: Callable[[list[Any]], Any] | None = None
        self.sliced: dict[Any, list[Variant]] = {}
        self.refused: dict[Any, str] = {}  # why the first trace that failed did

    def __call__(self, args: list[Any]) -> Any:
        """The backward's results, sliced if a gradient is."""
        if any(type(a) is RowSlice for a in args):
            out = self._on_rows(args)
            if out is not None:
                return out
            self._densify(args)
        if self.dense is None:
            self.dense = self.compiled(lambda *values: Run(self.graph).run(*values), self.inputs)
        return self.dense(args)

    def _densify(self, args: list[Any]) -> None:
        """Replace sliced and undefined gradients by full-size ones, laid out as the graph expects them."""
        known = self.sizes(args)
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
        sizes = self.sizes(args)
        variants = self.sliced.setdefault(key, [])
        variant = next((v for v in variants if v.fits(sizes, rows.kept)), None)
        if variant is None and key not in self.refused:
            try:
                variant = Variant(self, args, rows)
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
        found: dict[str, int] = {}
        for fake, real in zip(self.inputs, args, strict=True):
            if isinstance(fake, torch.SymInt):
                _bind(found, fake, real)
            elif isinstance(fake, Tensor) and real is not None:
                for symbol, size in zip(fake.shape, real.shape, strict=True):
                    _bind(found, symbol, size)
        return found


def _bind(found: dict[str, int], symbol: Any, value: Any) -> None:
    if isinstance(symbol, torch.SymInt):
        times, rest = cast("tuple[Any, Any]", cast(Any, symbol).node.expr.as_coeff_Mul())
        if rest.is_symbol:
            found[str(rest)] = int(value) // int(times)


class Variant:
    """One compiled backward on kept rows, for one layout of the rows in each incoming gradient."""

    def __init__(self, region: Backward, args: Sequence[Any], rows: RowSet) -> None:
        env: Any = region.fake_mode.shape_env
        frozen, known = env.frozen, len(env.guards)
        env.frozen = False  # dynamo freezes it after the forward, and later conditions would be lost
        try:
            self._trace(region, args, rows, env)
            guards = [guard.expr for guard in env.guards[known:]]
        finally:
            env.frozen = frozen
        self.guards = [_evaluator(guard) for guard in dict.fromkeys(guards)]
        if not self.fits(region.sizes(args), rows.kept):
            raise RuntimeError("the conditions on sizes do not hold for the sizes that they were made for")

    def _trace(self, region: Backward, args: Sequence[Any], rows: RowSet, env: Any) -> None:
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
            run = OnRows(region.graph, traced, self.notes)
            supply = iter(given)
            full: Any = []
            for place, fake in enumerate(region.inputs):
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

        self.notes.clear()
        self.call = region.compiled(on_rows, [*inputs, index])
        if isinstance(kept, torch.SymInt) and cast(Any, kept).node.expr.is_number:
            raise RuntimeError(f"an op fixes the number of kept rows, at {rows.kept}")

    def fits(self, sizes: dict[str, int], kept: int) -> bool:
        """Whether the conditions on sizes that were met at compile time hold in this call."""
        known = self._with_kept(sizes, kept)
        return all(guard(known) for guard in self.guards)

    def _with_kept(self, sizes: dict[str, int], kept: int) -> dict[str, int]:
        return {**sizes, str(cast(Any, self.kept).node.expr): kept} if isinstance(self.kept, torch.SymInt) else sizes

    def __call__(self, args: list[Any], rows: RowSet, sizes: dict[str, int]) -> list[Any]:
        """The backward's results on these rows."""
        values = [
            _ordered(a.values, self.orders[place]) if type(a) is RowSlice else a
            for place, a in enumerate(args)
            if a is not None
        ]
        values.append(rows.index.contiguous())
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
        known = self._with_kept(sizes, rows.kept)
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


def _evaluator(expression: Any) -> Callable[[dict[str, int]], Any]:
    """A size, or a condition on sizes, as a function of the symbols' values."""
    if isinstance(expression, int):
        return lambda known: expression
    from torch.utils._sympy.printers import PythonPrinter

    tree: Any = cast(Any, expression).node.expr if isinstance(expression, torch.SymInt) else expression
    code = compile(PythonPrinter().doprint(tree), "<size>", "eval")
    return partial(eval, code, {"math": math})
