"""The scoring pass: one forward without a graph, after which nothing is different."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Literal

import torch
from torch import Tensor, nn

from rowprop.checks import check_callable, check_choice, check_losses_fn
from rowprop.state import buffers_kept, evaluating, rng_kept

ScoringMode = Literal["train", "eval"]
Scorer = Callable[..., Tensor]


def score_without_graph(
    function: Callable[[Any, Any], Tensor], model: Any, batch: Any, *, mode: ScoringMode = "train"
) -> Tensor:
    """Run ``function(model, batch)`` without a graph and leave the model and the random state as found.

    Afterwards each module's train/eval flag, every buffer (BatchNorm's running statistics and counters) and the random
    state of the CPU and of the accelerators involved are as they were. So the forward that follows draws the very
    dropout masks it would have drawn without scoring, and running statistics move once per step.

    Args:
        function: ``(model, batch)`` to losses or any other scores.
        model: The model that ``function`` is given; an ``nn.Module`` is put back as found, anything else is not looked
            into.
        batch: The whole batch.
        mode: ``"train"``: the model's modes as they are, so the scores are the ones that a training forward would show,
            with dropout and with the batch's own BatchNorm statistics. ``"eval"``: every module in evaluation mode: no
            dropout noise in the scores and running statistics, but they rank rows by another function than the one
            trained.

    Returns:
        The value that ``function`` returned.

    Cost:
        One forward, a copy of the model's buffers there and back, and of the random states.
    """
    check_callable("score_without_graph", "function", function, "a function of the model and the batch was needed.")
    check_choice("score_without_graph", "mode", mode, ("train", "eval"))
    modules = list(model.modules()) if isinstance(model, nn.Module) else []
    with ExitStack() as stack:
        stack.enter_context(rng_kept(modules, batch))
        stack.enter_context(buffers_kept(modules))
        if mode == "eval":
            stack.enter_context(evaluating(modules))
        stack.enter_context(torch.no_grad())
        try:
            scores = function(model, batch)
        except TypeError:
            check_losses_fn("score_without_graph", function, "function")  # only now: reading a signature takes a while
            raise
    # Autocast remembers the low-precision copies of the weights; on older torch the copies made here have no graph, and
    # would cut the next one's (pytorch#112583).
    torch.clear_autocast_cache()
    return scores
