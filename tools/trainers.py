"""Lightning, fastai, Composer and accelerate as the tests use them; and behind one door, for what holds for all."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset

from families import load
from plain_loop import BATCH, EPOCHS, RATE, ROWS, data, forget_processes, groups, losses_of, network
from rowprop import SelectiveBackprop
from rowprop.distributed import Local


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
    trainer.fit(module, DataLoader(dataset, batch), DataLoader(data(), BATCH), ckpt_path=ckpt)
    return trainer


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


@dataclass
class How:
    """What a training has in place of the plain loop's; one of two processes has a rank."""

    dataset: Any = field(default_factory=data)
    batch: int = BATCH
    accumulate: int = 1
    epochs: int = EPOCHS
    bf16: bool = False
    rank: int | None = None
    save: Path | None = None
    resume: Path | None = None
    before: Callable[[nn.Module], Any] = lambda _: None
    """Is called with the network before the training."""

    @property
    def rows(self) -> Any:
        """The process's own: of two every second, from the rank on."""
        return self.dataset if self.rank is None else Subset(self.dataset, range(self.rank, ROWS, 2))


class Framework:
    """``fit`` trains, with what ``ours`` makes or without it, and gives the network and the numbers that are shown."""

    name = ""
    ids = False  # whether its batches may carry ids of rows
    saves_ranks = True  # whether its checkpoints hold a state of each process

    def ours(self, selector: Any, **settings: Any) -> Any:
        return load(f"rowprop.integrations.{self.name}").SelectiveBackpropCallback(selector, **settings)

    def fit(self, folder: Path, ours: Any = None, **how: Any) -> tuple[nn.Module, list[dict[str, float]]]:
        return self._fit(folder, ours, How(**how))

    def _fit(self, folder: Path, ours: Any, how: How) -> tuple[nn.Module, list[dict[str, float]]]:
        raise NotImplementedError

    def shown(self, logged: list[dict[str, float]], accumulate: int = 1) -> list[dict[str, float]]:
        """The numbers of each batch as the framework has them."""
        return logged


class Lightning(Framework):
    name, ids = "lightning", True

    def __init__(self, package: str = "lightning.pytorch") -> None:
        self.package = package

    def _fit(self, folder: Path, ours: Any, how: How) -> tuple[nn.Module, list[dict[str, float]]]:
        logged = list[dict[str, float]]()

        def note(trainer: Any, *_: Any) -> None:
            logged.append({name: float(value) for name, value in trainer.callback_metrics.items()})

        listens = importlib.import_module(f"{self.package}.callbacks").LambdaCallback(on_train_batch_end=note)
        more: dict[str, Any] = {"precision": "bf16-mixed"} if how.bf16 else {}
        if how.rank is not None:
            more |= {"strategy": "ddp", "devices": 2, "use_distributed_sampler": False}
        module = module_of(self.package)
        how.before(module.network)
        trainer = fit(
            module, [listens] if ours is None else [ours, listens], folder, package=self.package, dataset=how.rows,
            ckpt=how.resume, batch=how.batch, max_epochs=how.epochs, accumulate_grad_batches=how.accumulate, **more,
        )  # fmt: skip
        if how.save:
            trainer.save_checkpoint(how.save)
        return module.network, logged


class Fastai(Framework):
    """Its table has the means of an epoch; its own way to train in several processes needs CUDA."""

    name, saves_ranks = "fastai", False

    def shown(self, logged: list[dict[str, float]], accumulate: int = 1) -> list[dict[str, float]]:
        return means_of(logged)

    def _fit(self, folder: Path, ours: Any, how: How) -> tuple[nn.Module, list[dict[str, float]]]:
        cbs, model = [] if ours is None else [ours], network()
        how.before(model)
        if how.rank is not None:
            model = nn.parallel.DistributedDataParallel(model)
        if how.accumulate > 1:
            cbs.append(load("fastai.callback.training").GradientAccumulation(n_acc=how.accumulate * BATCH))
        with pytest.MonkeyPatch.context() as patch:
            if how.bf16:  # of the CPU, under a gradient scaler
                fp16 = load("fastai.callback.fp16")
                patch.setattr(fp16, "autocast", bfloat16)
                patch.setattr(fp16, "GradScaler", lambda *_, **__: torch.amp.GradScaler("cpu", init_scale=1024.0))
                cbs.append(fp16.MixedPrecision())
            learn = learner(cbs, model=model, batch=how.batch, dataset=how.rows, path=folder)
            learn.dls.c = 3  # classes
            if how.resume:
                learn.load(how.resume.stem)
                ours.load_state_dict(torch.load(how.resume, weights_only=True))
            learn.fit(how.epochs, start_epoch=1 if how.resume else 0)
        if how.save:
            learn.save(how.save.stem)
            torch.save(ours.state_dict(), how.save)
        lines = [] if how.resume else table(learn)  # of the epochs before it, fastai writes shorter lines
        shown = [{name: each for name, each in line.items() if name != "time"} for line in lines]
        return model if how.rank is None else model.module, shown


