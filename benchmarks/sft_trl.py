"""Steps of TRL's SFTTrainer: all logits, TRL's own head, and `pick_answers` before it.

The batch is that of `sft_head.py`, the model a Qwen2 of its sizes from a config:

- `logits`: the loss of transformers, from the logits of all tokens; TRL's before 1.15;
- `TRL`: the trainer's own loss on the CPU, which takes the head's products in chunks and scores all tokens;
- `TRL as on CUDA`: the trainer's own loss where Triton runs: the same for the answers alone. Here its switch is set by
  hand, and the chunks are those of the CPU;
- `pick_answers` and `cut`: the trainer after `pick_answers(trainer)`, and with `attention="cut"`.

In each round every way makes one step (forward, backward, AdamW) after the others on the same model and batch, in an
order that turns from round to round. The trainer's steps make its metrics as well, `logits` makes none. A time is a
way's step over that of `logits` beside it: the median over the rounds, with the quartiles. FLOPs are counted and peak
bytes are those of torch's allocator, beyond the memory held before the step: both are exact, whatever else the machine
does.

It needs the packages of `nox -s integrations`: run it with `.nox/integrations/bin/python`.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from rowprop.integrations.trl import pick_answers
from sft_head import ANSWERS, SIZES, compared, conversations, main


def trainer_of(model: Any, rows: list[dict[str, list[int]]], vocabulary: int, folder: Path, **settings: Any) -> Any:
    """An SFTTrainer on the CPU for rows of tokens, with a tokenizer whose words are numbers."""
    from datasets import Dataset
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

    words = models.WordLevel({f"word{place}": place for place in range(vocabulary)}, unk_token="word0")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), pad_token="word1", eos_token="word2")
    data = Dataset.from_list(rows)
    quiet = {"report_to": [], "save_strategy": "no", "disable_tqdm": True}
    plain = {"use_cpu": True, "bf16": False, "gradient_checkpointing": False}
    config = SFTConfig(output_dir=str(folder), **quiet, **plain | settings)
    return SFTTrainer(model=model, args=config, processing_class=tokenizer, train_dataset=data, eval_dataset=data)


def qwen() -> Any:
    """The model of examples/sft_head.py, as transformers writes it."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    width = SIZES["width"]
    torch.manual_seed(0)
    return Qwen2ForCausalLM(Qwen2Config(
        vocab_size=SIZES["vocabulary"], hidden_size=width, intermediate_size=3 * width, num_attention_heads=width // 32,
        num_key_value_heads=2, num_hidden_layers=SIZES["depth"], tie_word_embeddings=True,
    ))  # fmt: skip


def figures(rounds: int) -> list[dict[str, Any]]:
    """A row for each share of answers and each way; the trainers share the parameters of one model."""
    row = {"input_ids": [3, 4, 5], "labels": [3, 4, 5]}
    shared = qwen()
    optimizer = torch.optim.AdamW(shared.parameters())

    def trainer(folder: str) -> Any:
        model = qwen()
        for mine, theirs in zip(model.modules(), shared.modules(), strict=True):
            mine._parameters = theirs._parameters
        return trainer_of(model.train(), [row], SIZES["vocabulary"], Path(folder))

    with tempfile.TemporaryDirectory() as folder:
        own, exact, cut = (trainer(folder) for _ in range(3))
    pick_answers(exact)
    pick_answers(cut, attention="cut")

    def loss(of: Any, batch: dict[str, Tensor], compact: bool = False) -> Callable[[], Tensor]:
        switch = (
            mock.patch("trl.trainer.utils._use_triton", lambda device: True) if compact else contextlib.nullcontext()
        )

        def run() -> Tensor:
            with switch:
                return of.compute_loss(of.model, dict(batch))

        return run

    rows: list[dict[str, Any]] = []
    for answers in ANSWERS:
        ids, labels = conversations(answers)
        batch = {"input_ids": ids, "labels": labels, "attention_mask": torch.ones_like(ids)}
        losses = {
            "logits": lambda batch=batch: shared(**batch).loss,
            "TRL": loss(own, batch), "TRL as on CUDA": loss(own, batch, compact=True),
            "pick_answers": loss(exact, batch), "cut": loss(cut, batch),
        }  # fmt: skip
        rows += [{"answers": answers, **row} for row in compared(losses, optimizer, rounds)]
    return rows


if __name__ == "__main__":
    import transformers
    import trl

    main(
        __doc__ or "", figures, "sft_trl", "The head in TRL's SFTTrainer",
        trl=trl.__version__, transformers=transformers.__version__,
    )  # fmt: skip
