"""What rows are told of weight gradients: for each row the squared norm of its part, beside each row's own gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rowprop.backprop.autograd.hooks import hook_gradient, rows_in
from rowprop.backprop.rows.layout import Layout, Part
from rowprop.backprop.rows.rows import RowSet
from rowprop.backprop.rows.slice import RowSlice
from rowprop.thinning import squares
from rowprop.thinning.drawn import Drawn, thinned

pytestmark = pytest.mark.usefixtures("one_thread")

N = 9
FEW, MANY = 5, 24
"""Tokens of a row: the squares are exact with few, and estimated with many where both widths are large."""


def told(
    out: Tensor, layout: Layout, v: Tensor, choose: Any = None, make: Any = rows_in
) -> list[tuple[RowSet, Tensor]]:
    """All that is measured of the rows in the backward of ``(out * v).sum()``."""
    found: list[tuple[RowSet, Tensor]] = []

    def change(grad: Tensor, layout: Layout) -> RowSlice:
        g = make(grad, layout)
        g.rows.hook = Drawn([lambda rows, of_rows: found.append((rows, of_rows))])
        return g if choose is None else chosen(g, choose)

    hook_gradient(out, layout, change)
    out.backward(v)
    return found


def chosen(g: RowSlice, choose: Any) -> RowSlice:
    """The rows that a choice keeps."""
    kept = choose()
    return g if kept is None else thinned(g, *kept)


def told_once(out: Tensor, layout: Layout, v: Tensor, choose: Any = None) -> Tensor:
    """The squares of the only weight gradient."""
    ((rows, of_rows),) = told(out, layout, v, choose)
    assert of_rows.shape == rows.index.shape
    return of_rows


def gradients(forward: Callable[[], Tensor], layout: Layout, v: Tensor, weight: Tensor) -> Tensor:
    """The weight's gradient of each row alone, (N, *shape)."""
    alone: list[Tensor] = []
    for row in range(layout.num_rows):
        lines = torch.arange(layout.size).view(layout.outer, layout.num_rows, layout.inner)[:, row].flatten()
        only = torch.zeros_like(v).index_copy_(layout.dim, lines, v.index_select(layout.dim, lines))
        alone += torch.autograd.grad(forward(), weight, only)
    return torch.stack(alone)


def of_each(alone: Tensor) -> Tensor:
    return alone.flatten(1).double().square().sum(1)


def same(found: Tensor, expected: Tensor, rtol: float = 1e-4) -> None:
    torch.testing.assert_close(found.double(), expected.double(), rtol=rtol, atol=0)


def within_error(found: Tensor, alone: Tensor, width: int, count: int) -> None:
    """The sum over rows is within 4 standard errors, and not exact.

    It is the trace of ``S.T @ M @ S``, where M (width, width) is the sum of all parts' Gram matrices. For signs in S
    (width, count), scaled, its variance is ``2 / count`` times the sum of the squares of M's entries off the diagonal.
    """
    flat = alone.movedim(width, -1).flatten(0, -2).double()
    gram = flat.T @ flat
    error = ((gram.square().sum() - gram.diagonal().square().sum()) * 2 / count) ** 0.5
    off = float(found.double().sum() - gram.trace()) / float(error)
    assert 1e-3 < abs(off) < 4
    assert found.dtype == torch.float32


