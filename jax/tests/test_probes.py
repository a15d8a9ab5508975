"""Each way in which rows stay apart is exact, each in which they mix is refused, and no rule can be wrong unseen."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

from checks import error, plain, sliced
from probes import PROBES
from rowprop_jax import UnsupportedOperation, walk
from rowprop_jax.walk import Value

RNG = np.random.default_rng(0)
W, BATCH = (
    RNG.normal(size=(4, 4)).astype("float32"),
    (RNG.normal(size=(8, 4)).astype("float32"), RNG.integers(4, size=8)),
)
W[0, 0] = 1.0  # the branch that `cond` takes
ROWS = [6, 1, 3]


def outcomes(names):
    """What each program's gradient came to: ``"exact"``, ``"wrong"``, or the refusal. All are compiled at once."""
    found, pairs = {}, {}

    def gradients(w, batch):
        for name in names:
            try:
                pairs[name] = sliced(PROBES[name][0], w, batch, ROWS), plain(PROBES[name][0], w, batch, ROWS)
            except UnsupportedOperation as refused:
                found[name] = str(refused)
            except Exception as failed:  # a wrong rule may lead to a program that does not fit together
                found[name] = f"{type(failed).__name__}: {failed}"
        return dict(pairs)

    for name, pair in jax.jit(gradients)(W, BATCH).items():
        found[name] = "exact" if error(*pair) < 1e-5 else "wrong"
    return found


def surprises(names):
    return {
        name: said
        for name, said in outcomes(names).items()
        if (said != "exact" if PROBES[name][1] is None else not re.search(PROBES[name][1], said))
    }


def test_every_probe_comes_to_what_it_says():
    assert surprises(PROBES) == {}


def test_a_refusal_names_the_primitive_and_the_line():
    # Red with the place of the outermost program for that of the operation.
    said = outcomes(["cumsum"])["cumsum"]
    assert re.search(r"`cumsum` at \S*probes.py:\d+", said), said
    file, line = re.search(r"at (\S*probes.py):(\d+)", said).groups()
    assert "jnp.cumsum(hidden" in Path(file).read_text().splitlines()[int(line) - 1]


def local(op):
    """A rule that finds rows wherever the shapes do, and zeros wherever an operand has some."""
    return [Value(None if n == k else 1, any(op.zeros)) for n, k in op.outs]


def kept(op):
    """A rule that leaves rows split as they were."""
    return Value(walk.joined(op.ins), all(op.zeros))


def without_need_of_zeros(op):
    return local(op) if op.outs[0][0] != op.outs[0][1] else Value()


def never_number(op):
    return replace(RULES["iota"](op), number=None)


def forgetful(op):
    return Value()


def still_alike(op):
    return replace(RULES["reshape"](op), outer=op.ins[0].outer)


def of_any_dtype(op):
    return replace(RULES["iota"](op), number=walk.WHOLE)


def without_why(value, why=None, **changes):
    return replace(value, **changes)


def first_branch(op):
    return op.walk("branches", op.ins[1:], 0)


def first_step(op):
    return op.walk("jaxpr", op.ins)


def outermost(op):
    return replace(RULES["reshape"](op), outer=1)


RULES = dict(walk.RULES)
MUTANTS = {  # primitive -> (wrong rules, the probes that see them)
    "reduce_sum": ([without_need_of_zeros], "batch mean, gradient of one's own"),
    "dot_general": ([without_need_of_zeros, kept], "gradient of one's own, batch mean, slots of experts, elementwise"),
    "add": ([local], "gradient of one's own"),
    "exp": ([local], "gradient of one's own, by a function"),
    "cumsum": ([local], "cumsum"),
    "rev": ([local], "reversed"),
    "transpose": ([forgetful], "batch last, merged, rows inside"),
    "reshape": ([kept, outermost, still_alike], "merged, merged, rows inside, merged alike"),
    "broadcast_in_dim": ([forgetful], "stacked, elementwise, maximum"),
    "gather": ([local], "written elsewhere"),
    "scatter-add": ([local], "permuted, permuted in each, sort, embedding"),
    "iota": ([never_number], "numbered, numbered twice, numbered, remat"),
    "concatenate": ([kept], "numbered, numbered twice"),
    "select_n": ([kept], "numbered, numbered, remat"),
    "scan": ([first_step], "scan that spreads"),
    "cond": ([first_branch], "gradient for one branch, some branch"),
    "random_bits": ([local], "dropout recomputed"),
    "while": ([lambda op: op.ins[-len(op.outs) :]], "while some row wants"),
    "jit": ([local], "mean in a function"),
    "remat2": ([local], "numbered, remat, dropout recomputed, number of rows recomputed"),
}


@pytest.mark.parametrize("primitive", MUTANTS)
def test_a_wrong_rule_is_seen(primitive, monkeypatch):
    # "Seen": a program is wrong, refused without need, or accepted without right. Red with a rule that nothing needs.
    wrong, names = MUTANTS[primitive]
    names = [name for name in PROBES if name in names]
    assert names and surprises(names) == {}
    for rule in wrong:
        monkeypatch.setitem(walk.RULES, primitive, rule)
        assert surprises(names), rule.__name__


@pytest.mark.parametrize(
    ("part", "wrong", "names"),
    [
        ("_same", lambda a, b: True, ["number of rows recomputed"]),
        ("_alike", lambda *_: True, ["steps as many as rows"]),
        ("replace", without_why, ["number of rows recomputed", "number of the row recomputed", "divided by N"]),
    ],
)
def test_a_walk_that_does_not_look_is_seen(part, wrong, names, monkeypatch):
    assert surprises(names) == {}
    monkeypatch.setattr(walk, part, wrong)
    assert surprises(names), part
