"""Labels and targets as numbers, by what was declared: classes and ranges never come from private records unasked."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pmlf.basics.arguments import is_number

FROM_LABELS = "from-labels"


@dataclass(frozen=True, kw_only=True, eq=False)
class Declared:
    """What the outputs of a probe mean.

    Attributes:
        classes: The classes in the order of the outputs; None for regression.
        outputs: The number of outputs, K.
        several: Whether a record has a column for every class (multi-label) or target.
        target_range: The smallest and the largest target of a regression.
    """

    classes: NDArray[Any] | None
    outputs: int
    several: bool
    target_range: tuple[float, float]

    def encoded(self, labels: NDArray[Any]) -> Tensor:
        """Class indices (n,), or numbers (n, K).

        Raises:
            ValueError: A label is not declared. The message does not show it, because it is private.
        """
        if self.classes is None:
            low, high = self.target_range
            numbers = np.asarray(labels, dtype=np.float64).reshape(len(labels), self.outputs)
            scaled = (np.clip(numbers, low, high) - low) * (2 / (high - low)) - 1
            return torch.from_numpy(scaled.astype(np.float32))
        if self.several:
            if not np.isin(labels, (0, 1)).all():
                raise ValueError("y has a value that is neither 0 nor 1: give one column of 0 and 1 per class")
            return torch.from_numpy(np.asarray(labels, dtype=np.float32))
        places = {label: place for place, label in enumerate(self.classes.tolist())}
        found = [places.get(label, -1) for label in labels.tolist()]
        if -1 in found:
            raise ValueError(
                f"y has a label that is not one of the {len(places)} declared classes: declare all possible classes"
            )
        indices = torch.tensor(found)
        return indices if self.outputs > 1 else indices.float()[:, None]

    def decoded(self, scores: Tensor) -> NDArray[Any]:
        """Predicted labels or targets of scores (n, K)."""
        if self.classes is None:
            low, high = self.target_range
            numbers = (np.clip(scores.numpy().astype(np.float64), -1, 1) + 1) * ((high - low) / 2) + low
            return numbers if self.several else numbers[:, 0]
        if self.several:
            return (scores > 0).numpy().astype(np.int64)
        places = scores.argmax(dim=1) if self.outputs > 1 else (scores[:, 0] > 0).long()
        return np.asarray(self.classes[places.numpy()])


def declared(head: str, classes: Any, target_range: Any, labels: NDArray[Any]) -> Declared:
    """What the outputs mean, from the arguments. Of the labels only the shape is used, unless classes="from-labels".

    Raises:
        ValueError: Classes or range are missing, superfluous, or do not fit the shape.
    """
    if head == "least-squares":
        return _regression(classes, target_range, labels)
    if target_range is not None:
        raise ValueError(f"target_range={target_range!r} is for head='least-squares': leave it out, or give that head")
    several = labels.ndim == 2
    if several and head != "sigmoid":
        raise ValueError("y has several columns: give head='sigmoid' for several labels per record, or one column")
    found = _classes(classes, labels, several)
    if several and len(found) != labels.shape[1]:
        raise ValueError(
            f"y has {labels.shape[1]} columns and there are {len(found)} classes: give one column per class"
        )
    if not several and head == "sigmoid" and len(found) != 2:
        raise ValueError(f"head='sigmoid' with one label per record needs 2 classes, not {len(found)}: give 'softmax'")
    outputs = len(found) if several or head == "softmax" else 1
    return Declared(classes=found, outputs=outputs, several=several, target_range=(0.0, 1.0))


def _classes(classes: Any, labels: NDArray[Any], several: bool) -> NDArray[Any]:
    if classes is None:
        raise ValueError(
            "classes=None: declare all possible classes, such as classes=(0, 1, 2), because a class of a single record "
            f"would reveal it; if the set of labels is public, give classes={FROM_LABELS!r}"
        )
    if isinstance(classes, str) and classes == FROM_LABELS:
        found = np.arange(labels.shape[1]) if several else np.unique(labels)
    elif isinstance(classes, (int, np.integer)) and not isinstance(classes, bool):
        found = np.arange(int(classes))
    elif isinstance(classes, (Sequence, np.ndarray)) and not isinstance(classes, str):
        found = np.unique(np.asarray(classes))
        if len(found) != len(classes):
            raise ValueError(f"classes={classes!r} repeats a class: give every class once")
    else:
        raise ValueError(f"classes={classes!r} is not a list of classes: give one, or the number of classes")
    if len(found) < (1 if several else 2):
        raise ValueError("a classifier needs at least 2 classes, and there is 1 class: declare all of them in classes")
    return found


def _regression(classes: Any, target_range: Any, labels: NDArray[Any]) -> Declared:
    if classes is not None:
        raise ValueError(f"classes={classes!r} is for a classifier: leave it out with head='least-squares'")
    if target_range is None:
        raise ValueError(
            "target_range=None: declare the smallest and the largest possible target, such as target_range=(0, 100), "
            "because the range of the private targets would reveal a record"
        )
    low, high = target_range
    if not (is_number(low) and is_number(high) and -math.inf < low < high < math.inf):
        raise ValueError(f"target_range={target_range!r} is not a range: give (smallest, largest)")
    several = labels.ndim == 2
    return Declared(
        classes=None,
        outputs=labels.shape[1] if several else 1,
        several=several,
        target_range=(float(low), float(high)),
    )
