"""Trained models for other programs: an ONNX file, a torch.export file, or a folder with a model card."""

from __future__ import annotations

import contextlib
import copy
import io
import json
import logging
import math
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2
import torch
from torch import Tensor, nn

from pmlf import data
from pmlf.basics.files import write_atomically
from pmlf.evidence import certificate as certificates
from pmlf.evidence.certificate_page import guarantee, upper
from pmlf.evidence.description import UNITS
from pmlf.experiments.form import FORM_FILE, PRETRAINED_FOLDER, WEIGHTS, ModelForm
from pmlf.experiments.linear_model import LINEAR_FILE
from pmlf.experiments.released import AVERAGED_WEIGHTS, CERTIFICATE, ReleasedModel, load
from pmlf.models.vision import PretrainedImages

NAMES = {"onnx": "model.onnx", "torch-export": "model.pt2", "hub": "hub"}
_TOKENS, _ROWS = 8, 2  # of the example that a graph is traced with; both are dynamic in the graph


class Served(nn.Module):
    """Computes probabilities from raw tensors (bytes of pixels, tokens or encoded columns) through the model."""

    scale: Tensor
    shift: Tensor

    def __init__(self, model: nn.Module, form: ModelForm) -> None:
        super().__init__()
        self.model = model
        self._form = form
        if isinstance(form.inputs, data.ImageForm):
            scale, shift = form.inputs.affine
            self.register_buffer("scale", torch.from_numpy(scale))
            self.register_buffer("shift", torch.from_numpy(shift))

    def forward(self, *inputs: Tensor) -> Tensor:
        form = self._form.inputs
        if isinstance(form, data.ImageForm):
            outputs = self.model(inputs[0].float() * self.scale + self.shift)
        elif isinstance(form, data.TextForm):
            outputs = self.model(**dict(zip(TEXT_INPUTS, inputs, strict=False))).logits
        else:
            outputs = self.model(inputs[0])
        assert not isinstance(self._form.target, data.NextToken)  # `write` refuses it
        return self._form.target.activated(outputs)


TEXT_INPUTS = ("input_ids", "attention_mask", "token_type_ids")


def write(folder: Path, kind: str, out: Path, *, average: bool = False) -> dict[str, Any]:
    """Export the model of a run.

    Args:
        folder: The folder of a run.
        kind: "onnx", "torch-export" or "hub".
        out: The new file, or the new folder for "hub".
        average: Export the average of the parameters instead of the last iterate.

    Returns:
        What the export takes and gives, or the guarantee that its card states.

    Raises:
        ValueError: If the folder holds no model, a package is missing, or the certificate does not hold.
    """
    released = load(folder, average=average)
    if kind != "hub" and isinstance(released.form.target, data.NextToken):
        raise ValueError(
            f"format={kind!r} is for models that classify, and this one continues texts: give format='hub', or use "
            "pmlf.load(...).model with the exporters of transformers"
        )
    return _WRITERS[kind](released, folder, out, AVERAGED_WEIGHTS if average else WEIGHTS)


def _write_onnx(released: ReleasedModel, folder: Path, out: Path, weights: str) -> dict[str, Any]:
    try:
        import onnx
        import onnxscript  # noqa: F401  # torch.onnx needs it
    except ImportError as error:
        raise ValueError("format='onnx' needs the packages onnx and onnxscript: pip install 'dp-pmlf[onnx]'") from error
    names, inputs = _example(released)
    with _quiet():
        program = torch.onnx.export(
            _served(released),
            inputs,
            dynamo=True,
            input_names=list(names),
            output_names=["probabilities"],
            dynamic_shapes=(_dynamic(inputs),),
            verbose=False,
        )
        assert program is not None
        graph = onnx.load_from_string(program.model_proto.SerializeToString())
    entry = graph.metadata_props.add()
    entry.key, entry.value = "pmlf", json.dumps(released.form.to_json())
    write_atomically(out, graph.SerializeToString(), released=True)
    return _interface(released, names)


def _write_torch_export(released: ReleasedModel, folder: Path, out: Path, weights: str) -> dict[str, Any]:
    names, inputs = _example(released)
    with _quiet():
        program = torch.export.export(_served(released), inputs, dynamic_shapes=(_dynamic(inputs),))
        buffer = io.BytesIO()
        torch.export.save(program, buffer, extra_files={FORM_FILE: json.dumps(released.form.to_json())})
    write_atomically(out, buffer.getvalue(), released=True)
    return _interface(released, names)


