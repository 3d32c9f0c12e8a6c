"""Tables of numbers and categories, encoded by a declared schema: nothing is computed from the records."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from pmlf.data.cache import Arrays, cached
from pmlf.data.sources import READING, own_source
from pmlf.data.targets import Target, as_number, place_of

_EXAMPLE = "age=0:110 or sex=female,male"


@dataclass(frozen=True, kw_only=True)
class NumberColumn:
    """A column of numbers in a declared range.

    Its two features are the value, clamped and scaled to -1 to 1, and 1 if it is missing. A missing value is scaled 0.
    """

    name: str
    low: float
    high: float

    def __post_init__(self) -> None:
        if not -np.inf < self.low < self.high < np.inf:
            raise ValueError(
                f"column {self.name!r} has the range {self.low} to {self.high}: give a lower, then a higher"
            )

    @property
    def features(self) -> tuple[str, ...]:
        """The names of the features."""
        return (self.name, f"{self.name} is missing")

    def encode(self, values: Sequence[object]) -> NDArray[np.float32]:
        """The features (N, 2) of a column."""
        numbers = np.array([as_number(value) for value in values], dtype=np.float64)
        missing = np.isnan(numbers)
        middle, half = (self.low + self.high) / 2, (self.high - self.low) / 2
        scaled = np.where(missing, 0.0, (np.nan_to_num(numbers).clip(self.low, self.high) - middle) / half)
        return np.stack([scaled, missing], axis=1).astype(np.float32)


@dataclass(frozen=True, kw_only=True)
class CategoryColumn:
    """A column of declared categories: one feature each, and one for every other value and for a missing one."""

    name: str
    categories: tuple[str, ...]

    def __post_init__(self) -> None:
        if not self.categories or len(set(self.categories)) < len(self.categories):
            raise ValueError(f"column {self.name!r} has no list of different categories: give each category once")

    @property
    def features(self) -> tuple[str, ...]:
        """The names of the features."""
        return (*(f"{self.name} is {category}" for category in self.categories), f"{self.name} is another")

    def encode(self, values: Sequence[object]) -> NDArray[np.float32]:
        """The features (N, categories + 1) of a column."""
        places = {category: index for index, category in enumerate(self.categories)}
        chosen = [place_of(value, places, len(places)) for value in values]
        return np.eye(len(places) + 1, dtype=np.float32)[chosen]


@dataclass(frozen=True, kw_only=True)
class Schema:
    """The columns of a table that a model takes, in the order of its inputs.

    Ranges and categories are declared by you. Computed from the records, they would be an unaccounted release.

    >>> schema = Schema.parsed(["age=0:100", "sex=female,male"])
    >>> schema.features
    ('age', 'age is missing', 'sex is female', 'sex is male', 'sex is another')
    >>> schema.encode({"age": [50, None], "sex": ["male", "unknown"]}).tolist()
    [[0.0, 0.0, 0.0, 1.0, 0.0], [0.0, 1.0, 0.0, 0.0, 1.0]]
    """

    columns: tuple[NumberColumn | CategoryColumn, ...]

    def __post_init__(self) -> None:
        names = [column.name for column in self.columns]
        if not names or len(set(names)) < len(names):
            raise ValueError(f"columns={', '.join(names)!r} is not a list of different columns: declare each once")

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the columns."""
        return tuple(column.name for column in self.columns)

    @property
    def features(self) -> tuple[str, ...]:
        """The names of the model's inputs."""
        return tuple(feature for column in self.columns for feature in column.features)

    def encode(self, table: Mapping[str, Sequence[object]]) -> NDArray[np.float32]:
        """The features (N, width) of a table, given by column."""
        return np.concatenate([column.encode(table[column.name]) for column in self.columns], axis=1)

    def to_json(self) -> dict[str, list[Any]]:
        """Each column with its range or its categories: the content of a schema file."""
        return {
            column.name: [column.low, column.high] if isinstance(column, NumberColumn) else list(column.categories)
            for column in self.columns
        }

    @staticmethod
    def from_json(document: Mapping[str, Any]) -> Schema:
        """The schema of a mapping from columns to [low, high] or to a list of categories.

        Raises:
            ValueError: If a column has neither.
        """
        return Schema(columns=tuple(_column(name, value) for name, value in document.items()))

    @staticmethod
    def parsed(texts: Sequence[str]) -> Schema:
        """The schema of texts such as "age=0:110" (a range) and "sex=female,male" (categories).

        Raises:
            ValueError: If a text has another form.
        """
        document: dict[str, Any] = {}
        for text in texts:
            name, equals, declared = text.partition("=")
            if not (name and equals and declared):
                raise ValueError(f"columns={text!r} declares nothing: write a range or categories, as in {_EXAMPLE}")
            if name in document:
                raise ValueError(f"columns={name!r} is declared twice: declare each column once")
            ends = [as_number(end) for end in declared.split(":")]
            is_range = len(ends) == 2 and not np.isnan(ends).any()
            document[name] = ends if is_range else declared.split(",")
        return Schema.from_json(document)

    @staticmethod
    def read(path: Path) -> Schema:
        """The schema in the table `[columns]` of a TOML file: `age = [0, 110]`, `sex = ["female", "male"]`.

        Raises:
            ValueError: If the file is missing or has another form.
        """
        if not path.is_file():
            raise ValueError(f"schema={str(path)!r} does not exist: give the path of a .toml file")
        try:
            columns = tomllib.loads(path.read_text(encoding="utf-8"))["columns"]
            return Schema.from_json(columns)
        except (tomllib.TOMLDecodeError, KeyError, AttributeError) as error:
            raise ValueError(
                f"schema={str(path)!r} is not a schema: write [columns] and below it lines such as age = [0, 110] and "
                'sex = ["female", "male"]'
            ) from error


