"""What a certificate states, read strictly: exact names, exact types, and numbers that do not contradict each other.

Whoever changes a certificate can seal it again, so the digest says nothing of its truth. What is read here is taken
apart into the few numbers that the epsilon rests on, and each of them must fit all others.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from pmlf.engine.momentum import CLIPPINGS
from pmlf.evidence.entries import Entries
from pmlf.mechanism.accounting import ACCOUNTANTS, Event
from pmlf.mechanism.noise import SeededRandomness

FORMAT = 1
MECHANISM = "Poisson-subsampled Gaussian, once per step"
UNIT = "one record of the training set"
ADJACENCY = "add or remove one record"
SAMPLER = "Poisson"
PLD = "PLD: the steps were planned before the run and are all alike"
CAPPED = (
    "PLD up to the target epsilon: the run was begun more than once, or steps were done again, which may follow from "
    "results; holds if the target epsilon was fixed before that"
)
FILTER = (
    "RDP filter (Feldman & Zrnic 2021) up to the target epsilon: steps or runs were added after results could be seen; "
    "holds if the target epsilon was fixed before that"
)
NOT_ACCOUNTED_FOR = (
    "tuning and runs on the same records that are not among the trials",
    "seeds or checkpoints chosen after seeing results",
    "preprocessing fitted on the private records",
    "stopping early because of results (the epsilon at planned steps covers it)",
)
_FIXED = {
    "certificate": FORMAT,
    "mechanism": MECHANISM,
    "unit_of_privacy": UNIT,
    "adjacency": ADJACENCY,
    "sampler": SAMPLER,
    "not_accounted_for": list(NOT_ACCOUNTED_FOR),
}
_ROUNDING = 1e-9  # relative
_OTHER_ACCOUNTANT = 1e-3  # relative: a target was met by the accountant of another version


class Contradiction(ValueError):
    """What a certificate states in one place is not what it states in another."""


@dataclass(frozen=True, kw_only=True)
class StatedTrial:
    """One beginning of a run under one plan, and how many events it has spent."""

    run: str
    beginning: str
    event: Event
    planned_steps: int
    target_epsilon: float | None
    delta: float
    events: int

    @classmethod
    def read(cls, entries: Entries) -> Self:
        entries.require(
            "run",
            "beginning",
            "noise_multiplier",
            "sample_rate",
            "planned_steps",
            "target_epsilon",
            "delta",
            "events",
        )
        return cls(
            run=entries.text("run"),
            beginning=entries.text("beginning"),
            event=entries.event(),
            planned_steps=entries.count("planned_steps", least=1),
            target_epsilon=entries.optional("target_epsilon", entries.positive),
            delta=entries.probability("delta"),
            events=entries.count("events", least=1),
        )

    @property
    def plan(self) -> tuple[str, Event, int]:
        return self.run, self.event, self.planned_steps


@dataclass(frozen=True, kw_only=True)
class Statement:
    """The numbers of a certificate on which its epsilon rests."""

    epsilon: float | None
    delta: float
    target_epsilon: float | None
    composition: str
    at_planned_steps: Mapping[str, float]
    at_released_steps: Mapping[str, float]
    planned_steps: int
    released_steps: int
    steps_of_the_model: int
    event: Event
    trials: tuple[StatedTrial, ...]
    in_a_ledger: bool

    @classmethod
    def read(cls, document: Mapping[str, Any]) -> Self:
        """The statement of a whole certificate.

        Raises:
            ValueError: a name is missing or unknown, or a value is of another type or out of range.
            Contradiction: its numbers do not fit each other.
        """
        entries = Entries(document, "the certificate")
        entries.require(*_NAMES, optional=(_SPEC, _INDEPENDENCE, _WATCHED))
        for name, value in _FIXED.items():
            entries.same(name, value)
        _check_description(entries)
        statement = cls(
            epsilon=entries.optional("epsilon", entries.amount),
            delta=entries.probability("delta"),
            target_epsilon=entries.optional("target_epsilon", entries.positive),
            composition=entries.one_of("composition", (PLD, CAPPED, FILTER)),
            at_planned_steps=entries.amounts("epsilon_at_planned_steps", ACCOUNTANTS),
            at_released_steps=entries.amounts("epsilon_at_released_steps", ACCOUNTANTS),
            planned_steps=entries.count("planned_steps", least=1),
            released_steps=entries.count("released_steps"),
            steps_of_the_model=entries.count("steps_of_the_model"),
            event=entries.event(),
            trials=tuple(StatedTrial.read(part) for part in entries.parts("trials")),
            in_a_ledger=entries.optional("dataset", entries.text) is not None,
        )
        statement._check()
        return statement

    @property
    def events(self) -> Mapping[Event, int]:
        """All events of the trials, by kind."""
        found: Counter[Event] = Counter()
        for trial in self.trials:
            found[trial.event] += trial.events
        return found

    def _check(self) -> None:
        """Refuse numbers of which not all can be true."""
        spent = sum(trial.events for trial in self.trials)
        by_run = Counter[str]()
        for trial in self.trials:
            by_run[trial.run] += trial.events
        if self.steps_of_the_model > min(self.planned_steps, spent):
            raise Contradiction(
                f"the model has {self.steps_of_the_model} steps, of {self.planned_steps} planned and {spent} events in "
                "the trials"
            )
        if self.released_steps not in {0, *by_run.values()}:
            raise Contradiction(f"released_steps={self.released_steps} is the number of events of no run in the trials")
        if not self.in_a_ledger and len(by_run) > 1:
            raise Contradiction("it names no dataset, so has no ledger, and lists trials of several runs")
        if self.composition == PLD:
            self._check_as_planned()
        else:
            self._check_plans(spent)
            self._check_bounded()

    def _check_as_planned(self) -> None:
        """PLD: one beginning of one plan, and no more steps than it has."""
        for trial in self.trials:
            stated = (self.event, self.planned_steps, self.delta, self.target_epsilon, self.released_steps)
            if (trial.event, trial.planned_steps, trial.delta, trial.target_epsilon, trial.events) != stated:
                raise Contradiction(
                    "it composes by PLD, for one run as planned, and its trial has another mechanism, plan, delta, "
                    "target or number of events than the certificate"
                )
        if len(self.trials) != min(self.released_steps, 1):
            raise Contradiction(
                f"it composes by PLD, for one run as planned, with {self.released_steps} released steps in "
                f"{len(self.trials)} trials"
            )
        if self.released_steps > self.planned_steps:
            raise Contradiction(
                f"it composes by PLD, as planned, and {self.released_steps} steps were released of "
                f"{self.planned_steps} planned"
            )
        if self.epsilon is None:
            raise Contradiction("it composes by PLD, which always gives an epsilon, and states none")
        if self.target_epsilon is not None and self.epsilon > self.target_epsilon * (1 + _OTHER_ACCOUNTANT):
            raise Contradiction(f"epsilon={self.epsilon} is above target_epsilon={self.target_epsilon}")

    def _check_plans(self, spent: int) -> None:
        """CAPPED: one plan, begun or done again. FILTER: several plans, of which this run's may be yet to begin."""
        plans = {trial.plan for trial in self.trials}
        own = len(plans) == 1 and {plan[1:] for plan in plans} == {(self.event, self.planned_steps)}
        if self.composition == CAPPED and not (own and spent == self.released_steps):
            raise Contradiction("it composes by PLD up to the target, for one plan, and its trials have others")
        if self.composition == FILTER and (not plans or (own and self.released_steps > 0)):
            raise Contradiction("it composes by an RDP filter, for several plans, and its trials have only its own")

    def _check_bounded(self) -> None:
        """What holds is the target, if all trials had it, or a lower one, at this delta."""
        if self.epsilon is None:
            return
        if self.epsilon != self.target_epsilon:
            raise Contradiction(
                f"epsilon={self.epsilon} is not target_epsilon={self.target_epsilon}, which alone holds where steps or "
                "runs were added"
            )
        for trial in self.trials:
            if trial.target_epsilon is None or trial.target_epsilon > self.epsilon or trial.delta != self.delta:
                raise Contradiction(
                    f"run {trial.run!r} among the trials had target_epsilon={trial.target_epsilon} at "
                    f"delta={trial.delta}, which does not bound it by {self.epsilon} at {self.delta}"
                )


