"""Custom functions of torch and of other libraries, from Liger to Brevitas, known by name.

No library is imported for them. Liger's kernels work over the last dimension. Some backwards write over the gradient or
a saved tensor: they get copies.
"""

from __future__ import annotations

from functools import partial
from math import prod
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from rowprop.backprop.rows.refusals import NeedsAllRows
from rowprop.backprop.rows.slice import Densify, RowSlice
from rowprop.backprop.rules.functions import Dims, kept_values, on_kept_rows, own_backward
from rowprop.backprop.rules.registry import function_rule

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


_ROTATED: dict[str, tuple[int, tuple[int, ...]]] = {
    "rope.LigerRopeFunction": (0, (3,)),
    "qwen2vl_mrope.LigerQwen2VLMRopeFunction": (1, (4,)),
    "llama4_rope.LigerLlama4RopeFunction": (0, (2, 3)),
}
"""The dimension of the angles that is 1 or holds the rows, and how many dimensions angles may have."""


def _run(node: Any, backward: Any, *grads: Any, saved: Dims, returned: Dims) -> Any:
    if any(type(g) is RowSlice and g.ndim < 2 for g in grads):
        raise NeedsAllRows("the function works over the rows' own dimension")
    return on_kept_rows(node, grads, saved=saved, grads=returned, in_place=False)


def _rotated(node: Any, backward: Any, *grads: Any, dim: int, dims: tuple[int, ...]) -> Any:
    """Queries and keys, rotated by angles that belong to the rows or are shared."""
    angles = node.saved_tensors[0]
    num_rows = next(g for g in grads if type(g) is RowSlice).shape[0]
    shared = angles.ndim == 2 or angles.shape[dim] == 1
    if angles.ndim not in dims or not (shared or angles.shape[dim] == num_rows):
        return Densify("the angles have another shape than expected")
    copies = (g.like(g.values.clone()) if type(g) is RowSlice else g for g in grads)
    return _run(node, backward, *copies, saved=None if shared else dim, returned=(0, 0, ...))


for _name, (_saved, _returned) in _DECLARED.items():
    function_rule(f"liger_kernel.ops.{_name}")(partial(_run, saved=_saved, returned=_returned))
for _name, (_dim, _dims) in _ROTATED.items():
    function_rule(f"liger_kernel.ops.{_name}")(partial(_rotated, dim=_dim, dims=_dims))


@function_rule("liger_kernel.ops.rms_norm.LigerRMSNormFunction")
def _rms_norm(node: Any, backward: Any, g: Any) -> Any:
    saved = (0, None, 0) if len(node.saved_tensors) == 3 else (0, 0)
    return _run(node, backward, g, saved=saved, returned=(0, ...))


def _sparsemax(node: Any, backward: Any, g: Any) -> Any:
    if type(g) is RowSlice and node.dim % g.ndim == g.dim:
        return Densify("the function works over the rows' own dimension")
    return _run(node, backward, g, saved=0, returned=(0, ...))


def _cross_entropy(node: Any, backward: Any, *grads: Any) -> Any:
    """With ``reduction="none"``: the forward has made the logits' gradient, and the backward scales it."""
    return on_kept_rows(node, grads, saved=0, grads=(0, ...), outputs=(0, ...))


def _own(node: Any, g: RowSlice, **changed: Any) -> tuple[Any, ...]:
    """What a function's own backward makes of the kept values, with some attributes of its node changed.

    The gradient of its first argument has the rows; those of the others have none.
    """
    to_input, *others = own_backward(node, g.values, **changed)
    return (None if to_input is None else g.like(to_input)), *others


def _entry_by_entry(node: Any, backward: Any, g: RowSlice) -> Any:
    """Rounding or clamping with the gradient of the identity, which reads no saved tensor."""
    return _own(node, g)


