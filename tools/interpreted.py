"""Triton kernels on the CPU, by Triton's interpreter: what it cannot do by itself, and how much it ran."""

from __future__ import annotations

import builtins
from collections.abc import Iterator
from contextlib import nullcontext
from math import prod
from types import SimpleNamespace
from typing import Any

import pytest
import torch

RAN: list[tuple[str, int]] = []
"""The name of each kernel that ran, and in how many programs."""


class Counter(int):
    """A number that a loop of a kernel counts: the compiler makes a tensor of it, the interpreter does not."""

    def to(self, dtype: Any) -> Any:
        from triton.runtime import interpreter

        return interpreter._implicit_cvt(int(self)).to(dtype)

    def __mul__(self, other: Any) -> Any:
        found = int.__mul__(self, other)
        return found if found is NotImplemented else Counter(found)

    def __sub__(self, other: Any) -> Any:
        found = int.__sub__(self, other)
        return found if found is NotImplemented else Counter(found)


def counted(*about: Any) -> Iterator[Counter]:
    return map(Counter, builtins.range(*map(int, about)))


def without_gpu(patch: pytest.MonkeyPatch) -> None:
    """Have ``torch.cuda`` answer as a device of so many threads that no kernel is timed to choose a configuration."""
    device = SimpleNamespace(warp_size=1024, multi_processor_count=1)
    about = {"device": lambda _: nullcontext(), "current_device": int, "get_device_properties": lambda _: device}
    for name, stand_in in about.items():
        patch.setattr(torch.cuda, name, stand_in)


def on_cpu(patch: pytest.MonkeyPatch) -> None:
    """Have the interpreter take floats as arguments, count in loops, and not search for the fastest configuration."""
    import numpy as np
    import triton.language as tl
    from triton.runtime import autotuner, interpreter

    right, launch = interpreter._implicit_cvt, interpreter.GridExecutor.__call__

    def converted(value: Any) -> Any:
        if isinstance(value, float):
            return tl.tensor(interpreter.TensorHandle(np.array([value], dtype=np.float32), tl.float32), tl.float32)
        return right(value)

    def launched(self: Any, *args: Any, **options: Any) -> Any:
        about = self.fn.__globals__
        about["range"] = counted
        if "gather" in about:  # fla's own name of tl.gather, which the interpreter replaces in tl alone
            about["gather"] = lambda *args, **options: tl.gather(*args, **options)
        grid, known = self.grid, {}

        def told(meta: Any) -> Any:
            known["grid"] = grid(meta)
            return known["grid"]

        self.grid = told if callable(grid) else grid
        launch(self, *args, **options)
        RAN.append((self.fn.__name__, prod(known.get("grid", grid))))

    patch.setattr(interpreter, "_implicit_cvt", converted)
    patch.setattr(interpreter.GridExecutor, "__call__", launched)
    patch.setattr(autotuner.Autotuner, "_bench", lambda *args, **options: [1.0] * 3)
