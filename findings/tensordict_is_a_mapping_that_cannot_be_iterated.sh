#!/usr/bin/env bash
# tensordict 0.15.3, torch 2.13.0.
# Guess: what passes isinstance(x, collections.abc.Mapping) can be walked as a dict: iterating gives keys.
# Seen: a TensorDict passes. Iterating one with batch_size=[8] gives 8 TensorDicts, not keys, and iterating one with
# batch_size=[] raises. Code that walks batches by Mapping (collate functions, adapters) has to ask for keys() or items().
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy tensordict==0.15.3
cat >"$folder/run.py" <<'PY'
from collections.abc import Mapping
from importlib.metadata import version

import torch
from tensordict import TensorDict

print("tensordict", version("tensordict"), "torch", torch.__version__)
rows = TensorDict({"x": torch.zeros(8, 3)}, batch_size=[8])
single = TensorDict({"x": torch.zeros(8, 3)}, batch_size=[])
kinds = {type(entry).__name__ for entry in rows}
try:
    walked = [str(entry) for entry in single]
except Exception as error:
    walked = type(error).__name__
print("mapping:", isinstance(rows, Mapping), "| entries:", len(list(rows)), kinds, "| without a batch size:", walked)
assert isinstance(rows, Mapping) and kinds == {"TensorDict"} and len(list(rows)) == 8
assert walked in ("StopIteration", "TypeError", "ValueError", "RuntimeError")
assert list(rows.keys()) == ["x"]
PY
"$folder/env/bin/python" -W ignore "$folder/run.py"
