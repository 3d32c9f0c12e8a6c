"""Carry out a run and write its folder: spec.json, metrics.jsonl, model.safetensors (model-ema), certificate.json.

Nothing is printed here: an `Observer` is told. Nothing sensitive is told or written unless it is asked for.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pmlf.experiments import tasks
from pmlf.experiments.results import Evaluation, Observer, RunResult, Unobserved, comparison_json
from pmlf.experiments.spec import RunSpec
from pmlf.experiments.tasks import Task
from pmlf.training import PrivateRun, evaluate, make_private


def run(
    spec: RunSpec,
    out: Path,
    *,
    data_dir: Path | None = None,
    observer: Observer | None = None,
    show_sensitive: bool = False,
) -> RunResult:
    """Train as `spec` says, evaluate once an epoch, and leave the results in the new folder `out`.

    What cannot be trained is refused before there is a folder. A KeyboardInterrupt ends the run early, with
    everything that was released until then in the folder.
    """
    refuse_existing(out)
    observer = observer or Unobserved()
    task = tasks.prepare(spec, data_dir)
    spec = spec.resolved(task.records)
    losses = _LossMeter() if show_sensitive else None
    private = _prepare(spec, task, losses)
    folder = _Folder(out, spec)
    evaluations: list[Evaluation] = []
    interrupted = False
    begin = time.monotonic()
    try:
        observer.started(spec, private.steps)
        for batch in private.batches():
            private.step(batch)
            training_loss = losses.take() if losses else None
            observer.stepped(private.steps_done, training_loss)
            if private.steps_done % private.steps_per_epoch == 0 or private.steps_done == private.steps:
                evaluations.append(_evaluate(private, task, training_loss))
                folder.write_metrics(evaluations)
                observer.evaluated(evaluations[-1])
    except KeyboardInterrupt:
        interrupted = True
    except Exception:
        if private.steps_done == 0:
            folder.remove()
        else:  # what was released is spent: leave its account behind
            folder.write_results(private, losses is not None)
        raise
    seconds = time.monotonic() - begin
    folder.write_metrics(evaluations)
    folder.write_results(private, losses is not None)
    return RunResult(
        spec=spec,
        out=out,
        epsilon=private.epsilon(),
        noise_multiplier=private.private_step.noise_multiplier,
        steps=private.steps_done,
        planned_steps=private.steps,
        seconds=seconds,
        interrupted=interrupted,
        evaluations=tuple(evaluations),
    )


def compare(
    specs: Sequence[RunSpec],
    out: Path,
    *,
    data_dir: Path | None = None,
    observer: Observer | None = None,
    show_sensitive: bool = False,
) -> tuple[RunResult, ...]:
    """Run one spec after another, each into a folder of `out` named after its method, and write comparison.json."""
    refuse_existing(out)
    for spec in specs:
        spec.build_method()  # so that the last method's mistake is not found after the first one's training
    results: list[RunResult] = []
    try:
        for spec in specs:
            folder = out / spec.method
            results.append(run(spec, folder, data_dir=data_dir, observer=observer, show_sensitive=show_sensitive))
            if results[-1].interrupted:
                break
    finally:
        if results:
            write_json(out / "comparison.json", comparison_json(results, out))
        elif out.is_dir() and not any(out.iterdir()):
            out.rmdir()
    return tuple(results)


def refuse_existing(out: Path) -> None:
    """A folder of results is never written into twice."""
    if out.exists():
        raise ValueError(f"{str(out)!r} exists already: choose another folder, or move this one away")


def write_json(path: Path, document: Mapping[str, Any]) -> None:
    write_atomically(path, json.dumps(document, indent=2).encode() + b"\n")


def write_atomically(path: Path, content: bytes) -> None:
    """The whole file or none of it: written beside its place, then renamed into it."""
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


class _Folder:
    """A run's folder; making it claims the name."""

    def __init__(self, path: Path, spec: RunSpec) -> None:
        self._path = path
        path.mkdir(parents=True)
        write_atomically(path / "spec.json", spec.to_json().encode())

    def write_metrics(self, evaluations: Sequence[Evaluation]) -> None:
        lines = [json.dumps(evaluation.to_json()) + "\n" for evaluation in evaluations]
        write_atomically(self._path / "metrics.jsonl", "".join(lines).encode())

    def write_results(self, private: PrivateRun, sensitive_shown: bool) -> None:
        """The model, and the certificate at the steps released."""
        self._write_weights("model.safetensors", private.model)
        averaged = private.averaged_model()
        if averaged is not None:
            self._write_weights("model-ema.safetensors", averaged)
        certificate = private.certificate()
        if sensitive_shown:
            certificate["not_accounted_for"].append("the training loss, shown and recorded on demand")
        write_json(self._path / "certificate.json", certificate)

    def _write_weights(self, name: str, model: nn.Module) -> None:
        weights = {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}
        write_atomically(self._path / name, safetensors.torch.save(weights))

    def remove(self) -> None:
        shutil.rmtree(self._path)


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


def _prepare(spec: RunSpec, task: Task, losses: _LossMeter | None) -> PrivateRun:
    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        loss = task.losses(model, batch)
        if losses:
            losses.add(loss)
        return loss

    method = spec.build_method()
    model = task.model.to(_device(spec.device))
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
    )


def _optimizer(spec: RunSpec, model: nn.Module) -> Optimizer:
    if spec.optimizer == "adam":
        return torch.optim.Adam(model.parameters(), lr=spec.lr)
    return torch.optim.SGD(model.parameters(), lr=spec.lr)


def _device(name: str) -> torch.device:
    try:
        return torch.zeros(1, device=name).device
    except (RuntimeError, AssertionError) as error:  # the latter where torch was built without the device
        raise ValueError(f"device={name!r} cannot be used here: give cpu, or a device that torch finds") from error


def _evaluate(private: PrivateRun, task: Task, training_loss: float | None) -> Evaluation:
    def accuracy(model: nn.Module) -> float:
        return evaluate(model, judged_on, logits=task.logits, labels=task.labels, collate_fn=task.collate_fn)

    split, judged_on = next(iter(task.judged_on.items()))
    averaged = private.averaged_model()
    return Evaluation(
        step=private.steps_done,
        epoch=round(private.steps_done * private.private_step.expected_batch_size / task.records, 4),
        epsilon=private.epsilon(),
        split=split,
        test_accuracy=accuracy(private.model),
        ema_accuracy=None if averaged is None else accuracy(averaged),
        training_loss=training_loss,
    )
