"""Pages of counts and measurements: one self-contained HTML file, and its figures as PNG.

All numbers in a figure come from a :class:`~rowprop.Plan`, a :class:`~rowprop.cost.profile.Profile` or
counts; drawing computes none.
"""

from __future__ import annotations

import itertools
import math
import tempfile
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

import rowprop
from rowprop.app.page import (
    COLOURS,
    GREY,
    SOFT,
    Plot,
    check_extra,
    drawing,
    dtypes_of,
    environment,
    fill,
    legend,
    named,
    new_figure,
    png,
    table,
)
from rowprop.app.show import told_uncounted
from rowprop.batch import take
from rowprop.cost.count import StepFlops, count_step
from rowprop.cost.measure import Tick, accelerators
from rowprop.cost.plan import Plan, Way
from rowprop.cost.profile import Profile, Tally
from rowprop.errors import InvalidInput
from rowprop.files import write_whole
from rowprop.scoring import LossesFn
from rowprop.state import devices_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.transforms import Bbox

PURPOSE = "The page"
PAGE = "report.html"
ROWS = 12
"""A table has no more ops or modules."""
MARKS = 7
"""An axis has no more numbers."""
AROUND = ((1, 0), (-1, 0), (0, 1), (0, -1), (1, 1), (1, -1), (-1, 1), (-1, -1))
"""Directions in which a name can stand beside its point."""
WAY_COLOURS = {"sliced": COLOURS[0], "recompute": COLOURS[1], "masked": COLOURS[4]}
OTHER_COLOURS = (COLOURS[3], COLOURS[2])
"""For other engines, and for the second way of an engine."""


def open_folder(out: Path) -> None:
    """Make the folder, and refuse one whose page could not be written at the end; nothing is left in it.

    Raises:
        MissingExtra: matplotlib or jinja2 is not installed.
        InvalidInput: The folder cannot be made or written to, or holds a folder or another page by the page's name.
    """
    check_extra(PURPOSE)
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
    except OSError as error:
        raise InvalidInput(f"cannot write to the folder {out} ({error.strerror}); choose another one.") from error
    page = out / PAGE
    if page.is_dir():
        raise InvalidInput(f"cannot write {page}, which is a folder; choose another folder.")
    if page.exists() and b"<title>rowprop " not in page.read_bytes()[:4096]:
        raise InvalidInput(f"{page} is no page of rowprop's and would be overwritten; choose another folder.")


def environment_of(model: nn.Module, batch: Any, num_rows: int) -> dict[str, Any]:
    """The conditions of the numbers: machine, versions, threads, dtype of the parameters, and N."""
    found = accelerators(devices_of(list(model.modules()), batch))
    where = environment(found[0] if found else torch.device("cpu"), dtypes_of(model))
    return where | {"device": ", ".join(map(str, found)) or "cpu", "num_rows": num_rows}


def write_plan(out: Path, model: str, plan: Plan, profile: Profile, where: Mapping[str, Any]) -> list[Path]:
    """Write a page with the cost of each way at each keep, and with the roofline of the model's ops.

    Args:
        out: The folder; see :func:`open_folder`.
        model: The model's name on the page.
        plan: The costs.
        profile: The ops.
        where: Their :func:`environment_of`.

    Returns:
        The files: ``report.html``, and a PNG for each figure.
    """
    rows = [
        [
            f"keep {way.keep:g}", way.name, f"{1000 * way.step_s:.3g}", f"{1000 * way.predicted_s:.3g}",
            "" if way.measured_s is None else f"{1000 * way.measured_s:.3g}", f"{way.speedup:.2f}",
            "" if way.peak_bytes is None else f"{way.peak_bytes / 1e6:.3g}", way.gradient,
            "chosen" if way in plan.choices else "",
        ]
        for way in plan.ways
    ]  # fmt: skip
    columns = ["keep", "way", "a step, ms", "predicted, ms", "measured, ms", "speed-up", "peak, MB", "gradient", ""]
    chosen = [place for place, way in enumerate(plan.ways) if way in plan.choices]
    return _write(
        out,
        command="rowprop plan",
        model=model,
        question="which engine pays?",
        verdict=plan.reason,
        tables={"The cost of a step": table(columns, rows, words=2, chosen=chosen)},
        plots={"step-time": step_time(plan), "roofline": roofline(profile)},
        findings=profile.findings,
        conditions=_conditions(where)
        | {"Certainty": plan.certainty}
        | ({"Selector": plan.advice} if plan.advice else {}),
    )


