"""Callbacks receive released numbers only; each logger writes them where its package finds them."""

from __future__ import annotations

import csv
import json
import os
import sys
import warnings
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from pmlf import cli
from pmlf.integrations import loggers
from pmlf.run.callbacks import EndRecord, EvaluationRecord, StepRecord
from small_runs import finish, private


class Heard:
    def __init__(self) -> None:
        self.records: list[Any] = []

    def on_step(self, record: StepRecord) -> None:
        self.records.append(record)

    def on_evaluation(self, record: EvaluationRecord) -> None:
        self.records.append(record)

    def on_end(self, record: EndRecord) -> None:
        self.records.append(record)


def evaluated_run(callback: Any) -> Any:
    """A run of six steps in two epochs, with an evaluation after each epoch."""
    run = private(seed=0)
    run.callbacks.append(callback)
    for epoch in run.epochs():
        for batch in epoch:
            run.step(batch)
        run.log_evaluation({"test/accuracy": 0.5 + epoch.number / 10})
    return run


def test_a_callback_hears_steps_evaluations_and_the_end_in_order() -> None:
    heard = Heard()
    run = evaluated_run(heard)
    kinds = [type(record).__name__ for record in heard.records]
    assert kinds == ["StepRecord"] * 4 + ["EvaluationRecord"] + ["StepRecord"] * 2 + ["EvaluationRecord", "EndRecord"]
    last, end = heard.records[-2:]
    assert last.epsilon == run.epsilon() and last.step == 6 and end.certificate == run.certificate()
    assert [record.step for record in heard.records if isinstance(record, StepRecord)] == [1, 2, 3, 4, 5, 6]


def test_a_record_of_a_step_holds_released_numbers_and_nothing_else() -> None:
    """The norm is that of the gradient which the optimizer gets."""
    assert {field.name for field in fields(StepRecord)} == {"step", "epoch", "learning_rate", "gradient_norm"}
    heard = Heard()
    run = private(seed=0)
    run.callbacks.append(heard)
    seen = []
    step = run.optimizer.step
    run.optimizer.step = lambda: (  # type: ignore[method-assign,assignment]
        seen.append(sum(float(p.grad.double().square().sum()) for p in run.private_step.trained) ** 0.5),
        step(),
    )
    finish(run)
    assert [record.gradient_norm for record in heard.records[:-1]] == pytest.approx(seen, rel=1e-5)


def test_a_callback_changes_no_bit_of_the_run() -> None:
    plain, heard = private(seed=0), private(seed=0)
    heard.callbacks.append(Heard())
    finish(plain)
    finish(heard)
    for one, other in zip(plain.model.parameters(), heard.model.parameters(), strict=True):
        assert one.equal(other)


def test_a_callback_that_fails_leaves_the_run_between_two_steps() -> None:
    class Failing(Heard):
        def on_step(self, record: StepRecord) -> None:
            raise OSError("disk full")

    run = private(seed=0)
    run.callbacks.append(Failing())
    with pytest.raises(OSError, match="disk full"):
        finish(run)
    assert run.steps_done == 1 and run.between_steps
    run.callbacks.clear()
    assert finish(run).steps_done == 6


def test_a_csv_file_has_every_number_and_steps_are_written_at_evaluations(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    run = private(seed=0)
    run.callbacks.append(loggers.CsvLogger(path))
    finish(run, until=3)
    assert not path.exists()  # a file that grows with every step would tell when each one was taken
    run.log_evaluation({"test/accuracy": 0.5})
    finish(run)
    rows = list(csv.DictReader(path.read_text().splitlines()))
    assert [int(row["step"]) for row in rows if row["name"] == "gradient_norm"] == [1, 2, 3, 4, 5, 6]
    assert {row["name"] for row in rows} == {"learning_rate", "gradient_norm", "epoch", "epsilon", "test/accuracy"}


def test_tensorboard_reads_the_event_files(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of tensorboard's own imports
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        run = evaluated_run(loggers.TensorBoardLogger(tmp_path / "events"))
        events = EventAccumulator(str(tmp_path / "events"))
        events.Reload()
        assert [event.step for event in events.Scalars("learning_rate")] == [1, 2, 3, 4, 5, 6]
        assert events.Scalars("epsilon")[-1].value == pytest.approx(run.epsilon())
        assert "certificate/text_summary" in events.Tags()["tensors"]


def test_mlflow_reads_its_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # newer versions ask for a database
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of mlflow's own imports
        from mlflow.tracking import MlflowClient

        store = (tmp_path / "store").as_uri()
        evaluated_run(loggers.MlflowLogger("tests", store))
        client = MlflowClient(tracking_uri=store)
        (found,) = client.search_runs([client.get_experiment_by_name("tests").experiment_id])
        assert found.data.metrics["test/accuracy"] == 0.7 and found.info.status == "FINISHED"
        assert [each.step for each in client.get_metric_history(found.info.run_id, "learning_rate")] == [
            1,
            2,
            3,
            4,
            5,
            6,
        ]
        assert [each.path for each in client.list_artifacts(found.info.run_id)] == ["certificate.json"]


@pytest.mark.slow
def test_wandb_writes_an_offline_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    for name, value in (("WANDB_MODE", "offline"), ("WANDB_SILENT", "true"), ("WANDB_CACHE_DIR", str(tmp_path))):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        evaluated_run(loggers.WandbLogger("tests", tmp_path))
    (written,) = (tmp_path / "wandb").glob("offline-run-*/run-*.wandb")
    content = written.read_bytes()
    assert b"test/accuracy" in content and b"gradient_norm" in content


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "mlflow"])
def test_a_logger_without_its_package_shows_the_line_to_install_it(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ValueError, match=rf"needs the package {name}: pip install 'dp-pmlf\[{name}\]'"):
        loggers.by_name(name, tmp_path)


@pytest.mark.slow
def test_the_command_line_logs_to_the_folder_of_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = ("--model", "linear", "--records", "200", "--batch-size", "50", "--epochs", "2", "--seed", "0")
    arguments = ["train", *settings, "--out", str(tmp_path / "run"), "--show-sensitive", "--log", "csv", "--json"]
    assert cli.main(arguments) == 0
    result = json.loads(capsys.readouterr().out)
    rows = list(csv.DictReader((tmp_path / "run" / "log.csv").read_text().splitlines()))
    assert [row["value"] for row in rows if row["name"] == "epsilon"][-1] == str(result["epsilon"])
    assert "loss" not in (tmp_path / "run" / "log.csv").read_text()
    assert os.listdir(tmp_path) == ["run"]
