"""The variance of thinning: the closed form by Monte Carlo, measurements against rows' own gradients, the control."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rowprop
from rowprop.backprop.autograd.rowgrad import RowGrad
from rowprop.backprop.rows.rows import RowSet
from rowprop.thinning.backward import ThinnedBackward
from rowprop.thinning.control import Control
from rowprop.thinning.drawn import Drawn
from rowprop.thinning.worth import Worth
from thinning_models import MODELS, ROWS, Checkpointed, capped, gradient, of_blocks, prepared, resumed, spread
from zoo import Net

pytestmark = pytest.mark.usefixtures("one_thread", "always_drawn")
DRAWS = 120


def recurrent() -> nn.Module:
    """Blocks whose outputs are tuples."""

    def forward(net: Any, x: Tensor) -> Tensor:
        for layer in net.layers:
            x, _ = layer(x)
        return x

    return Net(forward, layers=nn.ModuleList(nn.GRU(inputs, 6, batch_first=True) for inputs in (3, 6)))


def faint() -> nn.Module:
    """A head with nearly all of the gradient's variance: the norms at the blocks do not know."""

    def forward(net: Any, x: Tensor) -> Tensor:
        for layer in net.layers:
            x = x + 0.3 * layer(x).tanh()
        return net.head(x)

    return Net(forward, layers=nn.ModuleList(nn.Linear(8, 8) for _ in range(3)), head=nn.Linear(8, 4))


def cnn() -> nn.Module:
    blocks = of_blocks(*(nn.Conv2d(channels, 4, 3, padding=1) for channels in (1, 4, 4)))
    return nn.Sequential(blocks, nn.Conv2d(4, 2, 3))


def normed() -> nn.Module:
    """Blocks with a BatchNorm, each behind a checkpoint."""
    blocks = (nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Tanh()) for _ in range(3))
    return Checkpointed(*blocks, reentrant=False)


SMALL: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (lambda: of_blocks(*(nn.Linear(6, 6) for _ in range(3))), (6,)),
    "cnn": (cnn, (1, 6, 6)),
    "recurrent": (recurrent, (5, 3)),
    "transformer": MODELS["sequence first"],
    "normed": (normed, (6,)),
    "faint": (faint, (8,)),
}
NAMES = ["mlp", "cnn", "recurrent", "transformer"]


def step(name: str) -> tuple[nn.Module, Callable[..., Tensor]]:
    return prepared(*SMALL[name])


def begun(
    name: str = "mlp", passes: int = 0, tau: float = 0.5
) -> tuple[nn.Module, Callable[..., Tensor], rowprop.thinning.Thinning]:
    """A model, its losses, and a handle after some backwards."""
    model, losses = step(name)
    handle = rowprop.thin(model, tau=tau)
    for _ in range(passes):
        losses().sum().backward()
    return model, losses, handle


@pytest.fixture
def always_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """In this test each backward measures the weight gradients."""
    monkeypatch.setattr(Control, "measures_weights", lambda *_: True)


@pytest.fixture
def learnt(monkeypatch: pytest.MonkeyPatch) -> list[tuple[float, float, float]]:
    """What measurements tell the control, which does not learn it: variance added, between batches, and predicted."""
    found: list[tuple[float, float, float]] = []
    monkeypatch.setattr(Control, "learn", lambda _, *numbers: found.append(numbers))
    return found


def dense(grad: Tensor) -> Tensor:
    """The gradient as a plain tensor; a sliced one stays as it is for the ops below."""
    return grad.copied().clone() if type(grad) is RowGrad else grad.clone()


def spied(block: nn.Module) -> tuple[list[Tensor], list[Tensor]]:
    """Gradients that come to the first output of a thinned block, and those that it hands on."""
    arrived: list[Tensor] = []
    handed_on: list[Tensor] = []

    def between(_: nn.Module, __: Any, output: Any) -> Any:
        tensor, *rest = output if isinstance(output, tuple) else [output]
        tensor.register_hook(lambda grad: handed_on.append(dense(grad)))  # after the hook that thins
        alias = torch.ops.aten.alias(tensor)
        alias.register_hook(lambda grad: arrived.append(dense(grad)))
        return (alias, *rest) if rest else alias

    block.register_forward_hook(between)
    return arrived, handed_on


