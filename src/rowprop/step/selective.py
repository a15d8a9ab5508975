"""The training step: score, select, backpropagate, record; from the call at the top down to the checks at the end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Literal, cast

import torch
from torch import Tensor, nn

from rowprop.backprop.pick import Unit
from rowprop.batch import possible_sizes, take, tensors
from rowprop.checks import (
    check_choice,
    check_entries,
    check_function,
    check_graph,
    check_kind,
    check_losses_fn,
    check_whole,
    signature_of,
    wrong,
)
from rowprop.distributed import Ranks, Share, alone, averages_gradients, refuse_join
from rowprop.engines import Engine, Recompute, engine_of, uses_batch_statistics
from rowprop.errors import InvalidInput
from rowprop.host import mark, reach, readable, timed, waits
from rowprop.schedule import Schedule
from rowprop.scoring import LossesFn, Scored, Scorer, per_row, score_without_graph
from rowprop.selection import Context, Selection, Selector, Stateful
from rowprop.selection.base import OfScores, asked, check_fits, check_selector, keep_of, mean_unread, unread
from rowprop.selection.selectors import NotFinite, every_row, hardest_first, weights_dtype
from rowprop.state import device_of
from rowprop.step.record import Record
from rowprop.step.small import warn_if_too_small
from rowprop.step.tokens import Tokens, tokens_of

if TYPE_CHECKING:
    from rowprop.history import LossHistory, PruningSampler

OnNonFinite = Literal["error", "drop", "keep"]

_OWNER = "SelectiveBackprop"


class SelectiveBackprop:
    """A training step that backpropagates only the rows that a selector keeps.

    The returned loss is ``(losses[rows] * weights).sum()``, for most selectors the mean over the kept rows; its
    ``backward()`` costs what the engine sets. Autocast, scaling, clipping and the optimizer stay in the user's loop.
    Under DDP or FSDP, give the wrapped model and ``ranks``: then all run the same forwards, and a backward in any case.

    Args:
        model: The model that ``losses_fn`` is given, usually an ``nn.Module``.
        losses_fn: ``(model, batch)`` to unreduced losses, shape ``(N,)`` or ``(N, 1)``, or to :class:`rowprop.Scored`.
            With the engine ``recompute`` it is also called on the kept rows alone.
        selector: ``(scores, context)`` to a :class:`rowprop.Selection`, for example :class:`rowprop.TopK`. A batch of
            which the selector is known to keep every row is trained whole, without scoring.
        scorer: ``(model, batch)``, or ``(model, batch, context)``, to scores of the same shapes, run by
            :func:`rowprop.scoring.score_without_graph`. Default None: the losses are the scores.
        schedule: Says when rows are selected; else the whole batch is trained. Default None: always. Needs
            ``total_steps``, a sampler, or the progress in each call.
        total_steps: How many calls the training has: progress is ``step / total_steps``. Default None: unknown.
        history: A :class:`rowprop.history.LossHistory` that takes the losses and the choice of each step, and whose
            factors per row multiply the weights; or the :class:`rowprop.history.PruningSampler` that fills the batches,
            with its history inside. Needs the ids in each call. Default None: no memory.
        engine: ``"sliced"`` (default), ``"recompute"`` or ``"masked"``, or an object of :mod:`rowprop.engines`.
            :func:`rowprop.plan` measures which one pays. A model too small to gain by ``sliced`` warns once, with
            :class:`rowprop.TooSmall`; to see that, an accelerator's first ten steps wait for it after the backward.
        ranks: How the ranks of a distributed training select together, :class:`rowprop.distributed.Local` or
            :class:`rowprop.distributed.Global`. Default None: each process selects for itself.
        accumulate_to: B. Gathers kept rows over several batches, and of all ranks, until exactly B have contributed:
            each counts ``1/B``, surplus rows of the last batch are left out, and ``record.ready`` says when to step.
            Only for selections with weights ``1/K``. Default None: each batch is a step.
        nonfinite: What a NaN or infinite loss or score leads to. ``"error"`` (default): an error; on a device the call
            waits for nothing, and ``loss.backward()`` raises at its end, before the optimizer steps (without a graph,
            or with other ranks, the call waits and raises). ``"drop"``: such rows are never selected, nor counted in
            ``loss_all``; the host waits for one flag in each step, with ``recompute`` for another (``masked`` may still
            turn the gradient into NaN, as torch does). ``"keep"``: as in a plain step, so that a GradScaler skips it.
        min_rows: Least number of rows that run through the model, at most N: the highest-scored others join a smaller
            selection and count nothing. Default None: 2 while a BatchNorm takes batch statistics, else 1.
        generator: Source of the selector's randomness, on the device of the scores. Default None: torch's own. A global
            selection draws on the first rank.
        timing: Fill ``record.seconds``; synchronises the accelerator. Default False.
        unit: ``"row"`` (default): rows are the entries of the batch's first dimension. ``"token"``: ``losses_fn``
            returns a loss per token, of any shape, and the selector chooses among all tokens of the batch that count.
            Needs the engine ``sliced`` or ``masked``, and takes no history.

    The arguments are attributes that stay as they are; a sampler is ``sampler``, and ``history`` the one inside it.

    Raises:
        InvalidInput: An argument is out of its range, or in another's place; at a call, the output of ``losses_fn``,
            ``scorer`` or ``selector`` does not fit the batch, or ``nonfinite`` forbids it. Such a call does not count
            as a step; a step whose ``backward()`` raised, on a device, does.

    Example:
        >>> model = torch.nn.Linear(3, 1)
        >>> losses_fn = lambda model, batch: (model(batch[0]).squeeze(1) - batch[1]).square()
        >>> selective = SelectiveBackprop(model, losses_fn, TopK(keep=0.25))
        >>> loss, record = selective((torch.randn(8, 3), torch.randn(8)))
        >>> loss.backward()
        >>> record.num_kept, record.num_rows, record.engine
        (2, 8, 'sliced')
    """

    def __init__(
        self,
        model: Any,
        losses_fn: LossesFn,
        selector: Selector,
        *,
        scorer: Scorer | None = None,
        schedule: Schedule | None = None,
        total_steps: int | None = None,
        history: LossHistory | PruningSampler | None = None,
        engine: str | Engine = "sliced",
        ranks: Ranks | None = None,
        accumulate_to: int | None = None,
        nonfinite: OnNonFinite = "error",
        min_rows: int | None = None,
        generator: torch.Generator | None = None,
        timing: bool = False,
        unit: Unit = "row",
    ) -> None:
        self.model: Final = model
        self.losses_fn: Final = losses_fn
        self.selector: Final = selector
        self.scorer: Final = scorer
        self.schedule: Final = schedule
        self.total_steps: Final = total_steps
        self.history, self.sampler = _history_of(history)
        self.engine: Final = engine_of(_OWNER, engine)
        self.ranks: Final = ranks
        self.accumulate_to: Final = accumulate_to
        self.nonfinite: Final = nonfinite
        self.min_rows: Final = min_rows
        self.generator: Final = generator
        self.timing: Final = timing
        self.unit: Final = unit
        self._alone = ranks is None and not averages_gradients(model)  # no other process takes part in a backward
        _check(self)
        self._step = 0
        self._contributed = 0  # rows of all ranks, to the pending optimizer step; always 0 without accumulate_to
        self._trained = (0, 0)  # rows of the sampler's epoch, and the number of that epoch
        self._size_is_known = False
        self._done_at_once: list[bool] = []  # see warn_if_too_small

    def __setattr__(self, name: str, value: Any) -> None:
        if name in vars(self) and not name.startswith("_"):
            raise AttributeError(f"{name} stays as it was given; make another SelectiveBackprop.")
        super().__setattr__(name, value)

    @property
    def progress(self) -> float | None:
        """Fraction of the training that is done, of ``total_steps`` or else of the sampler's epochs; None: unknown."""
        if self.total_steps is not None:
            return min(1.0, self._step / self.total_steps)
        return None if self.sampler is None else self.sampler.progress(self._rows_trained())

    def __call__(
        self,
        batch: Any,
        batch_index: int | None = None,
        *,
        ids: Tensor | None = None,
        classes: Tensor | None = None,
        progress: float | None = None,
        counted: Tensor | None = None,
    ) -> tuple[Tensor, Record]:
        """Run one step's forward and return the loss to call ``backward()`` on, 0-d, at least float32, and its record.

        Args:
            batch: The whole batch, N rows.
            batch_index: Number of the batch for the schedule's ``interrupt``; default: how often this was called
                before. Give it where a batch comes more than once.
            ids: Which row of the data each row is, shape ``(N,)``, int64, as :class:`rowprop.history.WithIds` yields
                them. Needed with a history, and by parts that look rows up.
            classes: The class of each row, shape ``(N,)``, int64. Needed by :class:`rowprop.selection.PerClass`.
            progress: Fraction of the training that is done, in [0, 1]; default :attr:`progress`.
            counted: Which tokens count, bool, of the shape of the losses, e.g. ``labels[:, 1:] != -100``; only with
                ``unit="token"``. The others are never kept, nor in N, K or ``loss_all``; if none counts, loss and
                gradient are zero. A mask on a device costs one wait, for earlier work. Default None: all count.
        """
        context = self._context(batch_index, ids, classes, progress)
        whole = self._whole(context, self._step if batch_index is None else batch_index)
        seconds = {"score": 0.0, "forward": 0.0, "select": 0.0} if self.timing else None
        late: Late | None = [] if self._alone else None  # a late error has spoilt the gradients of other ranks
        call = Call(batch, rows_of(batch), tokens_of(counted, self.unit), context, whole, seconds, late)
        if call.num_rows is not None:
            check_fits(context, call.num_rows)
        scored = _score(self, call)
        selection, kept_by_rank, loss_all = _select(self, call, scored, self._contributed)
        kept = _train(self, call, scored, selection)
        if selection.even and selection.num_kept:  # the mean as such, so that it equals a plain loop's
            loss = kept.to(torch.promote_types(kept.dtype, selection.weights.dtype)).mean()
        else:
            loss = (kept * selection.weights).sum()
        if torch.is_grad_enabled():
            check_graph(loss)
        if not self._size_is_known:  # before the flags: the host may wait for those at the backward's end
            self._size_is_known = warn_if_too_small(
                self.engine, scored.losses, selection, self.unit, loss, self._done_at_once
            )
        _check_late(loss, call.late, self.unit)
        contributed = self._contributed + sum(kept_by_rank)
        record = Record(
            step=self._step,
            loss_all=loss_all,
            loss_kept=kept.detach().mean(dtype=weights_dtype(kept)),
            selection=selection if call.tokens is None else call.tokens.placed(selection),
            num_kept=selection.num_kept,
            num_rows=selection.num_rows,
            kept_by_rank=kept_by_rank,
            engine=self.engine.name,
            reason=call.whole or f"{self.engine.name} was asked for",
            seconds=call.seconds,
            ready=self.accumulate_to in (None, contributed),
            contributed=contributed,
            unit=self.unit,
        )
        self._remember(selection, scored, kept.detach())
        self._contributed = 0 if record.ready else contributed
        self._step += 1
        return loss, record

    def _context(self, index: object, ids: Tensor | None, classes: Tensor | None, progress: float | None) -> Context:
        if any(tensor.dim() for tensor in tensors(index)):
            raise InvalidInput("a call got a second batch as batch_index; one was needed: `selective((x, y))`.")
        if index is not None:
            check_whole("a call", "batch_index", index, 0)
        known = self.progress if progress is None else progress
        context = Context(known, ids, classes, self.generator, self.history)
        if self.history is not None:
            context.need("ids", "the history")
        return context

    def _whole(self, context: Context, index: int) -> str | None:
        """Why the whole batch is trained, without scoring it; None where rows are selected."""
        if self.schedule is not None:
            progress = context.need("progress", "the schedule")
            if not self.schedule.active(progress, index):
                return f"the whole batch: the schedule is not active in batch {index} at progress {progress:.3f}"
        keeps_all = keep_of(self.selector, context) == 1
        return f"the whole batch: the selector keeps every {self.unit}" if keeps_all else None

    def _remember(self, selection: Selection, scored: Scores, kept: Tensor) -> None:
        """Give the history the losses of a step, and note how far the sampler's epoch is trained."""
        ids, known = cast("Tensor", scored.context.ids), scored.known
        if self.history is not None:
            if known is None:
                known = torch.full_like(scored.scores, torch.nan)
                known = known.index_copy(0, selection.rows, kept.to(known.dtype))
            self.history.update(ids, known, selection.rows)
        if self.sampler is not None:  # the furthest row counts, so a batch that is given again adds nothing
            self._trained = max(self._rows_trained(), self.sampler.trained(ids)), self.sampler.epoch

    def _rows_trained(self) -> int:
        """Rows of the sampler's running epoch that are trained: its loader's workers have fetched more."""
        trained, epoch = self._trained
        return trained if self.sampler is not None and epoch == self.sampler.epoch else 0

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next step depends on, but torch's own random state where no ``generator`` was given."""
        state: dict[str, Any] = {"step": self._step, "contributed": self._contributed}
        if self.generator is not None:
            state["generator"] = self.generator.get_state()
        state |= {name: part.state_dict() for name, part in self._stateful().items()}
        if self.sampler is not None:
            state["sampler"] = self.sampler.state_dict(self._rows_trained())
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where ``state`` was taken, bit for bit.

        A state of a step with other parts, with more rows than ``accumulate_to`` asks for, or with one that a part
        cannot load, raises :class:`rowprop.InvalidInput`, and nothing is loaded.
        """
        before = self.state_dict()
        _check_state(state, before, self.accumulate_to)
        try:
            self._load(state)
        except Exception as error:  # a part of the user's may fail in any way
            self._load(before, sampler=False)
            reason = f"({type(error).__name__}: {error}), so nothing was loaded."
            raise InvalidInput(f"load_state_dict got a state that a part cannot load {reason}") from error
        self._step, self._contributed = state["step"], state["contributed"]

    def _load(self, state: Mapping[str, Any], *, sampler: bool = True) -> None:
        for name, part in self._stateful().items():
            part.load_state_dict(state[name])
        if self.generator is not None:
            self.generator.set_state(state["generator"].cpu())
        if self.sampler is not None and sampler:  # last: taken back, its running epoch would be another
            self.sampler.load_state_dict(state["sampler"])
            self._trained = state["sampler"]["trained"], self.sampler.epoch

    def _stateful(self) -> dict[str, Stateful]:
        parts = {"selector": self.selector, "scorer": self.scorer, "history": self.history}
        return {name: part for name, part in parts.items() if isinstance(part, Stateful)}


# --- one call ---------------------------------------------------------------------------------------------------------

Late = list[tuple[Tensor, Any]]  # flags of finite rows (N,) on their way to the host, each with the mark of its arrival


@dataclass(frozen=True, eq=False)
class Call:
    """What is known of a call before its forward."""

    batch: Any
    num_rows: int | None  # N; None for a batch of unknown make
    tokens: Tokens | None
    context: Context
    whole: str | None  # why the whole batch is trained, without scoring it; None where rows are selected
    seconds: dict[str, float] | None
    late: Late | None  # takes flags that are read when the backward is queued; None where the call waits for them


@dataclass(frozen=True, eq=False)
class Scores:
    """What the forward of a call gave, of all rows or of the tokens that count: shape ``(N,)``."""

    scores: Tensor  # NaN or infinite where the loss or the score is
    known: Tensor | None  # losses without a graph; None where nobody computed them
    losses: Tensor | None  # of all rows or of all tokens with their graph, where one forward serves all
    context: Context


def rows_of(batch: Any) -> int | None:
    """N; None for a batch of unknown make, or of two possible sizes, until the losses tell it."""
    try:
        sizes = possible_sizes(batch)
    except InvalidInput:
        return None
    return next(iter(sizes)) if len(sizes) == 1 else None


def _score(step: SelectiveBackprop, call: Call) -> Scores:
    """Stage 1: scores of all rows, by a forward without a graph or by the training forward."""
    scorer, engine, tokens = step.scorer, step.engine, call.tokens

    def numbers(name: str, returned: object) -> tuple[Tensor, Tensor | None]:
        """The losses that a function returned, and the scores beside them."""
        losses = per_row(name, returned, call.num_rows) if tokens is None else tokens.flat(name, returned)
        if not isinstance(returned, Scored):
            return losses, None
        if tokens is not None:
            return losses, tokens.flat(name, returned.scores, noun="scores")
        return losses, per_row(name, returned.scores, losses.numel(), noun="scores")

    scores = known = losses = None
    if call.whole is None and (scorer is not None or not engine.one_forward):
        with timed(call.seconds, "score"):
            function = cast("Any", step.losses_fn if scorer is None else scorer)
            if scorer is not None and wants_context(scorer):
                function = partial(scorer, context=call.context)
            mode = engine.scoring if isinstance(engine, Recompute) else "train"
            returned = score_without_graph(function, step.model, call.batch, mode=mode)
            found, scores = numbers("losses_fn" if scorer is None else "scorer", returned)
            scores = found if scores is None else scores
            known = found if scorer is None else None
    if call.whole is not None or engine.one_forward:
        with timed(call.seconds, "forward"):
            losses, beside = numbers("losses_fn", step.losses_fn(step.model, call.batch))
            known = losses.detach()
            if scores is None:
                scores = known if beside is None else beside.detach()
    scores, context = cast("Tensor", scores), call.context
    if call.num_rows is None and tokens is None:  # nobody could say before how many there are
        check_fits(context, scores.numel())
    scores = scores.to((device_of(step.model, call.batch) or "cpu") if known is None else known.device)
    if known is not None and known is not scores:  # a row without a finite loss has no score either
        scores = torch.where(known.isfinite(), scores, torch.nan)
    if tokens is not None:
        counting, context = tokens.counting(scores.device), tokens.context(context)
        if counting is not None:
            scores, known = scores[counting], None if known is None else known[counting]
    return Scores(scores, known, losses, context)


def _select(
    step: SelectiveBackprop, call: Call, scored: Scores, contributed: int
) -> tuple[Selection, tuple[int, ...], Tensor]:
    """Stage 2: the rows that contribute, how many of each rank do, and the mean loss of all rows of all ranks."""

    def choose(scores: Tensor, context: Context) -> Selection:
        selecting = call.whole is None and scores.numel() > 0  # of tokens none may count
        return select_finite(step, step.selector if selecting else OfScores(every_row), scores, context, call.late)

    with timed(call.seconds, "select"):
        scores, context = scored.scores, scored.context
        # Before the selector, which may remember the batch: ids that are refused change nothing.
        factors = None if step.history is None else step.history.weights_of(cast("Tensor", context.ids))
        finite = scores.isfinite()
        loss_all = mean_loss(step, scored.known, finite)
        if step.ranks is None:
            share = alone(choose(scores, context))
        else:
            refuse_join(step.model)
            num_rows = torch.full_like(finite.sum(), finite.numel())
            usable = finite.sum() if step.nonfinite == "drop" else num_rows
            facts = torch.stack([usable.double(), loss_all.double(), num_rows.double()])
            share = step.ranks.share(scores, context, choose, facts)
            if share.facts is not None:
                loss_all = mean_over_ranks(step, share.facts).to(loss_all.dtype)
        selection, kept_by_rank = within_quota(step, share, contributed)
        if factors is not None:
            weights = selection.weights * factors.to(selection.weights)[selection.rows]
            selection = unread(selection.rows, weights, selection.num_rows)
    return selection, kept_by_rank, loss_all


def _train(step: SelectiveBackprop, call: Call, scored: Scores, selection: Selection) -> Tensor:
    """Stage 3: the losses of the rows that contribute, ``(K,)``, with a graph whose backward pays for them."""

    def forward(rows: Tensor) -> Tensor:
        part = call.batch if run.is_everything else take(call.batch, rows, selection.num_rows)
        return per_row("losses_fn", step.losses_fn(step.model, part), rows.numel())

    with timed(call.seconds, "select"):
        run, places = widened(step, selection, scored.scores)
        if call.tokens is not None:
            run = call.tokens.placed(run)
    with timed(call.seconds, "forward"):
        if run.is_everything and scored.losses is not None:
            kept = scored.losses  # nothing to pick from
        else:
            kept = step.engine.kept_losses(run, scored.losses, forward)
        if places is not None:
            kept = kept[places]
        if scored.losses is None:
            check_trained(step, kept, selection, call.late)
    return kept


# --- policies ---------------------------------------------------------------------------------------------------------


def select_finite(
    step: SelectiveBackprop, selector: Selector, scores: Tensor, context: Context, late: Late | None = None
) -> Selection:
    """Have a selector choose among the rows of ``scores`` ``(N,)`` that ``nonfinite`` allows."""
    finite = scores.isfinite()
    if step.nonfinite == "keep":  # their score is infinite, so they rank first
        try:
            return asked(selector, torch.where(finite, scores, torch.inf), context)
        except NotFinite:  # the selector chooses among the others, and they are added
            kept, rows = ~finite, finite.nonzero().squeeze(1)
            if rows.numel() > 0:
                kept[rows[asked(selector, scores[rows], context.at(rows)).rows]] = True
            return mean_unread(kept.nonzero().squeeze(1), scores.numel(), weights_dtype(scores))
    if late is not None and step.nonfinite == "error" and waits(finite):
        late.append(_sent(finite))
        try:
            return asked(selector, scores, context)
        except NotFinite:
            raise _not_finite(finite, step.unit) from None
    if bool(finite.all()):
        return asked(selector, scores, context)
    if step.nonfinite == "error":
        raise _not_finite(finite, step.unit)
    rows = finite.nonzero().squeeze(1)
    if rows.numel() == 0:
        raise _none_finite(f"All {scores.numel()} {step.unit}s")
    chosen = asked(selector, scores[rows], context.at(rows))
    return unread(rows[chosen.rows], chosen.weights, scores.numel(), even=chosen.even, unbiased=chosen.unbiased)


def mean_loss(step: SelectiveBackprop, losses: Tensor | None, finite: Tensor) -> Tensor:
    """Mean loss of the rows that count, 0-d, at least float32; NaN where nobody knows the losses."""
    if losses is None:
        return torch.full((), torch.nan, device=finite.device)
    if step.nonfinite != "drop":
        return losses.mean(dtype=weights_dtype(losses))
    return torch.where(finite, losses, 0).sum(dtype=weights_dtype(losses)) / finite.sum()  # indexing would wait


def mean_over_ranks(step: SelectiveBackprop, facts: Tensor) -> Tensor:
    """Mean loss of all ranks from each one's number of usable rows, its mean loss and its N, shape ``(W, 3)``."""
    counts, means, sizes = facts.unbind(1)
    if step.nonfinite == "drop" and bool(((counts == 0) & (sizes > 0)).any()):
        raise _none_finite(f"All {step.unit}s of rank {int(torch.where(sizes > 0, counts, torch.inf).argmin())}")
    return torch.where(counts > 0, means * counts, 0).sum() / counts.sum()  # of no token the mean is NaN


