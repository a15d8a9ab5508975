"""The step: which rows, what it returns and refuses, and that it lives with JAX's transformations."""

from __future__ import annotations

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

import rowprop_jax
from checks import check, error, plain, sliced, weights_of
from networks import NETWORKS, mlp, resnet
from rowprop_jax import InvalidInput, UnsupportedOperation, skip_zeros, top_k, uniform, value_and_grad, verify, vjp

LOSSES_FN, PARAMS, BATCH = mlp(16)
PERFORM = jax.jit(value_and_grad(LOSSES_FN, top_k, keep=0.25))


def test_the_step_keeps_the_largest_losses_and_has_their_gradient():
    # Red with the smallest losses, with weights of 1, or with K = floor(keep * N) + 1.
    record, grads = PERFORM(PARAMS, BATCH)
    losses = LOSSES_FN(PARAMS, BATCH)
    np.testing.assert_allclose(record.losses, losses, rtol=1e-5)
    assert set(record.rows.tolist()) == set(np.argsort(losses)[-4:].tolist())
    wanted = jax.grad(lambda params: LOSSES_FN(params, BATCH)[record.rows].mean())(PARAMS)
    assert error(grads, wanted) < 1e-5


def test_uniform_draws_distinct_rows_from_its_key_and_all_alike():
    draws = [uniform(jnp.zeros(8), jax.random.key(seed), 2) for seed in range(200)]
    assert all(len(set(rows.tolist())) == 2 and weights.tolist() == [0.5, 0.5] for rows, weights in draws)
    counts = np.bincount(np.concatenate([rows for rows, _ in draws]), minlength=8)
    assert (abs(counts - 50) < 5 * math.sqrt(200 * 0.25 * 0.75)).all(), counts
    with pytest.raises(InvalidInput, match="no key"):
        uniform(jnp.zeros(8), None, 2)


@pytest.mark.parametrize(("keep", "num_kept"), [(0.01, 1), (0.1, 2), (0.25, 4), (7 / 16, 7), (1, 16)])
def test_keep_is_rounded_up(keep, num_kept):
    record, _ = jax.eval_shape(value_and_grad(LOSSES_FN, top_k, keep=keep), PARAMS, BATCH)
    assert record.rows.shape == (num_kept,)


def test_other_rows_compile_nothing_anew():
    # Red with rows that are static, or with a function of numpy on them.
    traced = []

    @jax.jit
    def gradient(params, batch, rows):
        traced.append(rows.shape)
        return sliced(LOSSES_FN, params, batch, rows)

    for rows in ([1, 2, 3], [7, 0, 15], [4, 4, 4]):
        assert error(gradient(PARAMS, BATCH, jnp.array(rows)), plain(LOSSES_FN, PARAMS, BATCH, rows)) < 1e-5
    assert traced == [(3,)]


OUTSIDE = {
    "as jnp.nonzero fills up": [3, 9, 16, 16],
    "below -N": [-17, -16, 5, -1],
    "one": [-32],
    "all": [16, 99, -17],
    "as many as the batch has": [*range(-18, 0)],
}
SQUARES = jax.random.normal(jax.random.key(1), (256, 3))


def squares_fn(params, batch):
    return jnp.square(jnp.tanh(batch @ params))


@pytest.mark.parametrize("rows", OUTSIDE.values(), ids=OUTSIDE)
def test_rows_outside_of_the_batch_add_nothing(rows):
    # As in `jax.grad` of plain indexing. Red without `inside` in the weights, which trains the last or the first row,
    # and where row -N - 1 is wrapped twice.
    case = squares_fn, jnp.ones(3), SQUARES[:16], jnp.array(rows)
    wanted = plain(*case)
    assert wanted.any() == any(-16 <= row < 16 for row in rows)
    np.testing.assert_allclose(jax.jit(sliced, static_argnums=0)(*case), wanted, rtol=1e-5)
    assert verify(*case).agrees


