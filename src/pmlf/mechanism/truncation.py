"""Truncated Poisson sampling: no batch is larger than a bound M, and what that costs.

A Poisson draw of more than M records is cut to M of them, uniformly at random. The chance of that is
psi = Pr[Binomial(n, q) > M] at every step. A run of T steps with the cut differs from one without it with probability
at most T psi, for each of two neighbouring datasets of n records. So if the run without it is (epsilon, d)-private, the
run with it is (epsilon, d + T psi (1 + e^epsilon))-private (Chua et al. 2024, "Scalable DP-SGD").

Both datasets must have the same n, since who else is cut depends on it: the neighbours differ in one record that is
zeroed out, which is drawn as before and adds nothing. Without the cut this is the same as a record removed.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable

import numpy as np
from scipy import stats

from pmlf.basics.arguments import is_number, require_count, require_positive

_SHARES = (0.001, 0.01, 0.1)  # of delta for truncation: the first that covers it
MOST_FOR_TRUNCATION = _SHARES[-1]
_EPSILON_OF_GIVEN_NOISE = 20.0  # assumed if no target is given
_ROUNDING = 1 + 1e-6  # more than scipy's tail is off
_LEAST_LOG_CHANCE = -690.0  # e^-690 is near the smallest float


def overflow(*, records: int, batch_size: float, largest_batch: int) -> float:
    """psi = Pr[Binomial(n, B/n) > M]: the chance that a Poisson draw is larger than M.

    Args:
        records: n, the number of records.
        batch_size: B, the expected number of records in a draw.
        largest_batch: M, the largest number of records in a batch.

    Returns:
        psi; 0 if M is at least n.

    Raises:
        ValueError: An argument is out of range.

    >>> overflow(records=50_000, batch_size=1000, largest_batch=1100) < 1e-3
    True
    """
    require_count("records", records, "it is the number of records")
    require_count("largest_batch", largest_batch, "it is the largest number of records in a batch")
    if not (is_number(batch_size) and 0.0 < batch_size <= records):
        raise ValueError(f"batch_size={batch_size} is not in (0, {records}]: it is the expected size of a draw")
    if largest_batch >= records:
        return 0.0
    return min(float(stats.binom.sf(largest_batch, records, batch_size / records)) * _ROUNDING, 1.0)


def smallest_batch_bound(*, records: int, batch_size: float, steps: int, epsilon: float, delta: float) -> int:
    """The smallest M for which truncation costs at most a thousandth of delta, over T steps at epsilon.

    Args:
        records: n, the number of records.
        batch_size: B, the expected number of records in a draw.
        steps: T, the number of steps.
        epsilon: The target epsilon.
        delta: The delta of the guarantee.

    Returns:
        M, at most n.

    Raises:
        ValueError: An argument is out of range.

    >>> smallest_batch_bound(records=50_000, batch_size=1000, steps=400, epsilon=8.0, delta=1e-5)
    1249
    """
    require_count("records", records, "it is the number of records")
    require_count("steps", steps, "it is the number of steps")
    require_positive("epsilon", epsilon, "it is the target that truncation is planned for")
    if not (is_number(delta) and 0.0 < delta < 1.0):
        raise ValueError(f"delta={delta} is not in (0, 1): give a number well below 1/n")
    chance = math.exp(max(math.log(_SHARES[0] * delta / steps) - np.logaddexp(0.0, epsilon), _LEAST_LOG_CHANCE))
    sizes = range(1, records + 1)  # M = n is never exceeded
    bounds = {"records": records, "batch_size": batch_size}
    return sizes[bisect_left(sizes, True, key=lambda size: overflow(**bounds, largest_batch=size) <= chance)]  # type: ignore[arg-type]


def chance_of_a_cut(
    *,
    largest_batch: int | None,
    records: int,
    batch_size: float,
    steps: int,
    epsilon: float | None,
    delta: float,
    bands: int,
    processes: int,
) -> float:
    """psi of a planned run; refused where the cut is not argued, or where it would take too much of delta.

    Args:
        largest_batch: M; None cuts nothing.
        records: n, the number of records.
        batch_size: B, the expected number of records in a draw.
        steps: T, the number of steps.
        epsilon: The target; None if the noise is given, and then 20.
        delta: The probability at which epsilon is stated.
        bands: The number of bands of the noise.
        processes: The number of processes that take every step together.

    Returns:
        psi; 0 if nothing is cut.

    Raises:
        ValueError: It is refused.

    >>> chance_of_a_cut(largest_batch=None, records=50_000, batch_size=1000, steps=400, epsilon=8.0, delta=1e-5,
    ...                 bands=1, processes=1)
    0.0
    """
    if largest_batch is None:
        return 0.0
    if bands > 1:
        raise ValueError(
            f"largest_batch={largest_batch} with noise of {bands} bands: the argument for shaped noise is about "
            "records that are added or removed, and the one for a cut about records zeroed out; leave one out"
        )
    if processes > 1:
        raise ValueError(f"largest_batch={largest_batch} runs in one process, and here are {processes}")
    chance = overflow(records=records, batch_size=batch_size, largest_batch=largest_batch)
    at = _EPSILON_OF_GIVEN_NOISE if epsilon is None else epsilon
    least = smallest_batch_bound(records=records, batch_size=batch_size, steps=steps, epsilon=at, delta=delta)
    if largest_batch < least:
        raise ValueError(
            f"largest_batch={largest_batch} would cut batches of {batch_size:g} records on average too often: give "
            f"{least} or more, so that the chance of a cut takes at most a thousandth of delta"
        )
    return chance


def with_truncation(epsilon_at: Callable[[float], float], delta: float, chance: float) -> float:
    """epsilon at delta of steps that together are cut with probability at most T psi: an upper bound.

    Args:
        epsilon_at: epsilon of the same steps without the cut, as a function of delta.
        delta: The probability at which epsilon is stated.
        chance: T psi, summed over all steps.

    Returns:
        epsilon_at((1 - s) delta) for the smallest share s of delta that covers T psi (1 + e^epsilon); infinite if a
        tenth of delta does not.

    >>> with_truncation(lambda delta: 2.0, 1e-5, 0.0), with_truncation(lambda delta: 2.0, 1e-5, 1e-3)
    (2.0, inf)
    """
    if chance == 0.0:
        return epsilon_at(delta)
    for share in _SHARES:
        found = epsilon_at((1.0 - share) * delta)
        if found < 700.0 and chance * (1.0 + math.exp(found)) <= share * delta:
            return found
    return math.inf


def extra_delta(epsilon: float, chance: float) -> float:
    """T psi (1 + e^epsilon): what truncation adds to delta.

    >>> extra_delta(0.0, 1e-9)
    2e-09
    """
    return chance * (1.0 + math.exp(min(epsilon, 700.0))) if chance else 0.0
