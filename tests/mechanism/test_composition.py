"""Several kinds of events in one plan: never below dp-accounting's composition, and close to it."""

from __future__ import annotations

import math

import pytest
from dp_accounting.pld import privacy_loss_distribution as pld

from pmlf.accounting import Event, composed_epsilon, filter_epsilon
from pmlf.mechanism.composition import finest_composed_epsilon, noise_beside

PLANS = [
    ((25.0, 1.0, 3), (33.0, 1.0, 3), (21.6, 1.0, 30)),
    ((20.0, 1.0, 1), (1.1, 0.02, 300)),
    ((4.0, 0.5, 10), (2.0, 0.1, 20), (30.0, 1.0, 2)),
]


def reference(plan: tuple[tuple[float, float, int], ...], delta: float) -> float:
    parts = [
        pld.from_gaussian_mechanism(
            z, sampling_prob=rate, value_discretization_interval=1e-4, pessimistic_estimate=True
        ).self_compose(count)
        for z, rate, count in plan
    ]
    total = parts[0]
    for part in parts[1:]:
        total = total.compose(part)
    return float(total.get_epsilon_for_delta(delta))


@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS)
def test_epsilon_agrees_with_dp_accountings_composition(plan: tuple[tuple[float, float, int], ...]) -> None:
    events = {Event(noise_multiplier=z, sample_rate=rate): count for z, rate, count in plan}
    truth = reference(plan, 1e-5)
    found = composed_epsilon(events, delta=1e-5)
    assert truth * (1 - 2e-3) <= found <= truth * (1 + 5e-3)
    assert finest_composed_epsilon(events, delta=1e-5) <= found
    assert composed_epsilon(events, delta=1e-5, accountant="rdp") >= found
    assert filter_epsilon(events, delta=1e-5) >= found


def test_events_that_cost_nothing_alone_are_paid_for_together_with_the_steps() -> None:
    mean = Event(noise_multiplier=200.0, sample_rate=1.0)
    assert composed_epsilon({mean: 1}, delta=0.006) == 0.0
    z = noise_beside({mean: 1}, target_epsilon=0.01, target_delta=0.006, sample_rate=1.0, steps=30)
    assert composed_epsilon({mean: 1, Event(noise_multiplier=z, sample_rate=1.0): 30}, delta=0.006) <= 0.01


def test_full_batches_compose_to_one_release_exactly() -> None:
    many = {Event(noise_multiplier=z, sample_rate=1.0): 2 for z in (10.0, 20.0)}
    one = {Event(noise_multiplier=(2 / 100 + 2 / 400) ** -0.5, sample_rate=1.0): 1}
    assert math.isclose(composed_epsilon(many, delta=1e-6), composed_epsilon(one, delta=1e-6), rel_tol=1e-9)


@pytest.mark.parametrize("rate", [1.0, 0.05])
def test_the_steps_get_what_the_other_events_leave_and_no_more(rate: float) -> None:
    other = {Event(noise_multiplier=25.0, sample_rate=1.0): 3}
    z = noise_beside(other, target_epsilon=1.0, target_delta=1e-5, sample_rate=rate, steps=30)
    whole = {**other, Event(noise_multiplier=z, sample_rate=rate): 30}
    assert 0.999 < composed_epsilon(whole, delta=1e-5) <= 1.0


def test_a_plan_whose_queries_spend_everything_is_refused() -> None:
    other = {Event(noise_multiplier=1.0, sample_rate=1.0): 1}
    with pytest.raises(ValueError, match="before the first step"):
        noise_beside(other, target_epsilon=1.0, target_delta=1e-5, sample_rate=1.0, steps=3)


def test_nothing_costs_nothing() -> None:
    assert composed_epsilon({}, delta=1e-5) == 0.0
    with pytest.raises(ValueError, match="delta"):
        composed_epsilon({}, delta=2.0)
