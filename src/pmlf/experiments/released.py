"""A trained model, ready for use: its weights, its preprocessing, the names of its outputs, and its certificate."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from pmlf import data
from pmlf.basics.batches import to_device
from pmlf.data.feature_files import load_features, load_unlabelled
from pmlf.data.images import load_split
from pmlf.data.language import padding_id
from pmlf.data.pixels import IMAGE_SUFFIXES
from pmlf.data.sources import READERS, own_source
from pmlf.data.tables import columns_of
from pmlf.data.texts import Padding, texts_of
from pmlf.experiments.form import PRETRAINED_FOLDER, WEIGHTS, ModelForm
from pmlf.experiments.scoring import BATCH_SIZE, scored
from pmlf.experiments.spec import RunSpec
from pmlf.experiments.splits import by_length
from pmlf.experiments.tasks import held_out
from pmlf.models.text import load_tokenizer
from pmlf.run.evaluation import AnyScore

AVERAGED_WEIGHTS = "model-ema.safetensors"
CERTIFICATE = "certificate.json"
_INPUT = "input"
_CONTINUED = 32  # tokens
_NO_LABEL = torch.tensor(0)


@dataclass(frozen=True, kw_only=True)
class ReleasedModel:
    """A trained model with its preprocessing, from `pmlf.load`.

    Attributes:
        model: The network, in eval mode.
        form: What it takes and gives: image size, columns, names of the classes.
        certificate: The privacy certificate of its training; None if the folder has none.
        tokenizer: The tokenizer of a text model.
    """

    model: nn.Module
    form: ModelForm
    certificate: Mapping[str, Any] | None
    tokenizer: Any = None

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the classes or labels; empty for a model that predicts a number or continues texts."""
        target = self.form.target
        return target.names if isinstance(target, data.Classes | data.LabelSet) else ()

    def batch(self, inputs: Any) -> Any:
        """Inputs as the batch that the model takes.

        Args:
            inputs: A model of images: paths, or images of Pillow. Of texts: texts, or pairs of texts. Of tables: a
                DataFrame, or a mapping from columns to values. Of features: a matrix with a row per record.
        """
        form = self.form.inputs
        if isinstance(form, data.FeatureForm):
            return (torch.from_numpy(np.array(form.checked(inputs))),)
        if isinstance(form, data.Schema):
            return (torch.from_numpy(form.encode(columns_of(inputs, form.names))),)
        if isinstance(form, data.TextForm):
            return self._text_batch(form, list(inputs))
        if isinstance(form, data.LanguageForm):
            return self._language_batch(form, list(inputs))
        return (form.normalised(np.stack([_pixels(form, image) for image in inputs])),)

    def probabilities(self, inputs: Any) -> Tensor:
        """The probabilities (N, classes) of the inputs that `batch` takes, or the predicted numbers (N, 1).

        Raises:
            ValueError: If the model is a language model, which has no classes.
        """
        target = self.form.target
        if isinstance(target, data.NextToken):
            raise ValueError("a language model has no classes: use `predict` for continuations, or `model` for logits")
        return target.activated(self._outputs(self.batch(inputs)).cpu())

    def predict(self, inputs: Any) -> list[dict[str, Any]]:
        """The prediction for each input, with the probability of every class. The inputs are those of `batch`.

        A language model continues each text by at most 32 tokens, each the most probable one.
        """
        target = self.form.target
        if isinstance(target, data.NextToken):
            return [{"prediction": self._continued(text)} for text in inputs]
        return target.rows(self.probabilities(inputs))

    def predict_files(self, paths: Sequence[Path]) -> Iterator[dict[str, Any]]:
        """The prediction for each record of files, beginning with its `input`: a file, or a file and a row.

        Args:
            paths: A model of images: image files, or folders of them. Of texts or tables: .csv, .tsv, .jsonl or
                .parquet files; for texts also .txt files with one text a line. Of features: .npy, .npz or .parquet.

        Raises:
            ValueError: If a path is missing, is of another kind, or has not the columns of the model.
        """
        for path in paths:
            if not path.exists():
                raise ValueError(f"{str(path)!r} does not exist: give the path of a file to predict")
            form = self.form.inputs
            if isinstance(form, data.FeatureForm):
                yield from self._numbered(path, _parts(form.checked(load_unlabelled(path))))
            elif isinstance(form, data.ImageForm):
                yield from self._image_rows(path)
            else:
                yield from self._numbered(path, self._read(path, form))

    def evaluate(
        self,
        dataset: str,
        *,
        split: str = "test",
        data_dir: Path | None = None,
        label_column: str = "label",
        held_out_by: RunSpec | None = None,
    ) -> AnyScore:
        """Score the model on the records of a split, as at the end of training.

        Args:
            dataset: A dataset's name or path, as in training. A single table, or a file of features, is the split.
            split: The split.
            data_dir: Folder of datasets. None: the folder in PMLF_DATA, else the Hugging Face hub.
            label_column: The column of the labels in your own data; a .npy file of labels, for features.
            held_out_by: The run whose training records are in the dataset too. Then only those that it held out count.

        Raises:
            ValueError: If the dataset cannot be read or does not fit the model.
        """
        records, collate = self._records(dataset, split, data_dir, label_column)
        if held_out_by is not None:
            records = held_out(held_out_by, records)
        if isinstance(self.form.inputs, data.TextForm | data.LanguageForm):
            records = by_length(records)
        return scored(self.form, self.model, records, collate)

    def _records(
        self, dataset: str, split: str, data_dir: Path | None, label_column: str
    ) -> tuple[Dataset[Any], Callable[[list[Any]], Any] | None]:
        """The labelled records of a split, and what makes a batch of them."""
        form, target = self.form.inputs, self.form.target
        if isinstance(form, data.LanguageForm) or isinstance(target, data.NextToken):
            assert isinstance(form, data.LanguageForm)
            tokens = data.load_language(dataset, split, self.tokenizer, form)
            return tokens, data.CausalPadding(padding_id(self.tokenizer))
        if isinstance(form, data.FeatureForm):
            return _labelled(form, target, dataset, label_column), None
        if isinstance(form, data.Schema):
            return data.load_table(dataset, split, schema=form, target=target, label_column=label_column), None
        if isinstance(form, data.ImageForm):
            images = load_split(dataset, split, data_dir, form=form, target=target, label_column=label_column)
            return images, data.collate
        own = data.Columns(text=form.text, pair=form.pair, label=label_column, target=target)
        texts = data.load_text(dataset, data_dir, None if dataset in data.TEXT_DATASETS else own, split=split)
        found = texts.tokenised(split, self.tokenizer, longest=form.longest, cut=form.cut)
        return found, Padding(self.tokenizer.pad_token_id)

    def _outputs(self, batch: Any) -> Tensor:
        with torch.inference_mode():
            return self.form.outputs(self.model, to_device(batch, next(self.model.parameters()).device))

    def _continued(self, text: str) -> str:
        """The most probable continuation of a text, token by token, until its end or the longest."""
        assert isinstance(self.form.inputs, data.LanguageForm)
        tokens = list(self.tokenizer(text, verbose=False)["input_ids"]) or [padding_id(self.tokenizer)]
        given = len(tokens)
        while len(tokens) < min(given + _CONTINUED, self.form.inputs.longest):
            best = int(self._outputs({"input_ids": torch.tensor([tokens])})[0, -1].argmax())
            if best == self.tokenizer.eos_token_id:
                break
            tokens.append(best)
        continued: str = self.tokenizer.decode(tokens[given:], skip_special_tokens=True)
        return continued

    def _language_batch(self, form: data.LanguageForm, texts: Sequence[Any]) -> dict[str, Tensor]:
        if not all(isinstance(text, str) for text in texts):
            raise ValueError("the model takes texts: give a list of them")
        found = form.tokens(self.tokenizer, texts, "the inputs")
        batch = data.CausalPadding(padding_id(self.tokenizer))(
            [(torch.tensor(each), None, _NO_LABEL) for each in found]
        )
        return {name: tensor for name, tensor in batch.items() if name != "labels"}

    def _text_batch(self, form: data.TextForm, texts: Sequence[Any]) -> dict[str, Tensor]:
        firsts = texts if form.pair is None else [text[0] for text in texts]
        seconds = None if form.pair is None else [text[1] for text in texts]
        if not all(isinstance(text, str) for text in (*firsts, *(seconds or ()))):
            raise ValueError(
                "the model takes texts" + ("" if form.pair is None else " in pairs: give tuples of two texts")
            )
        tokens, types = form.tokens(self.tokenizer, firsts, seconds, "the inputs")
        items = [
            (torch.tensor(each), None if types is None else torch.tensor(types[index]), torch.tensor(0))
            for index, each in enumerate(tokens)
        ]
        batch = Padding(self.tokenizer.pad_token_id)(items)
        return {name: tensor for name, tensor in batch.items() if name != "labels"}

    def _image_rows(self, path: Path) -> Iterator[dict[str, Any]]:
        files = sorted(file for file in path.rglob("*") if _is_image(file)) if path.is_dir() else [path]
        if not files or not all(map(_is_image, files)):
            raise ValueError(
                f"{str(path)!r} is no image and no folder of images, which the model takes: give "
                f"{', '.join(IMAGE_SUFFIXES)} files"
            )
        for part in _parts(files):
            for file, row in zip(part, self.predict(part), strict=True):
                yield {_INPUT: str(file), **row}

    def _numbered(self, path: Path, parts: Iterator[Any]) -> Iterator[dict[str, Any]]:
        """The predictions for the records of a file, each with the file and the number of its row."""
        number = 0
        for inputs in parts:
            for row in self.predict(inputs):
                number += 1
                yield {_INPUT: f"{path.name}:{number}", **row}

    def _read(self, path: Path, form: data.TextForm | data.LanguageForm | data.Schema) -> Iterator[Any]:
        """The records of a file, part by part, as `predict` takes them."""
        is_text = not isinstance(form, data.Schema)
        if is_text and path.suffix == ".txt":
            yield from _parts(path.read_text(encoding="utf-8").splitlines())
            return
        if not path.is_file() or path.suffix not in READERS:
            kinds = (".txt", *READERS) if is_text else tuple(READERS)
            raise ValueError(f"{str(path)!r} is not a file that the model takes: give a {', '.join(kinds)} file")
        pair = form.pair if isinstance(form, data.TextForm) else None
        names = form.names if isinstance(form, data.Schema) else tuple(filter(None, (form.text, pair)))
        source = own_source(path)
        for table in source.tables("train", dict.fromkeys(names, None)):
            if isinstance(form, data.Schema):
                yield table
            else:
                found = [texts_of(table, name, source.name) for name in names]
                yield found[0] if pair is None else list(zip(*found, strict=True))


