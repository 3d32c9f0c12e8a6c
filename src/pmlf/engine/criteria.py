"""Loss functions as users have them: a function of (model, batch), or one of torch's criteria made per sample."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, cast

from torch import Tensor, nn
from torch.nn.modules.loss import _Loss

from pmlf.engine.passes import LossFunction

_OF_CLASSES = {nn.CrossEntropyLoss: "cross_entropy", nn.NLLLoss: "nll_loss"}
_OF_ELEMENTS = {  # output and target have one shape
    nn.BCELoss: "binary_cross_entropy",
    nn.BCEWithLogitsLoss: "binary_cross_entropy_with_logits",
    nn.HuberLoss: "huber_loss",
    nn.L1Loss: "l1_loss",
    nn.MSELoss: "mse_loss",
    nn.PoissonNLLLoss: "poisson_nll_loss",
    nn.SmoothL1Loss: "smooth_l1_loss",
    nn.SoftMarginLoss: "soft_margin_loss",
}
_OF_ROWS = {  # one loss per row already
    nn.MultiLabelMarginLoss: "multilabel_margin_loss",
    nn.MultiLabelSoftMarginLoss: "multilabel_soft_margin_loss",
    nn.MultiMarginLoss: "multi_margin_loss",
}
_FUNCTIONS = {**_OF_CLASSES, **_OF_ELEMENTS, **_OF_ROWS}


def as_per_sample(loss_fn: Any) -> LossFunction:
    """A function of (model, batch) that returns one loss per sample, from such a function or from a torch criterion.

    A criterion such as `nn.CrossEntropyLoss()` is applied to batches of (inputs, targets), without its mean over the
    batch: the loss of a sample is the mean over its own elements, without those that `ignore_index` leaves out.

    Args:
        loss_fn: A function of (model, batch), which is returned as it is, or a criterion of `torch.nn`.

    Returns:
        The function.

    Raises:
        ValueError: The criterion cannot be separated into samples, or this is not a loss function. The message shows
            the line to write instead.

    >>> import torch
    >>> batch = torch.tensor([[1.0, 2.0], [5.0, 5.0]]), torch.zeros(2, 2)
    >>> as_per_sample(nn.MSELoss())(nn.Identity(), batch)
    tensor([ 2.5000, 25.0000])
    """
    if isinstance(loss_fn, _Loss):
        return _made_per_sample(loss_fn)
    if not callable(loss_fn):
        raise ValueError(f"loss_fn is a {type(loss_fn).__name__}: give a function of (model, batch)")
    if getattr(loss_fn, "__module__", None) == nn.functional.__name__:
        name = loss_fn.__name__
        raise ValueError(
            f"loss_fn is torch's {name}, which does not take (model, batch): write {_line(f'F.{name}', '')}"
        )
    return loss_fn


def _made_per_sample(criterion: _Loss) -> LossFunction:
    kind, name = type(criterion), type(criterion).__name__
    if kind not in _FUNCTIONS:
        raise ValueError(
            f"loss_fn={name}() cannot be separated into samples here: write it yourself, as in "
            f'loss_fn=lambda model, batch: nn.{name}(reduction="none")(model(batch[0]), batch[1])'
        )
    if getattr(criterion, "weight", None) is not None:
        raise ValueError(
            f"loss_fn={name}(weight=...) divides by the weights of the whole batch, so samples would influence each "
            f"other: write {_line(f'F.{_FUNCTIONS[kind]}', 'weight=weight, ')}"
        )
    if criterion.reduction == "sum":
        raise ValueError(
            f"loss_fn={name}(reduction='sum') adds over the batch, and the private gradient is always a mean over "
            f"batch_size: give {name}(), with the learning rate multiplied by batch_size"
        )
    separate = copy.copy(criterion)
    separate.reduction = "none"

    def loss_fn(model: Any, batch: Any) -> Tensor:
        inputs, targets = _pair(batch, kind)
        outputs = model(inputs)
        if kind in _OF_ELEMENTS and outputs.shape != targets.shape:
            raise ValueError(
                f"loss_fn={name}() got outputs of shape {tuple(outputs.shape)} and targets of shape "
                f"{tuple(targets.shape)}, which torch would broadcast over the samples: reshape one, as in "
                f"{_line(f'F.{_FUNCTIONS[kind]}', '').replace('batch[1]', 'batch[1].unsqueeze(1)')}"
            )
        losses = separate(outputs, targets)
        return _mean_of_each(losses, _counted(criterion, losses, targets))

    return loss_fn


def _counted(criterion: _Loss, losses: Tensor, targets: Tensor) -> Tensor | None:
    """Which elements count: all (None), or those whose class is not the one to ignore."""
    if type(criterion) not in _OF_CLASSES or targets.shape != losses.shape:  # else class probabilities
        return None
    return targets != cast(int, criterion.ignore_index)


def _mean_of_each(losses: Tensor, counted: Tensor | None) -> Tensor:
    if losses.dim() < 2:
        return losses
    if counted is None:
        return losses.flatten(1).mean(1)
    return losses.flatten(1).sum(1) / counted.flatten(1).sum(1).clamp(min=1)


def _pair(batch: Any, kind: type) -> tuple[Any, Any]:
    if not isinstance(batch, Sequence) or len(batch) != 2:
        raise ValueError(
            f"loss_fn={kind.__name__}() takes batches of (inputs, targets), and this batch is a "
            f"{type(batch).__name__}: write a function of (model, batch), as in {_line(f'F.{_FUNCTIONS[kind]}', '')}"
        )
    return batch[0], batch[1]


def _line(function: str, options: str) -> str:
    """The argument to write: a function of (model, batch) with one loss per sample."""
    return f'loss_fn=lambda model, batch: {function}(model(batch[0]), batch[1], {options}reduction="none")'
