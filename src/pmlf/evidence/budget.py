"""The privacy budget of a run: what it has spent, and whether it may take another step."""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from pmlf.evidence.ledger import Ledger, Position
from pmlf.evidence.tally import PrivacyPlan, RunStart, Session, Tally
from pmlf.mechanism import accounting
from pmlf.mechanism.accounting import Event
from pmlf.mechanism.composition import composed_epsilon


class MemoryLedger:
    """Counts events in memory, for a run without a ledger file."""

    dataset: str | None = None
    position: Position | None = None
    on_disk = False

    def __init__(self) -> None:
        self.run = secrets.token_hex(8)
        self.tally = Tally()
        self._session: Session | None = None

    def spend(self, session: Session, *, step: int) -> None:
        """Count the event of a step."""
        if not session.continues(self._session):
            self._session = session
            self.tally.begin(session)
        self.tally.add(step)


@dataclass(frozen=True, kw_only=True)
class SpentSoFar:
    """What a budget knows from its ledger: rank 0 tells it to the other ranks of a run, which have none."""

    run: str
    beginning: str
    tally: Tally
    dataset: str | None
    position: Position | None
    on_disk: bool


class MirroredLedger(MemoryLedger):
    """Counts, on another rank, the events that rank 0 writes to its ledger. No other run can write to that one."""

    def __init__(self, account: SpentSoFar) -> None:
        super().__init__()
        self.run, self.tally = account.run, account.tally
        self.dataset, self.position, self.on_disk = account.dataset, account.position, account.on_disk


