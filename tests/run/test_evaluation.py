"""Scores: accuracy, its interval, accuracy by class and F1, compared with counts by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import pmlf
from pmlf.run.evaluation import confusion_matrix, score, wilson


class Echo(nn.Module):
    """Logits are the inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Parameter(torch.zeros(()))
        self.saw_training = False

    def forward(self, inputs: Tensor) -> Tensor:
        self.saw_training |= self.training or torch.is_grad_enabled()
        return inputs


def records(classes: int, count: int = 57) -> tuple[TensorDataset, list[int], list[int]]:
    generator = torch.Generator().manual_seed(classes)
    logits, labels = torch.randn(count, classes, generator=generator), torch.arange(count) % classes
    return TensorDataset(logits, labels), labels.tolist(), logits.argmax(1).tolist()


def confusion(dataset: TensorDataset, batch_size: int = 10) -> Tensor:
    return confusion_matrix(
        Echo(),
        dataset,
        logits=lambda model, batch: model(batch[0]),
        labels=lambda batch: batch[1],
        batch_size=batch_size,
    )


@pytest.mark.parametrize("batch_size", [1, 10, 100])
def test_the_confusion_matrix_counts_every_record_once(batch_size: int) -> None:
    dataset, truth, predicted = records(4)
    expected = np.zeros((4, 4), dtype=int)
    for row, column in zip(truth, predicted, strict=True):
        expected[row, column] += 1
    assert confusion(dataset, batch_size).tolist() == expected.tolist()


def test_scores_agree_with_counting() -> None:
    dataset, truth, predicted = records(2)
    found = score(confusion(dataset), with_f1=True)
    hits = [a == b for a, b in zip(truth, predicted, strict=True)]
    assert found.records == 57 and found.accuracy == sum(hits) / 57
    for label in (0, 1):
        of_class = [hit for hit, a in zip(hits, truth, strict=True) if a == label]
        assert found.per_class[label] == sum(of_class) / len(of_class)
    positive = [(a, b) for a, b in zip(truth, predicted, strict=True)]
    precision = positive.count((1, 1)) / predicted.count(1)
    recall = positive.count((1, 1)) / truth.count(1)
    assert found.f1 == pytest.approx(2 * precision * recall / (precision + recall))
    assert found.accuracy == pmlf.evaluate(Echo(), dataset)


@pytest.mark.parametrize(("successes", "trials"), [(0, 10), (10, 10), (1, 1), (431, 872), (9_700, 10_000)])
def test_the_interval_is_wilsons(successes: int, trials: int) -> None:
    """Its ends are the proportions p that the normal test of p against the observed share just accepts."""
    share, z = successes / trials, 1.959963984540054
    for end, limit in zip(wilson(successes, trials), (0.0, 1.0), strict=True):
        at_the_limit = share == limit and end == pytest.approx(limit, abs=1e-12)
        assert at_the_limit or abs(share - end) == pytest.approx(z * (end * (1 - end) / trials) ** 0.5)


def test_a_class_without_records_has_no_accuracy() -> None:
    assert score(torch.tensor([[2, 0], [0, 0]])).per_class == (1.0, None)
    assert score(torch.tensor([[2, 0], [0, 0]]), with_f1=True).f1 == 0.0


def test_f1_is_for_two_classes() -> None:
    with pytest.raises(ValueError, match="F1 needs two classes, and there are 3"):
        score(torch.eye(3), with_f1=True)


def test_a_label_that_the_model_does_not_know_is_an_error() -> None:
    with pytest.raises(ValueError, match="the model has classes 0 to 1, and a label is outside"):
        confusion(TensorDataset(torch.zeros(3, 2), torch.tensor([0, 1, 2])))


def test_evaluation_takes_no_gradients_and_restores_the_mode() -> None:
    model = Echo().train()
    pmlf.evaluate(model, records(3)[0])
    assert model.training and not model.saw_training
