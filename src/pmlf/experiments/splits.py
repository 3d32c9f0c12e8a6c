"""Training and evaluation records of a run: the published splits, or a part of the training split held out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Dataset, Subset

from pmlf import data
from pmlf.basics.arguments import require_count
from pmlf.mechanism.noise import Stream

HOLDOUT = "holdout"
_PUBLIC_KEY = bytes(32)  # of the permutation that splits a training set: public and always the same


def _first(most: int | None, records: Dataset[Any]) -> Dataset[Any]:
    """The first records of a split, or all if there are fewer."""
    if most is None:
        return records
    require_count("records", most, "it is the number of records to use")
    return Subset(records, range(min(most, length(records))))


def split(
    train: Dataset[Any],
    judged_on: Mapping[str, Dataset[Any]],
    *,
    most: int | None,
    holdout: float | None,
    units: NDArray[np.str_] | None = None,
) -> tuple[Dataset[Any], Mapping[str, Dataset[Any]]]:
    """Training and evaluation records: the published splits, or both from the training split if there is a holdout.

    Args:
        train: The training split.
        judged_on: The other splits by name.
        most: The number of records to take of each split; None for all.
        holdout: The fraction of the training split to evaluate on; None for the other splits.
        units: The unit of each record of the training split; then whole units are held out, and nobody is in both
            parts. None for records.
    """
    train = _first(most, train)
    if holdout is None:
        return train, {name: _first(most, records) for name, records in judged_on.items()}
    if units is None:
        kept, held = holdout_indices(length(train), holdout)
    else:
        names, unit = np.unique(units[indices(train)], return_inverse=True)
        held_units = holdout_indices(len(names), holdout)[1]
        kept, held = (np.flatnonzero(np.isin(unit, held_units) == there) for there in (False, True))
    return Subset(train, kept.tolist()), {HOLDOUT: Subset(train, held.tolist())}


def indices(records: Dataset[Any]) -> NDArray[np.int64]:
    """Which records of the whole split these are."""
    if isinstance(records, Subset):
        return indices(records.dataset)[np.asarray(records.indices)]
    return np.arange(length(records))


def lengths(records: Dataset[Any]) -> NDArray[np.int64]:
    """The number of tokens of each record, also of a subset."""
    if isinstance(records, Subset):
        return lengths(records.dataset)[np.asarray(records.indices)]
    assert isinstance(records, data.TokenDataset)
    return records.lengths


def by_length(records: Dataset[Any]) -> Dataset[Any]:
    """The same records sorted by length, so that batches need little padding."""
    return Subset(records, np.argsort(lengths(records), kind="stable").tolist())


def length(records: Dataset[Any]) -> int:
    """The number of records."""
    return len(records)  # type: ignore[arg-type]  # map-style datasets have one


def holdout_indices(records: int, fraction: float) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Indices to train on and indices held out, by a permutation that depends only on the number of records.

    >>> kept, held = holdout_indices(10, 0.3)
    >>> len(held), sorted([*kept, *held]) == list(range(10))
    (3, True)
    """
    count = round(fraction * records) if 0.0 < fraction < 1.0 else 0
    if not 0 < count < records:
        raise ValueError(
            f"holdout={fraction} of {records} records leaves one part empty: give a fraction between 0 and 1, such as "
            "0.1"
        )
    permutation = np.argsort(Stream(_PUBLIC_KEY).words(records), kind="stable")
    return np.sort(permutation[count:]), np.sort(permutation[:count])
