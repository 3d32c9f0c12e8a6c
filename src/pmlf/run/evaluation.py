"""Test scores of a model: accuracy with its 95 % interval, accuracy by class, F1. The noise does not protect them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from scipy.stats import binomtest
from torch import Tensor, nn
from torch.utils.data import DataLoader

from pmlf.basics.batches import to_device
from pmlf.mechanism.sampling import population


@dataclass(frozen=True, kw_only=True)
class Score:
    """Scores as fractions.

    Attributes:
        records: the number of records.
        accuracy: the fraction of records that the model classifies correctly.
        interval: Wilson's 95 % interval of the accuracy.
        per_class: the accuracy by true class; None for a class without records.
        f1: the F1 score of class 1, if asked for.
    """

    records: int
    accuracy: float
    interval: tuple[float, float]
    per_class: tuple[float | None, ...]
    f1: float | None = None

    def to_json(self) -> dict[str, Any]:
        """The score as a document for JSON."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    @staticmethod
    def from_json(document: Mapping[str, Any]) -> Score:
        """The score of a document that `to_json` made."""
        low, high = document["interval"]
        return Score(**{**document, "interval": (low, high), "per_class": tuple(document["per_class"])})


def score(confusion: Tensor, *, with_f1: bool = False) -> Score:
    """The score of a confusion matrix.

    Args:
        confusion: counts; rows are true classes, columns are predictions.
        with_f1: compute F1, which needs two classes.

    Returns:
        The score.

    Raises:
        ValueError: F1 is asked for and there are not two classes.

    >>> score(torch.tensor([[3, 1], [0, 4]])).per_class
    (0.75, 1.0)
    """
    records, correct = int(confusion.sum()), int(confusion.trace())
    found, there = confusion.diagonal().tolist(), confusion.sum(1).tolist()
    return Score(
        records=records,
        accuracy=correct / records,
        interval=wilson(correct, records),
        per_class=tuple(right / count if count else None for right, count in zip(found, there, strict=True)),
        f1=_f1(confusion) if with_f1 else None,
    )


def wilson(successes: int, trials: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a proportion.

    Args:
        successes: a count from 0 to `trials`.
        trials: at least 1.

    Returns:
        The lower and the upper end.

    >>> [round(end, 4) for end in wilson(90, 100)]
    [0.8256, 0.9448]
    """
    interval = binomtest(successes, trials).proportion_ci(confidence_level=0.95, method="wilson")
    return float(interval.low), float(interval.high)


def _f1(confusion: Tensor) -> float:
    """2 tp / (2 tp + fp + fn) of class 1; 0 without records and predictions of class 1."""
    if confusion.shape != (2, 2):
        raise ValueError(f"F1 needs two classes, and there are {len(confusion)}: use the accuracy")
    (_, false_positive), (false_negative, true_positive) = confusion.tolist()
    total = 2 * true_positive + false_positive + false_negative
    return 2 * true_positive / total if total else 0.0


def confusion_matrix(
    model: nn.Module,
    dataset: Any,
    *,
    logits: Callable[[nn.Module, Any], Tensor],
    labels: Callable[[Any], Tensor],
    batch_size: int = 500,
    collate_fn: Callable[[list[Any]], Any] | None = None,
) -> Tensor:
    """Count predictions by true class, in eval mode and without gradients. The model's mode is restored.

    Args:
        model: a classifier.
        dataset: a map-style dataset.
        logits: computes the logits, of shape (batch, classes), from the model and a batch.
        labels: the true classes of a batch.
        batch_size: records per forward pass.
        collate_fn: as in `torch.utils.data.DataLoader`.

    Returns:
        A matrix of counts: rows are true classes, columns are predictions.

    Raises:
        ValueError: a label is not one of the model's classes.
    """
    population(dataset)
    device = next(model.parameters()).device
    was_training = model.training
    counts: Tensor | int = 0
    model.eval()
    try:
        loader = DataLoader(dataset, batch_size=batch_size, collate_fn=collate_fn, generator=torch.Generator())
        with torch.inference_mode():
            for batch in loader:
                moved = to_device(batch, device)
                outputs, truth = logits(model, moved), labels(moved)
                classes = outputs.shape[-1]
                if int(truth.min()) < 0 or int(truth.max()) >= classes:
                    raise ValueError(f"the model has classes 0 to {classes - 1}, and a label is outside")
                counts = counts + torch.bincount(truth * classes + outputs.argmax(-1), minlength=classes * classes)
    finally:
        model.train(was_training)
    assert isinstance(counts, Tensor)
    classes = math.isqrt(len(counts))
    return counts.view(classes, classes).cpu()
