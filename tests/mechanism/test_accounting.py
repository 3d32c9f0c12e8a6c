"""The accountant against dp-accounting used directly and against Opacus, and calibration that never overspends."""

from __future__ import annotations

import itertools
import math
import warnings
from functools import lru_cache

import dp_accounting
import pytest
from dp_accounting import pld
from scipy import optimize, stats

from pmlf.mechanism import accounting, privacy_loss

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # importing Opacus warns
    from opacus.accountants import PRVAccountant

DELTA = 1e-5
GRID = list(itertools.product([0.6, 1.0, 2.0, 5.0], [0.001, 0.0167, 0.1], [1, 100, 3000]))
SLOW_IN_OPACUS = (0.6, 0.1, 1000)  # with 3000 steps it takes three times as long
OPACUS_GRID = [case for case in GRID if case[0] in (0.6, 2.0) and case != (0.6, 0.1, 3000)]
RUNS = [(1.0, 0.02, 2500), (8.0, 0.02, 2500), (0.1, 0.01, 1000), (3.0, 1.0, 100), (50.0, 0.1, 500), (1.0, 0.02, 1)]


def _within_tolerance(ours: float, theirs: float) -> bool:
    return abs(ours - theirs) <= max(0.02 * theirs, 0.011)


@lru_cache
def _ours(z: float, rate: float, steps: int) -> float:
    return accounting.epsilon(noise_multiplier=z, sample_rate=rate, steps=steps, delta=DELTA)


@pytest.mark.slow
@pytest.mark.parametrize(("z", "rate", "steps"), GRID)
def test_epsilon_agrees_with_dp_accounting_used_directly(z: float, rate: float, steps: int) -> None:
    direct = pld.privacy_loss_distribution.from_gaussian_mechanism(
        z, value_discretization_interval=5e-4 if z < 2 else 5e-5, sampling_prob=rate
    ).self_compose(steps)
    theirs = direct.get_epsilon_for_delta(DELTA)
    assert _within_tolerance(_ours(z, rate, steps), theirs)
    assert _ours(z, rate, steps) <= 1.005 * theirs  # both are upper bounds, and ours is no worse


