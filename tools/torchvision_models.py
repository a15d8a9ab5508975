"""Prints a table: torchvision's own models in evaluation mode, one of each family, against plain indexing.

Parameters that start at zero, as some heads do, are drawn: below them every gradient would be zero. The error is the
largest of any parameter, relative to the largest entry of its own gradient.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.metadata import version
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from families import alive, each_pixel, load, torchvision_models
from zoo import ROWS, C, Entry, Losses, N, classify, masked, sliced


def named(name: str, *sizes: int, losses: Losses = classify, **options: Any) -> Entry:
    """A model under torchvision's name for it, and the size of its images: as small as it permits."""
    return entered(name, lambda models: models.get_model(name, weights=None, num_classes=C, **options), sizes, losses)


def mvit(name: str) -> Entry:
    """A model whose constructor fixes the size of its clips, for smaller ones."""
    frames, size = 4, 64

    def build(_: Any) -> nn.Module:
        module = load("torchvision.models.video.mvit")
        make = module._mvit
        small = {"spatial_size": (size, size), "temporal_size": frames}
        with patch.object(module, "_mvit", lambda **options: make(**{**options, **small})):
            return getattr(module, name)(num_classes=C)

    return entered(name, build, (frames, size, size))


def entered(name: str, build: Callable[[Any], nn.Module], sizes: tuple[int, ...], losses: Losses = classify) -> Entry:
    """A model in evaluation mode, after one batch in training mode that gives BatchNorm its statistics.

    With those that it has at first activations shrink from layer to layer, until hardly a gradient is left to compare.
    """
    shape = N, 3, *(sizes or (32, 32))

    def calibrated() -> nn.Module:
        model = alive(build(torchvision_models()))
        for module in model.modules():
            if isinstance(module, _BatchNorm):
                module.momentum = 1.0
        with torch.no_grad():
            model(torch.randn(shape))
        return model.eval()

    return Entry("torchvision", name, calibrated, lambda: (torch.randn(shape), torch.randint(C, (N,))), losses)


ROUNDING = 1e-12
"""A gradient of this share of the model's largest is rounding, as that of attention's keys' bias, and not compared."""
CLIP = 4, 32, 32
SMALL = """convnext_tiny densenet121 efficientnet_b0 efficientnet_v2_s mnasnet0_5 mobilenet_v2 mobilenet_v3_small
regnet_x_400mf regnet_y_400mf resnet18 resnet50 resnext50_32x4d shufflenet_v2_x0_5 squeezenet1_1 swin_t vgg11 vgg11_bn
wide_resnet50_2""".split()
ENTRIES = [
    *map(named, SMALL),
    *(named(name, *CLIP) for name in ("mc3_18", "r2plus1d_18", "r3d_18", "swin3d_t")),
    named("alexnet", 63, 63),
    named("googlenet", init_weights=False),
    named("inception_v3", 75, 75, init_weights=False, aux_logits=False),
    named("swin_v2_t", 64, 64),
    named("vit_b_32", 64, 64, image_size=64),
    named("maxvit_t", 224, 224),
    named("s3d", 14, 224, 224),
    *map(mvit, ("mvit_v1_b", "mvit_v2_s")),
    *(
        named(name, losses=each_pixel, weights_backbone=None)
        for name in ("deeplabv3_mobilenet_v3_large", "fcn_resnet50", "lraspp_mobilenet_v3_large")
    ),
]


def line(entry: Entry) -> str:
    full, part = masked(entry, torch.float64), sliced(entry, torch.float64)
    sizes = {name: float(grad.abs().max()) for name, grad in full.grads.items() if grad is not None}
    told = [name for name, size in sizes.items() if size > ROUNDING * max(sizes.values())]
    error = max(float((part.grads[name] - full.grads[name]).abs().max()) / sizes[name] for name in told)
    cells = [
        entry.name, "x".join(map(str, entry.batch()[0].shape)), f"{len(ROWS)} of {N}",
        f"{len(told)} of {len(sizes)}", f"{error:.0e}", f"{part.flops.total_flops / full.flops.total_flops:.3f}",
        ", ".join(f"`{op}`" for op in part.report.densified),
    ]  # fmt: skip
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    torch.set_num_threads(1)
    torchvision_models()
    print(f"torch {torch.__version__}, torchvision {version('torchvision')}, Python {sys.version.split()[0]}\n")
    print("| model | batch | kept | gradients | error, float64 | FLOPs | densifies at |\n|---|---|---|---|---|---|---|")
    for entry in ENTRIES:
        print(line(entry), flush=True)
