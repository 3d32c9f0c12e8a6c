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
_BETWEEN = 0.5  # pixels: every second place from here on is the same set from both sides of an image
_FREQUENCY = 0.75 * math.pi  # of a wavelet at the finest scale, in radians per pixel
_LUMA_AND_CHROMA = torch.tensor(  # of JPEG: brightness, and how blue and how red a pixel is for its brightness
    [[0.299, 0.587, 0.114], [-0.168736, -0.331264, 0.5], [0.5, -0.418688, -0.081312]]
)
_MIDDLE = torch.tensor([0.0, 128.0, 128.0])  # of chroma, so that no value is negative


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
    """Local averages of x, |x * psi_1|, |x * psi_2| and ||x * psi_1| * psi_2|, for wavelets psi of all directions.

    x is the brightness of a grey image, and the luma and the two chromas of a colour image.
    """

    spec: ScatteringSpec
    wavelets: Tensor  # (2, angles, P, P): Fourier transforms at both scales, for images that are padded to side P
    averages: Tensor  # (grid, P): weights of the places along an axis, for each cell
    halved: Tensor  # (grid, P / 2): weights of the places at which the second order is sampled
    mirrors: bool

    @classmethod
    def make(cls, spec: ScatteringSpec, images: Tensor, *, mirrors: bool, generator: torch.Generator) -> Self:
        """Wavelets for images of the size of these (N, C, H, H). Nothing is drawn, and no pixel is read."""
        side = images.shape[-1]
        padded, grid = side + sum(_margins(side)), min(side // _CELL, _LARGEST_GRID)
        turns = [math.pi * number / spec.angles for number in range(spec.angles)]
        banks = [torch.stack([_morlet(padded, scale, turn, 4 / spec.angles) for turn in turns]) for scale in (0, 1)]

        def weights(places: Tensor) -> Tensor:
            centres = (torch.arange(grid) + 0.5) * side / grid - 0.5 + _MARGIN
            found = torch.exp(-((places - centres[:, None]) / (2 * _WIDTH * side / (grid * _CELL))).square() / 2)
            return found / found.sum(1, keepdim=True)

        return cls(
            spec=spec,
            wavelets=torch.stack(banks),
            averages=weights(torch.arange(padded)),
            halved=weights(torch.arange(0, padded, 2) + (_BETWEEN if mirrors else 0.0)),
            mirrors=mirrors,
        )

    def __call__(self, image: Tensor) -> Tensor:
        """Local averages (channels, grid^2) of one image (C, H, H), or their mean with its mirror image's."""
        found = self._scattered(image)
        if self.mirrors:
            even = image.shape[-1] % 2 == 0  # margins are equal then, and the padded mirror image is the mirrored one
            found = found + (self._mirrored(found) if even else self._scattered(image.flip(-1)))
            found /= 2
        return found.flatten(0, 1).flatten(1)

    def _scattered(self, image: Tensor) -> Tensor:
        if len(image) == 3:  # oscillations of red, green and blue are nearly the same
            image = (_LUMA_AND_CHROMA @ image.flatten(1) + _MIDDLE[:, None]).view_as(image)
        before, after = _margins(image.shape[-1])
        padded = F.pad(image[None], (before, after, before, after), mode="reflect")[0]
        spectrum = torch.fft.fft2(padded)[:, None]
        fine, coarse = (_modulus(torch.fft.ifft2(spectrum * bank)) for bank in self.wavelets)  # (C, angles, P, P)
        spectra = torch.fft.fft2(fine)
        if self.mirrors:
            spectra *= _moved(spectra.shape[-1], _BETWEEN)
        again = _halved_product(spectra, self.wavelets[1])
        second = _modulus(torch.fft.ifft2(again)).flatten(1, 2)  # (C, angles^2, P/2, P/2)
        first = self.averages @ torch.cat([padded[:, None], fine, coarse], dim=1) @ self.averages.T
        return torch.cat(
            [first, self.halved @ second @ self.halved.T], dim=1
        )  # (C, 1 + 2 angles + angles^2, grid, grid)

    def _mirrored(self, found: Tensor) -> Tensor:
        """Scattering of the mirror image: cells change sides, and a direction t becomes pi - t."""
        angles = self.spec.angles
        turned = -torch.arange(angles) % angles
        level, fine, coarse, second = found.flip(-1).split([1, angles, angles, angles**2], dim=1)
        second = second.unflatten(1, (angles, angles))[:, turned][:, :, turned].flatten(1, 2)
        return torch.cat([level, fine[:, turned], coarse[:, turned], second], dim=1)


def _margins(side: int) -> tuple[int, int]:
    """The pixels before and after an image: the padded side is even."""
    return _MARGIN, _MARGIN + side % 2


def _modulus(values: Tensor) -> Tensor:
    """|z|, without the care for overflow that makes `abs` slow."""
    real, imaginary = torch.view_as_real(values).unbind(-1)
    return real.square().addcmul_(imaginary, imaginary).sqrt_()


def _moved(side: int, distance: float) -> Tensor:
    """The factor (side, side) of a real image's spectrum that samples it `distance` further in both directions."""
    phases = torch.polar(torch.ones(side), 2 * math.pi * distance * torch.fft.fftfreq(side))
    phases.imag[side // 2] = 0  # the highest frequency has no direction
    return phases[:, None] * phases


def _halved_product(spectra: Tensor, transfers: Tensor) -> Tensor:
    """Spectra (C, n, P, P) after m filters, at every second place in both directions: (C, n, m, P/2, P/2).

    The frequencies f and f + 1/2 coincide there: every frequency that is left is a sum of four products. Transfer
    functions (m, P, P) are real, so real and imaginary parts are rows of one small matrix product for each frequency.
    """
    half = spectra.shape[-1] // 2
    parts = torch.view_as_real(spectra).unflatten(3, (2, half)).unflatten(2, (2, half))  # (C, n, 2, P/2, 2, P/2, 2)
    rows = parts.permute(3, 5, 0, 1, 6, 2, 4).reshape(half**2, -1, 4)
    columns = transfers.unflatten(2, (2, half)).unflatten(1, (2, half)).permute(2, 4, 1, 3, 0).reshape(half**2, 4, -1)
    found = (rows @ (columns / 4)).view(half, half, *spectra.shape[:2], 2, len(transfers))
    return torch.view_as_complex(found.permute(2, 3, 5, 0, 1, 4).contiguous())


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
