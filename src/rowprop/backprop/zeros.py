"""skip_zeros(): rows and tokens whose gradient is exactly zero leave the backward, wherever the zeros come from."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import partial
from math import ceil
from typing import Any, cast, overload

import torch
from torch import Tensor, nn

from rowprop.backprop.backward import running
from rowprop.backprop.compiled import compiled_elsewhere
from rowprop.backprop.hooks import Handle, ModuleHook, hook_gradient, unwrapped
from rowprop.backprop.layout import Layout, Part, layout_of
from rowprop.backprop.pick import Attention, Unit
from rowprop.backprop.rowgrad import RowGrad
from rowprop.backprop.rows import RowSet
from rowprop.backprop.sliced import RowSlice, gather_plain, rows_apart
from rowprop.backprop.watch import note
from rowprop.batch import tensors
from rowprop.checks import check_choice, check_tensor, check_within
from rowprop.errors import InvalidInput
from rowprop.host import mark, reach, readable, waits

MOST = 0.8  # the share of live rows up to which the backward is sliced: above, gathers cost most of what they save


@overload
def skip_zeros(
    x: Tensor, *, unit: Unit | None = None, attention: Attention = "exact", capacity: float | None = None
) -> Tensor: ...


@overload
def skip_zeros(
    x: nn.Module, *, unit: Unit | None = None, attention: Attention = "exact", capacity: float | None = None
) -> SkippingZeros: ...


def skip_zeros(
    x: Tensor | nn.Module,
    *,
    unit: Unit | None = None,
    attention: Attention = "exact",
    capacity: float | None = None,
) -> Tensor | SkippingZeros:
    """Have the rows, or tokens, whose gradient is zero leave the backward: exact, with nothing to choose.

    It is the identity. In the backward it looks at the gradient that arrives, whatever made the zeros: labels of -100,
    masks, ``losses[rows]``, satisfied hinges, answers without advantage. What is not zero goes on as after
    :func:`rowprop.pick`; :func:`rowprop.watch` names the ops that need all rows.

    Args:
        x: A tensor, anywhere in a graph; or a module, whose outputs then have this in each forward in grad mode. Of a
            model of transformers also the head's output and the hidden states that the head takes.
        unit: ``"row"``: entries of the first dimension leave. ``"token"``: positions of the first two, so that a row
            leaves when all of its tokens do. Default None: tokens of tensors ``(N, T, C)``, and of the ``(N, T)`` that
            a language model of transformers returns; else rows.
        attention: As in :func:`rowprop.pick`. ``"cut"`` is an approximation.
        capacity: The largest share of live rows that may come, in (0, 1]. That many go on, so that nobody waits for
            the device to count them. Where more come, the gradient goes on whole on the CPU; on an accelerator, where
            nobody knows in time, the backward raises when it ends: leave that step out. Default None: as many as are
            live.

    Returns:
        For a tensor the tensor itself. For a module a handle with ``record``, ``paused()`` and ``remove()``.

    Raises:
        InvalidInput: ``x`` is neither, a value is out of its range, or, at the backward, more came than ``capacity``.

    Exact: the gradient is the plain one, but for plain training's NaN where a zero meets an infinite activation. NaN
    and infinite gradients are live. If nothing is live, the backward of one row runs, and every parameter gets its
    zeros. BatchNorm in training gets all rows. The gradient goes on whole where more than 80 % of it is live, under
    ``create_graph=True``, under ``torch.func`` transforms and inside a compiled region.

    Cost:
        Reads the gradient and copies its live rows. Without ``capacity=`` the host waits once for the device.

    Example:
        >>> w = torch.ones(2, requires_grad=True)
        >>> losses = rowprop.skip_zeros((torch.arange(6.0).reshape(3, 2) @ w) ** 2)
        >>> losses[losses.detach().topk(1).indices].mean().backward()
        >>> w.grad
        tensor([72., 90.])
    """
    check_choice("skip_zeros", "unit", unit, (None, "row", "token"))
    check_choice("skip_zeros", "attention", attention, ("exact", "cut"))
    if capacity is not None:
        check_within("skip_zeros", "capacity", capacity, "(0, 1]")
    if not isinstance(x, nn.Module):
        check_tensor("skip_zeros", "x", x, "a tensor or a torch.nn.Module was needed.")
        if x.ndim == 0:
            raise InvalidInput("skip_zeros got a 0-d tensor but rows were needed; pass the losses before their mean.")
    skip = _Skip(unit, attention, capacity)
    if isinstance(x, nn.Module):
        return SkippingZeros(x, skip)
    skip.hook(x, "", lambda record: None)
    return x


@dataclass(frozen=True)
class SkipRecord:
    """What became of one gradient.

    Attributes:
        place: The module whose output it is the gradient of; empty for that of the module given.
        unit: ``"row"`` or ``"token"``.
        total: How many rows, or tokens, came.
        live: How many of them were not zero; None where a device alone knows.
        kept: How many went on.
        reason: Why; a sentence.
    """

    place: str
    unit: str
    total: int
    live: int | None
    kept: int
    reason: str

    @property
    def share(self) -> float:
        """The share that went on."""
        return self.kept / self.total

    def __repr__(self) -> str:
        where = f" at {self.place}" if self.place else ""
        return f"{self.kept} of {self.total} {self.unit}s went on{where}: {self.reason}"


class SkippingZeros(Handle):
    """The handle that :func:`rowprop.skip_zeros` returns for a module.

    Attributes:
        places: Names of the modules whose outputs are hooked; empty for that of the module given.
        records: For each of them that the last backward came to a :class:`SkipRecord`; of several outputs, that of
            the one where most left.
    """

    def __init__(self, module: nn.Module, skip: _Skip) -> None:
        super().__init__()
        head = _head_of(module)
        found = _places(module, head)
        self.places = tuple(found)
        self.records: dict[str, SkipRecord] = {}
        self._skip = skip if head is None else replace(skip, token_ndims=(2, 3))
        for place, inner in found.items():
            self._handles.append(inner.register_forward_hook(ModuleHook(partial(self._left, place))))

    def __repr__(self) -> str:
        nothing = "no backward yet; a model is compiled before its zeros are skipped, not after"
        return f"SkippingZeros({'; '.join(map(str, self.records.values())) or nothing})"

    @property
    def record(self) -> SkipRecord | None:
        """That of the place where most left the last backward; None before the first."""
        return min(self.records.values(), key=lambda record: record.share, default=None)

    def _left(self, place: str, _: nn.Module, __: Any, output: Any) -> None:
        if not torch.is_grad_enabled():
            return

        def keep(record: SkipRecord) -> None:
            self.records = running().of(self, dict[str, SkipRecord])
            self.records[place] = min(self.records.get(place, record), record, key=lambda each: each.share)

        for tensor in tensors(output):
            self._skip.hook(tensor, place, keep, lambda: self._active)


@dataclass(frozen=True)
class _Skip:
    unit: Unit | None
    attention: Attention
    capacity: float | None
    token_ndims: tuple[int, ...] = (3,)  # of tensors whose entries are tokens, where nobody says

    def hook(
        self,
        tensor: Tensor,
        place: str,
        keep: Callable[[SkipRecord], None],
        active: Callable[[], bool] = lambda: True,
    ) -> None:
        """Have the gradient of a tensor lose its zeros; ``keep`` is told what became of each gradient."""
        unit = self.unit or ("token" if tensor.ndim in self.token_ndims else "row")
        dims = 2 if unit == "token" else 1
        plain = tensor.requires_grad and tensor.layout is torch.strided and not tensor.is_nested
        # No part of one element, as after any view: attention knows a packed row by that.
        parts = [Part(dim, size) for dim, size in enumerate(tensor.shape[:dims]) if size != 1]
        if not plain or not parts or tensor.ndim < dims or tensor.numel() == 0:
            return
        layout, record = layout_of(parts), partial(SkipRecord, place, unit)
        if compiled_elsewhere(tensor.grad_fn):
            why = "compiled by a backend other than torch.compile(backend='rowprop')"
            keep(record(layout.num_rows, None, layout.num_rows, why))
            return

        def change(grad: Tensor, layout: Layout) -> RowSlice | None:
            if not active():
                return None
            g = grad.sliced if type(grad) is RowGrad and grad.full is None else None
            found, total, count, reason = self._live(grad, cast("RowSlice | None", g), layout)
            if found is not None or g is None:  # else nothing became of it since it was sliced, where it was told
                keep(record(total, count, total if found is None else found.rows.kept, reason))
            return found

        hook_gradient(tensor, layout, change)

    def _live(self, grad: Tensor, g: RowSlice | None, layout: Layout) -> tuple[RowSlice | None, int, int | None, str]:
        """The rows of a gradient, sliced or not, that go on, None for all; how many came; how many are live; why."""
        if g is not None:
            if layout.minor and g.layout == Layout(layout.dim, layout.parts[0].size):
                g = g.spread(layout.minor[0].dim)  # whole rows came: tokens may leave them
            values, within = g.values, g.layout.compact(g.rows.kept)
            live = live_entries(rows_apart(values, within), [within.dim + 1])
        else:
            values, within = grad.plain() if type(grad) is RowGrad else grad, layout
            live = live_entries(values, [part.dim for part in layout.parts]).flatten()
        places, count, reason = self._places(live)
        found = None
        if places is not None and g is not None:
            found = RowSlice(gather_plain(values, places, within), g.rows.some(places), g.layout, g.shape)
        elif places is not None:
            rows = RowSet(places, layout.num_rows, unique=True, batchnorm="exact", attention=self.attention)
            # Not gather(), which would hold the whole gradient as long as the backward runs.
            kept = gather_plain(values, places, layout, rows.indices(layout.sizes) if layout.minor else ())
            found = RowSlice(kept, rows, layout, values.shape)
        return found, live.numel(), count, reason

    def _places(self, live: Tensor) -> tuple[Tensor | None, int | None, str]:
        """The places of the rows that go on, in order, (K,), None for all; how many are live, if it is known; why."""
        total = live.numel()
        if not readable(live):
            return None, None, "the gradient has no values to look at now"
        room = total if self.capacity is None else ceil(self.capacity * total)
        if waits(live):
            if self.capacity is not None:
                return self._first_live(live, room)
            note("waited", "which rows have a gradient of zeros")
        places = live.nonzero().squeeze(1)
        count = places.numel()
        if count > room:
            return None, count, f"more are live than capacity={self.capacity} takes"
        if count > MOST * total:
            return None, count, f"more than {MOST:.0%} are live"
        return places if count else places.new_zeros(1), count, "the others are zero"  # each parameter gets its zeros

    def _first_live(self, live: Tensor, room: int) -> tuple[Tensor | None, None, str]:
        """As many places as there is room for, live ones first, found without a wait."""
        if room > MOST * live.numel():
            return None, None, f"capacity={self.capacity} is above {MOST}"
        count = live.sum().to("cpu", non_blocking=True)
        running().ends.append(partial(self._check, count, mark(live.device), room, live.numel()))
        places = live.logical_not().argsort(stable=True)[:room].sort().values
        return places, None, f"capacity={self.capacity} takes so many"

    def _check(self, live: Tensor, arrived: Any, room: int, total: int) -> None:
        """At the end of the backward the device has long counted, and still works on: nobody waits for that.

        What was left out is lost then: the whole gradient is freed, and so is what the nodes below had saved.
        """
        reach(arrived)
        if int(live) > room:
            raise InvalidInput(
                f"skip_zeros got {int(live)} live rows of {total} but capacity={self.capacity} takes {room}, so the "
                "gradient of this step is wrong; leave the step out and raise capacity."
            )


def live_entries(values: Tensor, dims: Collection[int]) -> Tensor:
    """Whether there is anything but zeros, for each entry of some dimensions; no copy of the values is made."""
    others = tuple(dim for dim in range(values.ndim) if dim not in dims)
    if not others:
        return values != 0
    if values.is_complex() or waits(values):
        return cast(Any, torch).linalg.vector_norm(values, torch.inf, dim=others) != 0
    # On a CPU each of the two takes a tenth of that norm's time.
    either: Any = values
    return (either.amax(others) != 0) | (either.amin(others) != 0)


def _head_of(module: nn.Module) -> nn.Module | None:
    """The head of a language model of transformers."""
    return getattr(unwrapped(module), "get_output_embeddings", lambda: None)()


def _places(module: nn.Module, head: nn.Module | None) -> dict[str, nn.Module]:
    """The modules whose outputs to hook, by their names.

    A model of transformers may compute its loss inside, and some fuse it with the head, which is then never called.
    """
    model = unwrapped(module)
    inner = head, getattr(model, "base_model", None)
    named: dict[str, nn.Module] = dict(cast(Any, module).named_modules())
    return {"": module} | {name: each for name, each in named.items() if each in inner and each is not model}
