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

from pmlf.cli.main import main
from pmlf.evidence import certificate, ledger
from pmlf.experiments import probing

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
        (["x.npy", "--labels", "y.npy"], "declare all possible classes"),
        (["x.csv", "--labels", "y.npy"], "not a feature file"),
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
