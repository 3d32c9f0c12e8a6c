"""Jobs are skipped when complete and resumed when interrupted; a job that fails does not stop the others."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from listeners import RecordingListener
from pmlf.experiments import executors, jobs
from pmlf.experiments.jobs import JobProgress, run_key
from pmlf.experiments.spec import RunSpec

SPEC = RunSpec(method="dp-pmlf", model="linear", records=60, batch_size=20, steps=6, epsilon=2.0, lr=0.5, seed=0)
BROKEN = replace(SPEC, device="abacus")


def results(folder: Path) -> dict[str, object]:
    """The results that equal runs share: all except times, paths and the epsilons of evaluations.

    A killed run has released steps after its checkpoint, and its next evaluations include their epsilon.
    """
    result = json.loads((folder / "result.json").read_text())
    course = [(e["step"], e["test_accuracy"]) for e in result.pop("evaluations")]
    certificate = json.loads((folder / "certificate.json").read_text())
    spent = {name: certificate[name] for name in ("epsilon_at_released_steps", "released_steps", "noise_multiplier")}
    files = {name: (folder / name).read_bytes() for name in ("spec.json", "model.safetensors")}
    rest = {name: value for name, value in result.items() if name not in ("seconds", "out")}
    return {**files, **spent, **rest, "course": course}


@pytest.mark.slow
def test_a_failing_job_does_not_stop_the_others(tmp_path: Path) -> None:
    todo = [jobs.job(spec, tmp_path) for spec in (BROKEN, SPEC)]
    listener = RecordingListener()
    executors.executor("local", 1)(todo, listener)
    assert listener.began_keys == [job.key for job in todo]
    assert "device='abacus'" in (listener.errors[run_key(BROKEN)] or "")
    assert listener.errors[run_key(SPEC)] is None
    assert [jobs.finished(job.folder) for job in todo] == [False, True]


@pytest.mark.slow
def test_a_complete_job_stays_unchanged(tmp_path: Path) -> None:
    job = jobs.job(SPEC, tmp_path)
    jobs.run_job(job, lambda progress: None)
    before = {path: path.stat().st_mtime_ns for path in job.folder.iterdir()}
    reported: list[JobProgress] = []
    jobs.run_job(job, reported.append)
    assert {path: path.stat().st_mtime_ns for path in job.folder.iterdir()} == before and not reported
    where = json.loads((job.folder / jobs.MACHINE).read_text())
    assert where["threads"] == torch.get_num_threads() and where["machine"]["cpu"] and where["machine"]["code"]


def die_after(job: jobs.Job, steps: int) -> None:
    """Run a job, in a process of its own, until it has done so many steps."""
    jobs.PROGRESS_SECONDS = -1.0
    jobs.run_job(job, lambda done: os.kill(os.getpid(), signal.SIGKILL) if done.step > steps else None)


@pytest.mark.slow
def test_a_job_killed_several_times_has_the_same_results(tmp_path: Path) -> None:
    spec = replace(SPEC, steps=12)
    undisturbed, killed = jobs.job(spec, tmp_path / "a", threads=1), jobs.job(spec, tmp_path / "b", threads=1)
    threads = torch.get_num_threads()
    jobs.run_job(undisturbed, lambda progress: None)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["pmlf.experiments.runner"])  # torch is imported once, not in every child
    for death in (0, 1, 5, 9):
        child = context.Process(target=die_after, args=(killed, death))
        child.start()
        child.join()
        assert child.exitcode == -signal.SIGKILL and not jobs.finished(killed.folder)
    jobs.run_job(killed, lambda progress: None)
    torch.set_num_threads(threads)
    assert results(killed.folder) == results(undisturbed.folder)


class Assassin(RecordingListener):
    """Kills the process of the first job that reports progress."""

    victim: str | None = None

    def advanced(self, progress: JobProgress) -> None:
        if self.victim is None:
            self.victim = progress.key
            for process in multiprocessing.active_children():
                os.kill(process.pid or 0, signal.SIGKILL)


@pytest.mark.slow
def test_a_process_that_dies_fails_only_its_own_job(tmp_path: Path) -> None:
    victim, other = (jobs.job(replace(SPEC, seed=seed), tmp_path, threads=1) for seed in range(2))
    listener = Assassin()
    executors.in_processes([victim, other, jobs.job(BROKEN, tmp_path, threads=1)], 1, listener)
    assert not multiprocessing.active_children()
    assert listener.victim == victim.key and "process died" in (listener.errors[victim.key] or "")
    assert listener.errors[other.key] is None and "abacus" in (listener.errors[run_key(BROKEN)] or "")

    threads = torch.get_num_threads()
    executors.in_this_process([victim], RecordingListener())
    assert jobs.finished(victim.folder)
    same = jobs.job(other.spec, tmp_path / "here", threads=1)
    executors.in_this_process([same], RecordingListener())
    torch.set_num_threads(threads)
    assert results(same.folder) == results(other.folder)


class Impatient(RecordingListener):
    def advanced(self, progress: JobProgress) -> None:
        raise KeyboardInterrupt


@pytest.mark.slow
def test_ctrl_c_stops_the_processes_and_loses_nothing(tmp_path: Path) -> None:
    job = jobs.job(replace(SPEC, steps=2000), tmp_path, threads=1)
    with pytest.raises(KeyboardInterrupt):
        executors.in_processes([job], 1, Impatient())
    assert not multiprocessing.active_children()
    assert not jobs.finished(job.folder) and (job.folder / "checkpoint.safetensors").exists()


@pytest.mark.slow
def test_ctrl_c_in_the_last_step_keeps_the_run_and_starts_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "PROGRESS_SECONDS", -1.0)
    last, next_one = (jobs.job(replace(SPEC, seed=seed), tmp_path) for seed in range(2))

    class Late(RecordingListener):
        def advanced(self, progress: JobProgress) -> None:
            if progress.step == progress.steps:
                signal.raise_signal(signal.SIGINT)

    listener = Late()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs of a shell ignore it
    try:
        with pytest.raises(KeyboardInterrupt):
            executors.in_this_process([last, next_one], listener)
    finally:
        signal.signal(signal.SIGINT, before)
    assert listener.began_keys == [last.key] and jobs.finished(last.folder) and not next_one.folder.exists()


def work_with_progress(connection: Any) -> None:
    """A worker that reports every step."""
    jobs.PROGRESS_SECONDS = -1.0
    executors._work(connection)


@pytest.mark.slow
def test_a_worker_stopped_in_the_last_step_of_a_run_ends(tmp_path: Path) -> None:
    job = jobs.job(SPEC, tmp_path, threads=1)
    ours, theirs = multiprocessing.Pipe()
    child = multiprocessing.get_context("spawn").Process(target=work_with_progress, args=(theirs,))
    child.start()
    theirs.close()
    ours.send(job)
    while not (isinstance(done := ours.recv(), JobProgress) and done.step == done.steps - 1):
        pass
    assert child.pid is not None
    os.kill(child.pid, signal.SIGSTOP)  # so that the signal below arrives in the last step
    os.kill(child.pid, signal.SIGTERM)
    os.kill(child.pid, signal.SIGCONT)
    child.join()  # it must not wait for another job
    assert child.exitcode in (0, -signal.SIGTERM)
    ours.close()


def test_an_unknown_executor_is_refused() -> None:
    with pytest.raises(ValueError, match="executor='slurm' is not known: give one of local, ray"):
        executors.executor("slurm", 1)
    with pytest.raises(ValueError, match="jobs=0"):
        executors.executor("local", 0)


def test_without_ray_the_executor_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ValueError, match=r"pip install 'dp-pmlf\[ray\]'"):
        executors.executor("ray", 1)([jobs.job(SPEC, tmp_path)], RecordingListener())


def test_ray_leaves_the_same_results(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="the optional package ray is not installed")
    todo = [jobs.job(SPEC, tmp_path / "ray", threads=1), jobs.job(BROKEN, tmp_path / "ray", threads=1)]
    listener = RecordingListener()
    executors.on_ray(todo, listener)
    assert listener.errors[todo[0].key] is None and "abacus" in (listener.errors[todo[1].key] or "")
    local = jobs.job(SPEC, tmp_path / "local", threads=1)
    executors.in_processes([local], 1, RecordingListener())
    assert results(todo[0].folder) == results(local.folder)
