"""skip_zeros(): drops rows and tokens whose gradient is exactly zero from the backward, whatever made the zeros."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import partial
from math import ceil
from typing import Any, cast, overload

import torch
from torch import Tensor, nn

from rowprop.backprop.autograd.hooks import Handle, ModuleHook, hook_gradient, unwrapped
from rowprop.backprop.autograd.rowgrad import RowGrad
from rowprop.backprop.backward import outer, running
from rowprop.backprop.compiled import compiled_elsewhere
from rowprop.backprop.pick import Attention, Unit
from rowprop.backprop.rows.gather import gather_plain, rows_apart
from rowprop.backprop.rows.layout import Layout, Part, layout_of
from rowprop.backprop.rows.rows import RowSet
from rowprop.backprop.rows.slice import RowSlice
from rowprop.backprop.watch import note
from rowprop.batch import tensors
from rowprop.checks import check_choice, check_tensor, check_within, wrong
from rowprop.errors import InvalidInput
from rowprop.host import mark, reach, readable, waits

MOST = 0.8  # largest share of nonzero rows that is sliced: with more, gathering costs most of what it saves


@overload
def skip_zeros(
    x: Tensor,
    *,
    unit: Unit | tuple[int, ...] | None = None,
    attention: Attention = "exact",
    capacity: float | None = None,
) -> Tensor: ...


@overload
def skip_zeros(
    x: nn.Module,
    *,
    unit: Unit | tuple[int, ...] | None = None,
    attention: Attention = "exact",
    capacity: float | None = None,
) -> SkippingZeros: ...


def skip_zeros(
    x: Tensor | nn.Module,
    *,
    unit: Unit | tuple[int, ...] | None = None,
    attention: Attention = "exact",
    capacity: float | None = None,
) -> Tensor | SkippingZeros:
    """Drop the rows, or tokens, whose gradient is zero from the backward: exact, with nothing to choose.

    It does not change the forward. In the backward it looks at the gradient that arrives, whatever made the zeros:
    labels of -100, masks, ``losses[rows]``, satisfied hinges, answers without advantage. It passes on the nonzero rows,
    as :func:`rowprop.pick` does; :func:`rowprop.watch` names the ops that need all rows.

    Args:
        x: A tensor, anywhere in a graph; or a module, whose outputs then have this in each forward in grad mode. Of a
            model of transformers also the head's output and the hidden states that the head takes.
        unit: What is skipped. ``"row"``: entries of the first dimension. ``"token"``: positions of the first two, also
            of ``(T, N, C)``. A tuple: positions of these dimensions, ``(1,)`` for the rows of an ensemble's
            ``(E, N, C)``. Default None: tokens of ``(N, T, C)``, and of the ``(N, T)`` that a language model of
            transformers returns; of ``(N, C, H, W)`` pixels, or images where no pixels of the others are zero; pixels
            of the losses ``(N, H, W)`` of ``cross_entropy``; else rows.
        attention: As in :func:`rowprop.pick`. ``"cut"`` is an approximation.
        capacity: The largest share of nonzero rows that may come, in (0, 1]. That many stay in the backward, so the
            host does not wait for the device to count them, and images are rows. If more come, nothing is skipped on
            the CPU; on an accelerator the backward raises when it ends: leave that step out. Default None: any share.

    Returns:
        For a tensor the tensor itself. For a module a handle with ``record``, ``paused()`` and ``remove()``.

    Raises:
        InvalidInput: ``x`` is neither, a value is out of its range, or, at the backward, more came than ``capacity``.

    Warns:
        UserWarning: Two backwards trained the module's parameters and no gradient came to its outputs: the training
            calls another method, or uses an output without rows. It names the module to use.

    Exact: the gradient is the plain one, except where plain training multiplies a zero by an infinite activation and
    gets NaN. NaN and infinite gradients count as nonzero. If all rows are zero, the backward of one row runs, and every
    parameter gets its zeros. BatchNorm in training gets all rows. Nothing is skipped where more than 80 % of the rows
    are nonzero, under ``create_graph=True``, under ``torch.func`` transforms and inside a compiled region. Compile a
    model before you skip its zeros, with ``backend="rowprop"``.

    Cost:
        Reads the gradient and copies its nonzero rows. Without ``capacity=`` the host waits once for the device, and
        twice for the gradient of a tensor with more than three dimensions.

    Example:
        >>> w = torch.ones(2, requires_grad=True)
        >>> losses = rowprop.skip_zeros((torch.arange(6.0).reshape(3, 2) @ w) ** 2)
        >>> losses[losses.detach().topk(1).indices].mean().backward()
        >>> w.grad
        tensor([72., 90.])
    """
    if isinstance(unit, tuple):
        whole = all(type(dim) is int and dim >= 0 for dim in unit)
        if not whole or not unit or list(unit) != sorted(set(unit)):
            raise wrong("skip_zeros", "unit", unit, "dimensions in ascending order were needed, such as (1,).")
    else:
        check_choice("skip_zeros", "unit", unit, (None, "row", "token"))
    check_choice("skip_zeros", "attention", attention, ("exact", "cut"))
    if capacity is not None:
        check_within("skip_zeros", "capacity", capacity, "(0, 1]")
    if not isinstance(x, nn.Module):
        check_tensor("skip_zeros", "x", x, "a tensor or a torch.nn.Module was needed.")
        if x.ndim == 0:
            raise InvalidInput("skip_zeros got a 0-d tensor but rows were needed; pass the losses before their mean.")
    skip = Skip(unit, attention, capacity)
    if isinstance(x, nn.Module):
        return SkippingZeros(x, skip)
    skip.hook(x, "", lambda record: None)
    return x


@dataclass(frozen=True)
class SkipRecord:
    """What became of one gradient.

    Attributes:
        place: The module whose output it is the gradient of; empty for that of the module given.
        unit: ``"row"``, ``"token"``, ``"pixel"``, or ``"position"`` for other dimensions.
        total: How many of them came.
        live: How many of them were nonzero; None where a device alone knows.
        kept: How many stayed in the backward.
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
        """The share that stayed."""
        return self.kept / self.total

    def __repr__(self) -> str:
        where = f" at {self.place}" if self.place else ""
        return f"skipped {self.total - self.kept} of {self.total} {self.unit}s{where}: {self.reason}"


