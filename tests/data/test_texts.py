"""Texts: tokens of GLUE tasks and of your own tables, padding, and helpful errors."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoTokenizer

from pmlf import data
from pmlf.data.texts import Padding
from twins import sentences, write_glue, write_table, write_text_model


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("models")
    return {kind: AutoTokenizer.from_pretrained(write_text_model(folder / kind, kind)) for kind in ("roberta", "bert")}


@pytest.mark.parametrize(
    ("name", "kind"), [("sst2", "roberta"), ("qnli", "bert"), ("qqp", "roberta"), ("mnli", "bert")]
)
def test_a_glue_task_is_tokenised_record_by_record(
    name: str, kind: str, tokenizers: dict[str, Any], tmp_path: Path
) -> None:
    spec = write_glue(tmp_path, name, records=15)
    loaded = data.load_text(name, tmp_path)
    assert (loaded.classes, loaded.judged_on, loaded.metrics) == (spec.classes, spec.judged_on, spec.metrics)
    for split in ("train", *spec.judged_on):
        rows = pq.read_table(tmp_path / spec.hub_id / spec.config / f"{split}-00000-of-00001.parquet").to_pylist()
        found = loaded.tokenised(split, tokenizers[kind], longest=64, cut=False)
        assert len(found) == len(found.lengths) == 15
        for row, (tokens, types, label), length in zip(rows, found, found.lengths, strict=True):
            pair = row[spec.pair_column] if spec.pair_column else None
            expected = tokenizers[kind](row[spec.text_column], pair)
            assert tokens.tolist() == expected["input_ids"] and len(tokens) == length
            assert (None if types is None else types.tolist()) == expected.get("token_type_ids")
            assert label == row["label"]


def test_mnli_is_evaluated_on_both_of_its_validation_splits() -> None:
    assert data.TEXT_DATASETS["mnli"].judged_on == ("validation_matched", "validation_mismatched")
    assert data.TEXT_DATASETS["qqp"].metrics == ("accuracy", "f1")


def test_a_batch_is_padded_to_its_longest_text(tokenizers: dict[str, Any], tmp_path: Path) -> None:
    write_glue(tmp_path, "qnli", records=12)
    loaded = data.load_text("qnli", tmp_path).tokenised("train", tokenizers["bert"], longest=64, cut=False)
    chosen = [3, 0, 7]
    batch = Padding(1)([loaded[index] for index in chosen])
    longest = max(loaded.lengths[chosen])
    assert batch["input_ids"].shape == batch["attention_mask"].shape == batch["token_type_ids"].shape == (3, longest)
    assert batch["attention_mask"].sum(1).tolist() == loaded.lengths[chosen].tolist()
    for row, index in enumerate(chosen):
        tokens, types, label = loaded[index]
        assert torch.equal(batch["input_ids"][row, : len(tokens)], tokens) and types is not None
        assert torch.equal(batch["token_type_ids"][row, : len(tokens)], types)
        assert (batch["input_ids"][row, len(tokens) :] == 1).all() and batch["labels"][row] == label


def test_texts_are_tokenised_once_for_each_tokenizer(
    tokenizers: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PMLF_CACHE", str(tmp_path / "cache"))
    write_glue(tmp_path, "sst2", records=5)
    loaded = data.load_text("sst2", tmp_path)
    first = loaded.tokenised("train", tokenizers["roberta"], longest=64, cut=False)
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "datasets", None)  # so nothing can be read
        again = loaded.tokenised("train", tokenizers["roberta"], longest=64, cut=False)
    assert all(torch.equal(a[0], b[0]) for a, b in zip(first, again, strict=True))
    loaded.tokenised("train", tokenizers["bert"], longest=64, cut=False)
    loaded.tokenised("train", tokenizers["bert"], longest=5, cut=True)
    assert sum(path.is_dir() for path in (tmp_path / "cache" / "pmlf-arrays").iterdir()) == 3


def test_a_text_longer_than_the_model_takes_is_refused_or_cut(tokenizers: dict[str, Any], tmp_path: Path) -> None:
    write_glue(tmp_path, "mnli", records=20)
    loaded = data.load_text("mnli", tmp_path)
    with pytest.raises(ValueError, match="has more than 9 tokens, the limit of the model: give max_length=9"):
        loaded.tokenised("train", tokenizers["roberta"], longest=9, cut=False)
    assert loaded.tokenised("train", tokenizers["roberta"], longest=9, cut=True).lengths.max() == 9


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".jsonl", ".parquet"])
def test_your_own_table_is_read_by_the_names_of_its_columns(
    suffix: str, tokenizers: dict[str, Any], tmp_path: Path
) -> None:
    names = ["no", "maybe", "yes"]
    rows = [{"question": text, "verdict": names[i % 3]} for i, text in enumerate(sentences(9))]
    path = write_table(tmp_path / f"reviews{suffix}", rows)
    columns = data.Columns(text="question", label="verdict", target=data.Classes(names=("yes", "no", "maybe")))
    loaded = data.load_text(str(path), columns=columns)
    assert loaded.classes == 3 and loaded.judged_on == ()
    found = loaded.tokenised("train", tokenizers["roberta"], longest=64, cut=False)
    assert found.labels.tolist() == [1, 2, 0] * 3
    assert found[4][0].tolist() == tokenizers["roberta"](rows[4]["question"])["input_ids"]


def test_your_own_folder_has_one_file_per_split(tokenizers: dict[str, Any], tmp_path: Path) -> None:
    rows = [{"text": text, "label": i % 2} for i, text in enumerate(sentences(6))]
    write_table(tmp_path / "train.csv", rows)
    write_table(tmp_path / "test.jsonl", rows[:2])
    loaded = data.load_text(str(tmp_path), columns=data.Columns(text="text", target=data.Classes(names=("0", "1"))))
    assert loaded.judged_on == ("test",)
    assert len(loaded.tokenised("test", tokenizers["bert"], longest=64, cut=False)) == 2
    with pytest.raises(ValueError, match="has no split 'validation', only 'test', 'train'"):
        loaded.tokenised("validation", tokenizers["bert"], longest=64, cut=False)


def tokenise(path: Path, tokenizer: Any, **columns: Any) -> None:
    given = {"text": "text", "target": data.Classes(names=("0", "1")), **columns}
    data.load_text(str(path), columns=data.Columns(**given)).tokenised("train", tokenizer, longest=64, cut=False)


def test_errors_of_tables_say_what_is_wrong(tokenizers: dict[str, Any], tmp_path: Path) -> None:
    tokenizer = tokenizers["roberta"]
    rows = [{"text": "a film", "label": 0}, {"text": "a plot", "label": 7}]
    path = write_table(tmp_path / "own.csv", rows)
    with pytest.raises(ValueError, match=r"'own.csv' has a label that is not one of 0, 1: give all possible `labels`"):
        tokenise(path, tokenizer)
    with pytest.raises(
        ValueError, match=r"has no column 'review', only 'text', 'label': give one of them as text_column"
    ):
        tokenise(path, tokenizer, text="review")
    numbers = write_table(tmp_path / "own.jsonl", rows)
    with pytest.raises(ValueError, match=r"column 'label' of 'own.jsonl' has a value that is not a text"):
        tokenise(numbers, tokenizer, text="label")
    with pytest.raises(ValueError, match="needs text_column and two or more `labels`"):
        data.load_text(str(path))
    with pytest.raises(ValueError, match="dataset 'imdb' does not exist: give one of sst2, qnli, qqp, mnli"):
        data.load_text("imdb")
    (tmp_path / "notes.txt").write_text("text")
    with pytest.raises(ValueError, match=r"notes.txt' is not a table: give a .parquet, .csv"):
        data.load_text(
            str(tmp_path / "notes.txt"), columns=data.Columns(text="text", target=data.Classes(names=("0", "1")))
        )
    (tmp_path / "empty.csv").write_text("text,label\n")
    with pytest.raises(ValueError, match=r"'empty.csv' has no records in 'train': correct the file"):
        tokenise(tmp_path / "empty.csv", tokenizer)
    (tmp_path / "broken.parquet").write_bytes(b"not a parquet file")
    with pytest.raises(ValueError, match=r"a file of 'broken.parquet' cannot be read: correct the file"):
        tokenise(tmp_path / "broken.parquet", tokenizer)


def test_a_hidden_label_of_glue_is_an_error(tokenizers: dict[str, Any], tmp_path: Path) -> None:
    write_glue(tmp_path, "sst2", labels=[0, 1, -1])
    with pytest.raises(
        ValueError, match=r"'nyu-mll/glue/sst2' has a label that is not one of 0, 1: download the files"
    ):
        data.load_text("sst2", tmp_path).tokenised("train", tokenizers["bert"], longest=64, cut=False)


def test_a_missing_task_names_its_folder(tmp_path: Path) -> None:
    write_glue(tmp_path, "sst2")
    with pytest.raises(ValueError, match="no parquet file under nyu-mll/glue/qqp: put the files from the hub there"):
        data.load_text("qqp", tmp_path)


def test_images_and_texts_are_not_mistaken_for_each_other() -> None:
    with pytest.raises(ValueError, match="'sst2' is a text dataset"):
        data.load("sst2")


def test_a_number_in_a_text_column_of_parquet_is_refused(tokenizers: dict[str, Any], tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": ["a film", None], "label": [0, 1]}), tmp_path / "own.parquet")
    with pytest.raises(ValueError, match="has a value that is not a text: remove its row"):
        tokenise(tmp_path / "own.parquet", tokenizers["bert"])