_LIKE_SPARSEMAX = """liger_kernel.ops.sparsemax.LigerSparsemaxFunction entmax.activations.SparsemaxFunction
entmax.activations.Entmax15Function pytorch_tabnet.sparsemax.SparsemaxFunction
pytorch_tabnet.sparsemax.Entmax15Function"""
_LIKE_CROSS_ENTROPY = """liger_kernel.ops.cross_entropy.LigerCrossEntropyFunction entmax.losses.SparsemaxLossFunction
entmax.losses.SparsemaxBisectLossFunction entmax.losses.Entmax15LossFunction
entmax.losses.EntmaxBisectLossFunction flash_attn.ops.triton.cross_entropy.CrossEntropyLoss"""
_ROUNDED = """RoundSteFn RoundToZeroSteFn DPURoundSteFn CeilSteFn FloorSteFn BinarySignSteFn TernarySignSteFn
ScalarClampSteFn ScalarClampMinSteFn TensorClampSteFn InplaceTensorClampSteFn"""

for _name in _LIKE_SPARSEMAX.split():
    function_rule(_name)(_sparsemax)
for _name in _LIKE_CROSS_ENTROPY.split():
    function_rule(_name)(_cross_entropy)
for _name in _ROUNDED.split():
    function_rule(f"brevitas.ops.autograd_ste_ops.{_name}", positions=True)(_entry_by_entry)


@function_rule("liger_kernel.ops.fused_linear_cross_entropy.LigerFusedLinearCrossEntropyFunction")
def _fused_linear_cross_entropy(node: Any, backward: Any, *grads: Any) -> Any:
    """With ``reduction="none"``: the backward computes the logits again, here for the kept rows only."""
    if not vars(node).get("defer_grads"):
        return Densify("this version of Liger sums the weight's gradient over all rows in its forward")
    return on_kept_rows(node, grads, saved=(0, None, 0, None), grads=(0, ...), outputs=(0, ...))


@function_rule("trl.kernels.chunked_logprob.ChunkedLogProbFunction")
def _chunked_log_probs(node: Any, backward: Any, *grads: Any) -> Any:
    """The head and each token's log-probability: the backward computes the logits again, here for the kept tokens."""
    return on_kept_rows(node, grads, saved=(0, None, None, 0, 0, 0), grads=(0, ...))


_generated = "torch._library.autograd.GeneratedBackwardFor_torch_nn__linear_cross_entropy_batch_chunked"


@function_rule(f"{_generated}_no_reduction_default")
def _linear_cross_entropy(node: Any, backward: Any, g: RowSlice) -> Any:
    """Torch's own head and loss, in chunks: the backward computes the logits again, here for the kept rows only."""
    return on_kept_rows(node, [g], saved=(0, None, 0, None, None), grads=(0, ...))


def _over_last(node: Any, g: RowSlice, **changed: Any) -> Any:
    """A function over the last dimension, at rows or positions; its first argument and what it saved have these."""
    if g.layout.holds(g.ndim - 1):
        raise NeedsAllRows("the function works over the rows' own dimension")
    return _own(node, g, saved_tensors=tuple(map(g.take, node.saved_tensors)), **changed)


@function_rule("transformers.models.bloom.modeling_bloom.GeLUFunction", positions=True)
@function_rule("flash_attn.ops.activations.FastGeLUFunction", positions=True)
@function_rule("torch.distributions.dirichlet._Dirichlet", positions=True)  # that of Beta, too
@function_rule("bitsandbytes.autograd._functions.MatMul4Bit", positions=True)
def _last(node: Any, backward: Any, g: RowSlice) -> Any:
    return _over_last(node, g)


# The gradients of snnTorch's spikes, except that of StochasticSpikeOperator, which draws numbers for all rows.
for _name in """StraightThroughEstimator Triangular FastSigmoid ATan Heaviside Sigmoid SpikeRateEscape
SparseFastSigmoid""".split():
    function_rule(f"snntorch.surrogate.{_name}", positions=True)(_last)


