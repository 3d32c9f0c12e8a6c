"""Group privacy: between what one record costs and what is known of the unsampled Gaussian."""

from __future__ import annotations

import json
import math

import pytest
from scipy import stats

from pmlf import accounting
from pmlf.cli.main import main
from pmlf.mechanism.groups import group_epsilon

MECHANISM = {"noise_multiplier": 4.0, "sample_rate": 0.02, "steps": 400}


def test_a_group_of_one_is_one_record() -> None:
    assert group_epsilon(**MECHANISM, delta=1e-5, group=1) == accounting.epsilon(**MECHANISM, delta=1e-5)  # type: ignore[arg-type]


def test_epsilon_grows_with_the_group_and_at_least_in_proportion_here() -> None:
    found = [group_epsilon(**MECHANISM, delta=1e-5, group=group) for group in (1, 2, 4, 8)]  # type: ignore[arg-type]
    assert found == sorted(found) and found[1] < 2 * accounting.epsilon(**MECHANISM, delta=1e-12, accountant="rdp")  # type: ignore[arg-type]


def gaussian_delta(sensitivity: float, epsilon: float) -> float:
    """The exact delta of a Gaussian with standard deviation 1 (Balle and Wang 2018)."""
    a, b = sensitivity / 2 - epsilon / sensitivity, -sensitivity / 2 - epsilon / sensitivity
    return float(stats.norm.cdf(a) - math.exp(epsilon) * stats.norm.cdf(b))


@pytest.mark.parametrize("group", [2, 5])
def test_without_sampling_it_bounds_the_exact_gaussian_tightly(group: int) -> None:
    z, steps = 20.0, 10
    found = group_epsilon(noise_multiplier=z, sample_rate=1.0, steps=steps, delta=1e-5, group=group)
    sensitivity = group * math.sqrt(steps) / z
    assert gaussian_delta(sensitivity, found) <= 1e-5 < gaussian_delta(sensitivity, 0.98 * found)


def test_account_says_what_it_means_for_five_records(capsys: pytest.CaptureFixture[str]) -> None:
    given = [
        "account",
        "--records",
        "60000",
        "--batch-size",
        "600",
        "--epochs",
        "5",
        "--epsilon",
        "0.5",
        "--group",
        "5",
    ]
    assert main(given) == 0
    assert "5 records" in capsys.readouterr().out
    assert main([*given, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["group"] == 5 and document["epsilon_of_group"] > 2.5 * document["epsilon"]
    assert main([*given[:-1], "0"]) == 2
    assert "--group=0 is not a whole number" in capsys.readouterr().err
