"""The paper's theory as numbers: kappa (Lemma 1), rho (Lemma 2), autocorrelation, and Gamma (Theorem 1)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Integral

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from pmlf.basics.arguments import is_number, require_count
from pmlf.mechanism.filters import Floats, LowPass

_MOST = 10**7  # numbers in one array


def momentum_weights(beta: float, k: int) -> Floats:
    """w_j = beta^j / sum_{i<k} beta^i for j = 0, ..., k-1, the current iterate first (Algorithm 1, line 1).

    Args:
        beta: The decay of the weights, in (0, 1].
        k: The number of iterates, 1 to 10^7.

    Returns:
        The k weights, which sum to 1.

    Raises:
        ValueError: An argument is out of range.

    >>> momentum_weights(0.1, 2)
    array([0.90909091, 0.09090909])
    """
    _check_momentum(beta, k)
    powers = float(beta) ** np.arange(k)
    return np.asarray(powers / powers.sum())


def rho_squared(beta: float, k: int) -> float:
    """rho^2 = (1+beta)(1-beta^k) / ((1-beta)(1+beta^k)), k at beta = 1 (Lemma 2).

    It is 1 / sum_j w_j^2: the factor by which per-sample momentum divides the sampling variance, if a sample's noise is
    independent between iterates (Assumption 5).

    Args:
        beta: The decay of the weights, in (0, 1].
        k: The number of iterates, 1 to 10^7.

    Returns:
        rho^2, from 1 to k.

    Raises:
        ValueError: An argument is out of range.

    >>> round(rho_squared(0.1, 2), 3)
    1.198
    """
    _check_momentum(beta, k)
    # (1-beta^k)/(1-beta) loses digits near beta = 1; expm1 keeps them.
    powers = k if beta == 1 else -math.expm1(k * math.log(beta)) / (1 - beta)
    return (1 + beta) * powers / (1 + beta**k)


def impulse_response(a: Sequence[float], b: Sequence[float], length: int) -> Floats:
    """kappa_0, ..., kappa_{length-1} of m_t = sum_r kappa_r vbar_{t-r} (Lemma 1).

    Computed by the recursion. The paper's partial fractions need distinct poles and give 0 for an empty a.

    Args:
        a: Feedback coefficients a_1, a_2, ... of the filter.
        b: Feedforward coefficients b_0, b_1, ... of the filter.
        length: How many weights, 1 to 10^7.

    Returns:
        The weights.

    Raises:
        ValueError: The filter is unstable, or length is out of range.

    >>> impulse_response((-0.5,), (0.5,), 3)
    array([0.5  , 0.25 , 0.125])
    """
    require_count("length", length, "it is the number of weights", most=_MOST)
    return LowPass(a, b, corrected=False).impulse_response(length)


def normalised_impulse_response(a: Sequence[float], b: Sequence[float], t: int) -> Floats:
    """khat_{t,r} = kappa_r / sum_{s<=t} kappa_s for r = 0, ..., t: the weights of mhat_t (Lemma 1).

    Args:
        a: Feedback coefficients a_1, a_2, ... of the filter.
        b: Feedforward coefficients b_0, b_1, ... of the filter.
        t: The step, counted from 0.

    Returns:
        The t + 1 weights, which sum to 1.

    Raises:
        ValueError: The filter is unstable, a sum of kappa is 0, or t is out of range.

    >>> normalised_impulse_response((-0.5,), (0.5,), 1)
    array([0.66666667, 0.33333333])
    """
    require_count("t", t, "it is a step, counted from 0", least=0, most=_MOST)
    kappa, corrections = _filter_weights(a, b, t + 1)
    return np.asarray(kappa / corrections[t])


def noise_gain(a: Sequence[float], b: Sequence[float]) -> float:
    """sum_r kappa_r^2: the gain of the variance of white noise, at steady state.

    Args:
        a: Feedback coefficients a_1, a_2, ... of the filter.
        b: Feedforward coefficients b_0, b_1, ... of the filter.

    Returns:
        The gain.

    Raises:
        ValueError: The filter is unstable.

    >>> round(noise_gain((-0.9,), (0.15, -0.05)), 4)
    0.0605
    """
    return LowPass(a, b, corrected=False).noise_gain


def autocorrelation(gradients: Sequence[ArrayLike | torch.Tensor], lags: int | None = None) -> Floats:
    """c_r = mean over t of <g_t, g_{t-r}> / ||g_t||^2 for r = 0, ..., lags (Assumption 4 with c_{-r} = 0).

    This is a measurement: Assumption 4 itself asks for one c_r that holds at every t.

    Args:
        gradients: One gradient per step, each a tensor or list of the same size.
        lags: The largest lag; None for all.

    Returns:
        c_0, ..., c_lags.

    Raises:
        ValueError: A gradient is zero or not finite, sizes differ, or lags is out of range.

    >>> autocorrelation([[1.0, 0.0], [1.0, 1.0], [1.0, 0.0]], lags=1)
    array([1.  , 0.75])
    """
    try:
        rows = [_flat(gradient) for gradient in gradients]
    except TypeError as error:
        raise ValueError(f"gradients is a {type(gradients).__name__}: give a sequence of gradient vectors") from error
    if not rows:
        raise ValueError("gradients is empty: give at least one gradient vector")
    if len({len(row) for row in rows}) > 1:
        raise ValueError("gradients have different sizes: give vectors of one size")
    vectors = torch.stack(rows)  # steps x d
    steps = len(vectors)
    lags = steps - 1 if lags is None else lags
    if isinstance(lags, bool) or not isinstance(lags, Integral) or not 0 <= lags < steps:
        raise ValueError(f"lags={lags} is not possible with {steps} gradients: give 0 to {steps - 1}")
    squares = vectors.square().sum(1)
    unusable = torch.nonzero(~((squares > 0) & squares.isfinite())).flatten()
    if len(unusable):
        step = int(unusable[0])
        raise ValueError(
            f"gradients[{step}] has squared norm {float(squares[step])}: remove zero and infinite gradients"
        )
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

    The noise term of the bound is divided by it. chat_{t,r} = sum_j w_j c_{r+j}, over the iterates that exist at step
    t-r and with their weights.

    Args:
        a: Feedback coefficients a_1, a_2, ... of the filter.
        b: Feedforward coefficients b_0, b_1, ... of the filter.
        beta: The decay of the momentum weights, in (0, 1].
        k: The number of iterates in the momentum.
        autocorrelation: The gradient autocorrelation c_0, c_1, ..., at least T values.
        steps: The number of steps, T.

    Returns:
        The ratio.

    Raises:
        ValueError: An argument is out of range, or the autocorrelation has fewer than T finite values.

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

    The sampling term of the bound is divided by it. It is defined if every chat_r with a nonzero filter weight is
    positive.

    Args:
        a: Feedback coefficients a_1, a_2, ... of the filter.
        b: Feedforward coefficients b_0, b_1, ... of the filter.
        beta: The decay of the momentum weights, in (0, 1].
        k: The number of iterates in the momentum.
        autocorrelation: The gradient autocorrelation c_0, c_1, ..., at least T values.
        steps: The number of steps, T.

    Returns:
        The ratio.

    Raises:
        ValueError: Some chat_r is not positive, so the ratio is undefined; or as for `gamma_dp`.

    >>> gamma_sgd(a=(), b=(1.0,), beta=1.0, k=1, autocorrelation=[1.0] * 10, steps=10)
    1.0
    """
    weights, chat, lags = _weighed_correlations(a, b, beta, k, autocorrelation, steps)
    if np.any(chat <= 0):
        first = int(np.argmin(np.where(chat <= 0, lags, steps)))
        raise ValueError(
            f"chat_r = {chat[first]:.3g} at r={lags[first]} is not positive, so Gamma_SGD is undefined: give an "
            "autocorrelation that stays positive, or fewer steps"
        )
    return float(weights @ chat / (weights @ (1 / chat)))


