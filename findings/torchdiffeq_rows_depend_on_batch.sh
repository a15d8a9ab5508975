#!/usr/bin/env bash
# torchdiffeq 0.2.5, torch 2.13.0.
# Guess: an equation that is solved for each row by itself gives a row the same solution in any batch.
# Seen: the default, dopri5, chooses one step size for the batch, by a norm over all rows. A row beside another one has
# another solution than alone, by far more than rounding; with a fixed step (rk4) it is the same. So the losses that a
# second forward of the chosen rows computes are not those by which they were chosen.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy scipy torchdiffeq==0.2.5
cat >"$folder/run.py" <<'PY'
from importlib.metadata import version

import torch
from torchdiffeq import odeint

print("torchdiffeq", version("torchdiffeq"), "torch", torch.__version__)
batch, times = torch.tensor([[1.0], [100.0], [0.001]]), torch.tensor([0.0, 1.0])


def solution(rows, **options):
    return odeint(lambda t, y: -50 * torch.sin(10 * t) * y, rows, times, **options)[-1, 0].item()


for options in ({"rtol": 1e-2, "atol": 1e-3}, {"method": "rk4", "options": {"step_size": 0.01}}):
    alone, beside = solution(batch[:1], **options), solution(batch, **options)
    print(f"{options}: the first row alone {alone:.3e}, in the batch {beside:.3e}")
    assert (abs(alone - beside) > 0.1 * alone) == ("rtol" in options)
PY
"$folder/env/bin/python" -W ignore "$folder/run.py"
