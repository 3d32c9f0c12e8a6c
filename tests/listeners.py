"""Listeners for the jobs of a reproduction."""

from __future__ import annotations

from pmlf.experiments.jobs import Job, JobProgress


class RecordingListener:
    """A listener that stores all calls."""

    def __init__(self) -> None:
        self.began_keys: list[str] = []
        self.errors: dict[str, str | None] = {}
        self.progress: list[JobProgress] = []

    def expected(self, jobs: int) -> None:
        pass

    def began(self, job: Job) -> None:
        self.began_keys.append(job.key)

    def advanced(self, progress: JobProgress) -> None:
        self.progress.append(progress)

    def ended(self, job: Job, error: str | None) -> None:
        self.errors[job.key] = error
