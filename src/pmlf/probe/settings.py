"""The settings of a private probe, checked, and the privacy plan that they make."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pmlf.basics.arguments import did_you_mean, is_number, require_count, require_positive
from pmlf.evidence.tally import PrivacyPlan, Query
from pmlf.mechanism import accounting
from pmlf.mechanism.accounting import Event
from pmlf.mechanism.composition import noise_beside
from pmlf.mechanism.filters import LowPass
from pmlf.probe.conditioning import FeatureBlock
from pmlf.probe.heads import HEADS

MEAN, MOMENTS = "mean", "second moments"
SCHEDULES = ("cosine", "constant")


@dataclass(frozen=True, kw_only=True)
class ProbeSettings:
    """Everything that a probe is told, all of it public.

    Attributes:
        head: "softmax", "sigmoid" or "least-squares".
        outputs: The number of outputs, K.
        records: The number of records, n.
        blocks: The blocks of columns.
        epsilon: The target epsilon of everything that is released.
        delta: The delta at which epsilon is stated.
        steps: The number of steps, T.
        batch_size: The expected batch size of Poisson sampling; None for full batches.
        clip_norm: C.
        learning_rate: The learning rate; None chooses it from public numbers.
        score_noise: The standard deviation that this choice allows in a unit vector's score.
        low_pass: The filter of the noisy gradients.
        schedule: "cosine" or "constant".
        averaging: The share of the last iterates whose mean is the model; 0 for the last iterate.
        mean_share: The share of the budget for the mean; 0 for none.
        moments_share: The share of the budget for the second moments; 0 for none.
        moment_clip: The clip norm of a record's squared coordinates, in units of 1/sqrt(d).
        whitening: How far the spectrum is flattened, 0 to 1.
        intercept: The share of a constant in every record's squared norm.

    Raises:
        ValueError: A value is out of range.
    """

    head: str
    outputs: int
    records: int
    blocks: tuple[FeatureBlock, ...]
    epsilon: float
    delta: float
    steps: int
    batch_size: int | None
    clip_norm: float
    learning_rate: float | None
    score_noise: float
    low_pass: LowPass
    schedule: str
    averaging: float
    mean_share: float
    moments_share: float
    moment_clip: float
    whitening: float
    intercept: float

    def __post_init__(self) -> None:
        if self.head not in HEADS:
            raise ValueError(
                f"head={self.head!r} is unknown: choose one of {', '.join(HEADS)}{_near(self.head, HEADS)}"
            )
        if self.schedule not in SCHEDULES:
            raise ValueError(f"schedule={self.schedule!r} is unknown: choose one of {', '.join(SCHEDULES)}")
        require_count("steps", self.steps, "it is the number of steps")
        if self.batch_size is not None:
            require_count("batch_size", self.batch_size, "it is the expected number of records in a step, or None")
            if self.batch_size > self.records:
                raise ValueError(
                    f"batch_size={self.batch_size} is more than the {self.records} records: leave it out, for full "
                    "batches"
                )
        require_positive("clip_norm", self.clip_norm, "it bounds the gradient of one record")
        require_positive("moment_clip", self.moment_clip, "it bounds the squared coordinates of one record")
        require_positive("score_noise", self.score_noise, "it is a standard deviation, usually about 1")
        if self.learning_rate is not None:
            require_positive("learning_rate", self.learning_rate, "it scales every step, give None for the default")
        if not isinstance(self.low_pass, LowPass):
            raise ValueError(f"low_pass={self.low_pass!r} is not a filter: give pmlf.filters.LowPass(a=..., b=...)")
        for name in ("averaging", "mean_share", "moments_share", "intercept"):
            value = getattr(self, name)
            if not is_number(value) or not 0 <= value < 1:
                raise ValueError(f"{name}={value!r} is not a share: give a number from 0 to below 1")
        if self.mean_share + self.moments_share >= 0.9:
            raise ValueError(
                f"mean_share={self.mean_share} and moments_share={self.moments_share} leave less than a tenth of the "
                "budget for the steps: give smaller shares"
            )
        if not is_number(self.whitening) or not 0 <= self.whitening <= 1:
            raise ValueError(f"whitening={self.whitening!r} is not in [0, 1]: 0 keeps the spectrum, 1 flattens it")

    @property
    def rate(self) -> float:
        """The sampling rate of the steps, q."""
        return 1.0 if self.batch_size is None else self.batch_size / self.records

    @property
    def divisor(self) -> float:
        """The public number that every noisy sum of gradients is divided by: n, or the expected batch size."""
        return float(self.records if self.batch_size is None else self.batch_size)

    def plan(self, spent: Mapping[Event, int]) -> PrivacyPlan:
        """The plan of all releases, with the smallest noise that stays within the target epsilon.

        A query with the share p of the budget has 1/z^2 = p / z_1^2 over all blocks, where z_1 is the noise of a
        single release that would spend everything. The steps get what is left.

        Args:
            spent: Events of other runs on the same records.

        Raises:
            ValueError: epsilon or delta is out of range, or the budget is already spent.
        """
        target, delta = self.epsilon, self.delta
        alone = accounting.noise_multiplier(
            target_epsilon=target, target_delta=delta, sample_rate=1.0, steps=1, spent=spent or None
        )
        shares = [share for share in (self.mean_share, self.moments_share) if share > 0]
        noise = [alone * math.sqrt(len(self.blocks) / share) for share in shares]
        queries = self.planned([*noise, alone]).queries
        events: Counter[Event] = Counter()
        for query in queries:
            events[query.event] += query.count
        if spent:
            z = accounting.noise_multiplier(
                target_epsilon=target,
                target_delta=delta,
                sample_rate=self.rate,
                steps=self.steps,
                spent=events + Counter(spent),
            )
        else:
            z = noise_beside(events, target_epsilon=target, target_delta=delta, sample_rate=self.rate, steps=self.steps)
        return self.planned([*noise, z])

    def planned(self, noise: Sequence[float]) -> PrivacyPlan:
        """The plan with given noise multipliers: of the queries that are released, and at last of the steps."""
        shares = {MEAN: self.mean_share, MOMENTS: self.moments_share}
        kinds = [Event(noise_multiplier=z, sample_rate=1.0) for z in noise[:-1]]
        names = [name for name, share in shares.items() if share > 0]
        return PrivacyPlan(
            event=Event(noise_multiplier=noise[-1], sample_rate=self.rate),
            steps=self.steps,
            delta=self.delta,
            target_epsilon=self.epsilon,
            queries=tuple(
                Query(name=name, event=kind, count=len(self.blocks)) for name, kind in zip(names, kinds, strict=True)
            ),
        )

    def pace(self, step: int) -> float:
        """The factor on the learning rate at a step: (1 + cos(pi t/T)) / 2, or 1."""
        return 1.0 if self.schedule == "constant" else (1 + math.cos(math.pi * step / self.steps)) / 2


def _near(given: object, allowed: Mapping[str, object]) -> str:
    return did_you_mean(given, allowed)
