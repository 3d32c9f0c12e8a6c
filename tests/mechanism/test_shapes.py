"""Noise shapes: normalised columns, inverses as scipy computes them, and fits that are optima."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from scipy import linalg, optimize, signal

from pmlf import filters
from pmlf.filters import LowPass
from pmlf.mechanism.shape_fit import usual_workload
from pmlf.shapes import NoiseShape, Workload, banded, best, error

COEFFICIENTS = (0.6, 0.5, 0.3, -0.1)


@pytest.mark.parametrize("steps", [1, 3, 4, 9])
def test_no_column_has_a_norm_above_one_wherever_the_run_ends(steps: int) -> None:
    norms = np.linalg.norm(NoiseShape(COEFFICIENTS).matrix(steps), axis=0)
    assert norms.max() <= 1 + 1e-12
    assert np.all(norms[: max(steps - 3, 0)] > 1 - 1e-12)


def test_columns_that_are_bands_steps_apart_are_orthogonal() -> None:
    matrix = NoiseShape(COEFFICIENTS).matrix(20)
    for i, j in itertools.combinations(range(20), 2):
        if j - i >= 4:
            assert matrix[:, i] @ matrix[:, j] == 0.0


def test_the_inverse_is_that_of_scipy() -> None:
    shape = NoiseShape(COEFFICIENTS)
    inverse = linalg.solve_triangular(shape.matrix(30), np.eye(30), lower=True)
    np.testing.assert_allclose(shape.noise_response(30), inverse[:, 0], atol=1e-12)


def test_the_spectrum_is_that_of_the_inverse() -> None:
    shape = NoiseShape(COEFFICIENTS)
    frequencies, power = shape.spectrum(65)
    expected = np.abs(np.fft.rfft(shape.noise_response(4096)))[:: 4096 // 128] ** 2
    np.testing.assert_allclose(frequencies, np.linspace(0, 0.5, 65))
    np.testing.assert_allclose(power, expected, rtol=1e-9)


def test_a_stored_shape_is_read_back_to_the_last_digit() -> None:
    shape = banded(8, 100)
    assert NoiseShape(shape.coefficients) == shape
    assert NoiseShape((1.0, 0.0, 0.0)) == NoiseShape.white()


@pytest.mark.parametrize(
    ("coefficients", "message"),
    [
        ((), "not finite numbers"),
        ((math.nan,), "not finite numbers"),
        ((True, 0.5), "not finite numbers"),
        ((0.0, 1.0), "the first must be positive"),
        ((1.5e-323, 5e-324), "the first must be positive"),  # their norm is rounded down, and columns would be longer
        ((1.0, -1.0), "an inverse that grows"),
        ((1.0, 1.5), "an inverse that grows"),
        (tuple(np.poly([0.95] * 8).tolist()), "float32 would round"),  # noise of 1e17: a step's own noise is lost
        ((1.0,) + (0.01,) * 64, "more than 64"),
        (5, "coefficients=5 are not finite numbers"),
        (None, "coefficients=None are not finite numbers"),
    ],
)
def test_a_shape_that_cannot_be_used_is_refused(coefficients: tuple[float, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        NoiseShape(coefficients)


def simulated(shape: NoiseShape, load: Workload, curvature: float) -> float:
    """Mean square of the parameters' noise, one impulse of white noise after the other, by the definition."""
    total, (a, b) = 0.0, (load.low_pass.a, load.low_pass.b)
    corrections = load.low_pass.corrections(load.steps)
    for j in range(load.steps):
        noise = linalg.solve_triangular(shape.matrix(load.steps), np.eye(load.steps)[j], lower=True)
        inputs: list[float] = []
        outputs: list[float] = []
        parameter = 0.0
        for t in range(load.steps):
            inputs.append(curvature * parameter + noise[t])
            output = sum(b[r] * inputs[t - r] for r in range(min(len(b), t + 1)))
            output -= sum(a[r - 1] * outputs[t - r] for r in range(1, min(len(a), t) + 1))
            outputs.append(output)
            parameter -= (load.rates[t] if load.rates else 1.0) * output / corrections[t]
            total += parameter**2
    return total / load.steps


