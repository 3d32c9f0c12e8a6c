"""Text classifiers and language models of `transformers`, from the hub or a folder: all weights, the head or LoRA."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from pmlf.data.language import padding_id
from pmlf.models.pretrained import (
    LANGUAGE,
    SEQUENCES,
    Tuning,
    folder_of,
    pretrained,
    quiet,
    save_configuration,
    transformers_for,
    unreadable,
)
from pmlf.models.seeding import seeded

_NEEDS = "config.json, model.safetensors and a tokenizer"
_UNLIMITED = 2**31


@dataclass(frozen=True, kw_only=True)
class TextModel:
    """A model, its tokenizer, and the largest number of tokens it accepts."""

    model: nn.Module
    tokenizer: Any
    longest: int
    pad_id: int

    def save(self, folder: Path, names: tuple[str, ...] | None) -> None:
        """Write tokenizer and configuration, from which the model can be rebuilt."""
        self.tokenizer.save_pretrained(folder)
        save_configuration(self.model, folder, names)


def load_classifier(
    name: str,
    *,
    classes: int,
    seed: int | None = None,
    lora_rank: int | None = None,
    head_only: bool = False,
) -> TextModel:
    """Load a pretrained model with a new classification head, in eval mode.

    Eval mode switches dropout off: the noise of DP training already regularises. Code that comes with a model is never
    run.

    Args:
        name: A model on the hub, or a folder with config.json, model.safetensors and a tokenizer.
        classes: Number of outputs.
        seed: Determines the new weights. None: torch's global generator.
        lora_rank: Freeze the pretrained weights and train updates of this rank for every linear layer.
        head_only: Freeze the pretrained weights and train the head.

    Raises:
        ValueError: If the model needs its own code, is an adapter of another model, or cannot be read.
    """
    tuning = Tuning(lora_rank=lora_rank, head_only=head_only)
    folder = folder_of(name, _NEEDS)
    try:
        tokenizer = load_tokenizer(folder)
        with seeded(seed):
            model = pretrained(folder, SEQUENCES, outputs=classes)
            longest = longest_text(model, tokenizer)
            tuned = tuning.applied(model)
    except (OSError, ValueError) as error:
        raise unreadable(name, "a sequence classifier", _NEEDS, error) from error
    if tokenizer.pad_token_id is None:
        raise ValueError(f"the tokenizer of {name!r} has no padding token: add one, or give another model")
    if model.config.pad_token_id is None:
        model.config.pad_token_id = tokenizer.pad_token_id
    return TextModel(model=tuned.eval(), tokenizer=tokenizer, longest=longest, pad_id=tokenizer.pad_token_id)


def load_language_model(name: str, *, seed: int | None = None, tuning: Tuning) -> TextModel:
    """Load a pretrained causal language model with its head, in eval mode.

    Args:
        name: A model on the hub, or a folder with config.json, model.safetensors and a tokenizer.
        seed: Determines the new weights of LoRA. None: torch's global generator.
        tuning: Which weights are trained.

    Raises:
        ValueError: If the model needs its own code, is an adapter of another model, cannot be read, or has fewer
            embeddings than its tokenizer has tokens.
    """
    folder = folder_of(name, _NEEDS)
    try:
        tokenizer = load_tokenizer(folder)
        with seeded(seed):
            model = pretrained(folder, LANGUAGE, outputs=None)
            tuned = tuning.applied(model)
    except (OSError, ValueError) as error:
        raise unreadable(name, "a causal language model", _NEEDS, error) from error
    embedded = model.get_input_embeddings().num_embeddings
    if len(tokenizer) > embedded:
        raise ValueError(
            f"the tokenizer of {name!r} has {len(tokenizer)} tokens and the model {embedded} embeddings: give a folder "
            "in which they fit"
        )
    positions = getattr(model.config, "max_position_embeddings", None) or _UNLIMITED  # None: recurrent models
    longest = min(int(tokenizer.model_max_length), positions)
    return TextModel(model=tuned.eval(), tokenizer=tokenizer, longest=longest, pad_id=padding_id(tokenizer))


def load_tokenizer(folder: Path) -> Any:
    """The tokenizer in a folder."""
    with quiet():
        return transformers_for(str(folder)).AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )


def longest_text(model: nn.Module, tokenizer: Any) -> int:
    """The largest number of tokens. RoBERTa's positions start after the index of its padding token."""
    tables = [
        module
        for name, module in model.named_modules()
        if name.endswith("position_embeddings") and isinstance(module, nn.Embedding)
    ]
    positions = [table.num_embeddings - (0 if table.padding_idx is None else table.padding_idx + 1) for table in tables]
    return min([int(tokenizer.model_max_length), *positions])
