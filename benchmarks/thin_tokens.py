"""Tokens that leave a decoder's backward at random, beside rows: the variance that this adds, its cost, a fine-tuning.

The decoder has blocks of causal attention over bytes. It is trained here on WordNet's words and glosses, and then
asked: a row holds some words with their glosses, then one of these words again, and the answer is how its gloss begins.
Only the answer's bytes, a tenth of the row, have a loss.

`--variance`: the decoder as it was trained first. After 44 backwards that set the shares, 16 batches are drawn once
each. `added` is the mean of |drawn - exact|^2 over the parameters, over the variance of the exact gradient from batch
to batch; `FLOPs` those of the backward, and `time` that of forward and backward, over those of the exact backward below
`skip_zeros`, in turns. `answers` is the share of the bytes that have a loss.

`--train`: the fine-tuning, for as many steps by each method, in turns: `full` is the plain loop; `exact` has
`rowprop.skip_zeros(model)`; `tokens` and `rows` have `rowprop.thin` beside it; `cut` picks the answers with
`attention="cut"`, which is biased. Two controls: `random` counts five random rows of twelve, about the FLOPs of
`tokens`; `fewer` is `exact` for as many steps as take the time of `tokens`, its rate decayed to zero as well. Every
method of a seed trains a copy of the same start on the same batches. The loss is that of answers in rows that were not
trained on; its difference is to the same seed's `exact`, with the 95 % interval of the mean over the seeds. FLOPs of
the backward, and the processor's seconds of whole steps, are over those of `exact`; one step of ten is counted, the
others are on the clock. The limit is (F + bB) / (F + B), where B is the time of `exact`'s backward, F of all else, and
b the method's FLOPs.
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
from scipy.stats import t as student
from torch import Tensor, nn
from torch.nn import functional as F

import rowprop
from bench_step import RESULTS, Transformer, device_stem, save, setting
from rowprop.files import write_whole
from rowprop_lab.data import DEBIAN_WORDNET, WORDNET_FILES

BYTES, TOKENS, ROWS, ANSWER, SOME_ROWS = 128, 256, 12, 26, 5
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


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor], tokens: int = ANSWER, rows: Any = slice(None)) -> Tensor:
    """The mean loss of the answers, of all rows or of some."""
    losses = (losses_of(model, batch) * counted(tokens))[rows]
    return losses.sum() / (tokens * len(losses))


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

METHODS = ("full", "exact", "tokens", "rows", "cut", "random")
COUNTED = 10  # one step of so many has its FLOPs counted, and is not on the clock


class Method:
    """One copy of the start, fine-tuned its own way."""

    def __init__(self, name: str, start: nn.Module, tau: float, rate: float, seed: int) -> None:
        self.model = copy.deepcopy(start).train()
        self.loss: Callable[..., Tensor] = picked if name == "cut" else loss_of
        self.rate, self.handle = rate, None
        if name == "random":
            drawn = torch.Generator().manual_seed(seed)
            self.loss = lambda model, batch: loss_of(
                model, batch, rows=torch.randperm(ROWS, generator=drawn)[:SOME_ROWS]
            )
        if name in ("exact", "tokens", "rows", "random", "fewer"):
            rowprop.skip_zeros(self.model)
        if name in ("tokens", "rows"):
            generator = torch.Generator().manual_seed(seed)
            unit = "token" if name == "tokens" else "row"
            self.handle = rowprop.thin(self.model, tau=tau, unit=unit, generator=generator)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), rate, fused=True)
        self.backward_s = self.other_s = 0.0
        self.flops: list[float] = []
        self.ratios: list[float] = []

    def step(self, batch: tuple[Tensor, Tensor], done: float, count: bool) -> None:
        """One step, on the clock or with the FLOPs of its backward counted."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate * min(1.0, 7.5 * done) * (1 - done)
        begun = time.process_time()
        loss = self.loss(self.model, batch)
        middle = time.process_time()
        if count:
            with rowprop.cost.count_flops() as flops:
                loss.backward()
            self.flops.append(flops.total_flops)
        else:
            loss.backward()
        end = time.process_time()
        self.optimizer.step()
        self.optimizer.zero_grad()
        if count:
            self.ratios += [self.handle.record.ratio] if self.handle is not None else []
        else:
            self.backward_s += end - middle
            self.other_s += middle - begun + time.process_time() - end

    def figures(self, tests: Sequence[tuple[Tensor, Tensor]], steps: int) -> dict[str, float]:
        """The loss of held-out answers, and what the training cost."""
        ratio = statistics.mean(self.ratios) if self.ratios else 0.0
        costs = {"backward_s": self.backward_s, "other_s": self.other_s, "flops": steps * statistics.mean(self.flops)}
        return {"steps": steps, "loss": tested(self.model, tests), "ratio": ratio, **costs}


