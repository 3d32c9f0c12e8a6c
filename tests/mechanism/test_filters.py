"""Filters: against scipy, against the published numbers, and as a state that saves, loads and copies."""

from __future__ import annotations

import copy
import dataclasses
import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import signal

from pmlf.mechanism.filter_report import analyse
from pmlf.mechanism.filters import FilterMemory, LowPass, butterworth, exponential, moving_average

# a, b, noise gain, mean delay
TABLE = [
    ((-0.6,), (0.4,), 0.25, 1.5),
    ((-0.6,), (0.2, 0.2), 0.2, 2.0),
    ((-0.6,), (0.5, -0.1), 0.3125, 1.25),
    ((-0.9,), (0.1,), 0.0526, 9.0),
    ((-0.9,), (0.05, 0.05), 0.05, 9.5),
    ((-0.9,), (0.15, -0.05), 0.0605, 8.5),
    ((-0.7, -0.2), (0.05, 0.05), 0.0417, 11.5),
    ((), (1.0,), 1.0, 0.0),
]
INNER_OUTER = LowPass((-0.9,), (1.0,), corrected=False)
DIFFERENCE = LowPass((), (1.0, -1.0), corrected=False)  # of DC gain 0
FILTERS = [  # one of each kind of recursion
    LowPass(),
    LowPass((-0.9,), (0.1,)),
    LowPass((-0.9,), (0.15, -0.05)),
    butterworth(4, 0.2),
    moving_average(5),  # no feedback
    LowPass((-0.3,), (0.2, 0.1, 0.1, 0.3)),  # more feedforward than feedback
    LowPass((-0.5, 0.1, 0.05, -0.02), (0.33, 0.3)),  # more feedback than feedforward
    INNER_OUTER,
    LowPass((), (2.0,), corrected=False),  # a gain, and no memory
    LowPass((), (0.0, 1.0), corrected=False),  # a delay
]


def _filtered_by_scipy(low_pass: LowPass, inputs: np.ndarray) -> np.ndarray:
    denominator = (1.0, *low_pass.a)
    outputs = signal.lfilter(low_pass.b, denominator, inputs, axis=0)
    if not low_pass.corrected:
        return outputs
    step_response = signal.lfilter(low_pass.b, denominator, np.ones(len(inputs)))
    return outputs / step_response.reshape(-1, *[1] * (inputs.ndim - 1))


def _run(memory: FilterMemory, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """Filter steps x shape, one tensor per parameter, step by step."""
    outputs = [torch.empty_like(tensor) for tensor in inputs]
    for t in range(len(inputs[0])):
        for output, result in zip(outputs, memory.apply([tensor[t].clone() for tensor in inputs]), strict=True):
            output[t] = result
    return outputs


def _noise(steps: int, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(steps)
    return [torch.randn(steps, *shape, generator=generator, dtype=dtype) for shape in [(3, 2), (4,), ()]]


@pytest.mark.parametrize("low_pass", FILTERS, ids=str)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 2e-5)])
def test_memory_equals_scipy(low_pass: LowPass, dtype: torch.dtype, tolerance: float) -> None:
    inputs = _noise(60, dtype)
    for output, tensor in zip(_run(FilterMemory(low_pass), inputs), inputs, strict=True):
        expected = _filtered_by_scipy(low_pass, tensor.double().numpy())
        np.testing.assert_allclose(output.double().numpy(), expected, rtol=tolerance, atol=tolerance)


@st.composite
def _stable_filters(draw: st.DrawFn) -> tuple[list[float], list[float]]:
    """a from random poles inside the unit circle; b positive, of DC gain 1."""
    real = draw(st.lists(st.floats(-0.95, 0.95), max_size=3))
    pairs = draw(st.lists(st.tuples(st.floats(0, 0.95), st.floats(0, np.pi)), max_size=2))
    poles = [*real, *(radius * np.exp(sign * 1j * angle) for radius, angle in pairs for sign in (1, -1))]
    denominator = np.real(np.poly(poles)) if poles else np.ones(1)
    b = np.array(draw(st.lists(st.floats(0.1, 1), min_size=1, max_size=4)))
    return denominator[1:].tolist(), (b * denominator.sum() / b.sum()).tolist()


