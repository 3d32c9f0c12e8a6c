"""Privacy accounting: (epsilon, delta) of T Poisson-subsampled Gaussian releases, and the noise for a target.

There are two accountants. "pld" composes privacy loss distributions (`pmlf.mechanism.privacy_loss`), "rdp" is the Renyi
accountant of dp-accounting. The adjacency is add or remove one record. Every epsilon and delta is an upper bound.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache

from pmlf.basics.arguments import is_number
from pmlf.mechanism import privacy_loss
from pmlf.mechanism.calibration import smallest_noise
from pmlf.mechanism.events import (
    ACCOUNTANTS,
    LEAST_RATE,
    SMALLEST_PLD_DELTA,
    Event,
    check_delta,
    check_mechanism,
    check_overflow,
    cyclic,
)
from pmlf.mechanism.renyi import quiet, renyi
from pmlf.mechanism.truncation import MOST_FOR_TRUNCATION, extra_delta, with_truncation

__all__ = [
    "ACCOUNTANTS",
    "FILTER_ORDERS",
    "LEAST_RATE",
    "Event",
    "affordable_steps",
    "check_mechanism",
    "cyclic",
    "delta",
    "epsilon",
    "filter_epsilon",
    "finest_epsilon",
    "noise_multiplier",
]

FILTER_ORDERS = (2.0, 2.5, 3.0, 4.0, 5.5, 8.0, 14.0, 32.0)  # a filter's orders are fixed before the first release

SMALLEST_PLD_NOISE = 0.01  # below, epsilon is in the thousands and the Renyi bound is good enough
_LEAST_EPSILON, _MOST_EPSILON = 1e-6, 1e6
ALL = 1.0 - 1e-9  # higher rates count as 1, which costs more


def epsilon(
    *,
    noise_multiplier: float,
    sample_rate: float,
    steps: int,
    delta: float,
    accountant: str = "pld",
    bands: int = 1,
    overflow: float = 0.0,
) -> float:
    """epsilon at delta of T releases of a clipped sum over a Poisson(q) batch + z C N(0, I) (Theorem 2).

    The result is an upper bound. "pld" is at most about 0.1 % too large (a few per cent at sampling rates of 1e-5);
    "rdp" is looser.

    Args:
        noise_multiplier: z, the standard deviation of the noise divided by the clip norm.
        sample_rate: q, the probability that a record joins a batch: expected batch size / number of records.
        steps: T, the number of releases; 0 spends nothing.
        delta: the probability at which epsilon is stated; at least 1e-10 for "pld".
        accountant: "pld" or "rdp".
        bands: b of cyclic Poisson sampling with noise of b bands; 1 is plain Poisson sampling with white noise.
        overflow: the chance that a draw is larger than the largest batch and is cut to it (`overflow()`); 0 if not cut.

    Returns:
        epsilon.

    Raises:
        ValueError: an argument is out of range.

    >>> round(epsilon(noise_multiplier=1.0, sample_rate=1 / 60, steps=1500, delta=1e-5), 2)
    3.93
    """
    check_mechanism(noise_multiplier, sample_rate, steps, accountant)
    check_delta("delta", delta, accountant)
    check_overflow(overflow, bands)
    rate, events = cyclic(float(sample_rate), int(steps), bands)
    return _epsilon(float(noise_multiplier), rate, events, float(delta), accountant, float(overflow))


def filter_epsilon(events: Mapping[Event, int], *, delta: float) -> float:
    """epsilon at delta of events of several kinds, even if each event was chosen after seeing the earlier releases.

    An RDP filter (Feldman & Zrnic 2021): at a fixed order, Renyi divergences add up even for events that are chosen
    adaptively, as long as the choice stops before a bound that was fixed in advance. It is looser than `epsilon()`.

    The best order may itself depend on the releases. So each of the eight orders gets an eighth of delta: on the
    outcomes where an order stays within its bound, that order's filter alone allows the run, and the eighths add up
    over the orders.

    Args:
        events: how often each kind of event happened.
        delta: the probability at which epsilon is stated.

    Returns:
        epsilon; 0 without events.

    Raises:
        ValueError: an event or delta is out of range.

    >>> one = {Event(noise_multiplier=1.0, sample_rate=1 / 60): 1500}
    >>> round(filter_epsilon(one, delta=1e-5), 2)
    4.82
    """
    for event, count in events.items():
        check_mechanism(event.noise_multiplier, event.sample_rate, count, "rdp")
        if event.overflow and count:
            raise ValueError(
                "a run with largest_batch composes as planned and not by an RDP filter, which has no term for batches "
                "that are cut: give such a run a ledger of its own, and do not make its plan longer"
            )
    check_delta("delta", delta, "rdp")
    return _filter_epsilon(_plain(events), float(delta))


def finest_epsilon(event: Event, *, steps: int, delta: float) -> float:
    """The tightest upper bound on epsilon that is available: "pld" with cells a quarter as wide. It takes longer.

    Args:
        event: the kind of event.
        steps: how often it happened.
        delta: the probability at which epsilon is stated.

    Returns:
        epsilon, never above `epsilon()`.

    Raises:
        ValueError: an argument is out of range.

    >>> event = Event(noise_multiplier=1.0, sample_rate=1 / 60)
    >>> finest_epsilon(event, steps=10, delta=1e-5) <= epsilon(
    ...     noise_multiplier=1.0, sample_rate=1 / 60, steps=10, delta=1e-5)
    True
    """
    check_mechanism(event.noise_multiplier, event.sample_rate, steps, "pld")
    check_delta("delta", delta, "pld")
    if event.overflow:
        whole = replace(event, overflow=0.0)
        return with_truncation(
            lambda left: finest_epsilon(whole, steps=steps, delta=left), delta, steps * event.overflow
        )
    usual = _epsilon(float(event.noise_multiplier), float(event.sample_rate), int(steps), float(delta), "pld")
    if usual == 0.0:
        return 0.0
    z, rate, count = _fewest_steps(float(event.noise_multiplier), float(event.sample_rate), int(steps))
    if z < SMALLEST_PLD_NOISE:
        return usual
    finer = privacy_loss.epsilon(z, rate, count, float(delta), cells=4 * privacy_loss.CELLS_PER_DEVIATION)
    return min(usual, finer)


def affordable_steps(
    event: Event, *, at_most: int, target_epsilon: float, delta: float, accountant: str, spent: Mapping[Event, int]
) -> int:
    """The number of events that target_epsilon allows in addition to those already spent.

    Args:
        event: the kind of event.
        at_most: the largest number to consider.
        target_epsilon: the budget of all events together.
        delta: the probability at which epsilon is stated.
        accountant: "pld", or "rdp" for `filter_epsilon`.
        spent: earlier events, of any kind; only with "rdp".

    Returns:
        A number from 0 to `at_most`.

    Raises:
        ValueError: `spent` is not empty with "pld", or an argument is out of range.

    >>> event = Event(noise_multiplier=1.0, sample_rate=0.01)
    >>> steps = affordable_steps(event, at_most=5000, target_epsilon=2.0, delta=1e-5, accountant="pld", spent={})
    >>> round(steps, -1)
    1200
    """
    if accountant == "pld" and spent:
        raise ValueError("accountant='pld' cannot add to earlier events: use accountant='rdp'")

    def fits(count: int) -> bool:
        if accountant == "pld":
            spent_then = _epsilon(event.noise_multiplier, event.sample_rate, count, delta, "pld", event.overflow)
            return spent_then <= target_epsilon
        return filter_epsilon({**spent, event: spent.get(event, 0) + count}, delta=delta) <= target_epsilon

    if fits(at_most):
        return at_most
    fit, too_many = 0, at_most
    while too_many - fit > 1:
        middle = (fit + too_many) // 2
        fit, too_many = (middle, too_many) if fits(middle) else (fit, middle)
    return fit


def delta(
    *,
    noise_multiplier: float,
    sample_rate: float,
    steps: int,
    epsilon: float,
    accountant: str = "pld",
    bands: int = 1,
    overflow: float = 0.0,
) -> float:
    """delta at a given epsilon for the releases of `epsilon()`, also an upper bound.

    Args:
        noise_multiplier: z, the standard deviation of the noise divided by the clip norm.
        sample_rate: q, the probability that a record joins a batch.
        steps: T, the number of releases.
        epsilon: a finite number of at least 0.
        accountant: "pld" or "rdp".
        bands: b of cyclic Poisson sampling with noise of b bands; 1 is plain Poisson sampling with white noise.
        overflow: the chance that a draw is larger than the largest batch and is cut to it (`overflow()`); 0 if not cut.

    Returns:
        delta; with "pld" at least 1e-10, unless there are no steps.

    Raises:
        ValueError: an argument is out of range.

    >>> delta(noise_multiplier=1.0, sample_rate=1 / 60, steps=1500, epsilon=3.93) <= 1e-5
    True
    """
    check_mechanism(noise_multiplier, sample_rate, steps, accountant)
    if not (is_number(epsilon) and 0 <= epsilon < math.inf):
        raise ValueError(f"epsilon={epsilon} is not a privacy loss: give a finite number of at least 0")
    check_overflow(overflow, bands)
    if steps == 0:
        return 0.0
    z, rate, count = _fewest_steps(float(noise_multiplier), *cyclic(float(sample_rate), int(steps), bands))
    at = min(float(epsilon), _MOST_EPSILON)
    cut = extra_delta(at, steps * overflow)
    if accountant == "pld" and z >= SMALLEST_PLD_NOISE:
        return min(max(privacy_loss.delta(z, rate, count, at), SMALLEST_PLD_DELTA) + cut, 1.0)
    with quiet():
        spent = float(renyi([(z, rate, count)]).get_delta(at))
    return min(max(spent, SMALLEST_PLD_DELTA if accountant == "pld" else 0.0) + cut, 1.0)


def noise_multiplier(
    *,
    target_epsilon: float,
    target_delta: float,
    sample_rate: float,
    steps: int,
    accountant: str = "pld",
    spent: Mapping[Event, int] | None = None,
    bands: int = 1,
    overflow: float = 0.0,
) -> float:
    """The smallest noise multiplier z whose `epsilon()` is at most target_epsilon.

    The search is accurate to a relative 1e-5 and always ends on the safe side: epsilon never exceeds the target.

    Args:
        target_epsilon: the budget, from 1e-6 to 1e6.
        target_delta: the probability at which epsilon is stated.
        sample_rate: q, the probability that a record joins a batch.
        steps: T, the number of releases.
        accountant: "pld" or "rdp".
        spent: earlier events on the same records. The new steps and they together stay within target_epsilon by
            `filter_epsilon`, whichever the accountant.
        bands: b of cyclic Poisson sampling with noise of b bands; 1 is plain Poisson sampling with white noise.
        overflow: the chance that a draw is larger than the largest batch and is cut to it (`overflow()`); 0 if not cut.

    Returns:
        z, the standard deviation of the noise divided by the clip norm.

    Raises:
        ValueError: an argument is out of range, the budget is already spent, or no noise multiplier meets the target.

    >>> z = noise_multiplier(target_epsilon=1.0, target_delta=1e-5, sample_rate=0.02, steps=1000)
    >>> 0.999 < epsilon(noise_multiplier=z, sample_rate=0.02, steps=1000, delta=1e-5) <= 1.0
    True
    """
    check_mechanism(1.0, sample_rate, steps, accountant)
    check_delta("target_delta", target_delta, accountant)
    if not (is_number(target_epsilon) and 0 < target_epsilon < math.inf):
        raise ValueError(f"target_epsilon={target_epsilon} is not a privacy budget: give a finite number above 0")
    if not _LEAST_EPSILON <= target_epsilon <= _MOST_EPSILON:
        raise ValueError(
            f"target_epsilon={target_epsilon} is outside [{_LEAST_EPSILON:g}, {_MOST_EPSILON:g}]: a smaller budget "
            "leaves only noise, a larger one protects nothing"
        )
    if steps == 0:
        raise ValueError("steps=0 releases nothing, so no noise is needed: give at least 1 step")
    rate, events = cyclic(float(sample_rate), int(steps), bands)
    drawn = 1.0 if rate == 1 else -math.expm1(events * math.log1p(-rate))
    if drawn <= target_delta:
        raise ValueError(
            f"target_delta={target_delta} is not below the probability {drawn:.3g} that a record is ever drawn, so no "
            "noise would be needed: give a much smaller one"
        )
    target, delta = float(target_epsilon), float(target_delta)
    check_overflow(overflow, bands)
    if events * overflow * (1.0 + math.exp(min(target, 700.0))) > MOST_FOR_TRUNCATION * delta:
        raise ValueError(
            f"overflow={overflow:.3g} in each of {events} steps cuts batches too often for target_epsilon="
            f"{target_epsilon} at target_delta={target_delta}: give a larger largest_batch"
        )
    if not spent:
        return _calibrated(target, delta, rate, events, accountant, (), float(overflow))
    if overflow:
        raise ValueError("largest_batch with earlier events in the ledger: give such a run a ledger of its own")
    before = filter_epsilon(spent, delta=target_delta)
    if before >= target_epsilon:
        raise ValueError(
            f"target_epsilon={target_epsilon} is spent already: the earlier events have epsilon {before:.4g} by an RDP "
            "filter, so no step is left"
        )
    return _calibrated(target, delta, rate, events, "rdp", _plain(spent))


_PlainEvents = tuple[tuple[float, float, int], ...]  # (z, q, count), which a cache can hash


def _plain(events: Mapping[Event, int]) -> _PlainEvents:
    return tuple(sorted((float(e.noise_multiplier), float(e.sample_rate), int(n)) for e, n in events.items() if n))


@lru_cache(maxsize=4096)
def _filter_epsilon(events: _PlainEvents, delta: float) -> float:
    if not events:
        return 0.0
    with quiet():
        return float(renyi(events, FILTER_ORDERS).get_epsilon(delta / len(FILTER_ORDERS)))


@lru_cache(maxsize=4096)
def _epsilon(z: float, rate: float, steps: int, delta: float, accountant: str, overflow: float = 0.0) -> float:
    if steps == 0:
        return 0.0
    if overflow:
        return with_truncation(lambda left: _epsilon(z, rate, steps, left, accountant), delta, steps * overflow)
    z, rate, steps = _fewest_steps(z, rate, steps)
    if accountant == "pld" and z >= SMALLEST_PLD_NOISE:
        found = privacy_loss.epsilon(z, rate, steps, delta)
        if math.isfinite(found):
            return found
    with quiet():
        return float(renyi([(z, rate, steps)]).get_epsilon(delta))


def _fewest_steps(z: float, rate: float, steps: int) -> tuple[float, float, int]:
    """T Gaussian releases of full batches equal one with sqrt(T) times less noise, exactly."""
    return (z / math.sqrt(steps), 1.0, 1) if rate >= ALL else (z, rate, steps)


@lru_cache(maxsize=256)
def _calibrated(
    target: float,
    delta: float,
    rate: float,
    steps: int,
    accountant: str,
    before: _PlainEvents,
    overflow: float = 0.0,
) -> float:
    def total(log_z: float) -> float:
        if before:
            return _filter_epsilon((*before, (math.exp(log_z), rate, steps)), delta)
        return _epsilon(math.exp(log_z), rate, steps, delta, accountant, overflow)

    guess = max(0.5, rate * math.sqrt(2 * steps * math.log(1 / delta)) / target)
    return smallest_noise(total, target, guess=guess, words=f"target_epsilon={target} at target_delta={delta}")
