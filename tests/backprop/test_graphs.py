"""A step under a CUDA graph, as far as a CPU can tell: its ops are recorded once and run again without Python.

A CUDA graph is captured from one step. A replay runs the captured kernels on the same memory, and no line of Python. So
a step is safe if it reads no number while it is captured, and if nothing that Python decided depends on the numbers.
``Graph`` does the same with aten ops on the CPU, and raises where the host would read.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

import laws
import rowprop
import zoo
from accelerator import name_of, reads
from picks import Applied, Take, indexed
from rowprop import RandomRows, SelectiveBackprop, TopK
from rowprop.backprop.autograd.rowgrad import RowGrad
from rowprop.backprop.rows import refusals
from rowprop.engines import Sliced
from rowprop.errors import InvalidInput
from rowprop.history import LossHistory
from rowprop.selection import LossMass
from rowprop.step import selective
from rowprop.step.record import Record
from token_models import VOCABULARY, Decoder, T, attend

N = 12
pytestmark = pytest.mark.usefixtures("as_accelerator", "capturing")


@pytest.fixture
def capturing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing can be read, as on a stream that a graph is captured from."""
    monkeypatch.setattr(refusals, "readable", lambda tensor: False)
    monkeypatch.setattr(selective, "readable", lambda tensor: False)


class Read(RuntimeError):
    """The host would read a number, which ends the capture of a CUDA graph with an error."""


class Graph(TorchDispatchMode):
    """Records the ops of a block, and runs them again on the same tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if RowGrad in types:
            return NotImplemented  # its rule comes first, and calls the ops that are recorded
        if reads(func, args):
            raise Read(name_of(func))
        kwargs = kwargs or {}
        # Kept as they are now: an op in place may give a tensor another shape later.
        given = tree_map_only(Tensor, Tensor.detach, (args, kwargs))
        out = func(*args, **kwargs)
        if torch.Tag.inplace_view not in func.tags:
            self.ops.append((func, *given, tree_map_only(Tensor, Tensor.detach, out)))
        return out

    @torch.no_grad()
    def replay(self) -> None:
        """Run the ops in their order. Results go into the memory that they had at the capture."""
        for func, args, kwargs, out in self.ops:
            for held, made in zip(tree_leaves(out), tree_leaves(func(*args, **kwargs)), strict=True):
                if isinstance(held, Tensor) and held.data_ptr() != made.data_ptr():  # no view, and not in place
                    held.copy_(made)


def tokens() -> Tensor:
    return torch.randint(VOCABULARY, (N, T))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "mlp": (
        lambda: nn.Sequential(nn.Linear(4, 16), nn.GELU(), nn.Dropout(0.2), nn.Linear(16, 3)),
        lambda: torch.randn(N, 4),
    ),
    "cnn with batchnorm": (
        lambda: nn.Sequential(nn.Conv2d(2, 4, 5), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3)),
        lambda: torch.randn(N, 2, 6, 6),
    ),
    "transformer": (lambda: Applied(lambda decoder, x: decoder(x).mean(1)[:, :3], Decoder(packed=True)), tokens),
    "embedding": (
        lambda: nn.Sequential(nn.Embedding(VOCABULARY, 6), nn.Flatten(), nn.Tanh(), nn.Linear(6 * T, 3)),
        tokens,
    ),
}


def losses_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


class Training:
    """A model, its optimizer with momentum, and a static batch."""

    def __init__(
        self, name: str, loss_of: Callable[[nn.Module, Any], tuple[Tensor, Any]], optimizer: Any = None
    ) -> None:
        torch.manual_seed(0)
        make, self.inputs = MODELS[name]
        self.model, self.loss_of = make().double(), loss_of
        self.batch = [entry.double() if entry.is_floating_point() else entry for entry in self.drawn(0)]
        self.optimizer = (optimizer or partial(torch.optim.SGD, lr=0.1, momentum=0.9))(self.model.parameters())

    def drawn(self, seed: int) -> list[Tensor]:
        torch.manual_seed(seed)
        return [self.inputs(), torch.randint(3, (N,))]

    def load(self, seed: int) -> None:
        for entry, new in zip(self.batch, self.drawn(seed), strict=True):
            entry.copy_(new)

    def step(self) -> Any:
        self.optimizer.zero_grad()
        loss, record = self.loss_of(self.model, tuple(self.batch))
        loss.backward()
        self.optimizer.step()
        return record

    def state(self) -> dict[str, Tensor]:
        grads = {f"{name}.grad": parameter.grad for name, parameter in self.model.named_parameters()}
        held = {**self.model.state_dict(), **grads}
        return {name: value.clone() for name, value in held.items() if value is not None}


def selecting(selector: Any, **options: Any) -> Callable[[nn.Module, Any], tuple[Tensor, Record]]:
    """A step of SelectiveBackprop, made at its first call and kept."""
    made: list[SelectiveBackprop] = []

    def loss_of(model: nn.Module, batch: Any) -> tuple[Tensor, Record]:
        if not made:
            given = {"engine": "sliced", "nonfinite": "keep"} | options
            made.append(SelectiveBackprop(model, losses_fn, selector, **given))
        return made[0](batch, ids=torch.arange(N))

    return loss_of


def check_replays(name: str, *loss_of: Any, optimizer: Any = None) -> None:
    """One training's captured step, replayed on new batches, is bit for bit the step of another that runs as ever."""
    ours, theirs = (Training(name, each, optimizer) for each in loss_of)
    for training in (ours, theirs):
        torch.manual_seed(50)
        training.step()  # to warm up: the optimizer makes its state
    graph = Graph()
    for seed in range(1, 5):
        ours.load(seed), theirs.load(seed)
        torch.manual_seed(90 + seed)
        if seed == 1:
            with graph:
                ours.step()
        else:
            graph.replay()
        torch.manual_seed(90 + seed)
        theirs.step()
        torch.testing.assert_close(ours.state(), theirs.state(), rtol=0, atol=0)


