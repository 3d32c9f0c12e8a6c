"""Poisson sampling of logical batches."""

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
