"""Broken variants of your model: in each, one record moves the sum by more than the clip norm. The audit must find it.

They are built around the model and its loss. The library's checks, which refuse them, are switched off.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from pmlf.audit.neighbours import AuditedModel
from pmlf.basics.batches import tensors_of
from pmlf.mechanism.points import Point, Points


@dataclass(frozen=True, kw_only=True)
class ModelControl:
    """A broken variant of an audited model: its name, its fault, and the function that makes it."""

    name: str
    broken: str
    breaks: Callable[[AuditedModel], AuditedModel]


def _batch_centred(audited: AuditedModel) -> AuditedModel:
    """Subtract the batch mean from the inputs: one extreme record changes all others."""
    if not any(tensor.is_floating_point() for tensor in tensors_of(audited.examples)):
        raise ValueError("the control batch-centring needs floating-point inputs: audit a model for images")

    def loss_fn(model: nn.Module, batch: Any) -> Any:
        centred = copy.deepcopy(batch)
        for tensor in tensors_of(centred):
            if tensor.is_floating_point():
                tensor.sub_(tensor.mean(0))
        return audited.loss_fn(model, centred)

    return replace(audited, loss_fn=loss_fn, checked=False)


def _class_weighted(audited: AuditedModel) -> AuditedModel:
    """Weight losses by n / (classes * count), counted in the batch: a new class changes the weights of all others."""
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
        raise ValueError("the control class-weights needs labels: give batches with an int64 tensor of shape (N,)")
    return found[-1]


def _clipped_per_point(audited: AuditedModel) -> AuditedModel:
    """Clip the gradient at each point and add them with weight one: one record counts k times."""
    points = audited.method.points.points
    if len(points) < 2:
        raise ValueError(
            f"the control clip-per-point needs a method with several evaluation points, and {audited.method.name} has "
            "one: give dp-pmlf with k=2 or more"
        )

    def alone(point: Point) -> Points:
        return Points(points=(replace(point, weight=1.0),), normalised=False)

    return replace(audited, parts=tuple(replace(audited.method, points=alone(point)) for point in points))


MODEL_CONTROLS: tuple[ModelControl, ...] = (
    ModelControl(
        name="batch-centring",
        broken="subtracts the batch mean from the inputs; the checks are switched off",
        breaks=_batch_centred,
    ),
    ModelControl(
        name="class-weights",
        broken="weights losses by the class counts in the batch; the checks are switched off",
        breaks=_class_weighted,
    ),
    ModelControl(
        name="clip-per-point",
        broken="clips the gradient at each point and adds them with weight one: a record moves the sum by k C",
        breaks=_clipped_per_point,
    ),
)
"""The broken variants that an audit of a model must refute."""
