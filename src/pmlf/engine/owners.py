"""Units of several records: what the records of a pass say is put together by unit, as further tokens of one sample.

A unit's vector is v_u = mean of its records' momenta, clipped once. The mean is in the loss (`averaged`), so a sum over
records is left. In factors it is a sum over tokens: the records' tokens, one after the other, are the unit's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, singledispatch
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pmlf.basics.batches import picked, select, to_device
from pmlf.basics.ids import id_array
from pmlf.engine.arithmetic import full_precision
from pmlf.engine.augmentation import Augmentation
from pmlf.engine.factors import Factors, Lookup, Outer
from pmlf.engine.losses import checked_losses
from pmlf.engine.passes import LossFunction
from pmlf.engine.patches import Patches
from pmlf.engine.plan import Plan


@dataclass(frozen=True, kw_only=True)
class Owners:
    """The unit that each record of a pass belongs to: `counts[u]` records of unit u, one unit after the other."""

    counts: tuple[int, ...]

    @property
    def units(self) -> int:
        return len(self.counts)

    @property
    def most(self) -> int:
        """Records of the unit that has most."""
        return max(self.counts)

    @cached_property
    def _units(self) -> Tensor:
        """The unit of every record."""
        return torch.repeat_interleave(torch.arange(self.units), torch.tensor(self.counts))

    @cached_property
    def _rows(self) -> tuple[Tensor, Tensor]:
        """Where each record goes among `most` rows for every unit, and the rows that are left over."""
        counts = torch.tensor(self.counts)
        places = torch.arange(int(counts.sum())) - (counts.cumsum(0) - counts)[self._units]
        taken = self._units * self.most + places
        left_over = torch.ones(self.units * self.most, dtype=torch.bool)
        left_over[taken] = False
        return taken, left_over.nonzero().flatten()

    def rows(self, tensor: Tensor) -> Tensor:
        """(records, ...) as (units, most, ...), zeros where a unit has fewer records, in the same order of memory."""
        if min(self.counts) == self.most:
            return tensor.unflatten(0, (self.units, self.most))
        taken, left_over = (each.to(tensor.device) for each in self._rows)
        last = tensor.ndim == 4 and tensor.is_contiguous(memory_format=torch.channels_last)
        order = torch.channels_last if last else torch.contiguous_format
        shape = (self.units * self.most, *tensor.shape[1:])
        found = torch.empty(shape, dtype=tensor.dtype, device=tensor.device, memory_format=order)
        found.index_copy_(0, taken, tensor).index_fill_(0, left_over, 0)
        return found.unflatten(0, (self.units, self.most))

    def together(self, contribution: Factors | Tensor) -> Factors | Tensor:
        """What the records of a pass say about a parameter, added up by unit."""
        if self.most == 1 and min(self.counts) == 1:
            return contribution
        if isinstance(contribution, Factors):
            return regrouped(contribution, self)
        if min(self.counts) == self.most:
            return full_precision(contribution).unflatten(0, (self.units, self.most)).sum(1)
        rows = full_precision(contribution)
        return rows.new_zeros(self.units, *rows.shape[1:]).index_add_(0, self._units.to(rows.device), rows)


@singledispatch
def regrouped(use: Factors, owners: Owners) -> Factors:
    """The same use with units for samples: a unit's tokens are those of its records, one after the other."""
    raise NotImplementedError(f"{type(use).__name__} has no rule for units")


@regrouped.register
def _outer(use: Outer, owners: Owners) -> Outer:
    left, right = (owners.rows(side).flatten(1, 2) for side in (use.left, use.right))
    return replace(use, samples=owners.units, tokens=owners.most * use.tokens, left=left, right=right)


@regrouped.register
def _lookup(use: Lookup, owners: Owners) -> Lookup:
    index, right = (owners.rows(side).flatten(1, 2) for side in (use.index, use.right))
    return replace(use, samples=owners.units, tokens=owners.most * use.tokens, index=index, right=right)


@regrouped.register
def _patches(use: Patches, owners: Owners) -> Patches:
    windows = len(use.grad) // use.samples  # rows of each record
    input, grad = (
        owners.rows(side.unflatten(0, (-1, windows)) if windows > 1 else side).reshape(-1, *side.shape[1:])
        for side in (use.input, use.grad)
    )
    return replace(use, samples=owners.units, tokens=owners.most * use.tokens, input=input, grad=grad)


