"""TRL's GRPOTrainer with and without `select_answers`: equal parameters and logs, an update that runs for some answers.

The packages live in a venv of their own: `nox -s integrations`. Models are tiny and made from a config, the tokenizer
is made here, and the answers are random at first.
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import nn

import rowprop
from grpo_update import VOCABULARY, llama, some_groups, trainer_of
from plain_loop import apart, check_equal, check_same, in_processes, only_with
from rowprop.backprop.skip import MOST
from rowprop.errors import InvalidInput, UnsupportedOperation
from rowprop.integrations.trl import _equal, cppo, pods, select_answers
from rowprop.selection import PerClass, RandomRows
from transformers_trainer import adapted

GROUP, STEPS = 4, 3
LOSSES = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo", "cispo", "sapo", "vespo")
CLIPPED = {"num_iterations": 2, "epsilon": 0.01, "importance_sampling_level": "sequence"}

pytestmark = [*only_with("trl", "integrations"), pytest.mark.usefixtures("quick_collections")]


def all_apart(prompts, completion_ids, **columns):
    """No two answers of a group have the same reward, and each has an advantage."""
    return [sum(ids) + ids[0] / 7 for ids in completion_ids]


def make(folder, model=None, reward=some_groups, **settings):
    given = {
        "max_steps": STEPS, "per_device_train_batch_size": 8, "num_generations": GROUP, "max_completion_length": 6,
        "learning_rate": 0.5, "lr_scheduler_type": "constant", "loss_type": "grpo", "max_grad_norm": 0.0,
    }  # fmt: skip
    return trainer_of(llama() if model is None else model, reward, folder, **given | settings)


def train(trainer):
    """Train; all trainings draw the same answers of the same model."""
    torch.manual_seed(trainer.accelerator.process_index)
    trainer.train()


def forwards_of(trainer):
    """How many answers, and of how many tokens, each forward of an update has."""
    found, model = [], trainer.model

    def look(_, __, given):
        if given.get("fused_lm_head") and torch.is_grad_enabled() and model.training:
            found.append(tuple(given["input_ids"].shape))

    model.register_forward_pre_hook(look, with_kwargs=True)
    return found


def logs_of(trainer):
    """The logged numbers of each step, but for times."""
    steps = [log for log in trainer.state.log_history if "loss" in log]
    return [{key: value for key, value in log.items() if not key.endswith("time")} for log in steps]


def check_logs(plain, ours):
    """All numbers are the plain trainer's, but the entropy, which is that of the answers that went forward."""
    for log, our_log in zip(logs_of(plain), logs_of(ours), strict=True):
        assert our_log.keys() == log.keys() | {"kept", "forwarded"}
        for key in log.keys() - {"entropy"}:
            assert our_log[key] == pytest.approx(log[key], rel=1e-4, abs=2e-6), key


def moved(trainer, model=None):
    """How far the parameters have gone from those of the start."""
    return apart(trainer.model, llama() if model is None else model)


def compared(folder, *given, model=llama, **settings):
    """A plain trainer and one that selects, trained alike; the handle, and the forwards of both."""
    advantages = {"advantages": settings.pop("advantages", "all")}
    plain, ours = (make(folder, model(), **settings) for _ in range(2))
    found = [forwards_of(trainer) for trainer in (plain, ours)]
    handle = select_answers(ours, *given, **advantages)
    for trainer in (plain, ours):
        train(trainer)
    assert moved(plain, model()) > 1e-3
    check_same(plain.model, ours.model)
    if not given:
        check_logs(plain, ours)
    return plain, ours, handle, *found


