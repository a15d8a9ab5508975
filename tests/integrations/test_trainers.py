"""Lightning, fastai and Composer with and without rowprop: what holds for all of them, against a plain loop.

The packages live in venvs of their own: `nox -s integrations`, `nox -s fastai`. Models are tiny.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import plain_loop
import rowprop
from families import torchvision_models
from plain_loop import BATCH, EPOCHS, ROWS, batches, by_hand, check_equal, check_same, data, descend, hardest, network
from trainers import FRAMEWORKS, Composer, Fastai, Lightning, fit, fitted, learner, model_of, module_of

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore"),  # those of the frameworks are their own
]
HALF = rowprop.TopK(keep=0.5)


@pytest.fixture(params=FRAMEWORKS, ids=lambda each: getattr(each, "package", each.name))
def framework(request: pytest.FixtureRequest) -> Any:
    name = getattr(request.param, "package", request.param.name).split(".")[0]
    if find_spec(name) is None:
        pytest.skip(f"needs {name}: nox -s integrations, nox -s fastai")
    if name in ("fastai", "composer"):
        torchvision_models()
    return request.param


def check_shown(found: list[dict[str, float]], truth: list[dict[str, float]], **tolerance: float) -> None:
    for line, numbers in zip(found, truth, strict=True):
        assert {name: line[name] for name in numbers} == pytest.approx(numbers, **tolerance)


# Red when: the loss is the mean of all rows, or `loss_all` is that of the kept ones.
@pytest.mark.parametrize("engine", ["sliced", "recompute"])
def test_the_parameters_and_logs_are_those_of_a_plain_loop(engine: str, framework: Any, tmp_path: Path):
    model, shown = framework.fit(tmp_path, framework.ours(HALF, engine=engine))
    plain, logged = by_hand(hardest(0.5))
    check_same(model, plain)
    check_shown(shown, framework.shown(logged), abs=1e-5)


# Red when: the loss is divided by the accumulated batches once more; fastai takes the kept rows for the batch's and its
# optimizer steps half as often; Composer's logs are those of the last microbatch.
def test_accumulation_is_the_frameworks(framework: Any, tmp_path: Path):
    model, shown = framework.fit(tmp_path, framework.ours(HALF, engine="sliced"), accumulate=2)
    plain, logged = by_hand(hardest(0.5), every=2)
    check_same(model, plain)
    if framework.name == "composer":
        pairs = zip(logged[::2], logged[1::2], strict=True)
        logged = [{name: (one[name] + other[name]) / 2 for name in one} for one, other in pairs]
    check_shown(shown, framework.shown(logged), abs=1e-5)


# bfloat16, against a second forward of the kept rows, written out. Red when: the rows are scored, or trained, outside
# of the framework's autocast, or fastai's scale is left out of the backward.
def test_mixed_precision_is_the_frameworks(framework: Any, tmp_path: Path):
    ours = framework.ours(rowprop.TopK(keep=0.25), engine="recompute")
    check_same(framework.fit(tmp_path, ours, bf16=True)[0], plain_loop.by_hand_in_bfloat16(0.25))


# Bit for bit, with batches of 6 rows, validation included. Red when: the loss is a sum of losses times 1/6, is scaled,
# or when random numbers are drawn.
def test_all_rows_are_the_untouched_training(framework: Any, tmp_path: Path):
    plain, shown = framework.fit(tmp_path, batch=6)
    model, ours_shown = framework.fit(tmp_path, framework.ours(rowprop.TopK(keep=1.0)), batch=6)
    check_equal(plain, model)
    for line, truth in zip(ours_shown, shown, strict=True):
        assert {name: line[name] for name in truth} == pytest.approx(truth, rel=1e-6)  # torch sums in another order
        assert line.get("valid_loss") == truth.get("valid_loss")


# Red when: the state holds no generator, or is not loaded; or a second fit forgets the step.
def test_a_resumed_training_goes_on_bit_for_bit(framework: Any, tmp_path: Path):
    def ours() -> Any:
        generator = torch.Generator().manual_seed(3)
        return framework.ours(rowprop.RandomRows(keep=0.5), engine="sliced", generator=generator)

    whole, resumed, file = ours(), ours(), tmp_path / "half.pt"
    straight, _ = framework.fit(tmp_path, whole)
    framework.fit(tmp_path, ours(), epochs=1, save=file)
    model, _ = framework.fit(tmp_path, resumed, resume=file)
    check_equal(straight, model)
    assert resumed.record.step == whole.record.step == EPOCHS * ROWS // BATCH - 1
    assert torch.equal(resumed.step.generator.get_state(), whole.step.generator.get_state())


# Three rows in four have no label. Red when: a framework trains a copy, or calls the network where no hook runs.
def test_one_line_before_the_training_skips_zeros(framework: Any, tmp_path: Path):
    x, y = data().tensors
    dataset = TensorDataset(x, torch.where(torch.arange(ROWS) % 4 == 0, y, -100))

    def trained(*, skips: bool) -> tuple[nn.Module, Any]:
        model = network()
        handle = rowprop.skip_zeros(model) if skips else None
        if framework.name == "lightning":
            module = module_of(framework.package)
            module.network = model
            fit(module, [], tmp_path, package=framework.package, dataset=dataset)
        elif framework.name == "fastai":
            learner(model=model, dataset=dataset, path=tmp_path).fit(EPOCHS)
        else:
            fitted(model_of(model), dataset=dataset)
        return model, handle

    model, handle = trained(skips=True)
    check_same(model, trained(skips=False)[0])
    assert (handle.record.kept, handle.record.total) == (BATCH // 4, BATCH)


# Against counts by hand. Red when: shares are of all kept rows, or classes and rows are of different batches.
def test_the_kept_share_of_each_class_is_logged_on_request(framework: Any, tmp_path: Path):
    _, shown = framework.fit(tmp_path, framework.ours(HALF, engine="sliced", classes_fn=lambda batch: batch[1]))
    shares: list[dict[str, float]] = []

    def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        losses, y = plain_loop.losses_of(model, batch), batch[1]
        kept = y[losses.topk(BATCH // 2).indices]
        shares.append({f"kept/{c}": int((kept == c).sum()) / int((y == c).sum()) for c in y.unique().tolist()})
        return losses.topk(BATCH // 2).values.mean()

    descend(network(), batches(), loss_of)
    check_shown(shown, framework.shown(shares))


# Red when: a line of the page no longer works, or prints something else.
@pytest.mark.parametrize("framework", [Lightning(), Fastai(), Composer()], ids=lambda each: each.name, indirect=True)
def test_the_page_runs(framework: Any, capsys: pytest.CaptureFixture[str]):
    assert plain_loop.last_line_of(f"{framework.name}.md", capsys) == "16 64"


# Red when: a line of the page no longer works, prints something else, or trains on other rows.
@pytest.mark.parametrize(("package", "model"), [("ignite", "model"), ("skorch", "module")])
def test_the_page_trains_as_a_plain_loop(package: str, model: str, capsys: pytest.CaptureFixture[str]):
    pytest.importorskip(package, reason="needs it: nox -s integrations")
    names = plain_loop.check_page_trains_as_by_hand(f"{package}.md", model, capsys)
    if package == "ignite":
        assert names["trainer"].state.metrics["loss_all"] > 1
    else:
        assert names["net"].module_ is names["module"]
        assert names["net"].history[-1, "train_loss"] > 1
