"""Why a step is slower than it should be: causes found in measurements, and their sentences in one table."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from rowprop.cost.where import DensifiedAt

Direction = Literal["forward", "backward"]

LEAST_SHARE = 0.1
"""A cause that explains less than this share of the step's time is no finding."""
SLOW_SHARE = 0.2
"""An op far below the machine's speed is a finding from this share of the step's time on."""
TIMES_THE_BOUND = 20
"""Such an op takes at least so many times as long as arithmetic and memory allow."""
LEAST_CALL_S = 1e-4
"""A shorter call takes little more than any call costs."""
COPIED_SHARE = 0.25
"""Copies and casts are a finding from this share of the step's time on."""
TIMES_THE_FORWARD = 4
"""A custom function's backward over its forward, at least; two gradients cost 2."""
CALLS_IN_A_NODE = 32
"""So many calls of one op in one backward node are a loop, ..."""
TIMES_THE_CALLS = 8
"""... if they are at least so many times the calls in the whole forward."""
PARTS = 8
"""A convolution that runs in at least so many parts is a loop over its groups."""
TIMES_THE_RATIO = 2.5
"""The measured backward/forward ratio over the counted one, at least. Kernels of a backward reach somewhat fewer FLOP/s
than those of a forward."""
LEAST_EXCESS_S = 1e-3
"""A backward that takes longer than its FLOPs say by less than this is no finding."""
WAITING_SHARE = 0.05
"""Waiting for the accelerator is a finding from this share of the step's time on."""

SLOW_KERNELS = {
    "slow_conv_dilated": "a dilated convolution that neither oneDNN nor cuDNN runs (one row at a time)",
    "slow_conv_transpose": "a transposed convolution that neither oneDNN nor cuDNN runs (one row at a time)",
    "slow_conv": "a convolution that neither oneDNN nor cuDNN runs (it unfolds its input, row by row)",
    "thnn_conv2d": "a convolution that neither oneDNN nor cuDNN runs (it unfolds its input, row by row)",
    "scaled_dot_product_attention_math": "attention that is not fused (it keeps all scores)",
}
"""The kind of a kernel, by a part of its name. The first part that fits counts."""
WAITS = {"_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select"}
COPIES = {"copy_", "clone", "_to_copy", "contiguous"}
CONVOLUTIONS = {"convolution", "convolution_backward", "_convolution", "convolution_overrideable"}
GRADIENTS = "parameters"
"""Stands for a module's path where gradients are added up."""


# --- what was measured ------------------------------------------------------------------------------------------------


@dataclass
class Calls:
    """Calls of an op per step, and their seconds, those of ops called inside included."""

    calls: int = 0
    time_s: float = 0.0


@dataclass
class Op:
    """One op of one module in one direction, per step.

    Attributes:
        direction: ``"forward"`` or ``"backward"``.
        module: Path of the innermost module.
        node: The backward node; empty in the forward.
        op: The op's name, without ``aten::``.
        ran: Calls, and the time of the device where there is an accelerator, else of the CPU.
        host_s: Seconds that the host spent in the op.
        flops: Counted FLOPs; None where no formula is known.
        bytes: Bytes read and written, each operand once.
        casts: Number of calls that changed the dtype, by their kind, e.g. ``"float32 to float64"``.
        inside: Ops that ran inside, at any depth, by name.
    """

    direction: Direction
    module: str
    node: str
    op: str
    ran: Calls = field(default_factory=Calls)
    host_s: float = 0.0
    flops: int | None = 0
    bytes: int = 0
    casts: dict[str, int] = field(default_factory=dict[str, int])
    inside: dict[str, Calls] = field(default_factory=dict[str, Calls])


@dataclass
class Node:
    """One kind of backward node of one module, per step.

    Attributes:
        name: The name that autograd gives it.
        module: Path of the module whose forward made it.
        ran: Calls and time of the node.
        function: Name of the custom ``autograd.Function``; empty for torch's own nodes.
        forward_s: Seconds of that function's forward.
        inside: Ops that ran inside, at any depth, by name.
    """

    name: str
    module: str
    ran: Calls = field(default_factory=Calls)
    function: str = ""
    forward_s: float = 0.0
    inside: dict[str, Calls] = field(default_factory=dict[str, Calls])


