"""Measures how often the host waits in a step, part by part, and writes the tables of docs/devices.md.

The parts run on the emulated device of ``accelerator.py``, so this needs a process of its own. ``nox -s waits`` writes
the tables of the page anew, ``python tools/waits.py --json`` prints all that was measured.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import laws
import rowprop
import zoo
from accelerator import DEVICE, Accelerator
from rowprop import SelectiveBackprop, TopK
from rowprop.distributed import Global, Local
from rowprop.engines import ENGINES
from rowprop.history import LossHistory, PruningSampler, ReducibleLoss
from rowprop.schedule import Schedule
from rowprop.selection import PerClass, Selection
from rowprop.step.small import unwarned

PAGE = Path(__file__).parent.parent / "docs" / "devices.md"
BEGIN, END = "<!-- tables: written by nox -s waits -->\n", "<!-- end of tables -->\n"
N = 12

Seen = list[str]


def losses_fn(model: Any, batch: Any) -> Tensor:
    """Of rows, or of their tokens."""
    return F.cross_entropy(model(batch[0]).movedim(-1, 1), batch[1], reduction="none")


def subject(device: Accelerator) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.GELU(), nn.Dropout(0.1), nn.Linear(8, 3))
    return device.put(model), device.put((torch.randn(N, 4), torch.randint(3, (N,))))


def subject_of_tokens(device: Accelerator) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """The same model on rows of five tokens."""
    model, _ = subject(device)
    return model, device.put((torch.randn(N, 5, 4), torch.randint(3, (N, 5))))


def in_step(device: Accelerator, selector: Any = None, calls: int = 2, ids: Any = DEVICE, **options: Any) -> list[Seen]:
    """The waits of each of some steps: the call, and the backward."""
    model, batch = options.pop("subject", subject)(device)
    counted = options.pop("counted", None)
    given = {"engine": "sliced", "nonfinite": "keep"} | options
    selective = SelectiveBackprop(model, losses_fn, selector or TopK(0.5), **given)
    rows, found = torch.arange(N, device=ids), list[Seen]()
    for _ in range(calls):
        begun = device.count
        loss, _ = selective(batch, ids=rows, classes=rows % 3, counted=counted)
        loss.backward()
        found.append(device.seen[begun:])
    return found


def in_call(device: Accelerator, function: Callable[[], object]) -> Seen:
    begun = device.count
    function()
    return device.seen[begun:]


NOT_EMULATED = {  # torch has a kernel of its own for the CPU and for CUDA, which other devices lack
    *("rnn", "gru", "lstm", "lstm_bidirectional", "lstm_sequence_first", "gru_bidirectional_sequence_first"),
    *("lstm_cells_with_layernorm", "speech", "embedding_bag"),
    *("gpt_bool_mask", "gpt_masked_by_hand"),  # the masks of these models stay on the CPU
    "flow",  # what it writes in place has no graph there
    "source_separation",  # the emulation loses the order of the dimensions in which stft returns its result
    "matrices",  # torch's own check of a solution waits in the formula of eigvals, as it does under plain indexing
}


# --- the counts -------------------------------------------------------------------------------------------------------


def engines(device: Accelerator) -> Iterator[tuple[str, list[Seen]]]:
    for engine in ENGINES:
        yield engine, [in_step(device, engine=engine, nonfinite=policy)[-1] for policy in POLICIES]


LATE = "event in step.selective.check"
POLICIES = ("error", "drop", "keep")


def in_selection(device: Accelerator, case: laws.SelectorCase) -> Seen:
    """The waits of a selector that is called for the second time."""
    selector: Any = case.make()
    if isinstance(selector, ReducibleLoss):
        selector = ReducibleLoss(selector.selector, device.put(selector.irreducible))
    scores = device.put(torch.linspace(0.1, 2, 64)[torch.randperm(64)])
    selector(scores, laws.context_of(scores))
    return in_call(device, lambda: selector(scores, laws.context_of(scores)))


def selectors(device: Accelerator) -> Iterator[tuple[str, laws.SelectorCase, Seen]]:
    torch.manual_seed(0)
    for name, cases in sorted(laws.SELECTORS.items()):
        for case in cases:
            yield name, case, in_selection(device, case)


def scorers(device: Accelerator) -> Iterator[tuple[str, Seen]]:
    """Each scorer, and the waits of a step with it, under ``recompute``."""
    for name, cases in sorted(laws.SCORERS.items()):
        for case in cases[:1]:
            scorer = case.make()
            if hasattr(scorer, "model"):
                device.put(scorer.model)
            model, batch, _ = laws.subject(case.kind)
            options = {"history": LossHistory(N, device=DEVICE)} if name == "StaleScorer" else {}
            options |= {"scorer": scorer, "subject": lambda device: (device.put(model), device.put(batch))}
            with mock.patch("torch.autocast", lambda *_: nullcontext()):  # torch has it for the devices that it knows
                yield name, in_step(device, engine="recompute", **options)[-1]


def parts(device: Accelerator) -> Iterator[tuple[str, Seen]]:
    """Each other part of a step, and the waits of a step with it; ``sliced``, ``TopK`` and ``keep`` otherwise."""
    of_tokens = {"unit": "token", "subject": subject_of_tokens}
    counted, reducible = torch.arange(5 * N).view(N, 5) % 4 > 0, ReducibleLoss(TopK(0.5), torch.zeros(N))
    begun, late = ({"schedule": Schedule(start, 1.0), "total_steps": 9} for start in (0.0, 0.9))
    sampler = PruningSampler(LossHistory(N, device=DEVICE), num_rows=N, epochs=3)
    next(iter(sampler))
    steps: dict[str, dict[str, Any]] = {
        "`accumulate_to`": {"accumulate_to": 10},
        "`schedule`, rows are selected": begun,
        "`schedule`, the whole batch is trained": late,
        "`min_rows`, where fewer are kept": {"selector": TopK(0.1), "min_rows": 6},
        "`timing=True`": {"timing": True},
        "`recompute`, each list, array or CPU tensor in the batch": {"engine": "recompute", "subject": with_texts},
        "`PerClass`, three classes, `ids` and `classes` on the CPU": {"selector": PerClass(TopK(0.5)), "ids": "cpu"},
        '`unit="token"`, `counted` and `ids` on the CPU': {**of_tokens, "counted": counted, "ids": "cpu"},
        '`unit="token"`, `counted` and `ids` on the device': {**of_tokens, "counted": device.put(counted)},
        "`LossHistory(M, device=...)`": {"history": LossHistory(N, device=DEVICE)},
        "`LossHistory(M, device=...)`, `ids` on the CPU": {"history": LossHistory(N, device=DEVICE), "ids": "cpu"},
        "`LossHistory(M)`, on the CPU": {"history": LossHistory(N)},
        "`LossHistory()`, a table": {"history": LossHistory()},
        "`PruningSampler`, in a step, `ids` on the CPU": {"history": sampler, "ids": "cpu"},
        "`PruningSampler`, in a step, `ids` on the device": {"history": sampler},
        "`ReducibleLoss`, its losses and `ids` on the CPU": {"selector": reducible, "ids": "cpu"},
    }
    yield from ((label, in_step(device, **options)[-1]) for label, options in steps.items())
    yield "`PruningSampler`, once in an epoch", in_call(device, lambda: list(sampler))
    yield "`print(record)`, `record.to_dict()`", in_call(device, lambda: printed(device))
    with two_ranks():
        yield "`ranks=Local()`", in_step(device, ranks=Local())[-1]
        yield '`ranks=Local()`, `nonfinite="error"`', in_step(device, ranks=Local(), nonfinite="error")[-1]
        yield "`ranks=Global()`", in_step(device, ranks=Global())[-1]
        kept = device.put(torch.ones(3))
        yield "`rowprop.distributed.mean`", in_call(device, lambda: rowprop.distributed.mean(kept))
    rows, more = (device.put(torch.tensor(rows)) for rows in ([1, 4, 7], [4, 7]))
    mask = torch.zeros(N, dtype=torch.bool, device=DEVICE).index_fill(0, rows, True)
    weights = torch.full((3,), 1 / 3, device=DEVICE)
    for label, picks in {
        "`pick`, indices": lambda: [rows],
        "`pick`, a mask": lambda: [mask],
        "two picks in one backward, which need the union of their rows": lambda: [rows, more],
        "`Selection(...)` of your own, not on CUDA": lambda: [Selection(rows, weights, N)],
    }.items():
        yield label, in_call(device, lambda: backward_of(device, picks()))


def printed(device: Accelerator) -> None:
    model, batch = subject(device)
    str(SelectiveBackprop(model, losses_fn, TopK(0.5), engine="sliced", nonfinite="keep")(batch)[1])


def with_texts(device: Accelerator) -> Any:
    model, batch = subject(device)
    return model, (*batch, list("abcdefghijkl"))


def backward_of(device: Accelerator, picks: list[Any]) -> None:
    """The backward of losses of which each of these picks takes some."""
    model, (x, y) = subject(device)
    logits = model(x)
    losses = F.cross_entropy(logits, y, reduction="none"), logits.square().mean(1)
    sum(rowprop.pick(each, rows).mean() for each, rows in zip(losses, picks, strict=False)).backward()


def kinds(device: Accelerator) -> dict[str, Seen]:
    """Each way in which the host may wait, alone; and ways in which it does not."""
    x = device.put(torch.arange(4.0))
    rows, two = device.put(torch.tensor([1, 2])), device.put(torch.ones(2))
    ways: dict[str, Callable[[], object]] = {
        "item": x.sum().item,
        "bool": lambda: bool(x.any()),
        "tolist": x.tolist,
        "cpu": x.cpu,
        "to the host": lambda: x.to("cpu"),
        "copy_ to the host": lambda: torch.empty(4).copy_(x),
        "nonzero": x.nonzero,
        "a mask": lambda: x[x > 1],
        "a mask, set": lambda: x.clone().__setitem__(x > 1, two),
        "unique": x.unique,
        "torch.equal": lambda: torch.equal(x, x),
        "torch.tensor": lambda: torch.tensor([1.0], device=DEVICE),
        "new_tensor": lambda: x.new_tensor([1.0]),
        "to the device": lambda: torch.ones(3).to(DEVICE),
        "rows of the host": lambda: x[torch.tensor([1])],
        "none: asynchronous": lambda: (torch.ones(3).to(DEVICE, non_blocking=True), x.to("cpu", non_blocking=True)),
        "none: rows": lambda: (x[rows], x.index_select(0, rows), x.clone().__setitem__(rows, 0.0)),
        "none: made there": lambda: (torch.full((), 2, device=DEVICE), x.new_full((2,), 1.0), x[1], x[:2].sort()),
        "none: on the host": lambda: (torch.ones(3).sum().item(), torch.ones(3).nonzero(), torch.tensor([1.0])),
    }
    found = {name: in_call(device, way) for name, way in ways.items()}
    try:
        x + torch.ones(4)
    except RuntimeError as error:
        found["mixed"] = [str(error)]
    return found


def models(device: Accelerator) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each model of the zoo: its error against plain indexing on the CPU, its waits, and the ops that densify."""
    for entry in zoo.ENTRIES:
        if entry.name in NOT_EMULATED:
            continue
        truth, plain = zoo.masked(entry, torch.float64), zoo.sliced(entry, torch.float64)
        model, batch = entry.make(torch.float64)
        device.put(model), device.put(batch)
        torch.manual_seed(1)
        with torch.device(DEVICE):
            losses = entry.losses(model, device.put(batch))
        begun = device.count
        with rowprop.watch() as report:
            rows = device.put(torch.tensor(zoo.ROWS))
            rowprop.pick(losses, rows, batchnorm="exact").mean().backward()
        grads = {name: getattr(p.grad, "held", None) for name, p in model.named_parameters()}
        error = max(zoo.errors(truth, zoo.Backward(grads, plain.flops, report)).values())
        more = sorted(set(report.densified) - set(plain.report.densified))
        yield entry.name, {"error": error, "waits": device.seen[begun:], "more": more}


