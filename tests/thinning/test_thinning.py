"""Thinning against the exact gradient: its draws, its expectation, its variance, and all that has to stay exact."""

from __future__ import annotations

import copy
import gc
import io
from collections.abc import Callable
from dataclasses import make_dataclass
from itertools import combinations, cycle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import rowprop
import thinning_models
from rowprop import host
from rowprop.backprop import backward as backward_module
from rowprop.backprop.autograd import foreign
from rowprop.backprop.rows.gather import gather_plain, rows_apart
from rowprop.backprop.rows.layout import Layout
from rowprop.backprop.rows.rows import RowSet
from rowprop.backprop.rows.slice import RowSlice
from rowprop.backprop.rules import norms
from rowprop.backprop.rules.apply import unite
from rowprop.errors import InvalidInput
from rowprop.thinning.blocks import blocks_of
from rowprop.thinning.draw import floored, inclusion, systematic, variances
from rowprop.thinning.drawn import Drawn, drawn_rows
from rowprop.thinning.handle import ThinRecord, _rows_in
from rowprop.thinning.worth import Work
from thinning_models import BATCHNORM, MODELS, ROWS, Residual, capped, compared, gradient, spread, step
from zoo import Net

pytestmark = pytest.mark.usefixtures("one_thread", "any_count")


def linears(count: int = 2, width: int = 4) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(count)))


NORMS = {
    "even": torch.ones(7),
    "uneven": torch.tensor([9.0, 0.1, 0.3, 4.0, 0.2, 0.2, 1.0]),
    "huge": torch.tensor([1e10, 1.0, 2e10, 3.0, 1e-10, 1e5, 1e10]),
    "zeros": torch.tensor([0.0, 3.0, 0.0, 0.0, 1.0, 2.0, 0.0]),
    "all zero": torch.zeros(7),
    "one": torch.tensor([0.0, 0.0, 5.0, 0.0, 0.0, 0.0, 0.0]),
}


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 6])
@pytest.mark.parametrize("name", NORMS)
def test_probabilities_are_capped_norms_that_add_up(name: str, count: int):
    # The same c by bisection; rows without gradient share what is left. Red with ``ordered * left >= rest``, without
    # the clamp, where 0 / 0 gives NaN (0 for the least number in _finite), and without LEAST: 1 / p is infinite.
    norms = NORMS[name].double()
    p = inclusion(norms, count)
    assert float(p.sum()) == pytest.approx(count, rel=1e-9)
    assert bool((p > 0).all()) and bool((p <= 1).all()) and bool(p.float().reciprocal().isfinite().all())
    if int((norms > 0).sum()) > count:
        torch.testing.assert_close(p, capped(norms, count), rtol=1e-9, atol=1e-12)
    else:
        assert bool((p[norms > 0] == 1).all())


@pytest.mark.parametrize("count", [1, 3, 6])
def test_each_row_is_drawn_with_its_probability(count: int):
    # A grid of offsets in the place of random ones: every place is hit for a share p of them. Red with left=False ends.
    p, grid, hits = inclusion(NORMS["uneven"], count), 4_000, torch.zeros(7)
    for number in range(grid):
        places = systematic(p, count, (number + 0.5) / grid)
        assert len(set(places.tolist())) == count
        hits[places] += 1
    torch.testing.assert_close(hits.double() / grid, p, rtol=0, atol=2 / grid)


def test_rounding_never_draws_a_row_twice_or_one_that_is_not_there():
    # Red without the cummax, and without the minimum.
    for offset in (0.0, 1 - 1e-16, 0.999999999):
        for size in (3, 64, 1000):
            places = systematic(inclusion(torch.ones(size), size - 1) * (1 + 1e-15), size - 1, offset)
            assert places.unique().numel() == size - 1 and int(places.max()) < size
    assert systematic(torch.tensor([1.0, 1.0, 1e-30]).double(), 2, 1 - 1e-9).tolist() == [0, 1]


