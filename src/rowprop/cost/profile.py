"""Where a step's time goes, and what in it is slower than it should be."""

from __future__ import annotations

import gzip
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.profiler import record_function
from torch.profiler import ProfilerActivity

from rowprop.batch import tensors
from rowprop.checks import check_tick, check_trainable, check_whole, is_number, shown
from rowprop.cost.findings import Finding, Observed, Op, diagnose
from rowprop.cost.measure import Done, Tick, Timing, accelerators, measure, profiled, unheard
from rowprop.cost.timing import Variant, measure_step
from rowprop.cost.trace import MARK, Ledger, Stack, Trace, module_marks
from rowprop.cost.where import DensifiedAt, Locator, Modules, graph
from rowprop.errors import InvalidInput
from rowprop.files import check_writable, write_whole
from rowprop.scoring.losses import LossesFn, losses_of
from rowprop.selection.fixed import TopK
from rowprop.state import devices_of, step_undone
from rowprop.step.selective import SelectiveBackprop

STEPS = 8
"""Steps under the profiler; each op counts with the one in which it took least."""
LOCATED = 5
"""Sliced backwards, where there is something in them that goes back to all rows."""


@dataclass(frozen=True)
class Tally:
    """A line of a table: an op, or a module.

    Attributes:
        name: The op without ``aten::``, or the module's path. What ran in no module is ``"losses_fn"``, the adding up
            of gradients ``"parameters"``.
        forward_s: Seconds per step in the forward: of the device where there is an accelerator, else of the CPU.
        backward_s: In the backward.
        share: Of the step's time.
        forward_calls: Calls per step in the forward; of a module, of all ops in it.
        backward_calls: In the backward.
        forward_flops: Counted FLOPs of the forward.
        backward_flops: Of the backward.
        flops_per_s: FLOPs reached, both phases together.
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
    """What :func:`profile` found.

    Attributes:
        num_rows: N.
        findings: What makes the step slow, worst first; empty for a healthy one.
        ops: Every op, slowest first.
        modules: Every module by what ran in it and in none of its children, slowest first.
        outside_share: Of the step's time, in no op: Python and autograd's own work, on the CPU.
        timing: Phases ``"forward"`` and ``"backward"`` without the profiler, and the peak memory.
        forward_flops: Counted FLOPs of the forward.
        backward_flops: Of the backward.
        uncounted: Ops without a formula and their calls; they are in neither number of FLOPs.
        flops_per_s: What the machine reaches in a large matrix product.
        bytes_per_s: What it reaches in a large copy.
        device: Where the model is.
        stacks: Seconds per step by where they were spent: the flame graph.
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
    stacks: dict[Stack, float]

    @property
    def measured_ratio(self) -> float:
        """Backward over forward, in time."""
        return self.timing.spread("backward").median / self.timing.spread("forward").median

    @property
    def counted_ratio(self) -> float | None:
        """Backward over forward, in FLOPs; None where the forward has none."""
        return self.backward_flops / self.forward_flops if self.forward_flops else None

    def to_dict(self) -> dict[str, Any]:
        """As numbers, texts, lists and dicts that JSON holds; without the stacks."""
        plain = replace(self, timing=cast(Any, None), stacks={})
        entries = asdict(plain) | {"timing": self.timing.to_dict()}
        del entries["stacks"]
        return entries | {"measured_ratio": self.measured_ratio, "counted_ratio": self.counted_ratio}


