"""Models that tests name as ``model_cases:callable``."""

from __future__ import annotations

import os
import sys
from collections import OrderedDict
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Batch = tuple[Tensor, Tensor]


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))


def rows() -> Batch:
    return torch.randn(8, 4), torch.randint(3, (8,))


def beside(model: Callable[[], nn.Module], batch: Callable[[], object]) -> Callable[[], tuple[nn.Module, object]]:
    """The factory of a model and of its batch."""
    return lambda: (model(), batch())


mlp_with_batch = beside(mlp, rows)


def losses(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def having(losses_fn: Callable[..., object]) -> Callable[[], tuple[nn.Module, Batch, object]]:
    return lambda: (*mlp_with_batch(), losses_fn)


complete = having(losses)


def with_batchnorm() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4, affine=False),
        nn.Flatten(), nn.Linear(64, 3),
    )  # fmt: skip


def with_zero_head() -> nn.Module:
    """As torchvision's ViT: every gradient below the head is zero."""
    model = mlp()
    nn.init.zeros_(model[2].weight)
    nn.init.zeros_(model[2].bias)
    return model


class Sorted(nn.Module):
    """Sorts the rows, which no rule can follow."""

    def forward(self, x: Tensor) -> Tensor:
        return x.sort(dim=0).values


class Sorting(nn.Sequential):
    def __init__(self) -> None:
        block = nn.Sequential(nn.ReLU(), Sorted(), nn.Linear(6, 3))
        super().__init__(OrderedDict(first=nn.Linear(4, 6), block=block))


with_map = partial(nn.Conv2d, 2, 3, 3)


def fails() -> nn.Module:
    raise RuntimeError("no weights here\nand a second line")


returns_text = partial(str, "a model")


def one_row() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 3), nn.Flatten(0))


class Tokens(nn.Module):
    """Causal attention between the vectors of a sequence, and a vector for each of them."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unsqueeze(1) for part in self.qkv(x).chunk(3, -1))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).squeeze(1))


def token_losses(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]).transpose(1, 2), batch[1], reduction="none")


def tokens() -> tuple[nn.Module, Batch, object]:
    return Tokens(), (torch.randn(4, 10, 8), torch.randint(3, (4, 10))), token_losses


NOT_CALLABLE = 3
input_alone = beside(mlp, lambda: torch.randn(8, 4))
class_out_of_range = beside(mlp, lambda: (torch.randn(8, 4), torch.full((8,), 3)))
shapes_do_not_fit = beside(mlp, lambda: (torch.randn(8, 5), torch.randint(3, (8,))))
frozen = beside(lambda: mlp().requires_grad_(False), rows)


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.layer(x) + self.layer(y)


two_inputs_alone = beside(TwoInputs, lambda: (torch.randn(8, 4), torch.randn(8, 4)))
inputs_by_name = beside(TwoInputs, lambda: {"y": torch.randn(8, 4), "x": torch.randn(8, 4)})


def odd() -> tuple[nn.Module, Batch]:
    """Modules with names that a terminal's markup would swallow, or stumble over."""
    parts = OrderedDict({"[/foo]": nn.Linear(4, 8), "[red]x[/]": nn.Linear(8, 3)})
    return nn.Sequential(OrderedDict(parts=nn.Sequential(parts), sorted=Sorted())), rows()


class FailsBackwards(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx, g: Tensor):
        raise ValueError("no gradient here")


def stopped(model: nn.Module, batch: Batch) -> Tensor:
    raise KeyboardInterrupt


losses_fail = having(lambda model, batch: losses(model, {}["x"]))
backward_fails = having(lambda model, batch: FailsBackwards.apply(losses(model, batch)))
losses_leave = having(lambda model, batch: sys.exit(0))
losses_stopped = having(stopped)
losses_of_the_model_alone = having(lambda model: model)


def loud_losses(model: nn.Module, batch: Batch) -> Tensor:
    print("losses print")
    os.write(1, b"the losses write into the file itself\n")
    return losses(model, batch)


def loud() -> tuple[nn.Module, Batch, object]:
    print("the factory prints")
    return *mlp_with_batch(), loud_losses


def raises_an_odd_error() -> nn.Module:
    raise GeneratorExit("neither an Exception nor the end of the process")
