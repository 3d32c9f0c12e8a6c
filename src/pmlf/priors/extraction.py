"""Features of whole datasets: computed once on all cores, kept in the private cache, resumed after an interruption."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import DTypeLike, NDArray
from torch.utils.data import Dataset

from pmlf.data.cache import digest
from pmlf.data.resumable import resumable
from pmlf.models.encoders import Encoder, embedded
from pmlf.priors.prior import ImagePrior

_RECORDS_PER_CHUNK = 256
_TEXTS_PER_CHUNK = 4096  # large enough that many of them have the same length
_RECORDS_PER_BATCH = 64
_EMBEDDINGS_VERSION = 1  # part of every cache key: increase it if the same encoder gives other embeddings

Progress = Callable[[int, int], None]


def extract(prior: ImagePrior, images: NDArray[np.uint8], *, progress: Progress | None = None) -> NDArray[Any]:
    """The features of images (N, C, H, W), memory-mapped from the cache.

    Missing features are computed on as many threads as torch uses. An interrupted extraction continues where it
    stopped. The cache is readable by its owner only, and its names are keyed: features are as private as the images.

    Args:
        prior: Where the features come from.
        images: uint8 images of the prior's size and channels.
        progress: Called with the number of records done and the number in all.

    Returns:
        float16 array (N, prior.dimensions).

    Raises:
        ValueError: If the images do not fit the prior, or the cache folder cannot be used.
    """
    prior(images[:0])  # refuses images that do not fit
    return _extracted(
        digest([], "features", prior.spec.digest(), len(images), digest_of([images])),
        (len(images), prior.dimensions),
        np.float16,
        lambda part: prior(images[part]),
        _RECORDS_PER_CHUNK,
        progress,
    )


def embed(
    encoder: Encoder,
    records: Dataset[Any],
    collate_fn: Callable[[list[Any]], Any],
    *,
    contents: str,
    lengths: NDArray[np.int64] | None = None,
    progress: Progress | None = None,
) -> NDArray[Any]:
    """The embeddings of records by a frozen encoder, memory-mapped from the cache, which is that of `extract`.

    Texts are embedded together with texts of the same length alone, so that no padding enters: the embedding of a
    record depends on that record, and on its batch by rounding only.

    Args:
        encoder: A frozen encoder of texts or images.
        records: A map-style dataset.
        collate_fn: Makes a batch of its items.
        contents: A digest of the records, from `digest_of`.
        lengths: The number of tokens of each record, for texts.
        progress: Called with the number of records done and the number in all.

    Returns:
        float32 array (N, d).

    Raises:
        ValueError: If the cache folder cannot be used.
    """
    count = len(records)  # type: ignore[arg-type]  # map-style datasets have one

    def compute(part: slice) -> NDArray[np.float32]:
        places = np.arange(count)[part]
        found = np.empty((len(places), width), np.float32)
        with torch.inference_mode():
            for chosen in _batches(None if lengths is None else lengths[places], len(places)):
                batch = collate_fn([records[int(place)] for place in places[chosen]])
                found[chosen] = embedded(encoder, batch).float().numpy()
        return found

    with torch.inference_mode():
        width = embedded(encoder, collate_fn([records[0]])).shape[1]
    weights = digest_of([tensor.detach().numpy() for tensor in encoder.state_dict().values()])
    return _extracted(
        digest([], "embeddings", _EMBEDDINGS_VERSION, encoder.configuration, weights, count, contents),
        (count, width),
        np.float32,
        compute,
        _RECORDS_PER_CHUNK if lengths is None else _TEXTS_PER_CHUNK,
        progress,
    )


def digest_of(arrays: Sequence[NDArray[Any]]) -> str:
    """A digest of arrays, for keys of the cache."""
    found = hashlib.blake2b(digest_size=16)
    for array in arrays:
        found.update(np.ascontiguousarray(array).data)
    return found.hexdigest()


def _batches(lengths: NDArray[np.int64] | None, count: int) -> Iterator[NDArray[np.int64]]:
    """Places of records that are embedded together: of one length, and not too many."""
    groups = [np.arange(count)]
    if lengths is not None:
        groups = [np.flatnonzero(lengths == length) for length in np.unique(lengths)]
    for group in groups:
        yield from (group[start : start + _RECORDS_PER_BATCH] for start in range(0, len(group), _RECORDS_PER_BATCH))


def _extracted(
    key: str,
    shape: tuple[int, int],
    dtype: DTypeLike,
    compute: Callable[[slice], NDArray[Any]],
    chunk: int,
    progress: Progress | None,
) -> NDArray[Any]:
    def on_one_thread(part: slice) -> NDArray[Any]:
        torch.set_num_threads(1)  # records are spread over threads; the work on one record is not
        return compute(part)

    with _same_threads() as threads:
        return resumable(
            key, shape=shape, dtype=dtype, compute=on_one_thread, chunk=chunk, threads=threads, progress=progress
        )


@contextmanager
def _same_threads() -> Iterator[int]:
    threads = torch.get_num_threads()
    try:
        yield threads
    finally:
        torch.set_num_threads(threads)
