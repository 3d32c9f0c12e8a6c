"""Scattering equals its definition: convolutions with wavelets, absolute values, local averages."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy.ndimage import fourier_shift
from scipy.signal import convolve2d

from pmlf.priors import ScatteringSpec
from pmlf.priors.scattering import ScatteringTable

ANGLES = 2


def wavelet(side: int, scale: int, turn: float) -> NDArray[np.complex128]:
    """A Morlet wavelet on a circle of places, in space; the place 0 is in the middle."""
    width, frequency, slant = 0.8 * 2**scale, 0.75 * np.pi / 2**scale, 4 / ANGLES
    envelope = np.zeros((side, side))
    waves = np.zeros((side, side), complex)
    places = np.arange(side) - side // 2
    for down in (-side, 0, side):
        for right in (-side, 0, side):
            y, x = np.meshgrid(places + down, places + right, indexing="ij")
            along, across = np.cos(turn) * x + np.sin(turn) * y, np.cos(turn) * y - np.sin(turn) * x
            bell = slant / (2 * np.pi * width**2) * np.exp(-(along**2 + slant**2 * across**2) / (2 * width**2))
            envelope += bell
            waves += bell * np.exp(1j * frequency * along)
    return waves - waves.sum() / envelope.sum() * envelope


def convolved(image: NDArray[np.float64], kernel: NDArray[np.complex128]) -> NDArray[np.float64]:
    side = len(image)
    wrapped = np.pad(image, [(side - side // 2 - 1, side // 2)] * 2, mode="wrap")
    return np.abs(convolve2d(wrapped, kernel, mode="valid"))


def averaged(image: NDArray[np.float64], side: int, step: int, first: float = 0.0) -> NDArray[np.float64]:
    """Averages around the centres of 7 x 7 cells of a padded image, by every `step`-th sample from `first` on."""
    places = first + np.arange(0, len(image), step)
    centres = 4 * np.arange(side // 4) + 1.5 + 4
    weights = np.exp(-((places - centres[:, None]) ** 2) / (2 * 1.6**2))
    weights /= weights.sum(1, keepdims=True)
    return weights @ image[::step, ::step] @ weights.T


def scattered(image: NDArray[np.float64], first: float) -> NDArray[np.float64]:
    """Scattering of an image of side 28. Its second order is sampled at every second place from `first` on."""
    padded = np.pad(image, 4, mode="reflect")
    turns = [np.pi * number / ANGLES for number in range(ANGLES)]
    banks = [[wavelet(36, scale, turn) for turn in turns] for scale in (0, 1)]
    fine, coarse = ([convolved(padded, kernel) for kernel in bank] for bank in banks)
    moved = [np.fft.ifft2(fourier_shift(np.fft.fft2(each), -first)).real for each in fine]
    levels = [averaged(each, 28, 1) for each in [padded, *fine, *coarse]]
    second = [averaged(convolved(each, kernel), 28, 2, first) for each in moved for kernel in banks[1]]
    return np.stack([each.ravel() for each in levels + second])


@pytest.mark.slow
@pytest.mark.parametrize("mirrors", [False, True])
def test_scattering_equals_its_definition(mirrors: bool) -> None:
    image = np.random.default_rng(0).uniform(0, 255, (28, 28))
    expected = (scattered(image, 0.5) + scattered(image[:, ::-1], 0.5)) / 2 if mirrors else scattered(image, 0.0)
    spec, images = ScatteringSpec(name="scattering", weight=1.0, angles=ANGLES), torch.zeros(1, 1, 28, 28)
    table = ScatteringTable.make(spec, images, mirrors=mirrors, generator=torch.Generator())
    found = table(torch.from_numpy(image[None].astype(np.float32)))
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(("side", "channels"), [(28, 1), (29, 3), (32, 3)])
def test_an_image_and_its_mirror_image_have_the_same_scattering(side: int, channels: int) -> None:
    spec, generator = ScatteringSpec(name="scattering", weight=1.0), torch.Generator().manual_seed(0)
    image = 255 * torch.rand(channels, side, side, generator=generator)
    table = ScatteringTable.make(spec, image[None], mirrors=True, generator=generator)
    torch.testing.assert_close(table(image), table(image.flip(-1)), rtol=1e-4, atol=1e-3)
    assert not torch.allclose(table(image), table(image.flip(-2)), rtol=1e-2, atol=1.0)


@pytest.mark.parametrize(("side", "grid"), [(28, 7), (29, 7), (64, 8)])
def test_a_flat_image_has_its_own_level_and_no_oscillation(side: int, grid: int) -> None:
    spec, images = ScatteringSpec(name="scattering", weight=1.0), torch.zeros(1, 1, side, side)
    table = ScatteringTable.make(spec, images, mirrors=True, generator=torch.Generator())
    found = table(torch.full((1, side, side), 100.0))
    assert found.shape == (1 + 2 * 8 + 8**2, grid**2)
    torch.testing.assert_close(found[0], torch.full_like(found[0], 100.0))
    assert float(found[1:].max()) < 1e-3


def test_a_colour_image_is_scattered_by_luma_and_chroma() -> None:
    spec, generator = ScatteringSpec(name="scattering", weight=1.0), torch.Generator().manual_seed(0)
    image = 255 * torch.rand(3, 28, 28, generator=generator)
    red, green, blue = image
    luma = 0.299 * red + 0.587 * green + 0.114 * blue
    planes = [luma, 128 + (blue - luma) / (2 - 2 * 0.114), 128 + (red - luma) / (2 - 2 * 0.299)]
    table = ScatteringTable.make(spec, image[None], mirrors=True, generator=generator)
    grey = torch.cat([table(plane[None]) for plane in planes])
    torch.testing.assert_close(table(image), grey, rtol=1e-3, atol=1e-2)
