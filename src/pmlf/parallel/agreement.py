"""What the ranks must agree on: before the first step the same model, and at every step the same iterate, no error."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from pmlf.engine.anatomy import Anatomy
from pmlf.engine.fingerprint import summary
from pmlf.parallel.failure import RankFailed
from pmlf.parallel.processes import ManyProcesses, Processes


class Agreement:
    """Whether all ranks have done their part of the present step.

    Args:
        processes: The ranks.
        iterate: A number from what must be the same on all of them: the parameters.
        discard: Called on every rank if one has failed.
    """

    def __init__(self, processes: Processes, iterate: Callable[[], int], discard: Callable[[], None]) -> None:
        self._processes, self._iterate, self._discard = processes, iterate, discard
        self._synchronized_at = -1

    def synchronize(self, step: int, error: BaseException | None = None) -> None:
        """Wait for all ranks. All are at the same step and iterate without an error, or all discard and raise."""
        if self._processes.size == 1 or (self._synchronized_at == step and error is None):
            return
        self._synchronized_at = -1
        try:
            self._processes.agree(step, self._iterate(), error)
        except RankFailed:
            self._discard()
            raise
        self._synchronized_at = step

    def synchronize_again(self, step: int) -> None:
        """As `synchronize`, though that was done for this step: another round of the step is done."""
        self._synchronized_at = -1
        self.synchronize(step)

    @contextmanager
    def sharing_errors(self, step: int) -> Iterator[None]:
        """A block whose errors the other ranks learn of."""
        try:
            yield
        except RankFailed:  # which they know of
            raise
        except BaseException as error:
            self.synchronize(step, error)
            raise


def begin_alike(model: nn.Module, processes: Processes) -> None:
    """Give every rank the parameters and buffers of rank 0, as `DistributedDataParallel` does.

    Args:
        model: This rank's model, before training.
        processes: The ranks.

    Raises:
        ValueError: The ranks' models differ in more than values.
    """
    if not isinstance(processes, ManyProcesses):
        return
    values = [*model.named_parameters(), *model.named_buffers()]
    shapes = " ".join(f"{name} {tuple(value.shape)} {value.dtype}" for name, value in values)
    processes.require_same({"model": shapes})
    processes.copy_first(value for _, value in values)


def facts_of(model: nn.Module) -> dict[str, str]:
    """What all ranks must have in common of a model."""
    trained = (name for name, parameter in model.named_parameters() if parameter.requires_grad)
    return {
        "model": f"{model} {Anatomy(model).modes}",
        "set of trainable parameters": " ".join(trained),
        "value of a parameter": str(summary(model.parameters())),
        "value of a buffer": str(summary(model.buffers())),
        "version of torch": torch.__version__,
    }
