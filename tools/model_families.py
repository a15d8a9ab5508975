"""Writes docs/model-families.md: the costs and errors of the models of tools/families.py and tools/decoders.py."""

from __future__ import annotations

from importlib.metadata import version
from itertools import groupby

import torch

import decoders
from decoders import DECODERS, MASKS, PACKED, SOME, Decoder, keep_of
from families import ENTRIES, PAGE, SINGLE, TIMM, TORCHVISION, TRANSFORMERS, frozen_entry
from transformers_all import DENSE, FOUND
from transformers_all import LIMIT as DEAR
from zoo import KEEP, ROWS, Backward, Entry, N, errors, masked, sliced

LIMIT = KEEP + 0.02
PACKAGES = ("torch", "torchvision", "timm", "transformers")


def line(entry: Entry) -> tuple[str, float]:
    """One model's line of its package's table, with why it is not sliced where it is not, and its ratio."""
    entry = frozen_entry(entry)
    full, part = masked(entry, torch.float32), sliced(entry, torch.float32)
    ratio = part.flops.total_flops / full.flops.total_flops
    double = ""
    if SINGLE.get(entry.name) != "only":
        double = worst(errors(masked(entry, torch.float64), sliced(entry, torch.float64)))
    reasons = [f"`{name}`: {part.report.densified[name].reason}" for name in entry.densifies]
    if entry.share > 1:
        reasons = ["the fused LSTM's forward runs again on the kept rows"]
    cells = [f"{entry.name} ({'; '.join(reasons)})" if reasons else entry.name]
    cells += [worst(errors(full, part)), double, f"{ratio:.3f}"]
    return f"| {' | '.join(cells)} |", ratio


def tables(lines: list[str]) -> str:
    """The lines of all models, a table for each package."""
    text = ""
    for package, part in groupby(zip(ENTRIES, lines, strict=True), lambda pair: pair[0].kind):
        text += f"## {package}\n\n| model | error, float32 | error, float64 | FLOPs |\n|---|---|---|---|\n"
        text += "".join(f"{line}\n" for _, line in part) + "\n"
    return text


def worst(errors: dict[str, float]) -> str:
    return f"{max(errors.values()):.0e}"


def decoder_line(decoder: Decoder) -> str:
    """A decoder's line of the table of tokens: the worst of the masks that keep some tokens."""
    found: list[tuple[float, ...]] = []
    for kept in (MASKS[mask] for mask in SOME):
        exact = [[run(decoder, dtype, kept) for run in (decoders.plain, decoders.exact)] for dtype in decoder.dtypes]
        over = exact[0][1].flops.total_flops / decoders.reachable_flops(decoder, kept)
        cut = decoders.cut(decoder, torch.float32, kept)
        share = cut.flops.total_flops / decoders.full(decoder) / keep_of(kept)
        error = largest(decoders.detached(decoder, torch.float32, kept), cut)
        found.append((*(largest(*pair) for pair in exact), over, error, share))
    single, *double, over, error, share = (max(column) for column in zip(*found, strict=True))
    doubles = "" if decoder.single else f"{double[0]:.0e}"
    cells = [decoder.id, f"{single:.0e}", doubles, f"{over:.2f}"]
    if decoder.interface:
        segments = max(segments_share(decoder, way) for way in decoder.packed)
        cells += [f"{error:.0e}", f"{share:.2f}", f"{segments:.2f}"]
    return f"| {' | '.join([*cells, *[''] * (7 - len(cells))])} |"


def segments_share(decoder: Decoder, way: str) -> float:
    kept, inputs = PACKED[way]
    cut = decoders.cut(decoder, torch.float32, kept, **inputs)
    return cut.flops.total_flops / decoders.full(decoder, **inputs) / keep_of(kept)


def largest(expected: Backward, actual: Backward) -> float:
    return max(errors(expected, actual).values())


