"""The catalogue of the hostile trial: every public function, class and command, a valid example, what is no mistake.

The methods of a class come with it, on the object of its valid example. Values and laws go by the names of the
arguments, which mean the same everywhere; an entry may have its own.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import json
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import is_dataclass
from functools import cache, partial
from math import inf, isfinite
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple, get_args, get_origin

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from typer.testing import CliRunner

import hostile_values as users
import rowprop
from hostile_values import FREE, Made, N, bad, fits, losses_fn
from names import names_of, namespaces
from rowprop import distributed, engines, history, schedule, selection
from rowprop.app import cli, terminal
from rowprop.backprop.autograd.hooks import Handle
from rowprop.checks import is_number, takes
from rowprop.cost.count import count_step
from rowprop.cost.profile import profile
from rowprop.selection.base import OfScores
from rowprop.step import Record

torch.manual_seed(0)
Law = Callable[[Any], Any]
BATCH = torch.randn(N, 3), torch.randint(4, (N,))
SCORES, IDS, ROWS = torch.rand(N) + 0.1, torch.arange(N), torch.tensor([0, 2, 5])
MODEL = nn.Linear(3, 4)
HISTORY, MEMORY = history.LossHistory(N), selection.PercentileSampling(floor=0.5)
HISTORY.update(IDS, SCORES, ROWS)
SAMPLER, SOME = history.PruningSampler(HISTORY, num_rows=N, epochs=4, prune=0.0), rowprop.Selection.mean(ROWS, N)
CONTEXT = selection.Context(0.5, IDS, IDS % 3, torch.Generator().manual_seed(0), HISTORY)


def blocks() -> nn.Module:
    return nn.Sequential(*(nn.Linear(features, 4) for features in (3, 4, 4)))


def thinning() -> rowprop.thinning.Thinning:
    thick = blocks()  # of other weights each time, so that a state that is loaded is another one
    handle = rowprop.thin(thick, generator=torch.Generator().manual_seed(0))
    losses_fn(thick, BATCH).mean().backward()
    return handle


def use(result: Any, of: Any = None) -> Any:
    """The first use of what a callable returns: bad input is refused there at the latest."""
    match result:
        case Tensor():
            if result.requires_grad and result.numel() and not result.is_meta:
                result.backward(torch.eye(*result.shape).to(result) if result.ndim == 2 else torch.ones_like(result))
        case float() if of is None:  # not what a user's function returns
            assert is_number(result), "the number"
        case Iterator():
            assert all(0 <= row < N for row in [next(result), *result]), "the rows of an epoch"
        case rowprop.Selection(rows=Tensor(is_meta=True)):
            rowprop.pick(SCORES, result)
        case rowprop.Selection(rows=kept, weights=weights):  # has to be sound, even of bad input
            rows, losses = kept.tolist(), torch.rand(min(result.num_rows, 999), requires_grad=True)
            assert rows == sorted(set(rows)) and all(0 <= row < result.num_rows for row in rows), "the rows"
            assert weights.shape == kept.shape and weights.isfinite().all(), "the weights"
            assert torch.equal(use(rowprop.pick(losses, result)), losses[kept]), "pick is not indexing"
        case (Tensor() as loss, Record() as record):
            assert use(loss).isfinite() and use(record.selection) and record.num_rows % N == 0, "the step"
        case selection.Context():
            use(selection.PerClass(rowprop.TopK(0.5))(SCORES, result))
            use(rowprop.RandomRows(0.5)(SCORES, result))
        case OfScores():
            use(rowprop.SelectiveBackprop(MODEL, losses_fn, result))
        case Handle():
            for _ in range(3 if isinstance(of, nn.Sequential) else 0):
                use(losses_fn(of, BATCH).mean())
            with result.paused():
                result.remove()
        case contextlib.AbstractContextManager():
            with result:
                use(losses_fn(MODEL if of is None else of, BATCH)[ROWS].mean())
        case _:  # an object is used by its methods
            for method in methods(type(result)) * 2:
                door = doors().get(f"{type(result).__name__}.{method}")
                if door and "state" not in method and "getitem" not in method:
                    door.example(result)
            if hasattr(result, "load_state_dict"):
                assert fits(lambda own: result.load_state_dict(own) is None, result.state_dict()), "its own state"
    return result


# Laws: whether a value is no mistake, so that a result is as right as a refusal.
def whole(*shape: int, least: int = -(2**63), most: int = 2**63 - 1) -> Law:
    """int64 of one dimension, of that length, in that range."""
    return lambda t: (t.dtype, t.ndim) == (torch.int64, 1) and t.clamp(least, most).equal(t) and shape in ((), t.shape)


def floats(law: Law) -> Law:
    return lambda t: t.is_floating_point() and t.layout == torch.strided and law(t)


def plain(model: Any = MODEL, batch: Any = BATCH, losses: Any = losses_fn, dims: int = 1) -> bool:
    """Whether the user's own step works in plain PyTorch: the truth about a model, a batch and a losses function."""
    found = losses(model, batch)
    found = found.losses if isinstance(found, rowprop.Scored) else found
    per_row = 0 < found.ndim <= dims or found.shape[1:] == (1,)
    return per_row and found.is_floating_point() and len(found) > 0 and takes(losses, 2)


