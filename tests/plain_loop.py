"""The plain loop that the tests of the integrations compare a framework with: its data, its network, and the checks."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from rowprop.errors import MissingExtra

ROWS, BATCH, EPOCHS, RATE = 48, 8, 2, 0.3
DOCS = Path(__file__).parent.parent / "docs"


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(ROWS, 6, generator=generator), torch.randint(3, (ROWS,), generator=generator))


def network() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))


def losses_of(model: nn.Module, batch: Any) -> Tensor:
    x, y = batch
    return nn.functional.cross_entropy(model(x), y, reduction="none")


def hardest(keep: float) -> Callable[[Tensor], Tensor]:
    return lambda losses: losses.topk(round(keep * losses.numel())).indices


def by_hand(select: Callable[[Tensor], Tensor], every: int = 1) -> tuple[nn.Module, list[dict[str, float]]]:
    """The training: plain indexing at the rows that `select` takes; and the numbers of each batch."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    logged: list[dict[str, float]] = []
    for number in range(EPOCHS * ROWS // BATCH):
        start = number * BATCH % ROWS
        losses = losses_of(model, data()[start : start + BATCH])
        rows = select(losses.detach())
        (losses[rows].mean() / every).backward()
        found = {"loss_all": losses.mean(), "loss_kept": losses[rows].mean(), "kept": rows.numel() / BATCH}
        logged.append({name: float(value) for name, value in found.items()})
        if (number + 1) % every == 0:
            optimizer.step()
            optimizer.zero_grad()
    return model, logged


def check_same(one: nn.Module, other: nn.Module) -> None:
    for (name, a), b in zip(one.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")


def check_equal(one: nn.Module, other: nn.Module) -> None:
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def check_pip_line(module: str, extra: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An integration that is imported where no package is installed names the extra to install."""
    monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(MissingExtra, match=rf"pip install 'rowprop\[{extra}\]'"):
        importlib.import_module(module)


def script_of(page: str) -> str:
    """The one script of a page."""
    (block,) = re.findall(r"^```py\n(.*?)^```\n", (DOCS / page).read_text(), re.MULTILINE | re.DOTALL)
    return block


def last_line_of(page: str, capsys: pytest.CaptureFixture[str]) -> str:
    """Run the script of a page; returns the last line that it prints."""
    exec(compile(script_of(page), page, "exec"), {})
    return capsys.readouterr().out.splitlines()[-1]
