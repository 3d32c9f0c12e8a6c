"""Low-pass filters on the noisy mean gradient, and common designs of them."""

from pmlf.mechanism.filters import (
    FilterMemory,
    LowPass,
    butterworth,
    exponential,
    moving_average,
)

__all__ = [
    "FilterMemory",
    "LowPass",
    "butterworth",
    "exponential",
    "moving_average",
]
