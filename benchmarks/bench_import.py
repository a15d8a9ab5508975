"""The time of all of rowprop's names beside `import torch`: one process per round, medians and quartiles.

Each process imports torch and then every name of rowprop, which loads a name at its first use, and reports both times.
The first round, which fills the disk's cache, is left out.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import subprocess
import sys

import torch

CHILD = """
import time
start = time.perf_counter()
import torch
middle = time.perf_counter()
from rowprop import *
print(middle - start, time.perf_counter() - middle)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    rounds = parser.parse_args().rounds
    answers = [subprocess.check_output([sys.executable, "-c", CHILD], text=True) for _ in range(rounds + 1)]
    times = zip(*(map(float, answer.split()) for answer in answers[1:]), strict=True)
    for name, values in zip(("torch", "rowprop"), times, strict=True):
        low, median, high = (1e3 * value for value in statistics.quantiles(values, n=4))
        print(f"import {name}: {median:.0f} ms ({low:.0f} to {high:.0f})")
    print(f"torch {torch.__version__}, python {platform.python_version()}, {rounds} processes")


if __name__ == "__main__":
    main()
