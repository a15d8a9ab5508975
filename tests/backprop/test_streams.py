"""Side streams, without a device: nodes take turns on pretended streams, and each read of another stream's memory is
checked against what was recorded and waited for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import rowprop
from picks import passing
from rowprop.backprop.autograd import streams as streams_module
from rowprop.backprop.autograd.rowgrad import RowGrad
from rowprop.backprop.rows import rows as rows_module
from rowprop.backprop.rows.layout import Layout
from rowprop.backprop.rows.rows import RowSet
from rowprop.backprop.rows.slice import RowSlice

N, K = 7, 3
ROWS = torch.tensor([1, 4, 6])


class Streams(TorchDispatchMode):
    """The stream that a node is put on, and the reads of memory that another stream made and nobody recorded.

    Only gradients of K rows, and indices, are looked at: autograd records the plain gradients that it passes on.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = "main"
        self.made: dict[int, str] = {}
        self.recorded: set[tuple[int, str]] = set()
        self.waited: set[tuple[str, str]] = set()
        self.unsafe: list[str] = []
        self.alive: list[Tensor] = []  # no memory is used a second time

    def __enter__(self) -> Streams:
        self.now = "main"
        return super().__enter__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if RowGrad in types:
            return NotImplemented
        for tensor in tree_leaves((args, kwargs)):
            if isinstance(tensor, Tensor) and (K in tensor.shape or tensor.dtype == torch.int64):
                place = tensor.untyped_storage().data_ptr()
                if self.made.get(place, self.now) != self.now and (place, self.now) not in self.recorded:
                    self.unsafe.append(f"{func} on {self.now} reads {tuple(tensor.shape)}, made on {self.made[place]}")
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                self.made.setdefault(tensor.untyped_storage().data_ptr(), self.now)
                self.alive.append(tensor)
        return out

    def put(self, node: Any, stream: str) -> None:
        """Have a node run on a stream."""

        def enter(_: Any) -> None:
            self.now = stream

        node.register_prehook(enter)

    def put_all(self, ends: dict[str, Tensor], losses: Tensor) -> None:
        """Have the nodes of each branch run on the branch's stream, and all others on the main one."""
        placed: dict[Any, str] = {}
        for stream, end in (*ends.items(), ("main", losses)):
            stack = [end.grad_fn]
            while stack:
                node = stack.pop()
                if node is not None and node not in placed and "trunk" not in node.metadata:
                    placed[node] = stream
                    stack += [upstream for upstream, _ in node.next_functions]
        for node, stream in placed.items():
            self.put(node, stream)


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Streams:
    mode = Streams()
    monkeypatch.setattr(rows_module, "present_stream", lambda device: lambda: mode.now)
    monkeypatch.setattr(
        streams_module, "record", lambda x: mode.recorded.add((x.untyped_storage().data_ptr(), mode.now))
    )
    monkeypatch.setattr(streams_module, "wait_for", lambda stream, device: mode.waited.add((mode.now, stream)))
    return mode


def trunk(x: Tensor, w: Tensor) -> Tensor:
    """A layer that both branches stand on."""
    h = (x @ w).tanh()
    for node in (h.grad_fn, h.grad_fn.next_functions[0][0]):
        node.metadata["trunk"] = True
    return h


def in_place(h: Tensor) -> Tensor:
    out = h * 2
    out[:, 1].exp_()
    return out


# A trunk's values (..., 4) and a weight (4, 4) to a branch of their own.
BRANCHES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "linear": lambda h, w: h @ w,
    "deep": lambda h, w: F.layer_norm((h @ w).exp(), (4,)).sin(),
    "chunk": lambda h, w: (h @ w).chunk(2, -1)[0].exp(),
    "in place": lambda h, w: in_place(h @ w),
    "heads": lambda h, w: (h @ w).unflatten(2, (2, 2)).transpose(1, 2).exp().transpose(1, 2).flatten(2),
    "shifted": lambda h, w: F.pad((h @ w)[:, :-1], (0, 0, 1, 0)).tanh(),
}
OF_ROWS = [(name, rows) for name in ("linear", "deep", "chunk", "in place") for rows in (ROWS, torch.tensor([1, 4, 1]))]
OF_TOKENS = [(name, torch.tensor([2, 17, 33])) for name in ("linear", "deep", "heads", "shifted")]