@function_rule("bitsandbytes.autograd._functions.MatMul8bitFp", positions=True)
def _eight_bits(node: Any, backward: Any, g: RowSlice) -> Any:
    """A product with a weight of 8 bits, made floating again."""
    return _over_last(node, g, A=g.take(node.A), grad_shape=g.kept_shape(node.grad_shape))


@function_rule("bitsandbytes.autograd._functions.MatMul8bitLt", positions=True)
def _eight_bits_rounded(node: Any, backward: Any, g: RowSlice) -> Any:
    """The same with an input of 8 bits; a trained weight's gradient is rounded by columns of all rows."""
    if node.needs_input_grad[1]:
        return Densify("the weight of 8 bits is trained, and its gradient rounded over all rows")
    return _over_last(node, g, grad_shape=g.kept_shape(node.grad_shape))


@function_rule("transformers.models.phimoe.modeling_phimoe.PhimoeMultiplier")
@function_rule("transformers.models.recurrent_gemma.modeling_recurrent_gemma.SqrtBoundDerivative")
def _of_each_entry(node: Any, backward: Any, g: RowSlice) -> Any:
    """The weight of each token's expert; a square root whose derivative is bounded."""
    return on_kept_rows(node, [g], saved=0, grads=(0, ...))


_MULTIPLE = 16  # the products of float8 kernels need as many rows, or a multiple


@function_rule("torchao.float8.float8_linear.matmul_with_hp_or_float8_args")
def float8_linear(node: Any, backward: Any, gradient: RowSlice) -> Any:
    """The product of an input and a weight that are rounded; the scales are those of all rows."""
    # The largest entries make the scales, and may lie in a row that is not kept. So the kept rows get further rows with
    # the largest entries of all rows; the gradient is zero there, and they add nothing.
    full, weight = node.saved_tensors
    if type(full) is not Tensor or full.shape[:-1] != gradient.shape[:-1] or gradient.dim == gradient.ndim - 1:
        return Densify("the input was rounded before, or has another shape than the output")
    g = gradient.merged()  # rounding is not linear: repeated rows are added first
    kept = g.take(full)
    grads, inputs = g.values.flatten(0, -2), kept.flatten(0, -2)
    largest = full.detach().abs().flatten(0, -2).amax(0)
    more = _MULTIPLE - len(inputs) % _MULTIPLE
    saved = torch.cat([inputs, largest.expand(more, -1)]), weight
    padded = torch.cat([grads, grads.new_zeros(more, grads.shape[1])])
    to_input, *others = own_backward(node, padded, saved_tensors=saved)
    return g.like(to_input[: len(inputs)].view(kept.shape)), *others


_OVER_LAST: dict[str, tuple[str, tuple[int, ...]]] = {
    "flash_attn.ops.activations.SwiGLUFunction": ("rr", (0, 1)),
    "flash_attn.ops.triton.layer_norm.LayerNormFn": ("r....rrrr", (0, 3, 4)),
    "flash_attn.ops.triton.layer_norm.LayerNormLinearFn": ("r...rr", (0, 5)),
    "megatron.core.fusions.fused_bias_geglu.BiasGeGLUFunction": ("r.", (0,)),
    "megatron.core.fusions.fused_bias_geglu.GeGLUFunction": ("r", (0,)),
    "megatron.core.fusions.fused_bias_geglu.WeightedQuickGeGLUFunction": ("rr.", (0, 1)),
    "megatron.core.fusions.fused_bias_gelu.GeLUFunction": ("r.", (0,)),
    "megatron.core.fusions.fused_bias_swiglu.BiasSwiGLUFunction": ("r.", (0,)),
    "megatron.core.fusions.fused_bias_swiglu.SwiGLUFunction": ("r", (0,)),
    "megatron.core.fusions.fused_bias_swiglu.WeightedSwiGLUFunction": ("rr", (0, 1)),
    "megatron.core.fusions.fused_weighted_squared_relu.WeightedSquaredReLUFunction": ("rr", (0, 1)),
    "megatron.core.transformer.moe.moe_utils.MoEAuxLossAutoScaler": (".", (0,)),
    "megatron.core.transformer.moe.moe_utils.RouterGatingLinearFunction": ("r..", (0,)),
    "megatron.core.transformer.multi_token_prediction.MTPLossAutoScaler": (".", (0,)),
    "megatron.core.utils.MakeViewlessTensor": ("", (0,)),
    "unsloth.kernels.fast_lora.LoRA_MLP": ("......rrrrrr", (0,)),
    "unsloth.kernels.fast_lora.LoRA_QKV": ("r......rrr", (0,)),
    "unsloth.kernels.fast_lora.LoRA_W": ("..rr", (0,)),
    "unsloth.kernels.layernorm.Fast_Layernorm": ("r..rr", (0,)),
    "unsloth.kernels.rms_layernorm.Fast_RMS_Layernorm": ("r.r", (0,)),
}
"""Functions over the last dimension: which saved tensors have rows ("r"), and which of the returned gradients."""


