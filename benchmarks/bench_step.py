"""Whole training steps side by side: the plain loop, and the ways to backpropagate only some of its rows.

In each round, for each keep, the plain step and every engine make one step after each other on the same model, batch
and rows, in an order that turns from round to round. A ratio is an engine's time over the plain step's beside it; its
median over the rounds is printed with the quartiles. The limit is (F + kB)/(F + B), with F and B the forward and
backward of that plain step and k = K/N. Rows are drawn beforehand, K of N at random, so that no engine pays
for choosing.

The update U (AdamW) is the same for every variant and is timed apart: ``ratio`` and ``limit`` leave it out,
``ratio_with_update`` compares whole steps and its limit is (F + kB + U)/(F + B + U).

With ``--compile``, ``sliced`` is the model compiled with ``backend="rowprop"``; the plain step and the other engines
are the same model compiled by default.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import rowprop
from rowprop.cost.measure import Clock
from rowprop.files import write_whole

KEEPS = (0.1, 0.25, 0.5, 1.0)
RESULTS = Path(__file__).parent / "results"
PHASES = ("forward", "backward", "update")
Batch = tuple[Tensor, ...]


# --- workloads: plain models -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sizes:
    """How large the workloads are: a step of 50 to 200 ms on two CPU cores, or one that fills a GPU."""

    mlp: tuple[int, int]  # N, width
    resnet: tuple[int, int, int]  # N, image side, width
    vit: tuple[int, int, int, int]  # N, patches, width, depth
    gpt: tuple[int, int, int, int]  # N, steps, width, depth


CPU = Sizes((1024, 768), (128, 32, 16), (64, 64, 192, 4), (32, 64, 256, 4))
GPU = Sizes((16384, 4096), (512, 64, 64), (256, 196, 384, 12), (64, 512, 768, 12))


def mlp(n: int, width: int) -> tuple[nn.Module, Batch]:
    """Three hidden layers."""
    layers = [layer for _ in range(3) for layer in (nn.Linear(width, width), nn.GELU())]
    return nn.Sequential(*layers, nn.Linear(width, 10)), (torch.randn(n, width), torch.randint(10, (n,)))


class ResidualBlock(nn.Module):
    """Two convolutions with BatchNorm and a shortcut."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(inputs, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width)
        self.shortcut = nn.Identity()
        if stride != 1 or inputs != width:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, width, 1, stride, bias=False), nn.BatchNorm2d(width))

    def forward(self, x: Tensor) -> Tensor:
        """(N, inputs, H, W) -> (N, width, H / stride, W / stride)."""
        out = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(out + self.shortcut(x))


def resnet(n: int, side: int, width: int) -> tuple[nn.Module, Batch]:
    """Three stages of two blocks, BatchNorm in training mode."""
    blocks = [ResidualBlock(width, width, 1), ResidualBlock(width, width, 1)]
    for stage in (1, 2):
        blocks += [
            ResidualBlock(width * stage, width * 2 * stage, 2),
            ResidualBlock(width * 2 * stage, width * 2 * stage, 1),
        ]
    stem = nn.Sequential(nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 * width, 10))
    return nn.Sequential(stem, *blocks, head), (torch.randn(n, 3, side, side), torch.randint(10, (n,)))


