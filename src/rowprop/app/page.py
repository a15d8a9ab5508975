"""The parts that all pages share: templates, and figures, drawn by matplotlib into the page itself."""

from __future__ import annotations

import io
import platform
import re
import warnings
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

import rowprop
from rowprop.app.lookup import require

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

GREY = "#858b96"
COLOURS = ("#3b82d6", "#c98a1b", "#1fa07a", "#a463c9", "#c86f6f")
"""Readable on light and dark ground."""
INK, SOFT, RULE, CARD = "#1f242d", "#646b78", "#e6e3dc", "#ffffff"
"""Colours of page.mplstyle. A page replaces them by its variables, which follow the reader's light or dark."""
WIDTH, HEIGHT = 400, 260  # of a figure, in its own units
PICTURE_SCALE = 3  # a PNG has so many pixels for each unit
LONGEST = 30  # a name in a figure has no more letters
FIRST = "\N{ZERO WIDTH SPACE}"  # before a name: matplotlib keeps names that begin with an underscore out of legends


def environment(device: torch.device, model: nn.Module) -> dict[str, Any]:
    """Machine, versions, threads and the dtypes of the model's parameters, by which timings differ."""
    dtypes = {parameter.dtype for parameter in model.parameters()} or {torch.get_default_dtype()}
    name = f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}"
    return {
        "rowprop": rowprop.__version__, "torch": torch.__version__, "python": platform.python_version(),
        "system": platform.system(), "device": device.type,
        "device_name": torch.cuda.get_device_name(device) if device.type == "cuda" else name,
        "threads": torch.get_num_threads(),
        "dtype": ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes)),
    }  # fmt: skip


def templates() -> Any:
    """Jinja's environment of the templates beside this file; a page escapes all text, and knows :func:`svg`."""
    jinja2 = require("jinja2", "jinja2", "The page")
    made = jinja2.Environment(
        loader=jinja2.PackageLoader("rowprop", "app"),
        autoescape=jinja2.select_autoescape(enabled_extensions=("html.j2",), default_for_string=True),
        undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    made.globals["svg"] = svg
    return made


def render(template: str, **content: Any) -> str:
    """Fill in a template with data."""
    return templates().get_template(template).render(**content)


@contextmanager
def drawing() -> Generator[None]:
    """Draw with the pages' settings of matplotlib inside the block, or in the function it decorates."""
    import matplotlib.style

    look = Path(__file__).with_name("page.mplstyle")
    with warnings.catch_warnings(), matplotlib.style.context(["default", look]):
        # A browser has letters that the measuring font lacks.
        warnings.filterwarnings("ignore", message="Glyph .* missing from", category=UserWarning)
        yield


def new_figure(x_title: str, y_title: str, *, height: int = HEIGHT) -> tuple[Figure, Axes]:
    """An empty figure, ``height`` units high, and its axes; for use in :func:`drawing`."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH / 72, height / 72), dpi=72, layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.add_subplot(xlabel=x_title, ylabel=y_title)


def named(text: str) -> str:
    """A name as a figure shows it: on one line, a long one without its middle."""
    line = " ".join("".join(letter if letter.isprintable() else " " for letter in text).split()) or "-"
    if len(line) > LONGEST:
        line = f"{line[: LONGEST // 2]}…{line[-(LONGEST // 2 - 1) :]}"
    return FIRST + line


def legend(figure: Figure) -> None:
    """Put the names of lines and bars above the axes, in as many columns as fit; the figure grows by their height."""
    handles, labels = figure.axes[0].get_legend_handles_labels()
    for columns in range(len(labels), 0, -1):
        drawn = figure.legend(handles, labels, loc="outside upper left", ncols=columns)
        size = drawn.get_window_extent()
        if columns == 1 or size.width <= WIDTH - 8:
            figure.set_size_inches(figure.get_figwidth(), figure.get_figheight() + size.height / 72)
            return
        drawn.remove()


@drawing()
def svg(figure: Figure, title: str, words: str) -> Any:
    """A figure as markup in the page's ink and letters, always the same; ``words`` are for those who do not see it."""
    import matplotlib as mpl
    from markupsafe import Markup, escape

    buffer = io.StringIO()
    with mpl.rc_context({"svg.hashsalt": title}):  # keeps the ids of a page's figures apart
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    drawn = buffer.getvalue().replace(FIRST, "")
    drawn = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>", "", drawn[drawn.index("<svg") :], flags=re.DOTALL)
    drawn = re.sub(r">\s+<", "><", re.sub(r"<[^>]*>", _tidied, drawn))
    box = drawn[drawn.index("viewBox=") :].split('"')[1]
    label = " ".join(escape(words).split())  # a template has escaped its own words
    opening = f'<svg viewBox="{box}" role="img" aria-label="{label}"><title>{escape(title)}</title>'
    return Markup(opening + drawn[drawn.index(">") + 1 :].strip())


def _tidied(tag: re.Match[str]) -> str:
    """A tag of matplotlib's SVG as a page needs it; the letters of a figure stand outside of tags."""
    text = " ".join(tag[0].split())
    text = re.sub(r'(?<=<g) id="[^"]*"', "", text)  # the same ids stand in every figure, and nothing refers to them
    text = re.sub(r' transform="rotate\(-0 [^"]*"', "", text).replace("xlink:href", "href")
    text = re.sub(r"font: ([\d.]+px) [^;\"]*", r"font-size: \1", re.sub(r" font-family: [^;\"]*;", "", text))
    text = re.sub(r"\d+\.\d{3,}", lambda number: f"{float(number[0]):.1f}".removesuffix(".0"), text)
    for colour, name in ((INK, "ink"), (SOFT, "soft"), (RULE, "rule"), (CARD, "card")):
        text = re.sub(rf"(fill|stroke): {colour}", rf"\1: var(--{name})", text)
    return text


@drawing()
def png(figure: Figure) -> bytes:
    """A figure as PNG, on white."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=72 * PICTURE_SCALE, metadata={"Software": None})
    return buffer.getvalue()
