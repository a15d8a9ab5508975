"""Selection across ranks: the figures of worlds of two and four gloo processes, and the end of ranks left alone.

The ranks are forks of ``distributed_worker.py``, one world of each size for all checks. ``pytest -rP`` prints figures.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import distributed_worker as worker
import rowprop
from rowprop.distributed import Global, Local, Ranks, mean
from rowprop.errors import InvalidInput
from rowprop.selection import Context

ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1"}
WORKER = Path(worker.__file__)
HARDEST = rowprop.TopK(0.5)
HANG_S = 600  # far more than anything here takes, on a busy machine too


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=HANG_S, check=False)


def check_worlds(kind: str, folder: Path) -> None:
    done = run(WORKER, kind, folder)
    checks = {"checks": worker.CHECKS, "gpu": worker.GPU_CHECKS}[kind]
    for place in [f"{size}/{rank}.json" for size in worker.SIZES for rank in range(size)]:
        path = folder / place
        assert path.exists(), done.stderr
        found = json.loads(path.read_text())
        for check, figures in found.items():
            assert isinstance(figures, dict), figures  # else it is a traceback
            for name, error in figures.items():
                limit = 1e-12 if "float64" in name else 1e-6
                print(f"{place}, {check}: {name}: {error:.1e}")
                assert error <= limit, f"{check}: {name}"
        assert [*found] == [function.__name__ for function in checks]


# Turned red, once each: the factor W left out of Global, of Local or of mean, K_r in place of K, the last rank's scores
# cut to the shortest, rank 0's seed not shared, no row added for a rank that keeps none, a quota per rank; K_r for N_r
# with unbiased weights, dropped rows counted in N_r, no forward of a StaleScorer that knows all losses; the ids or the
# classes of one rank given to the selector of all; ids on some ranks let through. On tokens: W left out of Global, of
# Local or of mean, a rank without tokens that asks its selector, refuses under "drop" or makes the mean of all NaN, the
# mean of the ranks' means, positions not gathered; the autograd functions of DDP or FSDP2 made dense, cut forgotten,
# no backward on a rank that keeps none.
def test_ranks_together_are_one_process(tmp_path: Path):
    check_worlds("checks", tmp_path)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch has SyncBatchNorm for accelerators only")
def test_ranks_with_accelerators_are_one_process(tmp_path: Path):
    check_worlds("gpu", tmp_path)


def test_the_code_of_the_docs_runs_on_two_ranks(tmp_path: Path):
    # Red when: a name is misspelt in any block; a rank leaves its backward out (the other waits, and is ended).
    page = (WORKER.parent.parent / "docs" / "distributed.md").read_text()
    code, end = "".join(re.findall(r"```python\n(.*?)```", page, re.DOTALL)), "dist.destroy_process_group()\n"
    assert code.count(end) == 1
    # The blocks behind the first script are of the same group. Both ranks are through before either exits: torch 2.13
    # may abort in its own teardown where the machine is busy, with or without rowprop.
    through = f"open({str(tmp_path)!r} + f'/{{dist.get_rank()}}', 'x')\ndist.barrier()\n"
    script = tmp_path / "train.py"
    script.write_text(code.replace(end, "") + through + end)
    done = run("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2, script)
    assert all((tmp_path / str(rank)).exists() for rank in range(2)), done.stderr
    kept = re.search(r"kept \((\d+), (\d+)\)", done.stdout)
    assert kept is not None
    assert int(kept[1]) + int(kept[2]) == 16


def test_a_rank_left_alone_ends_with_an_error():
    done = run(WORKER, "alone", "dies", "silent")
    assert done.stdout == "one step done\n" * 2
    of_each = done.stderr.split("exit code 1\n")
    assert len(of_each) == 3 and not of_each[2]
    assert all("in _gathered" in said for said in of_each[:2])  # it was the selection that did not hang


@pytest.mark.parametrize("ranks", [Global(), Local()], ids=repr)
def test_alone_they_are_the_selector_itself(ranks: Ranks):
    scores = torch.tensor([0.5, 3.0, 1.0, 2.0])
    ours, plain = ranks.select(rowprop.TopK(0.5), scores), rowprop.TopK(0.5)(scores)
    assert torch.equal(ours.rows, plain.rows)
    assert torch.equal(ours.weights, plain.weights)
    assert (ours.even, ours.unbiased) == (True, False)
    drawn = ranks.select(rowprop.RandomRows(0.5), scores, Context(generator=torch.Generator().manual_seed(0)))
    assert (drawn.even, drawn.unbiased) == (True, True)
    assert mean(scores).item() == scores.mean().item()

    model = nn.Linear(3, 1)
    batch = torch.randn(8, 3)
    losses_fn = lambda model, batch: model(batch).squeeze(1).square()  # noqa: E731
    step = rowprop.SelectiveBackprop(model, losses_fn, rowprop.TopK(0.5), accumulate_to=6, ranks=ranks)
    records = [step(batch)[1] for _ in range(2)]
    assert [record.kept_by_rank for record in records] == [(4,), (2,)]
    assert [record.ready for record in records] == [False, True]
    assert records[0].imbalance == 1


REFUSED = {  # by the sentence
    r"Local got scores of shape \(2, 2\)": lambda: Local().select(HARDEST, torch.ones(2, 2)),
    "Global got group=5, a int, but a process group or a one": lambda: Global(5),
    "SelectiveBackprop got ranks=<class 'rowprop.distributed.Local'>, a ABCMeta, but rowprop.distributed.Local": (
        lambda: worker.step_of(nn.Linear(3, 1), HARDEST, Local)
    ),
    r"mean got a tensor of shape \(\) .* but the losses of the kept rows were needed": lambda: mean(torch.ones(())),
    "mean got group='all', a str, but a process group or a one-dimensional": lambda: mean(torch.ones(2), "all"),
}


@pytest.mark.parametrize("sentence", REFUSED)
def test_bad_input_is_refused_in_one_sentence(sentence: str):
    with pytest.raises(InvalidInput, match=sentence):
        REFUSED[sentence]()
