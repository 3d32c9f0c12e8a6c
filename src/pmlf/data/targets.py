"""What a model predicts: one class, several labels, a number, or the next token. All of it is declared, not collected.

A class that only one record has would show in the shape of the model, and a range that is computed from the records
would be a release that the accountant does not see.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

_WORDS = {"true": 1.0, "false": 0.0}
SEPARATOR = "|"  # between the labels of one record
IGNORED = -100  # a label that counts for nothing, as everywhere in transformers
GIVE_LABELS = "give all possible `labels`, or remove the rows without one"


@dataclass(frozen=True, kw_only=True)
class Classes:
    """One of several classes, by softmax and cross-entropy.

    Args:
        names: The names of the classes, in the order of the model's outputs.
        written: How the records write them, in the same order, if not by their names.

    >>> Classes(names=("cat", "dog")).encode(["dog", "cat"], "pets.csv").tolist()
    [1, 0]
    """

    task: ClassVar[str] = "classification"
    names: tuple[str, ...]
    written: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        _check_names(self.names)

    @property
    def width(self) -> int:
        """The number of the model's outputs."""
        return len(self.names)

    def encode(self, values: Sequence[object], source: str, advice: str = GIVE_LABELS) -> NDArray[np.int64]:
        """The index of each value's class, of shape (N,). Errors name `source` and give `advice`, never a value.

        Raises:
            ValueError: If a value is not a declared class.
        """
        classes = {text: index for index, text in enumerate(self.written or self.names)}
        found = [place_of(value, classes, -1) for value in values]
        if -1 in found:
            raise ValueError(f"{source!r} has a label that is not one of {', '.join(classes)}: {advice}")
        return np.array(found, dtype=np.int64)

    def losses(self, outputs: Tensor, truth: Tensor) -> Tensor:
        """The cross-entropy of each sample."""
        return F.cross_entropy(outputs, truth, reduction="none")

    def activated(self, outputs: Tensor) -> Tensor:
        """Probabilities (N, classes) of the outputs (N, classes)."""
        return outputs.softmax(-1)

    def rows(self, activated: Tensor) -> list[dict[str, Any]]:
        """Each sample's class, the probability of it, and the probability of every class."""
        probabilities = activated.tolist()
        return [
            {
                "prediction": self.names[best],
                "probability": row[best],
                **{f"p({name})": value for name, value in zip(self.names, row, strict=True)},
            }
            for best, row in zip(activated.argmax(-1).tolist(), probabilities, strict=True)
        ]


@dataclass(frozen=True, kw_only=True)
class LabelSet:
    """Any number of labels at once, by a sigmoid and a binary cross-entropy for each.

    A record writes its labels in one cell, as in `cough|fever`, or as a list. A label is predicted above 0.5.

    >>> LabelSet(names=("cough", "fever")).encode(["fever", "", "fever|cough"], "notes.csv").tolist()
    [[0.0, 1.0], [0.0, 0.0], [1.0, 1.0]]
    """

    task: ClassVar[str] = "multilabel"
    names: tuple[str, ...]

    def __post_init__(self) -> None:
        _check_names(self.names)

    @property
    def width(self) -> int:
        """The number of the model's outputs."""
        return len(self.names)

    def encode(self, values: Sequence[object], source: str, advice: str = GIVE_LABELS) -> NDArray[np.float32]:
        """1 for each label that a record has and 0 for the others, of shape (N, labels).

        Raises:
            ValueError: If a record has a label that is not declared.
        """
        places = {name: index for index, name in enumerate(self.names)}
        encoded = np.zeros((len(values), len(places)), dtype=np.float32)
        for row, value in zip(encoded, values, strict=True):
            listed = value if isinstance(value, (list, tuple)) else as_text(value).split(SEPARATOR)
            for name in (as_text(each).strip() for each in listed):
                if name and name not in places:
                    raise ValueError(
                        f"{source!r} has a label that is not one of {', '.join(places)}: {advice}; several labels of a "
                        f"record are separated by {SEPARATOR!r}"
                    )
                if name:
                    row[places[name]] = 1.0
        return encoded

    def losses(self, outputs: Tensor, truth: Tensor) -> Tensor:
        """The mean of each sample's binary cross-entropies."""
        return F.binary_cross_entropy_with_logits(outputs, truth, reduction="none").mean(-1)

    def activated(self, outputs: Tensor) -> Tensor:
        """Probabilities (N, labels) of the outputs (N, labels)."""
        return outputs.sigmoid()

    def rows(self, activated: Tensor) -> list[dict[str, Any]]:
        """Each sample's labels and the probability of every label."""
        return [
            {
                "prediction": SEPARATOR.join(name for name, value in zip(self.names, row, strict=True) if value > 0.5),
                **{f"p({name})": value for name, value in zip(self.names, row, strict=True)},
            }
            for row in activated.tolist()
        ]


