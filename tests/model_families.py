"""Writes docs/model-families.md: what the models of tests/families.py cost and how exact they are."""

from __future__ import annotations

from importlib.metadata import version

import torch

from families import ENTRIES, PAGE, SINGLE, TIMM, TORCHVISION, TRANSFORMERS, frozen_entry
from zoo import KEEP, Entry, errors, masked, sliced

LIMIT = KEEP + 0.02
PACKAGES = ("torch", "torchvision", "timm", "transformers")


def line(entry: Entry) -> tuple[str, float]:
    """One model's line of the table, and its ratio."""
    entry = frozen_entry(entry)
    full, part = masked(entry, torch.float32), sliced(entry, torch.float32)
    ratio = part.flops.total_flops / full.flops.total_flops
    double = ""
    if SINGLE.get(entry.name) != "only":
        double = worst(errors(masked(entry, torch.float64), sliced(entry, torch.float64)))
    names = ", ".join(f"`{name}`" for name in entry.densifies)
    reasons = "; ".join(part.report.densified[name].reason for name in entry.densifies)
    if entry.share > 1:
        reasons = "the fused LSTM's forward runs again on the kept rows"
    cells = [entry.kind, entry.name, worst(errors(full, part)), double, f"{ratio:.3f}", names, reasons]
    return f"| {' | '.join(cells)} |", ratio


def worst(errors: dict[str, float]) -> str:
    """The largest of them."""
    return f"{max(errors.values()):.0e}"


def page() -> str:
    """The page as a whole."""
    versions = ", ".join(f"{name} {version(name).partition('+')[0]}" for name in PACKAGES)
    lines = [line(entry) for entry in ENTRIES]
    within = [ratio <= LIMIT for _, ratio in lines]
    images = len(TORCHVISION + TIMM)
    single = " and ".join(name for name, how in SINGLE.items() if how != "only")
    return "\n".join(
        [
            "# Model families",
            "",
            f"Written by `scripts/families --page` with {versions}, on the CPU.",
            "",
            "The models are tiny configurations with random weights and with BatchNorm on running statistics.",
            f"Of 8 rows {8 * KEEP:.0f} are picked. *Error* is the largest difference between any parameter's gradient",
            "and that of plain indexing, relative to the gradient's largest entry (at least a hundredth of the model's",
            "largest). *FLOPs* are the FLOPs of the backward that really ran, over those of the full backward. Models",
            'with BatchNorm are tested in training mode as well, with `batchnorm="exact"`.',
            f"Parts of {single} run in float32 whatever the dtype.",
            "",
            f"At most {LIMIT:.2f} of the FLOPs: {sum(within[:images])} of {images} models from torchvision and timm,",
            f"{sum(within[images:])} of {len(TRANSFORMERS)} from transformers. A model that is not",
            "sliced names its reason.",
            "",
            "| package | model | error, float32 | error, float64 | FLOPs | densifies at | because |",
            "|---|---|---|---|---|---|---|",
            *[text for text, _ in lines],
            "",
        ]
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    PAGE.write_text(page())
