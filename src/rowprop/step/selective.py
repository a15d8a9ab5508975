"""The training step: score, select, backpropagate, record."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any, cast

import torch
from torch import Tensor, nn

from rowprop.batch import tensors
from rowprop.checks import (
    check_callable,
    check_choice,
    check_entries,
    check_flag,
    check_generator,
    check_losses_fn,
    check_whole,
    shown,
    signature_of,
    takes,
)
from rowprop.distributed import Ranks, averages_gradients
from rowprop.engines.base import Engine, Unit, engine_of
from rowprop.errors import InvalidInput, RowpropError
from rowprop.schedule import Schedule
from rowprop.scoring.forward import Scorer
from rowprop.scoring.losses import LossesFn
from rowprop.selection.base import (
    AnySelector,
    Context,
    KnownKeep,
    Stateful,
    check_fits,
    takes_context,
    wants_context,
)
from rowprop.step.memory import History, Memory, Pruning
from rowprop.step.policy import Floor, NonFinite, OnNonFinite
from rowprop.step.quota import Quota
from rowprop.step.record import Record
from rowprop.step.small import warn_if_too_small
from rowprop.step.stages import Call, Parts, rows_of
from rowprop.step.tokens import tokens_of


class SelectiveBackprop:
    """A training step that backpropagates only the rows that a selector keeps.

    The returned loss is ``(losses[rows] * weights).sum()``, for the selectors of this package the mean over the kept
    rows, and ``loss.backward()`` gives its gradient at the price that the engine sets. Calling is all there is to it:
    autocast, gradient scaling, clipping and the optimizer stay in the user's loop.

    Under DDP or FSDP, give the wrapped model and ``ranks``, :class:`rowprop.distributed.Local` or
    :class:`rowprop.distributed.Global`: the loss then carries the factor that makes the averaged gradient that of all
    kept rows together, each rank runs the same forwards and a backward whatever it keeps, and ``nonfinite``,
    ``min_rows`` and ``accumulate_to`` are decided for all ranks at once.

    Args:
        model: The model that ``losses_fn`` is given, usually an ``nn.Module``.
        losses_fn: ``(model, batch)`` to unreduced losses, shape ``(N,)`` or ``(N, 1)``. With the engine ``recompute``
            it is also called on the kept rows alone. It may return :class:`rowprop.Scored`, losses and scores of the
            same shapes, larger = more wanted: scores from the forward that runs anyway, e.g. of its logits.
        selector: Chooses the rows from one score per row, for example :class:`rowprop.TopK`. A batch of which the
            selector is known to keep every row is trained whole, without scoring.
        scorer: Makes the scores where the losses are not to be the scores: ``(model, batch)`` or ``(model, batch,
            context)`` to scores of the same shapes, run without a graph and without a trace
            (:func:`rowprop.scoring.score_without_graph`). Default None: ``losses_fn`` makes the scores.
        schedule: Says when rows are selected; at other times the whole batch is trained. Default None: always. Needs
            ``total_steps``, a sampler, or the progress in each call.
        total_steps: How many calls the training has: progress, which schedules follow, is ``step / total_steps``. Two
            calls with one batch, as of SAM, are two. Default None: unknown; a sampler knows the progress and counts
            such a batch once, or give it in each call where something follows it.
        history: A :class:`rowprop.history.LossHistory` that is told the losses and the choice of each step, and whose
            factors per row multiply the weights; or the :class:`rowprop.history.PruningSampler` that fills the batches,
            with its history inside. Needs the ids in each call. Default None: no memory.
        engine: ``"sliced"`` (default), ``"recompute"`` or ``"masked"``, or an object of :mod:`rowprop.engines` where
            one has settings, e.g. ``Sliced(batchnorm="exact")``. :func:`rowprop.plan` measures which one pays. A model
            that is too small to gain by ``sliced`` on a CPU is told so once, by the warning :class:`rowprop.TooSmall`.
        ranks: How the ranks of a distributed training select together, :class:`rowprop.distributed.Local` or
            :class:`rowprop.distributed.Global`. Default None: each process selects for itself.
        accumulate_to: B. Gathers kept rows over several batches until exactly B have contributed: each counts ``1/B``,
            surplus rows of the last batch (the later ones) are left out, and ``record.ready`` says when to step. Only
            for selections with weights ``1/K``. Default None: each batch is a step. Across ranks, B counts the rows of
            all of them.
        nonfinite: Says how a NaN or infinite loss or score is treated. ``"error"`` (default): raise. ``"drop"``: such
            rows are never selected, nor counted in ``loss_all``; a batch of nothing else raises, and so does a loss
            that is finite where ``recompute`` scores and not where it trains. (``masked`` may still turn the gradient
            into NaN: it multiplies the dropped row's infinities by zero, as torch does.) ``"keep"``: their score is
            infinite, so they rank first, the loss becomes the one of a plain step, and a GradScaler skips it; selectors
            that need finite scores choose among the others and the non-finite rows are added. On a device ``"error"``
            has the call wait for nothing: ``loss.backward()`` raises at its end, before the optimizer steps (without a
            graph, or with other ranks, the call waits and raises). ``"drop"`` waits for one flag in each step, with
            ``recompute`` for another.
        min_rows: Least number of rows that run through the model, at most N: a smaller selection is joined by its
            highest-scored other rows, which count nothing. Default None: 2 while a BatchNorm of the model computes
            batch statistics, which one row does not have, else 1.
        generator: Source of the selector's randomness, on the device of the scores. Default None: torch's own, which
            makes the drawn rows depend on all else that draws from it. A global selection draws on the first rank.
        timing: Fill ``record.seconds``; synchronises the accelerator. Default False.
        unit: What a row is. ``"row"`` (default): an entry of the batch's first dimension. ``"token"``: ``losses_fn``
            returns a loss per token, shape ``(N, T)`` or any other, and the selector chooses among the flattened tokens
            of the batch; each call may say which tokens count. All that is said here about rows then holds for tokens.
            Tokens need the engine ``sliced`` or ``masked`` and have no history.

    Raises:
        InvalidInput: An argument is out of its range, or in another's place; at a call, the output of ``losses_fn``,
            ``scorer`` or ``selector`` does not fit the batch, or ``nonfinite`` forbids it. A call that raised has not
            counted as a step; a step whose ``backward()`` raised, on a device, has.

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
        selector: AnySelector,
        *,
        scorer: Scorer | None = None,
        schedule: Schedule | None = None,
        total_steps: int | None = None,
        history: History | Pruning | None = None,
        engine: str | Engine = "sliced",
        ranks: Ranks | None = None,
        accumulate_to: int | None = None,
        nonfinite: OnNonFinite = "error",
        min_rows: int | None = None,
        generator: torch.Generator | None = None,
        timing: bool = False,
        unit: Unit = "row",
    ) -> None:
        with_context = _check_functions(model, losses_fn, selector, scorer)
        _check_parts(schedule, history, ranks)
        _check_unit(unit, history)
        for name, value in (("total_steps", total_steps), ("accumulate_to", accumulate_to), ("min_rows", min_rows)):
            if value is not None:
                check_whole(_OWNER, name, value, 1, "a whole number, 1 or more, was needed; None is the default.")
        check_choice(_OWNER, "nonfinite", nonfinite, ("error", "drop", "keep"))
        check_generator(_OWNER, generator)
        check_flag(_OWNER, "timing", timing)
        if accumulate_to is not None and ranks is None and averages_gradients(model):
            raise InvalidInput(
                f"SelectiveBackprop got accumulate_to={accumulate_to} with a {type(model).__name__} and no ranks, but "
                "all ranks must be ready together; give ranks=rowprop.distributed.Local() or Global()."
            )
        self.schedule = schedule
        self.total_steps = total_steps
        self.generator = generator
        self.timing = timing
        self._memory = Memory(history)
        self._quota = Quota(accumulate_to)
        self._parts = Parts(
            model=model,
            losses_fn=losses_fn,
            selector=selector,
            selector_takes_context=with_context,
            scorer=scorer,
            scorer_takes_context=scorer is not None and wants_context(scorer, 2),
            ranks=ranks,
            policy=NonFinite(nonfinite, unit),
            floor=Floor(min_rows, model),
            quota=self._quota,
            memory=self._memory,
            unit=unit,
            alone=ranks is None and not averages_gradients(model),
        )
        self._keeps = selector if isinstance(selector, KnownKeep) else None
        self.engine = engine_of(_OWNER, engine)
        _check_engine(self.engine, unit)
        self._size_is_known = False
        self._step = 0

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
        """Run one step's forward and return the loss to call ``backward()`` on.

        Args:
            batch: The whole batch, N rows.
            batch_index: Number of the batch for the schedule's ``interrupt``; default: how often this was called
                before. Give it where a batch comes more than once.
            ids: Which row of the data each row is, shape ``(N,)``, int64, as
                :class:`rowprop.history.WithIds` yields them. Needed with a history, and by parts that look rows up. A
                sampler knows by them how far its epoch is trained, and waits for ids on a device.
            classes: The class of each row, shape ``(N,)``, int64. Needed by :class:`rowprop.selection.PerClass`.
            progress: Fraction of the training that is done, in [0, 1]; default :attr:`progress`.
            counted: Which tokens count, bool, of the shape of the losses, e.g. ``labels[:, 1:] != -100``; only with
                ``unit="token"``. The others are never kept, nor in N, K or ``loss_all``, and the selector does not see
                their scores. Where none counts, the loss is a zero whose gradient is zero. A mask on the CPU costs no
                wait, a mask on a device one, for the work queued before this call. Default None: all count.

        Returns:
            The loss, 0-d with a graph, at least float32, and the :class:`Record`.
        """
        call = self._begun(batch, batch_index, ids, classes, progress, counted)
        call.score()
        call.select()
        loss, record = call.backpropagate(self._step)
        self._step += 1
        if not self._size_is_known:
            self._size_is_known = warn_if_too_small(self.engine, call.losses, record)
        return loss, record

    # Read only: the stages are wired to the parts that the constructor was given.
    model = property(attrgetter("_parts.model"), doc="The model.")
    losses_fn = property(attrgetter("_parts.losses_fn"), doc="The losses function.")
    selector = property(attrgetter("_parts.selector"), doc="The selector.")
    scorer = property(attrgetter("_parts.scorer"), doc="The scorer; None without.")
    ranks = property(attrgetter("_parts.ranks"), doc="How the ranks select together; None without.")

    @property
    def progress(self) -> float | None:
        """Fraction of the training that is done, in [0, 1]; None where nobody knows.

        That is ``step / total_steps``, or else the part of the sampler's epochs that was trained, up to the furthest
        row: the clock for a learning rate, in epochs of any length and after a resume too.
        """
        return self._memory.progress if self.total_steps is None else min(1.0, self._step / self.total_steps)

    @property
    def history(self) -> History | None:
        """The memory of rows, which a sampler brings with it; None without."""
        return self._memory.history

    @property
    def sampler(self) -> Pruning | None:
        """The sampler that was given as ``history``; None without."""
        return self._memory.sampler

    def _begun(
        self,
        batch: Any,
        batch_index: int | None,
        ids: Tensor | None,
        classes: Tensor | None,
        progress: float | None,
        counted: Tensor | None,
    ) -> Call:
        """Look at the call, and decide whether rows are selected in it."""
        if any(tensor.dim() for tensor in tensors(batch_index)):
            raise InvalidInput(
                "a call got a second batch as batch_index but a batch is one argument; write `selective((x, y))`."
            )
        index = self._step if batch_index is None else batch_index
        check_whole("a call", "batch_index", index, 0)
        progress = self.progress if progress is None else progress
        context = Context(progress, ids, classes, self.generator, self._memory.history)
        if self._memory.history is not None:
            context.need("ids", "the history")
        tokens = tokens_of(counted, self._parts.unit)
        rows = rows_of(batch)
        if rows is not None:
            check_fits(context, rows)
        whole = self._whole(context, index)
        return Call(self._parts, batch, rows, tokens, context, self.engine, whole, self.timing)

    def _whole(self, context: Context, index: int) -> str | None:
        """Why the whole batch is trained, without scoring it; None where rows are selected."""
        if self.schedule is not None:
            progress = context.need("progress", "the schedule")
            if not self.schedule.active(progress, index):
                return f"the whole batch: the schedule is not active in batch {index} at progress {progress:.3f}"
        if self._keeps is not None and self._keeps.keep_at(context) == 1:
            return f"the whole batch: the selector keeps every {self._parts.unit}"
        return None

    # --- saving -------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next step depends on and that no one else keeps.

        Torch's own random state is the user's to keep, where no ``generator`` was given.
        """
        state: dict[str, Any] = {"step": self._step, "contributed": self._quota.contributed}
        if self.generator is not None:
            state["generator"] = self.generator.get_state()
        for name, part in self._stateful().items():
            state[name] = part.state_dict()
        if self.sampler is not None:
            state["sampler"] = self.sampler.state_dict(self._memory.trained)
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where ``state`` was taken, bit for bit.

        Raises:
            InvalidInput: ``state`` comes from a step with other parts, counts more rows than ``accumulate_to`` asks
                for, or a part cannot load its own; the step and its parts are then as they were.
        """
        before = self.state_dict()
        _check_state(state, before, self._quota)
        loads: dict[str, Callable[[Any], object]] = {
            name: part.load_state_dict for name, part in self._stateful().items() if name in state
        }
        if self.generator is not None:
            loads["generator"] = lambda saved: cast("torch.Generator", self.generator).set_state(saved.cpu())
        if self.sampler is not None:  # last: taken back, its running epoch would be another
            loads["sampler"] = self._memory.load_sampler
        _load_all(loads, state, before)
        self._step = state["step"]
        self._quota.contributed = state["contributed"]

    def _stateful(self) -> dict[str, Stateful]:
        parts = {"selector": self.selector, "scorer": self.scorer, "history": self.history}
        return {name: part for name, part in parts.items() if isinstance(part, Stateful)}


