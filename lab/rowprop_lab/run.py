"""The whole comparison: every method with every seed, in an order that is fair to all; each run is kept at its end."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from rowprop.app.lookup import COMPARE, require_all
from rowprop.app.page import environment
from rowprop.app.terminal import say, ticking
from rowprop.cost.measure import Tick
from rowprop.errors import InvalidInput
from rowprop.step.small import unwarned
from rowprop_lab.data import Dataset, load_data
from rowprop_lab.folder import REPORT, RESULTS, Folder, to_json
from rowprop_lab.models import build_model, check_model
from rowprop_lab.report import render_report
from rowprop_lab.results import TASKS, Json, Run, summarise
from rowprop_lab.settings import PLAIN, Method, Settings
from rowprop_lab.train import check_methods, train


@dataclass(frozen=True)
class Outcome:
    """The content of ``results.json``, None if Ctrl-C came before it was written, and how many runs there are."""

    results: Json | None
    finished_runs: int
    planned_runs: int

    @property
    def interrupted(self) -> bool:
        """Whether Ctrl-C ended it early."""
        return self.results is None or self.finished_runs < self.planned_runs


def compare(settings: Settings, out: Path, *, resume: bool = False, fresh: bool = False) -> Outcome:
    """Train the methods side by side and write ``results.json`` and ``report.html`` into ``out``, made where missing.

    Seeds are the outer loop. The methods of a seed train in turns of one epoch, so that a slow minute of the machine
    slows all of them, and the models of all are in memory; methods beside another one follow when that one is done. The
    first method is another one for each seed. Each run is kept in ``out/runs`` once it is finished: ``resume`` goes on
    with those, and starts if there are none; ``fresh`` sets the comparison in ``out`` aside, as ``out/earlier-1``.
    Checks come before the first write.

    Raises:
        InvalidInput: Data, model, methods, device, settings or folder cannot be used; the sentence says why.
        MissingExtra: A package that the lab needs is not installed.
    """
    if resume and fresh:
        both = "one goes on with the runs that are kept and the other sets them aside; give one of them."
        raise InvalidInput(f"--resume and --fresh are both given, but {both}")
    out = out.absolute()  # data and models are made by the user's code, which may change the working directory
    require_all(COMPARE, "rowprop compare")
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    device = settings.torch_device()
    with ticking() as tick:
        tick(f"loading the data {settings.data}", 0.0)
        folder_of_data = None if settings.data_dir is None else Path(settings.data_dir).expanduser()
        data = load_data(settings.data, folder_of_data, settings.train_rows, settings.unit)
        probe = build_model(settings.model, len(data.class_names), data.num_inputs)
        if data.unit == "row":
            check_model(probe, settings.model, data.train_x[:2], len(data.class_names))
        check_methods(settings, data, probe)
        where = environment(device, probe)
        folder = Folder(out, settings.binding() | where | {"data_sha256": data.fingerprint()})
        with folder.opened(resume=resume, fresh=fresh) as kept:
            if folder.set_aside is not None:
                say(f"The earlier comparison is kept in {folder.set_aside}.")
            labels = [method.label for method in settings.parsed_methods]
            planned = len(labels) * settings.seeds
            runs = [run for (label, seed), run in kept.items() if label in labels and seed < settings.seeds]
            say(
                f"{planned} runs: {len(labels)} methods, seeds 0 to {settings.seeds - 1}; {len(runs)} kept from before."
            )
            with suppress(KeyboardInterrupt):  # finished runs are kept
                _train_missing(settings, data, folder, runs, planned, tick)
            runs.sort(key=lambda run: (labels.index(run.label), run.seed))
            written = None
            with suppress(KeyboardInterrupt):
                if runs:
                    results = summarise(settings, where, data, runs, finished=len(runs) == planned)
                    with _saying_kept(runs, planned):
                        folder.write(RESULTS, to_json(results, indent=2))
                        folder.write(REPORT, render_report(results, data))
                    written = results
            return Outcome(written, len(runs), planned)


def _train_missing(
    settings: Settings, data: Dataset, folder: Folder, runs: list[Run], planned: int, tick: Tick
) -> None:
    methods, task = settings.parsed_methods, TASKS[data.unit]
    on_device = data.to(settings.torch_device())
    kept = {(run.label, run.seed) for run in runs}
    before = len(runs)
    fractions: dict[str, float] = {}  # of the runs that are being trained

    def begun(method: Method, seed: int) -> Generator[None, None, Run]:
        def tick_run(fraction: float, figure: float | None) -> None:
            reached = "" if figure is None else f": {task.shown(figure)}"
            fractions[method.label] = fraction
            done = len(runs) - before + sum(fractions.values())
            tick(f"{method.label} seed {seed}{reached}", done / (planned - before))

        chosen, rows = settings, None
        if method.beside:
            beside = _of(runs, method.beside, seed)
            if method.name == PLAIN:
                rows = rows_at_cost(beside, _of(runs, "full", seed), min(settings.batch_rows, len(data.train_y)))
            else:
                chosen = replace(settings, keep=beside.rows_backpropagated / beside.rows_seen)
        return train(chosen, on_device, method, seed, tick_run, rows)

    for seed in range(settings.seeds):
        turned = [*methods[seed % len(methods) :], *methods[: seed % len(methods)]]
        missing = [method for method in turned if (method.label, seed) not in kept]
        for beside in (False, True):  # those follow their method
            training = {method: begun(method, seed) for method in missing if bool(method.beside) is beside}
            for method, run in _in_turns(training):
                fractions.pop(method.label, None)
                with _saying_kept(runs, planned):
                    folder.save(run)
                runs.append(run)
                reached = f"{task.shown(getattr(run, task.figure))}, {run.train_s:.1f} s"
                say(f"{method.label} seed {seed}: {reached}; {len(runs)} of {planned} runs")


def _in_turns(training: dict[Method, Generator[None, None, Run]]) -> Generator[tuple[Method, Run]]:
    """Train each method for an epoch, again and again; yield each one's run when it has ended."""
    while training:
        for method, run in list(training.items()):
            with unwarned():
                try:
                    next(run)
                    continue
                except StopIteration as end:
                    ended: Run = end.value
            del training[method]
            yield method, ended


def _of(runs: list[Run], label: str, seed: int) -> Run:
    return next(run for run in runs if (run.label, run.seed) == (label, seed))


def rows_at_cost(method: Run, full: Run, batch_rows: int) -> int:
    """Rows of a plain step that takes as long as the method's: all but the update is in proportion to the rows."""
    update_s = full.phases_s["optimizer"]
    share = (method.train_s - update_s) / (full.train_s - update_s)
    return min(batch_rows, max(2, round(share * batch_rows)))


@contextmanager
def _saying_kept(runs: list[Run], planned: int) -> Generator[None]:
    """Add to the sentence of a failed write in the block that the finished runs are kept."""
    try:
        yield
    except InvalidInput as error:
        kept = f"{len(runs)} of {planned} runs are finished and kept"
        raise InvalidInput(f"{error} Or mend the cause: {kept}, and --resume goes on with them.") from error