@pytest.mark.parametrize("accumulated", [1, 2])
@pytest.mark.parametrize("loss_type", ["grpo", "dapo"])
def test_the_update_is_the_plain_trainers(loss_type, accumulated, tmp_path):
    # Red when: the loss is of the answers that are left, with their denominators; an answer that leaves keeps its ratio
    # of 0; the answers are put back in another place.
    _, ours, handle, whole, some = compared(
        tmp_path, loss_type=loss_type, gradient_accumulation_steps=accumulated, max_steps=4
    )
    assert [answers for answers, _ in whole] == [8] * 4 * accumulated
    assert len(some) == len(whole)  # as many forwards, whatever is kept
    assert min(some)[0] < 8
    assert ((1, 2) in some) == (accumulated == 1)  # a micro-batch of two groups without advantage
    kept = [log["forwarded"] for log in logs_of(ours)]
    counts = torch.tensor([0 if shape == (1, 2) else shape[0] for shape in some]).view(-1, accumulated)
    assert kept == pytest.approx((counts.sum(1) / (8 * accumulated)).tolist())
    assert kept == [log["kept"] for log in logs_of(ours)]  # in the first update no answer is clipped
    assert handle.num_rows == 8


def test_all_answers_kept_are_the_plain_trainer_bit_for_bit(tmp_path):
    # With the look at the gradient as well, where ratios may be clipped. Red when: answers are gathered in any case.
    settings = {"reward": all_apart, "num_iterations": 2, "epsilon": 0.9, "learning_rate": 0.02}
    plain, ours, _, _, some = compared(tmp_path, **settings)
    check_equal(plain.model, ours.model)
    assert [answers for answers, _ in some] == [8] * STEPS
    for log, our_log in zip(logs_of(plain), logs_of(ours), strict=True):
        assert our_log | log == our_log
        assert our_log["kept"] == our_log["forwarded"] == 1


SETTINGS = {
    "clipped tokens": {"num_iterations": 2, "epsilon": 0.001, "steps_per_generation": 2, "max_steps": 4},
    "two-sided": {"num_iterations": 2, "epsilon": 0.001, "delta": 1.01},
    "off-policy mask": {"num_iterations": 2, "off_policy_mask_threshold": 0.001},
    "truncated answers": {"mask_truncated_completions": True, "max_completion_length": 12},
    "checkpointing": {"gradient_checkpointing": True},
    "rewards of the batch": {"scale_rewards": "batch"},
    "clipped gradients": {"max_grad_norm": 0.05},
    "adapters of PEFT": {"model": lambda: adapted(llama()), **CLIPPED},
}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_settings_of_the_trainer_hold(settings, tmp_path):
    # Red when: an answer none of whose tokens count is kept, or stands in the loss; an answer leaves for one clipped
    # token; the backbone's hook sits on PEFT's wrapper, whose output has no hidden states.
    _, _, handle, _, some = compared(tmp_path, **settings)
    assert min(some)[0] < 8
    assert handle.num_forwarded < handle.num_rows


def test_autocast_trains_alike(tmp_path):
    # Red when: answers are put back among numbers of another dtype.
    plain, ours = (make(tmp_path, bf16=True) for _ in range(2))
    select_answers(ours)
    for trainer in (plain, ours):
        train(trainer)
    assert apart(plain.model, ours.model) < 1e-3


def test_the_entropy_is_that_of_the_answers_that_went_forward(tmp_path):
    # Red when: the answers that left count as answers of entropy 0.
    first, second = logs_of(compared(tmp_path, max_steps=2)[1])
    assert first["entropy"] == pytest.approx(math.log(VOCABULARY), abs=0.1)
    assert second["entropy"] is None or second["entropy"] > 4


def gradient_rows(trainer):
    """How many answers of each micro-batch have a gradient at their log-probabilities, by autograd alone."""
    counts, own = [], trainer._get_per_token_logps_and_entropies

    def logps(*args, **kwargs):
        found = own(*args, **kwargs)
        if found[0].requires_grad:
            found[0].register_hook(lambda grad: counts.append(int(grad.ne(0).any(1).sum())))
        return found

    trainer._get_per_token_logps_and_entropies = logps
    return counts


