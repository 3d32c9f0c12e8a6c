"""Hostile values into every public function: each works, or says in one sentence which argument is wrong.

One argument of a sound call is replaced at a time. What may come out is a result that is not NaN, or a ValueError or
TypeError that names the argument: no error from inside (ZeroDivisionError, OverflowError, torch's RuntimeError), and
never an epsilon that understates what one step alone spends.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scipy import special
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import pmlf
from pmlf import PrivateStep, audit, methods, theory
from pmlf.audit import bounds
from pmlf.mechanism import accounting, filters, sampling
from pmlf.mechanism.noise import SeededRandomness, Stream, randomness_from

WEIRD: list[Any] = [
    None,
    True,
    "3",
    b"3",
    [],
    {},
    object(),
    1j,
    torch.tensor(float("nan")),
    torch.ones(2),
    torch.empty(1, device="meta"),
    np.array([1.0, 2.0]),
    np.float32("nan"),
]
NUMBERS = st.one_of(
    st.sampled_from([0, 0.0, -0.0, -1, 1, 10**30, -(10**30), 1e308, 5e-324, 1e-300, math.inf, -math.inf, math.nan]),
    st.floats(),
    st.integers(-5, 5),
)
HOSTILE = st.one_of(NUMBERS, st.sampled_from(WEIRD))
SEQUENCES = st.one_of(HOSTILE, st.lists(NUMBERS, max_size=3), st.lists(st.sampled_from(WEIRD), min_size=1, max_size=2))


@dataclass(frozen=True)
class Sound:
    """A call that works, and which of its arguments to spoil, with what."""

    function: Callable[..., Any]
    arguments: dict[str, Any]
    numbers: tuple[str, ...] = ()
    sequences: tuple[str, ...] = ()
    anything: tuple[str, ...] = ()


def linear_loss(model: Any, batch: Any) -> Tensor:
    result: Tensor = model(batch[0]).square().sum(1)
    return result


def dataset() -> TensorDataset:
    return TensorDataset(torch.randn(40, 3, generator=torch.Generator().manual_seed(0)), torch.zeros(40).long())


def private_step(**options: Any) -> PrivateStep:
    return PrivateStep(nn.Linear(3, 2), linear_loss, **options)


def private_run(**options: Any) -> Any:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return pmlf.make_private(model=model, optimizer=optimizer, dataset=dataset(), loss_fn=linear_loss, **options)


def poisson(**options: Any) -> Any:
    return sampling.PoissonBatches(dataset(), randomness=SeededRandomness(0), **options)


def accumulated(batch: Any) -> None:
    step = private_step(noise_multiplier=1.0, expected_batch_size=4.0)
    step.accumulate(batch)
    step.release()
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in step.trained)


def gaussian_noise(std: Any) -> Tensor:
    tensor = torch.zeros(4)
    Stream(bytes(32)).add_gaussian_(tensor, std)
    return tensor


SCORES = {"inside": np.linspace(0, 2, 50), "outside": np.linspace(-1, 1, 50)}
FILTER = {"a": (-0.9,), "b": (0.1,)}
THEORY = {**FILTER, "beta": 0.1, "k": 2, "autocorrelation": [1.0] * 8, "steps": 5}
MECHANISM = {"noise_multiplier": 1.0, "sample_rate": 1.0, "steps": 5, "accountant": "rdp"}
PROBLEM = {"initial_gap": 1.0, "smoothness": 1.0, "gradient_bound": 1.0, "sampling_deviation": 1.0, "dimension": 10}

SOUND: dict[str, Sound] = {
    "accounting.epsilon": Sound(
        accounting.epsilon,
        {**MECHANISM, "delta": 1e-5},
        ("noise_multiplier", "sample_rate", "steps", "delta"),
        (),
        ("accountant",),
    ),
    "accounting.delta": Sound(
        accounting.delta,
        {**MECHANISM, "epsilon": 1.0},
        ("noise_multiplier", "sample_rate", "steps", "epsilon"),
        (),
        ("accountant",),
    ),
    "accounting.noise_multiplier": Sound(
        accounting.noise_multiplier,
        {"target_epsilon": 1.0, "target_delta": 1e-5, "sample_rate": 1.0, "steps": 3, "accountant": "rdp"},
        ("target_epsilon", "target_delta", "sample_rate", "steps"),
        (),
        ("accountant",),
    ),
    "LowPass": Sound(filters.LowPass, FILTER, (), ("a", "b")),
    "LowPass.impulse_response": Sound(filters.LowPass(**FILTER).impulse_response, {"length": 3}, ("length",)),
    "LowPass.corrections": Sound(filters.LowPass(**FILTER).corrections, {"steps": 3}, ("steps",)),
    "LowPass.frequency_response": Sound(filters.LowPass(**FILTER).frequency_response, {"points": 8}, ("points",)),
    "butterworth": Sound(filters.butterworth, {"order": 2, "cutoff": 0.2}, ("order", "cutoff")),
    "moving_average": Sound(filters.moving_average, {"length": 3}, ("length",)),
    "exponential": Sound(filters.exponential, {"decay": 0.5}, ("decay",)),
    "lp_dpsgd": Sound(methods.lp_dpsgd, FILTER, (), ("a", "b")),
    "inner_outer": Sound(methods.inner_outer, {"k": 2, "gamma": 0.1, "beta": 0.9}, ("k", "gamma", "beta")),
    "dp_pmlf": Sound(methods.dp_pmlf, {"k": 2, "beta": 0.1, **FILTER}, ("k", "beta"), ("a", "b")),
    "dp_pmlf_without_lf": Sound(methods.dp_pmlf_without_lf, {"k": 2, "beta": 0.1}, ("k", "beta")),
    "disk": Sound(methods.disk, {"kappa": 0.7, "gamma": 0.5}, ("kappa", "gamma")),
    "resolve": Sound(methods.resolve, {"method": "disk"}, (), (), ("method",)),
    "momentum_weights": Sound(theory.momentum_weights, {"beta": 0.1, "k": 2}, ("beta", "k")),
    "rho_squared": Sound(theory.rho_squared, {"beta": 0.1, "k": 2}, ("beta", "k")),
    "impulse_response": Sound(theory.impulse_response, {**FILTER, "length": 3}, ("length",), ("a", "b")),
    "normalised_impulse_response": Sound(theory.normalised_impulse_response, {**FILTER, "t": 3}, ("t",), ("a", "b")),
    "noise_gain": Sound(theory.noise_gain, FILTER, (), ("a", "b")),
    "autocorrelation": Sound(
        theory.autocorrelation, {"gradients": [[1.0], [2.0]], "lags": 1}, ("lags",), ("gradients",)
    ),
    "gamma_dp": Sound(theory.gamma_dp, THEORY, ("beta", "k", "steps"), ("a", "b", "autocorrelation")),
    "gamma_sgd": Sound(theory.gamma_sgd, THEORY, ("beta", "k", "steps"), ("a", "b", "autocorrelation")),
    "Problem": Sound(theory.Problem, PROBLEM, tuple(PROBLEM)),
    "step_size_limit": Sound(
        theory.step_size_limit,
        {"problem": theory.Problem(**PROBLEM), "k": 2, "clip_norm": 1.0, "noise_scale": 0.1},
        ("k", "clip_norm", "noise_scale"),
    ),
    "convergence_bound": Sound(
        theory.convergence_bound,
        {**THEORY, "problem": theory.Problem(**PROBLEM), "learning_rate": 0.1, "clip_norm": 1.0, "noise_scale": 0.1},
        ("learning_rate", "steps", "clip_norm", "noise_scale", "beta", "k"),
    ),
    "PrivateStep": Sound(
        private_step,
        {
            "noise_multiplier": 1.0,
            "expected_batch_size": 4.0,
            "clip_norm": 1.0,
            "method": "dpsgd",
            "clipping": "flat",
            "generator": None,
            "secure_noise": False,
        },
        ("noise_multiplier", "expected_batch_size", "clip_norm"),
        (),
        ("method", "clipping", "generator", "secure_noise"),
    ),
    "make_private": Sound(
        private_run,
        {
            "target_delta": 1e-3,
            "noise_multiplier": 1.0,
            "batch_size": 10,
            "steps": 3,
            "clip_norm": 1.0,
            "max_physical_batch_size": 8,
            "seed": 0,
            "ema": 0.9,
            "num_workers": 0,
        },
        (
            "target_delta",
            "noise_multiplier",
            "batch_size",
            "steps",
            "clip_norm",
            "max_physical_batch_size",
            "seed",
            "ema",
            "num_workers",
        ),
    ),
    "make_private to a target": Sound(
        private_run,
        {"target_delta": 1e-3, "target_epsilon": 8.0, "batch_size": 40, "epochs": 1.0},
        ("target_epsilon", "epochs"),
    ),
    "PoissonBatches": Sound(
        poisson,
        {"expected_batch_size": 5.0, "max_physical_batch_size": 4, "num_workers": 0},
        ("expected_batch_size", "max_physical_batch_size", "num_workers"),
    ),
    "evaluate": Sound(
        lambda batch_size: pmlf.evaluate(nn.Linear(3, 2), dataset(), batch_size=batch_size),
        {"batch_size": 4},
        ("batch_size",),
    ),
    "check": Sound(
        lambda clip_norm: (
            pmlf.check(nn.Linear(3, 2), linear_loss, (torch.ones(2, 3),), clip_norm=clip_norm).sensitivity
        ),
        {"clip_norm": 1.0},
        ("clip_norm",),
    ),
    "Stream.chosen": Sound(Stream(bytes(32)).chosen, {"population": 4, "rate": 0.5}, ("population", "rate")),
    "Stream.words": Sound(Stream(bytes(32)).words, {"count": 4}, ("count",)),
    "Stream.add_gaussian_": Sound(gaussian_noise, {"std": 1.0}, ("std",)),
    "randomness_from": Sound(randomness_from, {"generator": None}, (), (), ("generator",)),
    "audit.AuditSettings": Sound(
        audit.AuditSettings,
        {
            "epsilon": 1.0,
            "delta": 1e-5,
            "steps": 2,
            "sample_rate": 0.5,
            "canaries": 200,
            "guesses": 10,
            "confidence": 0.99,
            "seed": 0,
        },
        ("epsilon", "delta", "steps", "sample_rate", "canaries", "guesses", "confidence", "seed"),
    ),
    "raw_epsilon": Sound(
        bounds.raw_epsilon, {**SCORES, "delta": 1e-5, "confidence": 0.9}, ("delta", "confidence"), ("inside", "outside")
    ),
    "gaussian_mu": Sound(bounds.gaussian_mu, {**SCORES, "confidence": 0.9}, ("confidence",), ("inside", "outside")),
    "gaussian_epsilon": Sound(bounds.gaussian_epsilon, {"mu": 1.0, "delta": 1e-5}, ("mu", "delta")),
    "one_run_p_value": Sound(
        bounds.one_run_p_value,
        {"canaries": 20, "guesses": 10, "correct": 8, "epsilon": 1.0, "delta": 1e-5},
        ("canaries", "guesses", "correct", "epsilon", "delta"),
    ),
}


def attempt(call: Sound, name: str, value: Any) -> Any:
    """The result, or None where the argument was refused by name."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # a delta above 1/n, no noise: said, and allowed
        try:
            return call.function(**{**call.arguments, name: value})
        except (ValueError, TypeError) as error:
            assert name in str(error), f"{type(error).__name__} does not name {name}={value!r}: {error}"
            return None


