"""The noise of each release: on every rank's part of the sum, or shaped by the noise of the releases before."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from pmlf.mechanism.noise import Randomness
from pmlf.mechanism.noise_memory import NoiseMemory
from pmlf.parallel.shards import Placement
from pmlf.parallel.summing import Part
from pmlf.step.settings import StepSettings


@final
class ReleaseNoise:
    """Adds noise of standard deviation z times the sensitivity to sums, once per release.

    Args:
        settings: The mechanism.
        randomness: The source of the noise.
        placement: Where the parameters are; ranks add up their sums before the noise.
    """

    def __init__(self, settings: StepSettings, randomness: Randomness, placement: Placement) -> None:
        self._settings, self._randomness, self._placement = settings, randomness, placement
        self.begin()

    def begin(self) -> None:
        """Begin a block of shaped noise, with an empty memory; seeded noise goes on where it was."""
        self.memory = NoiseMemory(self._settings.method.noise, self._randomness)

    def add_(self, values: list[Tensor], sensitivity: float, dtypes: list[torch.dtype], *, release: int) -> None:
        """Add the noise of a release to a sum, in place.

        Args:
            values: The sum, one tensor per parameter.
            sensitivity: The most that one sample adds to it.
            dtypes: The types in which it is released.
            release: The number of the release.
        """
        noise, hardened = self._randomness.stream("noise", release), self._settings.secure_noise
        std = self._settings.sum_multiplier * sensitivity

        def add_part(value: Tensor, part: Part) -> None:
            if std > 0.0:
                noise.seek(part.word)
                noise.add_gaussian_(value, std, hardened=hardened)

        if self._settings.cycle == 1:
            self._placement.add_up(values, add_part, hardened=hardened)
        else:
            self.memory.add_(values, std, release=release, hardened=hardened, wide=torch.float64 in dtypes)