def page() -> str:
    versions = ", ".join(f"{name} {version(name).partition('+')[0]}" for name in PACKAGES)
    lines = [line(entry) for entry in ENTRIES]
    within = [ratio <= LIMIT for _, ratio in lines]
    images = len(TORCHVISION + TIMM)
    single = " and ".join(name for name, how in SINGLE.items() if how != "only")
    return f"""# Model families

**At most {LIMIT:.2f} of the FLOPs: {sum(within[:images])} of {images} models from torchvision and timm,
{sum(within[images:])} of {len(TRANSFORMERS)} from transformers.** A model above that names its reason.

Written by `nox -s families -- --page` with {versions}, on the CPU.

The models are tiny configurations with random weights and with BatchNorm on running statistics.
Of 8 rows {8 * KEEP:.0f} are picked. *Error* is the largest difference between any parameter's gradient
and that of plain indexing, relative to the gradient's largest entry (at least a hundredth of the model's
largest). *FLOPs* are the FLOPs of the backward that really ran, over those of the full backward. Models
with BatchNorm are tested in training mode as well, with `batchnorm="exact"`.
Parts of {single} run in float32 whatever the dtype.
`nox -s torchvision` tries torchvision's own models at their own width and depth
([errors and FLOPs](../benchmarks/results/2026-11-25-torchvision-cpu.md)).

{tables([text for text, _ in lines])}{tokens()}{every_class()}"""


def every_class() -> str:
    """What `--all` found when it last ran."""
    counts = "".join(f"| {head} | {' | '.join(map(str, found))} |\n" for head, found in FOUND.items())
    dense = "".join(f"| {name} | {share:.2f} | {reason} |\n" for name, (share, reason) in DENSE.items())
    return f"""
## Every class of transformers 5.24

`nox -s families -- --all` builds every class of five auto mappings from the default configuration of its type, with
smaller sizes, and keeps {len(ROWS)} of {N} rows.
A few types also need settings that their small size asks for, and Reformer runs without dropout and with a fixed seed.
It fails if a gradient is wrong, or if a model costs more than
{DEAR} of the FLOPs and is not listed here. Run with transformers 5.24.0 and torch 2.13.0 on the CPU.
*Built* are those whose plain backward ran. Most others need an image, a sound, another model's states or an
optional package, or their default configuration does not run in transformers.
The command prints why.

| class | types | built | exact | at most {DEAR} of the FLOPs |
|---|---|---|---|---|
{counts}
These cost more. The share is the most that any of the classes costs.

| type | FLOPs | why |
|---|---|---|
{dense}"""


def tokens() -> str:
    sizes = f"{decoders.N} sequences of {decoders.T} tokens, {decoders.LAYERS} layers of width {decoders.WIDTH}"
    shares = ", ".join(f"{keep_of(MASKS[mask]):.2f}" for mask in SOME)
    text = f"""## Tokens of decoders

Here tokens are kept: {sizes}, a vocabulary of {decoders.V}, and the usual
shift between logits and labels. Each figure is the worst of three masks, which keep {shares}
of the losses: random tokens; very different numbers in each sequence, none in some; answers behind prompts
of different lengths.

* *float32*, *float64*: the error against `losses[mask]`, with exact attention.
* *over reachable*: FLOPs over those of the part of the backward that the kept tokens' gradient can reach,
  computed from the sizes of the modules: the head and the last layer at kept tokens; the last layer's keys
  and values, and all layers below, at all tokens of the sequences that keep one.
* *cut, error*: `attention="cut"` against dense code that detaches the keys and values of other tokens.
* *cut, over keep*: FLOPs over the kept tokens' share of the full backward.
* *segments*: the same for whole segments of packed rows, where cut attention is exact.

Where no error for float64 stands, parts of the model run in float32 whatever the dtype, or an op has no
kernel for float64. The oracle of cut attention does not reach BLOOM's own.

| model | float32 | float64 | over reachable | cut, error | cut, over keep | segments |
|---|---|---|---|---|---|---|
"""
    return text + "".join(f"{decoder_line(decoder)}\n" for decoder in DECODERS)


if __name__ == "__main__":
    torch.set_num_threads(1)
    PAGE.write_text(page())
