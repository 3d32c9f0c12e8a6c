"""Scattering: how strong the oscillations of each direction and scale are around each place, and how they vary.

S. Mallat, "Group invariant scattering", 2012, to the second order at two scales, with Morlet wavelets. Private linear
models on it: F. Tramer, D. Boneh, "Differentially private learning needs better features", 2021.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor
from torch.nn import functional as F

_CELL = 4  # pixels: 2 to the number of scales
_LARGEST_GRID = 8  # cells along an axis; larger images have larger cells
_MARGIN = _CELL  # pixels of reflection on each side, so that opposite sides of an image do not meet
_WIDTH = 0.8  # of a wavelet's envelope at the finest scale, in pixels
_FREQUENCY = 0.75 * math.pi  # of a wavelet at the finest scale, in radians per pixel


@dataclass(frozen=True, kw_only=True)
class ScatteringSpec:
    """Wavelets at two scales.

    Attributes:
        name: The block's name.
        weight: The block's part of a record's squared norm.
        angles: The number of directions.
    """

    name: str
    weight: float
    angles: int = 8


@dataclass(frozen=True, kw_only=True)
class ScatteringTable:
    """Local averages of x, |x * psi_1|, |x * psi_2| and ||x * psi_1| * psi_2|, for wavelets psi of all directions."""

    spec: ScatteringSpec
    wavelets: Tensor  # (2, angles, P, P): Fourier transforms at both scales, for images that are padded to side P
    averages: Tensor  # (grid, P): weights of the places along an axis, for each cell
    mirrors: bool

    @classmethod
    def make(cls, spec: ScatteringSpec, images: Tensor, *, mirrors: bool, generator: torch.Generator) -> Self:
        """Wavelets for images of the size of these (N, C, H, H). Nothing is drawn, and no pixel is read."""
        side = images.shape[-1]
        padded, grid = side + sum(_margins(side)), min(side // _CELL, _LARGEST_GRID)
        turns = [math.pi * number / spec.angles for number in range(spec.angles)]
        banks = [torch.stack([_morlet(padded, scale, turn, 4 / spec.angles) for turn in turns]) for scale in (0, 1)]
        centres = (torch.arange(grid) + 0.5) * side / grid - 0.5 + _MARGIN
        distances = (torch.arange(padded) - centres[:, None]) / (2 * _WIDTH * side / (grid * _CELL))
        averages = torch.exp(-distances.square() / 2)
        return cls(spec=spec, wavelets=torch.stack(banks), averages=_of_unit_sum(averages), mirrors=mirrors)

    def __call__(self, image: Tensor) -> Tensor:
        """Local averages (channels, grid^2) of one image (C, H, H), or their mean with its mirror image's."""
        found = self._scattered(image)
        return (found + self._scattered(image.flip(-1))) / 2 if self.mirrors else found

    def _scattered(self, image: Tensor) -> Tensor:
        before, after = _margins(image.shape[-1])
        padded = F.pad(image[None], (before, after, before, after), mode="reflect")[0]
        spectrum = torch.fft.fft2(padded)[:, None]
        fine, coarse = (_modulus(torch.fft.ifft2(spectrum * bank)) for bank in self.wavelets)  # (C, angles, P, P)
        again = _halved_product(torch.fft.fft2(fine)[:, :, None], self.wavelets[1])
        second = _modulus(torch.fft.ifft2(again)).flatten(1, 2)  # (C, angles^2, P/2, P/2)
        every, even = self.averages, _of_unit_sum(self.averages[:, ::2])
        first = every @ torch.cat([padded[:, None], fine, coarse], dim=1) @ every.T
        return torch.cat([first, even @ second @ even.T], dim=1).flatten(0, 1).flatten(1)


def _margins(side: int) -> tuple[int, int]:
    """The pixels before and after an image: the padded side is even."""
    return _MARGIN, _MARGIN + side % 2


def _of_unit_sum(weights: Tensor) -> Tensor:
    return weights / weights.sum(1, keepdim=True)


def _modulus(values: Tensor) -> Tensor:
    """|z|, without the care for overflow that makes `abs` slow."""
    real, imaginary = torch.view_as_real(values).unbind(-1)
    return real.square().addcmul_(imaginary, imaginary).sqrt_()


def _halved_product(spectra: Tensor, transfer: Tensor) -> Tensor:
    """The spectra of every second place in both directions, after a filter with the real transfer function given.

    The frequencies f and f + 1/2 coincide there. Real arithmetic is faster than complex.
    """
    half = transfer.shape[-1] // 2
    parts, real = torch.view_as_real(spectra), transfer[..., None]
    upper, lower = slice(0, half), slice(half, None)
    rows = (parts[..., upper, :, :] * real[..., upper, :, :]).addcmul_(parts[..., lower, :, :], real[..., lower, :, :])
    return torch.view_as_complex((rows[..., :half, :] + rows[..., half:, :]).mul_(0.25))


def _morlet(side: int, scale: int, turn: float, slant: float) -> Tensor:
    """The Fourier transform (side, side) of exp(-|u|^2 / 2 s^2) (exp(i f u) - k), whose mean is 0 by the choice of k.

    |u| counts distances along the wave's front `slant` times.
    """
    width, frequency = _WIDTH * 2**scale, _FREQUENCY / 2**scale
    places = 2 * math.pi * torch.fft.fftfreq(side, dtype=torch.float64)

    def envelope(centre: float) -> Tensor:
        found = torch.zeros(side, side, dtype=torch.float64)
        for down in range(-2, 3):  # a sampled function has the sum of all shifts of its transform
            for right in range(-2, 3):
                y, x = places[:, None] + 2 * math.pi * down, places + 2 * math.pi * right
                along = math.cos(turn) * x + math.sin(turn) * y - centre
                across = math.cos(turn) * y - math.sin(turn) * x
                found += torch.exp(-(width**2) * (along**2 + (across / slant) ** 2) / 2)
        return found

    wave, still = envelope(frequency), envelope(0.0)
    return (wave - wave[0, 0] / still[0, 0] * still).float()
