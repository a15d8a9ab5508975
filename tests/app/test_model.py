"""MODEL on the command line: what it may name, and one sentence where it names nothing usable."""

from __future__ import annotations

import re
import sys
from collections import UserDict
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import model_cases
from model_cases import losses
from rowprop.app.model import default_losses, default_token_losses, load_model
from rowprop.errors import InvalidInput, MissingExtra


def refusal(spec: str, **options: str) -> str:
    """The one sentence that refuses a model."""
    with pytest.raises((InvalidInput, MissingExtra)) as caught:
        load_model(spec, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture
def write(tmp_path: Path, monkeypatch):
    """Writes a file below the working directory."""
    monkeypatch.chdir(tmp_path)

    def write(name: str, text: str) -> None:
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text(text)

    return write


def test_a_model_alone_gets_a_seeded_batch_that_fits_it():
    subject = load_model("model_cases:mlp", input_shape="6x4", seed=3)
    inputs, classes = subject.batch
    assert inputs.shape == (6, 4) and classes.shape == (6,) and classes.dtype == torch.int64
    assert bool(((classes >= 0) & (classes < 3)).all())
    assert subject.losses_fn is default_losses
    expected = F.cross_entropy(subject.model(inputs), classes, reduction="none")
    assert torch.equal(subject.losses_fn(subject.model, subject.batch), expected)
    again, other = (load_model("model_cases:mlp", input_shape="6x4", seed=seed) for seed in (3, 4))
    assert torch.equal(again.batch[0], inputs) and torch.equal(again.model[0].weight, subject.model[0].weight)
    assert not torch.equal(other.batch[0], inputs)


def test_a_model_of_another_output_gets_a_target_of_its_shape():
    subject = load_model("model_cases:with_map", input_shape="5x2x6x6")
    inputs, target = subject.batch
    assert target.shape == (5, 3, 4, 4) and target.is_floating_point()
    expected = (subject.model(inputs) - target).square().mean((1, 2, 3))
    torch.testing.assert_close(subject.losses_fn(subject.model, subject.batch), expected)


def test_batch_and_losses_may_come_with_the_model_in_the_dtype_asked_for():
    subject = load_model("model_cases:mlp_with_batch")
    assert subject.batch[0].shape == (8, 4) and subject.losses_fn is default_losses
    subject = load_model("model_cases:complete", dtype="float64", device="cpu")
    assert subject.losses_fn is losses
    assert subject.batch[0].dtype == subject.model[0].weight.dtype == torch.float64
    assert subject.batch[1].dtype == torch.int64
    assert load_model("model_cases:mlp", input_shape="6x4", dtype="float64").batch[0].dtype == torch.float64


FILE = """
from neighbour import WIDTH
from torch import nn

def net():
    import later
    return nn.Linear(WIDTH, later.CLASSES)
"""


def test_a_file_finds_its_neighbours_and_the_working_directory(write):
    write("deep/torch.py", FILE)  # called what an installed module is
    write("deep/neighbour.py", "WIDTH = 7")
    write("later.py", "CLASSES = 2")
    before = list(sys.path)
    assert load_model("deep/torch.py:net", input_shape="3x7").model.weight.shape == (2, 7)
    assert sys.path == before


def test_a_library_that_is_missing_is_named_with_the_release_that_fits(monkeypatch):
    # Red: `+ 14`. The releases are those of PyTorch's own table.
    monkeypatch.setitem(sys.modules, "torchvision", None)
    for version, release in {"2.11.0": "0.26", "2.12.1+cu128": "0.27", "2.13.0+cpu": "0.28"}.items():
        monkeypatch.setattr(torch, "__version__", version)
        said = f"needs torchvision, which is not installed; run: pip install 'torchvision=={release}.*'."
        assert said in refusal("torchvision/resnet18")


def test_a_library_built_for_another_torch_is_not_called_missing(write, tmp_path: Path, monkeypatch):
    # Red: every ImportError told as "not installed".
    monkeypatch.syspath_prepend(tmp_path)
    for fails, said in (
        ("raise RuntimeError('operator torchvision::nms does not exist')", "RuntimeError: operator torchvision::nms"),
        ("import torch._no_such_part", "ModuleNotFoundError: No module named 'torch._no_such_part'"),
        ("raise ImportError('libjpeg.so.8')", "ImportError: libjpeg.so.8"),
    ):
        write("torchvision/__init__.py", fails)
        told = refusal("torchvision/resnet18")
        assert f"needs torchvision, which is installed but does not import: {said}" in told
        assert "run: pip install -U 'torchvision==0." in told


def test_torchvision_is_asked_for_random_weights(monkeypatch: pytest.MonkeyPatch):
    def get_model(name: str, weights: object) -> nn.Module:
        if name != "tiny" or weights is not None:
            raise ValueError(f"Unknown model {name}")
        return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 5))

    package, models = ModuleType("torchvision"), ModuleType("torchvision.models")
    package.__path__ = []
    models.get_model = get_model
    monkeypatch.setitem(sys.modules, "torchvision", package)
    monkeypatch.setitem(sys.modules, "torchvision.models", models)
    assert load_model("torchvision/tiny", input_shape="4x3x16x16").batch[0].shape == (4, 3, 16, 16)
    assert "model 'torchvision/tiny' comes without a batch" in refusal("torchvision/tiny")
    assert "model 'torchvision/huge' could not be built: ValueError: Unknown model" in refusal("torchvision/huge")


FAILING = """
import sys

def deep(entries):
    return entries["x"]

def make():
    return deep({})

def leave():
    sys.exit(0)
"""


