"""Why a step is slower than it should be: from numbers to sentences. ``trace`` measures the numbers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal

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
REMEDIES = {
    "conv": "Fast kernels take float32 and bfloat16 on the CPU, and the dtypes of cuDNN on CUDA: change the dtype, or "
    "express dilation and stride by other layers (a strided transposed convolution as upsampling and a convolution).",
    "attention": "Fused attention needs no dropout on the CPU, no mask that requires a gradient and a dtype that its "
    "kernels take; see torch.nn.attention.sdpa_kernel.",
    "custom function": "Declare the function rowprop.rowwise where it treats every row alike (docs/custom-code.md).",
    "dense": "Replace the op by one that treats each row alone (docs/support-matrix.md), or use the engine recompute "
    "where rows do not depend on one another.",
}
WAITS = {"_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select"}
COPIES = {"copy_", "clone", "_to_copy", "contiguous"}
CONVOLUTIONS = {"convolution", "convolution_backward", "_convolution", "convolution_overrideable"}
GRADIENTS = "parameters"
"""Stands for a module's path where gradients are added up."""


@dataclass
class Calls:
    """Calls of an op, and their time.

    Attributes:
        calls: Number per step.
        time_s: Seconds per step, those of ops called inside included.
    """

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


@dataclass(frozen=True)
class Finding:
    """Something that makes the step slower than it should be.

    Attributes:
        kind: ``"custom_function"``, ``"call_growth"``, ``"grouped_convolution"``, ``"slow_kernel"``, ``"slow_op"``,
            ``"copies"``, ``"casts"``, ``"host_sync"``, ``"densified"`` or ``"backward_forward_ratio"``.
        where: The op or function, and the module.
        evidence: A sentence with the numbers.
        remedy: A sentence on the change to make.
        share: Share of the step's time that the finding explains, up to 1. Shares of different findings may overlap.
    """

    kind: str
    where: str
    evidence: str
    remedy: str
    share: float


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


def _by_share(findings: list[Finding]) -> list[Finding]:
    return sorted(findings, key=lambda finding: -finding.share)


Found = Iterator[tuple[Finding, list[Op]]]
"""A finding, and the ops that it explains."""


def _custom_functions(seen: Observed) -> Found:
    for node in seen.nodes:
        excess_s = node.ran.time_s - 2 * node.forward_s
        times = node.ran.time_s / node.forward_s if node.forward_s else float("inf")
        if not node.function or excess_s < LEAST_SHARE * seen.total_s or times < TIMES_THE_FORWARD:
            continue
        inside = [
            op for op in seen.timed if op.direction == "backward" and op.module == node.module and op.node == node.name
        ]
        most = max(inside, key=lambda op: op.ran.time_s, default=None)
        calls = sum(op.ran.calls for op in inside)
        of_it = "" if most is None else f"; it calls {_count(calls, 'op')}, {most.op} ({most.ran.calls:,}) above all"
        yield (
            Finding(
                kind="custom_function",
                where=f"{node.function} in {node.module}",
                evidence=f"The backward of the custom function {node.function} takes {_percent(node.ran.time_s, seen)} "
                f"of the step and {times:.0f} times its forward ({_ms(node.ran.time_s)} against "
                f"{_ms(node.forward_s)}), while two gradients cost about twice the forward{of_it}.",
                remedy="Build the forward from torch's own differentiable ops, whose backwards are fused, or call the "
                "fused backward itself, e.g. torch.ops.aten.convolution_backward.",
                share=node.ran.time_s / seen.total_s,
            ),
            inside,
        )


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
            yield (
                Finding(
                    kind="call_growth",
                    where=f"{name} in the backward of {node.module}",
                    evidence=f"{name} is called {_count(calls.calls)} in {_times(node.ran.calls, node.name)}, and "
                    f"{_count(forward.get(name, 0))} in the whole forward; these calls take "
                    f"{_percent(calls.time_s, seen)} of the step.",
                    remedy="One call should do the work of all: batch the loop (over rows, channels or groups) into "
                    "one op, or leave the gradient to torch's own backward.",
                    share=calls.time_s / seen.total_s,
                ),
                [
                    op
                    for op in seen.timed
                    if op.module == node.module and op.node == node.name and name in {op.op, *op.inside}
                ],
            )


