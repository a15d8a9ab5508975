"""What skip_zeros saves in the frameworks' own trainings: one line beside each, nothing else changed.

For each training the loss is that of the framework, computed by the framework, on one model and batch. In each round
the untouched step and the one with `rowprop.skip_zeros` (forward, backward, AdamW) come one after the other, in an
order that turns from round to round. A time is the processor's for this process, of the backward and of the whole step,
over the untouched one's beside it: the median over the rounds, with the quartiles. FLOPs are those of the backward, and
are counted. The limit of a step is (F + bB) / (F + B): B is the time of the untouched backward, F that of the rest, b
the ratio of FLOPs. The gradients' difference is the largest of any parameter, as a share of the largest entry of all.

It needs the packages of `nox -s integrations`: run it with `.nox/integrations/bin/python`.
"""

from __future__ import annotations

import argparse
import tempfile
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import rowprop
from bench_step import RESULTS, device_stem, save, setting, spread

VOCABULARY, WIDTH, DEPTH, HEADS, LENGTH, ROWS = 2048, 192, 4, 4, 128, 16
HEADER = (
    "| training | skipped | error | FLOPs | backward (quartiles) | step (quartiles) | limit |\n" + "|---" * 7 + "|\n"
)


class Training(NamedTuple):
    """A model, the modules to skip zeros at, and the framework's loss of one batch."""

    model: nn.Module
    places: list[nn.Module]
    loss: Callable[[], Tensor]


CASES: dict[str, Callable[[Path], Training]] = {}


def case(name: str) -> Callable[[Any], Any]:
    """Enter a training under its name in the table."""

    def enter(make: Callable[[Path], Training]) -> Callable[[Path], Training]:
        CASES[name] = make
        return make

    return enter


def drawn() -> torch.Generator:
    """Numbers that are the same every time."""
    return torch.Generator().manual_seed(0)


# --- plain loops ------------------------------------------------------------------------------------------------------


def encoder() -> nn.Module:
    """A transformer of vectors: (N, T, WIDTH) to (N, 10)."""

    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, 0.0, F.gelu, batch_first=True, norm_first=True)
            self.layers = nn.TransformerEncoder(layer, DEPTH, enable_nested_tensor=False)
            self.head = nn.Linear(WIDTH, 10)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.layers(x).mean(1))

    torch.manual_seed(0)
    return Encoder()


def looped(loss_of: Callable[[Tensor, Tensor], Tensor]) -> Training:
    """A plain loop: the loss of the model's logits and the labels."""
    model = encoder()
    x, y = torch.randn(64, 32, WIDTH, generator=drawn()), torch.randint(10, (64,), generator=drawn())
    return Training(model, [model], lambda: loss_of(model(x), y))


@case("plain loop: `losses[losses.topk(16).indices].mean()`")
def forum(_: Path) -> Training:
    def loss(logits: Tensor, y: Tensor) -> Tensor:
        losses = F.cross_entropy(logits, y, reduction="none")
        return losses[losses.topk(16).indices].mean()

    return looped(loss)


@case("plain loop: a hinge, three in four satisfied")
def hinge(_: Path) -> Training:
    def loss(logits: Tensor, y: Tensor) -> Tensor:
        margins = logits.gather(1, y[:, None]).squeeze(1) - logits.mean(1)
        return (margins.detach().quantile(0.25) - margins).relu().mean()

    return looped(loss)


@case("plain loop: `torch.where`, half of the rows")
def where(_: Path) -> Training:
    def loss(logits: Tensor, y: Tensor) -> Tensor:
        return torch.where(y < 5, F.cross_entropy(logits, y, reduction="none"), 0.0).mean()

    return looped(loss)


@case("plain loop: `clamp`, half of the rows at the bound")
def clamped(_: Path) -> Training:
    def loss(logits: Tensor, y: Tensor) -> Tensor:
        losses = F.cross_entropy(logits, y, reduction="none")
        return losses.clamp(max=losses.detach().median()).mean()

    return looped(loss)


# --- language models --------------------------------------------------------------------------------------------------


