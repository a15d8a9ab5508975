"""Where in the model something ran: an op of the forward, a backward node, a gradient that went back to all rows."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from rowprop.backprop.watch import Report, recording
from rowprop.host import drained_s

OUTSIDE = "losses_fn"  # used as the module's path where an op runs outside all modules' forwards


def next_number() -> int:
    """The number that the next backward node made on this thread gets."""
    return cast(Any, torch)._C._autograd._get_sequence_nr()


def current_node() -> Any:
    """The backward node that runs now on this thread, or None."""
    return cast(Any, torch)._C._current_autograd_node()


def graph(root: Any) -> set[Any]:
    """The backward node ``root`` and every node upstream of it."""
    found = {root}
    stack = [root]
    while stack:
        for node, _ in stack.pop().next_functions:
            if node is not None and node not in found:
                found.add(node)
                stack.append(node)
    return found


@contextmanager
def around_forwards(model: nn.Module, block: Callable[[str], AbstractContextManager[object]]) -> Generator[None]:
    """Run each module's forward inside ``block(path)``; the root's path is its class.

    A region compiled earlier runs without these hooks; one compiled inside the block has hooks that do nothing.
    """
    running: list[AbstractContextManager[object]] = []

    def before(path: str, *_: Any) -> None:
        if not torch.compiler.is_compiling():
            running.append(block(path))
            running[-1].__enter__()

    def after(*_: Any) -> None:
        if not torch.compiler.is_compiling():
            running.pop().__exit__(None, None, None)

    with ExitStack() as stack:
        for path, module in cast(Any, model).named_modules():
            hook = partial(before, path or type(model).__name__)
            stack.callback(module.register_forward_pre_hook(hook).remove)
            stack.callback(module.register_forward_hook(after, always_call=True).remove)
        yield


class Modules:
    """Knows the module that an op of the forward, or a backward node, belongs to.

    Autograd numbers backward nodes as the forward makes them: those between the numbers at which :meth:`tracked` sees a
    module's forward begin and end are the module's.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        named = cast(Any, model).named_modules()  # kinds: their classes by path
        self.kinds = {path or type(model).__name__: type(module).__name__ for path, module in named} | {OUTSIDE: ""}
        self._spans: list[tuple[int, int, str]] = []
        self.running = [OUTSIDE]  # paths of the modules whose forward runs now, the innermost last

    def of(self, node: Any) -> str:
        """Path of the innermost module whose forward made the backward node."""
        return self.call_of(-1 if node is None else node._sequence_nr())[0]

    def call_of(self, number: int) -> tuple[str, int]:
        """The innermost module whose forward made the node of that number, and which of its calls that was, from 0."""
        inside = [(begin, -end, at) for at, (begin, end, _) in enumerate(self._spans) if begin <= number < end]
        if not inside:
            return OUTSIDE, 0
        at = max(inside)[2]
        path = self._spans[at][2]
        return path, sum(other == path for _, _, other in self._spans[:at])

    def tracked(self) -> AbstractContextManager[None]:
        """Note the forwards inside the block."""
        return around_forwards(self.model, self._forward)

    @contextmanager
    def _forward(self, path: str) -> Generator[None]:
        begin = next_number()
        self.running.append(path)
        yield
        self._spans.append((begin, next_number(), self.running.pop()))


@dataclass(frozen=True)
class DensifiedAt:
    """A place in the backward where the gradient went back to all rows.

    Attributes:
        op: The aten op, or the kind of code that met the gradient.
        module: Path of the module whose forward made the backward node; ``"losses_fn"`` where no module's forward did.
        node: The backward node.
        calls: How often it happened there.
        reason: Why; of several reasons the last.
        time_share: Of the backward's time in these nodes and all upstream of them, which run at full size because of
            this place. Shares of different places overlap; others that read the same gradient are not counted.
    """

    op: str
    module: str
    node: str
    calls: int
    reason: str
    time_share: float


class Locator(Report):
    """Finds the modules, tracked in the forward, whose backward densified, and the backward's time upstream of each."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.modules = Modules(model)
        self.found: dict[tuple[str, str, str], list[tuple[Any, str]]] = {}
        self.node_s: dict[Any, float] = {}

    def note_densified(self, name: str, reason: str) -> None:
        """Note the op together with the backward node and its module."""
        node = current_node()
        key = (name, self.modules.of(node), "" if node is None else node.name())
        self.found.setdefault(key, []).append((node, reason))

    @contextmanager
    def backward(self, loss: Tensor) -> Generator[None]:
        """Watch the backward of ``loss`` inside the block, and time each of its nodes."""
        begun_s: dict[Any, float] = {}

        def begin(node: Any, *_: Any) -> None:
            begun_s[node] = drained_s()

        def end(node: Any, *_: Any) -> None:
            self.node_s[node] = drained_s() - begun_s[node]

        with ExitStack() as stack:
            for node in graph(loss.grad_fn):
                stack.callback(node.register_prehook(partial(begin, node)).remove)
                stack.callback(node.register_hook(partial(end, node)).remove)
            stack.enter_context(recording(self))
            yield

    def places(self) -> list[DensifiedAt]:
        """The places found, largest share of time first."""
        places: list[DensifiedAt] = []
        for key, calls in self.found.items():
            upstream = set[Any]().union(*(graph(node) for node, _ in calls if node is not None))
            share = sum(self.node_s.get(node, 0.0) for node in upstream) / sum(self.node_s.values())
            places.append(DensifiedAt(*key, len(calls), calls[-1][1], share))
        return sorted(places, key=lambda place: -place.time_share)
