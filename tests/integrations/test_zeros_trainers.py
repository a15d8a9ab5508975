"""find_zeros() in the training steps of other libraries: skip_zeros() at the first place saves what was promised there.

The packages live in a venv of their own: `nox -s integrations`. Each case makes its model, and a function that runs one
training step of the library on it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import rowprop

pytestmark = [
    pytest.mark.usefixtures("one_thread", "quick_collections"),
    pytest.mark.filterwarnings("ignore"),  # those of the packages
]


class Training(NamedTuple):
    """What find_zeros gets, one step of the library's trainer up to the gradients, and the module that is trained."""

    model: nn.Module
    step: Callable[[], Any]
    trained: nn.Module


CASES: dict[str, Callable[[Path], Training]] = {}


def case(make: Callable[[Path], Training]) -> Callable[[Path], Training]:
    CASES[make.__name__] = make
    return make


def mlp(width_in: int, width_out: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width_in, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, width_out))


def run(make: Callable[[Path], Training], folder: Path, place: str | None = None) -> tuple[int, list[Tensor], Any]:
    """The FLOPs of one step, with zeros skipped at a place if one is named; its gradients; the report of find_zeros."""

    def made() -> Training:
        torch.manual_seed(0)
        training = make(folder)
        torch.manual_seed(1)
        return training

    report, (model, step, trained) = None, made()
    if place is None:
        with rowprop.find_zeros(model) as report:
            step()
        model, step, trained = made()
    else:
        rowprop.skip_zeros(dict(model.named_modules()).get(place, model))  # the root is named by its class
    with rowprop.cost.count_flops() as count:
        step()
    grads = [parameter.grad for parameter in trained.parameters() if parameter.grad is not None]
    return count.total_flops, [grad.clone() for grad in grads], report


@case
def torch_transformer_encoder(_: Path) -> Training:
    """The default layout of nn.TransformerEncoder, (T, N, C), with a loss on one of four sequences."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0)
            self.embed, self.head = nn.Linear(16, 32), nn.Linear(32, 20)
            self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.layers(self.embed(x)))

    model, x = Model(), torch.randn(24, 8, 16)
    y = torch.where(torch.arange(8) < 2, torch.randint(20, (24, 8)), -100)
    return Training(model, lambda: F.cross_entropy(model(x).flatten(0, 1), y.flatten()).backward(), model)


@case
def transformers_trainer(folder: Path) -> Training:
    """transformers' Trainer: masked language modelling, with three of four rows without a masked word."""
    transformers = pytest.importorskip("transformers")
    model = transformers.BertForMaskedLM(transformers.BertConfig(
        vocab_size=200, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    ))  # fmt: skip
    ids = torch.randint(3, 200, (8, 24))
    masked = (torch.rand(8, 24) < 0.15) & (torch.arange(8) < 2)[:, None]
    batch = {"input_ids": ids, "labels": torch.where(masked, ids, -100)}
    arguments = transformers.TrainingArguments(str(folder), report_to=[], use_cpu=True)
    trainer = transformers.Trainer(model, arguments)
    trainer.create_optimizer()
    trainer.current_gradient_accumulation_steps = 1  # as train() sets it
    return Training(model, lambda: trainer.training_step(model, batch), model)


@case
def stable_baselines3(_: Path) -> Training:
    """PPO.train(): four epochs of minibatches, in which the clipped ratios have no gradient in the policy's network."""
    sb3 = pytest.importorskip("stable_baselines3")
    ppo = sb3.PPO("MlpPolicy", "CartPole-v1", n_steps=128, batch_size=32, n_epochs=4, learning_rate=0.02, seed=0,
                  device="cpu", clip_range=0.1)  # fmt: skip
    ppo.learn(0)  # sets up the logger
    ppo.collect_rollouts(ppo.env, _callback(sb3, ppo), ppo.rollout_buffer, 128)
    return Training(ppo.policy, ppo.train, ppo.policy)


def _callback(sb3: Any, ppo: Any) -> Any:
    from stable_baselines3.common.callbacks import CallbackList

    callback = CallbackList([])
    callback.init_callback(ppo)
    return callback


