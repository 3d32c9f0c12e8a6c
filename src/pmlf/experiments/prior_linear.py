"""Runs of private linear models on features: `prior-linear`, and embeddings of a frozen encoder.

A record's features depend on that record and on public values alone, so the first private query is their mean.
Mean, second moments and all steps are one plan in one ledger. The folder is that of any run.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pmlf import data
from pmlf.basics.arguments import require_count
from pmlf.basics.files import write_atomically, write_json
from pmlf.evidence import certificate, certificate_page
from pmlf.evidence.budget import BudgetGuard
from pmlf.evidence.ledger import Ledger
from pmlf.experiments.execution import deferred_signals
from pmlf.experiments.folder import RunFolder, resumed_spec
from pmlf.experiments.form import PRETRAINED_FOLDER, WEIGHTS
from pmlf.experiments.linear_features import FILTER, MODEL, FeatureSplits, feature_splits, features_digest
from pmlf.experiments.linear_model import LinearForm, write_linear
from pmlf.experiments.options import PretrainedOptions
from pmlf.experiments.results import Evaluation, RunObserver, RunResult, SilentObserver
from pmlf.experiments.spec import DEFAULT_EPSILON, MethodOptions, RunSpec, default_delta
from pmlf.mechanism.noise import Randomness, SecureRandomness, SeededRandomness
from pmlf.probe.rows import FeatureRows
from pmlf.probe.settings import ProbeSettings
from pmlf.probe.training import ProbeTraining
from pmlf.run.evaluation import Score, score

_TAKEN = (
    *("dataset", "records", "model", "epsilon", "delta", "steps", "holdout", "seed", "method", "options"),
    *("own", "pretrained"),
)


def run(
    spec: RunSpec,
    out: Path | str,
    *,
    data_dir: Path | str | None = None,
    observer: RunObserver | None = None,
    resume: bool = False,
    extracting: Callable[[int, int], None] | None = None,
) -> RunResult:
    """Extract features, train privately, evaluate once, and write the results to the folder `out`.

    An interrupted extraction continues with the next run on the same dataset and seed. An interrupted training
    continues with `resume`.

    Args:
        spec: The run. Its settings of networks must be left at their defaults.
        out: Folder for the results. It must not exist, except with `resume`.
        data_dir: Folder of datasets. None: the folder in PMLF_DATA, else the Hugging Face hub.
        observer: Receives the progress of the training.
        resume: Resume the run in `out`, or return its result if it is complete.
        extracting: Called with the number of records whose features are computed, and the number in all.

    Raises:
        ValueError: If a setting, the dataset or the folder is refused. The message says what to change.
    """
    folder = RunFolder(Path(out))
    spec, saved, finished = found(spec, folder, resume=resume)
    if finished is not None:
        return finished
    splits = feature_splits(spec, data_dir, extracting)
    if saved is None:
        spec = _resolved(spec, splits)
        folder.make(spec)
    else:
        folder.withdraw_results(spec)
    return _Training(spec, splits, folder, saved).run(observer or SilentObserver())


def found(
    spec: RunSpec, folder: RunFolder, *, resume: bool
) -> tuple[RunSpec, Mapping[str, Any] | None, RunResult | None]:
    """The spec to run, the checkpoint to resume from, and the result if the run is already complete.

    Raises:
        ValueError: If a setting or the folder is refused: before any features are computed.
    """
    if resume and folder.begun():
        finished = folder.finished()
        return resumed_spec(folder.spec(), spec), None if finished is not None else folder.load(), finished
    folder.refuse_existing()
    _refuse_others(spec)
    return spec, None, None


def _refuse_others(spec: RunSpec) -> None:
    """Raise ValueError for a setting that only networks have."""
    if spec.records is not None:
        require_count("records", spec.records, "it is the number of records to use")
    usual, name_of_it = vars(RunSpec()), spec.pretrained.prior or MODEL
    for name, value in vars(spec).items():
        if name not in _TAKEN and value != usual[name]:
            raise ValueError(f"`{name}` is not a setting of {name_of_it}: leave it out")
    if spec.method != usual["method"] or spec.options != usual["options"]:
        raise ValueError(f"`method` and its options are fixed for {name_of_it}: leave them out")
    for name in ("unit_column", "max_records_per_unit"):  # its sums are over records
        if getattr(spec.own, name) is not None:
            raise ValueError(f"`{name}` is not a setting of {name_of_it}, which protects records: leave it out")
    if spec.dataset not in data.NAMES:
        data.refuse_unit_folders(spec.dataset)
    for name, value in vars(spec.pretrained).items():
        taken = ("prior", "max_length") if spec.pretrained.prior is not None else ("prior",)
        if name not in taken and value != getattr(PretrainedOptions(), name):
            raise ValueError(f"`{name}` is not a setting of {name_of_it}: leave it out")


def _resolved(spec: RunSpec, splits: FeatureSplits) -> RunSpec:
    """The spec with all that the run uses filled in: LP-DPSGD with full batches."""
    records, epsilon = len(splits.labels), DEFAULT_EPSILON if spec.epsilon is None else spec.epsilon
    settings = splits.recipe(epsilon)
    return replace(
        spec,
        epsilon=epsilon,
        delta=default_delta(records) if spec.delta is None else spec.delta,
        steps=settings["steps"] if spec.steps is None else spec.steps,
        batch_size=records,
        clip_norm=settings["clip_norm"],
        method="lp-dpsgd",
        options=MethodOptions(a=tuple(FILTER.a), b=tuple(FILTER.b)),
    )


class _Training:
    """The events of the plan, each followed by a checkpoint."""

    def __init__(
        self, spec: RunSpec, splits: FeatureSplits, folder: RunFolder, saved: Mapping[str, Any] | None
    ) -> None:
        self._spec, self._splits, self._folder, self._saved = spec, splits, folder, saved
        new = {"run": secrets.token_hex(8), "seconds": 0.0, "features_key": os.urandom(32).hex()}
        progress: Mapping[str, Any] = saved["progress"] if saved else new
        self._run, self._begin = progress["run"], time.monotonic() - progress["seconds"]
        self._key = bytes.fromhex(progress["features_key"])
        self._digest = features_digest(splits.features, splits.labels, self._key)
        if progress.get("features_digest", self._digest) != self._digest:
            raise ValueError(
                "the training records, their order or their features have changed since the run started: resume with "
                "the same dataset and encoder, or start a new run"
            )

    def run(self, observer: RunObserver) -> RunResult:
        interrupted_by = signalled_by = None
        with Ledger(self._folder.own_ledger, dataset=self._spec.dataset, run=self._run) as ledger:
            training = self._begun(ledger)
            try:
                with deferred_signals() as interruption:
                    self._save(training)
                    observer.started(self._spec, training.settings.steps)
                    while not interruption.by and training.advance():
                        self._save(training)
                        observer.stepped(training.steps_done, None)
                signalled_by = interruption.by
                interrupted_by = signalled_by if training.done < training.total else None
            except KeyboardInterrupt:
                interrupted_by = signalled_by = "SIGINT"
            return self._finish(training, observer, interrupted_by, signalled_by)

    def _begun(self, ledger: Ledger) -> ProbeTraining:
        spec, splits = self._spec, self._splits
        assert spec.epsilon is not None and spec.delta is not None and spec.steps is not None
        settings = ProbeSettings(
            **{**splits.recipe(spec.epsilon), "steps": spec.steps},
            head="softmax",
            outputs=len(splits.names),
            records=len(splits.labels),
            epsilon=spec.epsilon,
            delta=spec.delta,
            batch_size=None,
            learning_rate=None,
            schedule="cosine",
            averaging=0.0,
            intercept=0.0,
        )
        randomness: Randomness = SecureRandomness() if spec.seed is None else SeededRandomness(spec.seed)
        budget = BudgetGuard(settings.plan({}), replayable=randomness.reproducible, ledger=ledger)
        rows, targets = FeatureRows(splits.features), torch.from_numpy(np.ascontiguousarray(splits.labels))
        training = ProbeTraining(rows, targets, settings, budget, randomness)
        if self._saved is not None:
            training.load_state_dict(self._saved["run"])
        return training

    def _save(self, training: ProbeTraining) -> None:
        progress = {
            "run": self._run,
            "seconds": time.monotonic() - self._begin,
            "features_key": self._key.hex(),
            "features_digest": self._digest,
        }
        self._folder.save(self._spec, progress, training.state_dict())

    def _finish(
        self, training: ProbeTraining, observer: RunObserver, interrupted_by: str | None, signalled_by: str | None
    ) -> RunResult:
        evaluations: tuple[Evaluation, ...] = ()
        if training.steps_done:
            evaluations = (self._evaluation(training),)
            observer.evaluated(evaluations[0])
            self._folder.write_metrics(evaluations)
            self._write_model(training)
        document = {**training.certificate(), "spec_digest": self._spec.digest()}
        document = certificate.sealed(document)
        write_json(self._folder.path / "certificate.json", document, released=True)
        page = certificate_page.page(document).encode()
        write_atomically(self._folder.path / "certificate.html", page, released=True)
        result = RunResult(
            spec=self._spec,
            out=self._folder.path,
            epsilon=training.budget.epsilon(),
            certified_epsilon=training.budget.claim(),
            noise_multiplier=training.budget.plan.event.noise_multiplier,
            steps=training.steps_done,
            planned_steps=training.settings.steps,
            seconds=time.monotonic() - self._begin,
            interrupted_by=interrupted_by,
            evaluations=evaluations,
            signalled_by=signalled_by,
        )
        self._folder.write_result(result)
        return result

    def _evaluation(self, training: ProbeTraining) -> Evaluation:
        model, classes = training.model(), len(self._splits.names)
        scores: dict[str, Score] = {}
        for split, (features, labels) in self._splits.judged_on.items():
            found = model.scores(FeatureRows(features)).argmax(dim=1)
            pairs = torch.from_numpy(np.ascontiguousarray(labels)) * classes + found
            scores[split] = score(torch.bincount(pairs, minlength=classes**2).view(classes, classes))
        return Evaluation(
            step=training.steps_done, epoch=float(training.steps_done), epsilon=training.budget.epsilon(), scores=scores
        )

    def _write_model(self, training: ProbeTraining) -> None:
        """What it takes to use the model elsewhere: all of it is released or public."""
        splits, path, model = self._splits, self._folder.path, training.model()
        if splits.save_pretrained is not None:
            splits.save_pretrained(path / PRETRAINED_FOLDER, splits.names)
        write_linear(path, WEIGHTS, LinearForm.of(model, splits.kind, splits.prior), model, splits.encoder)
        splits.form.write(path)