def refuse_nan(result: Any) -> None:
    if isinstance(result, (float, np.ndarray)):
        assert not np.isnan(result).any()


@pytest.mark.parametrize("name", SOUND)
def test_the_sound_call_works(name: str) -> None:
    call = SOUND[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        call.function(**call.arguments)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "argument"), [(n, a) for n, call in SOUND.items() for a in (*call.numbers, *call.anything)]
)
@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_a_hostile_number_works_or_is_named(name: str, argument: str, data: st.DataObject) -> None:
    refuse_nan(attempt(SOUND[name], argument, data.draw(HOSTILE)))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "argument"), [(n, a) for n, call in SOUND.items() for a in call.sequences])
@settings(max_examples=30, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_a_hostile_sequence_works_or_is_named(name: str, argument: str, data: st.DataObject) -> None:
    refuse_nan(attempt(SOUND[name], argument, data.draw(SEQUENCES)))


def spent_by_one_step(noise_multiplier: float, sample_rate: float, epsilon: float) -> float:
    """delta at epsilon of one Poisson-subsampled Gaussian, removing a record, in closed form."""
    if epsilon > 700:
        return 0.0
    z, q = noise_multiplier, sample_rate
    with np.errstate(all="ignore"):
        threshold = z * math.log((math.expm1(epsilon) + q) / q) + 1 / (2 * z)  # in deviations of the noise
        above, shifted = special.ndtr(-threshold), special.ndtr(1 / z - threshold)
        return float((1 - q) * above + q * shifted - math.exp(epsilon) * above)


@pytest.mark.slow
@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    noise_multiplier=st.one_of(st.floats(0.3, 1e3), st.sampled_from([5e-324, 1e-4, 0.0099, 1e9, 1e300])),
    sample_rate=st.one_of(st.floats(0.05, 1.0), st.sampled_from([5e-324, 1.0, 1 - 2**-53])),
    steps=st.sampled_from([1, 2, 50]),
    delta=st.sampled_from([1e-10, 1e-5, 0.1, 1 - 1e-9]),
    accountant=st.sampled_from(accounting.ACCOUNTANTS),
)
def test_epsilon_is_never_less_than_one_step_spends(
    noise_multiplier: float, sample_rate: float, steps: int, delta: float, accountant: str
) -> None:
    try:
        epsilon = accounting.epsilon(
            noise_multiplier=noise_multiplier, sample_rate=sample_rate, steps=steps, delta=delta, accountant=accountant
        )
    except ValueError as error:
        assert any(word in str(error) for word in ("noise_multiplier", "sample_rate", "delta"))
        return
    assert epsilon >= 0.0
    assert spent_by_one_step(noise_multiplier, sample_rate, epsilon) <= delta * (1 + 1e-6) + 1e-12


