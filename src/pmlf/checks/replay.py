"""The random draws of a batch, repeated for one of its samples alone.

Dropout draws one mask for all samples. For a sample that runs again alone, the same mask is drawn, and the sample gets
its part of it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class CannotFollow(Exception):
    """A sample alone draws other random numbers than in its batch."""


class Draw(NamedTuple):
    """One random operation on a batch, and the state of its generator before."""

    operation: Any
    shape: torch.Size
    stride: tuple[int, ...]
    generator: torch.Generator
    state: Tensor


def _is_draw(func: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in func.tags and "scaled_dot_product" not in str(func)


class RecordedDraws(TorchDispatchMode):
    """Records every random operation."""

    def __init__(self) -> None:
        super().__init__()
        self.draws: list[Draw] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not _is_draw(func):
            return func(*args, **kwargs)
        generator = _generator(args, kwargs)
        state = generator.get_state()
        found = func(*args, **kwargs)
        drawn = found[-1] if isinstance(found, tuple) else found
        self.draws.append(Draw(func, drawn.shape, drawn.stride(), generator, state))
        return found


class ReplayedDraws(TorchDispatchMode):
    """Gives one sample of a batch its part of every draw, in order."""

    def __init__(self, draws: list[Draw], sample: int, samples: int) -> None:
        super().__init__()
        self._draws = iter(draws)
        self._sample, self._samples = sample, samples

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not _is_draw(func):
            return func(*args, **kwargs)
        draw = next(self._draws, None)
        if draw is None or draw.operation is not func:
            raise CannotFollow
        generator = _generator(args, kwargs)
        before = generator.get_state()
        generator.set_state(draw.state)
        try:
            return self._part(draw, func, args, kwargs)
        finally:
            generator.set_state(before)

    def _part(self, draw: Draw, func: Any, args: Any, kwargs: Any) -> Any:
        if sum(isinstance(value, Tensor) for value in args) > 1:
            raise CannotFollow
        first = args[0] if args and isinstance(args[0], Tensor) else None
        size = next((value for value in args if isinstance(value, (list, tuple))), None)
        alone = first.shape if first is not None else torch.Size(size or ())
        if alone == draw.shape:
            return func(*args, **kwargs)
        axes = [axis for axis, (one, all_) in enumerate(zip(alone, draw.shape, strict=False)) if one != all_]
        if len(alone) != len(draw.shape) or len(axes) != 1 or draw.shape[axes[0]] != self._samples * alone[axes[0]]:
            raise CannotFollow
        axis, each = axes[0], alone[axes[0]]

        def own(drawn: Tensor) -> Tensor:
            return drawn.narrow(axis, self._sample * each, each)

        if first is None:
            return own(func(*(list(draw.shape) if value is size else value for value in args), **kwargs)).clone()
        everything = torch.empty_strided(draw.shape, draw.stride, dtype=first.dtype, device=first.device)
        everything.copy_(first.repeat_interleave(self._samples, axis))
        found = func(everything, *args[1:], **kwargs)
        if func._schema.is_mutable:
            return first.copy_(own(everything))
        return tuple(own(part).clone() for part in found) if isinstance(found, tuple) else own(found).clone()


def _generator(args: Any, kwargs: Any) -> torch.Generator:
    given = next((value for value in (*args, *kwargs.values()) if isinstance(value, torch.Generator)), None)
    if given is not None:
        return given
    device = next((value.device for value in args if isinstance(value, Tensor)), kwargs.get("device"))
    if device is None or torch.device(device).type == "cpu":
        return torch.default_generator
    module = torch.get_device_module(torch.device(device))
    return module.default_generators[torch.device(device).index or 0]
