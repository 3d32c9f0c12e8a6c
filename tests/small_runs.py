"""A small private run that several tests start from."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import pmlf
from pmlf import PrivateRun


def dataset(size: int = 120) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(size, 5, generator=generator)
    return TensorDataset(x, (x[:, 0] > 0).long())


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 2))


def loss(model: Any, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def private(model: nn.Module | None = None, **options: Any) -> PrivateRun:
    model = model or small()
    options = {
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.5),
        "dataset": dataset(),
        "loss_fn": loss,
        "target_epsilon": 2.0,
        "target_delta": 1e-3,
        "batch_size": 30,
        "steps": 6,
        "max_physical_batch_size": 8,
        **options,
    }
    return pmlf.make_private(model=model, **options)


def weights(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def finish(run: PrivateRun, until: int | None = None) -> PrivateRun:
    for batch in run.batches():
        run.step(batch)
        if run.steps_done == until:
            break
    return run
