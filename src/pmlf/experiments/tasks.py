"""A task: what a dataset and a model, named in a spec, give a run. Images and text look alike from here on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset, Subset

from pmlf import data, models
from pmlf.arguments import require_count
from pmlf.experiments.spec import RunSpec
from pmlf.noise import Stream
from pmlf.step import Augmentation

HOLDOUT = "holdout"
_PUBLIC_KEY = bytes(32)  # of the permutation that splits a training set: the same for everybody, and no secret


@dataclass(frozen=True, kw_only=True)
class Task:
    """A model, the records it is trained on, those it is judged on, and how a batch of either is read."""

    model: nn.Module
    train: Dataset[Any]
    judged_on: Mapping[str, Dataset[Any]]  # by the split's name, the one that counts first
    logits: Callable[[nn.Module, Any], Tensor]  # (model, batch) -> (N, classes)
    labels: Callable[[Any], Tensor]  # batch -> (N,)
    collate_fn: Callable[[list[Any]], Any] | None = None
    augmentation: Augmentation | None = None

    @property
    def records(self) -> int:
        """The number of training records that can be drawn, n."""
        return len(self.train)  # type: ignore[arg-type]  # map-style datasets have a length

    def losses(self, model: nn.Module, batch: Any) -> Tensor:
        """Cross-entropy, one number a sample."""
        return F.cross_entropy(self.logits(model, batch), self.labels(batch), reduction="none")


def prepare(spec: RunSpec, data_dir: Path | None = None) -> Task:
    """The task of a spec: its dataset read, split if `holdout` says so, and its model built from the seed."""
    loaded = _load(spec.dataset, data_dir)
    train, judged_on = _split(
        _first(spec.records, loaded.train), {"test": _first(spec.records, loaded.test)}, spec.holdout
    )
    return Task(
        model=models.build(
            spec.model,
            in_channels=loaded.in_channels,
            image_size=loaded.image_size,
            classes=loaded.classes,
            seed=spec.seed,
        ),
        train=train,
        judged_on=judged_on,
        logits=lambda model, batch: model(batch[0]),
        labels=lambda batch: batch[1],
        collate_fn=data.collate,
    )


@lru_cache(maxsize=1)
def _load(dataset: str, data_dir: Path | None) -> data.ImageData:
    """Kept for the next method of a comparison."""
    return data.load(dataset, data_dir)


def _first(records: int | None, split: Dataset[Any]) -> Dataset[Any]:
    """The first so many records of a split, all where there are fewer."""
    if records is None:
        return split
    require_count("records", records, "it limits how many are used")
    return Subset(split, range(min(records, len(split))))  # type: ignore[arg-type]


def _split(
    train: Dataset[Any], judged_on: Mapping[str, Dataset[Any]], holdout: float | None
) -> tuple[Dataset[Any], Mapping[str, Dataset[Any]]]:
    """As published, or with a part of the training split held out and judged on in place of the test split."""
    if holdout is None:
        return train, judged_on
    kept, held = holdout_indices(len(train), holdout)  # type: ignore[arg-type]
    return Subset(train, kept.tolist()), {HOLDOUT: Subset(train, held.tolist())}


def holdout_indices(records: int, fraction: float) -> tuple[np.ndarray, np.ndarray]:
    """Indices kept for training and indices held out, by a permutation that depends on the count alone.

    >>> kept, held = holdout_indices(10, 0.3)
    >>> len(held), sorted([*kept, *held]) == list(range(10))
    (3, True)
    """
    count = round(fraction * records) if 0.0 < fraction < 1.0 else 0
    if not 0 < count < records:
        raise ValueError(
            f"holdout={fraction} of {records} records leaves none on one side: give a fraction between 0 and 1, 0.1 "
            "for example"
        )
    permutation = np.argsort(Stream(_PUBLIC_KEY).words(records), kind="stable")
    return np.sort(permutation[count:]), np.sort(permutation[:count])
