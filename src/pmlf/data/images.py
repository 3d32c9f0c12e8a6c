"""Image datasets as memory-mapped tensors: from this package, the hub, a copy of it, or a folder of your own."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, overload

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset, default_collate

from pmlf.data.cache import Arrays, cached
from pmlf.data.catalogue import DEFAULT, IMAGE_DATASETS, NAMES, TEXT_DATASETS, ImageSpec, suggestion
from pmlf.data.sources import ROWS_PER_READ, Source, hub_source

SPLITS = ("train", "test")
IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp")


class ImageItems(Sequence[tuple[Tensor, int]]):
    """A sequence of (image, label) items, stored as two stacked tensors. `collate` returns them without a copy."""

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        self.images = images  # float32 (N, C, H, W)
        self.labels = labels  # int64 (N,)

    def __len__(self) -> int:
        return len(self.labels)

    @overload
    def __getitem__(self, index: int) -> tuple[Tensor, int]: ...
    @overload
    def __getitem__(self, index: slice) -> ImageItems: ...
    def __getitem__(self, index: int | slice) -> tuple[Tensor, int] | ImageItems:
        if isinstance(index, slice):
            return ImageItems(self.images[index], self.labels[index])
        return self.images[index], int(self.labels[index])


class ImageDataset(Dataset[tuple[Tensor, int]]):
    """Images and labels in memory. An item is the normalised float32 image (C, H, W) and its label.

    `__getitems__` normalises many images at once; DataLoader and Subset call it automatically. With `collate` as the
    collate function, its result is the batch without another copy.

    Args:
        images: uint8 tensor (N, C, H, W).
        labels: int64 tensor (N,).
        mean: Mean per channel, for pixels in [0, 1]. Use a public constant.
        std: Standard deviation per channel, in the same way.
    """

    def __init__(self, images: Tensor, labels: Tensor, *, mean: Sequence[float], std: Sequence[float]) -> None:
        self.images = images  # uint8 (N, C, H, W)
        self.labels = labels  # int64 (N,)
        # (pixel / 255 - mean) / std is pixel * scale + shift
        means, stds = torch.tensor(mean, dtype=torch.float64), torch.tensor(std, dtype=torch.float64)
        self._scale = (1 / (255 * stds)).float().view(-1, 1, 1).numpy()  # (C, 1, 1)
        self._shift = (-means / stds).float().view(-1, 1, 1).numpy()  # (C, 1, 1)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self._normalised(self.images[index].numpy()), int(self.labels[index])

    def __getitems__(self, indices: Sequence[int] | NDArray[np.int64] | Tensor) -> ImageItems:
        chosen = torch.as_tensor(indices, dtype=torch.int64)  # (N,), also for N = 0
        return ImageItems(self._normalised(self.images.numpy()[chosen.numpy()]), self.labels[chosen])

    def _normalised(self, images: NDArray[np.uint8]) -> Tensor:
        # with NumPy: a few megabytes do not justify the overhead of torch's threads
        scaled = np.multiply(images, self._scale, dtype=np.float32)
        return torch.from_numpy(np.add(scaled, self._shift, out=scaled))


def collate(items: Sequence[tuple[Tensor, int]]) -> tuple[Tensor, Tensor]:
    """Make a batch of items: images float32 (N, C, H, W) and labels int64 (N,). ImageItems may be empty.

    >>> images = torch.zeros(5, 1, 28, 28, dtype=torch.uint8)
    >>> dataset = ImageDataset(images, torch.arange(5), mean=[0.5], std=[0.5])
    >>> [tuple(tensor.shape) for tensor in collate(dataset.__getitems__([3, 1]))]
    [(2, 1, 28, 28), (2,)]
    """
    if isinstance(items, ImageItems):
        return items.images, items.labels
    images, labels = default_collate(list(items))
    return images, labels


@dataclass(frozen=True, kw_only=True)
class ImageData:
    """The two splits of a dataset, and what a model for it needs to know."""

    name: str
    train: ImageDataset
    test: ImageDataset
    classes: int
    in_channels: int
    image_size: int
    mirrors: bool


def load(name: str = DEFAULT, data_dir: str | Path | None = None) -> ImageData:
    """Load an image dataset.

    Args:
        name: One of `IMAGE_DATASETS`; or the path of your own folder that holds `train` and `test`, each with one
            folder of images per class.
        data_dir: Folder with the layout of the Hugging Face hub, such as `data_dir/uoft-cs/cifar10`. None: the folder
            in the environment variable PMLF_DATA, else the hub.

    Raises:
        ValueError: If the dataset is unknown, cannot be reached or cannot be read.

    >>> data = load("fashion-mnist-small")
    >>> len(data.train), len(data.test), data.classes, data.in_channels, data.image_size
    (12000, 2000, 10, 1, 28)
    """
    if name in TEXT_DATASETS:
        raise ValueError(f"{name!r} is a text dataset: load it with pmlf.data.load_text")
    if name in IMAGE_DATASETS:
        spec = IMAGE_DATASETS[name]
        arrays = _asset(spec) if spec.asset else _from_hub(spec, data_dir)
    elif Path(name).is_dir():
        spec, arrays = _from_folder(Path(name))
    elif Path(name).is_file():
        raise ValueError(
            f"{name!r} is a file, not a folder of images: for a table of texts, give text_column and `labels`"
        )
    else:
        raise ValueError(
            f"unknown dataset {name!r}: give one of {', '.join(NAMES)}, a folder of images with train and test in it, "
            f"or a table of texts with text_column and `labels`.{suggestion(name)}"
        )
    train, test = (
        ImageDataset(torch.from_numpy(images), torch.from_numpy(labels), mean=spec.mean, std=spec.std)
        for images, labels in arrays
    )
    return ImageData(
        name=name,
        train=train,
        test=test,
        classes=spec.classes,
        in_channels=spec.in_channels,
        image_size=spec.image_size,
        mirrors=spec.mirrors,
    )


_Pair = tuple[NDArray[np.uint8], NDArray[np.int64]]  # images (N, C, H, W) and labels (N,)
_Encoded = Iterator[tuple[Sequence[bytes], NDArray[Any]]]  # encoded images and their labels


def _asset(spec: ImageSpec) -> Iterator[_Pair]:
    assert spec.asset is not None
    with resources.as_file(resources.files("pmlf") / "assets" / spec.asset) as path, np.load(path) as archive:
        for split in SPLITS:
            yield archive[f"{split}_images"], archive[f"{split}_labels"].astype(np.int64)


def _from_hub(spec: ImageSpec, data_dir: str | Path | None) -> list[_Pair]:
    source = hub_source(spec.hub_id, data_dir)

    def encoded(split: str) -> _Encoded:
        for table in source.tables(split, {spec.image_column: None, spec.label_column: None}):
            images = [row["bytes"] for row in table.column(spec.image_column).to_pylist()]
            yield images, table.column(spec.label_column).to_numpy()

    return [_decoded(spec, source, split, encoded) for split in SPLITS]


def _from_folder(folder: Path) -> tuple[ImageSpec, list[_Pair]]:
    """Your own images. The folders in `train` are the classes, and all images have the size of the first."""
    classes = sorted(path.name for path in (folder / "train").glob("*") if path.is_dir())
    files = {
        split: [path for path in sorted((folder / split).glob("*/*")) if path.suffix.lower() in IMAGE_SUFFIXES]
        for split in SPLITS
    }
    if not all(files.values()):
        raise ValueError(
            f"{str(folder)!r} is not a dataset of images: put {' and '.join(SPLITS)} into it, each with one folder of "
            f"{', '.join(IMAGE_SUFFIXES)} files per class; for texts, give text_column"
        )
    for path in (path for paths in files.values() for path in paths):
        if path.parent.name not in classes:
            raise ValueError(f"{str(path.parent)!r} is not a class: {str(folder / 'train')!r} has {', '.join(classes)}")
    source = Source(name=folder.name, files=files, advice="correct the file")
    spec = ImageSpec(
        hub_id=folder.name,
        classes=len(classes),
        in_channels=3,
        image_size=_decode(source, files["train"][0].read_bytes()).height,
        mean=(0.5, 0.5, 0.5),
        std=(0.5, 0.5, 0.5),
        mirrors=True,
    )

    def encoded(split: str) -> _Encoded:
        for start in range(0, len(files[split]), ROWS_PER_READ):
            part = files[split][start : start + ROWS_PER_READ]
            labels = [classes.index(path.parent.name) for path in part]
            yield [path.read_bytes() for path in part], np.array(labels, dtype=np.int64)

    def labelled(split: str) -> tuple[Any, ...]:
        return (classes, [path.parent.name for path in files[split]])  # not part of the files' contents

    return spec, [_decoded(spec, source, split, encoded, *labelled(split)) for split in SPLITS]


def _decoded(spec: ImageSpec, source: Source, split: str, encoded: Callable[[str], _Encoded], *also: Any) -> _Pair:
    """The images and labels of a split, from the cache or decoded into it. `also` is part of the cache key."""

    def make(arrays: Arrays) -> None:
        for images, labels in encoded(split):
            _check_labels(spec, source, labels)
            arrays.append("images", np.stack([_pixels(spec, source, image) for image in images]))
            arrays.append("labels", labels.astype(np.int64))

    arrays = cached(source.digest(split, "images", spec, *also), make)
    return arrays["images"], arrays["labels"]


def _pixels(spec: ImageSpec, source: Source, encoded: bytes) -> NDArray[np.uint8]:
    image = _decode(source, encoded)
    pixels = np.asarray(image.convert("L" if spec.in_channels == 1 else "RGB"))  # (H, W) or (H, W, 3)
    height, width = pixels.shape[:2]
    if height != spec.image_size or width != spec.image_size:
        raise ValueError(
            f"an image of {source.name!r} has size {height}x{width}, not {spec.image_size}x{spec.image_size}: "
            f"{source.advice}"
        )
    return pixels.reshape(height, width, spec.in_channels).transpose(2, 0, 1)  # (C, H, W)


def _decode(source: Source, encoded: bytes) -> Image.Image:
    try:
        with Image.open(io.BytesIO(encoded)) as image:
            image.load()
    except (OSError, SyntaxError) as error:  # Pillow raises SyntaxError for a broken PNG
        raise ValueError(f"an image of {source.name!r} cannot be decoded: {source.advice} ({error})") from error
    return image


def _check_labels(spec: ImageSpec, source: Source, labels: NDArray[Any]) -> None:
    in_range = (labels >= 0) & (labels < spec.classes)
    if not in_range.all():
        raise ValueError(
            f"{source.name!r} has a label that is not in 0 to {spec.classes - 1}: {source.advice}, or remove the rows "
            "without a label"
        )
