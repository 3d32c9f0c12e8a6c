"""Heads: what a linear model predicts. A head is data: a link from scores to predictions; p - y is the residual."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Head:
    """A generalised linear model: the gradient of its loss at a record's scores is link(scores) - y.

    Attributes:
        name: Its name.
        link: From scores (n, K) to predictions p (n, K).
        smoothness: An upper bound on the slope of the link, which limits the learning rate.
    """

    name: str
    link: Callable[[Tensor], Tensor]
    smoothness: float

    def residuals(self, scores: Tensor, targets: Tensor) -> Tensor:
        """p - y, in the memory of the scores where possible.

        Args:
            scores: (n, K).
            targets: Class indices (n,), or numbers (n, K).

        >>> HEADS["softmax"].residuals(torch.zeros(1, 2), torch.tensor([1])).tolist()
        [[0.5, -0.5]]
        """
        predictions = self.link(scores)
        if targets.ndim == 2:
            return predictions.sub_(targets)
        predictions[torch.arange(len(targets)), targets] -= 1.0
        return predictions


def _softmax(scores: Tensor) -> Tensor:
    return torch.softmax(scores, dim=1)


HEADS = {
    head.name: head
    for head in (
        Head(name="softmax", link=_softmax, smoothness=0.5),
        Head(name="sigmoid", link=torch.sigmoid, smoothness=0.25),
        Head(name="least-squares", link=torch.clone, smoothness=1.0),
    )
}


def clipped_(residuals: Tensor, norms: Tensor, clip_norm: float) -> Tensor:
    """Scale residuals in place so that no record's gradient w (x) r exceeds the clip norm.

    The gradient of one record has the norm |w| |r|, exactly. A record whose gradient is not finite becomes zero.

    Args:
        residuals: r of every record, (n, K).
        norms: |w| of every record.
        clip_norm: C.

    Returns:
        The residuals.

    >>> clipped_(torch.tensor([[3.0, 4.0], [float("nan"), 0.0]]), torch.ones(2), 1.0).tolist()
    [[0.6000000238418579, 0.800000011920929], [0.0, 0.0]]
    """
    lengths = norms * torch.linalg.vector_norm(residuals, dim=1)
    factors = clip_norm / lengths.clamp(min=clip_norm)  # NaN of NaN, and 0 of infinity
    refused = ~torch.isfinite(lengths)
    if bool(refused.any()):
        residuals[refused] = 0.0
        factors[refused] = 0.0
    return residuals.mul_(factors[:, None])
