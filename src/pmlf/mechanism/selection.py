"""Privacy of choosing the best of a random number of runs: only the best is released, and all of them are paid for."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import dp_accounting
from dp_accounting import dp_event, rdp
from scipy import optimize, stats

from pmlf.basics.arguments import is_number
from pmlf.mechanism.calibration import smallest_noise
from pmlf.mechanism.events import Event, check_delta, check_mechanism
from pmlf.mechanism.renyi import quiet

# The distributions of the number of runs, with their shapes in the family of Papernot & Steinke (2021).
DISTRIBUTIONS: dict[str, float] = {"logarithmic": 0.0, "geometric": 1.0, "poisson": math.inf}
_MOST_MEAN = 10_000.0


@dataclass(frozen=True, kw_only=True)
class Selection:
    """The best of K runs, where K is random and its distribution is public (Papernot & Steinke 2021).

    Every run draws its settings at random from a public list, and all have the same mechanism. Neither K nor any run
    but the best is released.

    Attributes:
        mean: The mean of K, at least 1.
        distribution: "logarithmic" costs least and is often 1; "geometric" is in between; "poisson" is near its mean,
            costs most for many runs, and may be 0.

    Raises:
        ValueError: The mean or the distribution is not possible.

    >>> chosen = Selection(mean=10.0)
    >>> one = dict(noise_multiplier=2.0, sample_rate=0.05)
    >>> round(chosen.epsilon(Event(**one), steps=400, delta=1e-5), 2)
    4.79
    """

    mean: float
    distribution: str = "geometric"

    def __post_init__(self) -> None:
        if self.distribution not in DISTRIBUTIONS:
            names = ", ".join(DISTRIBUTIONS)
            raise ValueError(f"distribution={self.distribution!r} is not known: give one of {names}")
        if not (is_number(self.mean) and 1.0 <= self.mean <= _MOST_MEAN):
            raise ValueError(f"mean={self.mean} is not in [1, {_MOST_MEAN:g}]: it is the mean number of trials")

    def epsilon(self, event: Event, *, steps: int, delta: float) -> float:
        """epsilon at delta of everything: an upper bound by Renyi divergences.

        Args:
            event: One step of a run.
            steps: The number of steps of a run, T.
            delta: The probability at which epsilon is stated.

        Raises:
            ValueError: An argument is out of range, or draws are cut to a largest batch.
        """
        if event.overflow:
            raise ValueError("`largest_batch` has no accounting for the best of several runs: leave it out")
        check_mechanism(event.noise_multiplier, event.sample_rate, steps, "rdp")
        check_delta("delta", delta, "rdp")
        shape = DISTRIBUTIONS[self.distribution]
        return _epsilon(float(event.noise_multiplier), float(event.sample_rate), steps, delta, float(self.mean), shape)

    def noise_multiplier(self, *, target_epsilon: float, target_delta: float, sample_rate: float, steps: int) -> float:
        """The smallest noise multiplier of each run with which everything stays within the target.

        Raises:
            ValueError: An argument is out of range, or no noise meets the target.
        """
        if not (is_number(target_epsilon) and target_epsilon > 0):
            raise ValueError(f"target_epsilon={target_epsilon} is not above 0: give the epsilon of all trials together")

        def total(log_z: float) -> float:
            event = Event(noise_multiplier=math.exp(log_z), sample_rate=sample_rate)
            return self.epsilon(event, steps=steps, delta=target_delta)

        words = f"target_epsilon={target_epsilon} at target_delta={target_delta}"
        return smallest_noise(total, target_epsilon, guess=2.0, words=words)

    def number(self, uniform: float) -> int:
        """K by the inverse of its distribution function at a uniform number in [0, 1).

        >>> [Selection(mean=4.0).number(u) for u in (0.0, 0.5, 0.99)]
        [1, 3, 17]
        """
        if self.mean == 1.0 and self.distribution != "poisson":
            return 1
        if self.distribution == "poisson":
            return int(stats.poisson.ppf(uniform, self.mean)) if uniform > 0 else 0
        if self.distribution == "geometric":
            return max(1, int(stats.geom.ppf(uniform, 1 / self.mean)))
        return _logarithmic_quantile(uniform, _logarithmic(self.mean))


def _logarithmic_quantile(uniform: float, gamma: float) -> int:
    """The smallest k with sum_{i <= k} (1 - gamma)^i / (i log(1/gamma)) above a uniform number."""
    number, term = 1, (1 - gamma) / -math.log(gamma)
    below = term
    while below <= uniform and term > 1e-20:
        term *= (1 - gamma) * number / (number + 1)
        number += 1
        below += term
    return number


@lru_cache(maxsize=64)
def _logarithmic(mean: float) -> float:
    """gamma with (1/gamma - 1) / log(1/gamma) = mean."""
    return float(optimize.brentq(lambda g: (1 / g - 1) / -math.log(g) - mean, 1e-12, 1 - 1e-9, xtol=1e-15))


@lru_cache(maxsize=4096)
def _epsilon(z: float, rate: float, steps: int, delta: float, mean: float, shape: float) -> float:
    step = dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(z))
    run = dp_accounting.SelfComposedDpEvent(step, steps)
    with quiet():
        total = rdp.RdpAccountant().compose(dp_event.RepeatAndSelectDpEvent(run, mean, shape))
        return float(total.get_epsilon(delta))
