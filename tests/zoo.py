"""Small models with batches and losses, one for each way a parameter can be used."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    RobertaConfig,
    RobertaForSequenceClassification,
)

from pmlf.models.cnn import CNN5
from pmlf.models.resnet import ResNet
from pmlf.models.vit import ViT

LABELS = 4
VOCABULARY = 60


@dataclass(frozen=True)
class Case:
    make: Callable[[], nn.Module]
    batch: Callable[[int], Any]
    loss: Callable[[Any, Any], Tensor]


def classify(model: Any, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def images(*shape: int) -> Callable[[int], Any]:
    def batch(n: int) -> Any:
        generator = torch.Generator().manual_seed(5)
        return (
            torch.randn(n, *shape, generator=generator),
            torch.randint(LABELS, (n,), generator=generator),
        )

    return batch


def token_batch(n: int) -> dict[str, Tensor]:
    """Padded sequences: index 1 pads, as in RoBERTa."""
    generator = torch.Generator().manual_seed(6)
    ids = torch.randint(2, VOCABULARY, (n, 9), generator=generator)
    lengths = torch.randint(3, 10, (n,), generator=generator)
    mask = (torch.arange(9) < lengths[:, None]).long()
    labels = torch.randint(LABELS, (n,), generator=generator)
    return {"input_ids": torch.where(mask == 1, ids, 1), "attention_mask": mask, "labels": labels}


def classify_text(model: Any, batch: Any) -> Tensor:
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    return F.cross_entropy(logits, batch["labels"], reduction="none")


def next_token(model: Any, batch: Any) -> Tensor:
    out = model(batch["input_ids"])
    logits = out if isinstance(out, Tensor) else out.logits
    losses = F.cross_entropy(logits[:, :-1].mT, batch["input_ids"][:, 1:], reduction="none")
    return losses.mean(1)


_BERT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 16,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "num_labels": LABELS,
}


def roberta() -> nn.Module:
    return RobertaForSequenceClassification(RobertaConfig(pad_token_id=1, **_BERT)).train()


def bert() -> nn.Module:
    return BertForSequenceClassification(BertConfig(pad_token_id=1, **_BERT)).train()


def gpt2() -> nn.Module:
    config = GPT2Config(
        vocab_size=VOCABULARY, n_embd=16, n_layer=2, n_head=2, n_positions=16, resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return GPT2LMHeadModel(config).train()


class TiedLanguageModel(nn.Module):
    """Embedding and output layer share one matrix; a position table without batch axis."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 12)
        self.position = nn.Embedding(16, 12)
        self.mix = nn.Linear(12, 12)
        self.norm = nn.LayerNorm(12)
        self.output = nn.Linear(12, VOCABULARY, bias=False)
        self.output.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        positions = torch.arange(ids.shape[1], device=ids.device)[None]
        x = self.embedding(ids) + self.position(positions)
        x = x.cumsum(1) / torch.arange(1, ids.shape[1] + 1, device=ids.device)[:, None]
        return self.output(self.norm(torch.tanh(self.mix(x)) + x))


class BagOfEmbeddings(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 10, padding_idx=1)
        self.head = nn.Linear(10, LABELS)

    def forward(self, ids: Tensor) -> Tensor:
        kept = (ids != 1).unsqueeze(-1)
        return self.head((self.embedding(ids) * kept).sum(1) / kept.sum(1))


class Checkpointed(nn.Module):
    def __init__(self, *, reentrant: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.block = nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True), nn.LayerNorm(8), nn.Linear(8, 8))
        self.head = nn.Linear(8, LABELS)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.head(checkpoint(self.block, x, use_reentrant=self.reentrant))


class Convolutions(nn.Module):
    """Stride, padding and its modes, dilation, groups; one, two and three dimensions; InstanceNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.two = nn.Sequential(
            nn.Conv2d(2, 4, 3, stride=2, padding=1),
            nn.InstanceNorm2d(4, affine=True),
            nn.Tanh(),
            nn.Conv2d(4, 8, (3, 2), padding="same", dilation=(1, 2), groups=2, padding_mode="reflect"),
            nn.Tanh(),
            nn.Conv2d(8, 8, 2, padding=(1, 0), padding_mode="circular", bias=False),
            nn.GroupNorm(2, 8),
        )
        self.one = nn.Conv1d(8, 6, 4, stride=3, padding=2, padding_mode="replicate")
        self.three = nn.Conv3d(1, 3, (2, 3, 2), stride=(1, 2, 1), dilation=(1, 1, 2))
        self.head = nn.Linear(3, LABELS)

    def forward(self, x: Tensor) -> Tensor:
        x = self.two(x)  # (n, 8, h, w)
        x = torch.tanh(self.one(x.flatten(2)))  # (n, 6, l)
        x = torch.tanh(self.three(x.unflatten(2, (3, -1)).unsqueeze(1)))
        return self.head(x.mean((2, 3, 4)))


class Scale(nn.Module):
    """A parameter without a rule, used in its own module: taken by vmap."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.linspace(0.5, 1.5, width))
        self.temperature = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor, *, shift: Tensor) -> Tensor:
        return x * self.gamma * self.temperature + shift


class Unusual(nn.Module):
    """A layer used twice, windows folded into the batch axis, bare parameters, RMSNorm, several token axes."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)
        self.norm = nn.RMSNorm(6)
        self.scale = Scale(6)
        self.token = nn.Parameter(torch.randn(1, 1, 6) * 0.1)
        self.window = nn.Linear(6, 6)
        self.unused = nn.Linear(3, 3)
        self.head = nn.Linear(6, LABELS)

    def forward(self, x: Tensor) -> Tensor:  # (n, 2, 4, 6)
        x = torch.tanh(self.inner(x))
        x = self.norm(self.inner(x))
        x = self.scale(x, shift=x.mean((1, 2), keepdim=True))
        windows = x.flatten(0, 1)  # (n * 2, 4, 6), sample-major
        x = (windows + torch.relu_(self.window(windows))).unflatten(0, (-1, 2)).flatten(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1)
        return self.head(x.mean(1))


CASES: dict[str, Case] = {
    "cnn5": Case(lambda: CNN5(1, LABELS), images(1, 16, 16), classify),
    "resnet": Case(lambda: ResNet((1, 1), 8, 3, LABELS), images(3, 8, 8), classify),
    "vit": Case(
        lambda: ViT(image_size=8, patch=4, in_channels=3, width=16, depth=2, heads=2, classes=LABELS),
        images(3, 8, 8),
        classify,
    ),
    "roberta": Case(roberta, token_batch, classify_text),
    "bert": Case(bert, token_batch, classify_text),
    "gpt2": Case(gpt2, token_batch, next_token),
    "tied": Case(TiedLanguageModel, token_batch, next_token),
    "bag": Case(BagOfEmbeddings, lambda n: (token_batch(n)["input_ids"], token_batch(n)["labels"]), classify),
    "checkpointed": Case(Checkpointed, images(6), classify),
    "convolutions": Case(Convolutions, images(2, 12, 12), classify),
    "unusual": Case(Unusual, images(2, 4, 6), classify),
}


def make(name: str, *, scale: float = 3.0) -> nn.Module:
    """A model with seeded weights, made a little larger so that some samples are clipped and some are not."""
    torch.manual_seed(11)
    model = CASES[name].make()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(scale)
    return model
