"""Fitting noise shapes to what training does with the noise: filter, learning rates and curvature.

The privacy of a shape does not depend on how well it fits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, final

import numpy as np
from scipy import optimize, signal

from pmlf.basics.arguments import is_number, require_count
from pmlf.mechanism import accounting
from pmlf.mechanism.filters import LowPass
from pmlf.mechanism.shapes import MOST_BANDS, MOST_DENSE_STEPS, Floats, NoiseShape

_USUAL_STEPS = 500
_DECIMALS = 4  # of fitted coefficients: the optimum is flat, and other machines find the same numbers
_OVERFLOW = 1e4  # above the logarithm of any number
_CANDIDATES = (1, 2, 4, 8, 16, 32)
_CURVATURES = (0.0, 0.02, 0.1, 1.0)
FILTER = LowPass(a=(-0.9,), b=(0.1,), corrected=False)  # the paper's; its bias correction magnifies early noise


@final
@dataclass(frozen=True, kw_only=True)
class Workload:
    """What noise does to the parameters: the filter, the learning rates and the curvature that it meets.

    In a direction of curvature h / learning rate, the noise e_t of the parameters follows
    e_{t+1} = e_t - rate_t * filter(h e + x)_t. With h = 0 and no filter these are prefix sums of the noise.

    Attributes:
        steps: The number of steps, T.
        low_pass: The filter on the noisy gradients.
        rates: The learning rate of each step relative to the first; empty if it is constant.
        curvatures: Learning rate times eigenvalue of the Hessian, in [0, 2). The errors are averaged over them.

    Raises:
        ValueError: A value is out of range.

    >>> Workload(steps=100).curvatures
    (0.0, 0.02, 0.1, 1.0)
    """

    steps: int = _USUAL_STEPS
    low_pass: LowPass = field(default=FILTER)
    rates: tuple[float, ...] = ()
    curvatures: tuple[float, ...] = _CURVATURES

    def __post_init__(self) -> None:
        require_count("steps", self.steps, "it is the number of steps of the run", most=10**6)
        if not self.curvatures or not all(is_number(h) and 0 <= h < 2 for h in self.curvatures):
            raise ValueError(f"curvatures={self.curvatures} are not numbers in [0, 2): give (0.0, 0.1) for example")
        if self.rates and len(self.rates) != self.steps:
            raise ValueError(f"rates has {len(self.rates)} numbers for {self.steps} steps: give one per step")
        if not all(is_number(rate) and 0 <= rate <= 1e6 for rate in self.rates):
            raise ValueError("rates are not numbers of at least 0: give the learning rate of each step over the first")
        if not self.time_invariant and self.steps > MOST_DENSE_STEPS:
            raise ValueError(
                f"steps={self.steps} is more than {MOST_DENSE_STEPS} for a workload with changing rates or a bias "
                "correction: give a shorter run with a schedule of the same form, the shape hardly depends on it"
            )

    @property
    def time_invariant(self) -> bool:
        """Whether noise of every step has the same effect later: no schedule and no bias correction."""
        return not self.rates and not (self.low_pass.corrected and not self.low_pass.identity)

    def unfiltered(self) -> Workload:
        """The same without a filter: what errors are compared with."""
        return replace(self, low_pass=LowPass())


def usual_workload(low_pass: LowPass, steps: int = _USUAL_STEPS) -> Workload:
    """The workload of a filter at a constant rate: the usual curvatures, but not those at which training diverges.

    Args:
        low_pass: The filter on the noisy gradients.
        steps: The number of steps.

    >>> usual_workload(FILTER).curvatures, usual_workload(LowPass(a=(0.9,), b=(1.9,))).curvatures
    ((0.0, 0.02, 0.1, 1.0), (0.0, 0.02, 0.1))
    """
    stable = tuple(  # at 0 the loop is open, and the filter is stable
        h for h in _CURVATURES if h == 0.0 or np.max(np.abs(np.roots(_closed_loop(low_pass, h)))) <= 1 + 1e-9
    )
    return Workload(steps=steps, low_pass=low_pass, curvatures=stable)


def error(shape: NoiseShape, workload: Workload) -> float:
    """The noise in the parameters at noise multiplier 1, over that of white noise without a filter.

    It is the root of the mean square over steps and curvatures, where each curvature's is relative to white noise.

    Args:
        shape: The noise shape.
        workload: What the noise does to the parameters.

    Returns:
        The ratio. Multiply it by the noise multiplier to compare shapes at equal privacy.

    >>> round(error(NoiseShape.white(), Workload(steps=100).unfiltered()), 6)
    1.0
    """
    value, _ = _Objective(workload).value_and_slope(np.asarray(shape.coefficients))
    return math.sqrt(value)


def banded(bands: int, steps: int = _USUAL_STEPS, workload: Workload | None = None) -> NoiseShape:
    """The shape with b bands that leaves the least noise in the parameters.

    Args:
        bands: b, from 1 (white noise) to 64.
        steps: The number of steps, T; not used if a workload is given.
        workload: Filter, learning rates and curvatures. By default the paper's filter {-0.9}{0.1} without bias
            correction, a constant rate, and curvatures from 0 to 1.

    Returns:
        The shape. Its privacy does not depend on how well it fits.

    Raises:
        ValueError: An argument is out of range.

    >>> banded(2, 100).bands, banded(1, 100) == NoiseShape.white()
    (2, True)
    """
    require_count("bands", bands, "it is the number of bands of the noise shape; 1 is white", most=MOST_BANDS)
    if bands == 1:
        return NoiseShape.white()
    return _fitted(int(bands), workload or Workload(steps=steps))


@lru_cache(maxsize=256)
def _fitted(bands: int, workload: Workload) -> NoiseShape:
    if bands == 1:
        return NoiseShape.white()
    objective = _Objective(workload)

    def log_error(free: Floats) -> tuple[float, Floats]:
        with np.errstate(over="ignore", invalid="ignore"):
            value, slope = objective.value_and_slope(np.concatenate(([1.0], free)))
        if not (math.isfinite(value) and np.all(np.isfinite(slope))):  # an inverse that grows without bound
            return _OVERFLOW, np.zeros(len(free))
        return math.log(value), slope[1:] / value

    # Start at half as many bands, and at the square root of the prefix sums, (1 - x)^(-1/2).
    fewer = np.asarray(_fitted(bands // 2, workload).coefficients)
    root = np.cumprod([1.0, *((r - 0.5) / r for r in range(1, bands))])
    starts = [np.pad(fewer / fewer[0], (0, bands - len(fewer)))[1:], root[1:]]
    options: Any = {"ftol": 1e-15, "gtol": 1e-9, "maxiter": 5000, "maxfun": 10_000}
    found = [optimize.minimize(log_error, start, jac=True, method="L-BFGS-B", options=options) for start in starts]
    smallest = min(found, key=lambda one: float(one.fun))
    return NoiseShape((1.0, *np.round(smallest.x, _DECIMALS).tolist()))


@final
class _Objective:
    """error^2 as a function of the coefficients, with its gradient."""

    def __init__(self, workload: Workload) -> None:
        self._steps = workload.steps
        self._weights = (workload.steps - np.arange(workload.steps)) / workload.steps
        self._responses: list[Floats] = []  # one per curvature, if the effect of noise depends on its age alone
        self._gram: Floats | None = None  # else the sum of effect' effect over the curvatures
        white, count = workload.unfiltered(), len(workload.curvatures)
        for curvature in workload.curvatures:
            if workload.time_invariant:
                scale = math.sqrt(count * self._power(_response(white, curvature)))
                self._responses.append(_response(workload, curvature) / scale)
            else:
                effect, base = _effects(workload, curvature), _effects(white, curvature)
                part = effect.T @ effect / (count * float(np.sum(base**2)))
                self._gram = part if self._gram is None else self._gram + part

    def _power(self, response: Floats) -> float:
        return float(np.sum(self._weights * response**2))

    def value_and_slope(self, coefficients: Floats) -> tuple[float, Floats]:
        square = float(np.sum(coefficients**2))  # |c|^2 (noise by c): the noise by c / |c|
        value, slope = self._toeplitz(coefficients) if self._gram is None else self._dense(coefficients)
        return square * value, square * slope + 2 * coefficients * value

    def _toeplitz(self, c: Floats) -> tuple[float, Floats]:
        value, slope = 0.0, np.zeros(len(c))
        for response in self._responses:
            noise = signal.lfilter([1.0], c, response)
            value += self._power(noise)
            twice = signal.lfilter([1.0], c, noise)  # d noise / d c_r = -twice, r steps later
            weighted = self._weights * noise
            slope -= 2 * np.array([weighted[r:] @ twice[: max(0, self._steps - r)] for r in range(len(c))])
        return value, slope

    def _dense(self, c: Floats) -> tuple[float, Floats]:
        """tr(M A^-1 A^-T) with M the Gram matrix of the effects, and its derivative by the bands of A."""
        assert self._gram is not None
        left = signal.lfilter([1.0], c, self._gram[::-1], axis=0)[::-1]  # A^-T M: solves with the transpose
        both = signal.lfilter([1.0], c, left[:, ::-1], axis=1)[:, ::-1]  # A^-T M A^-1
        value = float(np.trace(both))
        slopes = signal.lfilter([1.0], c, both, axis=0)  # A^-1 A^-T M A^-1
        return value, np.array([-2 * np.trace(slopes, offset=r) for r in range(len(c))])


def _response(workload: Workload, curvature: float) -> Floats:
    """The effect of noise at one step on the parameters of that and all later steps."""
    denominator = _closed_loop(workload.low_pass, curvature)
    response = signal.lfilter(workload.low_pass.b, denominator, np.arange(workload.steps) == 0.0)
    return _finite(response, workload, curvature)


def _closed_loop(low_pass: LowPass, curvature: float) -> Floats:
    """(1 - x) a(x) + h x b(x). Training at curvature h is stable if its roots, in 1/x, are within the unit circle."""
    feedback = np.convolve((1.0, *low_pass.a), (1.0, -1.0))
    denominator = np.zeros(max(len(feedback), len(low_pass.b) + 1))
    denominator[: len(feedback)] += feedback
    denominator[1 : len(low_pass.b) + 1] += curvature * np.asarray(low_pass.b)
    return denominator


def _effects(workload: Workload, curvature: float) -> Floats:
    """Row t: the effect of the noise of every step on the parameters after step t."""
    steps, low_pass = workload.steps, workload.low_pass
    corrections = low_pass.corrections(steps)
    rates = np.asarray(workload.rates or np.ones(steps))
    a, b = (np.pad(c, (0, low_pass.order + 1 - len(c))) for c in ((1.0, *low_pass.a), low_pass.b))
    memory = np.zeros((low_pass.order + 1, steps))
    rows, parameters = np.zeros((steps, steps)), np.zeros(steps)
    for t in range(steps):
        gradient = curvature * parameters
        gradient[t] += 1.0
        output = memory[0] + b[0] * gradient
        memory[:-1] = memory[1:] + b[1:, None] * gradient - a[1:, None] * output
        parameters = parameters - rates[t] * output / corrections[t]
        rows[t] = parameters
    return _finite(rows, workload, curvature)


def _finite(response: Floats, workload: Workload, curvature: float) -> Floats:
    if not np.all(np.isfinite(response)) or np.max(np.abs(response)) > 1e9:
        raise ValueError(
            f"curvatures contains {curvature}, at which training with {workload.low_pass} diverges: leave it out"
        )
    return response


@final
@dataclass(frozen=True, kw_only=True)
class Choice:
    """The noise shape that `best` chooses.

    Attributes:
        shape: The shape.
        noise_multiplier: The noise multiplier z at which it meets the target epsilon.
        noise: By number of bands: z times `error`, over that of white noise without a filter at its own z.
    """

    shape: NoiseShape
    noise_multiplier: float
    noise: dict[int, float]


def best(
    *,
    records: int,
    batch_size: float,
    steps: int,
    epsilon: float,
    delta: float,
    workload: Workload | None = None,
) -> Choice:
    """Choose the number of bands with the least noise in the parameters at a target epsilon.

    Args:
        records: The number of records, n.
        batch_size: The expected batch size, B.
        steps: The number of steps, T.
        epsilon: The target epsilon.
        delta: The delta of the guarantee.
        workload: Filter, learning rates and curvatures; by default those of `banded`.

    Returns:
        The shape, its noise multiplier, and the noise of every candidate.

    Raises:
        ValueError: An argument is out of range.

    >>> chosen = best(records=50_000, batch_size=1000, steps=400, epsilon=8.0, delta=2e-5)
    >>> chosen.shape.bands > 1, chosen.noise[chosen.shape.bands] < chosen.noise[1]
    (True, True)
    """
    require_count("records", records, "it is the number of records")
    require_count("steps", steps, "it is the number of steps")
    if not (is_number(batch_size) and 0 < batch_size <= records):
        raise ValueError(f"batch_size={batch_size} is not in (0, {records}]: it is the expected size of a draw")
    load = workload or Workload(steps=steps)
    most = min(steps, records / batch_size)
    candidates = [bands for bands in _CANDIDATES if bands <= max(most, 1)]
    multipliers = {
        bands: accounting.noise_multiplier(
            target_epsilon=epsilon, target_delta=delta, sample_rate=batch_size / records, steps=steps, bands=bands
        )
        for bands in candidates
    }
    shapes = {bands: banded(bands, workload=load) for bands in candidates}
    noise = {bands: multipliers[bands] / multipliers[1] * error(shapes[bands], load) for bands in candidates}
    chosen = min(noise, key=lambda bands: noise[bands])
    return Choice(shape=shapes[chosen], noise_multiplier=multipliers[chosen], noise=noise)
