"""Rows left out before the forward: a sampler that draws each epoch by the losses of earlier ones."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.data import Sampler

from rowprop.checks import check_choice, check_entries, check_kind, check_vector, check_whole, check_within, wrong
from rowprop.distributed import check_group
from rowprop.errors import InvalidInput
from rowprop.history.losses import LossHistory, check_ids, check_made_for, first_outside
from rowprop.selection.selectors import SLACK, count_kept

__all__ = ["PruningSampler"]


@dataclass(eq=False, repr=False)
class PruningSampler(Sampler[int]):
    """Leave easy rows out of an epoch, and weigh the other easy rows so that they stand for all: InfoBatch.

    A row is easy in an epoch if its stored loss is below the mean of the stored ones. Of n easy rows ``ceil((1 - prune)
    * n)`` are drawn, each with the factor ``n / drawn``; all others, also those without a finite stored loss, come with
    the factor 1. The last epochs are full. :class:`rowprop.SelectiveBackprop` multiplies its weights by the factors,
    which are in the history; in a loop of one's own, the loss is ``(losses * history.weights_of(ids)).mean()``.

    Each iteration of a ``DataLoader`` over it is an epoch, for which the history is copied to the host once. Batches
    have to come in its order, with any number of workers: :meth:`trained` tells by the ids how far an epoch is trained.

    Unbiased: each row counts once in expectation (but those that ``multiple_of`` cuts off), and an epoch's factors add
    up to ``num_rows``. It has fewer steps, each larger by ``num_rows / len(sampler)``. Source: Qin et al., ICLR 2024,
    arXiv:2303.04947; NUS-HPC-AI-Lab/InfoBatch. docs/recipes.md tells the differences. An argument out of its range is
    refused, and a ``history.num_rows`` below ``num_rows``.

    Args:
        history: Losses by row id, kept by the step; ids are the places in the data set, as :class:`WithIds
            <rowprop.history.WithIds>` gives them.
        num_rows: Rows of the data set.
        epochs: How many epochs the training has.
        prune: Share of the easy rows to leave out, in [0, 1); default 0.5.
        full_after: Share of the epochs after which every row comes again, in [0, 1]; default 0.875: 2 of 10 are full.
        shuffle: Whether the rows come in random order (default) or in that of the data set.
        multiple_of: Each rank's part of an epoch is cut to a multiple of this; the shortest epoch, in which all rows
            but one are easy, must hold one. Give the batch size where the loader has ``drop_last=True``, or a resume
            takes the dropped rows of a finished epoch for its rest. Default 1.
        seed: All that draws and order depend on, beside the epoch. Default 0.
        num_replicas: Ranks that share each epoch; default 1. All make the same draw, and each takes every
            ``num_replicas``-th row of it; up to ``num_replicas - 1`` rows come twice, so that all have as many.
        rank: Number of this rank, from 0.
        group: The ranks that synchronise their histories at the start of each epoch. Default None: all.
    """

    history: LossHistory
    _: KW_ONLY
    num_rows: int
    epochs: int
    prune: float = 0.5
    full_after: float = 0.875
    shuffle: bool = True
    multiple_of: int = 1
    seed: int = 0
    num_replicas: int = 1
    rank: int = 0
    group: Any = None

    def __post_init__(self) -> None:
        needed = "a LossHistory was needed; give it the one that SelectiveBackprop gets."
        check_kind("PruningSampler", "history", self.history, LossHistory, needed)
        for name in ("num_rows", "epochs", "multiple_of", "num_replicas", "seed", "rank"):
            check_whole("PruningSampler", name, getattr(self, name), 0 if name in ("seed", "rank") else 1)
        check_within("PruningSampler", "prune", self.prune, "[0, 1)")
        check_within("PruningSampler", "full_after", self.full_after, "[0, 1]")
        check_choice("PruningSampler", "shuffle", self.shuffle, (True, False))
        check_group("PruningSampler", self.group)
        super().__init__()
        self._begun = 0  # number of epochs
        self._order: Tensor | None = None  # rows of the latest iteration, those of all ranks
        self._places: Tensor | None = None  # of each row in this rank's part of it, from 1; 0 where it is not there
        self._before = 0  # rows that the running epoch trained on before that iteration
        self._resumed = False
        if self.rank >= self.num_replicas:
            ranks = f"num_replicas={self.num_replicas}; ranks are numbered from 0."
            raise wrong("PruningSampler", "rank", self.rank, ranks)
        if self.history.num_rows is not None and self.history.num_rows < self.num_rows:
            history = f"a history of num_rows={self.history.num_rows}; give both the number of rows of the data set."
            raise InvalidInput(f"PruningSampler got num_rows={self.num_rows} but {history}")
        # In the shortest epoch all rows but one are easy.
        pruned = self._pruned_epochs > 0 and self.num_rows > 1
        rows = 1 + count_kept(1 - self.prune, self.num_rows - 1) if pruned else self.num_rows
        most = math.ceil(rows / self.num_replicas)
        if (size := self.multiple_of) > most:
            short = f"an epoch may be as short as {most} rows per rank, of which no multiple of {size} is left"
            raise wrong("PruningSampler", "multiple_of", size, f"{short}; give {most} or less.")

    @property
    def _pruned_epochs(self) -> int:
        return math.floor(self.full_after * self.epochs + SLACK)

    @property
    def epoch(self) -> int:
        """Number of the running epoch, from 0: that of the latest iteration, until another begins."""
        return max(0, self._begun - 1)

    @property
    def next_epoch(self) -> int:
        """Number of the epoch that the next iteration runs: ``while sampler.next_epoch < epochs`` also resumes."""
        return self._begun - self._resumed

    def trained(self, ids: Tensor) -> int:
        """How many rows of the running epoch are done once these are trained: all up to the furthest of them.

        So a batch that is trained twice counts once, and one that is skipped is done with the next. Rows of this rank
        count, those before a resume included. ``ids`` are the rows of a batch, ``(N,)``, int64; the host waits for
        them, and those that are not in the rest of the epoch count nothing.
        """
        check_ids("PruningSampler.trained", ids)
        if self._places is None:  # no epoch runs
            return self._before
        ids = ids.cpu()
        places = self._places[ids[(ids >= 0) & (ids < self.num_rows)]]
        return self._before + max(cast("list[int]", places.tolist()), default=0)

    def progress(self, trained: int) -> float:
        """Fraction of all epochs that is done, in [0, 1], after ``trained`` rows of the running one."""
        check_whole("PruningSampler.progress", "trained", trained, 0)
        if self._order is None:  # no epoch runs: none has begun, or the resumed one had ended
            return min(1.0, self._begun / self.epochs)
        return min(1.0, (self.epoch + trained / max(1, self._before + len(self))) / self.epochs)

    @property
    def num_pruned(self) -> int:
        """How many rows are left out of the running epoch; 0 before the first."""
        return int((self.history.weights_of(torch.arange(self.num_rows)) == 0).sum())

    def __iter__(self) -> Iterator[int]:  # a generator: loaders may make two iterators, and ask one of them for rows
        if self._resumed:
            self._resumed = False
        else:
            if self.num_replicas > 1:
                self.history.synchronise(self.group)
            order, weights = self._drawn()
            self._run(order)
            self.history.set_weights(torch.arange(self.num_rows), weights)
            self._before = 0
            self._begun += 1
        yield from cast("list[int]", self._own().tolist())

    def __len__(self) -> int:
        """Rows of this rank's latest iteration; before the first, those that it would yield now."""
        return self._own().numel()

    def state_dict(self, trained: int | None = None) -> dict[str, Any]:
        """Number of the running epoch, and the rows that it has left.

        :class:`rowprop.SelectiveBackprop` saves it with its own state where it is given the sampler. Otherwise save the
        history too. On several ranks, synchronise the history before; any rank's state is then good for all.
        ``trained`` is how far the running epoch is trained, :meth:`trained` of the ids of its last batch, else refused;
        default None: to the end.
        """
        most = self._before + (0 if self._order is None else len(self))
        done = most if trained is None else trained
        check_whole("PruningSampler.state_dict", "trained", done, 0)
        if not self._before <= done <= most:
            can = f"between {self._before} and {most} rows of epoch {self.epoch} can have been trained on"
            raise wrong("PruningSampler.state_dict", "trained", done, f"{can}; give trained(ids) of the last batch.")
        left = None
        if self._order is not None and done < most:
            left = self._order[(done - self._before) * self.num_replicas :].clone()
        return {"num_rows": self.num_rows, "begun": self._begun, "trained": done, "order": left}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where ``state`` was taken: the next iteration yields exactly the rows that the epoch had left.

        A state that no sampler of that many rows can have made is refused, and nothing is loaded.
        """
        owner = "PruningSampler.load_state_dict"
        check_entries(owner, state, ("num_rows", "begun", "trained", "order"))
        check_made_for(owner, state, self.num_rows)
        for name in ("begun", "trained"):
            check_whole(owner, name, state[name], 0)
        order = state["order"]
        if order is not None:
            check_vector(owner, "order", order, torch.int64)
            if order.numel() == 0 or first_outside(order, self.num_rows) is not None:
                given = f"an order that is empty or holds rows outside of 0 to {self.num_rows - 1}"
                needed = "the rows that an epoch has left were needed; save and load the state whole."
                raise InvalidInput(f"{owner} got {given}, but {needed}")
        self._begun, self._before = state["begun"], state["trained"]
        self._run(None if order is None else self._even(order.cpu().clone()))
        self._resumed = order is not None

    def _run(self, order: Tensor | None) -> None:
        self._order = self._places = order
        if order is not None:
            own = self._own()
            # A row that comes twice has its first place: the later one would count the rows between them too early.
            self._places = torch.zeros(self.num_rows, dtype=torch.int64).scatter_reduce_(
                0, own, torch.arange(1, own.numel() + 1), "amin", include_self=False
            )

    def _own(self) -> Tensor:
        """This rank's rows of the latest iteration; every rank has the same number."""
        order = self._drawn()[0] if self._order is None else self._order
        return order[self.rank :: self.num_replicas]

    def _even(self, order: Tensor) -> Tensor:
        """Repeat the first rows until all ranks have the same number."""
        count = math.ceil(order.numel() / self.num_replicas) * self.num_replicas
        return order[torch.arange(count) % order.numel()]

    def _drawn(self) -> tuple[Tensor, Tensor]:
        """Draw the rows of the next epoch, in their order, and the factor of every row, 0 for those left out."""
        generator = torch.Generator().manual_seed((self.seed * self.epochs + self._begun) % 2**63)
        weights = torch.ones(self.num_rows)
        if self._begun < self._pruned_epochs:
            losses = self.history.losses_of(torch.arange(self.num_rows)).cpu().double()
            known = losses.isfinite()
            # The mean of no losses is NaN, and no loss is below it.
            easy = (known & (losses < losses[known].mean())).nonzero().squeeze(1)
            if easy.numel() > 0:
                drawn = count_kept(1 - self.prune, easy.numel())
                weights[easy] = 0
                weights[easy[torch.randperm(easy.numel(), generator=generator)[:drawn]]] = easy.numel() / drawn
        order = weights.nonzero().squeeze(1)
        if self.shuffle:
            order = order[torch.randperm(order.numel(), generator=generator)]
        order = self._even(order)
        whole = self.num_replicas * self.multiple_of
        return order[: order.numel() // whole * whole], weights
