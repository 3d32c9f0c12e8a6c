"""Records as a loader reads them: checked one at a time, at the cost of one."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import Subset, TensorDataset, default_collate

from pmlf.mechanism.records import Records


def test_the_record_that_is_collated_again_is_copied_without_the_rest_of_its_dataset() -> None:
    dataset = TensorDataset(torch.randn(10_000, 3), torch.arange(10_000))
    memory: list[int] = []

    def collate(records: list[Any]) -> Any:
        if len(records) == 1:  # the copy
            memory.append(records[0][0].untyped_storage().nbytes())
        return default_collate(records)

    records = Records(Subset(dataset, range(5_000)), collate, together=True)
    inputs, labels = records.collate(records.__getitems__([7, 3, 5]))
    assert torch.equal(inputs, dataset.tensors[0][[7, 3, 5]]) and labels.tolist() == [7, 3, 5]
    assert memory == [12, 12, 12]
