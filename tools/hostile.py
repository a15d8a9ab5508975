"""The hostile trial: every public callable and every command is given bad values of every kind, one at a time.

Allowed are a result, where the value is no mistake, and a :class:`rowprop.errors.RowpropError`; of the command line the
exit codes 0 and 2 with a sentence. All else is a finding: a raw traceback, a bad value that is accepted silently, a
refusal that has changed what it refused, a setting of the process that stays changed, a file changed outside ``--out``.
What takes more than :data:`LIMIT_S` seconds ends the trial, behind the line of the argument before. An argument of this
command, a part of a name, says what alone is tried. ``hostile_cases.py`` says what is valid.
"""

from __future__ import annotations

import faulthandler
import functools
import importlib
import random
import sys
import traceback
import warnings
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.internal.conjecture.providers import AVAILABLE_PROVIDERS, HypothesisProvider

import hostile_values
import rowprop
from hostile_cases import Argument, Door, command_doors, doors
from hostile_values import Named, fits
from rowprop.errors import RowpropError

LIMIT_S = 120
DRAWN = 15  # numbers, texts, tensors and functions for each argument, beside the values that have a name
SHARES = 0, 0.5, 0.5, 1  # of the arguments that are bad in inputs of each callable with several at a time
OURS = str(Path(rowprop.__file__).parent), str(Path(__file__).parent)
# It draws no constants, which are those of the modules that happen to be imported: the inputs are always the same.
Steady = type("Steady", (HypothesisProvider,), {"_maybe_draw_constant": lambda *_, **__: None})
AVAILABLE_PROVIDERS["steady"] = f"{__name__}.Steady"
QUIET = settings(phases=[Phase.generate], database=None, deadline=None, derandomize=True, backend="steady",
                 suppress_health_check=[*HealthCheck])  # fmt: skip
SETTINGS = "is_grad_enabled get_default_dtype get_num_threads are_deterministic_algorithms_enabled".split()


def memory(held: Any) -> Any:
    """What an object remembers, bit for bit."""
    if isinstance(held, torch.Tensor):
        return held.dtype, held.shape, held.numpy().tobytes()
    held = held.state_dict() if hasattr(held, "state_dict") else held
    return {key: memory(each) for key, each in held.items()} if isinstance(held, Mapping) else repr(held)


def kept_alone(on: list[Any]) -> dict[str, object]:
    """What a call must leave alone: settings of the process, and the state of the object."""
    found = {name: getattr(torch, name)() for name in SETTINGS} | {"warning filters": list(warnings.filters)}
    return found | {f"its state, {place}": memory(each) for place, each in enumerate(on)}


def attempt(door: Door, bad: Mapping[str, Named]) -> tuple[str, str]:
    """Call with bad values in the valid example: what came of it, and its detail."""
    torch.default_generator.manual_seed(0)  # torch.manual_seed formats the stack, for devices that are not there
    on = [] if door.on is None else [door.on()]
    values = {name: bad[name][1]() if name in bad else each.valid() for name, each in door.arguments.items()}
    before = kept_alone(on)
    faulthandler.dump_traceback_later(LIMIT_S, exit=True)
    outcome, detail = "result", ""
    try:
        door.call(*on, **values)
    except (Exception, SystemExit) as error:
        outcome, detail = told(error)
    faulthandler.cancel_dump_traceback_later()
    after = before | kept_alone(on if outcome == "refused" else [])
    torch.set_grad_enabled(True)
    if changed := [name for name in after if after[name] != before[name]]:
        return "changed", ", ".join(changed)
    if outcome != "result" and not bad:
        return "stale", f"the valid example: {outcome}, {detail}"
    one = bad if len(bad) == 1 else {}  # of several, one may hide the other
    if outcome == "result" and not all(fits(door.arguments[name].law, make()) for name, (_, make) in one.items()):
        return "silent", "accepted"
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
def values_of(argument: Argument) -> list[Named]:
    """The bad values of an argument, with some that are drawn, the same ones every time."""
    drawn: list[Named] = []
    given(argument.drawn)(settings(QUIET, max_examples=DRAWN)(lambda each: drawn.append(each)))()
    return [*(argument.bad() | dict(drawn)).items()]


def inputs(door: Door, argument: str) -> list[dict[str, Named]]:
    """The inputs with one bad argument; under the empty name one with none, and some with several."""
    if argument:
        return [{argument: each} for each in values_of(door.arguments[argument])]
    lots, values = random.Random(0), {name: values_of(each) for name, each in door.arguments.items()}
    return [{name: lots.choice(some) for name, some in values.items() if lots.random() < share} for share in SHARES]


def trial(only: str = "") -> tuple[int, list[str]]:
    """Give the callables, commands and arguments whose name contains ``only`` every input; how many, the findings."""
    if not dist.is_initialized():  # the parts for several ranks ask for a group
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    warnings.simplefilter("ignore")
    # What PyTorch and SciPy import at the first call adds warning filters.
    importlib.import_module("scipy.special")
    attempt(doors()["SelectiveBackprop"], {})
    total, found = 0, list[str]()
    for name, door in {**doors(), **command_doors()}.items():
        for argument in [each for each in ["", *door.arguments] if only in f"{name} {each}"]:
            tried = [(bad, *attempt(door, bad)) for bad in inputs(door, argument)]
            counts, total = Counter(outcome for _, outcome, _ in tried), total + len(tried)
            print(f"{name} {argument:50}", ", ".join(f"{n} {outcome}" for outcome, n in counts.items()), flush=True)
            for bad, outcome, detail in tried:
                if outcome not in ("result", "refused", "own error"):
                    words = ", ".join(f"{each}={said}" for each, (said, _) in bad.items())
                    found.append(f"{name} with {words or 'valid arguments'}: {outcome}: {detail}")
                    print(found[-1], flush=True)
    return total, found


if __name__ == "__main__":
    torch.set_num_threads(1)
    inputs_tried, all_found = trial(" ".join(sys.argv[1:]))
    print(f"{inputs_tried} inputs, {len(all_found)} findings.")
    sys.exit(bool(all_found))
