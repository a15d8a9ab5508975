"""transformers' Trainer with and without `select`: the rows, tokens, parameters and logs of a plain loop.

The package lives in a venv of its own: `nox -s integrations`. Models are tiny and made from a config.
"""

from __future__ import annotations

import importlib
import math
import sys
import types
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import rowprop
from plain_loop import in_processes, last_line_of
from rowprop.errors import InvalidInput, MissingExtra, UnsupportedOperation
from rowprop.history import LossHistory

ROWS, BATCH, LENGTH, WORDS, EPOCHS = 24, 4, 7, 23, 2
MODULE = "rowprop.integrations.transformers"

needs_transformers = pytest.mark.skipif(
    not (find_spec("transformers") and find_spec("accelerate")), reason="needs transformers: nox -s integrations"
)
pytestmark = [
    pytest.mark.usefixtures("one_thread", "quick_collections"),
    pytest.mark.filterwarnings("ignore"),  # those of transformers are its own
]


# --- without transformers ---------------------------------------------------------------------------------------------


def test_an_older_transformers_is_named(monkeypatch: pytest.MonkeyPatch):
    # Red when: a Trainer is changed that divides the loss by the accumulation steps again.
    old = types.ModuleType("transformers")
    old.__version__, old.Trainer = "5.2.0", type("Trainer", (), {})
    monkeypatch.setitem(sys.modules, "transformers", old)
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    monkeypatch.setattr("importlib.util.find_spec", lambda _: object())
    with pytest.raises(MissingExtra, match=r"5\.23 or newer but transformers 5\.2\.0"):
        importlib.import_module(MODULE)


# --- models, data, trainers -------------------------------------------------------------------------------------------


def classifier(labels: int = 3, **config: Any) -> Any:
    """Its forward takes any keywords, and its loss ignores `num_items_in_batch`."""
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(1)
    sizes: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    return BertForSequenceClassification(
        BertConfig(
            **sizes, intermediate_size=16, vocab_size=WORDS, num_labels=labels, max_position_embeddings=LENGTH,
            hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **config,
        )
    )  # fmt: skip


def decoder(**config: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    sizes: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, intermediate_size=16, vocab_size=WORDS, pad_token_id=0, **config))


def texts(make: Callable[[torch.Generator, Tensor], Any], rows: int = ROWS) -> list[dict[str, Any]]:
    """Rows of tokens, with labels from a function of their tokens."""
    generator = torch.Generator().manual_seed(0)
    found: list[dict[str, Any]] = []
    for number in range(rows):
        ids = torch.randint(1, WORDS, (LENGTH,), generator=generator)
        labels = make(generator, ids)
        found.append({"input_ids": ids.tolist(), "labels": labels, "ids": number})
    return found


def classes(generator: torch.Generator, ids: Tensor) -> int:
    return int(ids[0] % 3)


def answers(generator: torch.Generator, ids: Tensor) -> list[int]:
    """Labels of the last tokens, of which there are more or fewer."""
    asked = int(torch.randint(2, LENGTH, (), generator=generator))
    return [-100] * asked + ids[asked:].tolist()


def make_trainer(model: Any, data: list[dict[str, Any]], folder: Path, *, kind: Any = None, more: Any = None,
                 rate: float = 0.3, **settings: Any) -> Any:  # fmt: skip
    import transformers

    transformers.logging.set_verbosity_error()
    given: dict[str, Any] = {
        "per_device_train_batch_size": BATCH, "num_train_epochs": EPOCHS, "optim": "sgd", "learning_rate": rate,
        "lr_scheduler_type": "constant", "max_grad_norm": 0.0, "train_sampling_strategy": "sequential",
        "logging_steps": 1, "save_strategy": "no", "report_to": "none", "disable_tqdm": True, "use_cpu": True,
        "logging_nan_inf_filter": False,
    }  # fmt: skip
    if "ids" in data[0] and "remove_unused_columns" not in settings:
        data = [{name: value for name, value in row.items() if name != "ids"} for row in data]
    args = transformers.TrainingArguments(folder, **given | settings)
    kind = transformers.Trainer if kind is None else kind
    return kind(model, args, train_dataset=data, eval_dataset=data, callbacks=[silence(transformers)], **more or {})


