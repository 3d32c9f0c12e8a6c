"""The public constants of a private step: what is accounted for, fixed at the start."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pmlf.basics.arguments import is_number, require_count, require_positive
from pmlf.basics.clipping import CLIPPINGS, Clipping
from pmlf.mechanism.adaptive_clipping import FARTHEST, AdaptiveClipping, ClipNorm
from pmlf.mechanism.noise import LARGEST_STD, Randomness
from pmlf.methods import Method

_MOST_IN_FLOAT32 = 64  # samples expected: beyond, rounding of the sum could pass 1e-4 of what one of them adds


@dataclass(frozen=True, kw_only=True)
class StepSettings:
    """The mechanism of a step: sum of vectors of norm at most `clip_norm`, noise, mean over `expected_batch_size`.

    Raises:
        ValueError: If a value would break the guarantee, or makes noise that float32 cannot hold.

    >>> from pmlf import methods
    >>> StepSettings(method=methods.dpsgd(), clip_norm=1.0, noise_multiplier=0.8, expected_batch_size=64).noise_scale
    0.8
    """

    method: Method
    clip_norm: float
    noise_multiplier: float
    expected_batch_size: float
    clipping: Clipping = "flat"
    secure_noise: bool = False  # whether noise is hardened against floating-point attacks
    cycle: int = 1  # groups of cyclic Poisson sampling; 1 is plain Poisson sampling
    adaptive: AdaptiveClipping | None = None  # how the clip norm changes, from clip_norm on
    units: bool = False  # whether the vectors are those of units of several records

    def __post_init__(self) -> None:
        require_positive("clip_norm", self.clip_norm, "it bounds one sample's part in the sum; the paper uses 1.0")
        require_positive("expected_batch_size", self.expected_batch_size, "it is q * n, a public number")
        if not (is_number(self.noise_multiplier) and self.noise_multiplier == 0.0):
            require_positive("noise_multiplier", self.noise_multiplier, "take it from pmlf.accounting.noise_multiplier")
        if self.noise_scale > LARGEST_STD * min(self.expected_batch_size, 1.0):
            raise ValueError(
                f"noise_multiplier={self.noise_multiplier}, clip_norm={self.clip_norm}, expected_batch_size="
                f"{self.expected_batch_size} make noise above {LARGEST_STD:g}, which float32 cannot hold: give others"
            )
        if not isinstance(self.clipping, str) or self.clipping not in CLIPPINGS:
            raise ValueError(f"clipping={self.clipping!r} is not known: give one of {', '.join(CLIPPINGS)}")
        if not isinstance(self.secure_noise, bool):
            raise ValueError(f"secure_noise={self.secure_noise!r} is neither True nor False")
        if not isinstance(self.units, bool):
            raise ValueError(f"units={self.units!r} is neither True nor False: the ids go to accumulate")
        self._check_cycle()
        self._check_adaptive()
        object.__setattr__(self, "clip_norm", float(self.clip_norm))
        object.__setattr__(self, "noise_multiplier", float(self.noise_multiplier))

    def _check_cycle(self) -> None:
        require_count("cycle", self.cycle, "it is the number of groups of cyclic Poisson sampling; 1 is plain Poisson")
        bands = self.method.noise.bands
        if bands > 1 and self.cycle != bands:
            raise ValueError(
                f"cycle={self.cycle}, and the noise of {self.method.name!r} has {bands} bands: it is private only if a "
                f"record takes part at most once in {bands} steps in a row. Draw batches by pmlf.sampling."
                f"PoissonBatches(..., cycle={bands}) and give cycle={bands} here too, or use make_private"
            )
        if bands == 1 and self.cycle > 1:
            raise ValueError(
                f"cycle={self.cycle} with the white noise of {self.method.name!r} costs privacy and gains nothing: "
                f"leave cycle out, or give a method with bands={self.cycle}"
            )

    def refuse_other_state(self, state: Mapping[str, Any]) -> None:
        """Raise ValueError unless a saved state of a step is of the same method, with the same noise shape."""
        for name in ("method", "shape", "releases", "turns", "filter", "history"):
            if name not in state:
                raise ValueError(f"the state has no {name!r}: give what state_dict() of this version returned")
        if state["method"] != self.method.name:
            raise ValueError(f"the state is of method {state['method']!r}, this step runs {self.method.name!r}")
        saved, own = tuple(state["shape"]), tuple(self.method.noise.coefficients)
        if saved != own:  # its groups were not drawn as this noise needs it
            raise ValueError(
                f"the state has noise of {len(saved)} bands, {saved}, and this step of {len(own)}, {own}: build the "
                "step with the method of the state"
            )

    def _check_adaptive(self) -> None:
        if self.adaptive is None:
            return
        if not isinstance(self.adaptive, AdaptiveClipping):
            raise ValueError(f"adaptive_clipping={self.adaptive!r}: give a pmlf.AdaptiveClipping, or None")
        if self.clipping != "flat":
            raise ValueError(
                f"clipping={self.clipping!r} with adaptive clipping: its count of samples is of one norm over all "
                'parameters, give clipping="flat"'
            )
        if self.cycle > 1:
            raise ValueError(
                f"method {self.method.name!r} shapes its noise, which takes back noise of earlier steps, and adaptive "
                "clipping changes its scale from step to step: give a method with white noise, or a fixed clip_norm"
            )
        if self.noise_scale * FARTHEST > LARGEST_STD:
            raise ValueError(f"clip_norm={self.clip_norm} may grow beyond what float32 can hold: give a smaller one")
        _ = self.sum_multiplier

    def clip_norms(self) -> ClipNorm:
        """The clip norm, step by step."""
        return ClipNorm(
            self.clip_norm,
            self.adaptive,
            expected_batch_size=self.expected_batch_size,
            without_noise=self.without_noise,
        )

    @property
    def in_one_process(self) -> str | None:
        """What several processes cannot do together; None if there is nothing of the kind."""
        if self.cycle > 1:
            return f"method {self.method.name!r} has shaped noise, which"
        return None if self.adaptive is None else "adaptive clipping"

    @property
    def sum_multiplier(self) -> float:
        """Noise multiplier of the sum alone: above that of the step if the step releases a count too."""
        if self.adaptive is None:
            return self.noise_multiplier
        return self.adaptive.sum_multiplier(self.noise_multiplier, expected_batch_size=self.expected_batch_size)

    @property
    def wide(self) -> bool:
        """Whether sums are kept in float64."""
        return self.expected_batch_size > _MOST_IN_FLOAT32

    @property
    def noise_scale(self) -> float:
        """Standard deviation of the noise on the sum."""
        return self.noise_multiplier * self.clip_norm

    def noise_source(self, randomness: Randomness) -> str:
        """Where the noise comes from, in words."""
        hardened = "; each Gaussian half the sum of four, added in float64 (Holohan & Braghin 2021)"
        return randomness.description + (hardened if self.secure_noise else "")

    @property
    def without_noise(self) -> bool:
        return self.noise_multiplier == 0.0