@pytest.mark.parametrize("accumulated", [1, 2])
def test_clipped_answers_have_no_backward(accumulated, tmp_path):
    # One ratio per answer, so many answers are clipped as a whole. Red when: rows of the gradient are taken as they are
    # found in the loss; the hook stays on the backbone, or stands there in the first update alone.
    settings = CLIPPED | {"gradient_accumulation_steps": accumulated, "max_steps": 4, "reward": all_apart}
    plain, ours = (make(tmp_path, **settings) for _ in range(2))
    handle = select_answers(ours)
    counts = gradient_rows(plain)
    train(plain)
    with rowprop.watch() as report:
        train(ours)
    assert moved(plain) > 1e-3
    check_same(plain.model, ours.model)
    check_logs(plain, ours)
    kept = torch.tensor(counts).view(-1, accumulated).sum(1) / (8 * accumulated)
    assert [log["kept"] for log in logs_of(ours)] == pytest.approx(kept.tolist())
    assert kept.min() < kept.max() == 1
    assert counts.count(0) < sum(count < 8 for count in counts) or accumulated == 1
    assert report.sliced["silu_backward"] == 2 * sum(count <= MOST * 8 for count in counts)  # both layers
    handle.remove()
    assert not ours.model.base_model._forward_hooks
    assert not report.densified


def batch_of(trainer):
    """A batch of 8 answers as TRL makes it, of prompts and answers of uneven lengths; three have an advantage."""
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(3, VOCABULARY, (8, 11), generator=generator)
    lengths = torch.randint(2, 7, (8,), generator=generator)
    mask = (torch.arange(6) < lengths[:, None]).long()
    prompt_mask = (torch.arange(5) >= torch.randint(0, 4, (8, 1), generator=generator)).long()
    advantages = torch.tensor([0.0, 1.2, 0.0, -0.7, 0.0, 0.0, 0.4, 0.0])
    return {
        "prompt_ids": ids[:, :5] * prompt_mask + 1 - prompt_mask, "prompt_mask": prompt_mask,
        "completion_ids": ids[:, 5:] * mask + 1 - mask, "completion_mask": mask, "advantages": advantages,
        "num_items_in_batch": mask.sum(), "old_per_token_logps": -4 + 0.3 * torch.randn(8, 6, generator=generator),
    }  # fmt: skip


def gradients(trainer, batch):
    """Of one micro-batch, which is a whole update."""
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.zero_grad()
    trainer.compute_loss(trainer.model, batch).backward()
    return [parameter.grad.clone() for parameter in trainer.model.parameters()]


def check_gradients(folder, loss_type, change, **attributes):
    """One micro-batch, changed, has the same gradients with the line and without it; returns the handle."""
    plain, ours = (make(folder, loss_type=loss_type) for _ in range(2))
    handle = select_answers(ours)
    for trainer in (plain, ours):
        vars(trainer).update(attributes)
    found = [gradients(trainer, change(batch_of(trainer))) for trainer in (plain, ours)]
    assert max(float(grad.abs().max()) for grad in found[0]) > 1e-3
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(other, one, rtol=0, atol=1e-6)
    return handle


@pytest.mark.parametrize("first", [True, False], ids=["first update", "later"])
@pytest.mark.parametrize("loss_type", LOSSES)
def test_every_type_of_loss_has_the_plain_gradient(loss_type, first, tmp_path):
    # In the first update TRL takes the ratios to be 1, and the batch has no older log-probabilities. Red when: the loss
    # is of the answers that are left, with their denominators; or an answer that leaves gets a ratio of 0.
    missing = {"old_per_token_logps"} if first else set()
    handle = check_gradients(tmp_path, loss_type, lambda b: {name: b[name] for name in b.keys() - missing})
    assert (handle.num_rows, handle.num_forwarded) == (8, 3)