@pytest.mark.parametrize(("z", "rate", "steps"), [*OPACUS_GRID, pytest.param(*SLOW_IN_OPACUS, marks=pytest.mark.slow)])
def test_epsilon_agrees_with_opacus(z: float, rate: float, steps: int) -> None:
    opacus = PRVAccountant()
    opacus.history = [(z, rate, steps)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = opacus.get_epsilon(DELTA)
    assert _within_tolerance(_ours(z, rate, steps), theirs)


@pytest.mark.slow
@pytest.mark.parametrize(("z", "rate", "steps"), [(0.4, 0.02, 2500), (0.4, 0.001, 100_000), (0.7, 0.05, 20_000)])
def test_epsilon_agrees_where_the_budget_is_large(z: float, rate: float, steps: int) -> None:
    fine = pld.PLDAccountant(value_discretization_interval=5e-4)
    step = dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(z))
    theirs = fine.compose(dp_accounting.SelfComposedDpEvent(step, steps)).get_epsilon(DELTA)
    assert _ours(z, rate, steps) == pytest.approx(theirs, rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize(("z", "steps"), [(5.0, 100), (1.0, 1), (300.0, 1000), (1.0, 3000), (1e4, 1)])
def test_full_batches_are_one_plain_gaussian(z: float, steps: int) -> None:
    """The exact curve of the Gaussian mechanism with mu = sqrt(T)/z (Balle and Wang, 2018)."""
    mu = math.sqrt(steps) / z

    def log_ratio(epsilon: float) -> float:
        first = stats.norm.logcdf(mu / 2 - epsilon / mu)
        second = epsilon + stats.norm.logcdf(-mu / 2 - epsilon / mu)
        return first + math.log(-math.expm1(min(second - first, -1e-300))) - math.log(DELTA)

    exact = optimize.brentq(log_ratio, 0, mu**2 + 20 * mu) if log_ratio(0) > 0 else 0.0
    ours = _ours(z, 1.0, steps)
    assert ours == pytest.approx(exact, rel=2e-3, abs=1e-6) and ours >= exact - 1e-9


def test_no_step_costs_nothing() -> None:
    for accountant in accounting.ACCOUNTANTS:
        assert accounting.epsilon(noise_multiplier=1, sample_rate=0.1, steps=0, delta=DELTA, accountant=accountant) == 0
        assert accounting.delta(noise_multiplier=1, sample_rate=0.1, steps=0, epsilon=1.0, accountant=accountant) == 0


@pytest.mark.slow
def test_epsilon_rises_with_steps_and_falls_with_noise() -> None:
    by_steps = [_ours(1.0, 0.01, steps) for steps in (0, 1, 2, 3, 10, 11, 100, 101, 1000, 5000)]
    by_noise = [_ours(z, 0.01, 500) for z in (0.5, 0.51, 0.8, 1.0, 1.001, 2.0, 10.0, 100.0)]
    assert by_steps == sorted(by_steps) and by_noise == sorted(by_noise, reverse=True)
    assert len(set(by_steps)) == len(by_steps) and len(set(by_noise)) == len(by_noise)


@pytest.mark.parametrize(("z", "rate", "steps"), [*GRID[::3], (2.0, 1.0, 50)])
def test_renyi_accounting_spends_no_less(z: float, rate: float, steps: int) -> None:
    renyi = accounting.epsilon(noise_multiplier=z, sample_rate=rate, steps=steps, delta=DELTA, accountant="rdp")
    assert renyi >= _ours(z, rate, steps)


def test_delta_inverts_epsilon() -> None:
    epsilon = _ours(1.0, 0.01, 500)
    delta = accounting.delta(noise_multiplier=1.0, sample_rate=0.01, steps=500, epsilon=epsilon)
    assert delta == pytest.approx(DELTA, rel=1e-6)
    looser = accounting.delta(noise_multiplier=1.0, sample_rate=0.01, steps=500, epsilon=epsilon, accountant="rdp")
    assert delta <= looser <= 1


@pytest.mark.slow
@pytest.mark.parametrize("accountant", accounting.ACCOUNTANTS)
@pytest.mark.parametrize(("target", "rate", "steps"), RUNS)
def test_calibration_never_overspends_and_is_tight(target: float, rate: float, steps: int, accountant: str) -> None:
    z = accounting.noise_multiplier(
        target_epsilon=target, target_delta=DELTA, sample_rate=rate, steps=steps, accountant=accountant
    )
    spent = accounting.epsilon(noise_multiplier=z, sample_rate=rate, steps=steps, delta=DELTA, accountant=accountant)
    assert 0.999 * target <= spent <= target


class _OursForTheirSearch:
    """`accounting.epsilon` behind the interface that dp-accounting's calibration asks for."""

    ledger = dp_accounting.NoOpDpEvent()

    def compose(self, event: tuple[float, float, int]) -> _OursForTheirSearch:
        self._event = event
        return self

    def get_epsilon(self, delta: float) -> float:
        log_z, rate, steps = self._event
        return accounting.epsilon(noise_multiplier=math.exp(log_z), sample_rate=rate, steps=steps, delta=delta)


@pytest.mark.slow
@pytest.mark.parametrize(("target", "rate", "steps"), RUNS)
def test_calibration_agrees_with_dp_accountings_search(target: float, rate: float, steps: int) -> None:
    theirs = dp_accounting.calibrate_dp_mechanism(
        _OursForTheirSearch,
        lambda log_z: (log_z, rate, steps),
        target,
        DELTA,
        dp_accounting.ExplicitBracketInterval(-2.0, 5.0),
    )
    ours = accounting.noise_multiplier(target_epsilon=target, target_delta=DELTA, sample_rate=rate, steps=steps)
    assert ours == pytest.approx(math.exp(theirs), rel=1e-4)


@pytest.mark.parametrize(("claimed", "really"), [(1.0, 2.29), (8.0, 56.6)])
def test_clipping_both_points_of_two_spends_far_more_than_claimed(claimed: float, really: float) -> None:
    """A sample moves this sum by 2C while the noise is for C, so z is half as large as claimed (CIFAR, 50 epochs)."""
    samples, batch = 50_000, 1000
    run = {"sample_rate": batch / samples, "steps": 50 * samples // batch}
    delta = samples**-1.1
    z = accounting.noise_multiplier(target_epsilon=claimed, target_delta=delta, **run)  # type: ignore[arg-type]
    spent = accounting.epsilon(noise_multiplier=z / 2, delta=delta, **run)  # type: ignore[arg-type]
    assert spent == pytest.approx(really, rel=0.02)


def test_an_epsilon_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    mechanism = {"noise_multiplier": 1.3, "sample_rate": 0.013, "delta": DELTA}
    first = accounting.epsilon(**mechanism, steps=130)
    monkeypatch.setattr(privacy_loss, "epsilon", lambda *_: math.nan)
    assert accounting.epsilon(**mechanism, steps=130) == first


MECHANISM = {"noise_multiplier": 1.0, "sample_rate": 0.1, "steps": 10, "delta": DELTA}
TARGET = {"target_epsilon": 1.0, "target_delta": DELTA, "sample_rate": 0.1, "steps": 10}


@pytest.mark.parametrize(
    "wrong",
    [
        {"noise_multiplier": 0.0},
        {"noise_multiplier": -1.0},
        {"noise_multiplier": math.inf},
        {"noise_multiplier": math.nan},
        {"sample_rate": 0.0},
        {"sample_rate": 1.5},
        {"sample_rate": math.nan},
        {"steps": -1},
        {"steps": 1.5},
        {"steps": math.inf},
        {"delta": 0.0},
        {"delta": 1.0},
        {"delta": math.nan},
        {"delta": 1e-12},
        {"accountant": "moments"},
    ],
    ids=str,
)
def test_epsilon_refuses_what_means_nothing(wrong: dict[str, object]) -> None:
    ((name, value),) = wrong.items()
    with pytest.raises(ValueError, match=f"{name}='?{value}"):
        accounting.epsilon(**{**MECHANISM, **wrong})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "wrong",
    [
        {"target_epsilon": 0.0},
        {"target_epsilon": -1.0},
        {"target_epsilon": math.inf},
        {"target_epsilon": math.nan},
        {"target_delta": 0.0},
        {"target_delta": 0.7},  # a record is drawn with probability 0.65
        {"sample_rate": 0.0},
        {"steps": 0},
        {"accountant": "prv"},
    ],
    ids=str,
)
def test_calibration_refuses_what_means_nothing(wrong: dict[str, object]) -> None:
    ((name, value),) = wrong.items()
    with pytest.raises(ValueError, match=f"{name}='?{value}"):
        accounting.noise_multiplier(**{**TARGET, **wrong})  # type: ignore[arg-type]


def test_a_target_out_of_reach_says_so() -> None:
    with pytest.raises(ValueError, match=r"target_epsilon=1e\+30 is outside \[1e-06, 1e\+06\]"):
        accounting.noise_multiplier(**{**TARGET, "target_epsilon": 1e30}, accountant="rdp")  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize("z", [0.02, 0.01, 0.0099, 1e-3, 1e-6])
def test_next_to_no_noise_still_has_a_bound(z: float) -> None:
    spent = _ours(z, 0.1, 10)
    assert spent > 1000 and math.isfinite(spent) and spent >= _ours(2 * z, 0.1, 10)


@pytest.mark.parametrize("epsilon", [-1.0, math.inf, math.nan])
def test_delta_refuses_an_epsilon_that_means_nothing(epsilon: float) -> None:
    with pytest.raises(ValueError, match=f"epsilon={epsilon}"):
        accounting.delta(noise_multiplier=1.0, sample_rate=0.1, steps=10, epsilon=epsilon)
