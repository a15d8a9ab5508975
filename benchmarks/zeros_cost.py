"""What `skip_zeros` and `find_zeros` cost where nothing is zero, and from which share of live rows on slicing pays.

The decoders are those of `bench_tokens.py`, with a plain loss over all tokens. In each round the plain backward and the
others come one after the other, in an order that turns from round to round; times are the processor's for this process,
over the plain one's beside it: medians over the rounds, with the quartiles.

- `look`: the pass over the gradient of the logits by itself, over the backward;
- `skip_zeros`: the backward with the line, all tokens live, over the backward;
- `find_zeros`: a whole step inside of it, over the step;
- the other lines: the backward with the line, of which that share of whole sequences, or of tokens, is live.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

import torch
from torch import Tensor

import rowprop
from bench_step import RESULTS, save, setting, spread
from bench_tokens import CPU, MODELS, token_losses
from rowprop.backprop import skip

SHARES = (0.5, 0.7, 0.8, 0.9)


def masks(size: tuple[int, int], shares: Sequence[float]) -> dict[str, Tensor]:
    """For each line of break-even the tokens that count, (N, T)."""
    found: dict[str, Tensor] = {}
    for share in shares:
        tokens = torch.zeros(size[0] * size[1], dtype=torch.bool)
        tokens[torch.randperm(tokens.numel())[: round(share * tokens.numel())]] = True
        rows = torch.zeros(size, dtype=torch.bool)
        rows[: round(share * size[0])] = True
        found |= {f"{rows.any(1).float().mean():.0%} of the sequences live": rows}
        found |= {f"{share:.0%} of the tokens live": tokens.view(size)}
    return found


def measured(name: str, rounds: int, shares: Sequence[float]) -> dict[str, dict[str, float]]:
    """The ratios of one decoder."""
    size = CPU[name]
    torch.manual_seed(0)
    model = MODELS[name](size)
    ids = torch.randint(size.vocabulary, (2 * size.sequences, size.steps + 1))
    batch = ids[:, :-1], ids[:, 1:]
    handle = rowprop.skip_zeros(model)
    everything = torch.ones(batch[1].shape, dtype=torch.bool)
    cases = {"skip_zeros": everything, **masks((2 * size.sequences, size.steps), shares)}
    ratios: dict[str, list[float]] = {}

    def backward(mask: Tensor, skips: bool) -> tuple[float, float]:
        model.zero_grad()
        begin_s = time.process_time()
        loss = (token_losses(model, batch) * mask).sum() / mask.sum()
        between_s = time.process_time()
        with nullcontext() if skips else handle.paused():
            loss.backward()
        return time.process_time() - between_s, time.process_time() - begin_s

    grad = torch.randn(*batch[1].shape, size.vocabulary)
    for number in range(rounds + 1):
        for case, mask in cases.items():
            order = (False, True) if number % 2 else (True, False)
            taken = {skips: backward(mask, skips) for skips in order}
            ratios.setdefault(case, []).append(taken[True][0] / taken[False][0])
        begin_s = time.process_time()
        skip.live_entries(grad, (0, 1))
        ratios.setdefault("look", []).append((time.process_time() - begin_s) / taken[False][0])
        begin_s = time.process_time()
        with rowprop.find_zeros(model):
            backward(everything, False)
        ratios.setdefault("find_zeros", []).append((time.process_time() - begin_s) / taken[False][1])
    return {case: spread(values[1:]) for case, values in ratios.items()}


def main() -> None:
    """Measure, print, and write JSON and markdown; every share is sliced, whatever `skip_zeros` would do."""
    doc = __doc__ or ""
    parser = argparse.ArgumentParser(description=doc.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=7, help="default %(default)s")
    parser.add_argument("--workloads", default="gpt,llama", help="comma-separated (default %(default)s)")
    parser.add_argument("--shares", type=float, nargs="*", default=SHARES, help="live shares (default %(default)s)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the results (default %(default)s)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    skip.MOST = 0.95
    about, found = setting(torch.device("cpu"), 1), dict[str, dict[str, dict[str, float]]]()
    command = " ".join(["python benchmarks/zeros_cost.py", *sys.argv[1:]])
    page = f"# What looking for zeros costs\n\n`{command}`: {', '.join(f'{k} {v}' for k, v in about.items())}\n\n{doc}"
    for name in args.workloads.split(","):
        page += f"\n## {name}\n\n{CPU[name]}, twice the sequences\n\n| | ratio (quartiles) |\n|---|---|\n"
        found[name] = measured(name, args.rounds, args.shares)
        for case, ratio in found[name].items():
            page += f"| {case} | {ratio['median']:.3f} ({ratio['q1']:.3f} to {ratio['q3']:.3f}) |\n"
        save(args.out, "zeros-cost-cpu-1-threads", {"setting": about, "ratios": found}, page)
    print(page)


if __name__ == "__main__":
    main()
