"""Differentially private training that keeps its accuracy and its speed: DP-PMLF and its family for PyTorch."""

from pmlf import accounting, filters, methods, theory
from pmlf.fixes import fix_model
from pmlf.step import Augmentation, PrivateStep
from pmlf.training import PrivateRun, evaluate, make_private
from pmlf.validation import check

__all__ = [
    "Augmentation",
    "PrivateRun",
    "PrivateStep",
    "accounting",
    "check",
    "evaluate",
    "filters",
    "fix_model",
    "make_private",
    "methods",
    "theory",
]
