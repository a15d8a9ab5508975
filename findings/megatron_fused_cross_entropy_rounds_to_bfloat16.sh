#!/usr/bin/env bash
# megatron-core 0.19.2, torch 2.13.0, one rank of gloo on the CPU.
# Guess: fused_vocab_parallel_cross_entropy (cross_entropy_loss_fusion=True) has the gradient of the unfused function, up to
# the rounding of the logits' dtype, since both compute in float32.
# Seen: its backward rounds the gradient to bfloat16 for logits of any dtype. The gradient of float32 logits is float32 and
# has 8 significant bits (errors of up to 1/256); that of float16 logits has 8 of 11. The losses are the same, so only a
# comparison of gradients shows it. In a training in float32 or float16, the fusion changes every weight's gradient.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
pip=("$folder/env/bin/pip" --quiet --disable-pip-version-check)
"${pip[@]}" install torch==2.13.0 numpy packaging triton==3.7.1
# The wheel asks for Python 3.12; the part of it that is used here also runs on 3.11.
"${pip[@]}" download --no-deps --only-binary :all: --python-version 3.12 --dest "$folder" megatron-core==0.19.2
"$folder/env/bin/python" -m zipfile -e "$folder"/megatron_core-*.whl "$folder/megatron"
cat >"$folder/run.py" <<'PY'
import sys

import torch
import torch.distributed as dist
from megatron.core import package_info
from megatron.core.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy as fused
from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy as unfused

torch.cuda.current_device = lambda: "cpu"
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=0, world_size=1)
torch.manual_seed(0)
target, start = torch.randint(1000, (16, 2)), torch.randn(16, 2, 1000)


def run(function, dtype):
    x = start.to(dtype).requires_grad_()
    loss = function(1 * x, target, tp_group=dist.group.WORLD).sum()
    return loss.detach(), torch.autograd.grad(loss, x)[0]


for dtype, smallest in ((torch.float32, 0), (torch.float16, 2**-14)):  # below that, float16 has fewer bits
    (loss, grad), (other, found) = run(unfused, dtype), run(fused, dtype)
    normal = grad.abs() > smallest
    error = ((found - grad).abs() / grad.abs())[normal].max().item()
    in_bfloat16 = torch.equal(found[normal], found.bfloat16().to(dtype)[normal])
    about = f"losses differ by {abs(loss - other).item():.0e}, gradients by up to {error:.1e} of an entry"
    print(f"megatron-core {package_info.__version__}, {dtype}: {about}, all of them in bfloat16: {in_bfloat16}")
    assert abs(loss - other) < 1e-3 and found.dtype == dtype and error > 1e-3 and in_bfloat16
PY
TORCHDYNAMO_DISABLE=1 PYTHONPATH="$folder/megatron" "$folder/env/bin/python" -W ignore "$folder/run.py" "$folder/rendezvous"