class Block(nn.Module):
    """A transformer block, norms first."""

    def __init__(self, width: int, causal: bool, head: int = 32) -> None:
        super().__init__()
        self.heads, self.causal = width // head, causal
        self.norm1, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """(N, T, width) -> (N, T, width)."""
        n, t, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(n, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.out(mixed.transpose(1, 2).reshape(n, t, width))
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):
    """Blocks between an embedding with positions and a linear head."""

    def __init__(
        self, embed: nn.Module, steps: int, width: int, depth: int, outputs: int, causal: bool, head: int = 32
    ) -> None:
        super().__init__()
        self.embed, self.causal = embed, causal
        self.places = nn.Parameter(0.02 * torch.randn(steps, width))
        self.blocks = nn.Sequential(*[Block(width, causal, head) for _ in range(depth)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        """A GPT gives logits for every token, a ViT for the mean of its patches."""
        x = self.norm(self.blocks(self.embed(x) + self.places))
        return self.head(x if self.causal else x.mean(1))


def vit(n: int, patches: int, width: int, depth: int) -> tuple[nn.Module, Batch]:
    """Patches of 8 x 8 x 3 pixels, already cut."""
    model = Transformer(nn.Linear(192, width), patches, width, depth, 10, causal=False)
    return model, (torch.randn(n, patches, 192), torch.randint(10, (n,)))


def gpt(n: int, steps: int, width: int, depth: int) -> tuple[nn.Module, Batch]:
    """Next token of 512."""
    model = Transformer(nn.Embedding(512, width), steps, width, depth, 512, causal=True)
    return model, (torch.randint(512, (n, steps)), torch.randint(512, (n, steps)))


WORKLOADS: dict[str, Callable[..., tuple[nn.Module, Batch]]] = {"mlp": mlp, "resnet": resnet, "vit": vit, "gpt": gpt}


def row_losses(model: nn.Module, batch: Batch) -> Tensor:
    """Cross entropy, shape (N,); the mean over a row's tokens."""
    inputs, target = batch
    logits = model(inputs)
    losses = F.cross_entropy(logits.flatten(0, -2), target.flatten(), reduction="none")
    return losses.view(target.shape[0], -1).mean(1)


# --- steps -----------------------------------------------------------------------------------------------------------

Loss = Callable[[nn.Module, Batch, Tensor], Tensor]


def full(model: nn.Module, batch: Batch, rows: Tensor) -> Tensor:
    """The plain loop that everything is compared with."""
    return row_losses(model, batch).mean()


def masked(model: nn.Module, batch: Batch, rows: Tensor) -> Tensor:
    """Plain indexing."""
    return row_losses(model, batch)[rows].mean()


def recompute(model: nn.Module, batch: Batch, rows: Tensor) -> Tensor:
    """A forward to score, and another with a graph for the kept rows."""
    with torch.no_grad():
        row_losses(model, batch)
    return row_losses(model, tuple(t.index_select(0, rows) for t in batch)).mean()


def sliced(model: nn.Module, batch: Batch, rows: Tensor) -> Tensor:
    """One forward; the backward pays for the kept rows."""
    return rowprop.pick(row_losses(model, batch), rows, batchnorm="rows").mean()


ENGINES: dict[str, Loss] = {"full": full, "masked": masked, "recompute": recompute, "sliced": sliced}


@dataclass(frozen=True)
class Step:
    """Seconds of one step's phases, and the seconds until the calls of forward and backward had returned."""

    forward_s: float
    backward_s: float
    update_s: float
    host_s: float

    @property
    def gradient_s(self) -> float:
        """All but the update."""
        return self.forward_s + self.backward_s

    @property
    def total_s(self) -> float:
        """The whole step."""
        return self.gradient_s + self.update_s


@dataclass(frozen=True)
class Bench:
    """A model with its batch, ready to step."""

    model: nn.Module
    batch: Batch
    optimizer: torch.optim.Optimizer
    autocast: Callable[[], AbstractContextManager[Any]]

    def step(self, loss_of: Loss, rows: Tensor) -> Step:
        """One training step, timed."""
        clock = Clock([rows.device])
        begun_s = time.perf_counter()
        with self.autocast():
            loss = loss_of(self.model, self.batch, rows)
        clock.done("forward")
        loss.backward()
        clock.done("backward")
        host_s = time.perf_counter() - begun_s
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        clock.done("update")
        return Step(*clock.phases_s().values(), host_s)


def num_kept(n: int, keep: float) -> int:
    """K."""
    return max(1, round(keep * n))


def draw(n: int, keep: float, device: torch.device) -> Tensor:
    """K rows at random, ascending."""
    return torch.randperm(n)[: num_kept(n, keep)].sort().values.to(device)


Steps = dict[tuple[float, str], list[Step]]


LEAST = 2
"""Rounds that are measured even where the time is up: a median with quartiles needs two."""


def measure(
    benches: dict[str, Bench],
    rounds: int,
    warmup: int,
    keeps: Sequence[float] = KEEPS,
    until_s: float = float("inf"),
) -> Steps:
    """For each keep and engine its steps, one per round; the engines of one keep follow each other.

    No round begins after ``until_s`` on the clock ``time.perf_counter``, once ``LEAST`` rounds are measured.
    """
    first = benches["full"].batch[0]
    n, device = first.shape[0], first.device
    steps: Steps = {(keep, engine): [] for keep in keeps for engine in benches}
    names = list(benches)
    for number in range(warmup + rounds):
        if number >= warmup + LEAST and time.perf_counter() > until_s:
            break
        turn = number % len(names)
        for keep in keeps:
            rows = draw(n, keep, device)
            for engine in names[turn:] + names[:turn]:
                taken = benches[engine].step(ENGINES[engine], rows)
                if number >= warmup:
                    steps[keep, engine].append(taken)
    return steps


# --- figures ---------------------------------------------------------------------------------------------------------


def spread(values: list[float]) -> dict[str, float]:
    """Median and quartiles."""
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return {"q1": low, "median": middle, "q3": high}


def summarize(name: str, n: int, steps: Steps) -> dict[str, Any]:
    """Every figure of one workload."""
    keeps = list(dict.fromkeys(keep for keep, _ in steps))
    every_plain = [step for keep in keeps for step in steps[keep, "full"]]
    rows: list[dict[str, Any]] = []
    for (keep, engine), taken in steps.items():
        if engine == "full":
            continue
        plain = steps[keep, "full"]
        kept = num_kept(n, keep)
        best = [p.forward_s + kept / n * p.backward_s for p in plain]
        trios = list(zip(taken, plain, best, strict=True))
        rows.append({
            "keep": keep, "kept": kept, "engine": engine,
            "gradient_s": spread([t.gradient_s for t in taken]), "update_s": spread([t.update_s for t in taken]),
            "host_s": spread([t.host_s for t in taken]),
            "ratio": spread([t.gradient_s / p.gradient_s for t, p, _ in trios]),
            "limit": statistics.median(b / p.gradient_s for _, p, b in trios),
            "over_limit": spread([t.gradient_s / b for t, _, b in trios]),
            "ratio_with_update": spread([t.total_s / p.total_s for t, p, _ in trios]),
            "limit_with_update": statistics.median((b + p.update_s) / p.total_s for _, p, b in trios),
        })  # fmt: skip
    phases = {f"{phase}_s": spread([getattr(s, f"{phase}_s") for s in every_plain]) for phase in PHASES}
    phases["host_s"] = spread([step.host_s for step in every_plain])
    return {"workload": name, "num_rows": n, "rounds": len(every_plain) // len(keeps), **phases, "variants": rows}


def markdown(result: dict[str, Any]) -> str:
    """The same figures to read."""
    about = ", ".join(f"{key} {value}" for key, value in result["setting"].items())
    lines = ["# Training steps beside their limits", "", f"`{result['command']}`: {about}", ""]
    lines += [line for line in (__doc__ or "").partition("\n\n")[2].strip().splitlines()]
    for w in result["workloads"]:
        f, b, u = (1000 * w[f"{phase}_s"]["median"] for phase in PHASES)
        lines += [
            "", f"## {w['workload']}: N = {w['num_rows']}, {w['sizes']}", "",
            f"Plain step: F {f:.1f} ms, B {b:.1f} ms, U {u:.1f} ms; medians of {w['rounds']} steps of each kind.", "",
            "| keep | K | engine | ratio (quartiles) | limit | over limit (quartiles) | with update | its limit |",
            "|---|---|---|---|---|---|---|---|",
        ]  # fmt: skip
        for v in w["variants"]:
            ratio, over = (
                f"{v[k]['median']:.3f} ({v[k]['q1']:.3f} to {v[k]['q3']:.3f})" for k in ("ratio", "over_limit")
            )
            lines.append(
                f"| {v['keep']} | {v['kept']} | {v['engine']} | {ratio} | {v['limit']:.3f} | {over} "
                f"| {v['ratio_with_update']['median']:.3f} | {v['limit_with_update']:.3f} |"
            )
    return "\n".join(lines) + "\n"


def device_name(device: torch.device) -> str:
    """What the machine calls it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    cpuinfo = Path("/proc/cpuinfo")
    text = cpuinfo.read_text() if cpuinfo.exists() else ""
    names = [line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def setting(device: torch.device, threads: int, **more: str) -> dict[str, Any]:
    """Where and with what the figures were measured."""
    return {
        "device": device_name(device), "threads": threads, "torch": torch.__version__, **more,
        "python": platform.python_version(), "rowprop": rowprop.__version__,
    }  # fmt: skip


def device_stem(device: torch.device, threads: int) -> str:
    """The device in a file's name."""
    return f"cpu-{threads}-threads" if device.type == "cpu" else device_name(device).lower().replace(" ", "-")


def compiled(
    bench: Bench, variants: Iterable[str], ours: Any = "rowprop", plain: Any = "inductor", **options: Any
) -> dict[str, Bench]:
    """The bench of each variant, its model compiled: of ``sliced`` by our backend, of the others by the plain one."""
    benches = dict.fromkeys(variants, replace(bench, model=torch.compile(bench.model, backend=plain, **options)))
    return benches | {"sliced": replace(bench, model=torch.compile(bench.model, backend=ours, **options))}


def save(folder: Path, stem: str, result: dict[str, Any], page: str) -> Path:
    """Write JSON and markdown, today's date in their name; return what their names begin with."""
    path = folder / f"{datetime.now(timezone.utc):%Y-%m-%d}-{stem}"
    for suffix, text in ((".json", json.dumps(result, indent=1) + "\n"), (".md", page)):
        write_whole(path.with_name(path.name + suffix), text.encode())
    print(f"Written: {path}.json and .md")
    return path


def main() -> None:
    """Measure, print, and write JSON and markdown."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", default="cpu", help="cpu (default) or cuda")
    parser.add_argument("--amp", choices=["off", "bf16"], default="off", help="autocast (default off)")
    parser.add_argument("--compile", action="store_true", help="compile every model")
    parser.add_argument("--rounds", type=int, default=30, help="steps of each variant (default 30, at least 20)")
    parser.add_argument(
        "--threads", type=int, default=torch.get_num_threads(), help="CPU threads (default torch's own)"
    )
    parser.add_argument("--workloads", default=",".join(WORKLOADS), help="comma-separated (default all)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the results (default %(default)s)")
    args = parser.parse_args()
    if args.rounds < 20:
        parser.error("--rounds must be at least 20 for a median worth printing")
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    device = torch.device(args.device)
    sizes = GPU if device.type == "cuda" else CPU

    def autocast() -> AbstractContextManager[Any]:
        return torch.autocast(device.type, torch.bfloat16, enabled=args.amp == "bf16")

    result: dict[str, Any] = {
        "command": " ".join(["nox -s bench --", *sys.argv[1:]]),
        "setting": setting(
            device,
            args.threads,
            dtype="float32" if args.amp == "off" else "float32 under bfloat16 autocast",
            compiled="yes" if args.compile else "no",
        ),
        "workloads": [],
    }
    for name in args.workloads.split(","):
        size = getattr(sizes, name)
        model, batch = WORKLOADS[name](*size)
        model.to(device)
        # a rate so small that no step changes what the next one costs
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-7, fused=True)
        bench = Bench(model, tuple(t.to(device) for t in batch), optimizer, autocast)
        benches = compiled(bench, ENGINES) if args.compile else dict.fromkeys(ENGINES, bench)
        summary = summarize(name, batch[0].shape[0], measure(benches, args.rounds, warmup=3))
        summary["sizes"] = str(dict(zip(WORKLOADS[name].__annotations__, size, strict=False)))
        result["workloads"].append(summary)
        print(markdown({**result, "workloads": [summary]}).partition("## ")[2], flush=True)

    more = ("" if args.amp == "off" else f"-{args.amp}") + ("-compiled" if args.compile else "")
    save(args.out, f"{device_stem(device, args.threads)}{more}", result, markdown(result))


if __name__ == "__main__":
    main()
