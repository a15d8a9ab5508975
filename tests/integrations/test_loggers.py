"""What TensorBoard, MLflow, trackio and W&B have in their files after a training, against a plain loop.

The packages live in a venv of their own: `nox -s integrations`. Nothing of them goes over a network.
"""

from __future__ import annotations

import json
import re
import sqlite3
import struct
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rowprop
from plain_loop import DOCS, by_hand, descend, hardest, losses_of

NAMES = ("loss_all", "loss_kept", "kept")
Read = Callable[[str], list[float]]
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


def readers(place: Path, folder: str, experiment: str, file: str, prefix: str = "") -> dict[str, Read]:
    """What reads the numbers of a training from the files of each logger."""
    return {
        "tensorboard": lambda name: in_tensorboard(place / folder, prefix + name),
        "mlflow": lambda name: in_mlflow(experiment, name),
        "trackio": lambda name: in_trackio(place / "trackio" / f"{folder}.db", prefix + name),
        "wandb": lambda name: in_wandb(file, prefix + name),
    }


@pytest.fixture(scope="module")
def looped(place: Path) -> dict[str, Read]:
    """The page's loops have run, each logger in its own."""
    namespace: dict[str, Any] = {}
    for block in re.findall(r"^```py\n(.*?)^```\n", (DOCS / "loggers.md").read_text(), re.MULTILINE | re.DOTALL):
        exec(compile(block, "loggers.md", "exec"), namespace)
    found = readers(place, "runs", "Default", namespace["run"].settings.sync_file)
    return found | {"trackio": lambda name: in_trackio(place / "trackio" / "rowprop.db", name)}


@pytest.mark.parametrize("logger", LOGGERS)
def test_the_lines_of_the_page_write_the_numbers(logger: str, looped: dict[str, Any]):
    # Red when: a line of the page is misspelt, or `loss_all` is that of the kept rows.
    torch.manual_seed(0)
    model, x, y = nn.Linear(20, 4), torch.randn(64, 20), torch.randint(4, (64,))
    truth: dict[str, list[float]] = {"loss_all": []}

    def loss_of(model: nn.Module, batch: Any) -> Tensor:
        losses = losses_of(model, batch)
        truth["loss_all"].append(float(losses.mean()))
        return losses.topk(16).values.mean()

    truth["loss_kept"] = descend(model, [(x, y)] * 3, loss_of, rate=0.1)
    for name, values in truth.items():
        assert looped[logger](name) == pytest.approx(values, abs=1e-5)
    assert looped[logger]("num_kept") == [16, 16, 16]


@pytest.fixture(scope="module")
def trained(place: Path) -> dict[str, Read]:
    """Transformers' Trainer has trained with all of them."""
    import wandb

    from rowprop.integrations.transformers import select
    from transformers_trainer import classes, classifier, make_trainer, texts

    settings = {"report_to": list(LOGGERS), "project": "trainer", "num_train_epochs": 1, "run_name": "ours"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TENSORBOARD_LOGGING_DIR", str(place / "trainer"))
        patch.setenv("MLFLOW_EXPERIMENT_NAME", "trainer")
        trainer = make_trainer(classifier(), texts(classes), place / "output", **settings)
        select(trainer, rowprop.TopK(keep=0.5), engine="sliced")
        trainer.train()
        file = wandb.run.settings.sync_file
        wandb.finish()
    return readers(place, "trainer", "trainer", file, "train/")


@pytest.mark.parametrize("logger", LOGGERS)
def test_the_trainers_loggers_have_the_numbers(logger: str, trained: dict[str, Any]):
    # Red when: `select` adds the numbers after the Trainer has logged.
    from transformers_trainer import BATCH, batches, classes, classifier, row_losses, texts

    model = classifier()
    truth: dict[str, list[float]] = {"loss_all": [], "kept": []}

    def loss_of(model: nn.Module, batch: Any) -> Tensor:
        losses = row_losses(model, batch)
        truth["loss_all"].append(float(losses.mean()))
        truth["kept"].append(0.5)
        return losses.topk(BATCH // 2).values.mean()

    truth["loss_kept"] = descend(model, batches(texts(classes)), loss_of)
    for name, values in truth.items():
        assert trained[logger](name) == pytest.approx(values, abs=1e-5)


@pytest.fixture(scope="module")
def lightened(place: Path) -> dict[str, Read]:
    """Lightning has trained with those that it has loggers for."""
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
    return readers(place, "lightning", "lightning", run.settings.sync_file)


@pytest.mark.parametrize("logger", ["tensorboard", "mlflow", "wandb"])
def test_lightnings_loggers_have_the_numbers(logger: str, lightened: dict[str, Any]):
    # Red when: the callback logs without the module, so that no logger hears of it.
    logged = by_hand(hardest(0.5))[1]
    for name in NAMES:
        assert lightened[logger](name) == pytest.approx([numbers[name] for numbers in logged], abs=1e-5)
