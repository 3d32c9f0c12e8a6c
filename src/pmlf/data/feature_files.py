"""Feature files: .npy (memory-mapped), .npz and .parquet, with their labels."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

FEATURE_SUFFIXES = (".npy", ".npz", ".parquet")


@dataclass(frozen=True, kw_only=True)
class FeatureForm:
    """The features that a model takes: rows of `width` numbers."""

    width: int

    def checked(self, features: Any) -> NDArray[Any]:
        """Features as a matrix of the right width.

        Raises:
            ValueError: It has another shape.
        """
        found = np.asanyarray(features)
        if found.ndim != 2 or found.shape[1] != self.width:
            raise ValueError(f"features of shape {found.shape} do not fit the model: give rows of {self.width} numbers")
        return found


def load_features(features: Path, labels: str | None) -> tuple[NDArray[Any], NDArray[Any]]:
    """Features (n, d) and labels from files.

    Args:
        features: A .npy file with a matrix, which stays on the disk; a .npz file with the arrays `features` and
            `labels`; or a .parquet file with one column per feature, or one column of lists.
        labels: A .npy file, or the name of the array or column with the labels.

    Returns:
        Features and labels.

    Raises:
        ValueError: A file or column is missing or of another kind, or there is not one label per record. The message
            shows no value.
    """
    _refuse_others(features)
    separate = None if labels is None or Path(labels).suffix != ".npy" else _array(Path(labels))
    if features.suffix == ".npy":
        if separate is None:
            raise ValueError(f"{str(features)!r} holds no labels: give a .npy file as `labels`")
        found = _array(features), separate
    elif features.suffix == ".npz":
        found = _from_npz(features, labels or "labels", separate)
    else:
        found = _from_parquet(features, labels or "label", separate)
    if found[0].shape[:1] != found[1].shape[:1]:
        raise ValueError(
            f"{str(features)!r} has features of shape {found[0].shape} and labels of shape {found[1].shape}: give one "
            "label per record"
        )
    return found


def load_unlabelled(features: Path) -> NDArray[Any]:
    """Features (n, d) of a file without labels, of the kinds that `load_features` reads.

    Raises:
        ValueError: The file is of another kind, or holds no features.
    """
    _refuse_others(features)
    if features.suffix == ".npy":
        return _array(features)
    if features.suffix == ".npz":
        return _arrays(features, ["features"])[0]
    return _matrix(_table(features), "label", features)


def _refuse_others(path: Path) -> None:
    if path.suffix not in FEATURE_SUFFIXES:
        raise ValueError(f"{str(path)!r} is not a feature file: give one that ends in {', '.join(FEATURE_SUFFIXES)}")


def _from_npz(path: Path, labels: str, separate: NDArray[Any] | None) -> tuple[NDArray[Any], NDArray[Any]]:
    if separate is not None:
        return _arrays(path, ["features"])[0], separate
    features, found = _arrays(path, ["features", labels])
    return features, found


def _from_parquet(path: Path, labels: str, separate: NDArray[Any] | None) -> tuple[NDArray[Any], NDArray[Any]]:
    table = _table(path)
    if separate is not None:
        return _matrix(table, None, path), separate
    if labels not in table.column_names:
        raise ValueError(f"{str(path)!r} has no column {labels!r} for `labels`: it has {', '.join(table.column_names)}")
    return _matrix(table, labels, path), np.asarray(table.column(labels).to_pylist())


def _array(path: Path) -> NDArray[Any]:
    """The array of a .npy file, memory-mapped."""
    with _readable(path):
        return np.load(path, mmap_mode="r", allow_pickle=False)


def _arrays(path: Path, names: list[str]) -> list[NDArray[Any]]:
    """Arrays of a .npz file."""
    with _readable(path), np.load(path, allow_pickle=False) as arrays:
        there = arrays.files
        if set(names) <= set(there):
            return [np.asarray(arrays[name]) for name in names]
    missing = next(name for name in names if name not in there)
    raise ValueError(f"{str(path)!r} has no array {missing!r}: it has {', '.join(there)}")


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except (ValueError, EOFError, BadZipFile, TypeError) as error:
        raise ValueError(
            f"{str(path)!r} cannot be read as arrays of numbers or texts: write it with numpy.save or numpy.savez; an "
            "array of objects needs .astype(str) or .astype(float) before"
        ) from error


def _table(path: Path) -> Any:
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise ValueError("parquet files need pyarrow: pip install 'dp-pmlf[data]'") from error
    return pyarrow.parquet.read_table(path)


def _matrix(table: Any, labels: str | None, path: Path) -> NDArray[Any]:
    """All columns but that of the labels as a matrix; or the only one, if it is of lists."""
    columns = {name: table.column(name) for name in table.column_names if name != labels}
    try:
        if len(columns) == 1 and (column := next(iter(columns.values()))).type.num_fields == 1:  # a list column
            return np.asarray(column.to_pylist(), dtype=np.float32)
        return np.stack([column.to_numpy().astype(np.float32) for column in columns.values()], axis=1)
    except (ValueError, TypeError):  # without the value, which may be private
        raise ValueError(
            f"{str(path)!r} has a column of features that are not numbers, or lists of several lengths: it has "
            f"{', '.join(f'{name} ({column.type})' for name, column in columns.items())}; remove what is no feature, "
            "and give the column of the labels as `labels`"
        ) from None
