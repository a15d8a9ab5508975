"""Lightning, fastai and Composer as the tests use them; and the three behind one door, for what holds for all."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Sampler

from families import load
from plain_loop import BATCH, EPOCHS, RATE, ROWS, data, groups, losses_of, network


def module_of(package: str) -> Any:
    """A LightningModule of either package."""
    lightning = importlib.import_module(package)

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network = network()

        def losses(self, batch: Any) -> Tensor:
            return losses_of(self.network, batch)

        def training_step(self, batch: Any, _: int) -> Tensor:
            return self.losses(batch).mean()

        def validation_step(self, batch: Any, _: int) -> None:
            self.log("valid_loss", self.losses(batch).mean())

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=RATE)

    return Module()


def fit(module: Any, callbacks: list[Any], folder: Path, *, package: str = "lightning.pytorch", dataset: Any = None,
        ckpt: Path | None = None, batch: int = BATCH, **settings: Any) -> Any:  # fmt: skip
    lightning = importlib.import_module(package)
    given: dict[str, Any] = {"max_epochs": EPOCHS, "logger": False, "enable_checkpointing": False}
    trainer = lightning.Trainer(
        accelerator="cpu", enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder,
        callbacks=callbacks, **given | settings,
    )  # fmt: skip
    dataset = data() if dataset is None else dataset
    sampler = EachRank() if "devices" in settings else None
    trainer.fit(module, DataLoader(dataset, batch, sampler=sampler), DataLoader(data(), BATCH), ckpt_path=ckpt)
    return trainer


class EachRank(Sampler[int]):
    """Every second row, from the rank on."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(torch.distributed.get_rank(), ROWS, 2))

    def __len__(self) -> int:
        return ROWS // 2


def listener(package: str) -> tuple[Any, list[dict[str, float]]]:
    """A callback, and the logged numbers of every step, of which it takes note."""
    logged = list[dict[str, float]]()

    def note(trainer: Any, *_: Any) -> None:
        logged.append({name: float(value) for name, value in trainer.callback_metrics.items()})

    return importlib.import_module(f"{package}.callbacks").LambdaCallback(on_train_batch_end=note), logged


def learner(cbs: Any = None, *, model: nn.Module | None = None, batch: int = BATCH, loss_func: Any = None,
            dataset: Any = None, metrics: Any = None, path: Path | None = None) -> Any:  # fmt: skip
    basics = load("fastai.basics")
    dataset = data() if dataset is None else dataset
    dls = basics.DataLoaders(*(basics.DataLoader(dataset, bs=batch, shuffle=False) for _ in range(2)))
    sgd = partial(basics.OptimWrapper, opt=torch.optim.SGD)
    learn = basics.Learner(
        dls, network() if model is None else model, loss_func or basics.CrossEntropyLossFlat(), sgd, lr=RATE, cbs=cbs,
        metrics=metrics, path=path,
    )  # fmt: skip
    load("fastai.callback.progress")
    learn.remove_cbs(cb for cb in list(learn.cbs) if type(cb).__name__ == "ProgressCallback")
    learn.logger = (rows := []).append
    learn.lines = rows
    return learn


def means_of(logged: list[dict[str, float]]) -> list[dict[str, float]]:
    """For each epoch the means of the batches' numbers."""
    epochs = groups(logged, ROWS // BATCH)
    names = [dict.fromkeys(name for batch in epoch for name in batch) for epoch in epochs]
    return [
        {name: fmean(batch[name] for batch in epoch if name in batch) for name in found}
        for epoch, found in zip(epochs, names, strict=True)
    ]


def table(learn: Any) -> list[dict[str, float]]:
    """The lines of the fit's table, by column."""
    return [dict(zip(learn.recorder.metric_names, line, strict=True)) for line in learn.lines]


def model_of(inner: nn.Module | None = None) -> Any:
    """A ComposerModel that notes the losses of its evaluations."""

    class Model(load("composer.models").ComposerModel):
        def __init__(self) -> None:
            super().__init__()
            self.network = network() if inner is None else inner

        def forward(self, batch: Any) -> Tensor:
            return self.network(batch[0])

        def loss(self, outputs: Tensor, batch: Any, reduction: str = "mean") -> Tensor:
            return nn.functional.cross_entropy(outputs, batch[1], reduction=reduction)

    return Model()


def always(keep: float | None = None, **settings: Any) -> Any:
    """The algorithm in every batch of the training."""
    return load("rowprop.integrations.composer").SelectiveBackpropAlgorithm(0.0, 1.0, keep, 1.0, 0, **settings)


def trainer_of(model: Any, algorithms: Any = (), *, dataset: Any = None, batch: int = BATCH, sampler: Any = None,
               max_duration: str = f"{EPOCHS}ep", **settings: Any) -> Any:  # fmt: skip
    """A trainer, and in `trainer.seen` what it has logged."""
    loggers = load("composer.loggers")
    dataset = data() if dataset is None else dataset
    sampler = load("composer.utils").dist.get_sampler(dataset) if sampler is None else sampler
    memory = loggers.InMemoryLogger()
    trainer = load("composer").Trainer(
        model=model, train_dataloader=DataLoader(dataset, batch, sampler=sampler), max_duration=max_duration,
        optimizers=torch.optim.SGD(model.parameters(), lr=RATE), algorithms=list(algorithms), device="cpu",
        progress_bar=False, loggers=[memory], **settings,
    )  # fmt: skip
    trainer.seen = memory.data
    return trainer


def fitted(model: Any, *algorithms: Any, **settings: Any) -> Any:
    trainer = trainer_of(model, algorithms, **settings)
    trainer.fit()
    trainer.close()
    return trainer


def as_rank(rank: int) -> None:
    """Tell Composer which of two processes this one is."""
    ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "NODE_RANK": 0}
    os.environ.update({name: str(value) for name, value in ranks.items()})


