"""The catalogue of the hostile trial: every public function and class, a valid example, and what is no mistake.

The methods of a class come with it, on the object of its valid example. Values and laws go by the names of the
arguments, which mean the same everywhere; an entry may have its own.
"""

from __future__ import annotations

import builtins
import copy
import functools
import inspect
import types
import typing
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, is_dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import hostile_values as users
import rowprop
from hostile_values import FREE, Made, N, Named, bad, fits, losses_fn
from names import names_of, namespaces
from rowprop import distributed, engines, history, schedule, selection
from rowprop.backprop.hooks import Handle
from rowprop.checks import is_number, takes
from rowprop.cost.count import count_step
from rowprop.cost.profile import profile
from rowprop.selection.base import OfScores
from rowprop.step import Record

torch.manual_seed(0)
Law = Callable[[Any], Any]
BATCH = torch.randn(N, 3), torch.randint(4, (N,))
SCORES, IDS, ROWS = torch.rand(N) + 0.1, torch.arange(N), torch.tensor([0, 2, 5])
MODEL = users.Net(3, 4)
RAMP, FLOATS = schedule.Ramp(1.0, 0.5), (torch.float16, torch.float32, torch.float64)
HISTORY, MEMORY = history.LossHistory(N), selection.PercentileSampling(floor=0.5)
HISTORY.update(IDS, SCORES, ROWS)
SAMPLER = history.PruningSampler(HISTORY, num_rows=N, epochs=4, prune=0.0)
CONTEXT = selection.Context(0.5, IDS, IDS % 3, torch.Generator().manual_seed(0), HISTORY)


def blocks() -> nn.Module:
    return nn.Sequential(*(users.Net(features, 4) for features in (3, 4, 4)))


def thinning() -> rowprop.thinning.Thinning:
    thick = blocks()  # of other weights each time, so that a state that is loaded is another one
    handle = rowprop.thin(thick, generator=torch.Generator().manual_seed(0))
    losses_fn(thick, BATCH).mean().backward()
    return handle


# --- the first use of what a callable returns: bad input is refused there at the latest -------------------------------


def use(result: Any, of: Any = None) -> Any:
    match result:
        case Tensor():
            if result.requires_grad and result.numel() and not result.is_meta:
                result.backward(torch.eye(*result.shape).to(result) if result.ndim == 2 else torch.ones_like(result))
        case float() if of is None:  # not what a user's function returns
            assert is_number(result), "the number"
        case Iterator():
            assert all(0 <= row < N for row in [next(result), *result]), "the rows of an epoch"
        case rowprop.Selection() if result.rows.is_meta:
            rowprop.pick(SCORES, result)
        case rowprop.Selection(rows=kept, weights=weights):  # has to be sound, even of bad input
            rows, losses = kept.tolist(), torch.rand(min(result.num_rows, 999), requires_grad=True)
            assert rows == sorted(set(rows)) and all(0 <= row < result.num_rows for row in rows), "the rows"
            assert weights.shape == kept.shape and weights.isfinite().all(), "the weights"
            assert torch.equal(use(rowprop.pick(losses, result)), losses[kept]), "pick is not indexing"
        case rowprop.SelectiveBackprop():
            for _ in range(2):
                loss, record = use(result(BATCH, ids=IDS, classes=IDS % 3))
                assert loss.isfinite() and use(record.selection) and record.num_rows % N == 0, "the step"
        case (Tensor(), Record()):
            use(result[0])
        case selection.Context():
            for part in (selection.PerClass(rowprop.TopK(0.5)), rowprop.RandomRows(0.5)):
                use(part(SCORES, result))
        case history.StaleScorer():
            parts = {"scorer": result, "history": copy.deepcopy(HISTORY), "engine": "recompute"}
            use(rowprop.SelectiveBackprop(MODEL, losses_fn, MEMORY, **parts))
        case Handle():
            for _ in range(3 if isinstance(of, nn.Sequential) else 0):
                use(losses_fn(of, BATCH).mean())
            with result.paused():
                result.remove()
        case AbstractContextManager():
            with result:
                use(losses_fn(MODEL if of is None else of, BATCH)[ROWS].mean())
        case OfScores():
            use(rowprop.SelectiveBackprop(MODEL, losses_fn, result))
        case _:  # an object is used by its methods
            for method in methods(type(result)) * 2:
                door = doors()[0].get(f"{type(result).__name__}.{method}")
                if door and "state" not in method and "getitem" not in method:
                    given = {name: each.valid() for name, each in door.arguments.items()}
                    use(getattr(result, method)(**given), given.get("model"))
            if hasattr(result, "load_state_dict"):
                assert fits(lambda own: result.load_state_dict(own) is None, result.state_dict()), "its own state"
    return result


