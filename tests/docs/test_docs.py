"""README and docs are true: their code runs, their commands exist, their links, names and figures are found; and CI
runs the same commands everywhere."""

from __future__ import annotations

import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from commands import run
from rowprop.app.cli import app
from rowprop.app.page import templates
from rowprop.errors import LAB

ROOT = Path(__file__).parents[2]
AT_THE_TOP = [ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "ARCHITECTURE", "SECURITY")]
PAGES = {page.stem: page for page in [*AT_THE_TOP, *sorted((ROOT / "docs").glob("*.md"))]}
TEXTS = {name: path.read_text() for name, path in PAGES.items()}
FENCED = re.compile(r"^```(\w*)\n(.*?)^```\n", re.MULTILINE | re.DOTALL)
RESULTS = {path.name: path.read_text() for path in (ROOT / "benchmarks" / "results").glob("*.md")}


def blocks(text, *languages):
    return [body for language, body in FENCED.findall(text) if language in languages]


WITH_CODE = sorted(name for name, text in TEXTS.items() if blocks(text, "python") and name != "ARCHITECTURE")
ALONE = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}  # torchrun's, to one process


@pytest.mark.parametrize("name", WITH_CODE)
@pytest.mark.usefixtures("one_thread")
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")  # Inductor's own
def test_the_code_of_a_page_runs_and_prints_what_it_says(name, capsys, monkeypatch):
    # One block after another, in one namespace. Red with any name misspelt in a block, or 5 for 4 in compare.md.
    namespace = {"__name__": name}
    for variable, value in ALONE.items():
        monkeypatch.setenv(variable, value)
    for language, body in FENCED.findall(TEXTS[name]):
        if language == "python":
            exec(compile(body, f"{name}.md", "exec"), namespace)
            printed = capsys.readouterr().out.splitlines()
            said = re.findall(r"^print\(.*\)  # (.*)$", body, re.MULTILINE)
            assert said == [line for line in printed if line in said]
        elif language == "text":  # the last lines that the block before it printed
            quoted = body.splitlines()
            for wanted, found in zip(quoted, printed[-len(quoted) :], strict=True):
                assert " ms" in wanted or same_but_for_rounding(found, wanted), (found, wanted)


def same_but_for_rounding(found, wanted):
    """Whether two lines agree in words and numbers; the engine is up to the clock."""
    number, engine = r"\d+(?:\.\d+)?", r"\b(?:sliced|recompute|masked)\b"
    words = [re.sub(engine, "engine", re.sub(number, "#", line)) for line in (found, wanted)]
    figures = [[float(figure) for figure in re.findall(number, line)] for line in (found, wanted)]
    return words[0] == words[1] and figures[0] == pytest.approx(figures[1], abs=0.01)


PROOFS = {  # the file of tests that a block of ARCHITECTURE.md enters something in -> its tests of that entry
    "tools/zoo.py": ("tests/backprop/test_zoo.py", "mlp_with_turns"),
    "tests/cost/test_flops.py": ("tests/cost/test_flops.py", "test_cross_products"),
    "tools/laws.py": ("tests/test_laws.py", "Middle or half_of_the_loss or has_an_entry"),
}


def proven(folder, added):
    """The output of pytest in a copy of the repository, each block at the place that its first line names."""
    for part in ("src", "lab", "tests", "tools", "benchmarks"):
        shutil.copytree(ROOT / part, folder / part, ignore=shutil.ignore_patterns("results", "__pycache__"))
    for file in ("pyproject.toml", "conftest.py"):
        shutil.copy(ROOT / file, folder / file)
    for body in added:
        head, _, rest = body.partition("\n")
        file, _, table = head.removeprefix("# ").partition(", in ")
        text = (folder / file).read_text()
        begin = re.search(rf"^{table}\b.* = [\[{{(].*\n", text, re.MULTILINE) if table else None
        assert bool(begin) == bool(table), head
        place = begin.end() if begin else len(text)
        (folder / file).write_text(text[:place] + rest + text[place:])
    files, names = zip(*PROOFS.values(), strict=True)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--continue-on-collection-errors"]
    command += [*sorted(set(files)), "-k", " or ".join(names)]
    environment = os.environ | {"PYTHONPATH": str(folder / "src")}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False).stdout


