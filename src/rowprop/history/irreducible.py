"""Reducible losses: the loss of a row less its irreducible loss, the one that a holdout model has for it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from rowprop.checks import check_choice, check_losses_fn, check_numbers
from rowprop.errors import InvalidInput
from rowprop.host import waits
from rowprop.scoring import described, per_row, per_token, score_without_graph
from rowprop.selection.base import NOTHING, Context, Selection
from rowprop.selection.common import checked_scores
from rowprop.selection.wrapped import Around
from rowprop.state import rng_kept


@dataclass(frozen=True, eq=False)
class ReducibleLoss(Around):
    """Select by the loss less the irreducible loss (RHO-LOSS): a selector around a selector.

    A row that is hard because it is mislabeled is hard for the holdout model too, so its reducible loss is small, as is
    that of a row already learnt. The selector runs no forward, but needs ``ids`` in each call.

    Args:
        selector: Any selector; its scores are the reducible losses.
        irreducible: Loss of each row of the data under a model trained on other data, by row id, shape ``(M,)``, as
            :func:`holdout_losses` gives it; NaN where it is unknown. In a step with ``unit="token"`` also ``(M, T)``,
            the losses of each row's tokens, by their places in the row.

    Raises:
        InvalidInput: ``selector`` is no selector, or ``irreducible`` is not floating of such a shape; or, when called,
            there are no ids, a row or a token has no irreducible loss, or the selector inside raises.

    Cost:
        One gather, besides the selector's own. With ids and ``irreducible`` on the CPU nothing waits for an
        accelerator; elsewhere the host reads one flag.

    Bias:
        Biased towards rows that are learnable and not yet learnt, on purpose. A selection that is unbiased for any
        scores stays so. Mind that reducible losses may be negative, which selectors that draw in proportion refuse.

    Example:
        >>> selector = ReducibleLoss(TopK(keep=0.5), torch.tensor([0.1, 2.0, 0.3]))
        >>> selector(torch.tensor([2.5, 1.0]), Context(ids=torch.tensor([1, 2]))).rows.tolist()
        [1]

    References:
        Mindermann et al., "Prioritized Training on Points that are Learnable, Worth Learning, and Not Yet Learnt",
        ICML 2022, arXiv:2206.07137.
    """

    irreducible: Tensor

    def __post_init__(self) -> None:
        super().__post_init__()
        needed = (
            "floating losses of shape (M,) were needed, one for each row of the data; holdout_losses computes them."
        )
        table = self.irreducible
        check_numbers("ReducibleLoss", "irreducible", table, needed)
        if table.dim() not in (1, 2) or table.numel() == 0 or not table.is_floating_point():
            raise InvalidInput(
                f"ReducibleLoss got irreducible losses of shape {tuple(table.shape)} and dtype {table.dtype} but "
                "floating ones of shape (M,) were needed, one for each row of the data, or (M, T) for its tokens; "
                "holdout_losses computes them."
            )

    def __call__(self, scores: Tensor, context: Context = NOTHING) -> Selection:
        """Select by the losses ``scores`` ``(N,)`` less the irreducible ones of the context's ids."""
        scores = checked_scores("ReducibleLoss", scores, context)
        of_tokens = self.irreducible.dim() == 2
        places = [context.need("ids", "ReducibleLoss")]
        places += [context.need("positions", "ReducibleLoss with losses of tokens")] if of_tokens else []
        return self._select(scores - self._known(scores, places), context)

    def _known(self, losses: Tensor, places: list[Tensor]) -> Tensor:
        """The irreducible losses at these places of the table, in the dtype and on the device of ``losses``."""
        table = self.irreducible
        places = [of.to(table.device) for of in places]
        within = [(of >= 0) & (of < size) for of, size in zip(places, table.shape, strict=True)]
        inside = within[0] if len(within) == 1 else within[0] & within[1]
        known = table[tuple(torch.where(inside, of, 0) for of in places)].detach()
        unknown = known.isnan() | ~inside
        if bool(unknown.any()):
            first, *position = (int(of[unknown][0]) for of in places)
            where = f"id {first}" + "".join(f", position {place}" for place in position)
            unit = "tokens" if position else "rows"
            raise InvalidInput(
                f"ReducibleLoss has no irreducible loss of {int(unknown.sum())} of {unknown.numel()} {unit} (the first "
                f"has {where}) but one of each was needed; run holdout_losses over all rows of the data."
            )
        # To an accelerator without waiting for it; the other way must wait.
        return known.to(losses.device, losses.dtype, non_blocking=waits(losses))


