"""Products of all shaped records with a matrix, in one pass over the stored features."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pmlf.probe.rows import FeatureRows
from pmlf.probe.shaping import NEAREST, SHORTEST, BlockShape, inverse_norms

_HELD = 8  # blocks whose sum is kept in float32 before it is added in float64


class ShapedRows:
    """Rows as unit vectors w, without storing them: w_i = h_i (t * x_i / |x_i|) - h_i (t * m) for every block.

    The factors h_i / |x_i| and h_i of every record and block are computed once, so the product of all records with a
    matrix is one product with the stored features and a correction by the mean.

    Args:
        rows: The features.
        shapes: The shape of every block.
        intercept: The share of a constant in every record's squared norm, from 0 to below 1.
    """

    def __init__(self, rows: FeatureRows, shapes: Sequence[BlockShape], *, intercept: float) -> None:
        self.rows, self.shapes, self.intercept = rows, tuple(shapes), intercept
        share, total = 1.0 - intercept, sum(shape.weight for shape in shapes)
        self._row_factors = torch.zeros(len(self.shapes), rows.records)
        self._mean_factors = torch.zeros(len(self.shapes), rows.records)
        squares = torch.full((rows.records,), intercept).masked_fill_(rows.excluded, 0.0)
        for place, shape in enumerate(self.shapes):
            squares += self._measure(place, shape, math.sqrt(share * shape.weight / total))
        self.norms = squares.sqrt_()  # at most 1, up to rounding

    def _measure(self, place: int, shape: BlockShape, length: float) -> Tensor:
        """Compute the factors of one block; the block's squared norm in every record."""
        mean, scale = shape.mean.float(), shape.scale.float()
        nearest = max(NEAREST * float((scale * mean).norm()), SHORTEST * float(scale.min()))
        squares = torch.zeros(self.rows.records)
        for places, part in self.rows.blocks(columns=shape.block.columns):
            excluded = self.rows.excluded[places]
            inverse = inverse_norms(part, excluded)
            norms = torch.linalg.vector_norm(part.mul(inverse[:, None]).sub_(mean).mul_(scale), dim=1)
            factors = (length / norms.clamp(min=nearest)).masked_fill_(excluded, 0.0)
            self._row_factors[place, places] = factors * inverse
            self._mean_factors[place, places] = factors
            squares[places] = (factors * norms).square_()
        return squares

    @property
    def width(self) -> int:
        """The number of coordinates of a record: its features, and the constant if there is one."""
        return self.rows.width + (self.intercept > 0)

    def products(self, weights: Tensor, chosen: NDArray[np.int64] | None = None) -> Products:
        """Blocks of rows with their scores w_i . weights, and the sum of w_i (x) r_i for residuals given back."""
        return Products(self, weights, chosen)

    def prepared(self, weights: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """For every block t * weights, and its product with the mean."""
        scaled = [shape.scale[:, None] * weights[shape.block.columns].double() for shape in self.shapes]
        means = [shape.mean.double() @ part for shape, part in zip(self.shapes, scaled, strict=True)]
        return [part.float() for part in scaled], [part.float() for part in means]

    def factors(self, place: int, places: slice | NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        """The factors of the rows and of the mean, for some records in one block."""
        return self._row_factors[place, places, None], self._mean_factors[place, places, None]


class Products:
    """The two products of a step with the shaped rows, in one pass over the features.

    Iterating yields (places, scores); `add` takes the residuals of the block that was yielded last.
    """

    def __init__(self, shaped: ShapedRows, weights: Tensor, chosen: NDArray[np.int64] | None) -> None:
        self._shaped, self._chosen = shaped, chosen
        self._scaled, self._means = shaped.prepared(weights)
        self._constant = math.sqrt(shaped.intercept)
        self._bias = weights[shaped.rows.width :].float().sum(dim=0) * self._constant
        outputs = weights.shape[1]
        self._sum = torch.zeros(shaped.rows.width, outputs, dtype=torch.float64)
        self._near = torch.zeros(shaped.rows.width, outputs)  # the sum of the last few blocks, in float32
        self._held = 0
        self._mean_sums = torch.zeros(len(shaped.shapes), outputs, dtype=torch.float64)
        self._bias_sum = torch.zeros(outputs, dtype=torch.float64)
        self._places: slice | NDArray[np.int64] = slice(0, 0)
        self._part = torch.empty(0)

    def __iter__(self) -> Iterator[tuple[slice | NDArray[np.int64], Tensor]]:
        for places, part in self._shaped.rows.blocks(self._chosen):
            self._places, self._part = places, part
            scores = self._bias.expand(len(self._part), -1).clone()
            for place, shape in enumerate(self._shaped.shapes):
                of_row, of_mean = self._shaped.factors(place, self._places)
                scores += of_row * (self._part[:, shape.block.columns] @ self._scaled[place])
                scores -= of_mean * self._means[place]
            yield self._places, scores

    def add(self, residuals: Tensor) -> None:
        """Add sum_i w_i (x) r_i over the block of rows that was yielded last."""
        for place, shape in enumerate(self._shaped.shapes):
            of_row, of_mean = self._shaped.factors(place, self._places)
            columns = shape.block.columns
            self._near[columns].addmm_(self._part[:, columns].T, of_row * residuals)
            self._mean_sums[place] += (of_mean * residuals).sum(dim=0, dtype=torch.float64)
        alive = ~self._shaped.rows.excluded[self._places]
        self._bias_sum += (residuals * alive[:, None]).sum(dim=0, dtype=torch.float64) * self._constant
        self._held += 1
        if self._held == _HELD:
            self._collect()

    def _collect(self) -> None:
        self._sum += self._near
        self._near.zero_()
        self._held = 0

    def total(self) -> Tensor:
        """sum_i w_i (x) r_i over everything that was added, in float64."""
        self._collect()
        for place, shape in enumerate(self._shaped.shapes):
            part = self._sum[shape.block.columns]
            part -= shape.mean.double()[:, None] * self._mean_sums[place]
            part *= shape.scale.double()[:, None]
        if self._shaped.intercept == 0:
            return self._sum
        return torch.cat([self._sum, self._bias_sum[None]])