@pytest.mark.parametrize("name", NORMS)
def test_the_variances_of_shares_are_those_of_their_draws(name: str):
    # Each by its own p; half a row counts as one that is drawn half as often. Red with ``right=True``, without
    # ``- squares``, and where the next row counts as one of the sure.
    norms, shares = NORMS[name].double().clamp(min=1e-60), (1.0, 0.9, 0.6, 3 / 7, 0.25, 1 / 7, 0.05)
    for share, found in zip(shares, variances(NORMS[name].double(), shares).tolist(), strict=True):
        assert found == pytest.approx(spread(norms, capped(norms, 7 * share).clamp(min=1e-80)), rel=1e-6, abs=1e-12)


UNBIASED = [*MODELS, *(name for name in BATCHNORM if not name.startswith("features"))]  # those have too few values


@pytest.mark.parametrize(("name", "picked"), list(zip(UNBIASED, cycle([False, True]))))
def test_the_gradient_is_the_exact_one_on_average(name: str, picked: bool):
    # ``nox -s thinning`` runs each model alone and after a pick, with 5,000 draws. Red where the division by p is left
    # out: with ``weights.ones_like()`` in drawn.py all fail. With BatchNorm in training mode, batches come in a random
    # order; red there with the rows' projection in the place of ``_weighed``, and where a union knows no weights: it
    # densifies.
    found = thinning_models.thinned(name, picked, 150 if name in BATCHNORM else 100)
    assert found.moved > 1 / 3
    assert float(found.off.abs().max()) < 5, found.off


def test_the_record_tells_the_variance_of_the_closed_form():
    # The norms of the gradient at the block, from autograd. Red with p for 1 - p in ``added_variance``, and where the
    # record's quotient is over the rows kept. That draws vary by this much: test_thinning_variance.py.
    below, block = nn.Linear(5, 8), nn.Linear(8, 8)
    model = nn.Sequential(below, nn.Sequential(block)).double()
    x, scale = torch.randn(ROWS, 5).double(), torch.linspace(0.1, 3, ROWS).double().unsqueeze(1)
    handle = rowprop.thin(model, keep=0.4, blocks=["0"])
    (model(x) * scale).square().sum().backward()
    hidden = below(x).detach().requires_grad_()
    (block(hidden) * scale).square().sum().backward()
    norms = hidden.grad.norm(dim=1)
    handle.state_dict()
    expected = spread(norms, capped(norms, 5)) / float(norms.square().sum())
    assert handle.record.variance["0"] == pytest.approx(expected, rel=1e-9)


def test_a_block_above_which_all_rows_are_kept_costs_the_kept_rows():
    # FLOPs by torch's own counter: at keep .25, below the last block a quarter of them.
    model, x = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(4))), torch.randn(32, 64)

    counted: list[int] = []
    for keep in (None, 0.25):
        if keep is not None:
            rowprop.thin(model, keep=keep)
        loss = model(x).square().sum()
        with FlopCounterMode(display=False) as counter:
            loss.backward()
        counted.append(counter.get_total_flops())
    assert counted[1] == counted[0] // 4


@pytest.mark.usefixtures("always_drawn")
def test_shares_fall_as_few_rows_come_to_hold_the_gradient():
    # With even rows, a share close to all of them is needed; with a tenth of the rows holding all, a tenth.
    for large, least, most in ((ROWS, 0.75, 1.0), (2, 0.08, 0.3)):
        model, _ = step("residual")
        handle = rowprop.thin(model, tau=0.02)
        x, scale = torch.randn(ROWS, 5).double(), torch.full((ROWS,), 1e-3).double()
        scale[:large] = 1
        for _ in range(20):
            (model(x).mean(1) * scale).square().sum().backward()
        assert all(least <= share <= most for share in handle.record.keep.values()), handle.record


def rows_of(index: list[int] | range, num_rows: int = 6) -> RowSet:
    return RowSet(torch.tensor(list(index)), num_rows, unique=True, batchnorm="rows")


