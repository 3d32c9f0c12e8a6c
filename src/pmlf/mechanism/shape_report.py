"""What a noise shape and a filter do to noise: its spectrum before and after, and what is left in the parameters."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import final

import numpy as np
from scipy import integrate

from pmlf.mechanism.filters import LowPass
from pmlf.mechanism.shape_fit import Workload, error
from pmlf.mechanism.shapes import Floats, NoiseShape

_LOWEST_DB = -45.0
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
    load = Workload(steps=steps, low_pass=low_pass)
    each = {h: replace(load, curvatures=(h,)) for h in load.curvatures}
    return ShapeReport(
        bands=shape.bands,
        coefficients=list(shape.coefficients),
        power=_variance(*shape.spectrum(_POINTS)),
        filtered_power=_variance(shape.spectrum(_POINTS)[0], shape.spectrum(_POINTS)[1] * _gain(low_pass, _POINTS)),
        left={h: error(shape, one) for h, one in each.items()},
        left_by_white={h: error(NoiseShape.white(), one) for h, one in each.items()},
    )


def plot_shape(low_pass: LowPass, shape: NoiseShape, path: str | Path) -> None:
    """Draw four spectra into an image file: white noise and shaped noise, before and after the filter.

    Args:
        low_pass: The filter.
        shape: The noise shape.
        path: The file; its ending decides the format.
    """
    from matplotlib.figure import Figure  # without pyplot: no display, no global state

    frequencies, shaped = shape.spectrum(2048)
    gain, white = _gain(low_pass, 2048), np.ones(2048)
    panels = [
        ("white noise", white),
        ("white noise, filtered", white * gain),
        (f"shaped noise, {shape.bands} bands", shaped),
        ("shaped noise, filtered", shaped * gain),
    ]
    figure = Figure(figsize=(10, 6.4), layout="constrained")
    for axes, (title, power) in zip(figure.subplots(2, 2, sharex=True, sharey=True).ravel(), panels, strict=True):
        axes.plot(frequencies, _decibels(gain), color="tab:gray", linestyle="--", label="what the filter lets through")
        axes.plot(frequencies, _decibels(power), color="tab:red", label="power of the noise")
        axes.fill_between(frequencies, _decibels(power), _LOWEST_DB, color="tab:red", alpha=0.15)
        slow = 10 * np.log10(np.mean(power[frequencies < 0.01]))
        axes.set_title(f"{title}\nslowest noise (below 0.01): {slow:+.1f} dB")
        axes.set(xlim=(0, 0.5), ylim=(_LOWEST_DB, 20))
        axes.grid(alpha=0.3)
        if title.startswith("shaped"):
            axes.set_xlabel("frequency (cycles / step)")
        if title in (panels[0][0], panels[2][0]):
            axes.set_ylabel("power (dB)")
        if title == panels[0][0]:
            axes.legend(loc="lower right", fontsize=9)
    figure.savefig(path, dpi=120)


def _variance(frequencies: Floats, power: Floats) -> float:
    return float(2 * integrate.trapezoid(power, frequencies))


def _gain(low_pass: LowPass, points: int) -> Floats:
    return np.asarray(np.abs(low_pass.frequency_response(points)[1]) ** 2)


def _decibels(power: Floats) -> Floats:
    return np.asarray(10 * np.log10(np.maximum(power, 10 ** (_LOWEST_DB / 10))))
