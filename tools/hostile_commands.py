"""The hostile trial of the command line: every option of every command is an argument of a door, and gets bad texts.

Each call runs in a folder with other people's files in it. Afterwards all of these have to be there unchanged, and what
is new has to lie where the case says that output goes.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import re
import tempfile
import types
import typing
from collections.abc import Callable, Generator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st
from torch import nn
from typer.testing import CliRunner

from hostile_cases import BATCH, MODEL, Argument, Door, by_name, plain, within
from hostile_values import bad, fits, losses_fn
from rowprop.app import cli
from rowprop.errors import InvalidInput

FILES = by_name({
    "notes.txt results.json report.html settings.json runs/a.json empty.py elsewhere/notes": "somebody's",
    "theirs/results.json theirs/runs/events.out theirs/notes.txt theirs/settings.json odd/runs": "months of work",
    "odd/settings.json/file odd/results.json/file odd/report.html/file": "a folder",
    "ends.py": "import sys\nsys.exit(0)\n", "broken.py": "def make(:\n", "bytes.py": "\0\0", "empty/.keep": "",
})  # fmt: skip
LINKS = {"linked": "elsewhere", "dangling": "nowhere", "loop": "loop"}
GIVEN: list[Any] = []  # what the factory of the running case returns


def given() -> Any:
    return GIVEN[0]


def alone() -> nn.Module:
    return nn.Linear(3, 2)


def rows() -> tuple[torch.Tensor, ...]:
    return torch.randn(48, 3), torch.arange(48) % 2, torch.randn(16, 3), torch.arange(16) % 2


TEXTS = r"""a -1 -0.5 0 0.5 1 1.0 2 1.5 nan inf -inf 1e300 1e-300 true None [/foo] [red]x[/] ü ../.. /dev/null 0.25, ,
$HOME \ %s meta cuda:99 int64 float8_e4m3fn Tensor 8x3 1x3 0x3 -8x3 8x 8x5 8X3 99999999999x3 sliced SLICED random,random
random@fast infobatch+ ends.py:rows hostile_commands:given os:getcwd cpu float64 9999999999999999999999999""".split()
TEXTS += ["", " ", "a b", "a\nb", "x" * 5000, "\u202e", "\ud800"]
MODELS = """: :alone hostile_commands hostile_commands: nothing:alone nothing.py:alone hostile_commands:nothing [/foo]:a
broken.py:make ends.py:make empty.py:make bytes.py:make theirs:make /dev/null:make torchvision/ torchvision/[/foo]
os:getcwd hostile_commands:alone:alone sys:exit builtins:dict builtins:input hostile_commands:FILES
hostile_commands:alone hostile_commands:option""".split()
NOWHERE = ["", *"notes.txt/x /dev/full /proc/x loop".split()]
PLACES = {
    "out": ([*NOWHERE, "notes.txt", "/dev/null", "odd", "dangling/x", "x" * 300],
            ["new folder", *"new new/deep/er . theirs empty ./new/ [red]x[/] ü linked".split()]),
    "trace": ([*NOWHERE, ".", "theirs", "nowhere/x"], ["new.json", "/dev/null"]),
}  # fmt: skip
# What is no mistake, by option: texts, or an interval for numbers.
RIGHT = by_name({
    "engine": ["sliced"], "dtype": ["float64"], "device": ["cpu"], "input_shape": ["8x3", "1x3"], "data_dir": "",
    "batchnorm attention unit optimizer data methods model": [], "seed": "[0,inf)", "lr seconds": "(0,inf)",
    "seeds batch rounds epochs": "[1,inf)", "threads": "[1,9]", "train_rows": "[2,48]", "keep": "(0,1]",
})  # fmt: skip
LONG = "rounds", "epochs", "seeds", "seconds"  # so many take as long as they take
COMPARE = "data=hostile_commands:rows model=hostile_commands:alone methods=random epochs=1 batch=16 seeds=1 device=cpu"
BASE: dict[str, dict[str, Any]] = {
    "verify": {}, "flops": {}, "profile": {"rounds": "1"}, "plan": {"rounds": "1", "keep": "0.5"},
    "compare": {"out": "made"} | dict(pair.split("=") for pair in COMPARE.split()),
}  # fmt: skip


def texts(valid: Any, right: Callable[[str], bool], words: list[str], drawn: Any = None) -> Argument:
    named = [(f"{word[:50]!a}", partial(str, word)) for word in words]
    return Argument(
        lambda: valid, lambda word: word is None or right(word), lambda: named, drawn or st.sampled_from(named)
    )


def option(command: str, name: str) -> Argument:
    """Texts for one option; every option of a command has to have its law here."""
    valid = BASE[command].get(name)
    if name in PLACES:
        wrong, right = PLACES[name]
        return texts(valid, lambda text: text in right, wrong + right)
    if name == "model" and command != "compare":  # places of models that are none, and what a factory may return
        made = partial(copy.deepcopy, (MODEL, BATCH, losses_fn))
        law = partial(fits, lambda made: plain(*made) or (command == "flops" and not isinstance(made[1], tuple)))
        return Argument(made, law, lambda: [*((spec, partial(str, spec)) for spec in MODELS), *bad(made)])
    law = RIGHT[name]

    def right(text: str) -> bool:
        if isinstance(law, str):
            return not law or fits(lambda text: all(within(law)(float(part)) for part in text.split(",")), text)
        return text.strip() in law or (command == "flops" and text == "meta")  # a count computes nothing

    words = [text for text in TEXTS if not (name in LONG and fits(lambda text: float(text) > 2, text))]
    drawn = st.text(max_size=12).filter(lambda text: not fits(float, text)).map(lambda text: (repr(text), lambda: text))
    return texts(valid, right, words, drawn)


def command_doors() -> dict[str, Door]:
    """Every command with its options and flags; a comparison in a folder that is not empty."""
    found: dict[str, Door] = {}
    flags = ["--json", "--help", "--nothing", "extra", "--seed", "--json --json=5", "--resume --fresh"]
    for command in BASE:
        hints = typing.get_type_hints(getattr(cli, command))
        given = {name: option(command, name) for name, kind in hints.items() if kind not in (bool, types.NoneType)}
        given["flags"] = texts("", lambda text: text in flags[:2], flags)
        found[f"rowprop {command}"] = Door(partial(run, command), given)
    for flag in ("--resume", "--fresh"):
        found[f"rowprop compare {flag}"] = Door(partial(run, "compare", flags=flag), {"out": option("compare", "out")})
    words = ["", "nothing", "--nothing", "--help", *BASE]
    found["rowprop"] = Door(
        run, {"command": texts("--version", lambda text: text in ("--help", "compare"), words[:-1])}
    )
    return found


# --- running one ------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def sandbox(writes: str) -> Generator[None]:
    """A folder with other people's files as the working directory; at the end nothing may differ outside ``writes``."""

    def contents() -> dict[Path, object]:
        paths = [path for path in Path().rglob("*") if "__pycache__" not in path.parts]
        return {path: path.readlink() if path.is_symlink() else path.is_dir() or path.read_bytes() for path in paths}

    outside = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            for path, text in FILES.items():
                Path(path).parent.mkdir(parents=True, exist_ok=True)
                Path(path).write_text(text)
            for link, target in LINKS.items():
                Path(link).symlink_to(target)
            before = contents()
            yield
            after, home = contents(), Path(os.path.normpath(writes.replace("linked", "elsewhere")))
        finally:
            os.chdir(outside)
    changed = {path for path, held in before.items() if after.get(path) != held}
    made = {path for path in after.keys() - before if home not in (path, *path.parents) and path not in home.parents}
    assert not changed | made, f"changed or made: {[*map(str, changed | made)]}"


