"""Texts and pairs of texts: GLUE's tasks and one's own tables, tokenised once into memory-mapped tensors."""

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
from pmlf.data.catalogue import TEXT_DATASETS
from pmlf.data.sources import Source, hub_source, own_source


@dataclass(frozen=True, kw_only=True)
class Columns:
    """Which columns of a table are what.

    The labels are named, in the order of the classes, and not collected from the records: a class that only one person
    has would show in the model's shape.
    """

    text: str
    pair: str | None = None
    label: str = "label"
    labels: tuple[str, ...]


Item = tuple[Tensor, Tensor | None, int]  # token ids (L,), token types (L,) where the model has them, label


class TokenDataset(Dataset[Item]):
    """Tokenised texts in memory, one after another; `lengths` says how many tokens each has."""

    def __init__(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        self.lengths: NDArray[np.int64] = np.asarray(arrays["lengths"])
        self._ends = np.cumsum(self.lengths)
        self._tokens = torch.from_numpy(arrays["tokens"])  # int32, all texts'
        self._types = torch.from_numpy(arrays["types"]) if "types" in arrays else None  # uint8, all texts'
        self.labels = torch.from_numpy(arrays["labels"])  # int64 (N,)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Item:
        if not -len(self) <= index < len(self):
            raise IndexError(f"record {index} of {len(self)}")
        where = slice(int(self._ends[index] - self.lengths[index]), int(self._ends[index]))
        types = None if self._types is None else self._types[where].long()
        return self._tokens[where].long(), types, int(self.labels[index])


@dataclass(frozen=True)
class Padding:
    """Items to a batch, padded to the longest of them: input_ids, attention_mask, token_type_ids, labels."""

    pad_id: int

    def __call__(self, items: Sequence[Item]) -> dict[str, Tensor]:
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
    """A dataset of texts, not yet tokenised: that takes a model's tokenizer."""

    name: str
    source: Source
    columns: Columns
    judged_on: tuple[str, ...]
    metrics: tuple[str, ...] = ("accuracy",)

    @property
    def classes(self) -> int:
        return len(self.columns.labels)

    def tokenised(self, split: str, tokenizer: Any, *, longest: int, cut: bool) -> TokenDataset:
        """A split in tokens, from the cache or into it; texts of more than `longest` tokens are cut, or refused."""

        def make(arrays: Arrays) -> None:
            columns = [self.columns.text, self.columns.label, *([self.columns.pair] if self.columns.pair else [])]
            for table in self.source.tables(split, columns):
                texts = self._texts(table, self.columns.text)
                pairs = self._texts(table, self.columns.pair) if self.columns.pair else None
                found = tokenizer(texts, pairs, truncation=cut, max_length=longest if cut else None, verbose=False)
                lengths = np.array([len(tokens) for tokens in found["input_ids"]], dtype=np.int64)
                if lengths.max(initial=0) > longest:
                    raise ValueError(
                        f"a text of {self.source.name!r} has more than the {longest} tokens that the model takes: give "
                        f"--max-length {longest} to cut texts there, or a model that takes more"
                    )
                arrays.append("lengths", lengths)
                arrays.append("tokens", np.concatenate(found["input_ids"]).astype(np.int32))
                if "token_type_ids" in found:
                    arrays.append("types", np.concatenate(found["token_type_ids"]).astype(np.uint8))
                arrays.append("labels", self._labels(table))

        vocabulary = hashlib.blake2b(tokenizer.backend_tokenizer.to_str().encode(), digest_size=16).hexdigest()
        form = (vocabulary, tuple(tokenizer.model_input_names), longest, cut)
        return TokenDataset(cached(self.source.digest(split, "tokens", self.columns, form), make))

    def _texts(self, table: Any, column: str) -> list[str]:
        values = table.column(column).to_pylist()
        if not all(isinstance(value, str) for value in values):
            raise ValueError(f"column {column!r} of {self.source.name!r} has a value that is no text: mend or drop it")
        return values

    def _labels(self, table: Any) -> NDArray[np.int64]:
        classes = {name: index for index, name in enumerate(self.columns.labels)}
        values = [str(value) for value in table.column(self.columns.label).to_pylist()]
        if not set(values) <= set(classes):  # which one it is, is private
            raise ValueError(
                f"{self.source.name!r} has a label that is none of {', '.join(classes)}: name all labels there can be, "
                f"drop the rows without one, or {self.source.advice}"
            )
        return np.array([classes[value] for value in values], dtype=np.int64)


def load_text(name: str, data_dir: str | Path | None = None, columns: Columns | None = None) -> TextData:
    """A GLUE task by name, read as `load` reads images; or one's own table by its path, with its columns.

    A table is a .csv, .tsv, .jsonl or .parquet file, or a folder of train and test files of these kinds.
    """
    if name in TEXT_DATASETS:
        spec = TEXT_DATASETS[name]
        if columns is not None:
            raise ValueError(f"the columns of {name!r} are known: give columns for a table of your own")
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
            f"unknown dataset {name!r}: choose one of {', '.join(TEXT_DATASETS)}, or give a table that exists"
        )
    if columns is None or len(columns.labels) < 2:
        raise ValueError(f"the table {name!r} needs the names of its text column and of its two or more labels")
    source = own_source(Path(name))
    judged_on = next(((split,) for split in ("test", "validation") if split in source.files), ())
    return TextData(name=Path(name).name, source=source, columns=columns, judged_on=judged_on)
