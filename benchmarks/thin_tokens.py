"""Tokens that leave a decoder's backward at random, beside rows: the variance that this adds, its cost, a fine-tuning.

The decoder has blocks of causal attention over bytes. It is trained here on WordNet's words and glosses, and then
asked: a row holds some words with their glosses, then one of these words again, and the answer is how its gloss begins.
Only the answer's bytes, a tenth of the row, have a loss.

`--variance`: the decoder as it was trained first. After 44 backwards that set the shares, 16 batches are drawn once
each. `added` is the mean of |drawn - exact|^2 over the parameters, over the variance of the exact gradient from batch
to batch; `FLOPs` those of the backward, and `time` that of forward and backward, over those of the exact backward below
`skip_zeros`, in turns. `answers` is the share of the bytes that have a loss.

`--train`: the fine-tuning, for as many steps by each method: `exact` is `rowprop.skip_zeros(model)`; `tokens` and
`rows` have `rowprop.thin` beside it; `cut` picks the answers with `attention="cut"`, which is biased. Every method of a
seed trains a copy of the same start on the same batches. The loss is that of answers in rows that were not trained on;
the difference is to the same seed's `exact`. Seconds are the processor's, of whole steps, methods in turns.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import rowprop
from bench_step import RESULTS, Transformer, device_stem, save, setting
from rowprop.app.compare.data import DEBIAN_WORDNET, WORDNET_FILES
from rowprop.files import write_whole

BYTES, TOKENS, ROWS, ANSWER = 128, 256, 12, 26
HELD_OUT = 2000  # entries that no training sees
BATCHES, SETTLING = 16, 44


def entries() -> list[str]:
    """``word: gloss`` of each synset, in a random order that is always the same."""
    found: list[str] = []
    for part in WORDNET_FILES:
        for line in (DEBIAN_WORDNET / part).read_text("ascii", "replace").splitlines():
            if not line.startswith("  "):
                about, _, gloss = line.partition("|")
                found.append(f"{about.split()[4].replace('_', ' ')}: {gloss.strip()}")
    order = cast("list[int]", torch.randperm(len(found), generator=torch.Generator().manual_seed(0)).tolist())
    return [found[i] for i in order]


def coded(text: str) -> Tensor:
    """A text's bytes."""
    return torch.tensor([min(ord(letter), BYTES - 1) for letter in text])


class Questions:
    """Rows of context, question and answer."""

    def __init__(self, lines: Sequence[str], seed: int) -> None:
        self.lines = [line for line in lines if len(line.partition(": ")[2]) >= ANSWER and len(line) < 96]
        self.generator = torch.Generator().manual_seed(seed)

    def batch(self) -> tuple[Tensor, Tensor]:
        """Inputs and targets, (ROWS, TOKENS)."""
        rows = torch.stack([self.row() for _ in range(ROWS)])
        return rows[:, :-1], rows[:, 1:]

    def row(self) -> Tensor:
        """Some entries, of which one is asked for."""
        places = torch.randint(len(self.lines), (8,), generator=self.generator)
        chosen = [self.lines[i] for i in cast("list[int]", places.tolist())]
        asked = int(torch.randint(2, (), generator=self.generator))
        word, _, gloss = chosen[asked].partition(": ")
        question = f"\n? {word} = "
        context = "\n".join(chosen)[: TOKENS + 1 - ANSWER - len(question)]
        return coded(context + question + gloss[:ANSWER])


def losses_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """The losses of all bytes, (ROWS, TOKENS)."""
    return F.cross_entropy(model(batch[0]).transpose(1, 2), batch[1], reduction="none")


def counted(tokens: int) -> Tensor:
    """Which of a row's bytes have a loss: so many at its end."""
    return (torch.arange(TOKENS) >= TOKENS - tokens).float()


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor], tokens: int = ANSWER) -> Tensor:
    """The mean loss of the answers."""
    return (losses_of(model, batch) * counted(tokens)).sum() / (tokens * len(batch[0]))


