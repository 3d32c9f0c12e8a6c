"""Batches of any form: how many samples, some of them, on a device."""

from __future__ import annotations

from collections import OrderedDict, UserDict, defaultdict, namedtuple
from types import MappingProxyType
from typing import Any

import pytest
import torch
from transformers import BatchEncoding

from pmlf.basics.batches import batch_size, select, to_device, to_dtype

Pair = namedtuple("Pair", ["x", "y"])
X, Y = torch.arange(6.0).view(3, 2), torch.arange(3)


@pytest.mark.parametrize(
    "batch",
    [
        X,
        (X, Y),
        [X, Y],
        Pair(X, Y),
        {"x": X, "y": Y},
        OrderedDict(x=X, y=Y),
        defaultdict(list, x=X, y=Y),
        UserDict(x=X, y=Y),
        BatchEncoding({"x": X, "y": Y}),
        (X, {"y": Y, "names": ["a", "b", "c"]}),
    ],
)
def test_selecting_keeps_the_form(batch: Any) -> None:
    assert batch_size(batch) == 3
    part = select(batch, slice(1, 3))
    assert type(part) is type(batch) and batch_size(part) == 2
    assert batch_size(batch) == 3  # the original is as it was
    first = part if isinstance(part, torch.Tensor) else (part["x"] if not isinstance(part, (tuple, list)) else part[0])
    assert torch.equal(first, X[1:])


def test_lists_without_tensors_are_one_value_a_sample_and_read_only_mappings_become_dicts() -> None:
    assert select((X, ["a", "b", "c"]), slice(1, 3))[1] == ["b", "c"]
    assert select(MappingProxyType({"x": X}), slice(0, 1)).keys() == {"x"}


def test_device_and_precision_touch_only_what_differs() -> None:
    batch = {"x": X, "y": Y}
    assert to_device(batch, torch.device("cpu")) is batch
    assert to_device(batch, torch.device("meta"))["x"].device.type == "meta"
    double = to_dtype(batch, torch.float64)
    assert double["x"].dtype == torch.float64 and double["y"] is Y
