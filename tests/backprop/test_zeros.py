"""skip_zeros() and find_zeros(): the plain gradient, at the cost of the rows and tokens whose gradient is not zero."""

from __future__ import annotations

import copy
import pickle
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import rowprop
from rowprop import host
from rowprop.backprop.rows import RowSet
from rowprop.backprop.zeros import MOST
from rowprop.cost.flops import count_flops

N, T, WIDTH, CLASSES = 12, 10, 16, 7


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mixes = nn.Linear(WIDTH, 3 * WIDTH)
        self.inner = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(2, (2, -1)).transpose(1, 2) for part in self.mixes(self.norm(x)).chunk(3, 2))
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return x + self.inner(x)


class FlatBlock(Block):
    """Its inner layers take tokens as rows."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(2, (2, -1)).transpose(1, 2) for part in self.mixes(self.norm(x)).chunk(3, 2))
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return x + self.inner(x.flatten(0, 1)).unflatten(0, x.shape[:2])


class Latent(nn.Module):
    """Rows, of which tokens are made."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rows, self.wide, self.head = nn.Linear(WIDTH, 64), nn.Linear(64, T * WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.wide(self.rows(x).tanh()).unflatten(1, (T, WIDTH)))


class Decoder(nn.Module):
    """Two blocks and a head: (N, T, WIDTH) -> (N, T, CLASSES)."""

    def __init__(
        self, wrap: Callable[..., Any] = lambda module, x: module(x), block: Callable[[], nn.Module] = Block
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([block(), block()])
        self.head = nn.Linear(WIDTH, CLASSES)
        self.wrap = wrap

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = self.wrap(block, x)
        return self.head(x)


def mlp(*more: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 32), *more, nn.Tanh(), nn.Linear(32, CLASSES))


def tokens() -> Tensor:
    return torch.randn(N, T, WIDTH, generator=torch.Generator().manual_seed(1))


def rows() -> Tensor:
    return tokens()[:, 0]


def gradient(model: nn.Module, loss_of: Callable[[], Tensor]) -> tuple[list[Tensor | None], int]:
    """Of every parameter, and the FLOPs of the backward."""
    model.zero_grad()
    loss = loss_of()
    with count_flops() as flops:
        loss.backward()
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()], flops.total_flops


def check_equal(expected: list[Tensor | None], actual: list[Tensor | None]) -> None:
    for e, a in zip(expected, actual, strict=True):
        assert type(a) is type(e)
        if e is not None and a is not None:
            torch.testing.assert_close(a, e, rtol=1e-5, atol=1e-6)


# --- every pattern of zeros, beside pick with the same mask -----------------------------------------------------------

some = torch.zeros(N, T, dtype=torch.bool)
some[1, 3:], some[4, 8], some[7] = True, True, True
PATTERNS = {
    "whole rows": some.any(1, keepdim=True).expand(N, T),
    "tokens": some,
    "one": torch.zeros(N, T).index_put((torch.tensor(3), torch.tensor(4)), torch.tensor(1.0)).bool(),
    "none": torch.zeros(N, T, dtype=torch.bool),
    "all": torch.ones(N, T, dtype=torch.bool),
}


@pytest.mark.parametrize("pattern", PATTERNS)
# Red when: a live token is left out, tokens are looked for in another order of dimensions, nothing live goes on whole.
def test_tokens_cost_as_if_they_were_picked(pattern: str):
    mask, model, x = PATTERNS[pattern], Decoder(), tokens()

    def losses() -> Tensor:
        return model(x).square().mean(2)

    expected, full = gradient(model, lambda: (losses() * mask).sum())
    _, picked = gradient(model, lambda: rowprop.pick(losses(), mask).sum())
    handle = rowprop.skip_zeros(model.head)
    actual, cost = gradient(model, lambda: (losses() * mask).sum())
    check_equal(expected, actual)
    assert cost <= 1.01 * picked <= 1.01 * full
    assert handle.record is not None
    assert (handle.record.total, handle.record.live) == (N * T, int(mask.sum()))
    assert handle.record.kept == (N * T if pattern == "all" else max(1, int(mask.sum())))


