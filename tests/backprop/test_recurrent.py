"""Recurrent layers as users have them, on the CPU's fused kernels: the gradients of plain indexing, what they cost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rowprop
from rowprop.backprop.watch import Report
from rowprop.cost.flops import Flops, count_flops

N, T, C, H = 6, 5, 4, 3
FUSED = "mkldnn_rnn_layer_backward"


def per_row(*tensors: Tensor) -> Tensor:
    """(N, ...) tensors to one number per row, each in a way of its own."""
    return torch.stack([((t - 0.1 * i) ** 2).flatten(1).sum(1) for i, t in enumerate(tensors)]).sum(0)


def layer(kind: str, batch_first: bool, **options: Any) -> nn.RNNBase:
    torch.manual_seed(0)
    return getattr(nn, kind)(C, H, batch_first=batch_first, **options)


def gradients(
    losses_of: Callable[..., Tensor], shapes: list[tuple[int, ...]], model: nn.Module, take: Callable[[Tensor], Tensor]
) -> tuple[list[Tensor], Report, Flops]:
    torch.manual_seed(1)
    inputs = [torch.randn(shape, requires_grad=True) for shape in shapes]
    losses = losses_of(*[x * 1 for x in inputs])
    with rowprop.watch() as report, count_flops() as flops:
        grads = torch.autograd.grad(take(losses).sum(), [*inputs, *model.parameters()])
    return list(grads), report, flops


def compare(
    losses_of: Callable[..., Tensor], shapes: list[tuple[int, ...]], model: nn.Module, rows: list[int]
) -> tuple[Report, Flops, Flops]:
    """Assert that ``pick`` gives the gradients of plain indexing."""
    index = torch.tensor(rows)
    expected, _, full = gradients(losses_of, shapes, model, lambda losses: losses[index])
    actual, report, part = gradients(losses_of, shapes, model, lambda losses: rowprop.pick(losses, index))
    for a, e in zip(actual, expected, strict=True):
        assert type(a) is Tensor
        torch.testing.assert_close(a, e, rtol=1e-4, atol=1e-5)
    return report, part, full


@pytest.mark.parametrize("rows", [[1, 4], [5], [0, 2, 2, 5]], ids=str)
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize(
    "options",
    [{}, {"bidirectional": True}, {"num_layers": 2}, {"num_layers": 2, "bidirectional": True, "bias": False}],
    ids=str,
)
@pytest.mark.parametrize("training", [True, False])
# Red when: a state or an input is gathered along another dimension, or the backward gets the workspace of all rows.
def test_lstm(options: dict[str, Any], batch_first: bool, rows: list[int], training: bool):
    lstm = layer("LSTM", batch_first, **options).train(training)
    states = (2 if options.get("bidirectional") else 1) * options.get("num_layers", 1)

    def losses_of(x: Tensor, h: Tensor, c: Tensor) -> Tensor:
        y, (h, c) = lstm(x if batch_first else x.transpose(0, 1), (h.transpose(0, 1), c.transpose(0, 1)))
        return per_row(y if batch_first else y.transpose(0, 1), h.transpose(0, 1), c.transpose(0, 1))

    report, part, full = compare(losses_of, [(N, T, C), (N, states, H), (N, states, H)], lstm, rows)
    assert report.sliced[FUSED] == states and not report.densified, str(report)
    # A forward costs 1 per row and a backward 2. On k rows both run, for 3 k; on all N rows the backward runs, for 2 N.
    assert part.total_flops == pytest.approx(1.5 * len(rows) / N * full.total_flops)


@pytest.mark.parametrize("kept", range(1, N))
# Red when: the layer's forward runs again for more than two thirds of the rows, or the gradient upstream is then dense.
def test_most_rows_cost_no_more_than_all(kept: int):
    lstm = layer("LSTM", True)
    below = nn.Linear(C, C)

    def losses_of(x: Tensor, h: Tensor, c: Tensor) -> Tensor:
        return per_row(lstm(below(x), (h.transpose(0, 1), c.transpose(0, 1)))[0])

    report, part, full = compare(
        losses_of, [(N, T, C), (N, 1, H), (N, 1, H)], nn.ModuleList([lstm, below]), list(range(kept))
    )
    linear = 4 * N * T * C * C
    layer_flops = min(1.0, 1.5 * kept / N) * (full.total_flops - linear)
    assert part.total_flops == pytest.approx(layer_flops + kept / N * linear)
    assert set(report.densified) == ({FUSED} if kept > N * 2 / 3 else set())


@pytest.mark.parametrize("used", ["output", "last state", "last cell"])
def test_an_output_without_a_gradient(used: str):
    lstm = layer("LSTM", True)

    def losses_of(x: Tensor) -> Tensor:
        y, (h, c) = lstm(x)
        return per_row({"output": y, "last state": h[0], "last cell": c[0]}[used])

    report, _, _ = compare(losses_of, [(N, T, C)], lstm, [1, 4])
    assert FUSED in report.sliced and not report.densified, str(report)


def test_rows_of_several_sequences():
    # The layer's batch dimension is the batch, merged with a dimension in front of it and one behind it.
    lstm = layer("LSTM", False)

    def losses_of(x: Tensor) -> Tensor:
        y = lstm(x.permute(2, 1, 0, 3, 4).reshape(T, 2 * N * 3, C))[0].view(T, 2, N, 3, H)
        return per_row(y.permute(2, 1, 0, 3, 4))

    report, _, _ = compare(losses_of, [(N, 2, T, 3, C)], lstm, [1, 4])
    assert FUSED in report.sliced and not report.densified, str(report)


def test_steps_as_rows_are_dense():
    lstm = layer("LSTM", False)
    report, _, _ = compare(lambda x: per_row(lstm(x)[0]), [(N, T, C)], lstm, [1, 4])
    assert FUSED in report.densified


def test_rows_in_different_places_of_the_batch_are_dense():
    lstm = layer("LSTM", False)

    def losses_of(x: Tensor) -> Tensor:
        y, (h, _) = lstm(x.view(T, N * N, C))
        return per_row(y.view(T, N, N, H).transpose(0, 1), h.view(N, N, H).transpose(0, 1))

    report, _, _ = compare(losses_of, [(T, N, N, C)], lstm, [1, 4])
    assert FUSED in report.densified


def test_a_state_that_all_rows_need_is_dense():
    lstm = layer("LSTM", True)

    def run(take: Callable[[Tensor], Tensor]) -> list[Tensor]:
        torch.manual_seed(1)
        x = torch.randn(N, T, C, requires_grad=True)
        y, (h, _) = lstm(x)
        return list(torch.autograd.grad(take(per_row(y)).sum() + h.exp().sum(), [x, *lstm.parameters()]))

    index = torch.tensor([1, 4])
    with rowprop.watch() as report:
        actual = run(lambda losses: rowprop.pick(losses, index))
    torch.testing.assert_close(actual, run(lambda losses: losses[index]), rtol=1e-4, atol=1e-5)
    assert FUSED in report.densified


@pytest.mark.parametrize("lengths", [[5] * 6, [5, 5, 4, 3, 2, 1]], ids=["equal", "falling"])
def test_packed_sequences(lengths: list[int]):
    lstm = layer("LSTM", True)

    def losses_of(x: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x, torch.tensor(lengths), batch_first=True)
        out, (h, _) = lstm(packed)
        return per_row(nn.utils.rnn.pad_packed_sequence(out, batch_first=True)[0], h[0])

    compare(losses_of, [(N, T, C)], lstm, [1, 4])


@pytest.mark.skipif(not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="needs a CPU with bfloat16: torch's LSTM")
@pytest.mark.parametrize("inside", [True, False])
# Red when: the forward that runs again is in another precision than the first.
def test_under_autocast(inside: bool):
    lstm = layer("LSTM", True)
    index = torch.tensor([1, 4])

    def run(take: Callable[[Tensor], Tensor]) -> list[Tensor]:
        torch.manual_seed(1)
        x = torch.randn(N, T, C, requires_grad=True)
        with torch.autocast("cpu", torch.bfloat16):
            loss = take(per_row(lstm(x)[0].float())).sum()
        with torch.autocast("cpu", torch.bfloat16, enabled=inside):
            return list(torch.autograd.grad(loss, [x, *lstm.parameters()]))

    with rowprop.watch() as report:
        actual = run(lambda losses: rowprop.pick(losses, index))
    assert not report.densified, str(report)
    for a, e in zip(actual, run(lambda losses: losses[index]), strict=True):
        torch.testing.assert_close(a, e, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("kind", ["GRU", "RNN"])
def test_layers_without_a_fused_kernel(kind: str):
    rnn = layer(kind, True, num_layers=2, bidirectional=True)

    def losses_of(x: Tensor) -> Tensor:
        y, h = rnn(x)
        return per_row(y, h.transpose(0, 1))

    report, part, full = compare(losses_of, [(N, T, C)], rnn, [1, 4])
    assert not report.densified, str(report)
    assert part.total_flops == pytest.approx(len([1, 4]) / N * full.total_flops)
