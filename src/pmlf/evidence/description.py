"""What a certificate says of a run besides its numbers of events: sizes, method, clipping, randomness, versions."""

from __future__ import annotations

import math

from pmlf.basics.clipping import CLIPPINGS
from pmlf.evidence.json_object import JsonObject
from pmlf.evidence.tally import RECORD
from pmlf.mechanism.noise import SeededRandomness
from pmlf.mechanism.selection import Selection
from pmlf.mechanism.shapes import NoiseShape
from pmlf.mechanism.truncation import overflow

SHAPE = "noise_shape"  # of a method with shaped noise
ADAPTIVE, LARGEST, OVERFLOW = "adaptive_clipping", "largest_batch", "overflow"  # of runs that have them
_SPEC = "spec_digest"  # of the run folder, if there is one
_INDEPENDENCE, _WATCHED, _PROCESSES = "independence_of_samples", "watched_at_every_step", "processes"
UNREACHED = "unreached_parameters"  # which get noise and no gradient, if there are any
UNITS = "units"  # of several records, if those are protected
SELECTION = "selection"  # of the best of several runs
OPTIONAL = (_SPEC, _INDEPENDENCE, _WATCHED, _PROCESSES, UNREACHED, ADAPTIVE, LARGEST, OVERFLOW, UNITS, SELECTION)
_VERSIONS = ("python", "torch", "dp-accounting", "dp-pmlf")
_ROUNDING = 1e-9  # relative


class Contradiction(ValueError):
    """Two statements of a certificate that cannot both be true."""


def bands_of(method: JsonObject) -> int:
    """The number of bands of the noise shape, whose columns must have norm at most 1."""
    if not method.has(SHAPE):
        return 1
    coefficients = method.numbers(SHAPE)
    if len(coefficients) < 2 or math.hypot(*coefficients) > 1 + _ROUNDING:
        raise Contradiction(
            f"{SHAPE} has {len(coefficients)} coefficients of norm {math.hypot(*coefficients)}, above 1"
        )
    return NoiseShape(coefficients).bands


def check_description(entries: JsonObject) -> None:
    """Check what the epsilon does not depend on: sizes, method, randomness, versions."""
    (records, counted), size = _population(entries), entries.positive("expected_batch_size")
    method = entries.part("method")
    rate, expected = entries.event().sample_rate, bands_of(method) * size / records
    if not math.isclose(min(expected, 1.0), rate, rel_tol=_ROUNDING) or expected > 1 + _ROUNDING:
        raise Contradiction(f"sample_rate={rate} is not expected_batch_size / {counted} = {expected}")
    entries.positive("clip_norm")
    clipping = entries.one_of("clipping", CLIPPINGS)
    _check_adaptive(entries, clipping)
    _check_truncation(entries, records, size)
    seeded = entries.text("randomness").startswith(SeededRandomness.description)
    if entries.has(_INDEPENDENCE):
        entries.text(_INDEPENDENCE)
    if entries.has(_WATCHED):
        entries.truth(_WATCHED)
    if entries.has(UNREACHED):
        entries.texts(UNREACHED)
    if entries.has(_PROCESSES):
        entries.count(_PROCESSES, least=1)
    if entries.truth("reproducible_noise") != seeded:
        raise Contradiction("reproducible_noise is not what its randomness says")
    method.require("name", "points", "weights_normalised", "filter", optional=(SHAPE,))
    method.text("name")
    method.truth("weights_normalised")
    for point in method.parts("points"):
        point.require("coefficients", "weight")
        point.numbers("coefficients")
        point.number("weight")
    low_pass = method.part("filter")
    low_pass.require("a", "b", "corrected")
    low_pass.numbers("a")
    low_pass.numbers("b")
    low_pass.truth("corrected")
    versions = entries.part("versions")
    versions.require(*_VERSIONS)
    for name in _VERSIONS:
        versions.text(name)
    entries.text("digest")
    if entries.has(_SPEC):
        entries.text(_SPEC)


def selection_of(entries: JsonObject) -> Selection | None:
    """The distribution of the number of runs of which this is the best; None if it is the only one."""
    if not entries.has(SELECTION):
        return None
    part = entries.part(SELECTION)
    part.require("mean", "distribution")
    return Selection(mean=part.positive("mean"), distribution=part.text("distribution"))


def unit_of(entries: JsonObject) -> str:
    """The name of the unit of privacy. A certificate of records has no units."""
    return entries.part(UNITS).text("name") if entries.has(UNITS) else RECORD


def _population(entries: JsonObject) -> tuple[int, str]:
    """n, and what it counts."""
    records = entries.count("records", least=1, most=2**63)
    if not entries.has(UNITS):
        return records, "records"
    units = entries.part(UNITS)
    units.require("name", "count", "most_records")
    units.count("most_records", least=1)
    if units.text("name") == RECORD or units.count("count", least=1) > records:
        raise Contradiction("its units are records, or more than its records")
    return units.count("count"), "units"


def _check_adaptive(entries: JsonObject, clipping: str) -> None:
    """The noise on the sum and that on the count, together, are at least that of the event."""
    if not entries.has(ADAPTIVE):
        return
    part = entries.part(ADAPTIVE)
    part.require("quantile", "rate", "count_noise", "sum_noise_multiplier")
    part.probability("quantile")
    part.positive("rate")
    both = part.positive("sum_noise_multiplier") ** -2 + (2 * part.positive("count_noise")) ** -2
    if clipping != "flat" or entries.part("method").has(SHAPE):
        raise Contradiction(f"{ADAPTIVE} is for flat clipping and white noise")
    if both**-0.5 < entries.event().noise_multiplier * (1 - _ROUNDING):
        raise Contradiction(f"{ADAPTIVE} releases sum and count with noise of {both**-0.5} together, below that of z")


def _check_truncation(entries: JsonObject, records: int, batch_size: float) -> None:
    """The chance that a draw is cut is that of the largest batch."""
    if entries.has(LARGEST) != entries.has(OVERFLOW):
        raise Contradiction(f"it has one of {LARGEST} and {OVERFLOW} without the other")
    if entries.has(LARGEST):
        least = overflow(records=records, batch_size=batch_size, largest_batch=entries.count(LARGEST, least=1))
        if entries.event().overflow < least * (1 - _ROUNDING):
            raise Contradiction(f"{OVERFLOW} is below the chance of a draw above {LARGEST}, {least}")
