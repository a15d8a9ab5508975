"""Pages, one self-contained HTML file each, with figures drawn into it; those of plan and flops, which compute none."""

from __future__ import annotations

import io
import itertools
import math
import platform
import re
import warnings
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

import rowprop
from rowprop.app.lookup import PAGE, require, require_all
from rowprop.app.terminal import WAY_COLUMNS, say, uncounted_ops, way_row
from rowprop.batch import take
from rowprop.cost.count import StepFlops, count_step
from rowprop.cost.measure import Tick, accelerators
from rowprop.cost.plan import Plan
from rowprop.errors import InvalidInput
from rowprop.files import check_writable, write_whole
from rowprop.scoring import LossesFn
from rowprop.state import devices_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

REPORT = "report.html"
MARKS = 7  # an axis has no more numbers
GREY = "#858b96"
COLOURS = ("#3b82d6", "#c98a1b", "#1fa07a", "#a463c9", "#c86f6f")  # readable on light and dark ground
# Colours of page.mplstyle. A page replaces them by its variables, which follow the reader's light or dark.
INK, SOFT, RULE, CARD = "#1f242d", "#646b78", "#e6e3dc", "#ffffff"
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


def templates(*folders: Path) -> Any:
    """Jinja's environment of the templates in ``folders`` and beside this file.

    A page escapes all text, and knows :func:`svg`.
    """
    jinja2 = require("jinja2", "jinja2", "The page")
    made = jinja2.Environment(
        loader=jinja2.FileSystemLoader([*folders, Path(__file__).parent]),
        autoescape=jinja2.select_autoescape(enabled_extensions=("html.j2",), default_for_string=True),
        undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    made.globals["svg"] = svg
    return made


def render(template: str, *folders: Path, **content: Any) -> str:
    """Fill in a template with data; it lies in one of ``folders``, or beside this file."""
    return templates(*folders).get_template(template).render(**content)


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


def open_folder(out: Path) -> None:
    """Make the folder of a page; refuse one that could not be written to, or with another page by its name."""
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
    where = environment(found[0] if found else torch.device("cpu"), model)
    return where | {"device": ", ".join(map(str, found)) or "cpu", "num_rows": num_rows}


def write_plan(out: Path, model: str, plan: Plan, where: Mapping[str, Any]) -> None:
    """Write a page with the cost of each way at each keep, for the model of this name.

    ``where`` is the :func:`environment_of` the costs, ``out`` a folder after :func:`open_folder`.
    """
    _write(
        out, "plan.html.j2", "step-time", step_time(plan), model=model, plan=plan, where=where, columns=WAY_COLUMNS,
        rows=[way_row(way, plan) for way in plan.ways],
        chosen=[place for place, way in enumerate(plan.ways) if way in plan.choices],
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
    text = render(template, figure=figure, **content)
    for path, written in {out / REPORT: text.encode(), out / f"{picture}.png": png(figure)}.items():
        write_whole(path, written)
        say(f"{path} is written.")


def count_batches(
    model: nn.Module, batch: Any, losses_fn: LossesFn, whole: StepFlops, *, tick: Tick | None = None, **options: Any
) -> dict[int, StepFlops]:
    """Count steps of the batch's first 1, 2, 4, ... rows, less than 2 N together, and return them by number of rows.

    The last is ``whole``, of all N rows. Sizes that the model refuses are left out: BatchNorm wants more than one row,
    a fixed reshape wants all of them. The options are those of :func:`~rowprop.cost.count.count_step`.
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


@drawing()
def step_time(plan: Plan) -> Figure:
    """Draw a step's time at each keep measured, dots joined by lines, a colour for each way."""
    figure, axes = new_figure(f"fraction of {plan.unit}s kept", "step, ms")
    for engine, colour in zip(dict.fromkeys(way.engine for way in plan.ways), itertools.cycle(COLOURS), strict=False):
        ways = sorted((way for way in plan.ways if way.engine == engine), key=lambda way: way.keep)
        xs, ys = [way.kept / plan.num_rows for way in ways], [1000 * way.step_s for way in ways]
        axes.plot(xs, ys, "o-", color=colour, markersize=6.5, label=named(engine))
    plain_ms, name = 1000 * plan.full_s, f"plain step, all {plan.unit}s"
    axes.plot([0, 1], [plain_ms, plain_ms], color=GREY, linestyle=(0, (6, 3)), label=name)
    axes.set_xlim(0, 1.02)
    axes.set_ylim(bottom=0)
    legend(figure)
    return figure


@drawing()
def ratio_against_batch(by_rows: Mapping[int, StepFlops], optimizer: str) -> Figure:
    """Draw FLOPs of the backward over those of the forward against the number of rows, with and without the update."""
    figure, axes = new_figure("rows in the batch", "backward over forward, FLOPs")
    rows, updated = list(by_rows), [of.ratio_with_update for of in by_rows.values()]
    without = [of.ratio for of in by_rows.values()]
    for name, ys, colour in ((f"with the update ({optimizer})", updated, COLOURS[1]), ("without", without, COLOURS[0])):
        axes.plot(rows, ys, "o-", color=colour, markersize=5.5, label=name)
    axes.set_xscale("log", base=2)
    shown = rows[:: -max(1, math.ceil(len(rows) / MARKS))]
    axes.minorticks_off()
    axes.set_xticks(shown, [f"{n:,}" for n in shown])
    axes.set_ylim(0, 1.1 * max(updated, default=1.0))
    legend(figure)
    return figure
