"""One run: one method, one seed, an ordinary training loop with a clock around each phase."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Generator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rowprop import thin
from rowprop.backprop.pick import Unit
from rowprop.cost.flops import count_flops
from rowprop.engines import Sliced
from rowprop.errors import InvalidInput, foreign
from rowprop.history.pruning import PruningSampler
from rowprop.host import drained_s
from rowprop.scoring import Scored, gradient_norm
from rowprop.state import evaluating, rng_kept
from rowprop.step.record import Record
from rowprop_lab.data import PADDING, Dataset
from rowprop_lab.models import build_model
from rowprop_lab.results import COUNT_EVERY, PHASES, SHARE_POINTS, TASKS, LossShare, Point, Run
from rowprop_lab.settings import ADAMW, CUT, FULL, Method, Settings

ENDLESS = 1_000_001  # stands for an unknown number of epochs: none is a millionth of them, and none is the last
EVALUATED = 512  # rows, or tokens, that are evaluated together
WARMUP_STEPS = 3
WARMUP_SHARE = 0.15  # of the training, in which the learning rate rises
FULL_AFTER = 0.875  # of the seconds; after them a method that prunes trains all rows
HOLDOUT_SHARE: dict[Unit, int] = {"row": 4, "token": 2}  # two models get this part of the epochs, on half of the rows

Batch = tuple[Tensor, Tensor]
Tick = Callable[[float, float | None], None]


def learning_rate(progress: float, peak: float) -> float:
    """One cycle: from a tenth of the peak up over the first 15 % of training, then a cosine down to zero."""
    if progress < WARMUP_SHARE:
        return peak * (0.1 + 0.9 * progress / WARMUP_SHARE)
    return peak * 0.5 * (1 + math.cos(math.pi * (progress - WARMUP_SHARE) / (1 - WARMUP_SHARE)))


def losses_of(model: nn.Module, batch: Batch) -> Tensor:
    """Cross-entropy of each row, shape (N,), or of each token, (N, T), also of those that do not count."""
    inputs, wanted = batch
    return F.cross_entropy(model(inputs).flatten(0, -2), wanted.flatten(), reduction="none").view_as(wanted)


def row_losses_and_norms(model: nn.Module, batch: Batch) -> Scored:
    """Cross-entropy of each row and the norm of its gradient with respect to the logits, shapes (N,)."""
    images, classes = batch
    logits = model(images)
    return Scored(F.cross_entropy(logits, classes, reduction="none"), gradient_norm(logits, classes))


def plain_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Mean cross-entropy over the rows, or over the tokens that count, 0-d: the loss of an ordinary loop."""
    inputs, wanted = batch
    if wanted.dim() == 1:
        return losses_of(model, batch).mean()
    return F.cross_entropy(model(inputs).flatten(0, 1), wanted.flatten(), ignore_index=PADDING)


@dataclass(frozen=True)
class Taken:
    """A step that was taken, the ``index``-th from 0 of the ``batches`` of its ``epoch``."""

    rows: Tensor  # the training rows of its batch, (N,), int64
    seen: int  # rows, or tokens that count, that its forward had
    kept: int  # those of them that were backpropagated; where they are thinned, on average over the blocks
    loss: Tensor  # the mean over all of them, 0-d, detached
    record: Record | None  # None in an ordinary loop
    progress: float  # the fraction of the budget that is spent after it
    epoch: int
    index: int
    batches: int


