"""The page: one self-contained HTML file that opens offline. Figures are plotly's, text is escaped by jinja."""

from __future__ import annotations

import base64
import io
import math
from bisect import bisect_left
from collections.abc import Sequence
from importlib import resources
from itertools import cycle
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from rowprop import page
from rowprop.compare.data import Dataset
from rowprop.compare.show import with_spread
from rowprop.compare.train import PHASES
from rowprop.lookup import require
from rowprop.page import fill, frame

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
    "infobatch+random": "#e3b65c",
    "infobatch+ohem": "#7d9be8",
    "infobatch+batch-loss-filter": "#d0609f",
    "infobatch+kath18": "#6cc5a1",
}
OWN_COLOURS = ("#e07b39", "#7a8b2f", "#5d6fd1", "#c2458a", "#3f9c9c", "#9a7b4f")  # of methods that a user brings
DASHES = ("solid", "dash", "dot", "dashdot")
PHASE_COLOURS = dict(zip(PHASES, ("#b9bec8", "#e0a458", "#7fa6cf", "#c86f6f", "#3f6ea8", "#8fb39a"), strict=True))
PURPOSE = "The report of rowprop compare"


def check_extra() -> None:
    """Refuse to start a comparison whose page could not be written at its end.

    Raises:
        MissingExtra: plotly, jinja2 or pillow is not installed.

    """
    page.check_extra(PURPOSE)
    require("PIL.Image", "pillow", PURPOSE)


def render(results: Json, data: Dataset) -> str:
    """Return the page for the content of ``results.json``; ``data`` provides the gallery's pictures or texts."""
    styles = line_styles(results)
    return fill(
        resources.files("rowprop.compare").joinpath("report.html.j2").read_text("utf-8"),
        PURPOSE,
        results=results,
        styles=styles,
        figures=figures(results, styles),
        shares=share_legend(results),
        phases=PHASE_COLOURS,
        gallery=gallery(results, data),
        own_order=[method["label"] for method in results["methods"] if method["name"].startswith("infobatch")],
        with_spread=with_spread,
    )


def line_styles(results: Json) -> dict[str, dict[str, str]]:
    """Return colour and dash by method label."""
    own = dict.fromkeys(method["name"] for method in results["methods"] if method["name"] not in COLOURS)
    colours = COLOURS | dict(zip(own, cycle(OWN_COLOURS), strict=False))
    used: dict[str, int] = {}
    styles: dict[str, dict[str, str]] = {}
    for method in results["methods"]:
        nth = used.get(method["name"], 0)
        used[method["name"]] = nth + 1
        styles[method["label"]] = {"color": colours[method["name"]], "dash": DASHES[nth % len(DASHES)]}
    return styles


def figures(results: Json, styles: dict[str, dict[str, str]]) -> dict[str, Json]:
    """Return every figure, by the id of its place in the page, as plotly's own ``{"data", "layout"}``."""
    seconds = frame("training time, s", "test accuracy, %")
    epochs = frame("epoch", "test accuracy, %")
    lowest = _accuracy_floor(results)
    for layout in (seconds, epochs):
        layout["yaxis"]["range"] = lowest
    kept = frame("epoch", "kept of the epoch's rows, %")
    kept["yaxis"]["range"] = [0, 104]
    drawn = {
        "accuracy-time": {"data": _curves(results, styles, "train_s", "accuracy"), "layout": seconds},
        "accuracy-epoch": {"data": _curves(results, styles, "epoch", "accuracy"), "layout": epochs},
        "kept": {"data": _curves(results, styles, "epoch", "kept"), "layout": kept},
        "phases": _phases(results),
        "loss-share": _loss_share(results),
    }
    return drawn


def _interpolate(x: float, xs: Sequence[float], ys: Sequence[float]) -> float:
    right = bisect_left(xs, x)
    if right == 0 or right == len(xs):
        return ys[min(right, len(xs) - 1)]
    part = (x - xs[right - 1]) / (xs[right] - xs[right - 1])
    return ys[right - 1] + part * (ys[right] - ys[right - 1])


def _seed_curves(results: Json, label: str, x_key: str, y_key: str) -> list[tuple[list[float], list[float]]]:
    return [
        ([point[x_key] for point in run["curve"]], [100 * point[y_key] for point in run["curve"]])
        for run in results["runs"]
        if run["label"] == label
    ]


def _curves(results: Json, styles: dict[str, dict[str, str]], x_key: str, y_key: str) -> list[Json]:
    """One line per method, the mean over its seeds, on a band from their lowest to their highest."""
    bands: list[Json] = []
    lines: list[Json] = []
    unit = "s" if x_key == "train_s" else ""
    for label, style in styles.items():
        curves = _seed_curves(results, label, x_key, y_key)
        # Seeds need not have the same points (seconds, or epochs under a budget of seconds): read all at one seed's.
        xs = min((curve[0] for curve in curves), key=len)
        at = [[_interpolate(x, *curve) for curve in curves] for x in xs]
        if len(curves) > 1:
            bands.append(
                {
                    "x": [*xs, *reversed(xs)],
                    "y": [*map(max, at), *reversed([*map(min, at)])],
                    "fill": "toself",
                    "fillcolor": _translucent(style["color"], 0.13),
                    "line": {"width": 0},
                    "mode": "lines",
                    "hoverinfo": "skip",
                }
            )
        lines.append(
            {
                "x": xs,
                "y": [fmean(ys) for ys in at],
                "name": label,
                "mode": "lines+markers",
                "marker": {"size": [0] * (len(xs) - 1) + [8] if len(xs) > 1 else [8], "color": style["color"]},
                "line": {"color": style["color"], "dash": style["dash"], "width": 2.25},
                "hovertemplate": f"{label}<br>%{{x:.1f}} {unit}<br>%{{y:.2f}} %<extra></extra>",
            }
        )
    return bands + lines


