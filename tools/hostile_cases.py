"""The catalogue of the hostile trial: every public function and class, a valid example, and what is no mistake.

The methods of a class come with it, on the object of its valid example. Values and laws go by the names of the
arguments, which mean the same everywhere; an entry may have its own.
"""

from __future__ import annotations

import builtins
import copy
import functools
import inspect
import re
import types
import typing
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, is_dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import rowprop
from hostile_values import Injected, Made, N, Net, guarded, losses_fn
from names import names_of, namespaces
from rowprop import cost, distributed, engines, history, schedule, scoring, selection
from rowprop.backprop.hooks import Handle
from rowprop.checks import is_number, takes
from rowprop.cost.count import count_step
from rowprop.cost.profile import profile
from rowprop.step import Record

torch.manual_seed(0)
Law = Callable[[Any], Any]
BATCH = torch.randn(N, 3), torch.randint(4, (N,))
SCORES, IDS, ROWS = torch.rand(N) + 0.1, torch.arange(N), torch.tensor([0, 2, 5])
FLOATS = (torch.float16, torch.float32, torch.float64)
IMAGES = torch.zeros(N, 3, 4, 4), torch.zeros(N, dtype=torch.int64)


@guarded
def token_losses(model: Any, batch: Any) -> Tensor:
    return losses_fn(model, batch)[:, None] * torch.linspace(0.5, 2, 4)


@guarded
def losses_and_entropies(model: Any, batch: Any) -> rowprop.Scored:
    return rowprop.Scored(token_losses(model, batch), torch.rand(N, 4))


@guarded
def brightness(model: Any, batch: Any) -> Tensor:
    return batch[0].flatten(1).float().mean(1)


def half_of(scores: Tensor) -> rowprop.Selection:
    return rowprop.TopK(0.5)(scores)


def loss_history(*num_rows: int) -> history.LossHistory:
    known = history.LossHistory(*num_rows)
    known.update(IDS if num_rows else IDS * 7, SCORES, torch.arange(3))
    return known


def known() -> selection.Context:
    return selection.Context(0.5, IDS, IDS % 3, torch.Generator().manual_seed(0), loss_history(N))


def sampler() -> history.PruningSampler:
    begun = history.PruningSampler(loss_history(N), num_rows=N, epochs=4, prune=0.0)
    list(begun)
    return begun


def blocks() -> nn.Module:
    return nn.Sequential(*(Net(features) for features in (3, 4, 4)))


def thinning() -> rowprop.thinning.Thinning:
    thick = blocks()
    handle = rowprop.thin(thick, generator=torch.Generator().manual_seed(0))
    losses_fn(thick, BATCH).mean().backward()
    return handle


def step(**options: Any) -> rowprop.SelectiveBackprop:
    parts = {"model": Net(), "losses_fn": losses_fn, "selector": rowprop.TopK(0.5), "engine": "sliced"}
    return rowprop.SelectiveBackprop(**(parts | options))


# --- the first use of what a callable returns: bad input is refused there at the latest -------------------------------


def use(result: Any, model: Any = None) -> Any:
    match result:
        case Tensor():
            if result.requires_grad and result.numel() and not result.is_meta:
                result.backward(torch.eye(*result.shape).to(result) if result.ndim == 2 else torch.ones_like(result))
        case rowprop.Selection(rows=kept, weights=weights):  # has to be sound, even of bad input
            rows = kept.tolist()
            assert rows == sorted(set(rows)) and all(0 <= row < result.num_rows for row in rows), "rows"
            assert weights.shape == kept.shape and bool(weights.isfinite().all()), "weights"
        case rowprop.SelectiveBackprop():
            for _ in range(2):
                rows = {"ids": IDS} if result.unit == "token" else {"ids": IDS, "classes": IDS % 3}
                loss, record = use(result(BATCH, **rows))
                assert bool(loss.isfinite()) and use(record.selection), "the loss"
        case (Tensor(), Record()):
            use(result[0])
        case selection.Context():
            for part in (selection.PerClass(rowprop.TopK(0.5)), rowprop.RandomRows(0.5)):
                use(part(SCORES, result))
        case distributed.Ranks():
            use(result.select(rowprop.TopK(0.5), SCORES, known()))
        case history.LossHistory():
            use(step(history=result))
        case history.StaleScorer():
            use(step(scorer=result, history=loss_history(N), engine="recompute"))
        case schedule.Schedule():
            use(step(schedule=result, total_steps=4 * int(result.active(0.5, 3) in (True, False))))
        case schedule.Joined() | schedule.Ramp():
            assert all(is_number(result(progress)) for progress in (0.0, 0.3, 0.7, 1.0)), "a number"
        case history.PruningSampler():
            epochs = [list(result) for _ in range(3)]
            assert all(epochs) and all(0 <= row < N for epoch in epochs for row in epoch), "the rows of an epoch"
            assert len(result) and result.progress(0) is not None and result.num_pruned >= 0
        case history.WithIds():
            assert list(result) is not None and result.__getitems__(list(range(len(result)))) is not None
        case scoring.Downscaled():
            result(Net(), IMAGES)
        case Handle():
            for _ in range(3 if isinstance(model, nn.Sequential) else 0):
                use(losses_fn(model, BATCH).mean())
            with result.paused():
                result.remove()
        case AbstractContextManager():
            with result:
                use(losses_fn(Net() if model is None else model, BATCH)[ROWS].mean())
        case _ if type(result) in SELECTORS:
            use(result(SCORES, known()))
    return result


