"""What slicing costs per op, and how small a model may be before it stops paying.

Chains of layers of growing width make the same backward of the same number of ops over ever larger tensors. In each
round the plain step over N rows and the step that picks K of them follow each other, in an order that turns. At the
smallest width nothing but the overhead is left: a backward's time over its number of aten ops is what one op costs,
plain and sliced. The floor is the backward of all rows whose gradient calls Python at each op, which runs the op and
does nothing else. Where the ratio of the two steps falls below 1, slicing begins to pay: linear interpolation between
the widths, in the logarithm of the plain backward's FLOPs.

With ``--compile`` the plain step's model is compiled by default, and the other by ``backend="rowprop"``.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import rowprop
from bench_step import (
    RESULTS,
    Batch,
    Bench,
    Block,
    compiled,
    device_stem,
    draw,
    full,
    row_losses,
    save,
    setting,
    sliced,
    spread,
)
from rowprop.cost.flops import count_flops

WIDTHS = (8, 16, 32, 64, 96, 128, 192, 256, 384)


def mlp(width: int) -> tuple[nn.Module, Batch]:
    """Eight layers on 256 rows."""
    layers = [layer for _ in range(8) for layer in (nn.Linear(width, width), nn.GELU())]
    return nn.Sequential(*layers, nn.Linear(width, 8)), (torch.randn(256, width), torch.randint(8, (256,)))


class Encoder(nn.Module):
    """Two transformer blocks."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.blocks, self.head = nn.Sequential(Block(width, False), Block(width, False)), nn.Linear(width, 8)

    def forward(self, x: Tensor) -> Tensor:
        """(N, T, width) -> (N, 8)."""
        return self.head(self.blocks(x).mean(1))


def transformer(width: int) -> tuple[nn.Module, Batch]:
    """16 tokens on each of 32 rows."""
    return Encoder(width), (torch.randn(32, 16, width), torch.randint(8, (32,)))


WORKLOADS: dict[str, tuple[Callable[[int], tuple[nn.Module, Batch]], tuple[int, ...]]] = {
    "mlp": (mlp, WIDTHS),
    "transformer": (transformer, tuple(w for w in WIDTHS if w % 32 == 0)),  # heads are 32 wide
}


class Empty(Tensor):
    """A gradient of all rows whose ops are called from Python."""

    rows: int
    held: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # pyright: ignore

    @staticmethod
    def of(held: Tensor, rows: int) -> Any:
        """Wrap a gradient that has a dimension of so many rows; the others are a weight's."""
        if rows not in held.shape:
            return held
        out = cast(Any, Tensor)._make_wrapper_subclass(Empty, held.shape, dtype=held.dtype, device=held.device)
        out.held, out.rows = held, rows
        return out

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        rows = next(a.rows for a in args if type(a) is Empty)
        out = func(*[a.held if type(a) is Empty else a for a in args], **(kwargs or {}))
        return Empty.of(out, rows) if isinstance(out, Tensor) else out


