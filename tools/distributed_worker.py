"""The worlds that test_distributed.py starts: forks of this process, which write their figures to ``FOLDER/RANK.json``.

Each check compares the ranks together with one process that has the whole batch, plain indexing, and no process group.
Figures are largest absolute differences; all else is asserted here.
"""

from __future__ import annotations

import itertools
import json
import math
import multiprocessing
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.distributed.nn.functional  # dist.nn is not imported with dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import parallel_models
import rowprop
from rowprop.cost.flops import count_flops
from rowprop.distributed import Global, Local, mean
from rowprop.engines import Sliced
from rowprop.history import LossHistory, PruningSampler, ReducibleLoss, StaleScorer
from rowprop.selection import Context, PerClass
from step_cases import Shift, backpropagated, given_losses
from token_models import Decoder, cut_attention

SIZES = {2: (5, 9), 4: (3, 6, 4, 5)}  # N of each rank
WRAPPERS = ("ddp", "fsdp")
ENGINES = ("sliced", "masked", "recompute")

Batch = tuple[Tensor, Tensor]
Figures = Iterator[tuple[str, float]]
Check = Callable[[], Figures | None]
CHECKS: list[Check] = []


def check(function: Check) -> Check:
    CHECKS.append(function)
    return function


class Net(nn.Module):
    """A block of attention between two layers; three tokens a row, four classes of the row or of each token."""

    def __init__(self, dtype: torch.dtype = torch.float32, *, tokens: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens = tokens
        self.inner = nn.Linear(5, 8, dtype=dtype)
        self.block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, dtype=dtype)
        self.outer = nn.Linear(8, 4, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        h = self.block(self.inner(x))
        return self.outer(h if self.tokens else h.mean(1))


def losses_of(model: nn.Module, batch: Batch) -> Tensor:
    assert len(batch[1]) > 0  # which many models do not survive
    return cross_entropy(model(batch[0]), batch[1], reduction="none")


def world() -> int:
    return dist.get_world_size()


def batch_of(seed: int, *, hard: int | None = None, dtype: torch.dtype = torch.float32) -> list[Batch]:
    """A batch per rank; with ``hard``, the rows of that rank have by far the largest losses."""
    generator = torch.Generator().manual_seed(seed)
    parts = []
    for rank, size in enumerate(SIZES[world()]):
        x = torch.randn(size, 3, 5, generator=generator).to(dtype)
        y = torch.randint(4, (size,), generator=generator)
        if hard is not None:
            y = Net(dtype)(x).argmin(1) if rank == hard else Net(dtype)(x).argmax(1)
        parts.append((x, y))
    return parts


def whole(parts: list[Batch]) -> Batch:
    return torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts])


