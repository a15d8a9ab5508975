"""VCAS's control: s and nu follow variances that plain backwards give, draws are unbiased, and a training resumes."""

from __future__ import annotations

import copy
import io
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rowprop import recipes
from rowprop.errors import InvalidInput
from rowprop.thinning import vcas

pytestmark = pytest.mark.usefixtures("one_thread")
ROWS = 12
PLACES = ("4", "2", "0")
"""The blocks, from the loss on."""

Batch = tuple[Tensor, Tensor]


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[m for _ in range(3) for m in (nn.Linear(5, 5), nn.Tanh())]).double()


def batches(count: int) -> list[Batch]:
    """A few rows hold most of the gradient."""
    scale = torch.linspace(0.1, 2, ROWS, dtype=torch.float64).pow(3).view(ROWS, 1)
    return [(torch.randn(ROWS, 5, dtype=torch.float64), scale * torch.randn(ROWS, 5).double()) for _ in range(count)]


def losses_fn(model: nn.Module, batch: Batch) -> Tensor:
    return (model(batch[0]) * 2 - batch[1]).square().mean(1)


def made(model: nn.Module, **options: Any) -> vcas.Vcas:
    given = {"every": 1, "alpha": 0.15, "beta": 0.7, "generator": torch.Generator().manual_seed(1), **options}
    return recipes.vcas(model, losses_fn, **given)


def by_hand(model: nn.Module, batch: Batch, factors: dict[str, Tensor]) -> tuple[list[Tensor], dict[str, Any]]:
    """Gradients of a plain backward in which each row's gradient is multiplied after each block, 0 for a row left out.

    Returns:
        The gradients of all parameters, and for each block its input and the gradient of its output, multiplied.
    """
    x, inner = batch[0], {}
    for name, module in model.named_children():
        y = module(x.clone())
        if name in PLACES:
            inner[name] = [x.detach(), None]

            def hook(grad: Tensor, name: str = name) -> Tensor:
                inner[name][1] = grad * factors[name].unsqueeze(1) if name in factors else grad
                return inner[name][1]

            y.register_hook(hook)
        x = y
    loss = (x * 2 - batch[1]).square().mean()
    return list(torch.autograd.grad(loss, list(model.parameters()))), inner


def square(one: list[Tensor], other: list[Tensor]) -> float:
    return sum(float((a - b).square().sum()) for a, b in zip(one, other, strict=True))


def closed_form(norms: list[float], share: float) -> float:
    """The variance of keeping ``share`` of some pairs with probabilities min(1, c * norm)."""
    count = max(1, math.ceil(share * len(norms) - 1e-9))
    if count == len(norms):
        return 0.0
    low, high = 0.0, 1e12
    for _ in range(200):
        c = (low + high) / 2
        low, high = (c, high) if sum(min(1, c * n) for n in norms) < count else (low, c)
    return sum((1 - min(1, low * n)) / min(1, low * n) * n * n for n in norms)


def smallest_share(norms: list[float], s: float) -> float:
    """The share of the rows, the largest first, that it takes to hold s of the sum."""
    held = 0.0
    for count, norm in enumerate(sorted(norms, reverse=True), 1):
        held += norm
        if held >= s * sum(norms):
            return count / len(norms)
    return 1.0


def sign(value: float) -> int:
    return (value > 0) - (value < 0)