def logged_by(trainer: Any) -> list[dict[str, float]]:
    """The numbers of each batch."""
    found: dict[int, dict[str, float]] = {}
    for name, values in trainer.seen.items():
        for time, value in values:
            found.setdefault(time.batch.value, {})[name] = value
    return [found[number] for number in sorted(found)]


class Framework:
    """``fit`` trains, with what ``ours`` makes or without it, and gives the network and the numbers that are shown."""

    name = ""

    def shown(self, logged: list[dict[str, float]]) -> list[dict[str, float]]:
        """The numbers of each batch as the framework has them."""
        return logged


class Lightning(Framework):
    name = "lightning"

    def __init__(self, package: str = "lightning.pytorch") -> None:
        self.package = package

    def ours(self, selector: Any, **settings: Any) -> Any:
        return load("rowprop.integrations.lightning").SelectiveBackpropCallback(selector, **settings)

    def fit(
        self, folder: Path, ours: Any = None, *, batch: int = BATCH, accumulate: int = 1, bf16: bool = False,
        epochs: int = EPOCHS, save: Path | None = None, resume: Path | None = None,
    ) -> tuple[nn.Module, list[dict[str, float]]]:  # fmt: skip
        module, (listens, logged) = module_of(self.package), listener(self.package)
        callbacks = [listens] if ours is None else [ours, listens]
        more: dict[str, Any] = {"precision": "bf16-mixed"} if bf16 else {}
        more |= {"package": self.package, "batch": batch, "ckpt": resume, "max_epochs": epochs}
        trainer = fit(module, callbacks, folder, accumulate_grad_batches=accumulate, **more)
        if save:
            trainer.save_checkpoint(save)
        return module.network, logged


class Fastai(Framework):
    """Its table has the means of an epoch."""

    name = "fastai"

    def ours(self, selector: Any, **settings: Any) -> Any:
        return load("rowprop.integrations.fastai").SelectiveBackpropCallback(selector, **settings)

    def shown(self, logged: list[dict[str, float]]) -> list[dict[str, float]]:
        return means_of(logged)

    def fit(
        self, folder: Path, ours: Any = None, *, batch: int = BATCH, accumulate: int = 1, bf16: bool = False,
        epochs: int = EPOCHS, save: Path | None = None, resume: Path | None = None,
    ) -> tuple[nn.Module, list[dict[str, float]]]:  # fmt: skip
        cbs = [] if ours is None else [ours]
        if accumulate > 1:
            cbs.append(load("fastai.callback.training").GradientAccumulation(n_acc=accumulate * BATCH))
        with pytest.MonkeyPatch.context() as patch:
            if bf16:  # of the CPU, under a gradient scaler
                fp16 = load("fastai.callback.fp16")
                patch.setattr(fp16, "autocast", lambda *_, **__: torch.autocast("cpu", dtype=torch.bfloat16))
                patch.setattr(fp16, "GradScaler", lambda *_, **__: torch.amp.GradScaler("cpu", init_scale=1024.0))
                cbs.append(fp16.MixedPrecision())
            learn = learner(cbs, batch=batch, path=folder)
            learn.dls.c = 3  # classes
            if resume:
                learn.load(resume.stem)
                ours.load_state_dict(torch.load(resume, weights_only=True))
            learn.fit(epochs, start_epoch=1 if resume else 0)
        if save:
            learn.save(save.stem)
            torch.save(ours.state_dict(), save)
        lines = [] if resume else table(learn)  # of the epochs before it, fastai writes shorter lines
        return learn.model, [{name: each for name, each in line.items() if name != "time"} for line in lines]


class Composer(Framework):
    """Accumulation is its microbatches."""

    name = "composer"

    def ours(self, selector: Any, **settings: Any) -> Any:
        return always(selector=selector, **settings)

    def fit(
        self, folder: Path, ours: Any = None, *, batch: int = BATCH, accumulate: int = 1, bf16: bool = False,
        epochs: int = EPOCHS, save: Path | None = None, resume: Path | None = None,
    ) -> tuple[nn.Module, list[dict[str, float]]]:  # fmt: skip
        more: dict[str, Any] = {"load_path": str(resume)} if resume else {}
        if accumulate > 1:
            more["device_train_microbatch_size"] = batch
        with pytest.MonkeyPatch.context() as patch:
            if bf16:  # which Composer has for GPUs alone
                module = load("composer.trainer.trainer")
                patch.setattr(module, "_validate_precision", lambda *_: None)
                patch.setattr(module, "get_precision_context", bfloat16)
                more["precision"] = "amp_bf16"
            model = model_of()
            trainer = trainer_of(model, [] if ours is None else [ours], batch=accumulate * batch, **more)
            trainer.fit(duration=f"{epochs}ep" if save else None)
        if save:
            trainer.save_checkpoint(str(save))
        trainer.close()
        return model.network, [line for line in logged_by(trainer) if "loss/train/total" in line]


@contextmanager
def bfloat16(*_: Any, **__: Any) -> Iterator[None]:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        yield


FRAMEWORKS = [Lightning(), Lightning("pytorch_lightning"), Fastai(), Composer()]