_OWNER = "SelectiveBackprop"


def _load_all(
    loads: Mapping[str, Callable[[Any], object]], state: Mapping[str, Any], before: Mapping[str, Any]
) -> None:
    """Have all parts load their states, or none."""
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


def _check_state(state: Mapping[str, Any], before: Mapping[str, Any], quota: Quota) -> None:
    """Refuse a state of a step with other parts than the one with the state ``before``."""
    check_entries("load_state_dict", state, ())
    # Earlier versions could choose an engine by the clock, and saved what they had measured; nothing depends on it now.
    expected, given = set(before), set(state) - {"auto"}
    if given != expected:
        raise InvalidInput(
            f"load_state_dict got the entries {sorted(given)} but {sorted(expected)} were needed; "
            "build SelectiveBackprop with the same generator, selector and scorer as when the state was saved."
        )
    for name in ("step", "contributed"):
        check_whole("load_state_dict", name, state[name], 0)
    if state["contributed"] >= (quota.accumulate_to or 1):
        raise InvalidInput(
            f"load_state_dict got {state['contributed']} rows that have contributed but accumulate_to is "
            f"{quota.accumulate_to}; build SelectiveBackprop with the accumulate_to of the saved run."
        )


def _check_order(model: object, losses_fn: object, selector: object) -> None:
    """Refuse arguments in each other's places, where that is certain: any of them may be any callable."""
    moved = not isinstance(model, nn.Module) and any(isinstance(other, nn.Module) for other in (losses_fn, selector))
    if moved or _begins_with(losses_fn, "scores") or _begins_with(selector, "model"):
        raise InvalidInput(
            "SelectiveBackprop got its arguments in another order; write SelectiveBackprop(model, losses_fn, selector)."
        )