def used_selection(make: Callable[..., rowprop.Selection], **given: Any) -> None:
    chosen, losses = make(**given), losses_fn(Net(), BATCH)
    assert torch.equal(use(rowprop.pick(losses, chosen)), losses[chosen.rows]), "pick is not indexing"
    use(step(selector=lambda scores, context: chosen))


def declared(**given: Any) -> None:
    class Double(torch.autograd.Function):
        forward = staticmethod(lambda ctx, x: ctx.save_for_backward(x) or x * 2)
        backward = staticmethod(lambda ctx, grad: grad * 2)

    x = torch.rand(N, 2, requires_grad=True)
    losses = rowprop.rowwise(**given)(Double).apply(x).sum(1)
    try:
        use(rowprop.pick(losses, torch.tensor([1, 2])))
    except RuntimeError as error:  # torch names the function whose declaration is wrong
        raise Injected if "DoubleBackward returned an invalid gradient" in str(error) else error from error
    assert x.grad is not None and x.grad.sum().item() == 8, "the gradient"


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


def plain(model: Any = None, batch: Any = BATCH, losses: Any = losses_fn, dims: int = 1, strict: bool = True) -> bool:
    """Whether the user's own step works in plain PyTorch: the truth about a model, a batch and a losses function."""
    found = losses(Net() if model is None else model, batch)
    if isinstance(found, rowprop.Scored):
        assert not strict or (found.scores.shape == found.losses.shape and found.scores.is_floating_point())
        found = found.losses
    per_row = found.ndim == dims or (dims == 1 and found.shape[1:] == (1,))
    right = per_row and found.is_floating_point() and len(found) > 0 and not found.is_meta and takes(losses, 2)
    return right and (not strict or (len(found) == len(batch[0]) and bool(found.isfinite().all())))


def sound(selector: Any) -> bool:
    return takes(selector, 2) and not isinstance(selector, type) and selector(SCORES, known()).num_rows == N


def like(saved: Any, other: Any) -> bool:
    """Whether a saved state could be another one of the same object."""
    if isinstance(saved, Mapping):
        needed = [key for key in saved if key in other or not key.isdigit()]  # a block by its number may be missing
        return isinstance(other, Mapping) and all(like(saved[key], other[key]) for key in needed)
    if isinstance(saved, Tensor):
        kinds = {saved.dtype, other.dtype}
        same = saved.ndim == other.ndim or saved.dtype == torch.uint8  # a generator's, which torch flattens
        return same and not other.is_meta and (len(kinds) == 1 or kinds <= {*FLOATS})
    return saved is None or (type(saved) is type(other) and (not is_number(saved) or other >= 0))


def one_length(batch: Any) -> bool:
    leaves = tree_leaves(vars(batch) if is_dataclass(batch) else batch)
    return len({len(each) for each in leaves if getattr(each, "ndim", 0) > 0}) == 1


def indexes(rows: Any) -> bool:
    """Whether PyTorch's own indexing takes the rows; a result of several dimensions is no choice of rows."""
    if isinstance(rows, rowprop.Selection):
        return rows.num_rows == N
    return SCORES[rows.long() if isinstance(rows, Tensor) and rows.dtype == torch.uint8 else rows].ndim == 1


