"""What a micro-batch adds to the pending sum: checked, passed through the model at every point, clipped once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from pmlf.basics.batches import batch_size
from pmlf.checks.caches import made_from_synthetic_inputs, with_constants_made
from pmlf.checks.comparison import Subject
from pmlf.checks.first_look import FirstLook
from pmlf.engine.anatomy import Anatomy
from pmlf.engine.clipper import ClippedSum, Clipper
from pmlf.engine.momentum import SampleMomentum
from pmlf.engine.owners import MicroBatch, groups
from pmlf.engine.passes import Rows
from pmlf.engine.pending import PendingSum
from pmlf.engine.questions import Questions
from pmlf.engine.swap import ModelWritten
from pmlf.mechanism.points import History
from pmlf.parallel.failure import RankFailed
from pmlf.parallel.processes import Processes
from pmlf.parallel.shards import Failure, GatheredHistory, ParameterShards, PartialSums
from pmlf.step.point_passes import Piece, PointPasses
from pmlf.step.settings import StepSettings


@dataclass(frozen=True)
class Accumulation:
    """The stages before the noise, in order."""

    subject: Subject
    clipper: Clipper
    first_look: FirstLook
    passes: PointPasses
    settings: StepSettings
    processes: Processes

    def numbered(self, pending: PendingSum, batch: Any, samples: Tensor | None, units: Any) -> MicroBatch | None:
        """A micro-batch on the model's device, with its samples' numbers and units; None if it is empty."""
        if isinstance(batch, Failure):
            raise batch.error
        size = batch_size(batch)
        if size == 0:
            return None
        if samples is None and self.passes.augmentation is not None:
            samples = pending.numbers(size, self.processes.rank, self.processes.size)
        given = MicroBatch(batch, size, samples).owned(units, of_units=self.settings.units)
        given = given.on(self.subject.model.get_parameter(self.subject.plan.parameters[0]).device)
        pending.refuse_again(given.units)
        return given

    def added(
        self, anatomy: Anatomy, pending: PendingSum, given: MicroBatch, step: int, history: History, asked: Questions
    ) -> PendingSum:
        """The pending sum and a micro-batch's clipped momenta, beside it: the pending one stays as it is. Whether all
        was in order is asked on the way, and answered before anything is added up."""
        try:
            total = self._added(anatomy, pending, given, step, history, asked)
        except ModelWritten:
            if not made_from_synthetic_inputs(self.subject, given.batch):
                raise
            total = self._added(Anatomy(self.subject.model), pending, given, step, history, Questions())
        return pending.followed(total, given.size, given.units)

    def _added(
        self, anatomy: Anatomy, pending: PendingSum, given: MicroBatch, step: int, history: History, asked: Questions
    ) -> ClippedSum:
        rows = self.first_look.at(given.batch, given.size, anatomy.modes)
        points = self.settings.method.points.at(step)

        def momenta() -> Iterator[SampleMomentum]:
            for group in groups(self.subject.plan, given.size, given.counts):
                momentum = self.clipper.momentum(group.samples, len(points), asked)
                for part, owners in group.passes:
                    number = self._number(pending)
                    piece = Piece(given.part(part), part, owners, step=step, number=number, rows=rows)
                    self.passes.add_to(momentum, piece, points, anatomy, history)
                    if part.stop == given.size:  # no code of the user runs after this
                        pending.refuse_written(anatomy.parameters, asked)
                yield momentum

        trained = {name: anatomy.parameters[name] for name in self.subject.plan.parameters}
        return self.clipper.add(momenta(), pending.total, trained)[0]

    def _number(self, pending: PendingSum) -> int:
        """The number of the next micro-batch, among those of all ranks."""
        return pending.micro_batches * self.processes.size + self.processes.rank

    def added_to_shards(
        self,
        pending: PendingSum,
        micro_batch: Callable[[], MicroBatch | None],
        step: int,
        history: History,
        shards: ParameterShards,
    ) -> PendingSum:
        """One round of all ranks: every rank's micro-batch, if it has one, is added to the pending sum in place.

        A rank without samples, or one that fails, takes part in all that the ranks do together; then it raises.

        Args:
            pending: The pending sum, of this rank's part of the parameters.
            micro_batch: The micro-batch, None if this rank has none left. Raises if it may not be accumulated.
            step: The step.
            history: This rank's part of the past iterates.
            shards: The ranks' parts.
        """
        named = {name: self.subject.model.get_parameter(name) for name in self.subject.plan.parameters}
        current = {name: shards.local_part(parameter) for name, parameter in named.items()}
        total = pending.total or self.clipper.nothing_of(current)
        error: BaseException | None = None
        given = None
        try:
            given = micro_batch()
        except BaseException as found:
            error = found
        with shards.whole_parameters():
            points = self.settings.method.points.at(step)
            gathered, sums = GatheredHistory(shards, history, current, points), PartialSums(shards, total.values)
            whole = {name: self.subject.model.get_parameter(name) for name in current}
            try:
                if given is not None:
                    self._take_round(pending, given, step, gathered, sums, whole)
            except RankFailed:
                raise
            except BaseException as found:
                error = found
            gathered.finish()
            sums.finish(whole)
        if error is not None:
            raise error
        return pending.followed(
            total, 0 if given is None else given.size, frozenset() if given is None else given.units
        )

    def _take_round(
        self,
        pending: PendingSum,
        given: MicroBatch,
        step: int,
        history: GatheredHistory,
        sums: PartialSums,
        whole: Mapping[str, Tensor],
    ) -> None:
        plan, points = self.subject.plan, self.settings.method.points.at(step)
        group, *others = groups(plan, given.size, given.counts)
        if others or len(group.passes) > 1:
            raise ValueError(f"a micro-batch has {given.size} samples: give at most {plan.in_a_pass} at a time")
        rows, ((part, owners),) = self._looked_at(given), group.passes
        momentum = self.clipper.momentum(group.samples, len(points))
        piece = Piece(given.part(part), part, owners, step=step, number=self._number(pending), rows=rows)
        self.passes.add_to(momentum, piece, points, Anatomy(self.subject.model), history)
        history.refuse_written()
        self.clipper.write(momentum, whole, sums.take)

    def _looked_at(self, given: MicroBatch) -> Rows:
        def look() -> Rows:
            return self.first_look.at(given.batch, given.size, Anatomy(self.subject.model).modes)

        return with_constants_made(self.subject, lambda: given.batch, look)
