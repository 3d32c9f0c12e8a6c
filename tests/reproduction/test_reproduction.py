"""Running an artifact with either protocol, and its record."""

from __future__ import annotations

import json
import shutil
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from listeners import RecordingListener
from pmlf.cli.main import main
from pmlf.experiments import executors, jobs
from pmlf.reproduction import campaign as reproduction
from pmlf.reproduction import paper
from pmlf.reproduction.artifacts import Artifact
from pmlf.reproduction.campaign import ReproductionPlan

FULL = paper.artifact("figure-4")
PANEL = replace(FULL.panels["smoke"][0], epsilons=(8.0,), seeds=2)
PANEL = replace(PANEL, variants=tuple(v for v in PANEL.variants if v.method in ("dpsgd", "inner-outer")))
SMALL = replace(FULL, panels={"smoke": (PANEL,)})


def plan(out: Path, protocol: str = "shared", artifact: Artifact = SMALL, seeds: int | None = None) -> ReproductionPlan:
    return ReproductionPlan(artifact=artifact, profile="smoke", protocol=protocol, out=out, seeds=seeds)


def run(one: ReproductionPlan) -> tuple[dict[str, object], RecordingListener, list[str]]:
    listener = RecordingListener()
    failed = reproduction.reproduce(one, executors.in_this_process, listener)
    return json.loads(one.record_path.read_text()), listener, failed


@pytest.mark.slow
def test_the_record_holds_every_run_with_its_certificate_and_command(tmp_path: Path) -> None:
    record, listener, failed = run(plan(tmp_path))
    assert not failed and len(listener.began_keys) == 4
    assert record["command"] == "pmlf reproduce figure-4 --profile smoke --protocol shared"
    for cell in record["cells"]:
        assert [run["seed"] for run in cell["runs"]] == [0, 1]
        for one in cell["runs"]:
            certificate = cell["certificate"]
            assert certificate["method"]["name"] == cell["method"]
            assert one["epsilon"] == certificate["epsilon_at_released_steps"]["pld"] <= cell["target_epsilon"]
            assert one["accuracy"] == one["curve"][-1][1] and one["split"] == "test"
            assert one["cost"]["machine"]["cores"]


@pytest.mark.slow
def test_complete_runs_are_not_repeated_and_more_seeds_add_to_them(tmp_path: Path) -> None:
    first, _, _ = run(plan(tmp_path))
    again, listener, _ = run(plan(tmp_path))
    assert listener.began_keys == [] and again == first
    more, listener, _ = run(plan(tmp_path, seeds=3))
    assert len(listener.began_keys) == 2 and [len(cell["runs"]) for cell in more["cells"]] == [3, 3]


@pytest.mark.slow
def test_tuning_chooses_by_held_out_records_and_ends_on_all_of_them(tmp_path: Path) -> None:
    record, listener, failed = run(plan(tmp_path, "tuned", seeds=1))
    assert not failed and len(listener.began_keys) == 2 * len(PANEL.rates) + 2
    for cell in record["cells"]:
        held_out = {trial["lr"]: trial["accuracy"] for trial in cell["trials"]}
        gain = 10.0 if cell["method"] == "inner-outer" else 1.0
        assert sorted(held_out) == pytest.approx([rate / gain for rate in sorted(PANEL.rates)])
        assert {trial["split"] for trial in cell["trials"]} == {"holdout"}
        assert held_out[cell["lr"]] == max(held_out.values())
        (final,) = cell["runs"]
        assert final["lr"] == cell["lr"] and final["split"] == "test"
        folders = [tmp_path / "runs" / one["key"] for one in (*cell["trials"], final)]
        sizes = [json.loads((folder / "certificate.json").read_text())["records"] for folder in folders]
        assert sizes == [16, 16, 18]  # a tenth of 18 held out, rounded