def fits(law: Law, value: Any) -> bool:
    try:
        return bool(law(value))
    except (Exception, SystemExit):  # a value of another kind
        return False


RANGES = """
keep mass min_loss_perc capacity scale_factor: 0.5 in (0,1]
scale tau: 0.5 in (0,1)
prune: 0.5 in [0,1)
top bottom smoothing min_keep floor full_after min_sample_perc: 0.25 in [0,1]
start: 0.25 in [0,1)
end: 0.75 in (0,1]
progress gate at_least first last: 0.5 in (-inf,inf)
seconds tolerance: 0.5 in (0,inf)
beta: 3 in [0,inf)
recent multiple_of total_steps accumulate_to min_rows total epochs batch_rows: 3 in [1,inf)
staleness num_replicas rounds: 1 in [1,inf)
interrupt batch_index trained: 3 in [0,inf)
num_rows: 8 in [8,8]
seed rank: 0 in [0,inf)
ignore_index index: 0 in (-inf,inf)
"""
INTERVALS: dict[str, str] = {}
VALID: dict[str, Any] = {
    "batch": BATCH, "blocks": ["0", "1"], "classes": IDS % 3, "context": known(), "counted": None, "device": "cpu",
    "dataset": ["a", "b", "c"], "dtype": torch.float32, "engine": "sliced", "features": torch.rand(N, 5),
    "field": "ids", "function": losses_fn, "generator": torch.Generator().manual_seed(0), "group": None,
    "history": loss_history(N), "ids": IDS, "indices": [0, 1], "input": SCORES, "irreducible": torch.rand(N),
    "kept": torch.rand(3), "loader": [(IDS, BATCH)], "logits": torch.randn(N, 4), "losses": SCORES,
    "losses_fn": losses_fn, "mask": torch.ones(N), "model": Net(), "optimizer": "sgd", "positions": IDS,
    "outputs": {"logits": torch.zeros(N, 4)}, "parts": [(0.0, 1.0), (0.5, schedule.Ramp(1.0, 0.5))],
    "ranks": distributed.Global(), "record": types.SimpleNamespace(num_rows=N, kept_by_rank=(3,)), "reference": Net(),
    "rows": ROWS, "schedule": schedule.Schedule(0.0, 1.0, 0), "scorer": losses_fn, "scores": SCORES,
    "selector": rowprop.TopK(0.5), "targets": IDS % 4, "tick": None, "trace": None, "values": torch.rand(N, 4),
    "weights": torch.ones(N), "who": "a part", "x": torch.ones(N, 3, requires_grad=True),
}  # fmt: skip
for line in RANGES.strip().splitlines():
    for name in line.partition(":")[0].split():
        VALID[name], INTERVALS[name] = float(line.split()[-3]), line.split()[-1]
LAWS: dict[str, Law] = {
    "model": lambda model: plain(model), "batch": lambda batch: plain(batch=batch),
    **dict.fromkeys(("losses_fn", "function", "scorer"), lambda function: plain(losses=function)),
    "history": lambda given: isinstance(given, (history.LossHistory, history.PruningSampler)),
    "selector": sound, "ids": whole(N), "classes": whole(N), "positions": whole(N),
    "context": lambda given: isinstance(given, selection.Context) and all(len(c) == N for c in given.columns.values()),
    "scores": floats(lambda t: t.ndim == 1), "kept": floats(lambda t: t.ndim == 1),
    "losses": floats(lambda t: t.shape == (N,)), "irreducible": floats(lambda t: t.ndim == 1 and len(t) >= N),
    "logits": floats(lambda t: t.ndim > 1 and t.shape[1] > 0), "values": floats(lambda t: t.ndim > 0),
    "weights": floats(lambda t: t.isfinite().all()), "rows": whole(least=0, most=N - 1, ascending=True),
    "input": lambda t: t.ndim > 0 and len(t) > 5, "features": lambda t: len(t) == N, "mask": lambda t: len(t) in (1, N),
    "counted": lambda t: t.dtype == torch.bool and t.shape in ((N,), (N, 4)),
    "targets": lambda t: whole(N, least=0, most=3)(t.long()) and not t.is_floating_point() and t.dtype != torch.bool,
    "outputs": lambda outputs: isinstance(outputs, (Tensor, Mapping)) or is_dataclass(outputs),
    "loader": lambda pairs: all(whole(len(batch[0]))(ids) and plain(batch=batch, strict=False) for ids, batch in pairs),
    "parts": lambda parts: all(is_number(at) and (is_number(part) or takes(part, 1)) for at, part in parts),
    "blocks": lambda names: not isinstance(names, str) and {*names} <= {"0", "1", "2"},
    "dataset": lambda data: hasattr(data, "__getitem__") and not isinstance(data, Mapping) and len(data) >= 0,
    "indices": lambda places: all(-3 <= int(place) < 3 for place in places), "who": lambda text: True,
    "engine": lambda engine: engine in engines.ENGINES or type(engine) in (engines.Sliced, engines.Masked),
    "optimizer": lambda name: name in ("sgd", "momentum", "adam", "adamw"), "device": lambda device: device == "cpu",
    "dtype": lambda dtype: dtype.is_floating_point, "record": lambda given: isinstance(given, types.SimpleNamespace),
    "tick": lambda tick: takes(tick, 2), "group": lambda group: False, "trace": lambda path: isinstance(path, str),
}  # fmt: skip
CALLS: dict[str, tuple[Any, ...]] = dict.fromkeys(("losses_fn", "function", "scorer"), (Net(), BATCH))
CALLS["selector"] = SCORES, known()

