"""verify(): a wrong rule is caught and named, a documented difference is told apart, and nothing is left behind."""

from __future__ import annotations

import copy
import itertools
import json
import math
from contextlib import nullcontext
from functools import partial
from importlib import import_module
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import rowprop
from model_cases import Sorting, losses, mlp, with_batchnorm, with_zero_head
from rowprop import verify
from rowprop.backprop.rows.refusals import NO_RULE
from rowprop.backprop.rows.slice import RowSlice
from rowprop.backprop.rules import norms
from rowprop.backprop.rules.registry import RULES
from rowprop.engines import Sliced
from rowprop.errors import InvalidInput
from rowprop.oracle.bench import Ran
from rowprop.oracle.judge import ConstantStatistics, Yardstick
from rowprop.oracle.results import Verification
from sentences import refused
from untouched import untouched

aten = torch.ops.aten
N = 8


def vectors(dtype: torch.dtype = torch.float32, shape: tuple[int, ...] = (N, 4)) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(shape, dtype=dtype), torch.randint(3, shape[:1])


def images(*shape: int) -> tuple[Tensor, Tensor]:
    return vectors(shape=shape or (N, 2, 8, 8))


def built(make, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return make().to(dtype)


def plant(monkeypatch: pytest.MonkeyPatch, op, change) -> None:
    """Have the op's rule return ``change(right)`` in place of the right result."""
    right = RULES[op].run
    monkeypatch.setattr(RULES[op], "run", lambda op, *args, **kwargs: change(right(op, *args, **kwargs)))


def times(factor: float):
    return lambda out: out.like(out.values * factor)


def disagreeing(result: Verification, place: slice = slice(None)) -> set[str]:
    return {entry.name for comparison in result.comparisons[place] for entry in comparison.errors if not entry.agrees}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_mlp_is_exact_at_the_kept_share_of_the_flops(dtype: torch.dtype):
    for engine in ("sliced", "recompute"):
        result = verify(built(mlp, dtype), vectors(dtype), losses, engine=engine, keep=0.25)
        assert result.status == "exact" and result.agrees
        assert result.tolerance == {torch.float32: 1e-5, torch.float64: 1e-10}[dtype]
        assert len(result.errors) == 4 and result.comparisons[0].worst.error <= result.tolerance
        assert result.cosine == pytest.approx(1)
        # Backward: weight gradients of both layers, input gradient of the second, 2 FLOPs per multiply-add.
        assert result.full_backward_flops == 2 * N * (4 * 8 + 2 * 8 * 3)
        assert result.flops_ratio == result.num_kept / result.num_rows == result.limit == 0.25
        assert "2 of 8 rows for 0.250 of the full backward's FLOPs (limit 0.250)" in result.verdict
        assert (result.densified, result.uncounted, result.buffers, result.rng_differs) == ([], {}, [], False)
        assert "is exact: all 4 parameters" in result.verdict


def test_a_wrong_rule_is_caught_and_the_parameters_named(monkeypatch: pytest.MonkeyPatch):
    plant(monkeypatch, aten.threshold_backward.default, times(1.001))
    result = verify(built(mlp), vectors(), losses)
    assert result.status == "disagrees" and not result.agrees
    assert disagreeing(result) == {"0.weight", "0.bias"}  # upstream of the ReLU
    assert [entry.error for entry in result.errors[:2]] == pytest.approx([1e-3, 1e-3], rel=1e-2)
    assert "disagrees with the oracle in 2 of 4 parameters: worst 0." in result.verdict


@pytest.mark.parametrize(("kind", "scale"), [(torch.float32, 1e-8), (torch.bfloat16, 1e-4)])
def test_a_wrong_rule_is_caught_in_a_branch_that_begins_next_to_zero(kind, scale, monkeypatch: pytest.MonkeyPatch):
    # As of blocks with LayerScale. Red when: a gradient far below the largest is measured against that one's size.
    plant(monkeypatch, aten.threshold_backward.default, times(2))
    model = nn.ModuleList([built(mlp), nn.Linear(4, 3)])

    def residual(model: nn.ModuleList, batch: tuple[Tensor, Tensor]) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=kind == torch.bfloat16):
            return F.cross_entropy(model[1](batch[0]) + scale * model[0](batch[0]), batch[1], reduction="none")

    assert disagreeing(verify(model, vectors(), residual)) == {"0.0.weight", "0.0.bias"}


