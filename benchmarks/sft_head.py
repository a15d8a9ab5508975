"""Steps of supervised fine-tuning where the vocabulary dominates: the plain loss, and heads for answers alone.

The model and the four ways to the loss are those of `examples/sft_head.py`; the page
`docs/supervised-fine-tuning.md` explains them. In each round every way makes one step (forward, backward, AdamW) after
the others on the same model and batch, in an order that turns from round to round. A time is a way's step over the
`plain` step beside it: the median over the rounds, with the quartiles. FLOPs are counted and peak bytes are those of
torch's allocator, beyond the memory held before the step: both are exact, whatever else the machine does.
"""

from __future__ import annotations

import argparse
import re
import runpy
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

import rowprop
from bench_step import RESULTS, device_stem, save, setting, spread
from rowprop.cost.measure import Done, Routine, measure
from rowprop.files import write_whole

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "supervised-fine-tuning.md"
EXAMPLE = SimpleNamespace(**runpy.run_path(str(ROOT / "examples" / "sft_head.py"), run_name="sft_head"))

ANSWERS = (0.1, 0.3, 0.6, 1.0)
ON_PAGE = (0.1, 0.6)  # the results have all
SIZES = {"rows": 4, "length": 128, "vocabulary": 32768, "width": 256, "depth": 4}
HEADER = "| answers | loss | FLOPs | peak memory | time (quartiles) |\n|---|---|---|---|---|\n"


Losses = dict[str, Callable[[], torch.Tensor]]


def compared(losses: Losses, optimizer: torch.optim.Optimizer, rounds: int) -> list[dict[str, Any]]:
    """A row of figures for each way to the loss of one batch; ratios are those to the first way."""

    def counted(loss: Callable[[], torch.Tensor]) -> int:
        with rowprop.cost.count_flops() as flops:
            loss().backward()
        optimizer.zero_grad()
        assert not flops.uncounted, flops.uncounted
        return flops.total_flops

    def step(loss: Callable[[], torch.Tensor]) -> Routine:
        def run(done: Done) -> None:
            found = loss()
            done("forward")
            found.backward()
            done("backward")
            optimizer.step()
            optimizer.zero_grad()
            done("update")

        return run

    flops = {way: counted(loss) for way, loss in losses.items()}
    taken = measure({way: step(loss) for way, loss in losses.items()}, rounds=rounds, warmup=1)
    first = next(iter(losses))
    rows: list[dict[str, Any]] = []
    for way, timing in taken.items():
        ratios = [one / other for one, other in zip(timing.each_s(), taken[first].each_s(), strict=True)]
        rows.append({
            "way": way, "first": way == first, "flops": flops[way], "flops_ratio": flops[way] / flops[first],
            "peak_ratio": timing.peak_bytes / taken[first].peak_bytes, "time_ratio": spread(ratios), **timing.to_dict(),
        })  # fmt: skip
    return rows


def figures(rounds: int) -> list[dict[str, Any]]:
    """A row for each share of answers and each way."""
    torch.manual_seed(0)
    model = EXAMPLE.Decoder(SIZES["vocabulary"], SIZES["width"], SIZES["depth"])
    optimizer = torch.optim.AdamW(model.parameters())
    rows: list[dict[str, Any]] = []
    for answers in ANSWERS:
        batch = conversations(answers)
        losses = {name: partial(way, model, *batch) for name, way in EXAMPLE.WAYS.items()}
        rows += [{"answers": answers, **row} for row in compared(losses, optimizer, rounds)]
    return rows


def conversations(answers: float) -> tuple[torch.Tensor, torch.Tensor]:
    """A batch of the example's task: ids and labels."""
    generator = torch.Generator().manual_seed(0)
    return EXAMPLE.conversations(SIZES["rows"], SIZES["length"], SIZES["vocabulary"], answers, generator)


def table(rows: list[dict[str, Any]]) -> str:
    """The rows to read."""
    lines = [HEADER]
    for row in rows:
        time = row["time_ratio"]
        cells = (
            f"{row['flops'] / 1e9:.1f} GFLOPs", f"{row['peak_bytes'] / 1e6:.0f} MB",
            f"{1000 * row['total_s']['median']:.0f} ms",
        ) if row["first"] else (
            f"{row['flops_ratio']:.2f}", f"{row['peak_ratio']:.2f}",
            f"{time['median']:.2f} ({time['q1']:.2f} to {time['q3']:.2f})",
        )  # fmt: skip
        lines.append(f"| {100 * row['answers']:.0f} % | `{row['way']}` | {' | '.join(cells)} |\n")
    return "".join(lines)


def main(doc: str, figures: Callable[[int], list[dict[str, Any]]], name: str, title: str, **versions: str) -> None:
    """Measure, print, write JSON and markdown, and with `--page` the table of the page."""
    parser = argparse.ArgumentParser(description=doc.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=7, help="steps of each way (default %(default)s)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="CPU threads (default torch's)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the results (default %(default)s)")
    parser.add_argument("--page", action="store_true", help="also put some shares into docs/supervised-fine-tuning.md")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    device = torch.device("cpu")
    rows = figures(args.rounds)
    command = " ".join([f"python benchmarks/{name}.py", *sys.argv[1:]])
    sizes = {key: str(value) for key, value in SIZES.items()}
    about = setting(device, args.threads, dtype="float32", **versions, **sizes)
    found = table(rows)
    told = f"`{command}`: {', '.join(f'{key} {value}' for key, value in about.items())}"
    text = "\n".join([f"# {title}", "", told, "", doc.partition("\n\n")[2].strip(), "", found])
    print(text)
    stem = f"{name.replace('_', '-')}-{device_stem(device, args.threads)}"
    save(args.out, stem, {"command": command, "setting": about, "rows": rows}, text)
    if args.page:
        page, shown = PAGE.read_text(), table([row for row in rows if row["answers"] in ON_PAGE])
        old = re.compile(re.escape(HEADER) + rf"\| .*`{rows[0]['way']}`.*\n(?:\|.*\n)*")
        assert len(old.findall(page)) == 1
        write_whole(PAGE, old.sub(lambda match: shown, page).encode())


if __name__ == "__main__":
    main(__doc__ or "", figures, "sft_head", "The head in supervised fine-tuning")