@pytest.mark.slow
@settings(deadline=None, max_examples=100)
@given(_stable_filters())
def test_memory_equals_scipy_for_random_stable_filters(coefficients: tuple[list[float], list[float]]) -> None:
    inputs = _noise(40)
    try:
        low_pass = LowPass(*coefficients)
    except ValueError as error:  # a resonant filter may have a c_t close to zero, or a gain off by rounding
        assert re.search("blow up the noise|has DC gain", str(error))
        low_pass = LowPass(*coefficients, corrected=False)
    for output, tensor in zip(_run(FilterMemory(low_pass), inputs), inputs, strict=True):
        expected = _filtered_by_scipy(low_pass, tensor.numpy())
        np.testing.assert_allclose(output.numpy(), expected, rtol=1e-8, atol=1e-8 * np.abs(expected).max())


@pytest.mark.parametrize(("a", "b", "noise_gain", "delay"), TABLE)
def test_noise_gain_and_delay_are_the_published_ones(
    a: tuple[float, ...], b: tuple[float, ...], noise_gain: float, delay: float
) -> None:
    low_pass = LowPass(a, b)
    assert low_pass.noise_gain == pytest.approx(noise_gain, abs=5e-5)
    assert low_pass.mean_delay == pytest.approx(delay, abs=1e-9)
    assert low_pass.dc_gain == pytest.approx(1)
    assert low_pass.is_convex


@pytest.mark.parametrize("low_pass", FILTERS, ids=str)
def test_closed_forms_equal_sums_over_the_impulse_response(low_pass: LowPass) -> None:
    kappa = low_pass.impulse_response(3000)
    assert low_pass.noise_gain == pytest.approx(np.sum(kappa**2))
    assert low_pass.dc_gain == pytest.approx(np.sum(kappa))
    assert low_pass.mean_delay == pytest.approx(np.arange(3000) @ kappa / np.sum(kappa), abs=1e-9)
    expected = np.cumsum(kappa) if low_pass.corrected else np.ones(3000)
    np.testing.assert_allclose(low_pass.corrections(3000), expected, atol=1e-9)


