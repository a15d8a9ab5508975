"""Every rule against the dense truth: one small function per op, many layouts of the batch, every kind of rows."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import rowprop
from cuda_kernels import KERNELS
from rowprop import host
from rowprop.backprop.layout import Layout
from rowprop.backprop.rowgrad import RowGrad
from rowprop.backprop.rules.registry import RULES, op_name, rule
from rowprop.backprop.sliced import RowSet, RowSlice

aten = torch.ops.aten
N = 6
ROWS = [[1, 4], [5], [0, 2, 2, 5], [3, 1, 0]]
CASES: dict[str, tuple[tuple[int, ...], Callable[[Tensor], Tensor], tuple[Tensor, ...]]] = {}

torch.manual_seed(0)


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def param(*shape: int) -> Tensor:
    return nn.Parameter(randn(*shape))


def case(name: str, shape: tuple[int, ...], f: Callable[[Tensor], Tensor], params: tuple[Tensor, ...] = ()) -> None:
    """``f`` maps x of ``shape`` (N, ...) to anything of N rows; ``params`` are the leaves it uses."""
    assert name not in CASES
    CASES[name] = (shape, f, params)


idx = torch.randint(0, 4, (N, 3))
perm = torch.randperm(N)
w43 = param(4, 3)
case("linear", (N, 4), lambda x: F.linear(x, w43.t()), (w43,))
case("linear3", (N, 5, 4), lambda x: F.linear(x, w43.t()), (w43,))
case("lin_seqfirst", (N, 5, 4), lambda x: F.linear(x.transpose(0, 1), w43.t()).transpose(0, 1), (w43,))
for g in (1, 2):
    for d in (1, 2, 3):
        cw = param(4, 4 // g, *[3] * d)
        cb = param(4)
        case(
            f"conv{d}d_g{g}",
            (N, 4) + (7,) * d,
            lambda x, cw=cw, cb=cb, g=g, d=d: getattr(F, f"conv{d}d")(x, cw, cb, padding=2, dilation=2, groups=g),
            (cw, cb),
        )
        tw = param(4, 2, *[3] * d)
        case(
            f"convT{d}d_g{g}",
            (N, 4) + (5,) * d,
            lambda x, cw=tw, g=g, d=d: getattr(F, f"conv_transpose{d}d")(x, cw, stride=2, groups=g),
            (tw,),
        )
for name in [
    "relu",
    "gelu",
    "silu",
    "mish",
    "elu",
    "selu",
    "celu",
    "leaky_relu",
    "hardtanh",
    "relu6",
    "hardsigmoid",
    "hardswish",
    "softplus",
    "softsign",
    "tanhshrink",
    "hardshrink",
    "softshrink",
    "logsigmoid",
    "sigmoid",
    "tanh",
]:
    case(name, (N, 5), lambda x, n=name: getattr(F, n)(x))
for name in [
    "exp",
    "log1p",
    "sin",
    "cos",
    "abs",
    "sqrt",
    "rsqrt",
    "square",
    "reciprocal",
    "erf",
    "atan",
    "tan",
    "sinh",
    "expm1",
    "lgamma",
    "digamma",
    "sigmoid",
    "logit",
    "frac",
    "round",
    "sign",
    "trunc",
]:
    case("t_" + name, (N, 5), lambda x, n=name: getattr(torch, n)(x.abs() * 0.3 + 0.2))
pw = param(3)
case("prelu", (N, 3, 4), lambda x: F.prelu(x, pw), (pw,))
case("glu", (N, 6), lambda x: F.glu(x, 1))
lw, lb = param(4), param(4)
case("ln", (N, 3, 4), lambda x: F.layer_norm(x, (4,), lw, lb), (lw, lb))
case("ln_sf", (N, 3, 4), lambda x: F.layer_norm(x.transpose(0, 1), (4,), lw, lb).transpose(0, 1), (lw, lb))
l2 = param(3, 4)
case("ln2", (N, 3, 4), lambda x: F.layer_norm(x, (3, 4), l2), (l2,))
case("rms", (N, 3, 4), lambda x: F.rms_norm(x, (4,), lw), (lw,))
case("gn", (N, 4, 5), lambda x: F.group_norm(x, 2, lw, lb), (lw, lb))
case("gn2d", (N, 4, 3, 3), lambda x: F.group_norm(x, 2, lw, lb), (lw, lb))
case(
    "gn2d_over_batch_channels_last",
    (N, 4, 3, 3),
    lambda x: F.group_norm(x.transpose(0, 1).contiguous(memory_format=torch.channels_last), 2).transpose(0, 1),
)
case("gn2d_expanded", (N, 4, 3, 3), lambda x: F.group_norm(x, 2, lw, lb).mean((2, 3)), (lw, lb))
case("in", (N, 4, 5), lambda x: F.instance_norm(x, weight=lw, bias=lb), (lw, lb))
case(
    "in_eval",
    (N, 4, 5),
    lambda x: F.instance_norm(x, torch.zeros(4).double(), torch.ones(4).double(), lw, lb, use_input_stats=False),
    (lw, lb),
)
case(
    "bn_eval",
    (N, 4, 5),
    lambda x: F.batch_norm(x, torch.zeros(4).double(), torch.ones(4).double() * 2, lw, lb),
    (lw, lb),
)
case(  # the gradient has another order of memory, and a single row
    "bn_eval_mixed",
    (N, 4, 5, 5),
    lambda x: (
        F.batch_norm(x, lw.detach(), lw.detach().abs(), lw, lb)
        .permute(2, 0, 3, 1)
        .flatten(2)
        .tanh()
        .mT.mT.transpose(0, 1)
    ),
    (lw, lb),
)
case("bn_train", (N, 4, 5), lambda x: F.batch_norm(x, None, None, lw, lb, training=True), (lw, lb))
case("bn_any", (N, 4, 5), lambda x: aten._batch_norm_with_update(x, lw, lb, randn(4), randn(4), 0.1, 1e-5)[0], (lw, lb))
case(
    "bn_any_eval",
    (N, 4, 5),
    lambda x: aten._batch_norm_no_update(x, lw, lb, torch.zeros(4).double(), torch.ones(4).double() * 2, 0.1, 1e-5)[0],
    (lw, lb),
)
case(
    "bn_on_batch_as_channel",
    (N, 4, 5),
    lambda x: F.batch_norm(x.transpose(0, 1), None, None, training=True).transpose(0, 1),
)
case("softmax", (N, 5), lambda x: x.softmax(1))
case("lsm", (N, 5), lambda x: x.log_softmax(-1))
case("softmax_batch", (N, 5), lambda x: x.softmax(0))
case("softmax_sf", (N, 5, 3), lambda x: x.transpose(0, 1).softmax(0).transpose(0, 1))
tgt = torch.randint(0, 5, (N,))
tgt2 = torch.randint(0, 4, (N, 3, 3))
case("ce", (N, 5), lambda x: F.cross_entropy(x, tgt, reduction="none"))
case(
    "ce_w_ign",
    (N, 5),
    lambda x: F.cross_entropy(
        x,
        torch.where(tgt == 1, -100, tgt),
        weight=torch.rand(5).double() * 0 + 2,
        reduction="none",
        label_smoothing=0.1,
    ),
)
case("ce2d", (N, 4, 3, 3), lambda x: F.cross_entropy(x, tgt2, reduction="none"))
case(
    "ce_tok",
    (N, 3, 5),
    lambda x: F.cross_entropy(x.flatten(0, 1), tgt2[:, :, 0].flatten(), reduction="none").view(N, 3),
)
case("ce_tok_t", (N, 3, 5), lambda x: F.cross_entropy(x.transpose(1, 2), tgt2[:, :, 0], reduction="none"))
case("ce_prob", (N, 5), lambda x: F.cross_entropy(x, torch.full((N, 5), 0.2).double(), reduction="none"))
for loss in ["mse_loss", "smooth_l1_loss", "huber_loss", "l1_loss", "soft_margin_loss", "poisson_nll_loss"]:
    y = randn(N, 5).sign() if "soft" in loss else randn(N, 5)
    case(loss, (N, 5), lambda x, loss=loss, y=y: getattr(F, loss)(x, y, reduction="none"))
case("bce", (N, 5), lambda x: F.binary_cross_entropy(x.sigmoid(), torch.full((N, 5), 0.3).double(), reduction="none"))
case(
    "bcel",
    (N, 5),
    lambda x: F.binary_cross_entropy_with_logits(
        x, torch.full((N, 5), 0.3).double(), pos_weight=torch.full((5,), 2.0).double(), reduction="none"
    ),
)
case("kl", (N, 5), lambda x: F.kl_div(x.log_softmax(1), torch.full((N, 5), 0.2).double(), reduction="none"))
case("mm", (N, 5), lambda x: F.multi_margin_loss(x, tgt, reduction="none"))
mlt = torch.tensor([[0, 2, -1, 0, 0]] * N)
case("mlm", (N, 5), lambda x: F.multilabel_margin_loss(x, mlt, reduction="none"))
case("mlsm", (N, 5), lambda x: F.multilabel_soft_margin_loss(x, torch.ones(N, 5).double(), reduction="none"))
case("gnll", (N, 5), lambda x: F.gaussian_nll_loss(x, randn(N, 5) * 0, x.exp(), reduction="none"))
case("triplet", (N, 5), lambda x: F.triplet_margin_loss(x, x * 2 + 1, x.flip(1), reduction="none"))
case("cosemb", (N, 5), lambda x: F.cosine_embedding_loss(x, x.flip(1) + 1, torch.ones(N), reduction="none"))
case("cossim", (N, 5), lambda x: F.cosine_similarity(x, x.flip(1) + 1))
case("pairdist", (N, 5), lambda x: F.pairwise_distance(x, x.flip(1)))
case(
    "ctc",
    (N, 7, 5),
    lambda x: F.ctc_loss(
        x.transpose(0, 1).log_softmax(2),
        torch.ones(N, 2).long(),
        torch.full((N,), 7),
        torch.full((N,), 2),
        reduction="none",
    ),
)
# attention


def q(x: Tensor) -> Tensor:
    """Two heads of width 3."""
    return x.view(N, 4, 2, 3).transpose(1, 2)


for nm, kw in dict(
    plain={},
    causal=dict(is_causal=True),
    mTT=dict(attn_mask=randn(4, 4)),
    m1=dict(attn_mask=randn(1, 1, 4, 4)),
    mN=dict(attn_mask=randn(N, 1, 4, 4)),
    mNH=dict(attn_mask=randn(N, 2, 4, 4)),
    mb=dict(attn_mask=torch.ones(4, 4).tril().bool()),
    mbN=dict(attn_mask=torch.ones(N, 1, 4, 4).tril().bool()),
    mH=dict(attn_mask=randn(2, 4, 4)),
).items():
    case(
        "sdpa_" + nm,
        (N, 4, 6),
        lambda x, kw=kw: (
            F.scaled_dot_product_attention(q(x), q(x * 2), q(x + 1), **kw).transpose(1, 2).reshape(N, 4, 6)
        ),
    )
mTN = randn(N, N)
case(
    "sdpa_T=N",
    (N, N, 6),
    lambda x: (
        F.scaled_dot_product_attention(*[x.view(N, N, 2, 3).transpose(1, 2)] * 3, attn_mask=mTN)
        .transpose(1, 2)
        .reshape(N, N, 6)
    ),
)
case("sdpa_3d", (N, 4, 6), lambda x: F.scaled_dot_product_attention(x, x, x))
case("sdpa_gqa", (N, 4, 6), lambda x: F.scaled_dot_product_attention(q(x), q(x)[:, :1], q(x)[:, :1], enable_gqa=True))
case(  # keys repeated as in Llama: the heads share memory, and the kernel assumes a stride of 1 for the width
    "sdpa_expanded",
    (N, 4, 6),
    lambda x: F.scaled_dot_product_attention(q(x), *[q(x)[:, :1].expand(-1, 2, -1, -1)] * 2),
)
for bf in (True, False):
    mha = nn.MultiheadAttention(6, 2, batch_first=bf).double()
    case(
        f"mha{bf}",
        (N, 4, 6),
        lambda x, mha=mha, bf=bf: (
            mha(x, x, x, need_weights=False)[0]
            if bf
            else mha(*[x.transpose(0, 1)] * 3, need_weights=True)[0].transpose(0, 1)
        ),
        tuple(mha.parameters()),
    )
# pooling
for d in (1, 2, 3):
    for nm in ("max_pool", "avg_pool", "adaptive_avg_pool", "adaptive_max_pool"):
        arg = 2
        case(f"{nm}{d}d", (N, 3) + (6,) * d, lambda x, nm=nm, d=d: getattr(F, f"{nm}{d}d")(x, 2))
case("avgpool_global", (N, 3, 4, 4), lambda x: F.adaptive_avg_pool2d(x, 1))
case("lp", (N, 3, 4, 4), lambda x: F.lp_pool2d(x, 2, 2))
case("pool_on_seqfirst", (N, 3, 8), lambda x: F.max_pool1d(x.transpose(0, 1), 2).transpose(0, 1))
case("pool_unbatched", (N, 8, 8), lambda x: F.max_pool2d(x, 2))
case("avgpool_unbatched", (N, 8, 8), lambda x: F.avg_pool2d(x, 2))
for p in ("constant", "reflect", "replicate", "circular"):
    case("pad1" + p, (N, 3, 6), lambda x, p=p: F.pad(x, (1, 2), mode=p))
    case("pad2" + p, (N, 3, 6, 6), lambda x, p=p: F.pad(x, (1, 2, 0, 1), mode=p))
case("padval", (N, 3), lambda x: F.pad(x, (1, 1), value=3.0))
case("padneg", (N, 5), lambda x: F.pad(x, (-1, -1)))
for m in ("nearest", "bilinear", "bicubic", "nearest-exact", "area"):
    case("up_" + m, (N, 3, 4, 4), lambda x, m=m: F.interpolate(x, scale_factor=2, mode=m))
case("up_lin", (N, 3, 4), lambda x: F.interpolate(x, scale_factor=2, mode="linear"))
case("up_tri", (N, 3, 4, 4, 4), lambda x: F.interpolate(x, size=6, mode="trilinear"))
if hasattr(aten, "_upsample_lanczos2d_aa"):
    case("up_lanczos", (N, 3, 6, 6), lambda x: F.interpolate(x, size=3, mode="lanczos", antialias=True))
case("up_aa", (N, 3, 6, 6), lambda x: F.interpolate(x, size=3, mode="bilinear", antialias=True))
# embedding / index
emb = param(7, 4)
ids = torch.randint(0, 7, (N, 3))
case("emb", (N, 1), lambda x: F.embedding(ids, emb).sum((1, 2)).unsqueeze(1) * x, (emb,))
case("emb_sf", (N, 1), lambda x: F.embedding(ids.t(), emb).sum((0, 2)).unsqueeze(1) * x, (emb,))
case("emb_width", (N, 4), lambda x: F.embedding(ints(4, 5), x.t()).t())
case("emb_freq", (N, 1), lambda x: F.embedding(ids, emb, scale_grad_by_freq=True).sum((1, 2)).unsqueeze(1) * x, (emb,))
case("embag", (N, 1), lambda x: F.embedding_bag(ids, emb, mode="mean").sum(1, keepdim=True) * x, (emb,))
case("gather", (N, 4), lambda x: x.gather(1, idx))
case(
    "scatter_partial",
    (N, 4),
    lambda x: torch.zeros(N, 4, dtype=x.dtype).scatter(1, torch.arange(3).expand(3, 3), x[:3, :3].exp()) * 2 + x,
)
case("gather_partial", (N, 4), lambda x: torch.cat([x.gather(1, idx[:3]), x[3:, :3]]))
case(
    "scatter",
    (N, 3),
    lambda x: torch.zeros(N, 4).double().scatter(1, torch.stack([torch.randperm(4)[:3] * 0 + torch.arange(3)] * N), x),
)
case("scatter_add", (N, 3), lambda x: torch.zeros(N, 4).double().scatter_add(1, idx, x))
case("index_select1", (N, 4), lambda x: x.index_select(1, torch.tensor([0, 2, 2])))
case("index_select0", (N, 4), lambda x: x.index_select(0, perm))
case("idx_arange", (N, 4, 3), lambda x: x[torch.arange(N), idx[:, 0]])
case("idx_perm", (N, 4), lambda x: x[perm])
case("idx_rep", (N, 4), lambda x: torch.cat([x[[0, 0, 1]], x[[3, 3, 3]]]))
case("idx_cols", (N, 4, 5), lambda x: x[:, [0, 2], :][:, :, [1, 1]])
case("idx_cols2", (N, 4, 5), lambda x: x[:, [0, 2], [1, 3]])
case("idx_apart", (N, 4, 5, 3), lambda x: x[:, [0, 2], :, [1, 2]].transpose(0, 1))
case("idx_2d", (N, 5, 5, 2), lambda x: x[:, torch.tensor([[0, 1], [2, 3]]), torch.tensor([[1, 1], [0, 0]])])
case("mask_fill", (N, 4), lambda x: x.masked_fill(x > 0, 3.0))
case("where", (N, 4), lambda x: torch.where(x > 0, x, x * 2))
case("where2", (N, 4), lambda x: torch.where(x > 0, x, torch.zeros(())))
case("masked_select", (N, 4), lambda x: x * (torch.masked_select(x, x > -99).sum()))
case("max_dim", (N, 4, 5), lambda x: x.max(1)[0])
case("max_dim_t", (N, 4, 5), lambda x: x.transpose(0, 1).max(0)[0])
case("amax", (N, 4, 5), lambda x: x.amax(2))
case("min_dim", (N, 4), lambda x: x.min(1)[0])
case("sort", (N, 4), lambda x: x.sort(1)[0])
case("topk", (N, 4), lambda x: x.topk(2, 1)[0])
case("kth", (N, 4), lambda x: x.kthvalue(2, 1)[0])
case("median", (N, 5), lambda x: x.median(1)[0])
case("mode", (N, 5), lambda x: x.mode(1)[0])
case("max_batch", (N, 5), lambda x: x.max(0)[0] + x)
case("maxall", (N, 5), lambda x: x * x.max())
case("cummax", (N, 5), lambda x: x.cummax(1)[0])
case("sortbatch", (N, 5), lambda x: x.sort(0)[0])
# shape
case("chunk", (N, 6), lambda x: (lambda a, b: a * b.exp())(*x.chunk(2, 1)))
case("chunk3", (N, 4, 6), lambda x: (lambda a, b, d: a * b + d)(*x.chunk(3, 2)))
case("chunk_unused", (N, 6), lambda x: x.chunk(3, 1)[1].exp())
case("chunk_gated", (N, 6), lambda x: F.silu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1])
case("split", (N, 6), lambda x: torch.cat(x.split([1, 2, 3], 1)[::-1], 1))
case("split_unused", (N, 6), lambda x: torch.cat(x.split([1, 2, 3], 1)[::2], 1).exp())
case("split_rows", (N, 6), lambda x: torch.cat(x.split([2, 4])[::-1]))
case("split_rows_unused", (N, 6), lambda x: torch.cat([x, x]).split([N, N])[1].exp())
case("split_of_two", (N, 6), lambda x: (lambda a, b: a[0] * b[0] + a[1])(x.split([2, 2, 2], 1), x.exp().split(2, 1)))
case("unbind", (N, 3, 4), lambda x: torch.stack([a.exp() for a in x.unbind(1)], 1))
case("unbind_last_only", (N, 3, 4), lambda x: x.unbind(1)[-1])
case("unbind_some_twice", (N, 5, 4), lambda x: (lambda a: a[1].exp() * a[1] + a[3])(x.unbind(1)))
case("unbind_time_first", (N, 3, 4), lambda x: x.transpose(0, 1).unbind()[1].exp())
for name, parts in {
    "unsafe_chunk": lambda x: x.unsafe_chunk(3, 1),
    "unsafe_split": lambda x: x.unsafe_split_with_sizes([1, 2, 3], 1),
    "split_copy": lambda x: torch.split_copy(x, 2, 1),
    "split_sizes_copy": lambda x: torch.split_with_sizes_copy(x, [1, 2, 3], 1),
    "unbind_copy": lambda x: torch.unbind_copy(x, 1),
}.items():
    case(f"{name}_unused", (N, 6), lambda x, parts=parts: parts(x)[1].exp())
case("stack", (N, 4), lambda x: torch.stack([x, x * 2], 1))
case("stack0", (N, 4), lambda x: torch.stack([x, x * 2], 0).transpose(0, 1))
case("catb", (N, 4), lambda x: torch.cat([x, x * 2], 0).view(2, N, 4).transpose(0, 1))
case("cat_dense", (N, 4), lambda x: torch.cat([x, w43[0].expand(N, 3)], 1), (w43,))
case("roll", (N, 4, 5), lambda x: x.roll((1, 2), (1, 2)))
case("rollb", (N, 4), lambda x: x.roll(1, 0))
case("flip", (N, 4), lambda x: x.flip(1))
case("roll_none", (N, 4), lambda x: x.roll(3))
case("cumsum", (N, 4), lambda x: x.cumsum(1))
case("cumsumb", (N, 4), lambda x: x.cumsum(0))
case("cumprod", (N, 4), lambda x: x.cumprod(1))
case("lcse", (N, 4), lambda x: x.logcumsumexp(1))
case("lse", (N, 4), lambda x: x.logsumexp(1))
case("prod", (N, 4), lambda x: x.prod(1))
case("var", (N, 4), lambda x: x.var(1))
case("std", (N, 4), lambda x: x.std(1))
case("norm", (N, 4), lambda x: x.norm(dim=1))
case("normalize", (N, 4), lambda x: F.normalize(x))
case("meanall", (N, 4), lambda x: x * x.mean())
case("mean0", (N, 4), lambda x: x - x.mean(0))
case("stdall", (N, 4), lambda x: x / x.std())
case(
    "perm",
    (N, 3, 4, 5),
    lambda x: x.permute(2, 0, 3, 1).reshape(4, N * 5, 3).exp().view(4, N, 5, 3).permute(1, 0, 2, 3),
)
case(
    "merge_both",
    (N, 3, 4),
    lambda x: F.linear(x.permute(1, 0, 2).reshape(3 * N, 4), w43.t()).view(3, N, 3).transpose(0, 1),
    (w43,),
)
case(
    "merge_outer_inner",
    (N, 2, 3, 4),
    lambda x: F.linear(x.transpose(0, 1).reshape(2 * N * 3, 4), w43.t()).view(2, N, 3, 3).transpose(0, 1),
    (w43,),
)
case("minor", (N, 3), lambda x: F.linear(x.t().reshape(-1, N).t() @ w43.t()[:3], torch.eye(4).double()), (w43,))
case("expand", (N, 1, 4), lambda x: x.expand(N, 3, 4) * w43.t().exp(), (w43,))
case("bcast", (N, 4), lambda x: (x.unsqueeze(1) * w43.t().exp()).sum(2), (w43,))
case("repeat", (N, 2), lambda x: x.repeat(1, 3))
case("ri", (N, 2), lambda x: x.repeat_interleave(3, 1))
case("ri0", (N, 2), lambda x: x.repeat_interleave(2, 0).view(N, 2, 2))
case("tile", (N, 2), lambda x: x.tile(2, 2).view(2, N, 4).transpose(0, 1))
case("squeeze", (N, 1, 4, 1), lambda x: x.squeeze().exp())
case("squeeze2", (N, 1, 4), lambda x: x.squeeze(1).unsqueeze(-1).squeeze(-1))
case("slice", (N, 6), lambda x: x[:, 1:5:2] * 2)
case("sliceb", (N, 6), lambda x: torch.cat([x[:2], x[2:].exp()], 0))
case("select", (N, 3, 4), lambda x: x[:, -1])
case("select2", (N, 3, 4), lambda x: x[..., 0])
case("setitem", (N, 3), lambda x: (lambda y: (y.__setitem__((slice(None), 0), 2 * y[:, 1].clone()), y)[1])(x * 1))
case("inplace_relu", (N, 3), lambda x: (x * 1).relu_())
case("diag", (N, 3, 3), lambda x: x.diagonal(dim1=1, dim2=2))
case("tril", (N, 3, 3), lambda x: x.tril())
case("unfoldt", (N, 7), lambda x: x.unfold(1, 3, 2))
case("diag_embed", (N, 3), lambda x: torch.diag_embed(x))
case("im2col", (N, 2, 5, 5), lambda x: F.unfold(x, 3))
case("fold", (N, 8, 4), lambda x: F.fold(x, (3, 3), 2))
case("pixsh", (N, 8, 2, 2), lambda x: F.pixel_shuffle(x, 2))
case("pixun", (N, 2, 4, 4), lambda x: F.pixel_unshuffle(x, 2))
case("chsh", (N, 4, 2, 2), lambda x: F.channel_shuffle(x, 2))
case("bmm", (N, 3, 4), lambda x: torch.bmm(x, x.transpose(1, 2)))
case("bmm_w", (N, 3, 4), lambda x: torch.matmul(x, w43.expand(N, 4, 3)), (w43,))
case("baddbmm", (N, 3, 4), lambda x: torch.baddbmm(x @ w43, x, x.transpose(1, 2)), (w43,))
case("einsum", (N, 3, 4), lambda x: torch.einsum("nij,nkj,jl->nikl", x, x, w43), (w43,))
case("einsum2", (N, 3, 4), lambda x: torch.einsum("nij,mij->nm", x, x))
case("mv", (N, 4), lambda x: x @ w43[:, 0], (w43,))
case("xxt", (N, 4), lambda x: x @ x.t())
case("outer", (N, 4), lambda x: torch.outer(x[:, 0], w43[0]), (w43,))
case("dot", (N, 4), lambda x: x * torch.dot(x[:, 0], x[:, 1]))
case("addmm", (N, 4), lambda x: torch.addmm(x[:, :3], x, w43), (w43,))
case("addmv", (N, 4), lambda x: torch.addmv(x[:, 0], x, w43[:, 0]), (w43,))
case("mm_batchcontract", (N, 4), lambda x: x @ (x.t() @ x))
bl = nn.Bilinear(4, 4, 3).double()
case("bilinear", (N, 4), lambda x: bl(x, x * 2), tuple(bl.parameters()))
case("fft", (N, 8), lambda x: torch.fft.rfft(x).abs())
case("fft2", (N, 4, 4), lambda x: torch.fft.fft2(x).real)
case("grid", (N, 2, 4, 4), lambda x: F.grid_sample(x, x[:, :, :, :2].permute(0, 2, 3, 1).tanh(), align_corners=False))
case("affine", (N, 6), lambda x: F.affine_grid(x.view(N, 2, 3), (N, 1, 3, 3), align_corners=False))
case("dropout", (N, 4), lambda x: F.dropout(x, 0.5))
case("cdist", (N, 3, 4), lambda x: torch.cdist(x, x * 2))
case("det", (N, 3, 3), lambda x: torch.det(x))
case("inv", (N, 3, 3), lambda x: torch.linalg.inv(x + 5 * torch.eye(3)))
case("lrn", (N, 4, 5), lambda x: F.local_response_norm(x, 2))
case("maxunpool", (N, 2, 4, 4), lambda x: F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), 2))
case("clamp", (N, 4), lambda x: x.clamp(-0.5, 0.5))
case("maximum", (N, 4), lambda x: torch.maximum(x, x.flip(1)))
case("lerp", (N, 4), lambda x: torch.lerp(x, x * 2, 0.3))
case("addcmul", (N, 4), lambda x: torch.addcmul(x, x, x))
case("foreach", (N, 4), lambda x: torch.cat(torch._foreach_tanh(torch._foreach_mul(x.chunk(2, 1), [2.0, 3.0])), 1))
case("pow", (N, 4), lambda x: x.abs() ** x)
case("atan2", (N, 4), lambda x: torch.atan2(x, x.flip(1)))
case("div", (N, 4), lambda x: x / (x.flip(1).abs() + 1))
case("fmod", (N, 4), lambda x: x % 1.0)
case("to", (N, 4), lambda x: x.float().double())
case("complex", (N, 4), lambda x: torch.view_as_real(torch.view_as_complex(x.view(N, 2, 2)) * (1 + 2j)))
case("index_put", (N, 4), lambda x: (x * 1).index_put((torch.arange(N), idx[:, 0]), x[:, 0]))
case("index_add", (N, 4), lambda x: (x * 1).index_add(0, perm, x))
case("heaviside", (N, 4), lambda x: x.relu().sum(1).sqrt() if False else x.relu())
case(
    "moe",
    (N, 4),
    lambda x: torch.zeros_like(x).index_add(0, torch.tensor([0, 2, 5]), F.linear(x[[0, 2, 5]], w43 @ w43.t())),
    (w43,),
)
case("rnn_like", (N, 3, 4), lambda x: torch.stack([(x[:, i] @ w43).tanh() for i in range(3)], 1), (w43,))
for nm in ("LSTM", "GRU", "RNN"):
    for bf in (True, False):
        r = getattr(nn, nm)(4, 3, batch_first=bf, bidirectional=True).double()
        case(
            f"{nm}{bf}",
            (N, 3, 4),
            lambda x, r=r, bf=bf: r(x)[0] if bf else r(x.transpose(0, 1))[0].transpose(0, 1),
            tuple(r.parameters()),
        )

case("ln_over_batch", (N, 3), lambda x: F.layer_norm(x.t(), (N,)).t())
case("rms_over_batch", (N, 3), lambda x: F.rms_norm(x.t(), (N,)).t())
case("max_pool_over_batch", (N, 3), lambda x: F.max_pool1d(x.t().unsqueeze(0), 3, 1, 1)[0].t())
case("avg_pool_over_batch", (N, 3), lambda x: F.avg_pool1d(x.t().unsqueeze(0), 3, 1, 1)[0].t())
case("upsample_batch", (N, 3), lambda x: F.interpolate(x.t().unsqueeze(0), size=N, mode="linear")[0].t())
case("idx_negative", (N, 4, 3), lambda x: x[torch.arange(N) - N, idx[:, 0]])
case("idx_negative_rows", (N, 4), lambda x: torch.stack([x[torch.arange(N) - N][:, :2], x[perm - N][:, 2:]], 1))
case(
    "complex_transposed",
    (N, 2, 3),
    lambda x: torch.view_as_real(torch.complex(x[:, 0] * 1, x[:, 1] * 1)).transpose(1, 2),
)
case("index_add_one", (N, 4), lambda x: (x * 1).index_add(0, torch.tensor([4]), w43[:, 0].exp().unsqueeze(0)), (w43,))
bags = torch.tensor([0, 2, 2, 3, 7, 8])  # one of them empty
for nm in ("sum", "mean", "max"):
    case(
        f"embag_{nm}",
        (N, 1),
        lambda x, nm=nm: F.embedding_bag(torch.arange(9) % 7, emb, bags, mode=nm).sum(1, keepdim=True) * x,
        (emb,),
    )
    if nm != "max":
        case(
            f"embag_{nm}_last",
            (N, 1),
            lambda x, nm=nm: (
                F.embedding_bag(
                    torch.arange(9) % 7,
                    emb,
                    torch.cat([bags, torch.tensor([9])]),
                    mode=nm,
                    include_last_offset=True,
                    per_sample_weights=torch.arange(9).double() if nm == "sum" else None,
                ).sum(1, keepdim=True)
                * x
            ),
            (emb,),
        )
case(
    "ctc_joined",
    (N, 7, 5),
    lambda x: F.ctc_loss(
        x.transpose(0, 1).log_softmax(2),
        torch.arange(1, 1 + int((torch.arange(N) % 3).sum())) % 4 + 1,
        torch.arange(2, N + 2).clamp(max=7),
        torch.arange(N) % 3,
        reduction="none",
    ),
)
case("cdist_codebook", (N, 4), lambda x: torch.cdist(x, w43.t()), (w43,))
case("cdist_among", (N, 4), lambda x: torch.cdist(w43.t(), x).t(), (w43,))
case("mask_columns", (N, 4), lambda x: x[:, torch.tensor([True, False, True, True])])
case("mask_rows", (N, 4), lambda x: torch.cat([x[torch.arange(N) < 4], x[torch.arange(N) >= 4]]))
case("lu_solve", (N, 3, 3), lambda x: torch.linalg.solve(x.detach() + 5 * torch.eye(3), x))
case("conj", (N, 4), lambda x: torch.view_as_real(torch.complex(x[:, :2] * 1, x[:, 2:] * 1).conj().resolve_conj()))
case("conv_over_batch", (N, 4), lambda x: F.conv1d(x.t().unsqueeze(0), torch.ones(4, 4, 3).double(), padding=1)[0].t())

experts = torch.randint(0, 3, (N * 3,))


def mixture(x: Tensor) -> Tensor:
    """Tokens of a sequence are routed one by one; the residual stream has whole sequences."""
    tokens = x.reshape(-1, 4)
    out = torch.zeros_like(tokens)
    for e in range(3):
        place = (experts == e).nonzero().squeeze(1)
        out = out.index_add(0, place, (tokens[place] @ w43 @ w43.t()).tanh())
    return x + out.view_as(x)


case("experts", (N, 3, 4), lambda x: mixture(mixture(x)), (w43,))
case("experts_time_first", (N, 3, 4), lambda x: mixture(mixture(x.transpose(0, 1))).transpose(0, 1), (w43,))


def in_place(view: Callable[[Tensor], Tensor], write: Callable[[Tensor, Tensor], object]) -> Callable[[Tensor], Tensor]:
    """Write to a view of a new tensor, then read the tensor and the view."""

    def f(x: Tensor) -> Tensor:
        base = x.sin().contiguous()
        part = view(base)
        write(part, x.cos())
        return torch.cat([base.flatten(1), (part * 3).reshape(N, -1)], 1)

    return f


def second(x: Tensor) -> Tensor:
    return x[:, 1]


writes: dict[str, Callable[[Tensor, Tensor], object]] = {
    "mul": lambda part, x: part.mul_(x.flatten(1)[:, :1].view(N, *[1] * (part.ndim - 1))),
    "exp": lambda part, x: part.exp_(),
    "zero": lambda part, x: part.zero_(),
    "copy": lambda part, x: part.copy_(x.flatten(1)[:, : part[0].numel()].view_as(part)),
}
for name, write in writes.items():
    case(f"in_place_flat_{name}", (N, 3, 4), in_place(lambda x: x.flatten(1), write))
    case(f"in_place_select_{name}", (N, 3, 4), in_place(second, write))
    case(f"in_place_window_{name}", (N, 3, 4, 4), in_place(lambda x: x[:, 1:, ::2, 1:3], write))
    case(f"in_place_transposed_{name}", (N, 3, 4), in_place(lambda x: x.mT[:, 1:], write))
case("in_place_twice", (N, 3, 4), in_place(second, lambda part, x: (part.mul_(x[:, 0]), part[:, 1].exp_())))
case("in_place_rows", (N, 3, 4), in_place(lambda x: x, lambda part, x: part[1:3].mul_(x[:2])))
case(
    "in_place_time_first",
    (N, 3, 4),
    lambda x: in_place(second, writes["exp"])(x.transpose(0, 1).tanh().transpose(0, 1)) * 2,
)


def time_first(x: Tensor) -> Tensor:
    base = x.transpose(0, 1).sin().contiguous()
    base[1].exp_()
    return base.transpose(0, 1)


case("in_place_of_time_first", (N, 3, 4), time_first)


square = randn(N, N)
case("along_rows_and_columns", (N, N), lambda x: ((x * square).t() * square).t())
twice_read, columns = torch.tensor([0, 2, 3, 1, 2, 5]), torch.tensor([0, 1, 2, 0, 2, 1])
case(
    "rows_read_twice_over_moved_rows",
    (N, 3),
    lambda x: torch.zeros(N, 3, dtype=x.dtype).index_add(0, perm, x)[twice_read, columns],
)


# Complex numbers: a lazy conjugate is a flag on the memory of the number, and so is the lazy negative (the imaginary
# part of a conjugate). Red when: the memory below a flag is gathered as it is, or a gather is remembered without it.
def as_complex(x: Tensor) -> Tensor:
    return torch.complex(x, x.roll(1, 1))


zw, zv, zs = (nn.Parameter(torch.randn(*shape, dtype=torch.complex128)) for shape in [(4, 4), (4, 4), (4,)])
case("complex_layer", (N, 4), lambda x: torch.view_as_real((as_complex(x) @ zw * zs.conj()).conj() + zs), (zw, zs))
case(
    "complex_both_ways",
    (N, 4),
    lambda x: torch.view_as_real(as_complex(x) @ zw + as_complex(x).conj() @ zv),
    (zw, zv),
)
case(
    "complex_same_memory",
    (N, 4),
    lambda x: (lambda z: torch.view_as_real(z @ zw + z.conj() @ zv))(as_complex(x)),
    (zw, zv),
)
case(
    "negative_view",
    (N, 1, 1),
    lambda x: torch.linalg.solve_triangular(as_complex(x).conj().imag, x.exp(), upper=True),
)

# Bags of embeddings. Red when: the places of a kept bag's indices start at another bag's offset, or the weights of a
# kept bag's indices are taken by bag.
bag_ids, bag_starts = torch.arange(12) % 7, torch.tensor([0, 2, 2, 3, 7, 8])
for nm in ("sum", "mean", "max"):
    case(f"embag_2d_{nm}", (N, 1), lambda x, nm=nm: F.embedding_bag(ids, emb, mode=nm) * x, (emb,))
    case(
        f"embag_padding_{nm}",
        (N, 1),
        lambda x, nm=nm: F.embedding_bag(bag_ids, emb, bag_starts, mode=nm, padding_idx=2) * x,
        (emb,),
    )
    case(
        f"embag_merged_{nm}",
        (N, 2, 1),
        lambda x, nm=nm: F.embedding_bag(torch.arange(4 * N).view(2 * N, 2) % 7, emb, mode=nm).view(N, 2, 4) * x,
        (emb,),
    )
    case(
        f"embag_time_first_{nm}",
        (N, 2, 1),
        lambda x, nm=nm: (
            F.embedding_bag(torch.arange(4 * N).view(2 * N, 2) % 7, emb, mode=nm).view(2, N, 4).transpose(0, 1) * x
        ),
        (emb,),
    )
case(
    "embag_kinds",
    (N, 1),
    lambda x: F.embedding_bag(bag_ids.int(), emb, bag_starts, mode="mean") * x,
    (emb,),
)
case("embag_weights_2d", (N, 3), lambda x: F.embedding_bag(ids, emb, per_sample_weights=x, mode="sum"), (emb,))
case(
    "embag_weights",
    (N, 2),
    lambda x: F.embedding_bag(bag_ids, emb, bag_starts, mode="sum", per_sample_weights=x.flatten(), padding_idx=3),
    (emb,),
)
case(
    "embag_weights_last",
    (N, 2),
    lambda x: F.embedding_bag(
        bag_ids,
        emb,
        torch.cat([bag_starts, torch.tensor([12])]),
        mode="sum",
        per_sample_weights=x.flatten(),
        include_last_offset=True,
    ),
    (emb,),
)
case("embag_freq", (N, 1), lambda x: F.embedding_bag(ids, emb, scale_grad_by_freq=True, mode="sum") * x, (emb,))
case("embag_width", (N, 4), lambda x: F.embedding_bag(ids[:4], torch.cat([x.T] * 7)[:, :N], mode="sum").T, ())

# Reductions into entries that an index names. Red when: the counts of a mean are taken for a gradient.
three = torch.tensor([0, 2, 2])
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    torch.zeros(1).index_reduce(0, torch.tensor([0]), torch.ones(1), "mean")  # it warns once that it is in beta
for reduce in ("sum", "prod", "mean", "amax", "amin"):
    for include in (True, False):
        case(
            f"scatter_reduce_{reduce}_{include}",
            (N, 4),
            lambda x, r=reduce, i=include: (x * 2).scatter_reduce(1, idx, x[:, :3].exp(), r, include_self=i),
        )
        case(
            f"scatter_reduce_time_first_{reduce}_{include}",
            (N, 4, 2),
            lambda x, r=reduce, i=include: (
                (x * 2)
                .transpose(0, 1)
                .scatter_reduce(
                    0, idx.t()[..., None].expand(3, N, 2), x[:, :3].exp().transpose(0, 1), r, include_self=i
                )
                .transpose(0, 1)
            ),
        )
        if reduce != "sum":
            case(
                f"index_reduce_{reduce}_{include}",
                (N, 4),
                lambda x, r=reduce, i=include: (x * 2).index_reduce(1, three, x[:, :3].exp(), r, include_self=i),
            )
            case(
                f"index_reduce_time_first_{reduce}_{include}",
                (N, 4, 2),
                lambda x, r=reduce, i=include: (
                    (x * 2)
                    .transpose(0, 1)
                    .index_reduce(0, three, x[:, :3].exp().transpose(0, 1), r, include_self=i)
                    .transpose(0, 1)
                ),
            )
case("scatter_reduce_rows", (N, 4), lambda x: (x * 2).scatter_reduce(0, perm[:, None].expand(N, 4), x.exp(), "mean"))
each = torch.stack([perm, perm.flip(0), perm, perm.roll(1)], 1)
case("scatter_reduce_each", (N, 4), lambda x: (x * 2).scatter_reduce(0, each, x.exp(), "mean"))
case("scatter_rows", (N, 4), lambda x: (x * 2).scatter_add(0, perm[:, None].expand(N, 4), x.exp()))
case("gather_rows", (N, 4), lambda x: x.gather(0, perm[:, None].expand(N, 4)))
case("gather_each", (N, 4), lambda x: x.gather(0, each))
case("gather_some_rows", (N, 4), lambda x: x.gather(0, perm[:3, None].expand(3, 4)).repeat(2, 1))
case("scatter_reduce_pooled", (N, 4), lambda x: torch.zeros(N, 4).double().scatter_reduce(1, idx, x[:, :3], "amax"))
case("index_reduce_rows", (N, 4), lambda x: (x * 2).index_reduce(0, perm, x.exp(), "mean"))
case("scatter_mean_of_weights", (N, 3), lambda x: x * w43.index_reduce(0, three, w43[:3].exp(), "mean")[2], (w43,))

# Masks over the batch and time. Red when: the order of a mask's entries is counted among the kept rows, or a mask of
# tokens is taken for one of single numbers.
spots = torch.rand(N, 4) > 0.5
spots[1], spots[4, :2] = torch.tensor([True, False, True, True]), True
row_spots = torch.tensor([True, False, True, True])
case("masked_scatter", (N, 4), lambda x: x.exp().masked_scatter(spots, (x * 3).flip(1)))
case("masked_scatter_rows", (N, 4), lambda x: x.exp().masked_scatter(row_spots, x * 3))
case("masked_scatter_weights", (N, 4), lambda x: x.exp().masked_scatter(spots, w43.flatten().repeat(2)), (w43,))
case(
    "masked_scatter_images",  # as models of text and images put the pieces of images into the text
    (N, 4, 3),
    lambda x: x.exp().masked_scatter(spots.unsqueeze(-1).expand(N, 4, 3), (x @ w43[:3]).tanh()),
    (w43,),
)
case(
    "masked_scatter_time_first",
    (N, 4, 3),
    lambda x: x.exp().transpose(0, 1).masked_scatter(spots.t().unsqueeze(-1), (x @ w43[:3]).tanh()).transpose(0, 1),
    (w43,),
)
case("masked_scatter_width", (N, 4), lambda x: x.exp().t().masked_scatter(spots.t()[:, :1], x.t() * 3).t())
case("masked_scatter_no_row", (N, 4), lambda x: x.exp().masked_scatter(torch.arange(N)[:, None] == 2, x * 3))
case("masked_select_rows", (N, 4), lambda x: torch.masked_select(x, torch.ones(N, 4).bool()).view(N, 4).exp())
case(
    "masked_select_back",
    (N, 4),
    lambda x: torch.zeros(N, 4).double().masked_scatter(spots, torch.masked_select(x, spots).exp()),
)
case(
    "mask_set",
    (N, 4, 3),
    lambda x: (x * 2).index_put((spots,), (x[spots] @ w43[:3]).tanh()),
    (w43,),
)
case("mask_set_zero", (N, 4), lambda x: (x * 2).index_put((spots,), x[0, 0]))
case(
    "mask_set_time_first",
    (N, 4, 3),
    lambda x: (x.transpose(0, 1) * 2).index_put((spots.t(),), x.transpose(0, 1)[spots.t()].exp()).transpose(0, 1),
)
case("idx_per_row", (N, 5, 3), lambda x: x[torch.arange(N)[:, None], idx])
case("idx_per_row_time_first", (N, 5, 3), lambda x: x.transpose(0, 1)[idx, torch.arange(N)[:, None]])
case("idx_per_row_set", (N, 5, 3), lambda x: (x * 2).index_put((torch.arange(N)[:, None], idx), x[:, :3].exp()))
case(
    "idx_more_than_rows", (N, 3), lambda x: x[torch.arange(N).repeat_interleave(2), idx[:, :2].flatten() % 3].view(N, 2)
)
case("index_copy", (N, 4), lambda x: (x * 2).index_copy(1, torch.tensor([0, 2]), x[:, :2].exp()))
case("index_copy_rows", (N, 4), lambda x: (x * 2).index_copy(0, perm, x.exp()))
case("index_fill_rows", (N, 4), lambda x: (x * 2).index_fill(0, torch.tensor([0, -2]), 3.0))
case("take", (N, 4), lambda x: torch.take(x, torch.arange(4 * N).view(N, 4).flip(1)))
case("take_most", (N, 2), lambda x: torch.take(x, torch.arange(24).view(N, 4) % 12))
case("put", (N, 4), lambda x: (x * 2).put(torch.arange(4 * N).view(N, 4).flip(1)[:, :2], x[:, :2]))
case("take_along", (N, 4, 3), lambda x: torch.take_along_dim(x, idx[:, :, None] % 4, 1))
case("select_scatter", (N, 4, 3), lambda x: (x * 2).select_scatter(x[:, 0].exp(), 1, 2))
case("slice_scatter", (N, 4, 3), lambda x: (x * 2).slice_scatter(x[:, :2].exp(), 1, 1, 3))
case("diagonal_scatter", (N, 4, 4), lambda x: (x * 2).diagonal_scatter(x[:, 0].exp(), 0, 1, 2))
case("select_scatter_row", (N, 4), lambda x: (x * 2).select_scatter(x[0].exp(), 0, 4))
case("cross", (N, 4, 3), lambda x: torch.linalg.cross(x, x.exp()))
case("cross_shared", (N, 4, 3), lambda x: torch.linalg.cross(x, w43.unsqueeze(0), dim=2), (w43,))
case(
    "cross_time_first",
    (N, 3, 4),
    lambda x: torch.linalg.cross(x.transpose(0, 1), x.exp().transpose(0, 1), dim=0).transpose(0, 1),
)
case("rot90", (N, 4, 4), lambda x: torch.rot90(x, 1, (1, 2)))
case("rot90_rows", (N, N), lambda x: torch.rot90(x, 1, (0, 1)))
case("cummin", (N, 4, 2), lambda x: x.transpose(0, 1).cummin(0)[0].transpose(0, 1))
case("cumprod_zeros", (N, 4), lambda x: x.relu().cumprod(1))
case("cumprod_time_first", (N, 4, 2), lambda x: x.transpose(0, 1).cumprod(0).transpose(0, 1))
case(
    "bn_train_rows_last",
    (N, 3, 4),
    lambda x: F.batch_norm(x.permute(2, 1, 0), None, None, training=True).permute(2, 1, 0),
)
case(
    "avg_pool_over_lines",
    (N, 3, 4),
    lambda x: F.avg_pool2d(x.transpose(0, 1)[None], (3, 1), 1, (1, 0))[0].transpose(0, 1),
)
case("cumprod_rows", (N, 4), lambda x: x.cumprod(0))


# The cases that cannot stay sliced, each with the ops that densify. A case that starts or stops densifying fails.
DENSIFIES: dict[str, set[str]] = {
    "in_place_rows": {"as_strided"},
    "in_place_of_time_first": {"as_strided"},
    "ln_over_batch": {"native_layer_norm_backward"},
    "gn2d_over_batch_channels_last": {"native_group_norm_backward"},
    "max_pool_over_batch": {"max_pool2d_with_indices_backward"},
    "avg_pool_over_batch": {"avg_pool2d_backward"},
    "avg_pool_over_lines": {"avg_pool2d_backward"},
    "upsample_batch": {"upsample_linear1d_backward"},
    "conv_over_batch": {"convolution_backward"},
    "t_round": {"tanh_backward"},
    "t_sign": {"tanh_backward"},
    "t_trunc": {"tanh_backward"},
    "bn_train": {"native_batch_norm_backward"},
    "bn_train_rows_last": {"native_batch_norm_backward"},
    "bn_any": {"batch_norm_backward"},
    "softmax_batch": {"_softmax_backward_data"},
    "emb_freq": {"embedding_dense_backward"},
    "emb_width": {"embedding_dense_backward"},
    "index_add_one": {"squeeze.dim"},
    "scatter_partial": {"add.Tensor", "gather"},
    "gather_partial": {"add.Tensor", "scatter_add"},
    "sortbatch": {"scatter.src"},
    "catb": {"slice.Tensor"},
    "roll_none": {"roll"},
    "cumsumb": {"cumsum"},
    "cumprod_rows": {"cumsum"},
    "embag_freq": {"_embedding_bag_backward"},
    "embag_width": {"_embedding_bag_backward"},
    "scatter_reduce_each": {"add.Tensor", "gather"},
    "gather_each": {"scatter_add"},
    "put": {"put"},
    "select_scatter_row": {"select_scatter"},
    "rot90_rows": {"rot90"},
    "lcse": {"gt.Scalar", "log"},
    "fft": {"slice.Tensor"},
}
for name in (  # a sum over all rows comes back to each of them
    "masked_select max_batch maxall meanall mean0 stdall einsum2 xxt dot mm_batchcontract rms_over_batch mask_set_zero"
).split():
    DENSIFIES[name] = {"add.Tensor"}


def run(name: str, take: Callable[[Tensor], Tensor], channels_last: bool) -> list[Tensor | None]:
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


@pytest.mark.parametrize("name", CASES)
# Red when: take() gathers along dim 0 whatever the layout says, scatter copies instead of adding, or a rule is dropped.
def test_gradients_equal_the_dense_truth(name: str, as_host: None):
    for rows in ROWS:
        index = torch.tensor(rows)
        for channels_last in (False, True) if rows == ROWS[0] else (False,):
            expected = run(name, lambda losses: losses[index], channels_last)
            with rowprop.watch() as report:
                actual = run(name, lambda losses: rowprop.pick(losses, index, batchnorm="exact"), channels_last)
            for a, e in zip(actual, expected, strict=True):
                assert (a is None) == (e is None)
                if a is not None and e is not None:
                    assert type(a) is Tensor
                    torch.testing.assert_close(a, e, rtol=1e-10, atol=1e-12)
            if rows == ROWS[0] and torch.__version__.startswith("2.13."):  # other versions have other formulas
                assert set(report.densified) == DENSIFIES.get(name, set()), str(report)


# Red when: a rule makes a tensor without the gradient's device. On a GPU this tensor would lie on the host.
def test_new_tensors_lie_where_the_gradient_lies(monkeypatch: pytest.MonkeyPatch):
    def checked(made: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def make(*args: object, **kwargs: object) -> Tensor:
            caller = sys._getframe(1).f_globals["__name__"]
            here = "device" in kwargs or caller.endswith(".losses")  # lengths of labels lie on the host
            assert here or not caller.startswith("rowprop.backprop"), f"{made.__name__} in {caller}"
            return made(*args, **kwargs)

        return make

    for name in ("arange", "empty", "eye", "full", "ones", "zeros"):
        monkeypatch.setattr(torch, name, checked(getattr(torch, name)))
    monkeypatch.setattr(host, "READ_AT_ONCE", set())
    for name in CASES:
        run(name, lambda losses: rowprop.pick(losses, torch.tensor(ROWS[2])), False)
    for place in range(len(DIRECT)):
        call_direct(place, [2, 2])


# Ops that raise on CUDA under torch.use_deterministic_algorithms(True), as its page lists them for one of the supported
# versions, and that a rule might call by itself.
REFUSED: dict[str, Callable[..., bool]] = {
    "cumsum": lambda x, *_: x.is_floating_point() or x.is_complex(),
    "put": lambda *_: True,
    "histc": lambda *_: True,
    "bincount": lambda x, weights=None, *_: weights is not None,
    "scatter_add": lambda x, *_: x.ndim > 1,
    "scatter": lambda x, *_: x.ndim > 1,
    "scatter_reduce": lambda x, *_: True,
    "kthvalue": lambda *_: True,
    "median": lambda *_: True,
}


class Refusals(TorchDispatchMode):
    """Notes the calls that CUDA refuses in its deterministic mode."""

    def __init__(self) -> None:
        super().__init__()
        self.met: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if RowGrad in types:
            return NotImplemented  # its rule makes the calls
        name = func._schema.name.removeprefix("aten::").removesuffix("_")
        if name in REFUSED and REFUSED[name](*args):
            self.met.add(name)
        return func(*args, **(kwargs or {}))


# Red when: a rule calls an op that CUDA has in no deterministic form, where the formula of plain indexing does not.
def test_the_deterministic_mode_refuses_nothing_that_plain_indexing_may_do(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(host, "READ_AT_ONCE", set())
    index = torch.tensor(ROWS[2])
    for name in CASES:
        with Refusals() as plain:
            run(name, lambda losses: losses[index], False)
        with Refusals() as picked:
            run(name, lambda losses: rowprop.pick(losses, index), False)
        assert picked.met <= plain.met, name


@pytest.mark.parametrize("shape", [(N, 3, 5, 5), (N, 3), (N, 3, 4)])
@pytest.mark.parametrize("affine", [True, False])
# Red when: the parameters' gradients take x-hat as centred on the kept rows, or the input's gradient is not rescaled.
def test_batchnorm_projects_over_the_kept_rows(shape: tuple[int, ...], affine: bool):
    x, upstream = randn(*shape) * 2 + 5, randn(*shape)
    rows, dims, eps = torch.tensor([1, 4, 5]), [0, *range(2, len(shape))], 1e-12
    leaf, w, b = x.clone().requires_grad_(), param(3), param(3)
    y = F.batch_norm(leaf, None, None, *((w, b) if affine else (None, None)), training=True, eps=eps)
    rowprop.pick((y * upstream).flatten(1).sum(1), rows, batchnorm="rows").sum().backward()

    def per_channel(v: Tensor) -> Tensor:
        return v.view(1, -1, *[1] * (len(shape) - 2))

    # Subtract the mean over the kept rows, then the component along the centred x-hat.
    invstd = (x.var(dims, correction=0) + eps).rsqrt()
    xhat = ((x - per_channel(x.mean(dims))) * per_channel(invstd))[rows]
    g = upstream[rows]
    centred = xhat - per_channel(xhat.mean(dims))
    projected = g - per_channel(g.mean(dims))
    projected = projected - centred * per_channel((projected * centred).sum(dims) / centred.square().sum(dims))
    expected = torch.zeros_like(x)
    expected[rows] = projected * per_channel(invstd * (w.detach() if affine else 1))
    assert leaf.grad is not None
    torch.testing.assert_close(leaf.grad, expected, rtol=1e-8, atol=1e-9)
    if affine:  # these are exact: only kept rows have a gradient to sum
        torch.testing.assert_close(w.grad, (g * xhat).sum(dims))
        torch.testing.assert_close(b.grad, g.sum(dims))


def test_batchnorm_of_one_outlier_is_finite():
    # Red when: rounding makes the variance of the one kept row negative, and eps does not make up for it.
    random = torch.Generator().manual_seed(0)
    for _ in range(20):
        x, upstream = torch.randn(64, 8, generator=random), torch.randn(64, 8, generator=random)
        x[7] = 1e4 * (1 + torch.rand(8, generator=random))
        leaf, w, b = x.clone().requires_grad_(), nn.Parameter(torch.ones(8)), nn.Parameter(torch.zeros(8))
        y = F.batch_norm(leaf, None, None, w, b, training=True)
        rowprop.pick((y * upstream).sum(1), torch.tensor([7]), batchnorm="rows").sum().backward()
        # The mean over one row is the row, so the input gradient is zero. The parameters' gradients are exact.
        torch.testing.assert_close(leaf.grad, torch.zeros(64, 8))
        invstd = (x.double().var(0, correction=0) + 1e-5).rsqrt()
        xhat = (x[7] - x.double().mean(0)) * invstd
        torch.testing.assert_close(w.grad, (upstream[7] * xhat).float(), rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(b.grad, upstream[7])


def sliced(values: Tensor, index: list[int], dim: int = 0, unique: bool = True) -> RowGrad:
    rows = RowSet(torch.tensor(index), N, unique=unique, batchnorm="rows")
    layout = Layout(dim, N)
    shape = list(values.shape)
    shape[dim] = N
    return RowGrad(RowSlice(values, rows, layout, shape))


def aux(*shape: int) -> Tensor:
    """Some full-size operand, the same at every call."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def ints(high: int, *shape: int) -> Tensor:
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(high))


