"""skip_zeros() in the frameworks' own trainings: one line, the untouched gradient, the cost of what is live.

The packages live in a venv of their own: `nox -s integrations`. The trainings are those of benchmarks/zeros.py.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

import rowprop
import zeros

PACKAGES = {"TRL": "trl", "sentence": "sentence_transformers", "transformers": "transformers", "dist": "transformers"}
# The backward's FLOPs over the untouched ones, counted by hand from the sizes of zeros.py where a number stands here:
# the share of the rows that are live, or of the tokens in the head and the last layer.
SHARES = {
    "plain loop: `losses[losses.topk(16).indices].mean()`": 1 / 4,
    "plain loop: a hinge, three in four satisfied": 1 / 4,
    "transformers: its own loss, three rows in four masked": 1 / 4,
    "TRL `GRPOTrainer`: 63 % of the answers without advantage": 12 / 32,
    "sentence-transformers: `TripletLoss`, three triplets in four satisfied": 1 / 4,
    "transformers: SegFormer, three images in four ignored whole": 1 / 4,
}

pytestmark = [
    pytest.mark.usefixtures("one_thread", "quick_collections"),
    pytest.mark.filterwarnings("ignore"),  # those of the packages are theirs
]


def missing(name: str) -> bool:
    return any(find_spec(package) is None for word, package in PACKAGES.items() if name.startswith(word))


@pytest.mark.parametrize("name", zeros.CASES)
# Red when: a head, the hidden states under a fused head, or an output of a dataclass is not hooked; a loss's own custom
# function loses its rule; find_zeros counts modules below an attention at the live tokens.
def test_one_line_leaves_the_gradient_and_saves_what_find_zeros_says(name: str, tmp_path: Path):
    if missing(name):
        pytest.skip("needs the packages of nox -s integrations")
    training = zeros.CASES[name](tmp_path)
    plain = zeros.backward(training)
    with rowprop.find_zeros(training.model) as report:
        torch.manual_seed(0)
        training.loss().backward()
    handles = [rowprop.skip_zeros(place) for place in training.places]
    ours = zeros.backward(training)
    assert zeros.difference(plain, ours) <= 2e-6
    saved = 1 - ours.flops / plain.flops
    if name in SHARES:
        assert ours.flops <= 1.05 * SHARES[name] * plain.flops
    if "all" not in name:
        assert saved > 0.03
    predicted = max((place.saves for place in report.places), default=0.0)
    assert saved >= predicted - 0.06  # two places of one model save more together than either alone
    for handle in handles:
        handle.remove()
    assert zeros.backward(training).flops == plain.flops


def test_what_differs_most_in_float32_is_exact_in_float64(tmp_path: Path):
    # Red when: a reward's gradient loses or gains anything but rounding.
    name = next(name for name in zeros.CASES if "RewardTrainer" in name)
    if missing(name):
        pytest.skip("needs the packages of nox -s integrations")
    training = zeros.CASES[name](tmp_path)
    training.model.double()
    plain = zeros.backward(training)
    for place in training.places:
        rowprop.skip_zeros(place)
    ours = zeros.backward(training)
    assert ours.flops < 0.85 * plain.flops
    assert zeros.difference(plain, ours) < 1e-15


def test_the_limit_counts_the_backward_by_its_flops():
    # Whatever the times are, it lies between the backward's share and 1. Red where the step's time is divided by the
    # backward's.
    row = zeros.measured("plain loop: `losses[losses.topk(16).indices].mean()`", rounds=2)
    assert 0.25 <= row["flops_ratio"] < row["step_limit"]["median"] < 1
