"""The variance of thinning: the closed form at a block by Monte Carlo, looks against exact numbers, and the control."""

from __future__ import annotations

import copy
import io
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import rowprop
from rowprop.backprop.rowgrad import RowGrad
from rowprop.batch import map_tensors
from rowprop.thinning.control import LOOKS, Control
from rowprop.thinning.look import Look

pytestmark = pytest.mark.usefixtures("one_thread", "always_drawn")

ROWS = 16
DRAWS = 120


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


class Recurrent(nn.Module):
    """Blocks whose outputs are tuples."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.GRU(3, 6, batch_first=True), nn.GRU(6, 6, batch_first=True)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x, _ = layer(x)
        return x


def cnn() -> nn.Module:
    blocks = [nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.Tanh()) for a, b in ((1, 4), (4, 4), (4, 4))]
    return nn.Sequential(nn.Sequential(*blocks), nn.Conv2d(4, 2, 3))


def transformer() -> nn.Module:
    layers = [nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True) for _ in range(2)]
    return nn.Sequential(nn.Linear(3, 8), *layers, nn.Linear(8, 3))


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (lambda: nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3))), (6,)),
    "cnn": (cnn, (1, 6, 6)),
    "recurrent": (Recurrent, (5, 3)),
    "transformer": (transformer, (5, 3)),
}


def step(name: str) -> tuple[nn.Module, Callable[[], Tensor]]:
    """A model in float64, and a function that returns losses whose rows differ in size."""
    make, shape = MODELS[name]
    model = make().double()
    x = torch.randn(ROWS, *shape, dtype=torch.float64)
    scale = torch.linspace(0.05, 2, ROWS, dtype=torch.float64).square()
    return model, lambda: model(x).flatten(1).square().mean(1) * scale


def dense(grad: Tensor) -> Tensor:
    """The gradient as a plain tensor; a sliced one stays as it is for the ops below."""
    return grad.copied().clone() if type(grad) is RowGrad else grad.clone()


def spied(block: nn.Module) -> tuple[list[Tensor], list[Tensor]]:
    """Gradients that come to a thinned block, and those that it hands on."""
    arrived: list[Tensor] = []
    handed_on: list[Tensor] = []

    def between(_: nn.Module, __: Any, output: Any) -> Any:
        first = True

        def watched(tensor: Tensor) -> Tensor:
            nonlocal first
            if not first or not tensor.requires_grad:
                return tensor
            first = False
            tensor.register_hook(lambda grad: handed_on.append(dense(grad)))  # after the hook that thins
            alias = torch.ops.aten.alias(tensor)
            alias.register_hook(lambda grad: arrived.append(dense(grad)))
            return alias

        return map_tensors(watched, output)

    block.register_forward_hook(between)
    return arrived, handed_on


def closed_form(grads: Tensor, count: int) -> Tensor:
    """The sum of (1 - p) / p n^2 for each of several gradients, with p = min(1, c n) found by bisection."""
    norms = grads.flatten(2).norm(dim=2)
    low, high = torch.full((len(grads), 1), -20.0), torch.full((len(grads), 1), 20.0)
    for _ in range(60):
        middle = (low + high) / 2
        less = (norms * middle.exp()).clamp(max=1).sum(1, keepdim=True) < count
        low, high = torch.where(less, middle, low), torch.where(less, high, middle)
    p = (norms * high.exp()).clamp(max=1)
    return torch.where(norms > 0, (1 - p) / p * norms.square(), 0.0).sum(1)


@pytest.mark.parametrize("after", ["nothing", "a thinning", "pick"])
@pytest.mark.parametrize("name", MODELS)
def test_the_variance_handed_on_is_the_closed_form(name: str, after: str):
    # Red with p = count / A for all rows in ``inclusion``, and with independent draws of p / 2.
    model, losses = step(name)
    rows = torch.arange(2, ROWS)
    handle = rowprop.thin(model, keep=0.5)
    blocks = list(handle.blocks)
    below = after == "a thinning"
    thinned = blocks[:2] if below else blocks[-1:]
    handle.remove()
    handle = rowprop.thin(model, keep=0.5, blocks=thinned)
    if below:  # the block above keeps more
        handle._control.share = lambda place: 0.75 if place == thinned[1] else 0.4
    arrived, handed_on = spied(model.get_submodule(thinned[0]))
    count = {"nothing": 8, "a thinning": 7, "pick": 7}[after]
    for _ in range(DRAWS):
        loss = losses()
        (rowprop.pick(loss, rows) if after == "pick" else loss).sum().backward()
    before, after_it = torch.stack(arrived), torch.stack(handed_on)
    measured = (before - after_it).square().flatten(1).sum(1).mean()
    assert len(arrived) == DRAWS
    assert float(measured) == pytest.approx(float(closed_form(before, count).mean()), rel=0.2)


@pytest.mark.parametrize("rows", [3, 16, 64])
def test_a_look_finds_both_variances(rows: int, monkeypatch: pytest.MonkeyPatch):
    # Against numbers from every row's own gradient. A look takes 2 of 3 rows, and 32 of 64. Red with 3 of 3, with one
    # half left out of the whole, with ``between`` halved, and where the halves are not the rows of the draw.
    monkeypatch.setattr(sys.modules[__name__], "ROWS", rows)
    torch.manual_seed(1)
    model, losses = step("mlp")
    handle = rowprop.thin(model, tau=0.5)
    parameters = list(model.parameters())
    with handle.paused():
        each = torch.stack(
            [
                torch.cat([g.flatten() for g in torch.autograd.grad(loss, parameters, retain_graph=True)])
                for loss in losses()
            ]
        )
    spread = float((each - each.mean(0)).square().sum() * rows / (rows - 1))
    found: list[list[float]] = []
    drawn: list[float] = []

    def arrive(number: int, grad: Tensor, layout: Any, edge: Any) -> Any:
        if handle._look is None:
            if len(found) > len(drawn):
                return None  # at the blocks below
            handle._begun(number)
            handle._look = look = Look(model)
            found.append(look.take(grad, layout, edge, handle._uniform()).tolist())
            handle._look = None
            return None
        return handle._look.gives()

    handle._arrived = arrive
    exact = each.sum(0)
    for _ in range(150):
        for place in handle.blocks:
            handle._control.share(place)
            handle._control.shares[place].keep = 0.5
        model.zero_grad()
        losses().sum().backward()
        drawn.append(float((torch.cat([p.grad.flatten() for p in parameters]) - exact).square().sum()))
    added, between = (sum(column) / len(found) for column in zip(*found, strict=True))
    assert between == pytest.approx(spread, rel=0.15)
    if rows > 3:  # half of 3 rows are 2, and half of 2 are 1
        assert added == pytest.approx(sum(drawn) / len(drawn), rel=0.3)


def test_a_look_leaves_the_step_as_it_is():
    # The gradient of a backward with a look, against one of the same draws without. Red where a look's draws reach the
    # step's numbers, and where its backwards accumulate into .grad.
    model, losses = step("transformer")
    handle = rowprop.thin(model, tau=0.3)
    exact = None
    for number in range(1, LOOKS[0] + 1):
        model.zero_grad()
        losses().sum().backward()
        if number == 1:
            exact = [p.grad.clone() for p in model.parameters()]
    assert handle._control.looks == 1
    assert handle.record.passes == LOOKS[0]
    keep = [s.keep for s in handle._control.shares.values()]
    assert all(0 < k <= 1 for k in keep)
    off = sum(float((p.grad - e).square().sum()) for p, e in zip(model.parameters(), exact or [], strict=True))
    assert off < sum(float(e.square().sum()) for e in exact or [])


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")  # of the first module, whose input has no gradient
@pytest.mark.parametrize("hooked", ["parameter", "module", "all modules"])
def test_hooks_of_the_user_see_no_look(hooked: str):
    # When the hook is gone, the next look is taken. Red where why_none does not ask, and where it asks once.
    model, losses = step("mlp")
    calls: list[nn.Module | None] = []
    if hooked == "parameter":
        hook = next(model.parameters()).register_hook(lambda _: calls.append(None))
    elif hooked == "module":
        hook = model.get_submodule("1").register_full_backward_hook(lambda *_: calls.append(None))
    else:
        last = model.get_submodule("2")
        hook = nn.modules.module.register_module_full_backward_hook(
            lambda module, *_: calls.append(module) if module is last else None
        )
    handle = rowprop.thin(model, tau=0.3)
    with hook:
        for _ in range(LOOKS[0] + 1):
            losses().sum().backward()
    assert len(calls) == LOOKS[0] + 1
    assert "no looks" in handle.record.reason
    for _ in range(LOOKS[0] + 2, LOOKS[1] + 1):
        losses().sum().backward()
    assert handle._control.looks == 1
    assert "no looks" not in handle.record.reason


@pytest.mark.parametrize("spends", ["deletes", "overwrites"])
def test_a_graph_that_cannot_be_gone_through_twice_has_no_looks(spends: str):
    # Red where a look runs a custom function whose backward then has nothing left for the step's own.
    class Once(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.factor = torch.ones(())
            ctx.save_for_backward(ctx.factor)
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            found = grad * ctx.saved_tensors[0] * ctx.factor
            if spends == "deletes":
                del ctx.factor
            else:
                ctx.factor.add_(1)
            return found

    class Layer(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return Once.apply(super().forward(x))

    model = nn.Sequential(*(Layer(4, 4) for _ in range(3)))
    handle = rowprop.thin(model, tau=0.3)
    x = torch.randn(ROWS, 4)
    for _ in range(LOOKS[0] + 2):
        model(x).sum().backward()
    assert "no looks, which would run OnceBackward" in handle.record.reason
    assert handle.record.passes == LOOKS[0] + 2


class Normed(nn.Module):
    """Blocks with a BatchNorm, each behind a checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Tanh()) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return x


