"""The pages of plan, profile and flops: figures against formulas, the commands' files and JSON, a real browser."""

from __future__ import annotations

import html
import io
import json
import math
import os
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from rowprop import page
from rowprop.cli import app
from rowprop.cost.clock import Timing
from rowprop.cost.closed import closed_form, linear
from rowprop.cost.count import count_step
from rowprop.cost.findings import Finding
from rowprop.cost.plan import Cost, Point, make_plan
from rowprop.cost.profile import Profile, Row
from rowprop.cost.report import (
    count_batches,
    ratio_against_batch,
    roofline,
    step_time,
    write_plan,
    write_profile,
)
from rowprop.model import default_losses

BROWSER = next(filter(None, map(shutil.which, page.BROWSERS)), None)


pytestmark = pytest.mark.usefixtures("one_thread")


# --- step time against keep -------------------------------------------------------------------------------------------

N = 10
COSTS = [Cost("masked", None, 3.0, 0.0), Cost("sliced", None, 1.6, 0.2), Cost("recompute", "full", 1.2, 0.3)]
"""Against a plain step of 3 s: sliced breaks even at K = 7, recompute at K = 6."""


def a_plan(keeps=(0.25, 0.9), costs=COSTS):
    sliced = costs[1]
    measured = {("sliced", None, keep): Point(0, sliced.seconds(math.ceil(keep * N)) + 0.1) for keep in keeps}
    return make_plan(costs, num_rows=N, full_s=3.0, keeps=keeps, update_s=0.5, measured=measured)


def test_the_lines_are_the_costs_and_the_mark_is_where_they_meet_the_plain_step():
    # Red when: x is the keep asked for and not K / N (0.25 of 10 rows are 3), or the update is left out of either.
    figure = step_time(a_plan())
    lines = {trace["name"]: trace for trace in figure["data"] if trace["mode"] == "lines"}
    for cost in COSTS:
        trace = lines[cost.engine]
        assert trace["x"] == [1 / N, 1]
        assert trace["y"] == pytest.approx([1000 * (cost.seconds(k) + 0.5) for k in (1, N)])
    assert lines["plain step, all rows"]["y"] == [3500, 3500]
    (mark,) = figure["layout"]["shapes"]
    assert mark["x0"] == mark["x1"] == pytest.approx(0.7)
    (dots,) = [trace for trace in figure["data"] if trace["mode"] == "markers" and trace["x"]]
    assert (dots["name"], dots["x"], dots["y"]) == ("sliced", [0.3, 0.9], pytest.approx([2800, 4000]))
    assert dots["marker"]["color"] == lines["sliced"]["line"]["color"]
    assert "Selection pays below keep 0.70" in figure["note"]


def test_one_keep_has_dots_and_no_line_and_what_pays_everywhere_has_no_mark():
    figure = step_time(a_plan(keeps=(0.5,), costs=[COSTS[0], Cost("sliced", None, 1.0, 0.1)]))
    assert [trace["name"] for trace in figure["data"] if trace["mode"] == "lines"] == ["plain step, all rows"]
    assert "shapes" not in figure["layout"]
    assert figure["note"] == "Dots are measured. Selection pays at any keep."
    never = step_time(a_plan(costs=[COSTS[0], Cost("sliced", None, 3.5, 0.1)]))
    assert "Selection pays at no keep." in never["note"]


# --- roofline ---------------------------------------------------------------------------------------------------------


def a_profile() -> Profile:
    def row(name: str, seconds: float, share: float, flops: int, size: int) -> Row:
        return Row(name, seconds / 2, seconds / 2, share, 1, 1, flops, 2 * flops, 3 * flops / seconds, size)

    return Profile(
        num_rows=N,
        findings=[],
        ops=[row("mm", 0.01, 0.64, 10**8, 10**6), row("relu", 0.001, 0.06, 0, 10**6)],
        modules=[row("0", 0.01, 0.64, 10**8, 2 * 10**6)],
        outside_share=0.3,
        timing=Timing(({"forward": 0.005, "backward": 0.01},), 10**6),
        forward_flops=10**8,
        backward_flops=2 * 10**8,
        uncounted={},
        flops_per_s=1e11,
        bytes_per_s=1e10,
        device="cpu",
        stacks={},
    )


