"""``engine="auto"``: a race of the engines in the user's own first steps. The fastest one wins and is watched.

The first steps run the engines in turn. They train the model as any engine would: the same rows, the same random
numbers, the gradient of the kept rows. Each round runs every engine once. An engine that is clearly slower leaves after
two rounds, engines of about the same cost run up to eight. So measuring costs little, and close calls are decided on
many steps.

An engine with a second forward joins after two rounds, and only where it has the gradient of plain indexing. To find
out, the race runs some rows by themselves, keeps nothing of that forward, and compares their losses with the losses of
the same rows in the whole batch.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from rowprop.batch import take
from rowprop.distributed import averages_gradients
from rowprop.engines.base import (
    Auto,
    Engine,
    Sliced,
    Unit,
    policies_on,
    second_forward_differs,
    uses_batch_statistics,
)
from rowprop.engines.clock import between_s, mark
from rowprop.engines.lines import SHORT_S, TOO_SMALL, Cost, Measurement, beside, by_policy, milliseconds
from rowprop.scoring.forward import score_without_graph
from rowprop.scoring.losses import LossesFn, losses_of
from rowprop.state import devices_of, rng_states

ROUNDS = 8
"""Most rounds of a measurement; engines of about the same cost run in all of them."""
FEWEST = 2
"""Fewest rounds of each engine, since its first step may be slow; also the rounds before a second forward joins."""
CLOSE = 1.25
"""An engine that costs at most this multiple of the fastest one is measured on."""
INTERVAL = 20
"""The number of steps from one look at the choice to the next."""
GAIN = 0.05
"""Another engine must be faster by this share, or the race does not switch to it."""
MOVED = 1.5
"""Where the running engine costs more than this multiple of its prediction, all engines are measured again."""
PAUSE = 200
"""Fewest steps from the first measurement to the second; the number doubles with each further one."""

NEVER = float("inf")


@dataclass(frozen=True)
class Decision:
    """A decision of ``engine="auto"`` in a step.

    Attributes:
        step: Number of the step, from 0.
        engine: The engine that runs from here on.
        reason: Why, a sentence.
        predicted_s: Seconds of a step without the update, by engine, on the slowest rank. An engine that cannot be
            taken, or was not measured, is missing.
        kept: K of the predictions.
        num_rows: N of the predictions.
    """

    step: int
    engine: str
    reason: str
    predicted_s: dict[str, float]
    kept: int
    num_rows: int


@dataclass(frozen=True)
class Look:
    """A step's model and batch, to run some of the rows by themselves.

    Attributes:
        model: The model as the step calls it, behind DDP too.
        batch: The whole batch.
        num_rows: N; None for a batch of unknown make.
        losses_fn: ``(model, batch)`` to losses, as the step takes it.
    """

    model: Any
    batch: Any
    num_rows: int | None
    losses_fn: LossesFn

    def alone(self) -> Alone | str:
        """Run the last quarter of the rows by themselves, without a graph and without a trace.

        The last rows, because the first rows would draw the same dropout masks as in their batch. A quarter and not K,
        because ranks keep different numbers of rows, and losses with collectives of their own need the same number.

        Returns:
            The findings about the rows; or a clause, why they cannot be run.
        """
        why = self._hindrance()
        if why is not None:
            return why
        total = cast(int, self.num_rows)
        count = max(1, total // 4)
        # Behind DDP, whose forward would have the ranks exchange buffers.
        model = cast(nn.Module, self.model.module if isinstance(self.model, DistributedDataParallel) else self.model)
        devices = devices_of(list(model.modules()), self.batch)
        drew = False

        def watched(model: nn.Module, batch: Any) -> Tensor:
            nonlocal drew
            before = rng_states(devices)
            losses = losses_of(self.losses_fn, model, batch)
            drew = not all(map(torch.equal, before, rng_states(devices)))
            return losses

        try:
            rows = take(self.batch, torch.arange(total - count, total))
            losses = score_without_graph(watched, model, rows)
        except Exception as error:  # the user's model may fail on fewer rows in any way
            return f"{count} rows by themselves failed with {type(error).__name__}: {error}".splitlines()[0]
        return Alone(losses, drew, uses_batch_statistics(model))

    def _hindrance(self) -> str | None:
        """Why some of the rows cannot be run by themselves; None where they can."""
        if self.num_rows is None:
            return "rows cannot be taken of a batch of unknown make"
        if not isinstance(self.model, nn.Module):
            return f"the model is a {type(self.model).__name__} and not an nn.Module"
        if averages_gradients(self.model) and not isinstance(self.model, DistributedDataParallel):
            return "a forward besides the step's would meet the collectives of FSDP"
        if any(_is_compiled(module) for module in self.model.modules()):
            return "the compiled model would be compiled once more for K rows"
        return None


@dataclass(frozen=True)
class Alone:
    """A forward of some rows by themselves.

    Attributes:
        losses: Of the batch's last rows, shape ``(M,)``, without a graph.
        drew: Whether the forward drew random numbers.
        batch_statistics: Whether BatchNorm took its statistics from these rows.
    """

    losses: Tensor
    drew: bool
    batch_statistics: bool

    def differs(self, losses: Tensor) -> str | None:
        """Why a second forward has another gradient than plain indexing here; None where it has the same.

        ``auto`` and :func:`rowprop.plan` ask this before they take ``recompute``. BatchNorm and dropout are looked for
        by name, because they hardly change the losses of a model that has not learned anything yet.

        Args:
            losses: Of the whole batch, shape ``(N,)``, from the random state in which these rows were run.
        """
        why = second_forward_differs(drew=self.drew, batch_statistics=self.batch_statistics)
        if why is None and self._mixed(losses):
            why = "rows by themselves have other losses than in their batch, so they see each other"
        return None if why is None else f"{why}, so its gradient is another one"

    def _mixed(self, losses: Tensor) -> bool:
        among = losses.detach()[-self.losses.numel() :].float()
        coarse = losses.dtype in (torch.float16, torch.bfloat16) or torch.is_autocast_enabled(losses.device.type)
        finite = among.isfinite()  # a loss that is not finite cannot be compared
        apart = torch.where(finite, among - self.losses.float(), 0.0).abs().max()
        scale = torch.where(finite, among, 0.0).abs().max()
        return not bool(apart <= (2e-2 if coarse else 1e-3) * scale)


@dataclass(frozen=True)
class _Seen:
    """A step whose backward has ended; ``call_s`` includes ``score_s``, and ``seconds`` includes both."""

    engine: str
    kept: int
    num_rows: int
    score_s: float
    call_s: float
    seconds: float


class _Watch:
    """The clock at one step: marks at its begin, after its scoring and its call, and around its backward."""

    def __init__(self, engine: str, device: torch.device) -> None:
        self.engine, self.device = engine, device
        self.kept = self.num_rows = 0
        self.marks: list[Any] = [mark(device)] * 2

    def scored(self) -> None:
        """Note the end of the scoring."""
        self.marks[1] = mark(self.device)

    def called(self, loss: Tensor, kept: int, num_rows: int) -> None:
        """Note the end of the call, and wait for the backward."""
        self.kept, self.num_rows = kept, num_rows
        self.marks.append(mark(self.device))
        cast(Any, loss).register_hook(self._backward)

    def _backward(self, _: Tensor) -> None:
        if len(self.marks) == 3:  # the first backward counts
            self.marks.append(mark(self.device))
            cast(Any, torch.autograd.Variable)._execution_engine.queue_callback(self._end)

    def _end(self) -> None:
        self.marks.append(mark(self.device))

    def seen(self, wait: bool) -> _Seen | None:
        """The step's seconds; None while its backward runs."""
        if len(self.marks) < 5:
            return None
        begin, scored, called, back, end = self.marks
        backward_s = between_s(back, end, wait=wait)
        if backward_s is None:
            return None
        score_s, call_s = cast(float, between_s(begin, scored)), cast(float, between_s(begin, called))
        return _Seen(self.engine, self.kept, self.num_rows, score_s, call_s, call_s + backward_s)


