"""One walk finds what torch's own walks find."""

from __future__ import annotations

import torch
from torch import nn

from pmlf.engine.anatomy import Anatomy


class Tied(nn.Module):
    """A parameter under two names, a module under two names, a buffer that is none and one of the model's own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1, 3))
        self.first = nn.Linear(3, 3)
        self.inner = nn.Sequential(nn.BatchNorm1d(3), self.first, nn.Dropout())
        self.head = nn.Linear(3, 3, bias=False)
        self.head.weight = self.first.weight
        self.register_buffer("table", torch.zeros(2))
        self.register_buffer("later", None)


def test_names_and_order_are_those_of_torch() -> None:
    model = Tied()
    anatomy = Anatomy(model)
    for found, expected in (
        (anatomy.modules, model.named_modules()),
        (anatomy.parameters, model.named_parameters()),
        (anatomy.buffers, model.named_buffers()),
    ):
        pairs = list(expected)
        assert list(found) == [name for name, _ in pairs]
        assert all(mine is theirs for mine, (_, theirs) in zip(found.values(), pairs, strict=True))


def test_modes_tell_one_module_in_evaluation_from_all_in_training() -> None:
    model = Tied()
    before = Anatomy(model).modes
    model.inner[2].eval()
    after = Anatomy(model).modes
    assert len(before) == len(after) and all(before) and after.count(False) == 1
