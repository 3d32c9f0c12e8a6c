"""Differentially private training that keeps its accuracy and its speed: DP-PMLF and its family for PyTorch."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pmlf import accounting, audit, checkpoint, filters, machine, methods, sampling, theory
    from pmlf.checks.fixes import fix_model
    from pmlf.checks.inspection import check
    from pmlf.engine.augmentation import Augmentation
    from pmlf.evidence.ledger import Ledger
    from pmlf.run import PrivateRun, evaluate, make_private
    from pmlf.step import PrivateStep

__all__ = [
    "Augmentation",
    "Ledger",
    "PrivateRun",
    "PrivateStep",
    "accounting",
    "audit",
    "check",
    "checkpoint",
    "evaluate",
    "filters",
    "fix_model",
    "machine",
    "make_private",
    "methods",
    "sampling",
    "theory",
]

# Where each public name lives. Loaded when first used: torch takes seconds, and `pmlf --help` does not need it.
_HOMES = {
    "Augmentation": "pmlf.engine.augmentation",
    "Ledger": "pmlf.evidence.ledger",
    "PrivateRun": "pmlf.run",
    "PrivateStep": "pmlf.step",
    "check": "pmlf.checks.inspection",
    "evaluate": "pmlf.run",
    "fix_model": "pmlf.checks.fixes",
    "make_private": "pmlf.run",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    if name in __all__:
        return import_module(f"pmlf.{name}")
    raise AttributeError(f"module 'pmlf' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
