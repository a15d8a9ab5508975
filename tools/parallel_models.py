"""A decoder in the shape of Llama, and the plans that shard it over ranks, as torchtitan's do."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.functional import scaled_dot_product_attention, silu

WIDTH, HEADS, VOCABULARY = 16, 4, 32


def linear(inner: int, outer: int) -> nn.Linear:
    return nn.Linear(inner, outer, bias=False)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).view(*x.shape[:2], -1, WIDTH // HEADS).transpose(1, 2) for f in (self.q, self.k, self.v))
        attended = scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(attended.transpose(1, 2).flatten(2))


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = linear(WIDTH, 3 * WIDTH), linear(WIDTH, 3 * WIDTH), linear(3 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention, self.normed, self.gated = nn.RMSNorm(WIDTH), Attention(), nn.RMSNorm(WIDTH), Gated()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x))
        return x + self.gated(self.normed(x))


class Llama(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.norm, self.head = (
            nn.Embedding(VOCABULARY, WIDTH),
            nn.RMSNorm(WIDTH),
            linear(WIDTH, VOCABULARY),
        )
        self.blocks = nn.ModuleList(Block() for _ in range(1))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def sharded(mesh: DeviceMesh, *, sequences: bool, loss: bool) -> Llama:
    """Heads and hidden units over ranks; with ``sequences`` the tokens between, with ``loss`` the logits, too."""
    between = Shard(1) if sequences else Replicate()
    head = ColwiseParallel(
        input_layouts=between, output_layouts=Shard(-1) if loss else Replicate(), use_local_output=not loss
    )
    top: dict[str, Any] = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
        "head": head,
    }
    plan: dict[str, Any] = {f"attention.{name}": ColwiseParallel() for name in "qkv"}
    plan |= {"gated.gate": ColwiseParallel(), "gated.up": ColwiseParallel()}
    plan |= {name: RowwiseParallel(output_layouts=between) for name in ("attention.out", "gated.down")}
    if sequences:
        top["norm"] = plan["norm"] = plan["normed"] = SequenceParallel()
        enter = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
        plan |= {"attention": enter, "gated": enter}
    model = Llama()
    parallelize_module(model, mesh, top)
    for block in model.blocks:
        parallelize_module(block, mesh, plan)
    return model
