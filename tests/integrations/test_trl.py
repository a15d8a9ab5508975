"""TRL's SFTTrainer with and without `pick_answers`: equal parameters and logs, a head that runs for K tokens alone.

The packages live in a venv of their own: `nox -s integrations`. Models are tiny and made from a config, the tokenizer
is made here, and the data are tokens already.
"""

from __future__ import annotations

import copy
import inspect

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import rowprop
import sft_trl
from plain_loop import apart, only_with, scripts_of
from rowprop.backprop.autograd.rowgrad import RowGrad
from rowprop.errors import InvalidInput
from rowprop.integrations.trl import pick_answers
from transformers_trainer import adapted

WIDTH, VOCABULARY, STEPS = 32, 67, 3

pytestmark = [*only_with("trl", "integrations"), pytest.mark.usefixtures("quick_collections")]


def family(name, **more):
    """A maker of causal language models of this family."""

    def make():
        import transformers

        config = getattr(transformers, f"{name}Config")(
            vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=64, pad_token_id=1, eos_token_id=2, **more,
        )  # fmt: skip
        return getattr(transformers, f"{name}ForCausalLM")(config)

    return make


llama = family("Llama")
FAMILIES = {
    "keys of fewer heads, biases, and a head tied to the embedding": family("Qwen2", tie_word_embeddings=True),
    "a soft cap on the logits": family("Gemma2", head_dim=8, final_logit_softcapping=2.0, sliding_window=8),
    "logits divided by a constant": family("Granite", logits_scaling=3.0),
    "experts, with their own loss": family("Mixtral", num_local_experts=4, output_router_logits=True),
    "LoRA": lambda: adapted(llama()),
}


def conversations():
    """Prompts and answers of uneven lengths; the first answer is a whole text, as in pretraining."""
    generator = torch.Generator().manual_seed(0)
    rows = []
    for _ in range(18):
        length, answer = (int(torch.randint(low, high, (1,), generator=generator)) for low, high in ((8, 24), (1, 7)))
        ids = torch.randint(3, VOCABULARY, (length,), generator=generator).tolist()
        rows.append({"input_ids": ids, "labels": [-100] * (length - answer) + ids[-answer:]})
    rows[0]["labels"] = rows[0]["input_ids"]
    return rows


def trainer_of(make, folder, **settings):
    torch.manual_seed(0)
    given = {"max_steps": STEPS, "per_device_train_batch_size": 2, "learning_rate": 0.05, "optim": "sgd"}
    given |= {"max_length": 32, "logging_steps": 1}
    return sft_trl.trainer_of(make(), conversations(), VOCABULARY, folder, **given | settings)


class HeadTokens(TorchDispatchMode):
    """How many tokens each product with the head's weight had, in forwards and in TRL's second look in backwards."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if RowGrad in types:
            return NotImplemented  # the rule's own ops come back here
        if func.overloadpacket is torch.ops.aten.mm and args[1].shape == (WIDTH, VOCABULARY):
            self.found.append(args[0].shape[0])
        return func(*args, **kwargs or {})


def trained(trainer):
    """Train; the logs of all steps, the tokens that the head saw, and how far each parameter moved."""
    before = copy.deepcopy(trainer.model)
    with HeadTokens() as head:
        trainer.train()
    told = ("loss", "grad_norm", "entropy", "mean_token_accuracy", "num_tokens", "aux_loss")
    logs = [{key: log[key] for key in told if key in log} for log in trainer.state.log_history if "loss" in log]
    assert len(logs) == STEPS
    return logs, head.found, apart(trainer.model, before)


def labels_of(trainer):
    """The labels of each batch that the trainer's model is given from now on."""
    labels = []
    trainer.model.register_forward_pre_hook(lambda *call: labels.append(call[-1].get("labels")), with_kwargs=True)
    return labels


def assert_equal_runs(make, folder, **settings):
    """Train with and without the adapter; the tokens that the head saw in each, and the tokens that count."""
    plain, ours = (trainer_of(make, folder, **settings) for _ in range(2))
    pick_answers(ours)
    labels = labels_of(ours)
    logs, all_tokens, moved = trained(plain)
    our_logs, kept_tokens, _ = trained(ours)
    assert moved > 1e-3
    assert apart(plain.model, ours.model) <= 1e-6
    for log, our_log in zip(logs, our_logs, strict=True):
        assert our_log == pytest.approx(log, rel=1e-5)
    return all_tokens, kept_tokens, [int((one[:, 1:] != -100).sum()) for one in labels if one is not None]


BATCHES = {"padded": {}, "packed": {"packing": True}, "free of padding": {"padding_free": True, "max_length": None}}


@pytest.mark.parametrize("accumulated", [1, 3])
@pytest.mark.parametrize("batches", BATCHES.values(), ids=BATCHES)
def test_trainers_end_with_equal_parameters_and_logs(batches, accumulated, tmp_path):
    # Three batches of an accumulated step have uneven numbers of answer tokens. Red when: the labels are not shifted,
    # the loss is divided by the batch's own K, or the hook stays on the backbone after a forward.
    settings = {"gradient_accumulation_steps": accumulated, **batches}
    all_tokens, kept_tokens, answers = assert_equal_runs(llama, tmp_path, **settings)
    assert len(set(answers)) > 1
    # The head runs for a batch in its forward, and once more in its backward: TRL keeps no logits.
    assert kept_tokens == [number for number in answers for _ in range(2)]
    assert len(all_tokens) == len(kept_tokens)
    assert sum(kept_tokens) < 0.5 * sum(all_tokens)


