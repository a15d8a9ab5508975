"""The table of cases of the rules: small functions of a batch, and ops called on a gradient by hand.

Tables are text, ``(shape) name: expression; name: expression``: a shape holds until the next, an entry ends with its
line. Expressions are of ``x`` or of the gradient ``g``, and of this module's names.
"""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from rowprop.backprop.autograd.rowgrad import RowGrad
from rowprop.backprop.rows.layout import Layout
from rowprop.backprop.rows.rows import RowSet
from rowprop.backprop.rows.slice import RowSlice

aten = torch.ops.aten
N = 6
Function = Callable[[Tensor], Tensor]


class Case(NamedTuple):
    """``f`` maps x of ``shape`` (N, ...) to anything of N rows; ``params`` are the leaves that it uses."""

    shape: tuple[int, ...]
    f: Function
    params: tuple[Tensor, ...]


CASES: dict[str, Case] = {}

torch.manual_seed(0)


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def param(*shape: int) -> Tensor:
    return nn.Parameter(randn(*shape))


def ints(high: int, *shape: int) -> Tensor:
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(high))


def aux(*shape: int) -> Tensor:
    """Some full-size operand, the same at every call."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def case(name: str, shape: tuple[int, ...], f: Function, params: tuple[Tensor, ...] = ()) -> None:
    assert name not in CASES
    CASES[name] = Case(shape, f, params)


def entries(table: str) -> Iterator[tuple[tuple[int, ...], str]]:
    shape: tuple[int, ...] = ()
    for line in table.strip().splitlines():
        of_shape, listed = re.fullmatch(r"(\(.*?\) )?(.*)", line).groups()
        shape = eval(of_shape, globals()) if of_shape else shape
        yield from ((shape, entry.strip()) for entry in listed.split("; "))


def cases(table: str) -> None:
    for shape, entry in entries(table):
        name, expression = entry.split(": ", 1)
        used = {node.id: globals().get(node.id) for node in ast.walk(ast.parse(expression)) if type(node) is ast.Name}
        params = tuple(value for value in used.values() if isinstance(value, nn.Parameter))
        case(name, shape, eval(f"lambda x: {expression}", globals()), params)


# What the expressions use.
idx, perm = torch.randint(0, 4, (N, 3)), torch.randperm(N)
w43, lw, lb, l2, pw, emb = param(4, 3), param(4), param(4), param(3, 4), param(3), param(7, 4)
zeros4, ones4, every_row = torch.zeros(4).double(), torch.ones(4).double(), torch.arange(N)
square, noise = randn(N, N), randn(N, 5)
tgt, tgt2, ids = torch.randint(0, 5, (N,)), torch.randint(0, 4, (N, 3, 3)), torch.randint(0, 7, (N, 3))
mlt, fifths, three = torch.tensor([[0, 2, -1, 0, 0]] * N), torch.full((N, 5), 0.2).double(), torch.tensor([0, 2, 2])
each = torch.stack([perm, perm.flip(0), perm, perm.roll(1)], 1)
whole_rows = perm[:, None].expand(N, 4)
twice_read, columns = torch.tensor([0, 2, 3, 1, 2, 5]), torch.tensor([0, 1, 2, 0, 2, 1])
spots, row_spots = torch.rand(N, 4) > 0.5, torch.tensor([True, False, True, True])
spots[1], spots[4, :2] = row_spots, True


def turned(f: Function, x: Tensor) -> Tensor:
    """A function of (time, N, ...), with the batch in front before and after."""
    return f(x.transpose(0, 1)).transpose(0, 1)


def leaky(x: Tensor) -> Tensor:
    """A layer whose result, a view of lines (N * time, ...), is written to at single entries."""
    x = F.linear(x, w43[:3], w43[3])
    x[x < 0] *= 0.1
    return x


for d, groups in product((1, 2, 3), (1, 2)):
    weight, bias, back = param(4, 4 // groups, *[3] * d), param(4), param(4, 2, *[3] * d)
    conv = partial(getattr(F, f"conv{d}d"), weight=weight, bias=bias, padding=2, dilation=2, groups=groups)
    case(f"conv{d}d_g{groups}", (N, 4) + (7,) * d, conv, (weight, bias))
    transposed = partial(getattr(F, f"conv_transpose{d}d"), weight=back, stride=2, groups=groups)
    case(f"convT{d}d_g{groups}", (N, 4) + (5,) * d, transposed, (back,))
for name in """relu gelu silu mish elu selu celu leaky_relu hardtanh relu6 hardsigmoid hardswish softplus softsign
tanhshrink hardshrink softshrink logsigmoid sigmoid tanh""".split():
    cases(f"(N, 5) {name}: F.{name}(x)")
for name in """exp log1p sin cos abs sqrt rsqrt square reciprocal erf atan tan sinh expm1 lgamma digamma sigmoid logit
frac round sign trunc""".split():
    cases(f"(N, 5) t_{name}: torch.{name}(x.abs() * 0.3 + 0.2)")
# Steps, whose gradient is zero by the formula: zeros like the gradient for some, like the input for others. Red when
# zeros forget where their rows lie, or zeros like the input stay plain.
for name, step in {
    **{name: f"y.{name}()" for name in "sign sgn round floor ceil trunc angle exponential_ normal_".split()},
    **{f"{name}_": f"y.{name}_(y.detach() * 0.9)" for name in "eq ne ge gt le lt".split()},
    "decimals": "y.round(decimals=1)",
    "floor_divide": 'torch.div(y, y + 3, rounding_mode="floor")',
    "fill": "y.fill_(2.0)",
    "bernoulli": "torch.bernoulli(y.sigmoid())",
    "bernoulli_": "y.bernoulli_(y.sigmoid())",
    "poisson": "torch.poisson(y.abs())",
    "normal": "torch.normal(y, y.abs())",
    "copysign": "torch.copysign(y, 1 - y)",
    **({"nextafter": "torch.nextafter(y, y.exp())"} if torch.__version__ >= (2, 13) else {}),  # 2.11 has no derivative
    "gated": "y.sign() * y.floor() + y.trunc()",
    "scaled": "torch.where(y > 0, 3 * y.round(), 0)",
    "read": "y.round().gather(1, idx)",
    "joined": "torch.cat([y.round(), torch.stack([y[:, :4], y[:, 1:]], 1).floor().flatten(1)], 1)",
    "parts": "torch.cat([part.round() for part in torch.cat([y, y], 1).chunk(3, 1)[::2]], 1)",
    "time_first": "turned(lambda z: z.round(), y.view(N, 5, 1)).sum(2)",
}.items():
    cases(f"(N, 5) step_{name}: (lambda y: x[:, :3] * ({step}).sum(1, keepdim=True))(x.roll(1, 1) * 2)")


def rotations(x: Tensor) -> Tensor:
    """The rotation nearest to each matrix, as the Kabsch algorithm finds it: by the sign of a determinant."""
    u, _, v = torch.linalg.svd(x)
    sign = torch.det(u @ v).sign().view(-1, 1, 1)
    return torch.cat([u[..., :2], u[..., 2:] * sign], -1) @ v


case("rotations", (N, 3, 3), rotations)
bl = nn.Bilinear(4, 4, 3).double()
case("bilinear", (N, 4), lambda x: bl(x, x * 2), tuple(bl.parameters()))
cases("""
(N, 4) linear: F.linear(x, w43.t()); dropout: F.dropout(x, 0.5); normalize: F.normalize(x)
(N, 5, 4) linear3: F.linear(x, w43.t()); lin_seqfirst: turned(lambda x: F.linear(x, w43.t()), x)
(N, 3, 4) prelu: F.prelu(x, pw); ln: F.layer_norm(x, (4,), lw, lb); ln2: F.layer_norm(x, (3, 4), l2)
    ln_sf: turned(lambda x: F.layer_norm(x, (4,), lw, lb), x); rms: F.rms_norm(x, (4,), lw)
    bn_train_rows_last: F.batch_norm(x.permute(2, 1, 0), None, None, training=True).permute(2, 1, 0)
(N, 6) glu: F.glu(x, 1)
(N, 4, 5) gn: F.group_norm(x, 2, lw, lb); in: F.instance_norm(x, weight=lw, bias=lb); lrn: F.local_response_norm(x, 2)
    in_eval: F.instance_norm(x, zeros4, ones4, lw, lb, use_input_stats=False)
    bn_eval: F.batch_norm(x, zeros4, ones4 * 2, lw, lb); bn_train: F.batch_norm(x, None, None, lw, lb, training=True)
    bn_any: aten._batch_norm_with_update(x, lw, lb, randn(4), randn(4), 0.1, 1e-5)[0]
    bn_any_eval: aten._batch_norm_no_update(x, lw, lb, zeros4, ones4 * 2, 0.1, 1e-5)[0]
    bn_on_batch_as_channel: turned(lambda x: F.batch_norm(x, None, None, training=True), x)
