"""What a certificate says about a mechanism, in words: what a step releases, how it draws, who the neighbours are."""

from __future__ import annotations

from dataclasses import dataclass

from pmlf.evidence.tally import RECORD

_PLAIN = "Poisson-subsampled Gaussian, once per step"
_COUNT = (
    "; a step releases the clipped sum and a count of the samples within the clip norm, of sensitivity C and 1/2: one "
    "Gaussian of noise multiplier z together, 1/z^2 = 1/z_sum^2 + 1/(2 count_noise)^2 (Andrew et al. 2021)"
)
_CUT = (
    "; a draw above the largest batch is cut to it at random, and delta includes the chance of that over all steps "
    "times 1 + e^epsilon (Chua et al. 2024)"
)


@dataclass(frozen=True, kw_only=True)
class MechanismWords:
    """The sentences for a mechanism.

    Attributes:
        bands: The number of bands of the noise; 1 is white noise.
        adaptive: Whether the clip norm is adaptive.
        truncated: Whether draws are cut to a largest batch.
        unit: What is protected: a record, or the name of a larger unit.

    >>> MechanismWords().adjacency
    'add or remove one record'
    """

    bands: int = 1
    adaptive: bool = False
    truncated: bool = False
    unit: str = RECORD

    @property
    def unit_of_privacy(self) -> str:
        """What is protected: one record, or all records of one unit."""
        return "one record of the training set" if self.unit == RECORD else f"one {self.unit}, with all its records"

    @property
    def mechanism(self) -> str:
        """What a step releases, with the argument for its epsilon where it is not the usual one."""
        if self.bands == 1:
            return _PLAIN + _COUNT * self.adaptive + _CUT * self.truncated
        return (
            f"Gaussian noise shaped by a matrix with {self.bands} bands and columns of norm at most 1, on Poisson "
            f"batches from {self.bands} groups in turn: a record takes part at most once in {self.bands} steps in a "
            "row, where its parts in the matrix times the sums are orthogonal and at most the clip norm, so each is "
            "one Poisson-subsampled Gaussian (Choquette-Choo et al. 2023)"
        )

    @property
    def adjacency(self) -> str:
        """Which datasets are neighbours."""
        changed = "one record" if self.unit == RECORD else f"one {self.unit} with all its records"
        if self.truncated:
            return f"zero out {changed}: it is drawn as before and adds nothing"
        return f"add or remove {changed}"

    @property
    def sampler(self) -> str:
        """How batches are drawn."""
        if self.truncated:
            return "truncated Poisson"
        return "Poisson" if self.bands == 1 else f"cyclic Poisson, {self.bands} groups"

    def document(self) -> dict[str, str]:
        """The entries of a certificate."""
        return {
            "mechanism": self.mechanism,
            "unit_of_privacy": self.unit_of_privacy,
            "adjacency": self.adjacency,
            "sampler": self.sampler,
        }
