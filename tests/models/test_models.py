"""Models: sizes, shapes, seeding, no mixing of samples and no buffers."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pmlf import models

SHAPES = [(1, 28, 10), (3, 32, 100)]  # (in_channels, image_size, classes)


def parameter_count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def build(name: str, *, seed: int | None = 0) -> nn.Module:
    return models.build(name, in_channels=3, image_size=32, classes=10, seed=seed)


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("cnn5", 412_426),
        ("linear", 30_730),
        ("resnet18", 11_173_962),
        ("vit", 2_693_578),
        ("resnet18-narrow", 176_402),
        ("vit-mini", 108_106),
        ("vit-tiny", 5_362_762),
        ("vit-small", 21_342_346),
    ],
)
def test_parameter_counts(name: str, count: int) -> None:
    assert parameter_count(build(name)) == count


def test_cnn5_has_the_given_number_of_outputs() -> None:
    per_class = 256 * 9 + 1
    assert parameter_count(models.CNN5(classes=100)) == 412_426 + 90 * per_class


@pytest.mark.parametrize("name", ["cnn5", "linear", "resnet18", "vit"])  # the others differ in size only
@pytest.mark.parametrize(("in_channels", "image_size", "classes"), SHAPES)
def test_logits_of_every_model_on_every_image_shape(name: str, in_channels: int, image_size: int, classes: int) -> None:
    model = models.build(name, in_channels=in_channels, image_size=image_size, classes=classes, seed=0)
    images = torch.rand(2, in_channels, image_size, image_size)
    logits = model(images)
    assert logits.shape == (2, classes)
    logits.sum().backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in model.parameters())


@pytest.mark.parametrize("name", models.NAMES)
def test_an_empty_batch_gives_empty_logits(name: str) -> None:
    assert build(name)(torch.empty(0, 3, 32, 32)).shape == (0, 10)


@pytest.mark.parametrize("name", models.NAMES)
def test_seeded_weights_depend_on_the_seed_only_and_leave_the_global_generator_unchanged(name: str) -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = build(name, seed=7).state_dict()
    assert torch.equal(torch.get_rng_state(), before)

    torch.manual_seed(2)
    again, other = build(name, seed=7).state_dict(), build(name, seed=8).state_dict()
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert any(not torch.equal(first[key], other[key]) for key in first)


def test_without_a_seed_weights_come_from_the_global_generator() -> None:
    torch.manual_seed(1)
    first = build("linear", seed=None).state_dict()
    second = build("linear", seed=None).state_dict()
    assert any(not torch.equal(first[key], second[key]) for key in first)


@pytest.mark.parametrize("name", models.NAMES)
def test_no_sample_changes_anothers_logits(name: str) -> None:
    model = build(name).train()
    images = torch.rand(3, 3, 32, 32)
    changed = images.clone()
    changed[2] = 10.0
    torch.testing.assert_close(model(images)[:2], model(changed)[:2])


@pytest.mark.parametrize("name", models.NAMES)
def test_no_batch_norm_and_no_buffers(name: str) -> None:
    model = build(name)
    assert not any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules())
    assert list(model.buffers()) == []


def test_vit_keeps_its_bare_parameters_at_leading_size_one() -> None:
    model = models.ViT(image_size=28, patch=4, in_channels=1)
    assert model.class_token.shape == (1, 1, 192)
    assert model.positions.shape == (1, 50, 192)


@pytest.mark.parametrize(("width", "groups"), [(64, 32), (48, 24), (8, 8)])
def test_resnet_group_count_divides_the_channels(width: int, groups: int) -> None:
    model = models.ResNet(blocks=(1,), width=width)
    norms = [module for module in model.modules() if isinstance(module, nn.GroupNorm)]
    assert {norm.num_groups for norm in norms} == {groups}


def test_unknown_name_lists_the_names() -> None:
    with pytest.raises(ValueError, match=r"'cnn6': give one of cnn5, linear, resnet18, .*vit.*Did you mean 'cnn5'"):
        models.build("cnn6", in_channels=3, image_size=32, classes=10)


def test_vit_refuses_sizes_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match="patch=5 does not divide image_size=32"):
        models.ViT(patch=5)
    with pytest.raises(ValueError, match="heads=5 does not divide width=192"):
        models.ViT(heads=5)
    with pytest.raises(ValueError, match="images are 28x28, but this ViT is for 32x32"):
        models.ViT(depth=1)(torch.rand(1, 3, 28, 28))