@dataclass
class _Rounds:
    """A running measurement.

    Attributes:
        tried: Engines that run in each round, one step each.
        over: Number of rounds that are over; the step to warm up is a round before the first.
        turn: Steps of the running round that are over.
    """

    tried: list[str]
    over: int = -1
    turn: int = 0


@dataclass
class _Learned:
    """The results of measurements.

    Attributes:
        barred: Why engines with a second forward cannot be taken; None while nothing is known against them.
        policies: Engines that have the gradient of a policy, each with its policy.
        costs: Cost of a step, by engine.
        num_rows: N of the costs: the most frequent one.
        kept: K of the last step or of the last look, whichever came later.
    """

    barred: str | None
    policies: dict[str, str] = field(default_factory=dict[str, str])
    costs: dict[str, Cost] = field(default_factory=dict[str, Cost])
    num_rows: int = 0
    kept: int = 0


@dataclass
class _Watched:
    """The steps that are watched.

    Attributes:
        seen: Steps whose backward has ended, since the last look at them.
        calls: Number of steps since the last measurement.
        pause: Fewest steps from the last measurement to the next.
        moved: Whether a cost has left its prediction since it was measured.
    """

    pause: int
    seen: list[_Seen] = field(default_factory=list[_Seen])
    calls: int = 0
    moved: bool = False