# --- the entries: valid values of their own; laws of their own, what is called instead, what methods are on -----------

DECLARED = dict.fromkeys(("saved", "grads", "outputs"), lambda declaration: True)  # a wrong one costs time, no more
MEMORY = selection.PercentileSampling(floor=0.5)
PARTS = dict.fromkeys("scorer schedule history total_steps accumulate_to min_rows".split())
OF_TOKENS = {
    "losses_fn": lambda function: any(
        fits(lambda f, n=n: plain(losses=f, dims=n, strict=False), function) for n in (1, 2, 3)
    )
}
PLACES: dict[str, Law] = {"rows": whole(least=-N, most=N - 1)}
IN_RANGE = whole(least=0, most=N - 1)
MEMORIES: dict[str, Law] = {"rows": IN_RANGE, "num_rows": within("[8,1000000]", whole=True)}
HANDED_ON: dict[str, Law] = {"function": lambda f: takes(f, 2), "batch": lambda b: True, "model": lambda m: True}
COUNTABLE: dict[str, Law] = {
    "model": lambda model: plain(model, strict=False) or next(model.parameters()).is_meta,
    "losses_fn": lambda function: plain(losses=function, strict=False),
    "batch": lambda batch: plain(batch=batch, strict=False) or batch[0].is_meta,
}
TRAINABLE: dict[str, Law] = {
    "model": lambda model: plain(model) and any(p.requires_grad for p in model.parameters()),
    "keep": lambda keep: all(map(within("(0,1)"), keep if isinstance(keep, list) else [keep])),
}
SELECTORS = {history.ReducibleLoss} | {kind for kind in names_of(selection).values() if hasattr(kind, "_choose")}
PLAIN = """engines.Sliced engines.Recompute engines.Masked watch skip_zeros cost.count_flops schedule.Ramp
schedule.Schedule schedule.Joined schedule.Progress recipes.ohem recipes.random recipes.kath18
recipes.batch_loss_filter recipes.biggest_losers recipes.rho_loss scoring.entropy scoring.margin
scoring.gradient_norm scoring.logits_of distributed.Global distributed.Local distributed.mean""".split()

