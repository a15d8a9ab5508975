"""The hostile trial: every public callable and every command is given bad values of every kind, one at a time.

Allowed are a result, where the value is no mistake, and a :class:`rowprop.errors.RowpropError`; of the command line the
exit codes 0 and 2 with a sentence. Everything else is a finding: a raw traceback, a bad value that is accepted
silently, a refusal that has changed what it refused, a setting of torch or of the warnings that stays changed, a file
changed outside of ``--out``. What takes more than :data:`LIMIT_S` seconds ends the trial, behind the line of the
argument before. ``hostile_values.py`` has the values, and ``hostile_cases.py`` says what is valid.
"""

from __future__ import annotations

import argparse
import faulthandler
import functools
import random
import sys
import traceback
import warnings
from collections import Counter, defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, given, settings

import hostile_values
import rowprop
from hostile_cases import Argument, Door, command_doors, doors
from hostile_values import Made, Named
from rowprop.errors import RowpropError

LIMIT_S = 120
DRAWN = 15  # numbers, texts, tensors and functions for each argument, beside the values that have a name
SEVERAL = 3  # inputs of each callable with several bad values at a time
RIGHT = ("result", "refused", "own error")
OURS = str(Path(rowprop.__file__).parent), str(Path(__file__).parent)
QUIET = settings(
    phases=[Phase.generate], database=None, deadline=None, derandomize=True, suppress_health_check=[*HealthCheck]
)
SETTINGS = "is_grad_enabled get_default_dtype get_num_threads are_deterministic_algorithms_enabled".split()


def process_settings() -> dict[str, object]:
    """The settings of the process that a call must leave alone."""
    return {name: getattr(torch, name)() for name in SETTINGS} | {"warning filters": list(warnings.filters)}


def memory(held: Any) -> Any:
    """What an object remembers, bit for bit."""
    if isinstance(held, torch.Tensor):
        return held.dtype, held.shape, held.numpy().tobytes()
    if isinstance(held, Mapping):
        return {key: memory(each) for key, each in held.items()}
    return memory(held.state_dict()) if hasattr(held, "state_dict") else repr(held)


def attempt(door: Door, bad: Mapping[str, Made]) -> tuple[str, str]:
    """Call with bad values in the valid example: one of RIGHT or a finding, and its detail."""
    torch.default_generator.manual_seed(0)  # torch.manual_seed formats the stack, for devices that are not there
    on = [] if door.on is None else [door.on()]
    values = {name: bad.get(name, each.valid)() for name, each in door.arguments.items()}
    before, process = [*map(memory, on)], process_settings()
    faulthandler.dump_traceback_later(LIMIT_S, exit=True)
    outcome, detail = "result", ""
    try:
        door.call(*on, **values)
    except (Exception, SystemExit) as error:
        outcome, detail = told(error)
    faulthandler.cancel_dump_traceback_later()
    after = process_settings()
    torch.set_grad_enabled(True)
    if changed := [name for name in after if after[name] != process[name]]:
        return "changed", ", ".join(changed)
    if outcome == "refused" and before != [*map(memory, on)]:
        return "changed", "was refused, but its state is another one"
    if outcome != "result" and not bad:
        return "stale", f"the valid example: {outcome}, {detail}"
    if outcome == "result" and len(bad) == 1:  # of several, one may hide the other
        (name, make), *_ = bad.items()
        return ("result", "") if door.arguments[name].law(make()) else ("silent", "accepted")
    return outcome, detail


def told(error: BaseException) -> tuple[str, str]:
    """Whether it was raised in the user's code, who gets it as it is; in one line, with the last places on its way."""
    if isinstance(error, RowpropError):
        return "refused", str(error)
    ours = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename.startswith(OURS)]
    own = isinstance(error, Exception) and any(frame.filename == hostile_values.__file__ for frame in ours)
    asked = ours[-1].name.startswith("__getitem") and isinstance(error, (TypeError, IndexError))  # as sequences do
    way = " > ".join(f"{Path(frame.filename).name}:{frame.lineno}" for frame in ours[-2:])
    said = f"{type(error).__name__} [{way}] {(str(error).splitlines() or [''])[0][:150]}"
    return "own error" if own or asked else "wrong" if isinstance(error, AssertionError) else "traceback", said


@functools.cache
def values_of(argument: Argument) -> dict[str, Made]:
    """The bad values of an argument by their names, with some that are drawn, the same ones every time."""
    drawn: list[Named] = []
    given(argument.drawn)(settings(QUIET, max_examples=DRAWN)(lambda each: drawn.append(each)))()
    return argument.bad() | dict(drawn)


def inputs(door: Door, argument: str) -> dict[str, dict[str, Made]]:
    """By their names the inputs with one bad argument; under the empty name those with none, and with several."""
    if argument:
        return {words: {argument: make} for words, make in values_of(door.arguments[argument]).items()}
    lots, found = random.Random(0), {"none": dict[str, Made]()}
    for _ in range(SEVERAL if len(door.arguments) > 1 else 0):
        some = lots.sample([*door.arguments], lots.randint(2, len(door.arguments)))
        words = {name: lots.choice([*values_of(door.arguments[name])]) for name in some}
        found[str(words)] = {name: values_of(door.arguments[name])[said] for name, said in words.items()}
    return found


def trial(only: str = "") -> tuple[int, list[str]]:
    """Give the callables, commands and arguments whose name contains ``only`` every input; how many, the findings."""
    if not dist.is_initialized():  # the parts for several ranks ask for a group
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    warnings.simplefilter("ignore")
    attempt(doors()["SelectiveBackprop"], {})  # what PyTorch imports now adds filters of its own
    total, found = 0, list[str]()
    for name, door in {**doors(), **command_doors()}.items():
        for argument in ["", *door.arguments]:
            if only not in f"{name} {argument}":
                continue
            counts, findings = Counter[str](), defaultdict[str, list[str]](list)
            for words, bad in inputs(door, argument).items():
                outcome, detail = attempt(door, bad)
                counts[outcome] += 1
                if outcome not in RIGHT:
                    findings[f"{outcome}: {detail[:120]!a}"].append(words)
            total += counts.total()
            print(f"{name} {argument:50}", ", ".join(f"{n} {outcome}" for outcome, n in counts.items()), flush=True)
            for what, on in findings.items():
                found.append(f"{name} {argument}: {what}, with {len(on)}, e.g. {'; '.join(on[:8])}")
                print(found[-1], flush=True)
    return total, found


def main() -> int:
    parser = argparse.ArgumentParser(prog="nox -s hostile", description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="Only callables, commands and arguments whose name contains this.")
    torch.set_num_threads(1)
    tried, found = trial(parser.parse_args().only)
    print(f"{tried} inputs, {len(found)} findings.")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
