"""Models of the experiments, by name. None mixes samples, and none has buffers."""

from __future__ import annotations

from collections.abc import Callable
from difflib import get_close_matches

from torch import nn

from pmlf.models.cnn import CNN5
from pmlf.models.resnet import ResNet, resnet18
from pmlf.models.seeding import seeded
from pmlf.models.vit import ViT

__all__ = ["CNN5", "NAMES", "ResNet", "ViT", "build", "linear", "resnet18"]


def linear(in_features: int, classes: int = 10) -> nn.Sequential:
    """Multinomial logistic regression: one Linear layer on the flattened input."""
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
    """Build a new model on the CPU.

    Args:
        name: One of `NAMES`.
        in_channels: Number of image channels.
        image_size: Height and width of the images.
        classes: Number of outputs.
        seed: Determines the initial weights; torch's global generator is then not used. None: use it.

    Raises:
        ValueError: If the name is unknown or the sizes do not fit the model.

    >>> build("linear", in_channels=1, image_size=28, classes=10, seed=0)[1]
    Linear(in_features=784, out_features=10, bias=True)
    """
    if name not in _BUILDERS:
        close = get_close_matches(name.lower(), NAMES, n=1)
        question = f". Did you mean {close[0]!r}?" if close else ""
        raise ValueError(f"unknown model {name!r}: give one of {', '.join(NAMES)}{question}")
    with seeded(seed):
        return _BUILDERS[name](in_channels, image_size, classes)