# --- laws: whether a value is no mistake, so that a result is as right as a refusal -----------------------------------


def within(interval: str, *, whole: bool = False) -> Law:
    low, high = map(float, interval[1:-1].split(","))

    def law(value: Any) -> bool:
        ends = (value == low and interval[0] == "[") or (value == high and interval[-1] == "]")
        return type(value) in ((int,) if whole else (int, float)) and (low < value < high or ends)

    return law


def whole(*shape: int, least: int = -(2**63), most: int = 2**63, ascending: bool = False) -> Law:
    """int64 of one dimension, of that length, in that range."""

    def law(t: Tensor) -> bool:
        numbers = t.tolist()
        right = t.dtype == torch.int64 and t.ndim == 1 and shape in ((), t.shape)
        return right and all(least <= n <= most for n in numbers) and (not ascending or numbers == sorted(set(numbers)))

    return law


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


# By the names of arguments: a valid example, and an interval or a law; without one a value has to be alike.
ARGUMENTS: dict[str, tuple[Any, ...]] = by_name({
    "keep mass min_loss_perc capacity scale_factor": (0.5, "(0,1]"), "scale tau": (0.5, "(0,1)"),
    "prune": (0.5, "[0,1)"), "start": (0.25, "[0,1)"), "end": (0.75, "(0,1]"), "beta": (3.0, "[0,inf)"),
    "top bottom smoothing min_keep floor full_after min_sample_perc": (0.25, "[0,1]"),
    "progress gate at_least first last": (0.5, "(-inf,inf)"), "seconds tolerance": (0.5, "(0,inf)"),
    "recent multiple_of total_steps accumulate_to min_rows total epochs batch_rows": (3, "[1,inf)"),
    "staleness num_replicas rounds": (1, "[1,inf)"), "interrupt batch_index trained": (3, "[0,inf)"),
    "num_rows": (N, "[8,8]"), "seed rank": (0, "[0,inf)"), "ignore_index": (0, "(-inf,inf)"), "index": (0, "[-3,3)"),
    "ids positions": (IDS, whole(N)), "classes": (IDS % 3, whole(N)), "saved grads": (0, lambda given: True),
    "rows": (ROWS, whole(least=0, most=N - 1, ascending=True)), "scores kept": (SCORES, floats(lambda t: t.ndim == 1)),
    "losses": (SCORES, floats(lambda t: t.shape == (N,))), "values": (torch.rand(N, 4), floats(lambda t: t.ndim > 0)),
    "weights": (torch.ones(N), floats(lambda t: t.isfinite().all())), "who": ("a part", lambda given: True),
    "irreducible": (torch.rand(N), floats(lambda t: t.ndim == 1 and len(t) >= N)),
    "logits": (torch.randn(N, 4), floats(lambda t: t.ndim > 1 and t.shape[1] > 0)),
    "targets": (IDS % 4, lambda t: whole(N, least=0, most=3)(t.long()) and t.dtype not in (*FLOATS, torch.bool)),

    "input": (SCORES, lambda t: t.ndim > 0 and len(t) > 5),
    "counted": (None, lambda t: t.dtype == torch.bool and t.shape in ((N,), (N, 4))),
    "features": (torch.rand(N, 5), lambda t: len(t) == N), "mask": (torch.ones(N), lambda t: len(t) in (1, N)),
    "x reference": (torch.ones(N, 3, requires_grad=True), lambda given: isinstance(given, (nn.Module, Tensor))),
    "model": (MODEL, lambda model: plain(model)), "batch": (BATCH, lambda batch: plain(batch=batch)),
    "losses_fn function scorer": (losses_fn, lambda function: plain(losses=function)),
    "selector": (rowprop.TopK(0.5), lambda given: takes(given, 2) and given(SCORES, CONTEXT).num_rows == N),
    "context": (CONTEXT, lambda given: all(len(column) == N for column in given.columns.values())),
    "outputs": ({"logits": SCORES[:, None]}, lambda given: is_dataclass(given) or isinstance(given, (Tensor, Mapping))),
    "loader": ([(IDS, BATCH)], lambda pairs: all(whole(len(b[0]))(ids) and plain(batch=b) for ids, b in pairs)),
    "parts": ([(0.0, 1.0), (0.5, RAMP)],
              lambda parts: all(is_number(at) and (is_number(p) or takes(p, 1)) for at, p in parts)),
    "blocks": (["0", "1"], lambda names: isinstance(names, list) and {*names} <= {"0", "1", "2"}),
    "dataset": (["a", "b", "c"], lambda data: type(data) is not dict and data.__getitem__ and len(data) >= 0),
    "indices": ([0, 1], lambda places: all(-3 <= int(place) < 3 for place in places)),
    "group trace": (None, lambda given: False), "tick": (None, lambda tick: takes(tick, 2)),
    "engine": ("sliced", lambda engine: engine in engines.ENGINES or type(engine) in (engines.Sliced, engines.Masked)),
    "optimizer": ("sgd", lambda name: name in ("sgd", "momentum", "adam", "adamw")),
    "device": ("cpu", lambda device: device == "cpu"), "dtype": (torch.float32,), "field": ("ids",),
    "generator": (torch.Generator().manual_seed(0),), "history": (HISTORY,), "ranks": (distributed.Global(),),
    "schedule": (schedule.Schedule(0.0, 1.0, 0),), "record": (types.SimpleNamespace(num_rows=N, kept_by_rank=(3,)),),
})  # fmt: skip
CALLS: dict[str, tuple[Any, ...]] = by_name(
    {"losses_fn function scorer": (MODEL, BATCH), "selector": (SCORES, CONTEXT)}
)

