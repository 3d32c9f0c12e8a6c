"""Negative controls: deliberately broken variants, each with the neighbouring pair and the score that expose it.

An audit that cannot find these would say nothing. None is an option of the library: what breaks privacy is built here,
around `PrivateStep`, from the outside.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn

from pmlf.audit.bounds import Floats
from pmlf.audit.canaries import (
    CLIP_NORM,
    Mechanism,
    Progress,
    Scores,
    audited_scores,
    coins,
    derived,
    gradient,
    linear_loss,
    linear_model,
    released_sums,
    unheard,
)
from pmlf.mechanism.noise import Randomness, SeededRandomness, Stream
from pmlf.methods import dp_pmlf, dpsgd
from pmlf.step import PrivateStep

_OTHERS = 32  # records beside the one in question
_FAINT = 1e-9  # noise that hides nothing


@dataclass(frozen=True, kw_only=True)
class Control:
    """A broken variant: what is claimed of it (the steps and the sampling; the noise follows), and its scores."""

    name: str
    broken: str
    sample_rate: float
    steps: int
    scores: Callable[[Mechanism, int, Randomness, Progress], Scores]


def _clipped_per_point(claimed: Mechanism, canaries: int, randomness: Randomness, progress: Progress) -> Scores:
    """Every evaluation point's gradient clipped on its own and added with weight one, as the reference code does.

    The gradient of a linear loss is the same at every point, so this is the same batch, added once a point.
    """
    points = dp_pmlf().points

    def accumulate(step: PrivateStep, samples: Tensor) -> None:
        for _ in points.at(step.releases):
            step.accumulate(samples)

    included = coins(randomness, canaries)
    mechanism = replace(claimed, method=dp_pmlf(k=1))
    sums = released_sums(mechanism, included, randomness, accumulate=accumulate, progress=progress)
    return Scores(values=sums.sum(0), included=included)


def _half_the_noise(claimed: Mechanism, canaries: int, randomness: Randomness, progress: Progress) -> Scores:
    halved = replace(claimed, noise_multiplier=claimed.noise_multiplier / 2)
    return audited_scores(halved, canaries, randomness, progress)


class _SameNoise(SeededRandomness):
    """The stream of a purpose, whatever the step."""

    def stream(self, purpose: str, *numbers: int) -> Stream:
        return super().stream(purpose)


def _noise_reused(claimed: Mechanism, canaries: int, randomness: Randomness, progress: Progress) -> Scores:
    """A canary is drawn at some steps and not at others; what the steps differ by is then free of noise."""
    included = coins(randomness, canaries)
    noise = _SameNoise(randomness.seed_for("reused noise"))
    sums = released_sums(claimed, included, randomness, noise=noise, progress=progress)
    return Scores(values=np.ptp(sums, axis=0), included=included)


def _divided_by_drawn(claimed: Mechanism, canaries: int, randomness: Randomness, progress: Progress) -> Scores:
    """All others at +C, the record at -C: it lowers the sum and raises the divisor."""
    others = torch.full((_OTHERS, 1), CLIP_NORM)
    with_record = torch.cat([others, torch.full((1, 1), -CLIP_NORM)])

    def score(samples: Tensor, randomness: Randomness, times: int) -> Floats:
        drawn = len(samples)  # everybody is drawn at q = 1
        releases = _releases(claimed, linear_model(1), linear_loss, samples, randomness, times, progress)
        return -releases[:, 0] * _OTHERS / drawn

    return _paired(with_record, others, score, canaries, randomness)


class _BatchNormalised(nn.Module):
    """Features normalised over the batch by hand, then a linear layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = linear_model(width)

    def forward(self, samples: Tensor) -> Tensor:
        centred = samples - samples.mean(0)
        return self.layer(centred / (centred.square().mean(0).sqrt() + 1e-5))


def _batch_norm(claimed: Mechanism, canaries: int, randomness: Randomness, progress: Progress) -> Scores:
    """Others that balance each other; one record so extreme that, normalised with it, all of them lean one way.

    The score is what is released, along the difference that the record makes without noise.
    """
    signs = torch.tensor([[1.0, 1.0], [-1.0, -1.0]]).repeat(_OTHERS // 2, 1)
    with_record = torch.cat([signs, torch.tensor([[1e6, 1e6]])])

    def released(samples: Tensor, mechanism: Mechanism, randomness: Randomness, times: int, told: Progress) -> Floats:
        return _releases(mechanism, _BatchNormalised(2), linear_loss, samples, randomness, times, told, forced=True)

    faint = replace(claimed, noise_multiplier=_FAINT)
    with_it, without = (released(samples, faint, randomness, 1, unheard)[0] for samples in (with_record, signs))
    direction = (with_it - without) / np.linalg.norm(with_it - without)

    def score(samples: Tensor, randomness: Randomness, times: int) -> Floats:
        return released(samples, claimed, randomness, times, progress) @ direction

    return _paired(with_record, signs, score, canaries, randomness)


def _empty_skipped(claimed: Mechanism, canaries: int, randomness: Randomness, progress: Progress) -> Scores:
    """No other records: a step is taken only when the one in question is drawn. The score: steps taken."""
    record = torch.full((1, 1), CLIP_NORM)

    def score(samples: Tensor, randomness: Randomness, times: int) -> Floats:
        model = linear_model(1)
        step = _step(claimed, model, linear_loss, claimed.sample_rate, randomness)
        taken = np.zeros(times)
        for run in range(times):
            for t in range(claimed.steps):
                drawn = randomness.stream("sampling", run, t).chosen(len(samples), claimed.sample_rate)
                if len(drawn) > 0:
                    step.accumulate(samples[torch.from_numpy(drawn)])
                    step.release()
                    taken[run] += bool(gradient(model).any())  # what is seen: the weights move
                    model.zero_grad()
            progress(1 / (2 * times))
        return taken

    return _paired(record, record[:0], score, canaries, randomness)


def _paired(
    with_record: Tensor,
    without: Tensor,
    score: Callable[[Tensor, Randomness, int], Floats],
    canaries: int,
    randomness: Randomness,
) -> Scores:
    """Runs on two neighbouring datasets: a run is one observation, not thousands, so half as many are made."""
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
    progress: Progress,
    *,
    forced: bool = False,
) -> Floats:
    """(times, parameters): the noisy sum over a full batch / others, again and again at the same weights."""
    step = _step(mechanism, model, loss_fn, _OTHERS, randomness, assume_independent_samples=forced)
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
        broken="each point's gradient clipped, then added with weight one: a record moves the sum by k C",
        sample_rate=1.0,
        steps=4,
        scores=_clipped_per_point,
    ),
    Control(
        name="half-noise",
        broken="noise of z/2 where z is claimed",
        sample_rate=1.0,
        steps=4,
        scores=_half_the_noise,
    ),
    Control(
        name="noise-reused",
        broken="the same noise at every step",
        sample_rate=0.5,
        steps=4,
        scores=_noise_reused,
    ),
    Control(
        name="divide-by-drawn",
        broken="the mean over the records drawn in place of the public batch size",
        sample_rate=1.0,
        steps=1,
        scores=_divided_by_drawn,
    ),
    Control(
        name="skip-empty",
        broken="no step where the batch is empty",
        sample_rate=0.5,
        steps=4,
        scores=_empty_skipped,
    ),
    Control(
        name="batch-norm",
        broken="features normalised over the batch, the check of independent samples put aside",
        sample_rate=1.0,
        steps=1,
        scores=_batch_norm,
    ),
)
