"""`pmlf train --ray-workers N`: Ray Train starts N workers, and each of them is a rank of one run.

A worker does what a process of torchrun does, in the process group that Ray Train has opened. This process trains
nothing: it starts the workers, shows the progress, passes signals on, and prints the result or the error.

Settings, progress, result and messages go through Ray. Draws, keys and sums go from rank to rank by torch.distributed.
Ray never starts a worker again: `pmlf train --resume` does, and reads in the ledger what is spent.
"""

from __future__ import annotations

import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pmlf.basics.arguments import require_count
from pmlf.cli import ray_cluster
from pmlf.cli.common import CommandFailure, say, telling_warnings
from pmlf.experiments.results import Evaluation, RunObserver, RunResult
from pmlf.experiments.spec import RunSpec, flag
from pmlf.parallel.failure import RankFailed

if TYPE_CHECKING:
    from pmlf.cli.training import Train

_SECONDS = 0.25  # between two messages of a worker, whatever its steps take: the time of a single step is not public
_SENSITIVE = ("show_sensitive", "diagnostics", "check_on_data")


def refuse_impossible(command: Train, workers: int) -> None:
    """Refuse what Ray's workers cannot do, before Ray is started.

    Raises:
        ValueError: The number of workers or another option is refused.
    """
    require_count("ray_workers", workers, "it is the number of workers that take every step together")
    for name in _SENSITIVE:
        if getattr(command, name):
            raise ValueError(
                f"{flag(name)} shows numbers computed from private records, which must not go through Ray: leave it "
                "out, or train without --ray-workers"
            )
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise ValueError("--ray-workers starts its own processes: type `pmlf train` without torchrun")


def run(command: Train, spec: RunSpec, out: Path, workers: int, observer: RunObserver) -> RunResult:
    """Run a spec on workers of Ray Train.

    Args:
        command: The command with its options.
        spec: The run.
        out: Its folder.
        workers: The number of workers.
        observer: Receives the progress.

    Returns:
        The result, as rank 0 tells it.

    Raises:
        ValueError: The run, or Ray on this machine, is refused.
        RankFailed: A worker has failed or died.
    """
    from pmlf.experiments.execution import deferred_signals
    from pmlf.experiments.folder import RunFolder

    if command.resume is None:
        RunFolder(out).refuse_existing()
    rank = _Rank(command=replace(command, data_dir=_data_dir(command)), spec=spec, out=out, folder=Path.cwd())
    gpus = spec.device.startswith("cuda")
    with ray_cluster.own_folder() as folder, ray_cluster.connected(workers, gpus=gpus, folder=folder) as ray:
        audience = _Audience(observer)
        try:
            desk = ray.remote(num_cpus=0)(Desk).remote()
            fitting = _Fitting(partial(ray_cluster.fit, partial(_work, rank, desk), workers, gpus, folder))
            with deferred_signals() as interruption:
                while fitting.goes_on():
                    audience.hear(ray.get(desk.take.remote(interruption.by)))
            audience.hear(ray.get(desk.take.remote(None)))
        except ray.exceptions.RayError as error:
            raise RankFailed(f"Ray has lost what it needs for this run: {' '.join(str(error).split())}") from error
    if fitting.error is None:
        assert isinstance(fitting.result, RunResult)
        return fitting.result
    raise _failure(audience.failures, fitting.error, workers) from None


@dataclass(frozen=True, kw_only=True)
class _Started:
    spec: RunSpec
    steps: int


@dataclass(frozen=True, kw_only=True)
class _Stepped:
    step: int


@dataclass(frozen=True, kw_only=True)
class _Warned:
    message: str


@dataclass(frozen=True, kw_only=True)
class _Failed:
    """A worker's last message."""

    rank: int
    failure: CommandFailure
    caused_by_others: bool
    trace: str | None  # of an error that nobody expects


_Message = _Started | _Stepped | Evaluation | _Warned | _Failed


class Desk:
    """Where workers leave messages for the command, and learn whether it was asked to stop. It is an actor of Ray."""

    def __init__(self) -> None:
        self._messages: list[_Message] = []
        self._stop: str | None = None

    def leave(self, messages: Sequence[_Message]) -> str | None:
        """Leave messages. Returns the name of the signal that asks for a stop, or None."""
        self._messages.extend(messages)
        return self._stop

    def take(self, stop: str | None) -> list[_Message]:
        """Take all messages, and ask for a stop if there is the name of a signal."""
        self._stop = stop or self._stop
        taken, self._messages = self._messages, []
        return taken


class _Audience:
    """Shows what workers say."""

    def __init__(self, observer: RunObserver) -> None:
        self._observer = observer
        self.failures: list[_Failed] = []

    def hear(self, messages: Sequence[_Message]) -> None:
        for message in messages:
            match message:
                case _Started(spec=spec, steps=steps):
                    self._observer.started(spec, steps)
                case _Stepped(step=step):
                    self._observer.stepped(step, None)
                case Evaluation():
                    self._observer.evaluated(message)
                case _Warned(message=text):
                    say(text)
                case _Failed():
                    self.failures.append(message)


