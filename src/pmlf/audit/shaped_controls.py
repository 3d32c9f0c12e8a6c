"""Negative controls of shaped noise: wrong sampling, columns not normalised, a memory that copies of a run share."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from pmlf.audit.canaries import (
    CLIP_NORM,
    CanaryDataset,
    Mechanism,
    ProgressCallback,
    Scores,
    audited_scores,
    canary_sampler,
    coins,
    gradient,
    linear_loss,
    linear_model,
    released_sums,
)
from pmlf.mechanism.noise import Randomness, SeededRandomness, Stream
from pmlf.mechanism.sampling import LogicalBatch
from pmlf.mechanism.shape_fit import banded
from pmlf.methods import dpsgd
from pmlf.step import PrivateStep

_SHAPED = replace(dpsgd(), name="shaped", noise=banded(8))
_BANDS = _SHAPED.noise.bands
_COPIES = 3


def drawn_from_all_groups(
    claimed: Mechanism, canaries: int, randomness: Randomness, progress: ProgressCallback
) -> Scores:
    """Every step draws from all records at the rate of a group: a record takes part b times as often as counted."""
    return _drawn_plainly(replace(claimed, method=_SHAPED), canaries, randomness, progress)


def accounted_as_white(claimed: Mechanism, canaries: int, randomness: Randomness, progress: ProgressCallback) -> Scores:
    """Plain Poisson sampling, accounted as if the noise were white: what a record adds in two steps overlaps."""
    fewer = replace(claimed, method=_SHAPED, steps=claimed.steps // _BANDS)  # as many releases as claimed
    return _drawn_plainly(fewer, canaries, randomness, progress)


def _drawn_plainly(shaped: Mechanism, canaries: int, randomness: Randomness, progress: ProgressCallback) -> Scores:
    """Shaped noise on batches from all records. The score is the whitened release along what a record would add."""
    included = coins(randomness, canaries)
    everybody = replace(shaped, sample_rate=shaped.sample_rate * _BANDS)  # the sampler divides by the groups
    sampler = canary_sampler(everybody, included, randomness, cycle=1)
    sums = released_sums(shaped, included, randomness, sampler=sampler, progress=progress)
    matrix = _SHAPED.noise.matrix(len(sums))
    return Scores(values=(matrix.T @ (matrix @ sums)).sum(0), included=included)


def not_normalised(claimed: Mechanism, canaries: int, randomness: Randomness, progress: ProgressCallback) -> Scores:
    """The shape begins with 1, so that its columns are longer than 1: the same as noise c_0 times too small."""
    less = claimed.noise_multiplier * _SHAPED.noise.coefficients[0]
    return audited_scores(replace(claimed, method=_SHAPED, noise_multiplier=less), canaries, randomness, progress)


class _Forked(SeededRandomness):
    """The noise of one of several copies of a run: the same up to the first release, then its own."""

    copy = 0

    def stream(self, purpose: str, *numbers: int) -> Stream:
        return super().stream(purpose, *numbers, *([self.copy] if numbers and numbers[0] > 0 else []))


def memory_shared(claimed: Mechanism, canaries: int, randomness: Randomness, progress: ProgressCallback) -> Scores:
    """After one release a run is copied with its noise memory, and all copies go on, without the records.

    Each record takes part once, and one event is claimed. But every copy takes back noise of that release, so what it
    added is in the releases of all of them.
    """
    included = coins(randomness, canaries)
    dataset, shape = CanaryDataset(included), _SHAPED.noise
    seed, score = randomness.seed_for("forked noise"), np.zeros(canaries)
    for copy in range(_COPIES):
        noise, model = _Forked(seed), linear_model(canaries)
        object.__setattr__(noise, "copy", copy)
        step = PrivateStep(
            model,
            linear_loss,
            method=_SHAPED,
            clip_norm=CLIP_NORM,
            noise_multiplier=claimed.noise_multiplier,
            expected_batch_size=1.0,
            generator=noise,
            cycle=_BANDS,
        )
        for start in range(0, len(dataset), 256):
            rows = range(start, min(start + 256, len(dataset)))
            step.accumulate(dataset.collate([dataset[row] for row in rows]))
        released = []
        for t in range(_BANDS):
            step.release(LogicalBatch.whole(t, samples=0 if t else len(dataset), cycle=_BANDS))
            released.append(gradient(model))
            progress(1 / (_COPIES * _BANDS))
        whitened = shape.matrix(_BANDS) @ np.stack(released)
        weights = np.asarray(shape.coefficients)
        score += weights[1:] @ whitened[1:] + (weights[0] * whitened[0] if copy == 0 else 0.0)
    return Scores(values=score, included=included)