IMAGE, VOLUME = (2, 4, 4), (2, 4, 4, 4)
fractional = [
    aten.fractional_max_pool2d(aux(N, 2, 8, 8), [2, 2], [4, 4], aux(N, 2, 2).abs() % 1)[1],
    aten.fractional_max_pool3d(aux(N, 2, 8, 8, 8), [2] * 3, [4] * 3, aux(N, 2, 3).abs() % 1)[1],
]

lstm_arguments = (aux(5, N, 3), aux(8, 3), aux(8, 2), aux(8), aux(8) * 2, aux(N, 2), aux(N, 2) * 2)
lstm_outputs = aten.mkldnn_rnn_layer(*lstm_arguments, False, [], 2, 2, 1, True, False, False, True)


def lstm_backward(g: Tensor, place: int) -> Tensor:
    """One of the gradients of the CPU's fused LSTM; ``g`` is the gradient of its output."""
    grads = (aten.transpose(g, 0, 1), None, None)
    settings = (False, 2, 2, 1, True, True, False, [], False)
    return aten.mkldnn_rnn_layer_backward(*lstm_arguments, *lstm_outputs[:3], *grads, *settings, lstm_outputs[3])[place]


steps, labels, words = torch.full((N,), 5), torch.arange(N) % 2 + 1, ints(3, N, 2) + 1
scores = aux(5, N, 4).log_softmax(2)
alignments = aten._ctc_loss.Tensor(scores, words, steps, labels)

