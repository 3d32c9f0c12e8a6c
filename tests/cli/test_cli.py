"""The command line: what it prints, what it refuses, what it leaves behind."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.stats

import pmlf
from folders import RUN_FILES
from pmlf import data, methods, models
from pmlf.cli.account import Account
from pmlf.cli.audit import Audit
from pmlf.cli.filter import Filter
from pmlf.cli.main import main
from pmlf.cli.training import Compare, Train
from pmlf.experiments.spec import RunSpec, flag
from pmlf.run import planned

COMMANDS = {"train": Train, "compare": Compare, "account": Account, "filter": Filter, "audit": Audit}
QUICK = ["--model", "linear", "--steps", "2", "--batch-size", "20"]

Call = Callable[..., tuple[int, str, str]]


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Call:
    """Run a command in an empty folder; its exit code, stdout and stderr."""
    monkeypatch.chdir(tmp_path)

    def run(*argv: object) -> tuple[int, str, str]:
        code = main([str(argument) for argument in argv])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def in_process_of_its_own(*argv: str, cwd: Path) -> subprocess.Popen[str]:
    # a shell's background job, as this may be, ignores Ctrl-C unless it is told not to
    program = (
        "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
        "from pmlf.cli.main import main; sys.exit(main(sys.argv[1:]))"
    )
    return subprocess.Popen(
        [sys.executable, "-c", program, *argv],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(Path(pmlf.__file__).parents[1])},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def option_names(command: type) -> list[str]:
    """Every option of a command, those of the dataclasses inside it too."""
    names = []
    for field in dataclasses.fields(command):
        value = field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default
        names += option_names(type(value)) if dataclasses.is_dataclass(value) else [flag(field.name)]
    return names


# --- help


@pytest.mark.parametrize("name", COMMANDS)
def test_help_explains_every_option(call: Call, name: str) -> None:
    code, out, _ = call(name, "--help")
    assert code == 0
    options = option_names(COMMANDS[name])
    assert "--json" in options and len(options) > 5
    for option in options:
        assert f" {option}" in out, option


def test_help_names_every_method_model_and_dataset(call: Call) -> None:
    _, out, _ = call("train", "--help")
    words = " ".join(out.replace("│", " ").split())
    for name in (*methods.NAMES, *models.NAMES, *data.NAMES):
        assert name in words
    _, out, _ = call("compare", "--help")
    for name in methods.NAMES:
        assert name in out


def test_help_lists_the_commands(call: Call) -> None:
    code, out, _ = call("--help")
    assert code == 0 and all(name in out for name in COMMANDS)


def test_the_version_is_the_package_s(call: Call) -> None:
    assert call("--version") == (0, f"pmlf {pmlf.__version__}\n", "")
    assert "pmlf --version" in " ".join(call("--help")[1].split())


# --- train


@pytest.mark.slow
def test_train_prints_one_json_document(call: Call, tmp_path: Path) -> None:
    code, out, err = call("train", *QUICK, "--epsilon", 2, "--out", "run", "--json")
    assert code == 0
    document = json.loads(out)
    assert document["out"] == "run" and document["method"] == "dp-pmlf" and document["steps"] == 2
    assert 1.99 < document["epsilon"] <= 2 and document["delta"] == 1e-5
    assert 0 <= document["test_accuracy"] <= 1
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == RUN_FILES
    progress, hint = err.splitlines()
    assert "step 2/2" in progress and "--model prior-linear may be more accurate" in hint


@pytest.mark.slow
def test_train_prints_a_summary_and_names_its_folder(call: Call, tmp_path: Path) -> None:
    code, out, _ = call("train", *QUICK, "--noise-multiplier", 1, "--method", "dpsgd")
    assert code == 0 and "test accuracy" in out and "cryptographic" in out
    (folder,) = (tmp_path / "runs").iterdir()
    assert folder.name.endswith("-fashion-mnist-small-linear-dpsgd") and str(folder.relative_to(tmp_path)) in out
    spec = RunSpec.from_json((folder / "spec.json").read_text())
    assert (spec.noise_multiplier, spec.epsilon, spec.steps, spec.epochs) == (1.0, None, 2, None)


@pytest.mark.slow
def test_filter_coefficients_may_be_negative_or_absent(call: Call, tmp_path: Path) -> None:
    quick = [*QUICK, "--noise-multiplier", 1, "--json"]
    assert call("train", *quick, "--out", "one", "--a", -0.9, "--b", 0.15, -0.05)[0] == 0
    assert call("train", *quick, "--out", "two", "--a", "--b", 0.5, 0.5)[0] == 0
    filters = [json.loads((tmp_path / name / "spec.json").read_text())["options"] for name in ("one", "two")]
    assert [(f["a"], f["b"]) for f in filters] == [([-0.9], [0.15, -0.05]), ([], [0.5, 0.5])]


REFUSED_SETTINGS = [
    (["--epsilon", "0"], "--epsilon=0.0"),
    (["--epsilon", "-1.5"], "--epsilon=-1.5"),
    (["--epsilon", "nan"], "--epsilon=nan"),
    (["--noise-multiplier", "0"], "--noise-multiplier=0.0"),
    (["--epsilon", "3", "--noise-multiplier", "1"], "--epsilon=3.0 and --noise-multiplier=1.0"),
    (["--delta", "0"], "--delta=0.0"),
    (["--delta", "1"], "--delta=1.0"),
    (["--batch-size", "12001"], "--batch-size=12001"),
    (["--batch-size", "0"], "--batch-size=0"),
    (["--epochs", "2"], "--epochs=2.0 and --steps=2"),
    (["--steps", "0"], "--steps=0"),
    (["--lr", "-1"], "--lr=-1.0"),
    (["--clip-norm", "0"], "--clip-norm=0.0"),
    (["--clipping", "none"], "clipping='none'"),
    (["--optimizer", "lion"], "optimizer='lion'"),
    (["--max-physical-batch-size", "0"], "--max-physical-batch-size=0"),
    (["--k", "0"], "k=0"),
    (["--beta", "0"], "beta=0.0"),
    (["--beta", "1.1"], "beta=1.1"),
    (["--a", "-1", "--b", "0.5"], "unstable"),
    (["--a", "-0.9", "--b", "0.2"], ": divide b by the gain\n"),
    (["--a", "-0.9", "--b", "0", "0.1"], "b_0 = 0"),
    (["--dataset", "imagenet"], "dataset 'imagenet'"),
    (["--model", "gpt"], "model 'gpt'"),
    (["--device", "abacus"], "device='abacus'"),
]
REFUSED_METHODS = [
    (["--method", "sgd"], "method='sgd'"),
    (["--method", "dpsgd", "--k", "2"], "--k is not an option of dpsgd"),
    (["--kappa", "0.7"], "--kappa is not an option of dp-pmlf, which takes --k, --beta, --a, --b"),
]


def refused_in_one_line(call: Call, folder: Path, argv: list[str], said: str) -> None:
    code, out, err = call(*argv, "--out", "run")
    assert code == 2 and out == ""
    assert err.startswith("pmlf: error: ") and err.count("\n") == 1
    assert said in err
    assert not list(folder.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize(("options", "said"), REFUSED_SETTINGS + REFUSED_METHODS)
def test_train_refuses_in_one_line(call: Call, tmp_path: Path, options: list[str], said: str) -> None:
    refused_in_one_line(call, tmp_path, ["train", *QUICK, *options], said)


REFUSED_COMPARISONS = [
    (["--methods", "dpsgd", "dp-pmlf", "--lrs", "1"], "for 2 methods: give one learning rate for each"),
    (["--seeds", "0"], "--seeds=0"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("options", "said"), REFUSED_SETTINGS + REFUSED_COMPARISONS)
def test_compare_refuses_in_one_line(call: Call, tmp_path: Path, options: list[str], said: str) -> None:
    refused_in_one_line(call, tmp_path, ["compare", *QUICK, *options], said)


def test_a_file_that_is_not_there_is_said_in_words(call: Call, tmp_path: Path) -> None:
    for argv in (["account", "--certificate", "nothing"], ["account", "--ledger", "nothing"]):
        code, out, err = call(*argv)
        assert (code, out, err) == (2, "", "pmlf: error: 'nothing' does not exist: give a path that does\n")
    code, _, err = call("account", "--ledger", tmp_path)
    assert code == 2 and "cannot be used: Is a directory" in err


def test_a_filter_of_another_gain_is_refused_with_the_option_that_allows_it(call: Call) -> None:
    code, _, err = call("filter", "--b", 0.3)
    assert code == 2 and "--b=(0.3,) has DC gain 3" in err and err.endswith("or give --uncorrected\n")
    assert call("filter", "--b", 0.3, "--uncorrected")[0] == 0


@pytest.mark.slow
def test_what_cannot_be_parsed_is_refused(call: Call, tmp_path: Path) -> None:
    for argv in (["train", "--k", "two"], ["train", "--colour", "red"], ["paint"], []):
        code, out, err = call(*argv)
        assert code == 2 and out == "" and all(word in err for word in argv[1:])
        assert "Traceback" not in err
    assert not list(tmp_path.iterdir())


def test_an_existing_folder_is_refused_and_left_alone(call: Call, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "model.safetensors").write_text("precious")
    for command in ("train", "compare"):
        code, out, err = call(command, *QUICK, "--out", "run")
        assert code == 2 and out == "" and "'run' already exists" in err and err.count("\n") == 1
    assert [path.read_text() for path in (tmp_path / "run").iterdir()] == ["precious"]


@pytest.mark.slow
def test_a_large_delta_is_warned_about_in_one_line(call: Call) -> None:
    code, _, err = call("train", *QUICK, "--noise-multiplier", 1, "--delta", 1e-3, "--out", "run")
    (warning,) = [line for line in err.splitlines() if line.startswith("pmlf: warning: ")]
    assert code == 0 and "delta=0.001" in warning


@pytest.mark.slow
def test_nothing_sensitive_appears_unless_asked_for(call: Call, tmp_path: Path) -> None:
    def everything(out: str, err: str, folder: str) -> str:
        texts = [path.read_text() for path in (tmp_path / folder).iterdir() if path.suffix != ".safetensors"]
        return "\n".join([out, err, *texts]).lower()

    quick = [*QUICK, "--noise-multiplier", 1]
    for json_flag, folder in ([], "read"), (["--json"], "machine"):
        _, out, err = call("train", *quick, *json_flag, "--out", folder)
        text = everything(out, err, folder)
        for word in ("loss", "sensitive", "norms", "drawn"):
            assert word not in text
    _, out, err = call("train", *quick, "--out", "shown", "--show-sensitive")
    assert "loss" not in out and "sensitive training loss" in err and "not covered by epsilon" in err
    metrics = json.loads((tmp_path / "shown" / "metrics.jsonl").read_text())
    assert metrics["training_loss"] > 0 and metrics["training_loss_is"].startswith("sensitive")


@pytest.mark.parametrize("command", ["train", pytest.param("compare", marks=pytest.mark.slow), "account", "filter"])
def test_piped_output_is_plain(call: Call, command: str) -> None:
    options = {"account": [], "filter": []}.get(command, [*QUICK, "--noise-multiplier", 1, "--out", "run"])
    code, out, err = call(command, *options)
    assert code == 0 and out
    for sign in ("\x1b", "[/", "[bold", "\r"):
        assert sign not in out + err


@pytest.mark.slow
def test_ctrl_c_keeps_what_was_released(tmp_path: Path) -> None:
    options = ["--model", "linear", "--method", "dpsgd", "--batch-size", "1200", "--max-physical-batch-size", "1500"]
    length = ["--steps", "5000", "--noise-multiplier", "5"]
    process = in_process_of_its_own("train", *options, *length, "--out", "run", "--json", cwd=tmp_path)
    deadline = time.monotonic() + 60
    while not (tmp_path / "run" / "metrics.jsonl").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    document = json.loads(out)
    assert document["interrupted"] and 10 <= document["steps"] < 5000
    assert "Traceback" not in err and "pmlf: interrupted: the results so far are in run" in err
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == sorted([*RUN_FILES, "checkpoint.safetensors"])
    certificate = json.loads((tmp_path / "run" / "certificate.json").read_text())
    assert certificate["released_steps"] == document["steps"]


@pytest.mark.slow
def test_sigterm_leaves_a_checkpoint_that_resume_continues_from(call: Call, tmp_path: Path) -> None:
    options = ["--model", "linear", "--method", "dpsgd", "--batch-size", "1200", "--max-physical-batch-size", "1500"]
    process = in_process_of_its_own("train", *options, "--steps", "60", "--epsilon", "3", "--out", "run", cwd=tmp_path)
    deadline = time.monotonic() + 60
    while not (tmp_path / "run" / "metrics.jsonl").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 143 and "resume with `pmlf train --resume run`" in err
    code, _, err = call("train", "--resume", "run", "--clip-norm", 2)
    assert code == 2 and "--clip-norm is 2.0, but the run started with 1.0" in err
    code, out, _ = call("train", "--resume", "run", "--json")
    document = json.loads(out)
    assert code == 0 and document["steps"] == 60 and not document["budget_spent"]
    assert call("train", "--resume", "run", "--json")[1] == out  # the stored result
    code, out, _ = call("account", "--ledger", "run/ledger.jsonl", "--json")
    assert json.loads(out)["epsilon"] == document["epsilon"] and json.loads(out)["runs"][0]["events"] == 60


def test_a_ledger_of_shaped_runs_shows_steps_and_the_events_of_a_group(call: Call) -> None:
    ledger = ("--ledger", "both.jsonl", "--model", "linear", "--steps", 9, "--batch-size", 200)
    for out, options in (("white", ["--epsilon", 2]), ("shaped", ["--epsilon", 4, "--bands", 4])):
        assert call("train", "--method", "lp-dpsgd", *options, *ledger, "--out", out)[0] == 0
    code, out, _ = call("account", "--ledger", "both.jsonl")
    rows = [line.split()[1:5] for line in out.splitlines() if "0.0" in line or "0.1" in line]
    assert code == 0 and ["9", "9", "1", "9"] in rows and ["9", "9", "4", "3"] in rows
    assert call("account", "--certificate", "shaped/certificate.json")[0] == 0


def test_a_filter_at_which_training_diverges_can_have_shaped_noise(call: Call) -> None:
    assert call("filter", "--bands", 4, "--butterworth", 2, 0.1)[0] == 0


def test_resume_refuses_what_is_no_run(call: Call, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for folder, said in (("empty", "is not the folder of a run"), ("nowhere", "does not exist")):
        code, out, err = call("train", "--resume", folder)
        assert code == 2 and out == "" and err.count("\n") == 1 and said in err
    code, _, err = call("train", "--resume", "empty", "--out", "other")
    assert code == 2 and "both name the run's folder" in err


@pytest.mark.slow
def test_stdout_of_a_process_is_one_json_document(tmp_path: Path) -> None:
    process = in_process_of_its_own("filter", "--json", cwd=tmp_path)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0 and err == ""
    assert json.loads(out)["dc_gain"] == pytest.approx(1)


# --- compare


@pytest.mark.slow
def test_compare_runs_every_method_at_the_same_epsilon(call: Call, tmp_path: Path) -> None:
    code, out, _ = call("compare", *QUICK, "--epsilon", 2, "--out", "all", "--json")
    assert code == 0
    document = json.loads(out)
    names = ["dpsgd", "lp-dpsgd", "inner-outer", "dp-pmlf"]
    assert [run["method"] for run in document["runs"]] == names
    assert len({run["epsilon"] for run in document["runs"]}) == 1
    assert {run["seed"] for run in document["runs"]} == {0}
    assert sorted(path.name for path in (tmp_path / "all").iterdir()) == sorted(
        [*names, "accuracy.png", "comparison.json"]
    )
    assert all(sorted(path.name for path in (tmp_path / "all" / name).iterdir()) == RUN_FILES for name in names)
    assert (tmp_path / "all" / "accuracy.png").read_bytes().startswith(b"\x89PNG")
    assert "inner-outer has a DC gain of 10" in document["note"]
    written = json.loads((tmp_path / "all" / "comparison.json").read_text())
    assert {**written, "plot": document["plot"]} == document


@pytest.mark.slow
def test_compare_prints_a_table(call: Call, tmp_path: Path) -> None:
    quick = [*QUICK, "--noise-multiplier", 1, "--methods", "dpsgd", "disk", "--kappa", 0.6]
    code, out, _ = call("compare", *quick, "--out", "two", "--plot", "picture.svg")
    assert code == 0 and "<svg" in (tmp_path / "picture.svg").read_text()
    assert (
        "dpsgd" in out
        and "disk" in out
        and "share the learning rate" in out
        and "gain" not in out
        and "picture.svg" in out
    )


@pytest.mark.slow
def test_compare_shows_means_over_seeds_with_intervals_and_paired_gains(call: Call, tmp_path: Path) -> None:
    quick = [*QUICK, "--noise-multiplier", 1, "--methods", "dpsgd", "lp-dpsgd"]
    code, out, _ = call("compare", *quick, "--lrs", 1, 2, "--seeds", 2, "--seed", 5, "--out", "four", "--json")
    document = json.loads(out)
    assert code == 0 and "Learning rates: dpsgd 1, lp-dpsgd 2." in document["note"]
    by_seed = {
        method: [run["test_accuracy"] for run in document["runs"] if run["method"] == method]
        for method in ("dpsgd", "lp-dpsgd")
    }
    assert sorted({run["seed"] for run in document["runs"]}) == [5, 6] and (tmp_path / "four/dpsgd-seed-6").is_dir()
    first, second = document["methods"]
    expected = scipy.stats.t.interval(0.95, 1, np.mean(by_seed["dpsgd"]), scipy.stats.sem(by_seed["dpsgd"]))
    assert first["interval"] == pytest.approx(expected)
    gains = np.subtract(by_seed["lp-dpsgd"], by_seed["dpsgd"])
    gain = second["gain_over_dpsgd"]
    assert gain["mean"] == pytest.approx(gains.mean())
    assert gain["half_width"] == pytest.approx(scipy.stats.t.ppf(0.975, 1) * scipy.stats.sem(gains))


def test_a_picture_that_cannot_be_written_is_refused_first(call: Call, tmp_path: Path) -> None:
    for command in ("compare", "filter"):
        for path in ("picture.txt", "nowhere/picture.png"):
            code, _, err = call(command, "--plot", path)
            assert code == 2 and f"plot={path!r}" in err
    assert not list(tmp_path.iterdir())


# --- account


def account(call: Call, *argv: object) -> dict[str, Any]:
    code, out, err = call("account", *argv, "--json")
    assert code == 0 and err == ""
    document: dict[str, Any] = json.loads(out)
    return document


def test_account_finds_the_noise_and_back(call: Call) -> None:
    mechanism = ["--records", 60_000, "--batch-size", 1000, "--epochs", 25, "--delta", 1e-5]
    found = account(call, *mechanism, "--epsilon", 2)
    assert found["steps"] == 1500 and 1.99 < found["epsilon"] <= 2 < found["epsilon_rdp"]
    back = account(call, *mechanism, "--noise-multiplier", found["noise_multiplier"])
    assert back == found


def test_account_without_options_is_train_without_options(call: Call) -> None:
    spec = RunSpec().resolved(12_000)
    found = account(call)
    assert found["delta"] == spec.delta and found["batch_size"] == spec.batch_size
    assert found["steps"] == training_steps(spec) and found["epsilon"] == pytest.approx(spec.epsilon, rel=1e-3)


def training_steps(spec: RunSpec) -> int:
    """T as the training itself counts it."""
    return planned.planned_steps(spec.epochs, spec.steps, 12_000, spec.batch_size)


def test_account_refuses_in_one_line(call: Call) -> None:
    for option, value, said in [
        ("--epsilon", -1, "-1.0"),
        ("--delta", 2, "2.0"),
        ("--batch-size", 13_000, "13000"),
        ("--steps", 0, "0"),
        ("--epochs", -3, "-3.0"),
        ("--noise-multiplier", 0, "0.0"),
        ("--records", 0, "records=0"),
    ]:
        code, out, err = call("account", option, value)
        assert code == 2 and out == "" and said in err and err.count("\n") == 1, option


# --- filter

PAPER = [  # a, b, noise gain, mean delay
    ([-0.6], [0.4], 0.25, 1.5),
    ([-0.6], [0.2, 0.2], 0.2, 2.0),
    ([-0.6], [0.5, -0.1], 0.3125, 1.25),
    ([-0.9], [0.1], 0.0526, 9.0),
    ([-0.9], [0.05, 0.05], 0.05, 9.5),
    ([-0.9], [0.15, -0.05], 0.0605, 8.5),
    ([-0.7, -0.2], [0.05, 0.05], 0.0417, 11.5),
    ([], [1.0], 1.0, 0.0),
]


@pytest.mark.parametrize(("a", "b", "noise_gain", "mean_delay"), PAPER)
def test_filter_gives_the_paper_s_numbers(
    call: Call, a: list[float], b: list[float], noise_gain: float, mean_delay: float
) -> None:
    code, out, _ = call("filter", "--a", *a, "--b", *b, "--json")
    document = json.loads(out)
    assert code == 0 and (document["a"], document["b"]) == (a, b)
    assert document["dc_gain"] == pytest.approx(1)
    assert document["noise_gain"] == pytest.approx(noise_gain, abs=5e-5)
    assert document["mean_delay"] == pytest.approx(mean_delay)
    assert document["weights"][0] == b[0] and len(document["poles"]) == len(a)
    assert document["frequency_response"][0] == {"frequency": 0.0, "gain": pytest.approx(1)}


def test_filter_prints_its_numbers(call: Call) -> None:
    code, out, _ = call("filter", "--a", -0.9, "--b", 0.15, -0.05)
    assert code == 0
    for text in ("0.15  -0.05", "DC gain", "0.06053", "8.5 steps", "0.085", "cycles per step"):
        assert text in out


@pytest.mark.slow
@pytest.mark.parametrize(
    "design", [["--butterworth", 2, 0.1], ["--moving-average", 4], ["--exponential", 0.9], ["--uncorrected", "--b", 1]]
)
def test_filter_designs(call: Call, tmp_path: Path, design: list[object]) -> None:
    code, out, _ = call("filter", *design, "--json", "--plot", "filter.png")
    assert code == 0
    assert json.loads(out)["dc_gain"] == pytest.approx(10 if "--uncorrected" in design else 1)
    assert (tmp_path / "filter.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--a", -1.1, "--b", 1], "unstable"),
        (["--a", "--b", 0.7], "DC gain 0.7"),
        (["--a", "--b", 0, 1], "b_0 = 0"),
        (["--moving-average", 0], "length=0"),
        (["--exponential", 1], "decay=1.0"),
        (["--butterworth", 2, 1.5], "cutoff=1.5"),
        (["--a", -0.5, "--moving-average", 3], "coefficients and --moving-average"),
        (["--weights", 0], "weights=0"),
    ],
)
def test_filter_refuses_in_one_line(call: Call, options: list[object], said: str) -> None:
    code, out, err = call("filter", *options)
    assert code == 2 and out == "" and said in err and err.count("\n") == 1


def test_a_check_on_private_records_is_for_a_terminal_alone(call: Call, tmp_path: Path) -> None:
    code, out, err = call("train", *QUICK, "--check-on-data", "--out", tmp_path / "run")
    assert code == 2 and out == "" and "run it on a terminal" in err and not (tmp_path / "run").exists()