def test_the_roofline_is_what_was_measured():
    # Red when: FLOPs of one phase are left out of a point, or the slope is not bytes per second.
    figure = roofline(a_profile())
    ceiling, modules, ops = figure["data"]
    low, ridge, high = ceiling["x"]
    assert ridge == 10  # FLOPs per byte at which a copy of 10 GB/s feeds 100 GFLOP/s
    assert ceiling["y"] == pytest.approx([low * 10, 100, 100])
    assert low < 10 < 300 < high
    assert (ops["x"], ops["y"]) == ([300], [pytest.approx(30)])  # 3e8 FLOPs, 1e6 bytes, 10 ms
    assert (modules["x"], modules["y"]) == ([150], [pytest.approx(30)])
    assert ops["marker"]["size"] == [pytest.approx(7 + 33 * 0.8)]
    names = {note["text"]: (note["x"], note["y"]) for note in figure["layout"]["annotations"]}
    assert names["mm"] == pytest.approx((math.log10(300), math.log10(30)))  # axes of logarithms
    assert "relu" not in names
    assert "take 6 % of the step" in figure["note"] and "10 GB/s" in figure["note"]


def test_a_step_without_products_has_its_ceilings():
    profile = a_profile()
    profile.ops[:1], profile.modules[:] = [], []
    figure = roofline(profile)
    assert len(figure["data"]) == 1
    assert all(map(math.isfinite, figure["layout"]["xaxis"]["range"] + figure["layout"]["yaxis"]["range"]))


# --- the ratio against the batch size ---------------------------------------------------------------------------------


def test_the_ratio_at_each_batch_size_is_the_closed_formula():
    # Red when: sizes are taken from one count by scaling, or the optimizer is not passed on.
    model, layers = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)), [linear(4, 8), linear(8, 3)]
    batch = torch.randn(6, 4), torch.randint(3, (6,))
    whole = count_step(model, batch, default_losses, optimizer="adam")
    by_rows = count_batches(model, batch, default_losses, whole, optimizer="adam")
    assert by_rows[6] is whole
    with_update, without = ratio_against_batch(by_rows, "adam")["data"]
    assert with_update["x"] == without["x"] == [1, 2, 4, 6]
    assert without["y"] == pytest.approx([closed_form(layers, n).ratio for n in (1, 2, 4, 6)])
    expected = [closed_form(layers, n, optimizer="adam").ratio_with_update for n in (1, 2, 4, 6)]
    assert with_update["y"] == pytest.approx(expected)
    assert ratio_against_batch({}, "sgd")["data"][0]["x"] == []


def squares(model: nn.Module, batch: tuple) -> torch.Tensor:
    return model(batch[0]).square()


@pytest.mark.parametrize(
    ("model", "sizes"),
    [
        (nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)), [2, 4, 6]),  # ValueError: one row has no variance
        (nn.Sequential(nn.Linear(4, 3), nn.Unflatten(0, (2, -1)), nn.Flatten(0, 1)), [2, 4, 6]),  # RuntimeError
    ],
    ids=["BatchNorm", "reshape"],
)
def test_sizes_that_the_model_refuses_are_left_out(model: nn.Module, sizes: list[int]):
    # Red when: only a ValueError is taken for a refusal.
    batch = (torch.randn(6, 4),)
    assert list(count_batches(model, batch, squares, count_step(model, batch, squares))) == sizes


def test_sizes_are_counted_where_nothing_is_computed():
    # Red when: the rows to take are made on the device of the parameters; texts cannot be taken by them.
    model, batch = nn.Linear(4, 3, device="meta"), (torch.randn(6, 4, device="meta"), list("abcdef"))
    by_rows = count_batches(model, batch, squares, count_step(model, batch, squares))
    assert {n: counted.forward_flops for n, counted in by_rows.items()} == {n: 24 * n for n in (1, 2, 4, 6)}


# --- the commands -----------------------------------------------------------------------------------------------------


def run(*arguments: str | Path):
    return CliRunner().invoke(app, list(map(str, arguments)))


CONTRACT = {
    "flops": {
        "forward_flops", "backward_input_flops", "backward_weight_flops", "update_flops", "uncounted", "modules",
    },
    "profile": {"findings", "ops", "modules"},
    "plan": {"ways", "break_even_keep", "choice", "reason"},
}  # fmt: skip
QUICK = {"flops": [], "profile": ["--rounds", "1"], "plan": ["--rounds", "1", "--keep", "0.5,0.75"]}


