"""The features that a private linear model is trained on: from synthetic images, or from a frozen encoder.

A record's features depend on that record and on public weights alone, so computing them spends no privacy.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn
from torch.utils.data import Subset

from pmlf import data, priors
from pmlf.basics.arguments import require_count
from pmlf.data.images import described
from pmlf.data.texts import Padding
from pmlf.experiments.form import ModelForm
from pmlf.experiments.linear_model import IMAGES, SENTENCES, SYNTHETIC, PriorEncoder
from pmlf.experiments.spec import RunSpec
from pmlf.experiments.splits import HOLDOUT, holdout_indices
from pmlf.experiments.tasks import declared_target, pretrained_form, text_columns
from pmlf.filters import LowPass
from pmlf.models.encoders import ImageEncoder, SentenceEncoder
from pmlf.priors import ImagePrior, PriorSpec, ScatteringSpec
from pmlf.priors.extraction import digest_of
from pmlf.probe import FeatureBlock

MODEL = "prior-linear"
_SMALL_EPSILON = 2.0  # up to here noise limits the accuracy, beyond it the number of steps does
FILTER = LowPass(a=(-0.8,), b=(0.2,), corrected=False)

Progress = Callable[[int, int], None]
Labelled = tuple[NDArray[Any], NDArray[np.int64]]


@dataclass(frozen=True, kw_only=True)
class FeatureSplits:
    """Features and labels to train on and to evaluate on, and what turns a record into features.

    Attributes:
        form: What the model takes and gives.
        kind: Where the features come from.
        encoder: From a batch of records to features.
        recipe: From epsilon to the settings of `PrivateProbe` for these features.
        features: Of the protected records.
        labels: Their classes.
        judged_on: The records to evaluate on, by split.
        prior: What synthetic features are made from.
        save_pretrained: Writes the configuration of an encoder, if there is one.
    """

    form: ModelForm
    kind: str
    encoder: nn.Module
    recipe: Callable[[float], dict[str, Any]]
    features: NDArray[Any]
    labels: NDArray[np.int64]
    judged_on: Mapping[str, Labelled]
    prior: PriorSpec | None = None
    save_pretrained: Callable[[Path, tuple[str, ...] | None], None] | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the classes."""
        return _classes(self.form.target).names


def feature_splits(
    spec: RunSpec, data_dir: Path | str | None = None, extracting: Progress | None = None
) -> FeatureSplits:
    """The features of the records that a run trains on and is evaluated on, from the cache or computed into it.

    Args:
        spec: The run.
        data_dir: Folder of datasets. None: the folder in PMLF_DATA, else the Hugging Face hub.
        extracting: Called with the number of records whose features are computed, and the number in all.

    Raises:
        ValueError: If the dataset or the encoder is refused.
    """
    prepare = {None: _synthetic, SENTENCES: _sentences, IMAGES: _images}[spec.pretrained.prior]
    return prepare(spec, data_dir, extracting)


def recipe(prior: ImagePrior, epsilon: float) -> dict[str, Any]:
    """The settings of a private linear model on the features of a prior, for `PrivateProbe(**recipe(prior, 1.0))`.

    They were chosen on held-out training records of CIFAR-10 (colour), MNIST (scattering) and Fashion-MNIST (grey
    patches). At a large epsilon more steps pay: with full batches they cost time and no privacy.

    Args:
        prior: Where the features come from.
        epsilon: The privacy budget that they are for.
    """
    blocks = tuple(
        FeatureBlock(
            start=block.columns.start,
            stop=block.columns.stop,
            weight=block.weight,
            eigenvalues=tuple(block.eigenvalues.tolist()),
        )
        for block in prior.blocks
    )
    small, colour = epsilon <= _SMALL_EPSILON, prior.spec.channels == 3
    steps, clip_norm, score_noise = 30 if small else 60, 1.0, 0.9
    if colour:
        clip_norm, score_noise = 0.2, 1.8 if small else 1.35
    elif any(isinstance(block, ScatteringSpec) for block in prior.spec.all_blocks):
        steps, clip_norm, score_noise = 120, 0.2, 1.2
    return {
        "blocks": blocks,
        "steps": steps,
        "clip_norm": clip_norm,
        "score_noise": score_noise,
        "low_pass": FILTER,
        "mean_share": 0.07,
        "moments_share": 0.04,
        "moment_clip": 6.0,
        "whitening": 1.0 if colour and not small else 0.9,
    }


