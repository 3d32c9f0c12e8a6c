"""A certificate as one page of HTML that needs nothing else: for the screen, light or dark, and for paper."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib import resources
from string import Template
from typing import Any

from pmlf.evidence.certificate import UNBOUNDED
from pmlf.evidence.statement import CAPPED, FILTER


def page(document: Mapping[str, Any]) -> str:
    """The page of a certificate as `certificate.certificate` makes it."""
    template = Template((resources.files("pmlf") / "assets" / "certificate.html").read_text(encoding="utf-8"))
    reproducible = document["reproducible_noise"]
    return template.substitute(
        epsilon="none" if document["epsilon"] is None else _upper(document["epsilon"]),
        delta=_number(document["delta"]),
        guarantee=escape(_guarantee(document)),
        noise_class="bad" if reproducible else "good",
        noise=escape(
            "Reproducible noise: whoever knows the seed can take it away. Not for release."
            if reproducible
            else "Noise keyed by the operating system; no key was kept."
        ),
        spent=_spent(document),
        composition=escape(f"Composition by {document['composition']}."),
        mechanism=_facts(_mechanism(document)),
        method=_facts(_method(document)),
        trials=_trials(document["trials"]),
        not_accounted_for="".join(f"<li>{escape(text)}</li>" for text in document["not_accounted_for"]),
        versions=escape(_origin(document)),
    )


def _guarantee(document: Mapping[str, Any]) -> str:
    if document["epsilon"] is None:
        return f"This certificate states nothing: {UNBOUNDED.removeprefix('it states no epsilon: ')}."
    dataset = f" of {document['dataset']}" if document["dataset"] else ""
    return (
        f"For any two training sets that differ in one record ({document['adjacency']}), no outcome of this training "
        "is more than e^ε times as likely on the one as on the other, but for a probability of δ. The "
        f"training set has {document['records']:,} records{dataset}."
    )


def _spent(document: Mapping[str, Any]) -> str:
    planned_holds, released_holds = {
        FILTER: ("the same for this run alone", "the same for this run alone"),
        CAPPED: ("for one beginning, nothing done again", "holds if no result decided how many there are"),
    }.get(
        document["composition"],
        ("holds whatever was seen on the way", "holds if the run was not stopped because of results"),
    )
    planned, released = document["epsilon_at_planned_steps"], document["epsilon_at_released_steps"]
    return _table(
        ("", "steps", "epsilon by PLD", "by RDP", ""),
        [
            (
                "planned",
                f"{document['planned_steps']:,}",
                _upper(planned["pld"]),
                _upper(planned["rdp"]),
                planned_holds,
            ),
            (
                "released",
                f"{document['released_steps']:,}",
                _upper(released["pld"]),
                _upper(released["rdp"]),
                released_holds,
            ),
        ],
    )


def _mechanism(document: Mapping[str, Any]) -> list[tuple[str, str]]:
    target = document["target_epsilon"]
    return [
        ("each step", document["mechanism"]),
        ("unit of privacy", document["unit_of_privacy"]),
        ("records, n", f"{document['records']:,}"),
        ("expected batch size, B", f"{document['expected_batch_size']:,}"),
        ("sample rate, q = B/n", _number(document["sample_rate"])),
        ("noise multiplier, z", _number(document["noise_multiplier"])),
        ("clip norm, C", f"{_number(document['clip_norm'])}, {document['clipping']}"),
        ("target epsilon", "none: the noise was given" if target is None else _number(target)),
        ("steps of the model", f"{document['steps_of_the_model']:,} of {document['planned_steps']:,}"),
    ]


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
        ("sampler", f"{document['sampler']}: each record joins independently"),
        ("noise", document["randomness"]),
        ("samples are independent", document.get("independence_of_samples", "not stated")),
        ("watched at every step", "yes" if document.get("watched_at_every_step") else "no"),
    ]


def _trials(trials: Sequence[Mapping[str, Any]]) -> str:
    if not trials:
        return "<p>None has released anything yet.</p>"
    return _table(
        ("run", "noise multiplier", "sample rate", "steps planned", "events"),
        [
            (
                trial["run"],
                _number(trial["noise_multiplier"]),
                _number(trial["sample_rate"]),
                f"{trial['planned_steps']:,}",
                f"{trial['events']:,}",
            )
            for trial in trials
        ],
    )


def _origin(document: Mapping[str, Any]) -> str:
    parts = [f"{name} {version}" for name, version in document["versions"].items()]
    if "spec_digest" in document:
        parts.append(f"spec {document['spec_digest']}")
    return ", ".join([*parts, f"certificate {document['digest']}"])


def _facts(rows: Iterable[tuple[str, str]]) -> str:
    cells = (f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in rows)
    return f"<table>{''.join(cells)}</table>"


def _table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(heading)}</th>" for heading in headings)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><tr>{head}</tr>{body}</table>"


def _upper(epsilon: float) -> str:
    """Four decimals, rounded up: a page must not say less than the certificate.

    >>> _upper(1.99991), _upper(2.00001)
    ('2', '2.0001')
    """
    return f"{math.ceil(epsilon * 1e4) / 1e4:.10g}" if math.isfinite(epsilon) else str(epsilon)


def _number(value: float) -> str:
    return f"{value:.5g}"