@pytest.mark.parametrize("pattern", PATTERNS)
def test_rows_cost_as_if_they_were_picked(pattern: str):
    mask, model, x = PATTERNS[pattern][:, 3], mlp(), rows()
    expected, _ = gradient(model, lambda: (model(x).square().mean(1) * mask).sum())
    _, picked = gradient(model, lambda: rowprop.pick(model(x).square().mean(1), mask).sum())
    actual, cost = gradient(model, lambda: (rowprop.skip_zeros(model(x)).square().mean(1) * mask).sum())
    check_equal(expected, actual)
    assert cost <= 1.01 * picked


def satisfied(out: Tensor) -> Tensor:
    worst = out.square().mean(1)
    return (worst - worst.detach().median()).relu()


USES: dict[str, Callable[[Tensor], Tensor]] = {
    "losses[rows], the forum's line": lambda out: out.square().mean(1)[[1, 5, 6]].mean(),
    "sorted": lambda out: out.square().mean(1).sort(descending=True).values[:3].mean(),
    "topk": lambda out: out.square().mean(1).topk(3).values.mean(),
    "a hinge": lambda out: satisfied(out).mean(),
    "where": lambda out: torch.where(torch.arange(N) % 3 == 0, out.square().mean(1), 0.0).sum(),
    "clamp": lambda out: out.square().mean(1).clamp(max=float(out.detach().square().mean(1).quantile(0.5))).sum(),
    "ignored labels": lambda out: F.cross_entropy(
        out, torch.where(torch.arange(N) % 4 == 0, torch.arange(N) % CLASSES, -100)
    ),
    "a mask multiplied": lambda out: (out.square().mean(1) * (torch.arange(N) < 4)).sum() / 4,
    "advantages": lambda out: -(out.log_softmax(1)[:, 0] * (torch.arange(N) % 4 == 1).float()).mean(),
    "an expanded gradient": lambda out: out[:3].sum(),
}


@pytest.mark.parametrize("use", USES)
# Red when: the gradient that arrives is taken to be live wherever it is (the cost), or a live row is lost.
def test_whatever_made_the_zeros(use: str):
    model, x, loss = mlp(), rows(), USES[use]
    expected, full = gradient(model, lambda: loss(model(x)))
    actual, cost = gradient(model, lambda: loss(rowprop.skip_zeros(model(x))))
    check_equal(expected, actual)
    assert cost <= 0.52 * full


def test_nan_and_infinity_are_live():
    # Red when: a sum, or a comparison that NaN fails, tells live rows.
    for value in (torch.nan, torch.inf, -torch.inf, 1e-45, -1e-45):
        x = torch.ones(6, 2, requires_grad=True)
        handed = torch.zeros(6, 2)
        handed[2, 1] = value
        with rowprop.watch():
            out = rowprop.skip_zeros(x * 1.0)
        out.backward(handed)
        assert x.grad is not None
        torch.testing.assert_close(x.grad, handed, rtol=0, atol=0, equal_nan=True)
    x = torch.ones(6, 2, requires_grad=True)
    rowprop.skip_zeros(x * 1.0).backward(torch.full((6, 2), -0.0))
    assert x.grad is not None and not x.grad.any()


def test_opposite_entries_do_not_cancel():
    # Red when: the sum of a row's entries decides.
    x = torch.ones(6, 2, requires_grad=True)
    handed = torch.zeros(6, 2)
    handed[4] = torch.tensor([1.0, -1.0])
    rowprop.skip_zeros(x * 1.0).backward(handed)
    assert x.grad is not None and torch.equal(x.grad, handed)


