"""Checks of numbers that users give, each with an error of one sentence: what was given, what is allowed, why."""

from __future__ import annotations

import math
from typing import Any


def require_count(name: str, value: Any, meaning: str, *, least: int = 1) -> None:
    """Raise ValueError unless `value` is a whole number of at least `least`.

    >>> require_count("k", 0, "k counts iterates")
    Traceback (most recent call last):
    ValueError: k=0 is not a whole number of at least 1: k counts iterates
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name}={value!r} is not a whole number of at least {least}: {meaning}")


def require_positive(name: str, value: Any, meaning: str) -> None:
    """Raise ValueError unless `value` is a positive, finite number."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0.0 < value < math.inf:
        raise ValueError(f"{name}={value!r} is not positive and finite: {meaning}")


def steps_of_epochs(epochs: float, records: int, batch_size: float) -> int:
    """T = ceil(epochs * n / B): the steps in which every record is drawn `epochs` times on average.

    >>> steps_of_epochs(2, 120, 50)
    5
    """
    require_positive("epochs", epochs, "an epoch is n / batch_size steps")
    require_positive("batch_size", batch_size, "it is the expected number of samples a step")
    return math.ceil(epochs * records / batch_size - 1e-9)  # 3 * 0.1 / 0.1 is 3 steps, not 4
