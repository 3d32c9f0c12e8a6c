"""Test scores of a model: accuracy with its 95 % interval, accuracy by class, F1; errors of numbers; perplexity.

The noise does not protect them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import torch
from scipy.stats import binomtest
from torch import Tensor, nn
from torch.utils.data import DataLoader

from pmlf.basics.arguments import require_count
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
        f1: the F1 score of class 1, if asked for; of several labels, the mean of their F1 scores.
        metric: what the accuracy counts: records, or the labels of records.
    """

    records: int
    accuracy: float
    interval: tuple[float, float]
    per_class: tuple[float | None, ...]
    f1: float | None = None
    metric: str = "accuracy"

    def to_json(self) -> dict[str, Any]:
        """The score as a document for JSON."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    @staticmethod
    def from_json(document: Mapping[str, Any]) -> Score:
        """The score of a document that `to_json` made."""
        low, high = document["interval"]
        return Score(**{**document, "interval": (low, high), "per_class": tuple(document["per_class"])})

    def numbers(self) -> dict[str, float]:
        """The accuracy, the ends of its interval, and F1 if there is one, by name."""
        low, high = self.interval
        found = {"accuracy": self.accuracy, "accuracy_low": low, "accuracy_high": high}
        return found if self.f1 is None else {**found, "f1": self.f1}

    def brief(self) -> str:
        """The accuracy."""
        return f"{100 * self.accuracy:.1f} %"

    def in_words(self) -> str:
        """The accuracy with its interval, and F1 if there is one."""
        low, high = self.interval
        words = f"{100 * self.accuracy:.1f} % (95 % interval {100 * low:.1f} to {100 * high:.1f} %)"
        return words if self.f1 is None else f"{words}, F1 {100 * self.f1:.1f} %"


@dataclass(frozen=True, kw_only=True)
class ValueScore:
    """Scores of predicted numbers, in the units of the target.

    Attributes:
        records: the number of records.
        r2: 1 - squared errors / squared deviations from the mean: the part of the variance that is explained.
        mean_absolute_error: the mean of |prediction - value|.
        interval: its 95 % interval, by the normal approximation.
        root_mean_squared_error: the root of the mean squared error.
    """

    metric: ClassVar[str] = "R2"
    records: int
    r2: float
    mean_absolute_error: float
    interval: tuple[float, float]
    root_mean_squared_error: float

    @property
    def accuracy(self) -> float:
        """R2, the counterpart of the accuracy: 1 is perfect, 0 is as good as the mean."""
        return self.r2

    def to_json(self) -> dict[str, Any]:
        """The score as a document for JSON."""
        return asdict(self)

    @staticmethod
    def from_json(document: Mapping[str, Any]) -> ValueScore:
        """The score of a document that `to_json` made."""
        low, high = document["interval"]
        return ValueScore(**{**document, "interval": (low, high)})

    def numbers(self) -> dict[str, float]:
        """R2 and the errors by name."""
        names = ("r2", "mean_absolute_error", "root_mean_squared_error")
        return {name: getattr(self, name) for name in names}

    def brief(self) -> str:
        """R2 as a percentage."""
        return f"{100 * self.r2:.1f} %"

    def in_words(self) -> str:
        """R2, and the mean absolute error with its interval."""
        low, high = self.interval
        error = f"mean absolute error {self.mean_absolute_error:.4g} (95 % interval {low:.4g} to {high:.4g})"
        return f"{self.r2:.3f}, {error}"


@dataclass(frozen=True, kw_only=True)
class LanguageScore:
    """Scores of a language model.

    Attributes:
        records: the number of texts.
        tokens: the number of tokens that were predicted.
        perplexity: exp(mean cross-entropy of a token).
        interval: its 95 % interval over texts, by the normal approximation of a ratio of means.
    """

    metric: ClassVar[str] = "perplexity"
    records: int
    tokens: int
    perplexity: float
    interval: tuple[float, float]

    @property
    def accuracy(self) -> float:
        """1 / perplexity, the counterpart of the accuracy: the geometric mean of the next tokens' probabilities."""
        return 1 / self.perplexity

    def to_json(self) -> dict[str, Any]:
        """The score as a document for JSON."""
        return asdict(self)

    @staticmethod
    def from_json(document: Mapping[str, Any]) -> LanguageScore:
        """The score of a document that `to_json` made."""
        low, high = document["interval"]
        return LanguageScore(**{**document, "interval": (low, high)})

    def numbers(self) -> dict[str, float]:
        """The perplexity and the ends of its interval by name."""
        low, high = self.interval
        return {"perplexity": self.perplexity, "perplexity_low": low, "perplexity_high": high}

    def brief(self) -> str:
        """The perplexity."""
        return f"{self.perplexity:.4g}"

    def in_words(self) -> str:
        """The perplexity with its interval."""
        low, high = self.interval
        return f"{self.perplexity:.4g} (95 % interval {low:.4g} to {high:.4g})"


AnyScore = Score | ValueScore | LanguageScore


