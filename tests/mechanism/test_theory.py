"""The paper's quantities against their definitions, written out slowly."""

from __future__ import annotations

import math
import time

import numpy as np
import pytest
import torch
from scipy import signal

from pmlf import theory

FILTERS = [
    ((-0.9,), (0.1,)),
    ((-0.9,), (0.15, -0.05)),
    ((-0.7, -0.2), (0.05, 0.05)),
    ((), (1.0,)),
    ((), (0.5, 0.25, 0.25)),
]
TASK = theory.Problem(initial_gap=2.0, smoothness=3.0, gradient_bound=1.5, sampling_deviation=0.7, dimension=50)


@pytest.mark.parametrize("beta", [0.1, 0.999, 1 - 1e-15, 1.0])
@pytest.mark.parametrize("k", [1, 2, 100])
def test_rho_squared_is_one_over_the_sum_of_squared_weights(beta: float, k: int) -> None:
    weights = theory.momentum_weights(beta, k)
    assert weights.sum() == pytest.approx(1) and np.all(np.diff(weights) <= 0)
    assert theory.rho_squared(beta, k) == pytest.approx(1 / np.sum(weights**2), rel=1e-12)


def test_rho_squared_at_the_defaults_and_at_one() -> None:
    assert theory.rho_squared(0.1, 2) == pytest.approx(1.198, abs=5e-4)
    assert theory.rho_squared(1.0, 7) == 7
    for distance in 10.0 ** -np.arange(3, 17):
        assert theory.rho_squared(1 - distance, 7) == pytest.approx(7, abs=20 * distance + 1e-12)


@pytest.mark.parametrize(("a", "b"), FILTERS)
def test_impulse_response_is_the_recursion_on_an_impulse(a: tuple[float, ...], b: tuple[float, ...]) -> None:
    expected: list[float] = []
    for t in range(30):
        past = sum(a[r - 1] * expected[t - r] for r in range(1, len(a) + 1) if r <= t)
        expected.append((b[t] if t < len(b) else 0.0) - past)
    np.testing.assert_allclose(theory.impulse_response(a, b, 30), expected, atol=1e-15)
    assert theory.noise_gain(a, b) == pytest.approx(np.sum(theory.impulse_response(a, b, 2000) ** 2))


@pytest.mark.parametrize(
    ("a", "b"),
    [((-0.9,), (0.1,)), ((-0.9,), (0.15, -0.05)), ((-0.7, -0.2), (0.05, 0.05)), ((-0.5, 0.3, 0.1), (0.4, 0.3, 0.2))],
)
def test_impulse_response_equals_the_papers_partial_fractions(a: tuple[float, ...], b: tuple[float, ...]) -> None:
    residues, poles, _ = signal.residuez([1.0], [1.0, *a])
    expected = [
        sum(b[s] * np.sum(residues * poles ** (r - s)) for s in range(min(len(b) - 1, r) + 1)).real for r in range(25)
    ]
    np.testing.assert_allclose(theory.impulse_response(a, b, 25), expected, atol=1e-13)


def test_normalised_impulse_response_sums_to_one_at_every_step() -> None:
    for t in (0, 1, 5, 50):
        weights = theory.normalised_impulse_response((-0.9,), (0.15, -0.05), t)
        assert len(weights) == t + 1 and weights.sum() == pytest.approx(1)
    np.testing.assert_allclose(theory.normalised_impulse_response((-0.5,), (0.5,), 2), np.array([4, 2, 1]) / 7)


def _slow_gammas(
    a: tuple[float, ...], b: tuple[float, ...], beta: float, k: int, c: list[float], steps: int
) -> tuple[float, float]:
    """Theorem 1 as it reads: iterates i = t-r-k+1 .. t-r that exist, weighted by beta^{t-r-i} over their sum."""
    kappa = theory.impulse_response(a, b, steps)
    top = squares = inverses = 0.0
    for t in range(steps):
        for r in range(t + 1):
            khat = kappa[r] / sum(kappa[: t + 1])
            iterates = [i for i in range(t - r - k + 1, t - r + 1) if i >= 0]
            normaliser = sum(beta ** (t - r - i) for i in iterates)
            chat = sum(beta ** (t - r - i) / normaliser * c[t - i] for i in iterates)
            top += khat * chat
            squares += khat**2
            inverses += khat / chat if khat else 0.0
    return top / squares, top / inverses