# --- the entries: valid values and laws of their own, what methods are on ---------------------

PARTS = dict.fromkeys("scorer schedule history total_steps accumulate_to min_rows".split())
TOKENS = {**PARTS, "unit": "token", "losses_fn": users.token_losses}
TOKENS |= {"laws": {"losses_fn": lambda function: plain(losses=function, dims=3)}}
TABLE = {"rows": whole(least=0, most=N - 1), "num_rows": within("[0,1000000]", whole=True)}
HANDED_ON = {"function": lambda function: takes(function, 2), "batch": lambda given: True, "model": lambda given: True}
FRACTIONS = {"keep": lambda keep: all(map(within("(0,1)"), keep if isinstance(keep, list) else [keep]))}
ENTRIES: dict[str, dict[str, Any]] = by_name({
    """AboveMean Everything Global ImportanceSampling Joined Local LossMass Masked MaxVariance Nonzero
    PercentileSampling Progress Ramp RandomRows RankSampling Recompute Schedule Sliced Threshold TopBottom
    TopK batch_loss_filter biggest_losers count_flops count_step entropy gradient_norm holdout_losses kath18 logits_of
    margin mean ohem profile random rho_loss skip_zeros watch""": {},
    "MultipleOf OverAll PerClass ReducibleLoss": {"selector": MEMORY}, "Thinning": {"on": thinning},
}) | {
    "Context": {
        "laws": {"history": lambda given: True, "progress": within("[0,1]"), "rows": whole(least=-N, most=N - 1)}
    },
    "Selection": {"weights": torch.full((3,), 1 / 3), "laws": {"num_rows": TABLE["num_rows"]}},
    "selector": {
        "function": users.half_of,
        "laws": {"function": lambda function: ARGUMENTS["selector"][1](rowprop.selector(function))},
    },
    "SelectiveBackprop": {"selector": MEMORY, "accumulate_to": None},
    "SelectiveBackprop, recompute": {**PARTS, "engine": "recompute", "selector": selection.PerClass(MEMORY)},
    "SelectiveBackprop, masked": {**PARTS, "engine": "masked"},
    "SelectiveBackprop, tokens": TOKENS,
    "SelectiveBackprop, sampler": {**PARTS, "history": SAMPLER},
    "pick": {"laws": {"rows": lambda rows: SCORES[rows].ndim == 1}},
    "rowwise": {"outputs": 0, "laws": {"outputs": lambda given: True}},
    "find_zeros": {"laws": {"model": lambda model: isinstance(model, nn.Module)}},
    "verify": {"laws": {**FRACTIONS, "seed": within("(-inf,inf)", whole=True)}, "rows": None, "tolerance": 1e-3},
    "plan": {"laws": FRACTIONS, "seconds": 0.2},
    "composer": {"scale_factor": 1.0},
    "infobatch": {"laws": TABLE},
    "rho1": {**TOKENS, "reference": MODEL},
    "rho1, remembered": {**TOKENS, "reference": torch.rand(N, 4)},
    "high_entropy_tokens": {**TOKENS, "losses_fn": users.losses_and_entropies},
    "LossHistory": {"laws": {"ids": TABLE["rows"], **TABLE}},
    "LossHistory, any ids": {"laws": {"ids": whole(), **TABLE}, "num_rows": None},
    "PruningSampler": {"laws": {"ids": whole(), "num_rows": within("[1,8]", whole=True)}, "trained": 6},
    "StaleScorer": {"laws": {"context": lambda given: isinstance(given, selection.Context)}},
    "WithIds": {"laws": {"index": lambda place: -3 <= int(place) < 3}},
    "Downscaled": {"laws": HANDED_ON, "function": users.brightness, "batch": (torch.zeros(N, 3, 4, 4), IDS)},
    "score_without_graph": {"laws": HANDED_ON},
    "per_row_mean": {"mask": torch.ones(N, 4)},
    "num_rows": {"laws": {"batch": lambda given: True}},
    "take": {"laws": {"batch": lambda given: True, **TABLE}},
    "thin": {"laws": {"model": lambda model: isinstance(model, nn.Sequential)}, "model": blocks(), "keep": None},
}  # fmt: skip
# What the step checks where a losses function gives it; for the library's own use; protocols; made by the library.
UNTRIED = """Scored map_tensors tensors keep_at kept_losses share Selector KnownKeep Stateful Engine ThinRecord Plan
Verification Record""".split()

