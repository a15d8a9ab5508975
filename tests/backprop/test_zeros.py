"""skip_zeros() and find_zeros(): the plain gradient, at the cost of the rows and tokens whose gradient is not zero."""

from __future__ import annotations

import copy
import pickle
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import rowprop
from picks import Applied, gradients, passing, saving
from rowprop.backprop.rows.rows import RowSet
from rowprop.backprop.skip import MOST
from rowprop.cost.flops import count_flops
from token_models import IDS, VOCABULARY, Decoder, N, T

ROWS, WIDTH, CLASSES = 12, 16, 7
X = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1))
FIRST = torch.arange(ROWS) < 3
Skip = Callable[[Tensor], Tensor]


def mlp(*more: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 32), *more, nn.Tanh(), nn.Linear(32, CLASSES))


def same(out: Tensor) -> Tensor:
    return out


def of_first(out: Tensor, kept: int = 3) -> Tensor:
    return out.square().mean(1)[:kept].sum()


def gradient(model: nn.Module, loss_of: Callable[[], Tensor]) -> tuple[list[Tensor | None], int]:
    """Of every parameter, and the FLOPs of the backward."""
    flops: list[int] = []
    return gradients(loss_of, list(model.parameters()), flops), flops[0]


def check_equal(expected: list[Any], actual: list[Any], rtol: float = 1e-5, atol: float = 1e-6) -> None:
    assert [*map(type, actual)] == [*map(type, expected)]
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=atol)


def skipped(
    model: nn.Module, loss_of: Callable[[], Tensor], at: nn.Module | None = None, **options: Any
) -> tuple[Any, int, int]:
    """Skipping zeros at a module leaves the gradients as they are; the handle, and the FLOPs with it and without."""
    expected, full = gradient(model, loss_of)
    handle = rowprop.skip_zeros(at or model, **options)
    actual, cost = gradient(model, loss_of)
    check_equal(expected, actual)
    return handle, cost, full


SOME = torch.zeros(N, T, dtype=torch.bool)
SOME[1], SOME[4, 8:11] = True, True
PATTERNS = {
    "whole rows": SOME.any(1, keepdim=True).expand(N, T),
    "tokens": SOME,
    "one": torch.arange(N * T).view(N, T) == 52,
    "none": SOME & False,
    "all": SOME | True,
}
WRITTEN = [*((name, (N, T), "exact") for name in PATTERNS), ("tokens", (N, T), "cut")]
WRITTEN += [("tokens", shape, "exact") for shape in ((1, N * T), (N * T, 1))]  # a packed row; rows of one token


@pytest.mark.parametrize(("pattern", "shape", "attention"), WRITTEN)
# Red when: a live token is left out, tokens are looked for in another order of dimensions, nothing live goes on whole.
def test_tokens_cost_as_if_they_were_picked(pattern: str, shape: tuple[int, int], attention: Any):
    mask, model = PATTERNS[pattern].reshape(shape), Decoder(packed=True)

    def losses() -> Tensor:
        return model(IDS.view(shape)).square().mean(2)

    _, full = gradient(model, lambda: (losses() * mask).sum())
    expected, picked = gradient(model, lambda: rowprop.pick(losses(), mask, attention=attention).sum())
    handle = rowprop.skip_zeros(model.head, attention=attention)
    actual, cost = gradient(model, lambda: (losses() * mask).sum())
    check_equal(expected, actual)
    assert cost <= 1.01 * picked <= 1.01 * full
    live, record = int(mask.sum()), handle.record
    assert (record.total, record.live) == (N * T, live)
    assert record.kept == (N * T if pattern == "all" else max(1, live))


@pytest.mark.parametrize("shape", [(1, N * T), (N * T, 1)], ids=["a packed row", "rows of one token"])
# Red when: the layout has a part of one element, by which attention no longer knows a packed row, and takes all tokens.
def test_hidden_states_cost_as_the_head_but_for_the_head(shape: tuple[int, int]):
    mask, model = SOME.view(shape), Decoder(packed=True)
    width = model.head.in_features

    def loss() -> Tensor:
        return (model(IDS.view(shape)).square().mean(2) * mask).sum()

    handle, at_head, _ = skipped(model, loss, model.head)
    handle.remove()
    _, below_it, _ = skipped(model, loss, model.norm)
    left_by_the_head = 4 * width * VOCABULARY * (N * T - int(mask.sum()))  # two products, 2 FLOPs each
    assert below_it == at_head + left_by_the_head


USES: dict[str, Callable[[Tensor], Tensor]] = {
    "losses[rows], the forum's line": lambda out: out.square().mean(1)[[1, 5, 6]].mean(),
    "sorted": lambda out: out.square().mean(1).sort(descending=True).values[:3].mean(),
    "topk": lambda out: out.square().mean(1).topk(3).values.mean(),
    "a hinge": lambda out: ((worst := out.square().mean(1)) - worst.detach().median()).relu().mean(),
    "where": lambda out: torch.where(torch.arange(ROWS) % 3 == 0, out.square().mean(1), 0.0).sum(),
    "clamp": lambda out: out.square().mean(1).clamp(max=float(out.detach().square().mean(1).quantile(0.5))).sum(),
    "ignored labels": lambda out: F.cross_entropy(
        out, torch.where(torch.arange(ROWS) % 4 == 0, torch.arange(ROWS) % CLASSES, -100)
    ),
    "a mask multiplied": lambda out: (out.square().mean(1) * FIRST).sum() / 4,
    "advantages": lambda out: -(out.log_softmax(1)[:, 0] * (torch.arange(ROWS) % 4 == 1).float()).mean(),
    "an expanded gradient": lambda out: out[:3].sum(),
    "nothing": lambda out: out.sum() * 0.0,
}


