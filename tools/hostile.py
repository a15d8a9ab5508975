"""The hostile trial: every public callable and every command is given bad values of every kind, one at a time.

Allowed are a result, where the value is no mistake, and a :class:`rowprop.errors.RowpropError`; of the command line the
exit codes 0, 1 (only of ``verify``) and 2 with a sentence. Everything else is a finding: a raw traceback, a bad value
that is accepted silently, a refusal that has changed what it refused, a setting of torch or of the warnings that stays
changed, more than :data:`LIMIT_S` seconds, a file changed outside of ``--out``. Hypothesis draws the values, see
``hostile_values.py``; ``hostile_cases.py`` and ``hostile_commands.py`` say what is valid. A line is printed for each
argument that is done, so that the death of the process is seen behind the last one.
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
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from hostile_cases import Door, doors
from hostile_commands import command_slots
from hostile_values import FREE, Injected, Made, Outcome, Slot, bad
from rowprop.errors import RowpropError

LIMIT_S = 60
DRAWN = 12  # numbers, texts, tensors and functions for each argument, beside the values that have a name
SEVERAL = 3  # inputs of each callable with several bad values at a time
# What src has to mend: sparse tensors, a state on meta, an image without a side.
KNOWN = "[sS]parse|recent: on meta|Downscaled.__call__ batch: .*no columns"
RIGHT = ("result", "refused", "own error")
QUIET = settings(phases=[Phase.generate], database=None, deadline=None, suppress_health_check=[*HealthCheck])
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


def attempt(door: Door, drawn: Mapping[str, tuple[str, Made]]) -> Outcome:
    """Call with bad values in the valid example: result, refused, own error, or a finding and its detail."""
    torch.default_generator.manual_seed(0)  # torch.manual_seed formats the stack, for devices that are not there
    on = [] if door.on is None else [door.on()]
    before, process = [*map(memory, on)], process_settings()
    outcome, detail = "result", ""
    try:
        values = {name: argument.valid() for name, argument in door.arguments.items() if name not in drawn}
        door.call(*on, **values, **{name: make() for name, (_, make) in drawn.items()})
    except RowpropError as error:
        outcome, detail = "refused", str(error)
    except Injected:
        outcome = "own error"
    except AssertionError as error:
        ours = traceback.extract_tb(error.__traceback__)[-1].filename.endswith("hostile_cases.py")
        outcome, detail = ("silent", f"a wrong result: {error}") if ours else ("traceback", last(error))
    except Exception as error:
        outcome, detail = "traceback", last(error)
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


def last(error: BaseException) -> str:
    """The error in one line, and the last lines of the library on its way."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "/rowprop/" in frame.filename]
    way = " > ".join(f"{Path(frame.filename).name}:{frame.lineno}" for frame in frames[-2:])
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:150]} [{way}]"


def library_slots(only: str) -> Iterator[Slot]:
    """The valid example of each door, each bad value of each argument, and several of them at a time."""
    for name, door in doors()[0].items():
        each = {argument: bad(given.valid, given.call) for argument, given in door.arguments.items() if only in name}
        for argument, values in each.items():
            free = FREE.map(lambda drawn, argument=argument: {argument: drawn})
            yield Slot(name, argument, [{argument: value} for value in values], partial(attempt, door), free, DRAWN)
        several = {argument: st.sampled_from(values) | FREE for argument, values in each.items()}
        several = st.fixed_dictionaries({}, optional=several)
        yield Slot(name, "", [{}], partial(attempt, door), several, SEVERAL * (len(each) > 1))


class Hang(BaseException):
    """An input took too long."""


def hang(*_: object) -> None:
    raise Hang


def answer(slot: Slot, drawn: Any) -> Outcome:
    faulthandler.dump_traceback_later(3 * LIMIT_S, exit=True)  # of what does not answer to signals
    signal.signal(signal.SIGALRM, hang)
    signal.alarm(LIMIT_S)
    try:
        return slot.attempt(drawn)
    except Hang:
        return "hang", f"more than {LIMIT_S} s"
    except BaseException as error:
        return "traceback", last(error)
    finally:
        signal.alarm(0)
        faulthandler.cancel_dump_traceback_later()


def tried(slot: Slot, number: int) -> tuple[Counter[str], dict[str, list[str]]]:
    """How many inputs had each outcome, and the findings with the inputs that lead to each."""
    counts, findings, met = Counter[str](), defaultdict[str, list[str]](list), set[str]()

    def each(drawn: Any) -> None:
        said = ", ".join(f"{key}={words}" for key, (words, _) in drawn.items()) if type(drawn) is dict else drawn.said
        if said not in met:
            met.add(said)
            outcome, detail = answer(slot, drawn)
            if outcome not in RIGHT and re.search(KNOWN, f"{slot.name}: {outcome}: {detail} {said}"):
                outcome = "known"
            counts[outcome] += 1
            if outcome not in (*RIGHT, "known"):
                findings[re.sub(r"(\w+Error): .*\[", r"\1 [", f"{outcome}: {detail[:120]!a}")].append(said)

    for named in slot.named:
        each(named)
    if slot.drawn:
        seed(number)(settings(QUIET, max_examples=slot.drawn)(given(slot.free)(each)))()
    return counts, findings


def trial(only: str = "", number: int = 0) -> tuple[int, list[str]]:
    """Give the callables, commands and arguments whose name contains ``only`` every input; how many, the findings."""
    if not dist.is_initialized():  # the parts for several ranks ask for a group
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    total, found = Counter[str](), [f"the catalogue: {forgotten}" for forgotten in doors()[1]]
    for slot in (*library_slots(only.partition(" ")[0]), *command_slots()):
        if only in slot.name:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                counts, findings = tried(slot, number)
            print(f"{slot.name:50}", ", ".join(f"{n} {outcome}" for outcome, n in counts.items()), flush=True)
            found += [f"{slot.name}: {what}, with {len(on)}, e.g. {'; '.join(on[:8])}" for what, on in findings.items()]
            total += counts
    return total.total(), found


def main() -> int:
    parser = argparse.ArgumentParser(prog="nox -s hostile", description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="Only callables, commands and arguments whose name contains this.")
    parser.add_argument("--seed", type=int, default=0, help="Of the values that Hypothesis draws.")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    inputs, found = trial(asked.only, asked.seed)
    print("\n".join(found), f"\n{inputs} inputs, {len(found)} findings.")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
