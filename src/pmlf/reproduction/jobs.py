"""A job: one run of a list, in a folder of its own, and what carries it out wherever it is executed."""

from __future__ import annotations

import fcntl
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pmlf import machine
from pmlf.basics.files import write_json
from pmlf.experiments.results import Unobserved
from pmlf.experiments.spec import RunSpec
from pmlf.reproduction.artifacts import run_key

RESULT = "result.json"
MACHINE = "machine.json"  # what the run went on, from its first checkpoint on
CERTIFICATE = "certificate.json"
_SECONDS_BETWEEN_NEWS = 0.5


@dataclass(frozen=True, kw_only=True)
class Job:
    """A run and where it goes."""

    spec: RunSpec
    folder: Path
    data_dir: Path | None = None
    threads: int | None = None  # of torch; None leaves them as they are

    @property
    def key(self) -> str:
        return self.folder.name

    @property
    def label(self) -> str:
        """What a progress display calls it."""
        spec = self.spec
        trial = f", trial lr {spec.lr:g}" if spec.holdout else f", seed {spec.seed}"
        given = {name: value for name, value in vars(spec.options).items() if value is not None}
        options = "".join(f" {name}={str(value).replace(' ', '')}" for name, value in given.items())
        return f"{spec.method}{options}, {spec.model} on {spec.dataset}, epsilon {spec.epsilon:g}{trial}"


@dataclass(frozen=True, kw_only=True)
class News:
    """How far a job has come."""

    key: str
    step: int
    steps: int


Tell = Callable[[News], None]


def job(spec: RunSpec, runs: Path, *, data_dir: Path | None = None, threads: int | None = None) -> Job:
    """The job of a spec in the folder of all runs."""
    return Job(spec=spec, folder=runs / run_key(spec), data_dir=data_dir, threads=threads)


def finished(folder: Path) -> bool:
    """Whether the run of this folder came to its end; a folder that is damaged is refused by name."""
    if not (folder / RESULT).is_file():
        return False
    try:
        interrupted = json.loads((folder / RESULT).read_text())["interrupted"]
        for beside in (CERTIFICATE, MACHINE):
            json.loads((folder / beside).read_text())
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{str(folder)!r} is damaged: put it back as it was, or remove it to run it again") from error
    return not interrupted


def carry_out(job: Job, tell: Tell) -> None:
    """Run a job unless it is finished, from where it was cut off if it was; one process at a time in a folder."""
    import torch

    from pmlf.experiments import runner
    from pmlf.reproduction import stand_ins

    if job.threads is not None:
        torch.set_num_threads(job.threads)
    with alone(job.folder):
        if finished(job.folder):
            return
        spec = stand_ins.in_place(job.spec, job.folder.parent)
        result = runner.run(spec, job.folder, data_dir=job.data_dir, observer=_Telling(job, tell), resume=True)
        if result.signalled_by is not None:
            raise KeyboardInterrupt


@contextmanager
def alone(path: Path) -> Iterator[None]:
    """Wait until no other process works on this file or folder; the lock of one that was killed is gone with it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with (path.parent / f".{path.name}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


class _Telling(Unobserved):
    """Notes the machine when a run begins or goes on, and passes on the step count, now and then."""

    def __init__(self, job: Job, tell: Tell) -> None:
        self._job, self._tell = job, tell
        self._steps, self._told = 0, 0.0

    def started(self, spec: RunSpec, steps: int) -> None:
        import torch

        where = {**machine.describe("torch", "pmlf"), "code": machine.code(), "device": spec.device}
        write_json(self._job.folder / MACHINE, {"threads": torch.get_num_threads(), "machine": where})
        self._steps = steps
        self._tell(News(key=self._job.key, step=0, steps=steps))

    def stepped(self, step: int, training_loss: float | None) -> None:
        now = time.monotonic()
        if now - self._told > _SECONDS_BETWEEN_NEWS:
            self._told = now
            self._tell(News(key=self._job.key, step=step, steps=self._steps))
