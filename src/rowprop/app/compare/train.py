"""One run: one method, one seed, an ordinary training loop with a clock around each phase."""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rowprop.app.compare.data import Dataset
from rowprop.app.compare.methods import ENGINES, Budget, Method
from rowprop.app.compare.models import build_model
from rowprop.app.compare.settings import Settings
from rowprop.checks import shown
from rowprop.engines.clock import drained_s
from rowprop.errors import InvalidInput, foreign
from rowprop.history.pruning import PruningSampler
from rowprop.scoring import gradient_norm
from rowprop.step.record import Record

PHASES: tuple[str, ...] = ("data", "score", "forward", "select", "backward", "optimizer")
EVALUATION_ROWS = 512
WARMUP_STEPS = 3
SHARE_POINTS = 100
FULL_AFTER = 0.875  # of the seconds: what a sampler that prunes does not leave to an unknown number of epochs
HOLDOUT_SHARE = 4  # the two models of rho-loss are trained for a quarter of the epochs, on half of the rows each
FULL = Method("full", "plain", "full")

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
        kept: Fraction of the epoch's rows that were backpropagated; rows that were left out before their forward are
            the epoch's too.

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
        phases_s: Seconds by phase. ``score`` is what separate scoring forwards cost, and the training of models that
            only score; under ``sliced`` the training forward is the scoring, so it stands under ``forward``.
        steps: Optimizer steps.
        rows_seen: Rows that went through a forward for training; those of models that only score are not counted.
        rows_backpropagated: Rows whose gradient was asked for.
        curve: One point per epoch.
        loss_shares: The loss's distribution after the first epoch, half-way, and at the end.
        chosen: Per training row, how often a selecting step chose it; empty for methods that are not ``LOSS_LED``.
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
    def from_json(cls, content: object, *, num_rows: int, num_classes: int) -> Run:
        """Rebuild a run from its JSON, checking each field.

        Args:
            content: What ``json.loads`` returned.
            num_rows: How many training rows its data have.
            num_classes: How many classes they have.

        Raises:
            InvalidInput: A field is missing, unknown, or holds a value that no run can have.

        """
        per_row = (0, num_rows)
        row_counts = _list_of(_whole(0), per_row)
        entry = _checked(
            content,
            "run",
            {
                "label": _text,
                "engine": _one_of((*ENGINES, FULL.engine)),
                "seed": _whole(0),
                "accuracy": _number(0, 1),
                "train_s": _number(0, open_low=True),
                "phases_s": lambda value, name: _checked(value, name, dict.fromkeys(PHASES, _number(0))),
                "steps": _whole(0),
                "rows_seen": _whole(1),
                "rows_backpropagated": _whole(0),
                "curve": _list_of(lambda value, name: Point(**_checked(value, name, POINT))),
                "loss_shares": _list_of(lambda value, name: LossShare(**_checked(value, name, LOSS_SHARE))),
                "chosen": row_counts,
                "offered": row_counts,
                "predicted": _list_of(_whole(0, num_classes - 1), per_row),
                "final_losses": _list_of(_number(0), per_row),
            },
        )
        run = cls(**entry)
        for name in ("curve", "loss_shares"):
            if not entry[name]:
                raise InvalidInput(f"{name} is empty, but at least one entry was needed.")
        if len({len(entry[name]) for name in ("chosen", "offered", "predicted", "final_losses")}) > 1:
            raise InvalidInput("chosen, offered, predicted and final_losses differ in length.")
        if any(chosen > offered for chosen, offered in zip(run.chosen, run.offered, strict=True)):
            raise InvalidInput("chosen is more than offered in a row.")
        if not math.isclose(run.train_s, sum(run.phases_s.values()), rel_tol=1e-6):
            raise InvalidInput(f"train_s is {run.train_s}, but phases_s add up to {sum(run.phases_s.values())}.")
        if run.accuracy != run.curve[-1].accuracy:
            raise InvalidInput(f"accuracy is {run.accuracy}, but the last point of curve has {run.curve[-1].accuracy}.")
        return run


Check = Callable[[object, str], Any]
"""Takes a value of a run's JSON and its name; returns the value, or refuses it."""


def _checked(content: object, name: str, fields: Mapping[str, Check]) -> dict[str, Any]:
    """Return an object whose fields are exactly these, each checked."""
    if not isinstance(content, dict):
        raise _wrong(name, content, "an object")
    entry = cast("dict[str, object]", content)
    if entry.keys() != fields.keys():
        missing, unknown = sorted(fields.keys() - entry.keys()), sorted(entry.keys() - fields.keys())
        raise InvalidInput(
            f"{name} lacks {missing[0]!r}." if missing else f"{name} has an unknown field {unknown[0]!r}."
        )
    inside = "" if name == "run" else f"{name}."
    return {field: check(entry[field], inside + field) for field, check in fields.items()}


