"""Pages of plan and flops: one self-contained HTML file, and its figure as PNG; drawing computes no number."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

import rowprop
from rowprop.app import page
from rowprop.app.lookup import PAGE, require_all
from rowprop.app.page import COLOURS, GREY, SOFT
from rowprop.app.terminal import WAY_COLUMNS, say, uncounted_ops, way_row
from rowprop.batch import take
from rowprop.cost.count import StepFlops, count_step
from rowprop.cost.measure import Tick, accelerators
from rowprop.cost.plan import Plan, Way
from rowprop.errors import InvalidInput
from rowprop.files import check_writable, write_whole
from rowprop.scoring import LossesFn
from rowprop.state import devices_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

REPORT = "report.html"
MARKS = 7  # an axis has no more numbers


def open_folder(out: Path) -> None:
    """Make the folder; refuse one whose page could not be written at the end; nothing is left in it.

    Raises:
        MissingExtra: matplotlib or jinja2 is not installed.
        InvalidInput: The folder cannot be made or written to, or holds a folder or another page by the page's name.
    """
    require_all(PAGE, "The page")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidInput(f"cannot write to the folder {out} ({error.strerror}); choose another one.") from error
    path = out / REPORT
    check_writable(path)
    if path.exists() and b"<title>rowprop " not in path.read_bytes()[:4096]:
        raise InvalidInput(f"{path} is no page of rowprop's and would be overwritten; choose another folder.")


def environment_of(model: nn.Module, batch: Any, num_rows: int) -> dict[str, Any]:
    """The conditions of the numbers: machine, versions, threads, dtype of the parameters, and N."""
    found = accelerators(devices_of(list(model.modules()), batch))
    where = page.environment(found[0] if found else torch.device("cpu"), model)
    return where | {"device": ", ".join(map(str, found)) or "cpu", "num_rows": num_rows}


def write_plan(out: Path, model: str, plan: Plan, where: Mapping[str, Any]) -> None:
    """Write a page with the cost of each way at each keep, for the model of this name.

    ``where`` is the :func:`environment_of` the costs, ``out`` a folder after :func:`open_folder`.
    """
    _write(
        out, "plan.html.j2", "step-time", step_time(plan), model=model, plan=plan, where=where, columns=WAY_COLUMNS,
        rows=[way_row(way, plan) for way in plan.ways],
        chosen=[place for place, way in enumerate(plan.ways) if way in plan.choices],
        has_lines=len({way.keep for way in plan.ways}) > 1,
    )  # fmt: skip


def write_flops(out: Path, model: str, counted: StepFlops, by_rows: Mapping[int, StepFlops]) -> None:
    """As :func:`write_plan`: the ratio of backward to forward against the batch size, and the parts of a step."""
    parts = {
        "forward": counted.forward_flops,
        "backward, inputs": counted.backward_input_flops,
        "backward, weights": counted.backward_weight_flops,
        "backward, recomputed": counted.backward_recomputed_flops,
        f"update ({counted.optimizer})": counted.update_flops,
    }
    whole = max(1, sum(parts.values()))
    by_rows = {n: by_rows[n] for n in sorted(by_rows) if by_rows[n].forward_flops}
    _write(
        out, "flops.html.j2", "ratio-batch", ratio_against_batch(by_rows, counted.optimizer), model=model,
        counted=counted, by_rows=by_rows, uncounted=uncounted_ops(counted.uncounted),
        parts=[[name, f"{flops:,}", f"{100 * flops / whole:.1f} %"] for name, flops in parts.items() if flops],
        ratios=[[f"{n:,}", f"{of.ratio:.4f}", f"{of.ratio_with_update:.4f}"] for n, of in by_rows.items()],
        versions={"rowprop": rowprop.__version__, "torch": torch.__version__},
    )  # fmt: skip


def _write(out: Path, template: str, picture: str, figure: Figure, **content: Any) -> None:
    text = page.render(template, figure=figure, **content)
    for path, written in {out / REPORT: text.encode(), out / f"{picture}.png": page.png(figure)}.items():
        write_whole(path, written)
        say(f"{path} is written.")


def count_batches(
    model: nn.Module, batch: Any, losses_fn: LossesFn, whole: StepFlops, *, tick: Tick | None = None, **options: Any
) -> dict[int, StepFlops]:
    """Count steps of the batch's first 1, 2, 4, ... rows, as :func:`~rowprop.cost.count.count_step` with the options.

    Returns:
        Counts by number of rows, that of all N rows, ``whole``, the last. Sizes that the model refuses are left out:
        BatchNorm wants more than one row, a fixed reshape wants all of them.

    Cost:
        Counted steps of less than 2 N rows together.
    """
    n = whole.num_rows
    found: dict[int, StepFlops] = {}
    for rows in (2**power for power in range(n.bit_length()) if 2**power < n):
        if tick is not None:
            tick(f"counting a step of {rows} of {n} rows", rows / n)
        with suppress(Exception):  # the model may raise any error; the page has the other sizes
            part = take(batch, torch.arange(rows, device="cpu"))  # ``take`` moves them to the batch's device
            found[rows] = count_step(model, part, losses_fn, **options)
    return found | {n: whole}


@page.drawing()
def step_time(plan: Plan) -> Figure:
    """Draw a step's time against keep: a line, straight in K, for the prediction of each way, dots for measurements."""
    figure, axes = page.new_figure("fraction of rows kept", "step, ms")
    names = dict.fromkeys(way.engine for way in plan.ways)
    for name, colour in zip(names, itertools.cycle(COLOURS), strict=False):
        ways = sorted((way for way in plan.ways if way.engine == name), key=lambda way: way.keep)
        _draw_way(axes, ways, plan.num_rows, colour)
    axes.plot([0, 1], [1000 * plan.full_s] * 2, color=GREY, linestyle=(0, (6, 3)), label="plain step, all rows")
    break_even = plan.break_even_keep
    if 0 < break_even < 0.995:
        axes.axvline(break_even, color=GREY, linestyle=(0, (2, 2)), linewidth=1.2)
        words, place = f" break-even at {break_even:.2f} ", (break_even, 0.03)
        side = "right" if break_even > 0.5 else "left"
        axes.annotate(words, place, xycoords=("data", "axes fraction"), ha=side, color=SOFT)
    axes.set_xlim(0, 1.02)
    axes.set_ylim(bottom=0)
    page.legend(figure)
    return figure


