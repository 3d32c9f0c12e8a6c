"""Train a private probe in a run folder: start it or resume it, and write its results.

spec.json               the settings and the names of the files (mode 0600, as all files but the released ones)
ledger.jsonl            the privacy events, unless the run shares a ledger
checkpoint.safetensors  released values to resume from, after every event; removed when the run is complete
model.safetensors, linear.json, model.json, certificate.json, certificate.html, result.json
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn

from pmlf import checkpoint, data
from pmlf.basics.files import new_folder, remove_flat, write_atomically, write_json
from pmlf.data.feature_files import load_features
from pmlf.data.targets import as_text
from pmlf.evidence import certificate_page
from pmlf.evidence.ledger import Ledger
from pmlf.experiments.execution import deferred_signals
from pmlf.experiments.form import WEIGHTS, ModelForm
from pmlf.experiments.linear_features import features_digest
from pmlf.experiments.linear_model import FEATURES, LinearForm, write_linear
from pmlf.probe import PrivateProbe
from pmlf.probe.training import ProbeTraining

_SPLIT_SEED = 0  # held-out records are the same in every run


@dataclass(frozen=True, kw_only=True)
class ProbeSpec:
    """A probe on files: everything needed to repeat it.

    Attributes:
        features: The file of the features.
        labels: A .npy file, or the name of the labels in the file of the features.
        holdout: The share of records to evaluate on. They are not protected; epsilon is for the others.
        probe: The parameters of `PrivateProbe` that differ from their defaults.
    """

    features: str
    labels: str | None
    holdout: float | None
    probe: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class ProbeResult:
    """What a run ends with.

    Attributes:
        out: The run's folder.
        epsilon: The epsilon that the certificate states; None if it states none.
        delta: The delta at which epsilon is stated.
        steps: The number of steps taken.
        planned_steps: The number of steps planned.
        records: The number of protected records.
        accuracy: The score on the held-out records; None without them.
        interrupted_by: The name of a signal; None for a complete run.
    """

    out: Path
    epsilon: float | None
    delta: float
    steps: int
    planned_steps: int
    records: int
    accuracy: float | None
    interrupted_by: str | None

    def to_json(self) -> dict[str, Any]:
        """The result as a JSON document."""
        return {**asdict(self), "out": str(self.out)}


def run_probe(
    spec: ProbeSpec,
    out: Path,
    *,
    resume: bool = False,
    ledger: Path | None = None,
    progress: Callable[[ProbeTraining], None] | None = None,
) -> ProbeResult:
    """Train a probe in the folder `out`. SIGINT and SIGTERM stop it after the current event, with a checkpoint.

    Every event is in the ledger before it is released, and in the checkpoint before the next one. After a crash, at
    most one event is repeated; without a seed it is paid twice, so the run may stop one step early.

    Args:
        spec: The run. With `resume`, the one in the folder.
        out: The run's folder; it must not exist, except with `resume`.
        resume: Continue the run in `out`.
        ledger: A ledger that several runs on the same records share; None for one in the folder.
        progress: Called after every event, with the training: its number of events is public.

    Returns:
        The result.

    Raises:
        ValueError: A setting, a file or the folder is refused; or a file has changed since the run started.
    """
    features, labels = load_features(Path(spec.features), spec.labels)
    train, held_out = _split(len(labels), spec.holdout)
    probe = PrivateProbe(**spec.probe)
    if not resume:
        if out.exists():
            raise ValueError(f"{str(out)!r} already exists: give another folder, or move this one away")
        out.parent.mkdir(parents=True, exist_ok=True)
        new_folder(out)
        write_json(out / "spec.json", {**asdict(spec), "ledger": None if ledger is None else str(ledger.absolute())})
    try:
        with Ledger(_ledger_of(out), dataset=Path(spec.features).name, run=out.name) as book:
            saved = checkpoint.load(out / "checkpoint.safetensors") if resume else None
            identity = _identity(features, labels, saved)
            X, y = (features, labels) if held_out is None else (features[train], labels[train])
            training = probe.begin(X, y, ledger=book, resumed=None if saved is None else saved["training"])
            interrupted = _train(training, out, identity, progress)
            return _finish(probe, training, out, (features, labels, held_out), interrupted)
    except ValueError:
        if not resume and not (out / "checkpoint.safetensors").exists():  # refused before the first event
            remove_flat(out)
        raise


def read_spec(out: Path) -> ProbeSpec:
    """The spec of the run in a folder.

    Raises:
        ValueError: The folder holds no probe that can be resumed.
    """
    if (out / "result.json").exists() and not (out / "checkpoint.safetensors").exists():
        raise ValueError(f"the run in {str(out)!r} is complete: there is nothing to resume")
    if not (out / "spec.json").exists() or not (out / "checkpoint.safetensors").exists():
        raise ValueError(f"{str(out)!r} holds no probe to resume: give the folder of an interrupted run")
    document = json.loads((out / "spec.json").read_text())
    if "probe" not in document:
        raise ValueError(f"{str(out)!r} is a run of `pmlf train`: resume it with `pmlf train --resume {out}`")
    return ProbeSpec(**{name: document[name] for name in ProbeSpec.__dataclass_fields__})


def _ledger_of(out: Path) -> Path:
    shared = json.loads((out / "spec.json").read_text())["ledger"]
    return out / "ledger.jsonl" if shared is None else Path(shared)


def _split(records: int, holdout: float | None) -> tuple[NDArray[np.int64], NDArray[np.int64] | None]:
    """The protected and the held-out records; the split depends on their number alone."""
    if holdout is None:
        return np.arange(records), None
    if not 0 < holdout < 1:
        raise ValueError(f"holdout={holdout} is not in (0, 1): it is the share of records to evaluate on")
    order = np.random.default_rng(_SPLIT_SEED).permutation(records)
    size = max(1, round(holdout * records))
    return np.sort(order[size:]), np.sort(order[:size])


def _identity(features: NDArray[Any], labels: NDArray[Any], saved: Mapping[str, Any] | None) -> dict[str, str]:
    """A keyed digest of the records, which a resumed run must find unchanged. It stays in the checkpoint."""
    key = os.urandom(32).hex() if saved is None else saved["identity"]["key"]
    found = {"key": key, "digest": features_digest(features, labels, bytes.fromhex(key))}
    if saved is not None and saved["identity"] != found:
        raise ValueError(
            "the features or the labels have changed since the run started: resume with the same files, or start a new "
            "run"
        )
    return found


def _train(
    training: ProbeTraining,
    out: Path,
    identity: Mapping[str, str],
    progress: Callable[[ProbeTraining], None] | None,
) -> str | None:
    """Advance to the end or to a signal; the name of the signal."""

    def save() -> None:
        checkpoint.save(out / "checkpoint.safetensors", {"identity": identity, "training": training.state_dict()})

    with deferred_signals() as interruption:
        save()
        while not interruption.by and training.advance():
            save()
            if progress is not None:
                progress(training)
    return interruption.by if training.done < training.total else None


def _finish(
    probe: PrivateProbe,
    training: ProbeTraining,
    out: Path,
    records: tuple[NDArray[Any], NDArray[Any], NDArray[np.int64] | None],
    interrupted: str | None,
) -> ProbeResult:
    features, labels, held_out = records
    probe.finish(training)
    document = probe.certificate_
    write_linear(out, WEIGHTS, LinearForm.of(probe.model_, FEATURES), probe.model_, nn.Identity())
    target = _target(probe)
    if target is not None:
        width = data.FeatureForm(width=probe.n_features_in_)
        ModelForm(model="probe", inputs=width, target=target, linear=True).write(out)
    write_json(out / "certificate.json", document, released=True)
    write_atomically(out / "certificate.html", certificate_page.page(document).encode(), released=True)
    result = ProbeResult(
        out=out,
        epsilon=document["epsilon"],
        delta=document["delta"],
        steps=training.steps_done,
        planned_steps=training.settings.steps,
        records=training.settings.records,
        accuracy=None if held_out is None else probe.score(features[held_out], labels[held_out]),
        interrupted_by=interrupted,
    )
    write_json(out / "result.json", result.to_json())
    if interrupted is None:
        (out / "checkpoint.safetensors").unlink()
    return result


def _target(probe: PrivateProbe) -> data.Target | None:
    """What the outputs mean; None for several numbers at once, which `pmlf predict` does not know."""
    outputs = probe.model_.weights.shape[1]
    if probe.head == "least-squares":
        assert probe.target_range is not None
        low, high = probe.target_range
        return data.ValueRange(low=low, high=high) if outputs == 1 else None
    names = tuple(as_text(each) for each in probe.classes_.tolist())
    if probe.head == "sigmoid" and outputs > 1:
        return data.LabelSet(names=names)
    return data.Classes(names=names)
