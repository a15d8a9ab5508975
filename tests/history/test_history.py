"""The history remembers as a plain dictionary of rows does; that of several ranks is in ``distributed_worker.py``."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset

import rowprop
from killed import seeded
from rowprop.errors import InvalidInput
from rowprop.history import LossHistory, StaleScorer, WithIds
from rowprop.selection import Context

SIZE = 12
IDS = torch.arange(SIZE)


def known(history: LossHistory, ids: Tensor = IDS) -> dict[str, Tensor]:
    return {
        "loss": history.losses_of(ids),
        "age": history.age_of(ids),
        "count": history.count_of(ids),
        "weight": history.weights_of(ids),
    }


def assert_same(ours: object, theirs: object) -> None:
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)


class Squares(Dataset):
    """Row i is i squared; says how often it was asked for a batch at once."""

    def __init__(self, size: int) -> None:
        self.size, self.fetches = size, 0

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> float:
        return float(index) ** 2


class Fetched(Squares):
    def __getitems__(self, indices: list[int]) -> list[float]:
        self.fetches += 1
        return [self[index] for index in indices]


@pytest.mark.filterwarnings("ignore:This DataLoader will create 2 worker processes")
@pytest.mark.parametrize(("kind", "workers"), [(Squares, 0), (Fetched, 0), (Fetched, 2)])
def test_a_loader_yields_the_ids_of_the_rows_it_yields(kind, workers):
    # Red when: __getitems__ numbers the rows by their place in the batch.
    loader = DataLoader(WithIds(kind(10)), 4, shuffle=True, num_workers=workers, generator=seeded(1))
    batches = list(loader)
    ids = torch.cat([ids for ids, _ in batches])
    assert all(ids.dtype == torch.int64 and ids.dim() == 1 for ids, _ in batches)
    assert ids.tolist() != list(range(10)) and sorted(ids.tolist()) == list(range(10))
    assert torch.cat([rows for _, rows in batches]).tolist() == [float(i) ** 2 for i in ids]


def test_ids_of_a_subset_are_those_of_what_is_wrapped():
    # Red when: the index that was asked for is the id (a -1 then is another row than the last), or __getitems__ is not
    # passed on, so that a batch is not fetched at once.
    places = [7, 2, 5]
    assert list(Subset(WithIds(Squares(9)), places)) == [(7, 49.0), (2, 4.0), (5, 25.0)]
    assert list(WithIds(Subset(Squares(9), places))) == [(0, 49.0), (1, 4.0), (2, 25.0)]
    assert next(iter(DataLoader(Subset(WithIds(Fetched(9)), places), 3)))[0].tolist() == places
    assert WithIds(Squares(9))[-1] == (8, 64.0) and len(WithIds(Squares(9))) == 9
    assert WithIds(data := Fetched(6)).__getitems__([4, -1]) == [(4, 16.0), (5, 25.0)] and data.fetches == 1


class Remembered:
    """The same memory as a plain dictionary, one row at a time."""

    def __init__(self) -> None:
        self.rows: dict[int, dict[str, float]] = {}

    def row(self, number: int) -> dict[str, float]:
        return self.rows.setdefault(number, {"loss": math.nan, "age": 0, "count": 0, "scored": False})

    def store(self, ids: list[int], losses: list[float]) -> None:
        for number, loss in zip(ids, losses, strict=True):
            if not math.isnan(loss):
                self.row(number).update(loss=loss, scored=True)

    def update(self, ids: list[int], losses: list[float], rows: list[int]) -> None:
        for place in rows:
            self.row(ids[place])["count"] += 1
        last = {number: loss for number, loss in zip(ids, losses, strict=True) if not math.isnan(loss)}
        for number in set(ids):
            row = self.row(number)
            row["loss"] = last.get(number, row["loss"])
            row["age"] = 0 if number in last or row["scored"] else row["age"] + 1
            row["scored"] = False


@pytest.mark.parametrize("size", [None, SIZE], ids=["hashed", "dense"])
def test_many_updates_are_what_a_dictionary_remembers(size):
    # Red when: of a repeated row the first loss counts (no stable sort), a NaN is stored or makes a row younger,
    # index_put counts a repeated row once, rows=None counts nothing, an update after a store makes a row a visit older.
    generator = seeded(3)
    history, plain = LossHistory(size), Remembered()
    numbers = IDS if size is not None else torch.randint(-(2**62), 2**62, (SIZE,), generator=generator)
    for step in range(60):
        ids = numbers[torch.randint(SIZE - 2, (8,), generator=generator)]  # two rows are never met
        losses = torch.rand(8, generator=generator)
        losses[torch.rand(8, generator=generator) < 0.7] = math.nan
        if torch.rand((), generator=generator) < 0.5:
            scored = torch.where(torch.rand(8, generator=generator) < 0.2, torch.rand(8, generator=generator), math.nan)
            history.store(ids, scored)
            plain.store(ids.tolist(), scored.tolist())
        rows = torch.randperm(8, generator=generator)[:3].sort().values if step % 2 else None
        history.update(ids, losses.double().requires_grad_(), rows)
        plain.update(ids.tolist(), losses.tolist(), range(8) if rows is None else rows.tolist())
    assert any(plain.row(n)["age"] > 1 for n in numbers.tolist())
    for name in ("loss", "age", "count"):
        ours = known(history, numbers)[name].tolist()
        assert ours == pytest.approx([plain.row(n)[name] for n in numbers.tolist()], rel=0, nan_ok=True), name


def test_a_stranger_has_no_loss_and_the_factor_one():
    # Red when: a table that grows loses factors, or the place for strangers is given to a row.
    history = LossHistory()
    for number in range(40):
        ids = torch.tensor([number, -number - 1])
        history.update(ids, torch.ones(2))
        history.set_weights(ids, torch.tensor([2.0, 3.0]))
    numbers = torch.arange(40)
    assert history.weights_of(numbers).tolist() == [2] * 40 and history.weights_of(-numbers - 1).tolist() == [3] * 40
    stranger = known(history, torch.tensor([10**15]))
    assert math.isnan(stranger["loss"].item()) and stranger["count"].item() == 0 and stranger["weight"].item() == 1


@pytest.mark.usefixtures("as_host")
def test_a_history_on_the_host_looks_at_ids_from_an_accelerator():
    # Red when: only ids that lay on the host before are checked. How often it waits: tests/docs/test_waits.py.
    with FakeTensorMode(allow_non_fake_inputs=True), pytest.raises(DataDependentOutputException):
        LossHistory(SIZE).losses_of(torch.zeros(4, dtype=torch.int64, device="cuda"))


@pytest.mark.parametrize("size", [None, SIZE], ids=["hashed", "dense"])
def test_a_state_continues_bit_for_bit(size):
    # Red when: state_dict hands out its own tensors (later updates then change it), or forgets the ids or the updates.
    generator = seeded(7)
    draws = [(torch.randint(SIZE, (6,), generator=generator), torch.rand(6, generator=generator)) for _ in range(20)]
    whole, half = LossHistory(size), LossHistory(size)
    for ids, losses in draws[:10]:
        whole.update(ids, losses)
    state = whole.state_dict()
    for ids, losses in draws[10:]:
        whole.update(ids, losses)
    half.load_state_dict(state)
    for ids, losses in draws[10:]:
        half.update(ids, losses)
    assert_same(known(half), known(whole))
    assert_same(half.state_dict(), whole.state_dict())


REFUSED: dict[str, Callable[[LossHistory], object]] = {  # by the sentence; the history has num_rows=4
    "WithIds got a object but a data set with places and a length was needed": lambda h: WithIds(object()),
    "WithIds got a Stream but a data set with places and a length was needed": lambda h: WithIds(Stream()),
    "LossHistory got num_rows=0 but a whole number, 1 or more, was needed": lambda h: LossHistory(0),
    "no room for a table of 1000000000000000 rows: LossHistory got num_rows=1000000": lambda h: LossHistory(10**15),
    "LossHistory got device='foo', which cannot be used here: Expected one of": lambda h: LossHistory(device="foo"),
    "LossHistory got the device meta, which remembers no numbers": lambda h: LossHistory(device="meta"),
    "got id 4 but has num_rows=4, ids 0 to 3": lambda h: h.losses_of(torch.tensor([1, 4])),
    "got id -1 but has num_rows=4": lambda h: h.update(torch.tensor([-1]), torch.ones(1)),
    r"ids of shape \(2,\) and dtype torch.float32 but the rows'": lambda h: LossHistory().losses_of(torch.ones(2)),
    "dtype torch.int64 on the device meta but the rows' ids": lambda h: h.losses_of(IDS[:2].to("meta")),
    r"LossHistory.update got losses of shape \(2, 3\)": lambda h: h.update(IDS[:2], torch.ones(2, 3)),
    "turn a mask into indices": lambda h: h.update(IDS[:2], torch.ones(2), torch.ones(2) > 0),
    "got row -1 but places in the batch": lambda h: h.update(IDS[:2], torch.ones(2), torch.tensor([-1])),
    "got row 2 but places in the batch": lambda h: h.update(IDS[:2], torch.ones(2), torch.tensor([2])),
    r"got weights of shape \(1,\) .* for 2 ids": lambda h: h.set_weights(IDS[:2], torch.ones(1)),
    "LossHistory.synchronise got group=5, a int, but a process group or": lambda h: h.synchronise(5),
    r"a state with num_rows=<tensor of shape \(2,\), torch.float32> but has num_rows=4; build it as it was": lambda h: (
        h.load_state_dict(h.state_dict() | {"num_rows": torch.ones(2)})
    ),
    "a state with num_rows=5 but has num_rows=4": lambda h: h.load_state_dict(LossHistory(5).state_dict()),
    "StaleScorer needs history, ": lambda h: stale(Context(ids=IDS)),
    "a call without ids was made but StaleScorer needs ids": lambda h: stale(Context()),
}


@pytest.mark.parametrize("sentence", REFUSED)
@pytest.mark.usefixtures("as_host")  # a device's values are not looked at: torch refuses them
def test_bad_input_is_refused_in_one_sentence(sentence: str):
    with pytest.raises(InvalidInput, match=sentence):
        REFUSED[sentence](LossHistory(4))


@pytest.mark.parametrize("method", ["losses_of", "update", "store", "set_weights"])
def test_ids_that_are_no_tensor_are_refused_by_every_method(method: str):
    with pytest.raises(InvalidInput, match="got a list but the rows' ids were needed"):
        getattr(LossHistory(4), method)([0], *[torch.ones(1)] * (method != "losses_of"))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -0.5, 1e300], ids=str)
def test_factors_that_no_loss_can_be_multiplied_by_are_refused_and_none_is_set(bad):
    # Red when: `_check_factors` is not asked, or asked before the factors are float32 (1e300 is infinite there).
    history, ids = LossHistory(4), torch.arange(4)
    with pytest.raises(InvalidInput, match="finite factors of at least 0 were needed: each multiplies the loss of its"):
        history.set_weights(ids, torch.tensor([2.0, 2.0, bad, 2.0], dtype=torch.float64))
    assert history.weights_of(ids).tolist() == [1, 1, 1, 1]
    history.set_weights(ids, torch.tensor([2.0, 0.0, 1.0, 1.0]))
    assert history.weights_of(ids).tolist() == [2, 0, 1, 1]


BROKEN = {  # by a part of the sentence: how the state is changed
    "a list, but the mapping of state_dict": lambda state: [state],
    "a state without age but all": lambda state: {k: v for k, v in state.items() if k != "age"},
    r"loss of the kind \(9,\), torch.float32 but a tensor of": lambda state: state | {"loss": torch.zeros(9)},
    "count of the kind": lambda state: state | {"count": state["count"].float()},
    "age of the kind a list but": lambda state: state | {"age": state["age"].tolist()},
    "updates='a' but a whole number, 0 or more": lambda state: state | {"updates": "a"},
    "updates=-1 but a whole number, 0 or more": lambda state: state | {"updates": -1},
    "the weight nan but finite factors": lambda state: state | {"weight": state["weight"] * math.nan},
}
BROKEN_IDS = {
    "got an id twice but each row has one entry": lambda state: state | {"ids": torch.tensor([7, 7])},
    r"loss of the kind \(3,\), torch.float32 but a tensor of shape \(2,\)": lambda state: (
        state | {"ids": torch.tensor([7])}
    ),
}


@pytest.mark.parametrize(
    ("sentence", "size"), [*((b, size) for b in BROKEN for size in (None, 4)), *((b, None) for b in BROKEN_IDS)]
)
def test_a_state_that_no_history_can_have_made_is_refused_and_nothing_is_loaded(sentence: str, size: int | None):
    # Red when: a check is left out, or the columns are replaced one by one while they are checked; ids are not counted
    # against the columns, or one may come twice.
    saved, history = LossHistory(size), LossHistory(size)
    saved.update(torch.tensor([2, 0]), torch.tensor([0.5, 1.5]))
    history.update(torch.tensor([1, 3]), torch.tensor([3.0, 4.0]))
    before = history.state_dict()
    with pytest.raises(InvalidInput, match=sentence):
        history.load_state_dict((BROKEN | BROKEN_IDS)[sentence](saved.state_dict()))
    assert_same(history.state_dict(), before)
    history.load_state_dict(saved.state_dict())
    assert_same(history.state_dict(), saved.state_dict())


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(3))


def losses_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return (model(batch[0]).squeeze(1) - batch[1]).square()


def stale(context: object) -> Tensor:
    return StaleScorer(losses_fn)(None, IDS, context)


class Clock:
    """A losses function whose losses tell the visit and the row; it writes down the rows it is called on."""

    def __init__(self) -> None:
        self.now, self.asked = 0, []

    def __call__(self, model: object, batch: Tensor) -> Tensor:
        self.asked.append(batch.tolist())
        return batch + self.now / 100


@pytest.mark.parametrize("staleness", [1, 2, 3])
def test_a_row_is_scored_at_every_nth_visit_or_when_it_has_no_loss(staleness):
    # Red when: the comparison is strict, `+ 1` is dropped, or the visit that stores a score ages it; a row is scored
    # alone, which BatchNorm in training refuses.
    # StaleSB's rule: visits since the last score, counted before this visit's decision, reach the staleness.
    history, clock = LossHistory(), Clock()
    scorer = StaleScorer(clock, staleness)
    since, at, joined = dict[int, int](), dict[int, int](), 0
    generator = seeded(2)
    for visit in range(30):
        clock.now, clock.asked = visit, []
        batch = torch.randperm(40, generator=generator)[: 5 if visit % 2 else 20]
        expected = []
        for row in batch.tolist():
            since[row] = since.get(row, staleness) + 1
            if since[row] >= staleness:
                expected.append(row)
        if len(expected) == 1:  # joined by its neighbour
            place = batch.tolist().index(expected[0])
            expected.append(batch.tolist()[(place + 1) % len(batch)])
            joined += 1
        for row in expected:
            since[row], at[row] = 0, visit
        scores = scorer(None, batch, Context(ids=batch, history=history))
        assert sorted(row for asked in clock.asked for row in asked) == sorted(expected)
        assert len(clock.asked) == (len(expected) > 0)
        torch.testing.assert_close(scores, torch.tensor([row + at[row] / 100 for row in batch.tolist()]))
        history.update(batch, torch.full((len(batch),), math.nan))
    assert joined or staleness == 1


def test_an_infinite_loss_is_known():
    # Red when: a loss that is not finite counts as never computed (`~isfinite()` for `isnan()`): a forward per visit.
    history, clock, batch = LossHistory(4), Clock(), torch.arange(4)
    history.update(batch, torch.tensor([math.inf, 5.0, -math.inf, 5.0]))
    context = Context(ids=batch, history=history)
    assert StaleScorer(clock, 9)(None, batch, context).tolist() == [math.inf, 5.0, -math.inf, 5.0]
    assert clock.asked == []


def test_where_ranks_must_run_as_many_forwards_two_rows_are_always_scored(monkeypatch):
    # Red when: a rank that knows all its rows runs no forward, and the other ranks wait for it.
    history, clock = LossHistory(4), Clock()
    scorer, batch = StaleScorer(clock, 9), torch.arange(4)

    def scored(ids: Tensor) -> list[float]:
        return scorer(None, ids, Context(ids=ids, history=history)).tolist()

    history.update(batch, torch.full((4,), 5.0))
    assert scored(batch) == [5.0] * 4 and clock.asked == []
    monkeypatch.setattr("rowprop.history.lookup.averages_gradients", lambda model: True)
    assert scored(batch) == [0.0, 1.0, 5.0, 5.0] and clock.asked == [[0, 1]]
    assert scored(batch[2:3]) == [2.0] and clock.asked[1:] == [[2]]


def test_the_step_scores_by_old_losses_and_trains_on_the_rest():
    # Red when: the step's update comes before the scorer's store, or ages the losses that the scorer has stored.
    model, history, seen = nn.Linear(3, 1), LossHistory(8), []

    def counted(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        seen.append((len(batch[1]), torch.is_grad_enabled()))
        return losses_fn(model, batch)

    options = {"scorer": StaleScorer(counted, 3), "history": history, "engine": "recompute"}
    selective = rowprop.SelectiveBackprop(model, counted, rowprop.TopK(0.25), **options)
    ids, batch = torch.arange(8), (torch.randn(8, 3), torch.randn(8))
    hardest = losses_fn(model, batch).topk(2).indices.sort().values
    easy = [row for row in range(8) if row not in hardest.tolist()]
    for visit in range(4):  # no optimizer: the losses stay as they are
        _, record = selective(batch, ids=ids)
        assert torch.equal(record.selection.rows, hardest)
        assert history.age_of(hardest).tolist() == [0, 0]
        assert history.age_of(torch.tensor(easy)).tolist() == [visit % 3] * 6
    assert seen == [(8, False), (2, True), (2, True), (2, True), (6, False), (2, True)]
    torch.testing.assert_close(history.losses_of(ids), losses_fn(model, batch).detach())
    assert history.count_of(ids).tolist() == [4 if row in hardest.tolist() else 0 for row in range(8)]