def alike(valid: Any, value: Any) -> bool:
    """Whether a value is of the valid one's kind, each part of a mapping too, and could stand in its place."""
    if isinstance(valid, Mapping):
        needed = [key for key in valid if key in value or not key.isdigit()]  # a block by its number may be missing
        return isinstance(value, Mapping) and all(alike(valid[key], value[key]) for key in needed)
    if isinstance(valid, Tensor):
        kind = valid.dtype == value.dtype or (valid.is_floating_point() and value.is_floating_point())
        flattened = valid.dtype == torch.uint8  # by torch: the state of a generator
        return kind and not value.is_meta and (valid.ndim == value.ndim or flattened)
    return valid is None or (type(valid) is type(value) and (not is_number(valid) or value >= 0))


def by_name(table: Mapping[str, Any]) -> dict[str, Any]:
    return {name: held for names, held in table.items() for name in names.split()}


ANYTHING, NOTHING = users.returns(True), users.returns(False)
# By the names of arguments: a valid example and a law, of the number where it is one; without a law it has to be alike.
ARGUMENTS: dict[str, tuple[Any, ...]] = by_name({
    "keep mass min_loss_perc capacity scale_factor": (0.5, lambda v: 0 < v <= 1), "end": (0.75, lambda v: 0 < v <= 1),
    "top bottom smoothing min_keep floor full_after min_sample_perc": (0.25, lambda v: 0 <= v <= 1),
    "scale tau": (0.5, lambda v: 0 < v < 1), "prune start": (0.25, lambda v: 0 <= v < 1), "ignore_index": (0, isfinite),
    "progress gate at_least first last": (0.5, isfinite), "seconds tolerance": (0.5, lambda v: 0 < v < inf),
    "recent multiple_of total_steps accumulate_to min_rows total epochs batch_rows": (3, lambda v: v >= 1),
    "staleness num_replicas rounds": (1, lambda v: v >= 1), "interrupt batch_index trained": (3, lambda v: v >= 0),
    "num_rows size": (N, lambda v: v == N), "seed rank": (0, lambda v: v >= 0), "beta": (3.0, lambda v: 0 <= v < inf),
    "index": (0, lambda v: -3 <= v < 3), "ids positions": (IDS, whole(N)), "classes": (IDS % 3, whole(N)),
    "rows": (ROWS, lambda t: TABLE["rows"](t) and t.tolist() == sorted({*t.tolist()})), "saved grads": (0,),
    "scores kept": (SCORES, floats(lambda t: t.ndim == 1)), "losses": (SCORES, floats(lambda t: t.shape == (N,))),
    "values": (torch.rand(N, 4), floats(lambda t: t.ndim > 0)), "input": (SCORES, lambda t: t.ndim > 0 and len(t) > 5),
    "weights": (torch.ones(N), floats(lambda t: t.isfinite().all())), "who": ("a part", ANYTHING), "field": ("ids",),
    "irreducible": (torch.rand(N), floats(lambda t: t.ndim == 1 and len(t) >= N)), "dtype": (torch.float32,),
    "logits": (torch.randn(N, 4), floats(lambda t: t.ndim > 1 and t.shape[1] > 0)), "history": (HISTORY,),
    "targets": (IDS % 4, lambda t: torch.iinfo(t.dtype) and whole(N, least=0, most=3)(t.long())),
    "features": (torch.rand(N, 5), lambda t: len(t) == N), "mask": (torch.ones(N), lambda t: len(t) in (1, N)),
    "counted": (None, lambda t: t.dtype == torch.bool and t.shape in ((N,), (N, 4))), "group trace": (None, NOTHING),
    "x reference": (torch.ones(N, 3, requires_grad=True), lambda given: isinstance(given, (nn.Module, Tensor))),
    "model": (MODEL, lambda model: plain(model)), "batch": (BATCH, lambda batch: plain(batch=batch)),
    "losses_fn function scorer": (losses_fn, lambda fn: plain(losses=fn)), "tick": (None, lambda tick: takes(tick, 2)),
    "selector": (rowprop.TopK(0.5), lambda given: takes(given, 2) and given(SCORES, CONTEXT).num_rows == N),
    "context": (CONTEXT, lambda given: all(len(column) == N for column in given.columns.values())),
    "outputs": ({"logits": SCORES[:, None]}, lambda given: is_dataclass(given) or isinstance(given, (Tensor, Mapping))),
    "loader": ([(IDS, BATCH)], lambda pairs: all(whole(len(b[0]))(ids) and plain(batch=b) for ids, b in pairs)),
    "parts": ([(0.0, 1.0), (0.5, schedule.Ramp(1.0, 0.5))],
              lambda parts: all(is_number(at) and (is_number(p) or takes(p, 1)) for at, p in parts)),
    "blocks": (["0", "1"], lambda names: isinstance(names, list) and {*names} <= {"0", "1", "2"}),
    "dataset": (["a", "b", "c"], lambda data: type(data) is not dict and data.__getitem__ and len(data) >= 0),
    "indices": ([0, 1], lambda places: all(-3 <= int(place) < 3 for place in places)),
    "engine": ("sliced", lambda engine: engine in engines.ENGINES or type(engine) in (engines.Sliced, engines.Masked)),
    "optimizer": ("sgd", lambda name: name in ("sgd", "momentum", "adam", "adamw")), "ranks": (distributed.Global(),),
    "generator": (torch.Generator().manual_seed(0),), "device": ("cpu", lambda name: name == "cpu"),
    "schedule": (schedule.Schedule(0.0, 1.0, 0),), "record": (SimpleNamespace(num_rows=N, kept_by_rank=(3,)),),
})  # fmt: skip
CALLS = by_name({"losses_fn function scorer": (MODEL, BATCH), "selector": (SCORES, CONTEXT)})

