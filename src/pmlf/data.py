"""Image datasets by name, as tensors in memory: one inside the package, others from the hub or a copy."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any, overload

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset, default_collate

DEFAULT = "fashion-mnist-small"
SPLITS = ("train", "test")
DATA_DIR_VARIABLE = "PMLF_DATA"
HUB_TIMEOUT_SECONDS = 5.0
ROWS_PER_READ = 1000


@dataclass(frozen=True, kw_only=True)
class ImageSpec:
    """What is publicly known of an image dataset.

    `mean` and `std` are constants from the literature, one a channel, for pixels scaled to [0, 1]: statistics
    of the records at hand would be a release that no accountant sees.
    """

    hub_id: str
    asset: str | None = None  # a file of this package, read in place of the hub
    image_column: str = "image"
    label_column: str = "label"
    classes: int = 10
    in_channels: int
    image_size: int
    mean: tuple[float, ...]
    std: tuple[float, ...]


_MNIST = ImageSpec(hub_id="ylecun/mnist", in_channels=1, image_size=28, mean=(0.1307,), std=(0.3081,))
_FASHION_MNIST = replace(_MNIST, hub_id="zalando-datasets/fashion_mnist", mean=(0.2860,), std=(0.3530,))
_CIFAR10 = ImageSpec(
    hub_id="uoft-cs/cifar10",
    image_column="img",
    in_channels=3,
    image_size=32,
    mean=(0.4914, 0.4822, 0.4465),
    std=(0.2470, 0.2435, 0.2616),
)
_CIFAR100 = replace(
    _CIFAR10,
    hub_id="uoft-cs/cifar100",
    label_column="fine_label",
    classes=100,
    mean=(0.5071, 0.4865, 0.4409),
    std=(0.2673, 0.2564, 0.2762),
)
IMAGE_DATASETS = {
    "fashion-mnist-small": replace(_FASHION_MNIST, asset="fashion_mnist_small.npz"),
    "mnist": _MNIST,
    "fashion-mnist": _FASHION_MNIST,
    "cifar10": _CIFAR10,
    "cifar100": _CIFAR100,
}
NAMES = tuple(IMAGE_DATASETS)


class ImageItems(Sequence[tuple[Tensor, int]]):
    """Items fetched together: a sequence of (image, label), as collate functions expect, already stacked."""

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
    """Images and labels in memory; an item is the normalised float32 image (C, H, W) and its label.

    `__getitems__` normalises all the images asked for at once; DataLoader and Subset call it by themselves.
    Give `collate` to whatever draws the indices, and the result becomes the batch without another copy.
    """

    def __init__(self, images: Tensor, labels: Tensor, *, mean: Sequence[float], std: Sequence[float]) -> None:
        self.images = images  # uint8 (N, C, H, W)
        self.labels = labels  # int64 (N,)
        # (pixel / 255 - mean) / std as one multiplication and one addition
        means, stds = torch.tensor(mean, dtype=torch.float64), torch.tensor(std, dtype=torch.float64)
        self._scale = (1 / (255 * stds)).float().view(-1, 1, 1)  # (C, 1, 1)
        self._shift = (-means / stds).float().view(-1, 1, 1)  # (C, 1, 1)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self._normalised(self.images[index]), int(self.labels[index])

    def __getitems__(self, indices: Sequence[int] | NDArray[np.int64] | Tensor) -> ImageItems:
        chosen = torch.as_tensor(indices, dtype=torch.int64)  # (N,), also where N = 0
        return ImageItems(self._normalised(self.images[chosen]), self.labels[chosen])

    def _normalised(self, images: Tensor) -> Tensor:
        return images.float().mul_(self._scale).add_(self._shift)


def collate(items: Sequence[tuple[Tensor, int]]) -> tuple[Tensor, Tensor]:
    """Items to a batch: images float32 (N, C, H, W) and labels int64 (N,); N = 0 is fine for ImageItems.

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
    """A dataset's two splits, and the shape that a model for it needs."""

    name: str
    train: ImageDataset
    test: ImageDataset
    classes: int
    in_channels: int
    image_size: int


def load(name: str = DEFAULT, data_dir: str | Path | None = None) -> ImageData:
    """A dataset by name: the package's own, or one read from `data_dir`, from PMLF_DATA or from the hub.

    The folder is laid out as the hub lays its datasets out, for example `data_dir/uoft-cs/cifar10`.

    >>> data = load("fashion-mnist-small")
    >>> len(data.train), len(data.test), data.classes, data.in_channels, data.image_size
    (12000, 2000, 10, 1, 28)
    """
    if name not in IMAGE_DATASETS:
        raise ValueError(f"unknown dataset {name!r}: choose one of {', '.join(NAMES)}")
    spec = IMAGE_DATASETS[name]
    if spec.asset:
        train, test = (_read_asset(spec, split) for split in SPLITS)
    else:
        rows = open_splits(spec.hub_id, data_dir)
        train, test = (_decode(spec, rows, split) for split in SPLITS)
    return ImageData(
        name=name,
        train=train,
        test=test,
        classes=spec.classes,
        in_channels=spec.in_channels,
        image_size=spec.image_size,
    )


