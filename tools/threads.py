"""Backwards in many threads at once, each of models of its own, against plain indexing in one thread.

Three of four backwards are those of layers that pieces of a batch go through apart, so that gradients of unlike rows
meet: a plain backward first, whose graph is kept, then that of a pick. The others are random programs.

``python tools/threads.py 5000`` makes 5,000 backwards in eight threads.
"""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import torch
from torch import Tensor, nn

from programs import KINDS, PROCESS_WIDE, Program, Take, backward, build, different, indexed, picked, plain

Job = Callable[[Take], "list[Tensor | None]"]
THREADS = 8
DEPTH = 4


def in_pieces(seed: int) -> Job:
    """A model of its own. Pieces of its batch go through layers apart, and gradients of their rows meet."""
    p = Program(seed, indexed)
    p.generator.manual_seed(seed)
    layers = [p.module(nn.Linear, size, 9 - size) for size in (5, 4) * DEPTH]
    x, rows = p.randn(64, 5), torch.randperm(64, generator=p.generator)[:16]

    def run(take: Take) -> list[Tensor | None]:
        h = x
        for a, b in zip(layers[::2], layers[1::2], strict=True):
            h = torch.cat([b(piece) for piece in a(h).tanh().chunk(4)])
        losses = h.square().sum(1)
        for leaf in p.leaves:
            leaf.grad = None
        losses.sum().backward(retain_graph=True)
        take(losses, rows).mean().backward()
        return [leaf.grad for leaf in p.leaves]

    return run


def program(seed: int) -> Job | None:
    """A random program without what torch has one of for all threads: a generator, some modes."""
    first = plain(seed, without={f"{number}: {name}" for number in range(9) for name in KINDS["random numbers"]})
    if first is None or first[0].ending in PROCESS_WIDE:
        return None
    left_out = first[0].left_out
    return lambda take: backward(build(seed, take, left_out))


def work(jobs: list[tuple[str, Job, list[Tensor | None]]], begin: Barrier) -> list[str]:
    faults = list[str]()
    begin.wait()
    for name, job, expected in jobs:
        try:
            fault = different(expected, job(picked))
        except Exception as error:
            fault = f"{type(error).__name__}: {error}"
        if fault is not None:
            faults.append(f"{name}: {fault}")
    return faults


def run(backwards: int) -> list[str]:
    jobs = list[tuple[str, Job, list[Tensor | None]]]()
    seed = 0
    while len(jobs) < backwards:
        for name, job in (("pieces", in_pieces(seed)), ("program", None if seed % 3 else program(seed))):
            if job is not None:
                jobs.append((f"{name} {seed}", job, [None if x is None else x.clone() for x in job(indexed)]))
        seed += 1
    jobs, before, begin = jobs[:backwards], sys.getswitchinterval(), Barrier(THREADS)
    sys.setswitchinterval(1e-5)  # threads take turns within a backward
    try:
        with ThreadPoolExecutor(THREADS) as pool:
            parts = [pool.submit(work, jobs[place::THREADS], begin) for place in range(THREADS)]
            return [fault for part in parts for fault in part.result()]
    finally:
        sys.setswitchinterval(before)


if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    begun, faults = time.perf_counter(), run(backwards := int(sys.argv[1]))
    print(*faults[:20], sep="\n")
    ended = f"{len(faults)} faults; {time.perf_counter() - begun:.0f} s"
    print(f"torch {torch.__version__}: {backwards} backwards in {THREADS} threads, {ended}")
    sys.exit(bool(faults))
