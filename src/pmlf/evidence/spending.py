"""The budget guard: what a run has spent, and whether it may take another step."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from pmlf.evidence.ledger import Ledger, Position
from pmlf.evidence.tally import Session, Tally, Trial
from pmlf.mechanism import accounting
from pmlf.mechanism.accounting import Event


class Unwritten:
    """Stands in for a ledger where none is kept: the same count, gone with the process."""

    dataset = None
    position = None

    def __init__(self) -> None:
        self.run = secrets.token_hex(8)
        self.tally = Tally()
        self._session: Session | None = None

    def spend(self, session: Session, *, step: int) -> None:
        if not session.continues(self._session):
            self._session = session
            self.tally.begin(session)
        self.tally.add(step)


class Spending:
    """The events of a run, and of those before it in its ledger, held against the target epsilon.

    Events of one kind compose by PLD. Once their kind or plan was chosen after seeing results (other runs in the
    ledger, a plan made longer) they compose by an RDP filter, which allows for that. Where they are more than one plan
    of one beginning, how many there are may follow from results: what holds then is the target at which they must end.
    """

    def __init__(
        self,
        *,
        event: Event,
        planned_steps: int,
        replayable: bool,
        delta: float,
        target_epsilon: float | None,
        ledger: Ledger | None,
    ) -> None:
        self._ledger = ledger or Unwritten()
        self._session = Session(
            run=self._ledger.run,
            beginning=secrets.token_hex(8),
            **asdict(event),
            planned_steps=planned_steps,
            target_epsilon=target_epsilon,
            delta=delta,
            replayable=replayable,
            first_step=0,
        )
        self._delta = delta
        self._affordable = 0  # so many events of this kind are known to fit beside
        self._beside: dict[Event, int] = {}  # these
        self.target_epsilon = target_epsilon

    def __getstate__(self) -> None:
        raise TypeError("a budget is spent once: it cannot be copied or pickled, save its state_dict()")

    @property
    def dataset(self) -> str | None:
        """The ledger's."""
        return self._ledger.dataset

    @property
    def tally(self) -> Tally:
        """What every run in the ledger has spent, this one too."""
        return self._ledger.tally

    @property
    def run_events(self) -> int:
        """How often this run has spent: its steps, and those that were lost and done again with fresh noise."""
        return self.tally.events_of(self._session.run)

    @property
    def filtered(self) -> bool:
        """Whether a mechanism or a plan may depend on what was released before, so that an RDP filter composes."""
        return any(trial.plan != self._session.trial.plan for trial in self.tally.trials)

    @property
    def as_planned(self) -> bool:
        """Whether all events are of one beginning and of one plan, so that their number follows from no result."""
        one_beginning = all(trial == self._session.trial for trial in self.tally.trials)
        return one_beginning and self.run_events <= self._session.planned_steps

    def claim(self) -> float | None:
        """The epsilon that holds for everything in the ledger, whatever was seen on the way; None if there is none."""
        if self.as_planned:
            s = self._session
            return accounting.epsilon(**asdict(s.event), steps=s.planned_steps, delta=self._delta)
        target = self.target_epsilon
        if target is None or not all(self._bounded_by(target, trial) for trial in self.tally.trials):
            return None
        return target if self.epsilon() <= target else None

    def _bounded_by(self, target: float, trial: Trial) -> bool:
        """Whether a trial had a target too, at this delta and no higher: one that was set, or lowered, later bounds
        nothing."""
        return trial.target_epsilon is not None and trial.target_epsilon <= target and trial.delta == self._delta

    @property
    def guards_longer_plans(self) -> bool:
        """A plan made longer is an adaptive choice: it takes a ledger to know of it, and a target to stop at."""
        return isinstance(self._ledger, Ledger) and self.target_epsilon is not None

    def affords(self, step: int) -> bool:
        """Whether a step leaves the total within the target epsilon; without a target it always does."""
        if self.target_epsilon is None or self.tally.replays(self._session, step):
            return True
        event = self._session.event
        count = self.tally.events.get(event, 0) + 1
        beside = {other: n for other, n in self.tally.events.items() if other != event}
        if count > self._affordable or beside != self._beside:  # others may spend from the same ledger in between
            self._beside = beside
            self._affordable = accounting.affordable_steps(
                event,
                at_most=max(count, self._session.planned_steps),
                target_epsilon=self.target_epsilon,
                delta=self._delta,
                accountant="rdp" if self.filtered else "pld",
                spent=beside,
            )
        return count <= self._affordable

    def spend(self, step: int) -> None:
        """Write down that a step is about to be released."""
        self._ledger.spend(self._session, step=step)

    def epsilon(self) -> float:
        """Epsilon spent by all events in the ledger."""
        if self.filtered:
            return accounting.filter_epsilon(self.tally.events, delta=self._delta)
        event = self._session.event
        return accounting.epsilon(**asdict(event), steps=self.tally.events.get(event, 0), delta=self._delta)

    def state_dict(self) -> dict[str, Any]:
        position = self._ledger.position
        return {
            "events": self.tally.events_since(self._session.beginning),
            "beginning": self._session.beginning,
            "position": None if position is None else asdict(position),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state saved with the same ledger, or with none: what was spent since then stays spent."""
        position, events = state["position"], state["events"]
        if (position is None) != isinstance(self._ledger, Unwritten):
            raise ValueError(
                "the state was saved without a ledger, so its steps are not in this one: go on without a ledger"
                if position is None
                else "the state was saved with a ledger: go on with the same one, so that no step is lost from it"
            )
        if isinstance(self._ledger, Ledger):
            self._ledger.require(Position(**position))
        self._session = replace(self._session, beginning=state["beginning"])
        if isinstance(self._ledger, Unwritten):
            for step in range(self.tally.events_since(self._session.beginning), events):
                self._ledger.spend(self._session, step=step)


def continued_noise(ledger: Ledger) -> float | None:
    """The noise multiplier with which the ledger's run has begun; None for a new run."""
    return next((trial.event.noise_multiplier for trial in ledger.tally.trials if trial.run == ledger.run), None)
