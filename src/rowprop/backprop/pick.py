"""pick(): the rows of a tensor, with a backward that costs only those rows."""

from __future__ import annotations

import itertools
import operator
from typing import TYPE_CHECKING, Any, Literal, Protocol, cast

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from rowprop.backprop.autograd.foreign import prepare
from rowprop.backprop.autograd.rowgrad import RowGrad
from rowprop.backprop.backward import transformed
from rowprop.backprop.rows.layout import Layout
from rowprop.backprop.rows.rows import RowSet, mildest
from rowprop.backprop.rows.slice import Densify, RowSlice
from rowprop.backprop.rules.registry import function_rule
from rowprop.backprop.watch import note_densified
from rowprop.checks import check_choice
from rowprop.errors import InvalidInput, UnsupportedOperation
from rowprop.host import waits

if TYPE_CHECKING:
    from numpy.typing import NDArray

BatchNorm = Literal["rows", "exact"] | None
Attention = Literal["exact", "cut"]
Unit = Literal["row", "token"]


class Selected(Protocol):
    """What ``pick`` reads of a :class:`~rowprop.Selection`."""

    @property
    def rows(self) -> Tensor:
        """The indices, shape ``(K,)``, int64, none twice."""
        ...

    @property
    def num_rows(self) -> int:
        """N, the rows that they were chosen from."""
        ...


def pick(
    input: Tensor,
    rows: Tensor | Selected | list[int] | list[bool] | range | NDArray[Any],
    *,
    batchnorm: BatchNorm = None,
    attention: Attention = "exact",
) -> Tensor:
    """Take ``input[rows]`` so that the backward pays for those rows only.

    Values and gradients equal those of plain indexing. Every backward op that treats rows alike runs at K rows instead
    of N. An op that mixes rows, or has no rule, gets the dense gradient: this costs time, never exactness.
    :func:`rowprop.watch` names such ops.

    Args:
        input: Shape ``(N, ...)``, anywhere in a graph: losses, logits, features.
        rows: Integer indices of shape ``(K,)``, repeats and negative ones allowed; or a bool mask of shape ``(N,)``,
            either of them as a tensor, a list, a range or an array of numpy's; or a :class:`~rowprop.Selection` made
            from N rows (its weights are not applied). Where rows are positions of several dimensions, such as tokens: a
            mask of input's first dimensions, ``(N, T)``, as in ``input[mask]``; a selection made from flattened scores;
            or indices into a flattened ``input``.
        batchnorm: How to go through BatchNorm in training mode, whose forward is that of the full batch in all cases.
            ``"rows"`` removes the gradient's components along 1 and x-hat over the kept rows instead of over all rows:
            the layer's parameter gradients are exact, its input gradient is an approximation at the cost of K rows.
            ``"exact"`` densifies at the layer. None (default) is ``"rows"`` at a layer that gets at least 16 kept rows
            and 32 values per channel of them, K times the layer's positions, and ``"exact"`` at any other: from there
            on ``"rows"`` was measured at most 0.3 off for random rows. The first choice of a process is told in a
            warning; a named policy is silent.
        attention: How to go through attention where rows are tokens. ``"exact"`` (default): the gradient reaches the
            keys and values of all tokens in the kept tokens' sequences, so below the last attention it is dense.
            ``"cut"``: keys and values of tokens that are not kept take no gradient, so it stays on the kept tokens in
            every layer. This approximates the gradient, but for kept tokens that attend to each other alone. It holds
            where keys are as many as queries, which are then taken for the same tokens: in torch's fused kernels, and
            in matrix products with a softmax between them. Other products take the exact gradient;
            :func:`rowprop.watch` names what was cut.

    Returns:
        Shape ``(K, ...)``, equal to ``input[rows]``.

    Raises:
        InvalidInput: ``input`` has no dimension, or is sparse or nested; ``rows`` has the wrong shape or dtype
            (uint8 too: it could be indices or a mask), is a tuple (which would index several dimensions), is on another
            device, or (checked on the CPU only, since a device would have to be waited for) holds an index out of
            range; the selection is of another number of rows; an unknown ``batchnorm``.
        UnsupportedOperation: At the backward, under ``create_graph=True``.

    Cost:
        No host synchronisation of its own for indices or a selection; a mask is counted, which waits for the device.
        The activations of all rows stay alive until the backward is done, as in plain training. If all rows are kept,
        and under ``torch.func`` transforms and forward-mode AD, ``pick`` is plain indexing. If no row is kept, the
        backward of one row runs, on zeros.

    Note:
        Rows that are not picked contribute exactly nothing. Plain indexing multiplies their zero gradient with saved
        activations: an infinite one turns into NaN under ``input[rows]`` and does not under ``pick``.

    Example:
        >>> w = torch.ones(2, requires_grad=True)
        >>> losses = (torch.arange(6.0).reshape(3, 2) @ w) ** 2
        >>> rowprop.pick(losses, losses.detach().topk(1).indices).mean().backward()
        >>> w.grad
        tensor([72., 90.])
    """
    if not isinstance(input, Tensor) or input.ndim == 0:  # pyright: ignore[reportUnnecessaryIsInstance]
        needed = "one entry per row was needed; pass the losses of reduction='none'."
        raise InvalidInput(f"input is {_described(input)} but {needed}")
    if input.is_nested or input.layout is not torch.strided:
        raise InvalidInput(f"input is {'nested' if input.is_nested else input.layout}; pad it, or call to_dense().")
    check_choice("pick", "batchnorm", batchnorm, (None, "rows", "exact"))
    check_choice("pick", "attention", attention, ("exact", "cut"))
    given = _tensor_of(rows, input.device)
    dims = _dims_of(given, input)
    whole, input = input, input.flatten(0, dims - 1) if dims > 1 else input
    num_rows, chosen = input.shape[0], _is_selection(given)
    at: Tensor = given.rows if chosen else given.flatten() if dims > 1 else given
    is_mask = at.dtype == torch.bool
    if transformed():
        note_densified("pick", "under torch.func or forward-mode AD it is plain indexing")
        return input[at]
    index, unique = (at.clone(), True) if chosen else _index(at, num_rows)  # the caller may write the next rows into it
    kept = index.numel()
    source, at = input, index
    if is_mask and not whole.is_contiguous():
        source, at = whole, given  # a flattened copy would lose the strides that plain indexing has
    if kept == num_rows and (chosen or is_mask):  # all, in their order
        return source.clone() if source.is_contiguous() else source[at]
    if num_rows < 2 or kept >= num_rows or not (input.requires_grad and torch.is_grad_enabled()):
        return _taken(source, at)
    if kept == 0:  # every parameter gets its gradient of zeros, and no kernel is given an empty batch
        # The row with the smallest entries: a zero gradient times an infinite entry would not be zero.
        size = input.detach().abs().flatten(1).sum(1) if input.ndim > 1 else input.detach().abs()
        tamest = size.nan_to_num(torch.inf, torch.inf).argmin().unsqueeze(0)
        return pick(input, tamest, batchnorm=batchnorm, attention=attention)[:0]
    kept_rows = RowSet(index, num_rows, unique=unique, batchnorm=batchnorm, attention=attention)
    return cast(Tensor, _Pick.apply(input, kept_rows, source.detach(), at))


