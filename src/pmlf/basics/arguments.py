"""Checks of user-supplied values. Each error is one sentence: what was given, what is allowed, and what it means."""

from __future__ import annotations

import difflib
import math
import warnings
from collections.abc import Iterable
from numbers import Integral, Real
from typing import Any

MOST = 10**9  # the largest count accepted anywhere; a larger one is a typing error


def plain(value: Any) -> Any:
    """Convert numpy numbers to Python numbers, which JSON can store; return anything else unchanged.

    Ledgers and certificates store the numbers a user gives.

    >>> import numpy as np
    >>> plain(np.int64(3)), plain("three")
    (3, 'three')
    """
    if isinstance(value, (int, float)) or not isinstance(value, Real):
        return value
    return int(value) if isinstance(value, Integral) else float(value)


def is_number(value: Any) -> bool:
    """Whether `value` is a real number that a float can hold. Booleans, strings and tensors are not.

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
    """Check that an argument is a whole number from `least` to `most`.

    Args:
        name: The argument's name, for the error.
        value: The value given.
        meaning: What the argument is, for the error.
        least: The smallest value allowed.
        most: The largest value allowed.

    Raises:
        ValueError: It is not.

    >>> require_count("k", 0, "it counts iterates")
    Traceback (most recent call last):
    ValueError: k=0 is not a whole number of at least 1: it counts iterates
    """
    if isinstance(value, bool) or not isinstance(value, Integral) or int(value) < least:
        raise ValueError(f"{name}={value!r} is not a whole number of at least {least}: {meaning}")
    if int(value) > most:
        raise ValueError(f"{name}={value!r} is more than {most}: {meaning}")


def require_positive(name: str, value: Any, meaning: str) -> None:
    """Check that an argument is a positive, finite number.

    Args:
        name: The argument's name, for the error.
        value: The value given.
        meaning: What the argument is, for the error.

    Raises:
        ValueError: It is not.

    >>> require_positive("clip_norm", -1.0, "it bounds one sample's gradient")
    Traceback (most recent call last):
    ValueError: clip_norm=-1.0 is not positive and finite: it bounds one sample's gradient
    """
    if not is_number(value) or not 0.0 < value < math.inf:
        raise ValueError(f"{name}={value!r} is not positive and finite: {meaning}")


def did_you_mean(given: Any, allowed: Iterable[str]) -> str:
    """The end of an error about an unknown name: a suggestion if an allowed name is close, else nothing.

    >>> did_you_mean("cifar-10", ["cifar10", "mnist"]), did_you_mean("adult", ["cifar10"])
    (". Did you mean 'cifar10'?", '')
    """
    close = difflib.get_close_matches(given, list(allowed), n=1) if isinstance(given, str) else []
    return f". Did you mean {close[0]!r}?" if close else ""


def steps_of_epochs(epochs: float, records: int, batch_size: float) -> int:
    """T = ceil(epochs * n / B): the steps in which every record is drawn `epochs` times on average.

    Args:
        epochs: The number of epochs.
        records: The number of records, n.
        batch_size: The expected batch size, B.

    Returns:
        The number of steps, at least 1.

    Raises:
        ValueError: epochs or batch_size is not positive, or there would be more than 10^9 steps.

    >>> steps_of_epochs(2, 120, 50)
    5
    """
    require_positive("epochs", epochs, "an epoch is n / batch_size steps")
    require_positive("batch_size", batch_size, "it is the expected number of samples in a step")
    steps = float(epochs) * records / float(batch_size)
    if steps > MOST:
        raise ValueError(
            f"epochs={epochs} at batch_size={batch_size} on {records} records makes {steps:.3g} steps, more than "
            f"{MOST:g}: give fewer epochs or a larger batch_size"
        )
    return max(math.ceil(steps - 1e-9), 1)  # 3 * 0.1 / 0.1 is 3 steps in spite of rounding


def warn_of_large_delta(name: str, delta: float, records: int, *, stacklevel: int) -> None:
    """Warn if delta is 1/n or more.

    Args:
        name: The argument's name, for the warning.
        delta: The delta of the guarantee.
        records: The number of records, n.
        stacklevel: As of `warnings.warn` in the caller.
    """
    if delta >= 1.0 / records:
        warnings.warn(
            f"{name}={delta} is not below 1/n = {1.0 / records:.3g}: such a delta permits publishing a whole record; "
            "give a smaller one",
            stacklevel=stacklevel + 1,
        )
