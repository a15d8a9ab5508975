"""Mixed precision: autocast and ``GradScaler`` stay as they are; float16 on CUDA, bfloat16 elsewhere.

A small network learns scikit-learn's digits on the quarter of each batch with the largest losses. Then the gradient of
one large batch is taken three times at the same rows: by ``pick`` and by plain indexing in low precision, and by plain
indexing in float32. Printed is how far the first two are from the third: low precision costs ``pick`` no more than it
costs plain indexing.

    python examples/amp.py
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

import rowprop

DEVICE, DTYPE = ("cuda", torch.float16) if torch.cuda.is_available() else ("cpu", torch.bfloat16)


def losses_of(model: nn.Module, x: Tensor, y: Tensor, *, low: bool) -> Tensor:
    """The loss of each row, (N,)."""
    with torch.autocast(DEVICE, DTYPE, enabled=low):
        return F.cross_entropy(model(x), y, reduction="none")


def main() -> None:
    """Train, and compare three gradients."""
    images, classes = load_digits(return_X_y=True)
    x, y = torch.tensor(images, dtype=torch.float32, device=DEVICE) / 16, torch.tensor(classes, device=DEVICE)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)).to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scaler = torch.amp.GradScaler(DEVICE, enabled=DEVICE == "cuda")
    for epoch in range(3):
        for batch in torch.randperm(len(x)).split(128):
            losses = losses_of(model, x[batch], y[batch], low=True)
            rows = losses.detach().topk(len(losses) // 4).indices
            scaler.scale(rowprop.pick(losses, rows).mean()).backward()  # the line
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        print(f"epoch {epoch}: loss {losses_of(model, x, y, low=True).mean():.3f} of all rows")

    rows = losses_of(model, x, y, low=False).topk(len(x) // 4).indices

    def gradient(kept: Callable[[Tensor, Tensor], Tensor], *, low: bool) -> Tensor:
        loss = scaler.scale(kept(losses_of(model, x, y, low=low), rows).mean())
        parts = torch.autograd.grad(loss, list(model.parameters()))
        return torch.cat([part.flatten() for part in parts]) / scaler.get_scale()

    exact = gradient(lambda losses, rows: losses[rows], low=False)
    for name, kept in (("plain indexing", lambda losses, rows: losses[rows]), ("pick", rowprop.pick)):
        off = (gradient(kept, low=True) - exact).norm() / exact.norm()
        print(f"{name} in {str(DTYPE)[6:]}: {100 * off:.2f} % from the gradient in float32")


if __name__ == "__main__":
    main()
