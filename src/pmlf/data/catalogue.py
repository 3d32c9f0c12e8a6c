"""Public facts about each dataset: its place on the hub, its columns, its classes and its metrics."""

from __future__ import annotations

from dataclasses import dataclass, replace
from difflib import get_close_matches

from pmlf.data.pixels import ImageForm
from pmlf.data.targets import Classes

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
    names: tuple[str, ...]  # of the classes, whose labels are 0, 1, ...
    in_channels: int
    image_size: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    mirrors: bool  # whether a mirrored image keeps its class; not for digits

    @property
    def classes(self) -> int:
        """Number of classes."""
        return len(self.names)

    @property
    def form(self) -> ImageForm:
        """Size and normalisation of the images."""
        return ImageForm(channels=self.in_channels, size=self.image_size, mean=self.mean, std=self.std)

    @property
    def target(self) -> Classes:
        """The classes."""
        return Classes(names=self.names, written=_numbers(self.names))


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
    names: tuple[str, ...]  # of the classes, whose labels are 0, 1, ...
    judged_on: tuple[str, ...] = ("validation",)
    metrics: tuple[str, ...] = ("accuracy",)

    @property
    def classes(self) -> int:
        """Number of classes."""
        return len(self.names)

    @property
    def target(self) -> Classes:
        """The classes."""
        return Classes(names=self.names, written=_numbers(self.names))


def _numbers(names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(str(index) for index in range(len(names)))


_MNIST = ImageSpec(
    hub_id="ylecun/mnist",
    names=tuple("0123456789"),
    in_channels=1,
    image_size=28,
    mean=(0.1307,),
    std=(0.3081,),
    mirrors=False,
)
_FASHION_MNIST = replace(
    _MNIST,
    hub_id="zalando-datasets/fashion_mnist",
    names=("T-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot"),
    mean=(0.2860,),
    std=(0.3530,),
    mirrors=True,
)
_CIFAR10 = ImageSpec(
    hub_id="uoft-cs/cifar10",
    names=("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
    image_column="img",
    in_channels=3,
    image_size=32,
    mean=(0.4914, 0.4822, 0.4465),
    std=(0.2470, 0.2435, 0.2616),
    mirrors=True,
)
_CIFAR100_NAMES = """
apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel can castle
caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur dolphin elephant
flatfish forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion lizard lobster man maple_tree
motorcycle mountain mouse mushroom oak_tree orange orchid otter palm_tree pear pickup_truck pine_tree plain plate
poppy porcupine possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk skyscraper snail snake spider
squirrel streetcar sunflower sweet_pepper table tank telephone television tiger tractor train trout tulip turtle
wardrobe whale willow_tree wolf woman worm
"""
_CIFAR100 = replace(
    _CIFAR10,
    hub_id="uoft-cs/cifar100",
    label_column="fine_label",
    names=tuple(_CIFAR100_NAMES.split()),
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
    "sst2": TextSpec(config="sst2", names=("negative", "positive"), text_column="sentence"),
    "qnli": TextSpec(
        config="qnli", names=("entailment", "not_entailment"), text_column="question", pair_column="sentence"
    ),
    "qqp": TextSpec(
        config="qqp",
        names=("not_duplicate", "duplicate"),
        text_column="question1",
        pair_column="question2",
        metrics=("accuracy", "f1"),
    ),
    "mnli": TextSpec(
        config="mnli",
        text_column="premise",
        pair_column="hypothesis",
        names=("entailment", "neutral", "contradiction"),
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