def test_an_error_of_a_file_keeps_its_place(write):
    # Red: `place_of` without its frames turned around gives line 8; SystemExit let through by `foreign` (the command
    # then ends with the file's own exit code, 0).
    called, ends = "failed when called without arguments: ", "its code ends the process (SystemExit: 0 (train.py:11)); "
    remedy = 'put the lines that only a script should run under `if __name__ == "__main__":`.'
    write("train.py", FAILING)
    assert f"{called}KeyError: 'x' (train.py:5)." in refusal("train.py:make")
    assert f"{called}{ends}{remedy}" in refusal("train.py:leave")
    write("train.py", FAILING + "leave()")
    assert f"could not be loaded: {ends}{remedy}" in refusal("train.py:make")


def test_ctrl_c_while_a_file_is_imported_stays_ctrl_c(write):
    # Red: KeyboardInterrupt left out of what `foreign` lets through.
    write("train.py", "raise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        load_model("train.py:make")


@dataclass
class Rows:
    x: Tensor
    names: list[str]


def test_every_kind_of_batch_moves_with_the_model(monkeypatch: pytest.MonkeyPatch):
    # Red: torch's tree_map_only, which takes dataclasses and UserDicts for leaves.
    encoding = UserDict(input_ids=torch.tensor([[1, 2], [3, 4]]), mask=torch.ones(2, 2))
    batch = Rows(torch.ones(2, 4), ["a", "b"]), encoding
    monkeypatch.setattr(model_cases, "moved", lambda: (nn.Linear(4, 2), batch, losses), raising=False)
    rows, other = load_model("model_cases:moved", dtype="float64", device="meta").batch
    assert (rows.x.dtype, rows.x.device.type, rows.names) == (torch.float64, "meta", ["a", "b"])
    assert isinstance(other, UserDict)
    assert [(t.dtype, t.device.type) for t in other.values()] == [(torch.int64, "meta"), (torch.float64, "meta")]


def test_the_default_losses_take_the_logits():
    # Red: the first tensor of the container, which is a number in the last case.
    logits, classes = torch.randn(4, 3), torch.tensor([0, 2, 1, 1])
    expected = torch.logsumexp(logits, 1) - logits[torch.arange(4), classes]
    named, mapped = SimpleNamespace(last=-logits, logits=logits), {"loss": torch.ones(()), "logits": logits}
    for output in ((logits, -logits), {"out": [logits], "aux": -logits}, named, mapped):
        torch.testing.assert_close(default_losses(lambda _: output, (logits, classes)), expected)


def test_the_default_losses_of_places_are_those_of_tokens_or_their_mean_in_each_row():
    # Red when: losses of rows keep the places, or those of tokens lose them.
    batch = logits, classes = torch.randn(4, 3, 5), torch.randint(3, (4, 5))
    expected, model = torch.logsumexp(logits, 1) - logits.gather(1, classes[:, None])[:, 0], nn.Identity()
    torch.testing.assert_close(default_token_losses(model, batch), expected)
    torch.testing.assert_close(default_losses(model, batch), expected.mean(1))
    assert load_model("model_cases:mlp", input_shape="6x4", tokens=True).losses_fn is default_token_losses


@pytest.mark.parametrize(
    ("spec", "options", "sentence"),
    [
        ("model_cases", {}, "is neither module:callable nor torchvision/NAME"),
        ("model_cases:nothing", {}, "could not be loaded: AttributeError"),
        ("nowhere.py:net", {}, "could not be loaded: FileNotFoundError"),
        ("model_cases:NOT_CALLABLE", {}, "is of type int, but a callable was needed"),
        ("model_cases:fails", {}, "failed when called without arguments: RuntimeError: no weights here ("),
        ("model_cases:mlp", {"input_shape": "99999999999x4"}, "batch of shape (99999999999, 4) could not be made: "),
        ("model_cases:mlp", {"input_shape": f"{10**40}x4"}, "could not be made: "),
        ("model_cases:returns_text", {}, "returned (str), but a torch.nn.Module, (model, batch) or"),
        ("model_cases:mlp", {}, "comes without a batch"),
        ("model_cases:mlp", {"input_shape": "8x5"}, "failed on a random batch of shape (8, 5): RuntimeError: "),
        ("model_cases:mlp", {"input_shape": "0x4"}, "input shape '0x4' is not of the form"),
        ("model_cases:mlp", {"input_shape": "-1x4"}, "input shape '-1x4' is not of the form"),
        ("model_cases:one_row", {"input_shape": "8x4"}, "returned shape (24,) for 8 rows"),
        ("model_cases:complete", {"input_shape": "8x4"}, "brings its own batch, so an input shape does not apply"),
        ("model_cases:complete", {"dtype": "int64"}, "dtype 'int64' is unknown"),
        ("model_cases:complete", {"device": "toaster"}, "load_model got device='toaster', which cannot be used here: "),
    ],
)
def test_what_cannot_be_used_is_one_sentence(spec: str, options: dict[str, str], sentence: str):
    assert sentence in refusal(spec, **options)


def test_batches_that_the_default_losses_do_not_fit():
    for batch, sentence in (
        (torch.randn(4, 3), "The batch is a Tensor but a tuple (*inputs, target) was needed"),
        ((torch.randn(4, 3), torch.randn(4)), "output has shape (4, 3) and the target shape (4,)"),
        ((torch.randn(4), torch.tensor([0, 1, 1, 0])), "output has shape (4,) and the target shape (4,)"),
    ):
        with pytest.raises(InvalidInput, match=re.escape(sentence)):
            default_losses(nn.Identity(), batch)
    with pytest.raises(InvalidInput, match="logits_of got a str in which no logits were found"):
        default_losses(lambda x: "text", (torch.randn(4, 3), torch.randn(4, 3)))
