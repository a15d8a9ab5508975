"""How many FLOPs a backward takes for one of the forward: counted, claim by claim.

Writes docs/backward-forward-ratio.md with its figures, or with --html one page of the figures alone.
"""

from __future__ import annotations

import argparse
import json
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
            name: {rows: count_step(one_net, batch(rows, (1,)), losses, optimizer=name) for rows in (1, 8, 64, 512)}
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


def strict(rows: int, inputs: int = 128, outputs: int = 128) -> tuple[float, float]:
    """A later linear layer without a bias, when additions are counted one fewer than products: two shares of 2 N i o.

    Returns:
        Backward over forward with 2k - 1 FLOPs for a sum of k products, and the weights' gradient over the forward.
    """
    forward = rows * outputs * (2 * inputs - 1)
    to_input = rows * inputs * (2 * outputs - 1)
    to_weight = inputs * outputs * (2 * rows - 1)
    return (to_input + to_weight) / forward, to_weight / forward


def total(counted: StepFlops) -> int:
    """Forward and backward."""
    return counted.forward_flops + counted.backward_flops


def ratio_of_all(plain: StepFlops, light: Elementwise) -> float:
    """Backward over forward, elementwise work included."""
    backward = plain.backward_flops + light.total_flops("backward")
    return backward / (plain.forward_flops + light.total_flops("forward"))


