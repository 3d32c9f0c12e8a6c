"""Empirical audit: measured lower bounds on epsilon for the library's methods, your model, and broken variants."""

from pmlf.audit.controls import CONTROLS, Control
from pmlf.audit.model import ModelReport, ModelSettings, audit_model, audit_model_control
from pmlf.audit.model_controls import MODEL_CONTROLS, ModelControl
from pmlf.audit.report import AuditReport, AuditSettings, Bound, audit_control, audit_method, plot
from pmlf.audit.search import Sensitivity

__all__ = [
    "CONTROLS",
    "MODEL_CONTROLS",
    "AuditReport",
    "AuditSettings",
    "Bound",
    "Control",
    "ModelControl",
    "ModelReport",
    "ModelSettings",
    "Sensitivity",
    "audit_control",
    "audit_method",
    "audit_model",
    "audit_model_control",
    "plot",
]
