"""Run the cells of an artifact, with either protocol, and write their results to a record, one JSON document."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

from pmlf.basics.files import write_atomically
from pmlf.evidence import certificate
from pmlf.experiments.executors import Executor, ForwardingListener, JobListener
from pmlf.experiments.jobs import CERTIFICATE, MACHINE, RESULT, Job, finished, job, locked
from pmlf.experiments.spec import RunSpec
from pmlf.reproduction.artifacts import PROTOCOLS, Artifact, Cell
from pmlf.reproduction.stand_ins import with_stand_ins
from pmlf.tuning import choice

RUNS = "runs"


@dataclass(frozen=True, kw_only=True)
class ReproductionPlan:
    """The runs of an artifact and their folder.

    Args:
        artifact: The table or figure.
        profile: "paper", "cpu" or "smoke".
        protocol: "shared" or "tuned" learning rates.
        out: Folder for the runs and the record.
        seeds: Number of seeds per cell. None: as in the panel.
        data_dir: Folder of datasets. None: the folder in PMLF_DATA, else the Hugging Face hub.
        device: Device to train on.
    """

    artifact: Artifact
    profile: str
    protocol: str
    out: Path
    seeds: int | None = None
    data_dir: Path | None = None
    device: str = "cpu"

    def __post_init__(self) -> None:
        if self.protocol not in PROTOCOLS:
            raise ValueError(f"protocol={self.protocol!r} is not known: give one of {', '.join(PROTOCOLS)}")

    @property
    def cells(self) -> tuple[Cell, ...]:
        return self.artifact.cells(self.profile)

    @property
    def record_path(self) -> Path:
        return self.out / f"{self.artifact.name}-{self.profile}-{self.protocol}.json"

    @property
    def command(self) -> str:
        """The command that makes this record."""
        options = [f"--profile {self.profile}", f"--protocol {self.protocol}"]
        if self.seeds is not None:
            options.append(f"--seeds {self.seeds}")
        if self.device != "cpu":
            options.append(f"--device {self.device}")
        return f"pmlf reproduce {self.artifact.name} {' '.join(options)}"

    def seeds_of(self, cell: Cell) -> int:
        return cell.panel.seeds if self.seeds is None else self.seeds

    def job(self, spec: RunSpec) -> Job:
        """The job of a spec. Its folder does not depend on the device."""
        return replace(job(spec, self.out / RUNS, data_dir=self.data_dir), spec=replace(spec, device=self.device))


class RecordKeeper(ForwardingListener):
    """Updates the record after every run, and collects errors."""

    def __init__(self, plan: ReproductionPlan, listener: JobListener) -> None:
        super().__init__(listener)
        self._plan = plan
        self.errors: dict[str, str] = {}  # by the job's key, or the artifact's name

    def ended(self, job: Job, error: str | None) -> None:
        if error is None:
            write_record(self._plan)  # now, because the process may be killed
        else:
            self.errors[job.key] = f"{job.label}: {error}"
        super().ended(job, error)


def reproduce(plan: ReproductionPlan, execute: Executor, listener: JobListener) -> list[str]:
    """Run all jobs of a plan that are not complete, and write the record, also after an error.

    A run is complete if its folder or the record has its result.

    Args:
        plan: What to run.
        execute: How to run it: see `executors`.
        listener: Receives the progress.

    Returns:
        One line for each job that failed, or one for an artifact whose stand-ins cannot be made.
    """
    keeper = RecordKeeper(plan, listener)
    known = _Before.read(plan.record_path).runs
    try:
        if plan.protocol == "tuned":
            _execute(plan, [trial for cell in plan.cells for trial in cell.trials()], known, execute, keeper)
        specs = []
        for panel in plan.artifact.panels[plan.profile]:
            runs = [_final(plan, cell, plan.seeds_of(cell), known) for cell in plan.cells if cell.panel is panel]
            # one seed of all variants before the next seed, so that partial results can be compared
            specs += [spec for of_a_seed in zip_longest(*runs) for spec in of_a_seed if spec is not None]
        _execute(plan, specs, known, execute, keeper)
    finally:
        write_record(plan)
    return list(keeper.errors.values())


RunsByKey = Mapping[str, dict[str, Any]]  # runs in the record, by the hash of their specs


def _final(plan: ReproductionPlan, cell: Cell, seeds: int, known: RunsByKey) -> list[RunSpec]:
    """The final runs of a cell, with seeds 0, 1, ...; none if trials are missing."""
    rate = chosen_rate(plan, cell, known) if plan.protocol == "tuned" else cell.panel.setting.lr
    return [] if rate is None else [cell.run(seed, rate) for seed in range(seeds)]


def chosen_rate(plan: ReproductionPlan, cell: Cell, known: RunsByKey) -> float | None:
    """The learning rate of the best trial, the smallest if several are best; None if trials are missing."""
    candidates, trials = cell.tuning.grid.candidates, _runs(plan, cell.trials(), known)
    if len(trials) < len(candidates):
        return None
    rate: float = candidates[choice.best([trial["accuracy"] for trial in trials])]["lr"]
    return rate


def write_record(plan: ReproductionPlan) -> dict[str, Any]:
    """Write the record of all complete runs. Runs in an earlier record stay, even if their folders are gone."""
    with locked(plan.record_path):
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
    """An earlier record: its runs and certificates by key, and its cells by name."""

    command: str = ""
    runs: RunsByKey = field(default_factory=dict)
    certificates: RunsByKey = field(default_factory=dict)
    cells: Mapping[tuple[Any, ...], Mapping[str, Any]] = field(default_factory=dict)

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
                cells={_name(cell): cell for cell in cells},
            )
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{str(path)!r} is not a record: restore it, or move it away") from error


def _name(cell: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(cell[part] for part in ("dataset", "model", "variant", "target_epsilon"))


def _cell(plan: ReproductionPlan, cell: Cell, before: _Before) -> dict[str, Any]:
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
        "image_size": setting.own.image_size,
        "batch_size": setting.batch_size,
        "epochs": setting.epochs,
        "steps": setting.steps,
    }
    earlier = before.cells.get(_name(document), {})
    seeds = max(plan.seeds_of(cell), earlier.get("planned_seeds", 0))
    final = _final(plan, cell, seeds, before.runs)
    # while trials are missing, those of a larger grid for example, the runs of the earlier choice stay
    runs = _runs(plan, final, before.runs) if final else earlier.get("runs", [])
    document |= {
        "lr": final[0].lr if final else earlier.get("lr"),
        "planned_seeds": seeds,
        "runs": runs,
        "certificate": _certificate(plan, runs[0]["key"], setting.dataset, before.certificates) if runs else None,
    }
    if plan.protocol == "tuned":
        document["trials"] = _runs(plan, cell.trials(), before.runs)
        if runs:  # the folder may belong to a run of the shared protocol too: only the record says it
            document["certificate"] = choice.unaccounted(document["certificate"], len(document["trials"]))
    return document


def read_run(job: Job) -> dict[str, Any] | None:
    """The entry of a complete run in the record; None if the run is not complete."""
    if not _complete(job):
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


def _complete(job: Job) -> bool:
    """Whether the job is complete. A damaged folder counts as not complete; running the job then fails."""
    try:
        return finished(job.folder)
    except ValueError:
        return False


def _lines(record: Mapping[str, Any]) -> str:
    """JSON with one line per cell, which gives small diffs."""
    head = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in record.items() if name != "cells"]
    cells = ",\n".join(json.dumps(cell) for cell in record["cells"])
    return "{" + ",\n".join(head) + f',\n"cells": [\n{cells}\n]}}\n'


def _execute(
    plan: ReproductionPlan, specs: Sequence[RunSpec], known: RunsByKey, execute: Executor, keeper: RecordKeeper
) -> None:
    """Run the specs that are not complete, each once."""
    jobs = {job.key: job for job in map(plan.job, specs)}
    left = [job for job in jobs.values() if job.key not in known and not _complete(job)]
    keeper.expected(len(left))
    runs = (plan.out / RUNS).absolute()
    try:
        ready = [replace(job, spec=with_stand_ins(job.spec, runs, plan.data_dir)) for job in left]
    except ValueError as error:  # other artifacts may need no stand-in
        keeper.errors[plan.artifact.name] = f"{plan.artifact.name}: {error}"
    else:
        execute(ready, keeper)


def _runs(plan: ReproductionPlan, specs: Sequence[RunSpec], known: RunsByKey) -> list[dict[str, Any]]:
    """The complete runs among the specs: from their folders, else from the earlier record."""
    found = ((job, read_run(job)) for job in map(plan.job, specs))
    return [run or known[job.key] for job, run in found if run is not None or job.key in known]


def _certificate(plan: ReproductionPlan, key: str, dataset: str, known: RunsByKey) -> dict[str, Any]:
    """The certificate of a cell's first run, whose other seeds have the same numbers.

    It names the artifact's dataset, where the run's own names the path of a stand-in.
    """
    path = plan.out / RUNS / key / CERTIFICATE
    if not path.is_file():
        return known[key]
    found: dict[str, Any] = json.loads(path.read_text())
    return found if found["dataset"] == dataset else certificate.sealed({**found, "dataset": dataset})
