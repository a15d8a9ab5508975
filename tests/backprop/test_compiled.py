"""``torch.compile(model, backend="rowprop")`` beside plain indexing through the same compiled model."""

import copy
import os
import warnings
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import rowprop
import zoo
from picks import indexed
from rowprop.backprop.compiled import lowering
from rowprop.backprop.rows.refusals import NO_RULE
from rowprop.backprop.rules.registry import RULES
from rowprop.cost.flops import count_flops

N = 12
ROWS = [0, 4, 5]
THOROUGH = "ROWPROP_THOROUGH" in os.environ


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch.manual_seed(0)
    with warnings.catch_warnings():
        # torch's own while it compiles; a region that cannot be traced on kept rows still fails the test
        warnings.simplefilter("ignore")
        warnings.filterwarnings("error", message="the backward of a compiled region")
        yield
    torch._dynamo.reset()


def compile_model(model, kernels="eager", **kwargs):
    return torch.compile(model, backend="rowprop", options={"kernels": kernels}, **kwargs)


def images(n):
    return torch.randn(n, 3, 8, 8)


def vectors(n):
    return torch.randn(n, 16)


def sequences(n, length=5):
    return torch.randn(n, length, 16)


def tokens(n, length=5):
    return torch.randint(zoo.V, (n, length))


def time_first():
    """Attention merges the batch behind time, as nn.MultiheadAttention does."""

    def forward(net, x):
        x = x.transpose(0, 1)
        out, _ = net.attention(x, x, x, need_weights=False)
        return net.head(net.norm(x + out).relu().mean(0))

    attention = nn.MultiheadAttention(16, 4, dropout=0.1)
    return zoo.Net(forward, attention=attention, norm=nn.LayerNorm(16), head=nn.Linear(16, 4))


def minor():
    """The rows lie in the last dimension, and inside a norm they are merged with another dimension."""

    def forward(net, x):
        y = net.norm(net.a(x).T.tanh().T.reshape(-1, 6)).reshape(-1, 12)
        return net.b(F.dropout(y, 0.2) * y.sigmoid())

    return zoo.Net(forward, a=nn.Linear(16, 12), b=nn.Linear(12, 4), norm=nn.LayerNorm(6))


def broken():
    """Two regions: the graph breaks between them, in a layout of its own."""

    def forward(net, x):
        y = net.a(x).relu().reshape(-1, 8)
        torch._dynamo.graph_break()
        return net.b(y.sin().reshape(-1, 32))

    return zoo.Net(forward, a=nn.Linear(16, 32), b=nn.Linear(32, 4))


def heads():
    """Three results, one of them used."""

    def forward(net, x):
        y = net.a(x).relu()
        return net.b(y), net.c(y), y

    return zoo.Net(forward, a=nn.Linear(16, 16), b=nn.Linear(16, 4), c=nn.Linear(16, 2))


def class_token():
    """A token of its own in front, which goes on alone, and a number that is made of the batch's size."""

    def forward(net, x):
        y = torch.cat([net.token.expand(len(x), 1, 16), x[:, 1:]], 1)
        y = net.a(y).relu().cumsum(1) * torch.full((len(x), 1, 1), 1 / len(x))
        return net.b(F.normalize(y, dim=-1).clamp(min=-0.1))[:, -1]

    return zoo.Net(forward, token=nn.Parameter(torch.randn(1, 1, 16)), a=nn.Linear(16, 16), b=nn.Linear(16, 4))


CONV = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.SiLU(), nn.MaxPool2d(2), nn.Conv2d(8, 8, 3, groups=2)
FROZEN = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 4)
MODELS = {
    "mlp": (lambda: nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 4)), vectors),
    "dropout": (lambda: nn.Sequential(nn.Linear(16, 32), nn.Dropout(0.3), nn.ReLU(), nn.Linear(32, 4)), vectors),
    "convolutions": (lambda: nn.Sequential(*CONV, nn.GroupNorm(2, 8), nn.Flatten(), nn.Linear(32, 4)), images),
    "frozen norm": (lambda: nn.Sequential(*FROZEN).eval(), images),
    "time first": (time_first, sequences),
    "causal": (zoo.gpt_tied, tokens),
    "rows last": (minor, vectors),
    "class token": (class_token, sequences),  # red where its slice fixes the batch's size
    "two regions": (broken, vectors),
    "three results": (heads, vectors),
}


