"""The pages of plan and flops: figures against formulas, the commands' files and JSON, a real browser."""

from __future__ import annotations

import html
import json
import os
import re
import sys
from dataclasses import replace
from pathlib import Path

import matplotlib
import pytest
import torch
from matplotlib.figure import Figure
from torch import nn

from browser import SMALLEST_IN_FIGURES, SMALLEST_TEXT, STICKING_OUT, shown
from closed_forms import closed_form, linear
from commands import refused, run
from rowprop.app import page
from rowprop.app.model import default_losses
from rowprop.app.page import count_batches, ratio_against_batch, step_time, write_flops, write_plan
from rowprop.cost.count import count_step
from rowprop.cost.measure import Spread
from rowprop.cost.plan import Measurement, PlainStep, make_plan

N = 10
RATIOS = {"sliced": {0.25: 0.8, 0.9: 1.1}, "recompute": {0.25: 0.7, 0.9: 1.2}}
"""Of each way at each keep, of a plain step of 3.5 s."""


def a_plan(ratios=RATIOS):
    spreads = {(way, keep): Spread(r - 0.01, r, r + 0.01) for way, keeps in ratios.items() for keep, r in keeps.items()}
    measured = {key: Measurement(spread) for key, spread in spreads.items()}
    return make_plan(PlainStep(3.5, 2 / 3.5), measured, num_rows=N, keeps=list(ratios["sliced"]), rounds=3)


def lines_of(figure: Figure) -> dict:
    """A figure's lines and dots by name; without a name they are what belongs to the line before them."""
    return {line.get_label().removeprefix(page.FIRST): line for line in figure.axes[0].lines}


def points(line) -> tuple[list[float], list[float]]:
    return list(line.get_xdata()), list(line.get_ydata())


def test_the_dots_are_what_was_measured():
    # Red when: x is the keep asked for and not K / N (0.25 of 10 rows are 3).
    lines = lines_of(step_time(a_plan()))
    for way, ratios in RATIOS.items():
        xs, ys = points(lines[way])
        assert xs == [3 / N, 9 / N] and ys == pytest.approx([3500 * ratio for ratio in ratios.values()])
        assert lines[way].get_marker() == "o"
    assert points(lines["plain step, all rows"])[1] == [3500, 3500]


def test_every_way_has_a_colour_of_its_own():
    # Red when: plain indexing is as grey as the plain step.
    lines = lines_of(step_time(a_plan(RATIOS | {"thinned": {0.25: 0.9}, "newest": {0.25: 0.5}})))
    names = ["masked", "sliced", "recompute", "thinned", "newest", "plain step, all rows"]
    assert len({lines[name].get_color() for name in names}) == len(names)


def page_of(plan, out: Path, model: str = "m") -> str:
    write_plan(out, model, plan, page.environment(torch.device("cpu"), nn.ReLU()) | {"num_rows": N})
    return (out / "report.html").read_text()


def test_the_ratio_at_each_batch_size_is_the_closed_formula():
    # Red when: sizes are taken from one count by scaling, or the optimizer is not passed on.
    model, layers = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)), [linear(4, 8), linear(8, 3)]
    batch = torch.randn(6, 4), torch.randint(3, (6,))
    whole = count_step(model, batch, default_losses, optimizer="adam")
    by_rows = count_batches(model, batch, default_losses, whole, optimizer="adam")
    assert by_rows[6] is whole
    by_rows = dict(sorted(by_rows.items()))
    (rows, with_update), (same_rows, without) = map(points, lines_of(ratio_against_batch(by_rows, "adam")).values())
    assert rows == same_rows == [1, 2, 4, 6]
    assert without == pytest.approx([closed_form(layers, n).ratio for n in (1, 2, 4, 6)])
    expected = [closed_form(layers, n, optimizer="adam").ratio_with_update for n in (1, 2, 4, 6)]
    assert with_update == pytest.approx(expected)
    empty = ratio_against_batch({}, "sgd")
    assert points(lines_of(empty)["without"]) == ([], []) and "<svg" in page.svg(empty, "t", "w")


def squares(model: nn.Module, batch: tuple) -> torch.Tensor:
    return model(batch[0]).square().mean(1)


