"""Frozen encoders of `transformers`: from a batch of texts or images to one embedding per record."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pmlf.models.pretrained import embedder, folder_of, rebuilt_embedder, save_configuration, unreadable
from pmlf.models.text import load_tokenizer, longest_text
from pmlf.models.vision import ImageInput, image_input

_TEXT_FILES = "config.json, model.safetensors and a tokenizer"
_IMAGE_FILES = "config.json and model.safetensors"

Pooling = tuple[tuple[str, int], ...]
POOLING: Pooling = tuple(("mean", -layer) for layer in (1, 2, 3, 4))  # chosen on held-out phrases of SST-2


def _mean(states: Tensor, mask: Tensor) -> Tensor:
    return (states * mask).sum(1) / mask.sum(1)


def _largest(states: Tensor, mask: Tensor) -> Tensor:
    return states.masked_fill(mask == 0, -torch.inf).amax(1)


def _first(states: Tensor, mask: Tensor) -> Tensor:
    return states[:, 0]


POOLS: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {"mean": _mean, "maximum": _largest, "first": _first}


class SentenceEncoder(nn.Module):
    """Hidden states of a text, pooled over its tokens: one block of coordinates for each layer and way of pooling.

    Args:
        inner: A model of `transformers` with hidden states (N, tokens, width).
        tokenizer: Its tokenizer; None for a model that was rebuilt.
        longest: The largest number of tokens it accepts.
        pooling: Names in `POOLS` and layers, -1 for the last one. Layers that the model lacks are left out.
    """

    def __init__(
        self, inner: nn.Module, tokenizer: Any = None, longest: int = 0, *, pooling: Pooling = POOLING
    ) -> None:
        super().__init__()
        self.inner, self.tokenizer, self.longest = inner, tokenizer, longest
        states = 1 + int(inner.config.num_hidden_layers)  # type: ignore[union-attr, arg-type]
        self.pooling = tuple((name, layer) for name, layer in pooling if -layer <= states)

    @staticmethod
    def load(name: str) -> SentenceEncoder:
        """The encoder of a model on the hub, or of a folder with its weights and tokenizer.

        Raises:
            ValueError: If the model needs its own code, is an adapter of another model, or cannot be read.
        """
        folder = folder_of(name, _TEXT_FILES)
        try:
            tokenizer, inner = load_tokenizer(folder), embedder(folder)
        except (OSError, ValueError) as error:
            raise unreadable(name, "an encoder of texts", _TEXT_FILES, error) from error
        if tokenizer.pad_token_id is None:
            raise ValueError(f"the tokenizer of {name!r} has no padding token: add one, or give another model")
        return SentenceEncoder(inner, tokenizer, longest_text(inner, tokenizer))

    @staticmethod
    def rebuilt(folder: Path) -> SentenceEncoder:
        """The encoder of a configuration that `save` wrote, with weights that are still to be loaded."""
        return SentenceEncoder(rebuilt_embedder(folder))

    @property
    def configuration(self) -> str:
        """What the embeddings depend on besides the weights."""
        return f"{_configuration(self)} {self.pooling}"

    def forward(self, *, attention_mask: Tensor, **tokens: Tensor) -> Tensor:
        """The embeddings (N, blocks * width) of a batch of texts."""
        states = self.inner(attention_mask=attention_mask, output_hidden_states=True, **tokens).hidden_states
        mask = attention_mask[..., None].to(states[-1].dtype)
        return torch.cat([POOLS[name](states[layer], mask) for name, layer in self.pooling], dim=1)

    def save(self, folder: Path, names: tuple[str, ...] | None) -> None:
        """Write tokenizer and configuration, from which the encoder can be rebuilt."""
        self.tokenizer.save_pretrained(folder)
        save_configuration(self.inner, folder, names)


class ImageEncoder(nn.Module):
    """The pooled output of an image model, or the mean of its last hidden states if it has none.

    Args:
        inner: A model of `transformers` that takes `pixel_values`.
        images: The images that it was pretrained on; None for a model that was rebuilt.
    """

    def __init__(self, inner: nn.Module, images: ImageInput | None = None) -> None:
        super().__init__()
        self.inner, self.images = inner, images

    @staticmethod
    def load(name: str) -> ImageEncoder:
        """The encoder of a model on the hub, or of a folder with its weights.

        Raises:
            ValueError: If the model needs its own code, is an adapter of another model, or cannot be read.
        """
        folder = folder_of(name, _IMAGE_FILES)
        try:
            inner = embedder(folder)
        except (OSError, ValueError) as error:
            raise unreadable(name, "an encoder of images", _IMAGE_FILES, error) from error
        return ImageEncoder(inner, image_input(folder, inner))

    @staticmethod
    def rebuilt(folder: Path) -> ImageEncoder:
        """The encoder of a configuration that `save` wrote, with weights that are still to be loaded."""
        return ImageEncoder(rebuilt_embedder(folder))

    @property
    def configuration(self) -> str:
        """What the embeddings depend on besides the weights."""
        return _configuration(self)

    def forward(self, images: Tensor) -> Tensor:
        """The embeddings (N, width) of images (N, C, S, S)."""
        outputs = self.inner(pixel_values=images)
        pooled: Tensor | None = outputs.get("pooler_output")
        if pooled is None:
            states: Tensor = outputs.last_hidden_state  # (N, tokens, width), or (N, width, height, width)
            pooled = states.mean(1) if states.ndim == 3 else states.mean((2, 3))
        return pooled.flatten(1)

    def save(self, folder: Path, names: tuple[str, ...] | None) -> None:
        """Write the configuration, from which the encoder can be rebuilt."""
        save_configuration(self.inner, folder, names)


Encoder = SentenceEncoder | ImageEncoder


def embedded(encoder: nn.Module, batch: Any) -> Tensor:
    """The embeddings of a batch: a dict of tokens, or a tuple that begins with images."""
    if isinstance(batch, dict):
        found: Tensor = encoder(**{name: tensor for name, tensor in batch.items() if name != "labels"})
        return found
    images: Tensor = encoder(batch[0])
    return images


def _configuration(encoder: Encoder) -> str:
    known = encoder.inner.config.to_dict()  # type: ignore[union-attr, operator]
    return f"{type(encoder).__name__} {sorted((name, repr(value)) for name, value in known.items() if name[0] != '_')}"
