"""Lightning, fastai, Composer and accelerate with and without rowprop: what holds for all, against a plain loop.

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
from families import load, torchvision_models
from plain_loop import BATCH, EPOCHS, ROWS, batches, by_hand, check_equal, check_same, data, descend, hardest, losses_of
from rowprop.history import LossHistory, WithIds
from rowprop.selection import AboveMean
from trainers import FRAMEWORKS

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore"),  # those of the frameworks are their own
]
HALF = rowprop.TopK(keep=0.5)


def named(framework: Any) -> str:
    return getattr(framework, "package", framework.name)


def needs(package: str) -> None:
    if find_spec(package) is None:
        pytest.skip(f"needs {package}: nox -s integrations, nox -s fastai")
    if package in ("fastai", "composer"):
        torchvision_models()
    load(package)  # before processes fork


@pytest.fixture(params=FRAMEWORKS, ids=named)
def framework(request: pytest.FixtureRequest) -> Any:
    needs(named(request.param).split(".")[0])
    return request.param


def check_shown(found: list[dict[str, float]], truth: list[dict[str, float]], **tolerance: float) -> None:
    for line, numbers in zip(found, truth, strict=True):
        assert {name: line[name] for name in numbers} == pytest.approx(numbers, **tolerance)


def over_mean(losses: Tensor) -> Tensor:
    return (losses > losses.mean()).nonzero().flatten()


# Red when: the loss is the mean of all rows, or is divided by the accumulated batches once more; `loss_all` is that of
# the kept rows; fastai takes the kept rows for the batch's and its optimizer steps half as often; Composer's logs are
# those of the last microbatch.
@pytest.mark.parametrize(("selector", "select"), [(HALF, hardest(0.5)), (AboveMean(), over_mean)], ids=["half", "mean"])
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("engine", ["sliced", "recompute"])
def test_the_parameters_and_logs_are_those_of_a_plain_loop(
    engine: str, accumulate: int, selector: Any, select: Any, framework: Any, tmp_path: Path
):
    model, shown = framework.fit(tmp_path, framework.ours(selector, engine=engine), accumulate=accumulate)
    plain, logged = by_hand(select, every=accumulate)
    check_same(model, plain)
    if selector is HALF:  # numbers of batches that keep more and fewer rows have their own tests
        check_shown(shown, framework.shown(logged, accumulate), abs=1e-5)


def ran(page: str, capsys: pytest.CaptureFixture[str]) -> tuple[dict[str, Any], str]:
    """The names of a page's script after it has run, and the last line that it prints."""
    names: dict[str, Any] = {}
    exec(compile(plain_loop.script_of(page), page, "exec"), names)
    return names, capsys.readouterr().out.splitlines()[-1]


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


# Red when: the state holds no generator, or is not loaded; a second fit forgets the step; a checkpoint holds the first
# rank's state alone, so that both draw the same rows after a resume.
@pytest.mark.parametrize("processes", [1, 2])
def test_a_resumed_training_goes_on_bit_for_bit(processes: int, framework: Any, tmp_path: Path):
    if processes == 2 and not framework.saves_ranks:
        pytest.skip("its checkpoints hold no state of each process")

    def train(rank: int | None = None) -> nn.Module:
        def ours() -> Any:
            generator = torch.Generator().manual_seed(3 + (rank or 0))
            remembers = {"history": LossHistory(ROWS)} if framework.ids else {}
            return framework.ours(rowprop.RandomRows(keep=0.5), engine="sliced", generator=generator, **remembers)

        whole, resumed, file = ours(), ours(), tmp_path / "half.pt"
        given = {"rank": rank, "dataset": WithIds(data()) if framework.ids else data()}
        straight, _ = framework.fit(tmp_path, whole, **given)
        framework.fit(tmp_path, ours(), epochs=1, save=file, **given)
        model, _ = framework.fit(tmp_path, resumed, resume=file, **given)
        check_equal(straight, model)
        assert resumed.record.step == whole.record.step == EPOCHS * ROWS // BATCH // processes - 1
        assert torch.equal(resumed.step.generator.get_state(), whole.step.generator.get_state())
        if framework.ids:
            known = [each.step.history.losses_of(torch.arange(ROWS)) for each in (whole, resumed)]
            torch.testing.assert_close(*known, rtol=0, atol=0, equal_nan=True)
        return model

    train() if processes == 1 else plain_loop.on_two_ranks(train, tmp_path)


