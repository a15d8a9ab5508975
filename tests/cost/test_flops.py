"""The counter against closed formulas. 1 multiply-add = 2 FLOPs."""

from __future__ import annotations

import gc
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import Function
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode, flop_registry

import rowprop
from closed_forms import closed_form, linear
from elementwise import Elementwise
from flop_networks import NETWORKS, batch, losses
from rowprop.cost.count import UPDATE_FLOPS, count_step
from rowprop.cost.flops import FORMULAS, count_flops
from rowprop.errors import InvalidInput
from untouched import untouched
from zoo import ENTRIES, Entry
from zoo import N as ZOO_ROWS

N = 6


def forward_and_backward(make, *leaves: torch.Tensor) -> tuple[int, int]:
    """FLOPs of the forward that ``make`` runs, and of the backward of the result's sum; no op is uncounted."""
    for leaf in leaves:
        leaf.requires_grad_()
    with count_flops() as forward:
        out = make()
    with count_flops() as backward:
        out.sum().backward()
    assert forward.uncounted == backward.uncounted == {}
    return forward.total_flops, backward.total_flops


def test_linear():
    # The forward runs N*in*out multiply-adds, the weight gradient as many, and the input gradient too if it is wanted.
    layer, x = nn.Linear(5, 7), torch.randn(N, 5)
    once = 2 * N * 5 * 7
    assert forward_and_backward(lambda: layer(x)) == (once, once)
    assert forward_and_backward(lambda: layer(x), x) == (once, 2 * once)
    ragged = torch.nested.nested_tensor([x[:4], x[4:]], layout=torch.jagged)
    assert forward_and_backward(lambda: layer(ragged).values()) == (once, once)  # red when: the counter takes it apart


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("transposed", [False, True])
def test_convolution(dims: int, groups: int, transposed: bool):
    # Each weight meets each place of the output, or of a transposed convolution's input. For the weight gradient torch
    # counts `groups` times too many FLOPs.
    kind = getattr(nn, f"Conv{'Transpose' if transposed else ''}{dims}d")
    layer, x = kind(4, 8, 3, stride=2, padding=1, groups=groups), torch.randn(N, 4, *[9] * dims)
    places = (9 if transposed else 5) ** dims
    once = 2 * N * places * (8 * 4 // groups) * 3**dims
    assert forward_and_backward(lambda: layer(x)) == (once, once)
    assert forward_and_backward(lambda: layer(x), x) == (once, 2 * once)
    counted = count_step(layer, x, squares)  # x is a leaf that requires a gradient now
    assert (counted.backward_input_flops, counted.backward_weight_flops, counted.ratio) == (once, once, 2.0)


@pytest.mark.parametrize("backend", ["FLASH_ATTENTION", "MATH"])
@pytest.mark.parametrize("causal", [False, True])
def test_attention(backend: str, causal: bool):
    # The forward runs two products of T*S*D multiply-adds per head. The backward runs four, and flash attention also
    # computes the scores again. A causal kernel computes the 1 + 2 + ... + T pairs that meet; the math backend computes
    # all pairs and masks them.
    heads, t, d = 3, 5, 4
    q, k, v = (torch.randn(N, heads, t, d) for _ in range(3))
    product = 2 * N * heads * d * (15 if causal and backend == "FLASH_ATTENTION" else t * t)
    with nn.attention.sdpa_kernel(getattr(nn.attention.SDPBackend, backend)):
        counted = forward_and_backward(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=causal), q, k, v)
    assert counted == (2 * product, (5 if backend == "FLASH_ATTENTION" else 4) * product)


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("layers", [1, 2])
def test_lstm(layers: int, bidirectional: bool):
    steps, inputs, hidden, directions = 5, 3, 4, 1 + bidirectional
    lstm = nn.LSTM(inputs, hidden, num_layers=layers, bidirectional=bidirectional, batch_first=True)
    x = torch.randn(N, steps, inputs)
    reads = [inputs, *[directions * hidden] * (layers - 1)]
    once = 2 * N * steps * sum(4 * hidden * (read + hidden) * directions for read in reads)
    assert parts(lstm, x, lambda model, x: model(x)[0]) == (once, once, once)
    assert forward_and_backward(lambda: lstm(x)[0], x) == (once, 2 * once)


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("kind", ["GRU", "RNN"])
def test_other_recurrent_layers(kind: str, batch_first: bool):
    # On the CPU these layers run ordinary products. The first state is zero and no leaf, so it needs no gradient.
    # Red when views in place do not count as views: with the batch first, transpose_ is listed as uncounted.
    steps, inputs, hidden = 5, 3, 4
    layer = getattr(nn, kind)(inputs, hidden, batch_first=batch_first)
    x = torch.randn(N, steps, inputs) if batch_first else torch.randn(steps, N, inputs)
    along_input, along_state = (2 * N * steps * {"GRU": 3, "RNN": 1}[kind] * hidden * size for size in (inputs, hidden))
    expected_backward = 2 * along_input + 2 * along_state - along_state // steps
    assert forward_and_backward(lambda: layer(x)[0], x) == (along_input + along_state, expected_backward)


