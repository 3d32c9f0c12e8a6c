"""What is said where gradients cannot be taken by rules, and where a model is not ready."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pmlf
from pmlf import PrivateStep


def _step(model: nn.Module, loss: Any) -> PrivateStep:
    return PrivateStep(model, loss, method="dpsgd", noise_multiplier=1.0, expected_batch_size=4)


def test_a_refusal_measures_which_way_out_is_faster() -> None:
    def centred(model: Any, x: Tensor) -> Tensor:
        loss: Tensor = model(x - x.mean(0)).sum(1)
        return loss

    with pytest.raises(ValueError, match=r"several samples.*(faster here than|equally fast here)"):
        _step(nn.Linear(3, 2), centred).accumulate(torch.randn(4, 3))
    with pytest.raises(ValueError, match=r"several samples.*(faster here than|equally fast here)"):
        pmlf.check(nn.Linear(3, 2), centred, torch.randn(4, 3))


def test_a_refusal_recommends_no_way_that_does_not_run() -> None:
    def centred(model: Any, x: Tensor) -> Tensor:
        loss: Tensor = model(x - float(x.mean())).sum(1)
        return loss

    with pytest.raises(ValueError, match='gradients="vmap" does not run this loss: give gradients="one-by-one"'):
        _step(nn.Linear(3, 2), centred).accumulate(torch.randn(4, 3))


def test_a_model_on_the_meta_device_is_said_to_be_so() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, 2))
    with pytest.raises(ValueError, match=r"'0\.weight' is on the meta device"):
        _step(model, lambda model, x: model(x).sum(1))


def test_gradients_that_are_all_zero_are_said_to_be_so() -> None:
    found = pmlf.check(nn.Linear(3, 2), lambda model, x: 0.0 * model(x).sum(1), torch.randn(4, 3))
    assert found.all_zero and "every gradient is exactly zero" in str(found)
    assert not pmlf.check(nn.Linear(3, 2), lambda model, x: model(x).sum(1), torch.randn(4, 3)).all_zero


def test_an_operation_called_in_another_form_than_its_rule_knows_is_taken_by_autograd() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.randn(3))

        def forward(self, x: Tensor) -> Tensor:
            return torch.mul(input=x, other=self.scale.expand(size=(3,)))

    model, x = Named(), torch.randn(4, 3)
    step = PrivateStep(
        model,
        lambda model, x: model(x).square().sum(1),
        method="dpsgd",
        clip_norm=1e6,
        noise_multiplier=1.0,
        expected_batch_size=4,
    )
    step.accumulate(x)
    total = step.sensitive_sum()
    assert total is not None
    (expected,) = torch.autograd.grad(model(x).square().sum(), model.scale)
    torch.testing.assert_close(total.values["scale"].float(), expected)


def test_an_error_of_the_users_own_comes_up_as_itself() -> None:
    class Wrong(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.randn(3))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.scale.expand(7)

    with pytest.raises(RuntimeError, match="expanded size"):
        _step(Wrong(), lambda model, x: model(x).sum(1)).accumulate(torch.randn(4, 3))
