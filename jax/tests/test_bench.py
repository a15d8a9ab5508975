"""The benchmark of a step: its figures beside formulas, and the flags under which XLA makes its programs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
OF_TESTS = "JAX_DISABLE_MOST_OPTIMIZATIONS", "XLA_FLAGS"
ENVIRONMENT = {name: value for name, value in os.environ.items() if name not in OF_TESTS}


def run(*arguments):
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=BENCHMARKS, env=ENVIRONMENT, capture_output=True, text=True, check=True).stdout


def test_the_table_has_the_limit_of_the_formula_and_each_step_over_it():
    # Red with the whole backward for the kept share, the highest of two processes for their median, or a step divided
    # by the plain one alone.
    table = run("bench_step.py", "--network", "MLP, N = 512", "--processes", "2", "--rounds", "1").split("\n|")
    assert "medians of 2 processes of 1 interleaved rounds" in table[0] and len(table) == 6
    first, others = 512 * 1024, 3 * 1024**2 + 1024 * 10
    forward, backward = first + others, first + 2 * others
    for line, num_kept in zip(table[3:], (52, 128, 256), strict=True):
        _, flops, step, limit, over, spread, _, _, alone, _ = map(str.strip, line.split("|"))
        lowest, highest = map(float, spread.split(", "))
        assert float(flops) == pytest.approx(1, abs=0.02)
        assert float(limit) == pytest.approx((forward + num_kept / 512 * backward) / (forward + backward), abs=0.002)
        assert float(over) == pytest.approx(float(step) / float(limit), abs=0.004)
        assert float(over) == pytest.approx((lowest + highest) / 2, abs=0.006)
        assert alone.endswith(f"({num_kept / 512:.3f})")


def test_xla_reads_the_flag_that_one_thread_wants():
    # glibc keeps less than 32 MB from call to call. Red with the flag left out, or behind a word without dashes: XLA
    # reads no more there.
    code = (
        "from bench_step import *\n"
        "losses_fn, params, batch = NETWORKS['CNN, N = 64']()\n"
        "step = jax.jit(rowprop_jax.value_and_grad(losses_fn, rowprop_jax.top_k, keep=0.25))\n"
        "print(step.lower(params, batch).compile().memory_analysis().temp_size_in_bytes)"
    )
    assert int(run("-c", code)) < 32 * 2**20