# Ops called on a sliced gradient of shape (N, *trailing), as formulas or hooks call them.
DIRECT: list[tuple[tuple[int, ...], Callable[[Tensor], Tensor]]] = [
    *[((3,), getattr(aten, name)) for name in ("abs", "asin", "asinh", "atan", "ceil", "erf", "expm1", "floor", "cos")],
    *[((3,), getattr(aten, name)) for name in ("log1p", "nan_to_num", "relu", "round", "sgn", "sign", "sin", "sinh")],
    *[((3,), getattr(aten, name)) for name in ("sqrt", "tan", "tanh", "trunc", "exp", "neg", "alias", "detach")],
    ((3,), lambda g: aten.mm(aten.t(g), g)),
    ((3,), lambda g: aten.mul(g, g)),
    ((3,), lambda g: aten.square(aten.cat([g, g]))),
    ((3,), lambda g: aten.pow.Tensor_Scalar(g, 2)),
    ((3,), lambda g: aten.pow.Tensor_Scalar(aten.add(g, 20), -1)),
    ((3,), lambda g: aten.clamp(g, -0.1, 0.1)),
    ((3,), lambda g: aten.clamp(g, 0.1, 0.2)),
    ((3,), lambda g: aten.clamp(g, None, -0.5)),
    ((3,), lambda g: aten.pow.Tensor_Scalar(g, 0)),
    ((3,), lambda g: aten.div(torch.ones(N, 3), aten.add(g, 10))),
    ((3,), lambda g: aten.xlogy(g, aux(N, 3).abs())),
    ((3,), lambda g: aten.xlogy(aux(N, 3), aten.add(g, 10))),
    ((3,), lambda g: aten.special_xlog1py(g, aux(3).abs())),
    ((3, 2), lambda g: aten.linalg_solve_triangular(aux(N, 3, 3) + 3 * torch.eye(3), g, upper=True)),
    ((3, 2), lambda g: aten.linalg_solve_triangular(aux(3, 3) + 3 * torch.eye(3), g, upper=False)),
    ((3,), lambda g: aten.linalg_solve_triangular(aux(N, N) + 3 * torch.eye(N), g, upper=True)),
    ((3,), lambda g: aten._trilinear(g, aux(N, 2), aux(2, 4), [1, 3], [1, 3], [0, 1], [0])),
    ((3,), lambda g: aten._trilinear(aux(2, 4), g, aux(N, 2), [0, 1], [2, 3], [1, 3], [2], 2)),
    ((), lambda g: aten._ctc_loss_backward.Tensor(g, scores, words, steps, labels, *alignments, 0)),
    ((3,), lambda g: aten.diag_embed(g, 1, 0, 2)),
    ((3,), lambda g: aten.diag_embed(aten.t(g))),
    ((3, 4, 3), lambda g: aten.diagonal(g, 1, 1, 3)),
    ((3,), lambda g: aten.diagonal(g)),
    ((3,), lambda g: aten.index(g, [None, torch.tensor([True, False, True])])),
    ((3,), lambda g: aten.masked_fill(g, torch.ones(3, dtype=torch.bool), 2.0)),
    ((3,), lambda g: aten.masked_fill.Tensor(g, aux(N, 3) > 0, torch.zeros(()))),
    ((3,), lambda g: aten.where(torch.ones(N, 3, dtype=torch.bool), torch.ones(()), g)),
    ((3,), lambda g: aten.add(torch.ones(N, 3), g, alpha=-2)),
    ((3,), lambda g: aten.add_.Tensor(torch.ones(N, 3), g, alpha=-2)),
    ((3,), lambda g: aten.copy_(torch.ones(N, 3), g)),
    ((3,), lambda g: aten.copy_(torch._neg_view(torch.ones(N, 3)), g)),
    ((3,), lambda g: aten.sub(g, torch.ones(N, 3))),
    ((3,), lambda g: aten.sub(torch.ones(N, 3), g, alpha=3)),
    ((3,), lambda g: aten.add(g, torch.ones(N, 3), alpha=3)),
    ((3,), lambda g: aten.sub(g, torch.ones(N, 3), alpha=3)),
    ((3,), lambda g: aten.add(g, aten.mul(g, 3), alpha=2)),
    ((3,), lambda g: aten.add(aten.zero(g), g, alpha=2)),
    ((3,), lambda g: aten.sub(aten.zero(g), g)),
    ((3,), lambda g: aten.sub(g, aten.zero(g), alpha=2)),
    # the same rows, but in another dimension, or merged with another size in front or behind
    ((2,), lambda g: aten.index_put(aten.new_zeros(g, [N, 4, 5]), [None, ints(4, 2), ints(5, 2)], g, True)),
    ((N,), lambda g: aten.add(g, aten.t(g))),
    ((N,), lambda g: aten.mul(g, aten.t(g))),
    ((N,), lambda g: aten.add(g, aten.sum.dim_IntList(g, [1]))),
    ((3,), lambda g: aten.add(aten.sum.dim_IntList(g, [1]), aten.t(g))),
    ((3,), lambda g: aten.sub(aten.t(g), aten.sum.dim_IntList(g, [1]))),
    ((2, 3), lambda g: aten.add(aten.view(g, [N * 2, 3]), aten.reshape(aten.transpose(g, 0, 1), [2 * N, 3]))),
    ((2, 3), lambda g: aten.mm(aten.t(aten.view(g, [N * 2, 3])), aten.reshape(aten.transpose(g, 0, 1), [2 * N, 3]))),
    ((3,), lambda g: aten.sub(g, aten.mul(g, 3))),
    ((3,), lambda g: aten.add(aten.zero(g), g)),
    ((3,), lambda g: aten.addmm(torch.ones(N, 3), g, torch.eye(3))),
    ((3,), lambda g: aten.addmm(g, g, torch.eye(3), beta=2)),
    ((3,), lambda g: aten.addmm(aten.sum.dim_IntList(g, [1]), g, aux(3, N))),
    ((N,), lambda g: aten.addmm(aten.t(g), g, aux(N, N))),
    ((3,), lambda g: aten.addmm(torch.ones(3, 3), aten.t(g), torch.ones(N, 3))),
    ((3,), lambda g: aten.addmm(torch.ones(3), g, aux(3, 3), beta=0)),
    ((3, 3), lambda g: aten.baddbmm(g, g, aux(N, 3, 3))),
    ((3, 3), lambda g: aten.baddbmm(torch.ones(N, 3, 3), g, aux(N, 3, 3))),
    ((), lambda g: aten.dot(g, aux(N))),
    ((3,), lambda g: aten.index_select(g, 0, torch.tensor([0, 1, 4, 4, -1 + N]))),
    ((3,), lambda g: aten.index(g, [torch.tensor([2, -2, 1])])),
    ((), lambda g: aten.unfold_backward(aten.index_select(g, 0, torch.tensor([4])), [], 0, 1, 1)),
    ((3,), lambda g: aten.squeeze(aten.index_select(g, 0, torch.tensor([4])))),
    ((3,), lambda g: aten.expand(aten.index_select(g, 0, torch.tensor([4])), [5, 3])),
    ((3,), lambda g: aten.mul(aten.index_select(g, 0, torch.tensor([4])), aux(5, 3))),
    ((3, 4), lambda g: aten.index(g, [None, torch.tensor([2, 0]), torch.tensor([1, 3])])),
    ((3, 4, 2), lambda g: aten.index(g, [None, torch.tensor([2, 0]), None, torch.tensor([1, 1])])),
    ((3,), lambda g: aten.index_add(aten.new_zeros(g, [N, 5]), 1, torch.tensor([4, 0, 4]), g, alpha=2)),
    ((3,), lambda g: aten.index_add(torch.ones(N, 3), 0, torch.arange(N), g)),
    ((3,), lambda g: aten.index_add(aten.new_zeros(g, [2, 3]), 0, torch.arange(N) % 2, g)),
    ((3,), lambda g: aten.index_add(aten.new_zeros(g, [2, 3]), 0, torch.ones(N).long(), g)),
    ((), lambda g: aten.scatter_add(torch.zeros(()), 0, torch.zeros(N).long(), g)),  # a number, gathered for each row
    ((3,), lambda g: aten.index_fill.int_Scalar(g, 1, torch.tensor([0, 2]), 0)),
    ((3,), lambda g: aten.index_fill.int_Scalar(g, 1, torch.tensor([0, 2]), 1)),
    ((3,), lambda g: aten.scatter.value(g, 1, ints(3, N, 2), 0)),
    ((3,), lambda g: aten.scatter.value(g, 1, ints(3, 4, 2), 0)),
    ((3,), lambda g: aten.gather(g, 0, torch.tensor([[1, 2, 2]]))),
    ((3,), lambda g: aten.mean(g)),
    ((3, 2), lambda g: aten.mean.dim(g, [1], True)),
    ((3, 2), lambda g: aten.mean.dim(g, [0, 2])),
    ((3,), lambda g: aten.sum.dim_IntList(g, [-1], True)),
    ((1, 3, 1), lambda g: aten.squeeze(g)),
    ((1, 3, 1), lambda g: aten.squeeze.dims(g, [0, 1, -1])),
    ((4, 3), lambda g: aten.split.Tensor(g, 3, 1)[1]),
    ((4, 3), lambda g: aten.split_with_sizes(g, [1, 3], 1)[1]),
    ((4, 3), lambda g: aten.split.Tensor(g, 4, 0)[1]),
    ((4, 3), lambda g: aten.unbind(g, 1)[2]),
    ((4, 3), lambda g: aten.unbind(g, 0)[1]),
    ((4, 4), lambda g: aten.triu(g, 1)),
    ((4, 4), lambda g: aten.tril(aten.transpose(g, 0, 1))),
    ((3,), lambda g: aten._reshape_alias(g, [N * 3], [1])),
    ((3,), lambda g: aten.embedding_dense_backward(g, torch.arange(N) % 2, 2, -1, False)),
    ((3,), lambda g: aten.native_dropout_backward(g, aux(N, 3) > 0, 2.0)),
    *[((5, 2), lambda g, place=place: lstm_backward(g, place)) for place in range(7)],
    ((3,), lambda g: aten.rrelu_with_noise_backward(g, aux(N, 3), aux(N, 3), 0.1, 0.3, True, False)),
    ((8,), lambda g: aten._fft_r2c(g, [1], 0, True).abs()),
    ((8,), lambda g: aten._fft_r2c(g, [0], 0, False).abs()),
    ((8,), lambda g: aten._fft_c2r(aten._fft_r2c(g, [1], 0, True), [1], 2, 8)),
    ((2, 8, 8), lambda g: aten._upsample_bicubic2d_aa_backward(g, [8, 8], [N, 2, 4, 4], False)),
    ((2, 8), lambda g: aten._upsample_nearest_exact1d_backward(g, [8], [N, 2, 4])),
    ((2, 8), lambda g: aten.upsample_nearest1d_backward(g, [8], [N, 2, 4])),
    ((2, 8, 8, 8), lambda g: aten._upsample_nearest_exact3d_backward(g, [8] * 3, [N, *VOLUME])),
    ((2, 8, 8, 8), lambda g: aten.upsample_nearest3d_backward(g, [8] * 3, [N, *VOLUME])),
    (IMAGE, lambda g: aten.fractional_max_pool2d_backward(g, aux(N, 2, 8, 8), [2, 2], [4, 4], fractional[0])),
    (VOLUME, lambda g: aten.fractional_max_pool3d_backward(g, aux(N, 2, 8, 8, 8), [2] * 3, [4] * 3, fractional[1])),
    (VOLUME, lambda g: aten.reflection_pad3d_backward(g, aux(N, 2, 2, 2, 2), [1] * 6)),
    (VOLUME, lambda g: aten.replication_pad3d_backward(g, aux(N, 2, 2, 2, 2), [1] * 6)),
    (
        VOLUME,
        lambda g: aten.grid_sampler_3d_backward(g, aux(N, *VOLUME), aux(N, 4, 4, 4, 3), 0, 0, False, [True] * 2)[1],
    ),
    *[
        ((3,), lambda g, name=name, rest=rest: getattr(aten, name)(g, *rest).zero_())
        for name, rest in {"new_empty": ([N],), "new_full": ([N], 1.0), "new_ones": ([N],)}.items()
    ],
    *[
        ((3,), lambda g, name=name, rest=rest: getattr(aten, name)(g, *rest).shape[0])
        for name, rest in {"empty_like": (), "full_like": (2.0,), "ones_like": ()}.items()
    ],
]
# Bags as CUDA's forward saves them: the size of one bag too many with a last offset, and kinds of integers as given.
bag_of, bag_sizes = torch.tensor([0, 0, 2, 3, 3, 3, 3, 4, 5, 5, 5, 5]), torch.tensor([2, 0, 1, 4, 1, 4, 0])
maxima, last = ints(7, N, 3), torch.cat([bag_starts, torch.tensor([12])])
for mode in range(3):
    saved = (bag_of, bag_sizes, maxima) if mode == 2 else (bag_of, bag_sizes, maxima[:0])
    weights = aux(12) if mode == 0 else None
    for starts in (last, last.int()):
        DIRECT.append(
            (
                (3,),
                lambda g, mode=mode, saved=saved, weights=weights, starts=starts: aten._embedding_bag_backward(
                    g, bag_ids, starts, *saved, 7, False, mode, False, weights, 2
                ),
            )
        )
    DIRECT.append(
        (
            (3,),
            lambda g, mode=mode, saved=saved, weights=weights: aten._embedding_bag_dense_backward(
                g, bag_ids, *saved, 7, False, mode, weights, 2
            ),
        )
    )
