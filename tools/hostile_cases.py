"""The catalogue of the hostile trial: every public callable, a valid example of its arguments, bad values of all kinds.

A :class:`Door` is a public callable or method. Each of its arguments has a valid value and is given, one after the
other, every value of :data:`POOL` and the bad values of its own. A value has to be refused unless the argument lists it
under ``fine``. ``hostile.py`` finds the doors by introspection, and fails where the catalogue lacks a door or an
argument.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import rowprop
import rowprop.batch
from rowprop import distributed, engines, history, recipes, schedule, scoring, selection
from rowprop.cost import count_flops
from rowprop.cost.count import count_step
from rowprop.cost.profile import profile

N = 8  # rows of the valid batch; the pool's vectors have 5 entries
Made = Callable[[], Any]


class Injected(Exception):
    """The error of a user's own callable; it has to come out unchanged."""


def guarded(function: Callable[..., Any]) -> Callable[..., Any]:
    """A user's function whose own failures are told from the library's."""

    def call(*given: Any, **named: Any) -> Any:
        try:
            return function(*given, **named)
        except Exception as error:
            raise Injected(str(error)) from error

    return call


class Net(nn.Module):
    """A user's model, whose own failures are told from the library's."""

    def __init__(self, features: int = 3, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.layer = nn.Linear(features, 4, dtype=dtype)

    def forward(self, inputs: Tensor) -> Tensor:
        return guarded(self.layer)(inputs)


def model() -> Net:
    torch.manual_seed(0)
    return Net()


def batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(N, 3), torch.randint(4, (N,))


@guarded
def losses_fn(model: Any, batch: Any) -> Tensor:
    inputs, targets = batch
    return F.cross_entropy(model(inputs), targets, reduction="none")


def raises(*given: Any, **named: Any) -> Any:
    raise Injected("the callable's own error")


# --- values of every bad kind -----------------------------------------------------------------------------------------

POOL: dict[str, Made] = {
    "None": lambda: None,
    "True": lambda: True,
    "0": lambda: 0,
    "-1": lambda: -1,
    "-0.5": lambda: -0.5,
    "0.5": lambda: 0.5,
    "3": lambda: 3,
    "nan": lambda: float("nan"),
    "inf": lambda: float("inf"),
    "-inf": lambda: -float("inf"),
    "10**30": lambda: 10**30,
    "1e300": lambda: 1e300,
    "complex": lambda: 1j,
    "empty text": lambda: "",
    "text": lambda: "a",
    "markup": lambda: "[/foo]",
    "bytes": lambda: b"a",
    "empty list": lambda: [],
    "list": lambda: [0.5],
    "empty tuple": lambda: (),
    "dict": lambda: {"a": 1},
    "set": lambda: {1},
    "object": object,
    "class": lambda: selection.TopK,
    "callable of nothing": lambda: lambda: 1,
    "callable of six": lambda: lambda a, b, c, d, e, f: 1,
    "callable that raises": lambda: raises,
    "callable to None": lambda: lambda *given, **named: None,
    "callable to text": lambda: lambda *given, **named: "a",
    "callable to nan": lambda: lambda *given, **named: float("nan"),
    "callable to a tuple": lambda: lambda *given, **named: (1, 2, 3),
    "callable to a vector": lambda: lambda *given, **named: torch.rand(5),
    "module": lambda: Net(),
    "0-d tensor": lambda: torch.tensor(0.5),
    "empty tensor": lambda: torch.empty(0),
    "vector": lambda: torch.rand(5),
    "graph vector": lambda: torch.rand(5, requires_grad=True),
    "nan vector": lambda: torch.full((5,), torch.nan),
    "half vector": lambda: torch.rand(5, dtype=torch.float16),
    "long vector": lambda: torch.arange(5),
    "int32 vector": lambda: torch.arange(5, dtype=torch.int32),
    "bool vector": lambda: torch.ones(5, dtype=torch.bool),
    "complex vector": lambda: torch.ones(5, dtype=torch.complex64),
    "meta vector": lambda: torch.empty(5, device="meta"),
    "matrix": lambda: torch.rand(5, 2),
    "long matrix": lambda: torch.zeros(5, 2, dtype=torch.int64),
    "sparse vector": lambda: torch.ones(5).to_sparse(),
    "array": lambda: np.ones(5),
    "random.Random": lambda: random.Random(0),
    "numpy generator": lambda: np.random.default_rng(0),
}
CALLABLES = [name for name in POOL if name.startswith("callable")]


@dataclass(frozen=True)
class Argument:
    """One argument of a door.

    Attributes:
        valid: Makes the value of the valid example.
        fine: Names of values that are no mistake: a result is as right as a refusal.
        more: Bad values of its own, beside the pool's.
        skip: Names of values that are not tried.
    """

    valid: Made
    fine: frozenset[str] = frozenset()
    more: Mapping[str, Made] = field(default_factory=dict)
    skip: frozenset[str] = frozenset()

    def values(self) -> dict[str, Made]:
        return {name: make for name, make in (POOL | dict(self.more)).items() if name not in self.skip}


def needs(valid: Any, fine: str | list[str] = "", more: Mapping[str, Made] | None = None) -> Argument:
    """An argument; ``valid`` is made anew where it is callable without being a value, see :func:`value`."""
    names = [name.strip() for name in fine.split(",")] if isinstance(fine, str) else fine
    more = {} if more is None else more
    unknown = {name for name in names if name} - POOL.keys() - more.keys()
    assert not unknown, f"the catalogue names unknown values {unknown}"
    return Argument(valid if callable(valid) else lambda: valid, frozenset(names), more)


def value(given: Any) -> Made:
    """A value that is itself callable."""
    return lambda: given


def also(argument: Argument, fine: str = "", valid: Any = None, more: Mapping[str, Made] | None = None) -> Argument:
    """The same argument with more that is fine, another valid value, more bad ones."""
    names = [*argument.fine, *(name.strip() for name in fine.split(","))]
    return needs(argument.valid if valid is None else valid, names, dict(argument.more) | dict(more or {}))


@dataclass(frozen=True)
class Door:
    """A public callable.

    Attributes:
        call: What is called, with the arguments by name; of a method, on what ``on`` makes.
        arguments: Every argument in the signature.
        on: Makes what the method is called on. A refused call must leave its ``state_dict`` alone.
    """

    call: Callable[..., Any]
    arguments: Mapping[str, Argument] = field(default_factory=dict)
    on: Made | None = None


def method(name: str, on: Made, use: Callable[[Any], Any] = lambda result: result, **arguments: Argument) -> Door:
    return Door(lambda instance, **given: use(getattr(instance, name)(**given)), arguments, on)


def sequence(name: str, on: Made, **arguments: Argument) -> Door:
    """A method of the protocol of sequences, which gives TypeError and IndexError a meaning."""

    def call(instance: Any, **given: Any) -> Any:
        try:
            return getattr(instance, name)(**given)
        except (TypeError, IndexError) as error:
            raise Injected(str(error)) from error

    return Door(call, arguments, on)


def made(kind: Callable[..., Any], use: Callable[[Any], Any] = lambda result: result, **arguments: Argument) -> Door:
    """A constructor, and the first use of the object: bad input is refused there at the latest."""
    return Door(lambda **given: use(kind(**given)), arguments)


# --- arguments of a kind ----------------------------------------------------------------------------------------------

# A callable is a schedule of keep: the first use asks it.
KEEP = needs(0.5)
FRACTION = needs(0.5)
FRACTION_OR_ZERO = needs(0.5, "0")
PROGRESS = needs(0.5, "0, -1, -0.5, 3, 10**30, 1e300")  # how far beyond its ends, the schedule says
FLAG = needs(True, "True")
REAL = needs(0.5, "0, -1, -0.5, 0.5, 3, 10**30, 1e300")
POSITIVE = needs(3, "0.5, 10**30, 1e300")
COUNT = needs(3, "10**30")
COUNT_OR_ZERO = needs(3, "0, 10**30")


KEEP, FRACTION, FRACTION_OR_ZERO, PROGRESS = (
    also(each, "0.5") for each in (KEEP, FRACTION, FRACTION_OR_ZERO, PROGRESS)
)
COUNT, COUNT_OR_ZERO, POSITIVE = (also(each, "3") for each in (COUNT, COUNT_OR_ZERO, POSITIVE))

SCORES = needs(
    lambda: torch.rand(N) + 0.1,
    "vector, graph vector, nan vector, half vector",
    {
        "inf vector": lambda: torch.full((5,), torch.inf),
        "negative vector": lambda: -torch.ones(5),
        "zeros": lambda: torch.zeros(5),
        "one row": lambda: torch.ones(1),
    },
)
SCORES = also(SCORES, "inf vector, negative vector, zeros, one row")
GENERATOR = needs(lambda: torch.Generator().manual_seed(0), "None")
IDS = needs(
    lambda: torch.arange(N),
    "",
    {
        "negative ids": lambda: torch.arange(N) - 5,
        "huge ids": lambda: torch.arange(N) + 2**62,
        "meta ids": lambda: torch.arange(N, device="meta"),
        "no ids": lambda: torch.empty(0, dtype=torch.int64),
        "short ids": lambda: torch.arange(N - 1),
        "long ids of two dimensions": lambda: torch.arange(N).view(2, 4),
        "float ids": lambda: torch.arange(N).float(),
    },
)
CLASSES = needs(
    lambda: torch.arange(N) % 3,
    "",
    {
        "float classes": lambda: torch.zeros(N),
        "bool classes": lambda: torch.zeros(N, dtype=torch.bool),
        "short classes": lambda: torch.zeros(N - 1, dtype=torch.int64),
        "meta classes": lambda: torch.zeros(N, dtype=torch.int64, device="meta"),
    },
)


def selector_returning(make: Callable[[Tensor], Any]) -> Made:
    """A user's own selector."""
    return lambda: lambda scores, context: make(scores)


def _selection(rows: list[int], weights: Any = None, n: int = N, **kind: Any) -> Callable[[Tensor], Any]:
    return lambda scores: rowprop.Selection(
        torch.tensor(rows, **kind), torch.full((len(rows),), 0.5) if weights is None else weights, n
    )


GARBAGE_SELECTIONS: dict[str, Callable[[Tensor], Any]] = {
    "rows beyond N": _selection([0, N]),
    "negative rows": _selection([-1, 2]),
    "unsorted rows": _selection([3, 1]),
    "repeated rows": _selection([1, 1]),
    "all rows reversed": _selection(list(range(N))[::-1]),
    "all rows one repeated": _selection([0] * N),
    "float rows": _selection([0, 1], dtype=torch.float32),
    "bool rows": _selection([0, 1], dtype=torch.bool),
    "int32 rows": _selection([0, 1], dtype=torch.int32),
    "too many weights": _selection([0, 1], torch.ones(3)),
    "too few weights": _selection([0, 1], torch.ones(1)),
    "weights of two dimensions": _selection([0, 1], torch.ones(2, 1)),
    "whole weights": _selection([0, 1], torch.ones(2, dtype=torch.int64)),
    "complex weights": _selection([0, 1], torch.ones(2, dtype=torch.complex64)),
    "nan weights": _selection([0, 1], torch.tensor([0.5, torch.nan])),
    "infinite weights": _selection([0, 1], torch.tensor([0.5, torch.inf])),
    "weights None": lambda scores: rowprop.Selection(torch.tensor([0, 1]), cast("Any", None), N),
    "rows a list": lambda scores: rowprop.Selection(cast("Any", [0, 1]), torch.ones(2), N),
    "meta rows": lambda scores: rowprop.Selection(torch.arange(2, device="meta"), torch.ones(2, device="meta"), N),
    "meta weights": _selection([0, 1], torch.ones(2, device="meta")),
    "uneven weights called even": lambda scores: rowprop.Selection(
        torch.tensor([0, 1]), torch.tensor([0.5, 0.25]), N, even=True
    ),
    "another N": _selection([0, 1], n=N + 1),
    "N as text": _selection([0, 1], n=cast("Any", "a")),
    "the rows alone": lambda scores: torch.arange(2),
    "a pair": lambda scores: (torch.arange(2), torch.ones(2)),
}
SELECTORS: dict[str, Made] = {name: selector_returning(make) for name, make in GARBAGE_SELECTIONS.items()}
SELECTORS |= {
    "the class": lambda: rowprop.selection.AboveMean,
    "selector without arguments": lambda: lambda: None,
    "selector of scores alone": lambda: lambda scores: half_of(scores),
    "selector of scores and context": lambda: lambda scores, context: half_of(scores),
    "selector with a setting": lambda: lambda scores, keep=0.5: half_of(scores),
    "selector of three": lambda: lambda scores, context, losses: half_of(scores),
    "selector that needs a field": lambda: lambda scores, context: context.need("labels", "it"),
}
SELECTOR = needs(
    lambda: rowprop.TopK(0.5),
    "selector of scores and context, selector with a setting",
    SELECTORS,
)


def half_of(scores: Tensor) -> rowprop.Selection:
    return rowprop.TopK(0.5)(scores)


def known() -> rowprop.selection.Context:
    """A context with all that a part may need."""
    return rowprop.selection.Context(
        0.5, torch.arange(N), torch.arange(N) % 3, torch.Generator().manual_seed(0), loss_history()
    )


def fresh(**fields: Any) -> rowprop.selection.Context:
    """The same with a history that knows no losses yet."""
    return replace(known(), **({"history": history.LossHistory(N)} | fields))


CONTEXT = needs(
    known,
    "nothing known, another generator",
    {
        "nothing known": rowprop.selection.Context,
        "another generator": lambda: replace(known(), generator=torch.Generator().manual_seed(3)),
        "the class": value(rowprop.selection.Context),
        "a generator": lambda: torch.Generator(),
        "short ids": lambda: replace(known(), ids=torch.arange(N - 1)),
        "short classes": lambda: replace(known(), classes=torch.arange(N - 1)),
        "no ids and no rows": lambda: replace(known(), ids=torch.empty(0, dtype=torch.int64)),
    },
)


def _scored(scores: Any) -> Any:
    return guarded(lambda model, batch: rowprop.Scored(losses_fn(model, batch), scores))


LOSSES: dict[str, Made] = {
    "losses of another length": lambda: guarded(lambda model, batch: losses_fn(model, batch)[:3]),
    "reduced losses": lambda: guarded(lambda model, batch: losses_fn(model, batch).mean()),
    "losses per entry": lambda: guarded(lambda model, batch: losses_fn(model, batch).view(N, 1)),
    "whole losses": lambda: guarded(lambda model, batch: losses_fn(model, batch).long()),
    "complex losses": lambda: guarded(lambda model, batch: losses_fn(model, batch) * 1j),
    "nan losses": lambda: guarded(lambda model, batch: losses_fn(model, batch) * torch.nan),
    "meta losses": lambda: guarded(lambda model, batch: losses_fn(model, batch).to("meta")),
    "detached losses": lambda: guarded(lambda model, batch: losses_fn(model, batch).detach()),
    "losses as a list": lambda: guarded(lambda model, batch: losses_fn(model, batch).tolist()),
    "losses as an array": lambda: guarded(lambda model, batch: losses_fn(model, batch).detach().numpy()),
    "losses in a dict": lambda: guarded(lambda model, batch: {"loss": losses_fn(model, batch)}),
    "losses per class": lambda: guarded(lambda model, batch: losses_fn(model, batch)[:, None].expand(N, 4)),
    "losses and text": lambda: _scored("a"),
    "losses and short scores": lambda: _scored(torch.rand(3)),
    "losses and whole scores": lambda: _scored(torch.arange(N)),
    "losses and scores per class": lambda: _scored(torch.rand(N, 4)),
    "a bare pair": lambda: guarded(lambda model, batch: (losses_fn(model, batch), torch.rand(N))),
    "three parts": lambda: guarded(lambda model, batch: (losses_fn(model, batch),) * 3),
    "losses of the batch alone": lambda: guarded(lambda batch: batch),
}
LOSSES_FN = needs(value(losses_fn), "losses per entry, detached losses", LOSSES)
# A losses_fn may make anything of a model or a batch; the library has to survive it.
MODEL = needs(
    model,
    CALLABLES,
    {
        "no parameters": lambda: nn.Identity(),
        "frozen": lambda: model().requires_grad_(False),
        "on meta": lambda: model().to("meta"),
        "nan weights": lambda: _filled(model(), torch.nan),
        "forward to None": lambda: _forward(lambda inputs: None),
        "forward to text": lambda: _forward(lambda inputs: "a"),
        "forward to a number": lambda: _forward(lambda inputs: torch.tensor(0.5)),
        "forward that raises": lambda: _forward(raises),
        "half": lambda: model().half(),
    },
)
MODEL = also(MODEL, "class, module, no parameters, frozen, half, forward that raises")


def _filled(module: nn.Module, number: float) -> nn.Module:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(number)
    return module


def _forward(function: Callable[..., Any]) -> nn.Module:
    class Other(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 4)

        def forward(self, inputs: Any) -> Any:
            return function(inputs)

    return Other()


BATCHES: dict[str, Made] = {
    "no rows": lambda: (torch.empty(0, 3), torch.empty(0, dtype=torch.int64)),
    "one row": lambda: (torch.randn(1, 3), torch.zeros(1, dtype=torch.int64)),
    "sizes that differ": lambda: (torch.randn(N, 3), torch.zeros(5, dtype=torch.int64)),
    "nan inputs": lambda: (torch.full((N, 3), torch.nan), torch.zeros(N, dtype=torch.int64)),
    "on meta": lambda: tuple(each.to("meta") for each in batch()),
    "half on meta": lambda: (batch()[0].to("meta"), batch()[1]),
    "classes out of range": lambda: (batch()[0], torch.full((N,), 99)),
    "float classes": lambda: (batch()[0], torch.rand(N)),
    "whole inputs": lambda: (torch.ones(N, 3, dtype=torch.int64), batch()[1]),
    "inputs alone": lambda: batch()[0],
    "tuple of None": lambda: (None, None),
    "lists": lambda: ([[1.0, 2.0, 3.0]] * N, [0] * N),
}
BATCH = needs(batch, "one row", BATCHES)


def choice(word: str) -> Argument:
    return needs(word, "", {"upper case": lambda: word.upper(), "the word in a list": lambda: [word]})


def optional(argument: Argument, fine: str = "") -> Argument:
    return also(argument, f"None{', ' + fine if fine else ''}")


# --- uses -------------------------------------------------------------------------------------------------------------


def scores() -> Tensor:
    torch.manual_seed(2)
    return torch.rand(N) + 0.1


def use_selector(selector: Any) -> rowprop.Selection:
    """Ask a selector as the step would."""
    return checked(selector(scores(), known()))


def use_selector_with(context: rowprop.selection.Context, kind: str) -> rowprop.Selection:
    return checked(
        (rowprop.selection.PerClass(rowprop.TopK(0.5)) if kind == "PerClass" else rowprop.RandomRows(0.5))(
            scores(), context
        )
    )


def checked(chosen: rowprop.Selection) -> rowprop.Selection:
    """A result has to be a sound selection, even of bad input."""
    rows = chosen.rows.tolist()
    assert rows == sorted(set(rows)) and all(0 <= row < chosen.num_rows for row in rows), "rows"
    assert chosen.weights.shape == chosen.rows.shape and bool(chosen.weights.isfinite().all()), "weights"
    return chosen


def use_step(step: Any) -> Any:
    """Two steps with a backward."""
    for _ in range(2):
        loss, record = step(batch(), ids=torch.arange(N), classes=torch.arange(N) % 3)
        if loss.requires_grad:
            loss.backward()
        assert bool(loss.isfinite()), "the loss is not finite"
        checked(record.selection)
    return record


def step(**options: Any) -> rowprop.SelectiveBackprop:
    return rowprop.SelectiveBackprop(
        model(), losses_fn, **({"selector": rowprop.TopK(0.5), "engine": "sliced"} | options)
    )


def use_selection(chosen: rowprop.Selection) -> Any:
    losses = losses_fn(model(), batch())
    (rowprop.pick(losses, chosen) * chosen.weights).sum().backward()
    picked = rowprop.pick(losses.detach(), chosen)
    assert torch.equal(picked, losses.detach()[chosen.rows]), "pick is not indexing"
    return use_step(step(selector=lambda scores, context: chosen))


def loss_history() -> history.LossHistory:
    known = history.LossHistory(N)
    known.update(torch.arange(N), scores(), torch.arange(3))
    return known


def open_history() -> history.LossHistory:
    known = history.LossHistory()
    known.update(torch.arange(N) * 7, scores(), torch.arange(3))
    return known


def sampler() -> history.PruningSampler:
    made = history.PruningSampler(loss_history(), num_rows=N, epochs=4, prune=0.0)
    list(made)
    return made


def use_sampler(sampler: Any) -> Any:
    epochs = [list(sampler) for _ in range(3)]
    assert all(epochs), "an epoch without rows"
    assert all(0 <= row < N for epoch in epochs for row in epoch), "rows"
    return len(sampler), sampler.progress(0), sampler.num_pruned


def states(on: Made) -> Argument:
    """A saved state: with an entry missing, one too many, and each entry something else."""
    saved = on().state_dict()
    more: dict[str, Made] = {}
    for entry, held in saved.items():
        more[f"without {entry}"] = lambda entry=entry: {k: v for k, v in on().state_dict().items() if k != entry}
        others: dict[str, Made] = {
            name: POOL[name]
            for name in ("None", "text", "-1", "nan", "True", "empty list", "dict", "object", "matrix", "vector")
        }
        others["complex vector"] = POOL["complex vector"]
        if isinstance(held, Tensor) and held.numel() > 0:
            others["shorter"] = lambda held=held: held[:-1].clone()
            others["of float64"] = lambda held=held: held.double()
            others["of int32"] = lambda held=held: held.to(torch.int32)
        for name, other in others.items():
            more[f"{entry}: {name}"] = lambda entry=entry, other=other: on().state_dict() | {entry: other()}
    more["another entry"] = lambda: on().state_dict() | {"another": 1}
    likely = ("another entry", "recent: vector", "recent: shorter", "recent: of float64", "order: None")
    fine = [
        name for name in (*likely, "num_rows: None") if name in more and (name in likely or saved["num_rows"] is None)
    ]
    return needs(lambda: on().state_dict(), fine, more)


# --- the doors --------------------------------------------------------------------------------------------------------

DOORS: dict[str, Door] = {}
NO_DOORS: dict[str, str] = {}


def _selectors() -> None:
    kinds: dict[Any, dict[str, Argument]] = {
        rowprop.selection.AboveMean: {},
        rowprop.selection.LossMass: {"mass": KEEP, "min_keep": FRACTION_OR_ZERO},
        rowprop.RandomRows: {"keep": KEEP},
        rowprop.selection.RankSampling: {"keep": KEEP},
        rowprop.TopK: {"keep": KEEP},
        selection.Everything: {},
        selection.PercentileSampling: {
            "beta": also(POSITIVE, "0"),
            "recent": COUNT,
            "floor": FRACTION_OR_ZERO,
        },
        selection.ImportanceSampling: {"keep": KEEP, "gate": optional(REAL), "smoothing": FRACTION_OR_ZERO},
        selection.MaxVariance: {"keep": KEEP},
        selection.MultipleOf: {"selector": SELECTOR, "multiple_of": COUNT},
        selection.Nonzero: {},
        selection.OverAll: {"selector": SELECTOR},
        selection.PerClass: {"selector": SELECTOR},
        selection.Threshold: {"at_least": REAL},
        selection.TopBottom: {"top": also(KEEP, "0"), "bottom": also(KEEP, "0", valid=0.25)},
        history.ReducibleLoss: {
            "selector": SELECTOR,
            "irreducible": needs(lambda: torch.rand(N), "", {"whole": lambda: torch.ones(N, dtype=torch.int64)}),
        },
    }
    for kind, arguments in kinds.items():
        name = ("history." if kind is history.ReducibleLoss else "") + kind.__name__

        def make(kind: Any = kind, arguments: Any = arguments) -> Any:
            return kind(**{each: argument.valid() for each, argument in arguments.items()})

        DOORS[name] = made(kind, use_selector, **arguments)
        DOORS[f"{name}.__call__"] = method("__call__", make, checked, scores=SCORES, context=CONTEXT)
        if hasattr(kind, "keep_at"):
            NO_DOORS[f"{name}.keep_at"] = "how the step asks, after its own checks"
        if hasattr(kind, "state_dict"):
            DOORS[f"{name}.state_dict"] = method("state_dict", make)
            remembering = make
            if "selector" in arguments:

                def remembering(kind: Any = kind, arguments: Any = arguments) -> Any:
                    rest = {each: argument.valid() for each, argument in arguments.items()}
                    return kind(**(rest | {"selector": selection.PercentileSampling()}))

            DOORS[f"{name}.load_state_dict"] = method(
                "load_state_dict", remembering, state=states(partial(_warmed, remembering))
            )


def _warmed(make: Made) -> Any:
    selector = make()
    use_selector(selector)
    return selector


_selectors()

DOORS |= {
    "schedule.Schedule": made(
        rowprop.schedule.Schedule,
        lambda schedule: [schedule.active(0.5, 3), use_step(step(schedule=schedule, total_steps=4))],
        start=needs(0.25, "0, 0.5"),
        end=needs(0.75, "0.5"),
        interrupt=COUNT_OR_ZERO,
    ),
    "schedule.Schedule.active": method(
        "active", rowprop.schedule.Schedule, progress=PROGRESS, batch_index=COUNT_OR_ZERO
    ),
    "Selection": made(
        rowprop.Selection,
        use_selection,
        rows=needs(
            lambda: torch.tensor([0, 2, 5]),
            "",
            {
                "beyond N": lambda: torch.tensor([0, 2, N]),
                "negative": lambda: torch.tensor([-1, 2, 5]),
                "unsorted": lambda: torch.tensor([5, 2, 0]),
                "repeated": lambda: torch.tensor([2, 2, 5]),
                "float": lambda: torch.tensor([0.0, 2.0, 5.0]),
                "int32": lambda: torch.tensor([0, 2, 5], dtype=torch.int32),
                "bool": lambda: torch.tensor([True, False, True]),
                "on meta": lambda: torch.tensor([0, 2, 5], device="meta"),
                "two dimensions": lambda: torch.tensor([[0, 2, 5]]),
            },
        ),
        weights=needs(
            lambda: torch.full((3,), 1 / 3),
            "negative",
            {
                "negative": lambda: torch.tensor([1.0, -1.0, 1.0]),
                "nan": lambda: torch.tensor([1.0, torch.nan, 1.0]),
                "infinite": lambda: torch.tensor([1.0, torch.inf, 1.0]),
                "whole": lambda: torch.ones(3, dtype=torch.int64),
                "on meta": lambda: torch.ones(3, device="meta"),
                "two dimensions": lambda: torch.ones(3, 1),
            },
        ),
        num_rows=needs(N),
        even=FLAG,
        unbiased=FLAG,
    ),
    "Context": made(
        rowprop.selection.Context,
        lambda context: [use_selector_with(context, kind) for kind in ("RandomRows", "PerClass")],
        progress=optional(FRACTION_OR_ZERO),
        ids=optional(IDS, "negative ids, huge ids"),
        classes=CLASSES,
        generator=GENERATOR,
        history=Argument(loss_history, frozenset(POOL)),  # only a part that asks for it looks at it
        positions=optional(IDS, "negative ids, huge ids"),
    ),
    "Context.need": method(
        "need",
        known,
        field=needs("ids", "", {"generator": value("generator"), "misspelt": value("id")}),
        who=Argument(value("a part"), frozenset(POOL)),  # goes into a sentence
    ),
    "Context.at": method(
        "at",
        known,
        rows=needs(
            lambda: torch.tensor([0, 2, 5]),
            "long vector, repeated, no rows, negative",
            {
                "repeated": lambda: torch.tensor([2, 2]),
                "no rows": lambda: torch.empty(0, dtype=torch.int64),
                "negative": lambda: torch.tensor([-1]),
                "far below 0": lambda: torch.tensor([-N - 1]),
                "beyond N": lambda: torch.tensor([0, N]),
                "on meta": lambda: torch.tensor([0], device="meta"),
            },
        ),
    ),
    "Selection.mean": Door(
        lambda **given: use_selection(rowprop.Selection.mean(**given)),
        {
            "rows": needs(
                lambda: torch.tensor([0, 2, 5]),
                "long vector",
                {"unsorted": lambda: torch.tensor([5, 2, 0]), "beyond N": lambda: torch.tensor([N])},
            ),
            "num_rows": needs(N),
            "dtype": needs(torch.float32, "", {"whole": value(torch.int64), "complex": value(torch.complex64)}),
        },
    ),
    "selector": Door(
        lambda function: use_step(step(selector=rowprop.selector(function))),
        {
            "function": needs(
                lambda: half_of,
                "of scores",
                {"of scores": lambda: lambda scores: half_of(scores), "of both": lambda: lambda scores, context: None},
            )
        },
    ),
    "Selection.everything": Door(
        lambda **given: use_selection(rowprop.Selection.everything(**given)),
        {
            "num_rows": needs(N),
            "device": needs("cpu", "", {"meta": value("meta"), "absent": value("cuda:99")}),
            "dtype": needs(torch.float32, "", {"whole": value(torch.int64)}),
        },
    ),
}

ENGINE = needs(
    "sliced",
    "an engine",
    {
        "an engine": lambda: engines.Sliced("exact"),
        "the class": value(engines.Sliced),
        "unknown name": value("slice"),
        "the race of earlier versions": value("auto"),
        "names": lambda: ("sliced", "masked"),
    },
)
HISTORY = optional(
    needs(
        loss_history,
        "",
        {
            "the class": value(history.LossHistory),
            "the sampler's class": value(history.PruningSampler),
            "torch's sampler": lambda: torch.utils.data.SequentialSampler([1]),
        },
    )
)
RANKS = optional(
    needs(
        distributed.Global,
        "local",
        {"local": distributed.Local, "the class": value(distributed.Local), "a function": value(distributed.mean)},
    )
)
SCHEDULE = optional(
    needs(
        lambda: rowprop.schedule.Schedule(0.0, 1.0, 0),
        "",
        {"the class": value(rowprop.schedule.Schedule), "a ramp": lambda: schedule.Ramp(1.0, 0.5)},
    )
)
# Nobody looks where a scorer scores.
BESIDE = "losses and text, losses and short scores, losses and whole scores, losses and scores per class"
STEP: dict[str, Argument] = {
    "model": MODEL,
    "losses_fn": LOSSES_FN,
    "selector": SELECTOR,
    "scorer": optional(needs(value(losses_fn), "losses per entry, detached losses, losses and whole scores", LOSSES)),
    "schedule": SCHEDULE,
    "history": HISTORY,
    "engine": ENGINE,
    "ranks": RANKS,
    "total_steps": optional(COUNT),
    "accumulate_to": optional(needs(lambda: None, "3, 10**30")),
    "generator": GENERATOR,
    "nonfinite": choice("error"),
    "min_rows": optional(COUNT),
    "timing": FLAG,
    "unit": choice("row"),
}


@guarded
def token_losses(model: Any, batch: Any) -> Tensor:
    return losses_fn(model, batch)[:, None] * torch.linspace(0.5, 2, 4)


def counted() -> Tensor:
    return torch.arange(4 * N).view(N, 4) % 5 > 0


TOKENS_FN = needs(value(token_losses), [*LOSSES_FN.fine, "losses of another length", "losses per class"], LOSSES)
TOKENS: dict[str, Argument] = {"model": MODEL, "losses_fn": TOKENS_FN}


def token_step(**options: Any) -> rowprop.SelectiveBackprop:
    return rowprop.SelectiveBackprop(
        model(),
        **({"losses_fn": token_losses, "selector": rowprop.TopK(0.5), "engine": "sliced", "unit": "token"} | options),
    )


def use_token_step(step: Any) -> Any:
    for _ in range(2):
        loss, record = step(batch())
        if loss.requires_grad:
            loss.backward()
        assert bool(loss.isfinite()), "the loss is not finite"
        checked(record.selection)
    return record


def remembering_step(**options: Any) -> rowprop.SelectiveBackprop:
    known = history.LossHistory(N)
    made = step(
        selector=selection.PercentileSampling(floor=0.5),
        history=known,
        generator=torch.Generator().manual_seed(0),
        **options,
    )
    use_step(made)
    return made


def sampled_step() -> rowprop.SelectiveBackprop:
    made = step(history=sampler())
    made(batch(), ids=torch.arange(N))
    return made


CALL: dict[str, Argument] = {
    "batch": BATCH,
    "batch_index": optional(COUNT_OR_ZERO),
    "ids": IDS,
    "classes": CLASSES,
    "progress": optional(PROGRESS),
    "counted": needs(None, "None", {"of rows": lambda: torch.ones(N, dtype=torch.bool), "of tokens": counted}),
}


def _backward(result: Any) -> Any:
    loss, _ = result
    loss.backward()
    return result


def _stepped(engine: str, **options: Any) -> Door:
    def on() -> Any:
        return step(
            engine=engine,
            history=history.LossHistory(N),
            selector=selection.PerClass(rowprop.TopK(0.5)),
            schedule=rowprop.schedule.Schedule(0, 1, 0),
            total_steps=5,
            **options,
        )

    return method("__call__", on, _backward, **CALL)


DOORS |= {
    "engines.Sliced": made(engines.Sliced, batchnorm=optional(choice("exact")), attention=choice("cut")),
    "engines.Recompute": made(engines.Recompute, scoring=choice("eval")),
    "engines.Masked": made(engines.Masked),
    "SelectiveBackprop": made(rowprop.SelectiveBackprop, use_step, **STEP),
    "SelectiveBackprop, recompute": made(
        rowprop.SelectiveBackprop,
        use_step,
        **(STEP | {"engine": also(ENGINE, valid="recompute"), "losses_fn": also(LOSSES_FN, BESIDE)}),
    ),
    "SelectiveBackprop, masked": made(
        rowprop.SelectiveBackprop,
        use_step,
        **{name: STEP[name] for name in ("model", "losses_fn", "selector")},
        engine=also(ENGINE, valid="masked"),
    ),
    "SelectiveBackprop, tokens": made(
        rowprop.SelectiveBackprop,
        use_token_step,
        **TOKENS,
        selector=also(SELECTOR, "", None),
        engine=also(ENGINE, valid="masked"),
        scorer=optional(needs(value(token_losses), ["detached losses", "losses per class"], LOSSES)),
        ranks=RANKS,
        accumulate_to=optional(needs(lambda: None, "3, 10**30")),
        nonfinite=choice("drop"),
        min_rows=optional(COUNT),
        unit=choice("token"),
    ),
    "SelectiveBackprop.__call__, tokens": method(
        "__call__",
        token_step,
        _backward,
        batch=BATCH,
        ids=optional(also(IDS, "negative ids, huge ids")),
        classes=optional(CLASSES),
        progress=optional(PROGRESS),
        counted=optional(
            needs(
                counted,
                "none counts",
                {
                    "none counts": lambda: torch.zeros(N, 4, dtype=torch.bool),
                    "of rows": lambda: torch.ones(N, dtype=torch.bool),
                    "flat": lambda: counted().flatten(),
                    "numbers": lambda: counted().float(),
                    "on meta": lambda: torch.ones(N, 4, dtype=torch.bool, device="meta"),
                },
            )
        ),
    ),
    "SelectiveBackprop.__call__": _stepped("sliced"),
    "SelectiveBackprop.__call__, recompute": _stepped("recompute"),
    "SelectiveBackprop.__call__, masked": _stepped("masked"),
    "SelectiveBackprop.state_dict": method("state_dict", remembering_step),
    "SelectiveBackprop.load_state_dict": method("load_state_dict", remembering_step, state=states(remembering_step)),
    "SelectiveBackprop.load_state_dict, sampler": method("load_state_dict", sampled_step, state=states(sampled_step)),
}


def losses() -> Tensor:
    return losses_fn(model(), batch())


def _picked(picked: Tensor) -> Tensor:
    if picked.requires_grad:
        picked.sum().backward()
    return picked


def declared(**given: Any) -> Any:
    @rowprop.rowwise(**given)
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:  # pyright: ignore
            ctx.save_for_backward(x)
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:  # pyright: ignore
            (x,) = ctx.saved_tensors
            assert x.shape == grad.shape
            return grad * 2

    x = torch.rand(N, 2, requires_grad=True)
    rowprop.pick(cast("Any", Double.apply(x)).sum(1), torch.tensor([1, 2])).sum().backward()
    assert x.grad is not None and x.grad.sum().item() == 8, "the gradient"
    return x


def _watched() -> Any:
    with rowprop.watch() as report:
        _picked(rowprop.pick(losses(), torch.tensor([0, 3])))
    return report


ROWS = needs(
    lambda: torch.tensor([0, 2, 5]),
    "long vector, int32 vector",
    {
        "negative": lambda: torch.tensor([-1]),
        "unsorted": lambda: torch.tensor([5, 2]),
        "repeated": lambda: torch.tensor([5, 5]),
        "no rows": lambda: torch.empty(0, dtype=torch.int64),
        "uint8": lambda: torch.tensor([1, 2], dtype=torch.uint8),
        "beyond N": lambda: torch.tensor([0, N]),
        "far below 0": lambda: torch.tensor([-N - 1]),
        "short mask": lambda: torch.ones(5, dtype=torch.bool),
        "float rows": lambda: torch.tensor([0.0, 1.0]),
        "rows on meta": lambda: torch.tensor([0, 1], device="meta"),
        "a list": lambda: [0, -1, 2],
        "a range": lambda: range(3),
        "an array": lambda: np.arange(3)[::-1],
        "a list of bools": lambda: [True] * N,
        "a list beyond N": lambda: [0, N],
        "a short list of bools": lambda: [True],
        "a list of floats": lambda: [0.0, 1.0],
        "a list of text": lambda: ["a"],
        "a list of lists": lambda: [[0, 1]],
        "an uneven list": lambda: [0, [1, 2]],
        "an array of objects": lambda: np.array([None, 1]),
        "a huge index": lambda: [10**30],
        "a tuple of rows": lambda: (0, 1),
        "a result of topk": lambda: torch.rand(N).topk(2),
        "a result of where": lambda: torch.where(torch.ones(N) > 0),
        **{
            f"selection of {name}": (lambda make=make: make(scores()))
            for name, make in GARBAGE_SELECTIONS.items()
            if name not in ("the rows alone", "a pair")
        },
    },
)
ROWS = also(ROWS, "negative, unsorted, repeated, no rows, uint8")
ROWS = also(ROWS, "a list, a range, an array, a list of bools, empty list")
# Its weights are not applied by pick.
ROWS = also(
    ROWS,
    ", ".join(
        f"selection of {name}"
        for name in (
            "nan weights",
            "infinite weights",
            "complex weights",
            "whole weights",
            "too many weights",
            "too few weights",
            "weights of two dimensions",
            "weights None",
            "meta weights",
        )
    ),
)
LONG = frozenset({"10**30"})  # as many steps take as long as they take
TICK = needs(lambda: None, ["None", *(name for name in CALLABLES if " to " in name)])
MEASURED_MODEL = Argument(MODEL.valid, MODEL.fine - {*CALLABLES, "class", "no parameters", "frozen"}, MODEL.more)
SEEN_MODEL = also(MEASURED_MODEL, "nan weights, frozen")  # no backward runs, and nobody looks at the losses
MEASURED_LOSSES = Argument(value(losses_fn), frozenset({"losses per entry"}), LOSSES)
MEASURED_BATCH = Argument(batch, frozenset(), BATCHES)

DECLARED = replace(
    needs(
        value(0),
        "3, 0, 10**30, empty list, empty tuple, tuple, too long",
        {"tuple": value((0,)), "too long": value((0, 1))},
    ),
    skip=frozenset({"None"}),  # a wrong declaration that nobody can see from outside
)


def use_skipping(**given: Any) -> Any:
    out = rowprop.skip_zeros(**given)
    if isinstance(given["x"], nn.Module):
        with out.paused():
            out.remove()
    if isinstance(out, Tensor) and out.requires_grad and out.numel():
        out.backward(torch.eye(*out.shape[:2]) if out.ndim == 2 else torch.ones_like(out))
    return out


def _searched(model: Any) -> Any:
    with rowprop.find_zeros(model) as report:
        losses = losses_fn(model, batch())
        if losses.requires_grad:
            losses[:2].mean().backward()
    assert all(0 <= place.saves <= 1 for place in report.places), "no share"
    return report


DOORS |= {
    "pick": Door(
        lambda **given: _picked(rowprop.pick(**given)),
        {
            "input": needs(losses, "graph vector", {"0-d": lambda: losses().mean(), "no rows": lambda: losses()[:0]}),
            "rows": ROWS,
            "batchnorm": optional(choice("rows")),
            "attention": choice("exact"),
        },
    ),
    "rowwise": Door(
        declared,
        {
            # Where a declaration does not fit the tensors, the backward runs at full size, and watch() says why.
            "saved": DECLARED,
            "grads": DECLARED,
            "outputs": DECLARED,
        },
    ),
    "watch": Door(_watched),
    "skip_zeros": Door(
        use_skipping,
        {
            "x": needs(
                lambda: torch.ones(N, 3, requires_grad=True),
                [
                    *(name for name in POOL if "vector" in name or "matrix" in name),
                    "empty tensor",
                    "module",
                    "a model",
                    "no rows",
                ],
                {"a model": model, "no rows": lambda: torch.ones(0, 3, requires_grad=True)},
            ),
            "unit": optional(choice("row")),
            "attention": choice("exact"),
            "capacity": optional(KEEP),
        },
    ),
    "find_zeros": Door(_searched, {"model": also(MODEL, "nan weights")}),
    "verify": Door(
        rowprop.verify,
        {
            "model": MEASURED_MODEL,
            "batch": MEASURED_BATCH,
            "losses_fn": MEASURED_LOSSES,
            "engine": needs("sliced", "", {"unknown": value("slice")}),
            "keep": needs(0.5, "0.5"),
            "rows": needs(
                lambda: None,
                "None, long vector, two rows",
                {
                    "two rows": lambda: torch.tensor([1, 4]),
                    "beyond N": lambda: torch.tensor([N]),
                    "negative": lambda: torch.tensor([-1]),
                    "repeated": lambda: torch.tensor([1, 1]),
                    "no rows": lambda: torch.empty(0, dtype=torch.int64),
                    "all rows": lambda: torch.arange(N),
                },
            ),
            "attention": choice("exact"),
            "unit": choice("row"),
            "batchnorm": optional(choice("rows")),
            "seed": needs(0, "0, 3, -1"),
            "tick": TICK,
            "tolerance": optional(needs(1e-3, "0, 0.5, 3, 10**30, 1e300")),
        },
    ),
    "plan": Door(
        rowprop.plan,
        {
            "model": MEASURED_MODEL,
            "batch": MEASURED_BATCH,
            "losses_fn": MEASURED_LOSSES,
            "keep": needs(
                0.5, "0.5, list", {"a list with 1": value([0.5, 1.0]), "a list with text": value([0.5, "a"])}
            ),
            "optimizer": optional(choice("sgd")),
            "batchnorm": optional(choice("rows")),
            "rounds": replace(needs(1, "3"), skip=LONG),
            "seconds": POSITIVE,
            "tick": TICK,
        },
    ),
    "cost.count_step": Door(
        count_step,
        {
            "model": also(MEASURED_MODEL, "nan weights, on meta"),
            "batch": also(MEASURED_BATCH, "one row, nan inputs, on meta"),
            "losses_fn": also(
                MEASURED_LOSSES,
                f"nan losses, losses of another length, {BESIDE}",
            ),
            "keep": optional(needs(0.5, "0.5")),
            "optimizer": choice("sgd"),
            "batchnorm": optional(choice("rows")),
            "tick": TICK,
        },
    ),
    "cost.profile": Door(
        profile,
        {
            "model": also(MEASURED_MODEL, "nan weights"),
            "batch": also(MEASURED_BATCH, "one row, nan inputs"),
            "losses_fn": also(MEASURED_LOSSES, f"nan losses, losses of another length, {BESIDE}"),
            "rounds": needs(1, "3, 10**30"),
            "trace": needs(lambda: None, "None"),
            "tick": TICK,
        },
    ),
    "cost.count_flops": Door(lambda **given: _counted(count_flops(**given))),
}


def _counted(counting: Any) -> Any:
    with counting as flops:
        losses().sum().backward()
    return flops.total_flops


# --- schedules, recipes -----------------------------------------------------------------------------------------------


def _parts(*parts: Any) -> Made:
    return lambda: list(parts)


class _Counted:
    num_rows = N
    kept_by_rank = (3,)


def use_schedule(made: Any) -> Any:
    numbers = [made(progress) for progress in (0.0, 0.3, 0.7, 1.0)]
    assert all(-1e301 < number < 1e301 for number in numbers), "a number"
    return use_selector(rowprop.TopK(lambda progress: 0.5))


def clock() -> schedule.Progress:
    made = schedule.Progress(10)
    made.count(cast("Any", _Counted()))
    return made


DOORS |= {
    "schedule.Joined": made(
        schedule.Joined,
        use_schedule,
        parts=needs(
            _parts((0.0, 1.0), (0.5, schedule.Ramp(1.0, 0.5))),
            "",
            {
                "begins with nan": _parts((0.0, 1.0), (float("nan"), 0.5)),
                "begins at text": _parts(("a", 1.0)),
                "begins late": _parts((0.5, 1.0)),
                "descending": _parts((0.0, 1.0), (0.5, 0.3), (0.2, 1.0)),
                "part as text": _parts((0.0, "a")),
                "part nan": _parts((0.0, float("nan"))),
                "part None": _parts((0.0, None)),
                "part of nothing": _parts((0.0, lambda: 1.0)),
                "part to text": _parts((0.0, lambda progress: "a")),
                "part to nan": _parts((0.0, lambda progress: float("nan"))),
                "triples": _parts((0.0, 1.0, 2.0)),
                "numbers": _parts(0.0, 1.0),
                "empty parts": _parts((), ()),
            },
        ),
    ),
    "schedule.Joined.__call__": method(
        "__call__", lambda: schedule.Joined([(0.0, 1.0), (0.5, schedule.Ramp(1.0, 0.5))]), progress=PROGRESS
    ),
    "schedule.Ramp": made(
        schedule.Ramp,
        use_schedule,
        first=also(REAL),
        last=also(REAL),
        start=needs(0.25, "0, 0.5"),
        end=needs(0.75, "0.5"),
        curve=choice("linear"),
    ),
    "schedule.Ramp.__call__": method("__call__", lambda: schedule.Ramp(1.0, 0.5), progress=PROGRESS),
    "schedule.Progress": made(
        schedule.Progress, lambda progress: progress.count(_Counted()), total=COUNT, counts=choice("rows_seen")
    ),
    "schedule.Progress.count": method("count", clock, record=needs(_Counted)),
    "schedule.Progress.state_dict": method("state_dict", clock),
    "schedule.Progress.load_state_dict": method("load_state_dict", clock, state=states(clock)),
}

RECIPE: dict[str, Argument] = {"model": MODEL, "losses_fn": LOSSES_FN}


def _recipe(make: Callable[..., Any], **arguments: Argument) -> Door:
    options = {} if make is recipes.composer else {"engine": "sliced"}
    return Door(lambda **given: use_step(make(**given, **options)), RECIPE | arguments)


@guarded
def losses_and_entropies(model: Any, batch: Any) -> rowprop.Scored:
    return rowprop.Scored(token_losses(model, batch), torch.rand(N, 4))


def _of_tokens(make: Callable[..., Any], parts: dict[str, Argument], **arguments: Argument) -> Door:
    def call(**given: Any) -> Any:
        step = make(**given, engine="sliced")
        loss, record = step(batch(), ids=torch.arange(N), counted=counted())
        if loss.requires_grad:
            loss.backward()
        assert bool(loss.isfinite()), "the loss is not finite"
        checked(record.selection)
        return record

    return Door(call, parts | arguments)


DOORS |= {
    "recipes.ohem": _recipe(recipes.ohem, keep=KEEP),
    "recipes.random": _recipe(recipes.random, keep=KEEP),
    "recipes.composer": _recipe(
        recipes.composer,
        total_steps=COUNT,
        keep=KEEP,
        start=needs(0.25, "0, 0.5"),
        end=needs(0.75, "0.5"),
        interrupt=COUNT_OR_ZERO,
        scale_factor=needs(1.0, "0.5"),
    ),
    "recipes.batch_loss_filter": _recipe(
        recipes.batch_loss_filter,
        epochs=needs(3, "3, 10**30"),
        total_steps=COUNT,
        min_loss_perc=KEEP,
        min_sample_perc=FRACTION_OR_ZERO,
        mixed_precision_batch=FLAG,
    ),
    "recipes.biggest_losers": _recipe(
        recipes.biggest_losers,
        batch_rows=COUNT,
        epochs=needs(3, "3, 10**30"),
        total_steps=COUNT,
        beta=also(POSITIVE, "0"),
        recent=COUNT,
        staleness=also(COUNT, valid=1),
    ),
    "recipes.kath18": _recipe(recipes.kath18, keep=FRACTION, gated=FLAG),
    "recipes.infobatch": _recipe(
        recipes.infobatch,
        num_rows=needs(N),
        epochs=COUNT,
        prune=FRACTION_OR_ZERO,
        full_after=FRACTION_OR_ZERO,
        multiple_of=COUNT,
        seed=COUNT_OR_ZERO,
        selector=optional(SELECTOR),
    ),
    "recipes.rho_loss": _recipe(
        recipes.rho_loss,
        irreducible=needs(
            lambda: torch.rand(N), "", {"too short": lambda: torch.rand(N - 1), "matrix of N": lambda: torch.rand(N, 1)}
        ),
        keep=KEEP,
    ),
    "recipes.rho1": _of_tokens(
        recipes.rho1,
        TOKENS,
        reference=needs(lambda: model(), [*MODEL.fine & set(POOL)], {"of rows": lambda: torch.rand(N)}),
        keep=KEEP,
    ),
    "recipes.rho1, remembered": _of_tokens(
        recipes.rho1,
        TOKENS,
        reference=needs(
            lambda: torch.rand(N, 4),
            ["module"],
            {
                "too short": lambda: torch.rand(N - 1, 4),
                "too narrow": lambda: torch.rand(N, 3),
                "whole": lambda: torch.ones(N, 4, dtype=torch.int64),
                "nan": lambda: torch.full((N, 4), torch.nan),
            },
        ),
        keep=KEEP,
    ),
    "recipes.high_entropy_tokens": _of_tokens(
        recipes.high_entropy_tokens,
        {"model": MODEL, "losses_fn": needs(value(losses_and_entropies), "", LOSSES)},
        keep=KEEP,
    ),
}

# --- history ----------------------------------------------------------------------------------------------------------

HISTORY_IDS = IDS
OPEN_IDS = also(IDS, "negative ids, huge ids")
ANY_IDS = "no ids, short ids, long vector"


def _read_ids(argument: Argument) -> Argument:
    return also(argument, ANY_IDS)


UPDATED: dict[str, Argument] = {
    "ids": IDS,
    "losses": needs(
        scores,
        "",
        {
            "nan losses": lambda: torch.full((N,), torch.nan),
            "infinite losses": lambda: torch.full((N,), torch.inf),
            "whole losses": lambda: torch.ones(N, dtype=torch.int64),
            "short losses": lambda: torch.rand(N - 1),
            "meta losses": lambda: torch.rand(N, device="meta"),
            "losses with a graph": lambda: torch.rand(N, requires_grad=True),
        },
    ),
}
UPDATED["losses"] = also(UPDATED["losses"], "nan losses, infinite losses, losses with a graph")
CHOSEN = optional(
    needs(
        lambda: torch.arange(3),
        "long vector",
        {
            "beyond N": lambda: torch.tensor([N]),
            "negative": lambda: torch.tensor([-1]),
            "far below 0": lambda: torch.tensor([-N - 1]),
            "none": lambda: torch.empty(0, dtype=torch.int64),
            "on meta": lambda: torch.arange(3, device="meta"),
        },
    )
)
CHOSEN = also(CHOSEN, "none")
WEIGHTS = needs(
    lambda: torch.ones(N),
    "",
    {
        "negative weights": lambda: -torch.ones(N),
        "nan weights": lambda: torch.full((N,), torch.nan),
        "infinite weights": lambda: torch.full((N,), torch.inf),
        "short weights": lambda: torch.ones(N - 1),
        "whole weights": lambda: torch.ones(N, dtype=torch.int64),
        "meta weights": lambda: torch.ones(N, device="meta"),
    },
)


def _history(prefix: str, on: Made, ids: Argument) -> dict[str, Door]:
    doors = {
        f"history.LossHistory.{name}{prefix}": method(name, on, ids=_read_ids(ids))
        for name in ("losses_of", "age_of", "count_of", "weights_of")
    }
    return doors | {
        f"history.LossHistory.update{prefix}": method("update", on, **(UPDATED | {"ids": ids}), rows=CHOSEN),
        f"history.LossHistory.store{prefix}": method("store", on, **(UPDATED | {"ids": ids})),
        f"history.LossHistory.set_weights{prefix}": method("set_weights", on, ids=ids, weights=WEIGHTS),
        f"history.LossHistory.state_dict{prefix}": method("state_dict", on),
        f"history.LossHistory.load_state_dict{prefix}": method("load_state_dict", on, state=states(on)),
        f"history.LossHistory.synchronise{prefix}": method("synchronise", on, group=needs(lambda: None, "None")),
    }


def use_history(known: history.LossHistory) -> Any:
    return use_step(step(history=known))


DATA = needs(
    lambda: ["a", "b", "c"],
    "empty text, text, markup, bytes, empty list, list, empty tuple, empty tensor, vector, graph vector, nan vector, "
    "half vector, long vector, int32 vector, bool vector, complex vector, meta vector, sparse vector, matrix, "
    "long matrix, array",
)


def use_data(data: Any) -> Any:
    return len(data), [data[place] for place in range(len(data))], data.__getitems__(list(range(len(data))))


DOORS |= {
    "history.LossHistory": made(
        history.LossHistory,
        use_history,
        num_rows=optional(needs(N)),
        device=needs("cpu", "", {"unknown": value("foo"), "absent": value("cuda:99"), "meta": value("meta")}),
    ),
    **_history("", loss_history, IDS),
    **_history(", any ids", open_history, OPEN_IDS),
    "history.WithIds": made(history.WithIds, use_data, dataset=DATA),
    "history.WithIds.__len__": method("__len__", lambda: history.WithIds(["a", "b"])),
    # The protocol of sequences gives TypeError and IndexError a meaning.
    "history.WithIds.__getitem__": sequence(
        "__getitem__", lambda: history.WithIds(["a", "b"]), index=needs(0, "0, -1, True")
    ),
    "history.WithIds.__getitems__": sequence(
        "__getitems__",
        lambda: history.WithIds(["a", "b"]),
        indices=needs(
            lambda: [0, 1], "empty list, empty tuple, set, empty text, long vector, bool vector, array, empty tensor"
        ),
    ),
    "history.StaleScorer": Door(
        lambda **given: use_step(
            step(scorer=history.StaleScorer(**given), history=history.LossHistory(N), engine="recompute")
        ),
        {
            "losses_fn": also(LOSSES_FN, f"nan losses, {BESIDE}"),
            "staleness": also(COUNT, valid=1),
        },
    ),
    "history.StaleScorer.__call__": method(
        "__call__",
        lambda: history.StaleScorer(losses_fn),
        model=also(MODEL, "nan weights"),
        batch=also(BATCH, "nan inputs"),
        context=also(
            CONTEXT,
            "short classes, no ids and no rows",
            valid=fresh,
            more={"another history": lambda: fresh(history=5), "short ids": lambda: fresh(ids=torch.arange(N - 1))},
        ),
    ),
    "history.PruningSampler": made(
        history.PruningSampler,
        use_sampler,
        history=needs(loss_history, "", {"too small": lambda: history.LossHistory(3)}),
        num_rows=needs(N, "3"),
        epochs=COUNT,
        prune=FRACTION_OR_ZERO,
        full_after=FRACTION_OR_ZERO,
        shuffle=FLAG,
        multiple_of=needs(2, "3"),
        seed=COUNT_OR_ZERO,
        num_replicas=needs(1, "3"),
        rank=needs(0, "0"),
        group=needs(lambda: None, "None"),
    ),
    "history.PruningSampler.__iter__": method("__iter__", sampler),
    "history.PruningSampler.__len__": method("__len__", sampler),
    "history.PruningSampler.trained": method("trained", sampler, ids=_read_ids(OPEN_IDS)),
    "history.PruningSampler.progress": method("progress", sampler, trained=needs(3, "0, 3, 10**30")),
    "history.PruningSampler.state_dict": method("state_dict", sampler, trained=optional(needs(3, "0, 3"))),
    "history.PruningSampler.load_state_dict": method("load_state_dict", sampler, state=states(sampler)),
}

# --- scoring ----------------------------------------------------------------------------------------------------------

# A scorer hands on the result of the wrapped function, and the step checks it.
FUNCTION = needs(value(losses_fn), [name for name in LOSSES if name != "losses of the batch alone"], LOSSES)
FUNCTION = also(FUNCTION, ", ".join(name for name in CALLABLES if " to " in name))
IMAGES = (torch.zeros(N, 3, 4, 4), torch.zeros(N, dtype=torch.int64))
TOKENS = (torch.zeros(N, 6, dtype=torch.int64), torch.zeros(N, dtype=torch.int64))


@guarded
def whatever(model: Any, batch: Any) -> Tensor:
    return batch[0].flatten(1).float().mean(1)


def _scorer(make: Callable[..., Any], given_batch: Any, **arguments: Argument) -> dict[str, Door]:
    name = f"scoring.{make.__name__}"
    valid = {each: argument.valid for each, argument in arguments.items()}
    return {
        name: made(make, lambda scorer: scorer(model(), given_batch), **arguments),
        f"{name}.__call__": method(
            "__call__",
            lambda: make(**({each: value() for each, value in valid.items()} | {"function": whatever})),
            model=Argument(model, frozenset(POOL.keys() | MODEL.more.keys()), MODEL.more),
            batch=also(
                needs(
                    lambda: given_batch,
                    "no rows, one row, inputs alone, nan inputs, whole inputs, float classes, on meta, "
                    "half on meta, classes out of range, sizes that differ",
                    BATCHES,
                )
            ),
        ),
    }


LOGITS = needs(
    lambda: torch.randn(N, 4),
    "matrix",
    {
        "whole": lambda: torch.ones(N, 4, dtype=torch.int64),
        "complex": lambda: torch.ones(N, 4, dtype=torch.complex64),
        "vector of N": lambda: torch.rand(N),
        "no classes": lambda: torch.rand(N, 0),
        "no rows": lambda: torch.rand(0, 4),
        "on meta": lambda: torch.rand(N, 4, device="meta"),
    },
)
LOGITS = also(LOGITS, "no rows, on meta")
TARGETS = needs(
    lambda: torch.arange(N) % 4,
    "",
    {
        "out of range": lambda: torch.full((N,), 99),
        "negative": lambda: torch.full((N,), -1),
        "short": lambda: torch.zeros(N - 1, dtype=torch.int64),
        "float": lambda: torch.zeros(N),
        "bool": lambda: torch.zeros(N, dtype=torch.bool),
        "complex": lambda: torch.zeros(N, dtype=torch.complex64),
        "on meta": lambda: torch.zeros(N, dtype=torch.int64, device="meta"),
    },
)
INDEX = needs(-100, "0, -1, 3, 10**30")


def _batches(*pairs: Any) -> Made:
    return lambda: list(pairs)


def _pair() -> Any:
    return torch.arange(N), batch()


DOORS |= {
    **_scorer(scoring.Downscaled, IMAGES, function=also(FUNCTION, valid=value(whatever)), scale=needs(0.5, "0.5")),
    "scoring.entropy": Door(
        scoring.entropy,
        {"logits": LOGITS, "mask": optional(needs(lambda: torch.ones(N), "", {"short": lambda: torch.ones(N - 1)}))},
    ),
    "scoring.margin": Door(scoring.margin, {"logits": LOGITS, "targets": TARGETS, "ignore_index": INDEX}),
    "scoring.gradient_norm": Door(
        scoring.gradient_norm,
        {
            "logits": LOGITS,
            "targets": TARGETS,
            "features": optional(needs(lambda: torch.rand(N, 5), "", {"short": lambda: torch.rand(N - 1, 5)})),
            "ignore_index": INDEX,
        },
    ),
    "history.holdout_losses": Door(
        history.holdout_losses,
        {
            "model": SEEN_MODEL,
            "losses_fn": also(LOSSES_FN, f"nan losses, {BESIDE}"),
            "loader": needs(
                _batches(_pair()),
                "",
                {
                    "bare batches": _batches(batch()),
                    "numbers": _batches(1, 2),
                    "triples": _batches((torch.arange(N), *batch())),
                    "negative ids": _batches((torch.arange(N) - 1, batch())),
                    "huge ids": _batches((torch.arange(N) + 2**62, batch())),
                    "float ids": _batches((torch.arange(N).float(), batch())),
                    "short ids": _batches((torch.arange(3), batch())),
                    "meta ids": _batches((torch.arange(N, device="meta"), batch())),
                    "a generator that raises": lambda: (raises() for _ in range(2)),
                },
            ),
            "unit": choice("row"),
        },
    ),
    "scoring.logits_of": Door(
        scoring.logits_of,
        {
            "outputs": needs(
                lambda: {"loss": torch.tensor(0.5), "logits": torch.zeros(N, 4)},
                [name for name in POOL if "vector" in name or "matrix" in name] + ["empty tensor"],
            )
        },
    ),
    "scoring.per_row_mean": Door(
        scoring.per_row_mean,
        {
            "values": needs(
                lambda: torch.rand(N, 4),
                "vector, graph vector, nan vector, half vector, matrix",
                {
                    "no rows": lambda: torch.rand(0, 4),
                    "no places": lambda: torch.rand(N, 0),
                    "complex": lambda: torch.ones(N, 4, dtype=torch.complex64),
                },
            ),
            "mask": optional(
                needs(
                    lambda: torch.ones(N, 4),
                    "nan",
                    {
                        "short": lambda: torch.ones(N - 1, 4),
                        "nan": lambda: torch.full((N, 4), torch.nan),
                        "on meta": lambda: torch.ones(N, 4, device="meta"),
                    },
                )
            ),
        },
    ),
    "scoring.score_without_graph": Door(
        scoring.score_without_graph,
        {
            "function": also(FUNCTION),
            "model": Argument(model, frozenset(POOL.keys() | MODEL.more.keys()), MODEL.more),
            "batch": Argument(batch, frozenset(BATCHES), BATCHES),
            "mode": choice("train"),
        },
    ),
}


# --- thinning ---------------------------------------------------------------------------------------------------------


def blocks() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Net(features) for features in (3, 4, 4)))


