"""How many FLOPs a backward takes for one of the forward: counted, claim by claim.

Writes docs/backward-forward-ratio.md with its figures, or with --html one page of the figures alone.
"""

from __future__ import annotations

import argparse
import json
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

import bench_step
from closed_forms import closed_form
from elementwise import Elementwise
from flop_networks import NETWORKS, RESNETS, DeeperConvNet, Experts, batch, deeper_layers, losses, resnet
from rowprop.app.page import drawing, legend, new_figure, png, templates
from rowprop.cost.count import UPDATE_FLOPS, StepFlops, count_step
from rowprop.files import write_whole

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "backward-forward-ratio.md"
FIGURES = ROOT / "docs" / "figures"
MEASURED = ROOT / "benchmarks" / "results" / "2026-11-21-cpu-1-threads.json"
BATCHES = [2**power for power in range(10)]
DEPTHS = [0, 1, 2, 5, 10, 20, 50, 100]
SHOWN = [1, 8, 64, 512]  # batches in the tables; the figure shows all
IMAGE = (3, 224, 224)

# --- counting --------------------------------------------------------------------------------------------------------


def on_meta(make: Any) -> nn.Module:
    """A model without numbers."""
    with torch.device("meta"):
        return make()


def study() -> dict[str, Any]:
    """Every count of the page."""
    torch.manual_seed(0)
    counts: dict[str, dict[int, StepFlops]] = {}
    light: dict[str, Elementwise] = {}
    for name, (make, shape, layers) in NETWORKS.items():
        model = on_meta(make)
        counts[name] = {rows: count_step(model, batch(rows, shape), losses) for rows in BATCHES}
        with Elementwise() as light[name]:
            count_step(model, batch(64, shape), losses)
        for rows, counted in counts[name].items():
            expected = closed_form(layers, rows)
            if (counted.ratio, counted.ratio_with_update) != (expected.ratio, expected.ratio_with_update):
                raise AssertionError(f"{name} at batch {rows}: counted and closed form differ")
    one_row = batch(1, IMAGE)
    depth = {
        shared: {
            middle: count_step(on_meta(lambda m=middle, s=shared: DeeperConvNet(m, shared=s)), one_row, losses)
            for middle in DEPTHS
        }
        for shared in (True, False)
    }
    resnets: dict[int, dict[int, StepFlops]] = {}
    for layers_ in RESNETS:
        model = on_meta(lambda d=layers_: resnet(d))
        resnets[layers_] = {rows: count_step(model, batch(rows, IMAGE), losses) for rows in (1, 64)}
    resnet50 = on_meta(lambda: resnet(50))
    with Elementwise() as light["ResNet-50"]:
        count_step(resnet50, batch(64, IMAGE), losses)
    one_net = on_meta(NETWORKS["OneNet"][0])
    return {
        "counts": counts,
        "light": light,
        "depth": depth,
        "resnets": resnets,
        "optimizers": {
            name: {rows: count_step(one_net, batch(rows, (1,)), losses, optimizer=name) for rows in SHOWN}
            for name in UPDATE_FLOPS
        },
        "experts": count_step(Experts(64, 8), (torch.randn(128, 64), torch.randint(10, (128,))), losses),
        "kept": {
            keep: count_step(on_meta(lambda: resnet(50)), batch(64, IMAGE), losses, keep=keep, batchnorm="rows")
            for keep in (1.0, 0.5, 0.25)
        },
        "workloads": {
            # two rows: the ratio is the same at any number
            name: count_step(*make(2, *getattr(bench_step.CPU, name)[1:]), bench_step.row_losses)
            for name, make in bench_step.WORKLOADS.items()
        },
        "measured": {
            w["workload"]: w["backward_s"]["median"] / w["forward_s"]["median"]
            for w in json.loads(MEASURED.read_text())["workloads"]
        },
    }