def test_what_is_made_of_drawn_rows_keeps_what_is_known_of_them():
    # Red where ``moved`` forgets who measures, where it does not take the weights at the places, and where
    # a union of known and unknown weights has weights.
    base = rows_of(range(6))
    drawn = drawn_rows(base, torch.tensor([1, 4]), torch.tensor([2.0, 3.0]))
    tokens, routed = drawn.spread(2), drawn.derived(torch.tensor([0]), 9, unique=True)
    for rows, weights in ((drawn, [2, 3]), (tokens, [2, 2, 3, 3])):
        assert rows.stands_for()[0] is base and rows.stands_for()[1].tolist() == weights
    assert routed.stands_for() == (base, None)
    for rows in (tokens, routed):
        assert rows.hook.measures is drawn.hook.measures
    again = drawn_rows(drawn, torch.tensor([1]), torch.tensor([4.0]))
    assert again.stands_for()[0] is base and again.stands_for()[1].tolist() == [12]
    assert again.hook.tensors() == (again.hook.weights,)  # for streams
    results: list[Tensor] = []  # of a compiled region, outside of which other rows are not known
    traced = Drawn([print], base).traced(tokens, results)
    traced.take(routed, torch.zeros(1))
    traced.take(tokens, torch.ones(4))
    assert traced.stands_for(tokens) == (base, None) and [found.numel() for found in results] == [4]
    assert Drawn().key() != drawn.hook.key() != Drawn([print], base).key()
    union, places = rows_of([1, 4]), {drawn: torch.tensor([0, 1]), base: torch.tensor([0, 1, 0, 1, 0, 1])}
    together = drawn.hook.united(union, places).stands_for(union)
    assert together[0] is base and together[1].tolist() == pytest.approx([2 / 8 * 2 + 6 / 8 * 3, 2 / 8 * 3 + 6 / 8 * 3])
    assert drawn.hook.united(union, {drawn: places[drawn], routed: torch.tensor([0])}).weights is None
    assert drawn_rows(routed, torch.tensor([0]), torch.tensor([4.0])).stands_for() == (base, None)


def test_rows_that_are_some_of_the_same_meet_without_a_look(monkeypatch: pytest.MonkeyPatch):
    # Red when: a device is asked which rows two draws have together; what they make is not known to be some of the rows
    # that they were drawn from; a row of both counts as two where the host can look.
    def meet(*places: list[int]) -> tuple[RowSet, RowSet]:
        base = rows_of(range(6))
        sets = [base.some(torch.tensor(place)) for place in places]
        given = [RowSlice(torch.ones(rows.kept, 2), rows, Layout(0, 6), (6, 2)) for rows in sets]
        found = unite(given, {})[0]
        for g, place in zip(found, places, strict=True):
            assert torch.equal(g.dense(), torch.zeros(6, 2).index_fill(0, torch.tensor(place), 1))
        assert found[0].rows is found[1].rows
        return base, found[0].rows

    monkeypatch.setattr(host, "READ_AT_ONCE", {"cpu"})
    assert meet([0, 1], [1, 2])[1].index.tolist() == [0, 1, 2]
    monkeypatch.setattr(host, "READ_AT_ONCE", set[str]())
    with rowprop.watch() as report:
        base, union = meet([0, 1], [1, 2])
        assert union.places_in(base).tolist() == [0, 1, 1, 2]
        base, union = meet([0, 1, 2], [2, 3, 4])
        assert union is base
    assert not report.waited


def normed(rows: RowSet, g: Tensor, x: Tensor, layout: Layout, weight: Tensor | None) -> tuple[Tensor, ...]:
    """The rule of BatchNorm on the rows' gradient, times the rows' weights: the gradients of input, weight and bias."""
    dims = [d for d in range(x.ndim) if d != 1]
    mean, invstd = x.mean(dims), (x.var(dims, correction=0) + 1e-5).rsqrt()
    weights, values = rows.stands_for()[1], gather_plain(g, rows.index, layout)
    kept = rows_apart(values, layout.compact(rows.kept))
    kept = kept if weights is None else kept * weights.view(-1, *[1] * (kept.ndim - 2))
    sliced = RowSlice(kept.reshape(values.shape), rows, layout, g.shape)
    rule, op = norms.batch_norm_backward, torch.ops.aten.native_batch_norm_backward.default
    dx, *sums = rule(op, sliced, x, weight, None, None, mean, invstd, True, 1e-5, [True] * 3)
    return (dx.dense(), *sums)


SHAPES = {
    "images": ((6, 3, 2, 2), Layout(0, 6), torch.contiguous_format),
    "channels last": ((6, 3, 2, 2), Layout(0, 6), torch.channels_last),
    "features": ((6, 3), Layout(0, 6), torch.contiguous_format),
    "positions in front and behind": ((24, 3), Layout(0, 6, 2, 2), torch.contiguous_format),
}


