"""One run: one method, one seed, an ordinary training loop with a clock around each phase."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rowprop.compare.data import Dataset
from rowprop.compare.methods import LOSS_LED, Method
from rowprop.compare.models import build_model
from rowprop.compare.settings import Settings
from rowprop.errors import InvalidInput
from rowprop.step import Record, SelectiveBackprop

PHASES: tuple[str, ...] = ("data", "score", "forward", "select", "backward", "optimizer")
EVALUATION_ROWS = 512
WARMUP_STEPS = 3
SHARE_POINTS = 100

Batch = tuple[Tensor, Tensor]
Tick = Callable[[float, float | None], None]


@dataclass(frozen=True)
class Point:
    """Where a run stood at the end of an epoch.

    Attributes:
        epoch: Passes over the training rows so far; a fraction where a budget of seconds ended inside an epoch.
        train_s: Training time so far, evaluation left out.
        accuracy: Fraction of test rows classified rightly.
        loss: Mean training loss over all rows of the epoch's batches, kept or not.
        kept: Fraction of the epoch's rows that were backpropagated.

    """

    epoch: float
    train_s: float
    accuracy: float
    loss: float
    kept: float


@dataclass(frozen=True)
class LossShare:
    """How much of the training loss the hardest rows hold: ``share[i]`` belongs to the hardest ``i`` percent."""

    epoch: float
    share: list[float]


@dataclass
class Run:
    """What one finished run left behind; plain values only, so that it is its own JSON.

    Attributes:
        label: The method as written.
        engine: The engine that really ran, ``plain`` for an ordinary loop.
        seed: The seed of model, order and selection.
        accuracy: Final test accuracy.
        train_s: Training time; the sum of ``phases_s``.
        phases_s: Seconds by phase. ``score`` is what a separate scoring forward cost; under ``sliced`` the training
            forward is the scoring, so it stands under ``forward``.
        steps: Optimizer steps.
        rows_seen: Rows that went through a forward for training.
        rows_backpropagated: Rows whose gradient was asked for.
        curve: One point per epoch.
        loss_shares: The loss's distribution after the first epoch, half-way, and at the end.
        chosen: Per training row, how often a selecting step chose it; empty for methods not led by the loss.
        offered: Per training row, how often a selecting step could have chosen it; empty likewise.
        predicted: Per training row, the final prediction; empty likewise.
        final_losses: Per training row, the final loss; empty likewise.

    """

    label: str
    engine: str
    seed: int
    accuracy: float = 0.0
    train_s: float = 0.0
    phases_s: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    steps: int = 0
    rows_seen: int = 0
    rows_backpropagated: int = 0
    curve: list[Point] = field(default_factory=list[Point])
    loss_shares: list[LossShare] = field(default_factory=list[LossShare])
    chosen: list[int] = field(default_factory=list[int])
    offered: list[int] = field(default_factory=list[int])
    predicted: list[int] = field(default_factory=list[int])
    final_losses: list[float] = field(default_factory=list[float])

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> Run:
        """Rebuild a run from its JSON; raises KeyError or TypeError where it is not one."""
        run = cls(**content)
        run.curve = [Point(**point) for point in content["curve"]]
        run.loss_shares = [LossShare(**share) for share in content["loss_shares"]]
        return run


def learning_rate(progress: float, peak: float) -> float:
    """One cycle: from a tenth of the peak up over the first 15 % of training, then a cosine down to zero.

    Args:
        progress: Fraction of the budget that is spent, of steps or of seconds, in [0, 1].
        peak: The highest rate.

    """
    warmup = 0.15
    if progress < warmup:
        return peak * (0.1 + 0.9 * progress / warmup)
    return peak * 0.5 * (1 + math.cos(math.pi * (progress - warmup) / (1 - warmup)))


def row_losses(model: nn.Module, batch: Batch) -> Tensor:
    """Cross-entropy of each row, shape (N,)."""
    images, classes = batch
    return F.cross_entropy(model(images), classes, reduction="none")


class Stepper:
    """Takes training steps of one method and keeps the time of each phase."""

    def __init__(self, model: nn.Module, method: Method, settings: Settings, device: torch.device, seed: int) -> None:
        self.model = model
        self.optimizer = torch.optim.SGD(
            model.parameters(), lr=settings.peak_lr, momentum=0.9, nesterov=True, weight_decay=5e-4
        )
        self.peak_lr = settings.peak_lr
        self.phases_s = dict.fromkeys(PHASES, 0.0)
        self._device = device
        # The run decides when the schedule is active, because only it knows the progress under a budget of seconds.
        self._schedule = method.schedule()
        selector = method.selector(settings.keep, settings.mass)
        self._selective = None
        if selector is not None:
            # Not the seed of the order: two streams from one seed could be related.
            generator = torch.Generator(device).manual_seed(2**31 + seed)
            # A comparison is the same each time: no engine that follows the clock.
            engine = "sliced" if method.engine == "auto" else method.engine
            self._selective = SelectiveBackprop(
                model, row_losses, selector, engine=engine, generator=generator, timing=True
            )

    def _now(self) -> float:
        """Read the clock once the device has done all it was asked to do."""
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)
        return time.perf_counter()

    def step(
        self, images: Tensor, classes: Tensor, rows: Tensor, progress: float, batch_index: int
    ) -> tuple[Tensor, Record | None]:
        """Train on these rows once; return the mean loss over all of them and, where some were chosen, the record."""
        begin = self._now()
        wanted = rows.to(images.device)
        batch = (images[wanted], classes[wanted])
        loaded = self._now()
        record = None
        if self._selective is not None and (self._schedule is None or self._schedule.active(progress, batch_index)):
            loss, record = self._selective(batch)
        else:
            loss = row_losses(self.model, batch).mean()
        looked = self._now()
        loss.backward()
        back = self._now()
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(progress, self.peak_lr)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        done = self._now()

        inside = looked - loaded
        spent = self.phases_s
        spent["data"] += loaded - begin
        spent["backward"] += back - looked
        spent["optimizer"] += done - back
        if record is None or record.seconds is None:
            spent["forward"] += inside
            return loss.detach(), record
        spent["score"] += record.seconds["score"]
        spent["forward"] += record.seconds["forward"]
        # All that the step did beside its two forwards is the price of selecting.
        spent["select"] += inside - record.seconds["score"] - record.seconds["forward"]
        return record.loss_all, record


def train(settings: Settings, data: Dataset, method: Method, seed: int, tick: Tick) -> Run:
    """Train one method with one seed.

    The seed fixes the model's start and the order of the rows, the same for every method. Evaluation, counting which
    rows were chosen, and three warm-up steps on a throwaway copy happen outside the clock.

    Args:
        settings: Budget, model, batch size and rates.
        data: On the device to train on.
        method: What to train with.
        seed: Non-negative.
        tick: Called with the fraction done and the last accuracy (None before the first evaluation).

    Raises:
        InvalidInput: The loss became infinite or NaN.

    """
    device = data.train_x.device
    train_x, train_y = data.train_x, data.train_y
    rows_per_step = min(settings.batch_rows, len(train_y))
    steps_per_epoch = len(train_y) // rows_per_step
    total_steps = steps_per_epoch * settings.num_epochs if settings.num_epochs is not None else None

    torch.manual_seed(seed)
    model = build_model(settings.model_name, len(data.class_names), data.num_inputs).to(device).train()
    warm = Stepper(copy.deepcopy(model), method, settings, device, seed)
    for index in range(WARMUP_STEPS):
        warm.step(train_x, train_y, torch.arange(rows_per_step), progress=0.5, batch_index=index)
    del warm

    torch.manual_seed(seed)
    stepper = Stepper(model, method, settings, device, seed)
    order_generator = torch.Generator().manual_seed(seed)
    run = Run(method.label, method.engine, seed, phases_s=stepper.phases_s)
    chosen = torch.zeros(len(train_y), dtype=torch.int64)
    offered = torch.zeros_like(chosen)
    tick(0.0, None)

    progress = 0.0
    while progress < 1:
        order = torch.randperm(len(train_y), generator=order_generator)
        loss_sum = torch.zeros((), device=device)
        seen = kept = 0
        for index in range(steps_per_epoch):
            rows = order[index * rows_per_step : (index + 1) * rows_per_step]
            loss, record = stepper.step(train_x, train_y, rows, progress, index)
            seen += rows_per_step
            kept += rows_per_step if record is None else record.num_kept
            loss_sum += loss
            if record is not None:
                run.engine = record.engine
                offered[rows] += 1
                chosen[rows[record.selection.rows.cpu()]] += 1
            run.steps += 1
            run.train_s = sum(stepper.phases_s.values())
            if total_steps is not None:
                progress = run.steps / total_steps
            else:
                progress = min(1.0, run.train_s / (settings.seconds or 1.0))
            if run.steps % 20 == 0:
                tick(progress, run.curve[-1].accuracy if run.curve else None)
            if progress >= 1:
                break
        mean_loss = float(loss_sum) / (seen / rows_per_step)
        if not math.isfinite(mean_loss):
            raise InvalidInput(
                f"the training loss of {method.label} with seed {seed} is not finite after {run.steps} steps; "
                f"lower the learning rate (--lr, now {settings.peak_lr:g})."
            )
        run.rows_seen += seen
        run.rows_backpropagated += kept
        _, predicted = judge(model, data.test_x, data.test_y)
        accuracy = float((predicted == data.test_y).float().mean())
        run.curve.append(Point(run.steps / steps_per_epoch, run.train_s, accuracy, mean_loss, kept / seen))
        tick(progress, accuracy)
        half_way = progress >= 0.5 and len(run.loss_shares) == 1
        if progress >= 1 or half_way or not run.loss_shares:
            losses, train_predicted = judge(model, train_x, train_y)
            run.loss_shares.append(LossShare(run.curve[-1].epoch, hardest_share(losses)))
            if progress >= 1 and method.name in LOSS_LED:
                run.chosen, run.offered = chosen.tolist(), offered.tolist()
                run.predicted = train_predicted.tolist()
                run.final_losses = [round(float(loss), 4) for loss in losses]
    run.accuracy = run.curve[-1].accuracy
    return run


def judge(model: nn.Module, images: Tensor, classes: Tensor) -> tuple[Tensor, Tensor]:
    """Return every row's loss and predicted class under the model in eval mode; its mode is put back."""
    was_training = model.training
    model.eval()
    with torch.no_grad():
        parts = [images[at : at + EVALUATION_ROWS] for at in range(0, len(images), EVALUATION_ROWS)]
        logits = torch.cat([model(part) for part in parts])
    model.train(was_training)
    return F.cross_entropy(logits, classes, reduction="none"), logits.argmax(dim=1)


def hardest_share(losses: Tensor) -> list[float]:
    """Return the share of the summed loss that the hardest 0, 1, ..., 100 % of the rows hold."""
    ordered = losses.double().sort(descending=True).values
    held = torch.cat([ordered.new_zeros(1), ordered.cumsum(0)])
    at = [round(percent / SHARE_POINTS * len(ordered)) for percent in range(SHARE_POINTS + 1)]
    total = float(held[-1]) or 1.0
    return [round(float(held[index]) / total, 5) for index in at]
