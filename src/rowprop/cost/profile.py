"""Where a step's time goes, and which parts of it are slower than they should be."""

from __future__ import annotations

import gzip
import math
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.autograd import DeviceType  # pyright: ignore[reportPrivateImportUsage]
from torch.autograd.function import BackwardCFunction
from torch.autograd.profiler import record_function
from torch.profiler import ProfilerActivity
from torch.utils._pytree import tree_leaves

from rowprop.checks import check_kind, check_tick, check_trainable, check_whole
from rowprop.cost.findings import COPIES, GRADIENTS, Calls, Direction, Finding, Node, Observed, Op, diagnose, grouped
from rowprop.cost.flops import counting, is_view
from rowprop.cost.measure import Tick, Timing, accelerators, ignored, measure, profiled
from rowprop.cost.timing import Variant, measure_step
from rowprop.cost.where import OUTSIDE, Modules, around_forwards, current_node, graph
from rowprop.cost.zeros import ZeroPlace, find_zeros
from rowprop.errors import InvalidInput
from rowprop.files import check_writable, write_whole
from rowprop.scoring import LossesFn, losses_of
from rowprop.state import devices_of, leaves_of, step_undone

__all__ = ["Profile", "Tally", "profile"]

STEPS = 8  # under the profiler; each op counts with the step in which it took least
LIMIT_S = 60.0  # for the steps without the profiler, once 5 are measured
MARK = "rowprop::"
MODULE = MARK + "module::"
ENGINE = "autograd::engine::evaluate_function: "
ACCUMULATE = "torch::autograd::AccumulateGrad"
RENAMED = {"_native_batch_norm_legit": "native_batch_norm"}  # to the profiler's name of an op from the counter's


@dataclass(frozen=True)
class Tally:
    """Time, calls and counted work of an op or of a module, per step: a line of a table.

    Attributes:
        name: The op without ``aten::``, or the module's path. ``"losses_fn"`` stands for ops outside of any module,
            ``"parameters"`` for the adding up of gradients.
        forward_s: Seconds, as all of the device where there is an accelerator, else of the CPU.
        share: Share of the step's time.
        forward_calls: For a module, as all calls, those of all ops in it.
        flops_per_s: Reached in forward and backward together.
        bytes: Read and written, each operand of each call once.
        kind: A module's class; empty for an op.
    """

    name: str
    forward_s: float
    backward_s: float
    share: float
    forward_calls: float
    backward_calls: float
    forward_flops: int
    backward_flops: int
    flops_per_s: float
    bytes: int
    kind: str = ""

    @property
    def title(self) -> str:
        """The name, with the class beside a module's path."""
        return f"{self.name} ({self.kind})" if self.kind not in ("", self.name) else self.name


@dataclass(frozen=True)
class Profile:
    """The result of :func:`profile`.

    Attributes:
        num_rows: N.
        findings: Why the step is slow, worst first; empty for a healthy step.
        ops: Every op, slowest first.
        modules: Every module without its children, slowest first.
        outside_share: Share of the step's time in no op: Python and autograd's own work, on the CPU.
        timing: Phases ``"forward"`` and ``"backward"`` without the profiler, and the peak memory.
        uncounted: Ops without a formula and their number of calls, which are in neither number of FLOPs.
        flops_per_s: What the machine reaches in a large matrix product.
        bytes_per_s: What it reaches in a large copy, read and written.
    """

    num_rows: int
    findings: list[Finding]
    ops: list[Tally]
    modules: list[Tally]
    outside_share: float
    timing: Timing
    forward_flops: int
    backward_flops: int
    uncounted: dict[str, int]
    flops_per_s: float
    bytes_per_s: float
    device: str

    def __repr__(self) -> str:
        found = [f"{finding.kind} at {finding.where}. {finding.evidence} {finding.remedy}" for finding in self.findings]
        return "\n".join([f"The backward takes {self.measured_ratio:.2f} times the forward.", *found])

    @property
    def measured_ratio(self) -> float:
        """Backward over forward, in time: the median over the steps."""
        forward_s, backward_s = _middle_step(self.timing)
        return backward_s / forward_s

    @property
    def counted_ratio(self) -> float | None:
        """Backward over forward, in FLOPs; None where the forward has none."""
        return self.backward_flops / self.forward_flops if self.forward_flops else None

    def to_dict(self) -> dict[str, Any]:
        """As numbers, texts, lists and dicts that JSON holds."""
        return asdict(self) | {
            "timing": self.timing.to_dict(), "findings": [finding.to_dict() for finding in self.findings],
            "measured_ratio": self.measured_ratio, "counted_ratio": self.counted_ratio,
        }  # fmt: skip


