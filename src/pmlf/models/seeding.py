"""Initial weights that are a function of a seed alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def seeded(seed: int | None) -> Iterator[None]:
    """What is built inside is on the CPU and follows the seed, if there is one; torch's generator stays as it was."""
    with torch.device("cpu"):
        if seed is None:
            yield
            return
        with torch.random.fork_rng(devices=[]):
            # torch.manual_seed would reseed every accelerator's generator too, which nothing restores
            torch.default_generator.manual_seed(seed)
            yield