# Each has every second row. Red when: a rank's loss carries another factor than its share of the kept rows.
def test_two_processes_train_on_the_rows_of_both(framework: Any, tmp_path: Path):
    def train(rank: int) -> nn.Module:
        return framework.fit(tmp_path, framework.ours(AboveMean(), engine="sliced"), rank=rank)[0]

    found, plain = plain_loop.on_two_ranks(train, tmp_path), plain_loop.network()
    parts = [[(x[rank::2], y[rank::2]) for rank in (0, 1)] for x, y in batches(2 * BATCH)]
    descend(plain, parts, plain_loop.above_mean)
    check_same(found, plain)


# Three rows in four have no label. Red when: a framework trains a copy, or calls the network where no hook runs.
def test_one_line_before_the_training_skips_zeros(framework: Any, tmp_path: Path):
    x, y = data().tensors
    dataset, handles = TensorDataset(x, torch.where(torch.arange(ROWS) % 4 == 0, y, -100)), list[Any]()
    plain, _ = framework.fit(tmp_path, dataset=dataset)
    model, _ = framework.fit(tmp_path, dataset=dataset, before=lambda model: handles.append(rowprop.skip_zeros(model)))
    check_same(model, plain)
    (handle,) = handles
    assert (handle.record.kept, handle.record.total) == (BATCH // 4, BATCH)


# Against counts by hand. Red when: shares are of all kept rows, or classes and rows are of different batches.
@pytest.mark.parametrize("framework", FRAMEWORKS[:-1], ids=named, indirect=True)  # accelerate's loop is one's own
def test_the_kept_share_of_each_class_is_logged_on_request(framework: Any, tmp_path: Path):
    _, shown = framework.fit(tmp_path, framework.ours(HALF, engine="sliced", classes_fn=lambda batch: batch[1]))
    shares: list[dict[str, float]] = []

    def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        losses, y = losses_of(model, batch), batch[1]
        kept = y[losses.topk(BATCH // 2).indices]
        shares.append({f"kept/{c}": int((kept == c).sum()) / int((y == c).sum()) for c in y.unique().tolist()})
        return losses.topk(BATCH // 2).values.mean()

    descend(plain_loop.network(), batches(), loss_of)
    check_shown(shown, framework.shown(shares))


PAGES = {  # a page, the package that it is for, and what its script prints last
    "lightning": ("lightning", "16 64"),
    "fastai": ("fastai", "16 64"),
    "composer": ("composer", "16 64"),
    "accelerate": ("accelerate", "(16,) 64"),
    "trainer": ("transformers", "8 32"),
    "grpo": ("trl", "24 32"),
}


# Red when: a line of the page no longer works, or prints something else.
@pytest.mark.parametrize("page", PAGES)
@pytest.mark.usefixtures("quick_collections")
def test_the_page_runs(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    package, last = PAGES[page]
    needs(package)
    plain_loop.forget_processes()
    monkeypatch.chdir(tmp_path)
    assert ran(f"{page}.md", capsys)[1] == last


# Red when: a line of the page no longer works, prints something else, or trains on other rows.
@pytest.mark.parametrize(("package", "trained"), [("ignite", "model"), ("skorch", "module")])
def test_the_page_trains_as_a_plain_loop(package: str, trained: str, capsys: pytest.CaptureFixture[str]):
    needs(package)
    names, last = ran(f"{package}.md", capsys)
    assert last == "16 64"
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 4))
    parts = [*zip(torch.randn(512, 20).split(64), torch.randint(4, (512,)).split(64), strict=True)] * 2
    descend(plain, parts, lambda model, batch: losses_of(model, batch).topk(16).values.mean(), rate=0.01)
    check_same(names[trained], plain)
    if package == "ignite":
        assert names["trainer"].state.metrics["loss_all"] > 1
    else:
        assert names["net"].module_ is names["module"]
        assert names["net"].history[-1, "train_loss"] > 1
