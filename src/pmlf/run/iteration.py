"""Iterating over a run: its batches with a length, its epochs, and where an epoch ends."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING

from pmlf.mechanism.sampling import LogicalBatch

if TYPE_CHECKING:
    from pmlf.run.private_run import PrivateRun


@dataclass(frozen=True, kw_only=True)
class Epochs:
    """The epochs of T steps: epoch e ends after ceil(e * n / B) steps, and the last one after T.

    Attributes:
        records: The number of records, n.
        batch_size: The expected batch size, B.
        steps: The number of steps, T.

    >>> epochs = Epochs(records=120, batch_size=50, steps=12)
    >>> epochs.count, [epochs.end(epoch) for epoch in range(1, 6)]
    (5, [3, 5, 8, 10, 12])
    """

    records: int
    batch_size: float
    steps: int

    @property
    def count(self) -> int:
        """The number of epochs, counting a last one that is shorter."""
        return self.containing(self.steps - 1)

    def end(self, epoch: int) -> int:
        """The number of steps done after an epoch, counted from 1."""
        return min(math.ceil(epoch * self.records / self.batch_size - 1e-9), self.steps)

    def containing(self, step: int) -> int:
        """The epoch, counted from 1, that a step, counted from 0, belongs to."""
        epoch = max(1, int(step * self.batch_size / self.records))
        while self.end(epoch) <= step:
            epoch += 1
        return epoch

    def complete(self, steps_done: int) -> bool:
        """Whether an epoch ends after this number of steps."""
        return self.end(self.containing(steps_done - 1)) == steps_done


class Batches(Iterator[LogicalBatch]):
    """The logical batches of a run's remaining steps. `len` is their number; see `PrivateRun.batches`."""

    def __init__(self, issued: Iterator[LogicalBatch], left: Callable[[], int]) -> None:
        self._issued, self._left = issued, left

    def __iter__(self) -> Batches:
        return self

    def __next__(self) -> LogicalBatch:
        return next(self._issued)

    def __len__(self) -> int:
        return self._left()


class Epoch:
    """The batches of one epoch, or of what is left of it. `len` is their number; see `PrivateRun.epochs`.

    Attributes:
        number: The number of the epoch, counted from 1.
    """

    def __init__(self, number: int, batches: Batches, left: Callable[[], int]) -> None:
        self.number = number
        self._batches, self._left = batches, left

    def __repr__(self) -> str:
        return f"Epoch(number={self.number}, {len(self)} batches left)"

    def __len__(self) -> int:
        return self._left()

    def __iter__(self) -> Iterator[LogicalBatch]:
        return islice(self._batches, len(self))


def remaining_epochs(run: PrivateRun) -> Iterator[Epoch]:
    """The remaining epochs of a run: see `PrivateRun.epochs`."""
    planned, batches = run.planned_epochs, run.batches()
    while run.steps_done < run.steps:
        number = planned.containing(run.steps_done)
        end = planned.end(number)
        yield Epoch(number, batches, partial(_left, run, end))
        if run.steps_done < end:
            if not run.budget.affords(run.steps_done, groups=run.groups):
                break
            raise RuntimeError(
                f"epoch {number} has {end - run.steps_done} steps left: pass all its batches to run.step, or leave the "
                "loop over run.epochs() too"
            )
    next(batches, None)  # ends the loading of records


def _left(run: PrivateRun, end: int) -> int:
    return end - run.steps_done
