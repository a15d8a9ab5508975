"""The models of scripts/gpu: plain torch.nn, each returned as model, batch and losses.

``CHECKED`` holds ten models at a size for ``rowprop verify``, ``FULL`` five at a size that fills an H100, and ``TINY``
all of them for a dry run. The command line finds them by these names::

    rowprop verify benchmarks/gpu_models.py:CHECKED.llama --device cuda --dtype bfloat16
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import bench_step
import flop_networks
from bench_step import Batch, Transformer, row_losses

Made = tuple[nn.Module, Batch, Callable[[nn.Module, Batch], Tensor]]


def mlp(n: int, width: int) -> Made:
    """Three hidden layers."""
    return *bench_step.mlp(n, width), row_losses


# --- images ----------------------------------------------------------------------------------------------------------


def images(n: int, side: int) -> Tensor:
    return torch.randn(n, 3, side, side).to(memory_format=torch.channels_last)


def resnet(n: int, side: int, depth: int, first: int = 64, stages: int = 4) -> Made:
    """The ResNet of this depth, channels last, BatchNorm in training."""
    model = flop_networks.resnet(depth, first, stages).to(memory_format=torch.channels_last)
    return model, (images(n, side), torch.randint(1000, (n,))), row_losses


class Patches(nn.Module):
    """A class token, and patches of 16 x 16 pixels."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.cut = nn.Parameter(torch.zeros(1, 1, width)), nn.Conv2d(3, width, 16, 16)

    def forward(self, x: Tensor) -> Tensor:
        """(N, 3, H, W) -> (N, 1 + patches, width)."""
        patches = self.cut(x).flatten(2).transpose(1, 2)
        return torch.cat([self.first.to(patches.dtype).expand(len(x), -1, -1), patches], 1)


class Vit(Transformer):
    """Classes from the first token."""

    def forward(self, x: Tensor) -> Tensor:
        """(N, 3, H, W) -> (N, classes)."""
        return self.head(self.norm(self.blocks(self.embed(x) + self.places))[:, 0])


def vit(n: int, side: int, width: int, depth: int) -> Made:
    """A ViT with patches of 16 pixels and heads 64 wide; B is 768 wide and 12 deep."""
    model = Vit(Patches(width), 1 + (side // 16) ** 2, width, depth, 1000, causal=False, head=64)
    return model, (torch.randn(n, 3, side, side), torch.randint(1000, (n,))), row_losses


class UNet(nn.Module):
    """Convolutions down and up again, with what was on the way down beside what comes up."""

    def __init__(self, width: int, levels: int, classes: int) -> None:
        super().__init__()

        def double(inputs: int, outputs: int) -> nn.Module:
            # A bias before a norm has next to no gradient but rounding.
            convs = [nn.Conv2d(width, outputs, 3, padding=1, bias=False) for width in (inputs, outputs)]
            return nn.Sequential(*[part for conv in convs for part in (conv, nn.GroupNorm(8, outputs), nn.SiLU())])

        widths = [width * 2**level for level in range(levels)]
        self.down = nn.ModuleList(map(double, [3, *widths], widths))
        self.up = nn.ModuleList(nn.ConvTranspose2d(2 * w, w, 2, 2) for w in widths[-2::-1])
        self.join = nn.ModuleList(double(2 * w, w) for w in widths[-2::-1])
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        """(N, 3, H, W) -> (N, H, W, classes)."""
        kept: list[Tensor] = []
        for level, down in enumerate(self.down):
            x = down(F.max_pool2d(x, 2) if level else x)
            kept.append(x)
        for up, join, beside in zip(self.up, self.join, kept[-2::-1], strict=True):
            x = join(torch.cat([beside, up(x)], 1))
        return self.head(x).movedim(1, -1)


def unet(n: int, side: int, width: int, levels: int) -> Made:
    """A class for every pixel."""
    model = UNet(width, levels, 21).to(memory_format=torch.channels_last)
    return model, (images(n, side), torch.randint(21, (n, side, side))), row_losses


# --- text ------------------------------------------------------------------------------------------------------------


def tokens(n: int, steps: int, vocabulary: int) -> Tensor:
    return torch.randint(1, vocabulary, (n, steps))


class Bert(nn.Module):
    """An encoder with norms last, dropout, and padding (token 0) behind the mask; classes from the first token."""

    def __init__(self, vocabulary: int, steps: int, width: int, depth: int, head: int) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(vocabulary, width), nn.Embedding(steps, width)
        self.norm, self.drop, self.heads = nn.LayerNorm(width), nn.Dropout(0.1), width // head
        self.layers = nn.ModuleList(
            nn.ModuleDict({
                "qkv": nn.Linear(width, 3 * width), "out": nn.Linear(width, width), "norm1": nn.LayerNorm(width),
                "up": nn.Linear(width, 4 * width), "down": nn.Linear(4 * width, width), "norm2": nn.LayerNorm(width),
            })
            for _ in range(depth)
        )  # fmt: skip
        self.head = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 2))

    def forward(self, x: Tensor) -> Tensor:
        """(N, T) tokens -> (N, 2)."""
        n, t = x.shape
        seen = (x != 0)[:, None, None]
        x = self.drop(self.norm(self.token(x) + self.place.weight[:t]))
        for layer in self.layers:
            q, k, v = layer["qkv"](x).view(n, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
            mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=seen).transpose(1, 2).flatten(2)
            x = layer["norm1"](x + self.drop(layer["out"](mixed)))
            x = layer["norm2"](x + self.drop(layer["down"](F.gelu(layer["up"](x)))))
        return self.head(x[:, 0])


