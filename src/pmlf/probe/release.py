"""The one way out of the sensitive part: a sum that carries its sensitivity, plus Gaussian noise."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from pmlf.mechanism.noise import Randomness


@dataclass(frozen=True, kw_only=True)
class SensitiveSum:
    """A sum over records that adding or removing one record moves by at most `sensitivity`, in the 2-norm.

    Attributes:
        values: The sum, in float64.
        sensitivity: The bound on one record's share.
    """

    values: Tensor
    sensitivity: float

    def released(self, noise_multiplier: float, randomness: Randomness, purpose: str, number: int) -> Tensor:
        """The sum + z * sensitivity * N(0, I). It may be called once: afterwards the sum itself is gone.

        Every Gaussian is half a sum of four (`hardened`), so that a released number does not reveal its uniforms.

        Args:
            noise_multiplier: z.
            randomness: Where the noise comes from.
            purpose: The name of the release, which keys seeded noise.
            number: Its number, which keys seeded noise.

        Returns:
            The released values, which anyone may see.
        """
        stream = randomness.stream(purpose, number)
        stream.add_gaussian_(self.values, noise_multiplier * self.sensitivity, hardened=True)
        return self.values
