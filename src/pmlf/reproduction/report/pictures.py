"""The charts of records as image files, drawn with matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pmlf.reproduction.report import charts
from pmlf.reproduction.report.charts import Chart
from pmlf.reproduction.report.summary import Record

FORMATS = ("png", "svg")


def draw(records: Sequence[Record], folder: Path) -> list[Path]:
    """Draw every chart of every record into `folder`. Files have the name of the record and a number."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for record in records:
        for number, chart in enumerate(charts.of_record(record), start=1):
            for kind in FORMATS:
                path = folder / f"{record.key}-{number}.{kind}"
                picture(chart, path, note=f"{record.artifact}, {record.profile}, {record.protocol}")
                written.append(path)
    return written


def picture(chart: Chart, path: Path, note: str) -> None:
    """Draw one chart into one file. The paper's claims are hollow."""
    # Figure instead of pyplot: no display needed, no global state
    from matplotlib.figure import Figure

    dots = chart.kind == "dots"
    figure = Figure(figsize=(6.4, 1.6 + 0.34 * len(chart.categories)) if dots else (6.4, 4.2), layout="constrained")
    axes = figure.subplots()
    for series in chart.series:
        colour = f"C{series.colour}"
        positions = [point[0] for point in series.points]
        values = [point[1] for point in series.points]
        spread = [[p[1] - p[2] for p in series.points], [p[3] - p[1] for p in series.points]]
        line = "none" if series.paper or dots else "-"
        first, second = (values, positions) if dots else (positions, values)
        axes.errorbar(
            first,
            second,
            xerr=spread if dots else None,
            yerr=None if dots else spread,
            marker="o",
            color=colour,
            linestyle=line,
            capsize=2,
            label=series.name,
            markerfacecolor="none" if series.paper else colour,
        )
    if dots:
        axes.set_yticks(range(len(chart.categories)), chart.categories)
        axes.invert_yaxis()
    if chart.logarithmic:
        axes.set_yscale("log")
    axes.set(xlabel=chart.x, ylabel=chart.y)
    axes.set_title(f"{chart.title}\n{note}", fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=130, metadata={"Date": None} if path.suffix == ".svg" else None)
