"""Marks by which the sample of a row is known: powers of two that scale the samples' losses in further backward passes.

Scaling by a power of two rounds nothing, so a row of a gradient that belongs to one sample is scaled by exactly that
sample's mark. A pass has room for 16 marks. A sample's number is written in digits of base 16, with a pass for each, so
no two samples have the same marks in all passes. No mark is 1: what does not come from the loss does not scale with it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pmlf.engine.arithmetic import full_precision

DIGIT = 16


def all_marks(loss: Tensor) -> list[Tensor]:
    """The marks of all samples in each of the passes that tell the samples apart.

    >>> [marks.log2().neg().int().tolist() for marks in all_marks(torch.zeros(17))]  # doctest: +NORMALIZE_WHITESPACE
    [[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 1],
     [1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 2]]
    """
    numbers, found = torch.arange(len(loss), device=loss.device), list[Tensor]()
    while not found or DIGIT ** len(found) < len(loss):
        digits = (numbers // DIGIT ** len(found)) % DIGIT
        found.append((0.5 ** (1.0 + digits.double())).to(loss))
    return found


def alike(scaled: Tensor, rows: Tensor, marks: Tensor, allowed: float) -> Tensor:
    """Which rows (rows, numbers) are scaled by their marks, but for rounding: `allowed` of a row's length, and a
    millionth of the longest row's, which is left where others cancel. Rows that are not finite tell nothing.

    Marks are undone first: with them a row of a small mark would look like rounding, whoever's it is.
    """
    undone = full_precision(scaled) / marks.to(full_precision(scaled)).unsqueeze(1)
    distance, lengths = (torch.linalg.vector_norm(each, dim=1) for each in (undone - rows, rows))
    smallest = 1e-6 * torch.where(lengths.isfinite(), lengths, 0.0).max() if len(lengths) else 0.0
    return (distance <= allowed * lengths + smallest) | ~distance.isfinite()
