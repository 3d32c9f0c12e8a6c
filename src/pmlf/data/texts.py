"""Texts and pairs of texts: GLUE tasks and your own tables, tokenised once into memory-mapped tensors."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from pmlf.data.cache import Arrays, cached
from pmlf.data.catalogue import TEXT_DATASETS, suggestion
from pmlf.data.sources import Source, hub_source, own_source


@dataclass(frozen=True, kw_only=True)
class Columns:
    """The columns of a table of texts, and its possible labels.

    You name the labels; they are not collected from the records, because a class with a single record would otherwise
    show in the shape of the model.

    Args:
        text: Column of the texts.
        pair: Column of the second texts, if a record is a pair.
        label: Column of the labels.
        labels: All possible labels, in class order.
    """

    text: str
    pair: str | None = None
    label: str = "label"
    labels: tuple[str, ...]


TextItem = tuple[Tensor, Tensor | None, int]  # token ids (L,), token types (L,) if the model has them, label


class TokenDataset(Dataset[TextItem]):
    """Tokenised texts in memory. `lengths` holds the number of tokens of each."""

    def __init__(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        self.lengths: NDArray[np.int64] = np.asarray(arrays["lengths"])
        self._ends = np.cumsum(self.lengths)
        self._tokens = torch.from_numpy(arrays["tokens"])  # int32, of all texts
        self._types = torch.from_numpy(arrays["types"]) if "types" in arrays else None  # uint8, of all texts
        self.labels = torch.from_numpy(arrays["labels"])  # int64 (N,)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> TextItem:
        if not -len(self) <= index < len(self):
            raise IndexError(f"index {index} is out of range for {len(self)} records")
        where = slice(int(self._ends[index] - self.lengths[index]), int(self._ends[index]))
        types = None if self._types is None else self._types[where].long()
        return self._tokens[where].long(), types, int(self.labels[index])


@dataclass(frozen=True)
class Padding:
    """Makes a batch of items, padded to the longest of them: input_ids, attention_mask, token_type_ids, labels."""

    pad_id: int

    def __call__(self, items: Sequence[TextItem]) -> dict[str, Tensor]:
        tokens = [item[0] for item in items]
        types = [item[1] for item in items if item[1] is not None]
        lengths = torch.tensor([len(each) for each in tokens])
        padded = pad_sequence(tokens, batch_first=True, padding_value=self.pad_id)  # (N, L)
        batch = {
            "input_ids": padded,
            "attention_mask": (torch.arange(padded.shape[1]) < lengths[:, None]).long(),
            "labels": torch.tensor([item[2] for item in items]),
        }
        return batch | ({"token_type_ids": pad_sequence(types, batch_first=True)} if types else {})


@dataclass(frozen=True, kw_only=True)
class TextData:
    """A dataset of texts before tokenisation, which depends on the model."""

    name: str
    source: Source
    columns: Columns
    judged_on: tuple[str, ...]
    metrics: tuple[str, ...] = ("accuracy",)
    own: bool = False  # your own table, whose columns you name

    @property
    def classes(self) -> int:
        """Number of classes."""
        return len(self.columns.labels)

    def tokenised(self, split: str, tokenizer: Any, *, longest: int, cut: bool) -> TokenDataset:
        """Tokenise a split, or read the result from the cache.

        Args:
            split: Name of the split.
            tokenizer: A tokenizer of `transformers`.
            longest: Largest number of tokens of a text.
            cut: Truncate longer texts. False: raise ValueError.
        """

        def make(arrays: Arrays) -> None:
            for table in self.source.tables(split, self._required_columns()):
                texts = self._texts(table, self.columns.text)
                pairs = self._texts(table, self.columns.pair) if self.columns.pair else None
                found = tokenizer(texts, pairs, truncation=cut, max_length=longest if cut else None, verbose=False)
                lengths = np.array([len(tokens) for tokens in found["input_ids"]], dtype=np.int64)
                if lengths.max(initial=0) > longest:
                    raise ValueError(
                        f"a text of {self.source.name!r} has more than {longest} tokens, the limit of the model: give "
                        f"max_length={longest} to truncate texts, or a model with a higher limit"
                    )
                arrays.append("lengths", lengths)
                arrays.append("tokens", np.concatenate(found["input_ids"]).astype(np.int32))
                if "token_type_ids" in found:
                    arrays.append("types", np.concatenate(found["token_type_ids"]).astype(np.uint8))
                arrays.append("labels", self._labels(table))

        vocabulary = hashlib.blake2b(tokenizer.backend_tokenizer.to_str().encode(), digest_size=16).hexdigest()
        form = (vocabulary, tuple(tokenizer.model_input_names), longest, cut)
        return TokenDataset(cached(self.source.digest(split, "tokens", self.columns, form), make))

    def _required_columns(self) -> dict[str, str | None]:
        """The columns to read, each with the option that names it."""
        named = {
            "text_column": self.columns.text,
            "text_pair_column": self.columns.pair,
            "label_column": self.columns.label,
        }
        return {column: option if self.own else None for option, column in named.items() if column is not None}

    def _texts(self, table: Any, column: str) -> list[str]:
        values = table.column(column).to_pylist()
        if not all(isinstance(value, str) for value in values):
            raise ValueError(
                f"column {column!r} of {self.source.name!r} has a value that is not a text: remove its row, or give "
                "another column"
            )
        return values

    def _labels(self, table: Any) -> NDArray[np.int64]:
        classes = {name: index for index, name in enumerate(self.columns.labels)}
        values = [str(value) for value in table.column(self.columns.label).to_pylist()]
        if not set(values) <= set(classes):  # the message does not show the label, which is private
            raise ValueError(
                f"{self.source.name!r} has a label that is not one of {', '.join(classes)}: "
                + ("give all possible `labels`, or remove the rows without one" if self.own else self.source.advice)
            )
        return np.array([classes[value] for value in values], dtype=np.int64)


def load_text(name: str, data_dir: str | Path | None = None, columns: Columns | None = None) -> TextData:
    """Load a text dataset.

    Args:
        name: One of `TEXT_DATASETS`; or the path of your own table: a .csv, .tsv, .jsonl or .parquet file, or a folder
            with train and test files of these kinds.
        data_dir: Folder with the layout of the Hugging Face hub. None: the folder in PMLF_DATA, else the hub.
        columns: The columns of your own table.

    Raises:
        ValueError: If the dataset is unknown, or its columns are missing or superfluous.
    """
    if name in TEXT_DATASETS:
        spec = TEXT_DATASETS[name]
        if columns is not None:
            raise ValueError(f"the columns of {name!r} are fixed: give columns only for your own table")
        return TextData(
            name=name,
            source=hub_source(spec.hub_id, data_dir, spec.config),
            columns=Columns(
                text=spec.text_column,
                pair=spec.pair_column,
                label=spec.label_column,
                labels=tuple(str(index) for index in range(spec.classes)),
            ),
            judged_on=spec.judged_on,
            metrics=spec.metrics,
        )
    if not Path(name).exists():
        raise ValueError(
            f"unknown dataset {name!r}: give one of {', '.join(TEXT_DATASETS)}, or the path of a table."
            f"{suggestion(name)}"
        )
    if columns is None or len(columns.labels) < 2:
        raise ValueError(f"the table {name!r} needs text_column and two or more `labels`: give them")
    source = own_source(Path(name))
    judged_on = next(((split,) for split in ("test", "validation") if split in source.files), ())
    return TextData(name=Path(name).name, source=source, columns=columns, judged_on=judged_on, own=True)
