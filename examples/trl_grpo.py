"""GRPO of a tiny decoder with TRL: one line more, and the update runs for the answers that have a gradient.

A decoder, made from a config, learns to repeat the first word of a prompt. An answer has the reward 1 where it begins
with this word, else 0. Groups of answers that are all right or all wrong have no advantage. TRL's GRPOTrainer trains
twice from the same weights, as it is and after ``select_answers(trainer)``, and ends with the same weights but for
rounding. (A single answer that rounding has drawn otherwise sends the trainings apart.) Printed are the rewards, and
the share of the answers that the update ran for:

    pip install 'rowprop[trl]'
    python examples/trl_grpo.py
    python examples/trl_grpo.py --steps 200
"""

from __future__ import annotations

import argparse
import tempfile
from typing import Any

from rowprop.integrations.trl import select_answers

WORDS, GROUP = 6, 8
PAD, END = WORDS, WORDS + 1  # their tokens


def repeats(prompts: list[str], completion_ids: list[list[int]], **columns: Any) -> list[float]:
    """1 where an answer begins with the first word of its prompt, else 0."""
    pairs = zip(prompts, completion_ids, strict=True)
    return [float(ids[0] == int(prompt.split()[0])) for prompt, ids in pairs]


def make_trainer(folder: str, steps: int) -> Any:
    """A trainer of a decoder with two layers, whose words are numbers."""
    from datasets import Dataset
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, PrinterCallback, set_seed
    from trl import GRPOConfig, GRPOTrainer

    set_seed(0)
    words = Tokenizer(models.WordLevel({str(word): word for word in range(WORDS + 2)}, unk_token="0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token=str(PAD), eos_token=str(END))
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=WORDS + 2, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=16, pad_token_id=PAD, eos_token_id=END,
    ))  # fmt: skip
    arguments = GRPOConfig(
        folder, max_steps=steps, per_device_train_batch_size=64, num_generations=GROUP, max_completion_length=1,
        optim="sgd", learning_rate=0.1, lr_scheduler_type="constant", max_grad_norm=0.0, bf16=False, use_cpu=True,
        logging_steps=max(1, steps // 6), save_strategy="no", report_to="none", disable_tqdm=True, log_level="error",
    )  # fmt: skip
    prompts = Dataset.from_list([{"prompt": f"{a} {b}"} for a in range(WORDS) for b in range(WORDS)])
    trainer = GRPOTrainer(model, repeats, arguments, prompts, processing_class=tokenizer)
    trainer.remove_callback(PrinterCallback)  # the logs are printed side by side, below
    return trainer


def main(argv: list[str] | None = None) -> None:
    """Train twice; a line for each log, and the largest difference of the weights."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--steps", type=int, default=96, help="updates (default 96)")
    steps = parser.parse_args(argv).steps
    trainers: list[Any] = []
    for selects in (False, True):
        with tempfile.TemporaryDirectory() as folder:
            trainer = make_trainer(folder, steps)
            if selects:
                select_answers(trainer)  # the one line
            trainer.train()
        trainers.append(trainer)
    plain, ours = trainers
    print("step  reward  the same, plain  answers in the update")
    for log, plain_log in zip(ours.state.log_history, plain.state.log_history, strict=True):
        if "reward" in log:
            print(f"{log['step']:4}  {log['reward']:6.2f}  {plain_log['reward']:15.2f}  {log['forwarded']:21.0%}")
    pairs = zip(plain.model.parameters(), ours.model.parameters(), strict=True)
    apart = max(float((a - b).abs().max()) for a, b in pairs)
    print(f"The weights differ by {apart:.0e}.")


if __name__ == "__main__":
    main()