def _begins_with(function: object, name: str) -> bool:
    """Whether the first parameter of a function has that name."""
    signature = signature_of(function) if callable(function) else None
    return signature is not None and next(iter(signature.parameters), None) == name


def _check_functions(model: object, losses_fn: object, selector: object, scorer: object) -> bool:
    """Check what is called; returns whether the selector takes a context."""
    _check_order(model, losses_fn, selector)
    with_context = takes_context(_OWNER, selector)
    for name, value in (("model", model), ("losses_fn", losses_fn), ("scorer", scorer)):
        if name != "scorer" or value is not None:
            check_callable(_OWNER, name, value, f"something callable was needed; pass the {name} itself.")
    check_losses_fn(_OWNER, losses_fn)
    if scorer is not None and not takes(scorer, 3 if wants_context(scorer, 2) else 2):
        raise InvalidInput(
            f"SelectiveBackprop got scorer={shown(scorer)}, which takes other arguments, but a function of the model "
            "and the batch, with or without a context, was needed; bind its other arguments with functools.partial."
        )
    return with_context


def _check_parts(schedule: object, history: object, ranks: object) -> None:
    for name, value, kinds, example in (
        ("schedule", schedule, Schedule, "Schedule(start=0.5, end=0.9)"),
        ("history", history, (History, Pruning), "LossHistory()"),
        ("ranks", ranks, Ranks, "rowprop.distributed.Local()"),
    ):
        if value is not None and (isinstance(value, type) or not isinstance(value, kinds)):
            kind = "type" if isinstance(value, type) else type(value).__name__
            raise InvalidInput(
                f"SelectiveBackprop got {name}={shown(value)}, a {kind}, but {_A[name]} was needed; give an instance, "
                f"e.g. {example}."
            )


def _check_unit(unit: object, history: object) -> None:
    check_choice(_OWNER, "unit", unit, ("row", "token"))
    if unit == "token" and history is not None:
        raise InvalidInput(
            "SelectiveBackprop got unit='token' with a history, but tokens have no ids to be remembered by; leave the "
            "history out, or choose among rows with unit='row'."
        )


def _check_engine(engine: Engine, unit: Unit) -> None:
    if unit == "token" and not engine.one_forward:
        raise InvalidInput(
            f"SelectiveBackprop got engine={shown(engine)} with unit='token', but an engine with one forward was "
            "needed, because a token cannot go forward without the tokens around it; take 'sliced'."
        )


_A = {"schedule": "a schedule", "history": "a history", "ranks": "a way in which ranks select together"}
