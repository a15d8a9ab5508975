"""A GRPO-style update: answers that cannot move the policy are not backpropagated, and nothing is lost.

The policy, a small causal transformer, sorts digits. A rule gives an answer the reward 1 where all of it is right, else
0. A group of answers is sampled to each prompt. The advantage of an answer is its reward, less the group's mean, over
the group's deviation. Each rollout serves several updates, with clipped ratios and no KL term. Two kinds of rows have a
gradient of exactly zero:

* Groups whose answers are all right or all wrong have no advantage. This is known before the forward of the update, so
  even the forward can be spared: ``take`` the other rows first.
* Some answers are clipped in every token, on the side that counts. This is known only after the forward, and the loss
  does not show it, because it is not zero. So `losses_and_live` looks at the ratios, and ``pick`` drops these answers.

With one ratio per token (GRPO) hardly any answer is clipped as a whole; with one ratio per answer (GSPO) many are. A KL
term against a reference policy has a gradient at every token and leaves no row to drop.

    python examples/grpo.py                     # one ratio per token
    python examples/grpo.py --ratios sequence   # one per answer

References:
    Shao et al., "DeepSeekMath", 2024, arXiv:2402.03300 (GRPO); Zheng et al., "Group Sequence Policy Optimization",
    2025, arXiv:2507.18071 (GSPO).
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import rowprop
from rowprop.batch import take

DIGITS, GROUP = 5, 8
CLIP = {"token": 0.2, "sequence": 3e-4}  # by what has a ratio
Rollout = dict[str, Tensor]  # tokens (N, 2 * DIGITS + 1), old_logp (N, DIGITS), advantages (N,)


class Policy(nn.Module):
    """A causal transformer over ten digits and a separator: tokens (N, T) -> logits (N, T, 11)."""

    def __init__(self, width: int = 96, layers: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, width)
        self.place = nn.Parameter(0.1 * torch.randn(2 * DIGITS + 1, width))
        block = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(block, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, 11)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of the token that follows each."""
        length = tokens.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        return self.head(self.blocks(self.embed(tokens) + self.place[:length], mask=mask, is_causal=True))


def answer_logp(policy: nn.Module, tokens: Tensor) -> Tensor:
    """Log-probability of each token of the answer, shape (N, DIGITS); the prompt's tokens are not asked."""
    logits = policy(tokens[:, :-1])[:, DIGITS:]
    return logits.log_softmax(-1).gather(-1, tokens[:, DIGITS + 1 :, None]).squeeze(-1)


def prompts(count: int, generator: torch.Generator) -> Tensor:
    """Digits and the separator, shape (count, DIGITS + 1)."""
    return F.pad(torch.randint(10, (count, DIGITS), generator=generator), (0, 1), value=10)


@torch.no_grad()
def rollout(policy: nn.Module, asked: Tensor, generator: torch.Generator) -> tuple[Rollout, Tensor]:
    """Sample the answers to each prompt; return the rollout for the update, and the rewards, (prompts, GROUP)."""
    tokens = asked.repeat_interleave(GROUP, 0)
    for _ in range(DIGITS):
        probabilities = policy(tokens)[:, -1].softmax(-1)
        tokens = torch.cat([tokens, torch.multinomial(probabilities, 1, generator=generator)], 1)
    right = tokens[:, DIGITS + 1 :] == tokens[:, :DIGITS].sort(1).values
    rewards = right.all(1).float().view(-1, GROUP)
    advantages = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-6)
    old = answer_logp(policy, tokens)
    return {"tokens": tokens, "old_logp": old, "advantages": advantages.flatten()}, rewards


def losses_and_live(policy: nn.Module, batch: Rollout, kind: str) -> tuple[Tensor, Tensor]:
    """The clipped objective of each answer, (N,), and whether it has a gradient: an advantage, a ratio not clipped."""
    logs = answer_logp(policy, batch["tokens"]) - batch["old_logp"]
    ratios = (logs.mean(1, keepdim=True) if kind == "sequence" else logs).exp()
    advantages, clip = batch["advantages"][:, None], CLIP[kind]
    losses = -torch.minimum(ratios * advantages, ratios.clamp(1 - clip, 1 + clip) * advantages).mean(1)
    clipped = torch.where(advantages > 0, ratios > 1 + clip, ratios < 1 - clip)
    return losses, (~clipped).any(1) & (batch["advantages"] != 0)


