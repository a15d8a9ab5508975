"""Tokens that leave the gradient at random: its expectation, what is drawn, what it costs, and the control's plan."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rowprop
from rowprop.errors import InvalidInput
from rowprop.thinning.control import SHARES, Control, Seen, _planned_apart, carry
from rowprop.thinning.worth import Work
from thinning_models import capped, compared, gradient, kept, layers, resumed, thinned
from zoo import res, seq

pytestmark = pytest.mark.usefixtures("one_thread", "any_count")
WIDTH, TOKENS = 4, 6


def thin(model: nn.Module, keep: float = 0.5, **settings: Any) -> rowprop.thinning.Thinning:
    return rowprop.thin(model, keep=keep, unit="token", generator=torch.Generator().manual_seed(1), **settings)


def encoder(blocks: int = 2) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*layers(blocks), nn.Linear(WIDTH, 3)).double()


def inputs(rows: int = 5) -> Tensor:
    return torch.randn(rows, TOKENS, WIDTH, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


@pytest.mark.parametrize(("name", "picked"), [("bert", True), ("gpt", False), ("sequence first", True)])
def test_the_gradient_is_the_exact_one_on_average(name: str, picked: bool):
    # Red without the division by p, and where the tokens of sequences that come first are taken for others.
    found = thinned(name, picked, 75, unit="token", keep=0.3)
    assert float(found.off.abs().max()) < 5 and found.moved > 0.3


@pytest.mark.parametrize("first", [False, True], ids=["rows first", "tokens first"])
def test_tokens_without_a_gradient_are_never_drawn(first: bool, as_host: None):
    # All that have one are kept: each has the probability 1, so the gradient is the exact one. Red where a token of
    # zeros takes the place of another, and where all tokens are kept.
    model, x = encoder(1), inputs()
    if first:
        model[0] = layers(1, batch_first=False)[0].double()
        x = x.transpose(0, 1)
    live = (torch.arange(x.shape[0])[:, None] + torch.arange(x.shape[1])) % 3 == 1
    exact = gradient(model, (model(x).square().mean(2) * live).sum())
    handle = thin(model, keep=1.0, blocks=["0"])
    found = gradient(model, (model(x).square().mean(2) * live).sum())
    torch.testing.assert_close(found, exact, rtol=1e-12, atol=1e-14)
    assert kept(handle) == {"0": pytest.approx(1 / 3)}


def test_the_tokens_of_one_row_are_thinned(as_host: None):
    # As where sequences are packed without padding. Red where a batch of one row is left as it is.
    model, x = encoder(1), inputs(1)
    scale = torch.arange(TOKENS) % 2
    exact = gradient(model, (model(x).square().mean(2) * scale).sum())
    handle = thin(model, keep=1.0, blocks=["0"])
    found = gradient(model, (model(x).square().mean(2) * scale).sum())
    torch.testing.assert_close(found, exact, rtol=1e-12, atol=1e-14)
    assert kept(handle) == {"0": 0.5}


def test_the_draws_among_few_tokens_add_up_to_the_exact_gradient(as_host: None, monkeypatch: pytest.MonkeyPatch):
    # All draws, each with its probability: they change where the first point of the systematic sample passes an end.
    # Of 30 tokens 7 have a loss, of which 4 are kept. Red where the share is of all 30 (all 7 stay), where a factor is
    # for a probability of another count, and without factors.
    model, x = encoder(1), inputs()
    scale = torch.zeros(5, TOKENS, dtype=torch.float64)
    scale.view(-1)[::5] = torch.linspace(0.1, 2, 6, dtype=torch.float64)
    scale[4, 5] = 1.0
    out = model[0](x)
    (at_block,) = torch.autograd.grad((model[1](out).square().mean(2) * scale).sum(), out)
    norms = at_block.flatten(0, 1).norm(dim=1)
    ends = capped(norms[norms > 0], 4).cumsum(0)
    edges = torch.cat([ends.new_tensor([0.0, 1.0]), ends[:-1] % 1]).sort().values
    handle = thin(model, keep=0.5, blocks=["0"])
    loss = lambda: (model(x).square().mean(2) * scale).sum()  # noqa: E731
    total, moved = torch.zeros(()), 0.0
    with handle.paused():
        exact = gradient(model, loss())
    for low, high in zip(edges.tolist(), edges[1:].tolist(), strict=False):
        monkeypatch.setattr(handle, "_uniform", lambda offset=(low + high) / 2: offset)
        found = gradient(model, loss())
        total, moved = total + (high - low) * found, max(moved, float((found - exact).norm() / exact.norm()))
        assert kept(handle) == {"0": pytest.approx(4 / 30)}
    torch.testing.assert_close(total, exact, rtol=1e-9, atol=1e-12)
    assert moved > 0.01


def test_a_device_keeps_a_share_of_all_tokens(as_accelerator: None):
    # The host cannot know how many have a gradient. Red where the norms are read.
    model, x = encoder(1), inputs()
    handle = thin(model, keep=0.5, blocks=["0"])
    gradient(model, (model(x).square().mean(2) * (torch.arange(TOKENS) == 1)).sum())
    assert kept(handle) == {"0": 0.5}


def test_a_share_is_of_the_tokens_that_came_to_a_block():
    # Attention makes a gradient of all tokens again, here of the 3 sequences whose last token is drawn of 5. Red where
    # the second block's share is of the tokens that came to the first.
    model, x = encoder(), inputs()
    handle = thin(model, blocks=["0", "1"])
    held: list[Tensor] = []
    model[0].linear2.register_full_backward_hook(lambda _, __, grads: held.append(grads[0]))
    mask = torch.zeros(5, TOKENS, dtype=torch.bool)
    mask[:, -1] = True
    rowprop.pick(model(x).square().mean(2), mask).mean().backward()
    assert kept(handle) == {"1": 0.6, "0": 0.5}  # 3 of 5, and 9 of 18
    assert "50 to 60 % of the tokens" in repr(handle.record)
    assert int((held[0] != 0).any(2).sum()) == 9


def test_a_block_costs_its_drawn_tokens(as_host: None):
    # The products of an MLP's backward by their closed formula; red where they run at all tokens, and where half of all
    # tokens are drawn if a third of them has a loss.
    model = nn.Sequential(*(res(nn.Linear(WIDTH, 8), nn.GELU(), nn.Linear(8, WIDTH)) for _ in range(2))).double()
    thin(model, keep=0.5)
    for tokens, drawn in ((6, 15), (2, 5)):  # of each row so many have a loss
        loss = model(inputs().requires_grad_())[:, :tokens].square().mean()
        with rowprop.cost.count_flops() as flops:
            loss.backward()
        assert flops.total_flops == drawn * 2 * 4 * 2 * WIDTH * 8  # tokens, blocks, products, multiply and add


def test_attention_costs_the_drawn_queries(as_host: None):
    # Of 128 queries a block draws 32, padded to the most that a sequence has; each takes 5 products over all 32 keys.
    # Red where the rows that the tokens come from go through it whole.
    model = encoder()
    thin(model, keep=0.25)
    loss = model(torch.randn(4, 32, WIDTH, dtype=torch.float64)).square().mean()
    with rowprop.cost.count_flops() as flops:
        loss.backward()
    (attention,) = (count for op, count in flops.by_op.items() if "attention" in op)
    assert 2 * 32 <= attention / (5 * 2 * 32 * WIDTH) < 2 * 64  # two blocks


def test_what_was_saved_leaves_out_what_stays_at_all_tokens():
    # Red where keys and values count as saved.
    model = encoder()
    handle = thin(model)
    handle._worth.works = {"0": Work(exact=3.0, mixed=1.0), "1": Work(exact=1.0)}
    model(inputs()).square().mean().backward()
    assert kept(handle) == {"1": 0.5, "0": 0.5}
    assert handle.record.saved == pytest.approx((3 - 1 + 1) * 0.5 / 4)


def test_the_plan_is_the_cheapest_for_the_variance_that_it_carries():
    # Against all plans of four blocks, which add as much for any share from .5 on. Red where a draw at the top, which
    # all blocks carry, counts no more than one at the bottom: then half of the top block's tokens alone would leave.
    would = [
        [0.0 if share == 1 else adds if share >= 0.5 else 100.0 for share in SHARES] for adds in (0.94, *[0.96] * 3)
    ]
    plan = _planned_apart([[0.0, 0.0, *each] for each in would], 1.9)
    carried = sum(carries for _, carries in plan) / 4
    cheapest = min(
        sum(SHARES[i] for i in choice)
        for choice in product(range(len(SHARES)), repeat=4)
        if sum((4 - n) * would[n][i] for n, i in enumerate(choice)) / 4 <= carried + 1e-9
    )
    assert sum(share for share, _ in plan) == pytest.approx(cheapest)


@pytest.mark.usefixtures("always_drawn")
def test_the_norms_alone_steer_and_what_is_carried_counts(monkeypatch: pytest.MonkeyPatch):
    # Red where weight gradients are measured, whose tokens attention has mixed; where the draws above a block do not
    # count in what it carries; and where the shares are those of rows, of which blocks below the first draw hardly any.
    model, x, seen = encoder(3), inputs(), list[dict[str, list[Seen]]]()
    update = Control.update
    monkeypatch.setattr(Control, "update", lambda self, found: seen.append(dict(found)) or update(self, found))
    handle = rowprop.thin(model, tau=0.3, unit="token", generator=torch.Generator().manual_seed(0))
    scale = torch.logspace(0, -2, TOKENS, dtype=torch.float64)
    for _ in range(24):
        (model(x).square().mean(2) * scale).mean().backward()
    assert max(kept(handle).values()) < 1
    assert (handle._control.measured, handle._control.correction) == (0, 1)
    above, below = (seen[-1][place][0] for place in ("2", "1"))
    assert above.before == 0 < above.added
    assert below.before / below.total == pytest.approx(above.added / above.total)


def test_images_lose_rows():
    # Red where channels are taken for tokens.
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Conv2d(4, 4, 3)).double()
    thin(model, blocks=["1"])
    held: list[Tensor] = []
    model[0].register_forward_hook(lambda _, __, out: held.append(out) or out.retain_grad())
    model(torch.randn(6, 1, 8, 8, dtype=torch.float64)).square().mean().backward()
    live = held[0].grad.flatten(1) != 0
    assert (int(live.all(1).sum()), int(live.any(1).sum())) == (3, 3)


def normed() -> nn.Module:
    """A linear layer and a BatchNorm over all tokens of the batch."""
    across = lambda x: x.transpose(1, 2)  # noqa: E731
    return seq(nn.Linear(WIDTH, WIDTH), across, nn.BatchNorm1d(WIDTH), across, nn.Tanh())


@pytest.mark.parametrize("keep", [0.1, 0.5], ids=["of some rows", "of every row"])
def test_a_batch_norm_over_tokens_takes_all_rows(keep: float):
    # Its statistics mix all tokens of the batch. Red without the division by p.
    model, x = nn.Sequential(normed(), normed()).double(), inputs()
    scale = torch.linspace(0.1, 2, TOKENS, dtype=torch.float64)

    loss = lambda: (model(x).square().mean(2) * scale).mean()  # noqa: E731
    exact = gradient(model, loss())
    thin(model, keep=keep)
    assert float(compared(model, loss, exact, 150).off.abs().max()) < 5


def test_what_draws_above_added_is_carried_down():
    # Red where a gradient that attention mixed is taken for one without draws.
    seen = {place: [Seen(8, 4, 8, None, total, before, added)] for place, total, before, added in (
        ("2", 4.0, 0.0, 1.0), ("1", 10.0, 0.0, 0.8), ("0", 6.0, 1.0, 0.0),
    )}  # fmt: skip
    carry(seen)
    assert [(one[0].total, one[0].before) for one in seen.values()] == [(4, 0), (8, 2), (6, 1)]


@pytest.mark.usefixtures("always_drawn")
def test_it_goes_on_bit_for_bit_and_refuses_the_state_of_the_other_unit():
    # Red where the state of a training by rows is taken for one by tokens.
    model, x, scale = encoder(), inputs(), torch.linspace(0.1, 2, TOKENS, dtype=torch.float64)
    handle = resumed(model, lambda _: (model(x).square().mean(2) * scale).mean().backward(), tau=0.5, unit="token")
    assert min(kept(handle).values()) < 1
    other = rowprop.thin(encoder(), tau=0.5)
    with pytest.raises(InvalidInput, match="unit='token' but this handle has the other one"):
        other.load_state_dict(handle.state_dict())
    with pytest.raises(InvalidInput, match="unit"):
        rowprop.thin(encoder(), unit="tokens")
