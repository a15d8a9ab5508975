"""Count the floating-point operations that really run. 1 multiply-add = 2 FLOPs.

The formulas are torch's own (``torch.utils.flop_counter``); here are those that it lacks, counts too high, or changes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache, partial
from math import prod
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils import flop_counter
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry  # pyright: ignore[reportUnknownVariableType]

from rowprop.backprop.autograd.rowgrad import RowGrad
from rowprop.backprop.rules.apply import leaves

# Called after an op: with its name without ``aten``, its FLOPs, the op, its inputs and what it returned. The FLOPs are
# one number for each output of an op that makes several gradients, else one for all; None where no formula is known.
Ran = Callable[[str, tuple[int, ...] | None, Any, Any, Any], None]


@dataclass
class Flops:
    """The FLOPs that a block ran.

    Attributes:
        by_op: FLOPs of each op, by its name (``mm``, ``convolution_backward``).
        uncounted: Ops without a known formula, with the number of calls; **not** in the total. Light ops are not
            listed: of a few FLOPs per element (elementwise, reductions, softmax, norms, pooling, losses, random
            numbers) or of none (views, copies, indexing, sorting).
    """

    by_op: dict[str, int] = field(default_factory=dict[str, int])
    uncounted: dict[str, int] = field(default_factory=dict[str, int])

    @property
    def total_flops(self) -> int:
        """The sum over all counted ops."""
        return sum(self.by_op.values())


@contextmanager
def count_flops() -> Generator[Flops, None, None]:
    """Count the FLOPs of products and convolutions that run inside the block.

    A row-sliced gradient counts at K rows. Fused causal attention counts the pairs of query and key that may meet, and
    all pairs of packed sequences; its backward also the scores that it computes again, five products for the forward's
    two. A bias costs nothing. The :class:`Flops` that it yields is filled while the block runs.

    Cost:
        Python runs at every op, so never time inside the block. A compiled model runs uncompiled there.

    Example:
        >>> import torch
        >>> with count_flops() as flops:
        ...     _ = torch.ones(2, 3) @ torch.ones(3, 5)
        >>> flops.by_op
        {'mm': 60}
    """
    flops = Flops()

    def ran(name: str, counted: tuple[int, ...] | None, *_: Any) -> None:
        if counted is None:
            flops.uncounted[name] = flops.uncounted.get(name, 0) + 1
        elif any(counted):
            flops.by_op[name] = flops.by_op.get(name, 0) + sum(counted)

    with counting(ran):
        yield flops


@contextmanager
def counting(counter: Ran | Counter) -> Generator[None]:
    """Call ``counter`` after every op of the block; compiled models run uncompiled in the block."""
    dynamo: Any = sys.modules.get("torch._dynamo")
    try:
        # Under a mode Dynamo gives up a frame for good. A frame that it is set to skip runs compiled again later.
        uncompiled = nullcontext() if dynamo is None else dynamo.set_stance("force_eager")
    except RuntimeError:  # this very code runs inside a compiled function, after a graph break
        uncompiled = nullcontext()
    with uncompiled, counter if isinstance(counter, Counter) else Counter(counter):
        yield


class Counter(TorchDispatchMode):
    """Calls a function after every op; what :func:`rowprop.find_zeros` slices counts as the plain op."""

    supports_higher_order_operators = True  # an op that takes functions, as flex_attention, comes in one piece

    def __init__(self, ran: Ran | None = None) -> None:
        super().__init__()
        self.ran = ran

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        makers = makers_of(args, kwargs) if RowGrad in types else frozenset[Any]()
        if (RowGrad in types and not makers) or any(kind.__name__ in ("NestedTensor", "DTensor") for kind in types):
            return NotImplemented  # the sliced gradient's rule runs next, and the rule's own ops come back here
        packet = getattr(func, "_overloadpacket", func)
        # The formulas are of dense tensors: a sparse one costs its entries.
        dense = all(arg.layout == torch.strided for arg in args if isinstance(arg, Tensor))
        formula = formula_of(packet) if dense else None
        if formula is None and not makers and _is_composite(func):
            with self:  # under inference mode a composite op arrives in one piece
                return func.decompose(*args, **kwargs)
        with torch._C.DisableTorchFunctionSubclass() if makers else nullcontext():  # pyright: ignore
            out = self.run(func, args, kwargs, makers)
        counted = formula(*args, **kwargs, out_val=out) if formula is not None else 0 if is_light(func) else None
        name = str(packet).removeprefix("aten.")
        with torch._C.DisableTorchFunctionSubclass():  # pyright: ignore
            self.count(makers, name, (counted,) if isinstance(counted, int) else counted, func, (args, kwargs), out)
        return out

    def run(self, func: Any, args: Any, kwargs: dict[str, Any], makers: frozenset[Any]) -> Any:
        """Run the op; ``makers`` made the rows of its gradients, where they are sliced to be measured."""
        return func(*args, **kwargs)

    def count(self, makers: frozenset[Any], *about: Any) -> None:
        """Count the op, ``about`` as :data:`Ran`."""
        if self.ran is not None:
            self.ran(*about)


def makers_of(args: Sequence[Any], kwargs: dict[str, Any]) -> frozenset[Any]:
    """Who made the rows of an op's gradients; empty where anything else slices one of them."""
    sliced = [v.sliced for v in leaves(args, kwargs) if type(v) is RowGrad and v.full is None]
    rows = [s.rows for s in sliced if s is not None]
    known = all(r.makers and r.hook is None for r in rows)
    return frozenset[Any]().union(*(r.makers for r in rows)) if known else frozenset()


