"""Whose turn it is: the steps of cyclic sampling in order, and what the releases are accounted as."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any, final

from pmlf.mechanism.cycles import EVERYBODY
from pmlf.mechanism.sampling import LogicalBatch


@final
class Turns:
    """Checks that a sum is of the batch that is due, and counts the turns of every group.

    Noise of b bands needs that a record takes part at most once in b releases in a row. Within one sampler's groups
    that holds if no step is left out or taken twice. The groups of another sampler are new, so its first release begins
    a new block of the noise, with an empty memory: whoever had a turn in the block before has nothing in common with
    this one. A record may then have had the most turns of every block, so the turns of the blocks add up.

    Args:
        cycle: The number of groups; 1 is plain Poisson sampling.

    >>> turns = Turns(2)
    >>> for step in range(3):
    ...     batch = LogicalBatch.whole(step, samples=5, cycle=2)
    ...     turns.check(batch, samples=5, due=None)
    ...     turns.take(batch)
    >>> turns.events
    2
    """

    def __init__(self, cycle: int) -> None:
        self._cycle = cycle
        self._line = secrets.token_hex(8)  # of this object: a copy and a restart are other lines
        self._earlier: dict[str, int] = {}  # events of the lines whose states this one goes on from
        self._counts: dict[str, list[int]] = {}  # releases of this line by group, by the name of the groups
        self._groups: str | None = None  # the groups of the release before
        self._next: int | None = None  # the step after it; None after a loaded state, where a new block begins

    def __getstate__(self) -> dict[str, Any]:
        return {
            **vars(self),
            "_line": secrets.token_hex(8),
            "_earlier": {self._line: self.events},
            "_counts": {},
            "_next": None,
        }

    @property
    def events(self) -> int:
        """The number of events to account for: the most turns of a group, added up over samplers and lines."""
        return sum(self._earlier.values()) + sum(map(max, self._counts.values()))

    def begins(self, batch: LogicalBatch | None) -> bool:
        """Whether the batch begins a block of the noise."""
        return batch is not None and (self._next is None or batch.groups != self._groups)

    def check(self, batch: LogicalBatch | None, *, samples: int, due: int | None) -> None:
        """Compare the batch that a sum is of with the one that must come next.

        Args:
            batch: What the caller says that the sum is of; None where nothing depends on it.
            samples: The number of samples in the sum.
            due: The step that seeded noise goes on with; None if it can begin anywhere.

        Raises:
            ValueError: They differ.
        """
        if batch is None:
            if self._cycle > 1:
                raise ValueError(
                    "batch is missing: shaped noise needs its groups of records in turn, and the batch says whose "
                    "turn it is. Call release(batch)"
                )
            return
        if not isinstance(batch, LogicalBatch):
            raise ValueError(f"batch is a {type(batch).__name__}: give the batch that PoissonBatches issued")
        if batch.released:
            raise ValueError(f"the batch of step {batch.step} was released already: a draw is for one release")
        if batch.cycle != self._cycle:
            raise ValueError(
                f"the batch is drawn with cycle={batch.cycle} and this step has cycle={self._cycle}: give both the "
                "number of bands of the noise"
            )
        if batch.samples != samples:  # without the numbers, which are sensitive
            raise ValueError(
                "the sum does not have as many samples as its batch. It is forgotten: take the whole batch again, "
                f"from batches({batch.step}, steps)"
            )
        if self._cycle == 1:
            return
        if due is not None and self._groups not in (None, batch.groups):
            raise ValueError(
                "the batch is drawn from other groups, and seeded noise goes on with the same ones: give the sampler "
                "the seed that it had"
            )
        expected = due if self.begins(batch) else self._next
        if expected is not None and batch.step != expected:
            raise ValueError(
                f"the batch is of step {batch.step}, and step {expected} is due: no step may be left out or taken "
                f"twice, also not one whose batch is empty or failed. Take it from batches({expected}, steps)"
            )

    def take(self, batch: LogicalBatch | None) -> None:
        """Count a release, and tell its sampler that the draw is used up."""
        groups, step = (EVERYBODY, 0) if batch is None or self._cycle == 1 else (batch.groups, batch.step)
        self._counts.setdefault(groups, [0] * self._cycle)[step % self._cycle] += 1
        self._groups, self._next = groups, step + 1
        if batch is not None:
            batch.release()

    def state_dict(self) -> dict[str, Any]:
        """The events so far, and the groups of the last release."""
        return {"line": self._line, "events": self.events, "groups": self._groups}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue after a saved state. What this object has released since then, or beside it, stays counted."""
        if state["line"] != self._line:
            self._earlier[state["line"]] = max(state["events"], self._earlier.get(state["line"], 0))
        self._groups, self._next = state["groups"], None