def norms(grad: Tensor) -> Tensor:
    """The norm of each of the rows, which stand in the dimension of their number."""
    return grad.movedim(list(grad.shape).index(ROWS), 0).flatten(1).norm(dim=1)


@pytest.mark.parametrize(
    ("name", "after", "count"), [("transformer", "nothing", 6), ("mlp", "a thinning", 4), ("cnn", "pick", 5)]
)
def test_the_variance_handed_on_is_the_closed_form(name: str, after: str, count: int):
    # Red with p = count / A for all rows in ``inclusion``, and with independent draws of p / 2.
    model, losses = step(name)
    handle = rowprop.thin(model, keep=0.5)
    blocks = handle.blocks[:2] if after == "a thinning" else handle.blocks[-1:]
    handle.remove()
    handle = rowprop.thin(model, keep=0.5, blocks=blocks, generator=torch.Generator().manual_seed(1))
    if after == "a thinning":  # the block above keeps more
        handle._control.share = lambda place: 0.75 if place == blocks[1] else 1 / 3
    arrived, handed_on = spied(model.get_submodule(blocks[0]))
    loss = losses()
    loss = (rowprop.pick(loss, torch.arange(2, ROWS)) if after == "pick" else loss).sum()
    for _ in range(DRAWS):
        loss.backward(retain_graph=True)
    measured = [float((a - b).square().sum()) for a, b in zip(arrived, handed_on, strict=True)]
    closed = [spread(norms(each), capped(norms(each), count)) for each in arrived]
    assert len(closed) == DRAWS
    assert sum(measured) == pytest.approx(sum(closed), rel=0.2)


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """The weights whose gradient a measurement sees: matrices, and kernels of convolutions."""
    return {name: p for name, p in model.named_parameters() if p.ndim > 1}


def parts(model: nn.Module, losses: Tensor) -> list[Tensor]:
    """For each weight the square of each row's part of its gradient, (N,)."""
    rows = [torch.autograd.grad(loss, [*weights_of(model).values()], retain_graph=True) for loss in losses]
    return [torch.stack([g.square().sum() for g in of_rows]) for of_rows in zip(*rows, strict=True)]


@pytest.mark.usefixtures("always_measured")
@pytest.mark.parametrize("name", NAMES)
def test_a_measurement_that_asks_for_a_draw_finds_what_it_would_add(name: str, learnt: list[Any]):
    # Against every row's own gradient, and p by bisection. Red where weights above the block count as drawn, where
    # those below it do not, where the rows' order changes, and where the head's gradient stays out.
    model, losses = step(name)
    handle = rowprop.thin(model, tau=0.5)
    top = handle.blocks[-1]
    with handle.paused():
        squares = parts(model, losses())
        arrived, _ = spied(model.get_submodule(top))
        losses().sum().backward()
    losses().sum().backward()
    p = capped(norms(arrived[0]), 0.75 * ROWS).clamp(min=0.01)  # no row is asked for more rarely
    last = max(place for place, key in enumerate(weights_of(model)) if key.startswith(top))
    added, between, predicted = learnt[0]
    near = 0.2 if name == "recurrent" else 1e-6  # each time step has a product of its own
    assert between == pytest.approx(float(torch.stack(squares).sum()), rel=near)
    asked = sum(float(((1 - p) / p * square).sum()) for square in squares[: last + 1])
    assert added == pytest.approx(asked, rel=near) and 0 < asked < 3 * between
    assert 0 < predicted < 3


