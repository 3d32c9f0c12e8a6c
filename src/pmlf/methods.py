"""The family of methods as data: evaluation points with weights, and a filter. A new one is a function and a row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pmlf.basics.arguments import is_number, require_count, require_positive
from pmlf.mechanism.filters import LowPass
from pmlf.mechanism.points import Point, Points, past_iterates


@dataclass(frozen=True, kw_only=True)
class Method:
    """What `PrivateStep` runs: where gradients are taken and how the released mean is filtered."""

    name: str
    points: Points
    low_pass: LowPass


_CURRENT = Points(points=past_iterates(1, 1.0))
_IDENTITY = LowPass()
_SMALLEST, _LARGEST_WEIGHT = 1e-300, 1e6


def dpsgd() -> Method:
    """DPSGD: the gradient at x_t, no filter."""
    return Method(name="dpsgd", points=_CURRENT, low_pass=_IDENTITY)


def lp_dpsgd(a: Sequence[float] = (-0.9,), b: Sequence[float] = (0.1,)) -> Method:
    """LP-DPSGD (DOPPLER): the gradient at x_t, a low-pass filter on the released mean."""
    return Method(name="lp-dpsgd", points=_CURRENT, low_pass=LowPass(a=a, b=b))


def inner_outer(k: int = 2, gamma: float = 0.1, beta: float = 0.9) -> Method:
    """InnerOuter: points weighted gamma^j without normalising; m = beta m + vbar without correction."""
    _check_window(k)
    _check_decay("gamma", gamma)
    if not (is_number(beta) and 0.0 <= beta < 1.0):
        raise ValueError(f"beta={beta} is not in [0, 1): the outer momentum must decay; the paper's default is 0.9")
    return Method(
        name="inner-outer",
        points=Points(points=past_iterates(k, gamma), normalised=False),
        low_pass=LowPass(a=(-beta,), b=(1.0,), corrected=False),
    )


def dp_pmlf(k: int = 2, beta: float = 0.1, a: Sequence[float] = (-0.9,), b: Sequence[float] = (0.1,)) -> Method:
    """DP-PMLF (Algorithm 1): per-sample momentum beta^j/c over k iterates, then a low-pass filter.

    >>> method = dp_pmlf(k=3, beta=0.5)
    >>> method.points.depth, method.low_pass.order
    (2, 1)
    """
    return Method(name="dp-pmlf", points=_momentum(k, beta), low_pass=LowPass(a=a, b=b))


def dp_pmlf_without_pm(a: Sequence[float] = (-0.9,), b: Sequence[float] = (0.1,)) -> Method:
    """The ablation without per-sample momentum: LP-DPSGD under the paper's name for it."""
    return Method(name="dp-pmlf-without-pm", points=_CURRENT, low_pass=LowPass(a=a, b=b))


def dp_pmlf_without_lf(k: int = 2, beta: float = 0.1) -> Method:
    """The ablation without the low-pass filter."""
    return Method(name="dp-pmlf-without-lf", points=_momentum(k, beta), low_pass=_IDENTITY)


def disk(kappa: float = 0.7, gamma: float = 0.5) -> Method:
    """DiSK: x_t + gamma (x_t - x_{t-1}) weighs c = (1-kappa)/(kappa gamma), x_t the rest; an exponential filter."""
    if not (is_number(kappa) and 0.0 < kappa < 1.0):
        raise ValueError(f"kappa={kappa} is not in (0, 1): it is the weight of the new gradient, 0.7 for example")
    require_positive("gamma", gamma, "it is the look-ahead, 0.5 for example")
    c = (1.0 - kappa) / max(float(kappa) * gamma, _SMALLEST)
    if c > _LARGEST_WEIGHT:
        raise ValueError(
            f"kappa={kappa} and gamma={gamma} give the look-ahead the weight {c:.3g}: give larger ones, kappa=0.7 and "
            "gamma=0.5 for example"
        )
    ahead = Point(coefficients=(1.0 + gamma, -gamma), weight=c)
    here = Point(coefficients=(1.0,), weight=1.0 - c)
    return Method(name="disk", points=Points(points=(ahead, here)), low_pass=LowPass(a=(-(1.0 - kappa),), b=(kappa,)))


PRESETS: dict[str, Callable[..., Method]] = {
    "dpsgd": dpsgd,
    "lp-dpsgd": lp_dpsgd,
    "inner-outer": inner_outer,
    "dp-pmlf": dp_pmlf,
    "dp-pmlf-without-pm": dp_pmlf_without_pm,
    "dp-pmlf-without-lf": dp_pmlf_without_lf,
    "disk": disk,
}
NAMES = tuple(PRESETS)


def resolve(method: Method | str) -> Method:
    """A method as it is, or the preset of that name with the paper's defaults."""
    if isinstance(method, Method):
        return method
    if not isinstance(method, str) or method not in PRESETS:
        raise ValueError(f"method={method!r} is not known: give one of {', '.join(NAMES)}, or a pmlf.methods.Method")
    return PRESETS[method]()


def _momentum(k: int, beta: float) -> Points:
    _check_window(k)
    _check_decay("beta", beta)
    return Points(points=past_iterates(k, beta))


def _check_window(k: int) -> None:
    require_count("k", k, "it counts the iterates a sample is evaluated at, each a copy of the model", most=1000)


def _check_decay(name: str, value: float) -> None:
    if not (is_number(value) and 0.0 < value <= 1.0):
        raise ValueError(f"{name}={value} is not in (0, 1]: weights decay as {name}^j, 1 is the plain mean")
