"""Selection across ranks: the gradient of the rows that all ranks keep together, whoever keeps how many.

DDP, FSDP and ZeRO average gradients over their W ranks, so each has to return ``sum(its kept losses) * W / K``, with K
the rows that all ranks keep. Without a process group, or with one rank, a process selects as if it were alone.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import torch
import torch.distributed as dist
from torch import Tensor

from rowprop.checks import check_numbers, wrong
from rowprop.errors import InvalidInput, RankFailed, UnsupportedOperation
from rowprop.scoring import described
from rowprop.selection import Context, Selection, Selector
from rowprop.selection.base import NOTHING, asked, check_context, check_fits, check_selector, unread

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    Group: TypeAlias = "ProcessGroup | DeviceMesh | None"

__all__ = ["Global", "Local", "mean"]

Choose: TypeAlias = Callable[[Tensor, Context], Selection]


@dataclass(frozen=True, eq=False)
class Share:
    """One rank's part of a selection across ranks; its weighted losses average to the loss of all kept rows."""

    selection: Selection  # this rank's rows, possibly none
    kept_by_rank: tuple[int, ...]
    even: bool  # whether every kept row counts alike, on whichever rank
    rank: int = 0
    facts: Tensor | None = None  # the numbers that each rank sent to the others, (W, S); None where there are no others


class Ranks(ABC):
    """How the ranks select together: :class:`Local` or :class:`Global`."""

    def __init__(self, group: Group = None) -> None:
        check_group(type(self).__name__, group)
        self.group = group

    def __repr__(self) -> str:
        return f"{type(self).__name__}({'' if self.group is None else self.group!r})"

    def select(self, selector: Selector, scores: Tensor, context: Context = NOTHING) -> Selection:
        """Return this rank's rows, from its ``scores`` ``(N,)``, for a loop of one's own; every rank must call."""
        name = type(self).__name__
        check_selector(name, selector)
        check_numbers(name, "scores", scores)
        check_context(name, context)
        if scores.dim() != 1 or not scores.is_floating_point():
            needed = "one floating number per row was needed, shape (N,)."
            raise InvalidInput(f"{name} got {described(scores, 'scores')} but {needed}")
        check_fits(context, scores.numel())
        return self.share(scores.detach(), context, partial(asked, selector)).selection

    def share(self, scores: Tensor, context: Context, choose: Choose, facts: Tensor | None = None) -> Share:
        """Select with the other ranks, and exchange ``facts`` ``(S,)``, the first of which is this rank's usable N."""
        group = process_group(self.group)
        if group is None:
            return alone(choose(scores, context))
        facts = scores.new_tensor([scores.numel()], dtype=torch.float64) if facts is None else facts.double()
        return self._share(scores, context, choose, facts, group)

    @abstractmethod
    def _share(self, scores: Tensor, context: Context, choose: Choose, facts: Tensor, group: ProcessGroup) -> Share:
        """Select over the collectives of a group of several ranks."""


