"""The hostile trial of the command line: bad values for every option, bad models, bad folders.

Each case runs in a sandbox of its own, a folder with other people's files in it. Afterwards all of these have to be
there unchanged, and what is new has to lie where the case says that output goes.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import typing
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hypothesis import strategies as st
from torch import nn

from hostile_cases import BATCH, CALLS, fits, plain, within
from hostile_values import FREE, Made, Net, Outcome, Slot, bad, hooked, losses_fn, steps
from rowprop.app import cli

MODELS = """
import sys, torch
from torch import nn
def good(): return nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 4)), (torch.randn(8, 3), torch.arange(8) % 4)
def alone(): return good()[0]
def model(): return nn.Linear(3, 2)
def rows(): return torch.randn(48, 3), torch.arange(48) % 2, torch.randn(16, 3), torch.arange(16) % 2
def given(): return sys.modules["hostile_commands"].GIVEN[0]()
def prints(): print("a factory's own words"); return good()
def needs_argument(size): return good()
not_callable = 5
"""
FILES = {
    **dict.fromkeys("notes.txt results.json report.html settings.json runs/a.json empty.py".split(), "somebody's"),
    **dict.fromkeys("theirs/results.json theirs/runs/events.out theirs/notes.txt odd/runs".split(), "months of work"),
    **dict.fromkeys("odd/settings.json/file odd/results.json/file odd/report.html/file".split(), "a folder"),
    **{
        "ends.py": "import sys\nsys.exit(0)\n",
        "broken.py": "def make(:\n",
        "fails.py": "import nothing_of_that_name\n",
    },
    **{"bytes.py": "\0\0", "theirs/settings.json": "[]", "empty/.keep": "", "elsewhere/.keep": "", "models.py": MODELS},
}
LINKS = {"linked": "elsewhere", "dangling": "nowhere", "loop": "loop"}
GIVEN: list[Made] = []  # what the factory of the running case returns


@dataclass(frozen=True)
class Case:
    """One command line: what follows ``rowprop``, whether it must be refused, where it may write, what is given."""

    args: tuple[str, ...]
    bad: bool = False
    writes: str = "nowhere"
    given: Made | None = None
    name: str = ""

    @property
    def said(self) -> str:
        return f"{shlex.join(self.args)[:150]!a} {self.name}"


def numbers_in(interval: str) -> Callable[[str], bool]:
    return lambda text: all(within(interval)(float(part)) for part in text.split(","))


TEXTS = """a -1 -0.5 0 0.5 1 1.0 2 1.5 nan inf -inf 1e300 1e-300 true None [/foo] [red]x[/] ü ../.. /dev/null 0.25, , %s
$HOME meta cuda:99 int64 float8_e4m3fn Tensor 8x3 0x3 -8x3 8x 8X3 99999999999x3 sliced SLICED random,random random@fast
infobatch+ models.py:nothing models.py:needs_argument ends.py:rows cpu float64 9999999999999999999999999""".split()
TEXTS += ["", " ", "a b", "a\nb", "x" * 5000, "'", "\\", "\u202e", "\ud800"]
SPECS = """models.py models.py: :good : models nothing:good nothing.py:good models.py:nothing [/foo]:a broken.py:make
fails.py:make ends.py:make empty.py:make bytes.py:make theirs:make /dev/null:make torchvision/ torchvision/[/foo]
os:getcwd models.py:good:good sys:exit builtins:dict builtins:input models.py:not_callable models.py:alone
models.py:needs_argument""".split()
OUT = ["", *"notes.txt notes.txt/x /dev/null /dev/full /proc/x odd dangling/x loop".split(), "x" * 300]
OUT_FINE = [*"new new/deep/er . theirs empty ./new/ [red]x[/] ü linked".split(), "new folder"]
TRACE, TRACE_FINE = ["", *". theirs notes.txt/x /dev/full /proc/x nowhere/x loop".split()], ["new.json", "/dev/null"]
COMPARE = "--data models.py:rows --model models.py:model --methods random --epochs 1 --batch 16 --seeds 1 --device cpu"
BASE = {
    "verify": ("verify", "models.py:good"),
    "flops": ("flops", "models.py:good"),
    "profile": ("profile", "models.py:good", "--rounds", "1"),
    "plan": ("plan", "models.py:good", "--rounds", "1", "--keep", "0.5"),
    "compare": ("compare", *COMPARE.split(), "--out", "made"),
}
NUMBERS = """seed:[0,inf) seeds:[1,inf) batch:[1,inf) threads:[1,9] train_rows:[2,48] rounds:[1,inf) epochs:[1,inf)
lr:(0,inf) seconds:(0,inf) keep:(0,1]""".split()
RIGHT = {"engine": "sliced", "dtype": "float64", "device": "cpu"}  # of some options one text is no mistake, or none
RIGHT |= dict.fromkeys("batchnorm attention unit optimizer input_shape data model methods".split(), "/")
LAWS: dict[str, Callable[[str], bool]] = {
    **{name: lambda text, right=right: text.strip() == right for name, right in RIGHT.items()},
    **{name: numbers_in(interval) for name, interval in (each.split(":") for each in NUMBERS)},
    "data_dir": lambda text: True,
}


def option_slot(command: str, name: str) -> Slot:
    """Texts for one option; every option of a command has to have its law here."""
    base, writes = (*BASE[command], "--" + name.replace("_", "-")), "made" if command == "compare" else "nowhere"
    if name in ("out", "trace"):
        wrong, fine = (OUT, OUT_FINE) if name == "out" else (TRACE, TRACE_FINE)
        cases = [Case((*base, text), text in wrong, text or "nowhere") for text in (*wrong, *fine)]
        return Slot(f"rowprop {command}", name, cases, attempt_command)
    law, long = LAWS[name], name in ("rounds", "epochs", "seeds", "seconds")  # so many take as long as they take
    texts = [text for text in TEXTS if not (long and fits(lambda text: float(text) > 2, text))]
    counted = "meta" if command == "flops" and name == "device" else None  # a count computes nothing
    cases = [Case((*base, text), not (fits(law, text) or text == counted), writes) for text in texts]
    free = (
        st.text(max_size=12)
        .filter(lambda text: not fits(float, text))
        .map(lambda text: Case((*base, text), True, writes))
    )
    return Slot(f"rowprop {command}", name, cases, attempt_command, free, 3 * (name != "data_dir"))


FACTORIES: dict[str, Made] = {
    "exits": sys.exit,
    "asks": input,
    "raises lines": lambda: {}["first line\nsecond line [/foo]"],
    "ends": lambda: next(iter(())),
    "forward exits": lambda: (hooked(Net(), lambda out: sys.exit(0)), BATCH),
    "forward mixes": lambda: (hooked(Net(), lambda out: out - out.mean(0)), BATCH),
    "markup": lambda: (nn.Sequential(nn.Sequential(Net()), type("[/foo]", (nn.ReLU,), {})()), BATCH),
    "three rows": lambda: (Net(), (BATCH[0][:3], BATCH[1][:3])),
}


def model_slot(command: str) -> Slot:
    """Places of models that are none, and every value one step away from a model, a batch and its losses."""
    rest = BASE[command][2:]

    def trains(make: Made) -> bool:
        model, batch, *losses = make()
        counted = command == "flops" and (not isinstance(batch, tuple) or next(model.parameters()).is_meta)
        return counted or plain(model, batch, *losses, strict=False)

    def case(drawn: tuple[str, Made]) -> Case:
        return Case((command, "models.py:given", *rest), not fits(trains, drawn[1]), "nowhere", drawn[1], drawn[0])

    cases = [Case((command, spec, *rest), True) for spec in ("", *SPECS)]
    for shape in "8x3 1x3 0x3 -8x3 8x5 8x 8X3 99999999999x3".split():
        wrong = shape not in ("8x3", "1x3")
        cases.append(Case((command, "models.py:alone", *rest, "--input-shape", shape), wrong))
    losses = steps(losses_fn, CALLS["losses_fn"])
    other = [(f"losses: {name}", lambda step=step: (Net(), BATCH, step(losses_fn))) for name, step in losses]
    cases += map(case, [*FACTORIES.items(), *bad(lambda: (Net(), BATCH, losses_fn)), *other])
    return Slot(f"rowprop {command}", "model", cases, attempt_command, FREE.map(case), 6)


def other_cases() -> Iterator[tuple[str, Case]]:
    """Without arguments, with unknown ones, for help; flags together; a comparison in a folder that is not empty."""
    for args in ((), ("nothing",), ("--nothing",), *((command,) for command in BASE if command != "compare")):
        yield "", Case(args, True)
    for args in (("--help",), ("--version",), *((command, "--help") for command in BASE)):
        yield "", Case(args)
    yield "flops", Case(("flops", "models.py:prints", "--json"))
    for command, base in BASE.items():
        for more in (("--nothing",), ("extra",), ("--seed",), ("--json", "--json=5")):
            yield command, Case((*base, *more), True, "made")
        yield command, Case((*base, "--json"), False, "made")
    for more in (("--resume", "--fresh"), ("--seconds", "1"), ("--train-rows", "99"), ("--data", "models.py:good")):
        yield "compare", Case((*BASE["compare"], *more), True, "made")
    for folder in ("new", "theirs", ".", "odd", "empty"):
        for flag in ("--resume", "--fresh"):
            yield "compare", Case((*BASE["compare"], "--out", folder, flag), False, folder)


def command_slots() -> Iterator[Slot]:
    for command in BASE:
        for name, kind in typing.get_type_hints(getattr(cli, command)).items():
            if kind not in (bool, type(None)):
                of_model = name == "model" and command != "compare"
                yield model_slot(command) if of_model else option_slot(command, name)
    for command, case in other_cases():
        yield Slot(f"rowprop {command}", "", [case], attempt_command)
    for args in ((*BASE["flops"], "--json"), BASE["verify"], ("--help",), ("flops", "models.py:nothing")):
        yield Slot("rowprop in a shell", "", [Case(args, name=line) for line in SHELL], attempt_in_shell)


# --- running one ------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def sandbox(writes: str) -> Generator[list[str]]:
    """A folder with other people's files as the working directory; at the end, what changed outside of ``writes``."""
    outside, wrong = Path.cwd(), []
    with tempfile.TemporaryDirectory() as name:
        os.chdir(name)
        for path, text in FILES.items():
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            Path(path).write_text(text)
        for link, target in LINKS.items():
            Path(link).symlink_to(target)
        before = contents()
        try:
            yield wrong
            wrong += changed(before, contents(), writes)
        finally:
            os.chdir(outside)