def test_a_look_through_checkpoints_leaves_buffers_as_they_are():
    # Red where the forwards that a look runs again count for the running statistics.
    model = Normed()
    plain, x = copy.deepcopy(model), torch.randn(ROWS, 6)
    handle = rowprop.thin(model, tau=0.3)
    for _ in range(LOOKS[0]):
        for each in (model, plain):
            each(x).square().sum().backward()
    assert handle._control.looks == 1
    for ours, theirs in zip(model.buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def test_a_look_after_backwards_that_failed_ends_well():
    # Red where room is made by forgetting the backward that runs.
    model, losses = step("mlp")
    handle = rowprop.thin(model, tau=0.3)

    def stop(_: Tensor) -> None:
        raise ValueError("stop")

    for _ in range(LOOKS[0] - 2):
        hook = model.get_submodule("0.0").weight.register_hook(stop)
        with pytest.raises(ValueError, match="stop"):
            losses().sum().backward()
        hook.remove()
    for _ in range(2):
        losses().sum().backward()
    assert handle._control.looks == 1


@pytest.mark.usefixtures("as_accelerator")
def test_nobody_waits_where_nothing_was_measured(monkeypatch: pytest.MonkeyPatch):
    # Red where a backward without numbers has those of the last one read at once.
    monkeypatch.setattr(Control, "measures", lambda _, number, often=True: number % 4 == 0)
    model, losses = step("mlp")
    handle = rowprop.thin(model, tau=0.5)
    for _ in range(12):
        losses().sum().backward()
        assert handle.record.passes == max(0, handle._control.begun - 2)


def test_a_gradient_of_the_head_alone_counts_as_no_backward():
    # As for weights that balance losses. Red where it counts: of two backwards one would be measured, later none.
    model, losses = step("transformer")
    handle = rowprop.thin(model, tau=0.5)
    for _ in range(8):
        loss = losses().sum()
        torch.autograd.grad(loss, model[-1].weight, retain_graph=True)
        loss.backward()
    assert handle._control.begun == handle.record.passes == 8


def test_a_look_of_one_handle_is_no_backward_of_another():
    # Red where a handle knows its own looks only: three backwards more for each look, and draws in the exact halves.
    model, losses = step("mlp")
    handles = [rowprop.thin(model, tau=0.5), rowprop.thin(model[1], tau=0.5, blocks=["0"])]
    for _ in range(15):
        losses().sum().backward()
    assert [handle.record.passes for handle in handles] == [15, 15]
    assert [handle._control.looks for handle in handles] == [2, 2]


def test_a_look_at_a_gradient_of_the_head_leaves_the_record(monkeypatch: pytest.MonkeyPatch):
    # Red where the record is then of no block.
    monkeypatch.setattr(Control, "looks_now", lambda self, drawn=True: self.begun == 5)
    model, losses = step("transformer")
    handle = rowprop.thin(model, tau=0.5)
    for number in range(6):
        loss = losses().sum()
        if number == 4:
            before = handle.record
            torch.autograd.grad(loss, model[-1].weight, retain_graph=True)
            assert handle.record == before and before.keep
        loss.backward()
    assert handle._control.looks == 1


def test_trainings_in_two_threads_do_not_meet():
    # Red where a look in one thread keeps the handle of another model away.
    def train(seed: int) -> tuple[int, int, float]:
        generator = torch.Generator().manual_seed(seed)
        model, handle = models[seed]
        for _ in range(120):
            x = torch.randn(ROWS, 6, generator=generator, dtype=torch.float64)
            (model(x).square().mean(1) * torch.logspace(0, -2, ROWS)).sum().backward()
        return handle.record.passes, handle._control.looks, handle._control.correction

    def made(seed: int) -> tuple[nn.Module, rowprop.Thinning]:
        torch.manual_seed(seed)
        model = MODELS["mlp"][0]().double()
        return model, rowprop.thin(model, tau=0.5, generator=torch.Generator().manual_seed(seed))

    models = {seed: made(seed) for seed in (1, 2)}
    alone = [train(seed) for seed in (1, 2)]
    models = {seed: made(seed) for seed in (1, 2)}
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(train, (1, 2))) == alone