class Race:
    """Decides which engine runs a step.

    Args:
        settings: The engines to choose among.
        barred: Why engines with a second forward cannot be taken, where the step knows it beforehand; with
            ``any_gradient`` they are taken all the same. Default None.
        slowest: Takes the largest of all ranks of each number; None where this process decides alone.
        unit: What a row is. Engines with a second forward are left out for tokens, of which N differs between batches,
            so that K is compared as a share of it. Default ``"row"``.

    Attributes:
        engines: The engines by name, in order of preference.
        engine: Name of the engine that runs.
        reason: Why it runs, a sentence.
        decision: The decision of this step; None where nothing was decided in it.
    """

    def __init__(
        self,
        settings: Auto,
        *,
        barred: str | None = None,
        slowest: Callable[[list[float]], list[float]] | None = None,
        unit: Unit = "row",
    ) -> None:
        self.engines = {name: e for name, e in settings.by_name.items() if e.one_forward or unit == "row"}
        self._unit: Unit = unit
        self._any_gradient = settings.any_gradient
        self._slowest: Callable[[list[float]], list[float]] = slowest or list
        self._given = repr(([*self.engines], settings.any_gradient, barred))
        self._shared = [name for name, engine in self.engines.items() if engine.one_forward]
        self._second = [name for name in self.engines if name not in self._shared]
        self.engine, self.reason = self._shared[0], ""
        self.decision: Decision | None = None
        self._rounds: _Rounds | None = _Rounds([self.engine])
        self._learned = _Learned(None if settings.any_gradient else barred)
        self._watched = _Watched(PAUSE)
        self._watch = _Watch(self.engine, torch.device("cpu"))
        self._open: list[_Watch] = []  # steps whose backward has not ended
        self._alone: Alone | None = None

    def before(self, step: int, look: Look, device: torch.device) -> Engine:
        """Choose the engine of a step; where a measurement asks for it, run some rows of the batch by themselves."""
        self.decision = self._alone = None
        rounds, watched = self._rounds, self._watched
        ended = rounds is not None and rounds.turn == len(rounds.tried)
        self._harvest(wait=ended)
        if rounds is None:
            if watched.calls and watched.calls % INTERVAL == 0:
                self._reconsider(step)
        elif not ended or self._goes_on(step, rounds):
            self._try(look, rounds)
        watched.calls += 1
        self._watch = _Watch(self.engine, device)
        return self.engines[self.engine]

    def scored(self) -> None:
        """Note that the step's scoring is done."""
        self._watch.scored()

    def compare(self, losses: Tensor) -> None:
        """Leave a second forward out if its gradient is another one than that of plain indexing."""
        if self._alone is not None:
            self._learned.barred = self._alone.differs(losses)

    def after(self, loss: Tensor, kept: int, num_rows: int) -> None:
        """Watch the step's backward."""
        self._learned.kept = kept
        if loss.requires_grad:
            self._watch.called(loss, kept, num_rows)
            self._open = [*self._open[-INTERVAL:], self._watch]  # a step without a backward is forgotten in time

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next decision depends on."""
        self._harvest()
        return {
            "given": self._given,
            "engine": self.engine,
            "reason": self.reason,
            "rounds": None if self._rounds is None else asdict(self._rounds),
            "learned": asdict(self._learned),
            "watched": asdict(self._watched),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where ``state`` was taken; the state of a race among other engines is of no use and is ignored."""
        if state.get("given") != self._given:
            return
        rounds, learned, watched = state["rounds"], state["learned"], state["watched"]
        costs = {name: Cost(**cost) for name, cost in learned["costs"].items()}
        self.engine, self.reason = state["engine"], state["reason"]
        self._rounds = None if rounds is None else _Rounds(**rounds)
        self._learned = _Learned(**learned | {"costs": costs})
        self._watched = _Watched(**watched | {"seen": [_Seen(**seen) for seen in watched["seen"]]})
        self._open = []

    def _harvest(self, *, wait: bool = False) -> None:
        """Collect the steps whose backward has ended."""
        still: list[_Watch] = []
        for watch in self._open:
            seen = watch.seen(wait)
            if seen is None:
                still.append(watch)
            else:
                self._watched.seen.append(seen)
        self._open = still

    def _try(self, look: Look, rounds: _Rounds) -> None:
        """Take the measurement's next step."""
        # Each engine comes first at times, and meets every phase of a rhythm in the batches.
        self.engine = rounds.tried[(rounds.over + rounds.turn) % len(rounds.tried)]
        rounds.turn += 1
        turn = "a step to warm up" if rounds.over < 0 else f"round {rounds.over + 1} of at most {ROUNDS}"
        self.reason = f"auto is measuring, {turn}"
        sliced, learned = self.engines.get("sliced"), self._learned
        if isinstance(sliced, Sliced):
            attention = "exact" if self._unit == "row" else sliced.attention
            learned.policies = policies_on(look.model, sliced.batchnorm, attention)
        waits = self._second and learned.barred is None and 0 <= rounds.over < FEWEST
        if waits and self.engine == self._shared[0]:
            alone = look.alone()
            if isinstance(alone, str):
                learned.barred = alone
            elif not self._any_gradient:
                self._alone = alone

    def _goes_on(self, step: int, rounds: _Rounds) -> bool:
        """Begin the next round; or choose, where the measurement is over."""
        rounds.over, rounds.turn = rounds.over + 1, 0
        if rounds.over == 0:
            self._watched.seen, rounds.tried = [], list(self._shared)  # the seconds of the warm-up count for nothing
            return True
        had = {name: rounds.over - FEWEST * (name in self._second) for name in self.engines}  # rounds of each
        num_rows = self._learned.num_rows = _usual_size(self._watched.seen, self._unit)
        self._learned.costs = _fitted(_of_size(num_rows, self._watched.seen, self._unit), num_rows, self.engines)
        seconds = self._predicted()
        far = CLOSE * min(seconds[name] for name in rounds.tried)
        # An engine of which no step was seen yet, whose seconds are NEVER, is not a slow one.
        slow = {name for name in rounds.tried if had[name] >= FEWEST and far < seconds[name] < NEVER}
        rounds.tried = [name for name in rounds.tried if name not in slow]
        if rounds.over == FEWEST and self._learned.barred is None:
            rounds.tried += self._second
        if rounds.over < ROUNDS and (len(rounds.tried) > 1 or had[rounds.tried[0]] < FEWEST):
            return True
        self._rounds, self._watched.calls, self._watched.seen = None, 0, []
        self._choose(step, seconds)
        return False

    def _reconsider(self, step: int) -> None:
        """Switch where K has moved; measure all again where the running engine has left its prediction."""
        watched, learned = self._watched, self._learned
        same = [s for s in _of_size(learned.num_rows, watched.seen, self._unit) if s.engine == self.engine]
        cost = learned.costs.get(self.engine)
        watched.moved |= bool(watched.seen) and not same
        if same and cost is not None:
            # A slower machine slows down every engine, so one cost alone is never corrected. And an engine that has
            # become cheaper is no reason to look for another.
            now = _middle(same)
            watched.moved |= now.seconds > MOVED * cost.seconds(now.kept)
        seconds = self._predicted()
        watched.seen = []
        if watched.moved and watched.calls >= watched.pause:
            watched.pause *= 2
            watched.moved, self._open = False, []
            self._rounds = _Rounds(self._shared[:1], turn=1)  # this step warms up
            self._decide(step, self._shared[0], "auto measures again: the cost of a step has moved", {})
        else:
            self._choose(step, seconds, running=self.engine)

    def _predicted(self) -> dict[str, float]:
        """Seconds of each engine on the slowest rank, at the K in the middle of the steps that were seen.

        All ranks learn whether one of them has barred a second forward, or has seen a cost move.
        """
        watched, learned = self._watched, self._learned
        if watched.seen:
            seen = watched.seen if self._unit == "row" else _of_size(learned.num_rows, watched.seen, self._unit)
            learned.kept = round(statistics.median(s.kept for s in seen))
        barred = [] if learned.barred is None else self._second
        own = [
            NEVER if name in barred or name not in learned.costs else learned.costs[name].seconds(learned.kept)
            for name in self.engines
        ]
        *seconds, any_barred, moved = self._slowest([*own, float(bool(barred)), float(watched.moved)])
        if any_barred and learned.barred is None:
            learned.barred = "it was left out on another rank"
        watched.moved = bool(moved)
        return dict(zip(self.engines, seconds, strict=True))

    def _choose(self, step: int, seconds: Mapping[str, float], running: str = "") -> None:
        """Take the fastest engine; where one runs already, only an engine that is faster by ``GAIN`` replaces it."""
        able = {name: s for name, s in seconds.items() if s < NEVER}
        if not able:
            if not running:
                self._decide(step, self._shared[0], f"auto took {self._shared[0]}: no backward was seen", {})
            return
        best = min(able, key=able.__getitem__)
        if able[best] < (1 - GAIN) * able.get(running, NEVER):
            self._decide(step, best, self._why(best, able), able)

    def _why(self, best: str, able: Mapping[str, float]) -> str:
        learned = self._learned
        left_out = {} if learned.barred is None else dict.fromkeys(self._second, learned.barred)
        others = beside({name: s for name, s in able.items() if name != best}, left_out)
        at = f"{milliseconds(able[best])} a step at K = {learned.kept} of {learned.num_rows}"
        at += " tokens" * (self._unit == "token")
        if best != "masked":
            return "; ".join([f"auto chose {best}: it takes {at}", *others, *by_policy(best, learned.policies)])
        if able[best] < SHORT_S and 2 * learned.kept <= learned.num_rows:
            others.append(TOO_SMALL)
        off = f"auto turned itself off, because training on all {self._unit}s is fastest here: masked takes {at}"
        return "; ".join([off, *others])

    def _decide(self, step: int, engine: str, reason: str, predicted_s: dict[str, float]) -> None:
        self.engine, self.reason = engine, reason
        self.decision = Decision(step, engine, reason, predicted_s, self._learned.kept, self._learned.num_rows)


