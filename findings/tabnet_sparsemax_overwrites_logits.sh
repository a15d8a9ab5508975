#!/usr/bin/env bash
# pytorch-tabnet 4.1.0, torch 2.13.0.
# Guess: sparsemax(logits) reads its argument and leaves it alone, as softmax and entmax15 of the same file do.
# Seen: sparsemax subtracts each row's maximum from the logits in place, and does not tell autograd. A term of the loss
# that uses the logits after the call (a temperature, a penalty, a residual connection) sees other values, no error is
# raised, and the gradient is that of the other values. A copy, sparsemax(logits.clone()), gives the expected loss.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy scikit-learn scipy tqdm pytorch-tabnet==4.1.0
cat >"$folder/run.py" <<'PY'
from importlib.metadata import version

import torch
from pytorch_tabnet.sparsemax import entmax15, sparsemax

print("pytorch-tabnet", version("pytorch-tabnet"), "torch", torch.__version__)
x = torch.tensor([[1.0, 2.0, 3.0]])
for name, function in (("sparsemax", sparsemax), ("entmax15", entmax15)):
    losses = []
    for copied in (False, True):
        logits = (x * 1).requires_grad_() * 1
        weights = function(logits.clone() if copied else logits, -1)
        losses.append((weights * logits).sum().item())
    print(f"{name}: the mean logit is {losses[1]:.3f}, without a copy {losses[0]:.3f}")
    assert (losses[0] == losses[1]) == (name == "entmax15")
PY
"$folder/env/bin/python" -W ignore "$folder/run.py"
