"""Count the floating-point operations that really run. 1 multiply-add = 2 FLOPs."""

from __future__ import annotations

import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rowprop.backprop.rowgrad import RowGrad
from rowprop.cost.formulas import formula_of, is_light

if TYPE_CHECKING:
    from typing_extensions import Self


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
    with _Adder(flops):
        yield flops


class Counter(TorchDispatchMode):
    """Calls :meth:`ran` after every op of the block, with its FLOPs; compiled models run uncompiled in the block."""

    supports_higher_order_operators = True  # an op that takes functions, as flex_attention, comes in one piece

    def __init__(self) -> None:
        super().__init__()
        self._stances: list[Any] = []

    def __enter__(self) -> Self:
        """Begin to count."""
        self._stances.append(_uncompiled())
        return super().__enter__()

    def __exit__(self, *raised: Any) -> None:
        """Stop counting."""
        super().__exit__(*raised)
        self._stances.pop().__exit__(*raised)

    def ran(self, name: str, flops: tuple[int, ...] | None, func: Any, inputs: Any, out: Any) -> None:
        """Take note of an op, named without ``aten``, that was given ``inputs`` and returned ``out``.

        ``flops`` is one number for each output of an op that makes several gradients, else one for all outputs; None
        where no formula is known.
        """
        raise NotImplementedError

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the op and count it."""
        if RowGrad in types:
            return NotImplemented  # the sliced gradient's rule runs next, and the rule's own ops come back here
        kwargs = kwargs or {}
        packet = getattr(func, "_overloadpacket", func)
        formula = formula_of(packet)
        if formula is None and _is_composite(func):
            with self:  # under inference mode a composite op arrives in one piece
                return func.decompose(*args, **kwargs)
        out = func(*args, **kwargs)
        counted = formula(*args, **kwargs, out_val=out) if formula is not None else 0 if is_light(func) else None
        name = str(packet).removeprefix("aten.")
        self.ran(name, (counted,) if isinstance(counted, int) else counted, func, (args, kwargs), out)
        return out


@cache
def _is_composite(func: Any) -> bool:
    """Whether the op is made of others; ``prim.device`` is a question to a subclass, not an op with kernels."""
    if not isinstance(func, torch._ops.OpOverload) or func.namespace == "prim":  # pyright: ignore[reportPrivateUsage]
        return False
    return cast(Any, func).has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd)  # pyright: ignore[reportPrivateUsage]


def _uncompiled() -> Any:
    """Have Dynamo run compiled functions uncompiled from now on, until the result's ``__exit__``.

    Under a mode Dynamo gives a frame up for good. A frame that it was told to leave alone runs compiled again later.
    """
    dynamo: Any = sys.modules.get("torch._dynamo")
    try:
        return nullcontext() if dynamo is None else dynamo.set_stance("force_eager")
    except RuntimeError:  # this very code runs inside a compiled function, after a graph break
        return nullcontext()


class _Adder(Counter):
    def __init__(self, flops: Flops) -> None:
        super().__init__()
        self.flops = flops

    def ran(self, name: str, flops: tuple[int, ...] | None, func: Any, inputs: Any, out: Any) -> None:
        if flops is None:
            self.flops.uncounted[name] = self.flops.uncounted.get(name, 0) + 1
        elif any(flops):
            self.flops.by_op[name] = self.flops.by_op.get(name, 0) + sum(flops)