@dataclass(frozen=True)
class Observed:
    """The measurements of a step.

    Attributes:
        forward_s: Time of the forward without a profiler: the least of several, because other work of a machine only
            adds time.
        backward_s: Time of the backward without a profiler, likewise.
        profiled_forward_s: Time of the forward under the profiler: the sum of the least times of its parts.
        profiled_backward_s: Time of the backward under the profiler, likewise.
        ops: The ops that ran. Ops without calls were only counted; they have FLOPs and bytes but no time.
        nodes: The backward's nodes.
        slow: Calls of :data:`SLOW_KERNELS`, by module and name. Of kernels inside one another the outermost counts.
        dense: Where a sliced gradient went back to all rows.
        flops_per_s: FLOPs per second that the machine reaches in a large matrix product.
        bytes_per_s: Bytes per second that it reaches in a large copy, read and written.
        accelerator: Whether the ops run on one.
    """

    forward_s: float
    backward_s: float
    profiled_forward_s: float
    profiled_backward_s: float
    ops: list[Op]
    nodes: list[Node] = field(default_factory=list[Node])
    slow: dict[tuple[str, str], Calls] = field(default_factory=dict[tuple[str, str], Calls])
    dense: list[DensifiedAt] = field(default_factory=list[DensifiedAt])
    flops_per_s: float = float("inf")
    bytes_per_s: float = float("inf")
    accelerator: bool = False

    @property
    def timed(self) -> list[Op]:
        """The ops that the profiler saw."""
        return [op for op in self.ops if op.ran.calls]

    @property
    def total_s(self) -> float:
        """The time of which shares are taken."""
        return self.profiled_forward_s + self.profiled_backward_s

    def flops(self, direction: Direction) -> int:
        """Counted FLOPs of the forward or of the backward."""
        return sum(op.flops or 0 for op in self.ops if op.direction == direction)


# --- what was found ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Finding:
    """Something that makes the step slower than it should be.

    Attributes:
        kind: A key of :data:`SENTENCES`.
        where: The op or function, and the module.
        share: Share of the step's time that the finding explains, up to 1. Shares of different findings may overlap.
        figures: The names and numbers of its sentence.
    """

    kind: str
    where: str
    share: float
    figures: dict[str, Any]

    @property
    def evidence(self) -> str:
        """A sentence with the numbers."""
        return f"{100 * self.share:.0f} % of the step: {SENTENCES[self.kind][0].format(**self.figures)}"

    @property
    def remedy(self) -> str:
        """A sentence on the change to make."""
        return SENTENCES[self.kind][1]

    def to_dict(self) -> dict[str, Any]:
        """As numbers, texts and dicts that JSON holds."""
        return asdict(self) | {"evidence": self.evidence, "remedy": self.remedy}


