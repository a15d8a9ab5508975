"""TRL: an SFTTrainer's head costs the tokens with a label, a GRPOTrainer's update the answers that have a gradient."""

from __future__ import annotations

import functools
import types
from collections.abc import Mapping
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rowprop.backprop.pick import Attention, pick
from rowprop.backprop.skip import skip_zeros
from rowprop.checks import check_choice, check_entries, check_kind
from rowprop.errors import InvalidInput, UnsupportedOperation
from rowprop.integrations import shared
from rowprop.selection import Context, MaxVariance, PerClass, Stateful, TopK
from rowprop.selection.base import Selector, asked, check_selector, keep_of
from rowprop.selection.selectors import Keep


def pick_answers(trainer: Any, *, attention: Attention = "exact") -> None:
    """Let an SFTTrainer run its head, and the backward below it, for the tokens with a label alone.

    Losses and metrics stay TRL's: its own head is handed, through :func:`~rowprop.pick`, the K hidden states whose next
    token has a label other than -100. Batches may be padded, packed or free of padding.

    Args:
        trainer: A ``trl.SFTTrainer`` of TRL 1.15 or newer, with or without LoRA. Its model is changed in place.
        attention: ``"exact"`` (default): the gradient is that of the trainer alone. ``"cut"``: keys and values of
            tokens without a label take no gradient; see :func:`~rowprop.pick`.

    Raises:
        MissingExtra: TRL is not installed, or is older than 1.15.
        InvalidInput: ``trainer`` is no SFTTrainer, its model has no backbone of its own, or ``attention`` is unknown.

    Cost:
        A copy of the K hidden states, for whose count the host waits, as TRL's own head does on CUDA. The head costs K
        tokens, and so does the backward below it until an op mixes tokens.

    Exactness:
        Exact by default, up to the order of sums. ``"cut"`` is biased.
    """
    trl = shared.module_of("trl", least="1.15")
    check_choice("pick_answers", "attention", attention, ("exact", "cut"))
    check_kind("pick_answers", "trainer", trainer, trl.SFTTrainer, "a trl.SFTTrainer was needed.")
    model = shared.unwrapped(trainer)  # TRL gave its forward the head
    if model.base_model is model:
        flaw = "no backbone that is a module of its own, so its head is not apart from it"
        raise InvalidInput(f"the model {type(model).__name__} has {flaw}; pick the losses of its tokens instead.")
    whole = model.forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not kwargs.get("fused_lm_head"):
            return whole(*args, **kwargs)
        labels, shifted = kwargs.pop("labels", None), kwargs.pop("shift_labels", None)
        following: Tensor = F.pad(labels[:, 1:], (0, 1), value=shared.IGNORED) if shifted is None else shifted  # (N, T)
        kept = following != shared.IGNORED

        def narrow(backbone: Any, given: Any, output: Any) -> Any:
            hidden = output.last_hidden_state
            output.last_hidden_state = pick(hidden, kept.to(hidden.device), attention=attention).unsqueeze(0)
            return output

        with self.base_model.register_forward_hook(narrow):
            return whole(*args, shift_labels=following[kept].unsqueeze(0), **kwargs)

    functools.update_wrapper(forward, cast(Any, type(model).forward))  # `generate` reads the signature
    model.forward = types.MethodType(forward, model)


# The loss types in which an answer without advantage has no gradient, and in which the advantage is a factor.
_CHECKED = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo", "cispo", "sapo", "vespo")
# The entries of a batch that do not change the model's forward of an answer.
_ROWWISE = {
    "prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "advantages", "num_items_in_batch",
    "old_per_token_logps", "importance_sampling_ratio", "sampling_per_token_logps", "tool_mask",
}  # fmt: skip


