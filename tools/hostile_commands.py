"""The hostile trial of the command line: every command with bad values for every option, bad models, bad folders.

Each case runs in a sandbox of its own, a folder with other people's files in it. Afterwards all of these have to be
there unchanged, and what is new has to lie where the case says that output goes.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MODELS = '''
import sys
import torch
from torch import nn
from torch.nn import functional as F

def batch(n=8):
    return torch.randn(n, 3), torch.randint(4, (n,))

def losses(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")

class Says(nn.Module):
    """A model whose forward is any function of its layer's output."""
    def __init__(self, function):
        super().__init__()
        self.layer = nn.Linear(3, 4)
        self.function = function
    def forward(self, inputs):
        return self.function(self.layer(inputs))

def with_losses(function):
    return nn.Linear(3, 4), batch(), function

def raises(*given):
    raise KeyError("the user's own error")

def recurses(*given):
    return recurses(*given)

class Net(nn.Sequential):
    def __init__(self, classes=4, inputs=3):
        super().__init__(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, classes))

def good(): return Net(), batch()
def alone(): return Net()
def complete(): return Net(), batch(), losses
def hidden(): return nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 4)), batch()
def prints():
    print("a factory's own words"); print("more of them", file=sys.stderr)
    return good()
def prints_later(): return Says(lambda out: (print("a forward's own words"), out)[1]), batch()
def wrong(): # plain indexing and this engine disagree: a backward that lies
    class Lie(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x): return x * 1
        @staticmethod
        def backward(ctx, grad): return grad * grad.shape[0]
    import rowprop
    rowprop.rowwise(saved=0, grads=0)(Lie)
    return Says(Lie.apply), batch()

not_callable = 5
def returns_none(): return None
def returns_text(): return "a"
def returns_list(): return [1, 2]
def returns_class(): return Net
def returns_four(): return Net(), batch(), losses, 5
def returns_losses_text(): return Net(), batch(), "losses"
def needs_argument(size): return Net()
def exits(): sys.exit(0)
def exits_with_text(): sys.exit("bye")
def asks(): return input()
def interrupts_nothing(): raise KeyError("x")
def raises_in_lines(): raise ValueError("first line\\nsecond line [/foo]")
def raises_empty(): raise ValueError
def raises_base(): raise GeneratorExit("odd")
def recursion(): return recurses()
def frozen(): return Net().requires_grad_(False), batch()
def no_parameters(): return nn.Flatten(), (torch.randn(8, 4), torch.randint(4, (8,)))
def meta(): return Net().to("meta"), batch()
def forward_raises(): return Says(raises), batch()
def forward_recurses(): return Says(recurses), batch()
def forward_exits(): return Says(lambda out: sys.exit(0)), batch()
def forward_none(): return Says(lambda out: None), batch()
def forward_text(): return Says(lambda out: "a"), batch()
def forward_number(): return Says(lambda out: out.mean()), batch()
def forward_empty(): return Says(lambda out: out[:0]), batch()
def forward_nan(): return Says(lambda out: out * float("nan")), batch()
def forward_mixes(): return Says(lambda out: out - out.mean(0)), batch()
def markup():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            for name, inputs in (("[", 3), ("[/foo]", 4), ("[red]x[/]", 4)):
                self.add_module(name, nn.Linear(inputs, 4))
        def forward(self, x):
            for each in self.children(): x = each(x)
            return x
    Odd.__name__ = "[/foo]"
    return Odd(), batch()
def losses_raise(): return with_losses(raises)
def losses_none(): return with_losses(lambda model, batch: None)
def losses_number(): return with_losses(lambda model, batch: losses(model, batch).mean())
def losses_short(): return with_losses(lambda model, batch: losses(model, batch)[:3])
def losses_nan(): return with_losses(lambda model, batch: losses(model, batch) * float("nan"))
def losses_whole(): return with_losses(lambda model, batch: losses(model, batch).long())
def losses_detached(): return with_losses(lambda model, batch: losses(model, batch).detach())
def losses_one_argument(): return with_losses(lambda model: 1)
def losses_exit(): return with_losses(lambda model, batch: sys.exit(0))
def batch_empty(): return Net(), batch(0)
def batch_one(): return Net(), batch(1)
def batch_none(): return Net(), (None, None)
def batch_text(): return Net(), "a"
def batch_sizes(): return Net(), (torch.randn(8, 3), torch.randint(4, (5,)))
def batch_shape(): return Net(), (torch.randn(8, 5), torch.randint(4, (8,)))
def batch_classes(): return Net(), (torch.randn(8, 3), torch.full((8,), 99))
def batch_whole(): return Net(), (torch.ones(8, 3, dtype=torch.int64), torch.randint(4, (8,)))