class Global(Ranks):
    """Select among the rows of all ranks, as one process with the whole batch would.

    The first rank selects, with its generator and its selector's memory, and every rank gets its own rows, possibly
    none; N may differ. Weights are the selector's times the number of ranks. Where the first rank could not select, the
    others raise :class:`rowprop.RankFailed`. ``group`` are the ranks that average gradients together, a process group
    or a one-dimensional ``DeviceMesh``; default None: all ranks. It costs three collectives: N; scores, ids and
    classes, padded to the longest; the decision. The host reads the counts. A step lasts as long as on the rank that
    kept most.

    Example:
        >>> from rowprop.distributed import Global
        >>> Global().select(rowprop.TopK(keep=0.5), torch.tensor([3.0, 1.0])).rows.tolist()
        [0]
    """

    def _share(self, scores: Tensor, context: Context, choose: Choose, facts: Tensor, group: ProcessGroup) -> Share:
        rank, world = dist.get_rank(group), dist.get_world_size(group)
        columns = context.columns
        has = facts.new_tensor([scores.numel(), *(name in columns for name in ("ids", "classes", "positions"))])
        given = _gathered(torch.cat([has, facts]), group)
        sizes = [int(size) for size in cast("list[float]", given[:, 0].tolist())]
        if bool((given[:, 1:4] != given[:1, 1:4]).any()):
            raise InvalidInput("ids or classes came on some ranks only but all ranks or none must pass them.")
        # The scores travel as their bits beside ids and classes, so that one collective carries all of them.
        dtype = torch.promote_types(scores.dtype, torch.float32)
        mine = scores.new_zeros(1 + len(columns), max(sizes), dtype=torch.int64)
        for place, column in enumerate([scores.double().view(torch.int64), *columns.values()]):
            mine[place, : scores.numel()] = column
        parts = zip(_gathered(mine, group), sizes, strict=True)
        table = torch.cat([part[:, :size] for part, size in parts], dim=1)
        everyone = table[0].view(torch.float64).to(dtype)
        everyones = replace(context, **cast("Any", dict(zip(columns, table[1:], strict=True))))
        decision, even, unbiased = _decided(choose, everyone, everyones, rank, group)
        kept = cast("tuple[Tensor, ...]", (~decision.isnan()).split(sizes))
        counts = tuple(cast("list[int]", torch.stack([part.sum() for part in kept]).tolist()))
        rows = kept[rank].nonzero().squeeze(1)
        weights = decision[sum(sizes[:rank]) + rows] * world
        return Share(unread(rows, weights.to(dtype), sizes[rank], unbiased=unbiased), counts, even, rank, given[:, 4:])


def _tried(choose: Choose, scores: Tensor, context: Context) -> Selection | Exception:
    """Select; an error is returned, whatever it is: the other ranks must hear first, so that they do not hang."""
    try:
        return choose(scores, context)
    except Exception as error:
        return error


def _decided(
    choose: Choose, scores: Tensor, context: Context, rank: int, group: ProcessGroup
) -> tuple[Tensor, bool, bool]:
    """The first rank's selection: a weight per row, NaN for rows left out; whether it is even, and unbiased."""
    # The last entries: the two facts, NaN where there is no decision.
    decision = torch.full((scores.numel() + 2,), torch.nan, dtype=torch.float64, device=scores.device)
    chosen = _tried(choose, scores, context) if rank == 0 else None
    if isinstance(chosen, Selection):
        decision[chosen.rows] = chosen.weights.to(decision.dtype)
        decision[-2], decision[-1] = float(chosen.even), float(chosen.unbiased)
    dist.broadcast(decision, src=dist.get_global_rank(group, 0), group=group)
    if isinstance(chosen, Exception):
        raise chosen
    even, unbiased = cast("list[float]", decision[-2:].tolist())
    if math.isnan(even):
        raise RankFailed("rank 0 of the group, which selects for all, could not; its own error says why.")
    return decision[:-2], bool(even), bool(unbiased)


class Local(Ranks):
    """Select on each rank among its own rows, and weigh them so that the rows of all ranks count as one selection.

    Ranks may keep different counts K_r, of different N_r. Weights of ``1/K`` are multiplied by ``W * K_r / sum(K)``, so
    that every kept row counts alike; all others, and those of unbiased selections, refer to the mean over all rows and
    are multiplied by ``W * N_r / sum(N)``. (Rows dropped as not finite do not count in N_r.) Seed generators by rank,
    for independent draws. Where a rank could not select, the others raise :class:`rowprop.RankFailed`. ``group`` is as
    for :class:`Global`. It costs one collective of two numbers per rank, read on the host. Where the count is fixed and
    N is the same everywhere, the bare selector is exact under DDP too.

    Example:
        >>> from rowprop.distributed import Local
        >>> Local().select(rowprop.selection.AboveMean(), torch.tensor([3.0, 1.0])).rows.tolist()
        [0]
    """

    def _share(self, scores: Tensor, context: Context, choose: Choose, facts: Tensor, group: ProcessGroup) -> Share:
        chosen = _tried(choose, scores, context)
        count = chosen.num_kept if isinstance(chosen, Selection) else -1
        given = _gathered(torch.cat([facts.new_full((1,), count), facts]), group)
        if isinstance(chosen, Exception):
            raise chosen
        counts, usable = (tuple(map(int, numbers)) for numbers in cast("list[list[float]]", given[:, :2].T.tolist()))
        if min(counts) < 0:
            failed = ", ".join(str(rank) for rank, kept in enumerate(counts) if kept < 0)
            raise RankFailed(f"rank {failed} of the group could not select; its own error says why.")
        rank = dist.get_rank(group)
        parts = counts if chosen.even and not chosen.unbiased else usable
        weights = chosen.weights * (len(parts) * parts[rank] / max(1, sum(parts)))
        selection = unread(chosen.rows, weights, chosen.num_rows, unbiased=chosen.unbiased)
        return Share(selection, counts, chosen.even, rank, given[:, 1:])


