#!/usr/bin/env bash
# optax 0.2.8, jax 0.10.2, torch 2.13.0.
# Guess: a hinge loss of exactly 0, at a margin of exactly 1, has no gradient, as relu(1 - x) has in both libraries.
# Seen: optax.hinge_loss has -0.5 there, since jnp.maximum halves the gradient of a tie; torch's hinge_embedding_loss
# has the whole gradient at its corner. So "satisfied" rows at the corner train in one library and not in another, and a
# rule that drops rows by a loss of 0 changes the gradient. Integer-valued scores and quantised models meet the corner.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy jax==0.10.2 optax==0.2.8
cat >"$folder/run.py" <<'PY'
from importlib.metadata import version

import jax
import jax.numpy as jnp
import optax
import torch
from torch.nn import functional as F

print({name: version(name) for name in ("optax", "jax", "torch")})
x = torch.ones(1, requires_grad=True)
loss = F.hinge_embedding_loss(x, -torch.ones(1))
loss.backward()
seen = {
    "optax.hinge_loss": (float(optax.hinge_loss(1.0, 1.0)), float(jax.grad(optax.hinge_loss)(1.0, 1.0))),
    "relu in JAX": (float(jax.nn.relu(1 - 1.0)), float(jax.grad(lambda x: jax.nn.relu(1 - x))(1.0))),
    "hinge_embedding_loss": (loss.item(), x.grad.item()),
}
print("loss and gradient at the margin:", seen)
assert list(seen.values()) == [(0.0, -0.5), (0.0, 0.0), (0.0, -1.0)]
PY
"$folder/env/bin/python" -W ignore "$folder/run.py"
