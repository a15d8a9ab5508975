"""Count the floating-point operations that really run. 1 multiply-add = 2 FLOPs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rowprop.backprop.rowgrad import RowGrad
from rowprop.cost.formulas import formula_of, is_light

Ran = Callable[[str, tuple[int, ...] | None, Any, Any, Any], None]
"""Called after an op: with its name without ``aten``, its FLOPs, the op, its inputs and what it returned.

The FLOPs are one number for each output of an op that makes several gradients, else one for all outputs; None where no
formula is known.
"""


@dataclass
class Flops:
    """The FLOPs that a block ran.

    Attributes:
        by_op: FLOPs of each op, by its name (``mm``, ``convolution_backward``).
        uncounted: Ops that ran without a known formula, with the number of calls; **not** in the total. Light ops are
            not listed: of a few FLOPs per element (elementwise, reductions, softmax, norms, pooling, losses, random
            numbers) or of none (views, copies, indexing, sorting).
    """

    by_op: dict[str, int] = field(default_factory=dict[str, int])
    uncounted: dict[str, int] = field(default_factory=dict[str, int])

    @property
    def total_flops(self) -> int:
        """The sum over all counted ops."""
        return sum(self.by_op.values())


@contextmanager
def count_flops() -> Generator[Flops, None, None]:
    """Count the FLOPs of products and convolutions that run inside the block.

    A row-sliced gradient counts at K rows. Fused causal attention counts the pairs of query and key that may meet, and
    all pairs of packed sequences; its backward also the scores that it computes again, five products for the forward's
    two. A bias costs nothing. The :class:`Flops` that it yields is filled while the block runs.

    Cost:
        Python runs at every op, so never time inside the block. A compiled model runs uncompiled inside the block.

    Example:
        >>> import torch
        >>> with count_flops() as flops:
        ...     _ = torch.ones(2, 3) @ torch.ones(3, 5)
        >>> flops.by_op
        {'mm': 60}
    """
    flops = Flops()

    def ran(name: str, counted: tuple[int, ...] | None, *_: Any) -> None:
        if counted is None:
            flops.uncounted[name] = flops.uncounted.get(name, 0) + 1
        elif any(counted):
            flops.by_op[name] = flops.by_op.get(name, 0) + sum(counted)

    with counting(ran):
        yield flops


@contextmanager
def counting(ran: Ran) -> Generator[None]:
    """Call ``ran`` after every op of the block; compiled models run uncompiled in the block."""
    dynamo: Any = sys.modules.get("torch._dynamo")
    try:
        # Under a mode Dynamo gives a frame up for good. One that it was told to leave alone runs compiled again later.
        uncompiled = nullcontext() if dynamo is None else dynamo.set_stance("force_eager")
    except RuntimeError:  # this very code runs inside a compiled function, after a graph break
        uncompiled = nullcontext()
    with uncompiled, _Counter(ran):
        yield


class _Counter(TorchDispatchMode):
    supports_higher_order_operators = True  # an op that takes functions, as flex_attention, comes in one piece

    def __init__(self, ran: Ran) -> None:
        super().__init__()
        self.ran = ran

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if RowGrad in types:
            return NotImplemented  # the sliced gradient's rule runs next, and the rule's own ops come back here
        kwargs = kwargs or {}
        packet = getattr(func, "_overloadpacket", func)
        formula = formula_of(packet)
        # ``prim.device`` is a question to a subclass, not an op with kernels.
        if formula is None and isinstance(func, torch._ops.OpOverload) and func.namespace != "prim":  # pyright: ignore[reportPrivateUsage]
            with self:  # under inference mode a composite op arrives in one piece
                out: Any = cast(Any, func).decompose(*args, **kwargs)
            if out is not NotImplemented:
                return out
        out = cast(Any, func)(*args, **kwargs)
        counted = formula(*args, **kwargs, out_val=out) if formula is not None else 0 if is_light(func) else None
        name = str(packet).removeprefix("aten.")
        self.ran(name, (counted,) if isinstance(counted, int) else counted, func, (args, kwargs), out)
        return out