def mlp():
    return compile_model(MODELS["mlp"][0]())


def losses_of(model, batch):
    out = model(batch)
    out = out[0] if isinstance(out, tuple) else out
    target = torch.arange(out.shape[:-1].numel(), device=out.device) % out.shape[-1]
    return F.cross_entropy(out.flatten(0, -2), target, reduction="none").view(len(batch), -1).mean(1)


def gradients(model, batch, rows, take, losses=losses_of):
    """The gradients of all parameters; the same random numbers in each call."""
    torch.manual_seed(1)
    loss = take(losses(model, batch), rows).mean()
    return torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)


def compare(model, batch, rows, take=rowprop.pick, plain=indexed, losses=losses_of, tolerance=1e-5):
    """The report of a pick whose gradients are those of plain indexing, through the same compiled model."""
    rows = torch.as_tensor(rows)
    dense = gradients(model, batch, rows, plain, losses)
    with rowprop.watch() as report:
        sliced = gradients(model, batch, rows, take, losses)
    top = max(float(d.abs().max()) for d in dense if d is not None)
    torch.testing.assert_close(sliced, dense, rtol=tolerance, atol=0.1 * tolerance * top)
    return report


@pytest.mark.parametrize(
    "name", MODELS if THOROUGH else ["time first", "causal", "rows last", "class token", "two regions"]
)
def test_any_number_of_rows_of_a_batch_of_any_size(name):
    make, batch_of = MODELS[name]
    model = compile_model(make())
    for n, kept in ((N, 4), (N, 1), (N, N), (9, 3), (20, 7), (N, 5)):
        report = compare(model, batch_of(n), torch.randperm(n)[:kept])
        assert report.densified == {}
        assert report.sliced or kept == n


LOOKS = {"embedding_bag": {"_embedding_bag_backward"}, "scan": {"lt.Scalar", "gt.Scalar", "log", "cat", "add.Tensor"}}
LOOKS |= {"ragged_sets": {"_segment_reduce_backward"}, "matrices": {"cat", "add.Tensor"}}
"""Ops that densify in a graph only: their rules count the rows that an index touches, or ask which formula runs."""
COMPILED = """scan cnn_batchnorm_training embedding_bag speech experts_index_put dilated_segmentation lstm_bidirectional
pixel_shuffle fourier_mixing siamese mlp_every_activation cnn_channels_last experts_index_add linear_attention
autoencoder gated_linear_units bilinear mobilenet variational_autoencoder cnn_3d gpt_tied triplets unet experts_dense
vit_written_to gpt_masked_by_hand llama swin shares matrices ragged_sets source_separation
idle_experts""".split()
"""Models that hold every op of the zoo's backwards between them; `nox -s audit` compiles all models."""


def op_names(entries):
    """The ops in the sliced backwards of models that are not compiled."""
    reports = [zoo.sliced(entry, torch.float32).report for entry in entries]
    return {name for report in reports for name in (*report.sliced, *report.densified)}


def test_the_models_that_are_compiled_hold_every_op_of_the_zoo():
    # Red with an op of a new model that none of them holds.
    some = [entry for entry in zoo.ENTRIES if entry.name in COMPILED]
    others = [entry for entry in zoo.ENTRIES if entry.name not in COMPILED]
    assert len(some) == len(COMPILED) and op_names(others) <= op_names(some)


@pytest.mark.parametrize(
    "entry", [entry for entry in zoo.ENTRIES if THOROUGH or entry.name in COMPILED], ids=lambda entry: entry.name
)
def test_the_zoo_compiled_is_the_zoo(entry):
    dense = zoo.masked(entry, torch.float64)
    whole = replace(entry, losses=lambda model, batch: entry.losses(compile_model(model), batch))
    sliced = zoo.sliced(whole, torch.float64)
    zoo.assert_same(dense, sliced, 1e-10)
    densifies = set(entry.densifies) | LOOKS.get(entry.name, set())
    assert set(sliced.report.densified) <= densifies
    most = 1.01 if densifies else zoo.KEEP * entry.share + 0.01
    assert sliced.flops.total_flops <= dense.flops.total_flops * most


