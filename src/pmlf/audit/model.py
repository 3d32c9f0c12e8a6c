"""`audit_model`: the user's own model and loss, attacked by the worst record that a search finds.

Two measurements. How far one record moves the clipped sum before the noise, as a multiple of the clip norm C: at most
1, or the noise is calibrated to the wrong sensitivity. And a lower bound on the epsilon of short runs of the mechanism,
noise and filter and all, with and without that record: at most what is claimed.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from pmlf.audit.bounds import Floats
from pmlf.audit.canaries import Mechanism, Progress, Scores, unheard, without_filter
from pmlf.audit.model_controls import ModelControl
from pmlf.audit.neighbours import Audited, Moment, Releases, RunRandomness
from pmlf.audit.report import Report, Settings, claimed_mechanism, report_of
from pmlf.audit.search import Sensitivity, worst_record
from pmlf.basics.arguments import require_count, require_positive
from pmlf.basics.batches import batch_size, select, without
from pmlf.checks.inspection import LARGEST_SENSITIVITY
from pmlf.engine.capture import LossFunction
from pmlf.mechanism.noise import Randomness
from pmlf.methods import Method, resolve


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """What is claimed of a model's training, and how hard to look."""

    epsilon: float = 8.0  # a few hundred runs cannot show much of a small one
    delta: float = 1e-5
    steps: int = 4
    sample_rate: float = 1.0
    clip_norm: float = 1.0
    restarts: int = 8
    tries: int = 60  # moves from each start
    runs: int = 400  # half of them with the record; 0: no bound on epsilon
    confidence: float = 0.9999
    seed: int | None = None

    def __post_init__(self) -> None:
        require_positive("clip_norm", self.clip_norm, "it bounds one record's part in the sum; the paper uses 1.0")
        require_count("restarts", self.restarts, "it counts the climbs of the search")
        require_count("tries", self.tries, "it counts the moves of a climb")
        require_count("runs", self.runs, "half have the record, half have not; 0 leaves them out", least=0)
        if 0 < self.runs < 100:
            raise ValueError(f"runs={self.runs} shows nothing: give 100 or more, or 0 for the search alone")
        self.claim.randomness("")

    @property
    def claim(self) -> Settings:
        """The claim alone, as other audits take it: a run is a canary."""
        return Settings(
            epsilon=self.epsilon,
            delta=self.delta,
            steps=self.steps,
            sample_rate=self.sample_rate,
            canaries=max(self.runs, 100),
            confidence=self.confidence,
            seed=self.seed,
        )


@dataclass(frozen=True, kw_only=True)
class ModelReport:
    """The worst record found and, where runs were made, the lower bounds on epsilon with it.

    Computed from the examples without noise: sensitive where they are. The pair itself is in `sensitivity.batch` and is
    neither printed nor written.
    """

    subject: str
    settings: ModelSettings
    sensitivity: Sensitivity
    privacy: Report | None

    @property
    def refuted(self) -> bool:
        """Whether the record moves the sum too far, or a bound is above the claim."""
        return not self.sensitivity.holds or (self.privacy is not None and self.privacy.refuted)

    def to_json(self) -> dict[str, Any]:
        found = self.sensitivity
        return {
            "subject": self.subject,
            **asdict(self.settings),
            "refuted": self.refuted,
            "sensitivity": {
                "multiple": found.multiple,
                "multiple_in_float64": found.exact,
                "limit": LARGEST_SENSITIVITY,
                "holds": found.holds,
                "mode": "training" if found.training else "eval",
                "neighbour": found.neighbour,
                "example": found.example,
                "others": found.others,
                "releases_before": found.releases,
                "moves": list(found.moves),
                "evaluations": found.evaluations,
                "refused": found.refused,
            },
            "privacy": None if self.privacy is None else self.privacy.to_json(),
        }


def audit_model(
    model: nn.Module,
    loss_fn: LossFunction,
    batch: Any,
    *,
    method: Method | str = "dp-pmlf",
    settings: ModelSettings | None = None,
    progress: Progress = unheard,
) -> ModelReport:
    """Search the record that moves the clipped sum furthest, then bound the epsilon of runs with and without it.

    The search climbs hills on |sum(batch + x) - sum(batch)| / C through `PrivateStep` without noise, from subsets of
    the examples, in training mode (if the model is in it) and in eval mode, at the first release and where all of the
    method's points exist. It changes the record x and the other records: floating-point values freely, whole numbers
    within the ranges of the examples. A multiple above 1 + 1e-4 is a fault of the model, the loss or the library; none
    found is no proof.

    Then T steps with the noise that the claimed epsilon asks for, many times. The attacker knows the other records, the
    iterates, the filter and the dropout, everything but the noise and whether x took part. The score is the likelihood
    ratio of the released sums, by what x changes in the clipped sum at the iterates seen: at a sample rate of 1 no
    score tells more.

    Not seen: what the collation or an augmentation does, since the batch is given whole; what depends on the number of
    samples alone in a training mode whose draws shift with it; batches larger than the examples.

    Args:
        model: As it is trained; a copy is audited, in the mode it is in and in eval mode.
        loss_fn: Takes (model, batch) and returns one loss a sample.
        batch: Examples, 2 or more, better 8: of public or unprotected records, since the report shows what they give.
        method: A preset's name or a `pmlf.methods.Method`.
        settings: What is claimed and how hard to look.
        progress: Told the share of the work that was done.

    Raises:
        ValueError: Where the library refuses the model or its loss on the examples as they are.

    >>> linear = nn.Linear(3, 1)
    >>> def loss(model, rows):
    ...     return model(rows).squeeze(1) ** 2
    >>> settings = ModelSettings(restarts=2, tries=5, runs=0, seed=0)
    >>> audit_model(linear, loss, torch.randn(4, 3), settings=settings).refuted
    False
    """
    settings = settings or ModelSettings()
    audited = _audited(model, loss_fn, batch, method, settings)
    return _audit(audited.method.name, audited, settings, progress)


