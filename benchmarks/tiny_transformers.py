"""Every text model of `transformers` with an automatic class, made tiny by changing the sizes in its default
configuration: models that nobody here has chosen or adapted. `benchmarks/coverage.py --sweep` runs them."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from transformers.models.auto import modeling_auto

Built = tuple[nn.Module, Callable[[Any, Any], Tensor], Any]
SAMPLES, TOKENS, WORDS, CLASSES = 3, 8, 40, 3

# what a name that contains the pattern is set to, by the first that fits
_SIZES: tuple[tuple[str, int], ...] = (
    (r"vocab_size$", WORDS),
    (r"max_position|n_positions|max_seq_len|n_ctx|context_length|^seq_length$", 32),
    (r"type_vocab_size", 2),
    (r"num_(key_value|kv)_heads|num_query_groups", 1),
    (r"layers$|^n_layers?$|num_hidden_groups|num_layers", 2),
    (r"heads$|^n_heads?$", 2),
    (r"head_dim|^d_kv$|^d_head$", 8),
    (r"intermediate|ffn|d_ff|d_inner|n_inner|mlp_dim|feed_forward", 20),
    (r"num_(local_)?experts$|n_routed_experts|moe_num_experts", 3),
    (r"experts_per_tok|moe_topk|num_experts_per", 2),
    (r"hidden_size$|d_model|n_embd|^dim$|embedding_size|embed_dim|hidden_dim", 16),
    (r"state_size|conv_kernel", 4),
    (r"(pad|bos|eos|cls|sep|mask|unk)_token_id$|^decoder_start_token_id$", 1),
)
_KINDS = {
    "classes": (modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES, "classes"),
    "next words": (modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, "words"),
    "masked words": (modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES, "words"),
}


def classified(model: Any, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(input_ids=batch["input_ids"]).logits, batch["labels"], reduction="none")


def predicted(model: Any, batch: dict[str, Tensor]) -> Tensor:
    logits = model(input_ids=batch["input_ids"]).logits
    return F.cross_entropy(logits[:, :-1].mT.float(), batch["input_ids"][:, 1:], reduction="none").mean(1)


def sweep() -> dict[str, Callable[[], Built]]:
    """Builders by name; one that cannot be made tiny this way raises."""
    found: dict[str, Callable[[], Built]] = {}
    for kind, (names, head) in _KINDS.items():
        for model_type, classes in names.items():
            name = classes if isinstance(classes, str) else classes[0]
            found[f"{name}, {kind}"] = lambda name=name, model_type=model_type, head=head: _made(  # type: ignore[misc]
                name, model_type, head
            )
    return found


def _made(name: str, model_type: str, head: str) -> Built:
    torch.manual_seed(0)
    config = transformers.CONFIG_MAPPING[model_type]()
    for part in (config, *[part for part in vars(config).values() if isinstance(part, transformers.PreTrainedConfig)]):
        _shrink(part)
    config.num_labels = CLASSES
    model = getattr(transformers, name)._from_config(config).float().train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    if sum(parameter.numel() for parameter in model.parameters()) > 300_000:
        raise ValueError("it does not become tiny")
    ids = torch.randint(2, WORDS, (SAMPLES, TOKENS))
    if head == "classes":
        return model, classified, {"input_ids": ids, "labels": torch.randint(CLASSES, (SAMPLES,))}
    return model, predicted, {"input_ids": ids}


def _shrink(config: transformers.PreTrainedConfig) -> None:
    for name, value in list(vars(config).items()):
        if isinstance(value, int) and not isinstance(value, bool):
            size = next((size for pattern, size in _SIZES if re.search(pattern, name)), None)
            if size is not None:
                setattr(config, name, size)
        elif isinstance(value, float) and re.search("drop", name):
            setattr(config, name, 0.0)
        elif name == "layer_types" and isinstance(value, list):
            setattr(config, name, value[:2])
    config.use_cache = False
