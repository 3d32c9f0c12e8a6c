"""Units of privacy: which records belong to one person, patient or account, and which of them a step takes."""

from __future__ import annotations

from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from pmlf.basics.arguments import require_count
from pmlf.basics.ids import id_array
from pmlf.mechanism.noise import Stream, keyed_uniforms

MOST_RECORDS = 32  # of a unit in a step, unless another number is given
_MOST_IS = "it is the number of records that a unit brings to a step"
_PADDING, _LITTLE = 1.2, 16  # records and padding over records; padding that is always allowed


def require_unit_arguments(max_records_per_unit: Any, unit_name: Any) -> None:
    """Check what `Units` takes as `most` and `name`, for callers whose users know them by these names.

    Raises:
        ValueError: One is not possible.
    """
    require_count("max_records_per_unit", max_records_per_unit, _MOST_IS)
    _require_name("unit_name", unit_name)


def _require_name(argument: str, value: Any) -> None:
    if not (isinstance(value, str) and value.strip() and value.isprintable()):
        raise ValueError(f"{argument}={value!r} is not a name: give a word such as 'patient'")


class Units:
    """The unit of every record. Sampling draws units, and a unit brings at most `most` of its records.

    The names of units, their number and the number of records are public constants, as n is for records. How many
    records a unit has is not: it stays before the noise.

    Args:
        ids: One id per record, whole numbers or texts, in the order of the dataset.
        most: The largest number of records that a unit brings to a step.
        name: What a unit is called, such as "patient_id". The certificate says it.

    Raises:
        ValueError: An id is missing, or an argument is out of range.

    >>> units = Units(["ann", "bob", "ann"], name="patient")
    >>> units.count, units.records, units.of(np.array([2, 1])).tolist()
    (2, 3, [0, 1])
    """

    def __init__(self, ids: Any, *, most: int = MOST_RECORDS, name: str = "unit") -> None:
        require_count("most", most, _MOST_IS)
        _require_name("name", name)
        self.name, self.most = name, most
        _, self._unit = np.unique(id_array(ids), return_inverse=True)
        self._order = np.argsort(self._unit, kind="stable")  # the records, one unit after the other
        self._ends = np.concatenate([[0], np.bincount(self._unit).cumsum()]) if len(self._unit) else np.zeros(1, int)

    def check(self, records: int, together: int) -> None:
        """Raise ValueError unless there is a unit for each record of the dataset, and a unit fits a micro-batch."""
        if self.records != records:
            raise ValueError(f"units has {self.records} ids for {records} records: give one id per record")
        if self.most > together:
            raise ValueError(
                f"a unit brings up to {self.most} records, which is more than max_physical_batch_size={together}: they "
                "are clipped together, so give a larger max_physical_batch_size or fewer records per unit"
            )

    @property
    def count(self) -> int:
        """The number of units, n."""
        return len(self._ends) - 1

    @property
    def records(self) -> int:
        """The number of records of all units."""
        return len(self._unit)

    @property
    def numbers(self) -> NDArray[np.int64]:
        """The unit of every record, by number."""
        return self._unit

    @property
    def description(self) -> str:
        """What is protected, in words."""
        return f"one {self.name}; {self.count:,} units, {self.records:,} records"

    def of(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """The numbers of the units that records belong to."""
        return self._unit[indices]

    def digest(self, key: bytes) -> str:
        """A digest, with a secret key, of which records belong together. Equal if their units are."""
        return blake2b(self._unit.astype(np.int64).tobytes(), key=key, person=b"units").hexdigest()

    def brought(self, units: NDArray[np.int64], stream: Stream) -> NDArray[np.int64]:
        """The records that some units bring, one unit after the other: all of a unit's, or `most` chosen at random.

        What a unit brings depends on the stream's key and on its own records alone.
        """
        parts = [self._order[self._ends[unit] : self._ends[unit + 1]] for unit in units.tolist()]
        records = np.concatenate(parts) if parts else self._order[:0]
        chance = keyed_uniforms(stream, torch.from_numpy(records), 1)[:, 0].numpy()
        shuffled = records[np.lexsort((chance, self._unit[records]))]  # each unit's records in a random order
        counts = np.bincount(self._unit[shuffled], minlength=self.count)
        places = np.arange(len(shuffled)) - (counts.cumsum() - counts)[self._unit[shuffled]]
        kept = np.sort(shuffled[places < self.most])
        return kept[np.argsort(self._unit[kept], kind="stable")]

    def micro_batches(
        self, records: NDArray[np.int64], size: int, lengths: NDArray[np.int64] | None
    ) -> list[NDArray[np.int64]]:
        """Records cut into micro-batches of at most `size`, each with whole units, of similar numbers of records.

        Args:
            records: What some units bring, one unit after the other.
            size: The largest micro-batch, at least `most`.
            lengths: One number per record of the dataset. Units of similar length share a micro-batch.
        """
        units, starts, counts = np.unique(self._unit[records], return_index=True, return_counts=True)
        longest = np.zeros(len(units)) if lengths is None else np.maximum.reduceat(lengths[records], starts)
        alike = np.ceil(np.log(counts) / np.log(_PADDING))  # classes of units with nearly as many records
        found: list[NDArray[np.int64]] = []
        waiting: list[int] = []
        for place in [*np.lexsort((counts, longest, alike)).tolist(), None]:
            if waiting and (place is None or not _fits(counts[[*waiting, place]], size)):
                parts = [records[starts[each] : starts[each] + counts[each]] for each in sorted(waiting)]
                found.append(np.concatenate(parts))
                waiting = []
            waiting += [] if place is None else [place]
        return found


def _fits(counts: NDArray[np.int64], size: int) -> bool:
    """Whether units with so many records share a micro-batch: they fit into it, and little is padding.

    The gradients of a micro-batch's units are filled up to as many records as the largest unit has.
    """
    records = int(counts.sum())
    return records <= size and len(counts) * int(counts.max()) <= _PADDING * records + _LITTLE