def alone(chosen: Selection) -> Share:
    """The share of a process that selects alone."""
    return Share(chosen, (chosen.num_kept,), chosen.even)


def mean(kept: Tensor, group: Group = None) -> Tensor:
    """Mean over the kept rows of all ranks, as each rank has to return it: ``sum(kept) * W / K``.

    For rows chosen by hand: ``rowprop.distributed.mean(rowprop.pick(losses, rows)).backward()``. Every rank must call,
    also one that kept no row. It costs one all-reduce of one number, without a sync.

    ``kept`` are the losses of this rank's kept rows, ``(K_r,)``, K_r >= 0, and ``group`` is as for :class:`Global`. It
    returns a scalar, at least float32, with a graph; zero where no rank kept a row.

    Example:
        >>> rowprop.distributed.mean(torch.tensor([1.0, 3.0])).item()
        2.0
    """
    losses = isinstance(cast("object", kept), Tensor) and kept.dim() == 1 and kept.is_floating_point()
    if not losses or kept.layout is not torch.strided:
        needed = "the losses of the kept rows were needed, floating, dense, shape (K,); do not reduce them."
        raise InvalidInput(f"mean got {described(kept)} but {needed}")
    check_group("mean", group)
    process = process_group(group)
    total = torch.full((), kept.numel(), device=kept.device)  # torch.tensor would copy and sync
    world = 1 if process is None else dist.get_world_size(process)
    if process is not None:
        dist.all_reduce(total, group=process)
    dtype = torch.promote_types(kept.dtype, torch.float32)
    return kept.sum(dtype=dtype) * (world / total.clamp(min=1).to(dtype))


def check_group(owner: str, group: object) -> None:
    """Refuse a value that is neither a process group, a mesh nor None."""
    if group is None:
        return
    if dist.is_available():
        from torch.distributed.device_mesh import DeviceMesh

        if group is dist.GroupMember.NON_GROUP_MEMBER or isinstance(group, (dist.ProcessGroup, DeviceMesh)):
            return
    needed = "a process group or a one-dimensional DeviceMesh was needed; None stands for all ranks."
    raise wrong(owner, "group", group, needed, kind=True)


def process_group(group: Any) -> ProcessGroup | None:
    """The process group to go over; None where this process is alone."""
    if not dist.is_available() or not dist.is_initialized():
        return None
    from torch.distributed.device_mesh import DeviceMesh

    check_group("a selection across ranks", group)
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise InvalidInput(f"group is a mesh of {group.ndim} dimensions but one was needed, such as mesh['dp'].")
        group = group.get_group()
    group = dist.group.WORLD if group is None else group
    if dist.get_rank(group) < 0:
        raise InvalidInput("this rank does not belong to the group; give each rank its own data-parallel group.")
    return group if dist.get_world_size(group) > 1 else None


def own_rank() -> int:
    """This process's rank among all; 0 where it is alone."""
    return 0 if process_group(None) is None else dist.get_rank()


def averages_gradients(model: object) -> bool:
    """Whether the model is one of torch's data-parallel wrappers, whose ranks must step together."""
    wrappers = {"DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule"}
    return process_group(None) is not None and any(base.__name__ in wrappers for base in type(model).__mro__)


def refuse_join(model: object) -> None:
    """Refuse Join, in which a rank without batches would not call the collectives of a selection."""
    if getattr(getattr(model, "_join_config", None), "enable", False):
        why = "would wait for those without batches; give all ranks as many batches, or select without ranks."
        raise UnsupportedOperation(f"a selection across ranks inside Join {why}")


def _gathered(values: Tensor, group: ProcessGroup) -> Tensor:
    """The tensors of all ranks, shape ``(W, ...)``."""
    parts = [torch.empty_like(values) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, values.contiguous(), group=group)
    return torch.stack(parts)
