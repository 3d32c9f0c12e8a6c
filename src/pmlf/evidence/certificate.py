"""What was spent and how, as JSON: the numbers from which anybody can recompute epsilon, and the recomputation."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from pmlf.evidence.spending import Spending
from pmlf.evidence.statement import (
    ADJACENCY,
    CAPPED,
    FILTER,
    FORMAT,
    MECHANISM,
    NOT_ACCOUNTED_FOR,
    PLD,
    SAMPLER,
    UNIT,
    Contradiction,
    Statement,
)
from pmlf.mechanism import accounting
from pmlf.mechanism.accounting import Event
from pmlf.methods import Method

_ROUNDING = 1e-9  # relative: the last digits of other machines
CHANGED = "its content and its digest disagree, so it was changed or damaged"
UNBOUNDED = "it states no epsilon: how much was spent may follow from results, and no target epsilon bounded all of it"


def certificate(
    *,
    method: Method,
    clipping: str,
    population: int,
    expected_batch_size: float,
    noise_multiplier: float,
    clip_norm: float,
    planned_steps: int,
    steps_done: int,
    delta: float,
    spending: Spending,
    randomness: str,
    reproducible: bool,
    independence: str,
    watched: bool,
) -> dict[str, Any]:
    """A JSON-ready account of a run: the mechanism with all its public constants, and the epsilon they give."""
    event = Event(noise_multiplier=noise_multiplier, sample_rate=expected_batch_size / population)
    trials = [
        {
            "run": trial.run,
            "beginning": trial.beginning,
            **asdict(trial.event),
            "planned_steps": trial.planned_steps,
            "target_epsilon": trial.target_epsilon,
            "delta": trial.delta,
            "events": count,
        }
        for trial, count in spending.tally.trials.items()
    ]
    released = spending.run_events
    return sealed(
        {
            "certificate": FORMAT,
            "mechanism": MECHANISM,
            "unit_of_privacy": UNIT,
            "adjacency": ADJACENCY,
            "dataset": spending.dataset,
            "epsilon": spending.claim(),
            "delta": delta,
            "target_epsilon": spending.target_epsilon,
            "composition": PLD if spending.as_planned else FILTER if spending.filtered else CAPPED,
            "epsilon_at_planned_steps": _by_accountant(event, planned_steps, delta),
            "epsilon_at_released_steps": _by_accountant(event, released, delta),
            "planned_steps": planned_steps,
            "released_steps": released,
            "steps_of_the_model": steps_done,
            "records": population,
            "expected_batch_size": expected_batch_size,
            "sample_rate": event.sample_rate,
            "noise_multiplier": noise_multiplier,
            "clip_norm": clip_norm,
            "clipping": clipping,
            "method": {
                "name": method.name,
                "points": [{"coefficients": list(p.coefficients), "weight": p.weight} for p in method.points.points],
                "weights_normalised": method.points.normalised,
                "filter": {
                    "a": list(method.low_pass.a),
                    "b": list(method.low_pass.b),
                    "corrected": method.low_pass.corrected,
                },
            },
            "sampler": SAMPLER,
            "randomness": randomness,
            "reproducible_noise": reproducible,
            "independence_of_samples": independence,
            "watched_at_every_step": watched,
            "trials": trials,
            "not_accounted_for": list(NOT_ACCOUNTED_FOR),
            "versions": {
                "python": platform.python_version(),
                "torch": torch.__version__,
                "dp-accounting": version("dp-accounting"),
                "dp-pmlf": version("dp-pmlf"),
            },
        }
    )


def sealed(document: Mapping[str, Any]) -> dict[str, Any]:
    """With a digest of its content as its last entry, in place of the one it had."""
    content = {name: value for name, value in document.items() if name != "digest"}
    text = json.dumps(content, sort_keys=True)
    return {**content, "digest": hashlib.blake2b(text.encode(), digest_size=16).hexdigest()}


def read(path: Path) -> dict[str, Any]:
    """The content of a certificate file, neither checked for changes (`intact`) nor for what it claims (`claims`)."""
    try:
        document = json.loads(path.read_bytes(), object_pairs_hook=_without_repetition)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{str(path)!r} is not a certificate: it cannot be read as JSON") from error
    if not isinstance(document, dict) or "certificate" not in document or "digest" not in document:
        raise ValueError(f"{str(path)!r} is not a certificate, or not a whole one: it lacks its version or its digest")
    return document


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object; refuses one that says a thing twice, of which a reader may see the other."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name stands there twice")
    return found


def intact(document: Mapping[str, Any]) -> bool:
    """Whether the content is the one that was sealed. The digest has no key: it tells accidents, not forgers."""
    return sealed(document)["digest"] == document["digest"]


@dataclass(frozen=True, kw_only=True)
class Claim:
    """An epsilon that a certificate states, and the bound that its own numbers give."""

    name: str
    stated: float
    recomputed: float

    @property
    def holds(self) -> bool:
        return self.stated >= self.recomputed * (1 - _ROUNDING)


def claims(document: Mapping[str, Any]) -> tuple[Claim, ...]:
    """Every epsilon of a certificate with its recomputation, the first of which covers all events in its trials.

    Accountants of different versions differ by a little. So a claim below the usual bound is held against a finer
    computation, which is an upper bound too: what is accepted is not understated.

    Raises:
        Contradiction: its numbers do not fit each other.
        ValueError: it is no whole certificate of this version, or was changed.
    """
    if document.get("certificate") != FORMAT:
        raise ValueError(f"this certificate cannot be checked: its version is not {FORMAT}")
    if not intact(document):
        raise ValueError(f"this certificate cannot be checked: {CHANGED}")
    try:
        statement = Statement.read(document)
        return tuple(_claims(statement))
    except Contradiction:
        raise
    except (ValueError, OverflowError) as error:
        raise ValueError(f"this certificate cannot be checked: {error}") from error


def examined(document: Mapping[str, Any]) -> tuple[tuple[Claim, ...], str | None]:
    """The claims of a certificate, and why it does not hold; None if it does."""
    if not intact(document):
        return (), CHANGED
    try:
        found = claims(document)
    except Contradiction as contradiction:
        return (), f"it contradicts itself: {contradiction}"
    if document["epsilon"] is None:
        return found, UNBOUNDED
    if not all(claim.holds for claim in found):
        return found, "its own numbers give a larger epsilon than it states"
    return found, None


def _claims(stated: Statement) -> Iterator[Claim]:
    def claim(name: str, epsilon: float, steps: int, accountant: str) -> Claim:
        given = {**asdict(stated.event), "steps": steps, "delta": stated.delta}
        bound = accounting.epsilon(**given, accountant=accountant)
        if bound > epsilon:
            bound = min(bound, accounting.finest_epsilon(stated.event, steps=steps, delta=stated.delta))
        return Claim(name=name, stated=epsilon, recomputed=bound)

    if stated.epsilon is not None and stated.composition == FILTER:
        spent = accounting.filter_epsilon(stated.events, delta=stated.delta)
        yield Claim(name="epsilon", stated=stated.epsilon, recomputed=spent)
    elif stated.epsilon is not None:
        covered = stated.planned_steps if stated.composition == PLD else stated.released_steps
        yield claim("epsilon", stated.epsilon, covered, "pld")
    for accountant in accounting.ACCOUNTANTS:
        planned, released = stated.at_planned_steps[accountant], stated.at_released_steps[accountant]
        yield claim(f"epsilon_at_planned_steps, {accountant}", planned, stated.planned_steps, accountant)
        yield claim(f"epsilon_at_released_steps, {accountant}", released, stated.released_steps, accountant)


def _by_accountant(event: Event, steps: int, delta: float) -> dict[str, float]:
    return {
        name: accounting.epsilon(**asdict(event), steps=steps, delta=delta, accountant=name)
        for name in accounting.ACCOUNTANTS
    }
