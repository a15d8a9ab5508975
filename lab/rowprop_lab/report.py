"""The page of a comparison: one self-contained HTML file that opens offline, without a script."""

from __future__ import annotations

import base64
import io
import itertools
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from rowprop.app.page import GREY, drawing, legend, named, new_figure, render
from rowprop_lab.data import Dataset
from rowprop_lab.results import COUNT_EVERY, PHASES, Json, task_of, with_spread
from rowprop_lab.settings import CUT, METHODS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAMES = [*METHODS["row"], "rho1"]
# Colours readable on light and dark ground: those of NAMES, then those of the user's own methods.
PALETTE = (
    "#858b96", "#c98a1b", "#3b82d6", "#a463c9", "#1fa07a", "#cf5f57", "#2aa3b8", "#8a9430", "#b0703c", "#d1495b",
    "#e3b65c", "#d0609f", "#6cc5a1", "#4aa564", "#6aa31f", "#b5489a", "#e07b39", "#8a6a48", "#0e8f8f", "#5b6ee1",
)  # fmt: skip
DASHES = ("", "6 3", "2 2", "7 2 2 2")  # strokes and gaps, by which engines of one method differ; empty is solid
PHASE_COLOURS = dict(zip(PHASES, ("#b9bec8", "#e0a458", "#7fa6cf", "#c86f6f", "#3f6ea8", "#8fb39a"), strict=True))
LOSS_COLOUR = "#d0605e"
HELD = 0.9  # the page says how few rows hold this share of the loss; 90 % of them do if all are equally hard
PICTURES, TEXTS = 9, 6  # rows of the gallery that are open from the start
PICTURE_SIDE, PICTURE_COLOURS = 64, 64


def render_report(results: Json, data: Dataset) -> str:
    """The page for the content of ``results.json``; ``data`` provides the gallery's pictures or texts."""
    methods: list[Json] = results["methods"]
    styles = line_styles(results)
    rows = gallery(results, data)
    first = TEXTS if rows and rows[0]["text"] is not None else PICTURES
    task = task_of(results)
    losses = loss_shares(results)
    return render(
        "report.html.j2", Path(__file__).parent,
        results=results, task=task, phases=PHASES, with_spread=with_spread, styles=styles,
        cuts=any(method["engine"] == CUT for method in methods),
        by_time=curves(results, styles, "train_s", "training time, s"),
        by_epoch=curves(results, styles, "epoch", "epoch"),
        phase_bars=phase_bars(results), losses=losses, loss_share=loss_share(losses, task.unit),
        gallery=[rows[:first], rows[first:]],
        count_every=COUNT_EVERY, uncounted=sorted({op for method in methods for op in method.get("uncounted", ())}),
        own_order=[method["label"] for method in methods if method["name"].startswith("infobatch")],
    )  # fmt: skip


def line_styles(results: Json) -> dict[str, Json]:
    """Colour and dash by method label; methods of the same name have the same colour."""
    methods: list[Json] = results["methods"]
    names = dict.fromkeys([*NAMES, *(method["name"] for method in methods)])
    colours = dict(zip(names, itertools.chain(PALETTE, itertools.cycle(PALETTE[len(NAMES) :])), strict=False))
    used: Counter[str] = Counter()
    styles: dict[str, Json] = {}
    for method in methods:
        name = method["name"]
        styles[method["label"]] = {"color": colours[name], "dash": DASHES[used[name] % len(DASHES)]}
        used[name] += 1
    return styles


def over_seeds(results: Json, label: str, key: str) -> list[list[float]]:
    """A field of each seed's points after the same parts of its epochs, those of the run with the fewest points."""
    curves = [run["curve"] for run in results["runs"] if run["label"] == label]
    parts = [[point["epoch"] / curve[-1]["epoch"] for point in curve] for curve in curves]
    marks = min(parts, key=len)
    values = [[point[key] for point in curve] for curve in curves]
    return np.stack([np.interp(marks, *pair) for pair in zip(parts, values, strict=True)], 1).tolist()