class BudgetGuard:
    """Compares what a run, and all runs in its ledger, have spent with the target epsilon.

    Events of one kind compose by PLD. If their kind or their plan may depend on earlier results (other runs in the
    ledger, a plan made longer), they compose by an RDP filter, which allows such choices. If a run starts again or
    repeats steps, the number of events may depend on results; then the target epsilon is what holds.

    Args:
        plan: What the run is going to spend.
        replayable: Whether a seed makes repeated steps release the same numbers.
        ledger: The ledger to write to; None counts in memory.
        mirrored: What rank 0 knows, on any other rank of a run.

    >>> event = Event(noise_multiplier=1.0, sample_rate=0.1)
    >>> guard = BudgetGuard(PrivacyPlan(event=event, steps=20, delta=1e-5, target_epsilon=2.0), replayable=False)
    >>> while guard.affords(guard.run_events):
    ...     guard.spend(guard.run_events)
    >>> guard.run_events, guard.epsilon() <= 2.0
    (2, True)
    """

    def __init__(
        self,
        plan: PrivacyPlan,
        *,
        replayable: bool,
        ledger: Ledger | None = None,
        mirrored: SpentSoFar | None = None,
    ) -> None:
        self._ledger = ledger or (MirroredLedger(mirrored) if mirrored else MemoryLedger())
        self._plan = plan
        others = {start.plan.unit for start in self._ledger.tally.starts} - {plan.unit}
        if others:
            raise ValueError(
                f"the ledger has runs whose unit of privacy is one {sorted(others)[0]}, and this run's is one "
                f"{plan.unit}: what they spend does not add up, so use one ledger per unit of privacy"
            )
        beginning = mirrored.beginning if mirrored else secrets.token_hex(8)
        start = RunStart(run=self._ledger.run, beginning=beginning, plan=plan)
        self._session = Session(start=start, replayable=replayable)
        if self.filtered and any(event.overflow for event in (plan.event, *self.tally.events)):
            raise ValueError(
                "the ledger has other plans, and a run with largest_batch composes as planned alone: give such a run a "
                "ledger of its own"
            )
        self._resumed_unseen = False
        self._affordable = 0  # this many events of the plan's kind fit the target ...
        self._beside: dict[Event, int] = {}  # ... beside these

    def __getstate__(self) -> None:
        raise TypeError("a budget is spent once: it cannot be copied or pickled, save its state_dict()")

    @property
    def plan(self) -> PrivacyPlan:
        """What the run is going to spend. It cannot be replaced."""
        return self._plan

    @property
    def dataset(self) -> str | None:
        """The dataset's name in the ledger; None without a ledger."""
        return self._ledger.dataset

    @property
    def account(self) -> SpentSoFar:
        """What the other ranks of a run mirror."""
        book = self._ledger
        return SpentSoFar(
            run=book.run,
            beginning=self._session.start.beginning,
            tally=book.tally,
            dataset=book.dataset,
            position=book.position,
            on_disk=book.on_disk,
        )

    @property
    def tally(self) -> Tally:
        """What all runs in the ledger have spent, including this one."""
        return self._ledger.tally

    @property
    def run_events(self) -> int:
        """The number of events of this run: its queries and steps, and those that were repeated with fresh noise."""
        return self.tally.events_of(self._session.start.run)

    @property
    def run_steps(self) -> int:
        """The number of steps of this run, each counted as often as it was released with fresh noise."""
        return self.run_parts[-1] if self._plan.bands == 1 else self.tally.releases_of(self._session.start.run)

    @property
    def run_parts(self) -> tuple[int, ...]:
        """The number of events of each part of the plan: of every query, and at last of the steps."""
        run, queries = self._session.start.run, self._plan.queries
        same = [start for start in self.tally.starts if (start.run, start.plan.queries) == (run, queries)]
        own = [self.tally.parts_of(start) for start in same]
        return tuple(map(sum, zip(*own, strict=True))) if own else (0,) * len(self._plan.parts)

    @property
    def filtered(self) -> bool:
        """Whether a plan in the ledger may depend on earlier releases, so that an RDP filter composes."""
        return any(start.key != self._session.start.key for start in self.tally.starts)

    @property
    def as_planned(self) -> bool:
        """Whether all events belong to one start of one plan, so that their number depends on no result."""
        starts = self.tally.starts
        one_beginning = all(start == self._session.start for start in starts)
        within = all(self._within(self.tally.parts_of(start)) for start in starts)
        return one_beginning and within and self.run_steps <= self._plan.steps

    def _within(self, counts: Sequence[int]) -> bool:
        """Whether no part of the plan has more events than planned."""
        return all(count <= planned for count, (_, planned) in zip(counts, self._plan.parts, strict=True))

    @property
    def guards_longer_plans(self) -> bool:
        """Whether a plan may be made longer: this needs a ledger that records it, and a target to stop at."""
        whole = self._plan.event.overflow == 0.0  # no filter has a term for batches that are cut
        return self._ledger.on_disk and self._plan.target_epsilon is not None and whole

    @property
    def resumed_unseen(self) -> bool:
        """Whether the run resumed from a state, and nobody knows what it had released after that."""
        return self._resumed_unseen

    def claim(self) -> float | None:
        """The epsilon that holds for everything in the ledger, whatever results were seen; None if none does."""
        plan = self._plan
        if self.as_planned:
            return composed_epsilon(plan.events, delta=plan.delta)
        target = plan.target_epsilon
        if target is None or not all(self._bounded_by(target, start) for start in self.tally.starts):
            return None
        return target if self.epsilon() <= target else None

    def _bounded_by(self, target: float, start: RunStart) -> bool:
        """Whether a start of a run had a target too, not above this one and at the same delta.

        A target that is set or lowered after results does not bound the starts before it.
        """
        own = start.plan
        return own.target_epsilon is not None and own.target_epsilon <= target and own.delta == self._plan.delta

    def affords(self, step: int, groups: str = "") -> bool:
        """Whether the total stays within the target epsilon after this event; without a target, within the plan.

        Args:
            step: The number of the event in the plan, a step's own number if the plan has no queries.
            groups: The name of the groups that a cycle draws from in turn.
        """
        target, event = self._plan.target_epsilon, self._plan.event
        session = replace(self._session, groups=groups)
        if self.tally.replays(session, step):
            return True
        if target is None:  # a restart can cost an event of shaped noise, which the plan has not
            own = self.tally.parts_of(session.start)[-1] + self.tally.cost(session, step)
            return self._plan.bands == 1 or own <= self._plan.parts[-1][1]
        if self._plan.queries:
            return self._affords_beside_queries(step, target)
        count = self.tally.events.get(event, 0) + self.tally.cost(session, step)
        beside = {other: n for other, n in self.tally.events.items() if other != event}
        if count > self._affordable or beside != self._beside:  # other runs may spend from the same ledger
            self._beside = beside
            self._affordable = accounting.affordable_steps(
                event,
                at_most=max(count, self._plan.parts[-1][1]),
                target_epsilon=target,
                delta=self._plan.delta,
                accountant="rdp" if self.filtered else "pld",
                spent=beside,
            )
        return count <= self._affordable

    def _affords_beside_queries(self, step: int, target: float) -> bool:
        plan = self._plan
        after = Counter(self.tally.events)
        after[plan.event_at(step)] += 1
        if self.filtered:
            return accounting.filter_epsilon(after, delta=plan.delta) <= target
        planned = all(count <= plan.events.get(event, 0) for event, count in after.items())
        if planned and composed_epsilon(plan.events, delta=plan.delta) <= target:
            return True
        return composed_epsilon(after, delta=plan.delta) <= target

    @property
    def position(self) -> Position | None:
        """The end of the ledger; None without one."""
        return self._ledger.position

    def spend(self, step: int, groups: str = "") -> None:
        """Record that an event is about to be released; with a ledger it is on the disk when this returns."""
        self._ledger.spend(replace(self._session, groups=groups), step=step)

    def mirror(self, step: int, position: Position | None) -> None:
        """Count a step that rank 0 has recorded, on another rank."""
        assert isinstance(self._ledger, MirroredLedger)
        self._ledger.position = position
        self._ledger.spend(self._session, step=step)

    def epsilon(self) -> float:
        """Epsilon spent by all events in the ledger."""
        compose = accounting.filter_epsilon if self.filtered else composed_epsilon
        return compose(self.tally.events, delta=self._plan.delta)

    def state_dict(self) -> dict[str, Any]:
        """The releases of each group since the run's start, its random name, and the position in the ledger."""
        position = self._ledger.position
        return {
            "releases": self.tally.releases_by_group(self._session.start.beginning),
            "beginning": self._session.start.beginning,
            "position": None if position is None else asdict(position),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a saved state; what was spent since then stays spent.

        Args:
            state: What `state_dict` returned.

        Raises:
            ValueError: The state was saved with another ledger, or with one where this run has none.
        """
        position = state["position"]
        if (position is None) == self._ledger.on_disk:
            raise ValueError(
                "the state was saved without a ledger, so its steps are not in this one: resume without a ledger"
                if position is None
                else "the state was saved with a ledger: resume with the same one, so that no step is missing from it"
            )
        if isinstance(self._ledger, Ledger):
            self._ledger.require(Position(**position))
        start = replace(self._session.start, beginning=state["beginning"])
        self._session = replace(self._session, start=start)
        if not self._ledger.on_disk:
            seen = self.tally.releases_by_group(self._session.start.beginning)  # in this process
            self._resumed_unseen |= not seen and not self._session.replayable
            for groups, counts in state["releases"].items():
                known = seen.get(groups, [0] * self._plan.bands)
                for group, (least, most) in enumerate(zip(known, counts, strict=True)):
                    for turn in range(least, most):
                        self.spend(group + turn * self._plan.bands, groups)


def continued_noise(ledger: Ledger) -> float | None:
    """The noise multiplier with which the ledger's run began; None for a new run."""
    starts = (start for start in ledger.tally.starts if start.run == ledger.run)
    return next((start.plan.event.noise_multiplier for start in starts), None)