SENTENCES = {
    "custom_function": (
        "the backward takes {times:.0f} times its forward ({ms:.3g} ms against {forward_ms:.3g} ms), while two "
        "gradients cost about twice the forward; it calls {calls:,} ops, above all {most}.",
        "Build the forward from torch's own ops, or call a fused backward, e.g. torch.ops.aten.convolution_backward.",
    ),
    "call_growth": (
        "{op} is called {calls:,} times in {nodes:,} {node}, and {forward_calls:,} times in the whole forward.",
        "Make the loop (over rows, channels or groups) one op, or leave the gradient to torch's own backward.",
    ),
    "grouped_convolution": (
        "{op} runs as a loop over its groups ({parts:,} calls of {part} in {calls:,}).",
        "Use fewer and wider groups, or a dtype with one kernel for all (float32 or bfloat16 on the CPU).",
    ),
    "slow_kernel": (
        "{calls:,} calls of {what}.",
        "Convolutions: float32 or bfloat16 on the CPU, cuDNN's dtypes on CUDA, or other layers in place of dilation "
        "and stride. Attention: no dropout on the CPU, no mask that requires a gradient.",
    ),
    "casts": (
        "changing dtypes ({kinds}), most of it in {module}.",
        "Keep one dtype from layer to layer: cast inputs and weights once, or leave the choice to torch.autocast.",
    ),
    "copies": (
        "{calls:,} copies of tensors, most of the time in {module}.",
        "Keep one memory format (model and images channels-last, or both not), without permute, contiguous or clone "
        "between layers that the next layer undoes.",
    ),
    "host_sync": (
        "the host waits for the accelerator in {calls:,} calls, {ms:.3g} ms of {step_ms:.3g} ms, and queues nothing.",
        "Keep decisions on the device (torch.where, not if), and call .item() only once the step is queued.",
    ),
    "slow_op": (
        "{calls:,} calls in the {directions} take {ms:.3g} ms for {flops:,} FLOPs and {bytes:,} bytes: {times:.0f} "
        "times the time that this machine's arithmetic and memory need.",
        "Find an op that does the same in fewer steps, make its input smaller, or move it out of the training step.",
    ),
    "densified": (
        "a sliced gradient goes back to all rows at {op} ({reason}), so {percent:.0f} % of the backward is not made "
        "cheaper by keeping fewer rows.",
        "Replace the op by one that treats each row alone (docs/support-matrix.md); declare a custom function "
        "rowprop.rowwise (docs/custom-code.md); or use the engine recompute where rows do not depend on one another.",
    ),
    "backward_forward_ratio": (
        "the backward takes {measured:.1f} times the forward ({ms:.3g} ms against {forward_ms:.3g} ms) for "
        "{counted:.1f} times its FLOPs.",
        "See the other findings; without any, see the slowest ops of the backward in the table.",
    ),
}
"""By kind of finding: the evidence, after the share of the step, and the remedy."""

Found = Iterator[tuple[Finding, list[Op]]]
"""A finding, and the ops that it explains."""


def diagnose(seen: Observed) -> list[Finding]:
    """Find the causes that make a step slow.

    Args:
        seen: The measurements.

    Returns:
        The causes of a slow step, largest share of its time first; then the ops that keep a selection from making the
        step cheaper; then the backward/forward ratio where it is off, because it sums up the others. Empty for a
        healthy step.
    """
    causes: list[Finding] = []
    explained: set[int] = set()
    for check in (_custom_functions, _call_growth, _grouped, _slow_kernels, _casts, _copies, _waits):
        for finding, ops in check(seen):
            causes.append(finding)
            explained |= {id(op) for op in ops}
    causes += _slow_ops(seen, explained)
    return [*_by_share(causes), *_by_share(_dense(seen)), *_ratio(seen)]


def _by_share(findings: Iterable[Finding]) -> list[Finding]:
    return sorted(findings, key=lambda finding: -finding.share)


def _custom_functions(seen: Observed) -> Found:
    for node in seen.nodes:
        excess_s = node.ran.time_s - 2 * node.forward_s
        times = node.ran.time_s / node.forward_s if node.forward_s else float("inf")
        if not node.function or excess_s < LEAST_SHARE * seen.total_s or times < TIMES_THE_FORWARD:
            continue
        inside = _ops_of(seen, node)
        most = max(inside, key=lambda op: op.ran.time_s, default=None)
        figures = {
            "times": times, "ms": 1000 * node.ran.time_s, "forward_ms": 1000 * node.forward_s, "calls": _calls(inside),
            "most": "none" if most is None else f"{most.op} ({most.ran.calls:,})",
        }  # fmt: skip
        where = f"{node.function} in {node.module}"
        yield Finding("custom_function", where, node.ran.time_s / seen.total_s, figures), inside


