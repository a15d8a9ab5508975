"""``torch.compile(model, backend="rowprop")``: compiled regions whose backward runs on the kept rows.

``torch.compile`` turns each region of a model into one autograd Function with a forward and a backward graph. Once a
sliced gradient arrives, the backward graph is traced again, node by node, under the rules of eager mode, with the kept
rows' indices as an input. Inductor fuses the gathers of saved tensors. The number of kept rows is symbolic: it may
change from step to step.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch

from rowprop.backprop.compiled.cache import Backward
from rowprop.backprop.compiled.trace import Run
from rowprop.backprop.rules.apply import unite
from rowprop.backprop.rules.registry import function_rule
from rowprop.backprop.sliced import Densify, RowSlice, whole_rows
from rowprop.errors import InvalidInput

_regions: weakref.WeakSet[Any] = weakref.WeakSet()  # the tracing contexts of the regions that this backend compiled


def backend(graph: Any, inputs: Sequence[Any], *, options: dict[str, Any] | None = None) -> Callable[..., Any]:
    """Compile a region so that its backward runs on the kept rows; for ``torch.compile(model, backend="rowprop")``.

    The forward, and a backward without :func:`rowprop.pick`, are compiled as ``torch.compile`` does by default. The
    first sliced gradient compiles a second backward, for any number K of kept rows from 2 to N - 1; K = 1 has one of
    its own. It follows the rules of eager mode, with the same result; :func:`rowprop.watch` names the ops that it
    densified. Regions compiled by any other backend receive dense gradients.

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

        return _boxed(Backward(graph, inputs, full, compile))

    return compile_fx.compile_fx(graph, inputs, inner_compile=inner, decompositions=_whole_norms(full))


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


def _whole_norms(table: dict[Any, Any]) -> dict[Any, Any]:
    """The decompositions, without those of BatchNorm: it mixes rows, and its rule has to see the whole op."""
    whole = {"native_batch_norm_backward", "cudnn_batch_norm_backward", "batch_norm_backward"}
    return {op: f for op, f in table.items() if str(op).removeprefix("aten.").partition(".")[0] not in whole}


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
        return Densify("compiled by another backend: torch.compile(model, backend='rowprop') keeps it sliced")
    if any(type(g) is RowSlice and g.layout.minor for g in grads):
        if any(type(g) is RowSlice and g.rows.attention == "cut" for g in grads):
            return Densify("a compiled region takes whole sequences, which attention='cut' does not leave whole")
        united = unite([whole_rows(g) for g in grads], {})
        if united is None:
            return Densify("gradients sliced over different batches meet")
        grads = tuple(united[0])
    return backward(*grads)  # torch hands a RowSlice, which is no tensor, on to Backward as it is
