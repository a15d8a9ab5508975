"""How well the control of thinning holds its bound: the true ratio of variances in the parameters, by Monte Carlo.

Six small networks learn tasks whose labels are wrong for some rows, with ``rowprop.thin(model, tau=...)`` and batches
of `--batch` rows. At several points of the training, two variances of the gradient of all parameters are measured with
the shares in use: the one that thinning adds to a batch's gradient, and the one of the exact gradient between batches.
Their ratio is to be ``tau``. A point is `--window` steps in a row: 8 have the same shares, and of more than 16 every
so many are measured that there are 16. Each step measured gives 2 draws for each of 4 further batches, and the two
variances are summed over the steps. The networks are so small that thinning would draw no rows: here it draws from the
first step on. Beside the ratio stand, over the true one, the ratio that the handle reports and the one that the norms
alone predict. Rows kept are the mean over the blocks.

`--models MiniLM` measures the fine-tuning of `thin_finetune.py`, in steps of its first epochs; it needs the packages
that this one names.
"""

from __future__ import annotations

import argparse
import importlib
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import rowprop
from bench_step import RESULTS, device_stem, save, setting
from rowprop.thinning.control import FIRST

POINTS = (25, 60, 150, 300, 600)
WINDOW, MEASURED, BATCHES, DRAWS = 8, 16, 4, 2
FINETUNING = 780
"""Steps of thin_finetune.py, whose rates the fine-tuning follows."""
CLASSES = 8


class Residual(nn.Module):
    """A block of a ResNet."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2))
        self.norms = nn.ModuleList(nn.GroupNorm(4, width) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        """Images to images."""
        return F.relu(x + self.norms[1](self.second(F.relu(self.norms[0](self.first(x))))))


class Transformer(nn.Module):
    """Embeds, adds positions, runs layers and a head: of a mean over positions, or of each position."""

    def __init__(self, enter: nn.Module, length: int, outputs: int, depth: int = 4, causal: bool = False) -> None:
        super().__init__()
        width = 32
        self.enter = enter
        self.places = nn.Parameter(0.1 * torch.randn(length, width))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 64, dropout=0.0, batch_first=True, norm_first=True, activation="gelu")
            for _ in range(depth)
        )
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, outputs)
        self.mask = nn.Transformer.generate_square_subsequent_mask(length) if causal else None

    def forward(self, x: Tensor) -> Tensor:
        """Rows to logits."""
        x = self.enter(x) + self.places
        for layer in self.layers:
            x = layer(x, src_mask=self.mask)
        x = self.norm(x)
        return self.head(x if self.mask is not None else x.mean(1))


class Patches(nn.Module):
    """Cuts images of 12 x 12 into 9 patches."""

    def __init__(self) -> None:
        super().__init__()
        self.cut = nn.Conv2d(1, 32, 4, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Images to sequences."""
        return self.cut(x).flatten(2).transpose(1, 2)


def _mlp() -> nn.Module:
    blocks = [nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(4)]
    return nn.Sequential(nn.Flatten(), nn.Linear(144, 64), nn.ReLU(), nn.Sequential(*blocks), nn.Linear(64, CLASSES))


def _cnn() -> nn.Module:
    blocks = [nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.ReLU()) for a, b in ((1, 8), (8, 16), (16, 16), (16, 16))]
    return nn.Sequential(nn.Sequential(*blocks), nn.AdaptiveAvgPool2d(3), nn.Flatten(), nn.Linear(144, CLASSES))


def _resnet() -> nn.Module:
    stem = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU())
    stages = nn.Sequential(*(Residual(16) for _ in range(3)))
    return nn.Sequential(stem, stages, nn.AdaptiveAvgPool2d(3), nn.Flatten(), nn.Linear(144, CLASSES))


MODELS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "MLP": (_mlp, "images"),
    "CNN": (_cnn, "images"),
    "ResNet": (_resnet, "images"),
    "ViT": (lambda: Transformer(Patches(), 9, CLASSES), "images"),
    "BERT": (lambda: Transformer(nn.Embedding(64, 32), 12, CLASSES), "words"),
    "GPT": (lambda: Transformer(nn.Embedding(32, 32), 12, 32, causal=True), "text"),
    "MiniLM": (lambda: thin_finetune().Classifier().train(), "glosses"),
}