def tuned(start: nn.Module, lines: Sequence[str], tau: float, steps: int, rate: float, seed: int) -> dict[str, Any]:
    """Fine-tune by every method, in turns, and by `fewer` steps; the figures of each."""
    tests = held_out(lines, seed)

    def trained_by(names: Sequence[str], steps: int) -> dict[str, dict[str, float]]:
        questions = Questions(lines[HELD_OUT:], seed)
        methods = {name: Method(name, start, tau, rate, seed) for name in names}
        for number in range(steps):
            batch, turn = questions.batch(), number % len(names)
            for name in (*names[turn:], *names[:turn]):
                methods[name].step(batch, (number + 0.5) / steps, number % COUNTED == COUNTED // 2)
        return {name: method.figures(tests, steps) for name, method in methods.items()}

    found = trained_by(METHODS, steps)
    fewer = round(steps * seconds(found["tokens"]) / seconds(found["exact"]))
    return {"seed": seed, **found, **trained_by(("fewer",), fewer)}


def held_out(lines: Sequence[str], seed: int) -> list[tuple[Tensor, Tensor]]:
    """Batches of entries that no training sees."""
    questions = Questions(lines[:HELD_OUT], -1 - seed)
    return [questions.batch() for _ in range(40)]


def tested(model: nn.Module, tests: Sequence[tuple[Tensor, Tensor]]) -> float:
    """The mean loss of the answers of these batches."""
    model.eval()
    with torch.no_grad():
        return statistics.mean(float(loss_of(model, batch)) for batch in tests)


def seconds(run: dict[str, float]) -> float:
    """Of the steps on the clock."""
    return run["backward_s"] + run["other_s"]


def picked(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """The answers alone, keys and values of the context without a gradient."""
    mask = counted(ANSWER).bool().expand(len(batch[0]), -1)
    return rowprop.pick(losses_of(model, batch), mask, attention="cut").mean()


def table(runs: Sequence[dict[str, Any]]) -> list[str]:
    """Each method over the seeds, beside the same seed's `exact`."""

    def mean(values: Sequence[float], digits: int = 2) -> str:
        return f"{statistics.mean(values):.{digits}f}"

    def interval(values: Sequence[float]) -> str:
        if len(values) < 2:
            return f"{statistics.mean(values):+.4f}"
        half = student.ppf(0.975, len(values) - 1) * statistics.stdev(values) / len(values) ** 0.5
        return f"{statistics.mean(values):+.4f} ± {half:.4f}"

    page = ["| method | steps | loss of held-out answers | minus exact's | backward FLOPs | time (limit) |"]
    page += ["|---" * 6 + "|"]
    for name in (*METHODS, "fewer"):
        pairs = [(run[name], run["exact"]) for run in runs]
        works = [own["flops"] / exact["flops"] for own, exact in pairs]
        times = [seconds(own) / seconds(exact) for own, exact in pairs]
        limits = [
            (exact["other_s"] + work * exact["backward_s"]) / seconds(exact)
            for work, (_, exact) in zip(works, pairs, strict=True)
        ]
        cells = [mean([own["steps"] for own, _ in pairs], 0), mean([own["loss"] for own, _ in pairs], 3)]
        cells += [interval([own["loss"] - exact["loss"] for own, exact in pairs]), mean(works)]
        cells += [f"{mean(times)} ({mean(limits)})" if name in METHODS else mean(times)]
        page.append("| " + " | ".join([f"`{name}`", *cells]) + " |")
    ratios = (f"`{name}` {mean([run[name]['ratio'] for run in runs], 3)}" for name in ("tokens", "rows"))
    return [*page, "", f"The handle's own estimate of the added variance, mean over the training: {', '.join(ratios)}."]


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
        result["start"] = statistics.mean(tested(model, held_out(lines, run["seed"])) for run in runs)
        page += ["", *table(runs), f"Before the fine-tuning the loss is {result['start']:.3f}."]
    print("\n".join(page))
    stem = f"thin-tokens{'-train' * args.train}-{device_stem(torch.device('cpu'), 1)}"
    save(args.out, stem, result, "\n".join(page) + "\n")


if __name__ == "__main__":
    main()