def _call_growth(seen: Observed) -> Found:
    forward: dict[str, int] = {}
    for op in seen.timed:
        if op.direction == "forward":
            for name, calls in [(op.op, op.ran), *op.inside.items()]:
                forward[name] = forward.get(name, 0) + calls.calls
    for node in seen.nodes:
        loops = {
            name: calls
            for name, calls in node.inside.items()
            if calls.calls >= CALLS_IN_A_NODE * node.ran.calls
            and calls.calls >= TIMES_THE_CALLS * forward.get(name, 0)
            and calls.time_s >= LEAST_SHARE * seen.total_s
        }
        if loops:
            name, calls = max(loops.items(), key=lambda item: item[1].time_s)
            figures = {
                "op": name, "calls": calls.calls, "node": node.name, "nodes": node.ran.calls,
                "forward_calls": forward.get(name, 0),
            }  # fmt: skip
            where = f"{name} in the backward of {node.module}"
            ops = [op for op in _ops_of(seen, node) if name in {op.op, *op.inside}]
            yield Finding("call_growth", where, calls.time_s / seen.total_s, figures), ops


def _grouped(seen: Observed) -> Found:
    def parts(op: Op) -> tuple[int, str]:
        kernels = {name: inside.calls for name, inside in op.inside.items() if "conv" in name}
        kernels = kernels or {"narrow": op.inside.get("narrow", Calls()).calls}
        return max((calls, name) for name, calls in kernels.items())

    looping = [op for op in seen.timed if op.op in CONVOLUTIONS and parts(op)[0] >= PARTS * op.ran.calls]
    for module, ops in _by_module(looping).items():
        share = _time_s(ops) / seen.total_s
        if share >= LEAST_SHARE:
            worst = max(ops, key=lambda op: op.ran.time_s)
            count, name = parts(worst)
            figures = {"op": worst.op, "calls": worst.ran.calls, "part": name, "parts": count}
            yield Finding("grouped_convolution", f"{worst.op} in {module}", share, figures), ops


def _slow_kernels(seen: Observed) -> Found:
    found: dict[tuple[str, str], list[str]] = {}
    for module, name in seen.slow:
        found.setdefault((module, SLOW_KERNELS[slow_part(name)]), []).append(name)
    for (module, what), names in found.items():
        share = sum(seen.slow[module, name].time_s for name in names) / seen.total_s
        if share >= LEAST_SHARE:
            figures = {"what": what, "calls": sum(seen.slow[module, name].calls for name in names)}
            ops = [op for op in seen.timed if op.module == module and {op.op, *op.inside} & set(names)]
            yield Finding("slow_kernel", f"{', '.join(sorted(names))} in {module}", share, figures), ops


def slow_part(name: str) -> str:
    """The part of :data:`SLOW_KERNELS` that is in a kernel's name; empty for none."""
    return next((part for part in SLOW_KERNELS if part in name), "")


def _casts(seen: Observed) -> Found:
    casting = [op for op in seen.timed if op.casts]
    each_s = {id(op): op.ran.time_s * min(1.0, sum(op.casts.values()) / op.ran.calls) for op in casting}
    share = sum(each_s.values()) / seen.total_s
    if casting and share >= COPIED_SHARE:
        kinds: dict[str, int] = {}
        for op in casting:
            for kind, calls in op.casts.items():
                kinds[kind] = kinds.get(kind, 0) + calls
        listed = ", ".join(f"{kind} {kinds[kind]:,}" for kind in sorted(kinds, key=lambda kind: -kinds[kind]))
        module = _most(casting, each_s)
        yield Finding("casts", f"_to_copy in {module}", share, {"kinds": listed, "module": module}), casting


def _copies(seen: Observed) -> Found:
    each_s: dict[int, float] = {}
    copying: list[Op] = []
    calls = 0
    for op in seen.timed:
        if op.op in COPIES:
            copied, casts = op.ran, sum(op.casts.values())
        else:  # a kernel copies operands that are not in its order
            copied, casts = op.inside.get("copy_", Calls()), 0
        if copied.calls > casts:
            copying.append(op)
            each_s[id(op)] = copied.time_s * (1 - casts / copied.calls)
            calls += copied.calls - casts
    share = sum(each_s.values()) / seen.total_s
    if copying and share >= COPIED_SHARE:
        module = _most(copying, each_s)
        worst = max((op for op in copying if op.module == module), key=lambda op: each_s[id(op)])
        figures = {"calls": calls, "module": module}
        yield Finding("copies", f"{worst.op} in {module}", share, figures), [op for op in copying if op.op in COPIES]