def contents() -> dict[Path, object]:
    """Every file below the working directory and what it holds, every folder and link."""
    paths = [path for path in Path().rglob("*") if "__pycache__" not in path.parts]
    return {path: path.readlink() if path.is_symlink() else path.is_dir() or path.read_bytes() for path in paths}


def changed(before: dict[Path, object], after: dict[Path, object], writes: str) -> list[str]:
    """What was changed or made where it should not have been."""
    home = Path(os.path.normpath(writes.replace("linked", "elsewhere")))
    wrong = [f"{path} is changed" for path, held in before.items() if after.get(path) != held]
    new = after.keys() - before.keys()
    wrong += [f"{path} was left behind" for path in new if path.suffix == ".tmp"]
    outside = [path for path in new if home not in (path, *path.parents) and path not in home.parents]
    return wrong + [f"{path} was made" for path in outside]


def attempt_command(case: Case) -> Outcome:
    """Run one command in this process: the outcome, as ``hostile.attempt`` has it."""
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True) for _ in range(2))
    GIVEN[:] = [case.given] if case.given else []
    code: Any = 0
    argv, stdin = sys.argv, sys.stdin
    sys.argv, sys.stdin = ["rowprop", *case.args], io.StringIO("")
    with sandbox(case.writes) as wrong:
        try:
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                cli.app()
        except SystemExit as error:
            code = error.code or 0
        finally:
            sys.argv, sys.stdin = argv, stdin
    texts = [stream.buffer.getvalue().decode("utf-8", "replace") for stream in (out, err)]  # pyright: ignore
    return judged(case, code, *texts, wrong)


