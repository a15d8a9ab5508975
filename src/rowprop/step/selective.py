"""The training step: score, select, backpropagate, record."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal, Protocol, cast, runtime_checkable

import torch
from torch import Tensor

from rowprop.batch import num_rows, take
from rowprop.checks import (
    check_callable,
    check_choice,
    check_entries,
    check_generator,
    check_losses_fn,
    check_whole,
    is_number,
    shown,
    takes,
)
from rowprop.distributed import AcrossRanks, GlobalSelector, Share, averages_gradients, largest, refuse_join
from rowprop.engines.auto import Look, Race
from rowprop.engines.base import Auto, Engine, engine_named, uses_batch_statistics
from rowprop.engines.clock import drained_s
from rowprop.errors import InvalidInput, RowpropError
from rowprop.schedule import Schedule
from rowprop.scoring.forward import Scorer, ScoringMode, score_without_graph
from rowprop.scoring.losses import LossesFn, described, only_losses, only_scores, per_row
from rowprop.selection.base import Selection, Selector, asked, has_own_weights, keywords_of, mean_unread, says, unread
from rowprop.selection.common import hardest_first, weights_dtype
from rowprop.selection.fixed import Everything
from rowprop.state import device_of
from rowprop.step.record import Record

NonFinite = Literal["error", "drop", "keep"]


@runtime_checkable
class History(Protocol):
    """What the step asks of a memory of rows; :class:`rowprop.history.LossHistory` is one."""

    def update(self, ids: Tensor, losses: Tensor, rows: Tensor) -> object:
        """Take note of a batch: ``losses`` (N,), NaN where nobody computed them, and the chosen ``rows`` (K,)."""
        ...

    def weights_of(self, ids: Tensor) -> Tensor:
        """Return the factor of each row, shape ``(N,)``."""
        ...


@runtime_checkable
class Sampler(Protocol):
    """What the step asks of a sampler that prunes; :class:`rowprop.history.PruningSampler` is one."""

    @property
    def history(self) -> History:
        """What it prunes by."""
        ...

    @property
    def epoch(self) -> int:
        """Number of the running epoch."""
        ...

    def progress(self, trained: int) -> float:
        """Fraction of all epochs that is done, where ``trained`` rows of the running one are."""
        ...

    def state_dict(self, trained: int) -> dict[str, Any]:
        """Everything that the rest of the epoch depends on, ``trained`` rows of it being done."""
        ...

    def load_state_dict(self, state: dict[str, Any], /) -> object:
        """Continue where ``state`` was taken."""
        ...


class SelectiveBackprop:
    """A training step that backpropagates only the rows that a selector keeps.

    The returned loss is ``(losses[rows] * weights).sum()``, for the selectors of this package the mean over the kept
    rows, and ``loss.backward()`` gives its gradient at the price that the engine sets. Calling is all there is to it:
    autocast, gradient scaling, clipping and the optimizer stay in the user's loop.

    Under DDP or FSDP, give the wrapped model and a selector that spans the ranks, :class:`GlobalSelector
    <rowprop.distributed.GlobalSelector>` or :class:`LocalSelector <rowprop.distributed.LocalSelector>`: the loss then
    carries the factor that makes the averaged gradient that of all kept rows together, each rank runs the same
    forwards and a backward whatever it keeps, and ``nonfinite``, ``min_rows`` and ``accumulate_to`` are decided for all
    ranks at once.

    Args:
        model: What ``losses_fn`` is given, usually an ``nn.Module``.
        losses_fn: ``(model, batch)`` to unreduced losses, shape ``(N,)``, or ``(N, ...)``, averaged per row. With the
            engine ``recompute`` it is also called on the kept rows alone. It may return a pair, losses and scores of
            the same shapes, larger = more wanted: scores from the forward that runs anyway, e.g. of its logits.
        selector: Which rows, from one score per row, for example :class:`rowprop.selection.TopK`.
        scorer: What makes the scores where the losses are not: ``(model, batch)`` to scores of the same shapes, run
            without a graph and without a trace (:func:`rowprop.scoring.forward.score_without_graph`). One with the
            class attribute ``needs_ids = True`` is called with the rows' ids as well; one with ``rescores = True`` is
            called as ``(losses, ids)`` on the losses of the forward that runs anyway. Default None: what ``losses_fn``
            returns. One that has a ``history`` must have the step's.
        schedule: When to select; the whole batch is trained where it is not active. Default None: always. Needs
            ``total_steps``, a ``sampler``, or the progress in each call.
        history: A :class:`rowprop.history.LossHistory` that is told the losses and the choice of each step, and whose
            factors per row multiply the weights. Needs the ids in each call. Default None: no memory.
        sampler: The :class:`rowprop.history.PruningSampler` that fills the batches, where there is one: its history is
            the step's, and ``state_dict`` holds how far into the epoch it is. Default None.
        engine: ``"sliced"``, ``"recompute"`` or ``"masked"``, see :mod:`rowprop.engines.base`; or ``"auto"``
            (default), which measures in the first steps, without changing their result, and takes the fastest that
            gives the gradient of plain indexing (``sliced`` with its ``batchnorm``). It looks again every 20 steps,
            and ``masked`` is how it turns itself off. Several names, e.g. ``("sliced", "recompute")``: the same among
            these, ``recompute`` also where its gradient is another one.
        total_steps: How many calls the training has: progress, which schedules follow, is ``step / total_steps``.
            Default None: unknown; a ``sampler`` knows the progress, or give it in each call where something follows it.
        accumulate_to: B. Gathers kept rows over several batches until exactly B have contributed: each counts ``1/B``,
            surplus rows of the last batch (the later ones) are left out, and ``record.ready`` says when to step. Only
            for selectors whose weights are ``1/K``. Default None: each batch is a step. Across ranks, B counts the rows
            of all of them.
        generator: Source of the selector's randomness, on the device of the scores. Default None: torch's own, which
            makes the drawn rows depend on what else draws from it. A global selection draws on the first rank.
        nonfinite: What to do about a NaN or infinite loss or score. ``"error"`` (default): raise. ``"drop"``: such rows
            are never selected, nor counted in ``loss_all``; a batch of nothing else raises, and so does a loss that is
            finite where ``recompute`` scores and not where it trains. (``masked`` may still turn the gradient into NaN:
            it multiplies the dropped row's infinities by zero, as torch does.) ``"keep"``: they rank first, so that the
            loss becomes what a plain step would see and a GradScaler skips it; selectors that need finite scores choose
            among the others and the non-finite rows are added. The first two read one flag from the device in each
            step, with ``recompute`` another; ``"keep"`` with a fixed-count selector does not wait for it.
        min_rows: Least K (at most N): a smaller selection is topped up with its highest-scored other rows, each then
            with weight ``1/K``. Default None: 2 while a BatchNorm of the model computes batch statistics, which one row
            does not have, else 1. Across ranks, a rank with fewer rows than that in a selection is given others to run
            that count nothing.
        scoring_mode: ``"train"`` (default): scoring for ``recompute``, and a ``scorer``, see the model as it is, so
            that ``recompute`` selects what ``sliced`` would; ``"eval"``: in evaluation mode.
        batchnorm: For ``sliced``, how training BatchNorm is treated; see :func:`rowprop.pick`. Default ``"rows"``.
        timing: Fill ``record.seconds``; synchronises the accelerator. Default False.

    Raises:
        InvalidInput: An argument is out of its range; at a call, what ``losses_fn``, ``scorer`` or ``selector``
            returned does not fit the batch, or ``nonfinite`` forbids it. A call that raised has not counted as a step.

    Example:
        >>> from rowprop.selection import TopK
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
        history: History | None = None,
        sampler: Sampler | None = None,
        engine: str | Sequence[str] = "auto",
        total_steps: int | None = None,
        accumulate_to: int | None = None,
        generator: torch.Generator | None = None,
        nonfinite: NonFinite = "error",
        min_rows: int | None = None,
        scoring_mode: ScoringMode = "train",
        batchnorm: Literal["rows", "exact"] = "rows",
        timing: bool = False,
    ) -> None:
        keywords_of("SelectiveBackprop", selector)
        owner = "SelectiveBackprop"
        for name, value in (("model", model), ("losses_fn", losses_fn), ("scorer", scorer)):
            if name != "scorer" or value is not None:
                needed = f"something callable was needed; pass the {name} itself."
                check_callable(owner, name, value, needed)
        check_losses_fn(owner, losses_fn)
        if scorer is not None and not says(scorer, "needs_ids") and not takes(scorer, 2):
            raise InvalidInput(
                f"SelectiveBackprop got scorer={shown(scorer)}, which takes other arguments, but a function of the "
                "model and the batch was needed; bind its other arguments with functools.partial."
            )
        check_generator(owner, generator)
        for name, value in (
            ("total_steps", total_steps),
            ("accumulate_to", accumulate_to),
            ("min_rows", min_rows),
        ):
            if value is not None:
                check_whole(
                    "SelectiveBackprop", name, value, 1, "a whole number, 1 or more, was needed; None is the default."
                )
        _check_part("schedule", schedule, Schedule, "Schedule(start=0.5, end=0.9)")
        _check_part("history", history, History, "LossHistory()")
        _check_part("sampler", sampler, Sampler, "PruningSampler(LossHistory(M), num_rows=M, epochs=10)")
        check_choice(owner, "nonfinite", nonfinite, ("error", "drop", "keep"))
        check_choice(owner, "scoring_mode", scoring_mode, ("train", "eval"))
        check_choice(owner, "timing", timing, (False, True))
        check_choice(owner, "batchnorm", batchnorm, ("rows", "exact"))
        if sampler is not None and history is not None and sampler.history is not history:
            raise InvalidInput(
                "SelectiveBackprop got a sampler and another history than the sampler's, but the rows are pruned by "
                "what the step remembers; leave history out."
            )
        history = history if sampler is None else sampler.history
        remembered = getattr(scorer, "history", None)
        if isinstance(remembered, History) and remembered is not history:
            raise InvalidInput(
                f"SelectiveBackprop got a {type(scorer).__name__} with another history than the step's, but rows are "
                "scored by what the step remembers; give it the scorer's, history=scorer.history."
            )
        ranks = selector if isinstance(selector, AcrossRanks) else None
        chooser = selector if ranks is None else ranks.selector
        if accumulate_to is not None and has_own_weights(chooser):
            raise InvalidInput(
                f"SelectiveBackprop got accumulate_to={accumulate_to} with {chooser!r}, but weights of 1/K were needed "
                "to make each row count 1/B, and its weights say themselves what rows stand for; leave accumulate_to "
                "out, and divide the losses of several batches by their number."
            )
        if isinstance(selector, GlobalSelector) and says(chooser, "needs_classes"):
            raise InvalidInput(
                f"SelectiveBackprop got {selector!r}, but classes stay on their rank and a selection among the rows of "
                "all ranks would need them all; use rowprop.distributed.LocalSelector."
            )
        if accumulate_to is not None and ranks is None and averages_gradients(model):
            raise InvalidInput(
                f"SelectiveBackprop got accumulate_to={accumulate_to} with a {type(model).__name__} and a selector "
                "that knows one rank only, but all ranks must be ready together; wrap the selector in "
                "rowprop.distributed.LocalSelector or GlobalSelector."
            )
        self.model = model
        self.losses_fn = losses_fn
        self.selector = chooser
        self._keywords = keywords_of("SelectiveBackprop", chooser)
        self.ranks = ranks
        self.scorer = scorer
        self.schedule = schedule
        self.history = history
        self.sampler = sampler
        self.total_steps = total_steps
        self.accumulate_to = accumulate_to
        self.generator = generator
        self.nonfinite: NonFinite = nonfinite
        self.min_rows = min_rows
        self.scoring_mode: ScoringMode = scoring_mode
        self.timing = timing
        self._auto: Race | None = None
        names = _names(engine)
        blind = history is not None and self._own_scorer is not None
        if engine == "auto":
            names = ("sliced", "recompute", "masked")
        engines = _engines(names, batchnorm)
        self.engine, self._engine_reason = engine_named(next(iter(engines)), batchnorm=batchnorm)
        if len(engines) > 1:
            self._auto = Race(
                Auto(tuple(engines.values()), any_gradient=engine != "auto"),
                barred="the history would miss the losses of the other rows, which no scorer computes"
                if blind
                else None,
                slowest=self._slowest if ranks is not None or averages_gradients(model) else None,
            )
        self._step = 0
        self._contributed = 0
        self._trained = (0, 0)  # rows of the sampler's epoch, which epoch that was

    def __call__(
        self,
        batch: Any,
        batch_index: int | None = None,
        *,
        ids: Tensor | None = None,
        classes: Tensor | None = None,
        progress: float | None = None,
    ) -> tuple[Tensor, Record]:
        """Run one step's forward and return the loss to call ``backward()`` on.

        Args:
            batch: The whole batch, N rows.
            batch_index: Number of the batch for the schedule's ``interrupt``; default: how often this was called
                before.
            ids: Which row of the data each row is, shape ``(N,)``, int64, as
                :class:`rowprop.history.WithIds` yields them. Needed with a history, and by scorers that remember rows.
            classes: The class of each row, shape ``(N,)``, int64. Needed by :class:`rowprop.selection.PerClass`.
            progress: Fraction of the training that is done, in [0, 1]; default :attr:`progress`.

        Returns:
            The loss, 0-d with a graph, at least float32, and the :class:`Record`.
        """
        clock = _Stopwatch(self.timing)
        if batch_index is not None:
            check_whole("a call", "batch_index", batch_index, 0)
        progress = self._progress(progress)
        active, reason = self._decide(batch_index, progress)
        rows_given = rows_of(batch)
        self._check_beside(rows_given, ids, classes)
        auto = self._auto if active and torch.is_grad_enabled() else None
        if auto is not None:
            self.engine = auto.before(
                self._step, Look(self.model, batch, rows_given, self.losses_fn), self._device(batch)
            )
            reason = auto.reason
        rescored = active and not self.engine.one_forward
        scorer = self._own_scorer

        scores = known = losses = None  # `known`: losses of all rows without a graph, where someone computed them
        if active and (rescored or scorer is not None):
            with clock.phase("score"):
                name = "losses_fn" if scorer is None else "scorer"
                known, scores = _losses_and_scores(name, self._scored(batch, scorer, ids), rows_given)
                known = known if scorer is None else None
                if auto is not None:
                    auto.scored()
        if not rescored:
            with clock.phase("forward"):
                losses, beside = _losses_and_scores("losses_fn", self.losses_fn(self.model, batch), rows_given)
                known = losses.detach()
                if scores is None:
                    scores = known if beside is losses else beside.detach()
                if auto is not None:
                    auto.compare(losses)

        with clock.phase("select"):
            scores = cast("Tensor", scores)
            if active and scorer is not self.scorer:
                scores = per_row("scorer", cast("Scorer", self.scorer)(known, ids), scores.numel())
            scores = scores.to(self._device(batch) if known is None else known.device)
            if known is not None and known is not scores:  # a row without a finite loss has no score either
                scores = torch.where(known.isfinite(), scores, torch.nan)
            choose = partial(self._choose, selector=self._selector_at(progress) if active else None, classes=classes)
            share, loss_all = self._share(scores, known, choose)
            selection, kept_by_rank = self._within_quota(share)
            if self.history is not None:
                factors = self.history.weights_of(cast("Tensor", ids)).to(selection.weights)
                weights = selection.weights * factors[selection.rows]
                selection = unread(selection.rows, weights, selection.num_rows)
            backpropagated, places = self._widened(selection, scores)

        with clock.phase("forward"):
            kept = self._kept_losses(batch, backpropagated, losses)
            if places is not None:
                kept = kept[places]
            if rescored:
                self._check_kept(kept, selection)
        loss = (kept * selection.weights).sum()

        contributed = sum(kept_by_rank) + (self._contributed if self.accumulate_to is not None else 0)
        ready = self.accumulate_to is None or contributed == self.accumulate_to
        record = Record(
            step=self._step,
            loss_all=loss_all,
            loss_kept=_mean(kept.detach()),
            selection=selection,
            num_kept=selection.num_kept,
            num_rows=selection.num_rows,
            kept_by_rank=kept_by_rank,
            engine=self.engine.name,
            reason=reason,
            seconds=clock.seconds,
            ready=ready,
            contributed=contributed,
            decision=None if auto is None else auto.decision,
        )
        if auto is not None:
            auto.after(loss, backpropagated.num_kept, selection.num_rows)
        if self.history is not None:
            if known is None:
                known = torch.full_like(scores, torch.nan).index_copy(0, selection.rows, kept.detach().to(scores.dtype))
            self.history.update(cast("Tensor", ids), known, selection.rows)
        if self.sampler is not None:
            self._trained = self._trained_in_epoch() + selection.num_rows, self.sampler.epoch
        self._step += 1
        self._contributed = 0 if ready else contributed
        return loss, record

    @property
    def progress(self) -> float | None:
        """Fraction of the training that is done, in [0, 1]; None where nobody knows.

        That is ``step / total_steps``, or else the part of the sampler's epochs that was trained: the clock for a
        learning rate, in epochs of any length and after a resume too.
        """
        if self.total_steps is not None:
            return min(1.0, self._step / self.total_steps)
        return None if self.sampler is None else self.sampler.progress(self._trained_in_epoch())

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next step depends on and that no one else keeps.

        Torch's own random state is the user's to keep, where no ``generator`` was given.
        """
        state: dict[str, Any] = {"step": self._step, "contributed": self._contributed}
        if self.generator is not None:
            state["generator"] = self.generator.get_state()
        for name, part in self._stateful().items():
            state[name] = part.state_dict()
        if self.sampler is not None:
            state["sampler"] = self.sampler.state_dict(self._trained_in_epoch())
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where ``state`` was taken, bit for bit.

        Raises:
            InvalidInput: ``state`` comes from a step with other parts, counts more rows than ``accumulate_to`` asks
                for, or a part cannot load its own; the step and its parts are then as they were.
        """
        check_entries("load_state_dict", state, ())
        before = self.state_dict()
        # What auto has measured is a help and no need.
        expected, given = (set[str](entries) - {"auto"} for entries in (before, state))
        if given != expected:
            raise InvalidInput(
                f"load_state_dict got the entries {sorted(given)} but {sorted(expected)} were needed; "
                "build SelectiveBackprop with the same generator, selector and scorer as when the state was saved."
            )
        for name in ("step", "contributed"):
            check_whole("load_state_dict", name, state[name], 0)
        if state["contributed"] >= (self.accumulate_to or 1):
            raise InvalidInput(
                f"load_state_dict got {state['contributed']} rows that have contributed but accumulate_to is "
                f"{self.accumulate_to}; build SelectiveBackprop with the accumulate_to of the saved run."
            )
        parts = {name: part for name, part in self._stateful().items() if name in state}
        loads: dict[str, Callable[[Any], object]] = {name: part.load_state_dict for name, part in parts.items()}
        if self.generator is not None:
            loads["generator"] = lambda saved: cast("torch.Generator", self.generator).set_state(saved.cpu())
        if self.sampler is not None:  # last: taken back, its running epoch would be another
            loads["sampler"] = self.sampler.load_state_dict
        loaded: list[str] = []
        for name, load in loads.items():
            try:
                load(state[name])
            except Exception as error:  # a part of the user's may fail in any way
                for other in [*loaded, name] if name != "sampler" else loaded:
                    loads[other](before[other])
                if isinstance(error, RowpropError):
                    raise
                raise InvalidInput(
                    f"load_state_dict got a state of the {name} that it cannot load ({type(error).__name__}: {error}), "
                    "so nothing was loaded; save and load the state whole."
                ) from error
            loaded.append(name)
        self._step = state["step"]
        self._contributed = state["contributed"]
        if self.sampler is not None:
            self._trained = state["sampler"]["trained"], self.sampler.epoch

    def _stateful(self) -> dict[str, _Stateful]:
        parts = {"selector": self.selector, "scorer": self.scorer, "auto": self._auto, "history": self.history}
        return {name: part for name, part in parts.items() if isinstance(part, _Stateful)}

    def _trained_in_epoch(self) -> int:
        """Rows of the sampler's running epoch that were trained on: its loader's workers have fetched more."""
        trained, epoch = self._trained
        return trained if self.sampler is not None and epoch == self.sampler.epoch else 0

    @property
    def _own_scorer(self) -> Scorer | None:
        """The scorer that does not need the losses first, if there is one."""
        return None if says(self.scorer, "rescores") else self.scorer

    def _scored(self, batch: Any, scorer: Scorer | None, ids: Tensor | None) -> Any:
        """What the scorer says, or else the losses function, without a graph."""
        function = self.losses_fn if scorer is None else scorer
        if says(scorer, "needs_ids"):
            function = partial(cast("Scorer", scorer), ids=ids)
        return score_without_graph(cast("Any", function), self.model, batch, mode=self.scoring_mode)

    def _device(self, batch: Any) -> torch.device:
        """Where the step runs."""
        return device_of(self.model, batch) or torch.device("cpu")

    def _slowest(self, values: list[float]) -> list[float]:
        """Of each number the largest of all ranks."""
        refuse_join(self.model)
        on = self._device(None)
        return largest(values, None if self.ranks is None else self.ranks.group, on)

    def _progress(self, given: float | None) -> float | None:
        """Fraction of the training that is done; None where nobody knows."""
        if given is not None:
            if not is_number(given) or not 0 <= given <= 1:
                raise InvalidInput(f"progress is {shown(given)} but a fraction of the training in [0, 1] was needed.")
            return given
        if self.progress is None and self.schedule is not None:
            raise InvalidInput(
                "SelectiveBackprop got a schedule but no total_steps, and a schedule is in fractions of the training; "
                "give total_steps, the number of batches in all epochs together, or the progress in each call."
            )
        return self.progress

    def _decide(self, batch_index: int | None, progress: float | None) -> tuple[bool, str]:
        """Whether rows are selected in this step, and the record's reason."""
        if isinstance(self.selector, Everything):  # nothing that scores could tell
            return False, "the whole batch: the selector keeps every row"
        if self.schedule is None or progress is None:
            return True, self._engine_reason
        index = self._step if batch_index is None else batch_index
        if self.schedule.active(progress, index):
            return True, self._engine_reason
        return False, f"the whole batch: the schedule is not active in batch {index} at progress {progress:.3f}"

    def _selector_at(self, progress: float | None) -> Selector:
        """The selector with what follows the progress settled."""
        at = getattr(self.selector, "at", None)
        return self.selector if at is None or progress is None else at(progress)

    def _check_beside(self, rows: int | None, ids: Tensor | None, classes: Tensor | None) -> None:
        """Refuse a call that lacks what a part asks for beside the batch."""
        wanted = {
            "ids": (
                ids,
                self.history is not None or says(self.scorer, "needs_ids"),
                "WithIds(dataset) yields them",
            ),
            "classes": (classes, says(self.selector, "needs_classes"), "they are the targets of a classifier"),
        }
        for name, (values, needed, advice) in wanted.items():
            if values is None and needed:
                raise InvalidInput(
                    f"a call without {name} was made but {name}, int64 of shape (N,), were needed by the history, "
                    f"scorer or selector; pass {name}=..., {advice}."
                )
            given = cast("object", values)
            if given is not None and (
                not isinstance(given, Tensor)
                or given.dim() != 1
                or given.dtype != torch.int64
                or given.is_meta
                or (rows is not None and given.numel() != rows)
            ):
                raise InvalidInput(
                    f"{name} came as {described(given)} but int64 of shape ({'N' if rows is None else rows},), one "
                    "for each row of the batch, was needed."
                )

    def _share(
        self, scores: Tensor, known: Tensor | None, choose: Callable[[Tensor], Selection]
    ) -> tuple[Share, Tensor]:
        """Select, here or across ranks, and the mean loss of all rows it was done among."""
        finite = scores.isfinite()
        loss_all = self._mean_of_all(known, finite)
        if self.ranks is None:
            chosen = choose(scores)
            return Share(chosen, (chosen.num_kept,)), loss_all
        refuse_join(self.model)
        usable = finite.sum() if self.nonfinite == "drop" else torch.full_like(loss_all, scores.numel())
        share = self.ranks.share(scores, choose, torch.stack([usable.double(), loss_all.double()]))
        if share.told is None:
            return share, loss_all
        counts, means = share.told.unbind(1)
        if self.nonfinite == "drop" and not bool(counts.all()):
            raise InvalidInput(
                f"All rows of rank {int(counts.argmin())} have a NaN or infinite loss or score but nonfinite='drop' "
                "needs one on each rank that has not; look at the data and the learning rate."
            )
        return share, ((means * counts).sum() / counts.sum()).to(loss_all.dtype)

    def _choose(self, scores: Tensor, selector: Selector | None, classes: Tensor | None) -> Selection:
        """Select under the policy for non-finite rows."""
        finite = scores.isfinite()
        if self.nonfinite == "keep" and not getattr(self.selector, "needs_finite", False):
            return self._select(torch.where(finite, scores, torch.inf), selector, classes)
        if bool(finite.all()):
            return self._select(scores, selector, classes)
        if self.nonfinite == "error":
            raise _nonfinite_error(finite, self.engine.name)
        rows = finite.nonzero().squeeze(1)
        among = None if rows.numel() == 0 else self._select(scores[rows], selector, _of(classes, rows))
        if self.nonfinite == "keep":
            wanted = ~finite
            if among is not None:
                wanted[rows[among.rows]] = True
            return mean_unread(wanted.nonzero().squeeze(1), scores.numel(), weights_dtype(scores))
        if among is None:
            raise InvalidInput(
                f"All {scores.numel()} rows have a NaN or infinite loss or score but nonfinite='drop' needs one that "
                "has not; look at the data and the learning rate."
            )
        return unread(rows[among.rows], among.weights, scores.numel())

    def _select(self, scores: Tensor, selector: Selector | None, classes: Tensor | None) -> Selection:
        """Ask the selector, or take everything where there is none; never fewer rows than the floor, but for none."""
        total = scores.numel()
        if selector is None:
            return mean_unread(torch.arange(total, device=scores.device), total, weights_dtype(scores))
        selection = asked(selector, self._keywords, scores, self.generator, classes)
        floor = min(self._floor(selection.num_kept), total)
        # None, or rows whose weights say what they stand for, are left alone: others go along with them later.
        weighed = says(self.selector, "unbiased") or has_own_weights(self.selector)
        if selection.num_kept == 0 or selection.num_kept >= floor or weighed:
            return selection
        order = hardest_first(scores)
        others = order[torch.isin(order, selection.rows, invert=True)]
        rows = torch.cat([selection.rows, others[: floor - selection.num_kept]])
        return mean_unread(rows.sort().values, total, selection.weights.dtype)

    def _floor(self, num_kept: int) -> int:
        """Least number of rows to backpropagate; the modules are only searched when it matters."""
        if self.min_rows is not None:
            return self.min_rows
        return 2 if num_kept < 2 and uses_batch_statistics(self.model) else 1

    def _within_quota(self, share: Share) -> tuple[Selection, tuple[int, ...]]:
        """Cut a selection to what the pending optimizer step still needs, and scale it to a mean over B rows.

        Returns:
            What contributes, and how many rows of each rank do; ranks come in their order, as rows do.
        """
        chosen, counts = share.selection, share.kept_by_rank
        if self.accumulate_to is None:
            return chosen, counts
        left = self.accumulate_to - self._contributed
        within = tuple(min(count, max(0, left - sum(counts[:rank]))) for rank, count in enumerate(counts))
        count, scale = within[share.rank], sum(counts) / self.accumulate_to
        return unread(chosen.rows[:count], chosen.weights[:count] * scale, chosen.num_rows), within

    def _widened(self, selection: Selection, scores: Tensor) -> tuple[Selection, Tensor | None]:
        """Add rows that only go along, where fewer contribute than the floor asks for.

        Their losses are left out, so they get a gradient of zero; but BatchNorm sees them, and a rank that keeps
        nothing has a forward and a backward to run as the others do.

        Returns:
            The rows to backpropagate, and where among them those are that contribute; None for all.
        """
        floor = min(self._floor(selection.num_kept), selection.num_rows)
        if selection.num_kept >= floor:
            return selection, None
        order = hardest_first(torch.where(scores.isfinite(), scores, torch.nan))
        others = order[torch.isin(order, selection.rows, invert=True)]
        finite = others[scores[others].isfinite()]  # zero times an infinity would not be zero
        if selection.num_kept + finite.numel() == 0:
            finite = others[:1]
        rows = torch.cat([selection.rows, finite[: floor - selection.num_kept]]).sort().values
        wider = mean_unread(rows, selection.num_rows, selection.weights.dtype)
        return wider, torch.searchsorted(rows, selection.rows)

    def _kept_losses(self, batch: Any, selection: Selection, losses: Tensor | None) -> Tensor:
        """Have the engine work, unless every row is kept and there is nothing to pick from."""
        if selection.is_everything and losses is not None:
            return losses

        def forward(rows: Tensor) -> Tensor:
            part = batch if selection.is_everything else take(batch, rows)
            return per_row("losses_fn", only_losses(self.losses_fn(self.model, part)), rows.numel())

        return self.engine.kept_losses(selection, losses, forward)

    def _mean_of_all(self, losses: Tensor | None, finite: Tensor) -> Tensor:
        if losses is None:
            return torch.full((), torch.nan, device=finite.device)
        if self.nonfinite != "drop":
            return _mean(losses)
        return torch.where(finite, losses, 0).sum(dtype=weights_dtype(losses)) / finite.sum()  # indexing would wait

    def _check_kept(self, kept: Tensor, selection: Selection) -> None:
        """Refuse non-finite losses that scoring did not see: another mode, other dropout masks, a scorer."""
        if self.nonfinite == "keep":
            return
        finite = kept.detach().isfinite()
        if not bool(finite.all()):
            everything = torch.ones(selection.num_rows, dtype=torch.bool, device=finite.device)
            everything[selection.rows] = finite
            if self.nonfinite == "error":
                raise _nonfinite_error(everything, self.engine.name)
            raise _nonfinite_error(
                everything,
                self.engine.name,
                "scoring did not see it, so nonfinite='drop' could not leave them out: score by the losses, in the "
                "mode of training, or choose 'keep'.",
            )


