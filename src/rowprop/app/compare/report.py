"""The page: one self-contained HTML file that opens offline, without a script. Text is escaped by jinja."""

from __future__ import annotations

import base64
import io
import math
from bisect import bisect_left
from collections.abc import Sequence
from importlib import resources
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rowprop.app import page
from rowprop.app.compare.data import Dataset
from rowprop.app.compare.methods import CUT
from rowprop.app.compare.runs import PHASES, TASKS
from rowprop.app.compare.show import task_of, with_spread
from rowprop.app.lookup import require
from rowprop.app.page import GREY, Plot, drawing, fill, legend, named, new_figure, table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Json = dict[str, Any]

# Each method has one colour everywhere, readable on light and dark ground; its engines differ by dash.
COLOURS = {
    "full": "#858b96",
    "random": "#c98a1b",
    "ohem": "#3b82d6",
    "composer": "#a463c9",
    "batch-loss-filter": "#1fa07a",
    "biggest-losers": "#cf5f57",
    "kath18": "#2aa3b8",
    "infobatch": "#8a9430",
    "rho-loss": "#b0703c",
    "rho1": "#4aa564",
    "thinned": "#d1495b",
    "vcas": "#7a6ff0",
    "infobatch+random": "#e3b65c",
    "infobatch+ohem": "#7d9be8",
    "infobatch+batch-loss-filter": "#d0609f",
    "infobatch+kath18": "#6cc5a1",
}
OTHER_COLOURS = ("#6aa31f", "#b5489a", "#e07b39", "#8a6a48", "#0e8f8f", "#5b6ee1")
"""For methods that are not ours, one after the other."""
DASHES = ("", "6 3", "2 2", "7 2 2 2")
"""Lengths of stroke and gap; empty is a solid line."""
PHASE_COLOURS = dict(zip(PHASES, ("#b9bec8", "#e0a458", "#7fa6cf", "#c86f6f", "#3f6ea8", "#8fb39a"), strict=True))
LOSS_COLOUR = "#d0605e"
PURPOSE = "The report of rowprop compare"
QUARTERS = (0.25, 0.5, 0.75, 1.0)
"""Parts of the training after which the page gives the accuracy in numbers."""
HELD = 0.9
"""The page tells how few rows hold this share of the loss; 90 % of them do if all are equally hard."""
PICTURES, TEXTS = 9, 6
"""Rows of the gallery that are open from the start."""
PICTURE_SIDE, PICTURE_BYTES = 64, 4096
"""A larger picture is made smaller, a PNG of more bytes becomes a JPEG: forty of them must not swell the page."""
TEXT_LENGTH = 600


def check_extra() -> None:
    """Refuse a comparison whose page could not be written at its end.

    Raises:
        MissingExtra: matplotlib, jinja2 or pillow is not installed.

    """
    page.check_extra(PURPOSE)
    require("PIL.Image", "pillow", PURPOSE)


def render(results: Json, data: Dataset) -> str:
    """Return the page for the content of ``results.json``; ``data`` provides the gallery's pictures or texts."""
    styles = line_styles(results)
    rows = gallery(results, data)
    first = TEXTS if rows and rows[0]["text"] is not None else PICTURES
    methods: list[Json] = results["methods"]
    return fill(
        resources.files("rowprop.app.compare").joinpath("report.html.j2").read_text("utf-8"),
        PURPOSE,
        results=results,
        task=task_of(results),
        optimizer=results["settings"].get("optimizer", "SGD with momentum"),  # of earlier versions
        cuts=any(method["engine"] == CUT for method in methods),
        styles=styles,
        plots=plots(results, styles),
        shares=loss_shares(results),
        tables=tables(results, styles),
        gallery=[rows[:first], rows[first:]],
        own_order=[method["label"] for method in methods if method["name"].startswith("infobatch")],
    )