# --- the page --------------------------------------------------------------------------------------------------------


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """As markdown; all columns but the first are numbers."""
    lines = [" | ".join(map(str, row)) for row in (head, ["---", *["---:"] * (len(head) - 1)], *rows)]
    return "\n".join(f"| {line} |" for line in lines)


def layer_rows(name: str, rows: int, counted: StepFlops) -> list[list[object]]:
    """One line per layer that multiplies."""
    lines: list[list[object]] = []
    for module in counted.modules:
        backward = module.backward_input_flops + module.backward_weight_flops
        lines.append([
            f"{name} {module.module} ({module.kind})", f"{module.forward_flops / rows:,.0f}",
            f"{module.backward_input_flops / rows:,.0f}", f"{module.backward_weight_flops / rows:,.0f}",
            f"{backward / module.forward_flops:.0f}",
        ])  # fmt: skip
    return lines


def total(counted: StepFlops) -> int:
    """Forward and backward."""
    return counted.forward_flops + counted.backward_flops


def ratio_of_all(plain: StepFlops, light: Elementwise) -> float:
    """Backward over forward, elementwise work included."""
    backward = plain.backward_flops + light.total_flops("backward")
    return backward / (plain.forward_flops + light.total_flops("forward"))


def filled(part: str) -> str:
    """With the lines of a paragraph broken anew."""
    kept = part.startswith(("#", "|", "!["))
    return part if kept else textwrap.fill(part, 120, break_on_hyphens=False, break_long_words=False)


