"""Lightning with and without the callback: the rows, parameters and logs of a plain loop.

The package lives in a venv of its own: `nox -s integrations`. Models are tiny.
"""

from __future__ import annotations

import importlib
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import plain_loop
import rowprop
from plain_loop import BATCH, EPOCHS, ROWS, by_hand, check_same, hardest, network
from rowprop.errors import InvalidInput
from trainers import Lightning, fit, module_of

MODULE = "rowprop.integrations.lightning"

pytestmark = plain_loop.only_with("lightning", "integrations")
ours = Lightning().ours


@pytest.mark.parametrize("raised", [OSError, KeyboardInterrupt])
def test_the_module_is_as_it_was_after_an_exception(
    raised: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
):
    # Against the module's own step, which is an attribute of the instance. Red when: it is given back after a success
    # alone, or is gone; when a second fit does not select; or when a checkpoint of the exception waits for other ranks.
    request.addfinalizer(partial(signal.signal, signal.SIGINT, signal.getsignal(signal.SIGINT)))  # Lightning ignores it
    monkeypatch.setattr(f"{MODULE}.gather_states", lambda state: [state, state])
    saved = list[Any]()

    def fail(trainer: Any, *_: Any) -> None:
        if trainer.global_step == 2:
            raise raised

    module = module_of("lightning.pytorch")
    module.training_step = own = lambda batch, _: module.losses(batch).mean()
    callback = ours(rowprop.TopK(keep=0.5), engine="sliced")
    failing = importlib.import_module("lightning.pytorch.callbacks").LambdaCallback(
        on_train_batch_end=fail, on_exception=lambda *_: saved.append(callback.state_dict())
    )
    with pytest.raises(SystemExit if raised is KeyboardInterrupt else raised):
        fit(module, [callback, failing], tmp_path)
    assert len(saved[0]["ranks"]) == 1
    assert vars(module)["training_step"] is own
    module.network.load_state_dict(network().state_dict())
    fit(module, [callback], tmp_path)
    check_same(module.network, by_hand(hardest(0.5))[0])
    assert vars(module)["training_step"] is own
    assert len(callback.state_dict()["ranks"]) == 2


@pytest.mark.parametrize(("max_epochs", "max_steps"), [(2, 4), (2, 100), (2, -1), (None, 4)])
def test_progress_ends_where_the_training_does(max_epochs: int | None, max_steps: int, tmp_path: Path):
    # Red when: one of the two limits is left out where it comes first.
    seen = list[float]()

    class Sees(rowprop.TopK):
        def __call__(self, scores: Tensor, context: Any = None) -> Any:
            seen.append(context.progress)
            return super().__call__(scores, context)

    callback = ours(Sees(keep=0.5), engine="sliced")
    fit(module_of("lightning.pytorch"), [callback], tmp_path, max_epochs=max_epochs, max_steps=max_steps)
    whole = 4 if max_steps == 4 else EPOCHS * ROWS // BATCH
    assert seen == pytest.approx([number / whole for number in range(whole)])


def test_what_the_callback_refuses(tmp_path: Path):
    half = rowprop.TopK(keep=0.5)
    with pytest.raises(InvalidInput, match=r"accumulate_grad_batches"):
        ours(half, accumulate_to=8)
    for said, changed in (
        (r"optimizes by hand", {"automatic_optimization": False}),
        (r"has no method losses\(batch\)", {"losses": None}),
        (r"more than once, as LBFGS does", {"configure_optimizers": lambda: torch.optim.LBFGS(module.parameters())}),
    ):
        module = module_of("lightning.pytorch")
        for name, value in changed.items():
            setattr(module, name, value)
        with pytest.raises(InvalidInput, match=said):
            fit(module, [ours(half)], tmp_path)
