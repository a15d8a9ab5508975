"""The settings of a comparison, checked once."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from functools import cached_property
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
        data, data_dir, train_rows: As for :func:`~rowprop.app.compare.data.load_data`.
        model: One of MODELS, or ``module:callable``; None for the data's default.
        methods: As for :func:`~rowprop.app.compare.methods.parse_methods`; None for the model's default.
        keep: Fraction of rows, under ``gpt`` of tokens, kept by the methods that keep a fraction, in (0, 1].
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
    keep: float = 0.5
    epochs: int | None = None
    seconds: float | None = None
    batch_rows: int | None = None
    lr: float | None = None
    seeds: int = 3
    device: str = "auto"
    threads: int | None = None

    def __post_init__(self) -> None:
        if not 0 < self.keep <= 1:
            raise InvalidInput(f"keep is {self.keep}, but a fraction in (0, 1] was needed.")
        if self.epochs is not None and self.seconds is not None:
            raise InvalidInput("epochs and seconds are both given, but a comparison has one budget; give one of them.")
        for name, count in {"epochs": self.epochs, "seeds": self.seeds, "threads": self.threads}.items():
            if count is not None and count < 1:
                raise InvalidInput(f"{name} is {count}, but at least 1 was needed.")
        cores = os.cpu_count() or 1
        if self.threads is not None and self.threads > cores:  # far more of them end the process
            raise InvalidInput(f"threads is {self.threads}, but this machine has {cores} cores; give 1 to {cores}.")
        if self.rows_per_step < 2:
            raise InvalidInput(
                f"the batch size is {self.rows_per_step}, but at least 2 rows were needed to choose from."
            )
        for name, amount in {"seconds": self.seconds, "lr": self.lr}.items():
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
        return parse_methods(DEFAULT_METHODS[self.unit] if self.methods is None else self.methods, self.unit)

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

    @property
    def optimizer(self) -> str:
        """The optimizer's name on the page."""
        return "AdamW" if self.model_name in ADAMW else "SGD with momentum"

    def torch_device(self) -> torch.device:
        """Return the device to train on, or refuse one that cannot be used here."""
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
        found = {"model": self.model_name, "batch_rows": self.rows_per_step, "epochs": self.num_epochs}
        return shared | found | {"lr": self.peak_lr}