def load(folder: Path | str, *, average: bool = False, device: str = "cpu") -> ReleasedModel:
    """Load the model of a run, ready for inference, with its preprocessing.

    Nothing but the folder is needed: neither the dataset nor the pretrained model that training began with.

    Args:
        folder: The folder of a run, or one that `pmlf export --format hub` wrote.
        average: Use the average of the parameters, if the run kept one (`ema`), instead of the last iterate.
        device: The device to load it on.

    Returns:
        The model.

    Raises:
        ValueError: If the folder is missing, holds no model, or its weights do not fit.
    """
    path = Path(folder)
    form = ModelForm.read(path)
    weights = path / (AVERAGED_WEIGHTS if average else WEIGHTS)
    if not weights.is_file():
        way_out = "the run kept no average, so leave `average` out" if average else "restore the file"
        raise ValueError(f"{str(path)!r} has no {weights.name}: {way_out}")
    model = form.build(path)
    try:
        model.load_state_dict(safetensors.torch.load_file(weights))
    except (RuntimeError, SafetensorError) as error:
        raise ValueError(f"{str(weights)!r} does not fit the model in {str(path)!r}: restore the folder") from error
    text = isinstance(form.inputs, data.TextForm | data.LanguageForm)
    certificate = path / CERTIFICATE
    return ReleasedModel(
        model=model.to(device).eval(),
        form=form,
        certificate=json.loads(certificate.read_text(encoding="utf-8")) if certificate.is_file() else None,
        tokenizer=load_tokenizer(path / PRETRAINED_FOLDER) if text else None,
    )


def _labelled(form: data.FeatureForm, target: data.Target, file: str, labels: str) -> TensorDataset:
    """Features and encoded labels of a file."""
    features, found = load_features(Path(file), None if labels == "label" else labels)
    encoded = found.astype(np.float32) if found.ndim == 2 else target.encode(found.tolist(), Path(file).name)
    return TensorDataset(torch.from_numpy(np.array(form.checked(features))), torch.from_numpy(encoded))


def _pixels(form: data.ImageForm, image: Any) -> Any:
    if isinstance(image, (str, Path)):
        return form.pixels(Path(image).read_bytes(), Path(image).name)
    return form.pixels_of_image(image)


def _is_image(path: Path) -> bool:
    return path.suffix.lower() in IMAGE_SUFFIXES


def _parts(items: Any) -> Iterator[Any]:
    for start in range(0, len(items), BATCH_SIZE):
        yield items[start : start + BATCH_SIZE]
