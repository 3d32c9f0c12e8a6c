"""Progress of many runs on stderr: bars on a terminal, otherwise one line per finished run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from pmlf.experiments.executors import JobListener
from pmlf.experiments.jobs import Job, JobProgress


@contextmanager
def batch_progress(console: Console, title: str) -> Iterator[JobListener]:
    """Show one bar for all runs and one for each running run; without a terminal, one line per finished run."""
    if not console.is_terminal:
        yield _LinePerJob(console, title)
        return
    progress = Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=16),
        MofNCompleteColumn(),
        TextColumn("{task.fields[unit]}"),
        TimeElapsedColumn(),
        console=console,
        transient=True,
    )
    with progress:
        yield _Bars(progress, title)


class _LinePerJob:
    def __init__(self, console: Console, title: str) -> None:
        self._console, self._title = console, title

    def expected(self, jobs: int) -> None:
        self._say(f"{self._title}: {jobs} runs left")

    def began(self, job: Job) -> None:
        pass

    def advanced(self, progress: JobProgress) -> None:
        pass

    def ended(self, job: Job, error: str | None) -> None:
        self._say(f"{job.label}: {'done' if error is None else f'failed, {error}'}")

    def _say(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)


class _Bars:
    def __init__(self, progress: Progress, title: str) -> None:
        self._progress = progress
        self._all = progress.add_task(title, total=0, unit="runs")
        self._running: dict[str, TaskID] = {}

    def expected(self, jobs: int) -> None:
        self._progress.update(self._all, total=self._progress.tasks[0].completed + jobs)

    def began(self, job: Job) -> None:
        self._running[job.key] = self._progress.add_task(f"  {job.label}", total=None, unit="steps")

    def advanced(self, progress: JobProgress) -> None:
        self._progress.update(self._running[progress.key], completed=progress.step, total=progress.steps)

    def ended(self, job: Job, error: str | None) -> None:
        self._progress.remove_task(self._running.pop(job.key))
        self._progress.advance(self._all)
        if error is not None:
            self._progress.console.print(f"{job.label}: failed, {error}", markup=False, highlight=False)