class SkippingZeros(Handle):
    """The handle that :func:`rowprop.skip_zeros` returns for a module.

    Its text says what the last backward skipped. The first two backwards that train the module's parameters, and in
    which no gradient comes to its outputs, raise a warning that names the module to use instead.

    Attributes:
        places: Names of the modules whose outputs are hooked; empty for that of the module given.
        records: For each of them that the last backward came to a :class:`SkipRecord`; of several outputs, that of
            the one where most was skipped.
    """

    def __init__(self, module: nn.Module, skip: Skip) -> None:
        super().__init__()
        found = places_of(module)
        self.places = tuple(found)
        self.records: dict[str, SkipRecord] = {}
        self._skip = skip.at(module)
        self._missing = _Missing(module, lambda: self._active)
        for place, inner in found.items():
            self._handles.append(inner.register_forward_hook(ModuleHook(partial(self._left, place))))
        self._handles.append(self._missing)

    def __repr__(self) -> str:
        nothing = self._missing.said or "no backward yet"
        return f"SkippingZeros({'; '.join(map(str, self.records.values())) or nothing})"

    @property
    def record(self) -> SkipRecord | None:
        """That of the place where most was skipped in the last backward; None before the first."""
        return min(self.records.values(), key=lambda record: record.share, default=None)

    def _left(self, place: str, _: nn.Module, __: Any, output: Any) -> None:
        if not torch.is_grad_enabled():
            return

        def keep(record: SkipRecord | None) -> None:
            self._missing.remove()
            if record is None:
                self._missing.said = "the gradient had no further zeros when it came"
                return
            self.records = running().of(self, dict[str, SkipRecord])
            self.records[place] = min(self.records.get(place, record), record, key=lambda each: each.share)

        for tensor in tensors(output):
            self._skip.hook(tensor, place, keep, lambda: self._active)


class _Missing:
    """Notices backwards that train a module's parameters while no gradient comes to its outputs, and warns once.

    The first of them has the outputs of the modules inside watched, so that the second can name one.
    """

    def __init__(self, module: nn.Module, active: Callable[[], bool]) -> None:
        self.said = ""
        self._active = active
        self._module = weakref.ref(module)
        self._backwards = 0
        self._seen: list[tuple[str, Tensor]] = []  # modules inside, and which rows of a gradient there are nonzero
        trained = [p for p in module.parameters() if p.requires_grad and p.is_leaf]
        self._handles: list[Any] = [p.register_post_accumulate_grad_hook(self._trained) for p in trained]

    def remove(self) -> None:
        """End it."""
        while self._handles:
            self._handles.pop().remove()

    def _trained(self, _: Tensor) -> None:
        if self._handles and self._active() and not torch.is_grad_enabled():
            outer().of(self, lambda: outer().ends.append(self._ended))

    def _ended(self) -> None:
        module = self._module()
        if not self._handles or module is None:  # a gradient came after all
            return
        self._backwards += 1
        self.said = f"nothing was skipped in {self._backwards} backwards: no output of the module had a gradient"
        if self._backwards == 1:
            for path, inner in cast(Any, module).named_modules():
                hook = ModuleHook(partial(self._left, path))
                self._handles.append(inner.register_forward_hook(hook))
            return
        self.remove()
        shares = [(float(live.float().mean()), path) for path, live in self._seen]
        self._seen.clear()
        share, path = min(shares, default=(1.0, ""))
        if path:
            self.said += f"; use skip_zeros at {path!r}, where {1 - share:.0%} of the rows have no gradient"
        kind = type(module).__name__
        warnings.warn(
            f"skip_zeros({kind}): {self.said}. The training calls another method, or uses an output without rows; "
            f"rowprop.find_zeros({kind}) tells where the zeros are.",
            stacklevel=2,
        )

    def _left(self, path: str, _: nn.Module, __: Any, output: Any) -> None:
        for tensor in tensors(output) if torch.is_grad_enabled() else ():
            if path and tensor.ndim and tensor.grad_fn is not None and tensor.layout is torch.strided:
                tensor.register_hook(partial(self._arrived, path))

    def _arrived(self, path: str, grad: Tensor | None) -> None:
        if self._handles and type(grad) is Tensor and grad.layout is torch.strided and readable(grad):
            self._seen.append((path, live_entries(grad, (0,))))