(N, 4, 3, 3) gn2d: F.group_norm(x, 2, lw, lb); gn2d_expanded: F.group_norm(x, 2, lw, lb).mean((2, 3))
    gn2d_over_batch_channels_last: turned(lambda x: F.group_norm(x.contiguous(memory_format=torch.channels_last), 2), x)
(N, 3) ln_over_batch: F.layer_norm(x.t(), (N,)).t(); rms_over_batch: F.rms_norm(x.t(), (N,)).t()
(N, 5) softmax: x.softmax(1); lsm: x.log_softmax(-1); softmax_batch: x.softmax(0)
(N, 5, 3) softmax_sf: turned(lambda x: x.softmax(0), x)
(N, 5) ce: F.cross_entropy(x, tgt, reduction="none"); ce_prob: F.cross_entropy(x, fifths, reduction="none")
    bce: F.binary_cross_entropy(x.sigmoid(), fifths, reduction="none")
    bcel: F.binary_cross_entropy_with_logits(x, fifths, pos_weight=fifths[0] * 10, reduction="none")
    kl: F.kl_div(x.log_softmax(1), fifths, reduction="none")
    mm: F.multi_margin_loss(x, tgt, reduction="none"); mlm: F.multilabel_margin_loss(x, mlt, reduction="none")
    mlsm: F.multilabel_soft_margin_loss(x, torch.ones(N, 5).double(), reduction="none")
    gnll: F.gaussian_nll_loss(x, fifths * 0, x.exp(), reduction="none")
    triplet: F.triplet_margin_loss(x, x * 2 + 1, x.flip(1), reduction="none")
    cosemb: F.cosine_embedding_loss(x, x.flip(1) + 1, torch.ones(N), reduction="none")
    cossim: F.cosine_similarity(x, x.flip(1) + 1); pairdist: F.pairwise_distance(x, x.flip(1))
(N, 4, 3, 3) ce2d: F.cross_entropy(x, tgt2, reduction="none")
(N, 3, 5) ce_tok: F.cross_entropy(x.flatten(0, 1), tgt2[:, :, 0].flatten(), reduction="none").view(N, 3)
    ce_tok_t: F.cross_entropy(x.transpose(1, 2), tgt2[:, :, 0], reduction="none")
""")
for name in "mse_loss smooth_l1_loss huber_loss l1_loss soft_margin_loss poisson_nll_loss".split():
    cases(f'(N, 5) {name}: F.{name}(x, {"noise.sign()" if "soft" in name else "noise"}, reduction="none")')


def ce_with_weights(x: Tensor) -> Tensor:
    some = torch.where(tgt == 1, -100, tgt)
    return F.cross_entropy(x, some, weight=torch.full((5,), 2.0).double(), reduction="none", label_smoothing=0.1)


def bn_of_mixed_memory(x: Tensor) -> Tensor:
    """The gradient has another order of memory, and a single row."""
    out = F.batch_norm(x, lw.detach(), lw.detach().abs(), lw, lb).permute(2, 0, 3, 1)
    return out.flatten(2).tanh().mT.mT.transpose(0, 1)


def ctc(x: Tensor, targets: Tensor, steps: Tensor, lengths: Tensor) -> Tensor:
    return F.ctc_loss(x.transpose(0, 1).log_softmax(2), targets, steps, lengths, reduction="none")


case("ce_w_ign", (N, 5), ce_with_weights)
case("bn_eval_mixed", (N, 4, 5, 5), bn_of_mixed_memory, (lw, lb))
cases("""
(N, 7, 5) ctc: ctc(x, torch.ones(N, 2).long(), torch.full((N,), 7), torch.full((N,), 2))
    ctc_joined: ctc(x, torch.arange(int((every_row % 3).sum())) % 4 + 1, (every_row + 2).clamp(max=7), every_row % 3)
""")


def first_output(layer: nn.Module, x: Tensor) -> Tensor:
    """The output of attention or a recurrent layer; attention makes its weights, too, where the time is in front."""
    return layer(x, *((x, x, None, not layer.batch_first) if isinstance(layer, nn.MultiheadAttention) else ()))[0]


for kind, batch_first in product(("LSTM", "GRU", "RNN", "mha"), (True, False)):
    if kind == "mha":
        layer = nn.MultiheadAttention(4, 2, batch_first=batch_first).double()
    else:
        layer = getattr(nn, kind)(4, 3, batch_first=batch_first, bidirectional=True).double()
    f = partial(first_output, layer)
    case(f"{kind}{batch_first}", (N, 3, 4), f if batch_first else partial(turned, f), tuple(layer.parameters()))


def heads(x: Tensor) -> Tensor:
    return x.unflatten(2, (2, 3)).transpose(1, 2)


def attended(*qkv: Tensor, **options: object) -> Tensor:
    return F.scaled_dot_product_attention(*qkv, **options).transpose(1, 2).flatten(2)


SHAPES = {"mTT": (4, 4), "m1": (1, 1, 4, 4), "mN": (N, 1, 4, 4), "mNH": (N, 2, 4, 4), "mH": (2, 4, 4)}
lower = torch.ones(4, 4).tril().bool()
MASKS = {name: randn(*shape) for name, shape in SHAPES.items()} | {"mb": lower, "mbN": lower.repeat(N, 1, 1, 1)}
options = {name: f'attn_mask=MASKS["{name}"]' for name in MASKS} | {"plain": "", "causal": "is_causal=True"}
for name, given in options.items():
    cases(f"(N, 4, 6) sdpa_{name}: attended(heads(x), heads(x * 2), heads(x + 1), {given})")
# sdpa_expanded: keys repeated as in Llama share memory, and the kernel assumes a stride of 1 for the width.
cases("""
(N, N, 6) sdpa_T=N: attended(*[heads(x)] * 3, attn_mask=square)
(N, 4, 6) sdpa_3d: F.scaled_dot_product_attention(x, x, x)
    sdpa_gqa: F.scaled_dot_product_attention(heads(x), *[heads(x)[:, :1]] * 2, enable_gqa=True)
    sdpa_expanded: F.scaled_dot_product_attention(heads(x), *[heads(x)[:, :1].expand(-1, 2, -1, -1)] * 2)
(N, 3, 4, 4) avgpool_global: F.adaptive_avg_pool2d(x, 1); lp: F.lp_pool2d(x, 2, 2)
(N, 3, 8) pool_on_seqfirst: turned(lambda x: F.max_pool1d(x, 2), x)
(N, 8, 8) pool_unbatched: F.max_pool2d(x, 2); avgpool_unbatched: F.avg_pool2d(x, 2)
(N, 3) max_pool_over_batch: F.max_pool1d(x.t()[None], 3, 1, 1)[0].t(); padval: F.pad(x, (1, 1), value=3.0)
    avg_pool_over_batch: F.avg_pool1d(x.t()[None], 3, 1, 1)[0].t()
    upsample_batch: F.interpolate(x.t()[None], size=N, mode="linear")[0].t()
(N, 3, 4) avg_pool_over_lines: turned(lambda x: F.avg_pool2d(x[None], (3, 1), 1, (1, 0))[0], x)
(N, 4) conv_over_batch: F.conv1d(x.t()[None], torch.ones(4, 4, 3).double(), padding=1)[0].t()
(N, 5) padneg: F.pad(x, (-1, -1))
(N, 3, 4) up_lin: F.interpolate(x, scale_factor=2, mode="linear")
(N, 3, 4, 4, 4) up_tri: F.interpolate(x, size=6, mode="trilinear")
(N, 3, 6, 6) up_aa: F.interpolate(x, size=3, mode="bilinear", antialias=True)
(N, 2, 4, 4) grid: F.grid_sample(x, x[:, :, :, :2].permute(0, 2, 3, 1).tanh(), align_corners=False)
    maxunpool: F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), 2); pixun: F.pixel_unshuffle(x, 2)
(N, 6) affine: F.affine_grid(x.view(N, 2, 3), (N, 1, 3, 3), align_corners=False)
(N, 2, 5, 5) im2col: F.unfold(x, 3)
(N, 8, 4) fold: F.fold(x, (3, 3), 2)
(N, 8, 2, 2) pixsh: F.pixel_shuffle(x, 2)
(N, 4, 2, 2) chsh: F.channel_shuffle(x, 2)
""")
for d, kind in product((1, 2, 3), ("max_pool", "avg_pool", "adaptive_avg_pool", "adaptive_max_pool")):
    cases(f"(N, 3{', 6' * d}) {kind}{d}d: F.{kind}{d}d(x, 2)")
for mode in ("constant", "reflect", "replicate", "circular"):
    cases(f'(N, 3, 6) pad1{mode}: F.pad(x, (1, 2), "{mode}")')
    cases(f'(N, 3, 6, 6) pad2{mode}: F.pad(x, (1, 2, 0, 1), "{mode}")')
for mode in ("nearest", "bilinear", "bicubic", "nearest-exact", "area"):
    cases(f'(N, 3, 4, 4) up_{mode}: F.interpolate(x, scale_factor=2, mode="{mode}")')
if hasattr(aten, "_upsample_lanczos2d_aa"):
    cases('(N, 3, 6, 6) up_lanczos: F.interpolate(x, size=3, mode="lanczos", antialias=True)')


cases("""
(N, 1) emb: F.embedding(ids, emb).sum((1, 2)).unsqueeze(1) * x
    emb_sf: F.embedding(ids.t(), emb).sum((0, 2)).unsqueeze(1) * x
    emb_freq: F.embedding(ids, emb, scale_grad_by_freq=True).sum((1, 2)).unsqueeze(1) * x
    emb_computed: F.embedding(ids, emb.tanh(), padding_idx=ids[1, 0]).sum((1, 2)).unsqueeze(1) * x