@contextmanager
def two_ranks() -> Iterator[None]:
    """The first of two ranks that have the same batch; its collectives are done at once, as NCCL's seem to be."""

    def all_gather(parts: list[Tensor], values: Tensor, **_: Any) -> None:
        for part in parts:
            part.copy_(values)

    answers = {"is_initialized": True, "get_rank": 0, "get_world_size": 2, "get_global_rank": 0}
    answers |= {"broadcast": None, "all_reduce": None}
    faked = {name: mock.Mock(return_value=answer) for name, answer in answers.items()}
    faked |= {"all_gather": all_gather, "group": mock.Mock(WORLD="both")}
    with mock.patch.multiple(dist, **faked), mock.patch("rowprop.distributed.check_group"):
        yield


def joined() -> nn.Module:
    """Two branches that join: gradients of several thinnings meet, with BatchNorm in training mode below them."""

    def forward(net: Any, x: Tensor) -> Tensor:
        first = net.layers[0](net.norm(net.enter(x))).relu()
        return net.leave(torch.cat([net.layers[1](first), net.layers[2](first).relu()], 1))

    parts = {"enter": nn.Linear(4, 8), "norm": nn.BatchNorm1d(8), "leave": nn.Linear(16, 3)}
    return zoo.Net(forward, **parts, layers=nn.ModuleList(nn.Linear(8, 8) for _ in range(3)))