def test_sizes_that_the_model_refuses_are_left_out_and_nothing_is_computed():
    # Red when: only a ValueError is taken for a refusal; the rows to take are made on the device of the parameters;
    # texts cannot be taken by them.
    batch = torch.randn(6, 4, device="meta"), list("abcdef")
    for layers, sizes in (
        ([], (1, 2, 4, 6)),
        ([nn.BatchNorm1d(3)], (2, 4, 6)),  # ValueError: one row has no variance
        ([nn.Unflatten(0, (2, -1)), nn.Flatten(0, 1)], (2, 4, 6)),  # RuntimeError
    ):
        model = nn.Sequential(nn.Linear(4, 3), *layers).to("meta")
        by_rows = count_batches(model, batch, squares, count_step(model, batch, squares))
        assert {n: counted.forward_flops for n, counted in by_rows.items()} == {n: 24 * n for n in sizes}


CONTRACT = {
    "flops": {*"forward_flops backward_input_flops backward_weight_flops update_flops uncounted modules".split()},
    "profile": {"findings", "ops", "modules"},
    "plan": {"ways", "choices", "choice", "reason"},
}
QUICK = {"flops": [], "profile": ["--rounds", "1"], "plan": ["--rounds", "1", "--keep", "0.5,0.75"]}


FIGURES = {"flops": "ratio-batch", "plan": "step-time"}


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for each command, written by it; the plan's with pictures."""
    out = tmp_path_factory.mktemp("pages")
    for command in FIGURES:
        arguments = ["model_cases:with_batchnorm", "--input-shape", "16x2x8x8", *QUICK[command], "--json"]
        result = run(command, *arguments, "--out", out / command)
        assert result.exit_code == 0, result.stderr
        assert json.loads(result.stdout)["model"] == "model_cases:with_batchnorm"
        assert f"{out / command / 'report.html'} is written." in result.stderr
    return out


@pytest.mark.parametrize(("command", "name"), FIGURES.items())
def test_a_page_is_one_small_file_without_a_script_and_its_figure_a_picture_too(command: str, name: str, pages: Path):
    # Red when: pictures get each other's names, or their ground is see-through.
    files = {path.name: path for path in (pages / command).iterdir()}
    assert files.keys() == {"report.html", f"{name}.png"}
    text = files["report.html"].read_text()
    assert len(text.encode()) < 100_000
    assert "<script" not in text and not re.search('<(link|img|use)[^>]*(src|href)="(?!data:|#)', text)
    assert re.findall('<figure id="([^"]*)"', text) == [name]
    (figure,) = re.findall(r"<figure .*?</figure>", text, flags=re.DOTALL)
    (told, title) = re.findall(r'<svg [^>]*aria-label="([^"]+)"><title>([^<]+)</title>', figure)[0]
    assert f"<h3>{title}</h3>" in figure and re.search(r"[0-9]", told)
    drawn = pytest.importorskip("PIL.Image").open(files[f"{name}.png"]).convert("RGB")
    assert drawn.width == 1200 and drawn.getpixel((2, 2)) == (255, 255, 255)
    colours = {colour for _, colour in drawn.getcolors(maxcolors=2**24)}
    # The plan draws recompute in the second colour, the ratio its update.
    blue, second = (tuple(int(c[at : at + 2], 16) for at in (1, 3, 5)) for c in page.COLOURS[:2])
    assert {blue, second} <= colours


def a_plot(name: str = "sliced") -> Figure:
    with page.drawing():
        figure, axes = page.new_figure("x", "y")
        axes.plot([1, 2, 3.14159265], [1, 4, 9], color=page.INK, label=page.named(name))
        page.legend(figure)
    return figure


def an_svg(name: str = "sliced", title: str = "A title") -> str:
    return str(page.svg(a_plot(name), title, name))


def test_the_same_figure_is_the_same_text_and_two_in_a_page_share_no_name():
    # Red when: matplotlib's own random names or its date are in it, or every figure has a group called figure_1.
    first, again, other = an_svg(), an_svg(), an_svg(title="Another")
    assert first == again
    names = [re.findall(r'\bid="([^"]*)"', text) for text in (first, other)]
    assert names[0] and not {*names[0]} & {*names[1]}
    assert all(f'id="{name}"' in first for name in re.findall(r"#(\w{8,})", first))


