"""The plain loop that the tests of the integrations compare a framework with: its data, its network, and the checks."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import re
import socket
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

ROWS, BATCH, EPOCHS, RATE = 48, 8, 2, 0.3
FORK = multiprocessing.get_context("fork")
DOCS = Path(__file__).parent.parent / "docs"
Losses = Callable[[nn.Module, Any], Tensor]


def only_with(package: str, session: str) -> list[pytest.MarkDecorator]:
    """The marks of a file of tests of a package: nothing without it, one thread, and its warnings are its own."""
    return [
        pytest.mark.skipif(find_spec(package) is None, reason=f"needs {package}: nox -s {session}"),
        pytest.mark.usefixtures("one_thread"),
        pytest.mark.filterwarnings("ignore"),
    ]


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


def above(loss: float) -> Callable[[Tensor], Tensor]:
    """Rows with a larger loss than this: in some batches none."""
    return lambda losses: (losses > loss).nonzero().flatten()


def batches(size: int = BATCH) -> list[Any]:
    """Those of the whole training."""
    return [*DataLoader(data(), size)] * EPOCHS


def groups(parts: list[Any], size: int) -> list[list[Any]]:
    """The parts in groups of this size, in their order; the last may be smaller."""
    return [parts[first : first + size] for first in range(0, len(parts), size)]


def descend(
    model: nn.Module, parts: Iterable[Any], loss_of: Losses, *, rate: float = RATE, every: int = 1, clip: float = 0.0
) -> list[float]:
    """Plain SGD: a step after `every` batches, on the mean of their losses, clipped on request; returns them."""
    optimizer, found = torch.optim.SGD(model.parameters(), lr=rate), list[float]()
    for number, batch in enumerate(parts, 1):
        loss = loss_of(model, batch)
        (loss / every).backward()
        found.append(float(loss))
        if number % every == 0:
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
    return found


def by_hand(select: Callable[[Tensor], Tensor], every: int = 1) -> tuple[nn.Module, list[dict[str, float]]]:
    """The training: plain indexing at the rows that `select` takes; and the numbers of each batch."""
    model, logged = network(), list[dict[str, float]]()

    def loss_of(model: nn.Module, batch: Any) -> Tensor:
        losses = losses_of(model, batch)
        rows = select(losses.detach())
        found = {"loss_all": losses.mean(), "loss_kept": losses[rows].mean(), "kept": rows.numel() / BATCH}
        logged.append({name: float(value) for name, value in found.items()})
        return losses[rows].mean() if rows.numel() else 0 * losses.sum()

    descend(model, batches(), loss_of, every=every)
    return model, logged


def above_mean(model: nn.Module, parts: list[Any]) -> Tensor:
    """The mean over the rows of several batches whose loss is above the mean of their batch."""
    each = [losses_of(model, part) for part in parts]
    return torch.cat([losses[losses > losses.mean()] for losses in each]).mean()


def means_of_kept(logged: list[dict[str, float]]) -> list[float]:
    """For each epoch the mean loss of its kept rows, from the numbers of its batches."""
    means, steps = list[float](), ROWS // BATCH
    for epoch in groups(logged, steps):
        kept = [(each["kept"], each["loss_kept"]) for each in epoch if each["kept"]]
        assert len({share for share, _ in kept}) > 1
        assert len(kept) < steps
        means.append(sum(share * loss for share, loss in kept) / sum(share for share, _ in kept))
    return means


def by_hand_in_bfloat16(keep: float) -> nn.Module:
    """The training under autocast: a second forward of the rows with the largest losses."""
    model = network()

    def loss_of(model: nn.Module, batch: Any) -> Tensor:
        x, y = batch
        with torch.autocast("cpu", dtype=torch.bfloat16):
            rows = hardest(keep)(losses_of(model, batch)).sort().values
            return losses_of(model, (x[rows], y[rows])).mean()

    descend(model, batches(), loss_of)
    return model


def on_two_ranks(train: Callable[[int], nn.Module], folder: Path) -> nn.Module:
    """Two processes train; returns the network of the first one."""

    def run() -> None:
        rank = int(os.environ["RANK"])
        torch.distributed.init_process_group("gloo")
        model = train(rank)
        if rank == 0:
            torch.save(model.state_dict(), folder / "model.pt")
        torch.distributed.destroy_process_group()

    in_processes(run)
    found = network()
    found.load_state_dict(torch.load(folder / "model.pt"))
    return found


def check_same(one: nn.Module, other: nn.Module) -> None:
    for (name, a), b in zip(one.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")


def apart(one: nn.Module, other: nn.Module) -> float:
    """The largest difference of their parameters."""
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return float(torch.stack([(a.detach() - b.detach()).abs().max() for a, b in pairs]).max())


def check_equal(one: nn.Module, other: nn.Module) -> None:
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def scripts_of(page: str) -> list[str]:
    return re.findall(r"^```py\n(.*?)^```\n", (DOCS / page).read_text(), re.MULTILINE | re.DOTALL)


def script_of(page: str) -> str:
    """The one script of a page."""
    (block,) = scripts_of(page)
    return block


def in_processes(function: Callable[[], None]) -> None:
    """Run it in two forks, which know of each other as `torchrun` would have it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def run(rank: int) -> None:
        forget_processes()
        told = {"RANK": rank, "LOCAL_RANK": rank, "NODE_RANK": 0, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
        told |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        os.environ |= {name: str(value) for name, value in told.items()}
        torch.set_num_threads(1)
        function()

    ranks = [FORK.Process(target=run, args=(rank,)) for rank in (0, 1)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(300)
        rank.kill()  # one that is stuck
    assert [rank.exitcode for rank in ranks] == [0, 0]


def forget_processes() -> None:
    """Have accelerate look anew how many processes there are."""
    if find_spec("accelerate") is not None:
        importlib.import_module("accelerate.state").AcceleratorState._reset_state(reset_partial_state=True)
