"""The states of torch's global generators, by which random draws are seen, repeated and undone."""

from __future__ import annotations

import torch
from torch import Tensor


def generator_states(device: torch.device) -> tuple[Tensor, ...]:
    """Of the CPU's generator and of the device's, if that is another one. They are on the host.

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
