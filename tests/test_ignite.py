"""Ignite's engine with and without the process function `update`: the rows, parameters and outputs of a plain loop.

The package lives in a venv of its own: `scripts/integrations`. Models are tiny.
"""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset

import rowprop
from plain_loop import (
    BATCH,
    EPOCHS,
    RATE,
    ROWS,
    by_hand,
    check_equal,
    check_same,
    check_two_ranks,
    data,
    hardest,
    last_line_of,
    losses_of,
    network,
)
from rowprop.distributed import Local
from rowprop.errors import InvalidInput
from rowprop.history import LossHistory, WithIds

MODULE = "rowprop.integrations.ignite"

needs_ignite = pytest.mark.skipif(find_spec("ignite") is None, reason="needs ignite: scripts/integrations")
pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore"),  # those of Ignite are its own
]


def under_autocast(model: nn.Module, batch: Any) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return losses_of(model, batch)


class Training:
    """A model, its step, and the engine that trains it; `outputs` are the engine's, as plain numbers."""

    def __init__(self, selector: Any, *, losses_fn: Any = losses_of, model: Any = None, update: Any = None,
                 **settings: Any) -> None:  # fmt: skip
        ignite = importlib.import_module("ignite.engine")
        self.model = network() if model is None else model
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=RATE)
        self.selective = rowprop.SelectiveBackprop(self.model, losses_fn, selector, **settings)
        self.trainer = ignite.Engine(
            importlib.import_module(MODULE).update(self.selective, self.optimizer, **update or {})
        )
        self.outputs: list[dict[str, float]] = []
        self.trainer.add_event_handler(ignite.Events.ITERATION_COMPLETED, self._note)

    def _note(self, engine: Any) -> None:
        self.outputs.append({name: float(value) for name, value in engine.state.output.items()})

    def run(self, dataset: Any = None, epochs: int = EPOCHS, batch: int = BATCH) -> nn.Module:
        self.trainer.run(DataLoader(data() if dataset is None else dataset, batch), max_epochs=epochs)
        return self.model


@needs_ignite
@pytest.mark.parametrize("engine", ["sliced", "recompute"])
def test_the_parameters_and_outputs_are_those_of_a_plain_loop(engine: str):
    # Red when: the loss is the mean of all rows, or `loss_all` is that of the kept ones.
    training = Training(rowprop.TopK(keep=0.5), engine=engine)
    model, logged = by_hand(hardest(0.5))
    check_same(training.run(), model)
    for found, truth in zip(training.outputs, logged, strict=True):
        assert {name: found[name] for name in truth} == pytest.approx(truth, abs=1e-5)


@needs_ignite
def test_accumulation_is_that_of_ignite():
    # Red when: the loss is not divided by the accumulated batches, or the gradients are cleared between them.
    training = Training(rowprop.TopK(keep=0.25), update={"gradient_accumulation_steps": 2}, engine="sliced")
    check_same(training.run(), by_hand(hardest(0.25), every=2)[0])


@needs_ignite
def test_a_step_that_accumulates_says_when_the_optimizer_steps():
    # 2 of 8 rows are kept in each batch: 4 rows are there after two. Red when: the optimizer steps in each iteration.
    training = Training(rowprop.TopK(keep=0.25), engine="sliced", accumulate_to=4)
    check_same(training.run(), by_hand(hardest(0.25), every=2)[0])


