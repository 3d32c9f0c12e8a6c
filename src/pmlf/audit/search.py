"""Hill climbing for the record that moves the clipped sum furthest, through your own model and loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from pmlf.audit.canaries import ProgressCallback, no_progress
from pmlf.audit.moves import Range, move, ranges
from pmlf.audit.neighbours import AuditedModel, Neighbour, Releases, RunRandomness, Snapshot, short_run
from pmlf.basics.batches import batch_size, to_dtype, without
from pmlf.checks.inspection import LARGEST_SENSITIVITY
from pmlf.mechanism.noise import Randomness

_MOST_MOVES_AT_ONCE = 3
_LEVEL = 1e-6  # multiples this close count as equal: clipping makes a plateau at 1 that a climb must cross


@dataclass(frozen=True, kw_only=True)
class Sensitivity:
    """The worst record found: how far it moves the clipped sum, as a multiple of the clip norm.

    `exact` is the multiple in float64, computed only if the one in the model's precision is above the limit. In
    float32, rounding can push another record's activation over a kink; a multiple above 1 in float64 is a fault.
    `batch` holds the records, the worst one last.
    """

    multiple: float
    exact: float | None
    training: bool
    neighbour: Neighbour
    example: int
    others: int
    releases: int  # before the one with this sum
    moves: tuple[str, ...]
    evaluations: int
    refused: int  # evaluations in which the loss or the library raised an error
    batch: Any = field(repr=False, compare=False)

    @property
    def judged_by(self) -> float:
        """The multiple in float64 if there is one, else in the model's precision."""
        return self.multiple if self.exact is None else self.exact

    @property
    def holds(self) -> bool:
        """Whether the record moves the sum by at most the clip norm, up to rounding."""
        return self.judged_by <= LARGEST_SENSITIVITY


def worst_record(
    audited: AuditedModel,
    *,
    restarts: int,
    tries: int,
    randomness: Randomness,
    progress: ProgressCallback = no_progress,
) -> Sensitivity:
    """Climb from random subsets of the examples, in training mode (if the model is in it) and in eval mode.

    A short run on the examples gives the states to climb at: the first release, and those at which all of the method's
    evaluation points exist. Both neighbours draw the same dropout if possible: they have the same seeds, and the record
    comes last. If leaving it out still shifts the others' dropout, another record with loss weight 0 takes its place.
    Effects of the batch size alone are then measured in eval mode only.

    Args:
        audited: Model, loss, method and examples.
        restarts: Number of climbs in each mode.
        tries: Number of moves tried in each climb.
        randomness: Source of the moves and of the dropout.
        progress: Called with the fraction of the work done since the last call.
    """
    modes = (True, False) if audited.model.training else (False,)
    climbers = [
        _Climber(audited, training, RunRandomness(randomness.seed_for("dropout", number)))
        for number, training in enumerate(modes)
    ]
    climbs = []
    for number, climber in enumerate(climbers):
        generator = torch.Generator().manual_seed(randomness.seed_for("moves", number))
        for restart in range(restarts):
            climbs.append(climber.climb(restart, tries, generator))
            progress(1 / (restarts * len(modes)))
    return replace(
        max(climbs, key=lambda climb: climb.judged_by),
        evaluations=sum(climber.evaluations for climber in climbers),
        refused=sum(climber.refused for climber in climbers),
    )


@dataclass(frozen=True, kw_only=True)
class _Place:
    """The position of a climb: the batch, the sum without its last record, and the multiple."""

    batch: Any
    base: Tensor
    multiple: float
    moves: tuple[str, ...] = ()


