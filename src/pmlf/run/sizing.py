"""Choosing the micro-batch size from the memory and time of two small micro-batches.

Both are nearly linear in the number of samples: fixed + each * samples. The chosen size is the smallest whose fixed
time is a twentieth of the whole, limited to half of the free memory. The inputs are synthetic, nothing is released, and
memory never runs out.
"""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.data import default_collate

from pmlf.basics.batches import batch_size, select, synthetic
from pmlf.mechanism.noise import SeededRandomness
from pmlf.mechanism.records import Collate, alone
from pmlf.mechanism.units import Units
from pmlf.step import PrivateStep

EXAMPLES = 32  # records whose shapes are used: the larger of the two sizes
_FIXED_SHARE = 0.05
_MEMORY_SHARE = 0.5
_TIMED_SECONDS = 1.0


def physical_batch_size(
    step: PrivateStep, example: Any, *, most: int, least: int = 1, free_bytes: int | None = None
) -> int:
    """Choose the number of samples in memory at once.

    Args:
        step: The private step. It releases nothing here.
        example: A batch, of which only the shapes and dtypes are used.
        most: The largest size allowed.
        least: The smallest size of use, if it fits.
        free_bytes: The free memory; None asks the system.

    Returns:
        The micro-batch size, from 1 to `most`.

    Raises:
        ValueError: One sample does not fit into half of the free memory.
    """
    device = step.trained[0].device
    inputs = synthetic(example, SeededRandomness(0).stream("sizing").seed())
    large = batch_size(inputs)
    small = max(1, large // 4)
    free = _free_bytes(device) if free_bytes is None else free_bytes

    def trial(size: int) -> Callable[[], None]:
        units = torch.arange(size) if step.settings.units else None

        def accumulate() -> None:
            step.accumulate(select(inputs, slice(0, size)), units=units)
            step.discard()

        return accumulate

    trial(small)()  # warm-up
    trials = {size: trial(size) for size in sorted({small, large})}
    memory = _StraightLine([(size, peak_bytes(run, device)) for size, run in trials.items()])
    seconds = _StraightLine(list(_best_seconds(trials, device).items()))
    step.first_look.again()
    fits = math.floor((_MEMORY_SHARE * free - memory.fixed) / memory.each) if memory.each > 0 else most
    if fits < 1:
        raise ValueError(
            f"one sample of this model takes about {(memory.fixed + memory.each) / 2**20:.0f} MB, more than half of "
            f"the {free / 2**20:.0f} MB that are free: use a smaller model, or free memory"
        )
    enough = max(large, least, seconds.fixed * (1 / _FIXED_SHARE - 1) / seconds.each) if seconds.each > 0 else most
    return max(1, min(8 * math.ceil(enough / 8), fits, most))  # multiples of 8 suit the hardware


def measured_size(
    given: int | Literal["auto"], step: PrivateStep, dataset: Any, collate_fn: Collate | None, units: Units | None
) -> int:
    """The micro-batch size as given, or for "auto" one that fits memory and is fast.

    Nearly all draws have at most B + 4 sqrt(B) samples.

    Args:
        given: The size, or "auto".
        step: The private step.
        dataset: The dataset.
        collate_fn: Makes a batch of a list of records; None for torch's default.
        units: The units that are drawn; None for records.
    """
    if not isinstance(given, str) or given != "auto":
        return given
    if step.sharded:
        raise ValueError(
            'max_physical_batch_size="auto" measures a step of one process, and fully_shard has cut the model: give a '
            "number"
        )
    records_each = 1 if units is None else units.most
    records, expected = len(dataset), step.settings.expected_batch_size
    example = (collate_fn or default_collate)([alone(dataset, index) for index in range(min(EXAMPLES, records))])
    drawn = min(math.ceil(expected + 4 * math.sqrt(expected)) * records_each, records)
    most = max(records_each, math.ceil(drawn / step.processes.size))  # some for every rank
    size = physical_batch_size(step, example, most=most, least=records_each)
    return step.processes.by_first(lambda: size)


class _StraightLine:
    """The line fixed + each * size through one or two points, with neither number below 0."""

    def __init__(self, points: list[tuple[int, float]]) -> None:
        (first, low), (last, high) = points[0], points[-1]
        self.each = max(0.0, (high - low) / (last - first)) if last > first else high / last
        self.fixed = max(0.0, high - self.each * last)


def _best_seconds(trials: Mapping[int, Callable[[], None]], device: torch.device) -> dict[int, float]:
    """The best time of each size, measured in turns: at least twice, and more often if it takes milliseconds."""
    best = dict.fromkeys(trials, math.inf)
    rounds, begin = 0, time.perf_counter()
    while rounds < 2 or (rounds < 20 and time.perf_counter() - begin < _TIMED_SECONDS):
        for size, run in trials.items():
            started = time.perf_counter()
            run()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            best[size] = min(best[size], time.perf_counter() - started)
        rounds += 1
    return best


def peak_bytes(action: Callable[[], None], device: torch.device) -> float:
    """The largest memory that tensors created by an action occupy at one time.

    Args:
        action: What to run.
        device: Where it allocates.

    Returns:
        The number of bytes.

    >>> peak_bytes(lambda: torch.zeros(1000).sum(), torch.device("cpu"))
    4004.0
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        action()
        return float(torch.cuda.max_memory_allocated(device) - torch.cuda.memory_allocated(device))
    with _Peak() as peak:
        action()
    return float(peak.bytes)


class _Peak(TorchDispatchMode):
    """Adds up the storages of all tensors created meanwhile, and keeps the largest total."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0
        self._now = 0
        self._alive: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(found):
            if isinstance(tensor, Tensor):
                self._see(tensor.untyped_storage())
        return found

    def _see(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._alive:
            return
        self._alive.add(key)
        self._now += size
        self.bytes = max(self.bytes, self._now)
        weakref.finalize(storage, self._gone, key, size).atexit = False

    def _gone(self, key: int, size: int) -> None:
        self._alive.discard(key)
        self._now -= size


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    if device.type == "mps":
        return torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory()
    lines = _text(Path("/proc/meminfo")).splitlines()
    free = [1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")]
    limit, used = _text(Path("/sys/fs/cgroup/memory.max")), _text(Path("/sys/fs/cgroup/memory.current"))
    if limit.strip().isdigit() and used.strip().isdigit():
        free.append(int(limit) - int(used))
    return min(free, default=1 << 31)  # 2 GB if the system does not tell


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
