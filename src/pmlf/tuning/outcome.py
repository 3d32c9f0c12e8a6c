"""Trials as a table and as a picture."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path

from pmlf.basics.files import write_atomically
from pmlf.tuning.grid import in_words
from pmlf.tuning.tuner import TriedCandidate, TuningResult

CSV, PICTURE = "trials.csv", "trials.png"


def write_csv(result: TuningResult, path: Path) -> None:
    """Write one line per trial: its settings, and the numbers of its score."""
    text = io.StringIO()
    rows = [{**trial.candidate, "score": trial.score, **trial.numbers} for trial in result.ranked]
    writer = csv.DictWriter(text, fieldnames=list(rows[0]))
    writer.writeheader()
    writer.writerows(rows)
    write_atomically(path, text.getvalue().encode())


def plot(result: TuningResult, path: Path) -> None:
    """Draw the score of every trial with its 95 % interval, best first, into the image file `path`."""
    from matplotlib.figure import Figure  # instead of pyplot: no display needed, no global state

    trials = result.ranked
    figure = Figure(figsize=(7, 1.2 + 0.32 * len(trials)), layout="constrained")
    axes = figure.subplots()
    places = list(range(len(trials)))[::-1]
    scores = [trial.score for trial in trials]
    axes.errorbar(scores, places, xerr=_intervals(trials), fmt="o", capsize=3)
    axes.set_yticks(places, [in_words(trial.candidate) for trial in trials])
    axes.set_xlabel(f"{result.metric} of the trial")
    axes.set_title(f"{len(trials)} trials, {result.mode}")
    axes.grid(alpha=0.3, axis="x")
    figure.savefig(path, dpi=120)


def _intervals(trials: Sequence[TriedCandidate]) -> list[list[float]] | None:
    """Distances to the ends of the intervals; None where the score has none."""
    if not all("accuracy_low" in trial.numbers for trial in trials):
        return None
    low = [max(0.0, trial.score - trial.numbers["accuracy_low"]) for trial in trials]
    return [low, [max(0.0, trial.numbers["accuracy_high"] - trial.score) for trial in trials]]
