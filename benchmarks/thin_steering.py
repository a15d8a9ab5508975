"""What it costs to steer a thinning: measured weight gradients, and the norms' sums that the shares follow from.

Two trainings under `rowprop.thin(model)`: the ViT of `thin_shares.py` on scikit-learn's digits, and a few steps of a
larger transformer on random tokens. Where draws cost more than they save, the handle makes none, as in any training.
The processor's time is taken of all steps (forward, backward and update), and in them of the control: the sums of the
norms, and the shares that follow from them. A measurement of weight gradients is a step's own backward with more to do.
So each step with one is also run without it, on the same batch and from the same state, and it costs the difference.
The table shows, after some steps, the median measurement over such a step, and the sums of measurements and control
over the sum of whole steps without them.
"""

from __future__ import annotations

import copy
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import rowprop
from bench_step import RESULTS, Transformer, save, setting
from rowprop.app.compare.data import load_data
from rowprop.thinning import backward
from rowprop.thinning.control import Control
from thin_finetune import measures_next
from thin_shares import DEPTH, RATE, WIDTH, batches, patches

Case = tuple[nn.Module, Callable[[int], tuple[Tensor, Tensor]]]


def small() -> Case:
    """The ViT of ``thin_shares.py``: 64 rows of 16 patches."""
    data = load_data("digits")
    x, y = patches(data.train_x), data.train_y
    plan = batches(50, y.numel())
    return Transformer(nn.Linear(4, WIDTH), 16, WIDTH, DEPTH, 10, causal=False), lambda i: (x[plan[i]], y[plan[i]])


def large() -> Case:
    """A ViT of width 384 and depth 6: 128 rows of 16 patches."""
    x, y = torch.randn(8, 128, 16, 48), torch.randint(10, (8, 128))
    return Transformer(nn.Linear(48, 384), 16, 384, 6, 10, causal=False), lambda i: (x[i % 8], y[i % 8])


CASES: dict[str, tuple[Callable[[], Case], tuple[int, ...]]] = {
    "width 96, depth 4, 64 x 16": (small, (300, 1000)),
    "width 384, depth 6, 128 x 16": (large, (100,)),
}


@dataclass
class Seconds:
    """Of each step: the whole of it, the control in it, and the same step without measured weight gradients."""

    whole: list[float]
    control: list[float]
    plain: dict[int, float]


def train(make: Callable[[], Case], steps: int) -> Seconds:
    """Train, with the processor's time."""
    torch.manual_seed(0)
    model, batch = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    handle = rowprop.thin(model)
    found = Seconds([0.0] * steps, [0.0] * steps, {})
    step = 0

    def timed(inner: Any, into: Any) -> Any:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            begun = time.process_time()
            result = inner(*args, **kwargs)
            into[step] += time.process_time() - begun
            return result

        return wrapped

    def train_on(x: Tensor, y: Tensor) -> None:
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()

    for step in range(steps):
        if measures_next(handle):
            state = copy.deepcopy((model.state_dict(), optimizer.state_dict(), handle.state_dict()))
            found.plain[step] = 0.0
            with mock.patch.object(Control, "measures_weights", lambda *_: False):
                timed(train_on, found.plain)(*batch(step))
            for each, before in zip((model, optimizer, handle), state, strict=True):
                each.load_state_dict(before)
        with (
            mock.patch.object(backward, "_sums", timed(backward._sums, found.control)),
            mock.patch.object(Control, "update", timed(Control.update, found.control)),
        ):
            timed(train_on, found.whole)(*batch(step))
    return found


def main() -> None:
    """Train each twice, print and save."""
    torch.set_num_threads(1)
    about = setting(torch.device("cpu"), 1)
    lines = [
        "| transformer | steps | measured | one, of a step | all | control | together |",
        "|---|---|---|---|---|---|---|",
    ]
    found: list[dict[str, Any]] = []
    for name, (make, at) in CASES.items():
        seconds = train(make, max(at))
        for steps in at:
            measured = {step: seconds.whole[step] - plain for step, plain in seconds.plain.items() if step < steps}
            spent = [sum(measured.values()), sum(seconds.control[:steps])]
            rest = sum(seconds.whole[:steps]) - sum(spent)
            one = median(more / seconds.plain[step] for step, more in measured.items())
            shares = " | ".join(f"{100 * share / rest:.1f} %" for share in (*spent, sum(spent)))
            lines.append(f"| {name} | {steps} | {len(measured)} | {one:.2f} | {shares} |")
            print(lines[-1], flush=True)
        found.append({"name": name, **asdict(seconds)})
    command = " ".join(["python benchmarks/thin_steering.py", *sys.argv[1:]])
    page = ["# The cost of steering a thinning", "", f"`{command}`", "", (__doc__ or "").strip(), ""]
    page += [f"{', '.join(f'{key} {value}' for key, value in about.items())}.", "", *lines, ""]
    save(RESULTS, "thin-steering", {"setting": about, "command": command, "found": found}, "\n".join(page))


if __name__ == "__main__":
    main()
