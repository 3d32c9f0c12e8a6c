"""Cases of the benchmark by name: models with random weights, and random batches of realistic sizes."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pmlf import models
from pmlf.bench import modern
from pmlf.bench.case import Case
from pmlf.models.vit import Block


def _image_model(name: str, *, batch: int, size: int = 32, channels: int = 3, micro_batches: int = 1) -> Case:
    return Case(
        name=name,
        batch=batch,
        classes=10,
        build=lambda: models.build(name, in_channels=channels, image_size=size, classes=10),
        inputs=lambda samples: torch.randn(samples, channels, size, size),
        images=name != "linear",
        micro_batches=micro_batches,
    )


class _Classifier(nn.Module):
    """A Hugging Face classifier that returns its logits as a tensor, like the other models."""

    def __init__(self, classifier: nn.Module) -> None:
        super().__init__()
        self.classifier = classifier

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.classifier(input_ids=tokens).logits
        return logits


_VOCABULARY, _SPECIAL_TOKENS = 50265, 5


def _roberta() -> nn.Module:
    """RoBERTa-base with random weights, so that nothing is downloaded, and no dropout, so that all gradients agree."""
    from transformers import RobertaConfig, RobertaForSequenceClassification

    config = RobertaConfig(
        vocab_size=_VOCABULARY,
        max_position_embeddings=514,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return _Classifier(RobertaForSequenceClassification(config))


class _Stack(nn.Module):
    """Two transformer blocks on embedded tokens, and a classifier on their mean."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Block(width, heads=4), Block(width, heads=4))
        self.head = nn.Linear(width, 10)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.blocks(tokens).mean(dim=1))
        return logits


def stack(width: int, length: int) -> Case:
    """A small transformer on `length` tokens of size `width`, for measurements of growth."""
    return Case(
        name=f"stack-{width}x{length}",
        batch=32,
        classes=10,
        build=lambda: _Stack(width),
        inputs=lambda samples: torch.randn(samples, length, width),
    )


CASES: dict[str, Case] = {
    case.name: case
    for case in (
        _image_model("cnn5", batch=256, micro_batches=4),
        _image_model("resnet18", batch=64),
        _image_model("vit", batch=128),
        Case(
            name="roberta",
            batch=16,
            classes=2,
            build=_roberta,
            inputs=lambda samples: torch.randint(_SPECIAL_TOKENS, _VOCABULARY, (samples, 64)),
            imports=("transformers.models.roberta.modeling_roberta",),
        ),
        _image_model("linear", batch=1000, size=28, channels=1),
        modern.llama(),
        modern.t5(),
        modern.convnext(),
        modern.lstm(),
        modern.unet(),
        modern.llama_lora(),
    )
}
WIDTHS, LENGTHS = (64, 128, 256, 512), (16, 32, 64, 128, 256)
STACK_WIDTH, STACK_LENGTH = 128, 64  # while the other one varies
STACKS: dict[str, Case] = {
    case.name: case
    for case in (
        *(stack(width, STACK_LENGTH) for width in WIDTHS),
        *(stack(STACK_WIDTH, length) for length in LENGTHS),
    )
}


def find(name: str) -> Case:
    """The case with this name. Raises ValueError if there is none."""
    known = {**CASES, **STACKS}
    if name not in known:
        raise ValueError(f"unknown case {name!r}: give one of {', '.join(CASES)}")
    return known[name]