DIRECT.append(  # two bags in each row
    (
        (2, 3),
        lambda g: aten._embedding_bag_backward(
            aten.view(g, [2 * N, 3]), bag_ids, torch.arange(2 * N + 1), torch.arange(2 * N),
            torch.ones(2 * N + 1).long(), maxima[:0], 7, False, 1, False, None,
        ),
    )
)  # fmt: skip
DIRECT.append(
    ((3,), lambda g: aten._embedding_bag_per_sample_weights_backward(g, aux(7, 3), bag_ids, last, bag_of, 0, 2))
)
if hasattr(aten, "_grouped_mm"):
    ends = torch.tensor([2, 2, N], dtype=torch.int32)
    DIRECT += [
        ((4,), lambda g: aten._grouped_mm(g, aux(3, 4, 8), ends)),
        ((4,), lambda g: aten._grouped_mm(aux(3, 8, 4), aten.t(g), ends)),
        ((4,), lambda g: aten._grouped_mm(aux(N, 8).t(), g, ends)),
        ((4,), lambda g: aten._grouped_mm(aten.t(g), aux(N, 8), ends)),
    ]


def call_direct(place: int, index: list[int]) -> tuple[object, object]:
    """The op on a sliced gradient and on the same gradient dense."""
    trailing, op = DIRECT[place]
    values = (aux(2, *trailing) % 1) * 0.9
    dense = torch.zeros(N, *trailing).index_add(0, torch.tensor(index), values)
    g = sliced(values, index, unique=len(set(index)) == len(index))
    with torch._C.DisableTorchFunctionSubclass():
        out = op(g)
    return out.plain() if type(out) is RowGrad else out, op(dense)


