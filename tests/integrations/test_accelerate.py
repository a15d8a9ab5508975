"""The loop of docs/accelerate.md against the same loop with plain indexing, in one process and in two.

The package lives in a venv of its own: `nox -s integrations`. Models are tiny.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import plain_loop
import rowprop
from plain_loop import BATCH, EPOCHS, RATE, ROWS, above_mean, batches, check_same, descend, groups, losses_of, network
from rowprop.distributed import Local

pytestmark = plain_loop.only_with("accelerate", "integrations")


def begin_anew() -> None:
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)


class Loop:
    """The page's loop; without a selector the same loop untouched."""

    def __init__(self, selector: Any, *, accelerator: Any = None, batch: int = BATCH, **settings: Any):
        from accelerate import Accelerator

        begin_anew()
        self.accelerator = Accelerator(cpu=True, **accelerator or {})
        model = network()
        optimizer, loader = torch.optim.SGD(model.parameters(), lr=RATE), DataLoader(plain_loop.data(), batch)
        self.model, self.optimizer, self.loader = self.accelerator.prepare(model, optimizer, loader)
        self.logged: list[dict[str, Any]] = []
        self.selective = None
        if selector is not None:
            self.selective = rowprop.SelectiveBackprop(self.model, losses_of, selector, ranks=Local(), **settings)
            self.accelerator.register_for_checkpointing(self.selective)

    def fit(self, epochs: int) -> nn.Module:
        for _ in range(epochs):
            for batch in self.loader:
                with self.accelerator.accumulate(self.model), self.accelerator.autocast():
                    if self.selective is None:
                        loss = losses_of(self.model, batch).mean()
                    else:
                        loss, record = self.selective(batch)
                        self.accelerator.log(record.to_dict(), step=record.step)
                        self.logged.append(record.to_dict())
                    self.accelerator.backward(loss)
                    self.optimizer.step()
                    self.optimizer.zero_grad()
        return self.accelerator.unwrap_model(self.model)


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("engine", ["sliced", "recompute"])
def test_the_parameters_and_numbers_are_those_of_a_plain_loop(engine: str, every: int):
    # Red when: the loss is that of all rows, or is divided by the accumulated batches once more.
    loop = Loop(rowprop.selection.AboveMean(), accelerator={"gradient_accumulation_steps": every}, engine=engine)
    model = network()
    losses = descend(model, groups(batches(), 1), above_mean, every=every)
    check_same(loop.fit(EPOCHS), model)
    assert [numbers["loss_kept"] for numbers in loop.logged] == pytest.approx(losses, abs=1e-5)


def test_the_trackers_take_the_numbers():
    # Through accelerate's own TensorBoard tracker. Red when: the record holds a value that trackers do not take.
    from accelerate.tracking import TensorBoardTracker

    tracker, writer = object.__new__(TensorBoardTracker), MagicMock()
    tracker.writer = writer
    loop = Loop(rowprop.TopK(keep=0.5), engine="sliced")
    loop.accelerator.trackers = [tracker]
    loop.fit(1)
    written = {call.args: call.kwargs["global_step"] for call in writer.add_scalar.call_args_list}
    for numbers in loop.logged:
        for name in ("loss_all", "loss_kept", "num_kept", "num_rows"):
            assert written[name, numbers[name]] >= numbers["step"]


def test_mixed_precision_is_accelerates():
    # Against a second forward of the kept rows under bfloat16, written out. Red when: the model runs in float32.
    loop = Loop(rowprop.TopK(keep=0.25), accelerator={"mixed_precision": "bf16"}, engine="recompute")
    check_same(loop.fit(EPOCHS), plain_loop.by_hand_in_bfloat16(0.25))


def test_all_rows_are_the_untouched_loop():
    # Bit for bit, with batches of 6 rows. Red when: the loss is a sum of losses times 1/6, or is scaled.
    plain, selective = Loop(None, batch=6).fit(EPOCHS), Loop(rowprop.TopK(keep=1.0), batch=6).fit(EPOCHS)
    plain_loop.check_equal(plain, selective)


def test_one_line_skips_the_rows_without_a_gradient():
    # Against the same loop without the line. Red when: accelerate's wrapper or its backward loses the module's hook.
    def trained(skips: bool) -> tuple[nn.Module, int]:
        loop = Loop(None)
        if skips:
            rowprop.skip_zeros(loop.model)
        with rowprop.cost.count_flops() as flops:
            for batch in loop.loader:
                loop.accelerator.backward((losses_of(loop.model, batch) - 1.4).relu().mean())
                loop.optimizer.step()
                loop.optimizer.zero_grad()
        return loop.accelerator.unwrap_model(loop.model), flops.total_flops

    (plain, all_flops), (ours, flops) = trained(False), trained(True)
    check_same(ours, plain)
    assert flops < 0.9 * all_flops


def train_on_a_rank(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    loop = Loop(rowprop.selection.AboveMean(), engine="sliced")
    assert loop.accelerator.num_processes == 2
    model = loop.fit(EPOCHS)
    if rank == 0:
        torch.save(model.state_dict(), folder / "trained.pt")
    # Drawn by torch's own generator, which is another on each rank.
    for name, steps in (("straight", (EPOCHS,)), ("resumed", (1, EPOCHS - 1))):
        torch.manual_seed(rank)
        for number, epochs in enumerate(steps):
            loop = Loop(rowprop.RandomRows(keep=0.5), engine="sliced")
            torch.manual_seed(rank)
            if number:
                loop.accelerator.load_state(str(folder / "state"))
            model = loop.fit(epochs)
            if name == "resumed" and not number:
                loop.accelerator.save_state(str(folder / "state"))
        assert loop.logged[-1]["step"] == EPOCHS * ROWS // BATCH // 2 - 1
        if rank == 0:
            torch.save(model.state_dict(), folder / f"{name}.pt")
    torch.distributed.destroy_process_group()


FOLDERS = [str(Path(__file__).parent), str(Path(__file__).parents[2] / "tools")]
WORKER = """
import sys
from pathlib import Path
sys.path[:0] = {folders!r}
import os
import test_accelerate
test_accelerate.train_on_a_rank(int(os.environ["RANK"]), Path({folder!r}))
"""


def torchrun(script: Path) -> str:
    launch = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run([*launch, str(script)], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_two_processes_train_on_the_rows_of_both_and_resume_bit_for_bit(tmp_path: Path):
    # Accelerate gives every second batch to each rank. Red when: a rank's loss carries another factor than its share of
    # the kept rows, or the step is not registered, so that it begins anew.
    script = tmp_path / "worker.py"
    script.write_text(WORKER.format(folders=FOLDERS, folder=str(tmp_path)))
    torchrun(script)
    found, model = network(), network()
    found.load_state_dict(torch.load(tmp_path / "trained.pt"))
    descend(model, groups(batches(), 2), above_mean)
    check_same(found, model)
    straight, resumed = (torch.load(tmp_path / f"{name}.pt") for name in ("straight", "resumed"))
    assert all(torch.equal(straight[name], resumed[name]) for name in straight)


def test_the_page_runs_in_one_process_and_in_two(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    # Red when: a line of the page no longer works, or prints something else.
    block = plain_loop.script_of("accelerate.md")
    assert re.findall(r"# (\d)$", block, re.MULTILINE) == list("12345")
    begin_anew()
    assert plain_loop.last_line_of("accelerate.md", capsys) == "(16,) 64"
    script = tmp_path / "train.py"
    script.write_text(block)
    assert torchrun(script).splitlines()[-1] == "(16, 16) 64"
