"""Noise shapes: noise that is partly taken back in the next steps, so that a low-pass filter can remove it.

A release is S_t + z C x_t with x = shape^-1 w, w ~ N(0, I), where `shape` is a lower-triangular Toeplitz matrix with b
bands. Multiplying the releases by `shape` gives shape S + z C w: the Gaussian mechanism on shape S. A record that takes
part in step t adds column t of `shape` times its clipped gradient, which has norm at most C because every column has
norm at most 1. Two columns that are b steps apart share no row. So a record that takes part at most once in b steps in
a row (`pmlf.sampling`, cycle=b) costs one Gaussian event for every time it takes part, at noise multiplier z.

White noise is b = 1. More bands move more noise to high frequencies, and cost more noise in total.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import final

import numpy as np
from numpy.typing import NDArray
from scipy import linalg, signal

from pmlf.basics.arguments import is_number, require_count

Floats = NDArray[np.float64]

MOST_BANDS = 64
_STABILITY_MARGIN = 1e-6
_SMALLEST_FIRST = 1e-100  # the norm of numbers below 1e-308 is rounded, perhaps to less than it is
_MOST_GROWTH = 1e3  # float32 then rounds to a thousandth of what a step adds; the shapes of `banded` are below 10
MOST_DENSE_STEPS = 2000  # a matrix of this size takes 32 MB


@final
@dataclass(frozen=True)
class NoiseShape:
    """shape[i, j] = c_{i-j}: a lower-triangular Toeplitz matrix with b bands whose columns have norm at most 1.

    The coefficients are divided by their norm, so no column has a norm above 1: full columns have norm 1, and the
    last b - 1 columns, which the end of a run cuts off, have less.

    Attributes:
        coefficients: c_0, c_1, ..., c_{b-1}.

    Raises:
        ValueError: The inverse would grow without bound, or so far that float32 would round the noise of a single step
            away, or a coefficient is not a finite number.

    >>> NoiseShape((4.0, 3.0)).coefficients
    (0.8, 0.6)
    """

    coefficients: Sequence[float] = (1.0,)

    def __post_init__(self) -> None:
        given = tuple(self.coefficients) if isinstance(self.coefficients, Iterable) else ()
        if not given or not all(is_number(value) and abs(value) < 1e100 for value in given):
            raise ValueError(
                f"coefficients={self.coefficients!r} are not finite numbers: give one or more, (1.0, 0.5) for example"
            )
        while len(given) > 1 and given[-1] == 0:
            given = given[:-1]
        require_count("bands", len(given), "it is the number of coefficients of a noise shape", most=MOST_BANDS)
        if not given[0] >= _SMALLEST_FIRST:
            raise ValueError(
                f"coefficients={given!r} begin with {given[0]}: the first must be positive, {_SMALLEST_FIRST:g} or more"
            )
        norm = math.hypot(*given)
        if abs(norm - 1) > 1e-12:  # dividing again would change the last digits of a stored shape
            given = tuple(float(value) / norm for value in given)
        object.__setattr__(self, "coefficients", tuple(map(float, given)))
        largest = np.max(np.abs(np.roots(self.coefficients)), initial=0.0)
        if largest >= 1 - _STABILITY_MARGIN:
            raise ValueError(
                f"coefficients={self.coefficients} have an inverse that grows: c_0 x^(b-1) + c_1 x^(b-2) + ... has a "
                f"root of absolute value {largest:.6g}, and all must be below 1. Use pmlf.shapes.banded"
            )
        if (growth := _growth(self.coefficients)) > _MOST_GROWTH:
            raise ValueError(
                f"coefficients={self.coefficients} make noise {growth:.3g} times as large as what a step adds to it, "
                f"and float32 would round that away: at most {_MOST_GROWTH:g} is allowed. Use pmlf.shapes.banded"
            )

    @classmethod
    def white(cls) -> NoiseShape:
        """Independent noise at every step: one band.

        >>> NoiseShape.white().bands
        1
        """
        return cls()

    @property
    def bands(self) -> int:
        """b, the number of coefficients. A record may take part at most once in b steps in a row."""
        return len(self.coefficients)

    def noise_response(self, length: int) -> Floats:
        """The first coefficients of shape^-1: x_t = sum_s r_s w_{t-s}.

        Args:
            length: How many coefficients to return.

        >>> NoiseShape((0.8, 0.6)).noise_response(3)
        array([ 1.25    , -0.9375  ,  0.703125])
        """
        require_count("length", length, "it is the number of coefficients", least=0, most=10**7)
        return np.asarray(signal.lfilter([1.0], self.coefficients, np.arange(length) == 0.0))

    def matrix(self, steps: int) -> Floats:
        """The matrix of a run of this many steps.

        Args:
            steps: T, at most 2,000.

        >>> NoiseShape((0.8, 0.6)).matrix(2)
        array([[0.8, 0. ],
               [0.6, 0.8]])
        """
        require_count("steps", steps, "it is the size of the matrix", most=MOST_DENSE_STEPS)
        column = np.zeros(max(steps, self.bands))
        column[: self.bands] = self.coefficients
        return np.asarray(linalg.toeplitz(column[:steps], np.zeros(steps)))

    def spectrum(self, points: int = 512) -> tuple[Floats, Floats]:
        """The power of the noise by frequency, |1 / c(e^{2 pi i f})|^2; 1 everywhere for white noise.

        Args:
            points: How many frequencies.

        Returns:
            Frequencies in cycles per step, from 0 to 1/2 inclusive, and the power at each.

        >>> frequencies, power = NoiseShape((0.8, 0.6)).spectrum(2)
        >>> frequencies.tolist(), power.round(3).tolist()
        ([0.0, 0.5], [0.51, 25.0])
        """
        require_count("points", points, "it is the number of frequencies", least=2, most=10**7)
        frequencies, response = signal.freqz([1.0], self.coefficients, worN=points, fs=1.0, include_nyquist=True)
        return frequencies, np.abs(response) ** 2


def _growth(coefficients: Sequence[float]) -> float:
    """c_0 (sum_k r_k^2)^(1/2): the standard deviation of the noise over that of what its own step adds to it.

    By the Levinson-Durbin recursion backwards: the product of (1 - k^2)^(-1/2) over the reflection coefficients k.
    """
    rest, square = np.asarray(coefficients) / coefficients[0], 1.0
    while len(rest) > 1:
        reflection = float(rest[-1])
        if abs(reflection) >= 1:  # rounded: all roots are inside the unit circle
            return math.inf
        square /= 1 - reflection**2
        rest = ((rest - reflection * rest[::-1]) / (1 - reflection**2))[:-1]
    return math.sqrt(square)