@pytest.mark.parametrize("use", USES)
# Red when: the gradient that arrives is taken to be live wherever it is (the cost), or a live row is lost.
def test_whatever_made_the_zeros(use: str):
    model = mlp()
    expected, full = gradient(model, lambda: USES[use](model(X)))
    actual, cost = gradient(model, lambda: USES[use](rowprop.skip_zeros(model(X))))
    check_equal(expected, actual)
    assert cost <= 0.52 * full


LIVE = [[torch.nan, 0], [torch.inf, 0], [-torch.inf, 0], [1e-45, 0], [-1e-45, 0], [1.0, -1.0], [1j, 0], [1.0, -1j]]


@pytest.mark.parametrize("row", [*LIVE, [-0.0, 0.0]], ids=str)
def test_what_is_live(row: list[complex]):
    # Red when: a sum of a row's entries, or a comparison that NaN fails, tells live rows.
    handed = torch.zeros(6, 2, dtype=torch.tensor(row).dtype)
    handed[2] = torch.tensor(row)
    x = torch.ones_like(handed).requires_grad_()
    module = nn.Identity()
    handle = rowprop.skip_zeros(module)
    module(x * 1.0).backward(handed)
    torch.testing.assert_close(x.grad, handed, rtol=0, atol=0, equal_nan=True)
    assert handle.record.live == (row in LIVE)


@pytest.mark.parametrize("x", [torch.ones(3), torch.ones(3, 0), torch.ones(0, 2)], ids=["1-D", "no entries", "no rows"])
def test_what_has_no_tokens_comes_back_itself(x: Tensor):
    # Red when: the dimensions, or the entries, are not counted before the gradient is hooked.
    below = x.clone().requires_grad_() * 2.0
    module = nn.Identity()
    handle = rowprop.skip_zeros(module, unit="token")
    assert rowprop.skip_zeros(below, unit="token") is module(below) is below
    (grad,) = torch.autograd.grad(below.square().sum(), below)
    assert type(grad) is Tensor and torch.equal(grad, 2 * below) and handle.record is None


class Pair(NamedTuple):
    logits: Tensor
    extra: Tensor


@dataclass
class Output:
    logits: Tensor
    loss: Tensor | None = None


FORMS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "a tensor": (lambda t: t, lambda out: out),
    "a tuple": (lambda t: (t, None), lambda out: out[0]),
    "a named tuple": (lambda t: Pair(t, t.detach()), lambda out: out.logits),
    "a dict": (lambda t: {"logits": t, "count": 3}, lambda out: out["logits"]),
    "a dataclass": (lambda t: Output(t), lambda out: out.logits),
    "a split": (lambda t: t.split(3, 1), lambda out: torch.cat(out, 1)),
    "a split, of which one part is used": (lambda t: t.split(3, 1), lambda out: out[0]),
}


@pytest.mark.parametrize("form", FORMS)
# Red when: tensors inside of an output are not found.
def test_a_module_may_return_what_it_likes(form: str):
    make, logits = FORMS[form]
    model = Applied(lambda inner, x: make(inner(x)), mlp())
    handle, cost, full = skipped(model, lambda: of_first(logits(model(X))))
    assert cost <= 0.27 * full and handle.record.kept == 3


def written(y: Tensor) -> Tensor:
    y = y * 1
    y[:, 1] *= 2
    return y


OUTPUTS: dict[str, Callable[[nn.Module, Tensor], tuple[Tensor, Tensor]]] = {
    "of a formula": lambda inner, x: (y := inner(x).sin(), y.tanh()),
    "written to": lambda inner, x: (y := written(inner(x)), y.tanh()),
    "of a custom function": lambda inner, x: (y := passing(lambda g: g * 2)(inner(x)), y.tanh()),
    "a part": lambda inner, x: (y := inner(x).split(3, 1)[1], y.tanh()),
    "twice": lambda inner, x: (y := written(inner(x)), y),
    "the input": lambda inner, x: (x, inner(x)),
}
SEEN: dict[str, Callable[[Tensor, list[Tensor]], Any]] = {
    "hook": lambda y, seen: y.register_hook(lambda g: (seen.append(g.clone()), g * 2)[1]),
    "retain_grad": lambda y, seen: y.retain_grad() or seen.append(y),
    "returned": lambda y, seen: None,
}


@pytest.mark.parametrize("how", SEEN)
@pytest.mark.parametrize("output", OUTPUTS)
# Red when: an alias stands for an output, whose other uses its hooks do not see; what is returned is no plain tensor.
def test_the_output_stays_the_models_own_tensor(output: str, how: str):
    found: list[list[Tensor | None]] = []
    for skip in (False, True):
        model, x = Applied(OUTPUTS[output], mlp()), X.clone().requires_grad_()
        if skip:
            rowprop.skip_zeros(model)
        y, z = model(x)
        assert not output.startswith(("twice", "the input")) or y is (z if output == "twice" else x)
        seen: list[Tensor] = []
        SEEN[how](y, seen)
        loss = of_first(y) + of_first(z[2:])
        if how == "returned":
            found.append([*torch.autograd.grad(of_first(y), y, retain_graph=True), *torch.autograd.grad(loss, [x, y])])
        else:
            loss.backward()
            found.append(
                [*(t if t.grad is None else t.grad for t in seen), x.grad, *(p.grad for p in model.parameters())]
            )
    check_equal(*found)


# Red when: an output that holds the result of a custom function is built anew.
def test_what_a_module_returns_stays_its_own():
    held: dict[str, Any] = {}

    def forward(inner: nn.Module, x: Tensor) -> dict[str, Any]:
        held.update(logits=double(inner(x)), itself=held)
        return held

    double = rowprop.rowwise(saved=(), grads=0)(saving(lambda x: x * 2, lambda g: g * 2, save=lambda x: ())).apply
    model = Applied(forward, mlp())
    handle, cost, full = skipped(model, lambda: of_first(model(X)["itself"]["logits"]))
    assert model(X) is held and handle.record.kept == 3 and cost <= 0.27 * full


