"""Carry out a run in its folder: begin it, or go on with it where it was cut off, and leave its results.

Nothing is printed here: an `Observer` is told. Nothing sensitive is told or written unless it is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pmlf import machine
from pmlf.basics.arguments import require_count
from pmlf.basics.files import write_json
from pmlf.checks.inspection import Checked
from pmlf.evidence.ledger import Ledger
from pmlf.experiments import tasks
from pmlf.experiments.checking import check_model
from pmlf.experiments.diagnostics import Probe
from pmlf.experiments.execution import Execution, LossMeter
from pmlf.experiments.folder import RunFolder, continued
from pmlf.experiments.progress import Progress
from pmlf.experiments.results import Observer, RunResult, Unobserved, comparison_json
from pmlf.experiments.spec import RunSpec
from pmlf.experiments.tasks import Task
from pmlf.run.making import make_private
from pmlf.run.private_run import PrivateRun


def run(
    spec: RunSpec,
    out: Path | str,
    *,
    data_dir: Path | str | None = None,
    observer: Observer | None = None,
    show_sensitive: bool = False,
    resume: bool = False,
    ledger: Path | str | None = None,
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
    every minute. The process keeps what it frees from then on (`machine.keep_freed_memory`).
    """
    if diagnostics and resume:
        raise ValueError("diagnostics are of a run from its first step on: begin a new run with them")
    if checkpoint_every is not None:
        require_count("checkpoint_every", checkpoint_every, "it counts the steps from one checkpoint to the next")
    folder = RunFolder(Path(out))
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
    machine.keep_freed_memory()
    ledger = None if ledger is None else Path(ledger)
    task = tasks.prepare(spec, None if data_dir is None else Path(data_dir))
    spec = spec.resolved(task.records)
    if saved is None:
        progress = Progress.start(task, ledger)
        folder.make(spec)
    else:
        progress = Progress.from_state(saved["progress"])
        progress.check(task, seeded=spec.seed is not None)
        progress.ledger = progress.ledger if ledger is None else ledger.absolute()
    progress.sensitive_shown |= show_sensitive
    progress.diagnosed |= diagnostics
    ledger_path = progress.ledger or folder.own_ledger.absolute()
    new_ledger, book = not ledger_path.exists(), None
    try:
        with progress.same_threads(), Ledger(ledger_path, dataset=spec.dataset, run=progress.run) as book:
            losses = LossMeter() if show_sensitive else None
            private = _prepare(spec, task, losses, book)
            if spec.max_physical_batch_size == "auto":
                spec = replace(spec, max_physical_batch_size=private.max_physical_batch_size)
                folder.write_spec(spec)
            check_model(private.model, task, spec, show_check)
            if saved is not None:
                _restore(private, saved["run"])
                folder.go_on(spec)
            return Execution(
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
            if new_ledger and progress.ledger is None:  # a shared one may be another run's by now
                ledger_path.unlink(missing_ok=True)
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
            if result.signalled_by:
                break
    finally:
        if results:
            write_json(out / "comparison.json", comparison_json(results, out))
        elif out.is_dir() and not any(out.iterdir()):
            out.rmdir()
    return tuple(results)


def _restore(private: PrivateRun, state: dict[str, Any]) -> None:
    planned = state["mechanism"]["steps"]
    private.load_state_dict(state)
    if private.steps != planned and not private.spending.affords(private.steps_done):
        raise ValueError(
            f"a plan of {private.steps} steps where {planned} were planned is made after seeing results, and by the "
            f"RDP filter that this takes epsilon={private.spending.target_epsilon} has no room for another step: "
            "resume with the plan as it was"
        )


def _prepare(spec: RunSpec, task: Task, losses: LossMeter | None, ledger: Ledger) -> PrivateRun:
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
