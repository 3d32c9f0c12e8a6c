"""Plans of several kinds of events, such as private moments before private steps: one epsilon for all of them.

The kinds and their numbers are fixed before the first release. Otherwise `accounting.filter_epsilon` composes them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict
from functools import lru_cache

from pmlf.mechanism import accounting, privacy_loss
from pmlf.mechanism.calibration import smallest_noise
from pmlf.mechanism.events import Event, check_delta, check_mechanism
from pmlf.mechanism.renyi import quiet, renyi
from pmlf.mechanism.truncation import with_truncation

_NOTHING = Event(noise_multiplier=1.0, sample_rate=1.0)


def composed_epsilon(events: Mapping[Event, int], *, delta: float, accountant: str = "pld") -> float:
    """epsilon at delta of events of several kinds whose numbers are fixed beforehand: an upper bound.

    Full batches (q = 1) compose exactly: Gaussian releases of multipliers z_i equal one with 1/z^2 = sum_i 1/z_i^2.
    Other kinds compose by a product of Fourier transforms of their privacy losses ("pld") or by Renyi divergences.

    Args:
        events: how often each kind of event happens.
        delta: the probability at which epsilon is stated.
        accountant: "pld" or "rdp".

    Returns:
        epsilon; 0 without events.

    Raises:
        ValueError: an event, delta or accountant is out of range.

    >>> mean, steps = Event(noise_multiplier=25.0, sample_rate=1.0), Event(noise_multiplier=21.6, sample_rate=1.0)
    >>> round(composed_epsilon({mean: 1, steps: 30}, delta=1e-5), 3)
    0.954
    """
    for event, count in events.items():
        check_mechanism(event.noise_multiplier, event.sample_rate, count, accountant)
    happened = [(event, count) for event, count in events.items() if count] or [(_NOTHING, 0)]
    if len(happened) == 1:
        ((event, count),) = happened
        return accounting.epsilon(**asdict(event), steps=count, delta=delta, accountant=accountant)
    check_delta("delta", delta, accountant)
    kinds, cells = _merged(events), privacy_loss.CELLS_PER_DEVIATION
    return with_truncation(lambda left: _composed(kinds, left, accountant, cells), float(delta), _chance(events))


def finest_composed_epsilon(events: Mapping[Event, int], *, delta: float) -> float:
    """The tightest upper bound on epsilon that is available, never above `composed_epsilon`. It takes longer.

    Args:
        events: how often each kind of event happens.
        delta: the probability at which epsilon is stated.

    Returns:
        epsilon.

    Raises:
        ValueError: an event or delta is out of range.

    >>> events = {Event(noise_multiplier=z, sample_rate=0.5): 9 for z in (4.0, 5.0)}
    >>> finest_composed_epsilon(events, delta=1e-5) <= composed_epsilon(events, delta=1e-5)
    True
    """
    usual = composed_epsilon(events, delta=delta)
    happened = [(event, count) for event, count in events.items() if count]
    if usual == 0.0:
        return usual
    if len(happened) == 1:
        return accounting.finest_epsilon(happened[0][0], steps=happened[0][1], delta=delta)
    kinds, cells = _merged(events), 4 * privacy_loss.CELLS_PER_DEVIATION
    finer = with_truncation(lambda left: _composed(kinds, left, "pld", cells), float(delta), _chance(events))
    return min(usual, finer)


def noise_beside(
    events: Mapping[Event, int], *, target_epsilon: float, target_delta: float, sample_rate: float, steps: int
) -> float:
    """The smallest noise multiplier of T steps that, with other events of one plan, stay within target_epsilon.

    Args:
        events: the other events of the plan, fixed beforehand.
        target_epsilon: the budget of everything.
        target_delta: the probability at which epsilon is stated.
        sample_rate: q of the steps.
        steps: T, the number of steps.

    Returns:
        z of the steps. `composed_epsilon` of the whole plan is at most target_epsilon.

    Raises:
        ValueError: an argument is out of range, or the other events alone reach the target.

    >>> mean = Event(noise_multiplier=25.0, sample_rate=1.0)
    >>> z = noise_beside({mean: 1}, target_epsilon=1.0, target_delta=1e-5, sample_rate=1.0, steps=30)
    >>> steps = Event(noise_multiplier=z, sample_rate=1.0)
    >>> 0.9999 < composed_epsilon({mean: 1, steps: 30}, delta=1e-5) <= 1.0
    True
    """
    alone = accounting.noise_multiplier(
        target_epsilon=target_epsilon, target_delta=target_delta, sample_rate=sample_rate, steps=steps
    )
    before = composed_epsilon(events, delta=target_delta)
    if before >= target_epsilon:
        raise ValueError(
            f"target_epsilon={target_epsilon} is spent before the first step: the other events of the plan have "
            f"epsilon {before:.4g}, give them more noise or leave them out"
        )
    if not any(events.values()):
        return alone

    def total(log_z: float) -> float:
        step = Event(noise_multiplier=math.exp(log_z), sample_rate=sample_rate)
        return composed_epsilon({**events, step: events.get(step, 0) + steps}, delta=target_delta)

    words = f"target_epsilon={target_epsilon} at target_delta={target_delta}"
    return smallest_noise(total, float(target_epsilon), guess=alone, words=words)


def _chance(events: Mapping[Event, int]) -> float:
    """The chance that any draw of the events is cut to the largest batch, by the sum over them."""
    return math.fsum(event.overflow * count for event, count in events.items())


def _merged(events: Mapping[Event, int]) -> privacy_loss.Kinds:
    """The kinds (z, q, T), with full batches as one release."""
    kinds = [(float(e.noise_multiplier), float(e.sample_rate), int(n)) for e, n in events.items() if n]
    full = [(z, n) for z, rate, n in kinds if rate >= accounting.ALL]
    found = sorted(kind for kind in kinds if kind[1] < accounting.ALL)
    if full:
        found.append((math.fsum(n / z**2 for z, n in full) ** -0.5, 1.0, 1))
    return tuple(found)


@lru_cache(maxsize=4096)
def _composed(kinds: privacy_loss.Kinds, delta: float, accountant: str, cells: int) -> float:
    if accountant == "pld" and all(z >= accounting.SMALLEST_PLD_NOISE for z, _, _ in kinds):
        found = privacy_loss.composed_epsilon(kinds, delta, cells=cells)
        if math.isfinite(found):
            return found
    with quiet():
        return float(renyi(kinds).get_epsilon(delta))
