"""Training steps of decoders that keep some of their tokens, beside their limits.

In each round, for each keep, the plain step and both ways through attention make one step after each other on the same
model, batch and tokens, in all six orders from round to round. The limit is F + share B, with F and B the forward and
backward of a plain step. Under ``cut`` the share is K of N*T tokens. Under ``exact`` it is the share of the backward's
products that a kept token reaches: of the head and of the last block K tokens, but for the keys and values that they
attend to, and all tokens below. Tokens are drawn beforehand, K of N*T at random, so sequences keep unlike numbers of
them.

A figure is a quotient of two lower quartiles, of a variant's steps and of the plain steps' times or limits; the plain
steps of every keep count alike, since they do the same work. Other work on the machine only makes steps longer, so the
lower quartile repeats better than the median. It is the quartile of steps, not of quotients: a disturbed plain step
makes a quotient small. Each variant makes a step for each keep in every round, so a slow spell meets all of them. The
range holds nine tenths of the figures that as many rounds, drawn from these with replacement, give.

The update (AdamW) is the same for every variant and is left out.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import permutations
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import rowprop
from bench_step import KEEPS, PHASES, RESULTS, Batch, Bench, Step, Transformer, device_stem, save, setting, spread

# --- workloads: plain models -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Size:
    """A decoder and its batch."""

    sequences: int
    steps: int
    width: int
    depth: int
    vocabulary: int
    head: int  # width of an attention head
    groups: int  # query heads that share a key head
    hidden: int  # width between an MLP's layers
    gated: bool  # whether the MLP has a third layer

    def products(self, queries: float = 1.0, keys: float = 1.0) -> float:
        """Products of one token's backward in one block: projections, MLP, and attention to all tokens.

        ``queries`` is the share of tokens whose outputs take a gradient, ``keys`` the share whose keys and values do.
        """
        at_queries = 2 * self.width**2 + (3 if self.gated else 2) * self.width * self.hidden
        at_keys = 2 * self.width**2 / self.groups
        attention = 5 / 2 * self.steps * self.width  # five products of (T, T) with a head's width, of two operands each
        return 2 * (at_queries * queries + at_keys * keys) + 2 * attention * queries

    def share(self, keep: float) -> float:
        """The share of the backward's products that kept tokens reach if attention is exact."""
        head, block = 2 * self.width * self.vocabulary, self.products()
        reached = keep * head + self.products(queries=keep) + (self.depth - 1) * block
        return reached / (head + self.depth * block)


def gpt(size: Size) -> nn.Module:
    """Layer norms, learned places, a GELU."""
    embed = nn.Embedding(size.vocabulary, size.width)
    return Transformer(embed, size.steps, size.width, size.depth, size.vocabulary, causal=True, head=size.head)


