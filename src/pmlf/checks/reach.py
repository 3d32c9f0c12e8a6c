"""Trained parameters that no loss depends on: an embedding for masks that nobody sets, a head that is not used.

They get noise and no gradient. That is private, and it is what a step must do: whether a record reaches a parameter is
a fact about that record, so the noise cannot be left out, or added later, by what the records show.
"""

from __future__ import annotations

import re
import warnings
from typing import Any

from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.utils._pytree import tree_leaves

from pmlf.basics.batches import picked, synthetic, tensors_of
from pmlf.checks.comparison import Subject, singles
from pmlf.engine.graph import nodes_of
from pmlf.mechanism.noise import SeededRandomness

_SAMPLES = 4
_SEEDS = (0, 1)


def unreached(subject: Subject, batch: Any) -> tuple[str, ...]:
    """The trained parameters that the losses of synthetic samples do not depend on, in the model's order.

    The samples have the shapes of `batch` and nothing of its values, so the answer says nothing about a record. They
    run in the model's mode and in eval mode. Of parameters whose names differ by a number alone, such as those of
    experts or of layers that are dropped at random, one that is reached speaks for all: data or chance choose among
    them.

    Returns:
        Their names. None of them if the loss takes no synthetic samples.
    """
    if not all(isinstance(leaf, Tensor) for leaf in tree_leaves(batch) if leaf is not None):
        return ()
    names, reached = subject.plan.parameters, set[str]()
    like = picked(batch, [0] * _SAMPLES)
    for training in (True, False):
        for seed in _SEEDS:
            if len(reached) == len(names):
                return ()
            reached |= _reached(subject, synthetic(like, SeededRandomness(seed).stream("reach").seed()), training)
    kinds = {_without_numbers(name) for name in reached}
    return tuple(name for name in names if kinds and _without_numbers(name) not in kinds)


def warn_of(names: tuple[str, ...]) -> None:
    """Say which parameters get noise and no gradient, and how to keep them as they are."""
    if names:
        warnings.warn(
            f"no loss depends on {', '.join(map(repr, names))}, seen on synthetic samples, so noise is all that they "
            "get: to keep them as they are, set requires_grad_(False) on them before training. If a record does reach "
            "one, its gradient is clipped with the others and counts",
            stacklevel=2,
        )


def _reached(subject: Subject, batch: Any, training: bool) -> set[str]:
    """The parameters that a graph of the losses leads to; none if the loss does not take this batch."""
    parts = [batch] if subject.plan.gradients == "ghost" else singles(batch)
    try:
        with warnings.catch_warnings(), subject.undisturbed(training=training):
            warnings.simplefilter("ignore")  # of this trial, not of training
            ends = {
                get_gradient_edge(parameter).node: name
                for name, parameter in subject.model.named_parameters()
                if parameter.requires_grad
            }
            return {
                ends[node]
                for part in parts
                for loss in tensors_of(subject.loss_fn(subject.model, part))
                for node in nodes_of(loss)
                if node in ends
            }
    except Exception:  # classes or tokens that there are not, a mode that the loss does not run in
        return set()


def _without_numbers(name: str) -> str:
    """
    >>> _without_numbers("experts.3.up.weight")
    'experts.*.up.weight'
    """
    return re.sub(r"\b[0-9]+\b", "*", name)
