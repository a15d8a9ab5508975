"""The whole comparison: every method with every seed, in an order that is fair to all; each run is kept at its end."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from rowprop.app.compare.data import Dataset, load_data
from rowprop.app.compare.folder import REPORT, RESULTS, Folder, to_json
from rowprop.app.compare.methods import Method
from rowprop.app.compare.models import build_model, check_model
from rowprop.app.compare.report import check_extra, render
from rowprop.app.compare.results import summarise
from rowprop.app.compare.runs import TASKS, Run
from rowprop.app.compare.settings import Settings
from rowprop.app.compare.show import Bars
from rowprop.app.compare.train import check_methods, train
from rowprop.app.page import dtypes_of, environment
from rowprop.app.terminal import ticking
from rowprop.errors import InvalidInput


@dataclass(frozen=True)
class Outcome:
    """The outcome of a comparison.

    Attributes:
        results: The content of ``results.json``; None if Ctrl-C came before it was written.
        finished_runs: How many of the planned runs are kept in the folder.
        planned_runs: Methods times seeds.
        interrupted: Whether Ctrl-C ended it early.

    """

    results: dict[str, Any] | None
    finished_runs: int
    planned_runs: int
    interrupted: bool = False


def compare(
    settings: Settings, out: Path, *, resume: bool = False, fresh: bool = False, console: Console | None = None
) -> Outcome:
    """Train the methods side by side and write ``results.json`` and ``report.html`` into ``out``.

    Seeds are the outer loop and the methods of one seed follow each other, so that a slow hour of the machine hits
    all of them; the first method is another one for each seed. Each run is kept in ``out/runs`` once it is finished.

    Args:
        settings: The comparison's settings.
        out: Folder for results; made if it is missing. All checks come before the first write.
        resume: Go on with the runs that are kept in ``out``; start if there are none.
        fresh: Set the comparison in ``out`` aside, as ``out/earlier-1``, and start over.
        console: Where progress is shown; None for stderr.

    Raises:
        InvalidInput: Data, model, methods, device, settings or folder cannot be used; the sentence says why.
        MissingExtra: A package of the extra ``compare`` is not installed.

    """
    if resume and fresh:
        raise InvalidInput(
            "--resume and --fresh are both given, but one goes on with the runs that are kept and the other sets them "
            "aside; give one of them."
        )
    console = console or Console(stderr=True)
    out = out.absolute()  # data and models are made by the user's code, which may change the working directory
    check_extra()
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    device = settings.torch_device()
    with ticking() as tick:
        tick(f"loading the data {settings.data}", 0.0)
        data = load_data(settings.data, settings.data_path, settings.train_rows, settings.unit)
    probe = build_model(settings.model_name, len(data.class_names), data.num_inputs)
    if data.unit == "row":
        check_model(probe, settings.model_name, data.train_x[:2], len(data.class_names))
    check_methods(settings, data, probe)
    where = environment(device, dtypes_of(probe))
    on_device = data.to(device)
    folder = Folder(out, settings.binding() | where | {"data_sha256": data.fingerprint()}, data)
    with folder.opened(resume=resume, fresh=fresh) as kept:
        if folder.set_aside is not None:
            said = f"The earlier comparison is kept in {folder.set_aside}."
            console.print(said, markup=False, highlight=False, soft_wrap=True)
        return _compare(settings, data, on_device, where, folder, kept, console)


def _compare(
    settings: Settings,
    data: Dataset,
    on_device: Dataset,
    where: dict[str, Any],
    folder: Folder,
    kept: dict[tuple[str, int], Run],
    console: Console,
) -> Outcome:
    methods = settings.parsed_methods
    labels = [method.label for method in methods]
    planned = len(labels) * settings.seeds
    runs = [run for (label, seed), run in kept.items() if label in labels and seed < settings.seeds]
    trained = {(run.label, run.seed) for run in runs}
    with (
        Bars(console, labels, settings.seeds, runs, TASKS[data.unit]) as bars,
        suppress(KeyboardInterrupt),
    ):  # finished runs are kept
        for seed in range(settings.seeds):
            turned = (*methods[seed % len(methods) :], *methods[: seed % len(methods)])
            for method in sorted(turned, key=lambda method: bool(method.beside)):  # those follow their method
                if (method.label, seed) in trained:
                    continue
                bars.begin(method.label)
                run = train(
                    _beside(settings, method, seed, runs),
                    on_device,
                    method,
                    seed,
                    lambda done, figure, label=method.label: bars.tick(label, done, figure),
                )
                with _telling(runs, planned):
                    folder.save(run)
                runs.append(run)
                bars.finish(run)
    interrupted = len(runs) < planned
    results = None
    if runs:
        order = {label: place for place, label in enumerate(labels)}
        runs.sort(key=lambda run: (order[run.label], run.seed))
        try:
            results = summarise(settings, where, data, runs, finished=not interrupted)
            with _telling(runs, planned):
                folder.write(RESULTS, to_json(results, indent=2))
                folder.write(REPORT, render(results, data))
        except KeyboardInterrupt:
            return Outcome(None, len(runs), planned, interrupted=True)
    return Outcome(results, len(runs), planned, interrupted)


def _beside(settings: Settings, method: Method, seed: int, runs: Sequence[Run]) -> Settings:
    """The settings with the share of rows that the method keeps in this seed."""
    if not method.beside:
        return settings
    run = next(run for run in runs if (run.label, run.seed) == (method.beside, seed))
    return replace(settings, keep=run.rows_backpropagated / run.rows_seen)


@contextmanager
def _telling(runs: Sequence[Run], planned: int) -> Generator[None]:
    """Add to the sentence of a failed write in the block that the finished runs are kept."""
    try:
        yield
    except InvalidInput as error:
        kept = f"{len(runs)} of {planned} runs are finished and kept"
        raise InvalidInput(f"{error} Or mend the cause: {kept}, and --resume goes on with them.") from error
