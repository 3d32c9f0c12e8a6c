"""The folder of a run: what is in it, how a run that was cut off is found again, and what it must not have changed.

It is for the user alone (`pmlf.files`): the weights and the certificate are released, and the rest is not.

spec.json          what the run is
ledger.jsonl       what it has spent, unless it shares a ledger elsewhere
checkpoint.safetensors     where to go on; gone when the run is finished
diagnostics.json   on demand
metrics.jsonl, model.safetensors (model-ema), certificate.json, certificate.html, result.json     when it has ended
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
from pmlf.experiments.spec import RunSpec, flag
from pmlf.run.private_run import PrivateRun

_MAY_GROW = ("epochs", "steps")


class RunFolder:
    """A run's folder, new or found."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._made: list[Path] = []

    @property
    def own_ledger(self) -> Path:
        return self.path / "ledger.jsonl"

    @property
    def _checkpoint(self) -> Path:
        return self.path / "checkpoint.safetensors"

    def refuse_existing(self) -> None:
        """A folder of results is never written into twice."""
        if self.path.exists():
            raise ValueError(f"{str(self.path)!r} exists already: choose another folder, or move this one away")

    def make(self, spec: RunSpec) -> None:
        """Claim the name."""
        self._made = [parent for parent in self.path.parents if not parent.exists()]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        new_folder(self.path)
        self.write_spec(spec)

    def remove(self) -> None:
        """Leave nothing behind: neither the folder nor those that were made for it."""
        remove_flat(self.path)
        for parent in self._made:
            if not any(parent.iterdir()):
                parent.rmdir()

    def begun(self) -> bool:
        """Whether there is a run to go on with. One cut off before its first checkpoint has spent nothing: it goes."""
        if not self.path.exists():
            return False
        if self._checkpoint.exists() or (self.path / "result.json").exists():
            return True
        if not self._cut_off_at_once():
            raise ValueError(
                f"{str(self.path)!r} holds neither a finished run nor a checkpoint to go on from: give the folder of a "
                "run, or a new one"
            )
        if self.own_ledger.exists():
            refuse_in_use(self.own_ledger)
        remove_flat(self.path)
        return False

    def _cut_off_at_once(self) -> bool:
        """Whether this is all that a run has left which was cut off before its first checkpoint, and nothing else."""
        files = {"spec.json", self.own_ledger.name}
        partials = {partial_name(name) for name in ("spec.json", self._checkpoint.name)}
        found = {entry.name for entry in self.path.iterdir()}
        if found - files - partials:
            return False
        if found & files:
            self._written_spec()  # the first file that a run writes: without it the others are somebody else's
        return not self.own_ledger.exists() or self.own_ledger.read_bytes().count(b"\n") <= 1

    def spec(self) -> RunSpec:
        """As it was when the run began or last went on: its checkpoint's, which a digest guards, if there is one."""
        return RunSpec.from_json(self.load()["spec"]) if self._checkpoint.exists() else self._written_spec()

    def finished(self) -> RunResult | None:
        """The result of a run that has come to its end; None if it was interrupted or cut off."""
        path = self.path / "result.json"
        if not path.exists():
            return None
        try:
            result = RunResult.from_full_json(json.loads(path.read_text()), self._written_spec(), self.path)
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{str(path)!r} is damaged: put the file back as it was") from error
        return None if result.interrupted else result

    def save(self, spec: RunSpec, progress: Mapping[str, Any], run: Mapping[str, Any]) -> None:
        checkpoint.save(self._checkpoint, {"spec": spec.to_json(), "progress": progress, "run": run})

    def load(self) -> dict[str, Any]:
        """What was saved last: spec, progress and run."""
        if not self._checkpoint.exists():
            raise ValueError(f"{str(self.path)!r} has lost its checkpoint: put {self._checkpoint.name} back")
        return checkpoint.load(self._checkpoint)

    def go_on(self, spec: RunSpec) -> None:
        """The results so far are withdrawn: the certificate would soon say too little."""
        for name in ("certificate.json", "certificate.html", "result.json"):
            (self.path / name).unlink(missing_ok=True)
        self.write_spec(spec)

    def write_metrics(self, evaluations: Sequence[Evaluation]) -> None:
        lines = [json.dumps(evaluation.to_json()) + "\n" for evaluation in evaluations]
        write_atomically(self.path / "metrics.jsonl", "".join(lines).encode())

    def write_models(self, private: PrivateRun) -> None:
        """The last iterate, and the average where one is kept."""
        self._write_weights("model.safetensors", private.model)
        averaged = private.averaged_model()
        if averaged is not None:
            self._write_weights("model-ema.safetensors", averaged)

    def write_certificate(self, private: PrivateRun, also_not_accounted_for: Sequence[str]) -> None:
        """What was spent until now."""
        document = {**private.certificate(), "spec_digest": self._written_spec().digest()}
        document["not_accounted_for"] += also_not_accounted_for
        document = certificate.sealed(document)
        write_json(self.path / "certificate.json", document, released=True)
        page = certificate_page.page(document).encode()
        write_atomically(self.path / "certificate.html", page, released=True)

    def write_diagnostics(self, document: Mapping[str, Any]) -> None:
        """Sensitive: there only on demand."""
        write_json(self.path / "diagnostics.json", document)

    def write_result(self, result: RunResult) -> None:
        """The last thing a run does; a finished one needs its checkpoint no more."""
        write_json(self.path / "result.json", result.to_full_json())
        if not result.interrupted:
            self._checkpoint.unlink(missing_ok=True)

    def write_spec(self, spec: RunSpec) -> None:
        write_atomically(self.path / "spec.json", spec.to_json().encode())

    def _written_spec(self) -> RunSpec:
        path = self.path / "spec.json"
        try:
            return RunSpec.from_json(path.read_text())
        except FileNotFoundError as error:
            raise ValueError(f"{str(self.path)!r} is not the folder of a run: it has no spec.json") from error
        except (ValueError, TypeError, AttributeError) as error:
            raise ValueError(f"{str(path)!r} is not a spec ({error}): put the file back as it was") from error

    def _write_weights(self, name: str, model: nn.Module) -> None:
        # copies: safetensors refuses tied weights, which share their memory
        weights = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in model.state_dict().items()}
        write_atomically(self.path / name, safetensors.torch.save(weights), released=True)


def continued(stored: RunSpec, asked: RunSpec) -> RunSpec:
    """The stored spec with the epochs or steps asked for. What is left open is as it was."""
    changes: dict[str, Any] = {}
    for name, value in vars(asked).items():
        if name != "options" and value not in (None, "auto") and value != getattr(stored, name):
            changes[name] = value
    for name, value in vars(asked.options).items():
        if value is not None and value != getattr(stored.options, name):
            changes[name] = value
    for name, value in changes.items():
        if name not in _MAY_GROW:
            was = getattr(stored.options if name in vars(stored.options) else stored, name)
            raise ValueError(
                f"{flag(name)} was {was!r} when the run began and is {value!r} now: a resumed run keeps its settings"
            )
    if not changes:
        return stored
    if stored.epsilon is None:
        raise ValueError(
            "the run has a noise multiplier and no target epsilon, so nothing would bound a longer plan: resume it "
            "with the plan as it was"
        )
    return replace(stored, epochs=changes.get("epochs"), steps=changes.get("steps"))
