#!/usr/bin/env bash
# torch 2.13.0 for the CPU alone.
# Guess: torch.manual_seed costs microseconds where there is no device, since it sets one number of one generator.
# Seen: each call formats the whole Python stack three times, once each for CUDA, XPU and MTIA, in case one of them is
# initialized later. So the cost grows with the depth of the stack: a test suite that seeds before every test, or a loop
# that seeds at every step, spends milliseconds on each call. torch.default_generator.manual_seed formats none.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy
cat >"$folder/run.py" <<'PY'
import traceback
from collections.abc import Callable

import torch

extract_stack = traceback.extract_stack
frames: list[int] = []


def counted(*args, **kwargs):
    frames.append(len(extracted := extract_stack(*args, **kwargs)))
    return extracted


def below(depth: int, seed: Callable[[int], object]) -> list[int]:
    """How many frames each formatted stack held, for a call at this depth."""
    if depth:
        return below(depth - 1, seed)
    frames.clear()
    seed(0)
    return [*frames]


traceback.extract_stack = counted
assert not torch.cuda.is_initialized()
seen = {depth: below(depth, torch.manual_seed) for depth in (0, 100)}
print(f"torch {torch.__version__}, frames formatted by one torch.manual_seed, by the depth of the stack: {seen}")
assert all(len(each) == 3 for each in seen.values())
assert all(deep - flat == 100 for flat, deep in zip(*seen.values(), strict=True))
assert below(100, torch.default_generator.manual_seed) == []
PY
"$folder/env/bin/python" -W ignore "$folder/run.py"
