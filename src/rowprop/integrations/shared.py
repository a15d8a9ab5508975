"""What the integrations share: the door to a package, the step of a training, its numbers and its checkpoints."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import io
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from rowprop.checks import check_callable, check_losses_fn, signature_of
from rowprop.distributed import Local, own_rank, process_group
from rowprop.errors import InvalidInput, MissingExtra
from rowprop.files import write_whole
from rowprop.scoring import LossesFn, Scored
from rowprop.selection.base import Selector
from rowprop.step.record import Record
from rowprop.step.selective import SelectiveBackprop

IGNORED = -100  # the label of a token that does not count
ClassesFn = Callable[[Any], Tensor]  # from the batch to the class of each row, (N,), int64
Numbers = dict[str, Tensor | float]  # for a framework's logger: losses are 0-d tensors, which the host has not read


def module_of(package: str, name: str = "", *, least: str = "", install: str | None = None) -> Any:
    """A module of a package; :class:`MissingExtra` where it is not installed, or older than ``least``."""
    if importlib.util.find_spec(package) is None:
        install = install or f"pip install {package}"
        raise MissingExtra(f"this integration needs {package}, which is not installed; run: {install}.")
    if least:
        version = importlib.import_module(package).__version__
        found, needed = ([int(part) for part in each.split(".")[:2]] for each in (version, least))
        if found < needed:
            came = f"{package} {least} or newer but {package} {version} is installed"
            raise MissingExtra(f"this integration needs {came}; run: pip install -U {package}.")
    return importlib.import_module(f"{package}.{name}" if name else package)


class Selects:
    """An adapter's arguments, and the step that it makes of them once the framework has the model."""

    step: SelectiveBackprop | None = None
    record: Record | None = None
    _loaded: Mapping[str, Any] | None = None  # a state for the step that is made next
    _framework: str
    _accumulation: str  # what accumulates gradients there
    _ids = True  # whether its batches may carry ids of rows

    def __init__(
        self,
        selector: Selector,
        losses_fn: LossesFn | None = None,
        *,
        classes_fn: ClassesFn | None = None,
        **settings: Any,
    ) -> None:
        super().__init__()
        owner = type(self).__name__
        if losses_fn is not None:
            check_losses_fn(owner, losses_fn)
        if classes_fn is not None:
            check_callable(owner, "classes_fn", classes_fn, "a function of the batch was needed; None is the default.")
        if "accumulate_to" in settings:
            decides = f"{self._framework} decides when the optimizer steps; use {self._accumulation} instead."
            raise InvalidInput(f"{owner} got accumulate_to, but {decides}")
        if not self._ids and settings.get("history") is not None:
            remedy = "use rowprop.SelectiveBackprop in a loop of your own, or leave history out."
            raise InvalidInput(f"{owner} got a history, but {self._framework}'s batches carry no ids of rows; {remedy}")
        self._selector, self._losses_fn, self._classes_fn = selector, losses_fn, classes_fn
        self._settings = settings

    def _make_step(self, model: Any, losses_fn: LossesFn, *, several: bool = False, **unit: Any) -> SelectiveBackprop:
        """Make the step of a training, in the state that was loaded; of several ranks each selects its own rows."""
        settings: dict[str, Any] = ({"ranks": Local()} if several else {}) | self._settings | unit
        step = SelectiveBackprop(model, losses_of_rows(losses_fn, settings), self._selector, **settings)
        if self._loaded is not None:
            step.load_state_dict(self._loaded)
        self.step, self.record, self._loaded = step, None, None
        return step

    def _run(
        self, batch: Any, index: int | None = None, *, progress: float | None, **call: Any
    ) -> tuple[Tensor, Record, Numbers]:
        """Run the step, by the framework's progress if it has none; returns also the numbers to log."""
        step = cast(SelectiveBackprop, self.step)
        progress = progress if step.total_steps is None and step.sampler is None else None
        classes = None if self._classes_fn is None else self._classes_fn(batch)
        loss, self.record = step(batch, index, classes=classes, progress=progress, **call)
        return loss, self.record, numbers_of(self.record, classes, call.get("counted"))

    def _load(self, state: Mapping[str, Any] | None) -> None:
        """Go on from a state, now or when the step is made."""
        if self.step is None:
            self._loaded = state
        elif state is not None:
            self.step.load_state_dict(state)


def losses_of_rows(losses_fn: LossesFn, settings: Mapping[str, Any]) -> LossesFn:
    """Each row's loss is the mean over its tokens, pixels or labels, as the frameworks train; not with unit="token"."""
    return losses_fn if settings.get("unit") == "token" else partial(_mean_of_places, losses_fn)


def _mean_of_places(losses_fn: LossesFn, model: Any, batch: Any) -> Any:
    returned = losses_fn(model, batch)
    return Scored(_mean(returned.losses), _mean(returned.scores)) if isinstance(returned, Scored) else _mean(returned)


def _mean(values: Any) -> Any:
    return values.flatten(1).mean(1) if isinstance(values, Tensor) and values.dim() > 1 else values