BATCHES: list[Any] = [
    None,
    3,
    "text",
    [],
    (),
    {},
    object(),
    torch.tensor(1.0),
    (torch.ones(2, 3), torch.ones(4)),
    (torch.ones(2, 5),),
    (torch.ones(2, 3, dtype=torch.complex64),),
    (torch.ones(2, 3, dtype=torch.float64),),
    (torch.ones(2, 3).long(),),
    (torch.ones(2, 3).bool(),),
    (torch.ones(2, 3).to_sparse(),),
    (torch.empty(2, 3, device="meta"),),
    (["a", "b"],),
]


@pytest.mark.parametrize("batch", BATCHES, ids=[str(i) for i in range(len(BATCHES))])
def test_a_hostile_batch_is_taken_or_refused_in_a_sentence(batch: Any) -> None:
    try:
        accumulated(batch)
    except (ValueError, TypeError) as error:
        assert len(str(error)) > 20
    except RuntimeError as error:  # what the user's own model says of shapes and dtypes it cannot take
        assert str(error).startswith("mat1 and mat2")


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))  # of the model: whether it makes 3e38 too large hangs on its weights
@pytest.mark.parametrize("fill", [math.nan, math.inf, -math.inf, 3e38, -3e38, 1e-45, 0.0])
def test_hostile_values_in_a_batch_never_reach_the_release(fill: float, seed: int) -> None:
    torch.manual_seed(seed)
    accumulated((torch.tensor([[1.0, 2.0, 3.0], [fill, 1.0, fill]]),))


@pytest.mark.parametrize("what", ["model", "fix_model", "check", "loss"])
@pytest.mark.parametrize("value", [None, 3, "model", torch.ones(2), nn.ReLU()], ids=repr)
def test_what_is_no_model_is_refused_in_a_sentence(what: str, value: Any) -> None:
    try:
        if what == "model":
            PrivateStep(value, linear_loss, noise_multiplier=1.0, expected_batch_size=1)
        elif what == "fix_model":
            pmlf.fix_model(value)
        elif what == "check":
            pmlf.check(value, linear_loss, (torch.ones(2, 3),))
        else:
            step = PrivateStep(nn.Linear(3, 2), value, noise_multiplier=1.0, expected_batch_size=1)
            step.accumulate((torch.ones(2, 3),))
    except (ValueError, TypeError) as error:
        assert len(str(error)) > 20 and "NoneType' object" not in str(error)
