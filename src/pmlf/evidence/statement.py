"""What a certificate states, read strictly: exact names, exact types, and numbers that agree with each other.

Whoever changes a certificate can also renew its digest, so the digest does not prove that the content is true. This
module reads the numbers that the epsilon depends on, and refuses a certificate in which they contradict each other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pmlf.evidence.description import (
    ADAPTIVE,
    LARGEST,
    OPTIONAL,
    OVERFLOW,
    Contradiction,
    bands_of,
    check_description,
    selection_of,
    unit_of,
)
from pmlf.evidence.json_object import JsonObject
from pmlf.evidence.mechanism_words import MechanismWords
from pmlf.evidence.tally import PrivacyPlan, Query, RunStart, events_of
from pmlf.mechanism.accounting import ACCOUNTANTS, Event
from pmlf.mechanism.selection import Selection

FORMAT = 1
PLD = "PLD: the steps were planned before the run and are all alike"
CAPPED = (
    "PLD up to the target epsilon: the run was begun more than once, or steps were done again, which may follow from "
    "results; holds if the target epsilon was fixed before that"
)
FILTER = (
    "RDP filter (Feldman & Zrnic 2021) up to the target epsilon: steps or runs were added after results could be seen; "
    "holds if the target epsilon was fixed before that"
)
SELECTED = (
    "Renyi divergences of the best of a random number of runs (Papernot & Steinke 2021), which pays for all of them; "
    "holds if neither another run nor their number was released"
)
NOT_ACCOUNTED_FOR = (
    "tuning and runs on the same records that are not among the trials",
    "seeds or checkpoints chosen after seeing results",
    "preprocessing fitted on the private records",
    "stopping early because of results (the epsilon at planned steps covers it)",
)
_OTHER_ACCOUNTANT = 1e-3  # relative: the target may have been met by another version of the accountant
_LIMITS = "not_accounted_for"
BANDS, STEPS, EVENTS = "bands", "steps", "released_events"  # entries of shaped noise alone


@dataclass(frozen=True, kw_only=True)
class Statement:
    """The numbers of a certificate that its epsilon depends on.

    Attributes:
        epsilon: The epsilon that the certificate states; None if it states none.
        plan: What the run planned to spend.
        composition: How its events compose: `PLD`, `CAPPED` or `FILTER`.
        at_planned_steps: Epsilon of the planned steps, by accountant.
        at_released_steps: Epsilon of the released steps, by accountant.
        released_steps: The number of steps that the run released.
        released_events: The number of events of those steps: with cyclic sampling, of the group that had most.
        released_queries: The number of releases of each of the plan's queries.
        steps_of_the_model: The number of steps that the model has taken.
        trials: The number of steps of every trial.
        trial_queries: The number of releases of each query of every trial.
        trial_events: The number of events of every trial: with cyclic sampling, the steps of the group that had most.
        in_a_ledger: Whether the events are in a ledger.
        selection: Of how many runs this is the best one; None if it is the only one.
    """

    epsilon: float | None
    plan: PrivacyPlan
    composition: str
    at_planned_steps: Mapping[str, float]
    at_released_steps: Mapping[str, float]
    released_steps: int
    released_events: int
    released_queries: tuple[int, ...]
    steps_of_the_model: int
    trials: Mapping[RunStart, int]
    trial_queries: Mapping[RunStart, tuple[int, ...]]
    trial_events: Mapping[RunStart, int]
    in_a_ledger: bool
    selection: Selection | None = None

    @property
    def events(self) -> Mapping[Event, int]:
        """The number of events of each kind, over all trials."""
        found: Counter[Event] = Counter()
        for trial, count in self.trial_events.items():
            found += events_of(trial.plan, (*self.trial_queries[trial], count))
        return found

    @property
    def released(self) -> Mapping[Event, int]:
        """The number of events of each kind that the run released."""
        return events_of(self.plan, (*self.released_queries, self.released_events))

    def check(self) -> None:
        """Check that the numbers agree with each other.

        Raises:
            Contradiction: They do not.
        """
        spent, planned = sum(self.trials.values()), self.plan.steps
        by_run, events_by_run = Counter[str](), Counter[str]()
        for trial, count in self.trials.items():
            by_run[trial.run] += count
            events_by_run[trial.run] += self.trial_events[trial]
        if self.steps_of_the_model > min(planned, spent):
            raise Contradiction(
                f"the model has {self.steps_of_the_model} steps, of {planned} planned and {spent} events in the trials"
            )
        if self.released_steps not in {0, *by_run.values()}:
            raise Contradiction(f"released_steps={self.released_steps} is the number of steps of no run in the trials")
        if (self.released_steps, self.released_events) not in [
            (0, 0),
            *((by_run[r], events_by_run[r]) for r in by_run),
        ]:
            raise Contradiction(f"{EVENTS}={self.released_events} is the number of events of no run in the trials")
        if not self.in_a_ledger and len(by_run) > 1:
            raise Contradiction("it names no dataset, so it has no ledger, and lists trials of several runs")
        for trial, count in self.trials.items():
            events, bands = self.trial_events[trial], trial.plan.bands
            if not -(-count // bands) <= events <= count:
                raise Contradiction(f"run {trial.run!r} has {count} steps in {bands} groups, and {events} events")
        self._check_queries()
        if (self.selection is not None) != (self.composition == SELECTED):
            raise Contradiction("its composition and its selection of the best run do not belong together")
        if self.composition in (PLD, SELECTED):
            self._check_as_planned()
        else:
            self._check_plans(spent)
            self._check_bounded()

    def _check_queries(self) -> None:
        """The queries that the run released are those of its trials."""
        by_run: dict[str, list[tuple[int, ...]]] = {}
        for trial, counts in self.trial_queries.items():
            if trial.plan.queries == self.plan.queries:
                by_run.setdefault(trial.run, []).append(counts)
        sums = [tuple(map(sum, zip(*counts, strict=True))) for counts in by_run.values()]
        if self.released_queries not in [(0,) * len(self.plan.queries), *sums]:
            raise Contradiction("the released queries are those of no run in the trials")

    def _check_as_planned(self) -> None:
        """PLD: one start of one plan, with at most the planned number of queries and steps."""
        counts = (*self.released_queries, self.released_steps)
        for trial, count in self.trials.items():
            if trial.plan != self.plan or (*self.trial_queries[trial], count) != counts:
                raise Contradiction(
                    "it composes by PLD, for one run as planned, and its trial has another mechanism, plan, delta, "
                    "target or number of events than the certificate"
                )
        if len(self.trials) != min(sum(counts), 1):
            raise Contradiction(
                f"it composes by PLD, for one run as planned, with {self.released_steps} released steps in "
                f"{len(self.trials)} trials"
            )
        events = (*self.released_queries, self.released_events)
        above = any(count > planned for count, (_, planned) in zip(events, self.plan.parts, strict=True))
        if above or self.released_steps > self.plan.steps:
            raise Contradiction(
                f"it composes by PLD, as planned, and {self.released_steps} steps were released of {self.plan.steps} "
                "planned, or more queries than planned"
            )
        target = self.plan.target_epsilon
        if self.epsilon is None:
            raise Contradiction("it composes by PLD, which always gives an epsilon, and states none")
        if target is not None and self.epsilon > target * (1 + _OTHER_ACCOUNTANT):
            raise Contradiction(f"epsilon={self.epsilon} is above target_epsilon={target}")

    def _check_plans(self, spent: int) -> None:
        """CAPPED: one plan, started again or with repeated steps. FILTER: several plans, this run's perhaps not yet."""
        keys = {trial.key for trial in self.trials}
        plan = self.plan
        own = len(keys) == 1 and {key[1:] for key in keys} == {(plan.event, plan.steps, plan.queries, plan.bands)}
        if self.composition == CAPPED and not (own and spent == self.released_steps):
            raise Contradiction("it composes by PLD up to the target, for one plan, and its trials have others")
        if self.composition == FILTER and (not keys or (own and self.released_steps > 0)):
            raise Contradiction("it composes by an RDP filter, for several plans, and its trials have only its own")

    def _check_bounded(self) -> None:
        """The target holds if every trial had it, or a lower one, at the same delta."""
        if self.epsilon is None:
            return
        if self.epsilon != self.plan.target_epsilon:
            raise Contradiction(
                f"epsilon={self.epsilon} is not target_epsilon={self.plan.target_epsilon}, which alone holds if steps "
                "or runs were added"
            )
        for trial in self.trials:
            target, delta = trial.plan.target_epsilon, trial.plan.delta
            if target is None or target > self.epsilon or delta != self.plan.delta:
                raise Contradiction(
                    f"run {trial.run!r} among the trials had target_epsilon={target} at delta={delta}, which does not "
                    f"bound it by {self.epsilon} at {self.plan.delta}"
                )


