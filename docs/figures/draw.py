"""Draws the two pictures of the pages: `python docs/figures/draw.py`. A test holds the files to what it draws."""

import json
from collections.abc import Iterator
from pathlib import Path
from statistics import median

FIGURES = Path(__file__).parent
RESULT = FIGURES.parent.parent / "benchmarks" / "results" / "2026-11-21-cpu-1-threads.json"

# The pictures bring their own ground: they are read on a page of either colour, whatever the reader's system prefers.
STYLE = """<style>
  svg { --ground: #faf9f6; --ink: #1f242d; --soft: #5d6470; --line: #b9b4a9; --kept: #2466b8; --zero: #e4e1d9; --other: #b3541e }
  @media (prefers-color-scheme: dark) {
    svg { --ground: #1c1f24; --ink: #e9e7e2; --soft: #a4aab4; --line: #5a606a; --kept: #74aef2; --zero: #33373e; --other: #e8955c }
  }
  .ground { fill: var(--ground) } text { font: 15px system-ui, sans-serif; fill: var(--ink) } .soft { fill: var(--soft) }
  .code { font: 600 15px ui-monospace, monospace } .kept { fill: var(--kept) } .zero { fill: var(--zero) }
  .other { fill: var(--other) } .claimed { fill: none; stroke: var(--line); stroke-dasharray: 3 3 }
  .line { fill: none; stroke: var(--line) } .arrow { fill: none; stroke: var(--soft); stroke-width: 1.5 }
  .by-kept { fill: none; stroke: var(--kept); stroke-width: 2 } .by-other { fill: none; stroke: var(--other); stroke-width: 2 }
  .limit { fill: none; stroke: var(--soft); stroke-width: 1.5; stroke-dasharray: 5 4 } .middle { text-anchor: middle } .end { text-anchor: end }
</style>"""  # noqa: E501


def picture(width: int, height: int, title: str, parts: Iterator[str]) -> str:
    """An SVG of ``width`` x ``height`` pixels; the title is what a screen reader says."""
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" aria-label="{title}">'
    ground = f'<rect class="ground" width="{width}" height="{height}" rx="10"/>'
    return "\n".join([head, f"<title>{title}</title>", STYLE, ground, *parts, "</svg>\n"])


def text(x: float, y: float, said: str, style: str = "") -> str:
    """A line of text."""
    return f'<text x="{x:g}" y="{y:g}" class="{style}">{said}</text>'


def arrow(x: float, y: float, length: float) -> str:
    """An arrow to the right."""
    end = x + length
    return f'<path class="arrow" d="M{x:g} {y:g}H{end:g}m-6 -5l6 5l-6 5"/>'


# --- the gradient -----------------------------------------------------------------------------------------------------

ROWS, KEPT, HIGH, GAP = 8, (1, 4, 6), 13, 3
GRIDS = ((24, 22, "of the losses"), (152, 96, "of the last layer"), (354, 96, "of the first layer"))  # x, width, name


def gradient(x: float, y: float, width: float, sliced: bool) -> Iterator[str]:
    """One gradient: the kept rows in colour; the others as zeros, or, if sliced, as room that is claimed only."""
    for row in range(ROWS):
        style = "kept" if row in KEPT else "claimed" if sliced else "zero"
        top = y + row * (HIGH + GAP)
        yield f'<rect x="{x:g}" y="{top:g}" width="{width:g}" height="{HIGH}" rx="2" class="{style}"/>'


def way(y: float, code: str, sliced: bool) -> Iterator[str]:
    """The gradients of one way, from the losses to the first layer."""
    yield text(24, y, code, "code")
    top, middle = y + 16, y + 16 + ROWS * (HIGH + GAP) / 2
    for (x, width, name), after in zip(GRIDS, [*GRIDS[1:], None], strict=True):
        yield from gradient(x, top, width, sliced)
        yield text(x, top + ROWS * (HIGH + GAP) + 16, name, "soft")
        if after:
            begin = x + width + 8
            length = after[0] - 8 - begin
            yield arrow(begin, middle, length)
            worked = len(KEPT) if sliced else ROWS
            yield text(begin + length / 2, middle - 10, f"{worked} rows", "middle")
    yield arrow(458, middle, 28)
    yield text(494, middle - 4, ".grad:")
    yield text(494, middle + 16, "plain,")
    yield text(494, middle + 36, "the same")


