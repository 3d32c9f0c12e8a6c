"""What a run must remember, beside the state of its `PrivateRun`, to go on where it was cut off."""

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

from pmlf.checkpoint import records_digest
from pmlf.experiments.results import Evaluation
from pmlf.experiments.tasks import Task


@dataclass(kw_only=True)
class Progress:
    """Goes into the checkpoint and nowhere else: the key of the records' digest would let others test guesses."""

    run: str
    ledger: Path | None  # one that runs share; None is the run's own, which goes where its folder goes
    records_key: bytes
    records_digest: str
    threads: int
    torch_version: str
    seconds: float = 0.0
    sensitive_shown: bool = False
    diagnosed: bool = False
    evaluations: list[Evaluation] = field(default_factory=list)

    @staticmethod
    def start(task: Task, ledger: Path | None) -> Progress:
        key = os.urandom(32)
        return Progress(
            run=secrets.token_hex(8),
            ledger=None if ledger is None else ledger.absolute(),
            records_key=key,
            records_digest=records_digest(task.train, task.collate_fn, key),
            threads=torch.get_num_threads(),
            torch_version=torch.__version__,
        )

    @property
    def not_accounted_for(self) -> list[str]:
        """What was shown of the private records on demand: the certificate names it."""
        shown = {
            "the training loss, shown and recorded on demand": self.sensitive_shown,
            "diagnostics of gradients before the noise, recorded on demand": self.diagnosed,
        }
        return [name for name, there in shown.items() if there]

    def to_state(self) -> dict[str, Any]:
        return {
            **vars(self),
            "ledger": None if self.ledger is None else str(self.ledger),
            "records_key": self.records_key.hex(),
            "evaluations": [evaluation.to_json() for evaluation in self.evaluations],
        }

    @staticmethod
    def from_state(state: Mapping[str, Any]) -> Progress:
        if unknown := sorted(set(state) ^ {each.name for each in fields(Progress)}):
            raise ValueError(
                f"the checkpoint and this version of pmlf differ in {unknown[0]!r}: resume with the other one"
            )
        return Progress(
            **{
                **state,
                "ledger": None if state["ledger"] is None else Path(state["ledger"]),
                "records_key": bytes.fromhex(state["records_key"]),
                "evaluations": [Evaluation.from_json(evaluation) for evaluation in state["evaluations"]],
            }
        )

    def check(self, task: Task, *, seeded: bool) -> None:
        """Refuse other records; warn where the same seed may give other bits."""
        if records_digest(task.train, task.collate_fn, self.records_key) != self.records_digest:
            raise ValueError(
                "the training records are not those that the run began with, or not in that order: give it the same, "
                "or begin a new run"
            )
        if seeded and self.torch_version != torch.__version__:
            warnings.warn(
                f"the run began with torch {self.torch_version}, this is {torch.__version__}: the bits may differ",
                stacklevel=3,
            )

    @contextmanager
    def same_threads(self) -> Iterator[None]:
        """Sums are rounded by how they are split over threads: as many as at the beginning."""
        before = torch.get_num_threads()
        torch.set_num_threads(self.threads)
        try:
            yield
        finally:
            torch.set_num_threads(before)
