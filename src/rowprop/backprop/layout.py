"""The place of the rows in a shape: pure integer arithmetic, no tensors.

A row-sliced gradient has the shape of the full batch but holds K of its N rows. Models move the batch dimension about:
they permute it, merge it with time or with attention heads and split it off again. A :class:`Layout` says where the
rows are now, so a rule asks the layout and does not guess from sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod


@dataclass(frozen=True, slots=True)
class Layout:
    """The rows are the middle factor of one dimension: ``shape[dim] == outer * num_rows * inner``.

    A view may merge other dimensions with the rows: ``outer`` is the size of those in front of the rows, ``inner`` of
    those behind them. ``(T, N, C)`` seen as ``(T*N, C)`` has ``dim=0, outer=T, inner=1``; ``(N, H, C)`` seen as
    ``(N*H, C)`` has ``dim=0, outer=1, inner=H``.
    """

    dim: int
    num_rows: int
    outer: int = 1
    inner: int = 1

    @property
    def size(self) -> int:
        """Size of the dimension that the rows lie in."""
        return self.outer * self.num_rows * self.inner

    @property
    def plain(self) -> bool:
        """Whether the dimension holds the rows and nothing else."""
        return self.outer == 1 and self.inner == 1

    def at(self, dim: int) -> Layout:
        """The same rows in another dimension."""
        return self if dim == self.dim else Layout(dim, self.num_rows, self.outer, self.inner)

    def kept_size(self, kept: int) -> int:
        """Size of the dimension when ``kept`` rows are left in it."""
        return self.outer * kept * self.inner

    def kept_shape(self, shape: Sequence[int], kept: int) -> list[int]:
        """``shape`` with ``kept`` rows left."""
        out = list(shape)
        out[self.dim] = self.kept_size(kept)
        return out


def view(shape: Sequence[int], layout: Layout, new_shape: Sequence[int]) -> Layout | None:
    """Follow the rows through a view of a contiguous tensor.

    The order of elements is kept, so the rows stay the middle factor of the flat index: first a factor ``before``,
    then the rows, then the rest. The rows can be followed if one new dimension holds the whole middle factor.

    Returns:
        The new layout; None if the view cuts through the rows or a dimension is empty.
    """
    if 0 in shape or 0 in new_shape:
        return None
    before = prod(shape[: layout.dim]) * layout.outer
    left = 1
    for dim, size in enumerate(new_shape):
        if before % left == 0:
            outer = before // left
            if size % (outer * layout.num_rows) == 0:
                return Layout(dim, layout.num_rows, outer, size // (outer * layout.num_rows))
        left *= size
    return None


def factors(shape: Sequence[int], layout: Layout, new_shape: Sequence[int]) -> list[Layout]:
    """If a view splits the dimension of the rows: for each factor, the layout that takes this factor for the rows.

    Returns:
        An empty list if the rows are merged with other dimensions, or if the view does more than this split.
    """
    if 0 in shape or 0 in new_shape or not layout.plain:
        return []
    first = next((d for d in range(len(new_shape)) if prod(new_shape[:d]) == prod(shape[: layout.dim])), None)
    last = next((d for d in range(len(new_shape), 0, -1) if prod(new_shape[d:]) == prod(shape[layout.dim + 1 :])), None)
    if first is None or last is None:
        return []
    split = new_shape[first:last]
    return [Layout(layout.dim, size, prod(split[:d]), prod(split[d + 1 :])) for d, size in enumerate(split) if size > 1]


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
    return layout.at([d % len(dims) for d in dims].index(layout.dim))


def transpose(layout: Layout, first: int, second: int) -> Layout:
    """Follow the rows through a swap of two (non-negative) dimensions."""
    return layout.at({first: second, second: first}.get(layout.dim, layout.dim))


def insert(layout: Layout, dim: int) -> Layout:
    """Follow the rows when a new dimension appears at (non-negative) ``dim``."""
    return layout.at(layout.dim + (dim <= layout.dim))


def remove(layout: Layout, dims: Sequence[int]) -> Layout:
    """Follow the rows when the (non-negative) ``dims``, none of them the rows', disappear."""
    return layout.at(layout.dim - sum(d < layout.dim for d in set(dims)))
