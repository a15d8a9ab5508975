"""Every rule against the dense truth: one small function per op, many layouts of the batch, every kind of rows."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import rowprop
from cuda_kernels import KERNELS
from experts import EXPERTS, ROUTINGS, WIDTH
from picks import Calls, Take, as_indexed, indexed
from rowprop import host
from rowprop.backprop.autograd.rowgrad import RowGrad
from rowprop.backprop.rows.layout import Layout
from rowprop.backprop.rows.refusals import NO_RULE
from rowprop.backprop.rows.rows import RowSet
from rowprop.backprop.rows.slice import Densify, RowSlice
from rowprop.backprop.rules.registry import RULES, op_name, rule
from rule_cases import CASES, DIRECT, N, aux, call_direct, ints, param, randn, run, sliced

aten = torch.ops.aten
ROWS = [[1, 4], [5], [0, 2, 2, 5], [3, 1, 0]]
TWO = torch.tensor([1, 4])

# The cases that cannot stay sliced, each with the ops that densify. A case that starts or stops densifying fails.
# Where "add.Tensor" densifies, a sum over all rows comes back to each of them.
MIXED = """
in_place_spectrum_some_rows in_place_spectrum_transposed in_place_spectrum_adjoint: as_strided
in_place_spectrum_imag_select in_place_spectrum_select_imag in_place_spectra_parts: as_strided
in_place_spectrum_conj_imag: _neg_view; in_place_conjugate_row: copy_; in_place_row_raised: add copy_
in_place_buffer_shifted in_place_rows_in_groups in_place_rows_across_times in_place_rows_diagonal: as_strided
in_place_rows_none in_place_rows_of_times in_place_rows_of_lines: as_strided; in_place_rows_added_up: cumsum copy_
in_place_two_rows_added_up: cumsum; ln_over_batch: native_layer_norm_backward; put: put; roll_none: roll
gn2d_over_batch_channels_last: native_group_norm_backward; max_pool_over_batch: max_pool2d_with_indices_backward
avg_pool_over_batch avg_pool_over_lines: avg_pool2d_backward; upsample_batch: upsample_linear1d_backward
conv_over_batch: convolution_backward; softmax_batch: _softmax_backward_data
bn_train bn_train_rows_last: native_batch_norm_backward; bn_any: batch_norm_backward; catb: slice.Tensor
emb_freq emb_width: embedding_dense_backward; embag_freq embag_width: _embedding_bag_backward; gather_each: scatter_add
index_add_one: squeeze.dim; scatter_partial scatter_reduce_each: add.Tensor gather; rot90_rows: rot90
gather_partial: add.Tensor scatter_add; sortbatch: scatter.src; cumsumb cumprod_rows: cumsum; lcse_rows: gt.Scalar log
select_scatter_row: select_scatter
masked_select max_batch maxall meanall mean0 stdall einsum2 xxt dot mm_batchcontract rms_over_batch: add.Tensor
mask_set_zero: add.Tensor; matrix_exp_over_rows: cat; dirichlet_over_rows: _Dirichlet
fake_over_rows: _fake_quantize_learnable_per_channel_affine_backward
"""
DENSIFIES = {
    name: set(ops.split())
    for names, ops in (entry.split(": ") for entry in MIXED.strip().replace("\n", "; ").split("; "))
    for name in names.split()
}


@pytest.mark.parametrize("name", CASES)
# Red when: take() gathers along dim 0 whatever the layout says, scatter copies instead of adding, or a rule is dropped;
# by an op's schema, a weight is reduced to the kept rows, or a saved tensor or a full shape is not; an argument that
# has a default, or is given by keyword, is not found, or a changed one goes to another place. (Where a gradient counts
# as a saved tensor, test_cuda_rules.py is red.)
def test_gradients_equal_the_dense_truth(name: str, as_host: None):
    for rows, channels_last in [*((rows, False) for rows in ROWS), (ROWS[0], True)]:

        def step(take: Take, rows: list[int] = rows, channels_last: bool = channels_last) -> list[Tensor | None]:
            return run(name, lambda losses: take(losses, torch.tensor(rows)), channels_last)

        report = as_indexed(step, batchnorm="exact")
        if rows == ROWS[0] and torch.__version__.startswith("2.13."):  # other versions have other formulas
            assert set(report.densified) == DENSIFIES.get(name, set()), str(report)


# Red when: a rule makes a tensor without the gradient's device. On a GPU this tensor would lie on the host.
def test_new_tensors_lie_where_the_gradient_lies(monkeypatch: pytest.MonkeyPatch, as_accelerator: None):
    def checked(made: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def make(*args: object, **kwargs: object) -> Tensor:
            caller = sys._getframe(1).f_globals["__name__"]
            here = "device" in kwargs or caller.endswith(".losses")  # lengths of labels lie on the host
            assert here or not caller.startswith("rowprop.backprop"), f"{made.__name__} in {caller}"
            return made(*args, **kwargs)

        return make

    for name in ("arange", "empty", "eye", "full", "ones", "zeros"):
        monkeypatch.setattr(torch, name, checked(getattr(torch, name)))
    for name in CASES:
        run(name, lambda losses: rowprop.pick(losses, torch.tensor(ROWS[2])), False)
    for name in DIRECT:
        call_direct(name, [2, 2])


# Ops that raise on CUDA under torch.use_deterministic_algorithms(True), as its page lists them for one of the supported
# versions, and that a rule might call by itself.
REFUSED: dict[str, Callable[..., bool]] = {
    **dict.fromkeys("put histc kthvalue median scatter_reduce".split(), lambda *_: True),
    **dict.fromkeys("scatter scatter_add".split(), lambda x, *_: x.ndim > 1),
    "cumsum": lambda x, *_: x.is_floating_point() or x.is_complex(),
    "bincount": lambda x, weights=None, *_: weights is not None,
}


def refused(name: str, take: Callable[[Tensor], Tensor]) -> set[str]:
    """The calls of a case that CUDA refuses in its deterministic mode."""
    met = set[str]()

    def tell(op: str, args: Any, _: object) -> None:
        if REFUSED.get(op.removesuffix("_"), lambda *_: False)(*args):
            met.add(op.removesuffix("_"))

    with Calls(tell):
        run(name, take, False)
    return met


# Red when: a rule calls an op that CUDA has in no deterministic form, where the formula of plain indexing does not.
def test_the_deterministic_mode_refuses_nothing_that_plain_indexing_may_do(as_accelerator: None):
    for name in CASES:
        picked = refused(name, lambda losses: rowprop.pick(losses, torch.tensor(ROWS[2])))
        assert not picked or picked <= refused(name, lambda losses: losses[torch.tensor(ROWS[2])]), name


@pytest.mark.parametrize("index", [[1, 4], [5, 0], [2, 2], [4, 0, 2]], ids=str)
@pytest.mark.parametrize("name", DIRECT)
# Red when: products of two gradients ignore repeats; the sum of a row that repeats stands in each of its places, or its
# place is taken without the parts around the rows; an op that maps zero to a number counts as local; the dimensions of
# a diagonal are inserted in the order in which they are named; an addend of all rows that counts nothing is added; the
# rows of a grouped product, which are sorted for it, are sorted once more in the place of going back; a copy in
# channels-last order claims ordinary strides.
def test_ops_called_directly(name: str, index: list[int]):
    actual, expected = call_direct(name, index)
    torch.testing.assert_close(actual, expected, equal_nan=True)


def test_every_rule_is_put_to_the_test():
    with rowprop.watch() as report:
        with rowprop.watch() as direct:
            for name in DIRECT:
                call_direct(name, [1, 4])
        for name in CASES:
            for channels_last in (False, True):
                run(name, lambda losses: rowprop.pick(losses, TWO), channels_last)
    counted = {op: direct.densified[op].count for op in ("addmm", "diag_embed")}
    assert counted == {"addmm": 3, "diag_embed": 1}  # a dense addend thrice, a diagonal through the batch
    assert not direct.densified.keys() & {"diagonal_backward", "_grouped_mm"}
    called = set(report.sliced) | {name.removesuffix("_") for name in report.sliced}  # in place, by the same rule
    untested = {op_name(op) for op in RULES} - called
    if host.waits(TWO):  # a 0-d value that no formula names as zero is not read on a device
        untested.discard("masked_fill.Tensor")
    # The other ops have no kernel for the CPU: test_cuda_rules.py, test_library_functions.py.
    assert untested <= KERNELS.keys() | {"flex_attention_backward"}


@pytest.mark.parametrize("shape", [(N, 3, 5, 5), (N, 3), (N, 3, 4)])
@pytest.mark.parametrize("affine", [True, False])
# Red when: the parameters' gradients take x-hat as centred on the kept rows, or the input's gradient is not rescaled.
def test_batchnorm_projects_over_the_kept_rows(shape: tuple[int, ...], affine: bool):
    x, upstream = randn(*shape) * 2 + 5, randn(*shape)
    rows, dims, eps = torch.tensor([1, 4, 5]), [0, *range(2, len(shape))], 1e-12
    leaf, w, b = x.clone().requires_grad_(), param(3), param(3)
    y = F.batch_norm(leaf, None, None, *((w, b) if affine else (None, None)), training=True, eps=eps)
    rowprop.pick((y * upstream).flatten(1).sum(1), rows, batchnorm="rows").sum().backward()

    def per_channel(v: Tensor) -> Tensor:
        return v.view(1, -1, *[1] * (len(shape) - 2))

    # Subtract the mean over the kept rows, then the component along the centred x-hat.
    invstd = (x.var(dims, correction=0) + eps).rsqrt()
    xhat = ((x - per_channel(x.mean(dims))) * per_channel(invstd))[rows]
    g = upstream[rows]
    centred = xhat - per_channel(xhat.mean(dims))
    projected = g - per_channel(g.mean(dims))
    projected = projected - centred * per_channel((projected * centred).sum(dims) / centred.square().sum(dims))
    expected = torch.zeros_like(x)
    expected[rows] = projected * per_channel(invstd * (w.detach() if affine else 1))
    torch.testing.assert_close(leaf.grad, expected, rtol=1e-8, atol=1e-9)
    if affine:  # these are exact: only kept rows have a gradient to sum
        torch.testing.assert_close(w.grad, (g * xhat).sum(dims))
        torch.testing.assert_close(b.grad, g.sum(dims))


@pytest.mark.parametrize("step", ["sign", "floor"])
def test_the_nan_of_a_row_that_was_not_kept_does_not_come_back_through_a_step(step: str):
    # Red when: the zeros of the step have all rows. Zero times the infinite slope of the root at 0 is NaN.
    x, w = aux(N, 4).double(), param(4, 3)
    x[0] = 0

    def losses(x: Tensor) -> Tensor:
        h = x @ w
        return (h + getattr(h.abs().sqrt(), step)()).sum(1)

    actual = torch.autograd.grad(rowprop.pick(losses(x), TWO).sum(), w)
    torch.testing.assert_close(actual, torch.autograd.grad(losses(x[TWO]).sum(), w))
    assert torch.autograd.grad(losses(x)[TWO].sum(), w)[0].isnan().all()


def test_batchnorm_of_one_outlier_is_finite():
    # Red when: rounding makes the variance of the one kept row negative, and eps does not make up for it.
    random = torch.Generator().manual_seed(0)
    for _ in range(20):
        x, upstream = torch.randn(64, 8, generator=random), torch.randn(64, 8, generator=random)
        x[7] = 1e4 * (1 + torch.rand(8, generator=random))
        leaf, w, b = x.clone().requires_grad_(), nn.Parameter(torch.ones(8)), nn.Parameter(torch.zeros(8))
        y = F.batch_norm(leaf, None, None, w, b, training=True)
        rowprop.pick((y * upstream).sum(1), torch.tensor([7]), batchnorm="rows").sum().backward()
        # The mean over one row is the row, so the input gradient is zero. The parameters' gradients are exact.
        torch.testing.assert_close(leaf.grad, torch.zeros(64, 8))
        invstd = (x.double().var(0, correction=0) + 1e-5).rsqrt()
        xhat = (x[7] - x.double().mean(0)) * invstd
        torch.testing.assert_close(w.grad, (upstream[7] * xhat).float(), rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(b.grad, upstream[7])


def test_the_search_for_nan_leaves_the_rows_sliced():
    # Red without a rule for isnan, and where the NaN of a kept row is not found.
    x, w = aux(N, 4).double(), param(4, 3)
    with rowprop.watch() as report, torch.autograd.set_detect_anomaly(True):
        rowprop.pick((x @ w).exp().sum(1), TWO).sum().backward()
    assert not report.densified and "isnan" in report.sliced
    with pytest.raises(RuntimeError, match="returned nan"), torch.autograd.set_detect_anomaly(True):
        rowprop.pick(((x @ w) * 0).sqrt().sum(1), TWO).sum().backward()


def test_a_custom_function_that_wrote_to_a_view():
    # Autograd calls it from inside its own node for in-place writes to views, and pick() cannot see it there.
    class Triple(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):  # pyright: ignore
            ctx.mark_dirty(x)
            return x.mul_(3)

        @staticmethod
        def backward(ctx, grad):  # pyright: ignore
            seen.append(type(grad * 1))
            return torch.from_numpy(grad.numpy() * 3)

    def step(take: Take) -> tuple[Tensor, ...]:
        base = aux(N, 4).double() * w
        Triple.apply(base[:, 1:])
        return torch.autograd.grad(take(base.square().sum(1), TWO).sum(), w)

    w, seen = param(4), list[type]()
    as_indexed(step)
    assert len(seen) == 2


def summed_gradient(x: Tensor, losses: Callable[[], Tensor]) -> Callable[[Take], tuple[Tensor, ...]]:
    """A step for ``as_indexed``: the gradient of the sum of the losses of two rows."""
    return lambda take: torch.autograd.grad(take(losses(), TWO).sum(), x)


@pytest.mark.parametrize("name", [name for name in CASES if name.endswith("_unused") and "rows" not in name])
def test_an_output_that_is_not_used_is_known_without_a_read(name: str):
    # Red when: the rule reads a tensor to see whether it is zeros; the device meta has nothing to read.
    x = torch.ones(CASES[name].shape, device="meta", requires_grad=True)
    with rowprop.watch() as report:
        rowprop.pick(CASES[name].f(x).reshape(N, -1).sum(1), torch.arange(2, device="meta")).sum().backward()
    assert report.densified == {} and report.sliced.keys() & {"cat", "stack"}


def test_an_index_without_values_is_not_read():
    # Red when: a rule that has to look at an index does so on the device meta, which has nothing to look at.
    x = torch.ones(N, 3, device="meta", requires_grad=True)
    with rowprop.watch() as report:
        losses = (x * 2).index_copy(0, torch.arange(N, device="meta"), x.exp()).sum(1)
        rowprop.pick(losses, torch.arange(2, device="meta")).sum().backward()
    assert any(entry.reason.startswith("only a look at the device") for entry in report.densified.values())


def test_a_full_branch_beside_a_gradient_is_not_read(as_accelerator: None):
    # Red when: a rule looks whether such a tensor is zeros outside of the formula of cumprod, which fills zeros.
    with rowprop.watch() as report, torch._C.DisableTorchFunctionSubclass():
        aten.where(torch.ones(N, 3).bool(), torch.zeros(N, 3), sliced(aux(2, 3), [1, 4]))
    assert not report.waited and report.densified["where.self"].reason == "the other branch may not be zero"


def test_a_value_that_is_not_zero_is_written_to_all_rows(as_host: None):
    # Red when: what is written at an index counts as zeros without a look.
    put, g = (torch.tensor([0, 2]), torch.ones(2)), sliced(aux(2, 3), [1, 4])
    expected = aten.index_put(torch.zeros(N, 3).index_add(0, TWO, aux(2, 3)), [None, put[0]], put[1])
    with torch._C.DisableTorchFunctionSubclass():
        torch.testing.assert_close(aten.index_put(g, [None, put[0]], put[1]), expected)


def of_bags(table: Tensor, mode: str, **options: bool) -> Callable[[Take], tuple[Tensor, ...]]:
    bags = partial(F.embedding_bag, ints(9, 2 * N), table, torch.arange(0, 2 * N, 2), mode=mode, **options)
    return summed_gradient(table, lambda: bags().exp().sum(1))


@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_embedding_bag_keeps_a_sparse_gradient_sparse(mode: str):
    # Red when: the rule answers with the dense gradient of the kept bags.
    step = of_bags(param(9, 4), mode, sparse=True)
    actual, expected = (step(take)[0].coalesce() for take in (rowprop.pick, indexed))
    assert torch.equal(actual.indices(), expected.indices())  # an optimizer may step for each entry that is listed
    torch.testing.assert_close(actual.to_dense(), expected.to_dense())


def test_bags_of_the_largest_entries_read_no_index(as_accelerator: None):
    # Red when: the indices of the kept bags are counted, which waits for the device: the forward noted the entries.
    report = as_indexed(of_bags(param(9, 4), "max"))
    assert not report.densified and not report.waited


@pytest.mark.parametrize("device", [False, True], ids=["host", "device"])
@pytest.mark.parametrize("routing", ROUTINGS)
# Red when: an index of tokens that no kept row is among makes the expert's backward dense; tokens that were routed go
# back to the rows of another dimension; a wait is added, or a rule does not say that it waits.
def test_routed_tokens_keep_their_rows(routing: str, device: bool, monkeypatch: pytest.MonkeyPatch):
    if device:
        monkeypatch.setattr(host, "READ_AT_ONCE", set())
    route, waits = ROUTINGS[routing]
    scale, tokens = param(WIDTH), aux(N, 3, WIDTH).double()

    def step(take: Take) -> tuple[Tensor, ...]:
        x = tokens * scale
        for _ in range(2):
            x = x + route(x.tanh()).view_as(x)
        return torch.autograd.grad(take(x.square().sum((1, 2)), TWO).square().sum(), [scale, *EXPERTS])

    single = routing == "grouped_mm"
    report = as_indexed(step, rtol=1e-4 if single else 1e-9, atol=1e-5 if single else 1e-9)
    if routing not in ("places", "masked"):  # these sum over all tokens, or fill in what one expert holds
        assert not report.densified, str(report)
    assert set(report.waited) <= (waits if host.waits(tokens) else set()), str(report)
    assert not single or report.sliced["_grouped_mm"] == 8


FROM = "rows would have to be taken from a sparse tensor"
ADDED = "a gradient of all rows is added to it: a mean that losses are divided by, or pairs of rows"
ALL_ROWS = f"{ADDED}; detach() a mere scale"
edges = (aux(N, N) > 0.5) * aux(N, N)
jagged = torch.nested.nested_tensor_from_jagged
SPARSE: dict[str, tuple[Callable[[Tensor], Tensor], dict[str, str]]] = {
    "mm": (lambda h: torch.sparse.mm(edges.to_sparse(), h), {"mm": FROM}),
    "mm_csr": (lambda h: edges.to_sparse_csr() @ h, {"mm": FROM}),
    "addmm": (lambda h: torch.sparse.addmm(h, edges.to_sparse(), h), {"mm": FROM}),
    "bmm": (lambda h: torch.bmm(edges.to_sparse()[None], h[None])[0], {"bmm": FROM}),
    "mv": (lambda h: torch.mv(edges.to_sparse(), h.sum(1))[:, None], {"mv": FROM}),
    "weight": (lambda h: h @ aux(4, 4).relu().to_sparse(), {}),
    "gradient": (
        lambda h: F.embedding(torch.tensor([3, 1, 1, 5, 0, 2]), h, sparse=True) + 2 * h,
        {"_sparse_coo_tensor_with_dims_and_tensors": NO_RULE, "add.Tensor": ALL_ROWS},
    ),
    "jagged": (lambda h: jagged(h, torch.tensor([0, 1, 4, N])).sin().values(), {"_nested_view_from_jagged": NO_RULE}),
}


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state")
@pytest.mark.parametrize("name", SPARSE)
# Red when: the gather, or the sum into a tensor, asks a sparse tensor for its memory.
def test_beside_a_sparse_tensor_the_gradient_is_dense_and_equal(name: str):
    f, densified = SPARSE[name]
    x, w = aux(N, 4), nn.Parameter(aux(4, 4))
    step = summed_gradient(w, lambda: f((x @ w).tanh()).square().sum(1))
    report = as_indexed(step, rtol=1.3e-6, atol=1e-5)
    assert {op: entry.reason for op, entry in report.densified.items()} == densified


def test_a_rule_is_handed_no_wrapped_gradient(monkeypatch: pytest.MonkeyPatch):
    # Red where a list beside a gradient is not looked into.
    g, seen = sliced(aux(2, 3), [1, 4]), []
    listed = RowGrad(RowSlice(ints(3, 2), g.sliced.rows, Layout(0, N), (N,)))
    monkeypatch.setattr(RULES[aten.index.Tensor], "run", lambda op, g, indices: seen.extend([g, *indices]) or g)
    with torch._C.DisableTorchFunctionSubclass():
        aten.index.Tensor(g, [listed])
    assert [type(operand) for operand in seen] == [RowSlice, RowSlice]


KEPT = RowSet(TWO, N, unique=True, batchnorm=None)


def square(dim: int) -> RowSlice:
    """A gradient of shape (N, N), with its rows in this dimension."""
    return RowSlice(randn(*(2 if d == dim else N for d in range(2))), KEPT, Layout(dim, N), (N, N))


def plain(*columns: int) -> list[Tensor]:
    return [randn(N, c * N) for c in columns]


SOFTMAX, CELL = aten._softmax_backward_data.default, aten._thnn_fused_lstm_cell_backward_impl.default
LAYER = aten.mkldnn_rnn_layer_backward.default
OF_PACKED = False, 2, N, 1, True, True, False, [2, 1], False
UNLIKE: dict[str, tuple[Any, list[Any], str]] = {
    "another operand": (SOFTMAX, [square(0), square(0), 1, torch.float64], "other than the gradient"),
    "the second gradient": (CELL, [square(0), square(1), *plain(1, 1, 4), True], "not alike"),
    "the first gradient": (CELL, [square(1), square(0), *plain(1, 1, 4), True], "not alike"),
    "one gradient of two": (CELL, [square(0), *plain(1, 1, 1, 4), True], "not alike"),
    "packed": (LAYER, [*plain(*[1] * 10), square(0), None, None, *OF_PACKED, *plain(1)], "packed"),
}


@pytest.mark.parametrize("what", UNLIKE)
# Red when: the rule takes the rows of a sliced operand, as of a plain tensor; only the first gradient is asked where
# its rows lie; the numbers of rows at each step of packed sequences are those of all rows.
def test_operands_that_are_not_sliced_alike_densify(what: str):
    op, args, reason = UNLIKE[what]
    outcome = RULES[op].run(op, *args)
    assert type(outcome) is Densify and reason in outcome.reason


def test_an_undefined_gradient_stays_undefined():
    # Red when: its values are asked for.
    g = square(0)
    values = g.values  # what the kernel's plan is remembered by keeps no gradient alive

    class Kernel:
        """No kernel of the CPU's own."""

        _schema = CELL._schema

        def __call__(self, of_hy: Tensor, of_cy: None, cx: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
            assert of_cy is None and of_hy is values and len(cx) == 2
            return of_hy, cx, of_hy.sum(0)

    gates, cells, bias = RULES[CELL].run(Kernel(), g, None, *plain(1, 1, 1), True)
    assert type(gates) is type(cells) is RowSlice and type(bias) is Tensor


MALFORMED = ["mm.", "no such", "mm.a.b", "", 3, "aten.mm.default", "a-b"]
REFUSED_KEYS = {"no_such_op": "'no_such_op' is no aten op", "mm": "'mm' has a rule already, in matmul"}


@pytest.mark.parametrize("key", [*MALFORMED, *REFUSED_KEYS])
def test_a_rule_for_a_bad_key_is_refused_and_changes_nothing(key: object):
    before = {**RULES}
    with pytest.raises(ValueError, match=REFUSED_KEYS.get(key, r"a key is like 'mm' or 'sum\.dim_IntList'")):
        rule(key)(lambda op, g: g)  # pyright: ignore[reportArgumentType]
    assert before == RULES
