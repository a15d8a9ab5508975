"""Pages of what was counted and measured: one self-contained HTML file, and its figures as PNG.

A figure is plotly's own ``{"data", "layout"}`` with a title and a note; all numbers in it come from a
:class:`~rowprop.Plan`, a :class:`~rowprop.cost.profile.Profile` or counts, none is computed by drawing.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from torch import nn

import rowprop
from rowprop.batch import take
from rowprop.cost.clock import Tick, accelerators
from rowprop.cost.count import StepFlops, count_step
from rowprop.cost.plan import Plan, Way
from rowprop.cost.profile import Profile, Row
from rowprop.errors import InvalidInput
from rowprop.files import write_whole
from rowprop.page import COLOURS, GREY, Json, check_extra, dtypes_of, environment, fill, frame, pngs
from rowprop.scoring.forward import devices_of
from rowprop.selection.common import count_kept
from rowprop.step import LossesFn

PURPOSE = "The page"
PAGE = "report.html"
ROWS = 12
"""Ops in the page's table, and modules."""
LABELS = 3
"""Points of the roofline that carry their name."""


def open_folder(out: Path) -> None:
    """Refuse to start what could not be written at its end; the folder is made, nothing is left in it.

    Raises:
        MissingExtra: plotly or jinja2 is not installed.
        InvalidInput: The folder cannot be made or written to, or has a folder where the page would be.
    """
    check_extra(PURPOSE)
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
    except OSError as error:
        raise InvalidInput(f"cannot write to the folder {out} ({error.strerror}); choose another one.") from error
    if (out / PAGE).is_dir():
        raise InvalidInput(f"cannot write {out / PAGE}, which is a folder; choose another folder.")


def environment_of(model: nn.Module, batch: Any, num_rows: int) -> dict[str, Any]:
    """What the numbers depend on beside the model: machine, versions, threads, dtype of the parameters, and N."""
    found = accelerators(devices_of(list(model.modules()), batch))
    where = environment(found[0] if found else torch.device("cpu"), dtypes_of(model))
    return where | {"device": ", ".join(map(str, found)) or "cpu", "num_rows": num_rows}


