"""A user's own code for the hostile trial (an error raised in this file is theirs), and bad values of every kind."""

from __future__ import annotations

import copy
import random
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from functools import partial, wraps
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import rowprop

N = 8  # rows of the valid batch
Made = Callable[[], Any]
Named = tuple[str, Made]  # a value in words, and what makes it
Step = Callable[[Any], Any]


class Net(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input)


def losses_fn(model: Any, batch: Any) -> Tensor:
    inputs, targets = batch
    return F.cross_entropy(model(inputs), targets, reduction="none")


def token_losses(model: Any, batch: Any) -> Tensor:
    return losses_fn(model, batch)[:, None] * torch.linspace(0.5, 2, 4)


def losses_and_entropies(model: Any, batch: Any) -> rowprop.Scored:
    return rowprop.Scored(token_losses(model, batch), torch.rand(N, 4))


def brightness(model: Any, batch: Any) -> Tensor:
    return batch[0].flatten(1).float().mean(1)


def returns(result: Any, arguments: int | None = None) -> Callable[..., Any]:
    """A user's function: what it returns, or raises, and for how many arguments; None is any number of them."""

    def answer(*_: Any) -> Any:
        if isinstance(result, Exception):
            raise result
        return result

    fixed = {0: lambda: result, 1: lambda a: result, 3: lambda a, b, c: result, 6: lambda a, b, c, d, e, f: result}
    function = answer if arguments is None else fixed[arguments]
    function.__qualname__ = f"returns {said(result)} for {arguments}"
    return function


def fits(law: Callable[[Any], Any], value: Any) -> bool:
    try:
        return bool(law(value))
    except (Exception, SystemExit):  # a value of another kind
        return False


def said(value: object) -> str:
    """A value in a few words."""
    if isinstance(value, Tensor):
        start = value.flatten()[:3].tolist() if value.layout == torch.strided and not value.is_meta else value.layout
        return f"{value.dtype} {tuple(value.shape)} on {value.device}, {start}{' with a graph' * value.requires_grad}"
    return re.sub(r" at 0x\w+|\s+", " ", f"{type(value).__name__} {value!r}")[:90]


def named(value: Any) -> Named:
    return said(value), partial(copy.deepcopy, value)


rand = partial(torch.rand, generator=torch.Generator().manual_seed(0))
DTYPES = [getattr(torch, name) for name in "float32 float16 float64 int64 int32 uint8 bool complex64".split()]
INSIDE = [None, "text", -1, torch.nan, True, [], {"a": 1}, object(), rand(5), torch.zeros(5, 2).long()]
EVERY_KIND = [
    *INSIDE, *(torch.ones(5, dtype=dtype) for dtype in DTYPES), torch.arange(5), rand(5, requires_grad=True),
    torch.full((5,), torch.nan), torch.empty(5, device="meta"), torch.ones(5).to_sparse(), torch.tensor(0.5),
    torch.empty(0), rand(5, 2), 0, 1, 3, -0.5, 0.5, 1.0, torch.inf, -torch.inf, 2**62, 10**30, 1e300, 1j, "", "[/foo]",
    b"a", [0.5], (), {1}, rowprop.TopK, Net(3, 4), range(3), random.Random(0), np.ones(5),
    np.random.default_rng(0), returns(1, 0), returns(1, 6),
    *map(returns, (ValueError("own"), None, "a", torch.nan, (1, 2, 3), rand(5))),
]  # fmt: skip
NUMBERS = st.floats() | st.integers(-1000, 1000) | st.integers(2**62, 2**70) | st.complex_numbers()
TENSORS = st.builds(torch.full, st.lists(st.integers(0, N + 1), max_size=3), st.floats(width=32))
LISTS = st.lists(NUMBERS | st.none(), max_size=N)
DRAWN = NUMBERS, st.text(max_size=20), st.builds(Tensor.to, TENSORS, st.sampled_from(DTYPES)), LISTS
FREE = st.one_of(*DRAWN, st.builds(returns, NUMBERS)).map(named)