@pytest.mark.usefixtures("always_measured")
def test_a_measurement_at_draws_finds_what_they_add(learnt: list[Any]):
    # Means over draws: of the variances that measurements tell, and of the squared distance from the exact gradient.
    # The squares of rows that were drawn stand for all rows. Red where a drawn row counts once, where its factor counts
    # once, and where the draws of the upper block alone count. The rows' gradients point in directions of their own: a
    # fixed number of rows adds less variance where they point the same way.
    model, losses = step("mlp")
    weights, value = [*weights_of(model).values()], losses()
    signs = torch.randn(ROWS, dtype=torch.float64).sign()
    between = float(torch.stack(parts(model, value)).sum())
    exact = torch.autograd.grad((value * signs).sum(), weights)
    handle = rowprop.thin(model, tau=0.5, generator=torch.Generator().manual_seed(1))
    value = (losses() * signs).sum()
    distances: list[float] = []
    for _ in range(DRAWS):
        drawn = torch.autograd.grad(value, weights, retain_graph=True)
        distances.append(sum(float((d - e).square().sum()) for d, e in zip(drawn, exact, strict=True)))
        for share in handle._control.shares.values():
            share.keep = 0.6
    added, spreads = (sum(column) / len(column) for column in list(zip(*learnt[1:], strict=True))[:2])
    assert len(learnt) == DRAWS and distances[0] < 1e-20
    assert spreads == pytest.approx(between, rel=0.1)
    assert added == pytest.approx(sum(distances) / (DRAWS - 1), rel=0.35)


@pytest.mark.parametrize("name", [*NAMES, "normed"])
def test_a_measurement_leaves_the_step_as_it_is(name: str, monkeypatch: pytest.MonkeyPatch):
    # The gradients of backwards with measurements, against those with the same draws and without measurements; before
    # there are draws, the exact ones. Red where a measurement that asks for a draw makes it.
    model, losses = step(name)
    exact, found = gradient(model, losses().sum()), list[Tensor]()
    for measurements in (True, False):
        with monkeypatch.context() as patch:
            if not measurements:
                patch.setattr(Control, "measures_weights", lambda *_, **__: False)
                patch.setattr(Control, "learn", lambda *_: None)
            patch.setattr(Control, "correction", 1.0)
            handle = rowprop.thin(model, tau=0.5, generator=torch.Generator().manual_seed(3))
            found += [gradient(model, losses().sum()) for _ in range(5)]
            assert (handle._control.measured > 0) is measurements
            assert min(handle.record.keep.values()) < 1
            handle.remove()
    torch.testing.assert_close(found[0], exact)
    torch.testing.assert_close(found[:5], found[5:])


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")  # of the first module, whose input has no gradient
@pytest.mark.parametrize("hooked", ["parameter", "module"])
def test_hooks_of_the_user_are_called_once_in_a_look(hooked: str):
    # Red where a measurement goes backward by itself.
    model, losses = step("mlp")
    calls: list[None] = []
    if hooked == "parameter":
        next(model.parameters()).register_hook(lambda _: calls.append(None))
    else:
        model.get_submodule("1").register_full_backward_hook(lambda *_: calls.append(None))
    handle = rowprop.thin(model, tau=0.3)
    for _ in range(8):
        losses().sum().backward()
    assert len(calls) == 8 and handle._control.measured == 3