def score_from_json(document: Mapping[str, Any]) -> AnyScore:
    """The score of a document that the `to_json` of any kind made."""
    if "perplexity" in document:
        return LanguageScore.from_json(document)
    return ValueScore.from_json(document) if "r2" in document else Score.from_json(document)


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


def score_of_labels(predicted: Tensor, truth: Tensor) -> Score:
    """The score of several labels per record.

    Args:
        predicted: whether each label is predicted, of shape (N, labels).
        truth: whether a record has it, of the same shape.

    Returns:
        The part of all labels that is right with its interval over records, the same by label, and the mean F1.

    >>> truth = torch.tensor([[True, False], [False, False]])
    >>> score_of_labels(torch.tensor([[True, True], [False, False]]), truth).accuracy
    0.75
    """
    right = (predicted == truth).double()
    both, either = (predicted & truth).sum(0), predicted.sum(0) + truth.sum(0)
    mean, (low, high) = _mean_with_interval(right.mean(1))
    return Score(
        records=len(truth),
        accuracy=mean,
        interval=(max(low, 0.0), min(high, 1.0)),
        per_class=tuple(right.mean(0).tolist()),
        f1=float((2 * both / either.clamp(min=1)).mean()),
        metric="label accuracy",
    )


def score_of_values(predicted: Tensor, truth: Tensor) -> ValueScore:
    """The score of predicted numbers, both of shape (N,).

    >>> score_of_values(torch.tensor([1.0, 2.0, 4.0]), torch.tensor([1.0, 2.0, 3.0])).r2
    0.5
    """
    errors, values = (predicted.double() - truth.double()), truth.double()
    squared, variance = float((errors**2).mean()), float(((values - values.mean()) ** 2).mean())
    mean, interval = _mean_with_interval(errors.abs())
    return ValueScore(
        records=len(values),
        r2=1 - squared / variance if variance > 0 else 0.0,
        mean_absolute_error=mean,
        interval=interval,
        root_mean_squared_error=math.sqrt(squared),
    )


def score_of_texts(losses: Tensor, tokens: Tensor) -> LanguageScore:
    """The score of a language model.

    Args:
        losses: the summed cross-entropy of each text's tokens, of shape (N,).
        tokens: the number of tokens that were predicted in each text, of shape (N,).

    Raises:
        ValueError: no text has a token to predict.

    >>> score_of_texts(torch.tensor([0.0, 4.0]), torch.tensor([2, 2])).perplexity == math.e
    True
    """
    losses, tokens = losses.double(), tokens.double()
    count = float(tokens.sum())
    if count == 0:
        raise ValueError("no text has two tokens, so there is nothing to predict: give longer texts")
    mean = float(losses.sum()) / count
    deviations = losses - mean * tokens  # of a ratio of two sums over texts
    half = 1.96 * float(deviations.std()) * math.sqrt(len(losses)) / count if len(losses) > 1 else math.inf
    return LanguageScore(
        records=len(losses),
        tokens=int(count),
        perplexity=_exp(mean),
        interval=(_exp(mean - half), _exp(mean + half)),
    )


def _exp(value: float) -> float:
    return math.exp(value) if value < 700 else math.inf


def _mean_with_interval(values: Tensor) -> tuple[float, tuple[float, float]]:
    """The mean of independent values and its 95 % interval, by the normal approximation."""
    mean = float(values.mean())
    half = 1.96 * float(values.std()) / math.sqrt(len(values)) if len(values) > 1 else math.inf
    return mean, (mean - half, mean + half)


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


def evaluate(
    model: nn.Module,
    dataset: Any,
    *,
    logits: Callable[[nn.Module, Any], Tensor] = lambda model, batch: model(batch[0]),
    labels: Callable[[Any], Tensor] = lambda batch: batch[1],
    batch_size: int = 500,
    collate_fn: Callable[[list[Any]], Any] | None = None,
) -> float:
    """Accuracy on held-out records. These records are not protected.

    The model runs in eval mode and without gradients; its mode is restored afterwards.

    Args:
        model: A classifier.
        dataset: A map-style dataset.
        logits: A function of (model, batch) that returns one row of scores per sample.
        labels: A function of a batch that returns the true classes.
        batch_size: The number of records to look at together.
        collate_fn: Makes a batch of a list of records; None for torch's default.

    Returns:
        The fraction of records that are classified correctly.

    Raises:
        ValueError: The dataset is empty or cannot be indexed, or a label is not one of the model's classes.

    >>> from torch.utils.data import TensorDataset
    >>> evaluate(nn.Linear(3, 2), TensorDataset(torch.zeros(4, 3), torch.tensor([0, 1, 0, 1])))
    0.5
    """
    require_count("batch_size", batch_size, "it is the number of records looked at together")
    confusion = confusion_matrix(
        model, dataset, logits=logits, labels=labels, batch_size=batch_size, collate_fn=collate_fn
    )
    return int(confusion.trace()) / int(confusion.sum())


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
