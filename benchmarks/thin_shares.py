"""How the cost of a thinned step falls in the course of a training, and the share of the rows that each block keeps.

A small ViT learns scikit-learn's digits (16 patches of 2 x 2 pixels) from random weights, after `rowprop.thin(model)`.
One step in `--count-every` is counted, but none that measures: the FLOPs of forward and backward, over those of the
first step in full. Beside it stands a step that picks half of its rows, counted once. Nothing is timed: in so small a
ViT draws do not pay at high shares, so the decision is switched off. `--again` draws the kept figures anew.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import rowprop
from bench_step import RESULTS, Transformer, save, setting
from rowprop.app.compare.data import load_data
from rowprop.app.page import COLOURS, GREY, drawing, legend, new_figure, png
from rowprop.files import write_whole

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FIGURE = Path(__file__).parents[1] / "docs" / "figures" / "thin-shares.png"
WIDTH, DEPTH = 96, 4
ROWS = 64
RATE = 2e-3


def patches(images: Tensor) -> Tensor:
    """(N, 1, 8, 8) -> 16 patches of 4 pixels, (N, 16, 4)."""
    return F.unfold(images, 2, stride=2).transpose(1, 2)


def batches(epochs: int, rows: int) -> list[Tensor]:
    """The rows of each step: every epoch in an order of its own, without the last, smaller batch."""
    generator = torch.Generator().manual_seed(0)
    orders = [torch.randperm(rows, generator=generator) for _ in range(epochs)]
    return [batch for order in orders for batch in order.split(ROWS) if batch.numel() == ROWS]


def flops_of(model: nn.Module, x: Tensor, y: Tensor, rows: Tensor | None = None) -> int:
    """FLOPs of a forward and a backward, of some rows only if they are given; the gradients stay."""
    with rowprop.cost.count_flops() as flops:
        losses = F.cross_entropy(model(x), y, reduction="none")
        (losses if rows is None else rowprop.pick(losses, rows)).mean().backward()
    assert not flops.uncounted, flops.uncounted
    return flops.total_flops


def train(epochs: int, count_every: int) -> dict[str, Any]:
    """Train once.

    Returns:
        ``total`` number of steps; ``steps`` that were counted, and for each of these: ``flops`` over those in full,
        ``keep`` of each block, ``pairs``. ``picked``: the quotient of FLOPs for a step that picks half of the rows.
    """
    data = load_data("digits")
    x, y = patches(data.train_x), data.train_y
    torch.manual_seed(0)
    model = Transformer(nn.Linear(4, WIDTH), 16, WIDTH, DEPTH, 10, causal=False)
    plan = batches(epochs, y.numel())
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=len(plan))
    full, half = (flops_of(model, x[plan[0]], y[plan[0]], rows) for rows in (None, torch.arange(0, ROWS, 2)))
    optimizer.zero_grad()
    handle = rowprop.thin(model)
    handle._worth.decide = lambda *_: None  # it would draw no rows at high shares, to save time
    found: dict[str, Any] = {"steps": [], "flops": [], "keep": {name: [] for name in handle.blocks}, "pairs": []}
    for step, rows in enumerate(plan):
        if step % count_every == 0:
            measured, flops = handle._control.measured, flops_of(model, x[rows], y[rows])
            if measured == handle._control.measured:
                found["steps"].append(step)
                found["flops"].append(flops / full)
                found["pairs"].append(handle.record.pairs)
                for name, shares in found["keep"].items():
                    shares.append(handle.record.keep[name])
        else:
            F.cross_entropy(model(x[rows]), y[rows]).backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return found | {"picked": half / full, "total": len(plan)}


# --- the figure ------------------------------------------------------------------------------------------------------


@drawing()
def figure(found: dict[str, Any]) -> Figure:
    """Shares of the rows as thin lines, the cost of the step as a thick one."""
    drawn, axes = new_figure("step", "share", height=300)
    blocks = list(found["keep"])[::-1]
    for number, (name, colour) in enumerate(zip(blocks, COLOURS[1:], strict=True)):
        label = f"rows, {('top', 'second', 'third', 'bottom')[number]} block"
        axes.plot(found["steps"], found["keep"][name], color=colour, linewidth=1.5, label=label)
    axes.plot(found["steps"], found["flops"], color=COLOURS[0], linewidth=3, label="FLOPs of the step")
    axes.axhline(found["picked"], color=GREY, linestyle=":", label="FLOPs, half of the rows picked")
    axes.set_ylim(0, 1.05)
    legend(drawn)
    return drawn


def told(found: dict[str, Any]) -> str:
    """The figure in words."""
    begin, end = (", ".join(f"{shares[at]:.2f}" for shares in [*found["keep"].values()][::-1]) for at in (0, -1))
    return (
        f"FLOPs of the step over those in full: {found['flops'][0]:.2f} at first, {found['flops'][-1]:.2f} at the end, "
        f"{mean(found['flops']):.2f} on average. Rows kept, from the top block: {begin} at first, {end} at the end. A "
        f"step that picks half of its rows: {found['picked']:.2f}."
    )


def newest() -> Path:
    """The newest results."""
    return sorted(RESULTS.glob("*-thin-shares.json"))[-1]


def main() -> None:
    """Train, or read what was kept; draw."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--epochs", type=int, default=14, help="default %(default)s")
    parser.add_argument("--count-every", type=int, default=10, help="steps per counted one (default %(default)s)")
    parser.add_argument("--again", action="store_true", help="train nothing, draw the newest results anew")
    args = parser.parse_args()
    if args.again:
        kept = json.loads(newest().read_text())
    else:
        torch.set_num_threads(1)
        about = setting(torch.device("cpu"), 1, model=f"ViT of width {WIDTH} and depth {DEPTH}", rows=str(ROWS))
        kept = {"setting": about, "command": " ".join(["python benchmarks/thin_shares.py", *sys.argv[1:]])}
        kept["found"] = train(args.epochs, args.count_every)
        lines = ["# The cost of a thinned step", "", f"`{kept['command']}`", "", (__doc__ or "").strip(), ""]
        lines += [f"{', '.join(f'{key} {value}' for key, value in about.items())}.", "", told(kept["found"]), ""]
        save(RESULTS, "thin-shares", kept, "\n".join(lines))
    write_whole(FIGURE, png(figure(kept["found"])))
    print(f"{told(kept['found'])}\n{FIGURE} is written.")


if __name__ == "__main__":
    main()
