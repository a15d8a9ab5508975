"""Unsloth's kernels by Triton's interpreter: the gradients of plain indexing, on the kept rows or tokens.

The packages lie in a venv of their own: `nox -s kernels`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import rowprop
import unsloth_kernels
from picks import Take, indexed

pytestmark = pytest.mark.skipif(not unsloth_kernels.install(), reason="unsloth is not installed: nox -s kernels")

N, T, D, HEADS, INNER, RANK, CLASSES = 6, 3, 8, 2, 12, 2, 11
ROWS = torch.tensor([1, 4])
TOKENS = torch.zeros(N, T, dtype=torch.bool).index_put_(
    (torch.tensor([1, 1, 4]), torch.tensor([0, 2, 1])), torch.tensor(True)
)
Weights = dict[str, Tensor]


def lora(w: Weights, inputs: int, outputs: int, name: str) -> tuple[Any, ...]:
    """A frozen weight, no quantisation, the two factors and their scale."""
    frozen = torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(len(name)))
    for part, shape in (("A", (RANK, inputs)), ("B", (outputs, RANK))):
        w.setdefault(name + part, torch.randn(shape).requires_grad_())
    return frozen, None, w[name + "A"], w[name + "B"], 2.0


def weight(w: Weights, name: str) -> Tensor:
    return w.setdefault(name, (torch.rand(D) + 0.5).requires_grad_())


def one(w: Weights, x: Tensor) -> Tensor:
    from unsloth.kernels.fast_lora import LoRA_W

    return LoRA_W.apply(x, *lora(w, D, D, "w"))


def queries_keys_values(w: Weights, x: Tensor) -> Tensor:
    from unsloth.kernels.fast_lora import LoRA_QKV

    parts = LoRA_QKV.apply(x * 1, *lora(w, D, D, "q"), *lora(w, D, D, "key"), *lora(w, D, D, "value"), True)
    return parts[0] * parts[1].sigmoid() + parts[2]


def mlp(w: Weights, x: Tensor, dropout: Any = None) -> Tensor:
    from unsloth.kernels.fast_lora import LoRA_MLP
    from unsloth.kernels.swiglu import swiglu_DWf_DW_dfg_kernel, swiglu_fg_kernel

    layers = [*lora(w, D, INNER, "gate"), *lora(w, D, INNER, "upper"), *lora(w, INNER, D, "down")]
    return LoRA_MLP.apply(x * 1, *layers, swiglu_fg_kernel, swiglu_DWf_DW_dfg_kernel, True, dropout)


def rms_norm(w: Weights, x: Tensor, reuse: bool = False) -> Tensor:
    from unsloth.kernels.rms_layernorm import Fast_RMS_Layernorm

    return Fast_RMS_Layernorm.apply(x, weight(w, "norm"), 1e-6, False, False, reuse)


def layer_norm(w: Weights, x: Tensor) -> Tensor:
    from unsloth.kernels.layernorm import Fast_Layernorm

    return Fast_Layernorm.apply(x, weight(w, "norm"), weight(w, "bias"), 1e-6)


ANGLES = torch.randn(16, D // HEADS)


def turned(w: Weights, x: Tensor) -> Tensor:
    from unsloth.kernels.rope_embedding import Fast_RoPE_Embedding

    heads = x.unflatten(2, (HEADS, -1)) * 1
    return Fast_RoPE_Embedding.apply(heads, ANGLES.cos()[:T], ANGLES.sin()[:T]).flatten(2)


def turned_together(
    w: Weights, x: Tensor, places: Tensor | None = None, name: str = "Fast_RoPE_Embedding_QK"
) -> Tensor:
    import unsloth.kernels.rope_embedding as rope

    q = (x.unflatten(2, (HEADS, -1)) * 1).transpose(1, 2)
    more = () if name.endswith("Positions") else (places,)
    q, k = getattr(rope, name).apply(q, q * 2, ANGLES.cos(), ANGLES.sin(), *more)
    return (q * k.sigmoid()).transpose(1, 2).flatten(2)


def cross_entropy(w: Weights, x: Tensor) -> Tensor:
    from unsloth.kernels.cross_entropy_loss import Fast_CrossEntropyLoss

    head = w.setdefault("head", torch.randn(CLASSES, D).requires_grad_())
    labels = (torch.arange(N * T) * 7) % CLASSES
    return Fast_CrossEntropyLoss.apply((x @ head.T).flatten(0, 1), labels, 0, 0).view(N, T, 1)


PLACES = torch.arange(N * T).remainder(5).view(N, T)
CASES: dict[str, Callable[[Weights, Tensor], Tensor]] = {
    "LoRA_W": one,
    "LoRA_QKV": queries_keys_values,
    "LoRA_MLP": mlp,
    "LoRA_MLP, dropout": lambda w, x: mlp(w, x, (0.3, 0.2, 0.1)),
    "Fast_RMS_Layernorm": rms_norm,
    "Fast_RMS_Layernorm, over the gradient": lambda w, x: rms_norm(w, x, True),
    "Fast_Layernorm": layer_norm,
    "Fast_RoPE_Embedding": turned,
    "Fast_RoPE_Embedding_QK": turned_together,
    "Fast_RoPE_Embedding_QK, places": lambda w, x: turned_together(w, x, PLACES),
    "Fast_RoPE_Embedding_QK_Positions": lambda w, x: turned_together(w, x, name="Fast_RoPE_Embedding_QK_Positions"),
    "Fast_CrossEntropyLoss": cross_entropy,
}


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the interpreter, for entries that a mask leaves out
@pytest.mark.parametrize("tokens", [False, True], ids=["rows", "tokens"])
@pytest.mark.parametrize("name", CASES)
# Red when: a saved tensor's rows are not taken, or are those of other rows; the places of all tokens are given.
def test_kept_rows_have_the_gradients_of_plain_indexing(name: str, tokens: bool):
    w: Weights = {"below": torch.randn(D, D).requires_grad_()}
    x, kept = torch.randn(N, T, D), TOKENS if tokens else ROWS

    def step(take: Take) -> tuple[list[Tensor], Any]:
        torch.manual_seed(1)  # of dropout
        losses = CASES[name](w, x @ w["below"]).square().sum(2)
        with rowprop.watch() as report:
            losses = take(losses if tokens else losses.mean(1), kept)
            return list(torch.autograd.grad(losses.mean(), list(w.values()))), report

    step(indexed)  # makes the weights
    (expected, _), (found, report) = step(indexed), step(rowprop.pick)
    torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-6)
    assert report.sliced and (report.densified == {} or (tokens and "RoPE" in name)), report