# Valid values and laws of their own, what methods are on.
PARTS = dict.fromkeys("scorer schedule history total_steps accumulate_to min_rows".split())
TOKENS = {**PARTS, "unit": "token", "losses_fn": users.token_losses}
TOKENS |= {"laws": {"losses_fn": lambda function: plain(losses=function, dims=3)}}
TABLE = {"rows": whole(least=0, most=N - 1), "num_rows": lambda n: type(n) is int and 0 <= n <= 10**6}
HANDED_ON = {"function": lambda function: takes(function, 2), "batch": ANYTHING, "model": ANYTHING}
FRACTIONS = {"keep": lambda keep: all(0 < one < 1 for one in (keep if isinstance(keep, list) else [keep]))}
CHOSEN = {"history": ANYTHING, "progress": lambda v: 0 <= v <= 1, "rows": whole(least=-N, most=N - 1)}
ENTRIES: dict[str, dict[str, Any]] = by_name({
    "MultipleOf OverAll PerClass ReducibleLoss": {"selector": MEMORY}, "Context": {"laws": CHOSEN},
    "Selection": {"weights": torch.full((3,), 1 / 3), "laws": {"num_rows": TABLE["num_rows"]}},
    "selector": {"function": users.returns(SOME, 1), "laws": {"function": lambda fn: fn(SCORES).num_rows == N}},
    "LossHistory": {"laws": {"ids": TABLE["rows"], **TABLE}}, "Thinning": {"on": thinning},
    "pick": {"laws": {"rows": lambda rows: SCORES[rows].ndim == 1}}, "num_rows": {"laws": {"batch": ANYTHING}},
    "rowwise": {"outputs": 0, "laws": dict.fromkeys(["outputs", "saved", "grads"], ANYTHING)},
    "find_zeros": {"laws": {"model": lambda model: isinstance(model, nn.Module)}}, "composer": {"scale_factor": 1.0},
    "profile": {"rounds": 1},
    "verify": {"laws": {**FRACTIONS, "seed": lambda n: type(n) is int}, "rows": None, "tolerance": 1e-3},
    "plan": {"laws": FRACTIONS, "seconds": 0.2}, "take": {"laws": {"batch": ANYTHING, **TABLE}},
    "rho1": {**TOKENS, "reference": MODEL}, "high_entropy_tokens": {**TOKENS, "losses_fn": users.losses_and_entropies},
    "PruningSampler": {"laws": {"ids": whole(), "num_rows": lambda n: type(n) is int and 1 <= n <= N}, "trained": 6},
    "StaleScorer": {"laws": {"context": lambda given: isinstance(given, selection.Context)}},
    "WithIds": {"laws": {"index": lambda place: -3 <= int(place) < 3}}, "score_without_graph": {"laws": HANDED_ON},
    "Downscaled": {"laws": HANDED_ON, "function": users.brightness, "batch": (torch.zeros(N, 3, 4, 4), IDS)},
    "thin": {"laws": {"model": lambda model: isinstance(model, nn.Sequential)}, "model": blocks(), "keep": None},
    "SelectiveBackprop": {"selector": MEMORY, "accumulate_to": None}, "per_row_mean": {"mask": torch.ones(N, 4)},
}) | {
    "rho1, remembered": {**TOKENS, "reference": torch.rand(N, 4)}, "SelectiveBackprop, tokens": TOKENS,
    "LossHistory, any ids": {"laws": {"ids": whole(), **TABLE}, "num_rows": None},
    "SelectiveBackprop, recompute": {**PARTS, "engine": "recompute", "selector": selection.PerClass(MEMORY)},
    "SelectiveBackprop, masked": {**PARTS, "engine": "masked"}, "infobatch": {"laws": TABLE},
    "SelectiveBackprop, sampler": {**PARTS, "history": SAMPLER},
}  # fmt: skip
FOR_TYPES = dict.fromkeys("LossHistory NDArray PruningSampler Group Selector".split(), list)  # for a type checker only
# What the step checks where a losses function gives it; for the library's own use; protocols; made by the library.
UNTRIED = """Scored map_tensors tensors possible_sizes keep_at kept_losses share Selector KnownKeep Stateful Engine
ThinRecord Plan Verification Record""".split()


