"""A job: one of many runs, in its own folder, and the function that runs it."""

from __future__ import annotations

import fcntl
import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pmlf import machine
from pmlf.basics.files import write_json
from pmlf.experiments.results import SilentObserver
from pmlf.experiments.spec import GROUPS, RunSpec

RESULT = "result.json"
MACHINE = "machine.json"  # the machine of the run
CERTIFICATE = "certificate.json"
PROGRESS_SECONDS = 0.5  # least time between two reports of progress
# A key always names these. Anything else is left out at its default, so that a new option changes no earlier key.
_ALWAYS_IN_KEY = (
    *("method", "dataset", "model", "lr", "optimizer", "batch_size", "clip_norm", "clipping", "seed"),
    *("k", "beta", "a", "b", "gamma", "outer_momentum", "kappa"),
)


@dataclass(frozen=True, kw_only=True)
class Job:
    """A run and its folder."""

    spec: RunSpec
    folder: Path
    data_dir: Path | None = None
    threads: int | None = None  # of torch; None keeps the current number

    @property
    def key(self) -> str:
        """Identifies the job."""
        return self.folder.name

    @property
    def label(self) -> str:
        """The name of the job in progress displays and errors."""
        spec = self.spec
        trial = f", trial lr {spec.lr:g}" if spec.holdout else f", seed {spec.seed}"
        given = {name: value for name, value in vars(spec.options).items() if value is not None}
        options = "".join(f" {name}={str(value).replace(' ', '')}" for name, value in given.items())
        return f"{spec.method}{options}, {spec.model} on {spec.dataset}, epsilon {spec.epsilon:g}{trial}"


@dataclass(frozen=True, kw_only=True)
class JobProgress:
    """The number of steps that a job has done."""

    key: str
    step: int
    steps: int


OnProgress = Callable[[JobProgress], None]


def run_key(spec: RunSpec) -> str:
    """The name of a run's folder: a hash of its spec. Options at their default do not change it.

    >>> run_key(RunSpec(seed=1)) == run_key(RunSpec(seed=1)) != run_key(RunSpec(seed=2))
    True
    """
    defaults = asdict(RunSpec())
    hashed = _named(asdict(spec), defaults)
    hashed |= {group: _named(hashed[group], defaults[group]) for group in GROUPS if group in hashed}
    return hashlib.sha256(json.dumps(hashed, sort_keys=True).encode()).hexdigest()[:16]


def _named(values: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name in _ALWAYS_IN_KEY or value != defaults[name]}


def job(spec: RunSpec, runs: Path, *, data_dir: Path | None = None, threads: int | None = None) -> Job:
    """The job of a spec, with its folder in the folder `runs`."""
    return Job(spec=spec, folder=runs / run_key(spec), data_dir=data_dir, threads=threads)


def finished(folder: Path) -> bool:
    """Whether the run in this folder is complete. Raises ValueError if the folder is damaged."""
    if not (folder / RESULT).is_file():
        return False
    try:
        interrupted = json.loads((folder / RESULT).read_text())["interrupted"]
        for beside in (CERTIFICATE, MACHINE):
            json.loads((folder / beside).read_text())
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{str(folder)!r} is damaged: restore it, or remove it to run it again") from error
    return not interrupted


def run_job(job: Job, on_progress: OnProgress) -> None:
    """Run or resume a job, unless it is complete. Only one process at a time works in a folder.

    Raises:
        KeyboardInterrupt: If a signal asked the run to stop.
    """
    import torch

    from pmlf.experiments import runner

    if job.threads is not None:
        torch.set_num_threads(job.threads)
    with locked(job.folder):
        if finished(job.folder):
            return
        observer = _ProgressObserver(job, on_progress)
        result = runner.run(job.spec, job.folder, data_dir=job.data_dir, observer=observer, resume=True)
        if result.signalled_by is not None:
            raise KeyboardInterrupt


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock of a file or folder; wait while another process holds it. A killed process releases its lock."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with (path.parent / f".{path.name}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


class _ProgressObserver(SilentObserver):
    """Writes machine.json when a run starts or resumes, and reports its steps."""

    def __init__(self, job: Job, on_progress: OnProgress) -> None:
        self._job, self._on_progress = job, on_progress
        self._steps, self._last_report = 0, 0.0

    def started(self, spec: RunSpec, steps: int) -> None:
        import torch

        where = {**machine.describe("torch", "pmlf"), "code": machine.code(), "device": spec.device}
        write_json(self._job.folder / MACHINE, {"threads": torch.get_num_threads(), "machine": where})
        self._steps = steps
        self._on_progress(JobProgress(key=self._job.key, step=0, steps=steps))

    def stepped(self, step: int, training_loss: float | None) -> None:
        now = time.monotonic()
        if now - self._last_report > PROGRESS_SECONDS:
            self._last_report = now
            self._on_progress(JobProgress(key=self._job.key, step=step, steps=self._steps))
