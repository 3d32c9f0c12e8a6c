"""The column that says which unit, such as a patient, each record of your own data belongs to."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

from pmlf.data.images import METADATA
from pmlf.data.sources import own_source
from pmlf.data.targets import as_text


def unit_column(path: str | Path, column: str, *, split: str = "train") -> list[str]:
    """The unit of each record of a split, in the order in which the split is loaded.

    Args:
        path: Your own table, a folder with one table per split, or a folder of images whose splits have a metadata.csv.
        column: The column of the ids. Numbers and texts are both read as texts, without spaces around them.
        split: Name of the split.

    Raises:
        ValueError: If the data or the column is missing, or a record has no id. The message shows no id.
    """
    found = _of_images(Path(path) / split / METADATA, column)
    if found is None:
        source, found = own_source(Path(path), split), []
        for table in source.tables(split, {column: "`unit_column`"}):
            found += [as_text(value).strip() for value in table.column(column).to_pylist()]
    if not all(found):
        raise ValueError(
            f"a record of {Path(path).name!r} has no {column!r}: a record of nobody cannot be protected with its unit, "
            "so give it an id of its own or remove it"
        )
    return found


def _of_images(metadata: Path, column: str) -> list[str] | None:
    """The column of the metadata.csv of a folder of images; None if there is no such file."""
    if not metadata.is_file():
        if metadata.parent.is_dir():
            raise ValueError(
                f"{str(metadata.parent)!r} has no {METADATA}, to tell whose an image is: write one with the columns "
                f"file_name, label and {column}"
            )
        return None
    with metadata.open(newline="", encoding="utf-8-sig") as file:
        rows = csv.DictReader(file)
        there: Sequence[str] = rows.fieldnames or ()
        if column not in there:
            only = ", ".join(map(repr, there))
            raise ValueError(f"{str(metadata)!r} has no column {column!r}, only {only}: give one as `unit_column`")
        return [(row[column] or "").strip() for row in rows]
