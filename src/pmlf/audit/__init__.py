"""Measured lower bounds on epsilon: the library's own step by what it releases, and broken variants of it."""

from pmlf.audit.controls import CONTROLS, Control
from pmlf.audit.report import Bound, Report, Settings, audit_control, audit_method, plot

__all__ = ["CONTROLS", "Bound", "Control", "Report", "Settings", "audit_control", "audit_method", "plot"]
