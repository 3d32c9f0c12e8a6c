"""Which sample each row of a use's output belongs to, found by marks in a second backward pass and never guessed.

The loss of every sample is scaled by a power of two of its own. Scaling by it rounds nothing, so a row of a gradient
that belongs to one sample is scaled by exactly that sample's mark. A row that is scaled by anything else mixes samples.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from pmlf.engine.arithmetic import full_precision

Order = Literal["major", "minor", "picked"]
_DISTINCT = 24  # powers of two that float32 has room for
DIGIT = 16  # powers of two of one pass that names the owners of picked rows
_ALLOWED = 1e-3  # of a row's length
_NOISE = 1e-6  # of the longest row: what cancels leaves rounding


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Rows along `axis` are the samples': all of the first, then all of the second ("major"); the first of each, then
    the second of each ("minor"); or each that of its owner ("picked")."""

    axis: int
    samples: int
    order: Order = "major"
    owners: Tensor | None = None  # (rows,) of picked rows; -1: nobody's, whose gradient is zero

    def by_sample(self, tensor: Tensor, axis: int | None = None) -> Tensor:
        """(samples, rows of each, *other axes): rows of picked ones are filled up with zeros."""
        rows = tensor.movedim(self.axis if axis is None else axis, 0)
        if self.order == "picked":
            return self._picked(rows)
        if self.order == "minor":
            return rows.unflatten(0, (-1, self.samples)).transpose(0, 1)
        return rows.unflatten(0, (self.samples, -1))

    def _picked(self, rows: Tensor) -> Tensor:
        assert self.owners is not None
        order = torch.argsort(self.owners, stable=True)
        order = order[int((self.owners < 0).sum()) :]
        counts = torch.bincount(self.owners[order], minlength=self.samples)
        within = torch.arange(len(order), device=rows.device) - (counts.cumsum(0) - counts)[self.owners[order]]
        found = rows.new_zeros(self.samples, max(1, int(counts.max())), *rows.shape[1:])
        found[self.owners[order], within] = rows[order]
        return found

    def mask(self, like: Tensor, sample: int) -> Tensor:
        """True where an element of such a tensor is the sample's; it broadcasts."""
        rows = like.shape[self.axis]
        if self.owners is not None:
            owners = self.owners
        else:
            place = torch.arange(rows, device=like.device)
            owners = place // max(1, rows // self.samples) if self.order == "major" else place % self.samples
        return (owners == sample).view(-1, *[1] * (like.ndim - 1 - self.axis))


def random_marks(loss: Tensor) -> Tensor:
    """A power of two for every sample, drawn anew: all different where there are few samples."""
    samples = len(loss)
    drawn = torch.tensor(list(os.urandom(2 * max(samples, _DISTINCT))), dtype=torch.float64)
    exponents = drawn[:_DISTINCT].argsort()[:samples] if samples <= _DISTINCT else drawn[:samples] % _DISTINCT
    return (0.5 ** exponents.double()).to(loss)


