"""Products and convolutions of a compiled program; loops count as often as they run, unlike in XLA's own total.

1 multiply-add is 2 FLOPs. What else a program does, as gathers and elementwise work, is not counted.
"""

from __future__ import annotations

import re
from math import prod

SHAPE = re.compile(r"\w+\[([\d,]*)\]")
LINE = re.compile(r"^\s*(?:ROOT )?%?([\w.-]+) = (\(.*?\)|\S+) ([\w-]+)\((.*)$")


def numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",") if number]


def count_flops(compiled) -> int:
    """FLOPs of one call of what ``jax.jit(...).lower(...).compile()`` returned."""
    computations: dict[str, list[str]] = {}
    entry = name = ""
    for line in compiled.as_text().splitlines():
        if head := re.match(r"^(ENTRY )?%?([\w.-]+) \(.*\{$", line):
            name = head[2]
            computations[name] = []
            entry = name if head[1] else entry
        elif name:
            computations[name].append(line)
    known: dict[str, int] = {}

    def of(name: str) -> int:
        if name not in known:
            known[name] = total(computations[name])
        return known[name]

    def total(lines: list[str]) -> int:
        shapes, flops = dict[str, list[int]](), 0
        for line in lines:
            if not (found := LINE.match(line)):
                continue
            result, shape, kind, rest = found.groups()
            if size := SHAPE.match(shape):
                shapes[result] = numbers(size[1])
            operands = [shapes.get(operand, []) for operand in re.findall(r"%([\w.-]+)", rest.partition(")")[0])]
            if kind == "dot":
                axes = numbers(re.search(r"lhs_contracting_dims=\{([\d,]*)\}", rest)[1])
                flops += 2 * prod(shapes[result]) * prod(operands[0][axis] for axis in axes)
            elif kind == "convolution":
                labels = re.search(r"dim_labels=\w+_(\w+)->", rest)[1]
                flops += 2 * prod(shapes[result]) * prod(operands[1]) // operands[1][labels.index("o")]
            elif kind == "while":
                trips = int(re.search(r'"known_trip_count":\{"n":"(\d+)"', rest)[1])
                flops += trips * of(re.search(r"body=%?([\w.-]+)", rest)[1])
            elif kind in ("fusion", "call", "conditional"):
                called = re.findall(r"(?:calls|to_apply|true_computation|false_computation)=%?([\w.-]+)", rest)
                called += re.findall(r"%([\w.-]+)", (re.search(r"branch_computations=\{(.*?)\}", rest) or ["", ""])[1])
                flops += max(map(of, called), default=0) if kind == "conditional" else sum(map(of, called))
            elif kind == "custom-call" and "matmul" in rest.lower():
                raise NotImplementedError(f"a product in a call of a library: {line}")
        return flops

    return total(computations[entry])
