"""`audit_model`: attack your own model and loss with the worst record that a search finds.

It measures two things. First, how far one record moves the clipped sum before noise, as a multiple of the clip norm C.
Above 1, the noise is calibrated to the wrong sensitivity. Second, a lower bound on the epsilon of short runs of the
whole mechanism, with noise and filter, with and without that record. Above the claim, the claim is wrong.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from pmlf.audit.bounds import FloatArray
from pmlf.audit.canaries import Mechanism, ProgressCallback, Scores, no_progress, without_filter
from pmlf.audit.model_controls import ModelControl
from pmlf.audit.neighbours import AuditedModel, Releases, RunRandomness, Snapshot
from pmlf.audit.report import AuditReport, AuditSettings, claimed_mechanism, report_of
from pmlf.audit.search import Sensitivity, worst_record
from pmlf.basics.arguments import require_count, require_positive
from pmlf.basics.batches import batch_size, select, without
from pmlf.checks.inspection import LARGEST_SENSITIVITY
from pmlf.engine.passes import LossFunction
from pmlf.mechanism.noise import Randomness
from pmlf.methods import Method, resolve


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """The claim about a model's training, and the effort of the audit.

    Args:
        epsilon: The claimed epsilon. A few hundred runs cannot show a small one.
        delta: The claimed delta.
        steps: Steps of one run.
        sample_rate: Probability that a step draws a record.
        clip_norm: Clip norm C.
        restarts: Number of hill climbs of the search, in each mode of the model.
        tries: Number of moves tried in each climb.
        runs: Number of runs for the bounds on epsilon, half of them with the record. 0: the search alone.
        confidence: Probability that each bound holds.
        seed: Makes the audit reproducible. None: cryptographic randomness.

    Raises:
        ValueError: If a number is out of range.
    """

    epsilon: float = 8.0
    delta: float = 1e-5
    steps: int = 4
    sample_rate: float = 1.0
    clip_norm: float = 1.0
    restarts: int = 8
    tries: int = 60
    runs: int = 400
    confidence: float = 0.9999
    seed: int | None = None

    def __post_init__(self) -> None:
        require_positive("clip_norm", self.clip_norm, "it bounds what one record adds to the sum; the paper uses 1.0")
        require_count("restarts", self.restarts, "it is the number of hill climbs")
        require_count("tries", self.tries, "it is the number of moves in a climb")
        require_count("runs", self.runs, "half of them include the record; 0 runs the search alone", least=0)
        if 0 < self.runs < 100:
            raise ValueError(f"runs={self.runs} is too few for a bound: give 100 or more, or 0 for the search alone")
        self.claim.randomness("")

    @property
    def claim(self) -> AuditSettings:
        """The claim as settings of a canary audit, in which each run counts as a canary."""
        return AuditSettings(
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
    """Result of a model audit: the worst record found and, unless runs=0, lower bounds on epsilon with it.

    It is computed from the examples without noise, so it is sensitive if they are. `sensitivity.batch` holds the record
    itself, which is never printed or written.
    """

    subject: str
    settings: ModelSettings
    sensitivity: Sensitivity
    privacy: AuditReport | None

    @property
    def refuted(self) -> bool:
        """Whether the record moves the sum by more than the clip norm, or a bound is above the claim."""
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
    progress: ProgressCallback = no_progress,
) -> ModelReport:
    """Search for the record that moves the clipped sum furthest, then bound epsilon from runs with and without it.

    The search is hill climbing on |sum(batch + x) - sum(batch)| / C, computed by `PrivateStep` without noise. It starts
    from subsets of the examples, in training mode (if the model is in it) and in eval mode, at the first release and
    at those where all evaluation points of the method exist. It changes the record x and the other records:
    floating-point values freely, integers within the ranges of the examples. A multiple above 1 + 1e-4 is a fault of
    the model, the loss or the library. If none is found, this is not a proof.

    The runs take T steps each, with the noise for the claimed epsilon. The attacker knows the other records, the
    iterates, the filter and the dropout masks: everything except the noise and whether x takes part. The score is the
    likelihood ratio of the released sums, which is optimal at a sample rate of 1.

    The audit does not cover collation and augmentation, because it takes whole batches; batches larger than the
    examples; and, in a training mode whose random draws shift with the batch, effects of the batch size alone.

    Args:
        model: The model as it is trained. A copy is audited, in its current mode and in eval mode.
        loss_fn: Takes (model, batch) and returns one loss per sample.
        batch: At least 2 examples, better 8. Use public or unprotected records: the report shows numbers computed from
            them without noise.
        method: Name of a preset or a `pmlf.methods.Method`.
        settings: The claim and the effort. None: the defaults of `ModelSettings`.
        progress: Called with the fraction of the work done since the last call.

    Returns:
        The worst record found and the bounds on epsilon. `refuted` tells whether a claim is wrong.

    Raises:
        ValueError: If the library refuses the model or its loss on the given examples.

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
    progress: ProgressCallback = no_progress,
) -> ModelReport:
    """Audit a deliberately broken variant of the model, which the audit must refute.

    Args:
        control: The broken variant, one of `MODEL_CONTROLS`.
        model: As in `audit_model`, and so are the other arguments.
    """
    settings = settings or ModelSettings()
    audited = _audited(model, loss_fn, batch, method, settings)
    return _audit(control.name, control.breaks(audited), settings, progress)


