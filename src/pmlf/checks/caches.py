"""Constants that a model makes when it first runs: tables of positions, masks, rotations.

A forward pass must not write into a model. What depends on the shapes of its input alone can be made beforehand, from
synthetic inputs of these shapes, which hold nothing of any record.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from pmlf.basics.batches import same_bits, synthetic
from pmlf.checks.comparison import Subject
from pmlf.checks.draws import constant_draws
from pmlf.engine.anatomy import Anatomy
from pmlf.engine.swap import ModelWritten, tensors_held
from pmlf.mechanism.noise import SeededRandomness

_T = TypeVar("_T")


def made_from_synthetic_inputs(subject: Subject, batch: Any) -> bool:
    """Run the model on a synthetic batch of the same shapes, so that it makes its constants.

    Only if two such batches make it write the same, and no parameter.

    Returns:
        Whether this was done. If not, the model is as before.
    """
    inputs = [synthetic(batch, SeededRandomness(seed).stream("caches").seed()) for seed in (0, 1)]
    buffers = [(buffer, buffer.detach().clone()) for buffer in Anatomy(subject.model).buffers.values()]
    try:
        copies = [copy.deepcopy(subject.model) for _ in inputs]
        for model, some in zip(copies, inputs, strict=True):
            _run(subject, model, some)
    except Exception:  # a model that cannot be copied, a loss that takes no synthetic inputs
        return False
    # code outside the model may hold a buffer, and write it though a copy runs
    written = [(buffer, before) for buffer, before in buffers if not same_bits(buffer, before)]
    for buffer, before in written:
        buffer.data.copy_(before)
    states = [_state(model) for model in copies]
    parameters: dict[str, Tensor] = dict(Anatomy(copies[0]).parameters)
    if written or not _same(*states) or not _same(parameters, dict(Anatomy(subject.model).parameters)):
        return False
    _run(subject, subject.model, inputs[0])
    return True


def with_constants_made(subject: Subject, example: Callable[[], Any], attempt: Callable[[], _T]) -> _T:
    """attempt(); if the model makes constants in it, make them from inputs like `example()`, and try again."""
    try:
        return attempt()
    except ModelWritten:
        if not made_from_synthetic_inputs(subject, example()):
            raise
        return attempt()


def _same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(same_bits(one[name], other[name]) for name in one)


def _run(subject: Subject, model: nn.Module, batch: Any) -> None:
    with torch.no_grad(), constant_draws():
        subject.loss_fn(model, batch)


def _state(model: nn.Module) -> dict[str, Tensor]:
    """Every tensor that a model holds: parameters, buffers and those in attributes."""
    anatomy = Anatomy(model)
    found: dict[str, Tensor] = {**anatomy.parameters, **anatomy.buffers}
    for name, module in anatomy.modules.items():
        for attribute, tensors in tensors_held(module).items():
            found |= {f"{name}.{attribute}[{place}]": tensor for place, tensor in enumerate(tensors)}
    return found
