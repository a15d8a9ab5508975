"""Updates of TRL's GRPOTrainer, plain and after `select_answers`: time, FLOPs and gradients; and many ranks.

The model is a Llama from a config, with weights drawn at random; a batch is 40 answers in groups of 8, with prompts of
32 tokens and answers of 64. In the first table a share of the groups has no advantage. In the second all answers have
one, their ratios are one per answer, and a share of the answers is clipped. In each round the plain trainer and the one
that selects make one step (forward, backward, AdamW) after the other on the same model and batch, in an order that
turns from round to round. A time is the processor's for this process. A ratio is that of a step that selects to the
plain one beside it: the median over the rounds, with the quartiles. FLOPs are those of forward and backward, and are
counted. Gradients are compared entry by entry; the largest difference is told as a share of the parameter's largest
entry.

`--ranks 2,4 --steps 200` trains a tiny decoder in so many processes instead, under DDP with gloo, with and without the
line. Rewards are such that each rank has micro-batches without an answer left. It prints how many, and how far the
weights of both trainings, and of the ranks, are apart.

It needs the packages of `nox -s integrations`: run it with `.nox/integrations/bin/python`.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import socket
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import rowprop
from bench_step import RESULTS, device_stem, save, setting, spread
from rowprop.integrations.trl import select_answers
from zeros import words

VOCABULARY = 64
SIZES = {"answers": 40, "group": 8, "prompt": 32, "answer": 64, "width": 192, "depth": 4, "vocabulary": 2048}
TITLES = {"advantage": "Answers without advantage", "clipped": "Answers that are clipped in all their tokens"}
SHARES = {"advantage": (0.0, 0.2, 0.4, 0.6, 0.8, 1.0), "clipped": (0.0, 0.3, 0.6, 0.9)}
HEADER = (
    "| share | kept | FLOPs, plain | time, plain | FLOPs | time (quartiles) | gradients differ by |\n"
    + "|---" * 7
    + "|\n"
)
STEPS = {"max_steps": 200, "per_device_train_batch_size": 4, "num_generations": 4, "max_completion_length": 6}


def trainer_of(model: Any, reward: Callable[..., Any], folder: Path, vocabulary: int = VOCABULARY, **more: Any) -> Any:
    """A GRPOTrainer on the CPU for prompts of tokens, with a tokenizer whose words are numbers."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(3, 7, (64,), generator=generator).tolist()
    texts = [" ".join(f"w{int(t)}" for t in torch.randint(3, vocabulary, (n,), generator=generator)) for n in lengths]
    data = Dataset.from_list([{"prompt": text} for text in texts])
    quiet = {"report_to": [], "save_strategy": "no", "disable_tqdm": True, "logging_steps": 1}
    plain = {"use_cpu": True, "bf16": False, "gradient_checkpointing": False, "optim": "sgd"}
    config = GRPOConfig(output_dir=str(folder), **quiet | plain | more)
    tokenizer = words(vocabulary)
    return GRPOTrainer(model, reward, config, train_dataset=data, eval_dataset=data, processing_class=tokenizer)


