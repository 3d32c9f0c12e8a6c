"""Image datasets as memory-mapped tensors: from this package, the hub, a copy of it, or a folder of your own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Any, overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset, default_collate

from pmlf.data.cache import Arrays, cached
from pmlf.data.catalogue import DEFAULT, IMAGE_DATASETS, NAMES, TEXT_DATASETS, ImageSpec, suggestion
from pmlf.data.pixels import IMAGE_SUFFIXES, ImageForm
from pmlf.data.sources import ROWS_PER_READ, Source, hub_source
from pmlf.data.targets import Classes, Target

SPLITS = ("train", "test")
OWN_SIZE = 32  # of your own images, unless another is given
METADATA = "metadata.csv"
CLASSES_FILE = "classes.txt"


class ImageItems(Sequence[tuple[Tensor, Tensor]]):
    """A sequence of (image, label) items, stored as two stacked tensors. `collate` returns them without a copy."""

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        self.images = images  # float32 (N, C, H, W)
        self.labels = labels  # int64 (N,)

    def __len__(self) -> int:
        return len(self.labels)

    @overload
    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]: ...
    @overload
    def __getitem__(self, index: slice) -> ImageItems: ...
    def __getitem__(self, index: int | slice) -> tuple[Tensor, Tensor] | ImageItems:
        if isinstance(index, slice):
            return ImageItems(self.images[index], self.labels[index])
        return self.images[index], self.labels[index]


class ImageDataset(Dataset[tuple[Tensor, Tensor]]):
    """Images and labels in memory. An item is the normalised float32 image (C, H, W) and its label.

    `__getitems__` normalises many images at once; DataLoader and Subset call it automatically. With `collate` as the
    collate function, its result is the batch without another copy.

    Args:
        images: uint8 tensor (N, C, H, W).
        labels: int64 tensor (N,) of classes; or float32 (N, labels) for several labels, (N,) for a number.
        mean: Mean per channel, for pixels in [0, 1]. Use a public constant.
        std: Standard deviation per channel, in the same way.
    """

    def __init__(self, images: Tensor, labels: Tensor, *, mean: Sequence[float], std: Sequence[float]) -> None:
        self.images = images  # uint8 (N, C, H, W)
        self.labels = labels  # int64 (N,), or float32
        self._form = ImageForm(channels=len(mean), size=images.shape[-1], mean=tuple(mean), std=tuple(std))

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self._form.normalised(self.images[index].numpy()), self.labels[index]

    def __getitems__(self, indices: Sequence[int] | NDArray[np.int64] | Tensor) -> ImageItems:
        chosen = torch.as_tensor(indices, dtype=torch.int64)  # (N,), also for N = 0
        return ImageItems(self._form.normalised(self.images.numpy()[chosen.numpy()]), self.labels[chosen])


def collate(items: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Make a batch of items: images float32 (N, C, H, W) and labels, int64 (N,) if classes. ImageItems may be empty.

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
    form: ImageForm
    target: Target
    mirrors: bool

    @property
    def classes(self) -> int:
        """The number of a model's outputs."""
        return self.target.width

    @property
    def in_channels(self) -> int:
        return self.form.channels

    @property
    def image_size(self) -> int:
        return self.form.size


def load(
    name: str = DEFAULT,
    data_dir: str | Path | None = None,
    *,
    form: ImageForm | None = None,
    target: Target | None = None,
    label_column: str | None = None,
) -> ImageData:
    """Load the training and the test split of an image dataset.

    Args:
        name: One of `IMAGE_DATASETS`; or the path of your own folder that holds `train` and `test`. Each has one folder
            of images per class, in which folders may hold the images of one unit each; or a file metadata.csv with
            the columns file_name and `label_column`.
        data_dir: Folder with the layout of the Hugging Face hub, such as `data_dir/uoft-cs/cifar10`. None: the folder
            in the environment variable PMLF_DATA, else the hub.
        form: Size and normalisation of the images, which are resized and cropped to it. None: the dataset's own; for
            your own images 32 x 32.
        target: What your own images are labelled with. Its names are declared, not collected from the folders.
        label_column: Column of metadata.csv that holds the labels of your own images. None: "label".

    Raises:
        ValueError: If the dataset is unknown, cannot be reached or cannot be read.

    >>> data = load("fashion-mnist-small")
    >>> len(data.train), len(data.test), data.classes, data.in_channels, data.image_size
    (12000, 2000, 10, 1, 28)
    """
    form, target, mirrors = described(name, form, target)
    train, test = (
        load_split(name, split, data_dir, form=form, target=target, label_column=label_column) for split in SPLITS
    )
    return ImageData(name=name, train=train, test=test, form=form, target=target, mirrors=mirrors)


