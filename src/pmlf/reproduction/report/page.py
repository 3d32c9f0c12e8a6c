"""The report as one self-contained HTML file. Its script draws the charts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

import jinja2

from pmlf.mechanism.filters import LowPass
from pmlf.reproduction import paper
from pmlf.reproduction.report import charts, theory, words
from pmlf.reproduction.report.charts import Chart, ChartSeries
from pmlf.reproduction.report.summary import Difference, Record, claims, named
from pmlf.reproduction.report.tables import ResultTable, Trials, duration, panels, trials

_FREQUENCIES = 101
_LOWEST_GAIN = 1e-3  # a zero of the response would extend the axis to 1e-17


def render(records: Sequence[Record], diagnostics: Sequence[dict[str, Any]]) -> str:
    """The HTML page of records and diagnostics."""
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(_asset), autoescape=True, trim_blocks=True, undefined=jinja2.StrictUndefined
    )
    real = [record for record in records if record.profile != "smoke"]
    compared = words.comparisons(real)
    return environment.get_template("report.html.j2").render(
        css=_asset("report.css"),
        js=_asset("report.js"),
        artifacts=[_artifact(name, records) for name in paper.BY_NAME],
        views={record.key: _view(record, records) for record in records},
        tiles=_tiles(real),
        decided=[each for each in compared if each[1].decided],
        undecided=[each for each in compared if not each[1].decided],
        recorded=bool(real),
        verdicts=words.verdicts(real),
        missing=words.missing(records),
        filters=_filters(),
        diagnostics=[theory.view(document) for document in diagnostics],
        not_comparable=words.NOT_COMPARABLE,
        signed=words.signed,
        named=named,
    )


@dataclass(frozen=True, kw_only=True)
class _View:
    """The content of the page for one record."""

    charts: list[Chart]
    panels: list[ResultTable]
    differences: list[Difference]
    trials: list[Trials]
    rates: list[float]
    tuning: list[str]
    curves: list[Chart]
    facts: list[tuple[str, str]]
    certificates: list[tuple[str, dict[str, Any]]]


def _view(record: Record, records: Sequence[Record]) -> _View:
    certified = [(f"{cell.place}: {cell.variant}", cell.document["certificate"]) for cell in record.cells if cell.runs]
    return _View(
        charts=charts.of_record(record),
        panels=panels(record),
        differences=list(record.differences()),
        trials=(tried := trials(record)),
        rates=sorted({rate for one in tried for rate in one.accuracies}),
        tuning=words.tuning(record, records),
        curves=charts.learning_curves(record),
        facts=words.facts(record),
        certificates=certified,
    )


def _artifact(name: str, records: Sequence[Record]) -> dict[str, Any]:
    mine = sorted((record for record in records if record.artifact == name), key=lambda r: r.profile == "smoke")
    done = [record.profile for record in mine if record.done]
    return {
        "name": name,
        "title": paper.BY_NAME[name].title,
        "state": done[0] if done else "not run",
        "claims": claims(name),
        "records": mine,
    }


def _tiles(records: Sequence[Record]) -> list[tuple[str, str]]:
    runs = {run["key"]: run for record in records for cell in record.cells for run in cell.runs}
    tried = {trial["key"]: trial for record in records for trial in record.trials}
    seconds = sum(run["cost"]["seconds"] for run in (*runs.values(), *tried.values()) if run["cost"])
    over = [
        run for record in records for cell in record.cells for run in cell.runs if run["epsilon"] > cell.place.epsilon
    ]
    counts = words.tally(records)
    unclear = counts["cannot tell"] + counts["one seed"]
    return [
        (
            f"{len({record.artifact for record in records if record.done})} of {len(paper.ARTIFACTS)}",
            "artifacts with results beyond the smoke profile",
        ),
        (str(len(runs)), "private training runs, each with a certificate"),
        (duration(seconds), "of training and evaluation, summed over all runs"),
        (str(len(over)), "runs whose true ε exceeds the target"),
        (
            f"{counts['holds']} · {counts['contradicted']} · {unclear}",
            "of the paper's orderings hold · are contradicted · are undecided",
        ),
    ]


def _filters() -> dict[str, Any]:
    series, rows = [], []
    for colour, (a, b) in enumerate(paper.FILTERS):
        low_pass = LowPass(a, b)
        frequencies, response = low_pass.frequency_response(_FREQUENCIES)
        gains = [abs(complex(value)) for value in response]
        label = paper.filter_label(a, b)
        points = [(float(f), g, g, g) for f, g in zip(frequencies, gains, strict=True) if g > _LOWEST_GAIN]
        series.append(ChartSeries(name=label, points=points, colour=colour))
        rows.append((label, low_pass.noise_gain, low_pass.mean_delay, low_pass.is_convex))
    title = "Gain by frequency"
    chart = Chart(kind="lines", title=title, x="cycles per step", y="gain", series=series, logarithmic=True)
    return {"chart": chart, "rows": rows}


def _asset(name: str) -> str:
    return (resources.files("pmlf") / "assets" / name).read_text()
