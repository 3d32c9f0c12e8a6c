"""Callbacks of a run: what they receive is released already, so it costs no privacy to show or store it.

Not among it: the training loss, gradient norms of samples, drawn batch sizes, and the time of a single step, which
tells how many samples were drawn. A callback that writes timestamps collects steps and writes them at evaluations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """One step that was taken.

    Attributes:
        step: The number of steps done.
        epoch: The number of epochs done, step * B / n.
        learning_rate: The learning rate of the optimizer's first group in this step.
        gradient_norm: The norm of the private gradient that the optimizer got, noise included.
    """

    step: int
    epoch: float
    learning_rate: float
    gradient_norm: float


@dataclass(frozen=True, kw_only=True)
class EvaluationRecord:
    """Scores on records that are not protected, with the epsilon spent so far.

    Attributes:
        step: The number of steps done.
        epoch: The number of epochs done.
        epsilon: Epsilon spent, at the run's delta.
        scores: Numbers by name, such as "test/accuracy".
    """

    step: int
    epoch: float
    epsilon: float
    scores: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class EndRecord:
    """The end of a run.

    Attributes:
        steps: The number of steps done.
        certificate: The run's certificate.
    """

    steps: int
    certificate: Mapping[str, Any]


class Callback(Protocol):
    """Receives the released numbers of a run. Append one to `PrivateRun.callbacks`."""

    def on_step(self, record: StepRecord) -> None:
        """Called after every step."""

    def on_evaluation(self, record: EvaluationRecord) -> None:
        """Called by `PrivateRun.log_evaluation`."""

    def on_end(self, record: EndRecord) -> None:
        """Called once, when the batches of the run end."""


class Callbacks(list[Callback]):
    """The callbacks of a run."""

    def __init__(self) -> None:
        super().__init__()
        self._released: StepRecord | None = None
        self._ended = False

    def released(self, step: int, epoch: float, optimizer: Optimizer, trained: Sequence[nn.Parameter]) -> None:
        """Take the numbers of a step whose private gradient is in `p.grad`, before the optimizer uses it."""
        norms = [parameter.grad.norm() for parameter in trained if parameter.grad is not None]
        self._released = StepRecord(
            step=step,
            epoch=epoch,
            learning_rate=float(optimizer.param_groups[0]["lr"]),
            gradient_norm=float(torch.stack(norms).norm()),
        )

    def stepped(self) -> None:
        """Pass on the step that was released last. The parameters are updated by now."""
        record, self._released = self._released, None
        if record is not None:
            for callback in self:
                callback.on_step(record)

    def evaluated(self, record: EvaluationRecord) -> None:
        """Pass on an evaluation."""
        for callback in self:
            callback.on_evaluation(record)

    def ended(self, record: EndRecord) -> None:
        """Pass on the end of the run, once."""
        if not self._ended:
            self._ended = True
            for callback in self:
                callback.on_end(record)