def select_answers(
    trainer: Any, selector: Selector | None = None, *, advantages: Literal["all", "kept"] = "all",
    equal_rewards: Literal["train", "drop"] = "train",
) -> SelectedAnswers:  # fmt: skip
    """Have a GRPOTrainer's update pay for the answers that have a gradient: one line between making it and training.

    Answers whose advantage is exactly 0 (groups that are all right or all wrong), and answers none of whose tokens
    count, leave before the forward of the update; those clipped in all their tokens before the backward below TRL's
    head. Loss and gradient stay TRL's own, over all answers. Each micro-batch still has one forward and one backward on
    each process; one without an answer left runs two tokens. The handle's ``remove()`` gives the trainer's own back.

    All metrics stay TRL's, but ``entropy`` is the mean over the tokens that went through the forward, and in
    ``vespo/phi_seq_mean`` the other answers count as if the policy had not moved. Also logged, over all processes:
    ``forwarded`` and ``kept``, the shares of the answers that the forward ran for, and that had a gradient.

    Args:
        trainer: A ``trl.GRPOTrainer`` of TRL 1.16 or newer.
        selector: Chooses among all answers of a generation, of all processes, by their advantages; the others leave
            before the forward. Classes are the prompts: ``PerClass(RandomRows(0.5))`` keeps half of the answers to
            each. Default None: no more answers leave than have no gradient.
        advantages: ``"all"`` (default): TRL's. ``"kept"``: normalised by ``scale_rewards`` over a prompt's kept ones.
        equal_rewards: ``"drop"``: answers to a prompt whose rewards are all equal (the largest equals the smallest)
            get an advantage of exactly 0, so they leave before the forward. ``"train"`` (default): they keep the
            advantage that TRL computes, which rounding can make nonzero.

    Raises:
        MissingExtra: TRL is not installed, or is older than 1.16.
        InvalidInput: ``trainer`` is no GRPOTrainer or selects already, ``selector`` is none, or a choice is unknown.
        UnsupportedOperation: A term of the loss reaches answers without advantage (``beta``, an entropy bonus, a
            quantile of the entropies, a router's loss, a loss of a subclass), or a setting was not checked: images,
            DeepSpeed, tensor, context or sequence parallelism.

    Cost:
        For each micro-batch an all-reduce of five numbers, and the host waits for the count of its answers; one look at
        the gradient of the hidden states. A selector needs the advantages gathered. ``equal_rewards="drop"`` copies the
        rewards of each generation to the host.

    Exactness:
        Without a selector exact, up to the order of sums, for a model whose forward treats each answer alone, without
        dropout. ``equal_rewards="drop"`` changes the gradient beside TRL's by what rounding added: TRL 1.16 computes
        advantages of 6e-4 for eight rewards of 0.7 and of 0.37 for eight of 1000.1; with
        ``multi_objective_aggregation="normalize_then_sum"``, of 0.7 where the rewards differ in no group of the batch.
        A selected answer's advantage is multiplied by its weight times the number of answers: an unbiased selector
        keeps the expected gradient.

    References:
        Shao et al., "DeepSeekMath", 2024, arXiv:2402.03300 (GRPO).
    """
    trl = shared.module_of("trl", least="1.16")
    check_kind("select_answers", "trainer", trainer, trl.GRPOTrainer, "a trl.GRPOTrainer was needed.")
    if isinstance(getattr(trainer._compute_loss, "__self__", None), SelectedAnswers):
        raise InvalidInput("select_answers got a trainer that selects already; call remove() on its handle first.")
    check_choice("select_answers", "advantages", advantages, ("all", "kept"))
    check_choice("select_answers", "equal_rewards", equal_rewards, ("train", "drop"))
    if selector is None and advantages == "kept":
        raise InvalidInput("select_answers got advantages='kept' without a selector; give one, or leave it out.")
    if selector is not None:
        check_selector("select_answers", selector)
    unchecked, each_alone = "which was not checked", trainer.multi_objective_aggregation != "sum_then_normalize"
    unfit = {  # what may give answers without advantage a gradient
        f"beta={trainer.beta}, a divergence from the reference": trainer.beta != 0.0,
        "an entropy bonus": trainer._entropy_bonus_enabled,
        f"top_entropy_quantile={trainer.top_entropy_quantile}, of all tokens": trainer.top_entropy_quantile < 1.0,
        "a loss of the experts' router": trainer.aux_loss_enabled,
        "a loss of its own in a subclass": type(trainer)._compute_loss is not trl.GRPOTrainer._compute_loss,
        f"loss_type={trainer.loss_type!r}, {unchecked}": trainer.loss_type not in _CHECKED,
        f"DeepSpeed, or tensor, context or sequence parallelism, {unchecked}": shared.splits_rows(trainer),
        f"a model of images, {unchecked}": trainer._is_vlm,
        f"rewards normalised each by itself and advantages='kept', {unchecked}": each_alone and advantages == "kept",
    }
    for term in (term for term, there in unfit.items() if there):
        needed = "answers without advantage were needed that have no gradient"
        remedy = "train without it, or without select_answers."
        raise UnsupportedOperation(f"select_answers got a trainer with {term}, but {needed}; {remedy}")
    return SelectedAnswers(trainer, selector, advantages, drops_equal=equal_rewards == "drop")


