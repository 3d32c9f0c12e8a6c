"""Whitening of a block by the statistics of synthetic images, so that no direction dominates a record's norm.

The covariance of a block's (channels x cells) table is modelled as a Kronecker product of a covariance of channels and
one of cells: two small eigenproblems stand in for one of thousands of dimensions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

_FLOOR = 1e-3  # of the largest eigenvalue, added to all
_SMALLEST = 1e-6  # of the largest eigenvalue: rounding leaves no digit below it


@dataclass(frozen=True, kw_only=True)
class Whitening:
    """u = (lambda + floor)^(-1/2) Vc' ((sqrt(x) - mean) / deviation) Vs over its norm; lambda = lambda_c lambda_s."""

    channels: Tensor  # (channels, channels): Vc' divided by the deviations
    cells: Tensor  # (cells, cells): Vs
    shift: Tensor  # (channels, cells): Vc' mean Vs
    scale: Tensor  # (channels, cells): (lambda + floor)^(-1/2)
    eigenvalues: Tensor  # (channels, cells): lambda

    @classmethod
    def fit(cls, tables: Tensor) -> Self:
        """Statistics of the tables (N, channels, cells) of synthetic images."""
        roots = tables.sqrt()
        deviation = roots.std((0, 2)).clamp_min(1e-6)
        scaled = roots / deviation[:, None]
        mean = scaled.mean(0)
        centred = scaled - mean
        of_channels, channel_axes = _spectrum(centred.transpose(1, 2).flatten(0, 1))
        of_cells, cell_axes = _spectrum(centred.flatten(0, 1))
        eigenvalues = torch.outer(of_channels, of_cells / of_cells.mean())
        eigenvalues = eigenvalues.clamp_min(_SMALLEST * float(eigenvalues.max()))
        return cls(
            channels=(channel_axes.T / deviation).contiguous(),  # the cache keeps no strides
            cells=cell_axes.contiguous(),
            shift=channel_axes.T @ mean @ cell_axes,
            scale=(eigenvalues + _FLOOR * eigenvalues.max()).rsqrt(),
            eigenvalues=eigenvalues,
        )

    def __call__(self, table: Tensor) -> Tensor:
        """The unit vector of one record's table (channels, cells); a record at the synthetic mean gives zero."""
        rotated = self.channels @ table.sqrt() @ self.cells - self.shift
        vector = (rotated * self.scale).flatten()
        return vector / torch.linalg.vector_norm(vector).clamp_min(1e-12)


def _spectrum(rows: Tensor) -> tuple[Tensor, Tensor]:
    values, vectors = torch.linalg.eigh(rows.T @ rows / len(rows))
    return values.clamp_min(0), vectors
