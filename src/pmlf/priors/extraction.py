"""Features of whole datasets: computed once on all cores, kept in the private cache, resumed after an interruption."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from pmlf.data.cache import digest
from pmlf.data.resumable import resumable
from pmlf.priors.prior import ImagePrior

_RECORDS_PER_CHUNK = 256


def extract(
    prior: ImagePrior,
    images: NDArray[np.uint8],
    *,
    progress: Callable[[int, int], None] | None = None,
) -> NDArray[Any]:
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
    threads = torch.get_num_threads()

    def compute(part: slice) -> NDArray[np.float16]:
        torch.set_num_threads(1)  # records are spread over threads; the work on one record is not
        return prior(images[part])

    contents = hashlib.blake2b(np.ascontiguousarray(images).data, digest_size=16).hexdigest()
    try:
        return resumable(
            digest([], "features", prior.spec.digest(), len(images), contents),
            shape=(len(images), prior.dimensions),
            dtype=np.float16,
            compute=compute,
            chunk=_RECORDS_PER_CHUNK,
            threads=threads,
            progress=progress,
        )
    finally:
        torch.set_num_threads(threads)
