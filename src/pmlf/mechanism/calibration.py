"""The search for the smallest noise multiplier that meets a target epsilon."""

from __future__ import annotations

import math
from collections.abc import Callable

from scipy import optimize

_LARGEST_LOG_RATIO = 30.0  # the search for a noise multiplier ends at a factor e^30 from its first guess
_TOLERANCE = 1e-5  # relative, of the noise multiplier


def smallest_noise(total: Callable[[float], float], target: float, *, guess: float, words: str) -> float:
    """The smallest noise multiplier z with total(log z) <= target, to a relative 1e-5 and never below it.

    Args:
        total: epsilon as a decreasing function of log z.
        target: the epsilon to stay within.
        guess: where the search for z begins.
        words: the target, for the error.

    Returns:
        z.

    Raises:
        ValueError: no noise multiplier meets the target.

    >>> round(smallest_noise(lambda log_z: 4 / math.exp(log_z), 2.0, guess=1.0, words="epsilon 2"), 3)
    2.0
    """

    def excess(log_z: float) -> float:
        """log(epsilon / target), kept finite for the root finder if epsilon is 0 or infinite."""
        return math.log(min(max(total(log_z) / target, 1e-6), 1e6))

    low, high = _bracket(excess, math.log(guess), words)
    log_z = float(optimize.brentq(excess, low, high, xtol=_TOLERANCE))
    while total(log_z) > target:  # brentq may return the wrong side of the root
        log_z += _TOLERANCE
    return math.exp(log_z)


def _bracket(excess: Callable[[float], float], guess: float, target: str) -> tuple[float, float]:
    """log z below and above the root of a decreasing function."""
    direction = math.copysign(1.0, excess(guess))  # above the target: search towards more noise
    near, width = guess, 0.25
    while abs(near - guess) < _LARGEST_LOG_RATIO:
        far = near + direction * width
        if excess(far) * direction <= 0:
            return min(near, far), max(near, far)
        near, width = far, 2 * width
    raise ValueError(
        f"{target} cannot be met by any noise multiplier between {math.exp(min(guess, near)):.3g} and "
        f"{math.exp(max(guess, near)):.3g}: give another target"
    )
