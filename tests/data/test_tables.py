"""Tables: features by a declared schema, never computed from the records, and errors that show no value."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas
import pytest
import torch

from pmlf import data
from twins import write_table

SCHEMA = data.Schema.parsed(["age=0:100", "ward=north,south"])
ILL = data.Classes(names=("no", "yes"))
ROWS = [
    {"age": 50, "ward": "north", "ill": "no"},
    {"age": 100, "ward": "south", "ill": "yes"},
    {"age": 250, "ward": "east", "ill": "yes"},
]
FEATURES = [[0, 0, 1, 0, 0], [1, 0, 0, 1, 0], [1, 0, 0, 0, 1]]


def load(path: Path, split: str = "train", label: str = "ill") -> data.TableDataset:
    return data.load_table(path, split, schema=SCHEMA, target=ILL, label_column=label)


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".jsonl", ".parquet"])
def test_features_are_clamped_scaled_and_one_hot(suffix: str, tmp_path: Path) -> None:
    found = load(write_table(tmp_path / f"own{suffix}", ROWS))
    assert found.features.tolist() == FEATURES and found.labels.tolist() == [0, 1, 1]
    assert found[1][0].dtype == torch.float32 and len(found) == 3


def test_a_frame_gives_the_same_as_its_file(tmp_path: Path) -> None:
    frame = pandas.DataFrame(ROWS)
    made = data.TableDataset.from_frame(frame, schema=SCHEMA, target=ILL, label_column="ill")
    assert torch.equal(made.features, load(write_table(tmp_path / "own.csv", ROWS)).features)
    with pytest.raises(ValueError, match="the frame has no column 'ward', only 'age', 'ill'"):
        data.TableDataset.from_frame(frame[["age", "ill"]], schema=SCHEMA, target=ILL, label_column="ill")


def test_a_row_is_encoded_alike_alone_and_among_others() -> None:
    chance = np.random.default_rng(0)
    table = {"age": chance.normal(50, 80, 40).tolist(), "ward": chance.choice(["north", "west", ""], 40).tolist()}
    table["age"][3] = None
    together = SCHEMA.encode(table)
    for index in range(40):
        alone = SCHEMA.encode({name: [column[index]] for name, column in table.items()})
        assert np.array_equal(alone[0], together[index])
    assert np.abs(together).max() <= 1


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".jsonl", ".json"])
@pytest.mark.parametrize("odd", ["A12", "", "NA", "1.5", "2020-01-01", "true"])
def test_another_record_does_not_change_how_a_record_is_read(suffix: str, odd: str, tmp_path: Path) -> None:
    schema = data.Schema.parsed(["code=007,12,2019-05-05", "kind=NA,None,true"])
    written = [("007", "NA"), ("12", "true"), ("2019-05-05", "None")]
    rows: list[dict[str, object]] = [{"code": code, "kind": kind, "ill": "no"} for code, kind in written]
    expected = [[1, 0, 0, 0, 1, 0, 0, 0], [0, 1, 0, 0, 0, 0, 1, 0], [0, 0, 1, 0, 0, 1, 0, 0]]
    for alone in ([], [{"code": odd, "kind": odd, "ill": "yes"}]):
        for place, row in enumerate(rows):
            path = write_table(tmp_path / f"own{suffix}", [row, *alone])
            found = data.load_table(path, "train", schema=schema, target=ILL, label_column="ill")
            assert found.features[0].tolist() == expected[place]


def test_a_unit_has_one_name_in_all_parts_of_a_table(tmp_path: Path) -> None:
    rows = [{"patient": "007", "age": 1}] * 10_000 + [{"patient": "A12", "age": 1}, {"patient": "007", "age": 2}]
    path = write_table(tmp_path / "own.csv", rows)
    assert set(data.unit_column(path, "patient")) == {"007", "A12"}


def test_a_whole_number_is_found_however_it_is_written(tmp_path: Path) -> None:
    schema = data.Schema.parsed(["grade=1,2", "smokes=0:1"])
    rows = [{"grade": "1.0", "smokes": "True", "ill": "1.0"}, {"grade": "2", "smokes": "false", "ill": "0"}]
    path = write_table(tmp_path / "own.csv", rows)
    found = data.load_table(path, "train", schema=schema, target=data.Classes(names=("0", "1")), label_column="ill")
    assert found.features.tolist() == [[1, 0, 0, 1, 0], [0, 1, 0, -1, 0]] and found.labels.tolist() == [1, 0]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("age,ward,ill\n1,north,no,extra\n", "another number of cells than its header"),
        ("age,ward,ill\n1,north\n", "another number of cells than its header"),
        ("age,age,ill\n1,2,no\n", "two columns of one name"),
        ('age,ward,ill\n1,"secret,no\n', r"cannot be read: correct the file \(Error\)"),
    ],
)
def test_a_broken_file_is_refused_and_shows_no_value(
    text: str, said: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "own.csv").write_text(text)
    with pytest.raises(ValueError, match=said) as refused:
        load(tmp_path / "own.csv")
    assert "secret" not in str(refused.value) + "".join(capfd.readouterr())


@pytest.mark.parametrize("value", [None, float("nan"), float("inf"), "n/a"])
def test_what_is_no_number_is_missing(value: object) -> None:
    assert data.NumberColumn(name="age", low=0, high=10).encode([value]).tolist() == [[0, 1]]


def test_a_schema_survives_json_and_is_read_from_toml(tmp_path: Path) -> None:
    assert data.Schema.from_json(SCHEMA.to_json()) == SCHEMA
    (tmp_path / "schema.toml").write_text('[columns]\nage = [0, 100]\nward = ["north", "south"]\n')
    assert data.Schema.read(tmp_path / "schema.toml") == SCHEMA


@pytest.mark.parametrize(
    ("texts", "said"),
    [
        ([], "is not a list of different columns"),
        (["age"], "declares nothing: write a range or categories"),
        (["age=9:1"], "range 9.0 to 1.0"),
        (["age=0:9", "age=0:8"], r"columns='age'"),
        (["sex=f,f"], "give each category once"),
    ],
)
def test_what_is_no_schema_is_refused(texts: list[str], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        data.Schema.parsed(texts)


def test_a_broken_schema_file_says_what_to_write(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"schema='.*none.toml' does not exist"):
        data.Schema.read(tmp_path / "none.toml")
    for text in ("age = [0, 1]", "[columns", "[columns]\nage = 3", 'columns = "age"'):
        (tmp_path / "bad.toml").write_text(text)
        with pytest.raises(ValueError, match=r"is not a schema: write|neither a range nor categories"):
            data.Schema.read(tmp_path / "bad.toml")


def test_errors_list_the_columns_and_show_no_value(tmp_path: Path) -> None:
    path = write_table(tmp_path / "own.csv", ROWS)
    with pytest.raises(ValueError, match="has no column 'outcome', only 'age', 'ward', 'ill': give one of them as"):
        load(path, label="outcome")
    with pytest.raises(ValueError, match=r"none.csv' does not exist"):
        load(tmp_path / "none.csv")
    secret = write_table(tmp_path / "secret.csv", [*ROWS, {"age": 1, "ward": "north", "ill": "perhaps"}])
    with pytest.raises(ValueError, match="has a label that is not one of no, yes") as refused:
        load(secret)
    assert "perhaps" not in str(refused.value)


def test_targets_refuse_what_was_not_declared_and_show_no_value() -> None:
    with pytest.raises(ValueError, match="target that is not a number") as refused:
        data.ValueRange(low=0, high=1).encode([0.5, "secret"], "own")
    assert "secret" not in str(refused.value)
    with pytest.raises(ValueError, match="is not one of a, b") as refused:
        data.LabelSet(names=("a", "b")).encode(["a|secret"], "own")
    assert "secret" not in str(refused.value)
    for names in ((), ("a",), ("a", "a"), ("a", "")):
        with pytest.raises(ValueError, match="two or more different names"):
            data.Classes(names=names)
    with pytest.raises(ValueError, match="is not a range"):
        data.ValueRange(low=1, high=1)
