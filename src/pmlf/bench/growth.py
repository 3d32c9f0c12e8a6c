"""How the cost of a private gradient grows with k, the micro-batch size, the width and the sequence length.

Measured on a small transformer (two blocks of attention, Linear and LayerNorm), one size at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from pmlf.bench.cases import LENGTHS, STACK_LENGTH, STACK_WIDTH, WIDTHS, stack
from pmlf.bench.measure import BenchJob, Conditions, race

_KS, _SCALES = (1, 2, 4, 8), (0.25, 0.5, 1.0)


@dataclass(frozen=True, kw_only=True)
class GrowthCurve:
    """Time and memory against one size."""

    axis: str
    values: list[float]
    seconds: list[float | None]
    peak_bytes: list[int | None]
    time_exponent: float | None
    memory_exponent: float | None
    raw_seconds: list[list[float]]
    errors: list[str | None]


def exponent(sizes: Sequence[float], costs: Sequence[float | None]) -> float | None:
    """Fit p in cost = c * size^p by least squares of the logarithms. None if there are fewer than two costs.

    >>> round(exponent([1, 2, 4], [3.0, 12.0, 48.0]), 6)
    2.0
    """
    points = [(math.log(size), math.log(cost)) for size, cost in zip(sizes, costs, strict=True) if cost]
    if len(points) < 2:
        return None
    mean_x, mean_y = (sum(axis) / len(points) for axis in zip(*points, strict=True))
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / sum((x - mean_x) ** 2 for x, _ in points)


def measure(
    conditions: Conditions, *, rounds: int, batch_scale: float, progress: Callable[[str], None]
) -> list[GrowthCurve]:
    """Measure all curves, one after another. The points of a curve take turns."""
    middle = stack(STACK_WIDTH, STACK_LENGTH)

    def job(case: str = middle.name, k: int = 2, scale: float = 1.0) -> BenchJob:
        return BenchJob(case=case, contender=f"pmlf-k{k}", batch_scale=scale * batch_scale, conditions=conditions)

    plans: dict[str, tuple[list[float], list[BenchJob]]] = {
        "k": ([*_KS], [job(k=k) for k in _KS]),
        "micro-batch": ([middle.samples(s * batch_scale) for s in _SCALES], [job(scale=s) for s in _SCALES]),
        "width": ([*WIDTHS], [job(case=stack(width, STACK_LENGTH).name) for width in WIDTHS]),
        "sequence length": ([*LENGTHS], [job(case=stack(STACK_WIDTH, length).name) for length in LENGTHS]),
    }
    return [_curve(axis, *plan, rounds, progress) for axis, plan in plans.items()]


def _curve(
    axis: str, values: list[float], jobs: list[BenchJob], rounds: int, progress: Callable[[str], None]
) -> GrowthCurve:
    outcomes = race(axis, jobs, rounds, progress)
    seconds, peaks = [outcome.best for outcome in outcomes], [outcome.peak_bytes for outcome in outcomes]
    return GrowthCurve(
        axis=axis,
        values=values,
        seconds=seconds,
        peak_bytes=peaks,
        time_exponent=exponent(values, seconds),
        memory_exponent=exponent(values, peaks),
        raw_seconds=[outcome.seconds for outcome in outcomes],
        errors=[outcome.error for outcome in outcomes],
    )


def to_json(curves: Sequence[GrowthCurve]) -> list[dict[str, Any]]:
    """The curves, JSON-ready."""
    return [asdict(curve) for curve in curves]


def table(growth: Sequence[Mapping[str, Any]]) -> Table:
    """One row per size, with the fitted exponents in the last row of each curve."""
    shown = Table("", box=SIMPLE_HEAD)
    for heading in ("size", "time", "grows as", "peak", "grows as"):
        shown.add_column(heading, justify="right")
    for series in growth:
        for index, value in enumerate(series["values"]):
            seconds, peak = series["seconds"][index], series["peak_bytes"][index]
            last = index == len(series["values"]) - 1
            shown.add_row(
                series["axis"] if index == 0 else "",
                f"{value:g}",
                series["errors"][index] or ("" if seconds is None else f"{1000 * seconds:.1f} ms"),
                _power(series["time_exponent"]) if last else "",
                "" if peak is None else f"{peak / 2**20:.1f} MiB",
                _power(series["memory_exponent"]) if last else "",
                end_section=last,
            )
    return shown


def _power(exponent: float | None) -> str:
    return "" if exponent is None else f"size^{exponent:.2f}"


def plot(growth: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw time and memory against each size, on logarithmic axes, into the image file `path`."""
    # Figure instead of pyplot: no display needed, no global state
    from matplotlib.figure import Figure

    figure = Figure(figsize=(3.2 * len(growth), 6), layout="constrained")
    grid = figure.subplots(2, len(growth), squeeze=False)
    for column, series in enumerate(growth):
        for row, (field, unit, fitted, label) in enumerate(
            (("seconds", 1e-3, "time_exponent", "time, ms"), ("peak_bytes", 2**20, "memory_exponent", "peak, MiB"))
        ):
            axes = grid[row][column]
            points = [(x, y / unit) for x, y in zip(series["values"], series[field], strict=True) if y]
            axes.plot(*zip(*points, strict=True), marker="o")
            axes.set_xscale("log", base=2)
            axes.set_yscale("log", base=2)
            axes.xaxis.set_major_formatter("{x:g}")
            axes.yaxis.set_major_formatter("{x:g}")
            axes.set(title=_power(series[fitted]), xlabel=series["axis"], ylabel=label if column == 0 else None)
            axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
