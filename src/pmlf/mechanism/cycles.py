"""The groups of cyclic Poisson sampling: which records a step may draw."""

from __future__ import annotations

import hashlib
import warnings
from typing import final

import numpy as np
from numpy.typing import NDArray

from pmlf.mechanism.digests import records_digest, spread_digest
from pmlf.mechanism.noise import Randomness, SharedRandomness, Stream
from pmlf.mechanism.records import Records
from pmlf.mechanism.units import Units


@final
class Groups:
    """Puts every record into one of b groups: its number under a keyed hash, AES-256 in counter mode, modulo b.

    The groups of the records are independent and uniform, because the key is random. So adding or removing a record
    changes the distribution of nobody else's group, even if the others are numbered anew. Whoever knows the key knows
    the groups; the guarantee then still holds between datasets in which the other records keep their numbers.

    Args:
        population: The number of records, n.
        cycle: The number of groups, b.
        randomness: The source of the key.
        key: The 32-byte key of a saved run; None draws one.

    >>> from pmlf.mechanism.noise import SeededRandomness
    >>> groups = Groups(8, 2, SeededRandomness(0))
    >>> groups.at(0).tolist(), groups.at(1).tolist(), groups.at(2).tolist() == groups.at(0).tolist()
    ([1, 5, 6], [0, 2, 3, 4, 7], True)
    """

    def __init__(
        self, population: int, cycle: int, randomness: Randomness | SharedRandomness, key: bytes | None = None
    ) -> None:
        self.cycle = cycle
        self.drawn_once = cycle > 1 and not randomness.reproducible  # a seed gives the key again
        self.key = randomness.stream("groups").words(4).tobytes() if key is None else key
        self._everybody = np.arange(population)
        if cycle > 1:
            self._group = (Stream(self.key).words(population) % np.uint64(cycle)).astype(np.int64)

    def at(self, step: int) -> NDArray[np.int64]:
        """The numbers of the records that a step may draw, in increasing order."""
        return self._everybody if self.cycle == 1 else np.flatnonzero(self._group == step % self.cycle)

    def order_digest(self, records: Records, units: Units | None) -> str | None:
        """A digest, by the secret key, of the records in their order and of their units; None if records are random."""
        key = hashlib.blake2b(self.key, person=b"records").digest()
        if spread_digest(records.dataset, records.collate_fn, key) is None:
            return None
        found = records_digest(records.dataset, records.collate_fn, key)
        return found if units is None else f"{found} {units.digest(key)}"


def refuse_other_order(saved: str | None, found: str | None) -> None:
    """Compare the order of the records with that of a saved state. A record's group follows from its place.

    Raises:
        ValueError: The order has changed.
    """
    if saved is None or found is None:
        warnings.warn(
            "a record is another one each time it is read, so the order of the records cannot be compared with that "
            "of the saved state, and epsilon holds only if it is the same. Put randomness into `augmentation` to have "
            "it compared",
            stacklevel=3,
        )
    elif saved != found:
        raise ValueError(
            "the records, their units or their order have changed since the state was saved, and with shaped noise a "
            "record that moves takes part more often than is accounted for: give the same dataset in the same order "
            "(sort the names of files, for example), or start a new run"
        )
