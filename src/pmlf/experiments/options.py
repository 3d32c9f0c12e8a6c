"""Options of your own data and of pretrained models, in groups. The docstrings are the command line's help."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import tyro


def shown_default(text: str, metavar: str | None = None) -> Any:
    """The help text for a default that depends on other options."""
    return tyro.conf.arg(help_behavior_hint=f"(default: {text})", metavar=metavar)


@dataclass(frozen=True, kw_only=True)
class OwnData:
    """Your own data. You declare classes, ranges and categories: nothing is computed from the private records."""

    task: Annotated[
        Literal["classification", "multilabel", "regression", "causal-lm"] | None, shown_default("classification")
    ] = None
    """What a label is: one class, several classes at once (written as `a|b` in one cell), or a number. causal-lm: there
    are no labels; a language model learns to continue texts, and is judged by perplexity."""

    labels: Annotated[tuple[str, ...] | None, shown_default("none", "LABEL LABEL [LABEL ...]")] = None
    """All possible classes, in the order of the model's outputs.
    They are not collected from the records, because the labels of the records are private."""

    label_column: Annotated[str | None, shown_default("label")] = None
    """Column of the label in your own table, or in the metadata.csv of your own images."""

    target_range: Annotated[tuple[float, float] | None, shown_default("none", "LOW HIGH")] = None
    """Regression: lowest and highest possible value of the label. Values outside are clamped."""

    image_size: Annotated[int | None, shown_default("the dataset's or the pretrained model's; 32 for your own")] = None
    """Images: turn upright, crop to the central square, and resize to this height and width."""

    text_column: Annotated[str | None, shown_default("none")] = None
    """Texts: name of the text column."""

    text_pair_column: Annotated[str | None, shown_default("none")] = None
    """Texts: name of the column with the second text, if a record is a pair of texts."""

    columns: Annotated[tuple[str, ...] | None, shown_default("none", "COLUMN=DECLARED [COLUMN=DECLARED ...]")] = None
    """Tables: the columns that the model takes, as `age=0:110` (lowest and highest value) or `sex=female,male` (all
    categories). Numbers are clamped to the range; other categories and missing values have an input of their own."""

    schema: Annotated[str | None, shown_default("none", "FILE.toml")] = None
    """Tables: the same in a file, below a line [columns]: `age = [0, 110]`, `sex = ["female", "male"]`."""

    unit_column: Annotated[str | None, shown_default("none, epsilon is for one record")] = None
    """Column that says whose each record is, such as patient_id, in your table or in the metadata.csv of your images.
    Images in folders of patients, as in train/CLASS/PATIENT/image.png, need no column: give the word patient.
    Epsilon is then for adding or removing one patient with all records, and --batch-size, --epochs and --delta count
    patients."""

    max_records_per_unit: Annotated[int | None, shown_default("32")] = None
    """With --unit-column: largest number of records that one unit brings to a step; of more, some are chosen at random.
    At most --max-physical-batch-size."""


@dataclass(frozen=True, kw_only=True)
class PretrainedOptions:
    """Models of the package transformers, for texts and images."""

    lora_rank: Annotated[int | None, shown_default("none, train all weights; 8 for causal-lm")] = None
    """LoRA: train updates of this rank for every linear layer, and the new head. causal-lm: 0 trains all weights."""

    head_only: bool = False
    """Train the new head alone and freeze the pretrained weights."""

    prior: Annotated[Literal["sentence-embedding", "image-embedding"] | None, shown_default("none")] = None
    """Freeze --model, compute its embedding of every record once, and train a private linear model on the embeddings:
    sentence-embedding (the mean over a text's tokens) or image-embedding. Often the best for a small epsilon."""

    max_length: Annotated[int | None, shown_default("none, refuse texts that are too long for the model")] = None
    """Truncate texts to this number of tokens."""