def _draw_way(axes: Axes, ways: Sequence[Way], n: int, colour: str) -> None:
    name = page.named(ways[0].engine)
    xs, ys = [way.kept / n for way in ways], [1000 * way.predicted_s for way in ways]
    if xs[0] < xs[-1]:
        slope = (ys[-1] - ys[0]) / (xs[-1] - xs[0])
        ends = [1 / n, 1.0]
        axes.plot(ends, [ys[0] + slope * (x - xs[0]) for x in ends], color=colour, label=name)
        name = ""
    measured = [(x, 1000 * way.measured_s) for x, way in zip(xs, ways, strict=True) if way.measured_s is not None]
    if measured:
        axes.plot(*zip(*measured, strict=True), "o", color=colour, markersize=6.5, label=name or None)


@page.drawing()
def ratio_against_batch(by_rows: Mapping[int, StepFlops], optimizer: str) -> Figure:
    """Draw FLOPs of the backward over those of the forward against the number of rows, with and without the update."""
    figure, axes = page.new_figure("rows in the batch", "backward over forward, FLOPs")
    rows = list(by_rows)
    updated = [of.ratio_with_update for of in by_rows.values()]
    without = [of.ratio for of in by_rows.values()]
    for name, ys, colour in ((f"with the update ({optimizer})", updated, COLOURS[1]), ("without", without, COLOURS[0])):
        axes.plot(rows, ys, "o-", color=colour, markersize=5.5, label=name)
    axes.set_xscale("log", base=2)
    shown = rows[:: -max(1, math.ceil(len(rows) / MARKS))]
    axes.minorticks_off()
    axes.set_xticks(shown, [f"{n:,}" for n in shown])
    axes.set_ylim(0, 1.1 * max(updated, default=1.0))
    page.legend(figure)
    return figure