@pytest.mark.parametrize(("a", "b"), FILTERS)
@pytest.mark.parametrize(("beta", "k"), [(0.1, 1), (1.0, 3), (0.5, 40)])
def test_gammas_equal_the_double_sum(a: tuple[float, ...], b: tuple[float, ...], beta: float, k: int) -> None:
    steps = 25
    c = [0.95**r * (1 + 0.1 * math.cos(r)) for r in range(steps + 3)]
    expected_dp, expected_sgd = _slow_gammas(a, b, beta, k, c, steps)
    assert theory.gamma_dp(a=a, b=b, beta=beta, k=k, autocorrelation=c, steps=steps) == pytest.approx(expected_dp)
    assert theory.gamma_sgd(a=a, b=b, beta=beta, k=k, autocorrelation=c, steps=steps) == pytest.approx(expected_sgd)


def test_gammas_without_a_filter_and_with_perfect_correlation_are_one() -> None:
    for gamma in (theory.gamma_dp, theory.gamma_sgd):
        assert gamma(a=(), b=(1.0,), beta=0.1, k=2, autocorrelation=[1.0] * 50, steps=50) == pytest.approx(1)


def test_gamma_dp_of_a_long_correlated_run_is_the_inverse_noise_gain() -> None:
    value = theory.gamma_dp(a=(-0.6,), b=(0.4,), beta=0.1, k=2, autocorrelation=[1.0] * 5000, steps=5000)
    assert value == pytest.approx(1 / 0.25, rel=1e-2)


def test_gammas_of_a_long_run_are_fast() -> None:
    start = time.perf_counter()
    for gamma in (theory.gamma_dp, theory.gamma_sgd):
        gamma(a=(-0.9,), b=(0.1,), beta=0.9, k=10, autocorrelation=[1.0] * 5000, steps=5000)
    assert time.perf_counter() - start < 2


def test_gamma_sgd_says_where_it_is_undefined() -> None:
    c = [1.0, 0.5, 0.2, -0.4, -0.4, -0.4]
    with pytest.raises(ValueError, match=r"at r=3 .*Gamma_SGD is undefined"):
        theory.gamma_sgd(a=(-0.9,), b=(0.1,), beta=0.1, k=1, autocorrelation=c, steps=6)
    assert theory.gamma_dp(a=(-0.9,), b=(0.1,), beta=0.1, k=1, autocorrelation=c, steps=6) < 10
    # A lag that the filter gives no weight may have any correlation.
    assert theory.gamma_sgd(a=(), b=(1.0,), beta=0.1, k=1, autocorrelation=c, steps=6) == 1


def test_autocorrelation_of_a_constant_is_one() -> None:
    gradient = torch.tensor([[3.0, -1.0], [0.0, 2.0]], requires_grad=True)
    np.testing.assert_allclose(theory.autocorrelation([gradient] * 6), np.ones(6))


def test_autocorrelation_of_an_autoregression_decays_geometrically() -> None:
    generator = np.random.default_rng(0)
    gradients = [generator.standard_normal(400)]
    for _ in range(3000):
        gradients.append(0.8 * gradients[-1] + 0.6 * generator.standard_normal(400))
    np.testing.assert_allclose(theory.autocorrelation(gradients, lags=5), 0.8 ** np.arange(6), atol=0.02)


