"""Carry out a run in its folder: begin it, or go on with it where it was cut off, and leave its results.

Nothing is printed here: an `Observer` is told. Nothing sensitive is told or written unless it is asked for.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pmlf.arguments import require_count
from pmlf.experiments import tasks
from pmlf.experiments.checking import check_model
from pmlf.experiments.diagnostics import Probe
from pmlf.experiments.folder import RunFolder, continued
from pmlf.experiments.progress import Progress
from pmlf.experiments.results import Evaluation, Observer, RunResult, Unobserved, comparison_json
from pmlf.experiments.signals import noted_signals
from pmlf.experiments.spec import RunSpec
from pmlf.experiments.tasks import Task
from pmlf.files import write_json
from pmlf.inspection import Checked
from pmlf.ledger import Ledger
from pmlf.sampling import LogicalBatch
from pmlf.training import PrivateRun, make_private

_SECONDS_BETWEEN_CHECKPOINTS = 60.0


def run(
    spec: RunSpec,
    out: Path,
    *,
    data_dir: Path | None = None,
    observer: Observer | None = None,
    show_sensitive: bool = False,
    resume: bool = False,
    ledger: Path | None = None,
    checkpoint_every: int | None = None,
    diagnostics: bool = False,
    show_check: Callable[[Checked], None] | None = None,
) -> RunResult:
    """Train as `spec` says, evaluate once an epoch, and leave the results in the new folder `out`.

    What cannot be trained leaves no folder; `pmlf.check` looks for it on synthetic inputs first. `show_check` is given
    what it measures on the first records as well: sensitive, and written nowhere. SIGINT and SIGTERM (and a
    KeyboardInterrupt from the observer) end the run when the step that runs is over, with all that was released and a
    checkpoint in the folder.

    With `resume` a folder that exists is gone on with where its run was cut off, and the stored result of a finished
    run is returned; the spec must be the run's own, and may ask for more epochs or steps. `ledger` is a file that runs
    on the same dataset share; by default each run has its own. A checkpoint is made every `checkpoint_every` steps, or
    every minute.
    """
    if diagnostics and resume:
        raise ValueError("diagnostics are of a run from its first step on: begin a new run with them")
    if checkpoint_every is not None:
        require_count("checkpoint_every", checkpoint_every, "it counts the steps from one checkpoint to the next")
    folder = RunFolder(out)
    saved: Mapping[str, Any] | None = None
    if resume and folder.begun():
        stored, finished = folder.spec(), folder.finished()
        spec = continued(stored, spec)
        if finished is not None and spec == stored:
            return finished
        if finished is not None:
            raise ValueError(f"the run in {str(out)!r} is finished, so its plan cannot change: begin a new run")
        saved = folder.load()
    else:
        folder.refuse_existing()
    task = tasks.prepare(spec, data_dir)
    spec = spec.resolved(task.records)
    if saved is None:
        progress = Progress.start(task, ledger or folder.own_ledger)
        folder.make(spec)
    else:
        progress = Progress.from_state(saved["progress"])
        progress.check(task, seeded=spec.seed is not None)
        progress.ledger = progress.ledger if ledger is None else ledger.absolute()
    progress.sensitive_shown |= show_sensitive
    progress.diagnosed |= diagnostics
    new_ledger, book = not progress.ledger.exists(), None
    try:
        with progress.same_threads(), Ledger(progress.ledger, dataset=spec.dataset, run=progress.run) as book:
            losses = _LossMeter() if show_sensitive else None
            private = _prepare(spec, task, losses, book)
            if spec.max_physical_batch_size == "auto":
                spec = replace(spec, max_physical_batch_size=private.max_physical_batch_size)
                folder.write_spec(spec)
            check_model(private.model, task, spec, show_check)
            if saved is not None:
                _restore(private, saved["run"])
                folder.go_on(spec)
            return _Execution(
                spec=spec,
                task=task,
                private=private,
                folder=folder,
                progress=progress,
                losses=losses,
                probe=Probe(private, task, spec) if diagnostics else None,
                observer=observer or Unobserved(),
                checkpoint_every=checkpoint_every,
            ).carry_out()
    except BaseException:
        if saved is None and (book is None or book.tally.events_of(progress.run) == 0):
            folder.remove()
            if new_ledger:
                progress.ledger.unlink(missing_ok=True)
        raise


def compare(
    specs: Sequence[RunSpec],
    out: Path,
    *,
    data_dir: Path | None = None,
    observer: Observer | None = None,
    show_sensitive: bool = False,
    checkpoint_every: int | None = None,
) -> tuple[RunResult, ...]:
    """Run one spec after another, each into a folder of `out` named after its method, and write comparison.json."""
    RunFolder(out).refuse_existing()
    for spec in specs:
        spec.build_method()  # so that the last method's mistake is not found after the first one's training
    results: list[RunResult] = []
    try:
        for spec in specs:
            folder = out / spec.method
            result = run(
                spec,
                folder,
                data_dir=data_dir,
                observer=observer,
                show_sensitive=show_sensitive,
                checkpoint_every=checkpoint_every,
            )
            results.append(result)
            if results[-1].interrupted:
                break
    finally:
        if results:
            write_json(out / "comparison.json", comparison_json(results, out))
        elif out.is_dir() and not any(out.iterdir()):
            out.rmdir()
    return tuple(results)


class _LossMeter:
    """Mean loss of one step's records over its evaluation points: sensitive, so it exists only on demand."""

    def __init__(self) -> None:
        self._sum, self._count = 0.0, 0

    def add(self, losses: Tensor) -> None:
        self._sum += float(losses.detach().sum())
        self._count += len(losses)

    def take(self) -> float | None:
        mean = self._sum / self._count if self._count else None  # an empty batch has no loss
        self._sum, self._count = 0.0, 0
        return mean


