"""The whole comparison: every method with every seed, in an order that is fair to all, kept as it goes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from rowprop.compare.data import load_data
from rowprop.compare.folder import Folder, to_json
from rowprop.compare.models import build_model, check_model
from rowprop.compare.report import check_extra, render
from rowprop.compare.results import summarise
from rowprop.compare.settings import Settings
from rowprop.compare.show import Bars
from rowprop.compare.train import Run, train
from rowprop.page import dtypes_of, environment


@dataclass(frozen=True)
class Outcome:
    """What a comparison came to.

    Attributes:
        results: The content of ``results.json``; None where it was stopped before the first run was finished.
        finished_runs: How many runs are kept in the folder.
        planned_runs: Methods times seeds.

    """

    results: dict[str, Any] | None
    finished_runs: int
    planned_runs: int

    @property
    def interrupted(self) -> bool:
        """Whether Ctrl-C ended it early."""
        return self.finished_runs < self.planned_runs


def compare(
    settings: Settings, out: Path, *, resume: bool = False, fresh: bool = False, console: Console | None = None
) -> Outcome:
    """Train the methods side by side and write ``results.json`` and ``report.html`` into ``out``.

    Seeds are the outer loop and the methods of one seed follow each other, so that a slow hour of the machine hits
    all of them; who goes first changes from seed to seed. Each run is kept in ``out/runs`` once it is finished.

    Args:
        settings: What to compare.
        out: Folder for results; made where it is missing.
        resume: Go on with the runs that are kept in ``out``.
        fresh: Throw away an unfinished comparison in ``out``.
        console: Where progress is shown; None for stderr.

    Raises:
        InvalidInput: Data, model, device, settings or folder cannot be used; the sentence says why.
        MissingExtra: A package of the extra ``compare`` is not installed.

    """
    check_extra()
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    device = settings.torch_device()
    data = load_data(settings.data, settings.data_path, settings.train_rows)
    probe = build_model(settings.model_name, len(data.class_names), data.num_inputs)
    check_model(probe, settings.model_name, data.train_x[:2], len(data.class_names))

    where = environment(device, dtypes_of(probe))
    folder = Folder(out)
    folder.open(settings.binding() | where | {"data_sha256": data.fingerprint()}, resume=resume, fresh=fresh)

    methods = settings.parsed_methods
    labels = [method.label for method in methods]
    plan = [
        (method, seed)
        for seed in range(settings.seeds)
        for method in (*methods[seed % len(methods) :], *methods[: seed % len(methods)])
    ]
    on_device = data.to(device)
    runs: list[Run] = []
    with Bars(console or Console(stderr=True), labels, settings.seeds) as bars:
        try:
            for method, seed in plan:
                kept = folder.load(method.label, seed)
                if kept is None:
                    bars.begin(method.label)
                    run = train(
                        settings,
                        on_device,
                        method,
                        seed,
                        lambda done, acc, label=method.label: bars.tick(label, done, acc),
                    )
                    folder.save(run)
                else:
                    run = kept
                runs.append(run)
                bars.finish(run, resumed=kept is not None)
        except KeyboardInterrupt:
            pass  # what is finished is kept and told below
    if not runs:
        return Outcome(None, 0, len(plan))
    order = {label: place for place, label in enumerate(labels)}
    runs.sort(key=lambda run: (order[run.label], run.seed))
    results = summarise(settings, where, data, runs, finished=len(runs) == len(plan))
    folder.write("results.json", to_json(results, indent=2))
    folder.write("report.html", render(results, data))
    return Outcome(results, len(runs), len(plan))
