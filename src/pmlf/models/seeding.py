"""Initial weights that depend only on a seed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def seeded(seed: int | None) -> Iterator[None]:
    """Within this context, modules are built on the CPU from the seed. The state of torch's generator is restored.

    With seed None, modules are built from torch's global generator.
    """
    with torch.device("cpu"):
        if seed is None:
            yield
            return
        with torch.random.fork_rng(devices=[]):
            # not torch.manual_seed, which also seeds the generators of all accelerators
            torch.default_generator.manual_seed(seed)
            yield
