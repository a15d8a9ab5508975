"""The plain loop that the tests of the integrations compare a framework with: its data, its network, and the checks."""

from __future__ import annotations

import multiprocessing
import re
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

ROWS, BATCH, EPOCHS, RATE = 48, 8, 2, 0.3
FORK = multiprocessing.get_context("fork")
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


def above(loss: float) -> Callable[[Tensor], Tensor]:
    """Rows with a larger loss than this: in some batches none."""
    return lambda losses: (losses > loss).nonzero().flatten()


def by_hand(select: Callable[[Tensor], Tensor], every: int = 1) -> tuple[nn.Module, list[dict[str, float]]]:
    """The training: plain indexing at the rows that `select` takes; and the numbers of each batch."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    logged: list[dict[str, float]] = []
    for number in range(EPOCHS * ROWS // BATCH):
        start = number * BATCH % ROWS
        losses = losses_of(model, data()[start : start + BATCH])
        rows = select(losses.detach())
        if rows.numel():
            (losses[rows].mean() / every).backward()
        found = {"loss_all": losses.mean(), "loss_kept": losses[rows].mean(), "kept": rows.numel() / BATCH}
        logged.append({name: float(value) for name, value in found.items()})
        if (number + 1) % every == 0:
            optimizer.step()
            optimizer.zero_grad()
    return model, logged


def means_of_kept(logged: list[dict[str, float]]) -> list[float]:
    """For each epoch the mean loss of its kept rows, from the numbers of its batches."""
    means, steps = list[float](), ROWS // BATCH
    for first in range(0, len(logged), steps):
        kept = [(each["kept"], each["loss_kept"]) for each in logged[first : first + steps] if each["kept"]]
        assert len({share for share, _ in kept}) > 1
        assert len(kept) < steps
        means.append(sum(share * loss for share, loss in kept) / sum(share for share, _ in kept))
    return means


def by_hand_in_bfloat16(keep: float) -> nn.Module:
    """The training under autocast: a second forward of the rows with the largest losses."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for x, y in [*DataLoader(data(), BATCH)] * EPOCHS:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            rows = hardest(keep)(losses_of(model, (x, y))).sort().values
            loss = losses_of(model, (x[rows], y[rows])).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def check_two_ranks(train: Callable[[int], nn.Module], folder: Path) -> None:
    """Two processes, each with every second row, train what plain indexing trains on the rows above each rank's mean.

    Args:
        train: The training of one of them, by its rank; returns the network.
        folder: Where they meet.
    """
    model, found = network(), on_two_ranks(train, folder)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for number in range(EPOCHS * ROWS // BATCH // 2):
        start = number * 2 * BATCH % ROWS
        kept = list[Tensor]()
        for rank in (0, 1):
            losses = losses_of(model, data()[start + rank : start + 2 * BATCH : 2])
            kept.append(losses[losses > losses.mean()])
        torch.cat(kept).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    check_same(found, model)


def on_two_ranks(train: Callable[[int], nn.Module], folder: Path) -> nn.Module:
    """Two processes train; returns the network of the first one."""
    torch.multiprocessing.start_processes(_train_on_a_rank, (train, folder), nprocs=2, start_method="fork")
    found = network()
    found.load_state_dict(torch.load(folder / "model.pt"))
    return found


def _train_on_a_rank(rank: int, train: Callable[[int], nn.Module], folder: Path) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", f"file://{folder}/meet", rank=rank, world_size=2)
    model = train(rank)
    if rank == 0:
        torch.save(model.state_dict(), folder / "model.pt")
    torch.distributed.destroy_process_group()


def check_same(one: nn.Module, other: nn.Module) -> None:
    for (name, a), b in zip(one.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")


def check_equal(one: nn.Module, other: nn.Module) -> None:
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def script_of(page: str) -> str:
    """The one script of a page."""
    (block,) = re.findall(r"^```py\n(.*?)^```\n", (DOCS / page).read_text(), re.MULTILINE | re.DOTALL)
    return block


def last_line_of(page: str, capsys: pytest.CaptureFixture[str]) -> str:
    """Run the script of a page; returns the last line that it prints."""
    exec(compile(script_of(page), page, "exec"), {})
    return capsys.readouterr().out.splitlines()[-1]


def check_page_trains_as_by_hand(page: str, model: str, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """The script of a page trains its model as plain indexing at the hardest 16 of each 64 rows; returns its names."""
    names: dict[str, Any] = {}
    exec(compile(script_of(page), page, "exec"), names)
    assert capsys.readouterr().out.splitlines()[-1] == "16 64"
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 4))
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.01)
    x, y = torch.randn(512, 20), torch.randint(4, (512,))
    for start in [*range(0, 512, 64)] * 2:
        losses = losses_of(plain, (x[start : start + 64], y[start : start + 64]))
        losses.topk(16).values.mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    check_same(names[model], plain)
    return names


def in_processes(function: Callable[[], None], count: int = 2) -> None:
    """Run it in forks, which know of each other as `torchrun` would have it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def run(rank: int) -> None:
        import os

        from accelerate.state import AcceleratorState

        AcceleratorState._reset_state(reset_partial_state=True)
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        os.environ |= {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        torch.set_num_threads(1)
        function()

    ranks = [FORK.Process(target=run, args=(rank,)) for rank in range(count)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(120)
    stuck = [rank for rank in ranks if rank.is_alive()]
    for rank in stuck:
        rank.kill()
    assert not stuck
    assert [rank.exitcode for rank in ranks] == [0] * count