def thinned(**options: Any) -> rowprop.thinning.Thinning:
    thick = blocks()
    handle = rowprop.thin(thick, generator=torch.Generator().manual_seed(0), **options)
    losses_fn(thick, batch()).mean().backward()
    return handle


def use_thinning(**given: Any) -> Any:
    handle = rowprop.thin(**given)
    if any(block.startswith("layer") for block in handle.blocks) or not isinstance(given["model"], nn.Sequential):
        return handle  # another model, which the batch does not fit
    for _ in range(3):
        loss = losses_fn(given["model"], batch()).mean()
        if loss.requires_grad:
            loss.backward()
    assert all(0 < share <= 1 for share in handle.record.keep.values()), "no share of the rows"
    handle.load_state_dict(handle.state_dict())
    with handle.paused():
        handle.record.to_dict()
    return handle.remove()


def _paused(handle: Any) -> Any:
    with handle.paused():
        return handle


def saved_thinning() -> Argument:
    """A saved state of a handle, also with each entry of its parts something else."""
    whole = thinned().state_dict()
    more: dict[str, Made] = {
        "of keep": lambda: thinned(keep=0.5).state_dict(),
        "of other blocks": lambda: _with_shares(whole, {f"other.{name}": held for name, held in shares.items()}),
        "a generator of another kind": lambda: whole | {"generator": torch.zeros(16, dtype=torch.uint8)},
        "a generator of zeros": lambda: whole | {"generator": torch.zeros_like(whole["generator"])},
    }
    for part in ("control", "worth", "pairs"):
        for kind, held in states(lambda part=part: Saved(whole[part])).more.items():
            if kind not in ("another entry", "blind: None", "blind: text", "left: empty list"):
                more[f"{part}, {kind}"] = lambda part=part, held=held: whole | {part: held()}
    shares = whole["control"]["shares"]
    changes: dict[str, Callable[[list[float]], list[Any]]] = {
        "without a number": lambda numbers: numbers[:-1],
        "with one too many": lambda numbers: [*numbers, 0.5],
        "of nan": lambda numbers: [float("nan")] * len(numbers),
        "below zero": lambda numbers: [-1.0] * len(numbers),
        "of text": lambda numbers: ["a"] * len(numbers),
    }
    for kind, change in changes.items():
        more[f"shares {kind}"] = lambda change=change: _with_shares(
            whole, {name: held | {"past": change(held["past"])} for name, held in shares.items()}
        )
    return also(states(thinned), more=more)


