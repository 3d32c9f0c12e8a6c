"""The best of a random number of runs: epsilon by dp-accounting, noise to a target, and the number's distribution."""

from __future__ import annotations

import math

import dp_accounting
import numpy as np
import pytest
from dp_accounting import dp_event, rdp
from scipy import stats

from pmlf.mechanism.events import Event
from pmlf.mechanism.renyi import quiet
from pmlf.mechanism.selection import Selection

SHAPES = {"logarithmic": 0.0, "geometric": 1.0, "poisson": math.inf}


def independent(z: float, rate: float, steps: int, delta: float, mean: float, shape: float) -> float:
    step = dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(z))
    event = dp_event.RepeatAndSelectDpEvent(dp_accounting.SelfComposedDpEvent(step, steps), mean, shape)
    with quiet():
        return float(rdp.RdpAccountant().compose(event).get_epsilon(delta))


@pytest.mark.parametrize("name", SHAPES)
def test_the_total_is_that_of_dp_accounting(name: str) -> None:
    event = Event(noise_multiplier=1.5, sample_rate=0.02)
    found = Selection(mean=8.0, distribution=name).epsilon(event, steps=300, delta=1e-5)
    assert found == pytest.approx(independent(1.5, 0.02, 300, 1e-5, 8.0, SHAPES[name]), rel=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("name", SHAPES)
def test_the_noise_meets_the_target_and_no_more(name: str) -> None:
    chosen = Selection(mean=5.0, distribution=name)
    z = chosen.noise_multiplier(target_epsilon=3.0, target_delta=1e-5, sample_rate=0.05, steps=100)
    assert independent(z, 0.05, 100, 1e-5, 5.0, SHAPES[name]) <= 3.0
    assert independent(z * 0.999, 0.05, 100, 1e-5, 5.0, SHAPES[name]) > 3.0


@pytest.mark.slow
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("mean", [1.0, 3.0, 20.0])
def test_the_number_of_runs_has_the_distribution_that_is_paid_for(name: str, mean: float) -> None:
    uniforms = (np.arange(20_000) + 0.5) / 20_000
    drawn = np.array([Selection(mean=mean, distribution=name).number(float(u)) for u in uniforms[::10]])
    if name != "logarithmic":  # whose tail is too long for so few
        assert drawn.mean() == pytest.approx(mean, rel=0.02)
    for k in (0, 1, 2, 5):
        if name == "poisson":
            wanted = float(stats.poisson.pmf(k, mean))
        elif name == "geometric":
            wanted = 0.0 if k == 0 else (1 - 1 / mean) ** (k - 1) / mean
        elif mean == 1.0:
            wanted = float(k == 1)
        else:  # (1 - g)^k / (k log(1/g)), with its mean by Newton's rule on the definition
            g = _halting(mean)
            wanted = 0.0 if k == 0 else (1 - g) ** k / (k * math.log(1 / g))
        assert (drawn == k).mean() == pytest.approx(wanted, abs=2e-3)


def _halting(mean: float) -> float:
    low, high = 1e-9, 1 - 1e-9
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if (1 / middle - 1) / math.log(1 / middle) > mean else (low, middle)
    return low


@pytest.mark.parametrize(
    ("given", "said"),
    [({"mean": 0.5}, "^mean=0.5 is not"), ({"mean": 5.0, "distribution": "fixed"}, "logarithmic, geometric, poisson")],
)
def test_what_cannot_be_accounted_for_is_refused(given: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Selection(**given)  # type: ignore[arg-type]
