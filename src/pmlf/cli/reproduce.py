"""`pmlf reproduce`."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from pmlf.basics.arguments import require_count
from pmlf.cli.common import Command, say
from pmlf.experiments.spec import shown_default

FAILED = 1


@dataclass(frozen=True, kw_only=True)
class Reproduce(Command):
    """Run one of the paper's tables or figures, or all of them: every run in a folder of its own.

    What is finished is skipped, what was cut off goes on, and a run that fails does not stop the others. The profile
    paper is the paper's own setting (for GPUs), cpu a reduction that is the same for every method, smoke takes seconds
    and means nothing. `pmlf report` makes a page of what has been run.
    """

    artifacts: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="[ARTIFACT ...]")] = ()
    """table-4, for example, or all; `pmlf reproduce --list` has their names."""

    list: bool = False
    """Say what there is, and run nothing."""

    profile: str = "cpu"
    """paper, cpu or smoke."""

    protocol: str = "shared"
    """shared: the paper's learning rate for every method.
    tuned: each method picks its own from the same grid, by as many trials, on a held-out part of the training records;
    the final runs use all of them. Tuning is not accounted for."""

    seeds: Annotated[int | None, shown_default("what the profile has")] = None
    """Seeds 0, 1, ... of every cell: the same initial weights and the same draws for all methods."""

    jobs: int = 1
    """Runs that go on at a time, a process each; the cores are divided between them."""

    executor: str = "local"
    """local, or ray: hand the runs to a Ray cluster (RAY_ADDRESS) whose machines share the folder."""

    device: str = "cpu"
    """Where to train: cpu, cuda, cuda:1, mps."""

    out: Path = Path("runs/reproduction")
    """Folder of all runs and of the records made from them."""

    data_dir: Annotated[Path | None, shown_default("$PMLF_DATA, else the Hugging Face hub")] = None
    """Folder of datasets laid out as the hub lays them out."""

    def execute(self) -> int:
        from pmlf.cli.batch_display import batch_progress
        from pmlf.reproduction import executors, paper
        from pmlf.reproduction.campaign import Plan, reproduce

        if self.list:
            return self._list()
        names = tuple(paper.BY_NAME) if self.artifacts == ("all",) else self.artifacts
        if not names:
            raise ValueError("no artifact is named: give table-4, for example, or all; --list has their names")
        if self.seeds is not None:
            require_count("seeds", self.seeds, "so many runs are made of every cell")
        plans = [
            Plan(
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
            plan.artifact.cells(self.profile)  # refuses an unknown profile before anything runs
        for plan in plans:
            with batch_progress(Console(stderr=True), plan.artifact.name) as listener:
                failed += reproduce(plan, execute, listener)
        for line in failed:
            say(f"failed: {line}")
        records = [str(plan.record_path) for plan in plans]
        self.show(
            {"records": records, "failed": failed},
            f"records of {', '.join(names)} are in {self.out}: pmlf report {self.out} makes a page",
        )
        return FAILED if failed else 0

    def _list(self) -> int:
        from pmlf.reproduction import artifacts, paper

        rows: list[dict[str, Any]] = []
        table = Table(
            "artifact", "what it shows", *(f"{profile} runs" for profile in artifacts.PROFILES), box=SIMPLE_HEAD
        )
        for one in paper.ARTIFACTS:
            runs = {name: sum(cell.panel.seeds for cell in one.cells(name)) for name in artifacts.PROFILES}
            rows.append({"name": one.name, "title": one.title, "runs": runs})
            table.add_row(one.name, one.title, *map(str, runs.values()))
        cores = os.cpu_count()
        self.show(
            {"artifacts": rows, "profiles": artifacts.PROFILES, "protocols": artifacts.PROTOCOLS},
            table,
            f"Runs at the shared protocol; artifacts share some of them. --jobs {cores} uses the {cores} cores here.",
        )
        return 0