# --- for compare
def rows(): return torch.randn(48, 3), torch.randint(2, (48,)), torch.randn(16, 3), torch.randint(2, (16,))
def rows_three(): return rows()[:3]
def rows_none(): return None
def rows_text(): return "abcd"
def rows_empty(): return tuple(each[:0] for each in rows())
def rows_short(): x, y, a, b = rows(); return x, y[:5], a, b
def rows_fractions(): x, y, a, b = rows(); return x, y + 0.5, a, b
def rows_negative(): x, y, a, b = rows(); return x, y - 1, a, b
def rows_nan(): x, y, a, b = rows(); return x * float("nan"), y, a, b
def rows_other_width(): x, y, a, b = rows(); return x, y, a[:, :2], b
def rows_names(): return *rows(), ["[/foo]", "<script>"]
def rows_few_names(): return *rows(), ["one"]
def rows_exit(): sys.exit(0)
def rows_one_class(): x, y, a, b = rows(); return x, y * 0, a, b * 0
def model(): return Net(2)
def model_none(): return None
def model_arguments(classes, inputs): return Net(classes, inputs)
def model_raises(): raise KeyError("x")
def model_exit(): sys.exit(0)
def model_width(): return Net(3)
def model_text(): return Says(lambda out: "a")
def model_frozen(): return Net(2).requires_grad_(False)
def model_nan(): return nn.Sequential(Net(2), Says2())
class Says2(nn.Module):
    def forward(self, x): return x * float("nan")
