"""The sum of a logical batch so far."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pmlf.engine.clipper import ClippedSum
from pmlf.engine.fingerprint import Fingerprint, fingerprint, refuse_written
from pmlf.engine.questions import Questions


class PendingSum(NamedTuple):
    """What was accumulated and not released yet. Replaced as a whole, so that an interrupted call changes nothing."""

    fingerprint: Fingerprint
    total: ClippedSum | None = None
    samples: int = 0
    micro_batches: int = 0
    units: frozenset[Any] = frozenset()  # of a step of units

    def numbers(self, size: int, rank: int, ranks: int) -> Tensor:
        """Numbers for the next samples, which no other sample of the logical batch has on any rank."""
        return torch.arange(self.samples, self.samples + size) * ranks + rank

    def refuse_again(self, units: frozenset[Any]) -> None:
        """Raise ValueError for a unit that is in the sum already: clipped twice, it would move the sum by 2 C."""
        if self.units & units:
            raise ValueError(
                "a unit has records in two micro-batches of one logical batch, so it would be clipped twice: give all "
                "its records of a step in one micro-batch"
            )

    def followed(self, total: ClippedSum, samples: int, units: frozenset[Any]) -> PendingSum:
        """The sum with one more micro-batch."""
        return PendingSum(
            self.fingerprint, total, self.samples + samples, self.micro_batches + 1, units=self.units | units
        )

    def refuse_written(self, parameters: Mapping[str, Tensor], questions: Questions) -> None:
        """Ask whether passes have written into the parameters; if so, an error when the questions are answered."""
        changed = self.fingerprint.changed(fingerprint(parameters.values()))
        questions.refuse(changed.any(), lambda: refuse_written(parameters, self.fingerprint))