def llama() -> Any:
    """A decoder from a config; the same weights every time."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=3 * WIDTH, num_hidden_layers=DEPTH,
        num_attention_heads=HEADS, num_key_value_heads=HEADS, pad_token_id=1, eos_token_id=2,
    )).train()  # fmt: skip


def conversations(masked: float) -> tuple[Tensor, Tensor]:
    """Token ids, and labels of which the first part of each row is masked."""
    ids = torch.randint(3, VOCABULARY, (ROWS, LENGTH), generator=drawn())
    labels = ids.clone()
    labels[:, : round(masked * LENGTH)] = -100
    return ids, labels


@case("transformers: its own loss, 90 % of each row masked")
def causal(_: Path) -> Training:
    model = llama()
    ids, labels = conversations(0.9)
    return Training(model, [model], lambda: model(input_ids=ids, labels=labels).loss)


@case("transformers: its own loss, three rows in four masked")
def causal_rows(_: Path) -> Training:
    model = llama()
    ids, labels = conversations(0.0)
    labels[ROWS // 4 :] = -100
    return Training(model, [model], lambda: model(input_ids=ids, labels=labels).loss)


@case("transformers: masked language modelling, 15 % of the tokens")
def masked_words(_: Path) -> Training:
    from transformers import BertConfig, BertForMaskedLM

    torch.manual_seed(0)
    model = BertForMaskedLM(BertConfig(
        vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=4 * WIDTH, num_hidden_layers=DEPTH,
        num_attention_heads=HEADS, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )).train()  # fmt: skip
    ids = torch.randint(3, VOCABULARY, (ROWS, LENGTH), generator=drawn())
    labels = torch.where(torch.rand(ROWS, LENGTH, generator=drawn()) < 0.15, ids, -100)
    return Training(model, [model], lambda: model(input_ids=ids, labels=labels).loss)


@case("distillation on chosen tokens, 10 % of them")
def distilled(_: Path) -> Training:
    student, teacher = llama(), llama()
    with torch.no_grad():
        for parameter in teacher.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=drawn()), alpha=0.02)
    ids, _labels = conversations(0.0)
    chosen = torch.rand(ROWS, LENGTH, generator=drawn()) < 0.1

    def loss() -> Tensor:
        with torch.no_grad():
            target = teacher(input_ids=ids).logits.log_softmax(2)
        apart = F.kl_div(student(input_ids=ids).logits.log_softmax(2), target, reduction="none", log_target=True)
        return (apart.sum(2) * chosen).sum() / chosen.sum()

    return Training(student, [student], loss)


# --- TRL --------------------------------------------------------------------------------------------------------------


def words(vocabulary: int = VOCABULARY) -> Any:
    """A tokenizer whose words are numbers."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = ["<unk>", "<pad>", "<eos>", *(f"w{place}" for place in range(3, vocabulary))]
    made = Tokenizer(models.WordLevel({name: place for place, name in enumerate(names)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>")


def text(length: int, generator: torch.Generator) -> str:
    return " ".join(f"w{int(token)}" for token in torch.randint(3, VOCABULARY, (length,), generator=generator))


QUIET = {
    "report_to": [], "save_strategy": "no", "disable_tqdm": True, "use_cpu": True, "bf16": False,
    "gradient_checkpointing": False, "per_device_train_batch_size": ROWS,
}  # fmt: skip


def first_batch(trainer: Any) -> Training:
    """The trainer's loss of its first batch."""
    batch = next(iter(trainer.get_train_dataloader()))
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()
    return Training(trainer.model, [trainer.model], lambda: trainer.compute_loss(trainer.model, dict(batch)))


def finetuned(folder: Path, **settings: Any) -> Training:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    ids, labels = conversations(0.9)
    lengths = torch.randint(LENGTH // 2, LENGTH + 1, (ROWS,), generator=drawn()).tolist()
    rows = [
        {"input_ids": row[-n:].tolist(), "labels": label[-n:].tolist()}
        for row, label, n in zip(ids, labels, lengths, strict=True)
    ]
    config = SFTConfig(output_dir=str(folder), **QUIET | {"max_length": LENGTH} | settings)
    return first_batch(SFTTrainer(llama(), config, train_dataset=Dataset.from_list(rows), processing_class=words()))


@case("TRL `SFTTrainer`: answers only, 10 to 20 % of the tokens, padded")
def sft(folder: Path) -> Training:
    return finetuned(folder)


@case("TRL `SFTTrainer`: the same, packed")
def sft_packed(folder: Path) -> Training:
    return finetuned(folder, packing=True, per_device_train_batch_size=4)


@case("TRL `SFTTrainer`: the same, free of padding")
def sft_free(folder: Path) -> Training:
    return finetuned(folder, padding_free=True, max_length=None)


def preferences() -> Any:
    from datasets import Dataset

    generator = drawn()
    rows = [
        {"prompt": text(96, generator), "chosen": " " + text(24, generator), "rejected": " " + text(24, generator)}
        for _ in range(ROWS)
    ]
    return Dataset.from_list(rows)


@case("TRL `DPOTrainer`: prompts of 96 tokens, answers of 24")
def dpo(folder: Path) -> Training:
    from trl import DPOConfig, DPOTrainer

    config = DPOConfig(output_dir=str(folder), max_length=LENGTH, **QUIET | {"per_device_train_batch_size": ROWS // 2})
    return first_batch(DPOTrainer(llama(), llama(), config, train_dataset=preferences(), processing_class=words()))


@case("TRL `RewardTrainer`: one token of each answer has a reward")
def reward(folder: Path) -> Training:
    from transformers import LlamaForSequenceClassification
    from trl import RewardConfig, RewardTrainer

    config = llama().config
    config.num_labels = 1
    torch.manual_seed(0)
    model = LlamaForSequenceClassification(config)
    given = RewardConfig(
        output_dir=str(folder), max_length=LENGTH, **QUIET | {"per_device_train_batch_size": ROWS // 2}
    )
    return first_batch(RewardTrainer(model, given, train_dataset=preferences(), processing_class=words()))


def policy(folder: Path, beta: float = 0.0) -> Training:
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    prompt, answer, rows, group = 32, 64, 32, 8
    generator = drawn()
    config = GRPOConfig(output_dir=str(folder), num_generations=group, **QUIET)
    trainer: Any = GRPOTrainer(
        llama(), lambda completion_ids, **_: [0.0] * len(completion_ids), config,
        train_dataset=Dataset.from_list([{"prompt": text(prompt, generator)} for _ in range(8)]),
        processing_class=words(),
    )  # fmt: skip
    ids = torch.randint(3, VOCABULARY, (rows, prompt + answer), generator=generator)
    prompts, completions = ids.split([prompt, answer], 1)
    advantages = torch.randn(rows, generator=generator)
    advantages[: round(0.63 * rows)] = 0
    batch: dict[str, Any] = {
        "prompt_ids": prompts, "prompt_mask": torch.ones_like(prompts), "completion_ids": completions,
        "completion_mask": torch.ones_like(completions), "num_items_in_batch": torch.tensor(completions.numel()),
        "advantages": advantages,
    }  # fmt: skip
    if beta:
        trainer.beta = beta  # later, or it would look for the reference model's weights
        batch["ref_per_token_logps"] = torch.full(completions.shape, -7.0)
    trainer.current_gradient_accumulation_steps = 1
    model = trainer.model.train()
    return Training(model, [model], lambda: trainer.compute_loss(model, batch))


@case("TRL `GRPOTrainer`: 63 % of the answers without advantage")
def grpo(folder: Path) -> Training:
    return policy(folder)


@case("TRL `GRPOTrainer`: the same, with a divergence (`beta=0.04`): all answers live")
def grpo_beta(folder: Path) -> Training:
    return policy(folder, beta=0.04)


# --- sentence-transformers --------------------------------------------------------------------------------------------


def sentences(loss_of: Callable[[Any, Callable[[], list[Tensor]]], nn.Module], parts: int) -> Training:
    """A loss of `parts` sentences to a row; it is made from the model and from a function that embeds them.

    Of two sentences that belong together 30 to 100 % of the words are the same, of two others up to 50 %.
    """
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        config = BertConfig(
            vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=4 * WIDTH, num_hidden_layers=DEPTH,
            num_attention_heads=HEADS, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, initializer_range=0.1,
        )  # fmt: skip
        BertModel(config).save_pretrained(folder)
        words().save_pretrained(folder)
        inner = Transformer(folder)
    model: Any = SentenceTransformer(modules=[inner, Pooling(WIDTH)], device="cpu").train()
    generator = drawn()
    batches = [torch.randint(3, VOCABULARY, (32, 32), generator=generator) for _ in range(parts)]
    labels = torch.arange(32) % 2
    same = torch.rand(32, 1, generator=generator) * torch.where(labels == 1, 0.7, 0.5)[:, None] + 0.3 * labels[:, None]
    batches[1] = torch.where(torch.rand(32, 32, generator=generator) < same, *batches[:2])

    def features() -> list[dict[str, Tensor]]:
        return [{"input_ids": ids, "attention_mask": torch.ones_like(ids)} for ids in batches]

    def embedded() -> list[Tensor]:
        with torch.no_grad():
            return [model(each)["sentence_embedding"] for each in features()]

    loss = loss_of(model, embedded)
    return Training(model, [model], lambda: loss(features(), labels))


@case("sentence-transformers: `TripletLoss`, three triplets in four satisfied")
def triplets(_: Path) -> Training:
    from sentence_transformers.sentence_transformer.losses import TripletLoss

    def loss(model: Any, embedded: Callable[[], list[Tensor]]) -> nn.Module:
        anchor, near, far = embedded()
        apart = F.pairwise_distance(anchor, far) - F.pairwise_distance(anchor, near)
        return TripletLoss(model, triplet_margin=float(apart.quantile(0.25)))

    return sentences(loss, 3)


@case("sentence-transformers: `OnlineContrastiveLoss`: the hard pairs")
def contrastive(_: Path) -> Training:
    from sentence_transformers.sentence_transformer.losses import OnlineContrastiveLoss

    return sentences(lambda model, _: OnlineContrastiveLoss(model), 2)


@case("sentence-transformers: `CachedMultipleNegativesRankingLoss`: all rows live")
def cached(_: Path) -> Training:
    from sentence_transformers.sentence_transformer.losses import CachedMultipleNegativesRankingLoss

    return sentences(lambda model, _: CachedMultipleNegativesRankingLoss(model, mini_batch_size=8), 2)


# --- images -----------------------------------------------------------------------------------------------------------


@case("transformers: SegFormer, three images in four ignored whole")
def segmented(_: Path) -> Training:
    from transformers import SegformerConfig, SegformerForSemanticSegmentation

    torch.manual_seed(0)
    config = SegformerConfig(
        num_encoder_blocks=4, depths=[2, 2, 2, 2], hidden_sizes=[32, 64, 128, 256], decoder_hidden_size=128,
        num_labels=5, num_attention_heads=[1, 2, 4, 8], hidden_dropout_prob=0.0,
        drop_path_rate=0.0, classifier_dropout_prob=0.0,
    )  # fmt: skip
    model = SegformerForSemanticSegmentation(config).train()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eval()  # frozen: in training its statistics mix the images
    pixels = torch.randn(8, 3, 160, 160, generator=drawn())
    labels = torch.randint(5, (8, 160, 160), generator=drawn())
    labels[2:] = 255
    return Training(model, [model], lambda: model(pixel_values=pixels, labels=labels).loss)


@case("transformers: DETR: unmatched queries have no box, but a class")
def detected(_: Path) -> Training:
    from transformers import DetrConfig, DetrForObjectDetection, ResNetConfig

    torch.manual_seed(0)
    backbone = ResNetConfig(
        embedding_size=16, hidden_sizes=[16, 32, 64, 128], depths=[1, 1, 1, 1], out_features=["stage4"]
    )
    model = DetrForObjectDetection(DetrConfig(
        use_timm_backbone=False, use_pretrained_backbone=False, backbone=None, backbone_config=backbone, d_model=128,
        encoder_layers=2, decoder_layers=3, encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=256,
        decoder_ffn_dim=256, num_queries=50, num_labels=5, dropout=0.0, auxiliary_loss=False,
    )).train()  # fmt: skip
    generator = drawn()
    pixels = torch.randn(8, 3, 160, 160, generator=generator)
    boxes = [torch.rand(3, 4, generator=generator) * 0.3 + 0.2 for _ in range(8)]
    labels = [{"class_labels": torch.tensor([0, 1, 2]), "boxes": each} for each in boxes]
    return Training(model, [model, model.bbox_predictor], lambda: model(pixel_values=pixels, labels=labels).loss)


# --- measuring --------------------------------------------------------------------------------------------------------


class Backward(NamedTuple):
    """The gradient of each parameter, and the FLOPs."""

    grads: list[Tensor | None]
    flops: int


def backward(training: Training) -> Backward:
    """The gradient of every parameter, and the backward's FLOPs."""
    training.model.zero_grad()
    torch.manual_seed(0)
    loss = training.loss()
    with rowprop.cost.count_flops() as flops:
        loss.backward()
    return Backward(
        [None if p.grad is None else p.grad.clone() for p in training.model.parameters()], flops.total_flops
    )


def difference(expected: Backward, actual: Backward) -> float:
    """The largest difference of a parameter's gradient, over the largest entry of all."""
    scale, worst = max(float(g.abs().max()) for g in expected.grads if g is not None), 0.0
    for e, a in zip(expected.grads, actual.grads, strict=True):
        assert (e is None) is (a is None)
        if e is not None and a is not None:
            worst = max(worst, float((a - e).abs().max()) / scale)
    return worst


def measured(name: str, rounds: int) -> dict[str, Any]:
    """A row of the table."""
    with tempfile.TemporaryDirectory() as folder:
        training = CASES[name](Path(folder))
        plain = backward(training)
        with rowprop.find_zeros(training.model) as report:
            training.loss().backward()
        handles = [rowprop.skip_zeros(place) for place in training.places]
        ours = backward(training)
        optimizer = torch.optim.AdamW(training.model.parameters(), lr=0.0)
        times_s: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
        for number in range(rounds + 1):
            for skips in (False, True) if number % 2 else (True, False):
                begin_s = time.process_time()
                loss = training.loss()
                between_s = time.process_time()
                with nullcontext() if skips else handles[0].paused():
                    loss.backward()
                done_s = time.process_time()
                optimizer.step()
                optimizer.zero_grad()
                times_s[skips].append((done_s - between_s, time.process_time() - begin_s))
    pairs = list(zip(times_s[True][1:], times_s[False][1:], strict=True))
    saves = 1 - ours.flops / plain.flops
    return {
        "training": name, "record": str(handles[0].record), "found": str(report),
        "gradients_differ_by": difference(plain, ours), "flops_ratio": 1 - saves,
        "predicted": 1 - report.places[0].saves if report.places else 1.0,
        "backward_ratio": spread([ours[0] / plain[0] for ours, plain in pairs]),
        "step_ratio": spread([ours[1] / plain[1] for ours, plain in pairs]),
        "step_limit": spread([1 - saves * plain[0] / plain[1] for _, plain in pairs]),
    }  # fmt: skip


def line(row: dict[str, Any]) -> str:
    """The row as the page has it."""

    def ratio(value: dict[str, float]) -> str:
        return f"{value['median']:.2f} ({value['q1']:.2f} to {value['q3']:.2f})"

    cells = [
        row["training"],
        row["record"].removeprefix("skipped ").partition(":")[0],
        f"{row['gradients_differ_by']:.0e}",
    ]
    cells += [f"{row['flops_ratio']:.2f}", ratio(row["backward_ratio"]), ratio(row["step_ratio"])]
    cells += [f"{row['step_limit']['median']:.2f}"]
    return f"| {' | '.join(cells)} |\n"


def main() -> None:
    """Measure, print, and write JSON and markdown."""
    doc = __doc__ or ""
    parser = argparse.ArgumentParser(description=doc.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=9, help="steps of each kind (default %(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads (default %(default)s)")
    parser.add_argument("--only", default="", help="only trainings whose name has this in it")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the results (default %(default)s)")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(args.threads)
    print(HEADER, end="")
    rows: list[dict[str, Any]] = []
    for name in (name for name in CASES if args.only in name):
        rows.append(measured(name, args.rounds))
        print(line(rows[-1]), end="", flush=True)
    if not args.only:
        device = torch.device("cpu")
        versions = {name: version(name) for name in ("transformers", "trl", "sentence-transformers")}
        about = setting(device, args.threads, **versions)
        result = {"setting": about, "rows": rows}
        page = "\n".join(["# Zeros skipped", "", ", ".join(f"{k} {v}" for k, v in about.items()), "", doc, HEADER])
        page += "".join(map(line, rows))
        print(save(args.out, f"zeros-{device_stem(device, args.threads)}", result, page))


if __name__ == "__main__":
    main()
