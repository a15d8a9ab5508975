"""The laws that every selector, schedule, scorer and recipe obeys, for all entries of the table in ``laws.py``."""

from __future__ import annotations

import copy
import dataclasses
import importlib
import inspect
import math
import pkgutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode

import laws
import rowprop
import rowprop.recipes
import rowprop.schedule
import rowprop.scoring
import rowprop.selection
from killed import EPOCHS, Training, assert_nothing_was_lost, killed_and_resumed, seeded
from killed import ROWS as OF_A_TRAINING
from laws import RECIPES, ROWS, SCHEDULES, SCORERS, SELECTORS
from rowprop.errors import InvalidInput
from rowprop.history import LossHistory
from rowprop.scoring import score_without_graph
from rowprop.selection import Context, KnownKeep, Selection, Stateful, TopBottom, TopK
from rowprop.selection.base import keep_of
from rowprop.selection.selectors import count_kept
from rowprop.step.selective import wants_context
from sentences import refused


def cases_of(table: dict[str, list[Any]], having: Any = lambda case: True) -> Any:
    """The test is for each case of a table, or for those that have a trait."""
    named = [(f"{name}-{index}", case) for name, cases in table.items() for index, case in enumerate(cases)]
    return pytest.mark.parametrize("case", [pytest.param(case, id=name) for name, case in named if having(case)])


def scores_of(num_rows: int, seed: int = 0) -> Tensor:
    return torch.rand(num_rows, generator=seeded(1000 + seed)) + 0.01  # other numbers than the lots'


def select(selector: Any, scores: Tensor, generator: torch.Generator | None = None, **beside: Any) -> Selection:
    """Call a selector with a context that has all it may need; ``beside`` is for :func:`laws.context_of`."""
    return selector(scores, laws.context_of(scores, generator, **beside))


def same(first: Selection, second: Selection) -> bool:
    return torch.equal(first.rows, second.rows) and torch.equal(first.weights, second.weights)


def public(module: Any) -> set[str]:
    return set(getattr(module, "__all__", ()))


def every_module() -> Iterator[Any]:
    """All modules of the package that need no extra."""
    for info in pkgutil.walk_packages(rowprop.__path__, "rowprop."):
        if not info.name.startswith(("rowprop.app.cli", "rowprop.integrations")):
            yield importlib.import_module(info.name)


def called_with(*names: str) -> set[str]:
    """Public classes of the package whose instances are called with arguments of these names."""
    found: set[str] = set()
    for module in every_module():
        for name, kind in vars(module).items():
            if not inspect.isclass(kind) or name.startswith("_") or getattr(kind, "_is_protocol", False):
                continue
            call = next((vars(base)["__call__"] for base in kind.__mro__ if "__call__" in vars(base)), None)
            if call is not None and tuple(inspect.signature(call).parameters)[1 : 1 + len(names)] == names:
                found.add(name)
    return found


def entries_missing(found: set[str], entries: set[str]) -> list[str]:
    return sorted(found ^ entries)


TABLES = {  # the module whose public names they list, the arguments that give an entry away, and all of its entries
    "selector": (rowprop.selection, ("scores", "context"), {*SELECTORS, *laws.NO_SELECTORS}),
    "schedule": (rowprop.schedule, (), {*SCHEDULES}),
    "scorer": (rowprop.scoring, ("model", "batch"), {*SCORERS, *laws.NO_SCORERS}),
    "recipe": (rowprop.recipes, (), {*RECIPES, *laws.NO_RECIPES_OF_ROWS}),
}


@pytest.mark.parametrize("kind", TABLES)
def test_each_public_one_has_an_entry(kind: str):
    # Red when: one is exported without a case in laws.py, a class anywhere in the package is called with a selector's
    # or a scorer's arguments and has no entry, or an entry outlives what it was made for.
    module, arguments, entries = TABLES[kind]
    found = public(module) | (called_with(*arguments) if arguments else set())
    assert entries_missing(found, entries) == []