def test_a_leaf_stays_a_leaf():
    leaf = torch.ones(4, 2, requires_grad=True)
    rowprop.skip_zeros(model := nn.Identity())
    assert model(leaf) is rowprop.skip_zeros(leaf) is leaf
    leaf[:2].sum().backward()
    assert torch.equal(leaf.grad, torch.tensor([[1.0, 1.0]] * 2 + [[0.0, 0.0]] * 2))


@pytest.mark.parametrize("above", [lambda x: x * 1, lambda x: x.split(12)[0], passing(lambda g: g)])
def test_a_returned_gradient_is_a_plain_tensor(above: Skip):
    # Red when: a gradient that goes no further is sliced.
    x = X.clone().requires_grad_()
    y = rowprop.skip_zeros(above(x))
    for at in (y, x):
        (grad,) = torch.autograd.grad(of_first(y), at, retain_graph=True)
        assert type(grad) is Tensor
        torch.testing.assert_close(grad[:3], 2 * X[:3] / WIDTH)


# Red when: a result that the loss does not use, whose gradient is undefined, is looked at.
def test_one_of_several_results_may_not_be_used():
    x = X.clone().requires_grad_()
    deviation, mean = map(rowprop.skip_zeros, torch.std_mean(x * 1, 1))
    (found,) = torch.autograd.grad(mean[:2].sum(), x)
    (expected,) = torch.autograd.grad(x.mean(1)[:2].sum(), x)
    torch.testing.assert_close(found, expected)
    assert deviation.requires_grad


class Language(nn.Module):
    """A language model as transformers has them; it returns each token's log-probability, by a head that is fused."""

    def __init__(self, change: Skip = same) -> None:
        super().__init__()
        self.base_model, self.head = Decoder(packed=True), nn.Linear(VOCABULARY, VOCABULARY).double()
        self.change = change  # of the hidden states

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.change(self.base_model(x)), self.head.weight).log_softmax(2)[..., 0]


class DistributedDataParallel(nn.Module):
    """A stand-in: it is known by its name."""

    def __init__(self) -> None:
        super().__init__()
        self.module = Language()

    def forward(self, x: Tensor) -> Tensor:
        return self.module(x)


@pytest.mark.parametrize("kind", [Language, DistributedDataParallel])
def test_a_language_model_has_its_head_found_and_its_tokens(kind: Callable[[], nn.Module]):
    # Red when: the wrapper hides the head, the hidden states or that its (N, T) are tokens.
    model = kind()
    handle, cost, full = skipped(model, lambda: (model(IDS) * SOME).sum())
    assert {place.rpartition(".")[2] for place in handle.places} == {"", "head", "base_model"}
    assert (handle.record.unit, handle.record.kept, handle.record.place) == ("token", int(SOME.sum()), "")
    assert set(handle.records) == {""}  # the others got what was sliced already
    assert cost < 0.6 * full


def test_the_record_is_that_of_the_place_where_most_left():
    # Zeros arise between the hidden states and the output, whose gradient has none.
    model = Language(lambda hidden: hidden * SOME[..., None])
    handle, _, _ = skipped(model, lambda: model(IDS).sum())
    assert {place: record.kept for place, record in handle.records.items()} == {
        "": N * T,
        "base_model": int(SOME.sum()),
    }
    assert handle.record.place == "base_model"


def test_a_handle_pauses_and_ends():
    model = mlp()

    def cost(of: nn.Module = model) -> int:
        return gradient(of, lambda: of_first(of(X)))[1]

    full, handle = cost(), rowprop.skip_zeros(model)
    assert "no backward yet" in repr(handle) and handle.record is None
    less = cost()
    assert repr(handle) == "SkippingZeros(skipped 9 of 12 rows: their gradient is zero)"
    with handle.paused():
        assert cost() == full > less
    again = rowprop.skip_zeros(model)
    assert cost() == less  # twice is as good as once
    again.remove()
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert cost(other) == full  # a copy has no hook
    with handle.paused():
        handle.remove()
    assert cost() == full


@pytest.mark.parametrize("pauses", [False, True])
def test_a_graph_that_is_older_than_the_end_of_its_handle_goes_on_whole(pauses: bool):
    model = mlp()
    full = gradient(model, lambda: of_first(model(X)))[1]
    handle = rowprop.skip_zeros(model)
    loss = of_first(model(X))
    with handle.paused() if pauses else nullcontext():
        handle.remove()
    assert gradient(model, lambda: loss)[1] == full