def trained(lines: Sequence[str], width: int, depth: int, steps: int, folder: Path) -> nn.Module:
    """The decoder after so many steps on running text; kept in a folder."""
    torch.manual_seed(0)
    model = Transformer(nn.Embedding(BYTES, width), TOKENS, width, depth, BYTES, causal=True)
    path = folder / f"decoder-{width}-{depth}-{steps}.pt"
    if path.exists():
        model.load_state_dict(torch.load(path))
        return model
    text, generator = coded("\n".join(lines)), torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, total_steps=steps)
    for _ in range(steps):
        begins = torch.randint(len(text) - TOKENS, (ROWS, 1), generator=generator)
        rows = text[begins + torch.arange(TOKENS + 1)]
        losses_of(model, (rows[:, :-1], rows[:, 1:])).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(model.state_dict(), path)
    return model


# --- variance and cost ------------------------------------------------------------------------------------------------


def gradient(model: nn.Module, batch: tuple[Tensor, Tensor], tokens: int) -> Tensor:
    """The gradient of all parameters, one vector in float64."""
    model.zero_grad()
    loss_of(model, batch, tokens).backward()
    return torch.cat([p.grad.double().flatten() for p in model.parameters() if p.grad is not None])


def cost(model: nn.Module, batch: tuple[Tensor, Tensor], tokens: int) -> float:
    """The FLOPs of a backward."""
    loss = loss_of(model, batch, tokens)
    with rowprop.cost.count_flops() as flops:
        loss.backward()
    return flops.total_flops


def variance(model: nn.Module, lines: Sequence[str], tokens: int, unit: Any, tau: float) -> dict[str, float]:
    """What a draw adds and what it costs, for so many bytes with a loss."""
    questions = Questions(lines, 1)
    batches = [questions.batch() for _ in range(BATCHES)]
    exact = torch.stack([gradient(model, batch, tokens) for batch in batches])
    between = float(exact.var(0).sum())
    seconds: dict[str, list[float]] = {"exact": [], "thinned": []}
    skipping = rowprop.skip_zeros(model)
    flops = cost(model, batches[0], tokens)
    handle = rowprop.thin(model, tau=tau, unit=unit, generator=torch.Generator().manual_seed(1))
    for number in range(SETTLING):
        gradient(model, batches[number % BATCHES], tokens)
    added, record = 0.0, handle.record
    for batch, truth in zip(batches, exact, strict=True):
        with handle.paused():
            begun = time.process_time()
            gradient(model, batch, tokens)
            seconds["exact"].append(time.process_time() - begun)
        begun = time.process_time()
        drawn = gradient(model, batch, tokens)
        seconds["thinned"].append(time.process_time() - begun)
        added += float((drawn - truth).square().sum()) / BATCHES
    thinned = statistics.mean(cost(model, batch, tokens) for batch in batches[:4])
    handle.remove()
    skipping.remove()
    ratios = [few / all for few, all in zip(seconds["thinned"], seconds["exact"], strict=True)]
    return {
        "answers": tokens / TOKENS, "tau": tau, "added": added / between, "FLOPs": thinned / flops,
        "time": statistics.median(ratios), "top": max(record.keep.values()), "bottom": min(record.keep.values()),
    }  # fmt: skip


# --- fine-tuning ------------------------------------------------------------------------------------------------------

METHODS = ("exact", "tokens", "rows", "cut")


def tuned(start: nn.Module, lines: Sequence[str], tau: float, steps: int, rate: float, seed: int) -> dict[str, Any]:
    """Fine-tune by every method, in turns; the losses of answers that were held out, and the seconds."""
    questions, held_out = Questions(lines[HELD_OUT:], seed), Questions(lines[:HELD_OUT], -1 - seed)
    models = {name: copy.deepcopy(start).train() for name in METHODS}
    optimizers = {name: torch.optim.AdamW(model.parameters(), rate, fused=True) for name, model in models.items()}
    losses: dict[str, Callable[[Any], Tensor]] = {}
    for name, model in models.items():
        if name == "cut":
            losses[name] = lambda batch, model=model: picked(model, batch)
        else:
            rowprop.skip_zeros(model)
            losses[name] = lambda batch, model=model: loss_of(model, batch)
        if name in ("tokens", "rows"):
            rowprop.thin(
                model,
                tau=tau,
                unit="token" if name == "tokens" else "row",
                generator=torch.Generator().manual_seed(seed),
            )
    seconds = dict.fromkeys(METHODS, 0.0)
    for number in range(steps):
        batch = questions.batch()
        for name in (*METHODS[number % len(METHODS) :], *METHODS[: number % len(METHODS)]):
            begun = time.process_time()
            for group in optimizers[name].param_groups:
                group["lr"] = rate * min(1.0, (number + 1) / 20) * (1 - number / steps)
            losses[name](batch).backward()
            optimizers[name].step()
            optimizers[name].zero_grad()
            seconds[name] += time.process_time() - begun
    tests = [held_out.batch() for _ in range(40)]
    with torch.no_grad():
        found = {
            name: statistics.mean(float(loss_of(model.eval(), batch)) for batch in tests)
            for name, model in models.items()
        }
    return {"seed": seed, "loss": found, "seconds": seconds}


