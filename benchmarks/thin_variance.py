"""How well the control of thinning holds its bound: the true ratio of variances in the parameters, by Monte Carlo.

Six small networks learn tasks whose labels are wrong for some rows, with ``rowprop.thin(model, tau=...)``. At several
points of the training, the shares in use are held fast, and two variances of the gradient of all parameters are
measured: the one that thinning adds to a batch's gradient, from 2 draws for each of 32 batches, and the one of the
exact gradient between these batches. Their ratio is to be ``tau``. Beside it stand, over the true ratio, the one that
the handle reports and the one that the norms alone predict. Rows kept are the mean over the blocks.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from statistics import fmean, pstdev

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import rowprop
from bench_step import RESULTS, setting

ROWS = 64
POINTS = (25, 60, 150, 300, 600)
BATCHES, DRAWS = 32, 2
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
}


@dataclass
class Task:
    """Batches without end.

    Attributes:
        kind: ``images``: templates with noise; ``words``: bags of words of a class; ``text``: a Markov chain.
        generator: Draws the batches.
    """

    kind: str
    generator: torch.Generator

    def __post_init__(self) -> None:
        self.images = torch.randn(CLASSES, 1, 12, 12, generator=self.generator)
        self.words = torch.randint(64, (CLASSES, 12), generator=self.generator)
        self.chain = (3 * torch.randn(32, 32, generator=self.generator)).softmax(1)

    def batch(self) -> tuple[Tensor, Tensor]:
        """Rows, and their labels, every tenth of them wrong."""
        own = self.generator
        labels = torch.randint(CLASSES, (ROWS,), generator=own)
        wrong = torch.rand(ROWS, generator=own) < 0.1
        told = torch.where(wrong, torch.randint(CLASSES, (ROWS,), generator=own), labels)
        if self.kind == "images":
            return self.images[labels] + torch.randn(ROWS, 1, 12, 12, generator=own), told
        if self.kind == "words":
            noise = torch.randint(64, (ROWS, 12), generator=own)
            return torch.where(torch.rand(ROWS, 12, generator=own) < 0.6, noise, self.words[labels]), told
        text = [torch.randint(32, (ROWS,), generator=own)]
        for _ in range(12):
            text.append(torch.multinomial(self.chain[text[-1]], 1, generator=own).squeeze(1))
        whole = torch.stack(text, 1)
        return whole[:, :-1], whole[:, 1:]


def losses_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """One loss per row."""
    out = model(batch[0])
    if out.ndim == 3:
        return F.cross_entropy(out.transpose(1, 2), batch[1], reduction="none").mean(1)
    return F.cross_entropy(out, batch[1], reduction="none")


def gradient(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """The gradient of the mean loss in all parameters, flat."""
    model.zero_grad()
    losses_of(model, batch).mean().backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).double()


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


def measure(model: nn.Module, handle: rowprop.Thinning, task: Task) -> dict[str, float]:
    """The true ratio of variances with the shares that the handle uses now, and what it reports."""
    control = handle._control
    state = handle.state_dict()["control"]
    exact: list[Tensor] = []
    added: list[float] = []
    reported: list[float] = []
    keep: list[float] = []
    loss: list[float] = []
    for _ in range(BATCHES):
        batch = task.batch()
        with handle.paused():
            exact.append(gradient(model, batch))
        loss.append(float(losses_of(model, batch).detach().mean()))
        found: list[float] = []
        for _ in range(DRAWS):
            control.load_state_dict(state)
            control.begun = 0  # measured, and no look
            found.append(float((gradient(model, batch) - exact[-1]).square().sum()))
            reported.append(handle.record.ratio)
            keep.append(sum(handle.record.keep.values()) / len(handle.record.keep))
        added.append(fmean(found))
    control.load_state_dict(state)
    mean = torch.stack(exact).mean(0)
    apart = [float((each - mean).square().sum()) * BATCHES / (BATCHES - 1) for each in exact]
    true = fmean(added) / fmean(apart)
    off = [a - true * b for a, b in zip(added, apart, strict=True)]  # the error of a ratio
    told = fmean(reported)
    return {
        "true": true,
        "error": pstdev(off) / math.sqrt(BATCHES - 1) / fmean(added) if true else 0.0,
        "reported": told,
        "predicted": told / control.correction,
        "keep": fmean(keep),
        "loss": fmean(loss),
    }


def train(name: str, tau: float, seed: int, points: tuple[int, ...] = POINTS) -> Iterator[Point]:
    """Train a network, and measure at some points."""
    torch.manual_seed(seed)
    make, kind = MODELS[name]
    model = make()
    task, other = (Task(kind, torch.Generator().manual_seed(seed)) for _ in range(2))
    other.generator.manual_seed(seed + 1000)
    handle = rowprop.thin(model, tau=tau)
    handle._worth.decide = lambda *_: None  # the networks are so small that it would turn itself off
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
    for step in range(max(points) + 1):
        if step in points:
            yield Point(name, tau, seed, step, **measure(model, handle, other))
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
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--tau", nargs="+", type=float, default=[0.025, 0.1])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--points", nargs="+", type=int, default=list(POINTS))
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/")
    args = parser.parse_args()
    torch.set_num_threads(1)
    points: list[Point] = []
    for name in args.models:
        for tau in args.tau:
            for seed in args.seeds:
                for point in train(name, tau, seed, tuple(args.points)):
                    points.append(point)
                    print(table([point]).splitlines()[-1], flush=True)
    inside = sum(1 / 1.5 <= p.true / p.tau <= 1.5 for p in points if p.step >= 60)
    of = sum(p.step >= 60 for p in points)
    print(f"{inside} of {of} points from step 60 on lie within a factor of 1.5 of tau")
    if args.save:
        save(points, f"{inside} of {of} points from step 60 on lie within a factor of 1.5 of tau.")
    return 0


def save(points: list[Point], summary: str) -> None:
    """Write the numbers and a page."""
    stem = Path(RESULTS) / f"{datetime.now(timezone.utc):%Y-%m-%d}-thin-variance-cpu-1-threads"
    stem.with_suffix(".json").write_text(json.dumps([asdict(p) for p in points], indent=1) + "\n")
    command = "python benchmarks/" + " ".join([Path(sys.argv[0]).name, *sys.argv[1:]])
    where = ", ".join(f"{name} {value}" for name, value in setting(torch.device("cpu"), 1).items())
    head = f"# Thinning: the ratio of variances in the parameters\n\n`{command}`: {where}\n\n"
    stem.with_suffix(".md").write_text(head + (__doc__ or "").strip() + f"\n\n{summary}\n\n" + table(points) + "\n")


if __name__ == "__main__":
    sys.exit(main())
