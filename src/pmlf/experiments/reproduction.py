"""Run the cells of an artifact, by either protocol, and put what they left on record as one small JSON document."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

from pmlf.experiments.artifacts import PROTOCOLS, Artifact, Cell
from pmlf.experiments.executors import Execute, Listener
from pmlf.experiments.jobs import COST, RESULT, Job, News, finished, job
from pmlf.experiments.spec import RunSpec
from pmlf.files import write_atomically

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
        return f"pmlf reproduce {self.artifact.name} {' '.join(options)}"

    def final(self, cell: Cell, rate: float | None) -> list[RunSpec]:
        """A run a seed, from 0 on."""
        seeds = cell.panel.seeds if self.seeds is None else self.seeds
        return [cell.run(seed, rate) for seed in range(seeds)]

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
            runs = [_final(plan, cell) for cell in plan.cells if cell.panel is panel]
            # a seed of all variants before the next seed of any: what was run so far can then be compared
            specs += [spec for of_a_seed in zip_longest(*runs) for spec in of_a_seed if spec is not None]
        _execute(plan, specs, execute, books)
    finally:
        write_record(plan)
    return list(books.errors.values())


def _final(plan: Plan, cell: Cell) -> list[RunSpec]:
    """The final runs of a cell; none where its trials failed."""
    if plan.protocol == "shared":
        return plan.final(cell, None)
    rate = chosen_rate(plan, cell)
    return [] if rate is None else plan.final(cell, rate)


def chosen_rate(plan: Plan, cell: Cell) -> float | None:
    """The learning rate of the best trial, the smaller of two equal ones; None unless all trials are there."""
    accuracies: dict[float, float] = {}
    for trial in cell.trials():
        run = read_run(plan.job(trial))
        if run is None:
            return None
        accuracies[trial.lr] = run["accuracy"]
    return max(sorted(accuracies), key=lambda rate: accuracies[rate])


def write_record(plan: Plan) -> dict[str, Any]:
    """What the folders hold of a plan, finished runs alone, as a document beside them."""
    cells = []
    for cell in plan.cells:
        setting = cell.panel.setting
        final = _final(plan, cell)
        document = {
            "dataset": setting.dataset,
            "model": setting.model,
            "variant": cell.variant.label,
            "method": cell.variant.method,
            "value": cell.variant.value,
            "target_epsilon": cell.epsilon,
            "lr": final[0].lr if final else None,
            "records": setting.records,
            "batch_size": setting.batch_size,
            "epochs": setting.epochs,
            "steps": setting.steps,
            "planned_seeds": cell.panel.seeds if plan.seeds is None else plan.seeds,
            "runs": (runs := _runs(plan, final)),
            "certificate": _certificate(plan, runs),
        }
        if plan.protocol == "tuned":
            document["trials"] = _runs(plan, cell.trials())
        cells.append(document)
    record = {
        "artifact": plan.artifact.name,
        "title": plan.artifact.title,
        "axis": plan.artifact.axis,
        "profile": plan.profile,
        "protocol": plan.protocol,
        "command": plan.command,
        "cells": cells,
    }
    plan.out.mkdir(parents=True, exist_ok=True)
    write_atomically(plan.record_path, _lines(record).encode())
    return record


def read_run(job: Job) -> dict[str, Any] | None:
    """What a finished run left, in short; None if there is none."""
    if not finished(job.folder):
        return None
    result = json.loads((job.folder / RESULT).read_text())
    evaluations = result["evaluations"]
    cost = job.folder / COST
    return {
        "key": job.key,
        "seed": job.spec.seed,
        "lr": job.spec.lr,
        "split": result["split"],
        "accuracy": result["test_accuracy"],
        "curve": [[evaluation["epoch"], evaluation["test_accuracy"]] for evaluation in evaluations],
        "epsilon": result["epsilon"],
        "delta": result["delta"],
        "noise_multiplier": result["noise_multiplier"],
        "steps": result["steps"],
        "cost": json.loads(cost.read_text()) if cost.is_file() else None,
    }


def _lines(record: Mapping[str, Any]) -> str:
    """JSON with a line a cell: small, and readable as a difference."""
    head = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in record.items() if name != "cells"]
    cells = ",\n".join(json.dumps(cell) for cell in record["cells"])
    return "{" + ",\n".join(head) + f',\n"cells": [\n{cells}\n]}}\n'


def _execute(plan: Plan, specs: Sequence[RunSpec], execute: Execute, books: Bookkeeper) -> None:
    """Those that are not finished, each once."""
    jobs = {job.key: job for job in map(plan.job, specs)}
    left = [job for job in jobs.values() if not finished(job.folder)]
    books.expected(len(left))
    execute(left, books)


def _runs(plan: Plan, specs: Sequence[RunSpec]) -> list[dict[str, Any]]:
    """The finished ones."""
    return [run for run in (read_run(plan.job(spec)) for spec in specs) if run is not None]


def _certificate(plan: Plan, runs: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """Of a cell's first run: those of its other seeds have the same numbers, and are in their folders."""
    if not runs:
        return None
    found: dict[str, Any] = json.loads((plan.out / RUNS / runs[0]["key"] / "certificate.json").read_text())
    return found
