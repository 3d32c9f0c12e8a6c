"""`pmlf train --model prior-linear` from the command line."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest

from pmlf.cli.main import main
from pmlf.experiments import linear_features
from pmlf.priors import PatchSpec, PriorSpec
from twins import write_glue, write_text_model

COMMAND = ["train", "--model", "prior-linear", "--epsilon", "8", "--records", "400", "--steps", "2"]


@pytest.fixture(autouse=True)
def small_prior(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PMLF_CACHE", str(tmp_path / "cache"))
    blocks = (PatchSpec(name="patches", weight=1.0, filters=4, grid=2),)
    monkeypatch.setattr(linear_features, "PriorSpec", partial(PriorSpec, images=20, blocks=blocks))


@pytest.mark.slow
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


def test_what_is_refused_is_refused_before_features_are_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(linear_features, "feature_splits", None)
    for given, said in (
        (["--lr", "3", "--out", "new"], "--lr is not a setting of prior-linear: leave it out"),
        (["--records", "0", "--out", "new"], "--records=0"),
        (["--out", str(tmp_path)], "already exists"),
    ):
        assert main(["train", "--model", "prior-linear", *given]) == 2
        assert said in capsys.readouterr().err


def test_an_option_of_networks_is_refused_by_its_flag(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*COMMAND, "--out", str(tmp_path / "run"), "--show-sensitive"]) == 2
    assert "--show-sensitive is not an option of --model prior-linear" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(("epsilon", "told"), [("1", True), ("20", False)])
def test_a_network_of_images_at_a_small_epsilon_names_the_cost_of_a_linear_model(
    epsilon: str, told: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--model", "linear", "--steps", "1", "--batch-size", "50", "--records", "200", "--epsilon", epsilon]
    assert main(["train", *options, "--out", str(tmp_path / "run")]) == 0
    assert ("--model prior-linear may be more accurate" in capsys.readouterr().err) == told


@pytest.mark.slow
def test_an_encoder_is_trained_on_and_used_from_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_glue(tmp_path, "sst2", records=40)
    given = ["--prior", "sentence-embedding", "--model", str(write_text_model(tmp_path / "bert", "bert"))]
    options = ["--epsilon", "4", "--steps", "2", "--data-dir", str(tmp_path), "--out", str(tmp_path / "run"), "--json"]
    assert main(["train", "--dataset", "sst2", *given, *options]) == 0
    assert json.loads(capsys.readouterr().out)["certified_epsilon"] <= 4
    assert main(["predict", str(tmp_path / "run"), "--text", "a good film", "dull", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["predictions"]
    assert [row["prediction"] in ("negative", "positive") for row in rows] == [True, True]
    assert main(["train", "--dataset", "sst2", *given, "--lora-rank", "2", "--data-dir", str(tmp_path)]) == 2
    assert "--lora-rank is not a setting of sentence-embedding" in capsys.readouterr().err