def profile(
    model: nn.Module,
    batch: Any,
    losses_fn: LossesFn,
    *,
    rounds: int = 10,
    trace: Path | None = None,
    tick: Tick | None = None,
) -> Profile:
    """Find where the time of a plain training step goes, forward and backward, and why it is slow.

    torch's profiler gives the time, a count of the ops that really run FLOPs and bytes; the ratio of backward to
    forward is measured without either. ``docs/profile.md`` says when something is a finding, and why.

    Args:
        model: The model, profiled in the modes it is in.
        batch: The whole batch, N rows.
        losses_fn: ``(model, batch)`` to unreduced losses, shape ``(N,)`` or ``(N, 1)``.
        rounds: Steps measured without the profiler; after 5 for a minute at most. Default 10.
        trace: Where to write a Chrome trace (for https://ui.perfetto.dev), ``.json`` or ``.json.gz``. Default None.
        tick: Called now and then with a line on the work at hand and the fraction of all work done. Default None.

    Raises:
        InvalidInput: An argument is out of its range, the losses have no graph, or ``trace`` cannot be written. Errors
            of ``losses_fn`` pass.

    Cost:
        ``rounds + 13`` steps and a forward; the profiler and the count slow some of them. Parameters, buffers,
        gradients, modes and the random state are put back; other state that a forward changes stays changed.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
        >>> batch = torch.randn(32, 64), torch.randn(32, 1)
        >>> found = profile(model, batch, lambda model, batch: (model(batch[0]) - batch[1]).square(), rounds=5)
        >>> found.forward_flops, found.backward_flops  # 2 * 32 * (64 * 64 + 64); the first layer has no input gradient
        (266240, 270336)
    """
    check_trainable("profile", model, batch, losses_fn)
    check_whole("profile", "rounds", rounds, 1)
    check_tick("profile", tick)
    if trace is not None:
        check_kind("profile", "trace", trace, Path, "a Path was needed.")
        check_writable(trace)
    tell = tick or ignored
    tell("warming up", 0.0)
    begun_s = time.perf_counter()
    plain = Variant()
    timing = measure_step(
        model, batch, losses_fn, (plain,),
        rounds=rounds, limit_s=LIMIT_S, tick=lambda line, done: tell(f"plain steps: {line}", 0.4 * done),
    )[plain]  # fmt: skip
    devices = accelerators(devices_of(list(model.modules()), batch))
    with step_undone(model, batch), torch.enable_grad():
        num_rows = losses_of(losses_fn, model, batch).numel()
        left_s = (STEPS + 2) * (time.perf_counter() - begun_s) / (rounds + 4)
        tell(f"running {STEPS} steps under the profiler, about {left_s:.0f} s", 0.4)
        traced = _traced(model, batch, losses_fn, bool(devices), trace)
    tell("measuring a matrix product and a copy", 0.95)
    flops_per_s, bytes_per_s = _reached(model, devices)
    forward_s, backward_s = _middle_step(timing)
    seen = Observed(
        forward_s=forward_s, backward_s=backward_s,
        profiled_forward_s=traced.total_s["forward"], profiled_backward_s=traced.total_s["backward"],
        ops=list(traced.ops.values()), nodes=list(traced.nodes.values()), flops_per_s=flops_per_s,
        bytes_per_s=bytes_per_s, accelerator=traced.accelerator, zeros=traced.zeros,
    )  # fmt: skip
    return Profile(
        num_rows=num_rows, findings=diagnose(seen), ops=_tallies(seen, lambda op: op.op, {}),
        modules=_tallies(seen, lambda op: op.module, traced.modules.kinds),
        outside_share=max(0.0, 1 - sum(op.ran.time_s for op in seen.ops) / seen.total_s), timing=timing,
        forward_flops=seen.flops("forward"), backward_flops=seen.flops("backward"), uncounted=traced.uncounted,
        flops_per_s=flops_per_s, bytes_per_s=bytes_per_s, device=", ".join(map(str, devices)) or "cpu",
    )  # fmt: skip