def sliced_gradient() -> Iterator[str]:
    """Both ways, one below the other, and what the colours mean."""
    yield from way(32, "losses[rows].mean().backward()", sliced=False)
    yield from way(230, "rowprop.pick(losses, rows).mean().backward()", sliced=True)
    marks = (
        (24, "kept", "gradient of a kept row"),
        (228, "zero", "zeros, computed"),
        (394, "claimed", "claimed, not held"),
    )
    for x, style, said in marks:
        yield f'<rect x="{x}" y="418" width="18" height="{HIGH}" rx="2" class="{style}"/>'
        yield text(x + 25, 430, said)


# --- times ------------------------------------------------------------------------------------------------------------

LEFT, RIGHT, TOP, BOTTOM, HIGHEST = 56, 540, 70, 340, 1.4


def across(keep: float) -> float:
    """Where a keep is."""
    return LEFT + (RIGHT - LEFT) * keep


def down(ratio: float) -> float:
    """Where a step's time is, over that of the plain step."""
    return BOTTOM - (BOTTOM - TOP) * ratio / HIGHEST


def step_times() -> Iterator[str]:
    """A dot for each model, engine and keep, and a line through the medians over the models."""
    workloads = json.loads(RESULT.read_text())["workloads"]
    variants = [variant for workload in workloads for variant in workload["variants"]]
    yield text(20, 30, "Time of a step over the plain step, by the share of rows kept")
    for ratio in (0, 0.25, 0.5, 0.75, 1.0, 1.25):
        yield f'<path class="line" d="M{LEFT} {down(ratio):.1f}H{RIGHT}"/>'
        yield text(LEFT - 8, down(ratio) + 5, f"{ratio:g}", "soft end")
    for keep in (0, 0.25, 0.5, 0.75, 1):
        yield text(across(keep), BOTTOM + 22, f"{keep:g}", "soft middle")
    yield text(across(0.5), BOTTOM + 44, "keep", "soft middle")
    keeps = sorted({variant["keep"] for variant in variants})
    for engine, style in (("recompute", "other"), ("sliced", "kept")):
        line = []
        for keep in keeps:
            found = [v["ratio"]["median"] for v in variants if v["engine"] == engine and v["keep"] == keep]
            line.append(f"{across(keep):.1f} {down(median(found)):.1f}")
            yield from (f'<circle cx="{across(keep):.1f}" cy="{down(r):.1f}" r="4" class="{style}"/>' for r in found)
        yield f'<path class="by-{style}" d="M{"L".join(line)}"/>'
    limits = [median(v["limit"] for v in variants if v["keep"] == keep) for keep in keeps]
    points = "L".join(f"{across(keep):.1f} {down(limit):.1f}" for keep, limit in zip(keeps, limits, strict=True))
    yield f'<path class="limit" d="M{points}"/>'
    for x, style, said in (
        (24, "by-kept", "sliced"),
        (124, "by-other", "recompute"),
        (258, "limit", "limit of sliced: F + kB"),
    ):
        yield f'<path class="{style}" d="M{x} 52h24"/>'
        yield text(x + 31, 57, said)


def pictures() -> dict[str, str]:
    """Each file's name and text."""
    both = (
        "Above, plain indexing carries zeros for the rows that were not kept through every layer. Below, pick carries "
    )
    both += "the kept rows alone. The gradients of the weights are the same."
    told = "Step time against keep: the sliced engine lies on its limit, recompute above it from a keep of 0.25 on."
    return {
        "sliced-gradient.svg": picture(580, 450, both, sliced_gradient()),
        "step-time.svg": picture(580, 400, told, step_times()),
    }


if __name__ == "__main__":
    for name, drawn in pictures().items():
        (FIGURES / name).write_text(drawn)
