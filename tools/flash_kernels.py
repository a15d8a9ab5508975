"""flash-attn's extension in plain torch, sequence by sequence, so that flash-attn's own Python runs on the CPU.

It checks what the extension of 2.8.3 checks (``csrc/flash_attn/flash_api.cpp``). It also checks what the CUDA kernels
assume: 16-byte alignment, a contiguous log-sum-exp, no sequence longer than the longest length. float64 and float32 are
allowed. As in the kernels, the backward uses the forward's output and log-sum-exp, and the numbers that dropout draws
depend on a sequence's place in the batch.
"""

from __future__ import annotations

import ast
import math
import sys
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import interpreted

RAN: list[list[int]] = []
"""The lengths of the queries' sequences in each backward."""
LONGEST: list[tuple[int, int]] = []
"""The longest lengths of queries and of keys in each backward of packed sequences, as they were given."""


def install() -> bool:
    """Have ``flash_attn`` import this module as its extension, on the CPU; whether ``flash_attn`` is there."""
    found = find_spec("flash_attn")
    if found is None:
        return False
    if "flash_attn_2_cuda" not in sys.modules and find_spec("flash_attn_2_cuda") is None:
        module: Any = ModuleType("flash_attn_2_cuda")
        module.fwd, module.bwd, module.varlen_fwd, module.varlen_bwd = fwd, bwd, varlen_fwd, varlen_bwd
        sys.modules["flash_attn_2_cuda"] = module
        on_cpu(__import__("flash_attn.flash_attn_interface").flash_attn_interface)
    return True


def on_cpu(interface: Any) -> None:
    """Register the Python of an interface's four ops for the CPU; the library registers it for CUDA alone."""
    for part in ("forward", "backward", "varlen_forward", "varlen_backward"):
        op = getattr(interface, f"_flash_attn_{part}")
        op.register_kernel("cpu")(op._init_fn)


def triton_on_cpu(patch: pytest.MonkeyPatch) -> None:
    """Have flash-attn's Triton kernels run by the interpreter, and its compiled activations by torch."""
    interpreted.without_gpu(patch)
    patch.setattr(torch.library, "wrap_triton", lambda kernel: kernel)
    activations = __import__("flash_attn.ops.activations").ops.activations
    patch.setattr(activations, "swiglu_fwd", lambda x, y: F.silu(x) * y)
    patch.setattr(activations, "swiglu_bwd", swiglu_backward)


