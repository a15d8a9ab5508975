"""A small net, hooks of many kinds, and the comparison of a step under pick() with the same step by plain indexing."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import rowprop
from rowprop.backprop.autograd.rowgrad import RowGrad
from rowprop.backprop.watch import Report
from rowprop.cost.flops import count_flops

N = 8
ROWS = torch.tensor([1, 4, 6])
Take = Callable[[Tensor, Any], Tensor]


def weight(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64).requires_grad_()


def net() -> tuple[Tensor, Tensor, Tensor]:
    """Rows and the weights of two layers."""
    torch.manual_seed(0)
    return torch.randn(N, 5, dtype=torch.float64), weight(5, 4), weight(4, 3)


def chain(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    """Losses (N,) of a two-layer net."""
    return ((x @ w).tanh() @ v).square().sum(1)


def gradients(
    make_loss: Callable[[], Tensor], leaves: Sequence[Tensor], flops: list[int] | None = None
) -> list[Tensor | None]:
    """Of a loss to its leaves; the FLOPs of the backward go to the end of a list."""
    for leaf in leaves:
        leaf.grad = None
    loss = make_loss()
    with nullcontext() if flops is None else count_flops() as counted:
        loss.backward()
    if flops is not None:
        flops.append(counted.total_flops)
    return [leaf.grad for leaf in leaves]


def indexed(x: Tensor, rows: Any) -> Tensor:
    return x[rows]


def as_indexed(
    step: Callable[[Take], Sequence[Tensor | None]], *, rtol: float = 1e-10, atol: float = 1e-12, **options: Any
) -> Report:
    """What a step leaves under ``pick`` are plain tensors, those of plain indexing; returns the report of its backward.

    The step is given ``pick``, or what indexes, as ``take(tensor, rows)``.
    """
    expected = step(indexed)
    with rowprop.watch() as report:
        actual = step(partial(rowprop.pick, **options))
    assert all(a is None or type(a) is Tensor for a in actual)
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=atol)
    return report


def assert_same_gradients(
    losses: Callable[[], Tensor], leaves: Sequence[Tensor], rows: Any = ROWS, **options: Any
) -> Report:
    """The mean of these losses' rows leaves the same plain gradients under ``pick``; returns its report."""
    return as_indexed(lambda take: gradients(lambda: take(losses(), rows).mean(), leaves), atol=1e-13, **options)


def saving(
    forward: Any,
    backward: Any,
    *,
    save: Any = lambda *args: args,
    boxed: bool = False,
    base: Any = torch.autograd.Function,
    plain: bool = True,
) -> Any:
    """A fresh autograd function; ``backward`` is called with what is saved of its arguments and with the gradients.

    The function remembers the shapes of the first gradients in ``given``. All are plain tensors, unless ``plain`` is
    False: the caller may hand a gradient that comes sliced on to a backward of its own.
    """

    class Saving(base):
        boxed_grads_call = boxed
        given: list[tuple[int, ...]] = []  # noqa: RUF012

        @staticmethod
        def forward(ctx: Any, *args: Any) -> Any:
            ctx.save_for_backward(*save(*args))
            return forward(*args)

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            grads = grads[0] if boxed else grads
            assert not plain or all(type(g) is Tensor for g in grads)
            Saving.given.append(grads[0].shape)
            return backward(*ctx.saved_tensors, *grads)

    return Saving


def passing(change: Callable[[Tensor], Any]) -> Callable[[Tensor], Tensor]:
    """A custom function that passes a tensor on, and changes its gradient."""
    return saving(lambda x: x.view_as(x), change, save=lambda x: ()).apply


class Calls(TorchDispatchMode):
    """Tells of each op that runs inside: its name and its arguments, by place and by name."""

    def __init__(self, tell: Callable[[str, Any, dict[str, Any]], object]) -> None:
        super().__init__()
        self.tell = tell

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if RowGrad in types:
            return NotImplemented  # its rule makes the calls
        self.tell(func._schema.name.removeprefix("aten::"), args, kwargs or {})
        return func(*args, **(kwargs or {}))


class Applied(nn.Module):
    """What a function makes of modules and of what they are given."""

    def __init__(self, make: Callable[..., Any], *inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.make = nn.ModuleList(inner), make

    def forward(self, *given: Tensor) -> Any:
        return self.make(*self.inner, *given)


def silently(write: Callable[[Tensor], object]) -> Callable[[Tensor], None]:
    """A hook that writes to the gradient and returns nothing."""

    def hook(grad: Tensor) -> None:
        write(grad)

    return hook


SCALING: dict[str, Callable[[Tensor], Any]] = {  # of gradients (..., 4); what scales them keeps them sliced
    "times a number": lambda g: g * 2,
    "in place mul": lambda g: g.mul_(0.5),
    "in place mul without return": silently(lambda g: g.mul_(0.5)),
    "in place div": silently(lambda g: g.div_(3)),
    "augmented": silently(lambda g: g.__imul__(3)),
    "meta": lambda g: g * (g.shape[0] + g.dim() + g.numel()),
    "batched": lambda g: torch.vmap(lambda r: r * 2)(g),
}
HOOKS = SCALING | {
    "times a tensor": lambda g: g * torch.linspace(0, 1, 4, dtype=g.dtype),
    "add a constant": lambda g: g + 1,
    "in place add": silently(lambda g: g.add_(1)),
    "zero": silently(lambda g: g.zero_()),
    "copy": silently(lambda g: g.copy_(torch.ones_like(g))),
    "setitem row": silently(lambda g: g.__setitem__(2, 5.0)),
    "setitem mask": silently(lambda g: g.__setitem__(g == 0, 1.0)),
    "view then write": silently(lambda g: g.view(-1).__setitem__(3, 7.0)),
    "out=": silently(lambda g: torch.add(g, 1, out=g)),
    "foreach": silently(lambda g: torch._foreach_mul_([g], 2.0)),
    "foreach add": silently(lambda g: torch._foreach_add_([g], 1.0)),
    "cos": lambda g: g.cos(),
    "exp": torch.exp,
    "clamp": lambda g: g.clamp(min=0.1),
    "where": lambda g: torch.where(g > 0, g, torch.ones_like(g)),
    "compare": lambda g: (g >= 0).to(g.dtype),
    "numpy": lambda g: torch.from_numpy(g.numpy() + 1),
    "numpy in place": silently(lambda g: np.add(g.numpy(), 1, out=g.numpy())),
    "asarray": lambda g: torch.from_numpy(np.asarray(g) * 2),
    "tolist": lambda g: torch.tensor(g.tolist(), dtype=g.dtype) + 1,
    "deepcopy": lambda g: copy.deepcopy(g) + 1,
    "clone": lambda g: g.clone().fill_(2.0),
    "detach": silently(lambda g: g.detach().mul_(3)),
    "data": silently(lambda g: g.data.mul_(3)),
    "norm clip": lambda g: g / max(1.0, g.norm().item()),
    "equal": lambda g: g * 2 if torch.equal(g, g) else g,
    "iterate": lambda g: torch.stack([row * 2 for row in g]),
    "bool": lambda g: g if bool((g != 0).any()) else g + 1,
    "len": lambda g: g * len(g),
    "repr": lambda g: (repr(g), str(g), f"{g}", g)[3],
    "power": lambda g: g**2,
    "divide by it": lambda g: 1 / (g + 2),
    "rdiv": lambda g: (2 / g).nan_to_num(posinf=1.0),
    "matmul": lambda g: g @ torch.ones(4, 4, dtype=g.dtype),
}