def llama(vocabulary: int = VOCABULARY, width: int = 32, depth: int = 2, **more: Any) -> Any:
    """A Llama from a config; always the same weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=vocabulary, hidden_size=width, intermediate_size=2 * width, num_hidden_layers=depth,
        num_attention_heads=4, num_key_value_heads=2, pad_token_id=1, eos_token_id=2, **more,
    ))  # fmt: skip


# --- one process ------------------------------------------------------------------------------------------------------


def batch_of(kind: str, share: float) -> dict[str, Tensor]:
    """A batch as TRL makes it, of which a share of the answers has no advantage, or is clipped."""
    answers, group, vocabulary = SIZES["answers"], SIZES["group"], SIZES["vocabulary"]
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, vocabulary, (answers, SIZES["prompt"] + SIZES["answer"]), generator=generator)
    prompts, completions = ids.split([SIZES["prompt"], SIZES["answer"]], 1)
    advantages = torch.randn(answers, generator=generator)
    left = torch.arange(answers) < round(share * answers)
    if kind == "advantage":
        advantages[: round(share * answers / group) * group] = 0
    return {
        "prompt_ids": prompts, "prompt_mask": torch.ones_like(prompts), "completion_ids": completions,
        "completion_mask": torch.ones_like(completions), "num_items_in_batch": torch.tensor(completions.numel()),
        "advantages": advantages, "clipped": left,
    }  # fmt: skip


def steps_of(kind: str, share: float, folder: Path) -> dict[str, tuple[Any, Callable[[], Tensor]]]:
    """By way, the trainer and a function that computes the loss of the batch."""
    model = llama(SIZES["vocabulary"], SIZES["width"], SIZES["depth"])
    batch, found = batch_of(kind, share), {}
    clipped = batch.pop("clipped")
    for way in ("plain", "select_answers"):
        level = {"importance_sampling_level": "sequence"} if kind == "clipped" else {}
        trainer = trainer_of(model, lambda completion_ids, **_: [0.0] * len(completion_ids), folder, **level)
        trainer.current_gradient_accumulation_steps = 1
        model.train()
        if kind == "clipped" and "old_per_token_logps" not in batch:
            ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
            with torch.no_grad():
                logps, *_ = trainer._get_per_token_logps_and_entropies(
                    model, ids, torch.ones_like(ids), SIZES["answer"]
                )
            # A ratio of 2 where the advantage is positive, and of 1/2 where it is negative.
            side = torch.where(batch["advantages"] > 0, 1.0, -1.0) * clipped * torch.log(torch.tensor(2.0))
            batch["old_per_token_logps"] = logps - side[:, None]
        if way != "plain":
            trainer.rowprop = select_answers(trainer)
        found[way] = trainer, lambda trainer=trainer: trainer.compute_loss(model, batch)
    return found


def measured(kind: str, share: float, rounds: int, folder: Path) -> dict[str, Any]:
    """A row of the table."""
    ways = steps_of(kind, share, folder)
    model, selecting = ways["plain"][0].model, ways["select_answers"][0]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
    flops, grads, times_s = dict[str, int](), dict[str, list[Tensor]](), {way: list[float]() for way in ways}
    for way, (_, loss) in ways.items():
        with rowprop.cost.count_flops() as counted:
            loss().backward()
        assert not counted.uncounted, counted.uncounted
        flops[way] = counted.total_flops
        grads[way] = [parameter.grad.clone() for parameter in model.parameters()]
        optimizer.zero_grad()
    kept = selecting.rowprop.num_kept
    start = {name: value.clone() for name, value in model.state_dict().items()}
    for number in range(rounds + 1):
        for way in list(ways)[:: 1 if number % 2 else -1]:
            begin_s = time.process_time()
            ways[way][1]().backward()
            optimizer.step()
            optimizer.zero_grad()
            times_s[way].append(time.process_time() - begin_s)
            model.load_state_dict(start)  # or the clipped answers would move away from the clip
    pairs = zip(times_s["select_answers"][1:], times_s["plain"][1:], strict=True)  # the first round warms up
    off = max(
        float((a - b).abs().max() / a.abs().max().clamp_min(1e-30))
        for a, b in zip(grads["plain"], grads["select_answers"], strict=True)
    )
    return {
        "kind": kind, "share": share, "kept": kept, "plain_flops": flops["plain"],
        "flops_ratio": flops["select_answers"] / flops["plain"], "plain_s": spread(times_s["plain"][1:]),
        "time_ratio": spread([ours / plain for ours, plain in pairs]), "gradients_differ_by": off,
    }  # fmt: skip


def table(rows: list[dict[str, Any]]) -> str:
    """The rows of one kind to read; the page has the same."""
    lines = [HEADER]
    for row in rows:
        ratio = row["time_ratio"]
        lines.append(
            f"| {row['share']:.0%} | {row['kept']} of {SIZES['answers']} | {row['plain_flops'] / 1e9:.1f} GFLOPs "
            f"| {1000 * row['plain_s']['median']:.0f} ms | {row['flops_ratio']:.2f} "
            f"| {ratio['median']:.2f} ({ratio['q1']:.2f} to {ratio['q3']:.2f}) | {row['gradients_differ_by']:.0e} |\n"
        )
    return "".join(lines)


# --- ranks ------------------------------------------------------------------------------------------------------------


def some_groups(prompts: list[str], completion_ids: list[list[int]], **columns: Any) -> list[float]:
    """The answers to prompts of an odd length are all right: none of them has an advantage."""
    answers = zip(prompts, completion_ids, strict=True)
    return [float(len(p.split()) % 2 or sum(token % 3 == 0 for token in ids)) for p, ids in answers]


def train_twice(rank: int, ranks: int, steps: int, port: int) -> None:
    """In one of the processes: train plainly, and after `select_answers`, and compare."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    found: list[tuple[Any, list[int]]] = []
    for selects in (False, True):
        with tempfile.TemporaryDirectory() as folder:
            trainer = trainer_of(
                llama(), some_groups, Path(folder), ddp_backend="gloo", learning_rate=0.02, max_grad_norm=0.0,
                lr_scheduler_type="constant", loss_type="dapo", gradient_accumulation_steps=2, log_level="error",
                **STEPS | {"max_steps": steps, "logging_steps": steps},
            )  # fmt: skip
            forwarded: list[int] = []
            if selects:
                handle, step = select_answers(trainer), trainer.training_step

                def counting(*args: Any, step: Any = step, handle: Any = handle, into: Any = forwarded) -> Any:
                    loss = step(*args)
                    into.append(handle.num_forwarded)
                    return loss

                trainer.training_step = counting
            torch.manual_seed(rank)
            trainer.train()
            found.append((trainer, forwarded))
    (plain, _), (ours, forwarded) = found
    flat = [torch.cat([p.detach().flatten() for p in trainer.model.parameters()]) for trainer in (plain, ours)]
    everywhere = ours.accelerator.gather(flat[1][None])
    empty = ours.accelerator.gather(torch.tensor([forwarded.count(0)])).tolist()
    alone = ours.accelerator.gather(torch.tensor([forwarded]))
    if rank == 0:
        moved = float((torch.cat([p.detach().flatten() for p in llama().parameters()]) - flat[0]).abs().max())
        some = int(((alone == 0).any(0) & (alone > 0).any(0)).sum())
        print(
            f"{ranks} ranks, {ours.state.global_step} steps: of {len(forwarded)} micro-batches, the ranks kept nothing "
            f"in {empty}, in {some} while another kept some. The weights moved by {moved:.2f}. They differ from the "
            f"plain trainer's by {float((flat[0] - flat[1]).abs().max()):.0e}, and between the ranks by "
            f"{float((everywhere - everywhere[0]).abs().max()):.0e}.",
            flush=True,
        )