def _column(name: str, declared: Any) -> NumberColumn | CategoryColumn:
    if isinstance(declared, list) and all(isinstance(value, str) for value in declared):
        return CategoryColumn(name=name, categories=tuple(declared))
    if isinstance(declared, list) and len(declared) == 2 and not np.isnan([as_number(end) for end in declared]).any():
        return NumberColumn(name=name, low=float(declared[0]), high=float(declared[1]))
    raise ValueError(f"column {name!r} has neither a range nor categories: declare it as in {_EXAMPLE}")


class TableDataset(Dataset[tuple[Tensor, Tensor]]):
    """Encoded rows of a table. An item is the features (width,) and the label."""

    def __init__(self, features: Tensor, labels: Tensor) -> None:
        self.features = features  # float32 (N, width)
        self.labels = labels  # int64 (N,), or float32 (N, ...)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.features[index], self.labels[index]

    @staticmethod
    def from_frame(frame: Any, *, schema: Schema, target: Target, label_column: str = "label") -> TableDataset:
        """The rows of a pandas DataFrame, or of anything with named columns, as a dataset for `make_private`.

        Raises:
            ValueError: If a column is missing.

        >>> import pandas
        >>> from pmlf.data import Classes
        >>> frame = pandas.DataFrame({"age": [30, 60], "ill": ["no", "yes"]})
        >>> schema, target = Schema.parsed(["age=0:120"]), Classes(names=("no", "yes"))
        >>> TableDataset.from_frame(frame, schema=schema, target=target, label_column="ill")[1]
        (tensor([0., 0.]), tensor(1))
        """
        found = columns_of(frame, (*schema.names, label_column))
        labels = target.encode(found[label_column], "the frame")
        return TableDataset(torch.from_numpy(schema.encode(found)), torch.from_numpy(labels))


def columns_of(frame: Any, names: Sequence[str]) -> dict[str, list[object]]:
    """Columns of a DataFrame or a mapping as lists. Raises ValueError with the columns there are if one is missing."""
    there = [str(name) for name in frame]
    for name in names:
        if name not in there:
            raise ValueError(
                f"the frame has no column {name!r}, only {', '.join(map(repr, there))}: rename or declare it"
            )
    return {name: list(frame[name]) for name in names}


def load_table(path: str | Path, split: str, *, schema: Schema, target: Target, label_column: str) -> TableDataset:
    """One split of your own table, encoded once.

    Args:
        path: A .csv, .tsv, .jsonl or .parquet file, or a folder with one such file per split.
        split: Name of the split. A single file is every split.
        schema: The columns that a model takes.
        target: What the label column holds.
        label_column: The column of the labels.

    Raises:
        ValueError: If the path or a column is missing, or a label is not declared.
    """
    source = own_source(Path(path), split)
    required = {**dict.fromkeys(schema.names, "`columns`"), label_column: "`label_column`"}

    def make(arrays: Arrays) -> None:
        for table in source.tables(split, required):
            arrays.append("labels", target.encode(table[label_column], source.name, source.label_advice))
            arrays.append("features", schema.encode(table))

    arrays = cached(source.digest(split, "table", READING, schema, target, label_column), make)
    return TableDataset(torch.from_numpy(arrays["features"]), torch.from_numpy(arrays["labels"]))