def products():
    """By op: how it runs, and its FLOPs. Torch has no formula of its own for those that add in place."""
    m, v, w, b = torch.randn(5, 7), torch.randn(7), torch.randn(5), torch.randn(3, 5, 7)
    square, squares = torch.zeros(5, 5), torch.zeros(3, 5, 5)
    left, right = torch.randn(6, 4, requires_grad=True), torch.randn(3, 4, 8, requires_grad=True)
    ends, grouped = torch.tensor([1, 4, 6], dtype=torch.int32), torch.ops.aten._grouped_mm
    return {
        "mv": (lambda: torch.mv(m, v), 2 * 5 * 7),
        "addmv": (lambda: torch.addmv(w, m, v), 2 * 5 * 7),
        "dot": (lambda: torch.dot(v, v), 2 * 7),
        "outer": (lambda: torch.outer(w, v), 0),  # an elementwise product
        "addr": (lambda: torch.addr(m, w, v), 2 * 5 * 7),
        "baddbmm": (lambda: torch.baddbmm(squares, b, b.mT), 2 * 3 * 5 * 5 * 7),
        "addbmm": (lambda: torch.addbmm(square, b, b.mT), 2 * 3 * 5 * 5 * 7),
        "addmm_": (lambda: square.addmm_(m, m.T), 2 * 5 * 5 * 7),
        "baddbmm_": (lambda: squares.baddbmm_(b, b.mT), 2 * 3 * 5 * 5 * 7),
        # out[n, o] = sum over i, j of a[n, i] w[o, i, j] b[n, j]: one product and one multiply-add per term
        "_trilinear": (lambda: nn.Bilinear(2, 3, 5)(torch.ones(N, 2), torch.ones(N, 3)), 3 * N * 2 * 3 * 5),
        # rows in groups, with a matrix each: forward, and both gradients
        "_grouped_mm": (lambda: grouped(left, right, ends).square().sum().backward(), 3 * 2 * 6 * 4 * 8),
        "addmm": (torch.inference_mode()(lambda: nn.Linear(5, 7)(torch.ones(N, 5))), 2 * N * 5 * 7),
    }


@pytest.mark.parametrize("op", products())
def test_products(op: str):
    run, expected = products()[op]
    with count_flops() as flops:
        run()
    assert (flops.by_op, flops.uncounted) == ({op: expected} if expected else {}, {})


def test_a_sliced_backward_counts_kept_rows():
    # Red when the counter counts the sliced gradient's op itself, at N rows, instead of its rule's ops.
    first, second, x = nn.Linear(5, 7), nn.Linear(7, 3), torch.randn(N, 5)
    values = second(first(x).tanh()).square().sum(1)
    with count_flops() as flops:
        rowprop.pick(values, torch.tensor([1, 4])).sum().backward()
    assert (flops.by_op, flops.uncounted) == ({"mm": 2 * 2 * (5 * 7 + 2 * 7 * 3)}, {})


