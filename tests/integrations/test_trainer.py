"""transformers' Trainer with and without `select`: the rows, tokens, parameters and logs of a plain loop.

The package lives in a venv of its own: `nox -s integrations`. Models are tiny and made from a config.
"""

from __future__ import annotations

import math
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import rowprop
from plain_loop import apart, check_equal, descend, in_processes, only_with
from rowprop.errors import InvalidInput, UnsupportedOperation
from rowprop.history import LossHistory
from transformers_trainer import (
    BATCH,
    EPOCHS,
    KINDS,
    LENGTH,
    ROWS,
    WORDS,
    answers,
    batches,
    by_hand,
    check,
    classes,
    classifier,
    decoder,
    make_trainer,
    row_losses,
    select,
    texts,
    token_losses,
    trained,
    updates,
)

pytestmark = [*only_with("transformers", "integrations"), pytest.mark.usefixtures("quick_collections")]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("accumulated", [1, 2, 4])
@pytest.mark.parametrize("clip", [0.0, 0.3])
def test_the_parameters_and_logs_are_those_of_a_plain_loop(kind: str, accumulated: int, clip: float, tmp_path: Path):
    # 6 batches in an epoch: with 4 accumulated, the last update has 2. Red when: the Trainer divides by the accumulated
    # batches as well; batches count alike, whatever they keep; gradients are clipped before they are the mean's; the
    # logged loss is that of the kept rows.
    make, labels, losses_fn = KINDS[kind]
    data, model = texts(labels), make()
    logged = by_hand(model, data, losses_fn, at_once=accumulated, clip=clip)
    settings = {"gradient_accumulation_steps": accumulated, "max_grad_norm": clip}
    with rowprop.watch() as report:
        trainer, handle = trained(make(), data, tmp_path, **settings)
    check(trainer, model, logged)
    assert report.sliced
    # Below an attention that mixes a row's tokens, all of them have a gradient.
    assert set(report.densified) <= ({"MmBackward0", "add.Tensor"} if kind == "tokens" else set())
    assert handle.record.unit == kind[:-1]
    assert handle.step.state_dict()["step"] == EPOCHS * ROWS // BATCH


def test_one_line_before_the_training_skips_zeros(tmp_path: Path):
    # Red when: the Trainer trains a copy, or the gradients of tokens without a label are not found to be zero.
    data = texts(answers)
    plain, ours = (make_trainer(decoder(), data, tmp_path) for _ in range(2))
    handle = rowprop.skip_zeros(ours.model)
    for trainer in (plain, ours):
        trainer.train()
    check(ours, plain.model)
    live = int((batches(data)[-1]["labels"][:, 1:] != -100).sum())
    assert (handle.record.live, handle.record.total) == (live, BATCH * LENGTH)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("accumulated", [1, 2, 4])
def test_two_processes_train_on_what_both_keep(kind: str, accumulated: int, tmp_path: Path):
    # 3 batches for each process: with 2 accumulated, the last update has 1, with 4 it has 3. Red when: processes count
    # alike, whatever they keep; the gradients are averaged over the processes and not summed.
    make, labels, losses_fn = KINDS[kind]
    data, model = texts(labels), make()
    logged = by_hand(model, data, losses_fn, at_once=2 * accumulated)

    def train() -> None:
        trainer, _ = trained(make(), data, tmp_path, gradient_accumulation_steps=accumulated, ddp_backend="gloo")
        assert trainer.accelerator.num_processes == 2
        check(trainer, model, logged)

    in_processes(train)


@pytest.mark.parametrize("accumulated", [1, 2])
def test_ranks_that_select_together_keep_the_rows_of_one_batch(accumulated: int, tmp_path: Path):
    # TopK among the tokens of both, of which each has more or fewer. Red when: a rank's batch counts by its own tokens,
    # although the step has put the factor of the ranks into the weights.
    data, model, half = texts(answers), decoder(), rowprop.TopK(keep=0.5)

    def loss_of(model: nn.Module, parts: list[dict[str, Tensor]]) -> Tensor:
        pairs = zip(parts[::2], parts[1::2], strict=True)
        every = [torch.cat([token_losses(model, batch) for batch in pair]) for pair in pairs]
        return torch.stack([losses[half(losses.detach()).rows].mean() for losses in every]).mean()

    descend(model.train(), updates(data, 2 * accumulated), loss_of)

    def train() -> None:
        settings = {"selecting": {"ranks": rowprop.distributed.Global()}, "gradient_accumulation_steps": accumulated}
        check(trained(decoder(), data, tmp_path, half, **settings)[0], model)

    in_processes(train)