FIRST = torch.tensor([0])
STEPS: dict[Any, dict[str, Step]] = {  # one step away from a valid value, by its kind
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
        **{f"{n} in it": lambda t, n=n: t.index_fill(0, FIRST, n).detach() for n in (torch.nan, torch.inf, -1, N, 99)},
        **{f"all {number}": partial(torch.full_like, fill_value=number) for number in (torch.nan, -1, 0, 99)},
        **{str(dtype): lambda t, dtype=dtype: t.to(dtype) for dtype in DTYPES},
    },
    nn.Module: {
        "frozen": lambda module: module.requires_grad_(False), "on meta": lambda module: module.to("meta"),
        "half": lambda module: module.half(), "empty": lambda module: nn.Sequential(),
        "without parameters": lambda module: nn.Identity(),
        "nan weights": lambda module: [nn.init.constant_(p, torch.nan) for p in module.parameters()] and module,
        **{f"forward is {one.__qualname__}": lambda module, one=one: setattr(module, "forward", one) or module
           for one in map(returns, (ValueError("own"), None, "a", torch.ones(())))},
    },
    Mapping: {"another entry": lambda v: {**v, "another": 1}},
    (list, tuple): {"one short": lambda v: v[:-1], "twice": lambda v: v * 2, "alone": lambda v: v[0]},
    str: {"upper case": str.upper, "cut": lambda v: v[:-1], "in a list": lambda v: [v]},
}  # fmt: skip


def parts_of(value: Any) -> dict[Any, Any]:
    if is_dataclass(value) and not isinstance(value, type):
        return {each.name: getattr(value, each.name) for each in fields(value)}
    short = isinstance(value, (list, tuple)) and len(value) < 4
    return dict(value if isinstance(value, Mapping) else enumerate(value) if short else ())


def with_part(value: Any, place: Any, step: Step) -> Any:
    """The value whose part at a place has taken a step."""
    parts = {key: step(part) if key == place else part for key, part in parts_of(value).items()}
    if is_dataclass(value):
        return replace(value, **parts)  # pyright: ignore
    return parts if isinstance(value, Mapping) else type(value)(parts.values())


def near(value: Any) -> Iterator[tuple[str, Step]]:
    """Every step away from a value; of its parts one is left out, is another thing, or a step away from it."""
    for kind, steps in STEPS.items():
        yield from steps.items() if isinstance(value, kind) else ()
    for place, part in parts_of(value).items():
        if isinstance(value, Mapping):
            yield f"without {place}", lambda v, place=place: {key: v[key] for key in v if key != place}
        for name, step in other(part):
            yield f"{place}: {name}", partial(with_part, place=place, step=step)


def other(value: Any) -> Iterator[tuple[str, Step]]:
    """Something else in the place of a value, and every step away from it."""
    yield from ((said(each), lambda _, each=each: copy.deepcopy(each)) for each in INSIDE)
    yield from near(value)


def bad(valid: Made, call: tuple[Any, ...] | None = None) -> dict[str, Made]:
    """Every bad value beside a valid one that has a name; near a function, if it is known how to call it, its results.

    :data:`FREE` draws more. PyTorch refuses some steps, and so does the library where a part is checked.
    """
    result = valid if call is None else lambda: valid()(*call)
    found, steps = dict(map(named, EVERY_KIND)), [*near(result())]
    if call is not None:
        found |= {f"for {n} arguments": lambda n=n: returns(result(), n) for n in (0, 1, 3)}
        steps = [(f"and scores {said(each)}", lambda r, each=each: rowprop.Scored(r, each)) for each in INSIDE]
        steps += other(result())

    def stepped(step: Step) -> Any:
        function = valid()
        return wraps(function)(lambda *given: step(function(*given))) if call else step(function)

    return found | {name: partial(stepped, step) for name, step in steps if fits(lambda s: s(result()) is not s, step)}
