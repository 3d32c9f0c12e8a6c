"""Which sample each row of a use's output belongs to, found by marks in further backward passes and never guessed.

A row that is scaled by anything else than its sample's marks mixes samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from pmlf.engine.arithmetic import full_precision
from pmlf.engine.marks import DIGIT, alike

Order = Literal["major", "minor", "picked"]
# Where gradients are taken: at layers, where every weight is used by its own, or at operations. While it is undecided
# they are taken at layers.
Capture = Literal["undecided", "layers", "operations"]
_ALLOWED = 1e-3  # of a row's length


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Rows along `axis` are the samples': all of the first, then all of the second ("major"); the first of each, then
    the second of each ("minor"); or each that of the sample that `row_samples` names ("picked")."""

    axis: int
    samples: int
    order: Order = "major"
    row_samples: Tensor | None = None  # (rows,) the sample of each picked row; -1: nobody's, whose gradient is zero

    def by_sample(self, tensor: Tensor, axis: int | None = None) -> Tensor:
        """(samples, rows of each, *other axes): rows of picked ones are filled up with zeros."""
        rows = tensor.movedim(self.axis if axis is None else axis, 0)
        if self.order == "picked":
            return self._picked(rows)
        if self.order == "minor":
            return rows.unflatten(0, (-1, self.samples)).transpose(0, 1)
        return rows.unflatten(0, (self.samples, -1))

    def _picked(self, rows: Tensor) -> Tensor:
        assert self.row_samples is not None
        order = torch.argsort(self.row_samples, stable=True)
        order = order[int((self.row_samples < 0).sum()) :]
        counts = torch.bincount(self.row_samples[order], minlength=self.samples)
        within = torch.arange(len(order), device=rows.device) - (counts.cumsum(0) - counts)[self.row_samples[order]]
        found = rows.new_zeros(self.samples, max(1, int(counts.max())), *rows.shape[1:])
        found[self.row_samples[order], within] = rows[order]
        return found

    def mask(self, like: Tensor, sample: int) -> Tensor:
        """True where an element of such a tensor is the sample's; it broadcasts."""
        rows = like.shape[self.axis]
        if self.row_samples is not None:
            row_samples = self.row_samples
        else:
            place = torch.arange(rows, device=like.device)
            row_samples = place // max(1, rows // self.samples) if self.order == "major" else place % self.samples
        return (row_samples == sample).view(-1, *[1] * (like.ndim - 1 - self.axis))


def laid_out(grad: Tensor, marked: Sequence[Tensor], marks: Sequence[Tensor]) -> Layout | None:
    """The layout by which every row scales with its sample's marks; None where there is none."""
    samples, candidates = len(marks[0]), list[Layout]()
    for axis, size in enumerate(grad.shape):
        if size % samples == 0 and size:
            candidates += [Layout(axis=axis, samples=samples)]
            candidates += [Layout(axis=axis, samples=samples, order="minor")] if size > samples else []
    return next((layout for layout in candidates if bool(fits(grad, marked, marks, layout))), None)


def fits(grad: Tensor, marked: Sequence[Tensor], marks: Sequence[Tensor], layout: Layout | None) -> Tensor:
    """Whether every row scales with the marks of the sample that it has by this layout, as a flag on its device."""
    samples = len(marks[0])
    if layout is None or layout.order == "picked" or layout.axis >= grad.ndim or grad.shape[layout.axis] % samples:
        return torch.zeros((), dtype=torch.bool, device=grad.device)

    def flat(tensor: Tensor) -> Tensor:
        return layout.by_sample(tensor).flatten(0, 1).unsqueeze(-1).flatten(1)

    rows, each = flat(full_precision(grad)), grad.shape[layout.axis] // samples
    fitting = [
        alike(flat(scaled), rows, own.repeat_interleave(each), _ALLOWED).all()
        for scaled, own in zip(marked, marks, strict=True)
    ]
    return torch.stack(fitting).all()


def picked(grad: Tensor, marked: Sequence[Tensor], samples: int) -> Layout | None:
    """The sample of every row along some axis, by the digits of its number; None where rows mix samples."""
    for axis in range(grad.ndim):
        rows = full_precision(grad).movedim(axis, 0)
        rows = rows.reshape(len(rows), -1)
        lengths = torch.linalg.vector_norm(rows, dim=1)
        row_samples = torch.zeros(len(rows), dtype=torch.int64, device=rows.device)
        fitting = torch.ones(len(rows), dtype=torch.bool, device=rows.device)
        nobody = (lengths == 0.0) | ~lengths.isfinite()
        for digit, scaled in enumerate(marked):
            there = full_precision(scaled).movedim(axis, 0).reshape(rows.shape)
            ratio = torch.linalg.vector_norm(there, dim=1) / lengths
            found = (-ratio.log2() - 1.0).round().nan_to_num(0.0, 0.0, 0.0).clamp(0, DIGIT - 1)
            mark = 0.5 ** (1.0 + found)
            fitting &= alike(there, rows, mark, _ALLOWED)
            # rounding of rows that cancel is nobody's: to give it to somebody would be a guess
            nobody |= torch.linalg.vector_norm(there - rows * mark.unsqueeze(1), dim=1) > _ALLOWED * lengths * mark
            row_samples += found.long() * DIGIT**digit
        if bool(fitting.all()) and bool(((row_samples < samples) | nobody).all()):
            return Layout(axis=axis, samples=samples, order="picked", row_samples=row_samples.masked_fill(nobody, -1))
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
    """What was learned about a model's uses: where gradients are taken, the layout of each use, and which tables look
    like samples and are none.

    A decision is kept: a use that is proven to have this layout is not looked at again.
    """

    def __init__(self, *, by_operations: bool = False) -> None:
        self.capture: Capture = "operations" if by_operations else "undecided"
        self.layouts: dict[Key, Layout] = {}
        self.shared: set[int] = set()  # weights that have as many rows as there are samples, by chance

    @property
    def by_operations(self) -> bool:
        """Whether gradients are taken at operations."""
        return self.capture == "operations"

    def layout(self, key: Key, shape: torch.Size, samples: int) -> Layout | None:
        """The layout of a use, None where it is not known or does not fit the shape; a single sample has all rows."""
        found = self.layouts.get(key)
        fits = found is not None and found.axis < len(shape) and found.order != "picked"
        if found is not None and fits and shape[found.axis] % samples == 0:
            return replace(found, samples=samples)
        return Layout(axis=0, samples=1) if samples == 1 else None