@pytest.mark.parametrize("picked", [False, True], ids=["all rows", "rows of a pick"])
@pytest.mark.parametrize("sure", [0, 2])
@pytest.mark.parametrize("name", SHAPES)
def test_batch_norm_in_training_is_unbiased_over_all_draws(name: str, sure: int, picked: bool):
    # The mean over every draw of equal probabilities, some rows kept for sure; truth: autograd, or the rule for a pick.
    # Red with ``own`` left out, with its factor v, without ``share``, with the base's number of entries left out.
    shape, layout, memory_format = SHAPES[name]
    x = torch.randn(shape, dtype=torch.float64).contiguous(memory_format=memory_format)
    g = torch.randn(shape, dtype=torch.float64).contiguous(memory_format=memory_format) + x.square()
    weight = torch.randn(3, dtype=torch.float64)
    base = rows_of([5, 0, 2, 3, 4] if picked else range(6))
    if picked:
        exact = normed(base, g, x, layout, weight)
    else:
        norm = nn.BatchNorm2d(3) if len(shape) == 4 else nn.BatchNorm1d(3)
        norm.double().weight.data.copy_(weight)
        exact = torch.autograd.grad((norm(x.requires_grad_()) * g).sum(), [x, norm.weight, norm.bias])
        x = x.detach()
    left, drawn, draws = base.kept - sure, 2, list[tuple[Tensor, ...]]()
    weights = torch.tensor([1.0] * sure + [left / drawn] * drawn, dtype=torch.float64)
    for some in combinations(range(sure, base.kept), drawn):
        draws.append(normed(drawn_rows(base, torch.tensor([*range(sure), *some]), weights), g, x, layout, weight))
    for one, found in zip(exact, zip(*draws, strict=True), strict=True):
        torch.testing.assert_close(torch.stack(found).mean(0), one, rtol=1e-9, atol=1e-10)


