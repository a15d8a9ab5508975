"""TRL's SFTTrainer: the head and the backward below it cost the tokens that have a label."""

from __future__ import annotations

import functools
import importlib
import types
from typing import Any, cast

from torch import Tensor
from torch.nn import functional as F

from rowprop.backprop.pick import Attention, pick
from rowprop.errors import InvalidInput, MissingExtra

IGNORED = -100
"""The label of a token that does not count."""


def pick_answers(trainer: Any, *, attention: Attention = "exact") -> None:
    """Let an SFTTrainer run its head, and the backward below it, for the tokens with a label alone.

    One line between making the trainer and training. TRL's own head computes the losses: soft caps, scales, the
    ``dft`` loss, accumulation, and the metrics stay TRL's. The head is handed the K hidden states whose next token has
    a label other than -100, through :func:`~rowprop.pick`. So the head's forward costs K tokens on each device, and
    the backward below the head costs K tokens until an op mixes tokens.

    Batches may be padded, packed or free of padding. A model with LoRA adapters works as well. Logits that a trainer
    makes for ``compute_metrics`` and ``generate`` stay those of all tokens.

    Args:
        trainer: A ``trl.SFTTrainer`` of TRL 1.15 or newer. Its model is changed in place.
        attention: ``"exact"`` (default): the gradient is that of the trainer alone. ``"cut"``: keys and values of
            tokens without a label take no gradient; see :func:`~rowprop.pick`.

    Raises:
        MissingExtra: TRL is not installed, or is older than 1.15.
        InvalidInput: ``trainer`` is no SFTTrainer, its model has no backbone that is a module of its own, or
            ``attention`` is unknown.

    Cost:
        One copy of the K hidden states. The K tokens are counted in each forward, and the host waits for a device
        then, as TRL's own head does on CUDA.

    Exactness:
        Exact by default, up to the order of sums. ``"cut"`` is biased.
    """
    model = _causal_model(trainer)
    if attention not in ("exact", "cut"):
        raise InvalidInput(f"attention is {attention!r} but 'exact' or 'cut' was needed.")
    whole = model.forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not kwargs.get("fused_lm_head"):
            return whole(*args, **kwargs)
        labels = _next_labels(kwargs.pop("labels", None), kwargs.pop("shift_labels", None))
        kept = labels != IGNORED

        def narrow(backbone: Any, given: Any, output: Any) -> Any:
            hidden = output.last_hidden_state
            output.last_hidden_state = pick(hidden, kept.to(hidden.device), attention=attention).unsqueeze(0)
            return output

        hook = self.base_model.register_forward_hook(narrow)
        try:
            return whole(*args, shift_labels=labels[kept].unsqueeze(0), **kwargs)
        finally:
            hook.remove()

    functools.update_wrapper(forward, cast(Any, type(model).forward))  # `generate` reads the signature
    model.forward = types.MethodType(forward, model)


def _next_labels(labels: Tensor | None, shifted: Tensor | None) -> Tensor:
    """The label of each token's next token, (N, T): -100 at the end, and where it does not count."""
    return F.pad(cast(Tensor, labels)[:, 1:], (0, 1), value=IGNORED) if shifted is None else shifted


def _causal_model(trainer: Any) -> Any:
    """The model whose forward TRL gave its head; the one inside, where PEFT wraps it."""
    try:
        trl = importlib.import_module("trl")
        utils = importlib.import_module("trl.trainer.utils")
    except ImportError as error:
        raise MissingExtra("pick_answers needs TRL, which does not import; run: pip install 'rowprop[trl]'.") from error
    if not hasattr(utils, "add_fused_lm_head"):
        raise MissingExtra(
            f"pick_answers needs TRL 1.15 or newer but TRL {trl.__version__} is installed; "
            "run: pip install -U 'rowprop[trl]'."
        )
    if not isinstance(trainer, trl.SFTTrainer):
        raise InvalidInput(f"trainer is of type {type(trainer).__name__} but a trl.SFTTrainer was needed.")
    wrapped = trainer.model
    model = wrapped.get_base_model() if hasattr(wrapped, "get_base_model") else wrapped
    if model.base_model is model:
        raise InvalidInput(
            f"the model {type(model).__name__} has no backbone that is a module of its own, so its head is not "
            "apart from it; pick the losses of its tokens instead."
        )
    return model
