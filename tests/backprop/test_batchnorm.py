"""``batchnorm=None``, the default: exact where few rows are kept, projected where many are, and one warning."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import rowprop
from rowprop.backprop.rows.layout import Layout
from rowprop.backprop.rows.rows import RowSet
from rowprop.backprop.rows.slice import RowSlice
from rowprop.backprop.rules import norms
from rowprop.engines import Sliced
from rowprop.thinning.drawn import drawn_rows

N = 64
(RESULT,) = (Path(__file__).parents[2] / "benchmarks" / "results").glob("*-batchnorm-border.json")
BORDER = json.loads(RESULT.read_text())["border"]


def fewest_rows(kind: str) -> int:
    """The smallest K from which on every entry of random rows has an error of at most .3, a cosine of at least .95."""
    entries = [e for e in BORDER if e["network"].startswith(kind)]
    far = [e["K"] for e in entries if e["random error"] > 0.3 or e["random cosine"] < 0.95]
    return min(e["K"] for e in entries if e["K"] > max(far))


@pytest.fixture
def unwarned(monkeypatch: pytest.MonkeyPatch) -> None:
    """In this test the process has met no BatchNorm yet."""
    monkeypatch.setattr(norms, "_warned", [])


def mlp() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(10, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 32), nn.BatchNorm1d(32), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(32, 1)).double()


def compiled(model: nn.Module) -> nn.Module:
    torch._dynamo.reset()
    return torch.compile(model, backend="rowprop", options={"kernels": "eager"})


def gradient(model: Callable[[Tensor], Tensor], x: Tensor, rows: Tensor | int, policy: object = None) -> Tensor:
    """Of these rows' mean loss, or that of the first ones, to the batch and all parameters; as one vector."""
    x, rows = x.clone().requires_grad_(), torch.arange(rows) if isinstance(rows, int) else rows
    losses = model(x).square().flatten(1).sum(1)
    taken = losses[rows] if policy == "plain" else rowprop.pick(losses, rows, batchnorm=policy)
    leaves = [x, *(model.parameters() if isinstance(model, nn.Module) else ())]
    return torch.cat([g.flatten() for g in torch.autograd.grad(taken.mean(), leaves)])


