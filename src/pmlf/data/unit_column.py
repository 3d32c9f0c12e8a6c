"""Which unit, such as a patient, each record of your own data belongs to: a column, or folders of images."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pmlf.data.images import METADATA, in_class_folders, metadata
from pmlf.data.sources import own_source
from pmlf.data.targets import as_text


def unit_column(path: str | Path, column: str, *, split: str = "train") -> list[str]:
    """The unit of each record of a split, in the order in which the split is loaded.

    Args:
        path: Your own table, a folder with one table per split, or a folder of images. The splits of images have a
            metadata.csv, or one folder per unit in the folders of the classes, as in CLASS/PATIENT/image.png. Folders
            of one name are one unit, also in several classes.
        column: The column of the ids. Numbers and texts are both read as texts, without spaces around them. For folders
            of images it is what a unit is called, such as "patient".
        split: Name of the split.

    Raises:
        ValueError: If the data or the column is missing, or a record has no id. The message shows no id.
    """
    images, named = Path(path) / split, {column: "`unit_column`"}
    if images.is_dir():
        found = _of_tables(metadata(images, named), column) if has_metadata(images) else _of_folders(images, column)
    else:
        found = _of_tables(own_source(Path(path), split).tables(split, named), column)
    if not all(found):
        raise ValueError(
            f"a record of {Path(path).name!r} has no {column!r}: a record of nobody cannot be protected with its unit, "
            "so give it an id of its own or remove it"
        )
    return found


def has_metadata(folder: Path) -> bool:
    """Whether a metadata.csv lists the images of a folder."""
    return (folder / METADATA).is_file()


def refuse_unit_folders(path: str | Path, *, split: str = "train") -> None:
    """Raise ValueError if the folders of the classes hold folders of images, and nobody has said what those are."""
    images = Path(path) / split
    if images.is_dir() and not has_metadata(images) and any(_names(images)):
        raise ValueError(
            f"the classes of {Path(path).name!r} have folders of images in them: give `unit_column`, such as patient, "
            "if each is one patient, to protect patients; to protect images, move them into the folders of the classes"
        )


def _names(images: Path) -> list[str]:
    """The name of the first folder between the class and each image; empty if there is none."""
    inner = (path.relative_to(images).parts[1:-1] for path in in_class_folders(images))
    return [folders[0].strip() if folders else "" for folders in inner]


def _of_folders(images: Path, column: str) -> list[str]:
    """The unit of each image by its folder."""
    found = _names(images)
    if not (found and all(found)):
        raise ValueError(
            f"{str(images)!r} does not tell whose each image is: put the images of each {column} into a folder of its "
            f"own, as in CLASS/{column.upper()}/image.png, or write {METADATA} with the columns file_name, label and "
            f"{column}"
        )
    return found


def _of_tables(tables: Iterator[Mapping[str, list[Any]]], column: str) -> list[str]:
    """The ids in a column."""
    return [as_text(value).strip() for table in tables for value in table[column]]