@pytest.mark.parametrize("command", CONTRACT)
@pytest.mark.parametrize(
    "model", [["mlp", "--input-shape", "8x4"], ["mlp_with_batch"], ["complete"]], ids=["model", "batch", "losses"]
)
def test_each_command_takes_each_form_of_model_and_prints_one_object(command: str, model: list[str]):
    # Red when: a key of the contract is renamed, or anything else is printed to stdout.
    result = run(command, f"model_cases:{model[0]}", *model[1:], *QUICK[command], "--json")
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)
    assert found.keys() >= CONTRACT[command]
    if command == "flops":
        products = 2 * 8 * (4 * 8 + 8 * 3)
        assert (found["forward_flops"], found["backward_weight_flops"]) == (products, products)
        assert (found["backward_input_flops"], found["update_flops"]) == (2 * 8 * 8 * 3, 2 * (4 * 8 + 8 + 8 * 3 + 3))
        assert (found["uncounted"], [module["module"] for module in found["modules"]]) == ({}, ["0", "2"])
    if command == "profile":
        assert {"addmm", "mm"} <= {op["name"] for op in found["ops"]}
        assert {"0", "2"} <= {module["name"] for module in found["modules"]}
    if command == "plan":
        keys = {"engine", "scorer", "keep", "predicted_s", "speedup", "peak_bytes"}
        assert all(keys <= way.keys() for way in found["ways"])
        assert {(way["engine"], way["keep"]) for way in found["ways"]} == {
            (engine, keep) for engine in ("masked", "sliced", "recompute") for keep in (0.5, 0.75)
        }
        assert found["choice"] in found["ways"] and 0 <= found["break_even_keep"] <= 1 and found["reason"]


FIGURES = {"flops": ["ratio-batch"], "profile": ["roofline"], "plan": ["step-time", "roofline"]}


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for each command, written by it; the plan's with pictures."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    out = tmp_path_factory.mktemp("pages")
    for command, options in QUICK.items():
        arguments = ["model_cases:with_batchnorm", "--input-shape", "16x2x8x8", *options, "--json"]
        with pytest.MonkeyPatch.context() as patch:
            if command != "plan":
                patch.setattr(page, "BROWSERS", ())
            result = run(command, *arguments, "--out", out / command)
        assert result.exit_code == 0, result.stderr
        assert json.loads(result.stdout)["model"] == "model_cases:with_batchnorm"
        assert f"{out / command / 'report.html'} is written." in result.stderr
        assert ("Its figures as PNG are not" in result.stderr) == (command != "plan" or BROWSER is None)
    torch.set_num_threads(threads)
    return out


@pytest.mark.parametrize("command", FIGURES)
def test_a_page_is_one_file_with_its_figures(command: str, pages: Path):
    text = (pages / command / "report.html").read_text()
    assert not re.search('<(script|link|img)[^>]*(src|href)="(?!data:)', text)
    (data,) = re.findall('<script type="application/json" id="figures">(.*?)</script>', text)
    assert sorted(json.loads(data)) == sorted(FIGURES[command])


@pytest.mark.skipif(BROWSER is None, reason="needs chromium")
def test_each_figure_is_a_picture_of_its_own(pages: Path):
    # Red when: pictures are taken before plotly has drawn, or get each other's names.
    image = pytest.importorskip("PIL.Image")
    files = {path.name: path for path in (pages / "plan").iterdir()}
    assert files.keys() == {"report.html", "step-time.png", "roofline.png"}
    # The plan draws recompute in the second colour, the roofline nothing; both have grey and blue lines or points.
    for name, has_second in (("step-time.png", True), ("roofline.png", False)):
        drawn = image.open(io.BytesIO(files[name].read_bytes())).convert("RGB")
        assert drawn.size == (1800, 900) and drawn.getpixel((2, 2)) == (255, 255, 255)
        colours = {colour for _, colour in drawn.getcolors(maxcolors=2**24)}
        grey, second = (tuple(int(c[at : at + 2], 16) for at in (1, 3, 5)) for c in (page.GREY, page.COLOURS[1]))
        assert grey in colours and (second in colours) == has_second


def test_without_a_browser_there_is_the_page_alone(pages: Path):
    assert [path.name for path in (pages / "flops").iterdir()] == ["report.html"]


@pytest.mark.parametrize("command", FIGURES)
def test_a_folder_that_cannot_be_written_is_refused_before_anything_runs(command: str, tmp_path: Path):
    (tmp_path / "file").write_text("")
    result = run(command, "model_cases:fails", "--out", tmp_path / "file" / "out")
    assert (result.exit_code, result.stdout) == (2, "")
    assert f"cannot write to the folder {tmp_path / 'file' / 'out'} (Not a directory)" in result.stderr
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize("command", FIGURES)
def test_a_refusal_leaves_no_page_and_a_folder_in_its_place_is_refused(command: str, tmp_path: Path):
    # Red when: the folder is tried out with report.html itself.
    assert run(command, "model_cases:fails", "--out", tmp_path).exit_code == 2
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "report.html").mkdir()
    result = run(command, "model_cases:complete", "--out", tmp_path)
    assert (result.exit_code, result.stdout) == (2, "")
    assert f"cannot write {tmp_path / 'report.html'}, which is a folder; choose another folder." in result.stderr


