"""A private linear model on features, as a module: from a batch of records to outputs, and from a folder back again."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn

from pmlf import data
from pmlf.basics.files import write_atomically
from pmlf.models.encoders import ImageEncoder, SentenceEncoder, embedded
from pmlf.priors import BlockSpec, ColourSpec, ImagePrior, PatchSpec, PriorSpec, ScatteringSpec
from pmlf.probe.conditioning import BlockConditioning, FeatureBlock
from pmlf.probe.rows import FeatureRows
from pmlf.probe.training import ProbeModel

LINEAR_FILE = "linear.json"
FEATURES, SYNTHETIC, SENTENCES, IMAGES = "features", "synthetic", "sentence-embedding", "image-embedding"
_ENCODER = "encoder."


@dataclass(frozen=True, kw_only=True)
class LinearForm:
    """How a linear model takes its features. All of it is declared or published.

    Attributes:
        kind: Where features come from: "features" (a file), "synthetic", "sentence-embedding", "image-embedding".
        blocks: First column, column after the last, and weight of every block.
        intercept: The share of the constant in a record's squared norm.
        prior: What synthetic features are made from.
    """

    kind: str
    blocks: tuple[tuple[int, int, float], ...]
    intercept: float = 0.0
    prior: PriorSpec | None = None

    @staticmethod
    def of(model: ProbeModel, kind: str, prior: PriorSpec | None = None) -> LinearForm:
        """The form of a trained model."""
        blocks = tuple((each.block.start, each.block.stop, float(each.weight)) for each in model.conditioning)
        return LinearForm(kind=kind, blocks=blocks, intercept=float(model.intercept), prior=prior)

    def to_json(self) -> dict[str, Any]:
        """The form as a document for JSON."""
        prior = None
        if self.prior is not None:
            parts = [{"kind": type(block).__name__, **asdict(block)} for block in self.prior.all_blocks]
            prior = {**asdict(self.prior), "blocks": parts}
        return {"kind": self.kind, "blocks": list(self.blocks), "intercept": self.intercept, "prior": prior}

    @staticmethod
    def from_json(document: Mapping[str, Any]) -> LinearForm:
        """The form that `to_json` wrote."""
        prior = document["prior"]
        if prior is not None:
            prior = PriorSpec(**{**prior, "blocks": tuple(_block(each) for each in prior["blocks"])})
        blocks = tuple((int(start), int(stop), float(weight)) for start, stop, weight in document["blocks"])
        return LinearForm(kind=document["kind"], blocks=blocks, intercept=document["intercept"], prior=prior)


def _block(document: Mapping[str, Any]) -> BlockSpec:
    kinds: dict[str, type[BlockSpec]] = {kind.__name__: kind for kind in (PatchSpec, ColourSpec, ScatteringSpec)}
    return kinds[document["kind"]](**{name: value for name, value in document.items() if name != "kind"})


class PriorEncoder(nn.Module):
    """The features of normalised images, by a prior from synthetic images. Its tensors go with the weights."""

    def __init__(self, prior: ImagePrior, images: data.ImageForm) -> None:
        super().__init__()
        self._prior, self._images = prior, images
        for name, tensor in prior.tensors().items():
            self.register_buffer(name.replace(".", "-"), tensor)

    def forward(self, images: Tensor) -> Tensor:
        """The features (N, d) of images (N, C, S, S), whose pixels are found again by undoing the normalisation."""
        scale, shift = (torch.from_numpy(part) for part in self._images.affine)
        pixels = images.sub(shift).div_(scale).round_().clamp_(0, 255).to(torch.uint8)
        return torch.from_numpy(self._prior(pixels.numpy()))


class LinearModel(nn.Module):
    """Outputs of a released linear model for a batch of records.

    Args:
        form: How it takes its features.
        encoder: From a batch to features.
        outputs: The number of scores that the weights give; a single one of two classes stands for the second class.
        single: Whether one score is the output itself: a predicted number, or a single label.
    """

    def __init__(self, form: LinearForm, encoder: nn.Module, *, outputs: int, single: bool) -> None:
        super().__init__()
        self.form, self.encoder, self._single = form, encoder, single
        width = form.blocks[-1][1] + (form.intercept > 0)
        self.weights = nn.Parameter(torch.zeros(width, outputs, dtype=torch.float64), requires_grad=False)
        for place, (start, stop, _) in enumerate(form.blocks):
            self.register_buffer(f"mean-{place}", torch.zeros(stop - start, dtype=torch.float64))
            self.register_buffer(f"scale-{place}", torch.ones(stop - start, dtype=torch.float64))

    def forward(self, batch: Any) -> Tensor:
        """The outputs (N, K) of a batch: a dict of tokens, or a tuple that begins with images or features."""
        scores = self.released().scores(FeatureRows(embedded(self.encoder, batch)))
        if scores.shape[1] > 1 or self._single:
            return scores
        return torch.cat([torch.zeros_like(scores), scores], dim=1)  # its softmax is the sigmoid of the score

    def released(self) -> ProbeModel:
        """The linear model alone."""
        conditioning = tuple(
            BlockConditioning(
                block=FeatureBlock(start=start, stop=stop, weight=weight),
                weight=weight,
                mean=self.get_buffer(f"mean-{place}"),
                scale=self.get_buffer(f"scale-{place}"),
            )
            for place, (start, stop, weight) in enumerate(self.form.blocks)
        )
        return ProbeModel(conditioning=conditioning, intercept=self.form.intercept, weights=self.weights.detach())


def linear_tensors(model: ProbeModel, encoder: nn.Module) -> dict[str, Tensor]:
    """Everything that is released, by the names of `LinearModel`."""
    tensors = {"weights": model.weights.double()}
    for place, each in enumerate(model.conditioning):
        tensors |= {f"mean-{place}": each.mean.double(), f"scale-{place}": each.scale.double()}
    tensors |= {f"{_ENCODER}{name}": tensor for name, tensor in encoder.state_dict().items()}
    return {name: tensor.detach().contiguous().clone() for name, tensor in tensors.items()}


def write_linear(folder: Path, weights: str, form: LinearForm, model: ProbeModel, encoder: nn.Module) -> None:
    """Write linear.json and the file of the weights, all of it released."""
    write_atomically(folder / LINEAR_FILE, (json.dumps(form.to_json(), indent=2) + "\n").encode(), released=True)
    tensors = linear_tensors(model, encoder)
    write_atomically(folder / weights, safetensors.torch.save(tensors), released=True)


def rebuilt_linear(folder: Path, weights: Path, pretrained: Path, inputs: Any, target: data.Target) -> LinearModel:
    """The linear model of a run, with weights that are still to be loaded.

    Args:
        folder: The folder of the run.
        weights: The file of its weights, which also holds the tensors of a prior.
        pretrained: The folder of an encoder's configuration.
        inputs: What the model takes: a form of images, texts or features.
        target: What its outputs mean.
    """
    form = LinearForm.from_json(json.loads((folder / LINEAR_FILE).read_text(encoding="utf-8")))
    tensors = safetensors.torch.load_file(weights)
    encoder: nn.Module = nn.Identity()
    if form.kind == SENTENCES:
        encoder = SentenceEncoder.rebuilt(pretrained)
    elif form.kind == IMAGES:
        encoder = ImageEncoder.rebuilt(pretrained)
    elif form.prior is not None:
        encoder = PriorEncoder(ImagePrior.from_tensors(form.prior, _of_encoder(tensors)), inputs)
    single = target.width == 1 or isinstance(target, data.LabelSet)
    return LinearModel(form, encoder, outputs=tensors["weights"].shape[1], single=single)


def _of_encoder(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    own: Sequence[str] = [name for name in tensors if name.startswith(_ENCODER)]
    return {name.removeprefix(_ENCODER).replace("-", "."): tensors[name] for name in own}
