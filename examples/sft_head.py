"""Supervised fine-tuning: the prompts cost nothing in the head.

A conversation's loss counts its answers alone: the labels of prompts and padding are -100. The plain loss runs the head
for all tokens all the same, and with a large vocabulary the head is most of the step. Four ways to one loss:

* `plain`: logits of all tokens, and ``ignore_index=-100``.
* `index`: the head for the K hidden states whose token has a label, by plain indexing. Its forward and backward cost K
  tokens; below the head the gradient is dense again, zero at most tokens.
* `pick`: the same by ``pick``. The gradient below the head holds the K tokens, so the last block's MLP and the queries
  of its attention cost K tokens too. Exact.
* `cut`: ``pick(..., attention="cut")``. The gradient stays on the K tokens in all blocks. Not exact: prompts are no
  longer trained to serve the answers.

The task is to say a prompt's last tokens backwards. A small decoder in the shape of Qwen's learns it, once by the plain
loss and once by `pick`:

    python examples/sft_head.py
    python examples/sft_head.py --vocabulary 32768 --answers 0.1 --steps 5
"""

from __future__ import annotations

import argparse
import copy
import statistics
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import rowprop
from rowprop.cost.measure import Clock, peak_bytes

IGNORED = -100
HEAD_DIM = 32


def rotated(x: Tensor, angles: Tensor) -> Tensor:
    """Rotary positions: (N, heads, T, HEAD_DIM), (T, HEAD_DIM / 2) -> (N, heads, T, HEAD_DIM)."""
    low, high = x.chunk(2, dim=-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1)


class Block(nn.Module):
    """Grouped attention with a bias in its projections, then a gated MLP; norms first."""

    def __init__(self, width: int, groups: int = 2) -> None:
        super().__init__()
        self.heads, self.groups = width // HEAD_DIM, groups
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.queries, self.out = nn.Linear(width, width), nn.Linear(width, width, bias=False)
        self.keys, self.values = (nn.Linear(width, groups * HEAD_DIM) for _ in range(2))
        self.gate, self.up = (nn.Linear(width, 3 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(3 * width, width, bias=False)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        """(N, T, width) -> (N, T, width)."""
        n, t, width = x.shape
        normed, repeats = self.norm1(x), self.heads // self.groups
        q, k, v = (
            project(normed).view(n, t, -1, HEAD_DIM).transpose(1, 2)
            for project in (self.queries, self.keys, self.values)
        )
        q, k = rotated(q, angles), rotated(k, angles)
        k, v = (
            part[:, :, None].expand(n, self.groups, repeats, t, HEAD_DIM).reshape(n, -1, t, HEAD_DIM) for part in (k, v)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(n, t, width))
        normed = self.norm2(x)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))


