"""Feature rows: a matrix in memory or in a file, read in blocks of rows as float32, with every record made harmless."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_BLOCK_BYTES = 1 << 23  # a block of rows that stays in the cache between the two products of a step
_LARGEST, _SMALLEST = 1e12, 1e-12  # of a row's largest number: its squares are then ordinary float32 numbers


class FeatureRows:
    """n records of d features, read in blocks of rows.

    Rows are used as they are stored (float16, float32 or float64, in memory or memory-mapped), block by block. Later
    stages scale every record to norm 1, so a row of huge or tiny numbers is divided by its largest number: its
    direction stays, and its squares are finite. A row with NaN or infinity is replaced by zeros and marked in
    `excluded`: it contributes nothing to any sum. Nobody is told: an error would reveal that such a record exists.

    Args:
        features: A matrix of real numbers.

    Raises:
        ValueError: It is not a matrix of real numbers, or it is empty.

    >>> rows = FeatureRows(np.array([[3.0, 4.0], [np.nan, 1.0], [3e200, 4e200]]))
    >>> rows.excluded.tolist()
    [False, True, False]
    >>> [block.tolist() for _, block in rows.blocks()]
    [[[3.0, 4.0], [0.0, 0.0], [0.75, 1.0]]]
    """

    def __init__(self, features: Any) -> None:
        self._array = as_matrix(features)
        self.records, self.width = self._array.shape
        self._tensor = _shared(self._array)
        self._unusual = np.zeros(self.records, dtype=bool)
        self.excluded = torch.zeros(self.records, dtype=torch.bool)
        self._rows = max(1, _BLOCK_BYTES // (4 * self.width))
        self._look()

    def _look(self) -> None:
        """Find the rows that need care, once: a step does not look again."""
        for start in range(0, self.records, self._rows):
            part = self._tensor[start : start + self._rows].float()
            largest = part.abs().amax(dim=1)
            usual = (largest <= _LARGEST) & ((largest >= _SMALLEST) | (largest == 0))  # False for NaN
            if not bool(usual.all()):
                self._unusual[start : start + len(part)] = ~usual.numpy()
        for index in np.flatnonzero(self._unusual).tolist():
            finite = np.isfinite(np.asarray(self._array[index], dtype=np.float64)).all()
            self.excluded[index] = not bool(finite)

    def blocks(
        self, chosen: NDArray[np.int64] | None = None, columns: slice = slice(None)
    ) -> Iterator[tuple[slice | NDArray[np.int64], Tensor]]:
        """Blocks of rows.

        Args:
            chosen: The indices of the rows to read; None for all of them.
            columns: The columns to read.

        Yields:
            The rows' places in the matrix, and the rows in float32. Do not write to them.
        """
        for start in range(0, self.records if chosen is None else len(chosen), self._rows):
            if chosen is None:
                places: slice | NDArray[np.int64] = slice(start, min(start + self._rows, self.records))
                part = self._tensor[places, columns]
            else:
                places = chosen[start : start + self._rows]
                part = self._tensor[torch.from_numpy(places)][:, columns]
            yield places, self._repaired(places, columns, part.float())

    def _repaired(self, places: slice | NDArray[np.int64], columns: slice, part: Tensor) -> Tensor:
        unusual = np.flatnonzero(self._unusual[places])
        if not len(unusual):
            return part
        part = part.clone()
        numbers = np.arange(self.records)[places][unusual]
        for place, number in zip(unusual.tolist(), numbers.tolist(), strict=True):
            part[place] = _harmless(np.asarray(self._array[number], dtype=np.float64))[columns]
        return part


def as_matrix(features: Any) -> NDArray[Any]:
    """A numpy matrix of real numbers, without a copy where possible.

    Raises:
        ValueError: It is not one, or it has no rows or no columns.
    """
    if hasattr(features, "toarray"):
        raise ValueError(
            "sparse data was passed, and dense features are needed: pass X.toarray(), an array of shape (n, d)"
        )
    array = features.detach().cpu().numpy() if isinstance(features, Tensor) else np.asanyarray(features)
    if np.iscomplexobj(array):
        raise ValueError("Complex data not supported: give an array of real numbers of shape (n, d)")
    if array.dtype.kind not in "fiub":
        try:
            array = array.astype(np.float64)
        except TypeError as error:
            raise TypeError(f"features of type object have an argument must be a string or a number: {error}") from None
        except ValueError:  # without the value, which may be private
            raise ValueError(
                f"features of dtype {array.dtype} are not all numbers: give an array of numbers of shape (n, d)"
            ) from None
    if array.ndim != 2:
        raise ValueError(
            f"Expected 2D array, got {array.ndim}D array instead: give features of shape (n, d). Reshape your data by "
            "X.reshape(-1, 1) or X.reshape(1, -1)"
        )
    if array.shape[0] == 0:
        raise ValueError(f"Found array with 0 sample(s) (shape={array.shape}) while a minimum of 1 is required.")
    if array.shape[1] == 0:
        raise ValueError(f"Found array with 0 feature(s) (shape={array.shape}) while a minimum of 1 is required.")
    return array


def _shared(array: NDArray[Any]) -> Tensor:
    """A tensor on the array's memory. It is only read, so a read-only array is fine."""
    if array.dtype not in (np.float16, np.float32, np.float64):
        array = array.astype(np.float32 if array.dtype.itemsize < 4 else np.float64)
    if not array.dtype.isnative or any(stride < 0 for stride in array.strides):
        array = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("="))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return torch.from_numpy(array)


def _harmless(row: NDArray[np.float64]) -> Tensor:
    """The row divided by its largest number; zeros if it has NaN or infinity."""
    largest = float(np.abs(row).max())
    if not np.isfinite(largest) or largest == 0.0:
        return torch.zeros(len(row))
    return torch.from_numpy((row / largest).astype(np.float32))
