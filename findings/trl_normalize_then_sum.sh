#!/usr/bin/env bash
# TRL 1.16.0, GRPOTrainer with multi_objective_aggregation="normalize_then_sum", transformers 5.23.0, torch 2.13.0.
#
# One would guess: if all answers to each prompt have the same reward, nothing can be learned, so every advantage is 0.
# What happens: each reward minus its group's mean leaves a rounding error of float32 (eight rewards of 0.7: 6e-8). The
# division by the group's deviation plus 1e-4 makes 6e-4 of it. The sum is then divided by its deviation over the batch
# plus 1e-4. In a batch in which no group has different rewards, that deviation is the rounding error itself, so the
# advantages are as large as those of a group that is half right: 0.7 here. The step is an ordinary step along noise,
# and `frac_reward_zero_std`, the logged share of groups without a difference, says 0.
# It matters where rewards saturate late in a training, and with rewards that are not sums of few powers of 2.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q torch==2.13.0 trl==1.16.0 transformers==5.23.0
cat >"$folder/probe.py" <<'PROBE'
import sys

import torch
import trl
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed

set_seed(0)
words = Tokenizer(models.WordLevel({str(word): word for word in range(32)}, unk_token="0"))
words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="30", eos_token="31")
sizes = dict(vocab_size=32, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4)
model = LlamaForCausalLM(LlamaConfig(**sizes, pad_token_id=30, eos_token_id=31))


def reward(prompts, **given):  # one prompt is always worth 0.7, the other always 0
    return [0.7 if prompt == "7" else 0.0 for prompt in prompts]


arguments = trl.GRPOConfig(
    sys.argv[1], max_steps=1, per_device_train_batch_size=16, num_generations=8, max_completion_length=4,
    multi_objective_aggregation="normalize_then_sum", report_to="none", save_strategy="no", use_cpu=True, bf16=False,
)
prompts = Dataset.from_list([{"prompt": "7"}, {"prompt": "3"}])
trainer = trl.GRPOTrainer(model, reward, arguments, prompts, processing_class=tokenizer)
trainer.train()
log, largest = trainer.state.log_history[0], max(map(abs, trainer._logs["advantages"]))
print(f"trl {trl.__version__}. Expected: advantages of 0. Seen: up to {largest:.2f}, "
      f"frac_reward_zero_std {log['frac_reward_zero_std']}")
sys.exit(0 if largest > 0.5 else 1)
PROBE
"$folder/env/bin/python" -W ignore "$folder/probe.py" "$folder/run" | tail -1
