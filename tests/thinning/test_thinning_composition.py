"""Thinning beside all else that a training does: its expectation, or the same draws, or the exact gradient."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import rowprop
from rowprop.backprop import backward
from thinning_models import ROWS, Texts, compared, gradient, kept

pytestmark = pytest.mark.usefixtures("one_thread", "any_count")
DRAWS = 60
BLOCKS = ["layers.0", "layers.1", "layers.2"]
HALF = dict.fromkeys(BLOCKS, 0.5)
SCALE = torch.linspace(0.1, 2, ROWS, dtype=torch.float64)


class Net(nn.Module):
    """Three blocks, in checkpoints if ``reentrant`` is given; the model ``writes`` to their outputs in place."""

    def __init__(self, reentrant: bool | None = None, dropout: float = 0.0, *, writes: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(5, 6), nn.Linear(6, 2)
        self.layers = nn.ModuleList(nn.Sequential(nn.Tanh(), nn.Dropout(dropout), nn.Linear(6, 6)) for _ in range(3))
        self.reentrant, self.writes = reentrant, writes

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x) if self.reentrant is None else checkpoint(layer, x, use_reentrant=self.reentrant)
            if self.writes:
                x *= 1.5
        return self.last(x)


def batch(dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(ROWS, 5, generator=torch.Generator().manual_seed(3), dtype=torch.float64).to(dtype)


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x).double().square().mean(1) * SCALE[: len(x)]).mean()


def thin(model: nn.Module, keep: float = 0.5) -> rowprop.thinning.Thinning:
    blocks = BLOCKS if isinstance(model, Net) else None
    return rowprop.thin(model, keep=keep, blocks=blocks, generator=torch.Generator().manual_seed(1))


def expect_unbiased(model: nn.Module, loss: Callable[[], Tensor]) -> rowprop.thinning.Thinning:
    exact = gradient(model, loss())
    handle = thin(model)
    found = compared(model, loss, exact, DRAWS, fresh=True)
    assert float(found.off.abs().max()) < 5 and found.moved > 1 / 4, found
    assert all(share < 0.7 for share in kept(handle).values())
    return handle


def with_autocast(reentrant: bool | None = None) -> tuple[nn.Module, Callable[[], Tensor]]:
    model, x = Net(reentrant), batch(torch.float32)

    def loss() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return loss_of(model, x)

    return model, loss


def with_engine(engine: Any) -> tuple[nn.Module, Callable[[], Tensor]]:
    model, target = Net().double(), torch.randn(ROWS, 2, dtype=torch.float64)

    losses_fn = lambda model, batch: (model(batch[0]) - batch[1]).square().mean(1)  # noqa: E731
    step = rowprop.SelectiveBackprop(model, losses_fn, rowprop.TopK(0.7), engine=engine)
    return model, lambda: step((batch(), target))[0]


def token_losses(model: Any, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]).transpose(1, 2), batch[1], reduction="none")


def with_tokens() -> tuple[nn.Module, Callable[[], Tensor]]:
    model, target = Texts(causal=True).double(), torch.randint(9, (ROWS, 5))
    step = rowprop.SelectiveBackprop(model, token_losses, rowprop.TopK(0.5), engine="sliced", unit="token")
    return model, lambda: step((batch(), target))[0]


UNBIASED: dict[str, Callable[[], tuple[nn.Module, Callable[[], Tensor]]]] = {
    "autocast": with_autocast,
    "autocast and a reentrant checkpoint": lambda: with_autocast(True),
    "the engine sliced": lambda: with_engine("sliced"),
    "the engine masked": lambda: with_engine("masked"),
    "the engine recompute": lambda: with_engine("recompute"),
    "tokens": with_tokens,
}


@pytest.mark.parametrize("name", UNBIASED)
def test_beside_it_the_gradient_is_the_exact_one_on_average(name: str):
    # Red, as all that expect_unbiased is called in, where the division by p is left out.
    expect_unbiased(*UNBIASED[name]())


def test_several_forwards_of_different_sizes_before_one_backward():
    # Each forward's rows count for themselves. Red where the first gradient's rows count for all.
    model, parts = Net().double(), batch().split([9, 3])
    handle = expect_unbiased(model, lambda: loss_of(model, parts[0]) + loss_of(model, parts[1]))
    assert kept(handle) == dict.fromkeys(BLOCKS, pytest.approx(7 / 12))  # 5 of 9 and 2 of 3


def test_below_skipped_zeros_it_draws_from_the_live_rows():
    # Red where the draws are from all rows: then a live row is divided by another probability than its own.
    model, x, live = Net().double(), batch(), torch.arange(ROWS) % 2 == 0
    rowprop.skip_zeros(model.layers[1])  # a block that skips is no thinned one
    skipping = rowprop.skip_zeros(model)
    expect_unbiased(model, lambda: (model(x).square().mean(1) * SCALE * live).mean())
    assert skipping.record is not None and skipping.record.kept == int(live.sum())


def test_two_handles_thin_what_the_other_left():
    # Red where both generators have the same seed: a row that the first one draws late, the second one never draws.
    inner = Net().double()
    model = nn.Sequential(inner)
    exact = gradient(model, loss_of(model, batch()))
    other = rowprop.thin(model, keep=0.5, blocks=["0.layers.2"])
    handle = rowprop.thin(inner, keep=0.25, blocks=["layers.0", "layers.1"])
    assert not torch.equal(handle.state_dict()["generator"], other.state_dict()["generator"])
    found = compared(model, lambda: loss_of(model, batch()), exact, 4 * DRAWS)
    assert float(found.off.abs().max()) < 5
    for each in (handle, other, handle):
        each.remove()
    assert torch.equal(gradient(model, loss_of(model, batch())), exact)


@pytest.mark.parametrize("sequences", [ROWS, 8])
def test_a_share_is_of_sequences_below_an_attention_that_mixed_the_tokens(sequences: int):
    # Red where the base of all blocks is that of the first: 12 sequences are fewer than half of 48 tokens, so all of
    # them would stay, and the record would say 12 / 48.
    model, target, held = Texts(causal=True).double(), torch.randint(9, (ROWS, 5)), list[Tensor]()
    handle = thin(model)
    model.words.register_forward_hook(lambda _, __, out: held.append(out) or out.retain_grad())
    mask = (torch.arange(ROWS) < sequences)[:, None] & (torch.arange(5) != 2)
    rowprop.pick(token_losses(model, (batch(), target)), mask).mean().backward()
    assert kept(handle) == {"layers.1": 0.5, "layers.0": 0.5}
    assert int(held[0].grad.flatten(1).any(1).sum()) == sequences // 2


@pytest.mark.parametrize("sizes", [(12,), (7, 5), (5, 7), (8, 4)], ids=str)
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_with_dropout_draw_the_same_rows(reentrant: bool, sizes: tuple[int, ...]):
    # The same as without, also of several forwards. Red where a nested backward counts its own rows (K shrinks each
    # time), and where all forwards take the rows of the last one.
    found = []
    for model in (Net(None, 0.2).double(), Net(reentrant, 0.2).double()):
        handle = thin(model)
        torch.manual_seed(7)
        found.append(gradient(model, sum(loss_of(model, part) for part in batch().split(sizes))))
        assert kept(handle) == dict.fromkeys(BLOCKS, pytest.approx(sum((s + 1) // 2 for s in sizes) / ROWS))
    torch.testing.assert_close(found[1], found[0], rtol=1e-12, atol=1e-12)


class Nested(nn.Module):
    """Each checkpoint runs the lower half of its blocks in a checkpoint of their own, ``depth`` times."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.depth, self.first = depth, nn.Linear(5, 6)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self.first(x), list(self.layers), self.depth)

    def run(self, x: Tensor, layers: list[nn.Module], depth: int) -> Tensor:
        if depth:
            half = len(layers) // 2 if depth < self.depth else len(layers)
            x = checkpoint(self.run, x, layers[:half], depth - 1, use_reentrant=True)
            layers = layers[half:]
        for layer in layers:
            x = layer(x).tanh()
        return x


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_checkpoints_inside_of_checkpoints_have_the_draws_of_none(depth: int):
    # Red where the backward inside a checkpoint counts as another one of the training: its blocks draw a share of the
    # rows that were drawn already.
    found: list[Tensor] = []
    for model in (Nested(0).double(), Nested(depth).double()):
        handle = thin(model)
        found += [gradient(model, loss_of(model, batch())) for _ in range(3)]
        assert kept(handle) == {f"layers.{n}": 0.5 for n in range(4)} and handle.record.passes == 3
    assert not backward._running
    torch.testing.assert_close(found[3:], found[:3], rtol=1e-12, atol=1e-14)