def _with_shares(state: dict[str, Any], shares: dict[str, Any]) -> dict[str, Any]:
    return state | {"control": state["control"] | {"shares": shares}}


@dataclass
class Saved:
    """A part of a saved state."""

    held: dict[str, Any]

    def state_dict(self) -> dict[str, Any]:
        return dict(self.held)


THICK = needs(
    blocks,
    "frozen, half, nan weights",
    {
        "no blocks": model,
        "empty": nn.Sequential,
        "frozen": lambda: blocks().requires_grad_(False),
        "nan weights": lambda: _filled(blocks(), torch.nan),
        "half": lambda: blocks().half(),
    },
)
BLOCKS = optional(
    needs(
        lambda: ["0", "1"],
        "",
        {
            "a name that is not there": lambda: ["7"],
            "the model itself": lambda: [""],
            "one name": value("0"),
            "another model's module": lambda: [nn.Linear(3, 3)],
            "a class in a list": lambda: [nn.Linear],
            "a list in a list": lambda: [["0"]],
        },
    )
)

DOORS |= {
    "thin": Door(
        use_thinning,
        {
            "model": THICK,
            "tau": needs(0.025, "0.5"),
            "keep": optional(KEEP),
            "blocks": BLOCKS,
            "generator": GENERATOR,
        },
    ),
    "Thinning.remove": method("remove", thinned),
    "Thinning.paused": Door(_paused, {}, thinned),
    "Thinning.state_dict": method("state_dict", thinned),
    "Thinning.load_state_dict": method("load_state_dict", thinned, state=saved_thinning()),
}