@pytest.mark.parametrize(
    ("shape", "name", "rows"), [*(((N,), *x) for x in OF_ROWS), *(((N, 5), *x) for x in OF_TOKENS)]
)
# Red when: values, or indices, are not recorded where the stream changes; a gather is remembered for all streams; what
# follows from the tokens' places is computed on one stream and read on another.
def test_each_stream_that_reads_a_gradient_is_recorded(
    streams: Streams, shape: tuple[int, ...], name: str, rows: Tensor
):
    x, *weights = torch.randn(*shape, 4), *(nn.Parameter(torch.randn(4, 4)) for _ in range(3))

    def losses() -> Tensor:
        h = trunk(x, weights[0])
        left, right = (BRANCHES[name](h, w) for w in weights[1:])
        out = (left * right).sum(-1).flatten()
        streams.put_all({"left": left, "right": right}, out)
        return out

    expected = torch.autograd.grad(losses()[rows].sum(), weights)
    with streams, rowprop.watch() as report:
        actual = torch.autograd.grad(rowprop.pick(losses(), rows).sum(), weights)
    torch.testing.assert_close(actual, expected)
    assert streams.unsafe == [] and not report.densified
    assert {stream for _, stream in streams.recorded} >= {"left", "right"}


def test_the_union_of_two_picks_is_of_one_stream(streams: Streams):
    # Red when: the union that a node of one stream made is taken for a node of another, which nothing lets wait.
    x, *weights = torch.randn(N, 4), *(nn.Parameter(torch.randn(4, 4)) for _ in range(3))

    def loss(take: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        h = trunk(x, weights[0])
        left, right = (h @ w for w in weights[1:])
        (a, b), (c, d) = left.chunk(2, 1), right.chunk(2, 1)
        first, second = (a * c).sum(1), (b * d).exp().sum(1)
        streams.put_all({"left": left, "right": right}, first)
        streams.put_all({}, second)
        for part, stream in ((a, "left"), (c, "right")):
            streams.put(part.grad_fn, stream)
        return take(first, ROWS).sum() + take(second, torch.tensor([0, 4, 5])).sum()

    expected = torch.autograd.grad(loss(lambda t, r: t[r]), weights)
    with streams, rowprop.watch() as report:
        actual = torch.autograd.grad(loss(rowprop.pick), weights)
    torch.testing.assert_close(actual, expected)
    assert streams.unsafe == [] and report.densified == {}


def test_a_gradient_that_one_stream_made_dense_is_waited_for_by_the_next(streams: Streams):
    # Red when: the dense gradient that the first of two users made is handed to the second without a wait.
    leaves = [nn.Parameter(torch.randn(N, 4)) for _ in range(2)]
    left, right = map(passing(lambda grad: grad * 2), leaves)
    losses = (left + right).sum(1)
    streams.put_all({"left": left, "right": right}, losses)
    with streams:
        rowprop.pick(losses, ROWS).sum().backward()
    expected = torch.zeros(N, 4).index_fill(0, ROWS, 2)
    assert all(torch.equal(leaf.grad, expected) for leaf in leaves)
    assert streams.waited >= {("left", "right")} and streams.unsafe == []


def test_what_one_stream_made_is_not_read_on_another_without_a_wait(streams: Streams):
    # Red when: the places of first rows are those of another stream; a gradient's last stream stays the one that it was
    # made on, so a way back to that one waits for nothing.
    rows = RowSet(torch.tensor([1, 4, 1]), N, unique=False, batchnorm="rows")
    gradient = RowGrad(RowSlice(torch.ones(K, 4), rows, Layout(0, N), (N, 4)))
    places = rows.first
    assert rows.first is places and places.tolist() == [0, 1, 0]
    streams.now = "left"
    assert rows.first is not places and rows.first.tolist() == [0, 1, 0]
    dense = gradient.plain()
    streams.now = "main"
    assert gradient.plain() is dense and ("main", "left") in streams.waited


def test_a_device_without_streams_keeps_no_book():
    # Red when each gradient on a CPU looks for its stream as well, before each use.
    assert RowSet(ROWS, N, unique=True, batchnorm="rows").streams is None