@pytest.mark.parametrize("command", FIGURES)
def test_what_was_measured_is_told_even_where_the_page_cannot_be_written(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    # Red when: the page is written first.
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    monkeypatch.setattr(page, "BROWSERS", ())
    result = run(command, "model_cases:complete", *QUICK[command], "--json", "--out", tmp_path)
    assert result.exit_code == 2
    assert json.loads(result.stdout).keys() >= CONTRACT[command]
    assert f"cannot write to {tmp_path / 'report.html'} (No space left on device)" in result.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", ["profile", "plan"])
def test_page_and_json_tell_under_which_conditions(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    # Red when: the dtype is a constant.
    monkeypatch.setattr(page, "BROWSERS", ())
    result = run(command, "model_cases:complete", "--dtype", "float64", *QUICK[command], "--json", "--out", tmp_path)
    told = {"device": "cpu", "torch": torch.__version__, "threads": 1, "dtype": "float64", "num_rows": 8}
    assert told.items() <= json.loads(result.stdout)["environment"].items()
    text = (tmp_path / "report.html").read_text()
    assert "<dd>N = 8 rows</dd>" in text and "<dd>parameters in float64</dd>" in text
    mixed = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, dtype=torch.bfloat16))
    assert (page.dtypes_of(mixed), page.dtypes_of(nn.ReLU())) == ("bfloat16, float32", "float32")


def test_without_plotly_the_page_is_refused_before_anything_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setitem(sys.modules, "plotly", None)
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    result = run("plan", "model_cases:fails", "--out", tmp_path)
    assert result.exit_code == 2
    assert "The page needs plotly, which is not installed" in result.stderr


# --- the browser ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [1200, 375])
@pytest.mark.parametrize("command", FIGURES)
def test_a_page_fits_the_screen_draws_its_plots_and_says_nothing(command: str, width: int, browser, pages: Path):
    browser.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride",
        {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width < 500},
    )
    browser.get((pages / command / "report.html").as_uri())
    for name in FIGURES[command]:
        marks = "return document.querySelectorAll(`#${arguments[0]} .scatterlayer .js-line, #${arguments[0]} .point`)"
        assert len(browser.execute_script(marks, name)) >= 2
    sticking_out = browser.execute_script(
        "return [...document.querySelectorAll('main *')].filter(e => e.getBoundingClientRect().right > innerWidth + 1)"
        ".map(e => e.outerHTML.slice(0, 120))"
    )
    assert sticking_out == []
    smallest = browser.execute_script(
        "return Math.min(...[...document.querySelectorAll('main p, main td, main li, main dd, main svg text')]"
        ".filter(e => e.textContent.trim()).map(e => parseFloat(getComputedStyle(e).fontSize)))"
    )
    assert smallest >= 11
    assert browser.get_log("browser") == []


# --- names that others chose ------------------------------------------------------------------------------------------

HOSTILE = "<img src=x onerror=window.hacked=1></script>{{ 7*7 }}"


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pages of a model, ops, modules and findings whose names are an attack."""
    out, found = tmp_path_factory.mktemp("hostile"), a_profile()
    found.ops[:] = [replace(op, name=HOSTILE) for op in found.ops]
    found.modules[:] = [replace(module, name=HOSTILE) for module in found.modules]
    found.findings.append(Finding(HOSTILE, HOSTILE, HOSTILE, HOSTILE, 0.5))
    where = page.environment(torch.device("cpu"), "float32") | {"num_rows": N}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(page, "BROWSERS", ())
        write_profile(out / "profile", HOSTILE, found, where)
        write_plan(out / "plan", HOSTILE, replace(a_plan(), reason=HOSTILE), found, where)
    return out


@pytest.mark.parametrize(("command", "times"), [("profile", 2 + 3 + 4), ("plan", 2 + 1 + 4)])
def test_names_are_text(command: str, times: int, hostile: Path):
    # Red when: the templates are filled in without escaping, or one of them marks a name as safe.
    text = (hostile / command / "report.html").read_text()
    assert HOSTILE not in text
    assert text.count(html.escape(HOSTILE)) == times  # title and heading; lines of tables, or the reason; findings
    (data,) = re.findall('<script type="application/json" id="figures">(.*?)</script>', text)
    (ops,) = [trace for trace in json.loads(data)["roofline"]["data"] if trace["name"] == "ops"]
    assert ops["customdata"][0][0] == HOSTILE


@pytest.mark.parametrize("command", ["profile", "plan"])
def test_names_do_not_run(command: str, browser, hostile: Path):
    browser.get((hostile / command / "report.html").as_uri())
    assert browser.execute_script("return document.querySelectorAll('.plot .point').length") >= 2
    assert browser.execute_script("return window.hacked") is None
    assert browser.get_log("browser") == []
