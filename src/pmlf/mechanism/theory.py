"""The paper's theory in numbers: rho (Lemma 2), kappa (Lemma 1), the two Gammas and the bound (Theorem 1)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import final

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from pmlf.basics.arguments import is_number, require_count, require_positive
from pmlf.mechanism.filters import Floats, LowPass

_MOST = 10**7  # numbers in one array


def momentum_weights(beta: float, k: int) -> Floats:
    """w_j = beta^j / sum_{i<k} beta^i for j = 0, ..., k-1, the current iterate first (Algorithm 1).

    >>> momentum_weights(0.1, 2)
    array([0.90909091, 0.09090909])
    """
    _check_momentum(beta, k)
    powers = float(beta) ** np.arange(k)
    return np.asarray(powers / powers.sum())


def rho_squared(beta: float, k: int) -> float:
    """rho^2 = (1+beta)(1-beta^k) / ((1-beta)(1+beta^k)), k at beta = 1 (Lemma 2).

    It is 1 / sum_j w_j^2: the factor by which per-sample momentum divides the variance of sampling where a
    sample's noise is independent between iterates (Assumption 5).

    >>> round(rho_squared(0.1, 2), 3)
    1.198
    """
    _check_momentum(beta, k)
    # (1-beta^k)/(1-beta) cancels near beta = 1; expm1 keeps its digits.
    powers = k if beta == 1 else -math.expm1(k * math.log(beta)) / (1 - beta)
    return (1 + beta) * powers / (1 + beta**k)


def impulse_response(a: Sequence[float], b: Sequence[float], length: int) -> Floats:
    """kappa_0, ..., kappa_{length-1} of m_t = sum_r kappa_r vbar_{t-r} (Lemma 1).

    By the recursion: the paper's partial fractions need distinct poles and give 0 where a is empty.

    >>> impulse_response((-0.5,), (0.5,), 3)
    array([0.5  , 0.25 , 0.125])
    """
    require_count("length", length, "it counts weights", most=_MOST)
    return LowPass(a, b, corrected=False).impulse_response(length)


def normalised_impulse_response(a: Sequence[float], b: Sequence[float], t: int) -> Floats:
    """khat_{t,r} = kappa_r / sum_{s<=t} kappa_s for r = 0, ..., t: the weights of mhat_t, of sum 1 (Lemma 1).

    >>> normalised_impulse_response((-0.5,), (0.5,), 1)
    array([0.66666667, 0.33333333])
    """
    require_count("t", t, "it numbers the steps from 0", least=0, most=_MOST)
    kappa, corrections = _filter_weights(a, b, t + 1)
    return np.asarray(kappa / corrections[t])


def noise_gain(a: Sequence[float], b: Sequence[float]) -> float:
    """sum_r kappa_r^2: the variance of white noise of variance 1 after the filter, at steady state.

    >>> round(noise_gain((-0.9,), (0.15, -0.05)), 4)
    0.0605
    """
    return LowPass(a, b, corrected=False).noise_gain


def autocorrelation(gradients: Sequence[ArrayLike | torch.Tensor], lags: int | None = None) -> Floats:
    """c_r = mean over t of <g_t, g_{t-r}> / ||g_t||^2 for r = 0, ..., lags (Assumption 4 with c_{-r} = 0).

    `lags` is the largest r, all there are by default. The mean over t is a measurement: Assumption 4 itself
    asks for a c_r that holds at every t.

    >>> autocorrelation([[1.0, 0.0], [1.0, 1.0], [1.0, 0.0]], lags=1)
    array([1.  , 0.75])
    """
    try:
        rows = [_flat(gradient) for gradient in gradients]
    except TypeError as error:
        raise ValueError(f"gradients is a {type(gradients).__name__}: give a sequence of gradient vectors.") from error
    if not rows:
        raise ValueError("gradients is empty: give at least one gradient vector.")
    if len({len(row) for row in rows}) > 1:
        raise ValueError("gradients differ in length: give vectors of one length.")
    vectors = torch.stack(rows)  # steps x d
    steps = len(vectors)
    lags = steps - 1 if lags is None else lags
    if isinstance(lags, bool) or not isinstance(lags, Integral) or not 0 <= lags < steps:
        raise ValueError(f"lags={lags} does not fit {steps} gradients: give 0 to {steps - 1}.")
    squares = vectors.square().sum(1)
    unusable = torch.nonzero(~((squares > 0) & squares.isfinite())).flatten()
    if len(unusable):
        step = int(unusable[0])
        raise ValueError(f"gradients[{step}] has squared norm {float(squares[step])}: leave out zero or infinite ones.")
    ratios = [(vectors[r:] * vectors[: steps - r]).sum(1) / squares[r:] for r in range(lags + 1)]
    return np.array([float(values.mean()) for values in ratios])


def gamma_dp(
    *,
    a: Sequence[float],
    b: Sequence[float],
    beta: float,
    k: int,
    autocorrelation: Sequence[float],
    steps: int,
) -> float:
    """Gamma_DP = sum_t sum_r khat_{t,r} chat_{t,r} / sum_t sum_r khat_{t,r}^2, t < T and r <= t (Theorem 1).

    The bound's noise term is divided by it. chat_{t,r} = sum_j w_j c_{r+j} over the iterates that existed at
    step t-r, with the weights of those alone. `autocorrelation` gives c_0, ..., c_{T-1} at least.

    >>> round(gamma_dp(a=(-0.9,), b=(0.1,), beta=0.1, k=2, autocorrelation=[1.0] * 2000, steps=2000), 1)
    18.5
    """
    weights, chat, _ = _weighed_correlations(a, b, beta, k, autocorrelation, steps)
    kappa, corrections = _filter_weights(a, b, steps)
    return float(weights @ chat / np.sum(np.cumsum(kappa**2) / corrections**2))


def gamma_sgd(
    *,
    a: Sequence[float],
    b: Sequence[float],
    beta: float,
    k: int,
    autocorrelation: Sequence[float],
    steps: int,
) -> float:
    """Gamma_SGD = sum_t sum_r khat_{t,r} chat_{t,r} / sum_t sum_r khat_{t,r} / chat_{t,r} (Theorem 1).

    The bound's sampling term is divided by it. It is defined only where every chat_r that the filter weighs
    is positive; the arguments are those of `gamma_dp`.

    >>> gamma_sgd(a=(), b=(1.0,), beta=1.0, k=1, autocorrelation=[1.0] * 10, steps=10)
    1.0
    """
    weights, chat, lags = _weighed_correlations(a, b, beta, k, autocorrelation, steps)
    if np.any(chat <= 0):
        first = int(np.argmin(np.where(chat <= 0, lags, steps)))
        raise ValueError(
            f"chat_r = {chat[first]:.3g} at r={lags[first]} is not positive, so Gamma_SGD is undefined: give "
            "an autocorrelation that stays positive, or fewer steps."
        )
    return float(weights @ chat / (weights @ (1 / chat)))


@final
@dataclass(frozen=True, kw_only=True)
class Problem:
    """What Theorem 1 assumes of the task: f(x_0) - f*, L, G, sigma_SGD and d."""

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
    """The four terms of Theorem 1, without the constants that its O() hides."""

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

    `noise_scale` is sigma_DP = z C / B, the deviation of the noise on the mean.

    >>> task = Problem(initial_gap=2, smoothness=1, gradient_bound=1, sampling_deviation=1, dimension=100)
    >>> step_size_limit(task, k=1, clip_norm=0.6, noise_scale=0.08)
    1.0
    """
    _check_momentum(1.0, k)
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

    The paper's bound on the mean of ||grad f(x_t)||^2 (Theorem 1), up to a constant. Its proof drops terms of
    unknown sign, so it compares settings and is not a proven guarantee. `within_step_size` says whether the
    learning rate keeps to `step_size_limit`.
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