def _grouped(seen: Observed) -> Found:
    def parts(op: Op) -> tuple[str, int]:
        calls = {name: inside.calls for name, inside in op.inside.items()}
        kernels = {name: n for name, n in calls.items() if "conv" in name} or {"narrow": calls.get("narrow", 0)}
        name = max(kernels, key=lambda name: kernels[name])
        return name, kernels[name]

    for module, ops in _by_module(
        op for op in seen.timed if op.op in CONVOLUTIONS and parts(op)[1] >= PARTS * op.ran.calls
    ):
        time_s = _time_s(ops)
        if time_s >= LEAST_SHARE * seen.total_s:
            worst = max(ops, key=lambda op: op.ran.time_s)
            name, count = parts(worst)
            yield (
                Finding(
                    kind="grouped_convolution",
                    where=f"{worst.op} in {module}",
                    evidence=f"{worst.op} runs as a loop over its groups ({name} {_count(count)} in "
                    f"{_count(worst.ran.calls, 'call')}); the loop takes {_percent(time_s, seen)} of the step.",
                    remedy="Use fewer and wider groups, or a dtype for which the whole convolution is one kernel "
                    "(float32 or bfloat16 on the CPU).",
                    share=time_s / seen.total_s,
                ),
                ops,
            )


def _slow_kernels(seen: Observed) -> Found:
    found: dict[tuple[str, str], list[str]] = {}
    for module, name in seen.slow:
        found.setdefault((module, SLOW_KERNELS[slow_part(name)]), []).append(name)
    for (module, what), names in found.items():
        calls = sum(seen.slow[module, name].calls for name in names)
        time_s = sum(seen.slow[module, name].time_s for name in names)
        if time_s >= LEAST_SHARE * seen.total_s:
            yield (
                Finding(
                    kind="slow_kernel",
                    where=f"{', '.join(sorted(names))} in {module}",
                    evidence=f"{_count(calls, 'call')} of {what}: {_percent(time_s, seen)} of the step.",
                    remedy=REMEDIES["attention" if "attention" in what else "conv"],
                    share=time_s / seen.total_s,
                ),
                [op for op in seen.timed if op.module == module and {op.op, *op.inside} & set(names)],
            )


def slow_part(name: str) -> str:
    """The part of :data:`SLOW_KERNELS` that is in a kernel's name; empty for none."""
    return next((part for part in SLOW_KERNELS if part in name), "")


def _casts(seen: Observed) -> Found:
    casting = [op for op in seen.timed if op.casts]
    each_s = {id(op): op.ran.time_s * min(1.0, sum(op.casts.values()) / op.ran.calls) for op in casting}
    time_s = sum(each_s.values())
    if time_s < COPIED_SHARE * seen.total_s:
        return
    kinds: dict[str, int] = {}
    for op in casting:
        for kind, calls in op.casts.items():
            kinds[kind] = kinds.get(kind, 0) + calls
    module = _most(casting, each_s)
    listed = ", ".join(f"{kind} {_count(calls)}" for kind, calls in sorted(kinds.items(), key=lambda item: -item[1]))
    yield (
        Finding(
            kind="casts",
            where=f"_to_copy in {module}",
            evidence=f"Changing dtypes takes {_percent(time_s, seen)} of the step ({listed}), most of it in {module}.",
            remedy="Keep one dtype from layer to layer: cast inputs and weights once, or leave the choice to "
            "torch.autocast.",
            share=time_s / seen.total_s,
        ),
        casting,
    )


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
    time_s = sum(each_s.values())
    if time_s < COPIED_SHARE * seen.total_s:
        return
    module = _most(copying, each_s)
    worst = max((op for op in copying if op.module == module), key=lambda op: each_s[id(op)])
    yield (
        Finding(
            kind="copies",
            where=f"{worst.op} in {module}",
            evidence=f"{_count(calls, 'copy', 'copies')} of tensors take {_percent(time_s, seen)} of the step, most "
            f"of it in {module}.",
            remedy="Keep one memory format: model and images both channels-last or both not, and no permute, "
            "contiguous or clone between layers that the next layer undoes.",
            share=time_s / seen.total_s,
        ),
        [op for op in copying if op.op in COPIES],
    )


def _waits(seen: Observed) -> Found:
    if not seen.accelerator:
        return
    for module, ops in _by_module(op for op in seen.timed if op.op in WAITS):
        waited_s = sum(op.host_s for op in ops)
        step_s = seen.forward_s + seen.backward_s
        if waited_s >= WAITING_SHARE * step_s:
            names = ", ".join(sorted({op.op for op in ops}))
            yield (
                Finding(
                    kind="host_sync",
                    where=f"{names} in {module}",
                    evidence=f"The host waits for the accelerator in {_count(sum(op.ran.calls for op in ops), 'call')} "
                    f"of {names}, {_ms(waited_s)} of a step of {_ms(step_s)}; nothing is queued meanwhile.",
                    remedy="Keep decisions on the device (torch.where instead of if), and read numbers with .item() "
                    "only once the step is queued.",
                    share=waited_s / step_s,
                ),
                ops,
            )


