"""Pictures of filters and noise shapes: responses, weights and spectra."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure  # without pyplot: no display, no global state

from pmlf.mechanism.filters import LowPass
from pmlf.mechanism.shape_report import power_gain
from pmlf.mechanism.shapes import Floats, NoiseShape

_LOWEST_RESPONSE = -80.0  # in decibels; a zero of the response is at -infinity
_LOWEST_POWER = -45.0  # in decibels


def plot_filter(low_pass: LowPass, path: str | Path) -> None:
    """Draw the frequency response and the impulse response of a filter into an image file.

    Args:
        low_pass: The filter.
        path: The file; its ending decides the format.
    """
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
    response_axes.set(xlim=(0, 0.5), ylim=(max(_LOWEST_RESPONSE, min(decibels.min(), -20.0)) - 2, decibels.max() + 2))

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


def plot_shape(low_pass: LowPass, shape: NoiseShape, path: str | Path) -> None:
    """Draw four spectra into an image file: white noise and shaped noise, before and after the filter.

    Args:
        low_pass: The filter.
        shape: The noise shape.
        path: The file; its ending decides the format.
    """
    frequencies, shaped = shape.spectrum(2048)
    gain, white = power_gain(low_pass, 2048), np.ones(2048)
    panels = [
        ("white noise", white),
        ("white noise, filtered", white * gain),
        (f"shaped noise, {shape.bands} bands", shaped),
        ("shaped noise, filtered", shaped * gain),
    ]
    figure = Figure(figsize=(10, 6.4), layout="constrained")
    for axes, (title, power) in zip(figure.subplots(2, 2, sharex=True, sharey=True).ravel(), panels, strict=True):
        axes.plot(
            frequencies, _power_decibels(gain), color="tab:gray", linestyle="--", label="what the filter lets through"
        )
        axes.plot(frequencies, _power_decibels(power), color="tab:red", label="power of the noise")
        axes.fill_between(frequencies, _power_decibels(power), _LOWEST_POWER, color="tab:red", alpha=0.15)
        slow = 10 * np.log10(np.mean(power[frequencies < 0.01]))
        axes.set_title(f"{title}\nslowest noise (below 0.01): {slow:+.1f} dB")
        axes.set(xlim=(0, 0.5), ylim=(_LOWEST_POWER, 20))
        axes.grid(alpha=0.3)
        if title.startswith("shaped"):
            axes.set_xlabel("frequency (cycles / step)")
        if title in (panels[0][0], panels[2][0]):
            axes.set_ylabel("power (dB)")
        if title == panels[0][0]:
            axes.legend(loc="lower right", fontsize=9)
    figure.savefig(path, dpi=120)


def _shown_weights(low_pass: LowPass, longest: int = 500) -> int:
    """How many weights to draw, so that they hold 99.99 % of the energy."""
    energy = np.cumsum(low_pass.impulse_response(longest) ** 2)
    return max(int(np.searchsorted(energy, 0.9999 * energy[-1])) + 1, low_pass.order + 3)


def _listed(values: Sequence[float], most: int = 6) -> str:
    shown = [f"{value:.4g}" for value in values[:most]] + ["..."] * (len(values) > most)
    return "{" + ", ".join(shown) + "}"


def _power_decibels(power: Floats) -> Floats:
    return np.asarray(10 * np.log10(np.maximum(power, 10 ** (_LOWEST_POWER / 10))))