@dataclass(frozen=True, kw_only=True)
class ValueRange:
    """A number in a declared range, by a squared error. The range is scaled to -1 to 1, and values are clamped to it.

    >>> ValueRange(low=0.0, high=10.0).encode([5, 0, 12], "rents.csv").tolist()
    [0.0, -1.0, 1.0]
    """

    task: ClassVar[str] = "regression"
    low: float
    high: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.low) and math.isfinite(self.high) and self.low < self.high):
            raise ValueError(
                f"target_range=({self.low}, {self.high}) is not a range: give the lowest and the highest value"
            )

    @property
    def width(self) -> int:
        """The number of the model's outputs."""
        return 1

    @property
    def _half(self) -> float:
        return (self.high - self.low) / 2

    def encode(self, values: Sequence[object], source: str, advice: str = GIVE_LABELS) -> NDArray[np.float32]:
        """(value - middle) / half the range, clamped to -1 to 1, of shape (N,).

        Raises:
            ValueError: If a value is missing or not a number.
        """
        numbers = np.array([as_number(value) for value in values], dtype=np.float64)
        if np.isnan(numbers).any():
            raise ValueError(f"{source!r} has a target that is not a number: remove its row, or correct it")
        middle = (self.low + self.high) / 2
        return ((numbers.clip(self.low, self.high) - middle) / self._half).astype(np.float32)

    def losses(self, outputs: Tensor, truth: Tensor) -> Tensor:
        """The squared error of each sample, in the scaled range."""
        return (outputs.squeeze(-1) - truth) ** 2

    def activated(self, outputs: Tensor) -> Tensor:
        """Predictions (N, 1) in the declared range."""
        return self.low + (outputs.clamp(-1.0, 1.0) + 1.0) * self._half

    def rows(self, activated: Tensor) -> list[dict[str, Any]]:
        """The prediction for each sample."""
        return [{"prediction": value} for (value,) in activated.tolist()]


@dataclass(frozen=True, kw_only=True)
class NextToken:
    """The next token of a text, by a softmax over the vocabulary: one loss per text, the mean over its tokens.

    >>> import torch
    >>> logits, tokens = torch.zeros(1, 3, 5), torch.tensor([[4, 2, 0]])
    >>> NextToken().losses(logits, tokens).exp()
    tensor([5.])
    """

    task: ClassVar[str] = "causal-lm"

    def losses(self, outputs: Tensor, truth: Tensor) -> Tensor:
        """The mean cross-entropy of each text's tokens, each predicted from those before it.

        Args:
            outputs: Logits of shape (N, L, vocabulary).
            truth: The tokens, of shape (N, L), -100 for padding.
        """
        return mean_over_tokens(outputs[:, :-1], truth[:, 1:])


def mean_over_tokens(logits: Tensor, labels: Tensor, smoothing: float = 0.0) -> Tensor:
    """Mean cross-entropy (N,) over the labelled tokens of each sequence; zero for a sequence without any."""
    losses = token_losses(logits, labels, smoothing)
    return losses.sum(1) / labels.ne(IGNORED).sum(1).clamp(min=1)


def token_losses(logits: Tensor, labels: Tensor, smoothing: float = 0.0) -> Tensor:
    """Cross-entropy (N, L) of each token; zero where the label is ignored."""
    return F.cross_entropy(logits.mT, labels, reduction="none", ignore_index=IGNORED, label_smoothing=smoothing)


Target = Classes | LabelSet | ValueRange  # of records with labels
AnyTarget = Target | NextToken
_KINDS: dict[str, type[Classes] | type[LabelSet] | type[ValueRange] | type[NextToken]] = {
    kind.task: kind for kind in (Classes, LabelSet, ValueRange, NextToken)
}
TASKS = tuple(_KINDS)


def target_to_json(target: AnyTarget) -> dict[str, Any]:
    """The target as a document for JSON."""
    return {"task": target.task, **{name: value for name, value in asdict(target).items() if value is not None}}


def target_from_json(document: Mapping[str, Any]) -> AnyTarget:
    """The target that `target_to_json` wrote.

    >>> target_from_json(target_to_json(LabelSet(names=("a", "b")))) == LabelSet(names=("a", "b"))
    True
    """
    values: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in document.items()
    }
    return _KINDS[values.pop("task")](**values)


def as_text(value: object) -> str:
    """A cell as text: nothing for a missing one, and no decimal point for a whole number.

    >>> as_text(None), as_text(2.0), as_text(True), as_text("2.0")
    ('', '2', 'True', '2.0')
    """
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def place_of(value: object, places: Mapping[str, int], otherwise: int) -> int:
    """The place of a cell among declared names. The text "2.0" is also found as "2".

    >>> [place_of(cell, {"1": 0, "2": 1}, -1) for cell in (2, 2.0, "2", "2.0", "02", None)]
    [1, 1, 1, 1, -1, -1]
    """
    text = as_text(value)
    whole, _, zero = text.partition(".")
    return places.get(text, places.get(whole, otherwise) if zero and not zero.strip("0") else otherwise)


def as_number(value: object) -> float:
    """A cell as a number, 1 and 0 for the words true and false; NaN if it is missing or not a finite number.

    >>> as_number("2.5"), as_number("True"), as_number(False), as_number("many")
    (2.5, 1.0, 0.0, nan)
    """
    if isinstance(value, str) and value.lower() in _WORDS:
        return _WORDS[value.lower()]
    try:
        number = float(value)  # type: ignore[arg-type]  # what it refuses is not a number
    except (TypeError, ValueError):
        return math.nan
    return number if math.isfinite(number) else math.nan


def _check_names(names: Sequence[str]) -> None:
    if len(names) < 2 or len(set(names)) < len(names) or "" in names:
        raise ValueError(f"labels={' '.join(names)!r} is not a list of two or more different names: give each once")