class Argument(NamedTuple):
    """What makes the valid example; what is no mistake; bad values by their names; what draws more of them."""

    valid: Made
    law: Law
    bad: Callable[[], dict[str, Made]]
    drawn: Any = FREE


class Door(NamedTuple):
    """What is called, its arguments, and what makes the object that a method is called on."""

    call: Callable[..., Any]
    arguments: Mapping[str, Argument]
    on: Made | None = None

    def example(self, *on: Any) -> Any:
        return self.call(*on, **{name: each.valid() for name, each in self.arguments.items()})


def public() -> dict[str, Any]:
    """Every public function and class by its name, but those that are not tried."""
    held = [held for space in namespaces() if space.__name__.count(".") < 2 for held in names_of(space).values()]
    calls = [each for each in (*held, count_step, profile) if callable(each) and each.__name__ not in UNTRIED]
    return {each.__name__: each for each in calls if not (isinstance(each, type) and issubclass(each, Exception))}


def methods(kind: type) -> list[str]:
    """The public methods that are written in this package."""
    special = "__call__", "__iter__", "__len__", "__getitem__", "__getitems__"
    names = [name for name in dir(kind) if (name in special or not name.startswith("_")) and name not in UNTRIED]
    return [name for name in names if (getattr(getattr(kind, name), "__module__", None) or "").startswith("rowprop")]