ENTRIES: dict[str, dict[str, Any]] = {
    **{name: {} for name in (*PLAIN, *(kind.__name__ for kind in SELECTORS - {history.ReducibleLoss}))},
    **{name: {"selector": MEMORY} for name in ("MultipleOf", "OverAll", "PerClass", "history.ReducibleLoss")},
    "Context": {"laws": {"history": lambda given: True, "progress": within("[0,1]"), **PLACES}},
    "Selection": {"call": partial(used_selection, rowprop.Selection), "weights": torch.full((3,), 1 / 3)},
    "selector": {
        "call": lambda function: use(step(selector=rowprop.selector(function))),
        "laws": {"function": lambda function: sound(rowprop.selector(function))},
        "function": half_of,
    },
    "SelectiveBackprop": {"selector": MEMORY, "accumulate_to": None},
    "SelectiveBackprop, recompute": {**PARTS, "engine": "recompute", "selector": selection.PerClass(MEMORY)},
    "SelectiveBackprop, masked": {**PARTS, "engine": "masked"},
    "SelectiveBackprop, tokens": {**PARTS, "unit": "token", "losses_fn": token_losses, "laws": OF_TOKENS},
    "SelectiveBackprop, sampler": {**PARTS, "history": sampler()},
    "pick": {"laws": {"rows": indexes}},
    "rowwise": {"call": declared, "laws": DECLARED, **dict.fromkeys(DECLARED, 0)},
    "find_zeros": {"laws": {"model": lambda model: isinstance(model, nn.Module)}},
    "verify": {"laws": {**TRAINABLE, "seed": within("(-inf,inf)", whole=True)}, "rows": None, "tolerance": 1e-3},
    "plan": {"laws": TRAINABLE, "seconds": 0.2},
    "cost.count_step": {"laws": COUNTABLE},
    "cost.profile": {"laws": COUNTABLE},
    "recipes.composer": {"scale_factor": 1.0},
    "recipes.infobatch": {"laws": MEMORIES},
    "recipes.rho1": {"losses_fn": token_losses, "laws": OF_TOKENS},
    "recipes.rho1, remembered": {"losses_fn": token_losses, "reference": torch.rand(N, 4), "laws": OF_TOKENS},
    "recipes.high_entropy_tokens": {"losses_fn": losses_and_entropies, "laws": OF_TOKENS},
    "history.LossHistory": {"on": partial(loss_history, N), "laws": {"ids": IN_RANGE, **MEMORIES}},
    "history.LossHistory, any ids": {"on": loss_history, "laws": {"ids": whole(), **MEMORIES}, "num_rows": None},
    "history.PruningSampler": {"on": sampler, "laws": {"ids": whole(), "num_rows": within("[1,8]", whole=True)}},
    "history.StaleScorer": {"laws": {**COUNTABLE, "context": lambda given: isinstance(given, selection.Context)}},
    "history.WithIds": {"laws": {"index": lambda place: -3 <= place < 3}},
    "history.holdout_losses": {"laws": COUNTABLE},
    "scoring.Downscaled": {"laws": HANDED_ON, "function": brightness, "batch": IMAGES},
    "scoring.score_without_graph": {"laws": HANDED_ON},
    "batch.num_rows": {"laws": {"batch": one_length}},
    "batch.take": {"laws": {"batch": one_length, "rows": IN_RANGE}},
    "scoring.per_row_mean": {"mask": torch.ones(N, 4)},
    "thin": {"laws": {"model": lambda model: isinstance(model, nn.Sequential)}, "model": blocks(), "keep": None},
    "Thinning": {"on": thinning},
}
NO_ENTRIES = {
    "Scored": "the step checks what a losses function puts into it",
    "batch.map_tensors batch.tensors": "for the library's own use",
    "keep_at kept_losses share": "how the step asks, after its own checks",
    "Selector KnownKeep Stateful engines.Engine": "protocols",
    "Thinning ThinRecord cost.Plan Verification Record": "made by the library",
}
UNTRIED = {name for names in NO_ENTRIES for name in names.split()}

# --- the doors --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Argument:
    """What makes the valid example, what is no mistake, and how the example is called if it is a function."""

    valid: Made
    law: Law
    call: tuple[Any, ...] | None = None


@dataclass(frozen=True)
class Door:
    """What is called, its arguments, and what makes the object that a method is called on."""

    call: Callable[..., Any]
    arguments: Mapping[str, Argument]
    on: Made | None = None


SPECIAL = ("__call__", "__iter__", "__len__", "__getitem__", "__getitems__")


def public() -> dict[str, Any]:
    """Every public function and class by its shortest name."""
    spaces = [module for module in namespaces() if module.__name__.count(".") < 2]
    found = {f"{module.__name__}.{name}": held for module in spaces for name, held in names_of(module).items()}
    found |= {f"rowprop.cost.{held.__name__}": held for held in (count_step, profile, cost.count_flops)}
    short: dict[int, tuple[str, Any]] = {}
    for name, held in found.items():
        if callable(held) and not (isinstance(held, type) and issubclass(held, Exception)):
            short.setdefault(id(held), (re.sub(r"^rowprop\.((selection|step|oracle|thinning)\.)?", "", name), held))
    return dict(short.values())


def methods(kind: type) -> list[str]:
    """The public methods that are written in this package."""
    public = [name for name in dir(kind) if (name in SPECIAL or not name.startswith("_")) and name not in UNTRIED]
    return [name for name in public if (getattr(getattr(kind, name), "__module__", None) or "").startswith("rowprop")]