def line_styles(results: Json) -> dict[str, Json]:
    """Return colour and dash by method label; methods of the same name have the same colour."""
    used: dict[str, int] = {}
    colours: dict[str, str] = dict(COLOURS)
    styles: dict[str, Json] = {}
    for method in results["methods"]:
        name, nth = method["name"], used.get(method["name"], 0)
        used[name] = nth + 1
        colour = colours.setdefault(name, OTHER_COLOURS[(len(colours) - len(COLOURS)) % len(OTHER_COLOURS)])
        styles[method["label"]] = {"color": colour, "dash": DASHES[nth % len(DASHES)]}
    return styles


# --- tables -----------------------------------------------------------------------------------------------------------


def tables(results: Json, styles: dict[str, Json]) -> dict[str, Any]:
    """Return every table of the page by name."""
    methods: list[Json] = results["methods"]
    task = task_of(results)
    columns = [
        "method", "engine", f"test {task.title}", "training time, s", "x full", f"{task.unit}s seen",
        f"{task.unit}s backpropagated",
    ]  # fmt: skip
    labels = [task.title, "time, s", "x full", "seen", "backpropagated"]
    parts = ("a quarter", "half", "three quarters", "all")
    phases = [[method["label"], *(f"{method['phases_s'][phase]:.2f}" for phase in PHASES)] for method in methods]
    return {
        "methods": table(columns, [_cells(method, results, styles) for method in methods], words=2, labels=labels),
        "on_the_way": table(
            ["method", *(f"{part} of the training{', %' if task.sign else ''}" for part in parts)],
            [
                [label, *(f"{value:.{task.digits}f}" for value in values)]
                for label, values in on_the_way(results).items()
            ],
            labels=["1/4:", "1/2:", "3/4:", "all:"],
        ),
        "phases": table(["method", *(f"{phase}, s" for phase in PHASES)], phases, labels=PHASES),
    }


def _cells(method: Json, results: Json, styles: dict[str, Json]) -> list[str]:
    """Return a method's row: its name beside its colour, and its slow runs beside its time."""
    from markupsafe import Markup

    label, seen, kept = method["label"], method["rows_seen"], method["rows_backpropagated"]
    task = task_of(results)
    slow = Markup().join(
        Markup(' <span class="doubt">seed {}: {:.1f}</span>').format(run["seed"], run["train_s"])
        for run in results["slow_runs"]
        if run["label"] == label
    )
    share = Markup('<span class="soft">{:.0f} %<span class="wide-only"> of seen</span></span>').format(
        100 * kept / seen
    )
    dot = Markup('<span><span class="dot" style="background:{}"></span>{}</span>')
    return [
        dot.format(styles[label]["color"], label),
        method["engine"],
        with_spread(method[task.figure], task.scale, task.digits),
        Markup("<span>{}{}</span>").format(with_spread(method["train_s"], 1, 1), slow),
        with_spread(method["ratio_to_full"], 1, 2) if method["ratio_to_full"] else "-",
        f"{seen:,.0f}",
        Markup("<span>{} {}</span>").format(f"{kept:,.0f}", share),
    ]


# --- figures ----------------------------------------------------------------------------------------------------------


def plots(results: Json, styles: dict[str, Json]) -> dict[str, Plot]:
    """Return every figure of the page by name."""
    methods: list[Json] = results["methods"]
    task = task_of(results)
    reached = [
        f"{method['label']} {with_spread(method[task.figure], task.scale, task.digits)}{task.sign} after "
        f"{with_spread(method['train_s'], 1, 1)} s"
        for method in methods
    ]
    spent = [
        f"{method['label']}: " + ", ".join(f"{phase} {method['phases_s'][phase]:.2f} s" for phase in PHASES)
        for method in methods
    ]
    kept = [
        f"{method['label']} backpropagated {100 * method['rows_backpropagated'] / method['rows_seen']:.0f} % of the "
        f"{task.unit}s it saw"
        for method in methods
    ]
    by_time, by_epoch = (
        _curves(results, styles, x_key, x_title, task.figure, f"test {task.title}", _shown_range(results))
        for x_key, x_title in (("train_s", "training time, s"), ("epoch", "epoch"))
    )
    by_keep = _curves(results, styles, "epoch", "epoch", "kept", f"kept of the epoch's {task.unit}s, %", (0, 104))
    return {
        "accuracy-time": Plot(f"{task.figure.title()} against training time", by_time, "; ".join(reached)),
        "accuracy-epoch": Plot(f"{task.figure.title()} against epochs", by_epoch, "; ".join(reached)),
        "phases": Plot("Where the time went", _phases(results), "; ".join(spent)),
        "kept": Plot(f"{task.unit.title()}s kept of all in the epoch", by_keep, "; ".join(kept)),
        "loss-share": Plot(
            f"Share of the loss that the hardest {task.unit}s hold",
            _loss_share(results),
            loss_shares(results)["sentence"],
        ),
    }