# --- the doors --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Argument:
    """What makes the valid example; what is no mistake; bad values that have a name; what draws more of them."""

    valid: Made
    law: Law
    bad: Callable[[], list[Named]] = list
    drawn: Any = FREE


@dataclass(frozen=True)
class Door:
    """What is called, its arguments, and what makes the object that a method is called on."""

    call: Callable[..., Any]
    arguments: Mapping[str, Argument]
    on: Made | None = None


@functools.cache
def public() -> dict[str, Any]:
    """Every public function and class by its name."""
    held = [held for space in namespaces() if space.__name__.count(".") < 2 for held in names_of(space).values()]
    calls = [each for each in (*held, count_step, profile) if callable(each)]
    return {each.__name__: each for each in calls if not (isinstance(each, type) and issubclass(each, Exception))}


def methods(kind: type) -> list[str]:
    """The public methods that are written in this package."""
    special = "__call__", "__iter__", "__len__", "__getitem__", "__getitems__"
    names = [name for name in dir(kind) if (name in special or not name.startswith("_")) and name not in UNTRIED]
    return [name for name in names if (getattr(getattr(kind, name), "__module__", None) or "").startswith("rowprop")]


def arguments(target: Any, entry: Mapping[str, Any], on: Made | None = None) -> dict[str, Argument]:
    """The arguments of a callable, each with its valid example and its law."""
    function = inspect.unwrap(target.__init__ if isinstance(target, type) else target)
    taken = inspect.signature(target).parameters if hasattr(function, "__globals__") else {}
    if on is not None and "state" in taken:
        state = lambda: on().state_dict()  # noqa: E731
        return {"state": Argument(state, lambda value: fits(partial(alike, state()), value), partial(bad, state))}
    known = (
        defaultdict(lambda: list, vars(builtins) | function.__globals__) if taken else {}
    )  # or for a type checker only
    hints = typing.get_type_hints(function, None, known) if taken else {}
    given = [each for each in taken.values() if each.name != "self" and each.kind is not each.VAR_KEYWORD]
    return {each.name: argument(each, hints.get(each.name, Any), entry) for each in given}


