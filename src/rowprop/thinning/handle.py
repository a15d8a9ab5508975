"""thin(): makes every later backward of a model cheaper, with an unbiased gradient."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count, product
from typing import Any

import torch
from torch import Tensor, nn

from rowprop.backprop.autograd.checkpoint import enters_checkpoint
from rowprop.backprop.autograd.hooks import Handle, ModuleHook, hook_gradient, rows_in, unwrapped
from rowprop.backprop.backward import Backward, numbered, outermost
from rowprop.backprop.compiled import compiled_elsewhere
from rowprop.backprop.pick import Unit
from rowprop.backprop.rows.layout import Layout
from rowprop.backprop.rows.slice import RowSlice
from rowprop.batch import tensors
from rowprop.checks import check_choice, check_entries, check_generator, check_kind, check_vector, check_within, shown
from rowprop.distributed import own_rank
from rowprop.engines import uses_batch_statistics
from rowprop.errors import InvalidInput
from rowprop.host import readable, waits
from rowprop.thinning.backward import ThinnedBackward
from rowprop.thinning.blocks import blocks_of
from rowprop.thinning.control import OWNER, Control, carried
from rowprop.thinning.drawn import thinned
from rowprop.thinning.worth import Work, Worth

BEHIND = 2  # read a device's numbers two backwards late, so that the copy never blocks
VERSION = 4  # of the saved state
_handles = count()  # numbers the handles of this process, so that their draws are independent


def thin(
    model: nn.Module,
    *,
    tau: float = 0.025,
    keep: float | None = None,
    unit: Unit = "row",
    blocks: Iterable[str | nn.Module] | None = None,
    generator: torch.Generator | None = None,
) -> Thinning:
    """Make every later backward of a model cheaper, with the full batch's gradient in expectation.

    In the backward, after each block, rows are drawn with probabilities in proportion to the norms of their gradients,
    and divided by their probabilities. The others are dropped, so every op below that treats rows alike runs on the
    drawn rows only. The training loop does not change. The returned handle describes the last backward in ``record``,
    gives exact gradients inside ``paused()``, and ends thinning with ``remove()``.

    Args:
        model: The model. It may be wrapped already, as by DistributedDataParallel.
        tau: Bound of the variance that dropped rows add, as a share, below 1, of the gradient's variance between
            batches. It determines the shares of rows that blocks keep: 1 at first, lower once few rows hold most of the
            gradient. Default .025, as in VCAS.
        keep: A fixed share of the rows for all blocks, in (0, 1], instead of ``tau``.
            On a CPU it is a share of the rows with a nonzero gradient. On other devices, where counting these would
            sync, it is a share of all arriving rows. After a pick of tokens it is a share of the tokens, and below an
            attention that has mixed them, of the sequences that arrive. Default None.
        unit: ``"token"`` draws positions of outputs ``(N, T, C)`` or ``(T, N, C)`` instead of rows: ops that treat
            tokens alike run on the drawn tokens, attention on the drawn queries; its keys and values, and their
            producers, cost all tokens. The next block draws from all again. Other outputs drop rows. Default ``"row"``.
        blocks: Names or modules of the model after which the gradient is thinned. Default None: children of
            ``ModuleList`` and ``Sequential`` that repeat a class, such as the layers of a transformer;
            :attr:`Thinning.blocks` lists them.
        generator: Draws the rows; on the CPU, for any device. Two handles in one loss need generators with different
            seeds: with equal draws the gradient is biased. Default None: a new generator, seeded from
            ``torch.initial_seed()``, the rank and the handle's number in this process.

    The forward is exact, and so are the gradients above the last block, and all gradients in evaluation mode, under
    ``create_graph=True``, under ``torch.func`` transforms, and in compiled regions. All others are unbiased; nearly so
    below BatchNorm in training mode, see ``docs/thinning.md``. Rows are the entries of the dimension that has the size
    of the model's first input tensor; an output without one is not thinned. Source: VCAS (Wang et al., ICLR
    2024, arXiv:2402.17227), whose control needs six further passes. A value out of range, a block that is not in the
    model, no block found and a thinned model raise :class:`rowprop.InvalidInput`.

    If draws would cost more than they save, judged by the shares and the graph's sizes and not by timing, ``tau`` draws
    none and tries again later; ``handle.record.reason`` reports it. ``keep=`` always draws. A draw costs one pass over
    the gradient of each block's output and some arithmetic on the rows' norms, without a sync. Without ``keep=``, the
    2nd, 4th, 8th and 16th backward and then one in 20 measures each row's part of the weight gradients: .05 of a step
    of 128 rows in a transformer of width 384, .13 with width 96.

    Example:
        >>> model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(3)))
        >>> handle = rowprop.thin(model, keep=0.5)
        >>> model(torch.randn(8, 4)).square().sum().backward()
        >>> handle.record.keep
        {'2': 0.5, '1': 0.5, '0': 0.5}
    """
    check_kind("thin", "model", model, nn.Module, "a torch.nn.Module was needed.")
    check_within("thin", "tau", tau, "(0, 1)", "; 0.025 is the default")
    if keep is not None:
        check_within("thin", "keep", keep, "(0, 1]")
    check_choice("thin", "unit", unit, ("row", "token"))
    check_generator("thin", generator)
    if generator is not None and generator.device.type != "cpu":
        needed = "one on the CPU was needed, for any device; torch.Generator().manual_seed(0) makes one."
        raise InvalidInput(f"thin got a generator on {generator.device} but {needed}")
    found = blocks_of(model, blocks)
    if _is_thinned(model, "_forward_pre_hooks") or any(_is_thinned(each, "_forward_hooks") for each in found.values()):
        raise InvalidInput("thin got a model that is thinned already; call remove() of the handle that it has.")
    if generator is None:
        apart = 0x9E3779B9 * next(_handles)  # far more than there are ranks; a generator uses 32 bits of its seed
        generator = torch.Generator().manual_seed((torch.initial_seed() + own_rank() + apart) % 2**63)
    return Thinning(model, found, Control(keep, tau, unit), generator)


@dataclass(frozen=True)
class ThinRecord:
    """The numbers of one backward; on a device, of an earlier one, so that reading them needs no sync.

    Attributes:
        keep: For each block, the share of rows that its backward ran with, relative to the rows at the first block; of
            tokens or of whole sequences, whichever arrived there. Blocks without a gradient are missing.
        variance: For each block, the variance that it added to the gradient, over the sum of the squared norms of all
            rows' gradients there; like ``ratio``, from the last backward that measured norms.
        ratio: The estimated variance that thinning added to the parameters' gradient, over that between batches.
        passes: Number of the backward, from 1; 0 before the first. Backwards while thinning is off do not count, nor,
            on a device, the last two before it.
        reason: Why these shares; a sentence.
        saved: The share of the blocks' backward that dropped rows saved: the mean of 1 - ``keep``, weighted by the
            FLOPs and elements counted below each block; unweighted with ``keep=``. It excludes the cost of draws.
        unit: What is drawn, ``"row"`` or ``"token"``.
    """

    keep: dict[str, float]
    variance: dict[str, float]
    ratio: float
    passes: int
    reason: str
    saved: float = 0.0
    unit: Unit = "row"

    def __repr__(self) -> str:
        if not self.keep:
            return f"ThinRecord({self.reason})"
        least, most = (f"{100 * share:.0f}" for share in (min(self.keep.values()), max(self.keep.values())))
        kept = most if least == most else f"{least} to {most}"
        said = f"saved {100 * self.saved:.0f} % of the blocks' backward, which kept {kept} % of the {self.unit}s"
        return f"ThinRecord(backward {self.passes}: {said}; {self.reason})"

    def to_dict(self) -> dict[str, float | str]:
        """Return the numbers under flat names, as loggers take them.

        They are ``thin/keep`` (the mean of the blocks) and ``thin/variance`` (their sum), both also for each block, as
        in ``thin/keep/encoder.0``; ``thin/ratio``, ``thin/saved``, ``thin/passes``, ``thin/reason``.
        """
        mean = sum(self.keep.values()) / len(self.keep) if self.keep else 1.0
        flat: dict[str, float | str] = {"thin/keep": mean, "thin/variance": sum(self.variance.values())}
        for kind in ("keep", "variance"):
            flat |= {f"thin/{kind}/{name}": share for name, share in getattr(self, kind).items()}
        return flat | {f"thin/{name}": getattr(self, name) for name in ("ratio", "saved", "passes", "reason")}


@dataclass(eq=False)
class _Forward:
    """The current or last forward."""

    number: int = 0
    num_rows: int | None = None  # None if blocks run outside a forward of the model; then read from the blocks
    counted: bool = False  # whether the work below its blocks is counted
    # Row counts of this forward and of those since the last backward: a checkpoint may rerun blocks of any of them.
    sizes: tuple[int | None, ...] = ()
    inside: bool = False  # whether the model is running
    over: bool = True  # whether the next block starts a new forward
    called: set[str] = field(default_factory=set[str])  # names of the blocks that ran in it
    hides: bool = False  # blocks ran without a graph: a reentrant checkpoint reruns them
    reenters: bool = False  # there is such a checkpoint
    mixes: bool | None = None  # a BatchNorm of the model mixes the rows; None: not yet known


class Thinning(Handle):
    """The handle that :func:`rowprop.thin` returns.

    ``blocks`` are the names of the blocks after which it thins, ``record`` is the :class:`ThinRecord` of a backward.
    """

    def __init__(
        self, model: nn.Module, blocks: Mapping[str, nn.Module], control: Control, generator: torch.Generator
    ) -> None:
        super().__init__()
        self.blocks = tuple(blocks)
        why = "no backward yet; a model that is compiled whole stays exact"
        self.record = ThinRecord({}, {}, 0.0, 0, why, unit=control.unit)
        self._model = model
        self._control = control
        self._worth = Worth(control.unit)
        self._generator = generator
        self._compiled: set[str] = set()
        self._forward = _Forward()
        self._unread: deque[ThinnedBackward] = deque()
        self._handles.append(model.register_forward_pre_hook(_Hook(self._entered), with_kwargs=True))
        # The output's hook runs first in the backward, so that a measurement covers all weights.
        for name, left in [*blocks.items(), ("", unwrapped(model))]:
            self._handles.append(left.register_forward_hook(_Hook(partial(self._left, name))))
        self._handles.append(model.register_forward_hook(_Hook(self._over), always_call=True))

    def __repr__(self) -> str:
        return f"Thinning(after {', '.join(self.blocks)}; {self.record.reason})"

    def state_dict(self) -> dict[str, Any]:
        """Everything that later draws depend on: the shares, which draws pay, and the generator's state."""
        while self._unread:
            self._read()
        return {
            "version": VERSION,
            "unit": self._control.unit,
            "control": self._control.state_dict(),
            "worth": self._worth.state_dict(),
            "generator": self._generator.get_state(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state.

        A missing or invalid entry, or one of another version of rowprop, raises InvalidInput, and nothing is loaded.
        """
        check_entries(OWNER, state, ["unit", "control", "worth", "generator"])
        if not isinstance(state.get("version"), int) or state["version"] != VERSION:
            needed = "one of this version was needed; begin without."
            raise InvalidInput(f"{OWNER} got a state of another version of rowprop but {needed}")
        check_vector(OWNER, "generator", state["generator"], torch.uint8, self._generator.get_state().numel())
        other = "this handle has the other one; call thin as it was called when the state was saved."
        if state["unit"] != self._control.unit:
            raise InvalidInput(f"{OWNER} got a state of unit={shown(state['unit'])} but {other}")
        control, worth = self._control.restored(state["control"]), self._worth.restored(state["worth"])
        for place in control.shares:
            if place not in self.blocks and place.rpartition("[")[0] not in self.blocks:
                own = f"thins after {', '.join(self.blocks)}; give thin the model and the blocks of the saved one."
                raise InvalidInput(f"{OWNER} got a state with the block {shown(place)} but this handle {own}")
        try:
            self._generator.set_state(state["generator"].cpu())
        except RuntimeError as error:
            why = f"cannot be loaded ({error}); save and load the state whole."
            raise InvalidInput(f"{OWNER} got the state of a generator that {why}") from error
        self._control, self._worth = control, worth
        self._unread.clear()
        self.record = ThinRecord({}, {}, 0.0, control.passes, self._reason(), unit=control.unit)

    # --- in the forward -----------------------------------------------------------------------------------------------

    def _entered(self, _: nn.Module, args: Any, kwargs: Any) -> None:
        if self._model.training and torch.is_grad_enabled():
            rows = next((t.shape[0] for t in tensors([args, kwargs]) if t.ndim and not t.is_nested), None)
            # Not if a checkpoint around the model reruns this forward.
            if not (outermost() >= 0 and self._forward.called and rows == self._forward.num_rows):
                self._begin_forward(rows, inside=True)

    def _over(self, *_: Any) -> None:
        self._forward.inside, self._forward.over = False, True

    def _begin_forward(self, num_rows: int | None, inside: bool) -> _Forward:
        last = self._forward
        sizes = (num_rows, *(size for size in last.sizes if size != num_rows))
        self._worth.begin()
        counted = self._control.counts(self._control.begun + 1)
        self._forward = _Forward(last.number + 1, num_rows, counted, sizes, inside, over=False)
        return self._forward

    def _left(self, name: str, _: nn.Module, __: Any, output: Any) -> None:
        """After a block, or the model (""), has run: register the hook that thins its output's gradient."""
        number, forward = outermost(), self._forward
        if not (self._model.training and torch.is_grad_enabled()):
            forward.hides |= forward.inside
            return
        again = name in forward.called
        # The end of an unwatched forward is not signalled.
        if number < 0 and (forward.over or (again and self._worth.sleeping and not forward.inside)):
            forward = self._begin_forward(None, inside=False)
        if number < 0 and name:
            forward.called.add(name)
        if self._worth.sleeping:
            return
        if forward.mixes is None:
            forward.mixes = uses_batch_statistics(self._model)
        if number >= 0:  # a checkpoint reruns the block; a reentrant one then runs a backward inside this one
            self._running(number)
        sizes = forward.sizes if number >= 0 and forward.sizes else (forward.num_rows,)
        counted = forward.counted and not (again and number >= 0)  # a checkpoint's second run is not counted again
        numbers = count()
        for tensor in tensors(output):
            plain = tensor.requires_grad and tensor.layout == torch.strided and not tensor.is_nested
            layout = _rows_in(tensor.shape, sizes) if plain else None
            if layout is None and name and plain and self._control.unit == "token" and 1 in sizes:
                layout = _tokens_in(tensor.shape)
            if not name and plain and forward.hides and not forward.reenters:
                forward.reenters = enters_checkpoint(tensor)
            if layout is None or not (name or self._control.keep is None or forward.hides):
                continue
            if name and compiled_elsewhere(tensor.grad_fn):  # it runs at full size, so thinning would save nothing
                if name not in self._compiled:
                    self._compiled.add(name)
                    self.record = replace(self.record, reason=self._reason())
                continue
            which = next(numbers)
            place = f"{name}[{which}]" if name and which else name
            if name and counted:
                self._worth.count(place, tensor, forward.number, number)
            hook_gradient(tensor, layout, partial(self._arrived, place, forward, number))

    # --- in the backward ----------------------------------------------------------------------------------------------

    def _arrived(self, place: str, forward: _Forward, number: int, grad: Tensor, layout: Layout) -> RowSlice | None:
        """When a gradient reaches an output: the rows to pass on; None to leave it unchanged.

        A reentrant checkpoint keeps rows apart only for a sliced gradient. It passes a full gradient on as a full one,
        and the blocks below would draw from all rows again.
        """
        if not self._active:
            return None
        g = rows_in(grad, layout)
        if not readable(g.values):
            return None
        running = self._running(number)
        if running.measures_weights:
            running.watch(g.rows)
        some = _tokens_of(g) if place and self._control.unit == "token" else g
        chosen = running.choose(place, forward.number, some, bool(forward.mixes)) if place else None
        if chosen is None:
            return g if running.measures_weights or forward.reenters else None
        drawn = thinned(some, *chosen)
        if some is not g and not waits(drawn.values):
            drawn.rows.whole = None  # a CPU counts the drawn tokens of each row, and attention runs their queries alone
        return drawn

    def _running(self, number: int) -> ThinnedBackward:
        """This handle's part of the backward with this number, or else of the running backward."""
        backward = numbered(number)

        def begin() -> ThinnedBackward:
            self._control.begun += 1
            running = ThinnedBackward(self._control, self._worth, self._uniform)
            backward.ends.append(partial(self._end, backward, running))
            return running

        return backward.of(self, begin)

    def _uniform(self) -> float:
        return torch.rand((), generator=self._generator, dtype=torch.float64).item()

    def _end(self, backward: Backward, done: ThinnedBackward) -> None:
        if not backward.failed:
            self._forward.sizes = ()
            self._forward.over |= not self._forward.inside
            # Do not count it: it reached no block, a checkpoint reran blocks, or its forward was before the pause.
            if not done.seen or 0 < self._worth.pause == self._worth.asleep:
                self._control.begun -= 1
            else:
                done.send()
                self._unread.append(done)
                while len(self._unread) > (BEHIND if done.late else 0):
                    self._read()
        done.end()

    def _read(self) -> None:
        """Read the numbers of the oldest unread backward."""
        done, control, worth = self._unread.popleft(), self._control, self._worth
        measured = done.read()
        if control.update(done.seen):
            part = next((rows / whole for (_, whole), rows in done.rows.items()), 1.0)
            worth.decide({place: control.share(place) for place in control.shares}, part)
            if worth.pause:  # the next trial starts afresh
                self._unread.clear()
        if measured is not None:
            control.learn(*measured)
        self.record = self._recorded(done)

    def _recorded(self, done: ThinnedBackward) -> ThinRecord:
        keep = {place: sum(s.kept for s in found) / sum(s.rows for s in found) for place, found in done.seen.items()}
        variance, ratio = self.record.variance, self.record.ratio
        if self._worth.pause:  # the next backwards are exact
            keep = dict.fromkeys(keep, 1.0)
        if self._worth.pause or all(s.kept == s.arrived for found in done.seen.values() for s in found):
            variance, ratio = dict.fromkeys(keep, 0.0), 0.0
        elif done.measures_norms:
            totals = {place: sum(s.total for s in found) or 1.0 for place, found in done.seen.items()}
            variance = {place: sum(s.added for s in found) / totals[place] for place, found in done.seen.items()}
            ratio = self._control.correction * carried(done.seen)
        works = {place: self._worth.works.get(place, Work(1.0)) for place in keep}
        unit, exact = self._control.unit, sum(work.exact for work in works.values()) or 1.0
        left = sum((work.exact - work.mixed * (unit == "token")) * (1 - keep[p]) for p, work in works.items())
        return ThinRecord(keep, variance, ratio, self._control.passes, self._reason(), left / exact, unit)

    def _reason(self) -> str:
        reasons = [*self._worth.reason(), self._control.reason()]
        if self._compiled:
            names = ", ".join(sorted(self._compiled))
            reasons.append(f"exact after {names}: compiled by a backend other than torch.compile(backend='rowprop')")
        return "; ".join(reasons)


class _Hook(ModuleHook):
    """A hook of a handle; a copy is not one."""


def _is_thinned(module: nn.Module, kind: str) -> bool:
    """Whether a module has a handle's hook of this kind, not one that it was copied with."""
    return any(isinstance(hook, _Hook) for hook in getattr(module, kind).values())


def _rows_in(shape: torch.Size, sizes: Iterable[int | None]) -> Layout | None:
    """The layout of the rows in a block's output, for a batch of one of these sizes; None if unknown."""
    known = [shape[0] if size is None else size for size in sizes] if len(shape) else []
    for dim, size in product(range(min(2, len(shape))), known):
        if shape[dim] == size > 1:
            return Layout(dim, size)
    size = next((size for size in known if size > 1 and shape[0] and shape[0] % size == 0), None)
    return None if size is None else Layout(0, size, 1, shape[0] // size)


def _tokens_in(shape: torch.Size) -> Layout | None:
    """The layout of the tokens in a batch of one row: sequences packed without padding."""
    dim = 1 - shape[:2].index(1) if len(shape) == 3 and 1 in shape[:2] else 0
    return Layout(dim, shape[dim]) if len(shape) == 3 and shape[1 - dim] == 1 and shape[dim] > 1 else None


def _tokens_of(g: RowSlice) -> RowSlice:
    """The tokens of whole rows (K, T, C) or (T, K, C); other gradients are returned unchanged."""
    if g.ndim != 3 or not g.layout.plain or g.dim > 1 or g.shape[1 - g.dim] < 2:
        return g
    return g.spread(1 - g.dim)
