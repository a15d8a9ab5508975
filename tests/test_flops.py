"""The counter against closed formulas. 1 multiply-add = 2 FLOPs."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import rowprop
from rowprop.cost.flops import FORMULAS, count_flops

N = 6


def forward_and_backward(make, *leaves: torch.Tensor) -> tuple[int, int]:
    """FLOPs of the forward that ``make`` runs and of its sum's backward, with nothing left uncounted."""
    for leaf in leaves:
        leaf.requires_grad_()
    with count_flops() as forward:
        out = make()
    with count_flops() as backward:
        out.sum().backward()
    assert forward.uncounted == backward.uncounted == {}
    return forward.total_flops, backward.total_flops


def test_linear():
    # forward N*in*out multiply-adds; the weight gradient as many; the input gradient too where it is asked for
    layer, x = nn.Linear(5, 7), torch.randn(N, 5)
    once = 2 * N * 5 * 7
    assert forward_and_backward(lambda: layer(x)) == (once, once)
    assert forward_and_backward(lambda: layer(x), x) == (once, 2 * once)


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("transposed", [False, True])
def test_convolution(dims: int, groups: int, transposed: bool):
    # Each weight meets each place: of the output, or of a transposed convolution's input. torch's own weight
    # gradient is `groups` times too large.
    kind = getattr(nn, f"Conv{'Transpose' if transposed else ''}{dims}d")
    layer = kind(4, 8, 3, stride=2, padding=1, groups=groups)
    x = torch.randn(N, 4, *[9] * dims)
    places = (9 if transposed else 5) ** dims
    once = 2 * N * places * (8 * 4 // groups) * 3**dims
    assert forward_and_backward(lambda: layer(x)) == (once, once)
    assert forward_and_backward(lambda: layer(x), x) == (once, 2 * once)


@pytest.mark.parametrize("backend", ["FLASH_ATTENTION", "MATH"])
@pytest.mark.parametrize("causal", [False, True])
def test_attention(backend: str, causal: bool):
    # Two products of T*S*D multiply-adds per head; the backward has four, and flash attention computes the scores
    # again.
    heads, t, s, d = 3, 5, 5, 4
    q, k, v = torch.randn(N, heads, t, d), torch.randn(N, heads, s, d), torch.randn(N, heads, s, d)
    product = 2 * N * heads * t * s * d
    with nn.attention.sdpa_kernel(getattr(nn.attention.SDPBackend, backend)):
        counted = forward_and_backward(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=causal), q, k, v)
    assert counted == (2 * product, (5 if backend == "FLASH_ATTENTION" else 4) * product)


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("layers", [1, 2])
def test_lstm(layers: int, bidirectional: bool):
    steps, inputs, hidden = 5, 3, 4
    lstm = nn.LSTM(inputs, hidden, num_layers=layers, bidirectional=bidirectional, batch_first=True)
    x = torch.randn(N, steps, inputs)
    directions = 2 if bidirectional else 1
    weights = sum(
        4 * hidden * ((inputs if layer == 0 else directions * hidden) + hidden) * directions for layer in range(layers)
    )
    once = 2 * N * steps * weights
    assert forward_and_backward(lambda: lstm(x)[0], x) == (once, 2 * once)


@pytest.mark.parametrize("kind", ["GRU", "RNN"])
def test_other_recurrent_layers(kind: str):
    # On the CPU these are ordinary products; the first state is zero and no leaf, so it needs no gradient.
    steps, inputs, hidden = 5, 3, 4
    gates = {"GRU": 3, "RNN": 1}[kind]
    layer = getattr(nn, kind)(inputs, hidden)
    x = torch.randn(steps, N, inputs)
    along_input, along_state = (2 * N * steps * gates * hidden * size for size in (inputs, hidden))
    expected_backward = 2 * along_input + 2 * along_state - along_state // steps
    assert forward_and_backward(lambda: layer(x)[0], x) == (along_input + along_state, expected_backward)


