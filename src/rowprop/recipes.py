"""Published methods by name, each a configured :class:`rowprop.SelectiveBackprop`.

A recipe takes the model and the losses function of the step, its own settings, and further keywords for the step
(``engine``, ``generator``, ``nonfinite``, ...). ``keep`` is the fraction of rows kept, in (0, 1], or a schedule of it.
``total_steps`` is how many calls the training has; where it is None, the default, each call gives its progress.
Recipes return the step, and raise :class:`~rowprop.errors.InvalidInput` as it and its selector do. One loop for all::

    step = recipes.composer(model, losses_fn, total_steps=10_000)

    for ids, batch in loader:  # ids from rowprop.history.WithIds, where the recipe remembers rows
        loss, record = step(batch, ids=ids)
        loss.backward()
        if record.ready:  # always, but with biggest_losers
            optimizer.step()
            optimizer.zero_grad()

``docs/recipes.md`` has the cost of each recipe, its differences from the original, and the learning-rate schedule.
"""

from __future__ import annotations

from typing import Any, cast

from torch import Tensor, nn

from rowprop import selection
from rowprop.checks import check_choice, check_losses_fn, check_whole, is_number, shown
from rowprop.errors import InvalidInput
from rowprop.history import LossHistory, PruningSampler, ReducibleLoss, StaleScorer
from rowprop.schedule import Schedule
from rowprop.scoring import Downscaled, LossesFn, Scored, described, per_token, score_without_graph
from rowprop.selection.selectors import Keep, check_fraction
from rowprop.step.selective import SelectiveBackprop

__all__ = [
    "batch_loss_filter",
    "biggest_losers",
    "composer",
    "high_entropy_tokens",
    "infobatch",
    "kath18",
    "ohem",
    "random",
    "rho1",
    "rho_loss",
]


def ohem(model: Any, losses_fn: LossesFn, *, keep: Keep = 0.25, **options: Any) -> SelectiveBackprop:
    """Online hard example mining: backpropagate the rows with the largest losses.

    Biased: each kept row counts ``1/K``. The default of ``keep`` is this package's; forums keep half of a batch.
    Source: Shrivastava et al., CVPR 2016, arXiv:1604.03540, which keeps 64 regions of an image's 2,000, and leaves out
    those that overlap with chosen ones.
    """
    return SelectiveBackprop(model, losses_fn, selection.TopK(keep), **options)


def random(model: Any, losses_fn: LossesFn, *, keep: Keep = 0.5, **options: Any) -> SelectiveBackprop:
    """Random rows: the baseline that every method has to beat at the same keep; random tokens with ``unit="token"``.

    Unbiased. Source: Balles et al., 2023, arXiv:2312.05021: no selection by loss or gradient beat it consistently.
    """
    return SelectiveBackprop(model, losses_fn, selection.RandomRows(keep), **options)


def composer(
    model: Any,
    losses_fn: LossesFn,
    *,
    total_steps: int | None = None,
    keep: Keep = 0.5,
    start: float = 0.5,
    end: float = 0.9,
    interrupt: int = 2,
    scale_factor: float = 1.0,
    **options: Any,
) -> SelectiveBackprop:
    """Composer's selective backprop: draw rows by the rank of their losses, in the second half of training.

    Biased: the draw is not undone by weights. Source: mosaicml/composer, ``composer/algorithms/selective_backprop``,
    whose defaults these are.

    Args:
        start: Fraction of the training at which selection begins; default 0.5.
        end: Fraction at which it ends; default 0.9.
        interrupt: Every ``interrupt``-th batch is trained on all rows, counted by ``batch_index`` as in the
            original; 0 for never; default 2.
        scale_factor: Side of the images that are scored, as a fraction. Default 1: the losses of the training forward
            are the scores. Below 1 the engine is ``recompute``, unless another is named.
    """
    if not is_number(scale_factor) or scale_factor != 1:
        options = {"scorer": Downscaled(cast("Any", losses_fn), scale_factor), "engine": "recompute"} | options
    schedule = Schedule(start, end, interrupt)
    return SelectiveBackprop(
        model, losses_fn, selection.RankSampling(keep), schedule=schedule, total_steps=total_steps, **options
    )


