"""Run the cells of an artifact, by either protocol, and put what they left on record as one small JSON document."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

from pmlf.basics.files import write_atomically
from pmlf.experiments.spec import RunSpec
from pmlf.reproduction.artifacts import PROTOCOLS, Artifact, Cell
from pmlf.reproduction.executors import Execute, Listener
from pmlf.reproduction.jobs import CERTIFICATE, MACHINE, RESULT, Job, News, alone, finished, job

RUNS = "runs"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Which runs an artifact needs, and where they are kept."""

    artifact: Artifact
    profile: str
    protocol: str
    out: Path
    seeds: int | None = None  # None as many as each panel has
    data_dir: Path | None = None
    device: str = "cpu"

    def __post_init__(self) -> None:
        if self.protocol not in PROTOCOLS:
            raise ValueError(f"unknown protocol {self.protocol!r}: choose one of {', '.join(PROTOCOLS)}")

    @property
    def cells(self) -> tuple[Cell, ...]:
        return self.artifact.cells(self.profile)

    @property
    def record_path(self) -> Path:
        return self.out / f"{self.artifact.name}-{self.profile}-{self.protocol}.json"

    @property
    def command(self) -> str:
        """What makes this record again."""
        options = [f"--profile {self.profile}", f"--protocol {self.protocol}"]
        if self.seeds is not None:
            options.append(f"--seeds {self.seeds}")
        if self.device != "cpu":
            options.append(f"--device {self.device}")
        return f"pmlf reproduce {self.artifact.name} {' '.join(options)}"

    def seeds_of(self, cell: Cell) -> int:
        return cell.panel.seeds if self.seeds is None else self.seeds

    def job(self, spec: RunSpec) -> Job:
        """The folder is the spec's, wherever it is carried out."""
        return replace(job(spec, self.out / RUNS, data_dir=self.data_dir), spec=replace(spec, device=self.device))


@dataclass(kw_only=True)
class Bookkeeper:
    """A listener that remembers what failed, brings the record up to date after every run, and passes everything on."""

    plan: Plan
    listener: Listener
    errors: dict[str, str] = field(default_factory=dict)  # by the job's key

    def expected(self, jobs: int) -> None:
        self.listener.expected(jobs)

    def began(self, job: Job) -> None:
        self.listener.began(job)

    def advanced(self, news: News) -> None:
        self.listener.advanced(news)

    def ended(self, job: Job, error: str | None) -> None:
        if error is None:
            write_record(self.plan)  # now: who is killed has no time for it
        else:
            self.errors[job.key] = f"{job.label}: {error}"
        self.listener.ended(job, error)


def reproduce(plan: Plan, execute: Execute, listener: Listener) -> list[str]:
    """Carry out what is not finished yet and return what failed, a line each; the record is written in any case."""
    books = Bookkeeper(plan=plan, listener=listener)
    try:
        if plan.protocol == "tuned":
            _execute(plan, [trial for cell in plan.cells for trial in cell.trials()], execute, books)
        specs = []
        for panel in plan.artifact.panels[plan.profile]:
            runs = [_final(plan, cell, plan.seeds_of(cell), {}) for cell in plan.cells if cell.panel is panel]
            # a seed of all variants before the next seed of any: what was run so far can then be compared
            specs += [spec for of_a_seed in zip_longest(*runs) for spec in of_a_seed if spec is not None]
        _execute(plan, specs, execute, books)
    finally:
        write_record(plan)
    return list(books.errors.values())


Known = Mapping[str, dict[str, Any]]  # runs on record, by their keys: a key is a hash of all that makes a run


def _final(plan: Plan, cell: Cell, seeds: int, known: Known) -> list[RunSpec]:
    """The final runs of a cell, a seed each from 0 on; none where trials are missing."""
    rate = chosen_rate(plan, cell, known) if plan.protocol == "tuned" else cell.panel.setting.lr
    return [] if rate is None else [cell.run(seed, rate) for seed in range(seeds)]


def chosen_rate(plan: Plan, cell: Cell, known: Known) -> float | None:
    """The learning rate of the best trial, the smaller of two equal ones; None unless all trials are there."""
    trials = _runs(plan, cell.trials(), known)
    if len(trials) < len(cell.panel.rates):
        return None
    accuracies = {trial["lr"]: trial["accuracy"] for trial in trials}
    return max(sorted(accuracies), key=lambda rate: accuracies[rate])


def write_record(plan: Plan) -> dict[str, Any]:
    """What the folders hold of a plan, finished runs alone, as a document beside them.

    Runs that are on record already stay there, whether or not their folders do.
    """
    with alone(plan.record_path):
        before = _Before.read(plan.record_path)
        cells = [_cell(plan, cell, before) for cell in plan.cells]
        fewer = any(cell["planned_seeds"] > plan.seeds_of(of) for cell, of in zip(cells, plan.cells, strict=True))
        record = {
            "artifact": plan.artifact.name,
            "axis": plan.artifact.axis,
            "profile": plan.profile,
            "protocol": plan.protocol,
            "command": before.command if fewer else plan.command,
            "cells": cells,
        }
        write_atomically(plan.record_path, _lines(record).encode(), released=True)
    return record


