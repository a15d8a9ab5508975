"""Models and data for transformers' Trainer, and the plain loop that its trainings are compared with."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import rowprop
from plain_loop import check_same, descend, groups

ROWS, BATCH, LENGTH, WORDS, EPOCHS = 24, 4, 7, 23, 2


def classifier(labels: int = 3, **config: Any) -> Any:
    """Its forward takes any keywords, and its loss ignores `num_items_in_batch`."""
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(1)
    sizes: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    return BertForSequenceClassification(
        BertConfig(
            **sizes, intermediate_size=16, vocab_size=WORDS, num_labels=labels, max_position_embeddings=LENGTH,
            hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **config,
        )
    )  # fmt: skip


def decoder(**config: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    sizes: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, intermediate_size=16, vocab_size=WORDS, pad_token_id=0, **config))


def adapted(model: Any) -> Any:
    """With LoRA on each linear layer but the head."""
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
    for number, (name, parameter) in enumerate(model.named_parameters()):
        if "lora_B" in name:  # it begins at zero, and so would all gradients of lora_A
            nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(number))
    return model


def texts(make: Callable[[torch.Generator, Tensor], Any], rows: int = ROWS) -> list[dict[str, Any]]:
    """Rows of tokens, with labels from a function of their tokens."""
    generator = torch.Generator().manual_seed(0)
    found: list[dict[str, Any]] = []
    for number in range(rows):
        ids = torch.randint(1, WORDS, (LENGTH,), generator=generator)
        labels = make(generator, ids)
        found.append({"input_ids": ids.tolist(), "labels": labels, "ids": number})
    return found


def classes(generator: torch.Generator, ids: Tensor) -> int:
    return int(ids[0] % 3)


def answers(generator: torch.Generator, ids: Tensor) -> list[int]:
    """Labels of the last tokens, of which there are more or fewer."""
    asked = int(torch.randint(2, LENGTH, (), generator=generator))
    return [-100] * asked + ids[asked:].tolist()


def make_trainer(model: Any, data: list[dict[str, Any]], folder: Path, *, kind: Any = None, more: Any = None,
                 rate: float = 0.3, **settings: Any) -> Any:  # fmt: skip
    import transformers

    transformers.logging.set_verbosity_error()
    given: dict[str, Any] = {
        "per_device_train_batch_size": BATCH, "num_train_epochs": EPOCHS, "optim": "sgd", "learning_rate": rate,
        "lr_scheduler_type": "constant", "max_grad_norm": 0.0, "train_sampling_strategy": "sequential",
        "logging_steps": 1, "save_strategy": "no", "report_to": "none", "disable_tqdm": True, "use_cpu": True,
        "logging_nan_inf_filter": False,
    }  # fmt: skip
    if "ids" in data[0] and "remove_unused_columns" not in settings:
        data = [{name: value for name, value in row.items() if name != "ids"} for row in data]
    args = transformers.TrainingArguments(folder, **given | settings)
    kind = transformers.Trainer if kind is None else kind
    return kind(model, args, train_dataset=data, eval_dataset=data, callbacks=[silence(transformers)], **more or {})


def silence(transformers: Any) -> Any:
    """Prints nothing: the Trainer adds a printer where there is no progress bar."""

    class Silence(transformers.TrainerCallback):
        def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            transformers.PrinterCallback.on_log = lambda *_, **__: None

    return Silence()


def batches(data: list[dict[str, Any]]) -> list[dict[str, Tensor]]:
    columns = [name for name in data[0] if name != "ids"]
    parts = [data[start : start + BATCH] for start in range(0, len(data), BATCH)]
    return [{name: torch.tensor([row[name] for row in part]) for name in columns} for part in parts]


def row_losses(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(input_ids=batch["input_ids"]).logits, batch["labels"], reduction="none")


def token_losses(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Of the tokens that count."""
    logits, labels = model(input_ids=batch["input_ids"]).logits[:, :-1], batch["labels"][:, 1:]
    return F.cross_entropy(logits[labels != -100], labels[labels != -100], reduction="none")


def above(losses: Tensor) -> Tensor:
    """Of the rows above the mean, of which there are more or fewer."""
    return (losses.detach() > losses.detach().mean()).nonzero().squeeze(1)


def by_hand(
    model: Any, data: Any, losses_fn: Any, *, at_once: int = 1, choose: Any = above, clip: float = 0.0
) -> list[dict[str, float]]:
    """A plain loop: plain indexing, and the mean over all rows that the batches of an update keep."""
    logged: list[dict[str, float]] = []

    def loss_of(model: nn.Module, parts: list[dict[str, Tensor]]) -> Tensor:
        each = [losses_fn(model, batch) for batch in parts]
        every, kept = torch.cat(each), torch.cat([losses[choose(losses)] for losses in each])
        found = {"loss_all": every.mean(), "loss_kept": kept.mean(), "loss": every.mean()}
        logged.append({name: float(value) for name, value in found.items()} | {"kept": len(kept) / len(every)})
        return kept.mean()

    descend(model.train(), updates(data, at_once), loss_of, clip=clip)
    return logged


def updates(data: list[dict[str, Any]], at_once: int) -> list[list[dict[str, Tensor]]]:
    """The batches of each update of the training."""
    return groups(batches(data), at_once) * EPOCHS


def select(trainer: Any, selector: Any = None, **settings: Any) -> Any:
    """The line of the integration, by default for the rows above their mean."""
    from rowprop.integrations import transformers

    return transformers.select(trainer, selector or rowprop.selection.AboveMean(), **{"engine": "sliced"} | settings)


def trained(
    model: Any, data: Any, folder: Path, selector: Any = None, *, selecting: Any = None, **settings: Any
) -> tuple[Any, Any]:
    """A trainer that has trained on the rows of a selector; and its handle."""
    trainer = make_trainer(model, data, folder, **settings)
    handle = select(trainer, selector, **selecting or {})
    trainer.train()
    return trainer, handle


def check(trainer: Any, model: nn.Module, logged: list[dict[str, float]] | None = None) -> None:
    """The trainer's parameters and logs are those of the plain loop."""
    check_same(trainer.model, model)
    if logged is not None:
        steps = [entry for entry in trainer.state.log_history if "loss" in entry]
        for found, truth in zip(steps, logged, strict=True):
            assert {name: found[name] for name in truth} == pytest.approx(truth, abs=1e-5)


KINDS = {"rows": (classifier, classes, row_losses), "tokens": (decoder, answers, token_losses)}
"""A model, its labels, and the losses of its rows or tokens."""
