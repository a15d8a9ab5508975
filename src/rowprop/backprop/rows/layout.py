"""The place of the rows in a shape: pure integer arithmetic, no tensors.

Models move the batch dimension about: they permute it, merge it with time or with attention heads and split it off
again. Where the rows are tokens, they lie in two dimensions or more, (N, T), next to each other or apart, (N, heads, T,
width). A :class:`Layout` says where the rows are now, so a rule does not guess from sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod


# Nothing changes a part or a layout once it is made. ``frozen=True`` would check this, and would treble the time that
# it takes to make one: nearly every op makes one.
@dataclass(slots=True, unsafe_hash=True)
class Part:
    """A part of the rows' index, as the middle factor of one dimension: ``shape[dim] == outer * size * inner``."""

    dim: int
    size: int
    outer: int = 1
    inner: int = 1


@dataclass(slots=True, unsafe_hash=True)
class Layout:
    """The rows are the middle factor of one dimension: ``shape[dim] == outer * num_rows * inner``.

    A view may merge other dimensions with the rows, those in front as ``outer``, those behind as ``inner``:
    ``(T, N, C)`` seen as ``(T*N, C)`` has ``outer=T``; ``(N, H, C)`` seen as ``(N*H, C)`` has ``inner=H``.

    Rows that are positions in several dimensions have further parts, ``minor``, from the slowest to the fastest part of
    their index: the tokens of ``(N, T, C)`` have ``dim=0, num_rows=N*T, minor=(Part(1, T),)``. Then ``dim``, ``outer``
    and ``inner`` are those of the first part, which has ``num_rows`` divided by the sizes of the others. The kept rows
    stand in the first part's place, and a 1 stands in the place of each other part.
    """

    dim: int
    num_rows: int
    outer: int = 1
    inner: int = 1
    minor: tuple[Part, ...] = ()
    _parts: tuple[Part, ...] | None = field(default=None, init=False, repr=False, compare=False)

    @classmethod
    def of_numbers(cls, numbers: Sequence[int]) -> Layout:
        """The layout of these :meth:`numbers`."""
        dim, num_rows, outer, inner, *rest = numbers
        return cls(dim, num_rows, outer, inner, tuple(Part(*rest[at : at + 4]) for at in range(0, len(rest), 4)))

    def numbers(self) -> list[int]:
        """This layout as the extension holds it."""
        found = [self.dim, self.num_rows, self.outer, self.inner]
        for part in self.minor:
            found += [part.dim, part.size, part.outer, part.inner]
        return found

    @property
    def parts(self) -> tuple[Part, ...]:
        """All parts of the rows' index, from the slowest to the fastest."""
        if self._parts is None:
            self._parts = (Part(self.dim, self._major(), self.outer, self.inner), *self.minor)
        return self._parts

    def _major(self) -> int:
        return self.num_rows // prod(part.size for part in self.minor) if self.minor else self.num_rows

    @property
    def size(self) -> int:
        """Size of the dimension that the first part lies in."""
        return self.outer * self._major() * self.inner

    @property
    def sizes(self) -> tuple[int, ...]:
        """The sizes of the parts."""
        return tuple(part.size for part in self.parts)

    @property
    def plain(self) -> bool:
        """Whether one dimension holds the rows and nothing else."""
        return self.outer == 1 and self.inner == 1 and not self.minor

    def holds(self, dim: int) -> bool:
        """Whether rows lie in this (non-negative) dimension."""
        return dim == self.dim or any(part.dim == dim for part in self.minor)

    def at(self, dim: int) -> Layout:
        """The same rows with their first part in another dimension, and the other parts as far from it as before."""
        if dim == self.dim:
            return self
        if not self.minor:
            return Layout(dim, self.num_rows, self.outer, self.inner)
        by = dim - self.dim
        return self.moved(lambda d: d + by)

    def moved(self, place: Callable[[int], int]) -> Layout:
        """The same rows after dimension ``d`` became dimension ``place(d)``."""
        if not self.minor:
            return self.at(place(self.dim))
        minor = tuple(Part(place(p.dim), p.size, p.outer, p.inner) for p in self.minor)
        return Layout(place(self.dim), self.num_rows, self.outer, self.inner, minor)

    def compact(self, kept: int) -> Layout:
        """Where the kept rows are in the values that hold them."""
        outer, inner = self.outer, self.inner
        for part in self.minor:
            if part.dim == self.dim:
                outer, inner = (outer // part.size, inner) if part.outer < self.outer else (outer, inner // part.size)
        return Layout(self.dim, kept, outer, inner)

    def kept_shape(self, shape: Sequence[int], kept: int) -> list[int]:
        """``shape`` with ``kept`` rows left."""
        out = list(shape)
        if not self.minor:
            out[self.dim] = self.outer * kept * self.inner
            return out
        for part in self.parts:
            out[part.dim] //= part.size
        out[self.dim] *= kept
        return out


Piece = tuple[int, tuple[int, ...]]
"""A factor of a shape: its size, and its place among the parts of the rows; an empty place if it holds no rows."""


def pieces(shape: Sequence[int], layout: Layout) -> list[list[Piece]]:
    """The factors of each dimension, in order; without those of size 1 that hold no rows."""
    out: list[list[Piece]] = []
    parts = sorted(enumerate(layout.parts), key=lambda item: (item[1].outer, item[1].size))
    for dim, size in enumerate(shape):
        found: list[Piece] = []
        before = 1
        for place, part in parts:
            if part.dim == dim:
                found += [(part.outer // before, ()), (part.size, (place,))]
                before = part.outer * part.size
        out.append([piece for piece in (*found, (size // before, ())) if piece[0] != 1 or piece[1]])
    return out


def view(shape: Sequence[int], layout: Layout, new_shape: Sequence[int]) -> Layout | None:
    """Follow the rows through a view of a contiguous tensor.

    The shape's factors keep their order: those that hold rows, and the rest between them. The rows can be followed if
    the new dimensions begin and end where factors do, or within one factor. None if the view cuts through rows and
    other elements together, or a dimension is empty.
    """
    try:
        return _view(tuple(shape), layout, tuple(new_shape))
    except TypeError:  # a size that is a symbol has no hash
        return _view.__wrapped__(tuple(shape), layout, tuple(new_shape))


@lru_cache(1024)  # a training asks for the same views in every step
def _view(shape: tuple[int, ...], layout: Layout, new_shape: tuple[int, ...]) -> Layout | None:
    if 0 in shape or 0 in new_shape:
        return None
    whole = None if layout.minor else _whole(shape, layout, new_shape)
    if whole is not None:
        return whole
    queue = _joined([piece for dimension in pieces(shape, layout) for piece in dimension if piece[0] > 1])
    queue.reverse()
    found: list[tuple[tuple[int, ...], Part]] = []
    for dim, size in enumerate(new_shape):
        outer = 1
        while outer < size:
            taken, place = queue.pop()
            needed = size // outer
            if needed % taken:
                if taken % needed:
                    return None
                queue.append((taken // needed, (*place, 1) if place else ()))
                taken, place = needed, (*place, 0) if place else ()
            if place:
                found.append((place, Part(dim, taken, outer, size // (outer * taken))))
            outer *= taken
    if not found:
        return None
    return layout_of([part for _, part in sorted(found, key=lambda item: item[0])])


def _whole(shape: Sequence[int], layout: Layout, new_shape: Sequence[int]) -> Layout | None:
    """The new layout if one new dimension holds all rows, as nearly always."""
    before = prod(shape[: layout.dim]) * layout.outer
    left = 1
    for dim, size in enumerate(new_shape):
        if before % left == 0:
            outer = before // left
            if size % (outer * layout.num_rows) == 0:
                return Layout(dim, layout.num_rows, outer, size // (outer * layout.num_rows))
        left *= size
    return None


def _joined(queue: list[Piece]) -> list[Piece]:
    """Neighbours that hold no rows as one factor, and neighbouring parts of the rows as one, too."""
    out: list[Piece] = []
    for size, place in queue:
        if out and not place and not out[-1][1]:
            out[-1] = (out[-1][0] * size, ())
        elif out and place and out[-1][1] and place[0] == out[-1][1][-1] + 1:
            out[-1] = (out[-1][0] * size, (*out[-1][1], place[0]))
        else:
            out.append((size, place))
    return out


def layout_of(parts: Sequence[Part]) -> Layout:
    """A layout of these parts, from the slowest to the fastest; neighbours in one dimension become one part."""
    joined: list[Part] = []
    for part in parts:
        last = joined[-1] if joined else None
        if last is not None and last.dim == part.dim and last.outer * last.size == part.outer:
            joined[-1] = Part(part.dim, last.size * part.size, last.outer, part.inner)
        else:
            joined.append(part)
    return layout_as(joined)


def layout_as(parts: Sequence[Part]) -> Layout:
    """A layout of exactly these parts."""
    first, *minor = parts
    return Layout(first.dim, prod(part.size for part in parts), first.outer, first.inner, tuple(minor))


def infer_shape(numel: int, shape: Sequence[int]) -> list[int]:
    """``shape`` with a size in the place of -1."""
    out = list(shape)
    if -1 in out:
        at = out.index(-1)
        rest = prod(out[:at]) * prod(out[at + 1 :])
        out[at] = numel // rest if rest else 0
    return out


def permute(layout: Layout, dims: Sequence[int]) -> Layout:
    """Follow the rows through a permutation; ``dims[i]`` is the old place of new dimension ``i``."""
    return layout.moved([d % len(dims) for d in dims].index)


def transpose(layout: Layout, first: int, second: int) -> Layout:
    """Follow the rows through a swap of two (non-negative) dimensions."""
    swap = {first: second, second: first}
    return layout.moved(lambda d: swap.get(d, d))


def insert(layout: Layout, dim: int) -> Layout:
    """Follow the rows when a new dimension appears at (non-negative) ``dim``."""
    return layout.moved(lambda d: d + (dim <= d))


def remove(layout: Layout, dims: Sequence[int]) -> Layout:
    """Follow the rows when the (non-negative) ``dims``, none of them the rows', disappear."""
    gone = set(dims)
    return layout.moved(lambda d: d - sum(other < d for other in gone))