def arguments(target: Any, entry: Mapping[str, Any]) -> dict[str, Argument]:
    """The arguments of a callable, each with its valid example and its law."""
    taken = inspect.signature(target, eval_str=True, locals=FOR_TYPES).parameters.values()
    return {each.name: argument(each, entry) for each in taken if each.name != "self" and "VAR" not in each.kind.name}


def argument(each: inspect.Parameter, entry: Mapping[str, Any]) -> Argument:
    """The valid example of an argument, and its law: by the entry, by its name, or by its annotation."""
    kinds = get_args(each.annotation | None)
    words = [word for kind in kinds if get_origin(kind) is Literal for word in get_args(kind)]
    words += [True, False] * (bool in kinds)
    if not words and each.name not in {**ARGUMENTS, **entry}:
        raise LookupError(f"the catalogue has no example of the argument {each.name}")
    usual, *laws = ARGUMENTS.get(each.name, words[:1] or (None,))
    valid, own = entry.get(each.name, usual), entry.get("laws", {}).get(each.name)
    among = lambda value: any(type(value) is type(word) and value == word for word in words)  # noqa: E731
    usual_law = [*laws, among][0] if laws or words else partial(alike, usual if valid is None else valid)

    def law(value: Any) -> bool:
        if value is None and (each.default is None or type(None) in get_args(each.annotation)):
            return True
        if not own and laws and {int, float} & {*kinds}:  # a schedule may stand for a number that is none of a count
            value = value(0.5) if callable(value) and Callable in map(get_origin, kinds) else value
            return type(value) in (int, float if float in kinds else int) and usual_law(value)
        return (own or usual_law)(value)

    call = CALLS.get(each.name) if takes(valid, 2) else (SCORES,)  # by a function of scores alone
    make = partial(copy.deepcopy, valid)
    return Argument(make, law, partial(bad, make, call if callable(valid) and each.name in CALLS else None))


def saved(on: Made) -> Argument:
    """The state of an object, at another moment of its life than the one that it is loaded into."""
    state = cache(lambda: use(on()).state_dict())
    make = lambda: copy.deepcopy(state())  # noqa: E731
    return Argument(make, lambda value: alike(state(), value), partial(bad, make))


@cache
def doors() -> dict[str, Door]:
    """Every public callable with its arguments, and the methods of what a class makes of its valid example."""
    there, found = public(), dict[str, Door]()
    special = {name.partition(",")[0] for name in ENTRIES}
    for name, entry in {**{name: {} for name in sorted(there.keys() - special)}, **ENTRIES}.items():
        base, comma, variant = name.partition(",")
        target, on = there[base], entry.get("on")
        if on is None:
            found[name] = Door(partial(first_use, target), arguments(target, entry))
            on = found[name].example
        for method in methods(target) if isinstance(target, type) else ():
            held = getattr(target, method)
            of_class, given = inspect.ismethod(held), arguments(held, {"state": None, **entry})
            given = {"state": saved(on)} if "state" in given else given
            call = partial(first_use, held if of_class else method)
            found[f"{base}.{method}{comma}{variant}"] = Door(call, given, None if of_class else on)
    return found


def first_use(make: Callable[..., Any] | str, *on: Any, **given: Any) -> Any:
    """Use what a callable returns; a context that a method returns is of other rows."""
    result = make(**given) if callable(make) else getattr(on[0], make)(**given)
    return result if on and isinstance(result, selection.Context) else use(result, given.get("model", given.get("x")))


# The command line: each option is an argument that gets bad texts, in a folder with other people's files.
FILES = by_name({
    "notes.txt results.json report.html settings.json runs/a.json empty.py elsewhere/notes": "somebody's",
    "theirs/results.json theirs/runs/events.out theirs/notes.txt theirs/settings.json odd/runs": "months of work",
    "odd/settings.json/file odd/results.json/file odd/report.html/file": "a folder",
    "ends.py": "import sys\nsys.exit(0)\n", "broken.py": "def make(:\n", "bytes.py": "\0\0", "empty/.keep": "",
})  # fmt: skip
GIVEN: list[Any] = [None]
# What texts name: a factory of whatever the running case asks for, one of a model alone, and one of data.
given, alone = partial(GIVEN.__getitem__, 0), partial(nn.Linear, 3, 2)
rows = partial(copy.deepcopy, (torch.randn(48, 3), torch.arange(48) % 2, torch.randn(16, 3), torch.arange(16) % 2))