def pods(trainer: Any, *, keep: Keep = 0.25) -> SelectedAnswers:
    """Have a GRPOTrainer train by PODS: on the answers to each prompt whose rewards have the largest variance.

    Advantages are normalised within the kept answers; errors and the handle are those of :func:`select_answers`. One
    answer to each prompt is refused in training.

    Args:
        trainer: As for :func:`select_answers`.
        keep: Fraction of each prompt's answers that is kept, in (0, 1], or a schedule, at least two answers; default
            0.25, this package's, so for five answers or more.

    Bias:
        Biased: each kept answer counts ``1/K``, by another advantage.

    References:
        Xu, Savani, Fang, Kolter, "Not All Rollouts are Useful: Down-Sampling Rollouts in LLM Reinforcement Learning",
        2025, arXiv:2504.13818; YixuanEvenXu/pods.
    """
    return select_answers(trainer, PerClass(MaxVariance(keep)), advantages="kept")


def cppo(trainer: Any, *, keep: Keep = 0.5) -> SelectedAnswers:
    """Have a GRPOTrainer train by CPPO: on the answers to each prompt whose advantages are furthest from 0.

    Errors and the handle are those of :func:`select_answers`.

    Args:
        trainer: As for :func:`select_answers`.
        keep: Fraction of each prompt's answers that is kept, in (0, 1], or a schedule: 1 less the pruning rate.
            Default 0.5, as in the scripts of the authors.

    Bias:
        Biased: each kept answer counts ``1/K``.

    References:
        Lin, Lin, Xie, Ji, "CPPO: Accelerating the Training of Group Relative Policy Optimization-Based Reasoning
        Models", 2025, arXiv:2503.22342; lzhxmu/CPPO.
    """
    furthest = TopK(keep)
    return select_answers(trainer, PerClass(lambda advantages, context: furthest(advantages.abs(), context)))


