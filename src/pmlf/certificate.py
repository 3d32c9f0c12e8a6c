"""What was spent and how, as JSON: the numbers from which anybody can recompute epsilon, and the recomputation."""

from __future__ import annotations

import hashlib
import json
import math
import platform
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from pmlf import accounting
from pmlf.accounting import Event
from pmlf.methods import Method
from pmlf.spending import Spending

FORMAT = 1
_ROUNDING = 1e-9  # relative: the last digits of other machines
CHANGED = "its content and its digest disagree, so it was changed or damaged"
UNBOUNDED = "it states no epsilon: how much was spent may follow from results, and no target epsilon bounded all of it"
PLD = "PLD: the steps were planned before the run and are all alike"
CAPPED = (
    "PLD up to the target epsilon: the run was begun more than once, or steps were done again, which may follow from "
    "results; holds if the target epsilon was fixed before that"
)
FILTER = (
    "RDP filter (Feldman & Zrnic 2021) up to the target epsilon: steps or runs were added after results could be seen; "
    "holds if the target epsilon was fixed before that"
)


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
            "mechanism": "Poisson-subsampled Gaussian, once per step",
            "unit_of_privacy": "one record of the training set",
            "adjacency": "add or remove one record",
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
            "sampler": "Poisson",
            "randomness": randomness,
            "reproducible_noise": reproducible,
            "trials": trials,
            "not_accounted_for": [
                "tuning and runs on the same records that are not among the trials",
                "seeds or checkpoints chosen after seeing results",
                "preprocessing fitted on the private records",
                "stopping early because of results (the epsilon at planned steps covers it)",
            ],
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
        document = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{str(path)!r} is not a certificate: it cannot be read as JSON") from error
    if not isinstance(document, dict) or "certificate" not in document or "digest" not in document:
        raise ValueError(f"{str(path)!r} is not a certificate, or not a whole one: it lacks its version or its digest")
    return document


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
    """Every epsilon of a certificate with its recomputation; raises ValueError for what is no certificate, or changed.

    Accountants of different versions differ by a little. So a claim below the usual bound is held against a finer
    computation, which is an upper bound too: what is accepted is not understated.
    """
    try:
        if document["certificate"] != FORMAT:
            raise ValueError(f"its version is {document['certificate']!r}, not {FORMAT}")
        if not intact(document):
            raise ValueError(CHANGED)
        return tuple(_claims(document))
    except (KeyError, TypeError, AttributeError, ZeroDivisionError) as error:
        raise ValueError(f"this is not a whole certificate ({type(error).__name__}: {error})") from error
    except (ValueError, OverflowError) as error:
        raise ValueError(f"this certificate cannot be checked: {error}") from error


def _claims(document: Mapping[str, Any]) -> Iterator[Claim]:
    delta, planned, released = (document[name] for name in ("delta", "planned_steps", "released_steps"))
    rate = document["expected_batch_size"] / document["records"]
    if not math.isclose(rate, document["sample_rate"], rel_tol=_ROUNDING):
        raise ValueError(f"sample_rate={document['sample_rate']} is not expected_batch_size / records = {rate}")
    event = Event(noise_multiplier=document["noise_multiplier"], sample_rate=document["sample_rate"])

    def claim(name: str, stated: float, steps: int, accountant: str) -> Claim:
        bound = accounting.epsilon(**asdict(event), steps=steps, delta=delta, accountant=accountant)
        if bound > stated:
            bound = min(bound, accounting.finest_epsilon(event, steps=steps, delta=delta))
        return Claim(name=name, stated=stated, recomputed=bound)

    if document["composition"] not in (PLD, CAPPED, FILTER):
        raise ValueError(f"composition={document['composition']!r} is not known")
    if document["epsilon"] is not None:
        if document["composition"] == FILTER:
            spent = accounting.filter_epsilon(_events(document["trials"]), delta=delta)
            yield Claim(name="epsilon", stated=document["epsilon"], recomputed=spent)
        else:
            yield claim("epsilon", document["epsilon"], max(planned, released), "pld")
    for name, steps in (("epsilon_at_planned_steps", planned), ("epsilon_at_released_steps", released)):
        for accountant, stated in document[name].items():
            yield claim(f"{name}, {accountant}", stated, steps, accountant)


def _events(trials: Sequence[Mapping[str, Any]]) -> dict[Event, int]:
    events: dict[Event, int] = {}
    for trial in trials:
        event = Event(noise_multiplier=trial["noise_multiplier"], sample_rate=trial["sample_rate"])
        events[event] = events.get(event, 0) + trial["events"]
    return events


def _by_accountant(event: Event, steps: int, delta: float) -> dict[str, float]:
    return {
        name: accounting.epsilon(**asdict(event), steps=steps, delta=delta, accountant=name)
        for name in accounting.ACCOUNTANTS
    }
