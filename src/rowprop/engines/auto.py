"""``engine="auto"``: measure in the user's own first steps, take what is fastest, and keep watching.

The first steps run the engines in turn, and so train what they would have trained: the same rows, the same random
numbers, the gradient of the kept rows. Rounds go on between engines that cost about the same and stop early for the
others, so that measuring costs little and close calls are decided on many steps. ``recompute`` joins later, where it
gives the same gradient, which shows in the losses: a forward of some rows by themselves, of which nothing is kept, says
beforehand whether their losses are what they are among all rows.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from rowprop.batch import take, tensors
from rowprop.cost.memory import peak_bytes
from rowprop.distributed import averages_gradients
from rowprop.engines.base import Engine, Sliced, policies_on, second_forward_differs, uses_batch_statistics
from rowprop.engines.clock import between_s, mark
from rowprop.engines.lines import SHORT_S, TOO_SMALL, Cost, Measurement, beside, by_policy, line, milliseconds
from rowprop.errors import UnsupportedOperation
from rowprop.scoring.forward import score_without_graph
from rowprop.state import buffers_kept, devices_of, rng_kept, rng_states

ROUNDS = 8
"""How often engines of about the same cost are measured."""
FEWEST = 2
"""How often every engine is, since the first time may be slow for reasons of its own; rounds without ``recompute``."""
CLOSE = 1.25
"""The factor over the fastest up to which an engine is measured on."""
INTERVAL = 20
"""Every how many steps the choice is looked at again."""
GAIN = 0.05
"""The share by which another engine must be faster to be switched to."""
MOVED = 1.5
"""The factor by which an engine's cost may exceed its prediction before all are measured again."""
PAUSE = 200
"""Fewest steps from one measurement to the next; doubles each time."""

NEVER = float("inf")


@dataclass(frozen=True)
class Decision:
    """What ``engine="auto"`` decided in a step.

    Attributes:
        step: Number of the step, from 0.
        engine: What runs from here on.
        reason: Why, a sentence.
        predicted_s: Seconds of a step without the update, by engine, those of the slowest rank; engines that cannot be
            taken, or were not measured, are missing.
        kept: K that they are predicted for.
        num_rows: N that they are predicted for.
    """

    step: int
    engine: str
    reason: str
    predicted_s: dict[str, float]
    kept: int
    num_rows: int


