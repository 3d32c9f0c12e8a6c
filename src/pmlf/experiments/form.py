"""The form of a model: what it takes, what it gives, how it is built. It goes into the run's folder.

A form holds declared and published facts alone: nothing in it is computed from private records.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from pmlf import data, models
from pmlf.basics.files import write_atomically
from pmlf.data.targets import target_from_json, target_to_json
from pmlf.experiments.linear_model import rebuilt_linear
from pmlf.models.pretrained import LANGUAGE, SEQUENCES, Tuning, rebuilt
from pmlf.models.vision import rebuilt_image_classifier

FORM_FILE = "model.json"
WEIGHTS = "model.safetensors"
PRETRAINED_FOLDER = "pretrained"
_FORMAT = 1

Inputs = data.ImageForm | data.TextForm | data.LanguageForm | data.Schema | data.FeatureForm


@dataclass(frozen=True, kw_only=True)
class ModelForm:
    """What a model takes and gives, and how to build it.

    Args:
        model: A name of `pmlf.models`; or of a pretrained model, whose configuration is in the folder `pretrained`.
        inputs: How images, texts or rows become the tensors that the model takes. Its class is the kind of data.
        target: What the outputs mean.
        tuning: Which weights of a pretrained model are trained.
        pretrained: Whether it is a model of `transformers`.
        metrics: The scores that the dataset is judged by.
        linear: Whether it is a linear model on features of each record, described in linear.json.
    """

    model: str
    inputs: Inputs
    target: data.AnyTarget
    tuning: Tuning = field(default_factory=Tuning)
    pretrained: bool = False
    metrics: tuple[str, ...] = ("accuracy",)
    linear: bool = False

    def outputs(self, model: nn.Module, batch: Any) -> Tensor:
        """The outputs (N, width) of a model for a batch; of a language model, (N, tokens, vocabulary)."""
        if self.linear:
            found: Tensor = model(batch)
            return found
        if not isinstance(self.inputs, data.TextForm | data.LanguageForm):
            plain: Tensor = model(batch[0])
            return plain
        logits: Tensor = model(**{name: tensor for name, tensor in batch.items() if name != "labels"}).logits
        return logits

    def truth(self, batch: Any) -> Tensor:
        """The labels of a batch."""
        texts = isinstance(self.inputs, data.TextForm | data.LanguageForm)
        labels: Tensor = batch["labels"] if texts else batch[1]
        return labels

    def build(self, folder: Path) -> nn.Module:
        """The model, with weights that are still to be loaded. `folder` holds the configuration of a pretrained one."""
        inputs = self.inputs
        if isinstance(self.target, data.NextToken):
            return rebuilt(folder / PRETRAINED_FOLDER, LANGUAGE, self.tuning)
        outputs = self.target.width
        if self.linear:
            return rebuilt_linear(folder, folder / WEIGHTS, folder / PRETRAINED_FOLDER, inputs, self.target)
        assert not isinstance(inputs, data.FeatureForm)
        if isinstance(inputs, data.TextForm):
            return rebuilt(folder / PRETRAINED_FOLDER, SEQUENCES, self.tuning)
        if isinstance(inputs, data.Schema):
            return models.build_for_table(self.model, features=len(inputs.features), outputs=outputs, seed=0)
        if self.pretrained:
            return rebuilt_image_classifier(folder / PRETRAINED_FOLDER, self.tuning)
        assert isinstance(inputs, data.ImageForm)
        return models.build(self.model, in_channels=inputs.channels, image_size=inputs.size, classes=outputs, seed=0)

    def write(self, folder: Path) -> None:
        """Write model.json."""
        write_atomically(folder / FORM_FILE, (json.dumps(self.to_json(), indent=2) + "\n").encode(), released=True)

    @staticmethod
    def read(folder: Path) -> ModelForm:
        """The form that `write` wrote.

        Raises:
            ValueError: If the folder is missing, holds no model, or its form is damaged.
        """
        if not folder.is_dir():
            raise ValueError(f"{str(folder)!r} does not exist: give the folder of a run")
        path = folder / FORM_FILE
        if not path.is_file():
            unfinished = " Is the run complete?" if (folder / "spec.json").exists() else ""
            raise ValueError(
                f"{str(folder)!r} holds no model, because it has no {FORM_FILE}: give the folder of a run.{unfinished}"
            )
        try:
            return ModelForm.from_json(json.loads(path.read_text(encoding="utf-8")))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(f"{str(path)!r} is damaged, or of another version of pmlf: restore the file") from error

    def to_json(self) -> dict[str, Any]:
        """The form as a document for JSON."""
        kind = next(name for name, of in _KINDS.items() if isinstance(self.inputs, of))
        inputs = self.inputs.to_json() if isinstance(self.inputs, data.Schema) else asdict(self.inputs)
        return {
            "format": _FORMAT,
            "kind": kind,
            "model": self.model,
            "inputs": inputs,
            "target": target_to_json(self.target),
            "pretrained": self.pretrained,
            "tuning": asdict(self.tuning),
            "metrics": list(self.metrics),
            "linear": self.linear,
        }

    @staticmethod
    def from_json(document: Mapping[str, Any]) -> ModelForm:
        """The form that `to_json` wrote."""
        if document["format"] != _FORMAT:
            raise ValueError(f"format={document['format']!r} is not {_FORMAT}")
        kind, values = _KINDS[document["kind"]], document["inputs"]
        tuples = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
        return ModelForm(
            model=document["model"],
            inputs=data.Schema.from_json(values) if kind is data.Schema else kind(**tuples),
            target=target_from_json(document["target"]),
            tuning=Tuning(**document["tuning"]),
            pretrained=document["pretrained"],
            metrics=tuple(document["metrics"]),
            linear=document.get("linear", False),
        )


_KINDS: dict[str, Any] = {
    "image": data.ImageForm,
    "text": data.TextForm,
    "language": data.LanguageForm,
    "table": data.Schema,
    "features": data.FeatureForm,
}