def _wrong(name: str, value: object, needed: str) -> InvalidInput:
    return InvalidInput(f"{name} is {shown(value)}, but {needed} was needed.")


def _text(value: object, name: str) -> str:
    if not isinstance(value, str) or not value:
        raise _wrong(name, value, "a text")
    return value


def _one_of(words: Sequence[str]) -> Check:
    def check(value: object, name: str) -> object:
        if value not in words:
            raise _wrong(name, value, f"one of {', '.join(words)}")
        return value

    return check


def _whole(least: int, most: int | None = None) -> Check:
    def check(value: object, name: str) -> int:
        if (
            isinstance(value, bool)
            or not isinstance(value, int)
            or value < least
            or (most is not None and value > most)
        ):
            raise _wrong(
                name, value, f"a whole number, at least {least}" + ("" if most is None else f", at most {most}")
            )
        return value

    return check


def _number(least: float, most: float = sys.float_info.max, *, open_low: bool = False) -> Check:
    def check(value: object, name: str) -> float:
        fits = isinstance(value, int | float) and not isinstance(value, bool) and least <= value <= most
        if not fits or (open_low and value == least):
            bounds = f"{'above' if open_low else 'at least'} {least:g}" + (f", at most {most:g}" if most <= 1 else "")
            raise _wrong(name, value, f"a number, {bounds},")
        return cast("float", value)

    return check


def _list_of(check_entry: Check, lengths: Sequence[int] | None = None) -> Check:
    def check(value: object, name: str) -> list[Any]:
        if not isinstance(value, list):
            raise _wrong(name, value, "a list")
        entries = cast("list[object]", value)
        if lengths is not None and len(entries) not in lengths:
            raise _wrong(f"the length of {name}", len(entries), " or ".join(map(str, lengths)))
        return [check_entry(entry, f"{name}[{place}]") for place, entry in enumerate(entries)]

    return check


POINT: dict[str, Check] = {
    "epoch": _number(0, open_low=True), "train_s": _number(0), "accuracy": _number(0, 1),
    "loss": _number(-sys.float_info.max), "kept": _number(0, 1),
}  # fmt: skip
LOSS_SHARE: dict[str, Check] = {
    "epoch": _number(0, open_low=True), "share": _list_of(_number(0, 1), (SHARE_POINTS + 1,)),
}  # fmt: skip


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