def within_quota(step: SelectiveBackprop, share: Share, contributed: int) -> tuple[Selection, tuple[int, ...]]:
    """The rows that the pending optimizer step still needs, scaled to a mean over B rows; and how many of each rank."""
    chosen, counts, target = share.selection, share.kept_by_rank, step.accumulate_to
    if target is None:
        return chosen, counts
    if not share.even:
        own = f"a selection with weights of its own from {step.selector!r}"
        raise InvalidInput(f"{_OWNER} got accumulate_to={target} and {own}, but weights of 1/K were needed.")
    left = target - contributed  # the ranks come in their order, as rows do
    within = tuple(min(count, max(0, left - sum(counts[:rank]))) for rank, count in enumerate(counts))
    count, scale = within[share.rank], sum(counts) / target
    return unread(chosen.rows[:count], chosen.weights[:count] * scale, chosen.num_rows), within


def widened(step: SelectiveBackprop, selection: Selection, scores: Tensor) -> tuple[Selection, Tensor | None]:
    """Add rows up to ``min_rows``, for BatchNorm and for ranks; and where the kept ones are among them, None: all."""
    least = step.min_rows
    if least is None:  # two rows are enough for any model, and a search through the modules takes time
        least = 2 if selection.num_kept < 2 and uses_batch_statistics(step.model) else 1
    least = min(least, selection.num_rows)
    if selection.num_kept >= least:
        return selection, None
    order = hardest_first(torch.where(scores.isfinite(), scores, torch.nan))
    others = order[torch.isin(order, selection.rows, invert=True)]
    finite = others[scores[others].isfinite()]  # zero times an infinity would not be zero
    if selection.num_kept + finite.numel() == 0:
        finite = others[:1]
    rows = torch.cat([selection.rows, finite[: least - selection.num_kept]]).sort().values
    return mean_unread(rows, selection.num_rows, selection.weights.dtype), torch.searchsorted(rows, selection.rows)


