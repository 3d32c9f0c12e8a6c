"""Augmentation: what happens to one image is a function of it and of its own uniforms."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pmlf
from pmlf import methods
from pmlf.engine.augmentation import shifted_and_flipped, shifted_crops


def shifted_by_hand(image: Tensor, down: int, right: int, mirrored: bool) -> Tensor:
    """One image, pixel by pixel."""
    result = torch.zeros_like(image)
    _, height, width = image.shape
    for row in range(height):
        for column in range(width):
            if 0 <= row - down < height and 0 <= column - right < width:
                result[:, row, column] = image[:, row - down, column - right]
    return torch.from_numpy(result.numpy()[:, :, ::-1].copy()) if mirrored else result


@pytest.mark.parametrize("flip", [False, True])
def test_each_image_is_moved_by_its_own_uniforms(flip: bool) -> None:
    images = torch.randn(30, 3, 7, 7, generator=torch.Generator().manual_seed(0))
    uniforms = torch.from_numpy(np.random.default_rng(0).random((30, 3)))
    found = shifted_and_flipped(images, uniforms, 2, flip=flip)
    seen = set()
    for image, (down, right, mirror), result in zip(images, uniforms.tolist(), found, strict=True):
        shift = int(down * 5) - 2, int(right * 5) - 2
        seen.add(shift)
        assert torch.equal(result, shifted_by_hand(image, *shift, mirrored=flip and mirror < 0.5))
    assert len(seen) > 10


def test_the_whole_batch_is_left_as_it_was() -> None:
    images, labels = torch.ones(4, 1, 6, 6), torch.arange(4)
    changed, same = shifted_crops(1, flip=True).function((images, labels), torch.zeros(4, 3, dtype=torch.float64))
    assert torch.equal(images, torch.ones(4, 1, 6, 6)) and torch.equal(same, labels)
    assert not torch.equal(changed, images)


def gradient(per_point: bool | None, physical: int, step_count: int = 2) -> Tensor:
    """What a noiseless step releases on augmented images, cut into pieces of some size."""
    generator = torch.Generator().manual_seed(3)
    images, labels = torch.randn(12, 1, 6, 6, generator=generator), torch.arange(12) % 3
    model = nn.Sequential(nn.Flatten(), nn.Linear(36, 3))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(generator=generator)
    with pytest.warns(UserWarning, match="nothing is private"):
        step = pmlf.PrivateStep(
            model,
            lambda model, batch: F.cross_entropy(model(batch[0]), batch[1], reduction="none"),
            method=methods.dp_pmlf(k=2, beta=1.0, a=(), b=(1.0,)),
            noise_multiplier=0.0,
            expected_batch_size=12,
            generator=torch.Generator().manual_seed(0),
            augmentation=None if per_point is None else shifted_crops(2, flip=True, per_point=per_point),
        )
    for _ in range(step_count):
        for start in range(0, 12, physical):
            step.accumulate((images[start : start + physical], labels[start : start + physical]))
        step.release()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize("per_point", [False, True])
def test_a_logical_batch_is_augmented_alike_however_it_is_cut(per_point: bool) -> None:
    torch.testing.assert_close(gradient(per_point, 12), gradient(per_point, 5), rtol=1e-5, atol=1e-7)


def test_per_point_draws_differ_between_points_and_not_before_there_are_two() -> None:
    assert torch.equal(gradient(False, 12, step_count=1), gradient(True, 12, step_count=1))
    assert not torch.allclose(gradient(False, 12), gradient(True, 12))
    assert not torch.allclose(gradient(False, 12), gradient(None, 12))