@dataclass(kw_only=True)
class _Execution:
    """A run under way."""

    spec: RunSpec
    task: Task
    private: PrivateRun
    folder: RunFolder
    progress: Progress
    losses: _LossMeter | None
    probe: Probe | None
    observer: Observer
    checkpoint_every: int | None

    def carry_out(self) -> RunResult:
        """All the steps that are left: to the end, to the end of the budget, or to an interruption."""
        private = self.private
        self._begin = time.monotonic() - self.progress.seconds
        interrupted_by = None
        try:
            with noted_signals() as interruption:
                self._save()  # also before the first step, so that a run which was cut off is always found again
                self.observer.started(self.spec, private.steps)
                if private.steps_done:
                    self.observer.stepped(private.steps_done, None)
                for batch in private.batches():
                    self._step(batch)
                    if interruption.by:
                        break
            if private.steps_done < private.steps:
                interrupted_by = interruption.by
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
            noise_multiplier=private.private_step.noise_multiplier,
            steps=private.steps_done,
            planned_steps=private.steps,
            seconds=self.progress.seconds,
            interrupted_by=interrupted_by,
            evaluations=tuple(self.progress.evaluations),
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
        if private.steps_done % private.steps_per_epoch == 0 or private.steps_done == private.steps:
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


def _restore(private: PrivateRun, state: dict[str, Any]) -> None:
    planned = state["mechanism"]["steps"]
    private.load_state_dict(state)
    if private.steps != planned and not private.spending.affords(private.steps_done):
        raise ValueError(
            f"a plan of {private.steps} steps where {planned} were planned is made after seeing results, and by the "
            f"RDP filter that this takes epsilon={private.spending.target_epsilon} has no room for another step: "
            "resume with the plan as it was"
        )


def _prepare(spec: RunSpec, task: Task, losses: _LossMeter | None, ledger: Ledger) -> PrivateRun:
    device = _device(spec.device)

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=spec.autocast):
            loss = task.losses(model, batch)
        if losses:
            losses.add(loss)
        return loss

    method = spec.build_method()
    model = task.model.to(device)
    assert spec.delta is not None
    return make_private(
        model=model,
        optimizer=_optimizer(spec, model),
        dataset=task.train,
        loss_fn=loss_fn,
        method=method,
        target_epsilon=spec.epsilon,
        target_delta=spec.delta,
        noise_multiplier=spec.noise_multiplier,
        batch_size=spec.batch_size,
        epochs=spec.epochs,
        steps=spec.steps,
        clip_norm=spec.clip_norm,
        clipping=spec.clipping,  # type: ignore[arg-type]  # refused there if it is not known
        max_physical_batch_size=spec.max_physical_batch_size,
        seed=spec.seed,
        ema=spec.ema,
        augmentation=task.augmentation,
        collate_fn=task.collate_fn,
        secure_noise=spec.secure_noise,
        ledger=ledger,
        lengths=task.lengths,
    )


def _optimizer(spec: RunSpec, model: nn.Module) -> Optimizer:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if spec.optimizer == "adam":
        return torch.optim.Adam(trained, lr=spec.lr)
    return torch.optim.SGD(trained, lr=spec.lr)


def _device(name: str) -> torch.device:
    try:
        return torch.zeros(1, device=name).device
    except (RuntimeError, AssertionError) as error:  # the latter where torch was built without the device
        raise ValueError(f"device={name!r} cannot be used here: give cpu, or a device that torch finds") from error


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
