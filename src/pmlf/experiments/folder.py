"""The folder of a run: its files, and which settings a resumed run may change.

Only its owner can read the folder (mode 0700). Weights, model.json, pretrained/ and certificate may be released; the
other files may not.

spec.json               the specification of the run
ledger.jsonl            the privacy events, unless the run shares a ledger
checkpoint.safetensors  the state to resume from; removed when the run is complete
diagnostics.json        only with diagnostics
metrics.jsonl, model.safetensors, model-ema.safetensors, model.json, pretrained/, certificate.json, certificate.html,
result.json             when the run ends or is interrupted
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import safetensors.torch
from torch import nn

from pmlf import checkpoint
from pmlf.basics.files import new_folder, partial_name, remove_flat, write_atomically, write_json
from pmlf.evidence import certificate, certificate_page
from pmlf.evidence.ledger import refuse_in_use
from pmlf.experiments.results import Evaluation, RunResult
from pmlf.experiments.spec import RunSpec
from pmlf.run.private_run import PrivateRun

_EXTENDABLE = ("epochs", "steps")


class RunFolder:
    """The folder of a new or an existing run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._made: list[Path] = []

    @property
    def own_ledger(self) -> Path:
        """The ledger of a run that does not share one."""
        return self.path / "ledger.jsonl"

    @property
    def _checkpoint(self) -> Path:
        return self.path / "checkpoint.safetensors"

    def refuse_existing(self) -> None:
        """Raise ValueError if the folder exists: results are never overwritten."""
        if self.path.exists():
            raise ValueError(f"{str(self.path)!r} already exists: give another folder, or move this one away")

    def make(self, spec: RunSpec) -> None:
        """Create the folder and write spec.json."""
        self._made = [parent for parent in self.path.parents if not parent.exists()]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        new_folder(self.path)
        self.write_spec(spec)

    def remove(self) -> None:
        """Remove the folder and the parent folders that `make` created."""
        remove_flat(self.path)
        for parent in self._made:
            if not any(parent.iterdir()):
                parent.rmdir()

    def begun(self) -> bool:
        """Whether there is a run to resume. What a run left before its first checkpoint is removed: it spent nothing.

        Raises:
            ValueError: If the folder holds anything else.
        """
        if not self.path.exists():
            return False
        if self._checkpoint.exists() or (self.path / "result.json").exists():
            return True
        if not self._without_checkpoint():
            raise ValueError(
                f"{str(self.path)!r} holds neither a complete run nor a checkpoint: give the folder of a run, or a new "
                "folder"
            )
        if self.own_ledger.exists():
            refuse_in_use(self.own_ledger)
        remove_flat(self.path)
        return False

    def _without_checkpoint(self) -> bool:
        """Whether the folder holds only files of a run that was killed before its first checkpoint."""
        files = {"spec.json", self.own_ledger.name}
        partials = {partial_name(name) for name in ("spec.json", self._checkpoint.name)}
        found = {entry.name for entry in self.path.iterdir()}
        if found - files - partials:
            return False
        if found & files:
            self._written_spec()  # the first file of a run: without it, the others do not belong to a run
        return not self.own_ledger.exists() or self.own_ledger.read_bytes().count(b"\n") <= 1

    def spec(self) -> RunSpec:
        """The spec of the run: the one in the checkpoint, which has a digest, else the one in spec.json."""
        return RunSpec.from_json(self.load()["spec"]) if self._checkpoint.exists() else self._written_spec()

    def result(self) -> RunResult | None:
        """The result of a run that is complete or interrupted; None if it was killed or still runs."""
        path = self.path / "result.json"
        spec = self._written_spec()
        if not path.exists():
            return None
        try:
            return RunResult.from_full_json(json.loads(path.read_text()), spec, self.path)
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{str(path)!r} is damaged: restore the file") from error

    def finished(self) -> RunResult | None:
        """The result of a complete run; None if it was interrupted or killed."""
        result = self.result() if (self.path / "result.json").exists() else None
        return None if result is None or result.interrupted else result

    def save(self, spec: RunSpec, progress: Mapping[str, Any], run: Mapping[str, Any]) -> None:
        """Write the checkpoint."""
        checkpoint.save(self._checkpoint, {"spec": spec.to_json(), "progress": progress, "run": run})

    def load(self) -> dict[str, Any]:
        """Read the checkpoint: spec, progress and run."""
        if not self._checkpoint.exists():
            raise ValueError(f"{str(self.path)!r} has no {self._checkpoint.name}: restore the file")
        return checkpoint.load(self._checkpoint)

    def withdraw_results(self, spec: RunSpec) -> None:
        """Remove certificate and result before a run resumes: the certificate would state too little."""
        for name in ("certificate.json", "certificate.html", "result.json"):
            (self.path / name).unlink(missing_ok=True)
        self.write_spec(spec)

    def write_metrics(self, evaluations: Sequence[Evaluation]) -> None:
        """Write metrics.jsonl, one line per evaluation."""
        lines = [json.dumps(evaluation.to_json()) + "\n" for evaluation in evaluations]
        write_atomically(self.path / "metrics.jsonl", "".join(lines).encode())

    def write_models(self, private: PrivateRun) -> None:
        """Write the weights of the last iterate and, if there is one, of the average."""
        self._write_weights("model.safetensors", private.model)
        averaged = private.averaged_model()
        if averaged is not None:
            self._write_weights("model-ema.safetensors", averaged)

    def write_certificate(self, private: PrivateRun, also_not_accounted_for: Sequence[str]) -> None:
        """Write the certificate of the privacy spent so far, as JSON and HTML."""
        document = {**private.certificate(), "spec_digest": self._written_spec().digest()}
        document["not_accounted_for"] += also_not_accounted_for
        document = certificate.sealed(document)
        write_json(self.path / "certificate.json", document, released=True)
        page = certificate_page.page(document).encode()
        write_atomically(self.path / "certificate.html", page, released=True)

    def write_diagnostics(self, document: Mapping[str, Any]) -> None:
        """Write diagnostics.json, which is sensitive."""
        write_json(self.path / "diagnostics.json", document)

    def write_result(self, result: RunResult) -> None:
        """Write result.json and, if the run is complete, remove its checkpoint. The last action of a run."""
        write_json(self.path / "result.json", result.to_full_json())
        if not result.interrupted:
            self._checkpoint.unlink(missing_ok=True)

    def write_spec(self, spec: RunSpec) -> None:
        """Write spec.json."""
        write_atomically(self.path / "spec.json", spec.to_json().encode())

    def _written_spec(self) -> RunSpec:
        path = self.path / "spec.json"
        try:
            text = path.read_text()
            if "probe" not in json.loads(text):
                return RunSpec.from_json(text)
        except FileNotFoundError as error:
            if not self.path.exists():
                raise ValueError(f"{str(self.path)!r} does not exist: give the folder of a run") from error
            raise ValueError(f"{str(self.path)!r} is not the folder of a run: it has no spec.json") from error
        except (ValueError, TypeError, AttributeError) as error:
            raise ValueError(f"{str(path)!r} is not a spec ({error}): restore the file") from error
        raise ValueError(
            f"{str(self.path)!r} is a run of `pmlf probe`: give it to `pmlf probe --resume`, `pmlf predict` or `pmlf "
            "evaluate`"
        )

    def _write_weights(self, name: str, model: nn.Module) -> None:
        # copies, because safetensors refuses tied weights, which share memory
        weights = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in model.state_dict().items()}
        write_atomically(self.path / name, safetensors.torch.save(weights), released=True)


def resumed_spec(stored: RunSpec, given: RunSpec) -> RunSpec:
    """The stored spec with the given number of epochs or steps. Settings that are None keep their stored values.

    Raises:
        ValueError: If another setting differs, or if the run has no target epsilon to limit more steps.
    """
    changes: dict[str, Any] = {}
    for name, value in vars(given).items():
        if name != "options" and value not in (None, "auto") and value != getattr(stored, name):
            changes[name] = value
    for name, value in vars(given.options).items():
        if value is not None and value != getattr(stored.options, name):
            changes[name] = value
    for name, value in changes.items():
        if name not in _EXTENDABLE:
            was = getattr(stored.options if name in vars(stored.options) else stored, name)
            raise ValueError(
                f"`{name}` is {value!r}, but the run started with {was!r}: a resumed run keeps its settings, so leave "
                f"`{name}` out or start a new run"
            )
    if not changes:
        return stored
    if stored.epsilon is None:
        raise ValueError(
            "the run has a noise multiplier and no target epsilon, so nothing limits a longer run: resume it without "
            "`epochs` and `steps`"
        )
    return replace(stored, epochs=changes.get("epochs"), steps=changes.get("steps"))
