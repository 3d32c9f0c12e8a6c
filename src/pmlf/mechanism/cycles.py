"""The groups of cyclic Poisson sampling: which records a step may draw."""

from __future__ import annotations

import hashlib
from typing import final

import numpy as np
from numpy.typing import NDArray

from pmlf.mechanism.noise import Randomness, SharedRandomness, Stream

EVERYBODY = ""  # the name of the one group of plain Poisson sampling


@final
class Groups:
    """Puts every record into one of b groups: its number under a keyed hash, AES-256 in counter mode, modulo b.

    The groups of the records are independent and uniform, because the key is random. So adding or removing a record
    changes the distribution of nobody else's group, even if the others are numbered anew. The key stays in memory:
    without a seed every sampler has groups of its own, and one that goes on for another, after a restart, has new ones.

    Args:
        population: The number of records, n.
        cycle: The number of groups, b.
        randomness: The source of the key.

    Attributes:
        name: What tells these groups from others, without revealing who is in which.

    >>> from pmlf.mechanism.noise import SeededRandomness
    >>> groups = Groups(8, 2, SeededRandomness(0))
    >>> groups.at(0).tolist(), groups.at(1).tolist(), groups.at(2).tolist() == groups.at(0).tolist()
    ([1, 5, 6], [0, 2, 3, 4, 7], True)
    """

    def __init__(self, population: int, cycle: int, randomness: Randomness | SharedRandomness) -> None:
        self.cycle, self.name = cycle, EVERYBODY
        self._everybody = np.arange(population)
        if cycle > 1:
            key = randomness.stream("groups").words(4).tobytes()
            self._group = (Stream(key).words(population) % np.uint64(cycle)).astype(np.int64)
            self.name = hashlib.blake2b(key, digest_size=8, person=b"groups").hexdigest()

    def at(self, step: int) -> NDArray[np.int64]:
        """The numbers of the records that a step may draw, in increasing order."""
        return self._everybody if self.cycle == 1 else np.flatnonzero(self._group == step % self.cycle)
