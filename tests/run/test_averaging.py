"""The average of released parameters: its weights, its state, and its place in a run."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import pmlf
from pmlf.run.averaging import ParameterAverage
from pmlf.run.making import PrivateRun


def private(ema: float | None = 0.7, steps: int = 6) -> PrivateRun:
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 2))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(generator=generator)
    model[0].bias.requires_grad_(False)
    records = torch.randn(60, 5, generator=generator)
    return pmlf.make_private(
        model=model,
        optimizer=torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5),
        dataset=TensorDataset(records, (records[:, 0] > 0).long()),
        loss_fn=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1], reduction="none"),
        noise_multiplier=1.0,
        target_delta=1e-3,
        batch_size=20,
        steps=steps,
        seed=0,
        ema=ema,
    )


def flat(model: nn.Module | None) -> torch.Tensor:
    assert model is not None
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).clone()


@pytest.mark.slow
def test_the_average_is_the_weighted_mean_of_the_released_iterates() -> None:
    run, iterates = private(), []
    assert run.averaged_model() is None
    for batch in run.batches():
        run.step(batch)
        iterates.append(flat(run.model).double())
        weights = torch.tensor([0.7 ** (len(iterates) - 1 - i) for i in range(len(iterates))], dtype=torch.float64)
        expected = (weights / weights.sum()) @ torch.stack(iterates)
        torch.testing.assert_close(flat(run.averaged_model()).double(), expected, rtol=1e-5, atol=1e-6)


def test_averaging_changes_nothing_else() -> None:
    plain, averaged = private(ema=None), private()
    for run in (plain, averaged):
        for batch in run.batches():
            run.step(batch)
            run.averaged_model()
    assert plain.averaged_model() is None
    assert torch.equal(flat(plain.model), flat(averaged.model))
    assert plain.epsilon() == averaged.epsilon()


def test_the_averaged_model_is_a_copy_of_its_own() -> None:
    run = private()
    run.step(next(run.batches()))
    before = flat(run.model)
    copy = run.averaged_model()
    assert copy is not None
    with torch.no_grad():
        next(copy.parameters()).zero_()
    assert torch.equal(flat(run.model), before)
    assert not torch.equal(flat(run.averaged_model()), flat(copy))


@pytest.mark.parametrize("cut", [0, 3])
def test_resuming_yields_the_identical_average(cut: int) -> None:
    whole, first, second = private(), private(), private()
    for batch in whole.batches():
        whole.step(batch)
    if cut:
        for batch in first.batches():
            first.step(batch)
            if first.steps_done == cut:
                break
    second.load_state_dict(first.state_dict())
    for batch in second.batches():
        second.step(batch)
    assert torch.equal(flat(second.averaged_model()), flat(whole.averaged_model()))


def test_the_saved_state_does_not_follow_the_run() -> None:
    run = private()
    batches = run.batches()
    run.step(next(batches))
    state = run.state_dict()["average"]
    before = [mean.clone() for mean in state["means"]]
    run.step(next(batches))
    assert all(torch.equal(mean, kept) for mean, kept in zip(state["means"], before, strict=True))


def test_a_state_of_another_average_is_refused() -> None:
    run = private()
    run.step(next(run.batches()))
    with pytest.raises(ValueError, match="differ in keeping an average"):
        private(ema=None).load_state_dict(run.state_dict())
    with pytest.raises(ValueError, match=r"ema=0.7 and this run has 0.9"):
        private(ema=0.9).load_state_dict(run.state_dict())


@pytest.mark.parametrize("decay", [0.0, 1.0, -0.1, float("nan"), True])
def test_a_decay_outside_the_unit_interval_is_refused(decay: float) -> None:
    with pytest.raises(ValueError, match=r"is not in \(0, 1\)"):
        ParameterAverage(decay)


def test_half_precision_parameters_are_averaged_in_single_precision() -> None:
    average = ParameterAverage(0.99)
    for _ in range(300):
        average.update([torch.ones(3, dtype=torch.bfloat16)])
    (value,) = average.values()
    torch.testing.assert_close(value, torch.ones(3), rtol=1e-5, atol=0)