def swiglu_backward(x: Tensor, y: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """As the jiterator's kernel."""
    s = x.sigmoid()
    return s * (1 + x * (1 - s)) * g * y, x * s * g


def source(path: str) -> Path:
    """A file of the library's source."""
    found = find_spec("flash_attn")
    assert found is not None and found.submodule_search_locations
    return Path(next(iter(found.submodule_search_locations)), path)


def version(number: int) -> Any:
    """The functions of flash-attn 3 or 4 over the same kernels, from their own source beside that of 2.8."""
    name = f"flash_attn_{number}"
    if name in sys.modules:
        return sys.modules[name]
    module: Any = ModuleType(name)
    if number == 3:  # the Python of 2.8.3's sdist; its extension is a namespace of ops
        text = source("../hopper/flash_attn_interface.py").read_text()
        sys.modules["flash_attn_3"] = sys.modules["flash_attn_3._C"] = module
        exec(compile(text, name, "exec"), vars(module))
        module.flash_attn_3_cuda = SimpleNamespace(fwd=fwd_of_3, bwd=bwd_of_3)
    else:  # its module imports CUDA's compiler, so its functions are taken alone
        text = source(f"../../{name}/flash_attn/cute/interface.py").read_text()
        wanted = {"FlashAttnFunc", "FlashAttnVarlenFunc", "flash_attn_func", "flash_attn_varlen_func"}
        kept = [node for node in ast.parse(text).body if getattr(node, "name", "") in wanted]
        tree = ast.parse("from __future__ import annotations")
        tree.body += kept
        module.torch, module._flash_attn_fwd, module._flash_attn_bwd = torch, fwd_of_4, bwd_of_4
        module._validate_gather_bwd_kwargs = lambda *_: None
        exec(compile(tree, name, "exec"), vars(module))
    sys.modules[name] = module
    return module


def fwd_of_3(*args: Any) -> tuple[Tensor, Tensor]:
    """Called as version 3's; all else than queries, keys, values and their lengths has to be left out."""
    q, k, v, *others = args[:23]
    ends_q, ends_k, max_q, max_k = (others.pop(place) for place in (4, 4, 7, 7))
    assert all(other is None for other in others)
    scale, causal, left, right, chunk, softcap = args[23:29]
    assert chunk == 0
    if ends_q is None:
        return fwd(q, k, v, None, None, 0, scale, causal, left, right, softcap, False, None)[:2]
    beside = None, None, None, None
    about = max_q, max_k, 0, scale, False, causal, left, right, softcap, False, None
    return varlen_fwd(q, k, v, None, ends_q, ends_k, *beside, *about)[:2]


def bwd_of_3(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, logsumexp: Tensor, dq: Tensor, dk: Tensor, dv: Tensor,
    ends_q: Tensor | None, ends_k: Tensor | None, used_q: Tensor | None, used_k: Tensor | None, max_q: int, max_k: int,
    scale: float, causal: bool, left: int, right: int, softcap: float, deterministic: bool, margin: int = 0,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Called as version 3's."""
    given, state = (dout, q, k, v, out, logsumexp, dq, dk, dv), torch.zeros(2, dtype=torch.int64)
    assert used_q is used_k is None
    if ends_q is None or ends_k is None:
        return bwd(*given, None, 0, scale, causal, left, right, softcap, deterministic, None, state)
    about = None, max_q, max_k, 0, scale, False, causal, left, right, softcap, deterministic, None, state
    return varlen_bwd(*given, ends_q, ends_k, *about)


def fwd_of_4(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Any, ...]:
    """Called as version 4's."""
    left, right = (options[f"window_size_{side}"] for side in ("left", "right"))
    lengths = [options.get(f"{name}_{of}") for name in ("cu_seqlens", "max_seqlen") for of in "qk"]
    others = [None] * 4 + lengths[:2] + [None, None, None] + lengths[2:] + [None] * 9
    about = options["softmax_scale"] or q.shape[-1] ** -0.5, options["causal"], open_at(left), open_at(right), 0
    return *fwd_of_3(q, k, v, *others, *about, options["softcap"]), None, None, None


def open_at(size: int | None) -> int:
    """How far a window reaches, as versions 2 and 3 write it."""
    return -1 if size is None else size


def bwd_of_4(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, dout: Tensor, logsumexp: Tensor, scale: float | None, causal: bool,
    softcap: float, window_size_left: int | None, window_size_right: int | None, dlse: Tensor | None,
    cu_seqlens_q: Tensor | None = None, cu_seqlens_k: Tensor | None = None, seqused_q: None = None,
    seqused_k: None = None, max_seqlen_q: int = 0, max_seqlen_k: int = 0, deterministic: bool = False, **others: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Called as version 4's, with the gradient of a log-sum-exp, too."""
    grads = tuple(map(torch.empty_like, (q, k, v)))
    if dlse is not None:  # it adds to the sums that are taken off the scores' gradients
        out = out - (dlse.movedim(-2, -1) / dout.square().sum(-1).clamp(min=1e-300))[..., None] * dout
    lengths = cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, max_seqlen_q, max_seqlen_k
    window = open_at(window_size_left), open_at(window_size_right)
    about = scale or q.shape[-1] ** -0.5, causal, *window, softcap, deterministic
    return bwd_of_3(dout, q, k, v, out, logsumexp, *grads, *lengths, *about)[:3]


def fwd(
    q: Tensor, k: Tensor, v: Tensor, out: None, alibi: Tensor | None, dropout: float, scale: float, causal: bool,
    left: int, right: int, softcap: float, return_softmax: bool, generator: None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """As ``mha_fwd``: operands (N, T, heads, width); output, log-sum-exp (N, heads, T), dropped scores, seed."""
    check(q, k, v, alibi, len(q), dropout, softcap)
    assert return_softmax <= (dropout > 0)
    out, state = torch.empty_like(q), new_seed(q, dropout)
    logsumexp = q.new_empty(len(q), q.shape[2], q.shape[1], dtype=of_scores(q))
    for n in range(len(q)):
        run = Scores(q[n], k[n], scale, causal, left, right, softcap, slopes_of(alibi, n))
        out[n], logsumexp[n] = run.forward(v[n], kept(run.scores, dropout, state, n))
    return out, logsumexp, q.new_empty(0), state


def bwd(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, logsumexp: Tensor, dq: Tensor, dk: Tensor, dv: Tensor,
    alibi: Tensor | None, dropout: float, scale: float, causal: bool, left: int, right: int, softcap: float,
    deterministic: bool, generator: None, state: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """As ``mha_bwd``: it writes the gradients."""
    check(q, k, v, alibi, len(q), dropout, softcap)
    check_backward(dout, q, k, out, logsumexp, (dq, dk, dv), (len(q), q.shape[2], q.shape[1]))
    RAN.append([q.shape[1]] * len(q))
    for n in range(len(q)):
        run = Scores(q[n], k[n], scale, causal, left, right, softcap, slopes_of(alibi, n))
        found = run.backward(dout[n], v[n], out[n], logsumexp[n], kept(run.scores, dropout, state, n))
        dq[n], dk[n], dv[n] = found
    return dq, dk, dv, q.new_empty(len(q), q.shape[2], -(-q.shape[1] // 128) * 128, dtype=torch.float32)


def varlen_fwd(
    q: Tensor, k: Tensor, v: Tensor, out: None, ends_q: Tensor, ends_k: Tensor, used: None, leftpad: None,
    blocks: None, alibi: Tensor | None, max_q: int, max_k: int, dropout: float, scale: float, zero: bool, causal: bool,
    left: int, right: int, softcap: float, return_softmax: bool, generator: None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """As ``mha_varlen_fwd``: operands (T, heads, width), the log-sum-exp (heads, T)."""
    assert used is leftpad is blocks is None
    check(q, k, v, alibi, len(ends_q) - 1, dropout, softcap)
    out, state = torch.full_like(q, math.nan), new_seed(q, dropout)
    logsumexp = q.new_full((q.shape[1], len(q)), math.nan, dtype=of_scores(q))
    for n, (at, keys) in enumerate(spans(ends_q, ends_k, q, k, max_q, max_k)):
        run = Scores(q[at], k[keys], scale, causal, left, right, softcap, slopes_of(alibi, n))
        out[at], logsumexp[:, at] = run.forward(v[keys], kept(run.scores, dropout, state, n))
    return out, logsumexp, q.new_empty(0), state


def varlen_bwd(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, logsumexp: Tensor, dq: Tensor, dk: Tensor, dv: Tensor,
    ends_q: Tensor, ends_k: Tensor, alibi: Tensor | None, max_q: int, max_k: int, dropout: float, scale: float,
    zero: bool, causal: bool, left: int, right: int, softcap: float, deterministic: bool, generator: None,
    state: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """As ``mha_varlen_bwd``: it writes the gradients of the tokens that lie in a sequence."""
    check(q, k, v, alibi, len(ends_q) - 1, dropout, softcap)
    check_backward(dout, q, k, out, logsumexp, (dq, dk, dv), (q.shape[1], len(q)))
    assert max_k > 0, "the kernel's grid is empty"
    for d in (dq, dk, dv):
        d.fill_(math.nan)
    RAN.append([])
    LONGEST.append((max_q, max_k))
    for n, (at, keys) in enumerate(spans(ends_q, ends_k, q, k, max_q, max_k)):
        run = Scores(q[at], k[keys], scale, causal, left, right, softcap, slopes_of(alibi, n))
        found = run.backward(dout[at], v[keys], out[at], logsumexp[:, at], kept(run.scores, dropout, state, n))
        dq[at], dk[keys], dv[keys] = found
        RAN[-1].append(at.stop - at.start)
    return dq, dk, dv, q.new_empty(q.shape[1], len(q) + 128 * (len(ends_q) - 1), dtype=torch.float32)


def check(
    q: Tensor, k: Tensor, v: Tensor, alibi: Tensor | None, sequences: int, dropout: float, softcap: float
) -> None:
    """What both directions ask for."""
    assert q.dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64)
    assert q.dtype == k.dtype == v.dtype and q.device == k.device == v.device
    assert q.ndim == k.ndim and k.shape == v.shape and q.shape[:-3] == k.shape[:-3] and q.shape[-1] == k.shape[-1]
    assert sequences > 0, "batch size must be positive"
    assert q.shape[-1] <= 256 and q.shape[-1] % 8 == 0, "the width must be a multiple of 8, 256 at most"
    assert q.shape[-2] % k.shape[-2] == 0, "heads of keys must divide those of queries"
    assert softcap == 0 or dropout == 0
    for tensor in (q, k, v):
        check_memory(tensor)
    if alibi is not None:
        assert alibi.dtype == torch.float32 and alibi.stride(-1) == 1 and alibi.device == q.device
        assert alibi.shape in ((q.shape[-2],), (sequences, q.shape[-2])), "slopes of another number of sequences"


def check_backward(
    dout: Tensor, q: Tensor, k: Tensor, out: Tensor, logsumexp: Tensor, grads: Sequence[Tensor], of: tuple[int, ...]
) -> None:
    """What the backward asks for; the log-sum-exp has the shape ``of``."""
    assert dout.dtype == out.dtype == q.dtype and dout.shape == out.shape == q.shape
    assert logsumexp.dtype == of_scores(q) and logsumexp.shape == of and logsumexp.is_contiguous()
    for grad, like in zip(grads, (q, k, k), strict=True):
        assert grad.dtype == q.dtype and grad.shape == like.shape
    for tensor in (dout, out, *grads):
        check_memory(tensor)


def check_memory(tensor: Tensor) -> None:
    """The kernels load and write 16 bytes at a time, without a look at the address."""
    assert tensor.stride(-1) == 1, "the last dimension must be contiguous"
    steps = [step for step, size in zip(tensor.stride()[:-1], tensor.shape, strict=False) if size > 1]
    assert all(step * tensor.itemsize % 16 == 0 for step in steps), "strides should be multiples of 16 bytes"
    assert tensor.data_ptr() % 16 == 0, "an address should be a multiple of 16 bytes"


def of_scores(q: Tensor) -> torch.dtype:
    """float32, as in the kernels, or float64."""
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def spans(
    ends_q: Tensor, ends_k: Tensor, q: Tensor, k: Tensor, max_q: int, max_k: int
) -> Iterator[tuple[slice, slice]]:
    """Where the queries and the keys of each sequence lie."""
    for ends, tensor, longest in ((ends_q, q, max_q), (ends_k, k, max_k)):
        assert ends.dtype == torch.int32 and ends.is_contiguous() and ends.device == q.device
        assert ends.shape == ends_q.shape, "lengths of another number of sequences"
        assert ends[0] == 0 and ends[-1] <= len(tensor) and bool((ends.diff() >= 0).all())
        assert int(ends.diff().max()) <= longest, "a sequence is longer than the longest"
    pairs = (ends.unfold(0, 2, 1).tolist() for ends in (ends_q, ends_k))
    for of_queries, of_keys in zip(*pairs, strict=True):
        yield slice(*of_queries), slice(*of_keys)


def slopes_of(alibi: Tensor | None, n: int) -> Tensor | None:
    """The slopes of a sequence: its own, or those of all."""
    return alibi if alibi is None or alibi.ndim == 1 else alibi[n]


def new_seed(q: Tensor, dropout: float) -> Tensor:
    """The random state that the forward keeps for the backward."""
    return torch.stack([torch.randint(2**31, ()) if dropout > 0 else torch.zeros((), dtype=torch.int64)] * 2)


def kept(scores: Tensor, dropout: float, state: Tensor, n: int) -> Tensor | float:
    """What dropout leaves of the probabilities of sequence ``n``."""
    if dropout == 0:
        return 1.0
    assert state.shape == (2,) and state.dtype == torch.int64
    drawn = torch.rand(scores.shape, generator=torch.Generator().manual_seed(int(state[0]) + n))
    return (drawn >= dropout).to(scores.dtype) / (1 - dropout)


class Scores:
    """The scores of a sequence: queries (T, heads, width) and keys (S, fewer heads, width)."""

    def __init__(
        self, q: Tensor, k: Tensor, scale: float, causal: bool, left: int, right: int, softcap: float,
        slopes: Tensor | None,
    ) -> None:  # fmt: skip
        exact = of_scores(q)
        self.groups, self.scale, self.softcap = q.shape[1] // k.shape[1], scale, softcap
        self.q, self.k = q.to(exact), self.spread(k.to(exact))
        scores = torch.einsum("thd,shd->hts", self.q, self.k) * scale
        self.slope: Tensor | float = 1.0
        if softcap > 0:
            scores = softcap * (scores / softcap).tanh()
            self.slope = 1 - (scores / softcap).square()
        ahead = torch.arange(len(k)) - torch.arange(len(q))[:, None] - (len(k) - len(q))  # of a key, the last two meet
        if slopes is not None:
            scores = scores - slopes.to(exact)[:, None, None] * ahead.abs()
        right = 0 if causal else right
        hidden = (ahead > right if right >= 0 else ahead < -math.inf) | (
            ahead < -left if left >= 0 else ahead > math.inf
        )
        self.scores = scores.masked_fill(hidden, -math.inf)

    def spread(self, heads: Tensor) -> Tensor:
        """The heads of keys or values, one for each head of the queries."""
        return heads.repeat_interleave(self.groups, 1)

    def forward(self, v: Tensor, left: Tensor | float) -> tuple[Tensor, Tensor]:
        """The output (T, heads, width) and the log-sum-exp (heads, T), infinite where a query sees no key."""
        sums = self.scores.logsumexp(-1)
        sums = sums.masked_fill(sums == -math.inf, math.inf)
        probabilities = (self.scores - sums[..., None]).exp() * left
        return torch.einsum("hts,shd->thd", probabilities, self.spread(v.to(self.q.dtype))).to(v.dtype), sums

    def backward(
        self, dout: Tensor, v: Tensor, out: Tensor, sums: Tensor, left: Tensor | float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients of queries, keys and values."""
        dout, values, exact = dout.to(self.q.dtype), self.spread(v.to(self.q.dtype)), out.to(self.q.dtype)
        probabilities = (self.scores - sums[..., None]).exp()
        dv = torch.einsum("hts,thd->shd", probabilities * left, dout)
        dp = torch.einsum("thd,shd->hts", dout, values) * left
        ds = probabilities * (dp - (dout * exact).sum(-1).T[..., None]) * self.slope * self.scale
        dq, dk = torch.einsum("hts,shd->thd", ds, self.k), torch.einsum("hts,thd->shd", ds, self.q)
        joined = (d.unflatten(1, (-1, self.groups)).sum(2) for d in (dk, dv))
        return (dq, *joined)  # pyright: ignore[reportReturnType]