def batch() -> Tensor:
    return torch.randn(N, 10, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("kept", [1, 2, 4, 8])
def test_few_rows_have_the_gradient_of_plain_indexing(kept: int):
    # Red: the default is "rows".
    model, x, rows = mlp(), batch(), torch.randperm(N, generator=torch.Generator().manual_seed(0))[:kept]
    expected = gradient(model, x, rows, "plain")
    torch.testing.assert_close(gradient(model, x, rows), expected, rtol=1e-6, atol=1e-12)
    assert (gradient(model, x, rows, "rows") - expected).norm() > 0.3 * expected.norm()


@pytest.mark.parametrize(
    ("shape", "border"),
    [((3,), 32), ((3, 1), 32), ((3, 2), 16), ((3, 1, 1), 32), ((3, 2, 1), 16), ((3, 8, 8), 16), ((3, 1, 2, 2), 16)],
    ids=str,
)
# Red: the positions of a row do not count, or only those of 2d; 15 rows are enough where positions are many.
def test_each_side_of_the_border(shape: tuple[int, ...], border: int):
    x, weight = torch.randn(N, *shape, dtype=torch.float64), torch.randn(N, *shape, dtype=torch.float64)

    def model(x: Tensor) -> Tensor:
        return torch.nn.functional.batch_norm(x, None, None, training=True) + weight

    for kept, policy in ((border - 1, "exact"), (border, "rows")):
        with rowprop.watch() as report:
            found = gradient(model, x, kept)
        assert torch.equal(found, gradient(model, x, kept, policy))
        told = [
            met.reason.startswith("batchnorm=None is 'exact' for fewer than 16") for met in report.densified.values()
        ]
        assert told == [True] * (policy == "exact")


def test_rows_merged_with_time_count_as_positions():
    # Red: only the dimensions behind the channels are positions.
    norm, x = nn.BatchNorm1d(3).double(), batch()[:, :6].view(N, 2, 3)
    with rowprop.watch() as report:
        gradient(lambda x: norm(x.flatten(0, 1)).view(N, 6), x, 16)
    assert not report.densified


@pytest.mark.usefixtures("unwarned", "in_python")  # a call that is replayed has warned before
@pytest.mark.parametrize(("kept", "took"), [(4, "exact"), (40, "rows")])
def test_the_first_choice_is_told_once(kept: int, took: str):
    # Red: nobody is told, or in every backward; the other choice is named.
    model, x = mlp(), batch()
    with pytest.warns(UserWarning) as caught:
        gradient(model, x, kept)
    (warning,) = caught
    assert f", and takes '{took}'. Measured, 'rows' is up to " in str(warning.message)
    for again in (4, 40):
        gradient(model, x, again)


@pytest.mark.usefixtures("unwarned")
@pytest.mark.parametrize("policy", ["rows", "exact"])
def test_a_named_policy_is_silent_and_what_it_says(policy: str):
    # Red: named policies are told; "rows" densifies where few rows are kept, or "exact" projects where many are.
    model, x = mlp(), batch()
    for kept in (2, 40):
        with rowprop.watch() as report:
            gradient(model, x, kept, policy)
        assert ("native_batch_norm_backward" in report.densified) == (policy == "exact")
    assert not norms._warned


def test_the_warning_tells_what_was_measured():
    # Red: a figure of the warning, or the border, is another than the result's.
    assert fewest_rows("1d") == norms.FEWEST_VALUES
    assert fewest_rows("2d") == norms.FEWEST_ROWS
    many = [e for e in BORDER if e["K"] >= norms.FEWEST_ROWS and e["values"] >= norms.FEWEST_VALUES]
    few = [e for e in BORDER if e not in many]
    random, top = (max(e[f"{selection} error"] for e in many) for selection in ("random", "top-k"))
    worst = max(e[f"{selection} error"] for e in few for selection in ("random", "top-k"))
    costs = [e["random exact FLOPs"] for e in BORDER]
    figures = [random, top, worst, min(costs), max(costs)]
    words = "up to {:.0f} % off with .* \\({:.0f} % .*, up to {:.0f} % with fewer; 'exact' costs {:.0f} to {:.0f} % of"
    assert re.search(words.format(*(100 * figure for figure in figures)), norms._MEASURED)


POLICIES = [  # of two picks, how many rows each keeps, and whether the exact gradient comes out
    (("rows", None), 4, True),  # None is exact for few rows
    ((None, "rows"), 4, True),
    (("rows", None), 20, False),
    ((None, "exact"), 20, True),
    (("rows", "exact"), 20, True),
    ((None, None), 20, False),  # 20 and 20 rows are 40
    ((None, None), 4, True),
    (("rows", "rows"), 4, False),
]


@pytest.mark.parametrize("meet", ["added", "joined"])
@pytest.mark.parametrize(("policies", "kept", "exact"), POLICIES)
# Red: the union has the policy of its first pick, or "rows" wins over None.
def test_picks_of_unlike_policies_take_the_one_that_approximates_least(meet, policies, kept, exact):
    x, norm = batch().view(2 * N, 5).requires_grad_(), nn.BatchNorm1d(5).double()
    hidden = norm(x)
    if meet == "added":
        parts = [(hidden.square().sum(1), torch.arange(kept)), (hidden.exp().sum(1), torch.arange(kept, 2 * kept))]
    else:  # the backward of chunk joins the gradients of its pieces
        parts = [(part.square().sum(1), torch.arange(kept)) for part in hidden.chunk(2)]
    expected = torch.autograd.grad(sum(losses[rows].sum() for losses, rows in parts), x, retain_graph=True)[0]
    with rowprop.watch() as report:
        picked = (rowprop.pick(*part, batchnorm=policy).sum() for part, policy in zip(parts, policies, strict=True))
        found = torch.autograd.grad(sum(picked), x)[0]
    assert ("native_batch_norm_backward" in report.densified) == exact
    assert torch.allclose(found, expected, rtol=1e-9, atol=1e-12) == exact


def test_rows_that_thinning_drew_count_as_those_they_were_drawn_from():
    # Red: the rows that are left count: 40 rows of a pick, of which 8 are left, would take the exact gradient.
    index = torch.arange(40)
    picked = RowSet(index, N, unique=True, batchnorm=None)
    thinned = drawn_rows(picked, torch.arange(8), torch.full((8,), 5.0, dtype=torch.float64))
    layout = Layout(0, N)
    for rows, few in ((thinned, False), (RowSet(index[:8], N, unique=True, batchnorm=None), True)):
        g = RowSlice(torch.zeros(8, 3), rows, layout, (N, 3))
        assert (norms._needs_all_rows(g) is not None) == few


@pytest.mark.parametrize("drawn", [False, True])
def test_the_sums_of_a_half_precision_model_are_float32(drawn: bool):
    # Red: on a CPU sums of more than 65,504 make the gradient NaN.
    x = 10 * torch.randn(N, 3, 30, 30, dtype=torch.float64)
    rows = RowSet(torch.arange(40), N, unique=True, batchnorm="rows")
    rows = drawn_rows(rows, torch.arange(40), torch.ones(40)) if drawn else rows

    def run(kind: torch.dtype) -> list[Tensor]:
        given, weight, every = x.to(kind), torch.ones(3, dtype=kind), [True] * 3
        _, *about = torch.native_batch_norm(given, weight, None, None, None, True, 0.1, 1e-5)
        g = RowSlice(given[:40].sin(), rows, Layout(0, N), given.shape)
        dx, *sums = norms.batch_norm_backward(norms.NATIVE, g, given, weight, None, None, *about, True, 1e-5, every)
        assert {t.dtype for t in (dx.values, *sums)} == {kind}
        return [t.double() for t in (dx.values, *sums)]

    for found, right in zip(run(torch.float16), run(torch.float64), strict=True):
        assert (found - right).norm() < 0.01 * right.norm()


def test_a_compiled_region_decides_as_eager_mode_does():
    # Red: the region keeps the choice of its first backward for every number of rows, or for every policy.
    model, x = mlp(), batch()
    region = compiled(model)
    for kept, policy in (*((rows, None) for rows in (4, 40, 31, 32, 8, 1)), (8, "rows"), (8, "exact"), (8, None)):
        found = gradient(region, x, kept, policy)
        torch.testing.assert_close(found, gradient(model, x, kept, policy))
        projected = policy == "rows" or (policy is None and kept >= 32)
        assert torch.allclose(found, gradient(model, x, kept, "plain")) != projected


@pytest.mark.usefixtures("unwarned")
def test_a_warning_that_a_filter_made_an_error_is_no_failed_trace():
    # Red: the region runs at full size from there on.
    model, x = compiled(mlp()), batch()
    with pytest.raises(UserWarning, match="batchnorm=None meets"):  # as pyproject.toml asks for
        gradient(model, x, 40)
    with rowprop.watch() as report:
        gradient(model, x, 40)
    assert not report.densified


def losses_of(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().sum(1)


@pytest.mark.parametrize(("keep", "status"), [(0.125, "exact"), (0.5, "by design")])
def test_verify_takes_the_default_and_tells_the_projection(keep: float, status: str):
    # Red: verify's default is "rows", or it knows the projection of "rows" only.
    result = rowprop.verify(mlp(), batch(), losses_of, keep=keep)
    assert (result.batchnorm, result.status) == (None, status)
    assert ("projected over the kept rows" in result.verdict) == (status == "by design")


def test_verify_knows_which_of_two_batch_norms_projects():
    # Red: the formula is asked for where the gradient was exact, for too few values of a channel.
    layers = [nn.Linear(10, 32), nn.BatchNorm1d(32), nn.Unflatten(1, (2, 4, 4)), nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3)]
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(12, 1)).double()
    assert rowprop.verify(model, batch(), losses_of, keep=0.3).status == "by design"


def test_the_step_takes_the_default():
    # Red: Sliced has another default than pick.
    assert Sliced().batchnorm is None
    model, x = mlp(), batch()
    loss, record = rowprop.SelectiveBackprop(model, losses_of, rowprop.TopK(0.125), engine="sliced")(x)
    loss.backward()
    expected = torch.autograd.grad(losses_of(model, x)[record.selection.rows].mean(), list(model.parameters()))
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


def test_the_plan_names_the_default():
    # Red: the plan calls the gradient of None the same as plain indexing's.
    plan = rowprop.plan(mlp(), batch(), losses_of, keep=0.5, rounds=1)
    assert {way.gradient for way in plan.ways if way.engine == "sliced"} == {"by policy"}
