"""Marks name the owner of every row: two samples are never taken for each other."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch
from torch import Tensor

from pmlf.engine.layers import UnsupportedModel
from pmlf.engine.marks import all_marks
from pmlf.engine.operations.layouts import laid_out, picked
from pmlf.engine.questions import Questions
from pmlf.engine.recording import refuse_rows_of_others


def scaled_by(row_samples: Tensor, grad: Tensor, marks: list[Tensor]) -> list[Tensor]:
    """What further backward passes give where rows belong to these samples."""
    return [grad * own[row_samples].unsqueeze(1) for own in marks]


@pytest.mark.parametrize("samples", [2, 7, 16, 17, 40])
def test_any_two_samples_whose_rows_are_exchanged_are_seen(samples: int) -> None:
    grad, marks = torch.randn(samples, 3), all_marks(torch.zeros(samples))
    grad[0] *= 100.0  # beside it the rows of others are short, and with small marks shorter
    assert len({tuple(float(own[sample]) for own in marks) for sample in range(samples)}) == samples
    for one, other in combinations(range(samples), 2):
        row_samples = torch.arange(samples)
        row_samples[[one, other]] = row_samples[[other, one]]
        marked = scaled_by(row_samples, grad, marks)
        assert laid_out(grad, marked, marks) is None
        found = picked(grad, marked, samples)
        assert (
            found is not None and found.row_samples is not None and found.row_samples.tolist() == row_samples.tolist()
        )
        questions = Questions()
        with pytest.raises(UnsupportedModel, match="are not the samples' own"):
            for own, scaled in zip(marks, marked, strict=True):
                refuse_rows_of_others("a layer", grad, scaled, own, questions)
            questions.answer()


@pytest.mark.parametrize("samples", [2, 7, 40])
def test_rows_in_order_fit_and_rows_that_do_not_come_from_the_loss_do_not(samples: int) -> None:
    grad, marks = torch.randn(samples, 3), all_marks(torch.zeros(samples))
    found = laid_out(grad, scaled_by(torch.arange(samples), grad, marks), marks)
    assert found is not None and (found.axis, found.order) == (0, "major")
    assert laid_out(grad, [grad for _ in marks], marks) is None
    assert picked(grad, [grad for _ in marks], samples) is None


def test_a_row_of_two_samples_is_nobody_s() -> None:
    grad, marks = torch.randn(7, 3), all_marks(torch.zeros(7))
    marked = scaled_by(torch.arange(7), grad, marks)
    marked[0][6] = 0.5 * (marks[0][5] + marks[0][6]) * grad[6]
    assert laid_out(grad, marked, marks) is None
    assert picked(grad, marked, 7) is None