def argument(each: inspect.Parameter, hint: Any, entry: Mapping[str, Any]) -> Argument:
    """The valid example of an argument, and its law: by the entry, by its annotation, or by its name."""
    members = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    words = [word for kind in members if typing.get_origin(kind) is typing.Literal for word in typing.get_args(kind)]
    words += [True, False] * (hint is bool)
    if not words and each.name not in {**ARGUMENTS, **entry}:
        raise LookupError(f"takes {each.name}, which the catalogue does not give")
    usual, *laws = ARGUMENTS.get(each.name, words[:1])
    valid = entry.get(each.name, usual)
    law = entry.get("laws", {}).get(
        each.name, (laws or [words or partial(alike, usual if valid is None else valid)])[0]
    )
    if isinstance(law, list):
        law = lambda value: any(type(value) is type(word) and value == word for word in words)  # noqa: E731
    elif isinstance(law, str):  # where there is no whole number, a schedule may stand for it
        number, asks = within(law, whole=float not in members), len(members) > 1 + (types.NoneType in members)
        law = lambda value: number(value(0.5) if asks and callable(value) else value)  # noqa: E731
    optional = types.NoneType in members or each.default is None
    call = (CALLS[each.name] if takes(valid, 2) else (SCORES,)) if each.name in CALLS and callable(valid) else None
    make = partial(copy.deepcopy, valid)
    return Argument(make, lambda value: (value is None and optional) or fits(law, value), partial(bad, make, call))


@functools.cache
def doors() -> tuple[dict[str, Door], list[str]]:
    """Every public callable with its arguments, and what the catalogue has forgotten or has too much."""
    there, found = public(), dict[str, Door]()
    known = {name.partition(",")[0] for name in ENTRIES}
    wrong = [f"{name} is public but not in the catalogue" for name in there.keys() - known - {*UNTRIED}]
    wrong += [f"{name} is in the catalogue but not public" for name in known - there.keys()]
    for name, entry in ENTRIES.items():
        base, comma, variant = name.partition(",")
        target = there.get(base, type)
        try:
            given = {} if "on" in entry else arguments(target, entry)
            call = partial(first_use, target)
            on = entry.get("on", lambda call=call, given=given: call(**{each: given[each].valid() for each in given}))
            found |= {} if "on" in entry else {name: Door(call, given)}
            for method in methods(target) if isinstance(target, type) else ():
                held = getattr(target, method)
                of_class = inspect.ismethod(held)
                call, given = partial(first_use, held if of_class else method), arguments(held, entry, on)
                found[f"{base}.{method}{comma}{variant}"] = Door(call, given, None if of_class else on)
        except LookupError as error:
            wrong.append(f"{name} {error}")
    return found, wrong


def first_use(make: Callable[..., Any] | str, *on: Any, **given: Any) -> Any:
    """Use what a callable returns; a context that a method returns is of other rows."""
    result = getattr(on[0], make)(**given) if isinstance(make, str) else make(**given)
    return result if on and isinstance(result, selection.Context) else use(result, given.get("model", given.get("x")))
