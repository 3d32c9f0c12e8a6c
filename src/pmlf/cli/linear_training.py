"""`pmlf train --model prior-linear`: compute features, then train a private linear model on them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from pmlf.cli import display
from pmlf.cli.run_display import train_progress
from pmlf.experiments.spec import RunSpec, flag

if TYPE_CHECKING:
    from pmlf.cli.training import Train
    from pmlf.experiments.results import RunResult

MODEL = "prior-linear"
_OF_NETWORKS = ("ledger", "checkpoint_every", "check_on_data", "diagnostics", "show_sensitive", "log")


def train(command: Train, spec: RunSpec, out: Path) -> RunResult:
    """Run the spec and print its result."""
    from pmlf.experiments import prior_linear

    for name in _OF_NETWORKS:
        if getattr(command, name):
            raise ValueError(f"{flag(name)} is not an option of --model {MODEL}: leave it out")
    console = Console(stderr=True)
    with _extraction_progress(console) as extracting:
        prior_linear.feature_splits(spec, command.data_dir, extracting)
    with train_progress(console) as observer:
        result = prior_linear.run(
            spec, out, data_dir=command.data_dir, observer=observer, resume=command.resume is not None
        )
    command.show(result.to_json(), display.run_summary(result))
    return result


@contextmanager
def _extraction_progress(console: Console) -> Iterator[Callable[[int, int], None]]:
    """Show a bar of the records whose features are computed; the work continues after an interruption."""
    columns = (TextColumn("features"), BarColumn(bar_width=12), MofNCompleteColumn(), TextColumn("images"))
    with Progress(*columns, TimeRemainingColumn(compact=True), console=console, transient=True) as progress:
        task = progress.add_task("features", total=None)
        yield lambda done, of: progress.update(task, completed=done, total=of)
