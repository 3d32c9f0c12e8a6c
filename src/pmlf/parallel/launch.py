"""Processes that `torchrun` has started."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from pmlf.parallel.processes import Processes, joined


@contextmanager
def launched(caller: str) -> Iterator[Processes]:
    """The processes of this run, in a `with` block: those that torchrun has started, or this one alone.

    Opens the process group if nobody has, with gloo for CPUs and NCCL for GPUs, and closes it at the end.

    Args:
        caller: The name of the command or function, for an error.

    Yields:
        The processes.

    >>> with launched("pmlf train") as processes:
    ...     processes.rank, processes.size
    (0, 1)
    """
    opens = dist.is_available() and not dist.is_initialized() and dist.is_torchelastic_launched()
    if opens:
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group()
    try:
        yield joined("auto", caller)
    finally:
        if opens and dist.is_initialized():
            dist.destroy_process_group()
