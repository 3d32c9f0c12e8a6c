"""Tables of a record as plain values, for the page, Markdown and LaTeX."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pmlf.reproduction.report.summary import CellResult, Record, claimed, named


@dataclass(frozen=True, kw_only=True)
class Entry:
    """Measured mean and standard deviation over seeds, in per cent, and the paper's claim for the same cell."""

    mean: float | None
    deviation: float | None
    seeds: int
    best: bool
    claim: str | None

    def measured(self, plus_minus: str = "±") -> str:
        """Mean and deviation as text."""
        if self.mean is None:
            return "-"
        return f"{self.mean:.2f}" + ("" if self.deviation is None else f" {plus_minus} {self.deviation:.2f}")


@dataclass(frozen=True, kw_only=True)
class ResultTable:
    """Results on one dataset with one model: a row per variant, a column per epsilon."""

    title: str
    epsilons: Sequence[float]
    rows: Sequence[tuple[str, Sequence[Entry]]]
    seeds: int | None  # of every cell; None if they differ

    @property
    def title_with_seeds(self) -> str:
        return self.title if self.seeds is None else f"{self.title}, {self.seeds} seed{'s' if self.seeds > 1 else ''}"


@dataclass(frozen=True, kw_only=True)
class Trials:
    """The accuracy of each learning rate on the held-out records, and the chosen rate."""

    label: str
    accuracies: Mapping[float, float]
    chosen: float | None
    steps: int

    @property
    def at_an_end(self) -> bool:
        """Whether the chosen rate is the smallest or the largest, so that the best may lie outside the grid."""
        return self.chosen is not None and self.chosen in (min(self.accuracies), max(self.accuracies))


def panels(record: Record) -> list[ResultTable]:
    """One table for each dataset and model that has runs."""
    found = []
    for dataset, model in dict.fromkeys((place.dataset, place.model) for place in record.places):
        mine = [c for c in record.cells if (c.place.dataset, c.place.model) == (dataset, model)]
        if not any(cell.runs for cell in mine):
            continue
        epsilons = sorted({cell.place.epsilon for cell in mine})
        variants = list(dict.fromkeys(cell.variant for cell in mine))
        cells = {(cell.variant, cell.place.epsilon): cell for cell in mine}
        best = {epsilon: _best([c for c in mine if c.place.epsilon == epsilon]) for epsilon in epsilons}
        counts = {len(cell.runs) for cell in mine if cell.runs}
        rows = [
            (variant, [_entry(record, cells.get((variant, epsilon)), best[epsilon]) for epsilon in epsilons])
            for variant in variants
        ]
        seeds = counts.pop() if len(counts) == 1 else None
        found.append(ResultTable(title=f"{named(dataset)}, {named(model)}", epsilons=epsilons, rows=rows, seeds=seeds))
    return found


def trials(record: Record) -> list[Trials]:
    """The tuning trials of a record."""
    return [
        Trials(
            label=f"{cell.place}: {cell.variant}",
            accuracies={_shown(trial["lr"]): 100 * trial["accuracy"] for trial in cell.document["trials"]},
            chosen=None if cell.document["lr"] is None else _shown(cell.document["lr"]),
            steps=cell.document["trials"][0]["steps"],
        )
        for cell in record.cells
        if cell.document.get("trials")
    ]


def _shown(rate: float) -> float:
    """A rate with the digits that are shown: those of two methods differ in the last digits of their filters' gains."""
    return float(f"{rate:g}")


def duration(seconds: float) -> str:
    """Seconds as text, in minutes or hours if they are many.

    >>> duration(30), duration(90), duration(7260)
    ('30 s', '1.5 min', '2.0 h')
    """
    if seconds < 60:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.1f} min" if seconds < 3600 else f"{seconds / 3600:.1f} h"


def _best(cells: Sequence[CellResult]) -> float | None:
    """The highest mean, if all cells with runs have the same seeds; otherwise means are not comparable."""
    if len({frozenset(cell.accuracies) for cell in cells if cell.runs}) > 1:
        return None
    return max((cell.mean for cell in cells if cell.mean is not None), default=None)


def _entry(record: Record, cell: CellResult | None, best: float | None) -> Entry:
    if cell is None:
        return Entry(mean=None, deviation=None, seeds=0, best=False, claim=None)
    claim = claimed(record.artifact, cell.place, cell.variant)
    shown = None
    if claim is not None:
        about = "about " if claim.get("approximate") else ""
        shown = f"{about}{claim['mean']:g}" + (f" ± {claim['std']:g}" if "std" in claim else "")
    return Entry(
        mean=cell.mean,
        deviation=cell.deviation,
        seeds=len(cell.runs),
        best=cell.mean is not None and cell.mean == best,
        claim=shown,
    )
