"""The algorithm as ALGORITHM defines it, in float64, one sample and one point at a time, by plain autograd."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pmlf.basics.batches import batch_size, select


def to_double(batch: Any) -> Any:
    if isinstance(batch, Tensor):
        return batch.double() if batch.is_floating_point() else batch
    if isinstance(batch, dict):
        return {key: to_double(value) for key, value in batch.items()}
    return tuple(to_double(value) for value in batch)


def single_gradient(model: nn.Module, loss_fn: Any, single: Any) -> list[Tensor]:
    parameters = [p for p in model.parameters() if p.requires_grad]
    grads = torch.autograd.grad(loss_fn(model, single).sum(), parameters, allow_unused=True)
    return [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, grads, strict=True)]


class Reference:
    """`points(t)` gives [(coefficients over x_t, x_{t-1}, ..., weight)], written out by the test for each method."""

    def __init__(
        self, model: nn.Module, loss_fn: Any, *, points: Any, a: Sequence[float], b: Sequence[float], corrected: bool,
        clip_norm: float, expected_batch_size: float, clipping: str = "flat",
    ) -> None:  # fmt: skip
        self.model = copy.deepcopy(model).double()
        self.loss_fn, self.points = loss_fn, points
        self.a, self.b, self.corrected = list(a), list(b), corrected
        self.clip_norm, self.expected_batch_size, self.clipping = clip_norm, expected_batch_size, clipping
        self.iterates: list[list[Tensor]] = []
        self.inputs: list[list[Tensor]] = []
        self.outputs: list[list[Tensor]] = []
        self.ones: list[float] = []

    def momentum(self, single: Any) -> list[Tensor]:
        """v of one sample: the weighted sum of its gradients at the evaluation points."""
        iterates = [[p.detach().clone() for p in self.trained], *self.iterates]
        at_point = copy.deepcopy(self.model)
        total = [torch.zeros_like(p) for p in self.trained]
        for coefficients, weight in self.points(len(self.iterates)):
            with torch.no_grad():
                for index, parameter in enumerate([p for p in at_point.parameters() if p.requires_grad]):
                    parameter.copy_(sum(c * iterates[j][index] for j, c in enumerate(coefficients)))
            for part, grad in zip(total, single_gradient(at_point, self.loss_fn, single), strict=True):
                part += weight * grad
        return total

    @property
    def trained(self) -> list[nn.Parameter]:
        return [p for p in self.model.parameters() if p.requires_grad]

    def clipped_sum(self, batch: Any) -> list[Tensor]:
        total = [torch.zeros_like(p) for p in self.trained]
        for i in range(batch_size(batch)):
            v = self.momentum(to_double(select(batch, slice(i, i + 1))))
            for places, bound in self.blocks():
                norm = float(torch.cat([v[place].flatten() for place in places]).norm())
                factor = bound / (norm + 0.01) if self.clipping == "automatic" else min(1.0, bound / max(norm, 1e-300))
                for place in places:
                    total[place] += factor * v[place]
        return total

    def blocks(self) -> list[tuple[list[int], float]]:
        """The places of parameters with one norm, and its bound: all, or a module's own, which share C^2 evenly."""
        if self.clipping != "per-layer":
            return [(list(range(len(self.trained))), self.clip_norm)]
        places = {id(parameter): place for place, parameter in enumerate(self.trained)}
        found, taken = [], set[int]()
        for module in self.model.modules():
            own = {places[id(p)] for p in module.parameters(recurse=False) if id(p) in places} - taken
            taken |= own
            found += [sorted(own)] if own else []
        return [(own, (self.clip_norm**2 / len(found)) ** 0.5) for own in found]

    def step(self, batch: Any | None) -> list[Tensor]:
        """mhat_t for a logical batch, or for an empty one."""
        total = [torch.zeros_like(p) for p in self.trained] if batch is None else self.clipped_sum(batch)
        self.iterates.insert(0, [p.detach().clone() for p in self.trained])
        self.inputs.insert(0, [part / self.expected_batch_size for part in total])
        filtered = [
            sum(
                [b * self.inputs[r][index] for r, b in enumerate(self.b) if r < len(self.inputs)]
                + [-a * self.outputs[r][index] for r, a in enumerate(self.a) if r < len(self.outputs)]
            )
            for index in range(len(total))
        ]
        correction = sum(b for r, b in enumerate(self.b) if r < len(self.inputs)) - sum(
            a * self.ones[r] for r, a in enumerate(self.a) if r < len(self.ones)
        )
        self.outputs.insert(0, filtered)
        self.ones.insert(0, correction)
        return [part / (correction if self.corrected else 1.0) for part in filtered]

    def update(self, grads: list[Tensor], learning_rate: float) -> None:
        with torch.no_grad():
            for parameter, grad in zip(self.trained, grads, strict=True):
                parameter -= learning_rate * grad
