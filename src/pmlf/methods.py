"""The methods as data: a method is a set of evaluation points with weights, a noise shape, and a filter.

To add a method, write a function that returns a `Method`, add it to `PRESETS`, and add a row to `FAMILY` in
`tests/test_methods.py`, which compares every method with a float64 reference.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from pmlf.basics.arguments import did_you_mean, is_number, require_count, require_positive
from pmlf.mechanism.filters import LowPass
from pmlf.mechanism.points import Point, Points, past_iterates
from pmlf.mechanism.shape_fit import banded, usual_workload
from pmlf.mechanism.shapes import MOST_BANDS, NoiseShape

_WHITE = NoiseShape.white()


@dataclass(frozen=True, kw_only=True)
class Method:
    """A private training method, as `PrivateStep` and `make_private` take it.

    Attributes:
        name: The name that certificates and checkpoints show.
        points: The points at which each sample's gradient is taken, with their weights (Algorithm 1, lines 1 and 5).
        low_pass: The filter on the noisy mean (Algorithm 1, lines 9 to 11).
        noise: How the noise of a release depends on that of the releases before; white noise does not. With b bands a
            record may take part at most once in b steps in a row, so such a method needs cyclic Poisson sampling.

    >>> Method(name="mean of two", points=Points(points=past_iterates(2, 1.0)), low_pass=LowPass()).points.depth
    1
    """

    name: str
    points: Points
    low_pass: LowPass
    noise: NoiseShape = _WHITE

    def __post_init__(self) -> None:
        for name, kind in (("points", Points), ("low_pass", LowPass), ("noise", NoiseShape)):
            if not isinstance(getattr(self, name), kind):
                raise ValueError(f"{name}={getattr(self, name)!r} is not a {kind.__name__}")


_CURRENT = Points(points=past_iterates(1, 1.0))
_IDENTITY = LowPass()
_SMALLEST, _LARGEST_WEIGHT = 1e-300, 1e6


def dpsgd() -> Method:
    """DPSGD (Abadi et al. 2016): the gradient at x_t, no filter.

    >>> dpsgd().low_pass.identity
    True
    """
    return Method(name="dpsgd", points=_CURRENT, low_pass=_IDENTITY)


def lp_dpsgd(a: Sequence[float] = (-0.9,), b: Sequence[float] = (0.1,), bands: int = 1) -> Method:
    """LP-DPSGD (DOPPLER): the gradient at x_t, then a low-pass filter on the noisy mean.

    Args:
        a: Feedback coefficients a_1, a_2, ... of the filter.
        b: Feedforward coefficients b_0, b_1, ... of the filter.
        bands: The number of bands of the noise shape, 1 to 64. 1 is white noise. More bands move the noise to high
            frequencies, where the filter removes it, and need cyclic Poisson sampling; the filter is then not
            bias-corrected, because the correction magnifies early noise.

    Returns:
        The method.

    Raises:
        ValueError: The filter is unstable, -sum(a) + sum(b) is not 1 (see `pmlf.filters.LowPass`), or bands is out of
            range.

    >>> round(lp_dpsgd().low_pass.noise_gain, 4)
    0.0526
    """
    low_pass, noise = _filter_and_noise(a, b, bands)
    return Method(name="lp-dpsgd", points=_CURRENT, low_pass=low_pass, noise=noise)


def inner_outer(k: int = 2, gamma: float = 0.1, beta: float = 0.9) -> Method:
    """InnerOuter (Xiao et al. 2023): inner momentum per sample, outer momentum on the noisy mean.

    The points weigh gamma^j and are not normalised. The filter is m_t = beta m_{t-1} + vbar_t, without bias correction,
    so its gain is 1 / (1 - beta): at beta = 0.9 use a learning rate ten times smaller than for the other methods.

    Args:
        k: The number of iterates at which a sample is evaluated, 1 to 1000.
        gamma: The decay of the inner momentum, in (0, 1].
        beta: The decay of the outer momentum, in [0, 1).

    Returns:
        The method.

    Raises:
        ValueError: An argument is out of range.

    >>> [point.weight for point in inner_outer(k=2, gamma=0.1).points.at(5)]
    [1.0, 0.1]
    """
    _check_window(k)
    _check_decay("gamma", gamma)
    if not (is_number(beta) and 0.0 <= beta < 1.0):
        raise ValueError(f"beta={beta} is not in [0, 1): the outer momentum must decay, give 0.9 for example")
    return Method(
        name="inner-outer",
        points=Points(points=past_iterates(k, gamma), normalised=False),
        low_pass=LowPass(a=(-beta,), b=(1.0,), corrected=False),
    )


def dp_pmlf(
    k: int = 2, beta: float = 0.1, a: Sequence[float] = (-0.9,), b: Sequence[float] = (0.1,), bands: int = 1
) -> Method:
    """DP-PMLF (Algorithm 1): per-sample momentum over k iterates, then a low-pass filter.

    The weights are beta^j / c_beta and sum to 1 at every step. A sample is clipped once, after its gradients at the k
    iterates are combined, so k does not change the sensitivity.

    Args:
        k: The number of iterates at which a sample is evaluated, 1 to 1000. Each costs a copy of the parameters and
            a forward and backward pass.
        beta: The decay of the weights, in (0, 1]; 1 is the plain mean.
        a: Feedback coefficients a_1, a_2, ... of the filter.
        b: Feedforward coefficients b_0, b_1, ... of the filter.
        bands: The number of bands of the noise shape, 1 to 64. 1 is white noise. More bands move the noise to high
            frequencies, where the filter removes it, and need cyclic Poisson sampling; the filter is then not
            bias-corrected, because the correction magnifies early noise.

    Returns:
        The method.

    Raises:
        ValueError: k, beta or bands is out of range, the filter is unstable, or -sum(a) + sum(b) is not 1.

    >>> method = dp_pmlf(k=3, beta=0.5)
    >>> method.points.depth, method.low_pass.order
    (2, 1)
    """
    low_pass, noise = _filter_and_noise(a, b, bands)
    return Method(name="dp-pmlf", points=_momentum(k, beta), low_pass=low_pass, noise=noise)


def lp_dpsgd_shaped(a: Sequence[float] = (-0.9,), b: Sequence[float] = (0.1,), bands: int = 8) -> Method:
    """LP-DPSGD with shaped noise: `lp_dpsgd` with 8 bands.

    Args:
        a: Feedback coefficients a_1, a_2, ... of the filter.
        b: Feedforward coefficients b_0, b_1, ... of the filter.
        bands: The number of bands of the noise shape, 2 to 64.

    Returns:
        The method.

    Raises:
        ValueError: As for `lp_dpsgd`.

    >>> lp_dpsgd_shaped().noise.bands, lp_dpsgd_shaped().low_pass.corrected
    (8, False)
    """
    _check_shaped("lp-dpsgd", bands)
    return replace(lp_dpsgd(a, b, bands), name="lp-dpsgd-shaped")


def dp_pmlf_shaped(
    k: int = 2, beta: float = 0.1, a: Sequence[float] = (-0.9,), b: Sequence[float] = (0.1,), bands: int = 8
) -> Method:
    """DP-PMLF with shaped noise: `dp_pmlf` with 8 bands.

    Args:
        k: The number of iterates at which a sample is evaluated, 1 to 1000.
        beta: The decay of the weights, in (0, 1].
        a: Feedback coefficients a_1, a_2, ... of the filter.
        b: Feedforward coefficients b_0, b_1, ... of the filter.
        bands: The number of bands of the noise shape, 2 to 64. `pmlf.shapes.best` chooses it for a target epsilon.

    Returns:
        The method.

    Raises:
        ValueError: As for `dp_pmlf`.

    >>> dp_pmlf_shaped(bands=4).noise.bands
    4
    """
    _check_shaped("dp-pmlf", bands)
    return replace(dp_pmlf(k, beta, a, b, bands), name="dp-pmlf-shaped")


def dp_pmlf_without_pm(a: Sequence[float] = (-0.9,), b: Sequence[float] = (0.1,)) -> Method:
    """DP-PMLF without per-sample momentum, for ablations: `lp_dpsgd` under the paper's name for it.

    Args:
        a: Feedback coefficients a_1, a_2, ... of the filter.
        b: Feedforward coefficients b_0, b_1, ... of the filter.

    Returns:
        The method.

    Raises:
        ValueError: The filter is unstable, or -sum(a) + sum(b) is not 1.

    >>> dp_pmlf_without_pm().points == lp_dpsgd().points
    True
    """
    return Method(name="dp-pmlf-without-pm", points=_CURRENT, low_pass=LowPass(a=a, b=b))


def dp_pmlf_without_lf(k: int = 2, beta: float = 0.1) -> Method:
    """DP-PMLF without the low-pass filter, for ablations.

    Args:
        k: The number of iterates at which a sample is evaluated, 1 to 1000.
        beta: The decay of the weights, in (0, 1].

    Returns:
        The method.

    Raises:
        ValueError: k or beta is out of range.

    >>> dp_pmlf_without_lf().low_pass.identity
    True
    """
    return Method(name="dp-pmlf-without-lf", points=_momentum(k, beta), low_pass=_IDENTITY)


def disk(kappa: float = 0.7, gamma: float = 0.5) -> Method:
    """DiSK: gradients at a look-ahead point and at x_t, then an exponential filter.

    The look-ahead point x_t + gamma (x_t - x_{t-1}) weighs c = (1 - kappa) / (kappa gamma), and x_t weighs 1 - c. The
    filter is m_t = (1 - kappa) m_{t-1} + kappa vbar_t, with bias correction.

    Args:
        kappa: The weight of the new gradient in the filter, in (0, 1).
        gamma: The length of the look-ahead, positive.

    Returns:
        The method.

    Raises:
        ValueError: An argument is out of range, or c is above 1e6.

    >>> [round(point.weight, 3) for point in disk().points.at(1)]
    [0.857, 0.143]
    """
    if not (is_number(kappa) and 0.0 < kappa < 1.0):
        raise ValueError(f"kappa={kappa} is not in (0, 1): it is the weight of the new gradient, give 0.7 for example")
    require_positive("gamma", gamma, "it is the length of the look-ahead, give 0.5 for example")
    c = (1.0 - kappa) / max(float(kappa) * gamma, _SMALLEST)
    if c > _LARGEST_WEIGHT:
        raise ValueError(
            f"kappa={kappa} and gamma={gamma} give the look-ahead point the weight {c:.3g}, above {_LARGEST_WEIGHT:g}: "
            "give larger values, kappa=0.7 and gamma=0.5 for example"
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
    "lp-dpsgd-shaped": lp_dpsgd_shaped,
    "dp-pmlf-shaped": dp_pmlf_shaped,
}
NAMES = tuple(PRESETS)


def resolve(method: Method | str) -> Method:
    """Return a `Method` unchanged, or build the preset of that name with the paper's defaults.

    Args:
        method: A `Method`, or one of `NAMES`.

    Returns:
        The method.

    Raises:
        ValueError: There is no preset of that name.

    >>> resolve("dp-pmlf") == dp_pmlf()
    True
    """
    if isinstance(method, Method):
        return method
    if not isinstance(method, str) or method not in PRESETS:
        raise ValueError(
            f"method={method!r} is not known: give one of {', '.join(NAMES)}, or a pmlf.methods.Method"
            f"{did_you_mean(method, NAMES)}"
        )
    return PRESETS[method]()


def _filter_and_noise(a: Sequence[float], b: Sequence[float], bands: int) -> tuple[LowPass, NoiseShape]:
    """A filter of DC gain 1, and the noise shape that fits it."""
    corrected = LowPass(a=a, b=b)
    low_pass = corrected if bands == 1 else LowPass(a=a, b=b, corrected=False)
    return low_pass, banded(bands, workload=usual_workload(low_pass))


def _check_shaped(white: str, bands: int) -> None:
    require_count("bands", bands, f"one band is white noise, which is method {white}", least=2, most=MOST_BANDS)


def _momentum(k: int, beta: float) -> Points:
    _check_window(k)
    _check_decay("beta", beta)
    return Points(points=past_iterates(k, beta))


def _check_window(k: int) -> None:
    require_count("k", k, "it counts the iterates at which a sample is evaluated", most=1000)


def _check_decay(name: str, value: float) -> None:
    if not (is_number(value) and 0.0 < value <= 1.0):
        raise ValueError(f"{name}={value} is not in (0, 1]: the weights are {name}^j, and 1 gives the plain mean")