class Composer(Framework):
    """Accumulation is its microbatches, and its numbers are means over them."""

    name = "composer"

    def ours(self, selector: Any, **settings: Any) -> Any:
        return always(selector=selector, **settings)

    def shown(self, logged: list[dict[str, float]], accumulate: int = 1) -> list[dict[str, float]]:
        return [{name: fmean(each[name] for each in one) for name in one[0]} for one in groups(logged, accumulate)]

    def _fit(self, folder: Path, ours: Any, how: How) -> tuple[nn.Module, list[dict[str, float]]]:
        more: dict[str, Any] = {"load_path": str(how.resume)} if how.resume else {}
        if how.accumulate > 1:
            more["device_train_microbatch_size"] = how.batch
        with pytest.MonkeyPatch.context() as patch:
            if how.bf16:  # which Composer has for GPUs alone
                module = load("composer.trainer.trainer")
                patch.setattr(module, "_validate_precision", lambda *_: None)
                patch.setattr(module, "get_precision_context", bfloat16)
                more["precision"] = "amp_bf16"
            model, algorithms = model_of(), [] if ours is None else [ours]
            how.before(model.network)
            trainer = trainer_of(model, algorithms, dataset=how.dataset, batch=how.accumulate * how.batch, **more)
            trainer.fit(duration=f"{how.epochs}ep" if how.save else None)
        if how.save:
            trainer.save_checkpoint(str(how.save))
        trainer.close()
        found: dict[int, dict[str, float]] = {}
        for name, values in trainer.seen.items():
            for time, value in values:
                found.setdefault(time.batch.value, {})[name] = value
        return model.network, [found[number] for number in sorted(found) if "loss/train/total" in found[number]]


class Accelerate(Framework):
    """The page's loop. Of several processes its checkpoints have the states that are registered of the first alone."""

    name, saves_ranks = "accelerate", False

    def ours(self, selector: Any, **settings: Any) -> Any:
        return SimpleNamespace(selector=selector, settings=settings, trackers=[])

    def _fit(self, folder: Path, ours: Any, how: How) -> tuple[nn.Module, list[dict[str, float]]]:
        forget_processes()
        accelerator = load("accelerate").Accelerator(
            cpu=True, gradient_accumulation_steps=how.accumulate, mixed_precision="bf16" if how.bf16 else "no"
        )
        model, dataset, logged = network(), how.dataset, list[dict[str, float]]()
        if how.rank is not None:  # each rank gets every second batch, which holds its rows
            dataset = Subset(dataset, torch.arange(ROWS).view(-1, BATCH, 2).mT.flatten().tolist())
        optimizer, loader = torch.optim.SGD(model.parameters(), lr=RATE), DataLoader(dataset, how.batch)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        how.before(model)
        if ours is not None:
            accelerator.trackers = ours.trackers
            ours.step = SelectiveBackprop(model, losses_of, ours.selector, ranks=Local(), **ours.settings)
            accelerator.register_for_checkpointing(ours.step)
        if how.resume:
            accelerator.load_state(str(how.resume))
        for batch in chain.from_iterable([loader] * (how.epochs - (1 if how.resume else 0))):
            with accelerator.accumulate(model), accelerator.autocast():
                if ours is None:
                    loss = losses_of(model, batch).mean()
                    logged.append({"loss_all": float(loss)})
                else:
                    loss, ours.record = ours.step(batch)
                    numbers = ours.record.to_dict()
                    accelerator.log(numbers, step=ours.record.step)
                    logged.append(numbers | {"kept": ours.record.num_kept / ours.record.num_rows})
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
        if how.save:
            accelerator.save_state(str(how.save))
        return accelerator.unwrap_model(model), logged


def bfloat16(*_: Any, **__: Any) -> torch.autocast:
    return torch.autocast("cpu", dtype=torch.bfloat16)


FRAMEWORKS = [Lightning(), Lightning("pytorch_lightning"), Fastai(), Composer(), Accelerate()]