def test_a_forgotten_entry_is_seen():
    # The meta-test of the one above.
    assert entries_missing({"TopK", "Forgotten"}, {"TopK", "Outlived"}) == ["Forgotten", "Outlived"]


@pytest.mark.parametrize("name", SELECTORS)
def test_an_entry_is_made_of_what_it_is_named_after(name):
    # Red when: a case is put under another selector's name, so that a selector looks covered and is not.
    for case in SELECTORS[name]:
        made = [case.make(), *([case.whole()] if case.whole else []), *([case.of(0.5)] if case.of else [])]
        assert {type(selector).__name__ for selector in made} == {name}
    schedulable = {"keep", "mass", "top"} & {field.name for field in dataclasses.fields(SELECTORS[name][0].make())}
    assert not schedulable or any(case.of for case in SELECTORS[name])


SCORES = {
    "random": scores_of,
    "equal": lambda num_rows, seed=0: torch.full((num_rows,), 0.7),
    "zero": lambda num_rows, seed=0: torch.zeros(num_rows),
    "tied": lambda num_rows, seed=0: torch.arange(float(num_rows)).remainder(3),
    "one stands out": lambda num_rows, seed=0: torch.eye(1, num_rows)[0] * 1e30,
}


@cases_of(SELECTORS)
@pytest.mark.parametrize("kind", SCORES)
def test_rows_are_in_range_ascending_and_unique_with_a_weight_each(case, kind):
    # Red when: `.sort()` is dropped from common.mean_of (rows come hardest first), or a weight is 1/0; when a wrapper
    # drops a fact of the selection inside, or keeps one that it has made wrong. Even a draw that happens to have
    # weights of 1/K does not say so: the step must be able to do the same with every batch.
    for num_rows in (1, 2, 7, 64):
        selector = case.make()
        for seed in range(3):
            selection = select(selector, SCORES[kind](num_rows, seed), seeded(seed))
            rows = selection.rows.tolist()
            assert rows == sorted(set(rows)) and all(0 <= row < num_rows for row in rows)
            assert selection.rows.dtype == torch.int64 and selection.num_rows == num_rows
            assert selection.weights.shape == selection.rows.shape
            assert bool((selection.weights > 0).all()) and bool(selection.weights.isfinite().all())
            assert (selection.even, selection.unbiased) == (not case.own_weights, case.unbiased)
            if selection.even:
                assert selection.weights.tolist() == torch.full((len(rows),), 1 / max(1, len(rows))).tolist()
            if not case.waits:
                assert rows  # a count that is known beforehand is at least one


@pytest.mark.parametrize("name", SELECTORS)
def test_scores_of_the_wrong_shape_or_dtype_are_refused(name):
    # Red when: a selector does not look at its scores first.
    for scores in (torch.rand(32, 128), torch.rand(()), torch.rand(0), torch.arange(4)):
        came = f"{name} got scores of shape {tuple(scores.shape)} and dtype {scores.dtype}"
        with refused(f"{came} ... shape (N,); ... `loss.flatten(1).mean(1)`"):
            SELECTORS[name][0].make()(scores)


@cases_of(SELECTORS)
def test_same_generator_same_rows(case):
    # Red when: a selector draws from torch's global generator although it was given one.
    scores = scores_of(64)
    first = select(case.make(), scores, seeded(3))
    torch.rand(5)
    before = torch.get_rng_state()
    assert same(select(case.make(), scores, seeded(3)), first)
    assert torch.equal(torch.get_rng_state(), before)


@cases_of(SELECTORS, lambda case: case.draws)
def test_drawing_selectors_differ_between_seeds_and_default_to_the_global_generator(case):
    # Red when: the generator is re-seeded inside, or None is not passed on as torch's own.
    def drawn(generator: torch.Generator | None) -> list[list[int]]:
        selector = case.make()
        return [select(selector, scores_of(64), generator).rows.tolist() for _ in range(3)]

    assert drawn(seeded(3)) != drawn(seeded(4))
    torch.manual_seed(11)
    first = drawn(None)
    assert drawn(None) != first
    torch.manual_seed(11)
    assert drawn(None) == first


