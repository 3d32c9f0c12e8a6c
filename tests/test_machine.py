"""The machine: its description, and memory that a process keeps."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from pmlf import machine

_FAULTS = """
import resource, sys, torch
from pmlf import machine
if sys.argv[1] == "kept" and not machine.keep_freed_memory():
    print("not glibc")
    raise SystemExit
def step():
    torch.empty(16 * 2**20).fill_(1.0)  # 64 MB: more than glibc keeps by default
for _ in range(20):  # until the free pieces fit
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""

_RETURNED = """
import resource, torch
from pathlib import Path
from pmlf import machine
def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
if not machine.keep_freed_memory():
    print("not glibc")
    raise SystemExit
pieces = [torch.empty(4 * 2**20).fill_(1.0) for _ in range(16)]  # 256 MB
alive = torch.ones(1000)
del pieces
kept = resident()
machine.return_freed_memory()
print(kept, resident())
"""


def _numbers(script: str, *arguments: str) -> list[int]:
    said = subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, text=True, check=True).stdout
    if said.strip() == "not glibc":
        pytest.skip("malloc is not glibc's")
    return [int(number) for number in said.split()]


@pytest.mark.slow
def test_freed_memory_is_kept_for_the_next_step() -> None:
    (kept,), (as_it_is,) = _numbers(_FAULTS, "kept"), _numbers(_FAULTS, "as it is")
    assert kept < 0.1 * as_it_is


@pytest.mark.slow
def test_a_process_that_waits_returns_what_it_has_kept() -> None:
    kept, returned = _numbers(_RETURNED)
    assert kept - returned > 0.9 * 256 * 2**20


@pytest.mark.skipif(sys.platform != "linux", reason="processes are bound to cores on Linux only")
def test_cores_are_those_that_the_process_may_use() -> None:
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)})
    try:
        assert machine.cores() == 1
    finally:
        os.sched_setaffinity(0, allowed)
    assert machine.cores() == len(allowed)


def test_description_names_processor_cores_and_versions() -> None:
    described = machine.describe("torch", "pmlf", "no-such-package")
    assert described["cpu"] and described["cores"] >= 1
    assert described["torch"] and described["pmlf"]
    assert described["no-such-package"] is None
