"""What a loss function returned, as one loss a sample; and autocast without a memory of other points' weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


def checked_losses(result: Any, samples: int, *, differentiable: bool = True) -> Tensor:
    """The loss as one number a sample; several losses are added sample by sample."""
    parts = list(result.values()) if isinstance(result, Mapping) else result
    parts = list(parts) if isinstance(parts, (tuple, list)) else [parts]
    for part in parts:
        if not isinstance(part, Tensor):
            raise ValueError(
                f"loss_fn returned a {type(part).__name__}: return a tensor with one loss a sample, for example "
                "F.cross_entropy(model(x), y, reduction='none')"
            )
        if part.ndim == 0:
            raise ValueError(
                "loss_fn returned a scalar, the mean or sum over the batch: return one loss a sample, for example "
                "F.cross_entropy(logits, labels, reduction='none'); a Hugging Face model's own .loss is such a mean, "
                "take its .logits instead"
            )
        if part.shape != (samples,):
            raise ValueError(
                f"loss_fn returned a tensor with {part.ndim} axes that is not one loss a sample: return shape "
                "(samples,), summing or averaging over every axis but the first"
            )
    if not parts:
        raise ValueError("loss_fn returned no loss: return a tensor with one loss a sample")
    loss: Tensor = sum(parts[1:], start=parts[0])
    if differentiable and not loss.requires_grad:
        raise ValueError(
            "the loss does not depend on any trainable parameter: loss_fn must call the model it is given, with "
            "gradients on (no torch.no_grad)"
        )
    return loss.float() if loss.dtype in (torch.bfloat16, torch.float16) else loss


@contextmanager
def no_autocast_cache() -> Iterator[None]:
    enabled = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    torch.clear_autocast_cache()
    try:
        yield
    finally:
        torch.clear_autocast_cache()
        torch.set_autocast_cache_enabled(enabled)