@pytest.mark.parametrize(("rows", "padding"), [([3, 16], 15), ([-17, 9], 0)])
def test_a_row_outside_reads_no_row_that_is_not_kept(rows, padding):
    # Red where it stands for the last or the first row: that of a padded batch may be NaN, and so is zero times NaN.
    def outputs_fn(params, batch):
        return jnp.tanh(batch[:, :, None] * params)

    padded = SQUARES[:16].at[padding].set(jnp.nan)
    found = vjp(outputs_fn, jnp.ones(2), padded)[1](jnp.array(rows), jnp.ones((2, 3, 2)))
    kept = jnp.array([row for row in rows if 0 <= row < 16])
    assert error(found, jax.grad(lambda params: outputs_fn(params, SQUARES[:16])[kept].sum())(jnp.ones(2))) < 1e-5


def test_a_selection_of_fewer_rows_than_it_has_room_for():
    # The idiom where only the device knows how many. Then rows of int8, to which 256 cannot be added.
    marked = jnp.arange(256) % 100 == 7

    def select(losses, key, num_kept):
        rows = jnp.nonzero(marked, size=num_kept, fill_value=len(losses))[0]
        return rows, jnp.where(marked[rows], 1 / 3, 7.0)

    record, grads = jax.jit(value_and_grad(squares_fn, select, keep=0.02))(jnp.ones(3), SQUARES)
    assert record.rows.tolist() == [7, 107, 207, 256, 256, 256]
    assert error(grads, jax.grad(lambda params: squares_fn(params, SQUARES)[marked].mean())(jnp.ones(3))) < 1e-5
    _, pullback = vjp(squares_fn, jnp.ones(3), SQUARES)
    assert error(pullback(jnp.array([7, 107, -49], "int8"), jnp.full(3, 1 / 3)), grads) < 1e-5


def test_aux_is_that_of_all_rows_and_further_arguments_pass_through():
    step = value_and_grad(lambda p, b, scale: (LOSSES_FN(p, b) * scale, b[0].sum()), top_k, keep=0.25, has_aux=True)
    record, grads = jax.jit(step)(PARAMS, BATCH, 3.0)
    np.testing.assert_allclose(record.aux, BATCH[0].sum(), rtol=1e-5)
    _, once = PERFORM(PARAMS, BATCH)
    assert error(grads, jax.tree.map(lambda grad: 3 * grad, once)) < 1e-5


def test_further_arguments_need_not_be_arrays_and_parameters_not_be_floats():
    # As in `jax.grad`. Red with arguments that are traced, and where a gradient of no elements is compared with 0.
    def losses_fn(params, batch, activation, double):
        x, y = batch
        out = getattr(jax.nn, activation)(x @ params["w"])[:, params["index"]] + y
        return 2 * out if double else out

    params = {"w": PARAMS[0][0], "index": jnp.array(3), "none": None}
    grads = jax.jit(lambda params: sliced(losses_fn, params, BATCH, [2, 5], "tanh", True))(params)
    wanted = plain(lambda w, batch: losses_fn(params | {"w": w}, batch, "tanh", True), params["w"], BATCH, [2, 5])
    assert grads["index"].dtype == jax.dtypes.float0 and error(grads["w"], wanted) < 1e-5


def test_objects_among_the_arguments_may_change_themselves_in_the_trace():
    # As Flax's counters of random numbers. Red with arguments that are handed on as they are.
    graph, state = nnx.split(nnx.Dropout(0.5, rngs=nnx.Rngs(0)))

    def losses_fn(params, batch, state):
        return nnx.merge(graph, state)(jnp.tanh(batch[0] @ params[0][0])).sum(1)

    def copied(params, batch):
        return losses_fn(params, batch, jax.tree.map(jnp.copy, state))

    grads = jax.jit(lambda params, state: sliced(losses_fn, params, BATCH, [2, 5], state))(PARAMS, state)
    assert error(grads, plain(copied, PARAMS, BATCH, [2, 5])) < 1e-5


