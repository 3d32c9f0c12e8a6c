"""The benchmark: its document, recorded failures, and that all processes end. No times are tested."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import pmlf
from pmlf.bench import case, cases, contenders, growth, measure, modern, report, suite
from pmlf.bench.measure import BenchJob, Conditions, Outcome, race
from pmlf.cli.main import main

QUICK = ["--cases", "linear", "--contenders", "plain", "pmlf-k1", "vmap", "--rounds", "2", "--batch-scale", "0.05"]


def job(contender: str, case: str = "linear") -> BenchJob:
    return BenchJob(case=case, contender=contender, batch_scale=0.05, conditions=Conditions(threads=1))


def silent(line: str) -> None:
    pass


def text_of(*parts: Any) -> str:
    console = Console(width=80, file=io.StringIO())
    with console.capture() as captured:
        console.print(*parts, sep="\n")
    return captured.get()


# --- a small run


@pytest.mark.slow
def test_document_has_every_field(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out, picture = tmp_path / "bench.json", tmp_path / "bench.png"
    assert main(["bench", *QUICK, "--threads", "1", "--json", "--out", str(out), "--plot", str(picture)]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document == json.loads(out.read_text())
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert set(document["machine"]) >= {"cpu", "cores", "threads", "torch", "opacus", "date"}
    assert document["settings"]["rounds"] == 2 and document["settings"]["batch_scale"] == 0.05
    (case,) = document["cases"]
    assert (case["case"], case["batch"]) == ("linear", 50)
    assert [each["contender"] for each in case["contenders"]] == ["plain", "pmlf-k1", "vmap"]
    for each in case["contenders"]:
        assert each["error"] is None and len(each["seconds"]) >= 2 and each["parameters"] == 7850
        assert each["best_seconds"] == min(each["seconds"]) <= each["median_seconds"]
        assert each["time_ratio"] > 0 and each["peak_bytes"] >= 0
    plain, private, vmap = case["contenders"]
    assert plain["time_ratio"] == 1.0 and plain["clipped_sum_norm"] is None
    assert private["agrees"] and vmap["agrees"] and len(private["release_seconds"]) == len(private["seconds"])
    assert private["clipped_sum_norm"] == pytest.approx(vmap["clipped_sum_norm"], rel=1e-4)
    assert [each["holds"] is None for each in document["targets"]] == [False, True]


def test_unknown_names_and_numbers_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for options, said in (
        (["--cases", "vgg"], "'vgg'"),
        (["--contenders", "jax"], "'jax'"),
        (["--rounds", "0"], "--rounds=0"),
        (["--batch-scale", "0"], "--batch-scale=0.0"),
        (["--threads", "0"], "--threads=0"),
        (["--growth", "--cases", "vit"], "--growth"),
        (["--out", "nowhere/bench.json"], "nowhere"),
    ):
        assert main(["bench", *options]) == 2
        err = capsys.readouterr().err
        assert said in err and err.count("\n") == 1


# --- failures


@pytest.mark.slow
def test_a_failing_contender_is_recorded_and_the_others_continue() -> None:
    broken, working = race("linear", [job("plain", case="nothing"), job("plain")], 1, silent)
    assert broken.error is not None and broken.error.startswith("ValueError: unknown case 'nothing'")
    assert broken.best is None and broken.peak_bytes is None
    assert working.error is None and working.best is not None
    document = report.case_document("linear", 50, [broken, working])
    assert "plain failed: ValueError" in text_of(*report.case_results(document))


def test_a_process_that_dies_is_recorded_as_such() -> None:
    with measure._MeasuringProcess(job("plain")) as worker:
        os.kill(worker._process.pid, signal.SIGKILL)
        worker.take_turn()
        worker.take_turn()
        outcome = worker.outcome()
    assert outcome.error == "the process was killed by SIGKILL, perhaps out of memory"
    assert worker._process.returncode == -signal.SIGKILL


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="looks up children in /proc")
@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGKILL])
def test_all_processes_end_with_their_parent(tmp_path: Path, ending: signal.Signals) -> None:
    program = (
        "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
        "from pmlf.cli.main import main; sys.exit(main(sys.argv[1:]))"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", program, "bench", "--cases", "linear", "--contenders", "plain", "--rounds", "100000"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(pmlf.__file__).parents[1])},
        stderr=subprocess.PIPE,
        text=True,
    )
    with parent:
        assert parent.stderr is not None
        while "round 2" not in parent.stderr.readline():
            assert parent.poll() is None
        children = Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text().split()
        parent.send_signal(ending)
        parent.communicate(timeout=60)
    assert parent.returncode == (130 if ending == signal.SIGINT else -ending)
    assert children
    deadline = time.monotonic() + 30
    while any(_running(child) for child in children):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _running(process: str) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().split()[2] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


# --- the models that people fine-tune, with small sizes

SMALL = (
    modern.llama(layers=1, width=16, length=5, words=30, batch=3),
    modern.llama_lora(layers=1, width=16, length=5, words=30, batch=3, rank=2),
    modern.t5(layers=1, width=16, source=5, target=4, words=30, batch=3),
    modern.convnext(depths=(1, 1), width=8, size=16, batch=3),
    modern.lstm(layers=2, width=8, length=5, words=30, batch=3),
    modern.unet(width=4, size=8, batch=3),
)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")  # of vmap and Opacus
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("small", SMALL, ids=lambda each: each.name)
def test_private_contenders_agree_on_a_model_or_refuse_it(small: case.Case) -> None:
    """vmap, one whole model at a time, is the measure of the others; an error of a contender is a row of the table."""
    expected = small.prepare()
    assert case.losses(*expected).shape == (3,)
    norms: dict[str, float] = {}
    for name in ("vmap", "pmlf-k1", "pmlf-k2", "opacus", "opacus-ghost"):
        try:
            runner = contenders.find(name).prepare(*small.prepare(), 1)
            clipped = runner.gradient()
            clipped = clipped if runner.release is None else runner.release()
        except Exception:  # what becomes the error of a row
            continue
        norms[name] = runner.divisor * float(sum(float(each.detach().norm()) ** 2 for each in clipped) ** 0.5)
    for name in {"pmlf-k1", "pmlf-k2"} & set(norms):
        assert norms[name] == pytest.approx(norms["vmap"], rel=1e-3), name
    assert "vmap" in norms


@pytest.mark.slow
def test_an_error_of_another_library_is_a_row() -> None:
    """Opacus takes no LSTM of torch, only its own."""
    (found,) = race("lstm", [job("opacus", case="lstm")], 1, silent)
    row = report.case_document("lstm", 1, [found])["contenders"][0]
    assert row["error"].startswith("TypeError") and row["time_ratio"] is None


# --- ratios and targets


def outcome(
    contender: str, seconds: float, *, peak: int = 100, release: float | None = None, norm: float | None = None
) -> Outcome:
    return Outcome(
        job=job(contender),
        seconds=[seconds * 1.5, seconds, seconds * 2],
        release_seconds=[] if release is None else [release],
        peak_bytes=peak,
        parameters=10,
        clipped_sum_norm=norm,
    )


def made_up(case: str, *, ghost_norm: float = 5.0) -> dict[str, Any]:
    outcomes = [
        outcome("plain", 1.0),
        outcome("plain-channels-last", 0.8),
        outcome("opacus", 3.0, peak=1000, norm=5.0),
        outcome("opacus-ghost", 2.0, norm=ghost_norm),
        Outcome(job=job("vmap"), error="the process was killed by SIGKILL, perhaps out of memory"),
        outcome("pmlf-k1", 0.88, peak=150, release=0.1, norm=5.0),
        outcome("pmlf-k2", 1.76, peak=200, release=0.1, norm=5.0),
        outcome("pmlf-step", 1.8, peak=250, release=0.2),
    ]
    return report.case_document(case, 16, outcomes)


def checked(document: Mapping[str, Any]) -> dict[str, tuple[float | None, bool | None]]:
    return {each["target"]: (each["value"], each["holds"]) for each in report.check_targets([document])}


def test_ratios_are_to_the_faster_plain_gradient_and_to_plain_memory() -> None:
    by_name = {each["contender"]: each for each in made_up("roberta")["contenders"]}
    assert by_name["plain"]["time_ratio"] == pytest.approx(1.25)
    assert by_name["pmlf-k1"]["time_ratio"] == pytest.approx(1.1)
    assert by_name["pmlf-k1"]["median_seconds"] == pytest.approx(1.32)
    assert by_name["pmlf-k2"]["memory_ratio"] == pytest.approx(2.0)
    assert by_name["vmap"]["time_ratio"] is None and by_name["vmap"]["memory_ratio"] is None


def test_targets_on_made_up_numbers() -> None:
    found = checked(made_up("roberta"))
    assert found["time at k=1 / plain"] == (pytest.approx(1.1), False)
    assert checked(made_up("vit"))["time at k=1 / plain"] == (pytest.approx(1.1), True)
    assert found["memory at k=2 / plain"] == (pytest.approx(2.0), True)
    assert found["Opacus' best / k=1"] == (pytest.approx(2.0 / 0.88), True)
    assert found["memory at k=2 / Opacus' hooks"] == (pytest.approx(0.2), True)
    assert found["release / step"] == (pytest.approx(0.1), True)
    assert checked(made_up("cnn5"))["release / step of 4 batches"] == (pytest.approx(0.1), False)


def test_a_contender_with_another_gradient_is_named_and_does_not_count() -> None:
    document = made_up("roberta", ghost_norm=7.0)
    assert checked(document)["Opacus' best / k=1"][0] == pytest.approx(3.0 / 0.88)
    assert "opacus-ghost computes another gradient: norm 7" in text_of(*report.case_results(document))


def test_every_target_belongs_to_a_case_and_has_a_value() -> None:
    assert {target.case for target in report.TARGETS} == set(cases.CASES)
    for name in cases.CASES:
        assert all(value is not None for value, _ in checked(made_up(name)).values())


@pytest.mark.slow
def test_tables_fit_a_terminal_and_the_picture_is_drawn(tmp_path: Path) -> None:
    made = [made_up(name) for name in cases.CASES]
    document = {
        "machine": suite.on_this_machine(2),
        "settings": {"rounds": 3, "batch_scale": 0.5, "clock": "cpu", "freed_memory": "kept"},
        "cases": made,
        "targets": report.check_targets(made),
    }
    shown = text_of(*suite.readable(document))
    assert "…" not in shown and "vmap failed: the process was killed" in shown and "NO" in shown
    for name in (*cases.CASES, "plain-channels-last", "pmlf-step"):
        assert name in shown
    suite.plot(document, tmp_path / "picture.svg")
    assert "<svg" in (tmp_path / "picture.svg").read_text()


# --- growth


@pytest.mark.parametrize("power", [0.5, 2.0])
def test_exponent_of_an_exact_power_law(power: float) -> None:
    sizes = [1, 2, 4, 8]
    assert growth.exponent(sizes, [0.3 * size**power for size in sizes]) == pytest.approx(power)
    assert growth.exponent(sizes, [None, *(size**power for size in sizes[1:])]) == pytest.approx(power)


def test_exponent_needs_two_costs() -> None:
    assert growth.exponent([1, 2], [None, 3.0]) is None


@pytest.mark.slow
def test_growth_as_table_and_picture(tmp_path: Path) -> None:
    curve = growth.GrowthCurve(
        axis="width",
        values=[64, 128, 256],
        seconds=[0.01, 0.04, None],
        peak_bytes=[1 << 20, 2 << 20, None],
        time_exponent=2.0,
        memory_exponent=1.0,
        raw_seconds=[[0.01], [0.04], []],
        errors=[None, None, "RuntimeError: no"],
    )
    document = {
        "machine": suite.on_this_machine(2),
        "settings": {"rounds": 1, "batch_scale": 1.0, "clock": "wall", "freed_memory": "returned"},
        "growth": growth.to_json([curve]),
    }
    shown = text_of(*suite.readable(document))
    assert "size^2.00" in shown and "size^1.00" in shown and "RuntimeError: no" in shown
    suite.plot(document, tmp_path / "growth.png")
    assert (tmp_path / "growth.png").read_bytes().startswith(b"\x89PNG")


def test_every_stack_and_contender_of_growth_is_found() -> None:
    assert all(cases.find(name).name == name for name in cases.STACKS)
    assert all(contenders.find(f"pmlf-k{k}").name == f"pmlf-k{k}" for k in (1, 2, 4, 8))


def test_processor_time_needs_one_thread() -> None:
    with pytest.raises(ValueError, match="clock='cpu' adds up the time of all threads=2: give threads=1"):
        suite.BenchSettings(clock="cpu", threads=2).resolved()