def batch_loss_filter(
    model: Any,
    losses_fn: LossesFn,
    *,
    epochs: int,
    total_steps: int | None = None,
    min_loss_perc: float = 0.9,
    min_sample_perc: float = 0.0,
    mixed_precision_batch: bool = False,
    **options: Any,
) -> SelectiveBackprop:
    """BatchLossFilter: the fewest rows that hold 90 % of the batch's loss, from the second epoch on.

    Biased: each kept row counts ``1/K``. Source, also of names and defaults: oguiza/fastai_extensions,
    ``BatchLossFilterCallback``.

    Args:
        losses_fn: Its losses may not be negative.
        epochs: Passes over the data, at least 2: the first is trained whole.
        min_loss_perc: Share of the batch's loss to hold, in (0, 1]; default 0.9.
        min_sample_perc: Least fraction of the rows to keep, in [0, 1]; default 0.
        mixed_precision_batch: Whether K is rounded up to a multiple of 8, for tensor cores; default False.
    """
    check_choice("batch_loss_filter", "mixed_precision_batch", mixed_precision_batch, (False, True))
    selector: selection.Selector = selection.LossMass(min_loss_perc, min_sample_perc)
    if mixed_precision_batch:
        selector = selection.MultipleOf(selector, 8)
    schedule = _after_first_epoch("batch_loss_filter", epochs)
    return SelectiveBackprop(model, losses_fn, selector, schedule=schedule, total_steps=total_steps, **options)


def biggest_losers(
    model: Any,
    losses_fn: LossesFn,
    *,
    batch_rows: int,
    epochs: int,
    total_steps: int | None = None,
    beta: float = 3.0,
    recent: int = 1024,
    staleness: int = 1,
    **options: Any,
) -> SelectiveBackprop:
    """Selective-Backprop of "Biggest Losers": keep rows by how their losses compare with recent ones.

    A row whose loss is above a share q of the last ``recent`` losses is kept with probability ``q ** beta``, about
    ``1 / (beta + 1)`` of all. ``record.ready`` says when ``batch_rows`` kept rows have contributed. The first epoch is
    trained whole. Biased: the draw is not undone by weights. Source: Jiang et al., 2019, arXiv:1910.00762;
    angelajiang/SelectiveBackprop, whose command line has beta 3, and staleness 3 with ``--fp_selector stale``.

    Args:
        batch_rows: Rows of an optimizer's step; the loader's batch size.
        epochs: Passes over the data, at least 2.
        beta: How much hard rows are preferred, at least 0; default 3.
        recent: How many losses are remembered; default 1024.
        staleness: Every how many visits of a row its loss is computed anew. Default 1: each time, in the training
            forward. 3 is the original's StaleSB: calls need ``ids``, and the engine is ``recompute`` unless named.
    """
    check_whole("biggest_losers", "staleness", staleness, 1)
    check_whole("biggest_losers", "batch_rows", batch_rows, 1)
    if staleness != 1:
        scorer = StaleScorer(cast("Any", losses_fn), staleness)
        options = {"scorer": scorer, "history": LossHistory(), "engine": "recompute"} | options
    selector, schedule = selection.PercentileSampling(beta, recent), _after_first_epoch("biggest_losers", epochs)
    return SelectiveBackprop(
        model, losses_fn, selector, schedule=schedule, total_steps=total_steps, accumulate_to=batch_rows, **options
    )