def _weighed_correlations(
    a: Sequence[float], b: Sequence[float], beta: float, k: int, autocorrelation: Sequence[float], steps: int
) -> tuple[Floats, Floats, NDArray[np.int64]]:
    """Weights W, chat and lags r such that sum_t sum_r khat_{t,r} g(chat_{t,r}) = sum_i W_i g(chat_i) for any g.

    There are O(k T) of them instead of O(T^2): chat_{t,r} depends on t only through the number of iterates that exist
    at step t-r, m = min(k, t-r+1). For m < k there is one t for each r. For m = k there are all t >= r+k-1, and their
    1/c_t are summed.
    """
    _check_momentum(beta, k)
    kappa, corrections = _filter_weights(a, b, steps)
    correlations = _correlations(autocorrelation, steps)
    from_then_on = np.cumsum(1 / corrections[::-1])[::-1]  # sum_{s=t}^{T-1} 1/c_s
    weights, values, lags = [], [], []
    for existing in range(1, min(k, steps) + 1):
        chat = np.correlate(correlations, momentum_weights(beta, existing), mode="valid")  # r = 0 .. T - existing
        scale = from_then_on if existing == k else 1 / corrections
        weighed = np.flatnonzero(kappa[: len(chat)])  # without a filter weight, chat may have any value
        weights.append(kappa[weighed] * scale[weighed + existing - 1])
        values.append(chat[weighed])
        lags.append(weighed)
    return np.concatenate(weights), np.concatenate(values), np.concatenate(lags)


def _filter_weights(a: Sequence[float], b: Sequence[float], steps: int) -> tuple[Floats, Floats]:
    """kappa_r and c_t = sum_{r<=t} kappa_r for `steps` steps; an error if some c_t is 0."""
    require_count("steps", steps, "it is the number of releases", most=_MOST)
    kappa = impulse_response(a, b, steps)
    corrections = np.cumsum(kappa)
    if np.any(corrections == 0):
        step = int(np.flatnonzero(corrections == 0)[0])
        raise ValueError(f"a={a}, b={b} has c_{step} = 0, so khat is undefined: give b with b_0 != 0")
    return kappa, corrections


def _correlations(autocorrelation: Sequence[float], steps: int) -> Floats:
    """c_0, ..., c_{T-1}; the caller extends a shorter measurement."""
    try:
        given = np.asarray(autocorrelation, dtype=np.float64)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise ValueError("autocorrelation is not a sequence of numbers: give c_0, c_1, ...") from error
    if given.ndim != 1 or len(given) < steps or not np.all(np.isfinite(given)):
        raise ValueError(
            f"autocorrelation of shape {given.shape} is not {steps} finite values c_0, c_1, ...: give one value per "
            "lag, extend a shorter measurement, or give fewer steps"
        )
    return given[:steps]


def _flat(gradient: ArrayLike | torch.Tensor) -> torch.Tensor:
    try:
        return torch.as_tensor(gradient).detach().flatten().to("cpu", torch.float64)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise ValueError(
            "gradients holds a value that is not a vector of real numbers: give tensors or lists"
        ) from error


def _check_momentum(beta: float, k: int) -> None:
    if not (is_number(beta) and 0 < beta <= 1):
        raise ValueError(f"beta={beta} is outside (0, 1]: give the decay of the weights, 0.1 for example")
    require_count("k", k, "it is the number of iterates", most=_MOST)
