"""Accounting of shaped noise: ceil(T/b) Poisson(bq)-subsampled Gaussians, by an independent computation."""

from __future__ import annotations

import json

import dp_accounting
import pytest
from dp_accounting import pld

from pmlf.cli.main import main
from pmlf.mechanism import accounting
from pmlf.mechanism.events import cyclic


def independent(z: float, rate: float, participations: int, delta: float) -> float:
    event = dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(z))
    accountant = pld.PLDAccountant(value_discretization_interval=1e-3)
    return float(accountant.compose(dp_accounting.SelfComposedDpEvent(event, participations)).get_epsilon(delta))


@pytest.mark.parametrize(
    ("bands", "records", "batch", "steps", "participations"),
    [(8, 50_000, 1000, 400, 50), (8, 50_000, 1000, 401, 51), (4, 1000, 50, 3, 1), (3, 900, 300, 10, 4)],
)
def test_epsilon_is_that_of_the_steps_a_record_can_be_in(
    bands: int, records: int, batch: int, steps: int, participations: int
) -> None:
    ours = accounting.epsilon(noise_multiplier=1.5, sample_rate=batch / records, steps=steps, delta=1e-5, bands=bands)
    expected = independent(1.5, bands * batch / records, participations, 1e-5)
    assert ours == pytest.approx(expected, rel=3e-3)


def test_one_band_is_plain_poisson_sampling() -> None:
    mechanism = {"noise_multiplier": 1.0, "sample_rate": 0.02, "steps": 100}
    assert accounting.epsilon(**mechanism, delta=1e-5, bands=1) == accounting.epsilon(**mechanism, delta=1e-5)  # type: ignore[arg-type]
    assert cyclic(0.02, 100, 1) == (0.02, 100)


@pytest.mark.slow
def test_calibrated_noise_meets_the_target_by_the_independent_computation() -> None:
    z = accounting.noise_multiplier(target_epsilon=4.0, target_delta=1e-5, sample_rate=0.02, steps=100, bands=4)
    assert 3.98 < independent(z, 0.08, 25, 1e-5) <= 4.005


def test_delta_inverts_epsilon() -> None:
    mechanism = {"noise_multiplier": 1.2, "sample_rate": 0.02, "steps": 100, "bands": 4}
    at = accounting.epsilon(**mechanism, delta=1e-5)  # type: ignore[arg-type]
    assert accounting.delta(**mechanism, epsilon=at) == pytest.approx(1e-5, rel=1e-2)  # type: ignore[arg-type]


def test_draws_that_are_cut_are_not_accounted_for_in_groups() -> None:
    """A record is in its group's draws with probability bq, so they are cut more often than a draw of all records."""
    mechanism = {"sample_rate": 0.02, "steps": 100, "bands": 4, "overflow": 1e-12}
    with pytest.raises(ValueError, match="leave one out"):
        accounting.epsilon(**mechanism, noise_multiplier=1.2, delta=1e-5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="leave one out"):
        accounting.delta(**mechanism, noise_multiplier=1.2, epsilon=1.0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="leave one out"):
        accounting.noise_multiplier(**mechanism, target_epsilon=4.0, target_delta=1e-5)  # type: ignore[arg-type]


def test_groups_of_the_whole_dataset_are_full_batches() -> None:
    assert cyclic(1 / 3, 10, 3) == (1.0, 4)
    with pytest.raises(ValueError, match=r"bands=4 at a sampling rate of 0\.3333 needs"):
        cyclic(1 / 3, 10, 4)


@pytest.mark.parametrize("bands", [0, -1, 1.5, True])
def test_bands_that_count_nothing_are_refused(bands: float) -> None:
    with pytest.raises(ValueError, match="bands="):
        cyclic(0.1, 10, bands)  # type: ignore[arg-type]


def test_the_command_line_accounts_for_bands(capsys: pytest.CaptureFixture[str]) -> None:
    setting = ("--records", "50000", "--batch-size", "1000", "--steps", "401", "--noise-multiplier", "1.5")
    assert main(["account", *setting, "--delta", "1e-5", "--bands", "8", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["epsilon"] == pytest.approx(independent(1.5, 0.16, 51, 1e-5), rel=3e-3) and found["bands"] == 8


def test_the_command_line_shows_a_shape(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["filter", "--bands", "4", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["noise_shape"]
    assert found["bands"] == 4 and found["left"]["0.0"] < found["left_by_white"]["0.0"]
