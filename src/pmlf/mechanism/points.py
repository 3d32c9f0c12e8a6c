"""Evaluation points: where a sample's gradient is taken, with which weight, and the released iterates behind them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Point:
    """The point sum_j coefficients[j] * x_{t-j}, whose gradient enters a sample's momentum with `weight`."""

    coefficients: tuple[float, ...]
    weight: float

    @property
    def reach(self) -> int:
        """How many steps back the point looks."""
        return len(self.coefficients) - 1


@dataclass(frozen=True, kw_only=True)
class Points:
    """A method's evaluation points; `normalised` weights sum to 1 over the points that exist (Algorithm 1, line 1).

    >>> window = Points(points=past_iterates(3, 0.5))
    >>> [round(point.weight, 3) for point in window.at(0)], [round(point.weight, 3) for point in window.at(9)]
    ([1.0], [0.571, 0.286, 0.143])
    """

    points: tuple[Point, ...]
    normalised: bool = True

    @property
    def depth(self) -> int:
        """How many past iterates must be remembered."""
        return max(point.reach for point in self.points)

    def at(self, step: int) -> tuple[Point, ...]:
        """The points that exist at this step (x_{-1} does not), with the weights they carry there."""
        existing = [point for point in self.points if point.reach <= step]
        if not self.normalised:
            return tuple(existing)
        if len(existing) == 1:  # also where its steady weight is 0 (DiSK with c = 1)
            return (Point(coefficients=existing[0].coefficients, weight=1.0),)
        total = sum(point.weight for point in existing)
        return tuple(
            Point(coefficients=point.coefficients, weight=point.weight / total)
            for point in existing
            if point.weight != 0.0
        )


def past_iterates(k: int, decay: float) -> tuple[Point, ...]:
    """x_t, x_{t-1}, ..., x_{t-k+1} with weights decay^j."""
    return tuple(Point(coefficients=(0.0,) * j + (1.0,), weight=decay**j) for j in range(k))


class History:
    """The last `depth` released iterates, newest first; only `PrivateStep.release` adds to it."""

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self._iterates: list[list[Tensor]] = []

    def remember(self, parameters: Sequence[Tensor]) -> None:
        """Push x_t, dropping the iterate that no point can reach any more (its memory is reused)."""
        if self.depth == 0:
            return
        if len(self._iterates) == self.depth:
            kept = self._iterates.pop()
            for old, new in zip(kept, parameters, strict=True):
                old.copy_(new.detach())
        else:
            kept = [parameter.detach().clone() for parameter in parameters]
        self._iterates.insert(0, kept)

    def evaluate(self, point: Point, current: Sequence[Tensor]) -> list[Tensor]:
        """The point's parameters, sum_j coefficients[j] * x_{t-j}; a plain iterate is returned without a copy."""
        iterates = [[parameter.detach() for parameter in current], *self._iterates]
        used = [(c, iterates[j]) for j, c in enumerate(point.coefficients) if c != 0.0]
        if len(used) == 1 and used[0][0] == 1.0:
            return used[0][1]
        (first, values), *rest = used
        combined = [value * first for value in values]
        for coefficient, values in rest:
            torch._foreach_add_(combined, values, alpha=coefficient)
        return combined

    def state_dict(self) -> dict[str, Any]:
        return {"iterates": [[tensor.clone() for tensor in iterate] for iterate in self._iterates]}

    def load_state_dict(self, state: dict[str, Any], like: Sequence[Tensor]) -> None:
        """Take over saved iterates; `like` (the parameters) gives device, dtype and the shapes they must have."""
        loaded = []
        for iterate in state["iterates"]:
            shapes, expected = [tuple(t.shape) for t in iterate], [tuple(t.shape) for t in like]
            if shapes != expected:
                raise ValueError(
                    "the saved iterates have other shapes than the model's parameters: load the state of this model"
                )
            loaded.append([saved.detach().clone().to(p) for saved, p in zip(iterate, like, strict=True)])
        if len(loaded) > self.depth:
            raise ValueError(
                f"the state holds {len(loaded)} past iterates and the method uses {self.depth}: "
                "load it into a step of the same method"
            )
        self._iterates = loaded