def test_weights_that_are_not_even_refer_to_all_rows_of_the_update(tmp_path: Path):
    # A selector that keeps the first half of a batch with weights 2/N, so that the loss estimates the mean over all N
    # tokens. Red when: batches count by their kept tokens, or alike.
    def loss_of(model: nn.Module, parts: list[dict[str, Tensor]]) -> Tensor:
        every = [token_losses(model, batch) for batch in parts]
        return torch.cat([2 * losses[::2] for losses in every]).sum() / len(torch.cat(every))

    data, model = texts(answers), decoder()
    descend(model.train(), updates(data, 2), loss_of)

    def halves(scores: Tensor, context: Any) -> rowprop.Selection:
        rows = torch.arange(0, len(scores), 2)
        return rowprop.Selection(rows, torch.full((len(rows),), 2 / len(scores)), len(scores))

    check(trained(decoder(), data, tmp_path, halves, gradient_accumulation_steps=2)[0], model)


def without_keywords() -> Any:
    model = classifier()
    model.accepts_loss_kwargs = False
    return model


def means_of_tokens(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    logits, labels = model(input_ids=batch["input_ids"]).logits[:, :-1], batch["labels"][:, 1:]
    return torch.stack([F.cross_entropy(*row, ignore_index=-100) for row in zip(logits, labels, strict=True)])


def padded_losses(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    logits, labels = model(input_ids=inputs["input_ids"]).logits, F.pad(inputs["labels"][:, 1:], (0, 1), value=-100)
    return F.cross_entropy(logits.mT, labels, reduction="none")


LINES = {  # the model, its labels, the losses of the plain loop, the line's settings, batches of an update
    # For models that take no keywords, which the others here do. Red when: loss_is_scaled_for_ga stays as it is.
    "the Trainer's division by its batches": (without_keywords, classes, row_losses, {}, 2),
    # Red when: `recompute` is handed labels that were taken out of the batch.
    "a second forward": (classifier, classes, row_losses, {"engine": "recompute"}, 1),
    # Red when: a row's loss is the sum of its tokens', or tokens without a label count.
    "rows of a language model": (decoder, answers, means_of_tokens, {"unit": "row"}, 1),
    # Red when: tokens whose label is -100 count, or the mask is not shifted.
    "losses of one's own": (decoder, answers, token_losses, {"losses_fn": padded_losses, "unit": "token"}, 2),
}


@pytest.mark.parametrize("line", LINES)
def test_the_line_trains_as_a_plain_loop(line: str, tmp_path: Path):
    make, labels, losses_fn, selecting, accumulated = LINES[line]
    data, model = texts(labels), make()
    logged = by_hand(model, data, losses_fn, at_once=accumulated)
    trainer, _ = trained(make(), data, tmp_path, selecting=selecting, gradient_accumulation_steps=accumulated)
    check(trainer, model, logged)


@pytest.mark.parametrize("accumulated", [1, 2])
def test_mixed_precision_is_the_trainers(accumulated: int, tmp_path: Path):
    # The engine of plain indexing: bfloat16 sums in another order are others. Red when: the losses are computed in
    # bfloat16, or the forward in float32.
    def losses_fn(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(input_ids=batch["input_ids"]).logits
        return F.cross_entropy(logits.float(), batch["labels"], reduction="none")

    data, model, plain = texts(classes), classifier(), classifier()
    logged = by_hand(model, data, losses_fn, at_once=accumulated)
    by_hand(plain, data, row_losses, at_once=accumulated)
    settings: dict[str, Any] = {"bf16": True, "gradient_accumulation_steps": accumulated}
    trainer, _ = trained(classifier(), data, tmp_path, selecting={"engine": "masked"}, **settings)
    difference = apart(model, plain)
    assert difference > 1e-4
    assert apart(trainer.model, model) <= (difference / 10 if accumulated > 1 else 1e-6)
    assert trainer.state.log_history[0]["loss_all"] == pytest.approx(logged[0]["loss_all"], abs=1e-5)


def test_a_gradient_scaler_stays_the_trainers(tmp_path: Path):
    # The Trainer makes a scaler for float16 on accelerators alone, so a scaler is put into accelerate. Red when: the
    # gradients are made those of the mean only after the scaler has stepped.
    data, model = texts(classes), classifier()
    logged = by_hand(model, data, row_losses, at_once=2)
    trainer = make_trainer(classifier(), data, tmp_path, gradient_accumulation_steps=2)
    trainer.accelerator.scaler = scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
    select(trainer)
    trainer.train()
    assert scaler.get_scale() == 4096.0  # 6 updates
    check(trainer, model, logged)


def untouched_and_all(make: Any, data: Any, folder: Path, *, selecting: Any = None, **more: Any) -> list[Any]:
    """A trainer as it is, and one that keeps all rows, both trained."""
    plain, ours = (make_trainer(make(), data, folder, **more) for _ in range(2))
    select(ours, rowprop.TopK(keep=1.0), **selecting or {})
    for trainer in (plain, ours):
        trainer.train()
    return [plain, ours]


@pytest.mark.parametrize("kind", KINDS)
def test_all_rows_are_the_untouched_trainer(kind: str, tmp_path: Path):
    # Bit for bit, evaluation included. Tokens by plain indexing: other engines leave out the tokens without a label, so
    # that sums are in another order. Red when: the loss is a sum of losses times 1/N, is scaled, or when random numbers
    # are drawn.
    make, labels, _ = KINDS[kind]
    more: dict[str, Any] = {"eval_strategy": "epoch", "selecting": {"engine": "masked"} if kind == "tokens" else {}}
    plain, selective = untouched_and_all(make, texts(labels), tmp_path, **SHUFFLED, **more)
    check_equal(plain.model, selective.model)
    for name in ("loss", "eval_loss"):
        found, expected = ([e[name] for e in each.state.log_history if name in e] for each in (selective, plain))
        assert found == pytest.approx(expected, rel=1e-6)
        assert name == "loss" or found == expected


SHUFFLED = {"train_sampling_strategy": "random"}


def regression(generator: torch.Generator, ids: Tensor) -> float:
    return float(ids.float().mean() / WORDS)


def several(generator: torch.Generator, ids: Tensor) -> list[float]:
    return [float(ids[0] % 2), float(ids[1] % 2), float(ids[2] % 2)]


def headed(head: str) -> Any:
    import transformers

    torch.manual_seed(1)
    return getattr(transformers, head)(classifier(WORDS).config)


DEFAULT = {  # a model with a loss of its own, its labels, and settings of the Trainer
    "regression": (lambda: classifier(1), regression, {}),
    "several-labels": (lambda: classifier(3), several, {}),
    "several-targets": (lambda: classifier(3, problem_type="regression"), several, {}),
    "smoothed": (classifier, classes, {"label_smoothing_factor": 0.2}),
    "smoothed-tokens": (decoder, answers, {"label_smoothing_factor": 0.2}),
    "accumulated-tokens": (decoder, answers, {"gradient_accumulation_steps": 4}),
    "masked-tokens": (lambda: headed("BertForMaskedLM"), answers, {}),
    "classes-of-tokens": (lambda: headed("BertForTokenClassification"), answers, {}),
}


@pytest.mark.parametrize("case", DEFAULT)
def test_every_default_loss_is_the_trainers(case: str, tmp_path: Path):
    # Red when: labels are read by another problem type, label smoothing is left out, the labels are not shifted, or
    # those of tokens that are told in place are.
    make, labels, settings = DEFAULT[case]
    plain, selective = untouched_and_all(make, texts(labels), tmp_path, rate=0.1, **settings)
    check(selective, plain.model)


def test_packed_batches_choose_among_tokens(tmp_path: Path):
    # Two rows in one, told by positions that begin anew. Red when: a packed batch of one row passes for a row.
    from transformers import DataCollatorWithFlattening

    data = texts(lambda _, ids: ids.tolist())
    packed: dict[str, Any] = {"more": {"data_collator": DataCollatorWithFlattening()}, "rate": 0.1}
    plain, selective = untouched_and_all(decoder, data, tmp_path, **packed)
    check(selective, plain.model)
    trainer = make_trainer(decoder(), data, tmp_path, **packed)
    select(trainer, rowprop.TopK(keep=0.5), unit="row")
    with pytest.raises(InvalidInput, match=r"several packed sequences.*unit='token'"):
        trainer.train()


@pytest.mark.skipif(find_spec("trl") is None, reason="needs trl: nox -s integrations")
@pytest.mark.parametrize("padding_free", [False, True])
def test_a_trainer_of_trl_is_a_subclass_like_others(padding_free: bool, tmp_path: Path):
    # Prompts without labels, padded or packed. Red when: labels are not shifted; losses of another kind than the
    # trainer's are selected among.
    import sft_trl

    rows = [(row["input_ids"], [int(label != -100) for label in row["labels"]]) for row in texts(answers, rows=8)]
    data = [{"input_ids": ids, "completion_mask": mask} for ids, mask in rows]
    settings: dict[str, Any] = {"optim": "sgd", "learning_rate": 0.05, "num_train_epochs": 1, "max_grad_norm": 0.0}
    settings |= {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_length": None}
    settings |= {"padding_free": padding_free}
    trainers = [sft_trl.trainer_of(decoder(), data, WORDS, tmp_path, **settings) for _ in range(2)]
    handle = select(trainers[1], rowprop.TopK(keep=1.0))
    for trainer in trainers:
        trainer.train()
    check(trainers[1], trainers[0].model)
    assert ("position_ids" in next(iter(trainers[1].get_train_dataloader()))) == padding_free
    assert handle.record.unit == "token"
    other = sft_trl.trainer_of(decoder(), data, WORDS, tmp_path, **settings, loss_type="dft")
    with pytest.raises(InvalidInput, match=r"SFTTrainer has a compute_loss of its own.*losses_fn"):
        select(other, rowprop.TopK(keep=0.5))


def test_logs_are_means_since_the_last_log(tmp_path: Path):
    # Red when: a log tells of the last step alone, or sums go on after a log.
    data = texts(classes)
    logged = by_hand(classifier(), data, row_losses, choose=lambda losses: losses.topk(2).indices)
    trainer, _ = trained(classifier(), data, tmp_path, rowprop.TopK(keep=0.5), logging_steps=3)
    steps = [entry for entry in trainer.state.log_history if "loss" in entry]
    for number, found in enumerate(steps):
        for name in logged[0]:
            mean = sum(entry[name] for entry in logged[3 * number : 3 * number + 3]) / 3
            assert found[name] == pytest.approx(mean, abs=1e-5)
    assert trainer.state.log_history[-1]["train_loss"] == pytest.approx(sum(e["loss"] for e in steps) / len(steps))


@pytest.mark.parametrize("kind", KINDS)
def test_the_kept_share_of_each_class_is_logged_on_request(kind: str, tmp_path: Path):
    # Against counts by hand; a token is of the class of its row. Red when: shares are of all kept rows, places among
    # the flattened tokens are taken for rows, or tokens without a label are counted.
    make, labels, losses_fn = KINDS[kind]
    data, model = texts(labels), make()
    classes_fn = lambda inputs: inputs["input_ids"][:, 0] % 2  # noqa: E731
    trainer, _ = trained(make(), data, tmp_path, rowprop.TopK(keep=0.5), selecting={"classes_fn": classes_fn})
    batch = batches(data)[0]
    losses, numbers = losses_fn(model.train(), batch), classes_fn(batch)
    if kind == "tokens":
        numbers = numbers[:, None].expand(-1, LENGTH - 1)[batch["labels"][:, 1:] != -100]
    kept = numbers[losses.topk(math.ceil(len(losses) / 2)).indices]
    for number in numbers.unique().tolist():
        expected = int((kept == number).sum()) / int((numbers == number).sum())
        assert trainer.state.log_history[0][f"kept/{number}"] == pytest.approx(expected)


def resumable(folder: Path, processes: int, **settings: Any) -> tuple[Any, Any]:
    """A trainer that draws rows and remembers them, and its handle."""
    generator = torch.Generator().manual_seed(3)
    trainer = make_trainer(
        classifier(), texts(classes), folder, remove_unused_columns=False, save_strategy="steps", save_steps=2,
        gradient_accumulation_steps=2, save_total_limit=4, per_device_train_batch_size=BATCH // processes, **SHUFFLED,
        **settings,
    )  # fmt: skip
    return trainer, select(trainer, rowprop.RandomRows(keep=0.5), generator=generator, history=LossHistory(ROWS))


@pytest.mark.parametrize("processes", [1, 2])
def test_a_resumed_training_goes_on_bit_for_bit(processes: int, tmp_path: Path):
    # Three updates in an epoch: the checkpoint after the second and the fourth lie in the middle of one. Red when: no
    # state is saved, so that the generator begins again; or one process's file is written over the other's.
    def run() -> None:
        straight, whole = resumable(tmp_path, processes)
        straight.train()
        for number in (2, 4):
            resumed, half = resumable(tmp_path / "again", processes)
            resumed.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{number}"))
            check_equal(straight.model, resumed.model)
            known = [each.step.history.losses_of(torch.arange(ROWS)) for each in (whole, half)]
            torch.testing.assert_close(*known, rtol=0, atol=0, equal_nan=True)
            assert half.step.state_dict()["step"] == whole.step.state_dict()["step"]

    run() if processes == 1 else in_processes(run)
    assert (tmp_path / "checkpoint-2" / f"rowprop_{processes - 1}.pt").exists()


def test_more_processes_go_on_than_have_saved(tmp_path: Path):
    # Red when: a process without a file of its own begins anew, and is alone in an all-reduce.
    straight, _ = resumable(tmp_path, 1)
    straight.train()

    def goes_on() -> None:
        trainer, handle = resumable(tmp_path / "again", 2)
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
        steps = trainer.accelerator.gather(torch.tensor([handle.step.state_dict()["step"]]))
        assert steps[0] == steps[1] > 2 * 2
        assert trainer.state.global_step == 6

    in_processes(goes_on)


def test_progress_is_the_trainers(tmp_path: Path):
    # Rows are chosen in the second half. Red when: progress counts micro-batches, or is unknown.
    late = {"schedule": rowprop.schedule.Schedule(start=0.5, interrupt=0)}
    trainer, _ = trained(
        classifier(), texts(classes), tmp_path, rowprop.TopK(keep=0.5), selecting=late, gradient_accumulation_steps=2
    )
    assert [e["kept"] for e in trainer.state.log_history if "loss" in e] == [1.0] * 3 + [0.5] * 3


def test_removed_the_trainer_is_as_it_was(tmp_path: Path):
    # A subclass with its own loss, which evaluation calls under `select` as well. Red when: a replaced method stays.
    import transformers

    class Twice(transformers.Trainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().compute_loss(*args, **kwargs)
            return (2 * loss[0], loss[1]) if isinstance(loss, tuple) else 2 * loss

    data = texts(classes)
    plain, trainer = (make_trainer(classifier(), data, tmp_path, kind=Twice) for _ in range(2))
    before = dict(vars(trainer))
    handle = select(trainer, rowprop.TopK(keep=0.5), losses_fn=row_losses)
    assert trainer.evaluate()["eval_loss"] == plain.evaluate()["eval_loss"]
    with pytest.raises(InvalidInput, match=r"selects already"):
        select(trainer, rowprop.TopK(keep=0.5))
    handle.remove()
    handle.remove()
    assert vars(trainer).keys() - before.keys() <= {"model_preparation_time"}  # which evaluation took down
    plain.train()
    trainer.train()
    check_equal(plain.model, trainer.model)


def test_what_select_refuses(tmp_path: Path):
    import transformers

    selector, data = rowprop.TopK(keep=0.5), texts(classes)
    with pytest.raises(InvalidInput, match=r"a Linear, but a transformers\.Trainer"):
        select(nn.Linear(1, 1), selector)

    def refused(match: str, model: Any, *, error: Any = InvalidInput, change: Any = None, more: Any = None,
                **settings: Any) -> None:  # fmt: skip
        trainer = make_trainer(model, data, tmp_path, more=more)
        if change is not None:
            change(trainer)
        with pytest.raises(error, match=match):
            select(trainer, selector, **settings)

    refused(r"gradient_accumulation_steps", classifier(), accumulate_to=8)
    refused(r"takes the model and the batch", classifier(), losses_fn=lambda model: model)
    refused(r"a function of the batch", classifier(), classes_fn=3)
    refused(r"nonfinite", classifier(), nonfinite="no")
    refused(r"compute_loss_func", classifier(), more={"compute_loss_func": lambda *_, **__: None})
    refused(r"router's", decoder(output_router_logits=True))
    refused(r"another kind than classes or tokens", transformers.BertForQuestionAnswering(classifier().config))
    own = decoder()
    own.loss_function = lambda *_, **__: None
    refused(r"was given a loss_function", own)
    t5 = transformers.T5Config(vocab_size=WORDS, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    refused(r"decoder's inputs of the labels", transformers.T5ForConditionalGeneration(t5))
    deepspeed = dict.fromkeys(["is_deepspeed_enabled"], True)
    refused(r"use DDP or FSDP", classifier(), error=UnsupportedOperation, change=lambda t: vars(t).update(deepspeed))

    class Weighted(transformers.Trainer):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            weights = torch.tensor([1.0, 2.0, 3.0])
            return F.cross_entropy(model(input_ids=inputs["input_ids"]).logits, inputs["labels"], weights)

    with pytest.raises(InvalidInput, match=r"Weighted has a compute_loss of its own.*losses_fn"):
        select(make_trainer(classifier(), data, tmp_path, kind=Weighted), selector)

    class Own(transformers.Trainer):
        def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
            loss = model(**inputs).loss
            loss.backward()
            return loss.detach()

    trainer = make_trainer(classifier(), data, tmp_path, kind=Own)
    select(trainer, selector)
    with pytest.raises(InvalidInput, match=r"training_step of Own did not call compute_loss"):
        trainer.train()
    trainer = make_trainer(classifier(), [{"input_ids": row["input_ids"]} for row in data], tmp_path)
    select(trainer, selector)
    with pytest.raises(InvalidInput, match=r"an entry labels was needed"):
        trainer.train()
