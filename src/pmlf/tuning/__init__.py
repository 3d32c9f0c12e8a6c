"""Choosing hyper-parameters, in three modes that are named by what they cost."""

from pmlf.experiments.spec import RunSpec
from pmlf.mechanism.selection import Selection
from pmlf.tuning.grid import Grid
from pmlf.tuning.plan import MODES, TuningPlan
from pmlf.tuning.tuner import TuningResult, tune

__all__ = ["MODES", "Grid", "RunSpec", "Selection", "TuningPlan", "TuningResult", "tune"]
