"""Liger's custom functions, known by name: the library is not imported for them.

Their kernels take all dimensions but the last for one, and work over the last. Some backwards write their results over
the gradient or over a saved tensor; here they only get copies to write to.
"""

from __future__ import annotations

from typing import Any

from rowprop.backprop.rules.functions import Dims, on_kept_rows
from rowprop.backprop.rules.registry import function_rule
from rowprop.backprop.sliced import Densify, NeedsAllRows, RowSlice

_DECLARED: dict[str, tuple[Dims, Dims]] = {
    "dyt.LigerDyTFunction": ((0, None, None, None), (0, ...)),
    "experimental.embedding.LigerEmbeddingFunction": ((0, None), None),
    "fused_add_rms_norm.LigerFusedAddRMSNormFunction": ((0, None, 0), (0, 0, ...)),
    "geglu.LigerGELUMulFunction": (0, (0, 0)),
    "group_norm.LigerGroupNormFunction": ((0, None, None, 0, 0), (0, ...)),
    "kl_div.LigerKLDivLossFunction": (0, (0, ...)),
    "layer_norm.LigerLayerNormFunction": ((0, None, None, 0, 0), (0, ...)),
    "poly_norm.LigerPolyNormFunction": ((0, None, 0), (0, ...)),
    "relu_squared.LigerReLUSquaredFunction": (0, 0),
    "softmax.LigerSoftmaxFunction": (0, 0),
    "swiglu.LigerFusedGateUpSiLUMulFunction": (0, (0, ...)),
    "swiglu.LigerSiLUMulFunction": (0, (0, 0, ...)),
    "tvd.LigerTVDLossFunction": (0, (0, ...)),
}
"""Where the rows lie in each function's saved tensors, and in the gradients that its backward returns."""


def _run(node: Any, grads: tuple[Any, ...], saved: Dims, returned: Dims) -> Any:
    if any(type(g) is RowSlice and g.ndim < 2 for g in grads):
        raise NeedsAllRows("the function works over the rows' own dimension")
    return on_kept_rows(node, grads, saved=saved, grads=returned, in_place=False)


def _declare(name: str, saved: Dims, returned: Dims) -> None:
    @function_rule(f"liger_kernel.ops.{name}")
    def _(node: Any, backward: Any, *grads: Any) -> Any:
        return _run(node, grads, saved, returned)


for _name, (_saved, _returned) in _DECLARED.items():
    _declare(_name, _saved, _returned)


@function_rule("liger_kernel.ops.rms_norm.LigerRMSNormFunction")
def _rms_norm(node: Any, backward: Any, g: Any) -> Any:
    return _run(node, (g,), (0, None, 0) if len(node.saved_tensors) == 3 else (0, 0), (0, ...))


@function_rule("liger_kernel.ops.sparsemax.LigerSparsemaxFunction")
def _sparsemax(node: Any, backward: Any, g: Any) -> Any:
    if type(g) is RowSlice and node.dim % g.ndim == g.dim:
        return Densify("the function works over the rows' own dimension")
    return _run(node, (g,), 0, (0, ...))


@function_rule("liger_kernel.ops.rope.LigerRopeFunction")
def _rope(node: Any, backward: Any, *grads: Any) -> Any:
    return _rotated(node, grads, 0, 3)


@function_rule("liger_kernel.ops.qwen2vl_mrope.LigerQwen2VLMRopeFunction")
def _mrope(node: Any, backward: Any, *grads: Any) -> Any:
    return _rotated(node, grads, 1, 4)


@function_rule("liger_kernel.ops.llama4_rope.LigerLlama4RopeFunction")
def _llama4_rope(node: Any, backward: Any, *grads: Any) -> Any:
    (angles,) = node.saved_tensors
    return _rotated(node, grads, 0, 3 if angles.ndim > 2 else 2)


def _rotated(node: Any, grads: tuple[Any, ...], dim: int, ndim: int) -> Any:
    """Queries and keys, rotated by angles; ``dim`` of the angles is 1, or it holds the rows, or they are shared."""
    angles = node.saved_tensors[0]
    num_rows = next(g for g in grads if type(g) is RowSlice).shape[0]
    shared = angles.ndim == 2 or angles.shape[dim] == 1
    if angles.ndim != ndim or not (shared or angles.shape[dim] == num_rows):
        return Densify("the angles have another shape than expected")
    copies = tuple(g.like(g.values.clone()) if type(g) is RowSlice else g for g in grads)
    return _run(node, copies, None if shared else dim, (0, 0, ...))


@function_rule("liger_kernel.ops.cross_entropy.LigerCrossEntropyFunction")
def _cross_entropy(node: Any, backward: Any, *grads: Any) -> Any:
    """With ``reduction="none"``: the forward has made the logits' gradient, and the backward scales it."""
    return on_kept_rows(node, grads, saved=0, grads=(0, ...), outputs=(0, ...))


@function_rule("liger_kernel.ops.fused_linear_cross_entropy.LigerFusedLinearCrossEntropyFunction")
def _fused_linear_cross_entropy(node: Any, backward: Any, *grads: Any) -> Any:
    """With ``reduction="none"``: the backward computes the logits again, here for the kept rows only."""
    if not vars(node).get("defer_grads"):
        return Densify("this version of Liger sums the weight's gradient over all rows in its forward")
    return on_kept_rows(node, grads, saved=(0, None, 0, None), grads=(0, ...), outputs=(0, ...))
