"""Public facts about each dataset: its place on the hub, its columns, its classes and its metrics."""

from __future__ import annotations

from dataclasses import dataclass, replace
from difflib import get_close_matches

DEFAULT = "fashion-mnist-small"


@dataclass(frozen=True, kw_only=True)
class ImageSpec:
    """An image dataset.

    `mean` and `std` are constants from the literature, one per channel, for pixels scaled to [0, 1]. Statistics of the
    private records themselves would be an unaccounted release.
    """

    hub_id: str
    asset: str | None = None  # a file in this package, used instead of the hub
    image_column: str = "image"
    label_column: str = "label"
    classes: int = 10
    in_channels: int
    image_size: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    mirrors: bool  # whether a mirrored image keeps its class; not for digits


@dataclass(frozen=True, kw_only=True)
class TextSpec:
    """A dataset of texts or pairs of texts, in the folder `config` of a hub dataset.

    GLUE does not publish the labels of its test splits, so models are evaluated on its validation splits.
    """

    hub_id: str = "nyu-mll/glue"
    config: str
    text_column: str
    pair_column: str | None = None
    label_column: str = "label"
    classes: int = 2
    judged_on: tuple[str, ...] = ("validation",)
    metrics: tuple[str, ...] = ("accuracy",)


_MNIST = ImageSpec(hub_id="ylecun/mnist", in_channels=1, image_size=28, mean=(0.1307,), std=(0.3081,), mirrors=False)
_FASHION_MNIST = replace(_MNIST, hub_id="zalando-datasets/fashion_mnist", mean=(0.2860,), std=(0.3530,), mirrors=True)
_CIFAR10 = ImageSpec(
    hub_id="uoft-cs/cifar10",
    image_column="img",
    in_channels=3,
    image_size=32,
    mean=(0.4914, 0.4822, 0.4465),
    std=(0.2470, 0.2435, 0.2616),
    mirrors=True,
)
_CIFAR100 = replace(
    _CIFAR10,
    hub_id="uoft-cs/cifar100",
    label_column="fine_label",
    classes=100,
    mean=(0.5071, 0.4865, 0.4409),
    std=(0.2673, 0.2564, 0.2762),
)
IMAGE_DATASETS = {
    "fashion-mnist-small": replace(_FASHION_MNIST, asset="fashion_mnist_small.npz"),
    "mnist": _MNIST,
    "fashion-mnist": _FASHION_MNIST,
    "cifar10": _CIFAR10,
    "cifar100": _CIFAR100,
}
TEXT_DATASETS = {
    "sst2": TextSpec(config="sst2", text_column="sentence"),
    "qnli": TextSpec(config="qnli", text_column="question", pair_column="sentence"),
    "qqp": TextSpec(config="qqp", text_column="question1", pair_column="question2", metrics=("accuracy", "f1")),
    "mnli": TextSpec(
        config="mnli",
        text_column="premise",
        pair_column="hypothesis",
        classes=3,
        judged_on=("validation_matched", "validation_mismatched"),
    ),
}
NAMES = (*IMAGE_DATASETS, *TEXT_DATASETS)


def suggestion(name: str) -> str:
    """The question to add to an error about an unknown dataset, or nothing if no name is close.

    >>> suggestion("cifar-10"), suggestion("imagenet")
    (" Did you mean 'cifar10'?", '')
    """
    close = get_close_matches(name.lower(), NAMES, n=1)
    return f" Did you mean {close[0]!r}?" if close else ""
