"""The machine that something was measured on: what a time depends on besides the code."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

_DISTRIBUTIONS = {"pmlf": "dp-pmlf"}


def describe(*packages: str) -> dict[str, Any]:
    """Processor, number of cores, and the versions of some packages (None for one that is not installed)."""
    return {"cpu": _cpu(), "cores": os.cpu_count(), **{package: _version(package) for package in packages}}


def _cpu() -> str:
    file = Path("/proc/cpuinfo")
    if file.exists():
        for line in file.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _version(package: str) -> str | None:
    try:
        return version(_DISTRIBUTIONS.get(package, package))
    except PackageNotFoundError:
        return None
