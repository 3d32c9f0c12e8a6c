"""The sum that the library promises, one sample and one point at a time, in float64, by plain autograd."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fuzzing.data import Batch, record_of
from fuzzing.losses import Loss
from fuzzing.recipes import Window
from pmlf import methods
from pmlf.mechanism.filters import LowPass


def method(window: Window) -> methods.Method:
    """The library's method with those points and no filter."""
    if window.look_ahead is not None:
        points = methods.disk(kappa=window.decay, gamma=window.look_ahead).points
    elif window.normalised:
        points = methods.dp_pmlf(k=window.k, beta=window.decay).points
    else:
        points = methods.inner_outer(k=window.k, gamma=window.decay).points
    return methods.Method(name="fuzzed", points=points, low_pass=LowPass())


def clipped_sum(
    model: nn.Module,
    loss: Loss,
    iterates: Sequence[Sequence[Tensor]],
    window: Window,
    clip_norm: float,
    batches: Sequence[Batch],
) -> tuple[Tensor, float]:
    """(sum of the clipped momenta at x_t, x_{t-1}, ..., sum of their norms) of all samples."""
    points = [_at(model, iterates, *point) for point in _points(window, len(iterates) - 1)]
    total, terms = torch.zeros(sum(p.numel() for p in iterates[0]), dtype=torch.float64), 0.0
    for batch in batches:
        for index in range(len(batch["y"])):
            single = {n: t.double() if t.is_floating_point() else t for n, t in record_of(batch, index).items()}
            momentum = torch.zeros_like(total)
            for point in points:
                momentum += point.weight * _gradient(loss(point.model, single).sum(), point.trained)
            norm = float(momentum.norm())
            factor = min(1.0, clip_norm / max(norm, 1e-300))
            total += factor * momentum
            terms += factor * norm
    return total, terms


class _Point(NamedTuple):
    model: nn.Module
    trained: list[nn.Parameter]
    weight: float


def _at(
    model: nn.Module, iterates: Sequence[Sequence[Tensor]], coefficients: tuple[float, ...], weight: float
) -> _Point:
    """A copy of the model at sum_j coefficients[j] x_{t-j}."""
    moved = copy.deepcopy(model).double()
    trained = [p for p in moved.parameters() if p.requires_grad]
    with torch.no_grad():
        for index, parameter in enumerate(trained):
            parameter.copy_(torch.stack([c * iterates[j][index] for j, c in enumerate(coefficients)]).sum(0))
    return _Point(moved, trained, weight)


def _gradient(loss: Tensor, trained: Sequence[Tensor]) -> Tensor:
    grads = torch.autograd.grad(loss, trained, allow_unused=True)
    return torch.cat([(torch.zeros_like(p) if g is None else g).flatten() for p, g in zip(trained, grads, strict=True)])


def _points(window: Window, step: int) -> list[tuple[tuple[float, ...], float]]:
    """[(coefficients over x_t, x_{t-1}, ..., weight)] at a step, written out anew."""
    if window.look_ahead is not None:
        if step == 0:
            return [((1.0,), 1.0)]
        ahead = (1.0 - window.decay) / (window.decay * window.look_ahead)
        return [((1.0 + window.look_ahead, -window.look_ahead), ahead), ((1.0,), 1.0 - ahead)]
    weights = [window.decay**j for j in range(min(window.k, step + 1))]
    total = sum(weights) if window.normalised else 1.0
    return [((0.0,) * j + (1.0,), weight / total) for j, weight in enumerate(weights)]