# --- distributed ------------------------------------------------------------------------------------------------------


for kind in (distributed.Global, distributed.Local):
    name = f"distributed.{kind.__name__}"
    DOORS |= {
        name: made(
            kind, lambda ranks: ranks.select(rowprop.TopK(0.5), scores(), known()), group=needs(lambda: None, "None")
        ),
        f"{name}, in a step": Door(
            lambda kind=kind, **given: use_step(step(ranks=kind(), **given)), {"selector": SELECTOR}
        ),
        f"{name}.select": method("select", kind, checked, selector=SELECTOR, scores=SCORES, context=CONTEXT),
    }
    NO_DOORS[f"{name}.share"] = "how the step asks, after its own checks"
DOORS["distributed.mean"] = Door(
    distributed.mean,
    {
        "kept": needs(
            lambda: torch.rand(3), "vector, graph vector, nan vector, half vector, empty tensor, meta vector"
        ),
        "group": needs(lambda: None, "None"),
    },
)

ROWLESS = [name for name in POOL if "vector" in name or "matrix" in name] + ["empty tensor", "array"]
DOORS |= {
    "batch.num_rows": Door(
        rowprop.batch.num_rows,
        {"batch": needs(batch, [*ROWLESS, "no rows", "one row", *list(BATCHES)[3:10], "float classes"], BATCHES)},
    ),
    "batch.take": Door(
        rowprop.batch.take,
        {
            "batch": needs(
                batch,
                "meta vector, nan inputs, on meta, half on meta, classes out of range, float classes, whole inputs, "
                "inputs alone",
                BATCHES,
            ),
            "rows": needs(
                lambda: torch.tensor([0, 2, 5]),
                "long vector",
                {
                    "negative": lambda: torch.tensor([-1]),
                    "beyond N": lambda: torch.tensor([N]),
                    "on meta": lambda: torch.tensor([0], device="meta"),
                },
            ),
        },
    ),
}

NO_DOORS |= {
    "Scored": "the step checks what a losses function puts into it",
    "batch.map_tensors": "for the library's own use",
    "batch.tensors": "the same",
    "engines.Masked.kept_losses": "how the step asks, after its own checks",
    "engines.Recompute.kept_losses": "the same",
    "engines.Sliced.kept_losses": "the same",
    "engines.Engine": "a protocol",
    "cost.Plan": "made by plan",
    "Thinning": "made by thin",
    "ThinRecord": "the same",
    "Verification": "made by verify",
    "Record": "made by the step",
    "Selector": "a protocol",
    "KnownKeep": "a protocol",
    "Stateful": "a protocol",
}
