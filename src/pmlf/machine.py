"""The machine: what a time depends on besides the code."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

_DISTRIBUTIONS = {"pmlf": "dp-pmlf"}
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # glibc's malloc.h


def keep_freed_memory() -> bool:
    """From now on this process keeps what it frees for what it allocates next; False where malloc is not glibc's.

    A step frees and allocates the same large tensors as the one before. glibc gives those above 32 MB back to the
    system each time, and fetching and clearing their pages anew takes a fifth of a CNN-5 step.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:
        return False
    never_mapped = mallopt(_M_MMAP_MAX, 0)
    never_trimmed = mallopt(_M_TRIM_THRESHOLD, -1)
    return bool(never_mapped and never_trimmed)


def return_freed_memory() -> None:
    """Give back once what is kept free at the moment, where malloc is glibc's: this process is about to wait."""
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except AttributeError:
        return


def describe(*packages: str) -> dict[str, Any]:
    """Processor, number of cores, and the versions of some packages (None for one that is not installed)."""
    return {"cpu": _cpu(), "cores": os.cpu_count(), **{package: _version(package) for package in packages}}


@cache
def code() -> str:
    """A digest of this package's source: two results with the same one were made by the same code."""
    digest = hashlib.sha256()
    package = Path(__file__).parent
    for file in sorted(package.rglob("*.py")):
        digest.update(f"{file.relative_to(package)}\0".encode() + file.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


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