def test_a_figure_takes_ink_and_letters_of_its_page():
    # Red when: matplotlib draws letters as paths, or a colour of the light page stays where the page is dark.
    text = an_svg()
    assert re.search(r"<text [^>]*>sliced</text>", text)
    assert "font-family" not in text and "DejaVu" not in text and "<style" not in text
    assert not any(colour in text for colour in (page.INK, page.SOFT, page.RULE, page.CARD))
    variables = {*re.findall(r"var\((--\w+)\)", text)}
    assert {"--ink", "--soft", "--rule"} <= variables
    style = Path(page.__file__).with_name("page.css").read_text()
    for colours in re.findall(r":root \{(.*?)\}", style, flags=re.DOTALL):  # light, dark
        assert variables <= {*re.findall(r"(--\w+):", colours)}
    light = dict(re.findall(r"(--\w+): (#\w+);", style.partition("@media")[0]))
    assert (light["--ink"], light["--soft"]) == (page.INK, page.SOFT)
    assert (light["--rule"], light["--card"]) == (page.RULE, page.CARD)


@pytest.mark.parametrize(
    "name", ["</text></svg><script>window.hacked=1</script>", "$\\alpha$", "_hidden", "漢字", "a\nb\x00c", "x" * 500]
)
def test_a_name_in_a_figure_is_text(name: str):
    # Red when: dollars are mathematics, an underscore drops the name, or a letter without a glyph is a warning.
    text = an_svg(name)
    assert text.count("<svg") == text.count("</svg>") == 1 and "<script" not in text
    shown = [html.unescape(found) for found in re.findall(r"<text [^>]*>([^<]*)</text>", text)]
    expected = " ".join(name.replace("\x00", " ").split())
    (drawn,) = [found for found in shown if found[:5] == expected[:5] and len(found) <= page.LONGEST]
    assert drawn == expected or len(expected) > page.LONGEST
    assert page.png(a_plot(name))[:4] == b"\x89PNG"


def test_the_users_own_settings_of_matplotlib_stay_and_do_not_leak_in():
    # Red when: rcParams are changed globally, or a user's dark style colours the pages.
    with matplotlib.rc_context({"axes.linewidth": 9.5, "text.parse_math": True, "font.size": 40}):
        assert an_svg("$x$") == an_svg("$x$")
        assert "stroke-width: 9.5" not in an_svg() and "40px" not in an_svg()
        assert (matplotlib.rcParams["axes.linewidth"], matplotlib.rcParams["text.parse_math"]) == (9.5, True)
    assert "matplotlib.pyplot" not in sys.modules


def test_a_legend_of_many_names_takes_the_columns_that_fit_and_no_room_from_the_axes():
    def drawn(names: list[str]):
        with page.drawing():
            figure, axes = page.new_figure("x", "y")
            for name in names:
                axes.plot([0, 1], [0, 1], label=page.named(name))
            page.legend(figure)
            figure.draw_without_rendering()
        return figure.legends[0].get_window_extent().width, axes.get_window_extent().height

    for names in (["a", "b"], ["a rather long name"] * 12, ["x" * 30] * 7):
        width, height = drawn(names)
        assert width <= page.WIDTH
        assert height == pytest.approx(drawn(["a"])[1], abs=12)


@pytest.mark.parametrize("command", FIGURES)
def test_a_folder_that_cannot_be_used_is_refused_before_anything_runs(command: str, tmp_path: Path, monkeypatch):
    # Red when: the folder is tried out with report.html itself; open_folder does not look into report.html: exit code
    # 0, and the other page is gone.
    def refuses(out: Path, said: str, model: str = "fails") -> None:
        refused(run(command, f"model_cases:{model}", "--out", out), said)

    (tmp_path / "file").write_text("")
    below, out = tmp_path / "file" / "out", tmp_path / "out"
    refuses(below, f"cannot write to the folder {below} (Not a directory)")
    refuses(out, "no weights here")
    assert list(out.iterdir()) == []
    (out / "report.html").mkdir()
    refuses(out, f"cannot write to {out / 'report.html'} (Is a directory)", "complete")
    (out / "report.html").rmdir()
    (out / "report.html").write_text("<title>Quarterly</title>")
    said = "report.html is no page of rowprop's and would be overwritten; choose another folder."
    refuses(out, said, "complete")
    assert [path.read_text() for path in out.iterdir()] == ["<title>Quarterly</title>"]
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    refuses(out, "The page needs matplotlib, which is not installed")


@pytest.mark.parametrize("command", FIGURES)
def test_what_was_measured_is_told_even_where_the_page_cannot_be_written(command: str, tmp_path: Path, monkeypatch):
    # Red when: the page is written first.
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    result = run(command, "model_cases:complete", *QUICK[command], "--json", "--out", tmp_path)
    assert result.exit_code == 2
    assert json.loads(result.stdout).keys() >= CONTRACT[command]
    assert f"cannot write to {tmp_path / 'report.html'} (No space left on device)" in result.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", ["profile", "plan"])