@pytest.mark.parametrize("loss_type", ["dapo", "vespo"])
@pytest.mark.parametrize("shape", [(8, 6), (8, 1)], ids=["token", "sequence"])
def test_ratios_of_vllm_and_masks_of_tools_hold(shape, loss_type, tmp_path):
    # Red when: an entry of the batch is cut to the answers that are left, and TRL gets the others; or the tokens of
    # tools count.
    ratios = torch.rand(shape, generator=torch.Generator().manual_seed(1)) + 0.5
    ratios[6] = 0  # masked, as TRL does with an answer that vLLM sampled too far from the policy
    tools = torch.ones(8, 6).long()
    tools[1, 0] = tools[3] = 0

    def as_of_vllm(batch):
        sampled = batch["old_per_token_logps"] - 0.1
        return batch | {
            "importance_sampling_ratio": ratios.clone(), "sampling_per_token_logps": sampled, "tool_mask": tools.clone()
        }  # fmt: skip

    corrected = {"use_vllm": True, "vllm_importance_sampling_correction": True}
    handle = check_gradients(tmp_path, loss_type, as_of_vllm, **corrected)
    assert (handle.num_rows, handle.num_forwarded) == (8, 2)  # of the third, all tokens are a tool's
    assert handle.num_kept == 1 or loss_type == "vespo"  # which bounds the ratio from below


@pytest.mark.parametrize("loss_type", LOSSES)
def test_a_batch_without_advantage_leaves_gradients_of_zero(loss_type, tmp_path):
    # A rank has to take part in the all-reduce of each gradient. Red when: no forward runs, a gradient is None, or the
    # ratio of the tokens that do run is infinite, and times zero NaN.
    trainer = make(tmp_path, loss_type=loss_type)
    forwards = forwards_of(trainer)
    handle = select_answers(trainer)
    batch = batch_of(trainer)
    batch["advantages"], batch["old_per_token_logps"] = torch.zeros(8), torch.full((8, 6), -1000.0)
    assert not any(grad.any() for grad in gradients(trainer, batch))
    assert forwards == [(1, 2)]
    assert (handle.num_rows, handle.num_forwarded, handle.num_kept) == (8, 0, 0)


def update_of(trainer, batch, rows, advantages, count):
    """One step of SGD by a loss written out: the mean of `rows`, each with its advantage, over `count`."""
    model = trainer.model
    tokens = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)[rows]
    attended = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)[rows]
    logits = model(input_ids=tokens, attention_mask=attended, use_cache=False).logits[:, :-1]
    mask = batch["completion_mask"][rows]
    logs = logits.log_softmax(-1).gather(-1, tokens[:, 1:, None]).squeeze(-1)[:, -mask.shape[1] :]
    losses = -((logs - logs.detach()).exp() * advantages[:, None] * mask).sum(1) / mask.sum(1)
    (losses.sum() / count).backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.sub_(0.5 * parameter.grad)
    model.zero_grad()


def generations(trainer):
    """The generations of a trainer as they come, in their order, before the update shuffles them."""
    found, own = [], trainer._generate_and_score_completions

    def generate(inputs):
        found.append(own(inputs))
        return found[-1]

    trainer._generate_and_score_completions = generate
    return found


