"""Predictions of the theory next to the measurements of a run with diagnostics."""

from __future__ import annotations

from typing import Any

from pmlf.reproduction.report.charts import Chart, ChartSeries
from pmlf.reproduction.report.summary import named

_SPECTRA = {
    "signal": "signal before the filter",
    "signal_filtered": "signal after the filter",
    "noise": "noise before the filter",
    "noise_filtered": "noise after the filter",
}


def view(document: dict[str, Any]) -> dict[str, Any]:
    """Charts and a table of one run with diagnostics."""
    run = document["run"]
    kept = "exact gradients" if document["sketch"] is None else f"sketches of {document['sketch']} sums"
    return {
        "title": f"{run['method']}, {named(run['model'])} on {named(run['dataset'])}, {_budget(run)}, "
        f"{document['steps']} steps, seed {run['seed']}, {document['probed_records']} probed records, {kept}",
        "charts": [_autocorrelation(document), _spectra(document)],
        "rows": _rows(document),
        "command": document["command"],
    }


def _budget(run: dict[str, Any]) -> str:
    return "noise multiplier given" if run["target_epsilon"] is None else f"ε = {run['target_epsilon']:g}"


def _autocorrelation(document: dict[str, Any]) -> Chart:
    points = [(float(lag), value, value, value) for lag, value in enumerate(document["autocorrelation"])]
    series = [ChartSeries(name="c_r, measured", points=points, colour=0)]
    return Chart(kind="lines", title="Autocorrelation of the gradient", x="lag r, steps", y="c_r", series=series)


def _spectra(document: dict[str, Any]) -> Chart:
    series = [
        ChartSeries(
            name=label, points=[(f, power, power, power) for f, power in document["spectra"][name]], colour=colour
        )
        for colour, (name, label) in enumerate(_SPECTRA.items())
    ]
    title = "Power of signal and noise by frequency"
    return Chart(kind="lines", title=title, x="cycles per step", y="power", series=series, logarithmic=True)


def _rows(document: dict[str, Any]) -> list[tuple[str, str, str, str]]:
    """(quantity, theory, measured, what it means)."""
    gain, variance, clipping = document["noise_gain"], document["variance_reduction"], document["clipping"]
    ratio, gamma = document["signal_to_noise"], document["gamma"]
    undefined = gamma["sgd_undefined"] or "Theorem 1 divides the sampling term by it"
    return [
        (
            "noise variance left by the filter",
            f"{gain['theory']:.4f}",
            f"{gain['measured']:.4f}",
            "sum of squared filter weights; both should agree, because the noise is white",
        ),
        (
            "signal-to-noise power",
            "-",
            f"{ratio['before']:.3g} before, {ratio['after']:.3g} after",
            "the filter helps if the gradient keeps its direction for longer than the filter's delay",
        ),
        (
            "variance reduction of a sample's gradient, ρ²",
            f"{variance['theory']:.3f}",
            f"{variance['measured']:.3f}",
            "the theory assumes independent noise of a sample between iterates (Assumption 5); 1 is no reduction",
        ),
        (
            "clipping bias, relative to the gradient's norm",
            "less with momentum",
            f"{clipping['bias_without_momentum']:.4f} without, {clipping['bias_with_momentum']:.4f} with momentum",
            "distance between the mean clipped gradient (or momentum) and the mean gradient",
        ),
        (
            "samples clipped",
            "-",
            f"{100 * clipping['clipped_without_momentum']:.1f} % without, "
            f"{100 * clipping['clipped_with_momentum']:.1f} % with momentum",
            f"at C = {document['run'].get('clip_norm', 1.0):g}",
        ),
        (
            "Γ_DP from the measured c_r",
            "-",
            f"{gamma['dp']:.3g}",
            "Theorem 1 divides the noise term by it; it is 1 for DPSGD",
        ),
        ("Γ_SGD from the measured c_r", "-", "-" if gamma["sgd"] is None else f"{gamma['sgd']:.3g}", undefined),
    ]
