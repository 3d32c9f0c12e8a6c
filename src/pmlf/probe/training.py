"""The training of a probe: one event after the other, each recorded before it is released."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pmlf import methods
from pmlf.evidence.budget import BudgetGuard
from pmlf.evidence.certificate import CertifiedRun, certificate
from pmlf.mechanism.filters import FilterMemory
from pmlf.mechanism.noise import Randomness
from pmlf.mechanism.points import Point, Points
from pmlf.probe.conditioning import BlockConditioning, mean_sum, moment_sum, scale_of
from pmlf.probe.heads import HEADS, clipped_
from pmlf.probe.products import ConditionedRows, Products
from pmlf.probe.release import SensitiveSum
from pmlf.probe.rows import FeatureRows
from pmlf.probe.settings import MEAN, MOMENTS, ProbeSettings

_FASTEST = 2.0  # the default learning rate is at most so many times d / smoothness
_INDEPENDENT = "by construction: the gradient of a record is w (x) (p - y), from that record and released values"


@dataclass(frozen=True, kw_only=True)
class ProbeModel:
    """A trained linear model: all of it is released.

    Attributes:
        conditioning: How every block of features is conditioned.
        intercept: The share of the constant in a record's squared norm.
        weights: One row per coordinate of a conditioned record, one column per output.
    """

    conditioning: tuple[BlockConditioning, ...]
    intercept: float
    weights: Tensor

    def scores(self, rows: FeatureRows) -> Tensor:
        """The scores of records, (n, K)."""
        found = torch.empty(rows.records, self.weights.shape[1])
        conditioned = ConditionedRows(rows, self.conditioning, intercept=self.intercept)
        for places, (scores,) in Products([conditioned], [self.weights]):
            found[places] = scores
        return found


@dataclass(frozen=True, kw_only=True)
class StepGradient:
    """What the sum of a step is taken of: sum_i clip(w_i (x) (p_i - y_i), C).

    Attributes:
        conditioned: The conditioned records w.
        targets: Class indices (n,), or numbers (n, K).
        weights: The weights that p is predicted with.
        settings: Head and clip norm.
    """

    conditioned: ConditionedRows
    targets: Tensor
    weights: Tensor
    settings: ProbeSettings

    def residuals(self, places: slice | NDArray[np.int64], scores: Tensor) -> Tensor:
        """p - y of some records, scaled so that no record's gradient exceeds the clip norm."""
        found = HEADS[self.settings.head].residuals(scores, self.targets[places])
        return clipped_(found, self.conditioned.norms[places], self.settings.clip_norm)


def gradient_sums(steps: Sequence[StepGradient], chosen: NDArray[np.int64] | None) -> list[SensitiveSum]:
    """sum_i clip(w_i (x) (p_i - y_i), C) over the chosen records, all of them if None, of every step in one pass."""
    products = Products([step.conditioned for step in steps], [step.weights for step in steps], chosen)
    for places, scores in products:
        products.add([step.residuals(places, of) for step, of in zip(steps, scores, strict=True)])
    return [
        SensitiveSum(values=total, sensitivity=step.settings.clip_norm)
        for step, total in zip(steps, products.totals(), strict=True)
    ]