def picked(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """The answers alone, keys and values of the context without a gradient."""
    mask = counted(ANSWER).bool().expand(len(batch[0]), -1)
    return rowprop.pick(losses_of(model, batch), mask, attention="cut").mean()


def main() -> None:
    """Measure, print, and write JSON and markdown."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--variance", action="store_true", help="measure variance and cost")
    parser.add_argument("--train", action="store_true", help="fine-tune")
    parser.add_argument("--width", type=int, default=128, help="of the decoder (default 128)")
    parser.add_argument("--depth", type=int, default=6, help="blocks (default 6)")
    parser.add_argument("--first", type=int, default=600, help="steps of the first training (default 600)")
    parser.add_argument("--steps", type=int, default=150, help="steps of the fine-tuning (default 150)")
    parser.add_argument("--rate", type=float, default=5e-4, help="peak rate of the fine-tuning (default 5e-4)")
    parser.add_argument("--tau", type=float, default=0.1, help="of the fine-tuning (default .1)")
    parser.add_argument("--seeds", type=int, default=5, help="of the fine-tuning (default 5)")
    parser.add_argument("--runs", type=Path, default=Path("runs/thin-tokens"), help="folder (default %(default)s)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the results (default %(default)s)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    lines = entries()
    model = trained(lines[HELD_OUT:], args.width, args.depth, args.first, args.runs).train()
    told = {name: str(getattr(args, name)) for name in ("width", "depth", "first", "steps", "rate", "tau")}
    result: dict[str, Any] = {"setting": setting(torch.device("cpu"), 1, **told)}
    page = [
        "# Tokens that leave at random",
        "",
        ", ".join(f"{key} {value}" for key, value in result["setting"].items()),
    ]
    page += ["", *(__doc__ or "").strip().splitlines(), ""]
    if args.variance:
        page += ["| answers | unit | tau | added | FLOPs | time | shares, most and least |", "|---" * 7 + "|"]
        result["variance"] = []
        for tokens in (13, ANSWER, 77, TOKENS):
            for unit, tau in (("token", 0.025), ("token", 0.1), ("row", 0.1)):
                found = variance(model, lines[:HELD_OUT], tokens, unit, tau)
                result["variance"].append({"unit": unit, **found})
                cells = [f"{100 * found['answers']:.0f} %", unit, f"{tau:g}"]
                cells += [f"{found[name]:.3f}" for name in ("added", "FLOPs", "time")]
                page.append("| " + " | ".join([*cells, f"{found['top']:.2f}, {found['bottom']:.2f}"]) + " |")
                print(page[-1], flush=True)
    if args.train:
        args.runs.mkdir(parents=True, exist_ok=True)
        runs: list[dict[str, Any]] = []
        for seed in range(args.seeds):
            path = args.runs / f"{'-'.join(told.values())}-{seed}.json"
            if not path.exists():
                run = tuned(model, lines, args.tau, args.steps, args.rate, seed)
                write_whole(path, json.dumps(run).encode())
            runs.append(json.loads(path.read_text()))
            print(runs[-1], flush=True)
        result["runs"] = runs
        page += ["", "| method | loss of held-out answers | minus exact's | seconds, over exact's |", "|---" * 4 + "|"]
        for name in METHODS:
            columns = [
                [run["loss"][name] for run in runs],
                [run["loss"][name] - run["loss"]["exact"] for run in runs],
                [run["seconds"][name] / run["seconds"]["exact"] for run in runs],
            ]
            cells = [f"{statistics.mean(c):.3f} ± {statistics.stdev(c) if len(c) > 1 else 0:.3f}" for c in columns]
            page.append("| " + " | ".join([f"`{name}`", *cells]) + " |")
    print("\n".join(page))
    stem = f"thin-tokens{'-train' * args.train}-{device_stem(torch.device('cpu'), 1)}"
    save(args.out, stem, result, "\n".join(page) + "\n")


if __name__ == "__main__":
    main()
