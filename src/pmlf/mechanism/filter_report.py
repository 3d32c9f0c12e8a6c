"""What a filter does to noise and delay, as numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from pmlf.mechanism.filters import LowPass


@final
@dataclass(frozen=True, kw_only=True)
class FilterReport:
    """The properties of a filter, from `analyse`; `dataclasses.asdict` makes it JSON-ready.

    Attributes:
        a: Feedback coefficients.
        b: Feedforward coefficients.
        corrected: Whether the filter has a bias correction.
        poles: Each pole as [real, imaginary].
        largest_pole: The largest absolute value of a pole; below 1.
        dc_gain: The gain of a constant input.
        noise_gain: The gain of the variance of white noise.
        mean_delay: The mean age of the output in steps; None if the DC gain is 0.
        convex: Whether all weights are at least 0.
        weights: The first weights of the impulse response.
    """

    a: list[float]
    b: list[float]
    corrected: bool
    poles: list[list[float]]
    largest_pole: float
    dc_gain: float
    noise_gain: float
    mean_delay: float | None
    convex: bool
    weights: list[float]


def analyse(low_pass: LowPass, weights: int = 8) -> FilterReport:
    """Poles, H(1), sum_r kappa_r^2, mean delay and the first weights kappa_r of a filter (Lemma 1).

    Args:
        low_pass: The filter.
        weights: How many weights to return.

    Returns:
        The report.

    >>> analyse(LowPass(a=(-0.5,), b=(0.5,)), weights=3).weights
    [0.5, 0.25, 0.125]
    """
    poles = [complex(pole) for pole in low_pass.poles]
    return FilterReport(
        a=list(low_pass.a),
        b=list(low_pass.b),
        corrected=low_pass.corrected,
        poles=[[pole.real, pole.imag] for pole in poles],
        largest_pole=max(map(abs, poles), default=0.0),
        dc_gain=low_pass.dc_gain,
        noise_gain=low_pass.noise_gain,
        mean_delay=low_pass.mean_delay if low_pass.dc_gain else None,
        convex=low_pass.is_convex,
        weights=low_pass.impulse_response(weights).tolist(),
    )
