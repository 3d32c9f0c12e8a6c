"""The passes of a micro-batch at the evaluation points, which give per-sample momentum: sensitive, all of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, Protocol

from torch import Tensor

from pmlf.checks.comparison import Subject
from pmlf.checks.watch import PointPass, Watch
from pmlf.engine.anatomy import Anatomy
from pmlf.engine.augmentation import Augmentation
from pmlf.engine.momentum import SampleMomentum
from pmlf.engine.owners import MicroBatch, Owners
from pmlf.engine.passes import Pass, Rows
from pmlf.mechanism.noise import Randomness, keyed_uniforms, torch_seeded
from pmlf.mechanism.points import Point


class Iterates(Protocol):
    """Where the parameters of an evaluation point come from."""

    def evaluate(self, point: Point, current: Sequence[Tensor]) -> list[Tensor]: ...


@dataclass(frozen=True)
class Piece:
    """Samples of one micro-batch that share their passes.

    Attributes:
        given: The samples, numbered for augmentation.
        part: Which samples of their micro-batch they are.
        owners: The units that the samples belong to; None where each sample is by itself.
        step: The step.
        number: The number of the micro-batch in its logical batch, over all ranks.
        rows: How the rows of a layer are known to be the samples' own.
    """

    given: MicroBatch
    part: slice
    owners: Owners | None
    _: KW_ONLY
    step: int
    number: int
    rows: Rows

    @property
    def batch(self) -> Any:
        return self.given.batch

    @property
    def size(self) -> int:
        size: int = self.part.stop - self.part.start
        return size


@dataclass(frozen=True, kw_only=True)
class PointPasses:
    """Runs pieces at evaluation points. Dropout and augmentation follow from step, piece and sample numbers alone.

    Attributes:
        subject: The model, its plan and its loss.
        randomness: The source of dropout and augmentation.
        augmentation: A random change to each sample.
        watch: Runs a few samples again alone; None for none.
    """

    subject: Subject
    randomness: Randomness
    augmentation: Augmentation | None
    watch: Watch | None

    def add_to(
        self, momentum: SampleMomentum, piece: Piece, points: Sequence[Point], anatomy: Anatomy, history: Iterates
    ) -> SampleMomentum:
        """v of every sample += its gradients at the points, weighted."""
        names, plan, proven = self.subject.plan.parameters, self.subject.plan, piece.rows == "their own"
        parameters = [anatomy.parameters[name] for name in names]
        watched, watched_point = None, 0
        if self.watch is not None:
            watched, watched_point = self.watch.choice(
                piece.batch, piece.part, piece.step, piece.number, len(points), proven=proven
            )
        for index, (point, view) in enumerate(zip(points, self._views(piece, len(points)), strict=True)):
            values = dict(zip(names, history.evaluate(point, parameters), strict=True))
            seed = self.randomness.seed_for("dropout", piece.step, piece.number, piece.part.start, index)
            one = Pass(anatomy, plan, self.subject.loss_fn, values, view, piece.size, point.weight, piece.rows)
            if watched is None or index != watched_point:
                with torch_seeded(seed, parameters[0].device):
                    momentum.add_pass(one, owners=piece.owners)
                continue
            with torch_seeded(seed, parameters[0].device), watched:
                momentum.add_pass(one, watched.take, piece.owners)
            assert self.watch is not None
            at_point = PointPass(values=values, batch=view, seed=seed, weight=point.weight)
            self.watch.compare(watched, at_point, momentum.questions, proven=proven)
        return momentum

    def _views(self, piece: Piece, points: int) -> Sequence[Any]:
        """The batch as each evaluation point sees it; its samples are numbered if there is an augmentation."""
        if self.augmentation is None:
            return [piece.batch] * points
        numbers = piece.given.samples
        assert numbers is not None
        drawn = points if self.augmentation.per_point else 1
        streams = [self.randomness.stream("augmentation", piece.step, point) for point in range(drawn)]
        uniforms = [keyed_uniforms(stream, numbers, self.augmentation.draws) for stream in streams]
        change = self.augmentation.function if self.subject.plan.gradients == "ghost" else self.augmentation.apart
        views = [change(piece.batch, each) for each in uniforms]
        return views if self.augmentation.per_point else views * points
