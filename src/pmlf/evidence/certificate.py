"""Privacy certificates: what a run has spent and how, as JSON, and the check that recomputes its epsilon."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from pmlf.evidence.budget import BudgetGuard
from pmlf.evidence.description import ADAPTIVE, LARGEST, OVERFLOW, SELECTION, SHAPE, UNITS, UNREACHED, Contradiction
from pmlf.evidence.mechanism_words import MechanismWords
from pmlf.evidence.statement import (
    BANDS,
    CAPPED,
    EVENTS,
    FILTER,
    FORMAT,
    NOT_ACCOUNTED_FOR,
    PLD,
    SELECTED,
    STEPS,
    Statement,
    read_statement,
)
from pmlf.evidence.tally import PrivacyPlan, RunStart, events_of
from pmlf.mechanism import accounting
from pmlf.mechanism.accounting import Event
from pmlf.mechanism.adaptive_clipping import AdaptiveClipping
from pmlf.mechanism.composition import composed_epsilon, finest_composed_epsilon
from pmlf.mechanism.selection import Selection
from pmlf.mechanism.units import Units
from pmlf.methods import Method

_ROUNDING = 1e-9  # relative: other machines differ in the last digits
CHANGED = "its content and its digest disagree, so it was changed or damaged"
RESUMED_UNSEEN = "steps released after the saved state that the run resumed from: it has no ledger, which counts them"
UNBOUNDED = "it states no epsilon: the amount spent may depend on results, and no target epsilon bounds all of it"


@dataclass(frozen=True, kw_only=True)
class CertifiedRun:
    """What a certificate says of a run besides its budget: all of it public.

    Attributes:
        method: The method.
        clipping: The kind of clipping.
        clip_norm: The clip norm, C.
        records: The number of records, n; of units, if there are units.
        expected_batch_size: The expected batch size, B.
        steps_done: The number of steps that the model has taken.
        randomness: Where the noise comes from, in words.
        reproducible: Whether a seed reproduces the noise.
        independence: How the independence of samples is known.
        watched: Whether samples of every step are run again alone.
        unreached: Trained parameters that no loss depends on, by synthetic samples; they get noise alone.
        processes: The number of processes that take every step together.
        adaptive: How the clip norm changes; None if it does not.
        sum_multiplier: The noise multiplier of the sum alone, if the clip norm is adaptive.
        largest_batch: The largest number of records in a batch; None if no draw is cut.
        units: The units that are protected; None for records.
    """

    method: Method
    clipping: str
    clip_norm: float
    records: int
    expected_batch_size: float
    steps_done: int
    randomness: str
    reproducible: bool
    independence: str
    watched: bool
    unreached: tuple[str, ...] = ()
    processes: int = 1
    adaptive: AdaptiveClipping | None = None
    sum_multiplier: float | None = None
    largest_batch: int | None = None
    units: Units | None = None


def certificate(run: CertifiedRun, budget: BudgetGuard) -> dict[str, Any]:
    """The certificate of a run: its mechanism, all its public constants, and the epsilon they give.

    Args:
        run: What the run is.
        budget: What it has spent.

    Returns:
        A JSON-ready document with a digest.
    """
    plan, parts = budget.plan, budget.run_parts
    adaptive, truncated = _adaptive(run), _truncation(run, plan.event)
    words = MechanismWords(
        bands=plan.bands, adaptive=bool(adaptive), truncated=bool(truncated), unit=plan.unit
    ).document()
    return sealed(
        {
            "certificate": FORMAT,
            "mechanism": words["mechanism"],
            "unit_of_privacy": words["unit_of_privacy"],
            "adjacency": words["adjacency"],
            "dataset": budget.dataset,
            "epsilon": budget.claim(),
            "delta": plan.delta,
            "target_epsilon": plan.target_epsilon,
            "composition": PLD if budget.as_planned else FILTER if budget.filtered else CAPPED,
            "epsilon_at_planned_steps": _by_accountant(plan.events, plan.delta),
            "epsilon_at_released_steps": _by_accountant(events_of(plan, parts), plan.delta),
            "planned_steps": plan.steps,
            "released_steps": budget.run_steps,
            **({EVENTS: parts[-1]} if plan.bands > 1 else {}),
            **_queries(plan, parts),
            "steps_of_the_model": run.steps_done,
            "records": run.records if run.units is None else run.units.records,
            **_units(run.units),
            "expected_batch_size": run.expected_batch_size,
            "sample_rate": plan.event.sample_rate,
            "noise_multiplier": float(plan.event.noise_multiplier),
            "clip_norm": run.clip_norm,
            "clipping": run.clipping,
            **adaptive,
            **truncated,
            "method": _method(run.method),
            "sampler": words["sampler"],
            "randomness": run.randomness,
            "reproducible_noise": run.reproducible,
            "independence_of_samples": run.independence,
            "watched_at_every_step": run.watched,
            **({UNREACHED: list(run.unreached)} if run.unreached else {}),
            "processes": run.processes,
            "trials": [
                _trial(trial, budget.tally.parts_of(trial), releases) for trial, releases in budget.tally.starts.items()
            ],
            "not_accounted_for": [*NOT_ACCOUNTED_FOR, *([RESUMED_UNSEEN] if budget.resumed_unseen else [])],
            "versions": _versions(),
        }
    )


def selected(document: Mapping[str, Any], selection: Selection) -> dict[str, Any]:
    """The certificate of the best of a random number of runs: its epsilon covers all of them.

    Args:
        document: The certificate of the best run alone.
        selection: The distribution of the number of runs.

    Raises:
        ValueError: The run did not go as planned, or has a mechanism that this does not account for.
    """
    if document["composition"] != PLD:
        raise ValueError("the best run did not go as planned, so its trials cannot be accounted for: start again")
    event = Event(
        noise_multiplier=document["noise_multiplier"],
        sample_rate=document["sample_rate"],
        overflow=document.get(OVERFLOW, 0.0),
    )
    total = selection.epsilon(event, steps=document["planned_steps"], delta=document["delta"])
    chosen = {"mean": float(selection.mean), "distribution": selection.distribution}
    return sealed({**document, "epsilon": total, "composition": SELECTED, SELECTION: chosen})


def _units(units: Units | None) -> dict[str, Any]:
    if units is None:
        return {}
    return {UNITS: {"name": units.name, "count": units.count, "most_records": units.most}}


def _method(method: Method) -> dict[str, Any]:
    low_pass = method.low_pass
    return {
        "name": method.name,
        "points": [{"coefficients": list(p.coefficients), "weight": p.weight} for p in method.points.points],
        "weights_normalised": method.points.normalised,
        "filter": {"a": list(low_pass.a), "b": list(low_pass.b), "corrected": low_pass.corrected},
        **({SHAPE: list(method.noise.coefficients)} if method.noise.bands > 1 else {}),
    }


def _adaptive(run: CertifiedRun) -> dict[str, Any]:
    """How the clip norm changes, and the noise of both releases; nothing for a constant one."""
    if run.adaptive is None:
        return {}
    return {
        ADAPTIVE: {
            "quantile": float(run.adaptive.quantile),
            "rate": float(run.adaptive.rate),
            "count_noise": run.adaptive.count_deviation(run.expected_batch_size),
            "sum_noise_multiplier": run.sum_multiplier,
        }
    }


def _truncation(run: CertifiedRun, event: Event) -> dict[str, Any]:
    """The largest batch and the chance that a draw is cut to it; nothing if that cannot be."""
    return {LARGEST: run.largest_batch, OVERFLOW: event.overflow} if event.overflow else {}


def _queries(plan: PrivacyPlan, parts: Sequence[int]) -> dict[str, Any]:
    """What is released before the steps; nothing for a plan of steps alone."""
    if not plan.queries:
        return {}
    pairs = zip(plan.queries, parts, strict=False)
    return {"queries": [{"name": q.name, **q.event.document(), "planned": q.count, "released": n} for q, n in pairs]}


def _trial(trial: RunStart, parts: Sequence[int], releases: int) -> dict[str, Any]:
    plan = trial.plan
    return {
        "run": trial.run,
        "beginning": trial.beginning,
        **plan.event.document(),
        "planned_steps": plan.steps,
        "target_epsilon": plan.target_epsilon,
        "delta": plan.delta,
        "events": parts[-1],
        **_queries(plan, parts),
        **({BANDS: plan.bands, STEPS: releases} if plan.bands > 1 else {}),
    }


def _versions() -> dict[str, str]:
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "dp-accounting": version("dp-accounting"),
        "dp-pmlf": version("dp-pmlf"),
    }


def sealed(document: Mapping[str, Any]) -> dict[str, Any]:
    """The document with a digest of its content as its last entry; an old digest is replaced.

    >>> intact(sealed({"epsilon": 1.0})), intact({**sealed({"epsilon": 1.0}), "epsilon": 0.5})
    (True, False)
    """
    content = {name: value for name, value in document.items() if name != "digest"}
    text = json.dumps(content, sort_keys=True)
    return {**content, "digest": hashlib.blake2b(text.encode(), digest_size=16).hexdigest()}


def read(path: Path) -> dict[str, Any]:
    """Read a certificate file. This does not check it: see `examined`.

    Args:
        path: The file.

    Returns:
        The document.

    Raises:
        ValueError: The file does not hold a certificate.
    """
    try:
        document = json.loads(path.read_bytes(), object_pairs_hook=_without_repetition)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{str(path)!r} is not a certificate: it cannot be read as JSON") from error
    if not isinstance(document, dict) or "certificate" not in document or "digest" not in document:
        raise ValueError(f"{str(path)!r} is not a certificate, or not a whole one: it lacks its version or its digest")
    return document


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object without repeated names: two readers may see different values of a repeated name."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name occurs twice")
    return found


def intact(document: Mapping[str, Any]) -> bool:
    """Whether the digest fits the content. It has no key, so it shows accidents, not forgery."""
    return sealed(document)["digest"] == document["digest"]


@dataclass(frozen=True, kw_only=True)
class Claim:
    """An epsilon that a certificate states, and the bound that its own numbers give.

    Attributes:
        name: The entry.
        stated: The epsilon it states.
        recomputed: The epsilon that its numbers give.
    """

    name: str
    stated: float
    recomputed: float

    @property
    def holds(self) -> bool:
        """Whether the stated epsilon is not below the recomputed one."""
        return self.stated >= self.recomputed * (1 - _ROUNDING)


def claims(document: Mapping[str, Any]) -> tuple[Claim, ...]:
    """Recompute every epsilon of a certificate. The first claim covers all events in its trials.

    Versions of an accountant differ slightly. So a claim below the usual bound is compared with a finer computation,
    which is an upper bound too: an accepted epsilon is never understated.

    Args:
        document: The certificate.

    Returns:
        One claim per epsilon.

    Raises:
        Contradiction: Its numbers contradict each other.
        ValueError: It is not a complete certificate of this version, or it was changed.
    """
    if document.get("certificate") != FORMAT:
        raise ValueError(
            f"this certificate cannot be checked: its version is {document.get('certificate')!r}, and this "
            f"library reads version {FORMAT}"
        )
    if not intact(document):
        raise ValueError(f"this certificate cannot be checked: {CHANGED}")
    try:
        return tuple(_claims(read_statement(document)))
    except Contradiction:
        raise
    except (ValueError, OverflowError) as error:
        raise ValueError(f"this certificate cannot be checked: {error}") from error


def examined(document: Mapping[str, Any]) -> tuple[tuple[Claim, ...], str | None]:
    """The claims of a certificate, and the reason why it does not hold.

    Args:
        document: The certificate.

    Returns:
        Its claims, and a reason, which is None if the certificate holds.

    Raises:
        ValueError: It is not a complete certificate of this version.
    """
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
    plan = stated.plan

    def claim(name: str, epsilon: float, events: Mapping[Event, int], accountant: str) -> Claim:
        bound = composed_epsilon(events, delta=plan.delta, accountant=accountant)
        if bound > epsilon:
            bound = min(bound, finest_composed_epsilon(events, delta=plan.delta))
        return Claim(name=name, stated=epsilon, recomputed=bound)

    if stated.epsilon is not None and stated.selection is not None:
        total = stated.selection.epsilon(plan.event, steps=plan.steps, delta=plan.delta)
        yield Claim(name="epsilon", stated=stated.epsilon, recomputed=total)
    elif stated.epsilon is not None and stated.composition == FILTER:
        spent = accounting.filter_epsilon(stated.events, delta=plan.delta)
        yield Claim(name="epsilon", stated=stated.epsilon, recomputed=spent)
    elif stated.epsilon is not None:
        yield claim("epsilon", stated.epsilon, plan.events if stated.composition == PLD else stated.released, "pld")
    for accountant in accounting.ACCOUNTANTS:
        planned, released = stated.at_planned_steps[accountant], stated.at_released_steps[accountant]
        yield claim(f"epsilon_at_planned_steps, {accountant}", planned, plan.events, accountant)
        yield claim(f"epsilon_at_released_steps, {accountant}", released, stated.released, accountant)


def _by_accountant(events: Mapping[Event, int], delta: float) -> dict[str, float]:
    return {name: composed_epsilon(events, delta=delta, accountant=name) for name in accounting.ACCOUNTANTS}
