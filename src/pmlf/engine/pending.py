"""The sum of a logical batch so far."""

from __future__ import annotations

from typing import NamedTuple

from pmlf.engine.clipper import ClippedSum
from pmlf.engine.fingerprint import Fingerprint


class PendingSum(NamedTuple):
    """What was accumulated and not released yet. Replaced as a whole, so that an interrupted call changes nothing."""

    fingerprint: Fingerprint
    total: ClippedSum | None = None
    samples: int = 0
    micro_batches: int = 0
