"""Published methods by name, each a configured :class:`rowprop.SelectiveBackprop`.

A recipe takes the model and the losses function of the step, its own settings, and further keywords for the step
(``engine``, ``generator``, ``nonfinite``, ...). It returns the step, and raises
:class:`~rowprop.errors.InvalidInput` as the step and the selector in it do. The loop is the same for all::

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

from rowprop.checks import check_choice, check_losses_fn, check_whole, is_number, shown
from rowprop.errors import InvalidInput
from rowprop.history import ReducibleLoss
from rowprop.history.losses import LossHistory
from rowprop.history.pruning import PruningSampler
from rowprop.history.stale import StaleScorer
from rowprop.schedule import Schedule
from rowprop.scoring import Downscaled, LossesFn, Scored, described, per_token, score_without_graph
from rowprop.selection import (
    Everything,
    ImportanceSampling,
    LossMass,
    MultipleOf,
    OverAll,
    PercentileSampling,
    RandomRows,
    RankSampling,
    TopK,
)
from rowprop.selection.base import Selector
from rowprop.selection.common import Keep, check_fraction
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

    Args:
        keep: Fraction of rows kept, a number in (0, 1] or a schedule of the progress. Default 0.25, this package's: the
            paper keeps 64 regions of an image's 2,000, and forums keep half of a batch.

    Bias:
        Biased: each kept row counts ``1/K``.

    References:
        Shrivastava, Gupta, Girshick, "Training Region-based Object Detectors with Online Hard Example Mining", CVPR
        2016, arXiv:1604.03540. It runs two copies of the network, and leaves out regions that overlap with chosen ones.
    """
    return SelectiveBackprop(model, losses_fn, TopK(keep), **options)


