"""A private run of T steps: made by `make_private`, carried out by `PrivateRun`."""

from pmlf.run.making import evaluate, make_private
from pmlf.run.private_run import PrivateRun

__all__ = ["PrivateRun", "evaluate", "make_private"]
