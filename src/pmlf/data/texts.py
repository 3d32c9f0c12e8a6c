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
from pmlf.data.sources import READING, Source, hub_source, own_source
from pmlf.data.targets import Target


@dataclass(frozen=True, kw_only=True)
class Columns:
    """The columns of a table of texts, and what its labels can be.

    Args:
        text: Column of the texts.
        pair: Column of the second texts, if a record is a pair.
        label: Column of the labels.
        target: What the labels mean, with all possible ones. They are declared, not collected from the records.
    """

    text: str
    pair: str | None = None
    label: str = "label"
    target: Target


@dataclass(frozen=True, kw_only=True)
class TextForm:
    """The texts that a model takes.

    Args:
        text: Column of the texts in a table.
        pair: Column of the second texts, if a record is a pair.
        longest: Largest number of tokens of a text.
        cut: Truncate longer texts. False: refuse them.
    """

    text: str
    pair: str | None = None
    longest: int
    cut: bool

    def tokens(self, tokenizer: Any, texts: Sequence[str], pairs: Sequence[str] | None, source: str) -> TokenLists:
        """Tokenise texts. `source` names them in errors.

        Raises:
            ValueError: If a text is too long.
        """
        limit = self.longest if self.cut else None
        found = tokenizer(list(texts), pairs and list(pairs), truncation=self.cut, max_length=limit, verbose=False)
        if max(map(len, found["input_ids"]), default=0) > self.longest:
            raise ValueError(
                f"a text of {source!r} has more than {self.longest} tokens, the limit of the model: give "
                f"max_length={self.longest} to truncate texts, or a model with a higher limit"
            )
        return found["input_ids"], found.get("token_type_ids")


TokenLists = tuple[list[list[int]], list[list[int]] | None]  # token ids of each text, and token types if there are any
TextItem = tuple[Tensor, Tensor | None, Tensor]  # token ids (L,), token types (L,) if the model has them, label


class TokenDataset(Dataset[TextItem]):
    """Tokenised texts in memory. `lengths` holds the number of tokens of each."""

    def __init__(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        self.lengths: NDArray[np.int64] = np.asarray(arrays["lengths"])
        self._ends = np.cumsum(self.lengths)
        self._tokens = torch.from_numpy(arrays["tokens"])  # int32, of all texts
        self._types = torch.from_numpy(arrays["types"]) if "types" in arrays else None  # uint8, of all texts
        self.labels = torch.from_numpy(arrays["labels"])  # int64 (N,), or float32 (N, ...)

    def arrays(self) -> list[NDArray[Any]]:
        """Lengths and tokens of all texts, and token types if there are any: all but the labels."""
        types = [] if self._types is None else [self._types.numpy()]
        return [self.lengths, self._tokens.numpy(), *types]

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> TextItem:
        if not -len(self) <= index < len(self):
            raise IndexError(f"index {index} is out of range for {len(self)} records")
        where = slice(int(self._ends[index] - self.lengths[index]), int(self._ends[index]))
        types = None if self._types is None else self._types[where].long()
        return self._tokens[where].long(), types, self.labels[index]


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
            "labels": torch.stack([item[2] for item in items]),
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
        """The number of a model's outputs."""
        return self.columns.target.width

    def tokenised(self, split: str, tokenizer: Any, *, longest: int, cut: bool) -> TokenDataset:
        """Tokenise a split, or read the result from the cache.

        Args:
            split: Name of the split.
            tokenizer: A tokenizer of `transformers`.
            longest: Largest number of tokens of a text.
            cut: Truncate longer texts. False: raise ValueError.
        """

        form = TextForm(text=self.columns.text, pair=self.columns.pair, longest=longest, cut=cut)

        def make(arrays: Arrays) -> None:
            for table in self.source.tables(split, self._required_columns()):
                texts = texts_of(table, form.text, self.source.name)
                pairs = texts_of(table, form.pair, self.source.name) if form.pair else None
                tokens, types = form.tokens(tokenizer, texts, pairs, self.source.name)
                arrays.append("lengths", np.array([len(each) for each in tokens], dtype=np.int64))
                arrays.append("tokens", np.concatenate(tokens).astype(np.int32))
                if types is not None:
                    arrays.append("types", np.concatenate(types).astype(np.uint8))
                labels = table[self.columns.label]
                arrays.append("labels", self.columns.target.encode(labels, self.source.name, self.source.label_advice))

        vocabulary = hashlib.blake2b(tokenizer.backend_tokenizer.to_str().encode(), digest_size=16).hexdigest()
        key = (vocabulary, tuple(tokenizer.model_input_names), form)
        return TokenDataset(cached(self.source.digest(split, "tokens", READING, self.columns, key), make))

    def _required_columns(self) -> dict[str, str | None]:
        """The columns to read, each with the option that names it."""
        named = {
            "text_column": self.columns.text,
            "text_pair_column": self.columns.pair,
            "label_column": self.columns.label,
        }
        return {column: option if self.own else None for option, column in named.items() if column is not None}


def texts_of(table: Mapping[str, list[Any]], column: str, source: str) -> list[str]:
    """A column of texts. Raises ValueError if a value is not a text."""
    values: list[str] = table[column]
    if not all(isinstance(value, str) for value in values):
        raise ValueError(
            f"column {column!r} of {source!r} has a value that is not a text: remove its row, or give another column"
        )
    return values


def load_text(
    name: str, data_dir: str | Path | None = None, columns: Columns | None = None, *, split: str = "train"
) -> TextData:
    """Load a text dataset.

    Args:
        name: One of `TEXT_DATASETS`; or the path of your own table: a .csv, .tsv, .jsonl or .parquet file, or a folder
            with train and test files of these kinds.
        data_dir: Folder with the layout of the Hugging Face hub. None: the folder in PMLF_DATA, else the hub.
        columns: The columns of your own table.
        split: The split that your own table must have. A single file is this split.

    Raises:
        ValueError: If the dataset is unknown, or its columns are missing or superfluous.
    """
    if name in TEXT_DATASETS:
        spec = TEXT_DATASETS[name]
        found = Columns(text=spec.text_column, pair=spec.pair_column, label=spec.label_column, target=spec.target)
        if columns is not None and columns != found:
            raise ValueError(f"the columns of {name!r} are fixed: give columns only for your own table")
        return TextData(
            name=name,
            source=hub_source(spec.hub_id, data_dir, spec.config),
            columns=found,
            judged_on=spec.judged_on,
            metrics=spec.metrics,
        )
    if not Path(name).exists():
        raise ValueError(
            f"dataset {name!r} does not exist: give one of {', '.join(TEXT_DATASETS)}, or the path of a table."
            f"{suggestion(name)}"
        )
    if columns is None:
        raise ValueError(f"the table {name!r} needs text_column and two or more `labels`: give them")
    source = own_source(Path(name), split)
    judged_on = next(((split,) for split in ("test", "validation") if split in source.files), ())
    return TextData(name=Path(name).name, source=source, columns=columns, judged_on=judged_on, own=True)