def write_plan(out: Path, model: str, plan: Plan, profile: Profile, where: Mapping[str, Any]) -> list[Path]:
    """Write what each way costs at each keep, and the roofline of the model's ops.

    Args:
        out: The folder; see :func:`open_folder`.
        model: What to call the model.
        plan: The costs.
        profile: The ops.
        where: Their :func:`environment_of`.

    Returns:
        The files: ``report.html``, and a PNG for each figure where a Chromium or Chrome is installed.
    """
    rows = [
        [
            f"{way.keep:g}", way.name, f"{1000 * way.predicted_s:.3g}",
            "" if way.measured_s is None else f"{1000 * way.measured_s:.3g}", f"{way.speedup:.2f}",
            "" if way.peak_bytes is None else f"{way.peak_bytes / 1e6:.3g}",
        ]
        for way in plan.ways
    ]  # fmt: skip
    columns = ["keep", "way", "predicted, ms", "measured, ms", "speed-up", "peak, MB"]
    return _write(
        out,
        command="rowprop plan",
        model=model,
        question="which engine pays?",
        verdict=plan.reason,
        tables=[{"title": "What a step costs", "columns": columns, "rows": rows}],
        figures={"step-time": step_time(plan), "roofline": roofline(profile)},
        findings=profile.findings,
        conditions=_conditions(where),
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
    columns = ["", "phase calls", "forward, ms", "backward, ms", "share", "GFLOP/s"]
    tables = [
        {"title": title, "columns": [name, *columns[1:]], "rows": [_line(row) for row in rows[:ROWS]]}
        for title, name, rows in (("By op", "op", profile.ops), ("By module", "module", profile.modules))
    ]
    return _write(
        out,
        command="rowprop profile",
        model=model,
        question="where does a step's time go?",
        verdict=verdict,
        tables=tables,
        figures={"roofline": roofline(profile)},
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
    rows = [[name, "", f"{flops:,}", f"{100 * flops / whole:.1f} %"] for name, flops in parts.items() if flops]
    uncounted = ", ".join(f"{op} x{calls}" for op, calls in counted.uncounted.items()) or "nothing"
    return _write(
        out,
        command="rowprop flops",
        model=model,
        question="how many FLOPs does a backward take?",
        verdict=f"{counted.ratio:.3f} for one of the forward, with the update {counted.ratio_with_update:.3f}.",
        tables=[{"title": "What a step is made of", "columns": ["part", "", "FLOPs", "share"], "rows": rows}],
        figures={"ratio-batch": ratio_against_batch(by_rows, counted.optimizer)},
        findings=[],
        conditions={
            "Batch": f"N = {counted.num_rows} rows, backward of {counted.num_kept}",
            "Counted": "from the ops that run; 1 multiply-add = 2 FLOPs",
            "Uncounted": uncounted,
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
        losses_fn: As there.
        whole: What it counted for the whole batch.
        tick: Called before each count.
        options: With which options.

    Returns:
        Counts by number of rows, up to N; without those that the model does not take (BatchNorm wants more than one, a
        fixed reshape all of them) and, where rows of the batch cannot be taken, of N alone.

    Cost:
        Counted steps of less than 2 N rows together.
    """
    n = whole.num_rows
    found: dict[int, StepFlops] = {}
    for rows in (2**power for power in range(n.bit_length()) if 2**power < n):
        if tick is not None:
            tick(f"counting a step of {rows} of {n} rows", rows / n)
        try:
            part = take(batch, torch.arange(rows, device="cpu"))  # whatever the device, take moves them to it
            found[rows] = count_step(model, part, losses_fn, **options)
        except Exception:  # the model, in whatever words; the page has the other sizes
            continue
    return found | {n: whole}


# --- figures ----------------------------------------------------------------------------------------------------------


def step_time(plan: Plan) -> Json:
    """A step's time against keep: a line for what is predicted of each way, dots for what was measured.

    What is predicted is a straight line in K, so that two keeps give all of it; with one there is a dot only.
    """
    layout = frame("fraction of rows kept", "step, ms", height=380)
    layout["xaxis"].update({"range": [0, 1.02]})
    layout["yaxis"].update({"rangemode": "tozero"})
    data: list[Json] = []
    names = list(dict.fromkeys((way.engine, way.scorer) for way in plan.ways))
    # Plain indexing is what selection costs without any saving: grey, as the plain step.
    colours = iter(COLOURS)
    for name in names:
        ways = sorted((way for way in plan.ways if (way.engine, way.scorer) == name), key=lambda way: way.keep)
        colour = GREY if name[0] == "masked" else next(colours)
        data += _way_traces(ways, plan.num_rows, colour)
    plain_ms = 1000 * plan.full_s
    data.append({
        "x": [0, 1], "y": [plain_ms, plain_ms], "mode": "lines", "name": "plain step, all rows",
        "line": {"color": GREY, "dash": "dash", "width": 2},
        "hovertemplate": f"plain step<br>{plain_ms:.3g} ms<extra></extra>",
    })  # fmt: skip
    break_even = plan.break_even_keep
    said = "Selection pays at any keep." if break_even >= 1 else "Selection pays at no keep."
    if 0 < break_even < 1:
        said = f"Selection pays below keep {break_even:.2f}, the dotted line."
        layout["shapes"] = [{
            "type": "line", "xref": "x", "yref": "paper", "x0": break_even, "x1": break_even, "y0": 0, "y1": 1,
            "line": {"color": GREY, "dash": "dot", "width": 2},
        }]  # fmt: skip
        layout["annotations"] = [{
            "xref": "x", "yref": "paper", "x": break_even, "y": 0.04, "showarrow": False, "yanchor": "bottom",
            "xanchor": "right" if break_even > 0.5 else "left", "text": f" break-even at {break_even:.2f} ",
        }]  # fmt: skip
    lines = len({way.keep for way in plan.ways}) > 1
    note = f"{'Lines are predicted from steps at other keeps, dots' if lines else 'Dots'} are measured. {said}"
    return {"title": "Step time against keep", "note": note, "data": data, "layout": layout}


def _way_traces(ways: Sequence[Way], n: int, colour: str) -> list[Json]:
    name = ways[0].name
    xs, ys = [count_kept(way.keep, n) / n for way in ways], [1000 * way.predicted_s for way in ways]
    traces: list[Json] = []
    if xs[0] < xs[-1]:
        slope = (ys[-1] - ys[0]) / (xs[-1] - xs[0])
        ends = [1 / n, 1.0]
        traces.append({
            "x": ends, "y": [ys[0] + slope * (x - xs[0]) for x in ends], "mode": "lines", "name": name,
            "line": {"color": colour, "width": 2.25}, "hoverinfo": "skip",
        })  # fmt: skip
    measured = [(x, way) for x, way in zip(xs, ways, strict=True) if way.measured_s is not None]
    traces.append({
        "x": [x for x, _ in measured], "y": [1000 * (way.measured_s or 0.0) for _, way in measured],
        "customdata": [[1000 * way.predicted_s] for _, way in measured],
        "mode": "markers", "name": name, "showlegend": not traces, "marker": {"color": colour, "size": 9},
        "hovertemplate": f"{name} at keep %{{x:.3g}}<br>measured %{{y:.3g}} ms<br>"
        "predicted %{customdata[0]:.3g} ms<extra></extra>",
    })  # fmt: skip
    return traces


def roofline(profile: Profile) -> Json:
    """FLOP/s that ops and modules reach against their FLOPs per byte, under what the machine was measured to reach.

    Both ceilings are measurements of the same run: a large matrix product, and a large copy. A point can lie above
    them: what stays in a cache moves faster than the copy.
    """
    layout = frame("FLOPs per byte read or written", "GFLOP/s", height=380)
    points = [
        (kind, row)
        for kind, rows in (("module", profile.modules), ("op", profile.ops))
        for row in rows
        if row.forward_flops + row.backward_flops and row.bytes and row.flops_per_s
    ]
    ridge = profile.flops_per_s / profile.bytes_per_s
    intensities = [_intensity(row) for _, row in points]
    low, high = min([*intensities, ridge]) / 3, max([*intensities, ridge]) * 3
    peak = profile.flops_per_s / 1e9
    data: list[Json] = [{
        "x": [low, ridge, high], "y": [low * profile.bytes_per_s / 1e9, peak, peak], "mode": "lines",
        "name": "what this machine reaches", "line": {"color": GREY, "width": 2, "dash": "dash"}, "hoverinfo": "skip",
    }]  # fmt: skip
    for kind, colour in (("module", COLOURS[2]), ("op", COLOURS[0])):
        rows = [row for of, row in points if of == kind]
        if not rows:
            continue
        data.append({
            "x": [_intensity(row) for row in rows], "y": [row.flops_per_s / 1e9 for row in rows],
            "customdata": [[row.name, 100 * row.share] for row in rows], "mode": "markers", "name": f"{kind}s",
            "marker": {
                "color": colour, "opacity": 0.7, "size": [_diameter(row) for row in rows],
                "line": {"width": 0},
            },
            "hovertemplate": f"{kind} %{{customdata[0]}}<br>%{{y:.3g}} GFLOP/s at %{{x:.3g}} FLOPs per byte<br>"
            "%{customdata[1]:.0f} % of the step<extra></extra>",
        })  # fmt: skip
    ys = [row.flops_per_s / 1e9 for _, row in points]
    bottom, top = min([*ys, peak, low * profile.bytes_per_s / 1e9]), max([*ys, peak])
    layout["xaxis"].update({"type": "log", "range": [math.log10(low), math.log10(high)], "dtick": 1})
    layout["yaxis"].update({"type": "log", "range": [math.log10(bottom / 2), math.log10(top * 2.5)], "dtick": 1})
    del layout["xaxis"]["rangemode"]
    del layout["yaxis"]["nticks"]
    named = sorted((row for kind, row in points if kind == "op"), key=lambda row: -row.share)[:LABELS]
    layout["annotations"] = [
        _label(f"{peak:.3g} GFLOP/s, a matrix product", high, peak, xanchor="right", yanchor="bottom"),
        *(
            _label(row.name, _intensity(row), row.flops_per_s / 1e9, yanchor="top", yshift=-_diameter(row) / 2)
            for row in named
        ),
    ]
    bandwidth = profile.bytes_per_s / 1e9
    without = sum(row.share for row in profile.ops if not row.forward_flops + row.backward_flops)
    note = (
        f"The larger a point, the more of the step's time it takes. The slope is a copy's {bandwidth:.3g} "
        f"GB/s: left of the bend an op waits for memory, right of it for arithmetic. Ops of which no FLOPs are counted "
        f"(copies, norms, activations) take {100 * without:.0f} % of the step and have no point."
    )
    return {"title": "How much of the machine is used", "note": note, "data": data, "layout": layout}


def _label(text: str, x: float, y: float, **place: Any) -> Json:
    """On axes of which both are logarithmic."""
    return {"text": text, "x": math.log10(x), "y": math.log10(y), "showarrow": False, "font": {"size": 12}} | place


def _diameter(row: Row) -> float:
    """In pixels: the area goes with the time."""
    return 7 + 33 * math.sqrt(min(1.0, row.share))


def _intensity(row: Row) -> float:
    return (row.forward_flops + row.backward_flops) / row.bytes


def ratio_against_batch(by_rows: Mapping[int, StepFlops], optimizer: str) -> Json:
    """FLOPs of the backward over those of the forward against the number of rows, with the update and without."""
    layout = frame("rows in the batch", "backward over forward, FLOPs", height=380)
    del layout["xaxis"]["rangemode"]
    del layout["yaxis"]["nticks"]
    rows = sorted(n for n, counted in by_rows.items() if counted.forward_flops)
    layout["xaxis"].update({"type": "log", "tickvals": rows, "ticktext": [f"{n:,}" for n in rows]})
    data: list[Json] = [
        {
            "x": rows, "y": [getattr(by_rows[n], attribute) for n in rows], "mode": "lines+markers", "name": name,
            "line": {"color": colour, "width": 2.25}, "marker": {"color": colour, "size": 8},
            "hovertemplate": f"{name}<br>%{{x}} rows: %{{y:.4f}}<extra></extra>",
        }
        for name, attribute, colour in (
            (f"with the update ({optimizer})", "ratio_with_update", COLOURS[1]),
            ("without", "ratio", COLOURS[0]),
        )
    ]  # fmt: skip
    highest = max((by_rows[n].ratio_with_update for n in rows), default=1.0)
    layout["yaxis"].update({"range": [0, 1.1 * highest]})
    note = "Each point is counted from a step of so many rows. The update costs the same at any batch size."
    return {"title": "The ratio against the batch size", "note": note, "data": data, "layout": layout}


# --- writing ----------------------------------------------------------------------------------------------------------


def _line(row: Row) -> list[str]:
    flops = row.forward_flops + row.backward_flops
    return [
        row.name, f"{row.forward_calls:g} + {row.backward_calls:g}", f"{1000 * row.forward_s:.3f}",
        f"{1000 * row.backward_s:.3f}", f"{100 * row.share:.0f} %", f"{row.flops_per_s / 1e9:.1f}" if flops else "",
    ]  # fmt: skip


def _conditions(where: Mapping[str, Any]) -> dict[str, str]:
    return {
        "Batch": f"N = {where['num_rows']} rows",
        "Model": f"parameters in {where['dtype']}",
        "Machine": f"{where['device']} ({where['device_name']}), {where['threads']} threads, {where['system']}",
        "Versions": f"rowprop {where['rowprop']}, torch {where['torch']}, Python {where['python']}",
    }


def _write(out: Path, *, figures: dict[str, Json], **content: Any) -> list[Path]:
    template = resources.files("rowprop.cost").joinpath("report.html.j2").read_text("utf-8")
    page = fill(template, PURPOSE, figures=figures, **content)
    files = {PAGE: page.encode()} | {f"{name}.png": drawn for name, drawn in pngs(page).items()}
    for name, file in files.items():
        write_whole(out / name, file)
    return [out / name for name in files]
