"""A step op by op: torch's profiler gives the time, a count gives FLOPs and bytes, hooks give the module."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import DeviceType  # pyright: ignore[reportPrivateImportUsage]
from torch.utils._pytree import tree_leaves

from rowprop.cost.findings import COPIES, GRADIENTS, Calls, Direction, Node, Op
from rowprop.cost.formulas import is_view
from rowprop.cost.where import OUTSIDE, Modules, current_node

MARK = "rowprop::"
MODULE = MARK + "module::"
ENGINE = "autograd::engine::evaluate_function: "
ACCUMULATE = "torch::autograd::AccumulateGrad"
RENAMED = {"_native_batch_norm_legit": "native_batch_norm"}
"""Names under which the profiler lists an op, by the name that the counter sees."""


class Frame(NamedTuple):
    """Where in a step an event is; ``function`` is the custom function whose forward runs, by its backward node.

    ``inside`` has the ops that the op called, from the outermost to the event.
    """

    direction: Direction
    module: str = OUTSIDE
    node: str = ""
    function: str = ""
    op: str = ""
    inside: tuple[str, ...] = ()


class Trace:
    """The ops and backward nodes of a step, with their times: the device's with ``accelerator``, else the CPU's.

    Of several like steps each frame counts with the one in which it took least, without the frames inside it: other
    work of a machine only adds time, and does not hit the same place in every step. All other times are sums of these.
    Calls, and the host's time, are those of the first step. ``functions`` has the names of custom
    ``autograd.Function``s by that of their backward node, ``uncounted`` the calls of ops without a formula.
    """

    def __init__(self, modules: Modules, functions: dict[str, str], accelerator: bool) -> None:
        self.modules = modules
        self.functions = functions
        self.accelerator = accelerator
        self.ops: dict[tuple[Direction, str, str, str], Op] = {}
        self.nodes: dict[tuple[str, str], Node] = {}
        self.total_s: dict[Direction, float] = {"forward": 0.0, "backward": 0.0}
        self.uncounted: dict[str, int] = {}
        self._dispatched: set[str] = set()

    def count(
        self, direction: Direction, name: str, flops: tuple[int, ...] | None, func: Any, inputs: Any, out: Any
    ) -> None:
        """Add the FLOPs, bytes and casts of an op that ran; then as :data:`~rowprop.cost.flops.Ran`."""
        node = current_node()
        node_name = "" if node is None else node.name()
        running = self.modules.current  # inside a backward an activation checkpoint runs its forward again
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
            # The backward of an accelerator runs on a thread of its own.
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
            module = GRADIENTS if name == ACCUMULATE else self.modules.of(event.sequence_nr)
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
        """Add time to every entry of the frame."""
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
