"""Weight gradients over drawn (row, token) pairs, against the exact gradient and its variance in closed form."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import rowprop
from accelerator import Waits
from rowprop.backprop.layout import Layout
from rowprop.backprop.rules.matmul import product
from rowprop.backprop.sliced import RowSet, RowSlice
from rowprop.thinning import weights
from rowprop.thinning.draw import added_variance, inclusion, needed
from rowprop.thinning.drawn import Drawn
from rowprop.thinning.weights import Pairs
from thinning_models import capped, compared, gradient, layers, of_blocks, resumed, spread, turn

pytestmark = pytest.mark.usefixtures("one_thread", "always_drawn")
ROWS, TOKENS = 16, 6


@pytest.fixture(autouse=True)
def _small_products_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "A_DRAW", {"cpu": 0})


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": lambda: nn.Sequential(*[m for _ in range(3) for m in (nn.Linear(6, 6), nn.Tanh())]),
    "transformer": lambda: nn.Sequential(*layers(1, 6), *layers(1, 6, norm_first=True)),
    "sequence first": lambda: nn.Sequential(turn(), *layers(2, 6, batch_first=False), turn()),
}


def step(name: str) -> tuple[nn.Module, Callable[[], Tensor]]:
    """A model in float64, and the mean of losses most of whose gradient a few tokens of some rows hold."""
    model = MODELS[name]().double()
    x, target = torch.randn(2, ROWS, TOKENS, 6, dtype=torch.float64)
    x = x * torch.linspace(0.5, 1.5, TOKENS, dtype=torch.float64).view(1, TOKENS, 1)
    scale = torch.linspace(0.05, 2, ROWS, dtype=torch.float64).pow(4).view(ROWS, 1, 1)
    scale = scale * torch.linspace(0.05, 2, TOKENS, dtype=torch.float64).pow(2).view(1, TOKENS, 1)
    return model, lambda: ((model(x) - target).square() * scale).mean((1, 2))


def steered(model: nn.Module, loss: Callable[[], Tensor], passes: int = 33) -> rowprop.thinning.Thinning:
    """Thinning whose shares were set by some backwards."""
    handle = rowprop.thin(model, tau=0.3)
    for _ in range(passes):
        gradient(model, loss())
    return handle


@pytest.mark.parametrize("picked", [False, True], ids=["alone", "after pick"])
@pytest.mark.parametrize("name", MODELS)
def test_the_gradient_is_the_exact_one_on_average(name: str, picked: bool):
    # Red where the pairs are not divided by q: ``places, torch.ones_like(p)`` in draw.
    model, losses = step(name)

    def loss() -> Tensor:
        return rowprop.pick(losses(), torch.arange(4, ROWS)).mean() if picked else losses().mean()

    exact = gradient(model, loss())
    handle = steered(model, loss)
    found = compared(model, loss, exact, 60)
    assert handle.record.pairs < 0.8, handle.record  # pairs are drawn
    assert found.moved > 0.9 and float(found.off.abs().max()) < 5, found
    with handle.paused():
        torch.testing.assert_close(gradient(model, loss()), exact, rtol=1e-12, atol=0)


@pytest.mark.parametrize("share", [0.2, 0.5])
def test_the_variance_is_the_closed_form(share: float):
    # Red where q is drawn in proportion to the gradient alone, and where ``added`` lacks the other factor's norms.
    pairs, generator = Pairs(0.025), torch.Generator().manual_seed(0)
    pairs.shares["here"] = weights._Share(keep=share)
    dz = torch.randn(200, 5, dtype=torch.float64) * torch.rand(200, 1, dtype=torch.float64) ** 2
    x = torch.randn(200, 4, dtype=torch.float64) * torch.rand(200, 1, dtype=torch.float64)
    found: list[Tensor] = []
    for _ in range(3000):
        chosen, product = pairs.draw("here", dz, x, None, 1, lambda: torch.rand((), generator=generator).item())
        places, factors = chosen
        assert len(places) == product.kept == round(share * 200)
        found.append((dz[places] * factors[:, None]).T @ x[places] - dz.T @ x)
    products = dz.norm(dim=1) * x.norm(dim=1)
    closed = spread(products, capped(products, share * 200))
    assert float(torch.stack(found).square().sum((1, 2)).mean()) == pytest.approx(closed, rel=0.2)
    fewest, total = product.numbers.tolist()
    assert total == pytest.approx(float(products.square().sum()), rel=1e-9)
    assert float(needed(products, torch.tensor(closed))) == pytest.approx(share * 200, rel=1e-6)
    assert fewest == pytest.approx(float(needed(products, 0.025 * products.square().sum())))


def test_as_many_pairs_are_drawn_as_the_bound_allows():
    # Red where the shares are not renewed. With M pairs the added variance is tau of the total, for each product.
    pairs = Pairs(tau=0.1)
    dz = torch.randn(400, 5, dtype=torch.float64) * torch.rand(400, 1, dtype=torch.float64) ** 4
    x = torch.randn(400, 4, dtype=torch.float64)
    for _ in range(3):
        _, product = pairs.draw("here", dz, x, None, 1, lambda: 0.5)
        product.read(iter(product.numbers.tolist()))
        pairs.update({"here": [product]})
    assert product.kept < 300
    products = dz.norm(dim=1) * x.norm(dim=1)
    assert 0.09 < spread(products, capped(products, product.kept)) / product.total <= 0.1


def test_weights_of_rows_that_were_thinned_count_once():
    # An estimate of the exact sum: rows that came with a factor v are v times too large, their squares v^2. Red where
    # the weights are left out.
    v = torch.tensor([4.0, 1.0, 2.0, 1.0], dtype=torch.float64)
    dz, x = torch.randn(4, 3, dtype=torch.float64), torch.randn(4, 2, dtype=torch.float64)
    _, product = Pairs(0.025).draw("here", dz * v[:, None], x, v, 1, lambda: 0.5)
    expected = (v * (dz.norm(dim=1) * x.norm(dim=1)).square()).sum()
    assert float(product.numbers[1]) == pytest.approx(float(expected), rel=1e-9)


def test_the_products_cost_the_drawn_pairs():
    # FLOPs by torch's own counter: weight gradients cost the share in the record, the gradients handed on all of it.
    # Red where the product runs at all pairs.
    model = nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(3)))
    x = torch.randn(ROWS, TOKENS, 16) * torch.rand(ROWS, TOKENS, 1) ** 3
    scale = torch.linspace(0.05, 2, ROWS).pow(2).view(ROWS, 1, 1)
    handle = steered(model, lambda: (model(x) * scale).square().sum(), passes=34)  # the next one is no measurement
    loss = (model(x) * scale).square().sum()
    with FlopCounterMode(display=False) as counter:
        loss.backward()
    kept = [round(share * ROWS) for share in handle.record.keep.values()]
    expected = 2 * TOKENS * 16 * 16 * (sum(kept) * handle.record.pairs + sum(kept[:2]))  # the input needs no gradient
    assert handle.record.pairs < 0.8
    assert counter.get_total_flops() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("picked", [False, True], ids=["alone", "after pick"])
def test_all_products_together_add_tau_of_the_variance_between_batches(monkeypatch: pytest.MonkeyPatch, picked: bool):
    # The truth is from the gradient of each row. Red without ``learn``. The tokens of a row pull alike, so the
    # variance is larger than the sum of squares.
    count = 48
    torch.manual_seed(1)
    model = of_blocks(*(nn.Linear(8, 8, bias=False) for _ in range(3))).double()
    x = torch.randn(count, 1, 8, dtype=torch.float64) + 0.3 * torch.randn(count, TOKENS, 8, dtype=torch.float64)
    target = torch.randn(count, 1, 8, dtype=torch.float64)
    rows = torch.arange(8 if picked else 0, count)

    def losses() -> Tensor:
        return (model(x) - target).square().mean((1, 2))

    each = torch.stack([gradient(model, losses()[row] / len(rows)) for row in rows])
    truth = float((each - each.mean(0)).square().sum() * len(rows) / (len(rows) - 1))
    added: list[float] = [0.0]
    update = Pairs.update

    def drawn(norms: Tensor, count: int) -> Tensor:
        q = inclusion(norms, count)
        added[-1] += float(added_variance(norms, q))
        return q

    monkeypatch.setattr(weights, "inclusion", drawn)
    monkeypatch.setattr(Pairs, "update", lambda *args: added.append(0.0) or update(*args))
    handle = rowprop.thin(model, tau=0.1)
    for _ in range(328):
        gradient(model, rowprop.pick(losses(), rows).mean() if picked else losses().mean())
    assert handle._pairs.measured >= 20 and handle._pairs.spread > 2
    assert handle._pairs.spread * handle._pairs.squares == pytest.approx(truth, rel=0.3)
    assert 0.6 < sum(added[-61:-1]) / 60 / truth / 0.1 < 1.4


@pytest.mark.parametrize("period", [2, 4])
def test_each_backward_of_a_loop_of_several_is_measured(period: int):
    # Red with each fourth backward: one of the losses alone would set the pairs.
    pairs, turns = Pairs(0.025), set[int]()
    for pairs.passes in range(100, 200):
        _, product = pairs.draw("here", torch.randn(ROWS, 4), torch.randn(ROWS, 5), None, 1, lambda: 0.5)
        turns |= {pairs.passes % period} if product.numbers is not None else set()
    assert turns == set(range(period))


def test_small_products_are_left_alone_and_told(monkeypatch: pytest.MonkeyPatch):
    # Red without the limit.
    monkeypatch.setattr(weights, "A_DRAW", {"cpu": 2 * ROWS * TOKENS * 18 * 6 / 4 + 1})
    model, losses = step("transformer")
    handle = steered(model, lambda: losses().mean())
    assert handle.record.pairs == 1 and "too small" in handle.record.reason


def test_a_fixed_share_of_rows_leaves_the_weight_gradients_to_these_rows():
    # Red where the pairs are steered beside a fixed share.
    model, losses = step("transformer")
    handle = rowprop.thin(model, keep=0.5)
    for _ in range(10):
        gradient(model, losses().mean())
    assert handle.record.pairs == 1


def test_products_keep_their_names_where_a_block_keeps_all_rows():
    # Red where a product's name follows from the block that thinned last: the shares of later products would move.
    model, losses = step("transformer")
    handle = steered(model, lambda: losses().mean())
    names = set(handle._pairs.shares)
    assert {name.partition("/")[0] for name in names} == {"0", "1"}
    assert len(names) == 8, names
    handle._control.shares["0"].keep = 1.0
    gradient(model, losses().mean())
    assert handle.record.keep["0"] == handle.record.keep["1"] and set(handle._pairs.shares) == names


def test_an_overflow_sets_no_share_of_the_pairs():
    # Red where a sum that is infinite counts as one for which no pairs are needed.
    model, losses = step("mlp")
    handle = rowprop.thin(model, tau=1e-6)
    for factor in (1.0, torch.inf, 1.0):
        losses().mean().mul(factor).backward()
    assert min(share.keep for share in handle._pairs.shares.values()) > 0.5


def test_resuming_goes_on_bit_for_bit():
    # Red where the state lacks the products' shares, or their sums.
    model, losses = step("transformer")
    assert resumed(model, lambda _: losses().mean().backward(), tau=0.3).record.pairs < 0.8


def sliced(index: Tensor) -> RowSlice:
    """A gradient of some rows, with tokens behind each."""
    rows = RowSet(index, ROWS, unique=True, batchnorm="rows")
    return RowSlice(torch.randn(len(index) * TOKENS, 5), rows, Layout(0, ROWS, 1, TOKENS), (ROWS * TOKENS, 5))


@pytest.mark.usefixtures("as_accelerator")
def test_nobody_waits():
    # Red where M is read off this product's norms. The rule is called without autograd, within which no read is seen.
    g, pairs, kept = sliced(torch.arange(0, ROWS, 2)), Pairs(0.025), list[int]()
    pairs.shares["here"] = weights._Share(keep=0.3)

    def draw(first: Tensor, second: Tensor, factors: Tensor | None) -> tuple[Tensor, Tensor] | None:
        chosen, product = pairs.draw("here", first, second, factors, 8, lambda: 0.5)
        assert product.numbers is not None
        kept.append(product.kept)
        return chosen

    g.rows.hook = Drawn(pairs=draw)
    with Waits() as waits:
        product(torch.ops.aten.mm.default, torch.randn(4, ROWS * TOKENS), g)
    assert kept == [16]  # a multiple of 8, at least 0.3 of 48
    assert not waits.seen, waits.seen


def test_pairs_know_by_what_their_rows_were_multiplied():
    # Each token of a row has the row's factor. Red where the rule hands on no factors, or the rows' own.
    base, g, found = RowSet(torch.arange(ROWS), ROWS, unique=True, batchnorm="rows"), sliced(torch.tensor([1, 4])), []
    g.rows.hook = Drawn(base=base, weights=torch.tensor([2.0, 3.0]), pairs=lambda dz, x, factors: found.append(factors))
    product(torch.ops.aten.mm.default, torch.randn(4, ROWS * TOKENS), g)
    assert found[0].tolist() == [2.0] * TOKENS + [3.0] * TOKENS
