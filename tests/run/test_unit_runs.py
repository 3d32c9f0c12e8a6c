"""Runs that protect units of several records: accounting, certificate, ledger, resuming, audit and command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import pmlf
from pmlf import Ledger, PrivateRun, accounting, audit, methods
from pmlf.cli.main import main
from pmlf.evidence.certificate import examined, sealed
from pmlf.evidence.certificate_page import page
from small_runs import finish, private, small, weights
from twins import write_table, write_unit_folders

IDS = np.repeat(np.arange(40), 3)  # of 120 records
OF_UNITS: dict[str, Any] = {"units": IDS, "unit_name": "patient", "max_records_per_unit": 2, "batch_size": 10}


def of_units(**more: Any) -> PrivateRun:
    return private(small(), **{**OF_UNITS, **more})


def test_the_accountant_counts_units() -> None:
    run = of_units()
    z = accounting.noise_multiplier(target_epsilon=2.0, target_delta=1e-3, sample_rate=10 / 40, steps=6)
    assert run.private_step.settings.noise_multiplier == z
    assert of_units(epochs=3, steps=None).steps == 12  # ceil(3 * 40 / 10)
    assert "protects   one patient; 40 units, 120 records, added or removed" in repr(run)
    assert "Poisson, 10 of 40 units expected" in repr(run)


def test_the_certificate_says_what_is_protected_and_is_recomputed() -> None:
    document = finish(of_units()).certificate()
    assert document["unit_of_privacy"] == "one patient, with all its records"
    assert document["adjacency"] == "add or remove one patient with all its records"
    assert (document["units"], document["records"]) == ({"name": "patient", "count": 40, "most_records": 2}, 120)
    assert examined(document)[1] is None
    html = page(document)
    assert "one patient; 40 units, 120 records" in html and "differ in one patient" in html


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"units": {"name": "patient", "count": 60, "most_records": 2}}, "contradicts itself: sample_rate"),
        ({"units": {"name": "record", "count": 40, "most_records": 2}}, "its units are records"),
        ({"records": 39}, "more than its records"),
        ({"units": {"name": "person", "count": 40, "most_records": 2}}, "unit_of_privacy"),
    ],
)
def test_a_certificate_whose_units_do_not_agree_is_refused(changes: dict[str, Any], said: str) -> None:
    document = sealed({**finish(of_units()).certificate(), **changes})
    try:
        answer = str(examined(document)[1])
    except ValueError as error:
        answer = str(error)
    assert said in answer


@pytest.mark.slow
def test_a_ledger_holds_runs_of_one_unit_of_privacy(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    with Ledger(path, dataset="visits") as ledger:
        finish(of_units(ledger=ledger, noise_multiplier=2.0, target_epsilon=None))
    assert '"unit": "patient"' in path.read_text()
    with Ledger(path, dataset="visits") as ledger, pytest.raises(ValueError, match="one ledger per unit of privacy"):
        private(ledger=ledger)
    with Ledger(path, dataset="visits") as ledger:
        finish(of_units(ledger=ledger, target_epsilon=60.0))


def test_a_resumed_run_ends_with_the_same_bits() -> None:
    whole = finish(of_units(seed=3))
    first = finish(of_units(seed=3), until=3)
    second = of_units(seed=3)
    second.load_state_dict(first.state_dict())
    assert torch.equal(weights(finish(second).model), weights(whole.model))


@pytest.mark.parametrize("changes", [{"units": IDS // 2, "batch_size": 10}, {"unit_name": "person"}])
def test_a_run_is_not_resumed_with_other_units(changes: dict[str, Any]) -> None:
    state = finish(of_units(seed=3), until=2).state_dict()
    with pytest.raises(ValueError, match="the state has"):
        of_units(seed=3, **changes).load_state_dict(state)


def test_units_of_one_record_train_like_records() -> None:
    """The same draws and noise: a unit of one record is that record."""
    alone = finish(private(small(), seed=5, units=np.arange(120), batch_size=30, max_records_per_unit=1))
    assert torch.allclose(weights(alone.model), weights(finish(private(small(), seed=5)).model), atol=1e-6)


@pytest.mark.parametrize("option", [{"gradients": "vmap"}, {"gradients": "one-by-one"}, {"method": "dp-pmlf-shaped"}])
def test_every_way_to_train_takes_units(option: dict[str, Any]) -> None:
    more = {"batch_size": 4} if "method" in option else {}
    assert finish(of_units(**option, **more)).steps_done == 6


def test_augmentation_changes_records() -> None:
    seen: list[tuple[int, ...]] = []

    def change(batch: Any, uniforms: Any) -> Any:
        seen.append((len(batch[0]), *uniforms.shape))
        return batch[0] + 0.1 * uniforms.to(batch[0]), batch[1]

    finish(of_units(augmentation=pmlf.Augmentation(function=change, draws=1)))
    assert seen and all(records == rows and draws == 1 for records, rows, draws in seen)


# audit


@pytest.mark.slow
def test_a_canary_unit_of_twenty_records_stays_below_the_claim() -> None:
    settings = audit.AuditSettings(epsilon=8.0, steps=2, canaries=600, records_per_unit=20, seed=1)
    report = audit.audit_method(methods.dp_pmlf(), settings)
    assert not report.refuted
    assert max(bound.epsilon for bound in report.bounds) > 3.0  # it does see them


def test_the_same_records_clipped_one_by_one_and_claimed_as_units_are_caught() -> None:
    control = next(control for control in audit.CONTROLS if control.name == "records-for-units")
    report = audit.audit_control(control, audit.AuditSettings(epsilon=2.0, canaries=2000, seed=1))
    assert report.refuted


# command line


def write_visits(path: Path, people: int = 60) -> Path:
    generator = np.random.default_rng(0)
    rows = [
        {"age": int(age), "ill": "yes" if age > 50 else "no", "patient_id": f"p{person:03}"}
        for person in range(people)
        for age in generator.integers(20, 90, generator.integers(1, 9))
    ]
    order = generator.permutation(len(rows))
    return write_table(path, [rows[place] for place in order])


OWN = ["--columns", "age=0:110", "--label-column", "ill", "--labels", "no", "yes", "--model", "linear"]
TRAIN = [*OWN, "--unit-column", "patient_id"]
SHORT = ["--batch-size", "20", "--steps", "3", "--epsilon", "3", "--delta", "1e-3", "--json"]


@pytest.mark.slow
def test_train_protects_the_units_of_a_column(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table, out = write_visits(tmp_path / "visits.csv"), tmp_path / "run"
    assert main(["train", "--dataset", str(table), *TRAIN, *SHORT, "--holdout", "0.2", "--out", str(out)]) == 0
    capsys.readouterr()
    certificate = json.loads((out / "certificate.json").read_text())
    assert certificate["units"] == {"name": "patient_id", "count": 48, "most_records": 32}
    assert certificate["sample_rate"] == pytest.approx(20 / 48)
    assert main(["account", "--certificate", str(out / "certificate.json")]) == 0
    assert main(["train", "--resume", str(out)]) == 0
    assert "for adding or removing one patient_id with all records" in capsys.readouterr().out
    assert main(["export", str(out)]) == 0
    card = (out / "hub" / "README.md").read_text()
    assert "for any one patient_id (add or remove one patient_id with all its records)" in card
    assert "any one of 48 (patient_id)" in card and "A person with several records" not in card


def test_a_holdout_keeps_whole_units(tmp_path: Path) -> None:
    from pmlf.experiments import tasks
    from pmlf.experiments.options import OwnData
    from pmlf.experiments.spec import RunSpec
    from pmlf.experiments.splits import HOLDOUT, indices

    own = OwnData(columns=("age=0:110",), label_column="ill", labels=("no", "yes"), unit_column="patient_id")
    spec = RunSpec(dataset=str(write_visits(tmp_path / "visits.csv")), own=own, model="linear", holdout=0.25)
    task, ids = tasks.prepare(spec), np.array(pmlf.data.unit_column(spec.dataset, "patient_id"))
    kept, held = (set(ids[indices(part)]) for part in (task.train, task.judged_on[HOLDOUT]))
    assert not kept & held and len(held) == 15 and task.population == len(kept) == 45


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--unit-column", "patient"], "has no column 'patient', only 'age', 'ill', 'patient_id'"),
        (["--max-records-per-unit", "3"], "--max-records-per-unit is only for --unit-column"),
        (["--unit-column", "patient_id", "--max-records-per-unit", "999"], "is more than"),
        (["--unit-column", "patient_id", "--max-records-per-unit", "0"], "--max-records-per-unit=0 is not a whole"),
    ],
)
def test_mistakes_with_units_are_answered(
    options: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["train", "--dataset", str(write_visits(tmp_path / "visits.csv")), *OWN, *SHORT, "--holdout", "0.2"]
    assert main([*given, *options, "--out", str(tmp_path / "run")]) != 0
    assert said in capsys.readouterr().err


def test_models_that_sum_over_records_refuse_units(tmp_path: Path) -> None:
    from pmlf.experiments import prior_linear
    from pmlf.experiments.options import OwnData
    from pmlf.experiments.spec import RunSpec

    with pytest.raises(ValueError, match="`unit_column` is not a setting of prior-linear, which protects records"):
        prior_linear.run(RunSpec(model="prior-linear", own=OwnData(unit_column="patient")), tmp_path / "run")


def test_a_record_of_nobody_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"age": 30 + i, "ill": "no", "patient_id": "" if i == 4 else f"secret{i}"} for i in range(30)]
    table = write_table(tmp_path / "visits.csv", rows)
    assert main(["train", "--dataset", str(table), *TRAIN, *SHORT, "--holdout", "0.1"]) != 0
    said = capsys.readouterr().err
    assert "has no 'patient_id'" in said and "secret" not in said


def test_images_name_their_units_in_metadata(tmp_path: Path) -> None:
    folder = tmp_path / "train"
    folder.mkdir()
    (folder / "metadata.csv").write_text("file_name,label,patient\na.png,cat,7\nb.png,dog,8\nc.png,cat,7\n")
    assert pmlf.data.unit_column(tmp_path, "patient") == ["7", "8", "7"]
    with pytest.raises(ValueError, match="no column 'who', only 'file_name', 'label', 'patient'"):
        pmlf.data.unit_column(tmp_path, "who")
    (folder / "metadata.csv").unlink()
    with pytest.raises(ValueError, match=r"write metadata.csv with the columns file_name, label and patient"):
        pmlf.data.unit_column(tmp_path, "patient")


# folders of images

SCANS = {"qqann": 5, "qqbob": 1, "qqcy": 3, "qqdee": 2, "qqeve": 4, "qqfay": 1}  # the images of each patient


def test_folders_of_images_are_units_also_across_classes(tmp_path: Path) -> None:
    """A patient's images have one brightness, by which they are found again in what is loaded and in what is drawn."""
    from pmlf.experiments import tasks
    from pmlf.experiments.options import OwnData
    from pmlf.experiments.spec import RunSpec
    from pmlf.mechanism.noise import SeededRandomness
    from pmlf.sampling import PoissonBatches

    folder, brightness = write_unit_folders(tmp_path / "scans", SCANS, ("healthy", "ill"))
    own = OwnData(labels=("healthy", "ill"), unit_column="patient", image_size=8)
    task = tasks.prepare(RunSpec(dataset=str(folder), own=own, model="linear"))
    assert task.units is not None and task.units.description == "one patient; 6 units, 16 records"
    assert task.population == 6 and isinstance(task.train, pmlf.data.ImageDataset)
    seen = task.train.images[:, 0, 4, 4].numpy()
    assert [brightness[name] for name in pmlf.data.unit_column(folder, "patient")] == seen.tolist()
    sampler = PoissonBatches(task.train, expected_batch_size=3, randomness=SeededRandomness(0), units=task.units)
    for step in range(20):
        drawn = seen[np.concatenate([np.zeros(0, int), *sampler.draw(step)])]
        assert all(int((drawn == brightness[name]).sum()) in (0, count) for name, count in SCANS.items())


