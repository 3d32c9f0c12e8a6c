"""Epsilon from noise, and noise from epsilon."""

from pmlf.mechanism.accounting import (
    ACCOUNTANTS,
    Event,
    affordable_steps,
    delta,
    epsilon,
    filter_epsilon,
    finest_epsilon,
    noise_multiplier,
)

__all__ = [
    "ACCOUNTANTS",
    "Event",
    "affordable_steps",
    "delta",
    "epsilon",
    "filter_epsilon",
    "finest_epsilon",
    "noise_multiplier",
]