class TwoHeads(nn.Module):
    """Each head is for half of the rows."""

    def __init__(self, first: int = 3) -> None:
        super().__init__()
        self.trunk, self.first, self.second = mlp(), nn.Linear(CLASSES, first), nn.Linear(CLASSES, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.trunk(x)
        return self.first(h), self.second(h)


def test_records_are_those_of_the_last_backward_and_of_the_output_where_most_left():
    model = TwoHeads()
    handle = rowprop.skip_zeros(model)
    for least, kept in ((2, (2, 6)), (2, (6, 2)), (5, (5, 7)), (5, (7, 5))):
        sum(out[:k].square().sum() for out, k in zip(model(X), kept, strict=True)).backward()
        assert handle.record.live == least


def test_in_evaluation_and_without_gradients_nothing_is_done():
    model, plain = mlp(), torch.randn(3, 2)
    handle = rowprop.skip_zeros(model)
    with torch.no_grad():
        model(X)
    assert handle.record is None and rowprop.skip_zeros(plain) is plain
    identity, given = nn.Identity(), X.clone().requires_grad_()
    rowprop.skip_zeros(identity)
    with torch.no_grad():
        assert identity(given) is given


REPEATED, FEW = torch.tensor([1, 4, 1, 4, 5]), torch.tensor([0, 2, 4, 6, 8])


def differentiated(model: nn.Module, skip: Skip) -> Tensor:
    x = X.clone().requires_grad_()
    (slope,) = torch.autograd.grad(of_first(skip(model(x))), x, create_graph=True)
    return slope.square().sum()


def autocast(model: nn.Module, skip: Skip) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return of_first(skip(model(X)).float()) * 1024


def of_a_kept_graph(model: nn.Module, skip: Skip) -> Tensor:
    losses = skip(model(X)).square().mean(1)
    losses[:3].sum().backward(retain_graph=True)
    return losses[3:5].sum()


BESIDE: dict[str, tuple[Callable[[], nn.Module], Callable[[Any, Skip], Tensor]]] = {
    "a sliced gradient, sliced further": (
        lambda: Decoder(packed=True),
        lambda model, skip: rowprop.pick(skip(model(IDS)).square().mean(2) * SOME, torch.tensor([1, 4])).sum(),
    ),
    "a pick of repeats": (
        mlp,
        lambda model, skip: (rowprop.pick(skip(model(X)), REPEATED).square().mean(1) * REPEATED.eq(4)).sum(),
    ),
    "a pick below": (mlp, lambda model, skip: of_first(skip(rowprop.pick(model(X), FEW)), 2)),
    "a gradient to be differentiated": (mlp, differentiated),
    "BatchNorm": (lambda: mlp(nn.BatchNorm1d(32)), lambda model, skip: of_first(skip(model(X)))),
    "autocast and a scaled loss": (mlp, autocast),
    "a backward before it": (mlp, of_a_kept_graph),
}


@pytest.mark.parametrize("name", BESIDE)
# Red when: tokens do not leave whole rows that came; BatchNorm's gradient of statistics is that of the live rows.
def test_beside_picks_and_other_parts_of_a_step(name: str):
    make, loss = BESIDE[name]
    model = make()
    expected, full = gradient(model, lambda: loss(model, same))
    actual, cost = gradient(model, lambda: loss(model, rowprop.skip_zeros))
    check_equal(expected, actual, *((2e-2, 2e-1) if name.startswith("autocast") else ()))
    assert cost < 0.97 * full or name in ("a pick below", "a gradient to be differentiated", "BatchNorm")


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints(reentrant: bool):
    for inside in (False, True):
        model = Decoder(packed=True)
        model.through = lambda *given: checkpoint(*given, use_reentrant=reentrant)
        at = model.blocks[1] if inside else model  # then the hook is inside of the checkpoint
        _, cost, full = skipped(model, lambda model=model: (model(IDS).square().mean(2) * SOME).sum(), at)
        assert inside or cost < full


def test_a_sparse_gradient_goes_on_as_it_is():
    # Red when: its entries are looked at, for which there is no kernel.
    model = Applied(lambda inner, x: x @ inner.weight, nn.Linear(CLASSES, WIDTH))

    def loss() -> Tensor:
        return torch.gather(model(X), 1, torch.zeros(3, 1, dtype=torch.int64), sparse_grad=True).sum()

    with rowprop.find_zeros(model):
        gradient(model, loss)
    _, cost, full = skipped(model, loss)
    assert cost == full


def test_under_torch_func():
    model = mlp()

    def found(skip: Skip) -> Any:
        call = torch.func.functional_call
        return torch.func.grad(lambda p: of_first(skip(call(model, p, (X,)))))(dict(model.named_parameters()))

    torch.testing.assert_close(found(rowprop.skip_zeros), found(same))


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")  # Inductor's own
@pytest.mark.parametrize("backend", ["aot_eager", "rowprop"])
def test_a_compiled_model(backend: str):
    model = mlp()
    expected, _ = gradient(model, lambda: of_first(model(X)))
    compiled = torch.compile(model, backend=backend)
    handle = rowprop.skip_zeros(compiled)
    actual, _ = gradient(model, lambda: of_first(compiled(X)))
    check_equal(expected, actual)
    assert handle.record.kept == (3 if backend == "rowprop" else ROWS)
    assert ("compiled by a backend other" in handle.record.reason) is (backend != "rowprop")


def test_a_hook_inside_a_region_does_nothing():
    model = mlp()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    handle, cost, full = skipped(model, lambda: of_first(compiled(X)), model[2])
    assert handle.record is None and cost == full


@pytest.mark.usefixtures("as_accelerator")
def test_the_places_of_a_capacity_are_in_order(monkeypatch: pytest.MonkeyPatch):
    # As the rows of a set have to be. Red when: the live ones come first in the index, too.
    drawn: list[Tensor] = []
    some = RowSet.some
    monkeypatch.setattr(RowSet, "some", lambda self, places: drawn.append(places) or some(self, places))
    out = rowprop.skip_zeros(mlp()(X), capacity=0.5)
    (rowprop.pick(out, torch.arange(10)).square().mean(1) * (torch.arange(10) > 7)).sum().backward()
    assert drawn[0].tolist() == [0, 1, 2, 8, 9]


def test_the_whole_gradient_is_freed_before_the_backward_goes_on():
    # Red when: the hook, or the rows' memory of gathers, holds it.
    whole, alive = list[weakref.ref[Any]](), list[bool]()

    def zeros(grad: Tensor) -> Tensor:
        made = grad * (torch.arange(6) < 2).unsqueeze(1)
        whole.append(weakref.ref(made.untyped_storage()))
        return made

    below = torch.randn(6, 4, requires_grad=True) * 2.0
    below.register_hook(lambda grad: alive.append(whole[0]() is not None))
    passing(zeros)(rowprop.skip_zeros(below * 1.0)).sum().backward()
    assert alive == [False]


@pytest.mark.usefixtures("as_accelerator")
def test_a_capacity_is_checked_at_the_end_once_the_count_has_come(monkeypatch: pytest.MonkeyPatch):
    # Red when: the count is read before its mark is reached, or the backward waits for it on its way.
    told = list[str]()
    mark = SimpleNamespace(synchronize=lambda: told.append("the count has come"))
    monkeypatch.setattr("rowprop.backprop.skip.mark", lambda device: mark)
    model = mlp()
    next(model.parameters()).register_hook(lambda grad: told.append("the last gradient"))
    rowprop.skip_zeros(model, capacity=0.4)
    model(X).square().mean(1)[5:8].sum().backward()
    assert told == ["the last gradient", "the count has come"]


@pytest.mark.usefixtures("as_accelerator")
def test_a_capacity_fixes_the_rows_on_a_device():
    # Red when: live rows are not first, an overflow goes by in silence, or the device is waited for at the start.
    model = mlp()

    def step() -> Tensor:
        return model(X).square().mean(1)[5:8].sum()

    with rowprop.watch() as report:
        handle, _, _ = skipped(model, step, capacity=0.4)
    assert (handle.record.kept, handle.record.live) == (5, None) and not report.waited
    with pytest.raises(rowprop.InvalidInput, match="7 nonzero rows of 12"):
        of_first(model(X), 7).backward()
    handle.remove()
    handle, _, _ = skipped(model, step, capacity=0.85)
    assert handle.record.kept == ROWS  # so many are not worth a gather
    handle.remove()
    with rowprop.watch() as report:
        skipped(model, step)
    assert len(report.waited) == 1


@pytest.mark.usefixtures("as_host")
def test_a_capacity_that_is_exceeded_costs_nothing_but_time_on_the_cpu():
    model = mlp()
    handle, _, _ = skipped(model, lambda: of_first(model(X), 7), capacity=0.4)
    assert handle.record.reason == "more are nonzero than capacity=0.4 takes"


def test_where_nearly_all_are_live_they_go_on_whole():
    model = mlp()
    handle, _, _ = skipped(model, lambda: of_first(model(X), int(MOST * ROWS) + 1))
    assert handle.record.kept == ROWS


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"x": [1.0]}, r"skip_zeros got x=\[1.0\], a list, but a tensor or a torch.nn.Module was needed"),
        ({"x": torch.tensor(1.0)}, "skip_zeros got a 0-d tensor but rows were needed"),
        ({"unit": (1, 0)}, r"skip_zeros got unit=\(1, 0\) but dimensions in ascending order were needed"),
        ({"unit": ()}, r"skip_zeros got unit=\(\) but dimensions in ascending order"),
        ({"unit": (-1,)}, r"skip_zeros got unit=\(-1,\) but dimensions in ascending order"),
        ({"unit": "rows"}, "skip_zeros got unit='rows' but one of None, row, token was needed"),
        ({"attention": "none"}, "skip_zeros got attention='none' but"),
        ({"capacity": 0.0}, r"skip_zeros got capacity=0.0 but a fraction in \(0, 1\] was needed"),
        ({"capacity": "all"}, "skip_zeros got capacity='all' but"),
        ({"capacity": torch.nan}, "skip_zeros got capacity=nan but"),
    ],
)
def test_what_it_refuses(given: dict[str, Any], message: str):
    with pytest.raises(rowprop.InvalidInput, match=message):
        rowprop.skip_zeros(**{"x": torch.ones(3), **given})


