"""Ids of units, such as patient numbers: one per record, whole numbers or texts."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor


def id_array(ids: Any) -> NDArray[Any]:
    """Ids as an array of numbers or of texts.

    Args:
        ids: A list, a tensor, an array or a column of a table.

    Returns:
        A one-dimensional array.

    Raises:
        ValueError: An id is missing, or they are of another kind. The message shows no id.

    >>> id_array(["ann", "bob"]).tolist(), id_array(np.array([7, 7])).tolist()
    (['ann', 'bob'], [7, 7])
    """
    array = ids.detach().cpu().numpy() if isinstance(ids, Tensor) else np.asarray(ids)
    if array.dtype == object:
        kinds = {type(each) for each in array.flat}
        if kinds != {str} and kinds != {int}:
            raise ValueError(
                "units has ids of several types, or one that is missing: give a whole number or a text for each record"
            )
        array = array.astype(str if kinds == {str} else np.int64)
    if array.ndim != 1 or array.dtype.kind not in "iuU":
        raise ValueError(
            f"units is an array of {array.dtype} with {array.ndim} axes: give one whole number or one text per record"
        )
    return array