def embedding_recipe(width: int, epsilon: float, *, blocks: int = 1) -> dict[str, Any]:
    """The settings of a private linear model on embeddings, chosen on held-out training records of SST-2.

    Args:
        width: The number of coordinates of an embedding.
        epsilon: The privacy budget that they are for.
        blocks: The number of blocks of equal width that the embedding consists of.
    """
    each = width // blocks
    return {
        "blocks": tuple(FeatureBlock(start=start, stop=start + each) for start in range(0, width, each)),
        "steps": 30,
        "clip_norm": 0.3,
        "score_noise": 0.9,
        "low_pass": FILTER,
        "mean_share": 0.07,
        "moments_share": 0.04,
        "moment_clip": 2.5,
        "whitening": 0.9,
    }


def _synthetic(spec: RunSpec, data_dir: Path | str | None, extracting: Progress | None) -> FeatureSplits:
    form, declared, mirrors = described(spec.dataset, None, declared_target(spec.own))
    target = _classes(declared)
    if spec.own.image_size is not None:
        form = replace(form, size=spec.own.image_size)
    images = data.load(spec.dataset, data_dir, form=form, target=target, label_column=spec.own.label_column)
    made_from = PriorSpec(image_size=form.size, channels=form.channels, mirrors=mirrors, seed=spec.seed or 0)
    prior = ImagePrior.load(made_from)

    def labelled(split: data.ImageDataset) -> Labelled:
        first = slice(0, spec.records)
        return priors.extract(prior, split.images.numpy()[first], progress=extracting), split.labels.numpy()[first]

    features, labels, judged_on = _split(spec, {"train": images.train, "test": images.test}, labelled)
    return FeatureSplits(
        form=ModelForm(model=MODEL, inputs=form, target=target, linear=True),
        kind=SYNTHETIC,
        encoder=PriorEncoder(prior, form),
        recipe=partial(recipe, prior),
        features=features,
        labels=labels,
        judged_on=judged_on,
        prior=made_from,
    )


def _images(spec: RunSpec, data_dir: Path | str | None, extracting: Progress | None) -> FeatureSplits:
    encoder = ImageEncoder.load(_encoder_of(spec))
    assert encoder.images is not None
    _, declared, _ = described(spec.dataset, None, declared_target(spec.own))
    target = _classes(declared)
    form = pretrained_form(encoder.images, spec.own.image_size, spec.model_name)
    images = data.load(spec.dataset, data_dir, form=form, target=target, label_column=spec.own.label_column)

    def labelled(split: data.ImageDataset) -> Labelled:
        first = slice(0, spec.records)
        part = data.ImageDataset(split.images[first], split.labels[first], mean=form.mean, std=form.std)
        contents = digest_of([split.images.numpy()[first], np.array([*form.mean, *form.std])])
        return priors.embed(encoder, part, data.collate, contents=contents, progress=extracting), part.labels.numpy()

    features, labels, judged_on = _split(spec, {"train": images.train, "test": images.test}, labelled)
    return FeatureSplits(
        form=ModelForm(model=Path(spec.model_name).name, inputs=form, target=target, pretrained=True, linear=True),
        kind=IMAGES,
        encoder=encoder,
        recipe=partial(embedding_recipe, features.shape[1]),
        features=features,
        labels=labels,
        judged_on=judged_on,
        save_pretrained=encoder.save,
    )