def found(model: nn.Module, *losses: Callable[[], Tensor]) -> Any:
    """The report of a block with a backward of each of these losses."""
    with rowprop.find_zeros(model) as report:
        for loss in losses:
            loss().backward()
    return report


def of_tokens(model: nn.Module, mask: Tensor = SOME, given: Tensor = IDS) -> Tensor:
    return (model(given).square().mean(2) * mask).sum()


def flat() -> nn.Module:
    """The inner layers of a decoder's blocks take tokens as rows."""
    model = Decoder(packed=True)
    for block in model.blocks:
        block.mlp = Applied(lambda inner, x: inner(x.flatten(0, 1)).unflatten(0, x.shape[:2]), block.mlp)
    return model


def latent() -> nn.Module:
    """Rows, of which tokens are made."""
    torch.manual_seed(0)
    wide = nn.Sequential(nn.Linear(WIDTH, 64), nn.Tanh(), nn.Linear(64, T * WIDTH), nn.Unflatten(1, (T, WIDTH)))
    return wide.append(nn.Linear(WIDTH, CLASSES))


def pixels() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 4, 3, padding=1))


class TimeFirst(nn.Module):
    """Works on (T, N, C) inside, as torch's encoder does by default."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 32, dropout=0.0)
        self.embed, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(self.embed(x).transpose(0, 1)).transpose(0, 1))


class Products(nn.Module):
    """Returns two tensors, each the product with a parameter of its own."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.randn(shape)) for _ in range(2))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x @ self.a, x @ self.b


class TwoOutputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.two, self.head = Products(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.two(x)
        return self.head(a * b)


class Autoencoder(nn.Module):
    """Its losses, of the code and of the decoded rows, are both masked."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def loss(self) -> Tensor:
        code = self.encoder(X)
        return ((self.decoder(code) - X).square() + code.square()).mul(FIRST[:, None]).sum()


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.lstm, self.head = nn.Linear(WIDTH, 8), nn.LSTM(8, 8), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(self.embed(x))[0])


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first, self.second, self.reentrant = mlp(), nn.Sequential(nn.Linear(CLASSES, 32), nn.Tanh()), reentrant

    def forward(self, x: Tensor) -> Tensor:
        for part in (self.first, self.second):
            x = checkpoint(part, x, use_reentrant=self.reentrant)
        return x


class RowLosses(nn.Module):
    """Returns a loss per row, each over some of its tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x).square().mean(2)[:, :2].sum(1)


