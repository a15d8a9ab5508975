"""The stages of one call of a step: score, select, backpropagate and record."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from rowprop.batch import num_rows, take
from rowprop.distributed import Ranks, Share, alone, refuse_join
from rowprop.engines.base import Engine, Recompute, Unit
from rowprop.engines.clock import timed
from rowprop.errors import InvalidInput
from rowprop.scoring.forward import Scorer, score_without_graph
from rowprop.scoring.losses import LossesFn, Scored, per_row
from rowprop.selection.base import AnySelector, Context, Selection, asked, check_fits, mean_unread
from rowprop.selection.common import weights_dtype
from rowprop.state import device_of
from rowprop.step.memory import Memory
from rowprop.step.policy import Flags, Floor, NonFinite, check_at_the_end, mean_loss
from rowprop.step.quota import Quota
from rowprop.step.record import Record
from rowprop.step.tokens import Tokens


@dataclass(frozen=True, eq=False)
class Parts:
    """The parts that a step is wired from; the memories inside change, the wiring does not."""

    model: Any
    losses_fn: LossesFn
    selector: AnySelector
    selector_takes_context: bool
    scorer: Scorer | None
    scorer_takes_context: bool
    ranks: Ranks | None
    policy: NonFinite
    floor: Floor
    quota: Quota
    memory: Memory
    unit: Unit
    alone: bool
    """Whether no other process takes part in this one's backwards."""

    def scored(self, batch: Any, scorer: Scorer | None, context: Context, engine: Engine) -> Any:
        """Run the scorer, or else the losses function, without a graph."""
        function = self.losses_fn if scorer is None else scorer
        if scorer is not None and self.scorer_takes_context:
            function = partial(_with_context, scorer, context)
        mode = engine.scoring if isinstance(engine, Recompute) else "train"
        return score_without_graph(cast("Any", function), self.model, batch, mode=mode)

    def device(self, batch: Any) -> torch.device:
        """Where the step runs."""
        return device_of(self.model, batch) or torch.device("cpu")


