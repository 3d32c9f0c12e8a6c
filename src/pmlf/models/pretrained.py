"""Pretrained classifiers of `transformers`: loaded from the hub or a folder, and rebuilt from their configuration.

Code that comes with a model is never run, and weights are read from safetensors files only.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pmlf.basics.arguments import require_count
from pmlf.basics.hub import snapshot

SEQUENCES = "AutoModelForSequenceClassification"
IMAGES = "AutoModelForImageClassification"
LANGUAGE = "AutoModelForCausalLM"
_ATTENTION_KEYS = ("attn_implementation", "_attn_implementation")  # both can name a kernel on the hub
_FILES = ["*.json", "*.txt", "*.model", "*.safetensors"]  # no pickles: they can run code


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """Which weights of a pretrained model are trained: all of them, updates of a low rank, or the new head alone.

    Args:
        lora_rank: Freeze the pretrained weights and train updates of this rank for every linear layer, and the head.
        head_only: Freeze the pretrained weights and train the head.
    """

    lora_rank: int | None = None
    head_only: bool = False

    def __post_init__(self) -> None:
        if self.lora_rank is not None:
            require_count("lora_rank", self.lora_rank, "it is the rank of the updates, for example 8")
        if self.lora_rank is not None and self.head_only:
            raise ValueError(f"lora_rank={self.lora_rank} and `head_only` are both given: give one of them")

    def applied(self, model: Any) -> nn.Module:
        """The model with the pretrained weights frozen as asked."""
        if self.lora_rank is not None:
            return _with_lora(model, self.lora_rank)
        if self.head_only:
            model.base_model.requires_grad_(False)
        tuned: nn.Module = model
        return tuned


def folder_of(name: str, needs: str) -> Path:
    """The local folder of a model: the given one, or a download from the hub. It asks for no code and is no adapter.

    Args:
        name: A folder, or a model on the hub.
        needs: The files that a folder needs, for errors.

    Raises:
        ValueError: If it cannot be reached, needs its own code, or is an adapter of another model.
    """
    transformers_for(name)
    folder = _folder(name, needs)
    _refuse_code(name, folder)
    _refuse_adapter(name, folder)
    return folder


def pretrained(folder: Path, auto_class: str, *, outputs: int | None) -> Any:
    """A model with pretrained weights and a new head of `outputs` outputs, None for the old head, in eval mode."""
    transformers = transformers_for(str(folder))
    head = {} if outputs is None else {"num_labels": outputs}
    with quiet():
        model = getattr(transformers, auto_class).from_pretrained(
            folder,
            **head,
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,  # the default, None, asks on the terminal
            ignore_mismatched_sizes=True,
        )
    return model.eval()


def embedder(folder: Path) -> Any:
    """A pretrained model without a head, in float32 and eval mode."""
    transformers = transformers_for(str(folder))
    with quiet():
        model = transformers.AutoModel.from_pretrained(
            folder, use_safetensors=True, local_files_only=True, trust_remote_code=False
        )
    return model.float().eval()


def rebuilt_embedder(folder: Path) -> nn.Module:
    """The same for a configuration that `save_configuration` wrote, with weights that are still to be loaded."""
    return _of_configuration(folder, "AutoModel").float().eval()


def rebuilt(folder: Path, auto_class: str, tuning: Tuning) -> nn.Module:
    """The model of a configuration that `save_configuration` wrote, with weights that are still to be loaded.

    Raises:
        ValueError: If the configuration needs code of its own or cannot be read.
    """
    return tuning.applied(_of_configuration(folder, auto_class)).eval()


def _of_configuration(folder: Path, auto_class: str) -> Any:
    transformers = transformers_for(str(folder))
    _refuse_code(str(folder), folder)
    try:
        with quiet(), torch.random.fork_rng(devices=[]):
            config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
            return getattr(transformers, auto_class).from_config(config, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"{str(folder)!r} has no configuration that transformers reads: restore the folder") from error


def save_configuration(model: Any, folder: Path, names: tuple[str, ...] | None) -> None:
    """Write the configuration of a model, and the names of its outputs if it has classes."""
    if names is not None:
        model.config.id2label = dict(enumerate(names))
        model.config.label2id = {name: index for index, name in enumerate(names)}
    model.config._name_or_path = ""  # the folder on this machine is nobody else's business
    model.config.save_pretrained(folder)


def transformers_for(name: str) -> Any:
    """The package transformers. Raises ValueError with the line to install it."""
    try:
        import transformers
    except ImportError as error:
        raise ValueError(f"the model {name!r} needs the package transformers: pip install 'dp-pmlf[text]'") from error
    return transformers


def unreadable(name: str, what: str, needs: str, error: Exception) -> ValueError:
    """The error to raise for a folder that transformers cannot read."""
    return ValueError(f"{name!r} cannot be read as {what}: it needs {needs} ({_first_line(error)})")


def _folder(name: str, needs: str) -> Path:
    if Path(name).is_dir():
        return Path(name)
    return snapshot(name, "model", _FILES, extra="text", instead=f"give as `model` a folder with {needs}")


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


def _with_lora(model: Any, rank: int) -> nn.Module:
    try:
        import peft
    except ImportError as error:
        raise ValueError("lora_rank needs the package peft: pip install 'dp-pmlf[text]'") from error
    common: dict[str, Any] = {"r": rank, "lora_alpha": 2 * rank, "lora_dropout": 0.0}
    if "SequenceClassification" in type(model).__name__:
        config = peft.LoraConfig(task_type=peft.TaskType.SEQ_CLS, target_modules="all-linear", **common)
    elif type(model).__name__.endswith(("ForCausalLM", "LMHeadModel")):
        common["fan_in_fan_out"] = any(type(module).__name__ == "Conv1D" for module in model.modules())  # GPT-2's
        config = peft.LoraConfig(task_type=peft.TaskType.CAUSAL_LM, target_modules="all-linear", **common)
    else:  # peft has no such task for images: name the backbone's layers and the head
        prefix = model.base_model_prefix
        layers = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
        heads = [name for name, module in model.named_children() if name != prefix and list(module.parameters())]
        backbone = [name for name in layers if name.startswith(f"{prefix}.")]
        config = peft.LoraConfig(target_modules=backbone, modules_to_save=heads, **common)
    adapted: nn.Module = peft.get_peft_model(model, config)
    return adapted


@contextmanager
def quiet() -> Iterator[None]:
    """Switch off the progress bar and the warnings of loading, which report the new head."""
    import transformers

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
