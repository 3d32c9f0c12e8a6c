"""Every method through one contract: six releases equal the float64 one-sample-at-a-time reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pmlf import PrivateStep, methods
from pmlf.basics.batches import select
from pmlf.filters import LowPass
from pmlf.mechanism.points import Points, past_iterates
from pmlf.sampling import LogicalBatch
from pmlf.shapes import NoiseShape
from reference import Reference
from zoo import CASES, make

LEARNING_RATE = 0.1
SAMPLES = 7


def momentum(decay: float, k: int, normalised: bool) -> Any:
    def points(t: int) -> list[tuple[list[float], float]]:
        existing = min(k, t + 1)
        total = sum(decay**j for j in range(existing)) if normalised else 1.0
        return [([0.0] * j + [1.0], decay**j / total) for j in range(existing)]

    return points


def disk_points(kappa: float, gamma: float) -> Any:
    c = (1 - kappa) / (kappa * gamma)
    return lambda t: [([1.0], 1.0)] if t == 0 else [([1 + gamma, -gamma], c), ([1.0], 1 - c)]


# What ALGORITHM says of each method, written out independently: (method, points, a, b, corrected)
FAMILY: dict[str, tuple[methods.Method, Any, tuple[float, ...], tuple[float, ...], bool]] = {
    "dpsgd": (methods.dpsgd(), momentum(1.0, 1, True), (), (1.0,), True),
    "lp-dpsgd": (
        methods.lp_dpsgd(a=(-0.9,), b=(0.15, -0.05)), momentum(1.0, 1, True), (-0.9,), (0.15, -0.05), True,
    ),
    "inner-outer": (
        methods.inner_outer(k=2, gamma=0.1, beta=0.9), momentum(0.1, 2, False), (-0.9,), (1.0,), False,
    ),
    "dp-pmlf": (methods.dp_pmlf(k=3, beta=0.5), momentum(0.5, 3, True), (-0.9,), (0.1,), True),
    "dp-pmlf-second-order": (
        methods.dp_pmlf(k=2, beta=1.0, a=(-0.7, -0.2), b=(0.05, 0.05)),
        momentum(1.0, 2, True), (-0.7, -0.2), (0.05, 0.05), True,
    ),
    "dp-pmlf-without-pm": (methods.dp_pmlf_without_pm(), momentum(1.0, 1, True), (-0.9,), (0.1,), True),
    "dp-pmlf-without-lf": (methods.dp_pmlf_without_lf(k=2, beta=0.1), momentum(0.1, 2, True), (), (1.0,), True),
    "lp-dpsgd-shaped": (
        methods.lp_dpsgd_shaped(a=(-0.9,), b=(0.15, -0.05)), momentum(1.0, 1, True), (-0.9,), (0.15, -0.05), False,
    ),
    "dp-pmlf-shaped": (methods.dp_pmlf_shaped(k=3, beta=0.5), momentum(0.5, 3, True), (-0.9,), (0.1,), False),
    "disk": (methods.disk(kappa=0.7, gamma=0.5), disk_points(0.7, 0.5), (-0.3,), (0.7,), True),
}  # fmt: skip


def relative_difference(ours: list[torch.Tensor], reference: list[torch.Tensor]) -> float:
    pairs = list(zip(ours, reference, strict=True))
    distance = sum(float((o.double() - r).square().sum()) for o, r in pairs) ** 0.5
    if distance == 0.0:  # an empty batch without a filter: exactly zero on both sides
        return 0.0
    return distance / sum(float(r.square().sum()) for _, r in pairs) ** 0.5


def worst_difference(name: str, method_name: str, physical: int, clipping: str = "flat") -> float:
    """The largest relative difference from the reference over six releases, the third of an empty batch."""
    case = CASES[name]
    method, points, a, b, corrected = FAMILY[method_name]
    model = make(name)
    clip_norm = 1.0
    step = PrivateStep(
        model, case.loss, method=method, clip_norm=clip_norm, noise_multiplier=0.0, expected_batch_size=5.0,
        clipping=clipping, cycle=method.noise.bands,  # type: ignore[arg-type]
    )  # fmt: skip
    reference = Reference(
        model, case.loss, points=points, a=a, b=b, corrected=corrected, clip_norm=clip_norm, expected_batch_size=5.0,
        clipping=clipping,
    )  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    batch = case.batch(SAMPLES)
    worst = 0.0
    for t in range(6):
        drawn, size = (None, 0) if t == 2 else (select(batch, slice(t % 3, SAMPLES)), SAMPLES - t % 3)
        if drawn is not None:
            for start in range(0, size, physical):
                step.accumulate(select(drawn, slice(start, min(start + physical, size))))
        step.release(LogicalBatch.whole(t, samples=size, cycle=method.noise.bands))
        expected = reference.step(drawn)
        grads = [p.grad for p in step.trained]
        assert all(g is not None for g in grads)
        worst = max(worst, relative_difference(grads, expected))  # type: ignore[arg-type]
        optimizer.step()
        reference.update(expected, LEARNING_RATE)
    return worst


pytestmark = pytest.mark.filterwarnings("ignore:(noise_multiplier=0|no loss depends on .unused)")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "method"),
    [*((model, "dp-pmlf") for model in CASES), *(("tied", method) for method in FAMILY if method != "dp-pmlf")],
)
def test_six_releases_equal_the_float64_reference(model: str, method: str) -> None:
    assert worst_difference(model, method, physical=SAMPLES) < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "physical"),
    # pieces of 3 end with one of a single sample; pieces of 1 are all there is for the first look
    [*((model, 3) for model in CASES), ("cnn5", 1), ("tied", 1), ("unusual", 1)],
)
def test_micro_batches_change_nothing(model: str, physical: int) -> None:
    assert worst_difference(model, "dp-pmlf", physical) < 1e-4


@pytest.mark.parametrize("clipping", ["automatic", "per-layer"])
@pytest.mark.parametrize(
    "model", ["tied", pytest.param("cnn5", marks=pytest.mark.slow), pytest.param("vit", marks=pytest.mark.slow)]
)
def test_other_clippings_equal_the_reference(model: str, clipping: str) -> None:
    assert worst_difference(model, "dp-pmlf", SAMPLES, clipping) < 1e-4


def test_every_preset_is_in_the_family_and_resolves() -> None:
    assert set(methods.NAMES) <= set(FAMILY)
    for name in methods.NAMES:
        assert methods.resolve(name).name == name
    with pytest.raises(ValueError, match=r"'dp-sgd' is not known: give one of dpsgd, .*Did you mean 'dpsgd'\?"):
        methods.resolve("dp-sgd")


@pytest.mark.parametrize(("k", "beta"), [(1, 0.1), (2, 0.1), (8, 0.5), (8, 1.0)])
def test_momentum_weights_sum_to_one_at_every_step(k: int, beta: float) -> None:
    points = methods.dp_pmlf(k=k, beta=beta).points
    for t in range(10):
        weights = [point.weight for point in points.at(t)]
        assert len(weights) == min(k, t + 1)
        assert sum(weights) == pytest.approx(1.0, abs=1e-15)
        assert weights == sorted(weights, reverse=True)


def test_inner_outer_weights_are_not_normalised() -> None:
    assert [point.weight for point in methods.inner_outer().points.at(5)] == [1.0, 0.1]


def test_disk_with_all_weight_ahead_starts_at_the_initial_point() -> None:
    method = methods.disk(kappa=0.5, gamma=1.0)  # c = 1
    assert [(p.coefficients, p.weight) for p in method.points.at(0)] == [((1.0,), 1.0)]
    assert [(p.coefficients, p.weight) for p in method.points.at(1)] == [((2.0, -1.0), 1.0)]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: methods.dp_pmlf(k=0), "k=0 is not"),
        (lambda: methods.dp_pmlf(k=1.5), "k=1.5 is not"),  # type: ignore[arg-type]
        (lambda: methods.dp_pmlf(beta=0.0), r"beta=0.0 is not in \(0, 1\]"),
        (lambda: methods.dp_pmlf(beta=1.1), r"beta=1.1 is not in \(0, 1\]"),
        (lambda: methods.dp_pmlf(beta=float("nan")), "beta=nan is not"),
        (lambda: methods.inner_outer(gamma=0.0), "gamma=0.0 is not"),
        (lambda: methods.inner_outer(beta=1.0), "beta=1.0 is not"),
        (lambda: methods.disk(kappa=1.0), "kappa=1.0 is not"),
        (lambda: methods.disk(gamma=0.0), "gamma=0.0 is not"),
    ],
)
def test_bad_coefficients_are_refused_by_name(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_points_reach_only_iterates_that_exist() -> None:
    points = Points(points=past_iterates(4, 0.5))
    assert [max(p.reach for p in points.at(t)) for t in range(5)] == [0, 1, 2, 3, 3]


@pytest.mark.parametrize("preset", ["lp_dpsgd", "dp_pmlf"])
def test_one_band_is_the_method_with_white_noise(preset: str) -> None:
    plain, shaped = getattr(methods, preset), getattr(methods, f"{preset}_shaped")
    assert plain(bands=1) == plain() and plain().low_pass.corrected and plain().noise.bands == 1
    assert shaped(bands=4).noise == plain(bands=4).noise and not shaped().low_pass.corrected


def test_shaped_noise_with_other_sampling_is_refused() -> None:
    model, loss = make("tied"), CASES["tied"].loss
    for method, cycle in (("dp-pmlf-shaped", 1), ("dp-pmlf-shaped", 4), ("dp-pmlf", 8)):
        with pytest.raises(ValueError, match=f"cycle={cycle}"):
            PrivateStep(model, loss, method=method, noise_multiplier=1.0, expected_batch_size=5.0, cycle=cycle)


@pytest.mark.parametrize("name", ["lp-dpsgd-shaped", "dp-pmlf-shaped"])
def test_a_shaped_preset_is_not_white(name: str) -> None:
    with pytest.raises(ValueError, match=f"one band is white noise, which is method {name.removesuffix('-shaped')}"):
        methods.PRESETS[name](bands=1)


@pytest.mark.parametrize("part", ["points", "low_pass", "noise"])
def test_a_method_is_made_of_its_parts(part: str) -> None:
    parts: dict[str, Any] = {"points": methods.dpsgd().points, "low_pass": LowPass(), "noise": NoiseShape.white()}
    with pytest.raises(ValueError, match=f"{part}=None is not a"):
        methods.Method(name="mine", **(parts | {part: None}))
