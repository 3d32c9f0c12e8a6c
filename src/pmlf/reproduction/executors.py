"""Ways to execute jobs: here, in several processes, on a Ray cluster. A job that fails does not stop the others."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Protocol

from pmlf.basics.arguments import require_count
from pmlf.reproduction.jobs import Job, News, carry_out

EXECUTORS = ("local", "ray")


class Listener(Protocol):
    """Is told what happens to jobs."""

    def expected(self, jobs: int) -> None: ...

    def began(self, job: Job) -> None: ...

    def advanced(self, news: News) -> None: ...

    def ended(self, job: Job, error: str | None) -> None: ...


Execute = Callable[[Sequence[Job], Listener], None]


def executor(name: str, jobs: int) -> Execute:
    """The executor of this name with so many jobs at a time, the cores divided between them."""
    require_count("jobs", jobs, "so many runs go on at a time")
    if name not in EXECUTORS:
        raise ValueError(f"unknown executor {name!r}: choose one of {', '.join(EXECUTORS)}")
    threads = max(1, (os.cpu_count() or 1) // jobs)
    if name == "ray":
        return lambda todo, listener: on_ray(_threaded(todo, threads), listener)
    if jobs == 1:
        return here
    return lambda todo, listener: in_processes(_threaded(todo, threads), jobs, listener)


def here(todo: Sequence[Job], listener: Listener) -> None:
    """One after another, in this process."""
    for job in todo:
        listener.began(job)
        try:
            carry_out(job, listener.advanced)
        except Exception as error:  # whatever it is, it is this job's
            listener.ended(job, _said(error))
        else:
            listener.ended(job, None)


def in_processes(todo: Sequence[Job], count: int, listener: Listener) -> None:
    """Several at a time, a process each; one that dies takes its own job with it and no other."""
    waiting = deque(todo)
    workers: dict[Connection, _Worker] = {}
    try:
        while waiting or workers:
            while waiting and len(workers) < count:
                worker = _Worker.start(waiting.popleft())
                workers[worker.news] = worker
                listener.began(worker.job)
            for ready in wait(list(workers)):
                assert isinstance(ready, Connection)
                worker = workers[ready]
                try:
                    message = ready.recv()
                except EOFError:
                    worker.process.join()
                    message = _Ended(error=f"its process died with exit code {worker.process.exitcode}")
                if isinstance(message, News):
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


def on_ray(todo: Sequence[Job], listener: Listener) -> None:
    """As tasks of a Ray cluster, whose machines share the folder; the address is Ray's own matter (RAY_ADDRESS)."""
    try:
        import ray
    except ImportError as error:
        raise ValueError(
            "--executor ray needs the package ray: pip install 'dp-pmlf[ray]', or leave the option out"
        ) from error
    ray.init(ignore_reinit_error=True, log_to_driver=False)
    try:
        running = {}
        for job in todo:
            listener.began(job)
            absolute = replace(job, folder=job.folder.absolute(), data_dir=job.data_dir and job.data_dir.absolute())
            gpus = 1 if job.spec.device.startswith("cuda") else 0  # Ray hides those that a task did not ask for
            task = ray.remote(num_cpus=job.threads or 1, num_gpus=gpus)(_carry_out_silently)
            running[task.remote(absolute)] = job
        while running:
            (done,), _ = ray.wait(list(running), num_returns=1)
            job = running.pop(done)
            try:
                listener.ended(job, ray.get(done))
            except ray.exceptions.RayError as error:  # its machine or its process is gone
                listener.ended(job, _said(error))
    finally:
        ray.shutdown()


@dataclass(frozen=True, kw_only=True)
class _Ended:
    error: str | None


@dataclass(kw_only=True)
class _Worker:
    """A process that carries out one job after another."""

    process: SpawnProcess
    news: Connection
    job: Job

    @staticmethod
    def start(job: Job) -> _Worker:
        context = multiprocessing.get_context("spawn")  # forked processes and torch's threads do not agree
        ours, theirs = context.Pipe()
        process = context.Process(target=_work, args=(theirs,), daemon=True)
        process.start()
        theirs.close()  # so that its death is an end of file here
        ours.send(job)
        return _Worker(process=process, news=ours, job=job)

    def stop(self) -> None:
        """When the step that runs is over: a job makes a checkpoint then, and goes on from there another time."""
        self.process.terminate()
        self.process.join()
        self.news.close()


def _work(connection: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides
    try:
        while True:
            job = connection.recv()
            try:
                carry_out(job, connection.send)
            except (EOFError, ConnectionError):
                raise
            except Exception as error:
                connection.send(_Ended(error=_said(error)))
            else:
                connection.send(_Ended(error=None))
    except (EOFError, ConnectionError, KeyboardInterrupt):  # the parent is gone or has stopped this process
        return


def _carry_out_silently(job: Job) -> str | None:
    try:
        carry_out(job, lambda news: None)
    except Exception as error:
        return _said(error)
    return None


def _said(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())


def _threaded(todo: Sequence[Job], threads: int) -> list[Job]:
    return [replace(job, threads=threads) for job in todo]
