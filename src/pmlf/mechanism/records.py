"""Records as a loader takes and collates them, each alone or many together, and that they are the same either way."""

from __future__ import annotations

import copy
import secrets
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.utils.data import default_collate

from pmlf.basics.batches import batch_size, same_batches, same_bits, select, tensors_of, whole_values

Collate = Callable[[list[Any]], Any]


class Records:
    """A dataset and its way to batches, for a DataLoader.

    A record must not depend on those it is taken or collated with. By construction where each is taken alone; a dataset
    with a way of its own to take several `together` (`__getitems__`), and a `collate_fn`, are held to it in every
    batch: one record, chosen at random, is taken and collated again alone, and must be the same but for padding.
    """

    def __init__(self, dataset: Any, collate_fn: Collate | None, *, together: bool) -> None:
        self._dataset = dataset
        self._collate_fn = collate_fn
        self._together = together

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Any:
        return alone(self._dataset, index)

    def __getitems__(self, indices: list[int]) -> Sequence[Any]:
        if not self._together:
            return [alone(self._dataset, index) for index in indices]
        records: Sequence[Any] = self._dataset.__getitems__(list(indices))
        place = secrets.randbelow(len(records))
        collate = self._collate_fn or default_collate
        one, other = (collate([copy.deepcopy(r)]) for r in (alone(self._dataset, indices[place]), records[place]))
        if not _is_part(one, other):
            raise ValueError(
                "the dataset's __getitems__ gives another record alone than with others, by more than padding at its "
                "ends: take every record by itself, and draw randomness in loss_fn where model.training is set"
            )
        return records

    def collate(self, records: Any) -> Any:
        if self._collate_fn is None:
            return default_collate(records)
        place = secrets.randbelow(len(records))
        kept = copy.deepcopy(records[place])  # some collate functions change what they are given
        batch = self._collate_fn(records)
        if batch_size(batch) != len(records):
            raise ValueError(
                "collate_fn returned another number of samples than were drawn: it must keep every sample, once"
            )
        if not _is_part(self._collate_fn([kept]), select(batch, slice(place, place + 1))):
            raise ValueError(
                "collate_fn makes another sample of a record alone than with others, by more than padding at its ends: "
                "make each sample of its own record, and draw randomness in loss_fn where model.training is set"
            )
        return batch


def alone(dataset: Any, index: int) -> Any:
    """One record, by itself."""
    return dataset.__getitems__([index])[0] if takes_together(dataset) else dataset[index]


def takes_together(dataset: Any) -> bool:
    return callable(getattr(dataset, "__getitems__", None))


def steady(dataset: Any, indices: Sequence[int], collate_fn: Collate | None) -> bool:
    """Whether a dataset gives the same records when it is asked again, so that they can be compared."""
    collate = collate_fn or default_collate
    pairs = ((alone(dataset, index), alone(dataset, index)) for index in indices)
    return all(same_batches(*(collate([record]) for record in pair)) for pair in pairs)


def collation(
    dataset: Any, looked_at: Sequence[int], collate_fn: Collate | None, *, together: bool
) -> Callable[[list[int]], Any]:
    """Batches of the records looked at, as training makes them; a record that is taken alone is taken once."""
    collate = collate_fn or default_collate
    taken = {index: alone(dataset, index) for index in looked_at}

    def batch_of(indices: list[int]) -> Any:
        if together and len(indices) > 1:
            return collate(dataset.__getitems__(list(indices)))
        return collate([copy.deepcopy(taken[index]) for index in indices])

    return batch_of


def _is_part(one: Any, padded: Any) -> bool:
    """Whether every tensor of a batch of one is the other's, which may be longer at the end, or at the beginning."""
    tensors, others = list(tensors_of(one)), list(tensors_of(padded))
    if list(whole_values(one)) != list(whole_values(padded)):
        return False
    return len(tensors) == len(others) and all(map(_is_end, tensors, others))


def _is_end(tensor: Tensor, padded: Tensor) -> bool:
    if tensor.ndim != padded.ndim or any(size > room for size, room in zip(tensor.shape, padded.shape, strict=True)):
        return False
    first = padded[tuple(slice(0, size) for size in tensor.shape)]
    last = padded[tuple(slice(room - size, None) for size, room in zip(tensor.shape, padded.shape, strict=True))]
    return same_bits(tensor, first.contiguous()) or same_bits(tensor, last.contiguous())