class SelectedAnswers:
    """The handle of a GRPOTrainer whose update runs for some answers, made by :func:`select_answers`.

    Attributes:
        num_rows: Answers in the last micro-batch of this process.
        num_forwarded: Of these, those that the forward ran for.
    """

    def __init__(
        self, trainer: Any, selector: Selector | None, advantages: Literal["all", "kept"], *, drops_equal: bool
    ) -> None:
        self._trainer, self._selector, self._advantages = trainer, selector, advantages
        self._drops_equal = drops_equal
        self._generator = torch.Generator().manual_seed(trainer.args.seed)  # the same on all processes
        self._inputs: Mapping[str, Any] | None = None  # of the micro-batch whose loss is computed
        self._rewards = torch.empty(0)  # of the last generation, (N, 1); (N, F) where TRL normalises F functions alone
        self._entropy: list[Tensor] = []  # the sum over the tokens that went through the forward, and their number
        self.num_rows = self.num_forwarded = 0
        replaced: dict[str, Any] = {
            "training_step": self._training_step,
            "_compute_loss": self._compute_loss,
            "_get_per_token_logps_and_entropies": self._logps_and_entropies,
        }
        if selector is not None or drops_equal:
            replaced["_calculate_rewards"] = self._calculate_rewards
            replaced["_generate_and_score_completions"] = self._generate
        if selector is not None:
            replaced |= shared.with_state(trainer, self._state, self._resume)
        self._own = shared.Replaced(trainer, replaced)
        # Answers that are clipped in all their tokens, which is not known before the backward.
        self._clipped = skip_zeros(cast("nn.Module", shared.unwrapped(trainer).base_model), unit="row")

    @property
    def num_kept(self) -> int:
        """Of the answers that the last forward ran for, those that had a gradient."""
        record = self._clipped.record
        return self.num_forwarded if record is None or record.live is None else min(record.live, self.num_forwarded)

    def remove(self) -> None:
        """Give the trainer its own training back."""
        self._own.give_back()
        self._clipped.remove()

    def _training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """Run the trainer's step, and log how many answers it ran for."""
        loss = self._own["training_step"](*args, **kwargs)
        accelerator, metrics = self._trainer.accelerator, self._trainer._metrics["train"]
        counts = torch.tensor([self.num_rows, self.num_forwarded, self.num_kept], device=accelerator.device)
        told = torch.cat([counts.float(), torch.stack(self._entropy).float()])
        rows, forwarded, kept, entropy, tokens = accelerator.reduce(told, "sum").tolist()
        if forwarded < rows:
            metrics["entropy"][-1] = entropy / tokens if tokens else float("nan")  # TRL leaves a NaN out of its log
        metrics["forwarded"].append(forwarded / rows)
        metrics["kept"].append(kept / rows)
        return loss

    def _compute_loss(self, model: Any, inputs: Mapping[str, Any]) -> Tensor:
        """Have TRL compute its loss, of log-probabilities that the forward of some answers gave."""
        if not self._trainer.model.training:
            return self._own["_compute_loss"](model, inputs)
        if other := sorted(set(inputs) - _ROWWISE):
            came = f"a batch with {', '.join(other)}, which was not checked"
            raise UnsupportedOperation(f"select_answers got {came}; train without select_answers.")
        self._inputs = inputs
        try:
            return self._own["_compute_loss"](model, inputs)
        finally:
            self._inputs = None

    def _logps_and_entropies(
        self, model: Any, input_ids: Tensor, attention_mask: Tensor, logits_to_keep: int, *args: Any, **kwargs: Any
    ) -> tuple[Any, ...]:
        """The log-probabilities and entropies of all answers, (N, C): those that left have ones that stand in."""
        own = self._own["_get_per_token_logps_and_entropies"]
        if self._inputs is None:  # of a generation
            return own(model, input_ids, attention_mask, logits_to_keep, *args, **kwargs)
        inputs, shape = self._inputs, (len(input_ids), logits_to_keep)
        mask = inputs["completion_mask"] * inputs.get("tool_mask", 1)
        # A NaN is not 0, so it stays. An answer whose tokens do not count has no gradient either.
        live = (inputs["advantages"] != 0).view(shape[0], -1).any(1) & mask.any(1)
        rows = live.nonzero().squeeze(1)
        self.num_rows, self.num_forwarded = shape[0], len(rows)
        if len(rows):
            ids, attended, keep = input_ids[rows], attention_mask[rows], logits_to_keep
        else:  # all processes need the same number of forwards and backwards; run the smallest
            first = input_ids.shape[1] - logits_to_keep - 1
            ids, attended, keep = input_ids[:1, first : first + 2], attention_mask[:1, first : first + 2], 1
        logps, entropies, aux = own(model, ids, attended, keep, *args, **kwargs)
        counted = mask[rows]
        self._entropy = [(entropies.detach() * counted).sum() if len(rows) else counted.sum(), counted.sum()]
        if len(rows) == shape[0]:
            return logps, entropies, aux
        # The ratio of an answer that left is 1.
        stand_in = inputs.get("old_per_token_logps", logps.new_zeros(shape)).to(logps.dtype)
        if len(rows):
            logps = stand_in.index_copy(0, rows, logps)
        else:
            logps = stand_in + F.pad(logps - logps.detach(), (0, shape[1] - 1, 0, shape[0] - 1))
        return logps, torch.zeros_like(stand_in), aux

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> Tensor:
        """Remember the rewards of all processes' answers as TRL normalises them; NaN where there is none."""
        by_function = self._own["_calculate_rewards"](*args, **kwargs)
        rewards = by_function * self._trainer.reward_weights.to(by_function.device)
        if self._trainer.multi_objective_aggregation == "sum_then_normalize":
            rewards = rewards.nansum(1, keepdim=True).masked_fill(by_function.isnan().all(1, keepdim=True), torch.nan)
        self._rewards = rewards.cpu()
        return by_function

    def _generate(self, inputs: Any) -> dict[str, Any]:
        """Generate answers. Those that leave get an advantage of 0; a selector gives the others their weight."""
        output = self._own["_generate_and_score_completions"](inputs)
        trainer, given = self._trainer, output["advantages"]
        if not trainer.model.training:
            return output
        if given.dim() != 1:
            needed = "one for each answer was needed; train without a selector and with equal_rewards='train'."
            raise UnsupportedOperation(f"select_answers got advantages of shape {tuple(given.shape)}, but {needed}")
        whole = cast(Tensor, trainer.accelerator.gather(given)).cpu()
        if self._drops_equal:
            whole = whole.masked_fill(_equal(self._rewards, trainer.num_generations), 0)
        if self._selector is not None:
            whole = self._selected(self._selector, whole)
        first = trainer.accelerator.process_index * len(given)
        output["advantages"] = whole[first : first + len(given)].to(given)
        return output

    def _selected(self, selector: Selector, whole: Tensor) -> Tensor:
        """The advantages of all processes' answers, (N,), after the selector."""
        trainer = self._trainer
        prompts = torch.arange(len(whole)) // trainer.num_generations
        context = Context(shared.progress_of(trainer), classes=prompts, generator=self._generator)
        if self._advantages == "all" and keep_of(selector, context) == 1:
            return whole
        selection = asked(selector, whole, context)
        kept = whole[selection.rows]
        if self._advantages == "kept":
            if len(whole) and int(prompts[selection.rows].bincount(minlength=1).max()) < 2:
                raise InvalidInput(
                    f"select_answers got a selection of one of the {trainer.num_generations} answers to each prompt, "
                    "whose advantage among itself is 0, but two or more were needed; give a larger keep, or "
                    "GRPOConfig(num_generations=...) more answers."
                )
            rewards = self._rewards[selection.rows, 0]
            kept = _normalised(rewards, prompts[selection.rows], trainer.scale_rewards)
            if self._drops_equal:
                kept = kept.masked_fill(_equal(self._rewards, trainer.num_generations)[selection.rows], 0)
        return torch.zeros_like(whole).index_copy(0, selection.rows, kept * selection.weights.to(kept) * len(whole))

    def _state(self) -> dict[str, Any]:
        state = {"selector": self._selector.state_dict()} if isinstance(self._selector, Stateful) else {}
        return {"generator": self._generator.get_state(), **state}

    def _resume(self, state: dict[str, Any]) -> None:
        self._generator.set_state(state["generator"])
        if isinstance(self._selector, Stateful):
            check_entries("select_answers", state, ["selector"])
            self._selector.load_state_dict(state["selector"])