class RunAgain(torch.autograd.Function):
    """A checkpoint of somebody else's: its backward runs a block again, and a backward of its own in it."""

    @staticmethod
    def forward(ctx: Any, block: nn.Module, x: Tensor) -> Tensor:
        ctx.block, ctx.x = block, x
        return block(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        with torch.enable_grad():
            x = ctx.x.detach().requires_grad_()
            out = ctx.block(x)
        torch.autograd.backward(out, grad)
        return None, x.grad


def test_another_checkpoint_is_in_the_same_backward():
    # Red where a block that runs again is of the backward inside, which then counts as one of its own.
    class Model(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            for layer in self:
                x = RunAgain.apply(layer, x)
            return x.square().sum()

    handle = rowprop.thin(model := Model(*(nn.Linear(5, 5) for _ in range(3))), keep=0.5)
    model(torch.randn(12, 5, requires_grad=True)).backward()
    assert list(kept(handle)) == ["2", "1", "0"] and handle.record.passes == 1


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_an_evaluation_before_the_backward_changes_no_rows():
    # A reentrant checkpoint runs its block again in the backward. Red where the evaluation's rows stand for them there.
    model = Net(reentrant=True).double()
    handle = thin(model)
    loss = loss_of(model, batch().requires_grad_())
    with torch.no_grad():
        model.eval()(batch()[:5])
    model.train()
    loss.backward()
    assert kept(handle) == HALF


def test_a_forward_after_a_backward_has_its_own_rows_alone():
    # Red where sizes of before the last backward stay: a checkpoint's steps, as many as rows then, are taken for rows.
    model = Net(True).double()
    handle = thin(model)
    loss_of(model, batch()[:9]).backward()
    losses = [loss_of(model, batch()[:size]) for size in (3, 4)]
    assert handle._forward.sizes == (4, 3)
    sum(losses).backward()


def test_accumulation_and_clipping_see_plain_gradients():
    # The same draws one by one, from the same generator.
    model, parts = Net().double(), batch().split(6)
    handle = thin(model)
    state = handle.state_dict()
    apart = [gradient(model, loss_of(model, part)) for part in parts]
    handle.load_state_dict(state)
    model.zero_grad()
    for part in parts:
        loss_of(model, part).backward()
    together = torch.cat([p.grad.flatten() for p in model.parameters()])
    torch.testing.assert_close(together, apart[0] + apart[1], rtol=1e-12, atol=1e-12)
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    torch.testing.assert_close(norm, together.norm())
    assert all(type(p.grad) is Tensor for p in model.parameters())


def test_hooks_of_others_see_what_goes_on():
    # A tensor's hook and a module's hook get the thinned gradient, as a tensor of full shape; a write to it counts.
    model = Net(writes=False).double()  # torch forbids them below a module's hook
    seen: list[Tensor] = []

    def hooked(layer: int, hook: Callable[[Tensor], Any]) -> Any:
        return model.layers[layer].register_forward_hook(lambda _, __, y: y.register_hook(hook) and None)

    reads = hooked(1, lambda g: seen.append(g + 0))
    module = model.layers[1].register_full_backward_hook(lambda _, __, grads: seen.append(grads[0] + 0))
    handle = thin(model)
    state = handle.state_dict()
    once = gradient(model, loss_of(model, batch()))
    assert [type(g) for g in seen] == [Tensor, Tensor] and all(g.shape == (ROWS, 6) for g in seen)
    assert [int(g.any(1).sum()) for g in seen] == [6, 6]
    for hook in (reads, module):
        hook.remove()
    hooked(0, lambda g: g * 2)
    handle.load_state_dict(state)
    twice = gradient(model, loss_of(model, batch()))
    torch.testing.assert_close(twice[:36], once[:36] * 2, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(twice[36:50], once[36:50], rtol=1e-12, atol=1e-12)


def steered(
    model: nn.Module, x: Tensor, scaler: Any = None, autocast: bool = False
) -> tuple[rowprop.thinning.Thinning, Tensor]:
    """Eight backwards under tau, of which three measure; the last one's gradient."""
    handle = rowprop.thin(model, tau=0.2, blocks=BLOCKS, generator=torch.Generator().manual_seed(1))
    for _ in range(8):
        torch.manual_seed(7)  # one dropout for all
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = loss_of(model, x)
        found = gradient(model, loss if scaler is None else scaler.scale(loss))
    assert min(kept(handle).values()) < 1 and handle._control.measured == 3
    return handle, found


@pytest.mark.usefixtures("always_drawn")
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_have_the_draws_and_measurements_of_none(reentrant: bool):
    # The same variances, shares and gradient. Red where the blocks that run again count as a backward of the step, and
    # where the gradient comes to reentrant ones at full size: each would draw from all rows again, and add ``tau``.
    plain, again = (steered(Net(how, 0.2).double(), batch()) for how in (None, reentrant))
    assert again[0]._control.correction == pytest.approx(plain[0]._control.correction, rel=1e-9)
    assert again[0].record.keep == plain[0].record.keep
    torch.testing.assert_close(again[1], plain[1], rtol=1e-12, atol=1e-12)


@pytest.mark.usefixtures("always_drawn")
def test_a_measurement_under_autocast_and_a_scaler_is_the_one_without_the_scale():
    # The scale cancels in the quotient. Red where one of the two variances is divided by the scale alone.
    scalers = (None, torch.amp.GradScaler("cpu", init_scale=1024.0))
    found = [steered(Net(), batch(torch.float32), scaler, autocast=True) for scaler in scalers]
    plain, scaled = (handle._control.correction for handle, _ in found)
    assert 0.01 < plain < 100 and plain != 1
    assert scaled == pytest.approx(plain, rel=0.05)
    torch.testing.assert_close(found[1][1] / 1024, found[0][1], rtol=0.05, atol=1e-3)


def test_an_overflow_stays_visible_to_a_scaler():
    # Whichever row overflows, it is always kept. Red where infinite norms count as 0.
    model, x = Net(), batch(torch.float32)
    scaler, optimizer = torch.amp.GradScaler("cpu"), torch.optim.SGD(model.parameters(), 0.1)
    thin(model, keep=0.1)
    for row in range(ROWS):
        before, size = copy.deepcopy(model.state_dict()), scaler.get_scale()
        optimizer.zero_grad()
        scale = torch.ones(ROWS).index_fill(0, torch.tensor(row), torch.inf)
        scaler.scale((model(x).square().mean(1) * scale).mean()).backward()
        assert not bool(model.first.weight.grad.isfinite().all())
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() < size
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.usefixtures("always_drawn")
def test_a_part_of_the_model_may_be_trained_and_the_whole_evaluated(monkeypatch: pytest.MonkeyPatch):
    # As a LightningModule does. Red where the rows of the evaluation's batch stand for the training's, where the work
    # of a block is added up over all forwards, and where a BatchNorm of a part is not seen.
    floors: list[int] = []
    monkeypatch.setattr("rowprop.thinning.backward.floored", lambda norms: floors.append(1) or norms)
    inner = Net()
    inner.last = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))
    model = nn.Sequential(inner).double()
    handle = rowprop.thin(model, tau=0.2, blocks=[f"0.{block}" for block in BLOCKS])

    def evaluate(rows: int) -> None:
        with torch.no_grad():
            model.eval()(batch()[:rows])
        model.train()

    for number in range(40):
        if number % 8 == 0:
            evaluate(7)
        loss = loss_of(inner, batch())
        evaluate(5)
        floors.clear()
        loss.backward()
        assert floors
    assert max(kept(handle).values()) < 1 and handle.record.passes == 40
    once = rowprop.thin(fresh := nn.Sequential(copy.deepcopy(inner)), tau=0.2, blocks=list(handle.blocks))
    loss_of(fresh, batch()).backward()
    work, expected = ({place: work.exact for place, work in h._worth.works.items()} for h in (handle, once))
    assert work == expected


@pytest.mark.parametrize("settings", [{"keep": 0.5}, {"tau": 0.3}], ids=str)
@pytest.mark.usefixtures("always_drawn")
def test_a_backward_that_fails_leaves_nothing_behind(settings: dict[str, float]):
    # Red where the rows of a backward that failed are kept, where its numbers or its measurement count for the next,
    # where nobody forgets it, and where room is made by forgetting the backward that runs.
    model = Net().double()
    handle = rowprop.thin(model, blocks=BLOCKS, **settings)
    hook = model.layers[0][2].weight.register_hook(lambda _: 1 / 0)
    for _ in range(5):
        with pytest.raises(ZeroDivisionError):
            loss_of(model, batch()).backward()
    hook.remove()
    assert not backward._running
    for _ in range(11):  # of the 16 in all, two that did not fail measure under tau
        gradient(model, loss_of(model, batch()))
    assert kept(handle) == HALF if "keep" in settings else max(kept(handle).values()) < 1
    assert handle.record.passes == 11 and handle._control.measured == (0 if "keep" in settings else 2)
    assert not backward._running


def test_twelve_backwards_at_once():
    # Each waits for all others in the middle of its backward. Red where the oldest are forgotten as failed ones.
    model = Net().double()
    thin(model)
    gate = threading.Barrier(12)
    model.first.weight.register_hook(lambda _: (gate.wait(30), None)[1])
    with ThreadPoolExecutor(12) as pool:
        list(pool.map(lambda _: torch.autograd.grad(loss_of(model, batch()), [*model.parameters()]), range(12)))


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_outputs_are_left_alone(layout: torch.layout):
    # Red where their rows are looked for.
    layers = nn.Sequential(*(nn.Linear(5, 5) for _ in range(3)))
    rows = [torch.randn(count, 5) for count in (2, 3, 4)]

    def trained() -> Tensor:
        out = layers(torch.nested.nested_tensor(rows, layout=layout))
        return gradient(layers, sum(each.square().sum() for each in out.unbind()))

    exact = trained()
    handle = rowprop.thin(layers, keep=0.5)
    assert torch.equal(trained(), exact)
    assert handle.record.keep == {}


def test_transforms_are_exact():
    # Red without the question for a transform: a sliced gradient meets a batched one.
    model = Net().double()
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def f(parameters: Any, x: Tensor) -> Tensor:
        return torch.func.functional_call(model, parameters, (x,)).square().mean()

    def found() -> list[Any]:
        of_each = torch.func.vmap(torch.func.grad(f), (None, 0))(parameters, batch().unsqueeze(1))
        losses, some = model(batch()).square().mean(1), torch.eye(ROWS)[:3].double()
        batched = torch.autograd.grad(losses, [*model.parameters()], some, is_grads_batched=True)
        return [torch.func.grad(f)(parameters, batch()), of_each, batched]

    exact = found()
    thin(model)
    torch.testing.assert_close(found(), exact, rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
@pytest.mark.parametrize("how", ["whole", "whole, thinned first", "in place", "blocks"])
def test_a_model_compiled_by_another_backend_is_exact_and_told(how: str):
    # Whole, or its blocks one by one. Red where they are thinned all the same.
    torch._dynamo.reset()
    model = Net(writes=how != "blocks").double()
    exact = gradient(model, loss_of(model, batch()))
    for place, layer in enumerate(model.layers):
        if how == "in place":
            layer.compile(backend="aot_eager")
        elif how == "blocks":
            model.layers[place] = torch.compile(layer, backend="aot_eager")
    called = torch.compile(model, backend="aot_eager") if how == "whole" else model
    handle = rowprop.thin(called, keep=0.5, blocks=None if how != "blocks" else BLOCKS)
    called = torch.compile(model, backend="aot_eager") if how == "whole, thinned first" else called
    with rowprop.watch() as report:
        torch.testing.assert_close(gradient(model, loss_of(called, batch())), exact, rtol=1e-9, atol=1e-12)
    assert not report.densified, report
    if how == "blocks":
        assert "exact after layers.0, layers.1, layers.2: compiled by a backend other" in handle.record.reason
    else:
        assert handle.record.passes == 0 and "compiled whole" in handle.record.reason


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_blocks_compiled_by_our_backend_stay_sliced():
    torch._dynamo.reset()
    model = Net(writes=False).double()
    for place, layer in enumerate(model.layers):
        model.layers[place] = torch.compile(layer, backend="rowprop", options={"kernels": "eager"})
    with rowprop.watch() as report:
        expect_unbiased(model, lambda: loss_of(model, batch()))
    assert not report.densified, report


def test_a_block_that_runs_without_a_graph_leaves_the_layers_above_alone():
    # Red where it is taken for one in a reentrant checkpoint: the head then runs sliced at all rows.
    class Frozen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.below, self.head = Net(), nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 2))

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                x = self.below(x)
            return self.head(x)

    frozen = Frozen()
    handle = rowprop.thin(frozen, keep=0.5, blocks=["below"])
    with rowprop.watch() as report:
        loss_of(frozen, batch(torch.float32)).backward()
    assert not report.sliced and not handle.record.keep
