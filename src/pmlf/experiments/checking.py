"""`pmlf.check` before a run: on synthetic inputs, and on private records only for somebody who asked to see it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from pmlf.basics.batches import synthetic, to_device
from pmlf.checks.inspection import Checked, check
from pmlf.experiments.spec import RunSpec
from pmlf.experiments.tasks import Task
from pmlf.mechanism.noise import SeededRandomness

_SAMPLES = 4


def check_model(model: nn.Module, task: Task, spec: RunSpec, show: Callable[[Checked], None] | None = None) -> None:
    """Refuse a model that cannot be private, tried on numbers of the records' shapes; `show` sees it on records too."""
    collate = task.collate_fn or torch.utils.data.default_collate
    first = collate([task.train[index] for index in range(min(_SAMPLES, task.records))])
    records = to_device(first, next(model.parameters()).device)
    inputs = synthetic(records, SeededRandomness(0).stream("synthetic").seed())
    method = spec.build_method()
    check(model, task.losses, inputs, method=method, clip_norm=spec.clip_norm)
    if show is not None:
        show(check(model, task.losses, records, method=method, clip_norm=spec.clip_norm))