def by_variance(rewards):
    """The half of each group, normalised among themselves."""
    sets = [list(rows) for rows in itertools.combinations(range(GROUP), GROUP // 2)]
    rows, advantages = [], []
    for prompt, group in enumerate(rewards.view(-1, GROUP)):
        best = max(sets, key=lambda rows: group[rows].var())
        rows += [GROUP * prompt + row for row in best]
        advantages.append((group[best] - group[best].mean()) / (group[best].std() + 1e-4))
    return rows, torch.cat(advantages)


def by_size(rewards):
    """The half of each group with the largest advantages, of either sign, among all."""
    groups = rewards.view(-1, GROUP)
    advantages = ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)).flatten()
    half = advantages.view(-1, GROUP).abs().topk(GROUP // 2).indices + GROUP * torch.arange(len(groups))[:, None]
    rows = half.flatten().sort().values
    return rows.tolist(), advantages[rows]


@pytest.mark.parametrize(("method", "by_hand"), [(pods, by_variance), (cppo, by_size)])
def test_pods_and_cppo_train_as_a_plain_loop_on_their_answers(method, by_hand, tmp_path):
    # The plain loop takes the answers that the trainer sampled. Red when: advantages stay TRL's in PODS, the mean is
    # over all answers, groups are mixed up, or the largest advantages are kept, whatever their sign.
    trainer = make(tmp_path, reward=all_apart)
    found, rewards = generations(trainer), []
    forwards = forwards_of(trainer)
    trainer.reward_funcs[0] = lambda **given: rewards.append(all_apart(**given)) or rewards[-1]
    method(trainer, keep=0.5)
    plain = make(tmp_path, reward=all_apart)
    train(trainer)
    for batch, numbers in zip(found, rewards, strict=True):
        rows, advantages = by_hand(torch.tensor(numbers))
        update_of(plain, batch, rows, advantages, len(rows))
    assert moved(plain) > 1e-3
    check_same(plain.model, trainer.model)
    assert [answers for answers, _ in forwards] == [4] * STEPS
    assert [log["kept"] for log in logs_of(trainer)] == [0.5] * STEPS


def test_a_selector_that_keeps_all_leaves_the_trainer_as_it_is(tmp_path):
    # Bit for bit. Red when: advantages are multiplied by N times 1/N, which is not 1 for N = 82.
    settings = {"per_device_train_batch_size": 82, "num_generations": 2, "max_steps": 1, "max_completion_length": 2}
    plain, ours, *_ = compared(tmp_path, rowprop.TopK(keep=1.0), reward=all_apart, **settings)
    check_equal(plain.model, ours.model)


EQUAL = {
    "group": {},
    "batch": {"scale_rewards": "batch"},
    "none": {"scale_rewards": "none"},
    "each function": {"multi_objective_aggregation": "normalize_then_sum"},
    "with a selector": {"selector": RandomRows(1.0)},
    "several updates": CLIPPED,
    "kept": {"selector": PerClass(rowprop.TopK(1.0)), "advantages": "kept"},
}


@pytest.mark.parametrize("settings", EQUAL.values(), ids=EQUAL)
def test_groups_of_equal_rewards_leave_though_rounding_left_them_an_advantage(settings, tmp_path):
    # Eight answers have the reward 0.7 or none, the others 0.7 or 1.3. Red when: an advantage of TRL's, a threshold
    # or all processes' rewards decide; an answer without a reward counts as one of reward 0; a second draw is needed.
    def rewards(prompts, completion_ids, **columns):
        first = [0.7] * 7 + [None]
        return [*first, *(1.3 if row % 3 else 0.7 for row in range(8))] * (len(prompts) // 16)

    settings = dict(settings)
    given = {name: settings.pop(name) for name in ("selector", "advantages") if name in settings}
    common = {"reward": rewards, "num_generations": 8, "per_device_train_batch_size": 16, "max_steps": 2}
    plain, ours = (make(tmp_path, **common | settings) for _ in range(2))
    own = plain._generate_and_score_completions

    def zeroed(inputs):
        output = own(inputs)
        assert output["advantages"][:7].all()  # what rounding left
        output["advantages"][:8] = 0
        return output

    plain._generate_and_score_completions = zeroed
    handle = select_answers(ours, **given, equal_rewards="drop")
    for trainer in (plain, ours):
        train(trainer)
    assert moved(plain) > 1e-3
    check_same(plain.model, ours.model)
    assert (handle.num_rows, handle.num_forwarded) == (16, 8)


def test_groups_are_equal_in_each_function_alone():
    # Red when: functions that cancel each other in the sum make a group equal; the largest of other groups counts.
    both = torch.tensor([[1.0, 2.0], [2.0, 1.0], [3.0, math.nan], [3.0, 5.0], [math.nan] * 2, [math.nan] * 2])
    assert _equal(both, 2).tolist() == [False] * 2 + [True] * 4
    assert _equal(both.sum(1, keepdim=True), 2).tolist() == [True] * 6


def test_pods_refuses_to_keep_one_answer_to_each_prompt(tmp_path):
    # Its advantage among itself is 0. Red when: such a training goes on and trains nothing.
    trainer = make(tmp_path, reward=all_apart)
    pods(trainer, keep=1 / GROUP)
    with pytest.raises(InvalidInput, match=r"one of the 4 answers to each prompt.*give a larger keep"):
        train(trainer)


def some_unscored(prompts, completion_ids, **columns):
    """Where an answer has no reward, TRL gives it no advantage."""
    return [None if ids[0] % 5 == 0 else sum(ids) / 9 for ids in completion_ids]


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_advantages_of_all_kept_answers_are_those_of_trl(scale, tmp_path):
    # Red when: a deviation is that of a population, of another set of answers, or taken where rewards are not scaled;
    # or an answer without a reward counts as one of reward 0.
    given = {"reward": some_unscored, "scale_rewards": scale, "learning_rate": 0.01, "advantages": "kept"}
    compared(tmp_path, PerClass(rowprop.TopK(keep=1.0)), **given)


def test_weights_of_an_unbiased_selector_are_those_of_the_mean_over_all(tmp_path):
    # Answers are kept by a lot, and count 1 / (N p). Red when: each kept answer counts 1/K.
    def lots(scores, context):
        rows = torch.arange(0, len(scores), 2)
        return rowprop.Selection(rows, torch.linspace(0.1, 0.4, len(rows)), len(scores), unbiased=True)

    trainer = make(tmp_path, reward=all_apart, max_steps=1)
    found = generations(trainer)
    plain = make(tmp_path, reward=all_apart)
    handle = select_answers(trainer, lots)
    seen = trainer._logs["advantages"]
    train(trainer)
    advantages = torch.tensor(list(seen))[::2] * torch.linspace(0.1, 0.4, 4)
    update_of(plain, found[0], list(range(0, 8, 2)), advantages, 1)
    check_same(plain.model, trainer.model)
    assert handle.num_kept == 4


def saving(folder, selector, **settings):
    """A trainer that saves checkpoints, and its handle."""
    saves = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4}
    trainer = make(folder, reward=all_apart, **saves, **settings)
    return trainer, select_answers(trainer, selector)


@pytest.mark.parametrize("selector", [None, rowprop.RandomRows(0.5)], ids=["exact", "drawn"])
def test_a_resumed_training_goes_on_bit_for_bit(selector, tmp_path):
    # Red when: no state is saved, so that the draw begins again.
    straight, _ = saving(tmp_path, selector)
    train(straight)
    resumed, _ = saving(tmp_path / "again", selector)
    torch.manual_seed(7)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert resumed.state.global_step == 4
    check_equal(straight.model, resumed.model)
    assert (tmp_path / "checkpoint-2" / "rowprop_0.pt").exists() == (selector is not None)


def test_further_processes_go_on_from_the_state_of_the_first(tmp_path):
    # Red when: a process without a file of its own keeps the generator of the beginning.
    train(saving(tmp_path, rowprop.RandomRows(0.5))[0])

    def goes_on():
        two = {"ddp_backend": "gloo", "per_device_train_batch_size": 4}
        trainer, handle = saving(tmp_path / "again", rowprop.RandomRows(0.5), **two)
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
        states = trainer.accelerator.gather(handle._generator.get_state()[None])
        assert trainer.state.global_step == 4
        assert torch.equal(states[0], states[1])

    in_processes(goes_on)


@pytest.mark.parametrize("accumulated", [1, 2])
def test_ranks_that_keep_nothing_keep_up(accumulated, tmp_path):
    # Each rank has a group of its own in each micro-batch, or the half of one. Red when: a rank without answers runs no
    # forward, so that the others wait for it; or the denominators are those of a rank's own answers.
    def run():
        settings = {"gradient_accumulation_steps": accumulated, "per_device_train_batch_size": 4, "max_steps": 10}
        settings |= {"ddp_backend": "gloo", "loss_type": "dapo", "learning_rate": 0.05}
        plain, ours, _, whole, some = compared(tmp_path, **settings)
        assert plain.accelerator.num_processes == 2
        parameters = torch.cat([parameter.detach().flatten() for parameter in ours.model.parameters()])
        both = ours.accelerator.gather(parameters[None])
        assert torch.equal(both[0], both[1])
        assert len(some) == len(whole) == 10 * accumulated
        shares = ours.accelerator.gather(torch.tensor([[float(shape == (1, 2)) for shape in some]]))
        assert (shares[0] != shares[1]).any()  # micro-batches in which one rank alone keeps nothing
        if plain.accelerator.is_main_process:
            assert {log["kept"] for log in logs_of(ours)} > {0.5}

    in_processes(run)


REFUSED = {
    "beta=0.1, a divergence": {"beta": 0.1},
    "an entropy bonus": {"entropy_coef": 0.01},
    "top_entropy_quantile=0.5": {"top_entropy_quantile": 0.5},
}


@pytest.mark.parametrize("named", REFUSED)
def test_terms_that_reach_all_answers_are_refused(named, tmp_path, monkeypatch):
    # Red when: a term is not looked at.
    import trl.trainer.grpo_trainer as grpo

    monkeypatch.setattr(grpo, "create_model_from_path", lambda *a, **k: llama())
    with pytest.raises(UnsupportedOperation, match=f"a trainer with {named}"):
        select_answers(make(tmp_path, **REFUSED[named]))


def test_other_trainers_and_models_are_refused(tmp_path):
    # Red when: an argument is looked at in the first step alone.
    from transformers import MixtralConfig, MixtralForCausalLM

    with pytest.raises(InvalidInput, match=r"a Linear, but a trl\.GRPOTrainer was needed"):
        select_answers(nn.Linear(2, 2))
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 2, "output_router_logits": True}
    experts = MixtralForCausalLM(MixtralConfig(**sizes, **heads, pad_token_id=1, eos_token_id=2))
    with pytest.raises(UnsupportedOperation, match="a loss of the experts' router"):
        select_answers(make(tmp_path, experts))
    trainer = make(tmp_path)
    with pytest.raises(InvalidInput, match="advantages='kept' without a selector"):
        select_answers(trainer, advantages="kept")
    with pytest.raises(InvalidInput, match="advantages"):
        select_answers(trainer, rowprop.TopK(0.5), advantages="some")
    with pytest.raises(InvalidInput, match="equal_rewards"):
        select_answers(trainer, equal_rewards=True)
    with pytest.raises(InvalidInput, match=r"selector was needed"):
        select_answers(trainer, rowprop.TopK)
    trainer.loss_type = "new"
    with pytest.raises(UnsupportedOperation, match="loss_type='new', which was not checked"):
        select_answers(trainer)
    trainer.loss_type = "grpo"
    trainer.__class__ = type("Mine", (type(trainer),), {"_compute_loss": lambda self, model, inputs: None})
    with pytest.raises(UnsupportedOperation, match="a loss of its own in a subclass"):
        select_answers(trainer)


