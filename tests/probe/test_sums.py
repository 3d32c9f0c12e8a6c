"""Every sensitive sum of a probe: the right value, and no record moves it by more than its sensitivity."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from pmlf.mechanism.filters import LowPass
from pmlf.probe.conditioning import BlockConditioning, FeatureBlock, mean_sum, moment_sum, scale_of
from pmlf.probe.products import ConditionedRows
from pmlf.probe.release import SensitiveSum
from pmlf.probe.rows import FeatureRows
from pmlf.probe.settings import ProbeSettings
from pmlf.probe.training import StepGradient, gradient_sums

WIDTHS = (7, 4)
D = sum(WIDTHS)
BLOCKS = (FeatureBlock(start=0, stop=7, weight=0.7), FeatureBlock(start=7, stop=D, weight=0.3))
Floats = NDArray[Any]


@dataclass(frozen=True, kw_only=True)
class Case:
    """Records with means and scales as it would be released."""

    features: Floats
    targets: torch.Tensor
    weights: torch.Tensor
    means: tuple[Floats, ...]
    moments: tuple[Floats, ...]
    settings: ProbeSettings

    @property
    def conditioning(self) -> tuple[BlockConditioning, ...]:
        return tuple(
            BlockConditioning(
                block=block,
                weight=block.weight,
                mean=torch.from_numpy(mean),
                scale=scale_of(block, torch.from_numpy(moment), 0.9),
            )
            for block, mean, moment in zip(BLOCKS, self.means, self.moments, strict=True)
        )


def settings_of(
    head: str, outputs: int, records: int, *, clip_norm: float = 0.3, intercept: float = 0.1
) -> ProbeSettings:
    return ProbeSettings(
        head=head,
        outputs=outputs,
        records=records,
        blocks=BLOCKS,
        epsilon=1.0,
        delta=1e-5,
        steps=5,
        batch_size=None,
        clip_norm=clip_norm,
        learning_rate=None,
        score_noise=0.9,
        low_pass=LowPass(),
        schedule="cosine",
        averaging=0.0,
        mean_share=0.05,
        moments_share=0.05,
        moment_clip=2.0,
        whitening=0.9,
        intercept=intercept,
    )


def case(head: str = "softmax", records: int = 40, seed: int = 0) -> Case:
    rng = np.random.default_rng(seed)
    outputs = 3
    features = rng.normal(size=(records, D)).astype(np.float32) * rng.uniform(0.1, 9, size=(records, 1)).astype("f")
    targets: Any = rng.integers(outputs, size=records)
    if head != "softmax":
        targets = rng.uniform(-1, 1, size=(records, outputs)).astype(np.float32)
    means = tuple(rng.normal(size=width) * 0.2 for width in WIDTHS)
    moments = tuple(rng.uniform(0.01, 0.5, size=width) for width in WIDTHS)
    return Case(
        features=features,
        targets=torch.from_numpy(np.asarray(targets)),
        weights=torch.from_numpy(rng.normal(size=(D + 1, outputs)) * 3),
        means=means,
        moments=moments,
        settings=settings_of(head, outputs, records),
    )


# One record at a time, in float64, from the formulas alone.


def unit(x: Floats) -> Floats:
    length = np.linalg.norm(x.astype(np.float64))
    return x.astype(np.float64) / length if length > 1e-12 else np.zeros(len(x))


def usable(x: Floats) -> bool:
    return bool(np.isfinite(x.astype(np.float64)).all())


def reference_mean(features: Floats, block: FeatureBlock) -> Floats:
    return sum((unit(x[block.columns]) for x in features if usable(x)), np.zeros(block.width))


def reference_moments(features: Floats, block: FeatureBlock, mean: Floats, clip: float) -> Floats:
    total = np.zeros(block.width)
    for x in filter(usable, features):
        centred = unit(x[block.columns]) - mean
        square = (centred / max(np.linalg.norm(centred), 1e-2 * np.linalg.norm(mean))) ** 2
        total += square * min(1.0, clip / np.linalg.norm(square))
    return total


def conditioned_record(one: Case, x: Floats) -> Floats:
    pieces = []
    total = sum(block.weight for block in BLOCKS)
    for each, mean in zip(one.conditioning, one.means, strict=True):
        scale = each.scale.numpy().astype(np.float64)
        w = scale * (unit(x[each.block.columns]) - mean)
        w = w / max(np.linalg.norm(w), 1e-2 * np.linalg.norm(scale * mean))
        pieces.append(w * math.sqrt((1 - one.settings.intercept) * each.block.weight / total))
    return np.concatenate([*pieces, [math.sqrt(one.settings.intercept)]])


def reference_gradient(one: Case, features: Floats, targets: torch.Tensor) -> Floats:
    weights = one.weights.numpy()
    total = np.zeros_like(weights)
    for x, target in zip(features, targets.numpy(), strict=True):
        if not usable(x):
            continue
        w = conditioned_record(one, x)
        scores = w @ weights
        if one.settings.head == "softmax":
            p = np.exp(scores - scores.max())
            residual = p / p.sum() - np.eye(len(scores))[target]
        elif one.settings.head == "sigmoid":
            residual = 1 / (1 + np.exp(-scores)) - target
        else:
            residual = scores - target
        gradient = np.outer(w, residual)
        total += gradient * min(1.0, one.settings.clip_norm / np.linalg.norm(gradient))
    return total


def gradient(one: Case, features: Floats, targets: torch.Tensor, chosen: Floats | None = None) -> SensitiveSum:
    conditioned = ConditionedRows(FeatureRows(features), one.conditioning, intercept=one.settings.intercept)
    step = StepGradient(conditioned=conditioned, targets=targets, weights=one.weights, settings=one.settings)
    return gradient_sums([step], chosen)[0]


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("head", ["softmax", "sigmoid", "least-squares"])
def test_the_clipped_sum_is_that_of_one_record_at_a_time(head: str, dtype: type) -> None:
    one = case(head)
    features = one.features.astype(dtype)
    found = gradient(one, features, one.targets).values.numpy()
    np.testing.assert_allclose(found, reference_gradient(one, features, one.targets), atol=2e-6)


def test_several_sums_in_one_pass_are_those_of_one_record_at_a_time() -> None:
    """Of different means, scales, heads, clip norms and weights."""
    cases = [case("softmax"), case("least-squares"), case("sigmoid", seed=3)]
    cases[1] = Case(**{**vars(cases[1]), "settings": settings_of("least-squares", 3, 40, clip_norm=0.05)})
    rows = FeatureRows(cases[0].features)
    steps = [
        StepGradient(
            conditioned=ConditionedRows(rows, one.conditioning, intercept=one.settings.intercept),
            targets=one.targets,
            weights=one.weights,
            settings=one.settings,
        )
        for one in cases
    ]
    for one, found in zip(cases, gradient_sums(steps, None), strict=True):
        assert found.sensitivity == one.settings.clip_norm
        np.testing.assert_allclose(
            found.values.numpy(), reference_gradient(one, cases[0].features, one.targets), atol=2e-6
        )


def test_a_poisson_batch_sums_its_records_only() -> None:
    one = case()
    chosen = np.array([3, 4, 17, 39])
    found = gradient(one, one.features, one.targets, chosen).values.numpy()
    np.testing.assert_allclose(found, reference_gradient(one, one.features[chosen], one.targets[chosen]), atol=1e-6)
    empty = gradient(one, one.features, one.targets, np.array([], dtype=np.int64)).values
    assert not empty.any()


@pytest.mark.parametrize("place", [0, 1])
def test_mean_and_moments_are_those_of_one_record_at_a_time(place: int) -> None:
    one, block = case(), BLOCKS[place]
    rows = FeatureRows(one.features)
    np.testing.assert_allclose(mean_sum(rows, block).values.numpy(), reference_mean(one.features, block), atol=1e-5)
    found = moment_sum(rows, block, torch.from_numpy(one.means[place]), 0.4).values.numpy()
    np.testing.assert_allclose(found, reference_moments(one.features, block, one.means[place], 0.4), atol=1e-5)


def test_the_sums_do_not_depend_on_the_size_of_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    one = case(records=200)
    together = gradient(one, one.features, one.targets).values
    monkeypatch.setattr("pmlf.probe.rows._BLOCK_BYTES", 4 * D * 7)
    torch.testing.assert_close(gradient(one, one.features, one.targets).values, together, atol=1e-5, rtol=0)


def adversaries(one: Case) -> dict[str, Floats]:
    """Records that try to move a sum by more than its sensitivity."""
    near = np.concatenate([mean / np.linalg.norm(mean) for mean in one.means])
    tiny = np.full(D, 1e-30)
    return {
        "zero": np.zeros(D),
        "nan": np.full(D, np.nan),
        "one nan": np.where(np.arange(D) == 2, np.nan, 1.0),
        "infinite": np.full(D, np.inf),
        "huge": np.full(D, 1e38),
        "larger than float32": np.full(D, 1e300),
        "tiny": tiny,
        "a huge and a tiny block": np.where(np.arange(D) < 7, 1e30, 1e-30),
        "along the mean": near,
        "one coordinate": np.eye(D)[3] * 1e5,
        "just beside the mean": near * (1 + 1e-7) + 1e-8,
    }


NAMES = tuple(adversaries(case()))


def moved(sum_of: Any, features: Floats, targets: torch.Tensor, record: Floats, target: Any) -> float:
    """The distance between the sums with and without one more record, at noise 0, over the sensitivity."""
    more = np.concatenate([features.astype(record.dtype), record[None]])
    with_it = sum_of(more, torch.cat([targets, target]))
    without = sum_of(features.astype(record.dtype), targets)
    assert torch.isfinite(with_it.values).all()
    return float((with_it.values - without.values).norm()) / with_it.sensitivity


@pytest.mark.parametrize("name", NAMES)
def test_no_record_moves_a_sum_by_more_than_its_sensitivity(name: str) -> None:
    for head in ("softmax", "least-squares"):
        one = case(head)
        record = adversaries(one)[name]
        target = one.targets[:1] if head == "softmax" else torch.full((1, 3), 1e30)
        sums: list[Any] = [lambda x, y, one=one: gradient(one, x, y)]
        for block, mean in zip(BLOCKS, one.means, strict=True):
            sums.append(lambda x, y, block=block: mean_sum(FeatureRows(x), block))
            sums.append(
                lambda x, y, block=block, mean=mean: moment_sum(FeatureRows(x), block, torch.from_numpy(mean), 0.4)
            )
        for sum_of in sums:
            assert moved(sum_of, one.features, one.targets, record, target) <= 1 + 1e-4


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**20), size=st.floats(-8, 8), spread=st.floats(-9, 0))
def test_records_found_by_search_move_no_sum_too_far(seed: int, size: float, spread: float) -> None:
    """Records near the mean, where the difference to the mean cancels, at any scale."""
    one = case(seed=seed % 7)
    rng = np.random.default_rng(seed)
    near = np.concatenate([mean / np.linalg.norm(mean) for mean in one.means])
    record = (near + rng.normal(size=D) * 10**spread) * 10**size
    target = one.targets[:1]
    assert moved(lambda x, y: gradient(one, x, y), one.features, one.targets, record, target) <= 1 + 1e-4
    for block, mean in zip(BLOCKS, one.means, strict=True):
        ways = (
            lambda x, y, block=block: mean_sum(FeatureRows(x), block),
            lambda x, y, block=block, mean=mean: moment_sum(FeatureRows(x), block, torch.from_numpy(mean), 0.4),
        )
        for sum_of in ways:
            assert moved(sum_of, one.features, one.targets, record, target) <= 1 + 1e-4


def test_a_mean_far_longer_than_a_record_is_no_way_out() -> None:
    """Noise can make a released mean long: centred records are then nearly the mean itself."""
    one = case()
    long = tuple(mean * 1e3 for mean in one.means)
    far = Case(**{**vars(one), "means": long})
    for record in adversaries(far).values():
        assert moved(lambda x, y: gradient(far, x, y), far.features, far.targets, record, far.targets[:1]) <= 1 + 1e-4


def test_every_conditioned_record_has_norm_one() -> None:
    one = case()
    conditioned = ConditionedRows(FeatureRows(one.features), one.conditioning, intercept=0.1)
    torch.testing.assert_close(conditioned.norms, torch.ones(len(one.features)), atol=1e-5, rtol=0)


def test_a_record_with_nan_changes_nothing_at_all() -> None:
    one = case()
    more = np.concatenate([one.features, np.full((1, D), np.nan, dtype=np.float32)])
    targets = torch.cat([one.targets, one.targets[:1]])
    torch.testing.assert_close(
        gradient(one, more, targets).values, gradient(one, one.features, one.targets).values, atol=1e-6, rtol=0
    )


def test_a_mapped_file_gives_the_same_sums(tmp_path: Any) -> None:
    one = case()
    np.save(tmp_path / "x.npy", one.features)
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    same = gradient(one, mapped, one.targets).values
    assert torch.equal(same, gradient(one, one.features, one.targets).values)