def check_trained(step: SelectiveBackprop, kept: Tensor, selection: Selection, late: Late | None = None) -> None:
    """Refuse non-finite losses that scoring did not see: another mode, other dropout masks, a scorer."""
    if step.nonfinite == "keep":
        return
    finite = kept.detach().isfinite()
    wait = late is None or step.nonfinite == "drop" or not waits(finite)
    if wait and bool(finite.all()):
        return
    everything = torch.ones(selection.num_rows, dtype=torch.bool, device=finite.device)
    everything[selection.rows] = finite
    if wait:
        unseen = "scoring did not see it; score by the losses, in the mode of training."
        raise _not_finite(everything, step.unit, unseen if step.nonfinite == "drop" else None)
    cast("Late", late).append(_sent(everything))


def _sent(finite: Tensor) -> tuple[Tensor, Any]:
    if not readable(finite):
        raise InvalidInput("nonfinite is 'error' but the losses cannot be read here; choose nonfinite='keep'.")
    return finite.to("cpu", non_blocking=True), mark(finite.device)


def _check_late(loss: Tensor, late: Late | None, unit: Unit) -> None:
    """Read the flags when the backward of ``loss`` is queued, so that the device has work meanwhile.

    They are there when the forward has ended. So the error leaves ``backward()``, and the optimizer has not stepped.
    """

    def check() -> None:
        for finite, arrived in late or ():
            reach(arrived)
            if not bool(finite.all()):
                raise _not_finite(finite, unit)

    def begun(_: Tensor) -> None:
        cast(Any, torch.autograd.Variable)._execution_engine.queue_callback(check)

    if late and loss.requires_grad:
        loss.register_hook(begun)
    else:
        check()


