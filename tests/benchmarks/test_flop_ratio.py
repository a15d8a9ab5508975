"""The study of the backward-forward ratio: its page says what is counted, its networks are what they claim."""

from __future__ import annotations

import io
import re

import pytest
import torch

import flop_ratio
from closed_forms import closed_form, linear
from flop_networks import RESNETS
from rowprop.app.page import png


@pytest.fixture(scope="module")
def found() -> dict:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield flop_ratio.study()
    torch.set_num_threads(threads)


def test_the_page_is_what_is_counted(found: dict):
    # Red when: a formula, a network or the page's text changes and nox -s flop-ratio was not run.
    assert flop_ratio.PAGE.read_text() == flop_ratio.page(found)


def test_the_claims(found: dict):
    counts = found["counts"]
    for by_rows in counts.values():
        first, *later = by_rows[8].modules
        assert (first.backward_input_flops, first.backward_weight_flops) == (0, first.forward_flops)
        assert all(m.backward_input_flops == m.backward_weight_flops == m.forward_flops for m in later)
    for depth, counted in found["depth"][False].items():
        first = counted.modules[0].forward_flops
        assert counted.ratio == pytest.approx(2 - first / counted.forward_flops, rel=1e-15)
        assert counted.ratio == found["depth"][True][depth].ratio
    for by_rows in found["resnets"].values():
        assert len({counted.ratio for counted in by_rows.values()}) == 1
    one_expert = closed_form([linear(64, 64), linear(64, 8), linear(64, 64), linear(64, 10)], 128)
    assert found["experts"].ratio == one_expert.ratio
    kept = found["kept"]
    assert (kept[0.5].ratio, kept[0.25].ratio) == (kept[1.0].ratio / 2, kept[1.0].ratio / 4)


@pytest.mark.parametrize("depth", RESNETS)
def test_the_resnets_are_torchvisions(found: dict, depth: int):
    # Published with torchvision's weights: multiply-adds in units of 1e9, and parameters.
    published = {
        18: (1.814, 11689512), 34: (3.664, 21797672), 50: (4.089, 25557032), 101: (7.801, 44549160),
        152: (11.514, 60192808),
    }  # fmt: skip
    counted = found["resnets"][depth][1]
    assert (round(counted.forward_flops / 2e9, 3), counted.num_parameters) == published[depth]


def test_one_page_needs_nothing_else(found: dict):
    page = flop_ratio.html(found)
    assert not re.search(r"<script|<(link|img)[^>]+(src|href)=(?!.data:)", page)
    assert page.count('<figure id="ratio-') == page.count("<svg") == len(flop_ratio.figures(found)) == 2
    lines = flop_ratio.figures(found)["ratio-batch"].figure.axes[0].lines
    drawn = {line.get_label(): line.get_ydata() for line in lines}
    assert drawn["OneNet, with update"][0] > 3 > drawn["OneNet, without"][0]


@pytest.mark.usefixtures("pinned_matplotlib")
@pytest.mark.parametrize("name", ["ratio-batch", "ratio-depth"])
def test_the_pages_figures_are_what_is_counted(found: dict, name: str):
    # Red when: a count changes and nox -s flop-ratio was not run. Another matplotlib may set letters a little apart.
    image, chops = pytest.importorskip("PIL.Image"), pytest.importorskip("PIL.ImageChops")
    kept = image.open(flop_ratio.FIGURES / f"{name}.png").convert("L")
    drawn = image.open(io.BytesIO(png(flop_ratio.figures(found)[name].figure))).convert("L")
    assert kept.size == drawn.size
    apart = chops.difference(kept, drawn).point(lambda value: 255 * (value > 64)).histogram()[255]
    assert apart < 0.02 * kept.width * kept.height