@dataclass(frozen=True)
class Subject:
    """A step's model and batch, to measure on; nothing that happens here is left behind.

    Attributes:
        model: What ``function`` is given.
        batch: The whole batch.
        num_rows: N; None where the batch is of unknown make.
        losses: ``(model, batch)`` to losses of shape ``(N,)``.
        score: The scoring pass of ``recompute``; None where a scorer runs in every engine, and is watched there.
    """

    model: Any
    batch: Any
    num_rows: int | None
    losses: Callable[[Any, Any], Tensor]
    score: Callable[[], object] | None

    def hindrance(self) -> str | None:
        """Why some of the rows cannot be run by themselves here, if so."""
        if self.num_rows is None:
            return "rows cannot be taken of a batch of unknown make"
        if not isinstance(self.model, nn.Module):
            return f"the model is a {type(self.model).__name__} and not an nn.Module"
        if averages_gradients(self.model) and not isinstance(self.model, DistributedDataParallel):
            return "a forward besides the step's would meet the collectives of FSDP"
        if any(_is_compiled(module) for module in self.model.modules()):
            return "the compiled model would be compiled once more for K rows"
        return None

    def alone(self) -> Alone | str:
        """Run the last quarter of the rows by themselves, without a graph; or say why that cannot be done.

        The last rows, because the first would draw the same dropout masks as in their batch. A quarter and not K:
        ranks keep different numbers, and losses with collectives of their own need the same.
        """
        why = self.hindrance()
        if why is not None:
            return why
        count, model = max(1, cast(int, self.num_rows) // 4), self._inner()
        devices = devices_of(list(model.modules()), self.batch)

        def watched(model: nn.Module, batch: Any) -> Tensor:
            nonlocal drew
            before = rng_states(devices)
            losses = self.losses(model, batch)
            drew = not all(map(torch.equal, before, rng_states(devices)))
            return losses

        drew = False
        try:
            losses = score_without_graph(watched, model, self._last(count))
        except Exception as error:  # the user's model may fail on fewer rows in any way
            return f"{count} rows by themselves failed with {type(error).__name__}: {error}".splitlines()[0]
        return Alone(losses, drew, uses_batch_statistics(model))

    def _inner(self) -> nn.Module:
        """The model behind DDP, which would have the ranks exchange buffers and its reducer see a backward."""
        return cast("nn.Module", self.model.module if isinstance(self.model, DistributedDataParallel) else self.model)

    def _last(self, count: int) -> Any:
        assert self.num_rows is not None
        return take(self.batch, torch.arange(self.num_rows - count, self.num_rows))

    def _plain_step(self, count: int) -> None:
        """Run ``count`` rows forward and backward."""
        model = self._inner()
        modules = list(model.modules())
        with rng_kept(modules, self.batch), buffers_kept(modules):
            losses = self.losses(model, self._last(count))
            parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
            torch.autograd.grad(losses.mean(), parameters, allow_unused=True)
        torch.clear_autocast_cache()

    def peaks_bytes(self) -> tuple[int, int]:
        """Peak of the scoring pass, and of a plain step, which is run on some of the rows only."""
        assert self.num_rows is not None
        known = [*self.model.parameters(), *self.model.buffers(), *tensors(self.batch)]
        some = min(self.num_rows, max(2, self.num_rows // 8))
        sizes = {some, min(self.num_rows, 2 * some)}
        fixed, per_row = line([(size, peak_bytes(lambda size=size: self._plain_step(size), known)) for size in sizes])
        return 0 if self.score is None else peak_bytes(self.score, known), round(fixed + per_row * self.num_rows)


@dataclass(frozen=True)
class Alone:
    """Some rows that were run by themselves.

    Attributes:
        losses: Of the batch's last rows, shape ``(M,)``, without a graph.
        drew: Whether the forward drew random numbers.
        batch_statistics: Whether BatchNorm took its statistics from them.
    """

    losses: Tensor
    drew: bool
    batch_statistics: bool

    def differs(self, losses: Tensor) -> str | None:
        """Why the gradient of ``recompute`` is another one than plain indexing's here; None where it is the same.

        This is what ``auto`` and :func:`rowprop.plan` ask before they take ``recompute``. BatchNorm and dropout are
        looked for by name, because they hardly change the losses of a model that has not learned anything yet.

        Args:
            losses: Of the whole batch, shape ``(N,)``, from the random state that these rows were run from.
        """
        why = second_forward_differs(drew=self.drew, batch_statistics=self.batch_statistics)
        if why is None and self._mixed(losses):
            why = "rows by themselves have other losses than in their batch, so they see each other"
        return None if why is None else f"{why}, so its gradient is another one"

    def _mixed(self, losses: Tensor) -> bool:
        among = losses.detach()[-self.losses.numel() :].float()
        coarse = losses.dtype in (torch.float16, torch.bfloat16) or torch.is_autocast_enabled(losses.device.type)
        finite = among.isfinite()  # a row that is not says nothing
        apart = torch.where(finite, among - self.losses.float(), 0.0).abs().max()
        scale = torch.where(finite, among, 0.0).abs().max()
        return not bool(apart <= (2e-2 if coarse else 1e-3) * scale)


@dataclass(frozen=True)
class _Seen:
    """A step whose backward has ended."""

    engine: str
    kept: int
    num_rows: int
    score_s: float
    call_s: float
    seconds: float


class _Watch:
    """Notes when a step's backward begins and ends."""

    def __init__(self, engine: str, kept: int, num_rows: int, begun: list[Any], device: torch.device) -> None:
        self.engine, self.kept, self.num_rows, self.device = engine, kept, num_rows, device
        self.marks: list[Any] = [*begun, mark(device)]

    def backward(self, _: Tensor) -> None:
        """Hook of the loss."""
        if len(self.marks) == 3:  # the first backward counts
            self.marks.append(mark(self.device))
            cast(Any, torch.autograd.Variable)._execution_engine.queue_callback(self.end)

    def end(self) -> None:
        """Called when the whole backward has been through."""
        self.marks.append(mark(self.device))

    def seen(self, wait: bool) -> _Seen | None:
        """What it saw, once it is over."""
        if len(self.marks) < 5:
            return None
        begin, scored, called, back, end = self.marks
        backward_s = between_s(back, end, wait=wait)
        if backward_s is None:
            return None
        score_s, call_s = cast(float, between_s(begin, scored)), cast(float, between_s(begin, called))
        return _Seen(self.engine, self.kept, self.num_rows, score_s, call_s, call_s + backward_s)


class Race:
    """Decides which engine runs.

    Args:
        engines: Those to choose among, by name, in order of preference; one of them works on one forward.
        any_result: Take ``recompute`` also where its gradient is another one.
        memory_limit_bytes: Most that a step may hold beyond what lay there before it; None for no limit.
        slowest: Takes the largest of all ranks of each number; None where this process decides alone.
    """

    def __init__(
        self,
        engines: Mapping[str, Engine],
        *,
        any_result: bool = False,
        memory_limit_bytes: int | None = None,
        slowest: Callable[[list[float]], list[float]] | None = None,
    ) -> None:
        self.engines = dict(engines)
        self.any_result = any_result
        self.memory_limit_bytes = memory_limit_bytes
        self._slowest: Callable[[list[float]], list[float]] = slowest or list
        self._shared = [name for name, engine in engines.items() if engine.one_forward]
        self.engine = self._shared[0]
        self.reason = ""
        self.decision: Decision | None = None  # made in this step
        self._left_out: dict[str, str] = {}  # engines that cannot be taken, and why
        self._policies: dict[str, str] = {}  # engines that have the gradient of a policy, and of which
        self._weighed = memory_limit_bytes is None
        self._measuring = True
        self._round = 0  # rounds of the running measurement that are over
        self._tried: list[str] = []  # engines that are in it; none while it warms up
        self._queue: list[str] = self._shared[:1]  # steps to come in its round, the last one first; one to warm up
        self._calls = 0  # since the last measurement
        self._pause = PAUSE
        self._moved = False  # a cost has left its prediction since it was measured
        self._costs: dict[str, Cost] = {}
        self._kept = self._num_rows = 0
        self._seen: list[_Seen] = []
        self._watched: list[_Watch] = []
        self._part: Alone | None = None
        self._begun: list[Any] = []  # marks at the step's begin and after its scoring
        self._device = torch.device("cpu")

    # --- around a step ------------------------------------------------------------------------------------------------

    def before(self, step: int, subject: Subject, device: torch.device) -> Engine:
        """Choose the engine of a step, after what there is to measure on its batch beforehand."""
        self.decision = self._part = None
        if not self._weighed:
            self._weigh(step, subject)
        if self._shared:
            self._harvest(wait=self._measuring and not self._queue)
            if self._measuring and not self._queue:
                self._next_round(step)
            if self._measuring:
                self._try(subject)
            elif self._calls and self._calls % INTERVAL == 0:
                self._reconsider(step)
            self._calls += 1
        self._device = device
        self._begun = [mark(device)] * 2
        return self.engines[self.engine]

    def scored(self) -> None:
        """Note that the step's scoring is done."""
        self._begun[1] = mark(self._device)

    def compare(self, losses: Tensor) -> None:
        """Leave ``recompute`` out if its gradient is another one than plain indexing's."""
        part, self._part = self._part, None
        why = None if part is None or self.any_result else part.differs(losses)
        if why is not None:
            self._left_out["recompute"] = why

    def after(self, loss: Tensor, kept: int, num_rows: int) -> None:
        """Watch the step's backward."""
        self._kept = kept
        if loss.requires_grad:
            watch = _Watch(self.engine, kept, num_rows, self._begun, self._device)
            cast(Any, loss).register_hook(watch.backward)
            self._watched = [*self._watched[-INTERVAL:], watch]  # those that never had a backward are forgotten

    def state_dict(self) -> dict[str, Any]:
        """What the next decision depends on."""
        self._harvest()
        return {
            "given": self._given(),
            "engine": self.engine,
            "reason": self.reason,
            "left_out": dict(self._left_out),
            "policies": dict(self._policies),
            "shared": list(self._shared),
            "weighed": self._weighed,
            "measuring": self._measuring,
            "round": self._round,
            "tried": list(self._tried),
            "queue": list(self._queue),
            "calls": self._calls,
            "pause": self._pause,
            "moved": self._moved,
            "costs": {name: asdict(cost) for name, cost in self._costs.items()},
            "kept": self._kept,
            "num_rows": self._num_rows,
            "seen": [asdict(seen) for seen in self._seen],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where ``state`` was taken; that of another choice is of no use here."""
        if state.get("given") != self._given():
            return
        self.engine, self.reason = state["engine"], state["reason"]
        self._left_out, self._shared = dict(state["left_out"]), list(state["shared"])
        self._policies = dict(state.get("policies", {}))
        self._weighed, self._measuring = state["weighed"], state["measuring"]
        self._round, self._tried, self._queue = state["round"], list(state["tried"]), list(state["queue"])
        self._calls, self._pause, self._moved = state["calls"], state["pause"], state["moved"]
        self._costs = {name: Cost(**cost) for name, cost in state["costs"].items()}
        self._kept, self._num_rows = state["kept"], state["num_rows"]
        self._seen = [_Seen(**seen) for seen in state["seen"]]
        self._watched = []

    def _given(self) -> list[Any]:
        """What there is to choose among, and how."""
        return [list(self.engines), self.any_result, self.memory_limit_bytes]

    # --- its parts ----------------------------------------------------------------------------------------------------

    def _weigh(self, step: int, subject: Subject) -> None:
        """Leave out what does not fit into the memory, before it runs."""
        limit = cast(int, self.memory_limit_bytes)
        why = subject.hindrance()
        if why is not None:
            raise UnsupportedOperation(
                f"memory_limit_bytes={limit} was given, but what a step holds cannot be measured beforehand: {why}; "
                "name the engine instead, recompute where all rows do not fit."
            )
        scoring, plain = self._slowest([float(peak) for peak in subject.peaks_bytes()])
        self._weighed = True
        if plain <= limit or "recompute" not in self.engines:
            return
        self._shared = []
        fits = "" if scoring <= limit else f", though its scoring alone holds {scoring:,.0f}"
        reason = f"auto chose recompute: a graph of all rows holds {plain:,.0f} bytes, beyond {limit:,}{fits}"
        self._decide(step, "recompute", reason, {})

    def _try(self, subject: Subject) -> None:
        """Take the measurement's next step."""
        self.engine = self._queue.pop()
        turn = f"round {self._round + 1} of at most {ROUNDS}" if self._tried else "a step to warm up"
        self.reason = f"auto is measuring, {turn}"
        sliced = self.engines.get("sliced")
        self._policies = policies_on(subject.model, sliced.batchnorm) if isinstance(sliced, Sliced) else {}
        if self._tried and self._awaits_recompute and self.engine == self._shared[0]:
            part = subject.alone()
            if isinstance(part, str):
                self._left_out["recompute"] = part
            else:
                self._part = part

    @property
    def _awaits_recompute(self) -> bool:
        """Whether ``recompute`` may still join, which it does when all looks at its losses are over."""
        return self._round < FEWEST and "recompute" in self.engines.keys() - self._left_out.keys()

    def _next_round(self, step: int) -> None:
        """Go on measuring, or choose."""
        if not self._tried:
            self._seen = []  # what the first step cost says nothing
            self._tried, self._round = list(self._shared), 0
        else:
            kept = self._fit()
            *predicted, left_out = self._predicted(kept, float("recompute" in self._left_out))
            if left_out:
                self._left_out.setdefault("recompute", "it was left out on another rank")
            joins = ["recompute"] if self._awaits_recompute and self._round + 1 == FEWEST else []
            self._round += 1
            seconds = dict(zip(self.engines, predicted, strict=True))
            far = CLOSE * min(seconds[name] for name in self._tried)
            # One of which nothing was seen yet is not a slow one.
            slow = {name for name in self._tried if self._rounds_of(name) >= FEWEST and far < seconds[name] < NEVER}
            self._tried = [name for name in self._tried if name not in slow] + joins
            over = len(self._tried) < 2 and not self._awaits_recompute and self._rounds_of(self._tried[0]) >= FEWEST
            if over or self._round == ROUNDS:
                self._measuring, self._calls, self._seen = False, 0, []
                self._choose(step, kept, predicted)
                return
        turn = self._round % len(self._tried)  # each engine comes first at times, and meets every phase of a rhythm
        self._queue = [*self._tried[turn:], *self._tried[:turn]][::-1]

    def _rounds_of(self, name: str) -> int:
        """How many rounds an engine was in."""
        return self._round - (FEWEST if name == "recompute" else 0)

    def _harvest(self, *, wait: bool = False) -> None:
        """Collect the steps whose backward has ended."""
        seen = [(watch, watch.seen(wait)) for watch in self._watched]
        self._seen += [entry for _, entry in seen if entry is not None]
        self._watched = [watch for watch, entry in seen if entry is None]

    def _fit(self) -> int:
        """Lay lines through what was measured; returns the K to choose at."""
        self._num_rows = statistics.mode([s.num_rows for s in self._seen]) if self._seen else 0
        same = [s for s in self._seen if s.num_rows == self._num_rows]
        by_engine = {name: [s for s in same if s.engine == name] for name in self.engines}
        self._costs = {}
        plain_s = None
        if steps := by_engine.get("masked"):
            plain_s = _point(steps).seconds
            self._costs["masked"] = Cost("masked", None, plain_s, 0.0)
        if steps := by_engine.get("sliced"):
            near = _point(steps)
            # A sliced backward of all rows is the plain one; where none was seen, that of no rows is free.
            free = Measurement(0, min(s.call_s for s in steps))
            far = free if plain_s is None else Measurement(self._num_rows, max(plain_s, near.seconds))
            self._costs["sliced"] = Cost.fit("sliced", None, [near, far])
        if steps := by_engine.get("recompute"):
            near, score_s = _point(steps), min(s.score_s for s in steps)
            # All rows by themselves are a plain step, and scoring; where none was seen, no rows are free.
            far = Measurement(0, score_s)
            if plain_s is not None:
                scorer_s = min((s.score_s for s in same if s.engine != "recompute"), default=0.0)
                far = Measurement(self._num_rows, max(score_s - scorer_s + plain_s, near.seconds))
            self._costs["recompute"] = Cost.fit("recompute", None, [near, far])
        return round(_median(s.kept for s in self._seen) or self._kept)

    def _reconsider(self, step: int) -> None:
        """Switch where K has moved; measure all again where the running engine costs something else than predicted."""
        same = [s for s in self._seen if s.num_rows == self._num_rows and s.engine == self.engine]
        cost = self._costs.get(self.engine)
        self._moved |= bool(self._seen) and not same
        if same and cost is not None:
            point = _point(same)
            # What slows down the machine slows down every engine: one cost alone is never put right. And an engine
            # that has become cheaper is no reason to look for another.
            self._moved |= point.seconds > MOVED * cost.seconds(point.kept)
        kept = round(_median(s.kept for s in self._seen) or self._kept)
        self._seen = []
        *_, anyone = predicted = self._predicted(kept, float(self._moved))
        if anyone and self._calls >= self._pause:
            self._pause *= 2
            self._watched, self._moved = [], False
            self._measuring, self._tried = True, []
            self._decide(step, self._shared[0], "auto measures again: what a step costs has moved", {})
        else:
            self._choose(step, kept, predicted, running=self.engine)

    def _predicted(self, kept: int, *more: float) -> list[float]:
        """Seconds of each engine at K, and ``more``; of all ranks the largest."""
        own = [
            NEVER if name in self._left_out or name not in self._costs else self._costs[name].seconds(kept)
            for name in self.engines
        ]
        return self._slowest([*own, *more])

    def _choose(self, step: int, kept: int, predicted: list[float], running: str | None = None) -> None:
        """Take the fastest; one that runs already, unless another is enough faster."""
        able = {name: seconds for name, seconds in zip(self.engines, predicted, strict=False) if seconds < NEVER}
        if not able:
            if running is None:
                self._decide(step, self._shared[0], f"auto took {self._shared[0]}: no backward was seen", {})
            return
        best = min(able, key=able.__getitem__)
        if running is not None and able[best] > (1 - GAIN) * able.get(running, NEVER):
            return
        if best == running:
            return
        self._kept = kept
        self._decide(step, best, self._why(best, able), able)

    def _why(self, best: str, able: Mapping[str, float]) -> str:
        others = beside({name: s for name, s in able.items() if name != best}, self._left_out)
        at = f"{milliseconds(able[best])} a step at K = {self._kept} of {self._num_rows}"
        if best != "masked":
            return "; ".join([f"auto chose {best}: it takes {at}", *others, *by_policy(best, self._policies)])
        if able[best] < SHORT_S and 2 * self._kept <= self._num_rows:
            others.append(TOO_SMALL)
        off = f"auto turned itself off, because training on all rows is fastest here: masked takes {at}"
        return "; ".join([off, *others])

    def _decide(self, step: int, engine: str, reason: str, predicted_s: dict[str, float]) -> None:
        self.engine, self.reason = engine, reason
        self.decision = Decision(step, engine, reason, predicted_s, self._kept, self._num_rows)


def _is_compiled(module: nn.Module) -> bool:
    return type(module).__name__ == "OptimizedModule" or getattr(module, "_compiled_call_impl", None) is not None


def _median(values: Iterable[float]) -> float | None:
    found = list(values)
    return statistics.median(found) if found else None


def _point(steps: list[_Seen]) -> Measurement:
    """The median step, the faster one of two: a first time that was slow must not count."""
    middle = sorted(steps, key=lambda step: step.seconds)[(len(steps) - 1) // 2]
    return Measurement(middle.kept, middle.seconds)
