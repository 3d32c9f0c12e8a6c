"""What a noise shape and a filter do to noise: its spectrum before and after, and what is left in the parameters."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import final

import numpy as np
from scipy import integrate

from pmlf.mechanism.filters import LowPass
from pmlf.mechanism.shape_fit import error, usual_workload
from pmlf.mechanism.shapes import Floats, NoiseShape

_POINTS = 4097  # frequencies of an integral


@final
@dataclass(frozen=True, kw_only=True)
class ShapeReport:
    """The properties of a noise shape with a filter, at noise multiplier 1.

    Attributes:
        bands: The number of bands.
        coefficients: c_0, c_1, ...
        power: The variance of the noise of a release; 1 for white noise.
        filtered_power: The variance after the filter.
        left: By curvature, the noise in the parameters over that of white noise without a filter.
        left_by_white: The same for white noise with the filter.
    """

    bands: int
    coefficients: list[float]
    power: float
    filtered_power: float
    left: dict[float, float]
    left_by_white: dict[float, float]


def analyse_shape(low_pass: LowPass, shape: NoiseShape, steps: int) -> ShapeReport:
    """Variances and what is left in the parameters after some steps, for a noise shape with a filter.

    Args:
        low_pass: The filter.
        shape: The noise shape.
        steps: The number of steps of the run.

    Returns:
        The report.

    >>> report = analyse_shape(LowPass((-0.9,), (0.1,), corrected=False), NoiseShape((0.8, 0.6)), 100)
    >>> report.power > 1 > report.filtered_power, report.left[0.0] < report.left_by_white[0.0]
    (True, True)
    """
    load = usual_workload(low_pass, steps)
    each = {h: replace(load, curvatures=(h,)) for h in load.curvatures}
    frequencies, power = shape.spectrum(_POINTS)
    return ShapeReport(
        bands=shape.bands,
        coefficients=list(shape.coefficients),
        power=_variance(frequencies, power),
        filtered_power=_variance(frequencies, power * power_gain(low_pass, _POINTS)),
        left={h: error(shape, one) for h, one in each.items()},
        left_by_white={h: error(NoiseShape.white(), one) for h, one in each.items()},
    )


def _variance(frequencies: Floats, power: Floats) -> float:
    return float(2 * integrate.trapezoid(power, frequencies))


def power_gain(low_pass: LowPass, points: int) -> Floats:
    """|H(f)|^2 at evenly spaced frequencies from 0 to 1/2: what a filter lets through of the power of noise."""
    return np.asarray(np.abs(low_pass.frequency_response(points)[1]) ** 2)
