"""Patch responses: how much each place of an image resembles each patch of a dictionary of synthetic patches.

A. Coates, H. Lee, A. Ng, "An analysis of single-layer networks in unsupervised feature learning", 2011, with patches of
synthetic images where they take patches of real ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor
from torch.nn import functional as F

from pmlf.priors.pooling import pooling_matrix

_PATCHES_PER_IMAGE = 25  # drawn for the statistics; their mirrors double them
_RESPONSES = 20_000  # patches that the scale of responses is measured on
_OFFSET = 10.0  # added to a patch's variance: patches with less contrast than that count as flat
_RIDGE = 0.1  # added to the eigenvalues of the patches' covariance
_LEAST_DEVIATION = 12.0  # of a patch in the dictionary
_THRESHOLD = 0.25  # a response below this many deviations counts as none


@dataclass(frozen=True, kw_only=True)
class PatchSpec:
    """A dictionary of patches at one scale.

    Attributes:
        name: The block's name.
        weight: The block's part of a record's squared norm.
        shrink: The image's side is divided by this first.
        side: The side of a patch in pixels.
        filters: The number of patches in the dictionary.
        grid: Responses are averaged over grid x grid cells.
    """

    name: str
    weight: float
    shrink: int = 1
    side: int = 6
    filters: int = 384
    grid: int = 4

    @property
    def channels(self) -> int:
        """Two per filter: positive and negative responses."""
        return 2 * self.filters


@dataclass(frozen=True, kw_only=True)
class PatchTable:
    """z = filter . (patch - mean) / sqrt(variance + 10) + bias; pooled relu(z - 0.25) and relu(-z - 0.25)."""

    spec: PatchSpec
    filters: Tensor  # (C side^2, filters)
    bias: Tensor  # (filters,)
    mirrors: bool

    @classmethod
    def make(cls, spec: PatchSpec, images: Tensor, *, mirrors: bool, generator: torch.Generator) -> Self:
        """Draw the dictionary from synthetic images (N, C, H, W), whitened by the patches' own covariance."""
        drawn = _drawn_patches(_shrunk(images, spec.shrink), spec.side, generator)
        mirrored = drawn.unflatten(1, (images.shape[1], spec.side, spec.side)).flip(-1).flatten(1)
        drawn = torch.cat([drawn, mirrored])
        patches = _normalised(drawn)
        mean = patches.mean(0)
        values, vectors = torch.linalg.eigh((patches - mean).T @ (patches - mean) / len(patches))
        whitening = vectors @ torch.diag((values.clamp_min(0) + _RIDGE).rsqrt()) @ vectors.T
        eligible = torch.nonzero(drawn.std(1) > _LEAST_DEVIATION)[:, 0]
        chosen = eligible[torch.randperm(len(eligible), generator=generator)[: spec.filters]]
        dictionary = F.normalize((patches[chosen] - mean) @ whitening, dim=1)
        filters = whitening @ dictionary.T
        bias = -(mean @ filters)
        some = patches[torch.randperm(len(patches), generator=generator)[:_RESPONSES]]
        scale = 1 / (some @ filters + bias).std(0)
        return cls(spec=spec, filters=(filters * scale).contiguous(), bias=bias * scale, mirrors=mirrors)

    def __call__(self, image: Tensor) -> Tensor:
        """Pooled responses (channels, grid^2) of one image (C, H, W), or their mean with its mirror image's."""
        shrunk = _shrunk(image[None], self.spec.shrink)
        places = shrunk.shape[-1] - self.spec.side + 1
        pooling = pooling_matrix(places, self.spec.grid)
        pooled = self._pooled(shrunk, pooling)
        if self.mirrors:
            pooled = (pooled + self._pooled(shrunk.flip(-1), pooling)) / 2
        return pooled.T

    def _pooled(self, image: Tensor, pooling: Tensor) -> Tensor:
        patches = _normalised(F.unfold(image, self.spec.side)[0].T)  # (places^2, C side^2)
        responses = torch.addmm(self.bias, patches, self.filters)
        responses = F.softshrink(responses, _THRESHOLD)
        signed = pooling @ responses  # (grid^2, filters)
        size = pooling @ responses.abs_()
        return torch.cat([size + signed, size - signed], dim=1).clamp_min_(0).mul_(0.5)


def _shrunk(images: Tensor, factor: int) -> Tensor:
    if factor == 1:
        return images
    side = images.shape[-1] // factor
    return F.interpolate(images, size=(side, side), mode="bilinear", antialias=True)


def _normalised(patches: Tensor) -> Tensor:
    """Contrast of each patch (row): (p - mean) / sqrt(variance + 10)."""
    centred = patches - patches.mean(1, keepdim=True)
    return centred.mul_((centred.square().mean(1, keepdim=True) + _OFFSET).rsqrt_())


def _drawn_patches(images: Tensor, side: int, generator: torch.Generator) -> Tensor:
    """Patches (M, C side^2) at random places, equally many from each image."""
    drawn = []
    for image in images:
        patches = F.unfold(image[None], side)[0].T
        drawn.append(patches[torch.randint(len(patches), (_PATCHES_PER_IMAGE,), generator=generator)])
    return torch.cat(drawn)
