"""fastai and tsai with and without the callback: the rows, parameters and logs of a plain loop.

The packages live in a venv of their own: `nox -s fastai`. Models are tiny.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import plain_loop
import rowprop
from families import load
from plain_loop import BATCH, EPOCHS, ROWS, above, batches, by_hand, check_same, data, hardest, losses_of, network
from rowprop.errors import InvalidInput
from rowprop.history import LossHistory
from rowprop.selection.selectors import mean_of
from trainers import Fastai, learner, means_of, table

pytestmark = plain_loop.only_with("fastai", "fastai")
ours = Fastai().ours


def batch_loss_filter(*given: Any, **settings: Any) -> Any:
    return load("rowprop.integrations.fastai").BatchLossFilter(*given, **settings)


def test_train_loss_is_that_of_all_rows_and_validation_is_untouched():
    # Red when: the learner's loss is that of the kept rows, a metric sees the predictions for the kept rows alone, or a
    # validation gets other columns.
    basics = load("fastai.basics")
    learn = learner(ours(rowprop.TopK(keep=0.25), engine="recompute"), metrics=basics.accuracy)
    learn.recorder.train_metrics = True
    learn.fit(EPOCHS)
    model, losses, right, smooth = network(), list[float](), list[float](), basics.AvgSmoothLoss()

    def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        found = losses_of(model, batch)
        smooth.accumulate(SimpleNamespace(loss=found.detach()))
        losses.append(float(smooth.value))
        right.append(float((model(batch[0]).argmax(1) == batch[1]).float().mean()))
        return found.topk(2).values.mean()

    plain_loop.descend(model, batches(), loss_of)
    assert [float(loss) for loss in learn.recorder.losses] == pytest.approx(losses, abs=1e-5)
    steps = ROWS // BATCH
    assert table(learn)[-1]["train_accuracy"] == pytest.approx(sum(right[-steps:]) / steps)
    x, y = data()[:]
    truth = [float(losses_of(model, (x, y)).mean()), float((model(x).argmax(1) == y).float().mean())]
    assert table(learn)[-1]["valid_loss"] == pytest.approx(truth[0], abs=1e-5)
    assert list(learn.validate()) == pytest.approx(truth, abs=1e-5)


def test_a_batch_that_keeps_nothing_leaves_the_loss_of_the_kept_rows_known():
    # Red when: the batch's NaN goes into the epoch's mean, or batches count alike however many rows they keep.
    select = above(1.4)
    learn = learner(ours(lambda losses, context: mean_of(select(losses), losses), engine="sliced"))
    learn.fit(EPOCHS)
    model, logged = by_hand(select)
    check_same(learn.model, model)
    assert [line["loss_kept"] for line in table(learn)] == pytest.approx(plain_loop.means_of_kept(logged), abs=1e-5)
    for line, truth in zip(table(learn), means_of(logged), strict=True):
        assert [line["loss_all"], line["kept"]] == pytest.approx([truth["loss_all"], truth["kept"]], abs=1e-5)


def test_where_the_losses_of_all_rows_are_unknown_the_learner_shows_those_of_the_kept_ones():
    # Red when: the learner's loss is NaN, on which fastai's callback ends the training; or a NaN that was computed is
    # covered up.
    terminate, smooth = load("fastai.callback.tracker").TerminateOnNaNCallback, load("fastai.basics").AvgSmoothLoss()
    select = above(1.4)
    line = {"engine": "recompute", "scorer": lambda model, batch: losses_of(model, batch)}
    selective = ours(lambda losses, context: mean_of(select(losses), losses), **line)
    learn = learner([selective, terminate()])
    learn.fit(EPOCHS)
    model, logged = by_hand(select)
    check_same(learn.model, model)
    shown = list[float]()
    for batch in logged:
        smooth.accumulate(SimpleNamespace(loss=torch.tensor(batch["loss_kept"] if batch["kept"] else 0.0)))
        shown.append(float(smooth.value))
    assert [float(loss) for loss in learn.recorder.losses] == pytest.approx(shown, abs=1e-5)

    x, y = data()[:]
    x[0] = torch.nan
    none = ours(lambda losses, context: mean_of(torch.arange(0), losses), engine="sliced", nonfinite="keep")
    learn = learner([none, terminate()], dataset=TensorDataset(x, y))
    learn.fit(1)
    assert learn.recorder.losses == []


def test_a_search_for_a_learning_rate_leaves_no_trace():
    # Before a fit, and after one. Red when: the losses of the search, which diverges, remain with the selector, or its
    # generator goes on.
    load("fastai.callback.schedule")
    trained = list[nn.Module]()
    for searches in (False, True):
        callback = ours(rowprop.selection.PercentileSampling(), generator=torch.Generator().manual_seed(3))
        learn = learner(callback)
        for _ in range(2):
            if searches:
                assert learn.lr_find(show_plot=False).valley > 0
            learn.fit(1)
        trained.append(learn.model)
    assert callback.record.step == EPOCHS * ROWS // BATCH - 1
    check_same(*trained)


def test_a_search_through_infinite_losses_restores_the_weights_on_request():
    # As the page tells it. Red when: nonfinite="keep" ends the search.
    load("fastai.callback.schedule")
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3))
    before = [parameter.detach().clone() for parameter in model.parameters()]
    learn = learner(ours(rowprop.TopK(0.5), engine="sliced", nonfinite="keep"), model=model)
    learn.lr_find(show_plot=False, stop_div=False, end_lr=1e30)
    assert not float(learn.recorder.losses[-1]) < torch.inf
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_fastais_own_logger_writes_the_numbers(tmp_path: Path):
    # Red when: the columns come after the loggers have written their header.
    learn = learner(ours(rowprop.TopK(keep=0.5), engine="sliced"), path=tmp_path)
    learn.fit(EPOCHS, cbs=load("fastai.callback.progress").CSVLogger("log.csv"))
    header, *lines = (line.split(",") for line in (tmp_path / "log.csv").read_text().splitlines())
    assert header[-4:-1] == ["loss_all", "loss_kept", "kept"]
    for line, truth in zip(lines, means_of(by_hand(hardest(0.5))[1]), strict=True):
        assert list(map(float, line[-4:-1])) == pytest.approx(list(truth.values()), abs=1e-5)


def test_a_filter_that_keeps_all_is_the_untouched_learner(tmp_path: Path):
    # Bit for bit, with batches of 6 rows: red when the loss is a sum of losses times 1/6, is scaled, or when random
    # numbers are drawn.
    plain, lines = Fastai().fit(tmp_path, batch=6)
    model, our_lines = Fastai().fit(tmp_path, batch_loss_filter(), batch=6)
    plain_loop.check_equal(plain, model)
    for line, truth in zip(our_lines, lines, strict=True):
        assert line["valid_loss"] == truth["valid_loss"]
        assert line["train_loss"] == pytest.approx(truth["train_loss"], rel=1e-6)  # torch sums it in another order


def test_fastais_kinds_of_tensors_are_sliced():
    # Images of fastai's class through a convolution, and a loss that flattens the pixels of a row. Red when: the losses
    # keep fastai's class, or come in one dimension.
    image = load("fastai.vision.core").TensorImage
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(4, 2, 5, 5, generator=generator), torch.randint(3, (4, 5, 5), generator=generator)
    convolution, pairs = nn.Conv2d(2, 3, 3, padding=1), [(image(a), b) for a, b in zip(x, y, strict=True)]
    loss_func = load("fastai.losses").CrossEntropyLossFlat(axis=1)
    given = {"model": nn.Sequential(convolution), "batch": 4, "loss_func": loss_func, "dataset": pairs}
    learn = learner(ours(rowprop.TopK(keep=0.5), engine="sliced"), **given)
    losses = nn.functional.cross_entropy(convolution(x), y, reduction="none").flatten(1).mean(1)
    expected = torch.autograd.grad(losses.topk(2).values.mean(), convolution.weight)[0]
    before = convolution.weight.detach().clone()
    with rowprop.watch() as report:
        learn.fit(1)
    torch.testing.assert_close(before - plain_loop.RATE * expected, convolution.weight.detach(), rtol=0, atol=1e-6)
    assert not report.densified
    assert type(learn.selective_backprop.record.loss_all) is Tensor


def test_batch_loss_filter_keeps_the_rows_that_hold_the_share():
    # tsai's arguments, by its names. Red when: the row that crosses the share is dropped, as tsai does, or the schedule
    # sees another progress than the part of the fit that is done.
    seen = list[float]()

    def schedule(progress: float) -> float:
        seen.append(progress)
        return 1.0 - progress / 2

    learn = learner(batch_loss_filter(loss_perc=0.8, schedule_func=schedule, engine="sliced"))
    learn.fit(EPOCHS)
    steps = EPOCHS * ROWS // BATCH
    assert seen == pytest.approx([step / steps for step in range(steps)])
    calls: Iterator[int] = iter(range(steps))

    def select(losses: Tensor) -> Tensor:
        order = losses.argsort(descending=True)
        held, share = losses[order].double().cumsum(0), 0.8 * (1.0 - next(calls) / steps / 2)
        return order[: int((held < share * held[-1]).sum()) + 1]

    check_same(learn.model, by_hand(select)[0])


def test_a_learner_of_tsai_trains_on_time_series():
    # Red when: BatchNorm's counters move more than once per step, as they do under tsai's own filter.
    if find_spec("tsai") is None:
        pytest.skip("needs tsai")
    tsai = load("tsai.basics")
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(24, 2, 16, generator=generator).numpy(), torch.arange(24).remainder(3).numpy()
    splits, network = ([*range(16)], [*range(16, 24)]), {"layers": [4, 4, 4], "kss": [3, 3, 3]}
    dls = tsai.get_ts_dls(x, y, splits=splits, bs=8, tfms=[None, tsai.TSClassification()])
    cbs = batch_loss_filter(0.5, engine="sliced")
    learn = tsai.ts_learner(dls, load("tsai.models.FCN").FCN, **network, cbs=cbs)
    with learn.no_bar(), learn.no_logging():
        learn.fit(2, lr=1e-3)
    counters = [buffer for name, buffer in learn.model.named_buffers() if name.endswith("num_batches_tracked")]
    assert [int(counter) for counter in counters] == [4] * len(counters)
    assert 0 < learn.batch_loss_filter.record.num_kept < 8


def test_an_interrupted_fit_leaves_a_learner_that_works():
    # Red when: the stand-in for the batch goes on without its callback.
    class Interrupts(load("fastai.learner").Callback):
        def after_step(self) -> None:
            raise KeyboardInterrupt

    learn = learner()
    with pytest.raises(KeyboardInterrupt):
        learn.fit(1, cbs=[ours(rowprop.TopK(keep=0.5), engine="sliced"), Interrupts()])
    learn.model.load_state_dict(network().state_dict())
    learn.opt.zero_grad()
    learn.fit(EPOCHS)
    assert "loss_kept" not in learn.recorder.metric_names
    check_same(learn.model, by_hand(hardest(1.0))[0])


def test_a_learner_is_pickled_with_its_callback():
    # As `learn.export` does it. Red when: `record` is missing after, or the step is pickled as well.
    learn = learner(ours(rowprop.TopK(keep=0.5), engine="sliced"))
    learn.fit(1)
    learn.logger = None
    assert "step" not in learn.selective_backprop.__getstate__()
    callback = pickle.loads(load("cloudpickle").dumps(learn)).selective_backprop
    check_same(callback.learn.model, learn.model)
    assert callback.record is callback.step is None


def test_what_the_callback_refuses():
    half, summed = rowprop.TopK(keep=0.5), nn.CrossEntropyLoss(reduction="sum")
    for said, refused in (
        ("GradientAccumulation", lambda: ours(half, accumulate_to=8)),
        ("carry no ids", lambda: ours(half, history=LossHistory(ROWS))),
        ("BatchLossFilter got loss_perc=0", lambda: batch_loss_filter(0)),
        ("schedule_func=3", lambda: batch_loss_filter(0.5, 3)),
        ("two callbacks SelectiveBackpropCallback", lambda: learner([ours(half), batch_loss_filter(0.5)]).fit(1)),
        ("takes no reduction, but the loss", lambda: learner(ours(half), loss_func=lambda pred, y: pred.sum()).fit(1)),
        ("reduction='sum'", lambda: learner(ours(half), loss_func=summed).fit(1)),
    ):
        with pytest.raises(InvalidInput, match=said):
            refused()
