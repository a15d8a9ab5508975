#!/usr/bin/env bash
# triton 3.7.1, TRITON_INTERPRET=1, beside torch 2.13.0 for the CPU.
# Guess: a builtin of triton.language that a module binds to a name of its own (cast = tl.cast, as libraries do that
# support several versions of Triton) works in the interpreter as it works in a compiled kernel.
# Seen: the interpreter replaces the builtins only where it finds them, as attributes of triton.language. Under another
# name the original runs and raises "Did you forget to add @triton.jit?", although the kernel has its decorator. So tests
# on a CPU fail for kernels that are right on a GPU: unsloth 2026.10.9's cross entropy is one.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 triton==3.7.1 numpy
cat >"$folder/run.py" <<'PY'
import torch
import triton
import triton.language as tl

cast = tl.cast


@triton.jit
def direct(x, out):
    tl.store(out, tl.cast(tl.load(x), tl.float32) + 1)


@triton.jit
def renamed(x, out):
    tl.store(out, cast(tl.load(x), tl.float32) + 1)


def run(kernel) -> str:
    x, out = torch.tensor([2]), torch.zeros(1)
    try:
        kernel[(1,)](x, out)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return str(out.tolist())


seen = {kernel.fn.__name__: run(kernel) for kernel in (direct, renamed)}
print(f"triton {triton.__version__}, interpreted: {seen}")
assert seen["direct"] == "[3.0]"
assert "Did you forget to add @triton.jit" in seen["renamed"]
PY
TRITON_INTERPRET=1 "$folder/env/bin/python" -W ignore "$folder/run.py"
