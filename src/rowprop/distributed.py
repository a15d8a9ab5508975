"""Selection across ranks: the gradient of the rows that all ranks keep together, whoever keeps how many.

DDP, FSDP and ZeRO average gradients over their W ranks. The average of per-rank means is the mean over all kept rows
only where every rank keeps as many; so each has to return ``sum(its kept losses) * W / K``, with K the rows that all
ranks keep. The selectors here put such a factor into a selection's weights; :func:`mean` does it for rows chosen by
hand.

Everything goes over the process group that torch has; where there is none, or it has one rank, all of this is what a
single process does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import torch
import torch.distributed as dist
from torch import Tensor

from rowprop.checks import check_generator, check_numbers, shown
from rowprop.errors import InvalidInput, RankFailed, UnsupportedOperation
from rowprop.selection.base import Selection, Selector, asked, has_own_weights, keywords_of, says, unread

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    Group: TypeAlias = "ProcessGroup | DeviceMesh | None"

__all__ = ["GlobalSelector", "LocalSelector", "mean"]


@dataclass(frozen=True, eq=False)
class Share:
    """What a selection across ranks means for one of them.

    Attributes:
        selection: This rank's rows, possibly none. The sum of its weighted losses, averaged over the ranks, is the
            loss of the rows that all ranks keep.
        kept_by_rank: How many rows each rank keeps.
        rank: Which of them this one is.
        told: What each rank told the others, shape ``(W, S)``; None where there are no others.
    """

    selection: Selection
    kept_by_rank: tuple[int, ...]
    rank: int = 0
    told: Tensor | None = None


class AcrossRanks:
    """What the selectors across ranks have in common; :class:`rowprop.SelectiveBackprop` brings its own ``choose``."""

    def __init__(self, selector: Selector, group: Group = None) -> None:
        self.keywords = keywords_of(type(self).__name__, selector)
        check_group(type(self).__name__, group)
        self.selector = selector
        self.group = group

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.selector!r})"

    def __call__(self, scores: Tensor, *, generator: torch.Generator | None = None) -> Selection:
        """Return this rank's rows of ``scores`` ``(N,)``; every rank of the group must call."""
        check_numbers(type(self).__name__, "scores", scores)
        check_generator(type(self).__name__, generator)
        if scores.dim() != 1 or not scores.is_floating_point():
            raise InvalidInput(
                f"{type(self).__name__} got scores of shape {tuple(scores.shape)} and dtype {scores.dtype} but one "
                "floating number per row was needed, shape (N,); reduce over all but the rows first."
            )
        return self.share(scores.detach(), partial(asked, self.selector, self.keywords, generator=generator)).selection

    def share(self, scores: Tensor, choose: Callable[[Tensor], Selection], told: Tensor | None = None) -> Share:
        """Have ``choose`` select instead of the selector, and pass on what this rank has to tell.

        Args:
            scores: Of this rank's rows, shape ``(N,)``.
            choose: From scores to a selection.
            told: Shape ``(S,)``; the first number is among how many of its rows this rank selects. Default None: that
                alone, N.
        """
        group = process_group(self.group)
        if group is None:
            chosen = choose(scores)
            return Share(chosen, (chosen.num_kept,))
        told = scores.new_tensor([scores.numel()], dtype=torch.float64) if told is None else told.double()
        return self._share(scores, choose, told, group)

    def _share(self, scores: Tensor, choose: Callable[[Tensor], Selection], told: Tensor, group: ProcessGroup) -> Share:
        raise NotImplementedError