class PassGroup(NamedTuple):
    """Samples whose momenta are built up together: their number, and the records of each pass with their owners."""

    samples: int
    passes: Sequence[tuple[slice, Owners | None]]


def groups(plan: Plan, records: int, counts: Sequence[int] | None) -> Iterator[PassGroup]:
    """The passes of a micro-batch, in order: those of a group add up, and a unit is in one group.

    Args:
        plan: How many records share a pass.
        records: The number of records in the micro-batch.
        counts: The number of records of each unit, one unit after the other; None where each record is a sample.
    """
    if counts is None:
        for part in plan.passes(records):
            yield PassGroup(part.stop - part.start, [(part, None)])
        return
    first, start = 0, 0
    while first < len(counts):
        last, size = first + 1, counts[first]
        while last < len(counts) and size + counts[last] <= plan.in_a_pass:
            size += counts[last]
            last += 1
        parts = [slice(start + part.start, start + part.stop) for part in plan.passes(size)]
        if len(parts) == 1:
            yield PassGroup(last - first, [(parts[0], Owners(counts=tuple(counts[first:last])))])
        else:  # one unit with more records than share a pass
            yield PassGroup(1, [(part, Owners(counts=(part.stop - part.start,))) for part in parts])
        first, start = last, start + size


class MicroBatch(NamedTuple):
    """Records that come together: their number, their indices, and, in a step of units, whose they are."""

    batch: Any
    size: int
    samples: Tensor | None
    counts: tuple[int, ...] | None = None  # records of each unit, one unit after the other
    units: frozenset[Any] = frozenset()

    def part(self, chosen: slice) -> MicroBatch:
        """Some of the records."""
        if chosen == slice(0, self.size):
            return self
        samples = None if self.samples is None else self.samples[chosen]
        return MicroBatch(select(self.batch, chosen), chosen.stop - chosen.start, samples)

    def on(self, device: torch.device) -> MicroBatch:
        """The same on a device."""
        return self._replace(batch=to_device(self.batch, device))

    def owned(self, units: Any, *, of_units: bool) -> MicroBatch:
        """The same, with the units that a step of units needs, and a step of records refuses."""
        if of_units:
            return self.by_unit(units)
        if units is not None:
            raise ValueError("units were given to a step of records: build it with units=True, or leave them out")
        return self

    def by_unit(self, units: Any) -> MicroBatch:
        """The records of each unit one after the other; beside each, the number of records that its unit has.

        Raises:
            ValueError: There is not one id for each record.
        """
        names = np.zeros(0, dtype=np.int64) if units is None else id_array(units)
        if len(names) != self.size:
            raise ValueError("a step of units needs the unit of each record: give units with one id per record")
        found, numbers, counts = np.unique(names, return_inverse=True, return_counts=True)
        order, batch, samples = np.argsort(numbers, kind="stable"), self.batch, self.samples
        if not np.array_equal(order, np.arange(self.size)):
            batch = picked(batch, order.tolist())
            samples = None if samples is None else samples[torch.from_numpy(order)]
        each = torch.from_numpy(np.repeat(counts, counts))
        return MicroBatch(
            (batch, each), self.size, samples, counts=tuple(counts.tolist()), units=frozenset(found.tolist())
        )


def averaged(loss_fn: LossFunction) -> LossFunction:
    """The loss of (records, sizes of their units): each record's loss over the number of records of its unit."""

    def of_units(model: Any, batch: tuple[Any, Tensor]) -> Tensor:
        records, counts = batch
        losses = checked_losses(loss_fn(model, records), len(counts), differentiable=False)
        return losses / counts.clamp(min=1)

    return of_units


def on_records(augmentation: Augmentation | None) -> Augmentation | None:
    """The augmentation of (records, sizes of their units), which changes the records."""
    if augmentation is None:
        return None
    change = augmentation.function
    return replace(augmentation, function=lambda batch, uniforms: (change(batch[0], uniforms), batch[1]))


def each_a_unit(batch_of: Callable[[list[int]], Any]) -> Callable[[list[int]], Any]:
    """Batches of some indices for a loss of units, each record by itself."""

    def given(indices: list[int]) -> Any:
        batch = batch_of(indices)
        return MicroBatch(batch, len(indices), None).by_unit(range(len(indices))).batch

    return given