def _translucent(colour: str, alpha: float) -> str:
    red, green, blue = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
    return f"rgba({red},{green},{blue},{alpha})"


def _accuracy_floor(results: Json) -> list[float]:
    """Show the range in which the methods differ: from where they stood half-way."""
    half_way = [run["curve"][(len(run["curve"]) - 1) // 2]["accuracy"] for run in results["runs"]]
    highest = max(point["accuracy"] for run in results["runs"] for point in run["curve"])
    low = math.floor(100 * min(half_way))
    high = 100 * highest
    room = max(0.5, 0.06 * (high - low))
    return [max(0.0, low - room), high + room]


def _phases(results: Json) -> Json:
    layout = frame("seconds per run", "")
    layout["barmode"] = "stack"
    layout["xaxis"]["showgrid"] = True
    layout["yaxis"] = {"automargin": True, "autorange": "reversed", "fixedrange": True, "showgrid": False, "ticks": ""}
    layout["bargap"] = 0.42
    labels = [method["label"] for method in results["methods"]]
    bars = [
        {
            "type": "bar",
            "orientation": "h",
            "name": phase,
            "y": labels,
            "x": [method["phases_s"][phase] for method in results["methods"]],
            "marker": {"color": colour},
            "hovertemplate": f"%{{y}}<br>{phase} %{{x:.2f}} s<extra></extra>",
        }
        for phase, colour in PHASE_COLOURS.items()
    ]
    return {"data": bars, "layout": layout}


def _share_method(results: Json) -> Json:
    """Return the method whose losses are drawn: full where it is there, for it does not act on them itself."""
    methods: list[Json] = results["methods"]
    return next((method for method in methods if method["name"] == "full"), methods[0])


def share_legend(results: Json) -> Json:
    """Return whose losses are drawn, at which epochs in which shade, and one sentence that reads the last curve."""
    method = _share_method(results)
    run = next(run for run in results["runs"] if run["label"] == method["label"])
    shades = (0.35, 0.65, 1.0)[-len(run["loss_shares"]) :]
    moments = [
        {"epoch": f"{share['epoch']:g}" if share["epoch"] % 1 == 0 else f"{share['epoch']:.1f}", "opacity": shade}
        for share, shade in zip(run["loss_shares"], shades, strict=True)
    ]
    last = run["loss_shares"][-1]
    return {
        "label": method["label"],
        "moments": moments,
        "sentence": f"After epoch {moments[-1]['epoch']}, the hardest 10 % of the training rows hold "
        f"{100 * last['share'][10]:.0f} % of the loss, the hardest half {100 * last['share'][50]:.0f} %.",
    }


def _loss_share(results: Json) -> Json:
    method = _share_method(results)
    run = next(run for run in results["runs"] if run["label"] == method["label"])
    layout = frame("hardest rows, % of all", "share of the loss, %")
    layout["xaxis"]["range"], layout["yaxis"]["range"] = [0, 100], [0, 103]
    percents = list(range(len(run["loss_shares"][0]["share"])))
    equal: Json = {
        "x": [0, 100],
        "y": [0, 100],
        "mode": "lines",
        "line": {"color": COLOURS["full"], "width": 1, "dash": "dot"},
        "hoverinfo": "skip",
    }
    lines = [
        {
            "x": percents,
            "y": [100 * held for held in share["share"]],
            "mode": "lines",
            "name": f"epoch {moment['epoch']}",
            "line": {"color": _translucent("#d0605e", moment["opacity"]), "width": 2.25},
            "hovertemplate": f"epoch {moment['epoch']}<br>hardest %{{x}} %<br>hold %{{y:.0f}} %<extra></extra>",
        }
        for share, moment in zip(run["loss_shares"], share_legend(results)["moments"], strict=True)
    ]
    return {"data": [equal, *lines], "layout": layout}


def gallery(results: Json, data: Dataset) -> list[Json]:
    """Return the rows chosen most often, each with its picture where the data are images, or its text."""
    names: list[str] = results["data"]["class_names"]
    low, high = float(data.train_x.min()), float(data.train_x.max())
    return [
        entry
        | {
            "text": data.train_texts[entry["position"]] if data.train_texts else None,
            "picture": picture(data.train_x[entry["position"]], low, high),
            "class_name": names[entry["class"]],
            "predicted_name": names[entry["predicted"]],
            "doubtful": entry["class"] != entry["predicted"],
        }
        for entry in results["most_chosen"]
    ]


def picture(row: Tensor, low: float, high: float) -> str | None:
    """Return an image row as a PNG data URI, its values spread from ``low`` to ``high``; None where it is no image."""
    if row.dim() != 3 or row.shape[0] not in (1, 3):
        return None
    image = require("PIL.Image", "pillow", PURPOSE)
    scaled = ((row - low) / max(high - low, 1e-9) * 255).round().clamp(0, 255).to(torch.uint8)
    height, width = scaled.shape[1:]
    pixels = scaled.permute(1, 2, 0).contiguous().cpu().numpy().tobytes()
    buffer = io.BytesIO()
    image.frombytes("L" if row.shape[0] == 1 else "RGB", (width, height), pixels).save(buffer, format="PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode("ascii")