def read_statement(document: Mapping[str, Any]) -> Statement:
    """Read the statement of a certificate and check it.

    Args:
        document: The certificate.

    Returns:
        The numbers that its epsilon depends on.

    Raises:
        ValueError: A name is missing or unknown, or a value has another type or is out of range.
        Contradiction: Its numbers contradict each other.
    """
    entries = JsonObject(document, "the certificate")
    entries.require(*_NAMES, optional=(*OPTIONAL, _QUERIES, EVENTS))
    entries.same("certificate", FORMAT)
    if entries.texts(_LIMITS)[: len(NOT_ACCOUNTED_FOR)] != NOT_ACCOUNTED_FOR:  # a run may add what it knows of
        entries.same(_LIMITS, list(NOT_ACCOUNTED_FOR))
    check_description(entries)
    bands, unit = bands_of(entries.part("method")), unit_of(entries)
    words = MechanismWords(bands=bands, adaptive=entries.has(ADAPTIVE), truncated=entries.has(LARGEST), unit=unit)
    for name, value in words.document().items():
        entries.same(name, value)
    trials, trial_queries, trial_events = _trials(entries.parts("trials"), unit)
    statement = Statement(
        epsilon=entries.optional("epsilon", entries.amount),
        plan=_plan(entries, bands, unit),
        composition=entries.one_of("composition", (PLD, CAPPED, FILTER, SELECTED)),
        at_planned_steps=entries.amounts("epsilon_at_planned_steps", ACCOUNTANTS),
        at_released_steps=entries.amounts("epsilon_at_released_steps", ACCOUNTANTS),
        released_steps=entries.count("released_steps"),
        released_events=entries.count(EVENTS if bands > 1 else "released_steps"),
        steps_of_the_model=entries.count("steps_of_the_model"),
        released_queries=_released(entries),
        trials=trials,
        trial_queries=trial_queries,
        trial_events=trial_events,
        in_a_ledger=entries.optional("dataset", entries.text) is not None,
        selection=selection_of(entries),
    )
    statement.check()
    return statement


