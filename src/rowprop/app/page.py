"""The parts that all pages share: style sheet, template, and figures, drawn by matplotlib into the page itself."""

from __future__ import annotations

import io
import platform
import re
import warnings
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from html import escape
from importlib import resources
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
"""Colours of the light style sheet. A page replaces them by its variables, which follow the reader's light or dark."""
WIDTH, HEIGHT, TEXT = 400, 260, 11.5
"""Size of a figure and of its text, in its own units: on a screen 400 pixels wide its text is 10 pixels high."""
PICTURE_SCALE = 3
"""A PNG has so many pixels for each unit."""
LOOK: dict[str, Any] = {
    "svg.fonttype": "none",  # letters stay letters: searched, copied, read aloud, in the page's own fonts
    "text.parse_math": False,  # a name with dollars is a name
    "text.usetex": False,
    "font.family": "DejaVu Sans",  # comes with matplotlib
    "font.size": TEXT,
    "figure.facecolor": CARD,
    "axes.facecolor": "none",
    "axes.edgecolor": RULE,
    "axes.labelcolor": SOFT,
    "axes.labelsize": TEXT,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "axes.xmargin": 0.02,
    "grid.color": RULE,
    "grid.linewidth": 1,
    "text.color": INK,
    "xtick.color": RULE,
    "xtick.labelcolor": SOFT,
    "xtick.labelsize": TEXT,
    "ytick.color": RULE,
    "ytick.labelcolor": SOFT,
    "ytick.labelsize": TEXT,
    "ytick.left": False,
    "xtick.minor.size": 0,
    "ytick.minor.size": 0,
    "lines.linewidth": 2,
    "lines.scale_dashes": False,
    "legend.frameon": False,
    "legend.fontsize": TEXT,
    "legend.handlelength": 1.5,
    "legend.handletextpad": 0.5,
    "legend.columnspacing": 1.2,
    "legend.labelspacing": 0.25,
    "legend.borderpad": 0,
    "legend.borderaxespad": 0.4,
}
LONGEST = 30
"""A name in a figure has no more letters."""
FIRST = "\N{ZERO WIDTH SPACE}"
"""Before a name: matplotlib keeps names that begin with an underscore out of legends."""


def dtypes_of(model: nn.Module) -> str:
    """The dtypes of the model's parameters, such as ``bfloat16, float32``; torch's default if there are none."""
    found = {parameter.dtype for parameter in model.parameters()} or {torch.get_default_dtype()}
    return ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in found))


def environment(device: torch.device, dtype: str) -> dict[str, Any]:
    """Machine, versions and threads, by which timings differ; ``dtype`` is the model's, see :func:`dtypes_of`."""
    name = f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}"
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    return {
        "rowprop": rowprop.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": platform.system(),
        "device": device.type,
        "device_name": name,
        "threads": torch.get_num_threads(),
        "dtype": dtype,
    }


def style() -> str:
    """The style sheet."""
    return resources.files("rowprop.app").joinpath("page.css").read_text("utf-8")


def check_extra(purpose: str) -> None:
    """Refuse work whose page could not be drawn at its end.

    Raises:
        MissingExtra: matplotlib or jinja2 is not installed.
    """
    for module, package in (("matplotlib.figure", "matplotlib"), ("jinja2", "jinja2")):
        require(module, package, purpose)


def fill(template: str, purpose: str, **content: Any) -> str:
    """Fill in a page's template, which knows ``style`` and :func:`svg`; text is escaped.

    Raises:
        MissingExtra: jinja2 is not installed.
    """
    jinja2 = require("jinja2", "jinja2", purpose)
    page = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined).from_string(template)
    text: str = page.render(style=style(), svg=svg, **content)
    return text


