"""The hostile trial: every public callable and every command is given bad values of every kind, one at a time.

Allowed are a result, where the value is no mistake, and a :class:`rowprop.errors.RowpropError`; of the command line the
exit codes 0, 1 (only of ``verify``) and 2 with a sentence. Everything else is a finding: a raw traceback, a bad value
that is accepted silently, a refusal that has changed what it refused, a setting of torch or of the warnings that stays
changed, more than :data:`LIMIT_S` seconds, a file changed outside of ``--out``. ``hostile_cases.py`` and
``hostile_commands.py`` are the catalogue; a public name that has no entry there is a finding too.
"""

from __future__ import annotations

import argparse
import faulthandler
import importlib
import inspect
import multiprocessing
import os
import random
import re
import signal
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from hostile_cases import DOORS, NO_DOORS, Door, Injected
from hostile_commands import attempt_command, attempt_in_shell, cases, shell_cases
from rowprop.errors import RowpropError

LIMIT_S = 20
FORK = multiprocessing.get_context("fork")
SHOWN = 12  # inputs that a finding names
PAIRS = 500  # inputs with two bad values at a time
NAMESPACES = (
    """batch engines recipes selection scoring history schedule distributed step oracle thinning errors cost""".split()
)
COST = ("count.count_step", "profile.profile", "flops.count_flops")
SPECIAL = ("__call__", "__iter__", "__len__", "__getitem__", "__getitems__")


class Hang(BaseException):
    """An input took too long."""


@dataclass
class Findings:
    """The outcomes, by door.

    Attributes:
        counts: Per door, how many inputs gave a result, were refused, raised the user's own error, or are findings.
        found: Door, input, what is wrong with it.
    """

    counts: dict[str, Counter[str]] = field(default_factory=dict)
    found: list[tuple[str, str, str]] = field(default_factory=list)

    def note(self, door: str, given: str, outcome: str, detail: str = "") -> None:
        self.counts.setdefault(door, Counter())[outcome] += 1
        if outcome not in ("result", "refused", "own error"):
            self.found.append((door, given, f"{outcome}: {detail}"))

    @property
    def inputs(self) -> int:
        return sum(counts.total() for counts in self.counts.values())

    def told(self) -> Iterator[str]:
        """Each finding once, with all inputs of an argument that lead to it."""
        alike: dict[tuple[str, str, str], list[tuple[str, str]]] = {}
        for door, given, what in self.found:
            library = "=" in given and " and " not in given and not door.startswith("rowprop")
            argument, _, kind = given.partition("=") if library else ("", "", given)
            alike.setdefault((door, argument, re.sub(r"(\w+Error): .*\[", r"\1 [", what)), []).append((kind, what))
        for (door, argument, _), inputs in alike.items():
            kinds = [kind for kind, _ in inputs]
            more = f", and {len(kinds) - SHOWN} more" if len(kinds) > SHOWN else ""
            yield f"{door} {argument}: {inputs[0][1]}\n    with {', '.join(kinds[:SHOWN])}{more}"

    def table(self) -> Iterator[str]:
        columns = (
            "result",
            "refused",
            "own error",
            "traceback",
            "silent",
            "changed",
            "hang",
            "death",
            "files",
            "code",
            "poor",
            "stale",
        )
        yield f"{'':46}{'inputs':>8}" + "".join(f"{column:>10}" for column in columns)
        total = sum(self.counts.values(), Counter[str]())
        for name, counts in [*sorted(self.counts.items()), ("all", total)]:
            cells = (f"{counts[column] or '':>10}" for column in columns)
            yield f"{name[:45]:46}{counts.total():>8}" + "".join(cells)


# --- the public names ------------------------------------------------------------------------------------------------


def public() -> dict[str, Callable[..., Any]]:
    """Every public callable by its name in the catalogue: functions, classes, and the methods of these."""
    found: dict[str, Callable[..., Any]] = {}
    seen: set[int] = set()
    top = importlib.import_module("rowprop")
    entries = [(name, getattr(top, name)) for name in top.__all__]
    for space in NAMESPACES:
        module = importlib.import_module(f"rowprop.{space}")
        made_here = [name for name, held in vars(module).items() if getattr(held, "__module__", "") == module.__name__]
        public_here = getattr(module, "__all__", [name for name in made_here if not name.startswith("_")])
        entries += [(f"{space}.{name}", getattr(module, name)) for name in public_here]
    for path in COST:
        home, _, name = path.rpartition(".")
        entries.append((f"cost.{name}", getattr(importlib.import_module(f"rowprop.cost.{home}"), name)))
    for name, thing in entries:
        if isinstance(thing, ModuleType):
            assert name in NAMESPACES, f"rowprop.{name} is public, but no namespace that is looked into"
            continue
        error = isinstance(thing, type) and issubclass(thing, Exception)
        if id(thing) in seen or error or not (callable(thing) or name in NO_DOORS):
            continue
        seen.add(id(thing))
        short = re.sub(r"^(selection|step|oracle|thinning)\.", "", name)
        found[short] = thing
        reached = any(door.startswith(f"{short}.") for door in DOORS)
        if isinstance(thing, type) and (short not in NO_DOORS or reached):
            found |= {f"{short}.{method}": call for method, call in _methods(thing)}
    return found


