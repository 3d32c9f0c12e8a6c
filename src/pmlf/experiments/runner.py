"""Run a spec in a folder: start it or resume it, and write its results.

Nothing is printed here; a `RunObserver` receives the progress. Sensitive values are shown or written only on request.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pmlf import machine
from pmlf.basics.arguments import require_count
from pmlf.basics.batches import synthetic, to_device
from pmlf.basics.files import write_json
from pmlf.checks.inspection import Checked, check
from pmlf.evidence.ledger import Ledger
from pmlf.experiments import tasks
from pmlf.experiments.comparing import comparison_json
from pmlf.experiments.diagnostics import Probe
from pmlf.experiments.execution import Execution, LossMeter, follow
from pmlf.experiments.folder import RunFolder, resumed_spec
from pmlf.experiments.progress import RunProgress
from pmlf.experiments.results import RunObserver, RunResult, SilentObserver
from pmlf.experiments.spec import RunSpec
from pmlf.experiments.tasks import Task
from pmlf.mechanism.adaptive_clipping import AdaptiveClipping
from pmlf.mechanism.noise import SeededRandomness
from pmlf.mechanism.units import MOST_RECORDS
from pmlf.methods import Method
from pmlf.parallel.processes import Processes, joined
from pmlf.run.callbacks import Callback
from pmlf.run.making import make_private
from pmlf.run.optimizers import adam_decays
from pmlf.run.private_run import PrivateRun

_CHECKED_SAMPLES = 4


def run(
    spec: RunSpec,
    out: Path | str,
    *,
    data_dir: Path | str | None = None,
    observer: RunObserver | None = None,
    show_sensitive: bool = False,
    resume: bool = False,
    ledger: Path | str | None = None,
    checkpoint_every: int | None = None,
    diagnostics: bool = False,
    show_check: Callable[[Checked], None] | None = None,
    callbacks: Sequence[Callback] = (),
    asked_to_stop: Callable[[], str | None] | None = None,
) -> RunResult:
    """Train as `spec` says, evaluate once per epoch, and write the results to the folder `out`.

    SIGINT, SIGTERM or a KeyboardInterrupt from the observer stop the run after the current step. Results and a
    checkpoint are then in the folder. A run that fails before its first step leaves no folder. The process keeps freed
    memory from then on. In a process group all ranks call it with the same arguments; rank 0 alone has the folder.

    Args:
        spec: The run.
        out: Folder for the results. It must not exist, except with `resume`.
        data_dir: Folder of datasets. None: the folder in PMLF_DATA, else the Hugging Face hub.
        observer: Receives the progress.
        show_sensitive: Also pass the training loss to the observer and write it to metrics.jsonl.
        resume: Resume the run in `out`, or return its result if it is complete. Start it if `out` does not exist.
            `spec` must be the run's own, except for more epochs or steps.
        ledger: File that several runs on one dataset share. None: a ledger in the folder.
        checkpoint_every: Steps between checkpoints. None: one checkpoint per minute.
        diagnostics: Write diagnostics.json (sensitive).
        show_check: Called with the result of `pmlf.check` on the first records (sensitive, not written).
        callbacks: Receive the released numbers of the run, such as `pmlf.integrations.loggers.CsvLogger`.
        asked_to_stop: Called after every step on rank 0, for a process that signals do not reach: the name of a signal
            stops the run as the signal does, None does not.

    Raises:
        ValueError: If a setting, the model, the dataset or the folder is refused. The message says what to change.
    """
    if checkpoint_every is not None:
        require_count("checkpoint_every", checkpoint_every, "it is the number of steps between checkpoints")
    processes = joined("auto", "pmlf.experiments.runner.run")
    if processes.size > 1 and (show_sensitive or diagnostics or show_check is not None):
        raise ValueError(
            f"`show_sensitive`, `diagnostics` and `check_on_data` see the samples of one of {processes.size} processes "
            "only: leave them out, or start a single process"
        )
    folder = RunFolder(Path(out))
    spec, saved, finished = processes.by_first(lambda: _found(folder, spec, resume=resume, diagnostics=diagnostics))
    if finished is not None:
        return finished
    machine.keep_freed_memory()
    task = tasks.prepare(spec, None if data_dir is None else Path(data_dir))
    spec = spec.resolved(task.population)
    shared = None if ledger is None else Path(ledger)
    progress = processes.by_first(lambda: _progress(spec, task, saved, shared))
    if processes.rank > 0:
        return _followed(spec, task, progress, saved, processes)
    progress.sensitive_shown |= show_sensitive
    progress.diagnosed |= diagnostics
    if saved is None:
        folder.make(spec)
    with _opened_ledger(folder, progress, spec.dataset, new=saved is None) as opened:
        execution = _execution(spec, task, folder, progress, saved, opened, show_sensitive, diagnostics, show_check)
        execution.private.callbacks.extend(callbacks)
        result = execution.run(observer or SilentObserver(), checkpoint_every, asked_to_stop)
    return processes.by_first(lambda: result)


def _followed(
    spec: RunSpec, task: Task, progress: RunProgress, saved: Mapping[str, Any] | None, processes: Processes
) -> RunResult:
    """The run on a rank other than 0: its steps alone. Rank 0 has the folder and the ledger, and tells the result."""
    progress.check(task, seeded=spec.seed is not None)
    with progress.same_threads():
        private = _private_run(spec, task, None, None)
        if saved is not None:
            _restore(private, saved["run"])
        follow(private)
    return processes.by_first(_of_rank_0)


def _of_rank_0() -> RunResult:
    raise AssertionError("rank 0 tells the result")


def compare(
    specs: Sequence[RunSpec],
    out: Path,
    *,
    data_dir: Path | None = None,
    observer: RunObserver | None = None,
    show_sensitive: bool = False,
    checkpoint_every: int | None = None,
) -> tuple[RunResult, ...]:
    """Run one spec after another and write comparison.json.

    Each run gets a folder in `out`, named after its method, and its seed if there are several.

    Args:
        specs: The runs, one per method and seed.
        out: Folder for the results. It must not exist.
        data_dir: As in `run`, and so are the other arguments.

    Returns:
        The results of the runs so far: after an interruption, there are fewer than specs.
    """
    RunFolder(out).refuse_existing()
    for spec in specs:
        spec.build_method()  # find an error in the last method before the first one trains
    results: list[RunResult] = []
    seeds = len({spec.seed for spec in specs})
    try:
        for spec in specs:
            folder = out / (spec.method if seeds == 1 else f"{spec.method}-seed-{spec.seed}")
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


def _found(
    folder: RunFolder, given: RunSpec, *, resume: bool, diagnostics: bool
) -> tuple[RunSpec, Mapping[str, Any] | None, RunResult | None]:
    """The spec to run, the checkpoint to resume from, and the result if the run is already complete."""
    if diagnostics and resume:
        raise ValueError("`diagnostics` needs a run from its first step: leave `resume` out and start a new run")
    if not (resume and folder.begun()):
        folder.refuse_existing()
        return given, None, None
    stored, finished = folder.spec(), folder.finished()
    spec = resumed_spec(stored, given)
    if finished is not None and spec != stored:
        raise ValueError(
            f"the run in {str(folder.path)!r} is complete, so its number of steps cannot change: start a new run"
        )
    return spec, None if finished is not None else folder.load(), finished


def _progress(spec: RunSpec, task: Task, saved: Mapping[str, Any] | None, ledger: Path | None) -> RunProgress:
    """The progress of a new run, or of the saved one if its records are unchanged."""
    if saved is None:
        return RunProgress.start(task, ledger)
    progress = RunProgress.from_state(saved["progress"])
    progress.check(task, seeded=spec.seed is not None)
    progress.ledger = progress.ledger if ledger is None else ledger.absolute()
    return progress


@contextmanager
def _opened_ledger(folder: RunFolder, progress: RunProgress, dataset: str, *, new: bool) -> Iterator[Ledger]:
    """Open the ledger of a run. If a new run fails before its first event, remove its folder and its own ledger."""
    path = progress.ledger or folder.own_ledger.absolute()
    new_ledger, ledger = not path.exists(), None
    try:
        with progress.same_threads(), Ledger(path, dataset=dataset, run=progress.run) as ledger:
            yield ledger
    except BaseException:
        if new and (ledger is None or ledger.tally.events_of(progress.run) == 0):
            folder.remove()
            if new_ledger and progress.ledger is None:  # another run may use a shared one by now
                path.unlink(missing_ok=True)
        raise


def _execution(
    spec: RunSpec,
    task: Task,
    folder: RunFolder,
    progress: RunProgress,
    saved: Mapping[str, Any] | None,
    ledger: Ledger,
    show_sensitive: bool,
    diagnostics: bool,
    show_check: Callable[[Checked], None] | None,
) -> Execution:
    """A run that is ready for its next step: the model is checked and a saved state is restored."""
    losses = LossMeter() if show_sensitive else None
    private = _private_run(spec, task, losses, ledger)
    if spec.max_physical_batch_size == "auto":
        spec = replace(spec, max_physical_batch_size=private.max_physical_batch_size)
        folder.write_spec(spec)
    _check_model(private.model, task, spec, show_check)
    if saved is not None:
        _restore(private, saved["run"])
        folder.withdraw_results(spec)
    probe = Probe(private, task, spec) if diagnostics else None
    return Execution(
        spec=spec, task=task, private=private, folder=folder, progress=progress, losses=losses, probe=probe
    )


def _check_model(model: nn.Module, task: Task, spec: RunSpec, show: Callable[[Checked], None] | None) -> None:
    """Run `pmlf.check` on synthetic inputs of the records' shapes. Run it on records too if `show` takes the result."""
    collate = task.collate_fn or torch.utils.data.default_collate
    first = collate([task.train[index] for index in range(min(_CHECKED_SAMPLES, task.records))])
    records = to_device(first, next(model.parameters()).device)
    inputs = synthetic(records, SeededRandomness(0).stream("synthetic").seed())
    method = spec.build_method()
    check(model, task.losses, inputs, method=method, clip_norm=spec.clip_norm)
    if show is not None:
        show(check(model, task.losses, records, method=method, clip_norm=spec.clip_norm))


