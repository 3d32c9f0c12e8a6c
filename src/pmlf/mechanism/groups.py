"""Group privacy: what a guarantee for one record means for several records of one person."""

from __future__ import annotations

import math

from scipy import optimize

from pmlf.basics.arguments import require_count
from pmlf.mechanism import accounting

_MOST_GROUP = 1000
_LEAST_PLD_DELTA = 1e-9  # below, the Renyi accountant: it has no smallest delta
_LEAST_LOG_DELTA = -690.0  # e^-690 is near the smallest float


def group_epsilon(*, noise_multiplier: float, sample_rate: float, steps: int, delta: float, group: int) -> float:
    """epsilon at delta of T releases for adding or removing a whole group of g records.

    The smaller of two upper bounds:

    - a release that is (e, d)-private for one record is (g e, d (exp(g e) - 1) / (exp(e) - 1))-private for g records;
      d is chosen so that the second number is `delta`;
    - a batch holds some of the group with probability 1 - (1 - q)^g, and they move the clipped sum by at most g C: a
      Gaussian with noise multiplier z / g at that sampling rate.

    Args:
        noise_multiplier: z, the standard deviation of the noise divided by the clip norm.
        sample_rate: q, the probability that a record joins a batch.
        steps: T, the number of releases; 0 spends nothing.
        delta: the probability at which epsilon is stated.
        group: g, the number of records of one person.

    Returns:
        epsilon, an upper bound; infinite if neither bound is finite.

    Raises:
        ValueError: an argument is out of range.

    >>> one = dict(noise_multiplier=4.0, sample_rate=0.01, steps=1000, delta=1e-5)
    >>> round(group_epsilon(**one, group=1), 2), 1 < group_epsilon(**one, group=5) < 3
    (0.27, True)
    """
    require_count("group", group, "it is the number of records of one person", most=_MOST_GROUP)
    mechanism = {"noise_multiplier": noise_multiplier, "sample_rate": sample_rate, "steps": steps}
    alone = accounting.epsilon(**mechanism, delta=delta)  # type: ignore[arg-type]
    if group == 1 or steps == 0:
        return alone
    together = accounting.epsilon(
        noise_multiplier=noise_multiplier / group,
        sample_rate=-math.expm1(group * math.log1p(-sample_rate)) if sample_rate < 1 else 1.0,
        steps=steps,
        delta=delta,
    )
    return min(together, _one_after_another(mechanism, delta, group))


def _one_after_another(mechanism: dict[str, float], delta: float, group: int) -> float:
    """The first bound: g times the epsilon at the delta whose sum over the group is `delta`."""

    def epsilon(log_delta: float) -> float:
        smaller = math.exp(log_delta)
        accountant = "pld" if smaller >= _LEAST_PLD_DELTA else "rdp"
        return accounting.epsilon(**mechanism, delta=smaller, accountant=accountant)  # type: ignore[arg-type]

    def excess(log_delta: float) -> float:
        """log of d (exp(g e) - 1) / (exp(e) - 1) / delta, without overflow."""
        e = max(epsilon(log_delta), 1e-12)
        return log_delta + _log_expm1(group * e) - _log_expm1(e) - math.log(delta)

    low, high = _LEAST_LOG_DELTA, math.log(delta)
    if excess(low) > 0:
        return math.inf
    root = float(optimize.brentq(excess, low, high, xtol=1e-3)) if excess(high) > 0 else high
    while excess(root) > 0:  # the curve has small steps: end on the safe side of the root
        root -= 1e-2
    return group * epsilon(root)


def _log_expm1(x: float) -> float:
    return x if x > 50 else math.log(math.expm1(x))
