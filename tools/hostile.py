"""The hostile trial: every public callable and every command is given bad values of every kind, one at a time.

Allowed are a result, where the value is no mistake, and a :class:`rowprop.errors.RowpropError`; of the command line the
exit codes 0 and 2 with a sentence. Everything else is a finding: a raw traceback, a bad value that is accepted
silently, a refusal that has changed what it refused, a setting of torch or of the warnings that stays changed, more
than :data:`LIMIT_S` seconds, a file changed outside of ``--out``. See ``hostile_values.py`` for the values;
``hostile_cases.py`` and ``hostile_commands.py`` say what is valid. A line is printed for each argument that is done, so
that the death of the process is seen behind the last one.
"""

from __future__ import annotations

import argparse
import faulthandler
import re
import signal
import sys
import traceback
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

import hostile_values
import rowprop
from hostile_cases import Door, doors
from hostile_commands import command_doors
from hostile_values import Named
from rowprop.errors import RowpropError

LIMIT_S = 60
DRAWN = 12  # numbers, texts, tensors and functions for each argument, beside the values that have a name
SEVERAL = 3  # inputs of each callable with several bad values at a time
# What src has to mend: sparse tensors, a state on meta, an image without a side.
KNOWN = "[sS]parse|recent: on meta|Downscaled.__call__ batch: .*no columns"
RIGHT = ("result", "refused", "own error", "known")
QUIET = settings(phases=[Phase.generate], database=None, deadline=None, suppress_health_check=[*HealthCheck])
SETTINGS = "is_grad_enabled get_default_dtype get_num_threads are_deterministic_algorithms_enabled".split()
Given = Mapping[str, Named]  # the bad values of an input, by argument
Outcome = tuple[str, str]  # one of RIGHT or a finding, and its detail


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


def attempt(door: Door, drawn: Given) -> Outcome:
    """Call with bad values in the valid example."""
    torch.default_generator.manual_seed(0)  # torch.manual_seed formats the stack, for devices that are not there
    on = [] if door.on is None else [door.on()]
    before, process = [*map(memory, on)], process_settings()
    faulthandler.dump_traceback_later(3 * LIMIT_S, exit=True)  # of what does not answer to signals
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.alarm(LIMIT_S)
    outcome, detail = "result", ""
    try:
        values = {name: argument.valid() for name, argument in door.arguments.items() if name not in drawn}
        door.call(*on, **values, **{name: make() for name, (_, make) in drawn.items()})
    except RowpropError as error:
        outcome, detail = "refused", str(error)
    except KeyboardInterrupt:
        if signal.alarm(0):  # seconds were left: it is the user's
            raise
        outcome, detail = "hang", f"more than {LIMIT_S} s"
    except BaseException as error:
        outcome, detail = told(error)
    finally:
        signal.alarm(0)
        faulthandler.cancel_dump_traceback_later()
    if outcome == "refused" and before != [*map(memory, on)]:
        return "changed", "was refused, but its state is another one"
    if (after := process_settings()) != process:
        torch.set_grad_enabled(True)
        return "changed", ", ".join(name for name in after if after[name] != process[name])
    if not drawn and outcome != "result":
        return "stale", f"the valid example: {outcome}, {detail}"
    if outcome == "result" and not all(door.arguments[name].law(make()) for name, (_, make) in drawn.items()):
        return ("silent", "accepted") if len(drawn) == 1 else ("result", "of several, one may hide the other")
    return outcome, detail


def told(error: BaseException) -> Outcome:
    """Whether it was raised in the user's code, who gets it as it is; in one line, with the last places on its way."""
    homes = Path(rowprop.__file__).parent, Path(__file__).parent
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if any(home in Path(frame.filename).parents for home in homes)]
    asked = ours[-1].name.startswith("__getitem") and isinstance(error, (TypeError, IndexError))  # as sequences do
    own = isinstance(error, Exception) and any(frame.filename == hostile_values.__file__ for frame in ours)
    way = " > ".join(f"{Path(frame.filename).name}:{frame.lineno}" for frame in ours[-2:])
    if isinstance(error, AssertionError) and Path(ours[-1].filename).parent == homes[1]:
        return "wrong", str(error)
    said = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:150]} [{way}]"
    return "own error" if own or asked else "traceback", said


def inputs(name: str, door: Door, only: str, number: int) -> Iterator[tuple[str, list[Given]]]:
    """By argument, and under the empty name for the valid example and several arguments: the inputs of a door."""
    bad = {argument: given.bad() for argument, given in door.arguments.items() if only in f"{name} {argument}"}
    for argument, values in bad.items():
        free = drawn(door.arguments[argument].drawn, DRAWN, number)
        yield argument, [{argument: value} for value in [*values, *free]]
    if only in f"{name} ":
        several = {
            argument: st.sampled_from(values) | door.arguments[argument].drawn for argument, values in bad.items()
        }
        yield "", [{}, *drawn(st.fixed_dictionaries({}, optional=several), SEVERAL * (len(bad) > 1), number)]


def drawn(strategy: st.SearchStrategy[Any], many: int, number: int) -> list[Any]:
    """So many values of a strategy, the same for the same number."""
    found: list[Any] = []
    if many:
        seed(number)(settings(QUIET, max_examples=many)(given(strategy)(lambda each: found.append(each))))()
    return found


def trial(only: str = "", number: int = 0) -> tuple[int, list[str]]:
    """Give the callables, commands and arguments whose name contains ``only`` every input; how many, the findings."""
    if not dist.is_initialized():  # the parts for several ranks ask for a group
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    total, found = 0, [f"the catalogue: {forgotten}" for forgotten in doors()[1]]
    warnings.simplefilter("ignore")
    attempt(doors()[0]["SelectiveBackprop"], {})  # what PyTorch imports now adds filters of its own
    for name, door in {**doors()[0], **command_doors()}.items():
        for argument, tries in inputs(name, door, only, number):
            tried = {", ".join(f"{key}={words}" for key, (words, _) in each.items()): each for each in tries}
            counts, findings = Counter[str](), defaultdict[str, list[str]](list)
            for said, each in tried.items():
                outcome, detail = attempt(door, each)
                if outcome not in RIGHT and re.search(KNOWN, f"{name} {argument}: {outcome}: {detail} {said}"):
                    outcome = "known"
                counts[outcome] += 1
                if outcome not in RIGHT:
                    findings[re.sub(r"(\w+Error): .*\[", r"\1 [", f"{outcome}: {detail[:120]!a}")].append(said)
            print(f"{name} {argument:50}", ", ".join(f"{n} {outcome}" for outcome, n in counts.items()), flush=True)
            found += [
                f"{name} {argument}: {what}, with {len(on)}, e.g. {'; '.join(on[:8])}" for what, on in findings.items()
            ]
            total += counts.total()
    return total, found


def main() -> int:
    parser = argparse.ArgumentParser(prog="nox -s hostile", description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="Only callables, commands and arguments whose name contains this.")
    parser.add_argument("--seed", type=int, default=0, help="Of the values that Hypothesis draws.")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    tried, found = trial(asked.only, asked.seed)
    print("\n".join(found), f"\n{tried} inputs, {len(found)} findings.")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
