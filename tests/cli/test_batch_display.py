"""Progress of many runs, with and without a terminal."""

from __future__ import annotations

import io
from pathlib import Path

from rich.console import Console

from pmlf.cli.batch_display import batch_progress
from pmlf.experiments import jobs
from pmlf.experiments.jobs import JobProgress
from pmlf.experiments.spec import MethodOptions, RunSpec

JOB = jobs.job(RunSpec(model="linear", epsilon=2.0, seed=3, options=MethodOptions(k=3, b=(0.2, -0.1))), Path("runs"))
TRIAL = jobs.job(RunSpec(model="linear", epsilon=2.0, seed=1000, holdout=0.1, lr=0.17), Path("runs"))


def shown(terminal: bool) -> str:
    console = Console(file=io.StringIO(), force_terminal=terminal, width=160)
    with batch_progress(console, "table-4") as listener:
        listener.expected(2)
        listener.began(JOB)
        listener.advanced(JobProgress(key=JOB.key, step=7, steps=40))
        listener.ended(JOB, None)
        listener.began(TRIAL)
        listener.ended(TRIAL, "ValueError: no [room]")
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_without_a_terminal_one_line_per_run_says_how_it_ended() -> None:
    assert shown(terminal=False).splitlines() == [
        "table-4: 2 runs left",
        "dp-pmlf k=3 b=(0.2,-0.1), linear on fashion-mnist-small, epsilon 2, seed 3: done",
        "dp-pmlf, linear on fashion-mnist-small, epsilon 2, trial lr 0.17: failed, ValueError: no [room]",
    ]


def test_on_a_terminal_bars_count_runs_and_failures_stay() -> None:
    printed = shown(terminal=True)
    assert "2/2" in printed and "table-4" in printed
    assert "trial lr 0.17: failed, ValueError: no [room]" in printed