@drawing()
def curves(results: Json, styles: dict[str, Json], x_key: str, x_title: str) -> Figure:
    """Draw each method's means over its seeds on a band from their lowest to their highest.

    A line ends at the table's means. In time, a thin line through its end reaches from the fastest seed to the slowest.
    """
    task = task_of(results)
    figure, axes = new_figure(x_title, f"test {task.title}")
    for label, style in styles.items():
        places = over_seeds(results, label, x_key)
        values = [[task.scale * value for value in at] for at in over_seeds(results, label, task.figure)]
        xs, ys = [fmean(at) for at in places], [fmean(at) for at in values]
        colour = style["color"]
        dash = (0, tuple(map(float, style["dash"].split()))) if style["dash"] else "solid"
        if len(values[0]) > 1:
            axes.fill_between(xs, [*map(min, values)], [*map(max, values)], color=colour, alpha=0.12, linewidth=0)
        if x_key == "train_s":
            axes.plot([min(places[-1]), max(places[-1])], [ys[-1]] * 2, color=colour, linewidth=0.8, alpha=0.7)
        axes.plot(xs, ys, color=colour, linestyle=dash, label=named(label), marker="o", markersize=5,
                  markevery=[len(xs) - 1])  # fmt: skip
    if x_key == "epoch":
        axes.locator_params(axis="x", integer=True)
    axes.set_xlim(left=0)
    # Where the methods differ: from the worst half-way on.
    half_way = [task.scale * run["curve"][(len(run["curve"]) - 1) // 2][task.figure] for run in results["runs"]]
    if task.rises:
        axes.set_ylim(bottom=max(0, math.floor(min(half_way)) - 1))
    else:
        axes.set_ylim(top=math.ceil(max(half_way)) + 1)
    legend(figure)
    return figure


@drawing()
def phase_bars(results: Json) -> Figure:
    """Draw a bar per method, its name and its seconds above it."""
    methods: list[Json] = results["methods"]
    figure, axes = new_figure("seconds per run", "", height=60 + 32 * len(methods))
    starts = [0.0] * len(methods)
    for phase, colour in PHASE_COLOURS.items():
        widths = [method["phases_s"][phase] for method in methods]
        axes.barh([*range(len(methods))], widths, 0.4, starts, color=colour, label=phase)
        starts = [start + width for start, width in zip(starts, widths, strict=True)]
    for place, (method, end) in enumerate(zip(methods, starts, strict=True)):
        axes.text(0, place - 0.27, f"{named(method['label'])}  {end:.1f} s", va="bottom")
    axes.set_ylim(len(methods) - 0.7, -0.85)
    axes.set_yticks([])
    axes.grid(visible=False, axis="y")
    axes.grid(visible=True, axis="x")
    axes.spines["left"].set_visible(False)
    legend(figure)
    return figure


def loss_shares(results: Json) -> Json:
    """Where the losses of ``full``, which does not act on them, or else of the first method lie in its first seed."""
    methods: list[Json] = results["methods"]
    label = next((method for method in methods if method["name"] == "full"), methods[0])["label"]
    shares: list[Json] = next(run for run in results["runs"] if run["label"] == label)["loss_shares"]
    last: Sequence[float] = shares[-1]["share"]
    return {
        "label": label, "curves": shares, "last": last,
        "epochs": [f"{share['epoch']:.1f}".removesuffix(".0") for share in shares],
        "needed": next((percent for percent, held in enumerate(last) if held >= HELD - 1e-9), None),
    }  # fmt: skip


@drawing()
def loss_share(losses: Json, unit: str) -> Figure:
    """Draw the share of the loss against the share of the rows, the hardest first."""
    figure, axes = new_figure(f"hardest {unit}s, % of all", "share of the loss, %")
    axes.plot([0, 100], [0, 100], color=GREY, linewidth=1.2, linestyle=(0, (2, 2)), label="all equally hard")
    shades = (0.35, 0.65, 1.0)[-len(losses["curves"]) :]
    for share, epoch, shade in zip(losses["curves"], losses["epochs"], shades, strict=True):
        held = [100 * part for part in share["share"]]
        axes.plot(range(len(held)), held, color=LOSS_COLOUR, alpha=shade, label=f"epoch {epoch}")
    axes.set_xlim(0, 100)
    axes.set_ylim(0, 103)
    legend(figure)
    return figure


def gallery(results: Json, data: Dataset) -> list[Json]:
    """The rows chosen most often, each with its picture or its text, and whether its label is doubtful."""
    names: list[str] = results["data"]["class_names"]
    low, high = float(data.train_x.min()), float(data.train_x.max())
    rows: list[Json] = []
    for entry in results["most_chosen"]:
        place, label, predicted = entry["position"], entry["class"], entry["predicted"]
        rows.append(entry | {
            "text": data.train_texts[place] if data.train_texts else None,
            "picture": picture(data.train_x[place], low, high),
            "class_name": names[label], "predicted_name": names[predicted], "doubtful": label != predicted,
        })  # fmt: skip
    return rows


def picture(row: Tensor, low: float, high: float) -> str | None:
    """An image row as a small PNG in a data URI, its values spread from ``low`` to ``high``; None if it is no image."""
    from PIL import Image

    if row.dim() != 3 or row.shape[0] not in (1, 3):
        return None
    scaled = ((row - low) / max(high - low, 1e-9) * 255).round().clamp(0, 255).byte().permute(1, 2, 0)
    drawn = Image.fromarray(scaled.squeeze(2).cpu().numpy())
    drawn.thumbnail((PICTURE_SIDE, PICTURE_SIDE))
    buffer = io.BytesIO()
    (drawn if row.shape[0] == 1 else drawn.quantize(PICTURE_COLOURS)).save(buffer, format="png")
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode('ascii')}"