def test_complex_gradients():
    w = torch.ones(2, dtype=torch.complex64, requires_grad=True)
    x = torch.randn(6, 2, dtype=torch.complex64)
    grads: list[Tensor] = []
    for skip in (lambda out: out, rowprop.skip_zeros):
        w.grad = None
        skip(x * w)[1].abs().sum().backward()
        assert w.grad is not None
        grads.append(w.grad)
    torch.testing.assert_close(*grads)


# --- a module's output ------------------------------------------------------------------------------------------------


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
}


class Returning(nn.Module):
    def __init__(self, form: str) -> None:
        super().__init__()
        self.inner, self.form = mlp(), FORMS[form][0]

    def forward(self, x: Tensor) -> Any:
        return self.form(self.inner(x))


@pytest.mark.parametrize("form", FORMS)
# Red when: an alias of a tensor is not put into the output (the parts of a split need one).
def test_a_module_may_return_what_it_likes(form: str):
    model, x = Returning(form), rows()

    def loss() -> Tensor:
        return FORMS[form][1](model(x)).square().mean(1)[:3].sum()

    expected, full = gradient(model, loss)
    handle = rowprop.skip_zeros(model)
    actual, cost = gradient(model, loss)
    check_equal(expected, actual)
    assert cost <= 0.27 * full
    assert handle.record is not None and handle.record.kept == 3


class Language(nn.Module):
    """A language model as transformers has them; it returns each token's log-probability, by a head that is fused."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.head = Decoder(), nn.Linear(CLASSES, CLASSES)

    @property
    def base_model(self) -> nn.Module:
        return self.base

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.base(x), self.head.weight).log_softmax(2)[..., 0]


class DistributedDataParallel(nn.Module):
    """A stand-in: it is known by its name."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        return self.module(x)


@pytest.mark.parametrize("wrap", [lambda model: model, DistributedDataParallel])
def test_a_language_model_has_its_head_found_and_its_tokens(wrap: Callable[[nn.Module], nn.Module]):
    # Red when: the wrapper hides the head, the hidden states or that its (N, T) are tokens.
    model, x = wrap(Language()), tokens()
    expected, full = gradient(model, lambda: (model(x) * some).sum())
    handle = rowprop.skip_zeros(model)
    actual, cost = gradient(model, lambda: (model(x) * some).sum())
    check_equal(expected, actual)
    assert {place.rpartition(".")[2] for place in handle.places} == {"", "head", "base"}
    assert handle.record is not None
    assert (handle.record.unit, handle.record.kept, handle.record.place) == ("token", int(some.sum()), "")
    assert set(handle.records) == {""}  # the others got what was sliced already
    assert cost < 0.6 * full


def test_a_handle_pauses_and_ends():
    model, x = mlp(), rows()
    handle = rowprop.skip_zeros(model)
    assert repr(handle) == "SkippingZeros(no backward yet)" and handle.record is None

    def cost() -> int:
        return gradient(model, lambda: model(x).square().mean(1)[:3].sum())[1]

    skipped = cost()
    assert repr(handle) == "SkippingZeros(3 of 12 rows went on: the others are zero)"
    with handle.paused():
        full = cost()
    assert cost() == skipped < full
    again = rowprop.skip_zeros(model)
    assert cost() == skipped  # twice is as good as once
    again.remove()
    with handle.paused():
        handle.remove()
    assert cost() == full


def test_a_graph_that_is_older_than_the_end_of_its_handle_goes_on_whole():
    model, x = mlp(), rows()
    full = gradient(model, lambda: model(x).square().mean(1)[:3].sum())[1]
    for pauses in (False, True):
        handle = rowprop.skip_zeros(model)
        loss = model(x).square().mean(1)[:3].sum()
        if pauses:
            with handle.paused():
                handle.remove()
        else:
            handle.remove()
        assert gradient(model, lambda loss=loss: loss)[1] == full