def test_the_record_of_an_exact_backward_tells_no_variance(monkeypatch: pytest.MonkeyPatch):
    # Red where the last ratio stands on while all rows are kept and nothing is measured.
    model, losses = step("mlp")
    handle = rowprop.thin(model, tau=0.5)
    for _ in range(30):
        losses().sum().backward()
    assert handle.record.ratio > 0 and max(handle.record.variance.values()) > 0
    for share in handle._control.shares.values():
        share.keep = 1.0
    monkeypatch.setattr(Control, "measures", lambda *_, **__: False)
    losses().sum().backward()
    assert handle.record.ratio == 0 and set(handle.record.variance.values()) == {0.0}


def test_a_loaded_state_is_in_the_record():
    # Red where the record of a handle that was just made stands until the next renewal.
    model, losses = step("mlp")
    handle = rowprop.thin(model, tau=0.5)
    for _ in range(12):
        losses().sum().backward()
    resumed = rowprop.thin(model, tau=0.5)
    resumed.load_state_dict(handle.state_dict())
    assert resumed.record.passes == 12 and resumed.record.reason == handle.record.reason


def test_the_correction_follows_looks_in_the_log():
    # Red with a mean of the ratios: looks at 4 and 1 / 4 of the prediction leave it where it is.
    control = Control(None, 0.1)
    for true in [0.4, 0.025] * 20:
        control.learn(true, 0.1)
    assert 0.7 < control.correction < 1.4
    for _ in range(30):
        control.learn(0.03, 0.1)
    assert control.correction == pytest.approx(0.3, rel=0.05)
    assert control.allowed() == pytest.approx(0.1 / control.correction)
    before = control.correction
    for bad in (float("nan"), float("inf"), 0.0):
        control.learn(bad, 0.1)
    assert control.correction == before