def described(name: str, form: ImageForm | None, target: Target | None) -> tuple[ImageForm, Target, bool]:
    """Form, target and whether mirrored images keep their class: the catalogue's facts, or what you declare."""
    if name in TEXT_DATASETS:
        raise ValueError(f"{name!r} is a text dataset: load it with pmlf.data.load_text")
    if name in IMAGE_DATASETS:
        spec = IMAGE_DATASETS[name]
        if target is not None and target != spec.target:
            raise ValueError(f"the classes of {name!r} are fixed: give `labels` only for your own images")
        return form or spec.form, spec.target, spec.mirrors
    if Path(name).is_file():
        raise ValueError(
            f"{name!r} is a file, not a folder of images: for a table of texts, give text_column and `labels`; for "
            "other tables, give `columns` or `schema`"
        )
    if not Path(name).is_dir():
        raise ValueError(
            f"dataset {name!r} does not exist: give one of {', '.join(NAMES)}, a folder of images with train and test "
            f"in it, or a table with text_column, `columns` or `schema`.{suggestion(name)}"
        )
    if target is None:
        names = declared_classes(Path(name))
        if names is None:
            raise ValueError(
                f"your own images in {name!r} need `labels`: give all possible classes, or write them into "
                f"{CLASSES_FILE} in the folder, one a line. They are not collected from the records, which are private"
            )
        target = Classes(names=names)
    return form or ImageForm.plain(OWN_SIZE), target, True


def declared_classes(folder: Path) -> tuple[str, ...] | None:
    """The lines of classes.txt in a folder of images; None if there is no such file."""
    path = folder / CLASSES_FILE
    return tuple(line for line in path.read_text().splitlines() if line) if path.is_file() else None


def load_split(
    name: str,
    split: str,
    data_dir: str | Path | None = None,
    *,
    form: ImageForm,
    target: Target,
    label_column: str | None = None,
) -> ImageDataset:
    """One split of an image dataset, with the images resized to `form`. The arguments are those of `load`."""
    if name in IMAGE_DATASETS:
        spec = IMAGE_DATASETS[name]
        images, labels = _asset(spec, split, form) if spec.asset else _from_hub(spec, split, form, data_dir)
    else:
        images, labels = _from_folder(Path(name), split, form, target, label_column)
    return ImageDataset(torch.from_numpy(images), torch.from_numpy(labels), mean=form.mean, std=form.std)


_Pair = tuple[NDArray[np.uint8], NDArray[Any]]  # images (N, C, H, W) and encoded labels (N, ...)
_Encoded = Iterator[tuple[Sequence[bytes], Sequence[Any]]]  # encoded images and their labels as written


def _asset(spec: ImageSpec, split: str, form: ImageForm) -> _Pair:
    assert spec.asset is not None
    if split not in SPLITS:
        raise ValueError(f"{spec.asset!r} has no split {split!r}, only {' and '.join(SPLITS)}")
    images, labels = (array.copy() for array in _unpacked(spec.asset, split))  # what a caller writes stays its own
    if form.size == spec.image_size and form.channels == spec.in_channels:
        return images, labels
    return np.stack([form.pixels_of_array(image) for image in images]), labels


@lru_cache(maxsize=len(SPLITS))
def _unpacked(asset: str, split: str) -> _Pair:
    """The arrays of a packaged file: unpacking takes half a second, and commands that compare runs load them again."""
    with resources.as_file(resources.files("pmlf") / "assets" / asset) as path, np.load(path) as archive:
        return archive[f"{split}_images"], archive[f"{split}_labels"].astype(np.int64)