@dataclass(frozen=True)
class Look:
    """What a look at a gradient found: the rows to hand on, None for all; which rows are nonzero; and the record."""

    found: RowSlice | None
    live: Tensor
    record: SkipRecord


@dataclass(frozen=True)
class Skip:
    """What to look for in gradients."""

    unit: Unit | tuple[int, ...] | None = None
    attention: Attention = "exact"
    capacity: float | None = None
    token_ndims: tuple[int, ...] = (3,)  # of tensors whose entries are tokens, where nobody says

    def at(self, module: nn.Module) -> Skip:
        """The same for the outputs of a module: a language model of transformers returns (N, T) for tokens, too."""
        return self if _head_of(module) is None else replace(self, token_ndims=(2, 3))

    def dims(self, tensor: Tensor) -> tuple[int, ...]:
        """The dimensions whose positions may be skipped."""
        if isinstance(self.unit, tuple):
            return self.unit
        if self.unit is None and tensor.ndim == 3 and cast(Any, tensor.grad_fn).name().startswith("NllLoss2d"):
            return 0, 1, 2  # a loss per pixel
        if self.unit is None and tensor.ndim > 3 and self.capacity is None:
            return 0, *range(2, tensor.ndim)
        return (0, 1) if self.unit == "token" or (self.unit is None and tensor.ndim in self.token_ndims) else (0,)

    def layout(self, tensor: Tensor) -> Layout | None:
        """Where the rows lie in a tensor; None if it has none whose gradient could be looked at."""
        plain = tensor.grad_fn is not None and tensor.layout is torch.strided and not tensor.is_nested
        if not plain or tensor.numel() == 0 or (dims := self.dims(tensor))[-1] >= tensor.ndim:
            return None
        # No part of one element, as after any view: attention knows a packed row by that.
        parts = [Part(dim, tensor.shape[dim]) for dim in dims if tensor.shape[dim] != 1]
        return layout_of(parts) if parts else None

    def hook(
        self,
        tensor: Tensor,
        place: str,
        keep: Callable[[SkipRecord | None], None],
        active: Callable[[], bool] = lambda: True,
    ) -> None:
        """Have the gradient of a tensor lose its zeros.

        ``keep`` gets the record of each gradient, or None for one that came sliced and has no further zeros.
        """
        layout = self.layout(tensor)
        if layout is None:
            return
        node: Any = tensor.grad_fn
        if compiled_elsewhere(node):
            why = "compiled by a backend other than torch.compile(backend='rowprop')"
            keep(SkipRecord(place, _named(self.dims(tensor)), layout.num_rows, None, layout.num_rows, why))
            return
        if not torch.compiler.is_compiling():
            node.metadata.setdefault(SKIPPED, set()).add(tensor.output_nr)
        dims = self.dims(tensor)

        def change(grad: Tensor, layout: Layout) -> RowSlice | None:
            if not active():
                return None
            look = self.look(grad, layout, dims, place)
            sliced = type(grad) is RowGrad and grad.full is None
            keep(None if sliced and look.found is None else look.record)
            return look.found

        hook_gradient(tensor, layout, change)

    def look(self, grad: Tensor, layout: Layout, dims: tuple[int, ...], place: str = "") -> Look:
        """Look at a gradient, sliced or not; ``layout`` is that of the dimensions if it is not sliced."""
        g = cast("RowSlice | None", grad.sliced if type(grad) is RowGrad and grad.full is None else None)
        if g is not None:
            if layout.minor and g.layout == Layout(layout.dim, layout.parts[0].size):
                g = g.spread(layout.minor[0].dim)  # whole rows came: tokens may leave them
            values, within = g.values, g.layout.compact(g.rows.kept)
            live = live_entries(rows_apart(values, within), [within.dim + 1])
        else:
            values = grad.plain() if type(grad) is RowGrad else grad
            live = live_entries(values, [part.dim for part in layout.parts])
            if self.unit is None and values.ndim > 3 and layout.dim == 0:
                live, layout = _pixels(live, layout) if layout.minor else (live, layout)
                dims = tuple(part.dim for part in layout.parts)
            within = layout
        places, count, reason = self._places(live.flatten())
        found = None
        if places is not None and g is not None:
            found = RowSlice(gather_plain(values, places, within), g.rows.some(places), g.layout, g.shape)
        elif places is not None:
            rows = RowSet(places, layout.num_rows, unique=True, batchnorm="exact", attention=self.attention)
            # Not gather(), which would hold the whole gradient as long as the backward runs.
            kept = gather_plain(values, places, layout, rows.indices(layout.sizes) if layout.minor else ())
            found = RowSlice(kept, rows, layout, values.shape)
        total = live.numel()
        kept = total if found is None else found.rows.kept
        return Look(found, live, SkipRecord(place, _named(dims), total, count, kept, reason))

    def _places(self, live: Tensor) -> tuple[Tensor | None, int | None, str]:
        """The places of the rows that stay, in order, (K,), None for all; how many are nonzero, if it is known; why."""
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
            return None, count, f"more are nonzero than capacity={self.capacity} takes"
        if count > MOST * total:
            return None, count, f"more than {100 * MOST:.0f} % are nonzero"
        kept = places if count else places.new_zeros(1)  # one row of zeros: each parameter gets its gradient
        return kept, count, "their gradient is zero"

    def _first_live(self, live: Tensor, room: int) -> tuple[Tensor | None, None, str]:
        """As many places as there is room for, nonzero ones first, found without a wait."""
        if room > MOST * live.numel():
            return None, None, f"capacity={self.capacity} is above {MOST}"
        count = live.sum().to("cpu", non_blocking=True)
        running().ends.append(partial(self._check, count, mark(live.device), room, live.numel()))
        places = live.logical_not().argsort(stable=True)[:room].sort().values
        return places, None, f"capacity={self.capacity} fixes the number"

    def _check(self, live: Tensor, arrived: Any, room: int, total: int) -> None:
        """At the end of the backward the device has long counted, and still works on: nobody waits for that.

        What was left out is lost then: the whole gradient is freed, and so is what the nodes below had saved.
        """
        reach(arrived)
        if int(live) > room:
            raise InvalidInput(
                f"skip_zeros got {int(live)} nonzero rows of {total} but capacity={self.capacity} takes {room}, so the "
                "gradient of this step is wrong; leave the step out and raise capacity."
            )