def run(command: str, flags: str = "", **options: Any) -> None:
    """Run one command in this process, and judge its exit code, its words and what it has done to the files."""
    given = {name: text for name, text in {**BASE.get(command, {}), **options}.items() if text is not None}
    args = [command] * bool(command)
    if "model" in given and command != "compare":
        GIVEN[:] = [given.pop("model")]
        factory = "alone" if "input_shape" in given else "given"
        args += [GIVEN[0] if isinstance(GIVEN[0], str) else f"hostile_commands:{factory}"]
    args += [word for name, text in given.items() for word in ("--" + name.replace("_", "-"), text)] + flags.split()
    with sandbox(given.get("out", given.get("trace", "nowhere")) or "nowhere"):
        done = CliRunner().invoke(cli.app, args)
    torch.set_num_threads(1)  # a command has its process for itself
    judge(args, done.exit_code, done.stdout, done.stderr, done.exception)


def judge(args: list[str], code: int, out: str, err: str, error: BaseException | None = None) -> None:
    """Raise a refusal, and what is wrong with an exit."""
    said = (err.strip().splitlines() or [""])[-1][:300]
    assert error is None or isinstance(error, SystemExit), f"a raw {error!r}"
    assert "Traceback (most recent" not in err + out, f"a traceback: {said}"
    assert code in (0, 2), f"exit code {code}: {said}"
    if code == 2:
        assert said or not args, "exit code 2 without a word"
        told = re.findall(r"^rowprop: (?!.* s left\))", err, re.MULTILINE)  # without the lines of progress
        assert len(told) < 2, f"one sentence was needed: {err[:200]!r}"
        raise InvalidInput(said)
    if "--json" in args and "--help" not in args:
        assert fits(lambda text: isinstance(json.loads(text), dict), out), f"standard output is no JSON: {out[:80]!r}"