def test_page_and_json_tell_under_which_conditions(command: str, tmp_path: Path):
    # Red when: the dtype is a constant; a key of the contract is renamed.
    out = ["--out", tmp_path] if command == "plan" else []
    told = {"device": "cpu", "torch": torch.__version__, "threads": 1, "dtype": "float64", "num_rows": 8}
    for _ in range(1 + len(out) // 2):  # a page of its own is written anew
        result = run(command, "model_cases:complete", "--dtype", "float64", *QUICK[command], "--json", *out)
        found = json.loads(result.stdout)
        assert found.keys() >= CONTRACT[command] and found["environment"].items() >= told.items()
    if out:
        text = (tmp_path / "report.html").read_text()
        assert "<dd>N = 8 rows</dd>" in text and "<dd>parameters in float64</dd>" in text
    mixed = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, dtype=torch.bfloat16))
    for model, dtypes in ((mixed, "bfloat16, float32"), (nn.ReLU(), "float32")):
        assert page.environment(torch.device("cpu"), model)["dtype"] == dtypes


@pytest.mark.parametrize("width", [1280, 400, 360])
@pytest.mark.parametrize(("command", "name"), FIGURES.items())
def test_a_page_fits_the_screen_draws_its_plot_and_says_nothing(command: str, name: str, width: int, browser, pages):
    shown(browser, pages / command / "report.html", width)
    marks = f"return document.querySelectorAll('#{name} svg g > path, #{name} svg use')"
    assert len(browser.execute_script(marks)) >= 10
    assert browser.execute_script(STICKING_OUT) == []
    assert browser.execute_script(SMALLEST_TEXT) >= 11
    assert browser.execute_script(SMALLEST_IN_FIGURES) >= 9
    assert browser.get_log("browser") == []


def cells(text: str, title: str) -> list[dict[str, str]]:
    """The rows of the table under a heading, by column; ``chosen`` is the row's class."""
    table = text.partition(f"<h2>{title}</h2>")[2].partition("</table>")[0]
    head = re.findall("<th>([^<]*)</th>", table)
    rows = re.findall("<tr( class=[^>]*)?>(<td.*?)</tr>", table)
    return [
        dict(zip(head, re.findall("<td[^>]*>([^<]*)</td>", row), strict=True)) | {"class": kind} for kind, row in rows
    ]


def test_the_plans_table_marks_what_the_plan_chose(tmp_path: Path):
    # Red when: nothing is marked, or the first keep's choice alone; keep is a bare number on a phone.
    plan = a_plan()
    plan = replace(plan, ways=[replace(plan.ways[0], gradient="another"), *plan.ways[1:]])
    text = page_of(plan, tmp_path)
    rows = cells(text, "The cost of a step")
    assert [(row["keep"], row["way"]) for row in rows] == [(f"keep {way.keep:g}", way.engine) for way in plan.ways]
    marked = [row[""] == "chosen" for row in rows]
    assert marked == [way in plan.choices for way in plan.ways] == ["chosen" in row["class"] for row in rows]
    assert sum(marked) == 2
    assert [row["gradient"] for row in rows] == ["another"] + ["same"] * 5
    assert plan.certainty in text


HOSTILE = "<img src=x onerror=window.hacked=1></script>{{ 7*7 }}"


def test_names_are_text(tmp_path: Path):
    # Red when: the templates are filled in without escaping, or one of them marks a name as safe.
    plan = page_of(
        a_plan({HOSTILE: {0.25: 0.8, 0.9: 1.1}, "sliced": {0.25: 0.9, 0.9: 1.1}}), tmp_path / "plan", HOSTILE
    )
    counted = replace(count_step(nn.Linear(4, 3), (torch.randn(6, 4),), squares), optimizer=HOSTILE)
    write_flops(tmp_path / "flops", HOSTILE, counted, {6: counted})
    flops = (tmp_path / "flops" / "report.html").read_text()
    # Title and heading; the plan's reason, its way in the table and in words; the update in the table and the figure.
    for text, times in ((plan, 2 + 1 + 2 + 2), (flops, 2 + 2)):
        assert HOSTILE not in text
        assert text.count(html.escape(HOSTILE)) == times
        # In the drawing itself it is shortened.
        assert any(html.escape(HOSTILE[:10]) in found for found in re.findall(r"<text [^>]*>([^<]*)</text>", text))