@pytest.mark.parametrize("make", FAMILIES.values(), ids=FAMILIES)
def test_heads_of_all_kinds_stay_trls(make, tmp_path):
    # Red when: the adapter multiplies by the head's weight itself, or drops the backbone's other outputs.
    assert_equal_runs(make, tmp_path, gradient_accumulation_steps=2)


@pytest.mark.parametrize(
    "settings",
    [{"loss_type": "dft", "learning_rate": 1.0}, {"gradient_checkpointing": True}, {"label_smoothing_factor": 0.1}],
    ids=["dft", "checkpointing", "smoothing"],
)
def test_settings_of_the_trainer_hold(settings, tmp_path):
    # Red when: the loss is a cross entropy of the adapter's own. Smoothing makes TRL compute all logits: no pick.
    assert_equal_runs(llama, tmp_path, **settings)


def test_the_backward_below_the_head_costs_the_answers(tmp_path):
    # TRL's head alone gives the last block a gradient of all tokens. Red when: hidden states are indexed plainly.
    counted = []
    for adapts in (False, True):
        trainer = trainer_of(llama, tmp_path)
        if adapts:
            pick_answers(trainer)
        with rowprop.cost.count_flops() as flops, rowprop.watch() as report:
            trainer.train()
        assert not flops.uncounted
        counted.append(flops.by_op["mm"] + flops.by_op["addmm_"])
    assert counted[1] < 0.85 * counted[0]
    assert report.sliced["silu_backward"] == STEPS  # the last block's MLP; the other's gradient is dense


def test_a_batch_without_an_answer_adds_nothing(tmp_path):
    # Red when: the mean of no losses is taken, NaN.
    trainer = trainer_of(llama, tmp_path)
    pick_answers(trainer)
    ids = torch.randint(3, VOCABULARY, (2, 9))
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": torch.full_like(ids, -100)}
    trainer.model.train()
    loss = trainer.compute_loss(trainer.model, batch, num_items_in_batch=torch.tensor(7))
    loss.backward()
    assert float(loss) == 0
    for name, parameter in trainer.model.named_parameters():
        assert not parameter.grad.any(), name


def test_evaluation_logits_and_generation_are_those_of_the_model(tmp_path):
    # Red when: forwards without TRL's head are narrowed as well, or the signature that `generate` reads is lost.
    plain, ours = (trainer_of(llama, tmp_path) for _ in range(2))
    pick_answers(ours)
    told, ours_told = (trainer.evaluate() for trainer in (plain, ours))
    for key in ("eval_loss", "eval_entropy", "eval_mean_token_accuracy"):
        assert ours_told[key] == pytest.approx(told[key], rel=1e-5)
    assert inspect.signature(ours.model.forward) == inspect.signature(plain.model.forward)
    ids = torch.randint(3, VOCABULARY, (2, 9))
    with torch.no_grad():
        torch.testing.assert_close(ours.model(ids, labels=ids).logits, plain.model(ids, labels=ids).logits)
    said = [t.model.generate(ids, max_new_tokens=4, do_sample=False) for t in (plain, ours)]
    torch.testing.assert_close(said[0], said[1])


def test_the_code_of_the_page_runs(tmp_path):
    # Red with a name misspelt in a block.
    trainer = trainer_of(llama, tmp_path)
    names = {"args": trainer.args, "dataset": trainer.train_dataset, "tokenizer": trainer.processing_class}
    blocks = scripts_of("supervised-fine-tuning.md")
    assert len(blocks) == 2
    for block in blocks:
        exec(block, names)
    assert names["trainer"].state.global_step == STEPS


def detached(trainer):
    """Let a trainer's attention detach keys and values of tokens whose next token has no label: plain dense code."""
    from transformers import AttentionInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    labels = labels_of(trainer)

    def attention(module, query, key, value, mask, **options):
        kept = nn.functional.pad(labels[-1][:, 1:] != -100, (0, 1))[:, None, :, None]
        key, value = (torch.where(kept, tensor, tensor.detach()) for tensor in (key, value))
        return AttentionInterface()["sdpa"](module, query, key, value, mask, **options)

    AttentionInterface.register("detached", attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register("detached", ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    trainer.model.config._attn_implementation = "detached"


@pytest.mark.parametrize("batches", BATCHES.values(), ids=BATCHES)
def test_cut_is_the_documented_dense_code(batches, tmp_path):
    # The control: without detaching, the trainers end up apart. Red when: `attention` is not handed to pick.
    dense, exact, ours = (trainer_of(llama, tmp_path, **batches) for _ in range(3))
    detached(dense)
    pick_answers(ours, attention="cut")
    logs = [trained(trainer)[0] for trainer in (dense, exact, ours)]
    assert apart(dense.model, ours.model) <= 1e-6
    assert apart(exact.model, ours.model) > 1e-4
    assert logs[2][0]["loss"] == pytest.approx(logs[0][0]["loss"], rel=1e-5)


def test_bad_arguments_are_named(tmp_path):
    # Red when: an argument is looked at in the first forward alone.
    with pytest.raises(InvalidInput, match=r"a Linear, but a trl\.SFTTrainer was needed"):
        pick_answers(nn.Linear(2, 2))
    trainer = trainer_of(llama, tmp_path)
    with pytest.raises(InvalidInput, match="one of exact, cut was needed"):
        pick_answers(trainer, attention="all")
    trainer.model.base_model_prefix = "none"
    with pytest.raises(InvalidInput, match="LlamaForCausalLM has no backbone"):
        pick_answers(trainer)
