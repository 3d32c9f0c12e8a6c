"""The paper's convergence bound (Theorem 1) and its condition on the learning rate."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from pmlf.basics.arguments import require_count, require_positive
from pmlf.mechanism.theory import gamma_dp, gamma_sgd, rho_squared


@final
@dataclass(frozen=True, kw_only=True)
class Problem:
    """The constants of the task in Theorem 1.

    Attributes:
        initial_gap: f(x_0) - f*.
        smoothness: L, the Lipschitz constant of the gradient.
        gradient_bound: G, a bound on the gradient's norm.
        sampling_deviation: sigma_SGD, the standard deviation of a sample's gradient.
        dimension: d, the number of parameters.

    Raises:
        ValueError: A constant is not positive and finite.

    >>> Problem(initial_gap=2, smoothness=1, gradient_bound=1, sampling_deviation=1, dimension=100).dimension
    100
    """

    initial_gap: float
    smoothness: float
    gradient_bound: float
    sampling_deviation: float
    dimension: int

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            require_positive(name, value, "Theorem 1 needs a positive number")


@final
@dataclass(frozen=True, kw_only=True)
class ConvergenceBound:
    """The four terms of Theorem 1, without the constants hidden in its O().

    Attributes:
        optimisation: (f(x_0) - f*) / (eta T).
        clipping: L eta C^2.
        noise: L eta d sigma_DP^2 / Gamma_DP.
        sampling: (G^2 + sigma_SGD^2 / rho^2) / Gamma_SGD.
        within_step_size: Whether the learning rate is at most `step_size_limit`.
    """

    optimisation: float
    clipping: float
    noise: float
    sampling: float
    within_step_size: bool

    @property
    def total(self) -> float:
        """The sum of the four terms."""
        return self.optimisation + self.clipping + self.noise + self.sampling


def step_size_limit(problem: Problem, *, k: int, clip_norm: float, noise_scale: float) -> float:
    """eta <= sqrt(sigma_SGD^2 / (L^2 k^3 (C^2 + d sigma_DP^2))), the condition of Lemma 2 and Theorem 1.

    Args:
        problem: The constants of the task.
        k: The number of iterates in the momentum.
        clip_norm: C.
        noise_scale: sigma_DP = z C / B, the standard deviation of the noise on the mean.

    Returns:
        The largest learning rate that the theorem allows.

    Raises:
        ValueError: An argument is out of range.

    >>> task = Problem(initial_gap=2, smoothness=1, gradient_bound=1, sampling_deviation=1, dimension=100)
    >>> step_size_limit(task, k=1, clip_norm=0.6, noise_scale=0.08)
    1.0
    """
    require_count("k", k, "it is the number of iterates", most=10**7)
    require_positive("clip_norm", clip_norm, "it is C")
    require_positive("noise_scale", noise_scale, "it is z C / B")
    squared_update = _square(clip_norm) + problem.dimension * _square(noise_scale)
    return problem.sampling_deviation / (problem.smoothness * math.sqrt(float(k) ** 3 * squared_update))


def convergence_bound(
    problem: Problem,
    *,
    learning_rate: float,
    steps: int,
    clip_norm: float,
    noise_scale: float,
    a: Sequence[float],
    b: Sequence[float],
    beta: float,
    k: int,
    autocorrelation: Sequence[float],
) -> ConvergenceBound:
    """(f(x_0)-f*)/(eta T) + L eta C^2 + L eta d sigma_DP^2/Gamma_DP + (G^2 + sigma_SGD^2/rho^2)/Gamma_SGD.

    The paper's bound on the mean of ||grad f(x_t)||^2, up to a constant (Theorem 1). The proof drops terms of unknown
    sign, so use it to compare settings, not as a guarantee.

    Args:
        problem: The constants of the task.
        learning_rate: eta.
        steps: The number of steps, T.
        clip_norm: C.
        noise_scale: sigma_DP = z C / B, the standard deviation of the noise on the mean.
        a: Feedback coefficients of the filter.
        b: Feedforward coefficients of the filter.
        beta: The decay of the momentum weights.
        k: The number of iterates in the momentum.
        autocorrelation: The gradient autocorrelation c_0, c_1, ..., at least T values.

    Returns:
        The four terms, and whether the learning rate is within the theorem's condition.

    Raises:
        ValueError: An argument is out of range, or Gamma_SGD is undefined.

    >>> task = Problem(initial_gap=2, smoothness=1, gradient_bound=1, sampling_deviation=1, dimension=100)
    >>> bound = convergence_bound(task, learning_rate=0.1, steps=100, clip_norm=1.0, noise_scale=0.01,
    ...                           a=(-0.9,), b=(0.1,), beta=0.1, k=2, autocorrelation=[0.99**r for r in range(100)])
    >>> round(bound.optimisation, 3), round(bound.clipping, 3), bound.within_step_size
    (0.2, 0.1, True)
    """
    require_positive("learning_rate", learning_rate, "it is eta")
    limit = step_size_limit(problem, k=k, clip_norm=clip_norm, noise_scale=noise_scale)
    dp_ratio = gamma_dp(a=a, b=b, beta=beta, k=k, autocorrelation=autocorrelation, steps=steps)
    sgd_ratio = gamma_sgd(a=a, b=b, beta=beta, k=k, autocorrelation=autocorrelation, steps=steps)
    scale = problem.smoothness * learning_rate
    variance = _square(problem.sampling_deviation) / rho_squared(beta, k)
    return ConvergenceBound(
        optimisation=problem.initial_gap / (learning_rate * steps),
        clipping=scale * _square(clip_norm),
        noise=scale * problem.dimension * _square(noise_scale) / dp_ratio,
        sampling=(_square(problem.gradient_bound) + variance) / sgd_ratio,
        within_step_size=learning_rate <= limit,
    )


def _square(value: float) -> float:
    """The square; infinite on overflow, where ** raises."""
    return float(value) * float(value)
