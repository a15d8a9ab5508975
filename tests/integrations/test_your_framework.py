"""docs/your-framework.md: its numbers are those of its scripts, which run before and after, and select after alone.

Packages live in venvs of their own: `nox -s integrations`, `nox -s fastai`.
"""

from __future__ import annotations

import re
from difflib import SequenceMatcher
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

import rowprop
from families import torchvision_models
from plain_loop import check_same

DOCS = Path(__file__).parents[2] / "docs"
TEXT = (DOCS / "your-framework.md").read_text()
DIFFS = dict(re.findall(r"^## ([^\n]*)\n\n```diff\n(.*?)^```\n", TEXT, re.MULTILINE | re.DOTALL))
TABLE = dict(re.findall(r"^\| (\w.*?) \| (\d \| \d \| \d \| .*) \|$", TEXT, re.MULTILINE))
EACH_ROW = "# the loss of each row"

PLAIN = """
import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
x, y = torch.randn(32, 20), torch.randint(4, (32,))
model = module = torch.nn.Linear(20, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(x, y), batch_size=16)
"""
AROUND = {  # what the scripts take for granted
    "Plain loop that indexes its losses": "",
    "Plain loop over all rows": "",
    "Lightning": "import lightning\n",
    "Trainer": """
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments
config = BertConfig(vocab_size=9, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8)
arguments = TrainingArguments(folder, max_steps=2, use_cpu=True, report_to="none", disable_tqdm=True)
data = [{"input_ids": torch.arange(1, 9), "labels": n % 2} for n in range(16)]
""",
    "skorch": "from skorch import NeuralNetClassifier\nx, y = x.numpy(), y.numpy()\n",
    "accelerate": "from accelerate import Accelerator\naccelerator = Accelerator(cpu=True)\n",
    "Ignite": "",
    "fastai and tsai": """
from fastai.basics import CrossEntropyLossFlat, DataLoader, DataLoaders, Learner, accuracy
dls = DataLoaders(*(DataLoader(list(zip(x, y)), bs=16, num_workers=0) for _ in range(2)))
""",
    "Composer": """
from composer import Trainer
from composer.models import ComposerClassifier
model = ComposerClassifier(module, num_classes=4)
""",
}
NEEDS = {"Lightning": "lightning", "Trainer": "transformers", "Ignite": "ignite", "fastai and tsai": "fastai"}


def sides(name: str) -> list[str]:
    """A script before and after."""
    lines = DIFFS[name].splitlines()
    return ["\n".join(line[1:] for line in lines if line[:1] != other) for other in "+-"]


def changed(before: list[str], after: list[str]) -> int:
    """Lines that change or are new."""
    found = SequenceMatcher(None, before, after, autojunk=False).get_opcodes()
    return sum(max(b - a, d - c) for tag, a, b, c, d in found if tag != "equal")


@pytest.mark.parametrize("name", list(DIFFS))
def test_the_table_counts_the_lines(name: str):
    # Red when: a line is added to a diff, or a number of the table is another.
    lines = [[line.strip() for line in side.splitlines() if line.strip()] for side in sides(name)]
    imports, others = ([[line for line in side if line.startswith(("import ", "from ")) == kind] for side in lines]
                       for kind in (True, False))  # fmt: skip
    rows = sum(line.endswith(EACH_ROW) for line in lines[1])
    (row,) = [cells for title, cells in TABLE.items() if title.lower() == name.lower()]
    counted = [changed(*others) - rows, rows, changed(*imports)]
    assert [int(cell) for cell in row.split(" | ")[:3]] == counted


def test_every_line_of_the_table_has_its_script():
    assert [title.lower() for title in TABLE] == [title.lower() for title in DIFFS]


TRL = {"TRL": "supervised-fine-tuning.md", "TRL's GRPOTrainer": "grpo.md"}


@pytest.mark.parametrize("name", TRL)
def test_the_lines_for_trl_are_those_of_its_pages(name: str):
    # Its trainers are too large to run here once more: test_trl.py and test_trainers.py run the pages. Red when:
    # `pick_answers` is misspelt.
    page = (DOCS / TRL[name]).read_text()
    added = re.findall(r"^\+(.*)", DIFFS[name], re.MULTILINE)
    assert len(added) == 2
    assert all(re.search(rf"^{re.escape(line)}", page, re.MULTILINE) for line in added)
    assert {*DIFFS} - {*AROUND} == {*TRL}


@pytest.mark.parametrize("name", list(AROUND))
@pytest.mark.filterwarnings("ignore")  # those of the frameworks are their own
@pytest.mark.usefixtures("one_thread")
def test_the_scripts_run_and_select_after_the_change_alone(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    # Red when: a new line is taken out, or `losses` is misspelt.
    package = NEEDS.get(name, name.lower())
    if "loop" not in name and find_spec(package) is None:
        pytest.skip(f"needs {package}")
    if package in ("fastai", "composer"):
        torchvision_models()
    monkeypatch.chdir(tmp_path)
    selected, ran, select = list[int](), [], rowprop.SelectiveBackprop.__call__
    spied = lambda *given, **named: selected.append(1) or select(*given, **named)  # noqa: E731
    monkeypatch.setattr(rowprop.SelectiveBackprop, "__call__", spied)
    for side in sides(name):
        space: dict[str, Any] = {"__name__": name, "folder": str(tmp_path)}
        exec(compile(PLAIN + AROUND[name] + side, name, "exec"), space)
        ran.append((len(selected), space))
    assert ran[0][0] == 0
    if "indexes" in name:  # by hand
        fresh: dict[str, Any] = {}
        exec(PLAIN, fresh)
        check_same(ran[0][1]["model"], ran[1][1]["model"])
        assert not torch.equal(fresh["model"].weight, ran[1][1]["model"].weight)
    else:
        assert ran[1][0] > 0
