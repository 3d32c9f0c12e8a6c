"""The format of a ledger: lines of JSON, each with a digest that includes the digest of the line before.

    {"ledger": 2, "dataset": "patients"} 5f0c...
    {"run": "b1946ac9", "beginning": "77de68da", "sample_rate": 0.01, "noise_multiplier": 1.1, ...} 02d4...
    {"step": 0} 9d5e...
    {"step": 1} 4c1b...

The events after a run's line belong to that run. A resumed run writes its line again. A plan with named queries before
its steps lists them in "queries", and "step" counts queries and steps. A changed or missing line is detected. The
digests have no key: they detect accidents, not forgery.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pmlf.evidence.tally import RECORD, PrivacyPlan, Query, RunStart, Session, Tally
from pmlf.mechanism.accounting import Event

_VERSION = 2
_DIGEST_BYTES = 16
_REQUIRED = {  # of the line with which a run begins or resumes
    "run",
    "beginning",
    "sample_rate",
    "noise_multiplier",
    "planned_steps",
    "target_epsilon",
    "delta",
    "replayable",
    "first_step",
}
_OPTIONAL: Mapping[str, Any] = {"queries": (), "bands": 1, "groups": "", "overflow": 0.0, "unit": RECORD}


def header(dataset: str) -> str:
    """The text of the first line."""
    return json.dumps({"ledger": _VERSION, "dataset": dataset})


def session_text(session: Session) -> str:
    """The text of the line with which a run begins or resumes. What a plan does not have is left out."""
    start, plan = session.start, session.start.plan
    document: dict[str, Any] = {
        "run": start.run,
        "beginning": start.beginning,
        "sample_rate": plan.event.sample_rate,
        "noise_multiplier": plan.event.noise_multiplier,
        "planned_steps": plan.steps,
        "target_epsilon": plan.target_epsilon,
        "delta": plan.delta,
        "replayable": session.replayable,
        "first_step": session.first_step,
    }
    if plan.queries:
        document["queries"] = [asdict(query) | {"event": query.event.document()} for query in plan.queries]
    if plan.bands > 1:
        document |= {"bands": plan.bands, "groups": session.groups}
    if plan.event.overflow:
        document["overflow"] = plan.event.overflow
    if plan.unit != RECORD:
        document["unit"] = plan.unit
    return json.dumps(document)


def event_text(step: int) -> str:
    """The text of an event's line.

    >>> event_text(3)
    '{"step": 3}'
    """
    return json.dumps({"step": step})


def digest(text: str, before: str) -> str:
    """The digest of a line with this text, after a line with the digest `before` ("" for the first line)."""
    return hashlib.blake2b((before + text).encode(), digest_size=_DIGEST_BYTES).hexdigest()


def line(text: str, before: str) -> bytes:
    """A complete line, as it is written to the file."""
    return f"{text} {digest(text, before)}\n".encode()


@dataclass(frozen=True, kw_only=True)
class LedgerContents:
    """The events of a ledger, its digests line by line, and where its complete lines end."""

    tally: Tally
    digests: list[str]
    whole_bytes: int  # length of all complete lines
    cut_short: bool  # whether an incomplete line follows them


def parse(content: bytes, path: Path, dataset: str | None) -> LedgerContents:
    """Read the content of a ledger.

    Args:
        content: the bytes of the file.
        path: the file's name, for error messages.
        dataset: refuse a ledger of another dataset; None accepts any.

    Returns:
        What the complete lines say. An incomplete last line is reported, not counted.

    Raises:
        ValueError: a line is damaged, not allowed at its place, or of another dataset.
    """
    tally, digests, whole_bytes = Tally(), [""], 0
    for number, (found, last) in enumerate(_lines(content), start=1):
        document = _document(found, digests[-1])
        if document is None:
            if last and number > 1 and _is_one_line(found):
                break
            raise ValueError(
                f"line {number} of the ledger {str(path)!r} is damaged, so what was spent is unknown: restore the file "
                "from a backup"
            )
        try:
            _apply(document, tally, first=number == 1, dataset=dataset)
        except _Refused as refused:
            raise ValueError(f"line {number} of the ledger {str(path)!r} {refused}") from refused
        digests.append(found[-2 * _DIGEST_BYTES - 1 : -1].decode())
        whole_bytes += len(found)
    if whole_bytes == 0:
        raise ValueError(f"{str(path)!r} is empty and not a ledger: give another file")
    cut_short = whole_bytes < len(content)
    return LedgerContents(tally=tally, digests=digests[1:], whole_bytes=whole_bytes, cut_short=cut_short)


def _lines(content: bytes) -> Iterator[tuple[bytes, bool]]:
    """Each line with its line end, and whether it is the last one."""
    lines = content.split(b"\n")
    rest = lines.pop()
    found = [text + b"\n" for text in lines] + ([rest] if rest else [])
    for number, text in enumerate(found, start=1):
        yield text, number == len(found)


def _is_one_line(damaged: bytes) -> bool:
    """Whether this can be the rest of one line, rather than of two lines whose line end was lost."""
    return damaged.count(b"{") <= 1 and len(damaged.partition(b"} ")[2]) <= 2 * _DIGEST_BYTES + 1


def _document(found: bytes, before: str) -> dict[str, Any] | None:
    """A line's JSON object; None if the line is incomplete or changed."""
    try:
        text, space, end = found.decode().rpartition(" ")
        if not space or end != digest(text, before) + "\n":
            return None
        document = json.loads(text)
    except ValueError:
        return None
    return document if isinstance(document, dict) else None