(N, 3) emb_of_rows: F.embedding(perm, x).exp()
(N, 4) emb_width: F.embedding(ints(4, 5), x.t()).t()
(N, 4) gather: x.gather(1, idx); gather_partial: torch.cat([x.gather(1, idx[:3]), x[3:, :3]])
    gather_rows: x.gather(0, whole_rows); gather_each: x.gather(0, each)
    gather_some_rows: x.gather(0, whole_rows[:3]).repeat(2, 1)
    gather_repeated_rows: x.gather(0, perm[:, None].repeat(1, 4))
    scatter_partial: torch.zeros(N, 4).double().scatter(1, torch.arange(3).expand(3, 3), x[:3, :3].exp()) * 2 + x
    scatter_rows: (x * 2).scatter_add(0, whole_rows, x.exp()); index_select0: x.index_select(0, perm)
    index_select1: x.index_select(1, torch.tensor([0, 2, 2])); idx_perm: x[perm]
    idx_rep: torch.cat([x[[0, 0, 1]], x[[3, 3, 3]]])
    idx_negative_rows: torch.stack([x[every_row - N][:, :2], x[perm - N][:, 2:]], 1)
    mask_columns: x[:, row_spots]; mask_rows: torch.cat([x[every_row < 4], x[every_row >= 4]])
    index_put: (x * 1).index_put((every_row, idx[:, 0]), x[:, 0]); index_add: (x * 1).index_add(0, perm, x)
    index_add_one: (x * 1).index_add(0, torch.tensor([4]), w43[:, 0].exp().unsqueeze(0))
    index_copy: (x * 2).index_copy(1, torch.tensor([0, 2]), x[:, :2].exp())
    index_copy_rows: (x * 2).index_copy(0, perm, x.exp())
    index_fill_rows: (x * 2).index_fill(0, torch.tensor([0, -2]), 3.0)
    take: torch.take(x, torch.arange(4 * N).view(N, 4).flip(1))
    put: (x * 2).put(torch.arange(4 * N).view(N, 4).flip(1)[:, :2], x[:, :2])
    select_scatter_row: (x * 2).select_scatter(x[0].exp(), 0, 4)
(N, 3) scatter: torch.zeros(N, 4).double().scatter(1, torch.stack([torch.arange(3)] * N), x)
    scatter_add: torch.zeros(N, 4).double().scatter_add(1, idx, x)
    rows_read_twice_over_moved_rows: torch.zeros(N, 3).double().index_add(0, perm, x)[twice_read, columns]
    idx_more_than_rows: x[every_row.repeat_interleave(2), idx[:, :2].flatten() % 3].view(N, 2)
(N, 2) take_most: torch.take(x, torch.arange(24).view(N, 4) % 12)
(N, 4, 3) idx_arange: x[every_row, idx[:, 0]]; idx_negative: x[every_row - N, idx[:, 0]]
    take_along: torch.take_along_dim(x, idx[:, :, None] % 4, 1)
    select_scatter: (x * 2).select_scatter(x[:, 0].exp(), 1, 2)
    slice_scatter: (x * 2).slice_scatter(x[:, :2].exp(), 1, 1, 3)
(N, 4, 4) diagonal_scatter: (x * 2).diagonal_scatter(x[:, 0].exp(), 0, 1, 2)
(N, 4, 5) idx_cols: x[:, [0, 2], :][:, :, [1, 1]]; idx_cols2: x[:, [0, 2], [1, 3]]
(N, 4, 5, 3) idx_apart: x[:, [0, 2], :, [1, 2]].transpose(0, 1)
(N, 5, 5, 2) idx_2d: x[:, torch.tensor([[0, 1], [2, 3]]), torch.tensor([[1, 1], [0, 0]])]
(N, 5, 3) idx_per_row: x[every_row[:, None], idx]; idx_per_row_time_first: x.transpose(0, 1)[idx, every_row[:, None]]
    idx_per_row_set: (x * 2).index_put((every_row[:, None], idx), x[:, :3].exp())
(N, 4) mask_fill: x.masked_fill(x > 0, 3.0); where: torch.where(x > 0, x, x * 2)
    where2: torch.where(x > 0, x, torch.zeros(())); masked_select: x * torch.masked_select(x, x > -99).sum()
""")
# Masks over the batch and time. Red when: the order of a mask's entries is counted among the kept rows, or a mask of
# tokens is taken for one of single numbers. (masked_scatter_images: as models of text and images put the pieces of
# images into the text.)
cases("""
(N, 4) masked_scatter: x.exp().masked_scatter(spots, (x * 3).flip(1))
    masked_scatter_rows: x.exp().masked_scatter(row_spots, x * 3)
    masked_scatter_weights: x.exp().masked_scatter(spots, w43.flatten().repeat(2))
    masked_scatter_width: x.exp().t().masked_scatter(spots.t()[:, :1], x.t() * 3).t()
    masked_scatter_no_row: x.exp().masked_scatter(every_row[:, None] == 2, x * 3)
    masked_select_rows: torch.masked_select(x, torch.ones(N, 4).bool()).view(N, 4).exp()
    masked_select_back: torch.zeros(N, 4).double().masked_scatter(spots, torch.masked_select(x, spots).exp())
    mask_set_zero: (x * 2).index_put((spots,), x[0, 0])
(N, 4, 3) mask_set: (x * 2).index_put((spots,), (x[spots] @ w43[:3]).tanh())
    mask_set_time_first: turned(lambda x: (x * 2).index_put((spots.t(),), x[spots.t()].exp()), x)
    mask_entries: leaky(x)
    masked_scatter_images: x.exp().masked_scatter(spots.unsqueeze(-1).expand(N, 4, 3), (x @ w43[:3]).tanh())
    masked_scatter_time_first: turned(lambda y: y.exp().masked_scatter(spots.t()[..., None], (x @ w43[:3]).tanh()), x)
""")
# Bags of embeddings. Red when: the places of a kept bag's indices start at another bag's offset, or the weights of a
# kept bag's indices are taken by bag. One bag is empty, and once all of them.
bag_ids, many_ids = torch.arange(12) % 7, torch.arange(4 * N).view(-1, 2) % 7
bag_starts, bag_ends = torch.tensor([0, 2, 2, 3, 7, 8]), torch.tensor([0, 2, 2, 3, 7, 8, 12])
for mode in ("sum", "mean", "max"):
    cases(f"""
(N, 1) embag_{mode}: F.embedding_bag(bag_ids[:9], emb, bag_starts, mode="{mode}").sum(1, keepdim=True) * x
    embag_2d_{mode}: F.embedding_bag(ids, emb, mode="{mode}") * x
    embag_padding_{mode}: F.embedding_bag(bag_ids, emb, bag_starts, mode="{mode}", padding_idx=2) * x
(N, 2, 1) embag_merged_{mode}: F.embedding_bag(many_ids, emb, mode="{mode}").view(N, 2, 4) * x
    embag_time_first_{mode}: F.embedding_bag(many_ids, emb, mode="{mode}").view(2, N, 4).transpose(0, 1) * x
""")
cases("""
(N, 1) embag_mean_last: F.embedding_bag(bag_ids, emb, bag_ends, mode="mean", include_last_offset=True) * x
    embag_kinds: F.embedding_bag(bag_ids.int(), emb, bag_starts, mode="mean") * x
    embag_freq: F.embedding_bag(ids, emb, scale_grad_by_freq=True, mode="sum") * x