def open_splits(hub_id: str, data_dir: str | Path | None = None) -> Mapping[str, Any]:
    """A hub dataset's splits, undecoded: from `data_dir` or PMLF_DATA if given, otherwise from the hub."""
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise ValueError(
            f"reading {hub_id!r} needs the package datasets: pip install 'dp-pmlf[data]', "
            f"or choose {DEFAULT!r}, which needs nothing"
        ) from error
    root = data_dir or os.environ.get(DATA_DIR_VARIABLE)
    if not root:
        return _open_on_hub(hub_id, load_dataset)
    folder = Path(root) / hub_id
    if not any(folder.glob("**/*.parquet")):
        raise ValueError(
            f"data folder {str(root)!r} has no parquet file under {hub_id}: put the hub's files there, "
            f"or give neither data_dir nor {DATA_DIR_VARIABLE} to have them downloaded"
        )
    try:
        return load_dataset(str(folder), streaming=True)  # read in place: no second copy in the hub's cache
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{str(folder)!r} cannot be read as a dataset: fetch the hub's files again ({error})"
        ) from error


def _open_on_hub(hub_id: str, load_dataset: Callable[[str], Mapping[str, Any]]) -> Mapping[str, Any]:
    from huggingface_hub import HfApi, is_offline_mode

    try:
        if not is_offline_mode():  # offline, load_dataset fails at once, or finds an earlier download
            # by itself load_dataset would try again for half a minute before it gives up
            HfApi().dataset_info(hub_id, timeout=HUB_TIMEOUT_SECONDS)
        return load_dataset(hub_id)
    except Exception as error:  # whose class depends on the HTTP library below the hub's client
        raise ValueError(
            f"cannot reach {hub_id!r} on the Hugging Face hub ({type(error).__name__}): give data_dir or "
            f"{DATA_DIR_VARIABLE}, a folder that holds {hub_id}, set HF_HUB_OFFLINE=1 to use an earlier "
            f"download, or choose {DEFAULT!r}, which needs no network"
        ) from error


def _read_asset(spec: ImageSpec, split: str) -> ImageDataset:
    assert spec.asset is not None
    with resources.as_file(resources.files("pmlf") / "assets" / spec.asset) as path, np.load(path) as archive:
        images, labels = archive[f"{split}_images"], archive[f"{split}_labels"]
    return _dataset(spec, images, labels)


def _decode(spec: ImageSpec, rows: Mapping[str, Any], split: str) -> ImageDataset:
    """One split's encoded images and labels, read as Arrow tables and decoded by Pillow."""
    if split not in rows:
        raise ValueError(f"{spec.hub_id!r} has splits {sorted(rows)} but no {split!r}: fetch the hub's files again")
    images: list[NDArray[np.uint8]] = []
    labels: list[NDArray[np.int64]] = []
    for table in _tables(spec, rows[split]):
        for column in (spec.image_column, spec.label_column):
            if column not in table.column_names:
                raise ValueError(
                    f"{spec.hub_id!r} has columns {table.column_names} but no {column!r}: fetch the hub's files again"
                )
        images += [_decode_image(spec, row["bytes"]) for row in table.column(spec.image_column).to_pylist()]
        labels.append(table.column(spec.label_column).to_numpy())
    return _dataset(spec, np.stack(images), np.concatenate(labels))


def _tables(spec: ImageSpec, rows: Any) -> Iterator[Any]:
    try:
        yield from rows.with_format("arrow").iter(batch_size=ROWS_PER_READ)  # Arrow leaves images encoded
    except (OSError, ValueError) as error:
        raise ValueError(f"a file of {spec.hub_id!r} cannot be read: fetch the hub's files again ({error})") from error


def _decode_image(spec: ImageSpec, encoded: bytes) -> NDArray[np.uint8]:
    try:
        with Image.open(io.BytesIO(encoded)) as image:
            pixels = np.asarray(image.convert("L" if spec.in_channels == 1 else "RGB"))  # (H, W) or (H, W, 3)
    except OSError as error:
        raise ValueError(
            f"an image of {spec.hub_id!r} cannot be decoded: fetch the hub's files again ({error})"
        ) from error
    height, width = pixels.shape[:2]
    if height != spec.image_size or width != spec.image_size:
        raise ValueError(
            f"an image of {spec.hub_id!r} is {height}x{width} where {spec.image_size}x{spec.image_size} "
            "is expected: fetch the hub's files again"
        )
    return pixels.reshape(height, width, spec.in_channels).transpose(2, 0, 1)  # (C, H, W)


def _dataset(spec: ImageSpec, images: NDArray[np.uint8], labels: NDArray[Any]) -> ImageDataset:
    in_range = (labels >= 0) & (labels < spec.classes)
    if not in_range.all():
        raise ValueError(
            f"{spec.hub_id!r} has label {labels[~in_range][0]} where 0 to {spec.classes - 1} are allowed: "
            "fetch the hub's files again, or drop the rows without a label"
        )
    return ImageDataset(
        torch.from_numpy(np.ascontiguousarray(images)),
        torch.from_numpy(labels.astype(np.int64)),
        mean=spec.mean,
        std=spec.std,
    )
