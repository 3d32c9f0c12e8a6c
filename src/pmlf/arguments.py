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
