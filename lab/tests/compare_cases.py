"""Small data and models that the tests of `rowprop compare` name as ``compare_cases:callable``."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Generator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from commands import run
from rowprop import Selection, SelectiveBackprop, TopK
from rowprop.selection import Context, PerClass
from rowprop.step.small import unwarned
from rowprop_lab.results import Run
from rowprop_lab.settings import Settings

TINY = (
    "--data", "compare_cases:tiny", "--model", "compare_cases:net", "--batch", "20", "--epochs", "2", "--seeds", "2",
    "--methods", "full,ohem",
)  # fmt: skip
HOSTILE = '</script><script>window.hacked=1</script><img src=x onerror="window.hacked=1">{{ 7*7 }}'
WRONG_LABEL = 17  # the row of `mislabelled` whose class is wrong

built: list[nn.Module] = []  # every model that `net` made, for tests that look at what training left


def settings(**changes: Any) -> Settings:
    """Those of a small comparison."""
    given = {"data": "compare_cases:tiny", "model": "compare_cases:net", "batch_rows": 20, "epochs": 3}
    return Settings(**(given | changes))


def ended(training: Generator[None, None, Run]) -> Run:
    """The run of a training that no other one takes turns with."""
    with unwarned():
        while True:
            try:
                next(training)
            except StopIteration as end:
                return end.value


def figures(out: Path) -> tuple[list[Any], list[Any]]:
    """What the results in a folder say about each run, times left out, and about the rows chosen most often."""
    results = json.loads((out / "results.json").read_text())
    assert results["finished"]
    facts = ("label", "seed", "accuracy", "perplexity", "rows_seen", "rows_backpropagated", "flops", "loss_shares")
    points = ("accuracy", "perplexity", "loss", "kept")
    runs = [
        [run[fact] for fact in facts] + [[point[key] for key in points] for point in run["curve"]]
        for run in results["runs"]
    ]
    return runs, results["most_chosen"]


def tiny() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Three classes of 8x8 images, each bright in a place of its own, plus noise: 96 training and 45 test rows."""
    generator = torch.Generator().manual_seed(5)
    classes = torch.arange(141) % 3
    images = torch.randn(141, 1, 8, 8, generator=generator)
    for row, place in enumerate(classes.tolist()):
        images[row, :, 2 * place : 2 * place + 3] += 2
    return images[:96], classes[:96], images[96:], classes[96:]


def mislabelled() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    train_x, train_y, test_x, test_y = tiny()
    train_y[WRONG_LABEL] = (train_y[WRONG_LABEL] + 1) % 3
    return train_x, train_y, test_x, test_y


def returning(change: Callable[..., Any]) -> Callable[[], Any]:
    """The factory of what ``change`` makes of `tiny`'s four parts."""
    return lambda: change(*tiny())


hostile = returning(lambda *parts: (*parts, [HOSTILE, "<b>bold</b>", "javascript:alert(1)"]))
unnamed_class = returning(lambda *parts: (*parts, ["one", "two"]))
infinite = returning(lambda x, y, tx, ty: (x.where(x < x.max(), torch.inf), y, tx, ty))
too_few_classes = returning(lambda x, y, tx, ty: (x, y[:-1], tx, ty))
not_data = returning(lambda *parts: "rows")
three_parts = returning(lambda x, y, tx, ty: (x, y, tx))
halves = returning(lambda x, y, tx, ty: (x, y + 0.5, tx, ty + 0.5))
half_test = returning(lambda x, y, tx, ty: (x, y, tx, (ty > 0) / 2))
nan_class = returning(lambda x, y, tx, ty: (x, torch.where(y > 1, torch.nan, y), tx, ty))
huge_class = returning(lambda x, y, tx, ty: (x, y * 1e30, tx, ty))
complex_classes = returning(lambda x, y, tx, ty: (x, y + 0j, tx, ty))
complex_rows = returning(lambda x, y, tx, ty: (x + 1j, y, tx, ty))
sparse_rows = returning(lambda x, y, tx, ty: (x.to_sparse(), y, tx, ty))
empty = returning(lambda x, y, tx, ty: (x[:0], y[:0], tx[:0], ty[:0]))
one_number = returning(lambda x, y, tx, ty: (x, y[0], tx, ty))
texts = returning(lambda x, y, tx, ty: (["a"], y, tx, ty))
no_names = returning(lambda x, y, tx, ty: (x, y, tx, ty, None))
other_sides = returning(lambda x, y, tx, ty: (x, y, tx[..., :7], ty))
float_classes = returning(lambda x, y, tx, ty: (x.requires_grad_(), y.double(), tx, ty.half()))
bool_classes = returning(lambda x, y, tx, ty: (x.tolist(), y > 0, tx.numpy(), ty > 0))