class Paths(nn.Module):
    """Rows whose tokens all count on one path, and some of them on another."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.all, self.some, self.head = (nn.Linear(WIDTH, width) for width in (WIDTH, WIDTH, CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.unsqueeze(1) * torch.arange(1.0, T + 1)[:, None]
        return self.head(self.all(tokens).mean(1) + (self.some(tokens) * SOME[: len(x), :, None]).sum(1))


class Segmenter(nn.Module):
    """Its head is of 1x1 convolutions."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Conv2d(3, 8, 3, padding=1)
        self.head = nn.Sequential(nn.Conv2d(8, 16, 1), nn.ReLU(), nn.Conv2d(16, CLASSES, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).relu())


class Shared(nn.Module):
    """Calls one layer twice; the gradient of one call is sliced above it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)

    def loss(self) -> Tensor:
        return of_first(self.head(self.inner(X))) + of_first(self.inner(X.flip(0)))


IMAGES = torch.randn(4, 3, 6, 6, generator=torch.Generator().manual_seed(3))
LABELS = (torch.arange(4 * 36) * 5 % CLASSES).view(4, 6, 6).where(torch.arange(4 * 36).view(4, 6, 6) % 9 == 0, -100)
STEPS = torch.randn(5, ROWS, WIDTH, generator=torch.Generator().manual_seed(2))
doubled = passing(lambda g: g * 2)

TRAININGS: dict[str, tuple[Callable[[], nn.Module], Callable[[Any], Tensor], str, str]] = {
    "time first inside": (TimeFirst, lambda m: m(STEPS)[:2, 8:].square().sum(), "head", "token"),
    "a module of two outputs": (TwoOutputs, lambda m: of_first(m(X)), "head", "row"),
    "zeros that come past the place": (Autoencoder, lambda m: m.loss(), "decoder", "row"),
    "a layer called twice": (Shared, lambda m: m.loss(), "head", "row"),
    "two heads": (
        TwoHeads,
        lambda m: sum(out[at : at + 3].square().sum() for out, at in zip(m(X), (0, 3), strict=True)),
        "TwoHeads",
        "row",
    ),
    "BatchNorm inside": (lambda: mlp(nn.BatchNorm1d(32)), lambda m: of_first(m(X)), "3", "row"),
    "a custom function inside": (lambda: mlp(Applied(doubled)), lambda m: of_first(m(X)), "0", "row"),
    "steps of a recurrent layer": (Recurrent, lambda m: m(STEPS)[4:].square().sum(), "head", "token"),
    "rows of a recurrent layer": (Recurrent, lambda m: m(STEPS)[:, :3].square().sum(), "head", "token"),
    "an ensemble": (
        lambda: nn.Sequential(Products(4, WIDTH, CLASSES)),
        lambda m: sum(m(X.expand(4, ROWS, WIDTH)))[:, :3].square().sum(),
        "0",
        "token",
    ),
    "a checkpoint": (lambda: Checkpointed(False), lambda m: of_first(m(X.clone().requires_grad_())), "second.1", "row"),
    "a reentrant one": (
        lambda: Checkpointed(True),
        lambda m: of_first(m(X.clone().requires_grad_())),
        "Checkpointed",
        "row",
    ),
    "a loss per row, of tokens": (RowLosses, lambda m: m(STEPS).sum(), "head", "token"),
    "pixels": (Segmenter, lambda m: F.cross_entropy(m(IMAGES), LABELS), "head.2", "pixel"),
    "tokens": (lambda: Decoder(packed=True), of_tokens, "head", "token"),
    "whole rows": (lambda: Decoder(packed=True), lambda m: of_tokens(m, PATTERNS["whole rows"]), "head", "token"),
    "tokens that are rows": (flat, of_tokens, "head", "token"),
    "rows that become tokens": (latent, lambda m: of_tokens(m, SOME, X[:N]), "4", "token"),
    "rows": (mlp, lambda m: of_first(m(X), 4), "2", "row"),
    "rows, and tokens below": (Paths, lambda m: of_first(m(X[:N]), 2), "head", "row"),
    "none live": (mlp, lambda m: of_first(m(X), 4) * 0.0, "2", "row"),
    "images": (pixels, lambda m: m(torch.ones(6, 3, 5, 5)).square().mean((1, 2, 3))[:2].sum(), "2", "row"),
}


@pytest.mark.parametrize("training", TRAININGS)
# Red when: an op's cost at full size is left out; FLOPs of a rule's own ops count as plain; what two places saved
# together counts for one of them; a place below a sliced gradient is promised something.
# Also red where a place is left out because tokens of its rows can be skipped below.
def test_what_it_predicts_is_what_is_saved(training: str):
    make, loss_of, place, unit = TRAININGS[training]
    model = make()
    plain, full = gradient(model, lambda: loss_of(model))
    model.zero_grad()
    report = found(model, lambda: loss_of(model))
    check_equal(plain, [p.grad for p in model.parameters()])  # the training itself stays as it is
    best = report.places[0]
    assert (best.module, best.unit, report.backwards, report.backward_flops) == (place, unit, 1, full)
    modules = {path or type(model).__name__: module for path, module in model.named_modules()}
    for each in report.places:
        handle, left, _ = skipped(model, lambda: loss_of(model), modules[each.module])
        assert each.saves == pytest.approx(1 - left / full, abs=1e-3), each
        handle.remove()
    if training.startswith("zeros that come past"):
        assert [place.module for place in report.places] == ["decoder", "encoder"]
    said = f"at {place} have no gradient; skip_zeros there saves {best.saves:.0%} of the backward's FLOPs."
    assert str(report).endswith(said)


def test_shares_are_those_of_all_backwards_of_the_block():
    # Red when: the FLOPs of all of a module's calls count for each of them.
    model, share = mlp(), 1 - 9 / (2 * ROWS)

    def twice() -> Tensor:
        first, second = model(X), model(X.flip(0))
        with torch.no_grad():
            model(X)
        return of_first(first, 3) + of_first(second, 6)

    apart = found(model, lambda: of_first(model(X), 3), lambda: of_first(model(X), 6))
    at_once = found(model, twice)
    for report, backwards in ((apart, 2), (at_once, 1)):
        assert report.backwards == backwards and [place.module for place in report.places] == ["2"]
        assert report.places[0].zero_rows == pytest.approx(share) == report.places[0].saves
    _, left, full = skipped(model, twice)
    assert 1 - left / full == pytest.approx(share)


def test_shares_are_of_all_gradients_that_came():
    # One backward in ten has zeros. Red when: only gradients of which at most 80 % are nonzero count.
    model = mlp()
    kept = [6, *[ROWS] * 9]
    (place,) = found(model, *(lambda kept=kept: of_first(model(X), kept) for kept in kept)).places
    assert place.zero_rows == pytest.approx(0.05) == place.saves


@pytest.mark.parametrize("kind", [Language, DistributedDataParallel])
def test_what_a_language_model_saves_is_what_its_places_save_together(kind: Callable[[], nn.Module]):
    # Red when: skip_zeros at the model is thought to look at its output alone.
    model = kind()
    report = found(model, lambda: (model(IDS) * SOME).sum())
    _, left, full = skipped(model, lambda: (model(IDS) * SOME).sum())
    assert report.places[0].saves == pytest.approx(1 - left / full) and report.places[0].unit == "token"


class Hidden(nn.Module):
    """Holds its network where ``named_modules()`` does not look."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.__dict__["network"] = network

    def forward(self, x: Tensor) -> Tensor:
        return of_first(self.network(x))


