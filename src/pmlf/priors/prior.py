"""A prior: a map from an image to a vector, made from synthetic images alone.

A record's features depend on that record and on public randomness, so computing them spends no privacy: the first
private query is the first one that sums over records.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from pmlf.basics.arguments import require_count
from pmlf.data.cache import Arrays, cached, digest
from pmlf.priors.colours import ColourSpec, ColourTable
from pmlf.priors.patches import PatchSpec, PatchTable
from pmlf.priors.scattering import ScatteringSpec, ScatteringTable
from pmlf.priors.synthetic import LARGEST_SIDE, SMALLEST_SIDE, synthetic_images
from pmlf.priors.whitening import Whitening

VERSION = 2  # part of every cache key: increase it if the same spec gives other features
LARGEST_WORKING_SIDE = 64  # larger images are shrunk to it first

BlockSpec = PatchSpec | ColourSpec | ScatteringSpec
BlockTable = PatchTable | ColourTable | ScatteringTable
_TABLES: Mapping[type[BlockSpec], type[BlockTable]] = {
    PatchSpec: PatchTable,
    ColourSpec: ColourTable,
    ScatteringSpec: ScatteringTable,
}

COLOUR_BLOCKS: tuple[BlockSpec, ...] = (
    PatchSpec(name="patches", weight=0.34, filters=256),
    PatchSpec(name="half-size patches", weight=0.13, shrink=2, filters=128, grid=2),
    ColourSpec(name="colours", weight=0.13),
    ScatteringSpec(name="scattering", weight=0.40),
)
GREY_BLOCKS: tuple[BlockSpec, ...] = (
    PatchSpec(name="patches", weight=0.75, filters=256),
    PatchSpec(name="half-size patches", weight=0.25, shrink=2, side=5, filters=128, grid=2),
)
DRAWN_BLOCKS: tuple[BlockSpec, ...] = (ScatteringSpec(name="scattering", weight=1.0),)  # digits and other strokes


@dataclass(frozen=True, kw_only=True)
class PriorSpec:
    """What a prior is made from. Equal specs make equal priors.

    Attributes:
        image_size: Height and width of the records, 28 to 224.
        channels: 3 for colour, 1 for grey.
        mirrors: Whether a mirrored image keeps its class. Features are then the same for an image and its mirror.
        seed: The seed of everything random: synthetic images and dictionaries.
        images: The number of synthetic images.
        blocks: The kinds of features; None takes the standard ones: patches, colours and scattering for colour images,
            patches for grey images with mirrors, scattering for grey images without, such as digits.
    """

    image_size: int
    channels: int = 3
    mirrors: bool = True
    seed: int = 0
    images: int = 4000
    blocks: tuple[BlockSpec, ...] | None = None

    def __post_init__(self) -> None:
        require_count("image_size", self.image_size, "it is a side in pixels", least=SMALLEST_SIDE, most=LARGEST_SIDE)
        require_count("images", self.images, "it is a number of synthetic images", least=10)
        if self.channels not in (1, 3):
            raise ValueError(f"channels is {self.channels!r}: give 3 for colour or 1 for grey")

    @property
    def working_side(self) -> int:
        """The side at which images are looked at."""
        return min(self.image_size, LARGEST_WORKING_SIDE)

    @property
    def all_blocks(self) -> tuple[BlockSpec, ...]:
        """The blocks, with the standard ones filled in."""
        if self.blocks:
            return self.blocks
        if self.channels == 3:
            return COLOUR_BLOCKS
        return GREY_BLOCKS if self.mirrors else DRAWN_BLOCKS

    def digest(self) -> str:
        """A digest of the spec and of the version of the code that reads it."""
        blocks = [(type(block).__name__, asdict(block)) for block in self.all_blocks]
        return digest(
            [], "prior", VERSION, self.image_size, self.channels, self.mirrors, self.seed, self.images, blocks
        )


@dataclass(frozen=True, kw_only=True)
class PriorBlock:
    """A range of columns. In each block a record is a vector of norm at most 1.

    Attributes:
        name: The block's name.
        columns: Its columns in the features.
        eigenvalues: The synthetic variance of each column before whitening, positive and public.
        weight: The part of a record's squared norm that the block should have.
    """

    name: str
    columns: slice
    eigenvalues: NDArray[np.float32]
    weight: float


class ImagePrior:
    """Features of images: whitened patch responses, colour histograms and scattering, in blocks of unit vectors.

    >>> prior = ImagePrior.make(PriorSpec(image_size=28, channels=1, images=20, blocks=(
    ...     PatchSpec(name="patches", weight=1.0, filters=4, grid=2),)))
    >>> features = prior(np.zeros((3, 1, 28, 28), np.uint8))
    >>> features.shape, features.dtype
    ((3, 32), dtype('float16'))
    """

    def __init__(self, spec: PriorSpec, tables: list[BlockTable], whitenings: list[Whitening]) -> None:
        self.spec = spec
        self._tables = tables
        self._whitenings = whitenings

    @classmethod
    def make(cls, spec: PriorSpec) -> Self:
        """Draw synthetic images, then a dictionary and its statistics for each block. Takes about a minute."""
        generator = torch.Generator().manual_seed(spec.seed)
        images = synthetic_images(spec.images, side=spec.working_side, channels=spec.channels, seed=spec.seed)
        tables: list[BlockTable] = []
        whitenings = []
        with torch.inference_mode():
            for block in spec.all_blocks:
                kind: Any = _TABLES[type(block)]
                table: BlockTable = kind.make(block, images, mirrors=spec.mirrors, generator=generator)
                tables.append(table)
                whitenings.append(Whitening.fit(torch.stack([table(image) for image in images])))
        return cls(spec, tables, whitenings)

    @classmethod
    def load(cls, spec: PriorSpec) -> Self:
        """Make the prior, or read it from the cache."""

        def write(arrays: Arrays) -> None:
            for name, tensor in cls.make(spec).tensors().items():
                arrays.append(name, tensor.numpy()[None])

        return cls.from_tensors(
            spec, {name: torch.from_numpy(rows[0]) for name, rows in cached(spec.digest(), write).items()}
        )

    @property
    def blocks(self) -> tuple[PriorBlock, ...]:
        """The blocks, in the order of their columns."""
        found, start = [], 0
        for block, whitening in zip(self.spec.all_blocks, self._whitenings, strict=True):
            values = whitening.eigenvalues.flatten().numpy()
            columns = slice(start, start + len(values))
            found.append(PriorBlock(name=block.name, columns=columns, eigenvalues=values, weight=block.weight))
            start = columns.stop
        return tuple(found)

    @property
    def dimensions(self) -> int:
        """The number of columns of the features."""
        return self.blocks[-1].columns.stop

    def __call__(self, images: NDArray[np.uint8]) -> NDArray[np.float16]:
        """The features of images (N, C, H, W), as (N, dimensions).

        Each image is processed by itself, so its features are the same alone and in any batch, bit for bit.

        Raises:
            ValueError: If the images are not of the size and type that the prior is made for.
        """
        side, channels = self.spec.image_size, self.spec.channels
        if images.ndim != 4 or images.shape[1:] != (channels, side, side) or images.dtype != np.uint8:
            raise ValueError(
                f"images are {images.dtype} of shape {images.shape}: give uint8 of shape "
                f"(N, {channels}, {side}, {side}), or make a prior for another image_size and channels"
            )
        features = np.empty((len(images), self.dimensions), np.float16)
        with torch.inference_mode():
            for image, row in zip(images, features, strict=True):
                row[:] = self._features(torch.from_numpy(image.astype(np.float32))).half().numpy()
        return features

    def _features(self, image: Tensor) -> Tensor:
        if self.spec.working_side < self.spec.image_size:
            side = self.spec.working_side
            image = F.interpolate(image[None], size=(side, side), mode="bilinear", antialias=True)[0]
        parts = [whiten(table(image)) for table, whiten in zip(self._tables, self._whitenings, strict=True)]
        return torch.cat(parts)

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor of the prior, by block and name."""
        return {
            f"{index}.{part}.{field.name}": getattr(each, field.name)
            for index, block in enumerate(zip(self._tables, self._whitenings, strict=True))
            for part, each in zip(("table", "whitening"), block, strict=True)
            for field in fields(each)
            if isinstance(getattr(each, field.name), Tensor)
        }

    @classmethod
    def from_tensors(cls, spec: PriorSpec, state: Mapping[str, Tensor]) -> Self:
        """The prior that `tensors` was called on. It keeps the tensors that are given."""
        tables: list[BlockTable] = []
        whitenings = []
        for index, block in enumerate(spec.all_blocks):
            parts: dict[str, dict[str, Any]] = {"table": {}, "whitening": {}}
            for name, tensor in state.items():
                number, part, field = name.split(".")
                if int(number) == index:
                    parts[part][field] = tensor
            kind: Any = _TABLES[type(block)]
            tables.append(kind(spec=block, mirrors=spec.mirrors, **parts["table"]))
            whitenings.append(Whitening(**parts["whitening"]))
        return cls(spec, tables, whitenings)
