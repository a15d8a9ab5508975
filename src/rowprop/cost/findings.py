"""Why a step is slower than it should be: causes found in measurements, and their sentences in one table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, TypeVar

from rowprop.cost.zeros import ZeroPlace

Direction = Literal["forward", "backward"]
Item = TypeVar("Item")
Key = TypeVar("Key", bound=Hashable)

# Limits for a finding; shares are shares of the step's time.
LEAST_SHARE = 0.1  # what a cause explains
SLOW_SHARE = 0.2  # an op far below the machine's speed
COPIED_SHARE = 0.25  # copies, and casts
WAITING_SHARE = 0.05  # waiting for the accelerator
TIMES_THE_BOUND = 20  # time of a slow op over the bound from arithmetic and memory
LEAST_CALL_S = 1e-4  # a shorter call takes little more than any call costs
TIMES_THE_FORWARD = 4  # a custom function's backward over its forward; two gradients cost 2
CALLS_IN_A_NODE = 32  # this many calls of one op in one backward node are a loop, ...
TIMES_THE_CALLS = 8  # ... if they are this many times the calls in the whole forward
PARTS = 8  # a convolution that runs in this many parts is a loop over its groups
# The measured backward/forward ratio over the counted one. A backward's kernels reach fewer FLOP/s than a forward's.
TIMES_THE_RATIO = 2.5
LEAST_EXCESS_S = 1e-3  # by which a backward takes longer than its FLOPs say

# The kind of a kernel, by a part of its name; the first part that fits counts.
SLOW_KERNELS = {
    "slow_conv_dilated": "a dilated convolution that neither oneDNN nor cuDNN runs (one row at a time)",
    "slow_conv_transpose": "a transposed convolution that neither oneDNN nor cuDNN runs (one row at a time)",
    "slow_conv": "a convolution that neither oneDNN nor cuDNN runs (it unfolds its input, row by row)",
    "thnn_conv2d": "a convolution that neither oneDNN nor cuDNN runs (it unfolds its input, row by row)",
    "scaled_dot_product_attention_math": "attention that is not fused (it keeps all scores)",
}
WAITS = {"_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select"}
COPIES = {"copy_", "clone", "_to_copy", "contiguous"}
CONVOLUTIONS = {"convolution", "convolution_backward", "_convolution", "convolution_overrideable"}
GRADIENTS = "parameters"  # used as the module's path where gradients are added up


@dataclass
class Calls:
    """Calls of an op per step, and their seconds, those of ops called inside included."""

    calls: int = 0
    time_s: float = 0.0


@dataclass
class Op:
    """One op of one module in one direction, per step."""

    direction: Direction
    module: str
    node: str  # the backward node; empty in the forward
    op: str
    ran: Calls = field(default_factory=Calls)  # in the device's time where there is an accelerator, else the CPU's
    host_s: float = 0.0
    flops: int | None = 0  # None without a known formula
    bytes: int = 0  # read or written, each operand once
    casts: dict[str, int] = field(default_factory=dict[str, int])  # calls by the change, e.g. "float32 to float64"
    inside: dict[str, Calls] = field(default_factory=dict[str, Calls])  # the ops that ran inside, at any depth


@dataclass
class Node:
    """One kind of backward node of the module whose forward made it, per step."""

    name: str
    module: str
    ran: Calls = field(default_factory=Calls)
    function: str = ""  # the custom ``autograd.Function``; empty for torch's own nodes
    forward_s: float = 0.0  # what its forward took


@dataclass(frozen=True)
class Observed:
    """The measurements of a step, of which other work of the machine disturbed some."""

    forward_s: float  # of the step whose ratio of backward to forward is the median; so is the next
    backward_s: float
    profiled_forward_s: float  # the sum of the least times of its parts; so is the next
    profiled_backward_s: float
    ops: list[Op]  # those without calls were only counted: they have no time
    nodes: list[Node] = field(default_factory=list[Node])
    flops_per_s: float = float("inf")  # what the machine reaches in a large matrix product
    bytes_per_s: float = float("inf")  # in a large copy, read and written
    accelerator: bool = False
    zeros: ZeroPlace | None = None  # where skipping zeros would save most

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


@dataclass(frozen=True)
class Finding:
    """Something that makes the step slower than it should be, at ``where``: an op or function, and its module."""

    kind: str  # a key of SENTENCES
    where: str
    share: float  # of the step's time that it explains, up to 1; shares of different findings may overlap
    figures: dict[str, Any]  # the names and numbers of its sentence

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


# By kind of finding: the evidence, after the share of the step, and the remedy.
SENTENCES = {
    "custom_function": (
        "the backward takes {times:.0f} times its forward ({ms:.3g} ms against {forward_ms:.3g} ms), while two "
        "gradients cost about twice the forward; it calls {calls:,} ops, most of the time {most}.",
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
    "zeros": (
        "{percent:.0f} % of the {unit}s there have no gradient; rowprop.skip_zeros there saves {saves:.0f} % of the "
        "backward's FLOPs, exactly.",
        "Call rowprop.skip_zeros(model), or give it that module; docs/zeros.md says what else it saves.",
    ),
    "backward_forward_ratio": (
        "the backward takes {measured:.1f} times the forward ({ms:.3g} ms against {forward_ms:.3g} ms) for "
        "{counted:.1f} times its FLOPs.",
        "See the other findings; without any, see the slowest ops of the backward in the table.",
    ),
}
Found = Iterator[tuple[Finding, list[Op]]]  # findings, each with the ops that it explains


def diagnose(seen: Observed) -> list[Finding]:
    """What makes a step slow, largest share of its time first; nothing for a healthy step.

    The backward/forward ratio comes last, where it is off, because it sums up the others.
    """
    checks = (_custom_functions, _call_growth, _grouped, _slow_kernels, _casts, _copies, _waits)
    found = [each for check in checks for each in check(seen)]
    causes = [finding for finding, _ in found]
    causes += [*_slow_ops(seen, explained={id(op) for _, ops in found for op in ops}), *_zeros(seen)]
    return [*sorted(causes, key=lambda finding: -finding.share), *_ratio(seen)]


def _custom_functions(seen: Observed) -> Found:
    for node in seen.nodes:
        excess_s = node.ran.time_s - 2 * node.forward_s
        times = node.ran.time_s / node.forward_s if node.forward_s else float("inf")
        if node.function and excess_s >= LEAST_SHARE * seen.total_s and times >= TIMES_THE_FORWARD:
            ops = _ops_of(seen, node)
            slowest = max(ops, key=lambda op: op.ran.time_s, default=None)
            figures = {
                "times": times, "ms": 1000 * node.ran.time_s, "forward_ms": 1000 * node.forward_s, "calls": _calls(ops),
                "most": f"{slowest.op} ({slowest.ran.calls:,})" if slowest else "",
            }  # fmt: skip
            where = f"{node.function} in {node.module}"
            yield Finding("custom_function", where, node.ran.time_s / seen.total_s, figures), ops


def _call_growth(seen: Observed) -> Found:
    forward = _named(op for op in seen.timed if op.direction == "forward")
    for node in seen.nodes:
        ops = _ops_of(seen, node)
        growth = [
            (inside.time_s, name, inside.calls, in_forward)
            for name, inside in _named(ops).items()
            if inside.calls >= CALLS_IN_A_NODE * node.ran.calls
            and inside.time_s >= LEAST_SHARE * seen.total_s
            and inside.calls >= TIMES_THE_CALLS * (in_forward := forward.get(name, Calls()).calls)
        ]
        if growth:
            time_s, name, calls, in_forward = max(growth)
            figures = {
                "op": name, "calls": calls, "node": node.name, "nodes": node.ran.calls, "forward_calls": in_forward,
            }  # fmt: skip
            where = f"{name} in the backward of {node.module}"
            finding = Finding("call_growth", where, time_s / seen.total_s, figures)
            yield finding, [op for op in ops if name in {op.op, *op.inside}]


def _grouped(seen: Observed) -> Found:
    def parts(op: Op) -> tuple[int, str]:
        kernels = [(inside.calls, name) for name, inside in op.inside.items() if "conv" in name]
        return max(kernels, default=(op.inside.get("narrow", Calls()).calls, "narrow"))

    looping = [op for op in seen.timed if op.op in CONVOLUTIONS and parts(op)[0] >= PARTS * op.ran.calls]
    for module, ops in grouped(looping, lambda op: op.module).items():
        share = sum(op.ran.time_s for op in ops) / seen.total_s
        if share >= LEAST_SHARE:
            worst = max(ops, key=lambda op: op.ran.time_s)
            count, name = parts(worst)
            figures = {"op": worst.op, "calls": worst.ran.calls, "part": name, "parts": count}
            yield Finding("grouped_convolution", f"{worst.op} in {module}", share, figures), ops


def _slow_kernels(seen: Observed) -> Found:
    def kind(name: str) -> str:
        return next((what for part, what in SLOW_KERNELS.items() if part in name), "")

    for what in dict.fromkeys(SLOW_KERNELS.values()):
        slow: list[tuple[Op, str, Calls]] = []
        for op in seen.timed:
            kernels = [(name, calls) for name, calls in _named([op]).items() if kind(name) == what]
            if kernels:  # of kernels inside one another the outermost, which takes longest, counts
                slow.append((op, *max(kernels, key=lambda item: item[1].time_s)))
        for module, here in grouped(slow, lambda entry: entry[0].module).items():
            ops, names, calls = zip(*here, strict=True)
            share = sum(ran.time_s for ran in calls) / seen.total_s
            if share >= LEAST_SHARE:
                figures = {"what": what, "calls": sum(ran.calls for ran in calls)}
                yield Finding("slow_kernel", f"{', '.join(sorted(set(names)))} in {module}", share, figures), list(ops)


def _casts(seen: Observed) -> Found:
    casting = [(op, op.ran.time_s * min(1.0, sum(op.casts.values()) / op.ran.calls)) for op in seen.timed if op.casts]
    share = sum(time_s for _, time_s in casting) / seen.total_s
    if casting and share >= COPIED_SHARE:
        kinds = sum((Counter(op.casts) for op, _ in casting), Counter[str]()).most_common()
        module = _worst(casting).module
        figures = {"kinds": ", ".join(f"{kind} {calls:,}" for kind, calls in kinds), "module": module}
        yield Finding("casts", f"_to_copy in {module}", share, figures), [op for op, _ in casting]


def _copies(seen: Observed) -> Found:
    copying: list[tuple[Op, float]] = []
    calls = 0
    for op in seen.timed:
        # A kernel copies operands that are not in its order.
        copied = op.ran if op.op in COPIES else op.inside.get("copy_", Calls())
        copies = copied.calls - sum(op.casts.values())
        if copies > 0:
            copying.append((op, copied.time_s * copies / copied.calls))
            calls += copies
    share = sum(time_s for _, time_s in copying) / seen.total_s
    if copying and share >= COPIED_SHARE:
        worst = _worst(copying)
        finding = Finding("copies", f"{worst.op} in {worst.module}", share, {"calls": calls, "module": worst.module})
        yield finding, [op for op, _ in copying if op.op in COPIES]


def _waits(seen: Observed) -> Found:
    step_s = seen.forward_s + seen.backward_s
    waiting = [op for op in seen.timed if seen.accelerator and op.op in WAITS]
    for module, ops in grouped(waiting, lambda op: op.module).items():
        waited_s = sum(op.host_s for op in ops)
        if waited_s >= WAITING_SHARE * step_s:
            where = f"{', '.join(sorted({op.op for op in ops}))} in {module}"
            figures = {"calls": _calls(ops), "ms": 1000 * waited_s, "step_ms": 1000 * step_s}
            yield Finding("host_sync", where, waited_s / step_s, figures), ops


def _slow_ops(seen: Observed, explained: set[int]) -> Iterator[Finding]:
    rest = (op for op in seen.timed if id(op) not in explained and op.flops is not None)
    for (name, module), ops in grouped(rest, lambda op: (op.op, op.module)).items():
        time_s, calls = sum(op.ran.time_s for op in ops), _calls(ops)
        flops, moved = sum(op.flops or 0 for op in ops), sum(op.bytes for op in ops)
        bound_s = max(flops / seen.flops_per_s, moved / seen.bytes_per_s)
        enough = time_s >= SLOW_SHARE * seen.total_s and time_s >= LEAST_CALL_S * calls
        if enough and moved and time_s >= TIMES_THE_BOUND * bound_s:
            figures = {
                "directions": " and ".join(dict.fromkeys(op.direction for op in ops)), "calls": calls,
                "ms": 1000 * time_s, "flops": flops, "bytes": moved, "times": time_s / bound_s,
            }  # fmt: skip
            yield Finding("slow_op", f"{name} in {module}", time_s / seen.total_s, figures)


def _zeros(seen: Observed) -> Iterator[Finding]:
    place = seen.zeros
    share = 0.0 if place is None else place.saves * seen.backward_s / (seen.forward_s + seen.backward_s)
    if place is not None and share >= LEAST_SHARE:
        zero = place.zero_rows if place.zero_tokens is None else place.zero_tokens
        figures = {"percent": 100 * zero, "unit": place.unit, "saves": 100 * place.saves}
        yield Finding("zeros", f"the gradient of {place.module}", share, figures)


def _ratio(seen: Observed) -> Iterator[Finding]:
    counted = seen.flops("backward") / max(1, seen.flops("forward"))
    measured = seen.backward_s / seen.forward_s
    excess_s = seen.backward_s - counted * seen.forward_s
    # Other work may have disturbed one of the two.
    both = min(measured, seen.profiled_backward_s / seen.profiled_forward_s)
    if seen.flops("forward") and both >= TIMES_THE_RATIO * max(1.0, counted) and excess_s >= LEAST_EXCESS_S:
        slowest = max(seen.nodes, key=lambda node: node.ran.time_s, default=None)
        where = "the backward" if slowest is None else f"{slowest.name} in {slowest.module}"
        milliseconds = {"ms": 1000 * seen.backward_s, "forward_ms": 1000 * seen.forward_s}
        figures = {"measured": measured, "counted": counted, **milliseconds}
        yield Finding("backward_forward_ratio", where, excess_s / (seen.forward_s + seen.backward_s), figures)


def _ops_of(seen: Observed, node: Node) -> list[Op]:
    return [op for op in seen.timed if op.module == node.module and op.node == node.name]


def _named(ops: Iterable[Op]) -> dict[str, Calls]:
    """Calls and seconds of ops and of the ops inside them, by name."""
    found: dict[str, Calls] = {}
    for name, ran in (item for op in ops for item in ((op.op, op.ran), *op.inside.items())):
        entry = found.setdefault(name, Calls())
        entry.calls += ran.calls
        entry.time_s += ran.time_s
    return found


def grouped(items: Iterable[Item], key: Callable[[Item], Key]) -> dict[Key, list[Item]]:
    """The items with the same key together, keys and items in the order in which they come."""
    found: dict[Key, list[Item]] = {}
    for item in items:
        found.setdefault(key(item), []).append(item)
    return found


def _worst(times_s: list[tuple[Op, float]]) -> Op:
    """Of the module with most of the time, the op with most of it."""
    modules = grouped(times_s, lambda item: item[0].module).values()
    worst = max(modules, key=lambda module: sum(time_s for _, time_s in module))
    return max(worst, key=lambda item: item[1])[0]


def _calls(ops: Iterable[Op]) -> int:
    return sum(op.ran.calls for op in ops)