def row_losses_and_norms(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """Cross-entropy of each row and the norm of its gradient with respect to the logits, shapes (N,)."""
    images, classes = batch
    logits = model(images)
    return F.cross_entropy(logits, classes, reduction="none"), gradient_norm(logits, classes)


class Stepper:
    """Takes training steps of one method and keeps the time of each phase."""

    def __init__(
        self,
        model: nn.Module,
        method: Method,
        settings: Settings,
        data: Dataset,
        seed: int,
        irreducible: Tensor | None = None,
    ) -> None:
        self.model = model
        self.optimizer = torch.optim.SGD(
            model.parameters(), lr=settings.peak_lr, momentum=0.9, nesterov=True, weight_decay=5e-4
        )
        self.peak_lr = settings.peak_lr
        self.phases_s = dict.fromkeys(PHASES, 0.0)
        self.optimizer_steps = 0
        self._device = data.train_x.device
        rows = len(data.train_y)
        budget = Budget(settings.keep, settings.mass, settings.num_epochs, rows, min(settings.batch_rows, rows))
        self._selective = method.recipe(
            model,
            row_losses_and_norms if method.scores_gradients else row_losses,
            budget,
            seed=seed,
            irreducible=irreducible,
            # A comparison is the same each time: no engine that follows the clock.
            engine="sliced" if method.engine == "auto" else method.engine,
            # Not the seed of the order: two streams from one seed could be related.
            generator=torch.Generator(self._device).manual_seed(2**31 + seed),
            timing=True,
        )
        self._sampler = cast("PruningSampler | None", getattr(self._selective, "sampler", None))

    def now(self) -> float:
        """Read the clock once the device has done all it was asked to do."""
        return drained_s(self._device)

    def order(self, shuffled: Tensor, *, last_part: bool) -> Tensor:
        """Return the rows of an epoch: ``shuffled``, or what the method's sampler draws.

        Args:
            shuffled: All training rows, shape (M,), int64.
            last_part: Whether the sampler has to leave nothing out from now on; else it counts its epochs.

        """
        if self._sampler is None:
            return shuffled
        begin = self.now()
        if last_part:
            self._sampler.full_after = 0.0
        drawn = torch.tensor(list(self._sampler))
        self.phases_s["select"] += self.now() - begin
        return drawn

    def step(
        self,
        images: Tensor,
        classes: Tensor,
        rows: Tensor,
        progress: float,
        batch_index: int,
        told: float | None = None,
    ) -> tuple[Tensor, Record | None]:
        """Train on these rows once; return the mean loss over all of them and, unless under ``full``, the record.

        The rate follows ``progress``, and so does the method where it is ``told`` nothing else.
        """
        begin = self.now()
        wanted = rows.to(images.device)
        batch = (images[wanted], classes[wanted])
        loaded = self.now()
        record = None
        if self._selective is not None:
            progress_told = progress if told is None else told
            loss, record = self._selective(batch, batch_index, ids=rows, classes=batch[1], progress=progress_told)
        else:
            loss = row_losses(self.model, batch).mean()
        looked = self.now()
        loss.backward()
        back = self.now()
        if record is None or record.ready:
            for group in self.optimizer.param_groups:
                group["lr"] = learning_rate(progress, self.peak_lr)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            self.optimizer_steps += 1
        done = self.now()

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
        spent["select"] += max(0.0, inside - record.seconds["score"] - record.seconds["forward"])
        return record.loss_all, record


def check_methods(settings: Settings, data: Dataset, model: nn.Module) -> None:
    """Take one step with each method of the user's own, on a copy of the model, before any work is done.

    Raises:
        InvalidInput: A method fails; the sentence says where.

    """
    for method in settings.parsed_methods:
        if method.own is not None:
            stepper = Stepper(copy.deepcopy(model).train(), method, settings, data, seed=0)
            with foreign(f"method {method.label!r} failed in its first step"):
                rows = torch.arange(min(settings.batch_rows, len(data.train_y)))
                stepper.step(data.train_x, data.train_y, rows, progress=0.5, batch_index=0)


def train(settings: Settings, data: Dataset, method: Method, seed: int, tick: Tick) -> Run:
    """Train one method with one seed.

    The seed fixes the model's start and the order of the rows, the same for every method that draws no order of its
    own. Evaluation, counting which rows were chosen, and three warm-up steps on a throwaway copy happen outside the
    clock.

    Args:
        settings: Budget, model, batch size and rates.
        data: On the device to train on.
        method: What to train with.
        seed: Non-negative.
        tick: Called with the fraction done and the last accuracy (None before the first evaluation).

    Raises:
        InvalidInput: The loss became infinite or NaN.

    """
    train_x, train_y = data.train_x, data.train_y
    total_rows = len(train_y)
    rows_per_step = min(settings.batch_rows, total_rows)
    epoch_rows = total_rows // rows_per_step * rows_per_step

    torch.manual_seed(seed)
    model = _model_for(settings, data)
    nothing = torch.zeros(total_rows) if method.needs_irreducible else None
    warm = Stepper(copy.deepcopy(model), method, settings, data, seed, nothing)
    for index in range(WARMUP_STEPS):
        warm.step(train_x, train_y, torch.arange(rows_per_step), progress=0.5, batch_index=index)
    del warm
    tick(0.0, None)
    irreducible, before_s = irreducible_losses(settings, data, seed) if method.needs_irreducible else (None, 0.0)

    torch.manual_seed(seed)
    stepper = Stepper(model, method, settings, data, seed, irreducible)
    stepper.phases_s["score"] += before_s
    order_generator = torch.Generator().manual_seed(seed)
    run = Run(method.label, method.engine, seed, phases_s=stepper.phases_s)
    chosen = torch.zeros(total_rows, dtype=torch.int64)
    offered = torch.zeros_like(chosen)

    epoch = batches_done = 0
    progress = pace = 0.0  # under a budget of seconds, what part of them the last epoch took
    while progress < 1:
        begun_at = progress
        order = stepper.order(
            torch.randperm(total_rows, generator=order_generator),
            last_part=settings.seconds is not None and progress + pace > FULL_AFTER,
        )
        batches = max(1, len(order) // rows_per_step)
        loss_sum = torch.zeros((), device=train_x.device)
        seen = kept = index = 0
        for index in range(batches):
            rows = order[index * rows_per_step : (index + 1) * rows_per_step]
            # How long an epoch will take, nobody knows under a budget of seconds, but a first epoch is seen to begin.
            told = 0.0 if epoch == 0 and settings.seconds and method.whole_first_epoch else None
            loss, record = stepper.step(train_x, train_y, rows, progress, index, told)
            seen += len(rows)
            kept += len(rows) if record is None else record.num_kept
            loss_sum += loss
            if record is not None:
                run.engine = record.engine
                if not record.selection.is_everything:
                    offered[rows] += 1
                    chosen[rows[record.selection.rows.cpu()]] += 1
            batches_done += 1
            run.train_s = sum(stepper.phases_s.values())
            if settings.num_epochs is not None:
                progress = (epoch * batches + index + 1) / (settings.num_epochs * batches)
            else:
                left_s = max((settings.seconds or 1.0) - before_s, 1e-9)
                progress = min(1.0, (run.train_s - before_s) / left_s)
            if batches_done % 20 == 0:
                tick(progress, run.curve[-1].accuracy if run.curve else None)
            if progress >= 1:
                break
        pace = progress - begun_at
        run.steps = stepper.optimizer_steps
        mean_loss = float(loss_sum) / (index + 1)
        if not math.isfinite(mean_loss):
            raise _diverged(f"training loss of {method.label}", settings, seed, run.steps)
        run.rows_seen += seen
        run.rows_backpropagated += kept
        _, predicted = judge(model, data.test_x, data.test_y)
        accuracy = float((predicted == data.test_y).float().mean())
        kept_share = kept * batches / ((index + 1) * epoch_rows)
        epochs_done = epoch + (index + 1) / batches
        run.curve.append(Point(epochs_done, run.train_s, accuracy, mean_loss, kept_share))
        epoch += 1
        tick(progress, accuracy)
        half_way = progress >= 0.5 and len(run.loss_shares) == 1
        if progress >= 1 or half_way or not run.loss_shares:
            losses, train_predicted = judge(model, train_x, train_y)
            if not bool(losses.isfinite().all()):
                raise _diverged(f"loss of {method.label} in evaluation mode", settings, seed, run.steps)
            run.loss_shares.append(LossShare(run.curve[-1].epoch, hardest_share(losses)))
            if progress >= 1 and method.loss_led:
                run.chosen, run.offered = chosen.tolist(), offered.tolist()
                run.predicted = train_predicted.tolist()
                run.final_losses = [round(float(loss), 4) for loss in losses]
    run.accuracy = run.curve[-1].accuracy
    return run


def _diverged(loss: str, settings: Settings, seed: int, steps: int) -> InvalidInput:
    return InvalidInput(
        f"the {loss} with seed {seed} is not finite after {steps} steps; lower the learning rate (--lr, now "
        f"{settings.peak_lr:g})."
    )


def irreducible_losses(settings: Settings, data: Dataset, seed: int) -> tuple[Tensor, float]:
    """Train two models on half of the training rows each, and have each judge the other half.

    They are made as the model that is compared, and trained plainly: for a quarter of the epochs each, or for an eighth
    of the seconds each, with a rate that decays in that time.

    Args:
        settings: Of the training that the losses are for.
        data: On the device to train on.
        seed: Of the halves, the models and their orders of rows.

    Returns:
        The loss of each training row, shape (M,), and the seconds that it took, all of them.

    Raises:
        InvalidInput: A loss is infinite or NaN.

    References:
        Mindermann et al., ICML 2022, arXiv:2206.07137: the variant without a holdout set.

    """
    total_rows = len(data.train_y)
    generator = torch.Generator().manual_seed(2**32 + seed)
    shuffled = torch.randperm(total_rows, generator=generator)
    halves = shuffled[: total_rows // 2], shuffled[total_rows // 2 :]
    losses = torch.zeros(total_rows, device=data.train_x.device)
    spent_s = 0.0
    for nth, (mine, others) in enumerate((halves, halves[::-1])):
        torch.manual_seed(2**32 + 2 * seed + nth)
        stepper = Stepper(_model_for(settings, data), FULL, settings, data, seed)
        rows_per_step = min(settings.batch_rows, len(mine))
        batches = len(mine) // rows_per_step
        epochs = max(1, round((settings.num_epochs or 0) / HOLDOUT_SHARE))
        done = 0
        progress = 0.0
        while progress < 1:
            order = mine[torch.randperm(len(mine), generator=generator)]
            for index in range(batches):
                rows = order[index * rows_per_step : (index + 1) * rows_per_step]
                stepper.step(data.train_x, data.train_y, rows, progress, index)
                done += 1
                progress = done / (epochs * batches)
                if settings.seconds is not None:
                    progress = 2 * HOLDOUT_SHARE * sum(stepper.phases_s.values()) / settings.seconds
                if progress >= 1:
                    break
        begin = stepper.now()
        where = others.to(losses.device)
        losses[where], _ = judge(stepper.model, data.train_x[where], data.train_y[where])
        spent_s += sum(stepper.phases_s.values()) + stepper.now() - begin
        if not bool(losses[where].isfinite().all()):
            raise _diverged("loss under a holdout model of rho-loss", settings, seed, stepper.optimizer_steps)
    return losses, spent_s


def _model_for(settings: Settings, data: Dataset) -> nn.Module:
    """Build the model to train, from torch's own random state."""
    model = build_model(settings.model_name, len(data.class_names), data.num_inputs)
    return model.to(data.train_x.device).train()


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