(N, 3) embag_weights_2d: F.embedding_bag(ids, emb, per_sample_weights=x, mode="sum")
(N, 4) embag_width: F.embedding_bag(ids[:4], torch.cat([x.T] * 7)[:, :N], mode="sum").T
""")


def weighted_bags(x: Tensor, starts: Tensor, **options: object) -> Tensor:
    return F.embedding_bag(bag_ids, emb, starts, mode="sum", per_sample_weights=x.flatten(), **options)


case("embag_weights", (N, 2), lambda x: weighted_bags(x, bag_starts, padding_idx=3), (emb,))
case("embag_weights_none", (N, 0), lambda x: F.embedding_bag(x.flatten().long(), emb, bag_starts * 0, mode="sum",
     per_sample_weights=x.flatten()), (emb,))  # fmt: skip
case("embag_weights_last", (N, 2), lambda x: weighted_bags(x, bag_ends, include_last_offset=True), (emb,))
numbered = torch.arange(12).double()
case("embag_sum_last", (N, 1), lambda x: weighted_bags(numbered, bag_ends, include_last_offset=True) * x, (emb,))

# Reductions into entries that an index names. Red when: the counts of a mean are taken for a gradient.
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    torch.zeros(1).index_reduce(0, torch.tensor([0]), torch.ones(1), "mean")  # it warns once that it is in beta
of_time = idx.t()[..., None].expand(3, N, 2)
for reduce, include in product(("sum", "prod", "mean", "amax", "amin"), (True, False)):
    how = f'x[:, :3].exp(), "{reduce}", include_self={include})'
    first = f'x[:3].exp(), "{reduce}", include_self={include})'
    cases(f"""