@needs_ignite
def test_mixed_precision_scales_the_loss():
    # bfloat16 under a gradient scaler, against a second forward of the kept rows, written out. Red when: the scale is
    # left out of the backward.
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    training = Training(
        rowprop.TopK(keep=0.25), losses_fn=under_autocast, update={"scaler": scaler}, engine="recompute"
    )
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for _ in range(EPOCHS):
        for x, y in DataLoader(data(), BATCH):
            rows = under_autocast(model, (x, y)).topk(BATCH // 4).indices.sort().values
            under_autocast(model, (x[rows], y[rows])).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    check_same(training.run(), model)


@needs_ignite
def test_all_rows_are_ignites_own_training_step():
    # Bit for bit, with batches of 6 rows. Red when: the loss is a sum of losses times 1/6, is scaled, or when random
    # numbers are drawn.
    from ignite.engine import create_supervised_trainer

    for every in (1, 2):
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
        plain = create_supervised_trainer(
            model, optimizer, nn.functional.cross_entropy, gradient_accumulation_steps=every
        )
        plain.run(DataLoader(data(), 6), max_epochs=EPOCHS)
        training = Training(rowprop.TopK(keep=1.0), update={"gradient_accumulation_steps": every})
        check_equal(training.run(batch=6), model)


@needs_ignite
def test_two_processes_train_on_the_rows_of_both(tmp_path: Path):
    # Red when: the ranks count alike, whatever they keep.
    def train(rank: int) -> nn.Module:
        model = nn.parallel.DistributedDataParallel(network())
        training = Training(rowprop.AboveMean(), model=model, engine="sliced", ranks=Local())
        return training.run(Subset(data(), range(rank, ROWS, 2))).module

    check_two_ranks(train, tmp_path)


@needs_ignite
def test_a_resumed_training_goes_on_bit_for_bit(tmp_path: Path):
    # Through Ignite's Checkpoint. Red when: the step is not among its objects, or the history is told other ids.
    from ignite.engine import Events
    from ignite.handlers import Checkpoint, DiskSaver

    def training() -> Training:
        generator, history = torch.Generator().manual_seed(3), LossHistory(ROWS)
        return Training(rowprop.RandomRows(keep=0.5), engine="sliced", generator=generator, history=history)

    def objects(training: Training) -> dict[str, Any]:
        return {name: getattr(training, name) for name in ("trainer", "model", "optimizer", "selective")}

    straight, first, second = (training() for _ in range(3))
    straight.run(WithIds(data()))
    saver = Checkpoint(objects(first), DiskSaver(str(tmp_path), create_dir=False, require_empty=False))
    first.trainer.add_event_handler(Events.EPOCH_COMPLETED(once=1), saver)
    first.trainer.add_event_handler(Events.EPOCH_COMPLETED(once=1), lambda engine: engine.terminate())
    first.run(WithIds(data()))
    told = first.selective.history.losses_of(torch.arange(BATCH))
    torch.testing.assert_close(told, losses_of(network(), data()[:BATCH]).detach(), check_dtype=False)
    Checkpoint.load_objects(objects(second), torch.load(tmp_path / saver.last_checkpoint, weights_only=True))
    second.run(WithIds(data()))
    check_equal(second.model, straight.model)
    known = [each.selective.history.losses_of(torch.arange(ROWS)) for each in (straight, second)]
    assert torch.equal(*known)
    assert second.trainer.state.record.step == EPOCHS * ROWS // BATCH - 1


@needs_ignite
def test_the_kept_share_of_each_class_is_in_the_output_on_request():
    # Against counts by hand. Red when: shares are of all kept rows, or classes and rows are of different batches.
    training = Training(rowprop.TopK(keep=0.5), update={"classes_fn": lambda batch: batch[1]})
    training.run(epochs=1)
    x, y = data()[:BATCH]
    rows = losses_of(network(), (x, y)).topk(BATCH // 2).indices
    for number in y.unique().tolist():
        expected = int((y[rows] == number).sum()) / int((y == number).sum())
        assert training.outputs[0][f"kept/{number}"] == pytest.approx(expected)


@needs_ignite
def test_metrics_and_loggers_take_the_numbers_and_schedules_follow_the_run():
    # Red when: the progress counts from the second iteration, or begins anew in each epoch; the output holds a number
    # that Ignite's handlers do not take.
    from ignite.engine import Events
    from ignite.handlers.tensorboard_logger import OutputHandler, TensorboardLogger
    from ignite.metrics import Average

    seen = list[float]()

    def keep(progress: float) -> float:
        seen.append(progress)
        return 0.5

    training = Training(rowprop.TopK(keep), engine="sliced")
    Average(output_transform=lambda output: output["loss_all"]).attach(training.trainer, "loss_all")
    logger, handler = MagicMock(spec=TensorboardLogger), OutputHandler("train", output_transform=lambda output: output)
    logger.writer = MagicMock()
    training.trainer.add_event_handler(Events.ITERATION_COMPLETED, handler, logger, Events.ITERATION_COMPLETED)
    training.run()
    written = {call.args[0]: call.args[1] for call in logger.writer.add_scalar.call_args_list}
    assert written == {f"train/{name}": value for name, value in training.outputs[-1].items()}
    steps, epoch = EPOCHS * ROWS // BATCH, ROWS // BATCH
    assert sorted(set(seen)) == pytest.approx([step / steps for step in range(steps)])
    losses = [numbers["loss_all"] for numbers in by_hand(hardest(0.5))[1][-epoch:]]
    assert training.trainer.state.metrics["loss_all"] == pytest.approx(sum(losses) / epoch, abs=1e-5)


@needs_ignite
def test_the_page_runs(capsys: pytest.CaptureFixture[str]):
    # Red when: a line of the page no longer works, or prints something else.
    assert last_line_of("ignite.md", capsys) == "16 64"


@needs_ignite
def test_what_the_process_function_refuses():
    from rowprop.integrations.ignite import update

    model = network()
    optimizer, half = torch.optim.SGD(model.parameters()), rowprop.TopK(keep=0.5)
    selective = rowprop.SelectiveBackprop(model, losses_of, half)
    with pytest.raises(InvalidInput, match=r"selective=TopK.* but a rowprop.SelectiveBackprop was needed"):
        update(half, optimizer)
    with pytest.raises(InvalidInput, match=r"an optimizer was needed"):
        update(selective, model)
    with pytest.raises(InvalidInput, match=r"classes_fn=3"):
        update(selective, optimizer, classes_fn=3)
    with pytest.raises(InvalidInput, match=r"gradient_accumulation_steps=0"):
        update(selective, optimizer, gradient_accumulation_steps=0)
    with pytest.raises(InvalidInput, match=r"leave one out"):
        Training(half, update={"gradient_accumulation_steps": 2}, accumulate_to=8).run()
