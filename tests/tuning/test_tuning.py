"""Tuning in three modes: what each costs, what the certificate says, and what a killed tuning goes on with."""

from __future__ import annotations

import csv
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import dp_accounting
import numpy as np
import pytest
from dp_accounting import dp_event, rdp

from pmlf.cli.main import main
from pmlf.evidence import ledger
from pmlf.evidence.certificate import examined, sealed, selected
from pmlf.evidence.certificate_page import page
from pmlf.evidence.statement import PLD
from pmlf.experiments import runner, tasks
from pmlf.experiments.executors import in_this_process
from pmlf.experiments.jobs import Job
from pmlf.experiments.results import SilentObserver
from pmlf.experiments.spec import RunSpec
from pmlf.experiments.splits import HOLDOUT, indices
from pmlf.mechanism.composition import composed_epsilon
from pmlf.mechanism.renyi import quiet
from pmlf.mechanism.selection import Selection
from pmlf.tuning import Grid, TuningPlan, TuningResult, tune
from pmlf.tuning.plan import stored_plan
from pmlf.tuning.tuner import _begin

BASE = RunSpec(model="linear", records=500, batch_size=40, steps=3, epsilon=3.0, delta=1e-4, seed=1)
GRID = Grid.parsed(["lr=0.5,2"])
FEW = Selection(mean=3.0)


def run(plan: TuningPlan, out: Path, ran: list[str] | None = None) -> TuningResult:
    def execute(todo: Sequence[Job], listener: Any) -> None:
        if ran is not None:
            ran.extend(job.key for job in todo)
        in_this_process(todo, listener)

    return tune(plan, out, execute)


def accounted(seed: int | None = None) -> TuningPlan:
    return TuningPlan(base=replace(BASE, seed=seed), grid=GRID, mode="accounted", selection=FEW)


def with_draws(plan: TuningPlan, out: Path, draws: list[int]) -> None:
    """A tuning that has drawn its trials and begun none."""
    _begin(plan, out)
    (out / "secret").mkdir(mode=0o700)
    (out / "secret" / "draws.json").write_text(json.dumps({"draws": draws}))


# accounted


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, TuningResult]:
    out = tmp_path_factory.mktemp("accounted")
    with_draws(accounted(), out, [0, 1, 1])
    return out, run(accounted(), out)


@pytest.mark.slow
def test_the_total_claimed_is_that_of_dp_accounting(tuned: tuple[Path, TuningResult]) -> None:
    out, result = tuned
    document = json.loads((out / "best" / "certificate.json").read_text())
    step = dp_accounting.PoissonSampledDpEvent(
        40 / 400, dp_accounting.GaussianDpEvent(document["noise_multiplier"])
    )  # 500 records, of which a fifth scores the trials
    event = dp_event.RepeatAndSelectDpEvent(dp_accounting.SelfComposedDpEvent(step, 3), 3.0, 1.0)
    with quiet():
        total = float(rdp.RdpAccountant().compose(event).get_epsilon(1e-4))
    assert total <= 3.0 and total == pytest.approx(3.0, rel=1e-3)
    stored = json.loads((out / "best" / "result.json").read_text())
    for claimed in (document["epsilon"], result.epsilon, stored["certified_epsilon"], stored["epsilon"]):
        assert claimed == pytest.approx(total, rel=1e-12)
    assert examined(document)[1] is None
    assert "best of several runs" in page(document) and "for one trial alone" in page(document)


@pytest.mark.slow
def test_only_the_best_trial_is_left(tuned: tuple[Path, TuningResult]) -> None:
    out, result = tuned
    assert sorted(path.name for path in out.iterdir()) == ["best", "result.json", "tuning.json"]
    assert result.trials == () and "draws" not in (out / "result.json").read_text()
    assert result.best in GRID.candidates
    assert "secret" not in (out / "best" / "result.json").read_text()  # nor the number of the best trial


@pytest.mark.parametrize(
    "change",
    [
        {"epsilon": 1.0},
        {"selection": {"mean": 9.0, "distribution": "geometric"}},
        {"composition": "PLD: the steps were planned before the run and are all alike"},
    ],
)
def test_a_certificate_that_claims_less_than_all_trials_does_not_hold(
    change: dict[str, Any], tuned: tuple[Path, TuningResult]
) -> None:
    document = json.loads((tuned[0] / "best" / "certificate.json").read_text())
    assert examined(sealed({**document, **change}))[1] is not None