def page(found: dict[str, Any]) -> str:
    """The study to read."""
    counts, depth = found["counts"], found["depth"]
    layers = table(
        ["layer", "forward", "backward, inputs", "backward, weights", "ratio"],
        [line for name in ("LinearNet", "OneNet", "ConvNet") for line in layer_rows(name, 8, counts[name][8])],
    )
    light = table(
        ["network", "products", "elementwise", "share, %", "ratio of products", "ratio of all"],
        [
            [
                name, f"{total(plain):,}", f"{more.total_flops():,}",
                f"{100 * (1 - total(plain) / (total(plain) + more.total_flops())):.3f}", f"{plain.ratio:.4f}",
                f"{ratio_of_all(plain, more):.4f}",
            ]
            for plain, (name, more) in zip(
                [*(counts[name][64] for name in NETWORKS), found["resnets"][50][64]], found["light"].items(),
                strict=True,
            )
        ],
    )  # fmt: skip
    batches = table(
        ["batch", *(f"{name} {way}" for name in NETWORKS for way in ("", "with update"))],
        [
            [
                rows,
                *(
                    f"{r:.4f}"
                    for name in NETWORKS
                    for c in [counts[name][rows]]
                    for r in (c.ratio, c.ratio_with_update)
                ),
            ]
            for rows in BATCHES
        ],
    )
    updates = table(
        ["network", "parameters", "forward of one row", "update (SGD)", "update over forward at batch 1", "at 64"],
        [
            [
                name, f"{c[1].num_parameters:,}", f"{c[1].forward_flops:,}", f"{c[1].update_flops:,}",
                f"{c[1].update_flops / c[1].forward_flops:.5f}", f"{c[64].update_flops / c[64].forward_flops:.5f}",
            ]
            for name, c in counts.items()
        ],
    )  # fmt: skip
    depths = table(
        ["middle layers", "ratio", "batch 1 with update, one shared layer", "batch 1 with update, layers of their own"],
        [
            [d, *(f"{r:.4f}" for r in (
                depth[True][d].ratio, depth[True][d].ratio_with_update, depth[False][d].ratio_with_update
            ))]
            for d in DEPTHS
        ],
    )  # fmt: skip
    first = {d: c[1].modules[0].forward_flops / c[1].forward_flops for d, c in found["resnets"].items()}
    resnets = table(
        ["network", "forward of one row, GFLOP", "first layer's share, %", "ratio",
         *(f"with update, batch {rows}" for rows in (1, 64))],
        [
            [
                f"ResNet-{d}", f"{c[1].forward_flops / 1e9:.2f}", f"{100 * first[d]:.2f}", f"{c[1].ratio:.4f}",
                *(f"{c[rows].ratio_with_update:.4f}" for rows in (1, 64)),
            ]
            for d, c in found["resnets"].items()
        ],
    )  # fmt: skip
    optimizers = table(
        ["OneNet with", "FLOPs per parameter", *(f"batch {rows}" for rows in (1, 8, 64, 512))],
        [
            [name, UPDATE_FLOPS[name], *(f"{c.ratio_with_update:.3f}" for c in by_rows.values())]
            for name, by_rows in found["optimizers"].items()
        ],
    )
    counted_strictly = table(
        ["batch", "ratio, 2k each", "ratio, 2k - 1 each", "weights' gradient over forward, 2k - 1 each"],
        [[rows, "2.0000", *(f"{value:.4f}" for value in strict(rows))] for rows in (1, 2, 8, 64, 512)],
    )
    times = table(
        ["model", "counted", "measured in time"],
        [[name, f"{c.ratio:.2f}", f"{found['measured'][name]:.2f}"] for name, c in found["workloads"].items()],
    )
    kept = table(
        ["rows kept, %", "backward over forward"],
        [[f"{100 * keep:.0f}", f"{c.ratio:.4f}"] for keep, c in found["kept"].items()],
    )
    gpt, experts = found["workloads"]["gpt"], found["experts"]
    linear_net, one_net, conv_net, _ = (counts[name] for name in NETWORKS)
    conv_first = conv_net[1].modules[0].forward_flops / conv_net[1].forward_flops
    adam = found["optimizers"]["adam"]
    shallow, deepest = depth[True][0], depth[True][100]
    smallest, largest = (found["resnets"][d][1].ratio for d in (18, 152))
    return f"""# How many FLOPs does a backward take for one of the forward?

[What's the backward-forward FLOP ratio](https://epochai.org/blog/backward-forward-FLOP-ratio) (Hobbhahn and Sevilla)
answers "between 1:1 and 3:1, most often close to 2:1". Its evidence comes from a profiler that, as the authors say,
counts some ops twice and others not at all. This page goes through its claims one by one, counts them from the ops that
really run ([how](flops.md)), and answers the questions of its commenters. `nox -s flop-ratio` writes this page. For
all four networks at each batch size it first checks that the count equals the closed formula, to the last FLOP. 1
multiply-add = 2 FLOPs. Products and convolutions are counted, unless a table says otherwise. "With update" adds plain
SGD's 2 FLOPs per parameter to the backward, as the original does.

## The first layer 1:1, later layers 2:1

**Confirmed, exactly.** FLOPs per row at batch 8:

{layers}

The first layer has no input gradient because the batch needs none, not because it is the first. Where the batch needs
one (adversarial training, or an input that is another network's output) the first layer is 2:1 as well. A first layer
that is a lookup costs no product: in the GPT of `benchmarks/bench_step.py` every product has a ratio of 2 or more,
together {gpt.ratio:.3f}. The ratio is above 2 because fused attention computes its scores again in the backward: 5
products, for 2 in the forward. The original has no such ratio.

## ReLU and loss do not count

**Confirmed.** Forward and backward at batch 64. The columns "elementwise" and "all" count every addition, comparison
and exponential:

{light}

ResNet-50 has the largest share because of BatchNorm. The *time* of elementwise work is another matter: it moves as many
bytes as the activations of a convolution have.

## Linear layers update as much as they compute, convolutions do not

**Confirmed, with a number for "otherwise".** A linear layer uses each weight once per row. So its forward takes 2 FLOPs
per weight *and row*, and its update 2 per weight. The share of the update is 1 / N. The original says "weight update =
forward" of small batches without shared parameters; this holds at batch 1 and nowhere else. A convolution uses each
weight once per row and place, so the share is 1 / (N x places): 1 in 12,544 for ConvNet's first layer at batch 1.

{updates}

Sharing parameters in depth has the same effect as many places: DeeperConvNet applies one convolution 100 times and
updates it once.

## Batch size

![Ratio against batch size](figures/ratio-batch.png)

**Confirmed.** LinearNet goes to 1 ({linear_net[512].ratio_with_update:.4f} at batch 512) and OneNet to 2
({one_net[512].ratio_with_update:.4f}). For ConvNet "no change can be observed" (here
{conv_net[1].ratio_with_update:.4f} to {conv_net[512].ratio_with_update:.4f}). But ConvNet stays at
{conv_net[512].ratio:.2f}, not 2: the first of its two convolutions has {100 * conv_first:.0f} % of the forward.
Depth makes 2:1, not convolution.

{batches}

"The theoretical maximum of 3:1": OneNet at batch 1 has {one_net[1].ratio_with_update:.4f}, a little *more*. Biases are
updated too, at 2 FLOPs each, and cost no product in the forward. With [other optimizers](#other-optimizers) no maximum
is near 3.

## Depth

![Ratio against depth](figures/ratio-depth.png)

**Confirmed:** from {shallow.ratio:.4f} with no middle layer to {deepest.ratio:.4f} with 100. The ratio is
`2 - first / forward`, where `first` is the first layer's forward. It depends on the batch size only through the update.

{depths}

The original shares one convolution among all middle layers. This hides the cost of the update: where every layer has
weights of its own, the update grows with depth, as the compute does.

## The ResNet family

The original sees ratios away from 2 and suspects its profiler. **Settled: the ratios are {smallest:.3f} to
{largest:.3f}**, below 2 by exactly the first layer's share, whatever the batch:

{resnets}

## Other optimizers

**Confirmed in kind, corrected in number.** Adam takes 14 FLOPs per parameter and not 18. The original charges 3 FLOPs
to each of m-hat = m / (1 - beta1^t) and v-hat. But 1 - beta^t is the same number for all parameters and is computed
once. One commenter found 1 FLOP there and is right. Another says that t is a power and no transpose, and is right too
([the arithmetic](flops.md#the-update)).

{optimizers}

At batch 1 Adam makes {adam[1].ratio_with_update:.1f}:1, far beyond 3; at batch 512 {adam[512].ratio_with_update:.3f}.

## What the comments ask

**"It should always be 3:1."** The forward takes one unit, the inputs' gradient one, and the weights' gradient one. So
*training step* to forward is 3:1, and backward to forward is 2:1. Both say the same. The first layer, the update and
the recomputed scores of attention move the ratio.

**"One FLOP per connection."** It is one multiply-add per connection: 2 FLOPs here and in the original. Ratios do not
depend on this, as long as the update (a multiplication and an addition per parameter) is counted in the same coin.

**Sparse networks and mixtures of experts.** Counted: where each row goes through one of 8 experts, the ratio is
{experts.ratio:.4f}. This equals the closed formula of the layers that one row meets, router included. Sparsity does not
change the ratio where both passes make use of it. It changes the ratio where the backward makes use of *more* sparsity
than the forward. Leaving out rows is such sparsity: with `rowprop.pick`, ResNet-50 at batch 64 takes

{kept}

**"The outer product of two vectors needs no factor of two."** This is right for one row. A sum of k products takes k
multiplications and k - 1 additions. A weight's gradient is a sum over the batch: k = N. With 2k - 1 for every sum, a
later linear layer of 128 x 128 has

{counted_strictly}

So at batch 1 the backward is 1.5 times the forward. The next question is about the additions that "accumulate the
gradient of each example". The factor of two stands for these very additions: N - 1 per weight. They do not come on top
of it. From a few dozen rows on, the convention of 2k is exact to a percent.

**"A CNN filter takes (H' x W' x D) x (2 x K x K x C)."** Yes: this is `closed_forms.convolution`, and every count above
equals it. Padding is counted as if it were input, by that formula and by torch's own.

**"FLOPs mislead: automatic differentiation takes ten times the forward."** Not here. Counted, and measured in time on
one CPU thread ([how](../benchmarks/results/2026-11-21-cpu-1-threads.md)):

{times}

A backward that takes far longer than its count says is a finding, not a law: a slow kernel, or an op split into
thousands.
"""


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
