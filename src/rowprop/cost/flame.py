"""A flame graph: one self-contained HTML file that opens offline."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rowprop.cost.trace import Stack
from rowprop.files import write_whole
from rowprop.lookup import require

PURPOSE = "The flame graph"
LEAST_SHARE = 0.001
"""Frames with less of the time are part of what called them."""


def check_extra() -> None:
    """Refuse to start a measurement whose graph could not be drawn at its end.

    Raises:
        MissingExtra: plotly is not installed.
    """
    require("plotly.graph_objects", "plotly", PURPOSE)


def write_flame(path: Path, stacks: Mapping[Stack, float], title: str) -> None:
    """Draw where the time went: phase, modules from the outermost, backward node, op, and what it called.

    Args:
        path: The file, ``.html``.
        stacks: Seconds by stack, each without what is below it.
        title: Above the graph.

    Raises:
        MissingExtra: plotly is not installed.
        InvalidInput: The file cannot be written.
    """
    graph_objects = require("plotly.graph_objects", "plotly", PURPOSE)
    frames = frames_of(stacks)
    figure: Any = graph_objects.Figure(
        graph_objects.Icicle(
            ids=["\n".join(stack) for stack in frames],
            labels=[stack[-1] for stack in frames],
            parents=["\n".join(stack[:-1]) for stack in frames],
            values=[1000 * time_s for time_s in frames.values()],
            branchvalues="total",
            sort=False,
            texttemplate="%{label} %{percentRoot:.0%}",
            hovertemplate="%{label}<br>%{value:.3f} ms, %{percentRoot:.1%} of the step<extra></extra>",
            tiling={"orientation": "v"},
            root_color="#d8dce3",
        )
    )
    figure.update_layout(title={"text": title}, margin={"l": 8, "r": 8, "t": 48, "b": 8}, template="none")
    write_whole(path, figure.to_html(include_plotlyjs=True).encode())


def frames_of(stacks: Mapping[Stack, float]) -> dict[Stack, float]:
    """Seconds of every frame with all below it, the callers before what they call; the root is ``("step",)``."""
    frames: dict[Stack, float] = {}
    for stack, time_s in stacks.items():
        whole = ("step", *stack)
        for depth in range(1, len(whole) + 1):
            frames[whole[:depth]] = frames.get(whole[:depth], 0.0) + time_s
    least_s = LEAST_SHARE * frames.get(("step",), 0.0)
    return {stack: time_s for stack, time_s in frames.items() if time_s >= least_s}