def kath18(
    model: Any, losses_fn: LossesFn, *, keep: float = 1 / 3, gated: bool = True, **options: Any
) -> SelectiveBackprop:
    """Importance sampling by a bound of each row's gradient norm, while it pays; else uniform.

    Unbiased, by norms of gradients: a row that scores 0 is never drawn. ``accumulate_to`` is refused: the draw's
    weights make a mean over N rows. All rows are scored while rows are drawn uniformly, too; the original skips that,
    and estimates the reduction of variance from rows it trains. Source: Katharopoulos and Fleuret, ICML 2018,
    arXiv:1803.00942; idiap/importance-sampling.

    Args:
        losses_fn: ``(model, batch)`` to :class:`rowprop.Scored`: unreduced losses and
            :func:`rowprop.scoring.gradient_norm` of the same logits. Losses alone are sampled by loss.
        keep: b / B: rows drawn, with replacement, of the rows scored; default a third, the original's ``presample=3``.
        gated: Whether to sample uniformly until the estimated reduction of variance pays for scoring: above
            ``(B + 3b) / (3b)``; default True.
    """
    check_fraction("kath18", "keep", keep)
    check_choice("kath18", "gated", gated, (True, False))
    gate = (1 + 3 * keep) / (3 * keep) if gated else None
    return SelectiveBackprop(model, losses_fn, selection.ImportanceSampling(keep, gate), **options)


def infobatch(
    model: Any,
    losses_fn: LossesFn,
    *,
    num_rows: int,
    epochs: int,
    prune: float = 0.5,
    full_after: float = 0.875,
    multiple_of: int = 1,
    seed: int = 0,
    selector: selection.Selector | None = None,
    **options: Any,
) -> SelectiveBackprop:
    """InfoBatch: leave out easy rows before the forward, an epoch at a time, and let the others count more.

    Fill the loader by ``step.sampler``, over ``WithIds(dataset)``, and give each call its ``ids``. The savings of a
    ``selector`` come on top, and its weights are multiplied. Unbiased given the stored losses, with an unbiased
    ``selector`` or none: of n rows that may be left out each that is not counts ``n / drawn``, about ``1 / (1 -
    prune)``. Source, with these defaults: Qin et al., ICLR 2024, arXiv:2303.04947; NUS-HPC-AI-Lab/InfoBatch.

    Args:
        num_rows: M, rows of the data.
        epochs: Passes over the data.
        prune: Share of the rows below the mean loss that is left out of an epoch, in [0, 1); default 0.5.
        full_after: Fraction of the epochs after which nothing is left out; default 0.875.
        multiple_of: Rows that an epoch is a multiple of; with ``drop_last=True`` the batch size. Default 1.
        seed: Of the order and the draw; default 0.
        selector: Chooses among the rows of each batch. Default None: all are backpropagated.
    """
    sampler = PruningSampler(
        LossHistory(num_rows), num_rows=num_rows, epochs=epochs, prune=prune, full_after=full_after,
        multiple_of=multiple_of, seed=seed,
    )  # fmt: skip
    chosen = selection.Everything() if selector is None else selector
    return SelectiveBackprop(model, losses_fn, chosen, history=sampler, **options)


def rho_loss(
    model: Any, losses_fn: LossesFn, irreducible: Tensor, *, keep: Keep = 0.1, **options: Any
) -> SelectiveBackprop:
    """RHO-LOSS: the rows whose loss exceeds most the loss that a model trained on other data has for them.

    Biased: each kept row counts ``1/K``. Source: Mindermann et al., ICML 2022, arXiv:2206.07137; OATML/RHO-Loss, whose
    defaults these are.

    Args:
        irreducible: Losses of all rows by id under a model trained on other data, shape ``(M,)``, as
            :func:`rowprop.history.holdout_losses` computes them. Calls need ``ids``.
        keep: Fraction of rows kept, or a schedule; default 0.1, 32 of 320.
    """
    return SelectiveBackprop(model, losses_fn, ReducibleLoss(selection.TopK(keep), irreducible), **options)