def write_profile(out: Path, model: str, profile: Profile, where: Mapping[str, Any]) -> list[Path]:
    """As :func:`write_plan`: the roofline, the slowest ops and modules, and the findings."""
    forward, backward = (1000 * profile.timing.spread(phase).median for phase in ("forward", "backward"))
    counted = "" if profile.counted_ratio is None else f" for {profile.counted_ratio:.2f} times the FLOPs"
    found = len(profile.findings)
    verdict = (
        f"The forward takes {forward:.3g} ms and the backward {backward:.3g} ms: {profile.measured_ratio:.2f} times "
        f"the forward{counted}. {'Nothing' if not found else 'One thing' if found == 1 else f'{found} things'} in it "
        f"{'is' if found <= 1 else 'are'} slower than it should be."
    )
    columns = [
        "calls forward", "calls backward", "forward, ms", "backward, ms", "share", "GFLOP/s", "FLOPs per byte",
    ]  # fmt: skip
    tables = {
        f"By {name}": table([name, *columns], [_line(row) for row in rows[:ROWS]])
        for name, rows in (("op", profile.ops), ("module", profile.modules))
    }
    return _write(
        out,
        command="rowprop profile",
        model=model,
        question="where does a step's time go?",
        verdict=verdict,
        tables=tables,
        plots={"roofline": roofline(profile)},
        findings=profile.findings,
        conditions=_conditions(where),
    )


def write_flops(out: Path, model: str, counted: StepFlops, by_rows: Mapping[int, StepFlops]) -> list[Path]:
    """As :func:`write_plan`: the ratio of backward to forward against the batch size, and the parts of a step."""
    parts = {
        "forward": counted.forward_flops,
        "backward, inputs": counted.backward_input_flops,
        "backward, weights": counted.backward_weight_flops,
        "backward, recomputed": counted.backward_recomputed_flops,
        f"update ({counted.optimizer})": counted.update_flops,
    }
    whole = max(1, sum(parts.values()))
    rows = [[name, f"{flops:,}", f"{100 * flops / whole:.1f} %"] for name, flops in parts.items() if flops]
    ratios = [
        [f"{n:,}", f"{by_rows[n].ratio:.4f}", f"{by_rows[n].ratio_with_update:.4f}"]
        for n in sorted(by_rows)
        if by_rows[n].forward_flops
    ]
    return _write(
        out,
        command="rowprop flops",
        model=model,
        question="how many FLOPs does a backward take?",
        verdict=f"{counted.ratio:.3f} for one of the forward, with the update {counted.ratio_with_update:.3f}.",
        tables={
            "The parts of a step": table(["part", "FLOPs", "share"], rows),
            "Backward over forward": table(["rows", "without the update", "with the update"], ratios),
        },
        plots={"ratio-batch": ratio_against_batch(by_rows, counted.optimizer)},
        findings=[],
        conditions={
            "Batch": f"N = {counted.num_rows} rows, backward of {counted.num_kept}",
            "Counted": "from the ops that run; 1 multiply-add = 2 FLOPs",
            "Uncounted": told_uncounted(counted.uncounted),
            "Versions": f"rowprop {rowprop.__version__}, torch {torch.__version__}",
        },
    )


