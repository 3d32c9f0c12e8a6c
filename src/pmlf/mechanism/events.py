"""What is accounted for: a release as an event, the events of cyclic sampling, and the range of both."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

from pmlf.basics.arguments import MOST, is_number, require_count
from pmlf.mechanism.shapes import MOST_BANDS

ACCOUNTANTS = ("pld", "rdp")
SMALLEST_PLD_DELTA = 1e-10  # "pld" is verified against an independent computation down to here
LEAST_NOISE, MOST_NOISE = 1e-8, 1e9
LEAST_RATE = 1e-9  # one record of a billion


@dataclass(frozen=True, kw_only=True)
class Event:
    """One release: a clipped sum over a Poisson(q) batch + z C N(0, I).

    `overflow` is the chance that a draw is larger than the largest batch and is cut to it; 0 if nothing is cut.
    """

    noise_multiplier: float
    sample_rate: float
    overflow: float = 0.0

    def document(self) -> dict[str, float]:
        """The event as a JSON object, without the fields that it does not have.

        >>> Event(noise_multiplier=1.0, sample_rate=0.1).document()
        {'noise_multiplier': 1.0, 'sample_rate': 0.1}
        """
        found = asdict(self)
        if not self.overflow:
            del found["overflow"]
        return found


def cyclic(sample_rate: float, steps: int, bands: int) -> tuple[float, int]:
    """p = b q and ceil(T / b): what T steps of cyclic Poisson sampling are accounted as.

    Every record is in one of b groups, and step t draws from group t mod b alone, with probability p = b q. So a record
    can take part in at most ceil(T / b) steps. With noise of b bands each of them is one Poisson(p)-subsampled Gaussian
    event (Choquette-Choo et al. 2023; `pmlf.mechanism.shapes` has the argument).

    Args:
        sample_rate: q, the expected batch size / number of records.
        steps: T, the number of releases.
        bands: b, the number of groups; 1 is plain Poisson sampling.

    Returns:
        The sampling rate of an event, and the number of events.

    Raises:
        ValueError: bands is not a whole number from 1 to 64, or b q is above 1.

    >>> cyclic(0.02, 400, 8)
    (0.16, 50)
    """
    require_count(
        "bands", bands, "it is the number of bands of the noise shape, and of groups in the cycle", most=MOST_BANDS
    )
    if bands == 1:
        return sample_rate, steps
    if not (is_number(sample_rate) and sample_rate * bands <= 1 + 1e-9):
        raise ValueError(
            f"bands={bands} at a sampling rate of {sample_rate:.4g} needs batches of {bands * sample_rate:.4g} times a "
            "group of records: give fewer bands or a smaller batch, so that bands * batch size is at most the number "
            "of records"
        )
    return min(bands * sample_rate, 1.0), -(-steps // bands)


def check_mechanism(noise_multiplier: float, sample_rate: float, steps: int, accountant: str = "pld") -> None:
    """Check the arguments of `epsilon`.

    Raises:
        ValueError: one of them is out of range.

    >>> check_mechanism(0.0, 0.01, 100)
    Traceback (most recent call last):
    ValueError: noise_multiplier=0.0 protects nothing: give a finite number above 0
    """
    if not isinstance(accountant, str) or accountant not in ACCOUNTANTS:
        raise ValueError(f"accountant={accountant!r} is unknown: choose one of {', '.join(ACCOUNTANTS)}")
    if not (is_number(noise_multiplier) and 0 < noise_multiplier < math.inf):
        raise ValueError(f"noise_multiplier={noise_multiplier} protects nothing: give a finite number above 0")
    if not LEAST_NOISE <= noise_multiplier <= MOST_NOISE:
        raise ValueError(
            f"noise_multiplier={noise_multiplier} is outside [{LEAST_NOISE:g}, {MOST_NOISE:g}]: less protects "
            "nothing, more leaves only noise"
        )
    if not (is_number(sample_rate) and 0 < sample_rate <= 1):
        raise ValueError(f"sample_rate={sample_rate} is outside (0, 1]: give the expected batch size / dataset size")
    if sample_rate < LEAST_RATE:
        raise ValueError(f"sample_rate={sample_rate} is below {LEAST_RATE:g}, the smallest supported rate")
    if not (is_number(steps) and 0 <= steps <= MOST and steps == int(steps)):
        raise ValueError(f"steps={steps} is not a number of steps: give an integer from 0 to {MOST}")


def check_overflow(overflow: float, bands: int) -> None:
    """Check the chance that a draw is cut.

    Raises:
        ValueError: it is not a probability, or draws from groups of records are cut.
    """
    if not (is_number(overflow) and 0 <= overflow < 1):
        raise ValueError(
            f"overflow={overflow} is not in [0, 1): it is the chance that a draw is larger than the largest batch, "
            "from pmlf.accounting.overflow"
        )
    if overflow and bands > 1:
        raise ValueError(
            f"overflow={overflow} with bands={bands}: the chance of a cut is that of draws from all records; leave one "
            "out"
        )


def check_delta(name: str, value: float, accountant: str) -> None:
    """Check a delta; "pld" has a smallest one.

    Raises:
        ValueError: it is out of range.
    """
    if not (is_number(value) and 0 < value < 1):
        raise ValueError(f"{name}={value} is outside (0, 1): give a probability such as 1e-5")
    if accountant == "pld" and value < SMALLEST_PLD_DELTA:
        raise ValueError(
            f"{name}={value} is below {SMALLEST_PLD_DELTA}, the smallest that accountant='pld' is verified for: give "
            "a larger one, or accountant='rdp'"
        )
