"""The watch: at every step a few samples run again alone, and must add the same as in their batch.

Checks before training see the first samples only. The watch sees samples of every step, in training mode, with the same
parameters and the same dropout. A batch of a new form is always watched.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pmlf.basics.batches import Signature, batch_size, select, signature, to_dtype
from pmlf.basics.generators import generator_states, same_states
from pmlf.checks.apart import OTHER_FORM, Apart, apart_from
from pmlf.checks.comparison import Subject
from pmlf.checks.draws import Unknown, constant_draws
from pmlf.checks.replay import CannotFollow, RecordedDraws, ReplayedDraws
from pmlf.engine.anatomy import Anatomy
from pmlf.engine.arithmetic import full_precision
from pmlf.engine.factors import Factors
from pmlf.engine.layers import Contribution, UnsupportedModel
from pmlf.engine.momentum import contributions
from pmlf.engine.passes import Pass
from pmlf.engine.questions import Questions
from pmlf.mechanism.noise import Randomness, torch_seeded

_SAMPLES = 2  # of a logical batch, on average, and at most of a micro-batch
_SAMPLES_PROVEN = 1  # the same where independence is proven
_ALLOWED = 1e-3  # of what a sample adds; where its batch is proven to mix nothing
_ALLOWED_UNPROVEN = 2e-4
_ALLOWED_EXACT = 1e-6  # in float64

Part = tuple[str, tuple[Tensor, ...]]  # a parameter, and one sample's share of a contribution to its gradient


class Watch:
    """Chooses samples, records what they add in their batch, and compares it with what they add alone."""

    def __init__(self, subject: Subject, randomness: Randomness, expected_batch_size: float) -> None:
        self._subject = subject
        self._randomness = randomness
        self._expected_batch_size = expected_batch_size
        self._seen: set[tuple[int, Signature]] = set()
        self._draws = True  # whether the loss draws randomness, as far as is known

    def choice(
        self, batch: Any, part: slice, step: int, micro_batch: int, points: int, *, proven: bool
    ) -> tuple[WatchedPass | None, int]:
        """The samples of a pass to watch, if any, and the evaluation point; at least one if the batch's form is new."""
        size = part.stop - part.start
        stream = self._randomness.stream("watch", step, micro_batch, part.start)
        most = _SAMPLES_PROVEN if proven else _SAMPLES
        count = min(most, len(stream.chosen(size, min(1.0, most / self._expected_batch_size))))
        form = size, signature(batch)
        if form not in self._seen:
            self._seen.add(form)
            count = max(1, count)
        if size == 1 or count == 0 or points == 0:
            return None, 0
        samples = [int(place) for place in stream.words(size).argsort()[:count]]  # of a random order
        return watched_pass(self._subject, samples, size, recording=self._draws), int(
            stream.words(1)[0] % np.uint64(points)
        )

    def compare(self, taken: WatchedPass, point: PointPass, questions: Questions, *, proven: bool) -> None:
        """Run the watched samples of a pass again, each alone; raise if one adds something else, when the questions are
        answered."""
        if taken.drew and not taken.recording:
            taken = point.taken_again(self._subject, taken.samples, recording=True)
        self._draws = taken.drew
        allowed = _ALLOWED if proven else _ALLOWED_UNPROVEN
        try:
            for sample in taken.samples:
                apart = point.apart(self._subject, taken, sample, questions)
                questions.ask(apart.numbers, partial(self._judge, apart, taken, sample, point, allowed))
        except CannotFollow:
            self._hold_constant(taken, point, allowed)

    def _judge(
        self, apart: Apart, taken: WatchedPass, sample: int, point: PointPass, allowed: float, read: list[float]
    ) -> None:
        try:
            if apart.distance(read) > allowed and self._differs(taken, sample, point):
                _refuse()
        except CannotFollow:
            self._hold_constant(taken, point, allowed)

    def _hold_constant(self, taken: WatchedPass, point: PointPass, allowed: float) -> None:
        """Compare with all random draws made constant, where they cannot be repeated for a part of a batch."""
        try:
            with constant_draws():
                again = point.taken_again(self._subject, taken.samples, recording=False)
                for sample in again.samples:
                    if point.difference(self._subject, again, sample) > allowed and self._differs(again, sample, point):
                        _refuse()
        except Unknown as error:
            raise UnsupportedModel(
                "the loss draws random numbers that cannot be drawn again for one sample, so the watch cannot see "
                "whether samples influence each other: draw by dropout, rand or randn, with axis 0 for samples"
            ) from error

    def _differs(self, taken: WatchedPass, sample: int, point: PointPass) -> bool:
        """Whether the difference remains in float64, or, if the model does not run in float64, for two other samples.

        Rounding may put an activation on the other side of a kink, or choose another expert.
        """
        try:
            exact, wide = self._subject.in_double(), point.in_double()
            again = wide.taken_again(exact, [sample], recording=taken.recording)
            return wide.difference(exact, again, sample) > _ALLOWED_EXACT
        except (CannotFollow, Unknown):
            raise
        except Exception:  # a model that cannot be copied, a loss that cannot be taken in float64
            others = [(sample + shift) % taken.size for shift in (1, max(1, taken.size // 2))]
            again = point.taken_again(self._subject, others, recording=taken.recording)
            return all(point.difference(self._subject, again, other) > _ALLOWED_UNPROVEN for other in others)


@dataclass(frozen=True, kw_only=True)
class PointPass:
    """A batch at one evaluation point, which can run again: parameters, seed of the random draws, weight."""

    values: Mapping[str, Tensor]
    batch: Any
    seed: int
    weight: float

    def in_double(self) -> PointPass:
        values = {name: value.to(torch.float64) for name, value in self.values.items()}
        return replace(self, values=values, batch=to_dtype(self.batch, torch.float64))

    def taken_again(self, subject: Subject, samples: list[int], *, recording: bool) -> WatchedPass:
        """The whole batch once more, with what some of its samples add."""
        again = watched_pass(subject, samples, batch_size(self.batch), recording=recording)
        with torch_seeded(self.seed, self._device), again:
            for name, contribution in self._contributions(subject, self.batch):
                again.take(name, contribution)
        return again

    def difference(self, subject: Subject, taken: WatchedPass, sample: int) -> float:
        """The relative difference between what a sample adds alone and in its batch."""
        apart = self.apart(subject, taken, sample)
        return apart.distance(apart.numbers.tolist())

    def apart(self, subject: Subject, taken: WatchedPass, sample: int, questions: Questions | None = None) -> Apart:
        """The same, not read from the device yet."""
        single = select(self.batch, slice(sample, sample + 1))
        with torch_seeded(self.seed, self._device), taken.replayed(sample):
            parts: list[Part] = []
            for name, found in self._contributions(subject, single, questions):
                _take(parts, name, found, 0, formed=taken.formed)
        alone, together = parts, taken.parts[sample]
        if taken.formed:
            alone, together = _matched(alone, together)
        if [name for name, _ in alone] != [name for name, _ in together]:
            return OTHER_FORM
        return apart_from([part for _, part in together], [part for _, part in alone])

    def _contributions(
        self, subject: Subject, batch: Any, questions: Questions | None = None
    ) -> Iterator[tuple[str, Contribution]]:
        anatomy, samples = Anatomy(subject.model), batch_size(batch)
        plan, loss_fn = subject.plan, subject.loss_fn
        return contributions(
            Pass(anatomy, plan, loss_fn, self.values, batch, samples, self.weight, questions=questions)
        )

    @property
    def _device(self) -> torch.device:
        return next(iter(self.values.values())).device


def watched_pass(subject: Subject, samples: list[int], size: int, *, recording: bool) -> WatchedPass:
    """A `WatchedPass` that follows some samples of a batch, on the device and in the way of the subject."""
    device = next(subject.model.parameters()).device
    formed = subject.plan.learned.by_operations
    return WatchedPass(samples, size, device, recording=recording, formed=formed)


class WatchedPass(ExitStack):
    """A pass of a batch that is being watched: its random draws, and what some samples add."""

    def __init__(self, samples: list[int], size: int, device: torch.device, *, recording: bool, formed: bool) -> None:
        super().__init__()
        self._device = device
        self.formed = formed  # whether gradients are compared, or what they are made of
        self.samples, self.size, self.recording = samples, size, recording
        self.parts: dict[int, list[Part]] = {sample: [] for sample in samples}
        self._recorded = RecordedDraws()
        self._moved = False

    @property
    def drew(self) -> bool:
        """Whether the loss drew randomness."""
        return bool(self._recorded.draws) or self._moved

    def __enter__(self) -> WatchedPass:
        super().__enter__()
        if self.recording:
            self.enter_context(self._recorded)
        else:
            self.callback(self._look_at, generator_states(self._device))
        return self

    def _look_at(self, before: tuple[Tensor, ...]) -> None:
        self._moved = not same_states(before, generator_states(self._device))

    def take(self, name: str, contribution: Contribution) -> None:
        for sample, parts in self.parts.items():
            _take(parts, name, contribution, sample, formed=self.formed)

    def replayed(self, sample: int) -> ReplayedDraws | ExitStack:
        """The same draws for one sample alone."""
        return ReplayedDraws(self._recorded.draws, sample, self.size) if self._recorded.draws else ExitStack()


def _matched(some: list[Part], others: list[Part]) -> tuple[list[Part], list[Part]]:
    """Both with the same parameters in the same order. One that a sample does not reach (an expert, a bias of keys) has
    a gradient of zero, rounding of zero, or none."""
    by_name, by_name_other = dict(some), dict(others)
    names = sorted({*by_name, *by_name_other})

    def all_of(mine: dict[str, tuple[Tensor, ...]], other: dict[str, tuple[Tensor, ...]]) -> list[Part]:
        return [(name, mine.get(name) or (torch.zeros_like(other[name][0]),)) for name in names]

    return all_of(by_name, by_name_other), all_of(by_name_other, by_name)


def _take(parts: list[Part], name: str, contribution: Contribution, sample: int, *, formed: bool) -> None:
    """Add one sample's share of a contribution; to its gradient, if that is formed: operations may have other uses for
    a single sample than for several."""
    if not formed:
        parts.append((name, _share(contribution, sample)))
        return
    if isinstance(contribution, Factors):
        row = contribution.of_one(sample)
    else:
        row = full_precision(contribution[sample]).flatten()
    for place, (known, (before,)) in enumerate(parts):
        if known == name:
            parts[place] = name, (before + row,)
            return
    parts.append((name, (row.clone(),)))


def _share(contribution: Contribution, sample: int) -> tuple[Tensor, ...]:
    """One sample's factors, or its gradient if that is formed: copies, because the originals may be overwritten."""
    if isinstance(contribution, Factors):
        return tuple(side.clone() for side in contribution.sides(slice(sample, sample + 1)))
    return (contribution[sample].clone(),)


def _refuse() -> None:
    raise UnsupportedModel(
        "a sample's gradient depends on the other samples of its batch: alone, with the same parameters and random "
        "draws, it is different; look for an operation across axis 0, in the model or in loss_fn, that not every batch "
        "reaches, or for draws by NumPy's or Python's generators, which cannot be made again"
    )