@case
def torchrl(_: Path) -> Training:
    """ClipPPOLoss, of which three of four ratios are clipped."""
    objectives = pytest.importorskip("torchrl.objectives")
    from tensordict import TensorDict
    from tensordict.nn import ProbabilisticTensorDictModule, ProbabilisticTensorDictSequential, TensorDictModule

    network, value = mlp(8, 4), mlp(8, 1)
    actor = ProbabilisticTensorDictSequential(
        TensorDictModule(network, ["observation"], ["logits"]),
        ProbabilisticTensorDictModule(
            ["logits"], ["action"], distribution_class=torch.distributions.Categorical, return_log_prob=True
        ),
    )
    critic = TensorDictModule(value, ["observation"], ["state_value"])
    loss = objectives.ClipPPOLoss(actor, critic, entropy_bonus=False)
    x = torch.randn(64, 8)
    with torch.no_grad():
        batch = actor(TensorDict({"observation": x}, [64]))
    clipped = (torch.arange(64) >= 16).float()
    batch["action_log_prob"] = batch["action_log_prob"] - clipped  # a ratio of e where the advantage is positive
    batch["advantage"], batch["value_target"] = torch.ones(64, 1), torch.randn(64, 1)
    return Training(actor, lambda: loss(batch)["loss_objective"].backward(), loss)


@case
def x_transformers(_: Path) -> Training:
    """AutoregressiveWrapper, with rows that are nothing but padding, and padded ends of the others."""
    library = pytest.importorskip("x_transformers")
    network = library.TransformerWrapper(
        num_tokens=64, max_seq_len=32, attn_layers=library.Decoder(dim=32, depth=2, heads=2, attn_dim_head=16)
    )
    model = library.AutoregressiveWrapper(network, ignore_index=-100, pad_value=0)
    ids = torch.randint(1, 64, (8, 24))
    ids[2:] = -100
    ids[:2, 18:] = -100
    return Training(model, lambda: model(ids).backward(), model)


@case
def pyro(_: Path) -> Training:
    """A variational autoencoder under poutine.mask: one in four rows is observed."""
    library = pytest.importorskip("pyro")
    distributions, infer = library.distributions, library.infer

    class Autoencoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.decoder = mlp(16, 8), mlp(4, 16)

        def guide(self, x: Tensor, mask: Tensor) -> None:
            library.module("encoder", self.encoder)
            with library.plate("rows", len(x)), library.poutine.mask(mask=mask):
                mean, log_scale = self.encoder(x).chunk(2, 1)
                library.sample("code", distributions.Normal(mean, log_scale.exp()).to_event(1))

        def model(self, x: Tensor, mask: Tensor) -> None:
            library.module("decoder", self.decoder)
            with library.plate("rows", len(x)), library.poutine.mask(mask=mask):
                code = library.sample("code", distributions.Normal(torch.zeros(len(x), 4), 1.0).to_event(1))
                library.sample("x", distributions.Normal(self.decoder(code), 1.0).to_event(1), obs=x)

    model, x, mask = Autoencoder(), torch.randn(64, 16), torch.arange(64) < 16
    return Training(model, lambda: infer.Trace_ELBO().loss_and_grads(model.model, model.guide, x, mask), model)


@case
def fair_esm(_: Path) -> Training:
    """ESM-2's masked language modelling: it works time first inside."""
    esm = pytest.importorskip("esm")
    alphabet = esm.data.Alphabet.from_architecture("ESM-1b")
    model = esm.model.esm2.ESM2(num_layers=2, embed_dim=32, attention_heads=2, alphabet=alphabet).train()
    ids = torch.randint(4, 24, (8, 24))
    masked = (torch.rand(8, 24) < 0.15) & (torch.arange(8) < 2)[:, None]
    inputs, labels = ids.masked_fill(masked, alphabet.mask_idx), torch.where(masked, ids, -100)
    return Training(
        model, lambda: F.cross_entropy(model(inputs)["logits"].flatten(0, 1), labels.flatten()).backward(), model
    )


