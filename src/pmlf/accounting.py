"""Privacy accounting: epsilon of a noise multiplier, and the noise multiplier for a target epsilon."""

from pmlf.mechanism.accounting import (
    ACCOUNTANTS,
    Event,
    affordable_steps,
    cyclic,
    delta,
    epsilon,
    filter_epsilon,
    finest_epsilon,
    noise_multiplier,
)
from pmlf.mechanism.composition import composed_epsilon
from pmlf.mechanism.groups import group_epsilon
from pmlf.mechanism.truncation import overflow, smallest_batch_bound

__all__ = [
    "ACCOUNTANTS",
    "Event",
    "affordable_steps",
    "composed_epsilon",
    "cyclic",
    "delta",
    "epsilon",
    "filter_epsilon",
    "finest_epsilon",
    "group_epsilon",
    "noise_multiplier",
    "overflow",
    "smallest_batch_bound",
]