def profile(
    model: nn.Module,
    batch: Any,
    losses_fn: LossesFn,
    *,
    rounds: int = 10,
    limit_s: float | None = None,
    trace: Path | None = None,
    tick: Tick | None = None,
) -> Profile:
    """Find where the time of a plain training step goes, forward and backward, and why it is slow.

    Time is that of torch's profiler, FLOPs and bytes are counted from what really runs, and the ratio of backward to
    forward is measured without any of them running. What counts as a finding, and why, is in ``docs/profile.md``.

    Args:
        model: The model, profiled in the modes it is in.
        batch: The whole batch, N rows.
        losses_fn: ``(model, batch)`` to unreduced losses, shape ``(N,)`` or ``(N, ...)``.
        rounds: Steps measured without the profiler. Default 10.
        limit_s: Stop measuring those after that many seconds, once there are 5. Default None: never.
        trace: Where to write a Chrome trace (``chrome://tracing``, https://ui.perfetto.dev), ``.json`` or ``.json.gz``.
            Default None: nowhere.
        tick: Called now and then with what is being measured, and how much is done.

    Returns:
        A :class:`Profile`.

    Raises:
        InvalidInput: The losses have no graph, or ``trace`` cannot be written. What ``losses_fn`` raises is passed on.

    Cost:
        ``rounds + 14`` steps and a forward, some of them slowed by what watches them; 4 more where a sliced gradient
        goes back to all rows. Afterwards parameters, buffers, gradients, modes and the random state are what they were;
        other state that a forward changes is not known here.

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
    if limit_s is not None and not (is_number(limit_s) and limit_s > 0):
        raise InvalidInput(f"profile got limit_s={shown(limit_s)} but seconds above 0 were needed; None is no limit.")
    if trace is not None:
        if not isinstance(cast("object", trace), Path):
            raise InvalidInput(f"profile got trace={shown(trace)}, a {type(trace).__name__}, but a Path was needed.")
        check_writable(trace)
    tell = tick or unheard
    tell("warming up", 0.0)
    begun_s = time.perf_counter()
    timings = measure_step(
        model, batch, losses_fn, (Variant(),),
        rounds=rounds, limit_s=limit_s, tick=lambda line, done: tell(f"plain steps: {line}", 0.4 * done),
    )  # fmt: skip
    timing = next(iter(timings.values()))
    devices = devices_of(list(model.modules()), batch)
    with step_undone(model, batch), torch.enable_grad():
        subject = _Subject(model, batch, losses_fn)
        num_rows = losses_of(losses_fn, model, batch).numel()
        left_s = (STEPS + LOCATED + 5) * (time.perf_counter() - begun_s) / (rounds + 4)
        tell(f"running {STEPS} steps under the profiler, about {left_s:.0f} s", 0.4)
        traced, uncounted, written = _traced(subject, bool(accelerators(devices)), trace)
        tell("looking for what goes back to all rows", 0.8)
        dense = _densified(subject)
    tell("measuring a matrix product and a copy", 0.95)
    flops_per_s, bytes_per_s = _reached(model, devices)
    ops = list(traced.ops.values())
    seen = Observed(
        forward_s=min(timing.each_s("forward")),
        backward_s=min(timing.each_s("backward")),
        profiled_forward_s=traced.phase_s("forward"),
        profiled_backward_s=traced.phase_s("backward"),
        ops=ops,
        nodes=list(traced.nodes.values()),
        slow=traced.slow,
        dense=dense,
        flops_per_s=flops_per_s,
        bytes_per_s=bytes_per_s,
        accelerator=traced.accelerator,
    )
    if trace is not None:
        write_whole(trace, written)
    return Profile(
        num_rows=num_rows,
        findings=diagnose(seen),
        ops=_rows(ops, lambda op: op.op, seen.total_s),
        modules=[
            replace(row, kind=traced.modules.kinds.get(row.name, ""))
            for row in _rows(ops, lambda op: op.module, seen.total_s)
        ],
        outside_share=max(0.0, 1 - sum(op.ran.time_s for op in ops) / seen.total_s) if seen.total_s else 0.0,
        timing=timing,
        forward_flops=seen.flops("forward"),
        backward_flops=seen.flops("backward"),
        uncounted=uncounted,
        flops_per_s=flops_per_s,
        bytes_per_s=bytes_per_s,
        device=", ".join(sorted(str(device) for device in accelerators(devices))) or "cpu",
        stacks=traced.stacks,
    )


@dataclass(frozen=True)
class _Subject:
    model: nn.Module
    batch: Any
    losses_fn: LossesFn

    def loss(self) -> Tensor:
        return losses_of(self.losses_fn, self.model, self.batch).mean()

    def clear(self) -> None:
        for leaf in [*self.model.parameters(), *(t for t in tensors(self.batch) if t.is_leaf and t.requires_grad)]:
            leaf.grad = None


def _traced(subject: _Subject, accelerator: bool, path: Path | None) -> tuple[Trace, dict[str, int], bytes]:
    """Run some steps under the profiler, and one more to count; the last is what goes into the file at ``path``."""
    modules = Modules(subject.model)
    traced = Trace(modules, {}, accelerator)
    with modules.tracked():
        with module_marks(subject.model), profiled(_activities(accelerator)) as profiler:
            for _ in range(STEPS):
                with record_function(MARK + "forward"):
                    loss = subject.loss()
                traced.functions.update(_custom_functions(loss))
                with record_function(MARK + "backward"):
                    cast(Any, loss).backward()
                    if accelerator:
                        torch.accelerator.synchronize()
                del loss
                subject.clear()
        ledger = Ledger(traced)
        with ledger:
            loss = subject.loss()
            ledger.phase = "backward"
            cast(Any, loss).backward()
        subject.clear()
    written = b"" if path is None else _exported(profiler, packed=path.suffix == ".gz")
    traced.read(cast(Any, profiler.events()))
    return traced, ledger.uncounted, written


def _exported(profiler: torch.profiler.profile, *, packed: bool) -> bytes:
    """The Chrome trace. The profiler writes only to a file, and says nothing where the disk is full."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(file))
        content = file.read_bytes() if file.exists() else b""
        if not content.rstrip().endswith(b"}"):
            raise InvalidInput(f"the trace could not be written into the temporary folder {folder}; make room there.")
    return gzip.compress(content) if packed else content