def _methods(kind: type) -> Iterator[tuple[str, Callable[..., Any]]]:
    for name in dir(kind):
        home = next(base for base in kind.__mro__ if name in vars(base))
        ours = home.__module__.startswith("rowprop")
        if ours and (not name.startswith("_") or name in SPECIAL) and callable(getattr(kind, name)):
            yield name, getattr(kind, name)


def missing() -> Iterator[str]:
    """Public names and arguments that the catalogue has forgotten, and entries whose name is gone."""
    there = public()
    bases = {name.partition(",")[0] for name in DOORS}
    yield from (f"{name} is public but not in the catalogue" for name in there.keys() - bases - NO_DOORS.keys())
    yield from (f"{name} is in the catalogue but not public" for name in bases - there.keys())
    for name in there.keys() & DOORS.keys():
        parameters = inspect.signature(there[name]).parameters.values()
        taken = {each.name for each in parameters if each.kind is not each.VAR_KEYWORD} - {"self"}
        yield from (
            f"{name} takes {each}, which the catalogue does not give" for each in taken - {*DOORS[name].arguments}
        )
        yield from (f"{name} does not take {each}" for each in DOORS[name].arguments.keys() - taken)


# --- one input --------------------------------------------------------------------------------------------------------


@contextmanager
def limit(seconds: float) -> Generator[None]:
    """Raise :class:`Hang` in the block when it takes longer."""

    def ring(*_: object) -> None:
        raise Hang

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def settings() -> dict[str, object]:
    """The settings of the process that a call must leave alone."""
    return {
        "grad mode": torch.is_grad_enabled(),
        "default dtype": torch.get_default_dtype(),
        "threads": torch.get_num_threads(),
        "warning filters": list(warnings.filters),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }


def same(a: Any, b: Any) -> bool:
    """Whether two states hold the same, bit for bit."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.nan_to_num(), b.nan_to_num())
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and (a == b or a != a)


def state_of(thing: Any) -> Any:
    """The memory of an object."""
    return thing.state_dict() if hasattr(thing, "state_dict") else None


def attempt(door: Door, given: Mapping[str, Callable[[], Any]]) -> tuple[str, str]:
    """Make one call: ``"result"``, ``"refused"``, ``"own error"``, or a finding with its detail."""
    torch.manual_seed(0)
    on = () if door.on is None else (door.on(),)
    before = state_of(on[0]) if on else None
    process = settings()
    outcome, detail = "result", ""
    try:
        values = {name: make() for name, make in given.items()}
        door.call(*on, **values)
    except RowpropError as error:
        outcome, detail = "refused", str(error)
    except Injected:
        outcome = "own error"
    except Hang:
        raise
    except AssertionError as error:
        if error.__traceback__ is not None and _raised_in_catalogue(error):
            outcome, detail = "silent", f"a wrong result: {error}"
        else:
            outcome, detail = "traceback", _last(error)
    except BaseException as error:
        outcome, detail = "traceback", _last(error)
    if outcome == "refused" and on and not same(before, state_of(on[0])):
        outcome, detail = "changed", f"was refused, but its state is another one: {detail}"
    after = settings()
    if process != after:
        outcome, detail = "changed", ", ".join(name for name in after if after[name] != process[name])
        torch.set_grad_enabled(True)
    return outcome, detail


def _raised_in_catalogue(error: BaseException) -> bool:
    return traceback.extract_tb(error.__traceback__)[-1].filename.endswith("hostile_cases.py")


def _last(error: BaseException) -> str:
    """The error in one line, and the last lines of the library on its way."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "/rowprop/" in frame.filename]
    way = " > ".join(f"{frame.filename.rpartition('/')[2]}:{frame.lineno}" for frame in frames[-2:])
    said = (str(error).splitlines() or [""])[0]
    return f"{type(error).__name__}: {said[:150]} [{way}]"


# --- all inputs -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Input:
    """One call: its door, its text, its maker, and the only right answer where there is one."""

    door: str
    said: str
    run: Callable[[], tuple[str, str]]
    must: str | None = None


def one_at_a_time(names: list[str], argument: str | None) -> Iterator[Input]:
    """The valid example of each door, and then each bad value of each argument."""
    for name in names:
        arguments = DOORS[name].arguments
        valid = {each: given.valid for each, given in arguments.items()}
        yield Input(name, "the valid example", partial(attempt, DOORS[name], valid), "result")
        for each, given in arguments.items():
            for kind, make in given.values().items() if argument in (None, each) else ():
                call = partial(attempt, DOORS[name], valid | {each: make})
                yield Input(name, f"{each}={kind}", call, None if kind in given.fine else "refused")


