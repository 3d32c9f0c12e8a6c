"""The budget guard: what is claimed holds whatever was seen on the way, and no step passes the target."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from pmlf.evidence.budget import BudgetGuard
from pmlf.evidence.ledger import Ledger
from pmlf.evidence.tally import PrivacyPlan
from pmlf.mechanism import accounting
from pmlf.mechanism.accounting import Event

EVENT = Event(noise_multiplier=1.0, sample_rate=0.1)


def budget(
    book: Ledger | None,
    event: Event,
    *,
    target_epsilon: float | None = None,
    delta: float = 1e-5,
    replayable: bool = False,
) -> BudgetGuard:
    plan = PrivacyPlan(event=event, steps=20, delta=delta, target_epsilon=target_epsilon)
    return BudgetGuard(plan, replayable=replayable, ledger=book)


def spend(guard: BudgetGuard, steps: int) -> BudgetGuard:
    for step in range(steps):
        guard.spend(step)
    return guard


def pld(steps: int) -> float:
    return accounting.epsilon(**asdict(EVENT), steps=steps, delta=1e-5)


def test_the_guard_stops_before_the_step_that_would_pass_the_target() -> None:
    event = Event(noise_multiplier=1.0, sample_rate=0.1)
    target = accounting.epsilon(**asdict(event), steps=7, delta=1e-5)
    guard = budget(None, event, target_epsilon=target)
    step = 0
    while guard.affords(step):
        guard.spend(step)
        step += 1
    assert step == 7 and guard.epsilon() == target
    replayed = budget(None, event, target_epsilon=target, replayable=True)
    for step in (0, 1, 2, 1, 2, 3, 4, 5, 6):
        assert replayed.affords(step)
        replayed.spend(step)
    assert replayed.affords(3) and not replayed.affords(7) and replayed.run_events == 7


def test_the_filter_of_a_shared_ledger_is_the_sum_of_renyi_divergences(tmp_path: Path) -> None:
    """Against dp-accounting's own composition, one order at a time."""
    import dp_accounting

    event, before = Event(noise_multiplier=2.0, sample_rate=0.05), {Event(noise_multiplier=1.5, sample_rate=0.1): 3}
    with Ledger(tmp_path / "l", dataset="patients") as book:
        spend(budget(book, *before), 3)

    def reference(count: int) -> float:
        bounds = []
        for order in accounting.FILTER_ORDERS:
            found = dp_accounting.rdp.RdpAccountant([order])
            for kind, number in [*before.items(), (event, count)]:
                gaussian = dp_accounting.GaussianDpEvent(kind.noise_multiplier)
                found.compose(dp_accounting.PoissonSampledDpEvent(kind.sample_rate, gaussian), number)
            bounds.append(float(found.get_epsilon(1e-5 / len(accounting.FILTER_ORDERS))))
        return min(bounds)

    target = reference(11) * 1.0001
    with Ledger(tmp_path / "l", dataset="patients") as book:
        guard = budget(book, event, target_epsilon=target)
        assert guard.filtered
        steps = Counter(guard.affords(step) and guard.spend(step) is None for step in range(20))
        assert steps[True] == 11 and guard.epsilon() == pytest.approx(reference(11))


def test_a_run_as_planned_claims_the_epsilon_of_its_plan() -> None:
    guard = spend(budget(None, EVENT), 5)
    assert guard.as_planned and guard.epsilon() == pld(5) and guard.claim() == pld(20)


def test_a_run_begun_again_under_its_name_claims_its_target_or_nothing(tmp_path: Path) -> None:
    """Beginning again until a result pleases makes the number of events a choice: no epsilon of a number covers it."""
    target = pld(13)
    for begins in range(1, 4):
        with Ledger(tmp_path / "l", dataset="patients", run="one name") as book:
            guard, unbounded = budget(book, EVENT, target_epsilon=target), budget(book, EVENT)
            spend(guard, 4)
            if begins > 1:
                assert not guard.as_planned and not guard.filtered
                assert guard.epsilon() == pld(4 * begins) < target
                assert guard.claim() == target and unbounded.claim() is None
    with Ledger(tmp_path / "l", dataset="patients", run="one name") as book:
        guard = budget(book, EVENT, target_epsilon=target)
        assert [guard.affords(0) and guard.spend(0) is None for _ in range(3)] == [True, False, False]