@pytest.mark.usefixtures("quick_kernels")
@pytest.mark.parametrize("name", ["time first", "class token"][not THOROUGH :])
def test_inductor_equals_plain_indexing_without_densifying(name):
    make, batch_of = MODELS[name]
    model, batch = compile_model(make(), "inductor"), batch_of(N)
    for rows in (torch.randperm(N)[:4], torch.arange(N)[1::2]):
        report = compare(model, batch, rows)
        assert report.sliced and report.densified == {}


@pytest.mark.usefixtures("quick_kernels")
def test_inductor_takes_batch_norm_under_the_same_rule_as_eager_mode():
    # Red when: Inductor takes BatchNorm's backward apart, so that no rule sees it, and the gradient is the exact one.
    model = nn.Sequential(nn.Linear(16, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 4))
    for policy in ("rows", "exact"):
        case = vectors(N), torch.tensor([1, 5, 8]), partial(rowprop.pick, batchnorm=policy)
        found, eager = gradients(compile_model(model, "inductor"), *case), gradients(model, *case)
        torch.testing.assert_close(found, eager, rtol=1e-4, atol=1e-6)


@pytest.mark.usefixtures("quick_kernels")
@pytest.mark.parametrize("kernels", ["eager", "inductor"])
def test_the_backward_runs_at_k_rows(kernels):
    model, batch = compile_model(MODELS["mlp"][0](), kernels), vectors(16)
    for rows in ([3, 9, 11, 14], [0, 15, 2, 7, 8]):
        report = compare(model, batch, rows)
        assert report.sliced and report.densified == {}

    def backward_flops(take):
        loss = take(losses_of(model, batch), torch.tensor([3, 9, 11, 14])).mean()
        with count_flops() as flops:
            loss.backward()
        return flops.total_flops

    full = backward_flops(indexed)
    assert full == 2 * 16 * (32 * 4 * 2 + 16 * 32)
    assert backward_flops(rowprop.pick) == full // 4


def test_nothing_is_compiled_again_while_k_changes(monkeypatch):
    compilations = []
    compile_it = lowering.Backward.compiled
    monkeypatch.setattr(lowering.Backward, "compiled", lambda *a: compilations.append(1) or compile_it(*a))
    model, batch = compile_model(time_first()), sequences(N)
    frames = torch._dynamo.utils.counters["stats"]
    for step in range(50):
        rowprop.pick(losses_of(model, batch), torch.randperm(N)[: 2 + step % (N - 2)]).mean().backward()
        if step == 0:
            unique = frames["unique_graphs"]
    assert compilations == [1]
    assert frames["unique_graphs"] == unique


def test_a_symbolic_batch_from_the_start():
    # Red where the trace compares two sizes that are equal in the first batch, sequences as long as there are heads:
    # the graph would hold for that length.
    model = compile_model(zoo.gpt_tied(), dynamic=True)
    for n, length in ((12, 2), (9, 6), (20, 9), (12, 2)):
        assert compare(model, tokens(n, length), torch.tensor([0, 4, 5])).densified == {}
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_zeros_of_a_symbolic_batch_are_taken_apart():
    # As below a real Fourier transform. Red where their rows are counted by an op that symbols lack: all is full-size.
    model = compile_model(
        zoo.Net(lambda net, x: net.b(torch.fft.rfft(net.a(x)).abs()), a=nn.Linear(16, 8), b=nn.Linear(5, 4)),
        dynamic=True,
    )
    for n in (N, 9):
        assert "compiled region" not in compare(model, vectors(n), ROWS).densified