def _waits(seen: Observed) -> Found:
    if not seen.accelerator:
        return
    step_s = seen.forward_s + seen.backward_s
    for module, ops in _by_module(op for op in seen.timed if op.op in WAITS).items():
        waited_s = sum(op.host_s for op in ops)
        if waited_s >= WAITING_SHARE * step_s:
            names = ", ".join(sorted({op.op for op in ops}))
            figures = {"calls": _calls(ops), "ms": 1000 * waited_s, "step_ms": 1000 * step_s}
            yield Finding("host_sync", f"{names} in {module}", waited_s / step_s, figures), ops


def _slow_ops(seen: Observed, explained: set[int]) -> Iterator[Finding]:
    grouped: dict[tuple[str, str], list[Op]] = {}
    for op in seen.timed:
        if id(op) not in explained and op.flops is not None:
            grouped.setdefault((op.op, op.module), []).append(op)
    for (name, module), ops in grouped.items():
        time_s, calls = _time_s(ops), _calls(ops)
        flops, moved = sum(op.flops or 0 for op in ops), sum(op.bytes for op in ops)
        bound_s = max(flops / seen.flops_per_s, moved / seen.bytes_per_s)
        enough = time_s >= SLOW_SHARE * seen.total_s and time_s >= LEAST_CALL_S * calls
        if enough and moved and time_s >= TIMES_THE_BOUND * bound_s:
            directions = " and ".join(dict.fromkeys(op.direction for op in ops))
            figures = {
                "directions": directions, "calls": calls, "ms": 1000 * time_s,
                "flops": flops, "bytes": moved, "times": time_s / bound_s,
            }  # fmt: skip
            yield Finding("slow_op", f"{name} in {module}", time_s / seen.total_s, figures)


def _dense(seen: Observed) -> Iterator[Finding]:
    backward_share = seen.backward_s / (seen.forward_s + seen.backward_s)
    for place in seen.dense:
        share = place.time_share * backward_share
        if share >= LEAST_SHARE:
            figures = {"op": place.op, "reason": place.reason, "percent": 100 * place.time_share}
            yield Finding("densified", f"{place.op} in {place.module}", share, figures)


def _ratio(seen: Observed) -> Iterator[Finding]:
    forward, backward = seen.flops("forward"), seen.flops("backward")
    if not forward:
        return
    counted, measured = backward / forward, seen.backward_s / seen.forward_s
    excess_s = seen.backward_s - counted * seen.forward_s
    # Other work may have disturbed one of the two.
    both = min(measured, seen.profiled_backward_s / seen.profiled_forward_s)
    if both >= TIMES_THE_RATIO * max(1.0, counted) and excess_s >= LEAST_EXCESS_S:
        slowest = max(seen.nodes, key=lambda node: node.ran.time_s, default=None)
        where = "the backward" if slowest is None else f"{slowest.name} in {slowest.module}"
        figures = {
            "measured": measured, "counted": counted, "ms": 1000 * seen.backward_s,
            "forward_ms": 1000 * seen.forward_s,
        }  # fmt: skip
        share = excess_s / (seen.forward_s + seen.backward_s)
        yield Finding("backward_forward_ratio", where, share, figures)


def _ops_of(seen: Observed, node: Node) -> list[Op]:
    """The ops that a backward node ran."""
    return [op for op in seen.timed if op.module == node.module and op.node == node.name]


def _by_module(ops: Iterable[Op]) -> dict[str, list[Op]]:
    found: dict[str, list[Op]] = {}
    for op in ops:
        found.setdefault(op.module, []).append(op)
    return found


def _most(ops: list[Op], each_s: dict[int, float]) -> str:
    """Path of the module with most of the time."""
    seconds = {module: sum(each_s[id(op)] for op in own) for module, own in _by_module(ops).items()}
    return max(seconds, key=lambda module: seconds[module])


def _time_s(ops: Iterable[Op]) -> float:
    return sum(op.ran.time_s for op in ops)


def _calls(ops: Iterable[Op]) -> int:
    return sum(op.ran.calls for op in ops)