def _interpolate(x: float, xs: Sequence[float], ys: Sequence[float]) -> float:
    right = bisect_left(xs, x)
    if right == 0 or right == len(xs):
        return ys[min(right, len(xs) - 1)]
    part = (x - xs[right - 1]) / (xs[right] - xs[right - 1])
    return ys[right - 1] + part * (ys[right] - ys[right - 1])


def over_seeds(results: Json, label: str, key: str, marks: Sequence[float] | None = None) -> list[list[float]]:
    """Return a value of each seed after the same parts of its training.

    Args:
        results: The content of ``results.json``.
        label: The method.
        key: The field of a curve's points.
        marks: The parts, in (0, 1], counted in epochs of the run's own. Default None: those at which a run has points.

    Returns:
        For each mark, a value of each seed. Seeds need not have the same points under a budget of seconds.
    """
    curves = [run["curve"] for run in results["runs"] if run["label"] == label]
    parts = [[point["epoch"] / curve[-1]["epoch"] for point in curve] for curve in curves]
    return [
        [
            _interpolate(mark, part, [point[key] for point in curve])
            for part, curve in zip(parts, curves, strict=True)
        ]
        for mark in (marks or min(parts, key=len))
    ]  # fmt: skip


def on_the_way(results: Json) -> dict[str, list[float]]:
    """Return the mean figure, as it is shown, at each of ``QUARTERS``, by label."""
    task = task_of(results)
    return {
        method["label"]: [
            task.scale * fmean(values) for values in over_seeds(results, method["label"], task.figure, QUARTERS)
        ]
        for method in results["methods"]
    }


@drawing()
def _curves(
    results: Json,
    styles: dict[str, Json],
    x_key: str,
    x_title: str,
    y_key: str,
    y_title: str,
    y_range: tuple[float, float],
) -> Figure:
    """One line per method, means over its seeds in both directions, on a band from their lowest to their highest.

    A line ends at the numbers of the page's table: the mean time and the mean accuracy. If seeds differ in time, a
    thin line through its end reaches from the fastest to the slowest.
    """
    figure, axes = new_figure(x_title, y_title)
    scale = TASKS["token"].scale if y_key == TASKS["token"].figure else 100
    for label, style in styles.items():
        places = over_seeds(results, label, x_key)
        values = [[scale * value for value in at] for at in over_seeds(results, label, y_key)]
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
    axes.set_ylim(y_range)
    legend(figure)
    return figure


