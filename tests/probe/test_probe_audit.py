"""An attack on what a probe releases: below the claim for the probe, above it for three mistakes built on purpose.

The attacker knows everything but whether one record is there, and looks at a release along the direction in which that
record moves it: the best test against Gaussian noise. The distance of the two worlds, in standard deviations of what is
seen, is mu; the claim is mu <= 1/z. Three standard errors are subtracted, so the attack gives a lower bound.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from pmlf.mechanism.noise import SeededRandomness
from pmlf.probe.conditioning import FeatureBlock, mean_sum, moment_sum
from pmlf.probe.release import SensitiveSum
from pmlf.probe.rows import FeatureRows

RUNS, N, D = 600, 40, 64
BLOCK = FeatureBlock(start=0, stop=D)
Z = 2.0
CLAIM = 1 / Z
ERROR = (2 / RUNS) ** 0.5
FIRST = np.eye(D)[0]
Features = NDArray[np.float64]
SumOf = Callable[[Features], SensitiveSum]


def spread(seed: int = 0) -> Features:
    """Records in all directions but the first."""
    return np.random.default_rng(seed).normal(size=(N, D)) * (1 - FIRST)


def clustered() -> Features:
    """Records that all lie close to the first direction."""
    return FIRST + 0.05 * spread()


def attacked(
    sum_of: SumOf, others: Features, record: Features, divide: Callable[[int], float] = lambda n: 1.0
) -> float:
    """The measured mu between the worlds with and without the record; `divide` gives the public or private divisor."""
    worlds = (np.vstack([others, record]), others)
    exact = [sum_of(world) for world in worlds]
    means = [one.values / divide(len(world)) for one, world in zip(exact, worlds, strict=True)]
    direction = (means[0] - means[1]) / (means[0] - means[1]).norm()
    seen = []
    for place, (one, world) in enumerate(zip(exact, worlds, strict=True)):
        seen.append([])
        for run in range(RUNS):
            fresh = SensitiveSum(values=one.values.clone(), sensitivity=one.sensitivity)
            released = fresh.released(Z, SeededRandomness(run + place * RUNS), "audit", 0)
            seen[-1].append(float(released / divide(len(world)) @ direction))
    with_it, without = (np.array(each) for each in seen)
    return float((with_it.mean() - without.mean()) / ((with_it.std() + without.std()) / 2))


def mean(features: Features) -> SensitiveSum:
    return mean_sum(FeatureRows(features), BLOCK)


def moments(features: Features) -> SensitiveSum:
    return moment_sum(FeatureRows(features), BLOCK, torch.zeros(D, dtype=torch.float64), 2.5 / D**0.5)


def units(features: Features) -> Tensor:
    return torch.from_numpy(features / np.linalg.norm(features, axis=1, keepdims=True))


def unclipped_moments(features: Features) -> SensitiveSum:
    """The mistake: squares of unit vectors, with the sensitivity of clipped ones."""
    return SensitiveSum(values=units(features).square().sum(0), sensitivity=2.5 / D**0.5)


def centred_for_free(features: Features) -> SensitiveSum:
    """The mistake: the exact mean is subtracted, so one record moves all the others."""
    found = units(features)
    centred = found - found.mean(0)
    return SensitiveSum(values=(centred / centred.norm(dim=1, keepdim=True)).sum(0), sensitivity=1.0)


@pytest.mark.slow
@pytest.mark.parametrize("sum_of", [mean, moments])
def test_the_attack_stays_below_the_claim_and_comes_near_it(sum_of: SumOf) -> None:
    found = attacked(sum_of, spread(), 1e3 * FIRST)
    assert found - 3 * ERROR <= CLAIM <= found + 3 * ERROR


@pytest.mark.slow
def test_moments_without_clipping_are_caught() -> None:
    assert attacked(unclipped_moments, spread(), FIRST) - 3 * ERROR > CLAIM


@pytest.mark.slow
def test_a_mean_that_is_subtracted_without_accounting_is_caught() -> None:
    assert attacked(centred_for_free, clustered(), -FIRST) - 3 * ERROR > CLAIM


@pytest.mark.slow
def test_division_by_a_private_number_of_records_is_caught() -> None:
    """The probe's own sum divided by a public number stays below the claim, by the records' own number it does not."""
    assert attacked(mean, clustered(), -FIRST, divide=lambda n: float(N)) - 3 * ERROR <= CLAIM
    assert attacked(mean, clustered(), -FIRST, divide=float) - 3 * ERROR > CLAIM