def _sentences(spec: RunSpec, data_dir: Path | str | None, extracting: Progress | None) -> FeatureSplits:
    encoder = SentenceEncoder.load(_encoder_of(spec))
    texts = data.load_text(spec.dataset, None if data_dir is None else Path(data_dir), text_columns(spec))
    target = _classes(texts.columns.target)
    longest, cut = encoder.longest, spec.pretrained.max_length is not None
    if spec.pretrained.max_length is not None:
        require_count("max_length", spec.pretrained.max_length, "it is the number of tokens to keep")
        longest = min(longest, spec.pretrained.max_length)
    form = data.TextForm(text=texts.columns.text, pair=texts.columns.pair, longest=longest, cut=cut)

    def labelled(split: str) -> Labelled:
        tokens = texts.tokenised(split, encoder.tokenizer, longest=longest, cut=cut)
        first = slice(0, spec.records)
        found = priors.embed(
            encoder,
            Subset(tokens, range(len(tokens))[first]),
            Padding(encoder.tokenizer.pad_token_id),
            contents=digest_of(tokens.arrays()),
            lengths=tokens.lengths[first],
            progress=extracting,
        )
        return found, tokens.labels.numpy()[first]

    splits = {"train": "train", **{split: split for split in texts.judged_on}}
    if len(splits) == 1 and spec.holdout is None:
        raise ValueError(f"{spec.dataset!r} has no test split: add one, or evaluate on a part of it with holdout=0.1")
    features, labels, judged_on = _split(spec, splits, labelled)
    return FeatureSplits(
        form=ModelForm(
            model=Path(spec.model_name).name,
            inputs=form,
            target=target,
            pretrained=True,
            metrics=texts.metrics,
            linear=True,
        ),
        kind=SENTENCES,
        encoder=encoder,
        recipe=partial(embedding_recipe, features.shape[1], blocks=len(encoder.pooling)),
        features=features,
        labels=labels,
        judged_on=judged_on,
        save_pretrained=encoder.save,
    )


def _encoder_of(spec: RunSpec) -> str:
    if spec.model is None or spec.model == MODEL:
        raise ValueError(
            f"prior={spec.pretrained.prior!r} needs an encoder: give `model`, a folder or a name on the hub"
        )
    return spec.model


def _classes(target: data.AnyTarget) -> data.Classes:
    if not isinstance(target, data.Classes):
        raise ValueError(f"a linear model on features takes classes, not task={target.task!r}: leave `task` out")
    return target


def _split(
    spec: RunSpec, splits: Mapping[str, Any], labelled: Callable[[Any], Labelled]
) -> tuple[NDArray[Any], NDArray[np.int64], dict[str, Labelled]]:
    """Training features, their labels and the evaluation records: published splits, or a held-out part of one."""
    features, labels = labelled(splits["train"])
    if spec.holdout is None:
        return features, labels, {name: labelled(split) for name, split in splits.items() if name != "train"}
    kept, held = holdout_indices(len(labels), spec.holdout)
    return features[kept], labels[kept], {HOLDOUT: (features[held], labels[held])}


def features_digest(features: NDArray[Any], labels: NDArray[Any], key: bytes) -> str:
    """A keyed digest of features and labels, to detect that they changed. With its key it is as private as they are.

    >>> one = np.zeros((2, 3)), np.array([0, 1])
    >>> features_digest(*one, b"key") == features_digest(*one, b"key") != features_digest(*one, b"other")
    True
    """
    found = hashlib.blake2b(key=key, digest_size=32)
    for array in (features, labels):
        found.update(repr((array.shape, array.dtype.str)).encode())
        rows = max(1, (1 << 24) // max(1, array[:1].nbytes))
        for start in range(0, len(array), rows):
            found.update(np.ascontiguousarray(array[start : start + rows]).data)
    return found.hexdigest()