def digit_marks(loss: Tensor, digit: int) -> Tensor:
    """Powers of two that are one digit of every sample's number."""
    numbers = torch.arange(len(loss), device=loss.device)
    return (0.5 ** ((numbers // DIGIT**digit) % DIGIT).double()).to(loss)


def digits_for(samples: int) -> int:
    """How many passes name the owner of any row."""
    digits = 1
    while DIGIT**digits < samples:
        digits += 1
    return digits


def laid_out(grad: Tensor, marked: Tensor, marks: Tensor) -> Layout | None:
    """The layout by which every row scales with its sample's mark; None where there is none."""
    samples, candidates = len(marks), list[Layout]()
    for axis, size in enumerate(grad.shape):
        if size % samples == 0 and size:
            candidates += [Layout(axis=axis, samples=samples)]
            candidates += [Layout(axis=axis, samples=samples, order="minor")] if size > samples else []
    return next((layout for layout in candidates if bool(fits(grad, marked, marks, layout))), None)


def fits(grad: Tensor, marked: Tensor, marks: Tensor, layout: Layout | None) -> Tensor:
    """Whether every row scales with the mark of the sample that it has by this layout, as a flag on its device."""
    if layout is None or layout.order == "picked" or layout.axis >= grad.ndim or grad.shape[layout.axis] % len(marks):
        return torch.zeros((), dtype=torch.bool, device=grad.device)
    rows, scaled = (layout.by_sample(full_precision(each)) for each in (grad, marked))
    rows, scaled = (each.reshape(*each.shape[:2], -1) for each in (rows, scaled))
    wanted = rows * marks.to(rows).view(-1, 1, 1)
    return _alike(scaled.flatten(0, 1), wanted.flatten(0, 1)).all()


def _alike(some: Tensor, wanted: Tensor) -> Tensor:
    """Row by row but for rounding; rows that are not finite tell nothing and add nothing."""
    distance, lengths = (torch.linalg.vector_norm(each, dim=1) for each in (some - wanted, wanted))
    smallest = _NOISE * torch.where(lengths.isfinite(), lengths, 0.0).max() if len(lengths) else 0.0
    return (distance <= _ALLOWED * lengths + smallest) | ~distance.isfinite()


def picked(grad: Tensor, marked: list[Tensor], samples: int) -> Layout | None:
    """The owner of every row along some axis, by the digits of its number; None where rows mix samples."""
    for axis in range(grad.ndim):
        rows = full_precision(grad).movedim(axis, 0)
        rows = rows.reshape(len(rows), -1)
        lengths = torch.linalg.vector_norm(rows, dim=1)
        owners = torch.zeros(len(rows), dtype=torch.int64, device=rows.device)
        fits = torch.ones(len(rows), dtype=torch.bool, device=rows.device)
        nobody = (lengths == 0.0) | ~lengths.isfinite()
        for digit, scaled in enumerate(marked):
            there = full_precision(scaled).movedim(axis, 0).reshape(rows.shape)
            ratio = torch.linalg.vector_norm(there, dim=1) / lengths
            found = (-ratio.log2()).round().nan_to_num(0.0, 0.0, 0.0).clamp(0, DIGIT - 1)
            wanted = rows * (0.5**found).to(rows).unsqueeze(1)
            fits &= _alike(there, wanted)
            # rounding of rows that cancel is nobody's: to give it to somebody would be a guess
            nobody |= torch.linalg.vector_norm(there - wanted, dim=1) > _ALLOWED * torch.linalg.vector_norm(
                wanted, dim=1
            )
            owners += found.long() * DIGIT**digit
        if bool(fits.all()) and bool(((owners < samples) | nobody).all()):
            return Layout(axis=axis, samples=samples, order="picked", owners=owners.masked_fill(nobody, -1))
    return None


class Key(NamedTuple):
    """Which use of a forward pass: its number, its operation, its weights, the axes of its output, and which question
    about rows that are presumed to be the samples'."""

    number: int
    operation: str
    weights: tuple[str, ...]
    axes: int
    question: int = 0


class Learned:
    """What was learned about a model's uses: the layout of each, and which tables look like samples and are none.

    A decision is kept: a use that is proven to have this layout is not looked at again.
    """

    def __init__(self, *, by_operations: bool = False) -> None:
        self.by_operations = by_operations  # or at layers, where every weight is used by its own
        self.looked_at = by_operations  # whether it is known that it is
        self.layouts: dict[Key, Layout] = {}
        self.shared: set[int] = set()  # weights that have as many rows as there are samples, by chance

    def layout(self, key: Key, shape: torch.Size, samples: int) -> Layout | None:
        """Of a use, where it is known and follows from the shape; a single sample has all rows."""
        found = self.layouts.get(key)
        fits = found is not None and found.axis < len(shape) and found.order != "picked"
        if found is not None and fits and shape[found.axis] % samples == 0:
            return replace(found, samples=samples)
        return Layout(axis=0, samples=1) if samples == 1 else None
