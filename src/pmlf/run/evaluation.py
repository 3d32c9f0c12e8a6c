"""How well a model does on records that are not protected: accuracy with its interval, class by class, F1."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from pmlf.basics.batches import to_device
from pmlf.mechanism.sampling import population

Z_95 = 1.959963984540054  # the standard normal's 97.5 % point


@dataclass(frozen=True, kw_only=True)
class Score:
    """Fractions. The interval is Wilson's, at 95 %; a class without records has no accuracy; F1 is class 1's."""

    records: int
    accuracy: float
    interval: tuple[float, float]
    per_class: tuple[float | None, ...]
    f1: float | None = None

    def to_json(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if value is not None}

    @staticmethod
    def from_json(document: Mapping[str, Any]) -> Score:
        """The score that `to_json` wrote, by way of a file."""
        low, high = document["interval"]
        return Score(**{**document, "interval": (low, high), "per_class": tuple(document["per_class"])})


def score(confusion: Tensor, *, with_f1: bool = False) -> Score:
    """The score of a confusion matrix, rows being the truth.

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

    >>> [round(end, 4) for end in wilson(90, 100)]
    [0.8256, 0.9448]
    """
    share, weight = successes / trials, Z_95**2 / trials
    centre = (share + weight / 2) / (1 + weight)
    half = Z_95 * math.sqrt(share * (1 - share) / trials + weight / (4 * trials)) / (1 + weight)
    return max(0.0, centre - half), min(1.0, centre + half)


def _f1(confusion: Tensor) -> float:
    """2 tp / (2 tp + fp + fn) of class 1; 0 where there is neither such a record nor such a prediction."""
    if confusion.shape != (2, 2):
        raise ValueError(f"F1 is for two classes and there are {len(confusion)}: ask for accuracy")
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
    """How often each class (row) was taken for each (column). Eval mode, no gradients, the model's mode restored."""
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
                    raise ValueError(f"a label is not in 0 to {classes - 1}, the classes that the model tells apart")
                counts = counts + torch.bincount(truth * classes + outputs.argmax(-1), minlength=classes * classes)
    finally:
        model.train(was_training)
    assert isinstance(counts, Tensor)
    classes = math.isqrt(len(counts))
    return counts.view(classes, classes).cpu()
