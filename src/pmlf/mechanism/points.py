"""Evaluation points: where a sample's gradient is taken and with which weight, and the iterates they refer to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Point:
    """The point sum_j coefficients[j] * x_{t-j}; a sample's gradient there enters its momentum with `weight`.

    Attributes:
        coefficients: One number per iterate, the current one first.
        weight: The weight of the gradient.

    >>> Point(coefficients=(1.5, -0.5), weight=1.0).reach
    1
    """

    coefficients: tuple[float, ...]
    weight: float

    @property
    def reach(self) -> int:
        """How many steps back the oldest iterate of the point is."""
        return len(self.coefficients) - 1


@dataclass(frozen=True, kw_only=True)
class Points:
    """A method's evaluation points (Algorithm 1, lines 1 and 5).

    Attributes:
        points: The points, with weights that need not sum to 1.
        normalised: Whether the weights are divided by their sum over the points that exist (c_beta).

    >>> window = Points(points=past_iterates(3, 0.5))
    >>> [round(point.weight, 3) for point in window.at(0)], [round(point.weight, 3) for point in window.at(9)]
    ([1.0], [0.571, 0.286, 0.143])
    """

    points: tuple[Point, ...]
    normalised: bool = True

    @property
    def depth(self) -> int:
        """How many past iterates the points need."""
        return max(point.reach for point in self.points)

    def at(self, step: int) -> tuple[Point, ...]:
        """The points that exist at step t, with their weights there.

        A point exists if all its iterates do: x_{-1} does not.

        Args:
            step: The step t, counted from 0.

        Returns:
            The points with a nonzero weight.
        """
        existing = [point for point in self.points if point.reach <= step]
        if not self.normalised:
            return tuple(existing)
        if len(existing) == 1:  # its weight is 1 even if later weights are 0 (DiSK with c = 1)
            return (Point(coefficients=existing[0].coefficients, weight=1.0),)
        total = sum(point.weight for point in existing)
        return tuple(
            Point(coefficients=point.coefficients, weight=point.weight / total)
            for point in existing
            if point.weight != 0.0
        )


def past_iterates(k: int, decay: float) -> tuple[Point, ...]:
    """The points x_t, x_{t-1}, ..., x_{t-k+1} with weights decay^j.

    >>> [(point.reach, point.weight) for point in past_iterates(3, 0.5)]
    [(0, 1.0), (1, 0.5), (2, 0.25)]
    """
    return tuple(Point(coefficients=(0.0,) * j + (1.0,), weight=decay**j) for j in range(k))


class History:
    """The last `depth` iterates before the current one, newest first.

    Only `PrivateStep.release` adds to it, so it holds released values and nothing else.

    >>> history = History(depth=1)
    >>> history.remember([torch.tensor(1.0)])
    >>> history.evaluate(Point(coefficients=(1.5, -0.5), weight=1.0), current=[torch.tensor(3.0)])
    [tensor(4.)]
    """

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self._iterates: list[list[Tensor]] = []

    def remember(self, parameters: Sequence[Tensor]) -> None:
        """Add the iterate x_t and drop the oldest one, whose memory is reused."""
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
        """The parameters at a point, sum_j coefficients[j] * x_{t-j}; an iterate itself is returned without a copy.

        Args:
            point: The point; its reach is at most the number of iterates remembered.
            current: The current parameters, x_t.

        Returns:
            One tensor per parameter. Do not write to them: they may be the history's own.
        """
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
        """Copies of the iterates."""
        return {"iterates": [[tensor.clone() for tensor in iterate] for iterate in self._iterates]}

    def load_state_dict(self, state: dict[str, Any], like: Sequence[Tensor]) -> None:
        """Restore saved iterates.

        Args:
            state: What `state_dict` returned.
            like: The model's parameters, which determine device, dtype and the shapes that are accepted.

        Raises:
            ValueError: The shapes differ, or there are more iterates than the method uses.
        """
        loaded = []
        for iterate in state["iterates"]:
            if [tensor.shape for tensor in iterate] != [parameter.shape for parameter in like]:
                raise ValueError(
                    "the saved iterates do not have the shapes of the model's parameters: load a state of this model"
                )
            loaded.append([saved.detach().clone().to(p) for saved, p in zip(iterate, like, strict=True)])
        if len(loaded) > self.depth:
            raise ValueError(
                f"the state holds {len(loaded)} past iterates and the method uses {self.depth}: load it into a step of "
                "the same method"
            )
        self._iterates = loaded