def check_reduction(named: str, function: Any, instead: str) -> None:
    """Refuse a loss module or function that gives no losses of rows, or whose reduction is not their mean."""
    reduction = getattr(function, "reduction", None)
    if reduction is None:
        taken = dict(signature.parameters) if (signature := signature_of(function)) else {}
        if "reduction" not in taken and not any(each.kind is each.VAR_KEYWORD for each in taken.values()):
            remedy = f"add reduction='mean' to its arguments, or give {instead}."
            raise InvalidInput(f"{named} takes no reduction, but the loss of each row was needed; {remedy}")
        reduction = taken["reduction"].default if "reduction" in taken else inspect.Parameter.empty
    if reduction not in ("mean", "none", inspect.Parameter.empty):
        needed = "'mean' was needed, because the loss of a selection is a mean"
        raise InvalidInput(f"{named} has reduction={reduction!r} but {needed}; set it, or give {instead}.")


class Replaced:
    """Attributes of a framework's object that others stand for until :meth:`give_back`; ``[name]`` is its own."""

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


def numbers_of(record: Record, classes: Tensor | None = None, counted: Tensor | None = None) -> Numbers:
    """The numbers to log in each step; with ``classes`` of the rows ``(N,)`` also the kept share of each, on the host.

    A token's class is its row's, and those ``counted`` count.
    """
    kept_share = record.num_kept / max(1, record.num_rows)
    numbers: Numbers = {"loss_all": record.loss_all, "loss_kept": record.loss_kept, "kept": kept_share}
    if classes is not None and classes.numel():
        selection, classes = record.selection, classes.cpu()
        if record.unit == "token":
            classes = classes.repeat_interleave(selection.num_rows // classes.numel())
        whole = torch.bincount(classes if counted is None else classes[counted.flatten().cpu()])
        kept = torch.bincount(classes[selection.rows.cpu()], minlength=whole.numel())
        shares = cast("list[float]", (kept / whole).tolist())
        numbers |= {f"kept/{number}": share for number, share in enumerate(shares) if whole[number]}
    return numbers


class Means:
    """Means of numbers over steps, by name: losses and shares by the rows that they are of."""

    def __init__(self) -> None:
        self.sums: dict[str, tuple[Any, Any]] = {}  # weighted, and of the weights; the host has not read them

    def add(self, record: Record, numbers: Numbers) -> None:
        """Add the numbers of a step; the loss of kept rows that are none counts nothing."""
        weights = {"loss_all": record.num_rows, "kept": record.num_rows, "loss_kept": record.num_kept}
        for name, value in numbers.items():
            if weight := weights.get(name, 1):
                self.add_sum(name, value * weight, weight)

    def add_sum(self, name: str, total: Any, weight: Any) -> None:
        """Add a weighted sum."""
        before = self.sums.get(name, (0.0, 0))
        self.sums[name] = before[0] + total, before[1] + weight

    def of(self, name: str) -> Any:
        """The mean of one; NaN where no step has it."""
        total, weight = self.sums.get(name, (math.nan, 1))
        return total / weight

    def read(self) -> dict[str, float]:
        """All means as the host's numbers."""
        return {name: float(self.of(name)) for name in self.sums}


def gather_states(state: dict[str, Any]) -> list[dict[str, Any]]:
    """On the first rank, which writes the checkpoint, the states of all ranks; elsewhere the rank's own."""
    if process_group(None) is None:
        return [state]
    states: list[Any] | None = [None] * dist.get_world_size() if own_rank() == 0 else None
    dist.gather_object(state, states, dst=0)
    return [state] if states is None else states


def own_state(states: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """This rank's state of those that :func:`gather_states` returned; that of the first rank where there were fewer."""
    rank = own_rank()
    return states[rank if rank < len(states) else 0]


def with_state(
    trainer: Any, save: Callable[[], Mapping[str, Any]], load: Callable[[dict[str, Any]], None]
) -> dict[str, Any]:
    """Replacements for a Trainer's methods of these names, so that its checkpoints hold each process's state.

    A process without one gets the first one's; where none had one, ``load`` is not called.
    """
    rank, named = trainer.args.process_index, "rowprop_{}.pt".format
    own_save, own_load = trainer._save_optimizer_and_scheduler, trainer._load_optimizer_and_scheduler

    def save_both(output_dir: str) -> None:
        own_save(output_dir)
        content = io.BytesIO()
        torch.save(dict(save()), content)
        write_whole(Path(output_dir, named(rank)), content.getvalue())

    def load_both(checkpoint: str | None) -> None:
        own_load(checkpoint)
        files = [] if checkpoint is None else [Path(checkpoint, named(each)) for each in (rank, 0)]
        if (file := next(filter(Path.exists, files), None)) is not None:
            load(torch.load(file, weights_only=True))

    return {"_save_optimizer_and_scheduler": save_both, "_load_optimizer_and_scheduler": load_both}


def splits_rows(trainer: Any) -> bool:
    """Whether a process has parts of rows or of gradients alone."""
    return trainer.is_deepspeed_enabled or trainer.get_tp_size() * trainer.get_cp_size() * trainer.get_sp_size() > 1


def unwrapped(trainer: Any) -> Any:
    """The model that the trainer was given; the one inside, where PEFT wraps it."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def progress_of(trainer: Any) -> float:
    """The part of the updates that is done, in [0, 1]."""
    return min(1.0, trainer.state.global_step / max(1, trainer.state.max_steps))
