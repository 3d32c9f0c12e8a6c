"""Progress of a run or a comparison, on stderr.

Shows public values only: no loss, no gradient norm, no drawn batch size, no time of a single step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from pmlf.cli.display import sparkline
from pmlf.experiments.results import Evaluation, RunObserver
from pmlf.experiments.spec import RunSpec

_RATE_PERIOD_SECONDS = 120.0  # estimate the time left over many steps: the time of a single step is not public


@contextmanager
def train_progress(console: Console) -> Iterator[RunObserver]:
    """Show a progress bar on a terminal, otherwise one line per epoch."""
    if not console.is_terminal:
        yield _LinePerEvaluation(console)
        return
    with _bar(console) as progress:
        yield _Bar(progress)


@contextmanager
def compare_progress(console: Console, methods: Sequence[str]) -> Iterator[RunObserver]:
    """Show a growing table and a progress bar on a terminal, otherwise one line per epoch."""
    if not console.is_terminal:
        yield _LinePerEvaluation(console)
        return
    rows = _RowPerMethod(methods, _bar(console), console.options.ascii_only)
    with Live(get_renderable=rows.render, console=console, refresh_per_second=4, transient=True):
        yield rows


class _LinePerEvaluation:
    """One line per evaluation."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._method, self._steps = "", 0

    def started(self, spec: RunSpec, steps: int) -> None:
        self._method, self._steps = spec.method, steps

    def stepped(self, step: int, training_loss: float | None) -> None:
        pass

    def evaluated(self, evaluation: Evaluation) -> None:
        line = (
            f"{self._method}: step {evaluation.step}/{self._steps}, epsilon {evaluation.epsilon:.3g}, "
            f"{evaluation.split} {evaluation.metric} {evaluation.brief}"
            f"{_sensitive(evaluation.training_loss)}"
        )
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)


class _Bar:
    """A bar with the steps done, the time left, epsilon and the last test accuracy."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._task = progress.add_task("preparing", total=None, facts="")
        self._facts = ""

    def started(self, spec: RunSpec, steps: int) -> None:
        self._progress.reset(self._task, total=steps, description=spec.method, facts="")
        self._facts = ""

    def stepped(self, step: int, training_loss: float | None) -> None:
        self._progress.update(self._task, completed=step, facts=self._facts + _sensitive(training_loss))

    def evaluated(self, evaluation: Evaluation) -> None:
        self._facts = (
            f"epsilon {evaluation.epsilon:.3g}, {evaluation.metric} {evaluation.scores[evaluation.split].brief()}"
        )
        self._progress.update(self._task, facts=self._facts + _sensitive(evaluation.training_loss))


class _RowPerMethod:
    """One row per method, and a bar for the running one."""

    def __init__(self, methods: Sequence[str], progress: Progress, ascii_only: bool) -> None:
        self._evaluations: dict[str, list[Evaluation]] = {method: [] for method in methods}
        self._progress = progress
        self._bar = _Bar(progress)
        self._ascii_only = ascii_only
        self._running = methods[0]

    def started(self, spec: RunSpec, steps: int) -> None:
        self._running = spec.method
        self._bar.started(spec, steps)

    def stepped(self, step: int, training_loss: float | None) -> None:
        self._bar.stepped(step, training_loss)

    def evaluated(self, evaluation: Evaluation) -> None:
        self._evaluations[self._running].append(evaluation)
        self._bar.evaluated(evaluation)

    def render(self) -> Group:
        table = Table("method", "test score per epoch", "last", "epsilon", box=SIMPLE_HEAD)
        for method, evaluations in self._evaluations.items():
            course = "" if self._ascii_only else sparkline([each.test_accuracy for each in evaluations])
            last = evaluations[-1] if evaluations else None
            table.add_row(
                method,
                course,
                last.scores[last.split].brief() if last else "",
                f"{last.epsilon:.3g}" if last else "",
                style="bold" if method == self._running else None,
            )
        return Group(table, self._progress.get_renderable())


def _bar(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=12),
        MofNCompleteColumn(),
        TextColumn("steps"),
        TimeRemainingColumn(compact=True),
        TextColumn("{task.fields[facts]}", markup=False),
        console=console,
        speed_estimate_period=_RATE_PERIOD_SECONDS,
        transient=True,
    )


def _sensitive(training_loss: float | None) -> str:
    return "" if training_loss is None else f", sensitive training loss {training_loss:.3f}"
