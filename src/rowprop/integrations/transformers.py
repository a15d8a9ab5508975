"""transformers: one line has a Trainer backpropagate the rows or the tokens that a selector keeps."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from rowprop.backprop.pick import Unit
from rowprop.checks import check_kind
from rowprop.errors import InvalidInput, UnsupportedOperation
from rowprop.integrations import shared
from rowprop.scoring import LossesFn, per_row_mean
from rowprop.selection.base import Selector

# For each token loss: whether labels are shifted by one.
_SHIFTED = {"ForCausalLMLoss": True, "ForMaskedLMLoss": False, "ForTokenClassification": False}
_transformers: Any = shared.module_of("transformers", least="5.23")
shared.module_of("accelerate")


def select(
    trainer: Any,
    selector: Selector,
    *,
    losses_fn: LossesFn | None = None,
    classes_fn: shared.ClassesFn | None = None,
    **settings: Any,
) -> SelectiveBackpropCallback:
    """Have a Trainer train on the rows or tokens that a selector keeps: one line between making it and training.

    In training, ``compute_loss`` is replaced on this trainer, until the handle's ``remove()``. An update's gradient is
    that of the mean over all kept rows (tokens) of its micro-batches on all processes; with weights that refer to the
    mean over all rows, as those of unbiased selectors, of all its rows. The Trainer divides by neither accumulation
    steps nor ``num_items_in_batch``.

    The Trainer logs ``loss_all``, ``loss_kept`` and the kept share, ``kept``: means since the last log, over all
    processes. Its own ``loss`` is that of all rows; where a scorer leaves it unknown, that of the kept rows.

    Args:
        trainer: A ``transformers.Trainer``, or one of a subclass. Its batches are the arguments of its model.
        selector: Chooses the rows or tokens, e.g. ``rowprop.TopK(keep=0.5)``.
        losses_fn: ``(model, inputs)`` to unreduced losses: of rows, ``(N,)``, or ``(N, ...)``, of which each row has
            the mean; with ``unit="token"`` of tokens, in the shape of the labels, ``(N, T)``. Default None: the losses
            that the model's ``loss_type`` stands for, label smoothing included: of rows for classification of
            sequences, images, audio and video, of tokens for language models and token classification.
        classes_fn: From the batch to the class of each row, ``(N,)``, int64, for selectors that need it; each one's
            kept share in the first process is logged, ``kept/CLASS``. Default None.
        **settings: Those of :class:`rowprop.SelectiveBackprop`, except ``accumulate_to``. ``unit`` is ``"token"`` by
            default where the model's losses are per token; ``unit="row"`` then makes a row's loss the mean of its
            tokens'. Tokens with the label -100 do not count. With a ``history`` the batches need an entry ``ids``,
            ``(N,)``, int64. With ``ranks`` processes select together, and the micro-batches of an update count alike.
            Progress is the trainer's.

    Raises:
        MissingExtra: On import, where transformers 5.23 or newer or accelerate is not installed.
        InvalidInput: A setting is wrong, ``trainer`` is no Trainer or selects already, or there are no losses of rows:
            the model's loss is of another kind, or the trainer has its own ``compute_loss_func`` or ``compute_loss``.
            In training: a batch without labels, or a packed one while rows are chosen.
        UnsupportedOperation: The trainer uses DeepSpeed, or splits a sequence or the model's tensors over processes.

    Cost:
        In each update of several processes or micro-batches one multiplication of the gradients; of several processes
        also an all-reduce of seven numbers, for which the host does not wait.
    """
    check_kind("select", "trainer", trainer, _transformers.Trainer, "a transformers.Trainer was needed.")
    if any(isinstance(callback, SelectiveBackpropCallback) for callback in trainer.callback_handler.callbacks):
        raise InvalidInput("select got a trainer that selects already; call remove() on its handle first.")
    if shared.splits_rows(trainer):
        needed = "whole rows and gradients were needed on each process; use DDP or FSDP."
        came = "a trainer with DeepSpeed or with tensor, context or sequence parallelism"
        raise UnsupportedOperation(f"select got {came}, but {needed}")
    return SelectiveBackpropCallback(trainer, selector, losses_fn, classes_fn=classes_fn, **settings)


class SelectiveBackpropCallback(shared.Selects, _transformers.TrainerCallback):
    """The handle of a trainer that selects, made by :func:`select`; the trainer has it among its callbacks.

    Attributes:
        step: The :class:`rowprop.SelectiveBackprop` of the running training, whose state is saved in checkpoints.
        record: The :class:`rowprop.step.Record` of the last micro-batch; None before the first.
    """

    _framework, _accumulation = "the Trainer", "TrainingArguments(gradient_accumulation_steps=...)"

    def __init__(self, trainer: Any, selector: Selector, losses_fn: LossesFn | None, **arguments: Any) -> None:
        super().__init__(selector, losses_fn, **arguments)
        self._trainer = trainer
        self.on_train_begin()
        replaced: dict[str, Any] = {
            "compute_loss": self._compute_loss,
            "training_step": self._training_step,
            "log": self._log,
            "loss_is_scaled_for_ga": True,  # or the Trainer would divide the loss by the accumulation steps
        }
        state = shared.with_state(trainer, lambda: {"step": self._step.state_dict()}, self._resume)
        self._own = shared.Replaced(trainer, replaced | state)
        trainer.add_callback(self)

    def remove(self) -> None:
        """Give the trainer its own training back."""
        self._own.give_back()
        if self in self._trainer.callback_handler.callbacks:
            self._trainer.remove_callback(self)

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        """Start a training, or resume from its checkpoint."""
        trainer = self._trainer
        self._shifted = _SHIFTED.get(_loss_name(trainer) or "", False)
        losses_fn, self._unit = self._losses_fn, self._settings.get("unit", "row")
        if losses_fn is None:
            losses_fn, self._unit = _own_losses(trainer, self._settings.get("unit"))
        self._step = self._make_step(trainer.model_wrapped, losses_fn, unit=self._unit)
        self._in_step = False
        self._scale: float | None = None
        self._pending, self._size, self._means = 0, 0.0, shared.Means()  # of the micro-batches of the pending update
        self._logged = shared.Means()  # since the last log

    def _resume(self, state: dict[str, Any]) -> None:
        self._loaded = state["step"]  # the training begins thereafter

    def _training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """Run the Trainer's step. After an update's last one, the gradients become those of the mean."""
        self._in_step, self.record = True, None
        try:
            returned = self._own["training_step"](*args, **kwargs)
        finally:
            self._in_step = False
        if self.record is None:
            place = "compute_loss, in whose place select has to stand; call rowprop.pick in training_step instead."
            raise InvalidInput(f"training_step of {type(self._trainer).__name__} did not call {place}")
        if not self._trainer.accelerator.sync_gradients:
            return torch.zeros_like(returned)
        return self._updated().to(returned)

    def _compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """In training the loss of what is kept, times how much it counts in its update; else the Trainer's own."""
        if not self._in_step:
            return self._own["compute_loss"](model, inputs, *args, **kwargs)
        accelerator, together = self._trainer.accelerator, self._step.ranks is not None
        alone = accelerator.sync_gradients and not self._pending  # the only micro-batch of its update
        inputs = dict(inputs)
        if self._unit == "row":
            _refuse_packed(inputs)
        ids = inputs.pop("ids", None) if self._step.history is not None else None
        targets = _targets(inputs, self._shifted) if self._unit == "token" else None
        counted = None if targets is None else targets != shared.IGNORED
        loss, record, numbers = self._run(inputs, progress=shared.progress_of(self._trainer), ids=ids, counted=counted)
        self._pending += 1
        self._means.add(record, numbers)
        if alone and (together or accelerator.num_processes == 1):
            return loss
        # Weights 1/K refer to the mean over kept rows, and others to the mean over all rows. Ranks that select together
        # have weighed their rows already.
        kept = record.selection.even and not record.selection.unbiased
        size = 1 if together else record.num_kept if kept else record.num_rows
        if self._scale is None:
            self._scale = self._near(size)
        self._size += size
        return loss * (size / self._scale)

    def _near(self, size: int) -> float:
        """A power of two, equal on all processes, by which the pending gradients are about as large as the mean's."""
        accelerator = self._trainer.accelerator
        total = torch.tensor(float(size), device=accelerator.device)
        whole = float(accelerator.reduce(total, "sum")) * self._trainer.args.gradient_accumulation_steps
        return 2.0 ** round(math.log2(max(1.0, whole / accelerator.num_processes)))

    def _updated(self) -> Tensor:
        """Make the gradients those of the mean over the update, and return the mean loss of all its rows."""
        means, size, world = self._means, self._size, self._trainer.accelerator.num_processes
        scaled = size > 0 or (world > 1 and self._step.ranks is None)
        self._pending, self._size, self._means = 0, 0.0, shared.Means()
        if world > 1:
            size = self._sum_over_processes(means, size)
        if scaled:
            factor = cast("float", self._scale) * world / size
            for grad in (each.grad for each in self._step.model.parameters() if each.grad is not None):
                local = grad.to_local() if hasattr(grad, "to_local") else grad
                local.mul_(factor.to(local.device) if isinstance(factor, Tensor) else factor)
        for name, (total, weight) in means.sums.items():
            self._logged.add_sum(name, total, weight)
        if "loss_all" not in means.sums:  # no token counts
            return torch.zeros(())
        loss_all = means.of("loss_all")
        return torch.where(loss_all.isnan(), means.of("loss_kept") if "loss_kept" in means.sums else 0.0, loss_all)

    def _sum_over_processes(self, means: shared.Means, size: float) -> Tensor:
        """Make the means those over all processes, and return the sum of their sizes."""
        accelerator, names = self._trainer.accelerator, ("loss_all", "kept", "loss_kept")
        mine = [size, *(number for name in names for number in means.sums.get(name, (0.0, 0.0)))]
        zero = torch.zeros((), dtype=torch.float64, device=accelerator.device)
        whole, *sums = cast("Tensor", accelerator.reduce(torch.stack([zero + number for number in mine]), "sum"))
        means.sums |= dict(zip(names, zip(sums[::2], sums[1::2], strict=True), strict=True))
        return whole.clamp(min=1)

    def _log(self, logs: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        if "loss" in logs:
            logs = logs | self._logged.read()
            self._logged = shared.Means()
        self._own["log"](logs, *args, **kwargs)


def _loss_name(trainer: Any) -> str | None:
    """The name of the function that computes the loss of the model; None where transformers has none."""
    mapping = shared.module_of("transformers", "loss.loss_utils").LOSS_MAPPING
    function = mapping.get(getattr(shared.unwrapped(trainer), "loss_type", None))
    return None if function is None else function.__name__


def _own_losses(trainer: Any, unit: Unit | None) -> tuple[LossesFn, Unit]:
    """The losses that the trainer's own training takes the mean of, and what they are losses of."""
    model, name, owner = shared.unwrapped(trainer), _loss_name(trainer), _owner_of_loss(trainer)
    config, kind, classes = getattr(model, "config", None), type(model).__name__, "ForSequenceClassificationLoss"
    reasons = {
        f"{owner} has a compute_loss of its own, in whose place select would stand": owner is not None,
        "the trainer has a compute_loss_func, which returns one number": trainer.compute_loss_func is not None,
        f"{kind} was given a loss_function, which returns one number": "_loss_function" in vars(model),
        f"{kind} has a loss of another kind than classes or tokens": name != classes and name not in _SHIFTED,
        f"{kind} makes its decoder's inputs of the labels": getattr(config, "is_encoder_decoder", False),
        f"the loss of {kind} has a term of its router's": getattr(config, "output_router_logits", False),
    }
    for reason in (reason for reason, there in reasons.items() if there):
        raise InvalidInput(
            f"{reason}, but losses of rows or tokens were needed; give select(trainer, selector, losses_fn=...), a "
            "function of the model and the inputs that returns them."
        )
    smoothing = trainer.args.label_smoothing_factor
    if name not in _SHIFTED:
        return partial(_class_losses, config, smoothing), unit or "row"
    losses = partial(_token_losses, _SHIFTED[name], smoothing)
    return (partial(_of_rows, losses, _SHIFTED[name]) if unit == "row" else losses), unit or "token"


def _owner_of_loss(trainer: Any) -> str | None:
    """The subclass of Trainer that may compute another loss than the model's; None if none does."""
    owner = next(each for each in type(trainer).__mro__ if "compute_loss" in vars(each))
    if owner.__module__ == "trl.trainer.sft_trainer":  # the mean over tokens, and metrics
        another = trainer.args.loss_type not in ("nll", "chunked_nll") or trainer.aux_loss_enabled
    else:
        another = owner is not _transformers.Trainer
    return owner.__name__ if another else None


def _logits(model: Any, inputs: Mapping[str, Any]) -> Tensor:
    """The logits alone: without labels the model computes no loss."""
    outputs: Any = model(**{name: value for name, value in inputs.items() if name not in ("labels", "shift_labels")})
    return outputs["logits" if isinstance(outputs, dict) else 0]


def _labels(inputs: Mapping[str, Any]) -> Tensor:
    if not isinstance(inputs.get("labels"), Tensor):
        needed = "an entry labels was needed; have the data collator make it, or give select a losses_fn."
        raise InvalidInput(f"a batch came with {', '.join(map(str, inputs))} but {needed}")
    return inputs["labels"]


def _class_losses(config: Any, smoothing: float, model: Any, inputs: Mapping[str, Any]) -> Tensor:
    """The loss of each row, (N,), by the config's problem type, which transformers may infer from the labels."""
    labels, logits = _labels(inputs), _logits(model, inputs)
    labels, kind = labels.to(logits.device), config.problem_type
    if kind is None:
        classes = "single_label" if labels.dtype in (torch.long, torch.int) else "multi_label"
        kind = "regression" if config.num_labels == 1 else f"{classes}_classification"
    if kind == "single_label_classification":
        labels = labels.view(-1)
        return F.cross_entropy(logits.view(-1, config.num_labels), labels, reduction="none", label_smoothing=smoothing)
    function = F.mse_loss if kind == "regression" else F.binary_cross_entropy_with_logits
    logits = logits.view(len(labels), -1)
    return function(logits, labels.view_as(logits), reduction="none").mean(1)


def _token_losses(shifted: bool, smoothing: float, model: Any, inputs: Mapping[str, Any]) -> Tensor:
    """The loss of each token, (N, T), at the position whose logits predict it; 0 where it does not count."""
    targets = _targets(inputs, shifted)
    targets = _labels(inputs) if targets is None else targets
    logits = _logits(model, inputs)
    if logits.shape[:-1] != targets.shape:
        shapes = f"{tuple(logits.shape)} but the labels in {tuple(targets.shape)}"
        needed = "logits were needed for each label; give select a losses_fn."
        raise InvalidInput(f"the logits came in the shape {shapes}, and {needed}")
    targets = targets.to(logits.device)
    losses = F.cross_entropy(
        logits.float().flatten(0, -2), targets.flatten(), reduction="none", ignore_index=shared.IGNORED,
        label_smoothing=smoothing,
    )  # fmt: skip
    return losses.view(targets.shape)


def _of_rows(losses_fn: Callable[..., Tensor], shifted: bool, model: Any, inputs: Mapping[str, Any]) -> Tensor:
    """The mean loss of each row's tokens that count, (N,)."""
    losses = losses_fn(model, inputs)
    return per_row_mean(losses, cast("Tensor", _targets(inputs, shifted)).to(losses.device) != shared.IGNORED)


def _targets(inputs: Mapping[str, Any], shifted: bool) -> Tensor | None:
    """The token that each position predicts, in the shape of the labels; None without labels."""
    if "shift_labels" in inputs:
        return inputs["shift_labels"]
    labels = inputs.get("labels")
    return F.pad(labels[:, 1:], (0, 1), value=shared.IGNORED) if shifted and labels is not None else labels


def _refuse_packed(inputs: Mapping[str, Any]) -> None:
    positions = inputs.get("position_ids")
    packed = any(name.startswith("cu_seq_lens") or name == "seq_idx" for name in inputs)
    if not packed and isinstance(positions, Tensor) and positions.dim() == 2 and len(positions) == 1:
        packed = bool((positions[:, 1:] <= positions[:, :-1]).any())
    if packed:
        raise InvalidInput(
            "a batch of one row came that holds several packed sequences, but select chooses among rows; choose among "
            "tokens with unit='token', or let the data collator pad."
        )