def check_gradients(
    gradients: Callable[[Take], Any], rows: Tensor, others: list[list[int]], renew: Callable[[], object]
) -> Any:
    """A captured backward of pick, replayed on other rows of a new batch, has the gradients of plain indexing.

    Returns the report of the capture. The truth is torch's own indexing.
    """
    with Graph() as graph, rowprop.watch() as report:
        found = gradients(partial(rowprop.pick, batchnorm="exact"))
    for other in others:
        rows.copy_(torch.tensor(other))
        renew()
        torch.manual_seed(7)
        graph.replay()
        torch.testing.assert_close(found, gradients(indexed), rtol=1e-9, atol=1e-12)
    return report


FORWARD_READS = {"nn_transformer", "experts_index_add", "experts_index_put", "experts_tokens"}
FORWARD_READS |= {"shares", "matrices", "source_separation", "flow", "idle_experts"}
"""Models whose own forward reads: torch asks a mask whether it is causal, and tokens are routed by masks. It checks a
distribution's parameters, whether a matrix has a factor, and whether windows overlap."""


@pytest.mark.parametrize("entry", [e for e in zoo.ENTRIES if e.name not in FORWARD_READS], ids=lambda e: e.name)
def test_a_replay_has_the_gradient_of_plain_indexing_in_every_model_of_the_zoo(entry: zoo.Entry):
    # Red when: a rule reads a number, or rows go through Python, as in `index.new_tensor(index.tolist())`: the replay
    # then has the rows of the capture.
    model, batch = entry.make(torch.float64)
    rows, seeds = torch.tensor([2, 5]), iter(range(2))

    def gradients(take: Take) -> list[Tensor | None]:
        model.zero_grad()
        torch.manual_seed(7)
        take(entry.losses(model, batch), rows).mean().backward()
        return [parameter.grad for parameter in model.parameters()]

    def renew() -> None:
        order = torch.randperm(zoo.N, generator=torch.Generator().manual_seed(next(seeds)))
        for entries in batch:
            entries.copy_(entries[order])

    check_gradients(gradients, rows, [[1, 6], [0, 3]], renew)


@pytest.mark.parametrize("attends", [False, True])
def test_a_replay_of_tokens_has_the_gradient_of_plain_indexing_on_other_tokens(attends: bool):
    # Red when: places of tokens are read on the host, or those of the capture are kept. The CPU's attention would have
    # to count kept tokens, and densifies; CUDA's takes all of them.
    model, batch, index = Decoder(packed=True), tokens(), torch.tensor([3, 17, 18, 40])
    attention = attend if attends else lambda q, k, v: q * k.tanh() + v

    def gradients(take: Take) -> list[Tensor | None]:
        model.zero_grad()
        take(model(batch, attention).square().sum(-1).flatten(), index).mean().backward()
        return [parameter.grad for parameter in model.parameters()]

    others = [[0, 59, 30, 31], [7, 7, 12, 25]]
    report = check_gradients(gradients, index, others, lambda: batch.copy_(tokens()))
    assert not report.waited and bool(report.densified) == attends


STEPS = [(name, {}) for name in MODELS]
STEPS += [("cnn with batchnorm", {"engine": engine}) for engine in ("masked", Sliced(batchnorm="exact"))]


@pytest.mark.parametrize(("name", "options"), STEPS)
@pytest.mark.parametrize("selector", [TopK(0.25), RandomRows(0.25)], ids=["TopK", "RandomRows"])
def test_a_replay_of_a_step_is_the_step_on_the_new_batch(name: str, options: dict[str, Any], selector: Any):
    # Red when: the step reads a flag, or a selector makes its random numbers on the host.
    check_replays(name, selecting(selector, **options), selecting(selector, **options))