def test_of_equally_good_rates_the_smallest_is_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = plan(tmp_path, "tuned")
    monkeypatch.setattr(reproduction, "read_run", lambda job: {"lr": job.spec.lr, "accuracy": 0.5})
    assert reproduction.chosen_rate(one, one.cells[0], {}) == min(PANEL.rates)
    monkeypatch.setattr(reproduction, "read_run", lambda job: {"lr": job.spec.lr, "accuracy": job.spec.lr})
    assert reproduction.chosen_rate(one, one.cells[0], {}) == max(PANEL.rates)
    monkeypatch.setattr(reproduction, "read_run", lambda job: None)
    assert reproduction.chosen_rate(one, one.cells[0], {}) is None


@pytest.mark.slow
def test_a_trial_is_as_long_as_a_final_run_and_the_certificate_says_it_is_not_accounted_for(tmp_path: Path) -> None:
    record, _, _ = run(plan(tmp_path, "tuned", seeds=1))
    for cell in record["cells"]:
        (final,) = cell["runs"]
        assert {trial["steps"] for trial in cell["trials"]} == {final["steps"]} == {4}
        said = cell["certificate"]["not_accounted_for"]
        assert "tuning: the settings were chosen by 2 trials on the same records" in said


@pytest.mark.slow
@pytest.mark.parametrize("protocol", ["shared", "tuned"])
def test_runs_in_a_record_stay_there(protocol: str, tmp_path: Path) -> None:
    first, _, _ = run(plan(tmp_path, protocol))
    fewer, listener, _ = run(plan(tmp_path, protocol, seeds=1))
    assert listener.began_keys == [] and fewer == first
    shutil.rmtree(tmp_path / "runs")
    again, listener, _ = run(plan(tmp_path, protocol))
    assert listener.began_keys == [] and again == first


@pytest.mark.slow
def test_runs_of_an_earlier_grid_stay_while_trials_of_a_larger_one_are_missing(tmp_path: Path) -> None:
    """A tuned record was emptied as soon as the first trial of a larger grid was written, or could not be run."""
    first, _, _ = run(plan(tmp_path, "tuned"))
    larger = replace(SMALL, panels={"smoke": (replace(PANEL, rates=(*PANEL.rates, 1.5)),)})
    shutil.rmtree(tmp_path / "runs")
    reproduction.write_record(plan(tmp_path, "tuned", larger))
    kept = json.loads(plan(tmp_path, "tuned").record_path.read_text())
    for before, cell in zip(first["cells"], kept["cells"], strict=True):
        assert all(cell[name] == before[name] for name in ("lr", "runs", "certificate")) and cell["runs"]


@pytest.mark.parametrize("damage", ["result.json", "certificate.json", "machine.json"])
def test_a_damaged_folder_is_a_failure_by_name_and_stops_nothing_else(damage: str, tmp_path: Path) -> None:
    one = plan(tmp_path, seeds=1)
    run(one)
    (folder, other) = (one.job(cell.run(0)).folder for cell in one.cells)
    one.record_path.unlink()
    (folder / damage).write_text("")
    shutil.rmtree(other)
    record, listener, failed = run(one)
    assert listener.began_keys == [folder.name, other.name]
    assert len(failed) == 1 and f"{str(folder)!r} is damaged" in failed[0]
    assert [len(cell["runs"]) for cell in record["cells"]] == [0, 1]