def test_records_are_those_of_the_last_backward_and_of_the_output_where_most_left():
    model, x = TwoHeads(), rows()
    handle = rowprop.skip_zeros(model)
    for kept in ((2, 6), (5, 7)):
        first, second = model(x)
        (first[: kept[0]].square().sum() + second[: kept[1]].square().sum()).backward()
        assert handle.record is not None and handle.record.live == kept[0]
        first, second = model(x)
        (first[: kept[1]].square().sum() + second[: kept[0]].square().sum()).backward()
        assert handle.record is not None and handle.record.live == kept[0]


@pytest.mark.parametrize("shape", [(1, N * T), (N * T, 1)])
def test_one_row_of_packed_tokens_and_rows_of_one_token(shape: tuple[int, int]):
    model, x, mask = Decoder(), tokens().view(*shape, WIDTH), some.view(shape)
    expected, _ = gradient(model, lambda: (model(x).square().mean(2) * mask).sum())
    _, picked = gradient(model, lambda: rowprop.pick(model(x).square().mean(2), mask).sum())
    rowprop.skip_zeros(model)
    actual, cost = gradient(model, lambda: (model(x).square().mean(2) * mask).sum())
    check_equal(expected, actual)
    assert cost <= 1.01 * picked


def test_cut_attention_is_that_of_pick():
    model, x = Decoder(), tokens()
    expected, picked = gradient(model, lambda: rowprop.pick(model(x).square().mean(2), some, attention="cut").sum())
    rowprop.skip_zeros(model, attention="cut")
    actual, cost = gradient(model, lambda: (model(x).square().mean(2) * some).sum())
    check_equal(expected, actual)
    assert cost <= 1.01 * picked


def test_a_copy_of_a_module_has_no_hook():
    model, x = mlp(), rows()
    full = gradient(model, lambda: model(x).square().mean(1)[:3].sum())[1]
    rowprop.skip_zeros(model)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert gradient(other, lambda other=other: other(x).square().mean(1)[:3].sum())[1] == full


def test_in_evaluation_and_without_gradients_nothing_is_done():
    model, x = mlp(), rows()
    handle = rowprop.skip_zeros(model)
    with torch.no_grad():
        model(x)
    assert handle.record is None
    plain = torch.randn(3, 2)
    assert rowprop.skip_zeros(plain) is plain
    same, given = nn.Identity(), rows().requires_grad_()
    rowprop.skip_zeros(same)
    with torch.no_grad():
        assert same(given) is given


# --- beside everything else that a backward meets ---------------------------------------------------------------------


def test_a_sliced_gradient_is_sliced_further():
    model, x = Decoder(), tokens()
    kept = torch.tensor([1, 4, 7])

    def losses(skip: Callable[[Tensor], Tensor]) -> Tensor:
        return rowprop.pick(skip(model(x)).square().mean(2) * some, kept).sum()

    expected, before = gradient(model, lambda: losses(lambda out: out))
    actual, cost = gradient(model, lambda: losses(rowprop.skip_zeros))
    check_equal(expected, actual)
    assert cost < 0.95 * before
    repeated = torch.tensor([1, 4, 1, 4, 5])
    net, x = mlp(), rows()
    expected, _ = gradient(net, lambda: (rowprop.pick(net(x), repeated).square().mean(1) * repeated.eq(4)).sum())
    actual, cost = gradient(
        net, lambda: (rowprop.pick(rowprop.skip_zeros(net(x)), repeated).square().mean(1) * repeated.eq(4)).sum()
    )
    check_equal(expected, actual)


def test_a_pick_below_takes_its_rows_of_the_live_ones():
    model, x = mlp(), rows()
    first = torch.tensor([0, 2, 4, 6, 8])
    expected, _ = gradient(model, lambda: model(x)[first].square().mean(1)[:2].sum())
    actual, _ = gradient(model, lambda: rowprop.skip_zeros(rowprop.pick(model(x), first)).square().mean(1)[:2].sum())
    check_equal(expected, actual)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints(reentrant: bool):
    plain, x = Decoder(), tokens().requires_grad_()
    model = Decoder(lambda block, x: checkpoint(block, x, use_reentrant=reentrant))
    expected, _ = gradient(plain, lambda: (plain(x).square().mean(2) * some).sum())
    full = gradient(model, lambda: (model(x).square().mean(2) * some).sum())[1]
    rowprop.skip_zeros(model)
    actual, cost = gradient(model, lambda: (model(x).square().mean(2) * some).sum())
    check_equal(expected, actual)
    assert cost < full
    inside = Decoder(lambda block, x: checkpoint(block, x, use_reentrant=reentrant))  # the hook is inside of it
    rowprop.skip_zeros(inside.blocks[1])
    actual, _ = gradient(inside, lambda: (inside(x).square().mean(2) * some).sum())
    check_equal(expected, actual)