SKIPPED = "rowprop skips zeros of these outputs"  # in the metadata of a node


def _named(dims: tuple[int, ...]) -> str:
    """What to call the positions of some dimensions."""
    return "row" if dims == (0,) else "token" if dims == (0, 1) else "pixel" if len(dims) > 2 else "position"


def _pixels(live: Tensor, layout: Layout) -> tuple[Tensor, Layout]:
    """Which pixels (N, H, W) are nonzero, without the dimensions that do not matter; or which images, if as good.

    Images go through any convolution, single pixels through those of one pixel alone.
    """
    images, along = live.flatten(1).any(1), range(1, live.ndim)
    if not readable(live):
        return images, layout_of(layout.parts[:1])
    if waits(live):
        note("waited", "whether pixels or whole images have a gradient of zeros")
    alike = [(live.any(dim) == live.all(dim)).all() for dim in along]
    numbers = torch.stack([*(each.long() for each in alike), live.sum(), images.sum()])
    *same, pixels, whole = cast("list[int]", numbers.tolist())
    if pixels > MOST * whole * live[0].numel():
        return images, layout_of(layout.parts[:1])
    for dim in reversed(along):
        live = live.any(dim) if same[dim - 1] else live
    return live, layout_of([layout.parts[0], *(layout.parts[dim] for dim in along if not same[dim - 1])])


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


def places_of(module: nn.Module) -> dict[str, nn.Module]:
    """The modules whose outputs to hook, by their names.

    A model of transformers may compute its loss inside, and some fuse it with the head, which is then never called.
    """
    model = unwrapped(module)
    inner = _head_of(module), getattr(model, "base_model", None)
    named: dict[str, nn.Module] = dict(cast(Any, module).named_modules())
    return {"": module} | {name: each for name, each in named.items() if each in inner and each is not model}