def thinned(device: Accelerator, steps: int = 6, **settings: float) -> tuple[list[Seen], dict[str, float], int]:
    """The waits of each of some steps of a thinned model, the shares that its blocks kept, and its measurements."""
    torch.manual_seed(0)
    model, x = device.put(joined()), device.put(torch.randn(32, 4))
    handle = rowprop.thin(model, **settings)
    handle._worth.decide = lambda *_: None  # a small model would turn itself off
    found: list[Seen] = []
    for _ in range(steps):
        begun = device.count
        model(x).square().mean().backward()
        found.append(device.seen[begun:])
    return found, handle.record.keep, handle._control.measured


# --- the page ---------------------------------------------------------------------------------------------------------


@unwarned()  # the first ten steps wait once more, to see whether the device does
def measured(device: Accelerator) -> dict[str, Any]:
    """All counts, as JSON has them: lists of the places where the host waited."""
    return {
        "engines": dict(engines(device)),
        "selectors": [(name, repr(case.make()), case.waits, seen) for name, case, seen in selectors(device)],
        "scorers": dict(scorers(device)),
        "parts": dict(parts(device)),
        "kinds": kinds(device),
        "zoo": dict(models(device)),
        "thinned": thinned(device, keep=0.25),
        "steered": thinned(device, 13, tau=0.5),
    }