def page(found: dict[str, Any]) -> str:
    """The study to read."""
    counts, depth = found["counts"], found["depth"]
    layers = table(
        ["layer", "forward", "backward, inputs", "backward, weights", "ratio"],
        layer_rows("ConvNet", 8, counts["ConvNet"][8]),
    )
    all_of_it = {**{name: counts[name][64] for name in NETWORKS}, "ResNet-50": found["resnets"][50][64]}
    shares = {
        name: 100 * (1 - total(all_of_it[name]) / (total(all_of_it[name]) + more.total_flops()))
        for name, more in found["light"].items()
    }
    batches = table(
        ["batch", *NETWORKS],
        [
            ["any, without update", *(f"{counts[name][1].ratio:.4f}" for name in NETWORKS)],
            *(
                [f"{rows}, with update", *(f"{counts[name][rows].ratio_with_update:.4f}" for name in NETWORKS)]
                for rows in SHOWN
            ),
        ],
    )
    first = {d: c[1].modules[0].forward_flops / c[1].forward_flops for d, c in found["resnets"].items()}
    resnets = table(
        ["network", "first layer's share, %", "ratio", "with update at batch 1"],
        [
            [
                f"ResNet-{d}", f"{100 * first[d]:.2f}", f"{c[1].ratio:.4f}",
                f"{c[1].ratio_with_update:.4f}",
            ]
            for d, c in found["resnets"].items()
        ],
    )  # fmt: skip
    optimizers = table(
        ["OneNet with", "FLOPs per parameter", *(f"batch {rows}" for rows in SHOWN)],
        [
            [name, UPDATE_FLOPS[name], *(f"{c.ratio_with_update:.3f}" for c in by_rows.values())]
            for name, by_rows in found["optimizers"].items()
        ],
    )
    times = table(
        ["", *found["workloads"]],
        [
            ["counted", *(f"{c.ratio:.2f}" for c in found["workloads"].values())],
            ["measured", *(f"{found['measured'][name]:.2f}" for name in found["workloads"])],
        ],
    )
    gpt, experts, kept = found["workloads"]["gpt"], found["experts"], found["kept"]
    one_net, conv_net = counts["OneNet"], counts["ConvNet"]
    conv_first = conv_net[1].modules[0].forward_flops / conv_net[1].forward_flops
    update = {name: c[1].update_flops / c[1].forward_flops for name, c in counts.items()}
    shallow, deepest = depth[True][0], depth[True][100]
    smallest, largest = (found["resnets"][d][1].ratio for d in (18, 152))
    text = f"""# Backward-forward FLOP ratio: how many FLOPs does a backward take?

**Two for each one of the forward, less the first layer's input gradient: {smallest:.3f} to {largest:.3f} in
ResNets. The optimizer's update shows at small batches alone.**

[What's the backward-forward FLOP ratio](https://epochai.org/blog/backward-forward-FLOP-ratio) (Hobbhahn and Sevilla)
answers "between 1:1 and 3:1, most often close to 2:1", from a profiler that counts some ops twice and others not at
all. Here each claim is counted from the ops that really run ([how](flops.md)); `nox -s flop-ratio` writes this page,
and first checks its four networks by the closed formula, to the last FLOP. A multiply-add is 2 FLOPs; products and
convolutions alone are counted. "With update" adds plain SGD's 2 FLOPs per parameter to the backward.

## The first layer 1:1, later layers 2:1

**Confirmed, exactly**, in linear layers and convolutions. FLOPs per row at batch 8:

{layers}

The first layer has no input gradient, unless the batch needs one (adversarial training). A first layer that is a
lookup costs no product: the GPT of `benchmarks/bench_step.py` has {gpt.ratio:.3f}, because fused attention computes its
scores again in the backward, 5 products for 2 in the forward.

## ReLU and loss do not count

**Confirmed.** With every addition, comparison and exponential counted, forward and backward at batch 64, elementwise
work is {min(shares.values()):.3f} to {max(shares.values()):.3f} % of all. The most is ResNet-50's, for its BatchNorm:
the ratio there is {ratio_of_all(all_of_it["ResNet-50"], found["light"]["ResNet-50"]):.4f} instead of
{all_of_it["ResNet-50"].ratio:.4f}.

## Linear layers update as much as they compute, convolutions do not

**Confirmed at batch 1 of linear layers, and nowhere else.** The update's share of the forward is 1 / N there, and
1 / (N x places) in a convolution. At batch 1 it is {update["LinearNet"]:.5f} in LinearNet, {update["ConvNet"]:.5f} in
ConvNet and {update["DeeperConvNet"]:.5f} in DeeperConvNet, which applies one convolution 100 times.

## Batch size

![Ratio against batch size](figures/ratio-batch.png)

**Confirmed.** With the update, LinearNet goes to 1 and OneNet to 2; for ConvNet "no change can be observed". But
ConvNet stays at {conv_net[512].ratio:.2f}, not 2: its first layer has {100 * conv_first:.0f} % of the forward.
Depth makes 2:1, not convolution.

{batches}

"The theoretical maximum of 3:1": OneNet at batch 1 has {one_net[1].ratio_with_update:.4f}, because biases are updated
and cost no product in the forward. With [other optimizers](#other-optimizers) no maximum is near 3.

## Depth

![Ratio against depth](figures/ratio-depth.png)

**Confirmed:** from {shallow.ratio:.4f} with no middle layer to {deepest.ratio:.4f} with 100. The ratio is
`2 - first / forward`, where `first` is the first layer's forward.

## The ResNet family

The original suspects its profiler. **Settled:** the ratios are below 2 by exactly the first layer's share, whatever
the batch:

{resnets}

## Other optimizers

**Confirmed in kind, corrected in number.** Adam takes 14 FLOPs per parameter and not 18: 1 - beta^t is computed once
for all parameters ([the arithmetic](flops.md#the-update)).

{optimizers}

## What the comments ask

**"It should always be 3:1."** *Training step* to forward is 3:1, and backward to forward is 2:1.

**Sparse networks and mixtures of experts.** Where each row goes through one of 8 experts, the ratio is
{experts.ratio:.4f}, that of the layers which one row meets, router included. Leaving out rows of the backward changes
it: with `rowprop.pick`, ResNet-50 at batch 64 takes {kept[0.5].ratio:.4f} with half of the rows kept
and {kept[0.25].ratio:.4f} with a quarter.

**"FLOPs mislead: automatic differentiation takes ten times the forward."** Not here: counted ratios, and those of the
time on one CPU thread ([how](../benchmarks/results/2026-11-21-cpu-1-threads.md)):

{times}

A backward that takes far longer than its count says is a finding of [`rowprop profile`](profile.md)."""
    return "\n\n".join(map(filled, text.split("\n\n"))) + "\n"