@pytest.mark.parametrize("index", [[1, 4], [5, 0], [2, 2]])
@pytest.mark.parametrize("place", range(len(DIRECT)))
# Red when: products of two gradients ignore repeats, or an op that maps zero to a number counts as local.
def test_ops_called_directly(place: int, index: list[int]):
    actual, expected = call_direct(place, index)
    torch.testing.assert_close(actual, expected, equal_nan=True)


def test_the_strides_that_a_gradient_claims_are_those_of_its_dense_form():
    # Red when: a copy in channels-last order claims ordinary strides, by which autograd chooses a kernel.
    with torch._C.DisableTorchFunctionSubclass():
        out = aten.clone(sliced(aux(2, 3, 4, 5), [1, 4]), memory_format=torch.channels_last)
        claimed = out.stride()
    assert type(out) is RowGrad and claimed == out.plain().stride() == (60, 1, 15, 3)


def test_a_custom_function_that_wrote_to_a_view():
    # Autograd calls it from inside its own node for in-place writes to views, and pick() cannot see it there.
    class Triple(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):  # pyright: ignore
            ctx.mark_dirty(x)
            return x.mul_(3)

        @staticmethod
        def backward(ctx, grad):  # pyright: ignore
            seen.append(type(grad * 1))
            return torch.from_numpy(grad.numpy() * 3)

    def gradient(take: Callable[[Tensor], Tensor]) -> Tensor:
        w = nn.Parameter(aux(4))
        base = aux(N, 4) * w
        Triple.apply(base[:, 1:])
        take(base.square().sum(1)).sum().backward()
        assert w.grad is not None
        return w.grad

    seen: list[type] = []
    rows = torch.tensor([1, 4])
    torch.testing.assert_close(gradient(lambda t: rowprop.pick(t, rows)), gradient(lambda t: t[rows]))
    assert len(seen) == 2


