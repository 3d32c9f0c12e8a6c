"""Which candidate its trials choose, and what a certificate says of trials on the same records."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from pmlf.evidence import certificate
from pmlf.experiments.spec import chosen_by_trials


def best(scores: Sequence[float]) -> int:
    """The number of the best score, the first of equal ones. NaN, of a model that diverged, is worse than any number.

    >>> best([math.nan, 0.4, 0.4])
    1
    """
    return max(range(len(scores)), key=lambda number: -math.inf if math.isnan(scores[number]) else scores[number])


def unaccounted(document: Mapping[str, Any], trials: int) -> dict[str, Any]:
    """A certificate that says that its settings were chosen by trials on the same records. One that says so stays."""
    said = chosen_by_trials(trials)
    listed = document["not_accounted_for"]
    return dict(document) if said in listed else certificate.sealed({**document, "not_accounted_for": [*listed, said]})