def test_a_gradient_that_is_not_finite_is_named_and_fits_into_json(monkeypatch: pytest.MonkeyPatch):
    plant(monkeypatch, aten.threshold_backward.default, times(math.inf))
    result = verify(built(mlp), vectors(), losses)
    assert [entry.problem for entry in result.errors] == ["not finite", "not finite", None, None]
    found = json.loads(json.dumps(result.to_dict(), allow_nan=False))
    assert found["comparisons"][0]["errors"][0]["error"] is None
    assert found["agrees"] is False and found["flops_ratio"] == 0.25


@pytest.mark.parametrize("lost", [True, False])
def test_a_gradient_that_only_one_of_the_two_has_is_a_disagreement(lost: bool, monkeypatch: pytest.MonkeyPatch):
    # Red when: verify takes None for zeros.
    model = nn.ModuleList([nn.Linear(4, 3), nn.Linear(4, 3)])
    in_engine: list[bool] = []

    def two_heads(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        second = losses(model[1], batch)
        return losses(model[0], batch) + (second.detach() if bool(in_engine) == lost else second)

    def kept_losses(self, selection, all_losses, forward):
        in_engine.append(True)
        kept = forward(selection.rows)
        in_engine.clear()
        return kept

    monkeypatch.setattr(Sliced, "kept_losses", kept_losses)
    result = verify(model, vectors(), two_heads)
    problem = "no gradient, where the oracle has one" if lost else "a gradient, where the oracle has none"
    assert {e.name: e.problem for e in result.errors if e.problem} == {"1.weight": problem, "1.bias": problem}
    assert not result.agrees


class Decoder(nn.Module):
    """Two layers of attention between tokens, with a loss for each token but the last."""

    def __init__(self, attention: str = "fused") -> None:
        super().__init__()
        self.attention = attention
        self.qkv = nn.ModuleList(nn.Linear(8, 24) for _ in range(2))
        self.out = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.torchs = nn.ModuleList(nn.MultiheadAttention(8, 2, batch_first=True) for _ in range(2))

    def attend(self, x: Tensor, layer: int) -> Tensor:
        later = torch.full((x.shape[1], x.shape[1]), -math.inf, dtype=x.dtype).triu(1)
        if self.attention == "module":
            return self.torchs[layer](x, x, x, attn_mask=later, need_weights=False)[0]
        q, k, v = (part.unflatten(2, (2, 4)).transpose(1, 2) for part in self.qkv[layer](x).chunk(3, -1))
        if self.attention == "fused":
            return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return ((q @ k.mT + later).softmax(-1) @ v).transpose(1, 2).flatten(2)

    def forward(self, x: Tensor) -> Tensor:
        for layer, out in enumerate(self.out):
            attended = checkpoint(self.attend, x, layer, use_reentrant=False) if layer else self.attend(x, layer)
            x = x + out(attended).tanh()
        return x


def token_losses(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch)[:, :-1].square().mean(-1)


def sequences() -> Tensor:
    torch.manual_seed(1)
    return torch.randn(4, 10, 8, dtype=torch.float64)


def cut_verified(kind: str = "fused", losses_fn: Any = token_losses, **options: Any) -> Verification:
    model = built(lambda: Decoder(kind), torch.float64)
    return verify(model, sequences(), losses_fn, unit="token", **{"attention": "cut"} | options)


@pytest.mark.parametrize("attention", ["fused", "module"])
def test_cut_attention_is_compared_with_detached_keys_and_values(attention: str):
    # Red when: nothing is detached, or in the first layer alone; the mask is not the selection's.
    result = cut_verified(attention)
    assert result.status == "by design" and (result.num_kept, result.num_rows) == (9, 36)
    first, second = result.comparisons
    assert not first.agrees and second.agrees and second.conditions == "keys and values of other tokens detached"
    assert 0.5 < result.cosine < 0.999 and sum(result.cut.values()) == 2 and not result.densified
    assert "keys and values of tokens that are not kept take no gradient" in result.verdict
    assert "9 of 36 tokens for 0." in result.verdict
    assert F.scaled_dot_product_attention is torch._C._nn.scaled_dot_product_attention
    exact = cut_verified(attention, attention="exact")
    assert exact.status == "exact" and exact.cut == {}


LOSSES: dict[str, tuple[bool, Any]] = {  # whether the cut is compared; the losses
    "flattened": (True, lambda model, batch: model(batch).square().mean(-1).flatten()),
    "shifted, then flattened": (True, lambda model, batch: token_losses(model, batch).flatten()),
    "pixels": (True, lambda model, batch: model(batch).square().mean(-1).unflatten(1, (5, 2))),
    "of some tokens, flattened": (False, lambda model, batch: model(batch)[:, ::2].square().mean(-1).flatten()),
    "of entries": (False, lambda model, batch: model(batch).square()),
    "time first": (False, lambda model, batch: token_losses(model, batch).t()),
}


@pytest.mark.parametrize("shape", LOSSES)
def test_cut_attention_is_compared_for_losses_of_any_shape(shape: str):
    # Red when: the kept tokens are taken for (N, T) whatever the shape of the losses is, or flattened losses of some
    # tokens for those of the first ones: the right gradient then "disagrees".
    compared, losses_fn = LOSSES[shape]
    result = cut_verified(losses_fn=losses_fn)
    assert result.status == "by design" and result.cut, result.verdict
    conditions = "keys and values of other tokens detached" if compared else "attention='exact', as it is"
    assert result.comparisons[-1].conditions == conditions and ("not compared" in result.verdict) != compared


@pytest.mark.parametrize("fails", [False, True])
def test_attention_that_the_user_patched_is_called_and_put_back(fails: bool, monkeypatch: pytest.MonkeyPatch):
    # Red when: torch's own function is put back or called instead, or an error leaves the detached one in its place.
    calls: list[Any] = []

    def patched(query: Tensor, *given: Tensor, **options: Any) -> Tensor:
        calls.append(F.scaled_dot_product_attention)
        if fails and F.scaled_dot_product_attention is not patched:
            raise KeyError("no mask")
        return torch._C._nn.scaled_dot_product_attention(
            3 * query, *given, **options
        )  # torch's own has another gradient

    monkeypatch.setattr(F, "scaled_dot_product_attention", patched)
    with pytest.raises(KeyError, match="no mask") if fails else nullcontext():
        result = cut_verified()
        assert result.status == "by design" and result.comparisons[1].agrees
    assert F.scaled_dot_product_attention is patched
    assert any(found is not patched for found in calls)  # verify asked the user's function while its own stood there


def test_a_wrong_cut_is_no_approximation(monkeypatch: pytest.MonkeyPatch):
    # Red when: any difference under attention="cut" is taken for its approximation.
    def halved(out: Any) -> Any:
        cut = type(out) is tuple and type(out[1]) is RowSlice
        return (out[0], times(0.5)(out[1]), out[2]) if cut else out

    plant(monkeypatch, aten._scaled_dot_product_flash_attention_for_cpu_backward.default, halved)
    result = cut_verified()
    assert result.status == "disagrees" and not result.agrees
    assert disagreeing(result) >= {"qkv.0.weight", "qkv.1.weight"}


def test_whole_sequences_are_exact_under_cut():
    # Red when: a comparison is asked for where nothing differs.
    result = cut_verified(rows=torch.arange(9, 27))
    assert result.status == "exact" and result.cut and len(result.comparisons) == 1


def test_cut_products_are_named_and_the_other_rules_compared(monkeypatch: pytest.MonkeyPatch):
    # Red when: the verdict does not say that the cut was not compared, or a wrong rule passes beside it.
    result = cut_verified("products")
    assert result.status == "by design" and result.cut == {"bmm": 4}
    assert [c.conditions for c in result.comparisons] == ["as it is", "attention='exact', as it is"]
    assert "not compared, as the losses are not of sequences in scaled_dot_product_attention" in result.verdict
    plant(monkeypatch, aten.tanh_backward.default, times(1.001))
    assert not cut_verified("products").agrees


def test_batchnorms_approximation_is_measured_and_told_apart():
    model, batch = built(with_batchnorm), images()
    rows = torch.tensor([1, 4])
    result = verify(model, batch, losses, rows=rows, batchnorm="rows")
    assert result.status == "by design" and result.agrees
    assert f"has another gradient, by design, with a cosine of {result.cosine:.4f} to" in result.verdict
    assert "off in" in result.verdict and ": BatchNorm's gradient is projected over the kept rows" in result.verdict
    conditions = ["BatchNorm's statistics held constant", "batchnorm='exact'", "BatchNorm projected by its formula"]
    assert [c.conditions for c in result.comparisons[1:]] == conditions
    assert not result.comparisons[0].agrees and all(c.agrees for c in result.comparisons[1:])

    # The errors of the first comparison, computed by hand.
    def gradients(choose):
        copied = copy.deepcopy(model)
        choose(losses(copied, batch)).mean().backward()
        return {name: p.grad for name, p in copied.named_parameters()}

    expected = gradients(lambda values: values[rows])
    found = gradients(lambda values: rowprop.pick(values, rows, batchnorm="rows"))
    largest = max(float(grad.abs().max()) for grad in expected.values())
    for entry in result.errors:
        off = float((found[entry.name] - expected[entry.name]).abs().max())
        scale = max(float(expected[entry.name].abs().max()), 1e-2 * largest)
        assert entry.error == pytest.approx(off / scale, rel=1e-5, abs=1e-12)
    a, b = (torch.cat([g.flatten() for g in grads.values()]) for grads in (expected, found))
    assert result.cosine == pytest.approx(float(F.cosine_similarity(a, b, dim=0)), rel=1e-5)


def test_exact_batchnorm_is_exact_and_names_where_it_densified():
    result = verify(built(with_batchnorm), images(), losses, batchnorm="exact")
    assert result.status == "exact"
    (place,) = result.densified
    assert (place.module, place.op, place.calls) == ("4", "native_batch_norm_backward", 1)
    assert place.reason.startswith("batchnorm='exact'")


@pytest.mark.parametrize("op", [aten.convolution_backward.default, aten.threshold_backward.default])
def test_a_wrong_rule_upstream_of_batchnorm_is_not_taken_for_its_approximation(op, monkeypatch: pytest.MonkeyPatch):
    # Red when: verify compares only batchnorm="exact", under which nothing upstream is sliced.
    plant(monkeypatch, op, lambda out: (out[0], out[1] * 1.01, out[2]) if type(out) is tuple else times(1.01)(out))
    result = verify(built(with_batchnorm), images(), losses, batchnorm="rows")
    assert result.status == "disagrees"
    assert "with BatchNorm's statistics held constant: worst " in result.verdict
    named = disagreeing(result, slice(1, 2))
    assert named >= ({"3.weight"} if op is aten.convolution_backward.default else {"0.weight", "1.weight"})
    assert "6.weight" not in named


def test_a_wrong_projection_is_not_taken_for_the_approximation(monkeypatch: pytest.MonkeyPatch):
    # Red when: verify compares BatchNorm's gradient only where nothing is projected, or takes for wrong what rounding
    # leaves where two rows of eight, projected, cancel.
    few = built(lambda: nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 6), nn.BatchNorm1d(6), nn.SiLU(), nn.Linear(6, 3)))
    assert verify(few, vectors(), losses, batchnorm="rows").status == "by design"

    def wrong(call, g, right=norms._project):
        dx, *sums = right(call, g)
        return times(1.01)(dx), *sums

    monkeypatch.setattr(norms, "_project", wrong)
    result = verify(built(with_batchnorm), images(), losses, batchnorm="rows")
    assert result.status == "disagrees" and "with BatchNorm projected by its formula: worst " in result.verdict
    assert "6.weight" not in disagreeing(result, slice(3, 4)) >= {"0.weight", "3.weight"}


