"""Runs side by side on one self-contained HTML page: curves with intervals, epsilon, costs and certificates.

The page has no script, so there is nothing to fail, and it shows nothing sensitive: a recorded training loss stays out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2

from pmlf.evidence import certificate
from pmlf.experiments.folder import RunFolder
from pmlf.experiments.results import Evaluation, RunResult
from pmlf.run.evaluation import Score

WIDTH, HEIGHT, LEFT, BOTTOM, TOP, RIGHT = 360, 230, 44, 36, 10, 12  # of a chart, in pixels on a phone
COLOURS = ("#2563eb", "#c2410c", "#047857", "#7e22ce", "#be123c", "#0e7490", "#a16207", "#475569")
_TICKS = 5


@dataclass(frozen=True, kw_only=True)
class ReportedRun:
    """A run folder with its result and its certificate."""

    name: str
    result: RunResult
    certificate: Mapping[str, Any]
    holds: str | None  # the reason why the certificate does not hold, or None

    @staticmethod
    def read(path: Path) -> ReportedRun:
        """Read a run folder and recompute its certificate.

        Raises:
            ValueError: The folder has no result yet, or a file in it is damaged.
        """
        result = RunFolder(path).result()
        if result is None:
            raise ValueError(
                f"{str(path)!r} has no result yet: finish the run with `pmlf train --resume {path}`, then report it"
            )
        document = certificate.read(path / "certificate.json")
        return ReportedRun(
            name=path.resolve().name, result=result, certificate=document, holds=certificate.examined(document)[1]
        )

    @property
    def facts(self) -> list[tuple[str, str]]:
        """What the page shows of the run: settings, scores, epsilon and cost."""
        spec, result = self.result.spec, self.result
        last = result.evaluations[-1] if result.evaluations else None
        scores = [] if last is None else [(split, s.in_words()) for split, s in last.scores.items()]
        claimed = self.certificate["epsilon"]
        unit = self.certificate["adjacency"]
        return [
            ("method", spec.method),
            ("model and data", f"{spec.model_name} on {Path(spec.dataset).name}"),
            *scores,
            ("epsilon, certified", "none" if claimed is None else f"{claimed:.4g} at delta {spec.delta:.3g}, {unit}"),
            ("epsilon, spent", f"{result.epsilon:.4g}"),
            (
                "certificate",
                "holds, recomputed for this page" if self.holds is None else f"does NOT hold: {self.holds}",
            ),
            ("steps", f"{result.steps} of {result.planned_steps}{_why(result)}"),
            ("batch size and rate", f"{spec.batch_size} records expected, learning rate {spec.lr:g}"),
            ("noise multiplier", f"{result.noise_multiplier:.4g}, clip norm {spec.clip_norm:g}"),
            ("time", f"{result.seconds:.1f} s of training and evaluation"),
            ("noise", "cryptographic" if spec.seed is None else f"seed {spec.seed}: for comparison, not for release"),
        ]


def render(runs: Sequence[ReportedRun]) -> str:
    """The HTML page of the runs.

    Args:
        runs: At least one run.

    Returns:
        The page. Every value is escaped, and the page loads nothing else.
    """
    source = (resources.files("pmlf") / "assets" / "runs.html.j2").read_text(encoding="utf-8")
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, undefined=jinja2.StrictUndefined)
    coloured = [(run, COLOURS[index % len(COLOURS)]) for index, run in enumerate(runs)]
    charts = [
        _chart("Accuracy by epoch", "epoch", coloured, lambda evaluation: evaluation.epoch),
        _chart("Accuracy by epsilon spent", "epsilon", coloured, lambda evaluation: evaluation.epsilon),
    ]
    return environment.from_string(source).render(runs=coloured, charts=charts)


@dataclass(frozen=True, kw_only=True)
class _Curve:
    colour: str
    line: str
    band: str
    dots: list[tuple[float, float, float, float]]  # x, y, and both ends of the interval


def _chart(
    title: str, axis: str, runs: Sequence[tuple[ReportedRun, str]], position: Callable[[Evaluation], float]
) -> dict[str, Any]:
    """Accuracies of the main split over some axis, with bands for their 95 % intervals."""
    runs = [(run, colour) for run, colour in runs if _has_accuracies(run)]
    evaluations = [each for run, _ in runs for each in run.result.evaluations]
    most = max((position(each) for each in evaluations), default=1.0) or 1.0
    intervals = [each.scores[each.split].interval for each in evaluations] or [(0.0, 1.0)]
    low, high = min(pair[0] for pair in intervals), max(pair[1] for pair in intervals)

    def x(value: float) -> float:
        return round(LEFT + (WIDTH - LEFT - RIGHT) * value / most, 1)

    def y(value: float) -> float:
        share = (value - low) / (high - low) if high > low else 0.5
        return round(HEIGHT - BOTTOM - (HEIGHT - BOTTOM - TOP) * share, 1)

    def curve(run: ReportedRun, colour: str) -> _Curve:
        points = [(position(each), each.scores[each.split]) for each in run.result.evaluations]
        upper = [(x(at), y(score.interval[1])) for at, score in points]
        lower = [(x(at), y(score.interval[0])) for at, score in reversed(points)]
        dots = [(x(at), y(score.accuracy), y(score.interval[0]), y(score.interval[1])) for at, score in points]
        line = _points([(right, up) for right, up, _, _ in dots])
        return _Curve(colour=colour, line=line, band=_points(upper + lower), dots=dots)

    steps = range(_TICKS)
    return {
        "title": title,
        "axis": axis,
        "x_ticks": [(x(most * i / (_TICKS - 1)), f"{most * i / (_TICKS - 1):.3g}") for i in steps],
        "y_ticks": [
            (y(low + (high - low) * i / (_TICKS - 1)), f"{100 * (low + (high - low) * i / (_TICKS - 1)):.1f}")
            for i in steps
        ],
        "curves": [curve(run, colour) for run, colour in runs],
        "size": {"width": WIDTH, "height": HEIGHT, "left": LEFT, "right": WIDTH - RIGHT, "bottom": HEIGHT - BOTTOM},
    }


def _has_accuracies(run: ReportedRun) -> bool:
    """Whether the scores are accuracies. Those of predicted numbers have another scale, and are in words only."""
    return all(isinstance(each.scores[each.split], Score) for each in run.result.evaluations)


def _points(pairs: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{x},{y}" for x, y in pairs)


def _why(result: RunResult) -> str:
    if result.interrupted:
        return ", interrupted"
    return ", stopped at its epsilon" if result.budget_spent else ""