@dataclass
class Task:
    """Batches without end.

    Attributes:
        kind: ``images``: templates with noise; ``words``: bags of words of a class; ``text``: a Markov chain.
        generator: Draws the batches.
        rows: Of each.
    """

    kind: str
    generator: torch.Generator
    rows: int

    def __post_init__(self) -> None:
        self.images = torch.randn(CLASSES, 1, 12, 12, generator=self.generator)
        self.words = torch.randint(64, (CLASSES, 12), generator=self.generator)
        self.chain = (3 * torch.randn(32, 32, generator=self.generator)).softmax(1)

    def batch(self) -> tuple[Tensor, Tensor]:
        """Rows, and their labels, every tenth of them wrong."""
        own, rows = self.generator, self.rows
        labels = torch.randint(CLASSES, (rows,), generator=own)
        wrong = torch.rand(rows, generator=own) < 0.1
        told = torch.where(wrong, torch.randint(CLASSES, (rows,), generator=own), labels)
        if self.kind == "images":
            return self.images[labels] + torch.randn(rows, 1, 12, 12, generator=own), told
        if self.kind == "words":
            noise = torch.randint(64, (rows, 12), generator=own)
            return torch.where(torch.rand(rows, 12, generator=own) < 0.6, noise, self.words[labels]), told
        text = [torch.randint(32, (rows,), generator=own)]
        for _ in range(12):
            text.append(torch.multinomial(self.chain[text[-1]], 1, generator=own).squeeze(1))
        whole = torch.stack(text, 1)
        return whole[:, :-1], whole[:, 1:]


class Glosses:
    """Batches of the fine-tuning's glosses without end, each of rows of like length."""

    def __init__(self, generator: torch.Generator, rows: int) -> None:
        self.data = thin_finetune().glosses(20_000, 4_000, 32)[0]
        self.generator = generator
        self.rows = rows
        self.ahead: list[Tensor] = []

    def batch(self) -> tuple[Tensor, ...]:
        """Tokens, their numbers, and classes."""
        if not self.ahead:
            order = torch.randperm(len(self.data.lengths), generator=self.generator)
            self.ahead = thin_finetune().batches(order, self.data.lengths, self.rows, self.generator)
        return self.data.batch(self.ahead.pop())


def thin_finetune() -> Any:
    """The benchmark, whose packages few have."""
    return importlib.import_module("thin_finetune")


def losses_of(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    """One loss per row."""
    out, wanted = model(*batch[:-1]), batch[-1]
    if out.ndim == 3:
        return F.cross_entropy(out.transpose(1, 2), wanted, reduction="none").mean(1)
    return F.cross_entropy(out, wanted, reduction="none")


def gradient(model: nn.Module, batch: tuple[Tensor, ...], seed: int) -> tuple[Tensor, float]:
    """The gradient of the mean loss in all parameters, flat, and this loss; ``seed`` draws the dropout."""
    model.zero_grad()
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        loss = losses_of(model, batch).mean()
        loss.backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]), float(loss.detach())


@dataclass(frozen=True)
class Point:
    """What was measured at one point of a training.

    Attributes:
        true: V_act / V_sgd by Monte Carlo.
        error: Its standard error, over batches, as a share of it.
        reported: The ratio of the handle's record.
        predicted: The same without the correction.
        keep: Mean share of rows over the blocks.
        loss: Of the batches measured.
    """

    model: str
    tau: float
    seed: int
    step: int
    true: float
    error: float
    reported: float
    predicted: float
    keep: float
    loss: float


@dataclass
class Window:
    """The sums over the steps of one point."""

    added: list[float] = field(default_factory=list[float])
    apart: list[float] = field(default_factory=list[float])
    reported: list[float] = field(default_factory=list[float])
    predicted: list[float] = field(default_factory=list[float])
    keep: list[float] = field(default_factory=list[float])
    loss: list[float] = field(default_factory=list[float])

    def measure(self, model: nn.Module, handle: rowprop.thinning.Thinning, task: Task | Glosses, seed: int) -> None:
        """Measure both variances of some batches with the shares that the handle uses now, and what it reports."""
        control = handle._control
        state = handle.state_dict()
        exact: list[Tensor] = []

        def distance(batch: tuple[Tensor, ...], seed: int) -> float:
            handle._control = control.restored(state["control"])
            handle._control.begun = FIRST[-1]  # norms are measured, and no weight gradients
            return float((gradient(model, batch, seed)[0] - exact[-1]).double().square().sum())

        for each in range(seed * BATCHES, (seed + 1) * BATCHES):
            batch = task.batch()
            with handle.paused():
                found, mean_loss = gradient(model, batch, each)
            exact.append(found)
            self.loss.append(mean_loss)
            draws: list[float] = []
            for _ in range(DRAWS):
                draws.append(distance(batch, each))
                self.reported.append(handle.record.ratio)
                self.predicted.append(handle.record.ratio / handle._control.correction)
                self.keep.append(fmean(handle.record.keep.values()))
            self.added.append(fmean(draws))
        handle._control = control.restored(state["control"])
        mean = torch.stack(exact).mean(0)
        self.apart += [float((each - mean).double().square().sum()) * BATCHES / (BATCHES - 1) for each in exact]

    def result(self) -> dict[str, float]:
        """The numbers of a :class:`Point`."""
        true = fmean(self.added) / fmean(self.apart)
        off = [a - true * b for a, b in zip(self.added, self.apart, strict=True)]  # the error of a ratio
        return {
            "true": true,
            "error": pstdev(off) / math.sqrt(len(off) - 1) / fmean(self.added) if true else 0.0,
            "reported": fmean(self.reported),
            "predicted": fmean(self.predicted),
            "keep": fmean(self.keep),
            "loss": fmean(self.loss),
        }


