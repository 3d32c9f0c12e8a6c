"""`check` as a report: what it measures, what it changes (nothing), and mixing that eval mode hides."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pmlf
from pmlf import PrivateStep, methods
from pmlf.basics.batches import synthetic
from pmlf.checks.inspection import LARGEST_SENSITIVITY, Checked
from zoo import CASES, classify, images, make


def checked(name: str, method: str = "dp-pmlf") -> Checked:
    case = CASES[name]
    return pmlf.check(make(name), case.loss, case.batch(3), method=method)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_what_is_measured_of_a_sound_model_is_rounding_and_a_sensitivity_of_at_most_one(name: str) -> None:
    report = checked(name)
    assert 0.0 < report.sensitivity <= LARGEST_SENSITIVITY
    assert report.dependence < 1e-3 and report.disagreement < 1e-2


def test_sensitivity_is_the_largest_clipped_norm() -> None:
    """For samples that do not touch each other, leaving one out moves the sum by min(|v|, C)."""
    model = nn.Linear(3, 1, bias=False)
    samples = torch.tensor([[0.3, 0.0, 0.0], [0.0, 0.4, 0.3], [0.1, 0.0, 0.2]])

    def loss(model: Any, batch: Tensor) -> Tensor:
        return model(batch)[:, 0]

    assert pmlf.check(model, loss, samples, method="dpsgd").sensitivity == pytest.approx(0.5, rel=1e-5)
    assert pmlf.check(model, loss, samples, clip_norm=0.2).sensitivity == pytest.approx(1.0, rel=1e-5)


@pytest.mark.parametrize("method", methods.NAMES)
def test_every_layer_is_named_with_its_rule_and_all_parameters_are_counted(method: str) -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, 4))
    report = pmlf.check(model, classify, images(6)(3), method=method)
    assert [(cost.layer, cost.kind, cost.rule) for cost in report.layers] == [
        ("0", "Linear", "linear"),
        ("2", "LayerNorm", "layer norm"),
        ("3", "Linear", "linear"),
    ]
    assert sum(cost.parameters for cost in report.layers) == sum(p.numel() for p in model.parameters())
    assert all(cost.seconds > 0 for cost in report.layers)
    page = str(report)
    assert "sensitivity" in page and "layer norm" in page and max(map(len, page.splitlines())) < 120


class Scaled(nn.Module):
    """No rule knows it: its gradients come by vmap."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


class NormalisedInTraining(nn.Module):
    """BatchNorm made by hand: in eval mode nothing is mixed."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer((x - x.mean(0)) / (x.var(0, correction=0) + 1e-3).sqrt() if self.training else x)


def test_the_operation_of_every_use_is_said() -> None:
    model = nn.Sequential(Scaled(), nn.Linear(6, 4))
    rules = {cost.layer: cost.rule for cost in pmlf.check(model, classify, images(6)(3)).layers}
    assert rules == {"0.scale": "mul", "1.weight": "linear", "1.bias": "linear"}


def test_mixing_in_training_mode_alone_is_found() -> None:
    model, batch = NormalisedInTraining(), images(6)(4)
    with pytest.raises(ValueError, match="gradient depends on the other samples"):
        pmlf.check(model, classify, batch)
    with pytest.raises(ValueError, match="gradient depends on the other samples"):
        PrivateStep(model, classify, noise_multiplier=1.0, expected_batch_size=4).accumulate(batch)
    assert pmlf.check(model.eval(), classify, batch).modes == ("eval mode",)  # trained as it is, it is sound


class HalvedInTraining(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)
        self.layer = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.drop(x)) * (0.5 if self.training else 1.0)


def test_a_model_that_differs_in_training_mode_is_looked_at_in_both() -> None:
    assert pmlf.check(HalvedInTraining(), classify, images(6)(3)).modes == ("eval mode", "training mode")
    assert pmlf.check(nn.Sequential(nn.Dropout(), nn.Linear(6, 4)), classify, images(6)(3)).modes == ("eval mode",)


def test_nothing_is_changed() -> None:
    model = HalvedInTraining()
    model.register_buffer("public", torch.arange(3.0))
    model.layer.eval()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    modes = [module.training for module in model.modules()]
    torch.manual_seed(3)
    state = torch.get_rng_state()
    pmlf.check(model, classify, images(6)(3))
    assert torch.equal(torch.get_rng_state(), state)
    assert modes == [module.training for module in model.modules()]
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def test_a_buffer_that_the_loss_rewrites_is_refused_and_put_back() -> None:
    model = nn.Sequential(nn.Linear(6, 4))
    model.register_buffer("seen", torch.zeros(()))

    def counting(model: Any, batch: Any) -> Tensor:
        model.seen.add_(1.0)
        return classify(model, batch)

    with pytest.raises(ValueError, match="'seen' was written by the forward pass"):
        pmlf.check(model, counting, images(6)(3))
    assert float(model.seen) == 0.0


@pytest.mark.parametrize(("clip_norm", "size"), [(0.0, 3), (float("nan"), 3), (1.0, 0)])
def test_what_cannot_be_checked_is_refused(clip_norm: float, size: int) -> None:
    with pytest.raises(ValueError, match=r"clip_norm|the batch is empty"):
        pmlf.check(
            nn.Linear(6, 4),
            classify,
            images(6)(3) if size else (torch.zeros(0, 6), torch.zeros(0).long()),
            clip_norm=clip_norm,
        )


def test_synthetic_batches_have_the_shapes_and_dtypes_and_nothing_else_of_the_records() -> None:
    records = {
        "pixels": torch.full((3, 2, 2), 7.0, dtype=torch.float64),
        "bytes": torch.full((3, 50), 255, dtype=torch.uint8),
        "tokens": torch.full((3, 9), 40_000),
        "label": torch.tensor([5, 6, 7]),
    }
    made = synthetic(records, seed=0)
    again = synthetic({name: torch.zeros_like(value) for name, value in records.items()}, seed=0)
    for name, tensor in records.items():
        assert made[name].shape == tensor.shape and made[name].dtype == tensor.dtype
        assert torch.equal(made[name], again[name])
    assert int(made["label"].max()) <= 1 and int(made["tokens"].max()) <= 1 and made["tokens"][:, 0].all()