def test_autocorrelation_equals_its_definition() -> None:
    gradients = np.random.default_rng(1).standard_normal((9, 4))
    expected = [
        np.mean([gradients[t] @ gradients[t - r] / (gradients[t] @ gradients[t]) for t in range(r, 9)])
        for r in range(9)
    ]
    np.testing.assert_allclose(theory.autocorrelation(list(gradients)), expected)


def test_step_size_limit_is_the_papers_condition() -> None:
    limit = theory.step_size_limit(TASK, k=2, clip_norm=0.5, noise_scale=0.02)
    assert limit == pytest.approx(math.sqrt(0.7**2 / (3**2 * 2**3 * (0.5**2 + 50 * 0.02**2))))


@pytest.mark.parametrize(("learning_rate", "within"), [(0.01, True), (0.5, False)])
def test_convergence_bound_has_the_four_terms_of_the_theorem(learning_rate: float, within: bool) -> None:
    c = [0.99**r for r in range(100)]
    filtering = {"a": (-0.9,), "b": (0.1,), "beta": 0.1, "k": 2, "autocorrelation": c, "steps": 100}
    bound = theory.convergence_bound(
        TASK,
        learning_rate=learning_rate,
        clip_norm=0.5,
        noise_scale=0.02,
        **filtering,  # type: ignore[arg-type]
    )
    assert bound.optimisation == pytest.approx(2.0 / (learning_rate * 100))
    assert bound.clipping == pytest.approx(3 * learning_rate * 0.25)
    assert bound.noise == pytest.approx(3 * learning_rate * 50 * 0.02**2 / theory.gamma_dp(**filtering))  # type: ignore[arg-type]
    numerator = 1.5**2 + 0.7**2 / theory.rho_squared(0.1, 2)
    assert bound.sampling == pytest.approx(numerator / theory.gamma_sgd(**filtering))  # type: ignore[arg-type]
    assert bound.total == pytest.approx(bound.optimisation + bound.clipping + bound.noise + bound.sampling)
    assert bound.within_step_size is within


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: theory.rho_squared(0.0, 2), r"beta=0\.0"),
        (lambda: theory.rho_squared(1.1, 2), r"beta=1\.1"),
        (lambda: theory.rho_squared(float("nan"), 2), "beta=nan"),
        (lambda: theory.rho_squared(0.5, 0), "k=0"),
        (lambda: theory.momentum_weights(0.5, 1.5), r"k=1\.5"),
        (lambda: theory.impulse_response((-1.0,), (0.5,), 5), "unstable"),
        (lambda: theory.impulse_response((), (1.0,), 0), "length=0"),
        (lambda: theory.normalised_impulse_response((), (1.0,), -1), "t=-1"),
        (lambda: theory.normalised_impulse_response((), (0.0, 1.0), 3), "c_0 = 0"),
        (lambda: theory.autocorrelation([]), "empty"),
        (lambda: theory.autocorrelation([[1.0], [2.0]], lags=2), "lags=2"),
        (lambda: theory.autocorrelation([[1.0], [0.0]]), r"gradients\[1\] has squared norm 0"),
        (
            lambda: theory.gamma_dp(a=(), b=(1.0,), beta=0.1, k=2, autocorrelation=[1.0, 0.5], steps=3),
            r"shape \(2,\) is not 3 finite values",
        ),
        (lambda: theory.gamma_dp(a=(), b=(1.0,), beta=0.1, k=2, autocorrelation=[1.0], steps=0), "steps=0"),
        (lambda: theory.gamma_sgd(a=(), b=(1.0,), beta=2.0, k=2, autocorrelation=[1.0], steps=1), r"beta=2\.0"),
        (lambda: theory.step_size_limit(TASK, k=2, clip_norm=0.0, noise_scale=1.0), r"clip_norm=0\.0"),
        (
            lambda: theory.Problem(
                initial_gap=1.0, smoothness=-1.0, gradient_bound=1.0, sampling_deviation=1.0, dimension=3
            ),
            r"smoothness=-1\.0",
        ),
    ],
)
def test_impossible_arguments_are_refused(call: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()  # type: ignore[operator]