def test_the_additions_that_the_page_shows_work(tmp_path):
    # Without the blocks of src/ each proof must fail, or it proves nothing. Red when: `local` is renamed, the formula
    # counts 4 FLOPs, or a table of the page has another name.
    added = blocks(TEXTS["ARCHITECTURE"], "python")
    files = [body.split()[1].rstrip(",") for body in added]
    assert {file for file in files if not file.startswith("src/")} == set(PROOFS)
    said = proven(tmp_path / "with", added)
    assert "passed" in said, said
    assert not re.search("failed|error", said), said
    said = proven(tmp_path / "without", [body for body in added if not body.startswith("# src/")])
    assert all(re.search(rf"^(?:FAILED|ERROR) {file}", said, re.MULTILINE) for file, _ in PROOFS.values()), said


def command_lines(text):
    """Lines of shell blocks, fenced or indented."""
    shell = "".join(blocks(text, "", "sh", "bash", "console"))
    indented = re.findall(r"^    (\S.*)$", FENCED.sub("", text), re.MULTILINE)
    return [line.strip() for line in [*shell.splitlines(), *indented]]


ROWPROP = [(name, line) for name, text in TEXTS.items() for line in command_lines(text) if line.startswith("rowprop ")]
INLINE = [(name, code) for name, text in TEXTS.items() for code in re.findall(r"`(rowprop\s[^`]+)`", text)]
COMMANDS = typer.main.get_command(app).commands


@pytest.mark.parametrize(("name", "line"), ROWPROP)
def test_the_command_line_takes_the_commands_of_the_pages(name, line):
    # Red with an option misspelt on a page.
    _, called, *arguments = shlex.split(line, comments=True)
    COMMANDS[called].make_context(called, arguments, resilient_parsing=False)


def test_options_named_in_sentences_exist():
    # Also those that a comment behind a command names.
    for name, code in [*INLINE, *ROWPROP]:
        known = {option for parameter in COMMANDS[code.split()[1]].params for option in parameter.opts}
        assert set(re.findall(r"--[a-z-]+", code)) <= known, (name, code)


def test_the_commands_of_the_first_page_run_on_its_module(tmp_path, monkeypatch):
    # Red when `make` returns what no command takes.
    monkeypatch.chdir(tmp_path)
    (module,) = [body for body in blocks(TEXTS["start"], "python") if body.startswith("# your_module.py")]
    Path("your_module.py").write_text(module)
    ran = []
    for line in blocks(TEXTS["start"], "")[-1].splitlines():
        if "your_module:make" in line:
            _, name, *arguments = shlex.split(line, comments=True)
            answer = run(name, *arguments)
            assert answer.exit_code == 0, answer.output
            ran.append(name)
    assert ran == ["verify", "plan"]