def _from_hub(spec: ImageSpec, split: str, form: ImageForm, data_dir: str | Path | None) -> _Pair:
    source = hub_source(spec.hub_id, data_dir)

    def encoded() -> _Encoded:
        for table in source.tables(split, {spec.image_column: None, spec.label_column: None}):
            yield [row["bytes"] for row in table[spec.image_column]], table[spec.label_column]

    return _decoded(source, split, form, spec.target, encoded, resize=form.size != spec.image_size)


def _from_folder(folder: Path, split: str, form: ImageForm, target: Target, label_column: str | None) -> _Pair:
    """Your own images: a folder for each class, or a metadata.csv that names the files and their labels."""
    listed = (folder / split / METADATA).is_file()
    files, values = _listed(folder / split, label_column) if listed else _by_folder(folder, split, target)
    source = Source(name=folder.name, files={split: files}, advice="correct the file")

    def encoded() -> _Encoded:
        for start in range(0, len(files), ROWS_PER_READ):
            part = slice(start, start + ROWS_PER_READ)
            yield [path.read_bytes() for path in files[part]], values[part]

    return _decoded(source, split, form, target, encoded, values, resize=True)


def in_class_folders(folder: Path) -> list[Path]:
    """The images in the folders of the classes, or deeper, as in CLASS/PATIENT/image.png.

    Raises:
        ValueError: If a folder in a folder of a class is a link, whose images would be left out.
    """
    found = list(folder.glob("*/**/*"))
    if any(path.is_symlink() and path.is_dir() for path in found):
        raise ValueError(
            f"{str(folder)!r} has a link to a folder in the folder of a class: put the folder itself there"
        )
    return sorted(path for path in found if path.suffix.lower() in IMAGE_SUFFIXES and path.is_file())


def _by_folder(folder: Path, split: str, target: Target) -> tuple[list[Path], list[Any]]:
    """The files in the folders of the classes, and their classes."""
    files = in_class_folders(folder / split)
    if not files:
        raise ValueError(
            f"{str(folder)!r} is not a dataset of images: put {' and '.join(SPLITS)} into it, each with one folder of "
            f"{', '.join(IMAGE_SUFFIXES)} files per class, or with a {METADATA}; for texts, give text_column"
        )
    if not isinstance(target, Classes):
        raise ValueError(
            f"{str(folder / split)!r} has a folder for each class, which cannot hold a {target.task} target: write "
            f"{METADATA} into it, with the columns file_name and label"
        )
    return files, [path.relative_to(folder / split).parts[0] for path in files]


def _listed(folder: Path, label_column: str | None) -> tuple[list[Path], list[Any]]:
    """The files and the labels of metadata.csv."""
    files: list[Path] = []
    labels: list[Any] = []
    label = label_column or "label"
    for rows in metadata(folder, {"file_name": None, label: "`label_column`"}):
        files += [folder / name for name in rows["file_name"]]
        labels += rows[label]
    if not all(path.is_file() for path in files):
        raise ValueError(f"{str(folder / METADATA)!r} names a file that does not exist in {str(folder)!r}: correct it")
    return files, labels


def metadata(folder: Path, columns: Mapping[str, str | None]) -> Iterator[dict[str, list[Any]]]:
    """Columns of the metadata.csv of a split, each with the option that names it, some rows at a time."""
    path = folder / METADATA
    return Source(name=str(path), files={folder.name: [path]}, advice="correct the file").tables(folder.name, columns)


def _decoded(
    source: Source,
    split: str,
    form: ImageForm,
    target: Target,
    encoded: Callable[[], _Encoded],
    *also: Any,
    resize: bool,
) -> _Pair:
    """The images and labels of a split, from the cache or decoded into it. `also` is part of the cache key."""

    def make(arrays: Arrays) -> None:
        for images, values in encoded():
            arrays.append("labels", target.encode(values, source.name, source.label_advice))
            pixels = [form.pixels(image, source.name, source.advice, resize=resize) for image in images]
            arrays.append("images", np.stack(pixels))

    arrays = cached(source.digest(split, "pixels", form, target, resize, *also), make)
    return arrays["images"], arrays["labels"]
