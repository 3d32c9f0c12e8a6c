"""Average pooling over a grid of cells, as one matrix."""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor


@cache
def pooling_matrix(places: int, grid: int) -> Tensor:
    """The matrix that averages a map of places x places over grid x grid cells, both flattened row by row.

    Do not change it: callers share it. Neighbouring cells share a row of places where `grid` does not divide `places`.

    >>> pooling_matrix(4, 2)[0].reshape(4, 4)[0].tolist()
    [0.25, 0.25, 0.0, 0.0]
    """
    along = torch.zeros(grid, places)
    for cell in range(grid):
        first, last = math.floor(cell * places / grid), math.ceil((cell + 1) * places / grid)
        along[cell, first:last] = 1 / (last - first)
    return torch.kron(along, along)  # (grid^2, places^2)


def mirrored_cells(pooled: Tensor, grid: int) -> Tensor:
    """The cells (..., grid^2) as they are after mirroring the image left to right."""
    return pooled.unflatten(-1, (grid, grid)).flip(-1).flatten(-2)