@pytest.mark.parametrize("rates", [(), tuple(np.linspace(1, 0, 24).tolist())])
@pytest.mark.parametrize(
    "low_pass", [LowPass(), LowPass((-0.9,), (0.15, -0.05)), LowPass((-0.7, -0.2), (0.05, 0.05), corrected=False)]
)
def test_the_error_is_that_of_a_simulation(rates: tuple[float, ...], low_pass: LowPass) -> None:
    load = Workload(steps=24, low_pass=low_pass, rates=rates, curvatures=(0.0, 0.3))
    shape = NoiseShape(COEFFICIENTS)
    ratios = [simulated(shape, load, h) / simulated(NoiseShape.white(), load.unfiltered(), h) for h in load.curvatures]
    assert error(shape, load) == pytest.approx(math.sqrt(np.mean(ratios)), rel=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("rates", [(), tuple(np.linspace(1, 0, 16).tolist())])
def test_no_other_shape_with_as_many_bands_has_a_smaller_error(rates: tuple[float, ...]) -> None:
    load = Workload(steps=16, rates=rates)
    fitted = error(banded(3, workload=load), load)

    def of_roots(roots: np.ndarray) -> float:  # an independent parametrisation: every root is inside the circle
        return error(NoiseShape(np.poly(0.99 * np.tanh(roots)).tolist()), load)

    searches = [optimize.minimize(of_roots, start, method="Nelder-Mead") for start in ([-1, 0], [-0.5, -0.2])]
    assert fitted <= min(found.fun for found in searches) + 1e-4
    assert fitted < error(banded(2, workload=load), load) < error(NoiseShape.white(), load)


def test_one_long_band_fit_is_near_the_square_root_of_the_prefix_sums() -> None:
    """Without filter and curvature, the best Toeplitz shape is close to (1 - x)^(-1/2) (Fichtenberger et al. 2022)."""
    load = Workload(steps=64, low_pass=LowPass(), curvatures=(0.0,))
    root = NoiseShape(signal.lfilter([1.0], [1.0], np.cumprod([1.0, *((r - 0.5) / r for r in range(1, 64))])).tolist())
    assert 0.95 * error(root, load) < error(banded(64, workload=load), load) <= error(root, load)


@pytest.mark.parametrize("rates", [(), (1.0,) * 5])
def test_bands_beyond_the_last_step_change_nothing_but_the_norm(rates: tuple[float, ...]) -> None:
    load = Workload(steps=5, rates=rates)
    fitted = banded(8, workload=load)
    assert error(fitted, load) <= error(banded(4, workload=load), load)


@pytest.mark.slow
def test_the_best_number_of_bands_grows_with_epsilon_and_never_adds_noise() -> None:
    chosen = [best(records=5000, batch_size=100, steps=100, epsilon=e, delta=1e-5) for e in (0.5, 8.0)]
    assert chosen[0].shape.bands < chosen[1].shape.bands
    for choice in chosen:
        assert choice.noise[choice.shape.bands] == min(choice.noise.values()) <= choice.noise[1]


@pytest.mark.slow
def test_best_considers_only_groups_that_can_fill_a_batch() -> None:
    assert set(best(records=1000, batch_size=400, steps=50, epsilon=8.0, delta=1e-4).noise) == {1, 2}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"steps": 0}, "steps=0"),
        ({"curvatures": (2.5,)}, "curvatures="),
        ({"steps": 3, "rates": (1.0,)}, "1 numbers for 3 steps"),
        ({"steps": 3000, "low_pass": LowPass((-0.9,), (0.1,))}, "more than 2000"),
    ],
)
def test_a_workload_out_of_range_is_refused(arguments: dict, message: str) -> None:  # type: ignore[type-arg]
    with pytest.raises(ValueError, match=message):
        Workload(**arguments)


def test_a_curvature_at_which_training_diverges_is_refused() -> None:
    with pytest.raises(ValueError, match="diverges"):
        error(NoiseShape.white(), Workload(steps=300, low_pass=LowPass((-0.9,), (4.0,), corrected=False)))


@pytest.mark.parametrize(
    ("low_pass", "left_out"),
    [(LowPass(a=(0.9,), b=(1.9,)), (1.0,)), (filters.butterworth(2, 0.1), (1.0,)), (LowPass(), ())],
)
def test_the_usual_workload_of_a_filter_leaves_out_where_training_diverges(
    low_pass: LowPass, left_out: tuple[float, ...]
) -> None:
    low_pass = replace(low_pass, corrected=False)
    workload = usual_workload(low_pass)
    assert set(Workload().curvatures) - set(workload.curvatures) == set(left_out)
    assert banded(4, workload=workload).bands == 4
    for curvature in left_out:
        with pytest.raises(ValueError, match="diverges"):
            banded(4, workload=replace(workload, curvatures=(curvature,)))


@pytest.mark.parametrize("changed", [{"records": 0}, {"batch_size": 0.0}, {"batch_size": 200.0}, {"steps": 0}])
def test_best_names_the_argument_that_is_out_of_range(changed: dict[str, float]) -> None:
    ((name, value),) = changed.items()
    with pytest.raises(ValueError, match=f"{name}={value}"):
        best(**{"records": 100, "batch_size": 10, "steps": 10, "epsilon": 1.0, "delta": 1e-5, **changed})  # type: ignore[arg-type]


def test_a_filter_whose_poles_are_near_one_keeps_the_curvature_at_which_it_is_alone() -> None:
    low_pass = replace(filters.butterworth(4, 0.005), corrected=False)
    assert 0.0 in usual_workload(low_pass).curvatures and banded(4, workload=usual_workload(low_pass)).bands == 4