class _Refused(Exception):
    """Why a line is not allowed at its place."""


def _apply(document: Mapping[str, Any], tally: Tally, *, first: bool, dataset: str | None) -> None:
    if first:
        if set(document) != {"ledger", "dataset"} or document["ledger"] != _VERSION:
            raise _Refused(f"is not the first line of a ledger of version {_VERSION}: give another file")
        if dataset is not None and document["dataset"] != dataset:
            raise _Refused(
                f"says it is of the dataset {document['dataset']!r}, not of {dataset!r}: use one ledger per dataset"
            )
    elif set(document) == {"step"}:
        if tally.unfinished_step() is None or not _is_count(document["step"]):
            raise _Refused("is an event without a run before it, or its step is not a count")
        tally.add(document["step"])
    else:
        tally.begin(_session(document))


def _session(document: Mapping[str, Any]) -> Session:
    found = {**_OPTIONAL, **document}
    if set(found) != _REQUIRED | set(_OPTIONAL):
        raise _Refused("is neither a run nor an event")
    try:
        queries = tuple(_query(query) for query in found["queries"])
    except (TypeError, KeyError, AttributeError) as error:
        raise _Refused("is neither a run nor an event") from error
    target = () if found["target_epsilon"] is None else (found["target_epsilon"],)
    kinds = [query.event for query in queries]
    multipliers = (found["noise_multiplier"], *(kind.noise_multiplier for kind in kinds))
    rates = (found["sample_rate"], *(kind.sample_rate for kind in kinds))
    numbers = (*rates, *multipliers, found["delta"], *target)
    if not (
        isinstance(found["run"], str)
        and isinstance(found["beginning"], str)
        and isinstance(found["unit"], str)
        and isinstance(found["groups"], str)
        and isinstance(found["replayable"], bool)
        and all(isinstance(number, (int, float)) and math.isfinite(number) and number > 0 for number in numbers)
        and all(rate <= 1 for rate in rates)
        and all(isinstance(query.name, str) and _is_count(query.count) for query in queries)
        and found["delta"] < 1
        and _is_count(found["planned_steps"])
        and _is_count(found["first_step"])
        and _is_count(found["bands"])
        and found["bands"] >= 1
        and not (queries and found["bands"] > 1)
        and _is_chance(found["overflow"])
        and not (found["overflow"] and found["bands"] > 1)
    ):
        raise _Refused("is a run with values out of range")
    plan = PrivacyPlan(
        event=Event(
            noise_multiplier=found["noise_multiplier"], sample_rate=found["sample_rate"], overflow=found["overflow"]
        ),
        steps=found["planned_steps"],
        delta=found["delta"],
        target_epsilon=found["target_epsilon"],
        queries=queries,
        bands=found["bands"],
        unit=found["unit"],
    )
    start = RunStart(run=found["run"], beginning=found["beginning"], plan=plan)
    return Session(start=start, replayable=found["replayable"], first_step=found["first_step"], groups=found["groups"])


def _query(document: Mapping[str, Any]) -> Query:
    return Query(**{**document, "event": Event(**document["event"])})


def _is_chance(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < 1


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