@pytest.mark.skipif(not hasattr(F, "linear_cross_entropy"), reason="torch 2.12 and older have no such function")
def test_torchs_fused_head():
    # A product makes the logits, one the gradient of each of two leaves. Without a reduction the backward makes the
    # logits again. Red when: the gradients in the reduced loss's forward are left out, or counted where nobody asks.
    x, head, target = torch.randn(N, 4), torch.randn(9, 4), torch.arange(N)
    once, options = 2 * N * 4 * 9, nn.LinearCrossEntropyOptions()

    def counted(reduction: str, *leaves: torch.Tensor) -> tuple[int, int]:
        loss = partial(F.linear_cross_entropy, x, head, target, reduction=reduction, options=options)
        return forward_and_backward(loss, *leaves)

    assert counted("mean", x.requires_grad_()) == (2 * once, 0)
    assert counted("mean", x, head.requires_grad_()) == (3 * once, 0)
    forward, backward = counted("none", x, head)
    assert forward == once and 3 * once <= backward <= 1.02 * 3 * once  # with a small product of the losses' gradient


@pytest.mark.parametrize("name", NETWORKS)
def test_torchs_own_counter_sees_the_kept_rows(name: str):
    # Red when: the counter sees a sliced gradient before its rule runs, at the full shape that the gradient claims.
    make, shape, layers = NETWORKS[name]
    with torch.device("meta"):
        model, rows = make(), torch.arange(0, 64, 4)
    with FlopCounterMode(display=False) as counter:
        rowprop.pick(losses(model, batch(64, shape)), rows).mean().backward()
    forward, back = closed_form(layers, 64), closed_form(layers, 16)
    assert counter.get_total_flops() == forward.forward_flops + back.backward_input_flops + back.backward_weight_flops


def test_torchs_own_counter_sees_all_rows_where_a_gradient_densifies():
    # The losses come from the second layer, so its two gradients run at 2 rows. The softmax mixes rows, so the first
    # layer's gradient runs at 6.
    first, second, x = nn.Linear(5, 7), nn.Linear(7, 3), torch.randn(N, 5)
    values = second(first(x).softmax(0)).square().sum(1)
    with FlopCounterMode(display=False) as counter:
        rowprop.pick(values, torch.tensor([1, 4])).sum().backward()
    assert dict(counter.get_flop_counts()["Global"]) == {torch.ops.aten.mm: 2 * (2 * 2 * 7 * 3 + N * 5 * 7)}


@pytest.mark.parametrize("reentrant", [True, False])
def test_torchs_own_counter_sees_a_checkpoint_and_a_union_of_picks(reentrant: bool):
    # Two picks of 2 rows share one row: 3 rows. The checkpoint's forward runs again on all rows.
    first, second, x = nn.Linear(5, 7), nn.Linear(7, 3), torch.randn(N, 5, requires_grad=True)
    values = second(checkpoint(lambda x: first(x).tanh(), x, use_reentrant=reentrant)).square().sum(1)
    loss = rowprop.pick(values, torch.tensor([1, 4])).sum() + rowprop.pick(values, torch.tensor([4, 5])).sum()
    with FlopCounterMode(display=False) as counter:
        loss.backward()
    once = 2 * 5 * 7
    assert counter.get_total_flops() == N * once + 3 * (2 * once + 2 * 2 * 7 * 3)


@pytest.mark.parametrize("fails", [False, True])
def test_torchs_own_counter_is_itself_again_when_the_backward_is_over(fails: bool):
    layer, x = nn.Linear(5, 7), torch.randn(N, 5)

    def stop(grad: torch.Tensor) -> None:
        raise KeyError

    with FlopCounterMode(display=False) as counter:
        out = layer(x)
        if fails:
            out.register_hook(stop)
        with pytest.raises(KeyError) if fails else nullcontext():
            rowprop.pick(out.square().sum(1), torch.tensor([1, 4])).sum().backward()
        gc.collect()
        assert counter.mode is not None and "__torch_dispatch__" not in vars(counter.mode)
        layer(x).sum().backward()
    once = 2 * 5 * 7
    assert counter.get_total_flops() == once * (N if fails else N + 2) + once * 2 * N


