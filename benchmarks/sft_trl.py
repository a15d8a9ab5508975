"""Steps of supervised fine-tuning of a model of transformers: its own loss, fused heads, and TRL's SFTTrainer.

The batch is that of `sft_head.py`, the model a Qwen2 of its sizes from a config:

- `logits`: the loss of transformers, from the logits of all tokens; TRL's before 1.15;
- `head alone`: the head runs for the tokens with a label, by plain indexing of the hidden states;
- `linear_cross_entropy`: torch's own fused head, in chunks of 64 tokens, as its own choice takes many times as long
  here; it scores all tokens;
- `Liger`: Liger's fused head; it scores all tokens. It has no kernel for a CPU: Triton's interpreter runs it, so it has
  an error and FLOPs, but no time;
- `TRL`: the trainer's own loss on the CPU, which takes the head's products in chunks and scores all tokens;
- `TRL as on CUDA`: the trainer's own loss where Triton runs: the same for the answers alone. Here its switch is set by
  hand, and the chunks are those of the CPU;
- `pick_answers` and `cut`: the trainer after `pick_answers(trainer)`, and with `attention="cut"`;
- `..., skip_zeros`: the same after `rowprop.skip_zeros(model)`.

In each round every way makes one step (forward, backward, AdamW) after the others on the same model and batch, in an
order that turns from round to round. The trainer's steps make its metrics as well, the others make none. A time is a
way's step over that of `logits` beside it: the median over the rounds, with the quartiles. FLOPs are counted and peak
bytes are those of torch's allocator, beyond the memory held before the step: both are exact, whatever else the machine
does. An error is the largest difference of a parameter's gradient from that of `logits`, over the largest entry of all.

It needs the packages of `nox -s integrations`: run it with `.nox/integrations/bin/python`. `Liger` wants liger-kernel
and triton beside them, and TRITON_INTERPRET=1; without, its lines are left out.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import rowprop
from rowprop.integrations.trl import pick_answers
from sft_head import SIZES, compared, conversations, main
from zeros import words


def trainer_of(model: Any, rows: list[dict[str, list[int]]], vocabulary: int, folder: Path, **settings: Any) -> Any:
    """An SFTTrainer on the CPU for rows of tokens, with a tokenizer whose words are numbers."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    data = Dataset.from_list(rows)
    quiet = {"report_to": [], "save_strategy": "no", "disable_tqdm": True}
    plain = {"use_cpu": True, "bf16": False, "gradient_checkpointing": False}
    config = SFTConfig(output_dir=str(folder), **quiet, **plain | settings)
    return SFTTrainer(model, config, processing_class=words(vocabulary), train_dataset=data, eval_dataset=data)


def qwen() -> Any:
    """The model of examples/sft_head.py, as transformers writes it."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    width = SIZES["width"]
    torch.manual_seed(0)
    return Qwen2ForCausalLM(Qwen2Config(
        vocab_size=SIZES["vocabulary"], hidden_size=width, intermediate_size=3 * width, num_attention_heads=width // 32,
        num_key_value_heads=2, num_hidden_layers=SIZES["depth"], tie_word_embeddings=True,
    ))  # fmt: skip


def head_alone(model: Any, ids: Tensor, labels: Tensor) -> Tensor:
    kept = labels[:, 1:] != -100
    return F.cross_entropy(model.lm_head(model.model(ids).last_hidden_state[:, :-1][kept]), labels[:, 1:][kept])


def fused_by_torch(model: Any, ids: Tensor, labels: Tensor) -> Tensor:
    hidden = model.model(ids).last_hidden_state[:, :-1].flatten(0, 1)
    options = nn.LinearCrossEntropyOptions(batch_chunk_size=64)
    return F.linear_cross_entropy(hidden, model.lm_head.weight, labels[:, 1:].flatten(), options=options)


def figures(rounds: int, shares: Sequence[float]) -> list[dict[str, Any]]:
    """A row for each share of answers and each way; the models share the parameters of one."""
    row = {"input_ids": [3, 4, 5], "labels": [3, 4, 5]}
    shared = qwen().train()

    def model(skips: bool = False) -> Any:
        made = qwen().train()
        for mine, theirs in zip(made.modules(), shared.modules(), strict=True):
            mine._parameters = theirs._parameters
        if skips:
            rowprop.skip_zeros(made)
        return made

    def trainer(skips: bool = False) -> Any:
        with tempfile.TemporaryDirectory() as folder:
            return trainer_of(model(skips), [row], SIZES["vocabulary"], Path(folder))

    own, skipping, exact, cut = trainer(), trainer(True), trainer(), trainer()
    plain, skips = model(), model(True)
    pick_answers(exact)
    pick_answers(cut, attention="cut")
    ligers: dict[str, Any] = {}
    if find_spec("liger_kernel") and find_spec("triton") and os.environ.get("TRITON_INTERPRET") == "1":
        from liger_kernel.transformers.model.qwen2 import lce_forward

        ligers = {"Liger": model(), "Liger, skip_zeros": model(True)}
        for each in ligers.values():
            each.forward = lce_forward.__get__(each)

    def loss(of: Any, batch: dict[str, Tensor], compact: bool = False) -> Callable[[], Tensor]:
        switch = (
            mock.patch("trl.trainer.utils._use_triton", lambda device: True) if compact else contextlib.nullcontext()
        )

        def run() -> Tensor:
            with switch:
                return of.compute_loss(of.model, dict(batch))

        return run

    rows: list[dict[str, Any]] = []
    for answers in shares:
        ids, labels = conversations(answers)
        batch = {"input_ids": ids, "labels": labels, "attention_mask": torch.ones_like(ids)}
        losses = {
            "logits": lambda batch=batch: plain(**batch).loss,
            "logits, skip_zeros": lambda batch=batch: skips(**batch).loss,
            "head alone": lambda ids=ids, labels=labels: head_alone(plain, ids, labels),
            "head alone, skip_zeros": lambda ids=ids, labels=labels: head_alone(skips, ids, labels),
            "linear_cross_entropy": lambda ids=ids, labels=labels: fused_by_torch(plain, ids, labels),
            "linear_cross_entropy, skip_zeros": lambda ids=ids, labels=labels: fused_by_torch(skips, ids, labels),
            "TRL": loss(own, batch), "TRL, skip_zeros": loss(skipping, batch),
            "TRL as on CUDA": loss(own, batch, compact=True),
            "TRL as on CUDA, skip_zeros": loss(skipping, batch, compact=True),
            "pick_answers": loss(exact, batch), "cut": loss(cut, batch),
        }  # fmt: skip
        interpreted = {way: lambda of=of, batch=batch: of(**batch).loss for way, of in ligers.items()}
        rows += [{"answers": answers, **row} for row in compared(shared, losses, rounds, interpreted)]
    return rows


if __name__ == "__main__":
    import transformers
    import trl

    main(
        __doc__ or "", figures, "sft_trl", "The head in TRL's SFTTrainer", on_page=(0.1,),
        trl=trl.__version__, transformers=transformers.__version__,
    )  # fmt: skip
