"""Adapters on layers of 4 and 8 bits, as QLoRA trains them: against plain indexing."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn

from picks import N, as_indexed, gradients

bnb = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed; nox -s families has it")
T, D = 6, 64
ROWS = torch.tensor([1, 5])
TOKENS = torch.zeros(N, T, dtype=torch.bool)
TOKENS[1, :3] = TOKENS[4, 2:] = True


def rounded(x: Tensor, layer: nn.Module) -> Tensor:
    """The product of CUDA, which rounds its input, too; on the CPU a layer takes another one."""
    state = layer.state
    state.CB, state.SCB, _ = bnb.functional.int8_vectorwise_quant(layer.weight.half())
    state.has_fp16_weights = False
    return bnb.autograd._functions.MatMul8bitLt.apply(x, layer.weight, None, layer.bias, state)


def layer(kind: str) -> nn.Module:
    if kind in ("nf4", "fp4"):
        made = bnb.nn.Linear4bit(D, D, compute_dtype=torch.float32, quant_type=kind)
    else:
        made = bnb.nn.Linear8bitLt(D, D, has_fp16_weights=kind != "8 bits")
    made.weight.requires_grad_(kind == "8 bits, trained")
    return made.to("cpu")


FUNCTIONS = {
    "nf4": "MatMul4Bit",
    "fp4": "MatMul4Bit",
    "8 bits": "MatMul8bitFp",
    "8 bits, trained": "MatMul8bitFp",
    "8 bits, rounded": "MatMul8bitLt",
}


@pytest.mark.parametrize("kind", FUNCTIONS)
@pytest.mark.parametrize(("shape", "rows"), [((N, D), ROWS), ((N, T, D), ROWS), ((N, T, D), TOKENS)], ids=str)
# Red when: a rule is left out, or MatMul8bitFp gets its input of all rows or their shape.
def test_layers_of_few_bits_cost_the_kept_rows(kind: str, shape: tuple[int, ...], rows: Tensor):
    if kind == "8 bits, trained" and len(shape) > 2:
        pytest.skip("bitsandbytes 0.50.2 has no backward for it on the CPU")
    torch.manual_seed(0)
    below, base, down, up = nn.Linear(D, D), layer(kind), nn.Linear(D, 4), nn.Linear(4, D)
    product = partial(rounded, layer=base) if kind == "8 bits, rounded" else base
    x = torch.randn(shape)

    def losses() -> Tensor:
        h = below(x).tanh()
        each = (product(h) + up(down(h))).square().mean(-1)
        return each.flatten(1).mean(1) if each.ndim > rows.ndim else each

    params = [p for part in (below, base, down, up) for p in part.parameters() if p.requires_grad]
    report = as_indexed(lambda take: gradients(lambda: take(losses(), rows).mean(), params), rtol=1e-4, atol=1e-6)
    assert report.sliced[FUNCTIONS[kind]] == 1 and not report.densified
