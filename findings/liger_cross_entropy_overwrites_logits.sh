#!/usr/bin/env bash
# liger-kernel 0.8.5, triton 3.7.1 (as an interpreter on the CPU), torch 2.13.0.
# Guess: a loss reads its logits and leaves them alone, or autograd's version counter shows the write.
# Seen: LigerCrossEntropyLoss replaces the logits by their gradient in its forward; under no_grad it replaces the logits of
# ignored rows by zeros. The version counter stays at 0. So an accuracy, or a score of each row, that is computed from
# the logits after the loss is wrong, and no error says so. Compute it before the loss, or from a copy.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy liger-kernel==0.8.5 triton==3.7.1 packaging
cat >"$folder/run.py" <<'PY'
from importlib.metadata import version

import torch
from liger_kernel.transformers import LigerCrossEntropyLoss

print("liger-kernel", version("liger-kernel"), "torch", torch.__version__)
torch.manual_seed(0)
before, labels = torch.randn(6, 8), torch.tensor([1, 3, -100, 2, 7, 5])
for grad in (True, False):
    logits = (before * 1).requires_grad_(grad)
    with torch.set_grad_enabled(grad):
        value = LigerCrossEntropyLoss()(logits, labels)
        expected = torch.nn.functional.cross_entropy(before, labels)
    changed = [row for row in range(6) if not torch.equal(logits[row], before[row])]
    print(f"grad {grad}: the loss is right, rows {changed} of the logits changed, version {logits._version}")
    assert torch.allclose(value, expected) and logits._version == 0
    assert changed == ([0, 1, 2, 3, 4, 5] if grad else [2])
PY
TRITON_INTERPRET=1 "$folder/env/bin/python" -W ignore "$folder/run.py" 2>"$folder/log" || { cat "$folder/log"; exit 1; }
