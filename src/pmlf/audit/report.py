"""`audit_method` and `audit_control`: the claim, the measured bounds, and whether they refute the claim."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pmlf.audit import bounds
from pmlf.audit.canaries import Mechanism, ProgressCallback, Scores, audited_scores, no_progress
from pmlf.audit.controls import Control
from pmlf.basics.arguments import is_number, require_count, require_positive
from pmlf.mechanism import accounting
from pmlf.mechanism.noise import Randomness, SecureRandomness, SeededRandomness
from pmlf.methods import Method, dpsgd, resolve

_CANARIES_PER_GUESS = 20
_ONE_RUN_DELTA = 1e-3  # relative to the claim's delta: the bound loses 2 * canaries * delta, too much at delta itself
_SMALLEST_DELTA = 1e-10  # the smallest that the accountant resolves


@dataclass(frozen=True, kw_only=True)
class AuditSettings:
    """The claim to test, and the effort of the audit.

    Args:
        epsilon: The claimed epsilon.
        delta: The claimed delta.
        steps: Steps of one run.
        sample_rate: Probability that a step draws a record. The attack is strongest at 1.
        canaries: Number of canaries; each takes part with probability 1/2.
        guesses: Number of guesses of the one-run bound. None: one per 20 canaries.
        confidence: Probability that each bound holds.
        seed: Makes the audit reproducible. None: cryptographic randomness.
        secure_noise: Audit the noise of `secure_noise=True`.
        records_per_unit: Number of records of each canary. Above 1, the claim is about units, and the canaries go
            through a step of units.

    Raises:
        ValueError: If a number is out of range.
    """

    epsilon: float = 1.0
    delta: float = 1e-5
    steps: int = 4
    sample_rate: float = 1.0
    canaries: int = 21_000  # more than 10,000 on each side, except with probability 1e-11
    guesses: int | None = None
    confidence: float = 0.9999
    seed: int | None = None
    secure_noise: bool = False
    records_per_unit: int = 1

    def __post_init__(self) -> None:
        require_positive("epsilon", self.epsilon, "it is the claim to test")
        require_count("steps", self.steps, "it is the number of steps of a run")
        require_count("canaries", self.canaries, "about half of them take part", least=100)
        require_count("records_per_unit", self.records_per_unit, "it is the number of records of a canary", most=256)
        if not (is_number(self.delta) and 1e-7 <= self.delta < 1.0):
            raise ValueError(f"delta={self.delta} is not in [1e-7, 1): the one-run bound uses delta/1000")
        if not (is_number(self.sample_rate) and 0.0 < self.sample_rate <= 1.0):
            raise ValueError(
                f"sample_rate={self.sample_rate} is not in (0, 1]: it is the probability of drawing a record"
            )
        if not (is_number(self.confidence) and 0.5 <= self.confidence < 1.0):
            raise ValueError(f"confidence={self.confidence} is not in [0.5, 1): 0.9999 means one wrong bound in 10,000")
        if self.guesses is not None:
            require_count("guesses", self.guesses, "it is the number of canaries to guess", least=2)
            if self.guesses > self.canaries:
                raise ValueError(f"guesses={self.guesses} is more than canaries={self.canaries}: give fewer guesses")
        if self.seed is not None:
            require_count("seed", self.seed, "it makes the audit reproducible", least=0)

    def randomness(self, subject: str) -> Randomness:
        """Cryptographic randomness, or seeded: each subject then has its own streams."""
        if self.seed is None:
            return SecureRandomness()
        return SeededRandomness(SeededRandomness(self.seed).seed_for(f"audit of {subject}"))


@dataclass(frozen=True, kw_only=True)
class Bound:
    """A measured lower bound on epsilon at one delta, and the epsilon claimed there."""

    name: str
    epsilon: float
    delta: float
    claimed: float

    @property
    def refutes(self) -> bool:
        return self.epsilon > self.claimed


@dataclass(frozen=True, kw_only=True)
class AuditReport:
    """Result of an audit: the claim, the bounds, and the scores they come from."""

    subject: str
    noise_multiplier: float
    settings: AuditSettings
    bounds: tuple[Bound, ...]
    scores: Scores

    @property
    def refuted(self) -> bool:
        """Whether a bound is above the claim: the implementation does not match the accounted mechanism."""
        return any(bound.refutes for bound in self.bounds)

    def to_json(self) -> dict[str, Any]:
        inside, outside = self.scores.inside, self.scores.outside
        return {
            "subject": self.subject,
            "claimed_epsilon": self.settings.epsilon,
            "noise_multiplier": self.noise_multiplier,
            **{key: value for key, value in asdict(self.settings).items() if key != "epsilon"},
            "refuted": self.refuted,
            "bounds": [{**asdict(bound), "refutes": bound.refutes} for bound in self.bounds],
            "with_record": {"count": len(inside), "mean": float(inside.mean()), "deviation": float(inside.std())},
            "without_record": {"count": len(outside), "mean": float(outside.mean()), "deviation": float(outside.std())},
        }


def audit_method(
    method: Method | str, settings: AuditSettings, progress: ProgressCallback = no_progress
) -> AuditReport:
    """Measure lower bounds on the epsilon of a method's implementation, with canaries sent through `PrivateStep`.

    The noise is the accountant's for the claimed epsilon. A refuted claim is wrong. A claim that is not refuted is not
    proven.

    Args:
        method: Name of a preset or a `pmlf.methods.Method`.
        settings: The claim and the effort.
        progress: Called with the fraction of the work done since the last call.

    Returns:
        The bounds. Each holds with probability `settings.confidence`.

    >>> settings = AuditSettings(epsilon=4.0, canaries=200, seed=0)
    >>> audit_method("dpsgd", settings).refuted
    False
    """
    method = resolve(method)
    mechanism = claimed_mechanism(method, settings)
    scores = audited_scores(mechanism, settings.canaries, settings.randomness(method.name), progress)
    guesses = settings.guesses or settings.canaries // _CANARIES_PER_GUESS
    one_run_delta = max(_ONE_RUN_DELTA * settings.delta, _SMALLEST_DELTA)
    one_run = Bound(
        name="one run",
        epsilon=bounds.one_run_epsilon(scores.values, scores.included, guesses, one_run_delta, settings.confidence),
        delta=one_run_delta,
        claimed=_spent(mechanism, one_run_delta),
    )
    return report_of(method.name, mechanism, settings, scores, (one_run,))


def audit_control(control: Control, settings: AuditSettings, progress: ProgressCallback = no_progress) -> AuditReport:
    """Audit a deliberately broken variant, which the audit must refute. Its sample rate and steps replace yours."""
    settings = AuditSettings(
        **{**asdict(settings), "sample_rate": control.sample_rate, "steps": control.steps, "records_per_unit": 1}
    )
    mechanism = claimed_mechanism(dpsgd(), settings)
    scores = control.scores(mechanism, settings.canaries, settings.randomness(control.name), progress)
    return report_of(control.name, mechanism, settings, scores)


def claimed_mechanism(method: Method, settings: AuditSettings) -> Mechanism:
    """The mechanism that the settings claim, with the accountant's noise for it."""
    noise_multiplier = accounting.noise_multiplier(
        target_epsilon=settings.epsilon,
        target_delta=settings.delta,
        sample_rate=settings.sample_rate,
        steps=settings.steps,
    )
    return Mechanism(
        method=method,
        noise_multiplier=noise_multiplier,
        sample_rate=settings.sample_rate,
        steps=settings.steps,
        secure_noise=settings.secure_noise,
        records_per_unit=settings.records_per_unit,
    )


