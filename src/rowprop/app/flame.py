"""A flame graph: one self-contained HTML file of nested boxes that opens offline, and reads without its script too."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from rowprop.app.lookup import require
from rowprop.app.page import fill, table
from rowprop.cost.trace import Stack
from rowprop.files import write_whole

PURPOSE = "The flame graph"
LEAST_SHARE = 0.001
"""A frame with a smaller share of the time counts as part of its caller."""
MOST_FRAMES = 1200
"""A graph has no more frames, so that the page stays light; the smallest ones count as part of their callers."""
SLOWEST = 15
"""The table has no more frames."""


def check_extra() -> None:
    """Refuse a measurement whose graph could not be drawn at its end.

    Raises:
        MissingExtra: jinja2 is not installed.
    """
    require("jinja2", "jinja2", PURPOSE)


def write_flame(path: Path, stacks: Mapping[Stack, float], title: str, modules: Mapping[str, str]) -> None:
    """Draw the time of a step as nested boxes: phase, modules from the outermost, backward node, op, and its calls.

    Args:
        path: The file, ``.html``.
        stacks: Seconds by stack, each without the stacks below it.
        title: Above the graph.
        modules: Names of modules by path; the name of any other module is its path.

    Raises:
        MissingExtra: jinja2 is not installed.
        InvalidInput: The file cannot be written.
    """
    template = resources.files("rowprop.app").joinpath("flame.html.j2").read_text("utf-8")
    frames = frames_of(stacks)
    names = {stack: _name(stack, modules) for stack in frames}
    root, slowest = _boxes(frames, names), _slowest(frames, names)
    least = min(frames.values(), default=0.0) / max(frames.values(), default=1.0)
    page = fill(template, PURPOSE, title=title, frames=[root], slowest=slowest, least=f"{100 * least:.2g} %")
    write_whole(path, page.encode())


def _name(stack: Stack, modules: Mapping[str, str]) -> str:
    *above, name = stack
    outer = above[2:][-1:] or [""]  # below step and phase come the modules, each by its whole path
    is_module = len(above) >= 2 and name.rpartition(".")[0] == outer[0]
    return modules.get(name, name) if is_module else name


def _boxes(frames: Mapping[Stack, float], names: Mapping[Stack, str]) -> dict[str, Any]:
    """Return the root with the boxes inside it; in ``frames`` a caller stands before its calls."""
    whole_s = frames.get(("step",), 0.0)
    boxes: dict[Stack, dict[str, Any]] = {}
    for stack, time_s in frames.items():
        above = frames.get(stack[:-1], whole_s)
        told = f"{names[stack]}: {1000 * time_s:.3f} ms, {_percent(time_s, whole_s)} of the step"
        box = boxes[stack] = {
            "name": names[stack],
            "phase": stack[1] if len(stack) > 1 and stack[1] in ("forward", "backward") else "",
            "width": 100 * time_s / above if above else 100.0,
            "told": told,
            "inside": [],
        }
        if len(stack) > 1:
            boxes[stack[:-1]]["inside"].append(box)
    return boxes.get(("step",), {"name": "step", "phase": "", "width": 100.0, "told": "nothing ran", "inside": []})


def _slowest(frames: Mapping[Stack, float], names: Mapping[Stack, str]) -> Any:
    """Return a table of the frames with most time of their own."""
    from markupsafe import Markup

    own = dict(frames)
    for stack, time_s in frames.items():
        if len(stack) > 1:
            own[stack[:-1]] -= time_s
    whole_s = frames.get(("step",), 0.0)
    rows: list[list[str]] = []
    for stack in sorted(own, key=lambda stack: -own[stack])[:SLOWEST]:
        if own[stack] > 0:
            above = " / ".join(names[stack[:depth]] for depth in range(2, len(stack)))
            name = Markup('{} <span class="soft">{}</span>').format(names[stack], above)
            rows.append([name, f"{1000 * own[stack]:.3f}", _percent(own[stack], whole_s)])
    return table(["frame", "ms", "share"], rows)


def _percent(time_s: float, whole_s: float) -> str:
    return f"{100 * time_s / whole_s if whole_s else 0.0:.1f} %"


def frames_of(stacks: Mapping[Stack, float]) -> dict[Stack, float]:
    """Seconds of every frame with all frames below it, a caller before its calls; the root is ``("step",)``."""
    frames: dict[Stack, float] = {}
    for stack, time_s in stacks.items():
        whole = ("step", *stack)
        for depth in range(1, len(whole) + 1):
            frames[whole[:depth]] = frames.get(whole[:depth], 0.0) + time_s
    least_s = LEAST_SHARE * frames.get(("step",), 0.0)
    largest = sorted(frames, key=lambda stack: -frames[stack])[:MOST_FRAMES]  # of equal ones the caller stands first
    drawn = {stack for stack in largest if frames[stack] >= least_s}
    return {stack: time_s for stack, time_s in frames.items() if stack in drawn}
