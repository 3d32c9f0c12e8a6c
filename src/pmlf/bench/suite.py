"""A whole benchmark as one JSON-ready document: machine, settings, results."""

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
from pmlf.bench.measure import Clock, Conditions, FreedMemory, Job, race

Progress = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What to measure; None is all, or for threads as many as cores."""

    cases: tuple[str, ...] | None = None
    contenders: tuple[str, ...] | None = None
    rounds: int = 7
    batch_scale: float = 1.0
    threads: int | None = None
    clock: Clock = "wall"
    freed_memory: FreedMemory = "returned"

    def resolved(self) -> Settings:
        """The same, checked, nothing left to a default."""
        require_count("rounds", self.rounds, "each contender is measured so often")
        require_positive("batch_scale", self.batch_scale, "it is a factor on all batch sizes")
        threads = self.threads if self.threads is not None else os.cpu_count() or 1
        require_count("threads", threads, "every process has so many")
        if self.clock == "cpu" and threads != 1:
            raise ValueError(f"clock='cpu' adds up the time of all threads={threads}: give --threads 1 with it")
        names = tuple(cases.find(name).name for name in self.cases or cases.CASES)
        entered = tuple(contenders.find(name).name for name in self.contenders or contenders.CONTENDERS)
        return replace(self, cases=names, contenders=entered, threads=threads)

    @property
    def conditions(self) -> Conditions:
        """What all processes have in common; of resolved settings."""
        assert self.threads is not None
        return Conditions(threads=self.threads, clock=self.clock, freed_memory=self.freed_memory)


def run(settings: Settings, progress: Progress, keep: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Every contender on every case; the document so far goes to `keep` after each case, as all may take an hour."""
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
            Job(case=name, contender=contender, batch_scale=chosen.batch_scale, conditions=chosen.conditions)
            for contender in chosen.contenders
            if case.images or not contenders.find(contender).images_only
        ]
        outcomes = race(name, jobs, chosen.rounds, progress)
        document["cases"].append(report.case_document(name, case.samples(chosen.batch_scale), outcomes))
        document["targets"] = report.check_targets(document["cases"])
        keep(document)
    return document


def growth(settings: Settings, progress: Progress) -> dict[str, Any]:
    """How the cost of pmlf grows."""
    chosen = settings.resolved()
    conditions = chosen.conditions
    series = growing.measure(conditions, rounds=chosen.rounds, batch_scale=chosen.batch_scale, progress=progress)
    return {
        "machine": on_this_machine(conditions.threads),
        "settings": {"rounds": chosen.rounds, "batch_scale": chosen.batch_scale, **asdict(conditions)},
        "growth": growing.to_json(series),
    }


def readable(document: dict[str, Any]) -> tuple[RenderableType, ...]:
    """Either document as tables."""
    if "growth" in document:
        return (growing.table(document["growth"]), report.machine_line(document))
    return (
        *(part for case in document["cases"] for part in report.case_results(case)),
        report.targets_table(document["targets"]),
        report.machine_line(document),
    )


def plot(document: dict[str, Any], path: Path) -> None:
    """Either document as a picture."""
    if "growth" in document:
        growing.plot(document["growth"], path)
    else:
        report.plot(document, path)


def on_this_machine(threads: int) -> dict[str, Any]:
    """What the times depend on besides the code, and when they were taken."""
    return {
        **machine.describe("torch", "opacus", "transformers", "pmlf"),
        "threads": threads,
        "system": platform.system(),
        "python": platform.python_version(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }
