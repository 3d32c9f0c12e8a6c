"""Units of several records: the mean of a unit's momenta is clipped once, whatever the model, method and strategy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from pmlf import PrivateStep, methods
from pmlf.basics.batches import picked
from pmlf.engine.strategy import Fixed, Strategy, Way
from reference import Reference, to_double
from zoo import CASES, make

pytestmark = pytest.mark.filterwarnings("ignore:(noise_multiplier=0|no loss depends on .unused)")
SIZES = (1, 3, 50, 2)  # records of each unit
WIDE = {
    **{name: methods.PRESETS[name]() for name in methods.NAMES if not name.endswith("shaped")},
    "dp-pmlf-k4": methods.dp_pmlf(k=4, beta=0.9),
    "inner-outer-k4": methods.inner_outer(k=4, gamma=0.9),
}


def of_units(sizes: Sequence[int]) -> Tensor:
    """The unit of each record, in an order that mixes units."""
    units = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    return units[torch.randperm(len(units), generator=torch.Generator().manual_seed(2))]


def moved_step(
    model: nn.Module, loss_fn: Any, method: methods.Method, strategy: Strategy | None = None, **more: Any
) -> PrivateStep:
    """A step of units with a full history of iterates that differ."""
    step = PrivateStep(
        model, loss_fn, method=method, noise_multiplier=0.0, expected_batch_size=1.0, strategy=strategy, units=True,
        **more,
    )  # fmt: skip
    for _ in range(method.points.depth - 1):
        step.release()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.02 * torch.randn_like(parameter))
    return step


def summed(step: PrivateStep, batch: Any, units: Tensor, kept: Tensor | None = None) -> Tensor:
    """The sum before noise of the records kept."""
    places = torch.arange(len(units)) if kept is None else kept.nonzero().flatten()
    step.accumulate(picked(batch, places.tolist()), units=units[places])
    found = step.sensitive_sum()
    assert found is not None
    total = torch.cat([value.flatten().double() for value in found.values.values()])
    step.discard()
    return total


@pytest.mark.parametrize(
    ("model", "method"),
    [
        *(("vit", method) for method in WIDE),
        ("cnn5", "dpsgd"),
        pytest.param("cnn5", "dp-pmlf-k4", marks=pytest.mark.slow),
    ],
)
def test_one_unit_moves_the_sum_by_at_most_the_clip_norm(model: str, method: str) -> None:
    torch.manual_seed(0)
    case, units = CASES[model], of_units(SIZES)
    batch = case.batch(len(units))
    step = moved_step(make(model), lambda m, b: 1e3 * case.loss(m, b), WIDE[method])
    whole = summed(step, batch, units)
    moves = [float((whole - summed(step, batch, units, units != unit)).norm()) for unit in range(len(SIZES))]
    assert max(moves) <= 1.0 + 1e-4
    assert min(moves) >= 1.0 - 1e-3  # every unit is clipped here, so each has the same say, however many records it has


@pytest.mark.slow
def test_clipped_by_records_a_unit_moves_the_sum_by_far_more() -> None:
    """What the test above would see if units were forgotten."""
    torch.manual_seed(0)
    case, units = CASES["vit"], of_units(SIZES)
    batch = case.batch(len(units))
    step = moved_step(make("vit"), lambda m, b: 1e3 * case.loss(m, b), methods.dpsgd())
    records = torch.arange(len(units))  # each its own unit
    largest = units == 2
    assert float((summed(step, batch, records) - summed(step, batch, records, ~largest)).norm()) > 3.0


def momentum_points(t: int) -> list[tuple[list[float], float]]:
    weights = [0.5**j for j in range(min(3, t + 1))]
    return [([0.0] * j + [1.0], weight / sum(weights)) for j, weight in enumerate(weights)]


def disk_points(t: int) -> list[tuple[list[float], float]]:
    c = 0.3 / (0.7 * 0.5)
    return [([1.0], 1.0)] if t == 0 else [([1.5, -0.5], c), ([1.0], 1 - c)]


POINTS: dict[str, tuple[methods.Method, Any]] = {
    "dp-pmlf": (methods.dp_pmlf(k=3, beta=0.5), momentum_points),
    "disk": (methods.disk(kappa=0.7, gamma=0.5), disk_points),
}


def reference_sum(
    step: PrivateStep, iterates: list[Any], loss_fn: Any, points: Any, batch: Any, units: Tensor
) -> Tensor:
    """sum_u clip(mean of the momenta of u's records), in float64, one record at a time."""
    reference = Reference(
        step.model, loss_fn, points=points, a=(), b=(1.0,), corrected=True, clip_norm=step.settings.clip_norm,
        expected_batch_size=1.0,
    )  # fmt: skip
    reference.iterates = iterates
    total: Tensor | None = None
    for unit in units.unique():
        own = (units == unit).nonzero().flatten().tolist()
        vectors = [reference.momentum(to_double(picked(batch, [place]))) for place in own]
        mean = torch.stack([torch.cat([part.flatten() for part in v]) for v in vectors]).mean(0)
        clipped = mean * min(1.0, reference.clip_norm / float(mean.norm()))
        total = clipped if total is None else total + clipped
    assert total is not None
    return total


def difference(model_name: str, method: str, sizes: Sequence[int], clip_norm: float, **more: Any) -> float:
    torch.manual_seed(0)
    case, units, model = CASES[model_name], of_units(sizes), make(model_name)
    chosen, points = POINTS[method]
    batch, iterates = case.batch(len(units)), list[Any]()
    step = PrivateStep(
        model, case.loss, method=chosen, noise_multiplier=0.0, expected_batch_size=1.0, clip_norm=clip_norm,
        units=True, **more,
    )  # fmt: skip
    for _ in range(chosen.points.depth - 1):
        step.release()
        iterates.insert(0, [p.detach().double().clone() for p in step.trained])
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.02 * torch.randn_like(parameter))
    ours = summed(step, batch, units)
    wanted = reference_sum(step, iterates, case.loss, points, batch, units)
    return float((ours - wanted).norm() / wanted.norm())