def _names(engine: object) -> tuple[str, ...]:
    """The engines' names, one at least."""
    given = cast(
        "list[object]", [engine] if isinstance(engine, str) else engine if isinstance(engine, Sequence) else []
    )
    names = [name for name in given if isinstance(name, str)]
    if not names or len(set(names)) < len(given) or ("auto" in names and len(names) > 1):
        raise InvalidInput(
            f"SelectiveBackprop got engine={shown(cast('object', engine))} but a name, or different names among "
            "masked, recompute and sliced to choose from, was needed; 'auto' stands alone."
        )
    return tuple(names)


def _engines(names: Sequence[str], batchnorm: str) -> dict[str, Engine]:
    """The engines by name, in the order given."""
    return {name: engine_named(name, batchnorm=batchnorm)[0] for name in names}


@runtime_checkable
class _Stateful(Protocol):
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any], /) -> object: ...


class _Stopwatch:
    """Seconds per phase, with the accelerator drained around each; free when off."""

    def __init__(self, on: bool) -> None:
        self.seconds: dict[str, float] | None = {"score": 0.0, "forward": 0.0, "select": 0.0} if on else None

    @contextmanager
    def phase(self, name: str) -> Generator[None]:
        if self.seconds is None:
            yield
            return
        begin_s = drained_s()
        yield
        self.seconds[name] += drained_s() - begin_s