def _none_finite(all_rows: str) -> InvalidInput:
    return InvalidInput(f"{all_rows} have a NaN or infinite loss or score; look at the data and the learning rate.")


def _not_finite(finite: Tensor, unit: Unit, remedy: str | None = None) -> InvalidInput:
    rows: list[int] = (~finite).nonzero().squeeze(1).tolist()  # pyright: ignore[reportUnknownVariableType]
    first = ", ".join(map(str, rows[:5])) + ", ..." * (len(rows) > 5) + " of those that count" * (unit == "token")
    some = f"{len(rows)} of {finite.numel()} {unit}s have a NaN or infinite loss or score ({unit}s {first})"
    remedy = remedy or "look at the data and the learning rate, or choose nonfinite='drop' or 'keep'."
    return InvalidInput(f"{some}; {remedy}")


# --- checks -----------------------------------------------------------------------------------------------------------


def _history_of(given: object) -> tuple[LossHistory | None, PruningSampler | None]:
    if given is None:
        return None, None
    from rowprop.history import LossHistory, PruningSampler  # only here: most steps have none

    if isinstance(given, PruningSampler):
        return given.history, given
    check_kind(_OWNER, "history", given, LossHistory, "a LossHistory() or a PruningSampler was needed.")
    return cast(LossHistory, given), None


