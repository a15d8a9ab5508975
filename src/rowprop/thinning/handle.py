"""thin(): one line that makes every later backward of a model cheaper, and leaves its gradient right on average."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count, product
from statistics import fmean
from typing import Any, cast

import torch
from torch import Tensor, nn

from rowprop.backprop.backward import outermost
from rowprop.backprop.checkpoint import enters_checkpoint
from rowprop.backprop.compiled import compiled_elsewhere
from rowprop.backprop.layout import Layout
from rowprop.backprop.rowgrad import RowGrad
from rowprop.backprop.sliced import RowSet, RowSlice
from rowprop.backprop.thinned import rows_in, thin_gradient_of
from rowprop.batch import tensors
from rowprop.checks import check_entries, check_generator, check_number, check_vector, is_number, shown
from rowprop.distributed import own_rank
from rowprop.engines import uses_batch_statistics
from rowprop.errors import InvalidInput
from rowprop.host import mark, readable, waits
from rowprop.thinning.blocks import blocks_of
from rowprop.thinning.control import OWNER, PROBED, SHARES, Control, Seen, carried, count_of
from rowprop.thinning.draw import added_variance, draw, floored, inclusion, variances
from rowprop.thinning.weights import Pairs, Product, share_of
from rowprop.thinning.worth import Worth

BEHIND = 2
"""Backwards after which the numbers of one are read off a device: they are there by then, so nobody waits."""
RAREST = 0.01
"""A look asks for no smaller probability than this: a row of another forward of the backward may share it, and would
outweigh all others."""
MULTIPLE = 8
"""A device's kernels are tuned per shape: there K is a multiple of this."""


