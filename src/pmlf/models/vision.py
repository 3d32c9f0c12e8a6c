"""Image classifiers of `transformers`, from the hub or a local folder, trained fully, by their head or with LoRA."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from pmlf.models.pretrained import IMAGES, Tuning, folder_of, pretrained, rebuilt, save_configuration, unreadable
from pmlf.models.seeding import seeded

_NEEDS = "config.json and model.safetensors"
_USUAL_SIZE = 224
_HALVES = (0.5, 0.5, 0.5)


class PretrainedImages(nn.Module):
    """A model of `transformers` as a function from images (N, C, S, S) to outputs (N, classes)."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, images: Tensor) -> Tensor:
        outputs: Tensor = self.inner(pixel_values=images).logits
        return outputs

    def save(self, folder: Path, names: tuple[str, ...] | None) -> None:
        """Write the configuration, from which the model can be rebuilt."""
        save_configuration(self.inner, folder, names)


@dataclass(frozen=True, kw_only=True)
class ImageInput:
    """The images that a model was pretrained on: channels, size, mean and std per channel."""

    channels: int
    size: int
    fixed_size: bool  # whether the configuration names the size
    mean: tuple[float, ...]
    std: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class ImageModel:
    """An image classifier, and the images that it was pretrained on."""

    model: PretrainedImages
    images: ImageInput


def load_image_classifier(name: str, *, classes: int, seed: int | None, tuning: Tuning) -> ImageModel:
    """Load a pretrained model with a new head, in eval mode.

    Args:
        name: A model on the hub, or a folder with config.json, model.safetensors and preprocessor_config.json.
        classes: Number of outputs.
        seed: Determines the new weights. None: torch's global generator.
        tuning: Which weights are trained.

    Raises:
        ValueError: If the model needs its own code, is an adapter of another model, or cannot be read.
    """
    folder = folder_of(name, _NEEDS)
    try:
        with seeded(seed):
            model = pretrained(folder, IMAGES, outputs=classes)
            tuned = tuning.applied(model).eval()
    except (OSError, ValueError) as error:
        raise unreadable(name, "an image classifier", _NEEDS, error) from error
    return ImageModel(model=PretrainedImages(tuned), images=image_input(folder, model))


def image_input(folder: Path, model: Any) -> ImageInput:
    """What a pretrained model takes, by its configuration and that of its preprocessor."""
    processor = _processor(folder)
    named = getattr(model.config, "image_size", None)
    return ImageInput(
        channels=int(getattr(model.config, "num_channels", 3)),
        size=named if isinstance(named, int) else _size(processor),
        fixed_size=isinstance(named, int),
        mean=tuple(processor.get("image_mean") or _HALVES),
        std=tuple(processor.get("image_std") or _HALVES),
    )


def rebuilt_image_classifier(folder: Path, tuning: Tuning) -> PretrainedImages:
    """The model of a configuration that `PretrainedImages.save` wrote, with weights that are still to be loaded."""
    return PretrainedImages(rebuilt(folder, IMAGES, tuning)).eval()


def _processor(folder: Path) -> dict[str, Any]:
    path = folder / "preprocessor_config.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def _size(processor: dict[str, Any]) -> int:
    """The size that a preprocessor resizes to, in one of the forms that transformers has had for it."""
    for key in ("crop_size", "size"):
        given = processor.get(key)
        values = given.values() if isinstance(given, dict) else [given]
        sizes = [value for value in values if isinstance(value, int)]
        if sizes:
            return sizes[0]
    return _USUAL_SIZE