def test_leaves_keep_plain_gradients_after_a_write_to_a_view():
    x, w = param(N, 3), param(3)
    base = x * w
    base[:, 0].exp_()
    (rowprop.pick(base.sum(1), torch.tensor([1, 4])).sum() * 2).backward()
    assert type(x.grad) is Tensor
    expected = torch.zeros(N, 3).double()
    expected[[1, 4]] = 2 * w.detach()
    expected[[1, 4], 0] *= (x * w).detach()[[1, 4], 0].exp()
    torch.testing.assert_close(x.grad, expected)


def test_every_rule_is_put_to_the_test():
    index = torch.tensor(ROWS[0])
    with rowprop.watch() as report:
        for place in range(len(DIRECT)):
            call_direct(place, [1, 4])
        for name in CASES:
            for channels_last in (False, True):
                run(name, lambda losses: rowprop.pick(losses, index), channels_last)
    called = set(report.sliced) | {name.removesuffix("_") for name in report.sliced}  # in place, by the same rule
    untested = {op_name(op) for op in RULES} - called
    if host.waits(index):  # a 0-d value that no formula names as zero is not read on a device
        untested.discard("masked_fill.Tensor")
    # The other ops have no kernel for the CPU: test_cuda_rules.py, test_library_functions.py.
    assert untested <= KERNELS.keys() | {"flex_attention_backward"}


