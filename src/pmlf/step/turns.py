"""Whose turn it is: the steps of cyclic sampling in order, and what they are accounted as."""

from __future__ import annotations

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
        self._counts: dict[str, list[int]] = {}  # releases by group, by the name of the groups
        self._groups: str | None = None  # the groups of the release before
        self._next = 0  # the step after it

    @property
    def events(self) -> int:
        """The number of events to account for: the most turns of a group, added up over samplers."""
        return sum(map(max, self._counts.values()))

    def begins(self, batch: LogicalBatch | None) -> bool:
        """Whether the batch begins a block: its groups are not those of the release before."""
        return batch is not None and batch.groups != self._groups

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
        if batch.cycle != self._cycle:
            raise ValueError(
                f"the batch is drawn with cycle={batch.cycle} and this step has cycle={self._cycle}: give both the "
                f"number of bands of the noise"
            )
        if batch.samples != samples:  # without the numbers, which are sensitive
            raise ValueError(
                "the sum does not have the samples of this batch, each once. It is forgotten: take the whole batch "
                f"again, from batches({batch.step}, steps)"
            )
        if self._cycle == 1:
            return
        if due is not None and self._counts and batch.groups not in self._counts:
            raise ValueError(
                "the batch is drawn from other groups, and seeded noise goes on with the same ones: give the sampler "
                "the seed that it had"
            )
        expected = self._next if batch.groups == self._groups else due
        if expected is not None and batch.step != expected:
            raise ValueError(
                f"the batch is of step {batch.step}, and step {expected} is due: no step may be left out or taken "
                f"twice, also not one whose batch is empty or failed. Take it from batches({expected}, steps)"
            )

    def take(self, batch: LogicalBatch | None) -> None:
        """Count a release."""
        groups, step = (EVERYBODY, 0) if batch is None or self._cycle == 1 else (batch.groups, batch.step)
        self._counts.setdefault(groups, [0] * self._cycle)[step % self._cycle] += 1
        self._groups, self._next = groups, step + 1

    def state_dict(self) -> dict[str, Any]:
        """The turns of all groups so far."""
        return {name: list(counts) for name, counts in self._counts.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue after a saved state. What this process has released since then stays counted."""
        for name, counts in state.items():
            known = self._counts.get(name, [0] * self._cycle)
            self._counts[name] = [max(pair) for pair in zip(known, counts, strict=True)]
        self._groups, self._next = None, 0