def random(model: Any, losses_fn: LossesFn, *, keep: Keep = 0.5, **options: Any) -> SelectiveBackprop:
    """Random rows: the control that every method has to beat at the same keep; random tokens with ``unit="token"``.

    Args:
        keep: Fraction of rows kept, a number in (0, 1] or a schedule of the progress; default 0.5.

    Bias:
        Unbiased.

    References:
        Balles, Archambeau, Zappella, 2023, arXiv:2312.05021: neither selection by loss nor gradient matching beat it
        consistently.
    """
    return SelectiveBackprop(model, losses_fn, RandomRows(keep), **options)


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

    Args:
        total_steps: How many calls the training has. Default None: each call gives its progress.
        keep: Fraction of rows kept, a number in (0, 1] or a schedule of the progress; default 0.5.
        start: Fraction of the training at which selection begins; default 0.5.
        end: Fraction at which it ends; default 0.9.
        interrupt: Every how many batches one is trained whole; 0 for never; default 2. Give each call its
            ``batch_index`` in the epoch to count as the original does.
        scale_factor: Size of the images that are scored, as a fraction of each side. Default 1: the losses of the
            training forward are the scores. Below 1 the engine is ``recompute``, unless another is named.

    Bias:
        Biased: the draw is not undone by weights.

    References:
        mosaicml/composer, ``composer/algorithms/selective_backprop``, whose defaults these are.
    """
    if not is_number(scale_factor) or scale_factor != 1:
        options = {"scorer": Downscaled(cast("Any", losses_fn), scale_factor), "engine": "recompute"} | options
    schedule = Schedule(start, end, interrupt)
    return SelectiveBackprop(
        model, losses_fn, RankSampling(keep), schedule=schedule, total_steps=total_steps, **options
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

    Args:
        losses_fn: As for all recipes; no loss may be negative.
        epochs: Passes over the data, at least 2: the first is trained whole.
        total_steps: How many calls the training has. Default None: each call gives its progress.
        min_loss_perc: Share of the batch's loss to hold, in (0, 1]; default 0.9.
        min_sample_perc: Never keep less than this fraction of the rows, in [0, 1]; default 0.
        mixed_precision_batch: Round K up to a multiple of 8, which tensor cores like. Default False.

    Bias:
        Biased: each kept row counts ``1/K``.

    References:
        oguiza/fastai_extensions, ``BatchLossFilterCallback``, whose names and defaults these are.
    """
    check_choice("batch_loss_filter", "mixed_precision_batch", mixed_precision_batch, (False, True))
    selector: Selector = LossMass(min_loss_perc, min_sample_perc)
    if mixed_precision_batch:
        selector = MultipleOf(selector, 8)
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
    ``1 / (beta + 1)`` of all. The optimizer steps once ``batch_rows`` kept rows have contributed: step where
    ``record.ready`` says so. The first epoch is trained whole.

    Args:
        batch_rows: Rows of an optimizer's step; the loader's batch size.
        epochs: Passes over the data, at least 2.
        total_steps: How many calls the training has. Default None: each call gives its progress.
        beta: How much hard rows are preferred, at least 0; default 3.
        recent: How many losses are remembered; default 1024.
        staleness: Every how many visits of a row its loss is computed anew. Default 1, as in the original: each time,
            here in the training forward. 3 is its StaleSB; then the engine is ``recompute``, unless another is named,
            and calls need ``ids``.

    Bias:
        Biased: the draw is not undone by weights.

    References:
        Jiang et al., "Accelerating Deep Learning by Focusing on the Biggest Losers", 2019, arXiv:1910.00762;
        angelajiang/SelectiveBackprop, whose command line has beta 3, and staleness 3 with ``--fp_selector stale``.
    """
    check_whole("biggest_losers", "staleness", staleness, 1)
    check_whole("biggest_losers", "batch_rows", batch_rows, 1)
    if staleness != 1:
        scorer = StaleScorer(cast("Any", losses_fn), staleness)
        options = {"scorer": scorer, "history": LossHistory(), "engine": "recompute"} | options
    return SelectiveBackprop(
        model,
        losses_fn,
        PercentileSampling(beta, recent),
        schedule=_after_first_epoch("biggest_losers", epochs),
        total_steps=total_steps,
        accumulate_to=batch_rows,
        **options,
    )


def kath18(
    model: Any, losses_fn: LossesFn, *, keep: float = 1 / 3, gated: bool = True, **options: Any
) -> SelectiveBackprop:
    """Importance sampling by a bound of each row's gradient norm, while it pays; else uniform.

    Args:
        losses_fn: ``(model, batch)`` to :class:`rowprop.Scored`: unreduced losses and
            :func:`rowprop.scoring.gradient_norm` of the same logits. Losses alone are sampled by loss.
        keep: b / B: rows drawn, with replacement, as a fraction of the rows scored; default a third, the original's
            ``presample=3``.
        gated: Sample uniformly until the estimated reduction of variance pays for scoring: above ``(B + 3b) /
            (3b)``; default True.

    Bias:
        Unbiased. (A row that scores 0 is never drawn; with the norm of its gradient as the score it has none.)

    Notes:
        ``accumulate_to`` is refused, as for every draw with weights of its own: they make a mean over N rows.

        All rows are scored while rows are drawn uniformly, too: the forward runs anyway. The original skips it until
        the gate opens, and estimates the reduction of variance from the rows it trains.

    References:
        Katharopoulos, Fleuret, "Not All Samples Are Created Equal: Deep Learning with Importance Sampling", ICML 2018,
        arXiv:1803.00942; idiap/importance-sampling.
    """
    check_fraction("kath18", "keep", keep)
    check_choice("kath18", "gated", gated, (True, False))
    gate = (1 + 3 * keep) / (3 * keep) if gated else None
    return SelectiveBackprop(model, losses_fn, ImportanceSampling(keep, gate), **options)


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
    selector: Selector | None = None,
    **options: Any,
) -> SelectiveBackprop:
    """InfoBatch: leave out easy rows before the forward, an epoch at a time, and let the others count more.

    Fill the loader by ``step.sampler``, over ``WithIds(dataset)``, and give each call its ``ids``. With a ``selector``
    the backward is pruned as well as the forward: both savings multiply, and so do the weights.

    Args:
        num_rows: M, rows of the data.
        epochs: Passes over the data.
        prune: Share of the rows below the mean loss that is left out of an epoch, in [0, 1); default 0.5.
        full_after: Fraction of the epochs after which nothing is left out; default 0.875.
        multiple_of: Rows that an epoch is a multiple of; the batch size where the loader has ``drop_last=True``.
            Default 1.
        seed: Of the order and the draw; default 0.
        selector: Chooses among the rows of each batch. Default None: all are backpropagated.

    Bias:
        Unbiased given the stored losses, with an unbiased ``selector`` or none: of n rows that may be left out each
        that is not counts ``n / drawn``, about ``1 / (1 - prune)``.

    References:
        Qin et al., "InfoBatch: Lossless Training Speed Up by Unbiased Dynamic Data Pruning", ICLR 2024,
        arXiv:2303.04947; NUS-HPC-AI-Lab/InfoBatch, whose defaults these are.
    """
    sampler = PruningSampler(
        LossHistory(num_rows),
        num_rows=num_rows,
        epochs=epochs,
        prune=prune,
        full_after=full_after,
        multiple_of=multiple_of,
        seed=seed,
    )
    return SelectiveBackprop(
        model, losses_fn, Everything() if selector is None else selector, history=sampler, **options
    )


def rho_loss(
    model: Any, losses_fn: LossesFn, irreducible: Tensor, *, keep: Keep = 0.1, **options: Any
) -> SelectiveBackprop:
    """RHO-LOSS: the rows whose loss exceeds most the loss that a model trained on other data has for them.

    Args:
        irreducible: Losses of all rows by id under a model trained on other data, shape ``(M,)``, as
            :func:`rowprop.history.holdout_losses` computes them. Calls need ``ids``.
        keep: Fraction of rows kept, a number in (0, 1] or a schedule of the progress; default 0.1, 32 of 320.

    Bias:
        Biased: each kept row counts ``1/K``.

    References:
        Mindermann et al., "Prioritized Training on Points that are Learnable, Worth Learning, and Not Yet Learnt", ICML
        2022, arXiv:2206.07137; OATML/RHO-Loss, whose defaults these are.
    """
    return SelectiveBackprop(model, losses_fn, ReducibleLoss(TopK(keep), irreducible), **options)


def rho1(
    model: Any, losses_fn: LossesFn, *, reference: nn.Module | Tensor, keep: Keep = 0.6, **options: Any
) -> SelectiveBackprop:
    """Rho-1's selective language modelling: the tokens whose loss exceeds most the loss of a reference model.

    The step is on tokens, ``unit="token"``: give each call ``counted=`` where labels are ignored.

    Args:
        losses_fn: ``(model, batch)`` to the unreduced losses of all tokens, shape ``(N, T)``.
        reference: A language model trained on data of the kind that is wanted: it takes the place of the model in
            ``losses_fn``, in evaluation mode and without a graph, in every step. Or its losses, remembered by row id,
            shape ``(M, T)``, as :func:`rowprop.history.holdout_losses` with ``unit="token"`` computes them; calls then
            need ``ids``, and a token's place in its row has to be the same in every epoch (pad at the end).
        keep: Fraction of the tokens that are kept, of those that count, a number in (0, 1] or a schedule of the
            progress; default 0.6.

    Cost:
        A forward of the reference model in each step, in those that train the whole batch too. Remembered losses cost
        one such forward over the data, and ``4 M T`` bytes.

    Bias:
        Biased: each kept token counts ``1/K``.

    References:
        Lin et al., "Rho-1: Not All Tokens Are What You Need", NeurIPS 2024, arXiv:2404.07965, which keeps 60 % of the
        tokens of a batch for its model of 1B parameters and 70 % for the one of 7B.
    """
    if isinstance(reference, nn.Module):
        losses_fn = _excess_over(reference, losses_fn)
        return SelectiveBackprop(model, losses_fn, TopK(keep), unit="token", **options)
    if not isinstance(reference, Tensor) or reference.dim() != 2:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InvalidInput(
            f"rho1 got reference={shown(reference)} but a torch.nn.Module was needed, or the losses of all tokens by "
            "row id, a tensor of shape (M, T); holdout_losses(..., unit='token') computes them."
        )
    return SelectiveBackprop(model, losses_fn, ReducibleLoss(TopK(keep), reference), unit="token", **options)


def _excess_over(reference: nn.Module, losses_fn: LossesFn) -> LossesFn:
    """The losses, and beside them their excess over the losses of the reference model."""
    check_losses_fn("rho1", losses_fn)

    def with_excess(model: Any, batch: Any) -> Scored:
        losses = per_token("losses_fn", losses_fn(model, batch))
        returned: object = score_without_graph(cast("Any", losses_fn), reference, batch, mode="eval")
        return Scored(losses, losses.detach() - per_token("losses_fn", returned))

    return with_excess


def high_entropy_tokens(model: Any, losses_fn: LossesFn, *, keep: Keep = 0.2, **options: Any) -> SelectiveBackprop:
    """The tokens at which the policy is most undecided, for policy gradients ("Beyond the 80/20 Rule").

    The step is on tokens, ``unit="token"``: give each call ``counted=``, the tokens of the completions.

    Args:
        losses_fn: ``(model, batch)`` to :class:`rowprop.Scored`, both parts ``(N, T)``: the unreduced losses of the
            policy gradient, and the entropies of the policy at the same tokens,
            ``rowprop.scoring.entropy(logits.flatten(0, 1)).view(N, T)``.
        keep: Fraction of the tokens that are kept, of those that count, a number in (0, 1] or a schedule of the
            progress; default 0.2.

    Bias:
        Biased: each kept token counts ``1/N``, as in the mean over all tokens that count, and the others nothing.

    Notes:
        ``accumulate_to`` is refused, as for all weights that are not ``1/K``. The kept tokens are the highest of the
        batch of one call, of all ranks with ``ranks=Global()``.

    References:
        Wang et al., "Beyond the 80/20 Rule: High-Entropy Minority Tokens Drive Effective Reinforcement Learning for LLM
        Reasoning", 2025, arXiv:2506.01939; ``top_entropy_quantile=0.2`` of TRL's ``GRPOConfig``.
    """
    check_losses_fn("high_entropy_tokens", losses_fn)

    def scored(model: Any, batch: Any) -> Scored:
        returned: object = losses_fn(model, batch)
        if not isinstance(returned, Scored):
            raise InvalidInput(
                f"high_entropy_tokens got {described(returned)} from losses_fn but losses and entropies were needed; "
                "return rowprop.Scored(losses, entropies), which rowprop.scoring.entropy computes."
            )
        return returned

    return SelectiveBackprop(model, scored, OverAll(TopK(keep)), unit="token", **options)


def _after_first_epoch(name: str, epochs: int) -> Schedule:
    """Whole batches in the first epoch."""
    needed = "a whole number, 2 or more, was needed: the first epoch is trained whole."
    check_whole(name, "epochs", epochs, 2, needed)
    return Schedule(start=1 / epochs, end=1, interrupt=0)
