"""A task: the dataset and the model that a spec names, with one interface for images, texts and tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.data import Dataset, default_collate

from pmlf import data, models
from pmlf.basics.arguments import require_count
from pmlf.data.images import described
from pmlf.data.language import judged_splits
from pmlf.data.sources import own_source
from pmlf.data.texts import Padding
from pmlf.engine.augmentation import Augmentation, shifted_crops
from pmlf.experiments import splits
from pmlf.experiments.form import PRETRAINED_FOLDER, ModelForm
from pmlf.experiments.options import OwnData
from pmlf.experiments.scoring import scored
from pmlf.experiments.spec import RunSpec
from pmlf.experiments.splits import by_length, length, lengths
from pmlf.mechanism.units import MOST_RECORDS, Units, require_unit_arguments
from pmlf.models.pretrained import Tuning
from pmlf.models.text import load_classifier, load_language_model
from pmlf.models.vision import ImageInput, load_image_classifier
from pmlf.run.evaluation import AnyScore

SHIFTED_PART = 8  # augmentation shifts images by up to 1/8 of their side


@dataclass(frozen=True, kw_only=True)
class Task:
    """A model, its form, its training records and its evaluation records."""

    model: nn.Module
    form: ModelForm
    train: Dataset[Any]
    judged_on: Mapping[str, Dataset[Any]]  # by split, the main split first
    collate_fn: Callable[[list[Any]], Any] | None = None
    augmentation: Augmentation | None = None
    lengths: NDArray[np.int64] | None = None  # of the training records, if they differ
    units: Units | None = None  # that the training records belong to, if those are protected
    save_pretrained: Callable[[Path, tuple[str, ...] | None], None] | None = None  # configuration and tokenizer

    @property
    def records(self) -> int:
        """The number of training records."""
        return length(self.train)

    @property
    def population(self) -> int:
        """The number n of what is protected: training records, or units."""
        return self.records if self.units is None else self.units.count

    def losses(self, model: nn.Module, batch: Any) -> Tensor:
        """The loss of each sample."""
        return self.form.target.losses(self.form.outputs(model, batch), self.form.truth(batch))

    def unprotected(self, count: int) -> Any:
        """A batch of the first evaluation records, which epsilon does not protect."""
        records = next(iter(self.judged_on.values()))
        require_count("examples", count, "it is a number of evaluation records", least=2, most=length(records))
        return (self.collate_fn or default_collate)([records[index] for index in range(count)])

    def scores(self, model: nn.Module) -> dict[str, AnyScore]:
        """Evaluate a model on each evaluation split."""
        return {split: scored(self.form, model, records, self.collate_fn) for split, records in self.judged_on.items()}

    def write_form(self, folder: Path) -> None:
        """Write what it takes to use the model elsewhere: its form, and the configuration of a pretrained model."""
        if self.save_pretrained is not None:
            names = self.form.target.names if isinstance(self.form.target, data.Classes) else None
            self.save_pretrained(folder / PRETRAINED_FOLDER, names)
        self.form.write(folder)


def prepare(spec: RunSpec, data_dir: Path | None = None) -> Task:
    """Load the dataset of a spec, split it if it has a `holdout`, and build its model from the seed.

    Args:
        spec: The run.
        data_dir: Folder of datasets. None: the folder in PMLF_DATA, else the Hugging Face hub.

    Raises:
        ValueError: If the dataset or the model is unknown or cannot be read, or an option does not fit it.
    """
    if data_dir is not None and not data_dir.is_dir():
        raise ValueError(f"data_dir={str(data_dir)!r} does not exist: give a folder of datasets, or leave it out")
    kind = _KINDS[spec.kind]
    _refuse_others(kind, spec)
    if spec.kind == "text" and spec.model in models.NAMES:
        raise ValueError(
            f"model={spec.model!r} is for images, and these are texts: leave it out, or give the name of a text model "
            "on the Hugging Face hub or its folder"
        )
    return _of_units(kind.prepare(spec, data_dir), spec)


def _of_units(task: Task, spec: RunSpec) -> Task:
    """The task with the units of its training records, if the spec names their column."""
    ids, most = splits.unit_ids(spec), spec.own.max_records_per_unit
    if ids is None:
        _refuse_given("`unit_column`", {"max_records_per_unit": most})
        return task
    assert spec.own.unit_column is not None
    most = MOST_RECORDS if most is None else most
    require_unit_arguments(most, spec.own.unit_column)
    own = ids[splits.indices(task.train)]
    return replace(task, units=Units(own, most=most, name=spec.own.unit_column))


@dataclass(frozen=True, kw_only=True)
class _Kind:
    """A kind of records: what it is called, which of the options for only some kinds it takes, how it is prepared."""

    name: str
    takes: frozenset[str]
    prepare: Callable[[RunSpec, Path | None], Task]


def _refuse_others(kind: _Kind, spec: RunSpec) -> None:
    """Raise ValueError for an option that is only for other kinds of records."""
    given = {**vars(spec.own), **vars(spec.pretrained)}
    given |= {"augment": spec.augment, "augment_per_point": spec.augment_per_point}
    for name, value in given.items():
        others = [other.name for other in _KINDS.values() if name in other.takes]
        if value and others and name not in kind.takes:
            raise ValueError(f"`{name}` is only for {' and '.join(others)}: leave it out")


def declared_target(own: OwnData) -> data.Target | None:
    """What your own labels are, as declared; None if nothing is."""
    task = own.task or "classification"
    if task == "regression":
        if own.target_range is None:
            raise ValueError("task='regression' needs target_range: give the lowest and the highest possible value")
        _refuse_given("classification", {"labels": own.labels})
        return data.ValueRange(low=own.target_range[0], high=own.target_range[1])
    _refuse_given("task='regression'", {"target_range": own.target_range})
    if own.labels is None and task == "classification":
        return None
    if own.labels is None:
        raise ValueError("task='multilabel' needs `labels`: give all possible labels")
    return data.Classes(names=own.labels) if task == "classification" else data.LabelSet(names=own.labels)


def _tuning(spec: RunSpec) -> Tuning:
    return Tuning(lora_rank=spec.pretrained.lora_rank, head_only=spec.pretrained.head_only)


# --- images


def _image_task(spec: RunSpec, data_dir: Path | None) -> Task:
    given, size = declared_target(spec.own), spec.own.image_size
    form, target, _ = described(spec.dataset, None, given)
    if size is not None:
        form = replace(form, size=size)
    pretrained = None
    if spec.model_name in models.NAMES or not ("/" in spec.model_name or Path(spec.model_name).is_dir()):
        _refuse_given(
            "pretrained models", {"lora_rank": spec.pretrained.lora_rank, "head_only": spec.pretrained.head_only}
        )
        model = models.build(
            spec.model_name, in_channels=form.channels, image_size=form.size, classes=target.width, seed=spec.seed
        )
    else:
        pretrained = load_image_classifier(spec.model_name, classes=target.width, seed=spec.seed, tuning=_tuning(spec))
        model, form = pretrained.model, pretrained_form(pretrained.images, size, spec.model_name)
    loaded = _load_images(spec.dataset, data_dir, form, target, spec.own.label_column)
    train, judged_on = _split(spec, loaded.train, {"test": loaded.test})
    return Task(
        model=model,
        form=ModelForm(
            model=Path(spec.model_name).name,
            inputs=form,
            target=target,
            tuning=_tuning(spec),
            pretrained=pretrained is not None,
        ),
        train=train,
        judged_on=judged_on,
        collate_fn=data.collate,
        augmentation=_augmentation(spec, loaded),
        save_pretrained=None if pretrained is None else pretrained.model.save,
    )


def pretrained_form(model: ImageInput, size: int | None, name: str) -> data.ImageForm:
    """The form of the images that a pretrained model takes, at another size if it takes any."""
    if size is not None and model.fixed_size and size != model.size:
        raise ValueError(f"image_size={size} does not fit {name!r}, which takes {model.size}: leave `image_size` out")
    return data.ImageForm(channels=model.channels, size=size or model.size, mean=model.mean, std=model.std)


def _augmentation(spec: RunSpec, loaded: data.ImageData) -> Augmentation | None:
    if not (spec.augment or spec.augment_per_point):
        return None
    padding = max(1, loaded.image_size // SHIFTED_PART)
    return shifted_crops(padding, flip=loaded.mirrors, per_point=spec.augment_per_point)


# --- texts


def _text_task(spec: RunSpec, data_dir: Path | None) -> Task:
    if spec.model_name in (*models.NAMES, *models.TABLE_NAMES):
        raise ValueError(
            f"model={spec.model_name!r} is not for texts: give the name of a model on the Hugging Face hub, or a folder"
        )
    loaded = data.load_text(spec.dataset, data_dir, text_columns(spec))
    text_model = load_classifier(
        spec.model_name,
        classes=loaded.classes,
        seed=spec.seed,
        lora_rank=spec.pretrained.lora_rank,
        head_only=spec.pretrained.head_only,
    )
    longest, cut = text_model.longest, spec.pretrained.max_length is not None
    if spec.pretrained.max_length is not None:
        require_count("max_length", spec.pretrained.max_length, "it is the number of tokens to keep")
        longest = min(longest, spec.pretrained.max_length)

    def tokenised(split: str) -> data.TokenDataset:
        return loaded.tokenised(split, text_model.tokenizer, longest=longest, cut=cut)

    train, judged_on = _split(spec, tokenised("train"), {split: tokenised(split) for split in loaded.judged_on})
    _refuse_unjudged(spec, judged_on)
    columns = loaded.columns
    return Task(
        model=text_model.model,
        form=ModelForm(
            model=Path(spec.model_name).name,
            inputs=data.TextForm(text=columns.text, pair=columns.pair, longest=longest, cut=cut),
            target=columns.target,
            tuning=_tuning(spec),
            pretrained=True,
            metrics=loaded.metrics,
        ),
        train=train,
        judged_on={split: by_length(records) for split, records in judged_on.items()},
        collate_fn=Padding(text_model.pad_id),
        lengths=lengths(train),
        save_pretrained=text_model.save,
    )


def text_columns(spec: RunSpec) -> data.Columns | None:
    """The columns of your own table of texts; None for a dataset of the catalogue."""
    own = spec.own
    if own.text_column is None:
        given = {name: getattr(own, name) for name in ("text_pair_column", "label_column", "labels", "task")}
        _refuse_given("your own tables, with `text_column`", given)
        return None
    target = declared_target(own)
    if target is None:
        raise ValueError("text_column needs `labels`: give all possible labels, in class order")
    return data.Columns(
        text=own.text_column, pair=own.text_pair_column, label=own.label_column or "label", target=target
    )


# --- texts to continue

DEFAULT_LORA_RANK = 8
DEFAULT_HOLDOUT = 0.1


def _language_task(spec: RunSpec, data_dir: Path | None) -> Task:
    own, given = spec.own, spec.pretrained
    if own.text_column is None:
        raise ValueError("task='causal-lm' needs `text_column`: give the column of the texts in your table")
    _refuse_given(
        "tasks with labels", {name: getattr(own, name) for name in ("labels", "label_column", "target_range")}
    )
    rank = DEFAULT_LORA_RANK if given.lora_rank is None else given.lora_rank
    tuning = Tuning(lora_rank=rank or None)
    loaded = load_language_model(spec.model_name, seed=spec.seed, tuning=tuning)
    longest = loaded.longest
    if given.max_length is not None:
        require_count("max_length", given.max_length, "it is the number of tokens to keep", least=2)
        longest = min(longest, given.max_length)
    form = data.LanguageForm(text=own.text_column, longest=longest, cut=given.max_length is not None)

    def tokens(name: str) -> data.TokenDataset:
        return data.load_language(spec.dataset, name, loaded.tokenizer, form)

    judged = {name: tokens(name) for name in judged_splits(spec.dataset)}
    train, judged_on = _split(spec, tokens("train"), judged, None if judged else DEFAULT_HOLDOUT)
    return Task(
        model=loaded.model,
        form=ModelForm(
            model=Path(spec.model_name).name,
            inputs=form,
            target=data.NextToken(),
            tuning=tuning,
            pretrained=True,
            metrics=("perplexity",),
        ),
        train=train,
        judged_on={name: by_length(records) for name, records in judged_on.items()},
        collate_fn=data.CausalPadding(loaded.pad_id),
        lengths=lengths(train),
        save_pretrained=loaded.save,
    )


# --- tables


def _table_task(spec: RunSpec, data_dir: Path | None) -> Task:
    schema, target, label = _schema(spec.own), declared_target(spec.own), spec.own.label_column or "label"
    if target is None:
        raise ValueError("a table needs `labels`, or task='regression' with target_range: give all possible labels")
    if label in schema.names:
        raise ValueError(f"label_column={label!r} is also one of the declared `columns`: declare it once, as the label")
    model = models.build_for_table(spec.model_name, features=len(schema.features), outputs=target.width, seed=spec.seed)

    def loaded(split: str) -> data.TableDataset:
        return data.load_table(spec.dataset, split, schema=schema, target=target, label_column=label)

    there = own_source(Path(spec.dataset)).files
    judged = next((split for split in ("test", "validation") if split in there), None)
    train, judged_on = _split(spec, loaded("train"), {} if judged is None else {judged: loaded(judged)})
    _refuse_unjudged(spec, judged_on)
    form = ModelForm(model=spec.model_name, inputs=schema, target=target)
    return Task(model=model, form=form, train=train, judged_on=judged_on)


def _schema(own: OwnData) -> data.Schema:
    if own.columns is not None and own.schema is not None:
        raise ValueError("`columns` and `schema` both declare the columns: give one of them")
    return data.Schema.read(Path(own.schema)) if own.schema is not None else data.Schema.parsed(own.columns or ())


_PRETRAINED = frozenset({"lora_rank", "head_only"})
_KINDS = {
    "image": _Kind(
        name="images",
        takes=frozenset({"image_size", "augment", "augment_per_point"}) | _PRETRAINED,
        prepare=_image_task,
    ),
    "text": _Kind(
        name="texts",
        takes=frozenset({"text_column", "text_pair_column", "max_length"}) | _PRETRAINED,
        prepare=_text_task,
    ),
    "language": _Kind(
        name="task='causal-lm'",
        takes=frozenset({"text_column", "max_length", "lora_rank"}),
        prepare=_language_task,
    ),
    "table": _Kind(name="tables", takes=frozenset({"columns", "schema"}), prepare=_table_task),
}


def _split(
    spec: RunSpec, train: Dataset[Any], judged_on: Mapping[str, Dataset[Any]], holdout: float | None = None
) -> tuple[Dataset[Any], Mapping[str, Dataset[Any]]]:
    """Training and evaluation records. `holdout` is what to hold out if the spec does not say."""
    held_out = holdout if spec.holdout is None else spec.holdout
    units = splits.unit_ids(spec) if spec.part is not None or held_out is not None else None
    train = splits.part(splits.first(spec.records, train), spec.part, units)
    return splits.split(train, judged_on, most=spec.records, holdout=held_out, units=units)


def held_out(spec: RunSpec, records: Dataset[Any]) -> Dataset[Any]:
    """The records that a run on a single file held out of it."""
    _, judged_on = _split(spec, records, {}, DEFAULT_HOLDOUT if spec.kind == "language" else None)
    return judged_on[splits.HOLDOUT]


def _refuse_unjudged(spec: RunSpec, judged_on: Mapping[str, Dataset[Any]]) -> None:
    if not judged_on:
        raise ValueError(f"{spec.dataset!r} has no test split: add one, or evaluate on a part of it with holdout=0.1")


def _refuse_given(kind: str, options: Mapping[str, Any]) -> None:
    for name, value in options.items():
        if value:
            raise ValueError(f"`{name}` is only for {kind}: leave it out")


@lru_cache(maxsize=1)
def _load_images(
    dataset: str, data_dir: Path | None, form: data.ImageForm, target: data.Target, label_column: str | None
) -> data.ImageData:
    """Load a dataset, cached for the next method of a comparison."""
    return data.load(dataset, data_dir, form=form, target=target, label_column=label_column)
