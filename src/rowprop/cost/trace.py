"""A step op by op: torch's profiler gives the time, a count gives FLOPs and bytes, hooks give the module."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd import DeviceType  # pyright: ignore[reportPrivateImportUsage]
from torch.autograd.profiler import record_function
from torch.utils._pytree import tree_leaves

from rowprop.cost.elementwise import is_view
from rowprop.cost.findings import COPIES, GRADIENTS, Calls, Direction, Node, Op, slow_part
from rowprop.cost.flops import Counter
from rowprop.cost.where import OUTSIDE, Modules, around_forwards, current_node

OUTSIDE_OF_OPS = "Python and autograd"
"""Stands for an op's name where the time is spent in none."""
MARK = "rowprop::"
MODULE = MARK + "module::"
ENGINE = "autograd::engine::evaluate_function: "
ACCUMULATE = "torch::autograd::AccumulateGrad"
RENAMED = {"_native_batch_norm_legit": "native_batch_norm"}
"""Names under which the profiler lists an op, by the name that the counter sees."""
Stack = tuple[str, ...]
"""Where time was spent: direction, modules from the outermost, backward node, op, and the ops that it called."""


class Trace:
    """The ops, backward nodes and slow kernels of a step, with their times.

    Several like steps are read. Each stack counts with the step in which it took least, without the stacks below it:
    other work of a machine only adds time, and does not hit the same place in every step. All other times are sums of
    these.

    Args:
        modules: Knows the module of a backward node.
        functions: Names of the custom ``autograd.Function``s, by the name of their backward node.
        accelerator: Whether the device's time counts instead of the CPU's.

    Attributes:
        ops: By direction, module, backward node and name.
        nodes: By name and module.
        slow: Calls of slow kernels, by module and name.
        stacks: Seconds of each stack, without the stacks below it.
        uncounted: Number of calls of each op that has no formula.
    """

    def __init__(self, modules: Modules, functions: dict[str, str], accelerator: bool) -> None:
        self.modules = modules
        self.functions = functions
        self.accelerator = accelerator
        self.ops: dict[tuple[Direction, str, str, str], Op] = {}
        self.nodes: dict[tuple[str, str], Node] = {}
        self.slow: dict[tuple[str, str], Calls] = {}
        self.stacks: dict[Stack, float] = {}
        self.uncounted: dict[str, int] = {}
        self._frames: dict[Stack, _Frame] = {}

    def read(self, events: Sequence[Any]) -> None:
        """Read the profiler's events: the calls of the first step, and the times of all steps."""
        roots = [e for e in events if e.cpu_parent is None and e.device_type == DeviceType.CPU]
        begins = [e.time_range.start for e in roots if e.name == MARK + "forward"]
        ends = [e.time_range.end for e in roots if e.name == MARK + "backward"]
        steps: list[Trace] = []
        for begin, end in zip(begins, ends, strict=True):
            step = Trace(self.modules, self.functions, self.accelerator) if steps else self
            step._read_step(event for event in roots if begin <= event.time_range.start < end)
            steps.append(step)
        for stack, frame in self._frames.items():
            time_s = min(step.stacks.get(stack, math.inf) for step in steps)
            self.stacks[stack] = time_s
            frame.spend(time_s)
        for key, op in self.ops.items():
            op.host_s = min(step.ops[key].host_s for step in steps if key in step.ops)

    def _read_step(self, roots: Iterable[Any]) -> None:
        for event in roots:
            if event.name in (MARK + "forward", MARK + "backward"):
                self._walk(event, _Frame(cast(Direction, event.name.removeprefix(MARK))))
            elif event.name.startswith(ENGINE):  # the backward of an accelerator runs on a thread of its own
                self._walk(event, _Frame("backward"))

    def op(self, direction: Direction, module: str, node: str, name: str) -> Op:
        """The entry of an op; the first call makes it."""
        key = (direction, module, node, name)
        if key not in self.ops:
            self.ops[key] = Op(*key)
        return self.ops[key]

    def total_s(self, direction: Direction) -> float:
        """Seconds of the whole forward, or of the whole backward."""
        return sum(time_s for stack, time_s in self.stacks.items() if stack[0] == direction)

    def _time_s(self, event: Any) -> float:
        return (event.device_time_total if self.accelerator else event.cpu_time_total) / 1e6

    def _walk(self, event: Any, frame: _Frame) -> None:
        """Note an event and its children."""
        name: str = event.name.removeprefix("aten::")
        if frame.op is not None:
            frame = replace(frame, inside=(*frame.inside, name))
            for entry in (frame.op, frame.node):
                if entry is not None:
                    entry.inside.setdefault(name, Calls()).calls += 1
        elif name.startswith(MODULE):
            frame = replace(frame, module=name.removeprefix(MODULE))
        elif name.startswith(ENGINE):
            name = name.removeprefix(ENGINE)
            module = GRADIENTS if name == ACCUMULATE else self.modules.of_number(event.sequence_nr)
            frame = replace(frame, module=module, node=self._node(name, module))
            assert frame.node is not None
            frame.node.ran.calls += 1
        elif _is_op(event):
            node = "" if frame.node is None else frame.node.name
            op = self.op(frame.direction, frame.module, node, name)
            op.ran.calls += 1
            op.host_s += event.cpu_time_total / 1e6
            frame = replace(frame, op=op)
            if frame.node is not None:
                frame.node.inside.setdefault(name, Calls()).calls += 1
        elif frame.direction == "forward" and name in self.functions.values():
            backward = next(node for node, function in self.functions.items() if function == name)
            frame = replace(frame, forward_of=self._node(backward, frame.module))
        if slow_part(name) and frame.slow is None:
            frame = replace(frame, slow=self.slow.setdefault((frame.module, name), Calls()))
            assert frame.slow is not None
            frame.slow.calls += 1
        own_s = self._time_s(event)
        for child in event.cpu_children:
            own_s -= self._time_s(child)
            self._walk(child, frame)
        stack = frame.stack
        self._frames[stack] = frame
        self.stacks[stack] = self.stacks.get(stack, 0.0) + max(0.0, own_s)

    def _node(self, name: str, module: str) -> Node:
        return self.nodes.setdefault((name, module), Node(name, module, function=self.functions.get(name, "")))


