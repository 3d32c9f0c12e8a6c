"""Differentially private training for PyTorch: DP-SGD, DP-PMLF and their family.

>>> import pmlf
>>> z = pmlf.accounting.noise_multiplier(target_epsilon=3.0, target_delta=1e-5, sample_rate=0.01, steps=1000)
>>> round(z, 2)
0.81
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pmlf import accounting, audit, checkpoint, filters, machine, methods, probe, sampling, shapes, theory
    from pmlf.checks.fixes import fix_model
    from pmlf.checks.inspection import check
    from pmlf.engine.augmentation import Augmentation
    from pmlf.evidence.ledger import Ledger
    from pmlf.experiments.released import load
    from pmlf.mechanism.adaptive_clipping import AdaptiveClipping
    from pmlf.run import PrivateRun, evaluate, make_private
    from pmlf.step import PrivateStep

    __version__: str

__all__ = [
    "AdaptiveClipping",
    "Augmentation",
    "Ledger",
    "PrivateRun",
    "PrivateStep",
    "__version__",
    "accounting",
    "audit",
    "check",
    "checkpoint",
    "evaluate",
    "filters",
    "fix_model",
    "load",
    "machine",
    "make_private",
    "methods",
    "probe",
    "sampling",
    "shapes",
    "theory",
]

# The module of each public name, imported at first use: torch takes seconds, and `pmlf --help` does not need it.
_HOMES = {
    "AdaptiveClipping": "pmlf.mechanism.adaptive_clipping",
    "Augmentation": "pmlf.engine.augmentation",
    "Ledger": "pmlf.evidence.ledger",
    "PrivateRun": "pmlf.run",
    "PrivateStep": "pmlf.step",
    "check": "pmlf.checks.inspection",
    "evaluate": "pmlf.run",
    "fix_model": "pmlf.checks.fixes",
    "load": "pmlf.experiments.released",
    "make_private": "pmlf.run",
}

# Names of Opacus, and what takes their place here.
_INSTEAD = {
    "BatchMemoryManager": "pass max_physical_batch_size=... to pmlf.make_private",
    "ModuleValidator": "call pmlf.check and pmlf.fix_model",
    "PrivacyEngine": "call pmlf.make_private",
    "make_private_with_epsilon": "call pmlf.make_private with target_epsilon=...",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return import_module("pmlf.basics.version").version()
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    if name in __all__:
        return import_module(f"pmlf.{name}")
    instead = f": {_INSTEAD[name]}" if name in _INSTEAD else ""
    raise AttributeError(f"module 'pmlf' has no attribute {name!r}{instead}")


def __dir__() -> list[str]:
    return sorted(__all__)
