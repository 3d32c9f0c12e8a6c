"""Run jobs in this process, in several processes, or on a Ray cluster. A job that fails does not stop the others."""

from __future__ import annotations

import multiprocessing
import signal
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Protocol

from pmlf import machine
from pmlf.basics.arguments import require_count
from pmlf.experiments.jobs import Job, JobProgress, run_job

EXECUTORS = ("local", "ray")


class JobListener(Protocol):
    """Receives the progress of jobs."""

    def expected(self, jobs: int) -> None: ...

    def began(self, job: Job) -> None: ...

    def advanced(self, progress: JobProgress) -> None: ...

    def ended(self, job: Job, error: str | None) -> None: ...


class ForwardingListener:
    """Passes the progress of jobs on to another listener."""

    def __init__(self, listener: JobListener) -> None:
        self._listener = listener

    def expected(self, jobs: int) -> None:
        self._listener.expected(jobs)

    def began(self, job: Job) -> None:
        self._listener.began(job)

    def advanced(self, progress: JobProgress) -> None:
        self._listener.advanced(progress)

    def ended(self, job: Job, error: str | None) -> None:
        self._listener.ended(job, error)


Executor = Callable[[Sequence[Job], JobListener], None]


def executor(name: str, jobs: int) -> Executor:
    """The executor with this name.

    Args:
        name: "local" or "ray".
        jobs: Number of jobs at a time. They share the cores.

    Raises:
        ValueError: If the name is unknown or the number is not positive.
    """
    require_count("jobs", jobs, "it is the number of runs at a time")
    if name not in EXECUTORS:
        raise ValueError(f"executor={name!r} is not known: give one of {', '.join(EXECUTORS)}")
    threads = max(1, machine.cores() // jobs)
    if name == "ray":
        return lambda todo, listener: on_ray(_threaded(todo, threads), listener)
    if jobs == 1:
        return in_this_process
    return lambda todo, listener: in_processes(_threaded(todo, threads), jobs, listener)


def in_this_process(todo: Sequence[Job], listener: JobListener) -> None:
    """Run jobs one after another in this process."""
    for job in todo:
        listener.began(job)
        try:
            run_job(job, listener.advanced)
        except Exception as error:  # any error ends this job only
            listener.ended(job, _message(error))
        else:
            listener.ended(job, None)


def in_processes(todo: Sequence[Job], count: int, listener: JobListener) -> None:
    """Run `count` jobs at a time, each in its own process. A process that dies fails only its own job."""
    waiting = deque(todo)
    workers: dict[Connection, _Worker] = {}
    try:
        while waiting or workers:
            while waiting and len(workers) < count:
                worker = _Worker.start(waiting.popleft())
                workers[worker.connection] = worker
                listener.began(worker.job)
            for ready in wait(list(workers)):
                assert isinstance(ready, Connection)
                worker = workers[ready]
                try:
                    message = ready.recv()
                except EOFError:
                    worker.process.join()
                    message = _Ended(error=f"its process died with exit code {worker.process.exitcode}")
                if isinstance(message, JobProgress):
                    listener.advanced(message)
                    continue
                listener.ended(worker.job, message.error)
                if waiting and worker.process.is_alive():
                    worker.job = waiting.popleft()
                    ready.send(worker.job)
                    listener.began(worker.job)
                else:
                    workers.pop(ready)
                    worker.stop()
    finally:
        for worker in workers.values():
            worker.stop()


def on_ray(todo: Sequence[Job], listener: JobListener) -> None:
    """Run jobs as tasks of a Ray cluster whose machines share the folder. RAY_ADDRESS is its address."""
    try:
        import ray
    except ImportError as error:
        raise ValueError(
            "executor='ray' needs the package ray: pip install 'dp-pmlf[ray]', or give executor='local'"
        ) from error
    ray.init(ignore_reinit_error=True, log_to_driver=False)
    try:
        running = {}
        for job in todo:
            listener.began(job)
            absolute = replace(job, folder=job.folder.absolute(), data_dir=job.data_dir and job.data_dir.absolute())
            gpus = 1 if job.spec.device.startswith("cuda") else 0  # Ray hides GPUs that a task does not request
            task = ray.remote(num_cpus=job.threads or 1, num_gpus=gpus)(_error_of)
            running[task.remote(absolute)] = job
        while running:
            (done,), _ = ray.wait(list(running), num_returns=1)
            job = running.pop(done)
            try:
                listener.ended(job, ray.get(done))
            except ray.exceptions.RayError as error:  # its machine or process is gone
                listener.ended(job, _message(error))
    finally:
        ray.shutdown()


@dataclass(frozen=True, kw_only=True)
class _Ended:
    error: str | None


@dataclass(kw_only=True)
class _Worker:
    """A process that runs one job after another."""

    process: SpawnProcess
    connection: Connection
    job: Job

    @staticmethod
    def start(job: Job) -> _Worker:
        context = multiprocessing.get_context("spawn")  # torch's threads do not survive a fork
        ours, theirs = context.Pipe()
        process = context.Process(target=_work, args=(theirs,), daemon=True)
        process.start()
        theirs.close()  # so that the death of the process is an end of file here
        ours.send(job)
        return _Worker(process=process, connection=ours, job=job)

    def stop(self) -> None:
        """Stop the process after its current step, when its job has written a checkpoint to resume from."""
        self.process.terminate()
        self.process.join()
        self.connection.close()


def _work(connection: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the parent handles it
    try:
        while True:
            job = connection.recv()
            try:
                run_job(job, connection.send)
            except (EOFError, ConnectionError):
                raise
            except Exception as error:
                connection.send(_Ended(error=_message(error)))
            else:
                connection.send(_Ended(error=None))
    except (EOFError, ConnectionError, KeyboardInterrupt):  # the parent is gone or stops this process
        return


def _error_of(job: Job) -> str | None:
    """Run a job and return its error message, if any."""
    try:
        run_job(job, lambda progress: None)
    except Exception as error:
        return _message(error)
    return None


def _message(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())


def _threaded(todo: Sequence[Job], threads: int) -> list[Job]:
    return [replace(job, threads=threads) for job in todo]
