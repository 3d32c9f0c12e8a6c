"""Loading and collating records, with a check that a record does not depend on the records loaded beside it."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.utils.data import default_collate

from pmlf.basics.batches import batch_size, copied, same_batches, same_bits, select, tensors_of, whole_values

Collate = Callable[[list[Any]], Any]


class Records:
    """A dataset as a `DataLoader` reads it, with checks that samples are independent.

    A record must not depend on the records that are loaded or collated with it. If each is loaded alone, this holds by
    construction. A dataset's own `__getitems__` and a `collate_fn` are checked in every batch: one record, chosen at
    random, is loaded and collated again alone, and must be the same except for padding.

    Args:
        dataset: A map-style dataset.
        collate_fn: Makes a batch of a list of records; None for torch's default.
        together: Whether to load records through the dataset's `__getitems__`.
    """

    def __init__(self, dataset: Any, collate_fn: Collate | None, *, together: bool) -> None:
        self.dataset = dataset
        self.collate_fn = collate_fn
        self._together = together

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        return alone(self.dataset, index)

    def __getitems__(self, indices: list[int]) -> Sequence[Any]:
        if not self._together:
            return [alone(self.dataset, index) for index in indices]
        records: Sequence[Any] = self.dataset.__getitems__(list(indices))
        place = secrets.randbelow(len(records))
        collate = self.collate_fn or default_collate
        one, other = (collate([copied(r)]) for r in (alone(self.dataset, indices[place]), records[place]))
        if not _is_part(one, other):
            raise ValueError(
                "the dataset's __getitems__ returns a different record alone than with others, by more than padding at "
                "its ends: load every record by itself, and use randomness only in loss_fn, if model.training is set"
            )
        return records

    def collate(self, records: Any) -> Any:
        """A batch of these records.

        Raises:
            ValueError: The collate function drops samples, or a sample depends on the other records.
        """
        if self.collate_fn is None:
            return default_collate(records)
        place = secrets.randbelow(len(records))
        kept = copied(records[place])  # some collate functions change their input
        batch = self.collate_fn(records)
        if batch_size(batch) != len(records):
            # without the numbers: the size of a draw is sensitive
            raise ValueError("collate_fn drops or repeats samples: it must keep every record of a batch exactly once")
        if not _is_part(self.collate_fn([kept]), select(batch, slice(place, place + 1))):
            raise ValueError(
                "collate_fn makes a different sample of a record alone than with others, by more than padding at its "
                "ends: compute each sample from its own record, and use randomness only in loss_fn, if model.training "
                "is set"
            )
        return batch


def alone(dataset: Any, index: int) -> Any:
    """One record, loaded by itself."""
    return dataset.__getitems__([index])[0] if takes_together(dataset) else dataset[index]


def takes_together(dataset: Any) -> bool:
    """Whether the dataset can load several records at once (`__getitems__`)."""
    return callable(getattr(dataset, "__getitems__", None))


def steady(dataset: Any, indices: Sequence[int], collate_fn: Collate | None) -> bool:
    """Whether the dataset returns these records unchanged when they are loaded again.

    Records that are random cannot be compared, so such a dataset is loaded one record at a time.
    """
    collate = collate_fn or default_collate
    pairs = ((alone(dataset, index), alone(dataset, index)) for index in indices)
    return all(same_batches(*(collate([record]) for record in pair)) for pair in pairs)


def collation(
    dataset: Any, looked_at: Sequence[int], collate_fn: Collate | None, *, together: bool
) -> Callable[[list[int]], Any]:
    """A function from indices to a batch, as training makes it, for checks before training.

    Args:
        dataset: A map-style dataset.
        looked_at: The indices that may be asked for; each of these records is loaded once.
        collate_fn: Makes a batch of a list of records; None for torch's default.
        together: Whether several records are loaded at once (`__getitems__`).

    Returns:
        The function.
    """
    collate = collate_fn or default_collate
    taken = {index: alone(dataset, index) for index in looked_at}

    def batch_of(indices: list[int]) -> Any:
        if together and len(indices) > 1:
            return collate(dataset.__getitems__(list(indices)))
        return collate([copied(taken[index]) for index in indices])

    return batch_of


def _is_part(one: Any, padded: Any) -> bool:
    """Whether two batches of one sample are the same, except that `padded` may be longer at its start or end."""
    tensors, others = tensors_of(one), tensors_of(padded)
    if list(whole_values(one)) != list(whole_values(padded)):
        return False
    return len(tensors) == len(others) and all(map(_is_start_or_end, tensors, others))


def _is_start_or_end(tensor: Tensor, padded: Tensor) -> bool:
    if tensor.ndim != padded.ndim or any(size > room for size, room in zip(tensor.shape, padded.shape, strict=True)):
        return False
    first = padded[tuple(slice(0, size) for size in tensor.shape)]
    last = padded[tuple(slice(room - size, None) for size, room in zip(tensor.shape, padded.shape, strict=True))]
    return same_bits(tensor, first.contiguous()) or same_bits(tensor, last.contiguous())
