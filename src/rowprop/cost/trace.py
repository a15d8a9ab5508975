"""What a step ran, op by op: torch's profiler for the time, a count for FLOPs and bytes, hooks for the module."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd import DeviceType  # pyright: ignore[reportPrivateImportUsage]
from torch.autograd.profiler import record_function
from torch.utils._pytree import tree_leaves

from rowprop.cost.elementwise import is_view
from rowprop.cost.findings import COPIES, GRADIENTS, Calls, Node, Op, Phase, slow_part
from rowprop.cost.flops import Counter
from rowprop.cost.where import OUTSIDE, Modules, current_node

OUTSIDE_OF_OPS = "Python and autograd"
MARK = "rowprop::"
MODULE = MARK + "module::"
ENGINE = "autograd::engine::evaluate_function: "
ACCUMULATE = "torch::autograd::AccumulateGrad"
RENAMED = {"_native_batch_norm_legit": "native_batch_norm"}
"""What the counter sees instead of the op that runs."""
Stack = tuple[str, ...]
"""Where time was spent: phase, modules from the outermost, backward node, op, and what it called."""


class Trace:
    """What a step ran.

    Of several like steps, what each stack took alone is that of the step in which it took least: what disturbs a
    machine only adds, and does not hit the same place in every step. All other times are sums of these.

    Args:
        modules: Which module a backward node belongs to.
        functions: Names of the custom ``autograd.Function``s, by the name of their backward node.
        accelerator: Whether the device's time counts, and not the CPU's.
    """

    def __init__(self, modules: Modules, functions: dict[str, str], accelerator: bool) -> None:
        self.modules = modules
        self.functions = functions
        self.accelerator = accelerator
        self.ops: dict[tuple[Phase, str, str, str], Op] = {}
        self.nodes: dict[tuple[str, str], Node] = {}
        self.slow: dict[tuple[str, str], Calls] = {}
        self.stacks: dict[Stack, float] = {}
        self._frames: dict[Stack, _Frame] = {}

    def read(self, events: Sequence[Any]) -> None:
        """Take in the profiler's events: every call of the first step, and the time of all of them."""
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
            phase: Phase | None = "backward" if event.name.startswith(ENGINE) else None  # on the device's own thread
            if event.name in (MARK + "forward", MARK + "backward"):
                phase = cast(Phase, event.name.removeprefix(MARK))
            if phase is not None:
                self._walk(event, _Frame(phase))

    def op(self, phase: Phase, module: str, node: str, name: str) -> Op:
        """The entry of an op, made when it is first met."""
        key = (phase, module, node, name)
        if key not in self.ops:
            self.ops[key] = Op(*key)
        return self.ops[key]

    def phase_s(self, phase: Phase) -> float:
        """All of a phase."""
        return sum(time_s for stack, time_s in self.stacks.items() if stack[0] == phase)

    def _time_s(self, event: Any) -> float:
        return (event.device_time_total if self.accelerator else event.cpu_time_total) / 1e6

    def _walk(self, event: Any, frame: _Frame) -> None:
        """Note an event and what is in it."""
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
            op = self.op(frame.phase, frame.module, node, name)
            op.ran.calls += 1
            op.host_s += event.cpu_time_total / 1e6
            frame = replace(frame, op=op)
            if frame.node is not None:
                frame.node.inside.setdefault(name, Calls()).calls += 1
        elif frame.phase == "forward" and name in self.functions.values():
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
    """Where in a step an event is, and whose time it spends."""

    phase: Phase
    module: str = OUTSIDE
    node: Node | None = None
    forward_of: Node | None = None
    """The custom function whose forward this is part of, by its backward node."""
    op: Op | None = None
    inside: tuple[str, ...] = ()
    """What the op called, from the outermost."""
    slow: Calls | None = None

    @property
    def stack(self) -> Stack:
        """Phase, modules from the outermost, node or function, op, what it called."""
        parts = self.module.split(".")
        modules = [".".join(parts[: depth + 1]) for depth in range(len(parts))]
        caller = [node.name for node in [self.node] if node] + [node.function for node in [self.forward_of] if node]
        ops = [OUTSIDE_OF_OPS] if self.op is None else [self.op.op, *self.inside]
        return (self.phase, *modules, *caller, *ops)

    def spend(self, time_s: float) -> None:
        """Add time to everything that this is part of."""
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
    """Whether this is what a dispatch mode sees: an op that is not made of others."""
    if "::" not in event.name or event.name.startswith((MARK, ENGINE, ACCUMULATE)):
        return False
    return not _is_composite(event.name) or not any(_has_op(child) for child in event.cpu_children)


def _has_op(event: Any) -> bool:
    return _is_op(event) or any(_has_op(child) for child in event.cpu_children)


@cache
def _is_composite(name: str) -> bool:
    space, _, op = name.partition("::")
    packet = getattr(getattr(torch.ops, space, None), op, None)
    return packet is not None and any(_made_of_others(name, overload) for overload in packet.overloads())


def _made_of_others(name: str, overload: str) -> bool:
    full = name if overload == "default" else f"{name}.{overload}"
    try:
        return cast(Any, torch)._C._dispatch_has_kernel_for_dispatch_key(full, "CompositeImplicitAutograd")
    except RuntimeError:  # known to TorchScript only
        return False


@contextmanager
def module_marks(model: nn.Module) -> Generator[None]:
    """Have the profiler see which module's forward runs, inside the block."""
    open_marks: list[Any] = []

    def enter(path: str) -> Callable[..., None]:
        def note(*_: Any) -> None:
            if not torch.compiler.is_compiling():
                mark = record_function(MODULE + path)
                mark.__enter__()
                open_marks.append(mark)

        return note

    def leave(*_: Any) -> None:
        if not torch.compiler.is_compiling():
            open_marks.pop().__exit__(None, None, None)

    with ExitStack() as stack:
        for path, module in cast(Any, model).named_modules():
            stack.callback(module.register_forward_pre_hook(enter(path or type(model).__name__)).remove)
            stack.callback(module.register_forward_hook(leave, always_call=True).remove)
        yield


# --- counting ---------------------------------------------------------------------------------------------------------


class Ledger(Counter):
    """Adds FLOPs, bytes and casts of one step to the entries of a trace.

    Args:
        trace: Where to.
    """

    def __init__(self, trace: Trace) -> None:
        super().__init__(elementwise=False)
        self.trace = trace
        self.phase: Phase = "forward"
        self.uncounted: dict[str, int] = {}

    def ran(self, name: str, flops: tuple[int, ...] | None, func: Any, inputs: Any, out: Any) -> None:
        """Count an op."""
        node, modules = current_node(), self.trace.modules
        node_name = "" if node is None else node.name()
        running = modules.current  # in a backward, that of an activation checkpoint
        module = GRADIENTS if node_name == ACCUMULATE else running if running != OUTSIDE else modules.of(node)
        name = RENAMED.get(name, name.replace(".", "::"))
        op = self.trace.op(self.phase, module, node_name, name)
        if flops is None:
            self.uncounted[name] = self.uncounted.get(name, 0) + 1
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
    """Of its elements, what is expanded counted once."""
    size = tensor.element_size()
    if tensor.layout != torch.strided:
        return size * tensor.numel()
    for length, step in zip(tensor.shape, tensor.stride(), strict=True):
        size *= length if step else 1
    return size