class _Fitting:
    """A call that goes on in a thread, while this one handles signals."""

    def __init__(self, fit: Callable[[], Any]) -> None:
        self.result: Any = None
        self.error: Exception | None = None
        self._fit = fit
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.result = self._fit()
        except Exception as error:
            self.error = error

    def goes_on(self) -> bool:
        """Wait a moment for the end. Whether there is none yet."""
        self._thread.join(_SECONDS)
        return self._thread.is_alive()


def _failure(failures: Sequence[_Failed], error: Exception, workers: int) -> ValueError | RankFailed:
    """What the command reports: the cause that a worker told, else which workers died and what the others noticed."""
    died = ray_cluster.failed_ranks(error) - {failed.rank for failed in failures}
    gone = f"rank {', '.join(map(str, sorted(died)))} of {workers} has died, or Ray has lost its machine"
    if not failures:
        reason = f"{gone}; the ledger counts every step that was released" if died else " ".join(str(error).split())
        return RankFailed(f"Ray has stopped the workers: {reason}")
    first = min(failures, key=lambda failed: (failed.caused_by_others, failed.rank))
    if first.trace is not None:
        print(first.trace, file=sys.stderr)
    sentence = f"{gone}; {first.failure.sentence}" if died and first.caused_by_others else first.failure.sentence
    return RankFailed(sentence) if first.failure.exit_code == 1 else ValueError(sentence)


@dataclass(frozen=True, kw_only=True)
class _Rank:
    """What every worker is told."""

    command: Train
    spec: RunSpec
    out: Path
    folder: Path  # where the command was typed: paths are relative to it


class _WorkerFailed(RuntimeError):
    """Tells Ray Train to stop all workers. The reason is at the desk, not in Ray's logs."""


def _work(rank: _Rank, desk: Any) -> RunResult | None:
    """What Ray Train runs on every worker: the work of a rank. Rank 0 returns the result."""
    import torch.distributed as dist

    number = dist.get_rank()
    line = _LineToDesk(desk)
    failed = None
    with line.open(talks=number == 0):
        try:
            os.chdir(rank.folder)
            result = rank.command.run(rank.spec, rank.out, line, first=number == 0, asked_to_stop=lambda: line.stop)
        except (RankFailed, ValueError, OSError) as error:
            failure, by_others = CommandFailure.of(error, rank.command), isinstance(error, RankFailed)
            failed = _Failed(rank=number, failure=failure, caused_by_others=by_others, trace=None)
        except Exception as error:
            failure = CommandFailure(sentence=f"rank {number} failed: {type(error).__name__}", exit_code=1)
            failed = _Failed(rank=number, failure=failure, caused_by_others=False, trace=traceback.format_exc())
        if failed is not None:
            line.say(failed)
    if failed is not None:
        raise _WorkerFailed(f"rank {number} has stopped, and `pmlf train` says why")
    return result if number == 0 else None


@dataclass
class _LineToDesk:
    """A worker's line to the desk: a `RunObserver` that leaves its messages there, many steps at a time."""

    desk: Any
    stop: str | None = None  # the signal that asks for a stop
    _messages: list[_Message] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @contextmanager
    def open(self, *, talks: bool) -> Iterator[None]:
        """A block during which messages go to the desk: at regular times if this worker talks, and at the end."""
        ended = threading.Event()

        def send_regularly() -> None:
            while not ended.wait(_SECONDS):
                self._send()

        sending = threading.Thread(target=send_regularly, daemon=True)
        with telling_warnings(lambda text: self.say(_Warned(message=text)) if talks else None):
            if talks:
                sending.start()
            try:
                yield
            finally:
                ended.set()
                if talks:
                    sending.join()
                self._send()

    def say(self, message: _Message) -> None:
        with self._lock:
            if isinstance(message, _Stepped) and self._messages and isinstance(self._messages[-1], _Stepped):
                self._messages.pop()
            self._messages.append(message)

    def started(self, spec: RunSpec, steps: int) -> None:
        self.say(_Started(spec=spec, steps=steps))

    def stepped(self, step: int, training_loss: float | None) -> None:
        assert training_loss is None  # it is sensitive
        self.say(_Stepped(step=step))

    def evaluated(self, evaluation: Evaluation) -> None:
        assert evaluation.training_loss is None
        self.say(evaluation)

    def _send(self) -> None:
        import ray

        with self._lock:
            messages, self._messages = self._messages, []
        self.stop = ray.get(self.desk.leave.remote(messages))


def _data_dir(command: Train) -> Path | None:
    """The folder of datasets: a worker's environment may lack the variable that names it here."""
    from pmlf.data.sources import DATA_DIR_VARIABLE

    given = command.data_dir or os.environ.get(DATA_DIR_VARIABLE)
    return None if given is None else Path(given)
