"""Runs of `prior-linear`: one plan, one folder, resumable, and no setting of networks."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest

from pmlf.experiments import prior_linear
from pmlf.experiments.results import SilentObserver
from pmlf.experiments.spec import RunSpec
from pmlf.priors import PatchSpec, PriorSpec

SPEC = RunSpec(model="prior-linear", epsilon=8.0, delta=1e-4, records=1500, seed=0, steps=6)


@pytest.fixture(scope="module", autouse=True)
def small_prior(tmp_path_factory: pytest.TempPathFactory) -> object:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PMLF_CACHE", str(tmp_path_factory.mktemp("cache")))
        blocks = (PatchSpec(name="patches", weight=1.0, filters=12, grid=3),)
        patch.setattr(prior_linear, "PriorSpec", partial(PriorSpec, images=60, blocks=blocks))
        yield


class _Stopper(SilentObserver):
    def stepped(self, step: int, training_loss: float | None) -> None:
        if step == 2:
            raise KeyboardInterrupt


def test_a_run_stays_within_its_epsilon_and_learns(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    result = prior_linear.run(SPEC, tmp_path / "run", extracting=lambda done, of: seen.append((done, of)))
    assert seen[-1] == (1500, 1500)
    assert result.steps == 6 and not result.interrupted
    assert result.certified_epsilon is not None and result.certified_epsilon <= 8.0
    assert result.test_accuracy is not None and result.test_accuracy > 0.5
    certificate = json.loads((tmp_path / "run" / "certificate.json").read_text())
    assert [query["name"] for query in certificate["queries"]] == ["mean", "second moments"]
    assert certificate["records"] == 1500
    assert not (tmp_path / "run" / "checkpoint.safetensors").exists()


def test_a_resumed_run_ends_with_the_weights_of_an_uninterrupted_one(tmp_path: Path) -> None:
    stopped = prior_linear.run(SPEC, tmp_path / "stopped", observer=_Stopper())
    assert stopped.interrupted_by == "SIGINT" and stopped.steps == 2
    resumed = prior_linear.run(stopped.spec, tmp_path / "stopped", resume=True)
    prior_linear.run(SPEC, tmp_path / "whole")
    assert resumed.steps == 6 and not resumed.interrupted
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("stopped", "whole")]
    assert weights[0] == weights[1]
    assert prior_linear.run(resumed.spec, tmp_path / "stopped", resume=True).test_accuracy == resumed.test_accuracy


def test_held_out_records_are_not_trained_on(tmp_path: Path) -> None:
    spec = RunSpec(model="prior-linear", epsilon=8.0, records=1000, seed=0, steps=2, holdout=0.2)
    result = prior_linear.run(spec, tmp_path / "run")
    assert result.split == "holdout"
    assert result.evaluations[-1].scores["holdout"].records == 200
    assert json.loads((tmp_path / "run" / "certificate.json").read_text())["records"] == 800


@pytest.mark.parametrize(
    "given", [{"lr": 3.0}, {"ema": 0.9}, {"augment": True}, {"method": "disk"}, {"batch_size": 10}]
)
def test_a_setting_of_networks_is_refused(given: dict[str, object], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"leave (it|them) out"):
        prior_linear.run(RunSpec(model="prior-linear", **given), tmp_path / "run")  # type: ignore[arg-type]
    assert not (tmp_path / "run").exists()
