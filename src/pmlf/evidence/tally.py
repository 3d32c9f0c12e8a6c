"""Counting events: how many of each kind every run has spent.

The events of a plan are numbered from 0: first its named queries in their order, then its steps.
With cyclic sampling in b groups a step concerns the records of one group alone. The events of a run are then the steps
of the group that had most.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from pmlf.mechanism.accounting import Event

RECORD = "record"  # the unit of privacy, unless records belong to larger ones


@dataclass(frozen=True, kw_only=True)
class Query:
    """A named part of a plan before its steps, such as "mean": so many releases of one kind.

    Attributes:
        name: What is released.
        event: One release: its noise multiplier and sampling rate.
        count: The number of releases.
    """

    name: str
    event: Event
    count: int


@dataclass(frozen=True, kw_only=True)
class PrivacyPlan:
    """What a run is going to spend: its queries, then T steps, and the epsilon at which it must stop.

    Attributes:
        event: One step: its noise multiplier and sampling rate.
        steps: The number of steps planned, T.
        delta: The delta at which epsilon is computed.
        target_epsilon: The epsilon that the run must not pass; None if the noise is given instead.
        queries: What is released before the steps, in order.
        bands: b, the number of groups of cyclic sampling and of bands of the noise; 1 is plain Poisson sampling.
        unit: What an event concerns: a record, or the name of a larger unit, such as "patient".

    >>> step, mean = (Event(noise_multiplier=z, sample_rate=1.0) for z in (20.0, 25.0))
    >>> plan = PrivacyPlan(event=step, steps=30, delta=1e-5, target_epsilon=1.0,
    ...                    queries=(Query(name="mean", event=mean, count=2),))
    >>> plan.releases, plan.event_at(1) == mean, plan.event_at(2) == step
    (32, True, True)
    """

    event: Event
    steps: int
    delta: float
    target_epsilon: float | None
    queries: tuple[Query, ...] = ()
    bands: int = 1
    unit: str = RECORD

    def __post_init__(self) -> None:
        if self.queries and self.bands > 1:
            raise ValueError(f"bands={self.bands} with queries: a plan with shaped noise has steps alone")
        if self.event.overflow and self.bands > 1:
            raise ValueError(f"bands={self.bands} with a largest batch: truncated sampling is for white noise alone")

    @property
    def parts(self) -> tuple[tuple[Event, int], ...]:
        """The kind and number of events of every query, and at last of the steps."""
        return (*((query.event, query.count) for query in self.queries), (self.event, -(-self.steps // self.bands)))

    @property
    def releases(self) -> int:
        """The number of releases planned: queries and steps."""
        return sum(query.count for query in self.queries) + self.steps

    @property
    def events(self) -> Mapping[Event, int]:
        """The number of events of each kind."""
        return events_of(self, tuple(count for _, count in self.parts))

    def part_of(self, number: int) -> int:
        """The place in `parts` of the event of this number. Events beyond the plan are steps."""
        for place, query in enumerate(self.queries):
            if number < query.count:
                return place
            number -= query.count
        return len(self.queries)

    def event_at(self, number: int) -> Event:
        """The kind of the event of this number."""
        return self.parts[self.part_of(number)][0]


def events_of(plan: PrivacyPlan, counts: Sequence[int]) -> Counter[Event]:
    """The number of events of each kind, if so many of each part of a plan happened."""
    found: Counter[Event] = Counter()
    for (event, _), count in zip(plan.parts, counts, strict=True):
        found[event] += count
    return +found


@dataclass(frozen=True, kw_only=True)
class RunStart:
    """A start of a run from its first step, under one plan. Certificates list the starts of runs as "trials".

    Attributes:
        run: The run's name.
        beginning: A random name of this start. A run that starts again under its name has another.
        plan: What it is going to spend.
    """

    run: str
    beginning: str
    plan: PrivacyPlan

    @property
    def key(self) -> tuple[str, Event, int, tuple[Query, ...], int]:
        """The run, its kinds and numbers of events: equal for all starts of one run under one plan."""
        return self.run, self.plan.event, self.plan.steps, self.plan.queries, self.plan.bands


@dataclass(frozen=True, kw_only=True)
class Session:
    """A run from the moment it starts or resumes spending, as a line of a ledger stores it.

    Attributes:
        start: The start that its events belong to. A resumed run keeps it.
        replayable: Whether a seed makes repeated steps release the same numbers. Such a step counts once for one
            start. Without a seed every step counts every time.
        first_step: The number of the session's first event.
        groups: The name of the groups that cyclic sampling draws from in turn; "" for plain Poisson sampling. A run
            that resumes without a seed has new groups.
    """

    start: RunStart
    replayable: bool
    first_step: int = 0
    groups: str = ""

    def continues(self, other: Session | None) -> bool:
        """Whether both are of the same start and groups, whatever their first steps."""
        return other is not None and replace(self, first_step=0) == replace(other, first_step=0)


class Tally:
    """The events spent so far. A replayed event counts once, any other event every time.

    >>> tally = Tally()
    >>> event = Event(noise_multiplier=1.0, sample_rate=0.1)
    >>> plan = PrivacyPlan(event=event, steps=9, delta=1e-5, target_epsilon=None)
    >>> tally.begin(Session(start=RunStart(run="first", beginning="only", plan=plan), replayable=True))
    >>> for step in (0, 1, 1):
    ...     tally.add(step)
    >>> tally.events[event]
    2
    """

    def __init__(self) -> None:
        self._starts: Counter[RunStart] = Counter()
        self._parts: Counter[tuple[RunStart, int]] = Counter()
        self._events: Counter[Event] = Counter()
        self._runs: Counter[str] = Counter()
        self._groups: dict[tuple[RunStart, str], list[int]] = {}  # releases by group: one, if sampling is not cyclic
        self._replayed: dict[tuple[str, str, Event, tuple[Query, ...]], set[int]] = {}
        self._session: Session | None = None
        self._next_step = 0

    @property
    def starts(self) -> Mapping[RunStart, int]:
        """The number of releases of each start of a run, in the order in which they began."""
        return self._starts

    @property
    def events(self) -> Mapping[Event, int]:
        """The number of events of each kind, over all runs."""
        return self._events

    def parts_of(self, start: RunStart) -> tuple[int, ...]:
        """The number of events of each part of a start's plan: every query, and at last the steps."""
        return tuple(self._parts[start, place] for place in range(len(start.plan.parts)))

    def events_of(self, run: str) -> int:
        """The number of events of a run."""
        return sum(sum(self.parts_of(start)) for start in self._starts if start.run == run)

    def releases_of(self, run: str) -> int:
        """The number of releases of a run, each counted as often as it happened with fresh noise."""
        return self._runs[run]

    def releases_by_group(self, beginning: str) -> dict[str, list[int]]:
        """The number of releases in each group, by the name of the groups, in one start of a run."""
        found: dict[str, list[int]] = {}
        for (start, name), counts in self._groups.items():
            if start.beginning == beginning:
                found[name] = [sum(pair) for pair in zip(found.get(name, [0] * len(counts)), counts, strict=True)]
        return found

    def replayable(self, start: RunStart) -> bool:
        """Whether the events of a start in the tally come from a seed."""
        return _replays_by(start) in self._replayed

    def begin(self, session: Session) -> None:
        """Count the following events for this session."""
        self._session = session
        self._next_step = session.first_step

    def add(self, step: int) -> None:
        """Count the event of this number: a step's own number, if the plan has no queries."""
        session = self._session
        assert session is not None
        start = session.start
        self._next_step = step + 1
        if self.replays(session, step):
            return
        cost = self.cost(session, step)
        if session.replayable:
            self._replayed.setdefault(_replays_by(start), set()).add(step)
        self._starts[start] += 1
        self._parts[start, start.plan.part_of(step)] += cost
        self._events[start.plan.event_at(step)] += cost
        self._groups.setdefault((start, session.groups), [0] * start.plan.bands)[step % start.plan.bands] += 1
        self._runs[start.run] += 1

    def cost(self, session: Session, step: int) -> int:
        """1 if this release adds an event; 0 if it is counted already, or another group has had more releases.

        A record is in one of the groups, and in another one of each other sampler's: their most releases add up.
        """
        if self.replays(session, step):
            return 0
        groups = self._groups.get((session.start, session.groups), [0])
        return int(groups[step % len(groups)] == max(groups))

    def replays(self, session: Session, step: int) -> bool:
        """Whether this step releases numbers that are counted already, so that it does not count again."""
        if not session.replayable:
            return False
        return step in self._replayed.get(_replays_by(session.start), ())

    def unfinished_step(self) -> int | None:
        """The step that an incomplete last line stands for; None if no run has begun, so nothing was spent."""
        if self._session is None:
            return None
        if self._session.replayable:  # it has no steps beyond its plan
            return min(self._next_step, self._session.start.plan.releases - 1)
        return self._next_step


def _replays_by(start: RunStart) -> tuple[str, str, Event, tuple[Query, ...]]:
    """What two sessions have in common if a seed makes them release the same numbers."""
    return start.run, start.beginning, start.plan.event, start.plan.queries