def test_an_ensemble_by_vmap():
    # Each member has rows of its own. Red with rows that are taken from the first member.
    members = jax.vmap(lambda key: jax.tree.map(lambda w: w * jax.random.normal(key, w.shape), PARAMS))(
        jax.random.split(jax.random.key(0), 3)
    )
    records, grads = jax.jit(jax.vmap(PERFORM, in_axes=(0, None)))(members, BATCH)
    assert len({tuple(sorted(rows)) for rows in records.rows.tolist()}) > 1
    for at in range(3):
        record, wanted = PERFORM(jax.tree.map(lambda w, at=at: w[at], members), BATCH)
        assert records.rows[at].tolist() == record.rows.tolist()
        assert error(jax.tree.map(lambda grad, at=at: grad[at], grads), wanted) < 1e-5


MESH = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))


def test_a_batch_over_eight_devices_by_jit():
    batch = jax.device_put(BATCH, NamedSharding(MESH, PartitionSpec("data")))
    params = jax.device_put(PARAMS, NamedSharding(MESH, PartitionSpec()))
    record, grads = PERFORM(params, batch)
    assert len(record.losses.sharding.device_set) == 8
    once, wanted = PERFORM(PARAMS, BATCH)
    assert record.rows.tolist() == once.rows.tolist()
    assert error(grads, wanted) < 1e-5


def test_a_batch_over_eight_devices_by_shard_map():
    # Each device keeps the larger half of its own 4 rows; JAX sums gradients of what all devices share.
    losses_fn, params, batch = mlp(32)
    step = value_and_grad(losses_fn, top_k, keep=0.5)
    spread = PartitionSpec("data")
    each = jax.shard_map(step, mesh=MESH, in_specs=(PartitionSpec(), spread), out_specs=(spread, PartitionSpec()))
    record, grads = jax.jit(lambda p, b: each(p, b))(params, batch)
    rows = jnp.asarray(record.rows).reshape(8, 2) + 4 * jnp.arange(8)[:, None]
    wanted = jax.grad(lambda p: losses_fn(p, batch)[rows].mean(1).sum())(params)
    assert error(grads, wanted) < 1e-5


def test_dropout_keeps_the_masks_of_the_forward():
    # Red with masks drawn for K rows: those would be others.
    def losses_fn(params, batch, key):
        x, y = batch
        x = jax.nn.relu(x @ params[0][0])
        x = jnp.where(jax.random.bernoulli(key, 0.5, x.shape), x / 0.5, 0)
        return jnp.square(x @ params[1][0]).sum(1) + y

    check(losses_fn, PARAMS, BATCH, [3, 9, 11], jax.random.key(1))


def test_checkpoint_recomputes_the_kept_rows_alone():
    losses_fn, params, batch = NETWORKS["gpt"](16)
    check(jax.checkpoint(losses_fn), params, batch, [3, 9, 11])
    gradient = partial(sliced, jax.checkpoint(losses_fn), rows=[3, 9, 11])
    program = jax.make_jaxpr(lambda params, batch: gradient(params, batch))(params, batch)
    (again,) = [str(eqn.params["jaxpr"]) for eqn in program.eqns if eqn.primitive.name == "remat2"]
    assert "f32[3,2,8,8]" in again and "f32[16,2,8,8]" not in again  # the scores of attention


@pytest.mark.parametrize("name", NETWORKS)
def test_what_is_cheap_is_not_saved_but_computed_again_for_the_kept_rows(name):
    # Against what `jax.vjp` saves. Red with `lean=False` in vjp, with an empty CHEAP, where what a `jax.custom_jvp`
    # holds is not looked at, as relu's, and where what is saved is rounded to its own dtype.
    losses_fn, params, batch = NETWORKS[name](16)
    program = jax.make_jaxpr(lambda params, batch: sliced(losses_fn, params, batch, [3, 9, 11]))(params, batch)
    assert "remat2" in {eqn.primitive.name for eqn in program.eqns}
    forward = rowprop_jax.sliced._Forward(lambda *given: (losses_fn(*given), None), params, batch, lean=True)
    own = jax.eval_shape(lambda params: jax.vjp(lambda params: losses_fn(params, batch), params)[1], params)
    saved, saved_by_jax = (sum(leaf.size for leaf in jax.tree.leaves(vjp)) for vjp in (forward.shapes[1], own))
    assert saved < {"mlp": 0.6, "cnn": 0.35, "moe": 0.25}.get(name, 0.5) * saved_by_jax
    assert "reduce_precision" not in str(forward.program)


