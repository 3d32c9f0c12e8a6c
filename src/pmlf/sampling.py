"""Poisson sampling: each record joins a logical batch independently with probability q."""

from pmlf.mechanism.sampling import LogicalBatch, PoissonBatches
from pmlf.mechanism.units import Units

__all__ = [
    "LogicalBatch",
    "PoissonBatches",
    "Units",
]
