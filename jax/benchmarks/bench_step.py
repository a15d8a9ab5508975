"""A step of the kept rows beside the plain step, the two-forward way and the limit (F + kB) / (F + B), on one thread.

The limit is that of FLOPs. What XLA's own programs take stands beside it: the forward of all rows, and the plain step
of K rows alone less their forward. Of K rows XLA may take more than their share, and of a forward more than its FLOPs.

``python benchmarks/bench_step.py`` prints a table in Markdown. Each network is compiled and timed in processes of its
own, whose figures differ by more than those of one process; the medians over them stand beside the lowest and highest.
In a process rounds are interleaved, each in an order of its own, and times are medians of CPU seconds.

XLA's scheduler for many threads begins what waits for nothing early, and keeps it in memory; one thread does without.
``XLA_FLAGS=--xla_cpu_enable_concurrency_optimized_scheduler=true`` before the command brings it back.
XLA asks for new memory in each call, and the system clears it page by page, as long as glibc gives back what is freed.
``MALLOC_ARENA_MAX=1 MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=10000000000`` before the command keeps it, in every way
that is timed; with an arena for each thread, glibc would still give back what is larger than 64 MB.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import statistics
import sys
import time
from pathlib import Path

FLAGS = "--xla_cpu_enable_concurrency_optimized_scheduler=false --xla_cpu_multi_thread_eigen=false"
os.environ["XLA_FLAGS"] = f"{FLAGS} {os.environ.get('XLA_FLAGS', '')}"
os.environ["OMP_NUM_THREADS"] = "1"
sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "tests")]

import jax  # noqa: E402

import rowprop_jax  # noqa: E402
from flops import count_flops  # noqa: E402
from networks import cnn, gpt, lstm, mlp, vit  # noqa: E402

KEEPS = 0.1, 0.25, 0.5
NETWORKS = {
    "MLP, N = 512": lambda: mlp(512, width=1024, inputs=512, depth=4),
    "MLP, N = 1024": lambda: mlp(1024, width=768, inputs=768, depth=3),  # the sizes of the benchmark for PyTorch
    "CNN, N = 64": lambda: cnn(64, width=64, side=32),
    "ViT, N = 48": lambda: vit(48, width=192, side=32, depth=4, heads=3),
    "ViT, N = 64": lambda: vit(64, width=192, side=32, depth=4, heads=3),  # XLA has other kernels from 4,096 tokens
    "GPT, N = 32": lambda: gpt(32, width=192, length=64, vocabulary=512, depth=4, heads=3),
    "LSTM, N = 128": lambda: lstm(128, width=256, inputs=128, length=32),
}
COLUMNS = (
    "network, keep", "FLOPs over F + kB", "step over plain", "its limit", "over the limit", "lowest, highest",
    "over XLA's own parts", "two forwards over plain", "plain step of K rows over plain (share)",
)  # fmt: skip


def programs(network):
    """The forward and the plain step; for each keep the sliced step, two forwards, and both of K rows alone."""
    losses_fn, params, batch = network()

    def forward(p, b, rows):
        return losses_fn(p, jax.tree.map(lambda a: a[rows], b))

    def of_rows(p, b, rows):
        return jax.grad(lambda p: forward(p, b, rows).mean())(p)

    found = {"forward": jax.jit(losses_fn), "plain": jax.jit(jax.grad(lambda p, b: losses_fn(p, b).mean()))}
    for keep in KEEPS:
        found["sliced", keep] = jax.jit(rowprop_jax.value_and_grad(losses_fn, rowprop_jax.top_k, keep=keep))

        def alone(p, b, keep=keep):
            return of_rows(p, b, slice(kept(keep, b)))

        def recompute(p, b, keep=keep):
            return of_rows(p, b, jax.lax.top_k(losses_fn(p, b), kept(keep, b))[1])

        def forward_alone(p, b, keep=keep):
            return forward(p, b, slice(kept(keep, b)))

        found["recompute", keep], found["alone", keep] = jax.jit(recompute), jax.jit(alone)
        found["forward", keep] = jax.jit(forward_alone)
    return {name: function.lower(params, batch).compile() for name, function in found.items()}, (params, batch)


def kept(keep, batch):
    return -int(-keep * len(jax.tree.leaves(batch)[0]) // 1)


def timed(compiled, inputs):
    start = time.process_time()
    jax.block_until_ready(compiled(*inputs))
    return time.process_time() - start


def medians(compiled, inputs, rounds):
    for function in compiled.values():
        timed(function, inputs)
    taken, order, shuffle = {name: [] for name in compiled}, list(compiled), random.Random(0).shuffle
    for _ in range(rounds):
        shuffle(order)  # what ran before leaves its memory to what runs now
        for name in order:
            taken[name].append(timed(compiled[name], inputs))
    return {name: statistics.median(times) for name, times in taken.items()}


def measured(name, rounds):
    """For each keep the figures of ``COLUMNS``, with the share at the end."""
    compiled, inputs = programs(NETWORKS[name])
    flops = {way: count_flops(function) for way, function in compiled.items()}
    seconds = medians(compiled, inputs, rounds)
    num_rows = len(jax.tree.leaves(inputs[1])[0])
    rows = []
    for keep in KEEPS:
        share = kept(keep, inputs[1]) / num_rows
        limit = (flops["forward"] + share * (flops["plain"] - flops["forward"])) / flops["plain"]
        sliced, twice, alone = (seconds[way, keep] / seconds["plain"] for way in ("sliced", "recompute", "alone"))
        parts = (seconds["forward"] + seconds["alone", keep] - seconds["forward", keep]) / seconds["plain"]
        ratio = flops["sliced", keep] / flops["plain"] / limit
        rows.append([ratio, sliced, limit, sliced / limit, sliced / parts, twice, alone, share])
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--network", default="", help="the beginning of one network's name")
    arguments = parser.parse_args()
    cpu = next(
        (line.split(": ")[1] for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line), "?"
    )
    memory = "kept" if os.environ.get("MALLOC_ARENA_MAX") == "1" else "new in each call"
    print(f"One thread of {cpu}, jax {jax.__version__}, float32, memory {memory}, medians of ", end="")
    print(f"{arguments.processes} processes of {arguments.rounds} interleaved rounds.\n")
    print("|", " | ".join(COLUMNS), "|")
    print("|---" * len(COLUMNS) + "|")
    names = [name for name in NETWORKS if name.startswith(arguments.network)]
    jobs = [(name, arguments.rounds) for _ in range(arguments.processes) for name in names]
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        found = pool.starmap(measured, jobs, chunksize=1)
    for at, name in enumerate(names):
        for keep, rows in zip(KEEPS, zip(*found[at :: len(names)], strict=True), strict=True):
            flops, step, limit, over, parts, twice, alone, share = map(statistics.median, zip(*rows, strict=True))
            spread = [row[3] for row in rows]
            print(
                f"| {name}, {keep} | {flops:.3f} | {step:.3f} | {limit:.3f} | {over:.3f} "
                f"| {min(spread):.2f}, {max(spread):.2f} | {parts:.3f} | {twice:.3f} | {alone:.3f} ({share:.3f}) |"
            )


if __name__ == "__main__":
    main()
