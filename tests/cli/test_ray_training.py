"""`pmlf train --ray-workers`: workers of Ray Train are ranks of one run, and what they refuse or suffer is told."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from pmlf.cli import ray_training
from pmlf.cli.common import CommandFailure
from pmlf.cli.main import main
from pmlf.cli.ray_training import Desk
from pmlf.cli.training import Train
from pmlf.evidence import ledger
from pmlf.experiments.results import Evaluation, SilentObserver
from pmlf.experiments.spec import RunSpec
from pmlf.parallel.failure import RankFailed

STEPS = 60
OPTIONS = ["--model", "linear", "--batch-size", "100", "--max-physical-batch-size", "25", "--noise-multiplier", "1"]
SEEDED = [*OPTIONS, "--seed", "0", "--steps", str(STEPS)]

REFUSED = {
    "--ray-workers 0": "--ray-workers=0 is not a whole number of at least 1",
    "--ray-workers 2 --show-sensitive": "--show-sensitive shows numbers computed from private records",
    "--ray-workers 2 --seed 0 --diagnostics": "--diagnostics shows numbers computed from private records",
    "--ray-workers 2 --model prior-linear": "trains on one process: start it without --ray-workers",
    "--ray-workers 2 --features f.npy --classes 2": "--ray-workers is not an option of --features",
    "--ray-workers 2 --resume nowhere": "'nowhere' does not exist",
    "--ray-workers 2 --out .": "already exists: give another folder",
}


@pytest.mark.parametrize("typed", REFUSED)
def test_what_cannot_be_is_refused_before_ray_is_started(
    typed: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_training.ray_cluster, "connected", lambda *_, **__: pytest.fail("Ray was started"))
    assert main(["train", *typed.split()]) == 2
    assert REFUSED[typed] in capsys.readouterr().err


def test_a_process_of_torchrun_is_refused(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["train", "--ray-workers", "2"]) == 2
    assert "without torchrun" in capsys.readouterr().err


def test_without_ray_the_command_says_what_to_install(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    assert main(["train", "--ray-workers", "2", "--out", str(tmp_path / "run")]) == 2
    assert "pip install 'dp-pmlf[ray]'" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


class Here:
    """A desk without Ray: what `ray.get(desk.leave.remote(messages))` returns."""

    def __init__(self) -> None:
        self.desk = Desk()
        self.calls = 0

    @property
    def leave(self) -> Here:
        return self

    def remote(self, messages: Any) -> str | None:
        self.calls += 1
        return self.desk.leave(messages)


class Fakes(NamedTuple):
    """The functions of ray that a line uses."""

    get: Callable[[Any], Any]


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> Here:
    monkeypatch.setitem(sys.modules, "ray", Fakes(get=lambda answer: answer))
    return Here()


class Noting(SilentObserver):
    def __init__(self) -> None:
        self.seen: list[Any] = []

    def started(self, spec: RunSpec, steps: int) -> None:
        self.seen.append(("started", steps))

    def stepped(self, step: int, training_loss: float | None) -> None:
        self.seen.append(("stepped", step))


def test_messages_do_not_tell_the_time_of_a_step(here: Here) -> None:
    line = ray_training._LineToDesk(here)
    with line.open(talks=True):
        line.started(RunSpec(), 1000)
        for step in range(1, 1001):
            line.stepped(step, None)
    noting = Noting()
    ray_training._Audience(noting).hear(here.desk.take(None))
    assert noting.seen[0] == ("started", 1000) and noting.seen[-1] == ("stepped", 1000)
    assert len(noting.seen) <= here.calls + 1


def test_a_training_loss_never_goes_through_ray(here: Here) -> None:
    line = ray_training._LineToDesk(here)
    with pytest.raises(AssertionError):
        line.stepped(1, 0.7)
    with pytest.raises(AssertionError):
        line.evaluated(Evaluation(step=1, epoch=0.1, epsilon=1.0, scores={}, training_loss=0.7))


def test_a_stop_that_is_asked_for_reaches_the_worker(here: Here) -> None:
    here.desk.take("SIGINT")
    line = ray_training._LineToDesk(here)
    with line.open(talks=False):
        assert line.stop is None
    assert line.stop == "SIGINT"


@pytest.mark.parametrize(
    "error", [ValueError("batch_size=7 is secret"), RankFailed("secret"), ZeroDivisionError("secret")]
)
def test_ray_does_not_learn_why_a_worker_failed_and_the_command_does(
    error: Exception, here: Here, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr("torch.distributed.get_rank", lambda: 1)
    monkeypatch.setattr(Train, "run", fail)
    monkeypatch.chdir(tmp_path)
    rank = ray_training._Rank(command=Train(), spec=RunSpec(), out=tmp_path / "run", folder=tmp_path)
    with pytest.raises(ray_training._WorkerFailed) as raised:
        ray_training._work(rank, here)
    seen = [raised.value, raised.value.__cause__, raised.value.__context__]
    assert not any("secret" in str(each) for each in seen)
    (told,) = here.desk.take(None)
    assert isinstance(told, ray_training._Failed) and told.rank == 1
    assert told.caused_by_others == isinstance(error, RankFailed)
    assert told.failure.exit_code == (2 if isinstance(error, ValueError) else 1)
    assert "secret" in (told.trace or told.failure.sentence)
    assert "--batch-size=7" in told.failure.sentence or not isinstance(error, ValueError)


def failed(rank: int, code: int, *, by_others: bool = False) -> ray_training._Failed:
    failure = CommandFailure(sentence=f"sentence of {rank}", exit_code=code)
    return ray_training._Failed(rank=rank, failure=failure, caused_by_others=by_others, trace=None)


def test_the_cause_is_reported_not_what_other_ranks_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_training.ray_cluster, "failed_ranks", lambda error: {0, 1})
    told = [failed(0, 1, by_others=True), failed(1, 2)]
    refused = ray_training._failure(told, RuntimeError(), 2)
    assert isinstance(refused, ValueError) and str(refused) == "sentence of 1"
    died = ray_training._failure(told[:1], RuntimeError(), 2)
    assert isinstance(died, RankFailed) and "rank 1 of 2 has died" in str(died) and "sentence of 0" in str(died)
    silent = ray_training._failure([], RuntimeError(), 2)
    assert isinstance(silent, RankFailed) and "rank 0, 1 of 2 has died" in str(silent)


@pytest.fixture(scope="module")
def cluster() -> Iterator[dict[str, str]]:
    """The environment of commands that use one local Ray, with more CPUs than workers."""
    ray = pytest.importorskip("ray", reason="the optional package ray is not installed")
    with ray_training.ray_cluster.own_folder() as folder:
        ray_training.ray_cluster._start(ray, 4, folder)
        address = ray.get_runtime_context().gcs_address
        yield {**os.environ, "RAY_ADDRESS": address, "OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"}
        ray.shutdown()


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The weights of the same run on one process."""
    out = tmp_path_factory.mktemp("alone") / "run"
    assert main(["train", *SEEDED, "--out", str(out)]) == 0
    return (out / "model.safetensors").read_bytes()


