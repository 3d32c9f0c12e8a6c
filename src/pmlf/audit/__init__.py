"""Measured lower bounds on epsilon: the library's own step by what it releases, a user's model, and broken variants."""

from pmlf.audit.controls import CONTROLS, Control
from pmlf.audit.model import ModelReport, ModelSettings, audit_model, audit_model_control
from pmlf.audit.model_controls import MODEL_CONTROLS, ModelControl
from pmlf.audit.report import Bound, Report, Settings, audit_control, audit_method, plot
from pmlf.audit.search import Sensitivity

__all__ = [
    "CONTROLS",
    "MODEL_CONTROLS",
    "Bound",
    "Control",
    "ModelControl",
    "ModelReport",
    "ModelSettings",
    "Report",
    "Sensitivity",
    "Settings",
    "audit_control",
    "audit_method",
    "audit_model",
    "audit_model_control",
    "plot",
]
