"""Products of all conditioned records with a matrix, in one pass over the stored features."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pmlf.probe.conditioning import NEAREST, SHORTEST, BlockConditioning, inverse_norms
from pmlf.probe.rows import FeatureRows

_HELD = 8  # blocks whose sum is kept in float32 before it is added in float64


class ConditionedRows:
    """Rows as unit vectors w, without storing them: w_i = h_i (t * x_i / |x_i|) - h_i (t * m) for every block.

    The factors h_i / |x_i| and h_i of every record and block are computed once, so the product of all records with a
    matrix is one product with the stored features and a correction by the mean.

    Args:
        rows: The features.
        conditioning: How every block of columns is conditioned.
        intercept: The share of a constant in every record's squared norm, from 0 to below 1.
    """

    def __init__(self, rows: FeatureRows, conditioning: Sequence[BlockConditioning], *, intercept: float) -> None:
        self.rows, self.conditioning, self.intercept = rows, tuple(conditioning), intercept
        share, total = 1.0 - intercept, sum(each.weight for each in conditioning)
        self._row_factors = torch.zeros(len(self.conditioning), rows.records)
        self._mean_factors = torch.zeros(len(self.conditioning), rows.records)
        squares = torch.full((rows.records,), intercept).masked_fill_(rows.excluded, 0.0)
        for place, each in enumerate(self.conditioning):
            squares += self._measure(place, each, math.sqrt(share * each.weight / total))
        self.norms = squares.sqrt_()  # at most 1, up to rounding

    def _measure(self, place: int, conditioning: BlockConditioning, length: float) -> Tensor:
        """Compute the factors of one block; the block's squared norm in every record."""
        mean, scale = conditioning.mean.float(), conditioning.scale.float()
        nearest = max(NEAREST * float((scale * mean).norm()), SHORTEST * float(scale.min()))
        squares = torch.zeros(self.rows.records)
        for places, part in self.rows.blocks(columns=conditioning.block.columns):
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

    def prepared(self, weights: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Two lists with an entry per block: t * weights, and its product with the mean."""
        scaled = [each.scale[:, None] * weights[each.block.columns].double() for each in self.conditioning]
        means = [each.mean.double() @ part for each, part in zip(self.conditioning, scaled, strict=True)]
        return [part.float() for part in scaled], [part.float() for part in means]

    @property
    def constant(self) -> float:
        """The constant coordinate of every record; 0 if there is none."""
        return math.sqrt(self.intercept)

    def factors(self, place: int, places: slice | NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        """The factors of the rows and of the mean, for some records in one block."""
        return self._row_factors[place, places, None], self._mean_factors[place, places, None]


class Products:
    """The two products of a step with conditioned rows, in one pass over the features, for one model or several.

    Iterating yields the places of a block of rows and every model's scores w_i . weights; `add` takes every model's
    residuals for the block that was yielded last.

    Args:
        conditioned: The conditioned rows of every model: of the same features, in the same blocks of columns.
        weights: The weights of every model.
        chosen: The rows to read; None for all of them.
    """

    def __init__(
        self, conditioned: Sequence[ConditionedRows], weights: Sequence[Tensor], chosen: NDArray[np.int64] | None = None
    ) -> None:
        self._conditioned, self._chosen, self._rows = tuple(conditioned), chosen, conditioned[0].rows
        self._columns = [each.block.columns for each in conditioned[0].conditioning]
        ends = np.cumsum([each.shape[1] for each in weights]).tolist()
        self._outputs = [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]
        prepared = [each.prepared(of) for each, of in zip(conditioned, weights, strict=True)]
        self._scaled = [torch.cat(parts, dim=1) for parts in zip(*(scaled for scaled, _ in prepared), strict=True)]
        self._means = [means for _, means in prepared]
        self._biases = [of[self._rows.width :].float().sum(dim=0) for of in weights]
        self._sum = torch.zeros(self._rows.width, ends[-1], dtype=torch.float64)
        self._near = torch.zeros(self._rows.width, ends[-1])  # the sum of the last few blocks, in float32
        self._held = 0
        self._mean_sums = torch.zeros(len(self._columns), ends[-1], dtype=torch.float64)
        self._bias_sum = torch.zeros(ends[-1], dtype=torch.float64)
        self._places: slice | NDArray[np.int64] = slice(0, 0)
        self._part = torch.empty(0)

    def __iter__(self) -> Iterator[tuple[slice | NDArray[np.int64], list[Tensor]]]:
        for places, part in self._rows.blocks(self._chosen):
            self._places, self._part = places, part
            scores = [
                (bias * conditioned.constant).expand(len(part), -1).clone()
                for conditioned, bias in zip(self._conditioned, self._biases, strict=True)
            ]
            for place, columns in enumerate(self._columns):
                products = part[:, columns] @ self._scaled[place]
                for model, conditioned in enumerate(self._conditioned):
                    of_row, of_mean = conditioned.factors(place, places)
                    scores[model] += of_row * products[:, self._outputs[model]]
                    scores[model] -= of_mean * self._means[model][place]
            yield places, scores

    def add(self, residuals: Sequence[Tensor]) -> None:
        """Add sum_i w_i (x) r_i of every model over the block of rows that was yielded last."""
        for place, columns in enumerate(self._columns):
            weighted = []
            for model, conditioned in enumerate(self._conditioned):
                of_row, of_mean = conditioned.factors(place, self._places)
                weighted.append(of_row * residuals[model])
                of_block = (of_mean * residuals[model]).sum(dim=0, dtype=torch.float64)
                self._mean_sums[place, self._outputs[model]] += of_block
            self._near[columns].addmm_(self._part[:, columns].T, torch.cat(weighted, dim=1))
        alive = ~self._rows.excluded[self._places]
        for outputs, conditioned, each in zip(self._outputs, self._conditioned, residuals, strict=True):
            self._bias_sum[outputs] += (each * alive[:, None]).sum(dim=0, dtype=torch.float64) * conditioned.constant
        self._held += 1
        if self._held == _HELD:
            self._collect()

    def _collect(self) -> None:
        self._sum += self._near
        self._near.zero_()
        self._held = 0

    def totals(self) -> list[Tensor]:
        """sum_i w_i (x) r_i of every model over everything that was added, in float64."""
        self._collect()
        found = []
        for outputs, conditioned in zip(self._outputs, self._conditioned, strict=True):
            total = self._sum[:, outputs].clone()
            for place, each in enumerate(conditioned.conditioning):
                part = total[each.block.columns]
                part -= each.mean.double()[:, None] * self._mean_sums[place, outputs]
                part *= each.scale.double()[:, None]
            found.append(torch.cat([total, self._bias_sum[None, outputs]]) if conditioned.intercept > 0 else total)
        return found
