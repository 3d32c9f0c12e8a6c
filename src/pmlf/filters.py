"""Low-pass filters for private gradients."""

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
