"""The part of a checkpoint that is not in the state of the `PrivateRun`."""

from __future__ import annotations

import os
import secrets
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch

from pmlf.experiments.results import Evaluation
from pmlf.experiments.tasks import Task
from pmlf.mechanism.digests import records_digest


@dataclass(kw_only=True)
class RunProgress:
    """What a run needs to resume, besides the state of its `PrivateRun`.

    It is written to the checkpoint and nowhere else: with the key of the records' digest, others could test guesses.
    """

    run: str
    ledger: Path | None  # a shared ledger; None for the one in the run's folder, which may be moved
    records_key: bytes
    records_digest: str
    threads: int
    torch_version: str
    seconds: float = 0.0
    sensitive_shown: bool = False
    diagnosed: bool = False
    evaluations: list[Evaluation] = field(default_factory=list)

    @staticmethod
    def start(task: Task, ledger: Path | None) -> RunProgress:
        """The progress of a new run."""
        key = os.urandom(32)
        return RunProgress(
            run=secrets.token_hex(8),
            ledger=None if ledger is None else ledger.absolute(),
            records_key=key,
            records_digest=_digest(task, key),
            threads=torch.get_num_threads(),
            torch_version=torch.__version__,
        )

    @property
    def not_accounted_for(self) -> list[str]:
        """Sensitive output that the user requested. The certificate lists it."""
        shown = {
            "the training loss, shown and recorded on demand": self.sensitive_shown,
            "diagnostics of gradients before the noise, recorded on demand": self.diagnosed,
        }
        return [name for name, there in shown.items() if there]

    def to_state(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            **vars(self),
            "ledger": None if self.ledger is None else str(self.ledger),
            "records_key": self.records_key.hex(),
            "evaluations": [evaluation.to_json() for evaluation in self.evaluations],
        }

    @staticmethod
    def from_state(state: Mapping[str, Any]) -> RunProgress:
        """The progress that `to_state` wrote."""
        if unknown := sorted(set(state) ^ {each.name for each in fields(RunProgress)}):
            raise ValueError(
                f"the checkpoint is from another version of pmlf ({unknown[0]!r} differs): resume with that version"
            )
        return RunProgress(
            **{
                **state,
                "ledger": None if state["ledger"] is None else Path(state["ledger"]),
                "records_key": bytes.fromhex(state["records_key"]),
                "evaluations": [Evaluation.from_json(evaluation) for evaluation in state["evaluations"]],
            }
        )

    def check(self, task: Task, *, seeded: bool) -> None:
        """Raise ValueError if the training records differ. Warn if a seeded run may not repeat bit for bit."""
        if _digest(task, self.records_key) != self.records_digest:
            raise ValueError(
                "the training records, their units or their order have changed since the run started: resume with the "
                "same dataset, or start a new run"
            )
        if seeded and self.torch_version != torch.__version__:
            warnings.warn(
                f"the run started with torch {self.torch_version}, this is {torch.__version__}: rounding may differ",
                stacklevel=3,
            )

    @contextmanager
    def same_threads(self) -> Iterator[None]:
        """Use as many threads as at the start: rounding depends on how sums are split over threads."""
        before = torch.get_num_threads()
        torch.set_num_threads(self.threads)
        try:
            yield
        finally:
            torch.set_num_threads(before)


def _digest(task: Task, key: bytes) -> str:
    """A digest of the records, and of which of them belong together."""
    found = records_digest(task.train, task.collate_fn, key)
    return found if task.units is None else f"{found} {task.units.digest(key)}"
