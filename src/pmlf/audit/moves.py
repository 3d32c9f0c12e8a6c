"""Moves of the hill climb: random changes of the record and of the other records in its batch.

Floating-point values may become anything. Integers (labels, tokens, masks) stay within the range of the examples.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pmlf.basics.batches import batch_size, tensors_of, without

_LARGEST_POWER = 6.0  # values are scaled by 10^-6 to 10^6
_HUGE = 1e6


@dataclass(frozen=True, kw_only=True)
class Range:
    """The values of the examples in one tensor of a batch."""

    least: float
    most: float
    values: Tensor  # all of them, flat, to copy from


def ranges(examples: Any) -> list[Range]:
    """The range of each tensor of a batch, in order."""
    found = []
    for tensor in tensors_of(examples):
        values = tensor.reshape(-1)
        found.append(Range(least=float(values.min()), most=float(values.max()), values=values))
    return found


@dataclass(frozen=True, kw_only=True)
class Moved:
    """A batch after a move, the name of the move, and whether it changed records other than the last."""

    batch: Any
    name: str
    others_changed: bool


def move(batch: Any, seen: list[Range], generator: torch.Generator) -> Moved:
    """Apply a random move: to the last record (the one the search is about), to another one, or to all others."""
    size = batch_size(batch)
    scope = _uniform(generator) if size > 1 else 0.0
    if scope < 0.5:
        return _moved(batch, slice(size - 1, size), "", seen, generator)
    if scope < 0.75:
        return _moved(batch, slice(0, size - 1), ", of all others", seen, generator)
    row = _below(size - 1, generator)
    if scope < 0.85:
        return _moved(batch, slice(row, row + 1), ", of another", seen, generator)
    if scope < 0.95 or size == 2:
        batch = copy.deepcopy(batch)
        for tensor in tensors_of(batch):
            tensor[row] = tensor[-1]
        return Moved(batch=batch, name="make another a copy of it", others_changed=True)
    return Moved(batch=without(batch, row), name="leave another out", others_changed=True)


def _moved(batch: Any, rows: slice, whose: str, seen: list[Range], generator: torch.Generator) -> Moved:
    """Change some rows of one tensor of the batch, by a random move for its dtype."""
    batch = copy.deepcopy(batch)
    tensors = tensors_of(batch)
    chosen = _below(len(tensors), generator)
    part = tensors[chosen][rows]
    moves = _FLOAT_MOVES if part.is_floating_point() else _INTEGER_MOVES
    name = list(moves)[_below(len(moves), generator)]
    values = moves[name](part.reshape(-1).cpu(), seen[chosen], generator)
    part.copy_(values.reshape(part.shape))
    return Moved(batch=batch, name=name + whose, others_changed=bool(whose))


_Change = Callable[[Tensor, Range, torch.Generator], Tensor]


def _scaled(values: Tensor, seen: Range, generator: torch.Generator) -> Tensor:
    power = 2 * _uniform(generator) - 1
    return values * 10.0 ** (_LARGEST_POWER * power * abs(power))  # small powers more often than large ones


def _perturbed(values: Tensor, seen: Range, generator: torch.Generator) -> Tensor:
    return values + _spread(seen, generator) * torch.randn(values.shape, generator=generator)


def _pushed(values: Tensor, seen: Range, generator: torch.Generator) -> Tensor:
    signs = torch.randint(2, values.shape, generator=generator) * 2 - 1
    return values + _spread(seen, generator) * signs


def _flipped(values: Tensor, seen: Range, generator: torch.Generator) -> Tensor:
    return torch.where(_some(values, generator), -values, values)


def _huge(values: Tensor, seen: Range, generator: torch.Generator) -> Tensor:
    signs = torch.randint(2, values.shape, generator=generator) * 2 - 1
    return torch.where(_some(values, generator), _HUGE * signs, values)


def _zeroed(values: Tensor, seen: Range, generator: torch.Generator) -> Tensor:
    return torch.where(_some(values, generator), 0.0, values)


def _copied(values: Tensor, seen: Range, generator: torch.Generator) -> Tensor:
    """Values of the examples, in random places."""
    places = torch.randint(len(seen.values), values.shape, generator=generator)
    return torch.where(_some(values, generator), seen.values.cpu()[places], values)


def _levelled(values: Tensor, seen: Range, generator: torch.Generator) -> Tensor:
    """A single value of the examples, everywhere."""
    return seen.values.cpu()[_below(len(seen.values), generator)].expand_as(values)


def _redrawn(values: Tensor, seen: Range, generator: torch.Generator) -> Tensor:
    drawn = torch.randint(int(seen.least), int(seen.most) + 1, values.shape, generator=generator)
    return torch.where(_some(values, generator), drawn.to(values.dtype), values)


_FLOAT_MOVES: dict[str, _Change] = {
    "scale": _scaled,
    "add Gaussians": _perturbed,
    "add signs": _pushed,
    "flip signs": _flipped,
    "make huge": _huge,
    "make zero": _zeroed,
    "copy values of other records": _copied,
    "make constant": _levelled,
}
_INTEGER_MOVES: dict[str, _Change] = {
    "redraw labels or tokens": _redrawn,
    "copy labels or tokens of other records": _copied,
    "make labels or tokens constant": _levelled,
}


def _some(values: Tensor, generator: torch.Generator) -> Tensor:
    """Which values to change: all, or each with one random probability; always at least one."""
    if len(values) == 1 or _uniform(generator) < 0.4:
        return torch.ones(values.shape, dtype=torch.bool)
    chosen = torch.rand(values.shape, generator=generator) < _uniform(generator)
    chosen[_below(len(values), generator)] = True
    return chosen


def _spread(seen: Range, generator: torch.Generator) -> float:
    return (seen.most - seen.least or 1.0) * 10.0 ** (5 * _uniform(generator) - 3)


def _uniform(generator: torch.Generator) -> float:
    return float(torch.rand((), generator=generator))


def _below(count: int, generator: torch.Generator) -> int:
    return int(torch.randint(count, (), generator=generator))