class LlamaBlock(nn.Module):
    """RMS norms, rotary places, grouped heads, a gated MLP; no biases."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads, self.groups = size.width // size.head, size.groups
        self.norm1, self.norm2 = nn.RMSNorm(size.width), nn.RMSNorm(size.width)
        keys = size.width // size.groups
        self.query, self.out = (nn.Linear(size.width, size.width, bias=False) for _ in range(2))
        self.key, self.value = (nn.Linear(size.width, keys, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(size.width, size.hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(size.hidden, size.width, bias=False)

    def forward(self, x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
        """(N, T, width) -> (N, T, width)."""
        y = self.norm1(x)
        query, key, value = (
            part.unflatten(-1, (-1, x.shape[-1] // self.heads)).transpose(1, 2)
            for part in (self.query(y), self.key(y), self.value(y))
        )
        cos, sin = turn
        query, key = (t * cos + torch.cat([-t.chunk(2, -1)[1], t.chunk(2, -1)[0]], -1) * sin for t in (query, key))
        key, value = (t.repeat_interleave(self.groups, 1) for t in (key, value))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    """The blocks of a Llama between an embedding and a head."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(size.vocabulary, size.width), nn.RMSNorm(size.width)
        self.blocks = nn.ModuleList([LlamaBlock(size) for _ in range(size.depth)])
        self.head = nn.Linear(size.width, size.vocabulary, bias=False)
        angle = torch.arange(size.steps)[:, None] * 10000 ** -torch.linspace(0, 1, size.head // 2 + 1)[:-1]
        self.register_buffer("angle", torch.cat([angle, angle], -1))

    def forward(self, ids: Tensor) -> Tensor:
        """(N, T) -> (N, T, vocabulary)."""
        x, turn = self.embed(ids), (self.angle.cos(), self.angle.sin())
        for block in self.blocks:
            x = block(x, turn)
        return self.head(self.norm(x))


CPU = {
    "gpt": Size(4, 256, 768, 3, 2048, 64, 1, 3072, gated=False),
    "llama": Size(4, 256, 768, 3, 2048, 64, 2, 2048, gated=True),
}
GPU = {
    "gpt": Size(16, 1024, 768, 12, 50304, 64, 1, 3072, gated=False),
    "llama": Size(8, 1024, 2048, 12, 32000, 64, 4, 5632, gated=True),
}
MODELS: dict[str, Callable[[Size], nn.Module]] = {"gpt": gpt, "llama": Llama}


def token_losses(model: nn.Module, batch: Batch) -> Tensor:
    """Cross entropy of the next tokens, (N, T)."""
    inputs, target = batch
    return F.cross_entropy(model(inputs).flatten(0, 1), target.flatten(), reduction="none").view(target.shape)


# --- steps -----------------------------------------------------------------------------------------------------------

VARIANTS: dict[str, Callable[[nn.Module, Batch, Tensor], Tensor]] = {
    "full": lambda model, batch, kept: token_losses(model, batch).mean(),
    "exact": lambda model, batch, kept: rowprop.pick(token_losses(model, batch), kept).mean(),
    "cut": lambda model, batch, kept: rowprop.pick(token_losses(model, batch), kept, attention="cut").mean(),
}


def draw(size: Size, keep: float, device: torch.device) -> Tensor:
    """A mask (N, T) of K tokens at random."""
    mask = torch.zeros(size.sequences * size.steps, dtype=torch.bool)
    mask[torch.randperm(mask.numel())[: round(keep * mask.numel())]] = True
    return mask.view(size.sequences, size.steps).to(device)


def measure(bench: Bench, size: Size, rounds: int, warmup: int = 3) -> dict[tuple[float, str], list[Step]]:
    """For each keep and variant its steps, one per round."""
    steps: dict[tuple[float, str], list[Step]] = {(keep, name): [] for keep in KEEPS for name in VARIANTS}
    orders = list(permutations(VARIANTS))
    for number in range(warmup + rounds):
        for keep in KEEPS:
            kept = draw(size, keep, bench.batch[0].device)
            for name in orders[number % len(orders)]:
                step = bench.step(VARIANTS[name], kept)
                if number >= warmup:
                    steps[keep, name].append(step)
    return steps


def quotient(above: list[list[float]], below: list[list[float]], draws: int = 500) -> dict[str, float]:
    """A quotient of lower quartiles, and the range of nine tenths of those of rounds drawn anew.

    Args:
        above: Seconds of the steps of each round.
        below: The same, of the steps to compare with.
        draws: How often as many rounds are drawn.
    """

    def of(rounds: list[int]) -> float:
        first, second = (
            statistics.quantiles((s for r in rounds for s in x[r]), n=4, method="inclusive")[0] for x in (above, below)
        )
        return first / second

    every, generator = range(len(above)), random.Random(0)
    found = statistics.quantiles(
        (of(generator.choices(every, k=len(above))) for _ in range(draws)), n=20, method="inclusive"
    )
    return {"low": found[0], "value": of(list(every)), "high": found[-1]}


def summarize(name: str, size: Size, steps: dict[tuple[float, str], list[Step]]) -> dict[str, Any]:
    """Every figure of one decoder."""
    plain = list(zip(*(taken for (_, variant), taken in steps.items() if variant == "full"), strict=True))
    rows: list[dict[str, Any]] = []
    for (keep, variant), taken in steps.items():
        if variant == "full":
            continue
        share = size.share(keep) if variant == "exact" else keep
        own = [[step.gradient_s] for step in taken]
        full = [[p.gradient_s for p in each] for each in plain]
        best = [[p.forward_s + share * p.backward_s for p in each] for each in plain]
        rows.append({
            "keep": keep, "attention": variant, "share": share,
            "ratio": quotient(own, full), "limit": quotient(best, full), "over_limit": quotient(own, best),
        })  # fmt: skip
    phases = {f"{phase}_s": spread([getattr(p, f"{phase}_s") for each in plain for p in each]) for phase in PHASES}
    return {"workload": name, "size": str(size), "rounds": len(plain), **phases, "variants": rows}


def ranged(figure: dict[str, float]) -> str:
    """A figure with its range."""
    return f"{figure['value']:.3f} ({figure['low']:.3f} to {figure['high']:.3f})"


def markdown(result: dict[str, Any]) -> str:
    """The same figures to read."""
    about = ", ".join(f"{key} {value}" for key, value in result["setting"].items())
    lines = ["# Steps that keep some of their tokens, beside their limits", "", f"`{result['command']}`: {about}", ""]
    lines += (__doc__ or "").partition("\n\n")[2].strip().splitlines()
    for w in result["workloads"]:
        f, b, _ = (1000 * w[f"{phase}_s"]["median"] for phase in PHASES)
        lines += [
            "", f"## {w['workload']}: {w['size']}", "",
            f"Plain step: F {f:.1f} ms, B {b:.1f} ms; medians of {w['rounds']} steps of each kind.", "",
            "| keep | attention | share of B | ratio (range) | limit | over limit (range) |",
            "|---|---|---|---|---|---|",
        ]  # fmt: skip
        lines += [
            f"| {v['keep']} | {v['attention']} | {v['share']:.3f} | {ranged(v['ratio'])} | {v['limit']['value']:.3f} "
            f"| {ranged(v['over_limit'])} |"
            for v in w["variants"]
        ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure, print, and write JSON and markdown."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", default="cpu", help="cpu (default) or cuda")
    parser.add_argument("--amp", choices=["off", "bf16"], default="off", help="autocast (default off)")
    parser.add_argument("--rounds", type=int, default=20, help="steps of each variant (default %(default)s)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="CPU threads (default torch's)")
    parser.add_argument("--workloads", default=",".join(MODELS), help="comma-separated (default all)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the results (default %(default)s)")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    device = torch.device(args.device)
    sizes = GPU if device.type == "cuda" else CPU

    def autocast() -> AbstractContextManager[Any]:
        return torch.autocast(device.type, torch.bfloat16, enabled=args.amp == "bf16")

    dtype = "float32" if args.amp == "off" else "float32 under bfloat16 autocast"
    result: dict[str, Any] = {
        "command": " ".join(["python benchmarks/bench_tokens.py", *sys.argv[1:]]),
        "setting": setting(device, args.threads, dtype=dtype),
        "workloads": [],
    }
    for name in args.workloads.split(","):
        size = sizes[name]
        model = MODELS[name](size).to(device)
        batch = tuple(torch.randint(size.vocabulary, (size.sequences, size.steps)).to(device) for _ in range(2))
        # a rate so small that no step changes what the next one costs
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-7, fused=True)
        result["workloads"].append(
            summarize(name, size, measure(Bench(model, batch, optimizer, autocast), size, args.rounds))
        )
        print(markdown({**result, "workloads": result["workloads"][-1:]}).partition("## ")[2], flush=True)
    more = "" if args.amp == "off" else f"-{args.amp}"
    save(args.out, f"tokens-{device_stem(device, args.threads)}{more}", result, markdown(result))


if __name__ == "__main__":
    main()
