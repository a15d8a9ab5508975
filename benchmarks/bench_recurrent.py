"""Training steps of recurrent layers: ways to pay for some rows of a kernel that remembers its forward in secret.

A fused LSTM's backward needs a workspace that is opaque and of all rows. In each round, for each keep, every variant
makes one step after the others on the same model, batch and rows, in an order that turns from round to round:

- `full`: the plain loop over all rows, which the others are measured against;
- `sliced`: `rowprop.pick`; the layer's forward runs again on the kept rows;
- `dense`: `rowprop.pick` without a rule for the layer, whose backward then runs on all rows;
- `unfused`: `rowprop.pick` with the layer made of ordinary ops, which have rules (`full unfused` is its plain loop);
- `recompute`: a forward without a graph to score, a second one of the kept rows.

A ratio is a variant's time (forward and backward) over the `full` step's beside it: the median over the rounds, with
the quartiles. The limit is (F + kB)/(F + B), with F and B the forward and backward of that `full` step and k = K/N.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bench_step import (
    RESULTS,
    Batch,
    Bench,
    Loss,
    Step,
    device_stem,
    draw,
    full,
    num_kept,
    recompute,
    save,
    setting,
    sliced,
    spread,
)
from rowprop.backprop.rules.registry import RULES, op_name

KEEPS = (0.1, 0.25, 0.5, 0.75)
FUSED = ("mkldnn_rnn_layer_backward", "_cudnn_rnn_backward")
Around = Callable[[], AbstractContextManager[Any]]


class Tagger(nn.Module):
    """A class for every token of 512."""

    def __init__(self, kind: str, width: int, layers: int) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(512, width), nn.Linear(width, 32)
        self.rnn = getattr(nn, kind)(width, width, num_layers=layers, batch_first=True)

    def forward(self, tokens: Tensor) -> Tensor:
        """(N, T) -> (N, T, 32)."""
        return self.head(self.rnn(self.embed(tokens))[0])


@contextmanager
def without_rules() -> Generator[None]:
    """No rule for fused recurrent layers."""
    taken = {op: RULES.pop(op) for op in list(RULES) if op_name(op) in FUSED}
    try:
        yield
    finally:
        RULES.update(taken)


@contextmanager
def unfused() -> Generator[None]:
    """Recurrent layers of ordinary ops, on either device."""
    before = torch.backends.mkldnn.set_flags(_enabled=False)
    try:
        with torch.backends.cudnn.flags(enabled=False):
            yield
    finally:
        torch.backends.mkldnn.set_flags(_enabled=before[0])


VARIANTS: dict[str, tuple[Loss, Around]] = {
    "full": (full, nullcontext),
    "sliced": (sliced, nullcontext),
    "dense": (sliced, without_rules),
    "full unfused": (full, unfused),
    "unfused": (sliced, unfused),
    "recompute": (recompute, nullcontext),
}
"""The loss to backpropagate, and what to do around the step."""


def measure(bench: Bench, rounds: int, warmup: int) -> dict[tuple[float, str], list[Step]]:
    """For each keep and variant its steps, one per round; the variants of one keep follow each other."""
    n, device = bench.batch[0].shape[0], bench.batch[0].device
    steps: dict[tuple[float, str], list[Step]] = {(keep, name): [] for keep in KEEPS for name in VARIANTS}
    names = list(VARIANTS)
    for number in range(warmup + rounds):
        turn = number % len(names)
        for keep in KEEPS:
            rows = draw(n, keep, device)
            for name in names[turn:] + names[:turn]:
                loss, around = VARIANTS[name]
                with around():
                    taken = bench.step(loss, rows)
                if number >= warmup:
                    steps[keep, name].append(taken)
    return steps


def summarize(name: str, n: int, steps: dict[tuple[float, str], list[Step]]) -> dict[str, Any]:
    """Every figure of one workload."""
    every_plain = [step for keep in KEEPS for step in steps[keep, "full"]]
    rows: list[dict[str, Any]] = []
    for (keep, variant), taken in steps.items():
        if variant == "full":
            continue
        plain, kept = steps[keep, "full"], num_kept(n, keep)
        pairs = list(zip(taken, plain, strict=True))
        rows.append({
            "keep": keep, "kept": kept, "variant": variant,
            "gradient_s": spread([t.gradient_s for t in taken]),
            "ratio": spread([t.gradient_s / p.gradient_s for t, p in pairs]),
            "backward_ratio": spread([t.backward_s / p.backward_s for t, p in pairs]),
            "limit": spread([(p.forward_s + kept / n * p.backward_s) / p.gradient_s for p in plain]),
        })  # fmt: skip
    phases = {
        f"{phase}_s": spread([getattr(s, f"{phase}_s") for s in every_plain]) for phase in ("forward", "backward")
    }
    return {"workload": name, "num_rows": n, "rounds": len(every_plain) // len(KEEPS), **phases, "variants": rows}


def markdown(result: dict[str, Any]) -> str:
    """The same figures to read."""
    about = ", ".join(f"{key} {value}" for key, value in result["setting"].items())
    lines = ["# Recurrent layers", "", f"`{result['command']}`: {about}", ""]
    lines += (__doc__ or "").partition("\n\n")[2].strip().splitlines()
    for w in result["workloads"]:
        f, b = (1000 * w[f"{phase}_s"]["median"] for phase in ("forward", "backward"))
        lines += [
            "", f"## {w['workload']}: N = {w['num_rows']}, {w['sizes']}", "",
            f"Full step: F {f:.1f} ms, B {b:.1f} ms; medians of {w['rounds']} steps of each kind.", "",
            "| keep | K | variant | ratio (quartiles) | limit | backward over full's |", "|---|---|---|---|---|---|",
        ]  # fmt: skip
        for v in w["variants"]:
            ratio = f"{v['ratio']['median']:.3f} ({v['ratio']['q1']:.3f} to {v['ratio']['q3']:.3f})"
            lines.append(
                f"| {v['keep']} | {v['kept']} | {v['variant']} | {ratio} | {v['limit']['median']:.3f} "
                f"| {v['backward_ratio']['median']:.3f} |"
            )
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure, print, and write JSON and markdown."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", default="cpu", help="cpu (default) or cuda")
    parser.add_argument("--kinds", default="LSTM,GRU", help="comma-separated, of torch.nn (default %(default)s)")
    parser.add_argument("--rows", type=int, default=64, help="N (default %(default)s)")
    parser.add_argument("--steps", type=int, default=32, help="steps in time (default %(default)s)")
    parser.add_argument("--width", type=int, default=256, help="of inputs and states (default %(default)s)")
    parser.add_argument("--layers", type=int, default=2, help="(default %(default)s)")
    parser.add_argument("--rounds", type=int, default=30, help="steps of each variant (default %(default)s)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="CPU threads (default torch's)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the results (default %(default)s)")
    args = parser.parse_args()
    if args.rounds < 2:
        parser.error("--rounds must be at least 2 for quartiles")
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    device = torch.device(args.device)
    result: dict[str, Any] = {
        "command": " ".join(["python benchmarks/bench_recurrent.py", *sys.argv[1:]]),
        "setting": setting(device, args.threads, dtype="float32"),
        "workloads": [],
    }
    for kind in args.kinds.split(","):
        model = Tagger(kind, args.width, args.layers).to(device)
        batch: Batch = tuple(torch.randint(high, (args.rows, args.steps)).to(device) for high in (512, 32))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        summary = summarize(
            kind, args.rows, measure(Bench(model, batch, optimizer, nullcontext), args.rounds, warmup=3)
        )
        summary["sizes"] = f"{args.steps} steps, width {args.width}, {args.layers} layers"
        result["workloads"].append(summary)
        print(markdown({**result, "workloads": [summary]}).partition("## ")[2], flush=True)

    save(args.out, f"recurrent-{device_stem(device, args.threads)}", result, markdown(result))


if __name__ == "__main__":
    main()