(N, 4) scatter_reduce_{reduce}_{include}: (x * 2).scatter_reduce(1, idx, {how}
(N, 4, 2) scatter_reduce_time_first_{reduce}_{include}: turned(lambda x: (x * 2).scatter_reduce(0, of_time, {first}, x)
""")
    if reduce != "sum":
        cases(f"""
(N, 4) index_reduce_{reduce}_{include}: (x * 2).index_reduce(1, three, {how}
(N, 4, 2) index_reduce_time_first_{reduce}_{include}: turned(lambda x: (x * 2).index_reduce(0, three, {first}, x)
""")
cases("""
(N, 4) scatter_reduce_rows: (x * 2).scatter_reduce(0, whole_rows, x.exp(), "mean")
    scatter_reduce_each: (x * 2).scatter_reduce(0, each, x.exp(), "mean")
    scatter_reduce_pooled: torch.zeros(N, 4).double().scatter_reduce(1, idx, x[:, :3], "amax")
    index_reduce_rows: (x * 2).index_reduce(0, perm, x.exp(), "mean")
    scatter_reduce_repeated: (x * 2).scatter_reduce(0, perm[:, None].repeat(1, 4), x.exp(), "amax")
(N, 3) scatter_mean_of_weights: x * w43.index_reduce(0, three, w43[:3].exp(), "mean")[2]
""")


cases("""
(N, 4, 5) max_dim: x.max(1)[0]; max_dim_t: x.transpose(0, 1).max(0)[0]; amax: x.amax(2); roll: x.roll((1, 2), (1, 2))
(N, 5) median: x.median(1)[0]; mode: x.mode(1)[0]; max_batch: x.max(0)[0] + x; maxall: x * x.max()
    cummax: x.cummax(1)[0]; sortbatch: x.sort(0)[0]
(N, 4) min_dim: x.min(1)[0]; sort: x.sort(1)[0]; topk: x.topk(2, 1)[0]; kth: x.kthvalue(2, 1)[0]
    cumsum: x.cumsum(1); cumsumb: x.cumsum(0); cumprod: x.cumprod(1); cumprod_rows: x.cumprod(0)
    cumprod_zeros: x.relu().cumprod(1); lcse: x.logcumsumexp(1); lse: x.logsumexp(1); prod: x.prod(1); var: x.var(1)
    std: x.std(1); norm: x.norm(dim=1); meanall: x * x.mean(); mean0: x - x.mean(0); stdall: x / x.std()
(N, 3) lcse_rows: x.logcumsumexp(0)
(N, 4, 2) lcse_time_first: turned(lambda x: x.logcumsumexp(-3), x); lcse_last: x.logcumsumexp(-1)
    cummin: turned(lambda x: x.cummin(0)[0], x); cumprod_time_first: turned(lambda x: x.cumprod(0), x)
(N, 8) fft: torch.fft.rfft(x).abs()
(N, 4, 4) fft2: torch.fft.fft2(x).real; rot90: torch.rot90(x, 1, (1, 2))
(N, N) rot90_rows: torch.rot90(x, 1, (0, 1)); along_rows_and_columns: ((x * square).t() * square).t()
(N, 6) chunk: (lambda a, b: a * b.exp())(*x.chunk(2, 1)); chunk_unused: x.chunk(3, 1)[1].exp()
    chunk_gated: F.silu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1]; split: torch.cat(x.split([1, 2, 3], 1)[::-1], 1)
    split_unused: torch.cat(x.split([1, 2, 3], 1)[::2], 1).exp(); split_rows: torch.cat(x.split([2, 4])[::-1])
    slice_steps: torch.cat([x[1::4], x[::4], x[-4:4]])
    split_rows_unused: torch.cat([x, x]).split([N, N])[1].exp()
    split_of_two: (lambda a, b: a[0] * b[0] + a[1])(x.split([2, 2, 2], 1), x.exp().split(2, 1))
    unsafe_chunk_unused: x.unsafe_chunk(3, 1)[1].exp(); split_copy_unused: torch.split_copy(x, 2, 1)[1].exp()
    unsafe_split_unused: x.unsafe_split_with_sizes([1, 2, 3], 1)[1].exp()
    split_sizes_copy_unused: torch.split_with_sizes_copy(x, [1, 2, 3], 1)[1].exp()
    unbind_copy_unused: torch.unbind_copy(x, 1)[1].exp()
    slice: x[:, 1:5:2] * 2; sliceb: torch.cat([x[:2], x[2:].exp()], 0)
(N, 4, 6) chunk3: (lambda a, b, d: a * b + d)(*x.chunk(3, 2))
(N, 3, 4) unbind: torch.stack([a.exp() for a in x.unbind(1)], 1); unbind_last_only: x.unbind(1)[-1]
    unbind_time_first: x.transpose(0, 1).unbind()[1].exp(); select: x[:, -1]; select2: x[..., 0]
    unbind_added: sum(x.unbind(1)); unbind_added_time_first: sum(x.transpose(0, 1).unbind())
    unbind_two_added: (lambda a: a[0] + a[2])(x.unbind(-1)); unbind_copy_added: sum(torch.unbind_copy(x, 1)) / 3
(N, 5, 4) unbind_some_twice: (lambda a: a[1].exp() * a[1] + a[3])(x.unbind(1))
(N, 4) stack: torch.stack([x, x * 2], 1); stack0: torch.stack([x, x * 2], 0).transpose(0, 1)
    catb: torch.cat([x, x * 2], 0).view(2, N, 4).transpose(0, 1); cat_dense: torch.cat([x, w43[0].expand(N, 3)], 1)
    rollb: x.roll(1, 0); roll_none: x.roll(3); flip: x.flip(1)
(N, 3, 4, 5) perm: x.permute(2, 0, 3, 1).reshape(4, N * 5, 3).exp().view(4, N, 5, 3).permute(1, 0, 2, 3)
(N, 3, 4) merge_both: F.linear(x.permute(1, 0, 2).reshape(3 * N, 4), w43.t()).view(3, N, 3).transpose(0, 1)
(N, 2, 3, 4) merge_outer_inner: turned(lambda x: F.linear(x.reshape(2 * N * 3, 4), w43.t()).view(2, N, 3, 3), x)
(N, 3) minor: F.linear(x.t().reshape(-1, N).t() @ w43.t()[:3], torch.eye(4).double()); diag_embed: torch.diag_embed(x)
    inplace_relu: (x * 1).relu_()
(N, 1, 4) expand: x.expand(N, 3, 4) * w43.t().exp(); squeeze2: x.squeeze(1).unsqueeze(-1).squeeze(-1)
(N, 1, 4, 1) squeeze: x.squeeze().exp()
(N, 4) bcast: (x.unsqueeze(1) * w43.t().exp()).sum(2)
(N, 2) repeat: x.repeat(1, 3); ri: x.repeat_interleave(3, 1); ri0: x.repeat_interleave(2, 0).view(N, 2, 2)
    tile: x.tile(2, 2).view(2, N, 4).transpose(0, 1)
(N, 7) unfoldt: x.unfold(1, 3, 2)
(N, 3, 3) diag: x.diagonal(dim1=1, dim2=2); tril: x.tril(); det: torch.det(x)
    inv: torch.linalg.inv(x + 5 * torch.eye(3)); lu_solve: torch.linalg.solve(x.detach() + 5 * torch.eye(3), x)
(N, 3, 4) bmm: torch.bmm(x, x.transpose(1, 2)); bmm_w: torch.matmul(x, w43.expand(N, 4, 3))
    baddbmm: torch.baddbmm(x @ w43, x, x.transpose(1, 2)); einsum: torch.einsum("nij,nkj,jl->nikl", x, x, w43)
    einsum2: torch.einsum("nij,mij->nm", x, x); cdist: torch.cdist(x, x * 2)
    rnn_like: torch.stack([(x[:, i] @ w43).tanh() for i in range(3)], 1)
    cross_time_first: turned(lambda x: torch.linalg.cross(x, x.exp(), dim=0), x)
(N, 4, 3) cross: torch.linalg.cross(x, x.exp()); cross_shared: torch.linalg.cross(x, w43.unsqueeze(0), dim=2)
(N, 4) mv: x @ w43[:, 0]; xxt: x @ x.t(); outer: torch.outer(x[:, 0], w43[0]); dot: x * torch.dot(x[:, 0], x[:, 1])
    addmm: torch.addmm(x[:, :3], x, w43); addmv: torch.addmv(x[:, 0], x, w43[:, 0]); mm_batchcontract: x @ (x.t() @ x)
    cdist_codebook: torch.cdist(x, w43.t()); cdist_among: torch.cdist(w43.t(), x).t()
    clamp: x.clamp(-0.5, 0.5); maximum: torch.maximum(x, x.flip(1)); lerp: torch.lerp(x, x * 2, 0.3)
    addcmul: torch.addcmul(x, x, x); pow: x.abs() ** x; atan2: torch.atan2(x, x.flip(1)); fmod: x % 1.0
    div: x / (x.flip(1).abs() + 1); to: x.float().double()
    foreach: torch.cat(torch._foreach_tanh(torch._foreach_mul(x.chunk(2, 1), [2.0, 3.0])), 1)
    complex: torch.view_as_real(torch.view_as_complex(x.view(N, 2, 2)) * (1 + 2j))
    conj: torch.view_as_real(torch.complex(x[:, :2] * 1, x[:, 2:] * 1).conj().resolve_conj())
    conj_physical: torch.view_as_real(torch.complex(x[:, :2] * 1, x[:, 2:] * 1).conj_physical())
(N, 2, 3) complex_transposed: torch.view_as_real(torch.complex(x[:, 0] * 1, x[:, 1] * 1)).transpose(1, 2)
""")

# Red when: the factors are those of all rows; a factor that all rows share is gathered; the formula of matrix_exp joins
# the gradient to the first K matrices; the rows' lengths are taken for those of the kept rows.
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    torch.triangular_solve(torch.eye(1), torch.eye(1))  # it warns once that it is old
hann, ragged = torch.hann_window(4).double() + 0.1, torch.tensor([1, 0, 4, 4, 6, 9])
step1, zero1, step5, zero5, step6, zero6 = (torch.full((n,), by) for n in (1, 5, N) for by in (0.2, 0.5))


def definite(x: Tensor) -> Tensor:
    return x @ x.mT + torch.eye(3)


cases("""
(N, 3, 3) cholesky_solve: torch.cholesky_solve(x, torch.linalg.cholesky(definite(x)))
    cholesky_solve_shared: torch.cholesky_solve(x, torch.linalg.cholesky(definite(w43[:3])))
    triangular_solve: torch.triangular_solve(x, definite(x))[0]; triangular_shared: x.triangular_solve(w43[:3])[0]
    eigvals: torch.linalg.eigvals(x).abs(); eig: torch.linalg.eig(x)[1].abs(); matrix_exp: torch.matrix_exp(x)
(N, N) matrix_exp_over_rows: torch.matrix_exp(x)
(N, 2, 3, 3) cholesky_solve_time_first: turned(lambda x: torch.cholesky_solve(x, definite(x)), x)
    matrix_exp_time_first: turned(lambda x: torch.matrix_exp(x.contiguous()), x)
(N, 8) istft: torch.istft(torch.stft(x, 4, 2, window=hann, return_complex=True), 4, 2, window=hann, length=8)
    segment_reduce: torch.segment_reduce(x, "max", lengths=torch.tensor([[3, 5]] * N), axis=1)
    segment_reduce_offsets: torch.segment_reduce(x, "mean", offsets=torch.tensor([[0, 3, 8]] * N), axis=1)
    segment_reduce_time_first: turned(lambda x: torch.segment_reduce(x, "prod", lengths=torch.tensor([3, 5])), x)
(N, 4) segments: torch.segment_reduce(x.flatten(), "max", lengths=ragged, initial=0)
    segments_offsets: torch.segment_reduce(x.flatten(), "sum", offsets=F.pad(ragged.cumsum(0), (1, 0)))
    segments_of_lines: torch.segment_reduce(x.repeat(4, 1), "mean", lengths=ragged, initial=0)
(N, 5) dirichlet: torch.distributions.Dirichlet(x.exp()).rsample(); beta: torch.distributions.Beta(x.exp(), 2).rsample()
    dirichlet_over_rows: torch.distributions.Dirichlet(x.exp().t()).rsample().t()
    fake: torch._fake_quantize_learnable_per_tensor_affine(x.float(), step1, zero1, -8, 7, 0.5)
    fake_channels: torch._fake_quantize_learnable_per_channel_affine(x.float(), step5, zero5, 1, -8, 7, 0.5)
    fake_time_first: torch._fake_quantize_learnable_per_channel_affine(x.float().t(), step5, zero5, 0, -8, 7, 0.5).t()
    fake_over_rows: torch._fake_quantize_learnable_per_channel_affine(x.float(), step6, zero6, 0, -8, 7)
""")


# Complex numbers: a lazy conjugate is a flag on the memory of the number, and so is the lazy negative (the imaginary
# part of a conjugate). Red when: the memory below a flag is gathered as it is, or a gather is remembered without it.
zw, zv, zs = (nn.Parameter(torch.randn(*shape, dtype=torch.complex128)) for shape in [(4, 4), (4, 4), (4,)])


def as_complex(x: Tensor) -> Tensor:
    return torch.complex(x, x.roll(1, 1))


cases("""
(N, 4) complex_layer: torch.view_as_real((as_complex(x) @ zw * zs.conj()).conj() + zs)
    complex_both_ways: torch.view_as_real(as_complex(x) @ zw + as_complex(x).conj() @ zv)
    complex_same_memory: (lambda z: torch.view_as_real(z @ zw + z.conj() @ zv))(as_complex(x))
(N, 3, 4) complex_attention: torch.view_as_real((lambda h: (h @ h.mH) @ h)(torch.complex(x, x.roll(1, 1)) @ zw))
    negative_attention: (lambda h: (h.real @ h.conj().imag.mT) @ h.real)(torch.complex(x, x.roll(1, 1)) @ zw)
(N, 1, 1) negative_view: torch.linalg.solve_triangular(as_complex(x).conj().imag, x.exp(), upper=True)
""")


choice = torch.randint(0, 3, (N * 3,))


def mixture(x: Tensor) -> Tensor:
    """Tokens of a sequence are routed one by one; the residual stream has whole sequences."""
    tokens = x.reshape(-1, 4)
    out = torch.zeros_like(tokens)
    for e in range(3):
        place = (choice == e).nonzero().squeeze(1)
        out = out.index_add(0, place, (tokens[place] @ w43 @ w43.t()).tanh())
    return x + out.view_as(x)


w_many = param(4, 40)


def weights_of_experts(x: Tensor) -> Tensor:
    """Each token's weights of 2 of 40 experts, sorted by expert and back."""
    weights, numbers = (x.reshape(-1, 4) @ w_many).softmax(-1).topk(2, -1)
    order = numbers.reshape(-1).argsort(stable=True)
    return weights.reshape(-1)[order].exp()[order.argsort()].view(N, -1)


# Red when: weights that lie one by one among the experts of each token are not spread to all of these; they become
# whole experts, not tokens, as fewer experts than tokens are met.
case("weights_of_experts", (N, 3, 4), weights_of_experts, (w_many,))
case("experts", (N, 3, 4), lambda x: mixture(mixture(x)), (w43,))
case("experts_time_first", (N, 3, 4), lambda x: turned(lambda x: mixture(mixture(x)), x), (w43,))
some = torch.tensor([0, 2, 5])
cases("(N, 4) moe: torch.zeros_like(x).index_add(0, some, F.linear(x[some], w43 @ w43.t()))")


def in_place(view: Function, write: Callable[[Tensor, Tensor], object]) -> Function:
    """Write to a view of a new tensor, then read the tensor and the view."""

    def f(x: Tensor) -> Tensor:
        base = x.sin().contiguous()
        part = view(base)
        write(part, x.cos())
        return torch.cat([base.flatten(1), (part * 3).reshape(N, -1)], 1)

    return f


def second(x: Tensor) -> Tensor:
    return x[:, 1]


WRITES: dict[str, Callable[[Tensor, Tensor], object]] = {
    "mul": lambda part, x: part.mul_(x.flatten(1)[:, :1].view(N, *[1] * (part.ndim - 1))),
    "exp": lambda part, x: part.exp_(),
    "zero": lambda part, x: part.zero_(),
    "copy": lambda part, x: part.copy_(x.flatten(1)[:, : part[0].numel()].view_as(part)),
}
for name, write in WRITES.items():
    case(f"in_place_flat_{name}", (N, 3, 4), in_place(lambda x: x.flatten(1), write))
    case(f"in_place_select_{name}", (N, 3, 4), in_place(second, write))
    case(f"in_place_window_{name}", (N, 3, 4, 4), in_place(lambda x: x[:, 1:, ::2, 1:3], write))
    case(f"in_place_transposed_{name}", (N, 3, 4), in_place(lambda x: x.mT[:, 1:], write))
case("in_place_twice", (N, 3, 4), in_place(second, lambda part, x: (part.mul_(x[:, 0]), part[:, 1].exp_())))
case("in_place_rows", (N, 3, 4), in_place(lambda x: x, lambda part, x: part[1:3].mul_(x[:2])))
case("in_place_time_first", (N, 3, 4), lambda x: in_place(second, WRITES["exp"])(turned(torch.tanh, x)) * 2)


def with_a_column_set(x: Tensor) -> Tensor:
    x = x * 1
    x[:, 0] = 2 * x[:, 1].clone()
    return x


def time_first(x: Tensor) -> Tensor:
    base = x.transpose(0, 1).sin().contiguous()
    base[1].exp_()
    return base.transpose(0, 1)


def by_chunks(x: Tensor) -> Tensor:
    """As a scan over chunks of time: the results of a solver, whose last two dimensions are swapped in memory."""
    out = torch.zeros_like(x.mT.contiguous().mT)
    for step in range(2):
        out[:, step] = x[:, step].exp() + out[:, step - 1]
    return out


case("in_place_of_time_first", (N, 3, 4), time_first)
Buffer = Callable[[Tensor, int, Tensor], object]  # writes the state at a time into a buffer


def solved(x: Tensor, write: Buffer = Tensor.__setitem__, times: int = 4, made: Function = torch.zeros_like) -> Tensor:
    """The states of a solver of differential equations, in a buffer (time, N, ...), read in front and behind."""
    states = made(x.expand(times, *x.shape))
    for t in range(times):
        x = x + (x @ w43).tanh() @ l2
        write(states, t, x)
    return torch.stack([states[-1], states[1] * states[0], *states.exp()], 1)


def twice(states: Tensor, t: int, x: Tensor) -> None:
    states[t] = x.exp()
    first = (states * 2).sin().sum(0)
    states[t] = x * first


def changed(states: Tensor, t: int, x: Tensor) -> None:
    states[t] = x
    states[t].mul_(x.cos())
    states[: t + 1].masked_fill_(states.detach()[: t + 1] > 1, 0)
    states[t, ..., 1:].pow_(2)
    states[::2].div_(2 + x.square())


def through_views(states: Tensor, t: int, x: Tensor) -> None:
    heads = states.unflatten(-1, (2, -1))
    heads[t] = x.unflatten(-1, (2, -1))
    heads.flatten(-2).transpose(0, 1)[:, t].unsqueeze(-1)[..., ::2, 0].mul_(x[..., :2])
    heads.transpose(-1, -2)[t, ..., 1, :].pow_(2)


def shifted(states: Tensor, t: int, x: Tensor) -> None:
    states[t] = x
    states.flatten()[2 : 2 + x.numel()].view(x.shape).mul_(2)


def of_complex(x: Tensor) -> Tensor:
    states = torch.zeros_like(x.expand(3, *x.shape), dtype=torch.complex128)
    for t in range(3):
        states[t] = x = (x * (0.2 + t * 0.1j)) @ zw
        states[t, ..., 1:].mul_(x[..., 1:].exp())
    return torch.view_as_real(states.transpose(0, 1))


# Red when: a part of time is taken at its place among all rows, or with the step between these; a step in time and the
# first row's begin are not told apart; a view that reaches from row to row counts as one of each row.
for trailing in ((4,), (3, 4)):
    for name, f in {
        "set": solved,
        "set_twice": partial(solved, write=twice),
        "changed": partial(solved, write=changed),
        "through_views": partial(solved, write=through_views),
        "swapped": partial(solved, made=lambda x: torch.zeros_like(x.transpose(0, -1).contiguous().transpose(0, -1))),
        "checkpointed": lambda x: checkpoint(solved, x, changed, use_reentrant=False),
        "complex": of_complex,
    }.items():
        case(f"in_place_buffer_{name}_{len(trailing)}d", (N, *trailing), f)
case("in_place_buffer_shifted", (N, 4), partial(solved, write=shifted))
# Red when: strides count from a gradient in its own order, not in that of the tensor that was written to.
case("in_place_of_swapped", (N, 3, 4), by_chunks)
case("in_place_of_swapped_4d", (N, 2, 3, 4), by_chunks)
case("setitem", (N, 3), with_a_column_set)


def written(x: Tensor, at: object, value: Tensor | float) -> Tensor:
    """Some rows are set; the others, and those that were there, are read, too."""
    y = x * 1
    before = y.exp()
    y[at] = value
    return torch.cat([y.sin(), before], 1)


def rows_changed(x: Tensor) -> Tensor:
    y = x * 1
    y[1].mul_(w43[:, 0])
    y[:, 1:].unflatten(1, (1, -1))[2:5, 0].mul_(x[:3, 1:])
    y.masked_fill_(y.detach() > 0.9, 0)[::3].masked_fill_(x[::3] > 0, 0)
    y.t()[1:3, 4].pow_(2)
    y[1:5] = y[2:6].clone()
    return y[1:2].mul_(3)._base


def in_groups(x: Tensor) -> Tensor:
    y = x * 1
    y.unflatten(0, (2, -1))[:, 1:].mul_(w43[:, 0])
    return y


def in_diagonal(x: Tensor) -> Tensor:
    y = x * 1
    y.diagonal().exp_()
    return y


def time_and_rows(x: Tensor, flat: slice = slice(N + 1, N + 4)) -> Tensor:
    states = torch.zeros(4, *x.shape).to(x)
    for t in range(4):
        states[t] = x = (x @ w43).tanh() @ l2
        states[t, t] = 0
        states[t, 2:5, 1:] = x[1:4, 1:].exp()
    states[1:, ::2].mul_(x[::2])
    states.flatten(0, 1)[flat].mul_(2)
    return states.transpose(0, 1)


def at_all_times(x: Tensor) -> Tensor:
    states = torch.stack([x, x.sin(), x.exp()])
    states[:, 1] = 0
    states[:, 2:5, ..., 1:] = x[1:4, ..., 1:].exp()
    states[:, 3:] *= x[3:]
    states[1, 4] *= w43[:, 0]
    states[:, ::2].mul_(x[::2])
    return states.transpose(0, 1)


def taken_out(x: Tensor) -> Tensor:
    """Rows that are set to rows of another tensor."""
    y = x * 1
    y[3] = x.exp()[3]
    y[4] = x.sin()[1]
    y[1:3] = x.cos()[:2]
    return y


def as_it_lies(x: Tensor) -> Tensor:
    """Rows of a tensor whose last two dimensions are swapped in memory."""
    y = torch.zeros_like(x.mT.contiguous().mT)
    y[:] = x
    y[1] = 0
    y[3:, :, 1:].mul_(x[3:, :, 1:])
    return y


def complex_rows(x: Tensor) -> Tensor:
    z = as_complex(x) * 1
    z[2:5] = z[1:4].clone().conj() @ zw
    z[1].mul_(2j)
    return torch.view_as_real(z)


def conjugate_row(x: Tensor) -> Tensor:
    z = as_complex(x) * 1
    z[1].conj().imag.mul_(2)
    z[0].conj().mul_(zs)
    return torch.view_as_real(z)


def imaginary_number(x: Tensor) -> Tensor:
    z = as_complex(x) * 1
    z[1, 1].imag.mul_(2)
    return torch.view_as_real(z)


def number(part: Tensor, x: Tensor) -> None:
    part[1] = 0
    part[2].mul_(w43[1, 0])


class Raised(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad + 1


def row_raised(x: Tensor) -> Tensor:
    """A write whose gradient is not zero where that of its result is."""
    y = x * 1
    Raised.apply(y[3])
    return y


# Red when: a copy of rows is not written back, or with a row's sum in each of the places where it repeats, or over rows
# that are not in the range; a range is taken from row 0, or with a step of 1; a diagonal, a range that ends at a later
# time, one in each group of rows, or an empty view counts as a range of rows; the gradient that a write gives to a row
# that is not kept is lost; a row that was selected is put back elsewhere, or its memory is not that of the rows.
cases("""
(N, 4) in_place_row_set: written(x, 1, 0.0); in_place_row_set_last: written(x, -1, w43[:, 0].exp())
    in_place_row_raised: row_raised(x)
    in_place_row_entry_set: written(x, (1, 2), 0.0); in_place_rows_set: written(x, slice(2, 5), 0.0)
    in_place_rows_set_most: written(x, slice(1, None), (x[:5] @ w43) @ l2)
    in_place_rows_set_all_kept: written(x, slice(1, 5, 3), 3.0)
    in_place_rows_set_step: written(x, slice(0, None, 2), x[3:].exp())
    in_place_rows_set_some: written(x, (slice(0, 4), slice(None, None, 3)), x[2:, :2].exp())
    in_place_rows_added_up: in_place(lambda x: x, lambda part, x: part[1:5].cumsum_(0))(x)
    in_place_two_rows_added_up: in_place(lambda x: x, lambda part, x: part[2:4].cumsum_(0))(x)
    in_place_rows_changed: rows_changed(x); in_place_rows_checkpointed: checkpoint(rows_changed, x, use_reentrant=False)
    in_place_rows_none: in_place(lambda x: x, lambda part, x: part[2:4, :0].zero_())(x)
    in_place_rows_in_groups: in_groups(x); in_place_rows_of_times: time_and_rows(x)
    in_place_rows_across_times: time_and_rows(x, slice(4, 8)); in_place_rows_complex: complex_rows(x)
    in_place_conjugate_row: conjugate_row(x); in_place_rows_at_all_times: at_all_times(x)
    in_place_imaginary_number: imaginary_number(x)
    in_place_rows_taken_out: taken_out(x); in_place_row_number_set: in_place(lambda x: x[:, 0], number)(x)
(N, N) in_place_rows_diagonal: in_diagonal(x)
(N, 3, 4) in_place_rows_of_lines: time_and_rows(x); in_place_rows_swapped: as_it_lies(x)
""")


def spectrum(x: Tensor, write: Callable[[Tensor], object]) -> Tensor:
    c = torch.fft.fft(x)
    write(c)
    return torch.view_as_real(c)


def spun(x: Tensor) -> Tensor:
    base = x.sin().contiguous()
    torch.view_as_complex(base)[1:3].mul_(2j)
    return base


# Views of views are undone by strides of the memory below them. Red when: these count from the view, or a write to a
# view that was made at full size does not reach what it views.
SPECTRUM: dict[str, Callable[[Tensor], object]] = {
    "imag": lambda c: c.imag.mul_(2),
    "some_rows": lambda c: c.real[:3].mul_(2),
    "transposed": lambda c: c.t().real.mul_(3),
    "conj_imag": lambda c: c.conj().imag.mul_(2),
    "adjoint": lambda c: c.mH[1].mul_(2j),
    "imag_select": lambda c: c.imag[:, 0].zero_(),
    "select_imag": lambda c: c[..., 1].imag.mul_(2),
}
for name, write in SPECTRUM.items():
    case(f"in_place_spectrum_{name}", (N, 4), partial(spectrum, write=write))
case("in_place_spectra_parts", (N, 3, 4), partial(spectrum, write=lambda c: torch.view_as_real(c.mT)[:, 1:3].mul_(2)))
case("in_place_as_complex", (N, 3, 2), spun)


def run(name: str, take: Function, channels_last: bool) -> list[Tensor | None]:
    """The gradients of a case: of a leaf that scales its input, and of its parameters."""
    shape, f, params = CASES[name]
    torch.manual_seed(3)
    scale, x = param(*shape), randn(*shape)
    if channels_last and x.ndim > 2:  # the same values in another order of memory
        x = x.movedim(1, -1).contiguous().movedim(-1, 1)
    torch.manual_seed(4)  # for ops that draw
    y = f(torch.tanh(x * scale) * 1.5).reshape(N, -1)
    losses = (y * torch.linspace(0.5, 2, y.shape[1], dtype=y.dtype)).sum(1)
    for p in params:
        p.grad = None
    take(losses).square().sum().backward()
    return [p.grad for p in (scale, *params)]


def sliced(values: Tensor, index: list[int], dim: int = 0, unique: bool = True) -> RowGrad:
    shape = [N if d == dim else size for d, size in enumerate(values.shape)]
    rows = RowSet(torch.tensor(index), N, unique=unique, batchnorm="rows")
    return RowGrad(RowSlice(values, rows, Layout(dim, N), shape))


lstm_arguments = (aux(5, N, 3), aux(8, 3), aux(8, 2), aux(8), aux(8) * 2, aux(N, 2), aux(N, 2) * 2)
lstm_outputs = aten.mkldnn_rnn_layer(*lstm_arguments, False, [], 2, 2, 1, True, False, False, True)


def lstm_backward(g: Tensor, place: int) -> Tensor:
    """One of the gradients of the CPU's fused LSTM; ``g`` is the gradient of its output."""
    grads = (aten.transpose(g, 0, 1), None, None)
    settings = (False, 2, 2, 1, True, True, False, [], False)
    return aten.mkldnn_rnn_layer_backward(*lstm_arguments, *lstm_outputs[:3], *grads, *settings, lstm_outputs[3])[place]


pooled = aten.fractional_max_pool2d(aux(N, 2, 8, 8), [2, 2], [4, 4], aux(N, 2, 2).abs() % 1)[1]
pooled3 = aten.fractional_max_pool3d(aux(N, 2, 8, 8, 8), [2] * 3, [4] * 3, aux(N, 2, 3).abs() % 1)[1]
steps, labels, words = torch.full((N,), 5), torch.arange(N) % 2 + 1, ints(3, N, 2) + 1
scores = aux(5, N, 4).log_softmax(2)
alignments = aten._ctc_loss.Tensor(scores, words, steps, labels)
hidden = aux(N, 3) > 0
DIRECT: dict[str, tuple[tuple[int, ...], Function]] = {}


def direct(table: str) -> None:
    for trailing, expression in entries(table):
        assert expression not in DIRECT
        DIRECT[expression] = trailing, eval(f"lambda g: {expression}", globals())


for name in """abs asin asinh atan ceil erf expm1 floor cos log1p nan_to_num relu round sgn sign sin sinh sqrt tan tanh
trunc exp neg alias detach square""".split():
    direct(f"(3,) aten.{name}(g)")
direct("""
(3,) aten.isnan(aten.sqrt(g)); aten._is_any_true(aten.isnan(aten.sqrt(g))); aten.any(g)
    aten.mm(aten.t(g), g); aten.mul(g, g); aten.square(aten.cat([g, g])); aten.pow.Tensor_Scalar(g, 2)
    aten.pow.Tensor_Scalar(aten.add(g, 20), -1); aten.pow.Tensor_Scalar(g, 0); aten.clamp(g, -0.1, 0.1)
    aten.clamp(g, 0.1, 0.2); aten.clamp(g, None, -0.5); aten.div(torch.ones(N, 3), aten.add(g, 10))
    aten.xlogy(g, aux(N, 3).abs()); aten.xlogy(aux(N, 3), aten.add(g, 10)); aten.special_xlog1py(g, aux(3).abs())
    aten.linalg_solve_triangular(aux(N, N) + 3 * torch.eye(N), g, upper=True)
(3, 2) aten.linalg_solve_triangular(aux(N, 3, 3) + 3 * torch.eye(3), g, upper=True)
    aten.linalg_solve_triangular(aux(3, 3) + 3 * torch.eye(3), g, upper=False)
(3,) aten._trilinear(g, aux(N, 2), aux(2, 4), [1, 3], [1, 3], [0, 1], [0])
    aten._trilinear(aux(2, 4), g, aux(N, 2), [0, 1], [2, 3], [1, 3], [2], 2)
() aten._ctc_loss_backward.Tensor(g, scores, words, steps, labels, *alignments, 0)
(3,) aten.diag_embed(g, 1, 0, 2); aten.diag_embed(aten.t(g)); aten.diagonal(g)
(3, 4, 3) aten.diagonal(g, 1, 1, 3)
(3, 5) aten.diag_embed(aten.transpose(g, 0, 1), 0, 1, 2); aten.diag_embed(aten.transpose(g, 0, 1), 0, 2, 1)
    aten.diag_embed(aten.transpose(g, 0, 1), 0, -1, 0)
    aten.diagonal_backward(aten.transpose(g, 0, 1), [3, 5, 5, N], 0, 1, 2)
    aten.diagonal_backward(aten.transpose(g, 0, 1), [3, 5, 5, N], 0, 2, 1)
    aten.diagonal_backward(aten.transpose(g, 0, 1), [5, 3, N, 5], 0, -1, 0)
(3,) aten.index(g, [None, torch.tensor([True, False, True])]); aten.index(g, [torch.tensor([2, -2, 1])])
    aten.masked_fill(g, torch.ones(3, dtype=torch.bool), 2.0); aten.masked_fill.Tensor(g, hidden, torch.zeros(()))
    aten.where(torch.ones(N, 3, dtype=torch.bool), torch.ones(()), g)
    aten.add(torch.ones(N, 3), g, alpha=-2); aten.add_.Tensor(torch.ones(N, 3), g, alpha=-2)
    aten.copy_(torch.ones(N, 3), g); aten.copy_(torch._neg_view(torch.ones(N, 3)), g)
    aten.sub(g, torch.ones(N, 3)); aten.sub(torch.ones(N, 3), g, alpha=3); aten.add(g, torch.ones(N, 3), alpha=3)
    aten.sub(g, torch.ones(N, 3), alpha=3); aten.add(g, aten.mul(g, 3), alpha=2); aten.sub(g, aten.mul(g, 3))
    aten.add(aten.zero(g), g, alpha=2); aten.sub(aten.zero(g), g); aten.sub(g, aten.zero(g), alpha=2)
    aten.add(aten.zero(g), g)
(3, 4, 5) aten.clone(g, memory_format=torch.channels_last)
""")
# The same rows, but in another dimension, or merged with another size in front or behind.
direct("""
(2,) aten.index_put(aten.new_zeros(g, [N, 4, 5]), [None, ints(4, 2), ints(5, 2)], g, True)
(N,) aten.add(g, aten.t(g)); aten.mul(g, aten.t(g)); aten.add(g, aten.sum.dim_IntList(g, [1]))
(3,) aten.add(aten.sum.dim_IntList(g, [1]), aten.t(g)); aten.sub(aten.t(g), aten.sum.dim_IntList(g, [1]))
(2, 3) aten.add(aten.view(g, [N * 2, 3]), aten.reshape(aten.transpose(g, 0, 1), [2 * N, 3]))
    aten.mm(aten.t(aten.view(g, [N * 2, 3])), aten.reshape(aten.transpose(g, 0, 1), [2 * N, 3]))
""")
direct("""
(3,) aten.addmm(torch.ones(N, 3), g, torch.eye(3)); aten.addmm(g, g, torch.eye(3), beta=2)
    aten.addmm(aten.sum.dim_IntList(g, [1]), g, aux(3, N)); aten.addmm(torch.ones(3), g, aux(3, 3), beta=0)
    aten.addmm(aux(N, 3), g, aux(3, 3), beta=0)
    aten.addmm(torch.ones(3, 3), aten.t(g), torch.ones(N, 3))
(N,) aten.addmm(aten.t(g), g, aux(N, N))
(3, 3) aten.baddbmm(g, g, aux(N, 3, 3)); aten.baddbmm(torch.ones(N, 3, 3), g, aux(N, 3, 3))
() aten.dot(g, aux(N)); aten.unfold_backward(aten.index_select(g, 0, torch.tensor([4])), [], 0, 1, 1)
(3,) aten.index_select(g, 0, torch.tensor([0, 1, 4, 4, -1 + N]))
    aten.slice(g, 0, 1, None, 2); aten.slice(g, 0, -5, 5, 3); aten.slice(g, 0, 0, 99, 4)
    aten.squeeze(aten.index_select(g, 0, torch.tensor([4])))
    aten.expand(aten.index_select(g, 0, torch.tensor([4])), [5, 3])
    aten.mul(aten.index_select(g, 0, torch.tensor([4])), aux(5, 3))
(3, 4) aten.index(g, [None, torch.tensor([2, 0]), torch.tensor([1, 3])])
(3, 4, 2) aten.index(g, [None, torch.tensor([2, 0]), None, torch.tensor([1, 1])])
(3,) aten.index_add(aten.new_zeros(g, [N, 5]), 1, torch.tensor([4, 0, 4]), g, alpha=2)
    aten.index_add(torch.ones(N, 3), 0, torch.arange(N), g)
    aten.index_add(aten.new_zeros(g, [2, 3]), 0, torch.arange(N) % 2, g)
    aten.index_add(aten.new_zeros(g, [2, 3]), 0, torch.ones(N).long(), g)
() aten.scatter_add(torch.zeros(()), 0, torch.zeros(N).long(), g)
(3,) aten.index_fill.int_Scalar(g, 1, torch.tensor([0, 2]), 0); aten.scatter.value(g, 1, ints(3, N, 2), 0)
    aten.index_fill.int_Scalar(g, 1, torch.tensor([0, 2]), 1); aten.scatter.value(g, 1, ints(3, 4, 2), 0)
    aten.gather(g, 0, torch.tensor([[1, 2, 2]])); aten.mean(g); aten.sum.dim_IntList(g, [-1], True)
(3, 2) aten.mean.dim(g, [1], True); aten.mean.dim(g, [0, 2])
(1, 3, 1) aten.squeeze(g); aten.squeeze.dims(g, [0, 1, -1])
(4, 3) aten.split.Tensor(g, 3, 1)[1]; aten.split_with_sizes(g, [1, 3], 1)[1]; aten.split.Tensor(g, 4, 0)[1]
    aten.unbind(g, 1)[2]; aten.unbind(g, 0)[1]
(4, 4) aten.triu(g, 1); aten.tril(aten.transpose(g, 0, 1))
(3,) aten._reshape_alias(g, [N * 3], [1]); aten.embedding_dense_backward(g, torch.arange(N) % 2, 2, -1, False)
    aten.native_dropout_backward(g, hidden, 2.0); aten.new_empty(g, [N]).zero_(); aten.new_full(g, [N], 1.0).zero_()
    aten.new_ones(g, [N]).zero_(); aten.empty_like(g).shape[0]; aten.full_like(g, 2.0).shape[0]
    aten.ones_like(g).shape[0]; aten.rrelu_with_noise_backward(g, aux(N, 3), aux(N, 3), 0.1, 0.3, True, False)
(8,) aten._fft_r2c(g, [1], 0, True).abs(); aten._fft_r2c(g, [0], 0, False).abs()
    aten._fft_c2r(aten._fft_r2c(g, [1], 0, True), [1], 2, 8)
(2, 8) aten._upsample_nearest_exact1d_backward(g, [8], [N, 2, 4]); aten.upsample_nearest1d_backward(g, [8], [N, 2, 4])
(2, 8, 8) aten._upsample_bicubic2d_aa_backward(g, [8, 8], [N, 2, 4, 4], False)
(2, 8, 8, 8) aten._upsample_nearest_exact3d_backward(g, [8] * 3, [N, 2, 4, 4, 4])
    aten.upsample_nearest3d_backward(g, [8] * 3, [N, 2, 4, 4, 4])
(2, 4, 4) aten.fractional_max_pool2d_backward(g, aux(N, 2, 8, 8), [2, 2], [4, 4], pooled)
(2, 4, 4, 4) aten.fractional_max_pool3d_backward(g, aux(N, 2, 8, 8, 8), [2] * 3, [4] * 3, pooled3)
    aten.reflection_pad3d_backward(g, aux(N, 2, 2, 2, 2), [1] * 6)
    aten.replication_pad3d_backward(g, aux(N, 2, 2, 2, 2), [1] * 6)
    aten.grid_sampler_3d_backward(g, aux(N, 2, 4, 4, 4), aux(N, 4, 4, 4, 3), 0, 0, False, [True] * 2)[1]
""")
for place in range(7):
    direct(f"(5, 2) lstm_backward(g, {place})")
# Bags as CUDA's forward saves them: the size of one bag too many with a last offset, and kinds of integers as given.
bag_of, bag_sizes = torch.tensor([0, 0, 2, 3, 3, 3, 3, 4, 5, 5, 5, 5]), torch.tensor([2, 0, 1, 4, 1, 4, 0])
maxima, numbers = ints(7, N, 3), torch.arange(2 * N + 1)
for mode in range(3):
    given = f"bag_of, bag_sizes, maxima{'' if mode == 2 else '[:0]'}, 7, False, {mode}"
    weights = "aux(12)" if mode == 0 else "None"
    for ends in ("bag_ends", "bag_ends.int()"):
        direct(f"(3,) aten._embedding_bag_backward(g, bag_ids, {ends}, {given}, False, {weights}, 2)")
    direct(f"(3,) aten._embedding_bag_dense_backward(g, bag_ids, {given}, {weights}, 2)")
pair_of_bags = "numbers, numbers[:-1], torch.ones_like(numbers), maxima[:0], 7, False, 1, False, None"
direct(f"""
(2, 3) aten._embedding_bag_backward(aten.view(g, [2 * N, 3]), bag_ids, {pair_of_bags})
(3,) aten._embedding_bag_per_sample_weights_backward(g, aux(7, 3), bag_ids, bag_ends, bag_of, 0, 2)
""")
if hasattr(aten, "_grouped_mm"):
    ends = torch.tensor([2, 2, N], dtype=torch.int32)
    direct("""
(4,) aten._grouped_mm(g, aux(3, 4, 8), ends); aten._grouped_mm(aux(3, 8, 4), aten.t(g), ends)
    aten._grouped_mm(aux(N, 8).t(), g, ends); aten._grouped_mm(aten.t(g), aux(N, 8), ends)
""")


def call_direct(name: str, index: list[int]) -> tuple[object, object]:
    """The op on a sliced gradient and on the same gradient dense."""
    trailing, op = DIRECT[name]
    values = (aux(len(index), *trailing) % 1) * 0.9
    dense = torch.zeros(N, *trailing).index_add(0, torch.tensor(index), values)
    g = sliced(values, index, unique=len(set(index)) == len(index))
    with torch._C.DisableTorchFunctionSubclass():
        out = op(g)
        if type(out) is RowGrad:
            claimed, out = out.stride(), out.plain()  # autograd chooses kernels by the strides
            assert claimed == out.stride(), f"strides {claimed} are claimed"
    return out, op(dense)
