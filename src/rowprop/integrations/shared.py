"""Parts that the integrations share: the door to a package, checks of arguments, and the numbers that all log."""

from __future__ import annotations

import importlib
import importlib.util
import io
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from rowprop.checks import check_callable, check_losses_fn
from rowprop.distributed import own_rank, process_group
from rowprop.errors import InvalidInput, MissingExtra
from rowprop.files import write_whole
from rowprop.scoring import LossesFn, Scored
from rowprop.step.record import Record
from rowprop.step.selective import SelectiveBackprop

ClassesFn = Callable[[Any], Tensor]
"""A function of the batch that returns the class of each row, (N,), int64."""


def module_of(package: str, name: str, written: str, install: str | None = None) -> Any:
    """A module of a package that may not be there.

    Args:
        package: As it is imported.
        name: The module's name in it.
        written: The package's name as its authors write it.
        install: How to install it. Default None: by the extra of the same name.

    Raises:
        MissingExtra: The package is not installed.
    """
    if importlib.util.find_spec(package) is None:
        install = f"run: pip install 'rowprop[{package}]'" if install is None else install
        raise MissingExtra(f"rowprop.integrations.{package} needs {written}, which is not installed; {install}.")
    return importlib.import_module(f"{package}.{name}")


def check_classes_fn(owner: str, classes_fn: object) -> None:
    """Refuse a value that cannot be called."""
    if classes_fn is not None:
        check_callable(owner, "classes_fn", classes_fn, "a function of the batch was needed; None is the default.")


def numbers_of(
    record: Record, classes: Tensor | None = None, counted: Tensor | None = None
) -> dict[str, Tensor | float]:
    """The numbers that a framework's logger takes in each step.

    Args:
        record: Of the step.
        classes: The class of each row, (N,), int64, where its kept share is asked for: the host waits for it. In a step
            over tokens the share is that of the tokens of the class's rows.
        counted: Which tokens count, bool, of the shape of the losses. Default None: all.

    Returns:
        ``loss_all`` and ``loss_kept`` (0-d tensors, which the host has not read), ``kept`` (the share of the rows that
        contribute), and for each class of the batch ``kept/CLASS``.
    """
    numbers: dict[str, Tensor | float] = {"loss_all": record.loss_all, "loss_kept": record.loss_kept}
    numbers["kept"] = record.num_kept / max(1, record.num_rows)
    if classes is not None and classes.numel():
        selection = record.selection
        classes = classes.cpu()
        if record.unit == "token":
            classes = classes.repeat_interleave(selection.num_rows // classes.numel())
        whole = torch.bincount(classes if counted is None else classes[counted.flatten().cpu()])
        kept = torch.bincount(classes[selection.rows.cpu()], minlength=whole.numel())
        shares = cast("list[float]", (kept / whole).tolist())
        numbers |= {f"kept/{number}": share for number, share in enumerate(shares) if whole[number]}
    return numbers


def weights_of(record: Record) -> dict[str, int]:
    """How much the numbers of a step count in a mean over steps, by name; 0 for the loss of kept rows that are none."""
    return {"loss_all": record.num_rows, "kept": record.num_rows, "loss_kept": record.num_kept}


def loss_shown(step: SelectiveBackprop, record: Record) -> Tensor:
    """The loss that a framework shows as its own, 0-d, of the step that has just run.

    Returns:
        The loss of all rows. Where nobody computed it, because a scorer stood for the losses and only kept rows went
        through the training forward, the loss of the kept rows; 0 where there are none. A NaN that was computed stays.
    """
    if step.scorer is None or step.engine.one_forward:
        return record.loss_all
    kept = record.loss_kept if record.num_kept else torch.zeros_like(record.loss_kept)
    return torch.where(record.loss_all.isnan(), kept, record.loss_all)


def write_state(checkpoint: str, rank: int, state: Mapping[str, Any]) -> None:
    """Put a process's state beside the Trainer's own files of a checkpoint."""
    content = io.BytesIO()
    torch.save(dict(state), content)
    write_whole(_file_in(checkpoint, rank), content.getvalue())


def read_state(checkpoint: str, rank: int) -> dict[str, Any] | None:
    """A process's state of a checkpoint; the first one's where fewer had saved it; None where none had."""
    for each in dict.fromkeys((rank, 0)):
        if (file := _file_in(checkpoint, each)).exists():
            return torch.load(file, weights_only=True)
    return None


def gather_states(state: dict[str, Any]) -> list[dict[str, Any]]:
    """The states of all ranks on the first one, for a checkpoint that it writes; all ranks call it.

    Returns:
        On the first rank all states in the order of the ranks, elsewhere the rank's own.
    """
    if process_group(None) is None:
        return [state]
    states: list[Any] | None = [None] * dist.get_world_size() if own_rank() == 0 else None
    dist.gather_object(state, states, dst=0)
    return [state] if states is None else states


def own_state(states: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """This rank's state of those that :func:`gather_states` returned; that of the first rank where there were fewer."""
    rank = own_rank()
    return states[rank if rank < len(states) else 0]


def _file_in(checkpoint: str, rank: int) -> Path:
    return Path(checkpoint) / f"rowprop_{rank}.pt"


class Replaced:
    """Attributes of a framework's object that others stand for, until they are given back.

    ``replaced[name]`` is the framework's own.

    Args:
        owner: The framework's object.
        by: What stands for the attribute of each name.
    """

    def __init__(self, owner: Any, by: Mapping[str, Any]) -> None:
        self._owner = owner
        self._own = {name: getattr(owner, name, None) for name in by}
        self._before = {name: vars(owner)[name] for name in by if name in vars(owner)}
        vars(owner).update(by)

    def __getitem__(self, name: str) -> Any:
        return self._own[name]

    def give_back(self) -> None:
        """Give the object its own attributes back; once."""
        for name in self._own:
            vars(self._owner).pop(name, None)
        vars(self._owner).update(self._before)
        self._own, self._before = {}, {}


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


def losses_of_rows(losses_fn: LossesFn, settings: Mapping[str, Any]) -> LossesFn:
    """The losses function of a step whose losses may come per token, pixel or label.

    All these frameworks train on the mean over such places, so each row has the mean of its own. With ``unit="token"``
    among the settings for :class:`rowprop.SelectiveBackprop` the losses stay as they are.
    """
    return losses_fn if settings.get("unit") == "token" else partial(_mean_of_places, losses_fn)


def _mean_of_places(losses_fn: LossesFn, model: Any, batch: Any) -> Any:
    returned = losses_fn(model, batch)
    return Scored(_mean(returned.losses), _mean(returned.scores)) if isinstance(returned, Scored) else _mean(returned)


def _mean(values: Any) -> Any:
    return values.flatten(1).mean(1) if isinstance(values, Tensor) and values.dim() > 1 else values


def refuse_history(settings: Mapping[str, Any], framework: str) -> None:
    """Refuse a history where the framework's batches carry no ids."""
    if settings.get("history") is not None:
        raise InvalidInput(
            f"SelectiveBackprop got a history, but {framework}'s batches carry no ids of rows; use "
            "rowprop.SelectiveBackprop in a loop of your own, or leave history out."
        )
