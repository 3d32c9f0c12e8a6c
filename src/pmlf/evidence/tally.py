"""Events counted: who spent how many of which kind."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

from pmlf.mechanism.accounting import Event


@dataclass(frozen=True, kw_only=True)
class Session:
    """A run from the moment it begins, or goes on, to spend: its mechanism, its plan, its first step.

    `beginning` names the first step of all that these follow from: a run that is begun again, under its name and with
    its plan, has another. With a seed the steps are `replayable`: done again from a state of the same beginning they
    release the same numbers, and count once. Without a seed each step counts each time.
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

    @property
    def event(self) -> Event:
        return Event(noise_multiplier=self.noise_multiplier, sample_rate=self.sample_rate)

    @property
    def trial(self) -> Trial:
        return Trial(
            run=self.run,
            beginning=self.beginning,
            event=self.event,
            planned_steps=self.planned_steps,
            target_epsilon=self.target_epsilon,
            delta=self.delta,
            replayable=self.replayable,
        )

    def continues(self, other: Session | None) -> bool:
        """Whether both are one run with one mechanism and one plan, whatever the steps they began at."""
        return other is not None and replace(other, first_step=self.first_step) == self


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One beginning of a run under one mechanism and plan; what it has spent is counted by `Tally.trials`."""

    run: str
    beginning: str
    event: Event
    planned_steps: int
    target_epsilon: float | None
    delta: float
    replayable: bool

    @property
    def plan(self) -> tuple[str, Event, int]:
        """What trials have in common that are beginnings of one run."""
        return self.run, self.event, self.planned_steps


class Tally:
    """Events counted: fresh ones each time, replayed ones once. Every count is at hand, however many there are."""

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
        """What every run has spent, in the order in which they began."""
        return self._trials

    @property
    def events(self) -> Mapping[Event, int]:
        """How many events of each kind, over all runs."""
        return self._events

    def events_of(self, run: str) -> int:
        return self._runs[run]

    def events_since(self, beginning: str) -> int:
        return self._beginnings[beginning]

    def begin(self, session: Session) -> None:
        """From here on the events are this session's."""
        self._session = session
        self._next_step = session.first_step

    def add(self, step: int) -> None:
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
        """Whether this step of the run is counted already and will not be counted again."""
        if not session.replayable:
            return False
        return step in self._replayed.get((session.run, session.beginning, session.event), ())

    def unfinished_step(self) -> int | None:
        """The step that a line cut short stands for; None where no run had begun, so that nothing was spent."""
        if self._session is None:
            return None
        if self._session.replayable:  # it has no steps beyond its plan
            return min(self._next_step, self._session.planned_steps - 1)
        return self._next_step
