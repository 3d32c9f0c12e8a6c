"""How a run loads its records: what it takes from a `DataLoader`, and the check of what is collated."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    default_collate,
)

from pmlf.mechanism.records import Collate, collation, steady, takes_together
from pmlf.step import PrivateStep

_COLLATED = 256  # records on which the collate function is checked, beside the shortest and the longest


@dataclass(frozen=True, kw_only=True)
class Loading:
    """The records of a run and how they are loaded."""

    dataset: Any
    batch_size: float
    collate_fn: Callable[[list[Any]], Any] | None
    num_workers: int


def loading(
    dataset: Any, batch_size: float | None, collate_fn: Callable[[list[Any]], Any] | None, num_workers: int
) -> Loading:
    """The arguments as given, or those of a `DataLoader` given as dataset.

    From a loader come its dataset, batch size, collate function and number of workers. Its order is replaced by Poisson
    sampling, so `shuffle` has no effect; options of speed, such as `pin_memory`, have none either.

    Args:
        dataset: A map-style dataset, or a `DataLoader`.
        batch_size: The expected batch size; None for the loader's.
        collate_fn: Makes a batch of a list of records; None for the loader's.
        num_workers: The number of processes that load records; 0 for the loader's.

    Returns:
        The records and how to load them.

    Raises:
        ValueError: The loader has its own sampling, or an argument differs from the loader's.

    >>> found = loading(DataLoader([1, 2, 3], batch_size=2, shuffle=True), None, None, 0)
    >>> found.dataset, found.batch_size
    ([1, 2, 3], 2)
    """
    _refuse_tables(dataset)
    if not isinstance(dataset, DataLoader):
        if batch_size is None:
            raise ValueError("batch_size is missing: give the expected number of samples in a step")
        return Loading(dataset=dataset, batch_size=batch_size, collate_fn=collate_fn, num_workers=num_workers)
    loader = dataset
    _refuse_own_sampling(loader)
    own_collate = None if loader.collate_fn is default_collate else loader.collate_fn
    if batch_size is not None and batch_size != loader.batch_size:
        raise _given_twice("batch_size", batch_size, loader.batch_size)
    if num_workers and num_workers != loader.num_workers:
        raise _given_twice("num_workers", num_workers, loader.num_workers)
    if collate_fn is not None and collate_fn is not loader.collate_fn:
        raise _given_twice("collate_fn", collate_fn, loader.collate_fn)
    assert loader.batch_size is not None
    return Loading(
        dataset=loader.dataset,
        batch_size=loader.batch_size,
        collate_fn=own_collate,
        num_workers=loader.num_workers,
    )


def _refuse_tables(dataset: Any) -> None:
    """Raise ValueError for what has a length and an index, but is indexed by column."""
    if type(dataset).__module__.partition(".")[0] in ("pandas", "polars"):
        raise ValueError(
            f"dataset is a {type(dataset).__name__}, which is indexed by column and not by record: give "
            "torch.utils.data.TensorDataset(torch.tensor(table[inputs].to_numpy()), "
            "torch.tensor(table[target].to_numpy()))"
        )
    if isinstance(dataset, Mapping):
        raise ValueError(
            f"dataset is a {type(dataset).__name__}, which is indexed by key and not by record: give a dataset whose "
            "records are at dataset[0] to dataset[len(dataset) - 1], such as torch.utils.data.TensorDataset"
        )


def _given_twice(name: str, given: Any, own: Any) -> ValueError:
    return ValueError(f"{name}={given!r} is given, and the DataLoader has {name}={own!r}: leave one of them out")


def _refuse_own_sampling(loader: DataLoader[Any]) -> None:
    """Raise ValueError if the loader draws records in a way that Poisson sampling would silently replace."""
    kind = type(loader.batch_sampler if loader.batch_size is None else loader.sampler).__name__
    if type(loader).__module__.startswith("opacus."):
        raise ValueError(
            f"dataset is a {type(loader).__name__} of Opacus, which samples by itself: give the DataLoader from before "
            "PrivacyEngine.make_private"
        )
    if loader.batch_sampler is None:
        raise ValueError(
            "the DataLoader has batch_size=None, so its dataset makes batches by itself: give a dataset of single "
            "records, and batch_size"
        )
    if loader.batch_size is None or type(loader.batch_sampler) is not BatchSampler:
        raise ValueError(
            f"the DataLoader has batch_sampler={kind}, and the guarantee needs Poisson sampling: leave it out, and "
            "give batch_size"
        )
    if isinstance(loader.sampler, SubsetRandomSampler):
        raise ValueError(
            "the DataLoader has sampler=SubsetRandomSampler, and the guarantee needs Poisson sampling: give "
            "dataset=torch.utils.data.Subset(dataset, indices), and batch_size"
        )
    if not _covers_once(loader):
        raise ValueError(
            f"the DataLoader has sampler={kind}, which does not take every record once per epoch, and the guarantee "
            "needs Poisson sampling: leave the sampler out"
        )
    if loader.drop_last:
        raise ValueError(
            "the DataLoader has drop_last=True, and a Poisson draw has no last batch to drop: leave drop_last out"
        )
    if loader.generator is not None:
        raise ValueError(
            "the DataLoader has a generator, and draws are cryptographic: leave it out, or give seed=... to "
            "make_private for an experiment that repeats"
        )
    if loader.worker_init_fn is not None:
        raise ValueError(
            "the DataLoader has a worker_init_fn, which is not called: leave it out, and do its work in the dataset"
        )


def _covers_once(loader: DataLoader[Any]) -> bool:
    sampler = loader.sampler
    if type(sampler) is SequentialSampler:
        return True
    return (
        type(sampler) is RandomSampler and not sampler.replacement and sampler.num_samples == len(sampler.data_source)
    )


def check_records(
    step: PrivateStep, dataset: Any, collate_fn: Collate | None, lengths: NDArray[np.int64] | None
) -> bool:
    """Check that records do not change each other when they are collated.

    Returns whether several may be loaded at once. Records that are loaded one by one and not collated by the user
    cannot change each other. Random records cannot be compared, and are loaded one by one.
    """
    if collate_fn is None and not takes_together(dataset):
        return False
    extremes = () if lengths is None else (int(lengths.argmin()), int(lengths.argmax()))
    looked_at = sorted({*range(min(_COLLATED, len(dataset))), *extremes})
    together = takes_together(dataset) and steady(dataset, looked_at, collate_fn)
    step.check_collation(looked_at, collation(dataset, looked_at, collate_fn, together=together))
    return together
