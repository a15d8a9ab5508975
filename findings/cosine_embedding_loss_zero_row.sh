#!/usr/bin/env bash
# torch 2.13.0.
# Guess: a pair of cosine_embedding_loss whose loss is exactly 0 (dissimilar, at or below the margin) has no gradient.
# Seen: at the corner the loss is 0 and the gradient is not: clamp_min passes the gradient of entries at its bound, where
# relu does not. An embedding of zeros (dead units, padding) lies at the corner of the default margin of 0, and
# there the gradient is some 350,000 times as large as the other embedding. Rows with a loss of 0 cannot be dropped by
# their loss; relu(cosine_similarity) has the same values, and zeros at these rows.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy
cat >"$folder/run.py" <<'PY'
import torch
from torch.nn import functional as F

print("torch", torch.__version__)
other, apart = torch.ones(1, 8), -torch.ones(1)


def largest(loss, embedding):
    embedding.requires_grad_()
    value = loss(embedding)
    value.backward()
    return value.item(), embedding.grad.abs().max().item()


for name, x in (("zeros", torch.zeros(1, 8)), ("orthogonal", torch.tensor([[1.0, -1.0] * 4]))):
    value, size = largest(lambda x: F.cosine_embedding_loss(x, other, apart), x.clone())
    _, relu = largest(lambda x: F.cosine_similarity(x, other).relu().mean(), x.clone())
    print(f"{name}: loss {value}, largest gradient {size:.3g}; by relu(cosine_similarity) {relu:.3g}")
    assert value == 0 and relu == 0 and size > (1e5 if name == "zeros" else 0.1)
PY
"$folder/env/bin/python" "$folder/run.py"