def _middle_step(timing: Timing) -> tuple[float, float]:
    """Seconds of the forward and of the backward of one step, the one whose ratio of both is the median.

    Other work on the machine may disturb the forward of one step and the backward of another, so they are taken in
    pairs. The least of each would come from different steps.
    """
    steps = sorted(zip(timing.each_s("forward"), timing.each_s("backward"), strict=True), key=lambda s: s[1] / s[0])
    return steps[(len(steps) - 1) // 2]


def _traced(model: nn.Module, batch: Any, losses_fn: LossesFn, accelerator: bool, path: Path | None) -> Trace:
    """Run some steps under the profiler, and one more to count; write the profiler's own trace to ``path``."""
    activities = torch.profiler.supported_activities() if accelerator else [ProfilerActivity.CPU]
    modules, leaves = Modules(model), leaves_of(model, batch)
    traced = Trace(modules, {}, accelerator)
    with modules.tracked():
        marked = around_forwards(model, lambda path: record_function(MODULE + path))
        with marked, profiled(activities) as profiler:
            for _ in range(STEPS):
                with record_function(MARK + "forward"):
                    loss = losses_of(losses_fn, model, batch).mean()
                traced.functions.update(_custom_functions(loss))
                with record_function(MARK + "backward"):
                    cast(Any, loss).backward()
                    if accelerator:
                        torch.accelerator.synchronize()
                del loss
                for leaf in leaves:
                    leaf.grad = None
        with find_zeros(model) as zeros:
            with counting(partial(traced.count, "forward")):
                loss = losses_of(losses_fn, model, batch).mean()
            with counting(partial(traced.count, "backward")):
                cast(Any, loss).backward()
    if path is not None:
        write_whole(path, _exported(profiler, packed=path.suffix == ".gz"))
    traced.read(cast(Any, profiler.events()))
    traced.zeros = zeros.places[0] if zeros.places else None
    return traced


def _exported(profiler: torch.profiler.profile, *, packed: bool) -> bytes:
    """The Chrome trace. The profiler writes to a file only, and does not tell of a full disk."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(file))
        content = file.read_bytes() if file.exists() else b""
        if not content.rstrip().endswith(b"}"):
            raise InvalidInput(f"the trace could not be written into the temporary folder {folder}; make room there.")
    return gzip.compress(content) if packed else content


def _custom_functions(loss: Tensor) -> dict[str, str]:
    """Names of the custom functions in a graph, without torch's own, by the name of their backward node."""
    found: dict[str, str] = {}
    for node in graph(loss.grad_fn):
        if isinstance(node, BackwardCFunction):
            function = cast(Any, type(node))._forward_cls
            if not function.__module__.startswith("torch."):
                found[cast(Any, node).name()] = function.__name__
    return found


def _reached(model: nn.Module, fast: list[torch.device]) -> tuple[float, float]:
    """FLOPs/s of a large product in the widest dtype of the model, bytes/s of a large copy; on ``fast[0]``, if any."""
    device = fast[0] if fast else torch.device("cpu")
    dtypes = {p.dtype for p in model.parameters() if p.dtype.is_floating_point} or {torch.float32}
    width, length = (4096, 2**26) if fast else (512, 2**22)
    a = torch.ones(width, width, device=device, dtype=max(dtypes, key=lambda dtype: dtype.itemsize))
    x = torch.ones(length, device=device)
    y = torch.empty_like(x)
    found = measure(
        {"product": lambda done: (torch.mm(a, a), done("all")), "copy": lambda done: (y.copy_(x), done("all"))},
        devices=[device],
    )
    product_s, copy_s = (min(timing.each_s()) for timing in found.values())
    return 2 * width**3 / product_s, 2 * x.nbytes / copy_s


def _tallies(seen: Observed, name_of: Callable[[Op], str], kinds: dict[str, str]) -> list[Tally]:
    tallies: list[Tally] = []
    for name, ops in grouped((op for op in seen.ops if op.ran.calls or op.flops), name_of).items():
        forward, backward = ([op for op in ops if op.direction == at] for at in ("forward", "backward"))
        forward_s, backward_s = (sum(op.ran.time_s for op in own) for own in (forward, backward))
        forward_flops, backward_flops = (sum(op.flops or 0 for op in own) for own in (forward, backward))
        forward_calls, backward_calls = (sum(op.ran.calls for op in own) for own in (forward, backward))
        time_s = forward_s + backward_s
        tally = Tally(
            name, forward_s, backward_s, time_s / seen.total_s, forward_calls, backward_calls, forward_flops,
            backward_flops, flops_per_s=(forward_flops + backward_flops) / time_s if time_s else 0.0,
            bytes=sum(op.bytes for op in ops), kind=kinds.get(name, ""),
        )  # fmt: skip
        tallies.append(tally)
    return sorted(tallies, key=lambda tally: -tally.share)


class Frame(NamedTuple):
    """Where in a step an event is."""

    direction: Direction
    module: str = OUTSIDE
    node: str = ""
    function: str = ""  # the custom function whose forward runs, by its backward node
    op: str = ""
    inside: tuple[str, ...] = ()  # the ops that the op called, from the outermost to the event


class Trace:
    """The ops and backward nodes of a step, with their times: the device's with ``accelerator``, else the CPU's.

    Each frame counts with the one of several steps in which it took least, without the frames inside it: other work of
    a machine only adds time, and does not hit the same place in every step. All other times are sums of these; calls,
    and the host's time, are those of the first step. ``functions`` has custom functions' names by their backward node.
    """

    def __init__(self, modules: Modules, functions: dict[str, str], accelerator: bool) -> None:
        self.modules = modules
        self.functions = functions
        self.accelerator = accelerator
        self.ops: dict[tuple[Direction, str, str, str], Op] = {}
        self.nodes: dict[tuple[str, str], Node] = {}
        self.total_s: dict[Direction, float] = {"forward": 0.0, "backward": 0.0}
        self.uncounted: dict[str, int] = {}
        self.zeros: ZeroPlace | None = None
        self._dispatched: set[str] = set()

    def count(
        self, direction: Direction, name: str, flops: tuple[int, ...] | None, func: Any, inputs: Any, out: Any
    ) -> None:
        """Add the FLOPs, bytes and casts of an op that ran, as :data:`~rowprop.cost.flops.Ran`."""
        node = current_node()
        node_name = "" if node is None else node.name()
        running = self.modules.running[-1]  # inside a backward an activation checkpoint runs its forward again
        module = GRADIENTS if node_name == ACCUMULATE else running if running != OUTSIDE else self.modules.of(node)
        name = RENAMED.get(name, name.replace(".", "::"))
        op = self.op(direction, module, node_name, name)
        if flops is None:
            self.uncounted[name] = self.uncounted.get(name, 0) + 1
            op.flops = None
        elif op.flops is not None:
            op.flops += sum(flops)
        operands, results = ([x for x in tree_leaves(tree) if isinstance(x, Tensor)] for tree in (inputs, out))
        if not is_view(func):
            op.bytes += sum(map(_bytes, operands + results))
        if name in COPIES and operands and results:
            source, target = operands[-1].dtype, results[0].dtype
            if source != target:
                kind = f"{source} to {target}".replace("torch.", "")
                op.casts[kind] = op.casts.get(kind, 0) + 1

    def read(self, events: Sequence[Any]) -> None:
        """Read the profiler's events, once :meth:`count` has noted the ops that they are made of."""
        self._dispatched = {op.op for op in self.ops.values()}
        roots = [e for e in events if e.cpu_parent is None and e.device_type == DeviceType.CPU]
        begins = [e.time_range.start for e in roots if e.name == MARK + "forward"]
        ends = [e.time_range.end for e in roots if e.name == MARK + "backward"]
        steps: list[dict[Frame, float]] = []
        for begin, end in zip(begins, ends, strict=True):
            own_s: dict[Frame, float] = {}
            # The backward of an accelerator runs on a separate thread.
            for event in (e for e in roots if begin <= e.time_range.start < end and e.name.startswith((MARK, ENGINE))):
                direction = "forward" if event.name == MARK + "forward" else "backward"
                self._walk(event, Frame(direction), own_s, first=not steps)
            steps.append(own_s)
        for frame in steps[0]:
            self._spend(frame, min(own_s.get(frame, math.inf) for own_s in steps))

    def op(self, direction: Direction, module: str, node: str, name: str) -> Op:
        """The entry of an op; the first call makes it."""
        key = (direction, module, node, name)
        return self.ops.setdefault(key, Op(*key))

    def _op(self, frame: Frame) -> Op:
        return self.op(frame.direction, frame.module, frame.node, frame.op)

    def _node(self, name: str, module: str) -> Node:
        return self.nodes.setdefault((name, module), Node(name, module, function=self.functions.get(name, "")))

    def _walk(self, event: Any, frame: Frame, own_s: dict[Frame, float], *, first: bool) -> None:
        """Add up the own time of an event and its children by frame; in the first step count the calls."""
        name: str = event.name.removeprefix("aten::")
        called: Calls | None = None
        if frame.op:
            frame = frame._replace(inside=(*frame.inside, name))
            called = self._op(frame).inside.setdefault(name, Calls())
        elif name.startswith(MODULE):
            frame = frame._replace(module=name.removeprefix(MODULE))
        elif name.startswith(ENGINE):
            name = name.removeprefix(ENGINE)
            module = GRADIENTS if name == ACCUMULATE else self.modules.call_of(event.sequence_nr)[0]
            frame = frame._replace(module=module, node=name)
            called = self._node(name, module).ran
        elif name in self._dispatched:
            frame = frame._replace(op=name)
            called = self._op(frame).ran
            self._op(frame).host_s += event.cpu_time_total / 1e6 * first
        elif frame.direction == "forward" and name in self.functions.values():
            frame = frame._replace(function=next(node for node, own in self.functions.items() if own == name))
        if called is not None:
            called.calls += first
        time_s = self._time_s(event)
        for child in event.cpu_children:
            time_s -= self._time_s(child)
            self._walk(child, frame, own_s, first=first)
        own_s[frame] = own_s.get(frame, 0.0) + max(0.0, time_s)

    def _time_s(self, event: Any) -> float:
        return (event.device_time_total if self.accelerator else event.cpu_time_total) / 1e6

    def _spend(self, frame: Frame, time_s: float) -> None:
        self.total_s[frame.direction] += time_s
        if frame.node:
            self._node(frame.node, frame.module).ran.time_s += time_s
        if frame.function:
            self._node(frame.function, frame.module).forward_s += time_s
        if frame.op:
            op = self._op(frame)
            for calls in (op.ran, *(op.inside[name] for name in set(frame.inside))):
                calls.time_s += time_s


def _bytes(tensor: Tensor) -> int:
    """Bytes of its elements; an expanded dimension counts once."""
    size = tensor.element_size()
    if tensor.layout != torch.strided:
        return size * tensor.numel()
    for length, step in zip(tensor.shape, tensor.stride(), strict=True):
        size *= length if step else 1
    return size
