"""A certificate as one self-contained HTML page, for the screen (light or dark) and for paper."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any

import jinja2

from pmlf.evidence.certificate import UNBOUNDED
from pmlf.evidence.description import ADAPTIVE, SELECTION, SHAPE, UNITS, UNREACHED
from pmlf.evidence.statement import CAPPED, FILTER, SELECTED

# When the epsilons of the planned and of the released steps hold, by composition.
_VALID_BY_PLAN = ("even if results were seen during training", "if the run was not stopped because of results")
_VALID = {
    FILTER: ("for this run alone", "for this run alone"),
    SELECTED: ("for one trial alone", "for one trial alone"),
    CAPPED: ("for one start without repeated steps", "if no result influenced the number of steps"),
}


def page(document: Mapping[str, Any]) -> str:
    """Render a certificate as HTML. Every value is escaped, and the page loads nothing else.

    Args:
        document: a certificate, as `pmlf.evidence.certificate.certificate` returns it.

    Returns:
        The HTML page.
    """
    source = (resources.files("pmlf") / "assets" / "certificate.html.j2").read_text(encoding="utf-8")
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, undefined=jinja2.StrictUndefined)
    return environment.from_string(source).render(
        epsilon="none" if document["epsilon"] is None else upper(document["epsilon"]),
        delta=_number(document["delta"]),
        guarantee=guarantee(document),
        reproducible=document["reproducible_noise"],
        spent=_spent(document),
        composition=document["composition"],
        mechanism=_mechanism(document),
        queries=_queries(document.get("queries", [])),
        method=_method(document),
        trials=_trials(document["trials"]),
        not_accounted_for=document["not_accounted_for"],
        versions=_origin(document),
    )


def guarantee(document: Mapping[str, Any]) -> str:
    """The guarantee of a certificate as a sentence with its definition."""
    if document["epsilon"] is None:
        return f"This certificate states no guarantee: {UNBOUNDED.partition(': ')[2] or UNBOUNDED}."
    dataset = f" of {document['dataset']}" if document["dataset"] else ""
    units = document.get(UNITS)
    differ = f"one {units['name']}" if units else "one record"
    count = f"{units['count']:,} units with " if units else ""
    return (
        f"The training is (ε, δ)-differentially private. For any two training sets that differ in {differ} "
        f"({document['adjacency']}), the probability of any set of outcomes under one is at most e^ε times its "
        f"probability under the other, plus δ. The training set has {count}{document['records']:,} "
        f"records{dataset}."
    )


def _spent(document: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """A row for the planned steps and one for the released steps."""
    valid = _VALID.get(document["composition"], _VALID_BY_PLAN)
    rows: list[tuple[str, ...]] = []
    for name, condition in zip(("planned", "released"), valid, strict=True):
        epsilon = document[f"epsilon_at_{name}_steps"]
        steps = f"{document[f'{name}_steps']:,}"
        rows.append((name, steps, upper(epsilon["pld"]), upper(epsilon["rdp"]), condition))
    return rows


def _mechanism(document: Mapping[str, Any]) -> list[tuple[str, str]]:
    target = document["target_epsilon"]
    return [
        ("each step", document["mechanism"]),
        ("unit of privacy", _unit(document)),
        *_population(document),
        *_selection(document),
        ("expected batch size, B", f"{document['expected_batch_size']:,}"),
        (_rate_label(document), _number(document["sample_rate"])),
        ("noise multiplier, z", _number(document["noise_multiplier"])),
        ("clip norm, C", f"{_number(document['clip_norm'])}, {document['clipping']}{_adaptive(document)}"),
        ("target epsilon", "none: the noise multiplier was given" if target is None else _number(target)),
        ("steps in the model", f"{document['steps_of_the_model']:,} of {document['planned_steps']:,}"),
    ]


def _adaptive(document: Mapping[str, Any]) -> str:
    part = document.get(ADAPTIVE)
    if part is None:
        return ""
    return f" at first; it follows the {_number(part['quantile'])} quantile of the norms"


def _unit(document: Mapping[str, Any]) -> str:
    """The unit of privacy with the numbers of units and records, as in "one patient; 4,210 units, 61,033 records"."""
    units = document.get(UNITS)
    if units is None:
        return str(document["unit_of_privacy"])
    return f"one {units['name']}; {units['count']:,} units, {document['records']:,} records"


def _population(document: Mapping[str, Any]) -> list[tuple[str, str]]:
    units = document.get(UNITS)
    if units is None:
        return [("records, n", f"{document['records']:,}")]
    return [
        ("units, n", f"{units['count']:,}"),
        ("records of a unit in a step", f"at most {units['most_records']:,}, the mean of which is clipped"),
    ]


def _selection(document: Mapping[str, Any]) -> list[tuple[str, str]]:
    part = document.get(SELECTION)
    if part is None:
        return []
    return [("best of several runs", f"their number is {part['distribution']} with mean {_number(part['mean'])}")]


def _rate_label(document: Mapping[str, Any]) -> str:
    bands = len(document["method"].get(SHAPE, ())) or 1
    return "sampling rate, q = B/n" if bands == 1 else f"sampling rate in a group, p = {bands} B/n"


def _method(document: Mapping[str, Any]) -> list[tuple[str, str]]:
    method = document["method"]
    low_pass = method["filter"]
    points = "; ".join(
        f"weight {_number(point['weight'])} at ({', '.join(map(_number, point['coefficients']))})"
        for point in method["points"]
    )
    return [
        ("name", method["name"]),
        ("evaluation points", f"{points}{', normalised' if method['weights_normalised'] else ''}"),
        ("filter a", ", ".join(map(_number, low_pass["a"])) or "none"),
        ("filter b", ", ".join(map(_number, low_pass["b"]))),
        ("bias correction", "yes" if low_pass["corrected"] else "no"),
        ("noise shape", ", ".join(map(_number, method.get(SHAPE, ()))) or "white"),
        ("sampler", f"{document['sampler']}: each {'unit' if UNITS in document else 'record'} joins independently"),
        ("noise", document["randomness"]),
        ("samples are independent", document.get("independence_of_samples", "not stated")),
        ("checked at every step", "yes" if document.get("watched_at_every_step") else "no"),
        *([("noise and no gradient", ", ".join(document[UNREACHED]))] if UNREACHED in document else []),
        ("processes", str(document.get("processes", 1))),
    ]


def _queries(queries: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """A row for everything that is released before the steps."""
    return [
        (
            query["name"],
            _number(query["noise_multiplier"]),
            _number(query["sample_rate"]),
            f"{query['planned']:,}",
            f"{query['released']:,}",
        )
        for query in queries
    ]


def _trials(trials: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    return [
        (
            trial["run"],
            _number(trial["noise_multiplier"]),
            _number(trial["sample_rate"]),
            f"{trial['planned_steps']:,}",
            f"{trial['events']:,}",
        )
        for trial in trials
    ]


def _origin(document: Mapping[str, Any]) -> str:
    parts = [f"{name} {version}" for name, version in document["versions"].items()]
    if "spec_digest" in document:
        parts.append(f"spec {document['spec_digest']}")
    return ", ".join([*parts, f"certificate {document['digest']}"])


def upper(epsilon: float) -> str:
    """Four decimals, rounded up: the page must not state less than the certificate.

    >>> upper(1.99991), upper(2.00001)
    ('2', '2.0001')
    """
    return f"{math.ceil(epsilon * 1e4) / 1e4:.10g}" if math.isfinite(epsilon) else str(epsilon)


def _number(value: float) -> str:
    return f"{value:.5g}"
