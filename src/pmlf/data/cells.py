"""Rows of text files (.csv, .tsv, .jsonl, .json), in which each cell is read by itself.

Common readers infer the type of a column from all of its cells: "007" is the number 7 until one record has letters
there. One record would then change how all others are read, and no clip norm bounds that. Two writings of an id, in two
parts of a file, would become two people.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

_LONGEST_CELL = 1 << 30  # characters; the csv module's own limit is 131,072, which long texts exceed


class Refused(Exception):
    """The file is readable but does not hold what is needed. The message may be shown."""


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Some rows of a table.

    Attributes:
        names: The names of all columns.
        count: The number of rows.
        column: From the name of a column to its cells.
    """

    names: Sequence[str]
    count: int
    column: Callable[[str], list[Any]]


def _from_csv(file: Path, most: int, *, separator: str) -> Iterator[Rows]:
    """Rows whose cells are texts; an empty cell is an empty text."""
    csv.field_size_limit(_LONGEST_CELL)
    with file.open(newline="", encoding="utf-8-sig") as opened:
        lines = (line for line in csv.reader(opened, delimiter=separator, strict=True) if line)
        header = next(lines, [])
        named = [name for name in header if name]
        if len(set(named)) < len(named):
            raise Refused(f"{file.name!r} has two columns of one name: rename one")
        places = {name: place for place, name in enumerate(header)}
        while rows := list(islice(lines, most)):
            if any(len(row) != len(header) for row in rows):
                raise Refused(f"a row of {file.name!r} has another number of cells than its header: correct the file")
            yield Rows(names=header, count=len(rows), column=partial(_listed_cells, rows, places))


def _from_json(file: Path, most: int) -> Iterator[Rows]:
    """Rows of one object a line, or of one list of objects. A name that an object lacks is a missing cell."""
    names: dict[str, None] = {}  # in the order in which they come
    with file.open(encoding="utf-8-sig") as opened:
        objects = iter(json.load(opened)) if _is_a_list(file) else (json.loads(line) for line in opened if line.strip())
        while rows := list(islice(objects, most)):
            if not all(isinstance(row, dict) for row in rows):
                raise Refused(f"{file.name!r} holds something else than objects: write one object a line")
            names |= {name: None for row in rows for name in row}
            yield Rows(names=list(names), count=len(rows), column=partial(_named_cells, rows))


def _is_a_list(file: Path) -> bool:
    with file.open(encoding="utf-8-sig") as opened:
        return next((line for line in opened if line.strip()), "").lstrip().startswith("[")


def _listed_cells(rows: Sequence[Sequence[str]], places: Mapping[str, int], name: str) -> list[Any]:
    return [row[places[name]] for row in rows]


def _named_cells(rows: Sequence[Mapping[str, Any]], name: str) -> list[Any]:
    return [row.get(name) for row in rows]


READERS: dict[str, Callable[[Path, int], Iterator[Rows]]] = {
    ".csv": partial(_from_csv, separator=","),
    ".tsv": partial(_from_csv, separator="\t"),
    ".jsonl": _from_json,
    ".json": _from_json,
}