class Names(dict[str, Any]):
    """The names of a module, in which one that only a type checker imports is any class."""

    def __missing__(self, name: str) -> Any:
        return getattr(builtins, name, type(name, (), {"__class_getitem__": classmethod(lambda cls, _: cls)}))


def arguments(target: Any, entry: Mapping[str, Any], on: Made | None = None) -> dict[str, Argument]:
    """The arguments of a callable, each with its valid example and its law."""
    function = inspect.unwrap(target.__init__ if isinstance(target, type) else target)
    taken = inspect.signature(target).parameters.values() if hasattr(function, "__globals__") else ()
    if on is not None and any(each.name == "state" for each in taken):
        return {"state": Argument(lambda: on().state_dict(), partial(fits, partial(like, on().state_dict())))}
    hints = typing.get_type_hints(function, None, Names(function.__globals__)) if taken else {}
    return {
        each.name: argument(each, hints.get(each.name, Any), entry)
        for each in taken
        if each.name != "self" and each.kind is not each.VAR_KEYWORD
    }


def argument(each: inspect.Parameter, hint: Any, entry: Mapping[str, Any]) -> Argument:
    """The valid example of an argument, and its law: by the entry, by its annotation, or by its name."""
    members = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    words = [word for kind in members if typing.get_origin(kind) is typing.Literal for word in typing.get_args(kind)]
    words += [True, False] * (hint is bool)
    name, laws = each.name, entry.get("laws", {})
    if not (words or name in VALID or name in entry):
        raise LookupError(f"takes {name}, which the catalogue does not give")
    valid = entry.get(name, VALID.get(name, words[0] if words else None))
    valid = int(valid) if int in members and isinstance(valid, float) else valid
    if name in laws:
        law = laws[name]
    elif words:
        law = lambda value: any(type(value) is type(word) and value == word for word in words)  # noqa: E731
    elif name in INTERVALS:
        number = within(INTERVALS[name], whole=float not in members)
        asks = float in members and {*members} - {float, types.NoneType}  # a schedule may stand for the number
        law = lambda value: number(value(0.5) if asks and callable(value) else value)  # noqa: E731
    else:
        law = LAWS.get(name, lambda value: isinstance(value, tuple(kind for kind in members if isinstance(kind, type))))
    optional = types.NoneType in members or each.default is None
    call = (CALLS[name] if takes(valid, 2) else (SCORES,)) if name in CALLS and callable(valid) else None
    return Argument(partial(copy.deepcopy, valid), lambda value: (value is None and optional) or fits(law, value), call)


@functools.cache
def doors() -> tuple[dict[str, Door], list[str]]:
    """Every public callable with its arguments, and what the catalogue has forgotten or has too much."""
    there, found = public(), dict[str, Door]()
    known = {name.partition(",")[0] for name in ENTRIES}
    wrong = [f"{name} is public but not in the catalogue" for name in there.keys() - known - UNTRIED]
    wrong += [f"{name} is in the catalogue but not public" for name in known - there.keys()]
    for name, entry in ENTRIES.items():
        base, comma, variant = name.partition(",")
        target = there.get(base, type)
        try:
            given = {} if base in UNTRIED else arguments(target, entry)
            call = partial(first_use, entry.get("call", target))
            on = entry.get("on", lambda call=call, given=given: call(**{each: given[each].valid() for each in given}))
            found |= {} if base in UNTRIED else {name: Door(call, given)}
            for method in methods(target) if isinstance(target, type) else ():
                held = getattr(target, method)
                if inspect.ismethod(held):
                    door = Door(partial(used_selection, held), arguments(held, entry))
                else:
                    door = Door(partial(called, method), arguments(held, entry, on), on)
                found[f"{base}.{method}{comma}{variant}"] = door
        except LookupError as error:
            wrong.append(f"{name} {error}")
    return found, wrong


def first_use(make: Callable[..., Any], **given: Any) -> Any:
    return use(make(**given), given.get("model", given.get("x")))


def called(method: str, instance: Any, /, **given: Any) -> Any:
    called = guarded(getattr(instance, method)) if "getitem" in method else getattr(instance, method)
    result = called(**given)  # the protocol of sequences gives TypeError and IndexError a meaning
    return result if isinstance(result, selection.Context) else use(result)
