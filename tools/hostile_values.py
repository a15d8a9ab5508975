"""Bad values for the hostile trial, drawn by Hypothesis: of every kind, and one step away from a valid value."""

from __future__ import annotations

import copy
import functools
import inspect
import random
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import rowprop

N = 8  # rows of the valid batch
Made = Callable[[], Any]
Step = Callable[[Any], Any]
Outcome = tuple[str, str]


@dataclass(frozen=True)
class Slot:
    """An argument of a door: values that have a name, how one is tried, and how many more are drawn from a strategy."""

    door: str
    argument: str
    named: list[Any]
    attempt: Callable[..., Outcome]
    free: Any = None
    drawn: int = 0

    @property
    def name(self) -> str:
        return f"{self.door} {self.argument}"


class Injected(Exception):
    """The error of a user's own code; it has to come out unchanged."""


def guarded(function: Callable[..., Any]) -> Callable[..., Any]:
    """A user's function whose own failures are told from the library's."""

    @functools.wraps(function)
    def call(*given: Any, **named: Any) -> Any:
        try:
            return function(*given, **named)
        except Exception as error:
            raise Injected(str(error)) from error

    return call


class Net(nn.Module):
    """A user's model."""

    def __init__(self, features: int = 3) -> None:
        super().__init__()
        self.layer = nn.Linear(features, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        return guarded(self.layer)(inputs)


@guarded
def losses_fn(model: Any, batch: Any) -> Tensor:
    inputs, targets = batch
    return F.cross_entropy(model(inputs), targets, reduction="none")


@dataclass
class Returns:
    """A user's function: what it returns, and for how many arguments; -1 is any number of them."""

    result: Any
    arguments: int = -1

    def __post_init__(self) -> None:
        kind = inspect.Parameter.VAR_POSITIONAL if self.arguments < 0 else inspect.Parameter.POSITIONAL_ONLY
        self.__signature__ = inspect.Signature([inspect.Parameter(f"a{i}", kind) for i in range(abs(self.arguments))])

    def __call__(self, *given: Any) -> Any:
        self.__signature__.bind(*given)
        if isinstance(self.result, Exception):
            raise self.result
        return self.result


def after(function: Callable[..., Any], step: Step) -> Callable[..., Any]:
    """A user's function whose result has taken a step."""
    return functools.wraps(function)(lambda *given: guarded(step)(function(*given)))


def said(value: object) -> str:
    """A value in a few words."""
    if isinstance(value, Tensor):
        start = value.flatten()[:3].tolist() if value.layout == torch.strided and not value.is_meta else value.layout
        return f"{value.dtype} {tuple(value.shape)} on {value.device}, {start}{' with a graph' * value.requires_grad}"
    return re.sub(r" at 0x\w+|\s+", " ", f"{type(value).__name__} {value!r}")[:90]


# --- values of every kind ---------------------------------------------------------------------------------------------

DTYPES = [getattr(torch, name) for name in "float32 float16 float64 int64 int32 uint8 bool complex64".split()]
INSIDE = [None, "text", -1, torch.nan, True, [], {"a": 1}, object(), torch.rand(5), torch.zeros(5, 2).long()]
EVERY_KIND = [
    *INSIDE, *(torch.ones(5, dtype=dtype) for dtype in DTYPES), torch.arange(5), torch.rand(5, requires_grad=True),
    torch.full((5,), torch.nan), torch.empty(5, device="meta"), torch.ones(5).to_sparse(), torch.tensor(0.5),
    torch.empty(0), torch.rand(5, 2), 0, 1, 3, -0.5, 0.5, 1.0, torch.inf, -torch.inf, 10**30, 1e300, 1j, "", "[/foo]",
    b"a", [0.5], (), {1}, rowprop.TopK, Net(), range(3), random.Random(0), np.ones(5), np.random.default_rng(0),
    Returns(1, 0), Returns(1, 6), *map(Returns, (Injected("own"), None, "a", torch.nan, (1, 2, 3), torch.rand(5))),
]  # fmt: skip


def made(value: Any) -> tuple[str, Made]:
    return said(value), functools.partial(copy.deepcopy, value)


numbers = st.floats() | st.integers(-1000, 1000) | st.integers(2**62, 2**70) | st.complex_numbers()
tensors = st.builds(
    lambda number, dtype, shape: torch.full(shape, number).to(dtype),
    *(st.floats(width=32), st.sampled_from(DTYPES), st.lists(st.integers(0, N + 1), max_size=3)),
)
lists = st.lists(numbers | st.none(), max_size=N)
FREE = st.one_of(numbers, st.text(max_size=20), tensors, lists, st.builds(Returns, numbers)).map(made)

# --- one step away from a valid value ---------------------------------------------------------------------------------


def _first(tensor: Tensor, number: float) -> Tensor:
    return tensor.detach().clone().index_fill_(0, torch.tensor([0]), number)


def hooked(module: nn.Module, step: Step) -> nn.Module:
    module.register_forward_hook(lambda _, __, out: step(out))
    return module


STEPS: dict[type, dict[str, Step]] = {
    Tensor: {
        "on meta": lambda t: t.to("meta"), "sparse": lambda t: t.detach().to_sparse(), "one short": lambda t: t[:-1],
        "one long": lambda t: torch.cat([t, t[-1:]]), "one": lambda t: t[:1], "empty": lambda t: t[:0],
        "mean": lambda t: t.float().mean(), "a column": lambda t: t[:, None], "a row": lambda t: t[None],
        "columns": lambda t: t.unsqueeze(-1).expand(*t.shape, 4), "no columns": lambda t: t.unsqueeze(-1)[..., :0],
        "folded": lambda t: t.reshape(2, -1), "flat": lambda t: t.flatten(), "reversed": lambda t: t.flip(0),
        "plus 5": lambda t: t + 5, "minus 5": lambda t: t - 5, "plus 2**62": lambda t: t + 2**62,
        "detached": lambda t: t.detach(), "with a graph": lambda t: t.detach().clone().requires_grad_(),
        "a list": lambda t: t.tolist(), "in a list": lambda t: [t], "in a dict": lambda t: {"loss": t},
        "twice": lambda t: (t, t), "an array": lambda t: t.detach().numpy(),
        **{f"{number} in it": functools.partial(_first, number=number) for number in (torch.nan, torch.inf, -1, N, 99)},
        **{f"all {number}": functools.partial(torch.full_like, fill_value=number) for number in (torch.nan, -1, 0, 99)},
        **{str(dtype): lambda t, dtype=dtype: t.to(dtype) for dtype in DTYPES},
    },
    nn.Module: {
        "frozen": lambda module: module.requires_grad_(False), "on meta": lambda module: module.to("meta"),
        "half": lambda module: module.half(), "empty": lambda module: nn.Sequential(),
        "another": lambda module: nn.Linear(3, 4), "without parameters": lambda module: nn.Identity(),
        "nan weights": lambda module: [nn.init.constant_(p, torch.nan) for p in module.parameters()] and module,
        "forward raises": functools.partial(hooked, step=guarded(lambda out: out.nothing)),
        **{f"forward gives {one}": functools.partial(hooked, step=Returns(one)) for one in (None, "a", torch.ones(()))},
    },
    Mapping: {"another entry": lambda v: {**v, "another": 1}},
    list: {"one short": lambda v: v[:-1], "twice": lambda v: v * 2, "alone": lambda v: v[0]},
    tuple: {"one short": lambda v: v[:-1], "twice": lambda v: v * 2, "alone": lambda v: v[0]},
    str: {"upper case": str.upper, "cut": lambda v: v[:-1], "in a list": lambda v: [v]},
}  # fmt: skip


def _put(value: Any, key: Any, part: Any) -> Any:
    if isinstance(value, Mapping):
        return {**value, key: part}
    if is_dataclass(value):
        return replace(value, **{key: part})  # pyright: ignore
    return type(value)([*value[:key], part, *value[key + 1 :]])


def steps(value: Any, call: tuple[Any, ...] | None = None) -> Iterator[tuple[str, Step]]:
    """Every step away from a value, and of each of its parts; of a function's result, if it is known how to call it."""
    if call is not None:
        yield from ((f"for {n} arguments", lambda f, n=n: Returns(f(*call), n)) for n in (0, 1, 3))
        scores = {f"and scores {said(each)}": lambda r, each=each: rowprop.Scored(r, each) for each in INSIDE}
        for name, step in (*scores.items(), *inner(value(*call))):
            if possible(lambda step=step: step(value(*call))):
                yield f"its result {name}", lambda f, step=step: after(f, step)
        return
    for kind, changes in STEPS.items():
        yield from changes.items() if isinstance(value, kind) else ()
    parts: dict[Any, Any] = {}
    if isinstance(value, Mapping):
        parts = dict(value)
        yield from ((f"without {key}", lambda v, key=key: {k: v[k] for k in v if k != key}) for key in value)
    elif isinstance(value, (list, tuple)) and len(value) < 4:
        parts = dict(enumerate(value))
    elif is_dataclass(value) and not isinstance(value, type):
        parts = {each.name: getattr(value, each.name) for each in fields(value)}
    for key, part in parts.items():
        for name, step in inner(part):
            yield f"{key}: {name}", lambda v, key=key, part=part, step=step: _put(v, key, step(copy.deepcopy(part)))


def inner(value: Any) -> Iterator[tuple[str, Step]]:
    """Something else in the place of a part, and the steps of the part."""
    yield from ((said(each), lambda v, each=each: copy.deepcopy(each)) for each in INSIDE)
    yield from steps(value)


def bad(valid: Made, call: tuple[Any, ...] | None = None) -> list[tuple[str, Made]]:
    """Every bad value beside a valid one that has a name, with its maker; :data:`FREE` draws more."""
    near = [(name, lambda step=step: step(valid())) for name, step in steps(valid(), call)]
    return [made(value) for value in EVERY_KIND] + [(name, make) for name, make in near if possible(make)]


def possible(make: Made) -> bool:
    """Whether a value can be made: PyTorch refuses some steps, and so does the library where a part is checked."""
    try:
        return make() is not make
    except Exception:
        return False
