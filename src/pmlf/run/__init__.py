"""A private run of T steps: `make_private` builds it, `PrivateRun` carries it out."""

from pmlf.run.evaluation import evaluate
from pmlf.run.making import make_private
from pmlf.run.private_run import PrivateRun

__all__ = ["PrivateRun", "evaluate", "make_private"]