def thin(
    model: nn.Module,
    *,
    tau: float = 0.025,
    keep: float | None = None,
    blocks: Iterable[str | nn.Module] | None = None,
    generator: torch.Generator | None = None,
) -> Thinning:
    """Make every later backward of a model cheaper, with the full batch's gradient in expectation.

    The training loop stays as it is. On the gradient's way back, after each block, rows are drawn with probabilities in
    proportion to the norms of their gradients. The drawn rows are divided by their probabilities, and the others leave
    the gradient. So the blocks below cost the drawn rows, in every op that treats rows alike, and the gradient's
    expectation is the exact gradient.

    A linear layer's weight gradient is a sum over pairs of a row and a token. Large ones are summed over drawn pairs,
    with probabilities in proportion to the product of the norms of both factors.

    Args:
        model: The model. It may be wrapped already, as by DistributedDataParallel. The forward stays as it is.
        tau: How much variance the thinning may add, as a share of the variance that the choice of the batch has. The
            shares of rows that the blocks keep are steered to this target: they are 1 at first, and fall as few rows
            come to hold most of the gradient. The pairs that weight gradients are summed over have a target of their
            own, of the same size. Default .025, VCAS's for its rows and for its weight gradients.
        keep: A fixed share of the rows for all blocks, in (0, 1], instead of ``tau``; weight gradients are summed over
            all pairs of these rows. After a pick of tokens it is of the tokens, and below an attention that has mixed
            them, of the sequences that came from there. Default None.
        blocks: Names or modules of the model after which the gradient is thinned. Default None: children of
            ``ModuleList`` and ``Sequential`` that repeat a class, such as the layers of a transformer and the blocks of
            a ResNet; :attr:`Thinning.blocks` tells which.
        generator: Draws the rows; on the CPU, for any device. Two handles whose gradients meet need generators of
            different seeds: equal draws at both depend on each other, and the expectation is off. Default None: a
            generator of its own, seeded from ``torch.initial_seed()``, the rank and the handle's number in this
            process, so that the other random numbers of a training stay as they are.

    Returns:
        A handle: ``handle.record`` tells of the last backward, ``handle.paused()`` gives exact gradients,
        ``handle.remove()`` ends it.

    Raises:
        InvalidInput: A value out of range, a block that is not in the model, or no block found.

    What is exact: the forward, always. The gradients of parameters above the last block. All gradients while the model
    is in evaluation mode, under ``create_graph=True``, under ``torch.func`` transforms, and in compiled regions.

    What is right on average: all other gradients; below BatchNorm in training mode nearly, see ``docs/thinning.md``.
    Rows are the entries of the dimension that has the size of the model's first input tensor; a block whose output has
    no such dimension is left alone.

    Where draws cost more than they save, at some blocks or at all, ``tau`` draws none. This follows from the shares and
    from the graph's sizes, never from a clock, and is tried again; ``handle.record.reason`` says it. ``keep=`` always
    draws.

    Cost:
        One pass over the gradient of each block's output and some arithmetic on the rows' norms. Nobody waits for the
        device: the numbers of a backward set the shares of later ones. Without ``keep=``, the 2nd, 4th, 8th and 16th
        backward and then one in 20 is a look: it also runs sliced where all rows are kept, and sums the squares of each
        row's weight gradients. This takes .05 of a step of 128 rows in a transformer of width 384, and .13 in one of
        width 96, whose ops are short. There is none while thinning is off.

    Source:
        VCAS (Wang et al., ICLR 2024, arXiv 2402.17227), whose control needs six further passes; see
        ``rowprop.recipes.vcas``.

    Example:
        >>> model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(3)))
        >>> handle = rowprop.thin(model, keep=0.5)
        >>> model(torch.randn(8, 4)).square().sum().backward()
        >>> handle.record.keep
        {'2': 0.5, '1': 0.5, '0': 0.5}
    """
    if not isinstance(model, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InvalidInput(f"thin got a model of type {type(model).__name__} but a torch.nn.Module was needed.")
    if not is_number(tau) or not 0 < tau <= 1e6:
        raise InvalidInput(f"thin got tau={shown(tau)} but a positive number was needed, e.g. 0.025.")
    if keep is not None:
        check_number("thin", "keep", keep, "(0, 1]", lambda value: 0 < value <= 1)
    check_generator("thin", generator)
    if generator is not None and generator.device.type != "cpu":
        raise InvalidInput(
            f"thin got a generator on {generator.device} but one on the CPU was needed, for any device; "
            "torch.Generator().manual_seed(0) makes one."
        )
    return Thinning(model, blocks_of(model, blocks), Control(keep, tau), generator or own_generator())


@dataclass(frozen=True)
class ThinRecord:
    """The numbers of one backward. On a device they are those of an earlier one, so that nobody waits for them.

    Attributes:
        keep: For each block, the share of the rows that its backward ran with, of those that came to the first block;
            of tokens or of whole sequences, whichever came there. Blocks that no gradient came to are missing.
        variance: For each block, the variance that it added to the gradient handed on, over the sum of the squared
            norms of all rows' gradients there; like ``ratio`` of the last backward whose norms were summed.
        ratio: The estimated ratio of two variances of the gradient in the parameters: the one that thinning rows added
            at all blocks, over the one that the choice of the batch has. The norms of the rows at the blocks predict
            it. Without ``keep=``, looks correct the prediction by the weights of linear layers and convolutions.
        passes: Number of the backward, from 1; 0 before the first. Backwards while thinning is off do not count, nor,
            on a device, the last two before it.
        reason: Why these shares; a sentence.
        pairs: The weight gradients of linear layers were summed over fewer (row, token) pairs: the share of their FLOPs
            that was left. 1 with ``keep=``, and where the products are too small for it.
    """

    keep: dict[str, float]
    variance: dict[str, float]
    ratio: float
    passes: int
    reason: str
    pairs: float = 1.0

    def to_dict(self) -> dict[str, float | str]:
        """Return the numbers under flat names, as loggers take them.

        Returns:
            ``thin/keep`` (the mean of the blocks) and ``thin/variance`` (their sum), both also for each block, as in
            ``thin/keep/encoder.0``; ``thin/ratio``, ``thin/pairs``, ``thin/passes`` and ``thin/reason``.
        """
        return {
            "thin/keep": sum(self.keep.values()) / len(self.keep) if self.keep else 1.0,
            "thin/variance": sum(self.variance.values()),
            **{f"thin/keep/{name}": share for name, share in self.keep.items()},
            **{f"thin/variance/{name}": share for name, share in self.variance.items()},
            "thin/ratio": self.ratio,
            "thin/pairs": self.pairs,
            "thin/passes": self.passes,
            "thin/reason": self.reason,
        }


@dataclass(eq=False)
class _Pass:
    """One backward.

    Attributes:
        measured: Whether the norms are measured.
        looks: Whether it is a look: the products of weight gradients tell the squared norms of the rows' parts.
        probes: Whether a look finds no draws, and asks for one instead.
        late: Whether the host would wait for numbers of the device.
        rows: For each forward, the rows with which it came to the first block. Sequences are counted apart from the
            tokens that a gradient held above an attention, so the number of all rows of its kind stands beside.
        seen: For each block what was seen there, and the numbers on the device.
        pairs: For each thinned product of a weight gradient the same.
        block: The block whose gradient came last.
        products: For each block the products between it and the next.
        weights: In a look, for some rows the squared norms of their parts of the weight gradients, summed over these,
            (K,); apart for those before and after ``probe`` was set.
        told: Rows that tell of their weight gradients, until the backward's end.
        probe: For each row the variance that the draw asked for adds, over the square of its gradient.
        probed: For each block the variance that it adds, and the sum of squares.
        host: All numbers, on their way to the host.
        sent: A mark behind them in the work of the device.
    """

    measured: bool
    looks: bool = False
    probes: bool = False
    late: bool = False
    rows: dict[tuple[int, int], int] = field(default_factory=dict[tuple[int, int], int])
    seen: dict[str, list[tuple[Seen, Tensor | None]]] = field(
        default_factory=dict[str, list[tuple[Seen, "Tensor | None"]]]
    )
    pairs: dict[str, list[tuple[Product, Tensor | None]]] = field(
        default_factory=dict[str, list[tuple[Product, "Tensor | None"]]]
    )
    block: str = ""
    products: Counter[str] = field(default_factory=Counter[str])
    weights: dict[tuple[RowSet, Tensor | None], Tensor] = field(
        default_factory=dict[tuple[RowSet, "Tensor | None"], Tensor]
    )
    told: list[RowSet] = field(default_factory=list[RowSet])
    probe: Tensor | None = None
    probed: list[Tensor] = field(default_factory=list[Tensor])
    host: Tensor | None = None
    sent: Any = 0.0

    def measurements(self) -> list[tuple[Seen, Tensor]]:
        """All that was measured, with the numbers on the device."""
        every = [*self.seen.values(), *self.pairs.values()]
        return [(seen, numbers) for each in every for seen, numbers in each if numbers is not None]

    def send(self) -> None:
        """Have all numbers brought to the host, which does not wait for them."""
        found = [numbers for _, numbers in self.measurements()]
        if self.weights:
            found += [self.variances(), *self.probed]
        if found:
            numbers = torch.cat(found)
            self.late = self.late or waits(numbers)
            self.host = numbers.to("cpu", non_blocking=True) if self.late else numbers
            self.sent = mark(numbers.device)

    def read(self) -> tuple[float, float, float] | None:
        """Put the numbers where they belong.

        Returns:
            Of a look: the variance that draws added to the weights' gradients, that between batches, and the ratio of
            both that the norms predict.
        """
        if not isinstance(self.sent, float):
            self.sent.synchronize()
        rest = iter([] if self.host is None else cast("list[float]", self.host.tolist()))
        for seen, _ in self.measurements():
            seen.read(rest)
        if not self.weights:
            return None
        added, between = next(rest), next(rest)
        probed = [next(rest) / (next(rest) or 1.0) for _ in self.probed]
        return added, between, fmean(probed) if probed else carried(self.plain())

    def plain(self) -> dict[str, list[Seen]]:
        """What was seen at each block, without the numbers on the device."""
        return {place: [seen for seen, _ in found] for place, found in self.seen.items()}

    def ask(self, norms: Tensor, share: float) -> None:
        """Take note of what a draw of a share of the rows would add, by their norms; it is asked at the first block."""
        kept = count_of(share, norms.numel(), 1)
        if self.probe is None and kept < norms.numel():
            self.probe = inclusion(norms, kept).clamp(min=RAREST).reciprocal() - 1
        if self.probe is not None and self.probe.shape == norms.shape:
            squares = norms.double().square()
            self.probed.append(torch.stack([(self.probe * squares).sum(), squares.sum()]))

    def see(self, rows: RowSet, squares: Tensor) -> None:
        """Take note of the squared norms of the rows' parts of a weight gradient, (K,)."""
        if rows.base is None or rows.weights is not None:  # else nobody knows how the rows were multiplied
            key = rows, self.probe
            self.weights[key] = self.weights[key] + squares if key in self.weights else squares

    def variances(self) -> Tensor:
        """Of the gradient of all weights seen, the variance that the draws add, and that between batches, (2,)."""
        found: list[Tensor] = []
        for (rows, probe), of_rows in self.weights.items():
            squares = of_rows.double()
            if rows.weights is not None:  # a drawn row's gradient is as many times as large, and it stands for as many
                between = squares / rows.weights
                added = squares - between
            else:
                between = squares
                fits = probe is not None and probe.shape == squares.shape
                added = squares * cast(Tensor, probe) if fits else torch.zeros_like(squares)
            found.append(torch.stack([added.sum(), between.sum()]))
        return torch.stack(found).sum(0)


@dataclass(eq=False)
class _Forward:
    """The forward that runs, or that ran last.

    Attributes:
        number: Its number.
        num_rows: Its rows; None where blocks run outside of a forward of the model, and tell their rows themselves.
        inside: Whether the model itself runs.
        over: Whether the next block that runs begins another one.
        counted: Whether the work below its blocks is counted.
        sizes: Its rows and those of the forwards before it, back to the last backward. A checkpoint may run blocks of
            any of these again.
        called: Names of the blocks that ran in it.
        hides: Whether blocks ran in it without a graph. A reentrant checkpoint runs them again.
        reenters: Whether there is such a checkpoint.
    """

    number: int = 0
    num_rows: int | None = None
    inside: bool = False
    over: bool = True
    counted: bool = False
    sizes: tuple[int | None, ...] = ()
    called: set[str] = field(default_factory=set[str])
    hides: bool = False
    reenters: bool = False
    _mixes: bool | None = None

    def again(self, num_rows: int | None) -> bool:
        """Whether a checkpoint around the model runs this forward another time."""
        return outermost() >= 0 and bool(self.called) and num_rows == self.num_rows

    def end(self) -> None:
        """Take note of its end."""
        self.inside, self.over = False, True

    def mixes(self, model: nn.Module) -> bool:
        """Whether a BatchNorm of the model mixes the rows."""
        if self._mixes is None:
            self._mixes = uses_batch_statistics(model)
        return self._mixes


class Thinning:
    """The handle that :func:`rowprop.thin` returns.

    Attributes:
        blocks: Names of the blocks after which the gradient is thinned.
        record: A :class:`ThinRecord` of the last backward.
    """

    def __init__(
        self, model: nn.Module, blocks: Mapping[str, nn.Module], control: Control, generator: torch.Generator
    ) -> None:
        self.blocks = tuple(blocks)
        self.record = ThinRecord(
            {}, {}, 0.0, 0, "no backward was thinned yet: the model is compiled whole, or no block hands on the rows"
        )
        self._model = model
        self._control = control
        self._pairs = None if control.keep is not None else Pairs(control.tau)
        self._worth = Worth()
        self._generator = generator
        self._active = True
        self._compiled: set[str] = set()
        self._forward = _Forward()
        self._passes: dict[int, _Pass] = {}
        self._on_the_way: deque[_Pass] = deque()
        self._handles = [model.register_forward_pre_hook(_Hook(self._entered), with_kwargs=True)]
        self._handles += [
            block.register_forward_hook(_Hook(partial(self._left, name))) for name, block in blocks.items()
        ]
        # The gradient of the output comes first, so a look sees all weights.
        self._handles.append(_unwrapped(model).register_forward_hook(_Hook(partial(self._left, None))))
        self._handles.append(model.register_forward_hook(_Hook(lambda *_: self._forward.end()), always_call=True))

    def __repr__(self) -> str:
        return f"Thinning(after {', '.join(self.blocks)}; {self.record.reason})"

    def remove(self) -> None:
        """End it: the gradients of all later backwards are exact."""
        self._active = False
        while self._handles:
            self._handles.pop().remove()

    @contextmanager
    def paused(self) -> Generator[None]:
        """Have the backwards inside the block exact."""
        before, self._active = self._active, False
        try:
            yield
        finally:
            self._active = before and bool(self._handles)  # not if it was removed meanwhile

    def state_dict(self) -> dict[str, Any]:
        """All that later draws follow from: the shares, where they are worth a draw, and the generator's state."""
        while self._on_the_way:
            self._arrive()
        pairs = None if self._pairs is None else self._pairs.state_dict()
        return {
            "control": self._control.state_dict(),
            "worth": self._worth.state_dict(),
            "pairs": pairs,
            "generator": self._generator.get_state(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on as the handle would have that returned this state.

        Raises:
            InvalidInput: An entry is missing, or no handle can have made it; nothing is loaded then.
        """
        check_entries(OWNER, state, ["control", "worth", "pairs", "generator"])
        drawn = state["generator"]
        check_vector(OWNER, "generator", drawn, torch.uint8, self._generator.get_state().numel())
        _check_kind(state["pairs"], self._pairs)
        control, pairs, worth = copy(self._control), copy(self._pairs), Worth()
        control.load_state_dict(state["control"])
        worth.load_state_dict(state["worth"])
        _check_places(control.shares, self.blocks)
        if pairs is not None:
            pairs.load_state_dict(state["pairs"])
        try:
            self._generator.set_state(drawn.cpu())
        except RuntimeError as error:
            raise InvalidInput(
                f"{OWNER} got the state of a generator that cannot be loaded ({error}); save and load the state whole."
            ) from error
        self._control, self._pairs, self._worth = control, pairs, worth
        self._on_the_way.clear()
        self.record = ThinRecord({}, {}, 0.0, control.passes, self._reason())

    # --- in the forward -----------------------------------------------------------------------------------------------

    def _entered(self, _: nn.Module, args: Any, kwargs: Any) -> None:
        if self._model.training and torch.is_grad_enabled():
            rows = next((t.shape[0] for t in tensors([args, kwargs]) if t.ndim and not t.is_nested), None)
            if not self._forward.again(rows):
                self._begin_forward(rows, inside=True)

    def _begin_forward(self, num_rows: int | None, inside: bool) -> _Forward:
        last = self._forward
        sizes = (num_rows, *(size for size in last.sizes if size != num_rows))
        self._worth.begin()
        counted = self._control.counts(self._control.begun + 1)
        self._forward = _Forward(last.number + 1, num_rows, inside, over=False, counted=counted, sizes=sizes)
        return self._forward

    def _left(self, name: str | None, _: nn.Module, __: Any, output: Any) -> Any:
        number, forward = outermost(), self._forward
        if not (self._model.training and torch.is_grad_enabled()):
            forward.hides |= forward.inside
            return None
        again = name in forward.called
        # Nobody tells the end of a forward of which nothing is watched.
        if number < 0 and (forward.over or (again and self._worth.sleeping and not forward.inside)):
            forward = self._begin_forward(None, inside=False)
        if number < 0 and name is not None:
            forward.called.add(name)
        if self._worth.sleeping:
            return None
        numbers = iter(range(1_000_000))
        mixes = forward.mixes(self._model)
        if number >= 0:  # a checkpoint runs the block again; a reentrant one then runs a backward inside this one
            self._begun(number)
        arrive = partial(self._arrived, number, forward) if self._control.keep is None or forward.hides else None
        sizes = forward.sizes if number >= 0 and forward.sizes else (forward.num_rows,)

        def watched(tensor: Tensor) -> Tensor:
            plain = tensor.requires_grad and tensor.layout == torch.strided and not tensor.is_nested
            layout = _rows_in(tensor.shape, sizes) if plain else None
            if name is None and plain and forward.hides and not forward.reenters:
                forward.reenters = enters_checkpoint(tensor)
            if layout is None:
                return tensor
            if name is None:
                return tensor if arrive is None else thin_gradient_of(tensor, layout, None, arrive=arrive)
            if compiled_elsewhere(tensor.grad_fn):  # it runs at full size, so thinning would save nothing
                if name not in self._compiled:
                    self._compiled.add(name)
                    self.record = replace(self.record, reason=self._reason())
                return tensor
            which = next(numbers)
            place = f"{name}[{which}]" if which else name
            if forward.counted and not (again and number >= 0):  # a checkpoint's second run of a block is no more work
                self._worth.count(place, tensor, forward.number, number)
            choose = partial(self._choose, place, number, forward.number, mixes)
            pairs = partial(self._draw_pairs, number)
            return thin_gradient_of(tensor, layout, choose, pairs, arrive)

        return _replaced(watched, output)

    # --- in the backward ----------------------------------------------------------------------------------------------

    def _arrived(self, number: int, forward: _Forward, grad: Tensor, layout: Layout) -> RowSlice | None:
        """A gradient has come to the output of a block or of the model: here a look begins.

        A reentrant checkpoint takes rows only from a sliced gradient. From a full one, it hands a full one on, and the
        blocks below would draw from all rows again.
        """
        sliced = grad.sliced if type(grad) is RowGrad and grad.full is None else None
        values = sliced.values if type(sliced) is RowSlice else grad
        if not self._active or type(values) is RowGrad or not readable(values):
            return None
        begun = self._begun(number)
        if not (begun.looks or forward.reenters):
            return None
        given = rows_in(grad, layout)
        if begun.looks and begun.see not in given.rows.squares:  # another handle may look as well
            given.rows.squares += (begun.see,)
            begun.told.append(given.rows)
        return given

    def _choose(
        self, place: str, number: int, forward: int, mixes: bool, norms: Tensor, among: RowSet
    ) -> tuple[Tensor, Tensor] | None:
        if not self._active or not readable(norms):
            return None
        if mixes:
            norms = floored(norms)
        control, arrived = self._control, norms.numel()
        begun = self._begun(number)
        begun.block, begun.late = place, waits(norms)
        rows = begun.rows.setdefault((forward, among.num_rows), arrived)
        share, kept = self._worth.share(place, control.share), arrived
        if self._worth.draws(place):
            step = MULTIPLE if begun.late else 1
            kept = min(arrived, count_of(share, arrived if control.keep is None else rows, step))
        chosen, p = None, None
        if begun.probes:
            begun.ask(norms, min(share, PROBED))
            kept = arrived
        if kept < arrived:
            p = inclusion(norms, kept)
            chosen = draw(p, kept, self._uniform())
        numbers = _numbers(norms, among.weights, p) if begun.measured else None
        begun.seen.setdefault(place, []).append((Seen(arrived, kept, rows), numbers))
        return chosen

    def _draw_pairs(
        self, number: int, first: Tensor, second: Tensor, weights: Callable[[], Tensor | None]
    ) -> tuple[Tensor, Tensor] | None:
        begun = self._passes.get(number if number in self._passes else outermost())
        if self._pairs is None or begun is None or not self._active:
            return None
        # The graph gives the products of a model the same order in each backward, and blocks that keep all count, too.
        begun.products[begun.block] += 1
        name = f"{begun.block}/{begun.products[begun.block]}"
        step = MULTIPLE if waits(first) else 1
        found = self._pairs.draw(name, (first, second), weights, step, self._uniform)
        if found is None:
            return None
        chosen, product, numbers = found
        begun.pairs.setdefault(name, []).append((product, numbers))
        return chosen

    def _uniform(self) -> float:
        return torch.rand((), generator=self._generator, dtype=torch.float64).item()

    def _begun(self, number: int) -> _Pass:
        """The backward with this number, or, if there is none, the one that is running."""
        if number not in self._passes:
            number = outermost()
        if number not in self._passes:
            self._control.begin()
            self._passes[number] = self._pass(self._control.begun)
            cast(Any, torch.autograd.Variable)._execution_engine.queue_callback(_End(self, number))
        return self._passes[number]

    def _pass(self, number: int) -> _Pass:
        """The backward that the control counts as this one."""
        control = self._control
        drawn = any(self._worth.draws(place) and control.share(place) < 1 for place in control.shares)
        looks = not self._worth.pause and control.looks_at(number, drawn)
        measured = looks or control.measures(number, self._worth.measured_often)
        return _Pass(measured, looks, probes=looks and not drawn)

    def _ended(self, number: int) -> None:
        self._forward.sizes = ()
        if not self._forward.inside:
            self._forward.over = True
        done = self._passes.pop(number)
        for rows in done.told:
            rows.squares = ()
        # It came to the head alone, a checkpoint ran blocks again, or its forward was before the pause.
        if not done.seen or 0 < self._worth.pause == self._worth.asleep:
            self._control.begin(-1)
            return
        done.send()
        self._on_the_way.append(done)
        while len(self._on_the_way) > (BEHIND if done.late else 0):
            self._arrive()

    def _arrive(self) -> None:
        """Read the numbers of the oldest backward that was not read yet."""
        done, control = self._on_the_way.popleft(), self._control
        found, seen = done.read(), done.plain()
        renews = control.renews()
        control.sort(seen)
        control.update(seen, done.measured)
        if renews:
            part = next((rows / whole for (_, whole), rows in done.rows.items()), 1.0)
            self._worth.decide({place: control.share(place) for place in control.shares}, part)
            if self._worth.pause:  # the next trial is for numbers of its own
                self._on_the_way.clear()
        if found is not None:
            control.learn(*found)
        if self._pairs is not None:
            self._pairs.update(done.pairs)
            if found is not None:
                self._pairs.learn(found[1])
        kept = {place: sum(s.kept for s in found) / sum(s.rows for s in found) for place, found in seen.items()}
        added, ratio, pairs = self.record.variance, self.record.ratio, share_of(done.pairs)
        if self._worth.pause:  # the backwards from here on are exact
            kept, pairs = dict.fromkeys(kept, 1.0), 1.0
        if self._worth.pause or all(s.kept == s.arrived for found in seen.values() for s in found):
            added, ratio = dict.fromkeys(kept, 0.0), 0.0
        elif done.measured:
            added, ratio = _shares_added(seen), control.correction * carried(seen)
        self.record = ThinRecord(kept, added, ratio, control.passes, self._reason(), pairs)

    def _reason(self) -> str:
        reasons = [*self._worth.reason(), self._control.reason()]
        if self._pairs is not None:
            reasons.append(self._pairs.reason())
        if self._compiled:
            names = ", ".join(sorted(self._compiled))
            reasons.append(f"exact after {names}: compiled by a backend other than torch.compile(backend='rowprop')")
        return "; ".join(reasons)


def _shares_added(seen: Mapping[str, list[Seen]]) -> dict[str, float]:
    """For each block the variance that it added, over the sum of squared norms."""
    return {place: sum(s.added for s in found) / (sum(s.total for s in found) or 1.0) for place, found in seen.items()}


def _numbers(norms: Tensor, weights: Tensor | None, p: Tensor | None) -> Tensor:
    """Variance added, variance added above, sum of squares, and the variances of ``SHARES``: see :class:`Seen`."""
    squares = norms.double().square()
    here = squares.sum()
    total = here if weights is None else (squares / weights).sum()
    added = torch.zeros_like(total) if p is None else added_variance(norms, p)
    return torch.cat([torch.stack([added, here - total, total]), variances(norms, SHARES)])


def _unwrapped(model: nn.Module) -> nn.Module:
    """The module inside DistributedDataParallel, which adds a node of its own to the outputs."""
    inner = getattr(model, "module", None)
    return inner if type(model).__name__ == "DistributedDataParallel" and isinstance(inner, nn.Module) else model


def _check_kind(saved: object, pairs: Pairs | None) -> None:
    if (saved is None) is not (pairs is None):
        raise InvalidInput(
            f"{OWNER} got a state that {'keep' if saved is None else 'tau'}= has made but this handle has the other "
            "one; call thin as it was called when the state was saved."
        )


def _check_places(places: Iterable[str], blocks: Sequence[str]) -> None:
    for place in places:
        if place not in blocks and place.rpartition("[")[0] not in blocks:
            raise InvalidInput(
                f"{OWNER} got a state with the block {shown(place)} but this handle thins after {', '.join(blocks)}; "
                "give thin the model and the blocks of the saved one."
            )


class _End:
    """Called at the end of a backward. After a failed one, autograd lets go of it, and the backward is forgotten."""

    def __init__(self, handle: Thinning, number: int) -> None:
        self.handle, self.number = handle, number

    def __call__(self) -> None:
        self.handle._ended(self.number)  # pyright: ignore[reportPrivateUsage]

    def __del__(self) -> None:
        self.handle._passes.pop(self.number, None)  # pyright: ignore[reportPrivateUsage]


class _Hook:
    """A module's hook. A copy of the module, or a file with it, gets a hook that does nothing."""

    def __init__(self, act: Callable[..., Any]) -> None:
        self.act = act

    def __call__(self, *args: Any) -> Any:
        return None if torch.compiler.is_compiling() or cast(Any, torch.jit).is_tracing() else self.act(*args)

    def __reduce__(self) -> tuple[type[_Hook], tuple[Callable[..., Any]]]:
        return _Hook, (_nothing,)


def _nothing(*_: Any) -> None:
    pass


def _rows_in(shape: torch.Size, sizes: Iterable[int | None]) -> Layout | None:
    """Where the rows are in a block's output, whose batch has one of these sizes; None if they cannot be told."""
    known = [shape[0] if size is None else size for size in sizes] if len(shape) else []
    for dim, size in product(range(min(2, len(shape))), known):
        if shape[dim] == size > 1:
            return Layout(dim, size)
    size = next((size for size in known if size > 1 and shape[0] and shape[0] % size == 0), None)
    return None if size is None else Layout(0, size, 1, shape[0] // size)


def _replaced(function: Callable[[Tensor], Tensor], output: Any) -> Any:
    """A block's output with a function applied to each tensor.

    The model may hold a list, a mapping or an object that a block has written to and returned. Such an output stays the
    same object with the same entries: a tensor in it that the function replaces is left alone.
    """
    if isinstance(output, Tensor):
        return function(output)
    kind = cast(Any, type(output))
    make: Callable[..., Any] | None = tuple if kind is tuple else getattr(kind, "_make", None)
    if make is not None:
        entries: list[Any] = list(output)
        replaced = [_replaced(function, entry) for entry in entries]
        if any(new is not old for new, old in zip(replaced, entries, strict=True)):
            return cast(Any, make(replaced))
    else:
        for tensor in tensors(output):
            function(tensor)
    return output


_handles = count()
"""Numbers the handles of this process. Draws at blocks of one model must not depend on each other."""


def own_generator() -> torch.Generator:
    """A generator seeded from ``torch.initial_seed()``, the rank, and how many this process has made before."""
    apart = 0x9E3779B9 * next(_handles)  # by far more than there are ranks; a generator takes 32 bits of its seed
    return torch.Generator().manual_seed((torch.initial_seed() + own_rank() + apart) % 2**63)