def two_at_a_time(names: list[str], pairs: int, seed: int) -> Iterator[Input]:
    """Two random values for a random door; any answer is right, as each value may be fine beside the other."""
    draw = random.Random(seed)
    several = [name for name in names if len(DOORS[name].arguments) > 1]
    for _ in range(pairs if several else 0):
        name = draw.choice(several)
        arguments = DOORS[name].arguments
        bad = {each: draw.choice(sorted(arguments[each].values().items())) for each in draw.sample([*arguments], 2)}
        given = {each: argument.valid for each, argument in arguments.items()}
        said = " and ".join(f"{each}={kind}" for each, (kind, _) in bad.items())
        yield Input(name, said, partial(attempt, DOORS[name], given | {each: make for each, (_, make) in bad.items()}))


def commands(only: str) -> Iterator[Input]:
    """Every case of the command line."""
    for name, case in cases():
        if only in f"rowprop {name}":
            yield Input(f"rowprop {name}", case.said, partial(attempt_command, case), "refused" if case.bad else None)
    for name, case in shell_cases():
        if only in f"rowprop, {name}":
            yield Input(f"rowprop, {name}", case.said, partial(attempt_in_shell, name, case))


def answer(each: Input) -> tuple[str, str]:
    """The outcome of an input: right, or a finding with its detail."""
    try:
        with limit(LIMIT_S):
            outcome, detail = each.run()
    except Hang:
        outcome, detail = "hang", f"more than {LIMIT_S} s"
    except BaseException as error:
        outcome, detail = "traceback", _last(error)
    if each.must == "result" and outcome != "result":
        return "stale", f"{outcome}: {detail}"
    if each.must == "refused" and outcome == "result":
        return "silent", "accepted"
    return outcome, detail


def answers(inputs: list[Input]) -> Iterator[tuple[str, str]]:
    """The outcome of each input, in a process of its own, so that its death ends one input and not the trial."""
    begin = 0
    while begin < len(inputs):
        receiver, sender = FORK.Pipe(duplex=False)
        process = FORK.Process(target=_send_answers, args=(inputs[begin:], sender))
        process.start()
        sender.close()
        with receiver:
            for _ in inputs[begin:]:
                begin += 1
                silence = not receiver.poll(3 * LIMIT_S)
                if silence:
                    process.kill()
                try:
                    yield receiver.recv()
                except EOFError:
                    process.join()
                    what = "does not answer to signals" if silence else f"exit code {process.exitcode}"
                    yield ("hang" if silence else "death"), what
                    break
        process.join()


def _send_answers(inputs: list[Input], sender: Any) -> None:
    faulthandler.disable()
    with one_process(), warnings.catch_warnings(), Path(os.devnull).open("w") as devnull:
        os.dup2(devnull.fileno(), 2)
        warnings.simplefilter("ignore")
        for each in inputs:
            sender.send(answer(each))
    os._exit(0)  # past the clean-up, which belongs to the parent


# --- all of it --------------------------------------------------------------------------------------------------------


@contextmanager
def one_process() -> Generator[None]:
    """A process group of this process alone, which the parts for several ranks ask for."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def trial(
    only: str = "", *, part: str = "all", pairs: int = PAIRS, seed: int = 0, argument: str | None = None
) -> Findings:
    """Give the doors and commands whose names contain ``only`` every input of the catalogue."""
    findings = Findings()
    names = [name for name in DOORS if only in name]
    inputs: list[Input] = []
    if part != "commands":
        inputs += [*one_at_a_time(names, argument), *two_at_a_time(names, pairs, seed)]
    if part != "library":
        inputs += commands(only)
    for each, (outcome, detail) in zip(inputs, answers(inputs), strict=True):
        findings.note(each.door, each.said, outcome, detail)
    for name in missing():
        findings.note("the catalogue", name, "stale", "forgotten")
    return findings


def main() -> int:
    faulthandler.enable()
    parser = argparse.ArgumentParser(prog="nox -s hostile", description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="Only the callables and commands whose name contains this.")
    parser.add_argument("--part", default="all", choices=("all", "library", "commands"), help="What is tried.")
    parser.add_argument("--argument", default=None, help="Only this argument.")
    parser.add_argument("--pairs", type=int, default=PAIRS, help="Inputs with two bad values at a time.")
    parser.add_argument("--seed", type=int, default=None, help="Of these; default: another one each time, printed.")
    given = parser.parse_args()
    seed = random.SystemRandom().randrange(2**31) if given.seed is None else given.seed
    torch.set_num_threads(1)
    begin_s = time.monotonic()
    findings = trial(given.only, part=given.part, pairs=given.pairs, seed=seed, argument=given.argument)
    print("\n".join(findings.table()))
    print("\n".join(findings.told()))
    print(f"{findings.inputs} inputs, {len(findings.found)} findings, seed {seed}, {time.monotonic() - begin_s:.0f} s.")
    return 1 if findings.found else 0


if __name__ == "__main__":
    sys.exit(main())
