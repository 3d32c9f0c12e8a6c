"""Lower bounds on epsilon from scores with and without a record. Statistics only, no model.

Each bound holds with a given confidence. A threshold is chosen on one half of the scores and used on the other half,
and the number of guesses is fixed in advance, so that no bound depends on the data it is computed from.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from scipy import optimize, special, stats

from pmlf.basics.arguments import is_number, require_count

FloatArray = NDArray[np.float64]

_MOST_THRESHOLDS = 500
_LARGEST_EPSILON = 100.0
_SMALLEST_MU, _LARGEST_MU = 1e-12, 1e4


def clopper_pearson(hits: NDArray[np.int64], trials: int, failure: float) -> tuple[FloatArray, FloatArray]:
    """Clopper-Pearson lower and upper bounds on a probability, from `hits` in `trials`.

    Each of the two bounds is wrong with probability at most `failure`.

    >>> low, high = clopper_pearson(np.array([0, 10]), 10, 0.05)
    >>> low.round(3), high.round(3)
    (array([0.   , 0.741]), array([0.259, 1.   ]))
    """
    low = special.betaincinv(np.maximum(hits, 1), trials - hits + 1, failure)
    high = special.betaincinv(hits + 1, np.maximum(trials - hits, 1), 1 - failure)
    return np.where(hits == 0, 0.0, low), np.where(hits == trials, 1.0, high)


def raw_epsilon(inside: FloatArray, outside: FloatArray, delta: float, confidence: float) -> float:
    """Lower bound on epsilon by the definition of DP, P[S | D'] <= e^epsilon P[S | D] + delta.

    S is the event "score > threshold" or its complement. Both probabilities have Clopper-Pearson bounds.

    Args:
        inside: Scores with the record.
        outside: Scores without it.
        delta: The delta of the claim.
        confidence: Probability that the bound holds.
    """
    _check_probability("delta", delta)
    _check_probability("confidence", confidence)
    choose, judge = _halves(inside, outside)
    thresholds = _candidates(*choose)
    found = [bound(*choose, thresholds, delta, confidence) for bound in (_by_presence, _by_absence)]
    best = max(range(2), key=lambda i: float(found[i].max()))
    threshold = thresholds[[int(found[best].argmax())]]
    return max(float((_by_presence, _by_absence)[best](*judge, threshold, delta, confidence)[0]), 0.0)


def gaussian_mu(inside: FloatArray, outside: FloatArray, confidence: float) -> float:
    """Lower bound on mu of a mechanism that claims mu-GDP (Dong, Roth & Su 2019), such as T full-batch Gaussian steps.

    For a mu-GDP mechanism, the mean accuracy of a test over both sides is at most Phi(mu/2). The number of correct
    answers is a sum of independent coins whose mean probability is at most that. Its upper tail is at most that of a
    binomial (Hoeffding 1956), which Clopper-Pearson inverts.
    """
    _check_probability("confidence", confidence)
    choose, judge = _halves(inside, outside)
    thresholds = _candidates(*choose)
    threshold = thresholds[int(np.argmax(_balanced_hits(*choose, thresholds)))]
    each = min(map(len, judge))  # as many from each side: the mean probability is then the mean of the two accuracies
    hits = _balanced_hits(judge[0][:each], judge[1][:each], np.array([threshold]))
    accuracy = float(clopper_pearson(hits, 2 * each, 1 - confidence)[0][0])
    return max(2 * float(special.ndtri(accuracy)), 0.0)


def gaussian_epsilon(mu: float, delta: float) -> float:
    """Epsilon at delta of a mu-GDP mechanism, exact (Balle & Wang 2018).

    >>> round(gaussian_epsilon(1.0, 1e-5), 3)
    4.377
    """
    _check_probability("delta", delta)
    if not (is_number(mu) and 0.0 <= mu < math.inf):
        raise ValueError(f"mu={mu} is not the distance between two Gaussians: give a finite number of at least 0")
    if mu > _LARGEST_MU:
        raise ValueError(f"mu={mu} is above {_LARGEST_MU:g}, which gives no privacy: give a smaller one")
    if mu < _SMALLEST_MU:  # delta at epsilon 0 is below mu
        return 0.0

    def excess(epsilon: float) -> float:
        spent = special.ndtr(mu / 2 - epsilon / mu) - math.exp(epsilon + special.log_ndtr(-mu / 2 - epsilon / mu))
        return float(spent) - delta

    return _root(excess, mu * mu / 2 + 10 * mu + mu * math.sqrt(-2 * math.log(delta)))


def one_run_epsilon(
    scores: FloatArray, included: NDArray[np.bool_], guesses: int, delta: float, confidence: float
) -> float:
    """Lower bound on epsilon from one run in which independent fair coins include the canaries.

    The canaries with the highest scores are guessed to be included, those with the lowest scores not. Steinke, Nasr &
    Jagielski, "Privacy auditing with one (1) training run" (2023), Theorem 5.2. The scores may depend on each other.

    Args:
        scores: One score per canary.
        included: Which canaries took part.
        guesses: Number of guesses, half of them each way. It must not depend on the scores.
        delta: The delta of the claim.
        confidence: Probability that the bound holds.
    """
    require_count("guesses", guesses, "it is the number of canaries to guess", least=2, most=len(scores))
    _check_probability("confidence", confidence)
    order = np.argsort(scores, kind="stable")
    correct = int((~included[order[: guesses // 2]]).sum() + included[order[len(order) - guesses // 2 :]].sum())
    guesses = 2 * (guesses // 2)

    def excess(epsilon: float) -> float:
        return one_run_p_value(len(scores), guesses, correct, epsilon, delta) - (1 - confidence)

    return _root(excess, _LARGEST_EPSILON)


def one_run_p_value(canaries: int, guesses: int, correct: int, epsilon: float, delta: float) -> float:
    """Largest probability of at least `correct` correct guesses under an (epsilon, delta)-DP mechanism.

    >>> round(one_run_p_value(100, 100, 60, 0.0, 0.0), 4)  # coin tosses
    0.0284
    """
    require_count("canaries", canaries, "it is the number of canaries")
    require_count("guesses", guesses, "it is the number of canaries to guess", most=canaries)
    require_count("correct", correct, "it is the number of correct guesses", least=0, most=guesses)
    if not (is_number(epsilon) and 0.0 <= epsilon < math.inf):
        raise ValueError(f"epsilon={epsilon} is not finite and at least 0: give such a number")
    if not (is_number(delta) and 0.0 <= delta < 1.0):
        raise ValueError(f"delta={delta} is not in [0, 1): it is a probability")
    probability = float(special.expit(float(epsilon)))
    tail = float(stats.binom.sf(correct - 1, guesses, probability))
    fewer = np.arange(1, correct + 1)
    cdf = stats.binom(guesses, probability).cdf
    below = cdf(correct - 1) - cdf(correct - 1 - fewer)
    steepest = float(np.max(below / fewer, initial=0.0))
    return min(tail + 2 * canaries * delta * steepest, 1.0)


def _by_presence(
    inside: FloatArray, outside: FloatArray, thresholds: FloatArray, delta: float, confidence: float
) -> FloatArray:
    """Bounds from the event "score > threshold", which is more likely with the record."""
    return _log_ratio(
        _above(inside, thresholds), len(inside), _above(outside, thresholds), len(outside), delta, confidence
    )


def _by_absence(
    inside: FloatArray, outside: FloatArray, thresholds: FloatArray, delta: float, confidence: float
) -> FloatArray:
    """Bounds from the event "score <= threshold", which is more likely without the record."""
    likely, rare = len(outside) - _above(outside, thresholds), len(inside) - _above(inside, thresholds)
    return _log_ratio(likely, len(outside), rare, len(inside), delta, confidence)


def _log_ratio(
    likely: NDArray[np.int64], of_likely: int, rare: NDArray[np.int64], of_rare: int, delta: float, confidence: float
) -> FloatArray:
    failure = (1 - confidence) / 2  # for each of the two probabilities
    low = clopper_pearson(likely, of_likely, failure)[0]
    high = clopper_pearson(rare, of_rare, failure)[1]
    return np.log(np.maximum(low - delta, 1e-300) / high)


def _balanced_hits(inside: FloatArray, outside: FloatArray, thresholds: FloatArray) -> NDArray[np.int64]:
    """Number of correct answers of the test "score > threshold: with the record"."""
    return _above(inside, thresholds) + len(outside) - _above(outside, thresholds)


def _above(scores: FloatArray, thresholds: FloatArray) -> NDArray[np.int64]:
    return len(scores) - np.searchsorted(np.sort(scores), thresholds, side="right")


def _halves(
    inside: FloatArray, outside: FloatArray
) -> tuple[tuple[FloatArray, FloatArray], tuple[FloatArray, FloatArray]]:
    """Both samples split in two: (scores to choose a threshold on, scores to compute the bound from)."""
    for name, scores in (("inside", inside), ("outside", outside)):
        if not isinstance(scores, np.ndarray) or scores.ndim != 1 or scores.dtype != np.float64 or len(scores) < 2:
            raise ValueError(f"{name} is not a vector of scores: give a float64 array of shape (n,), n >= 2")
        if not np.isfinite(scores).all():
            raise ValueError(f"{name} has scores that are not finite: no bound can be computed from them")
    return (inside[::2], outside[::2]), (inside[1::2], outside[1::2])


def _candidates(inside: FloatArray, outside: FloatArray) -> FloatArray:
    values = np.unique(np.concatenate([inside, outside]))
    return values if len(values) <= _MOST_THRESHOLDS else np.quantile(values, np.linspace(0, 1, _MOST_THRESHOLDS))


def _check_probability(name: str, value: float) -> None:
    if not (is_number(value) and 0.0 < value < 1.0):
        raise ValueError(f"{name}={value} is not in (0, 1): it is a probability")


def _root(excess: Callable[[float], float], largest: float) -> float:
    """Root of a monotone function in [0, largest]; without a root, the end where the function is closer to 0."""
    at_zero, at_largest = excess(0.0), excess(largest)
    if at_zero * at_largest >= 0:
        return 0.0 if abs(at_zero) <= abs(at_largest) else largest
    return float(optimize.brentq(excess, 0.0, largest, xtol=1e-6))
