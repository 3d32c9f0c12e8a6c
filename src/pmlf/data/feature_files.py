"""Feature files: .npy (memory-mapped), .npz and .parquet, with their labels."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
        ValueError: A file or column is missing or of another kind. The message says what there is.
    """
    _refuse_others(features)
    from_file = labels is not None and Path(labels).suffix == ".npy"
    if features.suffix == ".npy":
        if not from_file:
            raise ValueError(f"{str(features)!r} holds no labels: give a .npy file as `labels`")
        return np.load(features, mmap_mode="r", allow_pickle=False), _labels(labels)
    if features.suffix == ".npz":
        return _from_npz(features, labels, from_file)
    return _from_parquet(features, labels, from_file)


def load_unlabelled(features: Path) -> NDArray[Any]:
    """Features (n, d) of a file without labels, of the kinds that `load_features` reads.

    Raises:
        ValueError: The file is of another kind, or holds no features.
    """
    _refuse_others(features)
    if features.suffix == ".npy":
        return np.load(features, mmap_mode="r", allow_pickle=False)
    if features.suffix == ".npz":
        with np.load(features, allow_pickle=False) as arrays:
            if "features" not in arrays.files:
                raise ValueError(f"{str(features)!r} has no array 'features': it has {', '.join(arrays.files)}")
            return np.asarray(arrays["features"])
    table = _table(features)
    return _matrix([table.column(name) for name in table.column_names if name != "label"])


def _refuse_others(path: Path) -> None:
    if path.suffix not in FEATURE_SUFFIXES:
        raise ValueError(f"{str(path)!r} is not a feature file: give one that ends in {', '.join(FEATURE_SUFFIXES)}")


def _labels(path: str | None) -> NDArray[Any]:
    assert path is not None
    return np.asarray(np.load(path, allow_pickle=False))


def _from_npz(path: Path, labels: str | None, from_file: bool) -> tuple[NDArray[Any], NDArray[Any]]:
    with np.load(path, allow_pickle=False) as arrays:
        name = labels or "labels"
        needed = ["features"] if from_file else ["features", name]
        missing = [each for each in needed if each not in arrays.files]
        if missing:
            raise ValueError(f"{str(path)!r} has no array {missing[0]!r}: it has {', '.join(arrays.files)}")
        return arrays["features"], _labels(labels) if from_file else arrays[name]


def _from_parquet(path: Path, labels: str | None, from_file: bool) -> tuple[NDArray[Any], NDArray[Any]]:
    table = _table(path)
    name = labels or "label"
    if not from_file and name not in table.column_names:
        raise ValueError(f"{str(path)!r} has no column {name!r} for `labels`: it has {', '.join(table.column_names)}")
    matrix = _matrix([table.column(each) for each in table.column_names if from_file or each != name])
    return matrix, _labels(labels) if from_file else np.asarray(table.column(name).to_pylist())


def _table(path: Path) -> Any:
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise ValueError("parquet files need pyarrow: pip install 'dp-pmlf[data]'") from error
    return pyarrow.parquet.read_table(path)


def _matrix(columns: list[Any]) -> NDArray[Any]:
    if len(columns) == 1 and columns[0].type.num_fields == 1:  # a list column
        return np.asarray(columns[0].to_pylist(), dtype=np.float32)
    return np.stack([column.to_numpy().astype(np.float32) for column in columns], axis=1)