def bert(n: int, steps: int, width: int, depth: int) -> Made:
    """Two classes; the rows are padded to one length."""
    x = tokens(n, steps, 30_522)
    x[torch.arange(steps) >= torch.randint(steps // 2, steps + 1, (n, 1))] = 0
    return Bert(30_522, steps, width, depth, 64), (x, torch.randint(2, (n,))), row_losses


def gpt2(n: int, steps: int, width: int, depth: int, vocabulary: int = 50_257) -> Made:
    """GPT-2, its head tied to its embedding; 124M is 768 wide and 12 deep."""
    model = Transformer(nn.Embedding(vocabulary, width), steps, width, depth, vocabulary, causal=True, head=64)
    model.head = nn.Linear(width, vocabulary, bias=False)
    assert isinstance(model.embed, nn.Embedding)
    nn.init.normal_(model.embed.weight, std=0.02)
    model.head.weight = model.embed.weight
    return model, (tokens(n, steps, vocabulary), tokens(n, steps, vocabulary)), row_losses


class LlamaBlock(nn.Module):
    """RMSNorm, rotated queries and keys, fewer heads of keys than of queries, SwiGLU."""

    def __init__(self, width: int, heads: int, kv_heads: int, hidden: int) -> None:
        super().__init__()
        head = width // heads
        self.head, self.groups = head, heads // kv_heads
        self.norm1, self.norm2 = nn.RMSNorm(width, eps=1e-5), nn.RMSNorm(width, eps=1e-5)
        self.q, self.out = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.k, self.v = (nn.Linear(width, kv_heads * head, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """(N, T, width) -> (N, T, width)."""

        def rotated(t: Tensor) -> Tensor:
            first, second = t.chunk(2, -1)
            return t * cos.to(t.dtype) + torch.cat([-second, first], -1) * sin.to(t.dtype)

        y = self.norm1(x)
        q, k, v = (p(y).unflatten(-1, (-1, self.head)).transpose(1, 2) for p in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(rotated(q), rotated(k), v, is_causal=True, enable_gqa=self.groups > 1)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    """Blocks between an embedding and a head of its own."""

    def __init__(self, steps: int, width: int, depth: int, heads: int, kv_heads: int, hidden: int, vocabulary: int):
        super().__init__()
        half = width // heads // 2
        angles = torch.arange(steps)[:, None] / 500_000 ** (torch.arange(half) / half)
        self.register_buffer("cos", angles.cos().repeat(1, 2))
        self.register_buffer("sin", angles.sin().repeat(1, 2))
        self.embed, self.head = nn.Embedding(vocabulary, width), nn.Linear(width, vocabulary, bias=False)
        self.blocks = nn.ModuleList(LlamaBlock(width, heads, kv_heads, hidden) for _ in range(depth))
        self.norm = nn.RMSNorm(width, eps=1e-5)

    def forward(self, x: Tensor) -> Tensor:
        """(N, T) tokens -> (N, T, vocabulary)."""
        x = self.embed(x)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return self.head(self.norm(x))


def llama(
    n: int, steps: int, width: int, depth: int, *, heads: int, kv_heads: int, hidden: int, vocabulary: int
) -> Made:
    """The layers of Llama 3; the 1B is 2048 wide and 16 deep, with 32 heads, 8 of keys, and 8192 hidden."""
    model = Llama(steps, width, depth, heads, kv_heads, hidden, vocabulary)
    return model, (tokens(n, steps, vocabulary), tokens(n, steps, vocabulary)), row_losses


class Recurrent(nn.Module):
    """Two LSTM layers over an embedding."""

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.embed, self.lstm = nn.Embedding(vocabulary, width), nn.LSTM(width, width, 2, batch_first=True)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, x: Tensor) -> Tensor:
        """(N, T) tokens -> (N, T, vocabulary)."""
        return self.head(self.lstm(self.embed(x))[0])


def lstm(n: int, steps: int, width: int, vocabulary: int = 1024) -> Made:
    """Next token of few."""
    return Recurrent(vocabulary, width), (tokens(n, steps, vocabulary), tokens(n, steps, vocabulary)), row_losses


class Experts(nn.Module):
    """Each token goes through two of several experts, and the results are added into place."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(experts)
        )

    def forward(self, x: Tensor) -> Tensor:
        """(N, T, width) -> (N, T, width)."""
        flat = x.flatten(0, 1)
        weights, chosen = self.gate(flat).softmax(-1).topk(2, -1)
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            rows, place = torch.where(chosen == number)
            out = out.index_add(0, rows, (weights[rows, place, None] * expert(flat[rows])).to(out.dtype))
        return out.view_as(x)


def moe(n: int, steps: int, width: int, depth: int, experts: int) -> Made:
    """A GPT whose blocks have experts in place of their hidden layer."""
    model, batch, losses = gpt2(n, steps, width, depth, 1024)
    assert isinstance(model, Transformer)
    for block in model.blocks:
        block.mlp = Experts(width, experts)
    return model, batch, losses


# --- sizes -----------------------------------------------------------------------------------------------------------

CHECKED = SimpleNamespace(
    mlp=partial(mlp, 256, 512),
    resnet18=partial(resnet, 32, 64, 18),
    resnet50=partial(resnet, 32, 96, 50),
    vit=partial(vit, 32, 96, 384, 6),
    bert=partial(bert, 32, 128, 384, 4),
    gpt2=partial(gpt2, 16, 128, 384, 4, 4096),
    llama=partial(llama, 16, 128, 512, 4, heads=8, kv_heads=2, hidden=1024, vocabulary=4096),
    lstm=partial(lstm, 32, 32, 256),
    unet=partial(unet, 16, 64, 32, 3),
    moe=partial(moe, 16, 64, 256, 2, 4),
)
TINY = SimpleNamespace(
    mlp=partial(mlp, 16, 16),
    resnet18=partial(resnet, 16, 32, 18, 8, 2),
    resnet50=partial(resnet, 16, 32, 50, 8, 1),
    vit=partial(vit, 16, 32, 64, 1),
    bert=partial(bert, 16, 8, 64, 1),
    gpt2=partial(gpt2, 16, 8, 64, 1, 64),
    llama=partial(llama, 16, 8, 64, 1, heads=4, kv_heads=2, hidden=96, vocabulary=64),
    llama8b=partial(llama, 16, 8, 64, 1, heads=4, kv_heads=1, hidden=96, vocabulary=64),
    lstm=partial(lstm, 16, 4, 16, 32),
    unet=partial(unet, 16, 16, 8, 2),
    moe=partial(moe, 16, 8, 64, 1, 4),
)
FULL = SimpleNamespace(
    resnet50=partial(resnet, 256, 224, 50),
    vit=partial(vit, 128, 224, 768, 12),
    gpt2=partial(gpt2, 16, 1024, 768, 12),
    llama=partial(llama, 16, 512, 2048, 16, heads=32, kv_heads=8, hidden=8192, vocabulary=32_000),
    llama8b=partial(llama, 16, 1024, 4096, 4, heads=32, kv_heads=8, hidden=14_336, vocabulary=32_000),
)
TITLES = {
    "resnet50": "ResNet-50, channels last", "vit": "ViT-B/16", "gpt2": "GPT-2 124M", "llama": "Llama, 1B",
    "llama8b": "Llama 8B, 4 of its layers",
}  # fmt: skip
