"""Small files of the hub's schemas, tables of one's own, and a tiny text model with its tokenizer, made on the spot."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from PIL import Image

from pmlf import data
from pmlf.data.catalogue import TextSpec

WORDS = (
    "a",
    "good",
    "bad",
    "film",
    "story",
    "plot",
    "very",
    "never",
    "dull",
    "bright",
    "cast",
    "what",
    "who",
    "is",
    "it",
)


def write_split(
    folder: Path,
    split: str,
    images: NDArray[np.uint8],
    labels: list[int],
    *,
    columns: tuple[str, str],
    encoding: str,
) -> None:
    """A parquet file of the hub's schema: encoded images in a struct of bytes and path, integer labels."""
    encoded = []
    for image in images:
        buffer = io.BytesIO()
        Image.fromarray(image).save(buffer, encoding, lossless=True)
        encoded.append({"bytes": buffer.getvalue(), "path": None})
    image_type = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    table = pa.table({columns[0]: pa.array(encoded, image_type), columns[1]: pa.array(labels, pa.int64())})
    folder.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, folder / f"{split}-00000-of-00001.parquet")


def write_images(root: Path, name: str, *, labels: list[int], size: int | None = None) -> NDArray[np.uint8]:
    """A small random dataset in the hub's layout, equal in both splits; returns its images (N, C, H, W)."""
    spec = data.IMAGE_DATASETS[name]
    side = size or spec.image_size
    shape = (len(labels), side, side) if spec.in_channels == 1 else (len(labels), side, side, 3)
    images = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    for split in data.SPLITS:
        write_split(
            root / spec.hub_id / "any_config",
            split,
            images,
            labels,
            columns=(spec.image_column, spec.label_column),
            encoding="PNG" if spec.in_channels == 1 else "WEBP",
        )
    return images.reshape(len(labels), side, side, spec.in_channels).transpose(0, 3, 1, 2)


def write_unit_folders(folder: Path, images: Mapping[str, int], classes: Sequence[str]) -> tuple[Path, dict[str, int]]:
    """Images in CLASS/UNIT folders, so many of each unit, in turn in each class. All of a unit have one brightness."""
    brightness = {name: 30 + 20 * place for place, name in enumerate(images)}
    for split in data.SPLITS:
        for name, count in images.items():
            for number in range(count):
                inside = folder / split / classes[number % len(classes)] / name / ("visit" if number == 2 else "")
                inside.mkdir(parents=True, exist_ok=True)
                Image.fromarray(np.full((8, 8, 3), brightness[name], np.uint8)).save(inside / f"{number}.png")
    return folder, brightness


def sentences(count: int, longest: int = 12, seed: int = 0) -> list[str]:
    """Sentences of 1 to `longest` words."""
    chance = np.random.default_rng(seed)
    return [" ".join(chance.choice(WORDS, chance.integers(1, longest + 1))) for _ in range(count)]


def write_glue(root: Path, name: str, *, records: int = 40, labels: Sequence[int] | None = None) -> TextSpec:
    """A GLUE task's training and validation splits, of the hub's schema and layout."""
    spec = data.TEXT_DATASETS[name]
    folder = root / spec.hub_id / spec.config
    folder.mkdir(parents=True, exist_ok=True)
    given = labels or [index % spec.classes for index in range(records)]
    for number, split in enumerate(("train", *spec.judged_on)):
        columns: dict[str, pa.Array] = {spec.text_column: pa.array(sentences(len(given), seed=number))}
        if spec.pair_column:
            columns[spec.pair_column] = pa.array(sentences(len(given), seed=100 + number))
        columns[spec.label_column] = pa.array(given, pa.int64())
        columns["idx"] = pa.array(range(len(given)), pa.int32())
        pq.write_table(pa.table(columns), folder / f"{split}-00000-of-00001.parquet")
    return spec


def write_text_model(folder: Path, kind: str = "roberta", positions: int = 66) -> Path:
    """A classifier of random weights, as a folder that `transformers` reads, with a tokenizer of the words above."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import (
        BertConfig,
        BertForSequenceClassification,
        PreTrainedTokenizerFast,
        RobertaConfig,
        RobertaForSequenceClassification,
    )

    vocabulary = {word: index for index, word in enumerate(("<s>", "<pad>", "</s>", "<unk>", *WORDS))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    pair = "<s> $A </s> </s> $B </s>" if kind == "roberta" else "<s> $A </s> $B:1 </s>:1"
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair=pair, special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    names = ["input_ids", "attention_mask", *(["token_type_ids"] if kind == "bert" else [])]
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", unk_token="<unk>", model_input_names=names, model_max_length=1000
    ).save_pretrained(folder)
    sizes = {
        "vocab_size": len(vocabulary),
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 32,
        "max_position_embeddings": positions,
        "pad_token_id": 1,
    }
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        if kind == "roberta":
            RobertaForSequenceClassification(RobertaConfig(**sizes)).save_pretrained(folder)
        else:
            BertForSequenceClassification(BertConfig(type_vocab_size=2, **sizes)).save_pretrained(folder)
    return folder


def write_language_model(folder: Path, positions: int = 32) -> Path:
    """A GPT-2 of random weights with a tokenizer of the words above, as a folder that `transformers` reads."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

    vocabulary = {word: index for index, word in enumerate(("<end>", "<unk>", *WORDS))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<end>", unk_token="<unk>", model_max_length=1000
    ).save_pretrained(folder)
    config = GPT2Config(
        vocab_size=len(vocabulary),
        n_embd=16,
        n_layer=2,
        n_head=2,
        n_positions=positions,
        initializer_range=0.2,
        bos_token_id=0,
        eos_token_id=0,
    )
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        GPT2LMHeadModel(config).save_pretrained(folder)
    return folder


def write_vision_model(folder: Path, size: int = 24) -> Path:
    """A small image classifier of random weights, as a folder that `transformers` reads."""
    import torch
    from transformers import ViTConfig, ViTForImageClassification

    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        ViTForImageClassification(ViTConfig(image_size=size, patch_size=8, **sizes)).save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps({"image_mean": [0.4] * 3, "image_std": [0.3] * 3}))
    return folder


def write_table(path: Path, rows: Sequence[dict[str, object]]) -> Path:
    """One's own records as .csv, .tsv, .jsonl, .json or .parquet."""
    names = list(rows[0])
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(list(rows)), path)
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        separator = "," if path.suffix == ".csv" else "\t"
        lines = [separator.join(names), *(separator.join(str(row[name]) for name in names) for row in rows)]
        path.write_text("\n".join(lines) + "\n")
    return path