def train(name: str, tau: float, seed: int, points: tuple[int, ...], rows: int, window: int) -> Iterator[Point]:
    """Train a network, and measure from some steps on."""
    torch.manual_seed(seed)
    make, kind = MODELS[name]
    model, large = make(), kind == "glosses"
    generators = [torch.Generator().manual_seed(seed) for _ in range(2)]
    task, other = (Glosses(each, rows) if large else Task(kind, each, rows) for each in generators)
    other.generator.manual_seed(seed + 1000)
    handle = rowprop.thin(model, tau=tau)
    if not large:  # the other networks are so small that it would turn itself off
        handle._worth.decide = lambda *_: None
    optimizer = torch.optim.AdamW(model.parameters(), 1.5e-4 if large else 2e-3, weight_decay=0.01)
    sums = {point: Window() for point in points}
    for step in range(max(points) + window):
        for point, found in sums.items():
            if point <= step < point + window and (step - point) % max(1, window // MEASURED) == 0:
                found.measure(model, handle, other, step - point)
            if step == point + window - 1:
                yield Point(name, tau, seed, point, **found.result())
        if large:
            optimizer.param_groups[0]["lr"] = thin_finetune().rate(1.5e-4, (step + 0.5) / FINETUNING)
        optimizer.zero_grad()
        losses_of(model, task.batch()).mean().backward()
        optimizer.step()
    handle.remove()


def table(points: list[Point]) -> str:
    """The points as Markdown."""
    lines = [
        "| network | tau | step | loss | rows kept | true ratio | over tau | reported | predicted |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for p in points:
        lines.append(
            f"| {p.model} | {p.tau:g} | {p.step} | {p.loss:.2f} | {p.keep:.2f} | {p.true:.4f} +- {100 * p.error:.0f} % "
            f"| {p.true / p.tau:.2f} | {p.reported / max(p.true, 1e-12):.2f} | {p.predicted / max(p.true, 1e-12):.2f} |"
        )
    return "\n".join(lines)


def main() -> int:
    """Measure, print the table, and save it where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS)[:-1], choices=list(MODELS))
    parser.add_argument("--tau", nargs="+", type=float, default=[0.025, 0.1])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--points", nargs="+", type=int, default=list(POINTS))
    parser.add_argument("--batch", type=int, help="rows of a batch (default: 64, and 128 of MiniLM)")
    parser.add_argument("--window", type=int, default=WINDOW, help="steps of a point (default %(default)s)")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/")
    args = parser.parse_args()
    torch.set_num_threads(1)
    points: list[Point] = []
    for name in args.models:
        for tau in args.tau:
            for seed in args.seeds:
                rows = args.batch or (128 if name == "MiniLM" else 64)
                for point in train(name, tau, seed, tuple(args.points), rows, args.window):
                    points.append(point)
                    print(table([point]).splitlines()[-1], flush=True)
    inside = sum(1 / 1.5 <= p.true / p.tau <= 1.5 for p in points if p.step >= 60)
    of = sum(p.step >= 60 for p in points)
    summary = f"{inside} of {of} points from step 60 on lie within a factor of 1.5 of tau."
    print(summary)
    if args.save:
        kind = ("minilm-" if args.models == ["MiniLM"] else "") + (f"batch-{args.batch}-" if args.batch else "")
        kind += "" if args.window == WINDOW else f"window-{args.window}-"
        stem = f"thin-variance-{kind}{device_stem(torch.device('cpu'), 1)}"
        save(RESULTS, stem, {"points": [asdict(p) for p in points]}, page(points, summary))
    return 0


def page(points: list[Point], summary: str) -> str:
    """The points as a page."""
    command = "python benchmarks/" + " ".join([Path(sys.argv[0]).name, *sys.argv[1:]])
    where = ", ".join(f"{name} {value}" for name, value in setting(torch.device("cpu"), 1).items())
    head = f"# Thinning: the ratio of variances in the parameters\n\n`{command}`: {where}\n\n"
    return head + (__doc__ or "").strip() + f"\n\n{summary}\n\n" + table(points) + "\n"


if __name__ == "__main__":
    sys.exit(main())