@pytest.mark.parametrize(
    ("model", "method", "clip_norm"),
    [
        ("cnn5", "dp-pmlf", 1.0),
        ("vit", "dp-pmlf", 1.0),
        ("vit", "disk", 100.0),
        ("tied", "disk", 1.0),
        pytest.param("bert", "dp-pmlf", 1.0, marks=pytest.mark.slow),
    ],
)
def test_the_sum_is_that_of_means_clipped_once(model: str, method: str, clip_norm: float) -> None:
    assert difference(model, method, (1, 4, 2), clip_norm) < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("way", ["held at once", "held late", "gram", "root", "dropped"])
@pytest.mark.parametrize("model", ["convolutions", "tied"])
def test_every_strategy_gives_the_same(model: str, way: Way) -> None:
    assert difference(model, "disk", (1, 3, 2), 1.0, strategy=Fixed(way)) < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("model", ["convolutions", "unusual"])
def test_units_with_as_many_records_need_no_padding(model: str) -> None:
    assert difference(model, "disk", (2, 2), 1.0) < 1e-4


@pytest.mark.parametrize("gradients", ["vmap", "one-by-one"])
def test_units_with_more_records_than_share_a_pass_are_clipped_once_too(gradients: str, monkeypatch: Any) -> None:
    from pmlf.engine import strategy

    monkeypatch.setattr(strategy, "LATE_BYTES", 1)  # one record a pass
    assert difference("vit", "dp-pmlf", (1, 4, 2), 1.0, gradients=gradients) < 1e-4


def test_a_record_that_is_not_finite_silences_its_unit_alone() -> None:
    torch.manual_seed(0)
    case, units = CASES["cnn5"], of_units((2, 3))
    images, labels = case.batch(len(units))
    step = moved_step(make("cnn5"), case.loss, methods.dpsgd(), assume_independent_samples=True)
    alone = summed(step, (images, labels), units, units == 1)
    broken = images.clone()
    broken[(units == 0).nonzero()[0]] = torch.inf
    assert torch.allclose(summed(step, (broken, labels), units), alone, rtol=1e-6, atol=1e-9)


def test_a_unit_in_two_micro_batches_is_refused() -> None:
    case = CASES["checkpointed"]
    step = moved_step(make("checkpointed"), case.loss, methods.dpsgd())
    step.accumulate(case.batch(4), units=["ann", "bob", "ann", "cid"])
    with pytest.raises(ValueError, match="two micro-batches"):
        step.accumulate(case.batch(2), units=["dan", "ann"])
    step.accumulate(case.batch(2), units=["dan", "eve"])
    step.release()
    step.accumulate(case.batch(2), units=["ann", "bob"])  # the next logical batch


@pytest.mark.parametrize(
    ("units", "said"),
    [
        (None, "needs the unit of each record"),
        ([1, 2, 3], "needs the unit of each record"),
        ([1, None], "missing"),
        ([1.5, 2.0], "whole number or one text"),
        (np.array([[1, 2]]), "2 axes"),
    ],
)
def test_units_that_are_not_one_id_per_record_are_refused(units: Any, said: str) -> None:
    case = CASES["checkpointed"]
    step = moved_step(make("checkpointed"), case.loss, methods.dpsgd())
    with pytest.raises(ValueError, match=said):
        step.accumulate(case.batch(2), units=units)


def test_a_step_of_records_refuses_units() -> None:
    case = CASES["checkpointed"]
    step = PrivateStep(make("checkpointed"), case.loss, noise_multiplier=0.0, expected_batch_size=1.0)
    with pytest.raises(ValueError, match="units=True"):
        step.accumulate(case.batch(2), units=[1, 2])