PRODUCTS: dict[str, tuple[Layout, tuple[int, ...]]] = {
    "no tokens": (Layout(0, N), (N,)),
    "rows before tokens": (Layout(0, N), (N, FEW)),
    "rows after tokens": (Layout(1, N), (FEW, N)),
    "rows between tokens": (Layout(1, N), (2, N, 3)),
    "flat, rows first": (Layout(0, N, 1, FEW), (N * FEW,)),
    "flat, tokens first": (Layout(0, N, FEW, 1), (FEW * N,)),
    "flat, rows between": (Layout(0, N, 2, 3), (2 * N * 3,)),
    "two tokens": (Layout(0, N), (N, 2)),
    "as many tokens as signs": (Layout(0, N), (N, squares.SIGNS)),
    "many tokens": (Layout(0, N), (N, MANY)),
    "many tokens, rows second": (Layout(1, N), (MANY, N)),
}


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("widths", [(20, 7), (7, 20), (40, 24)])
@pytest.mark.parametrize("name", PRODUCTS)
def test_a_linear_layer_tells_the_square_of_each_rows_part(name: str, widths: tuple[int, int], bias: bool):
    # Nothing is estimated: 7 is below SIGNS, or few tokens are exact in large widths. Red with `_lines` that does not
    # move the rows in front, with the norms' product for any number of lines, and with a sum over the Gram matrices'
    # diagonals alone.
    layout, shape = PRODUCTS[name]
    if "many" in name and min(widths) > squares.SIGNS:
        pytest.skip("an estimate")
    layer, x = nn.Linear(*widths, bias=bias), torch.randn(*shape, widths[0])
    v = torch.randn(*shape, widths[1])
    same(told_once(layer(x), layout, v), of_each(gradients(lambda: layer(x), layout, v, layer.weight)))


@pytest.mark.parametrize("turned", [False, True])
def test_the_gradient_may_be_either_factor(turned: bool):
    # Red with `g.dim` for `place` in the rule.
    layout, w, x = Layout(1 if turned else 0, N), nn.Parameter(torch.randn(6, 8)), torch.randn(N, 6)

    def forward() -> Tensor:
        return w.T @ x.T if turned else x @ w

    v = torch.randn(8, N) if turned else torch.randn(N, 8)
    same(told_once(forward(), layout, v), of_each(gradients(forward, layout, v, w)))


@pytest.mark.parametrize("widths", [(40, 24), (24, 40)])
@pytest.mark.parametrize("common", [0.0, 1.0])
def test_many_tokens_in_large_widths_are_estimated(widths: tuple[int, int], common: float):
    # Red with signs that are not divided by the root of their number. With a common part, also with signs of one kind.
    layer, x, v = nn.Linear(*widths), torch.randn(N, MANY, widths[0]) + common, torch.randn(N, MANY, widths[1]) + common
    alone = gradients(lambda: layer(x), Layout(0, N), v, layer.weight)  # (N, out, in); the wider one is multiplied
    found = told_once(layer(x), Layout(0, N), v)
    within_error(found, alone, 2 if widths[0] > widths[1] else 1, squares.SIGNS)


def test_a_square_is_never_negative():
    # Red without the clamp: the lines' parts cancel, and rounding leaves numbers of either sign.
    dz, x = torch.randn(400, 4, 40), torch.randn(400, 1, 24).expand(400, 4, 24)
    rows = RowSet(torch.arange(400), 400, unique=True, batchnorm="rows")
    found = squares.of_product(dz - dz.mean(1, keepdim=True), x, rows)
    assert 0 <= float(found.min()) <= float(found.max()) < 0.1


@pytest.mark.parametrize(("width", "count"), [(64, 8), (384, 16), (4096, 16), (16384, 16)])
def test_signs_are_as_good_as_random_ones(width: int, count: int):
    # Red without the first multiplication: some lines of the matrix are then like the 37th line after them.
    signs = squares._random_signs(width, count, torch.float64, torch.device("cpu")).sign()
    assert signs.unique().tolist() == [-1, 1]
    assert abs(float(signs.mean())) < 4 * signs.numel() ** -0.5
    for by in range(1, 64):
        apart = signs[by:] * signs[:-by]
        assert abs(float(apart.mean())) < 4.5 * apart.numel() ** -0.5
    columns = signs.T @ signs / width**0.5
    assert float(columns.triu(1).abs().max()) < 4.5


