"""Start processes that form a group, and read what each of them found."""

from __future__ import annotations

import multiprocessing
import os
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

Work = Callable[[int, Path], None]  # of (rank, folder)


def in_processes(work: Work, count: int, folder: Path) -> None:
    """Call `work` in new processes that are one process group (gloo). Fails with what any of them raised."""
    context = multiprocessing.get_context("spawn")
    started = [context.Process(target=_rank, args=(work, rank, count, folder)) for rank in range(count)]
    for process in started:
        process.start()
    for process in started:
        process.join(300)
        if process.is_alive():
            process.kill()
    errors = [path.read_text() for path in sorted(folder.glob("error-*.txt"))]
    assert not errors, "\n".join(errors)
    assert [process.exitcode for process in started] == [0] * count


def distance(one: Tensor, other: Tensor) -> float:
    """The relative distance of two vectors."""
    return float((one - other).norm() / other.norm())


def _rank(work: Work, rank: int, count: int, folder: Path) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("error", FutureWarning)  # of torch, about functions that it is going to remove
    meeting = f"file://{folder}/meeting"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=count, timeout=timedelta(seconds=120))
    try:
        work(rank, folder)
        dist.destroy_process_group()
    except BaseException:
        (folder / f"error-{rank}.txt").write_text(traceback.format_exc())
        os._exit(1)
