"""The states of global generators, by which random draws are seen, repeated and undone."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor


def generator_states(device: torch.device) -> tuple[Tensor, ...]:
    """The states of the CPU's generator and of the device's, if that is another one, as tensors on the host.

    >>> before = generator_states(torch.device("cpu"))
    >>> same_states(before, generator_states(torch.device("cpu")))
    True
    """
    states = [torch.default_generator.get_state()]
    if device.type not in ("cpu", "meta"):
        states.append(torch.get_device_module(device).get_rng_state())
    return tuple(states)


def same_states(before: tuple[Tensor, ...], after: tuple[Tensor, ...]) -> bool:
    """Whether nothing was drawn in between."""
    return len(before) == len(after) and all(map(torch.equal, before, after))


@contextmanager
def other_libraries_watched() -> Iterator[list[str]]:
    """Whose generators besides torch's are drawn from inside: a list that is filled at the end. They are put back.

    >>> with other_libraries_watched() as drawn_from:
    ...     number = random.random()
    >>> drawn_from
    ["Python's"]
    """
    found: list[str] = []
    before, numpy_before = random.getstate(), np.random.get_state()
    try:
        yield found
    finally:
        numpy_after: Any = np.random.get_state()
        if not all(np.array_equal(one, other) for one, other in zip(numpy_before, numpy_after, strict=True)):
            found.append("NumPy's")
        if random.getstate() != before:
            found.append("Python's")
        random.setstate(before)
        np.random.set_state(numpy_before)