def test_the_shares_follow_the_variances_of_plain_backwards(monkeypatch: pytest.MonkeyPatch):
    # Red when: V_sgd is not halved, or V_act is that of one pass; the sign of s or of nu is turned; rho is not that of
    # the block before at least; V_w is of the rows of the exact gradient; pairs are drawn in a sampled pass.
    model, steps = mlp(), batches(14)
    step = made(model, tau=0.15, tau_pairs=0.02)
    drawn: list[dict[str, Tensor]] = []
    choose = vcas.VcasThinning._choose

    def spy(self: Any, place: str, *arguments: Any) -> Any:
        chosen = choose(self, place, *arguments)
        if self.pairs.probe == "rows":
            if place == PLACES[0]:
                drawn.append({})
                self.alive = torch.arange(ROWS)
            self.alive = self.alive[chosen[0]]
            drawn[-1][place] = torch.zeros(ROWS, dtype=torch.float64).index_put((self.alive,), chosen[1])
        return chosen

    monkeypatch.setattr(vcas.VcasThinning, "_choose", spy)
    s, nu = 1.0, dict.fromkeys(PLACES, 1.0)
    signs = {"s": set[int](), "nu": set[int]()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    last = None
    for number, batch in enumerate(steps):
        drawn.clear()
        before = copy.deepcopy(model)
        loss, record = step(batch)
        assert record.controlled == (number > 0)
        if last is not None:
            plain = [by_hand(before, each, {}) for each in (last, batch)]
            sampled = [by_hand(before, each, drawn[2 * i + j]) for i, each in enumerate((last, batch)) for j in (0, 1)]
            between = square(plain[0][0], plain[1][0]) / 2
            added = sum(square(one[0], plain[n // 2][0]) for n, one in enumerate(sampled)) / 4
            signs["s"].add(sign(added - 0.15 * between))
            s = min(1.0, s + 0.15 * sign(added - 0.15 * between))
            least = 0.0
            for place in reversed(PLACES):
                shares = [smallest_share(inner[place][1].norm(dim=1).tolist(), s) for _, inner in plain]
                least = max(least, sum(shares) / 2)
                assert record.keep[place] == pytest.approx(least)
                weight = [name for name, _ in model.named_parameters()].index(f"{place}.weight")
                between_here = square([plain[0][0][weight]], [plain[1][0][weight]]) / 2
                v_w = 0.0
                for (_, inner), factors in zip(sampled, drawn, strict=True):
                    x, dz = inner[place]
                    alive = factors[place] > 0
                    v_w += closed_form((dz.norm(dim=1) * x.norm(dim=1))[alive].tolist(), nu[place]) / 4
                signs["nu"].add(sign(v_w - 0.02 * between_here))
                nu[place] = min(1.0, nu[place] * 0.7 ** -sign(v_w - 0.02 * between_here))
            assert record.s == pytest.approx(s)
            assert record.variance == pytest.approx(added / between)
            assert record.pairs == pytest.approx({f"{place}/1": share for place, share in nu.items()})
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        last = batch
    assert signs == {"s": {-1, 1}, "nu": {-1, 1}}


def steered() -> tuple[nn.Module, vcas.Vcas]:
    model = mlp()
    step = made(model, tau=1.0, tau_pairs=0.3)
    for batch in batches(4):
        step(batch)[0].backward()
    return model, step


def gradient(model: nn.Module, loss: Tensor) -> Tensor:
    model.zero_grad()
    loss.backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def test_the_gradient_is_the_exact_one_on_average():
    # Red when: rows or pairs are not divided by their probabilities.
    model, step = steered()
    batch = batches(1)[0]
    with step.handle.paused():
        exact = gradient(model, losses_fn(model, batch).mean())
    draws = torch.stack([gradient(model, losses_fn(model, batch).mean()) for _ in range(800)])
    assert max(step.handle.record.keep.values()) < 0.8 and step.handle.record.pairs < 0.8
    error = draws.std(0) / len(draws) ** 0.5
    varies = error > 1e-12 * exact.abs().max()
    assert float(varies.double().mean()) > 0.9
    assert float(((draws.mean(0) - exact)[varies] / error[varies]).abs().max()) < 5


def test_a_control_leaves_nothing_behind():
    # Red when: the control's passes add to .grad, move BatchNorm's statistics, or draw from torch's own generator.
    model = nn.Sequential(mlp(), nn.BatchNorm1d(5).double(), nn.Dropout(0.3))
    plain = copy.deepcopy(model)
    step, (one, other) = made(model), batches(2)
    for number, batch in enumerate((one, other)):
        torch.manual_seed(number)
        loss, record = step(batch)
        torch.manual_seed(number)
        assert torch.equal(loss, losses_fn(plain, batch).mean())
    assert record.controlled
    assert all(p.grad is None for p in model.parameters())
    for name, buffer in plain.named_buffers():
        assert torch.equal(model.get_buffer(name), buffer), name


def test_a_handle_that_is_removed_has_no_controls():
    # Red where the step does not ask: two forwards and six backwards in each, for nothing.
    model = mlp()
    step = made(model)
    first, *rest = batches(4)
    step(first)[0].backward()
    with step.handle.paused():
        assert not step(rest[0])[1].controlled
    assert step(rest[1])[1].controlled
    step.handle.remove()
    assert not step(rest[2])[1].controlled


def test_the_first_control_knows_the_order_of_the_blocks():
    # Red where the passes of a control do not sort them: it comes before any thinned backward here, and the least share
    # would be handed on from the output.
    model = mlp()
    step = made(model)
    one, other = batches(2)
    with step.handle.paused():
        step(one)[0].backward()
    assert step(other)[1].controlled
    assert tuple(step.handle.rows.shares) == PLACES[::-1]


def test_a_control_that_fails_leaves_nothing_to_the_next():
    # Red where the numbers of the passes before the error are kept.
    model = mlp()
    step, (one, other) = made(model), batches(2)
    step(one)
    hook = model[0].weight.register_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        step(other)
    hook.remove()
    assert not (step.handle.rows.norms or step.handle.pairs.exact or step.handle.pairs.added)
    assert step(other)[1].controlled
    assert min(step.handle.pairs.nu.values()) < 1


@pytest.mark.parametrize("at", [3, 4, 5])
def test_resuming_goes_on_bit_for_bit(at: int):
    # Red when: the state lacks the number of the step, s, nu, the generator or, before a control, the last batch.
    steps = batches(10)

    def run(model: nn.Module, step: vcas.Vcas, given: list[Batch]) -> list[dict[str, Any]]:
        told = []
        for batch in given:
            loss, record = step(batch)
            loss.backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.sub_(0.05 * parameter.grad)
                    parameter.grad = None
            told.append(record.to_dict() | record.keep | record.pairs)
        return told

    model = mlp()
    step = made(model, every=2, tau=0.5)
    run(model, step, steps[:at])
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "step": step.state_dict()}, file)
    expected = run(model, step, steps[at:])
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    other = mlp()
    other.load_state_dict(saved["model"])
    resumed = made(other, every=2, tau=0.5, generator=torch.Generator().manual_seed(9))
    resumed.load_state_dict(saved["step"])
    assert run(other, resumed, steps[at:]) == expected
    assert expected[-1]["vcas/s"] < 0.8
    for got, wanted in zip(other.parameters(), model.parameters(), strict=True):
        assert torch.equal(got, wanted)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"every": 0}, "vcas got every=0"),
        ({"tau": 0.0}, "vcas got tau=0.0"),
        ({"tau_pairs": float("nan")}, "vcas got tau_pairs=nan"),
        ({"alpha": 1.5}, "vcas got alpha=1.5"),
        ({"beta": 1}, "vcas got beta=1"),
        ({"blocks": ["9"]}, "vcas got the block '9', which is not in the model"),
    ],
)
def test_bad_input_is_refused_in_a_sentence(changes: dict[str, Any], sentence: str):
    with pytest.raises(InvalidInput) as caught:
        made(mlp(), **changes)
    assert sentence in str(caught.value)


def test_a_state_of_another_kind_is_refused_and_nothing_is_loaded():
    _, step = steered()
    whole = step.state_dict()
    for change in (
        {"step": -1},
        {"thinning": {**whole["thinning"], "control": {**whole["thinning"]["control"], "s": 2.0}}},
        {"thinning": {**whole["thinning"], "pairs": {"passes": 0, "nu": {"4/1": 0.0}}}},
    ):
        with pytest.raises(InvalidInput):
            step.load_state_dict({**whole, **change})
    after = step.state_dict()
    assert after["thinning"]["control"] == whole["thinning"]["control"] and after["step"] == whole["step"]
