"""The machine: processor, versions and memory, on which run times depend besides the code."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import sys
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from pmlf.basics.version import version

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # glibc's malloc.h


def keep_freed_memory() -> bool:
    """Let this process keep the memory it frees for its next allocations.

    A training step frees and allocates the same large tensors as the step before. glibc returns blocks above 32 MB to
    the system each time. Fetching and clearing their pages again takes a fifth of a CNN-5 step.

    Returns:
        Whether it applies: False if malloc is not glibc's.
    """
    libc = _libc()
    if libc is None or not hasattr(libc, "mallopt"):
        return False
    never_mapped = libc.mallopt(_M_MMAP_MAX, 0)
    never_trimmed = libc.mallopt(_M_TRIM_THRESHOLD, -1)
    return bool(never_mapped and never_trimmed)


def return_freed_memory() -> None:
    """Return the memory that is free now to the system, once, before a process waits. Only with glibc's malloc."""
    libc = _libc()
    if libc is not None and hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)


def cores() -> int:
    """The number of processor cores that this process may use: fewer than there are in a container or under taskset."""
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def describe(*packages: str) -> dict[str, Any]:
    """Describe the processor and the versions of packages.

    Args:
        packages: names of packages.

    Returns:
        "cpu", "cores", and the version of each package; None for one that is not installed.

    >>> sorted(describe("no-such-package"))
    ['cores', 'cpu', 'no-such-package']
    """
    return {"cpu": _cpu(), "cores": os.cpu_count(), **{package: _version(package) for package in packages}}


@cache
def code() -> str:
    """A digest of this package's source: equal digests mean equal code."""
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
    if package == "pmlf":
        return version()
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _libc() -> ctypes.CDLL | None:
    """The C library of this process; None on Windows, which has no such handle."""
    return None if os.name == "nt" else ctypes.CDLL(None)