@pytest.mark.slow
def test_no_trial_is_possible_and_costs_the_same(tmp_path: Path) -> None:
    plan = replace(accounted(), selection=Selection(mean=3.0, distribution="poisson"))
    with_draws(plan, tmp_path, [])
    result = run(plan, tmp_path)
    assert result.best is None and result.epsilon == pytest.approx(3.0, rel=1e-3)
    assert run(plan, tmp_path).best is None


@pytest.mark.slow
def test_the_trials_are_drawn_as_the_selection_says() -> None:
    plan = TuningPlan(base=replace(BASE, seed=None), grid=GRID, mode="accounted", selection=Selection(mean=4.0))
    drawn = [plan.draws() for _ in range(1000)]
    numbers = np.array([len(each) for each in drawn])
    chosen = np.concatenate(drawn)
    assert abs(numbers.mean() - 4.0) < 5 * math.sqrt(12 / 1000)  # the variance of a geometric number is m (m - 1)
    assert abs(chosen.mean() - 0.5) < 5 * 0.5 / math.sqrt(len(chosen))
    seeded = accounted(seed=7)
    assert seeded.draws() == seeded.draws()


def test_a_largest_batch_has_no_accounting_for_the_best_of_several_runs(tuned: tuple[Path, TuningResult]) -> None:
    with pytest.raises(ValueError, match="leave `largest_batch` out"):
        TuningPlan(base=replace(BASE, largest_batch=60), grid=GRID, mode="accounted")
    document = json.loads((tuned[0] / "best" / "certificate.json").read_text())
    cut = {**document, "composition": PLD, "largest_batch": 60, "overflow": 1e-6}
    with pytest.raises(ValueError, match="has no accounting for the best of several runs"):
        selected(cut, FEW)


# killed and resumed

KILLED = """
import sys
from pathlib import Path
sys.path[:0] = sys.argv[2:]
import json
from pmlf.tuning import tune
from pmlf.tuning.plan import stored_plan
out = Path(sys.argv[1])
tune(stored_plan(out, json.loads((out / "tuning.json").read_text())), out)
"""


def killed_after_the_first_trial(out: Path, trials: Path) -> None:
    """Run the tuning in another process, and end it by SIGKILL when it has begun its second trial."""
    process = subprocess.Popen([sys.executable, "-c", KILLED, str(out)], env=os.environ)
    deadline = time.monotonic() + 120
    second = trials / "0001" / "ledger.jsonl"
    while not second.exists() or second.read_bytes().count(b"\n") < 4:  # two lines, and two steps
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["accounted", "held-out"])
def test_a_killed_tuning_neither_forgets_nor_repeats_a_trial(mode: str, tmp_path: Path) -> None:
    if mode == "accounted":
        plan, trials = replace(accounted(), base=replace(BASE, steps=60, seed=None)), tmp_path / "secret"
        with_draws(plan, tmp_path, [1, 0, 1])
    else:
        plan = TuningPlan(base=replace(BASE, steps=60, seed=None), grid=GRID, share=0.5)
        trials = tmp_path / "trials"
        _begin(plan, tmp_path)
    killed_after_the_first_trial(tmp_path, trials)
    before = (trials / "0000" / "ledger.jsonl").read_bytes()
    ran: list[str] = []
    result = run(plan, tmp_path, ran)
    assert "0000" not in ran and "0001" in ran
    if mode == "accounted":
        assert len(ran) == 2 and result.epsilon == pytest.approx(3.0, rel=1e-3)
        return
    assert (trials / "0000" / "ledger.jsonl").read_bytes() == before
    tallies = [ledger.read(trials / f"{number:04}" / "ledger.jsonl") for number in range(2)]
    counts = [sum(tally.events.values()) for tally in tallies]
    assert counts[0] == 60 and counts[1] >= 60  # steps lost with the process are paid for twice, and never forgotten
    total = composed_epsilon({event: sum(counts) for event in tallies[0].events}, delta=1e-4)
    assert result.tuning_epsilon == pytest.approx(total, rel=1e-6)


def test_a_complete_tuning_is_not_run_again(tuned: tuple[Path, TuningResult]) -> None:
    ran: list[str] = []
    assert run(accounted(), tuned[0], ran) == tuned[1] and not ran


def test_a_folder_keeps_its_plan(tmp_path: Path) -> None:
    plan = accounted()
    _begin(plan, tmp_path)
    assert stored_plan(tmp_path, json.loads((tmp_path / "tuning.json").read_text())) == plan
    with pytest.raises(ValueError, match="started with other settings"):
        run(replace(plan, selection=Selection(mean=2.0)), tmp_path)


# on other records