def _slow_ops(seen: Observed, explained: set[int]) -> list[Finding]:
    found: list[Finding] = []
    grouped: dict[tuple[str, str], list[Op]] = {}
    for op in seen.timed:
        if id(op) not in explained and op.flops is not None:
            grouped.setdefault((op.op, op.module), []).append(op)
    for (name, module), ops in grouped.items():
        time_s, calls = _time_s(ops), sum(op.ran.calls for op in ops)
        flops, moved = sum(op.flops or 0 for op in ops), sum(op.bytes for op in ops)
        bound_s = max(flops / seen.flops_per_s, moved / seen.bytes_per_s)
        directions = " and ".join(dict.fromkeys(op.direction for op in ops))
        enough = time_s >= SLOW_SHARE * seen.total_s and time_s >= LEAST_CALL_S * calls
        if enough and moved and time_s >= TIMES_THE_BOUND * bound_s:
            found.append(
                Finding(
                    kind="slow_op",
                    where=f"{name} in {module}",
                    evidence=f"{name} takes {_percent(time_s, seen)} of the step in the {directions} of {module} "
                    f"({_count(calls, 'call')}, {_ms(time_s)}) for {flops:,} FLOPs and {moved:,} bytes: "
                    f"{time_s / bound_s:.0f} times the time that this machine's arithmetic and memory need.",
                    remedy="Look for an op that does the same in fewer or more regular steps, make its input smaller, "
                    "or move it out of the training step.",
                    share=time_s / seen.total_s,
                )
            )
    return found


def _dense(seen: Observed) -> list[Finding]:
    backward_share = seen.backward_s / (seen.forward_s + seen.backward_s)
    return [
        Finding(
            kind="densified",
            where=f"{place.op} in {place.module}",
            evidence=f"A sliced gradient goes back to all rows at {place.op} ({place.reason}): "
            f"{100 * place.time_share:.0f} % of the backward is not made cheaper by keeping fewer rows.",
            remedy=REMEDIES["custom function" if place.op == "custom function" else "dense"],
            share=place.time_share * backward_share,
        )
        for place in seen.dense
        if place.time_share * backward_share >= LEAST_SHARE
    ]


def _ratio(seen: Observed) -> list[Finding]:
    forward, backward = seen.flops("forward"), seen.flops("backward")
    if not forward:
        return []
    counted, measured = backward / forward, seen.backward_s / seen.forward_s
    excess_s = seen.backward_s - counted * seen.forward_s
    both = min(
        measured, seen.profiled_backward_s / seen.profiled_forward_s
    )  # other work may have disturbed one of the two
    if both < TIMES_THE_RATIO * max(1.0, counted) or excess_s < LEAST_EXCESS_S:
        return []
    slowest = max(seen.nodes, key=lambda node: node.ran.time_s, default=None)
    return [
        Finding(
            kind="backward_forward_ratio",
            where="the backward" if slowest is None else f"{slowest.name} in {slowest.module}",
            evidence=f"The backward takes {measured:.1f} times the forward ({_ms(seen.backward_s)} against "
            f"{_ms(seen.forward_s)}) for {counted:.1f} times its FLOPs.",
            remedy="See the other findings; without any, see the slowest ops of the backward in the table.",
            share=excess_s / (seen.forward_s + seen.backward_s),
        )
    ]


def _by_module(ops: Iterable[Op]) -> list[tuple[str, list[Op]]]:
    found: dict[str, list[Op]] = {}
    for op in ops:
        found.setdefault(op.module, []).append(op)
    return list(found.items())


def _most(ops: list[Op], each_s: dict[int, float]) -> str:
    """Path of the module with most of the time."""
    return max(_by_module(ops), key=lambda item: sum(each_s.get(id(op), 0.0) for op in item[1]))[0]


def _time_s(ops: Iterable[Op]) -> float:
    return sum(op.ran.time_s for op in ops)


def _percent(time_s: float, seen: Observed) -> str:
    return f"{100 * time_s / seen.total_s:.0f} %"


def _ms(time_s: float) -> str:
    return f"{1000 * time_s:.3g} ms"


def _count(calls: float, one: str = "time", many: str = "") -> str:
    number = round(calls)
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def _times(calls: float, name: str) -> str:
    return f"one {name}" if round(calls) == 1 else f"{round(calls):,} {name}"