def _activities(accelerator: bool) -> Iterable[ProfilerActivity]:
    return torch.profiler.supported_activities() if accelerator else [ProfilerActivity.CPU]


def _custom_functions(loss: Tensor) -> dict[str, str]:
    """Names of the custom functions in a graph, but torch's own, by the name of their backward node."""
    found: dict[str, str] = {}
    for node in graph(loss.grad_fn):
        if isinstance(node, BackwardCFunction):
            function = cast(Any, type(node))._forward_cls
            if not function.__module__.startswith("torch."):
                found[cast(Any, node).name()] = function.__name__
    return found


def _densified(subject: _Subject) -> list[DensifiedAt]:
    """Where the gradient of half of the rows goes back to all of them; from the fastest of some backwards."""
    step = SelectiveBackprop(subject.model, subject.losses_fn, TopK(0.5), engine="sliced", nonfinite="keep")
    locators: list[Locator] = []
    for _ in range(LOCATED):
        locator = Locator(subject.model)
        with locator.modules.tracked():
            loss, record = step(subject.batch)
        if record.selection.is_everything:
            return []
        with locator.backward(loss):
            cast(Any, loss).backward()
        subject.clear()
        if not locator.found:
            return []
        locators.append(locator)
    return min(locators, key=lambda locator: locator.total_s).places()


def _reached(model: nn.Module, devices: Iterable[torch.device]) -> tuple[float, float]:
    """FLOPs per second of a large matrix product in the model's widest dtype, and bytes per second of a large copy."""
    fast = accelerators(devices)
    device = fast[0] if fast else torch.device("cpu")
    dtypes = {p.dtype for p in model.parameters() if p.dtype.is_floating_point} or {torch.float32}
    width, length = (4096, 2**26) if fast else (512, 2**22)
    a = torch.ones(width, width, device=device, dtype=max(dtypes, key=lambda dtype: dtype.itemsize))
    x = torch.ones(length, device=device)
    y = torch.empty_like(x)

    def product(done: Done) -> None:
        torch.mm(a, a)
        done("all")

    def copy(done: Done) -> None:
        y.copy_(x)
        done("all")

    found = measure({"product": product, "copy": copy}, devices=[device], rounds=20)
    product_s, copy_s = (min(found[name].each_s()) for name in ("product", "copy"))
    return 2 * width**3 / product_s, 2 * x.nbytes / copy_s


def _rows(ops: list[Op], name_of: Callable[[Op], str], total_s: float) -> list[Tally]:
    grouped: dict[str, list[Op]] = {}
    for op in (op for op in ops if op.ran.calls or op.flops):
        grouped.setdefault(name_of(op), []).append(op)
    return sorted((_row(name, group, total_s) for name, group in grouped.items()), key=lambda row: -row.share)


def _row(name: str, ops: list[Op], total_s: float) -> Tally:
    forward = [op for op in ops if op.phase == "forward"]
    backward = [op for op in ops if op.phase == "backward"]
    time_s, flops = sum(op.ran.time_s for op in ops), sum(op.flops or 0 for op in ops)
    return Tally(
        name=name,
        forward_s=sum(op.ran.time_s for op in forward),
        backward_s=sum(op.ran.time_s for op in backward),
        share=time_s / total_s if total_s else 0.0,
        forward_calls=sum(op.ran.calls for op in forward),
        backward_calls=sum(op.ran.calls for op in backward),
        forward_flops=sum(op.flops or 0 for op in forward),
        backward_flops=sum(op.flops or 0 for op in backward),
        flops_per_s=flops / time_s if time_s else 0.0,
        bytes=sum(op.bytes for op in ops),
    )