@cases_of(SELECTORS, lambda case: case.draws != "by row")
def test_permuting_the_rows_permutes_the_selection(case):
    # Red when: RankSampling gives odds to rows instead of ranks, or a wrapper forgets to map places back to rows.
    scores, order = scores_of(64), torch.randperm(64, generator=seeded(1))
    plain = select(case.make(), scores, seeded(2))
    permuted = select(case.make(), scores[order], seeded(2), order=order)
    weights = dict(zip(order[permuted.rows].tolist(), permuted.weights.tolist(), strict=True))
    assert weights == dict(zip(plain.rows.tolist(), plain.weights.tolist(), strict=True))


@cases_of(SELECTORS, lambda case: case.whole)
def test_keeping_everything_gives_every_row_one_over_n(case):
    # Red when: LossMass ignores min_keep, a fixed count rounds down, or an even draw leaves one out.
    selection = select(case.whole(), scores_of(10), seeded())
    assert selection.rows.tolist() == list(range(10)) and selection.is_everything
    assert selection.weights.tolist() == pytest.approx([0.1] * 10, rel=1e-7)


@cases_of(SELECTORS)
def test_weights_are_never_coarser_than_float32(case):
    # Red when: mean_of builds weights in the scores' dtype, or always in float32.
    for dtype, error in ((torch.bfloat16, 1e-6), (torch.float32, 1e-6), (torch.float64, 1e-12)):
        selection = select(case.make(), scores_of(48).to(dtype), seeded())
        assert selection.weights.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        if selection.even and selection.num_kept:
            assert selection.weights.double().sum().item() == pytest.approx(1, abs=error)


@cases_of(SELECTORS)
def test_scores_with_a_graph_are_only_read(case):
    # Red when: a selector writes into its scores (hardest_first by `scores.neg_()`), or remembers their graph.
    scores = scores_of(12).requires_grad_()
    before = scores.detach().clone()
    selector = case.make()
    selection = select(selector, scores, seeded())
    assert not selection.weights.requires_grad and torch.equal(scores.detach(), before)
    state = selector.state_dict() if isinstance(selector, Stateful) else {}
    assert not any(isinstance(value, Tensor) and value.requires_grad for value in state.values())


@cases_of(SELECTORS)
def test_a_count_known_beforehand_never_waits_for_the_device(case):
    # Red when: a selector calls .item(), nonzero() or bool() on scores: a fake tensor has no data to answer with. Those
    # that say so must read the scores: the check can fail.
    expected = select(case.make(), scores_of(64), seeded()).num_kept
    with FakeTensorMode():
        if case.waits:
            with pytest.raises((DataDependentOutputException, DynamicOutputShapeException)):
                select(case.make(), torch.empty(64))
        else:
            assert select(case.make(), torch.empty(64)).num_kept == expected


@cases_of(SELECTORS)
def test_a_restored_selector_goes_on_bit_for_bit(case):
    # Red when: state_dict leaves something out, hands out the memory itself (later calls would change it), or a
    # wrapper does not pass it on.
    def calls(selector: Any, generator: torch.Generator, seeds: range) -> list[Selection]:
        return [select(selector, scores_of(16, seed) * (seed + 1), generator) for seed in seeds]

    selector, generator = case.make(), seeded(5)
    calls(selector, generator, range(4))
    state, drawn = (selector.state_dict() if isinstance(selector, Stateful) else {}), generator.get_state()
    kept = copy.deepcopy(state)
    later = calls(selector, generator, range(4, 12))
    assert repr(state) == repr(kept)

    restored = case.make()
    if isinstance(restored, Stateful):
        restored.load_state_dict(state)
    for first, second in zip(later, calls(restored, seeded().set_state(drawn), range(4, 12)), strict=True):
        assert same(first, second)