def _is_selection(rows: Any) -> bool:
    """Whether it has the attributes of :class:`Selected`; a class has none of these kinds."""
    return isinstance(getattr(rows, "num_rows", None), int) and isinstance(getattr(rows, "rows", None), Tensor)


def _tensor_of(rows: Any, device: torch.device) -> Any:
    """A list, a range or an array as a tensor; tensors, selections and what can be no rows as they came."""
    if isinstance(rows, tuple):
        held: object = cast("object", rows)
        remedy = "its `.indices`" if hasattr(held, "indices") else "`list(rows)`, or `rows[0]` of torch.where(mask)"
        raise InvalidInput(f"rows is a tuple ({type(held).__name__}) but one tensor or list was needed; pass {remedy}.")
    given, is_array = rows, hasattr(rows, "__array__")  # numpy's
    if isinstance(rows, Tensor) or not (is_array or isinstance(rows, (list, range))):
        return given
    try:
        if is_array:
            tensor = torch.from_numpy(given.__array__().copy())  # its strides may be negative, its memory read-only
        else:
            tensor = torch.tensor(given, dtype=None if len(given) else torch.int64, device="cpu")
    except (TypeError, ValueError, RuntimeError) as error:
        held = f"rows, a {type(given).__name__}, does not hold whole numbers below 2**63, or bools"
        raise InvalidInput(f"{held}; pass indices or a mask.") from error
    return tensor.to(device, non_blocking=True)