def silence(transformers: Any) -> Any:
    """Prints nothing: the Trainer adds a printer where there is no progress bar."""

    class Silence(transformers.TrainerCallback):
        def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            transformers.PrinterCallback.on_log = lambda *_, **__: None

    return Silence()


def batches(data: list[dict[str, Any]]) -> list[dict[str, Tensor]]:
    columns = [name for name in data[0] if name != "ids"]
    parts = [data[start : start + BATCH] for start in range(0, len(data), BATCH)]
    return [{name: torch.tensor([row[name] for row in part]) for name in columns} for part in parts]


def row_losses(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(input_ids=batch["input_ids"]).logits, batch["labels"], reduction="none")


def token_losses(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Of the tokens that count."""
    logits, labels = model(input_ids=batch["input_ids"]).logits[:, :-1], batch["labels"][:, 1:]
    return F.cross_entropy(logits[labels != -100], labels[labels != -100], reduction="none")


def above(losses: Tensor) -> Tensor:
    """Of the rows above the mean, of which there are more or fewer."""
    return (losses.detach() > losses.detach().mean()).nonzero().squeeze(1)


def by_hand(
    model: Any, data: Any, losses_fn: Any, *, at_once: int = 1, choose: Any = above, clip: float | None = None
) -> list[dict[str, float]]:
    """A plain loop: plain indexing, and the mean over all rows that the batches of an update keep."""
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    logged: list[dict[str, float]] = []
    everything = batches(data)
    for _ in range(EPOCHS):
        for first in range(0, len(everything), at_once):
            every, kept = [], []
            for batch in everything[first : first + at_once]:
                losses = losses_fn(model, batch)
                every.append(losses)
                kept.append(losses[choose(losses)])
            torch.cat(kept).mean().backward()
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
            numbers, count = (float(torch.cat(part).mean()) for part in (every, kept)), len(torch.cat(kept))
            logged.append(dict(zip(("loss_all", "loss_kept"), numbers, strict=True)))
            logged[-1] |= {"kept": count / len(torch.cat(every)), "loss": logged[-1]["loss_all"]}
    return logged


def check(trainer: Any, model: nn.Module, logged: list[dict[str, float]] | None = None) -> None:
    """The trainer's parameters and logs are those of the plain loop."""
    for (name, found), expected in zip(trainer.model.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-6, msg=lambda m, name=name: f"{name}: {m}")
    if logged is not None:
        steps = [entry for entry in trainer.state.log_history if "loss" in entry]
        for found, truth in zip(steps, logged, strict=True):
            assert {name: found[name] for name in truth} == pytest.approx(truth, abs=1e-5)


KINDS = {"rows": (classifier, classes, row_losses), "tokens": (decoder, answers, token_losses)}
"""A model, its labels, and the losses of its rows or tokens."""


# --- the gradient -----------------------------------------------------------------------------------------------------


@needs_transformers
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("accumulated", [1, 2, 4])
@pytest.mark.parametrize("clip", [None, 0.3])
def test_the_parameters_and_logs_are_those_of_a_plain_loop(
    kind: str, accumulated: int, clip: float | None, tmp_path: Path
):
    # 6 batches in an epoch: with 4 accumulated, the last update has 2. Red when: the Trainer divides by the accumulated
    # batches as well; batches count alike, whatever they keep; gradients are clipped before they are the mean's; the
    # logged loss is that of the kept rows.
    from rowprop.integrations.transformers import select

    make, labels, losses_fn = KINDS[kind]
    data, model = texts(labels), make()
    logged = by_hand(model, data, losses_fn, at_once=accumulated, clip=clip)
    trainer = make_trainer(
        make(), data, tmp_path, gradient_accumulation_steps=accumulated, max_grad_norm=0.0 if clip is None else clip
    )
    handle = select(trainer, rowprop.selection.AboveMean(), engine="sliced")
    with rowprop.watch() as report:
        trainer.train()
    check(trainer, model, logged)
    assert report.sliced
    # Below an attention that mixes a row's tokens, all of them have a gradient.
    assert set(report.densified) <= ({"MmBackward0", "add.Tensor"} if kind == "tokens" else set())
    assert handle.record.unit == kind[:-1]
    assert handle.step.state_dict()["step"] == EPOCHS * ROWS // BATCH


@needs_transformers
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("accumulated", [1, 2, 4])
def test_two_processes_train_on_what_both_keep(kind: str, accumulated: int, tmp_path: Path):
    # 3 batches for each process: with 2 accumulated, the last update has 1, with 4 it has 3. Red when: processes count
    # alike, whatever they keep; the gradients are averaged over the processes and not summed.
    from rowprop.integrations.transformers import select

    make, labels, losses_fn = KINDS[kind]
    data, model = texts(labels), make()
    logged = by_hand(model, data, losses_fn, at_once=2 * accumulated)

    def train() -> None:
        trainer = make_trainer(
            make(), data, tmp_path, gradient_accumulation_steps=accumulated, ddp_backend="gloo",
        )  # fmt: skip
        select(trainer, rowprop.selection.AboveMean(), engine="sliced")
        trainer.train()
        assert trainer.accelerator.num_processes == 2
        check(trainer, model, logged)

    in_processes(train)


@needs_transformers
@pytest.mark.parametrize("accumulated", [1, 2])
def test_ranks_that_select_together_keep_the_rows_of_one_batch(accumulated: int, tmp_path: Path):
    # TopK among the tokens of both, of which each has more or fewer. Red when: a rank's batch counts by its own tokens,
    # although the step has put the factor of the ranks into the weights.
    from rowprop.integrations.transformers import select

    data, model = texts(answers), decoder()
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    parts = batches(data)
    both = [{name: torch.cat([a[name], b[name]]) for name in a} for a, b in zip(parts[::2], parts[1::2], strict=True)]
    for _ in range(EPOCHS):
        for first in range(0, len(both), accumulated):
            every = [token_losses(model, batch) for batch in both[first : first + accumulated]]
            means = [losses[rowprop.TopK(keep=0.5)(losses.detach()).rows].mean() for losses in every]
            torch.stack(means).mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    def train() -> None:
        trainer = make_trainer(decoder(), data, tmp_path, gradient_accumulation_steps=accumulated)
        select(trainer, rowprop.TopK(keep=0.5), engine="sliced", ranks=rowprop.distributed.Global())
        trainer.train()
        check(trainer, model)

    in_processes(train)


@needs_transformers
def test_weights_that_are_not_even_refer_to_all_rows_of_the_update(tmp_path: Path):
    # A selector that keeps the first half of a batch with weights 2/N, so that the loss estimates the mean over all N
    # tokens. Red when: batches count by their kept tokens, or alike.
    from rowprop.integrations.transformers import select

    data, model = texts(answers), decoder()
    parts, optimizer = batches(data), torch.optim.SGD(model.parameters(), lr=0.3)
    model.train()
    for first in range(0, len(parts), 2):
        every = [token_losses(model, batch) for batch in parts[first : first + 2]]
        (torch.cat([2 * losses[::2] for losses in every]).sum() / len(torch.cat(every))).backward()
        optimizer.step()
        optimizer.zero_grad()

    def halves(scores: Tensor, context: Any) -> rowprop.Selection:
        rows = torch.arange(0, len(scores), 2)
        return rowprop.Selection(rows, torch.full((len(rows),), 2 / len(scores)), len(scores))

    trainer = make_trainer(decoder(), data, tmp_path, gradient_accumulation_steps=2, num_train_epochs=1)
    select(trainer, halves, engine="sliced")
    trainer.train()
    check(trainer, model)


@needs_transformers
def test_the_trainers_division_by_accumulated_batches_is_left_out(tmp_path: Path):
    # For models that take no keywords, which the others here do. Red when: loss_is_scaled_for_ga stays as it is.
    from rowprop.integrations.transformers import select

    data, model, ours = texts(classes), classifier(), classifier()
    by_hand(model, data, row_losses, at_once=2)
    ours.accepts_loss_kwargs = False
    trainer = make_trainer(ours, data, tmp_path, gradient_accumulation_steps=2)
    select(trainer, rowprop.selection.AboveMean(), engine="sliced")
    trainer.train()
    check(trainer, model)


@needs_transformers
def test_a_second_forward_gives_the_same_gradient(tmp_path: Path):
    # Red when: `recompute` is handed labels that were taken out of the batch.
    from rowprop.integrations.transformers import select

    data, model = texts(classes), classifier()
    logged = by_hand(model, data, row_losses)
    trainer = make_trainer(classifier(), data, tmp_path)
    select(trainer, rowprop.selection.AboveMean(), engine="recompute")
    trainer.train()
    check(trainer, model, logged)


@needs_transformers
@pytest.mark.parametrize("accumulated", [1, 2])
def test_mixed_precision_is_the_trainers(accumulated: int, tmp_path: Path):
    # The engine of plain indexing: bfloat16 sums in another order are others. Red when: the losses are computed in
    # bfloat16, or the forward in float32.
    from rowprop.integrations.transformers import select

    def losses_fn(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(input_ids=batch["input_ids"]).logits
        return F.cross_entropy(logits.float(), batch["labels"], reduction="none")

    data, model, plain = texts(classes), classifier(), classifier()
    logged = by_hand(model, data, losses_fn, at_once=accumulated)
    by_hand(plain, data, row_losses, at_once=accumulated)
    trainer = make_trainer(classifier(), data, tmp_path, bf16=True, gradient_accumulation_steps=accumulated)
    select(trainer, rowprop.selection.AboveMean(), engine="masked")
    trainer.train()
    difference = max(float((a - b).abs().max()) for a, b in zip(model.parameters(), plain.parameters(), strict=True))
    assert difference > 1e-4
    for found, expected in zip(trainer.model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=difference / 10 if accumulated > 1 else 1e-6)
    assert trainer.state.log_history[0]["loss_all"] == pytest.approx(logged[0]["loss_all"], abs=1e-5)


@needs_transformers
def test_a_gradient_scaler_stays_the_trainers(tmp_path: Path):
    # The Trainer makes a scaler for float16 on accelerators alone, so a scaler is put into accelerate. Red when: the
    # gradients are made those of the mean only after the scaler has stepped.
    from rowprop.integrations.transformers import select

    data, model = texts(classes), classifier()
    logged = by_hand(model, data, row_losses, at_once=2)
    trainer = make_trainer(classifier(), data, tmp_path, gradient_accumulation_steps=2)
    trainer.accelerator.scaler = scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
    select(trainer, rowprop.selection.AboveMean(), engine="sliced")
    trainer.train()
    assert scaler.get_scale() == 4096.0  # 6 updates
    check(trainer, model, logged)


# --- all rows are the untouched Trainer -------------------------------------------------------------------------------


def untouched_and_all(make: Any, data: Any, folder: Path, *, selected: Any = None, **more: Any) -> Iterator[Any]:
    """A trainer as it is, and one that keeps all rows, both trained."""
    from rowprop.integrations.transformers import select

    for number in range(2):
        trainer = make_trainer(make(), data, folder, **more)
        if number:
            select(trainer, rowprop.TopK(keep=1.0), **selected or {})
        trainer.train()
        yield trainer


@needs_transformers
@pytest.mark.parametrize("kind", KINDS)
def test_all_rows_are_the_untouched_trainer(kind: str, tmp_path: Path):
    # Bit for bit, evaluation included. Tokens by plain indexing: other engines leave out the tokens without a label, so
    # that sums are in another order. Red when: the loss is a sum of losses times 1/N, is scaled, or when random numbers
    # are drawn.
    make, labels, _ = KINDS[kind]
    more: dict[str, Any] = {"eval_strategy": "epoch", "selected": {"engine": "masked"} if kind == "tokens" else {}}
    plain, selective = untouched_and_all(make, texts(labels), tmp_path, **SHUFFLED, **more)
    for a, b in zip(plain.model.parameters(), selective.model.parameters(), strict=True):
        assert torch.equal(a, b)
    for name in ("loss", "eval_loss"):
        found, expected = ([e[name] for e in each.state.log_history if name in e] for each in (selective, plain))
        assert found == pytest.approx(expected, rel=1e-6)
        assert name == "loss" or found == expected


SHUFFLED = {"train_sampling_strategy": "random"}


def regression(generator: torch.Generator, ids: Tensor) -> float:
    return float(ids.float().mean() / WORDS)


def several(generator: torch.Generator, ids: Tensor) -> list[float]:
    return [float(ids[0] % 2), float(ids[1] % 2), float(ids[2] % 2)]


@needs_transformers
@pytest.mark.parametrize(
    ("make", "labels", "settings"),
    [
        (lambda: classifier(1), regression, {}),
        (lambda: classifier(3), several, {}),
        (lambda: classifier(3, problem_type="regression"), several, {}),
        (classifier, classes, {"label_smoothing_factor": 0.2}),
        (decoder, answers, {"label_smoothing_factor": 0.2}),
        (decoder, answers, {"gradient_accumulation_steps": 4}),
    ],
    ids=["regression", "several-labels", "several-targets", "smoothed", "smoothed-tokens", "accumulated-tokens"],
)
def test_every_default_loss_is_the_trainers(make: Any, labels: Any, settings: dict[str, Any], tmp_path: Path):
    # Red when: labels are read by another problem type, label smoothing is left out, or the labels are not shifted.
    plain, selective = untouched_and_all(make, texts(labels), tmp_path, rate=0.1, **settings)
    check(selective, plain.model)


@needs_transformers
@pytest.mark.parametrize("head", ["BertForMaskedLM", "BertForTokenClassification"])
def test_tokens_that_are_told_in_place_are_not_shifted(head: str, tmp_path: Path):
    # Red when: labels of all tokens are shifted.
    import transformers

    def make() -> Any:
        torch.manual_seed(1)
        config = classifier(WORDS).config
        return getattr(transformers, head)(config)

    plain, selective = untouched_and_all(make, texts(answers), tmp_path, rate=0.1)
    check(selective, plain.model)


@needs_transformers
def test_packed_batches_choose_among_tokens(tmp_path: Path):
    # Two rows in one, told by positions that begin anew. Red when: a packed batch of one row passes for a row.
    from transformers import DataCollatorWithFlattening

    from rowprop.integrations.transformers import select

    data = texts(lambda _, ids: ids.tolist())
    packed: dict[str, Any] = {"more": {"data_collator": DataCollatorWithFlattening()}, "rate": 0.1}
    plain, selective = untouched_and_all(decoder, data, tmp_path, **packed)
    check(selective, plain.model)
    trainer = make_trainer(decoder(), data, tmp_path, **packed)
    select(trainer, rowprop.TopK(keep=0.5), unit="row")
    with pytest.raises(InvalidInput, match=r"several packed sequences.*unit='token'"):
        trainer.train()


@needs_transformers
@pytest.mark.skipif(find_spec("trl") is None, reason="needs trl: nox -s integrations")
@pytest.mark.parametrize("padding_free", [False, True])
def test_a_trainer_of_trl_is_a_subclass_like_others(padding_free: bool, tmp_path: Path):
    # Prompts without labels, padded or packed. Red when: labels are not shifted.
    import sft_trl
    from rowprop.integrations.transformers import select

    data = [
        {"input_ids": row["input_ids"], "completion_mask": [int(label != -100) for label in row["labels"]]}
        for row in texts(answers, rows=8)
    ]
    settings: dict[str, Any] = {"optim": "sgd", "learning_rate": 0.05, "num_train_epochs": 1, "max_grad_norm": 0.0}
    more: dict[str, Any] = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_length": None}
    trainers = [
        sft_trl.trainer_of(decoder(), data, WORDS, tmp_path, padding_free=padding_free, **settings, **more)
        for _ in range(2)
    ]
    handle = select(trainers[1], rowprop.TopK(keep=1.0), engine="sliced")
    for trainer in trainers:
        trainer.train()
    check(trainers[1], trainers[0].model)
    assert ("position_ids" in next(iter(trainers[1].get_train_dataloader()))) == padding_free
    assert handle.record.unit == "token"


@needs_transformers
def test_rows_of_a_language_model_have_the_mean_of_their_tokens(tmp_path: Path):
    # Red when: a row's loss is the sum of its tokens', or tokens without a label count.
    from rowprop.integrations.transformers import select

    def losses_fn(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        logits, labels = model(input_ids=batch["input_ids"]).logits[:, :-1], batch["labels"][:, 1:]
        return torch.stack([F.cross_entropy(*row, ignore_index=-100) for row in zip(logits, labels, strict=True)])

    data, model = texts(answers), decoder()
    logged = by_hand(model, data, losses_fn)
    trainer = make_trainer(decoder(), data, tmp_path)
    select(trainer, rowprop.selection.AboveMean(), unit="row", engine="sliced")
    trainer.train()
    check(trainer, model, logged)


@needs_transformers
def test_losses_of_ones_own_may_be_of_tokens(tmp_path: Path):
    # Red when: tokens whose label is -100 count, or the mask is not shifted.
    from rowprop.integrations.transformers import select

    def losses_fn(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
        logits, labels = model(input_ids=inputs["input_ids"]).logits, F.pad(inputs["labels"][:, 1:], (0, 1), value=-100)
        return F.cross_entropy(logits.mT, labels, reduction="none")

    data, model = texts(answers), decoder()
    logged = by_hand(model, data, token_losses, at_once=2)
    trainer = make_trainer(decoder(), data, tmp_path, gradient_accumulation_steps=2)
    select(trainer, rowprop.selection.AboveMean(), losses_fn=losses_fn, unit="token", engine="sliced")
    trainer.train()
    check(trainer, model, logged)


# --- logs, checkpoints, the handle ------------------------------------------------------------------------------------


@needs_transformers
def test_logs_are_means_since_the_last_log(tmp_path: Path):
    # Red when: a log tells of the last step alone, or sums go on after a log.
    from rowprop.integrations.transformers import select

    data = texts(classes)
    logged = by_hand(classifier(), data, row_losses, choose=lambda losses: losses.topk(2).indices)
    trainer = make_trainer(classifier(), data, tmp_path, logging_steps=3)
    select(trainer, rowprop.TopK(keep=0.5), engine="sliced")
    trainer.train()
    steps = [entry for entry in trainer.state.log_history if "loss" in entry]
    for number, found in enumerate(steps):
        for name in logged[0]:
            mean = sum(entry[name] for entry in logged[3 * number : 3 * number + 3]) / 3
            assert found[name] == pytest.approx(mean, abs=1e-5)
    assert trainer.state.log_history[-1]["train_loss"] == pytest.approx(sum(e["loss"] for e in steps) / len(steps))


@needs_transformers
def test_the_kept_share_of_each_class_is_logged_on_request(tmp_path: Path):
    # Against counts by hand. Red when: shares are of all kept rows.
    from rowprop.integrations.transformers import select

    data, model = texts(classes), classifier()
    trainer = make_trainer(classifier(), data, tmp_path)
    select(trainer, rowprop.TopK(keep=0.5), engine="sliced", classes_fn=lambda inputs: inputs["labels"])
    trainer.train()
    batch = batches(data)[0]
    rows = row_losses(model.train(), batch).topk(BATCH // 2).indices
    for number in batch["labels"].unique().tolist():
        expected = int((batch["labels"][rows] == number).sum()) / int((batch["labels"] == number).sum())
        assert trainer.state.log_history[0][f"kept/{number}"] == pytest.approx(expected)


@needs_transformers
def test_the_kept_share_of_each_class_of_tokens_is_logged(tmp_path: Path):
    # A token is of the class of its row. Red when: places among the flattened tokens are taken for rows, or tokens
    # without a label are counted.
    from rowprop.integrations.transformers import select

    data, model = texts(answers), decoder()
    trainer = make_trainer(decoder(), data, tmp_path)
    classes_fn = lambda inputs: inputs["input_ids"][:, 0] % 2  # noqa: E731
    select(trainer, rowprop.TopK(keep=0.5), engine="sliced", classes_fn=classes_fn)
    trainer.train()
    batch = batches(data)[0]
    losses = token_losses(model.train(), batch)
    of_tokens = classes_fn(batch)[:, None].expand(-1, LENGTH - 1)[batch["labels"][:, 1:] != -100]
    kept = of_tokens[losses.topk(math.ceil(len(losses) / 2)).indices]
    for number in of_tokens.unique().tolist():
        expected = int((kept == number).sum()) / int((of_tokens == number).sum())
        assert trainer.state.log_history[0][f"kept/{number}"] == pytest.approx(expected)


def resumable(folder: Path, processes: int, **settings: Any) -> tuple[Any, Any]:
    """A trainer that draws rows and remembers them, and its handle."""
    from rowprop.integrations.transformers import select

    generator = torch.Generator().manual_seed(3)
    trainer = make_trainer(
        classifier(), texts(classes), folder, remove_unused_columns=False, save_strategy="steps", save_steps=2,
        gradient_accumulation_steps=2, save_total_limit=4, per_device_train_batch_size=BATCH // processes, **SHUFFLED,
        **settings,
    )  # fmt: skip
    handle = select(
        trainer, rowprop.RandomRows(keep=0.5), engine="sliced", generator=generator, history=LossHistory(ROWS)
    )
    return trainer, handle


def resumed_is_straight(folder: Path, processes: int) -> None:
    """Three updates in an epoch: the checkpoint after the second and the fourth lie in the middle of one."""
    straight, whole = resumable(folder, processes)
    straight.train()
    for number in (2, 4):
        resumed, half = resumable(folder / "again", processes)
        resumed.train(resume_from_checkpoint=str(folder / f"checkpoint-{number}"))
        for a, b in zip(straight.model.parameters(), resumed.model.parameters(), strict=True):
            assert torch.equal(a, b)
        known = [each.step.history.losses_of(torch.arange(ROWS)) for each in (whole, half)]
        torch.testing.assert_close(*known, rtol=0, atol=0, equal_nan=True)
        assert half.step.state_dict()["step"] == whole.step.state_dict()["step"]


@needs_transformers
def test_a_resumed_training_goes_on_bit_for_bit(tmp_path: Path):
    # In the middle of an epoch. Red when: no state is saved, so that the generator begins again.
    resumed_is_straight(tmp_path, 1)
    assert (tmp_path / "checkpoint-2" / "rowprop_0.pt").exists()


@needs_transformers
def test_two_processes_go_on_bit_for_bit(tmp_path: Path):
    # Red when: one process's file is written over the other's.
    in_processes(lambda: resumed_is_straight(tmp_path, 2))
    assert (tmp_path / "checkpoint-2" / "rowprop_1.pt").exists()


@needs_transformers
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


@needs_transformers
def test_progress_is_the_trainers(tmp_path: Path):
    # Rows are chosen in the second half. Red when: progress counts micro-batches, or is unknown.
    from rowprop.integrations.transformers import select

    trainer = make_trainer(classifier(), texts(classes), tmp_path, gradient_accumulation_steps=2)
    select(trainer, rowprop.TopK(keep=0.5), engine="sliced", schedule=rowprop.schedule.Schedule(start=0.5, interrupt=0))
    trainer.train()
    assert [e["kept"] for e in trainer.state.log_history if "loss" in e] == [1.0] * 3 + [0.5] * 3


@needs_transformers
def test_removed_the_trainer_is_as_it_was(tmp_path: Path):
    # A subclass with its own loss, which evaluation calls under `select` as well. Red when: a replaced method stays.
    import transformers

    from rowprop.integrations.transformers import select

    class Twice(transformers.Trainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().compute_loss(*args, **kwargs)
            return (2 * loss[0], loss[1]) if isinstance(loss, tuple) else 2 * loss

    data = texts(classes)
    plain, trainer = (make_trainer(classifier(), data, tmp_path, kind=Twice) for _ in range(2))
    before = dict(vars(trainer))
    handle = select(trainer, rowprop.TopK(keep=0.5), losses_fn=row_losses, engine="sliced")
    assert trainer.evaluate()["eval_loss"] == plain.evaluate()["eval_loss"]
    with pytest.raises(InvalidInput, match=r"selects already"):
        select(trainer, rowprop.TopK(keep=0.5))
    handle.remove()
    handle.remove()
    assert vars(trainer).keys() - before.keys() <= {"model_preparation_time"}  # which evaluation took down
    plain.train()
    trainer.train()
    for a, b in zip(plain.model.parameters(), trainer.model.parameters(), strict=True):
        assert torch.equal(a, b)


@needs_transformers
def test_the_page_runs(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    # Red when: a line of the page no longer works, or prints something else.
    monkeypatch.chdir(tmp_path)
    assert last_line_of("trainer.md", capsys) == "8 32"


@needs_transformers
def test_what_select_refuses(tmp_path: Path):
    import transformers

    from rowprop.integrations.transformers import select

    selector, data = rowprop.TopK(keep=0.5), texts(classes)
    with pytest.raises(InvalidInput, match=r"got a Linear but a transformers\.Trainer"):
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
