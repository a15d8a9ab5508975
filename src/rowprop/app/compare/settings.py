"""The settings of a comparison, checked once."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from rowprop.app.compare.methods import DEFAULT_METHODS, Method, parse_methods
from rowprop.checks import checked_device
from rowprop.engines import Unit
from rowprop.errors import InvalidInput

DEFAULT_MODEL = {"wordnet": "textnet"}  # elsewhere convnet
DEFAULT_EPOCHS = {"digits": 12, "wordnet": 6}  # elsewhere 8
DEFAULT_LR = {"resnet": 0.1, "textnet": 0.5, "vit": 0.002}  # elsewhere 0.05
ADAMW = ("vit", "gpt")  # elsewhere SGD with momentum
TOKEN_MODEL = "gpt"  # its defaults: three seeds of its default methods take minutes on one thread
TOKEN_EPOCHS, TOKEN_BATCH_ROWS, TOKEN_LR = 4, 16, 0.003


@dataclass(frozen=True)
class Settings:
    """The options of `rowprop compare`; the defaults are the command's.

    Attributes:
        data: ``digits``, ``fashion-mnist``, ``wordnet``, ``torchvision/NAME`` or ``module:callable``.
        data_dir: Folder with the data's files; None for the usual folder.
        train_rows: How many training rows to use; None for all, or 800 for ``gpt``.
        model: ``convnet``, ``resnet``, ``vit``, ``textnet``, ``gpt`` or ``module:callable``; None for the data's
            default.
        methods: Comma-separated, published ones or ``module:callable``; each may fix its engine, as in
            ``ohem@recompute``; None for the model's default.
        engine: The engine of the methods that name none.
        keep: Fraction of rows, under ``gpt`` of tokens, kept by the methods that keep a fraction, in (0, 1]; on
            average by biggest-losers.
        mass: Share of the batch's loss that batch-loss-filter keeps, in (0, 1].
        epochs: Passes over the training rows; None with ``seconds``, or for the default of data and model.
        seconds: Training time that each method gets instead of epochs; evaluation is not counted.
        batch_rows: N, rows per step; a remainder at the end of an epoch is left out. None for the model's default.
        lr: Peak learning rate; None for the model's default.
        seeds: How many seeds: 0, 1, ... Each fixes the model's start and the order of the data for all methods;
            infobatch, which prunes, draws an order of its own from it.
        device: ``cpu``, ``cuda``, ...; ``auto`` for an accelerator, if there is one.
        threads: Threads that torch computes with; None to leave that as it is.

    """

    data: str = "digits"
    data_dir: str | None = None
    train_rows: int | None = None
    model: str | None = None
    methods: str | None = None
    engine: str = "sliced"
    keep: float = 0.5
    mass: float = 0.9
    epochs: int | None = None
    seconds: float | None = None
    batch_rows: int | None = None
    lr: float | None = None
    seeds: int = 3
    device: str = "auto"
    threads: int | None = None

    def __post_init__(self) -> None:
        for name, value in (("keep", self.keep), ("mass", self.mass)):
            if not 0 < value <= 1:
                raise InvalidInput(f"{name} is {value}, but a fraction in (0, 1] was needed.")
        if self.epochs is not None and self.seconds is not None:
            raise InvalidInput("epochs and seconds are both given, but a comparison has one budget; give one of them.")
        at_least_one = {"epochs": self.epochs, "seeds": self.seeds, "threads": self.threads}
        for name, count in at_least_one.items():
            if count is not None and count < 1:
                raise InvalidInput(f"{name} is {count}, but at least 1 was needed.")
        cores = os.cpu_count() or 1
        if self.threads is not None and self.threads > cores:  # far more of them end the process
            raise InvalidInput(f"threads is {self.threads}, but this machine has {cores} cores; give 1 to {cores}.")
        if self.rows_per_step < 2:
            raise InvalidInput(
                f"the batch size is {self.rows_per_step}, but at least 2 rows were needed to choose from."
            )
        for name, amount in (("seconds", self.seconds), ("lr", self.lr)):
            if amount is not None and not 0 < amount < float("inf"):
                raise InvalidInput(f"{name} is {amount}, but a positive number was needed.")
        for method in self.parsed_methods:
            if self.num_epochs == 1 and method.kind.whole_first_epoch:
                raise InvalidInput(
                    f"epochs is 1, but {method.label} trains the first epoch whole and needs at least 2; "
                    "raise --epochs, or name other methods."
                )

    @cached_property  # a file that is named is run once
    def parsed_methods(self) -> tuple[Method, ...]:
        """The methods, in the order written."""
        written = ",".join(DEFAULT_METHODS[self.unit]) if self.methods is None else self.methods
        return parse_methods(written, self.engine, self.unit)

    @property
    def data_path(self) -> Path | None:
        """The data's folder as a path."""
        return Path(self.data_dir).expanduser() if self.data_dir is not None else None

    @property
    def model_name(self) -> str:
        """The model that is trained."""
        return DEFAULT_MODEL.get(self.data, "convnet") if self.model is None else self.model

    @property
    def unit(self) -> Unit:
        """What is kept or not: ``gpt`` has a loss for each token, other models for each row."""
        return "token" if self.model_name == TOKEN_MODEL else "row"

    @property
    def rows_per_step(self) -> int:
        """N, as far as there are so many rows."""
        if self.batch_rows is not None:
            return self.batch_rows
        return TOKEN_BATCH_ROWS if self.unit == "token" else 64

    @property
    def num_epochs(self) -> int | None:
        """Epochs to train; None under a budget of seconds."""
        if self.seconds is not None:
            return None
        return self.epochs or (TOKEN_EPOCHS if self.unit == "token" else DEFAULT_EPOCHS.get(self.data, 8))

    @property
    def peak_lr(self) -> float:
        """The highest learning rate of the schedule."""
        return self.lr or (TOKEN_LR if self.unit == "token" else DEFAULT_LR.get(self.model_name, 0.05))

    def torch_device(self) -> torch.device:
        """Return the device to train on.

        Raises:
            InvalidInput: The device cannot be used here, or holds no numbers.

        """
        if self.device == "auto":
            accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
            return accelerator or torch.device("cpu")
        device = checked_device("compare", self.device)
        if device.type == "meta":
            raise InvalidInput("compare got device='meta', which holds no numbers; cpu or an accelerator was needed.")
        return device

    def binding(self) -> dict[str, Any]:
        """Return the settings that all runs of a comparison must share; more methods or seeds may join later."""
        shared = {key: value for key, value in asdict(self).items() if key not in ("methods", "seeds", "device")}
        return shared | {
            "model": self.model_name,
            "batch_rows": self.rows_per_step,
            "epochs": self.num_epochs,
            "lr": self.peak_lr,
        }