CONVOLUTIONS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "1d": (lambda: nn.Conv1d(3, 5, 3), (3, 8)),
    "2d": (lambda: nn.Conv2d(3, 5, 3, padding=1), (3, 6, 7)),
    "3d": (lambda: nn.Conv3d(2, 5, 2, stride=2), (2, 4, 5, 4)),
    "stride, no bias": (lambda: nn.Conv2d(3, 5, 3, stride=(2, 1), padding=(1, 0), bias=False), (3, 7, 6)),
    "dilation": (lambda: nn.Conv2d(3, 5, 3, dilation=2, padding="same"), (3, 7, 6)),
    "circular": (lambda: nn.Conv1d(3, 5, 3, padding=1, padding_mode="circular"), (3, 8)),
    "one position": (lambda: nn.Conv2d(4, 5, 1), (4, 3, 4)),
    "groups": (lambda: nn.Conv2d(12, 6, 3, groups=2), (12, 5, 5)),
    "depthwise": (lambda: nn.Conv2d(12, 12, 3, groups=12, padding=1), (12, 5, 5)),
    "depthwise, more out": (lambda: nn.Conv1d(10, 20, 3, groups=10), (10, 6)),
    "transposed": (lambda: nn.ConvTranspose2d(12, 5, 3, stride=2, padding=1, output_padding=1), (12, 4, 5)),
    "transposed, 1d": (lambda: nn.ConvTranspose1d(3, 4, 4, stride=3), (3, 5)),
    "transposed, groups": (lambda: nn.ConvTranspose2d(12, 8, 3, groups=2, dilation=2), (12, 4, 5)),
    "transposed, output_padding": (lambda: nn.ConvTranspose1d(3, 4, 3, dilation=3, output_padding=2), (3, 5)),
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_a_convolution_tells_the_square_of_each_rows_part(name: str):
    # All have at most CHANNELS in the weight's second dimension. Red with `groups` for `count * groups`, and with
    # shape[1] rows of the weight.
    make, shape = CONVOLUTIONS[name]
    layer, x = make(), torch.randn(N, *shape)
    v = torch.randn_like(layer(x))
    same(told_once(layer(x), Layout(0, N), v), of_each(gradients(lambda: layer(x), Layout(0, N), v, layer.weight)))


@pytest.mark.parametrize("common", [0.0, 1.0])
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize(
    ("make", "count"),
    [
        (lambda: nn.Conv2d(24, 5, 3, padding=1), 24),
        (lambda: nn.Conv2d(40, 6, 3, stride=2, groups=2), 40),
        (lambda: nn.ConvTranspose2d(5, 24, 3, stride=2, output_padding=1), 5),
        (lambda: nn.ConvTranspose2d(6, 40, 3, groups=2), 6),
    ],
)
def test_many_channels_are_estimated(make: Callable[[], nn.Module], count: int, channels_last: bool, common: float):
    # Red with signs not divided by the root of their number, and where a transposed one's input is multiplied by them.
    layer, x = make(), torch.randn(N, count, 6, 5) + common
    x = x.contiguous(memory_format=torch.channels_last) if channels_last else x
    v = torch.randn_like(layer(x)) + common
    alone = gradients(lambda: layer(x), Layout(0, N), v, layer.weight)
    within_error(told_once(layer(x), Layout(0, N), v), alone, 2, squares.CHANNELS)


def half(weights: Tensor) -> Any:
    """Keeps every other row, multiplied by a weight."""
    return lambda: (torch.arange(0, N, 2), weights)


def deep() -> nn.Sequential:
    """Three weights, of which the first one's squares are exact, and those of a convolution and of tokens estimates."""
    return nn.Sequential(
        nn.Conv2d(3, 12, 3), nn.Tanh(), nn.Conv2d(12, 20, 3, padding=1), nn.Flatten(2), nn.Linear(25, 20)
    )


def images() -> tuple[Tensor, Tensor]:
    return torch.randn(N, 3, 7, 7), torch.randn(N, 20, 20)


def test_thinned_rows_tell_squares_of_what_they_were_multiplied_by():
    # Beside those of all rows, which have the same signs. Red where `moved` does not hand `measures` on.
    model, (x, v), weights = deep(), images(), torch.rand(5, dtype=torch.float64) + 1
    every, some = told(model(x), Layout(0, N), v), told(model(x), Layout(0, N), v, half(weights))
    assert len(some) == len(every) == 3
    for (rows, found), (_, of_all) in zip(some, every, strict=True):
        assert rows.index.tolist() == [0, 2, 4, 6, 8]
        assert rows.hook.weights is weights
        same(found, weights.square() * of_all[::2])


