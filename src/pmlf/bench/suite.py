"""Run a whole benchmark. The result is one JSON-ready document: machine, settings, results."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import RenderableType

from pmlf import machine
from pmlf.basics.arguments import require_count, require_positive
from pmlf.bench import cases, contenders, report
from pmlf.bench import growth as growing
from pmlf.bench.measure import BenchJob, Clock, Conditions, FreedMemory, race

_QUIET_LOAD = 0.5  # processes per core: more of them disturb a measurement


@dataclass(frozen=True, kw_only=True)
class BenchSettings:
    """What to measure.

    Args:
        cases: Names of cases. None: all.
        contenders: Names of contenders. None: all.
        rounds: Number of rounds.
        batch_scale: Factor on all batch sizes.
        threads: Threads of each process. None: the number of cores.
        clock: "wall", or "cpu" for processor time, which needs threads=1.
        freed_memory: Whether a process keeps freed memory for its next step or returns it to the system.
    """

    cases: tuple[str, ...] | None = None
    contenders: tuple[str, ...] | None = None
    rounds: int = 7
    batch_scale: float = 1.0
    threads: int | None = None
    clock: Clock = "wall"
    freed_memory: FreedMemory = "returned"

    def resolved(self) -> BenchSettings:
        """A checked copy with all defaults filled in. Raises ValueError if a value is not valid."""
        require_count("rounds", self.rounds, "it is the number of measurements of each contender")
        require_positive("batch_scale", self.batch_scale, "it is a factor on all batch sizes")
        threads = self.threads if self.threads is not None else machine.cores()
        require_count("threads", threads, "it is the number of threads of each process")
        if self.clock == "cpu" and threads != 1:
            raise ValueError(f"clock='cpu' adds up the time of all threads={threads}: give threads=1 with it")
        names = tuple(cases.find(name).name for name in self.cases or cases.CASES)
        entered = tuple(contenders.find(name).name for name in self.contenders or contenders.CONTENDERS)
        return replace(self, cases=names, contenders=entered, threads=threads)

    @property
    def conditions(self) -> Conditions:
        """What all processes have in common. The settings must be resolved."""
        assert self.threads is not None
        return Conditions(threads=self.threads, clock=self.clock, freed_memory=self.freed_memory)


def run(
    settings: BenchSettings, progress: Callable[[str], None], keep: Callable[[dict[str, Any]], None]
) -> dict[str, Any]:
    """Measure every contender on every case.

    Args:
        settings: What to measure.
        progress: Called with a line of text.
        keep: Called with the document so far after each case: the whole benchmark may take an hour.
    """
    chosen = settings.resolved()
    assert chosen.cases is not None and chosen.contenders is not None
    document: dict[str, Any] = {
        "machine": on_this_machine(chosen.conditions.threads),
        "settings": {**asdict(chosen), "clip_norm": contenders.CLIP_NORM, "dropout": 0.0},
        "cases": [],
        "targets": [],
    }
    for name in chosen.cases:
        case = cases.find(name)
        jobs = [
            BenchJob(case=name, contender=contender, batch_scale=chosen.batch_scale, conditions=chosen.conditions)
            for contender in chosen.contenders
            if case.images or not contenders.find(contender).images_only
        ]
        outcomes = race(name, jobs, chosen.rounds, progress)
        document["cases"].append(report.case_document(name, case.samples(chosen.batch_scale), outcomes))
        document["targets"] = report.check_targets(document["cases"])
        keep(document)
    return document


def growth(settings: BenchSettings, progress: Callable[[str], None]) -> dict[str, Any]:
    """Measure how the cost of pmlf grows with k, batch size, width and sequence length."""
    chosen = settings.resolved()
    conditions = chosen.conditions
    curves = growing.measure(conditions, rounds=chosen.rounds, batch_scale=chosen.batch_scale, progress=progress)
    return {
        "machine": on_this_machine(conditions.threads),
        "settings": {"rounds": chosen.rounds, "batch_scale": chosen.batch_scale, **asdict(conditions)},
        "growth": growing.to_json(curves),
    }


def readable(document: dict[str, Any]) -> tuple[RenderableType, ...]:
    """The tables of a document of `run` or `growth`."""
    if "growth" in document:
        return (growing.table(document["growth"]), report.machine_line(document))
    return (
        *(part for case in document["cases"] for part in report.case_results(case)),
        report.targets_table(document["targets"]),
        report.machine_line(document),
    )


def plot(document: dict[str, Any], path: Path) -> None:
    """Draw a document of `run` or `growth` into the image file `path`."""
    if "growth" in document:
        growing.plot(document["growth"], path)
    else:
        report.plot(document, path)


def business() -> str | None:
    """A sentence if other processes keep this machine busy, None if it is quiet.

    By the load average: the number of processes that ran or waited during the last minute.
    """
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    if load <= _QUIET_LOAD * cores:
        return None
    return (
        f"this machine is busy, with a load of {load:.1f} on {cores} cores before the benchmark: times are too long, "
        "and their ratios are uncertain. Wait until it is quiet, or measure processor time on one thread (`clock`)"
    )


def on_this_machine(threads: int) -> dict[str, Any]:
    """The machine and the date of the measurement."""
    return {
        **machine.describe("torch", "opacus", "transformers", "pmlf"),
        "threads": threads,
        "load": round(os.getloadavg()[0], 2),
        "system": platform.system(),
        "python": platform.python_version(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }
