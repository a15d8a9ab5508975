"""transformers' own tensor parallelism on the CPU, in two processes: ``python tensor_parallel_llama.py FOLDER``.

Each rank writes RANK.json into the folder: the largest difference from a model that is not sharded, relative to its
largest gradient, and its share of the backward's FLOPs, where a quarter of the rows or of the tokens is kept.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy
from transformers.distributed import DistributedConfig

import rowprop
from rowprop.cost.flops import count_flops

N, T, V = 8, 8, 64
ROWS = torch.tensor([1, 5])
TOKENS = torch.rand(N, T - 1, generator=torch.Generator().manual_seed(3)) < 0.25


def dense(tensor: Any) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def losses_of(model: Any, ids: Tensor) -> Tensor:
    """Losses (N, T - 1) of the next tokens."""
    logits = dense(model(input_ids=ids).logits)[:, :-1]
    return cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none").view(N, T - 1)


def run(folder: str, rank: int) -> None:
    """Load the model of a folder by ``tp_plan="auto"``, and compare it with the whole one."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2")
    dist.init_process_group("gloo", rank=rank, world_size=2, init_method=f"file://{folder}/store")
    whole = transformers.LlamaForCausalLM.from_pretrained(folder)
    plan = DistributedConfig(tp_size=2, tp_plan="auto")
    sharded = transformers.LlamaForCausalLM.from_pretrained(folder, distributed_config=plan)
    ids = torch.randint(V, (N, T), generator=torch.Generator().manual_seed(1))
    figures: dict[str, Any] = {"sharded": sum(isinstance(p, DTensor) for p in sharded.parameters())}

    def backward(rows: Tensor | None, tokens: bool) -> int:
        sharded.zero_grad()
        losses = losses_of(sharded, ids) if tokens else losses_of(sharded, ids).mean(1)
        loss = (losses if rows is None else rowprop.pick(losses, rows)).mean()
        with count_flops() as counted:
            loss.backward()
        return sum(counted.by_op.values())

    for unit, rows in (("rows", ROWS), ("tokens", TOKENS)):
        whole.zero_grad()
        expected = losses_of(whole, ids) if unit == "tokens" else losses_of(whole, ids).mean(1)
        expected[rows].mean().backward()
        backward(None, unit == "tokens")  # DTensor learns of each op by running it once
        full = backward(None, unit == "tokens")
        with rowprop.watch() as report:
            figures[f"{unit}, share"] = backward(rows, unit == "tokens") / full
        pairs = zip(sharded.parameters(), whole.parameters(), strict=True)
        figures[unit] = max(float((dense(a.grad) - b.grad).abs().max() / b.grad.abs().max()) for a, b in pairs)
        figures[f"{unit}, densified"] = sorted(report.densified)
    Path(folder, f"{rank}.json").write_text(json.dumps(figures))  # lines of two processes can meet on one stdout
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=V, **sizes)).save_pretrained(sys.argv[1])
    other = os.fork()
    run(sys.argv[1], int(other == 0))
    sys.exit(other and os.waitstatus_to_exitcode(os.waitpid(other, 0)[1]))