@dataclass(frozen=True)
class _Frame:
    """Where in a step an event is, and the entries to which its time is added.

    Attributes:
        direction: ``"forward"`` or ``"backward"``.
        module: Path of the innermost module.
        node: The backward node that runs.
        forward_of: The custom function whose forward runs, by its backward node.
        op: The op that runs.
        inside: Ops that this op called, from the outermost to the event.
        slow: The slow kernel that runs.
    """

    direction: Direction
    module: str = OUTSIDE
    node: Node | None = None
    forward_of: Node | None = None
    op: Op | None = None
    inside: tuple[str, ...] = ()
    slow: Calls | None = None

    @property
    def stack(self) -> Stack:
        """Direction, modules from the outermost, node or function, op, and the ops that it called."""
        parts = self.module.split(".")
        modules = [".".join(parts[: depth + 1]) for depth in range(len(parts))]
        caller = [node.name for node in [self.node] if node] + [node.function for node in [self.forward_of] if node]
        ops = [OUTSIDE_OF_OPS] if self.op is None else [self.op.op, *self.inside]
        return (self.direction, *modules, *caller, *ops)

    def spend(self, time_s: float) -> None:
        """Add time to every entry of the frame."""
        if self.node is not None:
            self.node.ran.time_s += time_s
        if self.forward_of is not None:
            self.forward_of.forward_s += time_s
        if self.slow is not None:
            self.slow.time_s += time_s
        if self.op is not None:
            self.op.ran.time_s += time_s
            for name in set(self.inside):
                self.op.inside[name].time_s += time_s
            if self.node is not None:
                for name in {self.op.op, *self.inside}:
                    self.node.inside[name].time_s += time_s


def _is_op(event: Any) -> bool:
    """Whether a dispatch mode sees this event: it is an op that is not made of others."""
    if "::" not in event.name or event.name.startswith((MARK, ENGINE, ACCUMULATE)):
        return False
    return not _is_composite(event.name) or not any(_has_op(child) for child in event.cpu_children)


def _has_op(event: Any) -> bool:
    return _is_op(event) or any(_has_op(child) for child in event.cpu_children)


@cache
def _is_composite(name: str) -> bool:
    space, _, op = name.partition("::")
    packet = getattr(getattr(torch.ops, space, None), op, None)
    # Up to torch 2.12 many ops have overloads for named dimensions, which are made of the others.
    overloads = [] if packet is None else [overload for overload in packet.overloads() if "name" not in overload]
    return any(_made_of_others(name, overload) for overload in overloads)


def _made_of_others(name: str, overload: str) -> bool:
    full = name if overload == "default" else f"{name}.{overload}"
    try:
        return cast(Any, torch)._C._dispatch_has_kernel_for_dispatch_key(full, "CompositeImplicitAutograd")
    except RuntimeError:  # only TorchScript knows the op
        return False


def module_marks(model: nn.Module) -> AbstractContextManager[None]:
    """Mark each module's forward inside the block, so that the profiler sees it."""
    open_marks: list[Any] = []

    def enter(path: str) -> None:
        open_marks.append(record_function(MODULE + path))
        open_marks[-1].__enter__()

    def leave() -> None:
        open_marks.pop().__exit__(None, None, None)

    return around_forwards(model, enter, leave)


# --- counting ---------------------------------------------------------------------------------------------------------


class Ledger(Counter):
    """Adds FLOPs, bytes and casts of one step to the entries of a trace.

    Attributes:
        direction: ``"forward"``, until it is set to ``"backward"``.
    """

    def __init__(self, trace: Trace) -> None:
        super().__init__(elementwise=False)
        self.trace = trace
        self.direction: Direction = "forward"

    def ran(self, name: str, flops: tuple[int, ...] | None, func: Any, inputs: Any, out: Any) -> None:
        """Count a call of an op."""
        node, modules = current_node(), self.trace.modules
        node_name = "" if node is None else node.name()
        running = modules.current  # inside a backward an activation checkpoint runs its forward again
        module = GRADIENTS if node_name == ACCUMULATE else running if running != OUTSIDE else modules.of(node)
        name = RENAMED.get(name, name.replace(".", "::"))
        op = self.trace.op(self.direction, module, node_name, name)
        if flops is None:
            self.trace.uncounted[name] = self.trace.uncounted.get(name, 0) + 1
            op.flops = None
        elif op.flops is not None:
            op.flops += sum(flops)
        operands, results = _tensors(inputs), _tensors(out)
        if not is_view(func):
            op.bytes += sum(_bytes(t) for t in operands + results)
        if name in COPIES and operands and results:
            source, target = operands[-1].dtype, results[0].dtype
            if source != target:
                kind = f"{source} to {target}".replace("torch.", "")
                op.casts[kind] = op.casts.get(kind, 0) + 1


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _bytes(tensor: Tensor) -> int:
    """Bytes of its elements; an expanded dimension counts once."""
    size = tensor.element_size()
    if tensor.layout != torch.strided:
        return size * tensor.numel()
    for length, step in zip(tensor.shape, tensor.stride(), strict=True):
        size *= length if step else 1
    return size
