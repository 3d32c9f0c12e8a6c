"""A task: the dataset and the model that a spec names, with one interface for images and texts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset, Subset, default_collate

from pmlf import data, models
from pmlf.basics.arguments import require_count
from pmlf.data.texts import Padding
from pmlf.engine.augmentation import Augmentation, shifted_crops
from pmlf.experiments.spec import RunSpec, TextOptions
from pmlf.mechanism.noise import Stream
from pmlf.models.text import load_classifier
from pmlf.run.evaluation import Score, confusion_matrix, score

SHIFTED_PART = 8  # augmentation shifts images by up to 1/8 of their side
HOLDOUT = "holdout"
_PUBLIC_KEY = bytes(32)  # of the permutation that splits a training set: public and always the same


@dataclass(frozen=True, kw_only=True)
class Task:
    """A model, its training records, its evaluation records, and how to read a batch of them."""

    model: nn.Module
    train: Dataset[Any]
    judged_on: Mapping[str, Dataset[Any]]  # by split, the main split first
    logits: Callable[[nn.Module, Any], Tensor]  # (model, batch) -> (N, classes)
    labels: Callable[[Any], Tensor]  # batch -> (N,)
    collate_fn: Callable[[list[Any]], Any] | None = None
    augmentation: Augmentation | None = None
    lengths: NDArray[np.int64] | None = None  # of the training records, if they differ
    metrics: tuple[str, ...] = ("accuracy",)

    @property
    def records(self) -> int:
        """The number n of training records."""
        return _length(self.train)

    def losses(self, model: nn.Module, batch: Any) -> Tensor:
        """The cross-entropy of each sample."""
        return F.cross_entropy(self.logits(model, batch), self.labels(batch), reduction="none")

    def unprotected(self, count: int) -> Any:
        """A batch of the first evaluation records, which epsilon does not protect."""
        records = next(iter(self.judged_on.values()))
        require_count("examples", count, "it is a number of evaluation records", least=2, most=_length(records))
        return (self.collate_fn or default_collate)([records[index] for index in range(count)])

    def scores(self, model: nn.Module) -> dict[str, Score]:
        """Evaluate a model on each evaluation split."""
        return {
            split: score(
                confusion_matrix(model, records, logits=self.logits, labels=self.labels, collate_fn=self.collate_fn),
                with_f1="f1" in self.metrics,
            )
            for split, records in self.judged_on.items()
        }


def prepare(spec: RunSpec, data_dir: Path | None = None) -> Task:
    """Load the dataset of a spec, split it if it has a `holdout`, and build its model from the seed.

    Args:
        spec: The run.
        data_dir: Folder of datasets. None: the folder in PMLF_DATA, else the Hugging Face hub.

    Raises:
        ValueError: If the dataset or the model is unknown or cannot be read, or an option does not fit it.
    """
    return _text_task(spec, data_dir) if spec.is_text else _image_task(spec, data_dir)


def _image_task(spec: RunSpec, data_dir: Path | None) -> Task:
    _refuse_given("text datasets", vars(spec.text))
    loaded = _load_images(spec.dataset, data_dir)
    train, judged_on = _split(spec, loaded.train, {"test": loaded.test})
    return Task(
        model=models.build(
            spec.model_name,
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
        augmentation=_augmentation(spec, loaded),
    )


def _augmentation(spec: RunSpec, loaded: data.ImageData) -> Augmentation | None:
    if not (spec.augment or spec.augment_per_point):
        return None
    padding = max(1, loaded.image_size // SHIFTED_PART)
    return shifted_crops(padding, flip=loaded.mirrors, per_point=spec.augment_per_point)


def _text_task(spec: RunSpec, data_dir: Path | None) -> Task:
    _refuse_given("image datasets", {"augment": spec.augment, "augment_per_point": spec.augment_per_point})
    loaded = data.load_text(spec.dataset, data_dir, _columns(spec.text))
    text_model = load_classifier(spec.model_name, classes=loaded.classes, seed=spec.seed, lora_rank=spec.text.lora_rank)
    longest = text_model.longest
    if spec.text.max_length is not None:
        require_count("max_length", spec.text.max_length, "it is the number of tokens to keep")
        longest = min(longest, spec.text.max_length)

    def tokenised(split: str) -> data.TokenDataset:
        cut = spec.text.max_length is not None
        return loaded.tokenised(split, text_model.tokenizer, longest=longest, cut=cut)

    train, judged_on = _split(spec, tokenised("train"), {split: tokenised(split) for split in loaded.judged_on})
    if not judged_on:
        raise ValueError(f"{spec.dataset!r} has no test split: add one, or evaluate on a part of it with holdout=0.1")
    return Task(
        model=text_model.model,
        train=train,
        judged_on={split: _by_length(records) for split, records in judged_on.items()},
        logits=_text_logits,
        labels=lambda batch: batch["labels"],
        collate_fn=Padding(text_model.pad_id),
        lengths=_lengths(train),
        metrics=loaded.metrics,
    )


def _text_logits(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    inputs = {name: tensor for name, tensor in batch.items() if name != "labels"}
    logits: Tensor = model(**inputs).logits
    return logits


def _columns(text: TextOptions) -> data.Columns | None:
    """The columns of your own table; None if no text column is given."""
    if text.text_column is None:
        own = {"text_pair_column": text.text_pair_column, "label_column": text.label_column, "labels": text.labels}
        _refuse_given("your own tables, with `text_column`", own)
        return None
    if text.labels is None:
        raise ValueError("text_column needs `labels`: give all possible labels, in class order")
    return data.Columns(
        text=text.text_column, pair=text.text_pair_column, label=text.label_column or "label", labels=text.labels
    )


def _refuse_given(kind: str, options: Mapping[str, Any]) -> None:
    for name, value in options.items():
        if value:
            raise ValueError(f"`{name}` is only for {kind}: leave it out")


@lru_cache(maxsize=1)
def _load_images(dataset: str, data_dir: Path | None) -> data.ImageData:
    """Load a dataset, cached for the next method of a comparison."""
    return data.load(dataset, data_dir)


def _first(records: int | None, split: Dataset[Any]) -> Dataset[Any]:
    """The first `records` records of a split, or all if there are fewer."""
    if records is None:
        return split
    require_count("records", records, "it is the number of records to use")
    return Subset(split, range(min(records, _length(split))))


def _split(
    spec: RunSpec, train: Dataset[Any], judged_on: Mapping[str, Dataset[Any]]
) -> tuple[Dataset[Any], Mapping[str, Dataset[Any]]]:
    """Training and evaluation records: the published splits, or both from the training split if there is a holdout."""
    train = _first(spec.records, train)
    if spec.holdout is None:
        return train, {split: _first(spec.records, records) for split, records in judged_on.items()}
    kept, held = holdout_indices(_length(train), spec.holdout)
    return Subset(train, kept.tolist()), {HOLDOUT: Subset(train, held.tolist())}


def _lengths(records: Dataset[Any]) -> NDArray[np.int64]:
    """The number of tokens of each record, also of a subset."""
    if isinstance(records, Subset):
        return _lengths(records.dataset)[np.asarray(records.indices)]
    assert isinstance(records, data.TokenDataset)
    return records.lengths


def _by_length(records: Dataset[Any]) -> Dataset[Any]:
    """The same records sorted by length, so that batches need little padding."""
    return Subset(records, np.argsort(_lengths(records), kind="stable").tolist())


def _length(records: Dataset[Any]) -> int:
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