def test_a_batch_of_images_is_refused(tmp_path):
    # Red when: an entry that the forward reads is left at all answers.
    trainer = make(tmp_path)
    select_answers(trainer)
    with pytest.raises(UnsupportedOperation, match="a batch with pixel_values"):
        gradients(trainer, batch_of(trainer) | {"pixel_values": torch.zeros(8, 3)})


def test_evaluation_is_untouched_and_the_handle_gives_the_trainer_back(tmp_path):
    # Red when: the forward of an evaluation is cut as well, a second handle stands for the first, an attribute stays.
    plain, ours = (make(tmp_path, eval_strategy="no", per_device_eval_batch_size=8) for _ in range(2))
    handle = select_answers(ours)
    with pytest.raises(InvalidInput, match="selects already"):
        select_answers(ours)
    for trainer in (plain, ours):
        trainer.eval_dataset = trainer.eval_dataset.select(range(2))
        torch.manual_seed(0)
        trainer.evaluate()
    told, ours_told = (trainer.state.log_history[-1] for trainer in (plain, ours))
    others = {key for key in told if told[key] != ours_told[key]}
    assert others <= {key for key in told if "second" in key or "time" in key}
    handle.remove()
    handle.remove()
    assert set(vars(ours)) == set(vars(plain))
    forwards = forwards_of(ours)
    train(ours)
    assert [answers for answers, _ in forwards] == [8] * STEPS
    assert "kept" not in logs_of(ours)[0]