class GlobalSelector(AcrossRanks):
    """Select among the rows of all ranks, as one process with the whole batch would.

    The scores of all ranks are put one after another in the order of the ranks, the first rank selects among them, and
    every rank is told its own rows. So generators need not agree between ranks (the first one's is used), nor need a
    selector's memory. N may differ between ranks, and a rank may end up with no row: its selection is then empty, and
    ``(rowprop.pick(losses, selection) * selection.weights).sum()`` is a zero whose backward still meets every
    collective.

    Args:
        selector: Any selector.
        group: The ranks that average gradients together: a process group or a one-dimensional ``DeviceMesh``. Default
            None: all ranks.

    Returns:
        When called with this rank's scores, shape ``(N,)``: its rows, ``0 <= K <= N``, with the selector's weights
        times the number of ranks. The weighted sum of the losses, averaged over ranks, is that of one process.

    Raises:
        InvalidInput: ``selector`` is not callable; when called, the group does not hold this rank or has more than one
            dimension, or ``scores`` are not of shape ``(N,)``.
        RankFailed: The first rank could not select.

    Cost:
        Three collectives: the ranks' N, their scores padded to the longest, the decision (a number per row of all
        ranks); the counts are read on the host. A step lasts as long as that of the rank that kept most.

    Example:
        >>> from rowprop.distributed import GlobalSelector
        >>> GlobalSelector(rowprop.TopK(keep=0.5))(torch.tensor([3.0, 1.0])).rows.tolist()
        [0]
    """

    def _share(self, scores: Tensor, choose: Callable[[Tensor], Selection], told: Tensor, group: ProcessGroup) -> Share:
        rank = dist.get_rank(group)
        given = _gathered(torch.cat([told.new_tensor([scores.numel()]), told]), group)
        sizes = [int(size) for size in cast("list[float]", given[:, 0].tolist())]

        padded = scores.new_zeros(max(sizes), dtype=torch.promote_types(scores.dtype, torch.float32))
        padded[: scores.numel()] = scores
        everyone = torch.cat([part[:size] for part, size in zip(_gathered(padded, group), sizes, strict=True)])

        # A weight for each row of all ranks, NaN for those not kept; and a last entry, NaN where there is no decision.
        decision = torch.full((sum(sizes) + 1,), torch.nan, dtype=torch.float64, device=scores.device)
        failure: Exception | None = None
        if rank == 0:
            try:
                chosen = choose(everyone)
                decision[chosen.rows] = chosen.weights.to(decision.dtype)
                decision[-1] = 0
            except Exception as error:  # whatever it is, the others are told first
                failure = error
        dist.broadcast(decision, src=dist.get_global_rank(group, 0), group=group)
        if failure is not None:
            raise failure
        kept = ~decision.isnan()
        parts = cast("tuple[Tensor, ...]", kept.split([*sizes, 1]))
        *counts, able = cast("list[int]", torch.stack([part.sum() for part in parts]).tolist())
        if not able:
            raise RankFailed(
                "rank 0 of the group, which selects for all, could not; its own error says why, so look at its output."
            )
        rows = parts[rank].nonzero().squeeze(1)
        weights = decision[sum(sizes[:rank]) + rows] * dist.get_world_size(group)
        selection = unread(rows, weights.to(everyone.dtype), sizes[rank])
        return Share(selection, tuple(counts), rank, given[:, 1:])


class LocalSelector(AcrossRanks):
    """Select on each rank among its own rows, and weigh them so that what all ranks keep counts as one selection.

    Where a selector's count follows the scores (:class:`rowprop.LossMass`, :class:`rowprop.AboveMean`) or N differs
    between ranks, the ranks keep different counts K_r, and the average of their means is not the mean over all kept
    rows. The weights of rank r are therefore multiplied by ``W * K_r / sum(K)``: every kept row counts alike.

    Weights that refer to the mean over all N rows, those of ``unbiased`` selectors and of
    :class:`rowprop.selection.PerClass`, are multiplied by ``W * N_r / sum(N)`` instead, whatever the ranks keep: the
    expected average over the ranks is then the mean over all rows of all ranks. (Rows that are not finite and dropped
    do not count in N_r.)

    The ranks draw independently where their generators do: seed them by rank.

    Args:
        selector: Any selector.
        group: The ranks that average gradients together: a process group or a one-dimensional ``DeviceMesh``. Default
            None: all ranks.

    Returns:
        When called with this rank's scores, shape ``(N,)``: the selector's rows with the multiplied weights.

    Raises:
        InvalidInput: As :class:`GlobalSelector`.
        RankFailed: Another rank could not select.

    Cost:
        One collective, of two numbers per rank, read on the host. None is needed where the count is fixed and N is the
        same everywhere: the bare selector is then exact under DDP too.

    Example:
        >>> from rowprop.distributed import LocalSelector
        >>> LocalSelector(rowprop.AboveMean())(torch.tensor([3.0, 1.0])).rows.tolist()
        [0]
    """

    def _share(self, scores: Tensor, choose: Callable[[Tensor], Selection], told: Tensor, group: ProcessGroup) -> Share:
        chosen: Selection | None = None
        failure: Exception | None = None
        try:
            chosen = choose(scores)
        except Exception as error:  # whatever it is, the others are told first
            failure = error
        count = -1 if chosen is None else chosen.num_kept
        given = _gathered(torch.cat([told.new_tensor([count]), told]), group)
        if chosen is None:
            raise cast("Exception", failure)
        counts, among = (tuple(map(int, numbers)) for numbers in cast("list[list[float]]", given[:, :2].T.tolist()))
        if min(counts) < 0:
            failed = ", ".join(str(rank) for rank, kept in enumerate(counts) if kept < 0)
            raise RankFailed(
                f"rank {failed} of the group could not select; its own error says why, so look at its output."
            )
        rank = dist.get_rank(group)
        parts = among if says(self.selector, "unbiased") or has_own_weights(self.selector) else counts
        weights = chosen.weights * (len(parts) * parts[rank] / max(1, sum(parts)))
        return Share(unread(chosen.rows, weights, chosen.num_rows), counts, rank, given[:, 1:])


