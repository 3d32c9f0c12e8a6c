"""Models of the experiments, by name. None mixes samples, and none has buffers."""

from __future__ import annotations

from collections.abc import Callable
from difflib import get_close_matches

from torch import nn

from pmlf.models.cnn import CNN5
from pmlf.models.resnet import ResNet, resnet18
from pmlf.models.seeding import seeded
from pmlf.models.vit import ViT

__all__ = ["CNN5", "NAMES", "TABLE_NAMES", "ResNet", "ViT", "build", "build_for_table", "linear", "mlp", "resnet18"]
_HIDDEN = 128


def linear(in_features: int, classes: int = 10) -> nn.Sequential:
    """Multinomial logistic regression: one Linear layer on the flattened input."""
    return nn.Sequential(nn.Flatten(), nn.Linear(in_features, classes))


def mlp(in_features: int, outputs: int = 2) -> nn.Sequential:
    """Two hidden layers of 128 units with tanh, whose bounded outputs suit clipped gradients."""
    return nn.Sequential(
        nn.Linear(in_features, _HIDDEN), nn.Tanh(), nn.Linear(_HIDDEN, _HIDDEN), nn.Tanh(), nn.Linear(_HIDDEN, outputs)
    )


# name -> (in_channels, image_size, classes) -> model
_BUILDERS: dict[str, Callable[[int, int, int], nn.Module]] = {
    "cnn5": lambda channels, size, classes: CNN5(channels, classes),
    "linear": lambda channels, size, classes: linear(channels * size * size, classes),
    "resnet18": lambda channels, size, classes: resnet18(channels, classes),
    "resnet18-narrow": lambda channels, size, classes: ResNet(width=8, in_channels=channels, classes=classes),
    "vit": lambda channels, size, classes: ViT(size, in_channels=channels, classes=classes),
    "vit-mini": lambda channels, size, classes: ViT(
        size, in_channels=channels, classes=classes, depth=2, width=64, heads=2
    ),
    "vit-tiny": lambda channels, size, classes: ViT(size, in_channels=channels, classes=classes, depth=12),
    "vit-small": lambda channels, size, classes: ViT(
        size, in_channels=channels, classes=classes, depth=12, width=384, heads=6
    ),
}
NAMES = tuple(_BUILDERS)
_TABLE_BUILDERS: dict[str, Callable[[int, int], nn.Module]] = {"mlp": mlp, "linear": linear}
TABLE_NAMES = tuple(_TABLE_BUILDERS)


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
    _check_name(name, NAMES)
    with seeded(seed):
        return _BUILDERS[name](in_channels, image_size, classes)


def build_for_table(name: str, *, features: int, outputs: int, seed: int | None = None) -> nn.Module:
    """Build a new model for the encoded rows of a table: one of `TABLE_NAMES`, as `build` does for images.

    >>> build_for_table("linear", features=5, outputs=2, seed=0)[1]
    Linear(in_features=5, out_features=2, bias=True)
    """
    _check_name(name, TABLE_NAMES)
    with seeded(seed):
        return _TABLE_BUILDERS[name](features, outputs)


def _check_name(name: str, names: tuple[str, ...]) -> None:
    if name not in names:
        close = get_close_matches(name.lower(), names, n=1)
        question = f". Did you mean {close[0]!r}?" if close else ""
        raise ValueError(f"unknown model {name!r}: give one of {', '.join(names)}{question}")