def scans(program):
    for eqn in program.eqns:
        inner = [getattr(held, "jaxpr", held) for held in eqn.params.values()]
        yield from [eqn] if eqn.primitive.name == "scan" else ()
        for held in inner:
            yield from scans(held) if hasattr(held, "eqns") else ()


@pytest.mark.parametrize("wrapped", [lambda function: function, jax.jit])
def test_a_scan_backwards_computes_again_in_the_step_that_needs_it(wrapped):
    # Of the kept rows only the state is saved for all steps, as h and c of an LSTM. Red with `_lean_scans` left out,
    # which saves 12 arrays, and where it does not look into jax.jit.
    losses_fn, params, batch = NETWORKS["lstm"](16)
    gradient = partial(sliced, wrapped(losses_fn), rows=[3, 9, 11])
    program = jax.make_jaxpr(lambda params, batch: gradient(params, batch))(params, batch)
    found = list(scans(program.jaxpr))
    kept = [var for eqn in found for var in eqn.outvars if var.aval.shape[:2] == (8, 3)]
    assert len(found) == 3 and len(kept) == 2
    check(wrapped(losses_fn), params, batch, [3, 9, 11])


def test_a_print_in_the_losses_prints_once(capfd):
    # Red without `self.program.effects`: a backward that computes again prints again.
    def losses_fn(params, batch):
        jax.debug.print("mean {}", batch[0].mean())
        return LOSSES_FN(params, batch)

    check(losses_fn, PARAMS, BATCH, [2, 5])  # once in the sliced gradient, once in the plain one
    jax.effects_barrier()
    assert capfd.readouterr().out.count("mean") == 2


def test_bfloat16():
    losses_fn, params, batch = mlp(16, jnp.bfloat16)
    grads = jax.jit(partial(sliced, losses_fn))(params, batch, jnp.array([2, 5]))
    assert {leaf.dtype for leaf in jax.tree.leaves(grads)} == {jnp.dtype("bfloat16")}
    assert error(grads, plain(losses_fn, params, batch, [2, 5])) < 5e-2


@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
def test_parameters_may_be_donated():
    @partial(jax.jit, donate_argnums=0)
    def update(params, batch):
        record, grads = PERFORM(params, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), record

    params = jax.tree.map(jnp.copy, PARAMS)
    losses = []
    for _ in range(5):
        params, record = update(params, BATCH)
        losses.append(float(record.losses.mean()))
    assert losses[-1] < losses[0]


def test_rows_out_of_jit_are_the_same():
    assert error(sliced(LOSSES_FN, PARAMS, BATCH, [2, 5]), plain(LOSSES_FN, PARAMS, BATCH, [2, 5])) < 1e-5


def outputs_fn(params, batch):
    return jax.nn.relu(batch[0] @ params[0][0]) @ params[-1][0]


@pytest.mark.parametrize(("capacity", "overflow"), [(3, 1), (4, 0), (9, 0), (99, 0)])
def test_skip_zeros_has_the_gradient_of_the_live_rows_and_counts_what_did_not_fit(capacity, overflow):
    # Red with the smallest cotangents, with an overflow below 0, or with one that is never counted.
    outputs, pullback = vjp(outputs_fn, PARAMS, BATCH)
    live = jnp.array([1, 4, 8, 15])
    cotangent = jnp.zeros_like(outputs).at[live].set(-jnp.arange(1.0, 5)[:, None] * jnp.ones(10))
    grads, over = jax.jit(lambda cotangent: skip_zeros(pullback, cotangent, capacity=capacity))(cotangent)
    assert int(over) == overflow
    taken = live[overflow:]
    wanted = jax.grad(lambda params: (outputs_fn(params, BATCH)[taken] * cotangent[taken]).sum())(PARAMS)
    assert error(grads, wanted) < 1e-5