def test_two_backwards_accumulate_and_a_graph_may_be_kept():
    model, x = mlp(), rows()
    rowprop.skip_zeros(model)
    losses = model(x).square().mean(1)
    losses[:3].sum().backward(retain_graph=True)
    losses[3:5].sum().backward()
    actual = [p.grad for p in model.parameters()]
    plain = mlp()
    expected, _ = gradient(plain, lambda: plain(x).square().mean(1)[:5].sum())
    check_equal(expected, actual)


def test_a_gradient_to_be_differentiated_goes_on_whole():
    model, x = mlp(), rows().requires_grad_()

    def penalty(skip: Callable[[Tensor], Tensor]) -> Tensor:
        (slope,) = torch.autograd.grad(skip(model(x)).square().mean(1)[:3].sum(), x, create_graph=True)
        return slope.square().sum()

    expected, _ = gradient(model, lambda: penalty(lambda out: out))
    actual, _ = gradient(model, lambda: penalty(rowprop.skip_zeros))
    check_equal(expected, actual)


def test_under_torch_func():
    model, x = mlp(), rows()
    parameters = dict(model.named_parameters())

    def loss(skip: Callable[[Tensor], Tensor]) -> Callable[[Any], Tensor]:
        return lambda p: skip(torch.func.functional_call(model, p, (x,))).square().mean(1)[:3].sum()

    expected = torch.func.grad(loss(lambda out: out))(parameters)
    torch.testing.assert_close(torch.func.grad(loss(rowprop.skip_zeros))(parameters), expected)


def test_batch_norm_gets_all_rows():
    # Red when: its statistics' gradient is that of the live rows.
    model, x = mlp(nn.BatchNorm1d(32)), rows()
    expected, _ = gradient(model, lambda: model(x).square().mean(1)[:3].sum())
    rowprop.skip_zeros(model)
    actual, _ = gradient(model, lambda: model(x).square().mean(1)[:3].sum())
    check_equal(expected, actual)


def test_autocast_and_a_scaled_loss():
    model, x = mlp(), rows()

    def loss() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(x).float().square().mean(1)[:3].sum() * 1024

    expected, _ = gradient(model, loss)
    rowprop.skip_zeros(model)
    actual, _ = gradient(model, loss)
    for e, a in zip(expected, actual, strict=True):
        torch.testing.assert_close(a, e, rtol=2e-2, atol=2e-1)


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")  # Inductor's own
@pytest.mark.parametrize("backend", ["aot_eager", "rowprop"])
def test_a_compiled_model(backend: str):
    model, x = mlp(), rows()
    expected, _ = gradient(model, lambda: model(x).square().mean(1)[:3].sum())
    compiled = torch.compile(model, backend=backend)
    handle = rowprop.skip_zeros(compiled)
    actual, _ = gradient(model, lambda: compiled(x).square().mean(1)[:3].sum())
    check_equal(expected, actual)
    assert handle.record is not None and handle.record.kept == (3 if backend == "rowprop" else N)
    assert ("compiled by a backend other" in handle.record.reason) is (backend != "rowprop")