def table(
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    words: int = 1,
    labels: Sequence[str] | None = None,
    chosen: Sequence[int] = (),
) -> Any:
    """Return a table as markup for a template. Cells are text, unless they are markup already.

    Args:
        columns: Their names.
        rows: A cell for each column.
        words: How many columns hold words, the first one or two; the others hold numbers.
        labels: Names before the cells of the columns of numbers on a phone, which shows no head. Default None: those
            of the columns.
        chosen: Places of the rows that stand out.
    """
    from markupsafe import Markup

    heads = Markup().join(Markup("<th>{}</th>").format(name) for name in columns)
    body = Markup("")
    for place, row in enumerate(rows):
        body += Markup('<tr class="chosen">') if place in chosen else Markup("<tr>")
        for cell in row[:words]:
            body += Markup("<td>{}</td>").format(cell)
        for name, cell in zip(labels or columns[words:], row[words:], strict=True):
            body += Markup('<td data-label="{}">{}</td>').format(name, cell)
        body += Markup("</tr>\n")
    kind = "numbers" if words == 1 else "words"
    whole = Markup('<table class="{}">\n<thead><tr>{}</tr></thead>\n<tbody>\n{}</tbody>\n</table>')
    return whole.format(kind, heads, body)


# --- figures ----------------------------------------------------------------------------------------------------------


@contextmanager
def drawing() -> Generator[None]:
    """Draw with the pages' settings of matplotlib inside the block; outside of it the user's stay.

    As a decorator it holds for one function: ``@drawing()``.
    """
    import matplotlib.style

    with warnings.catch_warnings(), matplotlib.style.context(["default", LOOK]):
        # A browser has letters that the measuring font lacks.
        warnings.filterwarnings("ignore", message="Glyph .* missing from", category=UserWarning)
        yield


def new_figure(x_title: str, y_title: str, *, height: int = HEIGHT) -> tuple[Figure, Axes]:
    """Return an empty figure, ``height`` units high, and its axes, which begin at zero; for use in :func:`drawing`."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH / 72, height / 72), dpi=72, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.set_xlabel(x_title)
    axes.set_ylabel(y_title)
    return figure, axes


def named(text: str) -> str:
    """Return a name as a figure shows it: on one line, a long one without its middle."""
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


@dataclass(frozen=True)
class Plot:
    """A figure of a page.

    Attributes:
        title: Its title; it also keeps apart the figures of a page.
        figure: Matplotlib's own.
        told: The figure in words, for readers who do not see it.
        note: Help for readers, below the title; empty if none is needed.
    """

    title: str
    figure: Figure
    told: str
    note: str = ""


@drawing()
def svg(plot: Plot) -> Any:
    """Return a plot as markup for a template, in the page's ink and letters; the same plot gives the same markup."""
    import matplotlib as mpl
    from markupsafe import Markup

    buffer = io.StringIO()
    with mpl.rc_context({"svg.hashsalt": plot.title}):
        plot.figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    drawn = buffer.getvalue().replace(FIRST, "")
    drawn = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>", "", drawn[drawn.index("<svg") :], flags=re.DOTALL)
    drawn = re.sub(r">\s+<", "><", re.sub(r"<[^>]*>", _tidied, drawn))
    box = re.search(r'viewBox="[^"]*"', drawn)
    assert box is not None
    opening = f'<svg {box[0]} role="img" aria-label="{escape(plot.told)}"><title>{escape(plot.title)}</title>'
    return Markup(opening + drawn[drawn.index(">") + 1 :].strip())


def _tidied(tag: re.Match[str]) -> str:
    """Return a tag of matplotlib's SVG as a page needs it; the letters of a figure stand outside of tags."""
    text = " ".join(tag[0].split())
    text = re.sub(r'(?<=<g) id="[^"]*"', "", text)  # the same ids stand in every figure, and nothing refers to them
    text = re.sub(r' transform="rotate\(-0 [^"]*"', "", text).replace("xlink:href", "href")
    text = re.sub(r"font: ([\d.]+px) [^;\"]*", r"font-size: \1", re.sub(r" font-family: [^;\"]*;", "", text))
    text = re.sub(r"\d+\.\d{3,}", lambda number: f"{float(number[0]):.1f}".removesuffix(".0"), text)
    for colour, name in ((INK, "ink"), (SOFT, "soft"), (RULE, "rule"), (CARD, "card")):
        text = re.sub(rf"(fill|stroke): {colour}", rf"\1: var(--{name})", text)
    return text


@drawing()
def png(plot: Plot) -> bytes:
    """Return a plot as PNG, on white."""
    buffer = io.BytesIO()
    plot.figure.savefig(buffer, format="png", dpi=72 * PICTURE_SCALE, metadata={"Software": None})
    return buffer.getvalue()
