"""Writes docs/support-matrix.md from the registry of rules and the zoo's measured figures."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch

from audit import missing, waited
from rowprop.backprop.rules.registry import RULES, op_name
from zoo import ENTRIES, KEEP, Entry, masked, sliced

PAGE = Path(__file__).parent.parent / "docs" / "support-matrix.md"
TORCH = ".".join(torch.__version__.split(".")[:2])

HEAD = f"""# Support matrix

Written by `nox -s support-matrix` with torch {TORCH} on the CPU; a test keeps it true.

An op with a rule runs at the kept rows only, as long as it treats rows alike. An op without a rule, and a use that
mixes rows, *densifies*: the op gets the gradient of all rows back. The result is the same, and upstream of the op the
backward costs as much as a plain one. `rowprop.watch()` names such ops in your own model.
"""


def rules_part() -> str:
    families: dict[str, dict[tuple[str, str], list[str]]] = {}
    for op, rule in RULES.items():
        what = (rule.run.__doc__ or "").strip().partition("\n")[0].rstrip(".")
        tokens = "yes" if rule.positions else "whole rows"
        families.setdefault(rule.family, {}).setdefault((what, tokens), []).append(op_name(op))
    text = f"""## Ops with a rule

{len(RULES)} ops. *Tokens* says which of them run at the kept [tokens](tokens.md) alone, where they treat
tokens alike. The others take the whole rows that have a kept token.
"""
    for family, rules in sorted(families.items()):
        text += f"\n### {family}\n\n| what | tokens | ops |\n|---|---|---|\n"
        for (what, tokens), names in rules.items():
            text += f"| {what} | {tokens} | {code(sorted(names))} |\n"
    return text


def models_part() -> str:
    text = f"""## Models

The small models of `tools/zoo.py` in float32 at keep {KEEP}: the FLOPs of the sliced backward over
those of the full backward (the limit is {KEEP:.3f}), and the ops that densified. Gradients equal those of
plain indexing within 1e-5 in float32 and 1e-10 in float64, with `batchnorm="exact"`.

| kind | model | backward FLOPs | densifies at | not in the count |
|---|---|---|---|---|
"""
    return text + "".join(map(line, ENTRIES))


def device_part() -> str:
    """The numbers that rules wait for on a device, a line per number."""
    text = """## On a device

But for one use, nothing densifies on an accelerator that does not on the CPU: the tests run again with
`pytest --as-accelerator`, and `nox -s audit` compares the two. Some rules must know a number that only the
device knows. There the host waits, which costs less than a backward of all rows, and `watch().waited` counts
it. Under capture of a CUDA graph the host cannot wait, and these rules densify. The one use is
`masked_fill` with a tensor as its value, which may not be zero. No formula of torch itself calls it.

| the host waits to know | in models, waits per backward |
|---|---|
"""
    for what, models in waited().items():
        where = ", ".join(f"{name.replace('_', ' ')} {times}" for name, times in models.items())
        text += f"| {what} | {where} |\n"
    return text


def missing_part() -> str:
    """The ops at which gradients went back to all rows, a line per op."""
    text = """## Missing

Ops at which a gradient went back to all rows, in the models above and in torch's own samples of its ops.
The samples know of no batch: the first dimension of the output serves as the rows, and most samples really
mix these rows. `nox -s audit` compares every claim of the rules with the dense truth, in every layout.

| op | why | calls | models | calls in samples | of ops |
|---|---|---|---|---|---|
"""
    for name, met in missing().items():
        counts = (met.models.total(), len(met.models), met.samples.total(), len(met.samples))
        reasons = sorted({reason.partition(";")[0] for reason in met.reasons})  # without the remedy
        text += f"| `{name}` | {'; '.join(reasons)} | {' | '.join(map(str, counts))} |\n"
    return text


def code(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def line(entry: Entry) -> str:
    full, part = masked(entry, torch.float32).flops.total_flops, sliced(entry, torch.float32).flops.total_flops
    name = entry.name.replace("_", " ")
    cells = [entry.kind, name, f"{part / full:.3f}", code(entry.densifies), code(entry.uncounted)]
    return f"| {' | '.join(cells)} |\n"


if __name__ == "__main__":
    torch.set_num_threads(1)
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text("\n".join((HEAD, rules_part(), models_part(), device_part(), missing_part())))