class Stepper:
    """Takes training steps of one method and keeps the time of each phase."""

    def __init__(
        self, model: nn.Module, method: Method, settings: Settings, data: Dataset, seed: int,
        irreducible: Tensor | None = None, rows: int | None = None,
    ) -> None:  # fmt: skip
        self.model = model
        self.lr = settings.lr
        self.batch_rows = min(settings.batch_rows, len(data.train_y))
        self.trained_rows = rows or self.batch_rows  # of each batch: a plain step on fewer rows
        sgd = partial(torch.optim.SGD, momentum=0.9, nesterov=True, weight_decay=5e-4)
        kind = torch.optim.AdamW if settings.model in ADAMW else sgd
        self.optimizer: torch.optim.Optimizer = kind(model.parameters(), lr=self.lr)
        self.phases_s = dict.fromkeys(PHASES, 0.0)
        self.optimizer_steps = self._steps = self._counted_steps = self._counted_flops = 0
        self.other_flops = 0.0  # of models that only score
        self.uncounted: set[str] = set()  # ops without a formula
        self._last_s = dict.fromkeys(PHASES, 0.0)  # of the last step that was not counted
        self._data = data
        self._kind = method.kind
        budget = {
            "unit": data.unit, "keep": settings.keep, "epochs": settings.epochs or ENDLESS, "seed": seed,
            "num_rows": len(data.train_y), "batch_rows": self.batch_rows, "irreducible": irreducible,
            "reference": irreducible, "beta": 1 / settings.keep - 1,  # biggest-losers keeps ``keep`` on average
        }  # fmt: skip
        drawn_by = 2**31 + seed  # not the seed of the order: two streams from one seed could be related
        self._selective = method.made(
            model, row_losses_and_norms if method.kind.scores_gradients else losses_of, budget,
            engine=Sliced(attention="cut") if method.engine == CUT else method.engine,
            generator=torch.Generator(data.train_x.device).manual_seed(drawn_by), timing=True,
        )  # fmt: skip
        self._thinning = thin(model, generator=torch.Generator().manual_seed(drawn_by)) if self._kind.thins else None
        sampler = None if self._selective is None else self._selective.sampler
        self._sampler = sampler if isinstance(sampler, PruningSampler) else None
        self._counts = data.counted(data.train_y).view(len(data.train_y), -1).sum(1).cpu()

    @property
    def train_s(self) -> float:
        """Training time so far."""
        return sum(self.phases_s.values())

    @property
    def flops(self) -> float | None:
        """Of all steps so far, by the mean of the counted ones, and of models that only score; None if none counted."""
        counted = self._counted_steps
        return self._counted_flops / counted * self._steps + self.other_flops if counted else None

    def _counting_step(self, *given: Any) -> tuple[Tensor, Record | None]:
        """Take a step; in every COUNT_EVERY-th, count FLOPs. Counting takes time, so the step before tells its time."""
        counts = self._steps % COUNT_EVERY == COUNT_EVERY // 2
        self._steps += 1
        begun_s = dict(self.phases_s)
        with count_flops() if counts else nullcontext() as flops:
            loss, record = self.step(*given)
        if flops is None:
            self._last_s = {phase: self.phases_s[phase] - begun_s[phase] for phase in PHASES}
            return loss, record
        self.phases_s |= {phase: begun_s[phase] + self._last_s[phase] for phase in PHASES}
        self._counted_steps += 1
        self._counted_flops += flops.total_flops
        self.uncounted.update(flops.uncounted)
        return loss, record

    def steps(
        self, rows: Tensor, shuffle: torch.Generator, epochs: int | None, seconds: float | None
    ) -> Generator[Taken]:
        """Train until the budget of epochs, or of seconds from the first step on, is spent; yield each step.

        The order of ``rows``, (M,), is shuffled in each epoch, whose remainder is left out; a method that prunes draws
        rows of its own. A budget of seconds may end inside an epoch; the other budget is None.
        """
        begun_s = self.train_s
        epoch = 0
        progress = share = 0.0  # under a budget of seconds, the share that the last epoch took
        while progress < 1:
            begun_at = progress
            order = rows[torch.randperm(len(rows), generator=shuffle)]
            if self._sampler is not None:
                begin_s = drained_s()
                if seconds is not None and progress + share > FULL_AFTER:
                    self._sampler.full_after = 0.0  # from here on all rows
                order = torch.tensor(list(self._sampler))
                self.phases_s["select"] += drained_s() - begin_s
            batches = max(1, len(order) // self.batch_rows)
            # Under a budget of seconds the length of an epoch is unknown; the first epoch is known by its place.
            told = 0.0 if epoch == 0 and seconds is not None and self._kind.whole_first_epoch else None
            for index in range(batches):
                chunk = order[index * self.batch_rows :][: self.trained_rows]
                loss, record = self._counting_step(chunk, progress, index, told)
                if seconds is not None:
                    progress = min(1.0, (self.train_s - begun_s) / seconds)
                else:
                    progress = (epoch * batches + index + 1) / ((epochs or 1) * batches)
                seen = kept = int(self._counts[chunk].sum())
                if record is not None:
                    kept = record.num_kept
                elif self._thinning is not None and self._thinning.record.keep:
                    kept = round(seen * fmean(self._thinning.record.keep.values()))
                yield Taken(chunk, seen, kept, loss, record, progress, epoch, index, batches)
                if progress >= 1:
                    return
            share = progress - begun_at
            epoch += 1

    def step(
        self, rows: Tensor, progress: float, batch_index: int, told: float | None = None
    ) -> tuple[Tensor, Record | None]:
        """Train on these rows once; return the mean loss over all of them and, but in an ordinary loop, the record.

        The rate follows ``progress``, the method ``told`` if it is given.
        """
        begin_s = drained_s()
        wanted = rows.to(self._data.train_x.device)
        batch = (self._data.train_x[wanted], self._data.train_y[wanted])
        loaded_s = drained_s()
        record = None
        if self._selective is None:
            loss = plain_loss(self.model, batch)
        else:
            known = {"classes": batch[1]} if self._data.unit == "row" else {"counted": self._data.counted(batch[1])}
            progress_told = progress if told is None else told
            loss, record = self._selective(batch, batch_index, ids=rows, progress=progress_told, **known)
        selected_s = drained_s()
        loss.backward()
        back_s = drained_s()
        if record is None or record.ready:
            for group in self.optimizer.param_groups:
                group["lr"] = learning_rate(progress, self.lr)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            self.optimizer_steps += 1
        done_s = drained_s()
        spent = self.phases_s
        spent["data"] += loaded_s - begin_s
        spent["backward"] += back_s - selected_s
        spent["optimizer"] += done_s - back_s
        forward_s = selected_s - loaded_s
        if record is None or record.seconds is None:
            spent["forward"] += forward_s
            return loss.detach(), record
        spent["score"] += record.seconds["score"]
        spent["forward"] += record.seconds["forward"]
        # The step's time beside its two forwards is the price of selecting.
        spent["select"] += max(0.0, forward_s - record.seconds["score"] - record.seconds["forward"])
        return record.loss_all, record


def check_methods(settings: Settings, data: Dataset, model: nn.Module) -> None:
    """Refuse a user's method that fails in a step on a copy of the model, and one that thins a model without blocks."""
    for method in settings.parsed_methods:
        if method.is_own or method.kind.thins:
            stepper = Stepper(copy.deepcopy(model).train(), method, settings, data, seed=0)
            with foreign(f"method {method.label!r} failed in its first step"):
                stepper.step(torch.arange(stepper.batch_rows), progress=0.5, batch_index=0)


def train(
    settings: Settings, data: Dataset, method: Method, seed: int, tick: Tick, rows: int | None = None
) -> Generator[None, None, Run]:  # fmt: skip
    """Train one method with one seed, on all rows of each batch or on the first ``rows`` of them; return its run.

    It stops after each epoch but the last, and goes on with its own random state, so others may train in between.

    The seed fixes the model's start and, but for methods that draw their own, the order of the rows. Evaluation,
    counting which rows were chosen, and three warm-up steps on a throwaway copy happen outside the clock. ``tick`` is
    called with the fraction done and the last accuracy or perplexity, None before the first evaluation. A loss that is
    infinite or NaN is refused.
    """
    total_rows = len(data.train_y)
    figure = TASKS[data.unit].figure
    stepper = _prepared(settings, data, method, seed, tick, rows)
    seconds = None if settings.seconds is None else max(settings.seconds - stepper.train_s, 1e-9)
    shuffle = torch.Generator().manual_seed(seed)
    run = Run(method.label, method.engine, seed, phases_s=stepper.phases_s)
    chosen, offered = torch.zeros(2, total_rows, dtype=torch.int64)
    loss_sum, seen, kept = torch.zeros((), device=data.train_x.device), 0, 0  # of the epoch
    losses = predicted = torch.empty(0)
    steps = stepper.steps(torch.arange(total_rows), shuffle, settings.epochs, seconds)
    for number, taken in enumerate(steps, 1):
        run.rows_seen += taken.seen
        run.rows_backpropagated += taken.kept
        if taken.record is not None:
            run.engine = CUT if method.engine == CUT else taken.record.engine
            if data.unit == "row" and taken.kept < taken.seen:
                offered[taken.rows] += 1
                chosen[taken.rows[taken.record.selection.rows.cpu()]] += 1
        loss_sum += taken.loss
        seen, kept = seen + taken.seen, kept + taken.kept
        if taken.progress < 1 and taken.index + 1 < taken.batches:
            if number % 20 == 0:
                tick(taken.progress, getattr(run.curve[-1], figure) if run.curve else None)
            continue
        run.train_s, run.steps = stepper.train_s, stepper.optimizer_steps
        length = taken.index + 1
        mean_loss = float(loss_sum) / length
        _check_finite(loss_sum, f"training loss of {method.label}", settings, seed, run.steps)
        tested, answers = judge(stepper.model, data.test_x, data.test_y)
        counted = data.counted(data.test_y)
        run.accuracy = float((answers == data.test_y)[counted].float().mean())
        if data.unit == "row":  # those left out before their forward are rows of the epoch, too
            kept_share = kept * taken.batches / (length * (total_rows - total_rows % stepper.batch_rows))
        else:
            kept_share = kept / seen
            run.perplexity = math.exp(min(700.0, float(tested[counted].double().mean())))  # of at most e ** 700
        epochs = taken.epoch + length / taken.batches
        run.curve.append(Point(epochs, run.train_s, run.accuracy, mean_loss, kept_share, run.perplexity))
        loss_sum, seen, kept = torch.zeros_like(loss_sum), 0, 0
        tick(taken.progress, getattr(run, figure))
        run.flops, run.uncounted = stepper.flops, sorted(stepper.uncounted)
        half_way = taken.progress >= 0.5 and len(run.loss_shares) == 1
        if taken.progress >= 1 or half_way or not run.loss_shares:
            losses, predicted = judge(stepper.model, data.train_x, data.train_y)
            _check_finite(losses, f"loss of {method.label} in evaluation mode", settings, seed, run.steps)
            run.loss_shares.append(LossShare(epochs, hardest_share(losses[data.counted(data.train_y)])))
        if taken.progress < 1:
            with rng_kept([stepper.model], None):
                yield
            continue
        run.tested = worth_of_rows(tested, answers, data)
    if method.kind.loss_led and data.unit == "row":
        run.chosen, run.offered, run.predicted = chosen.tolist(), offered.tolist(), predicted.tolist()
        run.final_losses = [round(float(loss), 4) for loss in losses]
    return run


def _prepared(
    settings: Settings, data: Dataset, method: Method, seed: int, tick: Tick, rows: int | None
) -> Stepper:  # fmt: skip
    """Return the run's stepper, warmed up on a copy of its model; models that only score are trained."""
    torch.manual_seed(seed)
    model = _model_for(settings, data)
    irreducible = torch.zeros(data.train_y.shape) if method.kind.needs_irreducible else None
    warm = Stepper(copy.deepcopy(model), method, settings, data, seed, irreducible, rows)
    for index in range(WARMUP_STEPS):
        warm.step(torch.arange(warm.trained_rows), progress=0.5, batch_index=index)
    tick(0.0, None)
    spent_s = spent_flops = 0.0
    if method.kind.needs_irreducible:
        irreducible, spent_s, spent_flops = irreducible_losses(settings, data, seed)
    torch.manual_seed(seed)
    stepper = Stepper(model, method, settings, data, seed, irreducible, rows)
    stepper.phases_s["score"] += spent_s
    stepper.other_flops = spent_flops
    return stepper


def _check_finite(losses: Tensor, name: str, settings: Settings, seed: int, steps: int) -> None:
    if not bool(losses.isfinite().all()):
        remedy = f"lower the learning rate (--lr, now {settings.lr:g})."
        raise InvalidInput(f"the {name} with seed {seed} is not finite after {steps} steps; {remedy}")


def irreducible_losses(settings: Settings, data: Dataset, seed: int) -> tuple[Tensor, float, float]:
    """Train two models on half of the training rows each, and have each judge the other half.

    They are made as the compared model, and trained plainly, with a rate that decays in that time: for a quarter of
    the epochs each, or for an eighth of the seconds each; for tokens, twice as long. Losses may not be infinite or NaN.

    Returns:
        The loss of each training row, shape (M,), or of each of its tokens, (M, T), on the device; the seconds it took,
        and the FLOPs.

    References:
        Mindermann et al., ICML 2022, arXiv:2206.07137: the variant without a holdout set.
    """
    total_rows = len(data.train_y)
    generator = torch.Generator().manual_seed(2**32 + seed)
    shuffled = torch.randperm(total_rows, generator=generator)
    halves = shuffled[: total_rows // 2], shuffled[total_rows // 2 :]
    losses = torch.zeros(data.train_y.shape, device=data.train_x.device)
    spent_s = spent_flops = 0.0
    share = HOLDOUT_SHARE[data.unit]
    epochs = max(1, round((settings.epochs or 0) / share))
    seconds = None if settings.seconds is None else settings.seconds / (2 * share)
    for nth, (mine, others) in enumerate((halves, halves[::-1])):
        torch.manual_seed(2**32 + 2 * seed + nth)
        plain = Method("full", "plain", "full", FULL)
        stepper = Stepper(_model_for(settings, data), plain, settings, data, seed)
        for _ in stepper.steps(mine, generator, epochs, seconds):
            pass
        begin_s = drained_s()
        where = others.to(losses.device)
        losses[where], _ = judge(stepper.model, data.train_x[where], data.train_y[where])
        spent_s += stepper.train_s + drained_s() - begin_s
        with count_flops() as flops:  # counting takes time, so they judge again
            judge(stepper.model, data.train_x[where], data.train_y[where])
        spent_flops += (stepper.flops or 0.0) + flops.total_flops
        _check_finite(losses[where], "loss under a model that only scores", settings, seed, stepper.optimizer_steps)
    return losses, spent_s, spent_flops


def _model_for(settings: Settings, data: Dataset) -> nn.Module:
    model = build_model(settings.model, len(data.class_names), data.num_inputs)
    return model.to(data.train_x.device).train()


def judge(model: nn.Module, inputs: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """The loss and the prediction of every entry of ``wanted``, in its shape; the model is in eval mode meanwhile."""
    losses, predicted = torch.zeros(wanted.shape, device=wanted.device), torch.zeros_like(wanted)
    rows = max(1, EVALUATED * len(wanted) // wanted.numel())
    with evaluating(list(model.modules())), torch.no_grad():
        for at in range(0, len(inputs), rows):
            part = slice(at, at + rows)
            logits = model(inputs[part]).flatten(0, -2)
            losses[part] = F.cross_entropy(logits, wanted[part].flatten(), reduction="none").view_as(wanted[part])
            predicted[part] = logits.argmax(dim=1).view_as(wanted[part])
    return losses, predicted


def worth_of_rows(losses: Tensor, answers: Tensor, data: Dataset) -> list[float]:
    """Of each test row, 1 where its answer is right, else 0; of a row of tokens, minus its share of their mean loss.

    The mean over the rows is the accuracy, or minus the logarithm of the perplexity.
    """
    if data.unit == "row":
        return [float(right) for right in answers == data.test_y]
    counted = data.counted(data.test_y)
    shares = (losses.double() * counted).sum(1) * (len(counted) / counted.sum())
    return [-round(float(share), 6) for share in shares]


def hardest_share(losses: Tensor) -> list[float]:
    """Return the share of the summed loss that the hardest 0, 1, ..., 100 % of the rows hold."""
    ordered = losses.double().sort(descending=True).values
    held = torch.cat([ordered.new_zeros(1), ordered.cumsum(0)])
    at = [round(percent / SHARE_POINTS * len(ordered)) for percent in range(SHARE_POINTS + 1)]
    total = float(held[-1]) or 1.0
    return [round(float(held[index]) / total, 5) for index in at]
