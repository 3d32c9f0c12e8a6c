"""From an image file to the tensor that a model takes, by public rules: turn upright, crop, resize, normalise."""

from __future__ import annotations

import io
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageOps
from torch import Tensor

from pmlf.basics.arguments import require_count

IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp")
_SIXTEEN_BITS = ("I;16", "I;16B", "I;16L", "I;16N")  # Pillow would cut their values at 255


@dataclass(frozen=True, kw_only=True)
class ImageForm:
    """The images that a model takes: `channels` x `size` x `size`, as (pixel / 255 - mean) / std per channel.

    An image of another shape is turned as its camera says, cropped to its central square and resized (bicubic).
    `mean` and `std` are public constants. Statistics of the private records would be an unaccounted release.

    >>> ImageForm.plain(32).normalised(np.full((1, 3, 32, 32), 255, np.uint8)).unique()
    tensor([1.])
    """

    channels: int
    size: int
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __post_init__(self) -> None:
        require_count("image_size", self.size, "it is the height and width of the images in pixels", most=4096)
        if not len(self.mean) == len(self.std) == self.channels:
            raise ValueError(f"mean={self.mean} and std={self.std} do not have {self.channels} values, one per channel")

    @staticmethod
    def plain(size: int) -> ImageForm:
        """Colour images, normalised to -1 to 1."""
        return ImageForm(channels=3, size=size, mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))

    def pixels(
        self, encoded: bytes, source: str, advice: str = "correct the file", *, resize: bool = True
    ) -> NDArray[np.uint8]:
        """Decode an image to (C, S, S).

        Args:
            encoded: The content of an image file.
            source: Name of the dataset, for errors.
            advice: What to do about a broken file, for errors.
            resize: Crop and resize. False: refuse an image of another size.

        Raises:
            ValueError: If it cannot be decoded, or has another size.
        """
        try:
            with Image.open(io.BytesIO(encoded)) as opened:
                opened.load()
                image = ImageOps.exif_transpose(opened) if resize else opened
        except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:  # SyntaxError: a broken PNG
            raise ValueError(f"an image of {source!r} cannot be decoded: {advice} ({error})") from error
        if not resize and image.size != (self.size, self.size):
            width, height = image.size
            raise ValueError(
                f"an image of {source!r} has size {height}x{width}, not {self.size}x{self.size}: {advice}, or "
                "give image_size to resize all images"
            )
        return self._arranged(image)

    def pixels_of_image(self, image: Image.Image) -> NDArray[np.uint8]:
        """Turn an image of Pillow upright, crop and resize it."""
        return self._arranged(ImageOps.exif_transpose(image))

    def pixels_of_array(self, pixels: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Crop and resize pixels (C, H, W) of one or three channels."""
        return self._arranged(Image.fromarray(pixels[0] if len(pixels) == 1 else pixels.transpose(1, 2, 0)))

    def _arranged(self, image: Image.Image) -> NDArray[np.uint8]:
        if image.mode in _SIXTEEN_BITS:
            image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
        image = image.convert("L" if self.channels == 1 else "RGB")
        if image.size != (self.size, self.size):
            image = ImageOps.fit(image, (self.size, self.size), method=Image.Resampling.BICUBIC)
        pixels = np.asarray(image)  # (S, S) or (S, S, 3)
        return pixels.reshape(self.size, self.size, self.channels).transpose(2, 0, 1)  # (C, S, S)

    def normalised(self, pixels: NDArray[np.uint8]) -> Tensor:
        """Pixels (..., C, S, S) as the float32 tensor that the model takes."""
        # with NumPy: a few megabytes do not justify the overhead of torch's threads
        scale, shift = self.affine
        scaled = np.multiply(pixels, scale, dtype=np.float32)
        return torch.from_numpy(np.add(scaled, shift, out=scaled))

    @cached_property
    def affine(self) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """(pixel / 255 - mean) / std is pixel * scale + shift, both of shape (C, 1, 1)."""
        means, stds = torch.tensor(self.mean, dtype=torch.float64), torch.tensor(self.std, dtype=torch.float64)
        scale, shift = (1 / (255 * stds)).float(), (-means / stds).float()
        return scale.view(-1, 1, 1).numpy(), shift.view(-1, 1, 1).numpy()
