"""Which unit, such as a patient, each record of your own data belongs to: a column, or folders of images."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

from pmlf.data.images import METADATA, in_class_folders
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
    images = Path(path) / split
    if images.is_dir():
        found = _of_metadata(images / METADATA, column) if has_metadata(images) else _of_folders(images, column)
    else:
        source, found = own_source(Path(path), split), []
        for table in source.tables(split, {column: "`unit_column`"}):
            found += [as_text(value).strip() for value in table.column(column).to_pylist()]
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


def _of_metadata(metadata: Path, column: str) -> list[str]:
    """The column of the metadata.csv of a folder of images."""
    with metadata.open(newline="", encoding="utf-8-sig") as file:
        rows = csv.DictReader(file)
        there: Sequence[str] = rows.fieldnames or ()
        if column not in there:
            only = ", ".join(map(repr, there))
            raise ValueError(f"{str(metadata)!r} has no column {column!r}, only {only}: give one as `unit_column`")
        return [(row[column] or "").strip() for row in rows]
