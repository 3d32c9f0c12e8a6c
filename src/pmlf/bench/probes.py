"""Small models of the self-test, one or more for every rule by which per-sample gradients are taken."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pmlf.engine.plan import Gradients

CLASSES, _WORDS = 4, 20
Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True, kw_only=True)
class RuleProbe:
    """A model for one rule, and what its samples are: numbers of a shape, or words."""

    name: str
    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    words: bool = False
    gradients: Gradients = "ghost"

    def prepare(self, samples: int) -> tuple[nn.Module, Batch]:
        """The model and a batch, the same every time."""
        torch.manual_seed(0)
        model = self.build()
        with torch.no_grad():
            for parameter in model.parameters():  # away from zeros and ones, where mistakes do not show
                parameter.add_(0.2 * torch.randn_like(parameter))
        size = (samples, *self.shape)
        inputs = torch.randint(_WORDS, size) if self.words else torch.randn(size)
        return model, (inputs, torch.randint(CLASSES, (samples,)))


def losses(model: nn.Module, batch: Batch) -> Tensor:
    """Cross-entropy of every sample; outputs are averaged over tokens or pixels."""
    logits = model(batch[0])
    return F.cross_entropy(logits.flatten(2).mean(2) if logits.ndim > 2 else logits, batch[1], reduction="none")


class _TokensLast(nn.Module):
    """(n, tokens, classes) as (n, classes, tokens)."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mT


class _Bare(nn.Module):
    """A token and a scale that belong to no layer."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.scale, self.head = nn.Parameter(torch.zeros(1, 1, 6)), _Scale(), nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1)
        logits: Tensor = self.head(torch.tanh(self.scale(x)).mean(1))
        return logits


class _Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class _Tied(nn.Module):
    """One matrix that embeds and projects."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.out, self.head = nn.Embedding(_WORDS, 6), nn.Linear(6, _WORDS), nn.Linear(_WORDS, CLASSES)
        self.out.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.head(torch.tanh(self.out(self.embedding(ids).cumsum(1))).mean(1))
        return logits


class _Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(6, 8, batch_first=True), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.lstm(x)[0][:, -1])
        return logits


PROBES = (
    RuleProbe(
        name="linear", build=lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, CLASSES)), shape=(6,)
    ),
    RuleProbe(
        name="linear on tokens",
        build=lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, CLASSES), _TokensLast()),
        shape=(9, 6),
    ),
    RuleProbe(
        name="convolution, 1 axis",
        build=lambda: nn.Sequential(nn.Conv1d(3, 8, 3, stride=2), nn.Tanh(), nn.Conv1d(8, CLASSES, 2)),
        shape=(3, 12),
    ),
    RuleProbe(
        name="convolution, 2 axes",
        build=lambda: nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1, groups=1), nn.Tanh(), nn.Conv2d(8, CLASSES, 3, dilation=2, groups=2)
        ),
        shape=(3, 8, 8),
    ),
    RuleProbe(
        name="convolution, 3 axes",
        build=lambda: nn.Sequential(nn.Conv3d(2, 4, 2), nn.Tanh(), nn.Conv3d(4, CLASSES, 2)),
        shape=(2, 5, 5, 5),
    ),
    RuleProbe(
        name="transposed convolution",
        build=lambda: nn.Sequential(nn.ConvTranspose2d(3, 6, 2, stride=2), nn.Tanh(), nn.Conv2d(6, CLASSES, 3)),
        shape=(3, 5, 5),
    ),
    RuleProbe(
        name="embedding",
        build=lambda: nn.Sequential(nn.Embedding(_WORDS, 6), nn.Tanh(), nn.Linear(6, CLASSES), _TokensLast()),
        shape=(7,),
        words=True,
    ),
    RuleProbe(name="tied weights", build=_Tied, shape=(7,), words=True),
    RuleProbe(
        name="layer norm",
        build=lambda: nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, CLASSES), _TokensLast()),
        shape=(5, 6),
    ),
    RuleProbe(
        name="RMS norm",
        build=lambda: nn.Sequential(nn.Linear(6, 8), nn.RMSNorm(8), nn.Tanh(), nn.Linear(8, CLASSES), _TokensLast()),
        shape=(5, 6),
    ),
    RuleProbe(
        name="group norm",
        build=lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.Tanh(), nn.Conv2d(8, CLASSES, 3)),
        shape=(3, 8, 8),
    ),
    RuleProbe(
        name="instance norm",
        build=lambda: nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.InstanceNorm2d(8, affine=True), nn.Tanh(), nn.Conv2d(8, CLASSES, 3)
        ),
        shape=(3, 8, 8),
    ),
    RuleProbe(name="bare parameters", build=_Bare, shape=(5, 6)),
    RuleProbe(
        name="vmap over the model",
        build=lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, CLASSES)),
        shape=(6,),
        gradients="vmap",
    ),
    RuleProbe(name="LSTM, one by one", build=_Recurrent, shape=(5, 6), gradients="one-by-one"),
)