@pytest.mark.parametrize("unused", [0, 1])
def test_a_dense_gradient_joined_to_a_sliced_one_is_kept(unused: int):
    # Red when: a plain gradient beside a sliced one counts as the zeros of an output that is not used.
    x = param(N, 6 + 2 * unused)

    def loss(take: Callable[[Tensor], Tensor]) -> Tensor:
        a, b, c, *_ = (x * 2).chunk(3 + unused, 1)
        return take((a * c).sum(1)).sum() + b.exp().sum()

    rows = torch.tensor([1, 4])
    expected = torch.autograd.grad(loss(lambda t: t[rows]), x)
    with rowprop.watch() as report:
        torch.testing.assert_close(torch.autograd.grad(loss(lambda t: rowprop.pick(t, rows)), x), expected)
    assert report.densified["cat"].reason == "a dense gradient is joined to a sliced one"


def test_gradients_of_two_picks_meet_beside_an_output_without_one():
    # Red when: an output that no pick reaches counts as dense, or the note of one pick's rows is lost at the union.
    x = param(N, 6)

    def loss(*takes: Callable[[Tensor], Tensor]) -> Tensor:
        parts = (x * 2).chunk(3, 1)
        return sum(take(part.exp().sum(1)).sum() for take, part in zip(takes, parts, strict=False))

    first, second = torch.tensor([1, 4, 4]), torch.tensor([0, 4])
    expected = torch.autograd.grad(loss(lambda t: t[first], lambda t: t[second]), x)
    with rowprop.watch() as report:
        picked = loss(lambda t: rowprop.pick(t, first), lambda t: rowprop.pick(t, second))
        torch.testing.assert_close(torch.autograd.grad(picked, x), expected)
    assert report.densified == {}


@pytest.mark.parametrize("name", [name for name in CASES if name.endswith("_unused") and "rows" not in name])
def test_an_output_that_is_not_used_is_known_without_a_read(name: str):
    # Red when: the rule reads a tensor to see whether it is zeros; the device meta has nothing to read.
    x = torch.ones(CASES[name][0], device="meta", requires_grad=True)
    with rowprop.watch() as report:
        rowprop.pick(CASES[name][1](x).reshape(N, -1).sum(1), torch.arange(2, device="meta")).sum().backward()
    assert report.densified == {} and report.sliced.keys() & {"cat", "stack"}


@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_embedding_bag_keeps_a_sparse_gradient_sparse(mode: str):
    # Red when: the rule answers with the dense gradient of the kept bags.
    table, rows = param(9, 4), torch.tensor([1, 4])
    indices, offsets = ints(9, 2 * N), torch.arange(0, 2 * N, 2)

    def gradient(take: Callable[[Tensor], Tensor]) -> Tensor:
        bags = F.embedding_bag(indices, table, offsets, mode=mode, sparse=True)
        return torch.autograd.grad(take(bags.exp().sum(1)).sum(), table)[0]

    expected, actual = gradient(lambda t: t[rows]), gradient(lambda t: rowprop.pick(t, rows))
    assert actual.is_sparse and expected.is_sparse
    actual, expected = actual.coalesce(), expected.coalesce()
    assert torch.equal(actual.indices(), expected.indices())  # an optimizer may step for each entry that is listed
    torch.testing.assert_close(actual.to_dense(), expected.to_dense())


def test_bags_of_the_largest_entries_read_no_index(as_accelerator: None):
    # Red when: the indices of the kept bags are counted, which waits for the device: the forward noted the entries.
    table, rows = param(9, 4), torch.tensor([1, 4])

    def gradient(take: Callable[[Tensor], Tensor]) -> Tensor:
        bags = F.embedding_bag(ints(9, 2 * N), table, torch.arange(0, 2 * N, 2), mode="max")
        return torch.autograd.grad(take(bags.exp().sum(1)).sum(), table)[0]

    with rowprop.watch() as report:
        actual = gradient(lambda t: rowprop.pick(t, rows))
    torch.testing.assert_close(actual, gradient(lambda t: t[rows]))
    assert not report.densified and not report.waited


def test_an_index_without_values_is_not_read():
    # Red when: a rule that has to look at an index does so on the device meta, which has nothing to look at.
    x = torch.ones(N, 3, device="meta", requires_grad=True)
    with rowprop.watch() as report:
        losses = (x * 2).index_copy(0, torch.arange(N, device="meta"), x.exp()).sum(1)
        rowprop.pick(losses, torch.arange(2, device="meta")).sum().backward()
    assert any(entry.reason.startswith("only a look at the device") for entry in report.densified.values())


@pytest.mark.skipif(not hasattr(aten, "_grouped_mm"), reason="needs a torch with grouped products")
def test_rows_of_groups_go_back_to_their_places():
    # Red when: the rows of a grouped product, which are sorted for it, are sorted once more in the place of going back.
    index, ends, weights = [4, 0, 2], torch.tensor([2, 2, N], dtype=torch.int32), aux(3, 4, 8)
    with torch._C.DisableTorchFunctionSubclass():
        out = aten._grouped_mm(sliced(aux(3, 4), index), weights, ends)
    dense = torch.zeros(N, 4).index_add(0, torch.tensor(index), aux(3, 4))
    assert type(out) is RowGrad
    torch.testing.assert_close(out.plain(), aten._grouped_mm(dense, weights, ends))


# --- mixtures of experts, as transformers and others route tokens -----------------------------------------------------

