"""Charts as data. The page draws them in the browser, `pictures` with matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from pmlf.reproduction.paper import SHAPED_LABEL
from pmlf.reproduction.report.summary import CellResult, Place, Record, claimed, named

ChartPoint = tuple[float, float, float, float]  # x, y, lowest y, highest y
# a method always has the same colour; other variants take colours in order
_COLOURS = {
    "DP-PMLF": 0,
    "LP-DPSGD": 1,
    "InnerOuter": 2,
    "DPSGD": 7,
    "DP-PMLF (w/o PM)": 1,
    "DP-PMLF (w/o LF)": 3,
    SHAPED_LABEL: 4,
}


@dataclass(frozen=True, kw_only=True)
class ChartSeries:
    """A line, or the marks of one colour. The paper's claims are hollow."""

    name: str
    points: Sequence[ChartPoint]
    colour: int
    paper: bool = False


@dataclass(frozen=True, kw_only=True)
class Chart:
    """A chart of kind "lines", or "dots", where x is an index into `categories`."""

    kind: str
    title: str
    x: str
    y: str
    series: Sequence[ChartSeries]
    categories: Sequence[str] = field(default_factory=tuple)
    logarithmic: bool = False  # the y axis

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def of_record(record: Record) -> list[Chart]:
    """The charts of an artifact: one per panel, along the artifact's axis."""
    if record.done == 0:
        return []
    if record.axis == "epoch":
        return [_epochs(record, place) for place in record.places if any(cell.runs for cell in record.at(place))]
    panels = list(dict.fromkeys((place.dataset, place.model) for place in record.places))
    if record.artifact.startswith("table"):
        return [_dots(record, *panel) for panel in panels if _of_panel(record, *panel)]
    if record.axis == "epsilon":
        return [_epsilons(record, *panel) for panel in panels if _of_panel(record, *panel)]
    return [_parameter(record, *panel) for panel in panels if _of_panel(record, *panel)]


def learning_curves(record: Record) -> list[Chart]:
    """Accuracy against epochs, for records whose charts do not show it."""
    if record.axis == "epoch":
        return []
    charts = [_epochs(record, place) for place in record.places if any(len(c.curve) > 1 for c in record.at(place))]
    return [chart for chart in charts if chart.series]


_ACCURACY = "test accuracy (%)"


def _of_panel(record: Record, dataset: str, model: str) -> list[CellResult]:
    return [c for c in record.cells if (c.place.dataset, c.place.model) == (dataset, model) and c.runs]


def _colour(variant: str, number: int) -> int:
    return _COLOURS.get(variant, number)


def _point(x: float, cell: CellResult) -> ChartPoint:
    mean = cell.mean
    assert mean is not None
    spread = cell.deviation or 0.0
    return (x, mean, mean - spread, mean + spread)


def _claim_point(x: float, claim: dict[str, Any]) -> ChartPoint:
    spread = claim.get("std", 0.0)
    return (x, claim["mean"], claim["mean"] - spread, claim["mean"] + spread)


def _epochs(record: Record, place: Place) -> Chart:
    cells = [cell for cell in record.at(place) if cell.runs]
    series = [ChartSeries(name=c.variant, points=c.curve, colour=_colour(c.variant, i)) for i, c in enumerate(cells)]
    return Chart(kind="lines", title=str(place), x="epoch", y=_ACCURACY, series=series)


def _epsilons(record: Record, dataset: str, model: str) -> Chart:
    cells = _of_panel(record, dataset, model)
    variants = list(dict.fromkeys(cell.variant for cell in cells))
    series = []
    for number, variant in enumerate(variants):
        colour = _colour(variant, number)
        mine = [cell for cell in cells if cell.variant == variant]
        points = [_point(cell.place.epsilon, cell) for cell in mine]
        series.append(ChartSeries(name=variant, points=points, colour=colour))
        theirs = [(cell, claimed(record.artifact, cell.place, variant)) for cell in mine]
        points = [_claim_point(cell.place.epsilon, claim) for cell, claim in theirs if claim]
        if points:
            series.append(ChartSeries(name=f"{variant}, the paper", points=points, colour=colour, paper=True))
    return Chart(kind="lines", title=f"{named(dataset)}, {named(model)}", x="epsilon", y=_ACCURACY, series=series)


def _parameter(record: Record, dataset: str, model: str) -> Chart:
    cells = _of_panel(record, dataset, model)
    epsilons = sorted({cell.place.epsilon for cell in cells})
    series = [
        ChartSeries(
            name=f"epsilon {epsilon:g}",
            points=[_point(cell.document["value"], cell) for cell in cells if cell.place.epsilon == epsilon],
            colour=number,
        )
        for number, epsilon in enumerate(epsilons)
    ]
    return Chart(kind="lines", title=f"{named(dataset)}, {named(model)}", x=record.axis, y=_ACCURACY, series=series)


def _dots(record: Record, dataset: str, model: str) -> Chart:
    cells = _of_panel(record, dataset, model)
    variants = list(dict.fromkeys(cell.variant for cell in cells))
    series = []
    for colour, epsilon in enumerate(sorted({cell.place.epsilon for cell in cells})):
        mine = [cell for cell in cells if cell.place.epsilon == epsilon]
        name = f"epsilon {epsilon:g}"
        points = [_point(variants.index(cell.variant), cell) for cell in mine]
        series.append(ChartSeries(name=name, points=points, colour=colour))
        theirs = [(cell, claimed(record.artifact, cell.place, cell.variant)) for cell in mine]
        points = [_claim_point(variants.index(cell.variant), claim) for cell, claim in theirs if claim]
        if points:
            series.append(ChartSeries(name=f"{name}, the paper", points=points, colour=colour, paper=True))
    title = f"{named(dataset)}, {named(model)}"
    return Chart(kind="dots", title=title, x=_ACCURACY, y="", series=series, categories=variants)
