"""The private step, where the stages meet: `PrivateStep`."""

from pmlf.step.private_step import PrivateStep

__all__ = ["PrivateStep"]
