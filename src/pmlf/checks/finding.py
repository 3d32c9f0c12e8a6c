"""What is known about samples that might influence each other."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Whether samples are independent by proof or by construction; if not, what stopped the proof.

    `samples_meet` says that the proof has found an operation that needs the data of several samples.
    """

    reason: str | None = None
    proven: bool = False
    samples_meet: bool = False

    def __str__(self) -> str:
        return f"not proven: {self.reason}" if not self.proven else str(self.reason)


PROVEN = Finding(proven=True, reason="proven: no data flow between samples on the executed path")
ASSUMED = Finding(proven=True, reason="assumed by whoever set assume_independent_samples=True")
STRUCTURAL = {
    "one-by-one": Finding(proven=True, reason="by construction: every sample has a pass of its own"),
    "vmap": Finding(proven=True, reason="by construction: vmap gives every sample a pass of its own"),
}