def test_instance_norm_is_no_batch_statistic_and_a_wrong_rule_of_it_no_approximation(monkeypatch: pytest.MonkeyPatch):
    # Both norms are the same op. Red when: verify holds the statistics of instance norm constant, too.
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.InstanceNorm2d(4, affine=True), nn.Flatten(), nn.Linear(144, 3))
    result = verify(model, images(), losses)
    assert result.status == "exact" and result.densified == []
    rule = RULES[aten.native_batch_norm_backward.default]

    def wrong(op, g, *args, right=rule.run):
        out = right(op, g, *args)
        per_row, training = g.dim == 1, args[6]
        return (times(1.01)(out[0]), *out[1:]) if per_row and training else out

    monkeypatch.setattr(rule, "run", wrong)
    model = built(lambda: nn.Sequential(nn.Conv2d(2, 4, 3), nn.InstanceNorm2d(4), *with_batchnorm()[1:]))
    result = verify(model, images(), losses, batchnorm="rows")
    assert result.status == "disagrees"
    assert "0.weight" in disagreeing(result, slice(1, 2))


NORMS = ["1.running_mean", "1.running_var", "4.running_mean", "4.running_var"]


@pytest.mark.parametrize(
    ("make", "batch", "reason", "buffers"),
    [
        (lambda: mlp().insert(2, nn.Dropout(0.5)), vectors, "draws other dropout masks", []),
        (with_batchnorm, images, "takes batch statistics from the kept rows only", NORMS),
    ],
)
def test_recompute_differs_by_design_where_rows_meet_or_noise_is_drawn(make, batch, reason, buffers):
    result = verify(built(make), batch(), losses, engine="recompute")
    assert result.status == "by design" and reason in result.verdict
    assert result.comparisons[1].conditions == "evaluation mode" and result.comparisons[1].agrees
    assert result.buffers == buffers and result.rng_differs == (not buffers)
    assert result.flops_ratio == 0.25