def _audited(
    model: nn.Module, loss_fn: LossFunction, batch: Any, method: Method | str, settings: ModelSettings
) -> AuditedModel:
    if batch_size(batch) < 2:
        raise ValueError(f"the batch has {batch_size(batch)} examples: give at least 2, for example 8")
    return AuditedModel(
        model=model, loss_fn=loss_fn, examples=batch, method=resolve(method), clip_norm=float(settings.clip_norm)
    )


def _audit(subject: str, audited: AuditedModel, settings: ModelSettings, progress: ProgressCallback) -> ModelReport:
    randomness = settings.claim.randomness(subject)
    share = 0.5 if settings.runs else 1.0

    def scaled_progress(done: float) -> None:
        progress(share * done)

    worst = worst_record(
        audited, restarts=settings.restarts, tries=settings.tries, randomness=randomness, progress=scaled_progress
    )
    privacy = None
    if settings.runs:
        mechanism = claimed_mechanism(audited.method, settings.claim)
        scores = _scores(audited, worst, mechanism, settings.runs, randomness, scaled_progress)
        privacy = report_of(subject, mechanism, settings.claim, scores)
    return ModelReport(subject=subject, settings=settings, sensitivity=worst, privacy=privacy)


def _scores(
    audited: AuditedModel,
    worst: Sensitivity,
    mechanism: Mechanism,
    runs: int,
    randomness: Randomness,
    progress: ProgressCallback,
) -> Scores:
    """One score per run; every second run includes the record."""
    attack = _Attack(audited, worst, mechanism, RunRandomness(randomness.seed_for("runs")))
    included = np.arange(runs) % 2 == 0
    values = np.zeros(runs)
    for run in range(runs):
        values[run] = attack.score(run, bool(included[run]))
        progress(1 / runs)
    return Scores(values=values, included=included)


class _Attack:
    """Runs of the mechanism with and without the worst record, scored by an observer who knows all but the noise.

    The library's checks are off: the search has already run them on the examples.
    """

    def __init__(
        self, audited: AuditedModel, worst: Sensitivity, mechanism: Mechanism, randomness: RunRandomness
    ) -> None:
        unchecked = audited.without_checks()
        self._worst, self._mechanism, self._randomness = worst, mechanism, randomness
        self._unfiltered = without_filter(
            audited.method.low_pass, list(np.eye(mechanism.steps))
        )  # the inverse as a matrix
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
        """log(P[released | with x] / P[released | without x]) of one run, up to a constant factor."""
        self._randomness.run = run
        self._private.go_to(self._start)
        released: list[FloatArray] = []
        others: list[FloatArray] = []
        changes: list[FloatArray] = []
        for step in range(self._mechanism.steps):
            base, change = self._known(self._private.now)
            gradient = self._released(step, included)
            self._private.update(gradient)
            released.append(gradient.numpy())
            others.append(base.numpy())
            changes.append(change.numpy())
        rate, sums, changed = self._mechanism.sample_rate, self._unfiltered @ np.stack(released), np.stack(changes)
        return float(((sums - rate * np.stack(others) - rate * changed / 2) * changed).sum())

    def _known(self, snapshot: Snapshot) -> tuple[Tensor, Tensor]:
        """The clipped sum of the other records, and how the record changes it."""
        base = self._observer.without_last(self._worst.batch, snapshot, self._worst.neighbour)
        return base, self._observer.with_last(self._worst.batch, snapshot) - base

    def _released(self, step: int, included: bool) -> Tensor:
        """One private release of the drawn records."""
        size = batch_size(self._worst.batch) - (not included)
        batch = select(self._worst.batch, slice(0, size))
        drawn = set(self._randomness.stream("sampling", step).chosen(size, self._mechanism.sample_rate).tolist())
        for index in reversed(range(size)):
            if index not in drawn:
                batch = without(batch, index)
        return self._private.of(batch, torch.ones(len(drawn)))