def test_what_ran_in_no_module_that_it_watched_is_told():
    # Red when: FLOPs count as watched though no gradient came to a module before.
    network = mlp()
    report = found(Hidden(network), lambda: Hidden(network)(X))
    assert report.unwatched_flops == report.backward_flops > 0 and report.places == []
    assert str(report).startswith("100% of the backward's FLOPs ran in no module that find_zeros watched: call")
    above = found(network, lambda: (network(X)[:3] @ torch.ones(CLASSES, 9, requires_grad=True)).sum())
    of_the_last_product = 2 * 2 * 3 * CLASSES * 9
    assert above.unwatched_flops == of_the_last_product and above.places[0].module == "2"
    assert found(network, lambda: network(X[:1]).sum()).unwatched_flops == 0  # one row has nothing to skip


@pytest.mark.parametrize("counter", [count_flops, lambda: FlopCounterMode(display=False)], ids=["ours", "torch's"])
def test_counters_inside_the_block_show_the_plain_backward(counter: Callable[[], Any]):
    # Red when: a counter sees the ops of the kept rows, which only the measurement has sliced.
    model = mlp()
    with counter() as plain:
        of_first(model(X)).backward()
    with rowprop.find_zeros(model) as report:
        loss = of_first(model(X))
        with counter() as inside:
            of_first(model(X))
            loss.backward()
    assert report.places[0].saves == pytest.approx(0.75)
    ours, theirs = (c.get_total_flops() if isinstance(c, FlopCounterMode) else c.total_flops for c in (plain, inside))
    assert ours == theirs


BELOW: dict[str, Callable[[nn.Module], Tensor]] = {
    "picked": lambda model: rowprop.pick(model(X).square().mean(1), torch.arange(3)).sum(),
    "skipped": lambda model: of_first(rowprop.skip_zeros(model(X))),
    "skipped above": lambda model: of_first(rowprop.skip_zeros(model(X) * 1.0)),
}


@pytest.mark.parametrize("name", BELOW)
def test_what_is_left_out_already_is_not_saved_again(name: str):
    # Red when: a place looks at the gradient before the user's own line does, or at one that others sliced.
    model = mlp()
    _, cost = gradient(model, lambda: BELOW[name](model))
    report = found(model, lambda: BELOW[name](model))
    assert report.places == [] and report.backward_flops == cost


def test_pixels_are_skipped_as_if_they_were_picked():
    # Red when: images or lines of them are skipped in place of pixels.
    model = Segmenter()

    def losses(skip: Skip = same) -> Tensor:
        return skip(F.cross_entropy(model(IMAGES), LABELS, reduction="none"))

    expected, picked = gradient(model, lambda: rowprop.pick(losses(), LABELS >= 0).sum())
    for case in (lambda: losses(rowprop.skip_zeros).sum(), lambda: losses().sum()):
        handle = rowprop.skip_zeros(model)
        actual, cost = gradient(model, case)
        check_equal(expected, actual)
        assert cost <= 1.01 * picked
        handle.remove()
    assert str(handle) == "SkippingZeros(skipped 128 of 144 pixels: their gradient is zero)"


UNITS: list[tuple[tuple[int, ...], Any, Any, str]] = [
    ((4, 6, 5), (1,), lambda x: x[:, :2], "skipped 4 of 6 positions"),
    ((4, 6, 5), None, lambda x: x[:, :2], "skipped 16 of 24 tokens"),
    ((4, 6, 5), (0, 1, 2), lambda x: x[:2, :3, :1], "skipped 114 of 120 pixels"),
    ((4, 6, 5, 5), None, lambda x: x[:2], "skipped 2 of 4 rows"),
    ((4, 6, 5, 5), None, lambda x: x[:2, :, :2], "skipped 16 of 20 positions"),  # the same in all columns
    ((4, 6, 5, 5), "row", lambda x: x[:2, :, :2], "skipped 2 of 4 rows"),
    ((4, 6, 1, 1), None, lambda x: x[:2], "skipped 2 of 4 rows"),
    ((1, 6, 5, 5), None, lambda x: x[:, :, 0, :3], "skipped 22 of 25 pixels"),
]


