"""Synthetic images: dead leaves, drawn from a seed. No real image is looked at.

An image is a background under many opaque shapes, each drawn over those before it. This leaves edges, corners,
occlusions and flat regions at many scales, as photographs have them. Sizes follow a power law between 1.5 pixels and
0.44 of the image's side.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from pmlf.basics.arguments import require_count

SMALLEST_SIDE, LARGEST_SIDE = 28, 224
_IMAGES_PER_DRAW = 250  # part of the seed's meaning: another number draws other images
_SHAPES = 70  # per image of 32x32 pixels
_SMALLEST_RADIUS, _LARGEST_PART, _EXPONENT = 1.5, 0.44, 1.2
_MARGIN = 4.0  # shapes may be centred this far outside the image
# rows: luma and two chroma axes, in red, green and blue
_COLOUR_AXES = ((1.0, 1.0, 1.0), (1.0, 0.0, -1.0), (0.6, -1.1, 0.6))


def synthetic_images(count: int, *, side: int = 32, channels: int = 3, seed: int = 0) -> Tensor:
    """Draw dead-leaves images: superellipses with shading, stripes and 1/f texture over each other.

    Args:
        count: The number of images.
        side: Height and width in pixels, 28 to 224.
        channels: 3 for colour, 1 for grey.
        seed: The same seed draws the same images.

    Returns:
        float32 tensor (count, channels, side, side) with values from 0 to 255.

    Raises:
        ValueError: If an argument is out of range.

    >>> images = synthetic_images(2, side=28, channels=1)
    >>> tuple(images.shape), bool(images.min() >= 0), bool(images.max() <= 255)
    ((2, 1, 28, 28), True, True)
    """
    require_count("count", count, "it is a number of images")
    require_count("side", side, "it is the side of an image", least=SMALLEST_SIDE, most=LARGEST_SIDE)
    if channels not in (1, 3):
        raise ValueError(f"channels is {channels!r}: give 3 for colour or 1 for grey")
    draws = _ImageDraws(torch.Generator().manual_seed(seed), side)
    parts = [draws.images(min(_IMAGES_PER_DRAW, count - start)) for start in range(0, count, _IMAGES_PER_DRAW)]
    drawn = torch.cat(parts)
    return drawn if channels == 3 else drawn.mean(1, keepdim=True)


class _ImageDraws:
    """Draws images of one size from one generator."""

    def __init__(self, generator: torch.Generator, side: int) -> None:
        self._generator = generator
        self._side = side
        places = torch.arange(side) + 0.5
        self._y, self._x = torch.meshgrid(places, places, indexing="ij")  # (side, side) each

    def _uniform(self, *shape: int) -> Tensor:
        return torch.rand(*shape, generator=self._generator)

    def _normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self._generator)

    def images(self, count: int) -> Tensor:
        palette = _Palette(self, count)
        texture = self._texture(count)
        image = palette.colour() + texture[:, None] * (25 * self._uniform(count))[:, None, None, None]
        shapes = round(_SHAPES * self._side / 32)  # larger images also have larger shapes
        for _ in range(shapes):
            cover, across, along = self._shape(count)
            fill = palette.colour() + (self._relief(count, across, along) + self._shifted(texture))[:, None]
            image = image + cover[:, None] * (fill - image)
        return self._photographed(image)

    def _texture(self, count: int) -> Tensor:
        """Noise with a power spectrum 1/f^(2 slope), slope from 0.8 to 1.8; unit deviation."""
        side = self._side
        slope = self._uniform(count) + 0.8
        spectrum = torch.fft.rfft2(self._normal(count, side, side))
        frequency = (torch.fft.fftfreq(side)[:, None] ** 2 + torch.fft.rfftfreq(side)[None] ** 2).sqrt()
        frequency[0, 0] = 1 / side
        texture = torch.fft.irfft2(spectrum * frequency ** -slope[:, None, None], s=(side, side))
        return texture / texture.std((1, 2), keepdim=True)

    def _shape(self, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """How much a shape covers each pixel, 0 to 1, and the pixel's place in the shape's own axes, in radii."""
        small, large = _SMALLEST_RADIUS**-_EXPONENT, (_LARGEST_PART * self._side) ** -_EXPONENT
        radius = (small + self._uniform(count) * (large - small)) ** (-1 / _EXPONENT)
        stretch = torch.exp(0.3 * self._normal(count))
        long, short = _pixelwise(radius * stretch), _pixelwise(radius / stretch)
        right = math.pi / 2
        turn = self._uniform(count) * math.pi
        upright = torch.round(turn / right) * right + 0.05 * self._normal(count)
        turn = torch.where(self._uniform(count) < 0.4, upright, turn)
        room = self._side + 2 * _MARGIN
        x = self._x - _pixelwise(self._uniform(count) * room - _MARGIN)
        y = self._y - _pixelwise(self._uniform(count) * room - _MARGIN)
        cosine, sine = _pixelwise(turn.cos()), _pixelwise(turn.sin())
        along, across = cosine * x + sine * y, cosine * y - sine * x
        across = across + _pixelwise(0.03 * self._normal(count)) * along**2  # bent
        power = _pixelwise(torch.exp(1.3 * self._uniform(count) + 0.4))  # from nearly a diamond to nearly a rectangle
        along, across = along / long, across / short
        reach = (along.abs().clamp_min(1e-4) ** power + across.abs().clamp_min(1e-4) ** power) ** (1 / power)
        softness = _pixelwise((0.6 * torch.exp(0.6 * self._normal(count))).clamp(0.3, 3))
        return torch.sigmoid(2 * (1 - reach) * torch.minimum(long, short) / softness), across, along

    def _relief(self, count: int, across: Tensor, along: Tensor) -> Tensor:
        """Shading along both axes of a shape, and stripes on some shapes."""
        shade = _pixelwise(12 * self._normal(count)) * along + _pixelwise(12 * self._normal(count)) * across
        height = torch.where(self._uniform(count) < 0.15, 35 * self._uniform(count), torch.zeros(count))
        waves, phase = 1 + 4 * self._uniform(count), 2 * math.pi * self._uniform(count)
        stripes = _pixelwise(height) * torch.sin(along * _pixelwise(math.pi * waves) + _pixelwise(phase))
        return shade.clamp(-60, 60) + stripes

    def _shifted(self, texture: Tensor) -> Tensor:
        down, right = (int(part * self._side) for part in self._uniform(2))
        return texture.roll((down, right), (1, 2)) * _pixelwise(18 * self._uniform(len(texture)))

    def _photographed(self, image: Tensor) -> Tensor:
        """Blur by a random amount, add a little noise, and cut at black and white."""
        kernel = torch.tensor([0.25, 0.5, 0.25])
        padded = F.pad(image, (1, 1, 1, 1), mode="replicate").flatten(0, 1)[:, None]
        blurred = F.conv2d(padded, (kernel[:, None] * kernel)[None, None])[:, 0].unflatten(0, image.shape[:2])
        blur, noise = 0.7 * self._uniform(len(image)), 5 * self._uniform(len(image))
        image = image + blur[:, None, None, None] * (blurred - image)
        return (image + noise[:, None, None, None] * self._normal(*image.shape)).clamp(0, 255)


class _Palette:
    """The colours of each image: a common tint, brightness, contrast and saturation."""

    def __init__(self, draws: _ImageDraws, count: int) -> None:
        self._draws = draws
        self._tint = draws._normal(count, 3) * torch.tensor([0.0, 18.0, 14.0])
        self._tint[:, 0] += 60 + 120 * draws._uniform(count)
        saturation = 0.2 + 1.2 * draws._uniform(count)
        contrast = 25 + 50 * draws._uniform(count)
        self._spread = torch.stack([contrast, 22 * saturation, 16 * saturation], dim=1)
        self._axes = torch.tensor(_COLOUR_AXES)

    def colour(self) -> Tensor:
        """One colour per image: (count, 3, 1, 1)."""
        drawn = self._tint + self._spread * self._draws._normal(*self._tint.shape)
        return (drawn @ self._axes)[:, :, None, None]


def _pixelwise(values: Tensor) -> Tensor:
    return values[:, None, None]
