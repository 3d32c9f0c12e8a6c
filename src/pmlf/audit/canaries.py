"""Canaries: records whose gradient is the record itself, each along its own coordinate, sent through `PrivateStep`.

The loss of a sample is <w, sample>, so its gradient is the sample at every evaluation point. Canary i is a multiple of
unit vector i, far longer than the clip norm. It moves the released sum by C along coordinate i only, so one run has
thousands of neighbouring pairs. The filter is public, and the audit inverts it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import signal
from torch import Tensor, nn

from pmlf.audit.bounds import FloatArray
from pmlf.basics.arguments import require_count
from pmlf.mechanism.filters import LowPass
from pmlf.mechanism.noise import Randomness, SecureRandomness, SeededRandomness
from pmlf.mechanism.sampling import LogicalBatch, PoissonBatches
from pmlf.mechanism.units import Units
from pmlf.methods import Method
from pmlf.step import PrivateStep

CLIP_NORM = 1.0
_FAR_ABOVE_CLIP = 100.0  # "automatic" clipping, C v / (|v| + 0.01), then gives 0.9999 C
_PHYSICAL_BATCH = 256

ProgressCallback = Callable[[float], None]  # called with the fraction of the work done since the last call


def no_progress(fraction: float) -> None:
    """A progress callback that does nothing."""


@dataclass(frozen=True, kw_only=True)
class Mechanism:
    """The claim about a run of a method: a record is drawn in at most `steps` steps, with probability `sample_rate`.

    A method with noise of b bands takes b times as many steps, each of them from one of b groups of records.
    """

    method: Method
    noise_multiplier: float
    sample_rate: float
    steps: int
    secure_noise: bool = False
    records_per_unit: int = 1  # of every canary, which is then a unit with as many equal records

    @property
    def cycle(self) -> int:
        """The number of groups of records, b; 1 for white noise."""
        return self.method.noise.bands

    @property
    def releases(self) -> int:
        """The number of steps of the run."""
        return self.steps * self.cycle


@dataclass(frozen=True, kw_only=True)
class Scores:
    """One score per canary (or run), and whether it took part. Higher scores suggest that it did."""

    values: FloatArray
    included: NDArray[np.bool_]

    @property
    def inside(self) -> FloatArray:
        return self.values[self.included]

    @property
    def outside(self) -> FloatArray:
        return self.values[~self.included]


class CanaryDataset:
    """The canaries that take part. A record is the canary's coordinate; `collate` makes dense samples of them."""

    def __init__(self, included: NDArray[np.bool_], records_per_unit: int = 1) -> None:
        self._coordinates = np.repeat(np.flatnonzero(included), records_per_unit)
        self._width = len(included)
        own = records_per_unit == 1
        self.units = None if own else Units(self._coordinates, most=records_per_unit, name="canary")

    def __len__(self) -> int:
        return len(self._coordinates)

    def __getitem__(self, index: int) -> int:
        return int(self._coordinates[index])

    def collate(self, coordinates: list[int]) -> Tensor:
        samples = torch.zeros(len(coordinates), self._width)
        samples[torch.arange(len(coordinates)), torch.tensor(coordinates)] = _FAR_ABOVE_CLIP * CLIP_NORM
        return samples  # (n, width)


def linear_loss(model: nn.Module, samples: Tensor) -> Tensor:
    """The loss <w, sample> of each sample."""
    return model(samples).squeeze(1)


def linear_model(width: int) -> nn.Linear:
    """A linear model with one output and weights w = 0."""
    model = nn.Linear(width, 1, bias=False)
    nn.init.zeros_(model.weight)
    return model


def coins(randomness: Randomness, canaries: int) -> NDArray[np.bool_]:
    """Which canaries take part: an independent fair coin for each."""
    require_count("canaries", canaries, "about half of them take part", least=100)
    included = np.zeros(canaries, dtype=bool)
    included[randomness.stream("canaries").chosen(canaries, 0.5)] = True
    return included


def derived(randomness: Randomness, *numbers: int) -> Randomness:
    """Separate randomness for one part of an experiment."""
    if isinstance(randomness, SecureRandomness):
        return randomness
    return SeededRandomness(randomness.seed_for("audit", *numbers))


def audited_scores(
    mechanism: Mechanism, canaries: int, randomness: Randomness, progress: ProgressCallback = no_progress
) -> Scores:
    """Score each canary by its coordinate of the released sums, added over the steps. Optimal at sample rate 1."""
    included = coins(randomness, canaries)
    sampler = canary_sampler(mechanism, included, randomness)
    sums = released_sums(mechanism, included, randomness, sampler=sampler, progress=progress)
    return Scores(values=matched(mechanism, sums, sampler, included, randomness), included=included)


