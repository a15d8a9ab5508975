"""Training steps whose ops Python dispatches, and the same steps by native dispatch.

In each round every model makes a plain step, a step of the kept rows alone (`few`), and the same sliced step by Python
and by native dispatch, one after another, in an order that turns. Rows or tokens are drawn at random beforehand. The
limit of a sliced step is F + kB, with F and B the forward and backward of the plain step beside it, and k the share
that is kept. `few` computes the forward of the kept rows only, so it can be below the limit. The thinned encoder, of
MiniLM's sizes, draws rows at its last block. The update is left out.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import bench_tokens
import rowprop
from bench_step import (
    CPU,
    RESULTS,
    Batch,
    Bench,
    Loss,
    draw,
    full,
    gpt,
    resnet,
    row_losses,
    save,
    setting,
    sliced,
    spread,
    vit,
)
from bench_tokens import VARIANTS, Size
from rowprop.backprop.autograd.rowgrad import by_python, go_native
from rowprop.native import building

KEEP = 0.25
TOKENS = Size(4, 128, 256, 4, 512, 64, 1, 1024, gated=False)


class Encoder(nn.Module):
    """MiniLM's blocks on vectors, and a head on the mean of the tokens."""

    def __init__(self) -> None:
        super().__init__()
        block = nn.TransformerEncoderLayer(384, 12, 1536, 0.1, "gelu", batch_first=True)
        self.blocks = nn.TransformerEncoder(block, 6, enable_nested_tensor=False)
        self.head = nn.Linear(384, 10)

    def forward(self, x: Tensor) -> Tensor:
        """(N, T, 384) -> (N, 10)."""
        return self.head(self.blocks(x).mean(1))


@contextmanager
def thinned(model: nn.Module) -> Generator[None]:
    """Have backwards within the block run on rows that are drawn at the last block."""
    handle = rowprop.thin(model, keep=KEEP, blocks=["blocks.layers.5"])
    yield
    handle.remove()


def few(model: nn.Module, batch: Batch, rows: Tensor) -> Tensor:
    """The kept rows alone."""
    return row_losses(model, tuple(t[rows] for t in batch)).mean()


def _text(size: Size) -> Batch:
    ids = torch.randint(size.vocabulary, (2, size.sequences, size.steps))
    return ids[0], ids[1]


Make = Callable[[], tuple[nn.Module, Batch]]
MODELS: dict[str, tuple[Make, Loss]] = {
    "ViT": (lambda: vit(*CPU.vit), sliced),
    "GPT": (lambda: gpt(*CPU.gpt), sliced),
    "ResNet": (lambda: resnet(*CPU.resnet), sliced),
    "GPT, tokens": (lambda: (bench_tokens.gpt(TOKENS), _text(TOKENS)), VARIANTS["cut"]),
    "MiniLM, thinned": (lambda: (Encoder(), (torch.randn(16, 32, 384), torch.randint(10, (16,)))), full),
}


def measure(make: Make, loss: Loss, rounds: int) -> dict[str, Any]:
    """Every figure of one model."""
    torch.manual_seed(0)
    model, batch = make()
    bench = Bench(model, batch, torch.optim.SGD(model.parameters(), lr=0.0), nullcontext)
    by_tokens, device = loss is VARIANTS["cut"], torch.device("cpu")
    around = partial(thinned, model) if loss is full else nullcontext
    ways: dict[str, tuple[Loss, Callable[[], AbstractContextManager[Any]]]] = {
        "plain": (full, nullcontext),
        "few": (few, nullcontext),
        "Python": (loss, by_python),
        "native": (loss, nullcontext),
    }
    if by_tokens:
        del ways["few"]
    names, warmup = list(ways), 6
    taken: dict[str, list[Any]] = {name: [] for name in names}
    for number in range(warmup + rounds):
        kept = bench_tokens.draw(TOKENS, KEEP, device) if by_tokens else draw(len(batch[0]), KEEP, device)
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            of, dispatch = ways[name]
            with dispatch(), around() if name in ("Python", "native") else nullcontext():
                step = bench.step(of, kept)
            if number >= warmup:
                taken[name].append(step)
    before = taken.pop("plain")

    def beside(steps: list[Any], of: Callable[[Any, Any], float]) -> dict[str, float]:
        return spread([of(step, full) for step, full in zip(steps, before, strict=True)])

    return {
        "plain_ms": 1000 * statistics.median(full.gradient_s for full in before),
        **{
            name: {
                "backward": beside(steps, lambda s, p: s.backward_s / p.backward_s),
                "over_limit": beside(steps, lambda s, p: s.gradient_s / (p.forward_s + KEEP * p.backward_s)),
            }
            for name, steps in taken.items()
        },
    }


def main() -> None:
    """Measure, print, and write JSON and markdown."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=40, help="steps of each way (default %(default)s)")
    parser.add_argument("--models", nargs="+", default=list(MODELS), help="default all")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the results (default %(default)s)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if building.find()[0] is None:
        sys.exit(f"What dispatches is {building.find()[1]}; `rowprop native` compiles the native one.")
    go_native()
    about = setting(torch.device("cpu"), 1, dtype="float32")
    command = " ".join(["python benchmarks/native_steps.py", *sys.argv[1:]])
    lines = [
        "# Steps by Python's and by native dispatch",
        "",
        f"`{command}`: " + ", ".join(f"{k} {v}" for k, v in about.items()),
        "",
    ]
    lines += (__doc__ or "").partition("\n\n")[2].strip().splitlines()
    lines += ["", f"Keep {KEEP}. Each figure is a median with its quartiles.", ""]
    lines += [
        "| model | plain step, ms | step over its limit: few | Python | native "
        "| backward over the plain one: few | Python | native |",
    ]
    lines += ["|---|---|---|---|---|---|---|---|"]
    found: dict[str, Any] = {}
    for name in args.models:
        found[name] = f = measure(*MODELS[name], args.rounds)

        def cell(way: str, kind: str, f: dict[str, Any] = f) -> str:
            if way not in f:
                return ""
            s = f[way][kind]
            return f"{s['median']:.2f} ({s['q1']:.2f} to {s['q3']:.2f})"

        cells = [cell(way, kind) for kind in ("over_limit", "backward") for way in ("few", "Python", "native")]
        lines.append(f"| {name} | {f['plain_ms']:.3g} | " + " | ".join(cells) + " |")
        print(lines[-1], flush=True)
    page = "\n".join(lines) + "\n"
    save(args.out, "native-steps-cpu-1-threads", {"command": command, "setting": about, "models": found}, page)


if __name__ == "__main__":
    main()