@dataclass(frozen=True, kw_only=True)
class _Before:
    """A record as it was: its runs and certificates by key, and the seeds that were planned by cell."""

    command: str = ""
    runs: Known = field(default_factory=dict)
    certificates: Known = field(default_factory=dict)
    seeds: Mapping[tuple[Any, ...], int] = field(default_factory=dict)

    @staticmethod
    def read(path: Path) -> _Before:
        if not path.exists():
            return _Before()
        try:
            record = json.loads(path.read_text())
            cells = record["cells"]
            return _Before(
                command=record["command"],
                runs={run["key"]: run for cell in cells for run in (*cell["runs"], *cell.get("trials", ()))},
                certificates={cell["runs"][0]["key"]: cell["certificate"] for cell in cells if cell["runs"]},
                seeds={_name(cell): cell["planned_seeds"] for cell in cells},
            )
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{str(path)!r} is no record: put it back as it was, or move it away") from error


def _name(cell: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(cell[part] for part in ("dataset", "model", "variant", "target_epsilon"))


def _cell(plan: Plan, cell: Cell, before: _Before) -> dict[str, Any]:
    setting = cell.panel.setting
    document: dict[str, Any] = {
        "dataset": setting.dataset,
        "model": setting.model,
        "variant": cell.variant.label,
        "method": cell.variant.method,
        "value": cell.variant.value,
        "target_epsilon": cell.epsilon,
        "lr": None,
        "records": setting.records,
        "batch_size": setting.batch_size,
        "epochs": setting.epochs,
        "steps": setting.steps,
    }
    seeds = max(plan.seeds_of(cell), before.seeds.get(_name(document), 0))
    final = _final(plan, cell, seeds, before.runs)
    runs = _runs(plan, final, before.runs)
    document |= {
        "lr": final[0].lr if final else None,
        "planned_seeds": seeds,
        "runs": runs,
        "certificate": _certificate(plan, runs[0]["key"], before.certificates) if runs else None,
    }
    if plan.protocol == "tuned":
        document["trials"] = _runs(plan, cell.trials(), before.runs)
    return document


def read_run(job: Job) -> dict[str, Any] | None:
    """What a finished run left, in short; None if there is none."""
    if not _whole(job):
        return None
    result = json.loads((job.folder / RESULT).read_text())
    evaluations = result["evaluations"]
    return {
        "key": job.key,
        "seed": job.spec.seed,
        "lr": job.spec.lr,
        "split": result["split"],
        "judged_records": result["scores"][result["split"]]["records"],
        "accuracy": result["test_accuracy"],
        "curve": [[evaluation["epoch"], evaluation["test_accuracy"]] for evaluation in evaluations],
        "epsilon": result["epsilon"],
        "delta": result["delta"],
        "noise_multiplier": result["noise_multiplier"],
        "steps": result["steps"],
        "cost": {"seconds": result["seconds"], **_machine(job)},
    }


def _machine(job: Job) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((job.folder / MACHINE).read_text())
    return {name: found[name] for name in ("threads", "machine")}


def _whole(job: Job) -> bool:
    """Whether its folder holds a finished run: one that is damaged counts as none here and fails when it is begun."""
    try:
        return finished(job.folder)
    except ValueError:
        return False


def _lines(record: Mapping[str, Any]) -> str:
    """JSON with a line a cell: small, and readable as a difference."""
    head = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in record.items() if name != "cells"]
    cells = ",\n".join(json.dumps(cell) for cell in record["cells"])
    return "{" + ",\n".join(head) + f',\n"cells": [\n{cells}\n]}}\n'


def _execute(plan: Plan, specs: Sequence[RunSpec], execute: Execute, books: Bookkeeper) -> None:
    """Those that are not finished, each once."""
    jobs = {job.key: job for job in map(plan.job, specs)}
    left = [job for job in jobs.values() if not _whole(job)]
    books.expected(len(left))
    execute(left, books)


def _runs(plan: Plan, specs: Sequence[RunSpec], known: Known) -> list[dict[str, Any]]:
    """The finished ones: as their folders have them, else as they are on record."""
    found = ((job, read_run(job)) for job in map(plan.job, specs))
    return [run or known[job.key] for job, run in found if run is not None or job.key in known]


def _certificate(plan: Plan, key: str, known: Known) -> dict[str, Any]:
    """Of a cell's first run: those of its other seeds have the same numbers, and are in their folders."""
    path = plan.out / RUNS / key / CERTIFICATE
    found: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else known[key]
    return found
