"""Which optimizers may follow the private gradients: those that take one gradient a step, of the model's parameters."""

from __future__ import annotations

import warnings

import torch
from torch import nn
from torch.optim import Optimizer

from pmlf.methods import Method

SECOND_DECAY = 0.999  # torch's own for Adam


def adam_decays(method: Method) -> tuple[float, float]:
    """Adam's decays after a method: the first is 0 if the method has a filter, which is a momentum already.

    >>> from pmlf import methods
    >>> adam_decays(methods.dpsgd()), adam_decays(methods.dp_pmlf())
    ((0.9, 0.999), (0.0, 0.999))
    """
    return 0.9 if method.low_pass.identity else 0.0, SECOND_DECAY


def check_optimizer(model: nn.Module, optimizer: Optimizer, method: Method) -> None:
    """Refuse an optimizer that would leave the guarantee or a parameter out, and warn of a second momentum.

    Raises:
        ValueError: The optimizer needs a closure or sparse gradients, holds other parameters than the model's, or
            lacks one that is trainable.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError(
            "LBFGS evaluates a closure several times in a step, which is not accounted for: use SGD or Adam"
        )
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise ValueError("SparseAdam needs sparse gradients, and noise is dense: use Adam")
    names = {id(p): name for name, p in model.named_parameters()}
    given = [id(p) for group in optimizer.param_groups for p in group["params"]]
    if any(key not in names for key in given):
        raise ValueError(
            "the optimizer holds parameters that are not the model's: build it on the model that is trained, after "
            "pmlf.fix_model and any other replacement"
        )
    missing = [name for name, p in model.named_parameters() if p.requires_grad and id(p) not in set(given)]
    if missing:
        raise ValueError(
            f"parameter {missing[0]!r} is trainable but not in the optimizer: add it to the optimizer, or freeze it by "
            "requires_grad_(False)"
        )
    momentum = _momentum(optimizer)
    if momentum and not method.low_pass.identity:
        warnings.warn(
            f"{type(optimizer).__name__} has a momentum of {momentum:g} and the filter of {method.name} is one too. "
            "A linear model at epsilon 8 lost 7 to 13 points with both. Set that of the optimizer to 0: "
            f"SGD(..., momentum=0), Adam(..., betas=(0.0, {SECOND_DECAY})), OneCycleLR(..., cycle_momentum=False)",
            stacklevel=4,
        )


def _momentum(optimizer: Optimizer) -> float:
    """The largest decay of past gradients, under the names that torch's optimizers give it: 0 if there is none."""
    decays = (
        group.get("momentum") or group.get("beta1") or (group.get("betas") or (0.0,))[0]
        for group in optimizer.param_groups
    )
    return max((float(decay or 0.0) for decay in decays), default=0.0)
