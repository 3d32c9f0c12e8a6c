"""bfloat16: where it must not be used, and whether it runs on this CPU.

Some virtual machines advertise AMX and may not use it: torch's bfloat16 products then end the process with an illegal
instruction, which no `except` can catch. So one is tried in a process of its own before the first is made here.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.module import register_module_forward_pre_hook

TRIAL = """
import torch
model = torch.nn.Sequential(torch.nn.Conv2d(16, 16, 3), torch.nn.Flatten(), torch.nn.Linear(576, 16))
with torch.autocast("cpu", dtype=torch.bfloat16):
    loss = model(torch.randn(8, 16, 8, 8)).float().sum()
loss.backward()
"""
_CPU = Path("/proc/cpuinfo")
_NOTHING = nullcontext()


def without_autocast() -> AbstractContextManager[object]:
    """Arithmetic in the precision that tensors have, also where autocast is on around it."""
    on = torch.is_autocast_enabled
    return _disabled() if on("cpu") or on("cuda") or on("mps") else _NOTHING


@contextmanager
def _disabled() -> Iterator[None]:
    with ExitStack() as stack:
        for kind in ("cpu", "cuda", "mps"):
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield


@contextmanager
def deadly_bfloat16_refused() -> Iterator[None]:
    """While it lasts, a layer about to run in bfloat16 on a CPU that would die of it raises ValueError instead."""

    def look(module: nn.Module, inputs: Any) -> None:
        if isinstance(module, (_ConvNd, nn.Linear)) and _in_bfloat16(module.weight) and deadly():
            raise ValueError(
                "bfloat16 ends the process on this machine, whose CPU advertises instructions (AMX) that it may not "
                "use: set ONEDNN_MAX_CPU_ISA=AVX512_CORE in the environment before Python starts, or train in float32"
            )

    handle = register_module_forward_pre_hook(look)
    try:
        yield
    finally:
        handle.remove()


@lru_cache(maxsize=1)
def deadly() -> bool:
    """Whether a small bfloat16 step, tried in another process, was ended by a signal. Not tried on CPUs without AMX."""
    try:
        if "amx" not in _CPU.read_text():
            return False
    except OSError:  # not Linux
        return False
    return subprocess.run([sys.executable, "-c", TRIAL], capture_output=True).returncode < 0


def _in_bfloat16(weight: torch.Tensor) -> bool:
    if weight.device.type != "cpu":
        return False
    autocast = torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") == torch.bfloat16
    return autocast or weight.dtype == torch.bfloat16
