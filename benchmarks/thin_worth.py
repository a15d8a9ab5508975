"""Whether thinning turns itself off where it saves no time: the decision, which reads no clock, beside the clock.

Models of four kinds and several sizes run steps in full, and steps whose blocks keep a share of the rows, in turns.
With one share for all blocks, a draw at the top block alone is the cheapest. The seconds of a step are those that the
process ran, so that other work counts for little; of all rounds the lowest eighth is taken.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
from torch import nn

import rowprop
from bench_step import RESULTS, Batch, device_stem, gpt, mlp, resnet, row_losses, save, setting, vit
from rowprop.thinning.blocks import blocks_of
from rowprop.thinning.worth import Work, cheapest, work_below

SHARES = (0.1, 0.25, 0.5, 0.9)
MODELS: dict[str, Callable[[], tuple[nn.Module, Batch]]] = {
    "MLP, width 8, N 32": lambda: mlp(32, 8),
    "MLP, width 256, N 64": lambda: mlp(64, 256),
    "MLP, width 768, N 256": lambda: mlp(256, 768),
    "ViT, width 32, N 64": lambda: vit(64, 16, 32, 4),
    "ViT, width 96, N 64": lambda: vit(64, 16, 96, 4),
    "ViT, width 192, N 64": lambda: vit(64, 64, 192, 4),
    "GPT, width 256, N 16": lambda: gpt(16, 64, 256, 4),
    "ResNet, width 4, N 32": lambda: resnet(32, 8, 4),
    "ResNet, width 16, N 32": lambda: resnet(32, 16, 16),
    "ResNet, width 16, N 128": lambda: resnet(128, 32, 16),
}


@dataclass(frozen=True)
class Found:
    """One model at one share: the decision, and milliseconds of a step."""

    model: str
    mflop: float
    share: float
    draws: bool
    full_ms: float
    thinned_ms: float

    @property
    def agrees(self) -> str:
        """Whether the clock says the same."""
        saved = 1 - self.thinned_ms / self.full_ms
        return "yes" if (saved > 0) is self.draws else f"no, by {abs(saved):.0%}".replace("%", " %")


def works_of(model: nn.Module, batch: Batch) -> dict[str, Work]:
    """The work below each block, from the top."""
    works: dict[str, Work] = {}
    last = -1

    def left(name: str, output: torch.Tensor) -> None:
        nonlocal last
        works[name], last = work_below(output, last)

    blocks = blocks_of(model, None).items()
    hooks = [block.register_forward_hook(lambda _, __, y, name=name: left(name, y)) for name, block in blocks]
    row_losses(model, batch)
    for hook in hooks:
        hook.remove()
    return dict(reversed(works.items()))


def measured(name: str, seconds: float) -> list[Found]:
    """Decide and measure at each share."""
    torch.manual_seed(0)
    model, batch = MODELS[name]()
    works = works_of(model, batch)
    spent: dict[float, list[float]] = {share: [] for share in (1.0, *SHARES)}
    until = time.perf_counter() + seconds
    while time.perf_counter() < until or len(spent[1.0]) < 8:
        for share, found in spent.items():
            handle = rowprop.thin(model, keep=share, blocks=[next(iter(works))])
            if share == 1:
                handle.remove()
            begun_s = time.process_time()
            row_losses(model, batch).mean().backward()
            found.append(time.process_time() - begun_s)
            handle.remove()
            model.zero_grad()
    low = {share: 1000 * sorted(found)[len(found) // 8] for share, found in spent.items()}
    mflop = sum(work.exact for work in works.values()) / 1e6
    chosen = {share: cheapest(list(works.values()), [share] * len(works)) for share in SHARES}
    return [Found(name, mflop, share, bool(chosen[share]), low[1.0], low[share]) for share in SHARES]


def table(every: list[Found]) -> str:
    """The findings as Markdown."""
    lines = [
        "| model | blocks' backward, as MFLOP | share | draws | full step, ms | thinned step, ms | clock agrees |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {f.model} | {f.mflop:,.0f} | {f.share:g} | {'yes' if f.draws else 'no'} | {f.full_ms:.3g} "
        f"| {f.thinned_ms:.3g} | {f.agrees} |"
        for f in every
    ]
    right = sum(f.agrees == "yes" for f in every)
    return "\n".join([*lines, "", f"The clock agrees in {right} of {len(every)} cases.", ""])


def main() -> None:
    """Measure all models."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=6.0, help="for each model (default %(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="default %(default)s")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    every: list[Found] = []
    for name in MODELS:
        every += measured(name, args.seconds)
        print(table(every[-len(SHARES) :]), flush=True)
    about = setting(torch.device("cpu"), args.threads)
    command = " ".join(["python benchmarks/thin_worth.py", *sys.argv[1:]])
    lines = [
        "# Whether thinning turns itself off where it saves no time",
        "",
        f"`{command}`",
        "",
        (__doc__ or "").strip(),
    ]
    lines += ["", f"{', '.join(f'{key} {value}' for key, value in about.items())}.", "", table(every)]
    result = {"setting": about, "command": command, "found": [asdict(f) | {"agrees": f.agrees} for f in every]}
    save(RESULTS, f"thin-worth-{device_stem(torch.device('cpu'), args.threads)}", result, "\n".join(lines))


if __name__ == "__main__":
    main()