class Decoder(nn.Module):
    """A language model in the shape of Qwen's: the head's weight is the embedding's."""

    def __init__(self, vocabulary: int, width: int, depth: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        nn.init.normal_(self.embed.weight, std=width**-0.5)
        self.blocks = nn.ModuleList([Block(width) for _ in range(depth)])
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embed.weight

    def hidden(self, ids: Tensor) -> Tensor:
        """Everything below the head: (N, T) -> (N, T, width)."""
        speeds = 10_000.0 ** -torch.linspace(0, 1, HEAD_DIM // 2, device=ids.device)
        angles = torch.arange(ids.shape[1], device=ids.device)[:, None] * speeds
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x, angles)
        return self.norm(x)


def plain(model: Decoder, ids: Tensor, labels: Tensor) -> Tensor:
    """The usual loss: the mean over the tokens whose next token has a label."""
    logits = model.head(model.hidden(ids)[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED)


def index(model: Decoder, ids: Tensor, labels: Tensor) -> Tensor:
    """The head for the tokens that count, by plain indexing."""
    kept = labels[:, 1:] != IGNORED
    return F.cross_entropy(model.head(model.hidden(ids)[:, :-1][kept]), labels[:, 1:][kept])


def pick(model: Decoder, ids: Tensor, labels: Tensor) -> Tensor:
    """The head for the tokens that count, and the backward below it, too."""
    kept = labels[:, 1:] != IGNORED
    return F.cross_entropy(model.head(rowprop.pick(model.hidden(ids)[:, :-1], kept)), labels[:, 1:][kept])


def cut(model: Decoder, ids: Tensor, labels: Tensor) -> Tensor:
    """The same, and keys and values of other tokens take no gradient."""
    kept = labels[:, 1:] != IGNORED
    hidden = rowprop.pick(model.hidden(ids)[:, :-1], kept, attention="cut")
    return F.cross_entropy(model.head(hidden), labels[:, 1:][kept])


Way = Callable[[Decoder, Tensor, Tensor], Tensor]
WAYS: dict[str, Way] = {"plain": plain, "index": index, "pick": pick, "cut": cut}


def conversations(
    count: int, length: int, vocabulary: int, answers: float, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Prompts of random tokens, and answers that say a prompt's last tokens backwards: ids and labels, (count, length).

    Answers are uneven, a half or one and a half of their mean length, where a row has room for that; the last row's
    last token is padding. An answer that is longer than its prompt goes on with random tokens. Only 16 tokens of the
    vocabulary are ever said.
    """
    ids = torch.randint(1, min(vocabulary, 17), (count, length), generator=generator)
    labels = torch.full_like(ids, IGNORED)
    for row in range(count):
        uneven = (0.5, 1.5)[row % 2] if 1.5 * answers < 1 else 1.0
        said = min(round(answers * uneven * length), length)
        prompt = length - said
        known = min(prompt, said)
        ids[row, prompt : prompt + known] = ids[row, prompt - known : prompt].flip(0)
        labels[row, prompt:] = ids[row, prompt:]
    ids[-1, -1], labels[-1, -1] = 0, IGNORED
    return ids, labels


def gradients(model: Decoder, way: Way, ids: Tensor, labels: Tensor) -> list[Tensor]:
    """One gradient per parameter."""
    return list(torch.autograd.grad(way(model, ids, labels), list(model.parameters())))


def largest_difference(model: Decoder, way: Way, ids: Tensor, labels: Tensor) -> float:
    """The difference of a way's gradient and the plain one, relative to the largest entry of each parameter's."""
    pairs = zip(*(gradients(model, one, ids, labels) for one in (plain, way)), strict=True)
    off = [(full - part).abs().max() / full.abs().max().clamp_min(1e-30) for full, part in pairs]
    return float(torch.stack(off).max())


def count_flops(model: Decoder, way: Way, ids: Tensor, labels: Tensor) -> int:
    """FLOPs of a forward and a backward."""
    with rowprop.cost.count_flops() as flops:
        gradients(model, way, ids, labels)
    return flops.total_flops


def train(model: Decoder, way: Way, batches: list[tuple[Tensor, Tensor]]) -> tuple[list[float], list[float]]:
    """Losses and milliseconds of all steps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses, times_ms = [], []
    for ids, labels in batches:
        clock = Clock()
        loss = way(model, ids, labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        clock.done("step")
        times_ms.append(1000 * clock.phases_s()["step"])
        losses.append(float(loss.detach()))
    return losses, times_ms


def main(arguments: list[str] | None = None) -> None:
    """Compare the gradients and the costs of the four ways, then train by two of them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--vocabulary", type=int, default=4096, help="tokens of the vocabulary (default %(default)s)")
    parser.add_argument("--answers", type=float, default=0.3, help="share of tokens in answers (default %(default)s)")
    parser.add_argument("--steps", type=int, default=20, help="training steps (default %(default)s)")
    args = parser.parse_args(arguments)

    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    model = Decoder(args.vocabulary, width=128, depth=2)
    batches = [conversations(8, 64, args.vocabulary, args.answers, generator) for _ in range(args.steps)]
    ids, labels = batches[0]
    print(f"{int((labels[:, 1:] != IGNORED).sum())} of {labels.numel()} tokens count")

    for name in ("index", "pick"):
        off = largest_difference(model, WAYS[name], ids, labels)
        if not off <= 1e-5:
            raise SystemExit(f"the gradients of plain and {name} differ by {off:.1e} of the largest entry")
    print("the gradients of plain, index and pick are equal")

    flops = {name: count_flops(model, way, ids, labels) for name, way in WAYS.items()}
    for name, way in WAYS.items():
        peak = peak_bytes(lambda done, way=way: gradients(model, way, ids, labels)) or 0
        print(f"{name:>6}: {flops[name] / 1e9:6.2f} GFLOPs ({flops[name] / flops['plain']:.2f}), {peak / 1e6:6.1f} MB")

    with rowprop.watch() as report:
        pick(model, ids, labels).backward()
    print("densified:", ", ".join(report.densified) or "nothing")
    model.zero_grad()

    for name in ("plain", "pick"):
        losses, times_ms = train(copy.deepcopy(model), WAYS[name], batches)
        print(f"{name:>6}: loss {losses[0]:.3f} to {losses[-1]:.3f}, {statistics.median(times_ms):.0f} ms per step")


if __name__ == "__main__":
    main()