class ProbeTraining:
    """The events of a plan in their order: mean and second moments of every block, then the steps.

    Guarantees: an event is in the budget before it is released; everything in the state is released; what depends on
    the records without noise never leaves `advance`.

    Args:
        rows: The features.
        targets: Class indices (n,), or numbers (n, K); NaN excludes a record.
        settings: The settings.
        budget: The budget, whose plan is `settings.plan()`.
        randomness: Where noise and draws come from.
    """

    def __init__(
        self, rows: FeatureRows, targets: Tensor, settings: ProbeSettings, budget: BudgetGuard, randomness: Randomness
    ) -> None:
        self.settings, self.budget = settings, budget
        self._rows, self._targets, self._randomness = rows, targets, randomness
        self._released: dict[str, list[Tensor]] = {MEAN: [], MOMENTS: []}
        self._weights = torch.zeros(rows.width + (settings.intercept > 0), settings.outputs, dtype=torch.float64)
        self._average = torch.zeros_like(self._weights)
        self._memory = FilterMemory(settings.low_pass)
        self._conditioned: ConditionedRows | None = None
        self._drawn: tuple[int, NDArray[np.int64] | None] | None = None
        self.done = 0

    @property
    def total(self) -> int:
        """The number of events planned: queries and steps."""
        return self.budget.plan.releases

    @property
    def steps_done(self) -> int:
        """The number of steps taken."""
        return max(0, self.done - (self.total - self.settings.steps))

    @property
    def stage(self) -> str:
        """What is released next, in words."""
        part = self.budget.plan.part_of(self.done)
        queries = self.budget.plan.queries
        return queries[part].name if part < len(queries) else "steps"

    @property
    def learning_rate(self) -> float:
        """The learning rate: the one given, or the default, which is computed from public numbers.

        The noise in the score of a unit vector, summed over all steps, has the standard deviation
        eta z C / B * gain * sqrt(sum_t pace_t^2). The default makes it `score_noise`, and is at most 2 d / smoothness.
        """
        given = self.settings.learning_rate
        if given is not None:
            return float(given)
        settings, z = self.settings, self.budget.plan.event.noise_multiplier
        paces = math.sqrt(math.fsum(settings.pace(step) ** 2 for step in range(settings.steps)))
        gain = abs(settings.low_pass.dc_gain) or 1.0
        by_noise = settings.score_noise * settings.divisor / (z * settings.clip_norm * gain * paces)
        return min(by_noise, _FASTEST * self._rows.width / HEADS[settings.head].smoothness / gain)

    @property
    def _ready(self) -> bool:
        """Whether there is a next event, and room for it in the budget."""
        return self.done < self.total and self.budget.affords(self.done)

    def advance(self) -> bool:
        """Release the next event of the plan.

        Returns:
            False if there is none, or if the budget leaves no room for it.
        """
        return advance_together([self])

    def _release_moments(self) -> None:
        """Release the next event, which is the mean or the second moments of a block."""
        released = self._released[self.stage]
        block = self.settings.blocks[len(released)]
        if self.stage == MEAN:
            total = mean_sum(self._rows, block)
        else:
            clip = self.settings.moment_clip / math.sqrt(block.width)
            total = moment_sum(self._rows, block, self._mean(len(released)), clip)
        released.append(self._with_noise(total, self.done) / self._rows.records)
        self.done += 1

    def _step_gradient(self) -> StepGradient:
        """What the next step sums up."""
        if self._conditioned is None:
            self._conditioned = ConditionedRows(self._rows, self._conditioning(), intercept=self.settings.intercept)
        return StepGradient(
            conditioned=self._conditioned, targets=self._targets, weights=self._weights, settings=self.settings
        )

    def _release_step(self, total: SensitiveSum) -> None:
        """Release the next event, which is a step: its sum with noise, filtered, moves the weights."""
        step, settings = self.steps_done, self.settings
        (direction,) = self._memory.apply([self._with_noise(total, self.done)], scale=1 / settings.divisor)
        self._weights = self._weights - self.learning_rate * settings.pace(step) * direction
        if settings.steps - step <= self._averaged:
            self._average += self._weights
        self._drawn = None
        self.done += 1

    @property
    def _pass_of(self) -> tuple[object, ...]:
        """What the records of the next step are read by: trainings with equal keys can share a pass over them."""
        if self.settings.batch_size is not None:
            return (id(self),)  # it has a draw of its own
        return (id(self._rows), *((block.start, block.stop) for block in self.settings.blocks))

    def _with_noise(self, total: SensitiveSum, number: int) -> Tensor:
        """Record the event, then add its noise: the only place where either happens."""
        self.budget.spend(number)
        noise_multiplier = self.budget.plan.event_at(number).noise_multiplier
        return total.released(noise_multiplier, self._randomness, "probe", number)

    def _draw(self) -> NDArray[np.int64] | None:
        """The records of the next step, None for all; a step that failed keeps its draw."""
        if self.settings.batch_size is None:
            return None
        step = self.steps_done
        if self._drawn is None:
            stream = self._randomness.stream("sampling", step)
            self._drawn = step, stream.chosen(self._rows.records, self.settings.rate)
        return self._drawn[1]

    @property
    def _averaged(self) -> int:
        """The number of iterates in the average."""
        return math.ceil(self.settings.averaging * self.settings.steps)

    def _mean(self, place: int) -> Tensor:
        means = self._released[MEAN]
        width = self.settings.blocks[place].width
        return means[place] if means else torch.zeros(width, dtype=torch.float64)

    def _conditioning(self) -> tuple[BlockConditioning, ...]:
        moments = self._released[MOMENTS]
        return tuple(
            BlockConditioning(
                block=block,
                weight=block.weight,
                mean=self._mean(place),
                scale=scale_of(block, moments[place] if moments else None, self.settings.whitening),
            )
            for place, block in enumerate(self.settings.blocks)
        )

    def model(self) -> ProbeModel:
        """The model after the steps taken so far: the last iterate, or the mean of the last ones."""
        count = min(self._averaged, self.steps_done - (self.settings.steps - self._averaged))
        weights = self._average / count if count > 0 else self._weights
        return ProbeModel(conditioning=self._conditioning(), intercept=self.settings.intercept, weights=weights.clone())

    def certificate(self) -> dict[str, Any]:
        """The certificate of everything released so far and planned."""
        settings = self.settings
        method = methods.Method(
            name="private probe",
            points=Points(points=(Point(coefficients=(1.0,), weight=1.0),)),
            low_pass=settings.low_pass,
        )
        run = CertifiedRun(
            method=method,
            clipping="flat",
            clip_norm=float(settings.clip_norm),
            records=settings.records,
            expected_batch_size=settings.divisor,
            steps_done=self.steps_done,
            randomness=self._randomness.description,
            reproducible=self._randomness.reproducible,
            independence=_INDEPENDENT,
            watched=False,
        )
        return certificate(run, self.budget)

    def state_dict(self) -> dict[str, Any]:
        """The state between two events: released values only."""
        return {
            "settings": repr(self.settings),
            "noise": [event.noise_multiplier for event, _ in self.budget.plan.parts],
            "done": self.done,
            "released": {name: [tensor.clone() for tensor in found] for name, found in self._released.items()},
            "weights": self._weights.clone(),
            "average": self._average.clone(),
            "filter": self._memory.state_dict(),
            "budget": self.budget.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a saved state; what was spent since then stays spent.

        Args:
            state: What `state_dict` returned.

        Raises:
            ValueError: The state is of other settings or of another ledger.
        """
        if state["settings"] != repr(self.settings):
            raise ValueError("the state is of a probe with other settings: build the probe with the same settings")
        self.budget.load_state_dict(state["budget"])
        self.done = int(state["done"])
        self._released = {name: [tensor.clone() for tensor in found] for name, found in state["released"].items()}
        self._weights, self._average = state["weights"].clone(), state["average"].clone()
        self._memory.load_state_dict(state["filter"])
        self._conditioned = self._drawn = None


def advance_together(trainings: Sequence[ProbeTraining]) -> bool:
    """Release the next event of every training. Steps on the same records share one pass over the features.

    Trainings that began with the same `FeatureRows`, in the same blocks and with full batches, cost little more than
    one of them: to compare settings on held-out records, train them side by side. Each has its own plan, noise and
    budget, and its results are those of training alone up to rounding.

    Args:
        trainings: From `PrivateProbe.begin`.

    Returns:
        False if none has a next event with room for it in its budget.

    >>> from pmlf.probe import FeatureRows, PrivateProbe
    >>> rng = np.random.default_rng(0)
    >>> y = rng.integers(2, size=500)
    >>> rows = FeatureRows(rng.normal(size=(500, 4)) + 3 * y[:, None])
    >>> trainings = [PrivateProbe(classes=2, epsilon=epsilon).begin(rows, y) for epsilon in (1.0, 8.0)]
    >>> while advance_together(trainings):
    ...     pass
    >>> [training.steps_done for training in trainings]
    [30, 30]
    """
    ready = [training for training in trainings if training._ready]
    passes: dict[tuple[object, ...], list[ProbeTraining]] = {}
    for training in ready:
        if training.stage in (MEAN, MOMENTS):
            training._release_moments()
        else:
            passes.setdefault(training._pass_of, []).append(training)
    for together in passes.values():
        sums = gradient_sums([training._step_gradient() for training in together], together[0]._draw())
        for training, total in zip(together, sums, strict=True):
            training._release_step(total)
    return bool(ready)
