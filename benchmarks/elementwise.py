"""FLOPs of the ops that a count leaves out: norms, activations, losses, updates, of a few FLOPs per element.

One FLOP is an addition, a multiplication, a division, a comparison that decides a value (maximum, clamp, ReLU) or an
elementary function (exp, sqrt, tanh, sigmoid, ...) of one element. Copies, casts, indexing, masks, random numbers and
sorting cost none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from math import prod
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rowprop.backprop.autograd.rowgrad import RowGrad
from rowprop.cost.flops import formula_of, is_light, is_view_or_maker


class Elementwise(TorchDispatchMode):
    """Counts the FLOPs of the light ops in its block.

    Attributes:
        by_op: FLOPs by direction, ``"forward"`` or ``"backward"``, and op.
        uncounted: Light ops that the tables do not list, with the number of calls.
    """

    def __init__(self) -> None:
        super().__init__()
        self.by_op: dict[str, Counter[str]] = {"forward": Counter(), "backward": Counter()}
        self.uncounted = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None) -> Any:
        """Run the op and count it."""
        if RowGrad in types:
            return NotImplemented
        out = func(*args, **(kwargs or {}))
        if formula_of(func._overloadpacket) is None and is_light(func):
            flops = elementwise_flops(func, args, kwargs or {}, out)
            name = str(func._overloadpacket).removeprefix("aten.")
            backward = cast(Any, torch)._C._current_autograd_node() is not None
            if flops is None:
                self.uncounted[name] += 1
            elif flops:
                self.by_op["backward" if backward else "forward"][name] += flops
        return out

    def total_flops(self, *directions: str) -> int:
        """Of these directions; of none named, of both."""
        return sum(self.by_op[direction].total() for direction in directions or self.by_op)


def elementwise_flops(func: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> int | None:
    """FLOPs of a light op by the tables below; None for an op that they do not list.

    Args:
        func: The op; :func:`is_light` holds for it.
        args: Its arguments.
        kwargs: Its arguments by name.
        out: Its result.
    """
    if func.namespace not in ("aten", "prims") or is_view_or_maker(func):
        return 0
    name = _name(func)
    per_list = name.startswith("foreach_")
    name = name.removeprefix("foreach_")
    size = _numel(args[:1] if per_list and out is None else [out])
    if name in ("add", "sub", "rsub"):
        return size * (1 + (kwargs.get("alpha", 1) != 1)) if _computes(out, args) else 0
    if name in ("addcmul", "addcdiv"):
        value = args[3] if len(args) > 3 else kwargs.get("value", 1)
        return size * (2 + (value != 1))
    if name in ("max_pool2d_with_indices", "max_pool3d_with_indices", "avg_pool2d", "avg_pool3d"):
        kernel = cast("Sequence[int]", args[1])
        dims = 2 if "2d" in name else 3
        return _numel(tree_leaves(out)[:1]) * (prod(kernel) if len(kernel) == dims else kernel[0] ** dims)
    if name == "mse_loss":
        return (2 if len(args) > 2 and args[2] == 0 else 3) * _numel(args[:1])
    if name in ("index_add", "scatter_add"):
        return _numel(args[3:4])
    if name in ("index_put", "index_put_impl", "unsafe_index_put"):
        return _numel(args[2:3]) if len(args) > 3 and args[3] else 0
    if name == "native_batch_norm" and not args[5]:
        name = "native_batch_norm_legit_no_training"
    if name in PER_INPUT:
        return PER_INPUT[name] * _numel(tree_leaves(args[0])[:1])
    if name in PER_OUTPUT:
        return PER_OUTPUT[name] * (size if per_list else _numel(tree_leaves(out)[:1]))
    if name in FREE or name.startswith(FREE_FAMILIES):
        return 0
    if torch.Tag.pointwise in func.tags or per_list:
        return size if _computes(out, args) else 0
    return None


def _name(func: Any) -> str:
    return str(func._schema.name).partition("::")[2].strip("_")


def _numel(values: Iterable[Any]) -> int:
    return sum(t.numel() for t in tree_leaves(list(values)) if isinstance(t, Tensor))


def _computes(out: Any, args: Sequence[Any]) -> bool:
    """Whether an op computes real numbers; a comparison makes none, and arithmetic of indices makes none."""
    found = [t for t in tree_leaves(out if out is not None else args[0]) if isinstance(t, Tensor)]
    return any(t.is_floating_point() or t.is_complex() for t in found)


def _table(text: str) -> dict[str, int]:
    return {name: int(flops) for flops, _, names in (line.strip().partition(": ") for line in text.strip().splitlines())
            for name in names.split()}  # fmt: skip


PER_OUTPUT = _table(
    """
    1: floor_divide
    2: silu hardswish log_sigmoid_forward native_dropout native_dropout_backward
    3: lerp tanh_backward sigmoid_backward elu softplus mse_loss_backward glu
    4: elu_backward softplus_backward hardswish_backward log_sigmoid_backward
    5: gelu upsample_linear1d
    6: silu_backward
    7: upsample_bilinear2d
    11: gelu_backward
    """
)
"""FLOPs per element of the first result; a pointwise op that is not listed has 1."""
PER_INPUT = _table(
    """
    1: sum nansum mean prod cumsum cumprod amax amin max min aminmax cummax cummin argmax argmin
    1: nll_loss_backward nll_loss2d_backward embedding_dense_backward adaptive_avg_pool2d adaptive_avg_pool3d
    1: adaptive_avg_pool2d_backward adaptive_avg_pool3d_backward max_pool2d_with_indices_backward
    1: max_pool3d_with_indices_backward upsample_nearest1d_backward upsample_nearest2d_backward
    2: linalg_vector_norm norm
    4: var std var_mean std_mean logsumexp softmax_backward_data log_softmax_backward_data fused_rms_norm
    5: softmax log_softmax safe_softmax
    8: native_layer_norm native_group_norm native_batch_norm native_batch_norm_legit cudnn_batch_norm
    8: upsample_bilinear2d_backward
    4: native_batch_norm_legit_no_training
    13: native_layer_norm_backward native_group_norm_backward native_batch_norm_backward cudnn_batch_norm_backward
    """
)
"""FLOPs per element of the first argument. A norm: mean 1, variance 3, centre and scale 2, affine 2. Its backward:
x-hat 2, the gradients of weight and bias 3, the gradient of x-hat 1, its two sums 3, the gradient of the input 4."""
FREE_FAMILIES = ("new_", "empty", "rand", "reflection_pad", "replication_pad", "upsample_nearest", "unique")
FREE = frozenset(
    """
    any all equal count_nonzero nll_loss_forward nll_loss2d_forward embedding where masked_fill masked_select
    cat stack copy to_copy clone contiguous roll flip repeat repeat_interleave pad constant_pad_nd pixel_shuffle
    pixel_unshuffle channel_shuffle unfold select slice diagonal select_scatter slice_scatter select_backward
    slice_backward diagonal_scatter as_strided_scatter index unsafe_index gather index_select take put tril triu
    diag_embed nonzero where fill zero sort topk searchsorted bucketize bincount histc one_hot local_scalar_dense resize
    set lift_fresh lift_fresh_copy unsafe_split unsafe_split_with_sizes pack_padded_sequence record_stream detach
    unsafe_view reshape_alias view_copy expand_copy permute_copy transpose_copy t_copy squeeze_copy unsqueeze_copy
    bernoulli normal uniform exponential multinomial dirichlet standard_gamma poisson random geometric cauchy log_normal
    full_like zeros_like ones_like empty_like
    """.split()
)