class Call:
    """One call: its stages, in their order, and the values that they hand on.

    Args:
        parts: The parts of the step.
        batch: The whole batch.
        rows: N; None for a batch of unknown make.
        tokens: Where rows are tokens, the tokens; else None.
        context: The context of all rows.
        engine: The engine that runs.
        whole: Why the whole batch is trained, without scoring it; None where rows are selected.
        timing: Whether seconds are taken.
    """

    __slots__ = (
        "batch", "context", "engine", "kept_by_rank", "known", "later", "loss_all", "losses", "parts", "rows", "scores",
        "seconds", "selection", "tokens", "whole",
    )  # fmt: skip

    def __init__(
        self,
        parts: Parts,
        batch: Any,
        rows: int | None,
        tokens: Tokens | None,
        context: Context,
        engine: Engine,
        whole: str | None,
        timing: bool,
    ) -> None:
        self.parts = parts
        self.batch = batch
        self.rows = rows
        self.tokens = tokens
        self.context = context
        self.engine = engine
        self.whole = whole
        # A rank that raised only after its backward has spoilt the averaged gradients of the others.
        self.later: list[Flags] | None = [] if parts.alone else None
        self.seconds: dict[str, float] | None = {"score": 0.0, "forward": 0.0, "select": 0.0} if timing else None
        # Of all rows, shape (N,), or of all tokens, flattened: scores; losses without a graph where somebody computed
        # them; losses with their graph where one forward serves all.
        self.scores: Tensor | None = None
        self.known: Tensor | None = None
        self.losses: Tensor | None = None

    def score(self) -> None:
        """Stage 1: scores of all rows, by a forward without a graph or by the training forward."""
        parts, selecting = self.parts, self.whole is None
        rescored = selecting and not self.engine.one_forward
        scorer = parts.scorer if selecting else None
        if rescored or scorer is not None:
            with self._phase("score"):
                name = "losses_fn" if scorer is None else "scorer"
                returned = parts.scored(self.batch, scorer, self.context, self.engine)
                known, self.scores = self._losses_and_scores(name, returned)
                self.known = known if scorer is None else None
        if not rescored:
            with self._phase("forward"):
                returned = parts.losses_fn(parts.model, self.batch)
                self.losses, beside = self._losses_and_scores("losses_fn", returned)
                self.known = self.losses.detach()
                if self.scores is None:
                    self.scores = self.known if beside is self.losses else beside.detach()

    def select(self) -> None:
        """Stage 2: the rows that contribute, here or across ranks, and the mean loss of all rows they come from."""
        with self._phase("select"):
            scores, known = cast("Tensor", self.scores), self.known
            if self.rows is None and self.tokens is None:  # nobody could tell before how many there are
                check_fits(self.context, scores.numel())
            scores = scores.to(self.parts.device(self.batch) if known is None else known.device)
            if known is not None and known is not scores:  # a row without a finite loss has no score either
                scores = torch.where(known.isfinite(), scores, torch.nan)
            if self.tokens is not None:
                counting = self.tokens.counting(scores.device)
                self.context = self.tokens.context(self.context)
                if counting is not None:
                    scores, self.known = scores[counting], None if known is None else known[counting]
            self.scores = scores
            share, self.loss_all = self._share(scores)
            selection, self.kept_by_rank = self.parts.quota.within(share, self.parts.selector)
            self.selection = self.parts.memory.weighed(selection, self.context)

    def backpropagate(self, step: int) -> tuple[Tensor, Record]:
        """Stages 3 and 4: the loss whose backward pays for the selected rows, and the record of step ``step``."""
        parts, selection, scores = self.parts, self.selection, cast("Tensor", self.scores)
        with self._phase("select"):
            run, places = parts.floor.widened(selection, scores)
            if self.tokens is not None:
                run = self.tokens.placed(run)
        with self._phase("forward"):
            kept = self._kept_losses(run)
            if places is not None:
                kept = kept[places]
            if self.losses is None:
                parts.policy.check_trained(kept, selection, self.engine.name, self.later)
        loss = _weighted(kept, selection)
        check_at_the_end(loss, self.later)
        contributed, ready = parts.quota.after(self.kept_by_rank)
        record = Record(
            step=step,
            loss_all=self.loss_all,
            loss_kept=mean_loss(kept.detach()),
            selection=selection if self.tokens is None else self.tokens.placed(selection),
            num_kept=selection.num_kept,
            num_rows=selection.num_rows,
            kept_by_rank=self.kept_by_rank,
            engine=self.engine.name,
            reason=self.whole or f"{self.engine.name} was asked for",
            seconds=self.seconds,
            ready=ready,
            contributed=contributed,
            unit=parts.unit,
        )
        parts.memory.note(selection, self.context, self.known, scores, kept.detach())
        parts.quota.contributed = 0 if ready else contributed
        return loss, record

    def _share(self, scores: Tensor) -> tuple[Share, Tensor]:
        """Select under the policy, here or across ranks; and the mean loss of all rows, of all ranks."""
        parts, finite = self.parts, scores.isfinite()
        loss_all = parts.policy.mean(self.known, finite)
        if parts.ranks is None:
            return alone(self._choose(scores, self.context)), loss_all
        refuse_join(parts.model)
        told = [parts.policy.usable(finite), loss_all, loss_all.new_full((), scores.numel(), dtype=torch.float64)]
        told = torch.stack([number.double() for number in told])
        share = parts.ranks.share(scores, self.context, self._choose, told)
        if share.told is None:
            return share, loss_all
        counts, means, sizes = share.told.unbind(1)
        parts.policy.check_ranks(counts, sizes)
        total = torch.where(counts > 0, means * counts, 0).sum()  # of no token the mean is NaN
        return share, (total / counts.sum()).to(loss_all.dtype)

    def _choose(self, scores: Tensor, context: Context) -> Selection:
        return self.parts.policy.choose(scores, context, self._ask, self.engine.name, self.later)

    def _ask(self, scores: Tensor, context: Context) -> Selection:
        if self.whole is None and scores.numel() > 0:  # of tokens none may count
            return asked(self.parts.selector, self.parts.selector_takes_context, scores, context)
        rows = torch.arange(scores.numel(), device=scores.device)
        return mean_unread(rows, scores.numel(), weights_dtype(scores), unbiased=True)

    def _kept_losses(self, selection: Selection) -> Tensor:
        """Have the engine work, unless every row is kept and there is nothing to pick from."""
        if selection.is_everything and self.losses is not None:
            return self.losses

        def forward(rows: Tensor) -> Tensor:
            part = self.batch if selection.is_everything else take(self.batch, rows)
            return per_row("losses_fn", self.parts.losses_fn(self.parts.model, part), rows.numel())

        return self.engine.kept_losses(selection, self.losses, forward)

    def _losses_and_scores(self, name: str, returned: object) -> tuple[Tensor, Tensor]:
        """The losses per row that a function returned, and the scores beside them or else the losses."""
        scores = returned.scores if isinstance(returned, Scored) else None
        if self.tokens is not None:
            losses = self.tokens.flat(name, returned)
            return losses, losses if scores is None else self.tokens.flat(name, scores, noun="scores")
        losses = per_row(name, returned, self.rows)
        return losses, losses if scores is None else per_row(name, scores, losses.numel(), noun="scores")

    def _phase(self, name: str) -> AbstractContextManager[None]:
        """Take the seconds of the block; free when nobody asked for them."""
        return _UNTIMED if self.seconds is None else timed(self.seconds, name)


_UNTIMED = nullcontext()


def rows_of(batch: Any) -> int | None:
    """N, or None for a batch of unknown make: no hindrance until someone must take rows of it."""
    try:
        return num_rows(batch)
    except InvalidInput:
        return None


def _weighted(kept: Tensor, selection: Selection) -> Tensor:
    """The losses times their weights, summed; the mean as such where it is one, so that it equals a plain loop's."""
    if selection.even and selection.num_kept:
        return kept.to(torch.promote_types(kept.dtype, selection.weights.dtype)).mean()
    return (kept * selection.weights).sum()


def _with_context(scorer: Callable[..., Any], context: Context, model: Any, batch: Any) -> Any:
    return scorer(model, batch, context)
