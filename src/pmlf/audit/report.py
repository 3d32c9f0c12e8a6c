"""`audit_method` and `audit_control`: what is claimed, what was measured, and whether the claim stands."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pmlf.audit import bounds
from pmlf.audit.canaries import Mechanism, Progress, Scores, audited_scores, unheard
from pmlf.audit.controls import Control
from pmlf.basics.arguments import is_number, require_count, require_positive
from pmlf.mechanism import accounting
from pmlf.mechanism.noise import Randomness, SecureRandomness, SeededRandomness
from pmlf.methods import Method, dpsgd, resolve

_GUESSED = 20  # one in so many canaries is guessed
_ONE_RUN_DELTA = (
    1e-3  # of the claim's: the bound gives away 2 * canaries * delta, which at delta is more than it can afford
)
_SMALLEST_DELTA = 1e-10  # what the accountant can resolve


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What is claimed, and how hard to look."""

    epsilon: float = 1.0
    delta: float = 1e-5
    steps: int = 4
    sample_rate: float = 1.0
    canaries: int = 21_000  # half of them take part: more than 10,000 on either side, but for one time in 10^11
    guesses: int | None = None  # of the one-run bound; None: one canary in twenty
    confidence: float = 0.9999
    seed: int | None = None
    secure_noise: bool = False

    def __post_init__(self) -> None:
        require_positive("epsilon", self.epsilon, "it is the claim to test")
        require_count("steps", self.steps, "it counts the releases of a run")
        require_count("canaries", self.canaries, "half of them take part", least=100)
        if not (is_number(self.delta) and 1e-7 <= self.delta < 1.0):
            raise ValueError(f"delta={self.delta} is not in [1e-7, 1): the one-run bound needs a thousandth of it")
        if not (is_number(self.sample_rate) and 0.0 < self.sample_rate <= 1.0):
            raise ValueError(f"sample_rate={self.sample_rate} is not in (0, 1]: it is a record's chance to be drawn")
        if not (is_number(self.confidence) and 0.5 <= self.confidence < 1.0):
            raise ValueError(f"confidence={self.confidence} is not in [0.5, 1): 0.9999 lets one audit in 10,000 err")
        if self.guesses is not None:
            require_count("guesses", self.guesses, "it counts canaries guessed", least=2)
            if self.guesses > self.canaries:
                raise ValueError(f"guesses={self.guesses} is more than the canaries={self.canaries} there are")
        if self.seed is not None:
            require_count("seed", self.seed, "it makes the audit reproducible", least=0)

    def randomness(self, subject: str) -> Randomness:
        """The operating system's, or of the seed and the subject: two audits of one seed do not share their luck."""
        if self.seed is None:
            return SecureRandomness()
        return SeededRandomness(SeededRandomness(self.seed).seed_for(f"audit of {subject}"))


@dataclass(frozen=True, kw_only=True)
class Bound:
    """A measured lower bound on epsilon at some delta, beside what is claimed there."""

    name: str
    epsilon: float
    delta: float
    claimed: float

    @property
    def refutes(self) -> bool:
        return self.epsilon > self.claimed


@dataclass(frozen=True, kw_only=True)
class Report:
    """One audit: the claim, the bounds, and the scores they come from."""

    subject: str
    noise_multiplier: float
    settings: Settings
    bounds: tuple[Bound, ...]
    scores: Scores

    @property
    def refuted(self) -> bool:
        """Whether some bound is above what is claimed: the mechanism is not what its accountant was told."""
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


def audit_method(method: Method | str, settings: Settings, progress: Progress = unheard) -> Report:
    """Lower bounds on the epsilon of a method as implemented, from canaries sent through `PrivateStep`.

    The noise is what the accountant gives for the claimed epsilon. The bounds hold with the settings' confidence each;
    a claim that stands is not proven, one that is refuted is wrong.
    """
    method = resolve(method)
    mechanism = claimed_mechanism(method, settings)
    scores = audited_scores(mechanism, settings.canaries, settings.randomness(method.name), progress)
    guesses = settings.guesses or settings.canaries // _GUESSED
    one_run_delta = max(_ONE_RUN_DELTA * settings.delta, _SMALLEST_DELTA)
    one_run = Bound(
        name="one run",
        epsilon=bounds.one_run_epsilon(scores.values, scores.included, guesses, one_run_delta, settings.confidence),
        delta=one_run_delta,
        claimed=_spent(mechanism, one_run_delta),
    )
    return report_of(method.name, mechanism, settings, scores, (one_run,))


def audit_control(control: Control, settings: Settings, progress: Progress = unheard) -> Report:
    """The same for a deliberately broken variant, which must be refuted."""
    settings = Settings(**{**asdict(settings), "sample_rate": control.sample_rate, "steps": control.steps})
    mechanism = claimed_mechanism(dpsgd(), settings)
    scores = control.scores(mechanism, settings.canaries, settings.randomness(control.name), progress)
    return report_of(control.name, mechanism, settings, scores)


def claimed_mechanism(method: Method, settings: Settings) -> Mechanism:
    """What the settings claim of a method, with the noise that the accountant gives for it."""
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
    )


def _spent(mechanism: Mechanism, delta: float) -> float:
    return accounting.epsilon(
        noise_multiplier=mechanism.noise_multiplier,
        sample_rate=mechanism.sample_rate,
        steps=mechanism.steps,
        delta=delta,
    )


def report_of(
    subject: str, mechanism: Mechanism, settings: Settings, scores: Scores, more: tuple[Bound, ...] = ()
) -> Report:
    """The bounds that scores of two sides give, and `more`."""
    inside, outside = scores.inside, scores.outside
    measured = {"Clopper-Pearson": bounds.raw_epsilon(inside, outside, settings.delta, settings.confidence)}
    if mechanism.sample_rate == 1.0:  # only then is the claim a Gaussian one
        mu = bounds.gaussian_mu(inside, outside, settings.confidence)
        measured = {"Gaussian DP": bounds.gaussian_epsilon(mu, settings.delta), **measured}
    from_halves = tuple(
        Bound(name=name, epsilon=epsilon, delta=settings.delta, claimed=settings.epsilon)
        for name, epsilon in measured.items()
    )
    return Report(
        subject=subject,
        noise_multiplier=mechanism.noise_multiplier,
        settings=settings,
        bounds=from_halves + more,
        scores=scores,
    )


def plot(reports: Sequence[Report], path: Path) -> None:
    """Draw how the scores are distributed with and without the record, a panel an audit, into the image file `path`."""
    from matplotlib.figure import Figure  # without pyplot: it needs no display and leaves no figure behind

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
