"""Text classifiers of `transformers`, from the hub or a local folder, trained fully or with LoRA (`peft`)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from pmlf.basics.arguments import require_count
from pmlf.basics.hub import snapshot
from pmlf.models.seeding import seeded

_ATTENTION_KEYS = ("attn_implementation", "_attn_implementation")  # both can name a kernel on the hub
_FILES = ["*.json", "*.txt", "*.model", "*.safetensors"]  # no pickles: they can run code


@dataclass(frozen=True, kw_only=True)
class TextModel:
    """A classifier, its tokenizer, and the largest number of tokens it accepts."""

    model: nn.Module
    tokenizer: Any
    longest: int
    pad_id: int


def load_classifier(name: str, *, classes: int, seed: int | None = None, lora_rank: int | None = None) -> TextModel:
    """Load a pretrained model with a new classification head, in eval mode.

    Eval mode switches dropout off: the noise of DP training already regularises. Code that comes with a model is never
    run.

    Args:
        name: A model on the hub, or a folder with config.json, model.safetensors and a tokenizer.
        classes: Number of outputs.
        seed: Determines the new weights. None: torch's global generator.
        lora_rank: Freeze the pretrained weights and train updates of this rank for every linear layer.

    Raises:
        ValueError: If the model needs its own code, is an adapter of another model, or cannot be read.
    """
    transformers = _transformers(name)
    if lora_rank is not None:
        require_count("lora_rank", lora_rank, "it is the rank of the updates, for example 8")
    folder = _folder(name)
    _refuse_code(name, folder)
    _refuse_adapter(name, folder)
    try:
        with _silence(transformers), seeded(seed):
            tokenizer = transformers.AutoTokenizer.from_pretrained(
                folder, local_files_only=True, trust_remote_code=False
            )
            model = transformers.AutoModelForSequenceClassification.from_pretrained(
                folder,
                num_labels=classes,
                use_safetensors=True,
                local_files_only=True,
                trust_remote_code=False,  # the default, None, asks on the terminal
                ignore_mismatched_sizes=True,
            )
            longest = _longest(model, tokenizer)
            if lora_rank is not None:
                model = _with_lora(model, lora_rank)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{name!r} cannot be read as a sequence classifier: it needs config.json, model.safetensors and a "
            f"tokenizer ({_first_line(error)})"
        ) from error
    if tokenizer.pad_token_id is None:
        raise ValueError(f"the tokenizer of {name!r} has no padding token: add one, or give another model")
    if model.config.pad_token_id is None:
        model.config.pad_token_id = tokenizer.pad_token_id
    return TextModel(model=model.eval(), tokenizer=tokenizer, longest=longest, pad_id=tokenizer.pad_token_id)


def _transformers(name: str) -> Any:
    try:
        import transformers
    except ImportError as error:
        raise ValueError(f"the model {name!r} needs the package transformers: pip install 'dp-pmlf[text]'") from error
    return transformers


def _folder(name: str) -> Path:
    if Path(name).is_dir():
        return Path(name)
    instead = "give as `model` a folder with config.json, model.safetensors and a tokenizer"
    return snapshot(name, "model", _FILES, extra="text", instead=instead)


def _refuse_code(name: str, folder: Path) -> None:
    """Raise ValueError if the model needs its own code, even if a class of transformers could replace it."""
    for file in sorted(folder.glob("*config*.json")):
        try:
            document = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError):  # transformers cannot read it either
            continue
        for key in _asking_for_code(document):
            raise ValueError(
                f"{name!r} needs to run its own code ({key!r} in its {file.name}), and pmlf never runs code that comes "
                "with a model: give a model with an architecture of transformers. If this is one, remove "
                f"{key!r} from {file.name} in a copy of its folder"
            )


def _asking_for_code(document: Any) -> Iterator[str]:
    """The keys, at any depth, that make transformers download or run code."""
    if isinstance(document, list):
        for item in document:
            yield from _asking_for_code(item)
    if not isinstance(document, dict):
        return
    for key, value in document.items():
        if (key == "auto_map" and value) or (key in _ATTENTION_KEYS and "/" in json.dumps(value)):
            yield key
        else:
            yield from _asking_for_code(value)


def _refuse_adapter(name: str, folder: Path) -> None:
    """Raise ValueError for an adapter: it can load any other model, and freezes it."""
    if (folder / "adapter_config.json").exists():
        raise ValueError(
            f"{name!r} is an adapter of another model (adapter_config.json): give the model itself, with lora_rank for "
            "new updates, or merge both with peft's merge_and_unload and save_pretrained"
        )


def _with_lora(model: nn.Module, rank: int) -> nn.Module:
    try:
        import peft
    except ImportError as error:
        raise ValueError("lora_rank needs the package peft: pip install 'dp-pmlf[text]'") from error
    config = peft.LoraConfig(
        task_type=peft.TaskType.SEQ_CLS, r=rank, lora_alpha=2 * rank, lora_dropout=0.0, target_modules="all-linear"
    )
    adapted: nn.Module = peft.get_peft_model(model, config)
    return adapted


def _longest(model: nn.Module, tokenizer: Any) -> int:
    """The largest number of tokens. RoBERTa's positions start after the index of its padding token."""
    tables = [
        module
        for name, module in model.named_modules()
        if name.endswith("position_embeddings") and isinstance(module, nn.Embedding)
    ]
    positions = [table.num_embeddings - (0 if table.padding_idx is None else table.padding_idx + 1) for table in tables]
    return min([int(tokenizer.model_max_length), *positions])


@contextmanager
def _silence(transformers: Any) -> Iterator[None]:
    """Switch off the progress bar and the warnings of loading, which report the new head."""
    logging = transformers.utils.logging
    level, bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bar:
            logging.enable_progress_bar()


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