def _plan(entries: JsonObject, bands: int, unit: str) -> PrivacyPlan:
    return PrivacyPlan(
        event=entries.event(),
        steps=entries.count("planned_steps", least=1),
        delta=entries.probability("delta"),
        target_epsilon=entries.optional("target_epsilon", entries.positive),
        queries=tuple(_query(each) for each in _listed_queries(entries)),
        bands=bands,
        unit=unit,
    )


def _listed_queries(entries: JsonObject) -> list[JsonObject]:
    return entries.parts(_QUERIES) if entries.has(_QUERIES) else []


def _query(entries: JsonObject) -> Query:
    entries.require("name", "noise_multiplier", "sample_rate", "planned", "released")
    return Query(name=entries.text("name"), event=entries.event(), count=entries.count("planned", least=1))


def _released(entries: JsonObject) -> tuple[int, ...]:
    return tuple(each.count("released") for each in _listed_queries(entries))


def _trials(
    listed: list[JsonObject], unit: str
) -> tuple[Mapping[RunStart, int], Mapping[RunStart, tuple[int, ...]], Mapping[RunStart, int]]:
    """The steps of every trial, its queries, and the events of its steps."""
    steps: dict[RunStart, int] = {}
    queries: dict[RunStart, tuple[int, ...]] = {}
    events: dict[RunStart, int] = {}
    for entries in listed:
        entries.require(*_TRIAL, optional=(_QUERIES, BANDS, STEPS, OVERFLOW))
        bands = entries.count(BANDS, least=2) if entries.has(BANDS) else 1
        trial = RunStart(run=entries.text("run"), beginning=entries.text("beginning"), plan=_plan(entries, bands, unit))
        if trial in steps:
            raise Contradiction(f"its trials list one start of the run {trial.run!r} twice")
        queries[trial] = _released(entries)
        events[trial] = entries.count("events", least=0 if any(queries[trial]) else 1)
        steps[trial] = entries.count(STEPS, least=1) if bands > 1 else events[trial]
    return steps, queries, events


_NAMES = (
    "certificate",
    _LIMITS,
    "mechanism",
    "unit_of_privacy",
    "adjacency",
    "sampler",
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
_TRIAL = (
    "run",
    "beginning",
    "noise_multiplier",
    "sample_rate",
    "planned_steps",
    "target_epsilon",
    "delta",
    "events",
)
_QUERIES = "queries"  # what is released before the steps, if anything
