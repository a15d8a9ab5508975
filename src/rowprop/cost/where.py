"""Which module an op of the forward, or a node of the backward, belongs to."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from rowprop.backprop.watch import Report, recording
from rowprop.engines.clock import drained_s

OUTSIDE = "losses_fn"
"""What ran in no module's forward."""


class Modules:
    """Notes, inside :meth:`tracked`, when each module's forward begins and ends.

    Backward nodes are numbered in the order in which the forward makes them, so the numbers that a module's forward
    begins and ends with say which nodes are its own.

    Attributes:
        model: The root.
        kinds: Each module's class by its path, and nothing for :data:`OUTSIDE`.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        named = cast(Any, model).named_modules()
        self.kinds = {path or type(model).__name__: type(module).__name__ for path, module in named} | {OUTSIDE: ""}
        self._spans: list[tuple[int, int, str]] = []
        self._open: list[tuple[int, str]] = []

    @property
    def current(self) -> str:
        """Path of the module whose forward runs now, called last; the root is known by its class."""
        return self._open[-1][1] if self._open else OUTSIDE

    def of(self, node: Any) -> str:
        """The module called last of those within whose forward the backward node was made."""
        return self.of_number(-1 if node is None else node._sequence_nr())

    def of_number(self, number: int) -> str:
        """As :meth:`of`, for the node of that number."""
        inside = [(begin, -end, path) for begin, end, path in self._spans if begin <= number < end]
        return max(inside)[2] if inside else OUTSIDE

    @contextmanager
    def tracked(self) -> Generator[None]:
        """Watch the forwards inside the block.

        What is compiled already runs without these hooks, and what is compiled meanwhile sees hooks that do nothing.
        """

        def enter(path: str) -> Callable[..., None]:
            def note(*_: Any) -> None:
                if not torch.compiler.is_compiling():
                    self._open.append((next_number(), path))

            return note

        def leave(*_: Any) -> None:
            if not torch.compiler.is_compiling():
                begin, path = self._open.pop()
                self._spans.append((begin, next_number(), path))

        with ExitStack() as stack:
            for path, module in cast(Any, self.model).named_modules():
                begin = enter(path or type(self.model).__name__)
                stack.callback(module.register_forward_pre_hook(begin).remove)
                stack.callback(module.register_forward_hook(leave, always_call=True).remove)
            yield


def next_number() -> int:
    """The number that the next backward node made on this thread gets."""
    return cast(Any, torch)._C._autograd._get_sequence_nr()


def current_node() -> Any:
    """The backward node that runs now on this thread, or None."""
    return cast(Any, torch)._C._current_autograd_node()


def graph(root: Any) -> set[Any]:
    """Every backward node upstream of ``root``, and itself."""
    found = {root}
    stack = [root]
    while stack:
        for node, _ in stack.pop().next_functions:
            if node is not None and node not in found:
                found.add(node)
                stack.append(node)
    return found


@dataclass(frozen=True)
class DensifiedAt:
    """A place in the backward where the gradient went back to all rows.

    Attributes:
        op: The aten op, or what met the gradient.
        module: Path of the module whose forward made the backward node; empty for what ran outside of any.
        node: The backward node.
        calls: How often.
        reason: Why (the last reason given).
        time_share: Share of the backward's time spent in these nodes and in all upstream of them, which run at full
            size because of it. Shares of different places overlap; what else reads the gradient that went back is
            not in it.
    """

    op: str
    module: str
    node: str
    calls: int
    reason: str
    time_share: float


class Locator(Report):
    """Which module's backward densified, and how much of the backward's time lies upstream of there."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.modules = Modules(model)
        self.found: dict[tuple[str, str, str], list[tuple[Any, str]]] = {}
        self.node_s: dict[Any, float] = {}
        self.total_s = 0.0

    def note_densified(self, name: str, reason: str) -> None:
        """Note where, too."""
        node = current_node()
        key = (name, self.modules.of(node), "" if node is None else node.name())
        self.found.setdefault(key, []).append((node, reason))

    @contextmanager
    def backward(self, loss: Tensor) -> Generator[None]:
        """Time each node."""
        nodes = graph(loss.grad_fn)
        begun_s: dict[Any, float] = {}

        def begin(node: Any) -> Callable[..., None]:
            def note(*_: Any) -> None:
                begun_s[node] = drained_s()

            return note

        def end(node: Any) -> Callable[..., None]:
            def note(*_: Any) -> None:
                self.node_s[node] = drained_s() - begun_s[node]

            return note

        with ExitStack() as stack:
            for node in nodes:
                stack.callback(node.register_prehook(begin(node)).remove)
                stack.callback(node.register_hook(end(node)).remove)
            stack.enter_context(recording(self))
            yield
        self.total_s = sum(self.node_s.values())

    def places(self) -> list[DensifiedAt]:
        """The finding, largest share of time first."""
        places: list[DensifiedAt] = []
        for (op, module, node_name), calls in self.found.items():
            upstream = set[Any]().union(*(graph(node) for node, _ in calls if node is not None))
            share = sum(self.node_s.get(node, 0.0) for node in upstream) / self.total_s
            places.append(DensifiedAt(op, module, node_name, len(calls), calls[-1][1], share))
        return sorted(places, key=lambda place: -place.time_share)