def anchors(path):
    headings = re.findall(r"^#+ (.*)$", FENCED.sub("", path.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("name", sorted(TEXTS))
def test_links_lead_to_files_and_headings(name):
    for link in re.findall(r"\]\(([^)\s]+)\)", TEXTS[name].replace("\n", " ")):
        if link.startswith("http"):
            continue
        file, _, anchor = link.partition("#")
        target = (PAGES[name].parent / file).resolve() if file else PAGES[name]
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_every_page_is_found_from_the_home_page():
    # Red with the link to tokens.md taken out of docs/index.md.
    listed = set(re.findall(r"\]\(([\w./-]+)(?:#[\w-]+)?\)", TEXTS["index"].replace("\n", " ")))
    found = [*ROOT.glob("*.md"), *ROOT.glob("notebooks/*.ipynb"), *(ROOT / "docs").rglob("*.md")]
    pages = {os.path.relpath(page, ROOT / "docs") for page in found}
    assert listed == pages - {"index.md"} | {"figures/sliced-gradient.svg"}


def test_the_note_on_security_is_true_of_the_source():
    # Red with `import pickle` in a module, a torch.load without weights_only=True, a second download, or a page that
    # jinja fills in without escaping.
    package = ROOT / "src" / "rowprop"
    said = {path.relative_to(package).as_posix(): path.read_text() for path in package.rglob("*.py")}
    said |= {path.relative_to(LAB.parent).as_posix(): path.read_text() for path in LAB.rglob("*.py")}
    calls = r"\b(?:pickle|marshal|shelve|dill)\b|torch\.load\((?!.*weights_only=True)|np\.load\(|\beval\(\w|\bexec\("
    assert [(name, found) for name, text in said.items() for found in re.findall(calls, text)] == []
    for what, where in (
        (r"urlopen|urlretrieve|\brequests\b", "rowprop_lab/data.py"),
        ("gather_object", "history/losses.py integrations/shared.py"),
        (r"jinja2\.Environment\(", "app/page.py"),
    ):
        assert {name for name, text in said.items() if re.search(what, text)} == {*where.split()}
    pages = [name for name in templates(LAB).list_templates() if ".html" in name]
    assert {"report.html.j2", "plan.html.j2"} <= {*pages}
    assert all(templates(LAB).autoescape(name) for name in (None, *pages))


def test_files_named_on_the_pages_exist():
    named = r"\b((?:jax/)?(?:scripts|benchmarks|examples|tests|src|docs)/[\w./-]*\w)"
    files = [(name, file) for name, text in TEXTS.items() for file in re.findall(named, text)]
    assert [each for each in files if not (ROOT / each[1]).exists()] == []


RESOLVE = """
import functools, sys
import rowprop
for name in sys.argv[1:]:
    try:
        functools.reduce(getattr, name.split(".")[1:], rowprop)
    except AttributeError as error:
        print(name, error)
"""


def test_names_on_the_pages_are_there_after_import_rowprop():
    # In a process of its own: here other tests have imported modules. Red with rowprop.oracle.verify.Comparison on a
    # page.
    named = {found for text in TEXTS.values() for found in re.findall(r"\browprop(?:\.[A-Za-z_]\w*)+", text)}
    named = {name for name in named if not name.startswith("rowprop.integrations")}  # these are imported by name
    named -= {"rowprop.egg"}
    answer = subprocess.run([sys.executable, "-c", RESOLVE, *sorted(named)], capture_output=True, text=True, check=True)
    assert answer.stdout == ""


def test_the_drawn_figures_are_what_was_measured():
    # Red with a figure of the result changed, or a line of draw.py, without `python docs/figures/draw.py`.
    drawn = runpy.run_path(str(ROOT / "docs" / "figures" / "draw.py"))["pictures"]()
    assert len(drawn) == 2
    for name, picture in drawn.items():
        assert (ROOT / "docs" / "figures" / name).read_text() == picture, name


def steps_measured(result):
    """(model, engine) -> ratio and limit at each keep, as the pages print them."""
    found = {}
    parts = re.split(r"^## (\w+): (N = \d+).*$", RESULTS[result], flags=re.MULTILINE)
    for model, size, rows in zip(parts[1::3], parts[2::3], parts[3::3], strict=True):
        for line in re.findall(r"^\| \d.*$", rows, re.MULTILINE):
            _, _, _, engine, ratio, limit, *_ = (cell.strip() for cell in line.split("|"))
            ratio, limit = f"{float(ratio.split()[0]):.2f}", f"{float(limit):.2f}"
            said = f"{ratio} ({limit})" if engine == "sliced" else ratio
            found.setdefault((f"{model}, {size}".lower(), engine), []).append(said)
    return found


@pytest.mark.parametrize(
    ("name", "result"),
    [("benchmarks", "2026-11-21-cpu-1-threads.md"), ("compile", "2026-11-21-cpu-1-threads-compiled.md")],
)
def test_tables_of_steps_are_what_was_measured(name, result):
    measured, model, seen = steps_measured(result), "", 0
    for line in re.findall(r"^\|.*`(?:sliced|recompute)` \| \d.*$", TEXTS[name], re.MULTILINE):
        _, label, engine, *cells, _ = (cell.strip() for cell in line.split("|"))
        model = label.lower() or model
        assert cells == measured[model, engine.strip("`")], line
        seen += 1
    assert seen == sum(engine != "masked" for _, engine in measured)


def test_the_steps_of_the_readme_are_those_of_the_page_of_benchmarks():
    # Red with a figure of the README changed alone.
    measured = steps_measured("2026-11-21-cpu-1-threads.md")
    shown = re.findall(r"^\| (\w+, N = \d+|\w+)(?:, ([^|]*))? \| (0\.\d\d.*) \|$", TEXTS["README"], re.MULTILINE)
    assert len(shown) == 5
    for model, how, cells in shown:
        engine = "recompute" if how == "`recompute`" else "sliced"
        (found,) = [row for (name, run), row in measured.items() if name.startswith(model.lower()) and run == engine]
        assert cells.split(" | ") == found, model


def test_the_figures_of_the_gpu_are_what_was_measured():
    # Red with a figure changed on a page, or rounded from one that is rounded.
    rows = re.findall(r"^\| [^|]*compiled[^|]*\| (\d.*) \|$", TEXTS["README"], re.MULTILINE)
    rows += re.findall(r"^\| [^|]*\| (?:compiled |graphs |)\| (\d.*\)) \|$", TEXTS["benchmarks"], re.MULTILINE)
    assert len(rows) == 5 + 9
    assert [row for row in rows if f"| {row} |" not in RESULTS["2026-11-27-gpu-h200.md"]] == []


def test_the_table_of_methods_is_what_was_measured():
    # Red with a figure changed on the page. It leaves out the seconds, and the rows seen.
    (text,) = (text for name, text in RESULTS.items() if "-recipes-" in name)
    row = r"^\| [a-z+-]+[a-z0-9+-]* \| \d+\.\d+ ± .* % \|$"
    measured = [line.split(" | ") for line in re.findall(row, text, re.MULTILINE)]
    printed = [line.split(" | ") for line in re.findall(row, TEXTS["benchmarks"], re.MULTILINE)]
    assert printed == [[*cells[:4], cells[5], cells[7]] for cells in measured]


@pytest.mark.parametrize(
    ("page", "row", "count", "results"),
    [
        ("batchnorm", r"(?:all|top-k|random) ", 7, "-batchnorm.md"),
        ("batchnorm", r"[12]d ", 9, "-batchnorm-border.md"),
        ("grpo", r"\d+% ", 5, "-grpo-update-"),
        ("supervised-fine-tuning", r"\d+ % ", 22, "-sft-"),
        ("benchmarks", r"`\w+` \| 1\d\d \| 2\.", 7, "-thin-tokens-train-"),
    ],
)
def test_rows_of_tables_are_those_that_were_measured(page, row, count, results):
    # Red with a figure changed on the page, or the results measured again without --page.
    shown = re.findall(rf"^\| {row}.*$", TEXTS[page], re.MULTILINE)
    assert len(shown) == len({*shown}) == count
    measured = [line for file, text in RESULTS.items() if results in file for line in text.splitlines()]
    assert [row for row in shown if not any(line.startswith(row[:-1]) for line in measured)] == []  # first columns


TRACKED = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False).stdout.split()


def sessions():
    """The names of noxfile.py's sessions, versions of torch apart."""
    made = re.findall(r"^@nox\.session(.*?)^def (\w+)", (ROOT / "noxfile.py").read_text(), re.MULTILINE | re.DOTALL)
    return {named[1] if (named := re.search(r'name="([\w-]+)"', head)) else name for head, name in made}


def test_the_workflow_runs_what_the_script_runs():
    # Red with a command in one of the two alone.
    script = (ROOT / ".ci/run").read_text().partition("export CI=true\n")[2]
    commands = [line.partition(" && rm ")[0] for line in re.findall(r"^(?:scripts|nox) ?.*$", script, re.MULTILINE)]
    workflow = (ROOT / ".github/workflows/ci.yml").read_text()
    assert sorted(re.findall(r"^          - (.*)$", workflow, re.MULTILINE)) == sorted(commands)


def test_pages_and_tests_name_commands_that_are_there():
    # Red when a session of noxfile.py or a file of scripts/ gets another name.
    known = sessions()
    for name in TRACKED:
        if name.endswith((".md", ".py", ".yml")) and not name.startswith(("CHANGELOG", "benchmarks/results")):
            text = (ROOT / name).read_text()
            assert set(re.findall(r"nox -s '?([a-z][\w-]*)", text)) <= known, name
            scripts = re.findall(r"(?<![\w/.])scripts/([a-z][\w-]*)(?![\w.])", text)
            assert all((ROOT / "scripts" / script).exists() for script in scripts), name