@pytest.mark.parametrize("backend", ["aot_eager", "rowprop"])
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")  # Inductor's own
def test_a_hook_inside_a_region_does_nothing(backend: str):
    model, x = mlp(), rows()
    expected, _ = gradient(model, lambda: model(x).square().mean(1)[:3].sum())
    handle = rowprop.skip_zeros(model[2])
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    actual, _ = gradient(model, lambda: compiled(x).square().mean(1)[:3].sum())
    check_equal(expected, actual)
    assert handle.record is None


def test_the_places_of_a_capacity_are_in_order(monkeypatch: pytest.MonkeyPatch):
    # As the rows of a set have to be. Red when: the live ones come first in the index, too.
    monkeypatch.setattr(host, "READ_AT_ONCE", set())
    drawn: list[Tensor] = []
    some_rows = RowSet.some
    monkeypatch.setattr(RowSet, "some", lambda self, places: drawn.append(places) or some_rows(self, places))
    model, x = mlp(), rows()
    kept = rowprop.pick(model(x), torch.arange(10)).square().mean(1)
    handle = rowprop.skip_zeros(nn.Identity(), capacity=0.5)
    assert handle.record is None
    out = rowprop.skip_zeros(model(x), capacity=0.5)
    (rowprop.pick(out, torch.arange(10)).square().mean(1) * (torch.arange(10) > 7)).sum().backward()
    assert kept.shape == (10,) and drawn[0].tolist() == [0, 1, 2, 8, 9]


def test_the_whole_gradient_is_freed_before_the_backward_goes_on():
    # Red when: the hook, or the rows' memory of gathers, holds it.
    whole: list[weakref.ref[Any]] = []
    alive: list[bool] = []
    x = torch.randn(6, 4, requires_grad=True)
    below = x * 2.0
    below.register_hook(lambda grad: alive.append(whole[0]() is not None))
    out = rowprop.skip_zeros(below * 1.0)

    class Zeros(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, out: Tensor) -> Tensor:
            return out.view_as(out)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            made = grad * (torch.arange(6) < 2).unsqueeze(1)
            whole.append(weakref.ref(made.untyped_storage()))
            return made

    Zeros.apply(out).sum().backward()
    assert alive == [False]


# --- capacity ---------------------------------------------------------------------------------------------------------


def test_a_capacity_fixes_the_rows_on_a_device(monkeypatch: pytest.MonkeyPatch):
    # Red when: live rows are not first, an overflow goes by in silence, or the device is waited for at the start.
    model, x = mlp(), rows()
    expected, _ = gradient(model, lambda: model(x).square().mean(1)[5:8].sum())
    monkeypatch.setattr(host, "READ_AT_ONCE", set())
    handle = rowprop.skip_zeros(model, capacity=0.4)
    with rowprop.watch() as report:
        actual, _ = gradient(model, lambda: model(x).square().mean(1)[5:8].sum())
    check_equal(expected, actual)
    assert handle.record is not None and handle.record.kept == 5 and handle.record.live is None
    assert not report.waited
    with pytest.raises(rowprop.InvalidInput, match="7 live rows of 12"):
        model(x).square().mean(1)[:7].sum().backward()
    handle.remove()
    wide = rowprop.skip_zeros(model, capacity=0.85)
    gradient(model, lambda: model(x).square().mean(1)[5:8].sum())
    assert wide.record is not None and wide.record.kept == N  # so many are not worth a gather
    wide.remove()
    rowprop.skip_zeros(model)
    with rowprop.watch() as report:
        actual, _ = gradient(model, lambda: model(x).square().mean(1)[5:8].sum())
    check_equal(expected, actual)
    assert len(report.waited) == 1


