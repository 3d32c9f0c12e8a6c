"""Negative controls: deliberately broken variants, each with the neighbouring datasets and the score that expose it.

They show that the audit finds real faults. None is an option of the library: each is built around `PrivateStep` here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn

from pmlf.audit import shaped_controls
from pmlf.audit.bounds import FloatArray
from pmlf.audit.canaries import (
    CLIP_NORM,
    Mechanism,
    ProgressCallback,
    Scores,
    audited_scores,
    coins,
    derived,
    gradient,
    linear_loss,
    linear_model,
    no_progress,
    released_sums,
)
from pmlf.mechanism.noise import Randomness, SeededRandomness, Stream
from pmlf.methods import dp_pmlf, dpsgd
from pmlf.step import PrivateStep

_OTHERS = 32  # number of other records
_RECORDS = 20  # of a unit
_NEARLY_NO_NOISE = 1e-9


@dataclass(frozen=True, kw_only=True)
class Control:
    """A broken variant: its name, its fault, the claim about it (steps and sample rate), and how to score it."""

    name: str
    broken: str
    sample_rate: float
    steps: int
    scores: Callable[[Mechanism, int, Randomness, ProgressCallback], Scores]


def _clipped_per_point(claimed: Mechanism, canaries: int, randomness: Randomness, progress: ProgressCallback) -> Scores:
    """Clip the gradient at each evaluation point and add them with weight one, as the paper's public code does.

    The gradient of a linear loss is the same at every point, so this adds the same batch once per point.
    """
    points = dp_pmlf().points

    def accumulate(step: PrivateStep, samples: Tensor) -> None:
        for _ in points.at(step.releases):
            step.accumulate(samples)

    included = coins(randomness, canaries)
    mechanism = replace(claimed, method=dp_pmlf(k=1))
    sums = released_sums(mechanism, included, randomness, accumulate=accumulate, progress=progress)
    return Scores(values=sums.sum(0), included=included)


def _records_for_units(claimed: Mechanism, canaries: int, randomness: Randomness, progress: ProgressCallback) -> Scores:
    """Clip every record of a unit by itself and claim the epsilon of records for the unit. All are drawn at q = 1."""

    def accumulate(step: PrivateStep, samples: Tensor) -> None:
        for _ in range(_RECORDS):  # as many equal records
            step.accumulate(samples)

    included = coins(randomness, max(100, canaries // 10))  # far above the claim, so fewer are enough
    sums = released_sums(claimed, included, randomness, accumulate=accumulate, progress=progress)
    return Scores(values=sums.sum(0), included=included)


def _half_the_noise(claimed: Mechanism, canaries: int, randomness: Randomness, progress: ProgressCallback) -> Scores:
    halved = replace(claimed, noise_multiplier=claimed.noise_multiplier / 2)
    return audited_scores(halved, canaries, randomness, progress)


class _SameNoise(SeededRandomness):
    """Randomness that repeats: one stream per purpose, the same at every step."""

    def stream(self, purpose: str, *numbers: int) -> Stream:
        return super().stream(purpose)


def _noise_reused(claimed: Mechanism, canaries: int, randomness: Randomness, progress: ProgressCallback) -> Scores:
    """A canary is drawn at some steps and not at others. The difference between two steps has no noise."""
    included = coins(randomness, canaries)
    noise = _SameNoise(randomness.seed_for("reused noise"))
    sums = released_sums(claimed, included, randomness, noise=noise, progress=progress)
    return Scores(values=np.ptp(sums, axis=0), included=included)


def _divided_by_drawn(claimed: Mechanism, canaries: int, randomness: Randomness, progress: ProgressCallback) -> Scores:
    """All others are at +C and the record at -C: it lowers the sum and raises the divisor."""
    others = torch.full((_OTHERS, 1), CLIP_NORM)
    with_record = torch.cat([others, torch.full((1, 1), -CLIP_NORM)])

    def score(samples: Tensor, randomness: Randomness, times: int) -> FloatArray:
        drawn = len(samples)  # all records are drawn at q = 1
        releases = _releases(claimed, linear_model(1), linear_loss, samples, randomness, times, progress)
        return -releases[:, 0] * _OTHERS / drawn

    return _paired(with_record, others, score, canaries, randomness)


class _BatchNormalised(nn.Module):
    """A linear layer on features that are normalised over the batch by hand."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = linear_model(width)

    def forward(self, samples: Tensor) -> Tensor:
        centred = samples - samples.mean(0)
        return self.layer(centred / (centred.square().mean(0).sqrt() + 1e-5))