def objective(policy: nn.Module, batch: Rollout, kind: str, take_first: bool, pick_live: bool) -> Tensor:
    """The mean over all N answers: the forward of answers with an advantage, the backward of the live answers."""
    some = take(batch, batch["advantages"].nonzero().squeeze(1)) if take_first else batch
    losses, live = losses_and_live(policy, some, kind)
    return (rowprop.pick(losses, live) if pick_live else losses).sum() / len(batch["advantages"])


WAYS = {"full": (False, False), "pick": (False, True), "take": (True, False), "take, pick": (True, True)}


def compare(policy: nn.Module, batch: Rollout, kind: str) -> str:
    """Check that all ways have the same gradient, and time them side by side; a line of the table."""
    parameters = list(policy.parameters())
    times_s: dict[str, list[float]] = {way: [] for way in WAYS}
    grads: dict[str, tuple[Tensor, ...]] = {}
    for _ in range(8):
        for way, spared in WAYS.items():
            begin_s = time.perf_counter()
            grads[way] = torch.autograd.grad(objective(policy, batch, kind, *spared), parameters)
            times_s[way].append(time.perf_counter() - begin_s)
    each = [
        (want - got).abs().max() / want.abs().max().clamp_min(1e-30)
        for way in WAYS
        for want, got in zip(grads["full"], grads[way], strict=True)
    ]
    off = float(torch.stack(each).max())  # NaN if one is, which Python's max might not see
    if not off <= 1e-5:
        raise SystemExit(f"The gradients differ by {off:.1e} of their largest entry.")
    full_s, *others_s = (statistics.median(spans[1:]) for spans in times_s.values())  # the first round warms up
    with torch.no_grad():
        live = losses_and_live(policy, batch, kind)[1].float().mean()
    figures = f"{(batch['advantages'] != 0).float().mean():9.0%}  {live:4.0%}  {off:19.0e}  {1000 * full_s:13.1f}"
    return figures + "".join(f"  {other_s / full_s:10.2f}" for other_s in others_s)


def main(argv: list[str] | None = None) -> None:
    """Learn to sort a little, then by reward; a line of figures four times."""
    parser = argparse.ArgumentParser(description="Policy-gradient updates without the rows of zero gradient.")
    parser.add_argument("--ratios", choices=list(CLIP), default="token", help="one per token (default) or per sequence")
    parser.add_argument("--steps", type=int, default=16, help="rollouts, four updates each (default 16)")
    parser.add_argument("--warmup", type=int, default=100, help="supervised steps before (default 100)")
    parser.add_argument("--prompts", type=int, default=64, help=f"per rollout, {GROUP} answers each (default 64)")
    options = parser.parse_args(argv)
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    policy = Policy()
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-3)
    for _ in range(options.warmup):  # a policy that is never right has nothing to learn from
        asked = prompts(128, generator)
        (-answer_logp(policy, torch.cat([asked, asked[:, :DIGITS].sort(1).values], 1)).mean()).backward()
        optimizer.step()
        optimizer.zero_grad()

    optimizer = torch.optim.Adam(policy.parameters(), lr=3e-4)
    print("rollout  reward  advantage  live  gradients differ by  update: full, ms", end="")
    print("".join(f"  {way + ', ratio':>10}" for way in list(WAYS)[1:]))
    for step in range(options.steps):
        batch, rewards = rollout(policy, prompts(options.prompts, generator), generator)
        if not batch["advantages"].any():
            continue
        for update in range(4):
            objective(policy, batch, options.ratios, *WAYS["take, pick"]).backward()
            optimizer.step()
            optimizer.zero_grad()
            if update == 0 and (step + 1) % max(1, options.steps // 4) == 0:  # in the first, all ratios are 1
                print(f"{step + 1:7}  {rewards.mean():6.2f}  {compare(policy, batch, options.ratios)}")


if __name__ == "__main__":
    main()
