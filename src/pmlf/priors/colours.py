"""Colour histograms: how much of each cell of an image has each colour of a synthetic palette."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from pmlf.priors.pooling import mirrored_cells, pooling_matrix

_PIXELS = 100_000
_ROUNDS = 15
_SOFTNESS = 2.0  # of the assignment, in mean squared distances to the nearest colour


@dataclass(frozen=True, kw_only=True)
class ColourSpec:
    """A palette.

    Attributes:
        name: The block's name.
        weight: The block's part of a record's squared norm.
        colours: The number of colours: k of k-means on synthetic pixels.
        grid: Histograms are taken over grid x grid cells.
    """

    name: str
    weight: float
    colours: int = 96
    grid: int = 4

    @property
    def channels(self) -> int:
        """The number of channels, one per colour."""
        return self.colours


@dataclass(frozen=True, kw_only=True)
class ColourTable:
    """Soft histogram: softmax over colours of -|pixel - colour|^2 / softness, averaged over cells."""

    spec: ColourSpec
    palette: Tensor  # (colours, C)
    softness: Tensor  # (1,)
    mirrors: bool

    @classmethod
    def make(cls, spec: ColourSpec, images: Tensor, *, mirrors: bool, generator: torch.Generator) -> Self:
        """Find the palette by k-means on pixels of synthetic images (N, C, H, W)."""
        pixels = images.movedim(1, -1).flatten(0, 2)
        pixels = pixels[torch.randperm(len(pixels), generator=generator)[:_PIXELS]]
        palette = pixels[: spec.colours].clone()
        for _ in range(_ROUNDS):
            nearest = torch.cdist(pixels, palette).argmin(1)
            sums = torch.zeros_like(palette).index_add_(0, nearest, pixels)
            palette = sums / torch.bincount(nearest, minlength=spec.colours).clamp_min(1)[:, None]
        softness = _SOFTNESS * torch.cdist(pixels, palette).min(1).values.square().mean(0, keepdim=True)
        return cls(spec=spec, palette=palette, softness=softness, mirrors=mirrors)

    def __call__(self, image: Tensor) -> Tensor:
        """Histograms (colours, grid^2) of one image (C, H, W), the mean with its mirror image's if it mirrors."""
        pixels = image.flatten(1).T  # (H W, C)
        # |pixel|^2 is the same for all colours, so the softmax does not need it
        near = torch.addmm(-self.palette.square().sum(1), pixels, self.palette.T, alpha=2)
        shares = torch.softmax(near.div_(self.softness), dim=1)
        pooled = (pooling_matrix(image.shape[-1], self.spec.grid) @ shares).T
        return (pooled + mirrored_cells(pooled, self.spec.grid)) / 2 if self.mirrors else pooled
