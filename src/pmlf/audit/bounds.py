"""Lower bounds on epsilon from scores with and without a record: statistics alone, no model in sight.

Each holds with a confidence chosen beforehand. What a bound may not do is look at the data it judges: thresholds are
chosen on one half of the scores and used on the other, and the number of guesses is fixed before there are any.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from scipy import optimize, special, stats

from pmlf.basics.arguments import is_number, require_count

Floats = NDArray[np.float64]

_MOST_THRESHOLDS = 500
_LARGEST_EPSILON = 100.0
_SMALLEST_MU, _LARGEST_MU = 1e-12, 1e4


def clopper_pearson(hits: NDArray[np.int64], trials: int, failure: float) -> tuple[Floats, Floats]:
    """Lower and upper bounds on a probability seen in `hits` of `trials`, each wrong with probability `failure`.

    >>> low, high = clopper_pearson(np.array([0, 10]), 10, 0.05)
    >>> low.round(3), high.round(3)
    (array([0.   , 0.741]), array([0.259, 1.   ]))
    """
    low = special.betaincinv(np.maximum(hits, 1), trials - hits + 1, failure)
    high = special.betaincinv(hits + 1, np.maximum(trials - hits, 1), 1 - failure)
    return np.where(hits == 0, 0.0, low), np.where(hits == trials, 1.0, high)


def raw_epsilon(inside: Floats, outside: Floats, delta: float, confidence: float) -> float:
    """The (epsilon, delta) definition itself, P[S | D'] <= e^epsilon P[S | D] + delta, for events score > threshold
    and their complements, with Clopper-Pearson bounds on both probabilities."""
    _check_probability("delta", delta)
    _check_probability("confidence", confidence)
    choose, judge = _halves(inside, outside)
    thresholds = _candidates(*choose)
    found = [bound(*choose, thresholds, delta, confidence) for bound in (_by_presence, _by_absence)]
    best = max(range(2), key=lambda i: float(found[i].max()))
    threshold = thresholds[[int(found[best].argmax())]]
    return max(float((_by_presence, _by_absence)[best](*judge, threshold, delta, confidence)[0]), 0.0)


def gaussian_mu(inside: Floats, outside: Floats, confidence: float) -> float:
    """mu of a mechanism that claims to be mu-GDP (Dong, Roth & Su 2019), as T full-batch Gaussian steps do.

    The mean of a test's accuracies on the two sides is then at most Phi(mu/2). The number of right answers is a sum of
    independent coins whose mean chance is at most that; its upper tail is at most a binomial's (Hoeffding 1956), which
    Clopper-Pearson inverts.
    """
    _check_probability("confidence", confidence)
    choose, judge = _halves(inside, outside)
    thresholds = _candidates(*choose)
    threshold = thresholds[int(np.argmax(_balanced_hits(*choose, thresholds)))]
    each = min(map(len, judge))  # as many from either side: the mean chance is the mean of the two accuracies
    hits = _balanced_hits(judge[0][:each], judge[1][:each], np.array([threshold]))
    accuracy = float(clopper_pearson(hits, 2 * each, 1 - confidence)[0][0])
    return max(2 * float(special.ndtri(accuracy)), 0.0)


def gaussian_epsilon(mu: float, delta: float) -> float:
    """epsilon at delta of a mu-GDP mechanism, exactly (Balle & Wang 2018).

    >>> round(gaussian_epsilon(1.0, 1e-5), 3)
    4.377
    """
    _check_probability("delta", delta)
    if not (is_number(mu) and 0.0 <= mu < math.inf):
        raise ValueError(f"mu={mu} is no separation of two Gaussians: give a finite number of at least 0")
    if mu > _LARGEST_MU:
        raise ValueError(f"mu={mu} is above {_LARGEST_MU:g}, where nothing is private: give a smaller one")
    if mu < _SMALLEST_MU:  # delta at epsilon 0 is below mu
        return 0.0

    def excess(epsilon: float) -> float:
        spent = special.ndtr(mu / 2 - epsilon / mu) - math.exp(epsilon + special.log_ndtr(-mu / 2 - epsilon / mu))
        return float(spent) - delta

    return _root(excess, mu * mu / 2 + 10 * mu + mu * math.sqrt(-2 * math.log(delta)))


def one_run_epsilon(
    scores: Floats, included: NDArray[np.bool_], guesses: int, delta: float, confidence: float
) -> float:
    """Canaries included by independent fair coins, the `guesses` most extreme scores guessed, half of them each way.

    Steinke, Nasr & Jagielski, "Privacy auditing with one (1) training run" (2023), Theorem 5.2: no assumption on how
    the scores depend on each other. `guesses` must not depend on the scores.
    """
    require_count("guesses", guesses, "it counts canaries guessed, of those there are", least=2, most=len(scores))
    _check_probability("confidence", confidence)
    order = np.argsort(scores, kind="stable")
    correct = int((~included[order[: guesses // 2]]).sum() + included[order[len(order) - guesses // 2 :]].sum())
    guesses = 2 * (guesses // 2)

    def excess(epsilon: float) -> float:
        return one_run_p_value(len(scores), guesses, correct, epsilon, delta) - (1 - confidence)

    return _root(excess, _LARGEST_EPSILON)


def one_run_p_value(canaries: int, guesses: int, correct: int, epsilon: float, delta: float) -> float:
    """The largest probability with which an (epsilon, delta)-DP mechanism lets so many guesses be right.

    >>> round(one_run_p_value(100, 100, 60, 0.0, 0.0), 4)  # coin tosses
    0.0284
    """
    require_count("canaries", canaries, "it counts coins tossed")
    require_count("guesses", guesses, "it counts the canaries guessed", most=canaries)
    require_count("correct", correct, "it counts the guesses that were right", least=0, most=guesses)
    if not (is_number(epsilon) and 0.0 <= epsilon < math.inf):
        raise ValueError(f"epsilon={epsilon} is no privacy loss: give a finite number of at least 0")
    if not (is_number(delta) and 0.0 <= delta < 1.0):
        raise ValueError(f"delta={delta} is not in [0, 1)")
    chance = float(special.expit(float(epsilon)))
    tail = float(stats.binom.sf(correct - 1, guesses, chance))
    fewer = np.arange(1, correct + 1)
    below = stats.binom.cdf(correct - 1, guesses, chance) - stats.binom.cdf(correct - 1 - fewer, guesses, chance)
    steepest = float(np.max(below / fewer, initial=0.0))
    return min(tail + 2 * canaries * delta * steepest, 1.0)


def _by_presence(inside: Floats, outside: Floats, thresholds: Floats, delta: float, confidence: float) -> Floats:
    """From scores above a threshold being likelier with the record."""
    return _log_ratio(
        _above(inside, thresholds), len(inside), _above(outside, thresholds), len(outside), delta, confidence
    )


def _by_absence(inside: Floats, outside: Floats, thresholds: Floats, delta: float, confidence: float) -> Floats:
    """From scores up to a threshold being likelier without the record."""
    likely, rare = len(outside) - _above(outside, thresholds), len(inside) - _above(inside, thresholds)
    return _log_ratio(likely, len(outside), rare, len(inside), delta, confidence)


def _log_ratio(
    likely: NDArray[np.int64], of_likely: int, rare: NDArray[np.int64], of_rare: int, delta: float, confidence: float
) -> Floats:
    failure = (1 - confidence) / 2  # for each of the two probabilities
    low = clopper_pearson(likely, of_likely, failure)[0]
    high = clopper_pearson(rare, of_rare, failure)[1]
    return np.log(np.maximum(low - delta, 1e-300) / high)


def _balanced_hits(inside: Floats, outside: Floats, thresholds: Floats) -> NDArray[np.int64]:
    """Right answers of "with the record if the score is above the threshold"."""
    return _above(inside, thresholds) + len(outside) - _above(outside, thresholds)


def _above(scores: Floats, thresholds: Floats) -> NDArray[np.int64]:
    return len(scores) - np.searchsorted(np.sort(scores), thresholds, side="right")


def _halves(inside: Floats, outside: Floats) -> tuple[tuple[Floats, Floats], tuple[Floats, Floats]]:
    """(to choose a threshold on, to judge by)."""
    for name, scores in (("inside", inside), ("outside", outside)):
        if not isinstance(scores, np.ndarray) or scores.ndim != 1 or scores.dtype != np.float64 or len(scores) < 2:
            raise ValueError(f"{name} is not a vector of scores: give an array of at least 2 float64 numbers")
        if not np.isfinite(scores).all():
            raise ValueError(f"{name} has scores that are not finite: a bound cannot be computed from them")
    return (inside[::2], outside[::2]), (inside[1::2], outside[1::2])


def _candidates(inside: Floats, outside: Floats) -> Floats:
    values = np.unique(np.concatenate([inside, outside]))
    return values if len(values) <= _MOST_THRESHOLDS else np.quantile(values, np.linspace(0, 1, _MOST_THRESHOLDS))


def _check_probability(name: str, value: float) -> None:
    if not (is_number(value) and 0.0 < value < 1.0):
        raise ValueError(f"{name}={value} is not in (0, 1): it is a probability")


def _root(excess: Callable[[float], float], largest: float) -> float:
    """Where a monotone function passes 0 between 0 and `largest`, at the end it is nearer to otherwise."""
    at_zero, at_largest = excess(0.0), excess(largest)
    if at_zero * at_largest >= 0:
        return 0.0 if abs(at_zero) <= abs(at_largest) else largest
    return float(optimize.brentq(excess, 0.0, largest, xtol=1e-6))