'''

FOREIGN = {
    "notes.txt": "somebody's notes",
    "results.json": '{"somebody": "else"}',
    "report.html": "<p>somebody's page",
    "settings.json": '{"somebody": "else"}',
    "runs/events.tfevents": "somebody's runs",
    "runs/random-seed0.json": '{"somebody": "else"}',
    "theirs/settings.json": "[]",
    "theirs/results.json": "{}",
    "theirs/report.html": "<p>theirs",
    "theirs/runs/exp1/events.out.tfevents": "months of work",
    "theirs/runs/a.json": "5",
    "theirs/notes.txt": "notes",
    "odd/settings.json/file": "a folder called settings.json",
    "odd/results.json/file": "a folder called results.json",
    "odd/report.html/file": "a folder called report.html",
    "odd/runs": "a file called runs",
    "ends.py": "import sys\nsys.exit(0)\n",
    "broken.py": "def make(:\n",
    "fails.py": "import nothing_of_that_name\n",
    "empty.py": "",
    "bytes.py": "\0\0",
}


@dataclass(frozen=True)
class Case:
    """One command line.

    Attributes:
        args: What follows ``rowprop``.
        bad: Whether it has to be refused.
        writes: Below which paths of the sandbox output may appear; files of others in them have to stay.
        replaces: Files that may be replaced, because they are named themselves.
    """

    args: tuple[str, ...]
    bad: bool
    writes: tuple[str, ...] = ()
    replaces: tuple[str, ...] = ()
    disagrees: bool = False

    @property
    def said(self) -> str:
        return shlex.join(each if len(each) < 60 else each[:50] + "..." for each in self.args)


# --- what is given ----------------------------------------------------------------------------------------------------

TEXTS = (
    "", " ", "a", "-1", "-0.5", "0", "0.5", "1", "1.0", "2", "1.5", "nan", "inf", "-inf", "1e300", "9" * 30, "1e-300",
    "true", "None",
    "[/foo]", "[red]x[/]", "ü", "../..", "/dev/null", "a b", "a\nb", "x" * 5000, "0.25,", ",",
    "%s", "$HOME", "'", '"', "\\", "\u202e", "\ud800",
)  # fmt: skip

HUGE = "9" * 30
LENGTHS = ("--rounds", "--epochs", "--seeds")  # so many steps take as long as they take
TEXTS_SHORT = tuple(text for text in TEXTS if text != HUGE)

OPTIONS: dict[str, dict[str, str]] = {
    # option: the texts that are no mistake, separated by |
    "verify": {
        "--engine": "",
        "--keep": "0.5|1e-300",
        "--batchnorm": "",
        "--unit": "",
        "--attention": "",
        "--seed": "0|1|2|1.0",
        "--device": "",
        "--dtype": "",
        "--input-shape": "",
    },
    "flops": {
        "--optimizer": "",
        "--keep": "0.5|1|1.0|1e-300",
        "--seed": "0|1|2|1.0",
        "--device": "",
        "--dtype": "",
        "--input-shape": "",
    },
    "profile": {"--rounds": "1|2|1.0", "--seed": "0|1|2|1.0", "--device": "", "--dtype": "", "--input-shape": ""},
    "plan": {
        "--keep": "0.5|1e-300",
        "--optimizer": "",
        "--batchnorm": "",
        "--rounds": "1|2|1.0",
        "--seed": "0|1|2|1.0",
        "--device": "",
        "--dtype": "",
        "--input-shape": "",
    },
    "compare": {
        "--data": "",
        "--train-rows": "2",
        "--model": "",
        "--methods": "",
        "--keep": "0.5|1|1.0|1e-300",
        "--epochs": "1|2|1.0",
        "--batch": "2|" + HUGE,  # more than there are rows: all of them
        "--lr": "0.5|1|1.0|2|1.5|1e-300|1e300",
        "--seeds": "1|2|1.0",
        "--device": "",
        "--threads": "1|2|1.0",
        "--data-dir": "|".join(TEXTS),
    },
}
GOOD = "models.py:good"
BASE: dict[str, tuple[str, ...]] = {
    "verify": ("verify", GOOD),
    "flops": ("flops", GOOD),
    "profile": ("profile", GOOD, "--rounds", "1"),
    "plan": ("plan", GOOD, "--rounds", "1", "--keep", "0.5"),
    "compare": (
        "compare", "--data", "models.py:rows", "--model", "models.py:model", "--methods", "random", "--epochs", "1",
        "--batch", "16", "--seeds", "1", "--device", "cpu", "--out", "made",
    ),
}  # fmt: skip
SPECS_FINE = (
    "models.py:complete", "models:good", "models.py:hidden", "models.py:prints", "models.py:prints_later",
    "models.py:forward_mixes", "models.py:markup", "models.py:batch_one", "models.py:no_parameters",
    "models.py:forward_nan", "models.py:losses_nan", "models.py:frozen", "models.py:losses_detached",
    "models.py:batch_whole", "models.py:batch_empty", "models.py:losses_short",
)  # fmt: skip
SPECS_BAD = (
    "", ":", "models.py", "models.py:", ":good", "models", "nothing:good", "nothing.py:good", "models.py:nothing",
    "models.py:not_callable", "[/foo]", "[/foo]:a", "[red]x[/]:a", "broken.py:make", "fails.py:make", "ends.py:make",
    "empty.py:make", "bytes.py:make", "theirs:make", "/dev/null:make", "torchvision/", "torchvision/[/foo]",
    "torchvision/nothing", "models.py:good:good", "os:getcwd", "sys:exit",
    "builtins:dict", "builtins:input",
    "models.py:alone", "models.py:returns_none", "models.py:returns_text", "models.py:returns_list",
    "models.py:returns_class", "models.py:returns_four", "models.py:returns_losses_text", "models.py:needs_argument",
    "models.py:exits", "models.py:exits_with_text", "models.py:interrupts_nothing", "models.py:raises_in_lines",
    "models.py:raises_empty", "models.py:raises_base", "models.py:recursion", "models.py:meta",
    "models.py:forward_raises", "models.py:forward_recurses", "models.py:forward_exits", "models.py:forward_none",
    "models.py:forward_text", "models.py:forward_number", "models.py:forward_empty",
    "models.py:losses_raise", "models.py:losses_none", "models.py:losses_number",
    "models.py:losses_whole", "models.py:losses_one_argument", "models.py:losses_exit",
    "models.py:batch_none", "models.py:batch_text", "models.py:batch_sizes",
    "models.py:batch_shape", "models.py:batch_classes",
)  # fmt: skip
SHAPES_FINE = ("8x3", "2x3", "1x3")
SHAPES_BAD = (
    "0x3",
    "-8x3",
    "8x",
    "x",
    "8",
    "8x5",
    "8X3",
    "8x3x",
    "99999999999x4",
    "99999999999x3",
    "9" * 30 + "x3",
    "8x3.0",
)
DEVICES_BAD = ("meta", "cuda", "cuda:99", "mps", "vulkan", "CPU")
DTYPES_FINE = ("float32", "float64", "bfloat16", "float16")
DTYPES_BAD = ("int64", "bool", "complex64", "float31", "torch.float32", "Tensor", "qint8", "float8_e4m3fn")
FOLDERS_FINE = (
    "new",
    "new/deep/er",
    ".",
    "theirs",
    "empty",
    "odd/new",
    "./new/",
    "new folder",
    "[red]x[/]",
    "ü",
    "linked",
)
FOLDERS_BAD = (
    "",
    "notes.txt",
    "notes.txt/x",
    "/dev/null",
    "/dev/null/x",
    "/dev/full",
    "/proc/x",
    "/sys/x",
    "x" * 300,
    "odd",
    "dangling/x",
    "loop",
)
FILES_FINE = ("new.json", "new.json.gz", "/dev/null")
FILES_BAD = (
    "", ".", "theirs", "empty", "notes.txt/x.json", "/dev/full", "/proc/x.json", "nowhere/x.json",
    "x" * 300 + ".json", "loop",
)  # fmt: skip
DATA_FINE = ("models:rows", "models.py:rows_names", "models.py:rows_one_class")
DATA_BAD = (
    "digit", "", ":", "models.py", "models.py:nothing", "nothing.py:rows", "torchvision/nothing", "torchvision/",
    "[/foo]:a", "ends.py:rows", "models.py:rows_three", "models.py:rows_none", "models.py:rows_text",
    "models.py:rows_empty", "models.py:rows_short", "models.py:rows_fractions", "models.py:rows_negative",
    "models.py:rows_nan", "models.py:rows_other_width", "models.py:rows_exit", "models.py:raises",
    "models.py:rows_few_names",
)  # fmt: skip
COMPARED_BAD = (
    "models.py:model_none", "models.py:model_arguments", "models.py:model_raises", "models.py:model_exit",
    "models.py:model_width", "models.py:model_text", "models.py:model_frozen", "ends.py:model", "convnet3", "[/foo]:a",
)  # fmt: skip
METHODS_FINE = ("full", "ohem@recompute", "random,full", "random,")
METHODS_BAD = (
    "",
    ",",
    "random,random",
    "random@",
    "random@fast",
    "@",
    "[/foo]",
    "infobatch+",
    "infobatch+full",
    "Random",
    "random ohem",
)


def cases() -> Iterator[tuple[str, Case]]:
    """Every case, with the name of its command."""
    for command, base in BASE.items():
        writes = ("made",) if command == "compare" else ()
        yield command, Case(base, False, writes)
        yield command, Case((*base, "--json"), False, writes)
        for option, fine in OPTIONS[command].items():
            for text in TEXTS if option not in LENGTHS else TEXTS_SHORT:
                yield command, Case((*base, option, text), text not in fine.split("|"), writes)
        for more in (("--nothing",), ("extra",), ("--seed",), ("--json", "--json=5")):
            yield command, Case((*base, *more), True, writes)
        if command != "compare":
            yield from ((command, each) for each in _of_model(command, base))
    yield from (("compare", each) for each in _comparisons())
    for args in ((), ("nothing",), ("--nothing",), ("verify",), ("flops",), ("plan",), ("profile",)):
        yield "rowprop", Case(args, True)
    for args in (("--help",), ("--version",), *((command, "--help") for command in BASE)):
        yield "rowprop", Case(args, False)


def _of_model(command: str, base: tuple[str, ...]) -> Iterator[Case]:
    rest = base[2:]
    slow = command in ("plan", "profile")
    for spec in SPECS_FINE:
        yield Case((command, spec, *rest), False)
        if not slow:
            yield Case((command, spec, *rest, "--json"), False)
    for spec in SPECS_BAD:
        # A count of FLOPs needs a forward, and no losses that could be trained on.
        yield Case((command, spec, *rest), True)
    for shape in SHAPES_FINE:
        yield Case((command, "models.py:alone", *rest, "--input-shape", shape), False)
    for shape in SHAPES_BAD:
        yield Case((command, "models.py:alone", *rest, "--input-shape", shape), True)
    yield Case((command, GOOD, *rest, "--input-shape", "8x3"), True)
    for device in DEVICES_BAD:
        yield Case((*base, "--device", device), (command, device) != ("flops", "meta"))  # a count computes nothing
    for dtype in DTYPES_FINE:
        yield Case((*base, "--dtype", dtype), False)
    for dtype in DTYPES_BAD:
        yield Case((*base, "--dtype", dtype), True)
    if command == "verify":
        yield Case(("verify", "models.py:wrong"), False, disagrees=True)
        return
    if command == "profile":
        for file in FILES_FINE:
            yield Case((*base, "--trace", file), False, (file,))
        yield Case((*base, "--trace", "notes.txt"), False, (), ("notes.txt",))
        for file in FILES_BAD:
            yield Case((*base, "--trace", file), True)
        return
    for folder in FOLDERS_FINE if not slow else FOLDERS_FINE[:3]:
        yield Case((*base, "--out", folder), False, (folder,))
    for folder in FOLDERS_BAD:
        yield Case((*base, "--out", folder), True, (folder,) if folder else ())


def _comparisons() -> Iterator[Case]:
    base = BASE["compare"]
    for name, fine, bad in (
        ("--data", DATA_FINE, DATA_BAD),
        ("--model", (), COMPARED_BAD),
        ("--methods", METHODS_FINE, METHODS_BAD),
        ("--device", (), DEVICES_BAD),
        ("--threads", (), ("100000",)),
        ("--batch", ("1000",), ()),
        ("--train-rows", (), ("1000", "1")),
    ):
        for text in fine:
            yield Case((*base, name, text), False, ("made",))
        for text in bad:
            yield Case((*base, name, text), True, ("made",))
    for folder in FOLDERS_FINE:
        yield Case((*base, "--out", folder), False, (folder,))
    for folder in FOLDERS_BAD:
        yield Case((*base, "--out", folder), True, (folder,) if folder else ())
    for flags in (("--resume",), ("--fresh",)):
        for folder in ("new", "theirs", ".", "odd", "empty"):
            yield Case((*base, "--out", folder, *flags), False, (folder,))
    yield Case((*base, "--resume", "--fresh"), True, ("made",))
    yield Case((*base, "--seconds", "1"), True, ("made",))
    without = [*base]
    del without[without.index("--epochs") : without.index("--epochs") + 2]
    for text in ("0", "-1", "nan", "inf", "a", ""):
        yield Case((*without, "--seconds", text), True, ("made",))


# --- running one ------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def sandbox() -> Generator[Path]:
    """A folder with other people's files as the working directory."""
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        for path, text in FOREIGN.items():
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_text(text)
        (root / "models.py").write_text(MODELS)
        (root / "empty").mkdir()
        (root / "elsewhere").mkdir()
        (root / "linked").symlink_to("elsewhere")
        (root / "dangling").symlink_to("nowhere")
        (root / "loop").symlink_to("loop")
        os.chdir(root)
        try:
            yield root
        finally:
            os.chdir(before)


def contents(root: Path) -> dict[str, str]:
    """Every file below ``root`` and what it holds, every folder and link."""
    held: dict[str, str] = {}
    for folder, folders, files in os.walk(root):
        for name in (*folders, *files):
            path = Path(folder, name)
            key = str(path.relative_to(root))
            if "__pycache__" in key:
                continue
            if path.is_symlink():
                held[key] = f"link to {path.readlink()}"
            elif path.is_file():
                held[key] = hashlib.sha256(path.read_bytes()).hexdigest()
            else:
                held[key] = "folder"
    return held


def changed(before: dict[str, str], after: dict[str, str], case: Case) -> str:
    """What was changed or made where it should not have been."""
    homes = {os.path.normpath(each).replace("linked", "elsewhere") for each in case.writes}
    parents = {str(parent) for home in homes for parent in Path(home).parents}
    for path, held in before.items():
        if path not in case.replaces and after.get(path) != held:
            return f"{path} is {'changed' if path in after else 'gone'}"
    for path in after.keys() - before.keys():
        inside = any(home in (".", path) or path.startswith(f"{home}/") for home in homes)
        if not inside and path not in parents:
            return f"{path} was made"
    leftover = [path for path in after.keys() - before.keys() if path.endswith(".tmp")]
    return f"{leftover[0]} was left behind" if leftover else ""


class Stream(io.TextIOWrapper):
    """A standard stream of its own, as strict about text as a real one."""

    def __init__(self) -> None:
        self.held = io.BytesIO()
        super().__init__(self.held, encoding="utf-8", errors="strict", write_through=True)

    def text(self) -> str:
        self.flush()
        return self.held.getvalue().decode("utf-8", "replace")


def attempt_command(case: Case) -> tuple[str, str]:
    """Run one command in this process: the outcome, as ``hostile.attempt`` has it."""
    from rowprop.app.cli import app

    out, err = Stream(), Stream()
    code: object = 0
    with sandbox() as root:
        before = contents(root)
        argv, stdin = sys.argv, sys.stdin
        sys.argv = ["rowprop", *case.args]
        sys.stdin = io.StringIO("")
        try:
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                app()
        except SystemExit as error:
            code = error.code
        finally:
            sys.argv, sys.stdin = argv, stdin
        wrong = changed(before, contents(root), case)
    return judged(case, code, out.text(), err.text(), wrong)


def judged(case: Case, code: object, out: str, err: str, wrong: str) -> tuple[str, str]:
    """Whether the exit code, the words and the files are allowed."""
    said = (err.strip().splitlines() or [""])[-1][:300]
    if "Traceback (most recent" in err + out:
        return "traceback", said
    if wrong:
        return "files", f"{wrong}; exit code {code}, {said}"
    if code == (1 if case.disagrees else 0) or code is None:
        if "--json" in case.args:
            try:
                json.loads(out)
            except ValueError:
                return "silent", f"standard output is no JSON: {out[:80]!r}"
        return "result", ""
    if code == 2 and not case.disagrees:
        sentences = [line for line in err.strip().splitlines() if line.startswith("rowprop: ")]
        if not err.strip() and case.args:
            return "silent", "exit code 2 without a word"
        if len(sentences) > 1:
            return "poor", f"one sentence was needed: {err[:200]!r}"
        return "refused", said
    return "code", f"exit code {code}: {said}"


# --- in a process of their own: what happens to standard output -------------------------------------------------------

SHELL = {
    "standard output closed": "{command} >&-",
    "standard output full": "{command} >/dev/full",
    "a pipe that nobody reads": "{command} | true",
    "standard error closed": "{command} 2>&-",
}


def attempt_in_shell(command: str, case: Case) -> tuple[str, str]:
    """Run one command in a shell: no traceback, and no success where the output is lost."""
    called = shlex.join([sys.executable, "-c", "from rowprop.app.cli import app; app()", *case.args])
    with sandbox() as root:
        before = contents(root)
        code, err = _run(SHELL[command].format(command=called))
        wrong = changed(before, contents(root), case)
    if "Traceback" in err or "Exception ignored" in err:
        return "traceback", err.strip().splitlines()[-1][:200]
    if wrong:
        return "files", wrong
    if code < 0 or (code >= 128 + 9 and code != 141):
        return "death", f"exit code {code}"
    if command == "standard output full" and code == 0:
        return "silent", "exit code 0, and the output is lost"
    return "result", ""


def _run(line: str) -> tuple[int, str]:
    script = f"{line}; exit ${{PIPESTATUS[0]}}"
    done: Any = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=60, check=False)
    return done.returncode, done.stderr


def shell_cases() -> Iterator[tuple[str, Case]]:
    for command in SHELL:
        for args in ((*BASE["flops"], "--json"), BASE["verify"], ("--help",), ("flops", "models.py:nothing")):
            yield command, Case(args, False)
