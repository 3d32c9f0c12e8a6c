"""Jobs: skipped when finished, gone on with when cut off, here or in processes; one that fails stops no other."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from listeners import Heard
from pmlf.experiments.spec import RunSpec
from pmlf.reproduction import executors, jobs
from pmlf.reproduction.artifacts import run_key
from pmlf.reproduction.jobs import News

SPEC = RunSpec(method="dp-pmlf", model="linear", records=60, batch_size=20, steps=6, epsilon=2.0, lr=0.5, seed=0)
BROKEN = replace(SPEC, device="abacus")


def results(folder: Path) -> dict[str, object]:
    """What a run left that two equal runs share: all but times, paths and the epsilons on the way.

    A run that was killed has released steps beyond its checkpoint: the first epsilons that it tells after it are of
    those too.
    """
    result = json.loads((folder / "result.json").read_text())
    course = [(e["step"], e["test_accuracy"]) for e in result.pop("evaluations")]
    certificate = json.loads((folder / "certificate.json").read_text())
    spent = {name: certificate[name] for name in ("epsilon_at_released_steps", "released_steps", "noise_multiplier")}
    files = {name: (folder / name).read_bytes() for name in ("spec.json", "model.safetensors")}
    told = {name: value for name, value in result.items() if name not in ("seconds", "out")}
    return {**files, **spent, **told, "course": course}


def test_a_failing_job_does_not_stop_the_others(tmp_path: Path) -> None:
    todo = [jobs.job(spec, tmp_path) for spec in (BROKEN, SPEC)]
    heard = Heard()
    executors.executor("local", 1)(todo, heard)
    assert heard.begun == [job.key for job in todo]
    assert "device='abacus'" in (heard.errors[run_key(BROKEN)] or "")
    assert heard.errors[run_key(SPEC)] is None
    assert [jobs.finished(job.folder) for job in todo] == [False, True]


def test_a_finished_job_is_left_as_it_is(tmp_path: Path) -> None:
    job = jobs.job(SPEC, tmp_path)
    jobs.carry_out(job, lambda news: None)
    before = {path: path.stat().st_mtime_ns for path in job.folder.iterdir()}
    told: list[News] = []
    jobs.carry_out(job, told.append)
    assert {path: path.stat().st_mtime_ns for path in job.folder.iterdir()} == before and not told
    where = json.loads((job.folder / jobs.MACHINE).read_text())
    assert where["threads"] == torch.get_num_threads() and where["machine"]["cpu"] and where["machine"]["code"]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="forks a process that has threads")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_killed_ten_times_a_job_ends_as_if_it_had_not_been(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "_SECONDS_BETWEEN_NEWS", -1.0)
    spec = replace(SPEC, steps=12)
    undisturbed, killed = jobs.job(spec, tmp_path / "a", threads=1), jobs.job(spec, tmp_path / "b", threads=1)
    threads = torch.get_num_threads()
    jobs.carry_out(undisturbed, lambda news: None)
    for death in range(10):
        child = os.fork()
        if child == 0:  # ends by SIGKILL in the middle of a run, wherever its checkpoint is
            jobs.carry_out(killed, lambda news, death=death: os.kill(os.getpid(), 9) if news.step > death else None)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        assert os.WTERMSIG(status) == signal.SIGKILL and not jobs.finished(killed.folder)
    jobs.carry_out(killed, lambda news: None)
    torch.set_num_threads(threads)
    assert results(killed.folder) == results(undisturbed.folder)


class Assassin(Heard):
    """Kills the process of the first job that tells something."""

    victim: str | None = None

    def advanced(self, news: News) -> None:
        if self.victim is None:
            self.victim = news.key
            for process in multiprocessing.active_children():
                os.kill(process.pid or 0, signal.SIGKILL)


def test_a_process_that_dies_takes_only_its_own_job_with_it(tmp_path: Path) -> None:
    victim, other = (jobs.job(replace(SPEC, seed=seed), tmp_path, threads=1) for seed in range(2))
    heard = Assassin()
    executors.in_processes([victim, other, jobs.job(BROKEN, tmp_path, threads=1)], 1, heard)
    assert not multiprocessing.active_children()
    assert heard.victim == victim.key and "process died" in (heard.errors[victim.key] or "")
    assert heard.errors[other.key] is None and "abacus" in (heard.errors[run_key(BROKEN)] or "")

    threads = torch.get_num_threads()
    executors.here([victim], Heard())
    assert jobs.finished(victim.folder)
    same = jobs.job(other.spec, tmp_path / "here", threads=1)
    executors.here([same], Heard())
    torch.set_num_threads(threads)
    assert results(same.folder) == results(other.folder)


class Impatient(Heard):
    def advanced(self, news: News) -> None:
        raise KeyboardInterrupt


def test_ctrl_c_stops_the_processes_and_loses_nothing(tmp_path: Path) -> None:
    job = jobs.job(replace(SPEC, steps=2000), tmp_path, threads=1)
    with pytest.raises(KeyboardInterrupt):
        executors.in_processes([job], 1, Impatient())
    assert not multiprocessing.active_children()
    assert not jobs.finished(job.folder) and (job.folder / "checkpoint.safetensors").exists()


def test_ctrl_c_in_the_last_step_keeps_the_run_and_begins_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "_SECONDS_BETWEEN_NEWS", -1.0)
    last, next_one = (jobs.job(replace(SPEC, seed=seed), tmp_path) for seed in range(2))

    class Late(Heard):
        def advanced(self, news: News) -> None:
            if news.step == news.steps:
                signal.raise_signal(signal.SIGINT)

    heard = Late()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    try:
        with pytest.raises(KeyboardInterrupt):
            executors.here([last, next_one], heard)
    finally:
        signal.signal(signal.SIGINT, before)
    assert heard.begun == [last.key] and jobs.finished(last.folder) and not next_one.folder.exists()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="forks a process that has threads")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_worker_stopped_in_the_last_step_of_a_run_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "_SECONDS_BETWEEN_NEWS", -1.0)
    job = jobs.job(SPEC, tmp_path, threads=1)
    ours, theirs = multiprocessing.Pipe()
    child = os.fork()
    if child == 0:
        ours.close()
        executors._work(theirs)
        os._exit(7)
    theirs.close()
    ours.send(job)
    while not (isinstance(news := ours.recv(), News) and news.step == news.steps - 1):
        pass
    os.kill(child, signal.SIGSTOP)  # so that the signal below arrives in the step after this news: the last one
    os.kill(child, signal.SIGTERM)
    os.kill(child, signal.SIGCONT)
    assert os.waitpid(child, 0)[1] in (7 << 8, signal.SIGTERM)  # it hung here, waiting for another job
    ours.close()


def test_an_unknown_executor_is_refused() -> None:
    with pytest.raises(ValueError, match="'slurm': choose one of local, ray"):
        executors.executor("slurm", 1)
    with pytest.raises(ValueError, match="jobs=0"):
        executors.executor("local", 0)


def test_without_ray_the_executor_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ValueError, match=r"pip install 'dp-pmlf\[ray\]'"):
        executors.executor("ray", 1)([jobs.job(SPEC, tmp_path)], Heard())


def test_ray_leaves_the_same_results(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="the optional package ray is not installed")
    todo = [jobs.job(SPEC, tmp_path / "ray", threads=1), jobs.job(BROKEN, tmp_path / "ray", threads=1)]
    heard = Heard()
    executors.on_ray(todo, heard)
    assert heard.errors[todo[0].key] is None and "abacus" in (heard.errors[todo[1].key] or "")
    local = jobs.job(SPEC, tmp_path / "local", threads=1)
    executors.in_processes([local], 1, Heard())
    assert results(todo[0].folder) == results(local.folder)
