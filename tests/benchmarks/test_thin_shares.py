"""The picture of the thinning page: it shows what was measured, and the costs follow from the shares."""

from __future__ import annotations

import io
import json
import re
from statistics import mean
from typing import Any

import pytest

import thin_shares
from rowprop.app.page import png

RESULT = thin_shares.newest()


@pytest.fixture(scope="module")
def held() -> dict[str, Any]:
    return json.loads(RESULT.read_text())["found"]


@pytest.mark.usefixtures("one_thread")
def test_the_cost_of_a_step_follows_from_the_shares(monkeypatch: pytest.MonkeyPatch):
    # By closed form, in products of a row: each block's backward costs the rows kept at its output. Red where a
    # share is noted of the step before the one whose FLOPs are counted.
    width, patches = 32, 16
    monkeypatch.setattr(thin_shares, "WIDTH", width)
    monkeypatch.setattr(thin_shares, "DEPTH", 2)
    found = thin_shares.train(epochs=5, count_every=10)
    linear = 2 * patches * width * (4 + 8) * width  # queries, keys, values, the way out; a layer of 4 times the width
    scores = 2 * patches * patches * width
    forward, backward = linear + 2 * scores, 2 * linear + 5 * scores
    embed, head = 2 * patches * 4 * width, 2 * width * 10
    full = embed + 2 * forward + head + 2 * head + 2 * backward + embed
    bottom, top = (found["keep"][f"blocks.{block}"] for block in (0, 1))
    for flops, *shares in zip(found["flops"], bottom, top, strict=True):
        saved = (1 - shares[0]) * (backward + embed) + (1 - shares[1]) * backward
        assert flops == pytest.approx(1 - saved / full, rel=1e-9)
    assert min(bottom) < 0.9
    assert found["picked"] == pytest.approx(1 - (backward * 2 + embed + 2 * head) / 2 / full, rel=1e-9)


@pytest.mark.usefixtures("pinned_matplotlib")
def test_the_figure_is_what_was_measured(held: dict[str, Any]):
    # Red when the script draws otherwise and `--again` was not run: with one line moved by .05.
    image, chops = pytest.importorskip("PIL.Image"), pytest.importorskip("PIL.ImageChops")
    kept = image.open(thin_shares.FIGURE).convert("L")
    drawn = image.open(io.BytesIO(png(thin_shares.figure(held)))).convert("L")
    assert kept.size == drawn.size
    apart = chops.difference(kept, drawn).point(lambda value: 255 * (value > 64)).histogram()[255]
    assert apart < 0.005 * kept.width * kept.height


def test_the_page_says_what_was_measured(held: dict[str, Any]):
    # Red with another result than the newest, and with a figure changed on the page.
    page = (thin_shares.FIGURE.parents[1] / "thinning.md").read_text()
    (part,) = re.findall(r"`python benchmarks/thin_shares.py`.*?\n\n", page, re.DOTALL)
    said = [mean(held["flops"]), held["flops"][-1]]
    assert re.findall(r"\d\.\d\d", part) == [f"{number:.2f}" for number in said]
    assert RESULT.with_suffix(".md").name in part