def _weighed_correlations(
    a: Sequence[float], b: Sequence[float], beta: float, k: int, autocorrelation: Sequence[float], steps: int
) -> tuple[Floats, Floats, NDArray[np.int64]]:
    """Weights W, chat and lags r with sum_t sum_r khat_{t,r} g(chat_{t,r}) = sum_i W_i g(chat_i), for any g.

    O(k T) of them, not O(T^2): chat_{t,r} depends on t only by the number of iterates that existed at step
    t-r, m = min(k, t-r+1). For m < k that leaves one t for each r; for m = k all t >= r+k-1, with the sum of
    their 1/c_t.
    """
    _check_momentum(beta, k)
    kappa, corrections = _filter_weights(a, b, steps)
    correlations = _correlations(autocorrelation, steps)
    from_then_on = np.cumsum(1 / corrections[::-1])[::-1]  # sum_{s=t}^{T-1} 1/c_s
    weights, values, lags = [], [], []
    for existing in range(1, min(k, steps) + 1):
        chat = np.correlate(correlations, momentum_weights(beta, existing), mode="valid")  # r = 0 .. T - existing
        scale = from_then_on if existing == k else 1 / corrections
        weighed = np.flatnonzero(kappa[: len(chat)])  # where the filter has no weight, chat may be anything
        weights.append(kappa[weighed] * scale[weighed + existing - 1])
        values.append(chat[weighed])
        lags.append(weighed)
    return np.concatenate(weights), np.concatenate(values), np.concatenate(lags)


def _filter_weights(a: Sequence[float], b: Sequence[float], steps: int) -> tuple[Floats, Floats]:
    """kappa_r and c_t = sum_{r<=t} kappa_r, none of them zero, for `steps` steps."""
    require_count("steps", steps, "it counts releases", most=_MOST)
    kappa = impulse_response(a, b, steps)
    corrections = np.cumsum(kappa)
    if np.any(corrections == 0):
        step = int(np.flatnonzero(corrections == 0)[0])
        raise ValueError(f"a={a}, b={b} has c_{step} = 0, so khat is undefined: choose b with b_0 != 0.")
    return kappa, corrections


def _correlations(autocorrelation: Sequence[float], steps: int) -> Floats:
    """c_0, ..., c_{T-1}: a lag that was not measured is the caller's to guess."""
    try:
        given = np.asarray(autocorrelation, dtype=np.float64)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise ValueError("autocorrelation is no sequence of numbers: give c_0, c_1, ...") from error
    if given.ndim != 1 or len(given) < steps or not np.all(np.isfinite(given)):
        raise ValueError(
            f"autocorrelation of shape {given.shape} is not {steps} finite values c_0, c_1, ...: give one a "
            "lag, continuing a shorter measurement as you think right, or fewer steps."
        )
    return given[:steps]


def _flat(gradient: ArrayLike | torch.Tensor) -> torch.Tensor:
    try:
        return torch.as_tensor(gradient).detach().flatten().to("cpu", torch.float64)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise ValueError(
            "gradients holds something that is no vector of real numbers: give tensors or lists"
        ) from error


def _square(value: float) -> float:
    """Infinite where ** would raise."""
    return float(value) * float(value)


def _check_momentum(beta: float, k: int) -> None:
    if not (is_number(beta) and 0 < beta <= 1):
        raise ValueError(f"beta={beta} is outside (0, 1]: give what an iterate weighs beside the next.")
    require_count("k", k, "it counts iterates", most=_MOST)
