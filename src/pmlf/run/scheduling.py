"""When a learning-rate scheduler steps: after every step of the run, or after every epoch."""

from __future__ import annotations

import copy
import warnings
from typing import Literal

import torch
from torch import nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

Interval = Literal["step", "epoch"]
_COLLAPSED = 0.01  # of the largest learning rate before
_MOST_SIMULATED = 20_000


def checked_interval(
    scheduler: LRScheduler | None, interval: Interval | None, optimizer: Optimizer, *, steps: int, epochs: int
) -> Interval:
    """The interval given, or "step", with a warning where a schedule that counts epochs would collapse.

    Args:
        scheduler: The scheduler, or None.
        interval: "step" or "epoch"; None for the default.
        optimizer: The optimizer that the scheduler changes.
        steps: The number of steps of the run.
        epochs: The number of epochs of the run.

    Returns:
        "step" or "epoch".

    Raises:
        ValueError: The interval is neither, or the scheduler ends before the run.
    """
    if interval not in (None, "step", "epoch"):
        raise ValueError(f'scheduler_interval={interval!r} is neither "step" nor "epoch"')
    if scheduler is None:
        if interval is not None:
            raise ValueError(f"scheduler_interval={interval!r} is given without a scheduler: give scheduler too")
        return "step"
    if isinstance(scheduler, ReduceLROnPlateau):
        raise ValueError(
            "ReduceLROnPlateau follows a loss, which is sensitive: use a scheduler that depends on the step count alone"
        )
    if type(scheduler).__module__ != LRScheduler.__module__:
        return interval or "step"  # somebody's own: not run ahead of time
    calls = epochs if interval == "epoch" else steps
    collapse = _collapse(scheduler, optimizer, calls)
    if interval is None and collapse is not None and epochs < steps:
        warnings.warn(
            f"the scheduler {type(scheduler).__name__} steps after every step of the run, not after every epoch, and "
            f"its learning rate falls below a hundredth at step {collapse} of {steps}: give "
            'scheduler_interval="epoch" if it counts epochs, or scheduler_interval="step" if this is meant',
            stacklevel=4,
        )
    return interval or "step"


def _collapse(scheduler: LRScheduler, optimizer: Optimizer, calls: int) -> int | None:
    """The call after which the learning rate is tiny, if that is in the first half of the run.

    A copy of the scheduler runs on an optimizer of the same groups without the parameters.
    """
    groups = [{**group, "params": [nn.Parameter(torch.zeros(1))]} for group in optimizer.param_groups]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of schedulers that step without an optimizer
        double = SGD(groups, lr=1.0)
        ahead = copy.deepcopy(scheduler, {id(optimizer): double})
        highest, collapsed = 0.0, None
        for call in range(min(calls, _MOST_SIMULATED)):
            rate = max(float(group["lr"]) for group in double.param_groups)
            highest = max(highest, rate)
            if collapsed is None and rate < _COLLAPSED * highest and 2 * call < calls:
                collapsed = call
            try:
                ahead.step()
            except ValueError as error:
                raise ValueError(
                    f"the scheduler {type(scheduler).__name__} is called {calls} times in this run and ends after "
                    f"{call}: build it for {calls} calls, or give another scheduler_interval"
                ) from error
    return collapsed
