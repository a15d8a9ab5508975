"""A hook on a gradient that may hand on some of its rows in place of all of it."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn

from rowprop.backprop.autograd.foreign import prepare
from rowprop.backprop.autograd.rowgrad import RowGrad
from rowprop.backprop.backward import running, transformed
from rowprop.backprop.rows.layout import Layout
from rowprop.backprop.rows.rows import RowSet
from rowprop.backprop.rows.slice import RowSlice
from rowprop.backprop.rows.zeros import Zeros
from rowprop.host import present_stream


def hook_gradient(tensor: Tensor, layout: Layout, change: Callable[[Tensor, Layout], RowSlice | None]) -> None:
    """Have the gradient of a tensor changed whenever one arrives, except where it is to be differentiated itself.

    ``change`` gets the gradient, sliced or not, and ``layout``: where the rows are if it is not sliced yet. It returns
    the rows to hand on, or None for the gradient as it is. The tensor stays the same object, which others may hold.
    """
    if tensor.grad_fn is None:  # a leaf: nothing lies below it
        return

    def hook(grad: Tensor | None) -> Tensor | None:
        # Of several results of one function this one is not used, or the gradient is sparse: it has few entries anyway.
        if grad is None or grad.layout is not torch.strided:
            return None
        if torch.is_grad_enabled() or transformed(grad):  # create_graph=True: the exact gradient can be differentiated
            return None
        sliced = grad.sliced if type(grad) is RowGrad and grad.full is None else None
        changed = None if type(sliced) is Zeros else change(grad, layout)
        if changed is None:
            return None
        # The tensor's own node: held by the hook, it would hold itself, and its graph until a garbage collection. A
        # foreign one, too, can be prepared now: autograd runs hooks of a node after those of its tensors.
        node = cast(Any, torch)._C._current_autograd_node()
        if sliced is None and prepare(node, changed.rows, slices=False):
            return None
        return RowGrad(changed)

    # The hook stays with the present value: the gradient of a later write in place stays exact.
    tensor.register_hook(hook)


def rows_in(grad: Tensor, layout: Layout) -> RowSlice:
    """The rows of a gradient, none of them twice; all rows if it is not sliced."""
    if type(grad) is RowGrad:
        if grad.full is None and type(grad.sliced) is RowSlice:
            return grad.sliced.merged()
        grad = grad.plain()
    return RowSlice(grad, _all_rows(layout.num_rows, grad.device), layout, grad.shape)


def _all_rows(num_rows: int, device: torch.device) -> RowSet:
    """The set of all rows: one in each backward, so that gradients which meet know their rows' common places."""
    key = "all rows", num_rows, device, present_stream(device)()

    def every() -> RowSet:
        return RowSet(torch.arange(num_rows, device=device), num_rows, unique=True, batchnorm="rows")

    return running().of(key, every)


class ModuleHook:
    """A module's hook. A copy of the module, or a file with it, gets a hook that does nothing."""

    def __init__(self, act: Callable[..., Any] | None = None) -> None:
        self.act = act

    def __call__(self, *args: Any) -> Any:
        """Act, except while the module is traced."""
        if self.act is None or torch.compiler.is_compiling() or cast(Any, torch.jit).is_tracing():
            return None
        return self.act(*args)

    def __reduce__(self) -> tuple[type[ModuleHook], tuple[()]]:
        return ModuleHook, ()


class Handle:
    """What stands in a model by hooks of modules: it can pause, and end."""

    def __init__(self) -> None:
        self._active = True
        self._handles: list[Any] = []

    def remove(self) -> None:
        """End it: the gradients of all later backwards are those of the model alone."""
        self._active = False
        while self._handles:
            self._handles.pop().remove()

    @contextmanager
    def paused(self) -> Generator[None]:
        """Have the gradients of backwards inside the block those of the model alone."""
        before, self._active = self._active, False
        try:
            yield
        finally:
            self._active = before and bool(self._handles)  # not if it was removed meanwhile


def unwrapped(model: nn.Module) -> nn.Module:
    """The module inside DistributedDataParallel, which adds a node of its own to the outputs."""
    inner = getattr(model, "module", None)
    return inner if type(model).__name__ == "DistributedDataParallel" and isinstance(inner, nn.Module) else model
