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

DEFAULT_EPOCHS = {"digits": 12, "wordnet": 6}  # by data, elsewhere 8; for a model that predicts tokens 4
DEFAULT_BATCH_ROWS = {"gpt": 16}  # by model, elsewhere 64; three seeds of gpt's default methods take minutes
DEFAULT_LR = {"resnet": 0.1, "textnet": 0.5, "vit": 0.002, "gpt": 0.003}  # by model, elsewhere 0.05
ADAMW = ("vit", "gpt")  # elsewhere SGD with momentum
_USUAL: Any = None  # gives way to the default of data or model


@dataclass(frozen=True)
class Settings:
    """The options of `rowprop compare`, with its defaults."""

    data: str = "digits"
    data_dir: str | None = None
    train_rows: int | None = None
    model: str = _USUAL  # one of MODELS, or module:callable
    methods: str = _USUAL
    keep: float = 0.5  # fraction of rows, under gpt of tokens, kept by the methods that keep a fraction, in (0, 1]
    epochs: int | None = None  # passes over the training rows; by default _USUAL, unless seconds are given
    seconds: float | None = None  # training time of each method instead of epochs; evaluation is not counted
    batch_rows: int = _USUAL  # N, rows per step; a remainder at the end of an epoch is left out
    lr: float = _USUAL  # the peak
    seeds: int = 3  # how many: 0, 1, ... Each fixes the model's start and the data's order, which infobatch draws anew
    device: str = "auto"  # an accelerator, if there is one
    threads: int | None = None  # that torch computes with; None to leave that as it is

    def __post_init__(self) -> None:
        self._settle(model="textnet" if self.data == "wordnet" else "convnet")
        lr, batch_rows = DEFAULT_LR.get(self.model, 0.05), DEFAULT_BATCH_ROWS.get(self.model, 64)
        self._settle(methods=DEFAULT_METHODS[self.unit], batch_rows=batch_rows, lr=lr)
        if self.seconds is None:
            self._settle(epochs=4 if self.unit == "token" else DEFAULT_EPOCHS.get(self.data, 8))
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
        if self.batch_rows < 2:
            raise InvalidInput(f"the batch size is {self.batch_rows}, but at least 2 rows were needed to choose from.")
        for name, amount in {"seconds": self.seconds, "lr": self.lr}.items():
            if amount is not None and not 0 < amount < float("inf"):
                raise InvalidInput(f"{name} is {amount}, but a positive number was needed.")
        for method in self.parsed_methods:
            if self.epochs == 1 and method.kind.whole_first_epoch:
                needs = f"{method.label} trains the first epoch whole and needs at least 2"
                raise InvalidInput(f"epochs is 1, but {needs}; raise --epochs, or name other methods.")

    def _settle(self, **usual: Any) -> None:
        for name, value in usual.items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)

    @cached_property  # a file that is named is run once
    def parsed_methods(self) -> tuple[Method, ...]:
        """The methods in the order written."""
        return parse_methods(self.methods, self.unit)

    @property
    def unit(self) -> Unit:
        """What is kept or not: tokens by ``gpt``, rows by other models."""
        return "token" if self.model == "gpt" else "row"

    @property
    def optimizer(self) -> str:
        """The optimizer's name on the page."""
        return "AdamW" if self.model in ADAMW else "SGD with momentum"

    def torch_device(self) -> torch.device:
        """The device to train on; one that cannot be used here is refused."""
        if self.device == "auto":
            return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
        device = checked_device("compare", self.device)
        if device.type == "meta":
            raise InvalidInput("compare got device='meta', which holds no numbers; cpu or an accelerator was needed.")
        return device

    def binding(self) -> dict[str, Any]:
        """The settings that all runs of a comparison must share; more methods or seeds may join later."""
        return {key: value for key, value in asdict(self).items() if key not in ("methods", "seeds", "device")}