def test_an_optimizer_counts_its_steps_in_the_graph_or_is_refused():
    # Red when: the emulated capture lets an optimizer read its number of steps, which corrects the bias of Adam.
    adam = partial(torch.optim.AdamW, lr=0.1)
    check_replays("mlp", *(selecting(TopK(0.25)) for _ in range(2)), optimizer=partial(adam, fused=True))
    training = Training("mlp", selecting(TopK(0.25)), partial(adam, fused=False))
    training.step()
    with pytest.raises(Read), Graph():
        training.step()


def test_the_record_of_a_captured_step_shows_the_replayed_batch():
    # Red when: the record holds copies. What the host counts stays as it was at the capture: the step, K and N.
    training = Training("embedding", selecting(TopK(0.25)))
    with Graph() as graph:
        record = training.step()
    for seed in (1, 2):
        training.load(seed)
        with torch.no_grad():
            losses = losses_fn(training.model, tuple(training.batch))
        graph.replay()
        rows = losses.topk(3).indices.sort().values
        assert torch.equal(record.selection.rows, rows)
        assert torch.equal(record.loss_all, losses.mean()) and torch.equal(record.loss_kept, losses[rows].mean())
    assert (record.step, record.num_kept, record.num_rows) == (0, 3, N)


def test_a_history_on_the_device_follows_the_replays_but_for_its_count_of_updates():
    # Red when: a column other than the stamps, by which ranks synchronise, depends on a number of the host.
    histories = LossHistory(N), LossHistory(N)
    check_replays("mlp", *(selecting(TopK(0.25), history=history) for history in histories))
    ours, theirs = (history.state_dict() for history in histories)
    apart = {name for name in ours if not torch.equal(torch.as_tensor(ours[name]), torch.as_tensor(theirs[name]))}
    assert apart == {"stamp", "updates"}


CASES = [pytest.param(case, id=f"{name}-{i}") for name, cases in laws.SELECTORS.items() for i, case in enumerate(cases)]


@pytest.mark.parametrize("case", CASES)
def test_the_selectors_without_a_wait_can_be_captured_and_no_others(case):
    # Red when: a selector with a fixed count branches on a number, or one with another count does without reading it.
    scores, other = torch.rand(N), torch.rand(N)
    selector: Any = case.make()
    context = laws.context_of(scores)
    graph = Graph()
    if case.waits:
        with pytest.raises(Read), graph:
            selector(scores, context)
        return
    torch.manual_seed(3)
    with graph:
        selection = selector(scores, context)
    scores.copy_(other)
    torch.manual_seed(4)
    graph.replay()
    torch.manual_seed(4)
    expected = selector(other, context)
    assert torch.equal(selection.rows, expected.rows) and torch.equal(selection.weights, expected.weights)


def test_an_op_that_would_have_to_look_densifies_in_a_capture():
    # The lengths of the kept rows are on the host. Red when: `look` goes on although nothing can be read: the replay
    # would have the lengths of the rows of the capture.
    logits, rows = torch.randn(7, N, 5, dtype=torch.float64, requires_grad=True), torch.tensor([0, 1, 2])
    targets, steps, lengths = torch.randint(1, 5, (N, 3)), [7, 6, 5, 4] * 3, [3, 2, 1] * 4

    def gradients(take: Take) -> Any:
        losses = F.ctc_loss(logits.log_softmax(2), targets, steps, lengths, reduction="none")
        return torch.autograd.grad(take(losses, rows).sum(), logits)

    others = [[3, 7, 11], [4, 5, 6]]
    report = check_gradients(gradients, rows, others, lambda: logits.data.copy_(torch.randn_like(logits)))
    assert report.densified.keys() == {"_ctc_loss_backward"}


def test_a_capture_refuses_what_reads():
    # The meta-test of the others: the emulated capture sees a mask, a count that follows the losses, a printed loss.
    def masks(model: nn.Module, batch: Any) -> tuple[Tensor, None]:
        losses = losses_fn(model, batch)
        return rowprop.pick(losses, losses.detach() > losses.detach().mean()).mean(), None

    def prints(model: nn.Module, batch: Any) -> tuple[Tensor, None]:
        loss, record = selecting(TopK(0.5))(model, batch)
        return loss, str(record)

    for loss_of in (masks, prints, selecting(LossMass(0.5)), selecting(TopK(0.5), nonfinite="drop")):
        with pytest.raises(Read), Graph():
            Training("mlp", loss_of).step()


def test_errors_of_losses_cannot_be_told_in_a_capture():
    # Red when: a captured step copies its flags, which nobody would look at in a replay.
    with pytest.raises(InvalidInput, match="choose nonfinite='keep'"), Graph():
        Training("mlp", selecting(TopK(0.5), nonfinite="error")).step()