def test_two_guards_of_one_open_ledger_are_two_beginnings(tmp_path: Path) -> None:
    with Ledger(tmp_path / "l", dataset="patients") as book:
        first, second = (budget(book, EVENT, target_epsilon=8.0) for _ in range(2))
        spend(first, 3)
        assert first.as_planned
        spend(second, 3)
        spend(first, 2)
        assert first.run_events == 8 and first.epsilon() == pld(8)
        assert first.claim() == second.claim() == 8.0


def test_steps_done_again_beyond_the_plan_claim_the_target() -> None:
    guard = spend(spend(budget(None, EVENT, target_epsilon=9.0), 20), 3)
    assert not guard.as_planned and guard.claim() == 9.0
    assert spend(spend(budget(None, EVENT), 20), 3).claim() is None


def test_where_the_filter_composes_the_claim_is_the_target(tmp_path: Path) -> None:
    """A stop at will under a filter is covered up to the bound that was fixed, not up to what was spent by then."""
    with Ledger(tmp_path / "l", dataset="patients") as book:
        spend(budget(book, Event(noise_multiplier=1.5, sample_rate=0.1), target_epsilon=3.0), 3)
    with Ledger(tmp_path / "l", dataset="patients") as book:
        guard = spend(budget(book, EVENT, target_epsilon=6.0), 2)
        assert guard.filtered and guard.epsilon() < 6.0 and guard.claim() == 6.0
        assert budget(book, EVENT).claim() is None
        assert budget(book, EVENT, target_epsilon=guard.epsilon() * 0.99).claim() is None  # a bound not kept


@pytest.mark.parametrize(
    "first", [{"target_epsilon": None}, {"target_epsilon": 9.0}, {"target_epsilon": 6.0, "delta": 1e-6}]
)
@pytest.mark.parametrize("other", [EVENT, Event(noise_multiplier=1.5, sample_rate=0.1)])
def test_a_target_that_was_set_or_lowered_after_results_bounds_nothing(
    tmp_path: Path, first: dict[str, Any], other: Event
) -> None:
    with Ledger(tmp_path / "l", dataset="patients", run="name") as book:
        spend(budget(book, other, **first), 3)
    with Ledger(tmp_path / "l", dataset="patients", run="name") as book:
        guard = spend(budget(book, EVENT, target_epsilon=6.0), 2)
        assert guard.epsilon() < 6.0 and guard.claim() is None


def test_what_another_run_spends_from_an_open_ledger_is_counted_before_the_next_step(tmp_path: Path) -> None:
    other = Event(noise_multiplier=0.8, sample_rate=0.1)
    with Ledger(tmp_path / "l", dataset="patients") as book:
        first = budget(book, EVENT, target_epsilon=pld(20))
        second = budget(book, other, target_epsilon=pld(20))
        assert first.affords(0)
        first.spend(0)
        while second.affords(0):
            second.spend(0)
        while first.affords(1):
            first.spend(1)
        assert first.run_events > 3 and first.epsilon() <= pld(20)


def test_the_state_of_another_run_adds_to_what_was_spent() -> None:
    other = spend(budget(None, EVENT), 5)
    guard = spend(budget(None, EVENT, target_epsilon=9.0), 3)
    own = guard.state_dict()
    guard.load_state_dict(other.state_dict())
    assert guard.run_events == 8 and guard.claim() == 9.0
    guard.load_state_dict(own)  # and going back takes nothing away
    guard.load_state_dict(other.state_dict())
    assert guard.run_events == 8


def test_noise_is_calibrated_to_what_a_ledger_leaves() -> None:
    spent = {Event(noise_multiplier=1.5, sample_rate=0.1): 30}
    z = accounting.noise_multiplier(target_epsilon=6.0, target_delta=1e-5, sample_rate=0.05, steps=50, spent=spent)
    both = {**spent, Event(noise_multiplier=z, sample_rate=0.05): 50}
    assert 5.99 < accounting.filter_epsilon(both, delta=1e-5) <= 6.0
    with pytest.raises(ValueError, match=r"target_epsilon=2\.0 is spent already"):
        accounting.noise_multiplier(target_epsilon=2.0, target_delta=1e-5, sample_rate=0.05, steps=50, spent=spent)