@cases_of(SELECTORS, lambda case: case.of)
def test_a_fraction_may_be_a_schedule(case):
    # Red when: the schedule is asked at another progress or at None, a wrapper does not pass the progress on, or the
    # number of a schedule goes without the check of the constructor.
    scores = scores_of(64)
    moving = case.of(lambda progress: 0.2 + progress / 2)
    for progress in (0.0, 0.3, 1.0):
        fixed = case.of(0.2 + progress / 2)
        known = select(fixed, scores, seeded())
        assert same(select(moving, scores, seeded(), progress=progress), known)
        assert same(select(fixed, scores, seeded(), progress=progress), known)
    with refused("a call without progress was made but the schedule ... needs progress"):
        select(moving, scores, seeded())
    for outside in (1.5, -0.1, math.nan, None, "half"):
        with pytest.raises(InvalidInput) as number:
            case.of(outside)
        with pytest.raises(InvalidInput) as scheduled:
            select(case.of(lambda progress: outside), scores, seeded(), progress=0.5)
        assert str(scheduled.value) == str(number.value)


@cases_of(SELECTORS)
def test_a_keep_known_beforehand_is_the_one_that_is_kept(case):
    # Red when: a wrapper hands on the keep of the selector inside, which is not its own; a keep is asked at another
    # progress; or a batch is called whole, so that the step does not score it, of which the selector leaves rows out.
    made = [case.make, case.whole] if case.whole else [case.make]
    if case.of is not None:
        fractions = (0.07, 0.5, 1.0, lambda progress: 2 * progress)
        made += [lambda keep=keep: case.of(keep) for keep in fractions]
    for make in made:
        for num_rows, seed in [(n, seed) for n in (1, 2, 7, 10, 64, 100) for seed in range(3)]:
            scores, selector = scores_of(num_rows, seed), make()
            if not isinstance(selector, KnownKeep):
                break
            context = laws.context_of(scores, seeded(seed), progress=0.5)
            keep, selection = selector.keep_at(context), selector(scores, context)
            assert keep == keep_of(selector, context) and (keep is None or 0 < keep <= 1)
            if keep == 1:
                assert selection.is_everything
                assert selection.weights.tolist() == pytest.approx([1 / num_rows] * num_rows, rel=1e-6)
            elif isinstance(selector, TopBottom):  # each end is rounded up
                assert count_kept(keep, num_rows) <= selection.num_kept <= count_kept(keep, num_rows) + 1
            elif keep is not None:
                assert selection.num_kept == count_kept(keep, num_rows)


def test_the_selectors_that_know_their_keep():
    # Red when: keep_at is left out (a whole batch is then scored for nothing), or added where the scores decide.
    context = Context(progress=0.5)
    known = {name for name in SELECTORS if keep_of(SELECTORS[name][0].make(), context) is not None}
    assert known == {"Everything", "MaxVariance", "RandomRows", "RankSampling", "TopBottom", "TopK"}
    whole = {name for name, cases in SELECTORS.items() for c in cases if c.whole and keep_of(c.whole(), context)}
    assert whole == known | {"MultipleOf", "OverAll", "PerClass", "ReducibleLoss"}
    assert keep_of(lambda scores: None, context) is None
    with refused("the schedule keep of TopK needs progress"):
        keep_of(TopK(lambda progress: 1.0), Context())


DRAWS = 5000


@pytest.fixture(scope="module")
def small() -> tuple[Tensor, Tensor]:
    """Losses (N,) and gradients (N, P) of a small model, one row at a time; satisfied rows have neither."""
    torch.manual_seed(0)
    model, inputs = torch.nn.Linear(4, 1), torch.randn(24, 4)
    losses = (model(inputs).squeeze(1) + torch.randn(24) + 1).clamp(min=0).square()
    assert 0 < int((losses == 0).sum()) < 12
    grads = [torch.autograd.grad(loss, list(model.parameters()), retain_graph=True) for loss in losses]
    return losses.detach(), torch.stack([torch.cat([part.flatten() for part in grad]) for grad in grads]).double()