@pytest.mark.slow
def test_two_processes_can_write_one_record(tmp_path: Path) -> None:
    one = plan(tmp_path, seeds=1)
    run(one)
    errors: list[BaseException] = []

    def write() -> None:
        try:
            for _ in range(20):
                reproduction.write_record(one)
        except BaseException as error:
            errors.append(error)

    writers = [threading.Thread(target=write) for _ in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert not errors


def test_failures_are_reported_and_the_rest_is_recorded(tmp_path: Path) -> None:
    wrong = replace(PANEL.variants[0], label="wrong", method="nonsense")
    broken = replace(SMALL, panels={"smoke": (replace(PANEL, variants=(wrong, PANEL.variants[1]), seeds=1),)})
    record, _, failed = run(plan(tmp_path, artifact=broken))
    assert len(failed) == 1 and "nonsense, linear on fashion-mnist-small, epsilon 8, seed 0" in failed[0]
    assert [len(cell["runs"]) for cell in record["cells"]] == [0, 1]


def test_an_interrupted_artifact_leaves_a_record_of_what_was_run(tmp_path: Path) -> None:
    class Stop(RecordingListener):
        def began(self, job: jobs.Job) -> None:
            if self.errors:
                raise KeyboardInterrupt

    one = plan(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        reproduction.reproduce(one, executors.in_this_process, Stop())
    record = json.loads(one.record_path.read_text())
    assert [len(cell["runs"]) for cell in record["cells"]] == [1, 0]


@pytest.mark.slow
def test_the_record_is_up_to_date_after_every_run(tmp_path: Path) -> None:
    one, recorded = plan(tmp_path), []

    class Reading(RecordingListener):
        def ended(self, job: jobs.Job, error: str | None) -> None:
            record = json.loads(one.record_path.read_text())
            recorded.append(sum(len(cell["runs"]) for cell in record["cells"]))

    reproduction.reproduce(one, executors.in_this_process, Reading())
    assert len(recorded) > 1 and recorded == list(range(1, len(recorded) + 1))


@pytest.mark.slow
def test_a_seed_gives_methods_the_same_weights_and_batches(tmp_path: Path) -> None:
    """With k = 1 and no filter the ablation is DPSGD: equal models show equal initial weights, batches and noise."""
    plain = replace(PANEL.variants[0], label="plain", method="dp-pmlf-without-lf")
    plain = replace(plain, options=replace(plain.options, k=1))
    pair = replace(SMALL, panels={"smoke": (replace(PANEL, variants=(PANEL.variants[0], plain)),)})
    run(plan(tmp_path, artifact=pair))
    for seed in range(2):
        folders = [plan(tmp_path, artifact=pair).job(cell.run(seed)).folder for cell in pair.cells("smoke")]
        assert len({(folder / "model.safetensors").read_bytes() for folder in folders}) == 1


def test_a_device_does_not_change_the_folder_of_a_run(tmp_path: Path) -> None:
    here, elsewhere = plan(tmp_path), replace(plan(tmp_path), device="abacus", seeds=1)
    spec = here.cells[0].run(0)
    assert elsewhere.job(spec).folder == here.job(spec).folder and elsewhere.job(spec).spec.device == "abacus"
    _, _, failed = run(elsewhere)
    assert len(failed) == 2 and all("device='abacus'" in line for line in failed)


def test_an_unknown_protocol_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="protocol='fair' is not known: give one of shared, tuned"):
        plan(tmp_path, "fair")


def test_the_command_lists_the_artifacts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce", "--list", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert [one["name"] for one in listed["artifacts"]] == [one.name for one in paper.ARTIFACTS]
    assert main(["reproduce", "--list"]) == 0
    assert "figure-7" in capsys.readouterr().out


def test_the_command_says_what_failed_and_exits_nonzero(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(paper.BY_NAME, "figure-4", replace(SMALL, panels={"smoke": (replace(PANEL, seeds=1),)}))

    def refuse(job: jobs.Job, on_progress: jobs.OnProgress) -> None:
        raise ValueError("no room")

    monkeypatch.setattr(executors, "run_job", refuse)
    arguments = ["reproduce", "figure-4", "--profile", "smoke", "--out", str(tmp_path), "--json"]
    assert main(arguments) == 1
    printed = capsys.readouterr()
    assert len(json.loads(printed.out)["failed"]) == 2
    assert "pmlf: failed: dpsgd, linear" in printed.err and "no room" in printed.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no table or figure is given"),
        (["table-9"], "unknown artifact 'table-9'"),
        (["table-4", "--profile", "gpu"], "--profile='gpu' is not known"),
        (["table-4", "--seeds", "0"], "seeds=0"),
    ],
)
def test_the_command_refuses_in_one_sentence(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["reproduce", *arguments]) == 2
    assert message in capsys.readouterr().err
