"""Measure contenders, each in its own process. They take turns: all finish a round before the next one starts.

A busy machine then slows all of them equally. Only one process works at a time; the others wait for their next turn.
`python -m pmlf.bench.measure --case cnn5 --contender plain` is such a process: it answers each line on stdin with one
line of JSON.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import queue
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TextIO

from pmlf import machine

if TYPE_CHECKING:  # not needed in the parent process
    from pmlf.bench.contenders import Runner

_ROUND_SECONDS, _ROUND_CALLS = 0.1, 2  # the minimum of a round
_LONG_SECONDS, _MORE_CALLS = 2.0, 10  # short calls are repeated until one of these is reached
_OOM_FIRST = 1000  # if memory runs out, the kernel kills this process first


Clock = Literal["wall", "cpu"]
FreedMemory = Literal["kept", "returned"]
_CLOCKS: dict[Clock, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.process_time}


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """What all processes have in common.

    Freed memory is "kept" for the next step, as in `pmlf train`, or "returned" to the system, the default of malloc.
    """

    threads: int
    clock: Clock = "wall"
    freed_memory: FreedMemory = "returned"


@dataclass(frozen=True, kw_only=True)
class BenchJob:
    """What one process measures."""

    case: str
    contender: str
    batch_scale: float = 1.0
    conditions: Conditions


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The result of a process: all raw times, or its error."""

    job: BenchJob
    seconds: list[float] = field(default_factory=list)
    release_seconds: list[float] = field(default_factory=list)
    peak_bytes: int | None = None
    parameters: int | None = None
    clipped_sum_norm: float | None = None
    error: str | None = None

    @property
    def best(self) -> float | None:
        return min(self.seconds, default=None) if self.error is None else None

    @property
    def median(self) -> float | None:
        return statistics.median(self.seconds) if self.seconds and self.error is None else None

    @property
    def best_release(self) -> float | None:
        return min(self.release_seconds, default=None) if self.error is None else None

    def to_json(self) -> dict[str, Any]:
        return {
            "contender": self.job.contender,
            "error": self.error,
            "best_seconds": self.best,
            "median_seconds": self.median,
            "best_release_seconds": self.best_release,
            "peak_bytes": self.peak_bytes,
            "parameters": self.parameters,
            "clipped_sum_norm": self.clipped_sum_norm,
            "seconds": self.seconds,
            "release_seconds": self.release_seconds,
        }


def race(title: str, jobs: Sequence[BenchJob], rounds: int, progress: Callable[[str], None]) -> list[Outcome]:
    """Run all jobs, round by round in turns. All processes end with this function, also after an error.

    Args:
        title: Name of the race in progress lines.
        jobs: What to measure, one process each.
        rounds: Number of rounds after the warm-up.
        progress: Called with a line of text at each round.
    """
    with ExitStack() as stack:
        workers = [stack.enter_context(_MeasuringProcess(job)) for job in jobs]
        for turn in range(rounds + 1):
            progress(f"{title}: " + (f"round {turn} of {rounds}" if turn else "building and warming up"))
            for worker in workers:
                worker.take_turn()
        return [worker.outcome() for worker in workers]


class _MeasuringProcess:
    """A measuring process, in its parent."""

    def __init__(self, job: BenchJob) -> None:
        self._job = job
        self._replies: list[dict[str, Any]] = []
        self._error: str | None = None

    def __enter__(self) -> _MeasuringProcess:
        import pmlf

        job, conditions = self._job, self._job.conditions
        command = [sys.executable, "-m", "pmlf.bench.measure", "--case", job.case, "--contender", job.contender]
        command += ["--batch-scale", str(job.batch_scale), "--threads", str(conditions.threads)]
        command += ["--clock", conditions.clock, "--freed-memory", conditions.freed_memory]
        paths = [str(Path(pmlf.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
        self._stderr = tempfile.TemporaryFile("w+", errors="replace")
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in paths if path)},
            start_new_session=True,  # Ctrl-C goes to the parent only, which then ends this process
        )
        return self

    def __exit__(self, *exception: object) -> None:
        self._process.kill()
        self._process.communicate()
        self._stderr.close()

    def take_turn(self) -> None:
        """Do one round, unless the process has failed. The first round is the warm-up."""
        if self._error is not None:
            return
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        try:
            stdin.write("go\n")
            stdin.flush()
            line = stdout.readline()
        except BrokenPipeError:
            line = ""
        reply: dict[str, Any] = json.loads(line) if line else {"error": self._cause_of_death()}
        self._error = reply.get("error")
        if self._error is None:
            self._replies.append(reply)

    def outcome(self) -> Outcome:
        """The result of all rounds."""
        if self._error is not None or not self._replies:
            return Outcome(job=self._job, error=self._error)
        first, *counted = self._replies
        return Outcome(
            job=self._job,
            seconds=[seconds for reply in counted for seconds in reply["seconds"]],
            release_seconds=[seconds for reply in counted for seconds in reply["release_seconds"]],
            peak_bytes=self._replies[-1]["peak_bytes"],
            parameters=first["parameters"],
            clipped_sum_norm=first["clipped_sum_norm"],
        )

    def _cause_of_death(self) -> str:
        code = self._process.wait()
        if code < 0:
            name = signal.Signals(-code).name
            return f"the process was killed by {name}" + (", perhaps out of memory" if name == "SIGKILL" else "")
        self._stderr.seek(0)
        lines = self._stderr.read().strip().splitlines()
        return f"the process ended with code {code}" + (f": {lines[-1]}" if lines else "")


