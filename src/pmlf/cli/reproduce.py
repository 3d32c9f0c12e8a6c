"""`pmlf reproduce`: run the paper's tables and figures."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from pmlf import machine
from pmlf.basics.arguments import require_count
from pmlf.cli.common import Command, say
from pmlf.experiments.spec import shown_default

FAILED = 1


@dataclass(frozen=True, kw_only=True)
class Reproduce(Command):
    """Run tables and figures of the paper, each run in its own folder.

    Skips runs whose folder or record has a result, and resumes interrupted ones. A run that fails does not stop the
    others. Profiles: paper is the paper's setting (for GPUs), cpu a reduced setting, the same for every method, smoke a
    test of a few seconds whose accuracies mean nothing. `pmlf report` makes a page of the results.
    """

    artifacts: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="[ARTIFACT ...]")] = ()
    """What to run: table-4, for example, or all. `pmlf reproduce --list` prints the names."""

    list: bool = False
    """Print all tables and figures with their numbers of runs, and run nothing."""

    profile: str = "cpu"
    """paper, cpu or smoke."""

    protocol: str = "shared"
    """shared: every method uses the paper's learning rate.
    tuned: each method chooses its rate from the same grid, with equally many trials, on held-out training records; the
    final runs train on all records. Epsilon does not cover the tuning."""

    seeds: Annotated[int | None, shown_default("set by the profile")] = None
    """Number of seeds (0, 1, ...) per cell. A seed gives all methods the same initial weights and batches."""

    jobs: int = 1
    """Number of runs at a time, each in its own process. They share the cores."""

    executor: str = "local"
    """local, or ray for a Ray cluster (RAY_ADDRESS) whose machines share the folder."""

    device: str = "cpu"
    """Device to train on: cpu, cuda, cuda:1, mps."""

    out: Path = Path("runs/reproduction")
    """Folder for all runs and their records."""

    data_dir: Annotated[Path | None, shown_default("$PMLF_DATA, else the Hugging Face hub")] = None
    """Folder of datasets with the layout of the Hugging Face hub."""

    def execute(self) -> int:
        from pmlf.cli.batch_display import batch_progress
        from pmlf.experiments import executors
        from pmlf.reproduction import paper
        from pmlf.reproduction.campaign import ReproductionPlan, reproduce

        if self.list:
            return self._list()
        names = tuple(paper.BY_NAME) if self.artifacts == ("all",) else self.artifacts
        if not names:
            raise ValueError(
                "no table or figure is given: give a name, such as table-4, or all; --list prints the names"
            )
        if self.seeds is not None:
            require_count("seeds", self.seeds, "it is the number of runs per cell")
        plans = [
            ReproductionPlan(
                artifact=paper.artifact(name),
                profile=self.profile,
                protocol=self.protocol,
                out=self.out,
                seeds=self.seeds,
                data_dir=self.data_dir,
                device=self.device,
            )
            for name in names
        ]
        execute = executors.executor(self.executor, self.jobs)
        failed: list[str] = []
        for plan in plans:
            plan.artifact.cells(self.profile)  # raises for an unknown profile before anything runs
        for plan in plans:
            with batch_progress(Console(stderr=True), plan.artifact.name) as listener:
                failed += reproduce(plan, execute, listener)
        for line in failed:
            say(f"failed: {line}")
        records = [str(plan.record_path) for plan in plans]
        self.show(
            {"records": records, "failed": failed},
            f"The records of {', '.join(names)} are in {self.out}. `pmlf report {self.out}` makes a page of them.",
        )
        return FAILED if failed else 0

    def _list(self) -> int:
        from pmlf.reproduction import artifacts, paper

        rows: list[dict[str, Any]] = []
        table = Table("name", "what it shows", *(f"{profile} runs" for profile in artifacts.PROFILES), box=SIMPLE_HEAD)
        for one in paper.ARTIFACTS:
            runs = {name: sum(cell.panel.seeds for cell in one.cells(name)) for name in artifacts.PROFILES}
            rows.append({"name": one.name, "title": one.title, "runs": runs})
            table.add_row(one.name, one.title, *map(str, runs.values()))
        cores = machine.cores()
        self.show(
            {"artifacts": rows, "profiles": artifacts.PROFILES, "protocols": artifacts.PROTOCOLS},
            table,
            f"Runs of the shared protocol; some belong to several artifacts. --jobs {cores} uses all {cores} cores.",
        )
        return 0