def canary_sampler(
    mechanism: Mechanism, included: NDArray[np.bool_], randomness: Randomness, *, cycle: int | None = None
) -> PoissonBatches:
    """The draws of the mechanism from the included canaries; another cycle is for a deliberately broken variant."""
    dataset = CanaryDataset(included, mechanism.records_per_unit)
    return PoissonBatches(
        dataset,
        expected_batch_size=mechanism.sample_rate * int(included.sum()) / mechanism.cycle,
        randomness=randomness,
        max_physical_batch_size=_PHYSICAL_BATCH,
        collate_fn=dataset.collate,
        cycle=mechanism.cycle if cycle is None else cycle,
        units=dataset.units,
    )


def matched(
    mechanism: Mechanism,
    sums: FloatArray,
    sampler: PoissonBatches,
    included: NDArray[np.bool_],
    randomness: Randomness,
) -> FloatArray:
    """One score per canary: the whitened sums along what it would add if it is drawn in all steps of its group.

    With white noise this is the total over the steps. With shaped noise, multiplying by the shape whitens the noise,
    and a canary adds the columns of the shape that belong to its group's steps. A canary that does not take part gets a
    random group.
    """
    if mechanism.cycle == 1:
        return np.asarray(sums.sum(0))
    groups = np.floor(randomness.stream("absent").words(len(included)) / 2.0**64 * mechanism.cycle).astype(int)
    for group in range(mechanism.cycle):
        groups[np.flatnonzero(included)[sampler.eligible(group)]] = group
    matrix = mechanism.method.noise.matrix(len(sums))
    correlated = matrix.T @ (matrix @ sums)
    lengths = np.sqrt([np.sum(matrix[:, group :: mechanism.cycle] ** 2) for group in range(mechanism.cycle)])
    own = np.arange(len(sums))[:, None] % mechanism.cycle == groups
    return np.asarray(np.where(own, correlated, 0.0).sum(0) / lengths[groups])


def released_sums(
    mechanism: Mechanism,
    included: NDArray[np.bool_],
    randomness: Randomness,
    *,
    sampler: PoissonBatches | None = None,
    noise: Randomness | None = None,
    accumulate: Callable[[PrivateStep, Tensor], Any] = PrivateStep.accumulate,
    progress: ProgressCallback = no_progress,
) -> FloatArray:
    """Run the mechanism on the included canaries and return its noisy sums, of shape (steps, canaries).

    The sums are computed from the released gradients by inverting the public filter.

    Args:
        mechanism: Method, noise, sample rate and steps.
        included: Which canaries take part.
        randomness: Source of the batches and, by default, of the noise.
        sampler: The draws; by default those of the mechanism.
        noise: Another source of noise, for a deliberately broken variant.
        accumulate: Another way to add a micro-batch, for a deliberately broken variant.
        progress: Called with the fraction of the work done since the last call.
    """
    sampler = canary_sampler(mechanism, included, randomness) if sampler is None else sampler
    model = linear_model(len(included))
    batch_size = sampler.rate * sampler.population
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    step = PrivateStep(
        model,
        linear_loss,
        method=mechanism.method,
        clip_norm=CLIP_NORM,
        noise_multiplier=mechanism.noise_multiplier,
        expected_batch_size=batch_size,
        generator=noise or randomness,
        secure_noise=mechanism.secure_noise,
        cycle=mechanism.cycle,
        units=sampler.units is not None,
    )
    released = []
    for batch in sampler.batches(0, mechanism.releases):
        for indices, micro_batch in batch.numbered():
            if sampler.units is None:
                accumulate(step, micro_batch)
            else:
                step.accumulate(micro_batch, units=sampler.units.of(indices.numpy()))
            progress(len(micro_batch) / (mechanism.records_per_unit * batch_size * mechanism.releases))
        claimed = LogicalBatch.whole(batch.step, samples=batch.samples, cycle=mechanism.cycle)
        step.release(claimed if mechanism.cycle > 1 else None)
        released.append(gradient(model))
        optimizer.step()
    return batch_size * without_filter(mechanism.method.low_pass, released)


def gradient(model: nn.Module) -> FloatArray:
    """The released gradient, in `p.grad`, as one vector."""
    grads = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
    return torch.cat(grads).double().numpy()


def without_filter(low_pass: LowPass, released: Sequence[FloatArray]) -> FloatArray:
    """Invert the filter: compute vbar_t from mhat_t by undoing the bias correction and the recursion.

    >>> low_pass = LowPass(a=(-0.9,), b=(0.15, -0.05))
    >>> ones = [np.ones(1)] * 3  # the corrected filter maps a constant 1 to 1
    >>> without_filter(low_pass, ones).ravel().round(9)
    array([1., 1., 1.])
    """
    if low_pass.b[0] == 0:
        raise ValueError(f"b={low_pass.b} has b_0 = 0, so the filter cannot be inverted: audit a filter with b_0 != 0")
    filtered = np.stack(released) * low_pass.corrections(len(released))[:, None]
    return np.asarray(signal.lfilter((1.0, *low_pass.a), low_pass.b, filtered, axis=0))