def _dims_of(rows: Any, input: Tensor) -> int:
    """How many of input's first dimensions the rows are positions of; no entry of ``rows`` is read."""
    shape: tuple[int, ...] = tuple(input.shape)
    if _is_selection(rows):
        sizes: list[int] = list(itertools.accumulate(shape, operator.mul))
        if rows.num_rows not in sizes:
            raise InvalidInput(
                f"the selection is of {rows.num_rows} rows but input has {shape[0]}; select from its scores."
            )
        dims, rows = 1 + sizes.index(rows.num_rows), rows.rows
    elif (
        not isinstance(rows, Tensor)
        or (rows.ndim != 1 and (rows.ndim == 0 or rows.dtype != torch.bool))
        or rows.layout is not torch.strided
        or rows.is_floating_point()
        or rows.is_complex()
    ):
        dtype = f", layout {rows.layout} and dtype {rows.dtype}" if isinstance(rows, Tensor) else ""
        raise InvalidInput(
            f"rows is {_described(rows)}{dtype} but indices (K,), a bool mask ({shape[0]},) or a Selection was needed."
        )
    else:
        dims = rows.ndim
    if rows.device != input.device:
        raise InvalidInput(f"rows is on {rows.device} but input is on {input.device}; move one of them.")
    if rows.dtype == torch.uint8:
        raise InvalidInput("rows has the dtype uint8; pass rows.long() for indices, or rows.bool() for a mask.")
    if rows.dtype == torch.bool and rows.shape != shape[:dims]:
        raise InvalidInput(f"the mask is {tuple(rows.shape)} but input's first dimensions are {shape[: rows.ndim]}.")
    if rows.dtype == torch.bool and (rows.is_meta or isinstance(rows, FakeTensor)):
        raise InvalidInput(
            "rows is a mask without values (meta, fake); pass indices, e.g. torch.arange(K, device='meta')."
        )
    return dims


def _described(value: Any) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"of type {type(value).__name__}"


def _index(rows: Tensor, num_rows: int) -> tuple[Tensor, bool]:
    """Int64 indices in [0, N), and whether they are known to have no repeats: the backward's own copy."""
    if rows.dtype == torch.bool:
        return rows.nonzero().squeeze(1), True
    index = rows.detach().long()
    if waits(index) or isinstance(index, FakeTensor):
        return torch.add(index, index < 0, alpha=num_rows), False  # two kernels, where() takes three
    if index.numel() == 0:
        return index, True
    low, high = int(index.min()), int(index.max())
    if low < -num_rows or high >= num_rows:
        raise InvalidInput(f"rows holds the index {high if high >= num_rows else low} but input has {num_rows} rows.")
    index = torch.add(index, index < 0, alpha=num_rows) if low < 0 else index.clone()
    return index, int(torch.bincount(index).max()) == 1


def _taken(input: Tensor, index: Tensor) -> Tensor:
    """As ``input[index]``, with the same strides; ``index_select`` is faster, and its result is always contiguous."""
    return input.index_select(0, index) if input.is_contiguous() else input[index]


class _Pick(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, rows: RowSet, source: Tensor, at: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.rows = rows
        ctx.shape = input.shape
        return _taken(source, at)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        if torch.is_grad_enabled():
            raise UnsupportedOperation(
                "pick() has no differentiable gradient (create_graph=True); use plain indexing, losses[rows]."
            )
        rows: RowSet = ctx.rows
        if transformed(grad):
            note_densified("pick", "under torch.func or forward-mode AD its gradient is dense")
            return grad.new_zeros(ctx.shape).index_add(0, rows.index, grad), None, None, None
        if type(grad) is RowGrad:  # a hook kept it from another backward
            grad = grad.plain()
        # Plain indexing makes a copy here, too: hooks may write to it, and ``grad`` may be expanded or the caller's.
        sliced = RowSlice(grad.clone(memory_format=torch.contiguous_format), rows, Layout(0, rows.num_rows), ctx.shape)
        return (sliced.dense() if prepare(ctx, rows) else RowGrad(sliced)), None, None, None


@function_rule(_Pick, positions=True)
def _of_some(node: Any, backward: Any, g: RowSlice) -> Any:
    """The gradient of a pick's result is sliced itself, as by a later pick: its rows get their numbers among all."""
    if not g.layout.holds(0):
        return Densify("rows that lie in another dimension come to a pick")
    out, rows = g.moved(0, node.shape[0], node.rows.index[g.entries(0)]), node.rows
    if type(out) is RowSlice:
        out.rows.batchnorm, out.rows.attention = mildest((g.rows, rows))
    return out, None, None, None