class Faint(nn.Module):
    """A head with nearly all of the gradient's variance: the norms at the blocks do not know."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + 0.3 * layer(x).tanh()
        return self.head(x)


@pytest.mark.parametrize("name", ["transformer", "cnn", "faint"])
def test_the_ratio_in_the_parameters_is_about_tau(name: str):
    # By Monte Carlo after some steps, within a factor of 3 here (the bound of 1.5 takes more draws: see
    # benchmarks/thin_variance.py). Red for "faint" without the correction.
    torch.manual_seed(2)
    tau, rows = 0.2, 32
    model = (Faint() if name == "faint" else MODELS[name][0]()).double()
    shape = (8,) if name == "faint" else MODELS[name][1]
    teacher = copy.deepcopy(model)
    for p in teacher.parameters():
        p.data += 0.3 * torch.randn_like(p)
    handle = rowprop.thin(model, tau=tau, generator=torch.Generator().manual_seed(2))
    optimizer = torch.optim.SGD(model.parameters(), 0.02)

    def loss() -> Tensor:
        x = torch.randn(rows, *shape, dtype=torch.float64)
        size = torch.rand(rows, dtype=torch.float64) ** 4
        return ((model(x) - teacher(x).detach()).flatten(1).square().mean(1) * size).mean()

    def gradient(value: Tensor) -> Tensor:
        optimizer.zero_grad()
        value.backward()
        return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])

    for _ in range(90):
        gradient(loss())
        optimizer.step()
    state = handle.state_dict()["control"]
    with handle.paused():
        batches = torch.stack([gradient(loss()) for _ in range(64)])
    between = float((batches - batches.mean(0)).square().sum() / 63)
    added = 0.0
    for _ in range(24):
        value = loss()
        with handle.paused():
            optimizer.zero_grad()
            value.backward(retain_graph=True)
            exact = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        for _ in range(4):
            handle._control.load_state_dict(state)
            optimizer.zero_grad()
            value.backward(retain_graph=True)
            drawn = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
            added += float((drawn - exact).square().sum()) / 96
    assert tau / 3 < added / between < 3 * tau, handle.record


@pytest.mark.parametrize("late", [False, True], ids=["at once", "late"])
def test_resuming_goes_on_bit_for_bit_over_looks(late: bool, request: pytest.FixtureRequest):
    # Accumulation, two forwards before one backward, and looks at 10, 14, 21 and 29; numbers read at once or two
    # backwards later. Red where the state lacks the correction, the gain or the count of backwards begun.
    request.getfixturevalue("as_accelerator" if late else "as_host")
    model, losses = step("transformer")
    start = copy.deepcopy(model.state_dict())

    def train(handle: rowprop.Thinning, model: nn.Module, steps: range) -> None:
        optimizer = torch.optim.SGD(model.parameters(), 0.05)
        for number in steps:
            optimizer.zero_grad()
            if number % 3 == 0:
                (losses().mean() + 0.5 * losses().square().mean()).backward()
            else:
                for _ in range(2):
                    losses().mean().backward()
            optimizer.step()

    handle = rowprop.thin(model, tau=0.5)
    train(handle, model, range(9))
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "thinning": handle.state_dict()}, file)
    train(handle, model, range(9, 20))
    assert handle._control.looks == 4
    expected = copy.deepcopy(model.state_dict())
    handle.remove()
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    model.load_state_dict(saved["model"])
    resumed = rowprop.thin(model, tau=0.5)
    resumed.load_state_dict(saved["thinning"])
    train(resumed, model, range(9, 20))
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())
    assert any(not torch.equal(value, start[name]) for name, value in model.state_dict().items())