@pytest.mark.parametrize("time_first", [False, True])
def test_what_a_trace_fixes_holds_for_no_other_trace(time_first):
    # Tokens leave the region in one dimension, so a trace fixes the length. Red in one environment for all traces: the
    # backward of another length fails, or runs at full size.
    def forward(net, x):
        return net.b(net.a(x.transpose(0, 1) if time_first else x).tanh()).flatten(0, 1)

    def losses(model, batch):
        n, length, _ = batch.shape
        out = model(batch).square().sum(1)
        return out.view(length, n).sum(0) if time_first else out.view(n, length).sum(1)

    model = compile_model(zoo.Net(forward, a=nn.Linear(16, 8), b=nn.Linear(8, 4)), dynamic=True)
    for n, length in ((12, 5), (9, 6), (12, 5)):
        for rows in (ROWS, [2]):
            assert compare(model, sequences(n, length), rows, losses=losses).densified == {}
        compare(model, sequences(n, length), ROWS, indexed, losses=losses)


def test_a_random_state_that_a_checkpoint_keeps_has_a_size_of_its_own():
    # Red where all symbolic sizes are taken to be inputs.
    def forward(net, x):
        inner = partial(checkpoint, lambda y: F.dropout(y.sin(), 0.3).tanh(), use_reentrant=False)
        return net.b(inner(net.a(x)))

    model = compile_model(zoo.Net(forward, a=nn.Linear(16, 8), b=nn.Linear(8, 4)), dynamic=True)
    for n in (N, 7):
        assert compare(model, vectors(n), ROWS).densified == {}


class Custom(torch.autograd.Function):
    """A function whose backward does what no formula of autograd does."""

    @staticmethod
    def forward(ctx, x, base, kind):
        ctx.save_for_backward(base)
        ctx.kind = kind
        return x * 2

    @staticmethod
    def backward(ctx, g):
        (base,) = ctx.saved_tensors
        index = torch.arange(g.shape[1]).expand(g.shape)
        made = {
            "scatter_add": lambda: base.scatter_add(1, index, g),
            "scatter": lambda: base.scatter(1, index[:, :3], g[:, :3]),
            "mask": lambda: torch.where(g > 0, g, 0 * g),
        }
        return made[ctx.kind](), None, None


@pytest.mark.parametrize("kind", ["scatter_add", "scatter", "mask"])
# Red where a target is taken for zeros, or where a mask is computed again from a gradient that was densified.
def test_a_custom_function_inside_of_a_region(kind):
    base = vectors(N)
    model = zoo.Net(lambda net, x: net.b(Custom.apply(net.a(x), base, kind)), a=nn.Linear(16, 16), b=nn.Linear(16, 4))
    for rows in (ROWS, [3, 3, 7]):
        compare(compile_model(model), vectors(N), rows)


def test_repeated_rows():
    compare(compile_model(minor()), vectors(N), [3, 3, 7])


def test_rows_of_two_picks():
    def both(take):
        return lambda losses, rows: torch.cat([take(losses, rows), take(losses.square(), rows + 3)])

    compare(mlp(), vectors(N), [0, 4], both(rowprop.pick), both(indexed))


def test_autocast():
    with torch.autocast("cpu", torch.bfloat16):
        compare(mlp(), vectors(N), [2, 5, 6], tolerance=1e-2)


def test_an_op_without_a_rule_is_densified_inside_the_region_and_named(monkeypatch):
    monkeypatch.delitem(RULES, torch.ops.aten.gelu_backward.default)
    report = compare(mlp(), vectors(N), ROWS)
    assert report.densified["gelu_backward"].reason == NO_RULE
    assert "mm" in report.sliced  # what comes before it


def test_what_cannot_be_traced_runs_at_full_size_and_says_so(monkeypatch):
    def refuse(*_):
        raise RuntimeError("planted")

    monkeypatch.setattr(lowering, "OnRows", refuse)
    with pytest.warns(UserWarning, match="could not be traced on kept rows and runs at full size"):
        report = compare(compile_model(heads()), vectors(N), ROWS)
    assert "planted" in report.densified["compiled region"].reason


def test_a_graph_for_one_number_of_rows_is_refused(monkeypatch):
    # Red without the check: the reason is a NameError about a symbol.
    op = torch.ops.aten.gelu_backward.default
    rule = RULES[op]

    def fixes(op, g, *rest):
        assert int(g.values.shape[0]) == 3
        return rule.run(op, g, *rest)

    monkeypatch.setitem(RULES, op, replace(rule, run=fixes))
    model, batch = mlp(), vectors(N)
    with pytest.warns(UserWarning, match="an op fixes the number of kept rows, at 3"):
        compare(model, batch, ROWS)
    compare(model, batch, [1, 2, 3, 7])


