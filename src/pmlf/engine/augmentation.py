"""Random changes to samples, each by its own uniforms: no statistic of the data, so nothing to account for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from pmlf.basics.batches import joined, select


@dataclass(frozen=True, kw_only=True)
class Augmentation:
    """A change to each sample by its own uniforms: function(batch, uniforms (samples, draws)) -> batch.

    Drawn once a step and sample, or anew at every evaluation point (`per_point`): same sensitivity, less variance.
    """

    function: Callable[[Any, Tensor], Any]
    draws: int
    per_point: bool = False

    def apart(self, batch: Any, uniforms: Tensor) -> Any:
        """The batch with each sample changed by itself, as a batch of one."""
        one = (slice(index, index + 1) for index in range(len(uniforms)))
        return joined([self.function(select(batch, chosen), uniforms[chosen]) for chosen in one])


def shifted_crops(padding: int, *, flip: bool, per_point: bool = False) -> Augmentation:
    """Images shifted by up to `padding` pixels each way; if `flip`, half of them mirrored.

    For batches (images (N, C, H, W), labels). What comes in at the edges is zero: mean grey, if images are normalised.
    """

    def change(batch: tuple[Tensor, Tensor], uniforms: Tensor) -> tuple[Tensor, Tensor]:
        images, labels = batch
        return shifted_and_flipped(images, uniforms.to(images.device), padding, flip=flip), labels

    return Augmentation(function=change, draws=3, per_point=per_point)


def shifted_and_flipped(images: Tensor, uniforms: Tensor, padding: int, *, flip: bool) -> Tensor:
    """Image i shifted down and right by uniforms[i, 0] and [i, 1], mirrored where uniforms[i, 2] < 1/2."""
    height, width = images.shape[2:]
    offsets = (uniforms[:, :2] * (2 * padding + 1)).long()  # (N, 2), from 0 to 2 * padding
    padded = F.pad(images, (padding,) * 4)
    windows = padded.unfold(2, height, 1).unfold(3, width, 1)  # (N, C, 2p+1, 2p+1, H, W), without a copy
    rows, columns = 2 * padding - offsets[:, 0], 2 * padding - offsets[:, 1]
    shifted = windows[torch.arange(len(images), device=images.device), :, rows, columns]  # (N, C, H, W)
    if not flip:
        return shifted
    return torch.where(uniforms[:, 2].lt(0.5).view(-1, 1, 1, 1), shifted.flip(3), shifted)
