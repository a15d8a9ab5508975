"""The checks of the arguments that every adapter takes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rowprop.checks import check_callable, check_losses_fn
from rowprop.errors import InvalidInput
from rowprop.integrations.logged import ClassesFn, check_classes_fn
from rowprop.scoring.losses import LossesFn

OWNER = "SelectiveBackprop"


def check_given(
    losses_fn: LossesFn | None, classes_fn: ClassesFn | None, settings: Mapping[str, Any], framework: str, instead: str
) -> None:
    """Refuse a losses or a classes function that cannot be called, and a setting that is the framework's to decide.

    Args:
        losses_fn: As it was given; None stands for the framework's own losses.
        classes_fn: As it was given.
        settings: Those for :class:`rowprop.SelectiveBackprop`.
        framework: The name of the framework that decides when the optimizer steps.
        instead: The framework's own way to accumulate.
    """
    if losses_fn is not None:
        check_callable(OWNER, "losses_fn", losses_fn, "a function of the model and the batch was needed.")
        check_losses_fn(OWNER, losses_fn)
    check_classes_fn(OWNER, classes_fn)
    if "accumulate_to" in settings:
        raise InvalidInput(
            f"SelectiveBackprop got accumulate_to, but {framework} decides when the optimizer steps; use {instead} "
            "instead."
        )


def refuse_history(settings: Mapping[str, Any], framework: str) -> None:
    """Refuse a history where the framework's batches carry no ids."""
    if settings.get("history") is not None:
        raise InvalidInput(
            f"SelectiveBackprop got a history, but {framework}'s batches carry no ids of rows; use "
            "rowprop.SelectiveBackprop in a loop of your own, or leave history out."
        )