def holdout_losses(
    model: nn.Module,
    losses_fn: Callable[[Any, Any], Any],
    loader: Iterable[tuple[Tensor, Any]],
    *,
    unit: Literal["row", "token"] = "row",
) -> Tensor:
    """Compute irreducible losses for :class:`ReducibleLoss`: the losses of a model trained on other rows.

    The model runs in evaluation mode without a graph; its modes, its buffers and the random state stay as they were.

    Args:
        model: The holdout model, trained before on rows that are not among those of ``loader``.
        losses_fn: ``(model, batch)`` to unreduced losses, ``(N,)`` or ``(N, 1)``.
        loader: Yields pairs of ids, shape ``(N,)``, int64, and the batch on the device that ``losses_fn`` needs; e.g. a
            ``DataLoader`` over :class:`rowprop.history.WithIds` of the data to train on, every row once.
        unit: ``"row"`` (default): one loss per row. ``"token"``: the losses of each row's tokens, as ``losses_fn``
            returns them, ``(N, T)``. T may differ between batches that are padded at the end of their rows.

    Returns:
        Losses by row id, shape ``(M,)`` with M the largest id plus 1, at least float32, on the CPU; NaN for ids that
        the loader did not yield, and the last loss of an id that it yielded twice. Of tokens ``(M, T)`` with the
        largest T; NaN behind the end of a shorter batch.

    Raises:
        InvalidInput: ``loader`` yields nothing, or another thing than pairs of ids and a batch; or ``losses_fn``
            returns no losses of that unit.

    Cost:
        One forward over the data, once before training. The holdout model can be much cheaper than the trained one:
        the authors use a small one.

    Example:
        >>> model, data = torch.nn.Linear(2, 1), torch.randn(6, 2)
        >>> batches = [(torch.tensor([4, 0]), data[[4, 0]]), (torch.tensor([1]), data[[1]])]
        >>> holdout_losses(model, lambda model, batch: model(batch).square(), batches).isnan().tolist()
        [False, False, True, True, False]

    References:
        As :class:`ReducibleLoss`.
    """
    if not isinstance(model, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InvalidInput(f"holdout_losses got a {type(model).__name__} as model but a torch.nn.Module was needed.")
    check_losses_fn("holdout_losses", losses_fn)
    check_choice("holdout_losses", "unit", unit, ("row", "token"))
    found: list[tuple[Tensor, Tensor]] = []
    with rng_kept(list(model.modules()), None):  # a shuffling loader draws too
        try:
            entries = cast("Iterator[object]", iter(loader))
        except TypeError as error:
            raise InvalidInput(
                f"holdout_losses got a {type(loader).__name__} but a loader of ids and batches was needed."
            ) from error
        for entry in entries:
            if not isinstance(entry, (tuple, list)) or len(cast("list[Any]", entry)) != 2:
                raise InvalidInput(
                    f"holdout_losses got a {type(cast('object', entry)).__name__} from the loader but pairs of ids and "
                    "a batch were needed; wrap the data in rowprop.history.WithIds."
                )
            ids, batch = cast("tuple[Tensor, Any]", entry)
            losses = _of_unit(score_without_graph(losses_fn, model, batch, mode="eval"), unit)
            check_numbers(
                "holdout_losses", "ids", ids, "the rows' ids were needed, as rowprop.history.WithIds yields them."
            )
            if ids.dtype != torch.int64 or ids.shape != losses.shape[:1]:
                raise InvalidInput(
                    f"holdout_losses got ids of shape {tuple(ids.shape)} and dtype {ids.dtype} for the losses of "
                    f"{len(losses)} rows but int64 of shape ({len(losses)},) was needed; wrap the data in "
                    "rowprop.history.WithIds."
                )
            if ids.numel() > 0 and int(ids.min()) < 0:
                raise InvalidInput(f"holdout_losses got the id {int(ids.min())} but ids of at least 0 were needed.")
            found.append((ids.cpu(), losses.cpu()))
    if not found:
        raise InvalidInput("holdout_losses got a loader without batches but at least one was needed.")
    return _table(found)


def _of_unit(returned: object, unit: object) -> Tensor:
    """One loss per row, ``(N,)``, or the losses of its tokens, ``(N, T)``, at least float32."""
    if unit == "row":
        losses = per_row("losses_fn", returned, None)
        return losses.to(torch.promote_types(losses.dtype, torch.float32))
    losses = per_token("losses_fn", returned)
    if losses.dim() < 2:
        raise InvalidInput(
            f"losses_fn returned {described(losses)} but the losses of each row's tokens were needed, shape (N, T); "
            "view them so."
        )
    return losses.flatten(1).to(torch.promote_types(losses.dtype, torch.float32))


def _table(found: list[tuple[Tensor, Tensor]]) -> Tensor:
    """The losses by id, NaN where there is none."""
    largest = max(int(ids.max()) for ids, _ in found)
    longest = [max(losses.shape[1] for _, losses in found)] if found[0][1].dim() == 2 else []
    try:
        by_id = torch.full((1 + largest, *longest), torch.nan, dtype=found[0][1].dtype)
    except RuntimeError as error:
        raise InvalidInput(
            f"holdout_losses got the id {largest}, too large for a table with an entry for each id below it, but the "
            "rows' places in the data were needed, as rowprop.history.WithIds yields them."
        ) from error
    for ids, losses in found:
        if longest:
            by_id[ids] = torch.nan  # an id that came before may have had more tokens
            by_id[ids, : losses.shape[1]] = losses
        else:
            by_id[ids] = losses
    return by_id
