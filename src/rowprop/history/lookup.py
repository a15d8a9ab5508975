"""Parts of a step that look up losses by row id: losses of a holdout model, and stored losses."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from rowprop.batch import take
from rowprop.checks import check_choice, check_kind, check_losses_fn, check_numbers, check_whole
from rowprop.distributed import averages_gradients
from rowprop.errors import InvalidInput
from rowprop.history.losses import LossHistory, check_ids, filled
from rowprop.host import waits
from rowprop.scoring import described, per_row, per_token, score_without_graph
from rowprop.selection.base import Context, Selection, asked, check_context
from rowprop.selection.wrapped import Around
from rowprop.state import device_of, rng_kept


@dataclass(frozen=True, eq=False)
class ReducibleLoss(Around):
    """Select by the loss less the irreducible loss (RHO-LOSS): a selector around a selector.

    It is small for a mislabeled row, which is hard for the holdout model too, and for one already learnt. Calls need
    ``ids``, and cost one gather; where ids or ``irreducible`` are on an accelerator, the host reads one flag.

    Biased towards rows that are learnable and not yet learnt; a selection that is unbiased for any scores stays so.
    Reducible losses may be negative, which selectors that draw in proportion refuse. Source: Mindermann et al., ICML
    2022, arXiv:2206.07137.

    Args:
        selector: Any selector; its scores are the reducible losses.
        irreducible: Losses under a model trained on other data, by row id, shape ``(M,)``, as :func:`holdout_losses`
            gives them; NaN where unknown, which a call refuses. In a step with ``unit="token"`` also ``(M, T)``, by a
            token's place in its row.

    Example:
        >>> from rowprop.selection import Context
        >>> selector = ReducibleLoss(TopK(keep=0.5), torch.tensor([0.1, 2.0, 0.3]))
        >>> selector(torch.tensor([2.5, 1.0]), Context(ids=torch.tensor([1, 2]))).rows.tolist()
        [1]
    """

    irreducible: Tensor

    def __post_init__(self) -> None:
        super().__post_init__()
        table = self.irreducible
        needed = "floating losses were needed, shape (M,) of rows or (M, T) of tokens; holdout_losses computes them."
        check_numbers("ReducibleLoss", "irreducible", table, needed)
        if table.dim() not in (1, 2) or table.numel() == 0 or not table.is_floating_point():
            raise InvalidInput(f"ReducibleLoss got {described(table, 'irreducible losses')} but {needed}")

    def _choose(self, scores: Tensor, context: Context) -> Selection:
        table = self.irreducible
        places = [context.need("ids", "ReducibleLoss").to(table.device)]
        if table.dim() == 2:
            places.append(context.need("positions", "ReducibleLoss with losses of tokens").to(table.device))
        inside = torch.ones_like(places[0], dtype=torch.bool)
        for of, size in zip(places, table.shape, strict=True):
            inside &= (of >= 0) & (of < size)
        known = table[tuple(torch.where(inside, of, 0) for of in places)].detach()
        unknown = known.isnan() | ~inside
        if bool(unknown.any()):
            where = ", ".join(f"{name} {of[unknown][0]}" for name, of in zip(("id", "position"), places, strict=False))
            some = f"{int(unknown.sum())} of {unknown.numel()} {'rows' if len(places) == 1 else 'tokens'}"
            needed = "one of each was needed; run holdout_losses over all rows of the data."
            raise InvalidInput(f"ReducibleLoss has no irreducible loss of {some} (the first has {where}) but {needed}")
        # A copy to an accelerator needs no sync; a copy to the host does.
        known = known.to(scores.device, scores.dtype, non_blocking=waits(scores))
        return asked(self.selector, scores - known, context)


def holdout_losses(
    model: nn.Module,
    losses_fn: Callable[[Any, Any], Any],
    loader: Iterable[tuple[Tensor, Any]],
    *,
    unit: Literal["row", "token"] = "row",
) -> Tensor:
    """Compute irreducible losses for :class:`ReducibleLoss`: the losses of a model trained on other rows.

    They come by row id, shape ``(M,)`` with M the largest id plus 1, at least float32, on the CPU; NaN for ids that did
    not come, the last loss of one that came twice. Of tokens they are ``(M, T)`` with the largest T, NaN behind a
    shorter batch. A ``loader`` without such pairs is refused, and a ``losses_fn`` without losses of that unit.

    Args:
        model: The holdout model, trained on other rows; it runs in evaluation mode without a graph, and stays as it is.
        losses_fn: ``(model, batch)`` to unreduced losses, ``(N,)`` or ``(N, 1)``.
        loader: Yields pairs of ids, shape ``(N,)``, int64, and the batch on the device that ``losses_fn`` needs; e.g. a
            ``DataLoader`` over :class:`rowprop.history.WithIds` of the data to train on, every row once: one forward
            over them, of a model that can be much smaller than the trained one.
        unit: ``"row"`` (default), or ``"token"`` where ``losses_fn`` returns those of each row's tokens, ``(N, T)``. T
            may differ between batches that are padded at the end of their rows.

    Example:
        >>> model, data = torch.nn.Linear(2, 1), torch.randn(6, 2)
        >>> batches = [(torch.tensor([4, 0]), data[[4, 0]]), (torch.tensor([1]), data[[1]])]
        >>> holdout_losses(model, lambda model, batch: model(batch).square(), batches).isnan().tolist()
        [False, False, True, True, False]
    """
    check_kind("holdout_losses", "model", model, nn.Module, "a torch.nn.Module was needed.")
    check_losses_fn("holdout_losses", losses_fn)
    check_choice("holdout_losses", "unit", unit, ("row", "token"))
    found: list[tuple[Tensor, Tensor]] = []
    with rng_kept(list(model.modules()), None):  # a shuffling loader draws too
        try:
            entries = cast("Iterator[object]", iter(loader))
        except TypeError as error:
            kind = type(loader).__name__
            raise InvalidInput(f"holdout_losses got a {kind} but a loader of ids and batches was needed.") from error
        for entry in entries:
            if not isinstance(entry, (tuple, list)) or len(cast("list[Any]", entry)) != 2:
                kind = type(cast("object", entry)).__name__
                needed = "pairs of ids and a batch were needed; wrap the data in rowprop.history.WithIds."
                raise InvalidInput(f"holdout_losses got a {kind} from the loader but {needed}")
            ids, batch = cast("tuple[Tensor, Any]", entry)
            losses = _of_unit(score_without_graph(losses_fn, model, batch, mode="eval"), unit)
            check_ids("holdout_losses", ids)
            if len(ids) != len(losses) or bool((ids < 0).any()):
                given = f"{len(ids)} ids for the losses of {len(losses)} rows, or one below 0"
                needed = "each row's place in the data was needed; wrap the data in rowprop.history.WithIds."
                raise InvalidInput(f"holdout_losses got {given}, but {needed}")
            found.append((ids.cpu(), losses.cpu()))
    if not found:
        raise InvalidInput("holdout_losses got a loader without batches but at least one was needed.")
    largest, longest = 1 + max(int(ids.max()) for ids, _ in found), max(losses.shape[1] for _, losses in found)
    reason = f"holdout_losses got the id {largest - 1}; yield the rows' places, as rowprop.history.WithIds does."
    table = filled((largest, longest), torch.nan, reason, dtype=found[0][1].dtype)
    for ids, losses in found:
        table[ids] = torch.nan  # an id that came before may have had more tokens
        table[ids, : losses.shape[1]] = losses
    return table if unit == "token" else table[:, 0]


def _of_unit(returned: object, unit: str) -> Tensor:
    """The losses of each row's tokens, ``(N, T)``, at least float32; one for the row itself."""
    losses = per_row("losses_fn", returned, None)[:, None] if unit == "row" else per_token("losses_fn", returned)
    if losses.dim() < 2:
        needed = "the losses of each row's tokens were needed, shape (N, T); view them so."
        raise InvalidInput(f"losses_fn returned {described(losses)} but {needed}")
    return losses.flatten(1).to(torch.promote_types(losses.dtype, torch.float32))