def test_recompute_disagrees_where_rows_mix_and_has_nothing_to_compare_with_where_evaluation_is_noisy():
    result = verify(built(Sorting), vectors(), losses, engine="recompute")
    assert result.status == "disagrees"
    assert "each row's loss should depend on that row alone" in result.verdict

    noisy = lambda model, batch: losses(lambda x: model(F.dropout(x, 0.5)), batch)  # noqa: E731
    result = verify(nn.Linear(4, 3), vectors(), noisy, engine="recompute")
    assert result.status == "by design" and "in evaluation mode too" in result.verdict
    assert len(result.comparisons) == 1 and "all parameters" not in result.verdict


def test_an_op_without_a_rule_is_named_with_its_module_and_reason(monkeypatch: pytest.MonkeyPatch):
    result = verify(built(Sorting), vectors(), losses)
    assert result.status == "exact"
    assert [(place.module, place.op) for place in result.densified] == [("block.1", "scatter.src")]

    monkeypatch.delitem(RULES, aten.threshold_backward.default)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Sequential(nn.ReLU(), nn.Linear(6, 3)))
    result = verify(model, vectors(), losses)
    place = result.densified[0]
    assert (place.module, place.op, place.node) == ("1.0", "threshold_backward", "ReluBackward0")
    assert (place.calls, place.reason) == (1, NO_RULE)
    # The first layer's weight gradient at N rows, the second's two gradients at 2.
    assert result.backward_flops == 2 * N * (4 * 6) + 2 * 2 * (2 * 6 * 3)


