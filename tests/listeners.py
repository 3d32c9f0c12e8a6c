"""Listeners to the runs of a reproduction."""

from __future__ import annotations

from pmlf.reproduction.jobs import Job, News


class Heard:
    """A listener that keeps what it hears."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.errors: dict[str, str | None] = {}
        self.news: list[News] = []

    def expected(self, jobs: int) -> None:
        pass

    def began(self, job: Job) -> None:
        self.begun.append(job.key)

    def advanced(self, news: News) -> None:
        self.news.append(news)

    def ended(self, job: Job, error: str | None) -> None:
        self.errors[job.key] = error