def mean(kept: Tensor, group: Group = None) -> Tensor:
    """Mean over the kept rows of all ranks, as each rank has to return it: ``sum(kept) * W / K``.

    For rows chosen by hand: ``rowprop.distributed.mean(rowprop.pick(losses, rows)).backward()``, also where ``rows`` is
    empty. Every rank must call. Averaged over the ranks, value and gradient are those of the mean over all kept rows.

    Args:
        kept: Losses of this rank's kept rows, shape ``(K_r,)``, K_r >= 0.
        group: As for :class:`GlobalSelector`.

    Returns:
        A scalar, at least float32, with a graph even where K_r is 0. Zero where no rank kept a row.

    Raises:
        InvalidInput: ``kept`` is not a floating tensor of shape ``(K_r,)``; the group as for :class:`GlobalSelector`.

    Cost:
        One all-reduce of one number, for which the host does not wait.

    Example:
        >>> rowprop.distributed.mean(torch.tensor([1.0, 3.0])).item()
        2.0
    """
    if not isinstance(kept, Tensor) or kept.dim() != 1 or not kept.is_floating_point():  # pyright: ignore[reportUnnecessaryIsInstance]
        given = f"a tensor of shape {tuple(kept.shape)}" if isinstance(kept, Tensor) else f"a {type(kept).__name__}"  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InvalidInput(
            f"mean got {given} but the losses of the kept rows were needed, floating, shape (K,); do not reduce them."
        )
    check_group("mean", group)
    if kept.layout is not torch.strided:
        raise InvalidInput("mean got a sparse tensor but a dense one was needed: the loss of each kept row.")
    process = process_group(group)
    total = torch.tensor(kept.numel(), device=kept.device)
    world = 1
    if process is not None:
        world = dist.get_world_size(process)
        dist.all_reduce(total, group=process)
    dtype = torch.promote_types(kept.dtype, torch.float32)
    return kept.sum(dtype=dtype) * (world / total.clamp(min=1).to(dtype))


def check_group(owner: str, group: object) -> None:
    """Refuse a value that is neither a process group, a mesh nor None."""
    if group is None or (dist.is_available() and group is dist.GroupMember.NON_GROUP_MEMBER):
        return
    kinds: tuple[Any, ...] = ()
    if dist.is_available():
        from torch.distributed.device_mesh import DeviceMesh

        kinds = (dist.ProcessGroup, DeviceMesh)
    if not isinstance(group, kinds):
        raise InvalidInput(
            f"{owner} got group={shown(group)}, a {type(group).__name__}, but a process group or a one-dimensional "
            "DeviceMesh was needed; None stands for all ranks."
        )


def process_group(group: Any) -> ProcessGroup | None:
    """The process group to go over; None where this process is alone.

    Raises:
        InvalidInput: The group does not hold this rank, or is a mesh of several dimensions.
    """
    if not dist.is_available() or not dist.is_initialized():
        return None
    from torch.distributed.device_mesh import DeviceMesh

    check_group("a selection across ranks", group)
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise InvalidInput(
                f"group is a mesh of {group.ndim} dimensions but the one over which gradients are averaged was needed; "
                "give mesh['dp'], or the process group over all of them."
            )
        group = group.get_group()
    group = dist.group.WORLD if group is None else group
    if dist.get_rank(group) < 0:
        raise InvalidInput(
            "this rank does not belong to the group but the ranks that average gradients with it were needed; give "
            "each rank its own data-parallel group."
        )
    return group if dist.get_world_size(group) > 1 else None


def largest(values: list[float], group: Any, device: torch.device) -> list[float]:
    """Of each number the largest that any rank of the group has; every rank must call."""
    process = process_group(group)
    if process is None:
        return values
    everyones = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(everyones, op=dist.ReduceOp.MAX, group=process)
    return cast("list[float]", everyones.tolist())


def averages_gradients(model: object) -> bool:
    """Whether the model is one of torch's data-parallel wrappers, whose ranks must step together."""
    wrappers = {"DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule"}
    return process_group(None) is not None and any(base.__name__ in wrappers for base in type(model).__mro__)


def refuse_join(model: object) -> None:
    """Refuse to go on where ranks may have run out of batches: they would not meet the collectives of a selection."""
    if getattr(getattr(model, "_join_config", None), "enable", False):
        raise UnsupportedOperation(
            "a selection across ranks was asked for inside Join, where ranks that ran out of batches no longer answer; "
            "give all ranks as many batches, or use the bare selector and one engine by name, which ask no other rank."
        )


def _gathered(values: Tensor, group: ProcessGroup) -> Tensor:
    """What all ranks hold, shape ``(W, ...)``."""
    parts = [torch.empty_like(values) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, values.contiguous(), group=group)
    return torch.stack(parts)
