"""`pmlf train --model prior-linear` from the command line."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest

from pmlf.cli.main import main
from pmlf.experiments import linear_features
from pmlf.priors import PatchSpec, PriorSpec

COMMAND = ["train", "--model", "prior-linear", "--epsilon", "8", "--records", "400", "--steps", "2"]


@pytest.fixture(autouse=True)
def small_prior(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PMLF_CACHE", str(tmp_path / "cache"))
    blocks = (PatchSpec(name="patches", weight=1.0, filters=4, grid=2),)
    monkeypatch.setattr(linear_features, "PriorSpec", partial(PriorSpec, images=20, blocks=blocks))


def test_a_run_prints_its_certified_epsilon_and_a_complete_run_resumes_to_its_result(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    assert main([*COMMAND, "--json", "--out", str(out)]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["model"] == "prior-linear" and printed["steps"] == 2
    assert printed["certified_epsilon"] <= 8
    assert (out / "certificate.html").exists()
    assert main(["train", "--resume", str(out), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["test_accuracy"] == printed["test_accuracy"]


def test_an_option_of_networks_is_refused_by_its_flag(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*COMMAND, "--out", str(tmp_path / "run"), "--show-sensitive"]) == 2
    assert "--show-sensitive is not an option of --model prior-linear" in capsys.readouterr().err
