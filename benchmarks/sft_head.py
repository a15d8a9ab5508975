"""Steps of supervised fine-tuning where the vocabulary dominates: the plain loss, and heads for answers alone.

The model and the four ways to the loss are those of `examples/sft_head.py`; the page
`docs/supervised-fine-tuning.md` explains them. In each round every way makes one step (forward, backward, AdamW) after
the others on the same model and batch, in an order that turns from round to round. A time is a way's step over the
`plain` step beside it: the median over the rounds, with the quartiles. FLOPs are counted and peak bytes are those of
torch's allocator, beyond the memory held before the step: both are exact, whatever else the machine does. An error is
the largest difference of a parameter's gradient from `plain`'s, over the largest entry of all.
"""

from __future__ import annotations

import argparse
import re
import runpy
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

import rowprop
from bench_step import RESULTS, device_stem, save, setting, spread
from rowprop.cost.measure import Done, Routine, measure
from rowprop.files import write_whole
from zeros import Backward, difference

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "supervised-fine-tuning.md"
EXAMPLE = SimpleNamespace(**runpy.run_path(str(ROOT / "examples" / "sft_head.py"), run_name="sft_head"))

ANSWERS = (0.1, 0.3, 0.6, 1.0)
SIZES = {"rows": 4, "length": 128, "vocabulary": 32768, "width": 256, "depth": 4}
HEADER = "| answers | loss | error | FLOPs | peak memory | time (quartiles) |\n|---|---|---|---|---|---|\n"


Losses = dict[str, Callable[[], torch.Tensor]]


def compared(model: nn.Module, losses: Losses, rounds: int, untimed: Losses | None = None) -> list[dict[str, Any]]:
    """A row of figures for each way to the loss of one batch; errors and ratios are against the first way."""
    optimizer = torch.optim.AdamW(model.parameters())

    def counted(loss: Callable[[], torch.Tensor]) -> Backward:
        optimizer.zero_grad()
        with rowprop.cost.count_flops() as flops:
            loss().backward()
        assert not flops.uncounted, flops.uncounted
        grads = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
        optimizer.zero_grad()
        return Backward(grads, flops.total_flops)

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

    first, *_ = losses
    truth = counted(losses[first])
    rows: list[dict[str, Any]] = []
    for way, loss in (losses | (untimed or {})).items():
        found = counted(loss)
        rows.append({
            "way": way, "first": way == first, "error": difference(truth, found), "flops": found.flops,
            "flops_ratio": found.flops / truth.flops,
        })  # fmt: skip
    taken = measure({way: step(loss) for way, loss in losses.items()}, rounds=rounds, warmup=1)
    for row, (_, timing) in zip(rows, taken.items(), strict=False):
        ratios = [one / other for one, other in zip(timing.each_s(), taken[first].each_s(), strict=True)]
        row.update(peak_ratio=timing.peak_bytes / taken[first].peak_bytes, time_ratio=spread(ratios))
        row.update(timing.to_dict())
    return rows


def figures(rounds: int, shares: Sequence[float]) -> list[dict[str, Any]]:
    """A row for each share of answers and each way."""
    torch.manual_seed(0)
    model = EXAMPLE.Decoder(SIZES["vocabulary"], SIZES["width"], SIZES["depth"])
    rows: list[dict[str, Any]] = []
    for answers in shares:
        batch = conversations(answers)
        losses = {name: partial(way, model, *batch) for name, way in EXAMPLE.WAYS.items()}
        rows += [{"answers": answers, **row} for row in compared(model, losses, rounds)]
    return rows


def conversations(answers: float) -> tuple[torch.Tensor, torch.Tensor]:
    """A batch of the example's task: ids and labels."""
    generator = torch.Generator().manual_seed(0)
    return EXAMPLE.conversations(SIZES["rows"], SIZES["length"], SIZES["vocabulary"], answers, generator)


def table(rows: list[dict[str, Any]]) -> str:
    """The rows to read."""
    lines = [HEADER]
    for row in rows:
        if row["first"]:
            cells = ["", f"{row['flops'] / 1e9:.1f} GFLOPs", f"{row['peak_bytes'] / 1e6:.0f} MB"]
            cells += [f"{1000 * row['total_s']['median']:.0f} ms"]
        else:
            cells = [f"{row['error']:.0e}", f"{row['flops_ratio']:.2f}", "", ""]
        if "time_ratio" in row and not row["first"]:
            time = row["time_ratio"]
            cells[2:] = [f"{row['peak_ratio']:.2f}", f"{time['median']:.2f} ({time['q1']:.2f} to {time['q3']:.2f})"]
        lines.append(f"| {100 * row['answers']:.0f} % | `{row['way']}` | {' | '.join(cells)} |\n")
    return "".join(lines)


def main(
    doc: str,
    figures: Callable[[int, Sequence[float]], list[dict[str, Any]]],
    name: str,
    title: str,
    on_page: tuple[float, ...],
    **versions: str,
) -> None:
    """Measure, print, write JSON and markdown, and with `--page` the table of the page, of some of the shares."""
    parser = argparse.ArgumentParser(description=doc.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=7, help="steps of each way (default %(default)s)")
    parser.add_argument("--answers", type=float, nargs="+", default=ANSWERS, help="shares (default %(default)s)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="CPU threads (default torch's)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the results (default %(default)s)")
    parser.add_argument("--page", action="store_true", help="also put some shares into docs/supervised-fine-tuning.md")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    device = torch.device("cpu")
    rows = figures(args.rounds, args.answers)
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
        page, shown = PAGE.read_text(), table([row for row in rows if row["answers"] in on_page])
        old = re.compile(rf"\| answers \|.*\n\|[-|]+\n\| .*`{rows[0]['way']}`.*\n(?:\|.*\n)*")
        assert len(old.findall(page)) == 1
        write_whole(PAGE, old.sub(lambda match: shown, page).encode())


if __name__ == "__main__":
    main(__doc__ or "", figures, "sft_head", "The head in supervised fine-tuning", on_page=(0.1, 0.6))