def test_graphs_that_were_made_go_on_after_one_that_could_not(monkeypatch):
    # Red where a region that failed once runs at full size for all sizes.
    model, batch = mlp(), vectors(N)
    compare(model, batch, ROWS)
    with monkeypatch.context() as patch:
        patch.setattr(lowering.Variant, "fits", lambda *_: False)  # as for sizes that no graph is for
        with pytest.warns(UserWarning, match="runs at full size: RuntimeError: the conditions on sizes do not hold"):
            compare(model, batch, ROWS)
        assert compare(model, batch, ROWS).densified["compiled region"].count == 1  # told each time, warned once
    assert not compare(model, batch, ROWS).densified


def test_a_model_that_was_counted_is_compiled_afterwards():
    # Red where the region stays uncompiled, as torch's own counter left it up to 2.13.
    model, batch, names = mlp(), vectors(N), []
    for step in (1, 2, 3):
        with count_flops() if step == 2 else nullcontext():
            out = model(batch)  # held: up to torch 2.11 its node has no name without it
            names.append(out.grad_fn.name())
    assert [name == "CompiledFunctionBackward" for name in names] == [True, False, True]


def test_a_count_inside_of_what_is_compiled():
    # Dynamo refuses a change of stance there: red where the counter insists on it.
    def product_and_flops(a):
        b = a @ a
        with count_flops() as flops:
            b = b @ a
        return b, flops.total_flops

    whole = compile_model(product_and_flops)
    for _ in range(2):
        b, found = whole(torch.ones(4, 4))
        assert b.eq(16).all() and found == 2 * 4**3


def test_a_region_of_another_backend_gets_a_dense_gradient():
    report = compare(torch.compile(MODELS["mlp"][0](), backend="aot_eager"), vectors(N), ROWS)
    assert "backend='rowprop'" in report.densified["CompiledFunction"].reason


def test_losses_and_pick_inside_what_is_compiled():
    model, batch, rows = MODELS["mlp"][0](), vectors(N), torch.tensor(ROWS)
    whole = compile_model(lambda: rowprop.pick(losses_of(model, batch), rows).mean())
    found = torch.autograd.grad(whole(), list(model.parameters()))
    torch.testing.assert_close(found, gradients(model, batch, rows, indexed), rtol=1e-5, atol=1e-6)


class Residual(nn.Module):
    """A class for each pixel, channels last all the way."""

    def __init__(self):
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1) for _ in range(3))
        self.norms = nn.ModuleList(nn.BatchNorm2d(8) for _ in range(3))

    def forward(self, x):
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = F.relu(x + norm(conv(x)))
        return x.flatten(2).mean(2)[:, :4]


@pytest.mark.usefixtures("quick_kernels")
@pytest.mark.filterwarnings("ignore:batchnorm=None")
# Red with torch's own formulas of masked_fill, which takes gradients out of channels last, and of a sum, which Inductor
# divides among blocks by a modulo for each term; and where a sum reads BatchNorm's input through an index.
def test_a_traced_graph_keeps_its_layout_and_divides_its_sums(monkeypatch):
    graphs = []
    whole = lowering.Backward.compiled

    def compiled(region, function, inputs, trace):
        compile = region.compile
        monkeypatch.setattr(region, "compile", lambda graph, inputs: (graphs.append(graph), compile(graph, inputs))[1])
        return whole(region, function, inputs, trace)

    monkeypatch.setattr(lowering.Backward, "compiled", compiled)
    model = Residual().to(memory_format=torch.channels_last)
    x = torch.randn(N, 8, 6, 6).to(memory_format=torch.channels_last)
    losses = losses_of(compile_model(model, "inductor"), x)
    rowprop.pick(losses, torch.tensor(ROWS), batchnorm="rows").mean().backward()
    nodes = [node for node in graphs[-1].graph.nodes if isinstance(node.meta.get("val"), torch.Tensor)]
    made = [n.meta["val"] for n in nodes if not any(view in str(n.target) for view in ("view", "reshape"))]
    images = [v for v in made if v.shape[1:] == (8, 6, 6)]
    kept = [v for v in images if isinstance(v.shape[0], torch.SymInt) and v.stride(2) > 0]
    assert len(kept) > 20 and all(v.stride(1) == 1 for v in kept)
    sums = [node for node in nodes if node.target is torch.ops.aten.sum.dim_IntList]
    for node in sums:
        sizes = [node.args[0].meta["val"].shape[d] for d in node.args[1]]
        factors = [lowering._factor(size) for size in sizes]
        assert set(factors) == {None} or factors == [1]  # kept rows come alone
    inputs = [node for node in graphs[-1].graph.nodes if node.op == "placeholder"]
    assert isinstance(inputs[-1].meta["val"], torch.SymInt)  # K, by which CUDA graphs are kept
    stored = [node for node in nodes if "force_stride_order" in str(node.target)]
    assert len(stored) == len(model.norms) and len(sums) > 12