def sharded(model: nn.Module, *replicas: int) -> nn.Module:
    """FSDP2 over all ranks, or HSDP: so many replicas, each over its part of the ranks."""
    sizes = *replicas, world() // math.prod(replicas)
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("replicas", "shards")[-len(sizes) :])
    for child in model.children():
        for each in child if isinstance(child, nn.ModuleList) else [child]:
            fully_shard(each, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def wrapped(wrapper: str, model: nn.Module) -> nn.Module:
    if wrapper == "ddp":
        return DistributedDataParallel(model)
    return sharded(model, *([world() // 2] if wrapper == "hsdp" else []))


def inside(model: nn.Module) -> nn.Module:
    return model.module if isinstance(model, DistributedDataParallel) else model


def synchronising(model: nn.Module, now: bool) -> Any:
    """The ranks exchange gradients in a backward within, or in a later one."""
    if isinstance(model, DistributedDataParallel):
        return nullcontext() if now else model.no_sync()
    model.set_requires_gradient_sync(now)
    return nullcontext()


def dense(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def step_of(
    model: nn.Module, selector: Any, ranks: Any = None, losses_fn: Any = losses_of, **options: Any
) -> rowprop.SelectiveBackprop:
    return rowprop.SelectiveBackprop(model, losses_fn, selector, ranks=ranks or Global(), **options)


def grads_of(model: nn.Module) -> list[Tensor]:
    grads = [parameter.grad for parameter in model.parameters()]
    assert all(grad is not None for grad in grads)
    return [dense(grad) for grad in grads]


def difference(ours: list[Tensor], theirs: list[Tensor]) -> float:
    assert max(float(tensor.abs().max()) for tensor in theirs) > 1e-2  # or there would be nothing to compare
    return max(float((a - b).abs().max()) for a, b in zip(ours, theirs, strict=True))


def truth(loss_of: Callable[[nn.Module], Tensor], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """The gradient that one process has."""
    model = Net(dtype)
    loss_of(model).backward()
    return grads_of(model)


def averaged(value: Tensor) -> Tensor:
    value = value.detach().clone()
    dist.all_reduce(value)
    return value / world()


def everyones(value: Any) -> list[Any]:
    out: list[Any] = [None] * world()
    dist.all_gather_object(out, value)
    return out


def refuses(call: Callable[[], object], words: str = "", kind: str = "InvalidInput") -> None:
    try:
        call()
    except Exception as error:
        assert type(error).__name__ == kind and words in str(error), error
    else:
        raise AssertionError(f"nothing was refused with {words}")


def refuses_on(rank: int, call: Callable[[], object], others: str = "") -> None:
    """This rank has what is wrong, and the others say that it failed."""
    own = dist.get_rank() == rank
    refuses(call, "" if own else others, "InvalidInput" if own else "RankFailed")


def proportional(scores: Tensor, context: Context) -> rowprop.Selection:
    """The rows above the median, weighted by their scores."""
    rows = (scores > scores.median()).nonzero().squeeze(1)
    return rowprop.Selection(rows, scores[rows] / scores.sum(), scores.numel())


def over_all(scores: Tensor, context: Context) -> rowprop.Selection:
    """The rows above the median, with the weights that they have in the mean over all N."""
    rows = (scores > scores.median()).nonzero().squeeze(1)
    return rowprop.Selection(rows, torch.full((rows.numel(),), 1 / scores.numel()), scores.numel(), unbiased=True)


def hardest_quarter(losses: list[Tensor]) -> Tensor:
    everyone = torch.cat(losses)
    return everyone.topk(-(-len(everyone) // 4)).values


def top_of_all(losses: list[Tensor]) -> Tensor:
    return hardest_quarter(losses).mean()


def above_own_mean(losses: list[Tensor]) -> Tensor:
    return torch.cat([part[part > part.mean()] for part in losses])


def above_own_median_over_all(losses: list[Tensor]) -> Tensor:
    return torch.cat([part[part > part.median()] for part in losses]).sum() / sum(map(len, losses))


def weighted_of_all(losses: list[Tensor]) -> Tensor:
    everyone = torch.cat(losses)
    scores = everyone.detach()
    return (everyone * scores / scores.sum())[scores > scores.median()].sum()


SELECTIONS = {
    "global": (rowprop.TopK(0.25), Global(), top_of_all),
    "local": (rowprop.selection.AboveMean(), Local(), lambda losses: above_own_mean(losses).mean()),
    "unbiased": (over_all, Local(), above_own_median_over_all),
    "weighted": (proportional, Global(), weighted_of_all),
}


@check
def gradients() -> Figures:
    """The step: every wrapper, engine and way to select; rows spread over the ranks, or all on one of them."""
    rank = dist.get_rank()
    ways = itertools.product(WRAPPERS, ENGINES if world() == 2 else ENGINES[:1], SELECTIONS, (None, world() - 1))
    for wrapper, engine, name, hard in ways:
        selector, ranks, union = SELECTIONS[name]
        parts, model = batch_of(1, hard=hard), wrapped(wrapper, Net())
        with rowprop.watch() as report:
            loss, record = backpropagated(step_of(model, selector, ranks, engine=engine)(parts[rank]))
        if hard is not None and name == "global":
            assert [kept > 0 for kept in record.kept_by_rank] == [r == hard for r in range(world())]
            assert record.imbalance == world()
        assert record.num_kept == record.kept_by_rank[rank] == record.selection.num_kept
        assert bool(report.sliced) == (engine == "sliced" and record.num_kept < record.num_rows), report
        assert not report.densified, report

        losses = [losses_of(Net(), part).detach() for part in parts]
        torch.testing.assert_close(record.loss_all, torch.cat(losses).mean())
        torch.testing.assert_close(averaged(loss), union(losses))
        expected = truth(lambda net: union([losses_of(net, part) for part in parts]))
        where = "spread" if hard is None else "on one rank"
        yield f"{wrapper}, {engine}, {name}, {where}", difference(grads_of(model), expected)


@check
def compiled() -> Figures:
    """Compiled with the rowprop backend, and wrapped before or after."""

    def compile_model(model: nn.Module) -> nn.Module:
        torch._dynamo.reset()
        return torch.compile(model, backend="rowprop", options={"kernels": "eager"})

    makers = {
        "ddp around compiled": lambda: DistributedDataParallel(compile_model(Net())),
        "ddp compiled": lambda: compile_model(wrapped("ddp", Net())),
        "fsdp2 compiled": lambda: compile_model(wrapped("fsdp2", Net())),
    }
    parts = batch_of(1)
    expected = truth(lambda net: top_of_all([losses_of(net, part) for part in parts]))
    for name, make in makers.items() if world() == 2 else ():
        model = make()
        with rowprop.watch() as report:
            backpropagated(step_of(model, rowprop.TopK(0.25), engine="sliced")(parts[dist.get_rank()]))
        assert report.sliced and not report.densified, f"{name}: {report}"
        yield name, difference(grads_of(model), expected)


@check
def accumulation() -> Figures:
    """A quota that all ranks fill together, in micro-batches without synchronisation but for the last."""
    rank = dist.get_rank()
    for wrapper, engine in itertools.product(WRAPPERS, ENGINES if world() == 2 else ENGINES[:1]):
        model, alone = wrapped(wrapper, Net()), Net()
        ours = step_of(model, rowprop.TopK(0.25), engine=engine, accumulate_to=7)
        theirs = rowprop.SelectiveBackprop(alone, losses_of, rowprop.TopK(0.25), engine="masked", accumulate_to=7)
        ready = worst = 0.0
        for seed in range(4):
            parts = batch_of(10 + seed, hard=0 if seed == 1 else None)
            _, alone_record = backpropagated(theirs(whole(parts)))
            with synchronising(model, alone_record.ready):
                _, record = backpropagated(ours(parts[rank]))
            assert record.ready == alone_record.ready
            assert record.contributed == alone_record.contributed
            if record.ready:
                ready += 1
                worst = max(worst, difference(grads_of(model), grads_of(alone)))
                model.zero_grad()
                alone.zero_grad()
        assert ready >= 2
        yield f"{wrapper}, {engine}, quota", worst


@check
def draws() -> None:
    """A global draw follows the seed of the first rank alone; a local draw follows the seed of its rank."""
    rank, sizes = dist.get_rank(), SIZES[world()]

    def drawn(keep: float, rows: int, seed: int, select: Any = None) -> Tensor:
        selector, context = rowprop.RandomRows(keep), Context(generator=torch.Generator().manual_seed(seed))
        scores = torch.zeros(rows)
        return (selector(scores, context) if select is None else select(selector, scores, context)).rows

    ours = drawn(0.5, sizes[rank], 100 + rank, Global().select) + sum(sizes[:rank])
    assert torch.cat(everyones(ours)).tolist() == drawn(0.5, sum(sizes), 100).tolist()
    local = everyones(drawn(0.25, 64, 100 + rank, Local().select))
    assert all(torch.equal(rows, drawn(0.25, 64, 100 + other)) for other, rows in enumerate(local))
    assert len({tuple(rows.tolist()) for rows in local}) == world()


@check
def histories() -> None:
    """Ranks end with the newest entry of each row, and draw alike from what each of them learned.

    Red when: the largest loss counts instead of the latest, synchronising twice adds the counts twice, or the sampler
    does not synchronise the history before it draws; `newest &= mine["age"] == age` is dropped (the lowest rank's loss
    would go with another's age), or an exchange without news stamps rows that nobody stored (the entry of the lowest
    rank, which has no loss, would win the tie).
    """
    row, first = torch.tensor([0]), dist.get_rank() == 0
    history = LossHistory(3)  # of entries of one update the one visited most since counts
    history.update(row, torch.tensor([1.0 if first else 2.0]))
    history.update(*((row + 1, torch.tensor([5.0])) if first else (row, torch.tensor([torch.nan]))))
    history.synchronise()
    assert history.losses_of(torch.arange(2)).tolist() == [2, 5] and history.age_of(row).item() == 1
    assert history.count_of(row).item() == 1 + 2 * (world() - 1)
    history = LossHistory(3)
    history.synchronise()
    history.update(*((row + 1, torch.tensor([5.0])) if first else (row, torch.tensor([2.0]))))
    history.synchronise()
    assert history.losses_of(torch.arange(2)).tolist() == [2, 5]

    rank, ids, generator = dist.get_rank(), torch.arange(8), torch.Generator().manual_seed(9)
    visits = []
    for _ in range(7):
        losses = torch.rand(world(), 3, generator=generator)
        losses[torch.rand(world(), 3, generator=generator) < 0.3] = torch.nan
        visits.append([(torch.randperm(7, generator=generator)[:3], each, torch.tensor([0, 2])) for each in losses])

    entries: list[dict[int, tuple[int, int, float]]] = [{} for _ in range(world())]  # step, visits since, loss
    counts = [0] * 8

    def exchange() -> None:
        for row in range(8):
            held = [(*of[row][:2], -holder, of[row]) for holder, of in enumerate(entries) if row in of]
            for of in entries if held else ():
                of[row] = max(held)[3]

    for step, by_rank in enumerate(visits):
        for of, (rows, losses, chosen) in zip(entries, by_rank, strict=True):
            for place, (row, loss) in enumerate(zip(rows.tolist(), losses.tolist(), strict=True)):
                counts[row] += place in chosen.tolist()
                if not math.isnan(loss):
                    of[row] = (step, 0, loss)
                elif row in of:
                    of[row] = (of[row][0], of[row][1] + 1, of[row][2])
        if step % 3 == 2:
            exchange()
    exchange()
    assert len(entries[0]) == 7
    for size in (8, None):
        history = LossHistory(size)
        for step, by_rank in enumerate(visits):
            history.update(*by_rank[rank])
            if step % 3 == 2:
                history.synchronise()
        history.synchronise()
        history.synchronise()  # without news it changes nothing
        expected = torch.tensor([entries[0].get(row, (0, 0, torch.nan))[2] for row in range(8)])
        torch.testing.assert_close(history.losses_of(ids), expected, equal_nan=True)
        assert history.count_of(ids).tolist() == counts
        columns = [history._read(name, ids) for name in ("loss", "age", "count", "shared", "stamp")]
        for theirs in everyones(columns):
            torch.testing.assert_close(columns, theirs, rtol=0, atol=0, equal_nan=True)

        sampler = PruningSampler(history, num_rows=8, epochs=10, num_replicas=world(), rank=rank, seed=4)
        for by_rank in visits[:3]:
            orders, weights = everyones(list(sampler)), history.weights_of(ids)
            assert all(torch.equal(weights, theirs) for theirs in everyones(weights)) and (weights == 0).any()
            assert len({len(order) for order in orders}) == 1
            drawn_rows = sorted(row for order in orders for row in order)
            assert sorted({*drawn_rows}) == weights.nonzero().squeeze(1).tolist()
            assert len(drawn_rows) - len({*drawn_rows}) < world()  # the rows that fill up
            history.update(*by_rank[rank])


@check
def policies() -> Figures:
    """The other ranks, when one has a NaN, a schedule is not active, or one rank has all the kept rows."""
    rank, last = dist.get_rank(), world() - 1
    values = [torch.arange(1.0, 5.0) + 10 * (last - r) for r in range(world())]
    values[last][1] = torch.nan
    top = rowprop.TopK(0.25)

    def step(ranks: Any, selector: Any, model: nn.Module | None = None, **options: Any) -> Any:
        model = DistributedDataParallel(Shift()) if model is None else model
        return step_of(model, selector, ranks, given_losses, **options)(values[rank])

    refuses_on(0, lambda: step(Global(), top))
    refuses_on(last, lambda: step(Local(), top), f"rank {last} of the group could not select")

    # Dropped: the last rank keeps nothing, and the row that goes along is not the one with the NaN.
    for engine in ("sliced", "recompute"):
        model, alone = DistributedDataParallel(Shift()), Shift()
        loss, record = backpropagated(step(Global(), top, model, nonfinite="drop", engine=engine))
        one = rowprop.SelectiveBackprop(alone, given_losses, top, nonfinite="drop")
        expected, expected_record = backpropagated(one(torch.cat(values)))
        assert record.kept_by_rank[last] == 0 and sum(record.kept_by_rank) == expected_record.num_kept
        torch.testing.assert_close(record.loss_all, expected_record.loss_all)
        torch.testing.assert_close(averaged(loss), expected.detach())
        torch.testing.assert_close(model.module.weight.grad, alone.weight.grad)
    assert torch.isnan(record.loss_kept) == (record.num_kept == 0)
    loss, _ = step(Local(), over_all, nonfinite="drop")
    finite = [part[part.isfinite()] for part in values]
    torch.testing.assert_close(averaged(loss), above_own_median_over_all(finite))
    loss, record = step(Local(), rowprop.TopK(1.0), nonfinite="drop")
    torch.testing.assert_close(averaged(loss), expected_record.loss_all)
    torch.testing.assert_close(record.loss_all, expected_record.loss_all)
    for mark in (torch.nan, torch.inf):  # a scorer that sees nothing wrong with the loss of that row
        values[last][1] = mark
        scorer = lambda model, batch: torch.arange(4.0)  # noqa: E731
        assert step(Global(), rowprop.TopK(1.0), nonfinite="drop", scorer=scorer)[1].kept_by_rank[last] == 3

    values[last][:] = torch.nan
    refuses(lambda: step(Global(), top, nonfinite="drop"), f"All rows of rank {last}")

    parts = batch_of(3)  # outside of the schedule, every row of an uneven batch counts alike
    expected = truth(lambda net: losses_of(net, whole(parts)).mean())
    for name, ranks, options in (("local", Local(), {}), ("global", Global(), {"engine": "recompute"})):
        model = wrapped("ddp", Net())
        whole_batch = step_of(model, top, ranks, schedule=rowprop.schedule.Schedule(), total_steps=9, **options)
        _, record = backpropagated(whole_batch(parts[rank]))
        assert record.kept_by_rank == SIZES[world()]
        yield f"whole batches, {name}", difference(grads_of(model), expected)


@check
def ids_and_classes() -> Figures:
    """Ids and classes are gathered with the scores: the ranks select as one process with all rows does."""
    rank, sizes = dist.get_rank(), SIZES[world()]
    parts = batch_of(6)
    everyone = sum(sizes)
    irreducible = torch.rand(2 * everyone, generator=torch.Generator().manual_seed(8))
    ids = torch.randperm(2 * everyone, generator=torch.Generator().manual_seed(9))[:everyone]
    mine, classes = ids.split(sizes)[rank], whole(parts)[1]
    for name, selector in {
        "a quota per class": PerClass(rowprop.TopK(0.3)),
        "reducible losses": ReducibleLoss(rowprop.TopK(0.3), irreducible),
        "both": ReducibleLoss(PerClass(rowprop.RandomRows(0.4)), irreducible),
    }.items():
        seeds = [torch.Generator().manual_seed(100 + other) for other in (rank, 0)]
        model, alone = wrapped("ddp", Net()), Net()
        step = step_of(model, selector, engine="sliced", generator=seeds[0])
        _, record = backpropagated(step(parts[rank], ids=mine, classes=parts[rank][1]))
        one = rowprop.SelectiveBackprop(alone, losses_of, selector, engine="masked", generator=seeds[1])
        _, record_alone = backpropagated(one(whole(parts), ids=ids, classes=classes))
        together = torch.cat(everyones(record.selection.rows + sum(sizes[:rank])))
        assert together.tolist() == record_alone.selection.rows.tolist(), name
        weights = torch.cat(everyones(record.selection.weights)) / world()
        torch.testing.assert_close(weights, record_alone.selection.weights)
        yield name, difference(grads_of(model), grads_of(alone))

    step = step_of(Shift(), rowprop.TopK(0.5), losses_fn=given_losses)
    for field in ("ids", "classes"):  # of the last rank alone: refused everywhere, and nobody waits
        beside = {field: torch.arange(4)} if rank == world() - 1 else {}
        words = "ids or classes came on some ranks only but all ranks"
        refuses(lambda: step(torch.arange(4.0), **beside), words)
        refuses(lambda: Global().select(rowprop.TopK(0.5), torch.arange(4.0), Context(**beside)), words)
    step(torch.arange(4.0), ids=torch.arange(4), classes=torch.arange(4))

    # Without them, the first rank cannot select, and says why.
    refuses_on(0, lambda: Global().select(PerClass(rowprop.TopK(0.5)), torch.arange(4.0)))


def token_losses(model: nn.Module, batch: Batch) -> Tensor:
    return cross_entropy(model(batch[0]).transpose(1, 2), batch[1], reduction="none")


@check
def tokens() -> Figures:
    """Steps on tokens: ranks with other numbers of tokens that count, and one on which none counts."""
    rank = dist.get_rank()
    generator = torch.Generator().manual_seed(12)
    parts = [(x, torch.randint(4, x.shape[:2], generator=generator)) for x, _ in batch_of(11)]
    some = [torch.rand(y.shape, generator=generator) < 0.7 for _, y in parts]
    masks = {"some": some, "none on the last rank": [*some[:-1], torch.zeros_like(some[-1])]}
    ways = (Global(), rowprop.TopK(0.25), hardest_quarter), (Local(), rowprop.selection.AboveMean(), above_own_mean)
    for wrapper, (name, counted), options, (ranks, selector, kept_of) in itertools.product(
        WRAPPERS, masks.items(), ({}, {"nonfinite": "drop"}), ways
    ):
        net = Net(tokens=True)
        losses = [token_losses(net, part)[mask] for part, mask in zip(parts, counted, strict=True)]
        kept = kept_of(losses)
        kept.mean().backward()
        model = wrapped(wrapper, Net(tokens=True))
        step = step_of(model, selector, ranks, token_losses, unit="token", engine="sliced", **options)
        _, record = backpropagated(step(parts[rank], counted=counted[rank]))
        what = f"{wrapper}, {type(ranks).__name__}, {name}{', drop' * bool(options)}"
        yield what, difference(grads_of(model), grads_of(net))
        yield f"{what}, loss of all", abs(float(record.loss_all - torch.cat(losses).mean().detach()))
        assert sum(record.kept_by_rank) == len(kept)
        assert record.num_rows == int(counted[rank].sum())

    # Positions are gathered beside the ids, for parts that know tokens by both.
    def earliest(scores: Tensor, context: Context) -> rowprop.Selection:
        return rowprop.TopK(1 / 6)(-(100.0 * context.positions + context.ids), context)

    tokenwise = partial(step_of, Shift(), earliest, losses_fn=given_losses, unit="token", engine="sliced")
    record = tokenwise()(torch.rand(2, 3), ids=torch.tensor([rank, world() + rank]))[1]
    assert record.selection.rows.tolist() == [0]  # the first token of each rank's first row
    for ranks in (Global(), Local()):
        loss, record = tokenwise(ranks=ranks)(torch.rand(2, 3), counted=torch.zeros(2, 3, dtype=torch.bool))
        assert float(loss.detach()) == 0 and sum(record.kept_by_rank) == 0 and record.loss_all.isnan()


def checkpointed() -> Decoder:
    model = Decoder(packed=True)
    model.through = partial(checkpoint, use_reentrant=False)
    return model


DECODERS: dict[str, Callable[[], nn.Module]] = {
    "ddp": lambda: DistributedDataParallel(Decoder(packed=True)),
    "ddp, static": lambda: DistributedDataParallel(Decoder(packed=True), static_graph=True),
    "ddp, unused": lambda: DistributedDataParallel(Decoder(packed=True), find_unused_parameters=True),
    "ddp, checkpoints": lambda: DistributedDataParallel(checkpointed(), gradient_as_bucket_view=True),
    "fsdp": lambda: wrapped("fsdp", Decoder(packed=True)),
    "fsdp, checkpoints": lambda: wrapped("fsdp", checkpointed()),
}


@check
def masks_of_tokens() -> Figures:
    """``pick`` and ``mean`` without the step, with masks, exact and cut: other counts on each rank; two micro-batches.

    Red when: the count of all ranks is clamped to their number ("one of all").
    """
    rank = dist.get_rank()
    generator = torch.Generator().manual_seed(13)
    parts = [tuple(torch.randint(50, (2, size, 6), generator=generator)) for size in SIZES[world()]]
    uneven = [torch.rand(y.shape, generator=generator) < 0.3 + 0.1 * place for place, (_, y) in enumerate(parts)]
    one, *none = (torch.zeros_like(mask) for mask in uneven)
    one[0, 2] = True
    masks = {"uneven": uneven, "none on the last rank": [*uneven[:-1], none[-1]], "one of all": [one, *none]}
    decoders = DECODERS if world() == 2 else {wrapper: DECODERS[wrapper] for wrapper in WRAPPERS}
    for (wrapper, make), (name, kept), attention in itertools.product(
        decoders.items(), masks.items(), ("exact", "cut")
    ):
        net, other, here = Decoder(packed=True), Decoder(packed=True), torch.cat(kept)
        by_hand = partial(net, attention=cut_attention(here)) if attention == "cut" else net
        losses = token_losses(by_hand, whole(parts))[here]
        losses.mean().backward()
        token_losses(other, whole(parts))[here].mean().backward()
        assert (difference(grads_of(other), grads_of(net)) > 1e-4) == (attention == "cut")
        model, micros = make(), 1 if "static" in wrapper else 2
        for micro in range(micros):  # the same twice
            with synchronising(model, micro == micros - 1):
                picked = rowprop.pick(token_losses(model, parts[rank]), kept[rank], attention=attention)
                with rowprop.watch() as report:
                    mean(picked).backward()
        assert report.sliced and (attention == "exact" or not report.densified), report
        torch.testing.assert_close(averaged(mean(picked)), losses.mean().detach())
        yield f"{wrapper}, {name}, {attention}", difference([g / micros for g in grads_of(model)], grads_of(net))
        # Each rank's own mean counts by its share of the kept tokens.
        model = make()
        own = rowprop.pick(token_losses(model, parts[rank]), kept[rank], attention=attention)
        share = world() * own.numel() / sum(int(of.sum()) for of in kept)
        (own.sum() / max(1, own.numel()) * share).backward()
        yield f"{wrapper}, {name}, {attention}, by shares", difference(grads_of(model), grads_of(net))

    nothing = mean(torch.zeros(0, requires_grad=True))
    assert nothing.item() == 0
    nothing.backward()


@check
def facts() -> Figures:
    """Weights of 1/K count each kept row alike; unbiased ones, even with 1/K, and those of classes, each rank by its N.

    Red when: `chosen.even` is dropped from the choice of the parts.
    """
    rank, sizes = dist.get_rank(), SIZES[world()]
    values = [torch.arange(1.0, size + 1) ** (2 + other) for other, size in enumerate(sizes)]
    own = Context(generator=torch.Generator().manual_seed(rank))

    drawn = Local().select(rowprop.RandomRows(0.5), values[rank], own)
    assert drawn.unbiased and Local().select(over_all, values[rank]).unbiased
    assert not Local().select(rowprop.selection.AboveMean(), values[rank]).unbiased
    expected = sum(values[r][rows].mean() * sizes[r] for r, rows in enumerate(everyones(drawn.rows))) / sum(sizes)
    averaged_sum = averaged((values[rank][drawn.rows] * drawn.weights).sum())
    yield "1/K and unbiased", float((averaged_sum / expected - 1).abs())
    assert Global().select(rowprop.RandomRows(0.5), values[rank], own).unbiased
    assert not Global().select(rowprop.TopK(0.5), values[rank]).unbiased

    by_class = Local().select(
        PerClass(rowprop.TopK(1 / 3)), values[rank], Context(classes=torch.arange(sizes[rank]) % 2)
    )
    classes = [part for all_rows in values for part in (all_rows[::2], all_rows[1::2])]
    hardest = [part.topk(-(-len(part) // 3)).values.mean() * len(part) for part in classes]  # a third of each class
    averaged_sum = averaged((values[rank][by_class.rows] * by_class.weights).sum())
    yield "of classes", float((averaged_sum / (sum(hardest) / sum(sizes)) - 1).abs())

    quota = partial(rowprop.SelectiveBackprop, Shift(), given_losses, accumulate_to=5)
    for ranks in (Local(), Global()):  # a quota takes weights of 1/K and refuses all others
        for selector in (rowprop.RandomRows(0.5), rowprop.TopK(0.5)):
            assert sum(quota(selector, ranks=ranks)(values[rank])[1].kept_by_rank) == 5
        refuses(lambda: quota(over_all, ranks=ranks)(values[rank]), "a selection with weights of its own")


def normed() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 4))


def batch_for_normed() -> list[Batch]:
    """The rows of the first rank are the hardest."""
    inputs = [x[:, 0] for x, _ in batch_of(4)]
    with torch.no_grad():
        return [(x, normed()(x).argmin(1) if rank == 0 else normed()(x).argmax(1)) for rank, x in enumerate(inputs)]


@check
def batchnorm() -> Figures:
    """Statistics are each rank's own, as always under DDP; a rank that keeps nothing has rows to normalise."""
    rank, hard = dist.get_rank(), batch_for_normed()
    for name, engine in {"sliced": Sliced("exact"), "masked": "masked", "recompute": "recompute"}.items():
        model = wrapped("ddp", normed())
        _, record = backpropagated(step_of(model, rowprop.TopK(0.15), engine=engine)(hard[rank]))
        assert record.kept_by_rank[0] >= 2 and not any(record.kept_by_rank[1:])
        net = normed()
        if name == "recompute":  # the statistics of the kept rows
            kept = losses_of(net, hard[0]).topk(sum(record.kept_by_rank)).indices
            losses_of(net, (hard[0][0][kept], hard[0][1][kept])).mean().backward()
        else:
            torch.cat([losses_of(net, part) for part in hard]).topk(sum(record.kept_by_rank)).values.mean().backward()
        yield name, difference(grads_of(model), grads_of(net))


@check
def stale_scores() -> Figures:
    """A rank that knows the losses of all its rows runs as many forwards as one that knows none."""
    rank = dist.get_rank()
    part = batch_for_normed()[rank]
    ids, history = torch.arange(len(part[1])), LossHistory(16)
    if rank == 0:
        history.update(ids, torch.arange(float(len(ids))))
    model = wrapped("ddp", normed())  # which sends its buffers around in every forward
    options = {"scorer": StaleScorer(losses_of, 9), "history": history, "engine": "recompute"}
    selective = step_of(model, rowprop.TopK(0.5), Local(), **options)
    for _ in range(3):
        selective(part, ids=ids)[0].backward()
    grads = torch.cat([grad.flatten() for grad in grads_of(model)])
    yield "gradients between ranks", max(float((grads - other).abs().max()) for other in everyones(grads))


def sync_batchnorm() -> Figures:
    """One process's statistics, and its gradient."""
    parts, device = batch_for_normed(), f"cuda:{dist.get_rank() % torch.cuda.device_count()}"
    x, y = (each.to(device) for each in parts[dist.get_rank()])
    for name, engine in {"sliced": Sliced("exact"), "masked": "masked"}.items():
        model = DistributedDataParallel(nn.SyncBatchNorm.convert_sync_batchnorm(normed()).to(device))
        _, record = backpropagated(step_of(model, rowprop.TopK(0.15), engine=engine)((x, y)))
        net = normed()
        losses_of(net, whole(parts)).topk(sum(record.kept_by_rank)).values.mean().backward()
        yield name, difference([grad.cpu() for grad in grads_of(model)], grads_of(net))


@check
def groups() -> None:
    """A group of one's own, a mesh, and the refusals."""
    rank = dist.get_rank()
    scores = torch.tensor([1.0, 2.0]) + rank
    halves = [dist.new_group([0, 1]), dist.new_group(list(range(world() - 2, world())))]
    own = halves[0] if rank < 2 else halves[1]
    within = rank % 2
    chosen = Global(own).select(rowprop.TopK(0.25), scores)
    assert (chosen.rows.tolist(), chosen.weights.tolist()) == (([], []) if within == 0 else ([1], [2.0]))
    loss = mean(scores[: 1 + within], own)
    assert abs(loss.item() - float(scores[: 1 + within].sum()) * 2 / 3) < 1e-6

    mesh = init_device_mesh("cpu", (world() // 2, 2), mesh_dim_names=("outer", "inner"))
    assert torch.equal(Global(mesh["inner"]).select(rowprop.TopK(0.25), scores).rows, chosen.rows)
    refuses(lambda: Global(mesh).select(rowprop.TopK(0.25), scores), "group is a mesh of 2 dimensions")
    if world() == 4:
        others = halves[1] if rank < 2 else halves[0]
        refuses(lambda: mean(scores, others), "this rank does not belong to the group")

    for wrapper in WRAPPERS:
        model = wrapped(wrapper, Net())
        quota = partial(rowprop.SelectiveBackprop, model, losses_of, rowprop.TopK(0.5), accumulate_to=8)
        refuses(quota, "all ranks must be ready together")
    model = wrapped("ddp", Net())
    selective = step_of(model, rowprop.TopK(0.5))
    with Join([model]):
        refuses(lambda: selective(batch_of(5)[rank]), "inside Join", "UnsupportedOperation")
        losses_of(model, batch_of(5)[rank]).sum().backward()


@check
def zeros() -> Figures:
    """Ranks have different rows alive, and rank 0 none; each takes its part in every collective."""
    rank = dist.get_rank()
    mine = batch_of(37, dtype=torch.float64)[rank]

    def alive(model: nn.Module) -> Tensor:
        return (losses_of(model, mine) * (torch.arange(len(mine[1])) < rank)).mean()

    means = [averaged(grad) for grad in truth(alive, torch.float64)]
    for wrapper, place in itertools.product((*WRAPPERS, "hsdp"), ("model", "block")):
        model = wrapped(wrapper, Net(torch.float64))
        handle = rowprop.skip_zeros(model if place == "model" else inside(model).block)
        alive(model).backward()
        yield f"{wrapper} at the {place}, float64", difference(grads_of(model), means)
        assert handle.record is not None and handle.record.live == (rank if place == "model" else 3 * rank)


def thinned_step(model: nn.Module, **settings: Any) -> rowprop.thinning.Thinning:
    return rowprop.thin(model, blocks=[inside(model).inner, inside(model).block], **settings)


@check
def thinned() -> Figures:
    """Each rank thins its own rows; the ranks' gradient is the mean of those that each draws alone, drawn alike."""
    rank = dist.get_rank()
    mine = batch_of(23, dtype=torch.float64)[rank]

    def drawn(model: nn.Module, wrap: Any = lambda model: model) -> list[Tensor]:
        thinned_step(model, keep=0.5, generator=torch.Generator().manual_seed(rank))
        model = wrap(model)
        for _ in range(2):
            model.zero_grad()
            losses_of(model, mine).mean().backward()
        return grads_of(model)

    alone = drawn(Net(torch.float64))
    assert not torch.equal(alone[0], truth(lambda net: losses_of(net, mine).mean(), torch.float64)[0])
    means = [averaged(grad) for grad in alone]
    for wrapper in WRAPPERS:
        yield f"{wrapper}, float64", difference(drawn(wrapped(wrapper, Net(torch.float64))), means)
    yield "wrapped after thin, float64", difference(drawn(Net(torch.float64), wrap=sharded), means)


@check
def thinned_apart() -> Figures:
    """Ranks with one seed and one batch draw by generators of their own. Red with a seed that leaves the rank out."""
    torch.manual_seed(0)
    model, batch, drawn = Net(), whole(batch_of(31)), list[Tensor]()
    thinned_step(model, keep=0.5)
    for _ in range(4):
        model.zero_grad()
        losses_of(model, batch).mean().backward()
        drawn += [grad.flatten() for grad in grads_of(model)]
    every = everyones(torch.cat(drawn))
    alike = sum(torch.equal(one, other) for one, other in itertools.combinations(every, 2))
    yield "pairs of ranks that draw alike", float(alike)


@check
def thinned_and_measured() -> Figures:
    """A measurement is a rank's own, and leaves its gradient as it is."""
    mine = batch_of(29, dtype=torch.float64)[dist.get_rank()]
    expected = [averaged(grad) for grad in truth(lambda net: losses_of(net, mine).mean(), torch.float64)]
    for wrapper in WRAPPERS:
        model = wrapped(wrapper, Net(torch.float64))
        handle = thinned_step(model, tau=0.1)
        handle._worth.decide = lambda *_: None  # a small model would turn itself off
        for number in range(4):
            handle._control.shares.clear()  # the step keeps all rows: its gradient is exact
            handle._control.begun = number
            model.zero_grad()
            losses_of(model, mine).mean().backward()
        yield f"{wrapper}, float64", difference(grads_of(model), expected)
        handle.state_dict()
        few = len(mine[0]) < 4  # three quarters of so few rows may be all: then it learns nothing
        assert handle._control.measured == (0 if few else 2)


def token_losses_of(model: nn.Module, ids: Tensor) -> Tensor:
    losses = cross_entropy(model(ids).flatten(0, 1), ids.flatten(), reduction="none")
    return dense(losses).view(ids.shape)


@check
def tensor_parallel() -> Figures:
    """A decoder sharded over the ranks, with and without its tokens sharded between, and its logits.

    Red when: FLOPs count DTensor's ops at the size that they claim; the gradient behind a parallel loss stays dense.
    """
    mesh = init_device_mesh("cpu", (world(),))
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(parallel_models.VOCABULARY, (8, 8), generator=generator)
    picks = {"rows": torch.tensor([1, 5]), "tokens": torch.rand(8, 8, generator=generator) < 0.25}
    plans = [(False, False), (True, False), (True, True)] if world() == 2 else [(True, True)]
    for sequences, loss in plans:
        model = parallel_models.sharded(mesh, sequences=sequences, loss=loss)
        with loss_parallel() if loss else nullcontext():
            token_losses_of(model, ids).mean().backward()  # DTensor learns of each op by running it once
            everything = token_losses_of(model, ids).mean()
            with count_flops() as full:
                everything.backward()
            for unit, rows in picks.items():
                name, net = f"{unit}, sequences {sequences}, loss {loss}", parallel_models.Llama()
                model.zero_grad()
                losses, expected = (token_losses_of(each, ids) for each in (model, net))
                if unit == "rows":
                    losses, expected = losses.mean(1), expected.mean(1)
                with rowprop.watch() as report, count_flops() as flops:
                    rowprop.pick(losses, rows).mean().backward()
                expected[rows].mean().backward()
                yield name, difference(grads_of(model), grads_of(net))
                share = sum(flops.by_op.values()) / sum(full.by_op.values())
                if unit == "rows":
                    assert not report.densified and share <= 0.27, f"{name}: {share:.2f}, {report}"
                elif sequences:
                    assert "sharded over the ranks" in str(report), f"{name}: {report}"


@check
def tensor_parallel_edges() -> Figures:
    """Rows and parts that cannot stay sliced, collectives that plain code calls, and ranks that pick other rows.

    Red when: `_check` lets sharded rows through, or parts of different sizes; `_along` takes rows that lie in the
    first dimension; ranks do not compare their rows, or only how many there are.
    """
    mesh, rank, size = init_device_mesh("cpu", (world(),)), dist.get_rank(), world()
    torch.manual_seed(5)
    x, weight = torch.randn(4 * size, 3, 5, dtype=torch.float64), torch.randn(5, 7, dtype=torch.float64)
    rows, mine = torch.tensor([1, 3]), slice(4 * rank, 4 * rank + 4)

    def at(tensor: Tensor, placement: Any) -> Tensor:
        return distribute_tensor(tensor, mesh, [placement])

    def gradient(losses: Tensor, *leaves: Tensor, picked: Tensor = rows) -> tuple[list[Tensor], str]:
        with rowprop.watch() as report:
            rowprop.pick(losses, picked).sum().backward()
        assert all(type(getattr(leaf.grad, "_local_tensor", leaf.grad)) is Tensor for leaf in leaves)
        return [dense(leaf.grad) for leaf in leaves if leaf.grad is not None], str(report.densified)

    def expected(of: Tensor, picked: Tensor) -> list[Tensor]:
        a, w = of.clone().requires_grad_(), weight.clone().requires_grad_()
        (a @ w).tanh().square().flatten(1).sum(1)[picked].sum().backward()
        return [a.grad, w.grad]

    cases = {  # where the input and the weight are sharded, and why the gradient gets dense
        "replicated": (Replicate(), Replicate(), ""),
        "rows sharded": (Shard(0), Replicate(), "the rows lie in a dimension that is sharded"),
        "uneven parts": (Replicate(), Shard(1), "in parts of different sizes"),
    }
    for name, (of_x, of_weight, reason) in cases.items():
        a, w = at(x, of_x).requires_grad_(), at(weight, of_weight).requires_grad_()
        losses = (a @ w).tanh().to_local() if name != "uneven parts" else (a @ w).tanh().full_tensor()
        grads, why = gradient(losses.square().flatten(1).sum(1), a, w)
        assert reason in why and (why == "{}") == (not reason), f"{name}: {why}"
        picked = rows if name != "rows sharded" else torch.cat([rows + 4 * other for other in range(size)])
        yield f"{name}, float64", difference(grads, expected(x, picked))

    # Each rank has its own input; the sum and the tokens of all go around.
    own = x[mine]
    calls: dict[str, Callable[[Tensor], Tensor]] = {
        "nn": dist.nn.functional.all_reduce,
        "gather": lambda a: funcol.all_gather_tensor_autograd(a, 1, dist.group.WORLD),
    }
    if hasattr(funcol, "all_reduce_backward"):  # since torch 2.13
        calls["functional"] = lambda a: funcol.all_reduce(a, "sum", dist.group.WORLD)
    for name, call in calls.items():
        a = own.clone().requires_grad_()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # the newer names are not in torch 2.11
            out = call(a * (rank + 1))
        (grad,), why = gradient(out.tanh().flatten(1).sum(1), a)
        assert name != "nn" or why == "{}", f"{name}: {why}"
        parts = [x[4 * other : 4 * other + 4] * (other + 1) for other in range(size)]
        total = sum(parts) if name != "gather" else parts[rank]
        slope = torch.zeros_like(own)
        slope[rows] = (1 - total.tanh().square())[rows] * (rank + 1) * size
        yield f"{name}, float64", difference([grad], [slope])

    a, w = at(x, Replicate()).requires_grad_(), at(weight, Replicate()).requires_grad_()
    others = {
        "other rows": rows + (rank == 0),
        "another order": rows.flip(0) if rank else rows,
        "fewer": rows[: 1 + rank % 2],
    }
    for picked in others.values():
        losses = (a @ w).to_local().flatten(1).sum(1)
        refuses(
            lambda losses=losses, picked=picked: rowprop.pick(losses, picked).sum().backward(), "picked different rows"
        )


GPU_CHECKS: list[Check] = [sync_batchnorm]


def left_alone(cause: str) -> None:
    """Rank 1 leaves after the first step, or falls silent; rank 0 goes on."""
    selective, rank = step_of(Net(), rowprop.TopK(0.25)), dist.get_rank()
    selective(batch_of(0)[rank])[0].backward()
    if rank == 1:
        if cause == "silent":
            signal.pause()
        os._exit(1)
    print("one step done", flush=True)
    selective(batch_of(1)[rank])[0].backward()
    print("not reached")


def measured(checks: list[Check], folder: Path) -> None:
    """The figures of each check, up to the first that failed: after that the ranks no longer run in step."""
    found: dict[str, dict[str, float] | str] = {}
    for function in checks:
        try:
            found[function.__name__] = dict(function() or ())
        except Exception:
            traceback.print_exc()
            found[function.__name__] = traceback.format_exc()
            sys.exit(1)
        finally:
            (folder / f"{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def ranked(rank: int, size: int, meet: Path, timeout_s: int, work: Callable[[], None]) -> None:
    timeout = timedelta(seconds=timeout_s)
    dist.init_process_group("gloo", f"file://{meet}", rank=rank, world_size=size, timeout=timeout)
    work()


def world_of(size: int, timeout_s: int, work: Callable[[], None]) -> int:
    """Fork so many ranks, and end the others when the first has ended; returns its exit code."""
    fork = multiprocessing.get_context("fork")
    with TemporaryDirectory() as folder:
        meet = Path(folder) / "meet"
        ranks = [fork.Process(target=ranked, args=(rank, size, meet, timeout_s, work)) for rank in range(size)]
        for rank in ranks:
            rank.start()
        ranks[0].join()
        for rank in ranks[1:]:
            rank.join(10 if ranks[0].exitcode == 0 else 1)
            rank.kill()
        return ranks[0].exitcode


if __name__ == "__main__":  # alone CAUSE... | checks FOLDER | gpu FOLDER
    import torch._dynamo  # once for all ranks

    torch.set_num_threads(1)
    kind, *arguments = sys.argv[1:]
    if kind == "alone":
        for cause in arguments:
            code = world_of(2, 10 if cause == "dies" else 3, partial(left_alone, cause))
            sys.stderr.write(f"exit code {code}\n")
    else:
        for size in SIZES:
            folder = Path(arguments[0]) / str(size)
            folder.mkdir()
            world_of(size, 60, partial(measured, CHECKS if kind == "checks" else GPU_CHECKS, folder))
