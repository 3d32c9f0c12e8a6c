"""The execution of a run: steps, evaluations and checkpoints, until it is complete or interrupted."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FrameType
from typing import Any

from torch import Tensor

from pmlf.experiments.diagnostics import Probe
from pmlf.experiments.folder import RunFolder
from pmlf.experiments.progress import RunProgress
from pmlf.experiments.results import Evaluation, RunObserver, RunResult
from pmlf.experiments.spec import RunSpec
from pmlf.experiments.tasks import Task
from pmlf.mechanism.sampling import LogicalBatch
from pmlf.run.private_run import PrivateRun

_SECONDS_BETWEEN_CHECKPOINTS = 60.0
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class LossMeter:
    """Mean training loss of a step over its records and evaluation points. Sensitive: used only on request."""

    def __init__(self) -> None:
        self._sum, self._count = 0.0, 0

    def add(self, losses: Tensor) -> None:
        """Add the losses of a micro-batch."""
        if type(losses) is not Tensor:  # a tracer of the independence proof, which has no values
            return
        self._sum += float(losses.detach().sum())
        self._count += len(losses)

    def take(self) -> float | None:
        """Return the mean since the last call, None if no losses were added, and start again."""
        mean = self._sum / self._count if self._count else None  # an empty batch has no loss
        self._sum, self._count = 0.0, 0
        return mean


@dataclass(kw_only=True)
class Execution:
    """One run: takes its steps, evaluates, writes checkpoints and results."""

    spec: RunSpec
    task: Task
    private: PrivateRun
    folder: RunFolder
    progress: RunProgress
    losses: LossMeter | None
    probe: Probe | None

    def run(
        self,
        observer: RunObserver,
        checkpoint_every: int | None,
        asked_to_stop: Callable[[], str | None] | None = None,
    ) -> RunResult:
        """Take the remaining steps, until the run is complete, out of budget or interrupted."""
        private = self.private
        self._observer, self._checkpoint_every = observer, checkpoint_every
        self._begin = time.monotonic() - self.progress.seconds
        interrupted_by = signalled_by = None
        try:
            with deferred_signals() as interruption:
                self._save()  # also before the first step, so that every run can be resumed
                self._observer.started(self.spec, private.steps)
                if private.steps_done:
                    self._observer.stepped(private.steps_done, None)
                for batch in private.batches():
                    self._step(batch)
                    if asked_to_stop is not None and interruption.by is None:
                        interruption.by = asked_to_stop()
                    if private.processes.by_first(lambda: interruption.by):
                        break
            signalled_by = interruption.by
            if private.steps_done < private.steps:
                interrupted_by = signalled_by
            if interrupted_by is None and self._last_evaluated() != private.steps_done:  # out of budget
                self._evaluate(None)
        except KeyboardInterrupt:
            interrupted_by = "SIGINT"
        except Exception:
            if private.budget.run_events:
                with suppress(OSError):  # for example a full disk: report the first error
                    self._leave()
            raise
        self._leave()
        if self.probe and private.steps_done > 1:
            self.folder.write_diagnostics(self.probe.document())
        result = RunResult(
            spec=self.spec,
            out=self.folder.path,
            epsilon=private.epsilon(),
            certified_epsilon=private.budget.claim(),
            noise_multiplier=private.private_step.settings.noise_multiplier,
            steps=private.steps_done,
            planned_steps=private.steps,
            seconds=self.progress.seconds,
            interrupted_by=interrupted_by,
            evaluations=tuple(self.progress.evaluations),
            signalled_by=interrupted_by or signalled_by,
        )
        self.folder.write_result(result)
        private.end()
        return result

    def _step(self, batch: LogicalBatch) -> None:
        private = self.private
        if self.probe:
            self.probe.measure()
        private.step(batch)
        training_loss = self.losses.take() if self.losses else None
        self._observer.stepped(private.steps_done, training_loss)
        if private.steps_done % private.steps_per_epoch == 0 or private.steps_done == private.steps:
            self._evaluate(training_loss)
        if self._checkpoint_every is None:
            due = time.monotonic() - self._saved > _SECONDS_BETWEEN_CHECKPOINTS
        else:
            due = private.steps_done % self._checkpoint_every == 0
        if due:
            self._save()

    def _evaluate(self, training_loss: float | None) -> None:
        evaluation = _evaluation(self.private, self.task, training_loss)
        self.progress.evaluations.append(evaluation)
        self.folder.write_metrics(self.progress.evaluations)
        self._observer.evaluated(evaluation)
        self.private.log_evaluation(evaluation.numbers())

    def _last_evaluated(self) -> int | None:
        return self.progress.evaluations[-1].step if self.progress.evaluations else None

    def _save(self) -> None:
        self._saved = time.monotonic()
        self.progress.seconds = self._saved - self._begin
        self.folder.save(self.spec, self.progress.to_state(), self.private.state_dict())

    def _leave(self) -> None:
        """Write the released model and the certificate. After an error within a step: the certificate alone."""
        if self.private.between_steps:
            self._save()
            self.folder.write_metrics(self.progress.evaluations)
            self.folder.write_models(self.private)
            self.task.write_form(self.folder.path)
        left_out = [*self.progress.not_accounted_for, *self.spec.not_accounted_for]
        self.folder.write_certificate(self.private, left_out)


def follow(private: PrivateRun) -> None:
    """Take the remaining steps on a rank other than 0, which evaluates and writes alone, and decides when to stop."""
    with deferred_signals():  # rank 0 receives them too
        for batch in private.batches():
            private.step(batch)
            if private.processes.by_first(lambda: None):
                break


def _evaluation(private: PrivateRun, task: Task, training_loss: float | None) -> Evaluation:
    averaged = private.averaged_model()
    return Evaluation(
        step=private.steps_done,
        epoch=round(private.steps_done * private.private_step.settings.expected_batch_size / task.population, 4),
        epsilon=private.epsilon(),
        scores=task.scores(private.model),
        ema_scores=None if averaged is None else task.scores(averaged),
        training_loss=training_loss,
    )


class _Interruption:
    """The name of the signal that asked the run to stop, or None."""

    def __init__(self) -> None:
        self.by: str | None = None


@contextmanager
def deferred_signals() -> Iterator[_Interruption]:
    """Record SIGINT and SIGTERM instead of acting on them. A second signal acts at once."""
    interruption = _Interruption()
    if threading.current_thread() is not threading.main_thread():  # Python handles signals only in the main thread
        yield interruption
        return
    before: dict[signal.Signals, Any] = {number: signal.getsignal(number) for number in _STOP_SIGNALS}
    before = {number: handler for number, handler in before.items() if handler not in (None, signal.SIG_IGN)}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def record(number: int, frame: FrameType | None) -> None:
        interruption.by = signal.Signals(number).name
        restore()

    for number in before:
        signal.signal(number, record)
    try:
        yield interruption
    finally:
        restore()