SUMS = [([0], False), ([0], True), ([0, 2], False), ([-1, 0], True), ([1], False), ([], False)]


@pytest.mark.parametrize("merged", [False, True])
@pytest.mark.parametrize(("dims", "keepdim"), SUMS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_sum_in_two_is_the_sum(dims, keepdim, merged, dtype):
    # Red when: a dimension is kept or left that should not be, or what is added up is rounded between the two.
    aten, shape = torch.ops.aten.sum.dim_IntList, (N * 7, 5, 3) if merged else (N, 5, 3)
    x = torch.randn(N, *([7] * merged), 5, 3).to(dtype)
    total = lambda x: aten(x.reshape(-1, 5, 3), dims, keepdim)  # noqa: E731
    graph = make_fx(total, decomposition_table={aten: lowering._summed}, tracing_mode="symbolic")(x)
    assert any(node.target is aten for node in graph.graph.nodes)
    expected = x.reshape(shape).double().sum(dims, keepdim).to(dtype)
    torch.testing.assert_close(graph(x), expected, rtol=1e-12 if dtype == torch.float64 else 2**-7, atol=1e-12)


def test_a_mode_of_torch_compile_holds_for_every_backward_and_changes_no_gradient(monkeypatch):
    # Red when: a backward, which is compiled when it is first needed, is compiled without the mode's settings.
    from torch._inductor import compile_fx, config

    under, inner = [], compile_fx.compile_fx_inner
    note = lambda *args, **kwargs: under.append(config.triton.cudagraphs) or inner(*args, **kwargs)  # noqa: E731
    monkeypatch.setattr(compile_fx, "compile_fx_inner", note)
    model = torch.compile(MODELS["mlp"][0](), backend="rowprop", mode="reduce-overhead")
    for rows in ([1, 4, 5], [0], [2, 3], [1, 4, 5]):
        compare(model, vectors(N), rows)
    assert under == [True] * 4  # the forward, and the backwards of all rows, of several and of one


def test_an_unknown_mode_is_refused():
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="mode='faster' came but one of default"):
        torch.compile(nn.Linear(16, 4), backend=lowering.backend, mode="faster")(vectors(N))


@pytest.mark.parametrize("options", [{"kernels": "triton"}, {"kernel": "eager"}])
def test_unknown_options_are_refused(options):
    model = torch.compile(nn.Linear(16, 4), backend="rowprop", options=options)
    with pytest.raises(Exception, match=r"came but none or \{'kernels': 'inductor'\} or 'eager' was needed"):
        model(vectors(N))


TURNS = {"flip": lambda y: y.flip(0), "slice": lambda y: y[2:], "roll": lambda y: y.roll(3, 0)}


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("turn", TURNS)
# Red when: the rows that leave a region are taken for those that entered it; a size that is a symbol is fixed.
def test_rows_that_get_other_numbers_in_a_region_leave_it_dense(turn, dynamic):
    def forward(net, x):
        y = net.a(x).tanh()
        torch._dynamo.graph_break()
        return net.b(TURNS[turn](y).sin())

    model = compile_model(zoo.Net(forward, a=nn.Linear(16, 16), b=nn.Linear(16, 4)), dynamic=dynamic)
    for n in (N, 9):
        report = compare(model, vectors(n), [1, 3], losses=lambda model, batch: model(batch).square().sum(1))
        assert report.densified["compiled region"].reason == "other rows leave it than came in"


