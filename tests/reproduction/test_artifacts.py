"""The paper's artifacts as data: their runs, and that comparisons are fair."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib import resources
from pathlib import Path

import pytest

from pmlf.experiments.jobs import run_key
from pmlf.experiments.spec import RunSpec
from pmlf.mechanism import accounting
from pmlf.reproduction import paper
from pmlf.reproduction.artifacts import HELD_OUT_FRACTION, PROFILES, TUNING_SEED

NAMES = [*(f"figure-{n}" for n in range(1, 8)), *(f"table-{n}" for n in range(1, 5))]
STORED = Path(__file__).resolve().parents[2] / "docs" / "results" / "reproduction"
NUMBERS = json.loads((resources.files("pmlf") / "assets" / "paper_numbers.json").read_text())


def test_the_paper_has_eleven_artifacts() -> None:
    assert [artifact.name for artifact in paper.ARTIFACTS] == NAMES == sorted(NUMBERS)


def test_an_unknown_name_is_an_error_that_lists_the_names() -> None:
    with pytest.raises(ValueError, match=r"'table-5': give one of figure-1, .*, table-4"):
        paper.artifact("table-5")
    with pytest.raises(ValueError, match="profile='gpu' is not known: give one of paper, cpu, smoke"):
        paper.artifact("table-4").cells("gpu")


@pytest.mark.parametrize("profile", PROFILES)
def test_variants_of_a_panel_differ_only_in_their_method(profile: str) -> None:
    for artifact in paper.ARTIFACTS:
        cells = artifact.cells(profile)
        assert cells
        for cell in cells:
            for other in cells:
                if other.panel is cell.panel and other.epsilon == cell.epsilon:
                    same = replace(other.run(0), method=cell.variant.method, options=cell.variant.options)
                    assert same == cell.run(0), artifact.name
            cell.run(0).build_method()


def test_every_variant_has_the_same_number_of_trials_at_the_same_rates() -> None:
    for cell in (cell for artifact in paper.ARTIFACTS for cell in artifact.cells("cpu")):
        trials = cell.trials()
        gain = 10.0 if cell.variant.method == "inner-outer" else 1.0
        assert [trial.lr * gain for trial in trials] == pytest.approx(list(cell.panel.rates))
        assert {(trial.steps, trial.epochs) for trial in trials} == {(cell.run(0).steps, cell.run(0).epochs)}
        assert {(trial.seed, trial.holdout) for trial in trials} == {(TUNING_SEED, 0.1)}
        assert all(cell.run(seed).holdout is None for seed in range(cell.panel.seeds))


@pytest.mark.parametrize("profile", ["paper", "cpu"])
def test_every_comparison_of_methods_has_a_row_with_shaped_noise(profile: str) -> None:
    for artifact in paper.ARTIFACTS:
        for panel in artifact.panels[profile]:
            shaped = any(variant.method == "dp-pmlf-shaped" for variant in panel.variants)
            assert shaped == (artifact.name not in ("figure-6", "figure-7")), artifact.name


@pytest.mark.parametrize("profile", ["paper", "cpu", "smoke"])
def test_shaped_rows_have_groups_of_at_least_a_batch(profile: str) -> None:
    found = 0
    for artifact in paper.ARTIFACTS:
        for cell in artifact.cells(profile):
            setting, bands = cell.panel.setting, cell.variant.options.bands
            if bands is not None:
                records = setting.records or paper.RECORDS[setting.dataset]
                assert bands * setting.batch_size <= records - round(HELD_OUT_FRACTION * records)  # in a trial too
                found += 1
    assert found > 0


def test_the_paper_profile_has_the_papers_setting() -> None:
    cell = [cell for cell in paper.artifact("table-1").cells("paper") if cell.variant.method == "dp-pmlf"][-1]
    spec = cell.run(4, None)
    assert (spec.method, spec.dataset, spec.model, spec.epsilon) == ("dp-pmlf", "cifar100", "vit", 8.0)
    assert (spec.lr, spec.batch_size, spec.clip_norm, spec.delta, spec.epochs) == (0.5, 1000, 1.0, 1 / 50_000, 50)
    assert (spec.options.a, spec.options.b) == ((-0.9,), (0.15, -0.05))
    assert [cell.epsilon for cell in paper.artifact("table-4").cells("paper")][::9][:4] == [2.0, 4.0, 6.0, 8.0]


@pytest.mark.parametrize(("dataset", "epochs"), [("mnist", 25), ("cifar10", 50)])
def test_the_cpu_profile_keeps_the_papers_noise(dataset: str, epochs: int) -> None:
    """Its records and epochs keep E B / n, and so the noise multiplier, with fewer steps."""
    panel = next(
        panel
        for artifact in paper.ARTIFACTS
        for panel in artifact.panels["cpu"]
        if panel.setting.dataset == dataset
        and panel.setting.records
        and panel.setting.model == "cnn5"
        and 1.0 in panel.epsilons
    )

    def noise(records: int, epochs: float) -> float:
        rate, steps = 1000 / records, round(epochs * records / 1000)
        return accounting.noise_multiplier(target_epsilon=1.0, target_delta=1e-5, sample_rate=rate, steps=steps)

    assert panel.setting.records is not None and panel.setting.epochs is not None
    reduced = noise(panel.setting.records, panel.setting.epochs)
    assert reduced == pytest.approx(noise(paper.RECORDS[dataset], epochs), rel=0.1)


def test_a_run_that_two_artifacts_need_has_one_key() -> None:
    def keys(name: str) -> set[str]:
        return {run_key(cell.run(0)) for cell in paper.artifact(name).cells("cpu")}

    assert keys("figure-2") <= keys("figure-4")
    assert keys("figure-6") & keys("table-4") and keys("figure-6") & keys("figure-7")
    assert keys("figure-5") <= keys("table-3")
    assert len(keys("table-4")) == 4 * 9 + 2 * 9


def test_different_runs_have_different_keys_and_keys_survive_json() -> None:
    spec = paper.artifact("table-4").cells("cpu")[0].run(0)
    assert run_key(RunSpec.from_json(spec.to_json())) == run_key(spec)
    assert len({run_key(spec), run_key(replace(spec, lr=0.1)), run_key(replace(spec, seed=1))}) == 3


def test_the_stored_records_are_of_the_runs_that_the_artifacts_plan() -> None:
    """Else `pmlf reproduce` would run them again, and drop them from their record."""
    for path in STORED.glob("*-cpu-shared.json"):
        record = json.loads(path.read_text())
        cells = paper.artifact(record["artifact"]).cells("cpu")
        planned = {run_key(cell.run(seed)) for cell in cells for seed in range(cell.panel.seeds)}
        assert {run["key"] for cell in record["cells"] for run in cell["runs"]} <= planned, path.name


@pytest.mark.parametrize(
    ("name", "dataset", "variant", "epsilon", "mean", "std"),
    [
        ("table-1", "cifar10", "DP-PMLF", 1, 40.96, 1.18),
        ("table-2", "sst2", "DPSGD", 8, 90.83, 0.38),
        ("table-3", "cifar100", "LP-DPSGD", 8, 13.34, 0.09),
        ("table-4", "cifar10", "a {}, b {1}", 8, 64.57, 0.68),
    ],
)
def test_the_papers_numbers_are_the_papers(
    name: str, dataset: str, variant: str, epsilon: int, mean: float, std: float
) -> None:
    """Some cells of its tables, copied from the paper a second time."""
    (cell,) = (
        cell
        for cell in NUMBERS[name]["cells"]
        if (cell["dataset"], cell["variant"], cell["epsilon"]) == (dataset, variant, epsilon)
    )
    assert (cell["mean"], cell["std"]) == (mean, std)


@pytest.mark.parametrize("name", ["table-1", "table-2", "table-3", "table-4"])
def test_each_number_of_the_paper_has_a_cell(name: str) -> None:
    ours = {
        (cell.panel.setting.dataset, cell.panel.setting.model, cell.variant.label, cell.epsilon)
        for cell in paper.artifact(name).cells("paper")
    }
    theirs = {(c["dataset"], c["model"], c["variant"], float(c["epsilon"])) for c in NUMBERS[name]["cells"]}
    assert theirs <= ours
