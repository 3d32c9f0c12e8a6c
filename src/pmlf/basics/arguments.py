"""Checks of numbers that users give, each with an error of one sentence: what was given, what is allowed, why."""

from __future__ import annotations

import math
from numbers import Integral, Real
from typing import Any

MOST = 10**9  # of anything that is counted: more is a slip, or would take forever


def plain(value: Any) -> Any:
    """numpy's numbers as Python's, which JSON takes: they go into ledgers and certificates. The rest as it is."""
    if isinstance(value, (int, float)) or not isinstance(value, Real):
        return value
    return int(value) if isinstance(value, Integral) else float(value)


def is_number(value: Any) -> bool:
    """Whether `value` is a real number that a float can hold: no truth value, text or tensor.

    >>> is_number(0.5), is_number(True), is_number("0.5"), is_number(10**400)
    (True, False, False, False)
    """
    if isinstance(value, bool) or not isinstance(value, Real):
        return False
    try:
        float(value)
    except OverflowError:
        return False
    return True


def require_count(name: str, value: Any, meaning: str, *, least: int = 1, most: int = MOST) -> None:
    """Raise ValueError unless `value` is a whole number from `least` to `most`.

    >>> require_count("k", 0, "k counts iterates")
    Traceback (most recent call last):
    ValueError: k=0 is not a whole number of at least 1: k counts iterates
    """
    if isinstance(value, bool) or not isinstance(value, Integral) or int(value) < least:
        raise ValueError(f"{name}={value!r} is not a whole number of at least {least}: {meaning}")
    if int(value) > most:
        raise ValueError(f"{name}={value!r} is more than {most}: {meaning}")


def require_positive(name: str, value: Any, meaning: str) -> None:
    """Raise ValueError unless `value` is a positive, finite number."""
    if not is_number(value) or not 0.0 < value < math.inf:
        raise ValueError(f"{name}={value!r} is not positive and finite: {meaning}")


def steps_of_epochs(epochs: float, records: int, batch_size: float) -> int:
    """T = ceil(epochs * n / B): the steps in which every record is drawn `epochs` times on average.

    >>> steps_of_epochs(2, 120, 50)
    5
    """
    require_positive("epochs", epochs, "an epoch is n / batch_size steps")
    require_positive("batch_size", batch_size, "it is the expected number of samples a step")
    steps = float(epochs) * records / float(batch_size)
    if steps > MOST:
        raise ValueError(f"epochs={epochs} at batch_size={batch_size} of {records} are {steps:.3g} steps: give less")
    return max(math.ceil(steps - 1e-9), 1)  # 3 * 0.1 / 0.1 is 3 steps, not 4