_NAMES = (
    *_FIXED,
    "dataset",
    "epsilon",
    "delta",
    "target_epsilon",
    "composition",
    "epsilon_at_planned_steps",
    "epsilon_at_released_steps",
    "planned_steps",
    "released_steps",
    "steps_of_the_model",
    "records",
    "expected_batch_size",
    "sample_rate",
    "noise_multiplier",
    "clip_norm",
    "clipping",
    "method",
    "randomness",
    "reproducible_noise",
    "trials",
    "versions",
    "digest",
)
_SPEC = "spec_digest"  # of the run folder, where there is one
_INDEPENDENCE, _WATCHED = "independence_of_samples", "watched_at_every_step"
_VERSIONS = ("python", "torch", "dp-accounting", "dp-pmlf")


def _check_description(entries: Entries) -> None:
    """What the epsilon does not rest on: sizes, method, randomness, versions."""
    records, size = entries.count("records", least=1, most=2**63), entries.positive("expected_batch_size")
    rate = entries.event().sample_rate
    if not math.isclose(size / records, rate, rel_tol=_ROUNDING):
        raise Contradiction(f"sample_rate={rate} is not expected_batch_size / records = {size / records}")
    entries.positive("clip_norm")
    entries.one_of("clipping", CLIPPINGS)
    seeded = entries.text("randomness").startswith(SeededRandomness.description)
    if entries.has(_INDEPENDENCE):
        entries.text(_INDEPENDENCE)
    if entries.has(_WATCHED):
        entries.truth(_WATCHED)
    if entries.truth("reproducible_noise") != seeded:
        raise Contradiction("reproducible_noise is not what its randomness says")
    method = entries.part("method")
    method.require("name", "points", "weights_normalised", "filter")
    method.text("name")
    method.truth("weights_normalised")
    for point in method.parts("points"):
        point.require("coefficients", "weight")
        point.numbers("coefficients")
        point.number("weight")
    low_pass = method.part("filter")
    low_pass.require("a", "b", "corrected")
    low_pass.numbers("a")
    low_pass.numbers("b")
    low_pass.truth("corrected")
    versions = entries.part("versions")
    versions.require(*_VERSIONS)
    for name in _VERSIONS:
        versions.text(name)
    entries.text("digest")
    if entries.has(_SPEC):
        entries.text(_SPEC)