def audit_model_control(
    control: ModelControl,
    model: nn.Module,
    loss_fn: LossFunction,
    batch: Any,
    *,
    method: Method | str = "dp-pmlf",
    settings: ModelSettings | None = None,
    progress: Progress = unheard,
) -> ModelReport:
    """The same for a broken variant of the model, which must be refuted."""
    settings = settings or ModelSettings()
    audited = _audited(model, loss_fn, batch, method, settings)
    return _audit(control.name, control.breaks(audited), settings, progress)


def _audited(
    model: nn.Module, loss_fn: LossFunction, batch: Any, method: Method | str, settings: ModelSettings
) -> Audited:
    if batch_size(batch) < 2:
        raise ValueError(f"the batch has {batch_size(batch)} examples: give 2 or more, 8 for example")
    return Audited(
        model=model, loss_fn=loss_fn, examples=batch, method=resolve(method), clip_norm=float(settings.clip_norm)
    )


def _audit(subject: str, audited: Audited, settings: ModelSettings, progress: Progress) -> ModelReport:
    randomness = settings.claim.randomness(subject)
    share = 0.5 if settings.runs else 1.0

    def halved(done: float) -> None:
        progress(share * done)

    worst = worst_record(
        audited, restarts=settings.restarts, tries=settings.tries, randomness=randomness, progress=halved
    )
    privacy = None
    if settings.runs:
        mechanism = claimed_mechanism(audited.method, settings.claim)
        scores = _scores(audited, worst, mechanism, settings.runs, randomness, halved)
        privacy = report_of(subject, mechanism, settings.claim, scores)
    return ModelReport(subject=subject, settings=settings, sensitivity=worst, privacy=privacy)


def _scores(
    audited: Audited, worst: Sensitivity, mechanism: Mechanism, runs: int, randomness: Randomness, progress: Progress
) -> Scores:
    """A score a run, every other one with the record."""
    attack = _Attack(audited, worst, mechanism, RunRandomness(randomness.seed_for("runs")))
    included = np.arange(runs) % 2 == 0
    values = np.zeros(runs)
    for run in range(runs):
        values[run] = attack.score(run, bool(included[run]))
        progress(1 / runs)
    return Scores(values=values, included=included)


class _Attack:
    """Runs of the mechanism with and without the worst record, and an observer who knows all but the noise.

    The checks have seen the examples in the search; what is measured here is what is released.
    """

    def __init__(self, audited: Audited, worst: Sensitivity, mechanism: Mechanism, randomness: RunRandomness) -> None:
        unchecked = audited.without_checks()
        self._worst, self._mechanism, self._randomness = worst, mechanism, randomness
        self._unfiltered = without_filter(audited.method.low_pass, list(np.eye(mechanism.steps)))  # as it is linear
        self._private = Releases(
            unchecked,
            training=worst.training,
            randomness=randomness,
            noise_multiplier=mechanism.noise_multiplier,
            filtered=True,
        )
        self._observer = Releases(unchecked, training=worst.training, randomness=randomness)
        self._start = self._private.now

    def score(self, run: int, included: bool) -> float:
        """log(P[released | with x] / P[released | without]), but for a factor, summed over the steps of one run."""
        self._randomness.run = run
        self._private.go_to(self._start)
        released: list[Floats] = []
        others: list[Floats] = []
        changes: list[Floats] = []
        for step in range(self._mechanism.steps):
            base, change = self._known(self._private.now)
            gradient = self._released(step, included)
            self._private.update(gradient)
            released.append(gradient.numpy())
            others.append(base.numpy())
            changes.append(change.numpy())
        rate, sums, changed = self._mechanism.sample_rate, self._unfiltered @ np.stack(released), np.stack(changes)
        return float(((sums - rate * np.stack(others) - rate * changed / 2) * changed).sum())

    def _known(self, moment: Moment) -> tuple[Tensor, Tensor]:
        """The sum of the other records, and what the record changes in it."""
        base = self._observer.without_last(self._worst.batch, moment, self._worst.neighbour)
        return base, self._observer.with_last(self._worst.batch, moment) - base

    def _released(self, step: int, included: bool) -> Tensor:
        """One private release: of everybody, or of those drawn."""
        size = batch_size(self._worst.batch) - (not included)
        batch = select(self._worst.batch, slice(0, size))
        drawn = set(self._randomness.stream("sampling", step).chosen(size, self._mechanism.sample_rate).tolist())
        for index in reversed(range(size)):
            if index not in drawn:
                batch = without(batch, index)
        return self._private.of(batch, torch.ones(len(drawn)))