def _batch_norm(claimed: Mechanism, canaries: int, randomness: Randomness, progress: ProgressCallback) -> Scores:
    """The other records cancel out; one extreme record shifts all of them when it is normalised with them.

    The score is the release projected on the change that the record makes without noise.
    """
    signs = torch.tensor([[1.0, 1.0], [-1.0, -1.0]]).repeat(_OTHERS // 2, 1)
    with_record = torch.cat([signs, torch.tensor([[1e6, 1e6]])])

    def released(
        samples: Tensor, mechanism: Mechanism, randomness: Randomness, times: int, progress: ProgressCallback
    ) -> FloatArray:
        return _releases(
            mechanism, _BatchNormalised(2), linear_loss, samples, randomness, times, progress, unchecked=True
        )

    exact = replace(claimed, noise_multiplier=_NEARLY_NO_NOISE)
    with_it, without = (released(samples, exact, randomness, 1, no_progress)[0] for samples in (with_record, signs))
    direction = (with_it - without) / np.linalg.norm(with_it - without)

    def score(samples: Tensor, randomness: Randomness, times: int) -> FloatArray:
        return released(samples, claimed, randomness, times, progress) @ direction

    return _paired(with_record, signs, score, canaries, randomness)


def _empty_skipped(claimed: Mechanism, canaries: int, randomness: Randomness, progress: ProgressCallback) -> Scores:
    """No other records: a step takes place only if the record is drawn. The score is the number of steps."""
    record = torch.full((1, 1), CLIP_NORM)

    def score(samples: Tensor, randomness: Randomness, times: int) -> FloatArray:
        model = linear_model(1)
        step = _step(claimed, model, linear_loss, claimed.sample_rate, randomness)
        taken = np.zeros(times)
        for run in range(times):
            for t in range(claimed.steps):
                drawn = randomness.stream("sampling", run, t).chosen(len(samples), claimed.sample_rate)
                if len(drawn) > 0:
                    step.accumulate(samples[torch.from_numpy(drawn)])
                    step.release()
                    taken[run] += bool(gradient(model).any())  # visible to everyone: the weights change
                    model.zero_grad()
            progress(1 / (2 * times))
        return taken

    return _paired(record, record[:0], score, canaries, randomness)


def _paired(
    with_record: Tensor,
    without: Tensor,
    score: Callable[[Tensor, Randomness, int], FloatArray],
    canaries: int,
    randomness: Randomness,
) -> Scores:
    """Scores of runs on two neighbouring datasets, a quarter of `canaries` runs on each: a run is one observation."""
    each = canaries // 4
    sides = [score(samples, derived(randomness, side), each) for side, samples in enumerate((with_record, without))]
    return Scores(values=np.concatenate(sides), included=np.arange(2 * each) < each)


def _releases(
    mechanism: Mechanism,
    model: nn.Module,
    loss_fn: Callable[[nn.Module, Tensor], Tensor],
    samples: Tensor,
    randomness: Randomness,
    times: int,
    progress: ProgressCallback,
    *,
    unchecked: bool = False,
) -> FloatArray:
    """Release the full batch `times` times at the same weights. Shape (times, parameters), divided by the others."""
    step = _step(mechanism, model, loss_fn, _OTHERS, randomness, assume_independent_samples=unchecked)
    found = []
    for _ in range(times):
        step.accumulate(samples)
        step.release()
        found.append(gradient(model))
        progress(1 / (2 * times))
    return np.stack(found)


def _step(
    mechanism: Mechanism,
    model: nn.Module,
    loss_fn: Callable[[nn.Module, Tensor], Tensor],
    batch_size: float,
    randomness: Randomness,
    *,
    assume_independent_samples: bool = False,
) -> PrivateStep:
    return PrivateStep(
        model,
        loss_fn,
        method=dpsgd(),
        clip_norm=CLIP_NORM,
        noise_multiplier=mechanism.noise_multiplier,
        expected_batch_size=batch_size,
        generator=randomness,
        secure_noise=mechanism.secure_noise,
        assume_independent_samples=assume_independent_samples,
    )


CONTROLS: tuple[Control, ...] = (
    Control(
        name="clip-per-point",
        broken="clips the gradient at each point and adds them with weight one: a record moves the sum by k C",
        sample_rate=1.0,
        steps=4,
        scores=_clipped_per_point,
    ),
    Control(
        name="half-noise",
        broken="adds noise z/2 where z is claimed",
        sample_rate=1.0,
        steps=4,
        scores=_half_the_noise,
    ),
    Control(
        name="records-for-units",
        broken=f"protects single records and claims it for units of {_RECORDS} records",
        sample_rate=1.0,
        steps=1,
        scores=_records_for_units,
    ),
    Control(
        name="noise-reused",
        broken="adds the same noise at every step",
        sample_rate=0.5,
        steps=4,
        scores=_noise_reused,
    ),
    Control(
        name="divide-by-drawn",
        broken="divides by the drawn batch size, not by the public expected batch size",
        sample_rate=1.0,
        steps=1,
        scores=_divided_by_drawn,
    ),
    Control(
        name="skip-empty",
        broken="skips the step if the batch is empty",
        sample_rate=0.5,
        steps=4,
        scores=_empty_skipped,
    ),
    Control(
        name="batch-norm",
        broken="normalises features over the batch; the check for independent samples is switched off",
        sample_rate=1.0,
        steps=1,
        scores=_batch_norm,
    ),
    Control(
        name="shaped-all-groups",
        broken="draws from all records at every step where shaped noise is accounted for groups in turn",
        sample_rate=1.0,
        steps=2,
        scores=shaped_controls.drawn_from_all_groups,
    ),
    Control(
        name="shaped-as-white",
        broken="shapes its noise, draws by plain Poisson sampling, and is accounted for as if the noise were white",
        sample_rate=1.0,
        steps=8,
        scores=shaped_controls.accounted_as_white,
    ),
    Control(
        name="shaped-not-normalised",
        broken="shapes its noise by a matrix with columns of norm above 1",
        sample_rate=1.0,
        steps=2,
        scores=shaped_controls.not_normalised,
    ),
    Control(
        name="shaped-memory-shared",
        broken="copies of a run go on with the same memory of shaped noise",
        sample_rate=1.0,
        steps=1,
        scores=shaped_controls.memory_shared,
    ),
)
"""The broken variants that an audit of methods must refute, each with a claim of its own."""
