"""Keyed digests of a dataset's records, in order, to detect that they changed."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Subset

from pmlf.mechanism.records import Collate

_RECORDS_AT_A_TIME = 100
_READ_TWICE = 32  # records, to find out whether reading them is random


def records_digest(dataset: Any, collate_fn: Collate | None, key: bytes) -> str:
    """A keyed digest of all records of a dataset, in order, to detect that they changed.

    The digest together with its key is as private as the records: it allows to test guesses of a record.

    Args:
        dataset: A map-style dataset whose records are not random.
        collate_fn: As in `torch.utils.data.DataLoader`.
        key: A secret of at most 64 bytes.

    Returns:
        64 hexadecimal digits.

    >>> records_digest([1, 2], None, b"key") == records_digest([2, 1], None, b"key")
    False
    """
    digest = hashlib.blake2b(key=key, digest_size=32)
    loader = DataLoader(dataset, batch_size=_RECORDS_AT_A_TIME, collate_fn=collate_fn, generator=torch.Generator())
    for batch in loader:
        for leaf in _leaves(batch):
            add_to(digest, leaf)
    return digest.hexdigest()


def spread_digest(dataset: Any, collate_fn: Collate | None, key: bytes) -> str | None:
    """A keyed digest of a few records, spread over a dataset; None if reading a record is random.

    >>> spread_digest([1, 2], None, b"key") == spread_digest([1, 2], None, b"key")
    True
    """
    records = len(dataset)
    some = Subset(dataset, [records * place // _READ_TWICE for place in range(_READ_TWICE)])
    digests = {records_digest(some, collate_fn, key) for _ in range(2)}
    return digests.pop() if len(digests) == 1 else None


def add_to(digest: hashlib._Hash | hashlib.blake2b, leaf: Any) -> None:
    """Add a tensor, or the text of another value, to a digest."""
    if not isinstance(leaf, Tensor):
        digest.update(repr(leaf).encode())
        return
    digest.update(f" {leaf.dtype} {tuple(leaf.shape)} ".encode())
    # as bytes, because numpy has no bfloat16
    digest.update(leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)


def _leaves(batch: Any) -> Iterator[Any]:
    """The values in the nested containers of a batch, in order."""
    if isinstance(batch, Mapping):
        for name, item in batch.items():
            yield name
            yield from _leaves(item)
    elif isinstance(batch, (list, tuple)):
        for item in batch:
            yield from _leaves(item)
    else:
        yield batch