def _check(step: SelectiveBackprop) -> None:
    model, losses_fn, selector, scorer = step.model, step.losses_fn, step.selector, step.scorer
    modules = [isinstance(given, nn.Module) for given in (model, losses_fn, selector)]
    moved = "scores" in _arguments(losses_fn)[:1] or "model" in _arguments(selector)[:1]
    if moved or (any(modules) and not modules[0]):
        raise InvalidInput(f"{_OWNER} got its arguments in another order; write {_OWNER}(model, losses_fn, selector).")
    check_selector(_OWNER, selector)
    check_losses_fn(_OWNER, losses_fn)
    if scorer is not None:
        needed = "a function of the model and the batch, and of a context if it is called so, was needed."
        check_function(_OWNER, "scorer", scorer, 3 if wants_context(scorer) else 2, needed)
    check_kind(_OWNER, "schedule", step.schedule, Schedule | None, "an instance of Schedule was needed.")
    check_kind(_OWNER, "ranks", step.ranks, Ranks | None, "rowprop.distributed.Local() or Global() was needed.")
    for name in ("total_steps", "accumulate_to", "min_rows"):
        if (value := getattr(step, name)) is not None:
            check_whole(_OWNER, name, value, 1, "a whole number, 1 or more, was needed; None is the default.")
    check_choice(_OWNER, "nonfinite", step.nonfinite, ("error", "drop", "keep"))
    check_choice(_OWNER, "timing", step.timing, (False, True))
    check_choice(_OWNER, "unit", step.unit, ("row", "token"))
    if step.unit == "token" and step.history is not None:
        raise InvalidInput(f"{_OWNER} got unit='token' with a history, but tokens have no ids; leave the history out.")
    if step.unit == "token" and not step.engine.one_forward:
        raise wrong(_OWNER, "engine", step.engine, "tokens need an engine with one forward; take 'sliced'.")
    if step.accumulate_to is not None and step.ranks is None and averages_gradients(model):
        needed = "all ranks must be ready together; give ranks=rowprop.distributed.Local() or Global()."
        raise InvalidInput(f"{_OWNER} got accumulate_to with a {type(model).__name__} and no ranks, but {needed}")


def _arguments(function: object) -> list[str]:
    """The names of a function's arguments, as far as it tells them."""
    signature = signature_of(function) if callable(function) else None
    return [] if signature is None else list(signature.parameters)


def wants_context(scorer: object) -> bool:
    """Whether a scorer has an argument called ``context``."""
    return "context" in _arguments(scorer)


def _check_state(state: Mapping[str, Any], before: Mapping[str, Any], accumulate_to: int | None) -> None:
    """Refuse a state of a step with other parts than the one with the state ``before``."""
    check_entries("load_state_dict", state, ())
    if set(state) != set(before):
        got = f"load_state_dict got the entries {sorted(state)} but {sorted(before)} were needed"
        raise InvalidInput(f"{got}; build {_OWNER} with the parts that it had when it was saved.")
    for name in ("step", "contributed"):
        check_whole("load_state_dict", name, state[name], 0)
    if state["contributed"] >= (accumulate_to or 1):
        rows = f"{state['contributed']} rows that have contributed but accumulate_to is {accumulate_to}"
        raise InvalidInput(f"load_state_dict got {rows}; build {_OWNER} as in the saved run.")