def _kept(tensor: Tensor, g: RowSlice, every: tuple[int, ...], parts: int = 1) -> Tensor:
    """The kept rows of a tensor that holds those of ``every`` shape, or all of them in one dimension, once or twice."""
    if tensor.shape[: len(every)] == every:
        return g.take(tensor)
    if tensor.shape[0] not in (prod(every), parts * prod(every)):
        raise NeedsAllRows("a saved tensor does not hold the rows")
    each = [g.take(part.view(*every, *part.shape[1:])) for part in torch.split(tensor, prod(every))]
    return torch.cat([part.flatten(0, len(every) - 1) for part in each])


@function_rule("megatron.core.fusions.fused_cross_entropy._VocabParallelCrossEntropy", positions=True)
@function_rule("megatron.core.tensor_parallel.cross_entropy._VocabParallelCrossEntropy", positions=True)
def _vocabulary_parallel(node: Any, backward: Any, g: RowSlice) -> Any:
    """Losses of rows or tokens, whose classes lie on several ranks; the backward writes over the probabilities."""
    saved = tuple(_kept(t, g, g.shape).clone() for t in node.saved_tensors)
    return _own(node, g, saved_tensors=saved)


def _over_rows_or_tokens(node: Any, backward: Any, *grads: Any, has_rows: str, returned: tuple[int, ...]) -> Any:
    """Layers, norms and activations of (N, T, width), which save tensors as (N, T, ...) or as (N * T, ...)."""
    given, saved = [each for each in grads if each is not None], node.saved_tensors
    g = given[0]
    if not all(type(each) is RowSlice and each.rows is g.rows and each.layout == g.layout for each in given):
        return Densify("the gradients of the outputs are not sliced alike")
    if len(saved) != len(has_rows) or g.layout.holds(g.ndim - 1):
        return Densify("the function saves other tensors than expected, or works over the rows' own dimension")

    parts = 2 if getattr(node, "has_x1", False) else 1  # flash-attn's norm of a sum has seeds of both terms
    taken = tuple(
        _kept(t, g, g.shape[:-1], parts) if rows == "r" and t is not None else t
        for t, rows in zip(saved, has_rows, strict=True)
    )
    # Some backwards write their result over a saved input, or over the gradient.
    changed: Any = {"inplace": False, "reuse_grad": False}
    if "x_shape_og" in vars(node):
        changed["x_shape_og"] = [*g.kept_shape(g.shape[:-1]), node.x_shape_og[-1]]
    values = kept_values(node, grads, (g.dim,) * len(grads), g)
    results = own_backward(node, *values, saved_tensors=taken, **changed)
    return tuple(g.like(d) if place in returned and d is not None else d for place, d in enumerate(results))


