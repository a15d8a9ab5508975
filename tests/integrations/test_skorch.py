"""The script of docs/skorch.md against a plain loop. The package lives in a venv of its own: `nox -s integrations`."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from plain_loop import check_page_trains_as_by_hand

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(find_spec("skorch") is None, reason="needs skorch: nox -s integrations"),
    pytest.mark.filterwarnings("ignore"),  # those of skorch are its own
]


def test_the_page_trains_as_a_plain_loop(capsys: pytest.CaptureFixture[str]):
    # Red when: a line of the page no longer works, prints something else, or trains on other rows.
    names = check_page_trains_as_by_hand("skorch.md", "module", capsys)
    assert names["net"].module_ is names["module"]
    assert names["net"].history[-1, "train_loss"] > 1