def _spent(mechanism: Mechanism, delta: float) -> float:
    return accounting.epsilon(
        noise_multiplier=mechanism.noise_multiplier,
        sample_rate=mechanism.sample_rate,
        steps=mechanism.steps,
        delta=delta,
    )


def report_of(
    subject: str, mechanism: Mechanism, settings: AuditSettings, scores: Scores, more: tuple[Bound, ...] = ()
) -> AuditReport:
    """The report of the bounds that follow from the scores, and of the bounds in `more`."""
    inside, outside = scores.inside, scores.outside
    measured = {"Clopper-Pearson": bounds.raw_epsilon(inside, outside, settings.delta, settings.confidence)}
    if mechanism.sample_rate == 1.0:  # only then is the claim Gaussian DP
        mu = bounds.gaussian_mu(inside, outside, settings.confidence)
        measured = {"Gaussian DP": bounds.gaussian_epsilon(mu, settings.delta), **measured}
    from_halves = tuple(
        Bound(name=name, epsilon=epsilon, delta=settings.delta, claimed=settings.epsilon)
        for name, epsilon in measured.items()
    )
    return AuditReport(
        subject=subject,
        noise_multiplier=mechanism.noise_multiplier,
        settings=settings,
        bounds=from_halves + more,
        scores=scores,
    )


def plot(reports: Sequence[AuditReport], path: Path) -> None:
    """Draw histograms of the scores with and without the record, one panel per audit, into the image file `path`."""
    from matplotlib.figure import Figure  # instead of pyplot: no display needed, no global state

    columns = min(len(reports), 3)
    rows = -(-len(reports) // columns)
    figure = Figure(figsize=(4.5 * columns, 3.2 * rows), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False).ravel()
    for axes, report in zip(panels, reports, strict=False):
        low, high = np.quantile(report.scores.values, [0.0005, 0.9995])
        edges = np.linspace(low, high if high > low else low + 1.0, 60)
        for values, label in ((report.scores.outside, "without"), (report.scores.inside, "with the record")):
            axes.hist(values, bins=edges.tolist(), density=True, alpha=0.55, label=label)
        best = max(report.bounds, key=lambda bound: bound.epsilon - bound.claimed)
        verdict = f"{best.name}: epsilon >= {best.epsilon:.2f}, claimed {best.claimed:.2f}"
        axes.set_title(f"{report.subject}\n{verdict}", fontsize=10, color="tab:red" if report.refuted else "black")
        axes.set_xlabel("score")
        axes.set_yticks([])
    for axes in panels[len(reports) :]:
        axes.set_visible(False)
    panels[0].legend(fontsize=9)
    figure.savefig(path, dpi=120)