def _write_hub(released: ReleasedModel, folder: Path, out: Path, weights: str) -> dict[str, Any]:
    if released.certificate is None:
        raise ValueError(f"{str(folder)!r} has no {CERTIFICATE}, so the card can state no guarantee: restore the file")
    _, reason = certificates.examined(released.certificate)
    if reason is not None and released.certificate["epsilon"] is not None:
        raise ValueError(f"the certificate in {str(folder)!r} does not hold ({reason}): restore the file")
    words = in_words(released.certificate)
    out.mkdir(parents=True)
    for name in (CERTIFICATE, "certificate.html", FORM_FILE):
        shutil.copyfile(folder / name, out / name)
    shutil.copyfile(folder / weights, out / WEIGHTS)
    if released.form.linear:
        shutil.copyfile(folder / LINEAR_FILE, out / LINEAR_FILE)
    if released.form.pretrained:
        shutil.copytree(folder / PRETRAINED_FOLDER, out / PRETRAINED_FOLDER)
    write_atomically(out / "README.md", card(released, words).encode(), released=True)
    return {"guarantee": words}


_WRITERS: dict[str, Callable[[ReleasedModel, Path, Path, str], dict[str, Any]]] = {
    "onnx": _write_onnx,
    "torch-export": _write_torch_export,
    "hub": _write_hub,
}


def in_words(certificate: Mapping[str, Any]) -> str:
    """The guarantee of a certificate in words that a reader without its formulas understands."""
    if certificate["epsilon"] is None:
        return guarantee(certificate)
    epsilon, delta, units = certificate["epsilon"], f"{certificate['delta']:.3g}", certificate.get(UNITS)
    odds = f"{math.ceil(100 * math.exp(epsilon)) / 100:,.2f}" if epsilon < 10 else f"e^{upper(epsilon)}"
    return (
        f"This model was trained with differential privacy: epsilon {upper(epsilon)} at delta {delta}, for any one "
        f"{'training record' if units is None else units['name']} ({certificate['adjacency']}). Whoever has the model, "
        f"and everything else in this folder, can guess whether {_any_one(certificate)}, with odds at most {odds} "
        f"times those without the model, except with probability {delta}."
        + (" A person with several records is protected less than one record is." if units is None else "")
    )


def _any_one(certificate: Mapping[str, Any]) -> str:
    """What can hardly be guessed: that a record was used, or a unit with all its records."""
    units = certificate.get(UNITS)
    if units is None:
        return f"any one of the {certificate['records']:,} training records was used, or what it says"
    return (
        f"the records of any one of {units['count']:,} ({units['name']}) were used, or what they say; there are "
        f"{certificate['records']:,} records"
    )


def card(released: ReleasedModel, words: str) -> str:
    """The model card: what the model is, its privacy guarantee, and how to use it."""
    source = (resources.files("pmlf") / "assets" / "card.md.j2").read_text(encoding="utf-8")
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined)
    assert released.certificate is not None
    return environment.from_string(source).render(
        form=released.form.to_json(), guarantee=words, certificate=released.certificate, names=released.names
    )


def _served(released: ReleasedModel) -> Served:
    """A copy of the model for tracing. Updates of low rank are merged into the weights."""
    model = copy.deepcopy(released.model).eval()
    if released.form.tuning.lora_rank is not None:
        inner: Any = model.inner if isinstance(model, PretrainedImages) else model
        merged = inner.merge_and_unload()
        model = PretrainedImages(merged) if isinstance(model, PretrainedImages) else merged
    return Served(model, released.form).eval()


def _example(released: ReleasedModel) -> tuple[tuple[str, ...], tuple[Tensor, ...]]:
    """Names and an example of the inputs of a graph. It holds no record."""
    form = released.form.inputs
    if released.form.linear or isinstance(form, data.FeatureForm):
        raise ValueError(
            f"{released.form.model!r} is a linear model on features, which has no graph: give format='hub'"
        )
    if isinstance(form, data.Schema):
        return ("features",), (torch.zeros(_ROWS, len(form.features)),)
    if isinstance(form, data.ImageForm):
        return ("pixels",), (torch.zeros(_ROWS, form.channels, form.size, form.size, dtype=torch.uint8),)
    assert isinstance(form, data.TextForm)
    names = tuple(name for name in TEXT_INPUTS if name in released.tokenizer.model_input_names)
    tokens = torch.ones(_ROWS, min(_TOKENS, form.longest), dtype=torch.int64)
    return names, tuple(torch.zeros_like(tokens) if name == "token_type_ids" else tokens.clone() for name in names)


def _dynamic(inputs: tuple[Tensor, ...]) -> tuple[dict[int, Any], ...]:
    """The batch is dynamic, and so is the length of texts."""
    batch, length = torch.export.Dim.DYNAMIC, torch.export.Dim.DYNAMIC
    return tuple({0: batch, 1: length} if each.dtype == torch.int64 else {0: batch} for each in inputs)


def _interface(released: ReleasedModel, names: tuple[str, ...]) -> dict[str, Any]:
    return {"takes": ", ".join(names), "gives": "probabilities", "classes": ", ".join(released.names)}


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the exporters' warnings and progress, which name their internals."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "onnxscript", "onnx_ir", "torch.export")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