KEPT = {"some of each": torch.arange(N * 5) % 5 < 2, "of a few sequences": torch.arange(N * 5) % 15 > 9}


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("kept", KEPT)
# Red when: tokens are taken for whole sequences. Under "cut" the gradient is the exact one, and the report says so.
def test_a_region_takes_whole_sequences_of_tokens(kept, inside):
    # Losses of logits (N, 5, V) are taken inside or outside of the region.
    whole = zoo.gpt_tied()
    model = compile_model(nn.Sequential(whole, nn.Flatten(0, 1)) if inside else whole)
    batch = tokens(N)
    for attention in ("exact", "cut"):
        pick = partial(rowprop.pick, attention=attention)
        report = compare(model, batch, KEPT[kept], pick, losses=lambda m, b: m(b).flatten(0, -2).logsumexp(-1))
        sliced = not inside and attention == "exact" and kept == "of a few sequences"
        assert bool(report.densified) != sliced and not report.cut, str(report)
        if attention == "cut" and not inside:
            reasons = [met.reason for met in report.densified.values()]
            assert any("takes whole sequences, which attention='cut' does not leave" in reason for reason in reasons)


@pytest.mark.parametrize("backend", ["aot_eager", "rowprop"])
def test_a_gradient_of_an_earlier_backward_enters_a_region(backend):
    # autograd.grad returned it while it went on sliced. Red without __coerce_same_metadata_as_tangent__.
    below, region = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    both, compiled_region = nn.ModuleList([below, region]), torch.compile(region, backend=backend)
    x, rows = torch.randn(8, 4), torch.tensor([1, 2])
    found = []
    for take in (indexed, rowprop.pick):
        both.zero_grad()
        h = compiled_region(below(x))
        k = compiled_region(h)
        gk, _ = torch.autograd.grad(take(k.square().sum(1) + h.sum(1), rows).mean(), [k, h], retain_graph=True)
        k.backward(gk)
        found.append([p.grad for p in both.parameters()])
    torch.testing.assert_close(found[1], found[0])


def test_a_training_as_people_write_it(monkeypatch):
    # A smaller last batch, other numbers of rows in each step, an evaluation after each epoch, and a new model that
    # goes on from the saved state: the losses of the same loop with plain indexing, not compiled. Red when: an epoch
    # after the second compiles anew, as with a graph for each K.
    backwards = []
    compile_it = lowering.Backward.compiled
    monkeypatch.setattr(lowering.Backward, "compiled", lambda *a: backwards.append(1) or compile_it(*a))
    x, y = vectors(40), torch.randint(0, 4, (40,))

    def trained(make, take):
        found, saved = [], None
        for _ in range(2):
            model = make()
            optimizer, graphs = torch.optim.Adam(model.parameters(), 0.01), []
            for part, state in zip((model, optimizer), saved or (), strict=False):
                part.load_state_dict(state)
            for epoch in range(3):
                for number, (inputs, target) in enumerate(zip(x.split(16), y.split(16), strict=True)):
                    losses = F.cross_entropy(model.train()(inputs), target, reduction="none")
                    loss = take(losses, losses.detach().topk(2 + epoch + number).indices).mean()
                    loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    found.append(float(loss))
                with torch.no_grad():
                    found.append(float(F.cross_entropy(model.eval()(x), y)))
                graphs.append((torch._dynamo.utils.counters["stats"]["unique_graphs"], len(backwards)))
            saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
            assert graphs[1] == graphs[2]
        return found

    torch.manual_seed(2)
    plain = MODELS["mlp"][0]()
    wanted = trained(lambda: copy.deepcopy(plain), indexed)
    assert trained(lambda: compile_model(copy.deepcopy(plain)), rowprop.pick) == pytest.approx(wanted, rel=1e-5)
