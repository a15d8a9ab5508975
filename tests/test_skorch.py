"""skorch with and without the mixin `SelectiveBackprop`: the rows, parameters and history of a plain loop.

The package lives in a venv of its own: `scripts/integrations`. Models are tiny.
"""

from __future__ import annotations

import functools
import pickle
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import plain_loop
import rowprop
from plain_loop import (
    BATCH,
    EPOCHS,
    RATE,
    ROWS,
    above,
    by_hand,
    by_hand_in_bfloat16,
    check_equal,
    check_same,
    check_two_ranks,
    hardest,
    last_line_of,
    losses_of,
    means_of_kept,
    network,
)
from rowprop.errors import InvalidInput
from rowprop.history import LossHistory
from rowprop.selection.common import mean_of

MODULE = "rowprop.integrations.skorch"

needs_skorch = pytest.mark.skipif(find_spec("skorch") is None, reason="needs skorch: scripts/integrations")
pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore"),  # those of skorch are its own
]


def data() -> tuple[Tensor, ...]:
    return plain_loop.data().tensors


class Network(nn.Sequential):
    """The network as a class, which skorch makes and a pickle finds."""

    def __init__(self) -> None:
        super().__init__(*network())


@functools.cache
def kind_of(*bases: type) -> Any:
    """A class of nets behind the mixins, where a pickle finds it."""
    from skorch import NeuralNetClassifier

    name = "".join(base.__name__ for base in bases) or "Plain"
    globals()[name] = kind = type(name, (*bases, NeuralNetClassifier), {"__module__": __name__})
    return kind


def net_of(*bases: type, batch: int = BATCH, module: type = Network, **given: Any) -> Any:
    """A net of skorch behind the mixins."""
    settings: dict[str, Any] = {"criterion": nn.CrossEntropyLoss, "max_epochs": EPOCHS, "verbose": 0}
    kind = kind_of(*bases)
    return kind(module, batch_size=batch, lr=RATE, train_split=None, classes=[0, 1, 2], **settings | given)


