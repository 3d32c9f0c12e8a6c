"""What a filter does to noise, delay and frequencies, as numbers and as a picture."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final

import numpy as np

from pmlf.mechanism.filters import LowPass

_LOWEST_DB = -80.0  # the lowest value drawn; a zero of the response is at -infinity


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


def plot(low_pass: LowPass, path: str | Path) -> None:
    """Draw the frequency response and the impulse response of a filter into an image file.

    Args:
        low_pass: The filter.
        path: The file; its ending decides the format.
    """
    # Figure without pyplot needs no display and keeps no global state.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    figure.suptitle(f"a = {_listed(low_pass.a)}   b = {_listed(low_pass.b)}")
    response_axes, weight_axes = figure.subplots(1, 2)

    frequencies, response = low_pass.frequency_response()
    decibels = 20 * np.log10(np.maximum(np.abs(response), 1e-12))
    noise_level = 10 * math.log10(low_pass.noise_gain)
    noise_label = f"filtered white noise: {noise_level:.1f} dB"
    response_axes.plot(frequencies, decibels)
    response_axes.axhline(noise_level, color="tab:orange", linestyle="--", label=noise_label)
    response_axes.set(title="Frequency response", xlabel="frequency (cycles / step)", ylabel="magnitude (dB)")
    response_axes.set(xlim=(0, 0.5), ylim=(max(_LOWEST_DB, min(decibels.min(), -20.0)) - 2, decibels.max() + 2))

    weights = low_pass.impulse_response(_shown_weights(low_pass))
    weight_axes.vlines(range(len(weights)), 0, weights)
    weight_axes.plot(weights, "o", markersize=3)
    weight_axes.axhline(0, color="black", linewidth=0.8)
    if low_pass.dc_gain:
        delay_label = f"mean delay: {low_pass.mean_delay:.3g} steps"
        weight_axes.axvline(low_pass.mean_delay, color="tab:orange", linestyle="--", label=delay_label)
    weight_axes.set(title="Impulse response", xlabel="age of a gradient (steps)", ylabel="weight")
    weight_axes.xaxis.get_major_locator().set_params(integer=True)
    for axes in (response_axes, weight_axes):
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[0]:  # a filter of DC gain 0 has no mean delay to label
            axes.legend(loc="upper right")
    figure.savefig(path, dpi=120)


def _shown_weights(low_pass: LowPass, longest: int = 500) -> int:
    """How many weights to draw, so that they hold 99.99 % of the energy."""
    energy = np.cumsum(low_pass.impulse_response(longest) ** 2)
    return max(int(np.searchsorted(energy, 0.9999 * energy[-1])) + 1, low_pass.order + 3)


def _listed(values: Sequence[float], most: int = 6) -> str:
    shown = [f"{value:.4g}" for value in values[:most]] + ["..."] * (len(values) > most)
    return "{" + ", ".join(shown) + "}"