# --- figures ---------------------------------------------------------------------------------------------------------

COLOURS = ("#3b6fb6", "#c8553d", "#4d8f5b", "#8a63a8")
RATIO = "backward over forward, FLOPs"


class Plot(NamedTuple):
    """A figure, its title, and what it shows in words."""

    title: str
    figure: Any  # matplotlib's
    words: str


def figures(found: dict[str, Any]) -> dict[str, Plot]:
    """By file name."""
    return {"ratio-batch": ratio_by_batch(found), "ratio-depth": ratio_by_depth(found)}


@drawing()
def ratio_by_batch(found: dict[str, Any]) -> Plot:
    figure, axes = new_figure("batch size", RATIO, height=300)
    for (name, counts), colour in zip(found["counts"].items(), COLOURS, strict=True):
        for way, attribute, dash in (("with update", "ratio_with_update", "-"), ("without", "ratio", ":")):
            ratios = [getattr(counts[rows], attribute) for rows in BATCHES]
            axes.plot(BATCHES, ratios, dash, color=colour, marker="o", markersize=4, label=f"{name}, {way}")
    axes.set_xscale("log", base=2)
    axes.minorticks_off()
    axes.set_xticks(BATCHES, [str(rows) for rows in BATCHES])
    axes.set_ylim(0.9, 3.1)
    legend(figure)
    told = [
        f"{name}: {c[1].ratio_with_update:.3f} at batch 1, {c[BATCHES[-1]].ratio_with_update:.3f} at {BATCHES[-1]}"
        for name, c in found["counts"].items()
    ]
    return Plot("Ratio against batch size", figure, "With the update, " + "; ".join(told))


@drawing()
def ratio_by_depth(found: dict[str, Any]) -> Plot:
    figure, axes = new_figure("middle layers", RATIO)
    shared, curve = found["depth"][True], list(range(101))
    axes.plot(curve, [closed_form(deeper_layers(d), 1).ratio for d in curve], color=COLOURS[0], label="closed formula")
    axes.plot(DEPTHS, [shared[d].ratio for d in DEPTHS], "o", color=COLOURS[1], markersize=5, label="counted")
    axes.set_ylim(1.5, 2.05)
    legend(figure)
    told = f"{shared[0].ratio:.3f} without a middle layer, {shared[DEPTHS[-1]].ratio:.3f} with {DEPTHS[-1]}"
    return Plot("Ratio against depth", figure, told)


HTML = """{% extends "base.html.j2" %}
{% from "macros.html.j2" import plot with context %}
{% block title %}Backward over forward, in FLOPs{% endblock %}
{% block main %}
<h1>Backward over forward, in FLOPs</h1>
<div class="plots">
{% for name, drawn in plots.items() %}
{{ plot(name, drawn.title, drawn.figure, drawn.words) }}
{% endfor %}
</div>
{% endblock %}"""


def html(found: dict[str, Any]) -> str:
    """One page that opens without a network."""
    return templates().from_string(HTML).render(plots=figures(found))


def main() -> None:
    """Count, and write what was asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--html", type=Path, help="write one self-contained page here instead of the docs")
    args = parser.parse_args()
    torch.set_num_threads(1)
    found = study()
    if args.html is not None:
        args.html.write_text(html(found))
        print(f"{args.html} is written.")
        return
    PAGE.write_text(page(found))
    print(f"{PAGE.relative_to(ROOT)} is written.")
    for name, plot in figures(found).items():
        write_whole(FIGURES / f"{name}.png", png(plot.figure))
        print(f"{(FIGURES / name).relative_to(ROOT)}.png is written.")


if __name__ == "__main__":
    main()
