"""Micro-batches sized by memory and time: on synthetic inputs, before any is too large."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pmlf
from pmlf import PrivateStep
from pmlf.run import sizing
from zoo import classify, images


def step_of(model: nn.Module, loss: Callable[[Any, Any], Tensor] = classify) -> PrivateStep:
    return PrivateStep(model, loss, method="dp-pmlf", noise_multiplier=1.0, expected_batch_size=64.0)


def convolution() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 16, 3), nn.Tanh(), nn.Flatten(), nn.Linear(16 * 36, 4))


def test_the_peak_is_that_of_the_tensors_alive_at_one_time() -> None:
    def three_then_one() -> None:
        kept = [torch.zeros(1000) for _ in range(3)]
        kept.clear()
        torch.zeros(1500)

    assert sizing.peak_bytes(three_then_one, torch.device("cpu")) == 12_000


@pytest.mark.slow
def test_more_free_memory_never_gives_a_smaller_size_and_little_is_kept_to() -> None:
    step, example = step_of(convolution()), images(3, 8, 8)(32)
    needed = sizing.peak_bytes(lambda: (step.accumulate(example), step.discard()), torch.device("cpu"))
    size = sizing.physical_batch_size(step, example, most=100_000, free_bytes=round(needed))
    assert 1 <= size <= 32  # half of what 32 samples take
    assert sizing.physical_batch_size(step, example, most=20, free_bytes=1 << 40) == 20


def test_a_sample_that_does_not_fit_is_refused_before_anything_is_released() -> None:
    step = step_of(convolution())
    with pytest.raises(ValueError, match=r"one sample of this model takes about \d+ MB"):
        sizing.physical_batch_size(step, images(3, 8, 8)(32), most=100, free_bytes=1000)
    assert step.releases == 0
    assert not step.pending


def test_no_value_of_the_records_reaches_the_model_while_it_is_sized() -> None:
    seen: list[Tensor] = []

    def watching(model: Any, batch: Any) -> Tensor:
        if type(batch[0]) is Tensor:  # not the one of the proof of independence
            seen.append(batch[0].detach().flatten())
        return classify(model, batch)

    inputs, labels = images(3, 8, 8)(40)
    dataset = torch.utils.data.TensorDataset(100 + inputs, labels)
    model = convolution()
    run = pmlf.make_private(
        model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), dataset=dataset, loss_fn=watching,
        noise_multiplier=1.0, target_delta=1e-3, batch_size=16, steps=2, max_physical_batch_size="auto", seed=0,
    )  # fmt: skip
    assert seen
    assert torch.cat(seen).max() < 50
    assert 1 <= run.max_physical_batch_size <= 40
    for batch in run.batches():
        run.step(batch)
    assert run.steps_done == 2