@torch.library.custom_op("rowprop_test::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


def test_ops_without_a_formula_are_listed_until_torch_learns_one(monkeypatch):
    # Red when: torch's formulas are copied at import; the module of varlen_attn adds its own when it is imported.
    with count_flops() as flops:
        torch.fft.rfft(torch.randn(8))
        torch.linalg.inv(torch.eye(3))
        twice(torch.ones(2))
        _ = torch.eye(3).to_sparse() @ torch.ones(3, 2)  # red when: it counts as a dense matrix, with its zeros
    assert set(flops.uncounted) >= {"_fft_r2c", "linalg_inv_ex", "rowprop_test.twice", "mm"}
    monkeypatch.setitem(flop_registry, torch.ops.rowprop_test.twice, lambda x, out_val: 7 * x.numel())
    with count_flops() as flops:
        twice(torch.ones(2))
    assert (flops.by_op, flops.uncounted) == ({"rowprop_test.twice": 14}, {})


def test_a_question_to_a_subclass_is_no_op():
    # Red when: the counter asks for the parts of prim.device, which no kernel has; within flex_attention that ended
    # the process.
    with FakeTensorMode():
        x = torch.ones(2, 3)
        with count_flops() as flops:
            assert x.device.type == "cpu"
            _ = x @ x.mT
    assert (flops.by_op, flops.uncounted) == ({"mm": 2 * 2 * 3 * 2}, {})


def test_the_few_flops_per_element_are_left_out():
    x = torch.randn(N, 4, 8, 8, requires_grad=True)
    layers = [nn.BatchNorm2d(4), nn.GELU(), nn.MaxPool2d(2), nn.GroupNorm(2, 4), nn.Flatten(), nn.LayerNorm(64)]
    net = nn.Sequential(*layers)
    with count_flops() as flops:
        out = net(x).softmax(1).cumsum(1).topk(3).values
        F.cross_entropy(out, torch.zeros(N, dtype=torch.long)).backward()
        torch.optim.AdamW(net.parameters()).step()
    assert (flops.by_op, flops.uncounted) == ({}, {})


def count_by_schema(name: str, **known: object) -> int | tuple[int, ...]:
    """The FLOPs of an op by its formula; ``known`` holds the arguments that the formula may read."""
    op = getattr(torch.ops.aten, name)
    names = [argument.name for argument in op.default._schema.arguments if not argument.kwarg_only]
    assert known.keys() <= set(names)
    return FORMULAS[op](*[known.get(argument) for argument in names])


def backward_by_schema(name: str, grad: torch.Tensor, **known: object) -> int | tuple[int, ...]:
    """The same of the kernel's backward."""
    of = "grad_out_" if "efficient" in name else "grad_out"
    return count_by_schema(name.replace("_forward", "") + "_backward", **known, **{of: grad})


def empty(name: str, heads: int, time: int, width: int) -> torch.Tensor:
    """In the order of dimensions of this kernel."""
    return torch.empty(N, heads, time, width) if "dot_product" in name else torch.empty(N, time, heads, width)


ATTENTION = [
    *[f"_scaled_dot_product_{kind}_attention" for kind in ("flash", "efficient", "cudnn")],
    *["_flash_attention_forward", "_efficient_attention_forward"],
]


@pytest.mark.parametrize(("t", "s"), [(3, 5), (5, 3), (4, 4)])
@pytest.mark.parametrize("name", ATTENTION)
def test_attention_kernels_count_the_pairs_that_meet(name: str, t: int, s: int):
    # Red when: the mask that begins at the last query and key counts as the one that begins at the first; a kernel's
    # mask is read from the wrong place; heads and time change places.
    heads, width = 2, 4
    mask, kinds = ("custom_mask_type", (0, 1, 2)) if name.startswith("_efficient") else ("is_causal", (False, True))
    q, k = (empty(name, heads, time, width) for time in (t, s))
    for kind in kinds:
        ahead = s - t if kind is not True and kind == 2 else 0
        pairs = sum(not kind or key <= query + ahead for query in range(t) for key in range(s))
        product, given = 2 * N * heads * width * pairs, {"query": q, "key": k, "value": k, mask: kind}
        assert count_by_schema(name, **given) == 2 * product
        assert backward_by_schema(name, q, **given) == 5 * product


@pytest.mark.parametrize("name", ATTENTION)
def test_attention_kernels_count_every_query_head_and_the_width_of_the_values(name: str):
    # Red when: query heads that share a key's head count once (torch's own formula refuses them before 2.12); the width
    # of the keys stands for that of the values.
    heads, t, s, width, wide = 6, 3, 5, 4, 7
    given = {"query": empty(name, heads, t, width), "key": empty(name, 2, s, width), "value": empty(name, 2, s, wide)}
    pairs = 2 * N * heads * t * s
    assert count_by_schema(name, **given) == pairs * (width + wide)
    assert backward_by_schema(name, empty(name, heads, t, wide), **given) == pairs * (3 * width + 2 * wide)


@pytest.mark.parametrize("kind", ["flash", "efficient"])
def test_packed_attention_counts_the_pairs_of_each_sequence(kind: str):
    # Red when: the lengths of the keys are read where those of the queries stand; the product of the sums is counted.
    lengths, of_keys, heads, width = (1, 3, 2), (4, 1, 2), 3, 4
    pairs = 2 * heads * width * sum(t * s for t, s in zip(lengths, of_keys, strict=True))
    stack = (1,) if kind == "efficient" else ()
    q, k = (torch.empty(*stack, sum(n), heads, width) for n in (lengths, of_keys))
    ends = [torch.tensor([0, *n]).cumsum(0) for n in (lengths, of_keys)]
    end, most = ("cum_seq_", "max_") if kind == "flash" else ("cu_seqlens_", "max_seqlen_")
    given = {end + "q": ends[0], end + "k": ends[1], most + "q": 3, most + "k": 4, "query": q, "key": k, "value": k}
    assert count_by_schema(f"_{kind}_attention_forward", **given) == 2 * pairs
    assert backward_by_schema(f"_{kind}_attention_forward", q, **given) == 5 * pairs


def test_cudnn_recurrent_kernels_count_every_matrix_at_every_step():
    # Red when: the gradient of the inputs and states, or that of the weights, is counted twice.
    steps, inputs, hidden = 5, 3, 4
    weights = [torch.empty(4 * hidden, inputs), torch.empty(4 * hidden, hidden), *[torch.empty(4 * hidden)] * 2]
    given = {"input": torch.empty(steps, N, inputs), "weight": weights}
    once = 2 * steps * N * 4 * hidden * (inputs + hidden)
    assert count_by_schema("_cudnn_rnn", **given) == once
    assert count_by_schema("_cudnn_rnn_backward", **given) == (once, 0, 0, once)


def per_row(losses: torch.Tensor) -> torch.Tensor:
    return losses.flatten(1).mean(1)


def squares(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return per_row(model(x).square())


def parts(model: nn.Module, x: object, losses_fn=lambda model, x: model(x).square(), **options) -> tuple[int, int, int]:
    """FLOPs of the forward, of the backward to the inputs, of that to the weights."""
    counted = count_step(model, x, lambda model, x: per_row(losses_fn(model, x)), **options)
    assert counted.uncounted == {}
    assert counted.backward_recomputed_flops == 0
    return counted.forward_flops, counted.backward_input_flops, counted.backward_weight_flops


def holding(**shapes: tuple[int, ...]) -> nn.Module:
    """A module with parameters of these shapes."""
    model = nn.Module()
    for name, shape in shapes.items():
        model.register_parameter(name, nn.Parameter(torch.randn(shape)))
    return model


@pytest.mark.parametrize("rows", [1, 64])
@pytest.mark.parametrize("name", NETWORKS)
def test_counts_equal_the_closed_form(name: str, rows: int):
    # Red when: an op's result counts for the wrong side; a use of shared weights is missed.
    make, shape, layers = NETWORKS[name]
    with torch.device("meta"):
        model = make()
    for optimizer in UPDATE_FLOPS:
        expected = closed_form(layers, rows, optimizer=optimizer)
        counted = count_step(model, batch(rows, shape), losses, optimizer=optimizer)
        for figure in "forward_flops backward_input_flops backward_weight_flops update_flops".split():
            assert getattr(counted, figure) == getattr(expected, figure), figure
        assert (counted.ratio, counted.ratio_with_update) == (expected.ratio, expected.ratio_with_update)
        assert counted.uncounted == {}


def test_the_closed_form_by_hand():
    # 6 rows through 4 -> 8 -> 1: 2 * 6 * (32 + 8) FLOPs forward. The first layer's input has no gradient.
    step = closed_form([linear(4, 8), linear(8, 1, bias=False)], 6, optimizer="momentum")
    assert (step.forward_flops, step.backward_input_flops, step.backward_weight_flops) == (480, 96, 480)
    assert step.update_flops == 4 * (32 + 8 + 8)
    assert (step.ratio, step.ratio_with_update) == (576 / 480, (576 + 192) / 480)


def test_modules_and_ops_add_up_to_the_step():
    model = nn.Sequential(nn.Linear(4, 8), nn.Sequential(nn.ReLU(), nn.Linear(8, 3)))
    counted = count_step(model, torch.randn(N, 4), lambda model, x: per_row((model(x) @ torch.ones(3, 2)).square()))
    once, twice, outside = 2 * N * 32, 2 * N * 24, 2 * N * 6
    found = [
        (m.module, m.kind, m.forward_flops, m.backward_input_flops, m.backward_weight_flops) for m in counted.modules
    ]
    layers = [("0", "Linear", once, 0, once), ("1.1", "Linear", twice, twice, twice)]
    assert sorted(found) == [*layers, ("losses_fn", "", outside, outside, 0)]
    backward = {"backward_input": {"mm": twice + outside}, "backward_weight": {"mm": once + twice}}
    assert counted.by_op == {"forward": {"addmm": once + twice, "mm": outside}, **backward}


@pytest.mark.parametrize("keep", [None, 0.5])
def test_attention_is_between_activations(keep: float | None):
    # One product makes queries, keys and values, two run in the attention, one at the end.
    def attention(model, x):
        q, k, v = model[0](x).chunk(3, -1)
        return model[1]((q @ k.mT).softmax(-1) @ v).square()

    rows = N if keep is None else N // 2
    projections, products = 2 * 5 * (4 * 12 + 4 * 4), 2 * 2 * 5 * 5 * 4
    model = nn.Sequential(nn.Linear(4, 12), nn.Linear(4, 4))
    backward = rows * (2 * 5 * 4 * 4 + 2 * products), rows * projections
    assert parts(model, torch.randn(N, 5, 4), attention, keep=keep) == (N * (projections + products), *backward)


def test_a_tensor_computed_from_parameters_is_a_weight():
    # Red when: only a gradient that flows into a parameter itself counts as a weight's gradient; any op after a product
    # in a backward node takes the product away from the weights.
    low_rank, product, merge = holding(a=(8, 2), b=(2, 4)), 2 * N * 8 * 4, 2 * 8 * 2 * 4
    low_rank.register_buffer("mask", torch.ones(8, 4))
    merged = lambda m, x: F.linear(x, torch.ones(8, 4) * m.mask * (m.a @ m.b))  # noqa: E731
    x = torch.randn(N, 4, requires_grad=True)
    assert parts(low_rank, x, merged) == (product + merge, product, product + 2 * merge)
    # A tensor computed from the batch is no weight, although it stands in a weight's place.
    counted = parts(nn.Linear(4, 5 * 4), torch.randn(1, 4), lambda model, x: F.linear(x, model(x).view(5, 4)))
    assert counted == (2 * 80 + 2 * 20, 2 * 20, 2 * 80)
    counted = parts(nn.Linear(4, 2), torch.randn(N, 4), lambda m, x: F.linear(x, m.weight * 3, m.bias))
    assert counted == (2 * N * 8, 0, 2 * N * 8)


def test_random_numbers_are_data_and_made_up_constants_are_not():
    # Red when a constant that the batch is written over stays one.
    layer, once = nn.Linear(4, 4), 2 * N * 16
    from_noise = parts(layer, None, lambda model, _: model(model(torch.randn(N, 4))))
    from_ones = parts(layer, None, lambda model, _: model(model(torch.ones(N, 4))))
    written = parts(layer, torch.randn(N, 4), lambda model, x: model(model(torch.ones(N, 4).copy_(x))))
    assert from_noise == written == (2 * once, once, 2 * once)
    assert from_ones == (2 * once, 0, 3 * once)  # no tensor is a function of the batch


def test_a_custom_function():
    class Product(Function):
        @staticmethod
        def forward(ctx, x, w):
            ctx.save_for_backward(x, w)
            return w.t().t().new_zeros(x.shape[0], w.shape[1]) + x @ w

        @staticmethod
        def backward(ctx, g):
            x, w = ctx.saved_tensors
            return g @ w.T, x.T @ g

    once = 2 * N * 16
    counted = parts(holding(w=(4, 4)), torch.randn(N, 4), lambda m, x: Product.apply(Product.apply(x, m.w), m.w))
    assert counted == (2 * once, 2 * once, 2 * once)  # its first input gradient goes nowhere


def test_several_products_in_one_backward_node():
    class Layers(Function):
        """Adds a weight to the input, so that one product is the gradient of both; then multiplies twice by another."""

        @staticmethod
        def forward(ctx, x, v, w):
            ctx.save_for_backward(x, v, w)
            return (x + v) @ w @ w

        @staticmethod
        def backward(ctx, g):
            x, v, w = ctx.saved_tensors
            inner = g @ w.T
            shared = inner @ w.T
            return shared, shared, (x + v).T @ inner

    model = holding(u=(4, N), v=(N, N), w=(N, N))
    counted = parts(model, torch.randn(N, 4), lambda m, x: Layers.apply(x @ m.u, m.v, m.w))
    first, layer = 2 * N * 4 * N, 2 * N**3
    assert counted == (first + 2 * layer, 2 * layer, first + layer)


def test_a_gradient_between_two_layers_in_one_backward_node_is_no_weight():
    # As in a compiled region: the inner gradient goes into the first weight's gradient, and nowhere else.
    class Layers(Function):
        @staticmethod
        def forward(ctx, x, v, w):
            hidden = x @ v
            ctx.save_for_backward(x, hidden, w)
            return hidden @ w

        @staticmethod
        def backward(ctx, g):
            x, hidden, w = ctx.saved_tensors
            return None, x.T @ (g @ w.T), hidden.T @ g

    counted = parts(holding(v=(4, 8), w=(8, 3)), torch.randn(N, 4), lambda m, x: Layers.apply(x, m.v, m.w))
    first, second = 2 * N * 4 * 8, 2 * N * 8 * 3
    assert counted == (first + second, second, first + second)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_runs_its_forward_again(reentrant: bool):
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh())
    checkpointed = lambda model, x: per_row(checkpoint(model, x, use_reentrant=reentrant))  # noqa: E731
    once = 2 * N * 16
    counted = count_step(model, torch.randn(N, 4, requires_grad=True), checkpointed)
    assert counted.by_op["forward"] == {"addmm": 2 * once}
    assert counted.backward_input_flops == counted.backward_weight_flops == 2 * once
    assert counted.backward_recomputed_flops == 2 * once
    assert counted.ratio == 3.0
    assert [m.backward_recomputed_flops for m in counted.modules] == [once, once]


def test_counting_leaves_the_model_as_it_was():
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.Dropout(), nn.Flatten(), nn.Linear(16, 3))
    model[0].weight.grad, x = torch.ones(4, 2, 3, 3), torch.randn(N, 2, 4, 4)
    with untouched(model):
        with pytest.raises(ZeroDivisionError):
            count_step(model, x, lambda model, x: model(x) / (1 // 0))
        count_step(model, x, squares, keep=0.5)


def test_parameters_without_a_gradient_are_not_updated():
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3)).requires_grad_(False)
    model[1].requires_grad_()
    counted = count_step(model, torch.randn(N, 4), squares, optimizer="adam")
    assert (counted.num_parameters, counted.update_flops) == (27, 14 * 27)
    assert (counted.backward_input_flops, counted.backward_weight_flops) == (0, 2 * N * 24)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"keep": 0}, "count_step got keep=0 but a fraction in"),
        ({"losses_fn": lambda model, x: squares(model, x).detach()}, "The losses have no graph"),
        ({"model": len}, "a builtin_function_or_method,"),
    ],
)
def test_bad_input_is_refused_in_one_sentence(options: dict, sentence: str):
    arguments = {"model": nn.Linear(4, 2), "batch": torch.randn(N, 4), "losses_fn": squares} | options
    with pytest.raises(InvalidInput, match=sentence):
        count_step(**arguments)


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_the_parts_add_up_to_all_ops_that_run(entry: Entry):
    # Red when: an op between a backward node's start and end is lost or noted twice, or the counter densifies.
    for rows, keep in ((range(0, ZOO_ROWS, 2), 0.5), (range(ZOO_ROWS), None)):
        model, given = entry.make(torch.float32)
        torch.manual_seed(1)
        counted = count_step(model, given, entry.losses, keep=keep)
        with count_flops() as flops:
            chosen = entry.losses(model, given)
            (chosen.mean() if keep is None else rowprop.pick(chosen, torch.tensor(rows)).mean()).backward()
        by_op: dict[str, int] = {}
        for op, number in (item for ops in counted.by_op.values() for item in ops.items()):
            by_op[op] = by_op.get(op, 0) + number
        assert (by_op, counted.uncounted) == (flops.by_op, flops.uncounted)
        assert sum(m.forward_flops for m in counted.modules) == counted.forward_flops
        assert sum(m.backward_weight_flops for m in counted.modules) == counted.backward_weight_flops
        assert (counted.backward_weight_flops > 0) == (counted.forward_flops > 0)


