"""What a step holds in memory at once, seen from inside a user's own training.

There no profiler may be started, nor an allocator's statistics be reset, as :func:`rowprop.engines.clock.peak_bytes`
does.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from rowprop.backprop.rowgrad import RowGrad


def peak_bytes(run: Callable[[], object], known: Iterable[Tensor]) -> int:
    """Most bytes that tensors made while ``run`` ran held at once, those of ``known`` tensors apart.

    Counts the storages that ops return, from when they are made to when nothing refers to them. What a kernel
    allocates for itself is not seen.
    """
    ledger = _Ledger(known)
    with ledger:
        run()
    return ledger.peak


class _Ledger(TorchDispatchMode):
    """Keeps account of the storages that ops make."""

    def __init__(self, known: Iterable[Tensor]) -> None:
        super().__init__()
        self.held = self.peak = 0
        self._seen = {id(storage): storage for storage in (tensor.untyped_storage() for tensor in known)}
        self._alive: set[int] = set(self._seen)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, RowGrad) for kind in types):
            return NotImplemented  # called again for what it really runs
        out = func(*args, **(kwargs or {}))
        for value in tree_iter(out):
            if isinstance(value, Tensor) and not isinstance(value, RowGrad) and value.layout == torch.strided:
                self._enter(value.untyped_storage())
        return out

    def _enter(self, storage: Any) -> None:
        number = id(storage)
        if number in self._alive:
            return
        size: int = storage.nbytes()
        self._alive.add(number)
        self.held += size
        self.peak = max(self.peak, self.held)
        weakref.finalize(storage, self._leave, number, size)

    def _leave(self, number: int, size: int) -> None:
        self._alive.discard(number)
        self.held -= size
