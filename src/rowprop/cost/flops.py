"""Counting the floating-point operations that really run, forward and backward. 1 multiply-add = 2 FLOPs.

The formulas are torch's own (``torch.utils.flop_counter``) with what it misses or overstates put right: attention on
the CPU, LSTM and other fused recurrent layers, the weight gradient of grouped convolutions, products with vectors,
bilinear layers.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count  # pyright: ignore[reportUnknownVariableType]

from rowprop.backprop.rowgrad import RowGrad

Formula = Callable[..., int]


@dataclass
class Flops:
    """What ran, in FLOPs.

    Attributes:
        by_op: FLOPs of each op, by its name (``mm``, ``convolution_backward``).
        uncounted: Ops that ran and for which no formula is known, with the number of calls. They are **not** in the
            total. Ops of a few FLOPs per element (elementwise, reductions, softmax, norms, pooling, losses, random
            numbers) and those of none (views, copies, indexing, sorting) are left out on purpose and not listed.
    """

    by_op: dict[str, int] = field(default_factory=dict[str, int])
    uncounted: dict[str, int] = field(default_factory=dict[str, int])

    @property
    def total_flops(self) -> int:
        """The sum over all counted ops."""
        return sum(self.by_op.values())


@contextmanager
def count_flops() -> Generator[Flops, None, None]:
    """Count the FLOPs that run inside the block.

    Of a row-sliced gradient the kernels at K rows are counted, not the full shape that it claims. Causal attention is
    counted in full, and flash attention's backward with the scores it computes again: five products for the forward's
    two.

    Yields:
        A :class:`Flops`, filled while the block runs.

    Cost:
        Python runs at every op, so never time inside the block.

    Example:
        >>> import torch
        >>> with count_flops() as flops:
        ...     _ = torch.ones(2, 3) @ torch.ones(3, 5)
        >>> flops.by_op
        {'mm': 60}
    """
    flops = Flops()
    with _Counter(flops):
        yield flops


class _Counter(TorchDispatchMode):
    def __init__(self, flops: Flops) -> None:
        super().__init__()
        self.flops = flops

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if RowGrad in types:
            return NotImplemented  # its rule runs next, and the ops that the rule calls come back here
        kwargs = kwargs or {}
        packet = getattr(func, "_overloadpacket", func)
        formula = FORMULAS.get(packet)
        if formula is None and isinstance(func, torch._ops.OpOverload):  # pyright: ignore[reportPrivateUsage]
            with self:  # under inference mode, composite ops arrive whole
                out: Any = cast(Any, func).decompose(*args, **kwargs)
            if out is not NotImplemented:
                return out
        out = cast(Any, func)(*args, **kwargs)
        name = str(packet).removeprefix("aten.")
        if formula is not None:
            counted = formula(*args, **kwargs, out_val=out)
            self.flops.by_op[name] = self.flops.by_op.get(name, 0) + counted
        elif not _is_light(func):
            self.flops.uncounted[name] = self.flops.uncounted.get(name, 0) + 1
        return out


# --- formulas --------------------------------------------------------------------------------------------------------

_aten = torch.ops.aten


def _conv(x: Tensor, w: Tensor, transposed: bool, out: Tensor) -> int:
    """Each entry of the weight meets each place of the smaller image once: of the output, or of a transposed input."""
    places = (x if transposed else out).shape[2:]
    return 2 * x.shape[0] * prod(places) * w.numel()


def _convolution_backward(
    grad: Tensor,
    x: Tensor,
    w: Tensor,
    _bias: Any,
    _stride: Any,
    _pad: Any,
    _dil: Any,
    transposed: bool,
    *rest: Any,
    **_: Any,
) -> int:
    output_mask: Sequence[bool] = rest[-1]
    return (output_mask[0] + output_mask[1]) * _conv(x, w, transposed, grad)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> int:
    return sdpa_flop_count(q.shape, k.shape, v.shape)


def _sdpa_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> int:
    return sdpa_backward_flop_count(grad.shape, q.shape, k.shape, v.shape)


def _attention_kernel(formula: Formula, tensors: int, lengths: int) -> Formula:
    """Torch's formula reads (N, heads, time, width) where the kernels have (N, time, heads, width).

    The first ``tensors`` arguments are meant, unless there are packed sequences: then argument ``lengths`` is given.
    """

    def count(*args: Any, **kwargs: Any) -> int:
        if args[lengths] is None:
            args = (*[a.transpose(1, 2) for a in args[:tensors]], *args[tensors:])
        return formula(*args, **kwargs)

    return count


def _recurrent(x: Tensor, weights: Sequence[Tensor]) -> int:
    """Every matrix meets every step of every row once; weights are matrices and biases."""
    steps = prod(x.shape[:-1])
    return 2 * steps * sum(w.numel() for w in weights if w.ndim == 2)


def _mkldnn_rnn(x: Tensor, w0: Tensor, w1: Tensor, *_: Any, **__: Any) -> int:
    return _recurrent(x, (w0, w1))


def _cudnn_rnn(x: Tensor, weights: Sequence[Tensor], *_: Any, **__: Any) -> int:
    return _recurrent(x, weights)


def _twice(forward: Formula) -> Formula:
    """A backward that makes the gradients of the input and of the weights, each as dear as the forward."""
    return lambda *args, **kwargs: 2 * forward(*args, **kwargs)


def _matrix_vector(matrix: Tensor, *_: Any, **__: Any) -> int:
    return 2 * matrix.numel()


def _add_matrix_vector(_bias: Tensor, matrix: Tensor, *_: Any, **__: Any) -> int:
    return 2 * matrix.numel()


def _dot(a: Tensor, *_: Any, **__: Any) -> int:
    return 2 * a.numel()


def _add_outer(_bias: Tensor, a: Tensor, b: Tensor, *_: Any, **__: Any) -> int:
    return 2 * a.numel() * b.numel()


def _add_batched(_bias: Tensor, a: Tensor, b: Tensor, *_: Any, **__: Any) -> int:
    return 2 * a.numel() * b.shape[2]


def _grouped(a: Tensor, b: Tensor, *_: Any, **__: Any) -> int:
    """Rows in groups, each with a matrix of its own: every row meets one matrix."""
    return 2 * (a.shape[1] * b.numel() if a.ndim == 3 and b.ndim == 2 else a.numel() * b.shape[-1])


def _trilinear(
    a: Tensor,
    b: Tensor,
    c: Tensor,
    expand_a: Sequence[int],
    expand_b: Sequence[int],
    expand_c: Sequence[int],
    *_: Any,
    **__: Any,
) -> int:
    """One product and one multiply-add at each point of the space that the three are expanded to."""
    shapes: list[list[int]] = []
    for tensor, expand in ((a, expand_a), (b, expand_b), (c, expand_c)):
        shape = list(tensor.shape)
        for dim in sorted(expand):
            shape.insert(dim, 1)
        shapes.append(shape)
    return 3 * prod(torch.broadcast_shapes(*shapes))


FORMULAS: dict[Any, Formula] = {
    **flop_registry,
    _aten.convolution_backward: _convolution_backward,
    _aten._scaled_dot_product_flash_attention_for_cpu: _sdpa,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: _sdpa_backward,
    _aten._flash_attention_forward: _attention_kernel(flop_registry[_aten._flash_attention_forward], 3, 3),
    _aten._flash_attention_backward: _attention_kernel(flop_registry[_aten._flash_attention_backward], 4, 6),
    _aten._efficient_attention_forward: _attention_kernel(flop_registry[_aten._efficient_attention_forward], 3, 4),
    _aten._efficient_attention_backward: _attention_kernel(flop_registry[_aten._efficient_attention_backward], 4, 6),
    _aten.mkldnn_rnn_layer: _mkldnn_rnn,
    _aten.mkldnn_rnn_layer_backward: _twice(_mkldnn_rnn),
    _aten._cudnn_rnn: _cudnn_rnn,
    _aten._cudnn_rnn_backward: _twice(_cudnn_rnn),
    _aten.mv: _matrix_vector,
    _aten.addmv: _add_matrix_vector,
    _aten.dot: _dot,
    _aten.vdot: _dot,
    _aten.addr: _add_outer,
    _aten.addbmm: _add_batched,
    _aten._trilinear: _trilinear,
    **({_aten._grouped_mm: _grouped} if hasattr(_aten, "_grouped_mm") else {}),
}
"""FLOPs of an op from its arguments and ``out_val``, by op packet."""


# --- what costs next to nothing --------------------------------------------------------------------------------------


def _is_light(func: Any) -> bool:
    """Whether an op without a formula does at most a few FLOPs per element of what it reads and writes."""
    if not isinstance(func, torch._ops.OpOverload):  # pyright: ignore[reportPrivateUsage]
        return False
    schema = func._schema  # pyright: ignore[reportPrivateUsage]
    if func.namespace not in ("aten", "prims"):
        return func.namespace in ("c10d", "_c10d_functional", "profiler", "prim", "rngprims")
    if func.is_view or torch.Tag.pointwise in func.tags or not any("Tensor" in str(a.type) for a in schema.arguments):
        return True
    name = schema.name.removeprefix("aten::").strip("_")
    for suffix in ("_data", "_backward", "_forward"):
        name = name.removesuffix(suffix)
    return name in LIGHT or name.startswith(LIGHT_FAMILIES)


LIGHT_FAMILIES = tuple(
    """
    foreach_ fused_ada fused_sgd amp_ new_ empty rand unique
    reflection_pad replication_pad upsample_ max_pool avg_pool adaptive_ fractional_max_pool max_unpool grid_sampler
    index_ scatter masked_ embedding nll_loss batch_norm_ cudnn_batch_norm miopen_batch_norm cudnn_grid_sampler
    """.split()
)
LIGHT = frozenset(
    """
    sum nansum mean var std var_mean std_mean amax amin aminmax max min argmax argmin prod any all norm trace equal
    linalg_vector_norm logsumexp cumsum cumprod cummax cummin cummaxmin_helper logcumsumexp median nanmedian kthvalue
    mode count_nonzero

    softmax log_softmax safe_softmax masked_softmax native_layer_norm native_batch_norm native_batch_norm_legit
    native_batch_norm_legit_no_training native_group_norm fused_rms_norm renorm weight_norm_interface native_dropout
    fused_dropout
    elu softplus hardsigmoid hardswish hardtanh leaky_relu rrelu_with_noise prelu_kernel log_sigmoid glu glu_jvp
    thnn_fused_lstm_cell thnn_fused_lstm_cell_backward_impl thnn_fused_gru_cell
    mse_loss smooth_l1_loss huber_loss binary_cross_entropy multi_margin_loss multilabel_margin_loss soft_margin_loss

    cat stack copy to_copy clone contiguous roll flip repeat repeat_interleave pad constant_pad_nd pixel_shuffle
    pixel_unshuffle channel_shuffle im2col col2im unfold select slice diagonal select_scatter slice_scatter
    diagonal_scatter as_strided_scatter index unsafe_index gather take put tril triu diag_embed nonzero where fill zero
    sort topk searchsorted bucketize bincount histc one_hot local_scalar_dense resize set lift_fresh lift_fresh_copy
    unsafe_split unsafe_split_with_sizes pack_padded_sequence record_stream detach unsafe_view reshape_alias view_copy
    expand_copy permute_copy transpose_copy t_copy squeeze_copy unsqueeze_copy

    bernoulli normal uniform exponential multinomial dirichlet standard_gamma poisson random geometric cauchy log_normal
    full_like zeros_like ones_like empty_like
    """.split()
)