def judged(case: Case, code: int, out: str, err: str, wrong: list[str]) -> Outcome:
    """Whether the exit code, the words and the files are allowed."""
    said = (err.strip().splitlines() or [""])[-1][:300]
    if "Traceback (most recent" in err + out:
        return "traceback", said
    if wrong:
        return "files", f"{wrong[0]}; exit code {code}, {said}"
    if code == 0:
        if "--json" in case.args and not fits(lambda text: isinstance(json.loads(text), dict), out):
            return "silent", f"standard output is no JSON: {out[:80]!r}"
        return ("silent", "accepted") if case.bad else ("result", "")
    if code != 2:
        return "code", f"exit code {code}: {said}"
    if case.args and not said:
        return "silent", "exit code 2 without a word"
    sentences = re.findall("^rowprop: ", err, re.MULTILINE)
    return ("refused", said) if len(sentences) < 2 else ("poor", f"one sentence was needed: {err[:200]!r}")


SHELL = ("{} >&-", "{} >/dev/full", "{} | true", "{} 2>&-")  # what happens to the output: closed, full, unread


def attempt_in_shell(case: Case) -> Outcome:
    """Run one command in a process of its own: no traceback, and no success where the output is lost."""
    called = shlex.join([sys.executable, "-c", "from rowprop.app.cli import app; app()", *case.args])
    script = f"{case.name.format(called)}; exit ${{PIPESTATUS[0]}}"
    with sandbox("nowhere") as wrong:
        done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False)
    if "Traceback" in done.stderr or "Exception ignored" in done.stderr:
        return "traceback", done.stderr.strip().splitlines()[-1][:200]
    if done.returncode < 0 or (done.returncode >= 128 + 9 and done.returncode != 141):
        return "death", f"exit code {done.returncode}"
    if done.returncode == 0 and "full" in case.name:
        return "silent", "exit code 0, and the output is lost"
    return ("files", wrong[0]) if wrong else ("result", "")