@pytest.mark.parametrize(
    ("name", "make", "expected"),
    [
        ("sgd", lambda p: torch.optim.SGD(p, lr=0.1), 2),
        ("momentum", lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), 4),
        # torch divides the step size by 1 - beta1^t once for all parameters; the formula divides every m
        ("adam", lambda p: torch.optim.Adam(p, lr=0.1), 14 - 1),
        ("adamw", lambda p: torch.optim.AdamW(p, lr=0.1), 15 - 1),
    ],
)
@pytest.mark.parametrize("foreach", [False, True])
def test_updates_are_what_torch_runs(name: str, make, expected: int, foreach: bool):
    w, b = torch.ones(3, 4, requires_grad=True), torch.ones(5, requires_grad=True)
    optimizer = make([w, b])
    optimizer.param_groups[0]["foreach"] = foreach
    for _ in range(2):  # the first step of momentum only copies the gradient
        w.grad, b.grad = torch.ones(3, 4), torch.ones(5)
        with Elementwise() as flops:
            optimizer.step()
    assert not flops.uncounted
    scalars = flops.total_flops() - expected * 17
    assert 0 <= scalars <= 4  # the optimizer's step counters, a number or two per tensor
    assert UPDATE_FLOPS[name] == expected + name.startswith("adam")


