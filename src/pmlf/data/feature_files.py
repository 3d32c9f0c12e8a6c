"""Feature files: .npy (memory-mapped), .npz and .parquet, with their labels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

_KINDS = (".npy", ".npz", ".parquet")


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
    if features.suffix not in _KINDS:
        raise ValueError(f"{str(features)!r} is not a feature file: give one that ends in {', '.join(_KINDS)}")
    from_file = labels is not None and Path(labels).suffix == ".npy"
    if features.suffix == ".npy":
        if not from_file:
            raise ValueError(f"{str(features)!r} holds no labels: give a .npy file as `labels`")
        return np.load(features, mmap_mode="r", allow_pickle=False), _labels(labels)
    if features.suffix == ".npz":
        return _from_npz(features, labels, from_file)
    return _from_parquet(features, labels, from_file)


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
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise ValueError("parquet files need pyarrow: pip install 'dp-pmlf[data]'") from error
    table = pyarrow.parquet.read_table(path)
    name = labels or "label"
    if not from_file and name not in table.column_names:
        raise ValueError(f"{str(path)!r} has no column {name!r} for `labels`: it has {', '.join(table.column_names)}")
    columns = [table.column(each) for each in table.column_names if from_file or each != name]
    if len(columns) == 1 and columns[0].type.num_fields == 1:  # a list column
        matrix = np.asarray(columns[0].to_pylist(), dtype=np.float32)
    else:
        matrix = np.stack([column.to_numpy().astype(np.float32) for column in columns], axis=1)
    found = _labels(labels) if from_file else np.asarray(table.column(name).to_pylist())
    return matrix, found
