"""Broken variants of a user's model: each lets one record move the sum by more than the clip norm, and must be caught.

They are built around the model and its loss from the outside, and sent past the checks that refuse them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from pmlf.audit.neighbours import Audited
from pmlf.basics.batches import tensors_of
from pmlf.mechanism.points import Point, Points


@dataclass(frozen=True, kw_only=True)
class ModelControl:
    """A broken variant of a model that is audited."""

    name: str
    broken: str
    breaks: Callable[[Audited], Audited]


def _batch_centred(audited: Audited) -> Audited:
    """Inputs less their mean over the batch: one record far away moves all the others."""
    if not any(tensor.is_floating_point() for tensor in tensors_of(audited.examples)):
        raise ValueError("the control batch-centring needs floating-point inputs: give a dataset of images")

    def loss_fn(model: nn.Module, batch: Any) -> Any:
        centred = copy.deepcopy(batch)
        for tensor in tensors_of(centred):
            if tensor.is_floating_point():
                tensor.sub_(tensor.mean(0))
        return audited.loss_fn(model, centred)

    return replace(audited, loss_fn=loss_fn, checked=False)


def _class_weighted(audited: Audited) -> Audited:
    """Losses weighted by n / (classes * count), all of the batch: with a class more, all the others weigh less."""
    _labels(audited.examples)

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        labels = _labels(batch)
        losses: Tensor = audited.loss_fn(model, batch)
        counts = torch.bincount(labels)
        return losses * (len(labels) / (counts.count_nonzero() * counts[labels]))

    return replace(audited, loss_fn=loss_fn, checked=False)


def _labels(batch: Any) -> Tensor:
    found = [tensor for tensor in tensors_of(batch) if tensor.ndim == 1 and tensor.dtype == torch.int64]
    if not found:
        raise ValueError("the control class-weights needs labels: give a dataset whose batches have whole numbers")
    return found[-1]


def _clipped_per_point(audited: Audited) -> Audited:
    """Every point's gradient clipped on its own and added with weight one: k records' worth of one."""
    points = audited.method.points.points
    if len(points) < 2:
        raise ValueError(
            f"the control clip-per-point needs a method with several points, and {audited.method.name} has one: give "
            "dp-pmlf with k=2 or more"
        )

    def alone(point: Point) -> Points:
        return Points(points=(replace(point, weight=1.0),), normalised=False)

    return replace(audited, parts=tuple(replace(audited.method, points=alone(point)) for point in points))


MODEL_CONTROLS: tuple[ModelControl, ...] = (
    ModelControl(
        name="batch-centring",
        broken="inputs less their mean over the batch, the checks of independent samples put aside",
        breaks=_batch_centred,
    ),
    ModelControl(
        name="class-weights",
        broken="losses weighted by how rare their classes are in the batch, the checks put aside",
        breaks=_class_weighted,
    ),
    ModelControl(
        name="clip-per-point",
        broken="each point's gradient clipped, then added with weight one: a record moves the sum by k C",
        breaks=_clipped_per_point,
    ),
)