def accelerated(**given: Any) -> Any:
    """An accelerator that does not remember another one."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, PartialState

    AcceleratorState._reset_state()
    PartialState._reset_state()
    return Accelerator(cpu=True, **given)


@needs_skorch
@pytest.mark.parametrize("engine", ["sliced", "recompute"])
def test_the_parameters_and_the_history_are_those_of_a_plain_loop(engine: str):
    # Red when: the loss is the mean of all rows, or the history's loss is that of the kept ones.
    from rowprop.integrations.skorch import SelectiveBackprop

    net = net_of(SelectiveBackprop, selector=rowprop.TopK(keep=0.5), selective__engine=engine).fit(*data())
    model, logged = by_hand(hardest(0.5))
    check_same(net.module_, model)
    found = [batch for epoch in net.history for batch in epoch["batches"]]
    for batch, truth in zip(found, logged, strict=True):
        assert {name: batch[name] for name in truth} == pytest.approx(truth, abs=1e-5)
        assert batch["loss_all"] == batch["train_loss"]
    for name, by_batch in (("train_loss", "loss_all"), ("loss_kept", "loss_kept"), ("kept", "kept")):
        truth = sum(each[by_batch] for each in logged[-ROWS // BATCH :]) * BATCH / ROWS
        assert net.history[-1, name] == pytest.approx(truth, abs=1e-5)


@needs_skorch
def test_a_batch_that_keeps_nothing_leaves_the_loss_of_the_kept_rows_known():
    # Red when: the batch's NaN goes into the epoch's mean, or batches count alike however many rows they keep.
    from rowprop.integrations.skorch import SelectiveBackprop

    def net(select: Any) -> Any:
        kept = {"selector": lambda losses, context: mean_of(select(losses), losses), "selective__engine": "sliced"}
        return net_of(SelectiveBackprop, **kept).fit(*data())

    found, (model, logged) = net(above(1.4)), by_hand(above(1.4))
    check_same(found.module_, model)
    assert found.history[:, "loss_kept"] == pytest.approx(means_of_kept(logged), abs=1e-5)
    assert net(above(100.0)).history[:, "loss_kept"] == pytest.approx([float("nan")] * EPOCHS, nan_ok=True)


@needs_skorch
def test_where_the_losses_of_all_rows_are_unknown_train_loss_is_that_of_the_kept_ones():
    # Red when: train_loss is NaN, in a batch that keeps nothing too.
    from rowprop.integrations.skorch import SelectiveBackprop

    select = above(1.4)
    net = net_of(
        SelectiveBackprop, selector=lambda losses, context: mean_of(select(losses), losses),
        selective__engine="recompute",
        selective__scorer=lambda module, batch: losses_of(module, batch),
    )  # fmt: skip
    net.fit(*data())
    model, logged = by_hand(select)
    check_same(net.module_, model)
    shown = [batch["train_loss"] for epoch in net.history for batch in epoch["batches"]]
    assert shown == pytest.approx([each["loss_kept"] if each["kept"] else 0.0 for each in logged], abs=1e-5)
    assert net.history[-1, "train_loss"] == pytest.approx(sum(shown[-ROWS // BATCH :]) * BATCH / ROWS)


@needs_skorch
def test_callbacks_see_the_predictions_of_all_rows_and_validation_is_untouched():
    # Red when: the net hands on the predictions for the kept rows, or selects in a validation.
    from skorch.callbacks import EpochScoring
    from skorch.helper import predefined_split
    from torch.utils.data import TensorDataset

    from rowprop.integrations.skorch import SelectiveBackprop

    scoring = EpochScoring("accuracy", name="train_acc", lower_is_better=False, on_train=True)
    net = net_of(
        SelectiveBackprop, selector=rowprop.TopK(keep=0.25), selective__engine="recompute", callbacks=[scoring],
        batch=ROWS,
    )  # fmt: skip
    net.set_params(train_split=predefined_split(TensorDataset(*data())))
    net.fit(*data())
    model, (x, y) = Network(), data()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for epoch in range(EPOCHS):
        losses = losses_of(model, (x, y))
        assert net.history[epoch, "train_acc"] == pytest.approx(float((model(x).argmax(1) == y).float().mean()))
        losses.topk(ROWS // 4).values.mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        assert net.history[epoch, "valid_loss"] == pytest.approx(float(losses_of(model, (x, y)).mean()), abs=1e-6)


@needs_skorch
def test_accumulation_is_the_nets_own():
    # The net that skorch's pages give for it. Red when: a step is taken, or gradients are cleared, by the mixin.
    from rowprop.integrations.skorch import SelectiveBackprop

    class Accumulating(SelectiveBackprop):
        def get_loss(self, *args: Any, **kwargs: Any) -> Tensor:
            return super().get_loss(*args, **kwargs) / 2

        def train_step(self, batch: Any, **fit_params: Any) -> Any:
            step = self.train_step_single(batch, **fit_params)
            if len(self.history[-1, "batches"]) % 2 == 0:
                self.optimizer_.step()
                self.optimizer_.zero_grad()
            return step

    net = net_of(Accumulating, selector=rowprop.TopK(keep=0.25), selective__engine="sliced").fit(*data())
    model, logged = by_hand(hardest(0.25), every=2)
    check_same(net.module_, model)
    assert net.history[-1, "batches", -1, "train_loss"] == pytest.approx(logged[-1]["loss_all"], abs=1e-5)


@needs_skorch
def test_accumulation_of_accelerate_is_that_of_the_untouched_net():
    # Against the same net with plain indexing in its loss. Red when: the backward goes past accelerate, which divides
    # by the number of accumulated batches.
    from skorch.hf import AccelerateMixin

    from rowprop.integrations.skorch import SelectiveBackprop

    class Indexing(AccelerateMixin):
        def get_loss(self, y_pred: Tensor, y_true: Tensor, *_: Any, **__: Any) -> Tensor:
            losses = nn.functional.cross_entropy(y_pred, y_true, reduction="none")
            return losses[losses.topk(BATCH // 4).indices].mean()

    two = {"gradient_accumulation_steps": 2}
    plain = net_of(Indexing, accelerator=accelerated(**two)).fit(*data())
    net = net_of(
        SelectiveBackprop, AccelerateMixin, selector=rowprop.TopK(keep=0.25), selective__engine="sliced",
        accelerator=accelerated(**two),
    )  # fmt: skip
    check_same(net.fit(*data()).module_, plain.module_)


@needs_skorch
def test_mixed_precision_is_accelerates():
    # Against a second forward of the kept rows under bfloat16, written out. Red when: the module
    # is called outside of the autocast of accelerate.
    from skorch.hf import AccelerateMixin

    from rowprop.integrations.skorch import SelectiveBackprop

    net = net_of(
        SelectiveBackprop, AccelerateMixin, selector=rowprop.TopK(keep=0.25), selective__engine="recompute",
        accelerator=accelerated(mixed_precision="bf16"),
    )  # fmt: skip
    net.fit(*data())
    check_same(net.module_, by_hand_in_bfloat16(0.25))


class Parallel:
    def initialize_module(self) -> Any:
        super().initialize_module()
        self.module_ = nn.parallel.DistributedDataParallel(self.module_)
        return self


@needs_skorch
def test_two_processes_train_on_the_rows_of_both(tmp_path: Path):
    # Red when: a rank's loss carries another factor than its share of the kept rows.
    from rowprop.integrations.skorch import SelectiveBackprop

    def train(rank: int) -> nn.Module:
        net = net_of(SelectiveBackprop, Parallel, selector=rowprop.AboveMean(), selective__engine="sliced")
        net.fit(*(part[rank::2] for part in data()))
        return net.module_.module

    check_two_ranks(train, tmp_path)


@needs_skorch
def test_all_rows_are_the_untouched_net():
    # Bit for bit, with batches of 6 rows, and with the criterion that skorch takes by default, on probabilities. Red
    # when: the loss is a sum of losses times 1/6, is scaled, or when the net's own get_loss is left out.
    from rowprop.integrations.skorch import SelectiveBackprop

    for criterion in (nn.CrossEntropyLoss, nn.NLLLoss):
        given = {"batch": 6, "criterion": criterion, "module__head": nn.Softmax(1)}
        given |= {} if criterion is nn.NLLLoss else {"module__head": nn.Identity()}
        plain = net_of(module=Headed, **given).fit(*data())
        selective = net_of(SelectiveBackprop, module=Headed, selector=rowprop.TopK(keep=1.0), **given).fit(*data())
        check_equal(plain.module_, selective.module_)
        for ours, theirs in zip(selective.history, plain.history, strict=True):
            assert ours["train_loss"] == pytest.approx(theirs["train_loss"], rel=1e-6)  # summed in another order


class Headed(nn.Module):
    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.body, self.head = Network(), head

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


@needs_skorch
def test_a_resumed_training_goes_on_bit_for_bit(tmp_path: Path):
    # By skorch's files, and by a pickle. Red when: the state holds no generator, or a step is made anew in each fit.
    from rowprop.integrations.skorch import SelectiveBackprop

    def fresh() -> Any:
        generator = torch.Generator().manual_seed(3)
        settings = {"selective__engine": "sliced", "selective__generator": generator}
        return net_of(SelectiveBackprop, selector=rowprop.RandomRows(keep=0.5), **settings)

    straight, first, second = fresh().fit(*data()), fresh(), fresh().initialize()
    first.set_params(max_epochs=1).fit(*data())
    files = {name: str(tmp_path / name) for name in ("f_params", "f_optimizer", "f_selective")}
    first.save_params(**files)
    second.load_params(**files)
    pickled = pickle.loads(pickle.dumps(first))
    for net in (second, pickled):
        net.set_params(max_epochs=1).partial_fit(*data())
        check_equal(net.module_, straight.module_)
        assert net.record_.step == straight.record_.step == EPOCHS * ROWS // BATCH - 1


@needs_skorch
def test_the_kept_share_of_each_class_is_in_the_history_on_request():
    # Against counts by hand. Red when: shares are of all kept rows, or classes and rows are of different batches.
    from rowprop.integrations.skorch import SelectiveBackprop

    net = net_of(SelectiveBackprop, selector=rowprop.TopK(keep=0.5), classes_fn=lambda batch: batch[1]).fit(*data())
    x, y = (part[:BATCH] for part in data())
    rows = losses_of(Network(), (x, y)).topk(BATCH // 2).indices
    for number in y.unique().tolist():
        expected = int((y[rows] == number).sum()) / int((y == number).sum())
        assert net.history[0, "batches", 0, f"kept/{number}"] == pytest.approx(expected)


@needs_skorch
def test_schedules_follow_the_epochs_of_the_net():
    # Red when: the progress counts from the second batch, or begins anew in each epoch.
    from rowprop.integrations.skorch import SelectiveBackprop

    seen = list[float]()

    def keep(progress: float) -> float:
        seen.append(progress)
        return 0.5

    net_of(SelectiveBackprop, selector=rowprop.TopK(keep), selective__engine="sliced").fit(*data())
    steps = EPOCHS * ROWS // BATCH
    assert sorted(set(seen)) == pytest.approx([step / steps for step in range(steps)])


@needs_skorch
def test_a_net_is_cloned_and_its_settings_are_searched():
    # As scikit-learn's searches do it. Red when: a parameter of the mixin is missing among those of the net.
    from sklearn.base import clone

    from rowprop.integrations.skorch import SelectiveBackprop

    net = net_of(SelectiveBackprop, selector=rowprop.TopK(keep=0.5), selective__engine="sliced")
    other = clone(net).set_params(selector=rowprop.TopK(keep=0.25), selective__engine="recompute").fit(*data())
    assert (other.record_.num_kept, other.record_.engine) == (BATCH // 4, "recompute")


@needs_skorch
def test_a_get_loss_of_the_users_own_adds_to_the_loss_of_the_kept_rows():
    # Red when: the penalty counts twice, or not at all.
    from rowprop.integrations.skorch import SelectiveBackprop

    class Penalized(SelectiveBackprop):
        def get_loss(self, *args: Any, **kwargs: Any) -> Tensor:
            return super().get_loss(*args, **kwargs) + self.module_[0].weight.square().sum()

    net = net_of(Penalized, selector=rowprop.TopK(keep=0.5), selective__engine="sliced", batch=ROWS, max_epochs=1)
    net.fit(*data())
    model = Network()
    (losses_of(model, data()).topk(ROWS // 2).values.mean() + model[0].weight.square().sum()).backward()
    torch.optim.SGD(model.parameters(), lr=RATE).step()
    check_same(net.module_, model)


@needs_skorch
def test_the_page_runs(capsys: pytest.CaptureFixture[str]):
    # Red when: a line of the page no longer works, or prints something else.
    assert last_line_of("skorch.md", capsys) == "16 64"


@needs_skorch
def test_what_the_net_refuses():
    from rowprop.integrations.skorch import SelectiveBackprop

    def net(*bases: type, **given: Any) -> Any:
        return net_of(*(bases or (SelectiveBackprop,)), selector=rowprop.TopK(keep=0.5), **given)

    class Alone(SelectiveBackprop):
        def get_loss(self, y_pred: Any, y_true: Any, *_: Any, **__: Any) -> Tensor:
            return nn.functional.cross_entropy(y_pred, y_true)

    for made, words in (
        (net(selective__accumulate_to=8), r"AccelerateMixin"),
        (net(selective__history=LossHistory(ROWS)), r"carry no ids"),
        (net(losses_fn=3), r"losses_fn=3"),
        (net(Alone), r"no rows were selected"),
        (net(criterion=nn.CrossEntropyLoss, criterion__reduction="sum"), r"reduction='sum'"),
        (net(optimizer=torch.optim.LBFGS), r"more than once"),
    ):
        with pytest.raises(InvalidInput, match=words):
            made.fit(*data())