def test_gradients_and_random_state_stay_as_they_are():
    # Red with signs drawn by `torch.randn`, and with an op in place on a factor.
    model, (x, v) = deep(), images()
    model(x).backward(v)
    plain = [p.grad for p in model.parameters()]
    model.zero_grad(set_to_none=True)
    before = torch.get_rng_state()
    assert len(told(model(x), Layout(0, N), v)) == 3
    assert torch.equal(before, torch.get_rng_state())
    torch.testing.assert_close([p.grad for p in model.parameters()], plain, rtol=0, atol=0)


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("conv", [False, True])
def test_half_types_are_squared_in_float32(conv: bool, inside: bool):
    # Red without the wider type. Autocast does not hold within a rule, also where the backward runs inside it.
    layer: nn.Module = nn.Conv2d(12, 20, 3) if conv else nn.Linear(40, 24)
    x = torch.randn(N, 12, 5, 5) if conv else torch.randn(N, FEW, 40)

    def forward() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return layer(x)

    v = torch.randn_like(forward())
    with torch.autocast("cpu", torch.bfloat16, enabled=inside):
        found = told_once(forward(), Layout(0, N), v)
    alone = gradients(forward, Layout(0, N), v, layer.weight)
    if conv:
        within_error(found, alone, 2, squares.CHANNELS)
    else:
        same(found, of_each(alone), 0.01)
    assert found.dtype == torch.float32


@pytest.mark.parametrize("tokens", [1, FEW, MANY])
def test_squares_do_not_overflow_in_float16(tokens: int):
    # Red without the wider type.
    dz, x = (torch.full((N, tokens, width), 300.0, dtype=torch.float16) for width in (24, 10))
    rows = RowSet(torch.arange(N), N, unique=True, batchnorm="rows")
    same(squares.of_product(dz, x, rows), torch.full((N,), 240 * (tokens * 300.0**2) ** 2))


def test_float64_stays_float64():
    # Red with `.float()` for the promotion.
    layer, x = nn.Linear(40, 24).double(), torch.randn(N, FEW, 40, dtype=torch.float64)
    v = torch.randn(N, FEW, 24, dtype=torch.float64)
    found = told_once(layer(x), Layout(0, N), v)
    assert found.dtype == torch.float64
    same(found, of_each(gradients(lambda: layer(x), Layout(0, N), v, layer.weight)), 1e-12)


def test_tokens_that_are_rows_tell_a_square_each():
    # Red with the layout's number of rows for the number of kept ones.
    layer, x, v = nn.Linear(20, 24), torch.randn(N, FEW, 20), torch.randn(N, FEW, 24)
    places = torch.tensor([3, 4, 20, 44])
    rows = RowSet(places, N * FEW, unique=True, batchnorm="rows")
    values = v.flatten(0, 1)[places].unsqueeze(1)
    g = RowSlice(values, rows, Layout(0, N * FEW, minor=(Part(1, FEW),)), v.shape)
    ((_, found),) = told(layer(x), Layout(0, N), v, make=lambda *_: g)
    same(found, of_each(values.mT @ x.flatten(0, 1)[places].unsqueeze(1)))


def pixels(grad: Tensor, layout: Layout) -> RowSlice:
    """One pixel of each of four images."""
    index = torch.tensor([0, 21, 42, 63])  # of N images with 20 pixels
    layout = Layout(0, N * 20, minor=(Part(2, 4), Part(3, 5)))
    values = grad[:4, :, 1:2, 2:3].contiguous()
    return RowSlice(values, RowSet(index, N * 20, unique=True, batchnorm="rows"), layout, grad.shape)


def repeated(grad: Tensor, layout: Layout) -> RowSlice:
    """Two rows that are one row."""
    return RowSlice(grad[:2], RowSet(torch.tensor([3, 3]), N, unique=False, batchnorm="rows"), layout, grad.shape)


def fallen(grad: Tensor, layout: Layout) -> RowSlice:
    """Two rows of which one fell out."""
    g = RowSlice(grad[:2], RowSet(torch.tensor([3, 5]), N, unique=True, batchnorm="rows"), layout, grad.shape)
    g.rows.absent = torch.tensor([False, True])
    return g