@pytest.mark.parametrize(("shape", "unit", "use", "said"), UNITS)
def test_the_unit_is_named_or_found(shape: tuple[int, ...], unit: Any, use: Skip, said: str):
    module, x = nn.Tanh(), torch.randn(shape, requires_grad=True)
    handle = rowprop.skip_zeros(module, unit=unit)
    use(module(x * 1.0)).sum().backward()
    (expected,) = torch.autograd.grad(use((x * 1.0).tanh()).sum(), x)
    torch.testing.assert_close(x.grad, expected)
    assert str(handle.record) == f"{said}: their gradient is zero"


class Policy(nn.Module):
    """Its trainer calls another method than ``forward``, or uses the loss that this returns."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.value = mlp(), nn.Linear(WIDTH, 1)

    def evaluate(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.net(x), self.value(x)

    def forward(self, x: Tensor) -> Tensor:
        logits, value = self.evaluate(x)
        return of_first(logits) + value.square().mean()


def of_method(policy: Any) -> Tensor:
    logits, value = policy.evaluate(X)
    return of_first(logits) + value.square().mean()


@pytest.mark.parametrize("loss_of", [of_method, lambda policy: policy(X)], ids=["another method", "a loss"])
def test_a_place_that_no_gradient_comes_to_is_told_once_and_the_right_one_named(loss_of: Callable[[Any], Tensor]):
    # Red when: the module with the fewest zeros is named, or the warning comes again.
    policy = Policy()
    handle = rowprop.skip_zeros(policy)
    assert str(handle) == "SkippingZeros(no backward yet)"
    loss_of(policy).backward()
    with pytest.warns(UserWarning, match=r"skip_zeros\(Policy\): nothing was skipped in 2 backwards: .* at 'net'"):
        loss_of(policy).backward()
    loss_of(policy).backward()
    assert "no output of the module had a gradient; use skip_zeros at 'net', where 75% of the rows" in str(handle)
    assert not any(p._post_accumulate_grad_hooks for p in policy.parameters())


def test_a_module_that_a_gradient_came_to_is_not_warned_of():
    # Red when: later backwards of other methods count, or those while it is paused.
    policy, never = Policy(), Policy()
    handle, ended = rowprop.skip_zeros(policy.net), rowprop.skip_zeros(never)
    for loss in (of_first(policy.net(X)), *(p.sum() for p in [next(policy.parameters())] * 3)):
        loss.backward()
    with ended.paused():
        of_method(never).backward()
    ended.remove()
    for _ in range(3):
        of_method(never).backward()
    assert handle.record.kept == 3 and str(ended) == "SkippingZeros(no backward yet)"


def test_a_module_below_skipped_zeros_is_not_warned_of():
    # Red where a gradient that comes sliced, and has no further zeros, does not count as one that came.
    policy = Policy()
    rowprop.skip_zeros(policy.net)
    below = rowprop.skip_zeros(policy.net[0])
    for _ in range(3):
        of_method(policy).backward()
    assert str(below) == "SkippingZeros(the gradient had no further zeros when it came)"


def test_each_of_two_heads_is_told_and_the_largest_saving_comes_first():
    # The trunk costs what both need. The backward comes to the second head first.
    def halves(model: nn.Module) -> Tensor:
        first, second = model(X)
        return first[: ROWS // 2].square().sum() + second[ROWS // 2 :].square().sum()

    reports = [found(model, lambda model=model: halves(model)) for model in (TwoHeads(), TwoHeads(300))]
    # skip_zeros of the whole model skips at both.
    assert [place.module for place in reports[1].places] == ["TwoHeads", "first", "second"]
    assert {place.module for place in reports[0].places[1:]} == {"first", "second"}
    assert all(place.zero_rows == 0.5 for place in reports[0].places)
    both, *single = (place.saves for place in reports[0].places)
    assert both == pytest.approx(sum(single)) and max(single) < 0.2


def test_ops_without_a_formula_are_those_of_the_backward():
    # Red when: the forward's count as well, of which no FLOPs are told.
    invert = Applied(lambda x: torch.linalg.matrix_exp(x.unflatten(1, (4, 4))).flatten(1))
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), invert, nn.Linear(WIDTH, 2))
    with rowprop.find_zeros(model) as report:
        loss = of_first(model(X))
        before = dict(report.uncounted)
        with count_flops() as forward:
            model(X)
        with count_flops() as backward:
            loss.backward()
    assert before == {} and forward.uncounted and report.uncounted == backward.uncounted


def test_nodes_of_a_backward_that_is_done_are_let_go():
    # Red when: the block holds the graphs of all of its steps.
    held = list[weakref.ref[Any]]()

    def noted(x: Tensor) -> Tensor:
        out = passing(same)(x)
        held.append(weakref.ref(out.grad_fn))
        return out

    model = nn.Sequential(nn.Linear(WIDTH, 3), Applied(noted))
    with rowprop.find_zeros(model):
        model(X).sum().backward()
        assert held[0]() is None


def test_without_zeros_it_says_so():
    model, light, given = mlp(), nn.Tanh(), X.clone().requires_grad_()
    assert found(model, lambda: of_first(model(X), int(MOST * ROWS) + 1)).places == []  # nine in ten: not worth it
    assert found(light, lambda: light(given)[:3].sum()).places == []
    report = found(model, lambda: model(X).square().mean())
    assert str(report) == "No zeros that are worth skipping in the gradients of 1 backwards."
    with pytest.raises(rowprop.InvalidInput, match=r"find_zeros got model=\[\], a list, but"), rowprop.find_zeros([]):
        pass
    rowprop.skip_zeros(model)
    assert found(model, lambda: of_first(model(X))).places == []  # what is skipped already is not found again
