"""`pmlf probe`: files in, certificate out; an interrupted run resumes with nothing uncounted."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

import pmlf
from pmlf.cli.main import main
from pmlf.data.feature_files import load_features
from pmlf.evidence import certificate, ledger
from pmlf.experiments import probing
from pmlf.experiments.spec import RunSpec

N, D = 600, 6


@pytest.fixture
def files(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    y = rng.integers(2, size=N)
    X = (rng.normal(size=(N, D)) + 4 * y[:, None] * np.eye(D)[0]).astype(np.float32)
    np.save(tmp_path / "x.npy", X)
    np.save(tmp_path / "y.npy", y)
    np.savez(tmp_path / "xy.npz", features=X, labels=y)
    names = {f"f{place}": X[:, place] for place in range(D)}
    pyarrow.parquet.write_table(pyarrow.table({**names, "label": y}), tmp_path / "xy.parquet")
    return tmp_path


def spec(files: Path, **probe: Any) -> probing.ProbeSpec:
    given = {"classes": 2, "epsilon": 4.0, "steps": 6, **probe}
    return probing.ProbeSpec(features=str(files / "x.npy"), labels=str(files / "y.npy"), holdout=0.2, probe=given)


@pytest.mark.slow
@pytest.mark.parametrize("source", [["x.npy", "--labels", "y.npy"], ["xy.npz"], ["xy.parquet"]])
def test_a_file_of_features_becomes_a_model_with_a_certificate(
    files: Path, source: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(files)
    options = ["--classes", "2", "--epsilon", "4", "--steps", "5", "--holdout", "0.2", "--out", "run", "--json"]
    assert main(["probe", *source, *options]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["epsilon"] <= 4.0 and result["accuracy"] > 0.75 and result["records"] == 480
    document = certificate.read(files / "run" / "certificate.json")
    assert certificate.examined(document)[1] is None
    assert (files / "run").stat().st_mode & 0o077 == 0
    assert not (files / "run" / "checkpoint.safetensors").exists()


@pytest.mark.parametrize("seed", [None, 3])
def test_an_interrupted_run_resumes_with_every_event_counted_once(files: Path, seed: int | None) -> None:
    out, given = files / "run", spec(files, random_state=seed)

    def interrupt(training: Any) -> None:
        if training.done == 4:
            os.kill(os.getpid(), signal.SIGTERM)  # a job in the background ignores SIGINT

    stopped = probing.run_probe(given, out, progress=interrupt)
    assert stopped.interrupted_by == "SIGTERM" and stopped.steps == 2
    assert probing.read_spec(out) == given
    ended = probing.run_probe(given, out, resume=True)
    assert ended.interrupted_by is None and ended.steps == 6
    assert sum(ledger.read(out / "ledger.jsonl").events.values()) == 8
    assert ended.epsilon is not None and ended.epsilon <= 4.0


def test_a_seeded_run_ends_with_the_same_model_after_an_interruption(files: Path) -> None:
    given = spec(files, random_state=1)
    probing.run_probe(given, files / "whole")

    def interrupt(training: Any) -> None:
        if training.done == 5:
            os.kill(os.getpid(), signal.SIGTERM)

    probing.run_probe(given, files / "cut", progress=interrupt)
    probing.run_probe(given, files / "cut", resume=True)
    one, other = ((files / name / "model.safetensors").read_bytes() for name in ("whole", "cut"))
    assert one == other


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["x.npy", "--classes", "2"], "holds no labels"),
        (["x.npy", "--labels", "y.npy"], "give all possible classes"),
        (["x.csv", "--labels", "y.npy", "--classes", "2"], "not a feature file"),
        (["xy.parquet", "--labels", "colour", "--classes", "2"], "no column 'colour'"),
        (["--resume", "nowhere"], "no probe to resume"),
        ([], "FEATURES is missing"),
    ],
)
def test_what_is_refused_leaves_no_folder_and_says_what_to_give(
    files: Path,
    arguments: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(files)
    out = [] if "--resume" in arguments else ["--out", "run"]
    assert main(["probe", *arguments, *out]) == 2
    assert message in capsys.readouterr().err
    assert not (files / "run").exists()


def test_a_changed_file_is_not_resumed_on(files: Path) -> None:
    def interrupt(training: Any) -> None:
        if training.done == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    given = spec(files)
    probing.run_probe(given, files / "run", progress=interrupt)
    labels = np.load(files / "y.npy")
    labels[0] = 1 - labels[0]
    np.save(files / "y.npy", labels)
    with pytest.raises(ValueError, match="have changed since the run started"):
        probing.run_probe(given, files / "run", resume=True)


@pytest.mark.slow
@pytest.mark.parametrize("head", [["softmax"], ["sigmoid"]])
def test_a_trained_probe_predicts_and_scores_files(
    files: Path, head: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(files)
    options = ["--classes", "2", "--epsilon", "8", "--head", *head, "--seed", "0", "--out", "run", "--json"]
    assert main(["probe", "x.npy", "--labels", "y.npy", *options]) == 0
    capsys.readouterr()
    assert main(["predict", "run", "x.npy", "xy.parquet", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["predictions"]
    assert len(rows) == 2 * N and rows[0]["input"] == "x.npy:1" and set(rows[0]) >= {"prediction", "p(0)", "p(1)"}
    guessed = np.array([int(row["prediction"]) for row in rows[:N]])
    accuracy = float(np.mean(guessed == np.load("y.npy")))
    assert accuracy > 0.8
    for source in (["x.npy", "--label-column", "y.npy"], ["xy.npz"], ["xy.parquet"]):
        assert main(["evaluate", "run", "--dataset", *source, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["score"]["accuracy"] == pytest.approx(accuracy)


def test_a_probe_and_a_network_are_not_mistaken_for_each_other(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    probing.run_probe(spec(files, steps=1), files / "probe")
    for command in (["report", str(files / "probe")], ["train", "--resume", str(files / "probe")]):
        assert main(command) == 2
        assert "is a run of `pmlf probe`" in capsys.readouterr().err
    (files / "network").mkdir()
    (files / "network" / "spec.json").write_text(RunSpec().to_json())
    (files / "network" / "checkpoint.safetensors").touch()
    assert main(["probe", "--resume", str(files / "network")]) == 2
    assert "is a run of `pmlf train`" in capsys.readouterr().err


def test_the_ledger_of_a_probe_is_shown_query_by_query(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    probing.run_probe(spec(files, steps=2), files / "run")
    assert main(["account", "--ledger", str(files / "run" / "ledger.jsonl"), "--json"]) == 0
    (run,) = json.loads(capsys.readouterr().out)["runs"]
    assert run["events"] == run["planned_steps"] == 2
    assert [(query["name"], query["events"]) for query in run["queries"]] == [("mean", 1), ("second moments", 1)]
    assert main(["account", "--ledger", str(files / "run" / "ledger.jsonl")]) == 0
    assert "run, second moments" in capsys.readouterr().out


def test_features_and_labels_of_several_lengths_are_refused(files: Path) -> None:
    np.save(files / "fewer.npy", np.zeros(N - 3, dtype=int))
    with pytest.raises(ValueError, match="give one label per record"):
        load_features(files / "x.npy", str(files / "fewer.npy"))


@pytest.mark.parametrize("name", ["table.parquet", "texts.npy", "pickled.npy", "empty.npy", "broken.npz"])
def test_a_file_of_no_features_is_refused_and_no_value_is_shown(
    name: str, files: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(files)
    people = np.array([["Alice", "1"]] * N)
    columns = {"name": ["Alice"] * N, "f": [1.0] * N, "label": [0] * N}
    pyarrow.parquet.write_table(pyarrow.table(columns), "table.parquet")
    np.save("texts.npy", people)
    np.save("pickled.npy", people.astype(object), allow_pickle=True)
    Path("empty.npy").touch()
    Path("broken.npz").write_bytes(b"Alice")
    labels = [] if name.endswith("parquet") else ["--labels", "y.npy"]
    assert main(["probe", name, *labels, "--classes", "2", "--out", "run"]) == 2
    said = capsys.readouterr().err
    assert "Alice" not in said and "numbers" in said and not Path("run").exists()


def test_numbers_are_predicted_in_their_range(files: Path) -> None:
    numbers = np.load(files / "x.npy")[:, 0] * 10
    np.save(files / "numbers.npy", numbers)
    given = {"head": "least-squares", "target_range": (-40.0, 80.0), "epsilon": 8.0, "intercept": 0.2}
    spec = probing.ProbeSpec(
        features=str(files / "x.npy"), labels=str(files / "numbers.npy"), holdout=None, probe=given
    )
    probing.run_probe(spec, files / "run")
    model = pmlf.load(files / "run")
    predicted = [row["prediction"] for row in model.predict(np.load(files / "x.npy"))]
    assert min(predicted) >= -40 and max(predicted) <= 80
    assert np.corrcoef(predicted, numbers)[0, 1] > 0.5


def test_features_of_another_width_are_refused(files: Path) -> None:
    probing.run_probe(spec(files), files / "run")
    with pytest.raises(ValueError, match="give rows of 6 numbers"):
        pmlf.load(files / "run").predict(np.zeros((2, 5)))


def test_train_takes_a_file_of_features(
    files: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(files)
    options = ["--labels", "y.npy", "--classes", "2", "--epsilon", "4", "--steps", "5", "--holdout", "0.2", "--json"]
    assert main(["train", "--features", "x.npy", *options, "--out", "run"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["epsilon"] <= 4.0 and result["records"] == 480 and result["steps"] == 5
    assert main(["train", "--features", "x.npy", *options, "--lr", "3"]) == 2
    assert "--lr is not an option of --features" in capsys.readouterr().err
