"""The running backward: one object for all that lives exactly as long as it does.

Backwards run side by side in threads, and one inside another, as in a reentrant checkpoint. Each has a number of its
own from autograd, so what one of them remembers is never seen, nor cleared, by another.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import RLock
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.autograd import forward_ad

from rowprop.native import reads

T = TypeVar("T")


class Backward:
    """One backward. It ends when autograd is done with it, or has given it up after an error."""

    def __init__(self) -> None:
        self.around: int | None = None  # the number of the backward whose checkpoint runs this one
        self.lock = RLock()  # held while the graph is prepared: autograd works with a thread for each device
        self.nodes: set[Any] = {None}  # prepared for sliced gradients, with all that lies upstream; None: no node
        self.plain: set[Any] = set()  # nodes with dense gradients: leaves with hooks, and what the caller gets
        self.hooked: set[Any] = set()  # the leaves with hooks among these
        self.dense: set[tuple[Any, int]] = set()  # nodes that hand on a dense gradient, and the place of that gradient
        self.densified = False  # whether a report could be told of a gradient of all rows
        self.limited = False  # whether autograd was asked for the gradients of some tensors alone
        self.unions: dict[Any, Any] = {}  # the rows of several sets together
        self.kept: dict[Any, Any] = {}  # what others keep as long as this runs, see of()
        self.ends: list[Callable[[], Any]] = []  # called at the end, the last one first
        self.failed = False  # whether autograd gave it up; known at the end

    def of(self, owner: Any, make: Callable[[], T]) -> T:
        """What an owner keeps as long as this backward runs; made when it is first asked for."""
        with self.lock:
            if owner not in self.kept:
                self.kept[owner] = make()
            return self.kept[owner]


class _End:
    """Ends a backward when autograd calls it, or lets go of it after a failure."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __call__(self, failed: bool = False) -> None:
        held = _running.pop(self.number, None)
        if held is not None:
            held.failed = failed
            while held.ends:
                held.ends.pop()()

    def __del__(self) -> None:
        self(failed=True)


_running: dict[int, Backward] = {}
_beginning = RLock()


def task() -> int:
    """The number of the backward that runs on this thread; -1 for none."""
    return cast(Any, torch)._C._current_graph_task_id()


def running() -> Backward:
    """The backward that runs on this thread; where none runs, nothing is remembered."""
    number = task()
    if number < 0:
        return Backward()
    if number not in _running:
        with _beginning:
            if number not in _running:
                _running[number] = Backward()
                cast(Any, torch.autograd.Variable)._execution_engine.queue_callback(_End(number))
    return _running[number]


def alone() -> bool:
    """Whether at most one backward runs."""
    return len(_running) <= 1


def outermost() -> int:
    """The number of the backward that runs, of the outermost one if checkpoints run others in it; -1 for none."""
    number = task()
    while (held := _running.get(number)) is not None and held.around is not None:
        number = held.around
    return number


def outer() -> Backward:
    """The backward that runs on this thread, the outermost one if checkpoints run others in it."""
    return _running.get(outermost()) or running()


def numbered(number: int) -> Backward:
    """The backward with this number if it runs, else the outermost one that does."""
    return _running.get(number) or outer()


def transformed(grad: Tensor | None = None) -> bool:
    """Whether a torch.func transform or forward-mode AD is at work: neither can handle a row-sliced gradient."""
    if torch.compiler.is_compiling():  # the checks below would see the tracer's transforms
        return False
    func = cast(Any, torch)._C._functorch
    if grad is not None and func.is_legacy_batchedtensor(grad):  # autograd.grad(is_grads_batched=True)
        return True
    return func.peek_interpreter_stack() is not None or cast(Any, forward_ad)._current_level >= 0


def node_name() -> str:
    """The name of the node that autograd runs on this thread; empty for none."""
    reads("the node that runs")
    node = cast(Any, torch)._C._current_autograd_node()
    return "" if node is None else node.name()


def ends_at_a_leaf() -> bool:
    """Whether the first result of the node that autograd runs is the gradient of a leaf; True where none runs.

    This is part of the key of native dispatch.
    """
    node = cast(Any, torch)._C._current_autograd_node()
    above = None if node is None else node.next_functions[0][0]
    return above is None or above.name().endswith("AccumulateGrad")


_saved: dict[type[Any], tuple[str, ...]] = {}  # of each type of node, the names that autograd gives its saved tensors


def unpacks() -> bool:
    """Whether an unpack hook, which may refill one buffer, gave the node its saved tensors; True where none runs."""
    node = cast(Any, torch)._C._current_autograd_node()
    if node is None:
        return True
    kind: type[Any] = node.__class__
    if kind not in _saved:
        _saved[kind] = tuple(name for name in dir(kind) if name.startswith("_raw_saved_"))
    for name in _saved[kind]:
        held = getattr(node, name)
        for saved in cast("tuple[Any, ...]", held if isinstance(held, tuple) else (held,)):
            if saved.unpack_hook is not None:
                return True
    return False