def tables(found: dict[str, Any]) -> str:
    lines = ["| engine | " + " | ".join(f'`nonfinite="{policy}"`' for policy in POLICIES) + " |", "|---|---|---|---|"]
    lines += [f"| `{name}` | {' | '.join(map(counted, each))} |" for name, each in found["engines"].items()]
    first: dict[str, Seen] = {}
    for name, _, _, seen in found["selectors"]:
        first.setdefault(f"`{name}`", seen)
    scorers = {f"`{name}`": seen for name, seen in found["scorers"].items()}
    parts = {"selector": _alike(first), "scorer, with `recompute`": _alike(scorers), "part": found["parts"]}
    for head, rows in parts.items():
        lines += ["", f"| {head} | waits |", "|---|---|"]
        lines += [f"| {name} | {counted(seen)} |" for name, seen in rows.items()]
    return "\n".join(lines) + "\n"


def _alike(rows: dict[str, Seen]) -> dict[str, Seen]:
    """Rows with as many waits in one, the ones without any first."""
    names: dict[str, list[str]] = {}
    for name, seen in sorted(rows.items(), key=lambda row: len(row[1])):
        names.setdefault(counted(seen), []).append(name)
    return {", ".join(found): rows[found[0]] for found in names.values()}


def counted(seen: Seen) -> str:
    """The number of waits, and beside it that of the late looks: the host looks when the backward is queued."""
    late = sum(what == LATE for what in seen)
    return f"{len(seen) - late}" + (f", {late} late" if late else "")


if __name__ == "__main__":
    torch.set_num_threads(1)
    with Accelerator() as emulated, torch.autograd.set_multithreading_enabled(False):
        everything = measured(emulated)
    if "--json" in sys.argv:
        print(json.dumps(everything))
    else:
        before, _, rest = PAGE.read_text().partition(BEGIN)
        PAGE.write_text(before + BEGIN + tables(everything) + END + rest.partition(END)[2])
