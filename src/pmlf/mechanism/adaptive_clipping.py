"""Adaptive clipping: a clip norm that follows a private estimate of a quantile of the norms (Andrew et al. 2021)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

import torch

from pmlf.basics.arguments import is_number, require_positive
from pmlf.mechanism.noise import Randomness

_COUNT_NOISE = 1 / 20  # over the expected batch size, by default
FARTHEST = 1e6  # the clip norm stays within this factor of its start


@dataclass(frozen=True, kw_only=True)
class AdaptiveClipping:
    """C_(t+1) = C_t exp(-rate (f_t - quantile)), f_t a noisy estimate of the fraction of samples with norm <= C_t.

    Every step releases two things of its batch: the clipped sum, and the number of samples within C_t, where a sample
    counts +1/2 or -1/2. A sample moves the first by at most C_t and the second by at most 1/2. With noise of multiplier
    z_s on the sum and of standard deviation s on the count, both together are one Gaussian release of multiplier z,

        1/z^2 = 1/z_s^2 + 1/(2 s)^2,

    so a run with adaptive clipping costs what any run with noise multiplier z costs, and its sum has a little more
    noise: z_s > z.

    Attributes:
        quantile: The fraction of samples that the clip norm is to bound, between 0 and 1.
        rate: How fast the clip norm moves: by a factor of at most exp(rate) in a step.
        count_noise: The standard deviation s of the noise on the count; None is a twentieth of the expected batch size.

    Raises:
        ValueError: A value is out of range.

    >>> AdaptiveClipping().sum_multiplier(1.0, expected_batch_size=1000)  # doctest: +ELLIPSIS
    1.00005...
    """

    quantile: float = 0.5
    rate: float = 0.2
    count_noise: float | None = None

    def __post_init__(self) -> None:
        if not (is_number(self.quantile) and 0.0 < self.quantile < 1.0):
            raise ValueError(f"quantile={self.quantile} is not in (0, 1): 0.5 is the median of the norms")
        if not (is_number(self.rate) and 0.0 < self.rate <= 1.0):
            raise ValueError(f"rate={self.rate} is not in (0, 1]: the clip norm moves by at most exp(rate), give 0.2")
        if self.count_noise is not None:
            require_positive("count_noise", self.count_noise, "it is the noise on the count of samples")

    def count_deviation(self, expected_batch_size: float) -> float:
        """The standard deviation s of the noise on the count."""
        return float(expected_batch_size * _COUNT_NOISE if self.count_noise is None else self.count_noise)

    def sum_multiplier(self, noise_multiplier: float, *, expected_batch_size: float) -> float:
        """z_s = (z^-2 - (2 s)^-2)^(-1/2): the multiplier of the noise on the sum, if both releases are to cost z.

        Args:
            noise_multiplier: z, of both releases together; 0 for a step without noise.
            expected_batch_size: B.

        Returns:
            z_s, not below z.

        Raises:
            ValueError: The count alone would cost more than z: 2 s <= z.
        """
        if noise_multiplier == 0.0:
            return 0.0
        twice = 2.0 * self.count_deviation(expected_batch_size)
        if twice <= noise_multiplier * (1 + 1e-6):
            raise ValueError(
                f"count_noise={twice / 2:g} is not above half the noise multiplier {noise_multiplier:g}, so the "
                f"count of samples alone would spend the budget: give count_noise={2 * noise_multiplier:.3g} or more, "
                "or a larger expected batch size"
            )
        return (noise_multiplier**-2 - twice**-2) ** -0.5


@final
class ClipNorm:
    """The clip norm of the next step: a constant, or one that follows the released counts.

    Args:
        start: The clip norm of the first step.
        adaptive: How it changes; None keeps it.
        expected_batch_size: B.
        without_noise: Whether the count gets no noise, as the sum in a test.

    >>> from pmlf.mechanism.noise import SecureRandomness
    >>> norm = ClipNorm(1.0, AdaptiveClipping(quantile=0.5, rate=0.2), expected_batch_size=100, without_noise=True)
    >>> round(norm.after(50.0, SecureRandomness(), 0), 4)  # all of 100 samples within it
    0.9048
    """

    def __init__(
        self,
        start: float,
        adaptive: AdaptiveClipping | None,
        *,
        expected_batch_size: float,
        without_noise: bool = False,
    ) -> None:
        self._value = start
        self._start = start
        self._adaptive = adaptive
        self._expected = expected_batch_size
        self._without_noise = without_noise

    def after(self, centred: float, randomness: Randomness, release: int) -> float:
        """The clip norm after a step: its count gets noise, and from then on is public.

        Args:
            centred: The number of samples within the clip norm, where a sample is +1/2 or -1/2.
            randomness: The source of the noise.
            release: The number of the release.

        Returns:
            The clip norm of the next step.
        """
        if self._adaptive is None:
            return self._value
        count = torch.tensor([centred], dtype=torch.float64)
        if not self._without_noise:
            deviation = self._adaptive.count_deviation(self._expected)
            randomness.stream("clip count", release).add_gaussian_(count, deviation, hardened=True)
        fraction = min(max(float(count) / self._expected + 0.5, 0.0), 1.0)
        moved = self._value * math.exp(-self._adaptive.rate * (fraction - self._adaptive.quantile))
        self._value = min(max(moved, self._start / FARTHEST), self._start * FARTHEST)
        return self._value

    def state_dict(self) -> dict[str, Any]:
        """The present clip norm, which follows from released counts; nothing of a constant one."""
        return {} if self._adaptive is None else {"clip_norm": self._value}

    def load_state_dict(self, state: Mapping[str, Any]) -> float:
        """Continue with a saved clip norm, and return it.

        Raises:
            ValueError: The state has none and this clip norm is adaptive, or the other way round.
        """
        if ("clip_norm" in state) != (self._adaptive is not None):
            raise ValueError("the state and this step differ in adaptive clipping: build it as it was saved")
        if self._adaptive is not None:
            require_positive("clip_norm", state["clip_norm"], "it is the clip norm of the saved step")
            self._value = float(state["clip_norm"])
        return self._value