# --- in the measuring process


def main() -> None:
    """Answer every line on stdin, until stdin ends because the parent has."""
    import tyro

    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of libraries must not mix with the lines of JSON
    _offer_to_oom_killer()
    job = tyro.cli(BenchJob, config=(tyro.conf.OmitArgPrefixes,))
    turns: queue.Queue[str] = queue.Queue()
    threading.Thread(target=_listen, args=(turns,), daemon=True).start()
    try:
        measured = _TimedContender(job, first=turns.get)
        while True:
            _reply(channel, measured.reply())
            turns.get()
    except Exception as error:
        _reply(channel, {"error": f"{type(error).__name__}: {_first_line(error)}"})


class _TimedContender:
    """The contender of a job, ready to be timed."""

    def __init__(self, job: BenchJob, first: Callable[[], str]) -> None:
        import torch

        from pmlf.bench import cases, contenders

        if job.conditions.freed_memory == "kept":
            machine.keep_freed_memory()
        torch.set_num_threads(job.conditions.threads)
        self._clock = _CLOCKS[job.conditions.clock]
        case, contender = cases.find(job.case), contenders.find(job.contender)
        for name in (*case.imports, *contender.imports):
            importlib.import_module(name)
        first()  # imports may run in parallel, work may not
        small = cases.CASES["linear"].prepare(0.002)
        _call(contender.prepare(*small, 1), self._clock)  # some libraries load modules at first use
        self._before = self._peak = _peak_bytes()
        model, batch = case.prepare(job.batch_scale)
        self._parameters = sum(parameter.numel() for parameter in model.parameters())
        self._runner = contender.prepare(model, batch, case.micro_batches)

    def reply(self) -> dict[str, Any]:
        """Do one round: the times of its calls, and the peak memory so far.

        The first call of a round is not timed: it restores caches that the other processes have used, which does not
        happen between the steps of a training.
        """
        _call(self._runner, self._clock)
        calls: list[_Call] = []
        while not _enough(calls):
            calls.append(_call(self._runner, self._clock))
        gc.collect()  # reference cycles must not accumulate over rounds
        self._peak = max(self._peak, _peak_bytes())  # Linux counts it approximately
        machine.return_freed_memory()  # the other processes need it
        return {
            "seconds": [call.seconds for call in calls],
            "release_seconds": [call.release_seconds for call in calls if call.release_seconds is not None],
            "peak_bytes": self._peak - self._before,
            "parameters": self._parameters,
            "clipped_sum_norm": calls[0].clipped_sum_norm,
        }


@dataclass(frozen=True, kw_only=True)
class _Call:
    seconds: float
    release_seconds: float | None
    clipped_sum_norm: float | None


def _enough(calls: Sequence[_Call]) -> bool:
    """Whether a round has enough calls."""
    spent = sum(call.seconds for call in calls)
    if len(calls) < _ROUND_CALLS or spent < _ROUND_SECONDS:
        return False
    return len(calls) >= _MORE_CALLS or spent >= _LONG_SECONDS


def _call(runner: Runner, clock: Callable[[], float]) -> _Call:
    start = clock()
    clipped_sum = runner.gradient()
    seconds, release_seconds = clock() - start, None
    if runner.release is not None:
        start = clock()
        clipped_sum = runner.release()
        release_seconds = clock() - start
    squares = [float(each.detach().norm()) ** 2 for each in clipped_sum]
    norm = runner.divisor * sum(squares) ** 0.5 if squares else None
    del clipped_sum
    runner.clear()
    return _Call(seconds=seconds, release_seconds=release_seconds, clipped_sum_norm=norm)


def _listen(turns: queue.Queue[str]) -> None:
    for line in sys.stdin:
        turns.put(line.strip())
    os._exit(1)  # also during a computation


def _reply(channel: TextIO, document: dict[str, Any]) -> None:
    print(json.dumps(document), file=channel, flush=True)


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), "")


def _peak_bytes() -> int:
    """Peak memory of this process. On Linux from /proc, because ru_maxrss starts at the parent's value after a fork."""
    status = Path("/proc/self/status")
    if status.exists():
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _offer_to_oom_killer() -> None:
    score = Path("/proc/self/oom_score_adj")
    if score.exists():
        score.write_text(str(_OOM_FIRST))


if __name__ == "__main__":
    main()