class Own(nn.Linear):
    """Sorts the rows in its own forward."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).sort(dim=0).values


def test_an_op_outside_of_modules_or_in_the_models_own_forward_has_its_place():
    running_sums = lambda model, batch: losses(model, batch).cumsum(0)  # noqa: E731
    assert [p.module for p in verify(Own(4, 3), vectors(), losses).densified] == ["Own"]
    assert [p.module for p in verify(mlp(), vectors(), running_sums).densified] == ["losses_fn"]


def test_the_share_of_time_covers_the_node_and_all_nodes_upstream(monkeypatch: pytest.MonkeyPatch):
    # The clock ticks once per reading, so every node takes equally long, and the share is a number of nodes.
    clock = itertools.count()
    monkeypatch.setattr(import_module("rowprop.cost.where"), "drained_s", lambda: float(next(clock)))
    place = verify(built(Sorting), vectors(), losses).densified[0]
    # Eight nodes lie before the sort: mean, pick, nll, log_softmax, and addmm with bias, transpose and weight.
    # Six lie from there on: sort, relu, and addmm with the same three.
    assert place.time_share == pytest.approx(6 / 14)


def test_a_compiled_model_is_verified_too():
    model = torch.compile(built(mlp), backend="aot_eager")
    result = verify(model, vectors(), losses)
    assert result.status == "exact"
    assert all(entry.name.startswith("_orig_mod.") for entry in result.errors)
    inside = nn.Sequential(torch.compile(nn.Linear(4, 4), backend="aot_eager"), nn.Linear(4, 3))
    inside[0].compile(backend="aot_eager")
    assert verify(inside, vectors(), losses).status == "exact"


@pytest.mark.filterwarnings("ignore")
def test_batch_norm_inside_a_compiled_region(monkeypatch: pytest.MonkeyPatch):
    def model() -> nn.Module:
        torch._dynamo.reset()
        layers = [nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)]
        return torch.compile(nn.Sequential(*layers), backend="rowprop", options={"kernels": "eager"})

    assert verify(model(), vectors(), losses, batchnorm="rows").status == "by design"
    rule = RULES[aten.tanh_backward.default]
    monkeypatch.setattr(rule, "run", lambda op, g, y, right=rule.run: right(op, g, y * 1.1))
    assert verify(model(), vectors(), losses, batchnorm="rows").status == "disagrees"


def test_a_compiled_model_is_not_compiled_again():
    compiled: list[object] = []

    def backend(graph, _):
        compiled.append(graph)
        return graph.forward

    model = torch.compile(built(Sorting), backend=backend)
    losses(model, vectors())
    before = len(compiled)
    assert before > 0
    assert [place.module for place in verify(model, vectors(), losses).densified] == ["OptimizedModule"]
    assert len(compiled) == before


def ran(**grads: float) -> Ran:
    tensors: dict[str, Tensor | None] = {name: torch.tensor([value]) for name, value in grads.items()}
    return Ran(tensors, {}, [], False, [], torch.float32, cast("Any", None), torch.Size(), None)


@pytest.mark.parametrize("other", [1.0, 0.0])
def test_a_gradient_of_exact_zeros_is_measured_against_the_others(other: float):
    # Red when: what rounding leaves of it is infinitely off, or where there is no other, zero is divided by.
    left = ran(zero=1e-9 * other, other=other)
    assert Yardstick(1e-5, {"zero": 0.0, "other": 0.0}).compare("", ran(zero=0.0, other=other), left).agrees


def test_a_parameter_that_disagrees_comes_before_one_with_a_larger_error_that_is_rounding():
    # Red when: the errors are sorted by size alone: the comparison, which looks at the first, would agree.
    found = Yardstick(1e-3, {"noisy": 0.01}).compare("", ran(noisy=1.0, wrong=1.0), ran(noisy=1.05, wrong=1.01))
    assert [entry.name for entry in found.errors] == ["wrong", "noisy"]
    assert [entry.agrees for entry in found.errors] == [False, True]
    assert not found.agrees


def test_the_tolerance_is_that_of_the_coarsest_dtype():
    in_bfloat16 = torch.autocast("cpu", torch.bfloat16)(losses)
    result = verify(built(mlp), vectors(), in_bfloat16)
    assert (result.dtype, result.tolerance, result.status) == ("bfloat16", 5e-2, "exact")
    assert verify(built(mlp), vectors(), losses, tolerance=3e-4).tolerance == 3e-4


def test_steps_inside_autocast_see_the_parameters_as_they_are():
    # Red when autocast's cache keeps the low-precision copies of the zeros that are drawn anew.
    with torch.autocast("cpu", torch.bfloat16):
        result = verify(built(with_zero_head), vectors(), losses)
    assert (result.status, result.dtype) == ("exact", "bfloat16")
    assert result.drawn and result.zero_gradients == []


def test_sparse_absent_and_complex_gradients():
    # Red when: the cosine leaves the imaginary parts out (torch warns).
    model = nn.ModuleDict({"table": nn.Embedding(5, 3, sparse=True), "unused": nn.Linear(2, 2)})
    batch = torch.randint(5, (N, 4)), torch.randint(3, (N,))
    result = verify(model, batch, lambda model, batch: losses(lambda x: model["table"](x).sum(1), batch))
    assert result.status == "exact" and [entry.name for entry in result.errors] == ["table.weight"]
    model = nn.ParameterDict({"weight": torch.randn(4, 3, dtype=torch.complex64)})
    product = lambda x: (x.to(torch.complex64) @ model["weight"]).abs()  # noqa: E731
    result = verify(model, vectors(), lambda model, batch: losses(product, batch))
    assert (result.status, result.cosine) == ("exact", pytest.approx(1))


@pytest.mark.parametrize(("engine", "batchnorm"), [("sliced", "rows"), ("sliced", "exact"), ("recompute", "rows")])
def test_everything_is_as_before(engine: str, batchnorm):
    # Red when: rng_kept or buffers_kept is left out, or modes, gradients or parameters are not put back.
    model, batch = built(with_batchnorm).append(nn.Dropout(0.3)), images()
    model[1].eval()
    model[0].weight.grad = torch.ones_like(model[0].weight)
    batch[0].requires_grad_().grad = torch.full_like(batch[0], 2)

    def turning(model: nn.Module, batch: tuple[Tensor, Tensor], fails: bool = False) -> Tensor:
        result = losses(model, batch)
        model.eval()
        model[4].running_mean = torch.rand(4) if fails else torch.zeros(4)
        if fails:
            raise KeyError("a column is missing")
        return result

    with untouched(model, batch[0]):
        verify(model, batch, turning, engine=engine, batchnorm=batchnorm)
        with pytest.raises(KeyError, match="a column is missing"):
            verify(model, batch, partial(turning, fails=True), engine=engine, batchnorm=batchnorm)


def test_the_state_that_an_engine_leaves_is_compared(monkeypatch: pytest.MonkeyPatch):
    model = built(with_batchnorm).eval()
    right = Sliced.kept_losses

    def meddling(self, selection, all_losses, forward):
        model[1].num_batches_tracked.data += 1
        torch.rand(1)
        return right(self, selection, all_losses, forward)

    monkeypatch.setattr(Sliced, "kept_losses", meddling)
    result = verify(model, images(), losses)
    assert result.status == "disagrees" and result.comparisons[0].agrees
    assert result.buffers == ["1.num_batches_tracked"] and result.rng_differs
    assert result.verdict.endswith("in the state that it leaves: buffer 1.num_batches_tracked, the random state.")


def test_an_optimizer_inside_the_backward_is_refused_and_undone():
    model = built(mlp)
    before = model[0].weight.detach().clone()

    def steps(parameter: Tensor) -> None:
        parameter.data.sub_(parameter.grad)

    model[0].weight.register_post_accumulate_grad_hook(steps)
    with pytest.raises(InvalidInput, match=r"The backward changed 0\.weight"):
        verify(model, vectors(), losses)
    assert torch.equal(model[0].weight, before)


def test_a_gradient_that_is_not_reproducible_is_refused():
    runs = itertools.count(1)  # not random numbers: two of those may be alike
    with pytest.raises(InvalidInput, match="Two plain backwards from the same random state differ by"):
        verify(mlp(), vectors(), lambda model, batch: losses(model, batch) * next(runs))


def test_rounding_of_terms_that_cancel_is_no_disagreement():
    # Attention does not depend on the bias of its keys. The gradient of this bias is rounding and nothing else.
    def attended(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        query, key, value = (model[name](batch[0]) for name in ("query", "key", "value"))
        scores = query @ key.mT / 8**0.5  # torch's own kernels round otherwise in each version
        return losses(lambda _: model["out"]((scores.softmax(-1) @ value).mean(1)), batch)

    widths = {"query": 8, "key": 8, "value": 8, "out": 3}
    model = built(lambda: nn.ModuleDict({name: nn.Linear(8, width) for name, width in widths.items()}))
    batch = 5 * torch.randn(64, 16, 8), torch.randint(3, (64,))
    rounding = verify(model, batch, attended).errors[0].error  # it depends on the CPU's kernels
    result = verify(model, batch, attended, tolerance=0.9 * rounding)
    bias = result.errors[0]
    assert (bias.name, result.status) == ("key.bias", "exact")
    assert result.tolerance < bias.error <= bias.allowed
    assert "more where the oracle's own rounding is more" in result.verdict


def test_a_bias_before_batchnorm_is_rounding_and_no_reason_to_refuse():
    # Red when: two runs of the oracle count as different beyond ten times the tolerance.
    def make() -> nn.Module:
        convolutions = [nn.Conv2d(2, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.BatchNorm2d(16)]
        return nn.Sequential(*convolutions, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 3))

    result = verify(built(make), images(32, 2, 24, 24), losses, batchnorm="rows")
    assert result.status == "by design"
    allowed = {entry.name: entry.allowed for entry in result.errors}
    assert max(allowed["0.bias"], allowed["3.bias"]) > 1e-3  # ten times a rounding of more than 1e-4
    assert max(allowed["0.weight"], allowed["3.weight"]) < 1e-3

    # Red when: in bfloat16, whose rounding is .4 %, so much of the largest gradient counts as a gradient.
    def deep() -> nn.Module:
        widths = ((4, 16), (16, 16))
        layers = [part for a, b in widths for part in (nn.Linear(a, b), nn.BatchNorm1d(b), nn.ReLU())]
        return nn.Sequential(*layers, nn.Linear(16, 3))

    assert verify(built(deep), vectors(shape=(64, 4)), torch.autocast("cpu", torch.bfloat16)(losses), keep=0.5).agrees


def rooted(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """The root of zero, whose slope is infinite."""
    return (losses(model, batch) - losses(model, batch).detach()).abs().sqrt()


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"model": losses}, "a function, but a torch.nn.Module was needed"),
        ({"batchnorm": "none"}, "verify got batchnorm='none' but one of None, rows, exact was needed"),
        ({"model": mlp().requires_grad_(False)}, "verify got a model without a parameter that requires a gradient"),
        ({"model": mlp().to("meta")}, "verify got a model on the device meta, which holds no numbers to compute with"),
        ({"batch": (torch.zeros(8, 4, device="meta"), torch.zeros(8))}, "verify got a batch on the device meta"),
        ({"seed": 1.5}, "verify got seed=1.5 but a whole number of at most 64 bits was needed"),
        ({"keep": 1.0}, "verify got keep=1.0 but a fraction in (0, 1) was needed"),
        ({"keep": 0.99}, "verify would keep all 8 rows of the batch"),
        ({"rows": torch.tensor([1, 1])}, "verify got rows that repeat or are outside 0 to 7"),
        ({"rows": torch.tensor([8])}, "verify got rows that repeat or are outside 0 to 7"),
        (
            {"rows": torch.ones(1)},
            "rows=<tensor of shape (1,), torch.float32> but row indices were needed: a tensor (K,)",
        ),
        ({"tolerance": 0.0}, "verify got tolerance=0.0"),
        ({"losses_fn": lambda model, batch: losses(model, batch).mean()}, "pass reduction='none' to the loss"),
        ({"losses_fn": lambda model, batch: losses(model, batch).detach()}, "The losses have no graph"),
        ({"losses_fn": lambda model, batch: losses(model, batch) * 0}, "No parameter gets a gradient other than zero"),
        ({"losses_fn": lambda model, batch: losses(model, batch) * math.nan}, "have a NaN or infinite loss"),
        ({"losses_fn": lambda *given: rooted(*given)}, "The plain gradient of 0.weight is not finite"),
        *(({"losses_fn": lambda *_, found=found: found}, "losses_fn returned") for found in (None, "text", [1.0])),
    ],
)
def test_an_argument_that_cannot_be_verified_is_refused_in_one_sentence(change: dict[str, object], sentence: str):
    with refused(sentence):
        verify(**{"model": mlp(), "batch": vectors(), "losses_fn": losses} | change)


def test_a_tick_is_told_of_each_step():
    # Red: `self.run += 1` left out (fractions stay 0). Each step of these engines calls losses_fn once.
    ticks: list[tuple[str, float]] = []
    calls: list[int] = []
    losses_fn = lambda model, batch: calls.append(1) or model(batch).square()  # noqa: E731
    verify(nn.Linear(4, 1), torch.randn(8, 4), losses_fn, tick=lambda *told: ticks.append(told))
    assert len(calls) == 4 and [fraction for _, fraction in ticks] == [0, 1 / 5, 2 / 5, 3 / 5]
    assert ticks[0][0] == "step 1, engine masked" and ticks[1][0].endswith(" s in all")


# Red when: parameters that are zero stay as they are (the wrong rule is then "exact"), or are not put back.
def test_a_zero_head_is_drawn_anew_so_that_a_wrong_rule_below_it_shows(monkeypatch: pytest.MonkeyPatch):
    model, batch = built(with_zero_head), vectors()
    with untouched(model):
        right = verify(model, batch, losses)
        plant(monkeypatch, aten.threshold_backward.default, times(2))
        wrong = verify(model, batch, losses)
    assert right.status == "exact"
    assert (right.drawn, right.zero_gradients) == (["2.weight", "2.bias"], [])
    assert "Parameters that are zero stop the gradient: 2 were drawn anew" in right.verdict
    assert json.loads(json.dumps(right.to_dict()))["drawn"] == ["2.weight", "2.bias"]
    assert wrong.status == "disagrees" and disagreeing(wrong) == {"0.weight", "0.bias"}


# Red when: gradients that are zero are not counted, or the verdict speaks of all parameters.
def test_gradients_that_stay_zero_are_counted_and_told():
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
    nn.init.constant_(model[2].bias, -1e3)  # the ReLU behind it is closed
    result = verify(model, vectors(), losses)
    assert result.drawn == []
    assert result.zero_gradients == ["0.weight", "0.bias", "2.weight", "2.bias", "4.weight"]
    assert result.status == "exact" and "is exact: 1 of 6 parameters within" in result.verdict
    assert "The gradients of 5 of 6 parameters are zero on these rows" in result.verdict
    assert "verify another batch, or the model after some training" in result.verdict


class EvaluatedNorms(TorchDispatchMode):
    """Notes the saved statistics that BatchNorm's backward gets in evaluation mode."""

    def __init__(self) -> None:
        super().__init__()
        self.saved: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.native_batch_norm_backward.default and not args[7]:
            self.saved += args[5:7]
        return func(*args, **(kwargs or {}))


def test_constant_statistics_come_as_saved_ones_too():
    # CUDA's kernel ends in an assertion without them ("save_mean should always be defined").
    x, norm = torch.randn(6, 3, requires_grad=True), nn.BatchNorm1d(3)
    with EvaluatedNorms() as seen, ConstantStatistics() as constant:
        norm(x).square().sum().backward()
    assert constant.calls == 1 and len(seen.saved) == 2 and None not in seen.saved