def begun(environment: dict[str, str], out: Path, *options: str) -> subprocess.Popen[str]:
    """A run that has taken its first steps."""
    command = [sys.executable, "-m", "pmlf", "train", *options, "--out", str(out)]
    started = subprocess.Popen(
        command, cwd=out.parent, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    while started.poll() is None and released(out) < 5:
        time.sleep(0.02)
    return started


def released(out: Path) -> int:
    """The events in the ledger: its lines without the two that open it and the run."""
    book = out / "ledger.jsonl"
    return book.read_text().count("\n") - 2 if book.exists() else 0


def ended(started: subprocess.Popen[str]) -> tuple[int, str, str]:
    shown, said = started.communicate(timeout=600)
    return started.returncode, shown, said


@pytest.mark.slow
def test_an_interrupted_run_of_two_workers_goes_on_with_the_bits_of_one_process(
    cluster: dict[str, str], alone: bytes, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    started = begun(cluster, out, *SEEDED, "--ray-workers", "2")
    started.send_signal(signal.SIGTERM)
    code, shown, said = ended(started)
    assert code == 143 and shown.count("written to") == 1 and "interrupted" in said, said
    stopped = json.loads((out / "certificate.json").read_text())
    assert stopped["processes"] == 2 and 0 < stopped["released_steps"] < STEPS
    assert main(["train", "--resume", str(out)]) == 0
    assert (out / "model.safetensors").read_bytes() == alone
    assert sum(ledger.read(out / "ledger.jsonl").events.values()) == STEPS


@pytest.mark.slow
def test_a_killed_worker_is_named_and_the_resumed_run_ends_with_the_bits_of_one_process(
    cluster: dict[str, str], alone: bytes, tmp_path: Path
) -> None:
    psutil = pytest.importorskip("psutil")
    out = tmp_path / "run"
    started = begun(cluster, out, *SEEDED, "--checkpoint-every", "2", "--ray-workers", "2")
    children = psutil.Process().children(recursive=True)  # of the local Ray too
    workers = [each for each in children if each.name().startswith("ray::RayTrainWo")]
    assert len(workers) == 2
    max(workers, key=lambda each: each.pid).send_signal(signal.SIGKILL)
    code, shown, said = ended(started)
    assert code == 1 and not shown and "of 2 has died" in said and "Traceback" not in said, said
    counted = sum(ledger.read(out / "ledger.jsonl").events.values())
    assert counted >= 5
    resumed = [sys.executable, "-m", "pmlf", "train", "--resume", str(out), "--ray-workers", "3", "--json"]
    done = subprocess.run(resumed, env=cluster, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["steps"] == STEPS
    assert (out / "model.safetensors").read_bytes() == alone
    assert json.loads((out / "certificate.json").read_text())["processes"] == 3
    assert sum(ledger.read(out / "ledger.jsonl").events.values()) >= max(counted, STEPS)