def test_verify_tells_exact_from_refused_and_different(monkeypatch):
    assert verify(LOSSES_FN, PARAMS, BATCH, [1, 2]).agrees
    losses_fn, params, batch = resnet(8, training=True)
    refused = verify(losses_fn, params, batch, [1, 2])
    assert refused.status == "refused" and "reduce_sum" in refused.why and not refused.agrees
    taken = rowprop_jax.sliced._take
    monkeypatch.setattr(rowprop_jax.sliced, "_take", lambda *given: taken(*given[:3], given[3] * 0, given[4]))
    differs = verify(LOSSES_FN, PARAMS, BATCH, [1, 2])
    assert differs.status == "differs" and differs.error > 0.1


def test_verify_knows_complex_parameters_and_what_is_no_number():
    # Red with tolerances of real dtypes alone, which leave complex ones 0, and with the maximum of Python.
    def losses_fn(params, batch):
        return jnp.abs(batch[0] @ params[0][0]).sum(1) + params[1].sum()

    params = [(PARAMS[0][0] * (1 + 2j),), jnp.ones(2)]
    assert verify(losses_fn, params, BATCH, [1, 2]).agrees
    lost = jax.custom_vjp(lambda x: x)
    lost.defvjp(lambda x: (x, None), lambda _, grad: (grad * jnp.nan,))
    found = verify(lambda params, batch: losses_fn([params[0], lost(params[1])], batch), params, BATCH, [1, 2])
    assert found.status == "differs"


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: value_and_grad(LOSSES_FN, top_k, keep=0), r"keep=0 but a fraction in \(0, 1\]"),
        (lambda: vjp(lambda p, b: LOSSES_FN(p, b).mean(), PARAMS, BATCH), r"the shape \(\) but one loss .* 16 rows"),
        (lambda: vjp(LOSSES_FN, PARAMS, (BATCH[0], BATCH[1][:3])), r"N rows in each were needed"),
        (lambda: vjp(LOSSES_FN, PARAMS, ()), r"N rows in each were needed"),
        (lambda: vjp(LOSSES_FN, PARAMS, BATCH)[1](jnp.ones(2), jnp.ones(2)), r"rows float32\[2\] .* integers \(K,\)"),
        (lambda: vjp(LOSSES_FN, PARAMS, BATCH)[1](jnp.array([1]), jnp.ones(2)), r"weights \[2\]"),
        (
            lambda: value_and_grad(outputs_fn, top_k, keep=0.5)(PARAMS, BATCH),
            r"the shape \(16, 10\) but one loss per row",
        ),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(call, said):
    with pytest.raises(InvalidInput, match=said):
        call()


def test_rows_of_a_closed_over_array_are_not_guessed():
    # An array with a row for each loss that is no part of the batch: refused, with the remedy.
    x, y = BATCH
    with pytest.raises(UnsupportedOperation, match="belongs into batch"):
        vjp(lambda params, x: LOSSES_FN(params, (x, y)), PARAMS, x)[1](jnp.array([1, 2]), jnp.ones(2))


def test_weights_are_in_the_order_of_the_rows():
    rows = jnp.array([9, 2])
    losses, pullback = vjp(LOSSES_FN, PARAMS, BATCH)
    weights = jnp.asarray(weights_of(rows), losses.dtype)
    wanted = jax.grad(lambda params: (LOSSES_FN(params, BATCH)[rows] * weights).sum())(PARAMS)
    assert error(pullback(rows, weights), wanted) < 1e-5