def numbers(law: Law) -> Law:
    return lambda text: all(law(float(part)) for part in text.split(","))


TEXTS = r"""a -1 -0.5 0 0.5 1 1.0 2 1.5 nan inf -inf 1e300 1e-300 true None [/foo] [red]x[/] ü ../.. /dev/null 0.25, ,
$HOME \ %s meta cuda:99 int64 float8_e4m3fn Tensor 8x3 1x3 0x3 -8x3 8x 8x5 8X3 99999999999x3 sliced SLICED random,random
random@fast infobatch+ ends.py:rows hostile_cases:given os:getcwd cpu float64 9999999999999999999999999""".split()
TEXTS += ["", " ", "a b", "a\nb", "x" * 5000, "\u202e", "\ud800"]
MODELS = """: :alone hostile_cases hostile_cases: nothing:alone nothing.py:alone hostile_cases:nothing [/foo]:a
broken.py:make ends.py:make empty.py:make bytes.py:make theirs:make /dev/null:make torchvision/ torchvision/[/foo]
os:getcwd hostile_cases:alone:alone sys:exit builtins:dict builtins:input hostile_cases:FILES
hostile_cases:alone hostile_cases:option""".split()
OF_ITS_OWN = {  # texts for some options alone; into the first ones of ``out`` and ``trace`` nothing must be written
    "out": ["", *"notes.txt/x /dev/full /proc/x loop notes.txt /dev/null odd dangling/x".split(), "x" * 300],
    "trace": ["", *"notes.txt/x /dev/full /proc/x loop . theirs nowhere/x".split()],
    "flags": ["--nothing", "extra", "--seed", "--json --json=5", "--resume --fresh"],
    "command": ["", "nothing", "--nothing", "verify", "flops", "profile", "plan"],
}
# What is no mistake, by option: texts, or a law.
RIGHT = by_name({
    "batchnorm attention unit optimizer data methods": [], "engine": ["sliced"], "dtype": ["float64"],
    "device": ["cpu"], "input_shape": ["8x3", "1x3"], "trace": ["new.json", "/dev/null"], "data_dir": lambda text: True,
    "out": ["new folder", *"new new/deep/er . theirs empty ./new/ [red]x[/] ü linked".split()], "model": [],
    "seeds batch rounds epochs": numbers(lambda n: n >= 1), "seed": numbers(lambda n: n >= 0),
    "lr seconds": numbers(lambda n: 0 < n < inf), "keep": numbers(lambda n: 0 < n <= 1),
    "threads": numbers(lambda n: 1 <= n <= 9), "train_rows": numbers(lambda n: 2 <= n <= 48),
    "flags": ["--json", "--help"], "command": ["--help", "compare"],
})  # fmt: skip
LONG = "rounds", "epochs", "seeds", "seconds"  # so many take as long as they take
COMPARE = "data=hostile_cases:rows model=hostile_cases:alone methods=random epochs=1 batch=16 seeds=1 device=cpu"
BASE: dict[str, dict[str, Any]] = {
    "verify": {}, "flops": {}, "profile": {"rounds": "1"}, "plan": {"rounds": "1", "keep": "0.5"},
    "compare": {"out": "made"} | dict(pair.split("=") for pair in COMPARE.split()),
}  # fmt: skip
WORDS = st.text(max_size=12).filter(lambda text: not fits(float, text)).map(lambda text: (repr(text), lambda: text))


