"""The record that moves the clipped sum furthest, searched by hill climbing through the user's own model and loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from pmlf.audit.canaries import Progress, unheard
from pmlf.audit.moves import Range, move, ranges
from pmlf.audit.neighbours import Audited, Moment, Neighbour, Releases, RunRandomness, walk
from pmlf.basics.batches import batch_size, to_dtype, without
from pmlf.checks.inspection import LARGEST_SENSITIVITY
from pmlf.mechanism.noise import Randomness

_MOST_MOVES_AT_ONCE = 3
_LEVEL = 1e-6  # multiples this near are as high: clipping makes a plateau of 1, and a climb must get across it


@dataclass(frozen=True, kw_only=True)
class Sensitivity:
    """The worst pair found: how far one record moves the clipped sum, as a multiple of the clip norm.

    `exact` is the same pair in float64, taken where float32 is above the limit: rounding may push another record's
    activation over a kink, and what remains in float64 is a fault. `batch` holds the pair itself, the record last.
    """

    multiple: float
    exact: float | None
    training: bool
    neighbour: Neighbour
    example: int
    others: int
    releases: int  # before this one, whose sum it is
    moves: tuple[str, ...]
    evaluations: int
    refused: int  # of those: the loss or the library would not take the record
    batch: Any = field(repr=False, compare=False)

    @property
    def judged_by(self) -> float:
        """The multiple in float64 where it was taken, else in the model's own precision."""
        return self.multiple if self.exact is None else self.exact

    @property
    def holds(self) -> bool:
        """Whether the record moves the sum by the clip norm at most, but for rounding."""
        return self.judged_by <= LARGEST_SENSITIVITY


def worst_record(
    audited: Audited, *, restarts: int, tries: int, randomness: Randomness, progress: Progress = unheard
) -> Sensitivity:
    """Climb from `restarts` random subsets of the examples, `tries` moves each, in every mode the model trains in.

    A short run on the examples gives the moments to look at: the first release, and those at which all of the method's
    points exist. Both neighbours draw the same dropout where that is possible: they have the same seeds, and the record
    comes last. Where leaving it out shifts the others' draws nevertheless, an ordinary record takes its place and its
    loss is multiplied by 0; what follows from the number of samples alone is then seen in eval mode only.
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
    """Where a climb is: the pair, the sum without the record, and the multiple."""

    batch: Any
    base: Tensor
    multiple: float
    moves: tuple[str, ...] = ()


class _Climber:
    """Climbs at the moments of a walk, in one mode, and counts what it evaluates."""

    def __init__(self, audited: Audited, training: bool, randomness: RunRandomness) -> None:
        self._audited, self._examples = audited, audited.examples
        self._training, self._randomness = training, randomness
        self._seen: list[Range] = ranges(audited.examples)
        self._releases = Releases(audited, training=training, randomness=randomness)
        moments = walk(self._releases, audited.examples, audited.method.points.depth + 2)
        self._moments = moments[::-1]  # all points exist at the last
        self._neighbour = self._kind_of_neighbour()
        self.evaluations = self.refused = 0

    def climb(self, restart: int, tries: int, generator: torch.Generator) -> Sensitivity:
        """From a subset of the examples, at first from all; the last record is the one in question."""
        moment = self._moments[restart % len(self._moments)]
        count = batch_size(self._examples)
        chosen = _subset(count, generator) if restart else list(range(count))
        place = self._start(chosen, moment)
        for _ in range(tries):
            place = self._tried(place, moment, generator)
        multiples = [self._at(place.batch, other) for other in self._moments]
        best = max(range(len(multiples)), key=lambda index: multiples[index])
        return Sensitivity(
            multiple=multiples[best],
            exact=self._exact(place.batch, self._moments[best], multiples[best]),
            training=self._training,
            neighbour=self._neighbour,
            example=chosen[-1],
            others=batch_size(place.batch) - 1,
            releases=self._moments[best].releases,
            moves=place.moves,
            evaluations=0,
            refused=0,
            batch=place.batch,
        )

    def _exact(self, batch: Any, moment: Moment, multiple: float) -> float | None:
        """The pair in float64, if it is above the limit and the model runs in that; else its own precision stands."""
        if multiple <= LARGEST_SENSITIVITY:
            return None
        try:
            double = self._audited.in_double().without_checks()
            exact = Releases(double, training=self._training, randomness=self._randomness)
            wide = to_dtype(batch, torch.float64)
            moved = exact.with_last(wide, moment) - exact.without_last(wide, moment, self._neighbour)
        except Exception:
            return None
        return float(moved.norm()) / exact.clip_norm

    def _start(self, chosen: Sequence[int], moment: Moment) -> _Place:
        batch = self._examples
        for index in reversed(range(batch_size(self._examples))):
            if index not in chosen:
                batch = without(batch, index)
        base = self._releases.without_last(batch, moment, self._neighbour)
        self.evaluations += 1
        return _Place(batch=batch, base=base, multiple=self._multiple(batch, base, moment))

    def _tried(self, place: _Place, moment: Moment, generator: torch.Generator) -> _Place:
        """The place after some moves if it is higher, or as high; else the place itself."""
        batch, names, others_changed = place.batch, place.moves, False
        for _ in range(int(torch.randint(1, _MOST_MOVES_AT_ONCE + 1, (), generator=generator))):
            moved = move(batch, self._seen, generator)
            batch, names = moved.batch, (*names, moved.name)
            others_changed |= moved.others_changed
        self.evaluations += 1
        try:
            base = self._releases.without_last(batch, moment, self._neighbour) if others_changed else place.base
            multiple = self._multiple(batch, base, moment)
        except (ValueError, RuntimeError, IndexError):  # what the examples did not raise, the moved record does
            self.refused += 1
            return place
        if multiple < place.multiple - _LEVEL:
            return place
        return _Place(batch=batch, base=base, multiple=multiple, moves=names)

    def _at(self, batch: Any, moment: Moment) -> float:
        self.evaluations += 1
        return self._multiple(batch, self._releases.without_last(batch, moment, self._neighbour), moment)

    def _multiple(self, batch: Any, base: Tensor, moment: Moment) -> float:
        moved = self._releases.with_last(batch, moment) - base
        return float(moved.norm()) / self._releases.clip_norm

    def _kind_of_neighbour(self) -> Neighbour:
        """ "replaced" only where leaving the last example out moves more than it may and replacing it does not."""
        for moment in self._moments:
            with_it = self._releases.with_last(self._examples, moment)
            left_out, replaced = (
                float((with_it - self._releases.without_last(self._examples, moment, kind)).norm())
                for kind in ("left out", "replaced")
            )
            limit = LARGEST_SENSITIVITY * self._releases.clip_norm
            if left_out > limit and replaced <= limit:
                return "replaced"
        return "left out"


def _subset(count: int, generator: torch.Generator) -> list[int]:
    """At least two of the examples where there are two, in order."""
    size = int(torch.randint(min(2, count), count + 1, (), generator=generator))
    return sorted(torch.randperm(count, generator=generator)[:size].tolist())
