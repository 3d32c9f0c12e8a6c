"""Noise shapes: noise that is moved to high frequencies, where a low-pass filter removes it."""

from pmlf.mechanism.shape_fit import (
    Choice,
    Workload,
    banded,
    best,
    error,
    usual_workload,
)
from pmlf.mechanism.shapes import NoiseShape

__all__ = [
    "Choice",
    "NoiseShape",
    "Workload",
    "banded",
    "best",
    "error",
    "usual_workload",
]
