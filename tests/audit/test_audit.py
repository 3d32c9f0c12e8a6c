"""The audit: its bounds hold, no method is refuted, every broken variant is."""

from __future__ import annotations

import json
from pathlib import Path

import dp_accounting
import numpy as np
import pytest
import scipy.stats
import torch

from pmlf import audit, methods
from pmlf.audit import bounds, canaries
from pmlf.cli.main import main
from pmlf.mechanism.filters import FilterMemory, LowPass
from pmlf.mechanism.noise import SeededRandomness

QUICK = audit.AuditSettings(epsilon=4.0, canaries=3000, seed=0)


def gaussian_scores(mu: float, each: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(seed)
    return generator.normal(size=each) + mu, generator.normal(size=each)


def test_clopper_pearson_is_scipy_s() -> None:
    hits = np.array([0, 1, 17, 49, 50])
    low, high = bounds.clopper_pearson(hits, 50, 0.01)
    for index, count in enumerate(hits):
        interval = scipy.stats.binomtest(int(count), 50).proportion_ci(0.98, "exact")
        assert (low[index], high[index]) == pytest.approx((interval.low, interval.high), abs=1e-9)


@pytest.mark.parametrize("mu", [0.05, 0.27, 1.0, 5.0, 40.0])
def test_epsilon_of_a_gaussian_is_the_accountant_s(mu: float) -> None:
    expected = dp_accounting.get_epsilon_gaussian(1 / mu, 1e-5)
    assert bounds.gaussian_epsilon(mu, 1e-5) == pytest.approx(expected, rel=1e-4, abs=1e-5)


@pytest.mark.slow
def test_bounds_fail_no_more_often_than_their_confidence_allows() -> None:
    mu, delta, confidence, tries = 0.9, 1e-3, 0.9, 150
    true = bounds.gaussian_epsilon(mu, delta)
    failures = np.zeros(3)
    for seed in range(tries):
        inside, outside = gaussian_scores(mu, 400, seed)
        included = np.arange(800) < 400
        np.random.default_rng(seed).shuffle(included)
        scores = np.empty(800)
        scores[included], scores[~included] = inside, outside
        failures += [
            bounds.gaussian_mu(inside, outside, confidence) > mu,
            bounds.raw_epsilon(inside, outside, delta, confidence) > true,
            bounds.one_run_epsilon(scores, included, 80, 1e-6, confidence) > bounds.gaussian_epsilon(mu, 1e-6),
        ]
    # each fails with probability at most 10 %: more failures than this have probability 1e-4
    assert failures.max() <= scipy.stats.binom.ppf(0.9999, tries, 1 - confidence)
    assert failures[0] > 0  # the Gaussian bound is tight enough to fail sometimes


def test_without_any_difference_every_bound_is_zero() -> None:
    inside, outside = gaussian_scores(0.0, 5000, 1)
    assert bounds.gaussian_mu(inside, outside, 0.9999) == 0.0
    assert bounds.raw_epsilon(inside, outside, 1e-5, 0.9999) == 0.0
    included = np.arange(10_000) < 5000
    assert bounds.one_run_epsilon(np.concatenate([inside, outside]), included, 500, 1e-8, 0.9999) == 0.0


def test_one_run_p_value_is_the_paper_s_formula() -> None:
    canaries_, guesses, correct, epsilon, delta = 60, 40, 33, 0.8, 1e-3
    probability = np.exp(epsilon) / (1 + np.exp(epsilon))
    mass = scipy.stats.binom.pmf(np.arange(guesses + 1), guesses, probability)
    tail = mass[correct:].sum()
    steepest = max(mass[max(correct - i, 0) : correct].sum() / i for i in range(1, canaries_ + 1))
    expected = tail + 2 * canaries_ * delta * steepest
    assert bounds.one_run_p_value(canaries_, guesses, correct, epsilon, delta) == pytest.approx(expected, rel=1e-9)


def test_a_threshold_is_not_used_on_the_scores_it_was_chosen_on() -> None:
    """The half that chooses the threshold separates perfectly, the other half not at all."""
    inside, outside = gaussian_scores(0.0, 2000, 2)
    inside[::2] += 100
    assert bounds.gaussian_mu(inside, outside, 0.999) == 0.0
    assert bounds.raw_epsilon(inside, outside, 1e-5, 0.999) == 0.0


@pytest.mark.parametrize("low_pass", [methods.resolve(name).low_pass for name in methods.NAMES], ids=methods.NAMES)
def test_the_public_filter_is_inverted(low_pass: LowPass) -> None:
    torch.manual_seed(0)
    values = [torch.randn(5, dtype=torch.float64) for _ in range(6)]
    memory = FilterMemory(low_pass)
    released = [memory.apply([value.clone()])[0].numpy() for value in values]
    np.testing.assert_allclose(canaries.without_filter(low_pass, released), torch.stack(values), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", methods.NAMES)
def test_a_canary_moves_the_released_sums_by_the_clip_norm_along_its_own_coordinate_only(name: str) -> None:
    mechanism = canaries.Mechanism(method=methods.resolve(name), noise_multiplier=1e-6, sample_rate=1.0, steps=3)
    included = canaries.coins(SeededRandomness(0), 120)
    sums = canaries.released_sums(mechanism, included, SeededRandomness(0))
    assert len(sums) == mechanism.releases == 3 * mechanism.cycle
    np.testing.assert_allclose(sums.sum(0), 3 * included, atol=1e-3)  # in three steps: all, or those of its group
    np.testing.assert_allclose(sums, sums.round(), atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", methods.NAMES)
def test_no_method_is_refuted_and_the_bounds_are_close_to_the_claim(name: str) -> None:
    report = audit.audit_method(name, QUICK)
    assert not report.refuted
    measured = {bound.name: bound.epsilon for bound in report.bounds}
    assert list(measured) == ["Gaussian DP", "Clopper-Pearson", "one run"]
    assert measured["Gaussian DP"] > 0.4 * 4.0
    assert measured["Clopper-Pearson"] > 0 and measured["one run"] > 0


def test_a_sampled_mechanism_gets_no_gaussian_bound() -> None:
    report = audit.audit_method("dp-pmlf", audit.AuditSettings(epsilon=4.0, sample_rate=0.5, canaries=2000, seed=0))
    assert [bound.name for bound in report.bounds] == ["Clopper-Pearson", "one run"] and not report.refuted


@pytest.mark.slow
def test_secure_noise_is_not_refuted() -> None:
    report = audit.audit_method("dpsgd", audit.AuditSettings(epsilon=4.0, canaries=2000, seed=0, secure_noise=True))
    assert not report.refuted and report.bounds[0].epsilon > 1.6


@pytest.mark.slow
@pytest.mark.parametrize("control", audit.CONTROLS, ids=lambda control: control.name)
def test_every_broken_variant_is_refuted(control: audit.Control) -> None:
    # Clopper-Pearson on n scores shows at most about log(n/10): a smaller claim where it is the only bound
    epsilon = 4.0 if control.sample_rate == 1.0 else 1.0
    report = audit.audit_control(control, audit.AuditSettings(epsilon=epsilon, canaries=1600, seed=0))
    assert report.refuted, [(bound.name, bound.epsilon) for bound in report.bounds]


@pytest.mark.slow
def test_the_command_prints_and_draws_its_results(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "scores.png"
    options = ["--method", "dpsgd", "disk", "--epsilon", "4", "--canaries", "800", "--seed", "1"]
    assert main(["audit", *options, "--plot", str(picture)]) == 0
    shown = capsys.readouterr().out
    assert "No bound is above its claim" in shown and "Clopper-Pearson" in shown and "REFUTED" not in shown
    assert picture.stat().st_size > 1000
    documents = []
    for _ in range(2):
        assert main(["audit", *options, "--json"]) == 0
        documents.append(json.loads(capsys.readouterr().out))
    assert documents[0] == documents[1]  # they depend on the seed alone
    assert [found["subject"] for found in documents[0]["audits"]] == ["dpsgd", "disk"]
    first, second = ([bound["epsilon"] for bound in found["bounds"]] for found in documents[0]["audits"])
    assert first != second  # two audits do not share their noise


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--epsilon", "0"], "epsilon=0.0 is not positive"),
        (["--delta", "1e-9"], "delta=1e-09 is not in"),
        (["--sample-rate", "1.5"], "--sample-rate=1.5 is not in"),
        (["--canaries", "10"], "canaries=10 is not a whole number of at least 100"),
        (["--guesses", "30000"], "guesses=30000 is more than"),
        (["--confidence", "1"], "confidence=1.0 is not in"),
        (["--method", "sgd"], "method='sgd' is not known"),
        (["--method", "dpsgd", "--k", "3"], "--k is not an option of dpsgd"),
    ],
)
def test_the_command_refuses_in_one_line(options: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", *options]) == 2
    captured = capsys.readouterr()
    assert said in captured.err and captured.err.count("\n") == 1 and captured.out == ""
