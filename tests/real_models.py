"""Models that people train, tiny and offline, and how each one's per-sample gradients are taken.

`pmlf` is compared with plain autograd on every one of them (`tests/engine/test_real_models.py`), and
`benchmarks/coverage.py` draws up a table of them beside other libraries.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

import real_classics as classic
from real_transformers import TRANSFORMERS

Loss = Callable[[Any, Any], Tensor]
# rules: every parameter by the rules of the layers or operations that use it; autograd: some by an operation without a
# rule, which is run backwards for every sample; refused: gradients="ghost" says why not, and "one-by-one" is the way
# out; crashes: refused too, by an error that is not ours
Path = Literal["rules", "autograd", "refused", "crashes"]


@dataclass(frozen=True, kw_only=True)
class RealModel:
    """A builder of (model, loss function, batch of four samples), and the path that is expected."""

    build: Callable[[], tuple[nn.Module, Loss, Any]]
    path: Path

    def made(self) -> tuple[nn.Module, Loss, Any]:
        """The model with every weight moved a little: nothing stays at zero or one, where mistakes hide."""
        torch.manual_seed(3)
        model, loss, batch = self.build()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
        return model.train(), loss, batch


def _text(model: Callable[[], nn.Module]) -> Callable[[], tuple[nn.Module, Loss, Any]]:
    return lambda: (model(), classic.classify, (classic.sentences(), classic.labels()))


def _words(model: Callable[[], nn.Module]) -> Callable[[], tuple[nn.Module, Loss, Any]]:
    return lambda: (model(), classic.next_words, (classic.sentences(),))


def _numbers(model: Callable[[], nn.Module], *shape: int) -> Callable[[], tuple[nn.Module, Loss, Any]]:
    return lambda: (model(), classic.classify, (torch.randn(classic.SAMPLES, *shape), classic.labels()))


def _pixels() -> tuple[nn.Module, Loss, Any]:
    images = torch.randn(classic.SAMPLES, 3, 8, 8)
    return classic.UNet(), classic.pixel_losses, (images, torch.randint(classic.CLASSES, (classic.SAMPLES, 8, 8)))


def _graphs() -> tuple[nn.Module, Loss, Any]:
    adjacency = torch.rand(classic.SAMPLES, 6, 6).round() + torch.eye(6)
    nodes = torch.randn(classic.SAMPLES, 6, 5)
    return classic.GCN(), classic.classify, (nodes, adjacency / adjacency.sum(2, keepdim=True), classic.labels())


def _table() -> tuple[nn.Module, Loss, Any]:
    categories = torch.stack([torch.randint(most, (classic.SAMPLES,)) for most in (4, 2, 3)], 1)
    batch = (torch.randn(classic.SAMPLES, 4), categories, classic.labels())
    return classic.TabularTransformer(), classic.classify, batch


def _pairs() -> tuple[nn.Module, Loss, Any]:
    one, two = torch.randn(2, classic.SAMPLES, 3, 8, 8)
    return classic.Siamese(), classic.same_or_not, (one, two, torch.rand(classic.SAMPLES).round())


def _vae() -> tuple[nn.Module, Loss, Any]:
    batch = (torch.rand(classic.SAMPLES, 12), torch.randn(classic.SAMPLES, 3))
    return classic.VAE(), classic.evidence_bound, batch


CLASSICS: dict[str, Callable[[], tuple[nn.Module, Loss, Any]]] = {
    "nanoGPT": _words(classic.NanoGPT),
    "vit-pytorch style ViT": _numbers(classic.PlainViT, 3, 8, 8),
    "LSTM": _text(lambda: classic.Recurrent(nn.LSTM)),
    "GRU": _text(lambda: classic.Recurrent(nn.GRU)),
    "plain RNN": _text(lambda: classic.Recurrent(nn.RNN)),
    "LSTM, two layers, both ways": _text(lambda: classic.Recurrent(nn.LSTM, layers=2, bidirectional=True)),
    "LSTM, time first": _text(classic.TimeMajorLSTM),
    "LSTM cell by cell": _numbers(classic.CellByCell, 6, 5),
    "U-Net": _pixels,
    "MLP-Mixer": _numbers(classic.MLPMixer, 3, 8, 8),
    "ConvNeXt block": _numbers(classic.ConvNeXtBlock, 3, 16, 16),
    "Llama by hand": _words(classic.HandWrittenLlama),
    "weight standardisation": _numbers(lambda: classic.Weighted("standardised"), 3, 8, 8),
    "weight norm": _numbers(lambda: classic.Weighted("normalised"), 3, 8, 8),
    "graph convolution": _graphs,
    "set transformer": _numbers(classic.SetTransformer, 5, 3),
    "tabular transformer": _table,
    "EmbeddingBag": _text(classic.BagClassifier),
    "TCN": _numbers(classic.TCN, 4, 9),
    "TCN, weight norm": _numbers(lambda: classic.TCN(normalised=True), 4, 9),
    "VAE": _vae,
    "siamese, logit scale": _pairs,
    "soft prompt": _words(classic.SoftPrompt),
    "relative positions": _text(classic.RelativePositions),
    "mixture of experts": _text(classic.MixtureOfExperts),
}
_PATHS: dict[Path, tuple[str, ...]] = {"autograd": (), "refused": (), "crashes": ()}
_PATH_OF: dict[str, Path] = {name: path for path, names in _PATHS.items() for name in names}
REAL: dict[str, RealModel] = {
    name: RealModel(build=build, path=_PATH_OF.get(name, "rules"))
    for name, build in {**TRANSFORMERS, **CLASSICS}.items()
}