def count_batches(
    model: nn.Module, batch: Any, losses_fn: LossesFn, whole: StepFlops, *, tick: Tick | None = None, **options: Any
) -> dict[int, StepFlops]:
    """Count steps of the batch's first 1, 2, 4, ... rows.

    Args:
        model: As for :func:`~rowprop.cost.count.count_step`.
        batch: N rows.
        losses_fn: As for it.
        whole: The count of the whole batch.
        tick: Called before each count.
        options: With which options.

    Returns:
        Counts by number of rows, up to N. Sizes that the model refuses are left out: BatchNorm wants more than one
        row, a fixed reshape wants all of them. If no rows can be taken from the batch, the count of N stands alone.

    Cost:
        Counted steps of less than 2 N rows together.
    """
    n = whole.num_rows
    found: dict[int, StepFlops] = {}
    for rows in (2**power for power in range(n.bit_length()) if 2**power < n):
        if tick is not None:
            tick(f"counting a step of {rows} of {n} rows", rows / n)
        try:
            part = take(batch, torch.arange(rows, device="cpu"))  # ``take`` moves them to the batch's device
            found[rows] = count_step(model, part, losses_fn, **options)
        except Exception:  # the model may raise any error; the page has the other sizes
            continue
    return found | {n: whole}


# --- figures ----------------------------------------------------------------------------------------------------------


@drawing()
def step_time(plan: Plan) -> Plot:
    """A step's time against keep: a line for the prediction of each way, dots for its measurements.

    A prediction is a straight line in K, so that two keeps give the whole line; one keep gives a dot only.
    """
    figure, axes = new_figure("fraction of rows kept", "step, ms")
    names = list(dict.fromkeys((way.engine, way.scorer) for way in plan.ways))
    colours, others = dict(WAY_COLOURS), itertools.cycle(OTHER_COLOURS)
    for name in names:
        ways = sorted((way for way in plan.ways if (way.engine, way.scorer) == name), key=lambda way: way.keep)
        _draw_way(axes, ways, plan.num_rows, colours.pop(name[0], None) or next(others))
    plain_ms = 1000 * plan.full_s
    axes.plot([0, 1], [plain_ms, plain_ms], color=GREY, linestyle=(0, (6, 3)), label="plain step, all rows")
    break_even = plan.break_even_keep
    said = "Selection pays at any keep." if round(break_even, 2) >= 1 else "Selection pays at no keep."
    if 0 < break_even < 0.995:
        said = f"Selection pays below keep {break_even:.2f}, the dotted line."
        axes.axvline(break_even, color=GREY, linestyle=(0, (2, 2)), linewidth=1.2)
        side = "right" if break_even > 0.5 else "left"
        axes.annotate(
            f" break-even at {break_even:.2f} ", (break_even, 0.03), xycoords=("data", "axes fraction"), ha=side,
            color=SOFT,
        )  # fmt: skip
    axes.set_xlim(0, 1.02)
    axes.set_ylim(bottom=0)
    legend(figure)
    lines = len({way.keep for way in plan.ways}) > 1
    note = f"{'Lines are predicted from steps at other keeps, dots' if lines else 'Dots'} are measured. {said}"
    told = [f"The plain step takes {plain_ms:.3g} ms."] + [
        f"At keep {way.keep:g}, {way.name} takes {1000 * way.step_s:.3g} ms." for way in plan.ways
    ]
    return Plot("Step time against keep", figure, " ".join([*told, said]), note)


def _draw_way(axes: Axes, ways: Sequence[Way], n: int, colour: str) -> None:
    name = named(ways[0].name)
    xs, ys = [way.kept / n for way in ways], [1000 * way.predicted_s for way in ways]
    if xs[0] < xs[-1]:
        slope = (ys[-1] - ys[0]) / (xs[-1] - xs[0])
        ends = [1 / n, 1.0]
        axes.plot(ends, [ys[0] + slope * (x - xs[0]) for x in ends], color=colour, label=name)
        name = ""
    measured = [(x, 1000 * way.measured_s) for x, way in zip(xs, ways, strict=True) if way.measured_s is not None]
    if measured:
        axes.plot(*zip(*measured, strict=True), "o", color=colour, markersize=6.5, label=name or None)


