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
from plain_loop import BATCH, EPOCHS, ROWS, batches, by_hand, check_equal, check_same, data, descend, hardest, network
from rowprop.errors import InvalidInput
from rowprop.history import LossHistory, WithIds
from trainers import Lightning, fit, module_of

MODULE = "rowprop.integrations.lightning"

pytestmark = plain_loop.only_with("lightning", "integrations")
ours = Lightning().ours


def test_two_processes_train_on_the_rows_of_both(tmp_path: Path):
    # Red when: a rank's loss carries another factor than its share of the kept rows.
    module, model = module_of("lightning.pytorch"), network()
    ranks = [(x[rank::2], y[rank::2]) for x, y in batches(2 * BATCH) for rank in (0, 1)]
    hardest_half = lambda model, batch: plain_loop.losses_of(model, batch).topk(BATCH // 2).values.mean()  # noqa: E731
    descend(model, ranks, hardest_half, every=2)
    callback = ours(rowprop.TopK(keep=0.5), engine="sliced")
    fit(module, [callback], tmp_path, strategy="ddp_fork", devices=2, use_distributed_sampler=False)
    check_same(module.network, model)


def test_a_resumed_training_goes_on_bit_for_bit(tmp_path: Path):
    # Red when: the callback saves no state, so that the generator begins again.
    def callback() -> Any:
        generator = torch.Generator().manual_seed(3)
        return ours(rowprop.RandomRows(0.5), engine="sliced", generator=generator, history=LossHistory(ROWS))

    straight, first, second = (module_of("lightning.pytorch") for _ in range(3))
    dataset = WithIds(data())
    for module in (straight, first, second):
        module.validation_step = lambda *_: None
    whole = callback()
    fit(straight, [whole], tmp_path, dataset=dataset)
    trainer = fit(first, [callback()], tmp_path, dataset=dataset, max_epochs=1)
    trainer.save_checkpoint(tmp_path / "half.ckpt")
    resumed = callback()
    fit(second, [resumed], tmp_path, dataset=dataset, ckpt=tmp_path / "half.ckpt")
    check_equal(straight, second)
    known = (each.step.history.losses_of(torch.arange(ROWS)) for each in (whole, resumed))
    assert torch.equal(next(known), next(known))


def test_each_process_goes_on_with_its_own_state(tmp_path: Path):
    # Red when: the checkpoint holds the first rank's state alone, so that both draw the same rows after a resume.
    def train(part: str, **settings: Any) -> Any:
        module, callback = module_of("lightning.pytorch"), ours(rowprop.RandomRows(keep=0.5), engine="sliced")

        def seed(*_: Any, **__: Any) -> None:  # by rank: in the process, before the callback makes its step
            callback._settings["generator"] = torch.Generator().manual_seed(torch.distributed.get_rank())

        def note(trainer: Any, *_: Any) -> None:
            found = callback.step.generator.get_state(), [*module.state_dict().values()]
            torch.save(found, tmp_path / f"{part}_{trainer.global_rank}.pt")
            if trainer.max_epochs < EPOCHS:
                trainer.save_checkpoint(tmp_path / "half.ckpt")

        beside = importlib.import_module("lightning.pytorch.callbacks").LambdaCallback
        settings |= {"strategy": "ddp_fork", "devices": 2, "use_distributed_sampler": False}
        fit(module, [beside(setup=seed, on_train_end=note), callback], tmp_path, **settings)

    train("straight")
    train("first", max_epochs=1)
    train("resumed", ckpt=tmp_path / "half.ckpt")
    for rank in (0, 1):
        straight, resumed = (torch.load(tmp_path / f"{part}_{rank}.pt") for part in ("straight", "resumed"))
        assert torch.equal(straight[0], resumed[0])
        assert all(torch.equal(a, b) for a, b in zip(straight[1], resumed[1], strict=True))


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