def test_a_row_of_hardly_any_gradient_does_not_outweigh_the_batch_in_a_batch_norm():
    # By Monte Carlo. Red without the floor of the norms: six rows of nearly no gradient have p of about
    # 1e-3, and one that is drawn takes 1e3 times the batch's means from its gradient.
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 6)).double()
    x, target = torch.randn(ROWS, 4).double(), torch.randn(ROWS, 6).double()
    scale = torch.tensor([1.0, 1e-3], dtype=torch.float64).repeat(ROWS // 2)

    loss = lambda: ((model(x) - target).square().sum(1) * scale).mean()  # noqa: E731
    exact = gradient(model, loss())
    rowprop.thin(model, keep=0.4, blocks=["3"], generator=torch.Generator().manual_seed(1))
    draws = torch.stack([gradient(model, loss()) for _ in range(300)])
    assert float((draws - exact).square().sum(1).mean() / exact.square().sum()) < 2  # without the floor 375
    assert int(inclusion(floored(torch.tensor([1.0, 2.0, torch.inf, 0.0])), 2).argmax()) == 2  # an overflow is kept


def test_what_has_to_be_exact_is():
    # Red where the hook does not ask: for the mode, for paused, for create_graph; where draws take torch's generator.
    model, losses = step("residual")
    exact, numbers = gradient(model, losses().mean()), torch.get_rng_state()
    handle = rowprop.thin(model, keep=0.25)
    assert not torch.equal(gradient(model, losses().mean()), exact)
    assert torch.equal(torch.get_rng_state(), numbers)
    with handle.paused():
        assert torch.equal(gradient(model, losses().mean()), exact)
    model.eval()
    assert torch.equal(gradient(model, losses().mean()), exact)
    model.train()
    grads = torch.autograd.grad(losses().mean(), tuple(model.parameters()), create_graph=True)
    assert torch.equal(torch.cat([g.flatten() for g in grads]), exact)
    loss, other = losses().mean(), losses().mean()
    with handle.paused():
        handle.remove()
        assert torch.equal(gradient(model, loss), exact)
    assert torch.equal(gradient(model, other), exact)


def test_a_copy_and_a_file_of_the_model_are_not_thinned():
    # Red where the hooks are plain functions: a generator cannot be copied.
    model, _ = step("residual")
    x = torch.randn(ROWS, 5, dtype=torch.float64)
    exact = gradient(model, model(x).square().mean())
    rowprop.thin(model, keep=0.25)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        assert torch.equal(gradient(other, other(x).square().mean()), exact)


def test_a_state_that_knows_no_block_yet_can_be_loaded_before_a_backward():
    # Red where the share of a place is looked up and not made: KeyError.
    model, losses = step("residual")
    handle = rowprop.thin(model)
    state, exact = handle.state_dict(), gradient(model, losses().mean())
    loss = losses().mean()
    handle.load_state_dict(state)
    assert torch.equal(gradient(model, loss), exact)


def test_a_model_is_thinned_once():
    # Also by its part. Red where a copy is refused, or a model whose handle was removed.
    model = linears(3)
    handle = rowprop.thin(model, blocks=["0"])
    for again, blocks in ((model, ["1"]), (nn.Sequential(model), ["0.0"])):
        with pytest.raises(InvalidInput, match="thinned already"):
            rowprop.thin(again, blocks=blocks)
    rowprop.thin(copy.deepcopy(model), blocks=["0"])
    handle.remove()
    rowprop.thin(model, blocks=["0"])


def test_the_record_tells_what_was_saved():
    # Each block counts by the work below it, where it is known. Red where the blocks count alike then.
    model = linears(3)
    handle = rowprop.thin(model, keep=0.5, blocks=["0", "1"])
    assert handle.record.saved == 0 and "no backward yet" in repr(handle)
    handle._control.share = lambda place: {"0": 0.5, "1": 1.0}[place]
    for works, saved in (({}, 0.25), ({"0": Work(exact=3.0), "1": Work(exact=1.0)}, 0.375)):
        handle._worth.works = works
        model(torch.randn(8, 4)).square().sum().backward()
        handle.state_dict()
        assert handle.record.keep == {"1": 1, "0": 0.5}
        assert handle.record.saved == handle.record.to_dict()["thin/saved"] == saved


@pytest.mark.usefixtures("quick_collections")
@pytest.mark.parametrize("backward", [True, False])
def test_a_graph_goes_with_its_loss(backward: bool, monkeypatch: pytest.MonkeyPatch):
    # Without a garbage collection. Red where a hook holds its own node: the graph of each step would stay, and of a
    # forward without a backward all activations.
    monkeypatch.setattr("rowprop.thinning.control.FIRST", (2,))

    def nodes() -> int:
        return sum(type(held).__name__.endswith("Backward0") for held in gc.get_objects())

    model = linears(3)
    rowprop.thin(model, tau=0.1)
    before = nodes()
    gc.disable()
    try:
        for _ in range(4):
            loss = model(torch.randn(ROWS, 4)).square().mean()
            if backward:
                loss.backward()
            del loss
        assert nodes() == before
    finally:
        gc.enable()


def test_a_cell_that_is_called_many_times_is_prepared_once(monkeypatch: pytest.MonkeyPatch):
    # A loss at each step makes each gradient full again. Red where each draw walks through all of the graph below: the
    # cost of a backward then grows with the square of the steps.
    walks: list[int] = []
    upstream = foreign.upstream
    monkeypatch.setattr(foreign, "upstream", lambda *args: walks.append(1) or upstream(*args))
    model = nn.ModuleDict({"cell": nn.GRUCell(3, 4), "head": nn.Linear(4, 1)}).double()
    handle = rowprop.thin(model, keep=0.5, blocks=["cell"])
    for backwards in (1, 2):
        hidden, loss = torch.zeros(ROWS, 4, dtype=torch.float64), torch.zeros((), dtype=torch.float64)
        for x in torch.randn(7, ROWS, 3, dtype=torch.float64):
            hidden = model["cell"](x, hidden)
            loss = loss + model["head"](hidden).square().mean()
        loss.backward()
        handle.state_dict()
        assert len(walks) == backwards and handle.record.keep["cell"] == pytest.approx(0.5)
    assert not backward_module._running


def stages() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 4, 3), *(nn.Sequential(Residual(4), Residual(4)) for _ in range(2)))


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (stages, "1.0 1.1 2.0 2.1"), (lambda: thinning_models.cnn(True), "0 3 6"), (thinning_models.vit, "1 2"),
        (thinning_models.unet, "down.0 down.1 up.0 up.1"),
        (lambda: nn.ModuleList(nn.ModuleList([Residual(4)]) for _ in range(2)), "0.0 1.0"),
        (lambda: nn.Sequential(nn.LazyLinear(4), nn.ReLU(), nn.LazyLinear(4)), "0 2"),
    ],
    ids=["stages", "cnn", "vit", "u-net", "lists", "lazy"],
)  # fmt: skip
def test_blocks_are_found(make: Callable[[], nn.Module], names: str):
    # Red where lists count as blocks, and where a parameter without a size is counted.
    assert list(blocks_of(make(), None)) == names.split()


