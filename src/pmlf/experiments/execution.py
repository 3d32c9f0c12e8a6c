"""A run under way: its steps, evaluations and checkpoints, to its end or to an interruption."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice

from torch import Tensor

from pmlf.experiments.diagnostics import Probe
from pmlf.experiments.folder import RunFolder
from pmlf.experiments.progress import Progress
from pmlf.experiments.results import Evaluation, Observer, RunResult
from pmlf.experiments.signals import noted_signals
from pmlf.experiments.spec import RunSpec
from pmlf.experiments.tasks import Task
from pmlf.mechanism.sampling import LogicalBatch
from pmlf.run.private_run import PrivateRun

_SECONDS_BETWEEN_CHECKPOINTS = 60.0


class LossMeter:
    """Mean loss of one step's records over its evaluation points: sensitive, so it exists only on demand."""

    def __init__(self) -> None:
        self._sum, self._count = 0.0, 0

    def add(self, losses: Tensor) -> None:
        if type(losses) is not Tensor:  # a proof of independence is tried, in which nothing may be read
            return
        self._sum += float(losses.detach().sum())
        self._count += len(losses)

    def take(self) -> float | None:
        mean = self._sum / self._count if self._count else None  # an empty batch has no loss
        self._sum, self._count = 0.0, 0
        return mean


@dataclass(kw_only=True)
class Execution:
    """A run under way."""

    spec: RunSpec
    task: Task
    private: PrivateRun
    folder: RunFolder
    progress: Progress
    losses: LossMeter | None
    probe: Probe | None
    observer: Observer
    checkpoint_every: int | None

    def carry_out(self) -> RunResult:
        """All the steps that are left: to the end, to the end of the budget, or to an interruption."""
        private = self.private
        self._steps = self.spec.steps_to_take(private.steps)
        self._begin = time.monotonic() - self.progress.seconds
        interrupted_by = signalled_by = None
        try:
            with noted_signals() as interruption:
                self._save()  # also before the first step, so that a run which was cut off is always found again
                self.observer.started(self.spec, self._steps)
                if private.steps_done:
                    self.observer.stepped(private.steps_done, None)
                for batch in islice(private.batches(), self._steps - private.steps_done):
                    self._step(batch)
                    if interruption.by:
                        break
            signalled_by = interruption.by
            if private.steps_done < self._steps:
                interrupted_by = signalled_by
            if interrupted_by is None and self._last_evaluated() != private.steps_done:  # the budget was spent
                self._evaluate(None)
        except KeyboardInterrupt:
            interrupted_by = "SIGINT"
        except Exception:
            if private.spending.run_events:
                with suppress(OSError):  # a full disk, say: what went wrong first is what to tell
                    self._leave()
            raise
        self._leave()
        if self.probe and private.steps_done > 1:
            self.folder.write_diagnostics(self.probe.document())
        result = RunResult(
            spec=self.spec,
            out=self.folder.path,
            epsilon=private.epsilon(),
            certified_epsilon=private.spending.claim(),
            noise_multiplier=private.private_step.noise_multiplier,
            steps=private.steps_done,
            planned_steps=self._steps,
            seconds=self.progress.seconds,
            interrupted_by=interrupted_by,
            evaluations=tuple(self.progress.evaluations),
            signalled_by=interrupted_by or signalled_by,
        )
        self.folder.write_result(result)
        return result

    def _step(self, batch: LogicalBatch) -> None:
        private = self.private
        if self.probe:
            self.probe.look()
        private.step(batch)
        training_loss = self.losses.take() if self.losses else None
        self.observer.stepped(private.steps_done, training_loss)
        if private.steps_done % private.steps_per_epoch == 0 or private.steps_done == self._steps:
            self._evaluate(training_loss)
        if self.checkpoint_every is None:
            due = time.monotonic() - self._saved > _SECONDS_BETWEEN_CHECKPOINTS
        else:
            due = private.steps_done % self.checkpoint_every == 0
        if due:
            self._save()

    def _evaluate(self, training_loss: float | None) -> None:
        evaluation = _evaluation(self.private, self.task, training_loss)
        self.progress.evaluations.append(evaluation)
        self.folder.write_metrics(self.progress.evaluations)
        self.observer.evaluated(evaluation)

    def _last_evaluated(self) -> int | None:
        return self.progress.evaluations[-1].step if self.progress.evaluations else None

    def _save(self) -> None:
        self._saved = time.monotonic()
        self.progress.seconds = self._saved - self._begin
        self.folder.save(self.spec, self.progress.to_state(), self.private.state_dict())

    def _leave(self) -> None:
        """What was released, and the account of it; after a step that broke off halfway the account alone."""
        if self.private.between_steps:
            self._save()
            self.folder.write_metrics(self.progress.evaluations)
            self.folder.write_models(self.private)
        self.folder.write_certificate(self.private, self.progress.not_accounted_for)


def _evaluation(private: PrivateRun, task: Task, training_loss: float | None) -> Evaluation:
    averaged = private.averaged_model()
    return Evaluation(
        step=private.steps_done,
        epoch=round(private.steps_done * private.private_step.expected_batch_size / task.records, 4),
        epsilon=private.epsilon(),
        scores=task.scores(private.model),
        ema_scores=None if averaged is None else task.scores(averaged),
        training_loss=training_loss,
    )