TOKENS, WIDTH, EXPERTS, CHOICES = 3, 8, 4, 2
router, gates_up, biases_up, down = (
    param(WIDTH, EXPERTS),
    param(EXPERTS, WIDTH, 8),
    param(EXPERTS, 8),
    param(EXPERTS, 8, WIDTH),
)
Chosen = tuple[Tensor, Tensor, Tensor]


def chosen(x: Tensor) -> Chosen:
    """The tokens (N * T, width), and of each token the weights and the numbers of its experts."""
    tokens = x.reshape(-1, WIDTH)
    weights, numbers = (tokens @ router).softmax(-1).topk(CHOICES, -1)
    return tokens, weights / weights.sum(-1, keepdim=True), numbers


def one_expert(x: Tensor, number: Tensor | int) -> Tensor:
    return (x @ gates_up[number] + biases_up[number]).relu() @ down[number]


def loop_of_experts(x: Tensor) -> Tensor:
    """transformers, "eager": each expert reads its tokens, and adds to them."""
    tokens, weights, numbers = chosen(x)
    out = torch.zeros_like(tokens)
    reads = F.one_hot(numbers, EXPERTS).permute(2, 1, 0)
    for number in reads.sum((1, 2)).nonzero().flatten():
        choice, token = torch.where(reads[number])
        out.index_add_(0, token, one_expert(tokens[token], number) * weights[token, choice, None])
    return out


def grouped_experts(x: Tensor) -> Tensor:
    """transformers, "grouped_mm": tokens sorted by expert, one product per group, back by the inverse permutation."""
    tokens, weights, numbers = chosen(x)
    ordered, order = numbers.reshape(-1).sort()
    ends = ordered.bincount(minlength=EXPERTS).cumsum(0, dtype=torch.int32)
    up = aten._grouped_mm(tokens[order // CHOICES].float(), gates_up.float(), ends).double() + biases_up[ordered]
    out = aten._grouped_mm(up.relu().float(), down.float(), ends).double() * weights.reshape(-1)[order, None]
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order))
    return out[back].view(len(tokens), CHOICES, WIDTH).sum(1)


def batched_experts(x: Tensor) -> Tensor:
    """transformers, "batched_mm": a copy of an expert's weights for each token."""
    tokens, weights, numbers = chosen(x)
    numbers = numbers.reshape(-1)
    up = torch.bmm(tokens.repeat_interleave(CHOICES, 0).unsqueeze(1), gates_up[numbers]).squeeze(1) + biases_up[numbers]
    out = torch.bmm(up.relu().unsqueeze(1), down[numbers]).squeeze(1) * weights.reshape(-1, 1)
    return out.view(len(tokens), CHOICES, WIDTH).sum(1)


def every_expert(x: Tensor) -> Tensor:
    """Llama 4: each expert computes all tokens, most of them times a score of nearly 0."""
    tokens = x.reshape(-1, WIDTH)
    values, numbers = (tokens @ router).topk(1, -1)
    scores = torch.full((len(tokens), EXPERTS), -9.0, dtype=x.dtype).scatter(1, numbers, values).sigmoid()
    spread = tokens.repeat(EXPERTS, 1) * scores.t().reshape(-1, 1)
    up = torch.bmm(spread.view(EXPERTS, -1, WIDTH), gates_up) + biases_up[:, None]
    return torch.bmm(up.relu(), down).sum(0)


def places_of_experts(x: Tensor) -> Tensor:
    """Switch, GShard: each expert has places for some tokens, and products with one-hot tensors fill them."""
    _, weights, numbers = chosen(x)
    hot = F.one_hot(numbers, EXPERTS)
    rank = hot.flatten(0, 1).cumsum(0).view(hot.shape) - 1
    sent = (F.one_hot(rank.clamp(0, 5), 6) * ((rank < 6) * hot)[..., None]).double()
    read = torch.einsum("sec,sd->ecd", sent.sum(1), x.reshape(-1, WIDTH))
    out = (torch.einsum("ecd,edh->ech", read, gates_up) + biases_up[:, None]).relu() @ down
    return torch.einsum("sec,ecd->sd", (sent * weights[..., None, None]).sum(1), out)


def gathered_experts(x: Tensor) -> Tensor:
    """Tokens are gathered in the order of their experts, and results added back by scatter_add."""
    tokens, weights, numbers = chosen(x)
    order = numbers.reshape(-1).argsort(stable=True)
    number, place = numbers.reshape(-1)[order], (order // CHOICES)[:, None].expand(-1, WIDTH)
    up = torch.bmm(tokens.gather(0, place).unsqueeze(1), gates_up[number]).squeeze(1) + biases_up[number]
    out = torch.bmm(up.relu().unsqueeze(1), down[number]).squeeze(1) * weights.reshape(-1)[order, None]
    return torch.zeros_like(tokens).scatter_add(0, place, out)


def masked_experts(x: Tensor) -> Tensor:
    """Each expert reads and writes the tokens under a mask over batch and time."""
    _, weights, numbers = chosen(x)
    weights, numbers, out = weights.view(*x.shape[:2], -1), numbers.view(*x.shape[:2], -1), torch.zeros_like(x)
    for number in range(EXPERTS):
        for choice in range(CHOICES):
            mask = numbers[..., choice] == number
            out[mask] = out[mask] + one_expert(x[mask], number) * weights[..., choice][mask][:, None]
    return out.reshape(-1, WIDTH)


READS, UNITES = "the number of kept rows that an index reads", "the rows that gradients of several picks have together"
BACK, TOGETHER = (
    "whether tokens are back in the sequences that they came from",
    "how many kept tokens lie in each sequence",
)
MASK = "the number of a mask's entries"
# What the host may wait for where the values lie on a device.
ROUTINGS: dict[Callable[[Tensor], Tensor], set[str]] = {
    loop_of_experts: {READS, UNITES, BACK, TOGETHER},
    batched_experts: set(),
    every_expert: set(),
    places_of_experts: set(),
    gathered_experts: {READS, UNITES, BACK, TOGETHER},
    masked_experts: {MASK, READS, UNITES, BACK, TOGETHER},
}
if hasattr(aten, "_grouped_mm"):
    ROUTINGS[grouped_experts] = {UNITES, BACK, TOGETHER}


# Red when: tokens that come back go to the rows of the dimension of which fewest are kept, whatever it is.
def test_tokens_of_one_time_go_back_to_the_batch():
    scale, index = param(4), torch.tensor([0, 1, 3, 5])

    def gradient(take: Callable[[Tensor], Tensor]) -> Tensor:
        x = aux(N, 3, 4).double() * scale
        starts = x.reshape(-1, 4)[torch.arange(N) * 3]
        x = x + torch.zeros(3 * N, 4).double().index_add(0, torch.arange(N) * 3, starts.exp()).view_as(x)
        return torch.autograd.grad(take(x.square().sum((1, 2))).square().sum(), scale)[0]

    with rowprop.watch() as report:
        actual = gradient(lambda losses: rowprop.pick(losses, index))
    torch.testing.assert_close(actual, gradient(lambda losses: losses[index]))
    assert not report.densified, str(report)


@pytest.mark.parametrize("device", [False, True], ids=["host", "device"])
@pytest.mark.parametrize("routing", ROUTINGS, ids=lambda f: f.__name__)
# Red when: an index of tokens that no kept row is among makes the expert's backward dense; tokens that were routed go
# back to the rows of another dimension; a wait is added, or a rule does not say that it waits.
def test_routed_tokens_keep_their_rows(
    routing: Callable[[Tensor], Tensor], device: bool, monkeypatch: pytest.MonkeyPatch
):
    if device:
        monkeypatch.setattr(host, "READ_AT_ONCE", set())
    scale, index = param(WIDTH), torch.tensor([1, 4])
    leaves = [scale, router, gates_up, biases_up, down]
    tokens = aux(N, TOKENS, WIDTH).double()

    def gradients(take: Callable[[Tensor], Tensor]) -> tuple[Tensor, ...]:
        x = tokens * scale
        for _ in range(2):
            x = x + routing(x.tanh()).view_as(x)
        return torch.autograd.grad(take(x.square().sum((1, 2))).square().sum(), leaves)

    expected = gradients(lambda losses: losses[index])
    with rowprop.watch() as report:
        actual = gradients(lambda losses: rowprop.pick(losses, index))
    single = routing is globals().get("grouped_experts")
    torch.testing.assert_close(actual, expected, rtol=1e-4 if single else 1e-9, atol=1e-5 if single else 1e-9)
    if routing not in (
        places_of_experts,
        masked_experts,
    ):  # these sum over all tokens, or fill in what one expert holds
        assert not report.densified, str(report)
    assert set(report.waited) <= (ROUTINGS[routing] if host.waits(actual[0]) else set()), str(report)
    assert not single or report.sliced["_grouped_mm"] == 8


FROM, ALL_ROWS = (
    "rows would have to be taken from a sparse tensor",
    "a gradient of all rows is added to it: a mean that losses are divided by, or pairs of rows",
)
edges = (aux(N, N) > 0.5) * aux(N, N)
SPARSE: dict[str, tuple[Callable[[Tensor], Tensor], dict[str, str]]] = {
    "mm": (lambda h: torch.sparse.mm(edges.to_sparse(), h), {"mm": FROM}),
    "mm_csr": (lambda h: edges.to_sparse_csr() @ h, {"mm": FROM}),
    "addmm": (lambda h: torch.sparse.addmm(h, edges.to_sparse(), h), {"mm": FROM}),
    "bmm": (lambda h: torch.bmm(edges.to_sparse()[None], h[None])[0], {"bmm": FROM}),
    "mv": (lambda h: torch.mv(edges.to_sparse(), h.sum(1))[:, None], {"mv": FROM}),
    "weight": (lambda h: h @ aux(4, 4).relu().to_sparse(), {}),
    "gradient": (
        lambda h: F.embedding(torch.tensor([3, 1, 1, 5, 0, 2]), h, sparse=True) + 2 * h,
        {"_sparse_coo_tensor_with_dims_and_tensors": "no rule for this op", "add.Tensor": ALL_ROWS},
    ),
    "jagged": (
        lambda h: torch.nested.nested_tensor_from_jagged(h, torch.tensor([0, 1, 4, N])).sin().values(),
        {"_nested_view_from_jagged": "no rule for this op"},
    ),
}


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state")
@pytest.mark.parametrize("name", SPARSE)
# Red when: the gather, or the sum into a tensor, asks a sparse tensor for its memory.
def test_beside_a_sparse_tensor_the_gradient_is_dense_and_equal(name: str):
    f, densified = SPARSE[name]
    x, w, rows = aux(N, 4), nn.Parameter(aux(4, 4)), torch.tensor([1, 4])

    def gradient(take: Callable[[Tensor], Tensor]) -> Tensor:
        losses = take(f((x @ w).tanh()).square().sum(1))
        return torch.autograd.grad(losses.sum(), w)[0]

    expected = gradient(lambda losses: losses[rows])
    with rowprop.watch() as report:
        actual = gradient(lambda losses: rowprop.pick(losses, rows))
    torch.testing.assert_close(actual, expected)
    assert {op: entry.reason for op, entry in report.densified.items()} == densified


@pytest.mark.parametrize("key", ["mm.", "no such", "mm.a.b", "", 3, "aten.mm.default", "a-b"])
def test_a_malformed_key_is_refused(key: object):
    with pytest.raises(ValueError, match=r"a key is like 'mm' or 'sum\.dim_IntList'"):
        rule(key)(lambda op, g: g)  # pyright: ignore[reportArgumentType]


def test_an_unknown_op_is_refused():
    with pytest.raises(ValueError, match="'no_such_op' is no aten op"):
        rule("no_such_op")(lambda op, g: g)


def test_a_second_rule_is_refused_and_changes_nothing():
    before = RULES[torch.ops.aten.mm.default]
    with pytest.raises(ValueError, match="'mm' has a rule already, in matmul"):
        rule("mm")(lambda op, g: g)
    assert RULES[torch.ops.aten.mm.default] is before
