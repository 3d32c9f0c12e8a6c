"""Per-sample gradients of one parameter, held or as factors: their norms and their clipped sum.

The clipped sum of factors is one product with scaled rows, so no per-sample gradient need be formed. Where forming it
is cheaper (`strategy`) it is held, and points add up in place. The norm of a held gradient is taken of the very numbers
that are added; that of factors makes up for rounding (`norms`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pmlf.engine.arithmetic import blank, blocks, full_precision, squared_norms
from pmlf.engine.factors import Factors
from pmlf.engine.roots import Roots
from pmlf.engine.strategy import Cheapest, Strategy

_FORM_BYTES = 1 << 25  # sides of the samples formed at once: fewer and longer products, though patches leave the cache


class Workspace:
    """Memory for held gradients and scratch, and decisions about them, kept from one micro-batch to the next: fresh
    pages are slow, and the same shapes need no second decision."""

    def __init__(self, strategy: Strategy | None = None) -> None:
        self.strategy = strategy or Cheapest()
        self._buffers: dict[str, Tensor] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {"strategy": self.strategy, "_buffers": {}}  # their contents are sensitive: neither copied nor saved

    def scratch(self, like: Tensor) -> Tensor:
        """Uninitialised memory like a tensor, until the next call."""
        kept = self._kept("", like.dtype, like.device, like.numel())
        return kept.view(like.shape) if like.is_contiguous() else kept.as_strided(like.shape, _dense_strides(like))

    def part(self, like: Tensor, dtype: torch.dtype) -> Tensor:
        """Uninitialised memory of a tensor's shape in another precision, until the next call."""
        return self._kept("part", dtype, like.device, like.numel()).view(like.shape)

    def buffer(self, name: str, factors: Factors, samples: int) -> Tensor:
        """(samples, size), uninitialised, for the gradients of the parameter `name`."""
        like = factors.like
        return self._kept(name, like.dtype, like.device, samples * factors.size).view(samples, factors.size)

    def _kept(self, name: str, dtype: torch.dtype, device: torch.device, needed: int) -> Tensor:
        kept = self._buffers.get(name)
        if kept is None or kept.numel() < needed or kept.dtype != dtype or kept.device != device:
            kept = self._buffers[name] = torch.empty(needed, dtype=dtype, device=device)
        return kept if kept.numel() == needed else kept[:needed]


