"""Weights: parameters, and tensors that were computed from parameters and not from samples.

What a use says about a weight is carried back to the parameters. Copies, transposes, slices of rows and reshapes are
followed exactly, as factors. Any other weight has a small graph of its own, and per-sample gradients at it are pulled
back through that graph: J^T g_i for all samples i, a few at a time.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from pmlf.engine.arithmetic import blocks, full_precision
from pmlf.engine.factors import Factors, Lookup, Outer
from pmlf.engine.graph import nodes_of
from pmlf.engine.layers import Contribution

_PULLED_BYTES = 1 << 26  # of cotangents at work at once
Named = Iterator[tuple[str, Contribution]]


class _Known(NamedTuple):
    tensor: Tensor  # kept: an id is that of a living tensor only
    copy_of: Tensor | None


class Weights:
    """The parameters of one pass, and every weight that was made from them."""

    def __init__(self, leaves: Mapping[str, Tensor]) -> None:
        self._leaves = leaves
        self._names = {id(leaf): name for name, leaf in leaves.items()}
        self._known = {id(leaf): _Known(leaf, None) for leaf in leaves.values()}
        self._waiting: dict[int, tuple[Tensor, Tensor]] = {}  # per-sample gradients at weights with graphs

    def __contains__(self, tensor: Tensor) -> bool:
        return id(tensor) in self._known

    def add(self, tensor: Tensor, copy_of: Tensor | None = None) -> None:
        """A new weight; `copy_of` another one, in another precision or at another place in memory."""
        self._known.setdefault(id(tensor), _Known(tensor, copy_of))

    def forget(self, tensor: Tensor) -> None:
        """Drop a weight that is none any more, because samples were written into it."""
        del self._known[id(tensor)]

    def name(self, tensor: Tensor) -> str:
        """The name of a parameter; a description of a weight that is made of parameters."""
        return self._names.get(id(tensor)) or "a weight made of parameters"

    def parameters_of(self, tensor: Tensor) -> set[str]:
        """The names of the parameters that a weight is made of."""
        if id(tensor) in self._names:
            return {self._names[id(tensor)]}
        leaves = (getattr(node, "variable", None) for node in nodes_of(tensor))
        return {self._names[id(leaf)] for leaf in leaves if leaf is not None and id(leaf) in self._names}

    def carried(self, weight: Tensor, found: Contribution) -> Named:
        """What a use says about a weight, as contributions to parameters; what has to be pulled back waits."""
        known = self._known[id(weight)]
        name = self._names.get(id(weight))
        if name is not None:
            yield name, found
        elif known.copy_of is not None:
            yield from self.carried(known.copy_of, found)
        else:
            base = weight._base
            seen = None if base is None or id(base) not in self._names else _through_view(weight, base, found)
            if seen is not None:
                assert base is not None
                yield self._names[id(base)], seen
            else:
                self._wait(weight, found)

    def pulled_back(self) -> Named:
        """The contributions that were waiting, pulled back to the parameters."""
        while self._waiting:
            _, (weight, rows) = self._waiting.popitem()
            for name, found in zip(self._leaves, self._pulled(weight, rows), strict=True):
                if found is not None:
                    yield name, found

    def _wait(self, weight: Tensor, found: Contribution) -> None:
        rows = formed(found).reshape(-1, *weight.shape)
        before = self._waiting.get(id(weight))
        self._waiting[id(weight)] = weight, rows if before is None else before[1] + rows

    def _pulled(self, weight: Tensor, rows: Tensor) -> list[Tensor | None]:
        leaves, parts = list(self._leaves.values()), list[list[Tensor | None]]()
        rows = rows.to(weight.dtype)
        for chosen in blocks(slice(0, len(rows)), 4 * weight.numel(), like=rows, together=_PULLED_BYTES):
            parts.append(vector_products(weight, leaves, rows[chosen]))
        return [
            None if each[0] is None else torch.cat([e for e in each if e is not None])
            for each in zip(*parts, strict=True)
        ]


def vector_products(output: Tensor, inputs: list[Tensor], rows: Tensor) -> list[Tensor | None]:
    """J^T row for every row, by vmap over the backward pass; one after the other where vmap cannot."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="There is a performance drop")  # slow is better than wrong
            return list(
                torch.autograd.grad(output, inputs, rows, is_grads_batched=True, retain_graph=True, allow_unused=True)
            )
    except RuntimeError:
        each = [torch.autograd.grad(output, inputs, row, retain_graph=True, allow_unused=True) for row in rows]
        return [
            None if found[0] is None else torch.stack([g for g in found if g is not None])
            for found in zip(*each, strict=True)
        ]


def of_its_kind(found: Contribution, weight: Tensor) -> Contribution:
    """A real weight has a real gradient, also where it meets complex numbers."""
    if weight.is_complex() or not found.dtype.is_complex:
        return found
    return formed(found).real.reshape(-1, *weight.shape)


def formed(found: Contribution) -> Tensor:
    """Per-sample gradients, each in its weight's own order in memory: (samples, size) of factors."""
    return found.formed() if isinstance(found, Factors) else full_precision(found)


def _through_view(view: Tensor, base: Tensor, found: Contribution) -> Contribution | None:
    """A contribution to a view of a parameter as one to the parameter; None for views that are not followed."""
    if not base.is_contiguous() or view.dtype != base.dtype:  # a complex view of a real parameter
        return None
    if view.ndim == 2 and base.ndim == 2 and view.shape == base.mT.shape and view.stride() == base.mT.stride():
        if isinstance(found, Outer):
            return replace(found, left=found.right, right=found.left, rows=found.cols, cols=found.rows)
        return formed(found).reshape(-1, *view.shape).mT
    if view.numel() == base.numel() and view.is_contiguous():
        return found if isinstance(found, (Outer, Lookup)) else formed(found).reshape(-1, *base.shape)
    return _through_rows(view, base, found)


def _through_rows(view: Tensor, base: Tensor, found: Contribution) -> Contribution | None:
    """Some rows of a parameter, one after the other, or one of them without its axis."""
    row = base.stride(0) if base.ndim else 0
    whole = view.shape[1:] == base.shape[1:] and view.ndim == base.ndim
    single = view.shape == base.shape[1:]
    if not row or not (whole or single) or not view.is_contiguous():
        return None
    start, total = (view.storage_offset() - base.storage_offset()) // row, base.shape[0]
    count = view.shape[0] if whole else 1
    if isinstance(found, Outer) and found.size == count * row:
        before = start * found.rows // count  # of the rows that its matrix has
        after = total * found.rows // count - before - found.rows
        return replace(found, left=F.pad(found.left, (before, after)), rows=before + found.rows + after)
    if whole and isinstance(found, Lookup) and found.rows == count:
        return replace(found, index=found.index + start, rows=total)
    rows = formed(found)
    out = rows.new_zeros(len(rows), *base.shape)
    out[:, start : start + count] = rows.reshape(len(rows), count, *base.shape[1:])
    return out