def test_vectors():
    m, v, w = torch.randn(5, 7), torch.randn(7), torch.randn(5)
    b = torch.randn(3, 5, 7)
    cases = [
        (lambda: torch.mv(m, v), 2 * 5 * 7),
        (lambda: torch.addmv(w, m, v), 2 * 5 * 7),
        (lambda: torch.dot(v, v), 2 * 7),
        (lambda: torch.outer(w, v), 0),  # an elementwise product
        (lambda: torch.addr(m, w, v), 2 * 5 * 7),
        (lambda: torch.baddbmm(torch.zeros(3, 5, 5), b, b.mT), 2 * 3 * 5 * 5 * 7),
        (lambda: torch.addbmm(torch.zeros(5, 5), b, b.mT), 2 * 3 * 5 * 5 * 7),
    ]
    for run, expected in cases:
        with count_flops() as flops:
            run()
        assert (flops.total_flops, flops.uncounted) == (expected, {})


def test_bilinear():
    # out[n, o] = sum over i, j of a[n, i] w[o, i, j] b[n, j]: one product and one multiply-add per term
    a, b, layer = torch.randn(N, 2), torch.randn(N, 3), nn.Bilinear(2, 3, 5)
    with count_flops() as flops:
        layer(a, b)
    assert flops.total_flops == 3 * N * 2 * 3 * 5


@pytest.mark.skipif(not hasattr(torch.ops.aten, "_grouped_mm"), reason="this torch has no grouped products")
def test_groups_of_rows_with_a_matrix_each():
    x, w = torch.randn(6, 4, requires_grad=True), torch.randn(3, 4, 8, requires_grad=True)
    with count_flops() as flops:
        torch.ops.aten._grouped_mm(x, w, torch.tensor([1, 4, 6], dtype=torch.int32)).square().sum().backward()
    assert flops.by_op == {"_grouped_mm": 3 * 2 * 6 * 4 * 8}
    assert not flops.uncounted


def test_inference_mode_counts_the_same():
    layer, x = nn.Linear(5, 7), torch.randn(N, 5)
    with torch.inference_mode(), count_flops() as flops:
        layer(x)
    assert flops.by_op == {"addmm": 2 * N * 5 * 7}


def test_a_sliced_backward_counts_kept_rows():
    # Red when the counter does not step aside for the sliced gradient: it would see N rows.
    first, second, x = nn.Linear(5, 7), nn.Linear(7, 3), torch.randn(N, 5)
    losses = second(first(x).tanh()).square().sum(1)
    with count_flops() as flops:
        rowprop.pick(losses, torch.tensor([1, 4])).sum().backward()
    assert flops.by_op == {"mm": 2 * 2 * (5 * 7 + 2 * 7 * 3)}
    assert flops.uncounted == {}


def test_what_no_formula_covers_is_listed():
    @torch.library.custom_op("rowprop_test::twice", mutates_args=())
    def twice(x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    with count_flops() as flops:
        torch.fft.rfft(torch.randn(8))
        torch.linalg.inv(torch.eye(3))
        twice(torch.ones(2))
    assert set(flops.uncounted) >= {"_fft_r2c", "linalg_inv_ex", "rowprop_test.twice"}


def test_the_few_flops_per_element_are_left_out():
    x = torch.randn(N, 4, 8, 8, requires_grad=True)
    net = nn.Sequential(
        nn.BatchNorm2d(4), nn.GELU(), nn.MaxPool2d(2), nn.GroupNorm(2, 4), nn.Flatten(), nn.LayerNorm(64)
    )
    with count_flops() as flops:
        out = net(x).softmax(1).cumsum(1).topk(3).values
        F.cross_entropy(out, torch.zeros(N, dtype=torch.long)).backward()
        torch.optim.AdamW(net.parameters()).step()
    assert (flops.by_op, flops.uncounted) == ({}, {})


def test_every_formula_is_for_an_op_of_this_torch():
    assert all(not isinstance(op, str) and callable(formula) for op, formula in FORMULAS.items())
