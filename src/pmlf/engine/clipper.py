"""Sums of clipped vectors, one a sample, that carry their own sensitivity."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pmlf.basics.clipping import Clipping
from pmlf.engine.arithmetic import wide_dtype
from pmlf.engine.gradients import Workspace
from pmlf.engine.momentum import SampleMomentum
from pmlf.engine.questions import Questions
from pmlf.engine.strategy import Strategy

_RAMP = 0.01  # relative width around the clip norm, in which a sample counts in part


@dataclass(frozen=True, kw_only=True)
class ClippedSum:
    """A sum over samples, by parameter. Adding or removing one sample moves it by at most `sensitivity`.

    `within` counts samples by `counted_within`, if that is asked for; one sample moves it by at most 1/2.
    """

    values: Mapping[str, Tensor]
    sensitivity: float
    within: float = 0.0


def counted_within(norms: Tensor, clip_norm: float) -> float:
    """The number of samples with norm at most C, each as +1/2, minus the others, as 1/2 each.

    Near C a sample counts in part, on a ramp of 1 %. So rounding of a norm, which may depend on who else is in the
    batch, moves the count by as little as it moves the norm.

    >>> counted_within(torch.tensor([0.2, 3.0, 0.5, float("inf")]), 1.0)
    0.0
    """
    ramp = ((1.0 + _RAMP / 2) - norms.double() / clip_norm) / _RAMP
    return float(torch.nan_to_num(ramp, nan=0.0).clamp_(0.0, 1.0).sub_(0.5).sum())


class Clipper:
    """Clips every sample's momentum once, over all parameters together or layer by layer, and adds them up.

    Args:
        parameters: Names of the trained parameters, in the model's order.
        clip_norm: Largest norm C of what one sample adds.
        clipping: "flat" scales v by min(1, C/|v|), "automatic" by C/(|v| + 0.01), "per-layer" each of L layers' part
            of v to at most C/sqrt(L).
        wide: Whether sums are kept in float64, for many samples.
        counts: Whether to count the samples within the clip norm, too.
        strategy: How gradients are formed; the cheapest way by default.

    Attributes:
        clip_norm: C, which may change between sums.
    """

    def __init__(
        self,
        parameters: Iterable[str],
        *,
        clip_norm: float,
        clipping: Clipping = "flat",
        wide: bool = False,
        counts: bool = False,
        strategy: Strategy | None = None,
    ) -> None:
        self._parameters = tuple(parameters)
        self.clip_norm = clip_norm
        self._clipping: Clipping = clipping
        self._counts = counts
        self._workspace = Workspace(strategy)
        self._buffers = _SumBuffers(wide=wide)

    def momentum(self, samples: int, points: int, questions: Questions | None = None) -> SampleMomentum:
        """An empty momentum of some samples, for as many evaluation points. The questions asked so far are answered
        when it is clipped."""
        return SampleMomentum(self._parameters, samples, points, self._workspace, questions or Questions())

    def add(
        self, momenta: Iterable[SampleMomentum], before: ClippedSum | None, like: Mapping[str, Tensor]
    ) -> tuple[ClippedSum, list[Tensor]]:
        """The sum before and the clipped momenta, in memory of its own: what was before stays as it is.

        Args:
            momenta: Of the samples to add; each is used up before the next is asked for.
            before: The sum so far, if there is one.
            like: The trained parameters, for shapes, precision and device.

        Returns:
            The new sum, and the norms of the samples, never understated.
        """
        so_far = None if before is None else before.values
        into = self._buffers.other_than(so_far, like)
        norms = []
        for momentum in momenta:
            norms.append(momentum.write_clipped_sum(self.clip_norm, self._clipping, so_far, into))
            so_far = into
        within = 0.0 if before is None else before.within
        if self._counts:
            within += sum(counted_within(part, self.clip_norm) for part in norms)
        return ClippedSum(values=into, sensitivity=self.clip_norm, within=within), norms

    def write(
        self, momentum: SampleMomentum, like: Mapping[str, Tensor], written: Callable[[str, Tensor], None]
    ) -> None:
        """Tell `written` the clipped sum of one momentum, parameter by parameter, in memory that is not kept."""
        momentum.write_clipped_sum(self.clip_norm, self._clipping, None, _Fresh(like), written)

    def nothing_of(self, like: Mapping[str, Tensor]) -> ClippedSum:
        """The sum of no samples over parts of the parameters, in float64 and in memory of its own."""
        values = {name: torch.zeros_like(part, dtype=wide_dtype(part)) for name, part in like.items()}
        return ClippedSum(values=values, sensitivity=self.clip_norm)

    def nothing(self, like: Mapping[str, Tensor]) -> ClippedSum:
        """The sum of no samples."""
        values = self._buffers.other_than(None, like)
        for name in self._parameters:
            values[name].zero_()
        return ClippedSum(values=values, sensitivity=self.clip_norm)

    def give_away(self, total: ClippedSum) -> None:
        """Never write to the memory of this sum again: somebody else has it."""
        self._buffers.give_away(total.values)


class _SumBuffers:
    """Memory for the sum of a logical batch, twice: a micro-batch's sum is written beside the one before it, so that
    an interrupted one changes nothing. `wide` is in float64, for many samples."""

    def __init__(self, *, wide: bool = False) -> None:
        self._wide = wide
        self._sets: list[_Sums] = []

    def __getstate__(self) -> dict[str, Any]:
        return {"_wide": self._wide, "_sets": []}  # what is in them is sensitive: neither copied nor written to a file

    def give_away(self, current: Mapping[str, Tensor]) -> None:
        self._sets = [kept for kept in self._sets if kept is not current]

    def other_than(self, current: Mapping[str, Tensor] | None, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Uninitialised tensors for the parameters, at least float32, that are not the ones in use."""
        self._sets = [kept for kept in self._sets if all(t.device == parameters[n].device for n, t in kept.items())]
        for kept in self._sets:
            if kept is not current:
                return kept
        self._sets.append(_Sums(parameters, self._wide))
        return self._sets[-1]


class _Fresh(dict[str, Tensor]):
    """New memory at every look, at least float32."""

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._parameters = parameters

    def __missing__(self, name: str) -> Tensor:
        like = self._parameters[name]
        return torch.empty(like.shape, dtype=torch.promote_types(like.dtype, torch.float32), device=like.device)


class _Sums(dict[str, Tensor]):
    """Made when first written to: by then the factors of the parameter before it have gone."""

    def __init__(self, parameters: Mapping[str, Tensor], wide: bool) -> None:
        super().__init__()
        self._parameters = parameters
        self._wide = wide

    def __missing__(self, name: str) -> Tensor:
        like = self._parameters[name]
        dtype = torch.promote_types(like.dtype, wide_dtype(like) if self._wide else torch.float32)
        self[name] = torch.empty(like.shape, dtype=dtype, device=like.device)
        return self[name]
