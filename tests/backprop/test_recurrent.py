"""Recurrent layers as users have them, on the CPU's fused kernels: the gradients of plain indexing, what they cost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from picks import Take, as_indexed, gradients
from rowprop.backprop.watch import Report

N, T, C, H = 6, 5, 4, 3
FUSED = "mkldnn_rnn_layer_backward"


def per_row(*tensors: Tensor) -> Tensor:
    """(N, ...) tensors to one number per row, each in a way of its own."""
    return torch.stack([((t - 0.1 * i) ** 2).flatten(1).sum(1) for i, t in enumerate(tensors)]).sum(0)


def layer(kind: str, batch_first: bool, **options: Any) -> nn.RNNBase:
    torch.manual_seed(0)
    return getattr(nn, kind)(C, H, batch_first=batch_first, **options)


def compare(
    losses_of: Callable[..., Tensor], shapes: list[tuple[int, ...]], model: nn.Module, rows: list[int]
) -> tuple[Report, int, int]:
    """``pick`` gives the gradients of plain indexing; its report, and the FLOPs of its backward and of all rows'."""
    torch.manual_seed(1)
    inputs = [torch.randn(shape, requires_grad=True) for shape in shapes]
    flops: list[int] = []

    def step(take: Take) -> list[Tensor | None]:
        leaves = [*inputs, *model.parameters()]
        return gradients(lambda: take(losses_of(*[x * 1 for x in inputs]), torch.tensor(rows)).sum(), leaves, flops)

    return as_indexed(step, rtol=1e-4, atol=1e-5), flops[1], flops[0]


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
    assert part == pytest.approx(1.5 * len(rows) / N * full)


@pytest.mark.parametrize("kept", range(1, N))
# Red when: the layer's forward runs again for more than two thirds of the rows, or the gradient upstream is then dense.
def test_most_rows_cost_no_more_than_all(kept: int):
    lstm, below = layer("LSTM", True), nn.Linear(C, C)
    report, part, full = compare(
        lambda x: per_row(lstm(below(x))[0]), [(N, T, C)], nn.ModuleList([lstm, below]), list(range(kept))
    )
    linear = 4 * N * T * C * C
    assert part == pytest.approx(min(1.0, 1.5 * kept / N) * (full - linear) + kept / N * linear)
    assert set(report.densified) == ({FUSED} if kept > N * 2 / 3 else set())


def packed(lengths: list[int]) -> Callable[[nn.RNNBase, Tensor], Tensor]:
    def losses_of(lstm: nn.RNNBase, x: Tensor) -> Tensor:
        out, (h, _) = lstm(nn.utils.rnn.pack_padded_sequence(x.transpose(0, 1), torch.tensor(lengths)))
        return per_row(nn.utils.rnn.pad_packed_sequence(out, batch_first=True)[0], h[0])

    return losses_of


def merged(lstm: nn.RNNBase, x: Tensor) -> Tensor:
    """The layer's batch dimension is the batch, merged with a dimension in front of it and one behind it."""
    y = lstm(x.permute(2, 1, 0, 3, 4).reshape(T, 2 * N * 3, C))[0].view(T, 2, N, 3, H)
    return per_row(y.permute(2, 1, 0, 3, 4))


def in_different_places(lstm: nn.RNNBase, x: Tensor) -> Tensor:
    y, (h, _) = lstm(x.view(T, N * N, C))
    return per_row(y.view(T, N, N, H).transpose(0, 1), h.view(N, N, H).transpose(0, 1))


def of_all_states(lstm: nn.RNNBase, x: Tensor) -> Tensor:
    y, (h, _) = lstm(x.transpose(0, 1))
    return per_row(y.transpose(0, 1)) + h.exp().sum()


# Losses of a layer with time in front, the shape of its input, and whether it runs at the kept rows; None: not told.
USES: dict[str, tuple[Callable[[nn.RNNBase, Tensor], Tensor], tuple[int, ...], bool | None]] = {
    "the output alone": (lambda lstm, x: per_row(lstm(x.transpose(0, 1))[0].transpose(0, 1)), (N, T, C), True),
    "the last state alone": (lambda lstm, x: per_row(lstm(x.transpose(0, 1))[1][0][0]), (N, T, C), True),
    "the last cell alone": (lambda lstm, x: per_row(lstm(x.transpose(0, 1))[1][1][0]), (N, T, C), True),
    "several sequences per row": (merged, (N, 2, T, 3, C), True),
    "a state that all rows need": (of_all_states, (N, T, C), False),
    "steps as rows": (lambda lstm, x: per_row(lstm(x)[0]), (N, T, C), False),
    "rows in different places of the batch": (in_different_places, (T, N, N, C), False),
    "packed, of equal lengths": (packed([5] * 6), (N, T, C), None),
    "packed, of falling lengths": (packed([5, 5, 4, 3, 2, 1]), (N, T, C), None),
}


@pytest.mark.parametrize("use", USES)
def test_what_is_made_of_a_layer(use: str):
    losses_of, shape, sliced = USES[use]
    lstm = layer("LSTM", False)
    report, _, _ = compare(lambda x: losses_of(lstm, x), [shape], lstm, [1, 4])
    assert sliced is None or (FUSED in report.densified) != sliced == (FUSED in report.sliced), str(report)


@pytest.mark.skipif(not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="needs a CPU with bfloat16: torch's LSTM")
@pytest.mark.parametrize("inside", [True, False])
# Red when: the forward that runs again is in another precision than the first.
def test_under_autocast(inside: bool):
    lstm = layer("LSTM", True)

    def step(take: Take) -> list[Tensor]:
        torch.manual_seed(1)
        x = torch.randn(N, T, C, requires_grad=True)
        with torch.autocast("cpu", torch.bfloat16):
            loss = take(per_row(lstm(x)[0].float()), torch.tensor([1, 4])).sum()
        with torch.autocast("cpu", torch.bfloat16, enabled=inside):
            return list(torch.autograd.grad(loss, [x, *lstm.parameters()]))

    assert not as_indexed(step, rtol=2e-2, atol=2e-2).densified
