"""How many instructions a backward takes: plain, of the kept rows alone, and sliced by Python and natively.

Callgrind (Debian's ``valgrind``) counts them, so other work on the machine changes nothing. The models are those of
``bench_overhead.py`` at their smallest width, where little but the host's work is left. ``few`` is the plain backward
of the kept rows by themselves, without a gather. Each way runs in a process of its own: some backwards first, in which
native dispatch records, then those that are counted, from the call of ``backward()`` to its end.

``rowprop native`` has to have compiled native dispatch.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

import rowprop
from bench_overhead import WORKLOADS
from bench_step import RESULTS, draw, row_losses, save, setting
from rowprop.native import building

WAYS = ("plain", "few", "Python", "native")
WARMUP = 5
BACKWARD = "*PythonEngine::execute(*"
"""The function of torch within which instructions are counted."""
FUNCTIONS = {
    "ops": r"::kernel\(",
    "steps": r"::Run::run\([^']*$",
    "gathers": r"::Run::run\(.*'2",
    "python": r"torch::autograd::PyNode::apply\(",
}
"""Functions of the extension, and that of custom functions in Python, as pick is one: their instructions with those of
what they call."""


def backwards(workload: str, way: str, count: int) -> None:
    """Run the backwards; the instructions of the first are not counted."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    make, widths = WORKLOADS[workload]
    model, batch = make(widths[0])
    rows = draw(len(batch[0]), 0.25, torch.device("cpu"))
    some = tuple(t[rows] for t in batch)
    for number in range(WARMUP + count):
        losses = row_losses(model, some if way == "few" else batch)
        loss = rowprop.pick(losses, rows).mean() if way in ("Python", "native") else losses.mean()
        model.zero_grad()
        if number == WARMUP:
            subprocess.run(["callgrind_control", "-i", "on", str(os.getpid())], check=True, capture_output=True)
        loss.backward()


def counted(workload: str, way: str, count: int) -> dict[str, float]:
    """Million instructions of a backward, and of what the functions take of them."""
    with tempfile.TemporaryDirectory() as folder:
        callgrind = ["valgrind", "--tool=callgrind", "--instr-atstart=no", f"--toggle-collect={BACKWARD}"]
        command = [*callgrind, f"--callgrind-out-file={folder}/out", sys.executable, __file__]
        environment = os.environ | {"ROWPROP_NATIVE": "1" if way == "native" else "0", "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [*command, "--only", workload, way, "--backwards", str(count)],
            env=environment, check=True, capture_output=True, text=True,
        )  # fmt: skip
        annotate = ["callgrind_annotate", "--inclusive=yes", "--threshold=100", f"{folder}/out"]
        lines = subprocess.run(annotate, check=True, capture_output=True, text=True).stdout.splitlines()
    found = re.search(r"Collected : (\d+)", done.stderr)
    assert found is not None, done.stderr
    result = {"all": int(found[1]) / count / 1e6}
    for name, pattern in FUNCTIONS.items():
        one = [line for line in lines if re.search(pattern, line.partition(" [")[0])]
        result[name] = sum(int(line.split()[0].replace(",", "")) for line in one[:1]) / count / 1e6
    return result


def beyond_few(found: dict[str, dict[str, float]]) -> dict[str, float]:
    """What native dispatch takes beyond the backward of the kept rows alone, in parts."""
    native = found["native"]
    parts = {
        "gathers": native["gathers"],
        "pick and the walk over the graph": native["python"],
        "look-up of recipes, results": native["ops"] - native["steps"],
    }
    return parts | {"the rest": native["all"] - found["few"]["all"] - sum(parts.values())}


def main() -> None:
    """Count, print, and write JSON and markdown."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--backwards", type=int, default=20, help="that are counted (default %(default)s)")
    parser.add_argument("--only", nargs=2, metavar=("WORKLOAD", "WAY"), help="run the backwards, and count nothing")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the results (default %(default)s)")
    args = parser.parse_args()
    if args.only:
        workload, way = args.only
        return backwards(workload, way, args.backwards)
    if building.find()[0] is None:
        sys.exit(f"What dispatches is {building.find()[1]}; `rowprop native` compiles the native one.")
    result: dict[str, Any] = {
        "command": " ".join(["python benchmarks/count_instructions.py", *sys.argv[1:]]),
        "setting": setting(torch.device("cpu"), 1, dtype="float32"),
        "workloads": {name: {way: counted(name, way, args.backwards) for way in WAYS} for name in WORKLOADS},
    }
    about = ", ".join(f"{key} {value}" for key, value in result["setting"].items())
    lines = ["# Instructions of a backward", "", f"`{result['command']}`: {about}", ""]
    lines += (__doc__ or "").partition("\n\n")[2].strip().splitlines()
    lines += ["", "| million instructions | " + " | ".join(WAYS) + " |", "|---|" + "---|" * len(WAYS)]
    for name, found in result["workloads"].items():
        lines.append(f"| {name} | " + " | ".join(f"{found[way]['all']:.2f}" for way in WAYS) + " |")
    parts = {name: beyond_few(found) for name, found in result["workloads"].items()}
    lines += [
        "",
        "| native beyond few, million instructions | " + " | ".join(parts["mlp"]) + " |",
        "|---|---|---|---|---|",
    ]
    lines += [f"| {name} | " + " | ".join(f"{part:.2f}" for part in of.values()) + " |" for name, of in parts.items()]
    page = "\n".join(lines) + "\n"
    print(page)
    save(args.out, "instructions", result, page)


if __name__ == "__main__":
    main()
