"""The ledger of a trainer's output folder: what is released after a checkpoint is counted, also after a crash."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pmlf.evidence.ledger import Ledger, read
from pmlf.parallel.processes import joined

LEDGER_FILE = "ledger.jsonl"


@contextmanager
def opened_ledger(
    given: Ledger | None, folder: Path, resumed: str | None, saved: Mapping[str, Any] | None
) -> Iterator[Ledger | None]:
    """The ledger of a training, in a `with` block: the one that was given, or that of the output folder.

    Args:
        given: The trainer's ledger, which stays open. Rank 0 alone may have one.
        folder: The output folder.
        resumed: The checkpoint that the training resumes from, or None.
        saved: The state of the run in it, or None.

    Yields:
        The ledger on rank 0, and None on the other ranks.

    Raises:
        ValueError: The checkpoint is in another folder, which has another ledger.
    """
    processes = joined("auto", "PrivateTrainer")
    if processes.by_first(lambda: given is not None):
        yield given
        return
    if resumed is not None and Path(resumed).resolve().parent != folder.resolve():
        raise ValueError(
            f"{resumed!r} is not in output_dir={str(folder)!r}, and what was released after it is counted in the "
            f"ledger beside it: give output_dir={str(Path(resumed).parent)!r}"
        )
    opened: list[Ledger] = []

    def open_it() -> None:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / LEDGER_FILE
        run = None if saved is None else _run_that_began_as(saved["spending"]["beginning"], path)
        ledger = Ledger(path, dataset="train_dataset", run=run)
        opened.append(ledger)
        if run is None and ledger.tally.events:
            warnings.warn(
                f"{str(path)!r} counts an earlier training, and target_epsilon covers both: resume that one, or give "
                "another output_dir for records that have nothing in common with those",
                stacklevel=2,
            )

    try:
        processes.by_first(open_it)
        yield opened[0] if opened else None
    finally:
        for ledger in opened:
            ledger.close()


def _run_that_began_as(beginning: str, path: Path) -> str | None:
    """The name of a run in a ledger; None if it is not there, which is refused when its state is loaded."""
    starts = read(path).starts if path.exists() else ()
    return next((start.run for start in starts if start.beginning == beginning), None)