def test_trials_and_final_run_have_no_record_in_common() -> None:
    plan = TuningPlan(base=BASE, grid=GRID, share=0.3)
    trial, final = tasks.prepare(plan.trial(0, 0)), tasks.prepare(plan.final(0))
    seen = set(indices(trial.train)) | set(indices(trial.judged_on[HOLDOUT]))
    used = set(indices(final.train))
    assert not seen & used and len(seen) == 150 and len(used) == 350


def test_seeded_trials_and_the_final_run_share_no_noise() -> None:
    plan = TuningPlan(base=BASE, grid=GRID, share=0.3)
    seeds = [plan.trial(0, 0).seed, plan.trial(1, 1).seed, plan.final(0).seed]
    assert len(set(seeds)) == 3 and seeds[2] == BASE.seed


@pytest.mark.slow
def test_held_out_tuning_states_what_its_records_pay(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--model", "linear", "--records", "500", "--batch-size", "40", "--steps", "3", "--seed", "1"]
    options += ["--grid", "lr=0.5,2", "--share", "0.5"]
    assert main(["tune", *options, "--out", str(tmp_path / "tuned"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    certificate = json.loads((tmp_path / "tuned" / "best" / "certificate.json").read_text())
    assert certificate["records"] == 250 and examined(certificate)[1] is None
    assert found["epsilon"] == certificate["epsilon"] <= 3.0 < found["tuning_epsilon"] < 6.0
    with (tmp_path / "tuned" / "trials.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [float(row["score"]) for row in rows] == sorted((trial["score"] for trial in found["trials"]), reverse=True)
    assert (tmp_path / "tuned" / "trials.png").stat().st_size > 1000
    assert main(["tune", "--resume", str(tmp_path / "tuned"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == found


def test_the_number_of_bands_can_be_tuned(tmp_path: Path) -> None:
    plan = TuningPlan(base=replace(BASE, method="lp-dpsgd", batch_size=20), grid=Grid.parsed(["bands=1,2"]), share=0.5)
    result = run(plan, tmp_path / "tuned")
    certificate = json.loads((tmp_path / "tuned" / "best" / "certificate.json").read_text())
    assert [trial.candidate["bands"] for trial in result.ranked] in ([1, 2], [2, 1]) and result.best is not None
    assert ("noise_shape" in certificate["method"]) == (result.best["bands"] == 2)


@pytest.mark.slow
def test_unaccounted_tuning_is_said_in_the_certificate(tmp_path: Path) -> None:
    result = run(TuningPlan(base=BASE, grid=GRID, mode="unaccounted"), tmp_path)
    document = json.loads((tmp_path / "best" / "certificate.json").read_text())
    assert "tuning: the settings were chosen by 2 trials on the same records" in document["not_accounted_for"]
    assert result.tuning_epsilon is None and len(result.trials) == 2


def test_the_final_run_says_so_by_itself_also_if_it_is_interrupted(tmp_path: Path) -> None:
    class Stopped(SilentObserver):
        def stepped(self, step: int, training_loss: float | None) -> None:
            raise KeyboardInterrupt

    final = TuningPlan(base=BASE, grid=GRID, mode="unaccounted").final(0)
    for observer in (Stopped(), SilentObserver()):
        runner.run(final, tmp_path / "best", observer=observer, resume=True)
        document = json.loads((tmp_path / "best" / "certificate.json").read_text())
        assert "tuning: the settings were chosen by 2 trials on the same records" in document["not_accounted_for"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--grid", "rate=1,2"], "names are lr, clip-norm, clipping"),
        (["--grid", "lr=1,x"], "has a value that lr cannot have"),
        (["--grid", "lr=1,1"], "has a value twice"),
        (["--mode", "private"], "held-out, accounted, unaccounted"),
        (["--mode", "accounted", "--grid", "epochs=1,2"], "epochs changes it"),
        (["--mode", "accounted", "--grid", "bands=1,2"], "bands changes it"),
        (["--mode", "accounted", "--grid", "method=dp-pmlf-shaped,dpsgd"], "white noise"),
        (["--mode", "accounted", "--noise-multiplier", "1"], "calibrates the noise to the total: give --epsilon"),
        (["--holdout", "0.2"], "give --judged for trials, --final-holdout for the final run"),
        (["--mode", "accounted", "--public-dataset", "mnist"], "--public-dataset is for --mode='held-out'"),
        (["--share", "2"], "--share=2.0 is not in (0, 1)"),
        (["--resume", "nowhere"], "'nowhere' is not the folder of a tuning"),
        (["--resume", "nowhere", "--share", "0.5"], "has all settings of the tuning"),
    ],
)
def test_mistakes_are_answered(options: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", *options]) != 0
    assert said in capsys.readouterr().err