class Emptied(torch.autograd.Function):
    """The losses, whose gradient is :class:`Empty`."""

    @staticmethod
    def forward(ctx: Any, losses: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The losses as they are."""
        return losses.view_as(losses)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Their gradient, wrapped."""
        return Empty.of(grad.contiguous(), len(grad))


def floor(model: nn.Module, batch: Batch, rows: Tensor) -> Tensor:
    """The plain step's loss, with a backward that is called from Python."""
    return Emptied.apply(row_losses(model, batch)).mean()


class CountOps(TorchDispatchMode):
    """How many aten ops ran."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count one."""
        self.calls += 1
        return func(*args, **(kwargs or {}))


def measure(bench: Bench, keep: float, rounds: int, compile: bool = False, warmup: int = 5) -> dict[str, Any]:
    """Both steps at one width."""
    n, device = bench.batch[0].shape[0], bench.batch[0].device
    variants = {"full": full, "sliced": sliced}
    if not compile and not any(n in p.shape for p in bench.model.parameters()):  # weights are told by their sizes
        variants["floor"] = floor
    benches = dict.fromkeys(variants, bench)
    if compile:
        torch.compiler.reset()  # models of the same classes before this one count against dynamo's limit
        benches = compiled(bench, variants)
    steps: dict[str, list[Any]] = {name: [] for name in variants}
    for number in range(warmup + rounds):
        rows = draw(n, keep, device)
        for name in list(variants)[:: 1 if number % 2 else -1]:
            step = benches[name].step(variants[name], rows)
            if number >= warmup:
                steps[name].append(step)
    loss = row_losses(bench.model, bench.batch).mean()
    with count_flops() as flops, CountOps() as plain:
        loss.backward()
    loss = sliced(bench.model, bench.batch, draw(n, keep, device))
    with rowprop.watch() as report:
        loss.backward()
    calls = sum(report.sliced.values())
    pairs = list(zip(steps["sliced"], steps["full"], strict=True))
    return {
        "backward_flops": flops.total_flops,
        "plain_ops": plain.calls,
        "sliced_ops": calls,
        "densified": sorted(report.densified),
        "full_backward_us": spread([1e6 * s.backward_s for s in steps["full"]]),
        "sliced_backward_us": spread([1e6 * s.backward_s for s in steps["sliced"]]),
        "floor_backward_us": spread([1e6 * s.backward_s for s in steps["floor"]]) if "floor" in steps else None,
        "ratio": spread([a.gradient_s / b.gradient_s for a, b in pairs]),
    }


def break_even_flops(rows: list[dict[str, Any]]) -> float | None:
    """Where the ratio falls below 1 and stays there; None where it does not, or is from the start."""
    ratios = [row["ratio"]["median"] for row in rows]
    last = max((i for i, ratio in enumerate(ratios) if ratio >= 1), default=None)
    if last is None or last + 1 == len(rows):
        return None
    share = (ratios[last] - 1) / (ratios[last] - ratios[last + 1])
    low, high = (math.log(rows[i]["backward_flops"]) for i in (last, last + 1))
    return math.exp(low + share * (high - low))


def markdown(result: dict[str, Any]) -> str:
    """The same figures to read."""
    about = ", ".join(f"{key} {value}" for key, value in result["setting"].items())
    lines = ["# Overhead per op, and the size from which slicing pays", "", f"`{result['command']}`: {about}", ""]
    lines += (__doc__ or "").partition("\n\n")[2].strip().splitlines()
    for w in result["workloads"]:
        first = w["widths"][0]
        plain, cut = (first[f"{which}_backward_us"]["median"] for which in ("full", "sliced"))
        even, floor_us = w["break_even_flops"], first["floor_backward_us"]
        lowest = f"The floor is {floor_us['median'] / plain:.2f}. " if floor_us else ""
        per_op = (
            f"{plain / first['plain_ops']:.1f} us per plain op ({first['plain_ops']} ops), "
            f"{cut / first['sliced_ops']:.1f} us per sliced op ({first['sliced_ops']} ops); "
        )
        lines += [
            "", f"## {w['workload']}: keep {w['keep']}", "",
            f"At width {first['width']}: {'' if result['setting']['compiled'] == 'yes' else per_op}"
            f"the sliced backward takes {cut / plain:.2f} of the plain one. "
            + lowest
            + (f"Slicing pays from a backward of {even / 1e6:.1f} MFLOP on." if even else "No break-even here."),
            "", "| width | backward, MFLOP | plain backward, us | sliced backward, us | step ratio (quartiles) |",
            "|---|---|---|---|---|",
        ]  # fmt: skip
        for row in w["widths"]:
            ratio = row["ratio"]
            lines.append(
                f"| {row['width']} | {row['backward_flops'] / 1e6:.1f} | {row['full_backward_us']['median']:.0f} "
                f"| {row['sliced_backward_us']['median']:.0f} "
                f"| {ratio['median']:.3f} ({ratio['q1']:.3f} to {ratio['q3']:.3f}) |"
            )
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure, print, and write JSON and markdown."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", default="cpu", help="cpu (default) or cuda")
    parser.add_argument("--keep", type=float, default=0.25, help="(default %(default)s)")
    parser.add_argument("--rounds", type=int, default=100, help="steps of each kind (default %(default)s)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="CPU threads (default torch's)")
    parser.add_argument("--compile", action="store_true", help="compile both steps' models")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the results (default %(default)s)")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    device = torch.device(args.device)
    result: dict[str, Any] = {
        "command": " ".join(["python benchmarks/bench_overhead.py", *sys.argv[1:]]),
        "setting": setting(device, args.threads, dtype="float32", compiled="yes" if args.compile else "no"),
        "workloads": [],
    }
    for name, (make, widths) in WORKLOADS.items():
        rows: list[dict[str, Any]] = []
        for width in widths:
            model, batch = make(width)
            model.to(device)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
            bench = Bench(model, tuple(t.to(device) for t in batch), optimizer, nullcontext)
            rows.append({"width": width, **measure(bench, args.keep, args.rounds, args.compile)})
        summary = {"workload": name, "keep": args.keep, "widths": rows, "break_even_flops": break_even_flops(rows)}
        result["workloads"].append(summary)
        print(markdown({**result, "workloads": [summary]}).partition("## ")[2], flush=True)
    more = "-compiled" if args.compile else ""
    save(args.out, f"overhead-{device_stem(device, args.threads)}{more}", result, markdown(result))


if __name__ == "__main__":
    main()