@drawing()
def roofline(profile: Profile) -> Plot:
    """FLOP/s that ops and modules reach against their FLOPs per byte, under the ceilings of the machine.

    Both ceilings are measurements of the same run: a large matrix product, and a large copy. A point can lie above
    them, because numbers in a cache move faster than the copy.
    """
    figure, axes = new_figure("FLOPs per byte read or written", "GFLOP/s", height=320)
    points = [
        (kind, row)
        for kind, rows in (("module", profile.modules), ("op", profile.ops))
        for row in rows
        if row.forward_flops + row.backward_flops and row.bytes and row.flops_per_s
    ]
    ridge = profile.flops_per_s / profile.bytes_per_s
    intensities = [_intensity(row) for _, row in points]
    low, high = min([*intensities, ridge]) / 3, max([*intensities, ridge]) * 3
    peak, bandwidth = profile.flops_per_s / 1e9, profile.bytes_per_s / 1e9
    slowest = low * profile.bytes_per_s / 1e9
    ys = [row.flops_per_s / 1e9 for _, row in points]
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(low, high)
    axes.set_ylim(min([*ys, peak, slowest]) / 2, max([*ys, peak]) * 2.5)
    axes.minorticks_off()
    for axis, ends in ((axes.xaxis, axes.get_xlim()), (axes.yaxis, axes.get_ylim())):
        ticks = _log_ticks(*ends)
        axis.set_ticks(ticks, [f"{tick:g}" for tick in ticks])
    for kind, colour in (("module", COLOURS[2]), ("op", COLOURS[0])):
        if rows := [row for of, row in points if of == kind]:
            axes.scatter(
                *zip(*map(_place, rows), strict=True),
                s=[_diameter(row) ** 2 for row in rows], color=colour, alpha=0.6, linewidth=0,
            )  # fmt: skip
            axes.plot([], [], "o", color=colour, alpha=0.6, markeredgewidth=0, label=f"{kind}s")  # for the legend
    axes.plot(
        [low, ridge, high],
        [slowest, peak, peak],
        color=GREY,
        linestyle=(0, (6, 3)),
        label=f"this machine, {peak:.3g} GFLOP/s and {bandwidth:.3g} GB/s",
    )
    legend(figure)
    _name_points(figure, [row for _, row in sorted(points, key=lambda point: -point[1].share)])
    without = sum(row.share for row in profile.ops if not row.forward_flops + row.backward_flops)
    note = (
        f"The larger a point, the more of the step's time it takes. The slope is a copy's {bandwidth:.3g} "
        f"GB/s: left of the bend an op waits for memory, right of it for arithmetic. Ops without counted FLOPs "
        f"(copies, norms, activations) take {100 * without:.0f} % of the step and have no point."
    )
    told = [f"This machine reaches {peak:.3g} GFLOP/s and {bandwidth:.3g} GB/s."] + [
        f"The {kind} {row.title} reaches {row.flops_per_s / 1e9:.3g} GFLOP/s at {_intensity(row):.3g} FLOPs per byte, "
        f"in {100 * row.share:.0f} % of the step."
        for kind, row in points[:ROWS]
    ]
    return Plot("How much of the machine is used", figure, " ".join(told), note)


def _log_ticks(low: float, high: float) -> list[float]:
    """Return round numbers for an axis of logarithms, a handful at most: powers of ten, or 1, 2 and 5 times them."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    found = [part * 10.0**decade for decade in decades for part in (1, 2, 5) if low <= part * 10.0**decade <= high]
    if len(found) <= MARKS:
        return found
    found = [10.0**decade for decade in decades if low <= 10.0**decade <= high]
    return found[:: math.ceil(len(found) / MARKS)]


def _name_points(figure: Figure, rows: Sequence[Tally]) -> None:
    """Write the names beside the points, the slowest first; a name without a free place near its point is left out."""
    from matplotlib.text import Text

    axes = figure.axes[0]
    figure.draw_without_rendering()  # afterwards the places in pixels are known
    taken = [_disc(axes, row) for row in rows]
    for row in rows:
        for reach, (x, y) in itertools.product((0, 14, 28), AROUND):
            away = _diameter(row) / 2 + 2 + reach
            text = axes.annotate(
                named(row.title), _place(row), (x * away, y * away), textcoords="offset points",
                ha=("right", "center", "left")[1 + (x > 0) - (x < 0)],
                va=("top", "center", "bottom")[1 + (y > 0) - (y < 0)],
                arrowprops={"arrowstyle": "-", "color": SOFT, "linewidth": 0.7, "shrinkA": 0, "shrinkB": 0}
                if reach
                else None,
            )  # fmt: skip
            text.get_window_extent()  # lays the text out
            box = Text.get_window_extent(text)  # the letters alone, without the line to the point
            frame = axes.bbox
            inside = frame.x0 <= box.x0 and box.x1 <= frame.x1 + 6 and frame.y0 <= box.y0 and box.y1 <= frame.y1
            if inside and not any(box.overlaps(other) for other in taken):
                taken.append(box)
                break
            text.remove()


def _place(row: Tally) -> tuple[float, float]:
    return _intensity(row), row.flops_per_s / 1e9


def _disc(axes: Axes, row: Tally) -> Bbox:
    """Return the square around a point, in pixels."""
    from matplotlib.transforms import Bbox

    x, y = axes.transData.transform(_place(row))
    half = _diameter(row) / 2
    return Bbox.from_extents(x - half, y - half, x + half, y + half)


def _diameter(row: Tally) -> float:
    """A point's diameter in pixels: its area grows with its time."""
    return 7 + 33 * math.sqrt(min(1.0, row.share))