def convolved(weighs: bool = True) -> Tensor:
    layer = nn.Conv2d(6, 5, 1)
    layer.weight.requires_grad_(weighs)
    return layer(torch.randn(N, 6, 4, 5))


def multiplied(dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(N, 6, dtype=dtype) @ nn.Parameter(torch.randn(shape, dtype=dtype))


@pytest.mark.parametrize(
    ("forward", "make"),
    [
        (convolved, pixels),
        (convolved, repeated),
        (convolved, fallen),
        (lambda: convolved(weighs=False), rows_in),
        (lambda: multiplied(torch.float32, 6), rows_in),
        (lambda: multiplied(torch.complex64, 6, 4), rows_in),
    ],
    ids=["pixels", "a row twice", "a row that fell out", "no weight gradient", "a vector", "complex"],
)
def test_where_no_entry_is_the_square_of_a_row_of_its_own_nothing_is_told(forward: Callable[[], Tensor], make: Any):
    # Red without the conditions on the layout and on repeats in `_teller`, without `rest[-1][1]`, where any product
    # that contracts over the rows is measured, and where an ordering of complex numbers is asked for.
    out = forward()
    assert told(out, Layout(0, N), torch.randn_like(out), make=make) == []


# While it compiles, torch may warn of its own.
COMPILED = pytest.mark.filterwarnings("ignore", "error:the backward of a compiled region")


def first_with_half(out: Tensor, v: Tensor) -> None:
    """A backward of some rows in which nothing is measured."""
    half_of = half(torch.ones(5, dtype=torch.float64))
    hook_gradient(out, Layout(0, N), lambda grad, layout: chosen(rows_in(grad, layout), half_of))
    out.backward(v)


@COMPILED
@pytest.mark.usefixtures("quick_kernels")
@pytest.mark.parametrize(("kernels", "dynamic"), [("eager", False), ("eager", True), ("inductor", None)])
def test_a_compiled_region_tells_what_eager_mode_does(kernels: str, dynamic: bool | None):
    # Red with a key without `measures`: the second backward then finds the first one's graph. Red under Inductor
    # with the weight gradient itself in the graph.
    torch._dynamo.reset()
    model, (x, v) = deep(), images()
    compiled = torch.compile(model, backend="rowprop", options={"kernels": kernels}, dynamic=dynamic)
    first_with_half(compiled(x), v)
    choices = [[0, 2, 4, 6, 8], [1, 2, 7], [4], None]
    for places in choices[:2] if kernels == "inductor" else choices:  # Inductor takes long for each

        def choose() -> Any:
            return None if places is None else (torch.tensor(places), torch.full((len(places),), 2.0).double())

        expected = told(model(x), Layout(0, N), v, choose)
        found = told(compiled(x), Layout(0, N), v, choose)
        assert len(found) == len(expected) == 3
        for (rows, of_rows), (_, other) in zip(found, expected, strict=True):
            assert rows.index.tolist() == (places or list(range(N)))
            same(of_rows, other, 1e-3)


@COMPILED
@pytest.mark.parametrize("lengths", [(20, 10), (10, 20)], ids=str)
def test_a_region_of_any_length_tells_of_short_and_of_long_sequences(lengths: tuple[int, int]):
    # Red where the graph asks whether there are more than 16 tokens: its symbol answers as in the first call, and the
    # region runs at full size from the second call on. An estimate of one row is off by .35 of it at most, as a
    # standard deviation; all rows have the same signs.
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(40, 24), nn.Tanh(), nn.Linear(24, 32))
    compiled = torch.compile(model, backend="rowprop", options={"kernels": "eager"}, dynamic=True)
    first_with_half(compiled(torch.randn(N, lengths[0], 40)), torch.randn(N, lengths[0], 32))
    for length in (lengths[1], lengths[0]):
        x, v = torch.randn(N, length, 40), torch.randn(N, length, 32)
        expected, found = told(model(x), Layout(0, N), v), told(compiled(x), Layout(0, N), v)
        assert len(found) == len(expected) == 2
        for (_, of_rows), (_, other) in zip(found, expected, strict=True):
            assert 0.6 < float(of_rows.sum() / other.sum()) < 1.5
