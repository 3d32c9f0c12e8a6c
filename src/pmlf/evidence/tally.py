"""Counting events: how many of each kind every run has spent."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

from pmlf.mechanism.accounting import Event


@dataclass(frozen=True, kw_only=True)
class PrivacyPlan:
    """What a run is going to spend: T events of one kind at one delta, and the epsilon at which it must stop.

    Attributes:
        event: One release: its noise multiplier and sampling rate.
        steps: The number of releases planned, T.
        delta: The delta at which epsilon is computed.
        target_epsilon: The epsilon that the run must not pass; None if the noise is given instead.
    """

    event: Event
    steps: int
    delta: float
    target_epsilon: float | None


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A run that starts once from its first step, under one plan.

    Attributes:
        run: The run's name.
        beginning: A random name of its start. A run that starts again under its name has another.
        plan: What it is going to spend.
    """

    run: str
    beginning: str
    plan: PrivacyPlan

    @property
    def key(self) -> tuple[str, Event, int]:
        """The run, its kind of event and its number of steps: equal for all starts of one run under one plan."""
        return self.run, self.plan.event, self.plan.steps


@dataclass(frozen=True, kw_only=True)
class Session:
    """A run from the moment it starts or resumes spending, as a line of a ledger stores it.

    Attributes:
        run: The run's name.
        beginning: A random name of the run's start. A resumed run keeps it.
        sample_rate: The sampling rate of its events.
        noise_multiplier: The noise multiplier of its events.
        planned_steps: The number of releases planned.
        target_epsilon: The epsilon that it must not pass; None if the noise is given instead.
        delta: The delta at which epsilon is computed.
        replayable: Whether a seed makes repeated steps release the same numbers. Such a step counts once for one
            beginning. Without a seed every step counts every time.
        first_step: The first step of the session.
    """

    run: str
    beginning: str
    sample_rate: float
    noise_multiplier: float
    planned_steps: int
    target_epsilon: float | None
    delta: float
    replayable: bool
    first_step: int

    @classmethod
    def of(cls, trial: Trial, *, replayable: bool) -> Session:
        """The session of a trial, from its first step on."""
        plan = trial.plan
        return cls(
            run=trial.run,
            beginning=trial.beginning,
            sample_rate=plan.event.sample_rate,
            noise_multiplier=plan.event.noise_multiplier,
            planned_steps=plan.steps,
            target_epsilon=plan.target_epsilon,
            delta=plan.delta,
            replayable=replayable,
            first_step=0,
        )

    @property
    def event(self) -> Event:
        """The kind of event that it spends."""
        return Event(noise_multiplier=self.noise_multiplier, sample_rate=self.sample_rate)

    @property
    def trial(self) -> Trial:
        """The trial that its events belong to."""
        plan = PrivacyPlan(
            event=self.event, steps=self.planned_steps, delta=self.delta, target_epsilon=self.target_epsilon
        )
        return Trial(run=self.run, beginning=self.beginning, plan=plan)

    def continues(self, other: Session | None) -> bool:
        """Whether both are the same trial, whatever their first steps."""
        return other is not None and replace(other, first_step=self.first_step) == self


class Tally:
    """The events spent so far. A replayed event counts once, any other event every time.

    >>> tally = Tally()
    >>> event = Event(noise_multiplier=1.0, sample_rate=0.1)
    >>> plan = PrivacyPlan(event=event, steps=9, delta=1e-5, target_epsilon=None)
    >>> tally.begin(Session.of(Trial(run="first", beginning="only", plan=plan), replayable=True))
    >>> for step in (0, 1, 1):
    ...     tally.add(step)
    >>> tally.events[event]
    2
    """

    def __init__(self) -> None:
        self._trials: Counter[Trial] = Counter()
        self._events: Counter[Event] = Counter()
        self._runs: Counter[str] = Counter()
        self._beginnings: Counter[str] = Counter()
        self._replayed: dict[tuple[str, str, Event], set[int]] = {}
        self._session: Session | None = None
        self._next_step = 0

    @property
    def trials(self) -> Mapping[Trial, int]:
        """The number of events of each trial, in the order in which the trials began."""
        return self._trials

    @property
    def events(self) -> Mapping[Event, int]:
        """The number of events of each kind, over all runs."""
        return self._events

    def events_of(self, run: str) -> int:
        """The number of events of a run."""
        return self._runs[run]

    def events_since(self, beginning: str) -> int:
        """The number of events of one start of a run."""
        return self._beginnings[beginning]

    def replayable(self, trial: Trial) -> bool:
        """Whether the events of a trial in the tally come from a seed."""
        return (trial.run, trial.beginning, trial.plan.event) in self._replayed

    def begin(self, session: Session) -> None:
        """Count the following events for this session."""
        self._session = session
        self._next_step = session.first_step

    def add(self, step: int) -> None:
        """Count the event of a step."""
        session = self._session
        assert session is not None
        self._next_step = step + 1
        if self.replays(session, step):
            return
        if session.replayable:
            self._replayed.setdefault((session.run, session.beginning, session.event), set()).add(step)
        self._trials[session.trial] += 1
        self._events[session.event] += 1
        self._runs[session.run] += 1
        self._beginnings[session.beginning] += 1

    def replays(self, session: Session, step: int) -> bool:
        """Whether this step releases numbers that are counted already, so that it does not count again."""
        if not session.replayable:
            return False
        return step in self._replayed.get((session.run, session.beginning, session.event), ())

    def unfinished_step(self) -> int | None:
        """The step that an incomplete last line stands for; None if no run has begun, so nothing was spent."""
        if self._session is None:
            return None
        if self._session.replayable:  # it has no steps beyond its plan
            return min(self._next_step, self._session.planned_steps - 1)
        return self._next_step