def test_blocks_are_named_by_name_or_module():
    # Red where a list that nobody calls is a block. Names that are not there, and all else: tools/hostile_cases.py.
    with pytest.raises(InvalidInput, match="blocks that repeat"):
        rowprop.thin(nn.Linear(2, 2))
    model = thinning_models.unet()
    assert list(blocks_of(model, [model.head, "down.0"])) == ["head", "down.0"]
    model = nn.ModuleDict({"a": nn.Linear(4, 4), "list": nn.ModuleList([nn.Linear(4, 4)])})
    model["b"] = model["a"]
    assert list(blocks_of(model, ["b"])) == ["b"] and list(blocks_of(model, [model["b"]])) == ["a"]
    with pytest.raises(InvalidInput, match="got the block list, a ModuleList, which has no forward of its own"):
        blocks_of(model, ["list"])


@pytest.mark.parametrize(
    ("shape", "sizes", "layout"),
    [
        ((6, 5, 4), [6], Layout(0, 6)),
        ((5, 6, 4), [6], Layout(1, 6)),  # sequences first
        ((6, 6, 4), [6], Layout(0, 6)),  # a guess: see the next test
        ((24, 4, 4), [6], Layout(0, 6, 1, 4)),  # windows of images
        ((25, 4), [6], None),
        ((), [6], None),
        ((6, 4), [None], Layout(0, 6)),  # no tensor came into the model
        ((1, 4), [1], None),
        ((12, 6), [6, 12], Layout(0, 12)),  # a checkpoint runs the first of two forwards again; the width is 6
        ((3, 12), [6, 12], Layout(1, 12)),
        ((24, 5), [7, 12], Layout(0, 12, 1, 2)),
    ],
)
def test_rows_are_the_dimension_of_the_size_of_the_batch(shape: Any, sizes: list[int | None], layout: Layout | None):
    # Red where the second dimension comes first, where a remainder is dropped, and where the last forward's size counts
    # before the dimension.
    assert _rows_in(torch.Size(shape), sizes) == layout


def test_a_wrong_guess_of_the_rows_costs_time_and_no_bias():
    # As many steps as rows, and sequences first: steps are taken for rows. Attention mixes them, so it densifies.
    model = thinning_models.turned().double()
    x, scale = torch.randn(5, 5, 3, dtype=torch.float64), torch.linspace(0.1, 2, 5, dtype=torch.float64)

    loss = lambda: (model(x).flatten(1).square().mean(1) * scale).mean()  # noqa: E731
    exact = gradient(model, loss())
    rowprop.thin(model, keep=0.5, generator=torch.Generator().manual_seed(1))
    with rowprop.watch() as report:
        gradient(model, loss())
    assert report.densified
    assert float(compared(model, loss, exact, 100).off.abs().max()) < 5


def block(around: Callable[[nn.Module, Any], Any]) -> nn.Module:
    """A linear layer with something around it."""
    return Net(lambda net, x: around(net.linear, x), linear=nn.Linear(5, 5))