@pytest.mark.slow
def test_train_protects_the_folders_of_images(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, _ = write_unit_folders(tmp_path / "scans", SCANS, ("healthy", "ill"))
    given = ["train", "--dataset", str(folder), "--labels", "healthy", "ill", "--image-size", "8", "--model", "linear"]
    short = ["--batch-size", "2", "--steps", "2", "--epsilon", "8", "--delta", "1e-2", "--json"]
    assert main([*given, *short, "--out", str(tmp_path / "none")]) == 2
    assert "give --unit-column, such as patient" in capsys.readouterr().err
    assert main([*given, *short, "--unit-column", "patient", "--out", str(tmp_path / "run")]) == 0
    certificate = json.loads((tmp_path / "run" / "certificate.json").read_text())
    assert certificate["adjacency"] == "add or remove one patient with all its records"
    assert (certificate["units"]["count"], certificate["records"]) == (6, 16)
    assert not any("qq" in path.read_text(errors="replace") for path in (tmp_path / "run").glob("*.json*"))
    (folder / "train" / "ill" / "qqcy" / "1.png").rename(folder / "train" / "ill" / "nobodys.png")
    assert main([*given, *short, "--unit-column", "patient", "--out", str(tmp_path / "other")]) == 2
    said = capsys.readouterr().err
    assert "does not tell whose each image is" in said and "nobodys" not in said


def test_models_that_sum_over_records_refuse_folders_of_units(tmp_path: Path) -> None:
    from pmlf.experiments import prior_linear
    from pmlf.experiments.spec import RunSpec

    folder, _ = write_unit_folders(tmp_path / "scans", SCANS, ("healthy", "ill"))
    with pytest.raises(ValueError, match="have folders of images in them"):
        prior_linear.run(RunSpec(model="prior-linear", dataset=str(folder)), tmp_path / "run")


@pytest.mark.parametrize(("name", "value"), [("max_records_per_unit", 0), ("unit_name", "")])
def test_errors_name_the_arguments_of_make_private(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{name}={value!r}"):
        of_units(**{name: value})