def option(command: str, name: str, valid: str | None = None) -> Argument:
    """Texts for one option; every option of a command has to have its law here."""
    if name == "model" and command != "compare":  # places of models that are none, and what a factory may return
        made = partial(copy.deepcopy, (MODEL, BATCH, losses_fn))
        law = lambda made: plain(*made) or (command == "flops" and not isinstance(made[1], tuple))  # noqa: E731
        return Argument(made, law, lambda: {spec: partial(str, spec) for spec in MODELS} | bad(made))
    right = ["cpu", "meta"] if (command, name) == ("flops", "device") else RIGHT[name]  # a count computes nothing
    words = [text for text in TEXTS if name not in LONG or not fits(lambda text: float(text) > 2, text)]
    words = OF_ITS_OWN[name] + right if name in OF_ITS_OWN else words
    named = [(f"{word[:50]!a}", partial(str, word)) for word in words]
    drawn = st.sampled_from(named) if name in OF_ITS_OWN else WORDS
    law = right if callable(right) else lambda text: text.strip() in right
    return Argument(lambda: BASE.get(command, {}).get(name, valid), law, lambda: dict(named), drawn)


def command_doors() -> dict[str, Door]:
    """Every command with its options and flags; a comparison in a folder that is not empty."""
    found: dict[str, Door] = {}
    for command in BASE:
        taken = inspect.signature(getattr(cli, command)).parameters.values()
        given = {each.name: option(command, each.name) for each in taken if each.default is not False}
        found[f"rowprop {command}"] = Door(partial(run, command), given | {"flags": option(command, "flags", "")})
    for flag in ("--resume", "--fresh"):
        found[f"rowprop compare {flag}"] = Door(partial(run, "compare", flags=flag), {"out": option("compare", "out")})
    return found | {"rowprop": Door(run, {"command": option("", "command", "--version")})}


def contents() -> dict[Path, object]:
    """What lies in the working directory."""
    paths = [path for path in Path().rglob("*") if "__pycache__" not in path.parts]
    return {path: path.readlink() if path.is_symlink() else path.is_dir() or path.read_bytes() for path in paths}


def run(command: str, flags: str = "", **options: Any) -> None:
    """Run one command in this process, and judge its exit code, its words and what it has done to the files."""
    given = {name: text for name, text in {**BASE.get(command, {}), **options}.items() if text is not None}
    args = [command] * bool(command)
    if "model" in given and command != "compare":
        GIVEN[:] = [given.pop("model")]
        factory = "alone" if "input_shape" in given else "given"
        args += [GIVEN[0] if isinstance(GIVEN[0], str) else f"hostile_cases:{factory}"]
    args += [word for name, text in given.items() for word in ("--" + name.replace("_", "-"), text)] + flags.split()
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(terminal, "QUIET_S", inf)  # no line of progress on a slow machine
        for path, text in FILES.items():
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            Path(path).write_text(text)
        for link, target in {"linked": "elsewhere", "dangling": "nowhere", "loop": "loop"}.items():
            Path(link).symlink_to(target)
        before = contents()
        done = CliRunner().invoke(cli.app, args)
        after = contents()
    out = given.get("out", given.get("trace", "nowhere")) or "nowhere"  # beside it nothing may differ
    own = Path(out.replace("linked", "elsewhere"))
    differing = {path for path, _ in before.items() ^ after.items()}
    made = {path for path in after.keys() - before if path.is_relative_to(own) or own.is_relative_to(path)}
    assert differing <= made, f"changed or made: {[*map(str, differing - made)]}"
    torch.set_num_threads(1)  # a command has its process for itself
    said = (done.stderr.strip().splitlines() or [""])[-1][:300]
    assert done.exception is None or isinstance(done.exception, SystemExit), f"a raw {done.exception!r}"
    assert "Traceback (most recent" not in done.output, f"a traceback: {said}"
    assert done.exit_code in (0, 2), f"exit code {done.exit_code}: {said}"
    if done.exit_code == 2:
        assert said or not args, "exit code 2 without a word"
        told = [line for line in done.stderr.splitlines() if line.startswith("rowprop: ")]
        assert len(told) < 2, f"one sentence was needed: {done.stderr[:200]!r}"
        raise rowprop.InvalidInput(said)
    if "--json" in args and "--help" not in args:
        assert fits(lambda text: isinstance(json.loads(text), dict), done.stdout), f"no JSON: {done.stdout[:80]!r}"