HOLDERS: dict[str, tuple[Callable[[nn.Module, Any], Any], Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "lists": (lambda layer, held: held.append(layer(held[-1]).tanh()) or held, lambda x: [x], sum),
    "dicts": (
        lambda layer, held: held.update(features=layer(held["features"]).tanh()) or held,
        lambda x: {"features": x},
        lambda held: held["features"],
    ),
    "views": (
        lambda layer, held: held.update(features=layer(held["features"]).tanh().chunk(1)[0]) or held,
        lambda x: {"features": x},
        lambda held: held["features"],
    ),
    "objects": (
        lambda layer, held: setattr(held, "features", layer(held.features).tanh()) or held,
        make_dataclass("State", ["features"]),
        lambda held: held.features,
    ),
}


def holding(kind: str) -> nn.Module:
    """The model reads its own reference to the object that its blocks write to."""
    write, hold, read = HOLDERS[kind]

    def forward(net: Any, x: Tensor) -> Tensor:
        out = held = hold(x)
        for each in net.blocks:
            out = each(out)
        return read(held)

    return Net(forward, blocks=nn.ModuleList(block(write) for _ in range(3)))


@pytest.mark.parametrize("kind", HOLDERS)
def test_an_object_that_blocks_write_to_stays_the_models_own(kind: str):
    # Red where the hook returns another container: the model's own then lacks all that later blocks write.
    model, x = holding(kind).double(), torch.randn(ROWS, 5, dtype=torch.float64)
    exact, expected = gradient(model, model(x).square().mean()), model(x)
    for settings in ({"tau": 0.1}, {"keep": 0.5}):
        handle = rowprop.thin(model, **settings)
        assert torch.equal(model(x), expected)
        handle.remove()
    rowprop.thin(model, keep=0.5, generator=torch.Generator().manual_seed(1))
    assert float(compared(model, lambda: model(x).square().mean(), exact, 60).off.abs().max()) < 4


class Entries(tuple):
    """An output whose constructor takes its entries one by one."""

    def __new__(cls, out: Tensor, aux: Tensor) -> Entries:
        return super().__new__(cls, (out, aux))


def _entries(linear: nn.Module, x: Any) -> Entries:
    return Entries(linear(x[0] if isinstance(x, tuple) else x).tanh(), torch.zeros(()))


def _nested(linear: nn.Module, x: Tensor) -> Tensor:
    return torch.nested.to_padded_tensor(linear(torch.nested.as_nested_tensor(list(x.unbind()))), 0.0).tanh()


def _jagged(linear: nn.Module, x: Tensor) -> Tensor:
    nested = torch.nested.nested_tensor_from_jagged(x.flatten(0, 1), torch.arange(0, len(x) * 3 + 1, 3))
    return linear(nested).values().view(len(x), 3, 5).tanh()


def test_outputs_of_any_make_go_on_as_they_are():
    # Red where such an output is built anew.
    model = nn.Sequential(block(_entries), block(_entries))
    handle = rowprop.thin(model, keep=0.5)
    out = model(torch.randn(ROWS, 5))
    assert type(out) is Entries
    out[0].square().sum().backward()
    handle.state_dict()  # a device's numbers are read late
    assert handle.record.keep == {"1": 0.5, "0": 0.5}


@pytest.mark.parametrize("around", [_nested, _jagged])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_inside_of_a_block(around: Callable[[nn.Module, Any], Any]):
    # Red where the work below a block is a product of their sizes.
    model = nn.Sequential(block(around), block(around))
    handle = rowprop.thin(model, tau=0.1)
    for _ in range(3):
        model(torch.randn(ROWS, 3, 5)).square().mean().backward()
    handle.state_dict()
    assert handle.record.passes == 3


@pytest.mark.filterwarnings("ignore:`torch.jit.trace")  # of one category or another, by version
def test_fake_tensors_and_a_trace_have_exact_gradients():
    # Red where a fake tensor is read, and where a hook's draw gets into the trace.
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        model = linears()
        handle = rowprop.thin(model, keep=0.5)
        model(torch.randn(8, 4)).sum().backward()
    assert not handle.record.keep
    model = linears()
    rowprop.thin(model, keep=0.5)
    traced = torch.jit.trace(model, torch.randn(8, 4))
    assert torch.equal(traced(torch.ones(8, 4)), model(torch.ones(8, 4)))


def test_a_record_says_what_its_backward_saved():
    record = ThinRecord({"2": 0.5, "1": 0.25}, {}, 0.02, 7, "why", saved=0.61)
    said = "saved 61 % of the blocks' backward, which kept 25 to 50 % of the rows; why"
    assert repr(record) == str(record) == f"ThinRecord(backward 7: {said})"
    assert repr(rowprop.thin(linears(2, 2)).record).startswith("ThinRecord(no backward")