class ParameterGradient:
    """All that a micro-batch says about one parameter: contributions of every use at every point, added up."""

    def __init__(self, name: str, workspace: Workspace) -> None:
        self._name = name
        self._strategy = workspace.strategy
        self._workspace = workspace
        self._held: Tensor | None = None  # (samples, size)
        self._part: Tensor | None = None  # (n, size): a slice formed late, in what the backward pass has let go
        self._total: Tensor | None = None  # (size,): clipped sum of the slices formed late
        self._like: Factors | None = None  # whose order the held gradients are in; None: the parameter's own
        self.factors: list[Factors] = []  # what was not formed yet

    def add_formed(self, gradient: Tensor) -> None:
        """Add per-sample gradients (samples, *shape), which may be others' too: they are not written to."""
        self._in_own_order()
        rows = full_precision(gradient).reshape(len(gradient), -1)
        self._held = rows if self._held is None else self._held + rows

    def add(self, factors: Factors, points: int) -> None:
        """Add one use, formed or kept as factors, whichever is better for `points` times its tokens.

        Two uses of one parameter may see it as matrices of different forms: then all are formed in its own order.
        """
        before = self._like or (self.factors[0] if self.factors else factors)
        own = self._held is not None and self._like is None
        if own or (before.order, before.rows, before.cols) != (factors.order, factors.rows, factors.cols):
            self.add_formed(factors.formed())
            return
        if self._held is None and (self.factors or not self._strategy.holds_at_once(factors, points)):
            merged = self.factors[-1].merged(factors) if self.factors else None
            if merged is None:
                self.factors.append(factors)
            else:
                self.factors[-1] = merged
            return
        add = self._held is not None
        if self._held is None:
            self._held, self._like = self._workspace.buffer(self._name, factors, factors.samples), factors
        for block in blocks(slice(0, factors.samples), 4 * factors.side_size, like=self._held, together=_FORM_BYTES):
            factors.form(block, self._held[block], add=add)

    def _in_own_order(self) -> None:
        """All that was added so far as gradients in the parameter's own order."""
        if self._held is not None and self._like is not None:
            self._held = self._like.in_own_order(self._held).clone()
        for factors in self.factors:
            rows = factors.formed()
            self._held = rows if self._held is None else self._held + rows
        self._like, self.factors = None, []

    def norms(self, roots: Roots) -> tuple[Tensor, Tensor | None]:
        """(norm^2, slack) of every sample, float64, norm^2 never below the true one, slack for the sum's rounding."""
        if self._held is not None:
            return squared_norms(self._held), None
        return self._strategy.norms(self.factors, roots)

    def formed(self, chosen: slice) -> Tensor:
        """The gradients of some samples, (n, size), until the next call; for `add_clipped` unless they are held."""
        if self._held is not None:
            return self._held[chosen]
        self._like, samples = self.factors[0], chosen.stop - chosen.start
        if self._part is None or len(self._part) < samples:
            self._part = self._like.like.new_empty(samples, self._like.size)
        part = self._part[:samples]
        for block in blocks(chosen, 4 * self._like.side_size, like=part, together=_FORM_BYTES):  # for all uses
            out = part[block.start - chosen.start : block.stop - chosen.start]
            for index, factors in enumerate(self.factors):
                factors.form(block, out, add=index > 0)
        return part

    def add_clipped(self, part: Tensor, scale: Tensor, refused: Tensor | None) -> None:
        """Take up the clipped sum of some samples; those marked in `refused` add nothing, whatever is in their rows."""
        part = part if refused is None else part.masked_fill_(refused.to(part.device).unsqueeze(1), 0.0)
        if self._total is None:
            self._total = part.new_zeros(part.shape[1])
        self._total.addmv_(part.mT, scale.to(part))

    def forget_factors(self) -> None:
        """Drop the factors: `add_clipped` has taken up all samples."""
        self.factors = []

    def forget_total(self) -> None:
        """Drop what `add_clipped` has taken up."""
        self._total = None

    def set_aside(self, taken: Tensor) -> None:
        """Drop the factors of the marked samples, which `add_clipped` has taken up; gradients that are held stay."""
        self.factors = [factors.without(taken) for factors in self.factors]

    def blank_out(self, refused: Tensor) -> None:
        """Set the gradients of the samples marked in `refused` to zero."""
        if self._held is not None:
            self._held = blank(self._held, refused)
        self.factors = [factors.without(refused) for factors in self.factors]

    def write_clipped_sum(self, scale: Tensor, out: Tensor, *, add: bool) -> None:
        """out = sum_i scale_i * gradient_i, or out += it; then forget the gradients, to make room."""
        total = self._total
        if self._held is not None:
            total = scale.to(self._held) @ self._held
        if total is not None:
            arranged = total.view(out.shape) if self._like is None else self._like.arranged(total, out.shape)
            out.add_(arranged) if add else out.copy_(arranged)
            add = True
        for factors in self.factors:
            if factors.dtype == out.dtype:
                factors.write_clipped_sum(scale, out, add=add, scratch=self._workspace.scratch)
            else:
                part = self._workspace.part(out, factors.dtype)
                factors.write_clipped_sum(scale, part, add=False, scratch=self._workspace.scratch)
                out.add_(part) if add else out.copy_(part)
            add = True
        self._held, self._part, self._total, self.factors = None, None, None, []  # served


def _dense_strides(tensor: Tensor) -> tuple[int, ...]:
    """The tensor's strides if it fills its memory (contiguous, channels-last), else contiguous ones."""
    return torch.empty_like(tensor, device="meta").stride()