def test_the_benchmark_counts_elementwise_work():
    x = torch.randn(N, 4, 6, 6)
    by_cost = {
        0: [lambda: x > 0, x.clone, lambda: x.transpose(0, 1).contiguous(), x.sort, lambda: torch.randn(3), x.double],
        1: [x.relu, lambda: x + x, x.sum, x.mean, lambda: F.max_pool2d(x, 2), lambda: F.max_pool2d(x, (3, 3), 3)],
        2: [lambda: torch.add(x, x, alpha=2), lambda: torch.addcmul(x, x, x), lambda: F.silu(x)],
        3: [lambda: F.mse_loss(x, x)],
        4: [lambda: F.batch_norm(x, torch.zeros(4), torch.ones(4))],
        5: [lambda: x.softmax(1)],
        8: [lambda: F.layer_norm(x, (6, 6)), lambda: F.group_norm(x, 2), lambda: F.batch_norm(x, *[None] * 4, True)],
    }
    for cost, run in ((cost, run) for cost, runs in by_cost.items() for run in runs):
        with Elementwise() as flops:
            run()
        assert (flops.total_flops(), flops.uncounted) == (cost * x.numel(), {})
    table = torch.ones(2, 4, requires_grad=True)
    with Elementwise() as flops:
        torch.outer(torch.ones(3), torch.ones(5))
        F.embedding(torch.tensor([0, 1, 1]), table).sum().backward()
        x.kthvalue(2)
    assert flops.by_op == {"forward": {"mul": 15, "sum": 12}, "backward": {"embedding_dense_backward": 12}}
    assert flops.uncounted == {"kthvalue": 1}  # a light op without a formula
