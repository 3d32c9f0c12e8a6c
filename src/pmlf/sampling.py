"""Poisson sampling: each record joins a logical batch independently with probability q."""

from pmlf.mechanism.sampling import (
    LogicalBatch,
    PoissonBatches,
    population,
)

__all__ = [
    "LogicalBatch",
    "PoissonBatches",
    "population",
]