def test_noise_gain_is_the_variance_of_filtered_noise() -> None:
    low_pass = LowPass((-0.9,), (0.15, -0.05))
    noise = torch.randn(400, 5000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    (output,) = _run(FilterMemory(low_pass), [noise])
    assert float(output[-100:].var()) == pytest.approx(low_pass.noise_gain, rel=0.02)


def test_frequency_response_starts_at_the_dc_gain_and_ends_at_nyquist() -> None:
    frequencies, response = LowPass((-0.9,), (0.05, 0.05)).frequency_response(64)
    assert frequencies[0] == 0 and frequencies[-1] == 0.5 and len(response) == 64
    assert abs(response[0]) == pytest.approx(1) and abs(response[-1]) == pytest.approx(0, abs=1e-12)


def test_coefficients_are_stored_as_tuples_of_float() -> None:
    low_pass = LowPass([-0.5], np.array([0.25, 0.25]))
    assert low_pass.a == (-0.5,) and low_pass.b == (0.25, 0.25)
    assert all(type(value) is float for value in (*low_pass.a, *low_pass.b))
    assert low_pass == LowPass((-0.5,), (0.25, 0.25)) and hash(low_pass) == hash(LowPass((-0.5,), (0.25, 0.25)))


@pytest.mark.parametrize(
    ("a", "b", "message"),
    [
        (-0.9, (0.1,), r"a=-0\.9 is not a sequence"),
        ((-0.9,), 0.1, r"b=0\.1 is not a sequence"),
        ({-0.9}, (0.1,), "not a sequence"),
        ((-0.9,), {0.05: 1}, "not a sequence"),
        ("-0.9", (0.1,), "not a sequence"),
        ((-0.9,), (float("nan"),), "finite"),
        ((float("inf"),), (0.1,), "finite"),
        ((-0.9,), (), "lets nothing through"),
        ((-0.9,), (0.0, 0.0), "lets nothing through"),
        ((-0.9,), (0.0, 0.1), "b_0 = 0"),
        ((-1.0,), (0.5, -0.5), "poles 1"),
        ((-1.2,), (-0.2,), r"poles 1\.2"),
        ((-2.0, 1.0), (0.3, -0.3), "unstable"),
        ((0.0, 1.0), (2.0,), "unstable"),
        ((-0.9,), (1.0,), "DC gain 10"),
        ((), (0.5,), r"DC gain 0\.5"),
        ((-0.9,), (0.1001,), r"DC gain 1\.001"),
        ((), (1.0, -1.0, 1.0), "c_1 = 0"),
        ((), (1e-5, 1.0, -1.0 + 1e-5, 1.0 - 2e-5), "c_2 = "),
    ],
)
def test_what_cannot_work_is_refused(a: object, b: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LowPass(a, b)  # type: ignore[arg-type]


def test_uncorrected_filters_may_have_any_gain_but_must_be_stable() -> None:
    assert INNER_OUTER.dc_gain == pytest.approx(10)
    outputs = _run(FilterMemory(INNER_OUTER), [torch.ones(500, 2, dtype=torch.float64)])[0]
    torch.testing.assert_close(outputs[0], torch.ones(2, dtype=torch.float64))  # m = beta m + vbar, as it is
    torch.testing.assert_close(outputs[-1], torch.full((2,), 10.0, dtype=torch.float64))
    with pytest.raises(ValueError, match="unstable"):
        LowPass((-1.0,), (1.0,), corrected=False)


def test_a_filter_of_gain_zero_has_no_mean_delay() -> None:
    assert not DIFFERENCE.is_convex and analyse(DIFFERENCE).mean_delay is None
    with pytest.raises(ValueError, match="no mean delay"):
        _ = DIFFERENCE.mean_delay


@pytest.mark.slow
def test_a_constant_comes_out_as_it_went_in_however_long_the_run() -> None:
    for low_pass in (LowPass((-0.9,), (0.15, -0.05)), butterworth(2, 0.05)):
        memory = FilterMemory(low_pass)
        worst = max(abs(memory.apply([torch.ones((), dtype=torch.float32)])[0].item() - 1) for _ in range(20_000))
        assert worst < 5e-4
        assert memory.step == 20_000


@pytest.mark.parametrize("low_pass", FILTERS, ids=str)
def test_a_result_is_never_memory_of_the_filter(low_pass: LowPass) -> None:
    memory = FilterMemory(low_pass)
    kept, copies = [], []
    for _ in range(4):
        (result,) = memory.apply([torch.randn(5, dtype=torch.float64)])
        kept.append(result)
        copies.append(result.clone())
    for result, then in zip(kept, copies, strict=True):
        assert torch.equal(result, then)


def test_a_scale_is_applied_to_the_input() -> None:
    inputs = torch.randn(6, 4, dtype=torch.float64)
    for low_pass in FILTERS:
        scaled, plain = FilterMemory(low_pass), FilterMemory(low_pass)
        for value in inputs:
            (one,), (other,) = scaled.apply([value.clone()], scale=0.25), plain.apply([0.25 * value])
            torch.testing.assert_close(one, other)


@pytest.mark.parametrize("low_pass", FILTERS, ids=str)
def test_memory_holds_as_many_tensors_as_the_order(low_pass: LowPass) -> None:
    memory = FilterMemory(low_pass)
    memory.apply([torch.ones(3, dtype=torch.float64), torch.ones(2, dtype=torch.float32)])
    held = memory.state_dict()["memory"]
    if low_pass.identity:
        assert held is None and low_pass.order == 0
    else:
        assert [len(tensors) for tensors in held] == [low_pass.order] * 2
        assert all(tensor.dtype == torch.float64 and tensor.shape == (3,) for tensor in held[0])
        assert all(tensor.dtype == torch.float32 and tensor.shape == (2,) for tensor in held[1])


@pytest.mark.parametrize("low_pass", FILTERS, ids=str)
@pytest.mark.parametrize("before", [0, 7])
def test_resume_from_state_yields_identical_results(low_pass: LowPass, before: int, tmp_path: Path) -> None:
    inputs = _noise(20, torch.float32)
    memory = FilterMemory(low_pass)
    _run(memory, [tensor[:before] for tensor in inputs])
    torch.save(memory.state_dict(), tmp_path / "state")
    saved = memory.state_dict()
    expected = _run(memory, [tensor[before:] for tensor in inputs])
    for state in (saved, torch.load(tmp_path / "state", weights_only=True)):  # later steps left `saved` alone
        resumed = FilterMemory(low_pass)
        resumed.load_state_dict(state)
        assert resumed.step == before
        for result, wanted in zip(_run(resumed, [tensor[before:] for tensor in inputs]), expected, strict=True):
            assert torch.equal(result, wanted)


def test_states_that_do_not_fit_are_refused() -> None:
    memory = FilterMemory(LowPass((-0.9,), (0.1,)))
    memory.apply([torch.ones(3)])
    state = memory.state_dict()
    with pytest.raises(ValueError, match="build that filter first"):
        FilterMemory(LowPass((-0.6,), (0.4,))).load_state_dict(state)
    with pytest.raises(ValueError, match="pass what state_dict"):
        FilterMemory(LowPass((-0.9,), (0.1,))).load_state_dict({"step": 3})
    other = FilterMemory(LowPass((-0.9,), (0.1,)))
    other.apply([torch.ones(2)])
    with pytest.raises(ValueError, match="load it into the same model"):
        other.load_state_dict(state)
    assert other.step == 1
    with pytest.raises(ValueError, match="same parameters in the same order"):
        memory.apply([torch.ones(2)])
    with pytest.raises(ValueError, match="same parameters in the same order"):
        memory.apply([torch.ones(3), torch.ones(3)])
    assert memory.step == 1


def test_deep_copies_are_independent() -> None:
    inputs = _noise(12)
    memory = FilterMemory(butterworth(3, 0.3))
    _run(memory, [tensor[:6] for tensor in inputs])
    twin = copy.deepcopy(memory)
    _run(twin, [100 * tensor for tensor in inputs])
    rest = _run(memory, [tensor[6:] for tensor in inputs])
    whole = _run(FilterMemory(butterworth(3, 0.3)), inputs)
    for result, expected in zip(rest, whole, strict=True):
        torch.testing.assert_close(result, expected[6:], rtol=0, atol=0)


def test_designs_are_what_their_names_say() -> None:
    assert exponential(0.9) == LowPass((-0.9,), (1 - 0.9,))
    assert moving_average(4).impulse_response(6).tolist() == [0.25] * 4 + [0.0] * 2
    for order in (1, 2, 4, 8):
        low_pass = butterworth(order, 0.1)
        assert low_pass.order == order and low_pass.dc_gain == pytest.approx(1, abs=1e-9)
        frequencies, response = low_pass.frequency_response(1001)
        half_power = np.interp(0.05, frequencies, np.abs(response))
        assert half_power == pytest.approx(np.sqrt(0.5), abs=1e-3)


@pytest.mark.parametrize(
    ("design", "message"),
    [
        (lambda: butterworth(0, 0.1), "order=0"),
        (lambda: butterworth(2, 1.0), r"cutoff=1\.0"),
        (lambda: butterworth(12, 0.001), "unstable|DC gain"),
        (lambda: moving_average(0), "length=0"),
        (lambda: exponential(1.0), r"decay=1\.0"),
    ],
)
def test_impossible_designs_are_refused(design: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        design()  # type: ignore[operator]


def test_analysis_is_ready_for_json() -> None:
    report = json.loads(json.dumps(dataclasses.asdict(analyse(LowPass((-0.9,), (0.15, -0.05)), weights=3))))
    assert report["poles"] == [[0.9, 0.0]] and report["largest_pole"] == 0.9
    assert report["weights"] == pytest.approx([0.15, 0.085, 0.0765])
    assert report["noise_gain"] == pytest.approx(0.0605, abs=1e-4)
    assert analyse(LowPass()).largest_pole == 0