def test_where_no_product_is_seen_the_norms_predict_alone():
    # A custom function without a rule: its backward runs at full size. Red where such a measurement is learnt from.
    class Custom(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad * 1.0

    class Layer(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return Custom.apply(super().forward(x))

    model, x = nn.Sequential(*(Layer(4, 4) for _ in range(3))), torch.randn(ROWS, 4)
    handle = rowprop.thin(model, tau=0.3)
    for _ in range(12):
        model(x).square().sum().backward()
    assert handle._control.measured == 0 and handle._control.correction == 1


@pytest.mark.usefixtures("as_accelerator")
def test_nobody_waits_where_nothing_was_measured(monkeypatch: pytest.MonkeyPatch):
    # Red where a backward without numbers has those of the last one read at once.
    monkeypatch.setattr(Control, "measures_norms", lambda _, number, often=True: number % 4 == 0)
    _, losses, handle = begun()
    for _ in range(12):
        losses().sum().backward()
        assert handle.record.passes == max(0, handle._control.begun - 2)


def test_a_gradient_of_the_head_alone_counts_as_no_backward(monkeypatch: pytest.MonkeyPatch):
    # As for weights that balance losses, also in a measurement. Red where it counts (of two backwards one would be
    # measured, later none), and where the record is then of no block.
    monkeypatch.setattr(Control, "measures_weights", lambda _, number, drawn=True: number == 5)
    model, losses, handle = begun("transformer")
    for number in range(8):
        loss, before = losses().sum(), handle.record
        torch.autograd.grad(loss, model[-1].weight, retain_graph=True)
        assert handle.record == before and bool(before.keep) is (number > 0)
        loss.backward()
    assert handle._control.begun == handle.record.passes == 8 and handle._control.measured == 1


@pytest.mark.usefixtures("always_measured")
def test_two_handles_measure_one_backward():
    # Both find the same variance between batches. Red where the rows tell the last one alone, or one of them twice.
    model, losses = step("mlp")
    handles = [rowprop.thin(model, tau=0.5), rowprop.thin(model[1], tau=0.5, blocks=["0"])]
    found: list[list[float]] = [[], []]
    for handle, into in zip(handles, found, strict=True):
        handle._control.learn = lambda added, between, _, into=into: into.append(between)
    for _ in range(4):
        losses().sum().backward()
    assert [handle.record.passes for handle in handles] == [4, 4]
    squares = parts(model, losses())
    assert found[0][0] == pytest.approx(float(torch.stack(squares).sum()))
    assert found[1][0] == pytest.approx(float(torch.stack(squares[:2]).sum()))  # it begins at its own model's output


def test_a_measurement_has_norms(monkeypatch: pytest.MonkeyPatch):
    # Red where they are left out as in other backwards: nothing is predicted.
    monkeypatch.setattr(Control, "measures_norms", lambda *_, **__: False)
    monkeypatch.setattr(Control, "measures_weights", lambda _, number, drawn=True: number > 1)
    assert begun(passes=3)[2]._control.measured == 2


@pytest.mark.usefixtures("always_measured")
def test_a_measurement_at_two_forwards_asks_for_no_rare_row(learnt: list[Any]):
    # Each forward has rows of its own, and both share what was asked for. Red without the least probability.
    _, losses, _ = begun()
    large = losses().argsort()[-2:]
    few = torch.zeros(ROWS, dtype=torch.bool).index_fill(0, large, True)
    (losses()[few].sum() + losses()[~few].sum()).backward()
    added, between, predicted = learnt[0]
    assert 0 < added < 100 * between and 0 < predicted < 100


@pytest.mark.usefixtures("always_measured")
def test_a_measured_backward_goes_with_its_end(monkeypatch: pytest.MonkeyPatch):
    # Red where it holds the rows, whose hooks hold it, until a garbage collection.
    found: list[Any] = []
    own = ThinnedBackward.end
    monkeypatch.setattr(ThinnedBackward, "end", lambda self: found.append(weakref.ref(self)) or own(self))
    gc.disable()
    try:
        _, _, handle = begun(passes=4)
        handle.state_dict()
        assert min(handle.record.keep.values()) < 1
        assert [one() for one in found] == [None] * 4
    finally:
        gc.enable()


def test_rows_of_unknown_factors_tell_nothing():
    # Red where their squares count as those of rows that were not drawn.
    drawn, known = (RowSet(torch.arange(3), 4, unique=True, batchnorm="rows") for _ in range(2))
    drawn.hook = Drawn(base=known)
    begun = ThinnedBackward(Control(None, 0.1), Worth(), lambda: 0.5)
    begun.measure(drawn, torch.ones(3))
    assert begun.squares == {}
    begun.measure(known, torch.ones(3))
    assert begun.variances().tolist() == [0, 3]


def test_rows_tell_of_their_products_in_measurements_alone(monkeypatch: pytest.MonkeyPatch):
    # A graph that is gone through again has the rows of its pick. Red where they go on telling.
    told: list[RowSet] = []
    own = ThinnedBackward.measure
    monkeypatch.setattr(ThinnedBackward, "measure", lambda *args: told.append(args[1]) or own(*args))
    monkeypatch.setattr(Control, "measures_weights", lambda _, number, drawn=True: number == 1)
    _, losses, _ = begun()
    loss = rowprop.pick(losses(), torch.arange(8)).sum()
    for _ in range(2):
        loss.backward(retain_graph=True)
        assert len(told) == 3


def test_trainings_in_two_threads_do_not_meet():
    # Red where a measurement in one thread keeps the handle of another model away.
    def train(seed: int) -> tuple[int, int, float]:
        model, handle, generator = *models[seed], torch.Generator().manual_seed(seed)
        for _ in range(40):
            x = torch.randn(ROWS, 6, generator=generator, dtype=torch.float64)
            (model(x).square().mean(1) * torch.logspace(0, -2, ROWS)).sum().backward()
        return handle.record.passes, handle._control.measured, handle._control.correction

    def made(seed: int) -> tuple[nn.Module, rowprop.thinning.Thinning]:
        model, _ = step("mlp")
        return model, rowprop.thin(model, tau=0.5, generator=torch.Generator().manual_seed(seed))

    models = {seed: made(seed) for seed in (1, 2)}
    alone = [train(seed) for seed in (1, 2)]
    models = {seed: made(seed) for seed in (1, 2)}
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(train, (1, 2))) == alone


def test_the_record_of_an_exact_backward_tells_no_variance(monkeypatch: pytest.MonkeyPatch):
    # Red where the last ratio stands on while all rows are kept and nothing is measured.
    _, losses, handle = begun(passes=30)
    assert handle.record.ratio > 0 and max(handle.record.variance.values()) > 0
    for share in handle._control.shares.values():
        share.keep = 1.0
    monkeypatch.setattr(Control, "measures_norms", lambda *_, **__: False)
    losses().sum().backward()
    assert handle.record.ratio == 0 and set(handle.record.variance.values()) == {0.0}


@pytest.mark.parametrize("name", ["cnn", "faint"])
def test_the_ratio_in_the_parameters_is_about_tau(name: str):
    # By Monte Carlo after some steps, within a factor of 3 here (the bound of 1.5 takes more draws: see
    # benchmarks/thin_variance.py). Red for "faint" without the correction.
    torch.manual_seed(2)
    tau, rows, (make, shape) = 0.2, 32, SMALL[name]
    model = make().double()
    teacher = copy.deepcopy(model)
    for p in teacher.parameters():
        p.data += 0.3 * torch.randn_like(p)
    handle = rowprop.thin(model, tau=tau, generator=torch.Generator().manual_seed(2))
    optimizer = torch.optim.SGD(model.parameters(), 0.02)

    def loss() -> Tensor:
        x, size = torch.randn(rows, *shape, dtype=torch.float64), torch.rand(rows, dtype=torch.float64) ** 4
        return ((model(x) - teacher(x).detach()).flatten(1).square().mean(1) * size).mean()

    for _ in range(90):
        gradient(model, loss())
        optimizer.step()
    state = handle.state_dict()["control"]
    with handle.paused():
        batches = torch.stack([gradient(model, loss()) for _ in range(64)])
    between = float((batches - batches.mean(0)).square().sum() / 63)
    added = 0.0
    for _ in range(24):
        value = loss()
        with handle.paused():
            exact = gradient(model, value, again=True)
        for _ in range(4):
            handle._control = handle._control.restored(state)
            added += float((gradient(model, value, again=True) - exact).square().sum()) / 96
    assert tau / 3 < added / between < 3 * tau, handle.record


@pytest.mark.parametrize("late", [False, True], ids=["at once", "late"])
def test_resuming_goes_on_bit_for_bit(late: bool, request: pytest.FixtureRequest):
    # Accumulation, two forwards before one backward, and measurements; numbers read at once or two backwards later. Red
    # where the state lacks the generator, a sum since the last renewal, a sum of the measurements, their number or that
    # of the backwards begun, and where the record of a handle that was just made stands until the next renewal.
    request.getfixturevalue("as_accelerator" if late else "as_host")
    model, losses = step("mlp")

    def backwards(number: int) -> None:
        if number % 3 == 0:
            (losses().mean() + 0.5 * losses().square().mean()).backward()
        else:
            for _ in range(2):
                losses().mean().backward()

    assert resumed(model, backwards, tau=0.5, at=9, more=15)._control.measured > 3