def _restore(private: PrivateRun, state: dict[str, Any]) -> None:
    planned = state["mechanism"]["steps"]
    private.load_state_dict(state)
    if private.steps != planned and not private.budget.affords(private.steps_done, groups=private.groups):
        raise ValueError(
            f"the run was planned for {planned} steps. To change that to {private.steps} during the run takes an RDP "
            f"filter, by which epsilon={private.budget.plan.target_epsilon} has no room for another step: resume "
            "without `epochs` and `steps`"
        )


def _private_run(spec: RunSpec, task: Task, losses: LossMeter | None, ledger: Ledger | None) -> PrivateRun:
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
    units = task.units
    return make_private(
        model=model,
        optimizer=_optimizer(spec, model, method),
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
        adaptive_clipping=None if spec.clip_quantile is None else AdaptiveClipping(quantile=spec.clip_quantile),
        largest_batch=spec.largest_batch,
        clipping=spec.clipping,  # type: ignore[arg-type]  # make_private checks it
        max_physical_batch_size=spec.max_physical_batch_size,
        seed=spec.seed,
        ema=spec.ema,
        augmentation=task.augmentation,
        collate_fn=task.collate_fn,
        secure_noise=spec.secure_noise,
        ledger=ledger,
        lengths=task.lengths,
        units=None if units is None else units.numbers,
        max_records_per_unit=MOST_RECORDS if units is None else units.most,
        unit_name="unit" if units is None else units.name,
    )


def _optimizer(spec: RunSpec, model: nn.Module, method: Method) -> Optimizer:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if spec.optimizer == "adam":
        return torch.optim.Adam(trained, lr=spec.lr, betas=adam_decays(method))
    return torch.optim.SGD(trained, lr=spec.lr)


def _device(name: str) -> torch.device:
    try:
        return torch.zeros(1, device=name).device
    except (RuntimeError, AssertionError) as error:  # AssertionError if torch was built without the device
        raise ValueError(f"device={name!r} is not available: give cpu, or a device that torch can use here") from error