@cache
def _is_composite(func: Any) -> bool:
    """Whether the op is made of others; ``prim.device`` is a question to a subclass, not an op with kernels."""
    if not isinstance(func, torch._ops.OpOverload) or func.namespace == "prim":  # pyright: ignore[reportPrivateUsage]
        return False
    return cast(Any, func).has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd)  # pyright: ignore[reportPrivateUsage]


# From the op's arguments, and its result as ``out_val``, to its FLOPs, or those of each output if it makes gradients.
Formula = Callable[..., "int | tuple[int, ...]"]
_aten = torch.ops.aten


def _convolution_backward(grad: Tensor, x: Tensor, w: Tensor, *rest: Any, **_: Any) -> tuple[int, ...]:
    """The input's gradient and the weight's, if they are asked for; each costs as much as the forward.

    Each entry of the weight meets each place of an image once: of the output, or of a transposed one's input.
    """
    transposed, to_input, to_weight = rest[4], *rest[-1][:2]
    once = 2 * x.shape[0] * prod((x if transposed else grad).shape[2:]) * w.numel()
    return to_input * once, to_weight * once, 0


def _attention(op: Any) -> Formula:
    """Fused attention: each pair of a query and a key costs products of their width and of the values' width.

    A causal kernel computes only the pairs that meet, packed sequences all of theirs; queries that share a key's head
    count each. The kernels' own ops take (N, time, heads, width), or packed (all tokens, heads, width); the others
    (N, heads, time, width). An op's schema tells the places of its arguments.
    """
    names = [argument.name for argument in op.default._schema.arguments]
    mask = next(names.index(name) for name in ("is_causal", "custom_mask_type", "causal") if name in names)
    query = names.index("query" if "query" in names else "q")  # keys and values follow
    at_last_key = names[mask] == "causal"
    lengths = [place for place, name in enumerate(names) if name in ("cum_seq_q", "cu_seqlens_q")]
    packs = not op.__name__.startswith("_scaled")
    time, heads = (-3, -2) if packs else (-2, -3)
    backward = op.__name__.endswith("backward")

    def count(*args: Any, **_: Any) -> int:
        q, k, v = args[query : query + 3]
        if packs and lengths and args[lengths[0]] is not None:
            read: Any = cast(Any, flop_counter)._offsets_to_lengths  # the longest for each where they have no values
            in_q, in_k = (read(args[at], args[at + 2]) for at in (lengths[0], lengths[0] + 1))
            pairs = sum(t * s for t, s in zip(in_q, in_k, strict=True))
        else:
            t, s, kind = q.shape[time], k.shape[time], args[mask] if len(args) > mask else 0
            # Query i of a causal kernel sees the keys up to i; the second kind of custom mask ends at the last key, as
            # does that of flash-attn.
            ahead = s - t if at_last_key or (kind is not True and kind == 2) else 0
            pairs = len(q) * (sum(max(0, min(s, i + 1 + ahead)) for i in range(t)) if kind else t * s)
        return q.shape[heads] * pairs * _flops_of_a_pair(q, v, backward=backward)

    return count


