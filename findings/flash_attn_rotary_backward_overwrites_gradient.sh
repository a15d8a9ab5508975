#!/usr/bin/env bash
# flash-attn 2.8.3, triton 3.7.1 (as an interpreter on the CPU), torch 2.13.0.
# Guess: apply_rotary_emb_qkv_ and apply_rotary_emb_kv_ change their argument in place, and their backward returns the
# gradient of a rotation, as that of apply_rotary_emb does.
# Seen: the backward rotates the incoming gradient in place, where autograd shares it with other parts of the graph. With a
# residual connection, rotate(2 * x) + x, the part of x is rotated, too. After rotate(2 * x).sum() the gradient is
# wrong, since the entries of the incoming one share their memory. The grad_outputs of torch.autograd.grad are overwritten.
# No error is raised, and the version counter stays at 0. A copy of the output, rotate(2 * x).clone(), does not help.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
pip=("$folder/env/bin/pip" --quiet --disable-pip-version-check)
"${pip[@]}" install torch==2.13.0 numpy triton==3.7.1 einops==0.8.2 setuptools wheel packaging psutil ninja
FLASH_ATTENTION_SKIP_CUDA_BUILD=TRUE PATH="$folder/env/bin:$PATH" "${pip[@]}" download --no-deps --no-build-isolation \
    --no-binary :all: --dest "$folder" flash-attn==2.8.3  # nothing is compiled
tar -xzf "$folder/flash_attn-2.8.3.tar.gz" -C "$folder"
cat >"$folder/run.py" <<'PY'
import sys
from contextlib import nullcontext
from types import ModuleType

import torch

sys.modules["flash_attn_2_cuda"] = ModuleType("flash_attn_2_cuda")  # attention's extension, which rotations do not use
torch.cuda.device = lambda _: nullcontext()
torch.library.wrap_triton = lambda kernel: kernel
import flash_attn
from flash_attn.layers.rotary import apply_rotary_emb, apply_rotary_emb_kv_, apply_rotary_emb_qkv_

torch.manual_seed(0)
angles, qkv = torch.rand(4, 4), torch.randn(2, 4, 3, 2, 8)
tables = angles.cos(), angles.sin()
for in_place, x, turned in (apply_rotary_emb_qkv_, qkv, 2), (apply_rotary_emb_kv_, qkv[:, :, 1:].clone(), 1):
    x, w, given = x.requires_grad_(), torch.randn_like(x), torch.ones_like(x)
    fast = lambda t: in_place(t, *tables)
    plain = lambda t: torch.stack([apply_rotary_emb(u, *tables) if i < turned else u for i, u in enumerate(t.unbind(2))], 2)
    losses = {"alone": lambda f: (w * f(2 * x)).sum(), "sum": lambda f: f(2 * x).sum()}
    losses["residual"] = lambda f: (w * (f(2 * x) + x)).sum()
    losses["copied"] = lambda f: (w * (f(2 * x).clone() + x)).sum()
    grads = {case: [torch.autograd.grad(loss(f), x)[0] for f in (fast, plain)] for case, loss in losses.items()}
    right = {case: torch.allclose(*pair, atol=1e-5) for case, pair in grads.items()}
    torch.autograd.grad(fast(2 * x), x, given)
    right["grad_outputs after"] = torch.equal(given, torch.ones_like(x))
    print(f"flash-attn {flash_attn.__version__}, {in_place.__name__}: right: {right}, version {given._version}")
    assert list(right.values()) == [True, False, False, False, False] and given._version == 0
PY
TRITON_INTERPRET=1 PYTHONPATH="$folder/flash_attn-2.8.3" "$folder/env/bin/python" -W ignore "$folder/run.py"
