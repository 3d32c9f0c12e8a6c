"""Texts that a language model learns to continue: tokens, padding, and tables with a column of them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from pmlf.data.cache import Arrays, cached
from pmlf.data.sources import READING, Source, own_source
from pmlf.data.targets import IGNORED
from pmlf.data.texts import TextItem, TokenDataset, texts_of


@dataclass(frozen=True, kw_only=True)
class LanguageForm:
    """The texts that a language model takes.

    Args:
        text: Column of the texts in a table.
        longest: Largest number of tokens of a text, with the one that ends it.
        cut: Truncate longer texts. False: refuse them.
    """

    text: str
    longest: int
    cut: bool

    def tokens(self, tokenizer: Any, texts: Sequence[str], source: str) -> list[list[int]]:
        """Tokenise texts, and end each with the tokenizer's end token if it has one. `source` names them in errors.

        Raises:
            ValueError: If a text is too long.
        """
        end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        found = [
            list(tokens) if end and tokens[-1:] == end else [*tokens, *end]
            for tokens in tokenizer(list(texts), truncation=False, verbose=False)["input_ids"]
        ]
        if not self.cut and max(map(len, found), default=0) > self.longest:
            raise ValueError(
                f"a text of {source!r} has more than {self.longest} tokens, the limit of the model: give "
                f"max_length={self.longest} to truncate texts, or a model with a higher limit"
            )
        # an empty text predicts nothing: one token of padding has no next one either
        return [tokens[: self.longest] or [padding_id(tokenizer)] for tokens in found]


@dataclass(frozen=True)
class CausalPadding:
    """Makes a batch of items, padded on the right to the longest of them: input_ids, attention_mask, labels."""

    pad_id: int

    def __call__(self, items: Sequence[TextItem]) -> dict[str, Tensor]:
        tokens = [item[0] for item in items]
        lengths = torch.tensor([len(each) for each in tokens])
        padded = pad_sequence(tokens, batch_first=True, padding_value=self.pad_id)  # (N, L)
        there = torch.arange(padded.shape[1]) < lengths[:, None]
        return {
            "input_ids": padded,
            "attention_mask": there.long(),
            "labels": padded.masked_fill(~there, IGNORED),
        }


def padding_id(tokenizer: Any) -> int:
    """A token to pad with. Any will do, since padding is masked and has no label."""
    found = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    return 0 if found is None else int(found)


def load_language(path: str, split: str, tokenizer: Any, form: LanguageForm) -> TokenDataset:
    """The tokens of your own texts, from the cache if they were tokenised before.

    Args:
        path: A .csv, .tsv, .jsonl or .parquet file, or a folder with train and test files of these kinds.
        split: The split. A single file is this split.
        tokenizer: A tokenizer of `transformers`.
        form: The column and the length of the texts.

    Raises:
        ValueError: If the file or its column is missing, or a text is too long.
    """
    source = own_source(Path(path), split)

    def make(arrays: Arrays) -> None:
        for table in source.tables(split, {form.text: "text_column"}):
            tokens = form.tokens(tokenizer, texts_of(table, form.text, source.name), source.name)
            arrays.append("lengths", np.array([len(each) for each in tokens], dtype=np.int64))
            arrays.append("tokens", np.concatenate(tokens).astype(np.int32))
            arrays.append("labels", np.zeros(len(tokens), dtype=np.int64))  # the texts are their own labels

    return TokenDataset(cached(_key(source, split, tokenizer, form), make))


def judged_splits(path: str) -> tuple[str, ...]:
    """The split to evaluate on, if there is one."""
    files = own_source(Path(path)).files
    return next(((split,) for split in ("test", "validation") if split in files), ())


def _key(source: Source, split: str, tokenizer: Any, form: LanguageForm) -> str:
    vocabulary = hashlib.blake2b(tokenizer.backend_tokenizer.to_str().encode(), digest_size=16).hexdigest()
    return source.digest(split, "language", READING, vocabulary, tokenizer.eos_token_id, padding_id(tokenizer), form)