def rows_of(batch: Any) -> int | None:
    """N, or None for a batch of unknown make: no hindrance until someone must take rows of it."""
    try:
        return num_rows(batch)
    except InvalidInput:
        return None


def _of(values: Tensor | None, rows: Tensor) -> Tensor | None:
    return None if values is None else values[rows.to(values.device)]


def _losses_and_scores(name: str, returned: object, expected: int | None) -> tuple[Tensor, Tensor]:
    """What a losses function or a scorer returned: losses per row, and the scores beside them or else the losses."""
    losses = per_row(name, only_losses(returned), expected)
    beside = only_scores(returned)
    return losses, losses if beside is returned else per_row(name, beside, losses.numel())


def _nonfinite_error(
    finite: Tensor,
    engine: str,
    advice: str = "look at the data and the learning rate, or choose nonfinite='drop' or 'keep'.",
) -> InvalidInput:
    rows: list[int] = cast("Any", (~finite).nonzero().squeeze(1)).tolist()
    first = ", ".join(str(row) for row in rows[:5]) + (", ..." if len(rows) > 5 else "")
    return InvalidInput(
        f"{len(rows)} of {finite.numel()} rows have a NaN or infinite loss or score (rows {first}; engine {engine}), "
        f"but finite ones were needed; {advice}"
    )


def _mean(losses: Tensor) -> Tensor:
    return losses.mean(dtype=weights_dtype(losses))


def _check_part(name: str, value: object, kind: Any, example: str) -> None:
    if value is not None and (isinstance(value, type) or not isinstance(value, kind)):
        raise InvalidInput(
            f"SelectiveBackprop got {name}={shown(value)}, a {type(value).__name__}, but a {kind.__name__.lower()} was "
            f"needed; give an instance, e.g. {example}."
        )