def _shown_range(results: Json) -> tuple[float, float]:
    """Return the range of the figure to show, in which the methods differ: from the worst half-way to the best."""
    task = task_of(results)
    curves = [[task.scale * point[task.figure] for point in run["curve"]] for run in results["runs"]]
    half_way = [curve[(len(curve) - 1) // 2] for curve in curves]
    all_of_them = [value for curve in curves for value in curve]
    if task.rises:
        low, high = math.floor(min(half_way)), max(all_of_them)
    else:
        low, high = min(all_of_them), math.ceil(max(half_way))
    room = max(0.5, 0.06 * (high - low))
    return max(0.0, low - room), high + room


@drawing()
def _phases(results: Json) -> Figure:
    """A bar per method, its name and its seconds above it."""
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
    """Return a method, its losses in its first seed, and a heading and a sentence that fit them.

    The method is ``full`` if it was compared, because it does not act on the losses.
    """
    methods: list[Json] = results["methods"]
    unit = task_of(results).unit
    label = next((method for method in methods if method["name"] == "full"), methods[0])["label"]
    shares: list[Json] = next(run for run in results["runs"] if run["label"] == label)["loss_shares"]
    last: list[float] = shares[-1]["share"]
    epochs = [f"{share['epoch']:.1f}".removesuffix(".0") for share in shares]
    needed = next((percent for percent, held in enumerate(last) if held >= HELD - 1e-9), None)
    sentence = (
        f"After epoch {epochs[-1]}, the hardest 10 % of the training {unit}s hold {100 * last[10]:.0f} % of the loss, "
        f"the hardest half {100 * last[50]:.0f} %; {100 * HELD:.0f} % of it lie in {needed} % of the {unit}s."
    )
    if needed is None:
        heading, sentence = (
            "Here no loss is left",
            f"After epoch {epochs[-1]}, the loss of every training {unit} is zero.",
        )
    elif needed <= 50:
        heading = f"Why few {unit}s are enough"
    elif needed < 80:
        heading = f"How the loss is spread over the {unit}s"
    else:
        heading = f"Here all {unit}s are about equally hard"
    return {
        "label": label,
        "curves": shares,
        "epochs": epochs,
        "heading": heading,
        "sentence": sentence,
    }


@drawing()
def _loss_share(results: Json) -> Figure:
    shown = loss_shares(results)
    figure, axes = new_figure(f"hardest {task_of(results).unit}s, % of all", "share of the loss, %")
    axes.plot([0, 100], [0, 100], color=GREY, linewidth=1.2, linestyle=(0, (2, 2)), label="all equally hard")
    shades = (0.35, 0.65, 1.0)[-len(shown["curves"]) :]
    for share, epoch, shade in zip(shown["curves"], shown["epochs"], shades, strict=True):
        held = [100 * part for part in share["share"]]
        axes.plot(range(len(held)), held, color=LOSS_COLOUR, alpha=shade, label=f"epoch {epoch}")
    axes.set_xlim(0, 100)
    axes.set_ylim(0, 103)
    legend(figure)
    return figure


# --- the gallery ------------------------------------------------------------------------------------------------------


def gallery(results: Json, data: Dataset) -> list[Json]:
    """Return the rows chosen most often, each with its picture or its text; or the words, each with its name."""
    names: list[str] = results["data"]["class_names"]
    low, high = float(data.train_x.min()), float(data.train_x.max())
    of_rows = data.unit == "row"
    chosen: list[Json] = results["most_chosen"]
    return [
        entry
        | {
            "text": shorten(data.train_texts[int(entry["position"])]) if data.train_texts else None,
            "picture": picture(data.train_x[entry["position"]], low, high) if of_rows else None,
            "class_name": names[entry["class"]],
            "predicted_name": names[entry["predicted"]],
            "doubtful": of_rows and entry["class"] != entry["predicted"],
        }
        for entry in chosen
    ]


def shorten(text: str) -> str:
    """Return as much of a row's text as the gallery shows."""
    return text if len(text) <= TEXT_LENGTH else f"{text[:TEXT_LENGTH]}…"


def picture(row: Tensor, low: float, high: float) -> str | None:
    """Return an image row as a data URI, its values spread from ``low`` to ``high``; None if it is no image.

    A PNG; one that is large becomes a JPEG.
    """
    if row.dim() != 3 or row.shape[0] not in (1, 3):
        return None
    image = require("PIL.Image", "pillow", PURPOSE)
    scaled = ((row - low) / max(high - low, 1e-9) * 255).round().clamp(0, 255).to(torch.uint8)
    height, width = scaled.shape[1:]
    pixels = scaled.permute(1, 2, 0).contiguous().cpu().numpy().tobytes()
    drawn = image.frombytes("L" if row.shape[0] == 1 else "RGB", (width, height), pixels)
    drawn.thumbnail((PICTURE_SIDE, PICTURE_SIDE))
    content, kind = _encoded(drawn, "PNG"), "png"
    if len(content) > PICTURE_BYTES:
        content, kind = _encoded(drawn, "JPEG"), "jpeg"
    return f"data:image/{kind};base64,{base64.b64encode(content).decode('ascii')}"


def _encoded(drawn: Any, form: str) -> bytes:
    buffer = io.BytesIO()
    drawn.save(buffer, format=form)
    return buffer.getvalue()