def _intensity(row: Tally) -> float:
    return (row.forward_flops + row.backward_flops) / row.bytes


@drawing()
def ratio_against_batch(by_rows: Mapping[int, StepFlops], optimizer: str) -> Plot:
    """FLOPs of the backward over those of the forward against the number of rows, with the update and without."""
    figure, axes = new_figure("rows in the batch", "backward over forward, FLOPs")
    rows = sorted(n for n, counted in by_rows.items() if counted.forward_flops)
    for name, attribute, colour in (
        (f"with the update ({optimizer})", "ratio_with_update", COLOURS[1]),
        ("without", "ratio", COLOURS[0]),
    ):
        axes.plot(rows, [getattr(by_rows[n], attribute) for n in rows], "o-", color=colour, markersize=5.5, label=name)
    axes.set_xscale("log", base=2)
    shown = rows[:: -max(1, math.ceil(len(rows) / MARKS))]
    axes.minorticks_off()
    axes.set_xticks(shown, [f"{n:,}" for n in shown])
    axes.set_ylim(0, 1.1 * max((by_rows[n].ratio_with_update for n in rows), default=1.0))
    legend(figure)
    note = "Each point is counted from a step of so many rows. The update costs the same at any batch size."
    told = [f"{n} rows: {by_rows[n].ratio:.3f}, with the update {by_rows[n].ratio_with_update:.3f}." for n in rows]
    return Plot("The ratio against the batch size", figure, " ".join(told), note)


# --- writing ----------------------------------------------------------------------------------------------------------


def _line(row: Tally) -> list[str]:
    flops = row.forward_flops + row.backward_flops
    return [
        row.title, f"{row.forward_calls:g}", f"{row.backward_calls:g}", f"{1000 * row.forward_s:.3f}",
        f"{1000 * row.backward_s:.3f}", f"{100 * row.share:.0f} %", f"{row.flops_per_s / 1e9:.1f}" if flops else "",
        f"{_intensity(row):.3g}" if flops and row.bytes else "",
    ]  # fmt: skip


def _conditions(where: Mapping[str, Any]) -> dict[str, str]:
    return {
        "Batch": f"N = {where['num_rows']} rows",
        "Model": f"parameters in {where['dtype']}",
        "Machine": f"{where['device']} ({where['device_name']}), {where['threads']} threads, {where['system']}",
        "Versions": f"rowprop {where['rowprop']}, torch {where['torch']}, Python {where['python']}",
    }


def _write(out: Path, *, plots: dict[str, Plot], **content: Any) -> list[Path]:
    template = resources.files("rowprop.app").joinpath("report.html.j2").read_text("utf-8")
    page = fill(template, PURPOSE, plots=plots, **content)
    files = {PAGE: page.encode()} | {f"{name}.png": png(plot) for name, plot in plots.items()}
    for name, file in files.items():
        write_whole(out / name, file)
    return [out / name for name in files]