def test_a_capacity_that_is_exceeded_costs_nothing_but_time_on_the_cpu(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(host, "READ_AT_ONCE", {"cpu"})
    model, x = mlp(), rows()
    expected, _ = gradient(model, lambda: model(x).square().mean(1)[:7].sum())
    handle = rowprop.skip_zeros(model, capacity=0.4)
    actual, _ = gradient(model, lambda: model(x).square().mean(1)[:7].sum())
    check_equal(expected, actual)
    assert handle.record is not None and handle.record.reason == "more are live than capacity=0.4 takes"


def test_where_nearly_all_are_live_they_go_on_whole():
    model, x = mlp(), rows()
    handle = rowprop.skip_zeros(model)
    gradient(model, lambda: model(x).square().mean(1)[: int(MOST * N) + 1].sum())
    assert handle.record is not None and handle.record.kept == N


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"x": [1.0]}, r"skip_zeros got x=\[1.0\], a list, but a tensor or a torch.nn.Module was needed"),
        ({"x": torch.tensor(1.0)}, "skip_zeros got a 0-d tensor but rows were needed"),
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


# --- find_zeros -------------------------------------------------------------------------------------------------------


class TwoHeads(nn.Module):
    """Each head is for half of the rows."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.first, self.second = mlp(), nn.Linear(CLASSES, 3), nn.Linear(CLASSES, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.trunk(x)
        return self.first(h), self.second(h)


class Pixels(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.convs = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 4, 3, padding=1))

    def forward(self, x: Tensor) -> Tensor:
        return self.convs(x)


TRAININGS: dict[str, tuple[Callable[[], nn.Module], Callable[[Any], Tensor], str, str]] = {
    "tokens": (Decoder, lambda model: (model(tokens()).square().mean(2) * some).sum(), "head", "token"),
    "whole rows": (
        Decoder,
        lambda model: (model(tokens()).square().mean(2) * PATTERNS["whole rows"]).sum(),
        "head",
        "token",
    ),
    "tokens that are rows": (
        lambda: Decoder(block=FlatBlock),
        lambda model: (model(tokens()).square().mean(2) * some).sum(),
        "head",
        "token",
    ),
    "rows that become tokens": (
        Latent,
        lambda model: (model(rows()).square().mean(2) * some).sum(),
        "head",
        "token",
    ),
    "rows": (mlp, lambda model: model(rows()).square().mean(1)[:4].sum(), "2", "row"),
    "none live": (mlp, lambda model: model(rows()).square().mean(1)[:4].sum() * 0.0, "2", "row"),
    "images": (
        Pixels,
        lambda model: model(torch.ones(6, 3, 5, 5)).square().mean((1, 2, 3))[:2].sum(),
        "convs.2",
        "row",
    ),
}


@pytest.mark.parametrize("training", TRAININGS)
# Red when: modules below an attention are thought to run at the live tokens, or a module's own backward is left out.
def test_what_it_predicts_is_what_is_saved(training: str):
    make, loss_of, place, unit = TRAININGS[training]
    model = make()
    plain, full = gradient(model, lambda: loss_of(model))
    model.zero_grad()
    with rowprop.find_zeros(model) as report:
        loss_of(model).backward()
    check_equal(plain, [p.grad for p in model.parameters()])  # the training itself stays as it is
    best = report.places[0]
    assert (best.module, best.unit, report.backwards, report.backward_flops) == (place, unit, 1, full)
    for found in report.places:
        handle = rowprop.skip_zeros(model.get_submodule(found.module))
        _, left = gradient(model, lambda: loss_of(model))
        assert found.saves == pytest.approx(1 - left / full, abs=0.012), found
        handle.remove()
    assert str(report).endswith(
        f"at {place} have no gradient; skip_zeros there saves {best.saves:.0%} of the backward's FLOPs."
    )


def test_shares_are_those_of_all_backwards_of_the_block():
    model, x = mlp(), rows()
    with rowprop.find_zeros(model) as report:
        for kept in (3, 6):
            model(x).square().mean(1)[:kept].sum().backward()
    assert report.backwards == 2
    assert report.places[0].zero_rows == pytest.approx(1 - 9 / (2 * N))
    assert report.places[0].saves == pytest.approx(1 - 9 / (2 * N))


def test_a_model_that_runs_several_times_is_counted_once_for_each():
    # Red when: the FLOPs of all of a module's calls count for each of them.
    model, other = mlp(), tokens()[:, 1]

    def loss() -> Tensor:
        apart = [model(x).square().mean(1) for x in (rows(), other)]
        with torch.no_grad():
            model(other)
        return apart[0][:3].sum() + apart[1][:6].sum()

    _, full = gradient(model, loss)
    with rowprop.find_zeros(model) as report:
        loss().backward()
    rowprop.skip_zeros(model)
    _, left = gradient(model, loss)
    assert report.places[0].saves == pytest.approx(1 - left / full) == 1 - 9 / (2 * N)
    assert report.places[0].zero_rows == pytest.approx(1 - 9 / (2 * N))


def test_each_of_two_heads_is_told_and_the_trunk_costs_what_both_need():
    model, x = TwoHeads(), rows()
    with rowprop.find_zeros(model) as report:
        first, second = model(x)
        (first[: N // 2].square().sum() + second[N // 2 :].square().sum()).backward()
    found = {place.module: place for place in report.places}
    assert set(found) == {"first", "second"}
    assert all(place.zero_rows == 0.5 and place.saves < 0.2 for place in found.values())


class Inverted(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.linalg.matrix_exp(x.unflatten(1, (4, 4))).flatten(1)


def test_ops_without_a_formula_are_those_of_the_backward():
    # Red when: the forward's count as well, of which no FLOPs are told.
    model, x = nn.Sequential(nn.Linear(WIDTH, WIDTH), Inverted(), nn.Linear(WIDTH, 2)), rows()
    with rowprop.find_zeros(model) as report:
        loss = model(x).square().mean(1)[:3].sum()
        before = dict(report.uncounted)
        with count_flops() as forward:
            model(x)
        with count_flops() as backward:
            loss.backward()
    assert before == {} and forward.uncounted
    assert report.uncounted == backward.uncounted


def test_the_largest_saving_comes_first_and_of_equal_zeros_the_first_place():
    model, x = TwoHeads(), rows()
    model.first = nn.Linear(CLASSES, 300)
    with rowprop.find_zeros(model) as report:
        first, second = model(x)  # the backward comes to the second one first
        (first[: N // 2].square().sum() + second[N // 2 :].square().sum()).backward()
    assert [place.module for place in report.places] == ["first", "second"]
    net = mlp()
    with rowprop.find_zeros(net) as report:
        net(x).square().mean(1)[:3].sum().backward()
    assert [place.module for place in report.places] == ["2"]


def test_nodes_of_a_backward_that_is_done_are_let_go():
    # Red when: the block holds the graphs of all of its steps.
    class Note:
        pass

    class Noting(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, note: Note) -> Tensor:
            ctx.note = note
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:
            return grad, None

    class Noted(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            note = Note()
            notes.append(weakref.ref(note))
            return Noting.apply(x, note)

    notes: list[weakref.ref[Note]] = []
    model, x = nn.Sequential(nn.Linear(WIDTH, 3), Noted()), rows()
    with rowprop.find_zeros(model):
        model(x).sum().backward()
        assert notes[0]() is None


def test_without_zeros_it_says_so():
    model, x = mlp(), rows()
    with rowprop.find_zeros(model) as report:
        model(x).square().mean(1)[: int(MOST * N) + 1].sum().backward()
    assert report.places == []  # nine in ten: not worth it
    given = x.clone().requires_grad_()
    light = nn.Tanh()
    with rowprop.find_zeros(light) as report:
        light(given)[:3].sum().backward()
    assert report.places == []
    with rowprop.find_zeros(model) as report:
        model(x).square().mean().backward()
    assert str(report) == "No zeros that are worth skipping in the gradients of 1 backwards."
    with pytest.raises(rowprop.InvalidInput, match="find_zeros got a model of type list but"), rowprop.find_zeros([]):
        pass


def test_what_is_skipped_already_is_not_found_again():
    model, x = mlp(), rows()
    rowprop.skip_zeros(model)
    with rowprop.find_zeros(model) as report:
        model(x).square().mean(1)[:3].sum().backward()
    assert report.places == []