def _usual_size(seen: list[_Seen], unit: Unit) -> int:
    """N of the costs: of rows the most frequent one, of tokens the median, as hardly two batches have as many."""
    sizes = [s.num_rows for s in seen] or [0]
    return statistics.mode(sizes) if unit == "row" else statistics.median_low(sizes)


def _of_size(num_rows: int, seen: list[_Seen], unit: Unit) -> list[_Seen]:
    """The steps of N rows; or all steps, each with its share of kept tokens of N."""
    if unit == "row":
        return [s for s in seen if s.num_rows == num_rows]
    return [replace(s, kept=round(s.kept * num_rows / s.num_rows), num_rows=num_rows) for s in seen]


def _fitted(same: list[_Seen], num_rows: int, engines: Mapping[str, Engine]) -> dict[str, Cost]:
    """The cost of each engine that was seen in steps of N rows, a line in K.

    A line goes through the median step and one more point. At K = N a step costs as much as a plain step; a second
    forward adds its scoring. Where no plain step was seen, the point is at K = 0, where the backward is free.
    """
    plain = [s for s in same if s.engine == "masked"]
    costs: dict[str, Cost] = {}
    for name, engine in engines.items():
        steps = [s for s in same if s.engine == name]
        if not steps:
            continue
        near = _middle(steps)
        score_s, call_s = min(s.score_s for s in steps), min(s.call_s for s in steps)
        if not plain:
            far = Measurement(0, call_s if engine.one_forward else score_s)
        else:  # a scorer of the user's own runs in the plain step too
            scoring_s = 0.0 if engine.one_forward else score_s - min(s.score_s for s in plain)
            far = Measurement(num_rows, max(_middle(plain).seconds + scoring_s, near.seconds))
        costs[name] = Cost.fit(name, None, [near] if name == "masked" else [near, far])
    return costs


def _middle(steps: list[_Seen]) -> Measurement:
    """The median step, of an even number the faster one in the middle: a slow first step must not count."""
    middle = sorted(steps, key=lambda step: step.seconds)[(len(steps) - 1) // 2]
    return Measurement(middle.kept, middle.seconds)


def _is_compiled(module: nn.Module) -> bool:
    return type(module).__name__ == "OptimizedModule" or getattr(module, "_compiled_call_impl", None) is not None