def on_ranks(ranks: int, steps: int, limit_s: float = 1800) -> None:
    """Train in so many processes; a process that hangs is stopped, and told."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=train_twice, args=(rank, ranks, steps, port)) for rank in range(ranks)]
    for process in processes:
        process.start()
    end_s = time.monotonic() + limit_s
    for process in processes:
        process.join(max(0.0, end_s - time.monotonic()))
    stuck = [process for process in processes if process.is_alive()]
    for process in stuck:
        process.kill()
    if stuck or any(process.exitcode for process in processes):
        raise SystemExit(f"{len(stuck)} of {ranks} ranks hung; exit codes {[p.exitcode for p in processes]}.")


def main() -> None:
    """Measure, print, and write JSON and markdown; or train on ranks."""
    doc = __doc__ or ""
    parser = argparse.ArgumentParser(description=doc.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=15, help="steps of each way (default %(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads (default %(default)s)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the results (default %(default)s)")
    parser.add_argument("--ranks", help="train in so many processes instead, e.g. 2,4")
    parser.add_argument("--steps", type=int, default=200, help="of the training on ranks (default %(default)s)")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    if args.ranks:
        for ranks in args.ranks.split(","):
            on_ranks(int(ranks), args.steps)
        return
    import transformers
    import trl

    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as folder:
        rows = [measured(kind, share, args.rounds, Path(folder)) for kind in SHARES for share in SHARES[kind]]
    command = " ".join(["python benchmarks/grpo_update.py", *sys.argv[1:]])
    versions = {"dtype": "float32", "trl": trl.__version__, "transformers": transformers.__version__}
    about = setting(torch.device("cpu"), args.threads, **versions, **{key: str(size) for key, size in SIZES.items()})
    told = f"`{command}`: {', '.join(f'{key} {value}' for key, value in about.items())}"
    parts = [f"## {TITLES[kind]}\n\n{table([row for row in rows if row['kind'] == kind])}" for kind in SHARES]
    text = "\n".join(["# Updates of TRL's GRPOTrainer", "", told, "", doc.partition("\n\n")[2].strip(), "", *parts])
    print(text)
    save(args.out, f"grpo-update-{device_stem(torch.device('cpu'), args.threads)}",
         {"command": command, "setting": about, "rows": rows}, text)  # fmt: skip


if __name__ == "__main__":
    main()
