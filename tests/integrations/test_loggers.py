"""What TensorBoard, MLflow, trackio and W&B have in their files after a training, against a plain loop.

The packages live in a venv of their own: `nox -s integrations`. Nothing of them goes over a network.
"""

from __future__ import annotations

import json
import sqlite3
import struct
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rowprop
from plain_loop import by_hand, descend, hardest, losses_of, scripts_of

Read = dict[str, Callable[[str], list[float]]]
Training = tuple[Read, list[dict[str, float]]]
"""What reads the numbers of a training from each logger's files, by their names; and the numbers of a plain loop."""
LOGGERS = ("tensorboard", "mlflow", "trackio", "wandb")
pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(not all(map(find_spec, LOGGERS)), reason="needs the loggers: nox -s integrations"),
    pytest.mark.filterwarnings("ignore"),  # those of the packages are their own
]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder where all of them write, with nobody to tell."""
    folder = tmp_path_factory.mktemp("loggers")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for name, value in {
            "HOME": folder, "TRACKIO_DIR": folder / "trackio", "MLFLOW_TRACKING_URI": "sqlite:///mlflow.db",
            "MLFLOW_DISABLE_TELEMETRY": "true", "WANDB_MODE": "offline", "WANDB_SILENT": "true", "WANDB_DIR": folder,
            "HF_HUB_OFFLINE": "1",
        }.items():  # fmt: skip
            patch.setenv(name, str(value))
        for name in [name for name in sys.modules if name.partition(".")[0] == "trackio"]:
            patch.delitem(sys.modules, name)  # it looks for its folder on import, and TRL may have imported it
        yield folder


def in_tensorboard(folder: Path, name: str) -> list[float]:
    """The values of a number, in the order of the steps."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (events,) = folder.rglob("events.out.tfevents.*")
    accumulator = EventAccumulator(str(events))
    accumulator.Reload()
    return [event.value for event in accumulator.Scalars(name)]


def in_mlflow(experiment: str, name: str) -> list[float]:
    import mlflow

    client = mlflow.MlflowClient("sqlite:///mlflow.db")
    (run,) = client.search_runs([client.get_experiment_by_name(experiment).experiment_id])
    return [metric.value for metric in sorted(client.get_metric_history(run.info.run_id, name), key=lambda m: m.step)]


def in_trackio(file: Path, name: str) -> list[float]:
    with sqlite3.connect(file) as db:
        lines = [json.loads(line) for (line,) in db.execute("SELECT metrics FROM metrics ORDER BY step")]
    return [line[name] for line in lines if name in line]


def in_wandb(file: str, name: str) -> list[float]:
    """From the file of an offline run: records in blocks of 32 KiB, each part with its checksum, size and kind."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, place, whole, found = Path(file).read_bytes(), 7, b"", list[float]()
    while place < len(data):
        room = 32768 - place % 32768
        if room < 7:
            place += room
            continue
        _, size, kind = struct.unpack("<IHB", data[place : place + 7])
        whole += data[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):  # a whole one, or the last part
            items = Record.FromString(whole).history.item
            found += [json.loads(each.value_json) for each in items if name in (each.key, "/".join(each.nested_key))]
            whole = b""
    return found


def readers(place: Path, folder: str, experiment: str, file: str, prefix: str = "") -> Read:
    """What reads the numbers of a training from the files of each logger."""
    return {
        "tensorboard": lambda name: in_tensorboard(place / folder, prefix + name),
        "mlflow": lambda name: in_mlflow(experiment, name),
        "trackio": lambda name: in_trackio(place / "trackio" / f"{folder}.db", prefix + name),
        "wandb": lambda name: in_wandb(file, prefix + name),
    }


@pytest.fixture(scope="module")
def looped(place: Path) -> Training:
    """The page's loops, each logger in its own. Red when: a line is misspelt, or `loss_all` is of the kept rows."""
    namespace: dict[str, Any] = {}
    for block in scripts_of("loggers.md"):
        exec(compile(block, "loggers.md", "exec"), namespace)
    found = readers(place, "runs", "Default", namespace["run"].settings.sync_file)
    found |= {"trackio": lambda name: in_trackio(place / "trackio" / "rowprop.db", name)}
    torch.manual_seed(0)
    model, x, y, logged = nn.Linear(20, 4), torch.randn(64, 20), torch.randint(4, (64,)), list[dict[str, float]]()

    def loss_of(model: nn.Module, batch: Any) -> Tensor:
        losses = losses_of(model, batch)
        kept = losses.topk(16).values.mean()
        logged.append({"loss_all": float(losses.mean()), "loss_kept": float(kept), "num_kept": 16})
        return kept

    descend(model, [(x, y)] * 3, loss_of, rate=0.1)
    return found, logged


@pytest.fixture(scope="module")
def trained(place: Path) -> Training:
    """Transformers' Trainer. Red when: `select` adds the numbers after the Trainer has logged."""
    import wandb

    from rowprop.integrations.transformers import select
    from transformers_trainer import by_hand, classes, classifier, make_trainer, row_losses, texts

    settings = {"report_to": list(LOGGERS), "project": "trainer", "num_train_epochs": 1, "run_name": "ours"}
    data = texts(classes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TENSORBOARD_LOGGING_DIR", str(place / "trainer"))
        patch.setenv("MLFLOW_EXPERIMENT_NAME", "trainer")
        trainer = make_trainer(classifier(), data, place / "output", **settings)
        select(trainer, rowprop.TopK(keep=0.5), engine="sliced")
        trainer.train()
        file = wandb.run.settings.sync_file
        wandb.finish()
    logged = by_hand(classifier(), data, row_losses, choose=hardest(0.5))
    return readers(place, "trainer", "trainer", file, "train/"), logged[: len(logged) // 2]  # of two epochs


@pytest.fixture(scope="module")
def lightened(place: Path) -> Training:
    """Lightning. Red when: the callback logs without the module, so that no logger hears of it."""
    from lightning.pytorch.loggers import MLFlowLogger, TensorBoardLogger, WandbLogger

    from rowprop.integrations.lightning import SelectiveBackpropCallback
    from trainers import fit, module_of

    own = [
        TensorBoardLogger(place, name="lightning"), MLFlowLogger("lightning", tracking_uri="sqlite:///mlflow.db"),
        WandbLogger(offline=True),
    ]  # fmt: skip
    callback = SelectiveBackpropCallback(rowprop.TopK(keep=0.5), engine="sliced")
    fit(module_of("lightning.pytorch"), [callback], place, logger=own, log_every_n_steps=1)
    run = own[2].experiment
    run.finish()
    return readers(place, "lightning", "lightning", run.settings.sync_file), by_hand(hardest(0.5))[1]


WRITTEN = [(training, logger) for training in ("looped", "trained", "lightened") for logger in LOGGERS]
WRITTEN.remove(("lightened", "trackio"))  # for which Lightning has no logger


@pytest.mark.parametrize(("training", "logger"), WRITTEN)
def test_the_files_of_the_loggers_hold_the_numbers_of_a_plain_loop(
    training: str, logger: str, request: pytest.FixtureRequest
):
    read, logged = request.getfixturevalue(training)
    for name in logged[0]:
        assert read[logger](name) == pytest.approx([numbers[name] for numbers in logged], abs=1e-5)