def _flops_of_a_pair(q: Tensor, v: Tensor, *, backward: bool) -> int:
    """A query and a key: a product of their width, one of the values'; 3 and 2 in a backward, with the scores anew."""
    of_keys, of_values = (3, 2) if backward else (1, 1)
    return 2 * (of_keys * q.shape[-1] + of_values * v.shape[-1])


def _flex(q: Tensor, k: Tensor, v: Tensor, *_: Any, backward: bool, **__: Any) -> int:
    return prod(q.shape[:3]) * k.shape[2] * _flops_of_a_pair(q, v, backward=backward)


def _recurrent(x: Tensor, weights: Sequence[Tensor], *_: Any, **__: Any) -> int:
    """Every matrix meets every step of every row once; ``weights`` holds matrices and biases."""
    return 2 * prod(x.shape[:-1]) * sum(w.numel() for w in weights if w.ndim == 2)


def _mkldnn_rnn(x: Tensor, w0: Tensor, w1: Tensor, *_: Any, **__: Any) -> int:
    return _recurrent(x, (w0, w1))


def _mkldnn_rnn_backward(x: Tensor, w0: Tensor, w1: Tensor, *_: Any, **__: Any) -> tuple[int, ...]:
    """The gradients of the inputs and states, of the input's weights, of the state's weights."""
    return _recurrent(x, (w0, w1)), _recurrent(x, (w0,)), _recurrent(x, (w1,)), 0, 0, 0, 0


def _cudnn_rnn_backward(x: Tensor, weights: Sequence[Tensor], *_: Any, **__: Any) -> tuple[int, ...]:
    once = _recurrent(x, weights)
    return once, 0, 0, once


def _grouped(a: Tensor, b: Tensor, *_: Any, **__: Any) -> int:
    """Rows in groups, each group with a matrix of its own: every row meets one matrix."""
    return 2 * (a.shape[1] * b.numel() if a.ndim == 3 and b.ndim == 2 else a.numel() * b.shape[-1])


def _trilinear(a: Tensor, b: Tensor, c: Tensor, *rest: Any, **_: Any) -> int:
    """One product and one multiply-add at each point of the space that the three are expanded to."""
    shapes: list[list[int]] = []
    for tensor, expand in zip((a, b, c), rest[:3], strict=True):
        shape = list(tensor.shape)
        for dim in sorted(expand):
            shape.insert(dim, 1)
        shapes.append(shape)
    return 3 * prod(torch.broadcast_shapes(*shapes))


def _product(*args: Any, place: int = 0, columns: bool = False, **_: Any) -> int:
    """Each entry of the operand at ``place`` meets one entry of the next operand, or all ``columns`` of it."""
    return 2 * args[place].numel() * (args[place + 1].shape[-1] if columns else 1)


def _fused_head(x: Tensor, head: Tensor, *rest: Any, **_: Any) -> int:
    """The logits; where the losses are reduced, the forward makes the gradients that are asked for, too."""
    return 2 * x.numel() * len(head) * (1 + sum(rest[10:12]))


_ATTENTION = [
    *(getattr(_aten, f"_scaled_dot_product_{kind}_attention{part}")
      for kind in ("flash", "efficient", "cudnn") for part in ("", "_backward")),
    *(getattr(_aten, f"_{kind}_attention_{part}")
      for kind in ("flash", "efficient") for part in ("forward", "backward")),
    _aten._scaled_dot_product_flash_attention_for_cpu,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward,
]  # fmt: skip

# By op packet.
FORMULAS: dict[Any, Formula] = {
    **flop_registry,
    _aten.convolution_backward: _convolution_backward,
    **{op: _attention(op) for op in _ATTENTION},
    _aten.mkldnn_rnn_layer: _mkldnn_rnn,
    _aten.mkldnn_rnn_layer_backward: _mkldnn_rnn_backward,
    _aten._cudnn_rnn: _recurrent,
    _aten._cudnn_rnn_backward: _cudnn_rnn_backward,
    _aten.addmm_: flop_registry[_aten.addmm],
    _aten.baddbmm_: flop_registry[_aten.baddbmm],
    **dict.fromkeys((_aten.mv, _aten.dot, _aten.vdot), _product),
    _aten.addmv: partial(_product, place=1),
    **dict.fromkeys((_aten.addr, _aten.addbmm), partial(_product, place=1, columns=True)),
    _aten._trilinear: _trilinear,
    _aten._grouped_mm: _grouped,
    torch.ops.higher_order.flex_attention: partial(_flex, backward=False),
    torch.ops.higher_order.flex_attention_backward: partial(_flex, backward=True),
}