def write_glosses(folder: Path) -> list[tuple[str, int]]:
    """Write four small files of WordNet's form; return their glosses and classes in order.

    A gloss of class 5, 18 or 29 has words that tell its class, an attack in every tenth, and a word of its own.
    """
    folder.mkdir(exist_ok=True)
    written: list[tuple[str, int]] = []
    for part, classes in {"noun": (5, 18), "verb": (29,), "adj": (), "adv": ()}.items():
        lines = ["  1 This file stands under a licence | as WordNet's does.  "]
        for _ in range(50 * len(classes)):
            row = len(written)
            number = classes[row % len(classes)]
            gloss = f'{"a living" if number < 20 else "to take"} thing{number}, {number} legs; "It\'s own{row}"'
            gloss += HOSTILE if row % 10 == 0 else ""
            lines.append(f"{row:08d} {number:02d} {part[0]} 01 name{row} 0 001 @ 00000000 n 0000 | {gloss}  ")
            written.append((gloss, number))
        (folder / f"data.{part}").write_text("\n".join(lines) + "\n")
    return written


def failing() -> None:
    raise OSError("the disk is on fire")


def net(num_classes: int = 3, in_channels: int = 1) -> nn.Module:
    """Dropout and BatchNorm are there because they remember: a wrong seed or a step too many shows."""
    model = nn.Sequential(
        nn.Conv2d(in_channels, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.2), nn.Flatten(),
        nn.Linear(144, num_classes),
    )  # fmt: skip
    built.append(model)
    return model


def stacked(num_classes: int = 3, in_channels: int = 1) -> nn.Module:
    """Layers of one class, after which a gradient is thinned, and dropout, which shows a wrong seed."""
    model = nn.Sequential(
        nn.Flatten(), nn.Linear(64 * in_channels, 24), nn.ReLU(), nn.Linear(24, 24), nn.ReLU(), nn.Dropout(0.2),
        nn.Linear(24, num_classes),
    )  # fmt: skip
    built.append(model)
    return model


def net_with_losses() -> tuple[nn.Module, Any, Any]:
    return net(), tiny()[:2], lambda model, batch: model(batch[0]).mean(1)


one_class_short = partial(net, 2)
wants_colour = partial(net, in_channels=3)
not_a_model = partial(int, 5)


class TwoOutputs(nn.Module):
    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        return images, images


def moving() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Data whose factory changes the working directory."""
    os.chdir("elsewhere")
    return tiny()


def leaving() -> None:
    raise SystemExit(0)


def by(selector: Callable[[float], Any]) -> Callable[..., SelectiveBackprop]:
    """A method of one's own, from its selector for each ``keep``."""
    return lambda model, losses_fn, *, keep, **options: SelectiveBackprop(model, losses_fn, selector(keep), **options)


def hardest(keep: float) -> Callable[[Tensor, Context], Selection]:
    def choose(scores: Tensor, context: Context) -> Selection:
        rows = scores.topk(round(keep * len(scores))).indices.sort().values
        return Selection(rows, torch.full(rows.shape, 1 / len(rows)), len(scores))

    return choose


own_top, own_function = by(TopK), by(hardest)
own_per_class = by(lambda keep: PerClass(TopK(keep)))
own_broken = by(lambda keep: lambda scores, context: scores.no_such_thing)


def own_number(model: nn.Module, losses_fn: Any, **options: Any) -> int:
    return 5


def compare(out: Path | str, *arguments: str | Path) -> Any:
    """A small comparison: two methods, two seeds."""
    return run("compare", *TINY, *arguments, "--out", out)