class _Climber:
    """Climbs in one mode of the model, and counts its evaluations."""

    def __init__(self, audited: AuditedModel, training: bool, randomness: RunRandomness) -> None:
        self._audited, self._examples = audited, audited.examples
        self._training, self._randomness = training, randomness
        self._seen: list[Range] = ranges(audited.examples)
        self._releases = Releases(audited, training=training, randomness=randomness)
        snapshots = short_run(self._releases, audited.examples, audited.method.points.depth + 2)
        self._snapshots = snapshots[::-1]  # the last first: there all points exist
        self._neighbour = self._kind_of_neighbour()
        self.evaluations = self.refused = 0

    def climb(self, restart: int, tries: int, generator: torch.Generator) -> Sensitivity:
        """Climb from a subset of the examples (the first time from all) by changing the batch."""
        snapshot = self._snapshots[restart % len(self._snapshots)]
        count = batch_size(self._examples)
        chosen = _subset(count, generator) if restart else list(range(count))
        place = self._start(chosen, snapshot)
        for _ in range(tries):
            place = self._tried(place, snapshot, generator)
        multiples = [self._at(place.batch, other) for other in self._snapshots]
        best = max(range(len(multiples)), key=lambda index: multiples[index])
        return Sensitivity(
            multiple=multiples[best],
            exact=self._exact(place.batch, self._snapshots[best], multiples[best]),
            training=self._training,
            neighbour=self._neighbour,
            example=chosen[-1],
            others=batch_size(place.batch) - 1,
            releases=self._snapshots[best].releases,
            moves=place.moves,
            evaluations=0,
            refused=0,
            batch=place.batch,
        )

    def _exact(self, batch: Any, snapshot: Snapshot, multiple: float) -> float | None:
        """The multiple in float64, if `multiple` is above the limit and the model runs in float64; else None."""
        if multiple <= LARGEST_SENSITIVITY:
            return None
        try:
            double = self._audited.in_double().without_checks()
            exact = Releases(double, training=self._training, randomness=self._randomness)
            wide = to_dtype(batch, torch.float64)
            moved = exact.with_last(wide, snapshot) - exact.without_last(wide, snapshot, self._neighbour)
        except Exception:
            return None
        return float(moved.norm()) / exact.clip_norm

    def _start(self, chosen: Sequence[int], snapshot: Snapshot) -> _Place:
        batch = self._examples
        for index in reversed(range(batch_size(self._examples))):
            if index not in chosen:
                batch = without(batch, index)
        base = self._releases.without_last(batch, snapshot, self._neighbour)
        self.evaluations += 1
        return _Place(batch=batch, base=base, multiple=self._multiple(batch, base, snapshot))

    def _tried(self, place: _Place, snapshot: Snapshot, generator: torch.Generator) -> _Place:
        """The place after a few moves if it is at least as high, else the old place."""
        batch, names, others_changed = place.batch, place.moves, False
        for _ in range(int(torch.randint(1, _MOST_MOVES_AT_ONCE + 1, (), generator=generator))):
            moved = move(batch, self._seen, generator)
            batch, names = moved.batch, (*names, moved.name)
            others_changed |= moved.others_changed
        self.evaluations += 1
        try:
            base = self._releases.without_last(batch, snapshot, self._neighbour) if others_changed else place.base
            multiple = self._multiple(batch, base, snapshot)
        except (
            ValueError,
            RuntimeError,
            IndexError,
        ):  # the examples raised nothing, so the changed record is the cause
            self.refused += 1
            return place
        if multiple < place.multiple - _LEVEL:
            return place
        return _Place(batch=batch, base=base, multiple=multiple, moves=names)

    def _at(self, batch: Any, snapshot: Snapshot) -> float:
        self.evaluations += 1
        return self._multiple(batch, self._releases.without_last(batch, snapshot, self._neighbour), snapshot)

    def _multiple(self, batch: Any, base: Tensor, snapshot: Snapshot) -> float:
        moved = self._releases.with_last(batch, snapshot) - base
        return float(moved.norm()) / self._releases.clip_norm

    def _kind_of_neighbour(self) -> Neighbour:
        """ "replaced" only if leaving the last example out exceeds the limit and replacing it does not."""
        for snapshot in self._snapshots:
            with_it = self._releases.with_last(self._examples, snapshot)
            left_out, replaced = (
                float((with_it - self._releases.without_last(self._examples, snapshot, kind)).norm())
                for kind in ("left out", "replaced")
            )
            limit = LARGEST_SENSITIVITY * self._releases.clip_norm
            if left_out > limit and replaced <= limit:
                return "replaced"
        return "left out"


def _subset(count: int, generator: torch.Generator) -> list[int]:
    """A random subset of the examples, in order; at least two if there are two."""
    size = int(torch.randint(min(2, count), count + 1, (), generator=generator))
    return sorted(torch.randperm(count, generator=generator)[:size].tolist())
