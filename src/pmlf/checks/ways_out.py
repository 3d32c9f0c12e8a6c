"""Which way out is faster for a model whose per-sample gradients cannot be taken by rules."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

from pmlf.basics.batches import batch_size, select
from pmlf.checks.comparison import Subject, clipped_sum
from pmlf.engine.plan import Gradients, Plan

_SAMPLES = 8
_ALIKE = 1.1  # times that differ by less


def faster_way(subject: Subject, batch: Any) -> str:
    """What to give in place of rules, by a trial of both ways on a few samples; the model stays as it was.

    No time is told: it could follow from the samples.
    """
    few = select(batch, slice(0, _SAMPLES))
    mapped, single = (_seconds(subject, few, way) for way in ("vmap", "one-by-one"))
    if single is None:
        return 'neither gradients="vmap" nor gradients="one-by-one" runs this loss'
    if mapped is None:
        return 'gradients="vmap" does not run this loss: give gradients="one-by-one", one sample at a time'
    if mapped * _ALIKE < single:
        return 'give gradients="vmap", which is faster here than gradients="one-by-one"'
    if single * _ALIKE < mapped:
        return 'give gradients="one-by-one", which is faster here than gradients="vmap"'
    return 'give gradients="vmap" or gradients="one-by-one", which are equally fast here'


def _seconds(subject: Subject, batch: Any, way: Gradients) -> float | None:
    """The time per sample of a clipped sum, the second of two; None if gradients cannot be computed this way."""
    try:
        other = replace(subject, plan=Plan.of(subject.model, way), weights=(1.0,))
        with other.undisturbed(training=subject.model.training):
            clipped_sum(other, batch)
            start = time.perf_counter()
            clipped_sum(other, batch)
            return (time.perf_counter() - start) / batch_size(batch)
    except Exception:  # whatever a model or a loss raises in a trial
        return None
