"""Several methods side by side: means over seeds, their 95 % intervals, and paired gains over the first method."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pmlf.experiments.results import Evaluation, RunResult

Interval = tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class MethodResults:
    """The runs of one method, one for each seed."""

    method: str
    runs: tuple[RunResult, ...]

    @property
    def lr(self) -> float:
        return self.runs[0].spec.lr

    @property
    def epsilon(self) -> float:
        """The largest that a run has spent."""
        return max(run.epsilon for run in self.runs)

    @property
    def seconds(self) -> float:
        """The seconds that all runs took together."""
        return sum(run.seconds for run in self.runs)

    @property
    def accuracy(self) -> float | None:
        """The mean over the seeds; None without an evaluation."""
        found = [run.test_accuracy for run in self.runs if run.test_accuracy is not None]
        return sum(found) / len(found) if found else None

    @property
    def brief(self) -> str:
        """The accuracy in a few characters: one seed's as it is shown elsewhere, or the mean over the seeds."""
        if len(self.runs) == 1 and self.runs[0].evaluations:
            last = self.runs[0].evaluations[-1]
            return last.scores[last.split].brief()
        return "-" if self.accuracy is None else f"{100 * self.accuracy:.1f} %"

    @property
    def interval(self) -> Interval | None:
        """95 % interval of the accuracy: of the mean over the seeds, or of one seed's test records."""
        ends = [run.evaluations[-1] for run in self.runs if run.evaluations]
        return interval_of(ends) if ends else None

    def gain_over(self, other: MethodResults) -> tuple[float, float] | None:
        """Mean of the paired differences and half the width of their 95 % interval; None for fewer than two seeds."""
        ours, others = ({run.spec.seed: run.test_accuracy for run in each.runs} for each in (self, other))
        pairs = [(value, others.get(seed)) for seed, value in ours.items()]
        gains = [value - reference for value, reference in pairs if value is not None and reference is not None]
        return None if len(gains) < 2 else (sum(gains) / len(gains), _half_width(gains))

    def course(self) -> list[tuple[float, float, Interval | None]]:
        """Epoch, accuracy and its interval, at every evaluation that all runs have."""
        found = []
        for each in zip(*(run.evaluations for run in self.runs), strict=False):
            mean = sum(evaluation.test_accuracy for evaluation in each) / len(each)
            found.append((each[0].epoch, mean, interval_of(each)))
        return found

    def to_json(self, first: MethodResults) -> dict[str, Any]:
        """The summary in comparison.json."""
        gain = None if self is first else self.gain_over(first)
        document: dict[str, Any] = {
            "method": self.method,
            "lr": self.lr,
            "seeds": len(self.runs),
            "accuracy": self.accuracy,
            "interval": self.interval,
        }
        if gain is not None:
            document[f"gain_over_{first.method}"] = {"mean": gain[0], "half_width": gain[1]}
        return document


def by_method(results: Sequence[RunResult]) -> list[MethodResults]:
    """The runs of every method, in the order in which the methods began."""
    names = list(dict.fromkeys(result.spec.method for result in results))
    return [MethodResults(method=name, runs=tuple(r for r in results if r.spec.method == name)) for name in names]


def interval_of(evaluations: Sequence[Evaluation]) -> Interval | None:
    """95 % interval of the mean accuracy over seeds (Student's t), or, for one seed, over its test records (Wilson)."""
    from pmlf.run.evaluation import Score

    if len(evaluations) == 1:
        score = evaluations[0].scores[evaluations[0].split]
        return score.interval if isinstance(score, Score) else None
    values = [evaluation.test_accuracy for evaluation in evaluations]
    mean, half = sum(values) / len(values), _half_width(values)
    return mean - half, mean + half


def _half_width(values: Sequence[float]) -> float:
    """Half the width of the 95 % interval of a mean, by Student's t.

    >>> round(_half_width([1.0, 2.0, 3.0]), 2)
    2.48
    """
    from scipy import stats

    mean = sum(values) / len(values)
    variance = sum((value - mean) ** 2 for value in values) / (len(values) - 1)
    return float(stats.t.ppf(0.975, len(values) - 1)) * math.sqrt(variance / len(values))


def comparison_json(results: Sequence[RunResult], out: Path) -> dict[str, Any]:
    """The content of comparison.json: a summary per method, and all results with their evaluations."""
    methods = by_method(results)
    return {
        "methods": [each.to_json(methods[0]) for each in methods],
        "runs": [result.to_full_json() for result in results],
        "note": rate_note(results),
        "out": str(out),
    }


def rate_note(results: Sequence[RunResult]) -> str:
    """A note on learning rates: that at a shared one some methods take larger steps, or each method's own."""
    methods = by_method(results)
    if len({each.lr for each in methods}) > 1:
        return "Learning rates: " + ", ".join(f"{each.method} {each.lr:g}" for each in methods) + "."
    note = f"All methods share the learning rate {methods[0].lr:g}."
    for each in methods:
        momentum = each.runs[0].spec.options.outer_momentum
        if momentum is not None:
            gain = 1 / (1 - momentum)
            note += f" The filter of {each.method} has a DC gain of {gain:.3g}, so its steps are larger."
    return note
