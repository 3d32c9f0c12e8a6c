"""Run the trials of a plan, choose the best, and leave its model with a certificate that states what all of it cost."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pmlf.basics.files import new_folder, write_atomically, write_json
from pmlf.evidence import certificate, certificate_page, ledger
from pmlf.evidence.description import SELECTION
from pmlf.experiments import runner, tasks
from pmlf.experiments.executors import Executor, ForwardingListener, JobListener, in_this_process
from pmlf.experiments.folder import RunFolder
from pmlf.experiments.jobs import Job, JobProgress, finished
from pmlf.experiments.results import RunObserver, RunResult
from pmlf.experiments.spec import RunSpec
from pmlf.mechanism.accounting import Event
from pmlf.mechanism.composition import composed_epsilon
from pmlf.tuning import choice
from pmlf.tuning.grid import Candidate, in_words
from pmlf.tuning.plan import ACCOUNTED, HELD_OUT, TuningPlan

PLAN, RESULT, BEST = "tuning.json", "result.json", "best"
SECRET = "secret"  # accounted: the number of trials and all trials, removed at the end
DRAWS = "draws.json"


@dataclass(frozen=True, kw_only=True)
class TrialJob(Job):
    """A trial and its folder."""

    words: str

    @property
    def label(self) -> str:
        return self.words


@dataclass(frozen=True, kw_only=True)
class TriedCandidate:
    """A candidate, the score of its trial, and the numbers of that score by name, such as the ends of its interval."""

    candidate: Candidate
    score: float
    numbers: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class TuningResult:
    """What was chosen, and what it cost.

    Attributes:
        mode: The mode of the plan.
        best: The candidate that was chosen; None if accounted tuning drew no trial.
        score: Its score on the records that judge trials.
        metric: What the score is.
        epsilon: The epsilon of the model in `out` for its training records, by its certificate.
        tuning_epsilon: Held-out: the epsilon of all trials together for the records that they trained on; None if those
            are public, or in another mode.
        trials: Every candidate with its score. Accounted: empty, because no trial but the best is released.
        out: The folder of the model.
    """

    mode: str
    best: Candidate | None
    score: float | None
    metric: str
    epsilon: float | None
    tuning_epsilon: float | None
    trials: Sequence[TriedCandidate]
    out: Path

    @property
    def ranked(self) -> list[TriedCandidate]:
        """The trials, best first."""
        return sorted(self.trials, key=lambda trial: trial.score, reverse=True)

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "trials": [vars(trial) for trial in self.trials], "out": str(self.out)}


def tune(
    plan: TuningPlan,
    out: Path,
    execute: Executor = in_this_process,
    listener: JobListener | None = None,
    *,
    data_dir: Path | None = None,
    observer: RunObserver | None = None,
) -> TuningResult:
    """Run the trials that are not complete, then the final run, and write result.json. Calling it again goes on.

    What is drawn is drawn once, before the first trial. A complete trial is neither run nor paid for again. A held-out
    or unaccounted trial that was killed is resumed, and its ledger counts every step. An accounted one without a seed
    starts again from step 0: its partial results were never released.

    Args:
        plan: What to tune and how.
        out: Folder for everything. A folder with the same plan is resumed.
        execute: Runs the trials: in this process, or as `pmlf.experiments.executors.executor("local", jobs)` does.
        listener: Receives their progress; in accounted mode nothing, since the number of trials is secret.
        data_dir: Folder of datasets.
        observer: Receives the progress of the final run.

    Returns:
        What was chosen. The model is in the folder `best` in `out`.

    Raises:
        ValueError: A trial failed, or the folder has another plan.
    """
    _begin(plan, out)
    if (out / RESULT).is_file():
        return _stored(plan, out)
    return (
        _accounted(plan, out, execute, data_dir)
        if plan.mode == ACCOUNTED
        else _open(plan, out, execute, listener or _Silent(), data_dir, observer)
    )


def _begin(plan: TuningPlan, out: Path) -> None:
    """Write the plan of a new folder, or refuse another plan than that of the folder."""
    path, document = out / PLAN, json.loads(json.dumps(plan.document()))
    if path.is_file():
        if json.loads(path.read_text()) != document:
            raise ValueError(
                f"{str(out)!r} was started with other settings: resume it with its own, or give a new folder"
            )
        return
    if out.exists() and any(out.iterdir()):
        raise ValueError(f"{str(out)!r} is not empty and holds no tuning: give a new folder")
    out.mkdir(parents=True, exist_ok=True)
    write_json(path, document)


def _open(
    plan: TuningPlan,
    out: Path,
    execute: Executor,
    listener: JobListener,
    data_dir: Path | None,
    observer: RunObserver | None,
) -> TuningResult:
    """Trials that everybody may see: on other records, or for research."""
    tasks.prepare(plan.final(0), data_dir)  # what the final run refuses is refused before the trials
    jobs = [_job(plan, out / "trials", number, number, None, data_dir) for number in plan.draws()]
    _run(jobs, execute, listener)
    results = [_result(job.folder) for job in jobs]
    scores = [_score(result) for result in results]
    best = choice.best(scores)
    final = runner.run(plan.final(best), out / BEST, data_dir=data_dir, observer=observer, resume=True)
    if final.signalled_by is not None:
        raise KeyboardInterrupt
    protected = plan.mode == HELD_OUT and plan.public_dataset is None
    result = TuningResult(
        mode=plan.mode,
        best=plan.grid.candidates[best],
        score=scores[best],
        metric=_metric(results[best]),
        epsilon=final.certified_epsilon,
        tuning_epsilon=_spent([job.folder for job in jobs], results) if protected else None,
        trials=tuple(_tried(*pair) for pair in zip(plan.grid.candidates, results, strict=True)),
        out=out / BEST,
    )
    return _written(result, out)


def _accounted(plan: TuningPlan, out: Path, execute: Executor, data_dir: Path | None) -> TuningResult:
    """A random number of trials that nobody sees; the best one is released."""
    secret, best = out / SECRET, out / BEST
    if not best.exists():
        draws = _draws(plan, secret)
        event, steps, delta = _mechanism(plan, data_dir)
        jobs = [_job(plan, secret, n, chosen, event.noise_multiplier, data_dir) for n, chosen in enumerate(draws)]
        for job in jobs:
            if plan.base.seed is None and job.folder.exists() and not finished(job.folder):
                shutil.rmtree(job.folder)  # nobody has seen it, and a resumed one would repeat steps with other noise
        _run(jobs, execute, _Silent())
        if not jobs:
            shutil.rmtree(secret)
            total = plan.selection.epsilon(event, steps=steps, delta=delta)
            nothing = {"best": None, "score": None, "metric": "none", "epsilon": total, "tuning_epsilon": None}
            return _written(TuningResult(mode=plan.mode, trials=(), out=best, **nothing), out)  # type: ignore[arg-type]
        scores = [_score(_result(job.folder)) for job in jobs]
        chosen = jobs[choice.best(scores)]
        _certify(chosen.folder, plan, best)
        chosen.folder.rename(best)  # from here on it is released
    found = _result(best)
    document = certificate.read(best / "certificate.json")
    result = TuningResult(
        mode=plan.mode,
        best={name: _value(found.spec, name) for name in plan.grid.values},
        score=_score(found),
        metric=_metric(found),
        epsilon=document["epsilon"],
        tuning_epsilon=None,
        trials=(),
        out=best,
    )
    shutil.rmtree(secret, ignore_errors=True)
    return _written(result, out)


def _mechanism(plan: TuningPlan, data_dir: Path | None) -> tuple[Event, int, float]:
    """One step of every trial, their number, and delta; the noise is calibrated to all trials together."""
    population = tasks.prepare(plan.trial(0, 0, 1.0), data_dir).population
    budget = plan.base.resolved(population)
    assert budget.epsilon is not None and budget.delta is not None
    steps, rate = budget.planned_steps(population), budget.batch_size / population
    if rate > 1.0:
        raise ValueError(f"batch_size={budget.batch_size} is more than the {population} records of a trial: give less")
    z = plan.selection.noise_multiplier(
        target_epsilon=budget.epsilon, target_delta=budget.delta, sample_rate=rate, steps=steps
    )
    return Event(noise_multiplier=z, sample_rate=rate), steps, budget.delta


def _draws(plan: TuningPlan, secret: Path) -> list[int]:
    """The candidates of the trials, drawn once and kept in a file that only the user can read."""
    path = secret / DRAWS
    if not path.is_file():
        if secret.exists() and any(secret.iterdir()):
            raise ValueError(f"{str(secret)!r} has trials and no {DRAWS}: restore the file, or start a new tuning")
        if not secret.exists():
            new_folder(secret)
        write_json(path, {"draws": plan.draws()})
    return [int(number) for number in json.loads(path.read_text())["draws"]]


def _job(plan: TuningPlan, folder: Path, number: int, chosen: int, z: float | None, data_dir: Path | None) -> TrialJob:
    spec = plan.trial(chosen, number, z)
    words = f"trial {number + 1}: {in_words(plan.grid.candidates[chosen])}"
    return TrialJob(spec=spec, folder=folder / f"{number:04}", data_dir=data_dir, words=words)


def _run(jobs: Sequence[TrialJob], execute: Executor, listener: JobListener) -> None:
    todo = [job for job in jobs if not finished(job.folder)]
    errors = _Errors(listener)
    errors.expected(len(todo))
    execute(todo, errors)
    if errors.found:
        raise ValueError(f"a trial failed, and the others are kept: {errors.found[0]}; correct it and call tune again")


def _result(folder: Path) -> RunResult:
    found = RunFolder(folder).finished()
    if found is None:
        raise ValueError(f"{str(folder)!r} is not a complete trial: call tune again")
    return found


def _score(result: RunResult) -> float:
    return -1.0 if result.test_accuracy is None else result.test_accuracy


def _metric(result: RunResult) -> str:
    """What `_score` is: larger is better."""
    return "1 / perplexity" if result.metric == "perplexity" else result.metric


def _tried(candidate: Candidate, result: RunResult) -> TriedCandidate:
    numbers = result.evaluations[-1].scores[result.split].numbers() if result.evaluations else {}
    return TriedCandidate(candidate=candidate, score=_score(result), numbers=numbers)


def _spent(folders: Sequence[Path], results: Sequence[RunResult]) -> float:
    """The epsilon of all trials together for the records that they trained on. What they run was fixed beforehand."""
    events: Counter[Event] = Counter()
    for folder in folders:
        events.update(ledger.read(folder / "ledger.jsonl").events)
    delta = max(result.spec.delta or 0.0 for result in results)
    return composed_epsilon(events, delta=delta)


def _value(spec: RunSpec, name: str) -> Any:
    return getattr(spec.options, name) if name in vars(spec.options) else getattr(spec, name)


def _certify(folder: Path, plan: TuningPlan, best: Path) -> None:
    """Write the epsilon of all trials into the certificate and the results of the best one, and no trial's number."""
    document = certificate.read(folder / "certificate.json")
    if SELECTION not in document:  # a process may have ended after it was written
        document = certificate.selected(document, plan.selection)
    write_json(folder / "certificate.json", document, released=True)
    write_atomically(folder / "certificate.html", certificate_page.page(document).encode(), released=True)
    result, total = replace(_result(folder), out=best), document["epsilon"]
    evaluations = tuple(replace(evaluation, epsilon=total) for evaluation in result.evaluations)
    RunFolder(folder).write_metrics(evaluations)
    RunFolder(folder).write_result(replace(result, epsilon=total, certified_epsilon=total, evaluations=evaluations))


def _written(result: TuningResult, out: Path) -> TuningResult:
    write_json(out / RESULT, result.to_json())
    return result


def _stored(plan: TuningPlan, out: Path) -> TuningResult:
    document = json.loads((out / RESULT).read_text())
    shutil.rmtree(out / SECRET, ignore_errors=True)  # a process may have ended before it was removed
    trials = tuple(TriedCandidate(**trial) for trial in document["trials"])
    return TuningResult(**{**document, "trials": trials, "out": out / BEST})


class _Silent:
    """A listener that shows nothing."""

    def expected(self, jobs: int) -> None: ...

    def began(self, job: Job) -> None: ...

    def advanced(self, progress: JobProgress) -> None: ...

    def ended(self, job: Job, error: str | None) -> None: ...


class _Errors(ForwardingListener):
    """Keeps errors."""

    def __init__(self, listener: JobListener) -> None:
        super().__init__(listener)
        self.found: list[str] = []

    def ended(self, job: Job, error: str | None) -> None:
        if error is not None:
            self.found.append(error)
        super().ended(job, error)
