"""What it costs to steer a thinning: the looks, and the norms' sums that the shares follow from.

Two trainings under `rowprop.thin(model)`: the ViT of `thin_shares.py` on scikit-learn's digits, and a few steps of a
larger transformer on random tokens. Where draws cost more than they save, the handle makes none, as in any training.
Each trains twice. The first time counts the FLOPs of all steps and of the looks in them. The second time takes the
processor's time of all steps (forward, backward and update), of the looks, and of the control: the sums of the norms,
and the shares that follow from them. The table shows, after some steps, the sums so far over the sum of whole steps
without the looks; and one look over one step.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import rowprop
from bench_step import RESULTS, Transformer, save, setting
from rowprop.app.compare.data import load_data
from rowprop.thinning import handle as handles
from rowprop.thinning.control import Control
from rowprop.thinning.look import Look
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
    "width 384, depth 6, 128 x 16": (large, (11,)),
}


def spent(counting: bool, into: Counter[str], what: str, inner: Any) -> Any:
    """A function that notes the FLOPs or the time that another one takes."""

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        with ExitStack() as stack:
            flops = stack.enter_context(rowprop.cost.count_flops()) if counting else None
            begun = time.process_time()
            result = inner(*args, **kwargs)
        into[what] += time.process_time() - begun if flops is None else flops.total_flops
        return result

    return wrapped


def train(make: Callable[[], Case], at: tuple[int, ...], counting: bool) -> list[tuple[int, Counter[str]]]:
    """Train; the sums so far of ``step``, ``look`` and ``control`` after some steps, in FLOPs or seconds."""
    torch.manual_seed(0)
    model, batch = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    handle = rowprop.thin(model)
    sums: Counter[str] = Counter()
    found: list[tuple[int, Counter[str]]] = []

    def step(number: int) -> None:
        x, y = batch(number)
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()

    whole = spent(counting, sums, "step", step)
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(Look, "take", spent(counting, sums, "look", Look.take)))
        if not counting:
            numbers = spent(counting, sums, "control", handles._numbers)
            stack.enter_context(mock.patch.object(handles, "_numbers", numbers))
            update = spent(counting, sums, "control", Control.update)
            stack.enter_context(mock.patch.object(Control, "update", update))
        for number in range(max(at)):
            whole(number)
            if number + 1 in at:
                found.append((number + 1, sums | Counter({"looks": handle._control.looks})))
    return found


def main() -> None:
    """Train each twice, print and save."""
    torch.set_num_threads(1)
    about = setting(torch.device("cpu"), 1)
    lines = [
        "| transformer | steps | looks | one look, FLOPs | one look, time | all, FLOPs | all, time | control |",
        "|---|---|---|---|---|---|---|---|",
    ]
    found: list[dict[str, Any]] = []
    for name, (make, at) in CASES.items():
        for (steps, flops), (_, seconds) in zip(train(make, at, True), train(make, at, False), strict=True):
            looks = flops["looks"]
            all_looks = [each["look"] / (each["step"] - each["look"]) for each in (flops, seconds)]
            control = seconds["control"] / (seconds["step"] - seconds["look"])
            one = " | ".join(f"{share * steps / looks:.2f}" for share in all_looks)
            both = " | ".join(f"{100 * share:.1f} %" for share in (*all_looks, control))
            lines.append(f"| {name} | {steps} | {looks} | {one} | {both} |")
            found.append({"name": name, "steps": steps, "flops": dict(flops), "seconds": dict(seconds)})
            print(lines[-1], flush=True)
    command = " ".join(["python benchmarks/thin_steering.py", *sys.argv[1:]])
    page = ["# The cost of steering a thinning", "", f"`{command}`", "", (__doc__ or "").strip(), ""]
    page += [f"{', '.join(f'{key} {value}' for key, value in about.items())}.", "", *lines, ""]
    save(RESULTS, "thin-steering", {"setting": about, "command": command, "found": found}, "\n".join(page))


if __name__ == "__main__":
    main()
