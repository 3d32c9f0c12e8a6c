"""Differentially private training that keeps its accuracy and its speed: DP-PMLF and its family for PyTorch."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pmlf import accounting, audit, checkpoint, filters, machine, methods, sampling, theory
    from pmlf.augmentation import Augmentation
    from pmlf.fixes import fix_model
    from pmlf.inspection import check
    from pmlf.ledger import Ledger
    from pmlf.run import PrivateRun
    from pmlf.step import PrivateStep
    from pmlf.training import evaluate, make_private

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
    "Augmentation": "pmlf.augmentation",
    "Ledger": "pmlf.ledger",
    "PrivateRun": "pmlf.run",
    "PrivateStep": "pmlf.step",
    "check": "pmlf.inspection",
    "evaluate": "pmlf.training",
    "fix_model": "pmlf.fixes",
    "make_private": "pmlf.training",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    if name in __all__:
        return import_module(f"pmlf.{name}")
    raise AttributeError(f"module 'pmlf' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
