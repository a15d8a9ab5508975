"""What `find_zeros` says of training scripts that ship inside TRL, and what `skip_zeros` then saves there.

Each script of `trl.scripts` runs as `python -m` runs it, on a local decoder and local data given by its arguments. Its
first step runs inside `find_zeros`; the prediction is for the place that the report names. Then backwards with and
without `skip_zeros` at that place take turns. A time is the processor's for this process, over that of the plain
backward beside it: the median over the rounds, with the quartiles.

It needs the packages of `nox -s integrations`: run it with `.nox/integrations/bin/python`.
"""

from __future__ import annotations

import argparse
import json
import runpy
import statistics
import sys
import tempfile
import time
import warnings
from contextlib import nullcontext, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any
from unittest import mock

import rowprop
from zeros import ROWS, drawn, llama, text, words

SCRIPTS = ("sft", "dpo", "kto", "reward", "grpo")


class Enough(Exception):
    """Ends a script when its figures are known."""


def rows_of(script: str) -> list[dict[str, Any]]:
    """Data of the format that the script reads: prompts of 96 tokens, and answers of 24."""
    generator = drawn()
    rows: list[dict[str, Any]] = []
    for number in range(2 * ROWS):
        prompt, good, bad = (text(length, generator) for length in (96, 24, 24))
        rows.append({
            "sft": {"prompt": prompt, "completion": " " + good},
            "dpo": {"prompt": prompt, "chosen": " " + good, "rejected": " " + bad},
            "kto": {"prompt": prompt, "completion": " " + good, "label": number % 2 == 0},
            "reward": {"prompt": prompt, "chosen": " " + good, "rejected": " " + bad},
            "grpo": {"prompt": prompt},
        }[script])  # fmt: skip
    return rows


def arguments(script: str, folder: Path) -> list[str]:
    """The script's command line: the model and the data of the folder."""
    model = llama()
    if script == "reward":
        from transformers import LlamaForSequenceClassification

        model.config.num_labels = 1
        model = LlamaForSequenceClassification(model.config)
    model.save_pretrained(folder / "model")
    words().save_pretrained(folder / "model")
    (folder / "data").mkdir()
    lines = (json.dumps(row) + "\n" for row in rows_of(script))
    (folder / "data" / "train.jsonl").write_text("".join(lines))
    given = {
        "model_name_or_path": folder / "model", "dataset_name": folder / "data", "output_dir": folder / "out",
        "per_device_train_batch_size": 8, "report_to": "none", "use_cpu": True, "bf16": False, "dtype": "float32",
        "gradient_checkpointing": False, "disable_tqdm": True, "eval_strategy": "no",
    }  # fmt: skip
    if script == "grpo":  # half of the prompts are too easy: all of their answers have the same reward
        given |= {"reward_funcs": "zeros_scripts.some_rewards", "num_generations": 4, "max_completion_length": 24}
        given["per_device_train_batch_size"] = 32
    return [word for name, value in given.items() for word in (f"--{name}", str(value))]


def some_rewards(prompts: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
    """No reward tells the answers to every second prompt apart."""
    pairs = zip(prompts, completion_ids, strict=True)
    return [float(len(set(ids))) if int(prompt.split()[0][1:]) % 2 else 1.0 for prompt, ids in pairs]


def examined(script: str, rounds: int) -> dict[str, Any]:
    """Run a script up to its first steps."""
    from transformers import Trainer

    found: dict[str, Any] = {}

    def training_step(self: Any, *args: Any, **kwargs: Any) -> Any:
        times_s: list[float] = []
        backward = self.accelerator.backward

        def timed(loss: Any, **more: Any) -> None:
            begin_s = time.process_time()
            backward(loss, **more)
            times_s.append(time.process_time() - begin_s)

        with rowprop.find_zeros(self.model) as report:
            own(self, *args, **kwargs)
        found["says"] = str(report)
        if not report.places:
            raise Enough
        place = report.places[0]
        root = place.module == type(self.model).__name__
        handle = rowprop.skip_zeros(self.model if root else self.model.get_submodule(place.module))
        self.accelerator.backward = timed
        for number in range(2 * rounds + 2):
            with nullcontext() if number % 2 else handle.paused():
                own(self, *args, **kwargs)
        ratios = [ours / plain for plain, ours in zip(times_s[2::2], times_s[3::2], strict=True)]
        found["predicted"], found["ratios"] = place.saves, ratios
        raise Enough

    own = Trainer.training_step
    with tempfile.TemporaryDirectory() as name:
        words_given = [f"trl.scripts.{script}", *arguments(script, Path(name))]
        with mock.patch.object(sys, "argv", words_given), mock.patch.object(Trainer, "training_step", training_step):
            try:
                with redirect_stdout(StringIO()):
                    runpy.run_module(f"trl.scripts.{script}", run_name="__main__")
            except Enough:
                pass
    return found


def main() -> None:
    """Print a line for each script."""
    doc = __doc__ or ""
    parser = argparse.ArgumentParser(description=doc.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=7, help="pairs of backwards (default %(default)s)")
    parser.add_argument("--only", default="", help="only scripts whose name has this in it")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    print("| script of TRL | `find_zeros` | predicted FLOPs | time of the backward (quartiles) |\n|---|---|---|---|")
    for script in (script for script in SCRIPTS if args.only in script):
        found = examined(script, args.rounds)
        cells = [f"`trl.scripts.{script}`", found["says"], "", ""]
        if "ratios" in found:
            low, middle, high = statistics.quantiles(found["ratios"], n=4, method="inclusive")
            cells[2:] = [f"{1 - found['predicted']:.2f}", f"{middle:.2f} ({low:.2f} to {high:.2f})"]
        print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
