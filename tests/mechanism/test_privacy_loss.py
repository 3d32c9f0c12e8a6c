"""The composed privacy loss: never below the truth, by an independent computation, and close to it."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path
from types import ModuleType

import pytest
from scipy import optimize, stats

from pmlf.mechanism import accounting, privacy_loss
from pmlf.mechanism.accounting import Event


def _loaded(name: str) -> ModuleType:
    path = Path(__file__).resolve().parents[2] / "benchmarks" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


truth = _loaded("accounting_truth")  # has the long form of the comparison

LONG = [  # noise, rate, steps, delta: where plain Fourier transforms lose the tail
    (1.0, 1e-3, 1_000_000, 1e-10),
    (1.0, 1e-3, 160_000, 1e-10),
    (2.0, 1e-2, 1_000_000, 1e-10),
    (10.0, 1e-1, 1_000_000, 1e-10),
    pytest.param(0.7, 1e-4, 1_000_000, 1e-9, marks=pytest.mark.slow),
]
ORDINARY = [
    (1.0, 1 / 60, 1500, 1e-5),
    (0.6, 1e-2, 3000, 1e-8),
    (2.0, 1e-1, 1000, 1e-6),
    (5.0, 0.3, 20_000, 1e-5),
    (1.0, 1e-3, 100_000, 1e-8),
]


def gaussian_delta(mu: float, epsilon: float) -> float:
    """The exact curve of a Gaussian of sensitivity mu (Balle & Wang 2018)."""
    first = stats.norm.logcdf(mu / 2 - epsilon / mu)
    second = epsilon + stats.norm.logcdf(-mu / 2 - epsilon / mu)
    return float(math.exp(first) * -math.expm1(second - first))


def test_the_reference_is_exact_where_the_truth_is_known() -> None:
    for mu, delta in [(1.0, 1e-5), (0.3, 1e-10), (4.0, 1e-8)]:
        exact = optimize.brentq(lambda e, mu=mu, delta=delta: gaussian_delta(mu, e) / delta - 1, 0.1, 100, xtol=1e-13)
        found = truth.epsilon(z=10 / mu, rate=1.0, steps=100, delta=delta, guess=exact * 1.01)
        assert found == pytest.approx(exact, rel=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize(("z", "rate", "steps", "delta"), [*LONG, *ORDINARY])
def test_no_epsilon_is_below_the_truth(z: float, rate: float, steps: int, delta: float) -> None:
    claimed = accounting.epsilon(noise_multiplier=z, sample_rate=rate, steps=steps, delta=delta)
    true = truth.epsilon(z=z, rate=rate, steps=steps, delta=delta, guess=claimed)
    finest = accounting.finest_epsilon(Event(noise_multiplier=z, sample_rate=rate), steps=steps, delta=delta)
    assert true * (1 - 1e-9) <= finest <= claimed <= 1.003 * true
    spent = accounting.delta(noise_multiplier=z, sample_rate=rate, steps=steps, epsilon=true)
    assert delta * (1 - 1e-9) <= spent <= 1.1 * delta


@pytest.mark.parametrize(
    ("z", "rate"),
    [
        pytest.param(0.3, 1e-6, marks=pytest.mark.slow),  # atoms: a record is rarely drawn
        (1.0, 1e-4),
        (0.3, 1e-2),
        (10.0, 1e-2),
        (1.0, 0.5),
        (0.3, 1.0),  # every record, every time
        (10.0, 1.0),
    ],
)
def test_one_step_is_the_closed_form(z: float, rate: float) -> None:
    """A record removed: q times the Gaussian's delta at log(1 + (e^epsilon - 1) / q). A record added costs no more."""
    for epsilon in (0.0, 1e-3, 0.1, 1.0):
        exact = rate * gaussian_delta(1 / z, math.log1p(math.expm1(epsilon) / rate))
        found = privacy_loss.delta(z, rate, 1, epsilon)
        assert exact * (1 - 1e-9) <= found <= 1.01 * exact + 1e-13


def test_calibration_at_the_smallest_delta_is_kept_in_truth() -> None:
    plan = {"sample_rate": 1e-3, "steps": 300_000}
    z = accounting.noise_multiplier(target_epsilon=2.0, target_delta=1e-10, **plan)  # type: ignore[arg-type]
    true = truth.epsilon(z=z, rate=1e-3, steps=300_000, delta=1e-10, guess=2.0)
    assert 1.99 < true <= 2.0


@pytest.mark.slow
def test_a_record_hardly_ever_drawn_costs_nothing() -> None:
    assert privacy_loss.epsilon(1.0, 1e-4, 7, 1e-3) == 0.0
    assert privacy_loss.epsilon(1.0, 1e-9, 1000, 1e-5) == 0.0


@pytest.mark.parametrize(
    ("z", "rate", "steps"),
    [pytest.param(0.02, 0.5, 10**9, marks=pytest.mark.slow), (1e6, 1e-9, 10**9), (0.05, 0.9999, 7)],
)
def test_the_far_ends_have_a_bound_too(z: float, rate: float, steps: int) -> None:
    for delta in (0.3, 1e-10):
        assert accounting.epsilon(noise_multiplier=z, sample_rate=rate, steps=steps, delta=delta) >= 0


@pytest.mark.parametrize("falls_until", [0, 3, 15, 20, 24])
def test_the_walk_finds_the_least_bound_wherever_it_turns(falls_until: int) -> None:
    """The window of a sum follows from the best of Chernoff's bounds, each of which is valid."""
    shifts, asked = [float(place) for place in range(25)], list[float]()

    def bound(shift: float) -> float:
        asked.append(shift)
        return abs(shift - falls_until)

    assert privacy_loss._least(bound, shifts) == 0.0 and len(set(asked)) == len(asked)