# For ops that exist once torch has imported their module; their backward runs other ops.
_IMPORTED = {f"_linear_cross_entropy_batch_chunked{reduced}": _fused_head for reduced in ("", "_no_reduction")}


# The ops of flash-attn, which the package ``kernels`` loads under namespaces that it makes up.
_FLASH = {f"_flash_attn_{part}" for part in ("forward", "backward", "varlen_forward", "varlen_backward")}


def formula_of(packet: Any) -> Formula | None:
    """The formula of an op; None if there is none. Modules of torch add theirs when they are imported."""
    found = FORMULAS.get(packet) or flop_registry.get(packet) or _IMPORTED.get(packet.__name__)
    return _of_flash(packet) if found is None and packet.__name__ in _FLASH else found


@cache
def _of_flash(packet: Any) -> Formula | None:
    """The formula of an op of this name, if it is called as flash-attn 2's."""
    names = [argument.name for argument in packet.default._schema.arguments]
    return _attention(packet) if {"q", "k", "v", "causal", "softcap"}.issubset(names) else None


@cache
def is_light(func: Any) -> bool:
    """Whether an op without a formula runs at most a few FLOPs per element that it reads or writes."""
    if not isinstance(func, torch._ops.OpOverload):  # pyright: ignore[reportPrivateUsage]
        return False
    if func.namespace not in ("aten", "prims"):
        return func.namespace in ("c10d", "_c10d_functional", "profiler", "prim", "rngprims")
    if is_view_or_maker(func) or not LIGHT_TAGS.isdisjoint(func.tags):
        return True
    name = str(cast(Any, func)._schema.name).partition("::")[2].strip("_")
    for suffix in ("_data", "_backward", "_forward"):
        name = name.removesuffix(suffix)
    return name in LIGHT or name.startswith(LIGHT_FAMILIES)


def is_view_or_maker(func: Any) -> bool:
    """Whether the op shows a tensor differently, or reads no tensor."""
    return is_view(func) or not any("Tensor" in str(a.type) for a in func._schema.arguments)


def is_view(func: Any) -> bool:
    """Whether the op shows a tensor differently, as a new tensor or in place."""
    return getattr(func, "is_view", False) or torch.Tag.inplace_view in getattr(func, "tags", ())


LIGHT_TAGS = {torch.Tag.pointwise, torch.Tag.reduction, torch.Tag.view_copy}
# Ops by name, without the underscores around it and without ``_data``, ``_backward`` and ``_forward`` at its end.
LIGHT = frozenset(
    """
    aminmax as_strided_scatter bernoulli binary_cross_entropy bincount bucketize cat cauchy channel_shuffle clone col2im
    constant_pad_nd copy count_nonzero diag_embed diagonal elu exponential fill flip floor_divide full_like
    fused_dropout fused_rms_norm gather gelu geometric glu glu_jvp hardsigmoid hardswish hardtanh histc huber_loss
    im2col index kthvalue leaky_relu local_scalar_dense logcumsumexp median mode mse_loss multi_margin_loss
    multilabel_margin_loss multinomial nonzero norm normal one_hot ones_like pack_padded_sequence poisson prelu_kernel
    prod put record_stream renorm resize roll rrelu_with_noise safe_softmax searchsorted set smooth_l1_loss sort stack
    standard_gamma sum take to_copy topk trace tril triu unfold uniform weight_norm_interface where zero zeros_like
    """.split()
)
# The same, by the beginnings of their names.
LIGHT_FAMILIES = tuple(
    """
    amp_ foreach_ fused_ada fused_sgd new_ empty rand unique reflection_pad replication_pad upsample_ max_pool avg_pool
    adaptive_ fractional_max_pool max_unpool grid_sampler index_ scatter masked_ embedding nll_loss batch_norm_
    cudnn_batch_norm cudnn_grid_sampler cum log_ nan native_batch_norm native_dropout native_group_norm
    native_layer_norm pad pixel_ repeat select slice diagonal_ soft std_ var_ thnn_fused_ unsafe_
    """.split()
)