class StaleScorer:
    """Score rows by their stored losses, and run a forward only for rows whose stored loss is too old.

    A row's loss is computed when it has none, and from then on at every ``staleness``-th visit; the losses of the rows
    that the step trains count as fresh. The history is the step's: ``SelectiveBackprop(model, losses_fn, selector,
    history=LossHistory(), scorer=StaleScorer(losses_fn), engine="recompute")``. Losses are up to ``staleness - 1``
    visits old, and BatchNorm in training normalises over the scored rows alone. Sources: Jiang et al., 2019,
    arXiv:1910.00762 (``StaleSB``); angelajiang/SelectiveBackprop, ``lib/fp_selectors.py``.

    Args:
        losses_fn: ``(model, batch)`` to losses, shape ``(n,)`` or ``(n, 1)``, of the rows that need a forward.
        staleness: Visits after which a row is scored anew, 1 (always) or more. Default 3, as published.

    It costs a forward without a graph of about ``N / staleness`` rows, which the host reads; with ``recompute`` and the
    kept fraction k ``F / staleness + k (F + B)``. One row alone is joined by another, because BatchNorm in training
    needs two; under DDP and FSDP, whose ranks must run as many forwards, at least two rows have one.
    """

    def __init__(self, losses_fn: Callable[[Any, Any], Tensor], staleness: int = 3) -> None:
        check_losses_fn("StaleScorer", losses_fn)
        check_whole("StaleScorer", "staleness", staleness, 1)
        self.losses_fn = losses_fn
        self.staleness = staleness

    def __call__(self, model: Any, batch: Any, context: Context) -> Tensor:
        """Return the losses, stored or fresh, ``(N,)``, float32; needs ids and a LossHistory in the context."""
        check_context("StaleScorer", context)
        ids, history = context.need("ids", "StaleScorer"), context.need("history", "StaleScorer")
        needed = "a LossHistory was needed, which remembers losses; give SelectiveBackprop one."
        check_kind("StaleScorer", "history", history, LossHistory, needed)
        scores = history.losses_of(ids)
        stale = scores.isnan() | (history.age_of(ids) + 1 >= self.staleness)
        rows = stale.nonzero().squeeze(1)
        if rows.numel() == 0 and averages_gradients(model):  # other ranks run a forward, and all must
            rows = rows.new_zeros(1)
        if rows.numel() == 1 and scores.numel() > 1:
            rows = torch.cat([rows, (rows + 1) % scores.numel()]).sort().values
        on = device_of(model, batch) or scores.device
        scores, rows = scores.to(on), rows.to(on)
        if rows.numel() > 0:
            part = batch if rows.numel() == scores.numel() else take(batch, rows, scores.numel())
            fresh = per_row("losses_fn", self.losses_fn(model, part), rows.numel())
            fresh = fresh.detach().to(on, torch.float32)
            history.store(ids[rows.to(ids.device)], fresh)
            scores = scores.index_copy(0, rows, fresh)
        return scores