for _name, (_has_rows, _places) in _OVER_LAST.items():
    function_rule(_name, positions=True)(partial(_over_rows_or_tokens, has_rows=_has_rows, returned=_places))


_ROTARY = {"ApplyRotaryEmb": (3, 7), "ApplyRotaryEmbQKV_": (4, 7), "ApplyRotaryEmbKV_": (2, 4)}
"""flash-attn's rotary embeddings: how many tensors each saves beside offsets, and its arguments beside the heads."""
_AT_ONCE = 2**18  # tokens that one launch of its kernel can take


def _by_place(node: Any, backward: Any, g: RowSlice, tensors: int, others: int) -> Any:
    """Heads turned by angles of their place, (N, T, ...) or packed (T, ...): one sequence of the kept tokens."""
    *angles, ends = [*node.saved_tensors[:tensors], *(None,) * (tensors != 3)]
    given = node.saved_tensors[tensors:]
    if len(given) != (node.seqlen_offsets is None) or any(part.dim > (ends is None) for part in g.layout.parts):
        return Densify("the rows are neither sequences nor tokens, or the function saves other tensors than expected")
    offsets = given[0] if given else node.seqlen_offsets
    places = torch.arange(g.shape[ends is None], device=g.values.device)
    if ends is not None:
        ends = ends.long()
        sequence = (torch.searchsorted(ends, places, right=True) - 1).clamp(0, len(ends) - 2)
        places = places - ends[sequence] + (offsets[sequence] if given else offsets)
    else:
        places = (places + (offsets[:, None] if given else offsets)).expand(g.shape[:2])

    def some(values: Tensor, places: Tensor) -> Tensor:
        # Beyond the table, which tensors of offsets can reach, the kernel turns by an angle of 0.
        tables = (
            t if t is None else F.pad(t, (0, 0, 0, 1), value=1.0 - number % 2)[places.clamp(max=len(t))]
            for number, t in enumerate(angles)
        )
        changed: Any = {"saved_tensors": (*tables, *(None,) * (tensors == 3)), "seqlen_offsets": 0, "inplace": False}
        return own_backward(node, values[None], **changed)[0][0]

    values: Tensor = g.values if ends is not None else g.values.flatten(0, 1)
    values = values.clone(memory_format=torch.contiguous_format)  # two of the three write to it
    pieces = zip(torch.split(values, _AT_ONCE), torch.split(g.take(places).flatten(), _AT_ONCE), strict=True)
    return g.like(torch.cat([some(*piece) for piece in pieces]).view(g.values.shape)), *(None,) * others


for _name, (_tensors, _others) in _ROTARY.items():
    _rule = partial(_by_place, tensors=_tensors, others=_others)
    function_rule(f"flash_attn.layers.rotary.{_name}", positions=True)(_rule)


def _turned(node: Any, backward: Any, *grads: Any) -> Any:
    """Queries, or queries and keys, turned by angles that all rows share; ``rope_indices`` has those of each token."""
    g = grads[0]
    if not all(type(each) is RowSlice and each.dim == 0 and each.layout == g.layout for each in grads):
        return Densify("the batch is not the first dimension of queries and keys")
    of_tokens = cast("dict[str, Any]", vars(node)).get("rope_indices")
    if of_tokens is not None:
        of_tokens = g.take(of_tokens.view(g.shape[0], -1)).flatten()
    turned = own_backward(node, *(each.values for each in grads), rope_indices=of_tokens)
    return *(each.like(d) for each, d in zip(grads, turned, strict=False)), *turned[len(grads) :]


for _name in ("Fast_RoPE_Embedding", "Fast_RoPE_Embedding_QK", "Fast_RoPE_Embedding_QK_Positions"):
    function_rule(f"unsloth.kernels.rope_embedding.{_name}")(_turned)
function_rule("unsloth.kernels.cross_entropy_loss.Fast_CrossEntropyLoss")(_cross_entropy)