@cases_of(SELECTORS)
def test_the_mean_weighted_gradient_is_the_full_one_exactly_where_it_is_promised(case, small):
    # Red when: ImportanceSampling's weights lose their 1/p, or PerClass its n_g/N; and
    # two-sided: red when a biased selector says that it is unbiased.
    losses, grads = small
    selector, generator = case.make(), seeded(1)
    draws = (DRAWS if case.unbiased else DRAWS // 5) if case.draws else 1  # a bias that a fifth shows, all would show
    weights, context = torch.zeros(draws, losses.numel(), dtype=torch.float64), laws.context_of(losses, generator)
    for row in weights:
        selection = selector(losses, context)
        row[selection.rows] = selection.weights.double()
    means = weights @ grads
    error = means.std(0, correction=0) / math.sqrt(draws)
    close = bool(((means.mean(0) - grads.mean(0)).abs() <= 4 * error + 1e-7).all())
    assert close == case.unbiased


@cases_of(SCHEDULES)
def test_schedules_begin_and_end_where_they_say_stay_in_range_and_repeat(case):
    # Red when: Ramp is not held at its ends, a part of Joined begins a step late, or Progress goes beyond 1.
    function = case.make()
    steps = [step / 40 for step in range(41)]
    values = [function(progress) for progress in steps]
    assert (values[0], values[-1]) == (case.first, case.last)
    assert all(case.least - 1e-12 <= value <= case.most + 1e-12 for value in values)
    again = case.make()
    assert [again(progress) for progress in reversed(steps)] == values[::-1]


@cases_of(SCORERS)
def test_scorers_give_a_finite_number_per_row_that_belongs_to_it_and_leave_no_trace(case):
    # Red when: a scorer returns one number per token, orders rows otherwise than the batch, or changes the model.
    model, batch, ids = laws.subject(case.kind)
    before = copy.deepcopy(model.state_dict())

    def scores(order: Tensor) -> Tensor:
        part, scorer = tuple(entry[order] for entry in batch), case.make()
        beside = [Context(ids=ids[order], history=LossHistory())] if wants_context(scorer) else []
        return score_without_graph(lambda model, part: scorer(model, part, *beside), model, part)

    everyone, order = torch.arange(ROWS), torch.randperm(ROWS, generator=seeded())
    generator = torch.get_rng_state()
    found = scores(everyone)
    assert found.shape == (ROWS,) and found.is_floating_point() and not found.requires_grad
    assert bool(found.isfinite().all()) and found.unique().numel() > 1
    assert torch.equal(scores(everyone), found)
    torch.testing.assert_close(scores(order), found[order])
    assert torch.equal(torch.get_rng_state(), generator)
    assert model.training and all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


STOP = 10  # in the middle of the second epoch, of three


@cases_of(RECIPES)
def test_a_killed_recipe_goes_on_bit_for_bit(case, tmp_path: Path):
    # Red when: a part of the state that a later step depends on is not saved; see the next test.
    whole = Training(case)
    whole.train()
    killed, resumed = killed_and_resumed(partial(Training, case), STOP, tmp_path / "state.pt")
    assert len(resumed.trace) >= 5
    assert_nothing_was_lost(whole, killed, resumed)
    assert sum(len(rows) for _, rows, *_ in whole.trace) < EPOCHS * OF_A_TRAINING  # it selects, or prunes


@pytest.mark.parametrize(
    ("name", "index", "part"),
    [
        *[("biggest_losers", 0, part) for part in ("selector", "contributed")],
        ("biggest_losers", 1, "history"),
        *[("infobatch", 0, part) for part in ("history", "sampler")],
        ("kath18", 0, "selector"),
        ("random", 0, "generator"),
    ],
)
def test_a_part_that_is_not_restored_is_seen(name: str, index: int, part: str, tmp_path: Path):
    # The meta-test of the one above: with a fresh part in the place of the saved one, training goes another way.
    case = RECIPES[name][index]
    whole = Training(case)
    whole.train()
    killed, resumed = killed_and_resumed(partial(Training, case), STOP, tmp_path / "state.pt", part)
    assert killed.trace + resumed.trace != whole.trace
