"""Training and evaluation records of a run: the published splits, or a part of the training split held out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Dataset, Subset

from pmlf import data
from pmlf.basics.arguments import require_count
from pmlf.experiments.spec import RunSpec
from pmlf.mechanism.noise import Stream

HOLDOUT = "holdout"
_PUBLIC_KEY = bytes(32)  # of the permutation that splits a training set: public and always the same
_PART_KEY = b"part".ljust(32, b"\0")  # of another one, so that a part and what is held out of it are independent


def first(most: int | None, records: Dataset[Any]) -> Dataset[Any]:
    """The first records of a split, or all if there are fewer."""
    if most is None:
        return records
    require_count("records", most, "it is the number of records to use")
    return Subset(records, range(min(most, length(records))))


def unit_ids(spec: RunSpec) -> NDArray[np.str_] | None:
    """The unit of each record of the whole training split; None if records are protected."""
    if spec.dataset in data.NAMES:
        if spec.own.unit_column is not None:
            raise ValueError(f"`unit_column` is only for your own data, and {spec.dataset!r} has none: leave it out")
        return None
    if spec.own.unit_column is None:
        data.refuse_unit_folders(spec.dataset)
        return None
    return np.array(data.unit_column(spec.dataset, spec.own.unit_column))


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
    train = first(most, train)
    if holdout is None:
        return train, {name: first(most, records) for name, records in judged_on.items()}
    count, unit = _counted(train, units)
    held_units = np.isin(unit, holdout_indices(count, holdout)[1])
    kept, held = (np.flatnonzero(held_units == there) for there in (False, True))
    return Subset(train, kept.tolist()), {HOLDOUT: Subset(train, held.tolist())}


def part(records: Dataset[Any], ends: tuple[float, float] | None, units: NDArray[np.str_] | None) -> Dataset[Any]:
    """The records between two fractions of a public random order, so that (0, f) and (f, 1) have none in common.

    Args:
        records: The training split.
        ends: The fractions; None for all records.
        units: The unit of each record of the whole split; then the order is one of units. None for records.

    Raises:
        ValueError: The part is empty.
    """
    if ends is None:
        return records
    count, unit = _counted(records, units)
    order = np.argsort(Stream(_PART_KEY).words(count), kind="stable")
    chosen = np.flatnonzero(np.isin(unit, order[round(ends[0] * count) : round(ends[1] * count)]))
    if len(chosen) == 0:
        raise ValueError(f"share={ends[0] or ends[1]} of {count} records leaves one part empty: give another share")
    return Subset(records, chosen.tolist())


def _counted(records: Dataset[Any], units: NDArray[np.str_] | None) -> tuple[int, NDArray[np.int64]]:
    """The number of units, and the unit of each record; a record is its own unit if there are none."""
    if units is None:
        return length(records), np.arange(length(records))
    names, unit = np.unique(units[indices(records)], return_inverse=True)
    return len(names), unit


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