@case
def pytorch_crf(_: Path) -> Training:
    """A tagger below a conditional random field; two of three tokens are padding."""
    crf = pytest.importorskip("torchcrf")

    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.emissions, self.crf = mlp(16, 5), crf.CRF(5, batch_first=True)

        def forward(self, x: Tensor, tags: Tensor, mask: Tensor) -> Tensor:
            return -self.crf(self.emissions(x), tags, mask, reduction="token_mean")

    model, x, tags = Tagger(), torch.randn(8, 24, 16), torch.randint(5, (8, 24))
    mask = torch.arange(24).expand(8, 24) < 8
    return Training(model, lambda: model(x, tags, mask).backward(), model)


@case
def gpytorch(_: Path) -> Training:
    """A variational Gaussian process on features of a network, with three of four labels missing."""
    library = pytest.importorskip("gpytorch")

    class Process(library.models.ApproximateGP):
        def __init__(self) -> None:
            points = torch.randn(8, 4)
            distribution = library.variational.CholeskyVariationalDistribution(8)
            super().__init__(library.variational.VariationalStrategy(self, points, distribution))
            self.mean, self.kernel = library.means.ConstantMean(), library.kernels.RBFKernel()

        def forward(self, x: Tensor) -> Any:
            return library.distributions.MultivariateNormal(self.mean(x), self.kernel(x))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.features, self.process = mlp(16, 4), Process()
            self.likelihood = library.likelihoods.GaussianLikelihood()

        def forward(self, x: Tensor) -> Any:
            return self.process(self.features(x))

    model, x = Model(), torch.randn(64, 16)
    y = torch.where(torch.arange(64) < 16, torch.randn(64), torch.nan)
    objective = library.mlls.VariationalELBO(model.likelihood, model.process, num_data=64)

    def step() -> None:
        with library.settings.observation_nan_policy("fill"):
            (-objective(model(x), y)).sum().backward()

    return Training(model, step, model)


@case
def pytorch_metric_learning(_: Path) -> Training:
    """TripletMarginLoss with a miner: anchors, positives and negatives that violate no margin have no gradient."""
    losses = pytest.importorskip("pytorch_metric_learning.losses")
    from pytorch_metric_learning.miners import TripletMarginMiner

    model, labels = mlp(16, 8), torch.arange(64) % 32
    x = torch.randn(32, 16)[labels] + 0.02 * torch.randn(64, 16)
    loss, miner = losses.TripletMarginLoss(margin=0.0005), TripletMarginMiner(margin=0.0005, type_of_triplets="all")

    def step() -> None:
        embeddings = model(x)
        loss(embeddings, labels, miner(embeddings, labels)).backward()

    return Training(model, step, model)


@case
def lightning(folder: Path) -> Training:
    """Trainer.fit(): a hinge that a part of the rows satisfies, another part in each of two steps."""
    library = pytest.importorskip("lightning")

    class Margins(library.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network = mlp(16, 1)

        def training_step(self, batch: Any, at: int) -> Tensor:
            scores = self.network(batch[0]).squeeze(1)
            return (scores - scores.detach().quantile((0.9, 0.5)[at])).relu().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 1e-3)

    model, loader = Margins(), torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(128, 16)), 64)
    trainer = library.Trainer(
        max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=folder,
    )  # fmt: skip
    return Training(model, lambda: trainer.fit(model, loader), model)


@pytest.mark.parametrize("name", CASES)
# Red with the inference of 0.2, which took time-first tensors for (N, T, C), counted modules of two outputs twice, and
# took what goes past the place for zeros; where find_zeros skips further at places below the first.
def test_the_first_place_saves_what_find_zeros_promises(name: str, tmp_path: Path):
    plain, expected, report = run(CASES[name], tmp_path)
    assert report.places, report
    ours, grads, _ = run(CASES[name], tmp_path, report.places[0].module)
    saved = (plain - ours) / report.backward_flops  # the forwards are the same
    assert saved > 0.03
    assert abs(report.places[0].saves - saved) <= 0.05, (report, saved)
    assert len(grads) == len(expected)
    largest = max(float(grad.abs().max()) for grad in expected)
    for mine, theirs in zip(grads, expected, strict=True):
        assert float((mine - theirs).abs().max()) <= 1e-5 * largest
