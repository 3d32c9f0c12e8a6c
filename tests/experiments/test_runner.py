"""Specs, their execution, and the folder of a run."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from folders import RUN_FILES
from pmlf import data, evaluate, models
from pmlf.experiments import runner, tasks
from pmlf.experiments.results import Evaluation, SilentObserver
from pmlf.experiments.spec import MethodOptions, RunSpec, Setting, comparison, default_delta
from pmlf.run import making as training

QUICK = RunSpec(model="linear", steps=3, batch_size=20, noise_multiplier=1.0, seed=0)


def quick(**changes: object) -> RunSpec:
    return RunSpec(**{**vars(QUICK), **changes})


def weights(out: Path) -> dict[str, torch.Tensor]:
    return safetensors.torch.load_file(out / "model.safetensors")


def same(first: Path, second: Path) -> bool:
    a, b = weights(first), weights(second)
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


class StopAt(SilentObserver):
    """Raises an error after a step."""

    def __init__(self, step: int, error: BaseException) -> None:
        self._step, self._error = step, error

    def stepped(self, step: int, training_loss: float | None) -> None:
        if step == self._step:
            raise self._error


class Record(SilentObserver):
    def __init__(self) -> None:
        self.steps: list[int] = []
        self.losses: list[float | None] = []
        self.evaluations: list[Evaluation] = []

    def stepped(self, step: int, training_loss: float | None) -> None:
        self.steps.append(step)
        self.losses.append(training_loss)

    def evaluated(self, evaluation: Evaluation) -> None:
        self.evaluations.append(evaluation)


def test_a_spec_survives_json() -> None:
    spec = RunSpec(method="lp-dpsgd", epsilon=2.0, options=MethodOptions(a=(), b=(0.5, 0.5)), seed=7)
    assert RunSpec.from_json(spec.to_json()) == spec


def test_a_spec_with_an_unknown_field_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown field 'colour'"):
        RunSpec.from_json('{"colour": 1}')


def test_a_resolved_spec_has_all_defaults_filled_in() -> None:
    resolved = RunSpec(method="inner-outer", options=MethodOptions(outer_momentum=0.5)).resolved(12_000)
    assert (resolved.epsilon, resolved.delta) == (3.0, 1e-5)
    assert resolved.noise_multiplier is None and resolved.epochs is not None and resolved.steps is None
    assert resolved.options == MethodOptions(k=2, gamma=0.1, outer_momentum=0.5)
    assert resolved.resolved(12_000) == resolved


def test_the_default_delta_is_below_one_record() -> None:
    assert default_delta(12_000) == 1e-5
    assert default_delta(1_000_000) == 1_000_000**-1.1 < 1e-6


@pytest.mark.parametrize(
    ("method", "options", "takes"),
    [
        ("dpsgd", MethodOptions(k=2), "`k` is not an option of dpsgd, which takes no options"),
        ("lp-dpsgd", MethodOptions(beta=0.1), "`beta` is not an option of lp-dpsgd, which takes `a`, `b`"),
        (
            "inner-outer",
            MethodOptions(beta=0.9),
            "`beta` is not an option of inner-outer, which takes `k`, `gamma`, `outer_m",
        ),
        ("dp-pmlf", MethodOptions(kappa=0.7), "`kappa` is not an option of dp-pmlf, which takes `k`, `beta`, `a`, `b`"),
    ],
)
def test_an_option_of_another_method_is_refused(method: str, options: MethodOptions, takes: str) -> None:
    with pytest.raises(ValueError, match=takes):
        RunSpec(method=method, options=options).build_method()


def test_a_comparison_gives_each_method_the_options_it_takes() -> None:
    specs = comparison(Setting(options=MethodOptions(k=3, beta=0.2)), ["dpsgd", "inner-outer", "dp-pmlf"])
    assert [spec.options for spec in specs] == [MethodOptions(), MethodOptions(k=3), MethodOptions(k=3, beta=0.2)]
    with pytest.raises(ValueError, match="`kappa` is not an option of dpsgd, dp-pmlf"):
        comparison(Setting(options=MethodOptions(kappa=0.5)), ["dpsgd", "dp-pmlf"])
    with pytest.raises(ValueError, match="dpsgd dpsgd"):
        comparison(Setting(), ["dpsgd", "dpsgd"])


@pytest.mark.slow
def test_a_run_leaves_a_folder_that_repeats_it(tmp_path: Path) -> None:
    out = tmp_path / "deep" / "run"
    result = runner.run(QUICK, out)
    assert sorted(path.name for path in out.iterdir()) == RUN_FILES
    spec = RunSpec.from_json((out / "spec.json").read_text())
    assert spec == result.spec == QUICK.resolved(12_000)
    again = runner.run(spec, tmp_path / "again")
    assert same(out, again.out)

    certificate = json.loads((out / "certificate.json").read_text())
    assert certificate["released_steps"] == result.steps == result.planned_steps == 3
    assert certificate["epsilon_at_released_steps"]["pld"] == result.epsilon
    (line,) = (out / "metrics.jsonl").read_text().splitlines()
    (low, high), each = (json.loads(line)["scores"]["test"][name] for name in ("interval", "per_class"))
    assert json.loads(line) == {
        "step": 3,
        "epoch": 0.005,
        "epsilon": result.epsilon,
        "split": "test",
        "test_accuracy": result.test_accuracy,
        "scores": {
            "test": {
                "records": 2000,
                "accuracy": result.test_accuracy,
                "interval": [low, high],
                "per_class": each,
                "metric": "accuracy",
            }
        },
    }
    assert low < result.test_accuracy < high and sum(each) / 10 == pytest.approx(result.test_accuracy)

    images = data.load()
    model = models.build("linear", in_channels=1, image_size=28, classes=10)
    model.load_state_dict(weights(out))
    assert evaluate(model, images.test, collate_fn=data.collate) == result.test_accuracy


@pytest.mark.slow
def test_an_average_is_evaluated_and_saved_next_to_the_last_iterate(tmp_path: Path) -> None:
    plain = runner.run(QUICK, tmp_path / "plain")
    result = runner.run(quick(ema=0.9), tmp_path / "run")
    assert same(tmp_path / "plain", tmp_path / "run") and plain.ema_accuracy is None
    averaged = safetensors.torch.load_file(tmp_path / "run" / "model-ema.safetensors")
    assert averaged.keys() == weights(tmp_path / "run").keys()
    model = models.build("linear", in_channels=1, image_size=28, classes=10)
    model.load_state_dict(averaged)
    assert evaluate(model, data.load().test, collate_fn=data.collate) == result.ema_accuracy


@pytest.mark.slow
def test_the_seed_alone_decides_the_weights(tmp_path: Path) -> None:
    for name, seed in [("a", 1), ("b", 1), ("c", 2), ("d", None), ("e", None)]:
        runner.run(quick(seed=seed), tmp_path / name)
    assert same(tmp_path / "a", tmp_path / "b")
    assert not same(tmp_path / "a", tmp_path / "c")
    assert not same(tmp_path / "d", tmp_path / "e")


@pytest.mark.slow
def test_secure_noise_is_an_option_of_the_spec_and_named_in_the_certificate(tmp_path: Path) -> None:
    runner.run(quick(secure_noise=True), tmp_path / "hardened")
    runner.run(quick(), tmp_path / "plain")
    assert not same(tmp_path / "hardened", tmp_path / "plain")
    assert "half the sum of four" in json.loads((tmp_path / "hardened" / "certificate.json").read_text())["randomness"]


@pytest.mark.slow
def test_methods_of_equal_seed_share_initial_weights_draws_and_noise(tmp_path: Path) -> None:
    runner.run(quick(method="dpsgd"), tmp_path / "dpsgd")
    plain = MethodOptions(k=1, a=(), b=(1.0,))
    runner.run(quick(method="dp-pmlf", options=plain), tmp_path / "plain")
    assert same(tmp_path / "dpsgd", tmp_path / "plain")


@pytest.mark.slow
def test_a_run_is_evaluated_once_per_epoch_and_at_the_end(tmp_path: Path) -> None:
    record = Record()
    spec = quick(method="dpsgd", batch_size=6000, max_physical_batch_size=6500, steps=5)
    result = runner.run(spec, tmp_path / "run", observer=record)
    assert record.steps == [1, 2, 3, 4, 5]
    assert [(e.step, e.epoch) for e in record.evaluations] == [(2, 1.0), (4, 2.0), (5, 2.5)]
    assert tuple(record.evaluations) == result.evaluations
    assert record.losses == [None] * 5
    spent = [e.epsilon for e in record.evaluations]
    assert spent == sorted(spent) and spent[-1] == result.epsilon


@pytest.mark.slow
def test_the_training_loss_is_shown_only_on_request(tmp_path: Path) -> None:
    record = Record()
    runner.run(QUICK, tmp_path / "run", observer=record, show_sensitive=True)
    assert all(loss is not None and loss > 0 for loss in record.losses)
    metrics = json.loads((tmp_path / "run" / "metrics.jsonl").read_text())
    assert metrics["training_loss"] == record.losses[-1]
    assert "not covered by epsilon" in metrics["training_loss_is"]
    assert "training loss" in json.loads((tmp_path / "run" / "certificate.json").read_text())["not_accounted_for"][-1]


@pytest.mark.slow
def test_showing_the_loss_does_not_change_the_training(tmp_path: Path) -> None:
    runner.run(QUICK, tmp_path / "quiet")
    runner.run(QUICK, tmp_path / "loud", show_sensitive=True)
    assert same(tmp_path / "quiet", tmp_path / "loud")


@pytest.mark.slow
def test_an_interrupted_run_keeps_its_results(tmp_path: Path) -> None:
    result = runner.run(QUICK, tmp_path / "run", observer=StopAt(2, KeyboardInterrupt()))
    assert result.interrupted and (result.steps, result.planned_steps) == (2, 3)
    assert result.test_accuracy is None
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == sorted([*RUN_FILES, "checkpoint.safetensors"])
    certificate = json.loads((tmp_path / "run" / "certificate.json").read_text())
    assert certificate["released_steps"] == 2
    assert 0 < result.epsilon < certificate["epsilon_at_planned_steps"]["pld"]
    runner.run(quick(steps=2), tmp_path / "shorter")
    assert same(tmp_path / "run", tmp_path / "shorter")


@pytest.mark.slow
@pytest.mark.parametrize("stop", [None, 2])
def test_others_can_read_released_files_only(stop: int | None, tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        observer = None if stop is None else StopAt(stop, KeyboardInterrupt())
        results = runner.compare([QUICK], tmp_path / "all", observer=observer, show_sensitive=True)
    finally:
        os.umask(before)
    run = results[0].out
    assert stat.S_IMODE(run.stat().st_mode) == 0o700
    readable = {path.name for path in (tmp_path / "all").rglob("*") if path.is_file() and path.stat().st_mode & 0o077}
    released = {"certificate.html", "certificate.json", "model.json", "model.safetensors"}
    assert readable - {"ledger.jsonl"} == released
    assert (run / "checkpoint.safetensors").exists() == (stop is not None)


@pytest.mark.parametrize("name", ["spec.json", "ledger.jsonl", ".notes.partial", ".spec.json.partial/notes"])
def test_a_folder_that_is_not_of_a_run_is_not_removed(name: str, tmp_path: Path) -> None:
    file = tmp_path / "mine" / name
    file.parent.mkdir(parents=True)
    file.write_text('{"of": "somebody else"}')
    with pytest.raises(ValueError, match="mine"):
        runner.run(QUICK, tmp_path / "mine", resume=True)
    assert file.read_text() == '{"of": "somebody else"}'


@pytest.mark.slow
def test_an_error_after_a_release_leaves_a_certificate(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="fault"):
        runner.run(QUICK, tmp_path / "run", observer=StopAt(1, RuntimeError("fault")))
    assert json.loads((tmp_path / "run" / "certificate.json").read_text())["released_steps"] == 1


@pytest.mark.slow
def test_an_error_before_the_first_release_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: training.PrivateRun, batch: object) -> None:
        raise ValueError("refused")

    monkeypatch.setattr(training.PrivateRun, "step", refuse)
    with pytest.raises(ValueError, match="refused"):
        runner.compare([QUICK], tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_an_existing_folder_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "kept.txt").write_text("kept")
    for attempt in (lambda: runner.run(QUICK, tmp_path), lambda: runner.compare([QUICK], tmp_path)):
        with pytest.raises(ValueError, match="already exists"):
            attempt()
    assert [path.name for path in tmp_path.iterdir()] == ["kept.txt"]


def test_a_comparison_finds_an_error_in_its_last_method_before_it_trains(tmp_path: Path) -> None:
    specs = [QUICK, quick(method="lp-dpsgd", options=MethodOptions(b=(0.2,)))]
    with pytest.raises(ValueError, match="DC gain 2"):
        runner.compare(specs, tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_an_interrupted_comparison_reports_the_runs_so_far(tmp_path: Path) -> None:
    specs = comparison(quick(), ["dpsgd", "dp-pmlf", "disk"])
    stop = _StopSecond()
    results = runner.compare(specs, tmp_path / "run", observer=stop)
    assert [result.interrupted for result in results] == [False, True]
    document = json.loads((tmp_path / "run" / "comparison.json").read_text())
    assert [run["method"] for run in document["runs"]] == ["dpsgd", "dp-pmlf"]


class _StopSecond(SilentObserver):
    def __init__(self) -> None:
        self._method = ""

    def started(self, spec: RunSpec, steps: int) -> None:
        self._method = spec.method

    def stepped(self, step: int, training_loss: float | None) -> None:
        if self._method == "dp-pmlf":
            raise KeyboardInterrupt


@pytest.mark.slow
def test_a_run_on_fewer_records_is_a_run_on_a_smaller_dataset(tmp_path: Path) -> None:
    result = runner.run(quick(records=300, noise_multiplier=None, epsilon=2.0), tmp_path / "run")
    certificate = json.loads((tmp_path / "run" / "certificate.json").read_text())
    assert (certificate["records"], certificate["sample_rate"]) == (300, 20 / 300)
    assert result.test_accuracy is not None and result.test_accuracy * 300 == pytest.approx(
        round(result.test_accuracy * 300)
    )
    with pytest.raises(ValueError, match="records=0"):
        runner.run(quick(records=0), tmp_path / "none")


def test_an_unknown_device_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="device='abacus'"):
        runner.run(quick(device="abacus"), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_model_is_checked_on_synthetic_inputs_and_on_records_only_on_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[torch.Tensor] = []
    check = runner.check

    def watched(model: Any, loss_fn: Any, batch: Any, **options: Any) -> Any:
        seen.append(batch[0])
        return check(model, loss_fn, batch, **options)

    monkeypatch.setattr(runner, "check", watched)
    runner.run(quick(), tmp_path / "plain")
    shown: list[Any] = []
    runner.run(quick(), tmp_path / "shown", show_check=shown.append)
    records = tasks.prepare(quick()).train
    real = torch.stack([torch.as_tensor(records[i][0]) for i in range(4)])
    assert [torch.equal(batch.reshape(real.shape), real) for batch in seen] == [False, False, True]
    assert len(shown) == 1 and shown[0].samples == 4
    assert same(tmp_path / "plain", tmp_path / "shown")  # the check does not change the training
    assert sorted(p.name for p in (tmp_path / "shown").iterdir()) == sorted(
        p.name for p in (tmp_path / "plain").iterdir()
    )
