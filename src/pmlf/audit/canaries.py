"""Canaries: records that are their own gradient, each along a coordinate of its own, sent through `PrivateStep`.

The loss of a sample is <w, sample>, so its gradient is the sample at every point, whatever a method's history. Canary i
points along coordinate i with far more than the clip norm, so it moves the released sum by C there and nowhere else:
thousands of neighbouring pairs in one run. An observer who knows the filter, which is public, takes it out again.
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

from pmlf.audit.bounds import Floats
from pmlf.basics.arguments import require_count
from pmlf.mechanism.filters import LowPass
from pmlf.mechanism.noise import Randomness, SecureRandomness, SeededRandomness
from pmlf.mechanism.sampling import PoissonBatches
from pmlf.methods import Method
from pmlf.step import PrivateStep

CLIP_NORM = 1.0
_FAR_ABOVE_CLIP = 100.0  # "automatic" clipping, C v / (|v| + 0.01), then gives 0.9999 C
_PHYSICAL_BATCH = 256

Progress = Callable[[float], None]  # told which share of the work was done since it was told last


def unheard(share: float) -> None:
    """Progress that nobody follows."""


@dataclass(frozen=True, kw_only=True)
class Mechanism:
    """What is claimed of a run: T Poisson-subsampled Gaussian steps."""

    method: Method
    noise_multiplier: float
    sample_rate: float
    steps: int
    secure_noise: bool = False


@dataclass(frozen=True, kw_only=True)
class Scores:
    """What an attacker sees of every canary; higher is meant to say that it took part."""

    values: Floats
    included: NDArray[np.bool_]

    @property
    def inside(self) -> Floats:
        return self.values[self.included]

    @property
    def outside(self) -> Floats:
        return self.values[~self.included]


class Rows:
    """One record a canary that takes part: its coordinate. `collate` makes it a dense sample."""

    def __init__(self, included: NDArray[np.bool_]) -> None:
        self._coordinates = np.flatnonzero(included)
        self._width = len(included)

    def __len__(self) -> int:
        return len(self._coordinates)

    def __getitem__(self, index: int) -> int:
        return int(self._coordinates[index])

    def collate(self, coordinates: list[int]) -> Tensor:
        samples = torch.zeros(len(coordinates), self._width)
        samples[torch.arange(len(coordinates)), torch.tensor(coordinates)] = _FAR_ABOVE_CLIP * CLIP_NORM
        return samples  # (n, width)


def linear_loss(model: nn.Module, samples: Tensor) -> Tensor:
    """<w, sample>."""
    return model(samples).squeeze(1)


def linear_model(width: int) -> nn.Linear:
    """w = 0 of that many coordinates."""
    model = nn.Linear(width, 1, bias=False)
    nn.init.zeros_(model.weight)
    return model


def coins(randomness: Randomness, canaries: int) -> NDArray[np.bool_]:
    """Which canaries take part: a fair coin each."""
    require_count("canaries", canaries, "half of them take part", least=100)
    included = np.zeros(canaries, dtype=bool)
    included[randomness.stream("canaries").chosen(canaries, 0.5)] = True
    return included


def derived(randomness: Randomness, *numbers: int) -> Randomness:
    """Randomness of its own for a part of an experiment."""
    if isinstance(randomness, SecureRandomness):
        return randomness
    return SeededRandomness(randomness.seed_for("audit", *numbers))


def audited_scores(mechanism: Mechanism, canaries: int, randomness: Randomness, progress: Progress = unheard) -> Scores:
    """The sum over the steps of what was released along each canary: at q = 1 the best score there is."""
    included = coins(randomness, canaries)
    sums = released_sums(mechanism, included, randomness, progress=progress)
    return Scores(values=sums.sum(0), included=included)


def released_sums(
    mechanism: Mechanism,
    included: NDArray[np.bool_],
    randomness: Randomness,
    *,
    noise: Randomness | None = None,
    accumulate: Callable[[PrivateStep, Tensor], Any] = PrivateStep.accumulate,
    progress: Progress = unheard,
) -> Floats:
    """(steps, canaries): the noisy sums behind the gradients that a private run releases, the public filter taken out.

    `noise` and `accumulate` are how a deliberately broken variant differs from the library.
    """
    rows, model = Rows(included), linear_model(len(included))
    batch_size = mechanism.sample_rate * len(rows)  # declared: it only scales what is released
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
    )
    sampler = PoissonBatches(
        rows,
        expected_batch_size=batch_size,
        randomness=randomness,
        max_physical_batch_size=_PHYSICAL_BATCH,
        collate_fn=rows.collate,
    )
    released = []
    for batch in sampler.batches(0, mechanism.steps):
        for micro_batch in batch:
            accumulate(step, micro_batch)
            progress(len(micro_batch) / (batch_size * mechanism.steps))
        step.release()
        released.append(gradient(model))
        optimizer.step()
    return batch_size * without_filter(mechanism.method.low_pass, released)


def gradient(model: nn.Module) -> Floats:
    """What a release left in `p.grad`, as one vector."""
    grads = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
    return torch.cat(grads).double().numpy()


def without_filter(low_pass: LowPass, released: Sequence[Floats]) -> Floats:
    """vbar_t from mhat_t: undo the correction, then run the recursion the other way.

    >>> low_pass = LowPass(a=(-0.9,), b=(0.15, -0.05))
    >>> ones = [np.ones(1)] * 3  # what the corrected filter makes of a constant 1
    >>> without_filter(low_pass, ones).ravel().round(9)
    array([1., 1., 1.])
    """
    if low_pass.b[0] == 0:
        raise ValueError(f"b={low_pass.b} has b_0 = 0, so the last step is not seen: audit a filter with another b_0")
    filtered = np.stack(released) * low_pass.corrections(len(released))[:, None]
    return np.asarray(signal.lfilter((1.0, *low_pass.a), low_pass.b, filtered, axis=0))