def _equal(rewards: Tensor, group: int) -> Tensor:
    """Which answers (N,) are of a group whose rewards, (N, 1 or F), are all equal; answers without one do not count."""
    grouped = rewards.view(-1, group, rewards.shape[1])
    lacking = grouped.isnan()
    highest = grouped.masked_fill(lacking, -torch.inf).amax(1)
    lowest = grouped.masked_fill(lacking, torch.inf).amin(1)
    return (highest <= lowest).all(1).repeat_interleave(group)


def _normalised(rewards: Tensor, prompts: Tensor, scale: str) -> Tensor:
    """The advantages (K,) of kept answers by TRL's formula. One without a reward (NaN), or alone, has 0."""
    own = (prompts[:, None] == prompts) & ~rewards.isnan()  # (K, K): of the same prompt
    counts = own.sum(1)
    apart = rewards - torch.where(own, rewards, 0).sum(1) / counts
    if scale == "group":
        around = torch.where(own, apart, 0).square().sum(1)  # all of a prompt have the same mean
        apart = apart / ((around / (counts - 1).clamp(min=1)).sqrt() + 1e-4)
    elif scale == "batch":
        known = rewards[~rewards.isnan()]
        apart = apart / (known.std(correction=min(1, max(0, len(known) - 1))) + 1e-4)
    return apart.nan_to_num(0.0)
