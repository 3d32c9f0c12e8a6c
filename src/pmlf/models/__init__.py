"""Models by name for the experiments; none mixes samples and none holds buffers."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from pmlf.models.cnn import CNN5
from pmlf.models.resnet import ResNet, resnet18
from pmlf.models.seeding import seeded
from pmlf.models.vit import ViT

__all__ = ["CNN5", "NAMES", "ResNet", "ViT", "build", "linear", "resnet18"]


def linear(in_features: int, classes: int = 10) -> nn.Sequential:
    """Multinomial logistic regression: flatten, then one Linear layer."""
    return nn.Sequential(nn.Flatten(), nn.Linear(in_features, classes))


# name -> (in_channels, image_size, classes) -> model
_BUILDERS: dict[str, Callable[[int, int, int], nn.Module]] = {
    "cnn5": lambda channels, size, classes: CNN5(channels, classes),
    "linear": lambda channels, size, classes: linear(channels * size * size, classes),
    "resnet18": lambda channels, size, classes: resnet18(channels, classes),
    "vit": lambda channels, size, classes: ViT(size, in_channels=channels, classes=classes),
    "vit-tiny": lambda channels, size, classes: ViT(size, in_channels=channels, classes=classes, depth=12),
    "vit-small": lambda channels, size, classes: ViT(
        size, in_channels=channels, classes=classes, depth=12, width=384, heads=6
    ),
}
NAMES = tuple(_BUILDERS)


def build(name: str, *, in_channels: int, image_size: int, classes: int, seed: int | None = None) -> nn.Module:
    """A new model on the CPU, by name.

    With a seed the initial weights are a function of it alone, and torch's global generator stays as it was.

    >>> build("linear", in_channels=1, image_size=28, classes=10, seed=0)[1]
    Linear(in_features=784, out_features=10, bias=True)
    """
    if name not in _BUILDERS:
        raise ValueError(f"unknown model {name!r}: choose one of {', '.join(NAMES)}")
    with seeded(seed):
        return _BUILDERS[name](in_channels, image_size, classes)
