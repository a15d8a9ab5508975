"""The notebook runs, and it shows what it holds: the same words and numbers but for the clock's, and plots with ink."""

from __future__ import annotations

import base64
import io
import re
from importlib.util import find_spec
from typing import Any

import pytest

from notebook import NOTEBOOK, executed

pytestmark = [
    pytest.mark.skipif(find_spec("nbclient") is None, reason="needs nbclient: scripts/docs"),
    pytest.mark.filterwarnings("ignore"),  # those of Jupyter are its own
]
NUMBER, ENGINE = r"\d+(?:\.\d+)?(?:e-\d+)?", r"\b(?:sliced|recompute|masked)\b"


@pytest.fixture(scope="module")
def held_and_ran() -> tuple[Any, Any]:
    nbformat = pytest.importorskip("nbformat")
    return nbformat.read(NOTEBOOK, as_version=4), executed()


def lines(notebook: Any) -> list[str]:
    """What the cells printed but times; which engine is the quickest is up to the clock."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    printed = "".join(output.get("text", "") for output in outputs).splitlines()
    return [re.sub(ENGINE, "engine", line) for line in printed if " of the plain step at keep" not in line]


def test_the_notebook_prints_what_it_holds(held_and_ran: tuple[Any, Any]):
    # Red when: `pick` multiplies its gradient by 1.001; a cell is changed and not run again.
    for held, ran in zip(*map(lines, held_and_ran), strict=True):
        assert re.sub(NUMBER, "#", ran) == re.sub(NUMBER, "#", held)
        figures = [[float(figure) for figure in re.findall(NUMBER, line)] for line in (ran, held)]
        assert figures[0] == pytest.approx(figures[1], rel=0.05, abs=0.02), (ran, held)
        if "relative difference" in ran:
            assert figures[0][0] < 1e-5
    assert "relative difference" in "".join(lines(held_and_ran[1]))


def test_the_plots_of_the_notebook_show(held_and_ran: tuple[Any, Any]):
    # Red when: a line is drawn from an empty list; outputs are stripped.
    image = pytest.importorskip("PIL.Image")
    for notebook in held_and_ran:
        outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
        drawn = [output.data["image/png"] for output in outputs if "image/png" in output.get("data", {})]
        pictures = [image.open(io.BytesIO(base64.b64decode(png))).convert("RGB") for png in drawn]
        assert len(pictures) == 3
        for picture in pictures:
            inked = sum(count for count, (r, g, b) in picture.getcolors(1 << 24) if max(r, g, b) - min(r, g, b) > 60)
            assert inked > 500  # pixels in colour: points, lines
