"""Composer with and without the algorithm: the rows, parameters and logs of a plain loop.

The package lives in a venv of its own: `nox -s fastai`. Models are tiny.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import plain_loop
import rowprop
from families import load
from plain_loop import BATCH, EPOCHS, ROWS, batches, by_hand, check_same, data, descend, hardest, losses_of, network
from rowprop.distributed import Local
from rowprop.errors import InvalidInput
from rowprop.history import LossHistory
from trainers import always, fitted, model_of, trainer_of

MODULE = "rowprop.integrations.composer"

pytestmark = plain_loop.only_with("composer", "fastai")


def test_rows_are_drawn_by_rank_when_composer_would_draw_them():
    # Red when: the batch's number is not that in the epoch, progress is another, or a batch in between is not whole.
    settings = {"interrupt": 4, "engine": "sliced", "generator": torch.Generator().manual_seed(2)}
    algorithm = load(MODULE).SelectiveBackpropAlgorithm(0.25, 0.75, 0.5, **settings)
    model, per_epoch = model_of(), ROWS // BATCH
    trainer = fitted(model, algorithm, max_duration=f"{EPOCHS * per_epoch}ba")
    original, numbers = load("composer.algorithms.selective_backprop"), range(EPOCHS * per_epoch)
    when = [(number / (EPOCHS * per_epoch), number % per_epoch) for number in numbers]
    chosen = [original.should_selective_backprop(*each, 0.25, 0.75, 4) for each in when]
    assert [value < 1 for _, value in trainer.seen["kept"]] == chosen
    assert sum(chosen) == 5
    selector, generator, when = rowprop.selection.RankSampling(0.5), torch.Generator().manual_seed(2), iter(chosen)

    def select(losses: Tensor) -> Tensor:
        context = rowprop.selection.Context(generator=generator)
        return selector(losses, context).rows if next(when) else torch.arange(BATCH)

    check_same(model.network, by_hand(select)[0])


def test_a_smaller_image_is_scored_and_the_kept_rows_go_forward_whole():
    # Red when: the model is trained on the smaller images, or the scores are of the whole ones.
    generator = torch.Generator().manual_seed(0)
    x, y = 3 * torch.randn(ROWS, 1, 4, 4, generator=generator), torch.randint(3, (ROWS,), generator=generator)

    def pooled() -> nn.Sequential:
        torch.manual_seed(1)
        pool = nn.AdaptiveAvgPool2d(1)
        return nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.Tanh(), pool, nn.Flatten(), nn.Linear(4, 3))

    settings = {"scale_factor": 0.5, "interrupt": 0, "selector": rowprop.TopK(keep=0.5)}
    algorithm = load(MODULE).SelectiveBackpropAlgorithm(0, 1, **settings)
    model, plain = model_of(pooled()), pooled()
    fitted(model, algorithm, dataset=torch.utils.data.TensorDataset(x, y), max_duration="1ep")
    others = set[int]()

    def loss_of(plain: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        images, classes = batch
        small = nn.functional.interpolate(images, scale_factor=0.5, mode="bilinear", align_corners=False)
        rows = losses_of(plain, (small, classes)).topk(BATCH // 2).indices
        others.update(set(rows.tolist()) ^ set(losses_of(plain, batch).topk(BATCH // 2).indices.tolist()))
        return losses_of(plain, (images[rows], classes[rows])).mean()

    descend(plain, zip(x.split(BATCH), y.split(BATCH), strict=True), loss_of)
    check_same(model.network, plain)
    assert algorithm.record.engine == "recompute"
    assert others  # the scores matter


def test_metrics_see_all_rows():
    # Red when: the trainer's outputs are those of the kept rows.
    from torchmetrics.classification import MulticlassAccuracy

    classifier = load("composer.models").ComposerClassifier
    model = classifier(network(), train_metrics=MulticlassAccuracy(num_classes=3, average="micro"), num_classes=3)
    trainer = fitted(model, always(selector=rowprop.TopK(keep=0.25), engine="recompute"))
    right = list[float]()

    def loss_of(plain: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        right.append(float((plain(batch[0]).argmax(1) == batch[1]).float().mean()))
        return losses_of(plain, batch).topk(2).values.mean()

    descend(network(), batches(), loss_of)
    found = [float(value) for _, value in trainer.seen["metrics/train/MulticlassAccuracy"]]
    assert found[: ROWS // BATCH] == pytest.approx(right[: ROWS // BATCH])


def test_batches_may_be_dicts():
    # Composer's own algorithm takes pairs of tensors alone. Red when: the batch is indexed by numbers, or a loss that
    # the instance has is gone after.
    def losses_fn(model: Any, batch: Any) -> Tensor:
        return losses_of(model.network, (batch["x"], batch["y"]))

    model, rows = model_of(), [{"x": x, "y": y} for x, y in data()]
    model.loss = own = lambda *_: pytest.fail("the losses function stands for it")
    fitted(model, always(selector=rowprop.TopK(keep=0.5), engine="sliced", losses_fn=losses_fn), dataset=rows)
    check_same(model.network, by_hand(hardest(0.5))[0])
    assert model.loss is own


def test_two_processes_of_unequal_batches_count_all_rows_alike(tmp_path: Path):
    # Against the mean over all 6 rows. Red when: Composer's weights by rows come on top of the step's own.
    def train(rank: int) -> nn.Module:
        model, rows = model_of(), range(4) if rank == 0 else range(4, 6)
        mine = torch.utils.data.Subset(data(), [start + row for start in range(0, ROWS, 6) for row in rows])
        sampler = torch.utils.data.DistributedSampler(mine, 1, 0, shuffle=False)
        fitted(model, always(1.0), dataset=mine, batch=len(rows), sampler=sampler)
        return model.network

    plain = network()
    descend(plain, batches(6), lambda plain, batch: losses_of(plain, batch).mean())
    check_same(plain_loop.on_two_ranks(train, tmp_path), plain)


def test_callbacks_see_the_model_and_its_forward():
    # Against the untouched trainer: the first batch's activations. Red when: what stands for the model has no modules,
    # or the forward runs before callbacks have put their hooks on these, or runs the hooks twice.
    monitor = load("composer.callbacks").ActivationMonitor
    seen, calls = [], list[int]()
    for algorithms in ([], [always(selector=rowprop.TopK(keep=0.5), engine="sliced")]):
        model = model_of()
        calls.append(0)
        model.register_forward_hook(lambda *_: calls.append(calls.pop() + 1))
        callback = monitor(interval="1ep", only_log_wandb=False)
        trainer = fitted(model, *algorithms, callbacks=[callback], max_duration="1ep")
        seen.append({name: [value for _, value in values] for name, values in trainer.seen.items() if "activ" in name})
    assert seen[0] == seen[1]
    assert any("network.2" in name for name in seen[1])
    assert calls == [ROWS // BATCH] * 2


@pytest.mark.parametrize("then", ["fit", "eval", "predict"])
@pytest.mark.parametrize("event", ["before_forward", "after_forward"])
def test_a_fit_after_an_exception_is_the_plain_loop(event: str, then: str):
    # Red when: the model or its loss stays replaced where the exception came before the trainer had called it.
    model, algorithm, calls = model_of(), always(selector=rowprop.TopK(keep=0.5), engine="sliced"), list[int]()

    def fail(*_: Any) -> None:
        calls.append(1)
        if len(calls) == 1:
            raise OSError

    callback = load("composer.core").Callback()
    setattr(callback, event, fail)
    trainer = trainer_of(model, [algorithm], callbacks=[callback])
    with pytest.raises(OSError):
        trainer.fit()
    replaced = set(vars(model)) & {"loss", "_compiled_call_impl"}
    assert len(replaced) == 1
    if then != "fit":
        getattr(trainer, then)(DataLoader(data(), BATCH))
        assert not replaced & set(vars(model))
    trainer.fit()
    trainer.close()
    check_same(model.network, by_hand(hardest(0.5))[0])
    assert not set(vars(model)) & {"loss", "_compiled_call_impl"}


def test_a_microbatch_that_keeps_nothing_has_no_part_in_the_loss_of_the_kept():
    # Against the four largest losses of the first batch, which are all in its first half. Red when: the mean goes by
    # the numbers of rows, and is NaN.
    losses = losses_of(network(), data()[: 2 * BATCH]).detach()
    order = losses.argsort(descending=True)
    bound = float(losses[order[3]])  # the fourth largest
    algorithm = always(selector=rowprop.selection.Threshold(bound), engine="sliced")
    trainer = fitted(
        model_of(), algorithm, batch=2 * BATCH, device_train_microbatch_size=BATCH, max_duration="1ba",
        dataset=torch.utils.data.Subset(data(), order.tolist()),
    )  # fmt: skip
    assert trainer.seen["loss_kept"][0][1] == pytest.approx(float(losses[order[:4]].mean()))
    assert trainer.seen["loss_all"][0][1] == pytest.approx(float(losses.mean()))


def test_what_the_algorithm_refuses():
    ours, half = load(MODULE).SelectiveBackpropAlgorithm, rowprop.TopK(keep=0.5)
    algorithms, classifier = load("composer.algorithms"), load("composer.models").ComposerClassifier
    summed = load("composer.loss").binary_cross_entropy_with_logits
    unreduced = classifier(network(), 3, loss_fn=lambda outputs, y: outputs.sum())
    for said, refused in (
        (r"device_train_microbatch_size", lambda: ours(accumulate_to=8)),
        (r"carry no ids", lambda: ours(history=LossHistory(ROWS))),
        (r"are the schedule", lambda: ours(schedule=rowprop.schedule.Schedule())),
        (r"keep=0.3 and a selector", lambda: ours(keep=0.3, selector=half)),
        ("end=0.5", lambda: ours(start=0.9, end=0.5)),
        ("keep=1.5", lambda: ours(keep=1.5)),
        ("scale=2.0", lambda: ours(scale_factor=2.0)),
        ("interrupt=1", lambda: ours(interrupt=1)),
        (r"Classifier's loss_fn .* takes no reduction", lambda: trainer_of(unreduced, [ours()])),
        (r"reduction='sum' but 'mean' was", lambda: trainer_of(classifier(network(), 3, loss_fn=summed), [ours()])),
        (r"two algorithms SelectiveBackprop", lambda: fitted(model_of(), ours(), algorithms.SelectiveBackprop())),
    ):
        with pytest.raises(InvalidInput, match=said):
            refused()
    for other in (algorithms.LabelSmoothing(), algorithms.MixUp(interpolate_loss=True)):
        with pytest.raises(InvalidInput, match=rf"{type(other).__name__} changes targets or losses"):
            fitted(model_of(), ours(), other)
    trainer = trainer_of(model_of(), [ours(ranks=Local())])
    trainer.state.auto_microbatching = True  # Composer has it for GPUs alone
    with pytest.raises(InvalidInput, match=r"device_train_microbatch_size='auto'.*give a number"):
        trainer.fit()
    trainer.close()