def rho1(
    model: Any, losses_fn: LossesFn, *, reference: nn.Module | Tensor, keep: Keep = 0.6, **options: Any
) -> SelectiveBackprop:
    """Rho-1's selective language modelling: the tokens whose loss exceeds most the loss of a reference model.

    The step is on tokens, ``unit="token"``: give each call ``counted=`` where labels are ignored. Biased: each kept
    token counts ``1/K``. Source: Lin et al., NeurIPS 2024, arXiv:2404.07965: 60 % of a batch's tokens for 1B
    parameters, 70 % for 7B.

    Args:
        losses_fn: ``(model, batch)`` to the unreduced losses of all tokens, shape ``(N, T)``.
        reference: A language model trained on data of the kind that is wanted: ``losses_fn`` takes it too in every
            step, in evaluation mode and without a graph. Or its losses by row id, shape ``(M, T)``, as
            :func:`rowprop.history.holdout_losses` with ``unit="token"`` computes them; calls then need ``ids``, and a
            token has to be at the same place of its row in every epoch (pad at the end).
        keep: Fraction kept of the tokens that count, or a schedule; default 0.6.

    Cost:
        A forward of the reference model in every step; remembered losses one over the data, and ``4 M T`` bytes.
    """
    if isinstance(reference, nn.Module):
        losses_fn = _excess_over(reference, losses_fn)
        return SelectiveBackprop(model, losses_fn, selection.TopK(keep), unit="token", **options)
    if not isinstance(reference, Tensor) or reference.dim() != 2:  # pyright: ignore[reportUnnecessaryIsInstance]
        losses = "the losses of all tokens by row id, a tensor of shape (M, T)"
        needed = f"a torch.nn.Module was needed, or {losses}; holdout_losses(..., unit='token') computes them."
        raise InvalidInput(f"rho1 got reference={shown(reference)} but {needed}")
    return SelectiveBackprop(model, losses_fn, ReducibleLoss(selection.TopK(keep), reference), unit="token", **options)


def _excess_over(reference: nn.Module, losses_fn: LossesFn) -> LossesFn:
    check_losses_fn("rho1", losses_fn)

    def with_excess(model: Any, batch: Any) -> Scored:
        losses = per_token("losses_fn", losses_fn(model, batch))
        returned: object = score_without_graph(cast("Any", losses_fn), reference, batch, mode="eval")
        return Scored(losses, losses.detach() - per_token("losses_fn", returned))

    return with_excess


def high_entropy_tokens(model: Any, losses_fn: LossesFn, *, keep: Keep = 0.2, **options: Any) -> SelectiveBackprop:
    """The tokens at which the policy is most undecided, for policy gradients ("Beyond the 80/20 Rule").

    The step is on tokens, ``unit="token"``: give each call ``counted=``, the tokens of the completions. Those kept are
    the highest of one call's batch, of all ranks' with ``ranks=Global()``. Biased: each counts ``1/N``, as in the mean
    over all tokens that count, and the others nothing; so ``accumulate_to`` is refused. Source: Wang et al., "Beyond
    the 80/20 Rule", 2025, arXiv:2506.01939; ``top_entropy_quantile=0.2`` of TRL's ``GRPOConfig``.

    Args:
        losses_fn: ``(model, batch)`` to :class:`rowprop.Scored`, both parts ``(N, T)``: the unreduced losses of the
            policy gradient, and the policy's entropies, ``rowprop.scoring.entropy(logits.flatten(0, 1)).view(N, T)``.
        keep: Fraction kept of the tokens that count, or a schedule; default 0.2.
    """
    check_losses_fn("high_entropy_tokens", losses_fn)

    def scored(model: Any, batch: Any) -> Scored:
        returned: object = losses_fn(model, batch)
        if not isinstance(returned, Scored):
            remedy = "return rowprop.Scored(losses, entropies), which rowprop.scoring.entropy computes."
            came = f"{described(returned)} from losses_fn but losses and entropies were needed"
            raise InvalidInput(f"high_entropy_tokens got {came}; {remedy}")
        return returned

    return SelectiveBackprop(model, scored, selection.OverAll(selection.TopK(keep)), unit="token", **options)


def _after_first_epoch(name: str, epochs: int) -> Schedule:
    check_whole(name, "epochs", epochs, 2, "a whole number, 2 or more, was needed: the first epoch is trained whole.")
    return Schedule(start=1 / epochs, end=1, interrupt=0)
